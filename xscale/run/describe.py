"""What --dry_run prints."""

import argparse
from pathlib import Path

import yaml

from xscale.data.sample import texts_of
from xscale.data.tokenizer import unknown_lines
from xscale.ranks import HostGroup, Process
from xscale.run import folder
from xscale.run.evals import check_tasks, validate_best
from xscale.run.forecast import forecast
from xscale.run.run_spec import RunSpec, resolve_run
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
    run_spec = resolve_run(args.recipe, args.set, args.data)
    folder.claim_out(args.out, run_spec.identity(), args.resume)
    checkpoint = folder.find_checkpoint(args.out, args.resume, run_spec.identity(), HostGroup())
    hardware = planned_hardware(args.ds_config) if args.ranks else Hardware.here()
    config = load_ds_config(args.ds_config, run_spec.recipe, process.world, hardware)
    check_engine(checkpoint, config)
    check_tasks(run_spec, config.stage)
    print(*config.notes, *run_spec.notes(), sep="\n")
    describe(
        run_spec.calibrated(calibration(run_spec, checkpoint, HostGroup())), config, process, hardware.device, args.out
    )
    print(f"out: {args.out}, " + (f"going on from step {checkpoint.step}" if checkpoint else "a new run"))


def planned_hardware(ds_config: Path) -> Hardware:
    """Of another machine: GPUs, for a ds_config that asks for half precision; else one like this."""
    here, asked = Hardware.here(), read_ds_config(ds_config)
    return here if here.device == "cuda" or not {"fp16", "bf16"} & asked.keys() else Hardware("cuda", True, True)


def describe(run_spec: RunSpec, config: EngineConfig, process: Process, device: str, out: Path) -> None:
    module = run_spec.module()
    check_module(module, config.stage)
    validate_best(run_spec, module)
    parameters = sum(p.numel() for p in module.parameters())
    print(yaml.safe_dump(run_spec.recipe.to_dict(), sort_keys=False, allow_unicode=True))
    print("ds_config:", yaml.safe_dump(config.resolved, sort_keys=False))
    for source in run_spec.sources:
        print(
            f"data: {source.pair} ({source.kind}) {source.records:,} records, {len(source.shards)} shards, "
            f"{source.bytes / 1e6:,.1f} MB, {source.directory}"
        )
    path, unknown = run_spec.tokenizer.hf.name_or_path, {}
    for language in run_spec.languages:
        texts = [text for some in texts_of(language, run_spec.sources, UNKNOWN_SAMPLE) for text in some]
        unknown[language] = run_spec.tokenizer.unknown(run_spec.tokenizer.encode(texts))
    print(f"tokenizer: {path}, {run_spec.tokenizer.vocab_size:,} ids", *unknown_lines(unknown, path), sep="\n")
    for spec in run_spec.specs:
        print(
            f"stream {spec.name}: {spec.samples} samples a step from {run_spec.records(spec):,} records of "
            f"{', '.join(dict.fromkeys(run_spec.sources[s].pair for s in spec.sources))}"
        )
    print(*(f"{line}\n" for line in [*run_spec.dropped().values(), *run_spec.shortfalls()]), sep="", end="")
    print(*(f"heads: {note}\n" for note in module.notes), sep="", end="")
    rows, shape = run_spec.fit(process, device)
    print(
        f"ranks: {process.world} of {device}; a step is {rows} row(s) of about {shape.tokens:,} tokens on each, "
        f"train.max_tokens {run_spec.max_tokens(device):,}; precision: {config.precision}"
    )
    samples = sum(spec.samples for spec in run_spec.specs)
    if samples < process.world:
        print(f"warning: a step has {samples:,} samples: {process.world - samples:,} ranks have nothing to do")
    print(f"parameters: {parameters:,} (vocabulary {run_spec.tokenizer.vocab_size:,})")
    print(
        cost.estimate(module, run_spec.recipe, config.resolved, config.precision, process.world, device, shape.tokens)
    )
    print(*forecast(run_spec, module, config, process.world, rows, out), sep="\n")
