"""(Re)build the index of a directory of WebDataset tars, including tars that other tools wrote.

    xscale data index DIR [--langs en de]

Tars may hold `.jsonl` members (one record a line), or one sample per record: KEY.json, KEY.en.txt + KEY.de.txt (+
KEY.links.txt), or KEY.txt with --langs. The links of samples number the words between white space, unless an existing
index.json names another kind of words.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from xscale import files
from xscale.data.shards import ENTRIES, FORMAT_VERSION, SEGMENTATIONS, check_languages, fingerprint, read_index
from xscale.errors import MachineError, UserError

from .command import run
from .engine import start_worker
from .scan import ScannedTar, scan_tar

WORKER_TARS = 8
"""The number of tars that a worker process scans at a time."""


def build_index(
    directory: Path, langs: tuple[str, ...] | None, made_by: dict[str, Any], check_links: bool = False
) -> dict[str, Any]:
    """Scan all tars of a directory, and write an .idx file beside each tar, the file that joins all .idx files, and
    index.json. Return the content of index.json. Raises UserError.

    langs: the languages of samples that do not name theirs. check_links: refuse links that do not fit their texts.
    """
    paths = sorted(directory.glob("*.tar"))
    if not paths:
        raise UserError(f"no .tar in {directory}; give a folder of tars")
    segmentations = segmentation_by_layout(directory) if check_links else None
    index_one = partial(index_tar, langs=langs, segmentations=segmentations)
    index = index_content(directory, map_tars(index_one, paths), made_by)
    write_index(directory, index)
    return index


def map_tars(index_one: Callable[[Path], ScannedTar], paths: list[Path]) -> list[ScannedTar]:
    """Return list(map(index_one, paths)). If there are many tars, a process for each core computes a part."""
    if len(paths) < 2 * WORKER_TARS:
        return list(map(index_one, paths))
    workers = min(len(os.sched_getaffinity(0)), len(paths) // WORKER_TARS)
    with ProcessPoolExecutor(workers, get_context("fork"), start_worker, (os.getpid(),)) as pool:
        try:
            return list(pool.map(index_one, paths, chunksize=WORKER_TARS))
        except BrokenProcessPool:
            raise MachineError("a process that scans tars was killed, perhaps by lack of memory; start again") from None


def index_tar(
    path: Path, langs: tuple[str, ...] | None = None, segmentations: Mapping[str, dict[str, str]] | None = None
) -> ScannedTar:
    """Write the .idx file of a tar. langs, segmentations: see scan_tar. Raises UserError."""
    tar, idx = scan_tar(path, langs, segmentations)
    with files.publish(path.with_suffix(".idx")) as partial_path:
        partial_path.write_bytes(idx.tobytes())  # numpy's tofile hides the system's error
    return tar


def segmentation_by_layout(directory: Path) -> dict[str, dict[str, str]]:
    """Return {layout: the kind of words that its links number}. An existing index.json names this kind. Without an
    index.json, links in .jsonl members number the words of data/words.py, and links of samples number the words between
    white space."""
    try:
        existing = read_index(directory)[0].get("segmentation", SEGMENTATIONS["whitespace"])
    except UserError:
        return {"lines": SEGMENTATIONS["unicode"], "samples": SEGMENTATIONS["whitespace"]}
    return {"lines": existing, "samples": existing}


def index_content(directory: Path, tars: Sequence[ScannedTar], made_by: dict[str, Any]) -> dict[str, Any]:
    """Return the content of index.json. tars: all tars of the directory. Raises UserError if they differ in their
    languages or their layout."""
    in_order = sorted(tars, key=lambda tar: tar.shard.name)
    first = in_order[0]
    records = documents = size = 0
    shards = list[dict[str, Any]]()
    for tar in in_order:
        if (tar.layout, tar.langs) != (first.layout, first.langs):
            raise UserError(
                f"{directory / tar.shard.name} holds {tar.langs} ({tar.layout}), {first.shard.name} holds "
                f"{first.langs} ({first.layout}); give each its own directory"
            )
        records += tar.shard.records
        documents += tar.documents
        size += tar.shard.bytes
        shards.append(tar.shard._asdict())
    optional: dict[str, Any] = {}
    if len(first.langs) == 1:
        optional["documents"] = documents
    return {
        "format": "xscale shards",
        "version": FORMAT_VERSION,
        "kind": "pair" if len(first.langs) == 2 else "mono",
        "langs": list(first.langs),
        "languages": dict.fromkeys(first.langs, records),
        "layout": first.layout,
        "segmentation": segmentation_by_layout(directory)[first.layout],
        "records": records,
        **optional,
        "bytes": size,
        "made_by": made_by,
        "shards": shards,
    }


def write_index(directory: Path, index: dict[str, Any]) -> None:
    """Write the file that joins all shards' .idx files, and then index.json."""
    with files.publish(directory / ENTRIES) as partial_path, partial_path.open("wb") as all_entries:
        for shard in index["shards"]:
            all_entries.write((directory / shard["name"]).with_suffix(".idx").read_bytes())
    files.write_text(directory / "index.json", json.dumps(index, indent=1, ensure_ascii=False) + "\n")


def summary_line(directory: Path, index: dict[str, Any]) -> str:
    """Return a line about the records, shards and left-out lines of a directory."""
    documents = f" of {index['documents']:,} documents" if "documents" in index else ""
    line = (
        f"{directory}: {index['records']:,} {index['kind']} records ({' '.join(index['langs'])}){documents} in "
        f"{len(index['shards'])} shards, {index['bytes'] / 1e6:,.1f} MB, fingerprint {fingerprint(index)}"
    )
    counts = dict(index["made_by"].get("counts", {}))
    dropped = counts.pop("dropped_links", 0)
    left_out = [f"{count:,} {reason}" for reason, count in counts.items() if reason not in ("lines", "records")]
    if left_out:
        line += f"; left out lines: {', '.join(left_out)}"
    if dropped:
        line += f"; {dropped:,} links of a word and a symbol dropped"
    return line


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data index", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--langs", nargs="+", help="languages, for samples that do not name theirs")
    args = parser.parse_args(argv)
    langs = tuple(args.langs) if args.langs else None
    try:
        check_languages(langs or ("en",))
    except ValueError as error:
        raise UserError(f"--langs: {error}") from None
    index = build_index(args.directory, langs, {"tool": "data_tools.index"}, check_links=True)
    print(summary_line(args.directory, index))


if __name__ == "__main__":
    run(main)
