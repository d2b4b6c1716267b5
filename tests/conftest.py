"""Fixtures of the data path's tests: a small demo corpus, tools run as one rank or as several, plain readers."""

import json
import logging
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from data_tools import write_shards
from tests import demo_shards
from xscale.data import calibrate
from xscale.data.tokenizer import Tokenizer

LONGEST = ("benchmarks", "slurm", "recipes", "prepare", "training", "papers", "readme", "wheel", "step", "zero")
"""Files whose slow tests take minutes, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first, so that at the end no core waits for one: see `make test-slow`."""

    def turn(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=turn)


@pytest.fixture(autouse=True)
def log_and_environment_as_before() -> Iterator[None]:
    """A test that starts a run in this process leaves the logger and the launcher's variables as they were.

    pytest reads loggers that do not propagate as each test begins, so one that was left so would have its lines counted
    twice in the next test of `caplog`. accelerate makes a process group of a launcher's variables, and keeps it.
    """
    log = logging.getLogger("xscale")
    before, environment = (log.propagate, log.level, list(log.handlers)), dict(os.environ)
    yield
    log.propagate, level, log.handlers[:] = before
    log.setLevel(level)
    changed = dict(os.environ).items() ^ environment.items()
    for name in {name for name, _ in changed}:
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]


@pytest.fixture
def quick_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrations read an eighth of the samples: for tests in which their numbers do not matter."""
    monkeypatch.setattr(calibrate, "DRAWN", 256)
    monkeypatch.setattr(calibrate, "READ", 64)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo corpus with 600 pairs and 600 sentences of each language. Read only."""
    out = tmp_path_factory.mktemp("corpus") / "demo"
    demo_shards.build(out, pairs=600, mono=600)
    return out


REAL = Path(os.environ.get("XSCALE_REAL_DATA", Path(__file__).parents[2] / "shared" / "data"))
SAMPLE = Path(__file__).parent / "sample"
"""Sentences of the Universal Declaration of Human Rights, line by line in five languages: udhr.en, udhr.de ..."""


@pytest.fixture(scope="session")
def plain_texts() -> list[Path]:
    """Files of lines: those of the sample, and real text where there is some."""
    return [*sorted(SAMPLE.glob("udhr.*")), *sorted(REAL.glob("parallel/*/*")), *sorted(REAL.glob("mono/*/*"))]


@pytest.fixture(scope="session")
def real() -> Path:
    """Real text: $XSCALE_REAL_DATA, or ../shared/data beside the checkout. Read only."""
    path = REAL
    if not path.is_dir():
        pytest.skip("no real text: set XSCALE_REAL_DATA")
    return path


@pytest.fixture(scope="session")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer(demo / "tokenizer")


def tar_lines(path: Path) -> list[bytes]:
    """Every line of every .jsonl member, by tarfile alone."""
    with tarfile.open(path) as tar:
        return [line for member in tar for line in tar.extractfile(member).read().split(b"\n") if line]


@pytest.fixture(scope="session")
def shard_records() -> Callable[[Path], list[list[dict]]]:
    """shard_records(directory): the records of each shard, in order, by tarfile and json alone."""
    return lambda directory: [[json.loads(line) for line in tar_lines(tar)] for tar in sorted(directory.glob("*.tar"))]


@pytest.fixture
def corpus_files(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """corpus_files(src lines, tgt lines): two text files."""

    def write(src: list[str], tgt: list[str], suffix: str = "") -> tuple[Path, Path]:
        paths = tmp_path / f"c.en{suffix}", tmp_path / f"c.de{suffix}"
        for path, lines in zip(paths, (src, tgt), strict=True):
            path.write_bytes("".join(line + "\n" for line in lines).encode())
        return paths

    return write


@pytest.fixture
def write_pairs() -> Callable[..., None]:
    """write_pairs(src, tgt, out, "--option", ...): the command as a user runs it, in this process."""

    def run(src: Path, tgt: Path, out: Path, *options: object) -> None:
        argv = ["pairs", "--src", src, "--tgt", tgt, "--langs", "en", "de", "--out", out, *options]
        write_shards.main([str(argument) for argument in argv])

    return run
