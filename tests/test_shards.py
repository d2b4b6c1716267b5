"""Shards as others see them: stock WebDataset and tarfile are the reference."""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import tarfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from data_tools import index, inspect, write_shards
from xscale.data import shards as shards
from xscale.data.shards import Source, find_sources
from xscale.errors import UserError
from xscale.files import map_in_threads


@cache
def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [
        f"{i} " + " ".join(rng.choices(["to", "be", "or", "nöt", "日本", "🙂"], k=rng.randint(1, 9)))
        for i in range(count)
    ]


def numbered_pairs(count: int) -> list[dict]:
    pairs = zip(sentences(count), sentences(count, seed=1), strict=True)
    return [{"key": f"{i:05d}", "langs": ["en", "de"], "texts": list(texts)} for i, texts in enumerate(pairs)]


def read_all(source: Source) -> list[dict]:
    records = [source.read(s, n) for s, count in enumerate(source.counts) for n in range(count)]
    return [json.loads(record.to_json()) for record in records]


def run_index(directory: Path, *langs: str) -> Source:
    index.main([str(directory), *(["--langs", *langs] if langs else [])])
    return Source(directory)


@pytest.fixture(scope="module")
def mono(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """700 sentences in shards of 300 lines, two members each. Read only."""
    folder = tmp_path_factory.mktemp("mono")
    (folder / "text.en").write_text("".join(line + "\n" for line in sentences(700)), encoding="utf-8")
    arguments = ["mono", "--text", folder / "text.en", "--lang", "en", "--out", folder / "out"]
    write_shards.main([str(a) for a in [*arguments, "--whole_lines", "--shard_lines", 300]])
    return folder / "out"


@pytest.fixture
def copy(mono: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mono, tmp_path / "copy"))


# Others read our shards


def test_every_record_by_idx_equals_a_scan_of_the_tar(mono: Path, shard_records) -> None:
    source, expected = Source(mono), shard_records(mono)
    assert [len(shard) for shard in expected] == source.counts.tolist() == [300, 300, 100]
    for number, (tar, records) in enumerate(zip(sorted(mono.glob("*.tar")), expected, strict=True)):
        rows = np.fromfile(tar.with_suffix(".idx"), dtype="<u8,<u4,<u4").tolist()
        data = tar.read_bytes()
        assert [json.loads(data[start : start + length]) for start, length, _ in rows] == records
        assert [zlib.crc32(data[start : start + length]) for start, length, _ in rows] == [crc for *_, crc in rows]
        order = random.Random(0).sample(range(len(records)), len(records))
        assert [json.loads(source.read(number, n).to_json()) for n in order] == [records[n] for n in order]
        lengths = source.byte_lengths(number, np.array(order))
        assert lengths.tolist() == [rows[n][1] for n in order]


def test_index_json_tells_the_truth(mono: Path) -> None:
    stated = json.loads((mono / "index.json").read_text())
    tars = sorted(mono.glob("*.tar"))
    assert [shard["name"] for shard in stated["shards"]] == [tar.name for tar in tars]
    assert [shard["sha256"] for shard in stated["shards"]] == [
        hashlib.sha256(tar.read_bytes()).hexdigest() for tar in tars
    ]
    assert [shard["bytes"] for shard in stated["shards"]] == [tar.stat().st_size for tar in tars]
    assert stated["records"] == 700 and stated["languages"] == {"en": 700} and stated["langs"] == ["en"]


# We read others' shards


def write_others(directory: Path, records: list[dict], members, shard: int = 40, prefix: str = "") -> None:
    """Tars as stock WebDataset writes them; `members` makes a record's members."""
    directory.mkdir(exist_ok=True)
    for start in range(0, len(records), shard):
        with webdataset.TarWriter(str(directory / f"x-{start:06d}.tar")) as writer:
            for record in records[start : start + shard]:
                writer.write({"__key__": prefix + record["key"]} | members(record))


def test_pairs_of_text_members(tmp_path: Path) -> None:
    records = [record | {"links": "0-0 1-1" if i % 2 else ""} for i, record in enumerate(numbered_pairs(90))]

    def members(r: dict) -> dict:
        return {"en.txt": r["texts"][0] + "\n", "de.txt": r["texts"][1] + "\n", "links.txt": r["links"] + "\n"}

    write_others(tmp_path / "d", records, members)
    assert read_all(run_index(tmp_path / "d", "en", "de")) == records
    swapped = [r | {"langs": ["de", "en"], "texts": r["texts"][::-1]} for r in records]
    assert read_all(run_index(tmp_path / "d")) == swapped  # without --langs the tar's order counts


def test_json_members(tmp_path: Path) -> None:
    records = [record | {"links": "0-0"} for record in numbered_pairs(90)]
    write_others(tmp_path / "d", records, lambda r: {"json": {k: r[k] for k in ("langs", "texts", "links")}})
    assert read_all(run_index(tmp_path / "d")) == records


def test_members_that_webdataset_leaves_out_are_left_out(tmp_path: Path) -> None:
    records = numbered_pairs(12)
    write_others(tmp_path / "d", records, lambda r: {"en.txt": r["texts"][0], "de.txt": r["texts"][1]}, 100)
    (path,) = (tmp_path / "d").glob("*.tar")
    with tarfile.open(path) as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    with tarfile.open(path, "w") as tar:
        for number, (name, data) in enumerate([("README", b"x"), ("__meta__/a.json", b"x"), *members]):
            hidden = f"{name.rpartition('/')[0]}/" * ("/" in name) + f"._{number}.txt"
            for written in (hidden, name, ".DS_Store"):
                member = tarfile.TarInfo(written)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    source = run_index(tmp_path / "d", "en", "de")
    assert read_all(source) == records
    stock = webdataset.WebDataset(str(path), shardshuffle=False)
    assert [sample["__key__"] for sample in stock] == [record["key"] for record in records]


def test_three_lines_of_webdataset_read_our_records(mono: Path) -> None:
    """The lines of docs/reference/shards.md."""
    urls = [str(tar) for tar in sorted(mono.glob("*.tar"))]
    members = webdataset.WebDataset(urls, shardshuffle=False)
    lines = (line for member in members for line in member["jsonl"].splitlines())
    assert [json.loads(line) for line in lines] == read_all(Source(mono))


def test_text_members_with_langs(tmp_path: Path) -> None:
    records = [{"key": f"{i:05d}", "langs": ["de"], "texts": [text]} for i, text in enumerate(sentences(90))]
    write_others(tmp_path / "d", records, lambda r: {"txt": r["texts"][0]})
    assert read_all(run_index(tmp_path / "d", "de")) == records
    with pytest.raises(UserError, match=r"x-000000\.tar.*--lang"):
        run_index(tmp_path / "d")


def test_keys_are_those_of_webdataset(tmp_path: Path) -> None:
    """A key is the whole path up to the first dot of the file's name."""
    directory = tmp_path / "d"
    deep = f"{'long-directory-name/' * 5}v1.0/"
    write_others(directory, numbered_pairs(6), lambda r: {"en.txt": r["texts"][0], "de.txt": "x"}, 3, deep)
    stock = webdataset.WebDataset([str(tar) for tar in sorted(directory.glob("*.tar"))], shardshuffle=False)
    assert [r["key"] for r in read_all(run_index(directory))] == [sample["__key__"] for sample in stock]


def test_tars_of_the_tar_program(tmp_path: Path) -> None:
    """With a root directory entry, PAX headers and files of all sizes."""
    records, files = numbered_pairs(20), tmp_path / "files"
    files.mkdir()
    records[3]["texts"][0] = "x" * 1024
    records[4]["key"] = "k" * 120  # too long for the old header
    records.sort(key=lambda record: record["key"])
    for record in records:
        for lang, text in zip(record["langs"], record["texts"], strict=True):
            (files / f"{record['key']}.{lang}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "d").mkdir()
    tar = tmp_path / "d" / "x.tar"
    subprocess.run(["tar", "--sort=name", "--format=pax", "-C", files, "-cf", tar, "."], check=True)
    found = read_all(run_index(tmp_path / "d", "en", "de"))
    assert [(r["key"].removeprefix("./"), r["texts"]) for r in found] == [(r["key"], r["texts"]) for r in records]


def test_mixed_languages_are_refused(tmp_path: Path) -> None:
    for number, lang in enumerate(("en", "de")):
        with webdataset.TarWriter(str(tmp_path / f"{number}.tar")) as writer:
            writer.write({"__key__": "0", f"{lang}.txt": "x"})
    with pytest.raises(UserError, match=r"1\.tar.*de.*0\.tar.*en"):
        run_index(tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_a_spread_is_the_source_in_few_shards(copy: Path) -> None:
    source = Source(copy)
    few = source.with_evenly_spaced_shards(2)
    assert few.counts.tolist() == [300, 100] and [shard.name[-5] for shard in few.shards] == ["0", "2"]
    assert few.read(1, 99) == source.read(2, 99) and few.records == source.records == 700
    assert few.byte_lengths(1, slice(None)).tolist() == source.byte_lengths(2, slice(None)).tolist()
    assert source.with_evenly_spaced_shards(9).counts.tolist() == source.counts.tolist()


def test_slow_calls_are_made_by_several_threads_in_order() -> None:
    """As on a network's file system."""
    threads = set[int]()

    def double(number: int, seconds: float) -> int:
        time.sleep(seconds)
        threads.add(threading.get_ident())
        return 2 * number

    expected = [2 * number for number in range(40)]
    assert map_in_threads(double, range(40), [0.002] * 40) == expected and len(threads) > 2
    assert map_in_threads(double, range(40), [0.0] * 40) == expected
    assert map_in_threads(double, [], []) == []


# Damage


def flip(path: Path, text: str) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(text.encode())] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_named_on_read(copy: Path) -> None:
    flip(copy / "mono-000001.tar", sentences(700)[300 + 271])
    source = Source(copy)
    map_in_threads(source.check_local_file, source.shards)
    with pytest.raises(UserError, match=r"mono-000001\.tar: record 271 "):
        source.read(1, 271)
    intact = [n for n in range(300) if n != 271]
    assert [source.read(1, n).texts[0] for n in intact] == [sentences(700)[300 + n] for n in intact]


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_shards_that_are_replaced_are_not_read(copy: Path, tmp_path: Path, how: str) -> None:
    """The new shards have the same names and numbers of records, and entries that fit them. moved: another folder takes
    the place of the old one. copied: the files get new content."""
    (tmp_path / "text.en").write_text("".join(line + "\n" for line in sentences(700, seed=9)), encoding="utf-8")
    arguments = ["mono", "--text", tmp_path / "text.en", "--lang", "en", "--out", tmp_path / "others"]
    write_shards.main([str(a) for a in [*arguments, "--whole_lines", "--shard_lines", 300]])
    source = Source(copy)
    assert source.read(0, 5).texts[0] == sentences(700)[5]
    if how == "moved":
        copy.rename(tmp_path / "away")
        (tmp_path / "others").rename(copy)
    else:
        for path in (tmp_path / "others").iterdir():
            shutil.copyfile(path, copy / path.name)
    for shard in (0, 1):
        if how == "moved" and shard == 0:  # it is open
            assert source.read(0, 6).texts[0] == sentences(700)[6]
            continue
        # When the folder has moved, the open entries are the old ones: no record of the new tar fits them.
        by_record = rf"mono-00000{shard}\.tar: record 6 .* is damaged: its checksum differs"
        by_entries = r"/entries does not have .* replaced during .* restore the old shards"
        with pytest.raises(UserError, match=by_record if how == "moved" else by_entries):
            source.read(shard, 6)
    assert Source(copy).read(1, 6).texts[0] == sentences(700, seed=9)[306]


def test_lengths_of_all_shards_are_in_one_file(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which planners open, and not thousands. If it does not fit index.json, a new index helps."""
    expected = [np.fromfile(copy / f"mono-{shard:06d}.idx", dtype="<u8,<u4,<u4")["f1"] for shard in range(3)]
    opened: list[str] = []
    plain = os.open
    monkeypatch.setattr(os, "open", lambda path, *args: (opened.append(Path(path).name), plain(path, *args))[1])

    def damaged_shards(source: Source) -> list[int]:
        damaged = list[int]()
        for shard in range(3):
            try:
                assert (source.byte_lengths(shard, slice(None)) == expected[shard]).all()
            except UserError as error:
                assert f"{copy}/entries does not have the checksums" in str(error)
                damaged.append(shard)
        return damaged

    few = Source(copy).with_evenly_spaced_shards(2)
    assert (few.byte_lengths(1, slice(None)) == expected[2]).all() and damaged_shards(Source(copy)) == []
    assert {*opened} == {"entries"}
    whole = (copy / "entries").read_bytes()
    for content, damaged in (
        (whole[:40] + b"x" + whole[41:], [0]),
        (whole[:-16], [2]),
        (whole[16:], [0, 1, 2]),
        (b"", [0, 1, 2]),
    ):
        (copy / "entries").write_bytes(content)
        assert damaged_shards(Source(copy)) == damaged
    for rewritten in (b"", whole[::-1]):  # in place, as by cp, while it is read: where it is short that would be SIGBUS
        (copy / "entries").write_bytes(whole)
        source = Source(copy)
        assert damaged_shards(source) == []
        (copy / "entries").write_bytes(rewritten)
        assert damaged_shards(source) == [0, 1, 2]
    (copy / "entries").unlink()
    with pytest.raises(UserError, match=f"{copy}/entries is missing.*run `xscale data index {copy}`"):
        Source(copy).read(0, 0)
    index.main([str(copy)])
    assert (copy / "entries").read_bytes() == whole and damaged_shards(Source(copy)) == []


def test_verify_lists_all_damage(copy: Path, capsys: pytest.CaptureFixture) -> None:
    inspect.main([str(copy), "--verify"])
    assert "all shards are undamaged (number: 3)" in capsys.readouterr().out
    flip(copy / "mono-000000.tar", sentences(700)[17])
    os.truncate(copy / "mono-000001.tar", 20_000)
    rows = bytearray((copy / "mono-000002.idx").read_bytes())
    rows[16:32], rows[32:48] = rows[32:48], rows[16:32]  # valid byte ranges in the wrong order
    (copy / "mono-000002.idx").write_bytes(rows)
    with pytest.raises(UserError) as error:
        inspect.main([str(copy), "--verify"])
    assert "damaged shards (3)" in str(error.value)
    for named in (r"mono-000000.tar: record 17 ", "mono-000001.tar: record", "mono-000002.idx"):
        assert named in str(error.value)
    (copy / "entries").write_bytes(b"")
    with pytest.raises(UserError, match=r"damaged shards \(3\)(.|\n)*entries does not have the checksums") as error:
        inspect.main([str(copy), "--verify"])
    assert str(error.value).count("entries does not have") == 1
    (copy / "mono-000001.tar").unlink()
    with pytest.raises(UserError, match=r"No such file.*mono-000001\.tar"):
        inspect.main([str(copy), "--verify"])


def test_check_size_sees_an_incomplete_copy(copy: Path) -> None:
    source = Source(copy)
    map_in_threads(source.check_local_file, source.shards)
    path = copy / "mono-000002.tar"
    whole = path.read_bytes()
    for content in (whole[:-512], whole + b"x", b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path} has {len(content):,} bytes.*{len(whole):,}"):
            map_in_threads(source.check_local_file, source.shards)
    path.unlink()
    with pytest.raises(UserError, match=f"{path} is missing"):
        map_in_threads(source.check_local_file, source.shards)


def test_index_refuses_a_tar_that_was_cut_anywhere(copy: Path) -> None:
    """tarfile alone takes a cut between members, or in a header, for the end."""
    path = copy / "mono-000000.tar"
    whole, before = path.read_bytes(), (copy / "index.json").read_bytes()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    end = members[-1].offset_data + -(-members[-1].size // 512) * 512
    cuts = {0, 100, 512, 5000, end - 1, end, *(member.offset + d for member in members[1:] for d in (0, 300, 512, 900))}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"mono-000000\.tar"):
            run_index(copy)
        assert (copy / "index.json").read_bytes() == before
    path.write_bytes(whole)
    assert run_index(copy).records == 700


def test_index_refuses_a_damaged_header(copy: Path) -> None:
    path = copy / "mono-000000.tar"
    with tarfile.open(path) as tar:
        header = tar.getmembers()[1].offset
    whole = path.read_bytes()
    for byte in (0, 126, 150, 257):  # name, size, checksum, magic
        damaged = bytearray(whole)
        damaged[header + byte] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"mono-000000\.tar: record 256"):
            run_index(copy)


# How they are made


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_shards_have_no_gaps(tmp_path: Path, corpus_files, write_pairs) -> None:
    src = [line if i // 50 not in (0, 3, 8) else "" for i, line in enumerate(sentences(500))]  # some empty shards
    out = tmp_path / "out"
    write_pairs(*corpus_files(src, sentences(500, seed=1)), out, "--shard_lines", 50, "--name", "x")
    assert sorted(contents(out)) == sorted(
        ["entries", "index.json", *(f"x-{i:06d}.{e}" for i in range(7) for e in ("tar", "idx"))]
    )
    kept = [[a, b] for a, b in zip(src, sentences(500, seed=1), strict=True) if a]
    assert [record["texts"] for record in read_all(Source(out))] == kept


def test_index_is_the_same_for_every_number_of_workers(copy: Path, mono: Path, monkeypatch) -> None:
    monkeypatch.setattr(index, "WORKER_TARS", 1)
    for path in [*copy.glob("*.idx"), copy / "index.json"]:
        path.unlink()
    index.main([str(copy)])
    rebuilt, original = contents(copy), contents(mono)
    stated, expected = json.loads(rebuilt.pop("index.json")), json.loads(original.pop("index.json"))
    assert rebuilt == original
    assert stated | {"made_by": 0} == expected | {"made_by": 0}


def test_fingerprint_is_that_of_the_content(copy: Path, mono: Path, tmp_path: Path) -> None:
    original = Source(mono).fingerprint
    assert Source(copy).fingerprint == original
    (copy / "mono-000002.tar").unlink()
    fewer = run_index(copy).fingerprint
    assert fewer != original
    shutil.copy(mono / "mono-000001.tar", copy / "mono-000000.tar")
    assert len({run_index(copy).fingerprint, fewer, original}) == 3


# Reading


@pytest.fixture
def keep_open(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """keep_open(n): at most n files stay open, and none that other tests have left."""

    def keep(most: int) -> None:
        shards.cached_file_opener().cache_clear()
        monkeypatch.setattr(shards.resource, "getrlimit", lambda limit: (2 * most, 2 * most))
        monkeypatch.setattr(shards, "cached_file_opener", cache(shards.cached_file_opener.__wrapped__))

    return keep


def test_few_files_are_open_at_once(keep_open, mono: Path, shard_records) -> None:
    keep_open(4)
    source, expected = Source(mono), shard_records(mono)
    before = len(os.listdir("/proc/self/fd"))
    for i in range(60):
        assert source.read(i % 3, i).texts[0] == expected[i % 3][i]["texts"][0]
        assert len(os.listdir("/proc/self/fd")) <= before + 4
    again = pickle.loads(pickle.dumps(source))  # as a worker gets it
    assert again.read(1, 5) == source.read(1, 5)
    shards.cached_file_opener().cache_clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shard_that_is_opened_again_costs_its_tar_alone(
    keep_open, mono: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entries are in the source's file of entries, which stays open; they are read whole once, to be verified."""
    keep_open(2)
    opened, read, plain_open, plain_read = list[str](), Counter[str](), os.open, os.pread

    def open_file(path: str, *args: Any) -> int:
        opened.append(Path(path).name)
        return plain_open(path, *args)

    def pread(fd: int, size: int, at: int) -> bytes:
        data = plain_read(fd, size, at)
        read[Path(os.readlink(f"/proc/self/fd/{fd}")).suffix] += len(data)
        return data

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "pread", pread)
    source, tars = Source(mono), [path.name for path in sorted(mono.glob("*.tar"))]
    for once, size in ((["entries"], 16 * 700), ([], 0)):
        opened.clear()
        read.clear()
        texts = [source.read(shard, 7).texts[0] for shard in range(3)]
        assert texts == [sentences(700)[300 * shard + 7] for shard in range(3)]
        assert opened == [*once, *tars] and {*read} == {"", ".tar"} and read[""] == size + 3 * 16


@pytest.mark.parametrize(("limit", "most"), [(64, 32), (1 << 20, 1 << 14), (-1, 1 << 14)])
def test_half_of_the_system_s_limit_of_open_files_is_used(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(shards.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(shards, "cached_file_opener", cache(shards.cached_file_opener.__wrapped__))
    assert shards.cached_file_opener().cache_parameters()["maxsize"] == most


def test_find_sources(demo: Path, mono: Path) -> None:
    assert [source.directory.name for source in find_sources([demo])] == [
        "mono_en", "mono_xx", "mono_yy", "pairs", "pairs_yy",
    ]  # fmt: skip
    assert [source.langs_name for source in find_sources([mono, demo / "pairs"])] == ["en", "en-xx"]
    with pytest.raises(UserError, match="tokenizer"):
        find_sources([demo / "tokenizer"])


def test_a_folder_without_rights_is_not_left_out(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(demo / "pairs", tmp_path / "pairs")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "closed")
    with pytest.raises(UserError, match=r"closed cannot be read, but may have shards.*--data"):
        find_sources([tmp_path])


@pytest.mark.parametrize("broken", [False, True])
def test_a_folder_whose_index_is_missing_is_not_left_out(demo: Path, tmp_path: Path, broken: bool) -> None:
    shutil.copytree(demo, tmp_path / "demo")
    index = tmp_path / "demo" / "pairs" / "index.json"
    index.unlink()
    if broken:
        index.symlink_to("index.json")
    with pytest.raises(UserError, match=r"demo/pairs has shards, but no index.json. Copy the folder again"):
        find_sources([tmp_path / "demo"])
    assert len(find_sources([tmp_path / "demo" / "pairs_yy"])) == 1


def test_a_link_to_a_disk_that_is_not_there_is_not_left_out(demo: Path, tmp_path: Path) -> None:
    shutil.copytree(demo / "pairs", tmp_path / "pairs")
    (tmp_path / "mono").symlink_to("/absent/mono")
    with pytest.raises(UserError, match="mono is a symbolic link to /absent/mono"):
        find_sources([tmp_path])
