"""A TLM optimizer step of xscale against the stock loop, Hugging Face masked LM on DeepSpeed ZeRO-2.

    python benchmarks/step.py [--data DIR] [--rounds 8] [--micro_batches 16 32 64] [--allocator steady|default]

Both train the same model (preset mini, vocabulary 32,768) from the same weights on the same pairs in each optimizer
step (256), with the same ds_config, and take turns in one process. The stock loop is what `Trainer` does: tokenised
beforehand, micro-batches of 32 in random order, padded to their longest, DataCollatorForLanguageModeling,
AutoModelForMaskedLM with labels. xscale reads, tokenises, masks and collates as it goes. Prints
  1. pairs/s, the ratio to the stock loop (medians, and the range over rounds), and the ratio that FLOPs allow
  2. where a step's time goes, in ms; ZeRO-2 reduces gradients while the backward pass runs
--data: a directory of pair shards with a tokenizer/ (default: made from the demo world). --allocator steady, the
default, sets glibc's malloc to keep freed memory; both loops gain, and page faults blur the comparison without it.
"""

import argparse
import os
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import print_table, text_pairs, use_allocator, write_pairs, write_tokenizer
from transformers import DataCollatorForLanguageModeling
from transformers.utils import logging as transformers_logging

from xscale import distributed, engine
from xscale.data.mixture import Mixture, initial_state
from xscale.distributed import Place
from xscale.errors import UserError
from xscale.job import Job, prepare
from xscale.sample import Record

STOCK_MICRO_BATCH, VOCAB_SIZE, MAX_LENGTH = 32, 32_768, 128
DS_CONFIGS = Path(__file__).parent.parent / "ds_configs"
PARTS = ("data", "encoder forward", "head forward", "head backward", "encoder backward, reduce", "optimizer")


class Stopwatch:
    """Seconds of each part of a step, told by hooks: `part(name)` closes the part that ran until now."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = 0.0

    def start(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.last = now()

    def part(self, name: str) -> None:
        moment = now()
        self.seconds[name] += moment - self.last
        self.last = moment

    def watch(self, deepspeed_engine: Any, base_model: torch.nn.Module) -> None:
        def after_encoder(module: Any, inputs: Any, output: Any) -> None:
            self.part("encoder forward")
            output.last_hidden_state.register_hook(lambda gradient: self.part("head backward"))

        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.part("head forward")
            original_backward(loss, *args, **kwargs)
            self.part("encoder backward, reduce")

        def step(*args: Any, **kwargs: Any) -> None:
            original_step(*args, **kwargs)
            self.part("optimizer")

        base_model.register_forward_pre_hook(lambda module, inputs: self.part("data"))
        base_model.register_forward_hook(after_encoder)
        original_backward, original_step = deepspeed_engine.backward, deepspeed_engine.step
        deepspeed_engine.backward, deepspeed_engine.step = backward, step


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Loop:
    """What the two loops share: the job, the ds_config, a clock, and a count of what was computed."""

    def __init__(self, job: Job, ds_config: Path):
        self.job, self.recipe = job, job.recipe
        given, micro_steps, here = engine.read_ds_config(ds_config), job.micro_steps(1), engine.Hardware.here()
        resolved = engine.resolve_ds_config(given, ds_config, job.recipe, micro_steps, 1, here)
        self.ds_config, self.precision, _ = resolved
        self.encoder = job.encoder()
        self.watch = Stopwatch()
        self.seconds: list[float] = []
        self.parts: list[dict[str, float]] = []
        self.flops: list[float] = []
        self.padding: list[float] = []
        self.loss = 0.0

    def start(self, module: torch.nn.Module) -> None:
        self.engine = engine.build_engine(module, self.ds_config)
        self.watch.watch(self.engine, self.encoder.lm.base_model)

    def timed_step(self) -> None:
        self.watch.start()
        started = self.watch.last
        self.step()
        self.seconds.append(now() - started)
        self.parts.append(self.watch.seconds)

    def step(self) -> None:
        raise NotImplementedError

    def count(self, shapes: list[tuple[int, int, int, int]]) -> None:
        """shapes: (sequences, tokens of the longest, rows through the head, tokens without padding) of micro-batches"""
        self.flops.append(sum(micro_flops(self.encoder.lm.config, *shape[:3]) for shape in shapes))
        self.padding.append(1 - sum(shape[3] for shape in shapes) / sum(shape[0] * shape[1] for shape in shapes))


class XscaleLoop(Loop):
    def __init__(self, job: Job, ds_config: Path):
        super().__init__(job, ds_config)
        self.name = f"xscale, micro-batch {job.recipe.train.micro_batch}"
        self.start(engine.StepModule(self.encoder, job.recipe))
        self.batches = job.batches(Place(0, 1, 0, 1), initial_state(job.specs), job.recipe.train.steps)

    def step(self) -> None:
        batch = next(self.batches)
        sums = engine.optimizer_step(
            self.engine, self.recipe, batch.micros, batch.targets(), step=batch.step, rank=0, world=1
        )
        self.loss = float(sums["loss/tlm"])
        self.count([(*m.arrays["input_ids"].shape, len(m.arrays["rows"]), m.tokens) for m in batch.micros])


class StockLoop(Loop):
    def __init__(self, job: Job, ds_config: Path):
        super().__init__(job, ds_config)
        self.name = f"stock, micro-batch {job.recipe.train.micro_batch}"
        self.start(self.encoder.lm)  # AutoModelForMaskedLM.from_config
        self.collator = DataCollatorForLanguageModeling(job.text.tokenizer, mlm=True, mlm_probability=0.15)
        self.tokenised = [
            [self.tokenise(source.read(shard, record)) for record in range(source.counts[shard])]
            for source in job.sources
            for shard in range(len(source.shards))
        ]
        self.draws = self.global_batches()

    def tokenise(self, record: Record) -> dict[str, list[int]]:
        return self.job.text.tokenizer(
            *record.texts,
            truncation=True,
            max_length=self.recipe.data.max_length,
            return_special_tokens_mask=True,
            return_token_type_ids=False,
        ).data

    def global_batches(self) -> Iterator[list[dict[str, list[int]]]]:
        """The pairs of each optimizer step, in the random order of the draw."""
        job, train = self.job, self.recipe.train
        options: dict[str, Any] = {"seed": train.seed, "alpha": self.recipe.data.alpha, "max_length": MAX_LENGTH}
        options |= {"micro_batch": samples_of(job), "rank": 0, "world": 1, "state": initial_state(job.specs)}
        for plan in Mixture(job.specs, job.sources, job.tokens_per_byte, **options):
            (draw,) = plan.micros["tlm"]
            by_sample = draw.sample.argsort()
            places = zip(draw.shard[by_sample], draw.record[by_sample], strict=True)
            yield [self.tokenised[shard][record] for shard, record in places]

    def step(self) -> None:
        pairs = next(self.draws)
        losses, shapes = [], []
        for start in range(0, len(pairs), STOCK_MICRO_BATCH):
            batch = self.collator(pairs[start : start + STOCK_MICRO_BATCH])
            batch = {name: tensor.to(self.engine.device) for name, tensor in batch.items()}
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
            shape = tuple(batch["input_ids"].shape)
            shapes.append((*shape, shape[0] * shape[1], int(batch["attention_mask"].sum())))
        self.loss = float(torch.stack(losses).mean())
        self.count(shapes)


def micro_flops(model: Any, sequences: int, longest: int, rows: int) -> float:
    """Forward and backward of a micro-batch: 6 a weight and token (12 H^2 weights a layer), 12 H L a layer for
    attention's products, and the head's H^2 + H V weights for each row that it is computed on."""
    h, layers = model.hidden_size, model.num_hidden_layers
    assert model.intermediate_size == 4 * h
    per_token = layers * (6 * 12 * h * h + 12 * h * longest)
    return per_token * sequences * longest + 6 * (h * h + h * model.vocab_size) * rows


def make_data(folder: Path) -> Path:
    langs, pairs = text_pairs(None)
    pool = list(islice(pairs, 20_000))
    write_tokenizer(pool, VOCAB_SIZE, folder / "tokenizer")
    return write_pairs(pool, langs, folder / "pairs", len(pool)).directory


def make_job(data: Path, samples: int, micro_batch: int, steps: int) -> Job:
    fields = {"model.preset": "mini", "streams.tlm.samples": samples, "data.max_length": MAX_LENGTH, "data.workers": 0}
    fields |= {"data.overlong": "truncate", "train.micro_batch": micro_batch, "train.steps": steps}
    sets = [f"{key}={value}" for key, value in fields.items()]
    job = prepare("tlm", sets, [data])
    if len(job.sources) != 1:
        raise UserError(f"--data {data} holds {len(job.sources)} sources; give the directory of one")
    if job.text.vocab_size > VOCAB_SIZE:
        raise UserError(f"the tokenizer of {data} has {job.text.vocab_size:,} ids, more than {VOCAB_SIZE:,}")
    job.text.vocab_size = VOCAB_SIZE  # of the model
    return job


def samples_of(job: Job) -> int:
    return sum(spec.samples for spec in job.specs)


def report(loops: list[Loop], warm: int) -> None:
    stock, samples = loops[0], samples_of(loops[0].job)
    header = ["", "pairs/s", "ratio", "range", "FLOPs allow", "padding", "TFLOP", "TFLOP/s", "loss"]
    rows, parts = [], []
    for loop in loops:
        seconds = loop.seconds[warm:]
        ratios = sorted(a / b for a, b in zip(stock.seconds[warm:], seconds, strict=True))
        flops = median(loop.flops[warm:])
        rows.append(
            [
                loop.name,
                f"{samples / median(seconds):,.1f}",
                f"{median(stock.seconds[warm:]) / median(seconds):.2f}",
                f"{ratios[0]:.2f}-{ratios[-1]:.2f}",
                f"{median(stock.flops[warm:]) / flops:.2f}",
                f"{median(loop.padding[warm:]):.0%}",
                f"{flops / 1e12:.3f}",
                f"{flops / 1e12 / median(seconds):.3f}",
                f"{loop.loss:.3f}",
            ]
        )
        middle = [median(each[name] for each in loop.parts[warm:]) for name in PARTS]
        parts.append([loop.name, *(f"{1e3 * value:.0f}" for value in [*middle, median(seconds)])])
    title = f"1. Optimizer steps of {samples} pairs, {loops[0].precision}, {torch.get_num_threads()} threads"
    print_table(f"{title}, {len(stock.seconds) - warm} rounds", header, rows)
    print_table("2. Where a step's time goes, ms", ["", *PARTS, "step"], parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a directory of pair shards")
    parser.add_argument("--ds_config", type=Path, default=DS_CONFIGS / "zero2_cpu.json")
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[16, 32, 64], help="of xscale")
    parser.add_argument("--samples", type=int, default=256, help="pairs of an optimizer step")
    parser.add_argument("--rounds", type=int, default=8, help="optimizer steps of each loop that count")
    parser.add_argument("--warm", type=int, default=2, help="optimizer steps of each loop before those")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allocator", choices=("steady", "default"), default="steady")
    args = parser.parse_args()
    use_allocator(args.allocator)
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
    distributed.start(distributed.find_place())
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        data = args.data or make_data(Path(folder))
        steps = args.rounds + args.warm
        kinds = [(StockLoop, STOCK_MICRO_BATCH), *((XscaleLoop, size) for size in args.micro_batches)]
        jobs = [make_job(data, args.samples, size, steps) for _, size in kinds]
        loops: list[Loop] = [kind(job, args.ds_config) for (kind, _), job in zip(kinds, jobs, strict=True)]
        parameters = sum(p.numel() for p in loops[0].engine.module.parameters())
        print(f"{parameters:,} parameters, vocabulary {VOCAB_SIZE:,}; {data}; malloc: {args.allocator}")
        turns = random.Random(0)
        for _ in range(steps):
            for loop in turns.sample(loops, len(loops)):
                loop.timed_step()
        report(loops, args.warm)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
