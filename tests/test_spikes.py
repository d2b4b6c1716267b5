"""Spikes of the loss and the gradient norm: what is one, and what a run does at it."""

import json
import logging
import math
import multiprocessing
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests import launch
from xscale.checkpoint import store as checkpoints
from xscale.config import load_recipe
from xscale.errors import NotFinite, UserError
from xscale.objectives import OBJECTIVES
from xscale.ranks import HostGroup
from xscale.run.loop import Trainer
from xscale.run.metrics import SpikeDetector

FIRST, LAST = 40, 41
"""The steps of the planted spike."""


def entries(steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """A warm-up's fall and the noise of small batches."""
    random, found = np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        loss = (2 + 7 * math.exp(-step / 150)) * (1 + 0.04 * random.standard_normal())
        norm = (1 + 4 * math.exp(-step / 30)) * math.exp(0.25 * random.standard_normal())
        found.append({"step": step, "loss": loss, "grad_norm": norm, "skipped": 0})
    return found


def plain(curve: list[dict[str, Any]], border: int) -> list[set[str]]:
    """The metrics that spike in each step, by numpy."""
    found = []
    for entry in curve:
        found.append(set[str]())
        first = entry["step"] - 128
        window = [
            e for e in curve if first <= e["step"] < entry["step"] and (e["step"] > border) >= (entry["step"] > border)
        ]
        for name, scale, least, most in (("loss", np.arcsinh, 0.02, 6), ("grad_norm", np.log, 0.1, 15)):
            usable = [e[name] for e in [*window, entry] if not e["skipped"] and e[name] is not None]
            if entry["skipped"] or entry[name] is None or len(usable) < 33:
                continue
            *before, now = scale(np.array(usable))
            if (now - np.median(before)) / max(1.4826 * np.median(np.abs(np.diff(before))) / 2**0.5, least) > most:
                found[-1].add(name)
    return found


def spiky(steps: int = 400) -> list[dict[str, Any]]:
    """A curve with spikes, skipped steps, steps without numbers, losses below 0 and another level from step 221 on."""
    random, curve = np.random.default_rng(1), entries(steps)
    for entry in curve:
        entry["loss"] *= 3 if entry["step"] > 220 else 1
        entry["loss"] -= 2.5 if entry["step"] > 300 else 0
        kind = random.integers(12)
        if kind < 2:
            entry["loss" if kind else "grad_norm"] *= 1 + 100 * random.random()
        elif kind == 2:
            entry |= {"loss": None, "grad_norm": None, "skipped": 1}
        elif kind == 3:
            entry["grad_norm"] = None
    return curve


def test_it_agrees_with_numpy() -> None:
    curve = spiky()
    for border in (0, 220):
        detector, expected = SpikeDetector([0, border, 1000]), plain(curve, border)
        found = [{part.split()[0] for part in detector.find(entry).split(", ") if part} for entry in curve]
        assert found == expected
        assert {name for names in found for name in names} == {"loss", "grad_norm"}


def test_no_alarm_while_a_loss_falls() -> None:
    for seed in range(3):
        detector = SpikeDetector([0])
        assert not [line for line in map(detector.find, entries(2000, seed)) if line]


def test_another_level_is_no_spike_behind_a_border() -> None:
    for border in (0, 100):
        detector = SpikeDetector([border])
        found = [e["step"] for e in entries(200) if detector.find(e | {"loss": e["loss"] * (1 + (e["step"] > 100))})]
        assert found[:1] == ([] if border else [101])


def test_the_first_step_with_a_verdict() -> None:
    """The 33rd, also behind a border."""
    for border in (0, 10):
        for first in (border + 32, border + 33):
            detector = SpikeDetector([border])
            found = [detector.find(e | {"loss": 5.0 + 50 * (e["step"] == first)}) for e in entries(first)]
            assert any(found) == (first == border + 33)


def test_it_says_what_it_has_seen() -> None:
    detector, curve = SpikeDetector([0]), entries(600)
    assert not [line for line in map(detector.find, curve[:-1]) if line]
    said = detector.find(curve[-1] | {"loss": 20.0, "grad_norm": float("nan")})
    assert "loss 20 " in said and "128 steps" in said and "grad_norm" not in said
    assert not detector.find({"step": 601, "loss": None, "skipped": 1, "excluded": True})
    assert not detector.find(curve[-1] | {"step": 602, "grad_norm": 0.0}), "no logarithm"


def test_a_resume_decides_the_same() -> None:
    curve = spiky()
    whole = SpikeDetector([220])
    found = [whole.find(entry) for entry in curve]
    for cut in [1, 215, 230, *(i for i, line in enumerate(found) if line)]:
        resumed = SpikeDetector([220], curve[max(cut - 128, 0) : cut])
        assert [resumed.find(entry) for entry in curve[cut : cut + 20]] == found[cut : cut + 20], cut


def test_skip_needs_a_number_of_rollbacks(tmp_path: Path) -> None:
    def load(*sets: str) -> Any:
        return load_recipe("mlm", [f"train.{field}" for field in sets], {n: o.options for n, o in OBJECTIVES.items()})

    assert load("spikes=skip", "rollbacks=3").identity() == load().identity(), "a resume may choose another"
    assert load().train.spikes == "warn" and load("spikes=null").train.spikes is None
    with pytest.raises(UserError, match=r"train.spikes: skip.*rollbacks: 10"):
        load("spikes=skip")


def trainer(out: Path, spikes: str) -> Trainer:
    made = object.__new__(Trainer)
    made.recipe, made.out = SimpleNamespace(train=SimpleNamespace(spikes=spikes)), out  # type: ignore[assignment]
    made.process = SimpleNamespace(rank=0, is_main=True)  # type: ignore[assignment]
    made.host_group = SimpleNamespace(gather=lambda value: [value, value | {"rank": 1}])  # type: ignore[assignment]
    made.checkpoint_manager = SimpleNamespace(finish_save=lambda: None, good=30)  # type: ignore[assignment]
    made.quiet_until = 0
    return made


def test_the_records_are_named_and_the_run_warns_once_or_ends(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger("xscale"), "propagate", True)
    batch: Any = SimpleNamespace(keys=lambda: {"mlm": ["a", "b"]})
    made = trainer(tmp_path, "warn")
    for step in (40, 41, 168, 169):
        made.handle_spike(step, "loss 9", batch)
    assert [record.getMessage()[:16] for record in caplog.records] == ["step 40: loss 9;", "step 169: loss 9"]
    assert "train.skip_steps: [40]" in caplog.text and "spikes.jsonl" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "spikes.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 40, "what": "loss 9", "rank": 1, "keys": {"mlm": ["a", "b"]}} and len(lines) == 8
    for spikes, good in (("stop", None), ("skip", 30)):
        with pytest.raises(NotFinite, match=r"train.skip_steps: \[40\]") as raised:
            trainer(tmp_path, spikes).handle_spike(40, "loss 9", batch)
        assert (raised.value.step, raised.value.good) == (40, good)


def test_a_trainer_begins_with_the_run_s_last_steps_behind_its_borders(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries(300)))
    loud = {"step": 301, "loss": 90.0, "grad_norm": 1.0, "skipped": 0}
    for ends, appended_at, found in (([500], 0, True), ([280, 500], 0, False), ([500], 280, False), ([], 200, True)):
        made = trainer(tmp_path, "warn")
        made.reporter, made.run_spec = True, SimpleNamespace(phase_ends=lambda ends=ends: ends)  # type: ignore
        made.state = {"step": 300} | ({"appended_at": appended_at} if appended_at else {})
        detector = made.spike_detector()
        assert detector and bool(detector.find(loud)) == found, (ends, appended_at)
    made.reporter = None
    assert made.spike_detector() is None, "rank 0 alone has one"


def collectives(rank: int, folder: Path, found: Any) -> None:
    """On each rank, the collectives of two readings of the metrics, of which the second has a spike."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    made, told, curve = trainer(folder, "warn"), list[tuple[list[str], int, int]](), entries(102)
    made.host_group, count = HostGroup(), Counter[str]()
    made.spikes = SpikeDetector([0], curve[:100]) if rank == 0 else None
    made.host_group.barrier()
    for name in ("all_gather_object", "broadcast"):
        collective = getattr(dist, name)
        setattr(dist, name, lambda *a, name=name, do=collective, **k: (count.update([name]), do(*a, **k)))
    for entry in (curve[100], curve[101] | {"loss": 90.0}):
        count.clear()
        told.append((made.find_spikes([entry]), count["all_gather_object"], count["broadcast"]))
    found.put(told)
    made.host_group.barrier()


def test_ranks_exchange_a_number_unless_there_is_a_spike(tmp_path: Path) -> None:
    """No rank gets an object from every other."""
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    children = [context.Process(target=collectives, args=(rank, tmp_path, found)) for rank in range(2)]
    for child in children:
        child.start()
    first, second = (found.get(timeout=60) for _ in children)
    for child in children:
        child.join(timeout=30)
    assert first == second and first[0] == ([""], 0, 1)
    (spike,), gathers, _ = first[1]
    assert spike.startswith("loss 90 is") and not gathers


@pytest.mark.slow
def test_a_spike_is_left_out(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted spike of two steps costs two ways back, and the run has the bits of one that was told to leave them
    out, of one that was killed before the spike and resumed, and of one that stopped and was told then."""
    monkeypatch.setenv("POISON", f"spike:{FIRST}:{LAST - FIRST + 1}")
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    whole, told, killed, stopped = (tmp_path / name for name in ("whole", "told", "killed", "stopped"))
    skip, told_so = ("train.spikes=skip", "train.rollbacks=2"), (f"train.skip_steps=[{FIRST}-{LAST}]",)

    def arguments(out: Path, *fields: str) -> list[str]:
        head = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mlm", "--data", str(demo), "--out", str(out)]
        sets = ["streams.mlm.samples=4", "train.steps=46", "checkpoint.every=10", "checkpoint.keep=99", *fields]
        return [*head, "--set", "streams.mlm.objective=tests.poison:MLM", *sets]

    launch.run_all(2, tmp_path, [arguments(whole, *skip), arguments(told, "train.spikes=stop", *told_so)])
    for other in (killed, stopped):
        shutil.copytree(whole, other)
        for step in (40, 46):
            shutil.rmtree(other / f"checkpoints/step_{step:08d}")
        (other / "spikes.jsonl").unlink()
    code, output = launch.try_run(2, arguments(stopped, "train.spikes=stop"))
    assert code == 3 or "exitcode  : 3" in output, output[-3000:]
    assert f"train.skip_steps: [{FIRST}]" in output and str(stopped / "spikes.jsonl") in output
    assert json.loads((stopped / "status.json").read_text())["code"] == 3
    launch.run_all(2, tmp_path, [arguments(killed, *skip), arguments(stopped, *told_so)])

    assert [entry["step"] for entry in launch.metrics(whole) if entry.get("excluded")] == [FIRST, LAST]
    assert checkpoints.read_checkpoint(whole / "checkpoints/step_00000046").excluded_steps == [FIRST, LAST]
    for out in (whole, killed):
        lines = [json.loads(line) for line in (out / "spikes.jsonl").read_text().splitlines()]
        assert [(line["step"], line["rank"]) for line in lines] == [(s, r) for s in (FIRST, LAST) for r in (0, 1)]
        assert all(line["keys"]["mlm"] for line in lines) and "loss" in lines[0]["what"]
    last = launch.checkpoint_tensors(whole / "checkpoints/step_00000046")
    for other in (told, killed, stopped):
        assert launch.without_times(other) == launch.without_times(whole), other
        theirs = launch.checkpoint_tensors(other / "checkpoints/step_00000046")
        assert theirs.keys() == last.keys() and all(theirs[name].equal(last[name]) for name in last), other
