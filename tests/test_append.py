"""More data in the middle of a run: old sources go on in their order, new ones and new shards begin in epoch 0."""

import json
import shutil
from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from data_tools import write_shards
from data_tools.demo_world import World
from tests import launch
from xscale.checkpoint.store import Checkpoint
from xscale.data import order
from xscale.data.shards import find_sources
from xscale.errors import UserError
from xscale.ranks import HostGroup, Process
from xscale.run import folder, going_on
from xscale.run.going_on import resume_calibration
from xscale.run_spec import RunSpec, resolve_run

ALONE = Process(0, 1, 0, 1)
SETS = ["streams.mlm.samples=6", "streams.tlm.samples=5", "data.max_length=40", "data.workers=0"]
Draws = dict[tuple[str, str], list[tuple[int, int, int]]]
"""Epoch, shard and record of what is drawn, by stream and source."""


@pytest.fixture(scope="module")
def corpus(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """before/ has shards 0 and 1 of mono_en, and pairs; after/ has four shards of mono_en, pairs, and mono_xx."""
    path, world = tmp_path_factory.mktemp("corpus"), World(0)
    (path / "en.txt").write_text("\n\n".join("\n".join(world.document("en", n)) for n in range(120)))
    out = path / "after" / "mono_en"
    lines = ["--shard_lines", str(len((path / "en.txt").read_text().splitlines()) // 4 + 1)]
    write_shards.main(["mono", "--text", str(path / "en.txt"), "--lang", "en", "--out", str(out), *lines])
    for name in ("pairs", "mono_xx", "tokenizer"):
        shutil.copytree(demo / name, path / "after" / name)
    for name in ("pairs", "mono_en", "tokenizer"):
        shutil.copytree(path / "after" / name, path / "before" / name)
    index = json.loads((out / "index.json").read_text())
    assert len(index["shards"]) == 4
    for shard in index["shards"][2:]:
        for file in (path / "before" / "mono_en").glob(shard["name"].replace(".tar", ".*")):
            file.unlink()
    index["shards"] = index["shards"][:2]
    index |= {name: sum(shard[name] for shard in index["shards"]) for name in ("records", "bytes")}
    (path / "before" / "mono_en" / "index.json").write_text(json.dumps(index))
    return path


def resolved(data: Path, *sets: str, known: frozenset[str] = frozenset()) -> RunSpec:
    return resolve_run("xlm", [*SETS, *sets], [data], known=known)


def checkpoint_of(run_spec: RunSpec, state: dict[str, Any]) -> Checkpoint:
    assert run_spec.calibration
    manifest = {"identity": run_spec.identity(), "state": state, "calibration": run_spec.calibration.to_dict()}
    return Checkpoint(Path("step_00000005"), json.loads(json.dumps(manifest | {"step": state["step"]})))


def draw(run_spec: RunSpec, state: dict[str, Any], steps: int) -> tuple[Draws, dict[str, Any]]:
    found: Draws = defaultdict(list)
    mixture = run_spec.mixture(ALONE, "cpu", run_spec.specs, state)
    for _ in range(steps):
        for stream, records in mixture.next_batch().records.items():
            for source, *place in zip(records.source, records.epoch, records.shard, records.record, strict=True):
                found[stream, run_spec.sources[source].fingerprint].append(tuple(map(int, place)))
    return found, mixture.state


def begun(run_spec: RunSpec) -> dict[str, Any]:
    positions = {spec.name: [[0, 0] for _ in spec.sources] for spec in run_spec.specs}
    return {"step": 0, "positions": positions, "order": 3}


def taken_in(corpus: Path, checkpoint: Checkpoint) -> tuple[RunSpec, dict[str, Any]]:
    """The run as it is started again with more data."""
    known = frozenset(going_on.fingerprints(checkpoint.identity))
    run_spec = resolved(corpus / "after", known=known)
    assert folder.identity_differences(checkpoint.identity, run_spec.identity(), append=True) == []
    checkpoint_now = going_on.with_new_sources(checkpoint, run_spec)
    return run_spec.calibrated(resume_calibration(run_spec, checkpoint_now, HostGroup())), checkpoint_now.state


def test_a_source_is_cut_where_it_was_known_to_end(corpus: Path) -> None:
    """Each part has the fingerprint and the records of a source of its own."""
    ((before,), (after,)) = (find_sources([corpus / name / "mono_en"]) for name in ("before", "after"))
    assert after.split_at([]) == [after] and after.split_at([after.fingerprint]) == [after]
    first, rest = after.split_at([before.fingerprint])
    assert first.fingerprint == before.fingerprint and first.records == before.records
    assert first.records + rest.records == after.records and first.bytes + rest.bytes == after.bytes
    again = after.split_at([before.fingerprint, rest.fingerprint])
    assert [part.fingerprint for part in again] == [first.fingerprint, rest.fingerprint] and len(rest.shards) == 2
    for shard in range(2):
        for record in range(0, int(min(first.counts[shard], rest.counts[shard])), 7):
            assert first.read(shard, record) == before.read(shard, record)
            assert rest.read(shard, record) == after.read(shard + 2, record)
        assert (rest.entries(shard) == after.entries(shard + 2)).all()


def test_old_sources_go_on_and_new_ones_begin(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the parts of a window depend on the number of sources; and a second time, with nothing new."""
    monkeypatch.setattr(order, "WINDOW_RECORDS", 400)
    monkeypatch.setattr(order, "PART_RECORDS", 20)
    first = resolved(corpus / "before").calibrated()
    assert first.calibration  # its estimates stay, on which the order of running text depends
    lines = [(1.3 * a, b) for a, b in first.calibration.lines]
    first = first.calibrated(replace(first.calibration, lines=lines))
    head, state = draw(first, begun(first), 5)
    alone, _ = draw(first, begun(first), 60)
    second, state = taken_in(corpus, checkpoint_of(first, state))
    middle, state = draw(second, state, 20)
    third, state = taken_in(corpus, checkpoint_of(second, state))
    assert third.identity() == second.identity() and third.calibration == second.calibration
    assert state["appended_at"] == 5, "spikes are sought anew from there on"
    tail, _ = draw(third, state, 60)
    assert len(head) == 2 and len(tail) == 4
    together = {key: [*head[key], *middle[key], *tail[key]] for key in tail}
    for key, drawn in together.items():
        (source,) = (source for source in third.sources if source.fingerprint == key[1])
        if key in alone:
            shorter = min(len(drawn), len(alone[key]))
            assert drawn[:shorter] == alone[key][:shorter] and shorter > len(head[key])
        else:
            assert drawn[0][0] == 0
        for epoch, of_epoch in groupby(drawn, key=lambda place: place[0]):
            places = [*of_epoch]
            assert len({*places}) == len(places) and (epoch == drawn[-1][0] or len(places) == source.records)
    assert any(drawn[-1][0] > 0 for key, drawn in together.items() if key not in alone)
    assert [s.langs for s in third.sources] == [("en",), ("en",), ("xx",), ("en", "xx")]


def test_what_a_run_cannot_take_in(corpus: Path, tmp_path: Path) -> None:
    """Without the flag, anything; fewer sources; more languages where the model has embeddings of them."""
    first = resolved(corpus / "before").calibrated()
    checkpoint = checkpoint_of(first, begun(first))
    after = resolved(corpus / "after", known=frozenset(going_on.fingerprints(checkpoint.identity)))
    assert folder.identity_differences(checkpoint.identity, after.identity())
    assert folder.identity_differences(after.identity(), first.identity(), append=True)
    (tmp_path / folder.IDENTITY).write_text(json.dumps(after.identity()))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"name all data that the run had"):
        folder.check_out(tmp_path, first.identity(), "auto", append=True)
    with pytest.raises(UserError, match=r"add --data_change append"):
        folder.check_out(tmp_path, first.identity(), "auto")
    assert folder.identity_differences(checkpoint.identity, resolved(corpus / "after").identity(), append=True), (
        "shards were not cut"
    )
    with pytest.raises(UserError, match=r"data\.first"):
        going_on.with_new_sources(checkpoint, resolved(corpus / "after", "data.first=900", known=frozenset({"x"})))
    new = find_sources([corpus / "after" / "mono_xx"])
    new[0].langs = ("sw",)
    more = Namespace(sources=[*first.sources, *new], recipe=first.recipe, languages=["en", "sw", "xx"])
    for embeddings in (True, False):
        more.any_stream = lambda option, embeddings=embeddings: embeddings
        if embeddings:
            with pytest.raises(UserError, match=r"embedding for sw.*model\.init"):
                going_on.check_append(going_on.fingerprints(checkpoint.identity), more)  # type: ignore[arg-type]
        else:
            going_on.check_append(going_on.fingerprints(checkpoint.identity), more)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_takes_in_more_data(corpus: Path, tmp_path: Path) -> None:
    """The records of old sources follow one another as in a run that took in nothing. The flag is needed."""
    alone, out = tmp_path / "alone", tmp_path / "run"

    def words(name: str, out: Path, steps: int, *more: str) -> list[str]:
        common = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "xlm", "--trace", "--out", str(out)]
        data = ["--data", str(corpus / name), "--steps", str(steps)]
        return [*common, *data, *more, "--set", *SETS, "checkpoint.every=4", "checkpoint.keep=9"]

    launch.run(1, words("before", alone, 12))
    shutil.copytree(alone, out)
    for step in (8, 12):
        shutil.rmtree(out / "checkpoints" / f"step_{step:08d}")
    code, output = launch.try_run(1, words("after", out, 8))
    assert code and "--data_change append" in output
    launch.run(1, words("after", out, 8, "--data_change", "append"))
    launch.run(1, words("after", out, 12, "--data_change", "append"))
    old = {key for keys in launch.trace(alone).values() for key in keys}
    for stream in ("mlm", "tlm"):
        first, second = (
            [key for step in range(1, 13) for key in launch.trace(of)[step, stream]] for of in (alone, out)
        )
        kept = [key for key in second if key in old and not key.startswith("xx")]
        assert kept == first[: len(kept)] and len(kept) >= len(first) // 4
    assert {key for keys in launch.trace(out).values() for key in keys} - old
    assert len(json.loads((out / "identity.json").read_text())["data"]) == 4
