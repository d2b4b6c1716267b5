"""Shards at a URL: the same records as from disk, whatever the server answers. The disk is the reference."""

import multiprocessing
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, partialmethod
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from data_tools import write_shards
from data_tools.demo_world import World
from xscale import train
from xscale.data import order, remote
from xscale.data.mixture import initial_state, remote_window_bytes
from xscale.data.remote import Cache
from xscale.data.shards import Source, find_sources
from xscale.errors import UserError
from xscale.eval.in_training import find_task_sources
from xscale.ranks import Process
from xscale.recipe import EvalTask
from xscale.run.folder import MACHINE, explain
from xscale.run_spec import RunSpec, resolve_run

RELEASED = threading.Event()
"""It ends the answers that stall."""


class Faults:
    """A server's answers: the requests of each file, and the faults of the next answers about it."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.next: dict[str, list[str]] = {}

    def of(self, path: str) -> str:
        name = path.rstrip("/").rpartition("/")[2]
        self.asked[name] += 1
        faults = self.next.get(name, [])
        return faults.pop(0) if len(faults) > 1 else (faults or [""])[0]


def spoiled(data: bytes, fault: str) -> bytes:
    middle = len(data) // 2
    if fault == "cut":
        return data[:middle]
    if fault == "flip":
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return data.replace(b'"en"', b'"es"', 1) if fault == "lie" else data


class Handler(SimpleHTTPRequestHandler):
    faults: Faults

    def do_GET(self) -> None:
        fault, path = self.faults.of(self.path), Path(self.translate_path(self.path))
        if fault.startswith("http"):
            self.send_response(302)
            self.send_header("Location", fault)
            self.end_headers()
        elif fault == "flood":
            self.send_response(200)  # without a length
            self.end_headers()
            with suppress(OSError):
                for _ in range(300):
                    self.wfile.write(bytes(1 << 20))
            self.close_connection = True
        elif fault in ("fail", "absent"):
            self.send_error({"fail": 500, "absent": 404}[fault])
        elif not fault or path.is_dir():
            super().do_GET()
        else:
            data = path.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if fault == "stall" else spoiled(data, fault))
            if fault == "stall":
                self.wfile.flush()
                RELEASED.wait(60)
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def faulty_get_file(faults: Faults, memory: MemoryFileSystem, rpath: str, lpath: str, **_: Any) -> None:
    fault = faults.of(rpath)
    if fault == "absent":
        raise FileNotFoundError(rpath)
    if fault == "fail":
        raise ConnectionError("the server failed")
    Path(lpath).write_bytes(spoiled(memory.cat_file(rpath), fault))


def write(folder: Path, kind: str, lines: list[list[str]], *more: str) -> None:
    texts = [folder.with_suffix(f".{side}") for side in range(len(lines))]
    for path, side in zip(texts, lines, strict=True):
        path.write_text("".join(f"{line}\n" for line in side))
    which = ["--text", texts[0], "--lang", "en"] if kind == "mono" else ["--src", texts[0], "--tgt", texts[1]]
    write_shards.main([str(word) for word in (kind, *which, "--out", folder, "--shard_lines", 30, *more)])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 shards of 30 pairs, and 4 of text, of which every tenth line is indexed in parts. Read only."""
    folder = tmp_path_factory.mktemp("remote") / "corpus"
    folder.mkdir()
    pairs = [World(0).pair(i) for i in range(240)]
    write(folder / "en-xx", "pairs", [[pair[side] for pair in pairs] for side in (0, 1)], "--langs", "en", "xx")
    text = [" ".join([pair[0]] * (100 if i % 10 == 0 else 1)) for i, pair in enumerate(pairs[:120])]
    write(folder / "en", "mono", [text], "--whole_lines")
    for path in folder.glob("*.[01]"):
        path.unlink()
    return folder


@pytest.fixture
def faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(remote, "STALL", 0.4 if given.get("fault") == "stall" else 20.0)
    monkeypatch.setattr(remote, "TOUCHED", 0.0)
    yield Faults()
    RELEASED.set()
    RELEASED.clear()


@pytest.fixture(params=["http", "memory"])
def url(request: pytest.FixtureRequest, corpus: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The corpus on a server, by http and in memory."""
    if request.param == "memory":
        monkeypatch.setattr(MemoryFileSystem, "store", {})
        monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
        monkeypatch.setattr(MemoryFileSystem, "get_file", partialmethod(partial(faulty_get_file, faults)))
        fsspec.filesystem("memory").put(str(corpus), "/some/corpus", recursive=True)
        yield "memory://some/corpus"
        return
    handler = type("Server", (Handler,), {"faults": faults})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(corpus.parent))) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/corpus"
        RELEASED.set()
        server.shutdown()


over_http = pytest.mark.parametrize("url", ["http"], indirect=True)
in_memory = pytest.mark.parametrize("url", ["memory"], indirect=True)


def records_of(source: Source) -> list[tuple]:
    """All that is read of a source."""
    places = [(shard, record) for shard, count in enumerate(source.counts) for record in range(count)]
    looks = [
        array.tolist()
        for shard in range(len(source.counts))
        for array in source.lengths_and_follows(shard, slice(None))
    ]
    return [looks, *((source.read(*place), source.continues_document(*place)) for place in places)]


def files_of(cache: Cache) -> list[Path]:
    return [path for path in cache.folder.glob("*/*.tar*") if path.suffix != ".lock"]


def open_spec(location: str | Path, demo: Path, cache: Path, *sets: str) -> RunSpec:
    sets = (f"model.tokenizer={demo / 'tokenizer'}", f"data.cache={cache}", "streams.tlm.samples=60", *sets)
    return resolve_run("xlm", ["streams.mlm.samples=20", *sets], [remote.location(str(location))]).calibrated()


def keys(run_spec: RunSpec) -> list[dict[str, list[str]]]:
    """The records of 10 steps, which are more than two epochs of pairs."""
    state = initial_state(run_spec.specs)
    return [batch.keys() for batch in run_spec.batches(Process(0, 1, 0, 1), "cpu", state, 10)]


def test_sources_are_those_of_the_disk(corpus: Path, url: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1 << 30)
    near, far = find_sources([corpus]), find_sources([url], cache)
    assert [source.name for source in far] == ["en", "en-xx"]
    assert [source.fingerprint for source in far] == [source.fingerprint for source in near]
    assert [records_of(source) for source in far] == [records_of(source) for source in near]
    (one,) = find_sources([remote.location(f"{url}/en-xx/")], cache)
    assert one.fingerprint == near[1].fingerprint and one.directory == far[1].directory
    with pytest.raises(UserError, match=r"nothing.*index\.json"):
        find_sources([f"{url}/nothing"], cache)


@pytest.mark.parametrize(("url", "workers"), [("http", 2), ("memory", 0)], indirect=["url"])
def test_a_run_consumes_what_it_would_from_disk(
    corpus: Path, url: str, demo: Path, tmp_path: Path, workers: int
) -> None:
    near, far = (open_spec(at, demo, tmp_path, f"data.workers={workers}") for at in (corpus, url))
    assert near.identity() == far.identity()
    with pytest.raises(UserError, match="training data of this run"):
        find_task_sources(EvalTask("heldout", [url]), far)
    assert keys(near) == keys(far)


@over_http
@pytest.mark.parametrize(
    ("name", "fault"),
    [*[("index.json", fault) for fault in ("fail", "stall")], *[("entries", fault) for fault in ("cut", "flip")],
     *[("tar", fault) for fault in ("fail", "cut", "flip", "lie", "stall")]],
)  # fmt: skip
def test_a_server_that_recovers(
    corpus: Path, url: str, faults: Faults, tmp_path: Path, name: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    near = Source(corpus / "en-xx")
    name = near.shards[3].name if name == "tar" else name
    faults.next[name] = [fault, fault, ""]
    (far,) = find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))
    assert records_of(far) == records_of(near)
    lines = [record.getMessage() for record in caplog.records if record.name == "xscale"]
    assert len(lines) == 2 and all(f"{url}/en-xx/{name}" in line for line in lines)


@over_http
@pytest.mark.parametrize(("fault", "tries"), [("fail", 3), ("absent", 1), ("cut", 3)])
def test_a_server_that_does_not_recover(
    url: str, faults: Faults, tmp_path: Path, fault: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TRIES", 3)
    (far,) = find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))
    name = far.shards[1].name
    faults.next[name] = [fault]
    far.read(0, 0)
    with pytest.raises(OSError) as caught:
        far.read(1, 0)
    code, message = explain(caught.value)
    assert code == MACHINE and faults.asked[name] == tries
    assert f"{url}/en-xx/{name}" in message and "start again" in message
    assert [path.name for path in files_of(far.remote.cache)] == [far.shards[0].name]


@in_memory
def test_a_run_ends_with_exit_code_4(
    url: str, faults: Faults, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It does so when a worker's shard does not come, and at its start."""
    monkeypatch.setattr(remote, "TRIES", 2)
    run_spec = open_spec(url, demo, tmp_path / "cache", "data.workers=1")
    for source in run_spec.sources:
        for shard in source.shards:
            (source.directory / shard.name).unlink(missing_ok=True)
            faults.next[shard.name] = ["cut"]
    with pytest.raises(OSError, match=rf"could not be fetched.*{url}/en") as caught:
        keys(run_spec)
    assert explain(caught.value)[0] == MACHINE
    sets = [f"model.tokenizer={demo / 'tokenizer'}", f"data.cache={tmp_path / 'cache'}"]
    run = ["--ds_config", "zero2_cpu", "--recipe", "xlm", "--data", url, "--out", str(tmp_path / "out"), "--dry_run"]
    assert train.main([*run, "--set", *sets]) == MACHINE
    assert f"error: {url}/en" in capsys.readouterr().err


@in_memory
def test_the_cache_is_bounded(corpus: Path, url: str, faults: Faults, tmp_path: Path) -> None:
    """The shards that were used last stay, removed ones leave the disk, and the records are the same."""
    near = Source(corpus / "en-xx")
    cache = Cache(tmp_path, int(3.5 * max(shard.bytes for shard in near.shards)))
    (far,) = find_sources([f"{url}/en-xx"], cache)
    places = [(shard, record) for shard in range(8) for record in range(30)]
    random.Random(0).shuffle(places)
    for place in places[:100]:
        assert far.read(*place) == near.read(*place)
        assert sum(path.stat().st_size for path in files_of(cache)) <= cache.size
        assert len(files_of(cache)) <= 3
    held = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [path for path in held if path.startswith(str(tmp_path)) and ".tar" in path]
    faults.asked.clear()
    for shard in range(1, 8):
        far.read(0, shard)
        far.read(shard, 0)
    assert faults.asked[far.shards[0].name] <= 1


@over_http
def test_processes_of_a_machine_fetch_once(corpus: Path, url: str, faults: Faults, tmp_path: Path) -> None:
    (far,) = find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))
    expected, context = records_of(Source(corpus / "en-xx")), multiprocessing.get_context("fork")
    readers = [context.Process(target=lambda: os._exit(records_of(far) != expected)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0, 0, 0]
    assert {shard.name: faults.asked[shard.name] for shard in far.shards} == {shard.name: 1 for shard in far.shards}
    find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))
    assert faults.asked["entries"] == 1  # a later start finds it


@in_memory
@pytest.mark.parametrize("keep_crc", [False, True])
def test_a_shard_in_the_cache_is_hashed_once_a_start(url: str, faults: Faults, tmp_path: Path, keep_crc: bool) -> None:
    """Others may have changed it, also with records whose checksums are right."""
    (far,) = find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))
    before, path = far.read(2, 5), far.directory / far.shards[2].name
    data = path.read_bytes()
    changed = data[: far.entries(2)["offset"][1]] + b"x" * (len(data) - far.entries(2)["offset"][1])
    path.write_bytes(data + b"x" if keep_crc else changed)
    (again,) = find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))
    assert again.read(2, 5) == before and again.read(2, 6) and faults.asked[path.name] == 2
    assert path.read_bytes() == data


@over_http
def test_a_download_is_bounded_by_its_declared_size(
    url: str, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: 299 MB were written for a shard of kilobytes."""
    (far,) = find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))
    most = 0

    def room(name: str) -> None:
        nonlocal most
        most = max(most, os.path.getsize(name))
        os.unlink(name)

    monkeypatch.setattr(remote, "TRIES", 1)
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: room(str(path)) if path.exists() else None)
    faults.next[far.shards[0].name] = ["flood"]
    with pytest.raises(OSError, match="the server sends more than"):
        far.read(0, 0)
    assert most < 20 << 20


@over_http
def test_a_redirection_to_another_host_is_refused(url: str, faults: Faults, tmp_path: Path) -> None:
    faults.next["index.json"] = ["http://169.254.169.254/index.json"]
    with pytest.raises(UserError, match=r"redirects to another host, 169\.254\.169\.254"):
        find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))
    faults.next["index.json"] = [f"{url}/en-xx/index.json?here", ""]
    assert find_sources([f"{url}/en-xx"], Cache(tmp_path, 1 << 30))


@in_memory
def test_a_source_that_has_changed_is_another_one(corpus: Path, url: str, tmp_path: Path) -> None:
    """A new index.json at the URL does not meet the shards of the old one."""
    cache = Cache(tmp_path, 1 << 30)
    (old,) = find_sources([f"{url}/en"], cache)
    files = fsspec.filesystem("memory")
    files.put(str(corpus / "en-xx"), "/some/changed/en", recursive=True)
    (new,) = find_sources(["memory://some/changed/en"], cache)
    assert new.directory != old.directory and new.fingerprint != old.fingerprint
    assert new.read(0, 0) == Source(corpus / "en-xx").read(0, 0)


@in_memory
def test_a_cache_that_is_too_small_is_refused(url: str, demo: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cache_gb: 1e-05.*cache_gb=0\.\d+"):
        open_spec(url, demo, tmp_path, "data.cache_gb=0.00001")
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        resolve_run("tlm", [f"data.cache={tmp_path}"], [url])


@pytest.mark.parametrize("missing", ["nonesuch://host/corpus", "s3://bucket/corpus"])
def test_a_protocol_without_its_package(tmp_path: Path, missing: str) -> None:
    with pytest.raises(UserError, match=f"{missing}.*(?i:protocol|install)"):
        find_sources([missing], Cache(tmp_path, 1))


@in_memory
def test_windows_are_fetched_before_they_are_read(
    url: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two windows the next one is fetched too, and every shard is asked for before a step needs it."""
    monkeypatch.setattr(order, "WINDOW_SHARDS", 2)
    for room, together in ((2.0, 4), (1.9, 2)):
        run_spec = open_spec(url, demo, tmp_path, "streams.tlm.samples=20")
        size = round(room * remote_window_bytes(run_spec.specs, run_spec.sources))
        for source in run_spec.sources:
            source.remote = replace(source.remote, cache=Cache(tmp_path, size))
        mixture = run_spec.mixture(Process(0, 1, 0, 1), "cpu", run_spec.specs, initial_state(run_spec.specs))
        pairs = next(number for number, source in enumerate(run_spec.sources) if source.kind == "pair")
        asked: set[int] = set()
        for step in range(12):
            new = [shard for source, shard in mixture.remote_shards() if source is run_spec.sources[pairs]]
            assert len(new) in ((0, 2, together) if step else (together,))
            asked |= set(new)
            of_step = mixture.next_batch().records["tlm"]
            drawn = set(np.unique(of_step.shard).tolist())
            assert drawn <= asked


@over_http
def test_the_planner_fetches_ahead(url: str, demo: Path, tmp_path: Path) -> None:
    """All shards of the windows come, though a step reads only two records and no further step is asked for."""
    sets = ["data.workers=1", "streams.tlm.samples=1", "streams.mlm.samples=1"]
    run_spec = open_spec(url, demo, tmp_path, *sets)
    for path in files_of(Cache(tmp_path, 0)):
        path.unlink()
    batches = run_spec.batches(Process(0, 1, 0, 1), "cpu", initial_state(run_spec.specs), 10_000)
    next(batches)
    deadline = time.monotonic() + 30
    while len([path for path in files_of(Cache(tmp_path, 0)) if path.suffix == ".tar"]) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.1)
