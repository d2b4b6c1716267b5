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
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from data_tools import write_shards
from data_tools.demo_world import World
from tests import launch
from tests.launch import open_run
from xscale.data import order, remote
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state, remote_window_bytes
from xscale.data.remote import Cache
from xscale.data.shards import Source, find_sources
from xscale.errors import UserError
from xscale.eval.in_training import find_task_sources
from xscale.ranks import Process
from xscale.recipe import EvalTask
from xscale.run.folder import MACHINE, exit_code_and_message
from xscale.run.resolve import resolve_run

RELEASED = threading.Event()
"""It ends the answers that stall."""
ALONE = Process(0, 1, 0, 1)


class Handler(SimpleHTTPRequestHandler):
    """Answers with the next fault of a file, if there is one. The last fault of a list stays."""

    requests: Counter[str]
    faults: dict[str, list[str]]

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rpartition("/")[2]
        self.requests[name] += 1
        faults = self.faults.get(name, [""])
        fault = faults.pop(0) if len(faults) > 1 else faults[0]
        if not fault:
            super().do_GET()
        elif fault.isdigit():
            self.send_error(int(fault))
        elif fault.startswith("http"):
            self.send_response(302)
            self.send_header("Location", fault)
            self.end_headers()
        else:
            self.send_bytes(Path(self.translate_path(self.path)).read_bytes(), fault)

    def send_bytes(self, data: bytes, fault: str) -> None:
        middle = len(data) // 2
        sent = {
            "cut": data[:middle],
            "stall": data[:middle],
            "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "lie": data.replace(b'"en"', b'"es"', 1),
            "flood": data + bytes(300 << 20),
        }[fault]
        self.send_response(200)
        if fault != "flood":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(sent)
            self.wfile.flush()
        if fault == "stall":
            RELEASED.wait(60)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def write(folder: Path, kind: str, lines: list[list[str]], *more: str) -> None:
    texts = [folder.with_suffix(f".{side}") for side in range(len(lines))]
    for path, side in zip(texts, lines, strict=True):
        path.write_text("".join(f"{line}\n" for line in side))
    which = ["--text", texts[0], "--lang", "en"] if kind == "mono" else ["--src", texts[0], "--tgt", texts[1]]
    write_shards.main([str(word) for word in (kind, *which, "--out", folder, "--shard_lines", 30, *more)])
    for path in texts:
        path.unlink()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 shards of 30 pairs, and 4 of text, of which every tenth line is indexed in parts. Read only."""
    folder = tmp_path_factory.mktemp("remote") / "corpus"
    folder.mkdir()
    pairs = [World(0).pair(i) for i in range(240)]
    write(folder / "en-xx", "pairs", [[pair[side] for pair in pairs] for side in (0, 1)], "--langs", "en", "xx")
    text = [" ".join([pair[0]] * (100 if i % 10 == 0 else 1)) for i, pair in enumerate(pairs[:120])]
    write(folder / "en", "mono", [text], "--whole_lines")
    return folder


@pytest.fixture
def server(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Handler]]:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    handler = type("Server", (Handler,), {"faults": {}, "requests": Counter()})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(corpus.parent))) as listening:
        listening.daemon_threads, listening.block_on_close = True, False
        threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
        handler.url = f"http://127.0.0.1:{listening.server_port}/corpus"
        yield handler
        RELEASED.set()
        listening.shutdown()
    RELEASED.clear()


def open_pairs(server: type[Handler], folder: Path, size: int = 1 << 30) -> Source:
    (source,) = find_sources([f"{server.url}/en-xx"], Cache(folder, size))
    return source


def records_of(source: Source) -> list[Any]:
    """All that is read of a source."""
    read: list[Any] = []
    for shard, count in enumerate(source.counts):
        read += [array.tolist() for array in source.lengths_and_continuations(shard, slice(None))]
        for record in range(count):
            read.append((source.read(shard, record), source.continues_document(shard, record)))
    return read


def cached_shards(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.tar"))


def open_spec(location: str | Path, demo: Path, cache: Path, *sets: str, measured: bool = False) -> Loader:
    sets = (f"model.tokenizer={demo / 'tokenizer'}", f"data.cache={cache}", "streams.tlm.samples=60", *sets)
    return open_run("xlm", ["streams.mlm.samples=20", *sets], [remote.parse_location(str(location))], measured)


def test_sources_are_those_of_the_disk(corpus: Path, server: type[Handler], tmp_path: Path) -> None:
    """By http, and by another protocol of fsspec."""
    near = find_sources([corpus])
    fsspec.filesystem("memory").put(str(corpus), "/some/corpus", recursive=True)
    for url in (server.url, "memory://some/corpus"):
        far = find_sources([url], Cache(tmp_path, 1 << 30))
        assert [source.fingerprint for source in far] == [source.fingerprint for source in near]
        assert [records_of(source) for source in far] == [records_of(source) for source in near]
        (one,) = find_sources([remote.parse_location(f"{url}/en-xx/")], Cache(tmp_path, 1 << 30))
        assert one.fingerprint == near[1].fingerprint and one.directory == far[1].directory
        with pytest.raises(UserError, match=r"nothing.*index\.json"):
            find_sources([f"{url}/nothing"], Cache(tmp_path, 1 << 30))


def test_a_run_consumes_what_it_would_from_disk(
    corpus: Path, server: type[Handler], demo: Path, tmp_path: Path
) -> None:
    near, far = (open_spec(at, demo, tmp_path, "data.workers=2", measured=True) for at in (corpus, server.url))
    assert launch.identity(near) == launch.identity(far)
    with pytest.raises(UserError, match="training data of this run"):
        find_task_sources(EvalTask("heldout", [server.url]), far.recipe, far.corpus)
    steps = 10  # more than two epochs of pairs
    near_keys, far_keys = (
        [batch.keys() for batch in loader.batches(ALONE, "cpu", initial_state(loader.streams), steps)]
        for loader in (near, far)
    )
    assert near_keys == far_keys


@pytest.mark.parametrize(
    ("name", "fault"),
    [("index.json", "500"), ("index.json", "stall"), ("entries", "cut"), ("entries", "flip"),
     ("tar", "500"), ("tar", "cut"), ("tar", "flip"), ("tar", "lie"), ("tar", "stall")],
)  # fmt: skip
def test_a_server_that_recovers(
    corpus: Path, server: type[Handler], tmp_path: Path, name: str, fault: str, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STALL", 0.4 if fault == "stall" else 20.0)
    near = Source(corpus / "en-xx")
    name = near.shards[3].name if name == "tar" else name
    server.faults[name] = [fault, fault, ""]
    assert records_of(open_pairs(server, tmp_path)) == records_of(near)
    lines = [record.getMessage() for record in caplog.records if record.name == "xscale"]
    assert len(lines) == 2 and all(f"{server.url}/en-xx/{name}" in line for line in lines)


@pytest.mark.parametrize(("fault", "tries", "problem"), [
    ("500", 2, "could not be fetched in 2 tries"), ("404", 1, "no such file"), ("cut", 2, "could not be fetched"),
    ("flood", 2, "sends more than"),
])  # fmt: skip
def test_a_server_that_does_not_recover(
    server: type[Handler], tmp_path: Path, fault: str, tries: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the machine names the URL, and nothing stays in the cache."""
    monkeypatch.setattr(remote, "TRIES", 2)
    far = open_pairs(server, tmp_path)
    name = far.shards[1].name
    server.faults[name] = [fault]
    with pytest.raises(OSError) as caught:
        far.read(1, 0)
    code, message = exit_code_and_message(caught.value)
    assert code == MACHINE and server.requests[name] == tries
    assert f"{server.url}/en-xx/{name}" in message and problem in message and "start again" in message
    assert cached_shards(tmp_path) == []


def test_a_redirection_to_another_host_is_refused(server: type[Handler], tmp_path: Path) -> None:
    server.faults["index.json"] = ["http://169.254.169.254/index.json"]
    with pytest.raises(UserError, match=r"redirects to another host, 169\.254\.169\.254"):
        open_pairs(server, tmp_path)
    server.faults["index.json"] = [f"{server.url}/en-xx/index.json?here", ""]
    assert open_pairs(server, tmp_path)


def test_the_cache_is_bounded(corpus: Path, server: type[Handler], tmp_path: Path) -> None:
    """The shards that were used last stay, removed ones leave the disk, and the records are the same."""
    near = Source(corpus / "en-xx")
    far = open_pairs(server, tmp_path, size=int(3.5 * max(shard.bytes for shard in near.shards)))
    places = [(shard, record) for shard in range(8) for record in range(30)]
    random.Random(0).shuffle(places)
    for place in places[:100]:
        assert far.read(*place) == near.read(*place)
        assert len(cached_shards(tmp_path)) <= 3
    held = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [path for path in held if path.startswith(str(tmp_path)) and ".tar" in path]
    server.requests.clear()
    for shard in range(1, 8):
        far.read(0, shard)
        far.read(shard, 0)
    assert server.requests[far.shards[0].name] <= 1


def test_processes_of_a_machine_fetch_once(corpus: Path, server: type[Handler], tmp_path: Path) -> None:
    """At once, however many sessions with the server they have from the process that forked them."""
    far, *_ = (open_pairs(server, tmp_path) for _ in range(20))
    expected, begun = records_of(Source(corpus / "en-xx")), time.monotonic()
    context = multiprocessing.get_context("fork")
    readers = [context.Process(target=lambda: os._exit(records_of(far) != expected)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0, 0, 0] and time.monotonic() - begun < 15
    open_pairs(server, tmp_path)
    assert {server.requests[name] for name in ("entries", *(shard.name for shard in far.shards))} == {1}


@pytest.mark.parametrize("keep_crc", [False, True])
def test_a_shard_in_the_cache_is_hashed_once_a_start(server: type[Handler], tmp_path: Path, keep_crc: bool) -> None:
    """Others may have changed it, also with records whose checksums are right."""
    far = open_pairs(server, tmp_path)
    before = far.read(2, 5)
    path = far.directory / far.shards[2].name
    data = path.read_bytes()
    first = far.entries(2)["offset"][1]
    path.write_bytes(data + b"x" if keep_crc else data[:first] + b"x" * (len(data) - first))
    assert open_pairs(server, tmp_path).read(2, 5) == before and server.requests[path.name] == 2
    assert path.read_bytes() == data


def test_a_cache_that_is_too_small_is_refused(server: type[Handler], demo: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cache_gb: 1e-05.*cache_gb=0\.\d+"):
        open_spec(server.url, demo, tmp_path, "data.cache_gb=0.00001")
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        resolve_run("tlm", [f"data.cache={tmp_path}"], [server.url])
    for missing in ("nonesuch://host/corpus", "s3://bucket/corpus"):
        with pytest.raises(UserError, match=f"{missing}.*(?i:protocol|install)"):
            find_sources([missing], Cache(tmp_path, 1))


@pytest.mark.parametrize(("room", "together"), [(2.0, 4), (1.9, 2)])
def test_windows_are_fetched_before_they_are_read(
    server: type[Handler], demo: Path, tmp_path: Path, room: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two windows the next one is fetched too, and every shard is asked for before a step needs it."""
    monkeypatch.setattr(order, "WINDOW_SHARDS", 2)
    loader = open_spec(server.url, demo, tmp_path, "streams.tlm.samples=20")
    size = round(room * remote_window_bytes(loader.streams, loader.corpus.sources))
    for source in loader.corpus.sources:
        source.remote = replace(source.remote, cache=Cache(tmp_path, size))
    mixture = loader.mixture(ALONE, "cpu", initial_state(loader.streams))
    (pairs,) = (source for source in loader.corpus.sources if source.kind == "pair")
    asked: set[int] = set()
    for step in range(12):
        new = [pairs.shards.index(shard) for remote, shard in mixture.remote_shards() if remote is pairs.remote]
        assert len(new) in ((0, 2, together) if step else (together,))
        asked |= set(new)
        assert set(mixture.next_plan().tables["tlm"].shard.tolist()) <= asked


def test_the_planner_fetches_ahead(server: type[Handler], demo: Path, tmp_path: Path) -> None:
    """All shards of the windows come, though a step reads only two records and no further step is asked for."""
    sets = ["data.workers=1", "streams.tlm.samples=1", "streams.mlm.samples=1"]
    loader = open_spec(server.url, demo, tmp_path, *sets)
    for path in cached_shards(tmp_path):
        path.unlink()
    next(loader.batches(ALONE, "cpu", initial_state(loader.streams), 10_000))
    deadline = time.monotonic() + 30
    while len(cached_shards(tmp_path)) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.1)
