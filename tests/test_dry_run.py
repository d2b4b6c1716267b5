"""What a dry run foretells, against what a run then draws and computes."""

import re
from collections import Counter
from pathlib import Path

import pytest

from data_tools import write_shards
from tests import launch
from xscale import dry_run as planning
from xscale.data import calibrate
from xscale.data.mixture import initial_state
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.dry_run import dry_run
from xscale.ranks import Process
from xscale.run.describe import share_lines
from xscale.run_spec import RunSpec
from xscale.step import cost

ALONE = Process(0, 1, 0, 1)


def run_spec_of(demo: Path, recipe: str, *sets: str) -> RunSpec:
    words = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", recipe, "--data", str(demo), "--set"]
    return launch.run_spec_of([*words, "data.workers=0", "model.preset=tiny", *sets])


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"\d+\.\d+(?:e[+-]\d+)?|\d+", line.replace(",", ""))]


def test_shares_and_epochs(demo: Path) -> None:
    """Epochs by language, of pairs and of running text, are about those that the first steps consume."""
    run_spec = run_spec_of(demo, "xlm", "streams.mlm.samples=20", "streams.tlm.samples=30", "train.steps=500")
    found: Counter[str] = Counter()
    for batch in run_spec.batches(ALONE, "cpu", initial_state(run_spec.specs), 32):
        for stream, keys in batch.keys().items():
            found.update(f"{stream} {key.split('-0')[0].rpartition('.')[2]}" for key in keys)
    shown = {}
    for line in share_lines(run_spec):
        stream, _, sources = line.partition("of stream ")[2].partition(": ")
        shown |= {f"{stream} {pair}": float(n) for pair, n in re.findall(r"(\S+) \S+% \((\S+) epochs\)", sources)}
    records = {source.name: source.records for source in run_spec.sources}
    drawn = {name: 500 / 32 * n / records[name.split()[1]] for name, n in found.items()}
    assert len(shown) == sum(len(spec.sources) for spec in run_spec.specs) and shown == pytest.approx(drawn, rel=0.1)


def test_long_samples_are_planned_by_few_of_them(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens are read, and the estimates are nearly those by all samples."""
    encode, read = Tokenizer.encode, Counter[str]()

    def counting(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        ids = encode(self, texts)
        read["tokens"] += sum(map(len, ids))
        return ids

    monkeypatch.setattr(Tokenizer, "encode", counting)

    def estimates() -> tuple[int, float, float]:
        read.clear()
        run_spec = run_spec_of(demo, "mlm", "data.max_length=256", "streams.mlm.samples=512")
        tokens = planning.stream_cost(run_spec, run_spec.specs[0])["tokens"]
        assert run_spec.calibration
        return read["tokens"], run_spec.calibration.estimate_for("mlm").ratio, tokens

    every = estimates()
    monkeypatch.setattr(calibrate, "DRAWN_TOKENS", 1 << 16)
    monkeypatch.setattr(planning, "READ_TOKENS", 1 << 14)
    few = estimates()
    assert few[0] < every[0] / 3 and few[1:] == pytest.approx(every[1:], rel=0.03)


def test_work_of_a_step(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and FLOPs are those of the first step, and of a large one by a part of it; PPA's prefill is that of the
    pairs that it reads."""
    run_spec = run_spec_of(demo, "ppa", "streams.ppa.samples=64", "streams.ppa.queue_size=256")
    module = run_spec.module()
    (batch,) = run_spec.batches(ALONE, "cpu", initial_state(run_spec.specs), 1)
    flops = cost.StepFlops(module.encoder).flops(batch.cost())
    step, before = planning.work_lines(run_spec, module, world=8)
    tokens, total, *_, on_each = numbers(step)
    assert tokens == batch.cost()["tokens"]
    assert (total, on_each) == pytest.approx((sum(flops.values()), sum(flops.values()) / 8), rel=6e-3)
    assert "the text of 4 steps" in before
    monkeypatch.setattr(planning, "READ", 16)
    (spec,) = run_spec.specs
    assert planning.stream_cost(run_spec, spec)["tokens"] == pytest.approx(batch.cost()["tokens"], rel=0.2)


@pytest.mark.parametrize(("ds_config", "device"), [("zero3_fp16_nodes", "cuda"), ("zero2_cpu", "")])
def test_a_plan_for_another_machine(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture, ds_config: str, device: str
) -> None:
    """Half precision on GPUs, whatever is here. Nothing is written."""
    words = ["--ds_config", str(launch.ROOT / "ds_configs" / f"{ds_config}.json"), "--recipe", "xlm", "--dry_run"]
    words += ["--data", str(demo), "--out", str(tmp_path / "out"), "--ranks", "64"]
    words += ["--set", "streams.mlm.samples=6", "streams.tlm.samples=20"] if device == "" else []
    dry_run(launch.parse_arguments(words), ALONE)
    told = capsys.readouterr().out
    assert f"ranks: 64 of {device}" in told and "memory per rank" in told and not list(tmp_path.iterdir())
    assert ("by reduce_scatter" in told) == ds_config.startswith("zero3")
    assert ("26 samples: 38 ranks have nothing to do" in told) == (device == "")
    assert " epochs)" in told and "FLOPs" in told and "checkpoint: " in told


def test_ranks_are_for_plans(capsys: pytest.CaptureFixture) -> None:
    for words in (["--ranks", "8"], ["--ranks", "0", "--dry_run"]):
        with pytest.raises(SystemExit):
            launch.parse_arguments(["--ds_config", "x.json", *words])
        assert "goes with --dry_run" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        launch.parse_arguments(["--ds_config", "x.json", "--out", ""])
    assert stopped.value.code == 2 and "--out is empty; name a folder" in capsys.readouterr().err


def test_what_a_ring_sends() -> None:
    """Of two ranks each sends half of the numbers and gets the other half, twice for an all-reduce."""
    assert cost.bytes_sent("all_reduce", 8e6, 2) == 8e6 and cost.bytes_sent("all_gather", 8e6, 2) == 4e6
    assert cost.bytes_sent("reduce_scatter", 8e6, 4) == 6e6 and cost.bytes_sent("all_reduce", 8e6, 1) == 0


def test_a_pair_has_one_name_and_ppa_its_keys(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """However the shards order a pair's languages; and by whatever a stream says how many samples it has."""
    source = Source(demo / "pairs")
    records = [source.read(0, number) for number in range(300)]
    for side, language in enumerate(source.langs):
        (tmp_path / language).write_text("".join(f"{record.texts[side]}\n" for record in records))
    first, second = reversed(source.langs)
    files = ["--src", str(tmp_path / first), "--tgt", str(tmp_path / second), "--langs", first, second]
    write_shards.main(["pairs", *files, "--out", str(tmp_path / "shards")])

    def told(*sets: str) -> str:
        words = ["--ds_config", str(launch.ROOT / "ds_configs/zero2_cpu.json"), "--recipe", "ppa", "--out", "none"]
        words += ["--data", str(tmp_path / "shards"), "--set", f"model.tokenizer={demo / 'tokenizer'}", *sets]
        dry_run(
            launch.parse_arguments([*words, "streams.ppa.queue_size=64", "streams.ppa.projection=16384"]),
            Process(0, 2, 0, 2),
        )
        return capsys.readouterr().out

    few = told("streams.ppa.samples=24")
    many = told("streams.ppa.samples=48")
    assert f"{second}-{first}" in few and f"{first}-{second}" not in few
    keys = [float(re.findall(r"keys ([\d.]+) by all_gather", text)[0]) for text in (few, many)]
    assert keys[0] > 0 and keys[1] == pytest.approx(keys[0] * 2, abs=0.05)
