"""Run a grid of a paper's experiments, and write its table and pictures.

    python benchmarks/papers/run.py --grid tang --scale cpu --data SHARED_DATA --out DIR

A grid (tang, sizes, methods, mixtures, or a YAML file of yours) names worlds (the data), arms (the recipes), the cells,
and the arms that are compared; scales.yaml has the sizes of each scale. A cell is one world, one arm and one seed:
public commands train, export, measure and fine-tune it. A grid that was killed can be started again: it does not repeat
finished work, and its table is the same. The script stops if one of the first two cells does not learn (not at smoke).

DIR/table.md has means and deviations over seeds and the tests of the comparisons, DIR/cells.md has each cell's cost,
DIR/alignment.png shows alignment scores and the loss in transfer, DIR/words.png translated words by t-SNE. Scale smoke
makes its own data. `--only WORLD/ARM ...` runs only these cells; several processes may run cells of different worlds,
and a last call without --only writes the table of all cells.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from made import make_data
from pictures import draw_pictures
from tables import converged, folder_name, write_tables
from worlds import make_world

from xscale import files
from xscale.errors import UserError
from xscale.recipe import RECIPES
from xscale.strict_yaml import read_yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GRIDS = sorted(path.stem for path in HERE.glob("*.yaml") if path.stem != "scales")
NOT_FINITE = 3
"""The exit code of a training whose loss is not finite."""


class Cell(NamedTuple):
    world: str
    arm: str
    seed: int

    @property
    def path(self) -> str:
        return folder_name(f"{self.world}/{self.arm}.{self.seed}")


class Grid:
    """A grid's cells at a scale, and the folder for their results."""

    def __init__(self, args: argparse.Namespace):
        self.out: Path = args.out.resolve()
        path = HERE / f"{args.grid}.yaml" if args.grid in GRIDS else Path(args.grid)
        if not path.is_file():
            raise UserError(f"--grid {args.grid} is neither a file nor one of {', '.join(GRIDS)}")
        self.grid: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        for arm in filter(None, [*self.grid["arms"].values(), self.grid.get("pretrain")]):
            if not (RECIPES / f"{arm['recipe']}.yaml").exists():
                raise UserError(f"{path}: recipe {arm['recipe']} does not exist; choose one of {RECIPES}")
        scales = yaml.safe_load((HERE / "scales.yaml").read_text(encoding="utf-8"))
        self.scale: dict[str, Any] = scales[args.scale] | self.grid.get("scales", {}).get(args.scale, {})
        self.scale |= read_settings(args.set, {key: value for scale in scales.values() for key, value in scale.items()})
        self.data = make_data(self.out / "made") if args.scale == "smoke" else args.data and args.data.resolve()
        if not self.data:
            raise UserError(f"--scale {args.scale} needs --data, the folder with parallel/, mono/, lexicon/ and eval/")
        cells = [
            Cell(world, arm, seed)
            for seed in self.scale["seeds"]
            for product in self.grid["cells"]
            for world in product["worlds"]
            for arm in product["arms"]
        ]
        names = dict.fromkeys(f"{cell.world}/{cell.arm}" for cell in cells)
        if unknown := set(args.only) - names.keys():
            raise UserError(f"--only {unknown.pop()}: there is no such cell; the grid has {', '.join(names)}")
        wanted = set(args.only or names)
        self.cells = [cell for cell in cells if f"{cell.world}/{cell.arm}" in wanted][: self.scale.get("cells")]
        self.check_settings({"grid": args.grid} | self.scale)

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raise UserError if the folder has cells with other settings. The number of seeds may grow."""
        path = self.out / "settings.json"
        text = json.dumps({key: value for key, value in settings.items() if key not in ("seeds", "cells", "learns")})
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise UserError(f"{path} has other settings than this call; choose another --out, or the same --set")
        files.write_text(path, text)

    def run(self, *words: object) -> None:
        """Run `python WORDS`, and append its output to commands.log. Raises CommandError."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        log = self.out / "commands.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        line = " ".join(map(str, words))
        print(f"$ {line[:200]}", flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"\n$ {line}\n")
            file.flush()
            done = subprocess.run(
                [sys.executable, *map(str, words)], cwd=ROOT, env=environment, stdout=file, stderr=file
            )
        if done.returncode:
            raise CommandError(done.returncode, f"`{line[:200]}` ended with exit code {done.returncode}; see {log}")

    def once(self, made: Path, *words: object) -> None:
        """Run a command that writes the file `made`, unless the file exists."""
        if not made.exists():
            partial = made.with_name(f"{made.stem}.partial{made.suffix}")
            made.parent.mkdir(parents=True, exist_ok=True)
            self.run(*words, "--out", partial)
            partial.rename(made)

    def world(self, name: str) -> Path:
        folder = self.out / "worlds" / folder_name(name)
        make_world(self.grid["worlds"][name], self.scale, self.data, folder, self.run)
        return folder

    def recipe(self, arm: dict[str, Any], steps: int, world: Path, init: Path | None) -> dict[str, Any]:
        """The arm's shipped recipe with fields of the scale, the grid and the arm; without streams that are null."""
        recipe = yaml.safe_load((RECIPES / f"{arm['recipe']}.yaml").read_text(encoding="utf-8"))
        length_ratio = self.scale["max_length"] / recipe.get("data", {}).get("max_length", 128)
        fields = {
            "model.preset": self.scale["preset"],
            "model.tokenizer": str(world / "tokenizer"),
            "data.max_length": self.scale["max_length"],
            "data.lexicons": [str(path) for path in sorted((world / "lexicon").glob("*.txt"))],
            "data.lexicon_heldout": 0.0,
            "data.alpha": 1.0,
            "train.steps": steps,
            "train.lr": self.scale["lr"],
            "train.warmup": 0.1,
            "train.measure_every": 0,
            "checkpoint.every": max(steps // 5, 1),
            "checkpoint.keep": 2,
        }
        fields |= {"model.init": str(init)} if init else {}
        fields |= self.grid.get("fields", {})
        fields |= {key: value for key, value in arm.items() if "." in key}
        for key, value in fields.items():
            section = recipe
            *parts, last = key.split(".")
            for part in parts:
                section = section.setdefault(part, {})
            section[last] = value
        recipe["streams"] = {name: stream for name, stream in recipe["streams"].items() if stream}
        for stream in recipe["streams"].values():
            if stream.get("samples"):
                stream["samples"] = max(round(stream["samples"] * self.scale["samples"]), 1)
            elif stream.get("tokens"):
                stream["tokens"] = round(stream["tokens"] * self.scale["samples"] * length_ratio)
        return recipe

    def train(self, cell: Cell, arm: dict[str, Any], steps: int, init: Path | None) -> Path:
        """Train a cell and export it, unless the export exists. Returns the export's folder."""
        hf, run, world = self.out / "hf" / cell.path, self.out / "runs" / cell.path, self.world(cell.world)
        if (hf / "config.json").exists():
            return hf
        file = self.out / "recipes" / f"{cell.path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(self.recipe(arm, steps, world, init), sort_keys=False), encoding="utf-8")
        text = ["mono" if (world / "shards/mono").exists() else "sides"]
        data = [folder for kind in arm.get("reads", text) for folder in sorted((world / "shards" / kind).iterdir())]
        ranks = self.scale.get("ranks", 1)
        launcher = ("-m", "deepspeed.launcher.runner", "--num_gpus", ranks) if ranks > 1 else ()
        self.run(*launcher, ROOT / "xscale/train.py", "--ds_config", ROOT / "ds_configs" / self.scale["ds_config"],
                 "--recipe", file, "--data", *data, "--out", run, "--seed", cell.seed)  # fmt: skip
        self.run("-m", "xscale.export", run, hf)
        return hf

    def finish(self, cell: Cell) -> dict[str, Any]:
        """Train and measure a cell, unless that is done. Returns its scores and its cost."""
        path = self.out / "scores" / f"{cell.path}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        started, arm, init = time.time(), self.grid["arms"][cell.arm], None
        if "pretrain" in self.grid:
            init = self.train(Cell(cell.world, "pretrained", 0), self.grid["pretrain"], self.scale["pretrain"], None)
        scores, problem = {}, ""
        try:
            hf = self.train(cell, arm, self.scale["steps"], init) if arm else init
            assert hf is not None
            scores = self.measure(cell, hf)
        except CommandError as error:
            if error.code != NOT_FINITE:
                raise
            problem = str(error)
        found = {"cell": cell._asdict(), "scores": scores, "problem": problem, **self.training(cell, started)}
        found["predicts"] = (arm or {}).get("predicts", True)
        files.write_text(path, json.dumps(found, indent=1))
        return found

    def measure(self, cell: Cell, hf: Path) -> dict[str, float]:
        """Measure an export. Returns scores by name: losses in nats, all others in per cent."""
        world, parts = self.world(cell.world), self.out / "parts" / cell.path
        (heldout,) = (world / "heldout").iterdir()
        pair = heldout.name
        texts = [path for kind in ("mono", "sides") for path in sorted((world / "shards" / kind).glob("*"))]
        evaluate = ("-m", "xscale.eval.run", "--model", hf, "--data", heldout, *texts, "--lexicon_heldout", 1)
        files = {kind: parts.with_name(f"{parts.name}.{kind}.json") for kind in ("withheld", "all")}
        words = {kind: ("--lexicons", world / kind / f"{pair}.txt", "--task", "alignment") for kind in files}
        if not (world / "withheld" / f"{pair}.txt").stat().st_size:  # training has all words
            words["withheld"] = ("--task",)
        more = ("retrieval", "heldout", "--pooling", "mean", "cls", "--layer", "all", "--limit", 3000)
        self.once(files["withheld"], *evaluate, *words["withheld"], *more)
        self.once(files["all"], *evaluate, *words["all"])
        found = read_results(files["withheld"])
        rows = {row: 100 * values["accuracy"] for row, values in found["retrieval"].items()}
        of_pool = {pool: [value for row, value in rows.items() if pool in row.split()] for pool in ("mean", "cls")}
        scores = {f"retrieval {pool}": max(values) for pool, values in of_pool.items()}
        for kind, file in files.items():
            for of_words in read_results(file).get("alignment", {}).values():
                scores[f"aligned {kind}"] = 100 * of_words.get(pair.replace("-", "->", 1), math.nan)
        (of_text,) = found["heldout"].values()
        scores |= {"TLM loss": of_text["tlm_loss"], "unigram entropy": of_text["unigram_entropy"]}
        tasks = world / "tasks.json"
        for task, texts in json.loads(tasks.read_text(encoding="utf-8")).items() if tasks.exists() else ():
            scores |= self.tune(task, texts, world, hf, parts)
        return scores

    def tune(self, task: str, texts: dict[str, dict[str, str]], world: Path, hf: Path, parts: Path) -> dict[str, float]:
        """Fine-tune an export. Returns zero-shot and supervised scores, their difference, and the majority class's."""
        tune = self.scale["tune"]
        given = {part: [f"{lang}={world / file}" for lang, file in files.items()] for part, files in texts.items()}
        limit = ("--limit", tune["limit"], "--test_limit", tune["limit"]) if tune["limit"] else ()
        file = parts.with_name(f"{parts.name}.{task}.json")
        self.once(file, "-m", "xscale.eval.finetune", "--model", hf, "--task", task, "--train", *given["train"],
                  "--test", *given["test"], "--epochs", tune["epochs"], "--lr", tune["lr"], *limit,
                  "--seeds", *tune["seeds"])  # fmt: skip
        numbers = read_results(file)[task][next(iter(texts["test"]))]
        names = {"zs": "ZS", "sup": "SUP", "delta": "Δ", "majority": "majority"}
        return {f"{task} {names[key]}": 100 * numbers[key] for key in names if key in numbers}

    def training(self, cell: Cell, started: float) -> dict[str, Any]:
        """Whether the loss fell, and the cost: steps, tokens, minutes since the cell was begun or resumed, minutes of
        training, and the commit."""
        metrics = self.out / "runs" / cell.path / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        tenth = max(len(lines) // 10, 1)
        first, last = (sum(line["loss"] for line in part) for part in (lines[:tenth], lines[-tenth:]))
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        cost = {
            "steps": len(lines),
            "tokens": sum(line["tokens"] for line in lines),
            "minutes": round((time.time() - started) / 60, 1),
            "training minutes": round(sum(line["step_s"] for line in lines) / 60, 1),
            "commit": commit.stdout.strip(),
        }
        return {"loss fell": last < first or not lines, "cost": cost}


class CommandError(Exception):
    """A public command failed with an exit code."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


def read_results(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def problems(done: list[dict[str, Any]]) -> list[str]:
    """The signs in finished cells that cells of this scale do not learn; [] if there are none."""
    found = []
    for one in done:
        name, scores = "/".join(map(str, one["cell"].values())), one["scores"]
        if not converged(one):
            found.append(f"{name}: TLM loss {scores.get('TLM loss')} is not below the unigram entropy, or did not fall")
        for task in ("pos", "ner"):
            if scores.get(f"{task} SUP", math.inf) < scores.get(f"{task} majority", 0) + 5:
                found.append(f"{name}: {task} SUP {scores[f'{task} SUP']:.1f} is the majority class")
    of_arm = {one["cell"]["arm"]: one["scores"].get("aligned all", 0) for one in done}
    if {"mlm", "align_mlm"} <= of_arm.keys() and of_arm["align_mlm"] <= of_arm["mlm"]:
        found.append(f"ALIGN-MLM aligns {of_arm['align_mlm']:.1f} % of the words, MLM {of_arm['mlm']:.1f}")
    return found


def read_settings(given: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    """The values of --set. Raises UserError."""
    found = {}
    for one in given:
        key, equals, text = one.partition("=")
        if not equals or key not in fields:
            raise UserError(f"--set {one}: needs the form KEY=VALUE, KEY one of {', '.join(fields)}")
        found[key] = read_yaml(text)
        if isinstance(found[key], str) != isinstance(fields[key], str):
            raise UserError(f"--set {one}: {key} needs a value such as {fields[key]}")
    return found


def run_grid(grid: Grid) -> None:
    done: list[dict[str, Any]] = []
    for number, cell in enumerate(grid.cells, start=1):
        print(f"cell {number} of {len(grid.cells)}: {cell.path}", flush=True)
        done.append(grid.finish(cell))
        write_tables(grid.out, grid.grid, grid.scale, done)
        if number == 2 and grid.scale["learns"] and (found := problems(done)):
            raise UserError("cells of this size do not learn; take more steps: " + "; ".join(found))
    draw_pictures(grid.out, grid.grid, done)
    print((grid.out / "table.md").read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", required=True, metavar="NAME|FILE", help=f"{', '.join(GRIDS)}, or a file")
    parser.add_argument("--scale", required=True, choices=("smoke", "cpu", "h100", "paper"))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with parallel/, mono/, lexicon/ and eval/")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORLD/ARM", help="run these cells alone")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="fields of the scale, such as steps=600"
    )
    try:
        run_grid(Grid(parser.parse_args(argv)))
    except (UserError, CommandError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
