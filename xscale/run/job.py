"""A job: recipe, data, tokenizer and dictionaries resolved and checked, before any weight exists."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from xscale import config, export
from xscale.config import Recipe
from xscale.data import loader as loading
from xscale.data import mixture as mixing
from xscale.data.calibration import Calibration
from xscale.data.lexicon import Lexicon, check_order, load_lexicon, pair_of
from xscale.data.loader import StepBatch, StepDataset, StreamCollate
from xscale.data.mixture import Mixture, StreamSpec, initial_state
from xscale.data.piece import Context
from xscale.data.row import Shape
from xscale.data.shards import Source, find_sources
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.models.build import build_encoder, load_pretrained
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES
from xscale.ranks import Process
from xscale.run import checkpoint as checkpoints
from xscale.step import cost
from xscale.step.step import StepModule

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
        lexicons = [{"lexicon": lexicon.name, "fingerprint": lexicon.fingerprint} for lexicon in self.lexicons]
        return {
            "recipe": self.recipe.identity(),
            "data": data,
            "tokenizer": self.tokenizer.fingerprint,
            "lexicons": lexicons,
        }

    def encoder(self) -> Encoder:
        model = self.recipe.model
        return build_encoder(
            init=model.init,
            preset=model.preset,
            dropout=model.dropout,
            max_length=self.recipe.data.max_length,
            vocab_size=self.tokenizer.vocab_size,
            pad_id=self.tokenizer.pad_id,
            languages=self.languages,
            language_embeddings=self.any_stream("language_embeddings"),
            reset_positions=self.any_stream("reset_positions"),
            seed=self.recipe.train.seed,
            load=export.load_model if model.init and export.is_run(Path(model.init)) else load_pretrained,
        )

    def any_stream(self, option: str) -> bool:
        return any(getattr(stream.options, option, False) for stream in self.recipe.streams.values())

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
        context = Context(
            self.tokenizer, recipe.data.max_length, recipe.data.overlong, language_ids, recipe.train.seed, self.lexicons
        )
        collates = {}
        for spec in specs:
            stream = recipe.streams.get(spec.name) or recipe.streams[spec.name.rpartition(".")[0]]
            objective = OBJECTIVES[stream.objective]
            collates[spec.name] = StreamCollate(objective.collate, stream.options, objective.words(stream.options))
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
    tokenizer = Tokenizer(find_tokenizer(recipe, data[0]))
    check_tokenizer(recipe.model.init, tokenizer)
    languages = sorted({language for source in sources for language in source.langs})
    lexicons = load_lexicons(recipe, tokenizer, sources, data[0])
    check_needs(recipe, tokenizer, specs, sources, lexicons)
    return Job(recipe, sources, tokenizer, specs, languages, lexicons)


def load_lexicons(recipe: Recipe, tokenizer: Tokenizer, sources: list[Source], data: Path) -> tuple[Lexicon, ...]:
    """In the order of their names. Raises UserError where one is missing, malformed or the wrong way round."""
    needed = any(OBJECTIVES[stream.objective].needs == "lexicon" for stream in recipe.streams.values())
    paths = [Path(path) for path in recipe.data.lexicons] or (find_lexicons(sources, data) if needed else [])
    lexicons = []
    for path in paths:
        lexicon = load_lexicon(path, tokenizer)
        check_order(lexicon, path, sources)
        lexicons.append(lexicon)
    return tuple(sorted(lexicons, key=lambda lexicon: (lexicon.name, lexicon.fingerprint)))


def find_lexicons(sources: list[Source], data: Path) -> list[Path]:
    """Dictionaries in `lexicon/` in `data` or its parent whose pair --data has; one of en-de and de-en, the first."""
    languages = {language for source in sources for language in source.langs}
    for folder in (data, data.resolve().parent):
        found: dict[frozenset[str], Path] = {}
        for path in sorted((folder / "lexicon").glob("*.txt")):
            with contextlib.suppress(UserError):  # a name that says no pair
                pair = frozenset(pair_of(path))
                if pair <= languages:
                    found.setdefault(pair, path)
        if found:
            return list(found.values())
    return []


def check_needs(
    recipe: Recipe, tokenizer: Tokenizer, specs: list[StreamSpec], sources: list[Source], lexicons: tuple[Lexicon, ...]
) -> None:
    """Raises UserError where an objective lacks its dictionary or word links, or its options or the tokenizer do not
    fit the stream."""
    for spec in specs:
        stream = recipe.streams[spec.name]
        objective = OBJECTIVES[stream.objective]
        if objective.words(stream.options) == "whitespace":
            check_words(spec.name, tokenizer, sources[spec.sources[0]])
        needs = objective.needs
        if needs == "lexicon" and not lexicons:
            raise UserError(
                f"streams.{spec.name} needs a dictionary: set data.lexicons=[PATH/en-de.txt], or put it into "
                f"lexicon/ beside the shards"
            )
        for source in (sources[s] for s in spec.sources):
            if needs == "links" and source.read(0, 0).links is None:
                raise UserError(
                    f"streams.{spec.name} needs word links; {source.directory} has none. Write it again with "
                    f"`python -m data_tools.write_shards pairs ... --links F` or `--align`"
                )


def check_words(stream: str, tokenizer: Tokenizer, source: Source) -> None:
    """Raises UserError where the tokenizer reads a sentence otherwise than word by word, as byte-level BPE does."""
    texts = [t for record in range(min(100, source.shards[0].records)) for t in source.read(0, record).texts]
    if tokenizer.encode_words(texts, "whitespace")[0] != tokenizer.encode(texts):
        raise UserError(
            f"streams.{stream} follows word links, but this tokenizer gives a word other tokens inside a sentence than "
            f"alone (byte-level BPE does); use a WordPiece or Unigram tokenizer, such as mBERT's or XLM-R's"
        )


def find_tokenizer(recipe: Recipe, data: Path) -> str:
    if recipe.model.tokenizer:
        return recipe.model.tokenizer
    for folder in (data, data.resolve().parent):
        if (folder / "tokenizer").is_dir():
            return str(folder / "tokenizer")
    if recipe.model.init:
        return str(own_tokenizer(recipe.model.init) or recipe.model.init)
    raise UserError(
        f"no tokenizer/ in {data} or its parent. Train one with `python -m data_tools.tokenizer --data {data} --out "
        f"{data / 'tokenizer'}`, or set model.tokenizer"
    )


def own_tokenizer(init: str) -> Path | None:
    """The tokenizer directory of a local `model.init`, where it has one."""
    path = export.find(Path(init)) / checkpoints.HF if export.is_run(Path(init)) else Path(init)
    return path if (path / "tokenizer.json").exists() else None


def check_tokenizer(init: str | None, tokenizer: Tokenizer) -> None:
    """Raises UserError where pre-trained weights would meet another tokenizer than their own."""
    own = own_tokenizer(init) if init else None
    if own and Tokenizer(own).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"model.init {init} was trained with the tokenizer {own}, not this one; set model.tokenizer={own}"
        )


def describe(job: Job, ds_config: dict[str, Any], precision: str, process: Process, device: str) -> None:
    """What --dry_run prints."""
    module = StepModule(job.encoder(), job.recipe)
    parameters = sum(p.numel() for p in module.parameters())
    print(yaml.safe_dump(job.recipe.to_dict(), sort_keys=False, allow_unicode=True))
    print("ds_config:", yaml.safe_dump(ds_config, sort_keys=False))
    for source in job.sources:
        print(
            f"data: {source.name} ({source.kind}) {source.records:,} records, {len(source.shards)} shards, "
            f"{source.bytes / 1e6:,.1f} MB, {source.directory}"
        )
    print(f"tokenizer: {job.tokenizer.hf.name_or_path}, {job.tokenizer.vocab_size:,} ids")
    for lexicon in job.lexicons:
        print(lexicon.summary())
    for spec in job.specs:
        available = sum(job.sources[s].records for s in spec.sources)
        print(
            f"stream {spec.name}: {spec.samples} samples a step from {available:,} records of "
            f"{', '.join(job.sources[s].name for s in spec.sources)}"
        )
    rows, shape = job.fit(process, device)
    print(
        f"ranks: {process.world}; a step is {rows} row(s) of about {shape.tokens:,} tokens on each, "
        f"train.max_tokens {job.max_tokens(device):,}; precision: {precision}"
    )
    print(f"parameters: {parameters:,} (vocabulary {job.tokenizer.vocab_size:,})")
    print(cost.estimate(module, job.recipe, ds_config, precision, process.world, device, shape.tokens))
