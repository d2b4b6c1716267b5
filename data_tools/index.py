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
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from xscale import files
from xscale.data.shards import ENTRIES, FORMAT_VERSION, LAYOUTS, SEGMENTATIONS, fingerprint, read_index
from xscale.errors import MachineError, UserError

from .command import run
from .engine import start_worker
from .scan import scan_shard
from .survey import Survey
from .survey import warnings as survey_warnings

TOOL = "data_tools.index"
WORKER_TARS = 8
"""A process scans this many tars at a time; fewer than twice as many are scanned in this process."""
Scanned = tuple[list[tuple[dict[str, Any], str, tuple[str, ...], int]], Survey | None]
"""For some tars: (entry in index.json, layout, languages, number of documents) of each; a survey of all their texts."""


def build(
    directory: Path,
    langs: tuple[str, ...] | None,
    made_by: dict[str, Any],
    links_count: str | None = None,
) -> dict[str, Any]:
    """Scan all tars, write an .idx file beside each, the file that joins all entries, and index.json last. Raises
    UserError.

    links_count: which words the numbers in links count, a name in SEGMENTATIONS. None: those that an existing index
    names; without an index, xscale's words in tars of its own layout and white-space words in others. Links are checked
    if `made_by` names this tool; other tools have checked them before they wrote them.
    """
    tars = sorted(directory.glob("*.tar"))
    if not tars:
        raise UserError(f"no .tar in {directory}")
    counted = {layout: _segmentation(directory, layout, links_count)["name"] for layout in LAYOUTS}
    if made_by["tool"] != TOOL:
        counted = {}
    index = described(directory, scan_all(tars, langs, counted), made_by, links_count)
    write(directory, index)
    return index


def scan_all(tars: list[Path], langs: tuple[str, ...] | None, counted: dict[str, str]) -> list[Scanned]:
    """Return what `scan` returns, for parts of the tars. Many tars are scanned in a process for each core."""
    workers = min(len(os.sched_getaffinity(0)), len(tars) // WORKER_TARS)
    if workers < 2:
        return [scan(tars, langs, counted)]
    parts = [tars[start : start + WORKER_TARS] for start in range(0, len(tars), WORKER_TARS)]
    with ProcessPoolExecutor(workers, get_context("fork"), start_worker, (os.getpid(),)) as pool:
        try:
            return [*pool.map(partial(scan, langs=langs, counted=counted), parts)]
        except BrokenProcessPool:
            raise MachineError("a process that scans tars was killed, perhaps because memory ran out") from None
        finally:
            pool.shutdown(cancel_futures=True)


def described(
    directory: Path, parts: Sequence[Scanned], made_by: dict[str, Any], links_count: str | None
) -> dict[str, Any]:
    """The content of index.json, from the scans of all tars of the directory. Raises UserError."""
    found = sorted((entry for part, _ in parts for entry in part), key=lambda entry: entry[0]["name"])
    _, layout, all_langs, _ = found[0]
    for shard, other_layout, other_langs, _ in found:
        if (other_layout, other_langs) != (layout, all_langs):
            raise UserError(
                f"{directory / shard['name']} holds {other_langs} ({other_layout}), {found[0][0]['name']} holds "
                f"{all_langs} ({layout}); keep one directory for each"
            )
    survey = Survey(len(all_langs))
    for of_part in (of_part for _, of_part in parts if of_part):
        survey.join(of_part)
    records = sum(shard["records"] for shard, *_ in found)
    documents = {"documents": sum(documents for *_, documents in found)} if len(all_langs) == 1 else {}
    return {
        "format": "xscale shards",
        "version": FORMAT_VERSION,
        "kind": "pair" if len(all_langs) == 2 else "mono",
        "langs": list(all_langs),
        "languages": dict.fromkeys(all_langs, records),
        "layout": layout,
        "segmentation": _segmentation(directory, layout, links_count),
        "records": records,
        **documents,
        "bytes": sum(shard["bytes"] for shard, *_ in found),
        "text": survey.result(),
        "made_by": made_by,
        "shards": [shard for shard, *_ in found],
    }


def write(directory: Path, index: dict[str, Any]) -> None:
    """Write the index: first the file that joins the entries of all shards, and index.json last."""
    with files.publish(directory / ENTRIES) as partial, partial.open("wb") as all_entries:
        for shard in index["shards"]:
            all_entries.write((directory / shard["name"]).with_suffix(".idx").read_bytes())
    files.write_text(directory / "index.json", json.dumps(index, indent=1, ensure_ascii=False) + "\n")


def scan(tars: list[Path], langs: tuple[str, ...] | None, counted: dict[str, str]) -> Scanned:
    """Write the .idx file of each tar. Returns what the tars hold, and a survey of the texts of those tars that have as
    many languages as the first one."""
    found, survey = [], None
    for path in tars:
        scanned = scan_shard(path, langs, counted)
        with files.publish(path.with_suffix(".idx")) as partial:
            partial.write_bytes(scanned.idx.tobytes())  # numpy's tofile does not tell what the system said
        found.append((scanned.shard._asdict(), scanned.layout, scanned.langs, scanned.documents))
        survey = survey or Survey(len(scanned.langs))
        if len(survey.seen) == len(scanned.langs):
            survey.join(scanned.survey)
    return found, survey


def _segmentation(directory: Path, layout: str, links_count: str | None) -> dict[str, str]:
    if links_count:
        return SEGMENTATIONS[links_count]
    try:
        return read_index(directory)[0].get("segmentation", SEGMENTATIONS["whitespace"])
    except UserError:
        return SEGMENTATIONS["unicode" if layout == "lines" else "whitespace"]


def warnings(directory: Path, index: dict[str, Any]) -> list[str]:
    """A line for each suspicious property of the texts."""
    lines = survey_warnings(index["text"], tuple(index["langs"]), index["records"])
    return [f"warning: {directory}: {line}" for line in lines]


def summary(directory: Path, index: dict[str, Any]) -> str:
    counts = index["made_by"].get("counts", {})
    no_reasons = ("lines", "records", "members", "dropped_links")
    left_out = ", ".join(f"{n:,} {reason}" for reason, n in counts.items() if reason not in no_reasons)
    dropped = counts.get("dropped_links", 0)
    documents = f" of {index['documents']:,} documents" if "documents" in index else ""
    documents += f" by {', '.join(forms)}" if (forms := index["made_by"].get("documents")) else ""
    return (
        f"{directory}: {index['records']:,} {index['kind']} records ({' '.join(index['langs'])}){documents} in "
        f"{len(index['shards'])} shards, {index['bytes'] / 1e6:,.1f} MB, fingerprint {fingerprint(index)}"
        + (f"; left out lines: {left_out}" if left_out else "")
        + (f"; {dropped:,} links of a word and a symbol dropped" if dropped else "")
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--langs", nargs="+", help="languages, for samples that do not name theirs")
    parser.add_argument(
        "--links_count", choices=SEGMENTATIONS, help="whose words the links count (default: as the index says; "
        "whitespace where others wrote the tars)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    langs = tuple(args.langs) if args.langs else None
    if len(langs or ()) > 2 or len(set(langs or ())) < len(langs or ()):
        raise UserError(f"--langs {' '.join(args.langs)}: needs one language, or two different ones")
    if not all(lang.isprintable() for lang in langs or ()):
        raise UserError(
            f"--langs {' '.join(map(repr, args.langs))}: the name of a language must not contain control characters"
        )
    index = build(args.directory, langs, {"tool": TOOL}, args.links_count)
    print(summary(args.directory, index), *warnings(args.directory, index), sep="\n")


if __name__ == "__main__":
    run(main)
