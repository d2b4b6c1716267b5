"""Measured while it trains: the same training bit for bit, the numbers of an independent look, the best that stays."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM, AutoTokenizer

from data_tools import write_shards
from data_tools.demo_world import World
from data_tools.ranks import Ranks
from tests import launch, plain
from tests.rows import one_thread  # noqa: F401
from tests.test_training import same_checkpoint
from xscale import config, export
from xscale.config import EvalTask
from xscale.data.mixture import initial_state
from xscale.data.shards import find_sources
from xscale.errors import UserError
from xscale.objectives import OBJECTIVES
from xscale.ranks import Process, without_launcher
from xscale.run.evals import Heldout, better, check_tasks, number_of
from xscale.run.job import Job, prepare
from xscale.run.metrics import JsonLines, Reporter, Tracker
from xscale.run.validation import Beside
from xscale.step.step import RowPass, StepSums, measure_rows, step_weights

ALONE = Process(0, 1, 0, 1)


@pytest.fixture(scope="module")
def heldout(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, and text of two languages that no training document has."""
    folder = tmp_path_factory.mktemp("heldout")
    world = World(0)
    for language in ("en", "xx"):
        sentences = [line for number in range(5001, 5009) for line in world.document(language, number)]
        (folder / f"{language}.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
        text = ["--text", str(folder / f"{language}.txt"), "--lang", language, "--out", str(folder / language)]
        write_shards.main(Ranks(), ["mono", *text])
    (folder / "pairs").symlink_to(demo / "heldout" / "pairs")
    return folder


def engine_of(job: Job) -> Any:
    module = job.module().double()
    return SimpleNamespace(module=module, device=torch.device("cpu"))


def mean_losses(lm: Any, job: Job, pieces: dict[str, Any]) -> dict[str, float]:
    """By transformers on padded sequences: stream/language or pair -> mean loss of its masked tokens."""
    names = {number: language for number, language in enumerate(job.languages)}
    sums: dict[str, list[float]] = {}
    for stream, piece in pieces.items():
        logits_BLV = plain.run(lm, piece.sequences, piece.types).logits
        languages = plain.split(piece.sequences.languages, piece.sequences.lengths)
        for sequence, labels in enumerate(plain.sequences_of(piece)[1]):
            name = "-".join(sorted({names[number] for number in languages[sequence]}))
            for place, label in labels.items():
                loss = F.cross_entropy(logits_BLV[sequence, place], torch.tensor(label)).item()
                sums.setdefault(f"{stream}/{name}", []).append(loss)
                sums.setdefault(stream, []).append(loss)
    return {name: sum(losses) / len(losses) for name, losses in sums.items()}


def test_losses_by_language(demo: Path) -> None:
    """Of a step of several streams, beside transformers: mean and count of each language; too long pairs."""
    sets = ["data.workers=0", "data.max_length=40", "model.dropout=0.0", "streams.mlm.samples=8"]
    job = prepare("xlm", sets, [demo]).calibrated()
    engine = engine_of(job)
    engine.module.eval()
    (batch,) = job.batches(ALONE, "cpu", initial_state(job.specs), 1)
    (row,) = batch.rows
    (pieces,) = launch.pieces_of(job, 1)
    _, values_K = RowPass(engine.module, row, engine.device, (0,))(
        engine.module, step_weights(job.recipe, batch.targets(), 0)
    )
    sums = StepSums(engine.module.reported, values_K, lambda: 0.0)
    found = sums.by_language(values_K.tolist(), job.recipe, batch.counts())
    expected = mean_losses(engine.module.encoder.lm, job, pieces)
    by_language = {name: loss for name, loss in expected.items() if "/" in name}
    assert {name.removeprefix("loss/") for name in found if name.startswith("loss/")} == set(by_language)
    assert {"mlm/en", "mlm/xx", "mlm/yy", "tlm/en-xx", "tlm/en-yy"} <= set(by_language)
    for name, loss in by_language.items():
        assert found[f"loss/{name}"] == pytest.approx(loss, rel=1e-9), name
    for stream, count in ((stream, batch.targets()[stream, "mlm"]) for stream in ("mlm", "tlm")):
        assert sum(n for name, n in found.items() if name.startswith(f"count/{stream}/")) == count
    special = job.tokenizer.pair.special
    (plan,) = [job.mixture(ALONE, "cpu", job.specs, initial_state(job.specs)).next_step()]
    long: dict[str, list[bool]] = {}
    for example in job.dataset(job.specs)._examples("tlm", [plan.rows[0]["tlm"]]):
        name = "-".join(sorted(example.langs))
        long.setdefault(name, []).append(sum(map(len, example.ids)) + special > 40)
    shares = {name: sum(of) / len(of) for name, of in long.items() if any(of)}
    assert shares and {n.rpartition("/")[2]: v for n, v in found.items() if n.startswith("too_long/")} == shares


@pytest.mark.parametrize("recipe", ["mixed", "contextual", "ppa"])
def test_heldout_losses(demo: Path, heldout: Path, recipe: str) -> None:
    """Every stream's own loss on records that are held out, beside transformers where it masks; twice the same; no
    dropout, no smoothing; the queue and the random numbers of the training are left alone."""
    queue = ["streams.ppa.queue_size=128"] if recipe in ("mixed", "ppa") else []
    sets = ["data.workers=0", "train.label_smoothing=0.1", *queue]
    job = prepare(recipe, sets, [demo]).calibrated()
    engine = engine_of(job)
    held = Heldout(EvalTask(name="heldout", data=[str(heldout)], limit=60), job, engine, ALONE, print)
    of, rows, targets, counts = held.job.recipe, held.batch.rows, held.batch.targets(), held.batch.counts()
    sums, again = (measure_rows(engine, of, rows, rank=0) for _ in range(2))
    assert torch.equal(sums.values_K, again.values_K) and engine.module.training
    assert engine.module.encoder.label_smoothing == 0.1
    for companion in engine.module.companions.values():
        assert not getattr(companion, "_batch", None) and not getattr(getattr(companion, "queue", None), "filled", 0)
    results = held.results(sums, sums.values_K.tolist(), targets, counts)
    assert set(job.recipe.streams) <= set(results) and all("loss" in results[stream] for stream in job.recipe.streams)
    if recipe != "mixed":
        return
    assert len({key for row in rows for key in row.keys["tlm"]}) == sum(len(row.keys["tlm"]) for row in rows) == 60
    (pieces,) = launch.pieces_of(held.job, 1)
    engine.module.eval()
    expected = mean_losses(engine.module.encoder.lm, job, {name: pieces[name] for name in ("mlm", "tlm")})
    assert set(expected) == {"mlm", "mlm/en", "mlm/xx", "tlm", "tlm/en-xx"}
    for name, loss in expected.items():
        assert results[name.replace("/", " ")]["loss"] == pytest.approx(loss, rel=1e-9), name


def test_what_cannot_be_measured(demo: Path, heldout: Path) -> None:
    def refused(*sets: str) -> str:
        with pytest.raises(UserError) as error:
            config.load_recipe("tlm", list(sets), {name: o.options for name, o in OBJECTIVES.items()})
        return str(error.value)

    def task(**fields: Any) -> str:
        return f"eval.tasks=[{json.dumps(fields)}]"

    assert "eval.tasks[0].name: 'xnli' is none of heldout, retrieval, alignment" in refused(task(name="xnli"))
    assert "data: needs shard directories" in refused(task(name="heldout"))
    assert "eval.tasks[0].mode: 'jobs' is not one of" in refused(task(name="heldout", mode="jobs"))
    assert "has no {out}" in refused(task(name="x", mode="job", command="true"))
    assert "eval.tasks[0].data: 'x' is not a list; write [x]" in refused(task(name="heldout", data="x"))
    assert "best: 'loss' is not of the form TASK/ROW/NUMBER" in refused("checkpoint.best=loss")
    best = "checkpoint.best=heldot/tlm/loss"
    assert "heldot/tlm/loss is of no inline task of eval.tasks; there are none" in refused(best)
    assert "there are alignment" in refused(best, task(name="alignment"))
    assert "heldout has a row for each stream: tlm" in refused(
        "checkpoint.best=heldout/xlm/loss", task(name="heldout", data=["x"])
    )
    for fields, told in (
        ({"name": "retrieval2", "mode": "job", "data": ["x"]}, "eval.retrieval2: of --data alone xscale.eval.run"),
        ({"name": "mining", "mode": "job", "data": [str(demo / "heldout")]}, "eval.mining: of --data alone"),
        ({"name": "retrieval", "data": ["/nope"]}, "^eval.retrieval: /nope: no index.json"),
        ({"name": "heldout", "data": [str(demo / "pairs")]}, "is trained on"),
        ({"name": "perplexity", "mode": "job", "data": [str(demo / "none")]}, "none"),
    ):
        with pytest.raises(UserError, match=told):
            check_tasks(prepare("tlm", [task(**fields)], [demo]))
    job = prepare("tlm", ["data.workers=0"], [demo]).calibrated()
    engine = engine_of(job)
    with pytest.raises(UserError, match="is trained on; give records that are held out"):
        Heldout(EvalTask(name="heldout", data=[str(demo / "pairs")]), job, engine, ALONE, print)
    with pytest.raises(UserError, match="no stream of the recipe reads any of en"):
        Heldout(EvalTask(name="heldout", data=[str(heldout / "en")]), job, engine, ALONE, print)


def test_the_better_number() -> None:
    results = {"heldout": {"tlm en-xx": {"loss": 3.0}}, "retrieval": {"en-xx": {"accuracy": 0.5}}}
    assert number_of(results, "heldout/tlm en-xx/loss") == 3.0 and number_of(results, "heldout/mlm/loss") is None
    assert better("heldout/tlm/loss", 2.0, 3.0) and not better("heldout/tlm/loss", 3.0, 3.0)
    assert better("retrieval/en-xx/accuracy", 0.6, 0.5) and better("aer/en-fr/aer", 0.2, 0.3)
    assert better("a/b/c", 0.0, None)


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "evals.jsonl", 0)
    lines.write(
        {"step": 1, "results": {"a": {"b": {"c": float("nan"), "d": float("-inf"), "e": 1.5}}}, "x": float("inf")}
    )
    lines.close()
    assert json.loads((tmp_path / "evals.jsonl").read_text()) == {
        "step": 1, "results": {"a": {"b": {"c": None, "d": None, "e": 1.5}}}, "x": None,
    }  # fmt: skip


def test_a_file_that_is_removed_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its folder, as by somebody who removes --out of a run that goes on; and the console says so."""
    said: list[str] = []
    monkeypatch.setattr("xscale.run.metrics.LOG", SimpleNamespace(error=said.append, warning=said.append))
    lines = JsonLines(tmp_path / "run" / "evals.jsonl", 0)
    for step in (1, 2, 3):
        lines.write({"step": step})
        lines.flush()
        if step == 1:
            shutil.rmtree(tmp_path / "run")
    lines.close()
    assert (tmp_path / "run" / "evals.jsonl").read_text() == '{"step": 2}\n{"step": 3}\n'
    assert len(said) == 1 and "evals.jsonl was removed while the run goes on" in said[0]


@pytest.mark.parametrize("scores", ["[1]", "3", "{}", '{"results": [1]}', '{"results": {"a": 1}}', "no JSON", None])
def test_scores_that_are_none(tmp_path: Path, scores: str | None) -> None:
    beside = object.__new__(Beside)
    beside.task, beside.scores = EvalTask(name="x", mode="job", command="{out}"), tmp_path / "scores.json"
    beside.process = SimpleNamespace(returncode=0)
    if scores is not None:
        beside.scores.write_text(scores)
    found, problem = beside.results()
    assert (found == {} and f"{tmp_path / 'scores.json'}" in problem) or (scores == "{}" and "results" in problem)


def test_what_a_job_says_when_it_fails_and_of_several_tasks(tmp_path: Path) -> None:
    beside = object.__new__(Beside)
    beside.task, beside.scores = EvalTask(name="x", mode="job", command="{out}"), tmp_path / "scores.json"
    beside.log, beside.process = tmp_path / "log.txt", SimpleNamespace(returncode=3)
    assert beside.results() == ({}, "exit code 3")
    beside.log.write_bytes(b"x" * 9000 + b"\nTraceback\nerror: no \xff disk\n\n")
    assert beside.results() == ({}, "exit code 3: error: no \ufffd disk")
    beside.process.returncode = 0
    beside.scores.write_text(
        '{"results": {"heldout": {"en-de": {"loss": 1}}, "retrieval": {"en-de": {"accuracy": 2}}}}'
    )
    both = {"heldout en-de": {"loss": 1}, "retrieval en-de": {"accuracy": 2}}
    assert beside.results() == ({"x": both}, ""), "one row took the other's place"
    beside.process.returncode = 2
    assert beside.results() == ({"x": both}, "exit code 2: error: no \ufffd disk"), "what was measured is lost"
    beside.process.returncode = 0
    beside.scores.write_text('{"results": {}}')
    assert beside.results() == ({}, f"{beside.scores}: has no results")
    beside.scores.unlink()
    for name, metric in (("heldout", "loss"), ("retrieval", "accuracy")):  # slurm/evaluate.sbatch's array
        scores = {"results": {name: {"en-de": {metric: len(metric) // 4}}}}
        (tmp_path / f"scores.{name}.json").write_text(json.dumps(scores))
    assert beside.results() == ({"x": both}, "")


def test_a_job_is_no_rank() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "PATH": "/bin"}
    assert without_launcher(env | {"TORCHELASTIC_RUN_ID": "x", "OMPI_X": "y"}) == {"SLURM_JOB_ID": "7", "PATH": "/bin"}


def test_a_steps_own_loss_stands_before_held_out_ones(tmp_path: Path, demo: Path) -> None:
    """Progress lines come every so many seconds, and at every step that is measured."""
    sets = ["train.steps=9", "eval.every=3", "eval.tasks=[{name: retrieval, data: [x]}]"]
    reporter, shown = Reporter(tmp_path, 0, prepare("tlm", sets, [demo]).recipe), []
    reporter.bar, reporter.line = None, lambda entry: shown.append(entry["step"]) or ""  # type: ignore
    for step in range(1, 10):
        numbers = dict.fromkeys(("loss", "loss/tlm", "lr", "tokens_per_s", "step_s"), 1.0)
        reporter.report({"step": step} | numbers)
    reporter.close()
    assert shown == [1, 3, 6, 9]


def test_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: Path) -> None:
    """Calls of wandb's shape; one that fails is not asked again, and the run goes on; one that is absent is refused."""
    calls: list[Any] = []

    def log(numbers: dict[str, float], step: int) -> None:
        calls.append((numbers, step))
        if step == 2:
            raise OSError("no network")

    fake = SimpleNamespace(init=lambda **fields: calls.append(fields), log=log, finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    tracker = Tracker("trackio", tmp_path / "run", {"train.lr": 0.1})
    for step in (1, 2, 3):
        tracker.add({"step": step, "loss": 2.0, "grad_norm": None})
    tracker.close()
    begun, *logged = calls
    assert begun == {"project": "xscale", "name": "run", "config": {"train.lr": 0.1}, "resume": "allow"}
    assert logged == [({"loss": 2.0}, 1), ({"loss": 2.0}, 2)]
    calls.clear()
    tracker = Tracker("trackio", tmp_path / "run", {})
    for entry in ({"step": 9, "loss": 1.0}, {"step": 4, "eval/x": 0.5}):  # a job's, that came late
        tracker.add(entry)
    assert calls[1:] == [({"loss": 1.0}, 9), ({"eval/x": 0.5, "eval/step": 4}, 9)]
    with pytest.raises(UserError, match=r"train\.tracker: wandb is not installed; pip install wandb"):
        prepare("tlm", ["train.tracker=wandb"], [demo])


# Whole runs

COMMON = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mixed"]
SMALL = ["checkpoint.every=4", "streams.ppa.queue_size=64", "train.measure_every=3", "train.lr=0.003"]


@pytest.fixture(scope="module")
def runs(demo: Path, heldout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without and with evaluation, resumed in the middle, and with jobs beside; in one launch of 2 ranks."""
    out = tmp_path_factory.mktemp("validation")

    def run(name: str, tasks: list[dict[str, Any]], *sets: str) -> list[str]:
        fields = [*SMALL, "train.steps=8", "train.warmup=2", f"eval.tasks={json.dumps(tasks)}", *sets]
        return [*COMMON, "--data", str(demo), "--out", str(out / name), "--set", *fields]

    retrieval = {"name": "retrieval", "data": [str(heldout / "pairs")], "limit": 41}

    inline: list[dict[str, Any]] = [
        {"name": "heldout", "data": [str(heldout)], "limit": 40},
        retrieval,
        {"name": "alignment"},
    ]
    copy = f"test -f {{model}}/config.json && cp {out / 'scores'} {{out}}"
    jobs: list[dict[str, Any]] = [
        retrieval,
        {"name": "copy", "mode": "job", "command": copy},
        {"name": "broken", "mode": "job", "command": "echo {step} {out}; exit 3"},
    ]
    best = ("eval.every=2", "checkpoint.best=heldout/tlm/loss", "checkpoint.keep=9")
    same = ("eval.every=2", "checkpoint.best=retrieval/en-xx/sentences")  # always 41: the first is the best
    (out / "scores").write_text('{"model": "m", "results": {"pos": {"de": {"zs": 0.5, "seeds": [1]}}}, "failed": {}}')
    listed = [
        run("plain", []),
        run("measured", inline, *best),
        [*run("again", inline, *best), "--resume", str(out / "measured" / "checkpoints" / "step_00000004")],
        run("jobs", jobs, *same),
    ]
    (out / "list.json").write_text(json.dumps(listed))
    launch.run(2, [str(out / "list.json")], script=str(launch.ROOT / "tests" / "many_runs.py"))
    return out


def evals(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "evals.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_is_the_same_bit_for_bit(runs: Path) -> None:
    last = Path("checkpoints") / "step_00000008"
    same_checkpoint(runs / "plain" / last, runs / "measured" / last)
    assert launch.without_times(runs / "plain") == launch.without_times(runs / "measured")
    entries = evals(runs / "measured")
    assert [entry["step"] for entry in entries] == [0, 2, 4, 6, 8]
    assert all(set(entry["results"]) == {"heldout", "retrieval", "alignment"} for entry in entries)
    losses = [entry["results"]["heldout"]["mlm"]["loss"] for entry in entries]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_resume_measures_alike(runs: Path) -> None:
    timeless = [[entry["step"], entry["results"]] for entry in evals(runs / "measured")]
    assert timeless[3:] == [[entry["step"], entry["results"]] for entry in evals(runs / "again")]


@pytest.mark.slow
def test_retrieval_is_that_of_the_exported_model(runs: Path, heldout: Path, tmp_path: Path) -> None:
    """By transformers and brute force."""
    export.export(runs / "measured" / "checkpoints" / "step_00000008", tmp_path / "hf")
    lm = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    (source,) = find_sources([heldout / "pairs"])
    texts = [source.read(0, n).texts for n in range(41)]

    def vector(text: str) -> torch.Tensor:
        with torch.no_grad():
            states = lm(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[-1]
        return F.normalize(states[0, 1:-1].mean(0), dim=0)

    first, second = (torch.stack([vector(pair[side]) for pair in texts]) for side in (0, 1))
    right = sum(int((first[n] @ second.T).argmax() == n) for n in range(41)) / 41
    (found,) = evals(runs / "measured")[-1]["results"]["retrieval"].values()
    assert found["->".join(source.langs)] == pytest.approx(right, abs=1e-9) and found["sentences"] == 41


@pytest.mark.slow
def test_the_best_checkpoint_stays(runs: Path) -> None:
    losses = {entry["step"]: entry["results"]["heldout"]["tlm"]["loss"] for entry in evals(runs / "measured")}
    folder, best = runs / "measured" / "checkpoints", min(losses, key=losses.__getitem__)
    assert (folder / "best").read_text() == f"step_{best:08d}\n"
    assert (folder / f"step_{best:08d}" / "manifest.json").exists()
    folder = runs / "jobs" / "checkpoints"  # keeps 2
    assert (folder / "best").read_text() == "step_00000000\n" and (folder / "step_00000000" / "manifest.json").exists()


@pytest.mark.slow
def test_jobs_beside_the_run(runs: Path) -> None:
    """On an export of the step's checkpoint; one that fails is a line in the log, and the run ends well."""
    entries = evals(runs / "jobs")
    good = [entry for entry in entries if entry.get("job")]
    assert good and all(entry["results"] == {"copy": {"de": {"zs": 0.5}}} for entry in good)
    assert [entry for entry in entries if "failed" in entry] and len(launch.metrics(runs / "jobs")) == 8
    log = (runs / "jobs" / "run.log").read_text()
    assert "eval.broken of step 0 failed (exit code 3: 0 " in log and "done: 8 steps" in log
