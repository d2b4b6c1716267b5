"""Compare optimizer steps of xscale with a stock loop, Hugging Face models on DeepSpeed ZeRO-2.

    python benchmarks/step.py [--recipes tlm alignlm ...] [--data DIR ...] [--rounds 4]
    python benchmarks/step.py --before DIR [--recipes ...]  against train.py of another checkout of xscale

Both loops train the same model from the same weights on the same samples in each optimizer step, with the same
ds_config, and take turns in one process. The stock loop is what an ordinary user writes: micro-batches in random order,
padded to their longest sequence, logits at all positions, AlignLM's links as a dense matrix. The data of the stock
loop are prepared before its clock starts; xscale prepares its data in its steps. Prints samples/s, the ratio of
each loop's speed to that of the stock loop (median, and the middle 80 % of the rounds), the ratio that the numbers of
FLOPs allow, the MFU on a GPU, and the losses of the last step.
With --before, train.py of both checkouts trains 8 steps after --warm steps in each round.
On a CPU, malloc keeps freed memory for both loops (xscale/ranks.py). The stock loop with its large logits gains most.
"""

import argparse
import copy
import gc
import os
import random
import tempfile
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import DataCollatorForLanguageModeling
from transformers.utils import logging as transformers_logging

from xscale.data.link_projection import parse_pharaoh
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.words import split_words_and_symbols
from xscale.models.encoder import HEADS
from xscale.record import Record
from xscale.run.resolve import build_initial_module
from xscale.step import engine
from xscale.step.ds_config import Hardware, read_and_resolve_ds_config
from xscale.step.metrics import stream_metrics

PAIRS = 4000
STEPS_OF_A_RUN = 8
"""--before: the steps of a run that count."""
DS_CONFIG = common.ROOT / f"ds_configs/zero2_{'fp16' if common.CUDA else 'cpu'}.json"

for direction in ("", "_backward"):  # torch counts attention on CUDA only
    cpu_attention = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{direction}")
    cuda_attention = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{direction}")
    flop_registry[cpu_attention] = flop_registry[cuda_attention]


# The stock objectives. Shape letters: B sequences, L tokens of the longest.


class Tlm(nn.Module):
    """A model with the objective of the loader's only stream."""

    def __init__(self, lm: Any, loader: Loader):
        super().__init__()
        self.lm = lm
        self.options: Any = loader.last_streams[0].options
        self.tokenizer = loader.corpus.tokenizer.hf
        self.max_length = loader.recipe.data.max_length
        self.collator = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=self.options.mask_prob)
        self.train()

    def example(self, pair: Record) -> dict[str, Any]:
        return {"input_ids": self.tokenizer(*pair.texts, truncation=True, max_length=self.max_length)["input_ids"]}

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(self.collator([{"input_ids": example["input_ids"]} for example in examples]))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.lm(**batch).loss


class AlignLm(Tlm):
    """AlignLM: the paper's formulas (3)-(11) at all positions, H* = A^T H with A [B, L, L]."""

    def __init__(self, lm: Any, loader: Loader):
        super().__init__(lm, loader)
        self.head = HEADS[lm.config.model_type]
        self.W2, self.linear = (nn.Linear(lm.config.hidden_size, lm.config.hidden_size) for _ in range(2))
        self.W3 = copy.deepcopy(self.head(lm).dense)
        for layer in (self.W2, self.linear):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def example(self, pair: Record) -> dict[str, Any]:
        words = [split_words_and_symbols([text])[0][0] for text in pair.texts]  # links count a sentence's marks too
        encoding = self.tokenizer(*words, is_split_into_words=True, truncation=True, max_length=self.max_length)
        tokens_of = defaultdict(list)
        for token, word in enumerate(zip(encoding.sequence_ids(0), encoding.word_ids(0), strict=True)):
            tokens_of[word].append(token)
        links: list[tuple[int, int]] = []
        for a, b in parse_pharaoh(pair.links or "", (len(words[0]), len(words[1]))):
            links += product(tokens_of[0, a], tokens_of[1, b])
        return {"input_ids": encoding["input_ids"], "links": links}

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        B, L = batch["input_ids"].shape
        batch["A"] = torch.zeros(B, L, L)
        for b, example in enumerate(examples):
            for i, j in example["links"]:
                batch["A"][b, i, j] = batch["A"][b, j, i] = 1
        return batch

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        A = batch["A"]
        labels = batch["labels"]
        W1, GELU, LN = self.head(self.lm)
        W = self.lm.get_output_embeddings()
        H = self.lm.base_model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        H_star = torch.bmm(A.to(H.dtype).transpose(1, 2), H)
        mono = W(LN(self.linear(GELU(W1(H)))))
        bi = W(LN(self.linear(GELU(self.W3(self.W2(H_star))))))
        linked = labels.where(A.any(1), -100)
        L_mp = F.cross_entropy(mono.flatten(0, 1), labels.flatten())
        L_bp = F.cross_entropy(bi.flatten(0, 1), linked.flatten(), reduction="sum") / (labels >= 0).sum()
        return L_mp + self.options.bilingual_weight * L_bp


STOCK: dict[str, type[Tlm]] = {"tlm": Tlm, "alignlm": AlignLm}
"""Recipe -> the part of the stock loop that computes its loss."""


# The two loops


class XscaleLoop:
    """xscale's own optimizer step. Reading and tokenising are part of it."""

    def __init__(self, loader: Loader):
        self.loader = loader
        self.name = f"xscale, rows of {loader.max_tokens(common.DEVICE):,}"
        self.seconds: list[float] = []
        self.engine = common.RecipeEngine(loader, DS_CONFIG)
        steps = loader.recipe.train.steps
        self.batches = loader.batches(common.ALONE, common.DEVICE, initial_state(loader.last_streams), steps)

    def step(self) -> None:
        started = common.now()
        batch = next(self.batches)
        result = self.engine.train(batch)
        self.seconds.append(common.now() - started)
        self.needed_flops = self.engine.flops(batch)
        metrics = stream_metrics(result.sums.by_key(), batch.counts_without_languages(), self.loader.recipe)
        self.loss = metrics[f"loss/{self.loader.last_streams[0].name}"]


class StockLoop:
    """Micro-batches of Hugging Face's model, whose data are prepared before the clock starts."""

    def __init__(self, recipe: str, loader: Loader, micro_batch: int):
        self.loader = loader
        self.micro_batch = micro_batch
        self.name = f"stock, micro-batch {micro_batch}"
        self.seconds: list[float] = []
        self.mixture = loader.mixture(common.ALONE, "cpu", initial_state(loader.last_streams))
        self.mixture.max_tokens = 1 << 40  # a step has one packed row, with all samples as they were drawn
        lm = build_initial_module(loader.recipe, loader.corpus).encoder.lm
        lm.set_attn_implementation("sdpa")  # Hugging Face's own
        passes = -(-loader.last_streams[0].samples // micro_batch)
        config = read_and_resolve_ds_config(DS_CONFIG, loader.recipe, common.ALONE.world, Hardware.of_this_process())
        self.precision = config.precision
        fields = config.resolved | {"gradient_accumulation_steps": passes, "train_batch_size": passes}
        self.module = STOCK[recipe](lm, loader)
        self.engine = engine.build_engine(self.module, fields)

    def prepared(self) -> list[dict[str, Tensor]]:
        """Return the micro-batches of the next step."""
        (drawn,) = self.mixture.next_plan_of_rank().tables.values()
        examples = []
        for source, shard, record in zip(drawn.source, drawn.shard, drawn.record, strict=True):
            pair = self.loader.corpus.sources[source].read(int(shard), int(record))
            examples.append(self.module.example(pair))
        starts = range(0, len(examples), self.micro_batch)
        return [self.module.collate(examples[start : start + self.micro_batch]) for start in starts]

    def step(self) -> None:
        micro_batches = self.prepared()
        started = common.now()
        losses = []
        for batch in micro_batches:
            loss = self.engine({key: tensor.to(self.engine.device) for key, tensor in batch.items()})
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        self.seconds.append(common.now() - started)
        self.loss = float(sum(losses)) / len(losses)


def compare_with_stock(recipe: str, args: argparse.Namespace) -> None:
    fields = {"data.workers": 0} | common.step_fields(recipe, args.preset, args.set)
    fields |= {"train.steps": args.warm + args.rounds, f"streams.{recipe}.samples": args.samples}
    stock = StockLoop(recipe, common.make_loader(recipe, fields, args.data), args.stock_micro_batch)
    ours = XscaleLoop(common.make_loader(recipe, fields, args.data))
    with FlopCounterMode(display=False) as counter:
        stock.step()
    ours.step()
    turns = random.Random(0)
    loops: list[StockLoop | XscaleLoop] = [stock, ours]
    for _ in range(args.warm + args.rounds - 1):
        for loop in turns.sample(loops, len(loops)):
            loop.step()
    peak = ours.engine.formula.peak
    flops_computed = {stock: counter.get_total_flops(), ours: ours.needed_flops}
    rows = []
    for loop in loops:
        counted = loop.seconds[args.warm :]
        seconds = median(counted)
        cells = [loop.name, f"{args.samples / seconds:,.1f}", *common.ratio_cells(stock.seconds[args.warm :], counted)]
        cells.append(f"{flops_computed[stock] / flops_computed[loop]:.2f}")
        cells.append(f"{ours.needed_flops / seconds / peak:.1%}" if peak else "")
        rows.append([*cells, f"{loop.loss:.3f}"])
    ids = stock.loader.corpus.tokenizer.vocab_size
    title = f"{recipe}, preset {args.preset}, {ids:,} ids, steps of {args.samples} samples, {stock.precision}"
    common.print_table(title, ["", "samples/s", "ratio", "middle 80 %", "FLOPs allow", "MFU", "loss"], rows)


def compare_checkouts(args: argparse.Namespace, folder: Path) -> None:
    """Compare steps of the checkout --before with steps of this checkout, for each recipe."""
    rows = []
    for recipe in args.recipes:
        fields = {"data.workers": 0} | common.step_fields(recipe, args.preset, args.set)
        fields |= {"train.steps": args.warm + STEPS_OF_A_RUN, "train.measure_every": 0}
        sets = [f"{name}={value}" for name, value in fields.items()]
        times: dict[str, list[float]] = {"before": [], "now": []}
        turns = random.Random(0)
        for number in range(args.rounds):
            for name in turns.sample([*times], 2):
                checkout = args.before.resolve() if name == "before" else common.ROOT
                out = folder / f"{recipe}.{number}.{name}"
                steps = common.train_run(checkout, recipe, DS_CONFIG, args.data, out, sets)
                times[name].append(median(step["step_s"] for step in steps[args.warm :]))
        milliseconds = [f"{1e3 * median(seconds):,.0f}" for seconds in times.values()]
        rows.append([recipe, *milliseconds, *common.ratio_cells(times["before"], times["now"])])
        print(*rows[-1], sep="  ", flush=True)
    title = f"Steps of train.py, preset {args.preset}, {args.threads} threads, {args.rounds} rounds"
    common.print_table(title, ["", "before, ms", "now, ms", "ratio", "middle 80 %"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--recipes",
        nargs="+",
        action="extend",
        help="the recipes to measure: tlm, alignlm or both; with --before, any recipes (default: tlm alignlm)",
    )
    add("--data", type=Path, nargs="+", action="extend", help="folders of shards (default: the demo corpus)")
    add("--preset", default="mini", help="the architecture, a value of model.preset (default: mini)")
    add(
        "--vocab_size",
        type=int,
        default=32_768,
        help="minimum size of the vocabulary, with the demo corpus (default: 32768)",
    )
    add("--stock_micro_batch", type=int, default=32, help="samples of a micro-batch of the stock loop (default: 32)")
    add(
        "--samples",
        type=int,
        default=128,
        help="samples of a step (default: 128); --before uses those of the recipe instead",
    )
    add(
        "--rounds",
        type=int,
        default=4,
        help="timed optimizer steps of each loop; with --before, runs of each checkout (default: 4)",
    )
    add("--warm", type=int, default=2, help="optimizer steps before the timed ones, 1 or more (default: 2)")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="recipe fields, such as data.workers=2",
    )
    add("--threads", type=int, default=2, help="the number of threads of torch (default: 2)")
    add("--before", type=Path, metavar="DIR",
        help="compare this checkout with the checkout in DIR, and not with the stock loop")  # fmt: skip
    args = parser.parse_args()
    args.recipes = args.recipes or ["tlm", "alignlm"]
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the runs of --before
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        if not args.data:
            args.data = common.demo_data(Path(folder) / "demo", PAIRS, args.vocab_size)
        args.data = [path.resolve() for path in args.data]
        if args.before:
            compare_checkouts(args, Path(folder))
            return
        with common.one_rank():
            for recipe in args.recipes:
                compare_with_stock(recipe, args)
                gc.collect()  # engines are cycles


if __name__ == "__main__":
    main()
