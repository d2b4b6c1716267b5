"""The recipe: what is trained, on what data, for how long.

A value of `--set` replaces the value of the YAML file. Unknown keys and wrong types are errors, and all problems of a
recipe are reported at once.
"""

import contextlib
import copy
import dataclasses
import math
import re
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import yaml
from pydantic import ConfigDict, Field, PlainValidator, PositiveFloat, ValidationError, model_validator
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
"""The maximum number of steps, samples or tokens: more than anybody needs, and exact as a float."""
Count = Annotated[int, Field(gt=0, le=MOST)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    starts_from: Literal["any", "scratch", "model"] = "any"
    """The weights that the recipe's learning rate, dropout and attention gain suit: random weights (scratch), a
    pre-trained model.init (model), or either (any). A recipe from scratch refuses a model.init that xscale has not
    trained unless --set gives train.lr; a recipe for a model refuses to start without model.init."""
    init: str | None = None
    """Weights to start from: a Hugging Face directory, a hub name, or a run or checkpoint of xscale; null: random
    weights of `preset`. A run's language embeddings and its streams' heads are taken over, too."""
    preset: Literal["tiny", "mini", "small", "base", "xlmr-base", "modern-small", "modern-base"] = "tiny"
    """The architecture of a randomly initialised encoder."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer directory; null: the tokenizer of `init`, else `tokenizer/` in the first --data
    directory or its parent. If `init` has a tokenizer, it must be the same."""
    dropout: Annotated[float, Field(ge=0, le=0.9)] = 0.1
    """The dropout probability of hidden states and attention."""
    attention_gain: PositiveFloat | None = None
    """The gain g of attention: its value and output projections start from random weights of standard deviation g /
    sqrt(width). null: a standard deviation of 0.02 as in transformers, which is a gain of 0.23 in preset tiny and 0.55
    in base. At a gain of 0.23 all sentences have nearly the same [CLS] vector (mean cosine 0.9999; 0.97 at a gain of
    1), and contrastive losses begin to fall late. At a gain of 1 other losses begin to fall somewhat later."""
    rope_theta: PositiveFloat | None = None
    """The base of the rotary position embeddings in all layers (ModernBERT); null: that of `init`, or 160,000 in the
    presets. A larger base suits longer sequences. A phase may change it if the recipe sets it."""


@dataclass(frozen=True, config=STRICT)
class StreamConfig:
    objective: str
    """The name of the objective, such as mlm or tlm; MODULE:NAME for an Objective of another package."""
    samples: Annotated[int, Field(ge=0, le=MOST)]
    """Samples per optimizer step over all ranks. In a stream of pairs, a sample is one pair. In a stream of monolingual
    text, it is about data.max_length tokens of running text: consecutive sentences of a document, or several short
    documents, each in a sequence of its own. Text beyond data.max_length continues in another sequence; nothing is
    dropped. A phase may set 0 samples, which pauses the stream."""
    weight: PositiveFloat = 1.0
    """The factor of the stream's loss in the loss of the step."""
    warm_in: NotNegative = 0.0
    """The number of steps in which the loss's factor rises linearly to `weight`. Below 1: a share of train.steps."""
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """Languages ("en") or pairs ("en-de", in either order) whose data and dictionaries the stream reads; null: all."""
    options: Any = None
    """The objective's own fields. In YAML they are written beside the stream's other fields."""


def _workers(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= 1024):
        return value
    raise ValueError(f"workers: {value!r} is neither auto nor a whole number from 0 to 1024")


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    max_length: Annotated[int, Field(ge=8, le=MOST)] = 128
    """The maximum number of tokens of a sequence, special tokens included."""
    overlong: Literal["drop", "truncate"] = "drop"
    """What happens to longer pairs; the log gives their number. Monolingual text continues in another sequence."""
    segments: bool = True
    """The two sentences of a pair have token types 0 and 1, if the model and the tokenizer have such types and no
    stream has language embeddings; false: both have type 0."""
    first: Count | None = None
    """The maximum number of records of each language and pair, in the order of --data and shards; null: no limit."""
    languages: Annotated[list[str], Field(min_length=1)] | None = None
    """Languages ("en") or pairs ("en-de") that streams without `languages` of their own read; null: all."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.7
    """A language, or pair of languages, is sampled with probability proportional to n^alpha; alpha_by defines n."""
    alpha_by: Literal["records", "tokens", "bytes"] = "records"
    """The n of n^alpha: the number of a language's records, or of their tokens or bytes, which are estimated from some
    shards. A sample of running text has about data.max_length tokens in any case."""
    workers: Annotated[int | Literal["auto"], PlainValidator(_workers)] = "auto"
    """Data loading processes per rank; 0: the training process loads. auto: 2 on a CPU, on a GPU 4 to 6 by cores."""
    cache: str | None = None
    """The folder on each machine in which shards of --data that are at a URL are cached; null: ~/.cache/xscale."""
    cache_gb: PositiveFloat = 100.0
    """The maximum size of the shards in `cache` in GB. The least recently used shards are deleted first."""

    @model_validator(mode="after")
    def caches_on_this_machine(self) -> Self:
        if self.cache and "://" in self.cache:
            raise ValueError(f"cache: {self.cache} is a URL; name a folder of the machine")
        return self

    lexicons: list[str] = dataclasses.field(default_factory=list)
    """Dictionary files, named after the pair: en-de.txt. If the list is empty, `lexicon/*.txt` in the first --data
    directory or its parent is used. A stream whose objective uses dictionaries reads those of its languages.
    Dictionaries that no stream reads are used for evaluation only."""
    lexicon_heldout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The share of a dictionary's words that no objective sees, chosen by a hash of the word. `alignment/en-de` is
    measured on these words, `alignment_trained/en-de` on the others. At 0 there is no `alignment/en-de`."""


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    steps: Count = 1000
    """Optimizer steps of the run."""
    epochs: PositiveFloat | None = None
    """Epochs, instead of `steps`: the first stream of pairs reads this many times the number of its pairs. With
    data.alpha 1 every pair is read this often; with a lower alpha, pairs of small languages more often than others."""
    lr: PositiveFloat = 3e-4
    """The peak learning rate."""
    warmup: NotNegative = 0.1
    """The steps of linear warm-up. A number below 1 is a share of `steps`."""
    schedule: Literal["linear", "cosine", "1-sqrt"] | None = None
    """The curve by which the learning rate falls to 0: 1 - x, (1 + cos(pi x)) / 2 or 1 - sqrt(x), where x goes from 0
    to 1. null: linear, or the scheduler of the ds_config if it has one."""
    decay: NotNegative | None = None
    """The number of steps at the end of the run in which the learning rate falls; before them it stays at its peak
    (warm-up, stable, decay). A number below 1 is a share of `steps`. null: all steps after the warm-up; 0: none."""
    weight_decay: NotNegative = 0.01
    """The weight decay of AdamW. It does not apply to biases and normalisation weights."""
    max_grad_norm: NotNegative = 1.0
    """The global norm to which gradients are clipped; 0: no clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of a predicted token's target probability that is spread over the whole vocabulary."""
    z_loss: NotNegative = 0.0
    """The factor of logsumexp(logits)^2, which is added to the loss of a predicted token (PaLM: 1e-4)."""
    max_tokens: Count | None = None
    """The maximum number of tokens in a packed row, which is one forward and backward pass of a rank; null: 16,384 on a
    GPU, 8,192 on a CPU. Apart from the masks of dropout, it does not change the result. More tokens need more memory
    and are faster: on an H200, 65,536 train xlmr-base 1.3 times as fast as 16,384."""
    precision: Literal["auto", "fp16", "bf16", "fp32"] = "auto"
    """The precision of training. auto takes the precision of the ds_config if the hardware supports it, else fp32."""
    activation_checkpointing: bool = False
    """The forward pass keeps only the inputs of each layer, and the backward pass computes the rest again. This saves
    memory and takes about a third more time."""
    deterministic: bool = False
    """CUDA uses only algorithms that are reproducible bit for bit, so that a resume is exact. Attention's backward pass
    is slower. CPUs are reproducible anyway."""
    seed: Annotated[int, Field(ge=-MOST, le=MOST)] = 0
    """The seed of the data order, masks, random weights and dropout."""
    measure_every: Annotated[int, Field(ge=0, le=MOST)] = 100
    """The steps between expensive measurements: the gradient norm of each stream (a second backward pass) and the
    alignment scores of dictionaries; 0: never."""
    time_limit: PositiveFloat | None = None
    """The minutes after which the run saves and stops with exit code 75, after at least one step; null: no limit."""
    stall_limit: PositiveFloat | None = 15.0
    """The minutes without progress after which the run ends with exit code 5; null: no limit. The logs then have every
    rank's stack and the rank that the others wait for. Time in which the process was suspended does not count.
    Collectives time out after 30 minutes."""
    stop_limit: PositiveFloat | None = 4.0
    """The minutes from a signal or the time limit until the run begins its last save; null: no limit. Then the run ends
    without saving, with exit code 75 and with every rank's stack in the rank's log. Under SLURM, choose less than the
    lead of --signal, so that the job can still be requeued."""
    skip_steps: list[int | str] = dataclasses.field(default_factory=list)
    """Excluded steps, counted from 1, such as [500, 81200-81260]: they read their records, but do not change the model.
    After a loss spike, resume from a checkpoint before the spike and exclude the spike's steps."""

    @model_validator(mode="after")
    def can_skip(self) -> Self:
        ranges = list[tuple[int, int]]()
        for entry in self.skip_steps:
            if not re.fullmatch(r"\d{1,15}(-\d{1,15})?", str(entry)):
                raise ValueError(f"skip_steps: {entry!r} is neither a step nor a range; write [500, 81200-81260]")
            first, *last = (int(number) for number in str(entry).split("-"))
            if first < 1 or [first] > last > []:
                raise ValueError(f"skip_steps: {entry!r}: steps count from 1, and a range goes upwards")
            ranges.append((first, last[0] if last else first))
        first_kept = 1
        for first, end in sorted(ranges):
            first_kept = max(first_kept, end + 1) if first <= first_kept else first_kept
        if first_kept > self.steps:
            raise ValueError(f"skip_steps: {self.skip_steps} excludes all {self.steps} steps; name fewer")
        return self

    def skips(self, step: int) -> bool:
        """Return whether a step, counted from 1, is excluded."""
        ranges = [[int(number) for number in str(entry).split("-")] for entry in self.skip_steps]
        return any(steps[0] <= step <= steps[-1] for steps in ranges)

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
    """The optimizer steps between checkpoints. The last step always saves."""
    keep: Annotated[int, Field(ge=2, le=MOST)] = 2
    """The number of newest complete checkpoints that stay on disk."""
    background: bool = True
    """A thread writes each checkpoint from a copy in host memory while training goes on; false: training waits."""
    best: str | None = None
    """A number that `eval` measures, as TASK/ROW/NUMBER, such as heldout/tlm/loss. The checkpoint with the best value
    stays on disk, and checkpoints/best names it. Losses, perplexities and error rates (aer) are best when lowest."""

    @model_validator(mode="after")
    def can_be_done(self) -> Self:
        if self.best is not None and self.best.count("/") < 2:
            raise ValueError(f"best: {self.best!r} is not of the form TASK/ROW/NUMBER, such as heldout/tlm/loss")
        return self


INLINE = ("heldout", "retrieval", "alignment")
"""The kinds of tasks that a run can measure while it trains."""


@dataclass(frozen=True, config=STRICT)
class EvalTask:
    name: str
    """heldout measures the loss of each stream, language and pair on the records of `data`. retrieval finds the
    translations of sentences among the pairs of `data`. alignment measures the words of the run's dictionaries. A
    second task of one kind is named with a suffix, such as heldout.test."""
    data: list[str] = dataclasses.field(default_factory=list)
    """Shard directories that are not trained on."""
    limit: Count = 1000
    """The maximum number of records of each language and pair."""

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @model_validator(mode="after")
    def can_be_measured(self) -> Self:
        if self.kind not in INLINE or not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            there = f"{', '.join(INLINE)}, with or without a suffix of letters, digits, dot, _ and -"
            raise ValueError(
                f"name: {self.name!r} is none of {there}; xscale.eval.run measures others, from a checkpoint's export"
            )
        if not self.data and self.kind != "alignment":
            raise ValueError("data: needs shard directories")
        return self


@dataclass(frozen=True, config=STRICT)
class EvalConfig:
    """Evaluations that the run makes itself, before step 1, every `every` steps, and at the end."""

    every: Count = 500
    """The optimizer steps between evaluations."""
    tasks: list[EvalTask] = dataclasses.field(default_factory=list)
    """The tasks that are measured."""


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
    """A value for each step of a run: that of the step's phase, and after the last phase that of the recipe itself."""

    ends: tuple[int, ...]
    """The first step after each phase, counted from 0, in ascending order."""
    values: tuple[Value, ...]
    """The value of each phase, and at last that of the steps after the last phase."""

    def at(self, step: int) -> Value:
        """Return the value of a step, counted from 0."""
        return self.values[bisect_right(self.ends, step)]

    def map(self, function: Callable[[Value], Other]) -> "Schedule[Other]":
        """Return the schedule of the function's results."""
        return Schedule(self.ends, tuple(function(value) for value in self.values))


@dataclass(frozen=True)
class Phase:
    """A range of a run's steps, in which some fields of the recipe have other values."""

    until: int | float
    """The end of the phase as the recipe has it: an integer is a step, a float is a share of the run's steps."""
    fields: dict[str, Any]
    """The values that the phase sets, by dotted field name."""
    end: int
    """The first step, counted from 0, that does not belong to the phase."""
    recipe: Any
    """The recipe (without phases) for the phase's steps."""


@dataclass(frozen=True, config=STRICT)
class Recipe:
    model: ModelConfig
    streams: dict[str, StreamConfig]
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig = EvalConfig()
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

    def to_dict(self) -> dict[str, Any]:
        resolved = dataclasses.asdict(self)
        for stream in resolved["streams"].values():
            stream.update(stream.pop("options"))
        del resolved["phases"]
        if self.phases:
            resolved["phases"] = [{"until": phase.until} | phase.fields for phase in self.phases]
        return resolved

    def identity(self) -> dict[str, Any]:
        """Return the fields that determine the result, which a resume must not change."""
        fields = self.to_dict()
        for section, names in NOT_IDENTITY.items():
            fields[section] = {k: v for k, v in fields[section].items() if k not in names}
        del fields["checkpoint"], fields["eval"]
        if self.data.alpha_by == "records":
            del fields["data"]["alpha_by"]  # as in runs of earlier versions
        for stream in fields["streams"].values():
            if not stream.get("language_embeddings"):
                stream.pop("language_dropout", None)
        return fields


BY_EPOCHS = MOST
"""The value of train.steps in a recipe with `epochs`, until the number of pairs is known."""


def steps_of_epochs(recipe: Recipe, pairs: int, samples: int) -> Recipe:
    """Return the recipe with train.steps computed from train.epochs. pairs: the number of pairs of an epoch; samples:
    the number of pairs of a step. Raises UserError."""
    train, problems = recipe.train, list[str]()
    assert train.epochs
    steps = math.ceil(round(train.epochs * pairs / samples, 6))
    if train.steps not in (BY_EPOCHS, steps):
        raise UserError(
            f"train.steps: {train.steps:,}, but train.epochs: {train.epochs:g} are {steps:,} steps of {samples:,} of "
            f"{pairs:,} pairs; leave one of the two out"
        )
    built = _build(TrainConfig, dataclasses.asdict(train) | {"steps": steps}, "train", problems)
    if problems:
        raise UserError("\n".join(problems))
    return dataclasses.replace(recipe, train=built)


NOT_IDENTITY = {
    "model": {"starts_from", "tokenizer"},
    "data": {"workers", "cache", "cache_gb", "lexicons", "lexicon_heldout"},
    "train": {
        *("steps", "epochs", "max_tokens", "activation_checkpointing", "deterministic", "measure_every"),
        *("time_limit", "stall_limit", "stop_limit", "skip_steps"),
    },
}
"""The fields that a resumed run may change. The tokenizer and the dictionaries are compared by content, not by path."""

EITHER = {"train.steps": "epochs", "train.epochs": "steps"}
"""Fields that exclude each other: `--set` of the first removes the second."""


def shipped_recipes() -> list[str]:
    """Return the names of the shipped recipes, such as "xlm" and "paper/tang_xlm"."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def load_recipe(name: str, sets: list[str], objectives: dict[str, type]) -> Recipe:
    """Return the shipped recipe `name`, or the recipe in the YAML file at the path `name`. sets: overrides
    `key.sub=value`. objectives: name -> the options class of the objective. Raises UserError with every problem."""
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
    problems: list[str] = []
    for assignment in sets:
        _assign(tree, assignment, problems)
    phases = tree.pop("phases", None) or []
    base = copy.deepcopy(tree)
    recipe = _build_recipe(tree, objectives, problems)
    if recipe and not problems:
        recipe = _build_phases(recipe, phases, base, objectives, problems)
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
        value = read_yaml(text)
    except ValueError as error:
        twice, occurs, _ = str(error).partition(" occurs twice")
        problems.append(f"--set {assignment[:80]}: {twice + occurs if occurs else f'{text[:80]!r} is not YAML'}")
        return
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 reads 3e-4 as text; on a command line it can only be a number
    if problem := _put(tree, dotted, value):
        problems.append(f"--set {assignment}: {problem}")


def _put(tree: dict[str, Any], dotted: str, value: Any) -> str:
    """Set a field of the tree by its dotted name. Return a problem, or "" if there is none."""
    *parents, last = dotted.split(".")
    node: Any = tree
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            return f"{parent} has no fields"
    node[last] = value
    if dotted in EITHER and value is not None:
        node.pop(EITHER[dotted], None)
    return ""


def _build_phases(
    recipe: Recipe, phases: Any, tree: dict[str, Any], objectives: dict[str, type], problems: list[str]
) -> Recipe:
    """Return the recipe with its phases, or add to `problems`. tree: the recipe's fields without the phases."""
    if not isinstance(phases, list):
        problems.append(f"phases: {phases!r} is not a list; write [{{until: 0.5, data.alpha: 0.3}}]")
        return recipe
    if phases and recipe.train.epochs:
        problems.append("phases: need train.steps in the place of train.epochs")
    found = list[Phase]()
    for number, fields in enumerate(phases):
        wrong = list[str]()
        until: Any = fields.get("until") if isinstance(fields, dict) else None
        share = type(until) is float and 0 < until <= 1
        end: int = round(until * recipe.train.steps) if share else until if type(until) is int else -1
        first = found[-1].end if found else 0
        if end < first:
            wrong.append(
                f"until: {until!r} is neither a step (an integer, at least {first}) nor a share of the run (a float, "
                f"such as 0.8, and 1.0 for its end)"
            )
        else:
            changes = {str(name): value for name, value in fields.items() if name != "until"}
            of_phase = _build_phase(changes, copy.deepcopy(tree), recipe, objectives, wrong)
            found.append(Phase(until, changes, end, of_phase))
        problems += [f"phases[{number}].{line}" for line in wrong]
    return dataclasses.replace(recipe, phases=tuple(found))


def _build_phase(
    changes: dict[str, Any], tree: dict[str, Any], recipe: Recipe, objectives: dict[str, type], problems: list[str]
) -> Recipe | None:
    """Return the recipe of a phase's steps, or None after adding to `problems`. tree: the recipe's fields, which are
    changed to those of the phase."""
    allowed = {f"{section}.{name}" for section in ("model", "data", "train") for name in IN_PHASES[section]}
    for name, stream in recipe.streams.items():
        own = getattr(_options_class(stream.objective, objectives), "in_phases", frozenset[str]())
        allowed |= {f"streams.{name}.{field}" for field in IN_PHASES["streams"] | own}
    for name, value in changes.items():
        if name not in allowed:
            problems.append(
                removed_field(name)
                or f"{name}: a phase cannot change this field; a phase may change {', '.join(sorted(allowed))}"
            )
            continue
        if name == "model.rope_theta" and recipe.model.rope_theta is None:
            problems.append(
                f"{name}: also set it for the whole recipe, because the steps after the phase use that value"
            )
            continue
        if name == "data.languages_add":
            if "data.languages" in changes:
                problems.append(f"{name}: the phase also has data.languages; list all languages in data.languages")
            before = recipe.data.languages
            if before is None or not isinstance(value, list):
                problems.append(f"{name}: needs a list, and a recipe with data.languages, to which the list is added")
                continue
            name, value = "data.languages", [*before, *value]
        _put(tree, name, value)
    return None if problems else _build_recipe(tree, objectives, problems, is_phase=True)


def _build_recipe(
    tree: dict[str, Any], objectives: dict[str, type], problems: list[str], is_phase: bool = False
) -> Recipe | None:
    sections = {field.name: field.type for field in dataclasses.fields(Recipe)}
    for unknown in [name for name in tree if name not in sections]:
        problems.append(f"{unknown}: unknown section; the sections are {', '.join(sections)}")
    del sections["streams"], sections["phases"]
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
    resting = [name for name, stream in streams.items() if stream and stream.samples == 0]
    if len(resting) == len(streams) or not is_phase:
        problems += [
            f"streams.{name}.samples: 0 is for a phase with other streams; write 1 or more" for name in resting
        ]
    if problems:
        return None
    recipe = Recipe(streams=streams, **built)
    tasks = [task.name for task in recipe.eval.tasks]
    if recipe.checkpoint.best and recipe.checkpoint.best.partition("/")[0] not in tasks:
        there = ", ".join(tasks) or "none"
        problems.append(f"checkpoint.best: {recipe.checkpoint.best} names no task of eval.tasks, which has: {there}")
    problems += [
        f"streams.{name}.warm_in: {stream.warm_in:g} exceeds the steps: {recipe.train.steps}"
        for name, stream in streams.items()
        if stream and stream.warm_in > recipe.train.steps
    ]
    rows, longest = recipe.train.max_tokens, recipe.data.max_length
    if rows is not None and rows < longest:
        problems.append(f"train.max_tokens: {rows} must be at least data.max_length: {longest}")
    return recipe


def _build_tasks(fields: Any, problems: list[str]) -> None:
    """Replace the fields of each task in `eval` by an EvalTask, and add problems to `problems`."""
    if not isinstance(fields, dict) or not isinstance(fields.get("tasks"), list):
        return
    tasks = [_build(EvalTask, task, f"eval.tasks[{i}]", problems) for i, task in enumerate(fields["tasks"])]
    names = [task.name for task in tasks if task]
    twice = {name for name in names if names.count(name) > 1}
    problems += [f"eval.tasks: two tasks have the name {name}; write {name}.one, {name}.two" for name in sorted(twice)]
    fields["tasks"] = [task for task in tasks if task]


def _build_stream(name: str, fields: Any, objectives: dict[str, type], problems: list[str]) -> Any:
    where = f"streams.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        problems.append(f"{where}: a stream's name may have only letters, digits, _ and -")
        return None
    if not isinstance(fields, dict):
        problems.append(f"{where}: needs fields, such as {{objective: mlm, samples: 64}}")
        return None
    objective = str(fields.get("objective"))
    own = _names(StreamConfig)
    try:
        options_class = _options_class(objective, objectives)
    except UserError as error:
        problems.append(f"{where}.objective: {error}")
        return None
    options = {key: value for key, value in fields.items() if key not in own}
    made = _build(options_class, options, where, problems, also=own)
    common = {key: value for key, value in fields.items() if key in own}
    return _build(StreamConfig, common | {"options": made}, where, problems)


def _options_class(objective: str, objectives: dict[str, type]) -> Any:
    """Return the options class of an objective. Raises UserError."""
    if objective in objectives:
        return objectives[objective]
    if ":" not in objective:
        there = ", ".join(sorted(objectives))
        raise UserError(f"{objective!r} is unknown; use one of {there}, or MODULE:NAME for an objective of your own")
    options_class: Any = import_objective(objective).options
    taken = sorted({*_names(StreamConfig)} & {*_names(options_class)})
    if taken:
        raise UserError(f"all streams already have fields named {', '.join(taken)}; rename these options")
    return options_class


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.name != "options"]


def _build(cls: Any, fields: Any, where: str, problems: list[str], also: list[str] | None = None) -> Any:
    """Return an instance of `cls` with these fields, or add to `problems` and return None. where: the fields' place in
    the recipe. also: further field names that errors list."""
    if not isinstance(fields, dict):
        problems.append(f"{where}: needs fields, got {fields!r}")
        return None
    try:
        return cls(**{str(name): value for name, value in fields.items()})
    except ValidationError as error:
        there = ", ".join([*(also or ()), *_names(cls)])
        problems += [_problem(details, where, there) for details in error.errors()]
        return None


_NEEDED = {"int_type": int, "float_type": float, "string_type": str, "bool_type": bool}


def _problem(details: Any, where: str, there: str) -> str:
    """Return a line about one of pydantic's errors. there: the names of the fields that exist."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    name = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return removed_field(name) or f"{name}: unknown key; the keys are {there}"
    if kind in ("missing", "missing_argument"):
        return f"{name}: is required"
    if kind == "value_error":
        return f"{where}.{context['error']}"
    if kind == "list_type":
        return f"{name}: {value!r} is not a list; write [{value}]"
    message = details["msg"].replace("Input should", "the value must")
    return f"{name}: {value!r}: {message}{_remedy(value, _NEEDED.get(kind))}"


def _remedy(value: Any, needed: type | None) -> str:
    if needed is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            written = yaml.safe_dump(float(value)).split()[0]
            return f"; YAML reads a number with an exponent only with a dot and a sign: write {written}"
    if needed is int and isinstance(value, float) and value.is_integer():
        return f"; write {value:.0f}"
    if needed is str and isinstance(value, bool):
        return "; YAML reads yes, no, on, off as truth values: quote it"
    return ""
