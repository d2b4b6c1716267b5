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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PositiveFloat,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from xscale.errors import UserError, indent_lines
from xscale.removed import message_if_removed_or_hugging_face_field
from xscale.strict_yaml import parse_yaml

RECIPES = Path(__file__).parent / "recipes"

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""The pydantic settings of the sections of a recipe, and of an objective's options."""
NotNegative = Annotated[float, Field(ge=0)]
LARGEST_FACTOR = 1_000_000
"""The largest factor of a loss. The product of two factors can be represented in fp32."""
LossFactor = Annotated[float, Field(ge=0, le=LARGEST_FACTOR)]
MOST = 1 << 40
"""The maximum number of steps, samples or tokens. It is larger than needed, and a float represents it exactly."""
Count = Annotated[int, Field(gt=0, le=MOST)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


def check_steps_or_share(value: float) -> float:
    if 1 < value < 2:
        raise ValueError("the value must be a share of the run's steps, such as 0.1, or a whole number of steps")
    return value


StepsOrShare = Annotated[float, Field(ge=0), AfterValidator(check_steps_or_share)]


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    starts_from: Literal["any", "scratch", "model"] = "any"
    """The kind of initial weights for which the recipe's learning rate and dropout were chosen. scratch: random
    weights. A learning rate for random weights can harm a pre-trained model. So if you set `init` to a model that
    xscale has not trained, you must also set train.lr by --set. model: the weights of a pre-trained model, so you must
    set `init`. any: either kind."""
    init: Text | None = None
    """The model whose weights the run starts from: a Hugging Face directory, the name of a model on the Hugging Face
    hub, or a run or checkpoint of xscale. null: the run starts from random weights, in the architecture that `preset`
    names."""
    preset: Literal["tiny", "mini", "small", "base", "xlmr-base", "modern-small", "modern-base"] = "tiny"
    """The architecture of the encoder if `init` is null (random weights)."""
    tokenizer: Text | None = None
    """A directory with a Hugging Face tokenizer. If the model `init` has a tokenizer, the directory must have the same
    tokenizer. null: the tokenizer of `init`; without `init`, the folder `tokenizer/` in the first local --data
    directory, or else in its parent."""
    dropout: Annotated[float, Field(ge=0, le=0.9)] | None = 0.1
    """The dropout probability of hidden states and attention. null: the dropout of the model `init`; without `init`,
    0.1."""
    attention_gain: PositiveFloat | None = None
    """The gain g of attention layers that start from random weights: the weights of their value and output projections
    have the standard deviation g / sqrt(hidden size). null: the standard deviation is 0.02, as in transformers (in the
    preset tiny, this is g = 0.23). With g = 1, the [CLS] vectors of different sentences are at first less similar than
    with null. So contrastive losses begin to fall earlier than with null. Other losses begin to fall somewhat later."""


@dataclass(frozen=True, config=STRICT)
class StreamConfig:
    """A stream of the recipe: an objective, the text that it reads, and the number of samples in a step."""

    objective: str
    """The name of the objective, such as mlm or tlm. An objective of another Python package is written MODULE:NAME (the
    variable NAME of the module MODULE)."""
    samples: Annotated[int, Field(ge=0, le=MOST)]
    """The number of samples that all ranks together read in a step. In a stream of sentence pairs, a sample is one
    pair. In a stream of monolingual text, a sample has about data.max_length tokens: consecutive sentences of one
    document, or several short documents. Each document of a sample forms a sequence (one input of the encoder), or
    several if it is too long for one. In a phase, 0 pauses the stream."""
    weight: Annotated[float, Field(gt=0, le=LARGEST_FACTOR)] = 1.0
    """The factor by which the stream's loss is multiplied in the total loss of a step."""
    warm_in: NotNegative = 0.0
    """The number of steps at the beginning of the run in which the factor of the stream's loss rises linearly to
    `weight`, from `weight` / `warm_in` in the first step. A number below 1 is a share of train.steps."""
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """The languages, such as en, or language pairs, such as en-de or de-en, whose text and dictionaries the stream
    reads. The list [en, de] also selects the pair en-de. null: the languages in data.languages."""
    options: Any = None
    """The objective's own fields. In YAML they are written beside the stream's other fields."""


def check_workers(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= 1024):
        return value
    raise ValueError("the value must be auto or a whole number from 0 to 1024")


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    max_length: Annotated[int, Field(ge=8, le=MOST)] = 128
    """The maximum number of tokens in a sequence, including special tokens such as [CLS]."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What a stream does with sentence pairs whose two sentences together have more than `max_length` tokens. drop:
    leave these pairs out; truncate: cut these pairs to `max_length` tokens. The metric `too_long/STREAM/en-de` (STREAM
    is the stream's name) is the share of such pairs among the en-de pairs that the stream reads in a step."""
    segments: bool = True
    """Whether the two sentences of a pair have different token types. true: the first sentence has token type 0, and
    the second one has 1. false: both sentences have token type 0. Both sentences also have token type 0 if the model or
    the tokenizer has only one token type. If a stream has language embeddings, its token types stand for languages, and
    all tokens of the other streams have token type 0."""
    first: Count | None = None
    """The maximum number of records of each language and of each language pair. The run reads the first records, in the
    order of the --data directories and of the shards in each directory. null: no limit."""
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """The languages, such as en, or language pairs, such as en-de, that a stream reads if it has no field `languages`
    of its own. null: all languages and pairs."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.7
    """The exponent alpha of sampling. A stream samples each of its languages, or language pairs, with a probability
    proportional to n^alpha, where n is the size of the text in this language or pair."""
    alpha_by: Literal["records", "tokens", "bytes"] = "records"
    """The unit in which sampling by `alpha` measures the size n of a language's text: records, tokens or bytes. xscale
    estimates the numbers of tokens and bytes from some shards."""
    workers: Annotated[int | Literal["auto"], PlainValidator(check_workers)] = "auto"
    """The number of processes per rank that load data. 0: the training process loads the data itself. auto: 2 processes
    on a CPU, and 4 to 6 on a GPU, depending on the number of cores."""
    cache: Text | None = None
    """The folder to which xscale copies, on each machine, the shards that --data names by URL. null:
    ~/.cache/xscale."""

    lexicons: list[Text] = dataclasses.field(default_factory=list)
    """The paths of the dictionary files, each named after its languages, such as en-de.txt. If the list is empty,
    xscale reads the dictionaries of the data's languages from the folder `lexicon/` in the first local --data
    directory, or else in its parent (of de-en.txt and en-de.txt, only the first by name). A stream whose objective
    needs dictionaries reads those for two of its languages; a stream with a single language reads all those of this
    language. A dictionary that no stream reads is used only for the metrics `alignment/...`."""
    lexicon_heldout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The share of a dictionary's entries that are withheld from all objectives. A hash of the words chooses these
    entries. The metric `alignment/en-de` scores the words that occur only in withheld entries, and
    `alignment_trained/en-de` scores all other words. The score is the share of words for which the nearest token
    embedding of the other language is that of a translation. With the value 0, a run has no metric
    `alignment/en-de`."""


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    steps: Count = 1000
    """The number of steps (updates of the optimizer) of the run."""
    epochs: PositiveFloat | None = None
    """The length of the run, in place of `steps`: the run ends when the recipe's first stream of sentence pairs has
    read `epochs` times as many pairs as its data have. With data.alpha 1, the stream reads each sentence pair about
    `epochs` times. With a lower data.alpha, it reads the sentence pairs of small language pairs more often than those
    of large ones. null: the length is `steps`."""
    lr: PositiveFloat = 3e-4
    """The peak learning rate. New heads can have another one (`head_lr`)."""
    head_lr: PositiveFloat | None = None
    """The peak learning rate of new heads: the layers that objectives add to the encoder. The masked-LM head (the
    layers that predict tokens) counts as new, too, unless model.init is a model with a trained masked-LM head. The
    learning rate of new heads rises and falls in the same steps as that of the other weights. null: the value of
    `lr`."""
    warmup: StepsOrShare = 0.1
    """The number of steps at the beginning of the run in which the learning rate rises linearly to `lr`. A number below
    1 is a share of `steps`."""
    schedule: Literal["linear", "cosine", "1-sqrt"] | None = None
    """The curve by which the learning rate falls. The learning rate is `lr` times 1 - x (linear), (1 + cos(pi x)) / 2
    (cosine) or 1 - sqrt(x) (1-sqrt), where x rises from 0 to 1 in the steps of `decay`. null: the scheduler of the
    ds_config, or linear if the ds_config has no scheduler."""
    decay: StepsOrShare | None = None
    """The number of steps at the end of the run in which the learning rate falls. Between warm-up and decay, the
    learning rate is constant. A number below 1 is a share of `steps`. null: the learning rate falls in all steps after
    the warm-up. 0: the learning rate never falls."""
    weight_decay: NotNegative = 0.01
    """The weight decay of AdamW. Biases and the weights of normalisation layers have no weight decay."""
    max_grad_norm: NotNegative = 1.0
    """The maximum norm of the gradient of all weights: a larger gradient is scaled down to this norm. 0: no maximum."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """For each predicted token: the share of the target probability that is spread evenly over the whole vocabulary.
    The correct token has the rest."""
    z_loss: NotNegative = 0.0
    """The factor of the term logsumexp(logits)^2, which is added to the loss of each predicted token. PaLM used the
    factor 1e-4."""
    max_tokens: Count | None = None
    """The maximum number of tokens in one forward and backward pass of a rank. null: on a GPU, as many tokens as the
    GPU's memory holds, up to 65,536; on a CPU, 8,192. With more tokens per pass, the run is faster; the losses change
    only through rounding and through dropout's random masks."""
    precision: Literal["auto", "fp16", "bf16", "fp32"] = "auto"
    """The precision of training. auto: the 16-bit precision of the ds_config (fp16 or bf16), or fp32 if the ds_config
    has none. If the ds_config has `enabled: "auto"` for this precision, the run uses it only on hardware that supports
    it, and fp32 otherwise."""
    deterministic: bool = False
    """true: CUDA uses only algorithms that are reproducible bit for bit, so a resumed run has exactly the same weights
    as an uninterrupted run. But the backward pass of attention is slower than with false."""
    seed: Annotated[int, Field(ge=-MOST, le=MOST)] = 0
    """The seed of the data order, the masked tokens, the random weights and the dropout."""
    measure_every: Annotated[int, Field(ge=0, le=MOST)] = 100
    """The run measures its expensive metrics in step 1 and in each step whose number is divisible by this value. These
    metrics are the gradient norm of each stream, which needs a second backward pass, and the scores `alignment/...` of
    dictionaries. 0: the run never measures these metrics."""
    time_limit: PositiveFloat | None = None
    """The number of minutes, from the start of the processes, after which the run saves a checkpoint and stops with
    exit code 75. After each start, the run does at least one step, even beyond the limit. null: no limit."""
    stall_limit: PositiveFloat | None = 15.0
    """The number of minutes without progress after which the run ends with exit code 5. Minutes in which the process
    was suspended do not count. null: no limit; but torch.distributed still ends a collective operation that takes 30
    minutes."""
    skip_steps: list[Count] = dataclasses.field(default_factory=list)
    """The numbers of the steps, such as [500, 501], in which the run reads its data but does not change the model. The
    run's first step is step 1."""

    @model_validator(mode="after")
    def check_warmup_and_decay_fit(self) -> Self:
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup: {self.warmup:g} steps are more than the {self.steps} steps of the run. Lower train.warmup, "
                "or raise train.steps"
            )
        if self.decay is not None and self.steps_of_share(self.warmup) + self.steps_of_share(self.decay) > self.steps:
            raise ValueError(
                f"decay: {self.steps_of_share(self.decay)} steps of decay and {self.steps_of_share(self.warmup)} steps "
                f"of warm-up are more than the {self.steps} steps of the run. Lower train.decay or train.warmup, or "
                "raise train.steps"
            )
        return self

    def steps_of_share(self, number_or_share: float) -> int:
        """Return `number_or_share` as a number of steps. A value below 1 is a share of the run's steps."""
        return round(number_or_share * self.steps) if number_or_share < 1 else int(number_or_share)

    def learning_rate(self, step: int, peak: float | None = None) -> float:
        """Return the learning rate of a step, counted from 0. The rates of the first and the last step are not 0. peak:
        the peak learning rate; None: `lr`."""
        peak = peak or self.lr
        warmup = self.steps_of_share(self.warmup)
        decay = self.steps - warmup if self.decay is None else self.steps_of_share(self.decay)
        if step < warmup:
            return peak * (step + 1) / warmup
        x = max(step - (self.steps - decay), 0) / max(decay, 1)
        falls = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "1-sqrt": 1 - math.sqrt(x)}
        return peak * falls[self.schedule or "linear"]


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    every: Count = 500
    """The number of steps between two checkpoints. The run also saves a checkpoint before its first step and after its
    last step."""
    keep: Annotated[int, Field(ge=2, le=MOST)] = 2
    """The number of newest checkpoints that the run keeps. The run also keeps its best checkpoint (field `best`)."""
    best: Annotated[str, Field(pattern="^.+/.+/.+$")] | None = None
    """The score by which the run chooses its best checkpoint, written TASK/ROW/METRIC. TASK is a task in `eval.tasks`,
    ROW is a row of its results, and METRIC is a score in this row. For example, heldout/tlm/loss is the loss of the
    stream tlm in the task heldout. The best value of a loss is the lowest one; the best value of another score is the
    highest one. The run keeps the best checkpoint, and writes its name to the run's file checkpoints/best. null: no
    best checkpoint."""


@dataclass(frozen=True, config=STRICT)
class EvalTask:
    name: Annotated[str, Field(pattern=r"^(heldout|retrieval)(\.[A-Za-z0-9_.-]+)?$")]
    """The kind of the task: heldout or retrieval. heldout measures the loss of each stream on the records in `data`,
    for all records together and for each language or language pair. retrieval compares the vectors of the sentences in
    `data`, and measures the share of sentences whose nearest neighbour in the other language is their translation. A
    second task of the same kind needs a suffix, such as heldout.test."""
    data: list[Text] = dataclasses.field(default_factory=list)
    """Directories of shards for evaluation. The run must not train on the same shards."""
    limit: Count = 1000
    """The maximum number of records that the task reads of each language and of each language pair."""

    @property
    def kind(self) -> str:
        """The part of the name before the first dot, such as "retrieval"."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Evaluations that the run makes itself, before step 1, every `every` steps, and at the end."""

    every: Count = 500
    """The number of steps between two evaluations. The run also evaluates before step 1 and after its last step."""
    tasks: list[EvalTask] = dataclasses.field(default_factory=list)
    """The tasks that the run measures in each evaluation. With an empty list, the run has no evaluations."""

    @property
    def task_names(self) -> list[str]:
        return [task.name for task in self.tasks]

    @model_validator(mode="after")
    def check_task_names_differ(self) -> Self:
        names = self.task_names
        if len(set(names)) < len(names):
            raise ValueError(
                f"tasks: two tasks have the same name ({', '.join(names)}). Add a different suffix to each name, "
                "as in heldout.one and heldout.two"
            )
        return self


SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "eval": EvalConfig,
}
NOT_IDENTITY = {
    "model": ("starts_from", "tokenizer"),
    "data": ("workers", "cache", "lexicons", "lexicon_heldout"),
    "train": (
        *("steps", "epochs", "max_tokens", "deterministic", "measure_every", "time_limit", "stall_limit"),
        "skip_steps",
    ),
}
"""The fields that a resumed run may change. The tokenizer and the dictionaries are compared by content, not by path."""
IN_PHASES = (
    *("model.dropout", "train.lr", "data.max_length", "data.overlong", "data.languages", "data.languages_add"),
    *("data.alpha", "data.alpha_by"),
)
"""The fields that a phase may change, besides those of streams."""
STREAM_FIELDS = tuple(field.name for field in dataclasses.fields(StreamConfig) if field.name != "options")
"""The fields of every stream."""
STREAM_IN_PHASES = ("samples", "weight", "languages")
"""The fields of a stream that a phase may change. Objectives name others in `in_phases` of their options."""
BY_EPOCHS = MOST
"""The value of train.steps in a recipe with `epochs`, until the number of pairs is known."""
ObjectivesByName = Mapping[str, Any]
"""Name of an objective -> the Objective (xscale/objectives/base.py). Raises KeyError for an unknown name."""

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
        return Schedule(self.ends, tuple(map(function, self.values)))


@dataclasses.dataclass(frozen=True)
class Phase:
    """A range of a run's steps, in which some fields of the recipe have other values."""

    fields: dict[str, Any]
    """The phase as the recipe has it: `until`, and the values that the phase sets, by dotted field name. An integer
    `until` is a step, a float is a share of the run's steps."""
    end: int
    """The first step, counted from 0, that does not belong to the phase."""
    recipe: Any
    """The Recipe (without phases) for the phase's steps."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of a run, read from the YAML file and the values of --set, and checked."""

    model: ModelConfig
    streams: dict[str, StreamConfig]
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    phases: tuple[Phase, ...] = ()
    """The phases in order. The steps after the last phase use the values of the recipe."""

    def at(self, step: int) -> "Recipe":
        """Return the recipe of a step, counted from 0."""
        return self.schedule.at(step)

    @property
    def schedule(self) -> Schedule["Recipe"]:
        recipes = [phase.recipe for phase in self.phases]
        return Schedule(tuple(phase.end for phase in self.phases), (*recipes, self))

    def stream_weight(self, name: str, step: int) -> float:
        """Return the factor of a stream's loss in a step, counted from 0."""
        stream = self.streams[name]
        steps = stream.warm_in * self.train.steps if stream.warm_in < 1 else stream.warm_in
        return stream.weight * min(1.0, (step + 1) / max(steps, 1.0))

    def any_stream_sets(self, option: str) -> bool:
        """Return whether any stream sets this option to true."""
        return any(getattr(stream.options, option, False) for stream in self.streams.values())

    def has_sequences_without_language(self) -> bool:
        """Return whether any sequence has the neutral token type 0. This is so if its stream has no language
        embeddings, or hides the languages of some sequences (language_dropout)."""
        for stream in self.streams.values():
            hides_languages = getattr(stream.options, "language_dropout", 0.0) > 0
            if hides_languages or not getattr(stream.options, "language_embeddings", False):
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


def default_values(cls: Any) -> dict[str, Any]:
    """Return the defaults of a section, or of the options of an objective. Fields without a default are left out."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}


def shipped_recipe_names() -> list[str]:
    """Return the names of the shipped recipes, such as "xlm" and "paper/tang_xlm"."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


# Reading. A function adds each problem to `problems` and continues.


def load_recipe(name: str, sets: list[str], objectives: ObjectivesByName) -> Recipe:
    """Return the shipped recipe `name`, or the recipe in the YAML file at the path `name`. sets: overrides
    `key.sub=value`. Raises UserError with every problem."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except ValueError as error:
        raise UserError(f"{path} cannot be read as YAML ({error}). Correct the file") from None
    except OSError as error:
        raise UserError(
            f"recipe {name!r} not found ({path}: {error.strerror}). Use a recipe of xscale "
            f"({', '.join(shipped_recipe_names())}) or a file that ends in .yaml"
        ) from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a recipe. Write a YAML mapping with keys such as model, streams, data, train")
    problems = list[str]()
    for assignment in sets:
        apply_set_flag(tree, assignment, problems)
    phases = tree.pop("phases", None)
    phases = [] if phases is None else phases
    recipe = build_recipe_without_phases(tree, objectives, problems)
    if recipe is not None and not problems:
        recipe = dataclasses.replace(recipe, phases=build_phases(recipe, phases, tree, objectives, problems))
    if problems or recipe is None:
        raise UserError(f"recipe {path}{', changed on the command line' if sets else ''}:\n{indent_lines(problems)}")
    return recipe


def apply_set_flag(tree: dict[str, Any], assignment: str, problems: list[str]) -> None:
    """Set a field of the tree as `--set` says, such as "train.lr=3e-4". The number of steps replaces train.epochs."""
    dotted, equals, text = assignment.partition("=")
    if equals and not text.strip():
        problems.append(
            f"--set {assignment} has no value, perhaps because a shell variable is not set. Write {dotted}=null for no "
            "value"
        )
        return
    try:
        if not equals:
            raise ValueError("the = is missing")
        set_field(tree, dotted, parse_yaml(text))
        if dotted == "train.steps":
            tree["train"].pop("epochs", None)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        problems.append(
            f"--set {assignment[:80]}: {reason}. Write SECTION.FIELD=VALUE, with a value in YAML. If the value has "
            "spaces, put 'SECTION.FIELD=VALUE' into quotation marks"
        )


def set_field(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a field of the tree by its dotted name. Raises ValueError."""
    *parents, last = dotted.split(".")
    node: Any = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ValueError(f"{parent} is a single value and has no fields")
    node[last] = value


def build_recipe_without_phases(
    tree: dict[str, Any], objectives: ObjectivesByName, problems: list[str], is_phase: bool = False
) -> Recipe | None:
    """Return the recipe with these fields, without phases. Return None if there is a problem, except one of
    checkpoint.best."""
    sections: dict[str, Any] = {name: cls() for name, cls in SECTIONS.items()}
    for name, fields in tree.items():
        if name in SECTIONS and fields is not None:
            if name == "train" and isinstance(fields, dict) and fields.get("epochs"):
                if fields.get("steps") is not None:
                    parse_section(TrainConfig, {"steps": fields["steps"]}, name, problems)
                fields = fields | {"steps": BY_EPOCHS}
            sections[name] = parse_section(SECTIONS[name], fields, name, problems)
        elif name not in (*SECTIONS, "streams"):
            problems.append(unknown_or_removed_key_message(name, "a recipe", (*SECTIONS, "streams", "phases")))
    streams = tree.get("streams")
    if not streams or not isinstance(streams, dict):
        problems.append("streams: the recipe needs at least one stream, such as {mlm: {objective: mlm, samples: 64}}")
        return None
    read = {name: parse_stream(name, fields, objectives, problems) for name, fields in streams.items()}
    paused = [name for name, stream in read.items() if stream is not None and stream.samples == 0]
    if not is_phase or len(paused) == len(streams):
        problems += [
            (
                f"streams.{name}.samples: the value 0 is allowed only in a phase, and only if another stream of the "
                "phase has samples. Write 1 or more"
            )
            for name in paused
        ]
    if problems:
        return None
    recipe = Recipe(streams=read, **sections)
    best = recipe.checkpoint.best
    tasks = recipe.eval.task_names
    if best and best.partition("/")[0] not in tasks:
        problems.append(
            f"checkpoint.best: {best} does not begin with the name of a task in eval.tasks (names: "
            f"{', '.join(tasks) or 'none'}). Write TASK/ROW/METRIC, such as heldout/mlm/loss for the loss of the "
            "stream mlm"
        )
    return recipe


def parse_stream(name: str, fields: Any, objectives: ObjectivesByName, problems: list[str]) -> Any:
    """Return a stream with the options of its objective, or None if there is a problem."""
    where = f"streams.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        problems.append(f"{where}: the name of a stream may have only letters, digits, _ and -")
    if not isinstance(fields, dict):
        problems.append(f"{where}: a stream needs fields, such as {{objective: mlm, samples: 64}}")
        return None
    own = dict(fields)
    shared = {key: own.pop(key) for key in STREAM_FIELDS if key in own}
    stream = parse_section(StreamConfig, shared, where, problems)
    if not isinstance(shared.get("objective"), str):
        return None
    try:
        objective = objectives[shared["objective"]]
    except KeyError as unknown:
        names = ", ".join(sorted(objectives))
        problems.append(
            f"{where}.objective: the objective {unknown} is unknown. Write one of {names}, or MODULE:NAME for an "
            "objective of another package"
        )
        return None
    except UserError as error:
        problems.append(f"{where}.objective: {error}")
        return None
    options = parse_section(objective.options, own, where, problems, STREAM_FIELDS)
    if stream is None:
        return None
    return dataclasses.replace(stream, options=options)


# Phases


def build_phases(
    recipe: Recipe, phases: Any, tree: dict[str, Any], objectives: ObjectivesByName, problems: list[str]
) -> tuple[Phase, ...]:
    """Return the phases of the recipe. tree: the recipe's fields without the phases."""
    if not isinstance(phases, list):
        problems.append(f"phases: {phases!r} is not a list. Write a list such as [{{until: 0.5, data.alpha: 0.3}}]")
        return ()
    if phases and recipe.train.epochs:
        problems.append("phases: a recipe with phases needs train.steps instead of train.epochs")
    built = list[Phase]()
    end = 0.0
    for number, fields in enumerate(phases):
        fields = fields if isinstance(fields, dict) else {}
        phase_problems = list[str]()
        end = steps_until_end_of_phase(fields.get("until"), end, recipe.train.steps, phase_problems)
        phase_tree = copy_tree_with_phase_fields(recipe, fields, tree, phase_problems)
        if not phase_problems:
            phase_recipe = build_recipe_without_phases(phase_tree, objectives, phase_problems, is_phase=True)
            built.append(Phase(fields, round(end), phase_recipe))
        problems += [f"phases[{number}].{problem}" for problem in phase_problems]
    return tuple(built)


def steps_until_end_of_phase(until: Any, begin: float, steps: int, problems: list[str]) -> float:
    """Return the number of steps before the end of a phase. It is not rounded, so that two different shares differ also
    in a short run, where a phase between two shares may have no step. begin: the number of steps before the phase.
    steps: those of the run."""
    end: float = until if type(until) is int else -1
    if type(until) is float and 0 < until <= 1:
        end = until * steps
    if end <= begin or (type(until) is int and until <= round(begin)):
        problems.append(
            f"until: {until!r} cannot be the last step of the phase. Write the number of a step, at least "
            f"{round(begin) + 1}, or a share of the run's steps, such as 0.8 (1.0 is the end of the run)"
        )
    return end


def copy_tree_with_phase_fields(
    recipe: Recipe, fields: dict[str, Any], tree: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Return a copy of the tree with the fields of a phase."""
    allowed = list(IN_PHASES)
    for name, stream in recipe.streams.items():
        for field in (*STREAM_IN_PHASES, *getattr(stream.options, "in_phases", ())):
            allowed.append(f"streams.{name}.{field}")
    tree = copy.deepcopy(tree)
    for name, value in fields.items():
        if name not in ("until", *allowed):
            problems.append(
                message_if_removed_or_hugging_face_field(name)
                or f"{name}: a phase cannot change this field. A phase can change {', '.join(sorted(allowed))}"
            )
        elif name not in ("until", "data.languages_add"):
            set_field(tree, name, value)
    if "data.languages_add" in fields:
        added = fields["data.languages_add"]
        languages = (tree.get("data") or {}).get("languages")
        if isinstance(languages, list) and isinstance(added, list):
            set_field(tree, "data.languages", [*languages, *added])
        else:
            problems.append(
                "data.languages_add: the value must be a list of languages, and the recipe must set data.languages"
            )
    return tree


# Checks of types and ranges, by pydantic


def parse_section(
    cls: Any, fields: Any, where: str, problems: list[str], keys_for_message: tuple[str, ...] = ()
) -> Any:
    """Return an instance of `cls` with these fields, or None if there is a problem. where: the section's place in the
    recipe. keys_for_message: keys that the error of an unknown key lists before the fields of `cls`."""
    written = fields if isinstance(fields, dict) else {}
    python_nulls = [name for name, value in written.items() if '"None"' in json.dumps(value)]
    if python_nulls:  # as text, None would be the name of a model or folder
        problems += [
            f"{where}.{name}: None is not a value of YAML. Write null for no value, or remove None from a list"
            for name in python_nulls
        ]
        return None
    try:
        return TypeAdapter(cls).validate_json(json.dumps(fields))
    except ValidationError as error:
        for details in error.errors():
            problems.append(describe_pydantic_error(details, where, (*keys_for_message, *field_names(cls))))
        return None


def field_names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def unknown_or_removed_key_message(name: str, where: str, keys: tuple[str, ...]) -> str:
    """Return the line about a key that the section `where` does not have. keys: those that it has."""
    return (
        message_if_removed_or_hugging_face_field(name)
        or f"{name}: unknown field. The fields of {where} are {', '.join(keys)}"
    )


def describe_pydantic_error(details: Any, where: str, keys: tuple[str, ...]) -> str:
    """Return a line about one of pydantic's errors in the section `where`. keys: those of the section."""
    kind = details["type"]
    value = details["input"]
    name = where
    for part in details["loc"]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    if kind == "unexpected_keyword_argument":
        if len(details["loc"]) > 1:  # of a record in a list, such as eval.tasks
            return f"{name}: unknown field. Remove the field"
        return unknown_or_removed_key_message(name, where, keys)
    if kind == "missing":
        return f"{name}: the value is missing. Write a value"
    message = details["msg"].removeprefix("Value error, ")
    if kind == "value_error" and isinstance(value, dict):  # a section's fields do not fit each other
        return f"{name}.{message}"
    if name in ("train.time_limit", "train.stall_limit") and kind == "float_type":
        message = "the value must be a number of minutes, such as 690"
    message = message.replace("Input should", "the value must").replace("String should", "the text must")
    return f"{name}: {value!r}: {message}"
