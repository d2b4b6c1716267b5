"""The steps of `data_tools.prepare`. A step has tasks that do not depend on one another; a task reads what steps before
it wrote, and writes whole files of its own. All of it lies in one folder:

    raw/SOURCE/CHUNK.jsonl      cut: units of a source as its reader gives them, CHUNK_UNITS a chunk or CHUNK_BYTES
    clean/CHUNK.{jsonl,npy}     clean: what the rules leave of a chunk's units, and the hashes of their texts
    state/GROUP.npy             select: of all units of a language or pair, which are kept, repeated or held out
    priors/GROUP, links/CHUNK   align: what eflomal learns of a sample, then the links of each chunk
    tokenizer/                  tokenizer: of a sample of what is kept
    tars/CHUNK.*, held/CHUNK    shards: a shard, its index and a survey of it; the records that are held out
    shards/, heldout/           gather: the shards of each source under their names, with index.json

A chunk is a chunk whatever the number of workers, so every byte is a function of the input alone.
"""

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale import files
from xscale.data import words
from xscale.data.carry import carry_over
from xscale.data.shards import idx_path
from xscale.errors import UserError
from xscale.record import Record

from .cleaning import Cleaner, Removed, fingerprints
from .corpus import Corpus, Rules, SourceSpec
from .engine import Step, put
from .readers import Unit, from_line, read, to_line

CHUNK_UNITS, CHUNK_BYTES = 8192, 4 << 20
KEPT, REPEATED, NEAR, HELD = range(4)
"""What becomes of a unit."""
HELD_SHARE = 10
"""At most one unit in so many is held out."""
SAMPLE = 2_000_000
"""Sentences and sides of pairs on which the tokenizer is trained, at most."""
PRIORS_PAIRS = 100_000
"""Pairs of two languages from which the aligner's priors come, at most."""
STATISTICS = 2
"""Columns of clean/CHUNK.npy before the bands: the hash of the text, the number of sentences."""


class Plan(NamedTuple):
    """plan.json: the corpus, and what its sources turned out to be."""

    corpus: Corpus
    langs: list[tuple[str, ...]]
    """The languages of each source."""
    names: list[str]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Languages, and pairs of them whichever comes first, whose units are compared with one another."""
        return sorted({tuple(sorted(langs)) for langs in self.langs})

    def rules(self, source: int) -> Rules:
        return self.corpus.rules_of(self.corpus.sources[source])

    def source(self, number: int) -> SourceSpec:
        return self.corpus.sources[number]


class Chunk(NamedTuple):
    number: int
    """Among those of all sources."""
    source: int
    of_source: int
    """Its number among its source's."""


@lru_cache(maxsize=1)
def plan_of(folder: Path) -> Plan:
    fields = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return Plan(Corpus.model_validate(fields["corpus"], strict=False), [*map(tuple, fields["langs"])], fields["names"])


@lru_cache(maxsize=1)
def chunks_of(folder: Path) -> list[Chunk]:
    """All chunks, after `cut`."""
    counts = [read_json(folder / f"raw/{s}.json")["chunks"] for s in range(len(plan_of(folder).langs))]
    places = [(source, number) for source, count in enumerate(counts) for number in range(count)]
    return [Chunk(number, *place) for number, place in enumerate(places)]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    with put(path) as partial:
        partial.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def cut(folder: Path, number: int) -> None:
    """Units of a source, in chunks."""
    source, chunk, size, total, lines = plan_of(folder).source(number), 0, 0, 0, list[str]()

    def close() -> None:
        nonlocal chunk, size, lines
        with put(folder / f"raw/{number}/{chunk:06d}.jsonl") as partial:
            partial.write_text("".join(lines), encoding="utf-8", newline="\n")
        chunk, size, lines = chunk + 1, 0, []

    for unit in read(source):
        lines.append(to_line(unit) + "\n")
        size, total = size + len(lines[-1]), total + 1
        if len(lines) == CHUNK_UNITS or size >= CHUNK_BYTES:
            close()
    if lines:
        close()
    if not total:
        raise UserError(f"{', '.join(source.paths)}: nothing in it; give another source")
    write_json(folder / f"raw/{number}.json", {"chunks": chunk, "units": total})


def units(path: Path) -> Iterator[Unit]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(from_line, file)


def clean(folder: Path, number: int) -> None:
    chunk, plan = chunks_of(folder)[number], plan_of(folder)
    source, langs, rules = plan.source(chunk.source), plan.langs[chunk.source], plan.rules(chunk.source)
    raw = folder / f"raw/{chunk.source}/{chunk.of_source:06d}.jsonl"
    cleaner = Cleaner(rules, langs, whole=source.reader in ("conllu", "shards"))
    kept: list[Unit] = []
    read_units = dropped = 0
    for unit in units(raw):
        read_units += 1
        if texts := cleaner.clean(unit):
            links, lost = carried(unit, texts, source)
            kept.append(Unit(unit.number, texts, links))
            dropped += lost
    flip = -1 if langs != tuple(sorted(langs)) else 1
    hashes = fingerprints(
        [unit.texts[::flip] if len(langs) == 2 else unit.texts for unit in kept], rules.dedup == "near"
    )
    sizes = np.array([1 if len(langs) == 2 else len(unit.texts) for unit in kept], dtype="<u8").reshape(-1, 1)
    with put(folder / f"clean/{number}.jsonl") as partial:
        partial.write_text("".join(to_line(unit) + "\n" for unit in kept), encoding="utf-8", newline="\n")
    with put(folder / f"clean/{number}.npy") as partial, partial.open("wb") as file:
        np.save(file, np.hstack([hashes[:, :1], sizes, hashes[:, 1:]]))
    counts = {"read": read_units, "changed": cleaner.changed, "dropped_links": dropped}
    write_json(folder / f"clean/{number}.json", counts | {"removed": cleaner.removed.to_json()})
    files.remove(raw)


def carried(unit: Unit, texts: list[str], source: SourceSpec) -> tuple[str | None, int]:
    """A unit's links over the words of its clean texts, and how many were dropped. Raises UserError."""
    if unit.links is None:
        return None, 0
    by_words = source.reader == "shards"
    given = None if by_words or texts == unit.texts else (unit.texts[0], unit.texts[1])
    try:
        return carry_over(unit.links, tuple(texts), given, by_words)
    except ValueError as error:
        raise UserError(
            f"{source.paths[-1]}: unit {unit.number}: {error}; links are 0-based `source-target` numbers of the "
            f"white-space words of the texts"
        ) from None


def select(folder: Path, number: int) -> None:
    """What becomes of each unit of a group: the first of equal ones is kept, wherever they stand."""
    plan = plan_of(folder)
    group = plan.groups[number]
    chunks = chunks_in(folder, group)
    tables = [np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r") for chunk in chunks]
    sizes = [len(table) for table in tables]
    dedup = np.repeat([plan.rules(chunk.source).dedup is not None for chunk in chunks], sizes)
    state = np.full(sum(sizes), KEPT, dtype=np.uint8)
    exact = np.concatenate([table[:, 0] for table in tables])
    state[repeated(exact) & dedup] = REPEATED
    near = np.repeat([table.shape[1] > STATISTICS for table in tables], sizes)
    for band in range(max(table.shape[1] for table in tables) - STATISTICS):
        of_band = [table[:, STATISTICS + band] for table in tables if table.shape[1] > STATISTICS]
        like = np.zeros(len(state), dtype=bool)
        like[near] = repeated(np.concatenate(of_band))
        state[like & (state == KEPT)] = NEAR
    wanted = plan.corpus.heldout.pairs if len(group) == 2 else plan.corpus.heldout.mono
    sentences = np.concatenate([table[:, 1] for table in tables])
    hold_out(state, exact, sentences, min(wanted, int(sentences[state == KEPT].sum()) // HELD_SHARE))
    with put(folder / f"state/{number}.npy") as partial, partial.open("wb") as file:
        np.save(file, state)
    kept = int((state == KEPT).sum())
    if not kept:
        raise UserError(f"nothing is left of {'-'.join(group)}: the rules remove all of it")


def repeated(values: np.ndarray) -> np.ndarray:
    """Whether each value came before."""
    first = np.ones(len(values), dtype=bool)
    first[np.unique(values, return_index=True)[1]] = False
    return first


def hold_out(state: np.ndarray, exact: np.ndarray, sentences: np.ndarray, wanted: int) -> None:
    """Mark units of `wanted` sentences (of documents, of a few more), chosen by the hash of their text, and texts equal
    to theirs as repeated."""
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
    langs = plan_of(folder).langs
    return [chunk for chunk in chunks_of(folder) if tuple(sorted(langs[chunk.source])) == group]


@lru_cache(maxsize=4)
def places_in(folder: Path, group: tuple[str, ...]) -> dict[int, tuple[int, int]]:
    """Where each chunk's units are in the group's state."""
    found, at = {}, 0
    for chunk in chunks_in(folder, group):
        end = at + len(np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r"))
        found[chunk.number], at = (at, end), end
    return found


def state_of(folder: Path, chunk: Chunk) -> np.ndarray:
    plan = plan_of(folder)
    group = tuple(sorted(plan.langs[chunk.source]))
    state = np.load(folder / f"state/{plan.groups.index(group)}.npy", mmap_mode="r")
    return state[slice(*places_in(folder, group)[chunk.number])]


def kept_units(folder: Path, chunk: Chunk, state: int = KEPT) -> Iterator[Unit]:
    of_units = state_of(folder, chunk)
    return (unit for unit, found in zip(units(folder / f"clean/{chunk.number}.jsonl"), of_units, strict=True)
            if found == state)  # fmt: skip


def kept_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Language and text of every sentence, and side of a pair, that is kept."""
    for chunk in chunks_of(folder):
        langs = plan_of(folder).langs[chunk.source]
        for unit in kept_units(folder, chunk):
            yield from zip(langs if len(langs) == 2 else langs * len(unit.texts), unit.texts, strict=True)


def kept_sentences(folder: Path) -> Counter[str]:
    """How many each language has of them."""
    counts: Counter[str] = Counter()
    for chunk in chunks_of(folder):
        table = np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r")
        for lang in plan_of(folder).langs[chunk.source]:
            counts[lang] += int(table[state_of(folder, chunk) == KEPT, 1].sum())
    return counts


def sampled(texts: Iterable[tuple[str, str]], counts: Counter[str], alpha: float) -> Iterator[tuple[str, str]]:
    """Of each language's texts, evenly spread, a number in proportion to its share to the power of alpha."""
    shares = {lang: count**alpha for lang, count in counts.items()}
    wanted = {lang: min(counts[lang], int(SAMPLE * share / sum(shares.values()))) for lang, share in shares.items()}
    passed: Counter[str] = Counter()
    for lang, text in texts:
        before = passed[lang] * wanted[lang] // counts[lang]
        passed[lang] += 1
        if passed[lang] * wanted[lang] // counts[lang] > before:
            yield lang, text


def tokenizer(folder: Path, number: int) -> None:
    from argparse import Namespace

    from xscale.data.tokenizer import Tokenizer

    from .tokenizer import COVERAGE, Sample, try_to_train

    spec = plan_of(folder).corpus.tokenizer
    assert spec
    counts, sample = kept_sentences(folder), Sample()
    args = Namespace(type=spec.type, vocab_size=spec.vocab_size, lowercase=False, coverage=COVERAGE)
    trained = try_to_train(sample.of(sampled(kept_texts(folder), counts, spec.alpha)), args)
    with put(folder / "tokenizer") as partial:
        files.remove(folder / "tokenizer")
        trained.save_pretrained(partial)
    loaded, report = Tokenizer((folder / "tokenizer").absolute()), {}
    for lang, texts in sorted(sample.texts.items()):
        ids = loaded.encode(texts)
        of_words = sum(len(text_words) for text_words, _ in words.split(texts))
        characters = sum(map(len, texts))
        tokens = sum(map(len, ids)) - 2 * len(ids)
        report[lang] = {
            "sentences": counts[lang],
            "tokens_per_word": round(tokens / of_words, 3),
            "characters_per_token": round(characters / tokens, 3),
            "unknown": round(loaded.unknown(ids), 5),
        }
    write_json(folder / "tokenizer.json", {"tokens": len(trained), "languages": report})


def pairs_to_align(folder: Path, chunk: Chunk) -> Iterator[tuple[str, str]]:
    """The words of each pair, with spaces between, in the order of its group's languages."""
    langs = plan_of(folder).langs[chunk.source]
    flip = -1 if langs != tuple(sorted(langs)) else 1
    for unit in kept_units(folder, chunk):
        first, second = (" ".join(of_text) for of_text, _ in words.split(unit.texts[::flip]))
        yield first, second


def priors(folder: Path, number: int) -> None:
    """What the aligner learns of a group's pairs, from some of them that are spread over all."""
    from .align import align_words

    group = plan_of(folder).groups[number]
    if len(group) != 2 or not plan_of(folder).corpus.align:
        return
    chunks = chunks_in(folder, group)
    each = -(-PRIORS_PAIRS // len(chunks))
    pairs = (pair for chunk in chunks for pair in islice(pairs_to_align(folder, chunk), each))
    with put(folder / f"priors/{number}") as partial, put(folder / f"priors/{number}.links") as links:
        align_words(pairs, links, "intersection", priors_out=partial)


def align(folder: Path, number: int) -> None:
    """The links of a chunk's pairs that have none."""
    from .align import align_words

    plan, chunk = plan_of(folder), chunks_of(folder)[number]
    langs = plan.langs[chunk.source]
    if len(langs) != 2 or not plan.corpus.align or not any(u.links is None for u in kept_units(folder, chunk)):
        return
    known = folder / f"priors/{plan.groups.index(tuple(sorted(langs)))}"
    with put(folder / f"links/{number}") as partial:
        align_words(pairs_to_align(folder, chunk), partial, "grow-diag-final-and", priors=known)


def links_of(folder: Path, chunk: Chunk) -> Iterator[str | None]:
    """The aligner's links of the kept pairs of a chunk, first language - second."""
    path, langs = folder / f"links/{chunk.number}", plan_of(folder).langs[chunk.source]
    if not path.exists():
        while True:
            yield None
    for line in path.read_text(encoding="utf-8").splitlines():
        links = [link.split("-") for link in line.split()]
        ordered = links if langs == tuple(sorted(langs)) else [[j, i] for i, j in links]
        yield " ".join(f"{i}-{j}" for i, j in sorted((int(i), int(j)) for i, j in ordered))


def records_of(unit: Unit, langs: tuple[str, ...], name: str, links: str | None = None) -> list[Record]:
    """A pair's record, or those of a document's sentences."""
    key = f"{name}-{unit.number:09d}"
    if len(langs) == 2:
        return [Record(key, langs, (unit.texts[0], unit.texts[1]), unit.links if unit.links is not None else links)]
    doc = unit.number if len(unit.texts) > 1 else None
    return [Record(f"{key}.{i}", langs, (text,), doc=doc) for i, text in enumerate(unit.texts)]


def shards(folder: Path, number: int) -> None:
    from .write_shards import Line

    plan, chunk = plan_of(folder), chunks_of(folder)[number]
    langs, name, removed = plan.langs[chunk.source], plan.names[chunk.source], Removed()
    fits = length_filter(folder, plan.rules(chunk.source), removed)
    links = links_of(folder, chunk)
    lines, held, dropped_links = list[Line](), list[str](), 0
    for unit, state in zip(units(folder / f"clean/{number}.jsonl"), state_of(folder, chunk), strict=True):
        if state == HELD:
            held += [record.to_json() + "\n" for record in records_of(unit, langs, name)]
        elif state == KEPT:
            found, lost = next(links), 0
            if found is not None and unit.links is None:
                found, lost = carry_over(found, (unit.texts[0], unit.texts[1]), by_words=True)
            dropped_links += lost
            lines.append(Line(unit.number, "", [r for r in records_of(unit, langs, name, found) if fits(r)]))
        else:
            removed.add("dedup" if state == REPEATED else "dedup (near)", unit.texts[: len(langs)])
    counts = {"held": len(held), "documents": sum(bool(line.records) for line in lines), "dropped_links": dropped_links}
    counts["linked"] = sum(record.links is not None for line in lines for record in line.records)
    counts["records"] = write_tar(folder / f"tars/{number}.tar", lines)
    with put(folder / f"held/{number}") as partial:
        partial.write_text("".join(held), encoding="utf-8", newline="\n")
    write_json(folder / f"tars/{number}.json", counts | {"removed": removed.to_json()})


def length_filter(folder: Path, rules: Rules, removed: Removed) -> Callable[[Record], bool]:
    """Whether a record has the tokens that rules.length.tokens asks for."""
    bounds = rules.length.tokens
    if not bounds:
        return lambda record: True
    from .write_shards import TokenFilter

    keep = TokenFilter((folder / "tokenizer").absolute(), *bounds)

    def fits(record: Record) -> bool:
        if reason := keep.reason(record.texts):
            removed.add(f"length ({reason} in tokens)", list(record.texts))
        return not reason

    return fits


def write_tar(path: Path, lines: list[Any]) -> int:
    """A shard, its index and a survey of it, where there is a record at all. Returns the number of records."""
    from .index import scan
    from .write_shards import _write_shard

    with put(path) as partial:
        count = _write_shard(partial, lines)["records"]
        partial.touch()
    if count:
        with put(path.with_suffix(".scan")) as partial:
            partial.write_bytes(pickle.dumps(scan([path], None, {})))
    return count


def gather(folder: Path, number: int) -> None:
    """The shards of a source, or what a group has held out, under their names."""
    plan = plan_of(folder)
    if number < len(plan.langs):
        name, of = plan.names[number], [chunk for chunk in chunks_of(folder) if chunk.source == number]
        tars = [folder / f"tars/{chunk.number}.tar" for chunk in of]
        finish_source(folder / "shards" / name, name, tars, made_by(plan, number))
        return
    from .write_shards import Line

    group = plan.groups[number - len(plan.langs)]
    lines: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for chunk in chunks_in(folder, group):
        for record in map(json.loads, (folder / f"held/{chunk.number}").open(encoding="utf-8", newline="\n")):
            lines[tuple(record["langs"])].append(Line(0, "", [Record.from_dict(record)]))
    for langs, of_langs in lines.items():
        tars = []
        for start in range(0, len(of_langs), CHUNK_UNITS):
            tars.append(folder / f"tars/held-{'-'.join(langs)}-{start:09d}.tar")
            write_tar(tars[-1], of_langs[start : start + CHUNK_UNITS])
        finish_source(
            folder / "heldout" / "-".join(langs), "heldout", tars, {"tool": "data_tools.prepare", "heldout": True}
        )


def made_by(plan: Plan, number: int) -> dict[str, Any]:
    source = plan.source(number)
    return {
        "tool": "data_tools.prepare",
        "input": [Path(path).name for path in source.paths],
        "licence": source.licence,
        "rules": plan.rules(number).model_dump(exclude={"exclude"}, mode="json"),
    }


def finish_source(directory: Path, name: str, tars: list[Path], made: dict[str, Any]) -> None:
    """Move shards to a directory, numbered without gaps, and write their index. It can be done twice."""
    from . import index as indexing

    parts = list[indexing.Scanned]()
    for tar in (tar for tar in tars if tar.with_suffix(".scan").exists()):
        directory.mkdir(parents=True, exist_ok=True)
        ((shard, *rest),), survey = pickle.loads(tar.with_suffix(".scan").read_bytes())
        place = directory / f"{name}-{len(parts):06d}.tar"
        for old, new in ((tar, place), (idx_path(tar), idx_path(place))):
            if old.exists():
                old.replace(new)
        parts.append(([(shard | {"name": place.name}, *rest)], survey))
    if parts:
        indexing.write(directory, indexing.described(directory, parts, made, "unicode"))


STEPS: dict[str, tuple[Step, Callable[[Path], int]]] = {
    "cut": (cut, lambda folder: len(plan_of(folder).langs)),
    "clean": (clean, lambda folder: len(chunks_of(folder))),
    "select": (select, lambda folder: len(plan_of(folder).groups)),
    "tokenizer": (tokenizer, lambda folder: int(plan_of(folder).corpus.tokenizer is not None)),
    "priors": (priors, lambda folder: len(plan_of(folder).groups)),
    "align": (align, lambda folder: len(chunks_of(folder))),
    "shards": (shards, lambda folder: len(chunks_of(folder))),
    "gather": (gather, lambda folder: len(plan_of(folder).langs) + len(plan_of(folder).groups)),
}
"""The steps in order: what does a task, and how many there are."""
