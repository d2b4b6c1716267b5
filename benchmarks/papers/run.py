"""Run a grid of a paper's experiments, and write its table and pictures.

    python benchmarks/papers/run.py --grid tang --scale cpu --data SHARED_DATA --out DIR

A grid (tang, sizes, methods, mixtures, public, or a YAML file of yours) names worlds (the data), arms (the recipes),
the cells, and the arms that are compared; scales.yaml has the sizes of each scale. A cell is one world, one arm and one
seed: public commands train, export, measure and fine-tune it. A grid that was killed can be started again: it does not
repeat finished work, and its table is the same. The script stops if one of the first two cells does not learn (not at
smoke).

DIR/table.md has means and deviations over seeds and the tests of the comparisons, DIR/cells.md has each cell's cost,
DIR/alignment.png shows alignment scores and the loss in transfer, DIR/words.png translated words by t-SNE. Scale smoke
makes its own data. The grid public goes on from a public encoder, the Hugging Face directory --encoder.
`--only WORLD/ARM ...` runs only these cells; several processes may run cells of different worlds, and a last call
without --only writes the table of all cells.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from made import make_data, make_encoder
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
        self.grid = read_grid(args.grid)
        scales = yaml.safe_load((HERE / "scales.yaml").read_text(encoding="utf-8"))
        self.scale: dict[str, Any] = scales[args.scale] | self.grid.get("scales", {}).get(args.scale, {})
        self.scale |= read_settings(args.set, self.scale | scales["smoke"] | scales["h100"])
        if args.scale == "smoke":
            self.data = make_data(self.out / "made")
        elif args.data:
            self.data = args.data.resolve()
        else:
            raise UserError(f"--scale {args.scale} needs --data, the folder with parallel/, mono/, lexicon/ and eval/")
        self.encoder: Path | None = args.encoder
        """The encoder from which all arms of a grid go on whose worlds have several pairs."""
        if self.starts_from_encoder and args.scale == "smoke":
            self.encoder = make_encoder(self.out / "encoder", self.data)
        if self.starts_from_encoder and self.encoder is None:
            raise UserError(f"--grid {args.grid} needs --encoder, the Hugging Face directory of a public encoder")
        cells = self.all_cells()
        names = dict.fromkeys(f"{cell.world}/{cell.arm}" for cell in cells)
        for name in args.only:
            if name not in names:
                raise UserError(f"--only {name}: there is no such cell; the grid has {', '.join(names)}")
        chosen = args.only or names
        self.cells = [cell for cell in cells if f"{cell.world}/{cell.arm}" in chosen][: self.scale.get("cells")]
        self.check_settings({"grid": args.grid} | self.scale)

    @property
    def starts_from_encoder(self) -> bool:
        return any("aer" in world for world in self.grid["worlds"].values())

    def all_cells(self) -> list[Cell]:
        cells = []
        for seed, part in product(self.scale["seeds"], self.grid["cells"]):
            for world, arm in product(part["worlds"], part["arms"]):
                cells.append(Cell(world, arm, seed))
        return cells

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
        """Return the arm's shipped recipe with fields of the scale, the grid and the arm, without null streams.
        The samples of the arm's `short` streams are shorter than max_length, so fewer of them go with a smaller one."""
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
        if self.starts_from_encoder:  # whose tokenizer and learning rates are those of the recipes adapt/*
            for name in ("model.preset", "model.tokenizer", "train.lr", "data.max_length", "data.lexicons"):
                del fields[name]
            init = self.encoder
        fields |= {"model.init": str(init)} if init else {}
        fields |= self.grid.get("fields", {})
        fields |= {key: value for key, value in arm.items() if "." in key}
        for key, value in fields.items():
            *parts, last = key.split(".")
            section = recipe
            for part in parts:
                section = section.setdefault(part, {})
            section[last] = value
        recipe["streams"] = {name: stream for name, stream in recipe["streams"].items() if stream}
        for name, stream in recipe["streams"].items():
            factor = self.scale["samples"]
            if name in arm.get("short", []):
                factor *= length_ratio
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
        started = time.time()
        arm = self.grid["arms"][cell.arm]
        init = self.encoder if self.starts_from_encoder else None
        if "pretrain" in self.grid:
            init = self.train(Cell(cell.world, "pretrained", 0), self.grid["pretrain"], self.scale["pretrain"], None)
        scores: dict[str, float] = {}
        problem = ""
        try:
            hf = self.train(cell, arm, self.scale["steps"], init) if arm else init
            assert hf is not None
            scores = self.measure_encoder(cell, hf) if self.starts_from_encoder else self.measure(cell, hf)
        except CommandError as error:
            if error.code != NOT_FINITE:
                raise
            problem = str(error)
        found = {"cell": cell._asdict(), "scores": scores, "problem": problem, **self.training(cell, started)}
        found["predicts"] = (arm or {}).get("predicts", self.grid.get("predicts", True))
        files.write_text(path, json.dumps(found, indent=1))
        return found

    def measure(self, cell: Cell, hf: Path) -> dict[str, float]:
        """Measure an export. Returns scores by name: losses in nats, all others in per cent."""
        world = self.world(cell.world)
        (heldout,) = (world / "heldout").iterdir()
        pair = heldout.name
        texts = [*sorted((world / "shards").glob("mono/*")), *sorted((world / "shards").glob("sides/*"))]
        evaluate = ("-m", "xscale.eval.run", "--model", hf, "--data", heldout, *texts, "--lexicon_heldout", 1)
        results = {}
        for kind in ("withheld", "all"):
            dictionary = world / kind / f"{pair}.txt"
            tasks = ["alignment"] if dictionary.stat().st_size else []  # training may have all words
            more: tuple[object, ...] = ()
            if kind == "withheld":
                tasks += ["retrieval", "heldout"]
                more = ("--pooling", "mean", "cls", "--layer", "all", "--limit", 3000)
            file = self.out / f"parts/{cell.path}.{kind}.json"
            self.once(file, *evaluate, "--lexicons", dictionary, "--task", *tasks, *more)
            results[kind] = read_results(file)
        scores: dict[str, float] = {}
        for pooling in ("mean", "cls"):
            rows = [row for name, row in results["withheld"]["retrieval"].items() if pooling in name.split()]
            scores[f"retrieval {pooling}"] = 100 * max(row["accuracy"] for row in rows)
        for kind, found in results.items():
            for row in found.get("alignment", {}).values():
                scores[f"aligned {kind}"] = 100 * row.get(pair.replace("-", "->", 1), math.nan)
        (text,) = results["withheld"]["heldout"].values()
        scores |= {"TLM loss": text["tlm_loss"], "unigram entropy": text["unigram_entropy"]}
        if (world / "tasks.json").exists():
            for task, parts in json.loads((world / "tasks.json").read_text(encoding="utf-8")).items():
                scores |= self.tune(cell, task, parts, hf)
        return scores

    def measure_encoder(self, cell: Cell, hf: Path) -> dict[str, float]:
        """Measure an export in a world of several pairs. Word links and F1 are of the layer with the best AER."""
        spec = self.grid["worlds"][cell.world]
        world = self.world(cell.world)
        evaluate = ("-m", "xscale.eval.run", "--model", hf, "--task")
        pairs = self.scale.get("aer", [*spec["aer"]])
        links: list[object] = []
        for pair in pairs:
            links += ["--aer", pair, *(self.data / name for name in spec["aer"][pair])]
        file = self.out / f"parts/{cell.path}.words.json"
        heldout = sorted((world / "heldout").iterdir())
        self.once(file, *evaluate, "aer", "heldout", "--data", *heldout, *links)
        results = read_results(file)
        scores: dict[str, float] = {}
        for pair in pairs:
            layers = [row for name, row in results["aer"].items() if name.startswith(f"{pair} argmax")]
            best = min(layers, key=lambda row: row["AER"])
            scores |= {f"AER {pair}": 100 * best["AER"], f"AER {pair}, last layer": 100 * layers[-1]["AER"]}
            scores[f"F1 {pair}"] = 100 * best["F1"]
        losses = [row["tlm_loss"] for row in results["heldout"].values()]
        scores["TLM loss"] = sum(losses) / len(losses)
        file = self.out / f"parts/{cell.path}.sentences.json"
        self.once(file, *evaluate, "retrieval", "--texts", self.data / spec["retrieval"], "--pooling", "mean",
                  "--limit", self.scale["tests"])  # fmt: skip
        found = [row["accuracy"] for row in read_results(file)["retrieval"].values()]
        scores["retrieval"] = 100 * sum(found) / len(found)
        tasks = json.loads((world / "tasks.json").read_text(encoding="utf-8"))
        for kind in ("probe", "tune"):
            for task in tasks if self.scale[kind] else ():
                if task in self.scale[kind].get("tasks", tasks):
                    scores |= self.tune(cell, task, tasks[task], hf, kind)
        return scores

    def tune(
        self, cell: Cell, task: str, parts: dict[str, dict[str, str]], hf: Path, kind: str = "tune"
    ) -> dict[str, float]:
        """Fine-tune an export (kind tune), or train a linear layer on its states (probe). Returns zero-shot and
        supervised scores, their difference, and the majority class's."""
        tune = self.scale[kind]
        words: list[object] = ["--model", hf, "--task", task, "--epochs", tune["epochs"], "--lr", tune["lr"]]
        words += ["--seeds", *tune["seeds"]]
        for part, texts in parts.items():
            words += [f"--{part}", *(f"{lang}={self.world(cell.world) / file}" for lang, file in texts.items())]
        if tune["limit"]:
            words += ["--limit", tune["limit"], "--test_limit", tune.get("test_limit", tune["limit"])]
        if "batch" in tune:
            words += ["--batch", tune["batch"]]
        if kind == "probe":
            words.append("--frozen")
            task_name = f"{task} probe"
        else:
            task_name = task
        file = self.out / f"parts/{cell.path}.{folder_name(task_name)}.json"
        self.once(file, "-m", "xscale.eval.finetune", *words)
        rows = read_results(file)[task]
        if len(parts["test"]) > 1:
            return {f"{task_name} {lang}": 100 * rows[lang]["zs"] for lang in parts["test"]}
        row = rows[next(iter(parts["test"]))]
        names = {"zs": "ZS", "sup": "SUP", "delta": "Δ", "majority": "majority"}
        return {f"{task_name} {name}": 100 * row[key] for key, name in names.items() if key in row}

    def training(self, cell: Cell, started: float) -> dict[str, Any]:
        """Return whether the loss fell, and the cost: steps, tokens, minutes since the cell was begun, minutes
        of training, and the commit."""
        metrics = self.out / "runs" / cell.path / "metrics.jsonl"
        steps: list[dict[str, Any]] = []
        if metrics.exists():
            steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        tenth = max(len(steps) // 10, 1)
        first = sum(step["loss"] for step in steps[:tenth])
        last = sum(step["loss"] for step in steps[-tenth:])
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        cost = {
            "steps": len(steps),
            "tokens": sum(step["tokens"] for step in steps),
            "minutes": round((time.time() - started) / 60, 1),
            "training minutes": round(sum(step["step_s"] for step in steps) / 60, 1),
            "commit": commit.stdout.strip(),
        }
        return {"loss fell": last < first or not steps, "cost": cost}


class CommandError(Exception):
    """A public command failed with an exit code."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


def read_grid(name: str) -> dict[str, Any]:
    """Read a grid of this folder or a file. Raises UserError."""
    path = HERE / f"{name}.yaml" if name in GRIDS else Path(name)
    if not path.is_file():
        raise UserError(f"--grid {name} is neither a file nor one of {', '.join(GRIDS)}")
    grid: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for arm in filter(None, [*grid["arms"].values(), grid.get("pretrain")]):
        if not (RECIPES / f"{arm['recipe']}.yaml").exists():
            raise UserError(f"{path}: recipe {arm['recipe']} does not exist; choose one of {RECIPES}")
    return grid


def read_settings(words: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the values of --set. Raises UserError."""
    settings = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in fields:
            raise UserError(f"--set {word}: needs the form KEY=VALUE, KEY one of {', '.join(fields)}")
        settings[key] = read_yaml(text)
        if isinstance(settings[key], str) != isinstance(fields[key], str):
            raise UserError(f"--set {word}: {key} needs a value such as {fields[key]}")
    return settings


def read_results(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def problems(cells: list[dict[str, Any]]) -> list[str]:
    """Return the signs in finished cells that cells of this scale do not learn, or []."""
    signs = []
    aligned = {}
    for finished in cells:
        name = "/".join(map(str, finished["cell"].values()))
        scores = finished["scores"]
        aligned[finished["cell"]["arm"]] = scores.get("aligned all", 0)
        if not converged(finished):
            signs.append(f"{name}: TLM loss {scores.get('TLM loss')} is not below the unigram entropy, or did not fall")
        for task in ("pos", "ner"):
            if scores.get(f"{task} SUP", math.inf) < scores.get(f"{task} majority", 0) + 5:
                signs.append(f"{name}: {task} SUP {scores[f'{task} SUP']:.1f} is the majority class")
    if aligned.get("align_mlm", math.inf) <= aligned.get("mlm", 0):
        signs.append(f"ALIGN-MLM aligns {aligned['align_mlm']:.1f} % of the words, MLM {aligned['mlm']:.1f}")
    return signs


def run_grid(grid: Grid) -> None:
    done: list[dict[str, Any]] = []
    for number, cell in enumerate(grid.cells, start=1):
        print(f"cell {number} of {len(grid.cells)}: {cell.path}", flush=True)
        done.append(grid.finish(cell))
        write_tables(grid.out, grid.grid, grid.scale, done)
        if number == 2 and grid.scale["learns"] and (found := problems(done)):
            raise UserError("cells of this size do not learn; take more steps: " + "; ".join(found))
    if not grid.starts_from_encoder:  # whose world has neither dictionary nor tokenizer
        draw_pictures(grid.out, grid.grid, done)
    print((grid.out / "table.md").read_text(encoding="utf-8"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", required=True, metavar="NAME|FILE", help=f"{', '.join(GRIDS)}, or a file")
    parser.add_argument("--scale", required=True, choices=("smoke", "cpu", "h100", "paper"))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with parallel/, mono/, lexicon/ and eval/")
    parser.add_argument("--encoder", type=Path, metavar="HF_DIR", help="for grid public: the encoder to go on from")
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
