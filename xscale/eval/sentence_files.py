"""Chooses the pooling of an export's sentence vectors, and writes the files by which sentence-transformers makes them.

sentence-transformers reads modules.json (the modules that texts pass through), the modules' folders, such as 1_Pooling,
and config_sentence_transformers.json (prompts).
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from xscale.checkpoint import store as checkpoints
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LENGTH = "sentence_bert_config.json"
PACKAGE = "sentence_transformers."


@dataclass(frozen=True)
class PoolingChoice:
    """How an export pools its sentence vectors."""

    pooling: str
    """"cls", or "mean" over a sentence's tokens."""
    reason: str
    """The reason for this choice. It continues the sentence `POOLING pooling, `."""
    folder: Path | None = None
    """The folder of model.init whose modules and prompts the export keeps. None: the export has modules of its own; its
    means leave [CLS] and [SEP] out, and its vectors are normalised."""


def choose_pooling(recipe: dict[str, Any], pooling: str | None = None, layers: int | None = None) -> PoolingChoice:
    """Return the pooling of a run's export: the one that the user chooses, or else the one that a stream trained, or
    else the one of model.init.

    recipe: the recipe as a checkpoint has it. pooling: the user's choice, if any. layers: the number of first layers
    that are exported; None: all.
    """
    if pooling:
        return PoolingChoice(pooling, "chosen by --pooling")
    for name, stream in recipe["streams"].items():
        if "pooling" in stream and stream.get("moco_weight", 1.0):  # PPA without its contrastive loss trains no vector
            return PoolingChoice(stream["pooling"], f"the pooling with which streams.{name} was trained")
    init = recipe["model"]["init"]
    if init is None:
        return PoolingChoice("mean", "the default pooling, because no stream trained sentence vectors")
    if checkpoints.is_run_or_checkpoint(Path(init)):
        run = checkpoints.read_checkpoint(checkpoints.resolve_checkpoint(Path(init)))
        return choose_pooling(run.identity["recipe"], layers=layers)
    return choose_pooling_of_init(init, layers)


def choose_pooling_of_init(init: str, layers: int | None) -> PoolingChoice:
    """Return the pooling that a Hugging Face directory or a model of the hub has. layers: see choose_pooling."""
    folder = Path(init)
    if not folder.exists():
        try:
            folder = Path(snapshot_download(init, allow_patterns=["*.json", "[0-9]*_*/*"]))
        except Exception as error:  # of the hub, or of its HTTP library
            return PoolingChoice(
                "mean", f"the default pooling, because model.init {init} cannot be read ({type(error).__name__})"
            )
    pooling = read_pooling(folder)
    if pooling is None:
        return PoolingChoice(
            "mean",
            f"the default pooling, because no stream trained sentence vectors, and model.init {init} has no {MODULES}",
        )
    if layers is not None:
        return PoolingChoice(
            pooling,
            f"the pooling of model.init {init} without its other sentence-transformers modules, because these "
            "modules need the last layer, and this export has only the first layers",
        )
    for module in read_modules_json(folder):
        if not module["type"].startswith(PACKAGE):
            return PoolingChoice(
                pooling,
                f"the pooling of model.init {init} without its sentence-transformers modules, because the "
                f"module {module['type']} is not in the package sentence-transformers",
            )
    return PoolingChoice(
        pooling,
        f"the pooling of model.init {init}, because no stream trained sentence vectors. The sentence-transformers "
        "modules and prompts of model.init are in the export, too",
        folder,
    )


def read_modules_json(folder: Path) -> list[dict[str, Any]]:
    """Return the modules that a folder's modules.json lists, each with "type" and "path"; [] without the file. Raises
    UserError."""
    path = folder / MODULES
    if not path.exists():
        return []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        for module in modules:
            if not module["type"] or Path(module["path"]).name != module["path"]:
                raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{path} is damaged: each module needs a `type` and a `path`, the name of a folder beside this file. "
            "Download or save the model again"
        ) from None
    return modules


def read_pooling(folder: Path) -> str | None:
    """Return the pooling of a folder's files of sentence-transformers: "cls", or "mean" for every other pooling; None
    without such files. Raises UserError."""
    modules = read_modules_json(folder)
    for module in modules:
        path = folder / module["path"] / "config.json"
        if module["type"].endswith(".Pooling") and path.exists():
            try:
                fields = dict(json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError, RecursionError):
                raise UserError(f"{path} is not a JSON object. Download or save the model again") from None
            if fields.get("pooling_mode_cls_token") or fields.get("pooling_mode") == "cls":
                return "cls"
    return "mean" if modules else None


def write_sentence_transformers_files(export_folder: Path, choice: PoolingChoice, config: Any, max_length: int) -> None:
    """Write the files of sentence-transformers into an export that has its tokenizer. config: the model's
    configuration. max_length: the maximum number of tokens of a sentence."""
    if choice.folder:
        copy_modules_and_prompts(choice.folder, export_folder)
        return
    configs: dict[str, dict[str, Any]] = {}
    if choice.pooling == "mean":
        configs["0_WordWeights"] = word_weights_without_cls_sep(Tokenizer(export_folder), config.vocab_size)
    configs["1_Pooling"] = {
        "word_embedding_dimension": config.hidden_size,
        "pooling_mode_cls_token": choice.pooling == "cls",
        "pooling_mode_mean_tokens": choice.pooling == "mean",
    }
    configs["2_Normalize"] = {}
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{PACKAGE}models.Transformer"}]
    for number, (path, fields) in enumerate(configs.items(), start=1):
        module_type = f"{PACKAGE}models.{path.partition('_')[2]}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": module_type})
        (export_folder / path).mkdir()
        write_json(export_folder / path / "config.json", fields)
    write_json(export_folder / MODULES, modules)
    write_json(export_folder / LENGTH, {"max_seq_length": max_length, "do_lower_case": False})


def copy_modules_and_prompts(source: Path, export_folder: Path) -> None:
    """Copy the modules and prompts of `source` to an export, but not the first module, which is the export's own model
    and tokenizer."""
    first, *others = read_modules_json(source)
    for module in others:
        if (source / module["path"]).is_dir():
            shutil.copytree(source / module["path"], export_folder / module["path"])
        else:  # a module without settings, such as Normalize
            (export_folder / module["path"]).mkdir()
    write_json(export_folder / MODULES, [first | {"path": ""}, *others])
    for path in (source / PROMPTS, source / first["path"] / LENGTH):
        if path.exists():
            shutil.copyfile(path, export_folder / path.name)


def word_weights_without_cls_sep(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return the configuration of a WordWeights module that leaves [CLS] and [SEP] out of means. vocab_size: that of
    the model's configuration, because each row of the embedding table needs an entry."""
    vocabulary = [token or "" for token in tokenizer.hf.convert_ids_to_tokens(list(range(vocab_size)))]
    weights = {vocabulary[tokenizer.cls_id]: 0.0, vocabulary[tokenizer.sep_id]: 0.0}
    return {"vocab": vocabulary, "word_weights": weights, "unknown_word_weight": 1.0}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
