"""The main job with real processes: equal at any number of ranks, exact after kills, loadable by others."""

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch
from xscale.step.ds_config import Hardware

pytestmark = pytest.mark.slow

STEPS = 20
SMALL = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mixed", "--set", "streams.ppa.queue_size=50"]
SMALL += [f"streams.{name}.samples=5" for name in ("mlm", "tlm", "alignlm", "ppa", "word_contrast")]
SMALL += ["streams.align_mlm.samples=3", "train.measure_every=0"]
SAMPLES = {"mlm": 6, "tlm": 20, "alignlm": 10, "ppa": 13, "word_contrast": 7, "align_mlm": 3}
"""Not divisible by the ranks: rows have other numbers of samples, some none of a stream."""
EXACT = ["--set", "model.dropout=0.0", *(f"streams.{name}.samples={n}" for name, n in SAMPLES.items())]


def arguments(demo: Path, out: Path, *more: str) -> list[str]:
    return [*SMALL, "--data", str(demo), "--out", str(out), *more]


@pytest.fixture(scope="module")
def reference(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uninterrupted steps on 2 ranks, dropout on, with a trace."""
    out = tmp_path_factory.mktemp("run") / "reference"
    launch.run(2, arguments(demo, out, "--steps", f"{STEPS}", "--trace", "--set", "checkpoint.every=4"))
    return out


def same_checkpoint(a: Path, b: Path) -> None:
    first, second = launch.checkpoint_tensors(a), launch.checkpoint_tensors(b)
    assert first.keys() == second.keys()
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert not differing, differing[:5]


def test_kills_and_a_signal_leave_no_trace(demo: Path, reference: Path, tmp_path: Path) -> None:
    """One rank is told to stop by SIGTERM: all save at the next step boundary and exit with 75 (tests/test_slurm.py has
    SIGUSR2). Then kill -9 of everything at a random moment. The end equals an uninterrupted run's."""
    out, last = tmp_path / "killed", f"checkpoints/step_{STEPS:08d}"
    run = arguments(demo, out, "--steps", f"{STEPS}", "--trace")
    process = launch.start(2, run, "deepspeed")
    wait_for(lambda: (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text()) > 0, 180)
    os.kill(launch.rank_pids(process)[-1], signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output[-3000:]
    step = steps_of(out)
    assert 0 < step < STEPS, output[-3000:]
    told = json.loads((out / "status.json").read_text())
    assert (told["status"], told["code"], told["step"]) == ("stopped", 75, step)

    def is_random_moment() -> bool:
        begun = steps_of(out) > step
        time.sleep(begun * random.random() * 0.5)
        return begun

    launch.fork_and_kill(2, [*run, "--set", "checkpoint.every=1"], is_random_moment)
    told = json.loads((out / "status.json").read_text())
    assert (told["status"], told["code"], told["step"]) == ("running", None, step), "the step after which it began"
    launch.run(2, [*run, "--set", "checkpoint.every=4"])
    same_checkpoint(out / last, reference / last)
    assert launch.without_times(out) == launch.without_times(reference)
    assert launch.trace(out) == launch.trace(reference)
    assert not list(out.glob("checkpoints/*.incomplete"))


def steps_of(out: Path) -> int:
    latest = out / "checkpoints/latest"
    return int(latest.read_text().removeprefix("step_")) if latest.exists() else -1


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def test_same_losses_at_any_cut(demo: Path, tmp_path: Path) -> None:
    """1, 2 and 4 ranks, rows of 200 to 100,000 tokens, of `mixed` and `dict_mlm`: the same losses, gradient norms and
    dictionary metrics to 1e-5, the same records. The cosine of dictionary entries rises."""
    cuts = {1: 100_000, 2: 200, 4: 400}
    for world, max_tokens in cuts.items():
        # A seed at which no unit of PPA's ReLU comes so near to 0 that rounding decides on which side it is.
        more = ["--steps", "5", "--trace", "--seed", "3", *EXACT[:2], f"train.max_tokens={max_tokens}"]
        dictionary = ["--recipe", "dict_mlm", "--data", str(demo), "--out", str(tmp_path / f"{world}/dict_mlm"), *more]
        dictionary += [*SMALL[:2], "--set", "streams.dict_mlm.samples=9", "train.measure_every=0"]
        mixed = arguments(demo, tmp_path / f"{world}/mixed", *more, *EXACT[2:])
        launch.run_all(world, tmp_path / f"{world}", [mixed, dictionary])
    for recipe, world in product(("mixed", "dict_mlm"), cuts):
        (ours, trace), (theirs, expected) = (
            (launch.metrics(out), {step: sorted(keys) for step, keys in launch.trace(out).items()})
            for out in (tmp_path / f"{world}" / recipe, tmp_path / "1" / recipe)
        )
        assert trace == expected, (recipe, world)
        for one, other in zip(ours, theirs, strict=True):
            for name in ("grad_norm", *(name for name in other if name.startswith(("loss", "dictionary")))):
                assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (recipe, world, one["step"], name)
            for name in ("tokens", "samples", *(name for name in other if name.startswith("count/"))):
                assert one[name] == other[name], (recipe, world, one["step"], name)
        cosines = [entry["dictionary_cosine/align_mlm"] for entry in ours if recipe == "mixed"]
        assert not cosines or cosines[-1] > cosines[0]
        assert all(0.05 < entry["dictionary_share/dict_mlm"] < 0.95 for entry in ours if recipe == "dict_mlm")


def test_zero_stage_3_trains_as_stage_2(demo: Path, tmp_path: Path) -> None:
    """The same losses, gradient norms and alignment scores. Then the run is made longer: its learning rate follows the
    new schedule from the first step on. tests/test_fp16.py has exact resumes at all stages."""
    sets = ["streams.alignlm.samples=8", "train.lr=0.002", "train.warmup=2", "train.measure_every=3"]
    sets += ["checkpoint.every=4", "model.dropout=0.0", f"data.lexicons=[{next((demo / 'lexicon').glob('*.txt'))}]"]

    def ds_config(stage: int) -> str:
        """The shipped file, without an overflow: what a skipped step had read is gone (tests/test_fp16.py)."""
        config = json.loads((launch.ROOT / "ds_configs" / f"zero{stage}_fp16.json").read_text())
        config["fp16"]["initial_scale_power"] = 8
        path = tmp_path / f"zero{stage}.json"
        path.write_text(json.dumps(config))
        return str(path)

    def words(stage: int, steps: int) -> list[str]:
        args = ["--ds_config", ds_config(stage), "--recipe", "alignlm", "--data", str(demo)]
        return [*args, "--out", str(tmp_path / str(stage)), "--steps", str(steps), "--set", *sets]

    launch.run_all(2, tmp_path, [words(2, 8), words(3, 8), words(3, 12)])
    expected, found = launch.metrics(tmp_path / "2"), launch.metrics(tmp_path / "3")
    whole, longer = found[:8], found[8:]
    for ours, theirs in zip(whole, expected, strict=True):
        names = {name for name in theirs if name.startswith(("loss", "alignment", "lr")) or name == "grad_norm"}
        near = 2e-3 if Hardware.of_this_process().fp16 else 1e-5
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=near)
    assert {"alignment/en-xx", "alignment_trained/en-xx"} <= whole[2].keys()
    lr = [entry["lr"] for entry in longer]
    assert lr[0] - lr[1] == pytest.approx(lr[1] - lr[2]) and lr[1] > lr[2] > 0


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
HPZ = {"stage": 3, "zero_hpz_partition_size": 2}
RESCALED: dict[str, tuple[Any, ...]] = {
    # ZeRO stages of a run's parts, each on another number of ranks
    "xlm": (0, OFFLOAD, 2),
    "xlm3": (HPZ, 0, 3),
    "mixed": (1, 2, 0),
    "bf16": ("1_bf16", "2_bf16", "3_bf16"),
}
RESCALED_TO = ((4, 2), (1, 5), (3, 9))
"""Ranks, and the step after which they stop, two steps later."""
OF_RESCALED = {
    "mixed": ["streams.ppa.queue_size=50", "train.measure_every=0", *EXACT[2:]],
    "xlm": ["streams.mlm.samples=6", "streams.tlm.samples=9", "train.measure_every=0"],
}


def rescaled_run(demo: Path, out: Path, name: str, stage: int | str | dict[str, Any]) -> list[str]:
    """Arguments of train.py. stage: of fp32, a whole zero_optimization, or the end of a shipped file's name."""
    path = launch.ROOT / "ds_configs" / f"zero{stage}.json"
    if not isinstance(stage, str):
        path = out / f"{name}.json"
        path.write_text(json.dumps({"zero_optimization": stage if isinstance(stage, dict) else {"stage": stage}}))
    recipe = name if name in OF_RESCALED else "xlm"
    sets = ["model.dropout=0.0", "data.workers=0", "train.warmup=2", "checkpoint.every=1000", *OF_RESCALED[recipe]]
    head = ["--ds_config", str(path), "--recipe", recipe, "--data", str(demo), "--out", str(out / name)]
    return [*head, "--steps", str(RESCALED_TO[-1][1]), "--set", *sets]


def test_rescale(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on 4, 1 and 3 ranks, at other ZeRO stages, has the losses of one on 1 rank at stage 2. In bf16,
    where each cut rounds otherwise, they come near."""

    def train(world: int, out: Path, stages: dict[str, Any]) -> None:
        out.mkdir(exist_ok=True)
        launch.run_all(world, out, [rescaled_run(demo, out, *item) for item in stages.items()])

    straight, moved = tmp_path / "straight", tmp_path / "moved"
    train(1, straight, {name: "2_bf16" if name == "bf16" else 2 for name in RESCALED})
    for part, (world, last) in enumerate(RESCALED_TO):
        monkeypatch.setenv("UNTIL", str(last))
        train(world, moved, {name: stages[part] for name, stages in RESCALED.items()})
    for name in RESCALED:
        for ours, theirs in zip(launch.metrics(moved / name), launch.metrics(straight / name), strict=True):
            assert ours["step"] == theirs["step"] and ours["lr"] == theirs["lr"]
            near = 2e-2 if name == "bf16" else 1e-4
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=near), (name, ours["step"])
        log = (moved / name / "run.log").read_text()
        starts = re.findall(r"on (\d+) rank\(s\) .* steps (\d+) to", log)
        assert [int(ranks) for ranks, _ in starts] == [world for world, _ in RESCALED_TO]
        assert int(starts[-1][1]) > RESCALED_TO[1][1]


def test_deepspeeds_own_tools_read_our_checkpoints(reference: Path, tmp_path: Path) -> None:
    folder = reference / "checkpoints"
    for module, args in [
        ("deepspeed.utils.zero_to_fp32", [str(folder), str(tmp_path / "fp32")]),
        (
            "deepspeed.checkpoint.ds_to_universal",
            ["--input_folder", str(folder / f"step_{STEPS:08d}"), "--output_folder", str(tmp_path / "universal")],
        ),
    ]:
        code, output = launch.fork(0, ["-m", module, *args], launch.environment())
        assert code == 0, output[-4000:]
    weights = torch.load(tmp_path / "fp32" / "pytorch_model.bin", weights_only=True)
    name = "encoder.lm.bert.encoder.layer.0.output.dense.weight"
    universal = torch.load(tmp_path / "universal" / "zero" / name / "fp32.pt", weights_only=False)["param"]
    assert torch.equal(weights[name].flatten(), universal.flatten())


def test_resume_refuses_what_changed(demo: Path, reference: Path, tmp_path: Path) -> None:
    """Other data, seed and recipe: an exit code and a line that names each field; nothing is touched."""
    other = tmp_path / "other"
    shutil.copytree(demo, other)
    shutil.rmtree(other / "mono_xx")
    before = sorted((path, path.stat().st_mtime_ns) for path in reference.rglob("*.pt"))
    code, output = launch.try_run(1, arguments(other, reference, "--seed", "3", "--set", "train.lr=0.5"))
    for named in ("train.lr: was 0.002, is now 0.5", "train.seed: was 0, is now 3", "data: was"):
        assert code != 0 and named in output, output[-3000:]
    assert before == sorted((path, path.stat().st_mtime_ns) for path in reference.rglob("*.pt"))


def test_launchers(demo: Path, reference: Path, tmp_path: Path) -> None:
    """mpirun starts the same run; so does deepspeed, which the run that is killed begins with."""
    out = tmp_path / "mpi"
    launch.run(2, arguments(demo, out, "--steps", f"{STEPS}", "--trace", "--set", "checkpoint.every=4"), "mpirun")
    assert launch.without_times(out) == launch.without_times(reference)
