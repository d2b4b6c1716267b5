"""A job: recipe, data, tokenizer and dictionaries resolved and checked, before any weight exists."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from xscale import config
from xscale.checkpoint.restore import load_initial
from xscale.config import Recipe
from xscale.data import loader as loading
from xscale.data.calibrate import calibrate, run_serially
from xscale.data.calibration import Calibration
from xscale.data.lexicon import Lexicon
from xscale.data.loader import StepBatch, StepDataset, StreamCollate
from xscale.data.mixture import Mixture, StreamSpec, fit_row_shape, initial_state
from xscale.data.packed_row import RowShape
from xscale.data.planner import Plans, find_node
from xscale.data.shards import Source, find_sources, take_first
from xscale.data.stream_batch import Context
from xscale.data.streams import select_sources
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.files import parallel_map
from xscale.models.build import build_encoder, has_segments, trained_as
from xscale.models.encoder import Encoder
from xscale.models.heads import KeptHeads
from xscale.objectives import OBJECTIVES
from xscale.ranks import HostGroup, Process
from xscale.run.checks import (
    check_needs,
    check_tokenizer,
    check_tracker,
    find_tokenizer,
    load_lexicons,
    own_tokenizer,
    stream_lexicons,
)
from xscale.step.module import StepModule

MAX_TOKENS = {"cuda": 16384, "cpu": 8192}
"""train.max_tokens by device, where the recipe leaves it open: a GPU then works longer than its host, a CPU's caches
hold a row."""
SWEPT = 0.25
"""Share of a step that a node reads, from which on it asks for whole shards."""
DROPPED = 0.03
"""Share of a stream's pairs over data.max_length from which on a run warns."""


@dataclass(frozen=True)
class RunSpec:
    """Everything that is known before any weight exists."""

    recipe: Recipe
    sources: list[Source]
    tokenizer: Tokenizer
    specs: list[StreamSpec]
    languages: list[str]
    lexicons: tuple[Lexicon, ...]
    """Those that objectives read, whole."""
    measured: tuple[Lexicon, ...]
    """Those that the run's scores alone know."""
    dictionaries: dict[str, tuple[Lexicon, ...]]
    """Of `lexicons`, what each stream whose objective reads them has, without the withheld words."""
    segments: bool
    """Whether the two sentences of a pair have token types of their own."""
    unseen: float
    """Share of the dictionaries' entries that neither this run nor the one of model.init trains."""
    left_out: tuple[str, ...] = ()
    """Lines about dictionaries that could not be measured with."""
    calibration: Calibration | None = None
    """Without it nothing can be drawn: `calibrated` adds it."""

    def calibrated(self, found: Calibration | None = None, host_group: HostGroup | None = None) -> "RunSpec":
        """With `found`, or what is measured here, by all ranks of `control`. Streams that say `tokens` get their
        samples. Raises UserError."""
        if found is None:
            train, data = self.recipe.train, self.recipe.data
            found = calibrate(
                self.specs,
                self.sources,
                self.dataset(self.specs),
                seed=train.seed,
                alpha=data.alpha,
                max_length=data.max_length,
                share=host_group.share if host_group else run_serially,
            )
        specs = []
        for spec in self.specs:
            stream, samples = self.recipe.streams[spec.name], spec.samples
            if stream.tokens:
                samples = max(1, round(stream.tokens / max(found.estimate_for(spec.name).tokens, 1.0)))
            specs.append(replace(spec, samples=samples))
            problem = OBJECTIVES[stream.objective].check(stream.options, samples)
            if problem:
                raise UserError(f"streams.{spec.name}.{problem}")
        return replace(self, specs=specs, calibration=found)

    def max_tokens(self, device: str) -> int:
        return self.recipe.train.max_tokens or max(
            MAX_TOKENS.get(device, MAX_TOKENS["cpu"]), self.recipe.data.max_length
        )

    def identity(self) -> dict[str, Any]:
        """What a resume must not change."""
        data = [{"source": source.name, "fingerprint": source.fingerprint} for source in self.sources]
        heldout = self.recipe.data.lexicon_heldout
        lexicons = [
            {"lexicon": lexicon.name, "fingerprint": lexicon.fingerprint, "heldout": heldout}
            for lexicon in self.lexicons
        ]
        return {
            "recipe": self.recipe.identity(),
            "data": data,
            "tokenizer": self.tokenizer.fingerprint,
            "special_tokens": self.tokenizer.special,
            "lexicons": lexicons,
        }

    def notes(self) -> list[str]:
        """Lines to print before anything is trained."""
        heldout = self.recipe.data.lexicon_heldout
        lines = [f"{lexicon.summary()}; {heldout:.0%} of its words are withheld" for lexicon in self.lexicons]
        lines += self.left_out
        for spec in self.specs:
            stream = self.recipe.streams[spec.name]
            advice = OBJECTIVES[stream.objective].advise(stream.options, self.records(spec), self.recipe.train.steps)
            lines += [f"streams.{spec.name}.{line}" for line in advice]
        train, counted = self.recipe.train, counts_epochs(self.specs)
        if train.epochs and counted:
            lines.append(
                f"train.epochs {train.epochs:g}: {train.steps:,} steps, by the {counted.samples:,} of "
                f"{self.records(counted):,} pairs that stream {counted.name} draws in each"
            )
        return lines

    def copy_of_stream(self, stream: str, name: str) -> "RunSpec":
        """A run spec with one stream, which reads the data of `stream` in an order of its own."""
        assert self.calibration is not None
        return replace(
            self,
            recipe=replace(self.recipe, streams={name: self.recipe.streams[stream]}),
            specs=[replace(spec, name=name) for spec in self.specs if spec.name == stream],
            dictionaries={name: self.dictionaries.get(stream, ())},
            calibration=replace(self.calibration, streams={name: self.calibration.estimate_for(stream)}),
        )

    def records(self, spec: StreamSpec) -> int:
        """How many it draws from."""
        return records_of(spec, self.sources)

    def dropped(self, too_long: dict[str, float] | None = None) -> dict[str, str]:
        """Of each stream that drops more than a few per cent of its pairs, a line that says so, by name. too_long:
        shares of its pairs that are over data.max_length; None: as they were estimated."""
        data = self.recipe.data
        if too_long is None:
            assert self.calibration is not None
            too_long = {spec.name: self.calibration.estimate_for(spec.name).too_long for spec in self.specs}
        if data.overlong == "truncate":
            return {}
        share = {spec.name: too_long[spec.name] for spec in self.specs if not spec.packed}
        return {
            stream: f"warning: streams.{stream} drops {dropped:.1%} of its pairs, those longer than data.max_length: "
            f"{data.max_length}; take a larger one, or data.overlong=truncate, or leave them out when shards are "
            f"written: --max_tokens {data.max_length}"
            for stream, dropped in share.items()
            if dropped > DROPPED
        }

    def shortfalls(self) -> list[str]:
        """Lines about what streams do not find in the data, as it was estimated."""
        assert self.calibration is not None
        found = {
            name: OBJECTIVES[stream.objective].shortfall(stream.options, counts)
            for name, stream in self.recipe.streams.items()
            if (counts := self.calibration.estimate_for(name).counts)  # a checkpoint of an earlier version has none
        }
        return [f"warning: streams.{name}.{line}" for name, lines in found.items() for line in lines]

    def module(self) -> StepModule:
        """With the weights of step 0: of model.init also heads, where a stream has the same objective."""
        kept: dict[str, KeptHeads] = {}
        return StepModule(self.encoder(kept), self.recipe, kept)

    def encoder(self, kept: dict[str, KeptHeads] | None = None) -> Encoder:
        """kept: gets the heads that model.init has."""
        model = self.recipe.model

        def load(init: str | Path, dropout: float) -> PreTrainedModel:
            lm, heads = load_initial(init, dropout)
            if kept is not None:
                kept.update(heads)
            return lm

        encoder = build_encoder(
            init=model.init,
            preset=model.preset,
            dropout=model.dropout,
            attention_gain=model.attention_gain,
            max_length=self.recipe.data.max_length,
            vocab_size=self.tokenizer.vocab_size,
            pad_id=self.tokenizer.pad_id,
            languages=self.languages,
            language_embeddings=self.any_stream("language_embeddings"),
            reset_positions=self.any_stream("reset_positions"),
            segments=self.segments,
            neutral_trained=shows_neutral(self.recipe),
            seed=self.recipe.train.seed,
            load=load,
        )
        encoder.lm.config.xscale["lexicon_heldout"] = self.unseen  # for eval/alignment_score.py
        return encoder

    def any_stream(self, option: str) -> bool:
        return any_stream(self.recipe, option)

    def mixture(
        self, process: Process, device: str, specs: list[StreamSpec], state: dict[str, Any], rows: int = 1
    ) -> Mixture:
        assert self.calibration is not None
        return Mixture(
            specs,
            self.sources,
            self.calibration,
            seed=self.recipe.train.seed,
            alpha=self.recipe.data.alpha,
            max_length=self.recipe.data.max_length,
            max_tokens=self.max_tokens(device),
            rank=process.rank,
            world=process.world,
            rows=rows,
            state=state,
        )

    def fit(self, process: Process, device: str) -> tuple[int, RowShape]:
        """Rows of a step on a rank, and a shape that nearly all fit."""
        mixture = self.mixture(process, device, self.specs, initial_state(self.specs))
        return fit_row_shape(mixture, self.recipe.data.max_length)

    def dataset(self, specs: list[StreamSpec], shape: RowShape | None = None) -> StepDataset:
        recipe = self.recipe
        language_ids = {language: number for number, language in enumerate(self.languages, start=1)}
        data = recipe.data
        context = Context(
            self.tokenizer,
            data.max_length,
            data.overlong,
            language_ids,
            recipe.train.seed,
            segments=self.segments,
        )
        collates = {}
        for spec in specs:
            stream = recipe.streams[spec.name]
            objective, options = OBJECTIVES[stream.objective], stream.options
            lexicons = self.dictionaries.get(spec.name, ())
            names = tuple(sorted({of for s in spec.sources for of in (self.sources[s].pair, *self.sources[s].langs)}))
            of_objective = stream.objective, frozenset(objective.terms(options))
            words = objective.words(options)
            collates[spec.name] = StreamCollate(objective.collate, options, words, lexicons, names, *of_objective)
        return StepDataset(self.sources, collates, context, recipe.train.seed, shape)

    def plans(
        self,
        process: Process,
        device: str,
        state: dict[str, Any],
        steps: int,
        specs: list[StreamSpec] | None = None,
        fitted: tuple[int, RowShape] | None = None,
        host_group: HostGroup | None = None,
    ) -> Plans:
        """Arguments as of `batches`, which takes them. Where there are workers they are drawn from now on; with a
        control, by which all ranks call it together, once on each node."""
        for source in self.sources:
            source.close()  # what was looked into so far
            source.readahead = process.local_world / process.world >= SWEPT
        mixture = self.mixture(process, device, specs or self.specs, state, fitted[0] if fitted else 1)
        workers = loading.worker_count(self.recipe.data.workers, process, device)
        node = find_node(host_group) if host_group and self.recipe.data.workers != 0 else None
        return loading.step_plans(mixture, workers, steps, node)

    def batches(
        self,
        process: Process,
        device: str,
        state: dict[str, Any],
        steps: int,
        specs: list[StreamSpec] | None = None,
        fitted: tuple[int, RowShape] | None = None,
        plans: Plans | None = None,
    ) -> Iterator[StepBatch]:
        """specs: some of the recipe's streams, or with other numbers of samples.
        fitted: least number of rows, and the shape that they are filled up to."""
        plans = plans or self.plans(process, device, state, steps, specs, fitted)
        dataset = self.dataset(specs or self.specs, fitted[1] if fitted else None)
        workers = loading.worker_count(self.recipe.data.workers, process, device)
        return loading.batches_of(plans, dataset, workers, process.rank)


def resolve_run(recipe_name: str, sets: list[str], data: list[Path], host_group: HostGroup | None = None) -> RunSpec:
    """Resolve and validate recipe, data, tokenizer and dictionaries; ranks share out the look at every file. Raises
    UserError."""
    recipe = config.load_recipe(recipe_name, sets, {name: o.options for name, o in OBJECTIVES.items()})
    sources = take_first(find_sources(data), recipe.data.first)
    check_sizes(sources, host_group)
    specs = stream_specs(recipe, sources)
    recipe = with_steps(recipe, specs, sources)
    tokenizer = Tokenizer(find_tokenizer(recipe, data[0]))
    check_tokenizer(recipe.model.init, tokenizer)
    check_tracker(recipe.train.tracker)
    languages = sorted({language for source in sources for language in source.langs})
    check_language_names(sources)
    found, left_out = load_lexicons(recipe, tokenizer, sources, data[0], host_group)
    dictionaries = stream_lexicons(recipe, found)
    check_needs(recipe, tokenizer, specs, sources)
    paths = {lexicon.path for read in dictionaries.values() for lexicon in read}
    lexicons = tuple(lexicon for lexicon in found if lexicon.path in paths)
    measured = tuple(lexicon for lexicon in found if lexicon.path not in paths)
    before = trained_as(initial_directory(recipe)).get("lexicon_heldout", 1.0)
    return RunSpec(
        recipe,
        sources,
        tokenizer,
        specs,
        languages,
        lexicons,
        measured,
        dictionaries,
        uses_segments(recipe, tokenizer),
        min(before, recipe.data.lexicon_heldout),
        left_out,
    )


def stream_specs(recipe: Recipe, sources: list[Source]) -> list[StreamSpec]:
    """The sources of each stream, and its samples; 0 samples for a stream with `tokens`, until it is calibrated."""
    specs = []
    for name, stream in recipe.streams.items():
        reads = OBJECTIVES[stream.objective].reads
        chosen = select_sources(name, reads, stream.languages, sources)
        specs.append(StreamSpec(name, chosen, stream.samples or 0, packed=reads == "mono"))
    return specs


def check_language_names(sources: list[Source]) -> None:
    """Raises UserError for two names of languages that differ only in case, or in - against _."""
    found: dict[str, tuple[str, Path]] = {}
    for source in sources:
        for name in source.langs:
            other, directory = found.setdefault(name.lower().replace("_", "-"), (name, source.directory))
            if other != name:
                raise UserError(
                    f"--data has text in {other} ({directory}) and in {name} ({source.directory}), which would be two "
                    f"languages; write the shards of one of them again under the other's name (--lang, --langs)"
                )


def check_sizes(sources: list[Source], host_group: HostGroup | None) -> None:
    """Of every file of the sources, once, whatever the ranks. Raises UserError."""
    size = host_group.size if host_group else 1
    owners = [
        source for source in sources for _ in source.shards
    ]  # no pairs: 10^5 of them would be searched for garbage
    shards = [shard for source in sources for shard in source.shards]

    def check(number: int) -> None:
        parallel_map(Source.check_size, owners[number::size], shards[number::size])

    (host_group.share if host_group else run_serially)([partial(check, number) for number in range(size)])


def with_steps(recipe: Recipe, specs: list[StreamSpec], sources: list[Source]) -> Recipe:
    """The recipe with train.steps, where it says train.epochs. Raises UserError."""
    if recipe.train.epochs is None:
        return recipe
    spec = counts_epochs(specs)
    if spec is None:
        raise UserError("train.epochs counts pairs, and no stream of this recipe reads any; set train.steps")
    if not spec.samples:
        raise UserError(f"train.epochs needs streams.{spec.name}.samples in the place of tokens; or set train.steps")
    return config.steps_of_epochs(recipe, records_of(spec, sources), spec.samples)


def counts_epochs(specs: list[StreamSpec]) -> StreamSpec | None:
    """The stream whose pairs train.epochs counts."""
    return next((spec for spec in specs if not spec.packed), None)


def records_of(spec: StreamSpec, sources: list[Source]) -> int:
    """How many it draws from."""
    return sum(sources[source].records for source in spec.sources)


def any_stream(recipe: Recipe, option: str) -> bool:
    """Whether any stream has this option on."""
    return any(getattr(stream.options, option, False) for stream in recipe.streams.values())


def shows_neutral(recipe: Recipe) -> bool:
    """Whether any sequence has token type 0: one whose stream has no language embeddings, or hides languages."""
    options = [stream.options for stream in recipe.streams.values()]
    return any(not getattr(o, "language_embeddings", False) or getattr(o, "language_dropout", 0) > 0 for o in options)


def uses_segments(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    """Whether recipe, tokenizer and model have token types for the two sentences of a pair."""
    if not recipe.data.segments or not tokenizer.pair.segments or any_stream(recipe, "language_embeddings"):
        return False
    return has_segments(initial_directory(recipe), recipe.model.preset)


def initial_directory(recipe: Recipe) -> str | Path | None:
    """model.init, or the Hugging Face folder in it where it is a run."""
    init = recipe.model.init
    return init and (own_tokenizer(init) or init)
