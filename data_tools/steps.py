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
from .align import align, in_words, write_priors
from .cleaning import Cleaner, Removed, text_hashes
from .corpus import Corpus, Rules, SourceSpec, group_of
from .engine import Step, put
from .readers import Unit, from_line, read_units, to_line
from .write_shards import TokenFilter, write_shard

CHUNK_UNITS, CHUNK_BYTES = 8192, 4 << 20
KEPT, REPEATED, NEAR, HELD = range(4)
"""The states of a unit: kept, an exact duplicate, a near duplicate, held out."""
HELD_SHARE = 10
"""At most about one in this many kept sentences or pairs is held out."""
PART_PAIRS, SAMPLE_PARTS = 250_000, 2
"""From 2 * SAMPLE_PARTS * PART_PAIRS pairs on, a direction is aligned in parts of at least PART_PAIRS pairs, with
priors from an even sample as large as SAMPLE_PARTS parts."""
SYMMETRIZE = "grow-diag-final-and"
SAMPLE = 2_000_000
"""The tokenizer is trained on at most this number of sentences and sides of pairs."""
STATISTICS = 2
"""The number of columns of clean/CHUNK.npy before the MinHash bands: the text's hash, and its number of sentences."""


class Chunk(NamedTuple):
    number: int
    """The chunk's number among the chunks of all sources."""
    source: int
    of_source: int
    """The chunk's number among the chunks of its source."""


@lru_cache(maxsize=1)
def corpus_of(folder: Path) -> Corpus:
    return Corpus.model_validate(read_json(folder / "plan.json")["corpus"], strict=False)


@lru_cache(maxsize=1)
def chunks_of(folder: Path) -> list[Chunk]:
    """All chunks, which are known after the step `cut`."""
    counts = [read_json(folder / f"raw/{n}.json")["chunks"] for n in range(len(corpus_of(folder).sources))]
    places = [(source, number) for source, count in enumerate(counts) for number in range(count)]
    return [Chunk(number, *place) for number, place in enumerate(places)]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_lines(path, [json.dumps(value, ensure_ascii=False)])


def write_lines(path: Path, lines: list[str]) -> None:
    with put(path) as partial:
        partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")


def write_pickle(path: Path, value: Any) -> None:
    """Write what only this program reads: several times as fast as JSON."""
    with put(path) as partial:
        partial.write_bytes(pickle.dumps(value))


def cut(folder: Path, number: int) -> None:
    """Write the pairs or documents of a source to files of limited size."""
    source, chunks, size, total, lines = corpus_of(folder).sources[number], 0, 0, 0, list[str]()
    for unit in read_units(source):
        if len(lines) == CHUNK_UNITS or size >= CHUNK_BYTES:
            write_lines(folder / f"raw/{number}/{chunks:06d}.jsonl", lines)
            chunks, size, lines = chunks + 1, 0, []
        lines.append(to_line(unit))
        size, total = size + len(lines[-1]), total + 1
    write_lines(folder / f"raw/{number}/{chunks:06d}.jsonl", lines)
    write_json(folder / f"raw/{number}.json", {"chunks": chunks + 1, "units": total})


def units_in(folder: Path, chunk: Chunk) -> Iterator[Unit]:
    """The units of a chunk after the rules."""
    return starmap(Unit, pickle.loads((folder / f"clean/{chunk.number}.units").read_bytes()))


def clean(folder: Path, number: int) -> None:
    """Write the units of a chunk that pass the rules, and hashes of their texts."""
    chunk, corpus = chunks_of(folder)[number], corpus_of(folder)
    source = corpus.sources[chunk.source]
    rules, langs = corpus.rules_of(source), source.langs
    cleaner, kept, units, dropped, cleaned = Cleaner(rules, langs), list[Unit](), 0, 0, []
    with (folder / f"raw/{chunk.source}/{chunk.of_source:06d}.jsonl").open(encoding="utf-8", newline="\n") as file:
        for unit in map(from_line, file):
            units += 1
            if texts := cleaner.clean(unit):
                cleaned.append((unit, texts))
    for unit, texts in cleaner.without_boilerplate(cleaner.without_excluded(cleaned)):
        links, lost = projected(unit, texts, source)
        kept.append(Unit(unit.number, texts, links))
        dropped += lost
    flip = -1 if len(langs) == 2 and langs != group_of(source) else 1
    hashes = text_hashes([unit.texts[::flip] for unit in kept], rules.dedup == "near")
    sizes = np.array([1 if len(langs) == 2 else len(unit.texts) for unit in kept], dtype="<u8").reshape(-1, 1)
    write_pickle(folder / f"clean/{number}.units", [tuple(unit) for unit in kept])
    with put(folder / f"clean/{number}.npy") as partial, partial.open("wb") as file:
        np.save(file, np.hstack([hashes[:, :1], sizes, hashes[:, 1:]]))
    counts = {"read": units, "changed": cleaner.changed, "dropped_links": dropped}
    write_json(folder / f"clean/{number}.json", counts | {"removed": cleaner.removed.to_json()})


def projected(unit: Unit, texts: list[str], source: SourceSpec) -> tuple[str | None, int]:
    """A unit's links, renumbered to the words of its clean texts, and how many links were dropped. Raises UserError."""
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


def select(folder: Path, number: int) -> None:
    """Write the state of each unit of a group. With `dedup`, only the first of equal units is kept."""
    corpus = corpus_of(folder)
    group = corpus.groups[number]
    chunks = chunks_in(folder, group)
    tables = [np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r") for chunk in chunks]
    sizes = [len(table) for table in tables]
    rules = [corpus.rules_of(corpus.sources[chunk.source]) for chunk in chunks]
    exact = np.concatenate([table[:, 0] for table in tables])
    state = np.full(sum(sizes), KEPT, dtype=np.uint8)
    state[repeated(exact) & np.repeat([rule.dedup is not None for rule in rules], sizes)] = REPEATED
    near = np.repeat([rule.dedup == "near" for rule in rules], sizes)
    for band in range(STATISTICS, max(table.shape[1] for table in tables)):
        similar = np.zeros(len(state), dtype=bool)
        similar[near] = repeated(np.concatenate([table[:, band] for table in tables if table.shape[1] > band]))
        state[similar & (state == KEPT)] = NEAR
    if not (state == KEPT).any():
        removed = Counter[str]()
        for chunk in chunks:
            removed.update(read_json(folder / f"clean/{chunk.number}.json")["removed"]["counts"])
        told = ", ".join(f"{n:,} {rule}" for rule, n in removed.items())
        raise UserError(
            f"nothing is left of {'-'.join(group)}: the rules removed {told}; relax them, or mend the source"
        )
    wanted = corpus.heldout.pairs if len(group) == 2 else corpus.heldout.mono
    sentences = np.concatenate([table[:, 1] for table in tables])
    hold_out(state, exact, sentences, min(wanted, int(sentences[state == KEPT].sum()) // HELD_SHARE))
    with put(folder / f"state/{number}.npy") as partial, partial.open("wb") as file:
        np.save(file, state)


def repeated(values: np.ndarray) -> np.ndarray:
    """True for each value that also occurs earlier."""
    again = np.ones(len(values), dtype=bool)
    again[np.unique(values, return_index=True)[1]] = False
    return again


def hold_out(state: np.ndarray, exact: np.ndarray, sentences: np.ndarray, wanted: int) -> None:
    """Mark as held out units that have `wanted` sentences in total (with documents, a few more), in the order of their
    texts' hashes. Other units with the same texts become repeated."""
    if not wanted:
        return
    kept = np.flatnonzero(state == KEPT)
    values, first = np.unique(exact[kept], return_index=True)
    ends = np.cumsum(sentences[kept[first]])
    values = values[: int(np.searchsorted(ends, wanted)) + 1]
    chosen = kept[first[: len(values)]]
    state[np.isin(exact, values) & (state == KEPT)] = REPEATED
    state[chosen] = HELD


def chunks_in(folder: Path, group: tuple[str, ...]) -> list[Chunk]:
    sources = corpus_of(folder).sources
    return [chunk for chunk in chunks_of(folder) if group_of(sources[chunk.source]) == group]


@lru_cache(maxsize=4)
def places_in(folder: Path, group: tuple[str, ...]) -> dict[int, slice]:
    """The number of each chunk -> the slice of the group's state that has its units."""
    found, start = {}, 0
    for chunk in chunks_in(folder, group):
        end = start + len(np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r"))
        found[chunk.number], start = slice(start, end), end
    return found


def state_of(folder: Path, chunk: Chunk) -> np.ndarray:
    corpus = corpus_of(folder)
    group = group_of(corpus.sources[chunk.source])
    state = np.load(folder / f"state/{corpus.groups.index(group)}.npy", mmap_mode="r")
    return state[places_in(folder, group)[chunk.number]]


def units_and_states(folder: Path, chunk: Chunk) -> Iterator[tuple[Unit, int]]:
    yield from zip(units_in(folder, chunk), state_of(folder, chunk).tolist(), strict=True)


def is_unlinked(unit: Unit, state: int) -> bool:
    """True if eflomal is to align a pair: it came without links and is kept or held out."""
    return unit.links is None and state in (KEPT, HELD)


class AlignmentPart(NamedTuple):
    """The chunks whose pairs are aligned together, all of one direction (an ordered pair of languages)."""

    direction: int
    chunks: list[Chunk]
    alone: bool
    """True if these are all chunks of the direction."""


@lru_cache(maxsize=1)
def parts_of(folder: Path) -> list[AlignmentPart]:
    """All parts, after `select`. If a direction has several, each has about as many pairs, at least PART_PAIRS."""
    corpus, parts = corpus_of(folder), list[AlignmentPart]()
    for number, langs in enumerate(corpus.directions):
        chunks = [c for c in chunks_of(folder) if corpus.sources[c.source].langs == langs]
        sizes = [int(np.isin(state_of(folder, chunk), (KEPT, HELD)).sum()) for chunk in chunks]
        count = sum(sizes) // PART_PAIRS
        count = count if count >= 2 * SAMPLE_PARTS else 1
        starts = (start * count // max(sum(sizes), 1) for start in accumulate(sizes, initial=0))
        places = [min(place, count - 1) for place in starts][:-1]
        for part in range(count):
            of_part = [chunk for chunk, place in zip(chunks, places, strict=True) if place == part]
            parts.append(AlignmentPart(number, of_part, count == 1))
    return parts


def unlinked(folder: Path, chunk: Chunk) -> list[tuple[str, str]]:
    """The texts of the chunk's pairs that are aligned."""
    return [(u.texts[0], u.texts[1]) for u, state in units_and_states(folder, chunk) if is_unlinked(u, state)]


def make_priors(folder: Path, number: int) -> None:
    """Write priors from an even sample of a direction's pairs, if the direction has several parts."""
    parts = [part for part in parts_of(folder) if part.direction == number and not part.alone]
    if parts:
        pairs = (pair for part in parts for chunk in part.chunks for pair in unlinked(folder, chunk))
        with put(folder / f"links/{number}.priors") as partial:
            write_priors(in_words(islice(pairs, 0, None, len(parts) // SAMPLE_PARTS)), partial)


def make_links(folder: Path, number: int) -> None:
    """Write the links of a part's pairs, which one run of the aligner finds."""
    part, made = parts_of(folder)[number], folder / f"links/{number}.all"
    chunks = [chunk for chunk in part.chunks if unlinked(folder, chunk)]
    if not chunks:
        return
    made.parent.mkdir(exist_ok=True)
    priors = None if part.alone else folder / f"links/{part.direction}.priors"
    align((pair for chunk in chunks for pair in unlinked(folder, chunk)), made, SYMMETRIZE, priors)
    with made.open(encoding="utf-8") as lines:
        for chunk in chunks:
            write_lines(folder / f"links/{chunk.number}", [next(lines).rstrip("\n") for _ in unlinked(folder, chunk)])


def linked_units(folder: Path, chunk: Chunk) -> Iterator[tuple[Unit, int]]:
    """The units of a chunk, with the links that `make_links` wrote, and their states."""
    path = folder / f"links/{chunk.number}"
    links = iter(path.read_text(encoding="utf-8").split("\n")) if path.exists() else None
    for unit, state in units_and_states(folder, chunk):
        if links and is_unlinked(unit, state):
            unit = unit._replace(links=project_links(next(links), tuple(unit.texts), by_words=True)[0])
        yield unit, state


def kept_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every kept sentence and of every side of a kept pair."""
    for chunk in chunks_of(folder):
        langs = corpus_of(folder).sources[chunk.source].langs
        for unit, state in units_and_states(folder, chunk):
            if state == KEPT:
                yield from zip(langs if len(langs) == 2 else langs * len(unit.texts), unit.texts, strict=True)


def kept_counts(folder: Path) -> Counter[str]:
    """The number of kept texts in each language."""
    counts: Counter[str] = Counter()
    for chunk in chunks_of(folder):
        table = np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r")
        for lang in corpus_of(folder).sources[chunk.source].langs:
            counts[lang] += int(table[state_of(folder, chunk) == KEPT, 1].sum())
    return counts


def sampled(texts: Iterable[tuple[str, str]], counts: Counter[str], alpha: float) -> Iterator[tuple[str, str]]:
    """An evenly spread sample of the texts, with a share of each language in proportion to its count ** alpha."""
    shares = {lang: count**alpha for lang, count in counts.items()}
    wanted = {lang: min(counts[lang], int(SAMPLE * share / sum(shares.values()))) for lang, share in shares.items()}
    passed: Counter[str] = Counter()
    for lang, text in texts:
        before = passed[lang] * wanted[lang] // counts[lang]
        passed[lang] += 1
        if passed[lang] * wanted[lang] // counts[lang] > before:
            yield lang, text


def train_tokenizer(folder: Path, number: int) -> None:
    """Train the tokenizer, and report how it splits the text of each language."""
    from xscale.data.tokenizer import Tokenizer

    from .tokenizer import COVERAGE, Sample, try_to_train

    spec, place = corpus_of(folder).tokenizer, folder / "result/tokenizer"
    assert spec
    counts, sample = kept_counts(folder), Sample()
    args = Namespace(type=spec.type, vocab_size=spec.vocab_size, lowercase=False, coverage=COVERAGE)
    trained = try_to_train(sample.of(sampled(kept_texts(folder), counts, spec.alpha)), args)
    with put(place) as partial:
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


def records_of(unit: Unit, langs: tuple[str, ...], name: str) -> list[Record]:
    """A pair's record, or the records of a document's sentences."""
    key = f"{name}-{unit.number:09d}"
    if len(langs) == 2:
        return [Record(key, langs, (unit.texts[0], unit.texts[1]), unit.links)]
    doc = unit.number if len(unit.texts) > 1 else None
    return [Record(f"{key}.{i}", langs, (text,), doc=doc) for i, text in enumerate(unit.texts)]


def shards(folder: Path, number: int) -> None:
    """Write the shard of a chunk, and the records that are held out."""
    corpus, chunk = corpus_of(folder), chunks_of(folder)[number]
    source, name, removed = corpus.sources[chunk.source], corpus.names[chunk.source], Removed()
    fits, kept, held = length_filter(folder, corpus.rules_of(source), removed), list[Record](), list[Record]()
    units = 0
    for unit, state in linked_units(folder, chunk):
        if state in (REPEATED, NEAR):
            removed.add("dedup" if state == REPEATED else "dedup (near)", unit.texts[: len(source.langs)])
            continue
        records = [record for record in records_of(unit, source.langs, name) if fits(record)]
        if state == HELD:
            held += records
        else:
            kept += records
            units += bool(records)
    write_tar(folder / f"tars/{number}.tar", kept)
    write_pickle(folder / f"held/{number}", held)
    linked = sum(record.links is not None for record in kept)
    counts = {"held": len(held), "documents": units, "linked": linked, "records": len(kept)}
    write_json(folder / f"tars/{number}.json", counts | {"removed": removed.to_json()})


def length_filter(folder: Path, rules: Rules, removed: Removed) -> Callable[[Record], bool]:
    """A function that is true for a record whose number of tokens rules.length.tokens allows, and counts the others."""
    bounds = rules.length.tokens
    if not bounds:
        return lambda record: True
    keep = TokenFilter((folder / "result/tokenizer").absolute(), *bounds)

    def fits(record: Record) -> bool:
        if reason := keep.reason(record.texts):
            removed.add(f"length ({reason} in tokens)", list(record.texts))
        return not reason

    return fits


def write_tar(path: Path, records: list[Record]) -> None:
    """Write a shard, its .idx file and a survey of it; nothing if there is no record."""
    if records:
        with put(path) as partial:
            write_shard(partial, records)
        write_pickle(path.with_suffix(".scan"), indexing.scan([path], None, {}))


def gather(folder: Path, number: int) -> None:
    """Move the shards of a source, or those of a group's held-out records, to result/, and write their index."""
    corpus = corpus_of(folder)
    if number < len(corpus.sources):
        source, name = corpus.sources[number], corpus.names[number]
        tars = [folder / f"tars/{chunk.number}.tar" for chunk in chunks_of(folder) if chunk.source == number]
        rules = corpus.rules_of(source).model_dump(exclude={"exclude"}, mode="json")
        made = {"input": [Path(path).name for path in source.paths], "licence": source.licence, "rules": rules}
        move_shards(tars, folder / "result/shards" / name, name, made)
        return
    held: dict[str, list[Record]] = defaultdict(list)
    for chunk in chunks_in(folder, corpus.groups[number - len(corpus.sources)]):
        for record in pickle.loads((folder / f"held/{chunk.number}").read_bytes()):
            held["-".join(record.langs)].append(record)
    for langs, of_langs in held.items():
        tars = [folder / f"tars/{langs}-{start}.tar" for start in range(0, len(of_langs), CHUNK_UNITS)]
        for n, tar in enumerate(tars):
            write_tar(tar, of_langs[n * CHUNK_UNITS : (n + 1) * CHUNK_UNITS])
        move_shards(tars, folder / "result/heldout" / langs, "heldout", {"heldout": True})


def move_shards(tars: list[Path], directory: Path, name: str, made: dict[str, Any]) -> None:
    """Move shards to a directory, numbered without gaps, and write their index. A killed move can be repeated."""
    parts = list[indexing.Scanned]()
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
        indexing.write(directory, indexing.described(directory, parts, made, "unicode"))


STEPS: dict[str, tuple[Step, Callable[[Path], int]]] = {
    "cut": (cut, lambda folder: len(corpus_of(folder).sources)),
    "clean": (clean, lambda folder: len(chunks_of(folder))),
    "select": (select, lambda folder: len(corpus_of(folder).groups)),
    "priors": (make_priors, lambda folder: len(corpus_of(folder).directions)),
    "align": (make_links, lambda folder: len(parts_of(folder))),
    "tokenizer": (train_tokenizer, lambda folder: int(corpus_of(folder).tokenizer is not None)),
    "shards": (shards, lambda folder: len(chunks_of(folder))),
    "gather": (gather, lambda folder: len(corpus_of(folder).sources) + len(corpus_of(folder).groups)),
}
"""The steps in order: each has the function that does a task, and the function that counts the tasks."""
