"""Check that every recipe trains in fp16 on a GPU and recovers from overflow, with xscale/train.py on the demo corpus.

    python benchmarks/train_fp16.py [--ds_config ds_configs/zero2_fp16.json] [--recipes NAME ...] [--steps 40]
        [--max_tokens 1024] [--small]

The first run is `deepspeed --num_gpus 1 xscale/train.py --recipe mixed` with a loss scale that begins at 2^32: its
first steps must overflow and be skipped, then the scale must fall, and then the loss. The other runs are in this
process: `mixed` with deterministic algorithms and several packed rows per step (--max_tokens), every recipe with rows
of the default size, and `mixed` with activation checkpointing. Each must reach its last step
with finite losses, the last five lower than the first five, and log its loss scale. A resume of the deterministic run
from its middle must repeat the losses of the second half bit for bit. The script prints a line for each run; its exit
code is 1 if one failed. --small: few samples per step, and no activation checkpointing. Without
fp16 (CPUs), all runs are in fp32, and there is no first run: nothing overflows.
"""

import argparse
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import demo_shards
from xscale import ranks
from xscale.objectives import OBJECTIVES
from xscale.ranks import HostGroup
from xscale.recipe import RECIPES, load_recipe
from xscale.run.folder import STOPPED, Status
from xscale.run.start import train_run
from xscale.step.ds_config import Hardware
from xscale.train import parse_arguments

ROOT = Path(__file__).resolve().parent.parent
SETS = {
    "mixed+exact": ["train.deterministic=true"],
    "mixed+checkpointing": ["train.activation_checkpointing=true"],
}
EXACT, *LAST = SETS
FIRST_SCALE, HEALING = 32, 25
"""The log2 of the first loss scale, which overflows, and enough extra steps to halve it until it does not."""


def arguments(name: str, more: list[str], args: argparse.Namespace, ds_config: Path, steps: int) -> list[str]:
    recipe = name.partition("+")[0]
    streams = load_recipe(recipe, [], {name: o.options for name, o in OBJECTIVES.items()}).streams
    sets = [*more, "train.lr=0.002", "train.measure_every=20", f"checkpoint.every={steps // 2}"]
    for stream, fields in streams.items():
        sets += [f"streams.{stream}.samples=4"] if args.small else []
        sets += [f"streams.{stream}.queue_size={64 if args.small else 1024}"] if fields.objective == "ppa" else []
    paths = ["--ds_config", str(ds_config), "--data", str(args.data), "--out", str(args.out / name)]
    return ["--recipe", recipe, "--steps", str(steps), *paths, "--set", *sets]


def verdict(out: Path, steps: int, fp16: bool, overflow: bool) -> tuple[bool, str]:
    """True if a run passes all checks, and the line about the run."""
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in entries]
    skipped = sum(entry["skipped"] for entry in entries)
    scales = [entry["loss_scale"] for entry in entries if "loss_scale" in entry]
    every_loss = [value for entry in entries for name, value in entry.items() if name.startswith("loss")]
    checks = {
        "steps": [entry["step"] for entry in entries] == list(range(1, steps + 1)),
        "not finite": all(math.isfinite(value) for value in every_loss),
        "loss did not fall": mean(losses[-5:]) < mean(losses[:5]),
        "loss scale": len(scales) == (steps if fp16 else 0),
        "no overflow": not overflow or (skipped > 0 and scales[-1] < scales[0] and not entries[-1]["skipped"]),
    }
    wrong = [name for name, ok in checks.items() if not ok]
    line = f"loss {mean(losses[:5]):8.3f} -> {mean(losses[-5:]):8.3f}, {skipped} skipped"
    if scales:
        line += f", scale 2^{math.log2(scales[0]):.0f} -> 2^{math.log2(scales[-1]):.0f}"
    line += f", {mean(entry['samples'] / entry['step_s'] for entry in entries[steps // 2 :]):,.0f} samples/s"
    if "mem_gb" in entries[-1]:
        line += f", {entries[-1]['mem_gb']:.2f} GB"
    return not wrong, line + (f"  FAILED: {', '.join(wrong)}" if wrong else "")


def resume_halfway(whole: Path, resumed: Path, steps: int, go_on: Callable[[], object]) -> None:
    """Resume a finished run from its middle checkpoint. Raises AssertionError if a number of metrics.jsonl differs."""
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / f"step_{steps:08d}")
    go_on()
    both = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (whole, resumed)]
    prefixes = ("loss", "grad_norm", "accuracy")
    kept = [[{k: entry[k] for k in entry if k.startswith(prefixes)} for entry in entries] for entries in both]
    changed = sorted({name for before, after in zip(*kept, strict=True) for name, _ in before.items() ^ after.items()})
    assert not changed, f"not what the run gave without a break: {', '.join(changed)}"


def overflow(args: argparse.Namespace) -> None:
    """Train `mixed` with a loss scale that overflows at first, by the launcher in a process of its own."""
    ds_config = json.loads(args.ds_config.read_text())
    ds_config["fp16"]["initial_scale_power"] = FIRST_SCALE
    path = args.out / "overflow.json"
    path.write_text(json.dumps(ds_config))
    words = arguments("mixed+overflow", [], args, path, args.steps + HEALING)
    command = ["deepspeed", "--num_gpus", "1", "xscale/train.py", *words]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        assert process.wait(timeout=90) == 0, f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the launcher's rank too
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", type=Path, default=ROOT / "ds_configs" / "zero2_fp16.json")
    parser.add_argument("--recipes", nargs="+", default=sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max_tokens", type=int, default=1024, help="of a row of the deterministic run")
    parser.add_argument("--small", action="store_true", help="few samples; without compiled and checkpointed runs")
    args = parser.parse_args()
    failed, lines = [], []

    def check(name: str, steps: int, work: Callable[[], object], overflows: bool = False) -> None:
        try:
            work()
            good, line = verdict(args.out / name, steps, fp16, overflows)
        except Exception:
            good, line = False, traceback.format_exc()
        lines.append(f"  {name:20} {line}")
        print(lines[-1], flush=True)
        if not good:
            failed.append(name)
        gc.collect()  # engines are cycles

    with tempfile.TemporaryDirectory(prefix="xscale-fp16-") as folder:
        args.out, args.data = Path(folder), Path(folder) / "demo"
        texts = 400 if args.small else 3000
        demo_shards.build(args.data, pairs=texts, mono=texts)
        process = ranks.read_launcher()
        fp16 = Hardware.here().fp16 is True
        if fp16:
            check("mixed+overflow", args.steps + HEALING, lambda: overflow(args), overflows=True)
        ranks.join_process_group(process)
        host_group = HostGroup()

        def train(words: argparse.Namespace) -> None:
            if (
                train_run(words, process, host_group, Status(words.out, process)) == STOPPED
            ):  # a signal ends one run only
                sys.exit("stopped")

        for name in [EXACT, *args.recipes, *([] if args.small else LAST)]:
            sets = SETS.get(name, []) + [f"train.max_tokens={args.max_tokens}"] * (name == EXACT)
            words = parse_arguments(arguments(name, sets, args, args.ds_config, args.steps))
            check(name, args.steps, partial(train, words))
            if name == EXACT:
                words.out = args.out / "mixed+resumed"
                resume = partial(resume_halfway, args.out / name, words.out, args.steps, partial(train, words))
                check(words.out.name, args.steps, resume)
    print("\nfp16 training" if fp16 else "\nTraining, no fp16 here", *lines, sep="\n")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
