"""The steps of `data_tools.prepare`. The tasks of a step do not depend on one another. A task reads what earlier steps
wrote, and writes whole files of its own. All files are in one folder:

    raw/SOURCE/CHUNK.jsonl      cut: the units of a source as its reader gives them, in chunks
    clean/CHUNK.{jsonl,npy}     clean: a chunk's units after the rules, and the hashes of their texts
    state/GROUP.npy             select: whether each unit of a language or a pair is kept, repeated or held out
    links/CHUNK                 align: word links for a chunk's kept or held-out pairs that came without links
    result/tokenizer/           tokenizer: trained on a sample of what is kept, or a copy of an existing one
    tars/CHUNK.*, held/CHUNK    shards: a shard and its index; the records that are held out
    result/{shards,heldout}/    gather: the shards of each source under their names, with index.json

Chunks do not depend on the number of workers, so every byte depends on the input alone, except eflomal's links. All
files are JSON, text or arrays of numbers: reading them runs nothing, whoever wrote them.
"""

import io
import json
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale import files
from xscale.data.link_projection import links_move, project_links
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import split
from xscale.errors import UserError
from xscale.record import Record, Shard, parse_json

from . import index as indexing
from .align import align
from .cleaning import Cleaner, CleanUnit, RemovalCounts, TokenFilter, load_exclusion, load_tokenizer, text_hashes
from .corpus import Corpus, SourceSpec, TokenizerSpec, language_group
from .engine import Step, replacing
from .readers import PARAGRAPHS, Unit, from_line, read_units, stem, to_line
from .scan import ScannedTar

CHUNK_UNITS, CHUNK_BYTES = 8192, 4 << 20
MEMBER_RECORDS = 256
"""The number of records in a .jsonl member of a tar."""
KEPT, REPEATED, NEAR, HELD_OUT = range(4)
"""The states of a unit: kept, removed as an exact duplicate, removed as a near duplicate, held out."""
SYMMETRIZE = "grow-diag-final-and"
"""How eflomal's links of both directions are joined by default."""
HELD_SHARE = 10
"""About one of this many kept sentences or pairs, at most, is held out."""
SAMPLE = 2_000_000
"""The maximum number of sentences and sides of pairs on which the tokenizer is trained."""
COUNTED = 2_000
"""The number of texts of each language, at least, by which the tokenizer's report counts tokens; at most twice it."""
STATISTICS = 2
"""The number of columns of clean/CHUNK.npy before the MinHash bands: hash of a unit's text, number of its sentences."""


class Plan(NamedTuple):
    corpus: Corpus
    tool: str
    """The command, which index.json names."""
    shard_lines: int | None
    """The number of input lines of a shard; None: shards of CHUNK_UNITS units or CHUNK_BYTES."""
    symmetrize: str


class Chunk(NamedTuple):
    number: int
    """The chunk's number among the chunks of all sources."""
    source: int
    of_source: int
    """The chunk's number among the chunks of its source."""


@lru_cache(maxsize=1)
def read_plan(folder: Path) -> Plan:
    fields = read_json(folder / "plan.json")
    corpus = Corpus.model_validate(fields.pop("corpus"), strict=False)
    return Plan(corpus, **fields)


def write_plan(folder: Path, plan: Plan) -> None:
    corpus = plan.corpus.model_dump(mode="json", exclude_unset=True)
    write_json(folder / "plan.json", plan._asdict() | {"corpus": corpus})
    for cache in (read_plan, all_chunks, group_slices, load_exclusion):
        cache.cache_clear()


@lru_cache(maxsize=1)
def all_chunks(folder: Path) -> list[Chunk]:
    """Return the chunks of all sources. They are known after the step `cut`."""
    chunks = list[Chunk]()
    for source in range(len(read_plan(folder).corpus.sources)):
        for of_source in range(read_json(folder / f"raw/{source}.json")["chunks"]):
            chunks.append(Chunk(len(chunks), source, of_source))
    return chunks


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_lines(path, [json.dumps(value, ensure_ascii=False)])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)


def write_array(path: Path, array: np.ndarray) -> None:
    with replacing(path) as partial, partial.open("wb") as file:
        np.save(file, array)


def read_units_of(path: Path) -> Iterator[Unit]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(from_line, file)


def cut_source(folder: Path, number: int) -> None:
    """Write the pairs or documents of source `number` to chunk files of limited size."""
    plan = read_plan(folder)
    source, shard_lines = plan.corpus.sources[number], plan.shard_lines
    chunks, size, lines, shard = 0, 0, list[str](), 0
    for unit in read_units(source, min(PARAGRAPHS, shard_lines or PARAGRAPHS)):
        if shard_lines:
            is_full = (unit.number - 1) // shard_lines > shard
            shard = (unit.number - 1) // shard_lines
        else:
            is_full = len(lines) == CHUNK_UNITS or size >= CHUNK_BYTES
        if is_full and lines:
            write_lines(folder / f"raw/{number}/{chunks:06d}.jsonl", lines)
            chunks += 1
            size, lines = 0, []
        lines.append(to_line(unit))
        size += len(lines[-1])
    write_lines(folder / f"raw/{number}/{chunks:06d}.jsonl", lines)
    write_json(folder / f"raw/{number}.json", {"chunks": chunks + 1})


def clean_chunk(folder: Path, number: int) -> None:
    """Write those documents or pairs of chunk `number` that pass the rules, and hashes to find equal texts by."""
    chunk, corpus = all_chunks(folder)[number], read_plan(folder).corpus
    source = corpus.sources[chunk.source]
    rules = corpus.rules_of(source)
    counts = Counter[str]()
    tokenizer = load_tokenizer(corpus.tokenizer) if isinstance(corpus.tokenizer, str) else None
    cleaner = Cleaner(source, rules, tokenizer)
    cleaned = list[CleanUnit]()
    for unit in read_units_of(folder / f"raw/{chunk.source}/{chunk.of_source:06d}.jsonl"):
        counts["read"] += 1
        clean = cleaner.clean(unit)
        if clean:
            cleaned.append(clean)
    kept = list[Unit]()
    moved = 0
    for clean in cleaner.without_excluded(cleaned):
        links = None
        if clean.unit.links is not None:
            found = project_unit_links(clean, source)
            links = found.links
            counts["dropped_links"] += found.dropped
            counts["moved_links"] += found.is_moved
            moved = moved or found.is_moved * clean.unit.number
        kept.append(Unit(clean.unit.number, clean.texts, links, keys=clean.keys))
    flip = -1 if source.pairs and source.langs != language_group(source) else 1
    hashes = text_hashes([unit.texts[::flip] for unit in kept], rules.dedup == "near")
    sizes = np.array([1 if source.pairs else len(unit.texts) for unit in kept], dtype="<u8").reshape(-1, 1)
    write_lines(folder / f"clean/{number}.jsonl", map(to_line, kept))
    write_array(folder / f"clean/{number}.npy", np.hstack([hashes[:, :1], sizes, hashes[:, 1:]]))
    counts["changed"] = cleaner.changed
    fields = {"counts": counts, "removed": cleaner.removed.to_json(), "first_moved": moved}
    write_json(folder / f"clean/{number}.json", fields)


class ProjectedLinks(NamedTuple):
    links: str
    """The links between the words of the clean texts."""
    dropped: int
    """The number of links that were dropped, such as between a word and a symbol."""
    is_moved: bool
    """True if the links would be others if words were also divided at other white space than spaces and tabs."""


def project_unit_links(clean: CleanUnit, source: SourceSpec) -> ProjectedLinks:
    """Return a pair's links for the words of its clean texts. Raises UserError."""
    unit = clean.unit
    assert unit.links is not None
    texts, linked = tuple(clean.texts), tuple(unit.linked or unit.texts)
    try:
        links, dropped = project_links(unit.links, texts, linked)
    except ValueError as error:
        raise UserError(
            f"{source.paths[0] if source.format != 'text' else source.paths[2]}: line {unit.number}: {error}; links "
            f"are 0-based `source-target` numbers of the words between spaces and tabs of the texts, or of the texts "
            f"that the aligner read: --links_src F --links_tgt F"
        ) from None
    return ProjectedLinks(links, dropped, links_move(unit.links, linked))


def select_units(folder: Path, number: int) -> None:
    """Write the state of each unit of group `number`. With `dedup`, only the first of equal units is kept."""
    corpus = read_plan(folder).corpus
    group = corpus.groups[number]
    chunks = group_chunks(folder, group)
    tables = [np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r") for chunk in chunks]
    sizes = [len(table) for table in tables]
    dedup = [corpus.rules_of(corpus.sources[chunk.source]).dedup for chunk in chunks]
    exact = np.concatenate([table[:, 0] for table in tables])
    state = np.full(sum(sizes), KEPT, dtype=np.uint8)
    state[occurs_earlier(exact) & np.repeat([rule is not None for rule in dedup], sizes)] = REPEATED
    near = np.repeat([rule == "near" for rule in dedup], sizes)
    for band in range(STATISTICS, max(table.shape[1] for table in tables)):
        similar = np.zeros(len(state), dtype=bool)
        similar[near] = occurs_earlier(np.concatenate([table[:, band] for table in tables if table.shape[1] > band]))
        state[similar & (state == KEPT)] = NEAR
    if not (state == KEPT).any():
        removed = Counter[str]()
        for chunk in chunks:
            removed.update(read_json(folder / f"clean/{chunk.number}.json")["removed"]["counts"])
        reasons = ", ".join(f"{count:,} {rule}" for rule, count in removed.items()) or "nothing"
        names = ", ".join(Path(path).name for chunk in chunks for path in corpus.sources[chunk.source].paths)
        raise UserError(
            f"nothing is left of {'-'.join(group)} ({names}): the rules removed {reasons}; relax the rules, or correct "
            f"the sources"
        )
    wanted = corpus.heldout.pairs if len(group) == 2 else corpus.heldout.mono
    sentences = np.concatenate([table[:, 1] for table in tables])
    hold_out(state, exact, sentences, min(wanted, int(sentences[state == KEPT].sum()) // HELD_SHARE))
    write_array(folder / f"state/{number}.npy", state)


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
    sources = read_plan(folder).corpus.sources
    return [chunk for chunk in all_chunks(folder) if language_group(sources[chunk.source]) == group]


@lru_cache(maxsize=4)
def group_slices(folder: Path, group: tuple[str, ...]) -> dict[int, slice]:
    """Return {number of a chunk: the slice of the group's state array that belongs to the chunk's units}."""
    slices, start = dict[int, slice](), 0
    for chunk in group_chunks(folder, group):
        end = start + len(np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r"))
        slices[chunk.number] = slice(start, end)
        start = end
    return slices


def unit_states(folder: Path, chunk: Chunk) -> np.ndarray:
    corpus = read_plan(folder).corpus
    group = language_group(corpus.sources[chunk.source])
    state = np.load(folder / f"state/{corpus.groups.index(group)}.npy", mmap_mode="r")
    return state[group_slices(folder, group)[chunk.number]]


def units_and_states(folder: Path, chunk: Chunk) -> Iterator[tuple[Unit, int]]:
    units = read_units_of(folder / f"clean/{chunk.number}.jsonl")
    yield from zip(units, unit_states(folder, chunk).tolist(), strict=True)


def unlinked_pairs(folder: Path, chunks: Iterable[Chunk]) -> Iterator[tuple[str, str]]:
    """Yield the texts of the pairs that eflomal shall align: kept or held out, and without links."""
    for chunk in chunks:
        for unit, state in units_and_states(folder, chunk):
            if is_unlinked(unit, state):
                yield unit.texts[0], unit.texts[1]


def is_unlinked(unit: Unit, state: int) -> bool:
    return unit.links is None and state in (KEPT, HELD_OUT)


def make_links(folder: Path, number: int) -> None:
    """Write the links of all pairs of direction `number`, which one run of the aligner finds."""
    plan, made = read_plan(folder), folder / f"links/{number}.all"
    langs = plan.corpus.directions[number]
    chunks = [chunk for chunk in all_chunks(folder) if plan.corpus.sources[chunk.source].langs == langs]
    if next(unlinked_pairs(folder, chunks), None) is None:
        return
    made.parent.mkdir(exist_ok=True)
    align(unlinked_pairs(folder, chunks), made, plan.symmetrize)
    with made.open(encoding="utf-8") as lines:
        for chunk in chunks:
            count = sum(1 for _ in unlinked_pairs(folder, [chunk]))
            write_lines(folder / f"links/{chunk.number}", [next(lines).rstrip("\n") for _ in range(count)])


def linked_units(folder: Path, chunk: Chunk) -> Iterator[tuple[Unit, int]]:
    """Yield (unit, state) of a chunk. Its pairs have the links that `make_links` wrote."""
    path = folder / f"links/{chunk.number}"
    links = iter(path.read_text(encoding="utf-8").split("\n")) if path.exists() else None
    for unit, state in units_and_states(folder, chunk):
        if links and is_unlinked(unit, state):
            projected, _ = project_links(next(links), tuple(unit.texts), by_words=True)
            unit = unit._replace(links=projected)
        yield unit, state


def kept_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of every kept sentence and of both sides of every kept pair."""
    for chunk in all_chunks(folder):
        langs = read_plan(folder).corpus.sources[chunk.source].langs
        for unit, state in units_and_states(folder, chunk):
            if state == KEPT:
                yield from zip(langs if len(langs) == 2 else langs * len(unit.texts), unit.texts, strict=True)


def kept_counts(folder: Path) -> Counter[str]:
    """Return the number of kept texts in each language."""
    counts = Counter[str]()
    for chunk in all_chunks(folder):
        table = np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r")
        for lang in read_plan(folder).corpus.sources[chunk.source].langs:
            counts[lang] += int(table[unit_states(folder, chunk) == KEPT, 1].sum())
    return counts


def sample_texts(texts: Iterable[tuple[str, str]], counts: Counter[str], alpha: float) -> Iterator[tuple[str, str]]:
    """Yield an evenly spread sample of (language, text), up to SAMPLE texts. A language's share of the sample is
    proportional to its count ** alpha."""
    shares = {lang: count**alpha for lang, count in counts.items()}
    total = sum(shares.values())
    wanted = {lang: min(counts[lang], int(SAMPLE * share / total)) for lang, share in shares.items()}
    passed = Counter[str]()
    for lang, text in texts:
        before = passed[lang] * wanted[lang] // counts[lang]
        passed[lang] += 1
        if passed[lang] * wanted[lang] // counts[lang] > before:
            yield lang, text


def make_tokenizer(folder: Path, number: int) -> None:
    """Train the tokenizer, or copy an existing one, and write statistics of the tokens of each language."""
    spec, place = read_plan(folder).corpus.tokenizer, folder / "result/tokenizer"
    counts = kept_counts(folder)
    with replacing(place) as partial:
        files.remove(place)
        if isinstance(spec, TokenizerSpec):
            from .tokenizer import train

            train(
                sample_texts(kept_texts(folder), counts, spec.alpha), spec.type, spec.vocab_size, False
            ).save_pretrained(partial)
        else:
            load_tokenizer(str(spec)).hf.save_pretrained(partial)
    loaded = Tokenizer(place.absolute()) if isinstance(spec, TokenizerSpec) else load_tokenizer(str(spec))
    write_json(folder / "tokenizer.json", token_report(loaded, kept_texts(folder), counts))


def token_report(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]], counts: Counter[str]) -> dict[str, Any]:
    """Return the number of tokens of a tokenizer, and statistics of those of each language in an even sample."""
    sample, passed = defaultdict[str, list[str]](list), Counter[str]()
    for lang, text in texts:
        if passed[lang] % max(counts[lang] // COUNTED, 1) == 0:
            sample[lang].append(text)
        passed[lang] += 1
    report = {}
    for lang, of_language in sorted(sample.items()):
        ids = tokenizer.encode(of_language)
        tokens = max(sum(map(len, ids)), 1)
        words = sum(len(words) for words, _ in split(of_language))
        report[lang] = {
            "sentences": counts[lang],
            "tokens_per_word": round(tokens / max(words, 1), 3),
            "characters_per_token": round(sum(map(len, of_language)) / tokens, 3),
            "unknown": round(tokenizer.unknown_share(ids), 5),
        }
    return {"tokens": len(tokenizer.hf), "languages": report}


def unit_records(unit: Unit, source: SourceSpec, name: str) -> list[Record]:
    """Return the one record of a pair, or the records of a document's sentences."""
    langs = source.langs
    if source.line_keys and source.pairs:
        name = f"{stem(Path(source.paths[0]))}.{'-'.join(langs)}"
    key = f"{name}-{unit.number:09d}"
    if source.pairs:
        return [Record(key, langs, (unit.texts[0], unit.texts[1]), unit.links)]
    keys = unit.keys or [f"{key}.{number}" for number in range(len(unit.texts))]
    doc = unit.number if len(unit.texts) > 1 else None
    return [Record(key, langs, (text,), doc=doc) for key, text in zip(keys, unit.texts, strict=True)]


def write_chunk_shard(folder: Path, number: int) -> None:
    """Write the shard of chunk `number`, and the chunk's records that are held out."""
    corpus, chunk = read_plan(folder).corpus, all_chunks(folder)[number]
    source, name, removed = corpus.sources[chunk.source], corpus.names[chunk.source], RemovalCounts()
    bounds = corpus.rules_of(source).length.tokens
    tokens = None
    if bounds and isinstance(corpus.tokenizer, TokenizerSpec):  # which did not exist when the texts were cleaned
        tokens = TokenFilter(load_tokenizer(str((folder / "result/tokenizer").absolute())), bounds)
    kept, held, documents = list[Record](), list[Record](), 0
    for unit, state in linked_units(folder, chunk):
        if state in (REPEATED, NEAR):
            removed.add("dedup" if state == REPEATED else "dedup (near)", unit.texts[: len(source.langs)])
            continue
        records = list[Record]()
        for record in unit_records(unit, source, name):
            reason = tokens.problem(record.texts) if tokens else ""
            if reason:
                removed.add(reason, list(record.texts))
            else:
                records.append(record)
        if state == HELD_OUT:
            held += records
        else:
            kept += records
            documents += bool(records)
    write_tar(folder / f"tars/{number}.tar", kept)
    write_lines(folder / f"held/{number}", [record.to_json() for record in held])
    linked = sum(record.links is not None for record in kept)
    counts = {"held": len(held), "documents": documents, "linked": linked, "records": len(kept)}
    write_json(folder / f"tars/{number}.json", {"counts": counts, "removed": removed.to_json()})


def write_shard(path: Path, records: Iterable[Record]) -> None:
    """Write records to a tar in WebDataset's format."""
    lines = (record.to_json() + "\n" for record in records)
    members = 0
    with tarfile.open(path, "w") as tar:
        while member := list(islice(lines, MEMBER_RECORDS)):
            data = "".join(member).encode()
            header = tarfile.TarInfo(f"{members:08d}.jsonl")
            header.size, header.mode = len(data), 0o444
            tar.addfile(header, io.BytesIO(data))
            members += 1


def write_tar(path: Path, records: list[Record]) -> None:
    """Write a shard, its .idx file and what index.json says of it, unless there are no records."""
    if records:
        with replacing(path) as partial:
            write_shard(partial, records)
        write_json(path.with_suffix(".scan"), asdict(indexing.index_tar(path)))


def source_counts(folder: Path, number: int) -> dict[str, Any]:
    """Return the counts of source `number` over its chunks, with what each rule removed: {"counts", "removed",
    "examples", "first_moved"}."""
    counts, removed, moved = Counter[str](), RemovalCounts(), 0
    for chunk in all_chunks(folder):
        if chunk.source == number:
            for step in ("clean", "tars"):
                fields = read_json(folder / f"{step}/{chunk.number}.json")
                removed.join(fields["removed"])
                counts.update(fields["counts"])
                moved = moved or fields.get("first_moved", 0)
    return {"counts": counts, "removed": removed.counts, "examples": removed.examples, "first_moved": moved}


def gather_shards(folder: Path, number: int) -> None:
    """Move the shards of source `number`, or of a group's held-out records, to result/, and write their index."""
    plan = read_plan(folder)
    corpus = plan.corpus
    if number < len(corpus.sources):
        source, name = corpus.sources[number], corpus.names[number]
        tars = [folder / f"tars/{chunk.number}.tar" for chunk in all_chunks(folder) if chunk.source == number]
        rules = corpus.rules_of(source).model_dump(exclude={"exclude"}, mode="json")
        summed = source_counts(folder, number)
        counts = {"lines": summed["counts"]["read"], "records": summed["counts"]["records"], **summed["removed"]}
        if summed["counts"]["dropped_links"]:
            counts["dropped_links"] = summed["counts"]["dropped_links"]
        made = {"tool": plan.tool, "input": [Path(path).name for path in source.paths], "licence": source.licence,
                "rules": rules, "counts": counts}  # fmt: skip
        move_shards(tars, folder / "result/shards" / name, name, made)
        return
    held = defaultdict[str, list[Record]](list)
    for chunk in group_chunks(folder, corpus.groups[number - len(corpus.sources)]):
        for line in (folder / f"held/{chunk.number}").read_bytes().splitlines():
            record = Record.from_dict(parse_json(line))
            held["-".join(record.langs)].append(record)
    for langs, records in held.items():
        tars = list[Path]()
        for start in range(0, len(records), CHUNK_UNITS):
            tars.append(folder / f"tars/{langs}-{start}.tar")
            write_tar(tars[-1], records[start : start + CHUNK_UNITS])
        move_shards(tars, folder / "result/heldout" / langs, "heldout", {"tool": plan.tool, "heldout": True})


def move_shards(tars: list[Path], directory: Path, name: str, made: dict[str, Any]) -> None:
    """Move shards to a directory, numbered without gaps, and write their index. A killed move can be repeated."""
    scans = list[ScannedTar]()
    for tar in tars:
        if not tar.with_suffix(".scan").exists():
            continue
        directory.mkdir(parents=True, exist_ok=True)
        scan = ScannedTar(**read_json(tar.with_suffix(".scan")))
        place = directory / f"{name}-{len(scans):06d}.tar"
        for suffix in (".tar", ".idx"):
            with suppress(FileNotFoundError):  # it was moved before
                tar.with_suffix(suffix).replace(place.with_suffix(suffix))
        scans.append(replace(scan, shard=Shard(*scan.shard)._replace(name=place.name)))
    if scans:
        indexing.write_index(directory, indexing.index_content(directory, scans, made))


STEPS: dict[str, tuple[Step, Callable[[Path], int]]] = {
    "cut": (cut_source, lambda folder: len(read_plan(folder).corpus.sources)),
    "clean": (clean_chunk, lambda folder: len(all_chunks(folder))),
    "select": (select_units, lambda folder: len(read_plan(folder).corpus.groups)),
    "align": (make_links, lambda folder: len(read_plan(folder).corpus.directions)),
    "tokenizer": (make_tokenizer, lambda folder: int(read_plan(folder).corpus.tokenizer is not None)),
    "shards": (write_chunk_shard, lambda folder: len(all_chunks(folder))),
    "gather": (
        gather_shards,
        lambda folder: len(read_plan(folder).corpus.sources) + len(read_plan(folder).corpus.groups),
    ),
}
"""The steps in order, each with the function that does task n, and the function that counts the tasks."""
