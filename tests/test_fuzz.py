"""160 cases of tests/fuzz.py; `python tests/fuzz.py --cases 2000` runs more."""

from pathlib import Path

import pytest

from tests import fuzz


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    demo = tmp_path_factory.mktemp("fuzz") / "demo"
    fuzz.demo_shards.build(demo, pairs=60, mono=60)
    return demo


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_every_case_ends_well_or_with_a_line_that_helps(kind: str, world: Path, tmp_path: Path) -> None:
    cases = [number for number, (of, _) in enumerate(fuzz.plan(20, 160, [])) if of == kind]
    results = [fuzz.run_case(kind, number, world, tmp_path / str(number)) for number in cases]
    assert [f"{result.seed}: {result.detail}" for result in results if result.outcome == "found"] == []
    assert any(result.outcome == "good" for result in results), "one-sided: nothing that is to be taken is tried"
