"""The steps of `xscale data prepare`. The tasks of a step are independent. A task reads the files of earlier steps, and
writes whole files of its own. All files are in one work folder:

    raw/SOURCE/PART.jsonl       cut: the units of a source as its reader yields them, in chunks
    clean/CHUNK.{jsonl,npy}     clean: a chunk's units after the rules, and the hashes of their texts
    state/CHUNK.npy             select: whether each unit is kept, repeated or held out
    clean/CHUNK.jsonl           align: written again, with word links for the selected pairs that had none
    result/tokenizer/           tokenizer: trained on a sample of the kept text, or a copy of an existing one
    tars/CHUNK.*, held/CHUNK    shards: a shard, and the records that are held out
    result/{shards,heldout}/    gather, heldout: the shards under their names, with index.json
    result/lexicon/             lexicons: the dictionaries, with the commonest spelling of each word

Chunks do not depend on the number of workers, so every byte depends on the input alone, except eflomal's links. All
files are JSON, text or arrays of numbers, so reading them runs no code of others.
"""

import io
import json
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale import files
from xscale.data.lexicon import (
    distinct_token_ids_in_sample,
    languages_in_file_name,
    load_lexicon,
    read_entries,
    warn_if_columns_are_swapped,
)
from xscale.data.link_projection import FEWEST_TO_JUDGE, FIRST_WORD, project_links_and_count_dropped
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.record import Record, parse_json

from . import index
from .cleaning import (
    BANDS,
    Cleaner,
    RemovalCounts,
    cached_tokenizer,
    hash_text_lists,
    minhash_bands_of_each_text,
    read_folded_excluded_lines,
    violated_token_count_rule,
)
from .corpus import Corpus, SourceSpec, TokenizerSpec
from .engine import replacement_file
from .lexicon import truecase_entries, write_entries
from .readers import Unit, read_units, unit_from_line, unit_to_line
from .word_aligner import write_word_alignments

CHUNK_UNITS = 8192
CHUNK_BYTES = 4 << 20
"""A chunk ends after CHUNK_UNITS units or CHUNK_BYTES bytes. It becomes a shard."""
MEMBER_RECORDS = 256
"""The number of records in a .jsonl member of a tar."""
KEPT, REPEATED, NEAR, HELD_OUT = range(4)
"""The states of a unit: kept, removed as an exact duplicate, removed as a near duplicate, held out."""
REMOVED = {REPEATED: "dedup", NEAR: "dedup (near)"}
"""{state of a removed unit: the rule that removed it}."""
HELD_SHARE = 10
"""At most one in HELD_SHARE of the kept sentences or pairs is held out."""
SAMPLE = 2_000_000
"""The maximum number of sentences and sides of pairs on which the tokenizer is trained."""
EXACT, SENTENCES, FIRST_SIDE, SECOND_SIDE, FIRST_BAND = range(5)
"""The columns of clean/CHUNK.npy: the hash of a unit's text, the number of its sentences, the hashes of a pair's two
sides (for a document, twice the hash of its text), the MinHash bands."""


class CorpusPlan(NamedTuple):
    corpus: Corpus
    tool: str = "data_tools.prepare"
    """The command's name for index.json."""
    shard_units: int | None = None
    """The maximum number of pairs or documents of a shard; None: CHUNK_UNITS."""
    shard_name: str | None = None
    """The beginning of the shards' names; None: the source's name."""


class Chunk(NamedTuple):
    number: int
    """The chunk's number among the chunks of all sources."""
    source: int
    part: int
    """The chunk's number among the chunks of its source."""


class PrepareStep(NamedTuple):
    function: Callable[[Path, int], None]
    """A function (work folder, n) that does task n."""
    count: Callable[[Path], int]
    """A function (work folder) that returns the number of tasks. It is called after the previous step."""


@lru_cache(maxsize=1)
def read_plan(folder: Path) -> CorpusPlan:
    fields = read_json(folder / "plan.json")
    corpus = Corpus.model_validate(fields.pop("corpus"), strict=False)
    return CorpusPlan(corpus, **fields)


def write_plan_and_clear_caches(folder: Path, plan: CorpusPlan) -> None:
    """Write the plan, and forget what this process has read of an earlier plan."""
    corpus = plan.corpus.model_dump(mode="json", exclude_unset=True)
    write_json(folder / "plan.json", plan._asdict() | {"corpus": corpus})
    for cache in (read_plan, all_chunks, read_folded_excluded_lines):
        cache.cache_clear()


@lru_cache(maxsize=1)
def all_chunks(folder: Path) -> list[Chunk]:
    """Return the chunks of all sources. They are known after the step `cut`."""
    chunks = list[Chunk]()
    for source in range(len(read_plan(folder).corpus.sources)):
        for part in range(read_json(folder / f"raw/{source}.json")["chunks"]):
            chunks.append(Chunk(len(chunks), source, part))
    return chunks


def source_chunks(folder: Path, source_number: int) -> list[Chunk]:
    return [chunk for chunk in all_chunks(folder) if chunk.source == source_number]


def group_chunks(folder: Path, language_group: tuple[str, ...]) -> list[Chunk]:
    sources = read_plan(folder).corpus.sources
    return [chunk for chunk in all_chunks(folder) if sources[chunk.source].sorted_langs == language_group]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_lines(path, [json.dumps(value)])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace a text file by these lines. The file is not compressed, whatever its suffix is."""
    with replacement_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(line + "\n")


def write_array(path: Path, array: np.ndarray) -> None:
    with replacement_file(path) as partial, partial.open("wb") as file:
        np.save(file, array)


def read_unit_file(path: Path) -> Iterator[Unit]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(unit_from_line, file)


def cut_source_into_chunks(folder: Path, source_number: int) -> None:
    """Write the pairs or documents of a source to chunk files of limited size."""
    plan = read_plan(folder)
    source = plan.corpus.sources[source_number]
    most = plan.shard_units or CHUNK_UNITS
    chunks = 0
    size = 0
    lines = list[str]()
    linked = 0
    has_first_word = False
    for unit in read_units(source):
        if len(lines) == most or size >= CHUNK_BYTES:
            write_lines(folder / f"raw/{source_number}/{chunks:06d}.jsonl", lines)
            chunks += 1
            size = 0
            lines = []
        lines.append(unit_to_line(unit))
        size += len(lines[-1])
        if unit.links:
            linked += 1
            has_first_word = has_first_word or FIRST_WORD.search(unit.links) is not None
    if linked >= FEWEST_TO_JUDGE and not has_first_word:
        raise UserError(
            f"{source.links_or_first_path}: the links of {linked:,} pairs never have the number 0, so the file "
            "probably counts words from 1. xscale counts words from 0: subtract 1 from both numbers of each link"
        )
    write_lines(folder / f"raw/{source_number}/{chunks:06d}.jsonl", lines)
    write_json(folder / f"raw/{source_number}.json", {"chunks": chunks + 1})


def clean_chunk(folder: Path, chunk_number: int) -> None:
    """Write the documents or pairs of a chunk that pass the rules, and the hashes by which equal texts are found."""
    chunk = all_chunks(folder)[chunk_number]
    corpus = read_plan(folder).corpus
    source = corpus.sources[chunk.source]
    rules = corpus.rules_for(source)
    tokenizer = cached_tokenizer(corpus.tokenizer) if isinstance(corpus.tokenizer, str) else None
    cleaner = Cleaner(source, rules, tokenizer)
    counts = Counter[str]()
    kept = list[Unit]()
    for raw in read_unit_file(folder / f"raw/{chunk.source}/{chunk.part:06d}.jsonl"):
        counts["read"] += 1
        unit = cleaner.clean_and_split(raw)
        if unit is None:
            continue
        links = None
        if unit.links is not None:
            links, dropped = renumber_links_to_clean_texts(unit, source)
            counts["dropped_links"] += dropped
        kept.append(Unit(unit.number, unit.texts, links))
    write_lines(folder / f"clean/{chunk_number}.jsonl", map(unit_to_line, kept))
    write_array(folder / f"clean/{chunk_number}.npy", hashes_and_sentence_counts(kept, source, rules.dedup == "near"))
    write_json(folder / f"clean/{chunk_number}.json", {"counts": counts, "removed": cleaner.removed.to_json()})


def renumber_links_to_clean_texts(unit: Unit, source: SourceSpec) -> tuple[str, int]:
    """Return a pair's links, renumbered to the words of its clean texts, and how many links were dropped, such as
    those between a word and a symbol. Raises UserError."""
    assert unit.links is not None and unit.linked
    try:
        return project_links_and_count_dropped(unit.links, tuple(unit.texts), tuple(unit.linked))
    except ValueError as error:
        form = (
            f"{error}. A link `i-j` joins word i of the first text and word j of the second, counted from 0; spaces "
            "and tabs divide words"
        )
        if unit.record:
            raise UserError(f"{unit.record}: {form}. Correct the links of the record") from None
        raise UserError(
            f"{source.links_or_first_path}: line {unit.number}: {form}. Correct the line. If the aligner read "
            "another version of the text, such as tokenised files, pass that version by --links_src FILE --links_tgt "
            "FILE (in corpus.yaml, by `linked:`)"
        ) from None


def hashes_and_sentence_counts(units: list[Unit], source: SourceSpec, with_bands: bool) -> np.ndarray:
    """Return a row of uint64 for each unit, whose columns EXACT, SENTENCES and FIRST_BAND name. The two sides of a pair
    are hashed in the order of their group."""
    in_order = [unit.texts for unit in units]
    if source.pairs and source.langs != source.sorted_langs:
        in_order = [texts[::-1] for texts in in_order]
    exact = hash_text_lists(in_order)
    if source.pairs:
        sentences = np.ones(len(units), dtype="<u8")
        first = hash_text_lists([texts[:1] for texts in in_order])
        second = hash_text_lists([texts[1:] for texts in in_order])
    else:
        sentences = np.array(list(map(len, in_order)), dtype="<u8")
        first = second = exact
    columns = [np.stack([exact, sentences, first, second], axis=1)]
    if with_bands:
        columns.append(minhash_bands_of_each_text(list(map("\n".join, in_order))))
    return np.hstack(columns)


def write_selection_states(folder: Path, language_group_number: int) -> None:
    """Write the state of each unit of a group. With `dedup`, only the first of equal units is kept."""
    corpus = read_plan(folder).corpus
    group = corpus.language_groups[language_group_number]
    chunks = group_chunks(folder, group)
    tables = list[np.ndarray]()
    near_tables = list[np.ndarray]()
    has_dedup = list[np.ndarray]()
    has_near = list[np.ndarray]()
    for chunk in chunks:
        table = np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r")
        dedup = corpus.rules_for(corpus.sources[chunk.source]).dedup
        tables.append(table[:, :FIRST_BAND])
        has_dedup.append(np.full(len(table), dedup is not None))
        has_near.append(np.full(len(table), dedup == "near"))
        if dedup == "near":
            near_tables.append(table)
    units = np.concatenate(tables)
    state = np.full(len(units), KEPT, dtype=np.uint8)
    state[occurs_earlier(units[:, EXACT]) & np.concatenate(has_dedup)] = REPEATED
    for band in range(FIRST_BAND, FIRST_BAND + BANDS) if near_tables else []:
        similar = np.concatenate(has_near)
        similar[similar] = occurs_earlier(np.concatenate([table[:, band] for table in near_tables]))
        state[similar & (state == KEPT)] = NEAR
    if not (state == KEPT).any():
        names = [
            name
            for name, source in zip(corpus.source_names, corpus.sources, strict=True)
            if source.sorted_langs == group
        ]
        raise UserError(
            f"the rules remove all text in {'-'.join(group)} (sources: {', '.join(names)}). Change the rules, or "
            "correct the sources"
        )
    most = int(units[state == KEPT, SENTENCES].sum()) // HELD_SHARE
    mark_held_out_units(state, units, min(corpus.heldout.wanted_pair_or_sentence_count(group), most))
    ends = np.cumsum(list(map(len, tables)))
    for chunk, chunk_state in zip(chunks, np.split(state, ends[:-1]), strict=True):
        write_array(folder / f"state/{chunk.number}.npy", chunk_state)


def occurs_earlier(values: np.ndarray) -> np.ndarray:
    """Return bool [len(values)]: True for each value that also occurs earlier."""
    is_repeated = np.ones(len(values), dtype=bool)
    is_repeated[np.unique(values, return_index=True)[1]] = False
    return is_repeated


def occurs_once(values: np.ndarray) -> np.ndarray:
    """Return bool [len(values)]: True for each value that occurs nowhere else."""
    _, number, counts = np.unique(values, return_inverse=True, return_counts=True)
    return counts[number] == 1


def mark_held_out_units(state: np.ndarray, units: np.ndarray, sentence_limit: int) -> None:
    """Set the state of some kept units of a group to HELD_OUT, in the order of their texts' hashes. They have at most
    `sentence_limit` sentences together, and a unit with too many is passed over. No side of a pair that is held out
    occurs in another kept pair of the group. units: the result of hashes_and_sentence_counts, with
    the columns before FIRST_BAND."""
    if not sentence_limit:
        return
    kept = np.flatnonzero(state == KEPT)
    candidates = kept[occurs_once(units[kept, FIRST_SIDE]) & occurs_once(units[kept, SECOND_SIDE])]
    for candidate in candidates[np.argsort(units[candidates, EXACT])]:  # without a list of up to 10^8 numbers
        sentences = int(units[candidate, SENTENCES])
        if sentences <= sentence_limit:
            state[candidate] = HELD_OUT
            sentence_limit -= sentences
        if not sentence_limit:
            break


def read_selection_states(folder: Path, chunk: Chunk) -> np.ndarray:
    """Return KEPT, REPEATED, NEAR or HELD_OUT for each unit of a chunk."""
    return np.load(folder / f"state/{chunk.number}.npy")


def read_units_and_states(folder: Path, chunk: Chunk) -> Iterator[tuple[Unit, int]]:
    """Yield each clean unit of a chunk with KEPT, REPEATED, NEAR or HELD_OUT."""
    units = read_unit_file(folder / f"clean/{chunk.number}.jsonl")
    yield from zip(units, read_selection_states(folder, chunk).tolist(), strict=True)


def word_align_and_rewrite_chunks(folder: Path, language_pair_number: int) -> None:
    """Give word links to all pairs of two languages that have none, by one run of the aligner."""
    corpus = read_plan(folder).corpus
    langs = corpus.language_pairs_to_word_align[language_pair_number]
    chunks = [chunk for chunk in all_chunks(folder) if corpus.sources[chunk.source].langs == langs]
    if next(unlinked_pairs(folder, chunks), None) is None:
        return
    path = folder / f"links/{language_pair_number}"
    path.parent.mkdir(exist_ok=True)
    write_word_alignments(unlinked_pairs(folder, chunks), path)
    with path.open(encoding="utf-8") as lines:
        for chunk in chunks:
            units = list[Unit]()
            for unit, state in read_units_and_states(folder, chunk):
                if is_used_and_unlinked(unit, state):
                    links, _ = project_links_and_count_dropped(
                        next(lines), tuple(unit.texts), links_number_xscale_words=True
                    )
                    unit = unit._replace(links=links)
                units.append(unit)
            write_lines(folder / f"clean/{chunk.number}.jsonl", map(unit_to_line, units))


def unlinked_pairs(folder: Path, chunks: Iterable[Chunk]) -> Iterator[tuple[str, str]]:
    """Yield both texts of each pair without links that is kept or held out."""
    for chunk in chunks:
        for unit, state in read_units_and_states(folder, chunk):
            if is_used_and_unlinked(unit, state):
                yield unit.texts[0], unit.texts[1]


def is_used_and_unlinked(unit: Unit, state: int) -> bool:
    """Return whether a unit that is kept or held out has no links."""
    return unit.links is None and state in (KEPT, HELD_OUT)


def read_kept_languages_and_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of every kept sentence and of both sides of every kept pair."""
    for chunk in all_chunks(folder):
        source = read_plan(folder).corpus.sources[chunk.source]
        for unit, state in read_units_and_states(folder, chunk):
            if state == KEPT:
                langs = source.pairs or source.langs * len(unit.texts)
                yield from zip(langs, unit.texts, strict=True)


def count_kept_texts(folder: Path) -> Counter[str]:
    """Return the number of kept sentences, and sides of pairs, in each language."""
    counts = Counter[str]()
    for chunk in all_chunks(folder):
        table = np.load(folder / f"clean/{chunk.number}.npy", mmap_mode="r")
        kept = int(table[read_selection_states(folder, chunk) == KEPT, SENTENCES].sum())
        for lang in read_plan(folder).corpus.sources[chunk.source].langs:
            counts[lang] += kept
    return counts


def sample_kept_texts(folder: Path, counts: Counter[str], size: int, alpha: float) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of an evenly spread sample of at most `size` kept texts. A language's share of the sample
    is proportional to its count ** alpha. counts: the number of kept texts in each language."""
    total = sum(count**alpha for count in counts.values())
    wanted = {lang: min(count, int(size * count**alpha / total)) for lang, count in counts.items()}
    passed = Counter[str]()
    for lang, text in read_kept_languages_and_texts(folder):
        before = passed[lang] * wanted[lang] // counts[lang]
        passed[lang] += 1
        if passed[lang] * wanted[lang] // counts[lang] > before:
            yield lang, text


def write_tokenizer(folder: Path, _: int) -> None:
    """Train the tokenizer, or copy an existing one. The step has this one task."""
    spec = read_plan(folder).corpus.tokenizer
    out = folder / "result/tokenizer"
    with replacement_file(out) as partial:
        files.remove(out)
        if isinstance(spec, TokenizerSpec):
            from .tokenizer import train

            texts = sample_kept_texts(folder, count_kept_texts(folder), SAMPLE, spec.alpha)
            train(texts, spec.type, spec.vocab_size, False).save_pretrained(partial)
        else:
            cached_tokenizer(str(spec)).hf.save_pretrained(partial)


def make_records(unit: Unit, langs: tuple[str, ...], source_name: str) -> list[Record]:
    """Return the one record of a pair, or the records of a document's sentences."""
    key = f"{source_name}-{unit.number:09d}"
    if len(langs) == 2:
        return [Record(key, langs, tuple(unit.texts), unit.links)]
    doc = unit.number if len(unit.texts) > 1 else None
    return [Record(f"{key}.{number}", langs, (text,), doc=doc) for number, text in enumerate(unit.texts)]


def write_shard_and_heldout_records(folder: Path, chunk_number: int) -> None:
    """Write the shard of a chunk, and the chunk's records that are held out."""
    chunk = all_chunks(folder)[chunk_number]
    corpus = read_plan(folder).corpus
    source = corpus.sources[chunk.source]
    removed = RemovalCounts()
    counts = Counter[str]()
    kept = list[Record]()
    held_out = list[Record]()
    for unit, state in read_units_and_states(folder, chunk):
        if state in REMOVED:
            removed.add(REMOVED[state], unit.texts[: len(source.langs)])
            continue
        records = make_records(unit, source.langs, corpus.source_names[chunk.source])
        records = drop_records_by_token_count(folder, records, source, removed)
        if state == HELD_OUT:
            held_out += records
        elif records:
            kept += records
            counts["documents"] += 1
    counts["records"] = len(kept)
    counts["held"] = len(held_out)
    counts["linked"] = sum(record.links is not None for record in kept)
    if kept:
        with replacement_file(folder / f"tars/{chunk_number}.tar") as partial:
            write_shard(partial, kept)
    write_lines(folder / f"held/{chunk_number}", map(Record.to_json, held_out))
    write_json(folder / f"tars/{chunk_number}.json", {"counts": counts, "removed": removed.to_json()})


def drop_records_by_token_count(
    folder: Path, records: list[Record], source: SourceSpec, removed: RemovalCounts
) -> list[Record]:
    """Return the records that the rule length.tokens keeps, if the corpus's tokenizer was trained on its text. With an
    existing tokenizer, the step `clean` has applied the rule, and all records are returned."""
    corpus = read_plan(folder).corpus
    bounds = corpus.rules_for(source).length.tokens
    if not bounds or not isinstance(corpus.tokenizer, TokenizerSpec):
        return records
    tokenizer = cached_tokenizer(str((folder / "result/tokenizer").absolute()))
    kept = list[Record]()
    for record in records:
        reason = violated_token_count_rule(tokenizer, record.texts, bounds)
        if reason:
            removed.add(reason, record.texts)
        else:
            kept.append(record)
    return kept


def write_shard(path: Path, records: Iterable[Record]) -> None:
    """Write records to a tar in WebDataset's format."""
    lines = (record.to_json() + "\n" for record in records)
    members = 0
    with tarfile.open(path, "w") as tar:
        while member := "".join(islice(lines, MEMBER_RECORDS)):
            data = member.encode()
            header = tarfile.TarInfo(f"{members:08d}.jsonl")
            header.size = len(data)
            header.mode = 0o444
            tar.addfile(header, io.BytesIO(data))
            members += 1


def counts_and_removals_of_source(folder: Path, source_number: int) -> dict[str, Any]:
    """Return the sums of a source's counts over its chunks: {"counts": {name: number}, "removed": {rule: number},
    "examples": {rule: removed texts}}."""
    counts = Counter[str]()
    removed = RemovalCounts()
    for chunk in source_chunks(folder, source_number):
        for step in ("clean", "tars"):
            fields = read_json(folder / f"{step}/{chunk.number}.json")
            removed.merge(fields["removed"])
            counts.update(fields["counts"])
    return {"counts": counts, "removed": removed.counts, "examples": removed.examples}


def move_and_index_source_shards(folder: Path, source_number: int) -> None:
    """Move the shards of a source to result/shards/NAME, numbered without gaps, and index them. A killed move can be
    repeated."""
    plan = read_plan(folder)
    corpus = plan.corpus
    source = corpus.sources[source_number]
    out = folder / "result/shards" / corpus.source_names[source_number]
    shards = 0
    for chunk in source_chunks(folder, source_number):
        if read_json(folder / f"tars/{chunk.number}.json")["counts"]["records"]:
            out.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the shard was moved earlier
                (folder / f"tars/{chunk.number}.tar").replace(out / f"{plan.shard_name or out.name}-{shards:06d}.tar")
            shards += 1
    summary = counts_and_removals_of_source(folder, source_number)
    counts = {"lines": summary["counts"]["read"], "records": summary["counts"]["records"], **summary["removed"]}
    if summary["counts"]["dropped_links"]:
        counts["dropped_links"] = summary["counts"]["dropped_links"]
    made_by = {
        "tool": plan.tool,
        "input": [Path(path).name for path in source.all_paths],
        "licence": source.licence,
        "rules": corpus.rules_for(source).model_dump(exclude={"exclude"}, mode="json"),
        "counts": counts,
    }
    if shards:
        index.build_index(out, None, made_by)


def write_heldout_shards(folder: Path, language_group_number: int) -> None:
    """Write the shards of a group's held-out records to result/heldout/LANGUAGES, and index them."""
    plan = read_plan(folder)
    records = defaultdict[tuple[str, ...], list[Record]](list)
    for chunk in group_chunks(folder, plan.corpus.language_groups[language_group_number]):
        for line in (folder / f"held/{chunk.number}").read_bytes().splitlines():
            record = Record.from_dict(parse_json(line))
            records[record.langs].append(record)
    for langs, held_out in records.items():
        out = folder / "result/heldout" / "-".join(langs)
        for start in range(0, len(held_out), CHUNK_UNITS):
            with replacement_file(out / f"heldout-{start // CHUNK_UNITS:06d}.tar") as partial:
                write_shard(partial, held_out[start : start + CHUNK_UNITS])
        index.build_index(out, None, {"tool": plan.tool, "heldout": True})


def write_truecased_lexicon_if_usable(folder: Path, lexicon_number: int) -> None:
    """Write a dictionary with each word in its commonest spelling in the kept text, unless the corpus's tokenizer can
    use none of its entries. Warn if its columns are probably swapped."""
    corpus = read_plan(folder).corpus
    path = Path(corpus.lexicons[lexicon_number])
    langs = languages_in_file_name(path, corpus.languages)
    sources = [Source(path.parent) for path in folder.glob("result/shards/*/index.json")]
    entries = truecase_entries(read_entries(path), langs, sources)
    out = folder / "result/lexicon" / path.name
    with replacement_file(out) as partial:
        write_entries(list(dict.fromkeys(entries)), partial)
    if corpus.tokenizer:
        tokenizer = cached_tokenizer(str((folder / "result/tokenizer").absolute()))
        try:
            lexicon = load_lexicon(out, tokenizer, langs)
            tokens = distinct_token_ids_in_sample(langs[1], sources, tokenizer)
            warn_if_columns_are_swapped([replace(lexicon, path=path)], lexicon.single_token_pairs(), tokens)
        except UserError as error:  # a run would refuse the dictionary
            print(f"the dictionary {path} is left out, because training could not use it: {error}", file=sys.stderr)
            out.unlink()


STEPS: dict[str, PrepareStep] = {
    "cut": PrepareStep(cut_source_into_chunks, lambda folder: len(read_plan(folder).corpus.sources)),
    "clean": PrepareStep(clean_chunk, lambda folder: len(all_chunks(folder))),
    "select": PrepareStep(write_selection_states, lambda folder: len(read_plan(folder).corpus.language_groups)),
    "align": PrepareStep(
        word_align_and_rewrite_chunks, lambda folder: len(read_plan(folder).corpus.language_pairs_to_word_align)
    ),
    "tokenizer": PrepareStep(write_tokenizer, lambda folder: int(read_plan(folder).corpus.tokenizer is not None)),
    "shards": PrepareStep(write_shard_and_heldout_records, lambda folder: len(all_chunks(folder))),
    "gather": PrepareStep(move_and_index_source_shards, lambda folder: len(read_plan(folder).corpus.sources)),
    "heldout": PrepareStep(write_heldout_shards, lambda folder: len(read_plan(folder).corpus.language_groups)),
    "lexicons": PrepareStep(write_truecased_lexicon_if_usable, lambda folder: len(read_plan(folder).corpus.lexicons)),
}
"""The steps in order."""
