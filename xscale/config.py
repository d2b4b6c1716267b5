"""The recipe: what is trained, on what, for how long. Strict: an unknown key or a wrong type is an error.

All problems of a recipe are reported at once. A value comes from the YAML file, then from `--set`.
"""

import contextlib
import dataclasses
import math
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import ConfigDict, Field, PlainValidator, PositiveFloat, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from xscale.errors import UserError

RECIPES = Path(__file__).parent / "recipes"

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""Of a section of the recipe, and of an objective's options."""
NotNegative = Annotated[float, Field(ge=0)]
MOST = 1 << 40
"""Of steps, samples and the like: far above all that is meant, and exact as a float."""
Count = Annotated[int, Field(gt=0, le=MOST)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    init: str | None = None
    """Weights to start from: a Hugging Face directory, a hub name, or a run or checkpoint of xscale; null: random
    weights of `preset`. From a run, also an exported one, languages keep their embeddings and streams their heads."""
    preset: Literal["tiny", "mini", "small", "base", "xlmr-base", "modern-small", "modern-base"] = "tiny"
    """Shape of a randomly initialised encoder (models/encoder.py)."""
    tokenizer: str | None = None
    """Hugging Face tokenizer directory; null: that of `init`, else `tokenizer/` in the first --data directory or its
    parent."""
    dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.1
    """Dropout probability of hidden states and attention."""
    attention_gain: PositiveFloat | None = None
    """Random weights of attention's values and outputs have a standard deviation of this / sqrt(width); null: of
    transformers' 0.02, a gain of 0.23 in preset tiny, 0.55 in base. At 0.23 attention adds next to nothing to a token,
    and [CLS] is one vector for all sentences (mean cosine 0.9999; 0.97 at 1): a contrast finds nothing to begin with.
    At 1 other losses learn somewhat later."""


@dataclass(frozen=True, config=STRICT)
class StreamConfig:
    objective: str
    """Name of the objective."""
    samples: Count | None = None
    """Samples per optimizer step over all ranks. A sample of pairs is one pair. A sample of monolingual text is running
    text of about data.max_length tokens from several records: consecutive sentences of a document, or several short
    documents and ends of documents, each a sequence of its own. Text beyond data.max_length continues in a further
    sequence: nothing is dropped or cut off."""
    tokens: Count | None = None
    """Tokens per optimizer step, instead of `samples`: a measurement before step 1 gives the number of samples."""
    weight: PositiveFloat = 1.0
    """Factor of the stream's loss in the step's loss."""
    warm_in: NotNegative = 0.0
    """The factor rises to `weight` over this many steps: a share of train.steps below 1, else a number of steps."""
    languages: list[str] | None = None
    """Languages ("en") or pairs ("en-de", either way round) to draw from and whose dictionaries to read; null: all that
    --data has."""
    options: Any = None
    """The objective's own fields, written beside the others in YAML."""


def _workers(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= 1024):
        return value
    raise ValueError(f"workers: {value!r} is neither auto nor a whole number from 0 to 1024")


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    max_length: Annotated[int, Field(ge=8, le=MOST)] = 128
    """Tokens of a sequence, special tokens included."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What happens to a pair that does not fit max_length; either way it is counted. Monolingual text always goes on in
    further sequences."""
    segments: bool = True
    """The two sentences of a pair have token types 0 and 1 where model and tokenizer have such (BERT's) and no stream
    has language embeddings; false: both 0, so that neither is the first."""
    first: Count | None = None
    """Number of records that are read of each language and of each pair of languages: the first ones, in the order of
    --data and of a directory's shards; null: all."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Languages are drawn with p proportional to records^alpha; 1: in the proportions that the data have."""
    workers: Annotated[int | Literal["auto"], PlainValidator(_workers)] = "auto"
    """Loader processes per rank; 0 loads in the training process; auto: 2, and for a GPU 4 to 6, as its host has cores
    (data/loader.py)."""
    lexicons: list[str] = dataclasses.field(default_factory=list)
    """Dictionary files, whose names say the pair: en-de.txt; none: `lexicon/*.txt` in the first --data directory or its
    parent. A stream reads those of its languages (of one language: those that have it). A dictionary that no stream
    reads is used for evaluation only."""
    truecase: bool = True
    """Spell a dictionary's words as the text mostly does (MUSE's are lower-case: no `hund` is a token of German text),
    by up to 100,000 records of each language; nothing is changed where the tokenizer lower-cases. The run keeps the
    changed dictionary in its directory, lexicon/, for evaluations."""
    lexicon_heldout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of a dictionary's words that no objective sees, by a hash of the word: `alignment/en-de` is measured on
    these, `alignment_trained/en-de` on all others. 0: every word is trained, and the former is absent."""


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    steps: Count = 1000
    """Optimizer steps of the run."""
    epochs: PositiveFloat | None = None
    """Epochs, instead of `steps`: the first stream of pairs draws this number times as many samples as there are pairs.
    With data.alpha 1 every pair is read this often; with less, small languages are read more often than large ones."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    warmup: NotNegative = 0.1
    """Linear warm-up: a share of the steps below 1, else a number of steps."""
    weight_decay: NotNegative = 0.01
    """Weight decay of AdamW; biases and norms have none."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of a predicted token's target that is spread over the whole vocabulary."""
    z_loss: NotNegative = 0.0
    """Factor of logsumexp(logits)^2, added to a predicted token's loss (PaLM: 1e-4)."""
    max_tokens: Count | None = None
    """Tokens of all streams in one forward and backward pass of a rank; null: 16,384 on a GPU, 8,192 on a CPU. Does not
    change the result, but for the masks that dropout draws."""
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
    seed: Annotated[int, Field(ge=-MOST, le=MOST)] = 0
    """Seed of the order of data, of masks, of random weights and of dropout."""
    measure_every: Annotated[int, Field(ge=0, le=MOST)] = 100
    """Steps between measurements that cost more than a look: each stream's gradient norm (a second backward pass)
    and the alignment scores of dictionaries; 0: never."""
    time_limit: PositiveFloat | None = None
    """Minutes after which the run saves and stops with exit code 75, once it has made a step; null: none."""
    tracker: Literal["wandb", "trackio"] | None = None
    """Where metrics go beside metrics.jsonl and TensorBoard; project XSCALE_PROJECT of the environment, else xscale."""
    stall_limit: PositiveFloat | None = 15.0
    """Minutes without progress after which the run ends with exit code 5, every rank's stack in its log and the name of
    the rank that the others wait for; null: none. Time in which the process was suspended does not count. Collectives
    give up by themselves after 30 (ranks.TIMEOUT)."""
    stop_limit: PositiveFloat | None = 4.0
    """Minutes after a signal to stop, or the time limit, in which the run must come to its stop, three steps away where
    these are long; else it ends without saving, with exit code 75 and every rank's stack in its log: steps since the
    last checkpoint are lost. Less than the lead of SLURM's --signal, so that the job is still there to be requeued;
    null: it waits for the step."""
    rollbacks: Annotated[int, Field(ge=0)] = 0
    """How often a run that is not finite goes back to its newest good checkpoint, by itself, and leaves out the update
    of the step that was bad; after that it ends with exit code 3."""

    @model_validator(mode="after")
    def warms_up_within_the_run(self) -> Self:
        if self.warmup > self.steps:
            raise ValueError(f"warmup: {self.warmup:g} exceeds the steps: {self.steps}")
        return self


HOOK_FIELDS = ("checkpoint", "step", "out")
"""What checkpoint.hook is told, by {NAME}."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    every: Count = 500
    """Optimizer steps between checkpoints; the last step always saves."""
    keep: Annotated[int, Field(ge=2, le=MOST)] = 2
    """Newest complete checkpoints that stay on disk, at least 2."""
    background: bool = True
    """true: a thread writes a copy in host memory while training goes on; false: training waits, without a copy."""
    best: str | None = None
    """A number of the section `eval`, as TASK/ROW/NUMBER such as heldout/tlm/loss: the checkpoint where it was best
    stays on disk, and checkpoints/best names it. Losses, perplexities and error rates (aer) are best where least."""
    hook: str | None = None
    """A command that is started beside the run for each new checkpoint, such as
    `slurm/evaluate_checkpoint.sh {checkpoint} {out} --task retrieval --data heldout`. {checkpoint} is the checkpoint's
    folder, {step} its step, {out} a file evals/step_N.json for scores in the form of `xscale.eval.run --out`, which the
    report reads. Words are split as a shell splits them, but no shell runs: for one write sh -c '...'."""

    @model_validator(mode="after")
    def can_be_done(self) -> Self:
        if self.best is not None and self.best.count("/") < 2:
            raise ValueError(f"best: {self.best!r} is not of the form TASK/ROW/NUMBER, such as heldout/tlm/loss")
        if self.hook is not None:
            try:
                words = shlex.split(self.hook)
            except ValueError as error:
                raise ValueError(f"hook: {self.hook!r} cannot be split into words ({error})") from None
            if not words or "\0" in self.hook:
                raise ValueError(f"hook: {self.hook!r} is no command")
            unknown = set(re.findall(r"\{(\w+)\}", self.hook)) - {*HOOK_FIELDS}
            if unknown:
                there = ", ".join(f"{{{name}}}" for name in HOOK_FIELDS)
                raise ValueError(f"hook: {{{min(unknown)}}} is unknown; there are {there}")
        return self


INLINE = ("heldout", "retrieval", "alignment")
"""Tasks that a run measures itself with."""


@dataclass(frozen=True, config=STRICT)
class EvalTask:
    name: str
    """heldout measures the loss of every stream, and of every language and pair in it, on records of `data`. retrieval
    finds sentences' translations among pairs of `data`. alignment measures the words of the run's dictionaries. A
    second task of one name is written NAME.ANYTHING. checkpoint.hook starts all other measurements."""
    data: list[str] = dataclasses.field(default_factory=list)
    """Shard directories that nothing is trained on."""
    limit: Count = 1000
    """Records of each language and pair, at most."""

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @model_validator(mode="after")
    def can_be_measured(self) -> Self:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise ValueError(f"name: {self.name!r} has other characters than letters, digits, dot, _ and -")
        if self.kind not in INLINE:
            raise ValueError(f"name: {self.name!r} is none of {', '.join(INLINE)}; checkpoint.hook measures others")
        if not self.data and self.kind != "alignment":
            raise ValueError("data: needs shard directories")
        return self


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """What the run is measured with, before step 1, every so many steps, and at the end."""

    every: Count = 500
    """Optimizer steps between evaluations."""
    tasks: list[EvalTask] = dataclasses.field(default_factory=list)
    """Evaluations that the run makes itself."""


@dataclass(frozen=True, config=STRICT)
class Recipe:
    model: ModelConfig
    streams: dict[str, StreamConfig]
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig = EvalConfig()

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
        del fields["checkpoint"], fields["eval"]
        for stream in fields["streams"].values():
            if not stream.get("language_embeddings"):
                stream.pop("language_dropout", None)
        return fields


BY_EPOCHS = MOST
"""train.steps of a recipe that says `epochs` instead, until the data are known."""


def steps_of_epochs(recipe: Recipe, pairs: int, samples: int) -> Recipe:
    """The recipe with the steps of train.epochs, each of which draws `samples` of the pairs. Raises UserError."""
    train, problems = recipe.train, list[str]()
    assert train.epochs
    steps = math.ceil(round(train.epochs * pairs / samples, 6))
    if train.steps not in (BY_EPOCHS, steps):
        problems.append(
            f"train.steps: {train.steps:,}, but train.epochs: {train.epochs:g} are {steps:,} steps of {samples:,} of "
            f"{pairs:,} pairs; leave one of the two out"
        )
    built = _build(TrainConfig, dataclasses.asdict(train) | {"steps": steps}, "train", problems)
    if problems:
        raise UserError("\n".join(problems))
    return dataclasses.replace(recipe, train=built)


NOT_IDENTITY = {
    "model": {"tokenizer"},
    "data": {"workers", "lexicons", "truecase", "lexicon_heldout"},
    "train": {
        "steps",
        "epochs",
        "max_tokens",
        "activation_checkpointing",
        "compile",
        "deterministic",
        "measure_every",
        "time_limit",
        "stall_limit",
        "tracker",
        "stop_limit",
        "rollbacks",
    },
}
"""Fields a resumed run may change. The tokenizer and the dictionaries that an objective reads are compared by content
instead of path, these with the share of their words that is withheld."""


EITHER = {"train.steps": "epochs", "train.epochs": "steps"}
"""Fields that `--set` puts in the place of others of their section."""
RENAMED = {
    "micro_batch": "rows took its place; write train.max_tokens, tokens of one pass on a rank, or leave it out",
    "mode": "tasks are measured within the run; leave it out, and write a job's command as checkpoint.hook",
    "command": "checkpoint.hook took its place, a command that is started for every checkpoint; leave it out",
}
"""Fields of earlier versions, and what to write instead."""


class UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice, also as 1 and "1": the last one would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        for key in keys:
            if list(map(str, keys)).count(str(key)) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def shipped_recipes() -> list[str]:
    """Names, such as "xlm" and "paper/tang_xlm"."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def load_recipe(name: str, sets: list[str], objectives: dict[str, type]) -> Recipe:
    """A shipped recipe's name or a YAML file's path, with `key.sub=value` overrides.

    objectives: options class of each objective. Raises UserError naming every problem.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    try:
        tree = read_yaml(path.read_text(encoding="utf-8")) or {}
    except ValueError as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    except OSError as error:
        raise UserError(
            f"recipe {name!r} not found ({path}: {error.strerror}). Shipped recipes: {', '.join(shipped_recipes())}; "
            f"or give a path ending in .yaml"
        ) from None
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


def read_yaml(text: str) -> Any:
    """Raises ValueError."""
    try:
        return yaml.load(text, UniqueKeys)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _assign(tree: dict[str, Any], assignment: str, problems: list[str]) -> None:
    dotted, equals, text = assignment.partition("=")
    if not equals:
        problems.append(f"--set {assignment}: needs the form key.sub=value")
        return
    try:
        value = read_yaml(text)
    except ValueError as error:
        twice, stands, _ = str(error).partition(" stands twice")
        problems.append(f"--set {assignment[:80]}: {twice + stands if stands else f'{text[:80]!r} is not YAML'}")
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
    if dotted in EITHER and value is not None:
        node.pop(EITHER[dotted], None)


def _build_recipe(tree: dict[str, Any], objectives: dict[str, type], problems: list[str]) -> Recipe | None:
    sections = {
        "model": ModelConfig,
        "data": DataConfig,
        "train": TrainConfig,
        "checkpoint": CheckpointConfig,
        "eval": EvalConfig,
    }
    for unknown in [name for name in tree if name not in (*sections, "streams")]:
        problems.append(f"{unknown}: unknown section; there are {', '.join([*sections, 'streams'])}")
    train = tree.get("train")
    if isinstance(train, dict) and train.get("epochs") is not None:
        train.setdefault("steps", BY_EPOCHS)
    _build_tasks(tree.get("eval"), problems)
    built = {
        name: _build(cls, {} if tree.get(name) is None else tree[name], name, problems)
        for name, cls in sections.items()
    }
    streams = {}
    if not isinstance(tree.get("streams"), dict) or not tree["streams"]:
        problems.append("streams: needs at least one, such as {mlm: {objective: mlm, samples: 64}}")
    else:
        for name, fields in tree["streams"].items():
            streams[str(name)] = _build_stream(str(name), fields, objectives, problems)
    if problems:
        return None
    recipe = Recipe(streams=streams, **built)
    tasks = [task.name for task in recipe.eval.tasks]
    if recipe.checkpoint.best and recipe.checkpoint.best.partition("/")[0] not in tasks:
        there = ", ".join(tasks) or "none"
        problems.append(f"checkpoint.best: {recipe.checkpoint.best} is of no task of eval.tasks; there are {there}")
    elif recipe.checkpoint.best and recipe.checkpoint.best.startswith("heldout"):
        row = recipe.checkpoint.best.split("/")[1]
        if row.partition(" ")[0] not in streams:
            there = ", ".join(streams)
            problems.append(f"checkpoint.best: {recipe.checkpoint.best}: heldout has a row for each stream: {there}")
    rows, longest = recipe.train.max_tokens, recipe.data.max_length
    if rows is not None and rows < longest:
        problems.append(f"train.max_tokens: {rows} must be at least data.max_length: {longest}")
    return recipe


def _build_tasks(fields: Any, problems: list[str]) -> None:
    """In the place of the fields of each of eval's tasks the task."""
    if not isinstance(fields, dict) or not isinstance(fields.get("tasks"), list):
        return
    tasks = [_build(EvalTask, task, f"eval.tasks[{i}]", problems) for i, task in enumerate(fields["tasks"])]
    names = [task.name for task in tasks if task]
    twice = {name for name in names if names.count(name) > 1}
    problems += [f"eval.tasks: two are called {name}; write {name}.one, {name}.two" for name in sorted(twice)]
    fields["tasks"] = [task for task in tasks if task]


def _build_stream(name: str, fields: Any, objectives: dict[str, type], problems: list[str]) -> Any:
    where = f"streams.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        problems.append(f"{where}: a stream's name has letters, digits, _ and - alone")
        return None
    if not isinstance(fields, dict):
        problems.append(f"{where}: needs fields, such as {{objective: mlm, samples: 64}}")
        return None
    objective = fields.get("objective")
    if not isinstance(objective, str) or objective not in objectives:
        there = ", ".join(sorted(objectives))
        problems.append(f"{where}.objective: {objective!r} is unknown; there are {there}; --plugin brings others")
        return None
    own = _names(StreamConfig)
    if (fields.get("samples") is None) == (fields.get("tokens") is None):
        problems.append(f"{where}: needs either samples or tokens, so many a step")
    options = {key: value for key, value in fields.items() if key not in own}
    made = _build(objectives[objective], options, where, problems, also=own)
    common = {key: value for key, value in fields.items() if key in own}
    return _build(StreamConfig, common | {"options": made}, where, problems)


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.name != "options"]


def _build(cls: Any, fields: Any, where: str, problems: list[str], also: list[str] | None = None) -> Any:
    """An instance of `cls`, or None after adding to `problems`. also: what else may stand there."""
    if not isinstance(fields, dict):
        problems.append(f"{where}: needs fields, got {fields!r}")
        return None
    try:
        return cls(**{str(name): value for name, value in fields.items()})
    except ValidationError as error:
        there = ", ".join([*(also or ()), *_names(cls)])
        problems += [_problem(details, where, there) for details in error.errors()]
        return None


_BOUNDS = {"gt": "be more than", "ge": "be at least", "lt": "be less than", "le": "be at most"}
_NEEDED = {"int_type": int, "float_type": float, "string_type": str, "bool_type": bool}


def _problem(details: Any, where: str, there: str) -> str:
    """A line about one of pydantic's errors. there: names of the fields."""
    kind, value, bounds = details["type"], details["input"], details.get("ctx", {})
    name = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        last = name.rpartition(".")[2]
        return f"{name}: " + RENAMED.get(last, f"unknown key; there are {there}")
    if kind in ("missing", "missing_argument"):
        return f"{name}: is required"
    if kind == "value_error":
        return f"{where}.{bounds['error']}"
    if kind == "literal_error":
        return f"{name}: {value!r} is not one of {bounds['expected']}"
    if kind == "list_type":
        return f"{name}: {value!r} is not a list; write [{value}]"
    if kind == "finite_number":
        return f"{name}: {value} is not a finite number"
    if kind in _NEEDED:
        needed = _NEEDED[kind]
        given = {"str": "text", "NoneType": "null"}.get(type(value).__name__, type(value).__name__)
        return f"{name}: {value!r} is {given}, needs {needed.__name__}{_remedy(value, needed)}"
    for bound, words in _BOUNDS.items():
        if bound in bounds:
            most = {"gt": "be positive", "ge": "not be negative"}.get(bound) if bounds[bound] == 0 else None
            return f"{name}: {value} must {most or f'{words} {bounds[bound]}'}"
    return f"{name}: {value!r}: {details['msg']}"


def _remedy(value: Any, needed: type) -> str:
    if needed is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            written = yaml.safe_dump(float(value)).split()[0]
            return f"; YAML reads a number with an exponent only with a dot and a sign: write {written}"
    if needed is int and isinstance(value, float) and value.is_integer():
        return f"; write {value:.0f}"
    if needed is str and isinstance(value, bool):
        return "; YAML reads yes, no, on, off as truth values: quote it"
    return ""
