"""Measured while it trains: the same training bit for bit, the numbers of an independent look, the best that stays."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data_tools import write_shards
from data_tools.demo_world import World
from tests import launch, plain
from tests.launch import open_run
from tests.rows import one_thread  # noqa: F401
from tests.test_training import same_checkpoint
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.shards import find_sources
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.dry_run import dry_run
from xscale.errors import LOG, UserError
from xscale.eval.in_training import (
    check_metric_is_measured,
    find_and_check_task_sources,
    make_heldout_loader,
    make_heldout_streams,
    measure_heldout_losses,
)
from xscale.eval.retrieval import retrieval_accuracies
from xscale.metric_keys import count_key
from xscale.objectives import OBJECTIVES, Losses, Parts, ppa, tlm
from xscale.ranks import CpuGroup, Process
from xscale.recipe import EvalTask, load_recipe
from xscale.run.metrics import JsonLines, RunMetrics, TensorBoardWriter
from xscale.run.resolve import resolve_run
from xscale.run.run_status import start_logging
from xscale.run.validation import Validation
from xscale.step.metrics import language_metrics, stream_metrics
from xscale.step.step import compute_row_loss, sum_evaluation_losses, weights_of_term_sums

pytestmark = pytest.mark.usefixtures("quick_calibration")

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
        write_shards.main(["mono", *text])
    (folder / "pairs").symlink_to(demo / "heldout" / "pairs")
    return folder


def engine_of(loader: Loader) -> Any:
    module = launch.module(loader).double()
    return SimpleNamespace(module=module, device=torch.device("cpu"))


def mean_losses(lm: Any, loader: Loader, stream_batches: dict[str, Any]) -> dict[str, float]:
    """By transformers on padded sequences: stream/language or pair -> mean loss of its masked tokens."""
    names = {number: language for number, language in enumerate(loader.corpus.languages, start=1)}
    sums: dict[str, list[float]] = {}
    for stream, stream_batch in stream_batches.items():
        logits_BLV = plain.run(lm, stream_batch.sequences, stream_batch.types).logits
        languages = plain.split(stream_batch.sequences.languages, stream_batch.sequences.lengths)
        for sequence, labels in enumerate(plain.sequences_of(stream_batch)[1]):
            name = "-".join(sorted({names[number] for number in languages[sequence]}))
            for place, label in labels.items():
                loss = F.cross_entropy(logits_BLV[sequence, place], torch.tensor(label)).item()
                sums.setdefault(f"{stream}/{name}", []).append(loss)
                sums.setdefault(stream, []).append(loss)
    return {name: sum(losses) / len(losses) for name, losses in sums.items()}


def test_losses_by_language(demo: Path) -> None:
    """Of a step of several streams, beside transformers: mean and count of each language; too long pairs."""
    sets = ["data.workers=0", "data.max_length=40", "model.dropout=0.0", "streams.mlm.samples=8"]
    loader = open_run("xlm", sets, [demo])
    engine = engine_of(loader)
    engine.module.eval()
    (batch,) = loader.batches(ALONE, "cpu", initial_state(loader.last_streams), 1)
    (row,) = batch.rows
    (stream_batches,) = launch.pieces_of(loader, 1)
    weights = weights_of_term_sums(loader.recipe, batch.counts_without_languages(), 0)
    _, sums = compute_row_loss(engine.module, row.to(engine.device), {}, weights, (0,))
    found = language_metrics(sums.by_key(), batch.counts(), loader.recipe)
    expected = mean_losses(engine.module.encoder.lm, loader, stream_batches)
    by_language = {name: loss for name, loss in expected.items() if "/" in name}
    assert {name.removeprefix("loss/") for name in found if name.startswith("loss/")} == set(by_language)
    assert {"mlm/en", "mlm/xx", "mlm/yy", "tlm/en-xx", "tlm/en-yy"} <= set(by_language)
    for name, loss in by_language.items():
        assert found[f"loss/{name}"] == pytest.approx(loss, rel=1e-9), name
    for stream in ("mlm", "tlm"):
        counts = [n for name, n in found.items() if name.startswith(f"count/{stream}/")]
        assert sum(counts) == batch.counts()[count_key(stream, "mlm")]
    special = loader.corpus.tokenizer.pair.special_count
    plan = loader.mixture(ALONE, "cpu", initial_state(loader.last_streams)).next_plan_of_rank()
    pairs = next(stream for stream in loader.last_streams if stream.name == "tlm")
    dataset = loader.dataset()
    long: dict[str, list[bool]] = {}
    for example in dataset.read_and_tokenise(pairs, plan):
        name = "-".join(sorted(example.langs))
        long.setdefault(name, []).append(sum(map(len, example.ids)) + special > 40)
    shares = {name: sum(of) / len(of) for name, of in long.items() if any(of)}
    assert shares and {n.rpartition("/")[2]: v for n, v in found.items() if n.startswith("too_long/")} == shares


def test_a_metric_with_a_number_for_each_target_is_reported_by_language(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a predicted term and of one that an objective counts itself. The number of a target is the index of its pair,
    so each pair's mean is this index."""

    def collate(samples: Any, options: Any, context: CollateContext) -> StreamBatch:
        batch = tlm.OBJECTIVE.collate(samples, options, context)
        groups = batch.group_of_target | {"pairs": context.group_numbers(batch.sequences)}
        counts = batch.target_counts | {"pairs": len(groups["pairs"])}
        return replace(batch, target_counts=counts, group_of_target=groups, arrays=groups)

    def loss(parts: Parts, states: Any, arrays: Any, options: Any) -> Losses:
        metrics = {f"index_{term}": (arrays[term], term) for term in ("mlm", "pairs")}
        return replace(tlm.OBJECTIVE.loss(parts, states, arrays, options), metrics=metrics)

    monkeypatch.setitem(OBJECTIVES, "tlm", replace(tlm.OBJECTIVE, collate=collate, loss=loss))
    loader = open_run("tlm", ["data.workers=0"], [demo], measured=False)
    engine = engine_of(loader)
    (batch,) = loader.batches(ALONE, "cpu", initial_state(loader.last_streams), 1)
    sums = sum_evaluation_losses(engine, loader.recipe, batch.rows, rank=0).by_key()
    found = language_metrics(sums, batch.counts(), loader.recipe)
    pairs = batch.rows[0].language_groups["tlm"]
    expected = {f"index_{term}/tlm/{pair}": pairs.index(pair) for term in ("mlm", "pairs") for pair in pairs}
    assert expected.items() >= {n: v for n, v in found.items() if n.startswith("index_")}.items() != set()
    numbers = np.concatenate([row.arrays["tlm"]["pairs"] for row in batch.rows])
    whole = stream_metrics(sums, batch.counts(), loader.recipe)
    assert whole["index_pairs/tlm"] == pytest.approx(numbers.mean(), rel=1e-9)


@pytest.mark.parametrize("recipe", ["mixed", "contextual", "ppa"])
def test_heldout_losses(demo: Path, heldout: Path, recipe: str) -> None:
    """Every stream's own loss on records that are held out, beside transformers where it masks; twice the same; no
    dropout, no smoothing; the queue and the random numbers of the training are left alone."""
    queue = ["streams.ppa.queue_size=128"] if recipe in ("mixed", "ppa") else []
    sets = ["data.workers=0", "train.label_smoothing=0.1", *queue]
    loader = open_run(recipe, sets, [demo], measured=False)
    engine = engine_of(loader)
    held = make_heldout_loader(EvalTask(name="heldout", data=[str(heldout)], limit=60), loader)
    (batch,) = held.batches(ALONE, "cpu", initial_state(held.last_streams), 1)
    sums, again = (sum_evaluation_losses(engine, held.recipe, batch.rows, rank=0) for _ in range(2))
    assert torch.equal(sums.values_K, again.values_K) and engine.module.training
    for auxiliary_state in engine.module.auxiliary_states.values():
        if isinstance(auxiliary_state, ppa.Moco):
            assert not auxiliary_state._rows and not auxiliary_state.queue.filled
    results = measure_heldout_losses(engine, held.recipe, batch, 0, print)
    assert set(loader.recipe.streams) <= set(results) and all(
        "loss" in results[stream] for stream in loader.recipe.streams
    )
    if recipe != "mixed":
        return
    keys = batch.record_keys["tlm"]
    assert len(set(keys)) == len(keys) == 60
    (stream_batches,) = launch.pieces_of(held, 1)
    engine.module.eval()
    expected = mean_losses(engine.module.encoder.lm, loader, {name: stream_batches[name] for name in ("mlm", "tlm")})
    assert set(expected) == {"mlm", "mlm/en", "mlm/xx", "tlm", "tlm/en-xx"}
    for name, loss in expected.items():
        assert results[name.replace("/", " ")]["loss"] == pytest.approx(loss, rel=1e-9), name


def test_no_language_is_hidden_from_what_is_held_out(demo: Path, heldout: Path) -> None:
    """As language_dropout hides them in training."""
    sets = [f"streams.tlm.{field}" for field in ("language_embeddings=true", "language_dropout=1.0", "samples=4")]
    loader = open_run("tlm", ["data.workers=0", *sets], [demo], measured=False)
    held = make_heldout_loader(EvalTask(name="heldout", data=[str(heldout)], limit=20), loader)
    (held_batch,) = held.batches(ALONE, "cpu", initial_state(held.last_streams), 1)
    (batch,) = loader.batches(ALONE, "cpu", initial_state(loader.last_streams), 1)
    types = [{int(n) for row in of.rows for n in row.tokens.types} for of in (batch, held_batch)]
    assert types == [{0}, {1 + loader.corpus.languages.index(language) for language in ("en", "xx")}]


def test_what_cannot_be_measured(demo: Path, heldout: Path) -> None:
    def refused(*sets: str) -> str:
        with pytest.raises(UserError) as error:
            load_recipe("tlm", list(sets), OBJECTIVES)
        return str(error.value)

    def task(**fields: Any) -> str:
        return f"eval.tasks=[{json.dumps(fields)}]"

    assert "tasks[0].name: 'alignment': the text must match pattern '^(heldout|" in refused(task(name="alignment"))
    assert "eval.tasks[0].data: 'x': the value must be a valid array" in refused(task(name="heldout", data="x"))
    assert "best: 'loss': the text must match pattern" in refused("checkpoint.best=loss")
    best = "checkpoint.best=heldot/tlm/loss"
    assert "heldot/tlm/loss does not begin with the name of a task in eval.tasks (names: none)" in refused(best)
    assert "(names: retrieval)" in refused(best, task(name="retrieval"))
    loader = open_run("tlm", ["data.workers=0"], [demo], measured=False)
    with pytest.raises(UserError, match=r"this run trains on .*Use other shards"):
        make_heldout_loader(EvalTask(name="heldout", data=[str(demo / "pairs")]), loader)
    with pytest.raises(UserError, match=r"the evaluation data is en \(mono\), but no stream of the recipe reads text"):
        make_heldout_loader(EvalTask(name="heldout", data=[str(heldout / "en")]), loader)


def test_a_language_that_the_run_lacks_is_refused(demo: Path, heldout: Path) -> None:
    loader = open_run(
        "tlm", ["data.workers=0", f"model.tokenizer={demo / 'tokenizer'}"], [demo / "pairs_yy"], measured=False
    )
    for name in ("retrieval", "heldout"):
        with pytest.raises(UserError, match=r"pairs has text in xx, but the --data of this run has no text"):
            find_and_check_task_sources(
                EvalTask(name=name, data=[str(heldout / "pairs")]), loader.recipe, loader.corpus
            )


@pytest.fixture(scope="module")
def odd(demo: Path, heldout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out pairs without word links, and half of a shard."""
    folder = tmp_path_factory.mktemp("odd")
    (source,) = find_sources([heldout / "pairs"])
    texts = [source.read(0, number).texts for number in range(60)]
    sides = [folder / f"bare.{language}" for language in source.langs]
    for path, lines in zip(sides, zip(*texts, strict=True), strict=True):
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    files = ["--src", str(sides[0]), "--tgt", str(sides[1]), "--langs", *source.langs]
    write_shards.main(["pairs", *files, "--out", str(folder / "bare")])
    shutil.copytree(heldout / "pairs", folder / "torn")
    tar = next((folder / "torn").glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:5000])
    return folder


def test_held_out_pairs_without_word_links(demo: Path, heldout: Path, odd: Path) -> None:
    """Objectives that need links leave such a source out if another has links; others measure it."""
    recipe, corpus = resolve_run("mixed", ["data.workers=0"], [demo])
    sources = find_sources([odd / "bare", heldout / "pairs"])
    measured = {s.name: (s.sources, s.samples) for s in make_heldout_streams(recipe, corpus, sources)}
    second, both = ((1,), 1000), ((0, 1), 1060)
    assert measured == {"tlm": both, "alignlm": second, "ppa": both, "word_contrast": second}
    measured = {stream.name for stream in make_heldout_streams(recipe, corpus, sources[:1])}
    assert measured == {"tlm", "ppa"}, "without any links, the other objectives are measured"


HELDOUT, RETRIEVAL = "heldout, data: [{heldout}]", "retrieval, data: [{heldout}/pairs]"
WRONG = {
    "links": (
        "alignlm",
        ["heldout, data: [{odd}/bare]"],
        [],
        r"eval\.heldout: .* is en-xx \(pair\), but the data has no word alignments for .* need them \(alignlm\), and",
    ),
    "no pairs": ("tlm", ["retrieval, data: [{heldout}/en]"], [], r"eval\.retrieval: .*/en has no sentence pairs"),
    "absent": ("tlm", ["retrieval, data: [/nope]"], [], r"^eval\.retrieval: /nope does not exist"),
    "torn": ("tlm", ["retrieval, data: [{odd}/torn]"], [], r"eval\.retrieval: .*torn.*bytes"),
    "no such stream": (
        "tlm",
        [HELDOUT],
        ["checkpoint.best=heldout/mlm en/loss"],
        r"^checkpoint\.best: .*not measure heldout/mlm en/loss\. Write .* heldout, each ROW begins with tlm$",
    ),
    "no such pair": (
        "tlm",
        [RETRIEVAL],
        ["checkpoint.best=retrieval/xx-en/accuracy"],
        r"^checkpoint\.best: .* retrieval, each ROW begins with all or en-xx$",
    ),
    "ZeRO": ("tlm", [RETRIEVAL], ["stage 3"], r"eval\.retrieval: .*ZeRO stage 3 .*ds_config of stage 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_dry_run_refuses_what_step_0_would(case: str, demo: Path, heldout: Path, odd: Path, tmp_path: Path) -> None:
    recipe, tasks, more, told = WRONG[case]
    names = {"demo": demo, "heldout": heldout, "odd": odd}
    sets = [f"eval.tasks=[{', '.join(f'{{name: {task.format(**names)}}}' for task in tasks)}]", "data.workers=0"]
    sets += [setting for setting in more if "=" in setting]
    config = "zero3_bf16" if "stage 3" in more else "zero2_cpu"
    words = ["--ds_config", f"{launch.ROOT}/ds_configs/{config}.json", "--recipe", recipe, "--data", str(demo)]
    args = launch.parse_arguments([*words, "--out", str(tmp_path / "out"), "--set", *sets])
    with pytest.raises(UserError, match=told):
        dry_run(args, ALONE)


def test_a_dry_run_passes_what_can_be_measured(demo: Path, heldout: Path, tmp_path: Path) -> None:
    tasks = f"[{{name: heldout, data: [{heldout}]}}, {{name: retrieval, data: [{heldout}]}}]"
    sets = [f"eval.tasks={tasks}", "checkpoint.best=heldout/alignlm en-xx/loss.bi", "data.workers=0"]
    words = ["--ds_config", f"{launch.ROOT}/ds_configs/zero2_cpu.json", "--recipe", "mixed", "--data", str(demo)]
    sets.append("streams.ppa.queue_size=64")
    dry_run(launch.parse_arguments([*words, "--out", str(tmp_path / "out"), "--set", *sets]), ALONE)


def test_a_number_that_an_evaluation_lacks_is_named_with_what_it_has() -> None:
    results = {"heldout": {"tlm en-xx": {"loss": 3.0}}}
    check_metric_is_measured(results, "heldout/tlm en-xx/loss")
    check_metric_is_measured(results, "aer/en-fr/AER")
    with pytest.raises(UserError, match=r"heldout/mlm/loss\. .* heldout have the rows tlm en-xx\."):
        check_metric_is_measured(results, "heldout/mlm/loss")


def test_means_choose_among_evaluations_of_earlier_starts(tmp_path: Path) -> None:
    """A mean that is not finite chooses nothing."""
    lines = list[str]()
    for step, number in ((5, 0.5), (10, 0.25), (15, None)):
        mean = number and (0.25 + number) / 2
        rows = {"all": {"accuracy": mean}, "en-xx": {"accuracy": 0.25}, "en-yy": {"accuracy": number}}
        lines.append(json.dumps({"step": step, "results": {"retrieval": rows}}))
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step_{step:08d}" / "manifest.json").touch()
    (tmp_path / "evals.jsonl").write_text("\n".join(lines) + "\n")
    validation = validation_in(tmp_path, 15, best="retrieval/all/accuracy")
    validation.lines.flush_or_keep_lines()
    assert (
        validation.write_name_of_best_checkpoint() == {5}
        and (tmp_path / "checkpoints" / "best").read_text() == "step_00000005\n"
    )


@pytest.mark.parametrize(
    "damage",
    [
        None,
        '["step": 5]',
        '{"step": 5}',
        '{"step": 5, "results": [1]}',
        '{"step": 5, "results": {"t": 3}}',
        '{"step": 5, "results": {"t": {"a": {"loss": "x"}}}}',
        '{"step": 5, "results": {"t": {"a": {"loss": 1' + "0" * 400 + "}}}}",
    ],
)
def test_a_best_checkpoint_whose_line_is_lost_is_an_error(tmp_path: Path, damage: str | None) -> None:
    """None: the file evals.jsonl is lost. The error leaves all files as they are."""
    lines = list[str]()
    for step, loss in ((5, 1.0), (10, 2.0)):
        lines.append(json.dumps({"step": step, "results": {"t": {"a": {"loss": loss}}}}))
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step_{step:08d}" / "manifest.json").touch()
    best = tmp_path / "checkpoints" / "best"
    (tmp_path / "evals.jsonl").write_text("\n".join(lines) + "\n")
    assert validation_in(tmp_path, 10, best="t/a/loss").write_name_of_best_checkpoint() == {5}
    assert best.read_text() == "step_00000005\n"
    (tmp_path / "evals.jsonl").write_text(f"{lines[1]}\n{damage}\n")
    if damage is None:
        (tmp_path / "evals.jsonl").unlink()
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=r"no undamaged line with the scores of the best checkpoint, .*step_00000005\. Restore"
    ):
        validation_in(tmp_path, 10, best="t/a/loss")
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before
    best.unlink()
    kept = validation_in(tmp_path, 10, best="t/a/loss").write_name_of_best_checkpoint()
    assert kept == (set() if damage is None else {10})
    (tmp_path / "evals.jsonl").write_text(f"{lines[0]}\n")
    best.write_text("step_00000010\n")  # is made again, after a start from step 5
    assert validation_in(tmp_path, 5, best="t/a/loss").write_name_of_best_checkpoint() == {5}


def validation_in(out: Path, step: int, best: str | None = None) -> Validation:
    """The evaluations of a run in a folder, after a step."""
    recipe: Any = SimpleNamespace(
        eval=SimpleNamespace(tasks=["t"], every=5),
        checkpoint=SimpleNamespace(best=best),
        train=SimpleNamespace(steps=20),
    )
    context: Any = SimpleNamespace(out=out, cpu_group=CpuGroup(), watch=None)
    metrics: Any = SimpleNamespace(board=TensorBoardWriter(None, 0))
    return Validation(context, recipe, {}, step, metrics)


def test_the_log_has_the_streams_and_means_of_an_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = {"mlm": {"loss": 4.0}, "mlm en": {"loss": 2.0}, "tlm": {"loss": 1.0}}
    with caplog.at_level("INFO", logger=LOG.name):
        LOG.propagate = True
        validation_in(tmp_path, 5).report_results(
            10, {"heldout": losses, "retrieval": {"en-xx": {"accuracy": 0.5}}}, 1.0
        )
    assert caplog.records[-1].getMessage().splitlines() == [
        "evaluation after step 10 took 1.0 s",
        "  heldout mlm: loss 4",
        "  heldout tlm: loss 1",
        "  retrieval en-xx: accuracy 0.5",
    ]


def test_an_evaluation_is_written_with_its_intervals(tmp_path: Path) -> None:
    """They are the bootstrap's; a loss that is a plain number has none."""
    validation = validation_in(tmp_path, -1)
    vectors = torch.eye(40)
    scores = retrieval_accuracies(vectors, vectors[[*range(1, 11), 0, *range(11, 40)]], "cosine", ("en", "xx"))
    validation.report_results(5, {"heldout": {"mlm": {"loss": 3.0}}, "retrieval": {"en-xx": scores}}, 1.0)
    validation.lines.flush_or_keep_lines()
    entry = json.loads((tmp_path / "evals.jsonl").read_text())
    right = np.random.default_rng(40).integers(0, 40, (1000, 40)) > 10
    bounds = np.quantile(right.mean(1), (0.025, 0.975))
    assert list(entry["intervals"]) == ["retrieval"]
    assert entry["intervals"]["retrieval"]["en-xx"]["accuracy"] == pytest.approx(bounds)


def test_numbers_that_are_none_are_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "evals.jsonl", 0)
    lines.add_line_for_next_flush(
        {"step": 1, "results": {"a": {"b": {"c": float("nan"), "d": float("-inf"), "e": 1.5}}}, "x": float("inf")}
    )
    lines.flush_or_keep_lines()
    assert json.loads((tmp_path / "evals.jsonl").read_text()) == {
        "step": 1, "results": {"a": {"b": {"c": None, "d": None, "e": 1.5}}}, "x": None,
    }  # fmt: skip


def test_lines_that_no_run_has_written_are_left_out(tmp_path: Path) -> None:
    sound = '{"step": 1}\n{"step": 2.0}\n'
    odd = [
        "[1]",
        "3",
        "null",
        '{"step": "1"}',
        '{"step": null}',
        '{"step": true}',
        "[" * 100_000,
        "{}",
        '{"step": NaN}',
    ]
    (tmp_path / "metrics.jsonl").write_text(sound + "".join(f"{line}\n" for line in odd) + '{"step": 3}\n')
    JsonLines(tmp_path / "metrics.jsonl", 2)
    assert (tmp_path / "metrics.jsonl").read_text() == sound


def test_a_resume_on_fewer_ranks_cuts_the_traces_of_all_earlier_ranks(tmp_path: Path) -> None:
    """Otherwise the records of a step that is done again would be there twice."""
    context: Any = SimpleNamespace(out=tmp_path, process=Process(0, 1, 0, 1))
    manager: Any = SimpleNamespace(engine=SimpleNamespace(fp16_enabled=lambda: False))
    (tmp_path / "trace").mkdir()
    for rank in range(12):
        (tmp_path / "trace" / f"rank{rank}.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    RunMetrics(context, load_recipe("mlm", [], OBJECTIVES), manager, done=1, trace=True)
    assert {path.read_text() for path in (tmp_path / "trace").iterdir()} == {'{"step": 1}\n'}


def test_a_resume_cuts_a_long_file_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block at its end is parsed. The rest is copied to a new file, since another run may still write to the old."""
    path, read = tmp_path / "metrics.jsonl", Counter[str]()
    lines = [f'{{"step":{step},  "loss": 1.50}}\n' for step in range(1, 30_001)]
    path.write_text("".join(lines) + '{"step": 30001, "lo')
    inode, loads = path.stat().st_ino, json.loads

    def counting(line: bytes) -> Any:
        read["lines"] += 1
        read["bytes"] += len(line)
        return loads(line)

    monkeypatch.setattr(json, "loads", counting)
    JsonLines(path, 29_990)
    assert path.read_text() == "".join(lines[:29_990]) and path.stat().st_ino != inode
    assert read["lines"] == 11 and read["bytes"] < 500
    JsonLines(path, 0)
    assert path.read_bytes() == b""


def test_what_a_terminal_would_obey_is_shown_as_numbers(tmp_path: Path) -> None:
    start_logging(tmp_path, 0)
    LOG.info("\x1b[2J\x07record\x9b1m\tone\ntwo é")
    LOG.handlers.clear()
    assert (tmp_path / "run.log").read_text().endswith(" \\x1b[2J\\x07record\\x9b1m\tone\ntwo é\n")


# Whole runs

COMMON = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mixed"]
SMALL = ["checkpoint.every=4", "streams.ppa.queue_size=64", "train.measure_every=4", "train.lr=0.003"]
SMALL += [f"streams.{name}.samples=6" for name in ("mlm", "tlm", "alignlm", "ppa", "word_contrast", "align_mlm")]


@pytest.fixture(scope="module")
def runs(demo: Path, heldout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without and with evaluation, and resumed in the middle; in one launch of 2 ranks."""
    out = tmp_path_factory.mktemp("validation")

    def run(name: str, tasks: list[dict[str, Any]], *sets: str) -> list[str]:
        fields = [*SMALL, "train.steps=8", "train.warmup=2", f"eval.tasks={json.dumps(tasks)}", *sets]
        return [*COMMON, "--data", str(demo), "--out", str(out / name), "--set", *fields]

    retrieval = {"name": "retrieval", "data": [str(heldout / "pairs")], "limit": 41}

    inline: list[dict[str, Any]] = [
        {"name": "heldout", "data": [str(heldout)], "limit": 40},
        retrieval,
    ]
    best = ("eval.every=2", "checkpoint.best=heldout/tlm/loss", "checkpoint.keep=9")
    same = ("eval.every=2", "checkpoint.best=retrieval/en-xx/sentences")  # always 41: the first is the best
    listed = [
        run("plain", []),
        run("measured", inline, *best),
        [*run("again", inline, *best), "--resume", str(out / "measured" / "checkpoints" / "step_00000004")],
        run("first_is_best", [retrieval], *same),
    ]
    launch.run_all(2, out, listed)
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
    assert all(set(entry["results"]) == {"heldout", "retrieval"} for entry in entries)
    losses = [entry["results"]["heldout"]["mlm"]["loss"] for entry in entries]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_resume_measures_alike(runs: Path) -> None:
    timeless = [[entry["step"], entry["results"]] for entry in evals(runs / "measured")]
    assert timeless[3:] == [[entry["step"], entry["results"]] for entry in evals(runs / "again")]


@pytest.mark.slow
def test_the_best_checkpoint_stays(runs: Path) -> None:
    losses = {entry["step"]: entry["results"]["heldout"]["tlm"]["loss"] for entry in evals(runs / "measured")}
    folder, best = runs / "measured" / "checkpoints", min(losses, key=losses.__getitem__)
    assert (folder / "best").read_text() == f"step_{best:08d}\n"
    assert (folder / f"step_{best:08d}" / "manifest.json").exists()
    folder = runs / "first_is_best" / "checkpoints"  # keeps 2
    assert (folder / "best").read_text() == "step_00000000\n" and (folder / "step_00000000" / "manifest.json").exists()


@pytest.mark.slow
def test_a_start_that_is_cut_off_begins_where_it_can(demo: Path, heldout: Path, tmp_path: Path) -> None:
    """After a kill between step 0's evaluation and its checkpoint, which is measured once all the same; with a time
    limit that is shorter than a start, which makes a step each time; and with a line in the metrics that is no step."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "evals.jsonl").write_text('{"step": 0, "results": {}, "seconds": 1.0}\n')
    sets = ["train.steps=4", "train.time_limit=0.00001", "data.workers=0", "streams.tlm.samples=4"]
    sets += [f"eval.tasks=[{{name: retrieval, data: [{heldout / 'pairs'}], limit: 9}}]", "eval.every=100"]
    words = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "tlm", "--data", str(demo), "--out", str(out)]
    codes = list[int]()
    while 0 not in codes and len(codes) < 4:
        code, _ = launch.try_run(0, [*words, "--set", *sets])
        codes.append(code)
        with (out / "metrics.jsonl").open("a") as file:
            file.write("[1]\n" if code else "")
    assert codes[0] == 75 and codes[-1] == 0
    assert [entry["step"] for entry in launch.metrics(out)] == [1, 2, 3, 4]
    assert [(entry["step"], len(entry["results"])) for entry in evals(out)] == [(0, 1), (4, 1)]
