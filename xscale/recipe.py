"""The recipe: what is trained, on what data, for how long.

A value of `--set` replaces the value of the YAML file. Unknown keys and wrong types are errors, and all problems of a
recipe are reported at once.
"""

import copy
import dataclasses
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, PlainValidator, PositiveFloat, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from xscale.errors import UserError
from xscale.plugins import import_objective
from xscale.removed import removed_field
from xscale.strict_yaml import read_yaml

RECIPES = Path(__file__).parent / "recipes"

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""The pydantic settings of the sections of a recipe, and of an objective's options."""
NotNegative = Annotated[float, Field(ge=0)]
MOST = 1 << 40
"""The maximum number of steps, samples or tokens. It is larger than needed, and a float represents it exactly."""
Count = Annotated[int, Field(gt=0, le=MOST)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    starts_from: Literal["any", "scratch", "model"] = "any"
    """Which initial weights suit the recipe's learning rate, dropout and attention gain: random weights (scratch), a
    pre-trained `init` (model), or both (any). With scratch, a run refuses an `init` that xscale has not trained unless
    --set gives train.lr. With model, a run refuses to start without `init`."""
    init: str | None = None
    """The initial weights: a Hugging Face directory, a hub name, or a run or checkpoint of xscale; null: random weights
    of `preset`. From a run of xscale, the new run also takes the language embeddings and the heads of objectives."""
    preset: Literal["tiny", "mini", "small", "base", "xlmr-base", "modern-small", "modern-base"] = "tiny"
    """The architecture of a randomly initialised encoder."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer directory; null: the tokenizer of `init`, or without `init` the folder `tokenizer/` in
    the first --data directory or its parent. If `init` has a tokenizer, `tokenizer` must be the same tokenizer."""
    dropout: Annotated[float, Field(ge=0, le=0.9)] | None = 0.1
    """The dropout probability of hidden states and attention; null: the dropout of `init`, and 0.1 with random
    weights."""
    attention_gain: PositiveFloat | None = None
    """The gain g of attention layers: their value and output projections start from random weights of standard
    deviation g / sqrt(width). null: a standard deviation of 0.02 as in transformers, which is a gain of 0.23 in preset
    tiny and 0.55 in base. At a gain of 0.23, all sentences have nearly the same [CLS] vector (mean cosine 0.9999; 0.97
    at a gain of 1), so contrastive losses begin to fall late. At a gain of 1, other losses begin to fall somewhat
    later."""
    rope_theta: PositiveFloat | None = None
    """The base of the rotary position embeddings in all layers (ModernBERT); null: the base of `init`, or 160,000 in
    the presets. A larger base suits longer sequences. A phase may change the base only if the recipe sets
    `rope_theta`."""


@dataclass(frozen=True, config=STRICT)
class StreamConfig:
    objective: str
    """The name of the objective, such as mlm or tlm, or MODULE:NAME for an objective of your own."""
    samples: Annotated[int, Field(ge=0, le=MOST)]
    """The number of samples per optimizer step over all ranks. For sentence pairs, a sample is one pair. For
    monolingual text, a sample is about data.max_length tokens: consecutive sentences of a document, or several short
    documents, each in a separate sequence. If a sample has more than data.max_length tokens, the rest forms another
    sequence; no text is dropped. A phase may pause the stream with 0 samples."""
    weight: PositiveFloat = 1.0
    """The factor of the stream's loss in the total loss of the step."""
    warm_in: NotNegative = 0.0
    """The number of steps in which the factor of the stream's loss rises linearly from 0 to `weight`. A number below 1
    is a share of train.steps."""
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """The languages ("en") or language pairs ("en-de", in either order) whose text and dictionaries the stream reads;
    null: all."""
    options: Any = None
    """The objective's own fields. In YAML they are written beside the stream's other fields."""


def check_workers(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= 1024):
        return value
    raise ValueError("it is neither auto nor a whole number from 0 to 1024")


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    max_length: Annotated[int, Field(ge=8, le=MOST)] = 128
    """The maximum number of tokens in a sequence, including special tokens."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What happens to sentence pairs longer than `max_length`: drop leaves them out, truncate cuts them. The log says
    how many pairs were too long. Monolingual text that is too long always continues in the next sequence."""
    segments: bool = True
    """true: the two sentences of a pair have token types 0 and 1, if the model and the tokenizer have such types and no
    stream has language embeddings; false: both sentences have token type 0."""
    first: Count | None = None
    """The maximum number of records (sentences or pairs) of each language and language pair. Records are taken in the
    order of --data and of the shards; null: no limit."""
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """The languages ("en") or language pairs ("en-de") for streams without a field `languages` of their own; null:
    all."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.7
    """A language, or language pair, is sampled with a probability proportional to n^alpha, where n is its size;
    `alpha_by` says how n is counted."""
    alpha_by: Literal["records", "tokens", "bytes"] = "records"
    """What n counts in n^alpha: the records (sentences or pairs) of a language, or its tokens or bytes. xscale
    estimates tokens and bytes from some shards. `alpha_by` does not change the size of a sample."""
    workers: Annotated[int | Literal["auto"], PlainValidator(check_workers)] = "auto"
    """The number of data loading processes per rank; 0: the training process loads the data itself; auto: 2 on a CPU,
    and 4 to 6 on a GPU, depending on the number of cores."""
    cache: str | None = None
    """The folder on each machine to which xscale copies the shards that --data names by URL; null: ~/.cache/xscale."""

    lexicons: list[str] = dataclasses.field(default_factory=list)
    """A list of dictionary files, named after the language pair, such as en-de.txt. If the list is empty, xscale reads
    `lexicon/*.txt` in the first --data directory or its parent. A stream whose objective needs dictionaries reads the
    dictionaries of its languages. Dictionaries that no stream reads are used for evaluation only."""
    lexicon_heldout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The share of a dictionary's entries that no objective reads, chosen by a hash of the words. The metric
    `alignment/en-de` is measured on these withheld words, and `alignment_trained/en-de` on all other words. If the
    share is 0, there is no metric `alignment/en-de`."""


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    steps: Count = 1000
    """The number of optimizer steps of the run."""
    epochs: PositiveFloat | None = None
    """Replaces `steps`: the first stream of sentence pairs reads as many pairs as `epochs` times its number of pairs.
    With data.alpha 1, every pair is read `epochs` times; with a lower alpha, pairs of small languages are read more
    often than other pairs."""
    lr: PositiveFloat = 3e-4
    """The peak learning rate."""
    warmup: NotNegative = 0.1
    """The number of steps in which the learning rate rises linearly to `lr`. A number below 1 is a share of `steps`."""
    schedule: Literal["linear", "cosine", "1-sqrt"] | None = None
    """The curve by which the learning rate falls to 0: 1 - x, (1 + cos(pi x)) / 2 or 1 - sqrt(x), where x goes from 0
    to 1. null: linear, or the scheduler of the ds_config if it has one."""
    decay: NotNegative | None = None
    """The number of steps at the end of the run in which the learning rate falls. Between warm-up and decay, the
    learning rate stays at its peak (warm-up, stable, decay). A number below 1 is a share of `steps`. null: the learning
    rate falls in all steps after the warm-up; 0: it does not fall."""
    weight_decay: NotNegative = 0.01
    """The weight decay of AdamW. Biases and normalisation weights have no weight decay."""
    max_grad_norm: NotNegative = 1.0
    """The global norm to which gradients are clipped; 0: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the target probability that is spread over the whole vocabulary when a token is predicted."""
    z_loss: NotNegative = 0.0
    """The factor of logsumexp(logits)^2, which is added to the loss of each predicted token (PaLM: 1e-4)."""
    max_tokens: Count | None = None
    """The maximum number of tokens in one forward and backward pass of a rank (a packed row). null: on a GPU, as many
    as its memory holds, up to 65,536; on a CPU, 8,192. `max_tokens` changes the random masks of dropout; the rest of
    the training stays the same. More tokens per pass are faster: on an H200, xlmr-base trains 1.3 times as many tokens
    per second with 65,536 as with 16,384."""
    precision: Literal["auto", "fp16", "bf16", "fp32"] = "auto"
    """The precision of training. auto takes the precision of the ds_config if the hardware supports it, and fp32
    otherwise."""
    activation_checkpointing: bool = False
    """true: the forward pass stores only the inputs of each layer, and the backward pass computes the other activations
    again. Activation checkpointing saves memory, and a step takes about a third more time."""
    deterministic: bool = False
    """true: CUDA uses only algorithms that are reproducible bit for bit, so that a resumed run equals an uninterrupted
    run exactly. The backward pass of attention is slower. On a CPU, training is always reproducible."""
    seed: Annotated[int, Field(ge=-MOST, le=MOST)] = 0
    """The seed of the data order, the masks, the random weights and the dropout."""
    measure_every: Annotated[int, Field(ge=0, le=MOST)] = 100
    """The number of steps between two expensive measurements: the gradient norm of each stream, which needs a second
    backward pass, and the alignment scores of dictionaries; 0: never."""
    time_limit: PositiveFloat | None = None
    """The number of minutes after which the run saves and stops with exit code 75; the run always finishes at least one
    step. null: no limit."""
    stall_limit: PositiveFloat | None = 15.0
    """The number of minutes without progress after which the run ends with exit code 5; null: no limit. Before the run
    ends, the logs get the stack traces of every rank and the name of the rank for which the others wait. Time in which
    the process was suspended does not count. Collectives time out after 30 minutes."""
    skip_steps: list[Count] = dataclasses.field(default_factory=list)
    """Steps that read their data but do not change the model, counted from 1, such as [500, 501]. After a loss spike,
    resume from a checkpoint before the spike and skip the steps of the spike, for example with skip_steps=[$(seq -s,
    81200 81260)]."""

    @model_validator(mode="after")
    def warms_up_within_the_run(self) -> Self:
        if self.warmup > self.steps:
            raise ValueError(f"warmup: {self.warmup:g} exceeds the steps: {self.steps}")
        if self.decay is not None and self.whole_steps(self.warmup) + self.whole_steps(self.decay) > self.steps:
            raise ValueError(f"decay: {self.decay:g} and warmup: {self.warmup:g} exceed the steps: {self.steps}")
        return self

    def whole_steps(self, number: float) -> int:
        """Return `number` as a number of steps. A value below 1 is a share of the run's steps."""
        return round(number * self.steps) if number < 1 else int(number)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. The rates of the first and the last step are not 0."""
        warmup = self.whole_steps(self.warmup)
        decay = self.steps - warmup if self.decay is None else self.whole_steps(self.decay)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        x = max(step - (self.steps - decay), 0) / max(decay, 1)
        falls = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "1-sqrt": 1 - math.sqrt(x)}
        return self.lr * falls[self.schedule or "linear"]


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    every: Count = 500
    """The number of optimizer steps between two checkpoints. The run also saves after its last step."""
    keep: Annotated[int, Field(ge=2, le=MOST)] = 2
    """The number of newest complete checkpoints that the run keeps. The run deletes older checkpoints."""
    best: Annotated[str, Field(pattern="^.+/.+/.+$")] | None = None
    """The score by which the run chooses its best checkpoint: TASK/ROW/NUMBER from the results of `eval`, such as
    heldout/tlm/loss. The run keeps the best checkpoint, and the file checkpoints/best names it. Losses, perplexities
    and error rates (aer) are best when lowest, all other scores when highest."""


@dataclass(frozen=True, config=STRICT)
class EvalTask:
    name: str
    """The kind of the task. heldout measures the loss of each stream, language and language pair on the records in
    `data`. retrieval measures how often the nearest neighbour of a sentence is its translation, among the pairs in
    `data`. A second task of the same kind needs a suffix, such as heldout.test."""
    data: list[str] = dataclasses.field(default_factory=list)
    """Directories of shards for evaluation. The run must not train on the same shards."""
    limit: Count = 1000
    """The maximum number of records (sentences or pairs) of each language and language pair."""

    @model_validator(mode="after")
    def check_name(self) -> Self:
        if not re.fullmatch(r"(heldout|retrieval)(\.[A-Za-z0-9_.-]+)?", self.name):
            raise ValueError(
                f"name: {self.name!r} must be heldout or retrieval, or one of these with a suffix, such as "
                f"heldout.test; alignment needs no task, because the run writes its scores to metrics.jsonl"
            )
        return self

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Evaluations that the run makes itself, before step 1, every `every` steps, and at the end."""

    every: Count = 500
    """The number of optimizer steps between two evaluations."""
    tasks: list[EvalTask] = dataclasses.field(default_factory=list)
    """The list of tasks of each evaluation."""

    @model_validator(mode="after")
    def names_each_task_once(self) -> Self:
        names = [task.name for task in self.tasks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tasks: two tasks have the name {name}; write {name}.one, {name}.two")
        return self


IN_PHASES = {
    "model": frozenset({"rope_theta", "dropout"}),
    "data": frozenset({"max_length", "overlong", "languages", "languages_add", "alpha", "alpha_by"}),
    "train": frozenset({"lr"}),
    "streams": frozenset({"samples", "weight", "languages"}),
}
"""The fields that a phase may change, by section. Objectives name others in `in_phases` of their options."""


Value = TypeVar("Value")
Other = TypeVar("Other")


@dataclasses.dataclass(frozen=True)
class Schedule(Generic[Value]):
    """A value for each step of a run. A step in a phase has the value of the phase; steps after the last phase have the
    value of the recipe itself."""

    ends: tuple[int, ...]
    """The first step after each phase, counted from 0, in ascending order."""
    values: tuple[Value, ...]
    """The value of each phase, and at the end the value of the steps after the last phase."""

    def at(self, step: int) -> Value:
        """Return the value of a step, counted from 0."""
        return self.values[bisect_right(self.ends, step)]

    @property
    def last(self) -> Value:
        """The value of the steps after the last phase."""
        return self.values[-1]

    @classmethod
    def constant(cls, value: Value) -> "Schedule[Value]":
        """Return the schedule that has one value for all steps."""
        return cls((), (value,))

    def map(self, function: Callable[[Value], Other]) -> "Schedule[Other]":
        """Return the schedule of the function's results."""
        return Schedule(self.ends, tuple(function(value) for value in self.values))


@dataclass(frozen=True)
class Phase:
    """A range of a run's steps, in which some fields of the recipe have other values."""

    fields: dict[str, Any]
    """The phase as the recipe has it: `until`, and the values that the phase sets, by dotted field name. An integer
    `until` is a step, a float is a share of the run's steps."""
    end: int
    """The first step, counted from 0, that does not belong to the phase."""
    recipe: Any
    """The recipe (without phases) for the phase's steps."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Recipe:
    model: ModelConfig = ModelConfig()
    streams: dict[str, StreamConfig]
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    phases: tuple[Phase, ...] = ()
    """The phases in order. The steps after the last phase use the values of the recipe."""

    def at(self, step: int) -> "Recipe":
        """Return the recipe of a step, counted from 0."""
        return self.schedule.at(step)

    @property
    def schedule(self) -> Schedule["Recipe"]:
        ends = tuple(phase.end for phase in self.phases)
        recipes = [phase.recipe for phase in self.phases]
        return Schedule(ends, (*recipes, self))

    def stream_weight(self, name: str, step: int) -> float:
        """Return the factor of a stream's loss in a step, counted from 0."""
        stream = self.streams[name]
        steps = stream.warm_in * self.train.steps if stream.warm_in < 1 else stream.warm_in
        return stream.weight * min(1.0, (step + 1) / max(steps, 1.0))

    def any_stream(self, option: str) -> bool:
        """Return whether any stream sets this option to true."""
        return any(getattr(stream.options, option, False) for stream in self.streams.values())

    def shows_neutral(self) -> bool:
        """Return whether any sequence has the neutral token type 0. This is so if its stream has no language
        embeddings, or hides the languages of some sequences (language_dropout)."""
        for stream in self.streams.values():
            named = getattr(stream.options, "language_embeddings", False)
            if not named or getattr(stream.options, "language_dropout", 0) > 0:
                return True
        return False

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        for stream in fields["streams"].values():
            stream.update(stream.pop("options"))
        del fields["phases"]
        if self.phases:
            fields["phases"] = [phase.fields for phase in self.phases]
        return fields

    def identity(self) -> dict[str, Any]:
        """Return the fields that determine the result; a resume must not change them."""
        fields = self.to_dict()
        del fields["checkpoint"], fields["eval"]
        for section, names in NOT_IDENTITY.items():
            for name in names:
                del fields[section][name]
        return fields


NOT_IDENTITY = {
    "model": ("starts_from", "tokenizer"),
    "data": ("workers", "cache", "lexicons", "lexicon_heldout"),
    "train": (
        *("steps", "epochs", "max_tokens", "activation_checkpointing", "deterministic", "measure_every"),
        *("time_limit", "stall_limit", "skip_steps"),
    ),
}
"""The fields that a resumed run may change. The tokenizer and the dictionaries are compared by content, not by path."""
SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "eval": EvalConfig,
}
BY_EPOCHS = MOST
"""The value of train.steps in a recipe with `epochs`, until the number of pairs is known."""
EITHER = {"train.steps": "epochs", "train.epochs": "steps"}
"""Fields that exclude each other: `--set` of the first removes the second."""
RESTING = "0 is for a phase with other streams; write 1 or more"
Objectives = Mapping[str, type]
"""Name of an objective -> the class of its options."""


def steps_of_epochs(recipe: Recipe, pairs: int, samples: int) -> Recipe:
    """Return the recipe with train.steps computed from train.epochs. pairs: the number of pairs of an epoch; samples:
    the number of pairs of a step. Raises UserError."""
    train = recipe.train
    assert train.epochs
    steps = math.ceil(round(train.epochs * pairs / samples, 6))
    if train.steps not in (BY_EPOCHS, steps):
        raise UserError(
            f"train.steps: {train.steps:,}, but train.epochs: {train.epochs:g} are {steps:,} steps of {samples:,} of "
            f"{pairs:,} pairs; leave one of the two out"
        )
    problems = list[str]()
    train = validate(TrainConfig, dataclasses.asdict(train) | {"steps": steps}, "train", problems, {})
    if problems:
        raise UserError("\n".join(problems))
    return dataclasses.replace(recipe, train=train)


def default_values(cls: Any) -> dict[str, Any]:
    """Return the defaults of a section, or of the options of an objective. Fields without a default are left out."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}


def shipped_recipes() -> list[str]:
    """Return the names of the shipped recipes, such as "xlm" and "paper/tang_xlm"."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


# Reading. A function adds each problem to `problems` and continues.


def load_recipe(name: str, sets: list[str], objectives: Objectives) -> Recipe:
    """Return the shipped recipe `name`, or the recipe in the YAML file at the path `name`. sets: overrides
    `key.sub=value`. Raises UserError with every problem."""
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
        raise UserError(f"{path}: a recipe is a mapping with keys such as model, streams, data, train")
    problems = list[str]()
    for assignment in sets:
        try:
            apply_set_flag(tree, assignment)
        except ValueError as error:
            problems.append(f"--set {assignment[:80]}: {error}")
    phases = tree.pop("phases", None) or []
    recipe = build_recipe(tree, objectives, problems)
    if recipe and not problems:
        recipe = dataclasses.replace(recipe, phases=build_phases(recipe, phases, tree, objectives, problems))
    if problems or recipe is None:
        source = f"{path} with --set" if sets else f"{path}"
        raise UserError(f"recipe {source}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return recipe


def apply_set_flag(tree: dict[str, Any], assignment: str) -> None:
    """Set a field of the tree as `--set` says, such as "train.lr=3e-4". Raises ValueError."""
    dotted, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError("needs the form key.sub=value")
    try:
        value = read_yaml(text)
    except ValueError as error:
        raise ValueError(f"is not YAML: {str(error).splitlines()[0]}") from None
    set_field(tree, dotted, value)


def set_field(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a field of the tree by its dotted name. Raises ValueError."""
    *parents, last = dotted.split(".")
    node: Any = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ValueError(f"{parent} has no fields")
    node[last] = value
    if dotted in EITHER and value is not None:
        node.pop(EITHER[dotted], None)


def build_recipe(
    tree: dict[str, Any], objectives: Objectives, problems: list[str], is_phase: bool = False
) -> Recipe | None:
    """Return the recipe with these fields, without phases, or None if there is a problem."""
    fields = copy.deepcopy({name: value for name, value in tree.items() if value is not None})
    train = fields.get("train")
    if isinstance(train, dict) and train.get("epochs") is not None:
        train.setdefault("steps", BY_EPOCHS)
    options = dict[str, Any]()
    streams = fields.get("streams")
    if not streams or not isinstance(streams, dict):
        problems.append("streams: needs at least one, such as {mlm: {objective: mlm, samples: 64}}")
        streams = {}
    fields["streams"] = dict[str, Any]()
    for key, stream in streams.items():
        name = str(key)  # YAML reads a name such as 1 as a number
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            problems.append(f"streams.{name}: a stream's name may have only letters, digits, _ and -")
        if not isinstance(stream, dict):
            problems.append(f"streams.{name}: needs fields, such as {{objective: mlm, samples: 64}}")
            continue
        fields["streams"][name] = stream
        options[name] = take_options(f"streams.{name}", stream, objectives, problems)
        if stream.get("samples") == 0 and not is_phase:
            problems.append(f"streams.{name}.samples: {RESTING}")
    keys = {name: field_names(cls) for name, cls in SECTIONS.items()}
    recipe = validate(Recipe, fields, "", problems, keys | {"": field_names(Recipe)})
    if problems:
        return None
    for name, stream in recipe.streams.items():
        options[name] = dataclasses.replace(stream, options=options[name])
    recipe = dataclasses.replace(recipe, streams=options)
    problems += find_contradictions(recipe)
    return recipe


def take_options(where: str, stream: dict[str, Any], objectives: Objectives, problems: list[str]) -> Any:
    """Remove the objective's own fields from those of a stream, and return them as an instance of its options class, or
    None if there is a problem."""
    shared = field_names(StreamConfig)
    fields = {name: stream.pop(name) for name in [*stream] if name not in shared}
    objective = stream.get("objective")
    if not isinstance(objective, str):
        return None  # `validate` adds this problem
    try:
        options_class = find_options(objective, objectives)
    except UserError as error:
        problems.append(f"{where}.objective: {error}")
        return None
    return validate(options_class, fields, where, problems, {where: [*shared, *field_names(options_class)]})


def find_options(objective: str, objectives: Objectives) -> Any:
    """Return the options class of an objective. Raises UserError."""
    if objective in objectives:
        return objectives[objective]
    if ":" not in objective:
        names = ", ".join(sorted(objectives))
        raise UserError(f"{objective!r} is unknown; use one of {names}, or MODULE:NAME for an objective of your own")
    options_class: Any = import_objective(objective).options
    shared = [name for name in field_names(options_class) if name in field_names(StreamConfig)]
    if shared:
        raise UserError(f"all streams already have fields named {', '.join(shared)}; rename these options")
    return options_class


def find_contradictions(recipe: Recipe) -> list[str]:
    """Return a line for each value that does not fit a value of another section."""
    problems = list[str]()
    if not any(stream.samples for stream in recipe.streams.values()):
        problems += [f"streams.{name}.samples: {RESTING}" for name in recipe.streams]
    tasks = [task.name for task in recipe.eval.tasks]
    best = recipe.checkpoint.best
    if best and best.partition("/")[0] not in tasks:
        names = ", ".join(tasks) or "none"
        problems.append(f"checkpoint.best: {best} names no task of eval.tasks, which has: {names}")
    return problems


# Phases


def build_phases(
    recipe: Recipe, phases: Any, tree: dict[str, Any], objectives: Objectives, problems: list[str]
) -> tuple[Phase, ...]:
    """Return the phases of the recipe. tree: the recipe's fields without the phases."""
    if not isinstance(phases, list):
        problems.append(f"phases: {phases!r} is not a list; write [{{until: 0.5, data.alpha: 0.3}}]")
        return ()
    if phases and recipe.train.epochs:
        problems.append("phases: need train.steps in the place of train.epochs")
    allowed = phase_fields(recipe, objectives)
    built = list[Phase]()
    for number, fields in enumerate(phases):
        changes = {str(name): value for name, value in (fields if isinstance(fields, dict) else {}).items()}
        begin = built[-1].end if built else 0
        until = changes.pop("until", None)
        phase_problems = list[str]()
        end = end_of_phase(until, begin, recipe.train.steps, phase_problems)
        phase_tree = copy.deepcopy(tree)
        for name, value in changes.items():
            if problem := phase_problem(name, value, changes, recipe, allowed):
                phase_problems.append(problem)
            elif name == "data.languages_add":
                set_field(phase_tree, "data.languages", [*(recipe.data.languages or ()), *value])
            else:
                set_field(phase_tree, name, value)
        if not phase_problems:
            phase_recipe = build_recipe(phase_tree, objectives, phase_problems, is_phase=True)
            built.append(Phase({"until": until} | changes, end, phase_recipe))
        problems += [f"phases[{number}].{problem}" for problem in phase_problems]
    return tuple(built)


def end_of_phase(until: Any, first: int, steps: int, problems: list[str]) -> int:
    """Return the first step after a phase that begins at the step `first`. steps: those of the run."""
    end = until if type(until) is int else -1
    if type(until) is float and 0 < until <= 1:
        end = round(until * steps)
    if end < first:
        problems.append(
            f"until: {until!r} is neither a step (an integer, at least {first}) nor a share of the run (a float, such "
            f"as 0.8, and 1.0 for its end)"
        )
    return end


def phase_fields(recipe: Recipe, objectives: Objectives) -> list[str]:
    """Return the dotted names of the fields that a phase of the recipe may change."""
    names = list[str]()
    for section in ("model", "data", "train"):
        names += [f"{section}.{field}" for field in IN_PHASES[section]]
    for name, stream in recipe.streams.items():
        options = getattr(find_options(stream.objective, objectives), "in_phases", frozenset[str]())
        names += [f"streams.{name}.{field}" for field in IN_PHASES["streams"] | options]
    return sorted(names)


def phase_problem(name: str, value: Any, changes: dict[str, Any], recipe: Recipe, allowed: list[str]) -> str:
    """Return a line about a field that a phase with these changes cannot set, or an empty string."""
    if name not in allowed:
        return (
            removed_field(name) or f"{name}: a phase cannot change this field; a phase may change {', '.join(allowed)}"
        )
    if name == "model.rope_theta" and recipe.model.rope_theta is None:
        return f"{name}: also set it for the whole recipe, because the steps after the phase use that value"
    if name == "data.languages_add":
        if "data.languages" in changes:
            return f"{name}: the phase also has data.languages; list all languages in data.languages"
        if recipe.data.languages is None or not isinstance(value, list):
            return f"{name}: needs a list, and a recipe with data.languages, to which the list is added"
    return ""


# Checks of types and ranges, by pydantic


def validate(cls: Any, fields: Any, where: str, problems: list[str], keys: Mapping[str, Sequence[str]]) -> Any:
    """Return an instance of `cls` with these fields, or None if there is a problem. where: the fields' place in the
    recipe. keys: place -> the keys that are listed if a key there is unknown."""
    try:
        text = json.dumps(fields, default=str)
    except TypeError as error:  # YAML reads a key such as 2024-01-01 as a date
        problems.append(f"{where or 'recipe'}: a key is not text ({error}); put it between quotes, or remove it")
        return None
    try:
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        problems += [describe_problem(details, where, keys) for details in error.errors()]
        return None


def field_names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.name != "options"]


def describe_problem(details: Any, where: str, keys: Mapping[str, Sequence[str]]) -> str:
    """Return a line about one of pydantic's errors. where, keys: see `validate`."""
    kind = details["type"]
    value = details["input"]
    name = where
    for part in details["loc"]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    name = name.removeprefix(".")
    if kind == "unexpected_keyword_argument":
        names = keys.get(name.rpartition(".")[0])
        return removed_field(name) or f"{name}: unknown key" + (f"; the keys are {', '.join(names)}" if names else "")
    if kind == "missing":
        return f"{name}: is required"
    if kind == "list_type":
        return f"{name}: {value!r} is not a list; write [{value}]"
    if kind == "value_error" and isinstance(value, dict):  # a section's fields do not fit each other
        return f"{name}.{details['ctx']['error']}"
    message = (
        details["msg"]
        .removeprefix("Value error, ")
        .replace("Input should", "the value must")
        .replace("String should", "the text must")
    )
    return f"{name}: {value!r}: {message}"
