"""Compare optimizer steps of xscale with a stock loop, Hugging Face models on DeepSpeed ZeRO-2, for each objective.

    python benchmarks/step.py [--recipes tlm alignlm ...] [--data DIR ...] [--rounds 4] [--max_tokens 4096 8192]
    python benchmarks/step.py --memory [--recipes ...]      peak memory of each loop, in a process of its own
    python benchmarks/step.py --check [--recipes ...]       both losses on the same masked inputs, without dropout
    python benchmarks/step.py --before DIR [--recipes ...]  against another checkout of xscale, see before.py
    python benchmarks/step.py --recipes alignlm ppa --preset base --vocab_size 120000 --words 62 --samples 128 \\
        --stock_micro_batch 64 --max_tokens 8192 16384 --workers 4 on a GPU: BERT-base at 128 pairs of 128 tokens

Both loops train the same model (preset mini, vocabulary 32,768) from the same weights on the same samples in each
optimizer step, with the same ds_config, and take turns in one process. The stock loop (stock.py) is what an ordinary
user writes: micro-batches in random order, padded to their longest sequence, logits at all positions. Its data are
tokenised, masked and collated beforehand, and it is never compiled. xscale does this work in its steps (with --workers,
partly during the stock loop's turn; loader.py measures the loader alone). Prints for each recipe
  1. samples/s, the ratio to the stock loop (medians, and the range over rounds), the ratio that FLOPs allow; on a GPU
     also MFU, peak memory, and the number of steps that fp16 overflow skipped
  2. the parts of each loop's step in ms. The stock loop's ZeRO-2 reduces gradients in each backward pass, xscale once
     per step; xscale's head computes its gradients in the forward pass, and auxiliary states (key encoder, frozen copy)
     read before it. On a GPU these parts are measured in separate steps, since each measurement waits for the device
The FLOPs that an objective needs are those of cost.StepFlops, and MFU = needed FLOPs / (seconds x peak) for both loops.
The FLOPs that the stock loop computes are counted by torch (FlopCounterMode) in one step. The ratio that FLOPs allow is
computed by the stock loop / needed.
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
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, groupby, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from before import HERE, Side, compare, free_port
from common import print_table, text_pairs, use_allocator, with_words, write_world
from stock import Example, Mlm, Ppa, StockModule, first_queue
from torch.nn.utils.rnn import pad_sequence
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers.utils import logging as transformers_logging

from xscale import ranks
from xscale.data.mixture import Mixture, SampledRecords, initial_state
from xscale.data.packed_row import PackedRow, pack_row
from xscale.data.stream_batch import StreamBatch
from xscale.errors import UserError
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES
from xscale.ranks import Process
from xscale.recipe import load_recipe
from xscale.run_spec import RunSpec, resolve_run
from xscale.step import engine
from xscale.step.cost import StepFlops
from xscale.step.ds_config import Hardware, load_ds_config
from xscale.step.module import StepModule
from xscale.step.step import RowPass, StepSums, encode_auxiliary, optimizer_step, step_weights

PAIRS = 4000
DS_CONFIGS = Path(__file__).parent.parent / "ds_configs"
PARTS = ("data", "encoder forward", "heads, loss", "heads backward", "encoder backward, reduce", "optimizer, momentum")
CUDA = torch.cuda.is_available()
ALONE = Process(0, 1, 0, 1)

aten = torch.ops.aten
for direction in ("", "_backward"):  # torch counts attention on CUDA only
    cpu_attention = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{direction}")
    flop_registry[cpu_attention] = flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention{direction}")]


class Stopwatch:
    """The seconds of each part of a step. Hooks call `part(name)` at the end of the part `name`."""

    def __init__(self) -> None:
        self.on = False

    def start(self, on: bool) -> None:
        self.on, self.seconds, self.last = on, dict.fromkeys(PARTS, 0.0), now()
        self.forward = self.backward = False

    def part(self, name: str) -> None:
        if self.on:
            moment = now()
            self.seconds[name] += moment - self.last
            self.last = moment

    def before_encoder(self, *args: Any) -> None:
        self.part("heads, loss" if self.forward else "data")
        self.forward = True

    def after_encoder(self, hidden: torch.Tensor) -> None:
        self.part("encoder forward")
        if self.on and hidden.requires_grad:
            hidden.register_hook(self.gradient_at_hidden)

    def gradient_at_hidden(self, gradient: torch.Tensor) -> None:
        """Called when a pass's gradient reaches the hidden states; between two such calls, mostly an encoder ran."""
        self.part("encoder backward, reduce" if self.backward else "heads backward")
        self.backward = True

    def watch_engine(self, deepspeed_engine: Any) -> None:
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.part("heads, loss")
            original_backward(loss, *args, **kwargs)
            self.part("encoder backward, reduce")
            self.backward = False

        def step(*args: Any, **kwargs: Any) -> None:
            self.part("encoder backward, reduce")
            original_step(*args, **kwargs)
            self.part("optimizer, momentum")
            self.forward = False

        original_backward, original_step = deepspeed_engine.backward, deepspeed_engine.step
        deepspeed_engine.backward, deepspeed_engine.step = backward, step


WATCH = Stopwatch()
"""The stopwatch of the loop whose turn it is."""


def watch_encoder(encoder: torch.nn.Module) -> None:
    """Add hooks to an encoder that report to WATCH. Copies of the encoder have the same hooks."""
    encoder.register_forward_pre_hook(lambda *_: WATCH.before_encoder())
    encoder.register_forward_hook(
        lambda module, inputs, output: WATCH.after_encoder(getattr(output, "last_hidden_state", output))
    )


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


class Loop:
    """The base of both loops has the engine, the times, and the loop's own memory on a GPU that holds several loops."""

    kind = ""

    def __init__(self, run_spec: RunSpec, ds_config: Path):
        self.run_spec, self.name = run_spec, self.kind
        self.device = Hardware.here().device
        self.resident = self.peak = self.skipped = 0
        self.seconds: list[float] = []
        self.parts: list[dict[str, float]] = []
        self.flops = 0.0
        with self.memory():
            config = load_ds_config(ds_config, run_spec.recipe, ALONE.world, Hardware.here())
            self.precision = config.precision
            self.engine = engine.build_engine(self.module(run_spec.encoder()), config.resolved | self.passes())
        WATCH.watch_engine(self.engine)

    def timed_step(self, counts: bool, watched: bool) -> None:
        work, skipped = self.prepared(), self.engine.skipped_steps
        with self.memory():
            WATCH.start(watched)
            started = WATCH.last
            self.step(work)
            WATCH.part("optimizer, momentum")
            seconds = now() - started
        if counts:
            self.seconds.append(seconds)
            self.skipped += self.engine.skipped_steps - skipped
        if watched:
            self.parts.append(WATCH.seconds)

    def passes(self) -> dict[str, int]:
        """The fields of the ds_config that say how many backward passes a step has."""
        return {}

    def module(self, encoder: Encoder) -> torch.nn.Module:
        raise NotImplementedError

    def prepared(self) -> Any:
        raise NotImplementedError

    def step(self, work: Any) -> None:
        raise NotImplementedError

    def loss(self) -> float:
        """The loss of the last step."""
        raise NotImplementedError

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Add up the memory that this loop keeps, and record its peak."""
        if not CUDA:
            yield
            return
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield
        self.peak = max(self.peak, self.resident + torch.cuda.max_memory_allocated() - before)
        self.resident += torch.cuda.memory_allocated() - before


class XscaleLoop(Loop):
    kind = "xscale"

    def module(self, encoder: Encoder) -> torch.nn.Module:
        run_spec = self.run_spec
        self.formula = StepFlops(encoder)
        steps = run_spec.recipe.train.steps
        self.batches = run_spec.batches(ALONE, self.device, initial_state(run_spec.specs), steps)
        self.name = f"xscale, rows of {run_spec.max_tokens(self.device):,}"
        watch_encoder(encoder)
        return step_module(encoder, run_spec)

    def prepared(self) -> None:
        """Prepare nothing: reading and tokenising are part of xscale's step."""

    def step(self, work: None) -> None:
        batch = next(self.batches)
        options: dict[str, Any] = {"step": batch.step, "rank": ALONE.rank, "world": ALONE.world}
        self.targets = batch.targets()
        self.sums, _ = optimizer_step(self.engine, self.run_spec.recipe, batch.rows, self.targets, **options)
        self.flops = sum(self.formula.flops(batch.work()).values())

    def loss(self) -> float:
        losses = stream_losses(self.run_spec, self.sums, self.targets)
        return sum(stream.weight * losses[name] for name, stream in self.run_spec.recipe.streams.items())


def stream_losses(run_spec: RunSpec, sums: StepSums, targets: dict[tuple[str, str], int]) -> dict[str, float]:
    """The loss of each stream, without the stream's weight."""
    shares = sums.averages(sums.values_K.tolist(), run_spec.recipe, targets)
    return {name: shares[f"loss/{name}"] for name in run_spec.recipe.streams}


def step_module(encoder: Encoder, run_spec: RunSpec) -> StepModule:
    """The run's module; a queue of PPA is filled with random keys."""
    module = StepModule(encoder, run_spec.recipe)
    for name, auxiliary_state in module.auxiliary_states.items():
        if hasattr(auxiliary_state, "queue"):
            auxiliary_state.queue.push(first_queue(run_spec.recipe.streams[name].options), 0)
    return module


class StockLoop(Loop):
    kind = "stock"

    def __init__(self, run_spec: RunSpec, ds_config: Path, micro_batch: int):
        self.micro_batch = micro_batch
        super().__init__(run_spec, ds_config)
        self.name = f"stock, micro-batch {micro_batch}"

    def passes(self) -> dict[str, int]:
        n = sum(-(-spec.samples // self.micro_batch) for spec in self.run_spec.specs)
        return {"gradient_accumulation_steps": n, "train_batch_size": n}

    def module(self, encoder: Encoder) -> torch.nn.Module:
        self.draws = global_batches(self.run_spec)
        encoder.lm.set_attn_implementation("sdpa")  # Hugging Face's own
        watch_encoder(encoder.lm.base_model)
        return StockModule(encoder.lm, self.run_spec)

    def prepared(self) -> list[tuple[str, dict[str, torch.Tensor], float]]:
        """The stream, the batch and the weight of each micro-batch of a step."""
        micros = []
        for name, draw in next(self.draws).items():
            part = self.engine.module.streams[name]
            samples = samples_of(self.run_spec, part, draw)
            cuts = range(0, len(samples), self.micro_batch)
            batches = [part.collate(list(chain(*samples[i : i + self.micro_batch]))) for i in cuts]
            weight = self.run_spec.recipe.streams[name].weight / len(batches)
            micros += [(name, batch, weight) for batch in batches]
        return micros

    def step(self, work: list[tuple[str, dict[str, torch.Tensor], float]]) -> None:
        losses = []
        for name, batch, weight in work:
            on_device = {key: tensor.to(self.engine.device) for key, tensor in batch.items()}
            loss = self.engine(name, on_device) * weight
            self.engine.backward(loss * len(work))
            self.engine.step()
            losses.append(loss.detach())
        for part in self.engine.module.streams.values():
            part.after_step(self.engine.module.lm)
        self.losses = losses

    def loss(self) -> float:
        return float(sum(self.losses))


def global_batches(run_spec: RunSpec) -> Iterator[dict[str, SampledRecords]]:
    """The samples of each optimizer step, by stream, in the order in which they were drawn."""
    options: dict[str, Any] = {
        "seed": run_spec.recipe.train.seed,
        "alpha": run_spec.recipe.data.alpha,
        "rank": 0,
        "world": 1,
    }
    options |= {
        "max_length": run_spec.recipe.data.max_length,
        "max_tokens": 1 << 40,
        "state": initial_state(run_spec.specs),
    }
    mixture = Mixture(run_spec.specs, run_spec.sources, run_spec.calibration, **options)
    for plan in iter(mixture.next_step, None):
        (row,) = plan.rows
        yield row


def samples_of(run_spec: RunSpec, part: Mlm, draw: SampledRecords) -> list[list[Example]]:
    """The stock loop's examples of each sample, in the draw's order."""
    columns = (draw.sample.tolist(), draw.source.tolist(), draw.shard.tolist(), draw.record.tolist())
    places = groupby(zip(*columns, strict=True), key=lambda place: place[0])
    return [
        part.examples([run_spec.sources[source].read(shard, record) for _, source, shard, record in group])
        for _, group in places
    ]


def recipe_fields(recipe: str, args: argparse.Namespace) -> list[str]:
    """The fields of the recipe that are the same for all loops, and for another checkout."""
    fields = {"model.preset": args.preset, "data.max_length": args.max_length, "data.workers": args.workers}
    fields |= {"data.overlong": "truncate", "train.steps": args.warm + args.rounds + args.profile}
    streams = load_recipe(recipe, [], {name: o.options for name, o in OBJECTIVES.items()}).streams
    if len(streams) == 1 and args.samples:
        fields[f"streams.{next(iter(streams))}.samples"] = args.samples
    fields |= {f"streams.{name}.prefill": "false" for name, stream in streams.items() if stream.objective == "ppa"}
    return [*(f"{key}={value}" for key, value in fields.items()), *args.set]


def make_job(recipe: str, data: list[Path], args: argparse.Namespace, *more: str) -> RunSpec:
    run_spec = resolve_run(recipe, [*recipe_fields(recipe, args), *more], data)
    if args.vocab_size and run_spec.tokenizer.vocab_size > args.vocab_size:
        raise UserError(
            f"the tokenizer has {run_spec.tokenizer.vocab_size:,} ids, more than --vocab_size {args.vocab_size:,}"
        )
    run_spec.tokenizer.vocab_size = args.vocab_size or run_spec.tokenizer.vocab_size  # of the model
    return run_spec.calibrated()


def xscale_loop(recipe: str, data: list[Path], args: argparse.Namespace, max_tokens: int | None) -> XscaleLoop:
    more = [f"train.max_tokens={max_tokens}"] if max_tokens else []
    return XscaleLoop(make_job(recipe, data, args, *more), args.ds_config)


def stock_loop(recipe: str, data: list[Path], args: argparse.Namespace) -> StockLoop:
    return StockLoop(make_job(recipe, data, args), args.ds_config, args.stock_micro_batch)


def measure(recipe: str, data: list[Path], args: argparse.Namespace) -> None:
    stock = stock_loop(recipe, data, args)
    ours = [xscale_loop(recipe, data, args, size) for size in args.max_tokens]
    loops: list[Loop] = [stock, *ours]
    turns = random.Random(0)
    for step in range(args.warm + args.rounds + args.profile):
        counts = args.warm <= step < args.warm + args.rounds
        watched = counts if not CUDA else step >= args.warm + args.rounds  # the watch waits for the device
        for loop in turns.sample(loops, len(loops)):
            if step == 0 and loop is stock:
                with FlopCounterMode(display=False) as counter:
                    loop.timed_step(counts, watched)
                stock.flops = counter.get_total_flops()
            else:
                loop.timed_step(counts, watched)
    report(recipe, stock, ours)


def report(recipe: str, stock: StockLoop, ours: list[XscaleLoop]) -> None:
    samples = sum(spec.samples for spec in stock.run_spec.specs)
    header = ["", "samples/s", "ratio", "range", "FLOPs allow", "TFLOP", "TFLOP/s", "loss"]
    peak = ours[0].formula.peak
    header += (["MFU"] if peak else []) + (["peak GB", "skipped"] if CUDA else [])
    rows, parts = [], []
    for loop in (stock, *ours):
        seconds = median(loop.seconds)
        ratios = sorted(a / b for a, b in zip(stock.seconds, loop.seconds, strict=True))
        row = [
            loop.name,
            f"{samples / seconds:,.1f}",
            f"{median(stock.seconds) / seconds:.2f}",
            f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
            f"{stock.flops / loop.flops:.2f}",
            f"{loop.flops / 1e12:.3f}",
            f"{loop.flops / 1e12 / seconds:.3f}",
            f"{loop.loss():.3f}",
        ]
        row += [f"{ours[0].flops / seconds / peak:.1%}"] if peak else []
        row += [f"{loop.peak / 1e9:.2f}", f"{loop.skipped}"] if CUDA else []
        rows.append(row)
        middle = [median(each[name] for each in loop.parts) for name in PARTS] if loop.parts else []
        parts.append([loop.name, *(f"{1e3 * value:.0f}" for value in [*middle, sum(middle)])])
    title = f"{recipe}: steps of {samples} samples, {stock.precision}, {len(stock.seconds)} rounds"
    print_table(title, header, rows)
    if loop.parts:
        print_table(f"{recipe}: where a step's time goes, ms", ["", *PARTS, "sum"], parts)


# Another checkout


def compare_checkouts(args: argparse.Namespace, folder: Path) -> None:
    """Compare steps of the checkout --before with steps of this checkout at each --max_tokens, for each recipe."""
    rows = []
    for recipe in args.recipes:
        words = ["--ds_config", str(args.ds_config.resolve()), "--recipe", recipe]
        words += ["--data", *(str(path.resolve()) for path in args.data), "--set", *recipe_fields(recipe, args)]
        words.append(f"train.steps={args.warm + args.rounds + 1}")  # a step is answered when the next one is asked for
        fixed = args.vocab_size, args.threads
        sides = [Side(args.before.resolve(), words, folder / recipe / "before", *fixed)]
        for size in args.max_tokens:
            more = [f"train.max_tokens={size}"] if size else []
            sides.append(Side(HERE, words + more, folder / recipe / f"rows_{size}", *fixed))
        for size, cells in zip(args.max_tokens, compare(sides, args.warm, args.rounds), strict=True):
            rows.append([recipe + (f", rows of {size:,}" if size else ""), *cells])
            print(*rows[-1], sep="  ", flush=True)
    title = f"Whole steps of preset {args.preset}, vocabulary {args.vocab_size:,}, {args.threads} threads, malloc: "
    header = ["", "before, ms", "now, ms", "ratio", "middle 80 % of rounds", "ratio of processor time"]
    print_table(f"{title}{args.allocator}, {args.rounds} rounds", header, rows)


# Peak memory


def peak_memory(recipes: list[str], data: list[Path], argv: list[str]) -> None:
    """Print the peak memory of each loop, measured in a process of its own, since a resident set does not shrink."""
    rows = []
    for recipe in recipes:
        found = []
        for kind in ("stock", "xscale"):
            command = [sys.executable, __file__, *argv, "--recipes", recipe, "--alone", kind, "--data", *map(str, data)]
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            found.append(json.loads(lines[-1]))
        (stock, base), (ours, _) = found
        figures = [stock / 1e9, ours / 1e9, base / 1e9]
        rows.append([recipe, *(f"{figure:.2f}" for figure in figures), f"{(stock - base) / (ours - base):.2f}"])
    header = ["", "stock, GB", "xscale, GB", "before the model, GB", "ratio beyond that"]
    print_table(f"Peak {'GPU memory' if CUDA else 'resident set'} of a process", header, rows)


def alone(kind: str, recipe: str, data: list[Path], args: argparse.Namespace) -> None:
    before = 0 if CUDA else peak_bytes()
    loop: Loop = (
        stock_loop(recipe, data, args) if kind == "stock" else xscale_loop(recipe, data, args, args.max_tokens[0])
    )
    for _ in range(args.warm + args.rounds):
        loop.timed_step(False, False)
    print(json.dumps([loop.peak if CUDA else peak_bytes(), before]))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The same objective?


def check(recipes: list[str], data: list[Path], args: argparse.Namespace) -> bool:
    """Compare both loops' losses of a first step: same model, no dropout, same samples, xscale's masks and swaps."""
    rows, good = [], True
    for recipe in recipes:
        plain = {"ppa": "temperature=1.0", "align_mlm": "pairs_per_step=null"}  # a loss to speak of; nothing drawn
        sets = [f"streams.{name}.{field}" for name, field in plain.items() if recipe in (name, "mixed")]
        sets += ["model.dropout=0.0", "data.segments=false", "data.lexicon_heldout=0"]
        run_spec = make_job(recipe, data, args, *sets)
        encoder = run_spec.encoder()
        module, stock = step_module(encoder, run_spec), StockModule(encoder.lm, run_spec)
        stream_batches, row = first_row(run_spec)
        ours = losses_of(run_spec, module, row)
        for name, draw in next(global_batches(run_spec)).items():
            part: Any = stock.streams[name]
            examples = list(chain(*samples_of(run_spec, part, draw)))
            give_draws(part, examples, stream_batches[name], module.objective_parts(name).heads)
            with torch.no_grad():
                theirs = float(stock(name, part.collate(examples)))
            difference = abs(ours[name] - theirs) / abs(ours[name])
            good = good and difference < 1e-5
            rows.append([f"{recipe}, {name}", f"{ours[name]:.6f}", f"{theirs:.6f}", f"{difference:.1e}"])
    print_table("Loss of the same step, no dropout", ["", "xscale", "stock", "difference"], rows)
    return good


def first_row(run_spec: RunSpec) -> tuple[dict[str, StreamBatch], PackedRow]:
    """The stream batches of the first step, and one packed row with all of them."""
    mixture = run_spec.mixture(ALONE, "cpu", run_spec.specs, initial_state(run_spec.specs))
    mixture.max_tokens = 1 << 40
    plan, dataset = mixture.next_step(), run_spec.dataset(run_spec.specs)
    stream_batches = {name: dataset.stream_batches(name, plan)[0] for name in plan.rows[0]}
    return stream_batches, pack_row(stream_batches, run_spec.tokenizer.sep_id)


@torch.no_grad()
def losses_of(run_spec: RunSpec, module: StepModule, row: PackedRow) -> dict[str, float]:
    row_pass = RowPass(row, torch.device("cpu"), (0,))
    encode_auxiliary(module, [row_pass])
    _, values_K = row_pass(module, step_weights(run_spec.recipe, row.targets, 0))
    return stream_losses(run_spec, StepSums(module.reported, values_K), row.targets)


def give_draws(part: Any, examples: list[Example], stream_batch: StreamBatch, heads: Any) -> None:
    """Let the stock objective mask and swap as xscale did."""
    cuts = torch.from_numpy(stream_batch.sequences.lengths).tolist()
    masked = torch.from_numpy(stream_batch.sequences.ids)
    chosen = torch.zeros_like(masked, dtype=torch.bool)
    original = masked.clone()
    if "masked" in stream_batch.reads:
        chosen[stream_batch.reads["masked"].places] = True
        original[chosen] = torch.from_numpy(next(iter(stream_batch.labels.values())))

    def mask(ids: torch.Tensor, special: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fills = {"masked": part.tokenizer.pad_token_id, "original": part.tokenizer.pad_token_id, "labels": -100}
        flat = {"masked": masked, "original": original, "labels": original.where(chosen, -100)}
        padded = {
            name: pad_sequence(flat[name].split(cuts)[: len(ids)], batch_first=True, padding_value=fill)
            for name, fill in fills.items()
        }
        assert torch.equal(ids, padded["original"]), "other tokens"
        return padded["masked"], padded["labels"]

    part.mask = mask
    part.synonyms = {}  # of dict_mlm: they are in the masked tokens
    if isinstance(part, Ppa):
        views = original.split(cuts)[-len(examples) :]  # without a query view, the sequences of TLM
        queries = iter([view.tolist() for view in views])
        sides = iter([example["sides"] for example in examples])
        part.swap = lambda: next(queries)[1 : len(first := next(sides)[0]) + 1] != first
        if heads:
            part.projection[0].weight, part.projection[2].weight = heads.w1.weight, heads.w2.weight


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--recipes", nargs="+", default=["tlm", "alignlm"], help="names of shipped recipes")
    parser.add_argument("--data", type=Path, nargs="+", help="directories of shards")
    parser.add_argument(
        "--words", type=int, help="of a side of the demo world's pairs; default: its sentences as they are"
    )
    parser.add_argument("--ds_config", type=Path, default=DS_CONFIGS / f"zero2_{'fp16' if CUDA else 'cpu'}.json")
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--vocab_size", type=int, default=32_768, help="of the model; 0: the tokenizer's")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument(
        "--max_tokens", type=int, nargs="+", default=[None], help="of xscale's rows; several are compared"
    )
    parser.add_argument("--stock_micro_batch", type=int, default=32)
    parser.add_argument(
        "--samples", type=int, help="of a step, where the recipe has one stream (default: 128; --before: the recipe's)"
    )
    parser.add_argument("--rounds", type=int, default=4, help="optimizer steps of each loop that count")
    parser.add_argument("--warm", type=int, default=2, help="optimizer steps of each loop before those")
    parser.add_argument(
        "--profile", type=int, default=3 if CUDA else 0, help="steps after those that are watched, on a GPU"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="recipe fields")
    parser.add_argument("--workers", type=int, default=0, help="loader processes of xscale")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allocator", choices=("steady", "default"), default="default")
    parser.add_argument("--memory", action="store_true", help="peak memory instead of times")
    parser.add_argument("--check", action="store_true", help="compare the losses instead of the times")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, to compare steps with instead")
    parser.add_argument("--alone", choices=("stock", "xscale"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.warm = max(args.warm, 1)  # torch counts the stock loop's FLOPs in the first step
    use_allocator("default" if args.memory or args.alone else args.allocator)
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        if not args.data:
            _, pairs = text_pairs(None)
            pool = list(islice(with_words(pairs, args.words) if args.words else pairs, 500 if args.check else PAIRS))
            words_of_several_tokens = 1000
            vocab_size = words_of_several_tokens if args.check else args.vocab_size or 32_768
            args.data = write_world(pool, vocab_size, Path(folder) / "world")
        if args.before:
            compare_checkouts(args, Path(folder))
            return
        args.samples = args.samples or (args.stock_micro_batch if args.check else 128)
        if args.memory:
            peak_memory(args.recipes, args.data, [argument for argument in sys.argv[1:] if argument != "--memory"])
            return
        if args.check:
            sys.exit(not check(args.recipes, args.data, args))
        ranks.join_process_group(ranks.read_launcher())
        if args.alone:
            alone(args.alone, args.recipes[0], args.data, args)
        else:
            model = f"preset {args.preset}, vocabulary {args.vocab_size:,}"
            print(f"{model}, {torch.get_num_threads()} threads, malloc: {args.allocator}; {args.data[0]}")
            for recipe in args.recipes:
                measure(recipe, args.data, args)
                gc.collect()  # engines are cycles
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
