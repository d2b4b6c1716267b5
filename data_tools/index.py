"""(Re)build the index of a directory of WebDataset tars, including tars that other tools wrote.

    python -m data_tools.index DIR [--langs en de]

Tars may hold `.jsonl` members (one record a line), or one sample per record: KEY.json, KEY.en.txt + KEY.de.txt
(+ KEY.links.txt), or KEY.txt with --langs.
"""

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from xscale import files
from xscale.data.shards import ENTRIES, FORMAT_VERSION, LAYOUTS, SEGMENTATIONS, fingerprint, read_index
from xscale.errors import MachineError, UserError

from .command import run
from .engine import start_worker
from .scan import scan_shard

TOOL = "data_tools.index"
WORKER_TARS = 8
"""The number of tars that a worker process scans at a time. The main process scans less than twice as many."""
TarScan = tuple[dict[str, Any], str, tuple[str, ...], int, list[str]]
"""The result of the scan of a tar: its entry in index.json, layout, languages, number of documents, keys of
ScannedShard.moved."""


def build_index(
    directory: Path, langs: tuple[str, ...] | None, made_by: dict[str, Any], links_count: str | None = None
) -> dict[str, Any]:
    """Scan all tars of a directory. Write an .idx file beside each tar, the file that joins the entries of all .idx
    files, and then index.json. Return the content of index.json. Raises UserError.

    langs: the languages of samples that do not name theirs. links_count: the kind of words that links number, a key of
    SEGMENTATIONS. None: the kind that an existing index names; without an index, xscale's words in tars of the layout
    `lines`, and white-space words in others. Links are checked only if `made_by` names this tool, because other tools
    have checked them already.
    """
    tars = sorted(directory.glob("*.tar"))
    if not tars:
        raise UserError(f"no .tar in {directory}")
    links_count_of = {layout: _segmentation(directory, layout, links_count)["name"] for layout in LAYOUTS}
    if made_by["tool"] != TOOL:
        links_count_of = {}
    index = index_content(directory, scan_in_processes(tars, langs, links_count_of), made_by, links_count)
    write_index(directory, index)
    return index


def scan_in_processes(tars: list[Path], langs: tuple[str, ...] | None, links_count_of: dict[str, str]) -> list[TarScan]:
    """Scan the tars, by a process for each core if there are many tars. Return what each contains."""
    workers = min(len(os.sched_getaffinity(0)), len(tars) // WORKER_TARS)
    if workers < 2:
        return scan_tars(tars, langs, links_count_of)
    parts = [tars[start : start + WORKER_TARS] for start in range(0, len(tars), WORKER_TARS)]
    with ProcessPoolExecutor(workers, get_context("fork"), start_worker, (os.getpid(),)) as pool:
        try:
            scans = pool.map(partial(scan_tars, langs=langs, links_count_of=links_count_of), parts)
            return list(chain.from_iterable(scans))
        except BrokenProcessPool:
            raise MachineError("a process that scans tars was killed, perhaps because memory ran out") from None
        finally:
            pool.shutdown(cancel_futures=True)


def index_content(
    directory: Path, scans: Sequence[TarScan], made_by: dict[str, Any], links_count: str | None
) -> dict[str, Any]:
    """Return the content of index.json. scans: those of all tars of the directory. Raises UserError if tars differ in
    their languages or layout."""
    found = sorted(scans, key=lambda entry: entry[0]["name"])
    _, layout, all_langs, *_ = found[0]
    for shard, other_layout, other_langs, *_ in found:
        if (other_layout, other_langs) != (layout, all_langs):
            raise UserError(
                f"{directory / shard['name']} holds {other_langs} ({other_layout}), {found[0][0]['name']} holds "
                f"{all_langs} ({layout}); keep one directory for each"
            )
    records = sum(shard["records"] for shard, *_ in found)
    optional: dict[str, Any] = {}
    if len(all_langs) == 1:
        optional["documents"] = sum(documents for _, _, _, documents, _ in found)
    moved = [key for *_, keys in found for key in keys]
    if moved:
        optional["links_by_other_spaces"] = {"pairs": len(moved), "first": moved[0]}
    return {
        "format": "xscale shards",
        "version": FORMAT_VERSION,
        "kind": "pair" if len(all_langs) == 2 else "mono",
        "langs": list(all_langs),
        "languages": dict.fromkeys(all_langs, records),
        "layout": layout,
        "segmentation": _segmentation(directory, layout, links_count),
        "records": records,
        **optional,
        "bytes": sum(shard["bytes"] for shard, *_ in found),
        "made_by": made_by,
        "shards": [shard for shard, *_ in found],
    }


def write_index(directory: Path, index: dict[str, Any]) -> None:
    """Write the file that joins the entries of all shards' .idx files, and then index.json."""
    with files.publish(directory / ENTRIES) as partial, partial.open("wb") as all_entries:
        for shard in index["shards"]:
            all_entries.write((directory / shard["name"]).with_suffix(".idx").read_bytes())
    files.write_text(directory / "index.json", json.dumps(index, indent=1, ensure_ascii=False) + "\n")


def scan_tars(tars: list[Path], langs: tuple[str, ...] | None, links_count_of: dict[str, str]) -> list[TarScan]:
    """Write the .idx file of each tar. Return what the tars contain. langs, links_count_of: see scan_shard."""
    scans = list[TarScan]()
    for path in tars:
        scanned = scan_shard(path, langs, links_count_of)
        with files.publish(path.with_suffix(".idx")) as partial:
            partial.write_bytes(scanned.idx.tobytes())  # numpy's tofile does not tell what the system said
        scans.append((scanned.shard._asdict(), scanned.layout, scanned.langs, scanned.documents, scanned.moved))
    return scans


def _segmentation(directory: Path, layout: str, links_count: str | None) -> dict[str, str]:
    """Return the entry of SEGMENTATIONS for the words that links number (see build_index)."""
    if links_count:
        return SEGMENTATIONS[links_count]
    try:
        return read_index(directory)[0].get("segmentation", SEGMENTATIONS["whitespace"])
    except UserError:
        return SEGMENTATIONS["unicode" if layout == "lines" else "whitespace"]


def warning_lines(directory: Path, index: dict[str, Any]) -> list[str]:
    """Return a line about links that other white space than spaces and tabs would move, if there are such links."""
    moved = index.get("links_by_other_spaces")
    if not moved:
        return []
    return [
        f"warning: {directory}: in {moved['pairs']:,} pairs, the first of which is {moved['first']}, links count words "
        f"divided at spaces and tabs, as aligners do; a program that divides at no-break spaces too would mean other "
        f"words"
    ]


def summary_line(directory: Path, index: dict[str, Any]) -> str:
    """Return a line about the records, shards and left-out lines of a directory."""
    counts = index["made_by"].get("counts", {})
    no_reasons = ("lines", "records", "dropped_links")
    left_out = ", ".join(f"{n:,} {reason}" for reason, n in counts.items() if reason not in no_reasons)
    dropped = counts.get("dropped_links", 0)
    documents = f" of {index['documents']:,} documents" if "documents" in index else ""
    return (
        f"{directory}: {index['records']:,} {index['kind']} records ({' '.join(index['langs'])}){documents} in "
        f"{len(index['shards'])} shards, {index['bytes'] / 1e6:,.1f} MB, fingerprint {fingerprint(index)}"
        + (f"; left out lines: {left_out}" if left_out else "")
        + (f"; {dropped:,} links of a word and a symbol dropped" if dropped else "")
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data index", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--langs", nargs="+", help="languages, for samples that do not name theirs")
    parser.add_argument(
        "--links_count", choices=SEGMENTATIONS, help="the kind of words that links number (default: as an "
        "existing index says, or whitespace for tars of other tools)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    langs = tuple(args.langs) if args.langs else None
    if len(langs or ()) > 2 or len(set(langs or ())) < len(langs or ()):
        raise UserError(f"--langs {' '.join(args.langs)}: needs one language, or two different ones")
    if not all(lang.isprintable() for lang in langs or ()):
        raise UserError(
            f"--langs {' '.join(map(repr, args.langs))}: the name of a language must not contain control characters"
        )
    index = build_index(args.directory, langs, {"tool": TOOL}, args.links_count)
    print(summary_line(args.directory, index), *warning_lines(args.directory, index), sep="\n")


if __name__ == "__main__":
    run(main)
