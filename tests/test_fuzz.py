"""200 cases of tests/fuzz.py, in this process; `python tests/fuzz.py --cases 2000` runs more, and the real commands."""

from pathlib import Path

import pytest

from tests import fuzz

IN_PROCESS = [kind for kind in fuzz.KINDS if kind not in ("process", "command")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    demo = tmp_path_factory.mktemp("fuzz") / "demo"
    fuzz.demo_corpus.build(demo, pairs=60, mono=60)
    return demo


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_every_case_ends_well_or_with_a_line_that_helps(kind: str, world: Path, tmp_path: Path) -> None:
    cases = [number for number, (of, _) in enumerate(fuzz.plan(20, 210, IN_PROCESS)) if of == kind]
    results = [fuzz.run_case(kind, number, world, tmp_path / str(number)) for number in cases]
    assert [f"{result.seed}: {result.detail}" for result in results if result.outcome == "found"] == []
    assert any(result.outcome == "good" for result in results), "one-sided: nothing that is to be taken is tried"
