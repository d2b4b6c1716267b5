"""Pairs over data.max_length: the share of them is known before step 1, and a run that drops many says so, once."""

import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_tools import tokenizer as tokenizers
from tests import launch
from tests.launch import open_run
from xscale.data.loader import Loader
from xscale.data.shards import find_sources
from xscale.data.tokenizer import Tokenizer
from xscale.dry_run import dry_run
from xscale.ranks import Process
from xscale.run.describe import dropped_pairs_warnings

SETS = ["data.workers=0", "streams.tlm.samples=32"]


def loader_of(data: Path, recipe: str, *sets: str) -> Loader:
    return open_run(recipe, ["data.workers=0", *sets], [data])


def lengths_of(data: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of all pairs there, by a loop over each with the tokenizer's own template."""
    lengths = []
    for source in find_sources([data]):
        for shard, count in enumerate(source.counts if source.kind == "pair" else []):
            for record in range(count):
                pair = tokenizer.hf(*source.read(shard, record).texts, add_special_tokens=True)
                lengths.append(len(pair["input_ids"]))
    return np.array(lengths)


def test_the_share_is_known_before_step_1(demo: Path, tokenizer: Tokenizer) -> None:
    """As all pairs have it, to a few standard errors of the 512 and more that are read of 2,048."""
    lengths = lengths_of(demo / "pairs", tokenizer)
    for max_length in (20, 36, 128):
        share = (lengths > max_length).mean()
        loader = loader_of(demo, "tlm", f"data.max_length={max_length}", "streams.tlm.languages=[en-xx]")
        found = loader.calibration.streams["tlm"].too_long
        assert found == pytest.approx(share, abs=0.01 + 0.06 * (share * (1 - share)) ** 0.5)
        assert bool(dropped_pairs_warnings(loader)) == (found > 0.03)
        assert max_length != 20 or share > 0.5
        assert max_length != 128 or found == 0


def test_on_real_text(real: Path, tmp_path: Path, write_pairs: Callable[..., None]) -> None:
    """Verses: 20 % and more of the pairs have over 100 tokens."""
    texts = [tmp_path / f"bible.{language}" for language in ("en", "de")]
    for path in texts:
        with lzma.open(real / "parallel" / "bible" / f"{path.name}.xz", "rt", encoding="utf-8") as lines:
            path.write_text("".join(line for line, _ in zip(lines, range(1500), strict=False)), encoding="utf-8")
    write_pairs(*texts, tmp_path / "data" / "pairs")
    out = ["--out", str(tmp_path / "data" / "tokenizer"), "--vocab_size", "2000"]
    tokenizers.main(["--data", str(tmp_path / "data"), *out])
    lengths = lengths_of(tmp_path / "data", Tokenizer(tmp_path / "data" / "tokenizer"))
    for max_length in (100, 160):
        share = (lengths > max_length).mean()
        loader = loader_of(tmp_path / "data", "tlm", f"data.max_length={max_length}")
        assert loader.calibration.streams["tlm"].too_long == pytest.approx(share, abs=0.03), max_length
        assert bool(dropped_pairs_warnings(loader)) == (loader.calibration.streams["tlm"].too_long > 0.03)


def test_the_warning_names_stream_share_and_remedy(demo: Path) -> None:
    sets = ["data.max_length=28", "streams.more={objective: tlm, samples: 4}"]
    loader = loader_of(demo, "xlm", *sets)
    tlm, more = dropped_pairs_warnings(loader)  # monolingual text is no pair
    share = loader.calibration.streams["more"].too_long
    assert tlm.startswith("warning: streams.tlm drops ") and more == (
        f"warning: streams.more drops {share:.1%} of its pairs, because these pairs are longer than data.max_length "
        "(28 tokens). Set a larger data.max_length or data.overlong=truncate, or write "
        "shards without these pairs (`xscale data write_shards pairs ... --max_tokens 28`)"
    )
    assert dropped_pairs_warnings(loader_of(demo, "xlm", *sets, "data.overlong=truncate")) == []
    (phase,) = dropped_pairs_warnings(loader_of(demo, "tlm", "phases=[{until: 9, data.max_length: 28}]"))
    assert "of its pairs in a phase of the run, because these pairs are longer than data.max_length (28 " in phase


@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("max_length", [28, 128])
def test_dry_run_warns(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, max_length: int
) -> None:
    monkeypatch.chdir(launch.ROOT)
    words = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "tlm", "--data", str(demo), "--dry_run"]
    sets = [*SETS, f"data.max_length={max_length}", "model.preset=tiny"]
    dry_run(launch.parse_arguments([*words, "--out", str(tmp_path / "out"), "--set", *sets]), Process(0, 1, 0, 1))
    out = capsys.readouterr().out
    assert out.count("warning: streams.tlm drops") == (1 if max_length == 28 else 0)
