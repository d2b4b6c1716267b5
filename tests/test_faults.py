"""Nothing that goes wrong looks like success: numbers that are none, damaged folders, foreign code."""

import contextlib
import errno
import json
import os
import pickle
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests import launch
from tests.test_training import wait_for
from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.data.corpus import run_identity
from xscale.data.mixture import initial_state
from xscale.data.shards import FOLLOWS, IDX_DTYPE, Source
from xscale.data.tokenizer import Tokenizer
from xscale.errors import LOG, UserError
from xscale.files import Lock
from xscale.models.build import read_model_and_has_trained_head, xscale_field_of_init
from xscale.ranks import CpuGroup, Process
from xscale.run import resume, run_status
from xscale.run.resolve import resolve_run
from xscale.run.resume import ANCESTRY, began_at_checkpoint, find_resume_checkpoint, write_ancestry
from xscale.run.run_status import Status

# Files


def zeroed(entries: np.ndarray) -> bytes:
    return bytes(entries.nbytes)


def cut_off(entries: np.ndarray) -> bytes:
    return entries.tobytes()[: 5 * IDX_DTYPE.itemsize + 3]


def wrong_entry(field: str, value: int) -> Callable[[np.ndarray], bytes]:
    def damaged(entries: np.ndarray) -> bytes:
        entries[field][5] = value
        return entries.tobytes()

    return damaged


def flipped_border(entries: np.ndarray) -> bytes:
    """No record's own checksum covers it."""
    entries["length"][7] ^= FOLLOWS
    return entries.tobytes()


WRONG_ENTRIES = [wrong_entry(field, value) for field in ("offset", "length", "crc32") for value in (0xFFFFFFFF, 77)]


@pytest.mark.parametrize("damaged", [zeroed, cut_off, flipped_border, *WRONG_ENTRIES])
def test_damaged_entries_are_seen_before_any_record_is_read(
    tmp_path: Path, demo: Path, damaged: Callable[[np.ndarray], bytes]
) -> None:
    shutil.copytree(demo / "mono_en", tmp_path / "mono")
    path = tmp_path / "mono" / "entries"
    path.write_bytes(damaged(np.fromfile(path, dtype=IDX_DTYPE)))
    for look in (
        lambda source: source.read(0, 4),
        lambda source: source.byte_lengths_and_continuations(0, slice(None))[1],
    ):
        with pytest.raises(UserError, match=rf"{path} does not have the checksums .*xscale data index"):
            look(Source(tmp_path / "mono"))


# A run's folder


class Code:
    """Writes a file as it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def seal(step: Path, number: int, changes: dict[str, Any] | None = None) -> None:
    """A manifest of what is in the folder, with these fields changed."""
    files = {path.name: checkpoints.sync_and_hash(path) for path in step.iterdir() if path.name != checkpoints.MANIFEST}
    sound = {"step": number, "world_size": 1, "identity": {"a": 1}, "state": {"step": number}, "files": files}
    sound |= {"calibration": {"lines": []}, "engine": {"stage": 2}}
    (step / checkpoints.MANIFEST).write_text(checkpoints.manifest_json_with_hash(sound | (changes or {})))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints of a run, of tensors alone."""
    for number in (4, 8):
        step = tmp_path / f"run/checkpoints/step_{number:08d}"
        step.mkdir(parents=True)
        torch.save({"w": torch.ones(3)}, step / "mp_rank_00_model_states.pt")
        seal(step, number)
    return tmp_path / "run"


def test_other_special_tokens_are_another_run(demo: Path, tmp_path: Path) -> None:
    """tokenizer.json does not say which they are."""
    shutil.copytree(demo / "tokenizer", tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    before, other = fields["mask_token"], fields["unk_token"]
    same = Tokenizer(demo / "tokenizer")
    path.write_text(json.dumps(fields | {"mask_token": other, "unk_token": before}))
    changed = Tokenizer(tmp_path / "tokenizer")
    assert changed.fingerprint == same.fingerprint and changed.mask_id != same.mask_id
    was, now = (
        run_identity(*resolve_run("tlm", [f"model.tokenizer={directory}"], [demo / "pairs"]))
        for directory in (demo / "tokenizer", path.parent)
    )
    with pytest.raises(UserError, match=rf"special_tokens\.mask: was {same.mask_id}, is now {changed.mask_id}"):
        step = tmp_path / "run/checkpoints/step_00000001"
        step.mkdir(parents=True)
        torch.save({}, step / "mp_rank_00_model_states.pt")
        seal(step, 1, {"identity": was})
        run_status.check_folder_is_free_or_own(tmp_path / "run", now, "auto")


def test_another_s_code_is_never_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that brings its code: nobody is asked on the console, and the line says why it is refused."""
    (tmp_path / "m").mkdir()
    code = {"AutoConfig": "c.C", "AutoModelForMaskedLM": "c.M", "AutoTokenizer": ["c.T", "c.T"]}
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "none_such", "auto_map": code}))
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"auto_map": code}))
    (tmp_path / "m" / "c.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nC = M = T = None\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("signal.alarm", lambda *_: 0)
    for load in (lambda p: read_model_and_has_trained_head(p), Tokenizer, xscale_field_of_init):
        with contextlib.suppress(UserError):
            load(tmp_path / "m")
    with pytest.raises(UserError, match=r"model\.init .*m cannot be loaded"):
        read_model_and_has_trained_head(tmp_path / "m")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["./absent", "runs/absent", "runs/deep/absent", "a/b/c", "../absent"])
def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(
    name: str, tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    named = name.removeprefix("./")
    for sets in ([f"model.init={name}", "train.lr=5e-5"], [f"model.tokenizer={name}"]):
        with pytest.raises(UserError, match=rf"(model\.init|tokenizer) \S*{named} does not exist"):
            resolve_run("tlm", sets, [demo / "pairs"])
    with pytest.raises(UserError, match=rf"model\.init {name} does not exist"):
        read_model_and_has_trained_head(name)
    with pytest.raises(UserError, match=rf"model\.init owner/absent cannot be loaded from {tmp_path}/owner/absent"):
        read_model_and_has_trained_head("owner/absent")
    with pytest.raises(UserError, match=rf"tokenizer owner/absent cannot be loaded from {tmp_path}/owner/absent"):
        Tokenizer("owner/absent")


def newest(run: Path) -> int | None:
    found = find_resume_checkpoint(run, "auto", CpuGroup())
    return found and found.step


def test_foreign_code_in_a_checkpoint_is_not_run(run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints/step_00000008"
    torch.save({"w": torch.ones(3), "x": Code(tmp_path / "owned")}, step / "mp_rank_00_model_states.pt")
    seal(step, 8)
    problem = checkpoints.find_damage(step, CpuGroup())
    assert problem and "posix.mkdir" in problem and "may run code" in problem
    assert newest(run) == 4 and not (tmp_path / "owned").exists()
    (step / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Code(tmp_path / "owned")))
    seal(step, 8)
    assert newest(run) == 4 and not (tmp_path / "owned").exists()


def test_files_that_no_manifest_knows(run: Path) -> None:
    torch.save({}, run / "checkpoints/step_00000008/zero_pp_rank_9_mp_rank_00_optim_states.pt")
    assert newest(run) == 4


@pytest.mark.parametrize("damage", ["{}", "", "[]", '{"step": 8}', "not json", pytest.param("[" * 100_000, id="deep")])
def test_a_broken_manifest_means_the_one_before(run: Path, damage: str) -> None:
    manifest = run / "checkpoints/step_00000008" / checkpoints.MANIFEST
    manifest.write_text(damage)
    assert newest(run) == 4
    remedy = f"Use another checkpoint, such as an earlier folder step_N in {run}/checkpoints"
    said = rf"^{manifest.parent} is not a usable checkpoint\. {manifest}: the (key|content) [^.]*\. {remedy}$"
    with pytest.raises(UserError, match=said):
        checkpoints.read_checkpoint(manifest.parent)
    said = rf"^checkpoint {manifest.parent} cannot be used\. manifest\.json: the [^.]*\. {remedy}$"
    with pytest.raises(UserError, match=said):
        find_resume_checkpoint(run, str(manifest.parent), CpuGroup())


@pytest.mark.parametrize("damage", ["missing", "link to nothing", "loop of links"])
def test_a_folder_without_a_manifest_means_the_checkpoint_before(run: Path, damage: str) -> None:
    manifest = run / "checkpoints/step_00000008" / checkpoints.MANIFEST
    manifest.unlink()
    if damage != "missing":
        manifest.symlink_to("absent" if damage == "link to nothing" else manifest.name)
    assert newest(run) == 4


def test_status_and_ancestry_of_deep_json_are_as_absent(tmp_path: Path) -> None:
    for name in (run_status.STATUS, ANCESTRY):
        (tmp_path / name).write_text("[" * 100_000)
    assert run_status.read_status(tmp_path) == {}
    assert not began_at_checkpoint(tmp_path, "parent@4")
    (tmp_path / ANCESTRY).write_text("[3]")
    assert not began_at_checkpoint(tmp_path, "parent@4")


@pytest.mark.parametrize("linked", ["run", "run/checkpoints", "run/checkpoints/step_00000004"])
def test_a_fork_of_a_checkpoint_behind_a_link_is_known_again(
    run: Path, tmp_path: Path, linked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a checkpoint in an archive. The second start of the fork's command continues the fork."""
    monkeypatch.chdir(tmp_path)
    elsewhere = Path("elsewhere", "of another name")
    elsewhere.parent.mkdir()
    Path(linked).rename(elsewhere)
    Path(linked).symlink_to(elsewhere.resolve())
    begin = checkpoints.read_checkpoint(Path("run/checkpoints/step_00000004"))
    Path("fork").mkdir()
    write_ancestry(Path("fork"), begin, begin.identity)
    assert began_at_checkpoint(Path("fork"), "run@4") and not began_at_checkpoint(Path("fork"), "run@8")


def test_a_complete_run_as_the_beginning_of_another_is_named_by_its_flag(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "with_corpus_positions", lambda checkpoint, *_: checkpoint)
    monkeypatch.setattr(resume, "check_engine_can_load", lambda *_: None)
    args, recipe = Namespace(out=tmp_path / "new", resume=str(run), fork=None), Namespace(train=Namespace(steps=8))
    with pytest.raises(
        UserError, match=rf"^--resume {run}: the checkpoint has done 8 steps, but train.steps is only 8"
    ):
        resume.find_starting_checkpoint(args, recipe, Any, {"a": 1}, Any, CpuGroup())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["config.yaml", checkpoints.LATEST])
def test_a_loop_of_links_in_the_place_of_an_output_is_the_machines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(name)
    with pytest.raises(OSError) as caught:
        files.write_text(tmp_path / name, "text")
    code, message = run_status.exit_code_and_message(caught.value)
    assert code == run_status.MACHINE and message.startswith(f"{tmp_path / name}: Too many levels of symbolic links")


def test_a_named_pipe_in_the_place_of_a_manifest_is_named(run: Path) -> None:
    """Opening it would wait forever."""
    pipe = run / "checkpoints" / "step_00000008" / checkpoints.MANIFEST
    pipe.unlink()
    os.mkfifo(pipe)
    assert newest(run) == 4
    with pytest.raises(UserError, match=r"manifest\.json: the file is a named pipe"):
        checkpoints.read_checkpoint(pipe.parent)


@pytest.mark.parametrize(
    "name", ["status.json", "lock", "run.log", "metrics.jsonl", "logs/rank0.log", "trace/rank0.jsonl", ANCESTRY]
)
def test_a_named_pipe_in_a_run_is_named(run: Path, name: str) -> None:
    """Opening it would wait forever, also to write why the start has failed."""
    (run / name).parent.mkdir(exist_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=rf"^{run / name} is a named pipe instead of a file\. Remove ") as taken:
        run_status.check_folder_is_free_or_own(run, {"a": 1}, "auto")
    for error in (taken.value, UserError("no such field")):
        Status(run, Process(0, 1, 0, 1)).record_failure(error)
    assert (run / name).is_fifo()


def test_a_named_pipe_in_the_place_of_an_index_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(UserError, match=r"index.json is a named pipe instead of a file"):
        Source(tmp_path)


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    said = rf"{tmp_path} is not a (usable )?checkpoint.*manifest\.json.* Use "
    with pytest.raises(UserError, match=f"^{said}"):
        checkpoints.read_checkpoint(tmp_path)
    with pytest.raises(UserError, match=f"^{said}"):
        checkpoints.resolve_checkpoint(tmp_path)
    with pytest.raises(UserError, match=f"^{said}"):
        find_resume_checkpoint(tmp_path, str(tmp_path), CpuGroup(alone=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {}},
        {"files": None},
        {"files": {"a": None}},
        {"step": "8"},
        {"step": 5},
        {"world_size": "1"},
        {"state": {}},
        {"engine": None},
    ],
    ids=str,
)
def test_a_manifest_that_is_not_sound_is_passed_over(
    run: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(run / "checkpoints/step_00000008", 8, changes)
    said: list[str] = []
    monkeypatch.setattr(LOG, "warning", said.append)
    found = checkpoints.find_newest_undamaged(run / "checkpoints", CpuGroup())
    assert found is not None and found.step == 4
    assert len(said) == 1 and "step_00000008" in said[0] and "tries the next older checkpoint" in said[0]


def test_a_manifest_of_another_version_is_refused_by_its_keys(run: Path) -> None:
    newest = run / "checkpoints/step_00000008"
    seal(newest, 8, {"excluded_steps": []})  # of version 0.2, in a run that never went back
    assert checkpoints.read_checkpoint(newest).step == 8
    seal(newest, 8, {"excluded_steps": [5]})
    with pytest.raises(UserError, match=r"key `excluded_steps` shows that another .* names the version\. Use another"):
        checkpoints.read_checkpoint(newest)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_file_means_the_one_before(run: Path, damage: str) -> None:
    path = run / "checkpoints/step_00000008/mp_rank_00_model_states.pt"
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: {"cut": 100, "empty": 0}.get(damage)])
    if damage == "gone":
        path.unlink()
    assert newest(run) == 4


def test_a_copy_of_a_checkpoint_is_none(run: Path) -> None:
    for name in ("step_00000004.copy", "step_00000004-old", "step_9", "step_00000009"):
        shutil.copytree(run / "checkpoints/step_00000004", run / "checkpoints" / name)
    assert newest(run) == 8


def test_a_checkpoint_is_no_run(run: Path) -> None:
    step = run / "checkpoints/step_00000008"
    assert newest(step) is None
    with pytest.raises(UserError, match="is not a run of xscale"):
        run_status.check_folder_is_free_or_own(step, {"a": 1}, "auto")


def test_a_folder_belongs_to_the_run_of_its_newest_readable_checkpoint(run: Path) -> None:
    (run / "checkpoints/step_00000008" / checkpoints.MANIFEST).write_text("{")
    run_status.check_folder_is_free_or_own(run, {"a": 1}, "auto")
    with pytest.raises(UserError, match=f"has a run with other settings.*model.init={run}"):
        run_status.check_folder_is_free_or_own(run, {"a": 2}, "auto")
    with pytest.raises(UserError, match="already has a run"):
        run_status.check_folder_is_free_or_own(run, {"a": 1}, "never")


def test_metrics_without_a_checkpoint_are_a_reason_to_ask(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert newest(run) == 8
    for manifest in run.rglob(checkpoints.MANIFEST):
        manifest.unlink()
    with pytest.raises(
        UserError, match=r"has trained, but .* has no undamaged checkpoint\. A checkpoint without manifest\.json"
    ):
        newest(run)
    (run / "metrics.jsonl").unlink()
    assert newest(run) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["state"].update(taken=[9]),
        lambda manifest: manifest.update(world_size=2),
        lambda manifest: manifest["identity"].update(a=2),
        lambda manifest: manifest.pop(checkpoints.OWN_HASH),
    ],
)
def test_a_manifest_that_was_changed_is_none(run: Path, change) -> None:
    """It has a hash of its own."""
    path = run / "checkpoints/step_00000008" / checkpoints.MANIFEST
    assert newest(run) == 8
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert newest(run) == 4


# Numbers


@pytest.mark.slow
def test_ranks_end_with_their_launcher(demo: Path, tmp_path: Path) -> None:
    """kill -9 of `deepspeed` alone leaves its ranks: they save at the next step and are gone."""
    out = tmp_path / "out"
    run = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mlm", "--data", str(demo), "--out", str(out)]
    process = launch.start(2, [*run, "--steps", "5000", "--set", "streams.mlm.samples=4"], "deepspeed")
    wait_for(lambda: (out / "metrics.jsonl").exists() and len(launch.metrics(out)) > 0, 180)
    ranks = [psutil.Process(pid) for pid in launch.rank_pids(process)]
    assert len(ranks) == 2
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for rank in alive:
        rank.kill()
    assert not alive and "the launcher of the run has ended" in (out / "run.log").read_text()
    assert checkpoints.list_checkpoints(out / "checkpoints")[-1].name != "step_00000000"


@pytest.mark.slow
def test_one_rank_cannot_read_its_records(demo: Path, tmp_path: Path) -> None:
    """While the others save the step before: that step is saved, all ranks end, and say which record it was."""
    shutil.copytree(demo / "pairs", tmp_path / "pairs")
    run = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "tlm", "--out", str(tmp_path / "out"), "--set"]
    run += [f"model.tokenizer={demo / 'tokenizer'}", "train.steps=12", "checkpoint.every=1", "checkpoint.keep=99"]
    run += ["streams.tlm.samples=16", "data.workers=0", "--data", str(tmp_path / "pairs")]
    loader = launch.loader_of(run)
    *_, fifth = islice(loader.batches(Process(1, 2, 1, 2), "cpu", initial_state(loader.last_streams), 5), 5)
    (source,) = loader.corpus.sources
    places = [(shard, n) for shard, count in enumerate(source.counts) for n in range(count)]
    for key in fifth.record_keys["tlm"]:
        shard, number = next(place for place in places if source.read(*place).key == key)
        path = source.directory / source.shards[shard].name
        undamaged = path.read_bytes()
        at = int(source.index_entries(shard)["offset"][number]) + 20
        path.write_bytes(undamaged[:at] + b"\0" + undamaged[at + 1 :])
        try:
            launch.loader_of(run)
            break
        except UserError:  # the calibration before step 1 reads this record; take another one
            path.write_bytes(undamaged)
    code, output = launch.try_run(2, run)
    assert code and json.loads((tmp_path / "out/status.json").read_text())["code"] == 2, output
    assert f"record {number} " in output and "is damaged: its checksum differs" in output, output
    assert path.name in output and "--verify" in output
    assert "EnforceNotMet" not in output and "Traceback (most recent call last)" not in output.split("torch/dist")[0]
    steps = [
        found.step
        for found in map(checkpoints.read_checkpoint, checkpoints.list_checkpoints(tmp_path / "out/checkpoints"))
    ]
    assert steps == [0, 1, 2, 3, 4] and [entry["step"] for entry in launch.metrics(tmp_path / "out")] == [1, 2, 3, 4]


# Two runs in one folder


@pytest.mark.parametrize("locks", [True, False])
def test_a_folder_that_another_run_has_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    def none_here(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr("fcntl.flock", none_here)
    first = Lock(tmp_path)
    first.check_not_taken_over()
    assert bool(first.problem) != locks
    if locks:
        (tmp_path / "lock").unlink()
        first.check_not_taken_over()  # a purge of old files ends no run
    else:
        assert str(tmp_path) in first.problem and os.strerror(errno.ENOLCK) in first.problem
    second = Lock(tmp_path)
    second.check_not_taken_over()
    with pytest.raises(
        UserError, match=rf"{tmp_path}: another process \(host .*, process {os.getpid()}\) now writes to this folder"
    ):
        first.check_not_taken_over()
    status = Status(tmp_path, Process(0, 1, 0, 1))
    status.note_lock_and_write_running({})
    (tmp_path / "status.json").unlink()
    with pytest.raises(UserError) as taken:
        first.check_not_taken_over()
    status.record_failure(taken.value)
    assert not (tmp_path / "status.json").exists()


@pytest.mark.slow
def test_a_run_whose_folder_another_has_ends(demo: Path, tmp_path: Path) -> None:
    """It was removed under the run, and the same command given again: the first's ranks end, and leave no line."""
    out = tmp_path / "out"
    run = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "tlm", "--data", str(demo), "--out", str(out)]
    run += ["--trace", "--set", "data.workers=0", "checkpoint.every=100000", "streams.tlm.samples=8", "train.warmup=1"]
    first = launch.start(2, [*run, "train.steps=100000"])
    try:
        metrics = out / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 120)
        out.rename(tmp_path / "away")
        shutil.rmtree(tmp_path / "away")
        launch.run(1, [*run, "train.steps=20"])
        output, _ = first.communicate(timeout=60)
    finally:
        launch.kill(first)
    assert first.returncode and f"{out}: another process" in output and "now writes to this folder" in output
    assert [entry["step"] for entry in launch.metrics(out)] == list(range(1, 21))
    assert sorted(step for step, _ in launch.trace(out)) == list(range(1, 21))
    assert json.loads((out / "status.json").read_text())["status"] == "done"
    assert [path.name for path in sorted((out / "trace").iterdir())] == ["rank0.jsonl"]
    steps = [
        found.step for found in map(checkpoints.read_checkpoint, checkpoints.list_checkpoints(out / "checkpoints"))
    ]
    assert steps == [0, 20]


@pytest.mark.slow
def test_all_ranks_of_a_resume_say_that_entries_are_damaged(demo: Path, tmp_path: Path) -> None:
    """Only rank 0 reads the lengths of all records before a resume."""
    shutil.copytree(demo / "pairs", tmp_path / "pairs")
    run = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "tlm", "--data", str(tmp_path / "pairs")]
    run += ["--out", str(tmp_path / "out"), "--set", f"model.tokenizer={demo / 'tokenizer'}", "data.workers=0"]
    launch.run(2, [*run, "streams.tlm.samples=16", "train.steps=2"])
    (tmp_path / "pairs" / "entries").write_bytes(b"damaged")
    code, output = launch.try_run(2, [*run, "streams.tlm.samples=16", "train.steps=4"])
    assert code == 2, output
    for rank in range(2):
        assert "UserError: " + str(tmp_path / "pairs/entries") in (tmp_path / f"out/logs/rank{rank}.log").read_text()
