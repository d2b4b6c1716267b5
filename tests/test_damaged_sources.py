"""Every reader of data_tools.prepare gives all text in its order, or refuses the source by a line that names the file
and the place, whatever is damaged in it; and its memory is bounded."""

import gzip
import json
import lzma
import random
import re
import tarfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import zstandard

from data_tools import index, readers
from data_tools.corpus import SourceSpec
from tests import test_prepare
from tests.demo_shards import write_records
from xscale.data import text as files_of_text
from xscale.errors import UserError
from xscale.record import Record

PAIRS = [(f"line {n} of {random.Random(n).random()}", f"Zeile {n} {random.Random(-n).random()}") for n in range(200)]


def mono(name: str, write: Callable[[str, int], str]) -> Callable[[Path, list], dict]:
    """A monolingual source of one file: the first text of each pair in its format."""

    def make(folder: Path, pairs: list) -> dict:
        path = folder / f"m.{name}"
        path.write_text("".join(write(a, n) for n, (a, _) in enumerate(pairs)), encoding="utf-8", newline="\n")
        return {"text" if name in ("doc", "lines") else name: str(path)}

    return make


def shards(folder: Path, pairs: list) -> dict:
    records = ([Record(f"k-{n}", ("en", "de"), pair)] for n, pair in enumerate(pairs, start=1))
    write_records(records, folder / "m.shards", "m", 1000, {"tool": "test"})
    return {"shards": str(folder / "m.shards")}


MONO = {
    "jsonl": mono("jsonl", lambda text, n: json.dumps({"text": text}) + "\n"),
    "doc": mono("doc", lambda text, n: f'<doc id="{n}">\n{text}\n</doc>\n'),
    "lines": mono("lines", lambda text, n: f"{text}\n"),
}
FORMATS = {**test_prepare.FORMATS, "shards": shards, **MONO}
CHECKED = ("gz", "xz", "bz2", "tmx.gz", "tmx.xz")
"""These formats have sums that find every change."""


def source(folder: Path, name: str, pairs: list) -> SourceSpec:
    return SourceSpec(**{"mono": "en"} if name in MONO else {"pairs": ("en", "de")}, **FORMATS[name](folder, pairs))


def texts_of(spec: SourceSpec) -> tuple[list[list[str]], str]:
    """The texts of all units, and the message of a refusal."""
    found = list[list[str]]()
    try:
        found += (unit.texts for unit in readers.read_units(spec))
    except UserError as error:
        return found, str(error)
    return found, ""


def parts_of(spec: SourceSpec) -> list[Path]:
    """All files that a reader of the source reads."""
    below = [sorted(path.rglob("*")) if path.is_dir() else [path] for path in map(Path, spec.all_paths)]
    return [path for found in below for path in found if path.is_file()]


@pytest.mark.parametrize("name", FORMATS)
def test_odd_text_arrives_whole_or_is_refused(tmp_path: Path, name: str) -> None:
    """Expectations beside what a format cannot hold: XML has no NUL, and makes a line end of a carriage return."""
    separators = "a\u2028b\x85c\u00a0x\u3000y\u2029z"
    for number, odd in enumerate(["a\0b", "a\rb", separators, "a\x0bb", "a\ufeffb", "long " * 300_000 + "e"]):
        (tmp_path / str(number)).mkdir()
        pairs = [*PAIRS[:3], (odd, odd + "z"), *PAIRS[3:6]]
        spec = source(tmp_path / str(number), name, pairs)
        found, told = texts_of(spec)
        found = [[text.replace("\ufeff", "") for text in texts] for texts in found]  # which readers of lines leave out
        pairs = [tuple(text.replace("\ufeff", "") for text in pair) for pair in pairs]
        expected = [[a] if name in MONO else [a, b] for a, b in pairs]
        if name.startswith("tmx"):
            expected = [[text.replace("\r", " ") for text in texts] for texts in expected]
        refused = name.startswith("tmx") and odd.translate({0: 1, 11: 1}) != odd
        assert re.search(r"m\.tmx.*unit 3", told) if refused else found == expected and not told, (odd[:9], told)
        assert refused or texts_of(spec.model_copy(update={"first": 2}))[0] == texts_of(spec)[0][:2]


@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_refused_by_the_name_of_the_file(tmp_path: Path, name: str) -> None:
    """Plain text that is cut off, and a change in a format without sums, cannot be known; no reader may end otherwise,
    leave out text before the damage, or change the order."""
    spec = source(tmp_path, name, PAIRS)
    expected, told = texts_of(spec)
    assert len(expected) == len(PAIRS) and not told
    for seed in range(40):
        rng = random.Random(f"{name} {seed}")
        path = rng.choice(parts_of(spec))
        whole = path.read_bytes()
        at, kind = rng.randrange(len(whole)), ("cut", "flipped", "more", "empty", "zeros")[seed % 5]
        rest = {"flipped": bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :], "more": b"\xff" + whole[at:],
                "zeros": bytes(len(whole[at : at + 50])) + whole[at + 50 :]}  # fmt: skip
        path.write_bytes(whole[:at] + rest.get(kind, b"") if kind != "empty" else b"")
        found, told = texts_of(spec)
        case = f"{kind} {path.name} at {at} of {len(whole)}: {told}"
        assert not told or any(part.name in told or str(part.parent) in told for part in parts_of(spec)), case
        if kind == "empty" or (name in CHECKED and kind != "more"):
            assert told or found == expected, case
        if kind == "cut":
            assert found[:-1] == expected[: max(len(found) - 1, 0)], case
        path.write_bytes(whole)


def gzipped(blocks: Iterable[bytes]) -> bytes:
    return b"".join(map(gzip.compress, blocks))


def zstd(blocks: Iterable[bytes]) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join([*map(packer.compress, blocks), packer.flush()])


def xz(blocks: Iterable[bytes]) -> bytes:
    packer = lzma.LZMACompressor()
    return b"".join([*map(packer.compress, blocks), packer.flush()])


BOMBS: dict[str, tuple[dict, Callable[[Iterable[bytes]], bytes]]] = {
    "plain": ({"mono": "en", "text": "m.txt"}, b"".join),
    "gz": ({"mono": "en", "text": "m.gz"}, gzipped),
    "xz": ({"mono": "en", "text": "m.xz"}, xz),
    "zst": ({"mono": "en", "text": "m.zst"}, zstd),
    "jsonl": ({"mono": "en", "jsonl": "m.zst"}, zstd),
    "tsv": ({"pairs": ["en", "de"], "tsv": "m.gz", "columns": [1, 2]}, gzipped),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_line_without_end_takes_little_memory(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files_of_text, "_LONGEST_LINE", 1 << 20)
    fields, pack = BOMBS[name]
    place = next(str(value) for value in fields.values() if str(value).startswith("m."))
    Path(place).write_bytes(pack(b"a" * (1 << 20) for _ in range(64)))
    spec = SourceSpec.model_validate(fields)
    tracemalloc.start()
    try:
        found, told = texts_of(spec)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not found and re.search(r"m\..*line 1 has more than 1,048,576", told), told
    assert peak < 40e6


def test_no_member_leaves_its_folder(tmp_path: Path) -> None:
    """Members are read where they lie, whatever their names say."""
    folder = tmp_path / "inside"
    folder.mkdir()
    with tarfile.open(folder / "m.tar", "w") as tar:
        for name, text in (("../../k.en.txt", b"one"), ("../../k.de.txt", b"two")):
            (tmp_path / "content").write_bytes(text)
            tar.add(tmp_path / "content", arcname=name)
    index.main([str(folder)])
    before = sorted(tmp_path.rglob("*"))
    for fields in ({"shards": str(folder)}, {"shards": str(folder / "m.tar")}):
        assert texts_of(SourceSpec(pairs=("en", "de"), **fields)) == ([["one", "two"]], "")
    assert sorted(tmp_path.rglob("*")) == before
