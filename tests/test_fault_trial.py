"""Six faults of the long trial (tests/fault_trial.py)."""

from pathlib import Path

import pytest

from tests import fault_trial


@pytest.mark.slow
def test_six_faults_lose_nothing(demo: Path, tmp_path: Path) -> None:
    """The faults hit a rank, all processes, the disk, metrics.jsonl and a shard; one is a preemption."""
    assert len(fault_trial.trial(tmp_path, demo, faults=6, seed=123)) >= 6
