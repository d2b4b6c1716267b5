"""Merge models into one: `python -m xscale.merge A B C --how mean|weighted|ema|ties --out HF_DIR`.

A model is a Hugging Face directory, a checkpoint, or a run (its newest checkpoint). `mean` and `weighted`
average the models. `ema` takes the exponential moving average of the checkpoints of one run, or of several models,
which must be given from the oldest to the newest. `ties` adds the merged changes of the models to the model --base,
from which they were trained (Yadav et al. 2023). All models must have the same tokenizer, configuration and shapes.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.restore import load_run
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError, check_arguments, report_error
from xscale.eval.card import merged_card
from xscale.eval.hf_directory import check_new_directory, write_directory
from xscale.eval.sentence_files import read_pooling, trained_pooling
from xscale.models.build import dropout_fields, read_pretrained
from xscale.models.heads import SavedHeads, load_heads
from xscale.plugins import load_plugins

NOT_COMPARED = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "xscale")
"""The fields of a model's config, besides dropout, in which merged models may differ."""
HELD_OUT = "lexicon_heldout"


@dataclass
class MergeModel:
    """A model to merge, in fp32."""

    name: str
    lm: PreTrainedModel
    heads: dict[str, SavedHeads]
    tokenizer_path: Path
    pooling: str

    def named_weights(self) -> dict[str, Tensor]:
        """Return the weights of the model and of its heads by name. Tied weights occur once."""
        heads = {f"heads.{stream}.{part}": w for stream, of in self.heads.items() for part, w in of.weights.items()}
        return {name: weight.detach() for name, weight in self.lm.named_parameters()} | heads

    def common_properties(self) -> dict[str, Any]:
        """Return the properties that all merged models must have in common."""
        tokenizer, config, trained = Tokenizer(self.tokenizer_path), self.lm.config.to_dict(), self.lm.config.xscale
        facts: dict[str, Any] = {"tokenizer": (tokenizer.fingerprint, tokenizer.special)}
        facts |= {name: trained.get(name, False) for name in ("language_embeddings", "reset_positions")}
        facts["languages"] = trained["languages"] if facts["language_embeddings"] else None
        left_out = {*NOT_COMPARED, *dropout_fields(self.lm.config.model_type, 0.0)}
        facts |= {name: value for name, value in config.items() if name not in left_out}
        shapes = {
            name: tuple(weight.shape) for name, weight in self.named_weights().items() if not name.startswith("heads.")
        }
        return facts | shapes


def load_model(path: Path) -> MergeModel:
    """Return the model of a run, a checkpoint or a Hugging Face directory. Raises UserError."""
    if checkpoints.is_run(path):
        found = checkpoints.resolve_checkpoint(path)
        lm, heads = load_run(found)
        pooling = trained_pooling(checkpoints.read_checkpoint(found).identity["recipe"]["streams"])
        return MergeModel(str(found), lm, heads, found / checkpoints.HF, pooling)
    lm, has_head = read_pretrained("model", path)
    if not has_head:
        raise UserError(f"{path} has no masked-LM head, so that its head would be random; merge models that have one")
    lm.config.xscale = getattr(lm.config, "xscale", None) or {}
    return MergeModel(str(path), lm, load_heads(path), path, read_pooling(path))


def check_mergeable(models: list[MergeModel]) -> None:
    """Raise UserError if a model does not fit the first one."""
    first = models[0].common_properties()
    for model in models[1:]:
        ours = model.common_properties()
        if differing := [name for name in {**first, **ours} if first.get(name) != ours.get(name)]:
            name = differing[0]
            raise UserError(
                f"{model.name} has {name} {ours.get(name)}, but {models[0].name} has {first.get(name)}; merge models "
                f"that were trained from the same model"
            )


def average(vectors: list[Tensor], shares: list[float]) -> Tensor:
    """Return the average of the vectors, weighted by `shares`, which are scaled to a sum of 1."""
    total = sum(shares)
    merged = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector, share in zip(vectors, shares, strict=True):
        merged += vector.double() * (share / total)
    return merged.float()


def ties_change(vectors: list[Tensor], density: float) -> Tensor:
    """Return the merged change of the base model's weights (Yadav et al. 2023, algorithm 1 with a lambda of 1).

    vectors: each model's change. Trim: of each change, only the share `density` of largest magnitudes is kept. Elect:
    an element's sign is that of its sum over models. Disjoint mean: the elements of that sign are averaged.
    """
    trimmed = []
    for vector in vectors:
        size, kept = vector.abs(), max(1, round(density * len(vector)))
        least = size.kthvalue(len(vector) - kept + 1).values
        trimmed.append(vector.where(size >= least, 0.0))
    sign = torch.stack(trimmed).sum(0).sign()
    agreeing = torch.stack([vector.where(vector.sign() == sign, 0.0) for vector in trimmed])
    return agreeing.sum(0) / (agreeing != 0).sum(0).clamp(min=1)


def combine(vectors: list[Tensor], args: argparse.Namespace) -> Tensor:
    """Return the merged weights. vectors: the flat weights of each model; for ties, the base model's are last."""
    if args.how == "ties":
        *vectors, base = vectors
        return base + ties_change([vector - base for vector in vectors], args.density)
    shares = args.weights or [
        args.decay ** (len(vectors) - n) if args.how == "ema" else 1.0 for n in range(len(vectors))
    ]
    return average(vectors, shares)


def merge(models: list[MergeModel], args: argparse.Namespace) -> MergeModel:
    """Check that the models fit, write the merged weights into the first model, and return it. Raises UserError."""
    check_mergeable(models)
    weights = [model.named_weights() for model in models]
    first = models[0]
    shared = [name for name, w in weights[0].items() if all(name in of and of[name].shape == w.shape for of in weights)]
    merged = combine([torch.cat([of[name].flatten() for name in shared]) for of in weights], args)
    ours = [weights[0][name] for name in shared]
    for weight, numbers in zip(ours, merged.split([weight.numel() for weight in ours]), strict=True):
        weight.copy_(numbers.view_as(weight))
    lost = {name.split(".")[1] for name in weights[0].keys() - set(shared)}  # check_mergeable compares other weights
    for stream in sorted(lost):
        print(f"the heads of stream {stream} are left out, because not all models have them")
        del first.heads[stream]
    if HELD_OUT in first.lm.config.xscale:
        first.lm.config.xscale[HELD_OUT] = min(model.lm.config.xscale.get(HELD_OUT, 1.0) for model in models)
    return first


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--how", choices=("mean", "weighted", "ema", "ties"), default="mean")
    parser.add_argument("--out", type=Path, required=True, metavar="HF_DIR")
    parser.add_argument("--weights", type=float, nargs="+", help="weighted: a number for each model")
    parser.add_argument(
        "--decay", type=float, default=0.8, help="ema: the weight of each model divided by that of the next one"
    )
    parser.add_argument("--base", type=Path, help="ties: the model from which the others were trained")
    parser.add_argument("--density", type=float, default=0.2, help="ties: the share of each model's changes that stay")
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    args = parser.parse_args(argv)
    if args.how == "ema" and len(args.models) == 1:
        args.models = checkpoints.complete_steps(args.models[0] / "checkpoints")
    if len(args.models) < 2:
        parser.error("give two models or more, or for --how ema a run with two checkpoints or more")
    if (args.how == "weighted") != bool(args.weights) or (args.weights and len(args.weights) != len(args.models)):
        parser.error(f"--how weighted needs --weights with {len(args.models)} numbers, and only weighted does")
    if args.weights and (min(args.weights) < 0 or not 0 < sum(args.weights) < float("inf")):
        parser.error(
            f"--weights {args.weights}: the weights must be finite and not negative, and at least one must be above 0"
        )
    if (args.how == "ties") != bool(args.base):
        parser.error("--how ties needs --base, the model from which the others were trained, and only ties does")
    if not (0 < args.density <= 1 and 0 < args.decay <= 1):
        parser.error("--density and --decay are numbers above 0, up to 1")
    return args


def main() -> int:
    args = parse_arguments()
    try:
        check_arguments(sys.argv[1:])
        load_plugins(args.plugin)
        check_new_directory(args.out)
        models = [load_model(path) for path in [*args.models, *([args.base] if args.base else [])]]
        merged = merge(models, args)
        names, name = [model.name for model in models], args.out.resolve().name
        card = merged_card(names, args.how, merged.lm.config, name, merged.pooling)
        write_directory(args.out, merged.lm, merged.heads, merged.tokenizer_path, merged.pooling, merged.name, card)
    except (UserError, OSError) as error:
        return report_error(error)
    print(json.dumps({"how": args.how, "models": names, "out": str(args.out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
