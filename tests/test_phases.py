"""A run with phases: each step is as its phase says, and positions go on from phase to phase."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import launch
from tests.launch import open_run
from tests.test_order import SEED, documents
from xscale.checkpoint.restore import read_full_weights
from xscale.data.calibration import Calibration
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import Mixture, Position, initial_state
from xscale.data.order import EpochOrder
from xscale.data.stream import Stream
from xscale.errors import UserError
from xscale.metric_keys import count_key
from xscale.objectives import OBJECTIVES
from xscale.ranks import CpuGroup, Process
from xscale.recipe import Schedule, load_recipe
from xscale.run.resolve import build_initial_module, resolve_run
from xscale.run.resume import restore_or_measure_calibration
from xscale.step.ds_config import Hardware, resolve_ds_config

BASE: dict[str, Any] = {
    "model": {"preset": "tiny", "dropout": 0.1},
    "streams": {
        "mlm": {"objective": "mlm", "samples": 16, "mask_prob": 0.3},
        "tlm": {"objective": "tlm", "samples": 8},
    },
    "data": {"max_length": 64, "languages": ["en", "xx"], "workers": 0},
    "train": {"steps": 20, "lr": 0.002, "warmup": 2, "schedule": "1-sqrt", "decay": 0.25, "measure_every": 10},
    "checkpoint": {"every": 3},
}
PHASES = [
    {"until": 0.2, "streams.mlm.samples": 5, "streams.tlm.samples": 0},
    {"until": 7, "streams.mlm.samples": 11},
    {
        "until": 0.7,
        "data.max_length": 128,
        "data.languages_add": ["yy"],
        "data.alpha": 0.5,
        "streams.mlm.mask_prob": 0.15,
        "train.lr": 0.001,
    },
    {
        "until": 1.0,
        "data.max_length": 96,
        "data.languages": None,
        "data.alpha": 0.3,
        "streams.mlm.samples": 13,
        "model.dropout": 0.2,
    },
]
ENDS = [4, 7, 14, 20]
ALONE = Process(0, 1, 0, 1)


def write(folder: Path, phases: list[dict[str, Any]] = PHASES, **changes: Any) -> str:
    (folder / "plan.yaml").write_text(yaml.safe_dump(BASE | {"phases": phases} | changes, sort_keys=False))
    return str(folder / "plan.yaml")


@pytest.fixture(scope="module")
def plan(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return open_run(write(tmp_path_factory.mktemp("plan")), [], [demo])


def steps_of(loader: Loader, state: dict[str, Any] | None = None, place: Process = ALONE) -> Iterator[StepBatch]:
    state = state or initial_state(loader.last_streams)
    return loader.batches(place, "cpu", state, loader.recipe.train.steps - state["step"])


def test_each_step_is_that_of_its_phase(plan: Loader) -> None:
    """The samples, lengths, languages and masks of every step; a stream rests and comes back."""
    wanted = {"mlm": [5] * 4 + [11] * 3 + [16] * 7 + [13] * 6, "tlm": [0] * 4 + [8] * 16}
    masked = np.zeros((3, 2))
    for batch in steps_of(plan):
        phase = next(number for number, end in enumerate(ENDS) if batch.step < end)
        assert batch.sample_count() == wanted["mlm"][batch.step] + wanted["tlm"][batch.step]
        assert bool(batch.record_keys["tlm"]) == (phase > 0)
        lengths = np.concatenate([row.tokens.lengths for row in batch.rows])
        assert lengths.max() <= (longest := [64, 64, 128, 96][phase]) and (lengths > 0.7 * longest).any()
        assert ("yy" in str(batch.record_keys)) == (phase >= 2) or phase == 3
        if phase in (1, 2):
            masked[phase] += batch.counts_without_languages()[count_key("mlm", "mlm")], batch.cost()["tokens"]
        assert plan.recipe.at(batch.step) is plan.recipe.phases[phase].recipe
    assert (masked[1, 0] / masked[1, 1]) / (masked[2, 0] / masked[2, 1]) > 1.5


def test_positions_go_on(plan: Loader) -> None:
    """No record is read twice in an epoch and none is left out, though lengths, languages and shares change."""
    read = Counter[tuple[Any, ...]]()
    for of_step in plan.start_planning(ALONE, "cpu", initial_state(plan.last_streams), 20):
        for stream, table in of_step.tables.items():
            places = (table.source, table.epoch, table.shard, table.record)
            read.update((stream, *place) for place in zip(*(array.tolist() for array in places), strict=True))
    assert max(read.values()) == 1
    for spec in plan.last_streams:
        for source, (epoch, position, *_) in zip(spec.sources, of_step.state["positions"][spec.name], strict=True):
            found = Counter(place[2] for place in read if place[:2] == (spec.name, source))
            assert found.pop(epoch, 0) == position and set(found.values()) <= {plan.corpus.sources[source].records}
            assert len(found) == epoch


def test_positions_keep_the_form_of_earlier_checkpoints() -> None:
    position = Position(2, 30, ((10, 60), (20, 120)))
    assert position.to_list() == [2, 30, 10, 60, 20, 120] and Position.from_list(position.to_list()) == position
    assert Position.from_list([0, 7]) == Position(0, 7)


def test_a_start_at_any_step_reads_the_same(plan: Loader) -> None:
    whole = list(steps_of(plan))
    states = [initial_state(plan.last_streams), *(batch.state for batch in whole)]
    for step in (1, 3, 4, 5, 7, 10, 14, 19):
        state = json.loads(json.dumps(states[step]))
        rest = list(steps_of(plan, state))
        assert [(b.step, b.record_keys, b.counts_without_languages()) for b in rest] == [
            (b.step, b.record_keys, b.counts_without_languages()) for b in whole[step:]
        ]
        assert rest[-1].state == whole[-1].state


@pytest.mark.usefixtures("quick_calibration")
def test_without_phases_it_is_the_recipe(demo: Path, tmp_path: Path) -> None:
    """A phase that changes nothing changes nothing, and a phase of all steps is a recipe with its fields."""
    same = open_run(write(tmp_path, [{"until": 5}, {"until": 0.5}]), [], [demo])
    none = open_run(write(tmp_path, []), [], [demo])
    for ours, theirs in zip(steps_of(same), steps_of(none), strict=True):
        assert (ours.record_keys, ours.counts_without_languages(), ours.state) == (
            theirs.record_keys,
            theirs.counts_without_languages(),
            theirs.state,
        )
    phase = {"until": 1.0, "data.alpha": 0.2, "data.languages": ["en", "yy"], "streams.mlm.samples": 7}
    found = open_run(write(tmp_path, [phase]), [], [demo])
    data, streams = BASE["data"] | {"alpha": 0.2, "languages": ["en", "yy"]}, json.loads(json.dumps(BASE["streams"]))
    streams["mlm"]["samples"] = 7
    plain = open_run(write(tmp_path, [], data=data, streams=streams), [], [demo])
    for ours, theirs in zip(steps_of(found), steps_of(plain), strict=True):
        assert (ours.record_keys, ours.counts_without_languages()) == (
            theirs.record_keys,
            theirs.counts_without_languages(),
        )


def drawing_of(loader: Loader, stream: Stream) -> Mixture:
    """A mixture of one stream alone, with the recipe's data settings."""
    corpus = replace(loader.corpus, streams=Schedule.constant([stream]))
    alone = replace(loader, corpus=corpus, calibration=replace(loader.calibration, phases=[]))
    return alone.mixture(ALONE, "cpu", initial_state([stream]))


def test_shares_of_each_phase(plan: Loader) -> None:
    """Samples of each language, by counting the order's records: n^alpha to 1 %."""
    for phase, streams in zip(plan.recipe.phases, plan.corpus.streams.values, strict=False):
        stream = next(replace(stream, samples=500) for stream in streams if stream.name == "tlm")
        drawing = drawing_of(replace(plan, recipe=phase.recipe), stream)
        drawn = Counter[int]()
        for _ in range(20):
            drawn.update(drawing.next_plan().tables["tlm"].source.tolist())
        named = phase.recipe.data.languages
        sources = plan.corpus.sources
        of = {s: sources[s].records ** phase.recipe.data.alpha for s in stream.sources}
        of = {s: n for s, n in of.items() if named is None or set(sources[s].langs) <= set(named)}
        assert drawn.keys() == of.keys()
        for source, weight in of.items():
            assert drawn[source] / 10_000 == pytest.approx(weight / sum(of.values()), abs=0.01)


def test_the_calibration_of_the_phases_is_kept(plan: Loader, tmp_path: Path) -> None:
    kept = json.loads(json.dumps(asdict(plan.calibration)))
    again = Calibration.from_dict(kept)
    assert again == plan.calibration and len(again.phases) == len(PHASES)
    assert restore_or_measure_calibration(plan.recipe, plan.corpus, None, CpuGroup(alone=True)).phases == again.phases


@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("by", ["records", "tokens", "bytes"])
def test_shares_by_what_a_language_has(demo: Path, tmp_path: Path, by: str) -> None:
    loader = open_run(write(tmp_path, []), [f"data.alpha_by={by}", "data.languages=null"], [demo])
    lines = loader.calibration.lines
    for stream in loader.last_streams:
        sources = [loader.corpus.sources[s] for s in stream.sources]
        size = [sum(int(s.byte_lengths(i, slice(None)).sum()) for i in range(len(s.counts))) for s in sources]
        tokens = []
        for i, n, source in zip(stream.sources, size, sources, strict=True):
            tokens.append(lines[i][0] * n + lines[i][1] * source.records)
        n = {"records": [source.records for source in sources], "bytes": size, "tokens": tokens}[by]
        drawing = drawing_of(loader, replace(stream, samples=1000))
        drawn = Counter(drawing.next_plan().tables[stream.name].source.tolist())
        wanted = np.array(n) ** 0.7 / (np.array(n) ** 0.7).sum()
        assert drawing.weights.last[0] == pytest.approx(wanted, rel=0.02)
        if not stream.reads_running_text:
            assert [drawn[s] / 1000 for s in stream.sources] == pytest.approx(wanted, abs=0.01)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([0.0, 0.7, 1.0]), st.data())
def test_the_maximum_length_of_a_sample_may_change_within_an_epoch(
    counts: list[int], together: float, data: st.DataObject
) -> None:
    """Every record is read once; before the change in the order of the old limit, after it in samples that fit."""
    tokens, _, sizes = documents(counts, together, 20)
    before, read, ends = (), [], [0]
    limits = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    for limit in limits:
        looks = sizes | {"sample_limits": (*before, (sum(counts), limit))}
        order = EpochOrder(np.array(counts), SEED, 0, window=50, **looks)
        stop = order.size if limit is limits[-1] else data.draw(st.integers(ends[-1], order.size))
        fresh = True
        while ends[-1] < stop:
            if data.draw(st.booleans()):  # a resume
                order = EpochOrder(np.array(counts), SEED, 0, window=50, **looks)
            found, shards, records, _ = order.take_samples(ends[-1], 1 if fresh else 3)
            first = 0
            for end in found.tolist():
                places = list(zip(shards.tolist(), records.tolist(), strict=True))[first : end - ends[-1] + first]
                assert sum(int(tokens[s][r]) for s, r in places) <= limit or len(places) == 1 or together
                read += places
                first += len(places)
                ends.append(end)
            fresh = False
        if 0 < ends[-1] < order.size:
            before = (*before, (ends[-1], limit))
    if ends[-1] == sum(counts):
        assert sorted(read) == [(shard, record) for shard, count in enumerate(counts) for record in range(count)]


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"until": 0.5, "model.preset": "mini"}, r"phases\[0\].model.preset: .*data.alpha.*streams.mlm.mask_prob"),
        ({"until": 0.5, "streams.mlm.whole_word": True}, r"streams.mlm.whole_word: .*streams.mlm.mask_prob"),
        ({"until": 0.5, "streams.mlmm.samples": 3}, r"streams.mlmm.samples: .*streams.mlm.samples"),
        ({"until": 0.5, "train.warmup": 3}, r"train.warmup: a phase cannot"),
        ({"until": 0.5, "streams.mlm.mask_prob": 1.5}, r"phases\[0\].streams.mlm.mask_prob: 1.5"),
        ({"until": 0.5, "streams.mlm.samples": 0, "streams.tlm.samples": 0}, r"samples: the value 0 .*1 or more"),
        ({"until": 1.5}, r"phases\[0\].until: 1.5 .*0.8"),
        ({"until": True}, r"until: True .*at least 1"),
        ({"data.alpha": 0.5}, r"until: None"),
        ({"until": 0.5, "data.languages": None, "data.languages_add": ["xx"]}, r"data.languages_add: .*data.languages"),
        ({"until": 0.5, "data.languages_add": "xx"}, r"data.languages_add: the value must be a list"),
    ],
)
def test_what_a_phase_may_not_change(tmp_path: Path, phase: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_recipe(write(tmp_path, [phase]), [], OBJECTIVES)
    assert len(str(error.value).splitlines()) <= 3


def test_phases_are_in_order_and_of_steps(demo: Path, tmp_path: Path) -> None:
    for phases, sets, message in (
        ([{"until": 0.8}, {"until": 1}], [], r"phases\[1\].until: 1 .*at least 17.*1.0 is the end"),
        ([{"until": 0}], [], r"phases\[0\].until: 0 .*at least 1,"),
        ([{"until": 0.5}, {"until": 0.5}], [], r"phases\[1\].until: 0.5 .*at least 11,"),
        ([{"until": 0.5}, {"until": 10}, {"until": 11}], [], r"phases\[1\].until: 10 .*at least 11,"),
        ([{"until": 0.13}, {"until": 3}], [], r"phases\[1\].until: 3 .*at least 4,"),
        ("data.alpha", [], r"phases: 'data.alpha' is not a list"),
        ([{"until": 0.5, "data.languages": ["qq"]}], [], r"data.languages: .*qq.*en"),
        ([{"until": 0.5, "data.languages": ["en"]}], [], r"streams.tlm reads sentence pairs in en"),
    ):
        with pytest.raises(UserError, match=message):
            resolve_run(write(tmp_path, phases), sets, [demo])


def test_a_short_run_may_leave_a_share_without_steps(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, [{"until": 0.1}, {"until": 0.2}]), ["train.steps=4"], OBJECTIVES)
    assert recipe.schedule.ends == (0, 1)


def test_a_step_has_the_rate_and_the_dropout_of_its_phase(demo: Path, tmp_path: Path) -> None:
    recipe, plain = load_recipe(write(tmp_path), [], OBJECTIVES), load_recipe(write(tmp_path, []), [], OBJECTIVES)
    for step in range(20):
        half = 7 <= step < 14
        assert recipe.at(step).train.learning_rate(step) == plain.train.learning_rate(step) / (2 if half else 1)
        assert recipe.at(step).model.dropout == (0.2 if step >= 14 else 0.1)
    early = resolve_run(write(tmp_path, [{"until": 7, "model.dropout": 0.3}]), [], [demo])
    dropout = build_initial_module(*early).encoder.dropout
    assert dropout == 0.3, "a queue is filled before step 1"
    scheduler = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    plain_train = replace(recipe.train, schedule=None, decay=None)
    with pytest.raises(UserError, match=r"scheduler = WarmupLR contradicts .*phases, which set train.lr"):
        resolve_ds_config(
            scheduler, Path("X.json"), replace(recipe, train=plain_train), 1, Hardware("cpu", False, True)
        )


def listed(demo: Path, folder: Path, outs: list[str], *sets: str, phases: list[dict[str, Any]] = PHASES) -> list[str]:
    """A runs' list for many_runs.py, of FOLDER/OUT for each."""
    folder.mkdir(exist_ok=True)
    common = ["--ds_config", "zero2_cpu", "--recipe", write(folder, phases), "--data", str(demo), "--set", *sets]
    (folder / "list.json").write_text(json.dumps([[*common, "--trace", "--out", str(folder / out)] for out in outs]))
    return [str(folder / "list.json")]


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_phase_and_at_a_border(demo: Path, tmp_path: Path) -> None:
    """After kill -9, and from a checkpoint in a phase and one at a border, metrics and weights equal those of a whole
    run, bit for bit."""
    script = str(launch.ROOT / "tests" / "many_runs.py")
    sets = ["checkpoint.every=1", "checkpoint.keep=50", "data.workers=1"]
    launch.run(2, listed(demo, tmp_path, ["whole"], *sets), script=script)
    whole = tmp_path / "whole"
    copies = {step: tmp_path / str(step) for step in (ENDS[1], 10)}
    for step, copy in copies.items():
        shutil.copytree(whole, copy)
        for later in range(step + 1, 21):
            shutil.rmtree(copy / "checkpoints" / f"step_{later:08d}")
    arguments = listed(demo, tmp_path, [str(step) for step in copies] + ["killed"], *sets)
    fifth = tmp_path / "killed" / "checkpoints" / "step_00000005"
    launch.fork_and_kill(2, arguments, fifth.exists, script)
    assert len(launch.metrics(tmp_path / "killed")) < 20
    launch.run(2, arguments, script=script)
    last = "checkpoints/step_00000020"
    expected, tensors = launch.without_times(whole), launch.checkpoint_tensors(whole / last)
    for copy in (*copies.values(), tmp_path / "killed"):
        assert launch.without_times(copy) == expected and launch.trace(copy) == launch.trace(whole), copy
        assert all(torch.equal(t, tensors[n]) for n, t in launch.checkpoint_tensors(copy / last).items()), copy


@pytest.mark.slow
def test_a_ramp_of_samples_has_the_same_losses_at_any_cut(demo: Path, tmp_path: Path) -> None:
    """The number of samples changes from phase to phase. One rank with short rows has the losses of two ranks with
    long ones. Dropout, which depends on the rows, is off."""
    script = str(launch.ROOT / "tests" / "many_runs.py")
    phases = [{key: value for key, value in phase.items() if key != "model.dropout"} for phase in PHASES]
    sets = ["model.dropout=0", "data.workers=0"]
    launch.run(2, listed(demo, tmp_path, ["two"], *sets, phases=phases), script=script)
    launch.run(1, listed(demo, tmp_path, ["one"], *sets, "train.max_tokens=256", phases=phases), script=script)
    one, two = launch.metrics(tmp_path / "one"), launch.metrics(tmp_path / "two")
    assert [step["loss"] for step in one] == pytest.approx([step["loss"] for step in two], rel=1e-5)
    samples = [step["samples"] for step in one]
    assert samples == [step["samples"] for step in two] and samples[:14] == [5] * 4 + [19] * 3 + [24] * 7


@pytest.mark.slow
def test_steps_that_are_left_out(demo: Path, tmp_path: Path) -> None:
    """They read what they would have read, and leave weights and optimizer as they were; a resume among them is
    exact."""
    script = str(launch.ROOT / "tests" / "many_runs.py")
    sets = ["checkpoint.every=1", "checkpoint.keep=50", "data.workers=1", "train.skip_steps=[4, 6, 7, 8]"]
    launch.run(2, listed(demo, tmp_path, ["whole"], *sets), script=script)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shutil.copytree(whole, killed)
    for later in range(8, 21):
        shutil.rmtree(killed / "checkpoints" / f"step_{later:08d}")
    launch.run(2, listed(demo, tmp_path, ["killed"], *sets), script=script)
    assert launch.without_times(killed) == launch.without_times(whole)
    assert [e["step"] for e in launch.metrics(whole) if e.get("excluded")] == [4, 6, 7, 8]
    assert len(launch.trace(whole)) == 20 * 2
    weights = [read_full_weights(whole / "checkpoints" / f"step_{step:08d}") for step in (5, 8, 9)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
    recipe = load_recipe(write(tmp_path), [], OBJECTIVES)
    rates = {step + 1: recipe.at(step).train.learning_rate(step) for step in range(20)}
    assert all(e["lr"] == rates[e["step"]] for e in launch.metrics(whole) if "lr" in e)
