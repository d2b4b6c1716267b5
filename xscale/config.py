"""The recipe: what is trained, on what, for how long. Strict: an unknown key or a wrong type is an error.

All problems of a recipe are reported at once. A value comes from the YAML file, then from `--set`.
"""

import contextlib
import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from xscale.errors import UserError

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class ModelConfig:
    init: str | None = None
    """Weights to start from: a Hugging Face directory or hub name; null: random weights of `preset`."""
    preset: Literal["tiny", "mini", "small", "base", "xlmr-base", "modern-small", "modern-base"] = "tiny"
    """Shape of a randomly initialised encoder (models/encoder.py)."""
    tokenizer: str | None = None
    """Hugging Face tokenizer directory; null: `tokenizer/` in the first --data directory or its parent."""
    dropout: float = 0.1
    """Of hidden states and attention."""


@dataclass(frozen=True)
class StreamConfig:
    objective: str
    """A name of objectives.OBJECTIVES."""
    samples: int | None = None
    """Samples per optimizer step over all ranks. Of pairs, each is one pair; of monolingual text, sentences that follow
    one another in the order until they fill about data.max_length tokens, so that it reads several records."""
    tokens: int | None = None
    """Instead of `samples`: as many samples as have about so many tokens, by the samples measured before step 1."""
    weight: float = 1.0
    """Factor of the stream's loss in the step's loss."""
    warm_in: float = 0.0
    """The factor rises to `weight` over this many steps: a share of train.steps below 1, else a number of steps."""
    languages: list[str] | None = None
    """Languages ("en") or pairs ("en-de") to draw from; null: all that --data has."""
    options: Any = None
    """The objective's own fields, written beside the others in YAML."""


@dataclass(frozen=True)
class DataConfig:
    max_length: int = 128
    """Tokens of a sequence, special tokens included."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What happens to a pair or sentence that does not fit max_length; either way it is counted."""
    alpha: float = 0.7
    """Languages are drawn with p proportional to records^alpha."""
    workers: int = 2
    """Loader processes per rank; 0 loads in the training process."""
    lexicons: list[str] = field(default_factory=list)
    """Dictionary files, whose names say the pair: en-de.txt; none: where an objective needs one, `lexicon/*.txt` in the
    first --data directory or its parent."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    """Optimizer steps of the run."""
    lr: float = 3e-4
    """Peak learning rate."""
    warmup: float = 0.1
    """Linear warm-up: a share of the steps below 1, else a number of steps."""
    weight_decay: float = 0.01
    """AdamW; not on biases and norms."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    label_smoothing: float = 0.0
    """Share of a predicted token's target that is spread over the whole vocabulary."""
    z_loss: float = 0.0
    """Factor of logsumexp(logits)^2, added to a predicted token's loss (PaLM: 1e-4)."""
    max_tokens: int | None = None
    """Tokens of all streams in one forward and backward pass of a rank; null: 16,384 on a GPU, 8,192 on a CPU. Does not
    change the result."""
    precision: Literal["auto", "fp16", "bf16", "fp32"] = "auto"
    """auto: what ds_config asks for, where the hardware has it, else fp32 with a printed line."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the encoder's layers for the backward pass and compute the rest again: less memory, about
    a third more time."""
    compile: bool = False
    """Compile the encoder as one program with torch.compile; rows are then filled up to one shape. With dropout, other
    masks are drawn than without."""
    deterministic: bool = False
    """On CUDA: only algorithms that give the same bits every time, so that a resume is exact; attention's backward pass
    is slower then. CPUs need none of this."""
    seed: int = 0
    measure_every: int = 100
    """Steps between measurements that cost more than a look: each stream's gradient norm (a second backward pass)
    and the alignment scores of dictionaries; 0: never."""
    time_limit: float | None = None
    """Minutes after which the run saves and stops with exit code 75; null: none."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500
    """Optimizer steps between checkpoints; the last step always saves."""
    keep: int = 2
    """Newest complete checkpoints that stay on disk, at least 2."""


@dataclass(frozen=True)
class Recipe:
    model: ModelConfig
    streams: dict[str, StreamConfig]
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig

    def warmup_steps(self) -> int:
        warmup = self.train.warmup
        return round(warmup * self.train.steps) if warmup < 1 else int(warmup)

    def stream_weight(self, name: str, step: int) -> float:
        """The factor of a stream's loss in step 0, 1, ..."""
        stream = self.streams[name]
        steps = stream.warm_in * self.train.steps if stream.warm_in < 1 else stream.warm_in
        return stream.weight * min(1.0, (step + 1) / max(steps, 1.0))

    def to_dict(self) -> dict[str, Any]:
        resolved = dataclasses.asdict(self)
        for stream in resolved["streams"].values():
            stream.update(stream.pop("options"))
        return resolved

    def identity(self) -> dict[str, Any]:
        """The fields that decide the result; a resume must not change them."""
        fields = self.to_dict()
        for section, names in NOT_IDENTITY.items():
            fields[section] = {k: v for k, v in fields[section].items() if k not in names}
        del fields["checkpoint"]
        return fields


NOT_IDENTITY = {
    "model": {"tokenizer"},
    "data": {"workers", "lexicons"},
    "train": {
        "steps",
        "max_tokens",
        "activation_checkpointing",
        "compile",
        "deterministic",
        "measure_every",
        "time_limit",
    },
}
"""Fields a resumed run may change. Tokenizer and lexicons are compared by content instead of path."""


RENAMED = {
    "train.micro_batch": "rows took its place; write train.max_tokens, tokens of one pass on a rank, or leave it out",
}
"""Fields of earlier versions, and what to write instead."""


def load_recipe(name: str, sets: list[str], objectives: dict[str, type]) -> Recipe:
    """A shipped recipe's name or a YAML file's path, with `key.sub=value` overrides.

    objectives: options class of each objective. Raises UserError naming every problem.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not path.exists():
        shipped = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
        raise UserError(
            f"recipe {name!r} not found ({path}). Shipped recipes: {shipped}; or give a path ending in .yaml"
        )
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping with model, streams, data, train, checkpoint")
    problems: list[str] = []
    for assignment in sets:
        _assign(tree, assignment, problems)
    recipe = _build_recipe(tree, objectives, problems)
    if problems or recipe is None:
        raise UserError(
            f"recipe {path}{' with --set' if sets else ''}:\n" + "\n".join(f"  {problem}" for problem in problems)
        )
    return recipe


def _assign(tree: dict[str, Any], assignment: str, problems: list[str]) -> None:
    dotted, equals, text = assignment.partition("=")
    if not equals:
        problems.append(f"--set {assignment}: needs the form key.sub=value")
        return
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        problems.append(f"--set {assignment}: {text!r} is not YAML")
        return
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 3e-4 as text; on a command line it can only be a number
    *parents, last = dotted.split(".")
    node: Any = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            problems.append(f"--set {assignment}: {parent} has no fields")
            return
    node[last] = value


def _build_recipe(tree: dict[str, Any], objectives: dict[str, type], problems: list[str]) -> Recipe | None:
    sections = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig, "checkpoint": CheckpointConfig}
    for unknown in set(tree) - set(sections) - {"streams"}:
        problems.append(f"{unknown}: unknown section; there are {', '.join([*sections, 'streams'])}")
    built = {
        name: _build(cls, {} if tree.get(name) is None else tree[name], name, problems)
        for name, cls in sections.items()
    }
    streams = {}
    if not isinstance(tree.get("streams"), dict) or not tree["streams"]:
        problems.append("streams: needs at least one, such as {mlm: {objective: mlm, samples: 64}}")
    else:
        for name, fields in tree["streams"].items():
            streams[name] = _build_stream(str(name), fields, objectives, problems)
    if problems:
        return None
    recipe = Recipe(streams=streams, **built)
    problems += _check_values(recipe)
    return recipe


def _build_stream(name: str, fields: Any, objectives: dict[str, type], problems: list[str]) -> Any:
    where = f"streams.{name}"
    if not isinstance(fields, dict):
        problems.append(f"{where}: needs fields, such as {{objective: mlm, samples: 64}}")
        return None
    objective = fields.get("objective")
    if not isinstance(objective, str) or objective not in objectives:
        problems.append(f"{where}.objective: {objective!r} is unknown; there are {', '.join(sorted(objectives))}")
        return None
    own = {f.name for f in dataclasses.fields(StreamConfig)} - {"options"}
    if (fields.get("samples") is None) == (fields.get("tokens") is None):
        problems.append(f"{where}: needs either samples or tokens, so many a step")
    common = _build(StreamConfig, {k: v for k, v in fields.items() if k in own}, where, problems)
    options = _build(objectives[objective], {k: v for k, v in fields.items() if k not in own}, where, problems)
    return common and dataclasses.replace(common, options=options)


def _build(cls: type, fields: Any, where: str, problems: list[str]) -> Any:
    """An instance of the dataclass `cls`, or None after adding to `problems`."""
    if not isinstance(fields, dict):
        problems.append(f"{where}: needs fields, got {fields!r}")
        return None
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    before = len(problems)
    values = {}
    for name, value in fields.items():
        if name not in known:
            there = ", ".join(n for n in known if n != "options")
            problems.append(f"{where}.{name}: " + RENAMED.get(f"{where}.{name}", f"unknown key; there are {there}"))
        else:
            values[name] = _check_type(value, hints[name], f"{where}.{name}", problems)
    for name, f in known.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in fields:
            problems.append(f"{where}.{name}: is required")
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except UserError as error:
        problems.append(f"{where}.{error}")
        return None


def _check_type(value: Any, hint: Any, where: str, problems: list[str]) -> Any:
    """`value`, with an int widened to float where the hint is float; adds to `problems` where it does not fit."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in args and not isinstance(value, bool):
            return value
        problems.append(f"{where}: {value!r} is not one of {', '.join(map(str, args))}")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _check_type(value, next(a for a in args if a is not type(None)), where, problems)
    if origin is list:
        if isinstance(value, list):
            return [_check_type(v, args[0], f"{where}[{i}]", problems) for i, v in enumerate(value)]
        problems.append(f"{where}: {value!r} is not a list; write [{value}]")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(f"{where}: {value} is not a finite number")
        return value
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    problems.append(f"{where}: {value!r} is {_type_name(value)}, needs {hint.__name__}{_remedy(value, hint)}")
    return value


def _type_name(value: Any) -> str:
    return {"str": "text", "NoneType": "null"}.get(type(value).__name__, type(value).__name__)


def _remedy(value: Any, hint: type) -> str:
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            written = yaml.safe_dump(float(value)).split()[0]
            return f"; YAML reads a number with an exponent only with a dot and a sign: write {written}"
    if hint is str and isinstance(value, bool):
        return "; YAML reads yes, no, on, off as truth values: quote it"
    return ""


def _check_values(recipe: Recipe) -> list[str]:
    train, data = recipe.train, recipe.data
    checks = [
        (train.steps > 0, f"train.steps: {train.steps} must be positive"),
        (train.lr > 0, f"train.lr: {train.lr} must be positive"),
        (
            train.steps <= 0 or train.warmup <= train.steps,
            f"train.warmup: {train.warmup:g} exceeds the steps: {train.steps}",
        ),
        (train.warmup >= 0, f"train.warmup: {train.warmup} must not be negative"),
        (train.weight_decay >= 0, f"train.weight_decay: {train.weight_decay} must not be negative"),
        (train.max_grad_norm >= 0, f"train.max_grad_norm: {train.max_grad_norm} must not be negative"),
        (0 <= train.label_smoothing < 1, f"train.label_smoothing: {train.label_smoothing} must lie in [0, 1)"),
        (train.z_loss >= 0, f"train.z_loss: {train.z_loss} must not be negative"),
        (
            train.max_tokens is None or train.max_tokens >= data.max_length,
            f"train.max_tokens: {train.max_tokens} must be at least data.max_length: {data.max_length}",
        ),
        (train.measure_every >= 0, f"train.measure_every: {train.measure_every} must not be negative"),
        (data.max_length >= 8, f"data.max_length: {data.max_length} must be at least 8"),
        (0 <= data.alpha <= 1, f"data.alpha: {data.alpha} must lie between 0 and 1"),
        (data.workers >= 0, f"data.workers: {data.workers} must not be negative"),
        (0 <= recipe.model.dropout < 1, f"model.dropout: {recipe.model.dropout} must lie in [0, 1)"),
        (recipe.checkpoint.every > 0, f"checkpoint.every: {recipe.checkpoint.every} must be positive"),
        (recipe.checkpoint.keep >= 2, f"checkpoint.keep: {recipe.checkpoint.keep} must be at least 2"),
    ]
    for name, stream in recipe.streams.items():
        given = [(field, n) for field, n in (("samples", stream.samples), ("tokens", stream.tokens)) if n is not None]
        checks += [(n > 0, f"streams.{name}.{field}: {n} must be positive") for field, n in given]
        checks.append((stream.weight > 0, f"streams.{name}.weight: {stream.weight} must be positive"))
        checks.append(
            (stream.warm_in >= 0, f"streams.{name}.warm_in: {stream.warm_in:g} must not be negative"),
        )
    return [message for ok, message in checks if not ok]
