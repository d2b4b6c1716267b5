"""Shards at a URL: the same records as from disk, whatever the server answers. The disk is the reference."""

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
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
from xscale.data import remote
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.shards import Source, find_sources
from xscale.errors import UserError
from xscale.eval.in_training import find_and_check_task_sources
from xscale.ranks import Process
from xscale.recipe import EvalTask
from xscale.run.run_status import MACHINE, exit_code_and_message

pytestmark = pytest.mark.usefixtures("quick_calibration")
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
        else:
            self.send_bytes(Path(self.translate_path(self.path)).read_bytes(), fault)

    def send_bytes(self, data: bytes, fault: str) -> None:
        middle = len(data) // 2
        sent = {
            "cut": data[:middle],
            "stall": data[:middle],
            "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "lie": data.replace(b'"en"', b'"es"', 1),
        }[fault]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(sent)
        if fault == "stall":
            self.wfile.flush()
            time.sleep(5)
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
        listening.shutdown()


def open_pairs(server: type[Handler], folder: Path) -> Source:
    (source,) = find_sources([f"{server.url}/en-xx"], str(folder))
    return source


def records_of(source: Source) -> list[Any]:
    """All that is read of a source."""
    read: list[Any] = []
    for shard, count in enumerate(source.counts):
        read += [array.tolist() for array in source.byte_lengths_and_continuations(shard, slice(None))]
        for record in range(count):
            read.append((source.read(shard, record), source.continues_document(shard, record)))
    return read


def cached_shards(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.tar"))


def open_spec(location: str | Path, demo: Path, cache: Path, *sets: str, measured: bool = False) -> Loader:
    sets = (f"model.tokenizer={demo / 'tokenizer'}", f"data.cache={cache}", "streams.tlm.samples=60", *sets)
    sources = [remote.parse_location(f"{location}/{name}") for name in ("en", "en-xx")]
    return open_run("xlm", ["streams.mlm.samples=20", *sets], sources, measured)


def test_sources_are_those_of_the_disk(corpus: Path, server: type[Handler], tmp_path: Path) -> None:
    """By http, and by another protocol of fsspec."""
    near = find_sources([corpus])
    fsspec.filesystem("memory").put(str(corpus), "/some/corpus", recursive=True)
    for url in (server.url, "memory://some/corpus"):
        far = find_sources([f"{url}/en", remote.parse_location(f"{url}/en-xx/")], str(tmp_path))
        assert [source.fingerprint for source in far] == [source.fingerprint for source in near]
        assert [records_of(source) for source in far] == [records_of(source) for source in near]
        with pytest.raises(UserError, match=r"there is no index\.json at this URL\. Pass the URLs of folders"):
            find_sources([url], str(tmp_path))


def test_a_run_consumes_what_it_would_from_disk(
    corpus: Path, server: type[Handler], demo: Path, tmp_path: Path
) -> None:
    near, far = (open_spec(at, demo, tmp_path, "data.workers=2", measured=True) for at in (corpus, server.url))
    assert launch.identity(near) == launch.identity(far)
    with pytest.raises(UserError, match="this run trains on"):
        find_and_check_task_sources(EvalTask("heldout", [f"{server.url}/en"]), far.recipe, far.corpus)
    steps = 10  # more than two epochs of pairs
    near_keys, far_keys = (
        [batch.record_keys for batch in loader.batches(ALONE, "cpu", initial_state(loader.last_streams), steps)]
        for loader in (near, far)
    )
    assert near_keys == far_keys


@pytest.mark.parametrize(
    ("name", "fault"),
    [("index.json", "500"), ("entries", "cut"), ("entries", "flip"), ("tar", "500"), ("tar", "cut"), ("tar", "flip"),
     ("tar", "lie"), ("tar", "stall")],
)  # fmt: skip
def test_a_server_that_recovers(
    corpus: Path, server: type[Handler], tmp_path: Path, name: str, fault: str, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STALL", 1.0)
    near = Source(corpus / "en-xx")
    name = near.shards[3].name if name == "tar" else name
    server.faults[name] = [fault, fault, ""]
    assert records_of(open_pairs(server, tmp_path)) == records_of(near)
    lines = [record.getMessage() for record in caplog.records if record.name == "xscale"]
    assert len(lines) == 2 and all(f"{server.url}/en-xx/{name}" in line for line in lines)


@pytest.mark.parametrize(("fault", "tries", "problem"), [
    ("500", 2, "downloaded in 2 attempts"), ("404", 1, "does not have this file"), ("cut", 2, "not be downloaded"),
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
    assert f"{server.url}/en-xx/{name}" in message and problem in message and "start the run again" in message
    assert cached_shards(tmp_path) == []


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


def test_a_damaged_shard_in_the_cache_is_fetched_again(server: type[Handler], tmp_path: Path) -> None:
    far = open_pairs(server, tmp_path)
    before = far.read(2, 5)
    path = far.directory / far.shards[2].name
    data = path.read_bytes()
    first = far.index_entries(2)["offset"][1]
    path.write_bytes(data[:first] + b"x" * (len(data) - first))
    readers = [open_pairs(server, tmp_path) for _ in range(3)]
    for reader in readers:
        assert reader._open_file(path.name).pread(1, int(first)) == b"x"  # all have the damaged file open
    assert [reader.read(2, 5) for reader in readers] == [before] * 3 and server.requests[path.name] == 2
    assert path.read_bytes() == data


def test_a_server_that_is_not_there_or_lacks_the_entries(server: type[Handler], tmp_path: Path, monkeypatch) -> None:
    server.faults["entries"] = ["404"]
    with pytest.raises(UserError, match=r"has no file 'entries'\. Run `xscale data index`"):
        open_pairs(server, tmp_path)
    monkeypatch.setattr(remote, "TRIES", 2)
    with pytest.raises(OSError, match="could not be downloaded in 2 attempts"):
        find_sources(["ftp://127.0.0.1:1/corpus"], str(tmp_path))


@pytest.mark.parametrize("url", ["nonesuch://host/corpus", "s3://bucket/corpus"])
def test_an_unknown_protocol_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match=f"{url}.*(?i:protocol|install)"):
        find_sources([url], str(tmp_path))


def test_the_planner_fetches_ahead(server: type[Handler], demo: Path, tmp_path: Path) -> None:
    """All shards of the windows come, though a step reads only two records and no further step is asked for."""
    sets = ["data.workers=1", "streams.tlm.samples=1", "streams.mlm.samples=1"]
    loader = open_spec(server.url, demo, tmp_path, *sets)
    for path in cached_shards(tmp_path):
        path.unlink()
    next(loader.batches(ALONE, "cpu", initial_state(loader.last_streams), 10_000))
    deadline = time.monotonic() + 30
    while len(cached_shards(tmp_path)) < 12:
        assert time.monotonic() < deadline
        time.sleep(0.1)
