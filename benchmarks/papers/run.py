"""Run a grid of a paper's experiments, and write its table and pictures.

    python benchmarks/papers/run.py --grid tang --scale cpu --data SHARED_DATA --out DIR

A grid (tang, sizes, methods, mixtures, public, or a YAML file of yours) names worlds (the data), arms (the recipes),
the cells, and the arms that are compared; scales.yaml has the sizes of each scale. A cell is one world, one arm and one
seed: public commands train, export, measure and fine-tune it. A grid that was killed can be started again: it does not
repeat finished work, and its table is the same.

DIR/table.md has means and deviations over seeds and the tests of the comparisons, DIR/cells.md has each cell's cost,
DIR/alignment.png shows alignment scores and the loss in transfer, DIR/words.png translated words by t-SNE. Scale smoke
generates its data. The grid public starts from a public encoder, the Hugging Face directory --encoder.
`--only WORLD/ARM ...` runs only these cells; several processes may run cells of different worlds, and a last call
without --only writes the table of all cells.
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
from made import make_data, make_encoder
from pictures import draw_alignment, draw_words
from tables import Done, converged_scores, write_tables
from worlds import make_world

from xscale import files
from xscale.errors import UserError
from xscale.recipe import RECIPES, set_field
from xscale.strict_yaml import read_yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GRIDS = ("tang", "sizes", "methods", "mixtures", "public")
NOT_FINITE = 3
"""The exit code of a training whose loss is not finite."""
MAY_GROW = ("seeds", "cells")
"""The settings of a scale that may differ between the cells of a folder."""
PICTURED_ARMS = ("mlm", "align_mlm")
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


class CommandError(Exception):
    """A public command failed with an exit code."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class Grid:
    """A grid's cells at a scale, and the folder for their results."""

    def __init__(self, args: argparse.Namespace):
        self.out: Path = args.out.resolve()
        self.grid = read_grid(args.grid)
        scales = yaml.safe_load((HERE / "scales.yaml").read_text(encoding="utf-8"))
        self.scale: dict[str, Any] = scales[args.scale] | self.grid.get("scales", {}).get(args.scale, {})
        self.scale |= read_settings(args.set, self.scale.keys() | scales["smoke"].keys())
        self.encoder: Path | None = args.encoder if self.starts_from_encoder else None
        if args.scale == "smoke":
            self.data = make_data(self.out / "made")
            if self.starts_from_encoder:
                self.encoder = make_encoder(self.out / "encoder", self.data)
        elif args.data:
            self.data = args.data.resolve()
        else:
            raise UserError(
                f"--scale {args.scale} needs data. Write --data DIR, a folder with parallel/, mono/, lexicon/ and eval/"
            )
        if self.starts_from_encoder and self.encoder is None:
            raise UserError(
                f"--grid {args.grid} needs a public encoder. Write --encoder HF_DIR, a Hugging Face directory"
            )
        self.cells = self.chosen_cells(args.only)[: self.scale.get("cells")]
        self.check_settings({"grid": args.grid} | self.scale)

    @property
    def starts_from_encoder(self) -> bool:
        """Whether all arms go on from --encoder."""
        return any("aer" in world for world in self.grid["worlds"].values())

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
        older = kept | {"ranks": 1}  # older versions had this setting, and 1 was its default
        if path.exists() and json.loads(path.read_text(encoding="utf-8")) not in (kept, older):
            raise UserError(
                f"{path}: this folder has results with other settings. Choose another --out, or the same --grid, "
                "--scale and --set as before"
            )
        files.write_text(path, json.dumps(kept))

    def run(self, *words: object) -> None:
        """Run `python WORDS`, and append its output to commands.log. Raises CommandError."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
        log = self.out / "commands.log"
        line = " ".join(map(str, words))
        print(f"$ {line[:200]}", flush=True)
        with log.open("a", encoding="utf-8") as file:
            print(f"\n$ {line}", file=file, flush=True)
            command = [sys.executable, *map(str, words)]
            code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file).returncode
        if code:
            raise CommandError(code, f"the command `{line[:200]}` ended with exit code {code}. Its output is in {log}")

    def results(self, cell: Cell, part: str, *words: object) -> dict[str, dict[str, Scores]]:
        """Run a command that writes parts/CELL.PART.json, unless the file exists. Returns {task: {row: scores}}."""
        path = self.out / f"parts/{cell.path}.{folder_name(part)}.json"
        if not path.exists():
            partial = path.with_suffix(".partial.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.run(*words, "--out", partial)
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
        for key, value in fields.items():
            set_field(recipe, key, value)
        recipe["streams"] = {name: stream for name, stream in recipe["streams"].items() if stream}
        for name, stream in recipe["streams"].items():
            factor = self.scale["samples"] * (length_ratio if name in arm.get("short", []) else 1)
            stream["samples"] = max(round(stream["samples"] * factor), 1)
        return recipe

    def train(self, cell: Cell, arm: dict[str, Any], steps: int, init: Path | None) -> Path:
        """Train a cell and export it, unless the export exists. Returns the export's folder."""
        hf = self.out / "hf" / cell.path
        run = self.out / "runs" / cell.path
        world = self.world(cell.world)
        if (hf / "config.json").exists():
            return hf
        file = self.out / "recipes" / f"{cell.path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(self.recipe(arm, steps, world, init), sort_keys=False), encoding="utf-8")
        data: list[Path] = []
        for kind in arm.get("reads", ["mono" if (world / "shards/mono").exists() else "sides"]):
            data += sorted((world / "shards" / kind).iterdir())
        self.run(ROOT / "xscale/train.py", "--ds_config", ROOT / "ds_configs" / self.scale["ds_config"],
                 "--recipe", file, "--data", *data, "--out", run, "--seed", cell.seed)  # fmt: skip
        self.run("-m", "xscale.export", run, hf)
        return hf

    def finish(self, cell: Cell) -> Done:
        """Train and measure a cell, unless that is done. Returns its scores and its cost."""
        path = self.out / "scores" / f"{cell.path}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        arm = self.grid["arms"][cell.arm]
        init = self.encoder
        if "pretrain" in self.grid:
            init = self.train(Cell(cell.world, "pretrained", 0), self.grid["pretrain"], self.scale["pretrain"], None)
        scores: Scores = {}
        problem = ""
        try:
            hf = self.train(cell, arm, self.scale["steps"], init) if arm else init
            assert hf is not None
            scores = self.measure(cell, hf)
        except CommandError as error:
            if error.code != NOT_FINITE:
                raise
            problem = str(error)
        predicts = (arm or {}).get("predicts", self.grid.get("predicts", True))
        done = {"cell": cell._asdict(), "scores": scores, "problem": problem, "predicts": predicts}
        done |= training_summary(self.out / "runs" / cell.path / "metrics.jsonl")
        files.write_text(path, json.dumps(done, indent=1))
        return done

    def measure(self, cell: Cell, hf: Path) -> Scores:
        """Measure an export. Returns scores by name: losses in nats, all others in per cent."""
        world = self.world(cell.world)
        scores = self.measure_links(cell, hf) if self.starts_from_encoder else self.measure_words(cell, hf)
        file = world / "tasks.json"
        tasks = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for kind in ("probe", "tune"):
            settings = self.scale.get(kind) or {"tasks": []}
            for task in settings.get("tasks", tasks):
                scores |= self.tune(cell, task, tasks[task], hf, kind)
        return scores

    def measure_words(self, cell: Cell, hf: Path) -> Scores:
        """Measure an export in a world with one pair of languages and a dictionary."""
        world = self.world(cell.world)
        (heldout,) = (world / "heldout").iterdir()
        pair = heldout.name
        texts = [*sorted((world / "shards").glob("mono/*")), *sorted((world / "shards").glob("sides/*"))]
        evaluate = ("-m", "xscale.eval.run", "--model", hf, "--data", heldout, *texts)
        sentences = ("retrieval", "heldout", "--pooling", "mean", "cls", "--layer", "all", "--limit", 3000)
        scores: Scores = {}
        for kind, more in (("withheld", sentences), ("all", ())):
            dictionary = world / kind / f"{pair}.txt"
            tasks = ["alignment"] if dictionary.stat().st_size else []  # training may have all words
            results = self.results(cell, kind, *evaluate, "--lexicons", dictionary, "--task", *tasks, *more)
            for row in results.get("alignment", {}).values():
                scores[f"aligned {kind}"] = 100 * row.get(pair.replace("-", "->", 1) + " trained", math.nan)
            for pooling in ("mean", "cls") if more else ():
                rows = [row for name, row in results["retrieval"].items() if pooling in name.split()]
                scores[f"retrieval {pooling}"] = 100 * max(row["accuracy"] for row in rows)
            for row in results.get("heldout", {}).values():
                scores |= {"TLM loss": row["tlm_loss"], "unigram entropy": row["unigram_entropy"]}
        return scores

    def measure_links(self, cell: Cell, hf: Path) -> Scores:
        """Measure an export in a world of several pairs. AER and F1 are those of the layer with the best AER."""
        spec = self.grid["worlds"][cell.world]
        evaluate = ("-m", "xscale.eval.run", "--model", hf, "--task")
        pairs = self.scale.get("aer", [*spec["aer"]])
        links: list[object] = []
        for pair in pairs:
            links += ["--aer", pair, *(self.data / name for name in spec["aer"][pair])]
        heldout = sorted((self.world(cell.world) / "heldout").iterdir())
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

    def tune(self, cell: Cell, task: str, parts: dict[str, dict[str, str]], hf: Path, kind: str) -> Scores:
        """Fine-tune an export (kind tune), or train a linear layer on its states (probe). Returns zero-shot and
        supervised scores, their difference, and the majority class's."""
        settings = self.scale[kind]
        words: list[object] = ["--model", hf, "--task", task, "--epochs", settings["epochs"], "--lr", settings["lr"]]
        words += ["--seeds", *settings["seeds"]]
        for part, texts in parts.items():
            words += [f"--{part}", *(f"{lang}={self.world(cell.world) / file}" for lang, file in texts.items())]
        if settings["limit"]:
            words += ["--limit", settings["limit"], "--test_limit", settings.get("test_limit", settings["limit"])]
        if "batch" in settings:
            words += ["--batch", settings["batch"]]
        name = task
        if kind == "probe":
            words.append("--frozen")
            name = f"{task} probe"
        rows = self.results(cell, name, "-m", "xscale.eval.finetune", *words)[task]
        if len(parts["test"]) > 1:
            return {f"{name} {lang}": 100 * rows[lang]["zs"] for lang in parts["test"]}
        row = rows[next(iter(parts["test"]))]
        shown = {"zs": "ZS", "sup": "SUP", "delta": "Δ", "majority": "majority"}
        return {f"{name} {shown[key]}": 100 * row[key] for key in shown if key in row}

    def draw_pictures(self, done: list[Done]) -> None:
        """Draw alignment.png, and words.png of two arms of the first world: mlm and align_mlm, or else the first."""
        draw_alignment(self.out / "alignment.png", converged_scores(done))
        world = done[0]["cell"]["world"]
        exports: dict[str, Path] = {}
        for finished in done:
            cell = Cell(**finished["cell"])
            if cell.world == world and not finished["problem"] and self.grid["arms"][cell.arm]:
                exports.setdefault(cell.arm, self.out / "hf" / cell.path)
        arms = [arm for arm in PICTURED_ARMS if arm in exports] or [*exports][:2]
        if arms:
            titles = {f"{arm}, {world}": exports[arm] for arm in arms}
            draw_words(self.out / "words.png", self.world(world), titles)


def training_summary(metrics: Path) -> dict[str, Any]:
    """Return whether the loss fell, and the cost of a training: steps, tokens, minutes."""
    steps: list[dict[str, Any]] = []
    if metrics.exists():
        steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    tenth = max(len(steps) // 10, 1)
    first = sum(step["loss"] for step in steps[:tenth])
    last = sum(step["loss"] for step in steps[-tenth:])
    minutes = round(sum(step["step_s"] for step in steps) / 60, 1)
    cost = {"steps": len(steps), "tokens": sum(step["tokens"] for step in steps), "training minutes": minutes}
    return {"loss fell": last < first or not steps, "cost": cost}


def read_grid(name: str) -> dict[str, Any]:
    """Read a grid of this folder or a file. Raises UserError."""
    path = HERE / f"{name}.yaml" if name in GRIDS else Path(name)
    if not path.is_file():
        raise UserError(f"--grid {name}: there is no such file. Use a YAML file, or one of {', '.join(GRIDS)}")
    grid: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for world, spec in grid["worlds"].items():
        if "langs" in spec or isinstance(spec.get("pairs"), str):
            remedy = "Write `pairs: {en-de: STEM}`, `tasks` and the other keys as in benchmarks/papers/methods.yaml"
            raise UserError(
                f"{path}: world {world} has `langs`, or a text as the value of `pairs`, which only older versions "
                f"read. {remedy}"
            )
    for arm in filter(None, grid["arms"].values()):
        if not (RECIPES / f"{arm['recipe']}.yaml").exists():
            raise UserError(f"{path}: recipe {arm['recipe']} does not exist. Use a recipe in {RECIPES}")
    return grid


def read_settings(words: list[str], keys: set[str]) -> dict[str, Any]:
    """Return the values of --set. Raises UserError."""
    settings = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in keys:
            raise UserError(f"--set {word}: the form must be KEY=VALUE. KEY is one of {', '.join(sorted(keys))}")
        settings[key] = read_yaml(text)
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
    add("--scale", required=True, choices=("smoke", "cpu", "h100", "paper"))
    add("--out", type=Path, required=True, metavar="DIR")
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with parallel/, mono/, lexicon/ and eval/; scale smoke generates it",
    )
    add("--encoder", type=Path, metavar="HF_DIR", help="for grid public, the encoder from which training starts")
    add("--only", nargs="+", default=[], metavar="WORLD/ARM", help="run only these cells")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="change fields of the scale in scales.yaml, such as steps=600",
    )
    try:
        run_grid(Grid(parser.parse_args(argv)))
    except (UserError, CommandError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
