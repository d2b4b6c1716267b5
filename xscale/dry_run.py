"""`train.py --dry_run` makes all checks of a start, and prints what the run will read and need."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import yaml

from xscale.data.corpus import Corpus
from xscale.data.loader import Loader, StepBatch, batch_or_raise_failure, worker_count
from xscale.data.mixture import initial_state
from xscale.data.packed_row import Tokens
from xscale.errors import redact
from xscale.eval.alignment_score import gather_probe_words_on_rank_0
from xscale.models.encoder import Encoder
from xscale.ranks import CpuGroup, Process
from xscale.run import run_status
from xscale.run.describe import (
    dropped_pairs_warnings,
    folder_or_url_of_source,
    language_share_lines,
    unlisted_shards_warnings,
)
from xscale.run.resolve import build_initial_module, fit_rows_into_gpu_memory
from xscale.run.resume import find_starting_checkpoint, restore_or_measure_calibration
from xscale.run.start import resolve_and_check_run
from xscale.step import cost
from xscale.step.ds_config import EngineConfig, Hardware, read_ds_config
from xscale.step.engine import check_objectives_support_stage
from xscale.step.module import StepModule

PLANNED_MEMORY = 80 << 30
"""The bytes of memory of the GPUs for which a dry run with --ranks plans on a machine without a GPU."""

MEASURED_TOKENS = 1024
"""The number of tokens with which the speed of a CPU is measured."""
UPDATE_SECONDS = 1e-8
"""The seconds in which a CPU updates one weight and computes the norm of the gradient."""


def dry_run(args: argparse.Namespace, process: Process) -> None:
    """Print what the run will do. args: the arguments of train.py. Raises UserError if the run could not start."""
    if args.ranks:
        process = Process(0, args.ranks, 0, args.ranks)
    hardware = hardware_or_planned_gpu(args.ds_config) if args.ranks else Hardware.of_this_process()
    run = resolve_and_check_run(args, process, hardware, CpuGroup())
    run_status.check_folder_is_free_or_own(args.out, run.identity, args.resume)
    checkpoint = find_starting_checkpoint(args, run.recipe, run.corpus, run.identity, run.config, CpuGroup())
    print(*run.notes, sep="\n")
    module = build_initial_module(run.recipe, run.corpus)
    calibration = restore_or_measure_calibration(run.recipe, run.corpus, checkpoint, CpuGroup())
    loader = Loader(run.recipe, run.corpus, calibration)
    loader = fit_rows_into_gpu_memory(loader, module, run.config, hardware.memory, CpuGroup(), print)
    check_objectives_support_stage(module, run.config.stage)
    print(
        redact(yaml.safe_dump(run.recipe.to_dict(), sort_keys=False, allow_unicode=True)),
        "ds_config: " + yaml.safe_dump(run.config.resolved, sort_keys=False),
        *source_and_tokenizer_lines(run.corpus),
        *language_share_lines(loader),
        *dropped_pairs_warnings(loader),
        *unlisted_shards_warnings(run.corpus),
        sep="\n",
    )
    if run.recipe.train.measure_every and (run.corpus.lexicons or run.corpus.measured):
        gather_probe_words_on_rank_0(run.corpus, CpuGroup(), lambda _: None)  # warns of unsuitable dictionaries
    print(*measure_loading_and_estimate_memory(loader, module, run.config, process, hardware.device), sep="\n")
    print(
        f"--out {args.out}: "
        + (f"the run would continue from step {checkpoint.step}" if checkpoint else "a new run would begin")
    )


def hardware_or_planned_gpu(ds_config: Path) -> Hardware:
    """Return the hardware to plan for: this machine's, or a planned GPU if it has no GPU but the ds_config needs 16
    bits."""
    here = Hardware.of_this_process()
    if here.device == "cuda" or not {"fp16", "bf16"} & read_ds_config(ds_config).keys():
        return here
    return Hardware("cuda", True, True, PLANNED_MEMORY)


def source_and_tokenizer_lines(corpus: Corpus) -> Iterator[str]:
    """Yield a line about each source, and one about the tokenizer."""
    for source in corpus.sources:
        yield (
            f"{source.sorted_langs_name} ({source.kind}): records {source.records:,}, shards {len(source.shards):,}, "
            f"{sum(shard.bytes for shard in source.shards) / 1e6:,.1f} MB, fingerprint {source.fingerprint[:12]}, "
            f"{folder_or_url_of_source(source)}"
        )
    tokenizer = corpus.tokenizer
    yield (
        f"tokenizer: {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint[:12]}, "
        f"{tokenizer.hf.name_or_path}"
    )


def measure_loading_and_estimate_memory(
    loader: Loader, module: StepModule, config: EngineConfig, process: Process, device: str
) -> Iterator[str]:
    """Yield lines about the packed rows of a step, the loader, the parameters, and the memory of a rank. The data of a
    rank's first two steps are loaded for them."""
    mixture = loader.mixture(process, device, initial_state(loader.last_streams))
    dataset = loader.dataset()
    plan = mixture.next_plan()
    first = batch_or_raise_failure(dataset[plan.parts_of_ranks([process.rank])[0]])
    row_tokens = int(plan.row_tokens.max())
    yield (
        f"ranks: {process.world} on {device}, precision {config.precision}; a step has about "
        f"{plan.row_tokens.sum():,.0f} tokens; each rank does {plan.rows} forward pass(es) per step, of up to "
        f"{row_tokens:,} tokens (train.max_tokens {loader.max_tokens(device):,})"
    )
    begin = time.perf_counter()
    second = batch_or_raise_failure(dataset[mixture.next_plan_of_rank()])
    speed = second.cost()["tokens"] / (time.perf_counter() - begin)
    workers = worker_count(loader.recipe.data.workers, process, device)
    yield (
        f"data loading: one process prepares about {speed:,.0f} tokens/s; all processes of a rank together "
        f"(data.workers: {workers}) prepare {speed * (workers or 1):,.0f} tokens/s"
    )
    yield (
        f"parameters: {cost.parameter_count(module):,}, with a vocabulary of "
        f"{loader.corpus.tokenizer.vocab_size:,} tokens"
    )
    largest = max((row.cost for row in first.rows), key=lambda row: row["tokens"])
    memory = cost.peak_bytes_by_purpose(
        module, loader.recipe, config.resolved, config.precision, process.world, device, largest
    )
    purposes = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in memory.items())
    yield f"memory per rank with ZeRO stage {config.stage}: about {sum(memory.values()) / 1e9:.2f} GB ({purposes})"
    if device == "cpu":
        yield cpu_seconds_line(module, first, process.world)
    size = 16 * cost.parameter_count(module) + module.auxiliary_bytes()
    yield f"size of a checkpoint: at most {size / 1e9:,.2f} GB"


def cpu_seconds_line(module: StepModule, batch: StepBatch, world: int) -> str:
    """Return a line with the estimated duration of a step on this machine's CPU. batch: one rank's part of the step.
    world: the number of ranks."""
    flops = cost.StepFlops(module.encoder, bool(module.streams_with_vectors()))
    flops_of_rank = sum(flops.flops_by_purpose(batch.cost(), world * len(batch.rows)).values())
    seconds = flops_of_rank / measure_flops_per_second(module.encoder, flops, batch.rows[0].tokens)
    seconds += UPDATE_SECONDS * cost.parameter_count(module)
    return f"duration of a step: about {seconds:,.1f} s on this CPU with {torch.get_num_threads()} thread(s)"


def measure_flops_per_second(encoder: Encoder, flops: cost.StepFlops, tokens: Tokens) -> float:
    """Return the FLOP/s of this CPU in a forward and backward pass of the encoder. The pass reads the first sequences
    of a packed row, which have about MEASURED_TOKENS tokens together. tokens: those of the row, as numpy arrays."""
    sequences = int(np.searchsorted(tokens.starts, MEASURED_TOKENS).clip(1, len(tokens.lengths)))
    count = int(tokens.starts[sequences])
    lengths = tokens.lengths[:sequences]
    measured = Tokens(
        input_ids=torch.from_numpy(tokens.input_ids[:count]),
        positions=torch.from_numpy(tokens.positions[:count]),
        types=None if tokens.types is None else torch.from_numpy(tokens.types[:count]),
        starts=torch.from_numpy(tokens.starts[: sequences + 1]),
        lengths=torch.from_numpy(lengths),
        longest=tokens.longest,
    )
    times = list[float]()
    for _ in range(2):  # the first pass also allocates memory
        begin = time.perf_counter()
        encoder(measured).sum().backward()
        times.append(time.perf_counter() - begin)
    return flops.encoder_training_flops(count, count, int((lengths**2).sum())) / min(times)
