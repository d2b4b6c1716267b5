"""Check that recipes train in fp16 on a GPU and recover from overflow, with xscale/train.py on the demo corpus.

    python benchmarks/train_fp16.py [--ds_config ds_configs/zero2_fp16.json] [--recipes NAME ...] [--steps 40] [--small]

Each run is a process of its own. The first, `mixed`, has a loss scale that begins at 2^32: its first steps must
overflow and be skipped, then the scale must fall, and then the loss. Then come `mixed` with deterministic algorithms
and several packed rows per step, a resume of it from its middle, which must repeat the losses bit for bit, every recipe
of --recipes, and `mixed` with activation checkpointing. Each must reach its last step with finite losses, the last five
lower than the first five, and log its loss scale. The script prints a line for each run; its exit code is 1 if one
failed. --small: few samples per step. Without fp16 (CPUs), all runs are in fp32, and there is no first run: nothing
overflows.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from common import ROOT, free_port, text_pairs, write_world

from xscale.step.ds_config import Hardware

SHIPPED = ["align_mlm", "alignlm", "contextual", "dict_mlm", "mixed", "ppa", "xlm"]
STREAMS = {"mixed": ["mlm", "tlm", "alignlm", "ppa", "contextual", "align_mlm"], "xlm": ["mlm", "tlm"]}
FIRST_SCALE = 32
"""The log2 of the first loss scale, which overflows."""
HEALING = 25
"""Enough extra steps to halve the scale until it does not overflow."""


class Runs:
    """Runs of train.py in a folder, and what they said."""

    def __init__(self, folder: Path, args: argparse.Namespace, fp16: bool):
        self.folder = folder
        self.args = args
        self.fp16 = fp16
        self.failed: list[str] = []
        count = 400 if args.small else 3000
        pairs = text_pairs(None)
        self.data = write_world([next(pairs) for _ in range(count)], 3000, folder / "demo")

    def train(self, name: str, recipe: str, ds_config: Path, steps: int, sets: list[str]) -> None:
        fields = [*sets, "train.lr=0.002", "train.measure_every=20", f"checkpoint.every={steps // 2}"]
        if recipe in ("ppa", "mixed"):
            fields.append(f"streams.ppa.queue_size={64 if self.args.small else 1024}")
        if self.args.small:
            fields.append("model.preset=tiny")
            fields += [f"streams.{stream}.samples=4" for stream in STREAMS.get(recipe, [recipe])]
        command = [sys.executable, ROOT / "xscale/train.py", "--ds_config", ds_config, "--recipe", recipe]
        command += ["--data", *self.data, "--out", self.folder / name, "--steps", steps, "--set", *fields]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())}
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=150)
        if done.returncode:
            self.failed.append(f"{name} (exit code {done.returncode})")
            print(done.stderr[-3000:], flush=True)
            return
        wrong = self.faults(name, steps)
        print(f"  {name:20} {self.line(name)}{'  FAILED: ' if wrong else ''}{', '.join(wrong)}", flush=True)
        if wrong:
            self.failed.append(name)

    def entries(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def faults(self, name: str, steps: int) -> list[str]:
        entries = self.entries(name)
        losses = [entry["loss"] for entry in entries]
        scales = [entry["loss_scale"] for entry in entries if "loss_scale" in entry]
        faults = []
        if [entry["step"] for entry in entries] != [*range(1, steps + 1)]:
            faults.append("steps")
        if not all(map(math.isfinite, losses)):
            faults.append("not finite")
        if mean(losses[-5:]) >= mean(losses[:5]):
            faults.append("loss did not fall")
        if len(scales) != (steps if self.fp16 else 0):
            faults.append("loss scale")
        if name == "overflow" and not (entries[0]["skipped"] and scales[-1] < scales[0] and not entries[-1]["skipped"]):
            faults.append("no overflow")
        return faults

    def line(self, name: str) -> str:
        entries = self.entries(name)
        losses = [entry["loss"] for entry in entries]
        rates = [entry["samples"] / entry["step_s"] for entry in entries[len(entries) // 2 :]]
        line = f"loss {mean(losses[:5]):8.3f} -> {mean(losses[-5:]):8.3f}, {mean(rates):,.0f} samples/s"
        line += f", {sum(entry['skipped'] for entry in entries)} skipped"
        if self.fp16:
            line += f", scale {entries[0]['loss_scale']:g} -> {entries[-1]['loss_scale']:g}"
        return line

    def compare(self, whole: str, resumed: str) -> None:
        """Add to `failed` unless both runs have the same losses, gradient norms and accuracies."""
        for before, after in zip(self.entries(whole), self.entries(resumed), strict=True):
            for key, value in before.items():
                if key.startswith(("loss", "grad_norm", "accuracy")) and after.get(key) != value:
                    self.failed.append(f"{resumed}: {key} of step {before['step']} differs")
                    return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", type=Path, default=ROOT / "ds_configs/zero2_fp16.json")
    parser.add_argument("--recipes", nargs="+", default=SHIPPED)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--small", action="store_true", help="few samples; without the run with checkpointing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xscale-fp16-") as name:
        folder = Path(name)
        runs = Runs(folder, args, Hardware.here().fp16 is True)
        print("fp16 training" if runs.fp16 else "Training, no fp16 here")
        if runs.fp16:
            fields = json.loads(args.ds_config.read_text(encoding="utf-8"))
            fields["fp16"]["initial_scale_power"] = FIRST_SCALE
            (folder / "overflow.json").write_text(json.dumps(fields), encoding="utf-8")
            runs.train("overflow", "mixed", folder / "overflow.json", args.steps + HEALING, [])
        exact = ["train.deterministic=true", "train.max_tokens=1024"]
        runs.train("exact", "mixed", args.ds_config, args.steps, exact)
        if (folder / "exact").exists():
            shutil.copytree(folder / "exact", folder / "resumed")
            shutil.rmtree(folder / f"resumed/checkpoints/step_{args.steps:08d}")
            runs.train("resumed", "mixed", args.ds_config, args.steps, exact)
            runs.compare("exact", "resumed")
        for recipe in args.recipes:
            runs.train(recipe, recipe, args.ds_config, args.steps, [])
        if not args.small:
            runs.train("checkpointing", "mixed", args.ds_config, args.steps, ["train.activation_checkpointing=true"])
    sys.exit(f"failed: {', '.join(runs.failed)}" if runs.failed else 0)


if __name__ == "__main__":
    main()
