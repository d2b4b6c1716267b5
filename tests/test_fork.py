"""Forks: which checkpoint they begin at, what their recipe may change, and that one with nothing changed is the run."""

import json
import re
import shutil
from argparse import Namespace
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests import launch
from tests.test_init_and_export import loader_of, save
from tests.test_training import arguments, same_checkpoint
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.store import manifest_json_with_hash
from xscale.data import order
from xscale.data.calibrate import calibrate
from xscale.data.corpus import Corpus, run_identity
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.errors import UserError
from xscale.ranks import CpuGroup, Process
from xscale.recipe import Recipe
from xscale.run import resume
from xscale.run.resolve import resolve_run
from xscale.train import parse_arguments

SETS = ("streams.ppa.queue_size=64", "streams.ppa.projection=24")


@pytest.fixture(scope="module")
def parent(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 7 and 9."""
    path, loader = tmp_path_factory.mktemp("parent") / "run", loader_of(demo, "mixed", *SETS)
    folder = save(launch.module(loader), loader, path / "checkpoints" / "step_00000007")
    shutil.copytree(folder, folder.with_name("step_00000009"))
    manifest = json.loads((folder / "manifest.json").read_text()) | {"step": 9, "state": {"step": 9}}
    (folder.with_name("step_00000009") / "manifest.json").write_text(manifest_json_with_hash(manifest))
    return path


def begin(demo: Path, out: Path, fork: str, *sets: str, recipe: str = "mixed") -> Any:
    identity = run_identity(*resolve_run(recipe, ["data.workers=0", *SETS, *sets], [demo]))
    return resume.find_own_or_fork_checkpoint(Namespace(out=out, resume="auto", fork=fork), identity, CpuGroup())


def test_a_fork_begins_where_it_is_told_and_then_goes_on_by_itself(demo: Path, parent: Path, tmp_path: Path) -> None:
    steps = {f"{parent}@7": 7, f"{parent}@9": 9}
    assert {name: begin(demo, tmp_path / "new", name).step for name in steps} == steps
    for fork, words in {
        f"{parent}@8": r"no complete checkpoint .*step_00000008\. .*a complete checkpoint: 7, 9\)",
        f"{tmp_path}/nowhere@8": r"no complete checkpoint .*step_00000008\. .*a complete checkpoint: none\)",
        f"{parent}": "the form must be RUN@STEP",
        "@8": "the form must be RUN@STEP",
    }.items():
        with pytest.raises(UserError, match=rf"--fork.*: .*{words}"):
            begin(demo, tmp_path / "new", fork)
    own = tmp_path / "new" / "checkpoints" / "step_00000009"
    shutil.copytree(parent / "checkpoints" / "step_00000009", own)
    with pytest.raises(UserError, match=r"--fork .*run@7: .*new .*--out"):
        begin(demo, tmp_path / "new", f"{parent}@7")  # the run has not begun there
    with pytest.raises(UserError, match="the form must be RUN@STEP"):
        begin(demo, tmp_path / "new", "7")
    seventh = checkpoints.read_checkpoint(parent / "checkpoints" / "step_00000007")
    resume.write_ancestry(tmp_path / "new", seventh, seventh.identity)
    with pytest.raises(UserError, match=r"--fork .*: .*new .*--out"):
        begin(demo, tmp_path / "new", f"{parent}@9")
    checkpoint = begin(demo, tmp_path / "new", f"{parent}@7")
    assert checkpoint.path == own
    assert resume.is_checkpoint_of_run(checkpoint, tmp_path / "new") and not resume.is_checkpoint_of_run(
        checkpoint, parent
    )
    shutil.rmtree(own)
    (parent / "checkpoints" / "step_00000009" / "mp_rank_00_model_states.pt").rename(tmp_path / "gone")
    with pytest.raises(UserError, match=r"^checkpoint .*mp_rank_00_model_states.pt is missing"):
        begin(demo, tmp_path / "new", f"{parent}@9")
    (tmp_path / "gone").rename(parent / "checkpoints" / "step_00000009" / "mp_rank_00_model_states.pt")
    with pytest.raises(SystemExit):
        parse_arguments(["--ds_config", "x.json", "--fork", "run@7", "--resume", "never"])


def test_what_a_step_reads_anew_may_change(demo: Path, parent: Path, tmp_path: Path) -> None:
    changed = ["train.lr=0.1", "train.warmup=3", "train.steps=40", "train.z_loss=0.1", "data.alpha=0.3"]
    changed += ["model.dropout=0.0", "streams.mlm.samples=32", "streams.tlm.weight=0.5", "streams.mlm.mask_prob=0.3"]
    changed += ["streams.ppa.temperature=0.1", "streams.ppa.momentum=0.9"]
    assert begin(demo, tmp_path, f"{parent}@9", *changed).step == 9


def test_what_the_order_or_the_saved_state_depends_on_may_not(demo: Path, parent: Path, tmp_path: Path) -> None:
    """The error names each of the fields."""
    changed = ["train.seed=3", "train.weight_decay=0.1", "data.max_length=64", "data.first=100", "model.preset=mini"]
    changed += ["streams.mlm.languages=[en]", "streams.mlm.whole_word=true", "streams.ppa.queue_size=128"]
    changed += ["streams.ppa.projection=8", "streams.alignlm.bilingual_weight=0.0"]
    with pytest.raises(UserError, match=rf"model\.init={parent}") as refusal:
        begin(demo, tmp_path, f"{parent}@9", *changed)
    for field, _, value in (change.partition("=") for change in changed):
        assert re.search(rf"\b{field}: was .*, is now .*{value[1:-1]}", str(refusal.value)), field


def test_a_fork_keeps_the_phases(demo: Path, parent: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe\.phases: was None, is now .*'data\.alpha': 0\.3"):
        begin(demo, tmp_path, f"{parent}@9", "phases=[{until: 5, data.alpha: 0.3}]")


def test_a_fork_may_change_the_rate_of_new_heads_but_not_whether_they_have_one(
    demo: Path, parent: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"train\.head_lr: was None, is now 0\.01"):
        begin(demo, tmp_path, f"{parent}@9", "train.head_lr=0.01")
    loader = loader_of(demo, "mixed", *SETS, "train.head_lr=0.01")
    save(launch.module(loader), loader, tmp_path / "heads" / "checkpoints" / "step_00000007")
    fork = f"{tmp_path / 'heads'}@7"
    assert begin(demo, tmp_path / "out", fork, "train.head_lr=0.02").step == 7
    with pytest.raises(UserError, match=r"train\.head_lr: was 0\.01, is now None"):
        begin(demo, tmp_path / "out", fork)


def test_streams_may_not_end(demo: Path, parent: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"streams\.mlm: was .*, is now None"):
        begin(demo, tmp_path, f"{parent}@9", "streams.ppa.samples=8", recipe="ppa")


@pytest.mark.slow
def test_a_fork_with_nothing_changed_is_the_run(demo: Path, tmp_path: Path) -> None:
    """Metrics, records, weights, optimizer, queue: to the last bit. With another lr it reads the same records."""
    run, same, decay = (tmp_path / name for name in ("run", "same", "decay"))
    often, beside = ("checkpoint.every=3", "checkpoint.keep=9", "train.measure_every=3"), ("--fork", f"{run}@6")
    runs = [(run, (), ()), (same, beside, ()), (decay, beside, ("train.lr=0.0001",))]
    head = ("--steps", "10", "--trace")
    launch.run_all(2, tmp_path, [arguments(demo, o, *head, *more, "--set", *often, *sets) for o, more, sets in runs])
    from_there = [entry for entry in launch.without_times(run) if entry["step"] > 6]
    assert len(from_there) == 4 and launch.without_times(same) == from_there
    assert launch.trace(same) == {key: of for key, of in launch.trace(run).items() if key[0] > 6}
    same_checkpoint(run / "checkpoints/step_00000010", same / "checkpoints/step_00000010")
    same_checkpoint(run / "checkpoints/step_00000006", same / "checkpoints/step_00000006")
    found, expected = launch.without_times(decay), launch.without_times(same)
    assert launch.trace(decay) == launch.trace(same)
    assert [entry["lr"] for entry in found] == pytest.approx([entry["lr"] * 0.0001 / 0.002 for entry in expected])
    assert found[-1]["loss"] != expected[-1]["loss"]
    assert found[0]["loss"] == expected[0]["loss"]
    assert json.loads((decay / "ancestry.json").read_text())[0]["changed"] == [
        "recipe.train.lr: was 0.002, is now 0.0001"
    ]


@pytest.mark.slow
def test_an_old_checkpoint_withdraws_those_after_it(demo: Path, tmp_path: Path) -> None:
    """After --resume DIR, the next start does not go on from a checkpoint of the steps that are done again."""
    out = tmp_path / "run"
    small = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mlm", "--data", str(demo), "--out", str(out)]
    small += ["--set", "checkpoint.every=3", "checkpoint.keep=9", "streams.mlm.samples=2", "data.max_length=32"]
    again = ["--resume", str(out / "checkpoints" / "step_00000003")]
    launch.run_all(1, tmp_path, [[*small, "--steps", "9"], [*small, "--steps", "5", *again], [*small, "--steps", "7"]])
    assert [entry["step"] for entry in launch.metrics(out)] == [1, 2, 3, 4, 5, 6, 7]
    steps = [checkpoints.step_from_name(path) for path in checkpoints.list_checkpoints(out / "checkpoints")]
    assert steps == [0, 3, 5, 6, 7] and not list(out.glob("checkpoints/*.incomplete"))
    assert (out / "checkpoints" / "latest").read_text() == "step_00000007"


Draws = dict[tuple[str, str], list[tuple[int, int, int]]]
"""Epoch, shard and record of what is drawn, by stream and source."""


def draw(loader: Loader, state: dict[str, Any], steps: int) -> tuple[Draws, dict[str, Any]]:
    draws: Draws = defaultdict(list)
    mixture = loader.mixture(Process(0, 1, 0, 1), "cpu", state)
    for _ in range(steps):
        for stream, table in mixture.next_plan().tables.items():
            for source, *place in zip(table.source, table.epoch, table.shard, table.record, strict=True):
                draws[stream, loader.corpus.sources[source].langs_name].append(tuple(map(int, place)))
    return draws, mixture.state


def test_a_fork_reads_other_data(demo: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Sources that the parent had go on in their order, also where the parts of a window depend on the number of
    sources, and new ones begin. A stream that lost a source begins a new epoch."""
    monkeypatch.setattr(order, "WINDOW_RECORDS", 400)
    monkeypatch.setattr(order, "PART_RECORDS", 20)

    def resolved(*names: str, **fields: object) -> tuple[Recipe, Corpus]:
        sets = [f"{name}={value}" for name, value in fields.items()]
        sets += ["streams.mlm.samples=6", "streams.tlm.samples=5", "data.max_length=40", "data.workers=0"]
        return resolve_run("xlm", sets, [demo / name for name in names])

    recipe, corpus = resolved("pairs", "mono_en")
    measured = calibrate(recipe, corpus, CpuGroup())
    lines = [(1.3 * a, b) for a, b in measured.lines]  # the order of running text depends on it
    parent = Loader(recipe, corpus, replace(measured, lines=lines))
    head, state = draw(parent, initial_state(parent.last_streams), 5)
    alone, _ = draw(parent, state, 40)
    manifest = {"identity": launch.identity(parent), "state": state, "calibration": asdict(parent.calibration)}
    saved = json.loads(json.dumps(manifest))
    checkpoint = checkpoints.Checkpoint(Path("step_00000005"), 5, 1, **saved, engine={}, files={})

    fork = resolved("mono_xx", "pairs", "mono_en")
    begun = resume.with_corpus_positions(checkpoint, *fork)
    calibration = resume.restore_or_measure_calibration(*fork, begun, CpuGroup())
    draws, _ = draw(Loader(*fork, calibration), begun.state, 40)
    assert set(alone) == {("mlm", "en"), ("tlm", "en-xx")} and set(draws) == {*alone, ("mlm", "xx")}
    for key, of_parent in alone.items():
        shorter = min(len(of_parent), len(draws[key]))
        assert shorter > len(head[key]) and draws[key][:shorter] == of_parent[:shorter]
    assert draws["mlm", "xx"][0][0] == 0

    others = resolved("pairs", "mono_xx")
    caplog.set_level("INFO", logger="xscale")
    positions = resume.with_corpus_positions(checkpoint, *others).state["positions"]
    assert positions == {"mlm": [[1, 0]], "tlm": state["positions"]["tlm"]}
    assert "streams.mlm: a folder of shards that the stream had read before has changed or is not in --data" in (
        caplog.text
    )
    with pytest.raises(UserError, match=r"data\.first"):
        resume.with_corpus_positions(checkpoint, *resolved("pairs", "mono_xx", **{"data.first": 900}))
    embeddings = {"streams.mlm.language_embeddings": "true", "streams.tlm.language_embeddings": "true"}
    monkeypatch.setattr(resume, "xscale_field_of_init", lambda path: {"languages": ["neutral", "en", "sw", "xx"]})
    with pytest.raises(UserError, match=r"embeddings of en, sw, xx, but .* en, xx\. .*model\.init"):
        resume.with_corpus_positions(checkpoint, *resolved("pairs", "mono_xx", **embeddings))
