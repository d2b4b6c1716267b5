"""`train.py --dry_run` makes all checks of a start, and prints what the run will read and need."""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from xscale import files
from xscale.data.corpus import Corpus, identity_of
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.sample import texts_of
from xscale.data.tokenizer import unknown_lines
from xscale.errors import UserError, redact
from xscale.eval.in_training import review_tasks
from xscale.ranks import HostGroup, Process
from xscale.run import folder
from xscale.run.describe import dropped_pairs_warnings, share_lines, start_notes
from xscale.run.going_on import check_engine, find_checkpoint, resume_calibration, with_other_data
from xscale.run.resolve import module_of_run, resolve_run
from xscale.step import cost
from xscale.step.ds_config import EngineConfig, Hardware, load_ds_config, read_ds_config
from xscale.step.engine import check_module
from xscale.step.module import StepModule

UNKNOWN_SAMPLE = 1024
"""The number of records of each language in which unknown tokens are counted."""


def dry_run(args: argparse.Namespace, process: Process) -> None:
    """Print what the run will do. args: the arguments of train.py. Raises UserError if the run could not start."""
    if args.ranks:
        process = Process(0, args.ranks, 0, args.ranks)
    recipe, corpus = resolve_run(args.recipe, args.set, args.data)
    identity = identity_of(recipe, corpus)
    folder.check_out(args.out, identity, args.resume)
    checkpoint = find_checkpoint(args, identity, HostGroup())
    checkpoint = checkpoint and with_other_data(checkpoint, recipe, corpus)
    hardware = planned_hardware(args.ds_config) if args.ranks else Hardware.here()
    config = load_ds_config(args.ds_config, recipe, process.world, hardware)
    check_engine(checkpoint, config)
    review_tasks(recipe, corpus, config.stage, HostGroup())
    print(*config.notes, *start_notes(recipe, corpus), sep="\n")
    loader = Loader(recipe, corpus, resume_calibration(recipe, corpus, checkpoint, HostGroup()))
    module = module_of_run(recipe, corpus)
    check_module(module, config.stage)
    print(redact(yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)))
    print("ds_config:", yaml.safe_dump(config.resolved, sort_keys=False))
    print(*data_lines(corpus), *unknown_tokens(corpus), *share_lines(loader), *dropped_pairs_warnings(loader), sep="\n")
    print(*module.notes, *need_lines(loader, module, config, process, hardware.device), sep="\n")
    if not args.ranks:
        check_disk(cost.checkpoint_bytes(module, config.resolved, config.precision), args.out)
    print(f"out: {args.out}, " + (f"going on from step {checkpoint.step}" if checkpoint else "a new run"))


def planned_hardware(ds_config: Path) -> Hardware:
    """Return the hardware to plan for: this machine's, or GPUs if it has none but the ds_config needs 16 bits."""
    here = Hardware.here()
    if here.device == "cuda" or not {"fp16", "bf16"} & read_ds_config(ds_config).keys():
        return here
    return Hardware("cuda", True, True)


def data_lines(corpus: Corpus) -> Iterator[str]:
    for source in corpus.sources:
        yield (
            f"{source.pair} ({source.kind}): {source.records:,} records in {len(source.shards):,} shards, "
            f"{source.bytes / 1e6:,.1f} MB, fingerprint {source.fingerprint[:12]}, "
            f"{redact(source.remote.url) if source.remote else source.directory}"
        )
    tokenizer = corpus.tokenizer
    name = tokenizer.hf.name_or_path
    yield f"tokenizer: {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint[:12]}, {name}"


def unknown_tokens(corpus: Corpus) -> list[str]:
    """Return lines about the share of unknown tokens in each language, with a warning if it is large."""
    shares = {}
    for language in corpus.languages:
        texts = list[str]()
        for some in texts_of(language, corpus.sources, UNKNOWN_SAMPLE):
            texts += some
        shares[language] = corpus.tokenizer.unknown_share(corpus.tokenizer.encode(texts))
    return unknown_lines(shares, corpus.tokenizer.hf.name_or_path)


def need_lines(
    loader: Loader, module: StepModule, config: EngineConfig, process: Process, device: str
) -> Iterator[str]:
    """Yield lines about the packed rows of a step, the parameters, and the memory of a rank and of a checkpoint."""
    plan = loader.mixture(process, device, initial_state(loader.streams)).next_plan()
    row_tokens = int(plan.row_tokens.max())
    yield (
        f"ranks: {process.world} of {device}; a step has about {plan.row_tokens.sum():,.0f} tokens, in {plan.rows} "
        f"row(s) of up to {row_tokens:,} on each rank, train.max_tokens {loader.max_tokens(device):,}; "
        f"precision: {config.precision}"
    )
    samples = sum(stream.samples for stream in loader.streams)
    if samples < process.world:
        yield f"warning: a step has {samples:,} samples: {process.world - samples:,} ranks have nothing to do"
    yield f"parameters: {cost.parameter_count(module):,} (vocabulary {loader.corpus.tokenizer.vocab_size:,})"
    memory = cost.memory(module, loader.recipe, config.resolved, config.precision, process.world, device, row_tokens)
    purposes = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in memory.items())
    yield f"memory per rank, ZeRO stage {config.stage}: about {sum(memory.values()) / 1e9:.2f} GB: {purposes}"
    yield f"checkpoint: {cost.checkpoint_bytes(module, config.resolved, config.precision) / 1e9:,.2f} GB"


def check_disk(size: float, out: Path) -> None:
    """Raise UserError if the disk of --out lacks space for a checkpoint. size: the checkpoint's bytes."""
    place = files.nearest_existing(out)
    if place.is_dir() and size > shutil.disk_usage(place).free:
        free = shutil.disk_usage(place).free
        raise UserError(
            f"--out {out} has {free / 1e9:,.2f} GB free, but a checkpoint needs {size / 1e9:,.2f} GB; free some space, "
            f"or choose another place"
        )
