"""What a dry run foretells, against what a run then draws and computes."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data_tools import write_shards
from tests import launch
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.shards import Source
from xscale.dry_run import MEASURED_TOKENS, dry_run, measure_flops_per_second
from xscale.errors import LOG
from xscale.ranks import Process
from xscale.run.describe import language_share_lines, unlisted_shards_warnings
from xscale.run.resolve import build_initial_module
from xscale.step.cost import StepFlops

ALONE = Process(0, 1, 0, 1)


def loader_of(demo: Path, recipe: str, *sets: str, measured: bool = False) -> Loader:
    words = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", recipe, "--data", str(demo), "--set"]
    return launch.loader_of([*words, "data.workers=0", "model.preset=tiny", *sets], measured)


def numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"\d+\.\d+(?:e[+-]\d+)?|\d+", line.replace(",", ""))]


def test_shares_and_epochs(demo: Path) -> None:
    """Epochs by language, of pairs and of running text, are about those that the first steps consume."""
    loader = loader_of(
        demo, "xlm", "streams.mlm.samples=20", "streams.tlm.samples=30", "train.steps=500", measured=True
    )
    found: Counter[str] = Counter()
    for batch in loader.batches(ALONE, "cpu", initial_state(loader.last_streams), 64):
        for stream, keys in batch.record_keys.items():
            found.update(f"{stream} {key.split('-0')[0].rpartition('.')[2]}" for key in keys)
    shown = {}
    for line in language_share_lines(loader):
        stream = line.split()[1].rstrip(",")
        shown |= {f"{stream} {pair}": float(n) for pair, n in re.findall(r"(\S+) \S+% \((\S+) epochs\)", line)}
    records = {source.langs_name: source.records for source in loader.corpus.sources}
    drawn = {name: 500 / 64 * n / records[name.split()[1]] for name, n in found.items()}
    assert len(shown) == sum(len(spec.sources) for spec in loader.last_streams)
    small = shown.pop("mlm yy")  # 120 sentences are about 12 samples, of which the last of each epoch is short
    assert small == pytest.approx(drawn.pop("mlm yy"), rel=0.2)
    assert shown == pytest.approx(drawn, rel=0.1)


def test_shares_of_a_language_name_its_folders(demo: Path, tmp_path: Path) -> None:
    """Two folders of one language have a share each."""
    for name in ("mono_xx", "mono_yy"):
        shutil.copytree(demo / name, tmp_path / name)
    texts = [Source(demo / "mono_yy").read(0, number).texts[0] for number in range(50)]
    (tmp_path / "text").write_text("\n".join(texts), encoding="utf-8")
    other = tmp_path / "other" / "mono_yy"
    write_shards.main(["mono", "--text", str(tmp_path / "text"), "--lang", "yy", "--out", str(other)])
    (tmp_path / "tokenizer").symlink_to(demo / "tokenizer")
    (line,) = language_share_lines(loader_of(tmp_path, "mlm", "--data", str(other.parent), measured=True))
    assert re.findall(r"(\S+) \S+% \(\S+ epochs(.*?)\)", line) == [
        ("xx", ""),
        ("yy", f" of the folder {tmp_path / 'mono_yy'}"),
        ("yy", f" of the folder {other}"),
    ]


@pytest.mark.usefixtures("quick_calibration")
def test_a_dry_run_warns_of_swapped_columns(
    demo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOG, "propagate", True)
    swapped = tmp_path / "en-xx.txt"
    shutil.copy(demo / "lexicon/xx-en.txt", swapped)
    words = ["--ds_config", str(launch.ROOT / "ds_configs/zero2_cpu.json"), "--recipe", "mlm", "--dry_run"]
    words += ["--data", str(demo), "--out", str(tmp_path / "out"), "--set", "data.workers=0", "model.preset=tiny"]
    dry_run(launch.parse_arguments([*words, f"data.lexicons=[{swapped}]"]), ALONE)
    assert "rename the file to xx-en.txt" in caplog.text


@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize(("ds_config", "device"), [("zero3_fp16_nodes", "cuda"), ("zero2_cpu", "")])
def test_a_plan_for_another_machine(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture, ds_config: str, device: str
) -> None:
    """Half precision on GPUs, whatever is here. Nothing is written."""
    words = ["--ds_config", str(launch.ROOT / "ds_configs" / f"{ds_config}.json"), "--recipe", "xlm", "--dry_run"]
    words += ["--data", str(demo), "--out", str(tmp_path / "out"), "--ranks", "64"]
    dry_run(launch.parse_arguments(words), ALONE)
    told = capsys.readouterr().out
    assert f"ranks: 64 on {device}" in told and "memory per rank" in told and not list(tmp_path.iterdir())
    assert " epochs)" in told and "a step has about" in told and "size of a checkpoint: at most" in told
    assert re.search(r"data loading: one process prepares about [\d,]+ tokens/s", told)
    assert ("duration of a step: about" in told) == (device != "cuda")  # this machine's CPU says nothing about GPUs
    assert (
        "the run sets train.max_tokens to 65,536, so that a step uses at most 60% of the 80.0 GiB of GPU memory" in told
    ) == (device == "cuda")


def test_the_speed_of_a_cpu_is_measured_on_a_part_of_a_row(demo: Path) -> None:
    """A pass over a whole row can take minutes. The part has whole sequences: the same states as in the row."""
    loader = loader_of(demo, "tlm", "model.dropout=0.0")
    (batch,) = loader.batches(ALONE, "cpu", initial_state(loader.last_streams), 1)
    tokens = batch.rows[0].tokens
    module = build_initial_module(loader.recipe, loader.corpus)
    whole = module.encoder(batch.rows[0].to(torch.device("cpu")).tokens)
    passes = list[Tensor]()
    module.encoder.register_forward_hook(lambda _, tokens, states: passes.append(states))
    assert measure_flops_per_second(module.encoder, StepFlops(module.encoder), tokens) > 0
    for states in passes:
        assert MEASURED_TOKENS <= len(states) < MEASURED_TOKENS + loader.recipe.data.max_length < len(whole)
        torch.testing.assert_close(states, whole[: len(states)])


def test_tars_that_no_index_lists_are_told(demo: Path, tmp_path: Path) -> None:
    """Such as tars that were copied into a folder after its index was written."""
    shutil.copytree(demo, tmp_path / "demo")
    pairs = next((tmp_path / "demo").glob("pairs/*.tar"))
    assert unlisted_shards_warnings(loader_of(tmp_path / "demo", "tlm").corpus) == []
    shutil.copy(pairs, pairs.parent / "later-000000.tar")
    (line,) = unlisted_shards_warnings(loader_of(tmp_path / "demo", "tlm").corpus)
    assert f"1 tar file(s) in {pairs.parent}, such as later-000000.tar" in line
    assert unlisted_shards_warnings(loader_of(tmp_path / "demo", "tlm", "data.first=10").corpus) == []


def test_ranks_are_for_plans(capsys: pytest.CaptureFixture) -> None:
    for words in (["--ranks", "8"], ["--ranks", "0", "--dry_run"], ["--ranks", str(2**40), "--dry_run"]):
        with pytest.raises(SystemExit):
            launch.parse_arguments(["--ds_config", "x.json", *words])
        assert "--ranks needs --dry_run" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_calibration")
def test_a_pair_has_one_name(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """However the shards order a pair's languages."""
    source = Source(demo / "pairs")
    records = [source.read(0, number) for number in range(300)]
    for side, language in enumerate(source.langs):
        (tmp_path / language).write_text("".join(f"{record.texts[side]}\n" for record in records))
    first, second = reversed(source.langs)
    files = ["--src", str(tmp_path / first), "--tgt", str(tmp_path / second), "--langs", first, second]
    write_shards.main(["pairs", *files, "--out", str(tmp_path / "shards")])
    words = ["--ds_config", str(launch.ROOT / "ds_configs/zero2_cpu.json"), "--recipe", "tlm", "--out", "none"]
    words += ["--data", str(tmp_path / "shards"), "--set", f"model.tokenizer={demo / 'tokenizer'}"]
    dry_run(launch.parse_arguments(words), Process(0, 2, 0, 2))
    told = capsys.readouterr().out
    assert f"{second}-{first}" in told and f"{first}-{second}" not in told
