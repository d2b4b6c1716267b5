"""A job: recipe, data, tokenizer and dictionaries resolved and checked, before any weight exists."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from xscale import config
from xscale.config import Recipe
from xscale.data import loader as loading
from xscale.data import mixture as mixing
from xscale.data.calibration import Calibration
from xscale.data.lexicon import Lexicon
from xscale.data.loader import StepBatch, StepDataset, StreamCollate
from xscale.data.mixture import Mixture, StreamSpec, initial_state
from xscale.data.piece import Context
from xscale.data.row import Shape
from xscale.data.shards import Source, find_sources
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.models.build import build_encoder, has_segments
from xscale.models.encoder import Encoder
from xscale.models.heads import KeptHeads
from xscale.objectives import OBJECTIVES
from xscale.ranks import Process
from xscale.run.checks import (
    check_needs,
    check_tokenizer,
    find_tokenizer,
    load_lexicons,
    own_tokenizer,
    stream_lexicons,
)
from xscale.run.weights import load_initial
from xscale.step.module import StepModule

MAX_TOKENS = {"cuda": 16384, "cpu": 8192}
"""train.max_tokens by device, where the recipe leaves it open: a GPU then works longer than its host, a CPU's caches
hold a row."""


@dataclass(frozen=True)
class Job:
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
    calibration: Calibration | None = None
    """Without it nothing can be drawn: `calibrated` adds it."""

    def calibrated(self, found: Calibration | None = None) -> "Job":
        """With `found`, or what is measured here. Streams that say `tokens` get their samples. Raises UserError."""
        if found is None:
            train, data = self.recipe.train, self.recipe.data
            found = loading.calibrate(
                self.specs,
                self.sources,
                self.dataset(self.specs),
                seed=train.seed,
                alpha=data.alpha,
                max_length=data.max_length,
            )
        specs = []
        for spec in self.specs:
            stream = self.recipe.streams[spec.name]
            samples = stream.samples or max(1, round((stream.tokens or 0) / max(found.of(spec.name).tokens, 1.0)))
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
            "lexicons": lexicons,
        }

    def notes(self) -> list[str]:
        """Lines to print before anything is trained."""
        heldout = self.recipe.data.lexicon_heldout
        lines = [f"{lexicon.summary()}; {heldout:.0%} of its words are withheld" for lexicon in self.lexicons]
        for spec in self.specs:
            stream = self.recipe.streams[spec.name]
            advice = OBJECTIVES[stream.objective].advise(stream.options, self.records(spec), self.recipe.train.steps)
            lines += [f"streams.{spec.name}.{line}" for line in advice]
        return lines

    def records(self, spec: StreamSpec) -> int:
        """How many it draws from."""
        return sum(self.sources[source].records for source in spec.sources)

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
            seed=self.recipe.train.seed,
            load=load,
        )
        encoder.lm.config.xscale["lexicon_heldout"] = self.recipe.data.lexicon_heldout  # for eval/alignment_score.py
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

    def fit(self, process: Process, device: str) -> tuple[int, Shape]:
        """Rows of a step on a rank, and a shape that nearly all fit."""
        mixture = self.mixture(process, device, self.specs, initial_state(self.specs))
        return mixing.fit(mixture, self.recipe.data.max_length)

    def dataset(self, specs: list[StreamSpec], shape: Shape | None = None) -> StepDataset:
        recipe = self.recipe
        language_ids = {language: number for number, language in enumerate(self.languages)}
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
            name = spec.name if spec.name in recipe.streams else spec.name.rpartition(".")[0]
            objective, options = OBJECTIVES[recipe.streams[name].objective], recipe.streams[name].options
            lexicons = self.dictionaries.get(name, ())
            collates[spec.name] = StreamCollate(objective.collate, options, objective.words(options), lexicons)
        return StepDataset(self.sources, collates, context, recipe.train.seed, shape)

    def batches(
        self,
        process: Process,
        device: str,
        state: dict[str, Any],
        steps: int,
        specs: list[StreamSpec] | None = None,
        fitted: tuple[int, Shape] | None = None,
    ) -> Iterator[StepBatch]:
        """specs: other draws than the recipe's; `tlm.NAME` is made of stream tlm's records, in an order of its own.
        fitted: least number of rows, and the shape that they are filled up to."""
        specs = specs or self.specs
        rows, shape = fitted or (1, None)
        mixture = self.mixture(process, device, specs, state, rows)
        return loading.step_batches(mixture, self.dataset(specs, shape), self.recipe.data.workers, steps)


def prepare(recipe_name: str, sets: list[str], data: list[Path]) -> Job:
    """Resolve and validate recipe, data, tokenizer and dictionaries. Raises UserError."""
    recipe = config.load_recipe(recipe_name, sets, {name: o.options for name, o in OBJECTIVES.items()})
    sources = find_sources(data)
    for source in sources:
        source.check_sizes()
    streams = {n: (OBJECTIVES[s.objective].reads, s.languages, s.samples or 0) for n, s in recipe.streams.items()}
    specs = loading.stream_specs(streams, sources)
    for number, source in enumerate(sources):
        source.streams = max(1, sum(number in spec.sources for spec in specs))
    tokenizer = Tokenizer(find_tokenizer(recipe, data[0]))
    check_tokenizer(recipe.model.init, tokenizer)
    languages = sorted({language for source in sources for language in source.langs})
    found = load_lexicons(recipe, tokenizer, sources, data[0])
    dictionaries = stream_lexicons(recipe, found)
    check_needs(recipe, tokenizer, specs, sources)
    paths = {lexicon.path for read in dictionaries.values() for lexicon in read}
    lexicons = tuple(lexicon for lexicon in found if lexicon.path in paths)
    measured = tuple(lexicon for lexicon in found if lexicon.path not in paths)
    segments = uses_segments(recipe, tokenizer)
    return Job(recipe, sources, tokenizer, specs, languages, lexicons, measured, dictionaries, segments)


def any_stream(recipe: Recipe, option: str) -> bool:
    """Whether any stream has this option on."""
    return any(getattr(stream.options, option, False) for stream in recipe.streams.values())


def uses_segments(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    """Whether recipe, tokenizer and model have token types for the two sentences of a pair."""
    if not recipe.data.segments or not tokenizer.pair.segments or any_stream(recipe, "language_embeddings"):
        return False
    init = recipe.model.init
    return has_segments(init and (own_tokenizer(init) or init), recipe.model.preset)
