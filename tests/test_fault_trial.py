"""Two faults of the long trial (tests/fault_trial.py)."""

from pathlib import Path

import pytest

from tests import fault_trial


@pytest.mark.slow
def test_two_faults_lose_nothing(demo: Path, tmp_path: Path) -> None:
    assert len(fault_trial.trial(tmp_path, demo, faults=2, seed=123, launchers=["forked"])) == 2
