"""Compare optimizer steps of xscale with a stock loop, Hugging Face models on DeepSpeed ZeRO-2.

    python benchmarks/step.py [--recipes tlm alignlm ...] [--data DIR ...] [--rounds 4] [--max_tokens 4096 8192]
    python benchmarks/step.py --before DIR [--recipes ...]  against train.py of another checkout of xscale
    python benchmarks/step.py --recipes alignlm tlm --preset base --vocab_size 120000 --words 62 --samples 128 \\
        --stock_micro_batch 64 --max_tokens 8192 16384 --workers 4 on a GPU: BERT-base at 128 pairs of 128 tokens

Both loops train the same model (preset mini, vocabulary 32,768) from the same weights on the same samples in each
optimizer step, with the same ds_config, and take turns in one process. The stock loop (stock.py) is what an ordinary
user writes: micro-batches in random order, padded to their longest sequence, logits at all positions. Its data are
tokenised, masked and collated beforehand, and it is never compiled. xscale does this work in its steps (with --workers,
partly during the stock loop's turn; loader.py measures the loader alone). Prints for each recipe samples/s, the ratio
to the stock loop (medians, and the middle 80 % of the rounds), the ratio that FLOPs allow, on a GPU MFU, and the last
loss of each loop, which masks and dropout make a little different.
The FLOPs that an objective needs are those of cost.StepFlops, and MFU = needed FLOPs / (seconds x peak) for both loops.
The FLOPs that the stock loop computes are counted by torch (FlopCounterMode) in one step. The ratio that FLOPs allow is
computed by the stock loop / needed.
--before: in each round, train.py of each checkout trains --steps steps; the table has the medians of step_s after the
first --warm steps. The tokenizer of the data has --vocab_size ids.
--data: directories of shards with tokenizer/ and lexicon/ beside them (default: made from the demo world, with word
links; --words N joins its sentences until each side of a pair has N words). --allocator default: glibc's malloc, with
huge pages for large tensors as in every run of xscale, for both loops; steady: malloc keeps freed memory,
from which the stock loop with its large logits gains most.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from common import (
    ALONE,
    CUDA,
    DEVICE,
    ROOT,
    free_port,
    make_run,
    now,
    print_table,
    spread,
    text_pairs,
    use_allocator,
    with_words,
    write_world,
)
from stock import Example, StockModule, Tlm
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers.utils import logging as transformers_logging

from xscale import ranks
from xscale.data.loader import Loader
from xscale.data.mixture import PlanTable, initial_state
from xscale.run.resolve import module_of_run
from xscale.step import engine
from xscale.step.cost import StepFlops
from xscale.step.ds_config import Hardware, load_ds_config
from xscale.step.step import optimizer_step
from xscale.step.sums import stream_metrics

PAIRS = 4000
DEMO_IDS = 32_768

for direction in ("", "_backward"):  # torch counts attention on CUDA only
    cpu_attention = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{direction}")
    cuda_attention = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{direction}")
    flop_registry[cpu_attention] = flop_registry[cuda_attention]


# The two loops


class XscaleLoop:
    """xscale's own optimizer step. Reading and tokenising are part of it."""

    def __init__(self, loader: Loader, ds_config: Path):
        self.loader = loader
        self.name = f"xscale, rows of {loader.max_tokens(DEVICE):,}"
        self.seconds: list[float] = []
        module = module_of_run(loader.recipe, loader.corpus)
        self.formula = StepFlops(module.encoder)
        resolved = load_ds_config(ds_config, loader.recipe, ALONE.world, Hardware.here()).resolved
        self.engine = engine.build_engine(module, resolved)
        state = initial_state(loader.streams)
        self.batches = loader.batches(ALONE, DEVICE, state, loader.recipe.train.steps)

    def step(self) -> None:
        started = now()
        batch = next(self.batches)
        self.targets = batch.targets()
        place: dict[str, int] = {"step": batch.step, "rank": ALONE.rank, "world": ALONE.world}
        self.sums = optimizer_step(self.engine, self.loader.recipe, batch.rows, self.targets, **place).sums
        self.seconds.append(now() - started)
        self.flops = sum(self.formula.flops(batch.cost()).values())

    def loss(self) -> float:
        """Return the loss of the last step."""
        metrics = stream_metrics(self.sums.by_key(), self.targets, self.loader.recipe)
        return sum(stream.weight * metrics[f"loss/{name}"] for name, stream in self.loader.recipe.streams.items())


class StockLoop:
    """Micro-batches of Hugging Face's model, whose data are prepared before the clock starts."""

    def __init__(self, loader: Loader, ds_config: Path, micro_batch: int):
        self.loader = loader
        self.micro_batch = micro_batch
        self.name = f"stock, micro-batch {micro_batch}"
        self.seconds: list[float] = []
        self.flops = 0
        self.draws = global_batches(loader)
        encoder = module_of_run(loader.recipe, loader.corpus).encoder
        encoder.lm.set_attn_implementation("sdpa")  # Hugging Face's own
        passes = sum(-(-stream.samples // micro_batch) for stream in loader.streams)
        config = load_ds_config(ds_config, loader.recipe, ALONE.world, Hardware.here())
        self.precision = config.precision
        fields = config.resolved | {"gradient_accumulation_steps": passes, "train_batch_size": passes}
        self.engine = engine.build_engine(StockModule(encoder.lm, loader), fields)

    def prepared(self) -> list[tuple[str, dict[str, torch.Tensor], float]]:
        """Return the stream, the batch and the weight of each micro-batch of the next step."""
        micro_batches = []
        for name, draw in next(self.draws).items():
            part = self.engine.module.streams[name]
            samples = samples_of(self.loader, part, draw)
            starts = range(0, len(samples), self.micro_batch)
            for start in starts:
                examples = samples[start : start + self.micro_batch]
                weight = self.loader.recipe.streams[name].weight / len(starts)
                micro_batches.append((name, part.collate(examples), weight))
        return micro_batches

    def step(self) -> None:
        micro_batches = self.prepared()
        started = now()
        self.losses = []
        for name, batch, weight in micro_batches:
            on_device = {key: tensor.to(self.engine.device) for key, tensor in batch.items()}
            loss = self.engine(name, on_device) * weight
            self.engine.backward(loss * len(micro_batches))
            self.engine.step()
            self.losses.append(loss.detach())
        self.seconds.append(now() - started)

    def loss(self) -> float:
        """Return the loss of the last step."""
        return float(sum(self.losses))


def global_batches(loader: Loader) -> Iterator[dict[str, PlanTable]]:
    """Yield the samples of each optimizer step, by stream, in the order in which they were drawn."""
    mixture = loader.mixture(ALONE, "cpu", initial_state(loader.streams))
    mixture.max_tokens = 1 << 40  # all samples of a step are in one packed row
    while plan := mixture.next_part():
        yield plan.tables


def samples_of(loader: Loader, part: Tlm, draw: PlanTable) -> list[Example]:
    """Return the stock loop's example of each sample, in the order in which samples were drawn."""
    places = zip(draw.source.tolist(), draw.shard.tolist(), draw.record.tolist(), strict=True)
    return [part.example(loader.corpus.sources[source].read(shard, record)) for source, shard, record in places]


# Times


def step_fields(recipe: str, args: argparse.Namespace, steps: int) -> dict[str, object]:
    """Return the fields of the recipe that are the same for all loops, and for another checkout."""
    fields: dict[str, object] = {"model.preset": args.preset, "data.max_length": 128, "data.workers": args.workers}
    fields |= {"data.overlong": "truncate", "train.steps": steps}
    if args.samples and recipe not in ("mixed", "xlm"):
        stream = "ppa" if recipe.startswith("ppa") else recipe
        fields[f"streams.{stream}.samples"] = args.samples
    if recipe.startswith("ppa") or recipe == "mixed":
        fields["streams.ppa.prefill"] = "false"
    for field in args.set:
        name, _, value = field.partition("=")
        fields[name] = value
    return fields


def measure(recipe: str, args: argparse.Namespace) -> None:
    fields = step_fields(recipe, args, args.warm + args.rounds)
    stock = StockLoop(make_run(recipe, fields, args.data, args.vocab_size), args.ds_config, args.stock_micro_batch)
    ours = []
    for size in args.max_tokens:
        rows = {"train.max_tokens": size} if size else {}
        ours.append(XscaleLoop(make_run(recipe, fields | rows, args.data, args.vocab_size), args.ds_config))
    with FlopCounterMode(display=False) as counter:
        stock.step()
    stock.flops = counter.get_total_flops()
    for loop in ours:
        loop.step()
    turns = random.Random(0)
    loops: list[StockLoop | XscaleLoop] = [stock, *ours]
    for _ in range(args.warm + args.rounds - 1):
        for loop in turns.sample(loops, len(loops)):
            loop.step()
    samples = sum(stream.samples for stream in stock.loader.streams)
    title = f"{recipe}: steps of {samples} samples, {stock.precision}, {args.rounds} rounds"
    header = ["", "samples/s", "ratio", "middle 80 %", "FLOPs allow", "TFLOP/s", "MFU", "loss"]
    peak = ours[0].formula.peak
    rows = []
    for loop in loops:
        seconds = median(loop.seconds[args.warm :])
        ratios = [theirs / own for theirs, own in zip(stock.seconds, loop.seconds, strict=True)]
        cells = [loop.name, f"{samples / seconds:,.1f}", f"{median(ratios[args.warm :]):.2f}"]
        cells += [spread(ratios[args.warm :]), f"{stock.flops / loop.flops:.2f}", f"{loop.flops / 1e12 / seconds:.3f}"]
        cells += [f"{ours[0].flops / seconds / peak:.1%}" if peak else "", f"{loop.loss():.3f}"]
        rows.append(cells)
    print_table(title, header, rows)


def compare_checkouts(args: argparse.Namespace, folder: Path) -> None:
    """Compare steps of the checkout --before with steps of this checkout at each --max_tokens, for each recipe."""
    rows = []
    for recipe in args.recipes:
        fields = step_fields(recipe, args, args.warm + args.steps)
        sides = [(args.before.resolve(), fields)]
        for size in args.max_tokens:
            sides.append((ROOT, fields | ({"train.max_tokens": size} if size else {})))
        times: list[list[float]] = [[] for _ in sides]
        turns = random.Random(0)
        for number in range(args.rounds):
            for side in turns.sample(range(len(sides)), len(sides)):
                checkout, its_fields = sides[side]
                out = folder / f"{recipe}.{number}.{side}"
                times[side].append(train(checkout, recipe, its_fields, args, out))
        for size, seconds in zip(args.max_tokens, times[1:], strict=True):
            ratios = [before / after for before, after in zip(times[0], seconds, strict=True)]
            name = f"{recipe}, rows of {size:,}" if size else recipe
            milliseconds = [f"{1e3 * median(times[0]):,.0f}", f"{1e3 * median(seconds):,.0f}"]
            rows.append([name, *milliseconds, f"{median(ratios):.2f}", spread(ratios)])
            print(*rows[-1], sep="  ", flush=True)
    title = f"Steps of train.py, preset {args.preset}, {args.threads} threads, malloc: {args.allocator}, "
    print_table(f"{title}{args.rounds} rounds", ["", "before, ms", "now, ms", "ratio", "middle 80 %"], rows)


def train(checkout: Path, recipe: str, fields: dict[str, object], args: argparse.Namespace, out: Path) -> float:
    """Train by train.py of a checkout. Returns the median of step_s after the first --warm steps."""
    sets = [f"{name}={value}" for name, value in fields.items()]
    command = [sys.executable, checkout / "xscale/train.py", "--ds_config", args.ds_config, "--recipe", recipe]
    command += ["--data", *args.data, "--out", out, "--set", *sets, "train.measure_every=0"]
    environment = os.environ | {"PYTHONPATH": str(checkout), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"OMP_NUM_THREADS": str(args.threads), "MASTER_PORT": str(free_port())}
    done = subprocess.run([*map(str, command)], env=environment, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"train.py of {checkout} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return median(json.loads(line)["step_s"] for line in lines[args.warm :])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--recipes", nargs="+", default=["tlm", "alignlm"], help="names of shipped recipes")
    add("--data", type=Path, nargs="+", help="directories of shards")
    add("--words", type=int, help="of a side of the demo world's pairs; default: its sentences as they are")
    add("--ds_config", type=Path, default=ROOT / f"ds_configs/zero2_{'fp16' if CUDA else 'cpu'}.json")
    add("--preset", default="mini")
    add("--vocab_size", type=int, default=DEMO_IDS, help="of the model; 0: the tokenizer's")
    add("--max_tokens", type=int, nargs="+", default=[None], help="of xscale's rows; several are compared")
    add("--stock_micro_batch", type=int, default=32)
    add("--samples", type=int, help="of a recipe's only stream (default: 128; --before: the recipe's)")
    add("--rounds", type=int, default=4, help="optimizer steps of each loop that count; --before: runs of each side")
    add("--warm", type=int, default=2, help="optimizer steps of each loop or run before those that count")
    add("--steps", type=int, default=8, help="--before: the steps of a run that count")
    add("--set", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="recipe fields")
    add("--workers", type=int, default=0, help="loader processes of xscale")
    add("--threads", type=int, default=2)
    add("--allocator", choices=("steady", "default"), default="default")
    add("--before", type=Path, metavar="DIR", help="another checkout, to compare steps with instead")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    args.warm = max(args.warm, 1)  # torch counts the stock loop's FLOPs in the first step
    use_allocator(args.allocator)
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        if not args.data:
            pairs = with_words(text_pairs(None), args.words) if args.words else text_pairs(None)
            pad_to = args.vocab_size if args.before else 0
            ids = args.vocab_size or DEMO_IDS
            args.data = write_world([*islice(pairs, PAIRS)], ids, Path(folder) / "world", pad_to=pad_to)
        args.data = [path.resolve() for path in args.data]
        args.ds_config = args.ds_config.resolve()
        if args.before:
            compare_checkouts(args, Path(folder))
            return
        args.samples = args.samples or 128
        ranks.join_process_group(ranks.read_launcher())
        model = f"preset {args.preset}, vocabulary {args.vocab_size:,}"
        print(f"{model}, {args.threads} threads, malloc: {args.allocator}; {args.data[0]}")
        for recipe in args.recipes:
            measure(recipe, args)
            gc.collect()  # engines are cycles
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
