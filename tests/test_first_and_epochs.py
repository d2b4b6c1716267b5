"""data.first and train.epochs: which records a run reads, and how many steps it takes."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_tools import write_shards
from tests import launch
from tests.launch import open_run
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.shards import Source, drop_later_records_per_language, find_sources
from xscale.errors import UserError
from xscale.objectives import OBJECTIVES
from xscale.ranks import Process
from xscale.recipe import load_recipe
from xscale.run.describe import notes_before_first_step

pytestmark = pytest.mark.usefixtures("quick_calibration")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a: 120 pairs en-de in 3 shards; b: 100 pairs de-en in 2; mono_en: 90 sentences; c: 40 pairs en-fr."""
    folder = tmp_path_factory.mktemp("first")

    def write(kind: str, out: str, lines: int, *options: str) -> None:
        for side in ("s", "t"):
            (folder / f"{out}.{side}").write_text("".join(f"{out} {side} david {n} .\n" for n in range(lines)))
        given = [f"--src={folder / out}.s", f"--tgt={folder / out}.t"] if kind == "pairs" else []
        given += [f"--text={folder / out}.s"] if kind == "mono" else []
        write_shards.main([kind, *given, f"--out={folder / 'data' / out}", "--shard_lines=50", *options])

    write("pairs", "a", 120, "--langs", "en", "de")
    write("pairs", "b", 100, "--langs", "de", "en")
    write("pairs", "c", 40, "--langs", "en", "fr")
    write("mono", "mono_en", 90, "--lang", "en")
    return folder / "data"


def loader_of(data: Path, demo: Path, recipe: str, *sets: str) -> Loader:
    return open_run(recipe, ["data.workers=0", f"model.tokenizer={demo / 'tokenizer'}", *sets], [data])


def consumed(loader: Loader, steps: int) -> dict[str, list[str]]:
    """Keys of the records of the first steps, by stream."""
    mixture = loader.mixture(Process(0, 1, 0, 1), "cpu", initial_state(loader.last_streams))
    dataset, keys = loader.dataset(), {}
    for _ in range(steps):
        plan = mixture.next_plan_of_rank()
        for stream in loader.last_streams:
            keys.setdefault(stream.name, []).extend(example.key for example in dataset.read_and_tokenise(stream, plan))
    return keys


@pytest.mark.parametrize("first", [1, 49, 50, 51, 100, 119, 120, 500])
def test_a_source_ends_behind_its_first_records(texts: Path, shard_records: Callable, first: int) -> None:
    source = Source(texts / "a")
    source.drop_all_but_first(first)
    expected = [record["key"] for shard in shard_records(texts / "a") for record in shard][:first]
    read = [source.read(s, n).key for s, count in enumerate(source.counts) for n in range(count)]
    assert read == expected and source.records == len(expected)
    assert len(source.shards) == len(source.counts) == -(-len(expected) // 50)
    with pytest.raises(IndexError):
        source.byte_lengths(len(source.counts) - 1, np.array([source.counts[-1]]))


def test_each_language_has_its_first_records_in_the_order_given(texts: Path) -> None:
    """en-de and de-en are one pair of languages, whose sources are taken in the order of --data."""

    def counted(directories: list[str], first: int | None) -> dict[str, int]:
        sources = drop_later_records_per_language(find_sources([texts / name for name in directories]), first)
        return {source.directory.name: source.records for source in sources}

    assert counted(["a", "b", "c", "mono_en"], None) == {"a": 120, "b": 100, "c": 40, "mono_en": 90}
    assert counted(["a", "b", "c", "mono_en"], 150) == {"a": 120, "b": 30, "c": 40, "mono_en": 90}
    assert counted(["b", "a", "c", "mono_en"], 150) == {"b": 100, "a": 50, "c": 40, "mono_en": 90}
    assert counted(["a", "b", "c", "mono_en"], 60) == {"a": 60, "c": 40, "mono_en": 60}


def test_an_epoch_is_the_first_records_once(texts: Path, demo: Path, shard_records: Callable) -> None:
    """150 pairs of en-de and 40 of en-fr, in their proportions: after 190 samples each was read once, no other."""
    sets = ["data.first=150", "data.alpha=1.0", "streams.tlm.samples=19"]
    loader = loader_of(texts, demo, "tlm", *sets)
    whole = {name: [r["key"] for shard in shard_records(texts / name) for r in shard] for name in "abc"}
    expected = Counter(whole["a"] + whole["b"][:30] + whole["c"])
    assert Counter(consumed(loader, 10)["tlm"]) == expected


def test_first_belongs_to_a_run_s_identity(texts: Path, demo: Path) -> None:
    whole, cut = (loader_of(texts, demo, "tlm", *sets) for sets in ([], ["data.first=150"]))
    other = loader_of(texts, demo, "tlm", "data.first=151")
    assert launch.identity(whole) != launch.identity(cut) != launch.identity(other)
    assert [loader.last_streams[0].active_record_count(loader.corpus.sources) for loader in (cut, whole)] == [190, 260]


def test_packed_streams_read_the_first_records_alone(texts: Path, demo: Path, shard_records: Callable) -> None:
    loader = loader_of(texts, demo, "mlm", "data.first=23", "streams.mlm.samples=3", "data.max_length=32")
    keys = consumed(loader, 12)["mlm"]
    assert set(keys) == {record["key"] for record in shard_records(texts / "mono_en")[0][:23]}


# Epochs


@pytest.mark.parametrize(
    ("epochs", "first", "samples"),
    [(1e-9, 40, 8), (1.0, 120, 8), (10.0, 100, 7), (0.1, 40, 3), (2.5, 41, 12), (0.001, 40, 100)],
)
def test_steps_of_epochs(texts: Path, demo: Path, epochs: float, first: int, samples: int) -> None:
    """The least number of steps that draws every pair so often, on average."""
    sets = [f"train.epochs={epochs}", f"data.first={first}", f"streams.tlm.samples={samples}", "train.warmup=0.3"]
    loader = loader_of(texts, demo, "tlm", *sets)
    pairs = first + min(first, 40)
    steps = next(n for n in range(1, 10**6) if n * samples >= Fraction(str(epochs)) * pairs)
    assert loader.recipe.train.steps == steps and loader.recipe.train.epochs == epochs
    assert loader.recipe.train.steps_of_share(0.3) == round(0.3 * steps)


def test_the_first_stream_of_pairs_counts(texts: Path, demo: Path) -> None:
    own = ["streams.more={objective: tlm, samples: 4, languages: [en-fr]}", "train.epochs=3"]
    assert loader_of(texts, demo, "xlm", "streams.tlm.samples=13", *own).recipe.train.steps == 60  # 3 * 260 / 13
    with pytest.raises(UserError, match=r"train.epochs needs a stream of sentence pairs, .* Set train.steps"):
        loader_of(texts, demo, "mlm", "train.epochs=3")


def test_the_command_line_says_steps_or_epochs(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("streams: {tlm: {objective: tlm, samples: 10}}\ntrain: {epochs: 2, warmup: 30}\n")

    def train(*sets: str):
        return load_recipe(str(path), list(sets), OBJECTIVES).train

    assert train().epochs == 2
    assert (train("train.steps=50").steps, train("train.steps=50").epochs) == (50, None)
    assert (train("train.steps=50", "train.epochs=1").epochs) == 1
    assert launch.parse_arguments(["--ds_config", "x", "--steps", "5"]).set == ["train.steps=5"]
    for wrong in ("0", "-1", ".inf", "many"):
        with pytest.raises(UserError, match=r"train\.epochs"):
            train(f"train.epochs={wrong}")
    for wrong in ("-1", "many"):
        path.write_text(f"streams: {{tlm: {{objective: tlm, samples: 10}}}}\ntrain: {{epochs: 2, steps: {wrong}}}\n")
        with pytest.raises(UserError, match=rf"\n  train\.steps: '?{wrong}"):
            train()


def test_epochs_come_before_steps(texts: Path, demo: Path, tmp_path: Path) -> None:
    """The config.yaml of a run has both."""
    path = tmp_path / "r.yaml"
    path.write_text("streams: {tlm: {objective: tlm, samples: 10}}\ntrain: {epochs: 2, steps: 51}\n")
    loader = loader_of(texts, demo, str(path))
    resolved = loader.recipe
    assert resolved.train.steps == 52
    notes = notes_before_first_step(resolved, loader.corpus)
    assert "train.epochs is 2, so the run has 52 steps. train.steps is ignored" in notes
    path.write_text(yaml.safe_dump(resolved.to_dict(), sort_keys=False))
    assert loader_of(texts, demo, str(path)).recipe == resolved


def test_warmup_must_fit_the_steps_of_the_epochs(texts: Path, demo: Path) -> None:
    sets = ["train.epochs=1", "streams.tlm.samples=10"]
    assert loader_of(texts, demo, "tlm", *sets, "train.warmup=26").recipe.train.steps == 26
    with pytest.raises(
        UserError, match=r"With train.epochs=1, the run has 26 steps. train.warmup: 27 steps are more than the 26 steps"
    ):
        loader_of(texts, demo, "tlm", *sets, "train.warmup=27")


def test_a_resume_may_take_more_epochs(texts: Path, demo: Path) -> None:
    two, three, nine, other = (
        launch.identity(loader_of(texts, demo, "tlm", *sets))
        for sets in (["train.epochs=2"], ["train.epochs=3"], ["train.steps=9"], ["train.epochs=2", "train.lr=0.5"])
    )
    assert two == three == nine != other


@pytest.mark.slow
def test_a_run_of_epochs_goes_on(texts: Path, demo: Path, tmp_path: Path) -> None:
    """One epoch, then the same command again, then with a second epoch; config.yaml says both."""

    def arguments(epochs: int) -> list[str]:
        sets = ["data.first=20", "streams.tlm.samples=10", "data.workers=0", f"train.epochs={epochs}"]
        sets.append(f"model.tokenizer={demo / 'tokenizer'}")
        out = ["--recipe", "tlm", "--data", str(texts), "--out", str(tmp_path / "run"), "--set", *sets]
        return ["--ds_config", "ds_configs/zero2_cpu.json", *out]

    assert "done: 4 steps" in launch.run(1, arguments(1))
    assert "is complete: it has done 4 of 4 steps" in launch.run(1, arguments(1))
    assert "step_00000004, after step 4" in launch.run(1, arguments(2))
    train = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]
    assert (train["steps"], train["epochs"]) == (8, 2)
    assert [entry["step"] for entry in launch.metrics(tmp_path / "run")] == list(range(1, 9))
