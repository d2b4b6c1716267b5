"""A checkpoint as a Hugging Face directory: `python -m xscale.export CHECKPOINT_OR_RUN_DIR HF_DIR`.

Writes weights, config and tokenizer that `AutoModelForMaskedLM.from_pretrained` loads; of a run, its newest checkpoint.
"""

import argparse
import contextlib
import io
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel

from xscale.errors import UserError
from xscale.models.build import dropout_fields, positions
from xscale.run import checkpoint as checkpoints

PREFIX = "encoder.lm."
"""Of the encoder's parameters in the engine's module."""


def find(path: Path) -> Path:
    """The checkpoint directory that `path` is, or the newest complete one of the run that it is."""
    if (path / checkpoints.MANIFEST).exists():
        return path
    steps = checkpoints.complete_steps(path / "checkpoints") or checkpoints.complete_steps(path)
    if not steps:
        raise UserError(f"{path} is neither a checkpoint (no {checkpoints.MANIFEST}) nor a run with a complete one")
    return steps[-1]


def is_run(path: Path) -> bool:
    """Whether `path` is a run or a checkpoint of ours rather than a Hugging Face directory."""
    return (path / checkpoints.MANIFEST).exists() or (path / "checkpoints").is_dir()


def full_weights(path: Path) -> dict[str, Tensor]:
    """fp32 weights of the whole module, from the ZeRO partitions where there are any."""
    if list(path.glob("*zero_pp_rank_*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        unread = io.StringIO()  # progress bars and remarks
        with contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
            return get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
    return torch.load(path / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)["module"]


def load_model(path: str | Path, dropout: float | None = None) -> PreTrainedModel:
    """The Hugging Face model of a checkpoint or run, fp32; dropout: another one than it was trained with."""
    path = find(Path(path))
    config = AutoConfig.from_pretrained(path / checkpoints.HF)
    if dropout is not None:
        config.update(dropout_fields(config.model_type, dropout))
    lm = AutoModelForMaskedLM.from_config(config)
    weights = {name.removeprefix(PREFIX): w for name, w in full_weights(path).items() if name.startswith(PREFIX)}
    missing, unexpected = lm.load_state_dict(weights, strict=False)
    tied = set(getattr(lm, "_tied_weights_keys", None) or ())
    lost = [name for name in missing if name not in tied and not name.endswith(("position_ids", "token_type_ids"))]
    assert not lost and not unexpected, (lost, unexpected)
    lm.tie_weights()
    return lm


def export(source: Path, out: Path) -> Path:
    """Returns the checkpoint that was exported. Raises UserError."""
    path = find(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory; choose another or remove it")
    lm = load_model(path)
    partial = out.with_name(out.name + ".incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    lm.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(path / checkpoints.HF)
    tokenizer.model_max_length = positions(lm.config)
    tokenizer.save_pretrained(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    parser.add_argument("out", type=Path, metavar="HF_DIR")
    args = parser.parse_args()
    try:
        path = export(args.source, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path} -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
