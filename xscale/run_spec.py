"""The run spec holds recipe, data, tokenizer and dictionaries, resolved and checked before any weight exists."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.restore import load_initial
from xscale.data import loader as loading
from xscale.data.calibrate import calibrate
from xscale.data.calibration import Calibration
from xscale.data.lexicon import Lexicon, check_column_order, find_lexicon_paths, load_lexicon
from xscale.data.loader import StepBatch, StepDataset, StreamObjective
from xscale.data.mixture import (
    Mixture,
    StreamSpec,
    remote_window_bytes,
)
from xscale.data.planner import Plans, find_node
from xscale.data.remote import Cache
from xscale.data.shards import Shard, Source, find_sources, take_first
from xscale.data.stream_batch import CollateContext
from xscale.data.streams import (
    check_languages,
    matches_languages,
    names_some,
    select_sources,
    share_names,
)
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.files import may_exist, parallel_map
from xscale.models.build import build_encoder, dropout_of, has_segments, run_fields_of
from xscale.models.encoder import Encoder
from xscale.models.heads import SavedHeads
from xscale.objectives import OBJECTIVES
from xscale.ranks import HostGroup, Process
from xscale.recipe import Phase, Recipe, load_recipe, steps_of_epochs
from xscale.step.module import StepModule

MAX_TOKENS = {"cuda": 16384, "cpu": 8192}
"""The default of train.max_tokens: a row that takes a GPU longer than its host, or that fits into a CPU's caches."""
SWEPT = 0.25
"""A node whose ranks read at least this share of each step asks the operating system to read whole shards ahead."""
LINKED_SAMPLE = 16
"""The number of records of a source that are checked for word links."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
"""A directory with a tokenizer has at least one of these files."""


class LinkSample(NamedTuple):
    """The word links of some records of a source, the first and the last among them."""

    some: bool
    """True if any record of the sample has links."""
    bare: str
    """The place of the sample's first record without links, or an empty string."""


@dataclass(frozen=True)
class RunSpec:
    """Recipe, data, tokenizer and dictionaries of a run, resolved and checked."""

    recipe: Recipe
    sources: list[Source]
    tokenizer: Tokenizer
    specs: list[StreamSpec]
    languages: list[str]
    lexicons: tuple[Lexicon, ...]
    """The dictionaries that objectives read, with all their words."""
    measured: tuple[Lexicon, ...]
    """The dictionaries that only alignment scores read."""
    dictionaries: dict[str, tuple[Lexicon, ...]]
    """The dictionaries of each stream whose objective reads them, without the withheld words."""
    segments: bool
    """True if the two sentences of a pair have different token types."""
    unseen: float
    """The share of the dictionaries' entries on which neither this run nor the run of model.init trains."""
    left_out: tuple[str, ...] = ()
    """Warnings about dictionaries that cannot be read for alignment scores."""
    calibration: Calibration = field(default_factory=lambda: Calibration([], {}))
    """The estimated lengths of the data in tokens. `calibrated` adds them; before that, no record can be sampled."""
    phases: tuple["RunSpec", ...] = ()
    """The run spec of each phase of the recipe, with the phase's own recipe, specs, dictionaries and calibration."""

    def calibrated(self, calibration: Calibration | None = None) -> "RunSpec":
        """Return the run spec with a calibration. Without one, this process measures it."""
        measured = calibration or self.measure_calibration(HostGroup(alone=True))
        phases = list[RunSpec]()
        for phase, phase_calibration in zip(self.phases, measured.phase_calibrations(), strict=True):
            phases.append(replace(phase, calibration=phase_calibration))
        return replace(self, calibration=measured, phases=tuple(phases))

    def measure_calibration(self, host_group: HostGroup, calibration: Calibration | None = None) -> Calibration:
        """Return the calibration of the run with its phases, which all ranks of `host_group` measure together.
        calibration: one of which only the phases are measured anew."""
        measured = calibration or self._measure_alone(host_group, None)
        phases = [phase._measure_alone(host_group, measured.lines).streams for phase in self.phases]
        return replace(measured, phases=phases)

    def _measure_alone(self, host_group: HostGroup, lines: list[tuple[float, float]] | None) -> Calibration:
        """Return the calibration without that of phases. lines: Calibration.lines, if they are known."""
        dataset = self.dataset(self.specs)
        divide_work = host_group.divide_work
        return calibrate(self.specs, self.sources, dataset, **self.sampling, divide_work=divide_work, lines=lines)

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings on which the samples of all streams depend."""
        data = self.recipe.data
        return {
            "alpha": data.alpha,
            "alpha_by": data.alpha_by,
            "max_length": data.max_length,
            "seed": self.recipe.train.seed,
        }

    def max_tokens(self, device: str) -> int:
        default = MAX_TOKENS.get(device, MAX_TOKENS["cpu"])
        return self.recipe.train.max_tokens or max(default, self.recipe.data.max_length)

    def identity(self) -> dict[str, Any]:
        """Return the values of data, tokenizer and recipe that a resume must not change."""
        sources = list[dict[str, Any]]()
        for source in self.sources:
            sources.append({"source": source.name, "fingerprint": source.fingerprint})
        lexicons = list[dict[str, Any]]()
        for lexicon in self.lexicons:
            entry = {"lexicon": lexicon.name, "fingerprint": lexicon.fingerprint}
            lexicons.append(entry | {"heldout": self.recipe.data.lexicon_heldout})
        return {
            "recipe": self.recipe.identity(),
            "data": sources,
            "tokenizer": self.tokenizer.fingerprint,
            "special_tokens": self.tokenizer.special,
            "lexicons": lexicons,
        }

    def copy_of_stream(self, stream: str, name: str) -> "RunSpec":
        """Return a run spec with one stream `name`, which reads the data of `stream` in a different order."""
        return replace(
            self,
            recipe=replace(self.recipe, streams={name: self.recipe.streams[stream]}, phases=()),
            phases=(),
            specs=[replace(spec, name=name) for spec in self.specs if spec.name == stream],
            dictionaries={name: self.dictionaries.get(stream, ())},
            calibration=replace(self.calibration, streams={name: self.calibration.estimate_for(stream)}),
        )

    def module(self) -> StepModule:
        """Build the module of step 0. A stream takes over heads of model.init that the same objective trained."""
        kept: dict[str, SavedHeads] = {}
        return StepModule(self.encoder(kept), self.recipe, kept)

    def encoder(self, kept: dict[str, SavedHeads] | None = None) -> Encoder:
        """Build the encoder with the weights of step 0. kept: a dictionary that receives the heads of model.init."""
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
            max_length=max(spec.recipe.data.max_length for spec in (self, *self.phases)),
            vocab_size=self.tokenizer.vocab_size,
            pad_id=self.tokenizer.pad_id,
            languages=self.languages,
            language_embeddings=any_stream(self.recipe, "language_embeddings"),
            reset_positions=any_stream(self.recipe, "reset_positions"),
            segments=self.segments,
            neutral_trained=shows_neutral(self.recipe),
            seed=self.recipe.train.seed,
            load=load,
        )
        encoder.lm.config.xscale["lexicon_heldout"] = self.unseen  # for eval/alignment_score.py
        encoder.dropout = model.dropout
        encoder.set_dropout(self.recipe.at(0).model.dropout)  # the warm-up of a queue precedes the first step
        if theta := self.recipe.at(0).model.rope_theta:
            encoder.set_rope_theta(theta)
        return encoder

    def mixture(self, process: Process, device: str, specs: list[StreamSpec], state: dict[str, Any]) -> Mixture:
        return Mixture(
            specs,
            self.sources,
            self.calibration,
            **self.sampling,
            max_tokens=self.max_tokens(device),
            rank=process.rank,
            world=process.world,
            state=state,
        )

    def dataset(self, specs: list[StreamSpec]) -> StepDataset:
        data = self.recipe.data
        seed = self.recipe.train.seed
        language_ids = {language: number for number, language in enumerate(self.languages, start=1)}
        context = CollateContext(
            self.tokenizer, data.max_length, data.overlong, language_ids, seed, segments=self.segments
        )
        streams = dict[str, StreamObjective]()
        for spec in specs:
            stream = self.recipe.streams[spec.name]
            names = set[str]()
            for source in spec.sources:
                names.update((self.sources[source].pair, *self.sources[source].langs))
            streams[spec.name] = StreamObjective(
                OBJECTIVES[stream.objective],
                stream.options,
                stream.objective,
                self.dictionaries.get(spec.name, ()),
                tuple(sorted(names)),
            )
        return StepDataset(self.sources, streams, context, seed)

    def plans(
        self, process: Process, device: str, state: dict[str, Any], steps: int, host_group: HostGroup | None = None
    ) -> Plans:
        """Return the plans of the next steps, which `batches` reads. If there are workers, a process makes the plans
        ahead of time. With `host_group`, each node has only one such process, and all ranks call this together."""
        for source in self.sources:
            source.close()  # the next read opens the files again
            source.readahead = process.local_world / process.world >= SWEPT
        mixture = self.mixture(process, device, self.specs, state)
        for config, phase in zip(self.recipe.phases, self.phases, strict=True):
            mixture.phases.append((config.end, phase.mixture(process, device, phase.specs, state)))
        workers = loading.worker_count(self.recipe.data.workers, process, device)
        node = find_node(host_group) if host_group and self.recipe.data.workers != 0 else None
        return loading.step_plans(mixture, workers, steps, node)

    def batches(
        self, process: Process, device: str, state: dict[str, Any], steps: int, plans: Plans | None = None
    ) -> Iterator[StepBatch]:
        """Return an iterator of this rank's share of each step. state: the positions of the streams in their data.
        plans: the result of `plans`, if it was called before."""
        plans = plans or self.plans(process, device, state, steps)
        dataset = self.dataset(self.specs)
        for config, phase in zip(self.recipe.phases, self.phases, strict=True):
            dataset.phases.append((config.end, phase.dataset(phase.specs)))
        workers = loading.worker_count(self.recipe.data.workers, process, device)
        return loading.batches_of(plans, dataset, workers, process.rank)


def resolve_run(
    recipe_name: str,
    sets: list[str],
    data: Sequence[Path | str],
    host_group: HostGroup | None = None,
) -> RunSpec:
    """Resolve and check recipe, data, tokenizer and dictionaries. The ranks of `host_group` share the check of the
    files. Raises UserError."""
    recipe = load_recipe(recipe_name, sets, {name: o.options for name, o in OBJECTIVES.items()})
    check_start(recipe_name, recipe, sets)
    recipe = with_own_dropout(recipe)
    host_group = host_group or HostGroup(alone=True)
    every = find_sources(data, Cache.of(recipe.data.cache, recipe.data.cache_gb))
    share_names(every)
    sources = take_first(every, recipe.data.first)
    check_file_sizes(sources, host_group)
    samples = sample_links(languages_of_links(recipe), sources, host_group)
    resolved = [recipe, *(phase.recipe for phase in recipe.phases)]
    specs = stream_specs_by_recipe(resolved, sources, samples)
    check_cache_size(recipe, specs[0], sources)
    near = next((path for path in data if isinstance(path, Path)), None)
    recipe = with_steps(recipe, specs[0], sources)
    tokenizer = Tokenizer(find_tokenizer(recipe, near))
    check_tokenizer_of_init(recipe.model.init, tokenizer)
    lexicons = load_lexicons(recipe, tokenizer, sources, near)
    dictionaries = [stream_lexicons(phase, lexicons.loaded) for phase in resolved]
    check_links(recipe, specs[0], sources, samples)
    trained_paths = set[Path]()
    for by_stream in dictionaries:
        for stream_dictionaries in by_stream.values():
            trained_paths.update(lexicon.path for lexicon in stream_dictionaries)
    trained = [lexicon for lexicon in lexicons.loaded if lexicon.path in trained_paths]
    measured = [lexicon for lexicon in lexicons.loaded if lexicon.path not in trained_paths]
    before = run_fields_of(initial_directory(recipe)).get("lexicon_heldout", 1.0)
    run_spec = RunSpec(
        recipe,
        sources,
        tokenizer,
        specs[0],
        sorted(languages_of(sources)),
        lexicons=tuple(trained),
        measured=tuple(measured),
        dictionaries=dictionaries[0],
        segments=uses_segments(recipe, tokenizer),
        unseen=min(before, recipe.data.lexicon_heldout),
        left_out=lexicons.left_out,
    )
    phases = list[RunSpec]()
    for number, phase in enumerate(recipe.phases, start=1):
        phases.append(replace(run_spec, recipe=phase.recipe, specs=specs[number], dictionaries=dictionaries[number]))
    return replace(run_spec, phases=tuple(phases))


def languages_of(sources: list[Source]) -> set[str]:
    languages = set[str]()
    for source in sources:
        languages.update(source.langs)
    return languages


ADAPT_RECIPES = {
    "tlm": "adapt/tlm",
    "alignlm": "adapt/alignlm",
    "ppa": "adapt/ppa",
    "contextual": "adapt/contextual",
    "word_contrast": "adapt/word_contrast",
    "translation_ranking": "adapt/ranking",
}
"""The recipe that goes on from a pre-trained model, by objective."""


def adapt_recipe(recipe: Recipe) -> str | None:
    """Return the name of the recipe with the same objectives that goes on from a pre-trained model, or None."""
    names = set[str]()
    for stream in recipe.streams.values():
        if stream.objective in ADAPT_RECIPES:
            names.add(ADAPT_RECIPES[stream.objective])
    if len(names) > 1:
        return "adapt/mixed"
    return names.pop() if names else None


def check_start(recipe_name: str, recipe: Recipe, sets: list[str]) -> None:
    """Raise UserError if the recipe suits other weights than those that the run starts from (model.starts_from). A user
    who sets train.lr, or model.init to null, with --set is not refused."""
    init = recipe.model.init
    fields_set = {assignment.partition("=")[0] for assignment in sets}
    if recipe.model.starts_from == "model" and init is None and "model.init" not in fields_set:
        raise UserError(
            f"recipe {recipe_name} goes on from a pre-trained model, and model.init is null; name one, as in "
            f"--set model.init=DIR"
        )
    if recipe.model.starts_from != "scratch" or init is None or "train.lr" in fields_set:
        return
    if run_fields_of(initial_directory(recipe)):
        return  # trained by xscale
    suited = adapt_recipe(recipe)
    remedy = f"Use --recipe {suited}, or set" if suited else "Set"
    raise UserError(
        f"recipe {recipe_name} is for random weights: its train.lr {recipe.train.lr:g} would harm the pre-trained "
        f"model.init {init}. {remedy} a learning rate and dropout yourself, as in --set train.lr=5e-5 "
        f"model.dropout=null"
    )


def with_own_dropout(recipe: Recipe) -> Recipe:
    """Return the recipe with a number in the place of `model.dropout: null`, also in its phases."""
    recipes = [recipe, *(phase.recipe for phase in recipe.phases)]
    if all(each.model.dropout is not None for each in recipes):
        return recipe
    dropout = dropout_of(initial_directory(recipe))
    phases = list[Phase]()
    for phase in recipe.phases:
        phases.append(replace(phase, recipe=with_dropout(phase.recipe, dropout)))
    return replace(with_dropout(recipe, dropout), phases=tuple(phases))


def with_dropout(recipe: Recipe, dropout: float) -> Recipe:
    """Return the recipe with this dropout, unless it has one."""
    if recipe.model.dropout is not None:
        return recipe
    return replace(recipe, model=replace(recipe.model, dropout=dropout))


def stream_specs_by_recipe(
    recipes: list[Recipe], sources: list[Source], samples: list[LinkSample]
) -> list[list[StreamSpec]]:
    """Return the stream specs of each recipe: of the run, then of its phases. A stream has the same sources in all
    these specs; in the spec of a phase, the sources that it does not read are idle."""
    specs = [stream_specs(recipe, sources, samples) for recipe in recipes]
    read: dict[str, set[int]] = {}
    for spec in chain(*specs):
        read.setdefault(spec.name, set()).update(spec.sources)
    completed = list[list[StreamSpec]]()
    for recipe_specs in specs:
        completed.append([])
        for spec in recipe_specs:
            idle = frozenset(read[spec.name].difference(spec.sources))
            completed[-1].append(replace(spec, sources=tuple(sorted(read[spec.name])), idle=idle))
    return completed


def stream_specs(recipe: Recipe, sources: list[Source], samples: list[LinkSample]) -> list[StreamSpec]:
    """Return the spec of each stream. Raises UserError."""
    specs = []
    check_languages(recipe.data.languages, sources)
    for name, stream in recipe.streams.items():
        record_kind = OBJECTIVES[stream.objective].record_kind
        chosen = select_sources(name, record_kind, stream.languages, sources, recipe.data.languages)
        chosen = linked_sources(stream.objective, chosen, samples)
        specs.append(StreamSpec(name, chosen, stream.samples, packed=record_kind == "mono"))
        problem = OBJECTIVES[stream.objective].check(stream.options, stream.samples)
        if problem:
            raise UserError(f"streams.{name}.{problem}")
    return specs


def check_file_sizes(sources: list[Source], host_group: HostGroup) -> None:
    """Raise UserError if a file of the sources has a wrong size. Each file is checked by one rank."""
    # Two lists replace a list of pairs, of which the garbage collector would have to visit up to 10^5.
    owners = list[Source]()
    shards = list[Shard]()
    for source in sources:
        owners += [source] * len(source.shards)
        shards += source.shards

    def check(number: int) -> None:
        parallel_map(Source.check_size, owners[number :: host_group.size], shards[number :: host_group.size])

    host_group.divide_work([partial(check, number) for number in range(host_group.size)])


def check_cache_size(recipe: Recipe, specs: list[StreamSpec], sources: list[Source]) -> None:
    """Raise UserError if the cache is too small for the remote shards that the shuffle reads at once."""
    at_once = remote_window_bytes(specs, sources)
    if at_once > recipe.data.cache_gb * 1e9:
        needed = math.ceil(at_once / 1e6) / 1e3
        raise UserError(
            f"data.cache_gb: {recipe.data.cache_gb:g}, but the shuffle reads from {needed:g} GB of remote shards at "
            f"once, which would be fetched again and again; set data.cache_gb={needed:g} or more"
        )


def with_steps(recipe: Recipe, specs: list[StreamSpec], sources: list[Source]) -> Recipe:
    """Return the recipe with train.epochs converted to train.steps. Raises UserError."""
    if recipe.train.epochs is None:
        return recipe
    spec = epoch_stream(specs)
    if spec is None:
        raise UserError("train.epochs counts pairs, but no stream of this recipe reads pairs; set train.steps")
    return steps_of_epochs(recipe, records_of(spec, sources), spec.samples)


def epoch_stream(specs: list[StreamSpec]) -> StreamSpec | None:
    """Return the stream whose pairs train.epochs counts: the first one that reads pairs, or None."""
    return next((spec for spec in specs if not spec.packed), None)


def records_of(spec: StreamSpec, sources: list[Source]) -> int:
    """Return the number of records in the sources that a stream reads."""
    return sum(sources[source].records for source in spec.sources if source not in spec.idle)


def any_stream(recipe: Recipe, option: str) -> bool:
    """Return whether any stream of the recipe sets this option to true."""
    return any(getattr(stream.options, option, False) for stream in recipe.streams.values())


def shows_neutral(recipe: Recipe) -> bool:
    """Return whether any sequence has the neutral token type 0, because its stream has no language embeddings or hides
    some sequences' languages (language_dropout)."""
    for stream in recipe.streams.values():
        named = getattr(stream.options, "language_embeddings", False)
        if not named or getattr(stream.options, "language_dropout", 0) > 0:
            return True
    return False


def uses_segments(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    """Return whether the recipe, the tokenizer and the model distinguish the two sentences of a pair by token types."""
    if not recipe.data.segments or not tokenizer.pair.segments or any_stream(recipe, "language_embeddings"):
        return False
    return has_segments(initial_directory(recipe), recipe.model.preset)


def initial_directory(recipe: Recipe) -> str | Path | None:
    """Return model.init or, if it is a run or a checkpoint, the Hugging Face folder in the checkpoint."""
    init = recipe.model.init
    return init and (tokenizer_directory(init) or init)


class LoadedLexicons(NamedTuple):
    """The dictionaries of a run, sorted by name, and warnings about those that cannot be read."""

    loaded: tuple[Lexicon, ...]
    left_out: tuple[str, ...]


def load_lexicons(recipe: Recipe, tokenizer: Tokenizer, sources: list[Source], data: Path | None) -> LoadedLexicons:
    """Read the dictionaries. Missing or malformed ones, or those with swapped columns, are left out. Raises UserError
    instead if the recipe names dictionaries or an objective needs them."""
    paths = [Path(path) for path in recipe.data.lexicons]
    needed = bool(paths) or any(OBJECTIVES[stream.objective].needs == "lexicon" for stream in recipe.streams.values())
    if not paths and data:
        paths = find_lexicon_paths(sources, data)
    languages = languages_of(sources)
    loaded = list[Lexicon]()
    left_out = list[str]()
    for path in paths:
        try:
            lexicon = load_lexicon(path, tokenizer, languages)
            check_column_order(lexicon, path, sources)
            loaded.append(lexicon)
        except UserError as error:
            if needed:
                raise
            left_out.append(f"warning: no alignment score by {path}: {error}")
    loaded.sort(key=lambda lexicon: (lexicon.name, lexicon.fingerprint))
    return LoadedLexicons(tuple(loaded), tuple(left_out))


def stream_lexicons(recipe: Recipe, lexicons: tuple[Lexicon, ...]) -> dict[str, tuple[Lexicon, ...]]:
    """Return the dictionaries of each stream whose objective reads them, without the withheld words. Raises UserError
    if a stream's dictionaries have no word."""
    by_stream: dict[str, tuple[Lexicon, ...]] = {}
    for name, stream in recipe.streams.items():
        if OBJECTIVES[stream.objective].needs != "lexicon":
            continue
        languages = recipe.data.languages if stream.languages is None else stream.languages
        readable = [lexicon for lexicon in lexicons if reads_lexicon(languages, lexicon)]
        # `without_withheld` returns one object for all streams, so that a process builds its tables once.
        by_stream[name] = tuple(lexicon.without_withheld(recipe.data.lexicon_heldout) for lexicon in readable)
        if not any(lexicon.words for lexicon in by_stream[name]):
            there = ", ".join(str(lexicon.path) for lexicon in lexicons) or "none"
            wanted = f" of its languages, {', '.join(languages)} (there are: {there})" if languages else ""
            raise UserError(
                f"streams.{name} needs a dictionary{wanted}: set data.lexicons=[PATH/en-de.txt], or put it into "
                f"lexicon/ beside the shards"
            )
    return by_stream


def reads_lexicon(languages: list[str] | None, lexicon: Lexicon) -> bool:
    """Return whether a stream with these languages reads the dictionary: the list has both of the dictionary's
    languages, or its only language is one of them."""
    if languages is None:
        return True
    return matches_languages(languages, lexicon.langs) or (
        len(languages) == 1 and names_some(languages[0], lexicon.langs)
    )


def languages_of_links(recipe: Recipe) -> list[list[str] | None]:
    """Return the languages of each stream that needs word links, also those of phases. None: all languages."""
    languages = list[list[str] | None]()
    for phase in (recipe, *(phase.recipe for phase in recipe.phases)):
        for stream in phase.streams.values():
            if OBJECTIVES[stream.objective].needs == "links":
                languages.append(phase.data.languages if stream.languages is None else stream.languages)
    return languages


def sample_links(languages: list[list[str] | None], sources: list[Source], host_group: HostGroup) -> list[LinkSample]:
    """Return the word links of some records of each source that may be read for links, each read by one rank."""

    def look(source: Source) -> LinkSample:
        fits = any(listed is None or matches_languages(listed, source.langs) for listed in languages)
        return sample_links_of(source) if fits and source.kind == "pair" else LinkSample(False, "")

    return host_group.divide_work([partial(look, source) for source in sources])


def sample_links_of(source: Source) -> LinkSample:
    """Read some records of a source, and return which of them have word links."""
    numbers = np.unique(np.linspace(0, source.records - 1, LINKED_SAMPLE).round().astype(np.int64))
    some = False
    bare = ""
    without_readahead = source.without_readahead()
    for shard, number in source.places(numbers):
        record = without_readahead.read(shard, number)
        if record.links is not None:
            some = True
        elif not bare:
            bare = f"{source.directory / source.shards[shard].name}, record {record.key!r}"
    return LinkSample(some, bare)


def linked_sources(objective: str, chosen: tuple[int, ...], samples: list[LinkSample]) -> tuple[int, ...]:
    """Return those of the `chosen` sources that the objective can read: if it needs word links, those that have links.
    If none has links, return all of them; check_links then raises the error."""
    if OBJECTIVES[objective].needs != "links":
        return chosen
    return tuple(s for s in chosen if samples[s].some) or chosen


def check_links(recipe: Recipe, specs: list[StreamSpec], sources: list[Source], samples: list[LinkSample]) -> None:
    """Raise UserError if an objective that needs word links reads a source without them."""
    for spec in specs:
        if OBJECTIVES[recipe.streams[spec.name].objective].needs != "links":
            continue
        for source in spec.sources:
            sources[source].check_links()
            if samples[source].bare:
                raise UserError(
                    f"streams.{spec.name} needs word links; {samples[source].bare}, has none. Write "
                    f"{sources[source].name} again "
                    f"with `python -m data_tools.write_shards pairs ... --links F` or `--align`, or name the pairs "
                    f"that have links: streams.{spec.name}.languages=[...]"
                )


def find_tokenizer(recipe: Recipe, data: Path | None) -> str:
    """Return the directory or hub name of the tokenizer: model.tokenizer, else that of model.init, else the one beside
    the shards. data: the first directory of --data. Raises UserError if there is no tokenizer."""
    if recipe.model.tokenizer:
        return recipe.model.tokenizer
    init = recipe.model.init
    own = tokenizer_directory(init) if init else None
    if own:
        return str(own)
    if init and not Path(init).exists():
        if not may_exist(init):
            raise UserError(
                f"model.init {init} does not exist; give a run, or a Hugging Face directory or name; "
                f"to resume, put the folder hf of one of the run's checkpoints there"
            )
        return init  # a hub name
    if data is None:
        raise UserError("all of --data is remote, and a tokenizer is only looked for on disks; set model.tokenizer=DIR")
    for folder in (data, data.resolve().parent):
        if (folder / "tokenizer").is_dir():
            return str(folder / "tokenizer")
    raise UserError(
        f"no tokenizer{f' in model.init {init}, and none' if init else '/'} in {data} or its parent. Train one with "
        f"`python -m data_tools.tokenizer --data {data} --out {data / 'tokenizer'}`, or set model.tokenizer"
    )


def tokenizer_directory(init: str) -> Path | None:
    """Return the directory with the tokenizer of a local `model.init`, or None."""
    path = checkpoints.resolve_checkpoint(Path(init)) / checkpoints.HF if checkpoints.is_run(Path(init)) else Path(init)
    return path if any(next(path.glob(name), None) for name in TOKENIZERS) else None


def check_tokenizer_of_init(init: str | None, tokenizer: Tokenizer) -> None:
    """Raise UserError if `model.init` has a tokenizer, and it is not the run's."""
    own = tokenizer_directory(init) if init else None
    if not own:
        return
    trained = Tokenizer(own)
    if (trained.fingerprint, trained.special) != (tokenizer.fingerprint, tokenizer.special):
        raise UserError(
            f"model.init {init} was trained with the tokenizer {own}, and the run's tokenizer is another one; set "
            f"model.tokenizer={own}, or enlarge the model's vocabulary as docs/how-to/add-language.md shows"
        )
