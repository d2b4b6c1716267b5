"""The report: what a page and the console say is what the files say, and a page stands by itself at any width."""

import errno
import html.parser
import json
import math
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy import stats
from transformers import AutoModelForMaskedLM, BertConfig

from data_tools import write_shards
from tests.conftest import tar_lines
from tests.rows import one_thread  # noqa: F401
from xscale import files
from xscale.data.shards import Source
from xscale.data.stream_batch import Context
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import split
from xscale.errors import UserError
from xscale.eval.model import ExportedModel
from xscale.models.heads import SavedHeads, save_heads
from xscale.objectives import alignlm
from xscale.report import __main__ as command
from xscale.report import curves, models, tables, transfer
from xscale.report.draw import COLOURS, MOST_LINES, MOST_PANELS, Pictures
from xscale.report.findings import findings
from xscale.report.page import render_page
from xscale.report.read import Run, read_runs, read_scores

Entry = dict[str, Any]
WIDTHS = (1280, 400)


def entry(step: int, draw: np.random.Generator) -> Entry:
    numbers = ["loss", "loss/mlm", "loss/alignlm", "loss/alignlm.mono", "loss/alignlm.bi", "accuracy/mlm", "lr"]
    numbers += ["loss/mlm/en", "loss/mlm/de", "loss/alignlm/de-en", "count/mlm/en", "queue_age/ppa", "own_keys/ppa"]
    numbers += ["tokens", "step_s", "tokens_per_s", "grad_norm", "grad_norm/mlm", "loss_scale"]
    found: Entry = {"step": step} | {name: 10 / step + float(draw.uniform(0.1, 1)) for name in numbers}
    if step % 4 == 0:
        found |= {"alignment/en-de": float(draw.uniform()), "alignment_trained/en-de": float(draw.uniform())}
    return found | {"skipped": int(step == 3), "count/mlm": 7 * step}


def make_run(folder: Path, entries: list[Entry], evals: list[Entry] = [], **config: Any) -> Path:  # noqa: B006
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    if evals:
        (folder / "evals.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "status.json").write_text(json.dumps({"status": "done", "why": "24 of 24 steps", "step": 24}))
    return folder


def evaluation(step: int, draw: np.random.Generator) -> Entry:
    rows = {row: {"accuracy": float(draw.uniform()), "sentences": 1000} for row in ("en-de mean", "en-de cls")}
    return {
        "step": step,
        "results": {"retrieval": rows, "heldout": {row: {"loss": 9 / step} for row in ("mlm", "mlm en")}},
        "seconds": 1.2,
    }


@pytest.fixture
def one(tmp_path: Path) -> tuple[Path, list[Entry]]:
    draw = np.random.default_rng(0)
    entries = [entry(step, draw) for step in range(1, 25)]
    evals = [evaluation(step, draw) for step in (8, 16, 24)]
    recipe = {"train": {"lr": 0.001, "steps": 24}, "streams": {"mlm": {"samples": 4}}}
    return make_run(tmp_path / "runs" / "one", entries, evals, **recipe), entries


class Parsed(html.parser.HTMLParser):
    """Refuses tags that do not match, and whatever a browser would load."""

    EMPTY = ("meta", "br")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.referred: set[str] = set()
        self.rows: list[list[tuple[str, str | None]]] = []
        """The text and the whole number of each cell of each row."""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        assert tag not in ("link", "img", "iframe", "object") and "src" not in given
        assert not any(name.startswith("on") for name in given)
        self.tags[tag] += 1
        self.ids += [given["id"] or ""] if "id" in given else []
        for name, value in given.items():
            if name == "href":
                assert (value or "").startswith("#")
                self.referred.add((value or "")[1:])
            self.referred |= set(re.findall(r"url\(#([^)]+)\)", value or ""))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(("", given.get("title")))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            text, value = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, value)

    def row(self, name: str) -> list[tuple[str, str | None]]:
        (found,) = (row[1:] for row in self.rows if row and row[0][0] == name)
        return found


def page_of(*arguments: object, out: Path) -> tuple[str, Parsed]:
    assert command.main([*map(str, arguments), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    parsed = Parsed(text)
    assert "http" not in text and "url(" not in text.replace("url(#", "")
    assert len(set(parsed.ids)) == len(parsed.ids) and parsed.referred <= set(parsed.ids)
    return text, parsed


# A run's page


def test_numbers_of_the_page_are_those_of_the_file(one: tuple[Path, list[Entry]], tmp_path: Path) -> None:
    """Last, mean of the last tenth, best and its step: whole in the page, read again by loops."""
    folder, entries = one
    text, parsed = page_of(folder, out=tmp_path / "report.html")
    names = [name for name in entries[-1] if re.match(r"loss(/|$)|accuracy|alignment|tokens_per_s", name)]
    assert len(names) > 10
    for name in names:
        values = [(e["step"], e[name]) for e in entries if name in e]
        best = (min if name.startswith("loss") else max)(values, key=lambda at: at[1])
        late = [value for _, value in values[-math.ceil(len(values) / 10) :]]
        expected = [values[-1][1], sum(late) / len(late), best[1], best[0]]
        cells = parsed.row(name)
        assert [float(whole or "nan") for _, whole in cells] == pytest.approx(expected, rel=1e-12), name
        assert [shown for shown, _ in cells] == [f"{value:.4g}" for value in expected]
    last = json.loads((folder / "evals.jsonl").read_text().splitlines()[-1])["results"]
    for row, numbers in last["retrieval"].items():
        assert float(parsed.row(f"retrieval accuracy, {row}")[0][1] or "nan") == numbers["accuracy"]
    assert "retrieval sentences" not in text, "the size of the data is no curve"
    tokens, hours, skipped = (float(whole or "nan") for _, whole in parsed.row("one")[3:])
    assert tokens == pytest.approx(sum(e["tokens"] for e in entries))
    assert hours == pytest.approx(sum(e["step_s"] for e in entries) / 3600) and skipped == 1


def test_a_curve_is_drawn_as_the_file_has_it(one: tuple[Path, list[Entry]]) -> None:
    """Each point of the SVG's path is an affine function of a step and its number, with a gap where there is none."""
    (run,), entries = read_runs([one[0]]), one[1]
    values = np.array([e["lr"] for e in entries])
    values[9] = np.nan
    svg, _ = Pictures().chart(curves.Chart("lr", {"all": [pd.Series(values, run.metrics["lr"].index)]}, ["one"]))
    drawn = [path for path in ElementTree.fromstring(svg).iter("path") if "#0b5cad" in path.get("style", "")]
    (line,) = (path.get("d", "") for path in drawn if path.get("d", "").count("L") > 5)
    assert line.count("M") == 2
    points = np.array(re.findall(r"[ML] (\S+) (\S+)", line), dtype=float)
    known = np.flatnonzero(np.isfinite(values))
    assert len(points) == 23
    for drawn_N, data_N in ((points[:, 0], known), (points[:, 1], values[known])):
        slope, shift = np.polyfit(data_N, drawn_N, 1)
        assert np.abs(slope * data_N + shift - drawn_N).max() < 0.11 and abs(slope) > 1


@pytest.mark.parametrize("steps", [151, 1234])
def test_thinned_curves_are_means_least_and_largest_of_each_column(steps: int) -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(size=steps)
    values[draw.uniform(size=steps) < 0.2] = np.nan
    values[300:330] = np.nan
    at = np.cumsum(draw.integers(1, 4, steps))
    found = curves.downsample(pd.Series(values, at), 150)
    assert len(found) <= 150
    columns: dict[int, list[int]] = {}
    for n, step in enumerate(at.tolist()):
        columns.setdefault((step - int(at[0])) * 150 // (int(at[-1]) - int(at[0]) + 1), []).append(n)
    for (step, row), members in zip(found.iterrows(), columns.values(), strict=True):
        known = [values[n] for n in members if not math.isnan(values[n])]
        assert step == pytest.approx(np.mean([at[n] for n in members]))
        expected = (sum(known) / len(known), min(known), max(known)) if known else (math.nan,) * 3
        assert (row["mean"], row["min"], row["max"]) == pytest.approx(expected, nan_ok=True)
    few = curves.downsample(pd.Series(values[:150], at[:150]), 150)
    assert few["mean"].equals(pd.Series(values[:150], at[:150]))


def test_the_page_of_a_long_run_is_small() -> None:
    """Few charts come before the first fold; beyond eight languages the worst have a panel each."""
    draw, at = np.random.default_rng(2), np.arange(1, 5_001)
    names = ["loss", "lr", "grad_norm", *(f"{q}/{s}" for s in ("mlm", "tlm") for q in ("loss", "accuracy", "count"))]
    names += [f"loss/mlm/l{n:02d}" for n in range(26)]
    metrics = {name: pd.Series(1e4 / at + draw.uniform(1, 2, len(at)) + n / 5, at) for n, name in enumerate(names)}
    text = render_page([Run("a", "a", metrics, {}, [], {}, {})], [], Pictures())
    assert len(text) < 1_000_000
    before_fold = text.partition("<details")[0]
    assert before_fold.count("<svg") <= 12 and "by language" in before_fold
    labels = re.findall(r">(l\d\d)<", before_fold)
    assert {*labels} == {f"l{n:02d}" for n in range(2, 26)}


def test_runs_of_every_kind_have_a_page(tmp_path: Path, one: tuple[Path, list[Entry]]) -> None:
    """One step; no step; a metric that never was a number; other streams; no recipe; a run that is being written."""
    made = {
        "step": [{"step": 1, "loss": 3.0}],
        "none": [],
        "null": [{"step": s, "loss": None, "grad_norm": math.inf, "lr": 0.1, "note": "x"} for s in range(1, 5)],
        "other": [{"step": s, "loss": 1.0, "loss/ppa": 2.0 + s, "skipped": 0} for s in range(1, 900)],
    }
    folders = [make_run(tmp_path / name, entries) for name, entries in made.items()]
    (folders[0] / "config.yaml").unlink()
    (folders[0] / "status.json").unlink()
    with (folders[3] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 900, "loss": 777')
    alone = [page_of(folder, out=tmp_path / "single.html")[0] for folder in folders]
    text, parsed = page_of(*folders, one[0], out=tmp_path / "all.html")
    assert "777" not in text
    assert [cell for cell, _ in parsed.row("loss")[::4]] == ["3", "–", "–", "1", f"{one[1][-1]['loss']:.4g}"]
    assert [cell for cell, _ in parsed.row("loss/ppa")[::4]] == ["–", "–", "–", "901", "–"]
    assert "No step has been written yet" in alone[1]


def test_pictures_are_written_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [{"step": s, "loss": 1 / s, "loss/mlm/en": s} for s in range(1, 4)])
    _, parsed = page_of(run, "--png", tmp_path / "png", out=tmp_path / "report.html")
    pictures = sorted((tmp_path / "png").iterdir())
    assert [path.name[:4] for path in pictures] == ["001-", "002-"]
    assert parsed.tags["svg"] == 2 and all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)


STEPS = {8: (0.5, 0.4, 0.55), 16: (0.6, 0.52, 0.7), 24: (0.8, 0.75, 0.83)}
"""Step of an evaluation -> its score, and the score's interval."""


def scores_at(step: int, shifts: dict[str, float]) -> Entry:
    """An evaluation by the numbers of STEPS; a results row's shift is added to them."""
    value, *ends = STEPS[step]
    rows = {row: {"accuracy": value + shift, "sentences": 1000} for row, shift in shifts.items()}
    intervals = {row: {"accuracy": [end + shift for end in ends]} for row, shift in shifts.items()}
    return {"step": step, "results": {"retrieval": rows}, "intervals": {"retrieval": intervals}}


def run_of_scores(folder: Path, shifts: dict[str, float]) -> Run:
    """Two evaluations of the run's own, and one of its hook."""
    make_run(folder, [{"step": 24, "loss": 1.0}], [scores_at(step, shifts) for step in (8, 16)])
    (folder / "evals").mkdir()
    (folder / "evals" / "step_24.json").write_text(json.dumps(scores_at(24, shifts)))
    return read_runs([folder])[0]


def paths_of(svg: str, colour: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The points of each line of a colour, and of each band, which SVG defines once and then moves to its place."""
    tree = ElementTree.fromstring(svg)
    points = {
        path: np.array(re.findall(r"[ML] (\S+) (\S+)", path.get("d", "")), dtype=float) for path in tree.iter("path")
    }
    lines = [of for path, of in points.items() if re.match(f"fill: none.*stroke: {colour}", path.get("style", ""))]
    bands = [
        np.add(of, (float(use.get("x", 0)), float(use.get("y", 0))))
        for use in tree.iter("use")
        if f"fill: {colour}; fill-opacity: 0.15" in use.get("style", "")
        for path, of in points.items()
        if use.get("href") == f"#{path.get('id')}"
    ]
    return lines, bands


@pytest.mark.parametrize("lines", [1, 5])
def test_intervals_are_drawn_where_they_are(tmp_path: Path, lines: int) -> None:
    """A band has the ends of the intervals of all steps, and a bar those of the last; five lines have only bars."""
    shifts = {f"en-x{n}": -n / 50 for n in range(lines)}
    (chart,) = curves.eval_charts([run_of_scores(tmp_path / "run", shifts)])
    svg, _ = Pictures().chart(chart)
    at, numbers = np.array([*STEPS]), np.array([*STEPS.values()])
    for n, (shift, colour) in enumerate(zip(shifts.values(), COLOURS, strict=False)):
        drawn, bands = paths_of(svg, colour)
        line = next(points for points in drawn if len(points) == len(at))  # the legend's comes later
        x, y = np.poly1d(np.polyfit(at, line[:, 0], 1)), np.poly1d(np.polyfit(numbers[:, 0] + shift, line[:, 1], 1))
        (bar,) = (points for points in drawn if len(points) == 2)
        aside = 2 * (n - (lines - 1) / 2)
        assert np.abs(bar - [[x(24) + aside, y(end + shift)] for end in (0.75, 0.83)]).max() < 0.2
        assert len(bands) == (lines < 5)
        for band in bands:
            corners = [(x(step), y(end + shift)) for step, (_, *ends) in STEPS.items() for end in ends]
            assert all(np.abs(band - corner).max(1).min() < 0.2 for corner in corners)
            assert band[:, 1].min() > y(0.83 + shift) - 0.2 and band[:, 1].max() < y(0.4 + shift) + 0.2


def test_tables_say_what_is_noise(tmp_path: Path) -> None:
    """✓ marks runs whose interval overlaps the best one's; a mean over rows has the mean of their intervals."""
    shifts = {"best": 0.1, "near": 0.04, "far": -0.1}
    runs = [run_of_scores(tmp_path / name, {"en-de": shift, "en-fr": shift - 0.02}) for name, shift in shifts.items()]
    (row,) = (row for row in tables.headline_table(tables.headline_charts(runs)).rows if "retrieval" in str(row[0]))
    assert row[1:] == ["✓ 0.89 [0.84, 0.92]", "✓ 0.83 [0.78, 0.86]", "0.69 [0.64, 0.72]"]
    assert tables.is_numeric(row[1:])
    rows = {row[0]: [tables.format_cell(cell) for cell in row[1:]] for row in tables.last_and_best_table(runs[:1]).rows}
    assert rows["retrieval accuracy, en-de"] == ["0.9 [0.85, 0.93]", "0.9", "0.9", "24"]
    assert rows["retrieval accuracy, mean over 2 languages or pairs"][0] == "0.89 [0.84, 0.92]"
    curve = runs[0].evals["retrieval", "en-fr", "accuracy"]
    assert curve.attrs[16] == pytest.approx((0.6, 0.78))
    without = curve.copy()
    without.attrs = {}
    mean = tables.mean_curve([curve, without])
    assert len(mean) and not mean.attrs
    scores = tmp_path / "near" / "evals" / "step_24.json"
    _, parsed = page_of(tmp_path / "far", "--scores", scores, out=tmp_path / "r.html")
    assert parsed.row("retrieval accuracy, en-fr")[0][0] == "0.68 [0.63, 0.71]"
    (row,) = (row for row in parsed.rows if row[:2] == [("step_24", None), ("en-de", None)])
    assert row[2][0] == "0.84 [0.79, 0.87]"


def test_a_number_without_an_interval_takes_none_of_another(tmp_path: Path) -> None:
    """A hook's number replaces the run's own number of the step, and its interval too."""
    folder = make_run(tmp_path / "run", [{"step": 8, "loss": 1.0}], [scores_at(8, {"en-de": 0.0})])
    (folder / "evals").mkdir()
    odd: list[Any] = [None, [0.1], [0.1, "x"], [0.1, math.inf], {"low": 0.1}, 0.1]
    for ends in odd:
        found = {"results": {"retrieval": {"en-de": {"accuracy": 0.9}}}}
        found |= {"intervals": {"retrieval": {"en-de": {"accuracy": ends}}}}
        (folder / "evals" / "step_8.json").write_text(json.dumps(found))
        curve = read_runs([folder])[0].evals["retrieval", "en-de", "accuracy"]
        assert curve[8] == 0.9 and not curve.attrs


def test_the_summary_says_which_run_is_better(one: tuple[Path, list[Entry]]) -> None:
    (run,) = read_runs([one[0]])
    worse = Run("w", "w", {"loss": run.metrics["loss"] + 10}, {}, [], run.config, {})
    titles = [headline.title for headline in tables.headline_charts([run, worse])]
    assert len(titles) == 4 and "retrieval" in titles[2]
    rows = {row[0]: row[1:] for row in tables.headline_table(tables.headline_charts([run, worse])).rows}
    late = np.array([e["loss"] for e in one[1][-3:]])
    assert rows[titles[0]][0] == f"✓ {late.mean():.4g} ± {late.std(ddof=1):.2g}"
    assert not str(rows[titles[0]][1]).startswith("✓") and rows[titles[2]][1] is None
    near = Run("n", "n", {"loss": run.metrics["loss"] + late.std()}, {}, [], run.config, {})
    assert [str(cell)[0] for cell in tables.headline_table(tables.headline_charts([run, near])).rows[0][1:]] == [
        "✓",
        "✓",
    ]
    other = Run("o", "o", {"loss": run.metrics["loss"] / 2}, {}, [], {"streams": {"tlm": {}}}, {})
    assert "✓" not in str(tables.headline_table(tables.headline_charts([run, other])).rows[0]), (
        "losses of other streams do not compare"
    )


def test_the_summary_answers_what_is_asked_first(tmp_path: Path) -> None:
    """Which run is best, by how much, whether that is noise, whether a run diverged, and the worst language."""
    draw = np.random.default_rng(8)
    noise = draw.normal(0, 0.1, 100)
    falling = [
        {"step": s, "loss": 2 + 8 / s + n, "loss/mlm/en": 1.0, "loss/mlm/de": 3.0} for s, n in enumerate(noise, 1)
    ]
    rising = [e | {"loss": 5 + abs(e["step"] - 50) / 25, "loss/mlm/en": 4.0} for e in falling]
    broken = [e | {"loss": e["loss"] if e["step"] < 60 else None} for e in falling]
    evals = [scores_at(24, {"en-xx": 0.0}), scores_at(24, {"en-xx": -0.05}), scores_at(24, {"en-xx": -0.6})]
    folders = [
        make_run(tmp_path / name, entries, [of_run])
        for name, entries, of_run in zip("abc", (falling, rising, broken), evals, strict=True)
    ]

    def said(*chosen: int) -> str:
        runs = read_runs([folders[n] for n in chosen])
        return "\n".join(findings(runs, tables.headline_charts(runs)))

    assert "Training loss, nats: a is best, by 4.7" in said(0, 1) and "which is more than noise" in said(0, 1)
    assert re.search(r"retrieval, mean of the pairs, share: a is best, by 0\.05 over b, which may be noise", said(0, 1))
    assert re.search(r"retrieval, mean of the pairs, share: b is best, by 0\.55 over c, .*more than noise", said(1, 2))
    assert re.search(r"b: the training loss rose: it ends 1\.\d+ above its lowest, near step [45]\d\.", said(0, 1))
    assert "c: the training loss is not finite after step 59." in said(0, 2) and "not diverged" in said(0)
    assert "Worst language by loss of mlm: a: de 3 nats; b: en 4 nats." in said(0, 1)
    of_streams = [e | {"loss/mlm": 8 / e["step"], "loss/ppa": abs(e["step"] - 50) / 25} for e in falling]
    folders.append(make_run(tmp_path / "d", of_streams, []))
    assert re.search(r"^d: the loss of ppa rose: it ends 1\.\d+ above its lowest, near step [45]\d\.$", said(3), re.M)
    assert "has not diverged" in page_of(folders[0], out=tmp_path / "page.html")[0]


def test_means_over_languages(tmp_path: Path) -> None:
    """A language that a step lacks counts with its number before; a step without any number has no mean."""
    en, de = [3.0, 2.0, None, 1.0], [5.0, "absent", None, 4.0]
    entries = [{"step": s, "loss/mlm/en": a} | ({} if b == "absent" else {"loss/mlm/de": b})
               for s, (a, b) in enumerate(zip(en, de, strict=True), 1)]  # fmt: skip
    found = {"heldout": {"mlm": {"loss": 9.5}, "mlm en": {"loss": 1.5}, "mlm de": {"loss": 2.5}}}
    folder = make_run(tmp_path / "run", entries, [{"step": 1, "results": found}])
    rows = {row[0]: row[1:] for row in tables.last_and_best_table(read_runs([folder])).rows}
    assert rows["heldout loss, mlm, mean over 2 languages or pairs"] == [2, 2, 2, 1]
    assert rows["loss/mlm, mean over 2 languages or pairs"] == [2.5, 2.5, 2.5, 4]
    accuracies = {"en-xx": {"accuracy": 0.25}, "en-yy": {"accuracy": 0.75}, "all": {"accuracy": 0.5}}
    ends = {"en-xx": {"accuracy": [0.0, 0.5]}, "en-yy": {"accuracy": [0.5, 1.0]}, "all": {"accuracy": [0.4, 0.6]}}
    found = {"step": 1, "results": {"retrieval": accuracies}, "intervals": {"retrieval": ends}}
    (run,) = read_runs([make_run(tmp_path / "all", entries, [found], checkpoint={"best": "retrieval/all/accuracy"})])
    (shown,) = [
        row[1] for row in tables.headline_table(tables.headline_charts([run])).rows if "retrieval" in str(row[0])
    ]
    rows = {row[0]: row[1] for row in tables.last_and_best_table([run]).rows}
    assert (
        tables.format_cell(shown)
        == tables.format_cell(rows["retrieval accuracy, mean over 2 languages or pairs"])
        == "0.5 [0.4, 0.6]"
    )
    assert "retrieval accuracy, all" not in rows and list(curves.eval_charts([run])[0].lines) == ["en-xx", "en-yy"]
    curve = tables.mean_curve([pd.Series([3.0, 2, np.nan], [1, 2, 3]), pd.Series([5.0, np.nan], [1, 3])])
    assert curve.tolist()[:2] == [4, 3.5] and np.isnan(curve[3])
    scores = {"de": {"loss": 1.0, "targets": 10.0}, "fr": {"loss": 2.0, "targets": 30.0}}
    assert tables.with_means("perplexity", scores)["mean over 2 languages or pairs"] == {"loss": 1.5}
    assert tables.with_means("mteb", scores) == scores


# Several runs


def test_a_run_is_watched_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The page is written again while the run goes on, and a browser reads it again; the last page stands still."""
    folder = make_run(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    (folder / "status.json").write_text('{"status": "running"}')
    out, seen = tmp_path / "page.html", list[bool]()

    def sleep(seconds: float) -> None:
        assert seconds >= 1
        seen.append(out.is_file() and 'http-equiv="refresh"' in out.read_text())
        if len(seen) == 2:
            (folder / "status.json").write_text('{"status": "done"}')
        assert len(seen) < 4

    monkeypatch.setattr(command.time, "sleep", sleep)
    text, _ = page_of(folder, "--watch", out=out)
    assert seen == [True, True] and "refresh" not in text
    assert command.main([str(folder), "--watch"]) == 0
    assert capsys.readouterr().out.count(command.CLEAR) == 1


def test_a_refresh_reads_only_what_is_new(
    one: tuple[Path, list[Entry]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A refresh parses new lines only. A file that a resume has cut is read again from its beginning."""
    folder, entries = one
    whole = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = whole[:10] + [json.dumps(e | {"lr": e["step"], "loss/new": 1.0}) + "\n" for e in entries[10:]]
    contents = [[*whole[:20], whole[20][:30]], whole[:22], whole[:22], again]
    parsed, counts, loads = list[bytes](), list[int](), json.loads
    monkeypatch.setattr(json, "loads", lambda line: parsed.append(line) or loads(line))
    to_come = iter(contents)

    def go_on(seconds: float = 0) -> None:
        status = "running" if len(counts) < len(contents) - 1 else "done"
        (folder / "status.json").write_text(json.dumps({"status": status}))
        with files.publish(folder / "metrics.jsonl") as path:
            path.write_text("".join(next(to_come)))

    def look(runs: list[Run]) -> None:
        counts.append(sum(b'"lr"' in line for line in parsed if isinstance(line, bytes)))
        expected = [loads(line) for line in contents[len(counts) - 1] if line.endswith("\n")]
        assert runs[0].metrics["lr"].to_dict() == {e["step"]: e["lr"] for e in expected}
        assert ("loss/new" in runs[0].metrics) == (len(counts) == len(contents))
        parsed.clear()

    monkeypatch.setattr(command, "print_runs", look)
    monkeypatch.setattr(command.time, "sleep", go_on)
    go_on()
    assert command.main([str(folder), "--watch"]) == 0
    assert counts == [20, 2, 0, 24]


def test_the_documentation_says_how_many_languages_have_a_chart() -> None:
    text = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert f"more than {MOST_LINES} languages" in text and f"the {MOST_PANELS} with the highest loss" in text


def test_the_console_compares_runs(one: tuple[Path, list[Entry]], tmp_path: Path, capsys: Any) -> None:
    draw = np.random.default_rng(4)
    entries = [entry(step, draw) for step in range(1, 9)]
    streams = {"mlm": {"samples": 4}, "ppa": {"objective": "ppa", "samples": 8, "momentum": 0.99}}
    other = make_run(tmp_path / "runs" / "two", entries, train={"lr": 0.002, "steps": 24}, streams=streams)
    assert command.main([str(one[0]), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (differing,) = (line.split() for line in lines if line.startswith("train.lr"))
    assert differing == ["train.lr", "0.001", "0.002"]
    assert not any(line.startswith(("train.steps", "streams.mlm")) for line in lines)
    ours = [line.split() for line in lines if line.startswith("streams.ppa.")]
    assert ["streams.ppa.momentum", "absent", "0.99"] in ours
    (loss,) = (line.split() for line in lines if line.split()[:1] == ["loss/mlm"])
    assert loss[1] == f"{one[1][-1]['loss/mlm']:.4g}" and loss[5] == f"{entries[-1]['loss/mlm']:.4g}"
    best = min(entries, key=lambda e: e["loss/mlm"])
    assert loss[7:] == [f"{best['loss/mlm']:.4g}", str(best["step"])]
    (retrieval,) = (line.split() for line in lines if line.startswith("retrieval accuracy, en-de mean"))
    assert retrieval[-4:] == ["–"] * 4


def test_what_has_a_best_value(tmp_path: Path) -> None:
    """Neither what never changes nor a size; of an error rate and its F1 each its own; a run that ends without a number
    does not end with the last that it had."""
    entries = [{"step": s, "loss": n, "alignment/en-de": 0.25} for s, n in ((1, 3.0), (2, 2.0), (3, None), (4, None))]
    rows = [{"aer": a, "f1": f, "coverage": a, "queue_age": f} for a, f in ((0.4, 0.5), (0.3, 0.7), (0.5, 0.2))]
    evals = [{"step": s, "results": {"aer": {"en-de": row}}} for s, row in enumerate(rows)]
    table = tables.last_and_best_table(read_runs([make_run(tmp_path / "run", entries, evals)]))
    found = {row[0]: row[3:] for row in table.rows}
    assert found["alignment/en-de"] == found["aer coverage, en-de"] == found["aer queue_age, en-de"] == [None, None]
    assert found["aer aer, en-de"] == [0.3, 1] and found["aer f1, en-de"] == [0.7, 1] and found["loss"] == [2.0, 2]
    (loss,) = (row[1:3] for row in table.rows if row[0] == "loss")
    assert [tables.format_cell(cell) for cell in loss] == ["NaN", "NaN"]


def test_what_hooks_have_measured(tmp_path: Path, capsys: Any) -> None:
    """Beside what the run has; no file of theirs ends a report, and what failed is told."""
    entries = [{"step": s, "results": {"pos": {"de": {"zs": s / 10}}}} for s in (1, 3)]
    folder = make_run(tmp_path / "run", [{"step": 1, "loss": 1.0}], entries)
    (folder / "evals").mkdir()
    odd = {
        "step_10": '{"model": "m", "results": {"pos": {"de": {"zs": 1.0}}}, "failed": {}}',
        "step_2": '{"results": {"pos": {"de": {"zs": 0.2}}}, "failed": {"ner": {"de": "ended with 1"}}}',
        "step_4": f'{{"results": {{"pos": {{"de": {{"zs": 1{"0" * 400}}}}}}}}}',
        "step_5": f'{{"results": {{"pos": {{"de": {{"zs": 1{"0" * 5000}}}}}}}}}',
        "step_6": '{"results": {"a\\ud800": {"b": {"c\\ud800": 1.0}}}, "failed": {"d\\ud800": {"e": "f\\ud800"}}}',
        "step_7": '{"results": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "step_8": "[1]",
        "step_9": '{"results": {"pos": {"de": {"zs": 1e999}}}}',
        "step_x": "no JSON",
        "step_11.more": "no JSON",
    }
    for name, scores in odd.items():
        (folder / "evals" / f"{name}.json").write_text(scores)
    os.mkfifo(folder / "evals" / "step_12.json")
    (folder / "evals" / "step_13.json").mkdir()
    (folder / "evals" / "step_14.json").write_bytes(b"\xff\xfe")
    (run,) = read_runs([folder])
    assert run.evals["pos", "de", "zs"].dropna().to_dict() == {1: 0.1, 2: 0.2, 3: 0.3, 10: 1.0}
    assert [(step, task) for _, step, task, _ in run.failed] == [
        (14, "step_14.json"), (2, "ner de"), (5, "step_5.json"), (6, "d? e"), (7, "step_7.json"),
    ]  # fmt: skip
    assert command.main([str(folder)]) == 0 and "ended with 1" in capsys.readouterr().out
    _, page = page_of(folder, "--scores", folder / "evals" / "step_6.json", out=tmp_path / "r.html")
    assert any(("ended with 1", None) in row for row in page.rows)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name / "run", [{"step": 1, "loss": 1.0}]) for name in ("a", "b")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["a/run", "b/run"]
    long = [make_run(tmp_path / ("x" * 20 + name), [{"step": 1, "loss": 1.0}]) for name in "ab"]
    assert [run.label for run in read_runs(long)] == ["1", "2"]


# Scores

TABLE_8 = {  # of Tang et al. 2022: alignment, XNLI Delta
    "MLM": ((90.0, 1.5), (0.3, 17.2), (57.3, 4.5)),
    "XLM": ((97.7, 0.2), (85.6, 8.2), (98.6, 1.9)),
    "DICT-MLM": ((95.7, 1.1), (64.2, 9.2), (93.7, 2.2)),
    "ALIGN-MLM": ((98.4, -0.5), (95.2, 6.7), (98.2, 3.6)),
}


@pytest.fixture
def tang(tmp_path: Path) -> list[Path]:
    """A file of scores for each method, with a language for each transformation; alignment in a file of its own."""
    paths = []
    for method, points in TABLE_8.items():
        named = dict(zip(("trans", "inv", "syn"), points, strict=True))
        xnli = {
            language: {"sup": 0.75, "sup_std": 0.004, "zs": 0.75 - delta / 100, "zs_std": 0.01, "majority": 1 / 3}
            for language, (_, delta) in named.items()
        }
        alignment = {
            f"en-{language}": {f"en->{language}": score / 100, "words": 900.0, f"en->{language} trained": 0.99}
            for language, (score, _) in named.items()
        }
        for kind, results in (("xnli", xnli), ("alignment", alignment)):
            paths.append(tmp_path / f"{method}.{kind}.json")
            paths[-1].write_text(json.dumps({"model": f"hf/{method}", "results": {kind: results}, "failed": {}}))
    return paths


def test_alignment_against_delta_is_the_papers(tang: list[Path], tmp_path: Path) -> None:
    """rho_s = 0.727, p < .01, of the paper's own twelve points."""
    text, parsed = page_of("--scores", *tang, out=tmp_path / "report.html")
    scores = read_scores(tang)
    assert "<h3>xnli</h3>" not in text and "<h3>alignment</h3>" in text
    (points,) = transfer.with_alignment(transfer.transfer_scores(scores), scores, [])[0].values()
    pairs = transfer.scatter_points(points)
    assert np.array(pairs) == pytest.approx(np.array([p for of in TABLE_8.values() for p in of]))
    expected = stats.spearmanr([a for a, _ in pairs], [b for _, b in pairs])
    assert expected.statistic == pytest.approx(-0.727, abs=5e-4) and expected.pvalue < 0.01
    found = transfer.correlation(pairs)
    assert (
        f"{expected.statistic:.3f}" in found
        and f"{expected.pvalue:.3f}" in found
        and escape(found).replace("&#x27;", "&#39;") in text
    )
    rows = [[shown for shown, _ in row] for row in parsed.rows]
    assert ["model", "language", "SUP", "ZS", "Δ", "majority"] in rows
    assert ["XLM", "inv", "75.0 ± 0.4", "66.8 ± 1.0", "8.2", "33.3"] in rows
    assert ["XLM", "mean over languages", "75.0", "71.6", "3.4", "33.3"] in rows


def test_too_few_points_have_no_correlation() -> None:
    assert "needs 3" in transfer.correlation([(1.0, 2.0), (2.0, 1.0)])
    assert "no correlation" in transfer.correlation([(1.0, 2.0), (1.0, 1.0), (1.0, 3.0)])


def test_alignment_of_a_run_stands_in_for_that_of_its_model(tmp_path: Path) -> None:
    """At its last step; and where some model has no withheld words, all points are of trained ones."""
    (tmp_path / "s.json").write_text(json.dumps({"model": "hf/a", "results": {"pos": {"de": {"zs": 0.5, "sup": 0.9}}}}))
    scores = read_scores([tmp_path / "s.json"])
    entries = [{"step": s, "alignment/en-de": s / 10, "alignment_trained/en-de": s / 5} for s in (1, 2)]
    (run,) = read_runs([make_run(tmp_path / "a", [*entries, {"step": 3, "alignment/en-de": None}])])
    found, kind = transfer.with_alignment(transfer.transfer_scores(scores), scores, [run])
    assert kind == "withheld" and transfer.scatter_points(found["pos"])[0] == pytest.approx((20, 40))
    del run.metrics["alignment/en-de"]
    found, kind = transfer.with_alignment(transfer.transfer_scores(scores), scores, [run])
    assert kind == "trained" and transfer.scatter_points(found["pos"])[0] == pytest.approx((40, 40))


def test_retrieval_by_layer(tmp_path: Path) -> None:
    rows = {f"en-de {pooling} layer {n}": {"accuracy": n / 10} for n in (2, 0, 10, 1) for pooling in ("mean", "cls")}
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text(json.dumps({"model": path.stem, "results": {"retrieval": rows}, "failed": {}}))
    (chart,) = curves.layer_charts(read_scores(paths[:1]))
    assert [*chart.lines] == ["en-de mean", "en-de cls"] and chart.x == "layer"
    assert chart.lines["en-de mean"][0].to_dict() == {0: 0.0, 1: 0.1, 2: 0.2, 10: 1.0}
    (both,) = curves.layer_charts(read_scores(paths))
    assert both.names == ["a", "b"] and all(len(of_models) == 2 for of_models in both.lines.values())


def test_what_failed_is_said(tmp_path: Path) -> None:
    scores = {"model": "a", "results": {}, "failed": {"alignment": {"en-de": "needs a <dictionary>"}}}
    (tmp_path / "s.json").write_text(json.dumps(scores))
    assert "needs a &lt;dictionary&gt;" in page_of("--scores", tmp_path / "s.json", out=tmp_path / "r.html")[0]


# Models


@pytest.fixture(scope="module")
def linked(demo: Path) -> Source:
    return Source(demo / "pairs")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A random model, large enough that its states differ, with heads of AlignLM."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(**shape, vocab_size=tokenizer.vocab_size, max_position_embeddings=128, initializer_range=0.3)
    path = tmp_path_factory.mktemp("model") / "hf"
    AutoModelForMaskedLM.from_config(config).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    weights = {name: torch.randn(32, 32) / 4 for name in ("W2.weight", "W3.weight", "linear.weight")}
    weights |= {name: torch.randn(32) / 4 for name in ("W2.bias", "W3.bias", "linear.bias")}
    save_heads({"alignlm": SavedHeads({"objective": "alignlm"}, weights)}, path)
    return path


def records(source: Source) -> list[dict[str, Any]]:
    return [json.loads(line) for tar in sorted(source.directory.glob("*.tar")) for line in tar_lines(tar)]


def test_words_that_are_shown_are_the_most_often_linked(linked: Source) -> None:
    counts, alone = Counter[tuple[str, str]](), (Counter[str](), Counter[str]())
    for record in records(linked):
        (a, a_is_word), (b, b_is_word) = split(record["texts"])
        for counter, texts, kept in zip(alone, (a, b), (a_is_word, b_is_word), strict=True):
            counter.update(np.array(texts, dtype=object)[kept].tolist())
        for i, j in (map(int, link.split("-")) for link in record["links"].split()):
            counts[a[i], b[j]] += bool(a_is_word[i] and b_is_word[j])
    stop = [{word for word, _ in counter.most_common(models.STOP_WORDS)} for counter in alone]
    found = models.frequent_word_pairs(linked)
    assert len(found) == models.MOST_WORDS and all(
        len(set(side)) == models.MOST_WORDS for side in zip(*found, strict=True)
    )
    assert not any(a in stop[0] or b in stop[1] for a, b in found)
    best = [pair for pair, _ in counts.most_common() if pair[0] not in stop[0] and pair[1] not in stop[1]]
    assert found[0] == best[0] and all(counts[x] >= counts[y] for x, y in pairwise(found))


def test_translations_with_one_vector_are_together(hf: Path, linked: Source, tmp_path: Path) -> None:
    """Planted: a second word's tokens have the first one's mean. Unplanted words are as near as chance has it."""
    model, pairs = ExportedModel(hf), models.frequent_word_pairs(linked)
    ids = model.tokenizer.encode_inside([word for pair in pairs for word in pair])
    pairs = [pair for n, pair in enumerate(pairs) if len(ids[2 * n]) == len(ids[2 * n + 1]) == 1]
    assert len(pairs) > 5
    before = models.project_words(model, pairs)
    with torch.no_grad():
        for n in range(0, len(ids), 2):
            if len(ids[n]) == len(ids[n + 1]) == 1:
                model.encoder.embeddings[ids[n + 1][0]] = 2 * model.encoder.embeddings[ids[n][0]]
    after = models.project_words(model, pairs)
    assert after[2] == len(pairs) > before[2] and abs(before[1]) < 0.3
    assert after[1] == pytest.approx(1, abs=1e-5)
    apart = [np.linalg.norm(p[:, 0] - p[:, 1], axis=1).mean() / np.ptp(p) for p, *_ in (before, after)]
    assert apart[1] < apart[0] / 3


def test_guesses_of_both_heads_are_those_of_plain_transformers(hf: Path, linked: Source) -> None:
    """Equations (1)-(8) by loops over the links, of transformers' hidden states."""
    model, lm = ExportedModel(hf), AutoModelForMaskedLM.from_pretrained(hf).eval()
    pair = models.sample_pairs(model, linked)[0]
    context = Context(model.tokenizer, 128, "drop", {"en": 0, "xx": 1})
    options = alignlm.AlignLMOptions()
    heads = alignlm.Heads(model.encoder, options)
    heads.load_state_dict(model.heads["alignlm"].weights)
    stream_batch = alignlm.collate([[pair]], options, context)
    tokens, found = models.masked_tokens(models.Parts(model.encoder, heads), pair, options, context, True)
    masked = stream_batch.reads["masked"].places.tolist()
    with torch.no_grad():
        states = lm.bert(torch.from_numpy(stream_batch.sequences.ids)[None]).last_hidden_state[0]
        transform, decoder = lm.cls.predictions.transform, lm.cls.predictions.decoder

        def guess(hidden: torch.Tensor, dense: torch.nn.Module) -> tuple[list[str], list[float]]:
            features = transform.LayerNorm(heads.linear(transform.transform_act_fn(dense(hidden))))
            best = decoder(features).softmax(-1).topk(3)
            return [model.tokenizer.hf.decode([i]) for i in best.indices.tolist()], best.values.tolist()

        linked_tokens = links_of(pair, stream_batch.sequences.segment_starts.tolist())
        assert len(found) == min(len(masked), models.MOST_MASKED) > 3
        for shown, place in zip(found, masked, strict=False):
            names, values = guess(states[place], transform.dense)
            assert shown.position == place and [name for name, _ in shown.mono] == names
            assert [p for _, p in shown.mono] == pytest.approx(values, rel=1e-3)
            partners = linked_tokens.get(place, [])
            assert shown.linked == [tokens[p] for p in partners]
            if partners:
                names, values = guess(heads.W2(states[partners].sum(0)), heads.W3)
                assert [name for name, _ in shown.bi] == names
                assert [p for _, p in shown.bi] == pytest.approx(values, rel=1e-3)
        assert any(shown.linked for shown in found)


def links_of(pair: Any, starts: list[int]) -> dict[int, list[int]]:
    """Each token's partners, by loops; links of a word and a symbol are none."""
    found: dict[int, list[int]] = {}
    of_word: tuple[dict[int, list[int]], ...] = ({}, {})
    for side, (text, start) in enumerate(zip(pair.words, starts, strict=True)):
        for token, word in zip(text.tokens.tolist(), text.words.tolist(), strict=True):
            of_word[side].setdefault(word, []).append(token + start)
    for i, j in (map(int, link.split("-")) for link in pair.links.split()):
        if pair.words[0].is_word[i] == pair.words[1].is_word[j]:
            for a in of_word[0][i]:
                for b in of_word[1][j]:
                    found.setdefault(a, []).append(b)
                    found.setdefault(b, []).append(a)
    return {token: sorted(set(partners)) for token, partners in found.items()}


def test_a_page_of_models(hf: Path, demo: Path, tmp_path: Path, one: tuple[Path, list[Entry]]) -> None:
    """Before and after; examples of the last; a model without heads guesses from its own states alone."""
    plain = tmp_path / "plain"
    AutoModelForMaskedLM.from_pretrained(hf).save_pretrained(plain)
    Tokenizer(hf).hf.save_pretrained(plain)
    text, parsed = page_of("--models", hf, plain, "--pairs", demo / "heldout", out=tmp_path / "a.html")
    assert parsed.tags["svg"] == 2 and text.count("<mark>") > 8 and "plain, en-xx" in text
    head = [("", None), ("masked", None), ("linked with", None), ("from its own state", None), ("from its links", None)]
    at = parsed.rows.index(head)
    assert {row[4][0] for row in parsed.rows[at + 1 : at + 4]} == {"–"}


def test_models_of_pairs_with_too_few_linked_words(hf: Path, tmp_path: Path) -> None:
    """Examples of the model without a picture of its words."""
    for name, line in (("en", "a b\n"), ("xx", "c d\n"), ("links", "0-0 1-1\n")):
        (tmp_path / name).write_text(line)
    words = ["--src", tmp_path / "en", "--tgt", tmp_path / "xx", "--langs", "en", "xx", "--links", tmp_path / "links"]
    write_shards.main(["pairs", *map(str, words), "--out", str(tmp_path / "pairs")])
    text, parsed = page_of("--models", hf, "--pairs", tmp_path / "pairs", out=tmp_path / "a.html")
    assert not parsed.tags["svg"] and "<mark>" in text


# Errors


def broken(name: str, text: str) -> Callable[[Path], list[object]]:
    def write(folder: Path) -> list[object]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        run = name.startswith("run")
        if run and not (folder / "run" / "metrics.jsonl").exists():
            (folder / "run" / "metrics.jsonl").touch()
        return [folder / "run" if run else "--scores", *([] if run else [folder / name]), "--out", folder / "r.html"]

    return write


def test_a_run_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink()
    assert (
        command.main([str(folder), "--out", str(tmp_path / "r.html")]) == 0
        and "run" in (tmp_path / "r.html").read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda folder: [], "nothing to report"),
        (lambda folder: [folder / "absent"], "absent has no metrics.jsonl"),
        (lambda folder: [folder, "--scores", "x"], "give --out"),
        (lambda folder: ["--models", "x", "--out", folder / "r.html"], "--models and --pairs go together"),
        (lambda folder: ["--scores", "x", "--out", folder], "is a directory; give a file"),
        (lambda folder: ["--scores", "x", "--out", folder / "r.html", "--png="], "--png= is empty"),
        (lambda folder: ["--scores", folder / "x", "--out", folder / "r.html"], "x cannot be read (No such file"),
        (broken("run/metrics.jsonl", '{"step": 1}\n[2]\n{"step": 3}\n'), "metrics.jsonl, line 2, is no JSON object"),
        (broken("run/metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n'), "metrics.jsonl, line 2, is no JSON object"),
        (broken("run/config.yaml", "a: [1"), "config.yaml is no YAML (while parsing"),
        (broken("run/config.yaml", "- a"), "config.yaml has no fields"),
        (broken("scores.json", "{"), "scores.json is no JSON"),
        (broken("scores.json", "[]"), "scores.json has no results"),
    ],
)
def test_errors_name_file_and_remedy(
    arguments: Callable[[Path], list[object]], said: str, tmp_path: Path, capsys: Any
) -> None:
    assert command.main(list(map(str, arguments(tmp_path)))) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "r.html").exists()


def test_files_of_another_shape_are_passed_over(tmp_path: Path) -> None:
    """Of a run that somebody touched, and of scores that somebody else wrote."""
    evals = [{"step": 1, "failed": "x"}, {"step": 2, "failed": {"pos": None}, "results": [1]}]
    folder = make_run(tmp_path / "run", [{"step": 1, "loss": 1.0}], evals)
    (folder / "status.json").write_text("[1]")
    for number, failed in enumerate(('["x"]', '{"pos": "why"}', '{"pos": {"de": ["why"]}}')):
        (tmp_path / f"{number}.json").write_text(f'{{"model": "m", "results": {{}}, "failed": {failed}}}')
    page_of(folder, "--scores", *tmp_path.glob("*.json"), out=tmp_path / "r.html")


@pytest.mark.parametrize("full", [True, False])
def test_a_full_disk_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, full: bool) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path)) if full else OSError(errno.EBADF, "ours")

    monkeypatch.setattr("xscale.files.write_text", fail)
    with nullcontext() if full else pytest.raises(OSError, match="ours"):
        run = make_run(tmp_path / "run", [{"step": 1, "loss": 1.0}])
        assert command.main([str(run), "--out", str(tmp_path / "r.html")]) == 4
        assert "r.html: No space left on device; fix that" in capsys.readouterr().err


def test_shards_without_links_are_refused(
    corpus_files: Callable[..., tuple[Path, Path]], write_pairs: Callable[..., None], tmp_path: Path
) -> None:
    write_pairs(*corpus_files(["a b c"], ["d e f"]), tmp_path / "pairs")
    with pytest.raises(UserError, match="has no word links; write it again"):
        models.frequent_word_pairs(Source(tmp_path / "pairs"))


# In a browser

MEASURE = """
<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.scrollingElement;
    const sizes = [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
    const letters = [...page.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height);
    return {inner: frame.contentWindow.innerWidth, room: root.clientWidth, wide: root.scrollWidth, charts: sizes.length,
      least: Math.min(...sizes.map(s => Math.min(s.width, s.height))), letters: Math.min(...letters),
      fold: page.querySelector("details")?.getBoundingClientRect().top ?? 0};
  });
  document.body.textContent = "MEASURED" + JSON.stringify(found) + "MEASURED";
});
</script>
"""


def many_languages(step: int, draw: np.random.Generator) -> Entry:
    names = [f"loss/{stream}/l{n:03d}" for stream in ("mlm", "tlm") for n in range(100)]
    names += [f"alignment/l000-l{n:03d}" for n in range(1, 100)]
    return entry(step, draw) | {name: 10 / step + float(draw.uniform(0.1, 1)) for name in names}


def evals_of_many(step: int, draw: np.random.Generator) -> Entry:
    rows = {f"l000-l{n:03d} mean": {"accuracy": float(draw.uniform())} for n in range(1, 100)}
    return {"step": step, "results": {"retrieval": rows}}


@pytest.mark.slow
def test_pages_fit_wide_and_narrow_screens(
    one: tuple[Path, list[Entry]], tang: list[Path], hf: Path, demo: Path, tmp_path: Path
) -> None:
    """In headless Chromium, as frames 1280 and 400 pixels wide: nothing to scroll sideways, every chart has a size and
    letters that can be read, and a page of runs has at most three screens above its first folded section."""
    draw_ = np.random.default_rng(5)
    other = make_run(tmp_path / "a-run-of-a-rather-long-name", [entry(step, draw_) for step in range(1, 900)], lr=1)
    third = make_run(tmp_path / "third", [entry(step, draw_) for step in range(1, 500)])
    evals = [evals_of_many(step, draw_) for step in (150, 300)]
    hundred = make_run(tmp_path / "hundred", [many_languages(step, draw_) for step in range(1, 301)], evals)
    of_runs: dict[str, list[object]] = {"2 languages": [one[0]], "100 languages": [hundred]}
    of_runs["3 runs"] = [one[0], other, third]
    pages = of_runs | {
        "scores": [one[0], other, "--scores", *tang],
        "models": ["--models", hf, "--pairs", demo / "heldout"],
    }
    body = ""
    for name, arguments in pages.items():
        text, _ = page_of(*arguments, out=tmp_path / f"{name}.html")
        frame = escape(text)
        body += "".join(f'<iframe srcdoc="{frame}" width="{width}" height="900"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(
        f"<!doctype html><meta charset=utf-8><style>iframe {{ border: 0 }}</style><body>{body}{MEASURE}", "utf-8"
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (measured,) = re.findall(r"MEASURED(.*)MEASURED", done.stdout)
    found = dict(zip(((name, width) for name in pages for width in WIDTHS), json.loads(measured), strict=True))
    for (name, width), frame in found.items():
        assert frame["inner"] == width and frame["wide"] <= frame["room"] and frame["charts"] > 0, (name, frame)
        assert frame["least"] > 100 and frame["letters"] >= 8.9, (name, width, frame)  # 9, as a browser rounds it
        assert name not in of_runs or frame["fold"] <= 3 * 900, (name, width, frame)
