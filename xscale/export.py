"""Export a checkpoint as a Hugging Face directory: `xscale export CHECKPOINT_OR_RUN_DIR HF_DIR`.

The directory HF_DIR has weights, config and tokenizer for `AutoModelForMaskedLM.from_pretrained`, the files of a
`SentenceTransformer`, and a model card. If the first argument is a run, the run's newest checkpoint is exported, or
with --best the run's best checkpoint.
"""

import argparse
import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCard, ModelCardData
from transformers import AutoModelForMaskedLM, PreTrainedModel

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.restore import read_and_broadcast_model
from xscale.data.tokenizer import load_transformers_tokenizer
from xscale.errors import ExitCode, UserError, run_and_exit, run_command
from xscale.eval.retrieval import POOLINGS
from xscale.eval.sentence_files import (
    PoolingChoice,
    choose_pooling,
    write_json,
    write_sentence_transformers_files,
)
from xscale.models.build import max_sequence_tokens, read_xscale_field

CARD_TEMPLATE = Path(__file__).parent / "eval" / "card.md"
OLDEST = {"modernbert": "4.48"}
"""{type of a model: the oldest version of transformers that has the type}. Other types are in version 4.0."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="xscale export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR", help="folder of a checkpoint, or of a run")
    add("out", type=Path, metavar="HF_DIR", help="new folder for the exported model")
    add(
        "--best",
        action="store_true",
        help="export the checkpoint with the best score instead of the newest checkpoint; the recipe's field "
        "checkpoint.best names the score",
    )
    add(
        "--pooling",
        choices=POOLINGS,
        help="pooling of sentence vectors (default: the pooling with which the run trained, else the pooling of "
        "model.init)",
    )
    add(
        "--layers",
        type=int,
        metavar="K",
        help="export only the first K layers; the hidden states of layer K are the output",
    )
    add("--push", metavar="REPO", help="upload the exported model to the repository USER/NAME of the Hugging Face Hub")
    return run_command(parser, None, export_and_push)


def export_and_push(args: argparse.Namespace) -> ExitCode:
    """Do what the flags say, and return the exit code 0. Raises UserError."""
    if args.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.push):
        raise UserError(f"--push {args.push} is not the name of a repository on the Hugging Face Hub. Write USER/NAME")
    path = export_and_return_checkpoint(args.source, args.out, args.best, args.pooling, args.layers)
    print(f"exported {path} to {args.out}")
    if args.push:
        push_to_hub(args.out, args.push)
        print(f"uploaded {args.out} to {args.push}")
    return 0


def export_and_return_checkpoint(
    source: Path, out: Path, best: bool = False, pooling: str | None = None, layers: int | None = None
) -> Path:
    """Export a checkpoint, or a run's newest checkpoint, and return the path of the checkpoint. best: export the run's
    best checkpoint. pooling: how sentence vectors are pooled; None: see choose_pooling. layers: the number of
    first layers to export; None: export the whole model. Raises UserError."""
    path = find_best_checkpoint(source) if best else checkpoints.resolve_checkpoint(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty directory. Choose another directory, or remove {out}")
    files.check_writable_and_make_parent(out)
    lm: Any = read_and_broadcast_model(path)
    checkpoint = checkpoints.read_checkpoint(path)
    choice = choose_pooling(checkpoint.identity["recipe"], pooling, layers)
    card = make_model_card(checkpoint, lm.config, out.resolve().name, choice, layers)
    if layers is not None:
        lm = copy_first_layers(lm, layers).base_model
    write_exported_model(out, lm, path / checkpoints.HF, choice, card)
    print(f"sentence vectors: {choice.pooling} pooling, {choice.reason}")
    return path


def find_best_checkpoint(run: Path) -> Path:
    """Return the directory of the run's checkpoint with the best value of checkpoint.best. Raises UserError."""
    named = run / "checkpoints" / checkpoints.BEST
    if not named.is_file():
        raise UserError(
            f"--best: {named} does not exist. Possible causes: {run} is not the folder of a run, the recipe does not "
            "set checkpoint.best, or the run has not been evaluated yet. Remove --best to export the newest "
            "checkpoint"
        )
    return checkpoints.resolve_checkpoint(named.with_name(named.read_text(encoding="utf-8").strip()))


def copy_first_layers(lm: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a copy of the first layers of a model. The copy's masked-LM head is meaningless. Raises UserError."""
    config = copy.deepcopy(lm.config)
    last = config.num_hidden_layers
    if not 1 <= layers <= last:
        raise UserError(f"--layers {layers}: the model has {last} layers. Write a number from 1 to {last}")
    if hasattr(lm.base_model, "final_norm"):
        raise UserError(
            f"--layers {layers}: a {config.model_type} model normalises the hidden states after its last layer. A "
            f"model cut to {layers} layers would normalise the hidden states of layer {layers}, which the whole model "
            f"does not do. Export all layers, and evaluate with `xscale eval --layer {layers}`"
        )
    config.num_hidden_layers = layers
    first = AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
    missing, _ = first.load_state_dict(lm.state_dict(), strict=False)
    assert not missing, missing
    return first


def write_exported_model(
    out: Path,
    lm: PreTrainedModel,
    tokenizer_path: str | Path,
    choice: PoolingChoice,
    card: ModelCard | None = None,
) -> None:
    """Write a model, its tokenizer, its card and the files of sentence-transformers."""
    config: Any = lm.config
    longest = max_sequence_tokens(config)
    tokenizer = load_transformers_tokenizer(tokenizer_path)
    tokenizer.model_max_length = longest
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    if read_xscale_field(config, str(out)).get("segments"):  # token types are a pair's two sentences, not languages
        tokenizer.model_input_names.insert(1, "token_type_ids")
    if config.model_type == "modernbert":  # transformers 4 reads these names, and transformers 5 all names
        config.global_rope_theta = config.rope_parameters["full_attention"]["rope_theta"]
        config.local_rope_theta = config.rope_parameters["sliding_attention"]["rope_theta"]
    with files.atomic_write(out) as partial:
        lm.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        name_tokenizer_class_for_transformers_4(partial / "tokenizer_config.json")
        write_sentence_transformers_files(partial, choice, config, longest)
        if card:
            card.save(partial / "README.md")
        files.apply_umask_recursively(partial)


def name_tokenizer_class_for_transformers_4(tokenizer_config: Path) -> None:
    """Write the tokenizer's class under its name in transformers 4, which transformers 5 reads, too."""
    fields = json.loads(tokenizer_config.read_text(encoding="utf-8"))
    if fields.get("tokenizer_class") == "TokenizersBackend":
        write_json(tokenizer_config, fields | {"tokenizer_class": "PreTrainedTokenizerFast"})


def make_model_card(
    checkpoint: checkpoints.Checkpoint, config: Any, name: str, choice: PoolingChoice, layers: int | None
) -> ModelCard:
    """Return the model card of an exported checkpoint. config: the model's configuration. name: the export's name.
    layers: the number of first layers in the export; None: all."""
    recipe = checkpoint.identity["recipe"]
    init = recipe["model"]["init"]
    is_on_hub = init and not Path(init).exists() and files.exists_or_is_hub_name(init)
    objectives = sorted({stream["objective"] for stream in recipe["streams"].values()})
    header = ModelCardData(
        language=config.xscale["languages"][1:],
        license="unknown",
        library_name="transformers",
        pipeline_tag="feature-extraction" if layers else "fill-mask",
        base_model=init if is_on_hub else None,
        model_name=name,
        tags=["xscale", "sentence-transformers", "feature-extraction", *objectives],
    )
    return ModelCard.from_template(
        header,
        str(CARD_TEMPLATE),
        name=name,
        languages=header.language,
        objectives=objectives,
        layers=layers,
        choice=choice,
        oldest=OLDEST.get(config.model_type, "4.0"),
        sources=checkpoint.sources,
        data=checkpoint.identity["data"],
        steps=f"{checkpoint.step:,}",
        init=init,
        settings=yaml.safe_dump(recipe, sort_keys=False),
        max_length=max_sequence_tokens(config),
    )


def push_to_hub(folder: Path, repo: str) -> None:
    """Upload an export to the hub's repository `repo`, which is created as private if needed. Raises UserError."""
    api = HfApi(library_name="xscale")
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export of xscale")
    except Exception as error:  # the hub's HTTP library, and so its exceptions, differ between versions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--push {repo}: the upload failed ({reason}). The exported model in {folder} is complete. Log in by `hf "
            f"auth login`, then run `hf upload --private {repo} {folder}`"
        ) from None


if __name__ == "__main__":
    run_and_exit(main)
