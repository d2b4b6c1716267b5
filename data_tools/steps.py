"""The steps of `data_tools.prepare`. The tasks of a step do not depend on one another. A task reads what earlier steps
wrote, and writes whole files of its own. All files are in one folder:

    raw/SOURCE/CHUNK.jsonl      cut: the units of a source as its reader gives them, in chunks
    clean/CHUNK.{units,npy}     clean: a chunk's units after the rules, pickled, and the hashes of their texts
    state/GROUP.npy             select: whether each unit of a language or a pair is kept, repeated or held out
    links/N.priors              priors: the aligner's statistics from a sample of pairs, if a direction has many
    links/CHUNK                 align: word links for a chunk's kept or held-out pairs that came without links
    result/tokenizer/           tokenizer: trained on a sample of what is kept
    tars/CHUNK.*, held/CHUNK    shards: a shard, its index and a survey of it; the records that are held out
    result/{shards,heldout}/    gather: the shards of each source under their names, with index.json

Chunks do not depend on the number of workers, so every byte depends on the input alone, except eflomal's links.
"""

import json
import pickle
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, islice, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale import files
from xscale.data import words
from xscale.data.link_projection import project_links
from xscale.errors import UserError
from xscale.record import Record

from . import index as indexing
from .align import align, space_words, write_priors
from .cleaning import Cleaner, RemovalCounts, text_hashes
from .corpus import Corpus, Rules, SourceSpec, language_group
from .engine import Step, replacing
from .readers import Unit, from_line, read_units, to_line
from .write_shards import TokenFilter, write_shard

CHUNK_UNITS, CHUNK_BYTES = 8192, 4 << 20
KEPT, REPEATED, NEAR, HELD_OUT = range(4)
"""The states of a unit: kept, removed as an exact duplicate, removed as a near duplicate, held out."""
HELD_SHARE = 10
"""About one of this many kept sentences or pairs, at most, is held out."""
PART_PAIRS, SAMPLE_PARTS = 250_000, 2
"""A direction of at least 2 * SAMPLE_PARTS * PART_PAIRS pairs is aligned in parts of at least PART_PAIRS pairs, with
priors from an even sample of about SAMPLE_PARTS * PART_PAIRS pairs."""
SYMMETRIZE = "grow-diag-final-and"
SAMPLE = 2_000_000
"""The maximum number of sentences and sides of pairs on which the tokenizer is trained."""
STATISTICS = 2
"""The number of columns of clean/CHUNK.npy before the MinHash bands: hash of a unit's text, number of its sentences."""


class Chunk(NamedTuple):
    number: int
    """The chunk's number among the chunks of all sources."""
    source: int
    of_source: int
    """The chunk's number among the chunks of its source."""


@lru_cache(maxsize=1)
def planned_corpus(folder: Path) -> Corpus:
    return Corpus.model_validate(read_json(folder / "plan.json")["corpus"], strict=False)


@lru_cache(maxsize=1)
def all_chunks(folder: Path) -> list[Chunk]:
    """Return the chunks of all sources. They are known after the step `cut`."""
    counts = [read_json(folder / f"raw/{n}.json")["chunks"] for n in range(len(planned_corpus(folder).sources))]
    places = [(source, number) for source, count in enumerate(counts) for number in range(count)]
    return [Chunk(number, *place) for number, place in enumerate(places)]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_lines(path, [json.dumps(value, ensure_ascii=False)])


def write_lines(path: Path, lines: list[str]) -> None:
    with replacing(path) as partial:
        partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")


def write_pickle(path: Path, value: Any) -> None:
    """Write a value that only this program reads. pickle is several times as fast as JSON."""
    with replacing(path) as partial:
        partial.write_bytes(pickle.dumps(value))


def cut_source(folder: Path, number: int) -> None:
    """Write the pairs or documents of source `number` to chunk files of limited size."""
    source, chunks, size, total, lines = planned_corpus(folder).sources[number], 0, 0, 0, list[str]()
    for unit in read_units(source):
        if len(lines) == CHUNK_UNITS or size >= CHUNK_BYTES:
            write_lines(folder / f"raw/{number}/{chunks:06d}.jsonl", lines)
            chunks, size, lines = chunks + 1, 0, []
        lines.append(to_line(unit))
        size, total = size + len(lines[-1]), total + 1
    write_lines(folder / f"raw/{number}/{chunks:06d}.jsonl", lines)
    write_json(folder / f"raw/{number}.json", {"chunks": chunks + 1, "units": total})


def clean_units(folder: Path, chunk: Chunk) -> Iterator[Unit]:
    """Yield the units of a chunk that the rules kept."""
    return starmap(Unit, pickle.loads((folder / f"clean/{chunk.number}.units").read_bytes()))


def clean_chunk(folder: Path, number: int) -> None:
    """Write those documents or pairs of chunk `number` that pass the rules, and hashes to find equal texts by."""
    chunk, corpus = all_chunks(folder)[number], planned_corpus(folder)
    source = corpus.sources[chunk.source]
    rules, langs = corpus.rules_of(source), source.langs
    cleaner, kept, units, dropped, cleaned = Cleaner(rules, langs), list[Unit](), 0, 0, []
    with (folder / f"raw/{chunk.source}/{chunk.of_source:06d}.jsonl").open(encoding="utf-8", newline="\n") as file:
        for unit in map(from_line, file):
            units += 1
            if texts := cleaner.clean(unit):
                cleaned.append((unit, texts))
    for unit, texts in cleaner.without_boilerplate(cleaner.without_excluded(cleaned)):
        links, lost = project_unit_links(unit, texts, source)
        kept.append(Unit(unit.number, texts, links))
        dropped += lost
    flip = -1 if len(langs) == 2 and langs != language_group(source) else 1
    hashes = text_hashes([unit.texts[::flip] for unit in kept], rules.dedup == "near")
    sizes = np.array([1 if len(langs) == 2 else len(unit.texts) for unit in kept], dtype="<u8").reshape(-1, 1)
    write_pickle(folder / f"clean/{number}.units", [tuple(unit) for unit in kept])
    with replacing(folder / f"clean/{number}.npy") as partial, partial.open("wb") as file:
        np.save(file, np.hstack([hashes[:, :1], sizes, hashes[:, 1:]]))
    counts = {"read": units, "changed": cleaner.changed, "dropped_links": dropped}
    write_json(folder / f"clean/{number}.json", counts | {"removed": cleaner.removed.to_json()})


def project_unit_links(unit: Unit, texts: list[str], source: SourceSpec) -> tuple[str | None, int]:
    """Return a unit's links for the words of its clean texts, and the number of dropped links. Raises UserError."""
    if unit.links is None:
        return None, 0
    given = None if texts == unit.texts else tuple(unit.texts)
    if source.format == "shards":  # its links do not number white-space words
        given = tuple(" ".join(of_text) for of_text, _ in words.split(unit.texts))
    try:
        return project_links(unit.links, tuple(texts), given)
    except ValueError as error:
        raise UserError(
            f"{source.paths[-1]}: line {unit.number}: {error}; links are 0-based `source-target` numbers of the "
            f"white-space words of the texts"
        ) from None


def select_units(folder: Path, number: int) -> None:
    """Write the state of each unit of group `number`. With `dedup`, only the first of equal units is kept."""
    corpus = planned_corpus(folder)
    group = corpus.groups[number]
    chunks = group_chunks(folder, group)
    tables = [np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r") for chunk in chunks]
    sizes = [len(table) for table in tables]
    rules = [corpus.rules_of(corpus.sources[chunk.source]) for chunk in chunks]
    exact = np.concatenate([table[:, 0] for table in tables])
    state = np.full(sum(sizes), KEPT, dtype=np.uint8)
    state[occurs_earlier(exact) & np.repeat([rule.dedup is not None for rule in rules], sizes)] = REPEATED
    near = np.repeat([rule.dedup == "near" for rule in rules], sizes)
    for band in range(STATISTICS, max(table.shape[1] for table in tables)):
        similar = np.zeros(len(state), dtype=bool)
        similar[near] = occurs_earlier(np.concatenate([table[:, band] for table in tables if table.shape[1] > band]))
        state[similar & (state == KEPT)] = NEAR
    if not (state == KEPT).any():
        removed = Counter[str]()
        for chunk in chunks:
            removed.update(read_json(folder / f"clean/{chunk.number}.json")["removed"]["counts"])
        told = ", ".join(f"{n:,} {rule}" for rule, n in removed.items())
        raise UserError(
            f"nothing is left of {'-'.join(group)}: the rules removed {told}; relax the rules, or correct the sources"
        )
    wanted = corpus.heldout.pairs if len(group) == 2 else corpus.heldout.mono
    sentences = np.concatenate([table[:, 1] for table in tables])
    hold_out(state, exact, sentences, min(wanted, int(sentences[state == KEPT].sum()) // HELD_SHARE))
    with replacing(folder / f"state/{number}.npy") as partial, partial.open("wb") as file:
        np.save(file, state)


def occurs_earlier(values: np.ndarray) -> np.ndarray:
    """Return bool [len(values)]: True for each value that also occurs earlier."""
    again = np.ones(len(values), dtype=bool)
    again[np.unique(values, return_index=True)[1]] = False
    return again


def hold_out(state: np.ndarray, exact: np.ndarray, sentences: np.ndarray, wanted: int) -> None:
    """Set the state HELD_OUT for units with `wanted` sentences in total (a few more with documents), in the order of
    their texts' hashes, and the state REPEATED for other units with the same texts."""
    if not wanted:
        return
    kept = np.flatnonzero(state == KEPT)
    values, first = np.unique(exact[kept], return_index=True)
    ends = np.cumsum(sentences[kept[first]])
    values = values[: int(np.searchsorted(ends, wanted)) + 1]
    chosen = kept[first[: len(values)]]
    state[np.isin(exact, values) & (state == KEPT)] = REPEATED
    state[chosen] = HELD_OUT


def group_chunks(folder: Path, group: tuple[str, ...]) -> list[Chunk]:
    sources = planned_corpus(folder).sources
    return [chunk for chunk in all_chunks(folder) if language_group(sources[chunk.source]) == group]


@lru_cache(maxsize=4)
def state_slices(folder: Path, group: tuple[str, ...]) -> dict[int, slice]:
    """Return {number of a chunk: the slice of the group's state array that belongs to the chunk's units}."""
    found, start = {}, 0
    for chunk in group_chunks(folder, group):
        end = start + len(np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r"))
        found[chunk.number], start = slice(start, end), end
    return found


def unit_states(folder: Path, chunk: Chunk) -> np.ndarray:
    corpus = planned_corpus(folder)
    group = language_group(corpus.sources[chunk.source])
    state = np.load(folder / f"state/{corpus.groups.index(group)}.npy", mmap_mode="r")
    return state[state_slices(folder, group)[chunk.number]]


def units_and_states(folder: Path, chunk: Chunk) -> Iterator[tuple[Unit, int]]:
    yield from zip(clean_units(folder, chunk), unit_states(folder, chunk).tolist(), strict=True)


def is_unlinked(unit: Unit, state: int) -> bool:
    """Return True if eflomal shall align a pair: the pair is kept or held out, and came without links."""
    return unit.links is None and state in (KEPT, HELD_OUT)


class AlignmentPart(NamedTuple):
    """Chunks whose pairs are aligned together, all of one direction (an ordered pair of languages)."""

    direction: int
    chunks: list[Chunk]
    is_whole_direction: bool
    """True if the part has all chunks of the direction."""


@lru_cache(maxsize=1)
def alignment_parts(folder: Path) -> list[AlignmentPart]:
    """Return the parts of all directions; callable after the step `select`. If a direction has several parts, each has
    about the same number of pairs, at least PART_PAIRS."""
    corpus, parts = planned_corpus(folder), list[AlignmentPart]()
    for number, langs in enumerate(corpus.directions):
        chunks = [c for c in all_chunks(folder) if corpus.sources[c.source].langs == langs]
        sizes = [int(np.isin(unit_states(folder, chunk), (KEPT, HELD_OUT)).sum()) for chunk in chunks]
        count = sum(sizes) // PART_PAIRS
        count = count if count >= 2 * SAMPLE_PARTS else 1
        starts = (start * count // max(sum(sizes), 1) for start in accumulate(sizes, initial=0))
        places = [min(place, count - 1) for place in starts][:-1]
        for part in range(count):
            of_part = [chunk for chunk, place in zip(chunks, places, strict=True) if place == part]
            parts.append(AlignmentPart(number, of_part, count == 1))
    return parts


def unlinked_pairs(folder: Path, chunk: Chunk) -> list[tuple[str, str]]:
    """Return the texts of the chunk's pairs that eflomal shall align."""
    return [(u.texts[0], u.texts[1]) for u, state in units_and_states(folder, chunk) if is_unlinked(u, state)]


def make_priors(folder: Path, number: int) -> None:
    """Write priors from an even sample of the pairs of direction `number`, if the direction has several parts."""
    parts = [part for part in alignment_parts(folder) if part.direction == number and not part.is_whole_direction]
    if parts:
        pairs = (pair for part in parts for chunk in part.chunks for pair in unlinked_pairs(folder, chunk))
        with replacing(folder / f"links/{number}.priors") as partial:
            write_priors(space_words(islice(pairs, 0, None, len(parts) // SAMPLE_PARTS)), partial)


def make_links(folder: Path, number: int) -> None:
    """Write the links of all pairs of part `number`, which one run of the aligner finds."""
    part, made = alignment_parts(folder)[number], folder / f"links/{number}.all"
    chunks = [chunk for chunk in part.chunks if unlinked_pairs(folder, chunk)]
    if not chunks:
        return
    made.parent.mkdir(exist_ok=True)
    priors = None if part.is_whole_direction else folder / f"links/{part.direction}.priors"
    align((pair for chunk in chunks for pair in unlinked_pairs(folder, chunk)), made, SYMMETRIZE, priors)
    with made.open(encoding="utf-8") as lines:
        for chunk in chunks:
            write_lines(
                folder / f"links/{chunk.number}", [next(lines).rstrip("\n") for _ in unlinked_pairs(folder, chunk)]
            )


def linked_units(folder: Path, chunk: Chunk) -> Iterator[tuple[Unit, int]]:
    """Yield (unit, state) of a chunk. Its pairs have the links that `make_links` wrote."""
    path = folder / f"links/{chunk.number}"
    links = iter(path.read_text(encoding="utf-8").split("\n")) if path.exists() else None
    for unit, state in units_and_states(folder, chunk):
        if links and is_unlinked(unit, state):
            unit = unit._replace(links=project_links(next(links), tuple(unit.texts), by_words=True)[0])
        yield unit, state


def kept_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of every kept sentence and of both sides of every kept pair."""
    for chunk in all_chunks(folder):
        langs = planned_corpus(folder).sources[chunk.source].langs
        for unit, state in units_and_states(folder, chunk):
            if state == KEPT:
                yield from zip(langs if len(langs) == 2 else langs * len(unit.texts), unit.texts, strict=True)


def kept_counts(folder: Path) -> Counter[str]:
    """Return the number of kept texts in each language."""
    counts: Counter[str] = Counter()
    for chunk in all_chunks(folder):
        table = np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r")
        for lang in planned_corpus(folder).sources[chunk.source].langs:
            counts[lang] += int(table[unit_states(folder, chunk) == KEPT, 1].sum())
    return counts


def sample_texts(texts: Iterable[tuple[str, str]], counts: Counter[str], alpha: float) -> Iterator[tuple[str, str]]:
    """Yield an evenly spread sample of (language, text), up to SAMPLE texts. A language's share of the sample is
    proportional to its count ** alpha."""
    shares = {lang: count**alpha for lang, count in counts.items()}
    wanted = {lang: min(counts[lang], int(SAMPLE * share / sum(shares.values()))) for lang, share in shares.items()}
    passed: Counter[str] = Counter()
    for lang, text in texts:
        before = passed[lang] * wanted[lang] // counts[lang]
        passed[lang] += 1
        if passed[lang] * wanted[lang] // counts[lang] > before:
            yield lang, text


def train_tokenizer(folder: Path, number: int) -> None:
    """Train the tokenizer, and write statistics of the tokens of each language."""
    from xscale.data.tokenizer import Tokenizer

    from .tokenizer import COVERAGE, Sample, try_to_train

    spec, place = planned_corpus(folder).tokenizer, folder / "result/tokenizer"
    assert spec
    counts, sample = kept_counts(folder), Sample()
    args = Namespace(type=spec.type, vocab_size=spec.vocab_size, lowercase=False, coverage=COVERAGE)
    trained = try_to_train(sample.collect(sample_texts(kept_texts(folder), counts, spec.alpha)), args)
    with replacing(place) as partial:
        files.remove(place)
        trained.save_pretrained(partial)
    loaded, report = Tokenizer(place.absolute()), {}
    for lang, texts in sorted(sample.texts.items()):
        ids = loaded.encode(texts)
        tokens = sum(map(len, ids))
        report[lang] = {
            "sentences": counts[lang],
            "tokens_per_word": round(tokens / sum(len(in_text) for in_text, _ in words.split(texts)), 3),
            "characters_per_token": round(sum(map(len, texts)) / tokens, 3),
            "unknown": round(loaded.unknown_share(ids), 5),
        }
    write_json(folder / "tokenizer.json", {"tokens": len(trained), "languages": report})


def unit_records(unit: Unit, langs: tuple[str, ...], name: str) -> list[Record]:
    """Return the one record of a pair, or the records of a document's sentences."""
    key = f"{name}-{unit.number:09d}"
    if len(langs) == 2:
        return [Record(key, langs, (unit.texts[0], unit.texts[1]), unit.links)]
    doc = unit.number if len(unit.texts) > 1 else None
    return [Record(f"{key}.{i}", langs, (text,), doc=doc) for i, text in enumerate(unit.texts)]


def write_chunk_shard(folder: Path, number: int) -> None:
    """Write the shard of chunk `number`, and the chunk's records that are held out."""
    corpus, chunk = planned_corpus(folder), all_chunks(folder)[number]
    source, name, removed = corpus.sources[chunk.source], corpus.names[chunk.source], RemovalCounts()
    fits, kept, held = length_filter(folder, corpus.rules_of(source), removed), list[Record](), list[Record]()
    units = 0
    for unit, state in linked_units(folder, chunk):
        if state in (REPEATED, NEAR):
            removed.add("dedup" if state == REPEATED else "dedup (near)", unit.texts[: len(source.langs)])
            continue
        records = [record for record in unit_records(unit, source.langs, name) if fits(record)]
        if state == HELD_OUT:
            held += records
        else:
            kept += records
            units += bool(records)
    write_tar(folder / f"tars/{number}.tar", kept)
    write_pickle(folder / f"held/{number}", held)
    linked = sum(record.links is not None for record in kept)
    counts = {"held": len(held), "documents": units, "linked": linked, "records": len(kept)}
    write_json(folder / f"tars/{number}.json", counts | {"removed": removed.to_json()})


def length_filter(folder: Path, rules: Rules, removed: RemovalCounts) -> Callable[[Record], bool]:
    """Return a function (record) -> whether rules.length.tokens allows its number of tokens. Others are added to
    `removed`."""
    bounds = rules.length.tokens
    if not bounds:
        return lambda record: True
    keep = TokenFilter((folder / "result/tokenizer").absolute(), *bounds)

    def fits(record: Record) -> bool:
        if reason := keep.problem(record.texts):
            removed.add(f"length ({reason} in tokens)", list(record.texts))
        return not reason

    return fits


def write_tar(path: Path, records: list[Record]) -> None:
    """Write a shard, its .idx file and a survey of it, unless there are no records."""
    if records:
        with replacing(path) as partial:
            write_shard(partial, records)
        write_pickle(path.with_suffix(".scan"), indexing.scan_tars([path], None, {}))


def gather_shards(folder: Path, number: int) -> None:
    """Move the shards of source `number`, or of a group's held-out records, to result/, and write their index."""
    corpus = planned_corpus(folder)
    if number < len(corpus.sources):
        source, name = corpus.sources[number], corpus.names[number]
        tars = [folder / f"tars/{chunk.number}.tar" for chunk in all_chunks(folder) if chunk.source == number]
        rules = corpus.rules_of(source).model_dump(exclude={"exclude"}, mode="json")
        made = {"input": [Path(path).name for path in source.paths], "licence": source.licence, "rules": rules}
        move_shards(tars, folder / "result/shards" / name, name, made)
        return
    held: dict[str, list[Record]] = defaultdict(list)
    for chunk in group_chunks(folder, corpus.groups[number - len(corpus.sources)]):
        for record in pickle.loads((folder / f"held/{chunk.number}").read_bytes()):
            held["-".join(record.langs)].append(record)
    for langs, of_langs in held.items():
        tars = [folder / f"tars/{langs}-{start}.tar" for start in range(0, len(of_langs), CHUNK_UNITS)]
        for n, tar in enumerate(tars):
            write_tar(tar, of_langs[n * CHUNK_UNITS : (n + 1) * CHUNK_UNITS])
        move_shards(tars, folder / "result/heldout" / langs, "heldout", {"heldout": True})


def move_shards(tars: list[Path], directory: Path, name: str, made: dict[str, Any]) -> None:
    """Move shards to a directory, numbered without gaps, and write their index. A killed move can be repeated."""
    parts = list[indexing.TarScan]()
    for tar in (tar for tar in tars if tar.with_suffix(".scan").exists()):
        directory.mkdir(parents=True, exist_ok=True)
        ((shard, *rest),), survey = pickle.loads(tar.with_suffix(".scan").read_bytes())
        place = directory / f"{name}-{len(parts):06d}.tar"
        for old, new in ((tar, place), (tar.with_suffix(".idx"), place.with_suffix(".idx"))):
            with suppress(FileNotFoundError):  # it was moved before
                old.replace(new)
        parts.append(([(shard | {"name": place.name}, *rest)], survey))
    if parts:
        made = {"tool": "data_tools.prepare", **made}
        indexing.write_index(directory, indexing.index_content(directory, parts, made, "unicode"))


STEPS: dict[str, tuple[Step, Callable[[Path], int]]] = {
    "cut": (cut_source, lambda folder: len(planned_corpus(folder).sources)),
    "clean": (clean_chunk, lambda folder: len(all_chunks(folder))),
    "select": (select_units, lambda folder: len(planned_corpus(folder).groups)),
    "priors": (make_priors, lambda folder: len(planned_corpus(folder).directions)),
    "align": (make_links, lambda folder: len(alignment_parts(folder))),
    "tokenizer": (train_tokenizer, lambda folder: int(planned_corpus(folder).tokenizer is not None)),
    "shards": (write_chunk_shard, lambda folder: len(all_chunks(folder))),
    "gather": (gather_shards, lambda folder: len(planned_corpus(folder).sources) + len(planned_corpus(folder).groups)),
}
"""The steps in order, each with the function that does task n, and the function that counts the tasks."""
