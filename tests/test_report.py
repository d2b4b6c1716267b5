"""The report: the page has the files' numbers, stands alone, and compares models by paired intervals."""

import base64
import html
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from xscale.eval import bootstrap
from xscale.report import charts
from xscale.report.__main__ import main

Entry = dict[str, Any]
STREAMS = {"mlm": {"samples": 4}, "tlm": {"samples": 4}}


def entries_of(steps: int, seed: int = 0) -> list[Entry]:
    draw = np.random.default_rng(seed)
    metrics = ["loss", "loss/mlm", "loss/tlm", "loss/mlm/en", "loss/mlm/de", "loss/tlm/de-en", "alignment/de-en", "lr"]
    entries = []
    for step in range(1, steps + 1):
        numbers = {metric: 10 / step + draw.uniform(0.1, 1) for metric in metrics}
        entries.append({"step": step, "tokens": 100, "step_s": 0.5, "tokens_per_s": 200.0, "skipped": 0} | numbers)
    return entries


def evaluation(step: int, accuracy: float) -> Entry:
    rows = {"en-de": {"accuracy": accuracy - 0.1, "sentences": 100}, "all": {"accuracy": accuracy}}
    results = {"heldout": {"mlm": {"loss": 9 / (step + 1)}}, "retrieval": rows}
    return {"step": step, "results": results}


def write_run(folder: Path, entries: list[Entry], evaluations: list[Entry], recipe: Entry) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (folder / "evals.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in evaluations))
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "status.json").write_text('{"status": "done", "why": "24 of 24 steps"}')
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recipe = {"train": {"lr": 0.001}, "streams": STREAMS}
    return write_run(tmp_path / "one", entries_of(24), [evaluation(0, 0.3), evaluation(24, 0.6)], recipe)


def page_of(*paths: Path, out: Path) -> str:
    assert main([*map(str, paths), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8").replace(f"{out.parent}/", "")


def rows_of(page: str) -> list[list[str]]:
    """The texts of all tables' rows."""
    rows = []
    for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL):
        cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
        rows.append([html.unescape(cell) for cell in cells])
    return rows


def row_of(page: str, *first: str) -> list[str]:
    """The cells after the given first ones in the only row that begins with them."""
    (row,) = (row for row in rows_of(page) if tuple(row[: len(first)]) == first)
    return row[len(first) :]


def pictures(page: str) -> list[str]:
    return [base64.b64decode(data).decode() for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)]


# Runs


def test_the_page_has_the_files_numbers_and_stands_alone(run: Path, tmp_path: Path) -> None:
    page = page_of(run, out=tmp_path / "report.html")
    summary = {
        "streams": "mlm, tlm",
        "state": "done",
        "reason for the state": "24 of 24 steps",
        "logged steps": "24",
        "skipped steps": "0",
    }
    for name, cell in summary.items():
        assert row_of(page, name) == [cell]
    assert row_of(page, "tokens in the logged steps") == ["2,400"]
    assert row_of(page, "seconds in the logged steps") == ["12"]
    assert row_of(page, "all", "accuracy") == ["0.6"]
    assert row_of(page, "en-de", "accuracy") == ["0.5"]
    for title in (
        "Loss of all streams",
        "Loss of the stream mlm",
        "Loss of the stream tlm",
        "heldout: loss",
        "retrieval: accuracy",
    ):
        assert f'alt="{title}' in page
    assert "<script" not in page
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources and all(source.startswith(("data:image/svg+xml;base64,", "#")) for source in sources)


def test_steps_and_tokens_of_a_fork_are_its_own(tmp_path: Path) -> None:
    """The metrics.jsonl of a fork begins after the parent's checkpoint."""
    fork = write_run(tmp_path / "fork", entries_of(24)[20:], [], {})
    page = page_of(fork, out=tmp_path / "report.html")
    assert row_of(page, "logged steps") == ["4"] and row_of(page, "tokens in the logged steps") == ["400"]


def test_a_curve_is_drawn_as_the_file_has_it() -> None:
    """Each point of the picture's line is an affine function of a step and its number."""
    values = np.random.default_rng(0).uniform(size=30)
    picture = charts.draw_chart_as_data_url({"lr": pd.Series(values, np.arange(30))}, "lr")
    svg = base64.b64decode(picture.partition(",")[2])
    lines = [
        path.get("d", "") for path in ElementTree.fromstring(svg).iter() if charts.COLOURS[0] in path.get("style", "")
    ]
    points = np.array(re.findall(r"[ML] (\S+) (\S+)", max(lines, key=len)), dtype=float)
    for drawn, numbers in ((points[:, 0], np.arange(30)), (points[:, 1], values)):
        assert stats.linregress(numbers, drawn).rvalue ** 2 == pytest.approx(1, abs=1e-9)


def test_a_long_curve_is_thinned_to_means_of_equal_ranges() -> None:
    values = np.random.default_rng(1).normal(size=1000)
    values[300:330] = np.nan
    thinned = charts.downsample_by_mean(pd.Series(values, np.arange(1000)))
    assert thinned.to_numpy() == pytest.approx(
        pd.Series(values).groupby(np.arange(1000) // 10).mean().to_numpy(), nan_ok=True
    )
    assert thinned.index.to_numpy() == pytest.approx(np.arange(100) * 10 + 4.5)


def test_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    """A run without a number or score has a dash. Charts have a line for each run."""
    recipe = {"streams": {"mlm": {"samples": 4}}}
    entries = [{"step": 1, "loss": 0.01, "loss/mlm": 0.01}]
    last = evaluation(1, 0.8)
    del last["results"]["retrieval"]["en-de"]
    other = write_run(tmp_path / "other", entries, [last], recipe)
    page = page_of(run, other, out=tmp_path / "report.html")
    assert row_of(page, "tokens in the logged steps") == ["2,400", "–"]
    assert row_of(page, "mlm", "loss") == ["0.36", "4.5", "+4.14, no interval"]
    assert row_of(page, "all", "accuracy") == ["0.6", "0.8", "+0.2, no interval"]
    assert row_of(page, "en-de", "accuracy") == ["0.5", "–", "–"] and "not in file" not in page
    assert all(f"sum, {path}" in pictures(page)[0] for path in (run, other))


def test_of_a_hundred_languages_the_highest_losses_are_drawn(tmp_path: Path) -> None:
    entries = [{"step": step} | {f"loss/mlm/l{n:02d}": n + 1 / step for n in range(100)} for step in range(1, 40)]
    page = page_of(write_run(tmp_path / "run", entries, [], {}), out=tmp_path / "report.html")
    assert "the 8 worst of 100" in pictures(page)[0] and len(page) < 200_000
    assert re.findall(r"l\d\d", pictures(page)[0]) == [f"l{n}" for n in range(99, 91, -1)]


@pytest.mark.parametrize("name", ["$x_{$", r"$\frac$", "<script>alert(1)<", "_under", "日本語", 'a"b&c'])
def test_any_name_of_a_run_is_text(tmp_path: Path, name: str) -> None:
    entries = [{"step": step, "loss": 1.0, f"loss/{name.replace('/', '')}": 2.0} for step in (1, 2)]
    folders = [write_run(tmp_path / name, entries, [], {}), write_run(tmp_path / "b", entries, [], {})]
    page = page_of(*folders, out=tmp_path / "report.html")
    assert row_of(page, "logged steps") == ["2", "2"]
    assert "<script" not in page and html.escape(name).replace("&quot;", "&#34;") in page


@pytest.mark.parametrize("last", ['{"step": 3, "lo', '{"step": 3, "lo\n', "\0" * 100, "[1]\n"])
def test_a_broken_last_line_is_left_out(tmp_path: Path, last: str) -> None:
    folder = write_run(tmp_path / "run", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 3.0}], [], {})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(last)
    assert row_of(page_of(folder, out=tmp_path / "r.html"), "logged steps") == ["2"]


def test_a_run_without_metrics_is_named(run: Path, tmp_path: Path, capsys: Any) -> None:
    empty = write_run(tmp_path / "empty", [], [], {})
    lost = write_run(tmp_path / "lost", [], [], {})
    (lost / "metrics.jsonl").unlink()
    page_of(run, empty, lost, out=tmp_path / "r.html")
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    for folder, warning in zip((empty, lost), warnings, strict=True):
        assert warning.startswith(f"warning: {folder}/metrics.jsonl is missing or has no readable line")


def test_runs_before_their_first_step_have_a_page(run: Path, tmp_path: Path) -> None:
    """Without lines, without metrics.jsonl and status.json, and with numbers that are not finite, which have no
    chart; an empty config.yaml says nothing, nor does a status.json of another form."""
    empty = write_run(tmp_path / "empty", [], [], {})
    assert row_of(page_of(empty, out=tmp_path / "r.html"), "logged steps") == ["0"]
    for name in ("metrics.jsonl", "evals.jsonl", "status.json"):
        (empty / name).unlink()
    broken = write_run(tmp_path / "broken", [{"step": 1, "loss": None, "tokens": 10**400}], [], {})
    nan = evaluation(1, 0.5) | {"results": {"heldout": {"mlm": {"loss": None}}}}
    (broken / "evals.jsonl").write_text(json.dumps(nan) + "\n")
    (broken / "config.yaml").write_text("")
    (broken / "status.json").write_text("[]")
    assert pictures(page_of(broken, out=tmp_path / "r.html")) == []
    page = page_of(empty, broken, run, out=tmp_path / "r.html")
    assert row_of(page, "state")[0] == "no status.json" and row_of(page, "logged steps") == ["0", "1", "24"]


# Result files


def result_file(path: Path, model: str, right: dict[str, np.ndarray], **more: Any) -> Path:
    rows = {}
    for row, right_S in right.items():
        counts_S2 = np.column_stack([right_S, np.ones(len(right_S))])
        scores = bootstrap.scores_with_intervals(counts_S2, lambda sums: {"accuracy": sums[..., 0] / sums[..., 1]})
        rows[row] = scores | {"sentences": float(len(right_S))}
    results: Any = {"retrieval": rows} if rows else {}
    results |= more.pop("results", {})
    content = {"model": model, "results": results, "intervals": bootstrap.intervals_of_scores(results)}
    path.write_text(json.dumps(content | {"resampled": bootstrap.resampled_values_of_scores(results)} | more))
    return path


def test_differences_of_models_have_paired_intervals(tmp_path: Path) -> None:
    """Against scipy's paired bootstrap of the differences of the sentences."""
    draw = np.random.default_rng(0)
    first = {f"en-{language} mean": draw.uniform(size=400) < 0.6 for language in ("de", "fr")}
    second = {row: right_S | (draw.uniform(size=400) < 0.1) for row, right_S in first.items()}
    files = [result_file(tmp_path / "a.json", "hf/a", first), result_file(tmp_path / "b.json", "hf/b", second)]
    page = page_of(*files, out=tmp_path / "table.html")
    assert ["results row", "metric", "hf/a", "hf/b", "hf/b − first"] in rows_of(page)
    gains = {row: second[row].astype(float) - first[row] for row in first}
    for row, gains_S in gains.items():
        *_, shown = row_of(page, row, "accuracy")
        value, low, high, p = map(float, re.findall(r"[-+]?[\d.]+", shown))
        expected = stats.bootstrap(
            (gains_S,), np.mean, method="percentile", n_resamples=4000, rng=1
        ).confidence_interval
        assert value == pytest.approx(gains_S.mean(), abs=1e-3)
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.008) and p < 0.01


@pytest.mark.parametrize(
    ("sentences", "checksum", "shown"),
    [(50, 1, "+0 [+0, +0], p 1"), (50, None, "+0 [+0, +0], p 1"), (50, 2, "other text"), (60, None, "other text")],
)
def test_scores_of_different_tests_have_no_difference(
    tmp_path: Path, sentences: int, checksum: int | None, shown: str
) -> None:
    """An older file has no checksums, only numbers of sentences."""
    files = []
    for model, count, value in (("a", 50, 1), ("b", sentences, checksum)):
        checksums = {"retrieval": {"en-de": value}} if value else {}
        right = np.arange(count) % 2 == 0
        files.append(result_file(tmp_path / f"{model}.json", model, {"en-de": right}, checksums=checksums))
    page = page_of(*files, out=tmp_path / "table.html")
    assert row_of(page, "en-de", "accuracy")[-1] == shown
    assert row_of(page, "en-de", "sentences")[-1] == "–"


def test_blanks_are_explained(tmp_path: Path) -> None:
    right = np.arange(50) % 2 == 0
    alignment = {"alignment": {"de-en": {"withheld": 0.5}}}
    first = result_file(tmp_path / "a.json", "hf/a", {"en-de": right, "en-yo": right}, results=alignment)
    second = result_file(tmp_path / "b.json", "hf/b", {"en-fr": right}, results=alignment)
    page = page_of(first, second, out=tmp_path / "table.html")
    assert row_of(page, "en-de", "accuracy")[1:] == ["not in file", "–"]
    assert row_of(page, "en-fr", "accuracy")[0] == "not in file"
    assert row_of(page, "de-en", "withheld") == ["0.5", "0.5", "+0, no interval"]
    assert "`not in file` means that the model was evaluated with another --task" in page


def test_files_of_one_model_are_a_column_unless_they_have_a_score_in_common(tmp_path: Path) -> None:
    right = np.arange(50) % 2 == 0
    tagging = {"pos": {"de": {"zs": 0.5, "zs_std": 0.01}}}
    retrieval = result_file(tmp_path / "r.json", "hf/a", {"en-de": right})
    tags = result_file(tmp_path / "t.json", "hf/a", {}, results=tagging)
    page = page_of(retrieval, tags, out=tmp_path / "table.html")
    assert ["results row", "metric", "hf/a"] in rows_of(page) and row_of(page, "de", "zs_std") == ["0.01"]
    again = result_file(tmp_path / "again.json", "hf/a", {"en-de": right})
    head = ["results row", "metric", "hf/a", "hf/a (again.json)", "hf/a (again.json) − first"]
    assert head in rows_of(page_of(retrieval, again, out=tmp_path / "table.html"))


# Errors


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run/absent", "", "run is neither the folder of a run, which has a metrics.jsonl, nor"),
        ("run/config.yaml", "a: [1", "config.yaml is not valid YAML (while parsing"),
        ("absent.json", None, "absent.json cannot be read (No such file"),
        ("scores.json", "{", "scores.json is not valid JSON"),
        ("scores.json", "[]", "scores.json is not a result file (at the file: Input should be"),
        ("scores.json", '{"results": {"pos": {"en": {"zs": "x"}}}}', "(at results.pos.en.zs: Input should be"),
    ],
)
def test_errors_name_file_and_remedy(tmp_path: Path, capsys: Any, name: str, text: str | None, words: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if text is not None:
        path.write_text(text)
    given = path.parent if name.startswith("run") else path
    assert main([str(given), "--out", str(tmp_path / "r.html")]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1 and not (tmp_path / "r.html").exists()


def test_a_named_pipe_in_a_run_is_named(run: Path, tmp_path: Path, capsys: Any) -> None:
    (run / "status.json").unlink(missing_ok=True)
    os.mkfifo(run / "status.json")
    assert main([str(run), "--out", str(tmp_path / "r.html")]) == 2
    assert "status.json is not valid JSON (it is a named pipe instead of a file)" in capsys.readouterr().err


def test_a_missing_library_is_named_with_its_extra(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "xscale.report.page", raising=False)
    assert main([str(run), "--out", str(tmp_path / "r.html")]) == 2
    assert (
        "a report needs the package jinja2, which is not installed. Run `pip install 'xscale[eval]'`"
        in capsys.readouterr().err
    )
