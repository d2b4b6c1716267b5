"""What --dry_run prints."""

import argparse
from pathlib import Path

import yaml

from xscale.data.sample import texts_of
from xscale.data.tokenizer import unknown_lines
from xscale.ranks import Control, Process
from xscale.run import folder
from xscale.run.evals import check_tasks, rehearse_best
from xscale.run.forecast import forecast
from xscale.run.job import Job, prepare
from xscale.run.start import calibration, check_engine
from xscale.step import cost
from xscale.step.ds_config import EngineConfig, Hardware, load_ds_config, read_ds_config
from xscale.step.engine import check_module

UNKNOWN_SAMPLE = 1024
"""Records of each language in which a dry run looks for unknown tokens."""


def dry_run(args: argparse.Namespace, process: Process) -> None:
    """Resolve and check all that a start of train.py would, and print it. args: train.py's. Raises UserError."""
    if args.ranks:
        process = Process(0, args.ranks, 0, args.ranks)
    job = prepare(args.recipe, args.set, args.data)
    folder.claim_out(args.out, job.identity(), args.resume)
    checkpoint = folder.find_checkpoint(args.out, args.resume, job.identity(), Control())
    hardware = planned_hardware(args.ds_config) if args.ranks else Hardware.here()
    config = load_ds_config(args.ds_config, job.recipe, process.world, hardware)
    check_engine(checkpoint, config)
    check_tasks(job, config.stage)
    print(*config.notes, *job.notes(), sep="\n")
    describe(job.calibrated(calibration(job, checkpoint, Control())), config, process, hardware.device, args.out)
    print(f"out: {args.out}, " + (f"going on from step {checkpoint.step}" if checkpoint else "a new run"))


def planned_hardware(ds_config: Path) -> Hardware:
    """Of another machine: GPUs, for a ds_config that asks for half precision; else one like this."""
    here, asked = Hardware.here(), read_ds_config(ds_config)
    return here if here.device == "cuda" or not {"fp16", "bf16"} & asked.keys() else Hardware("cuda", True, True)


def describe(job: Job, config: EngineConfig, process: Process, device: str, out: Path) -> None:
    module = job.module()
    check_module(module, config.stage)
    rehearse_best(job, module)
    parameters = sum(p.numel() for p in module.parameters())
    print(yaml.safe_dump(job.recipe.to_dict(), sort_keys=False, allow_unicode=True))
    print("ds_config:", yaml.safe_dump(config.resolved, sort_keys=False))
    for source in job.sources:
        print(
            f"data: {source.pair} ({source.kind}) {source.records:,} records, {len(source.shards)} shards, "
            f"{source.bytes / 1e6:,.1f} MB, {source.directory}"
        )
    path, unknown = job.tokenizer.hf.name_or_path, {}
    for language in job.languages:
        texts = [text for some in texts_of(language, job.sources, UNKNOWN_SAMPLE) for text in some]
        unknown[language] = job.tokenizer.unknown(job.tokenizer.encode(texts))
    print(f"tokenizer: {path}, {job.tokenizer.vocab_size:,} ids", *unknown_lines(unknown, path), sep="\n")
    for spec in job.specs:
        print(
            f"stream {spec.name}: {spec.samples} samples a step from {job.records(spec):,} records of "
            f"{', '.join(dict.fromkeys(job.sources[s].pair for s in spec.sources))}"
        )
    print(*(f"{line}\n" for line in [*job.dropped().values(), *job.shortfalls()]), sep="", end="")
    print(*(f"heads: {note}\n" for note in module.notes), sep="", end="")
    rows, shape = job.fit(process, device)
    print(
        f"ranks: {process.world} of {device}; a step is {rows} row(s) of about {shape.tokens:,} tokens on each, "
        f"train.max_tokens {job.max_tokens(device):,}; precision: {config.precision}"
    )
    samples = sum(spec.samples for spec in job.specs)
    if samples < process.world:
        print(f"warning: a step has {samples:,} samples: {process.world - samples:,} ranks have nothing to do")
    print(f"parameters: {parameters:,} (vocabulary {job.tokenizer.vocab_size:,})")
    print(cost.estimate(module, job.recipe, config.resolved, config.precision, process.world, device, shape.tokens))
    print(*forecast(job, module, config, process.world, rows, out), sep="\n")
