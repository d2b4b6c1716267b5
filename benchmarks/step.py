"""Compare optimizer steps of xscale with a stock loop, Hugging Face models on DeepSpeed ZeRO-2.

    python benchmarks/step.py [--recipes tlm alignlm ...] [--data DIR ...] [--rounds 4] [--max_tokens 8192]
    python benchmarks/step.py --before DIR [--recipes ...]  against train.py of another checkout of xscale
    python benchmarks/step.py --recipes alignlm tlm --preset base --vocab_size 120000 --samples 512 \\
        --stock_micro_batch 64 --max_tokens 16384 --workers 4   on a GPU: BERT-base

Both loops train the same model (preset mini, vocabulary 32,768) from the same weights on the same samples in each
optimizer step, with the same ds_config, and take turns in one process. The stock loop (stock.py) is what an ordinary
user writes: micro-batches in random order, padded to their longest sequence, logits at all positions. Its data are
prepared before its clock starts; xscale prepares its data in its steps. Prints samples/s, the ratio to the stock loop
(medians, and the middle 80 % of the rounds), the ratio that FLOPs allow, on a GPU MFU, and the last losses. The FLOPs
that an objective needs are those of cost.StepFlops, for both loops; torch counts those that the stock loop computes.
--before: in each round, train.py of both checkouts trains 8 steps; the table has the medians of step_s after the first
--warm steps. The tokenizer of the data has --vocab_size ids.
--data: directories of shards with tokenizer/ and lexicon/ beside them (default: the demo corpus, which has word links).
--allocator default: glibc's malloc, with huge pages for large tensors as in every run of xscale, for both loops;
steady: malloc keeps freed memory, from which the stock loop with its large logits gains most.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
from common import (
    ALONE,
    CUDA,
    DEVICE,
    ROOT,
    RecipeEngine,
    demo_data,
    free_port,
    make_loader,
    now,
    one_rank,
    print_table,
    ratio_cells,
    use_allocator,
)
from stock import StockModule, Tlm
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers.utils import logging as transformers_logging

from xscale.data.loader import Loader
from xscale.data.mixture import PlanTable, initial_state
from xscale.run.resolve import module_of_run
from xscale.step import engine
from xscale.step.ds_config import Hardware, load_ds_config
from xscale.step.sums import stream_metrics

PAIRS = 4000
STEPS_OF_A_RUN = 8
"""--before: the steps of a run that count."""
DS_CONFIG = ROOT / f"ds_configs/zero2_{'fp16' if CUDA else 'cpu'}.json"

for direction in ("", "_backward"):  # torch counts attention on CUDA only
    cpu_attention = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{direction}")
    cuda_attention = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{direction}")
    flop_registry[cpu_attention] = flop_registry[cuda_attention]


# The two loops


class XscaleLoop:
    """xscale's own optimizer step. Reading and tokenising are part of it."""

    def __init__(self, loader: Loader):
        self.loader = loader
        self.name = f"xscale, rows of {loader.max_tokens(DEVICE):,}"
        self.seconds: list[float] = []
        self.engine = RecipeEngine(loader, DS_CONFIG)
        self.batches = loader.batches(ALONE, DEVICE, initial_state(loader.streams), loader.recipe.train.steps)

    def step(self) -> None:
        started = now()
        batch = next(self.batches)
        result = self.engine.train(batch)
        self.seconds.append(now() - started)
        self.needed_flops = self.engine.flops(batch)
        metrics = stream_metrics(result.sums.by_key(), batch.counts_without_languages(), self.loader.recipe)
        self.loss = sum(stream.weight * metrics[f"loss/{name}"] for name, stream in self.loader.recipe.streams.items())


class StockLoop:
    """Micro-batches of Hugging Face's model, whose data are prepared before the clock starts."""

    def __init__(self, loader: Loader, micro_batch: int):
        self.loader = loader
        self.micro_batch = micro_batch
        self.name = f"stock, micro-batch {micro_batch}"
        self.seconds: list[float] = []
        self.mixture = loader.mixture(ALONE, "cpu", initial_state(loader.streams))
        self.mixture.max_tokens = (
            1 << 40
        )  # all samples of a step are in one packed row, in the order in which they were drawn
        lm = module_of_run(loader.recipe, loader.corpus).encoder.lm
        lm.set_attn_implementation("sdpa")  # Hugging Face's own
        passes = sum(-(-stream.samples // micro_batch) for stream in loader.streams)
        config = load_ds_config(DS_CONFIG, loader.recipe, ALONE.world, Hardware.of_this_machine())
        self.precision = config.precision
        fields = config.resolved | {"gradient_accumulation_steps": passes, "train_batch_size": passes}
        self.engine = engine.build_engine(StockModule(lm, loader), fields)

    def prepared(self) -> list[tuple[str, dict[str, torch.Tensor], float]]:
        """Return the stream, the batch and the weight of each micro-batch of the next step."""
        micro_batches = []
        for name, draw in self.mixture.next_part().tables.items():
            part: Tlm = self.engine.module.streams[name]
            examples = self.examples(part, draw)
            starts = range(0, len(examples), self.micro_batch)
            weight = self.loader.recipe.streams[name].weight / len(starts)
            for start in starts:
                micro_batches.append((name, part.collate(examples[start : start + self.micro_batch]), weight))
        return micro_batches

    def examples(self, part: Tlm, draw: PlanTable) -> list[dict]:
        places = zip(draw.source.tolist(), draw.shard.tolist(), draw.record.tolist(), strict=True)
        sources = self.loader.corpus.sources
        return [part.example(sources[source].read(shard, record)) for source, shard, record in places]

    def step(self) -> None:
        micro_batches = self.prepared()
        started = now()
        losses = []
        for name, batch, weight in micro_batches:
            on_device = {key: tensor.to(self.engine.device) for key, tensor in batch.items()}
            loss = self.engine(name, on_device) * weight
            self.engine.backward(loss * len(micro_batches))
            self.engine.step()
            losses.append(loss.detach())
        self.seconds.append(now() - started)
        self.loss = float(sum(losses))


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
    if args.max_tokens:
        fields["train.max_tokens"] = args.max_tokens
    for field in args.set:
        name, _, value = field.partition("=")
        fields[name] = value
    return fields


def compare_with_stock(recipe: str, args: argparse.Namespace) -> None:
    fields = step_fields(recipe, args, args.warm + args.rounds)
    stock = StockLoop(make_loader(recipe, fields, args.data, args.vocab_size), args.stock_micro_batch)
    ours = XscaleLoop(make_loader(recipe, fields, args.data, args.vocab_size))
    with FlopCounterMode(display=False) as counter:
        stock.step()
    ours.step()
    turns = random.Random(0)
    loops: list[StockLoop | XscaleLoop] = [stock, ours]
    for _ in range(args.warm + args.rounds - 1):
        for loop in turns.sample(loops, len(loops)):
            loop.step()
    samples = sum(stream.samples for stream in stock.loader.streams)
    peak = ours.engine.formula.peak
    flops_computed = {stock: counter.get_total_flops(), ours: ours.needed_flops}
    rows = []
    for loop in loops:
        counted = loop.seconds[args.warm :]
        seconds = median(counted)
        cells = [loop.name, f"{samples / seconds:,.1f}", *ratio_cells(stock.seconds[args.warm :], counted)]
        cells.append(f"{flops_computed[stock] / flops_computed[loop]:.2f}")
        cells.append(f"{ours.needed_flops / seconds / peak:.1%}" if peak else "")
        rows.append([*cells, f"{loop.loss:.3f}"])
    title = f"{recipe}: steps of {samples} samples, {stock.precision}, {args.rounds} rounds"
    print_table(title, ["", "samples/s", "ratio", "middle 80 %", "FLOPs allow", "MFU", "loss"], rows)


def compare_checkouts(args: argparse.Namespace, folder: Path) -> None:
    """Compare steps of the checkout --before with steps of this checkout, for each recipe."""
    rows = []
    for recipe in args.recipes:
        fields = step_fields(recipe, args, args.warm + STEPS_OF_A_RUN)
        times: dict[Path, list[float]] = {args.before.resolve(): [], ROOT: []}
        turns = random.Random(0)
        for number in range(args.rounds):
            for side in turns.sample(range(2), 2):
                checkout = [*times][side]
                out = folder / f"{recipe}.{number}.{side}"
                times[checkout].append(train(checkout, recipe, fields, args, out))
        before, after = times.values()
        milliseconds = [f"{1e3 * median(before):,.0f}", f"{1e3 * median(after):,.0f}"]
        rows.append([recipe, *milliseconds, *ratio_cells(before, after)])
        print(*rows[-1], sep="  ", flush=True)
    title = f"Steps of train.py, preset {args.preset}, {args.threads} threads, malloc: {args.allocator}, "
    print_table(f"{title}{args.rounds} rounds", ["", "before, ms", "now, ms", "ratio", "middle 80 %"], rows)


def pad_tokenizer(path: Path, ids: int) -> None:
    """Give a tokenizer `ids` ids, with tokens [unusedN] for the last ones."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    for number in range(len(vocabulary), ids):
        vocabulary[f"[unused{number}]"] = number
    path.write_text(json.dumps(content), encoding="utf-8")


def train(checkout: Path, recipe: str, fields: Mapping[str, object], args: argparse.Namespace, out: Path) -> float:
    """Train by train.py of a checkout. Returns the median of step_s after the first --warm steps."""
    sets = [f"{name}={value}" for name, value in fields.items()]
    command = [sys.executable, checkout / "xscale/train.py", "--ds_config", DS_CONFIG, "--recipe", recipe]
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
    add("--preset", default="mini")
    add("--vocab_size", type=int, default=32_768, help="of the model; 0: the tokenizer's")
    add("--max_tokens", type=int, help="of xscale's rows (default: a run's)")
    add("--stock_micro_batch", type=int, default=32)
    add("--samples", type=int, help="of a recipe's only stream (default: 128; --before: the recipe's)")
    add("--rounds", type=int, default=4, help="optimizer steps of each loop that count; --before: runs of each side")
    add("--warm", type=int, default=2, help="optimizer steps of each loop or run before those that count")
    add("--set", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="recipe fields, such as model.dropout=0")
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
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        if not args.data:
            args.data = demo_data(Path(folder) / "demo", PAIRS)
            if args.before:
                pad_tokenizer(Path(folder) / "demo/tokenizer/tokenizer.json", args.vocab_size)
        args.data = [path.resolve() for path in args.data]
        if args.before:
            compare_checkouts(args, Path(folder))
            return
        args.samples = args.samples or 128
        with one_rank():
            print(
                f"preset {args.preset}, vocabulary {args.vocab_size:,}, {args.threads} threads, {args.allocator} malloc"
            )
            for recipe in args.recipes:
                compare_with_stock(recipe, args)
                gc.collect()  # engines are cycles


if __name__ == "__main__":
    main()
