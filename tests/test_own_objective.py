"""The objective of how-to/own-objective.md, from a package that xscale does not know: its rules, training, export."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForMaskedLM

from tests import launch
from tests.conformance import check_objective
from xscale.errors import UserError
from xscale.objectives import OBJECTIVES, import_objective
from xscale.run.resolve import build_initial_module, resolve_run
from xscale.run.run_status import FAULT, exit_code_and_message

RECIPE = "streams: {ranking: {objective: 'ranking:OBJECTIVE', samples: 24}}\n"
PAGE = (launch.ROOT / "docs" / "how-to" / "own-objective.md").read_text(encoding="utf-8")
SETS = ["streams.ranking.temperature=1.0", "streams.ranking.samples=9"]
CHANGED = "streams.ranking.objective=changed:OBJECTIVE"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's ranking.py, and ranking.yaml."""
    folder = tmp_path_factory.mktemp("package")
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (folder / "ranking.py").write_text(source)
    (folder / "ranking.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def changed(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """changed(there, instead): the recipe, after writing a module `changed`: ranking.py with one passage changed."""

    def write(there: str, instead: str) -> str:
        text = (package / "ranking.py").read_text()
        assert text.count(there) == 1
        (tmp_path / "changed.py").write_text(text.replace(there, instead))
        return str(package / "ranking.yaml")

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "changed", raising=False)
    yield write
    OBJECTIVES.pop("changed:OBJECTIVE", None)


def test_the_page_s_objective_keeps_the_rules(
    package: Path, demo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The page's own test passes, in a folder with the demo's shards."""
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "ranking", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").symlink_to(demo)
    (tmp_path / "ranking.yaml").write_text(RECIPE)
    (test,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(test, found)
    found["test_ranking_keeps_the_rules_of_training"]()
    OBJECTIVES.pop("ranking:OBJECTIVE", None)


@pytest.mark.parametrize(
    ("there", "instead", "told"),
    [
        ("step_loss_share(losses, states[\"own\"])", "losses[states[\"own\"]].sum()", "gradient differs"),
        ("step_loss_share(losses, states[\"own\"])", "losses.sum()", "on 4 rank.*the loss is"),
        ("scores.to(", "(scores + scores.detach()).to(", "the loss changes by"),
        ("return StreamBatch(", "import random; first.ids[:] = [random.randrange(5, 90) for _ in first.ids]"
         "\n    return StreamBatch(", "collated in two ways"),
        ("states = {", "states = {} if not pairs else {", "without samples states has"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_found(
    changed: Callable[[str, str], str], demo: Path, there: str, instead: str, told: str
) -> None:
    found = check_objective(changed(there, instead), [demo], [*SETS, CHANGED])
    assert re.search(told, "\n".join(found)), found


@pytest.mark.parametrize("recipe", ["tlm", "alignlm"])
def test_objectives_with_metrics_by_language_keep_the_rules(demo: Path, recipe: str) -> None:
    assert check_objective(recipe, [demo], [f"streams.{recipe}.samples=9"]) == []


WRONG = [
    (
        "return StreamBatch(",
        "import sys; sys.exit(0)\n    return StreamBatch(",
        "collate",
        r"collate .* called sys.exit\(0\)",
    ),
    ("return StreamBatch(", "return (lambda *_, **fields: fields)(", "collate", "returned dict"),
    ("return StreamBatch(", "return 1 / 0 and StreamBatch(", "collate", "division by zero"),
    (
        "Gather.single(first.starts)",
        "Gather.single(first.starts + 10**6)",
        "collate",
        "states.'source'., a Gather with token indices from 1000000 ",
    ),
    (
        '{"rank": len(pairs)}',
        '{"rnak": len(pairs)}',
        "collate",
        "the returned .target_counts. have no key 'rank'",
    ),
    (
        "samples=len(pairs)",
        'samples=len(pairs), labels={"odd": first.ids}',
        "collate",
        "labels of the terms odd, but the terms",
    ),
    ("    scores = ", "    import sys; sys.exit(0)\n    scores = ", "loss", r"called sys.exit\(0\)"),
    ('return Losses(sums={"rank"', 'return Losses(sums={"rnak"', "loss", "sums with 'rnak', which is not a term"),
    ('step_loss_share(losses, states["own"])', "losses", "loss", r"sums.'rank'. of shape \[24\]"),
    ('(right, "rank")', '(right, "pairs")', "loss", "the metric accuracy of the term 'pairs', but"),
    ("scores = source @ target.T", "scores = source @ target", "loss", "shapes cannot be multiplied"),
]


@pytest.mark.parametrize(("there", "instead", "function", "told"), WRONG)
def test_what_an_objective_does_wrong_bears_its_name(
    changed: Callable[[str, str], str], demo: Path, there: str, instead: str, function: str, told: str
) -> None:
    """The error names the stream, the objective and the function; an exit is an error too."""
    with pytest.raises(Exception, match=told) as caught:
        check_objective(changed(there, instead), [demo], [CHANGED])
    why = exit_code_and_message(caught.value)[1]
    assert f"streams.ranking: the function {function} of the objective changed:OBJECTIVE: " in why
    assert exit_code_and_message(caught.value)[0] == FAULT


HEAD = "from dataclasses import dataclass, replace\nfrom xscale.objectives import tlm\n"
BROKEN = [
    ("def x(:", r"cannot be imported \(SyntaxError"),
    ("raise RuntimeError('no licence')", r"cannot be imported \(RuntimeError: no licence"),
    ("import sys; sys.exit(3)", r"cannot be imported \(SystemExit"),
    ("import not_there_at_all", "No module named 'not_there_at_all'"),
    ("", "is not an objective"),
    ("OBJECTIVE = {'odd': 5}", "is not an objective"),
    (f"{HEAD}OBJECTIVE = replace(tlm.OBJECTIVE, options=dict)", "`options` of the objective must be a dataclass"),
    (f"{HEAD}OBJECTIVE = replace(tlm.OBJECTIVE, record_kind='pairs')", "record_kind is 'pairs', and must be"),
    (
        f"{HEAD}@dataclass\nclass O:\n    weight: float = 7.0\nOBJECTIVE = replace(tlm.OBJECTIVE, options=O)",
        "the options weight, but",
    ),
]


@pytest.mark.parametrize(("text", "problem"), BROKEN)
def test_a_broken_objective_is_a_users_error(
    package: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    (tmp_path / "odd.py").write_text(text)
    with pytest.raises(UserError, match=f"streams.ranking.objective: .*{problem}"):
        resolve_run(str(package / "ranking.yaml"), ["streams.ranking.objective=odd:OBJECTIVE"], [demo])


@pytest.mark.parametrize("name", ["./odd.py:OBJECTIVE", "odd:", "odd:a.b", ":OBJECTIVE"])
def test_an_objective_has_a_module_and_a_name(name: str) -> None:
    with pytest.raises(UserError, match=r"cannot be imported|Write MODULE:NAME"):
        import_objective(name)


@pytest.mark.slow
def test_it_trains_resumes_and_is_exported(package: Path, demo: Path, tmp_path: Path, monkeypatch) -> None:
    """On 2 ranks; a resume gives the same bits, one rank the same losses."""
    monkeypatch.setenv("PYTHONPATH", f"{package}{os.pathsep}{launch.ROOT}")
    common = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", str(package / "ranking.yaml")]
    common += ["--data", str(demo), "--steps", "8", "--set", "train.lr=0.0005", "model.dropout=0.0"]
    common += ["checkpoint.every=4"]
    whole, again, alone = (tmp_path / name for name in ("whole", "again", "alone"))
    launch.run(2, [*common, "checkpoint.keep=9", "--out", str(whole)])
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_00000008")
    assert "the run continues from" in launch.run(2, [*common, "--out", str(again)])
    assert launch.without_times(again) == launch.without_times(whole)
    launch.run(1, [*common, "--out", str(alone)])
    losses = [[entry["loss"] for entry in launch.metrics(out)] for out in (whole, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][-1] < losses[0][0]
    words = ["-m", "xscale.export", str(again), str(tmp_path / "hf")]
    assert launch.fork(0, words, launch.environment())[0] == 0
    AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")


def test_a_state_is_told_the_number_of_steps(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state without a queue, such as one that follows a schedule."""
    state = SimpleNamespace(steps=0)
    monkeypatch.setitem(OBJECTIVES, "tlm", replace(OBJECTIVES["tlm"], auxiliary_state=lambda *_: state))
    build_initial_module(*resolve_run("tlm", ["data.workers=0", "train.steps=7"], [demo]))
    assert state.steps == 7


def test_a_queue_without_the_methods_that_fill_it_is_refused(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """xscale would call no other method, and would train with an empty queue."""
    state = SimpleNamespace(steps=0, prefill_samples=9, gather=print, finish_warmup=print)
    monkeypatch.setitem(OBJECTIVES, "tlm", replace(OBJECTIVES["tlm"], auxiliary_state=lambda *_: state))
    with pytest.raises(UserError, match=r"streams\.tlm: .*lacks gather_new_vectors or enqueue_new_vectors"):
        build_initial_module(*resolve_run("tlm", ["data.workers=0"], [demo]))
