"""Seeded bad input: every case ends well, or with a line that names file or field; none silently wrong.

    python tests/fuzz.py [--seed 0] [--cases 2000] [--only KIND ...]

A case is a function of its kind and seed alone. It ends good (nothing was raised, and an independent reader finds the
same), or refused (UserError, or exit code 2 or 4, by a line that names one of `case.names`). All else is a finding:
another exception, a wrong result, a message that names nothing, more than LIMIT seconds.
"""

import argparse
import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import random
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from data_tools import command, write_shards
from tests import demo_shards
from xscale.data.shards import Source, find_sources
from xscale.errors import UserError
from xscale.files import map_in_threads
from xscale.record import Record

LIMIT = 60
"""Seconds of a case in this process."""
LONGEST = 6000
"""Characters of a message."""


@dataclass
class Case:
    """What a case may use, and what it says of itself."""

    rng: random.Random
    folder: Path
    demo: Path
    names: list[str] = field(default_factory=list)
    """A refusal names at least one of these; none: anything."""
    story: list[Any] = field(default_factory=list)
    """What was done, for whoever reads of a finding."""

    def file(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path

    def pick(self, *choices: Any) -> Any:
        chosen = self.rng.choice(choices)
        self.story.append(chosen if not callable(chosen) else getattr(chosen, "__name__", chosen))
        return chosen


@dataclass
class Result:
    kind: str
    seed: int
    outcome: str
    """good, refused, or found."""
    detail: str


# Damage


def damaged(case: Case, data: bytes) -> bytes:
    """Other bytes than `data`."""
    rng = case.rng
    at = rng.randrange(max(len(data), 1))
    size = rng.choice((1, 1, 1, 8, 512))
    how = case.pick("flip", "cut", "empty", "zeros", "append", "drop", "double")
    case.story.append(at)
    if how == "flip" and data:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if how == "cut" and at < len(data):
        return data[:at]
    if how == "zeros" and data[at : at + size].strip(b"\0"):
        return data[:at] + bytes(len(data[at : at + size])) + data[at + size :]
    if how == "drop" and data:
        return data[:at] + data[at + size :]
    if how == "double" and data:
        return data[: at + size] + data[at : at + size] + data[at + size :]
    if how == "append" or not data:
        return data + rng.choice((b"x", b"\0", b"\n", b"{}", rng.randbytes(600)))
    return b""


WORDS = ["one", "zwei", "3", "Größe", "日本語", "हिन्दी", "ไทย", "🙂", "a\u0301", "U.S.", "l'homme", "\u200b"]
ODD = [*'\u2028\u0085\x0b\x0c\x1c\r\0\t\u00a0\u200d\U0010ffff\x7f"\\']


def sentence(case: Case, longest: int = 12) -> str:
    rng = case.rng
    words = [rng.choice(WORDS) for _ in range(rng.randrange(longest))]
    if rng.random() < 0.2:
        words.insert(rng.randrange(len(words) + 1), rng.choice(ODD))
    return rng.choice((" ", " ", "  ", "")).join(words)


def write_text(case: Case, name: str, lines: list[str]) -> tuple[Path, bool]:
    """A text file of these lines, and whether its bytes are theirs, in a way that is to be read."""
    rng, sound = case.rng, True
    ending = rng.choice(("\n", "\n", "\r\n"))
    text = "".join(line + ending for line in lines)
    if rng.random() < 0.2:
        text = text.removesuffix(ending)
        text += ending if lines and not lines[-1] else ""
    data = text.encode()
    how = case.pick(
        "plain", "plain", "plain", "bom", "gz", "xz", "parts.gz", "parts.xz", "latin", "utf16", "bad", "torn", "other"
    )
    if how == "bom":
        data = b"\xef\xbb\xbf" + data
    elif how in ("gz", "xz", "torn"):
        name += ".gz" if how == "gz" or (how == "torn" and rng.random() < 0.5) else ".xz"
        pack: Callable[[bytes], bytes] = gzip.compress if name.endswith("gz") else lzma.compress
        data = pack(data)
        if how == "torn":
            before, data = data, damaged(case, data)
            sound = unpacked(name, data) == unpacked(name, before)
    elif how.startswith("parts"):
        name += how.removeprefix("parts")
        pack = gzip.compress if name.endswith("gz") else lzma.compress
        middle = data.find(b"\n", len(data) // 2) + 1
        data = pack(data[:middle]) + pack(data[middle:])
    elif how == "latin" and "ö" in text:
        data, sound = data.replace("ö".encode(), b"\xf6"), False
    elif how == "utf16" and len(text) > 8:
        data, sound = text.encode(rng.choice(("utf-16", "utf-16-le"))), False
    elif how == "bad" and data:
        at = rng.randrange(len(data) + 1)
        data, sound = data[:at] + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x80")) + data[at:], False
    elif how == "other":
        data, sound = b"\x28\xb5\x2f\xfd" + rng.randbytes(40), False
    return case.file(name, data), sound


def unpacked(name: str, data: bytes) -> bytes | None:
    """All streams by the standard library, or None where they do not reach to the end of the file."""
    try:
        if name.endswith(".gz"):
            return gzip.decompress(data) if data else None
        whole, form = b"", lzma.FORMAT_AUTO
        while data:
            decoder = lzma.LZMADecompressor(form)
            whole += decoder.decompress(data)
            if not decoder.eof:
                return None
            data, form = decoder.unused_data.lstrip(b"\0"), lzma.FORMAT_XZ
        return whole if form == lzma.FORMAT_XZ else None
    except Exception:  # of whatever kind: it is no whole file
        return None


def tool(main: Callable[[list[str]], None], *argv: Any) -> str:
    """A tool as its command runs it, in this process. Raises UserError with the line that it prints; its output."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command.run(lambda: main([str(word) for word in argv]))
        except SystemExit as stop:
            code = stop.code
    if code in (2, 4):
        raise UserError(err.getvalue())
    assert code == 0, (code, err.getvalue())
    return out.getvalue()


def records_of(directory: Path) -> list[dict[str, Any]]:
    """By tarfile and json alone."""
    found = []
    for path in sorted(directory.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content
                found += [json.loads(line) for line in content.read().split(b"\n") if line]
    return found


# Text


def shows(text: str) -> bool:
    """Whether there is anything to see."""
    return any(unicodedata.category(c) not in ("Cc", "Cf", "Zs", "Zl", "Zp") for c in text)


def stored(line: str) -> str:
    """The text of a line in a record."""
    return line.replace("\r", " ").replace("\ufeff", "").strip()


def check_source(directory: Path) -> None:
    """Every record by its index is the one that a plain reader finds."""
    source = Source(directory)
    plain = [
        Record(r["key"], tuple(r["langs"]), tuple(r["texts"]), r.get("links"), r.get("doc"))
        for r in records_of(directory)
    ]
    assert all_of(source) == plain


def all_of(source: Source) -> list[Record]:
    return [source.read(shard, n) for shard, count in enumerate(source.counts.tolist()) for n in range(count)]


def pairs_case(case: Case) -> None:
    rng = case.rng
    count = rng.randrange(1, 30)
    sides = [[sentence(case).replace("\n", "") for _ in range(count)] for _ in range(2)]
    if rng.random() < 0.15:
        sides[rng.randrange(2)].pop()
    same = len(sides[0]) == len(sides[1])
    if (same and not sides[0][-1].strip()) or (not same and not all(side and side[-1] for side in sides)):
        for side in sides:
            side.append("end")
    files = [write_text(case, f"text.{side}", lines) for side, lines in enumerate(sides)]
    case.names = [str(path) for path, _ in files]
    out, more = case.folder / "out", []
    bad = False
    if rng.random() < 0.5:
        links = []
        for pair in zip(*sides, strict=False):
            sizes = [len(re.findall("[^ \t]+", text)) for text in pair]
            some = [(rng.randrange(max(n, 1)) for n in sizes) for _ in range(rng.randrange(4))] if all(sizes) else []
            links.append(" ".join("-".join(map(str, link)) for link in some))
        if same and links and rng.random() < 0.4:
            at = rng.randrange(len(links))
            links[at] += " " + case.pick("99-0", "0-99", "1", "a-b", "-1-0", "0:0", "0-0-0", "0-١", "1e3-0", "0-0,1-1")
            bad = all(shows(side[at]) for side in sides)
        path = case.file("text.links", "".join(line + "\n" for line in links))
        case.names.append(str(path))
        more = ["--links", path]
    more += ["--shard_lines", rng.choice((1, 7, 8192))]
    sources = [word for side, (path, _) in zip(("--src", "--tgt"), files, strict=True) for word in (side, path)]
    tool(write_shards.main, "pairs", *sources, "--langs", "en", "de", "--out", out, *more)
    assert all(sound for _, sound in files) and same and not bad, "a damaged file was taken"
    wanted = [
        list(pair)
        for pair in zip(*([stored(line) for line in side] for side in sides), strict=True)
        if all(map(shows, pair))
    ]
    assert [record["texts"] for record in records_of(out)] == wanted, "other pairs"
    check_source(out)


# Shards


def state_of(directory: Path) -> Any:
    """All that a run reads of a folder of shards: records, documents, fingerprints."""
    found = []
    for source in find_sources([directory]):
        map_in_threads(source.check_size, source.shards)
        records = [source.convert_links(record) for record in all_of(source)]
        follows = [
            source.lengths_and_continuations(shard, slice(None))[1].tolist() for shard in range(len(source.shards))
        ]
        found.append((source.name, records, follows))
    return found


def shards_case(case: Case) -> None:
    rng = case.rng
    name = rng.choice(("pairs", "mono_en"))
    directory = case.folder / name
    shutil.copytree(case.demo / name, directory)
    before = state_of(directory)
    case.names = [str(directory)]
    files = sorted(directory.iterdir())
    path = rng.choice(files)
    how = case.pick("damage", "damage", "damage", "delete", "swap", "copy", "field")
    case.story.append(path.name)
    if how == "damage":
        path.write_bytes(damaged(case, path.read_bytes()))
    elif how == "delete":
        path.unlink()
    elif how == "swap":
        other = rng.choice([file for file in files if file.suffix == path.suffix])
        path.rename(case.folder / "x")
        if other != path:
            other.rename(path)
        (case.folder / "x").rename(other)
    elif how == "copy":
        shutil.copy(path, directory / f"copy{path.suffix}")
    else:
        at = directory / "index.json"
        tree = json.loads(at.read_text())
        change_leaf(case, tree)
        at.write_text(json.dumps(tree))
    assert state_of(directory) == before, "other records"


ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.5, 1e308, 10**400, float("nan"), float("inf"), 1e-320, 1 << 40, 1 << 63),
    *("", "auto", "true", "1", "0.5", "3e-4", "x" * 300, "é", "\0", "../..", "cpu", "en", [], [1], [[]], {}, {"a": 1}),
    *([0.9, 0.999], ["en"], ["en-xx"], [None], "nan", "no", "fp16", "bf16"),
]


def leaves_of(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from leaves_of(value, (*at, key))


def change_leaf(case: Case, tree: Any, *hows: str) -> None:
    """One value, at any depth, becomes another, goes, or stands under another name."""
    places = list(leaves_of(tree))
    *at, last = case.rng.choice(places)
    node = tree
    for key in at:
        node = node[key]
    how = case.pick(*(hows or ("set", "set", "near", "near", "near", "delete", "rename", "add")))
    case.story.append((*at, last))
    if how == "delete":
        del node[last]
    elif how == "near":
        value = node[last] if type(node[last]) in (bool, int, float) else None
        if value is None:
            return
        node[last] = not value if isinstance(value, bool) else case.rng.choice((value + 1, 2 * value, value / 2, value))
    elif how == "rename" and isinstance(node, dict):
        node[case.rng.choice((str(last) + "s", str(last)[:-1], str(last).upper(), "x"))] = node.pop(last)
    elif how == "add" and isinstance(node, dict):
        node[case.rng.choice(("x", "enabled", "steps", "lr", "type", "params"))] = case.rng.choice(ODD_VALUES)
    else:
        node[last] = case.rng.choice(ODD_VALUES)
        case.story.append(node[last])


KINDS: dict[str, tuple[Callable[[Case], None], int]] = {
    "pairs": (pairs_case, 12),
    "shards": (shards_case, 16),
}
"""Kinds of cases, and how many of a round are of each."""
ROUND = [kind for kind, (_, share) in KINDS.items() for _ in range(share)]


class Hang(BaseException):
    """A case that does not end."""


def run_case(kind: str, seed: int, demo: Path, folder: Path) -> Result:
    """One case, in a folder of its own."""
    folder.mkdir(parents=True)
    case = Case(random.Random(f"{kind}:{seed}"), folder, demo)

    def late(*_: Any) -> None:
        raise Hang(f"no end after {LIMIT} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        KINDS[kind][0](case)
        return Result(kind, seed, "good", "")
    except UserError as error:
        problem = weakness(case, str(error))
        detail = problem and f"{problem}: {str(error)[:1500]}\n  {case.story}"
        return Result(kind, seed, "found" if problem else "refused", detail or str(error))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = "".join(traceback.format_exception(error)[-4:])
        return Result(kind, seed, "found", f"{where}\n  {str(case.story)[:1500]}")
    finally:
        signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)


def weakness(case: Case, message: str) -> str:
    """What is wrong with a refusal."""
    if not message.strip():
        return "says nothing"
    if "Traceback" in message:
        return "a traceback"
    if len(message) > LONGEST:
        return f"{len(message)} characters"
    if case.names and not any(name in message for name in case.names):
        return f"names none of {case.names}"
    return ""


def plan(seed: int, cases: int, only: list[str]) -> Iterator[tuple[str, int]]:
    """(kind, seed) of each case."""
    kinds = [kind for kind in ROUND if not only or kind in only]
    order = random.Random(seed)
    shuffled = itertools.chain.from_iterable(order.sample(kinds, len(kinds)) for _ in itertools.count())
    for number, kind in enumerate(itertools.islice(shuffled, cases)):
        yield kind, 1_000_000 * seed + number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--only", nargs="+", default=[], choices=list(KINDS))
    parser.add_argument("--case", type=int, help="the one case of the one --only with this number")
    args = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    seconds: Counter[str] = Counter()
    cases = plan(args.seed, args.cases, args.only) if args.case is None else [(args.only[0], args.case)]
    with tempfile.TemporaryDirectory(prefix="fuzz") as root:
        demo = Path(root) / "demo"
        demo_shards.build(demo, pairs=60, mono=60)
        for kind, number in cases:
            began = time.monotonic()
            result = run_case(kind, number, demo, Path(root) / "cases" / str(number))
            seconds[kind] += time.monotonic() - began
            counts[kind, result.outcome] += 1
            if result.outcome == "found" or args.case is not None:
                print(f"== {result.outcome}: --only {kind} --case {number}\n{result.detail}", flush=True)
    for kind in KINDS:
        told = ", ".join(f"{counts[kind, outcome]} {outcome}" for outcome in ("good", "refused", "found"))
        if any(counts[kind, outcome] for outcome in ("good", "refused", "found")):
            print(f"{kind:12} {told}, {seconds[kind]:.0f} s")
    return int(any(outcome == "found" for _, outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
