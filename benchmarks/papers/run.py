"""Run a grid of a paper's experiments, and write its table and pictures.

    python benchmarks/papers/run.py --grid tang --scale cpu --data SHARED_DATA --out DIR

A grid names worlds (the data), arms (the recipes), the cells, and the arms that are compared; scales.yaml has the sizes
of each scale. A cell is one world, one arm and one seed: public commands train, export, measure and fine-tune it. A
grid that was killed can be started again: it does not repeat finished work, and its table is the same. Several
processes may run cells (--only) of different worlds, and a last call without --only writes the table of all cells.
docs/benchmarks.md describes the grids, and what is written.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml
from tables import Done, converged_scores, draw_alignment, draw_words, write_tables
from worlds import make_data, make_world

from xscale import files
from xscale.errors import UserError
from xscale.recipe import RECIPES, set_field
from xscale.strict_yaml import parse_yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GRIDS = ("tang", "sizes", "methods", "controls", "mixtures", "public", "rates")
NOT_FINITE = 3
"""The exit code of a training whose loss is not finite."""
MAY_GROW = ("seeds", "cells")
"""The settings of a scale that may differ between the cells of a folder."""
Scores = dict[str, float]


class Cell(NamedTuple):
    world: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.world}/{self.arm}"

    @property
    def path(self) -> str:
        return folder_name(f"{self.name}.{self.seed}")


def folder_name(name: str) -> str:
    return name.replace(" ", "_").replace("%", "percent")


class Grid:
    """A grid's cells at a scale, and the folder for their results."""

    def __init__(self, args: argparse.Namespace):
        self.out: Path = args.out.resolve()
        path = HERE / f"{args.grid}.yaml" if args.grid in GRIDS else Path(args.grid)
        if not path.is_file():
            raise UserError(f"--grid {args.grid}: there is no such file. Use a YAML file, or one of {', '.join(GRIDS)}")
        self.grid: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        scales = yaml.safe_load((HERE / "scales.yaml").read_text(encoding="utf-8"))
        self.scale: dict[str, Any] = scales[args.scale] | self.grid.get("scales", {}).get(args.scale, {})
        self.scale |= read_settings(args.set, self.scale.keys() | scales["smoke"].keys())
        self.starts_from_encoder = any("aer" in world for world in self.grid["worlds"].values())
        """True if all arms start from the model of --encoder."""
        self.encoder: Path | None = args.encoder if self.starts_from_encoder else None
        if self.starts_from_encoder and self.encoder is None:
            raise UserError(f"--grid {args.grid} needs a public encoder. Write --encoder HF_DIR, its directory")
        if args.data is None and args.scale != "smoke":
            raise UserError(f"--scale {args.scale} needs data. Write --data DIR, a folder with parallel/ and eval/")
        self.data: Path = make_data(self.out / "made") if args.scale == "smoke" else args.data.resolve()
        self.cells = self.chosen_cells(args.only)[: self.scale.get("cells")]
        self.check_settings({"grid": args.grid} | self.scale)

    def chosen_cells(self, names: list[str]) -> list[Cell]:
        """Return the cells of these names WORLD/ARM, or all. Raises UserError."""
        cells: list[Cell] = []
        for seed, part in product(self.scale["seeds"], self.grid["cells"]):
            for world, arm in product(part["worlds"], part["arms"]):
                cells.append(Cell(world, arm, seed))
        known = dict.fromkeys(cell.name for cell in cells)
        for name in names:
            if name not in known:
                raise UserError(f"--only {name}: the grid does not have this cell. Its cells are {', '.join(known)}")
        return [cell for cell in cells if not names or cell.name in names]

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raise UserError if the folder has cells with other settings."""
        path = self.out / "settings.json"
        kept = {key: value for key, value in settings.items() if key not in MAY_GROW}
        if path.exists() and json.loads(path.read_text(encoding="utf-8")) != kept:
            remedy = "Choose another --out, or the same --grid, --scale and --set as before"
            raise UserError(f"{path}: this folder has results with other settings. {remedy}")
        files.write_text(path, json.dumps(kept))

    def run(self, *words: object) -> None:
        """Run `python WORDS`, and append its output to commands.log. Raises CalledProcessError."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        line = " ".join(map(str, words))
        print(f"$ {line[:200]}", flush=True)
        with (self.out / "commands.log").open("a", encoding="utf-8") as log:
            print(f"\n$ {line}", file=log, flush=True)
            command = [sys.executable, *map(str, words)]
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)

    def results(self, cell: Cell, part: str, *words: object) -> dict[str, dict[str, Scores]]:
        """Run a command that writes parts/CELL.PART.json, unless the file exists. Returns {task: {row: scores}}."""
        path = self.out / f"parts/{cell.path}.{folder_name(part)}.json"
        if not path.exists():
            partial = path.with_suffix(".partial.json")  # an evaluation writes its file after each task
            self.run("-m", *words, "--out", partial)
            partial.rename(path)
        return json.loads(path.read_text(encoding="utf-8"))["results"]

    def world(self, name: str) -> Path:
        folder = self.out / "worlds" / folder_name(name)
        make_world(self.grid["worlds"][name], self.scale, self.data, folder, self.run)
        return folder

    def recipe(self, arm: dict[str, Any], steps: int, world: Path, init: Path | None) -> dict[str, Any]:
        """Return the arm's shipped recipe with fields of the scale, the grid and the arm, without null streams.
        The samples of the arm's `short` streams are shorter than max_length, so fewer of them go with a smaller one."""
        recipe = yaml.safe_load((RECIPES / f"{arm['recipe']}.yaml").read_text(encoding="utf-8"))
        length_ratio = self.scale["max_length"] / recipe.get("data", {}).get("max_length", 128)
        fields: dict[str, Any] = {
            "data.lexicon_heldout": 0.0,
            "data.alpha": 1.0,
            "train.steps": steps,
            "train.warmup": 0.1,
            "train.measure_every": 0,
            "checkpoint.every": max(steps // 5, 1),
            "checkpoint.keep": 2,
        }
        if not self.starts_from_encoder:  # which has a tokenizer, and for which the recipes adapt/* have learning rates
            fields |= {
                "model.preset": self.scale["preset"],
                "model.tokenizer": str(world / "tokenizer"),
                "data.max_length": self.scale["max_length"],
                "data.lexicons": [str(path) for path in sorted((world / "lexicon").glob("*.txt"))],
                "train.lr": self.scale["lr"],
            }
        fields |= {"model.init": str(init)} if init else {}
        fields |= self.grid.get("fields", {})
        fields |= {key: value for key, value in arm.items() if "." in key}
        recipe.get("train", {}).pop("epochs", None)  # the scale says how many steps a cell has
        for key, value in fields.items():
            set_field(recipe, key, value)
        recipe["streams"] = {name: stream for name, stream in recipe["streams"].items() if stream}
        for name, stream in recipe["streams"].items():
            factor = self.scale["samples"] * (length_ratio if name in arm.get("short", []) else 1)
            stream["samples"] = max(round(stream["samples"] * factor), 1)
        return recipe

    def train(self, cell: Cell, arm: dict[str, Any], steps: int, init: Path | None) -> Path:
        """Train a cell and export it, unless the export exists. Returns the export's folder."""
        export = self.out / "hf" / cell.path
        if export.exists():
            return export
        run = self.out / "runs" / cell.path
        world = self.world(cell.world)
        file = self.out / "recipes" / f"{cell.path}.yaml"
        files.write_text(file, yaml.safe_dump(self.recipe(arm, steps, world, init), sort_keys=False))
        data: list[Path] = []
        for kind in arm.get("reads", ["mono" if (world / "shards/mono").exists() else "sides"]):
            data += sorted((world / "shards" / kind).iterdir())
        self.run(ROOT / "xscale/train.py", "--ds_config", ROOT / "ds_configs" / self.scale["ds_config"],
                 "--recipe", file, "--data", *data, "--out", run, "--seed", cell.seed)  # fmt: skip
        self.run("-m", "xscale.export", run, export)
        return export

    def finish(self, cell: Cell) -> Done:
        """Train and measure a cell, unless that is done. Returns its scores and its cost."""
        path = self.out / "scores" / f"{cell.path}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        arm = self.grid["arms"][cell.arm]
        model = self.encoder
        if "pretrain" in self.grid:
            first = Cell(cell.world, "pretrained", 0)
            model = self.train(first, self.grid["pretrain"], self.scale["pretrain"], None)
        scores: Scores = {}
        problem = ""
        try:
            if arm:
                model = self.train(cell, arm, self.scale["steps"], model)
            scores = self.measure(cell, model)
        except subprocess.CalledProcessError as error:
            if error.returncode != NOT_FINITE:
                raise
            problem = "the loss was not finite"
        predicts = (arm or {}).get("predicts", self.grid.get("predicts", True))
        done = {"cell": cell._asdict(), "scores": scores, "problem": problem, "predicts": predicts}
        done |= training_summary(self.out / "runs" / cell.path / "metrics.jsonl")
        files.write_text(path, json.dumps(done, indent=1))
        return done

    def measure(self, cell: Cell, model: Path | None) -> Scores:
        """Measure an export. Returns scores by name: losses in nats, all others in per cent."""
        measured = self.measure_links if self.starts_from_encoder else self.measure_words
        scores = measured(cell, self.world(cell.world), ("xscale.eval.run", "--model", model, "--task"))
        tasks = json.loads((self.world(cell.world) / "tasks.json").read_text(encoding="utf-8"))
        for kind in ("probe", "tune"):
            settings = self.scale.get(kind) or {"tasks": []}
            for task in settings.get("tasks", tasks):
                scores |= self.tune(cell, task, tasks[task], model, kind)
        return scores

    def measure_words(self, cell: Cell, world: Path, evaluate: tuple[object, ...]) -> Scores:
        """Measure an export in a world with one pair of languages and a dictionary. evaluate: the first words of the
        command."""
        (heldout,) = (world / "heldout").iterdir()
        data = ["--data", heldout, *sorted((world / "shards").glob("[!p]*/*"))]  # no pairs
        sentences = ["retrieval", "heldout", "--pooling", "mean", "cls", "--layer", "all", "--limit", 3000]
        scores: Scores = {}
        for kind, further_tasks in (("withheld", sentences), ("all", [])):
            dictionary = world / kind / f"{heldout.name}.txt"
            tasks = ["alignment"] if dictionary.stat().st_size else []  # training may have all words
            words = [*tasks, *further_tasks, *data, "--lexicons", dictionary]
            results = self.results(cell, kind, *evaluate, *words)
            for row in results.get("alignment", {}).values():
                scores[f"aligned {kind}"] = 100 * aligned_share(row, heldout.name.replace("-", "->", 1))
            for name, row in results.get("retrieval", {}).items():
                pooling = "retrieval mean" if "mean" in name.split() else "retrieval cls"
                scores[pooling] = max(scores.get(pooling, 0.0), 100 * row["accuracy"])
            for row in results.get("heldout", {}).values():
                scores |= {"TLM loss": row["tlm_loss"], "unigram entropy": row["unigram_entropy"]}
        return scores

    def measure_links(self, cell: Cell, world: Path, evaluate: tuple[object, ...]) -> Scores:
        """Measure an export in a world of several pairs. AER and F1 are those of the layer with the best AER."""
        spec = self.grid["worlds"][cell.world]
        pairs = self.scale.get("aer", [*spec["aer"]])
        links: list[object] = []
        for pair in pairs:
            links += ["--aer", pair, *(self.data / name for name in spec["aer"][pair])]
        heldout = sorted((world / "heldout").iterdir())
        results = self.results(cell, "words", *evaluate, "aer", "heldout", "--data", *heldout, *links)
        scores: Scores = {}
        for pair in pairs:
            layers = [row for name, row in results["aer"].items() if name.startswith(f"{pair} argmax")]
            best = min(layers, key=lambda row: row["AER"])
            scores |= {f"AER {pair}": 100 * best["AER"], f"AER {pair}, last layer": 100 * layers[-1]["AER"]}
            scores[f"F1 {pair}"] = 100 * best["F1"]
        scores["TLM loss"] = mean(row["tlm_loss"] for row in results["heldout"].values())
        texts = ("--texts", self.data / spec["retrieval"], "--pooling", "mean", "--limit", self.scale["tests"])
        results = self.results(cell, "sentences", *evaluate, "retrieval", *texts)
        scores["retrieval"] = 100 * mean(row["accuracy"] for row in results["retrieval"].values())
        return scores

    def tune(self, cell: Cell, task: str, parts: dict[str, dict[str, str]], model: Path | None, kind: str) -> Scores:
        """Fine-tune an export (kind tune), or train a linear layer on its states (probe). Returns zero-shot and
        supervised scores, their difference, and the majority class's."""
        settings = {"test_limit": self.scale[kind]["limit"]} | self.scale[kind]
        words: list[object] = ["--model", model, "--task", task, "--seeds", *settings["seeds"]]
        for option in ("epochs", "lr", "limit", "test_limit", "batch"):
            if settings.get(option):
                words += [f"--{option}", settings[option]]
        for part, texts in parts.items():
            words += [f"--{part}", *(f"{lang}={self.world(cell.world) / file}" for lang, file in texts.items())]
        name = task
        if kind == "probe":
            words.append("--frozen")
            name = f"{task} probe"
        rows = self.results(cell, name, "xscale.eval.finetune", *words)[task]
        if len(parts["test"]) > 1:
            return {f"{name} {lang}": 100 * rows[lang]["zs"] for lang in parts["test"]}
        row = rows[next(iter(parts["test"]))]
        shown = {"zs": "ZS", "sup": "SUP", "delta": "Δ", "majority": "majority"}
        return {f"{name} {shown[key]}": 100 * row[key] for key in shown if key in row}

    def draw_pictures(self, done: list[Done]) -> None:
        """Draw alignment.png, and words.png of the first two trained arms of the first world."""
        draw_alignment(self.out / "alignment.png", converged_scores(done))
        world = done[0]["cell"]["world"]
        exports: dict[str, Path] = {}
        for finished in done:
            cell = Cell(**finished["cell"])
            export = self.out / "hf" / cell.path
            if cell.world == world and export.exists():
                exports.setdefault(f"{cell.arm}, {world}", export)
        if exports:
            draw_words(self.out / "words.png", self.world(world), dict([*exports.items()][:2]))


def aligned_share(row: Scores, direction: str) -> float:
    """Return the share of a dictionary's words that are aligned. row: scores of the task alignment. In a grid, the
    words count as trained if an objective of the model read a dictionary, and as not trained otherwise."""
    return row.get(f"{direction} trained", row.get(direction, math.nan))


def training_summary(metrics: Path) -> dict[str, Any]:
    """Return whether the loss fell, and the cost of a training: steps, tokens, minutes."""
    steps: list[dict[str, Any]] = []
    if metrics.exists():
        steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    losses = [step["loss"] for step in steps]
    tenth = max(len(steps) // 10, 1)
    minutes = round(sum(step["step_s"] for step in steps) / 60, 1)
    cost = {"steps": len(steps), "tokens": sum(step["tokens"] for step in steps), "training minutes": minutes}
    return {"loss fell": not steps or sum(losses[-tenth:]) < sum(losses[:tenth]), "cost": cost}


def read_settings(words: list[str], keys: set[str]) -> dict[str, Any]:
    """Return the values of --set. Raises UserError."""
    settings = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in keys:
            raise UserError(f"--set {word}: the form must be KEY=VALUE. KEY is one of {', '.join(sorted(keys))}")
        settings[key] = parse_yaml(text)
    return settings


def run_grid(grid: Grid) -> None:
    done: list[Done] = []
    for number, cell in enumerate(grid.cells, start=1):
        print(f"cell {number} of {len(grid.cells)}: {cell.path}", flush=True)
        done.append(grid.finish(cell))
        write_tables(grid.out, grid.grid, grid.scale, done)
    if not grid.starts_from_encoder:  # whose world has neither dictionary nor tokenizer
        grid.draw_pictures(done)
    print((grid.out / "table.md").read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--grid", required=True, metavar="NAME|FILE", help=f"the experiments: {', '.join(GRIDS)}, or a YAML file")
    add("--scale", required=True, choices=("smoke", "cpu", "h100", "paper"), help="smoke generates its data")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    add("--data", type=Path, metavar="DIR", help="folder with parallel/, mono/, lexicon/ and eval/")
    add(
        "--encoder",
        type=Path,
        metavar="HF_DIR",
        help="for the grids public and rates, the encoder from which training starts",
    )
    add("--only", nargs="+", action="extend", default=[], metavar="WORLD/ARM", help="run only these cells")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change fields of the scale, such as steps=600",
    )
    args = parser.parse_args(argv)
    try:
        run_grid(Grid(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        output = args.out / "commands.log"
        print(f"error: {error.cmd} ended with exit code {error.returncode}. Its output is in {output}", file=sys.stderr)
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
