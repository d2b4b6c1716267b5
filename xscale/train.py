"""Train one encoder on a recipe: `deepspeed xscale/train.py --ds_config ds_configs/zero2_fp16.json --recipe xlm`.

Exit codes: 0 done, 2 user error, 75 saved and stopped early on a signal or time limit (start again to go on).
"""

import sys
from pathlib import Path

# A launcher puts xscale/ itself first on sys.path, where our module names would hide others'.
if Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import contextlib
import fcntl
import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import yaml

from xscale import checkpoint as checkpoints
from xscale import config, cost, distributed, engine, rng
from xscale.checkpoint import Checkpoint
from xscale.config import Recipe
from xscale.data import loader as loading
from xscale.data.collate import Context
from xscale.data.encode import TextEncoder
from xscale.data.index import Source, find_sources
from xscale.data.lexicon import Lexicon, check_order, load_lexicon, pair_of
from xscale.data.loader import StepBatch, StepDataset, StreamCollate
from xscale.data.mixture import Mixture, StreamSpec, initial_state, micro_steps, positions_report
from xscale.distributed import Control, Place
from xscale.errors import UserError
from xscale.metrics import LINE_SECONDS, LOG, JsonLines, Reporter, start_logging
from xscale.models.encoder import Encoder, build_encoder
from xscale.objectives import OBJECTIVES, Prefilled

EXIT_USER_ERROR, EXIT_STOPPED = 2, 75
DEMO = Path("data/demo")
LOCK_SECONDS = 20
"""How long a start waits for the run before it to be gone; a killed launcher may leave ranks for a while."""
FLUSH_SECONDS = 1.0
"""Metrics are read from the device this often at most, since reading waits for it."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", type=Path, required=True, help="DeepSpeed JSON, e.g. ds_configs/zero2_fp16.json")
    parser.add_argument("--recipe", default="mixed", help="name of a shipped recipe, or a YAML file (default: mixed)")
    parser.add_argument("--data", type=Path, nargs="+", help="shard directories (default: the generated demo corpus)")
    parser.add_argument("--out", type=Path, help="the run's directory (default: runs/<recipe>)")
    parser.add_argument(
        "--resume", default="auto", help="auto (newest valid checkpoint in --out), never, or a directory"
    )
    parser.add_argument("--steps", type=int, help="short for --set train.steps=N")
    parser.add_argument("--seed", type=int, help="short for --set train.seed=N")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY.SUB=VALUE", help="recipe fields")
    parser.add_argument("--dry_run", action="store_true", help="resolve, validate and print everything; train nothing")
    parser.add_argument("--trace", action="store_true", help="write the keys of every consumed record")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.set += [f"train.{name}={getattr(args, name)}" for name in ("steps", "seed") if getattr(args, name) is not None]
    args.out = args.out or Path("runs") / Path(args.recipe).stem
    return args


@dataclass(frozen=True)
class Job:
    """Everything that is known before any weight exists."""

    recipe: Recipe
    sources: list[Source]
    text: TextEncoder
    specs: list[StreamSpec]
    tokens_per_byte: list[float]
    languages: list[str]
    lexicons: tuple[Lexicon, ...]

    def identity(self) -> dict[str, Any]:
        """What a resume must not change."""
        data = [{"source": source.name, "fingerprint": source.fingerprint} for source in self.sources]
        lexicons = {lexicon.name: lexicon.fingerprint for lexicon in self.lexicons}
        return {
            "recipe": self.recipe.identity(),
            "data": data,
            "tokenizer": self.text.fingerprint,
            "lexicons": lexicons,
        }

    def micro_steps(self, world: int) -> int:
        return sum(micro_steps(spec, self.recipe.train.micro_batch, world) for spec in self.specs)

    def encoder(self) -> Encoder:
        model = self.recipe.model
        return build_encoder(
            init=model.init,
            preset=model.preset,
            dropout=model.dropout,
            max_length=self.recipe.data.max_length,
            vocab_size=self.text.vocab_size,
            pad_id=self.text.pad_id,
            languages=self.languages,
            language_embeddings=self.any_stream("language_embeddings"),
            reset_positions=self.any_stream("reset_positions"),
            seed=self.recipe.train.seed,
        )

    def any_stream(self, option: str) -> bool:
        return any(getattr(stream.options, option, False) for stream in self.recipe.streams.values())

    def batches(
        self, place: Place, state: dict[str, Any], steps: int, specs: list[StreamSpec] | None = None
    ) -> Iterator[StepBatch]:
        """specs: other draws than the recipe's; `tlm.NAME` is made of stream tlm's records, in an order of its own."""
        recipe, specs = self.recipe, specs or self.specs
        mixture = Mixture(
            specs,
            self.sources,
            self.tokens_per_byte,
            seed=recipe.train.seed,
            alpha=recipe.data.alpha,
            max_length=recipe.data.max_length,
            micro_batch=recipe.train.micro_batch,
            rank=place.rank,
            world=place.world,
            state=state,
        )
        language_ids = {language: number for number, language in enumerate(self.languages)}
        context = Context(
            self.text, recipe.data.max_length, recipe.data.overlong, language_ids, recipe.train.seed, self.lexicons
        )
        collates = {}
        for spec in specs:
            stream = recipe.streams.get(spec.name) or recipe.streams[spec.name.rpartition(".")[0]]
            objective = OBJECTIVES[stream.objective]
            collates[spec.name] = StreamCollate(objective.collate, stream.options, objective.words(stream.options))
        dataset = StepDataset(self.sources, collates, context, recipe.train.seed)
        return loading.step_batches(mixture, dataset, recipe.data.workers, steps)


def prepare(args: argparse.Namespace) -> Job:
    """Resolve and validate recipe, data and tokenizer. Raises UserError."""
    recipe = config.load_recipe(args.recipe, args.set, {name: o.options for name, o in OBJECTIVES.items()})
    sources = find_sources(args.data)
    for source in sources:
        source.check_sizes()
    streams = {n: (OBJECTIVES[s.objective].reads, s.languages, s.samples) for n, s in recipe.streams.items()}
    specs = loading.stream_specs(streams, sources)
    text = TextEncoder(find_tokenizer(recipe, args.data[0]))
    tokens_per_byte = [loading.source_statistics(source, text) for source in sources]
    languages = sorted({language for source in sources for language in source.langs})
    lexicons = load_lexicons(recipe, text, sources, args.data[0])
    check_needs(recipe, specs, sources, lexicons)
    return Job(recipe, sources, text, specs, tokens_per_byte, languages, lexicons)


def load_lexicons(recipe: Recipe, text: TextEncoder, sources: list[Source], data: Path) -> tuple[Lexicon, ...]:
    """In the order of their names. Raises UserError where one is missing, malformed or the wrong way round."""
    needed = any(OBJECTIVES[stream.objective].needs == "lexicon" for stream in recipe.streams.values())
    paths = [Path(path) for path in recipe.data.lexicons] or (find_lexicons(sources, data) if needed else [])
    lexicons = []
    for path in paths:
        lexicon = load_lexicon(path, text)
        check_order(lexicon, path, sources)
        lexicons.append(lexicon)
    return tuple(sorted(lexicons, key=lambda lexicon: (lexicon.name, lexicon.fingerprint)))


def find_lexicons(sources: list[Source], data: Path) -> list[Path]:
    """Dictionaries in `lexicon/` in `data` or its parent whose pair --data has; one of en-de and de-en, the first."""
    languages = {language for source in sources for language in source.langs}
    for folder in (data, data.resolve().parent):
        found: dict[frozenset[str], Path] = {}
        for path in sorted((folder / "lexicon").glob("*.txt")):
            with contextlib.suppress(UserError):  # a name that says no pair
                pair = frozenset(pair_of(path))
                if pair <= languages:
                    found.setdefault(pair, path)
        if found:
            return list(found.values())
    return []


def check_needs(recipe: Recipe, specs: list[StreamSpec], sources: list[Source], lexicons: tuple[Lexicon, ...]) -> None:
    """Raises UserError where an objective lacks its dictionary or word links, or its options do not fit the stream."""
    for spec in specs:
        stream = recipe.streams[spec.name]
        objective = OBJECTIVES[stream.objective]
        problem = objective.check(stream.options, spec.samples)
        if problem:
            raise UserError(f"streams.{spec.name}.{problem}")
        needs = objective.needs
        if needs == "lexicon" and not lexicons:
            raise UserError(
                f"streams.{spec.name} needs a dictionary: set data.lexicons=[PATH/en-de.txt], or put it into "
                f"lexicon/ beside the shards"
            )
        for source in (sources[s] for s in spec.sources):
            if needs == "links" and source.read(0, 0).links is None:
                raise UserError(
                    f"streams.{spec.name} needs word links; {source.directory} has none. Write it again with "
                    f"`python -m data_tools.write_shards pairs ... --links F` or `--align`"
                )


def find_tokenizer(recipe: Recipe, data: Path) -> str:
    if recipe.model.tokenizer:
        return recipe.model.tokenizer
    for folder in (data, data.resolve().parent):
        if (folder / "tokenizer").is_dir():
            return str(folder / "tokenizer")
    if recipe.model.init:
        return recipe.model.init
    raise UserError(
        f"no tokenizer/ in {data} or its parent. Train one with `python -m data_tools.tokenizer --data {data} --out "
        f"{data / 'tokenizer'}`, or set model.tokenizer"
    )


def claim_out(out: Path, identity: dict[str, Any], resume: str) -> None:
    """Make `out` this run's directory. Raises UserError where it belongs to another run. Rank 0 only."""
    path = out / "identity.json"
    if path.exists():
        if resume == "never":
            raise UserError(f"{out} already holds a run; --resume auto goes on with it, or choose another --out")
        differences = compare(json.loads(path.read_text()), identity)
        if differences:
            raise UserError(
                f"{out} belongs to another run; go on with what it was started with, or choose another --out:\n"
                + "\n".join(f"  {line}" for line in differences)
            )
    elif any((out / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
        raise UserError(f"{out} holds something that is not an xscale run (no identity.json); choose another --out")


def lock_out(out: Path) -> Any:
    """A lock on the run's directory that lives as long as the file returned. Raises UserError where another has it."""
    file = (out / "lock").open("a+")
    for _ in range(LOCK_SECONDS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(1)
        except OSError:
            return file  # a file system without locks
    else:
        file.seek(0)
        raise UserError(f"{out} is being trained by another process ({file.read().strip()}); stop it first")
    file.truncate(0)
    file.write(f"host {os.uname().nodename}, process {os.getpid()}")
    file.flush()
    return file


def compare(saved: Any, current: Any, where: str = "") -> list[str]:
    """Lines `field: was X, is now Y` for every difference of two trees."""
    if isinstance(saved, dict) and isinstance(current, dict):
        keys = [*saved, *(key for key in current if key not in saved)]
        return [
            line for k in keys for line in compare(saved.get(k), current.get(k), f"{where}.{k}" if where else str(k))
        ]
    return [] if saved == current else [f"{where}: was {saved}, is now {current}"]


def find_checkpoint(args: argparse.Namespace, job: Job, place: Place, control: Control) -> Checkpoint | None:
    """The checkpoint to start from, or None. Raises UserError where the run it belongs to differs."""
    if args.resume == "never":
        return None
    if args.resume == "auto":
        found = checkpoints.newest_valid(args.out / "checkpoints", place, control, LOG.warning)
        if found is None and checkpoints.complete_steps(args.out / "checkpoints"):
            raise UserError(f"no checkpoint in {args.out / 'checkpoints'} is usable; remove them to start again")
    else:
        path = Path(args.resume)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        if (folder / checkpoints.MANIFEST).exists():
            problem = checkpoints.verify(folder, place, control)
            if problem:
                raise UserError(f"checkpoint {folder} is not usable: {problem}")
            found = checkpoints.read(folder)
        else:
            found = checkpoints.newest_valid(folder, place, control, LOG.warning)
        if found is None:
            raise UserError(f"--resume {args.resume}: no complete checkpoint there")
    differences = compare(found.manifest["identity"], job.identity()) if found else []
    if found and differences:
        raise UserError(
            f"checkpoint {found.path} was made with other settings:\n" + "\n".join(f"  {line}" for line in differences)
        )
    return found


def dry_run(job: Job, ds_config: dict[str, Any], precision: str, place: Place) -> None:
    encoder = job.encoder()
    parameters = sum(p.numel() for p in encoder.parameters())
    print(yaml.safe_dump(job.recipe.to_dict(), sort_keys=False, allow_unicode=True))
    print("ds_config:", yaml.safe_dump(ds_config, sort_keys=False))
    for source in job.sources:
        print(
            f"data: {source.name} ({source.kind}) {source.records:,} records, {len(source.shards)} shards, "
            f"{source.bytes / 1e6:,.1f} MB, {source.directory}"
        )
    for lexicon in job.lexicons:
        print(lexicon.summary())
    for spec in job.specs:
        available = sum(job.sources[s].records for s in spec.sources)
        print(
            f"stream {spec.name}: {spec.samples} samples a step from {available:,} records of "
            f"{', '.join(job.sources[s].name for s in spec.sources)}"
        )
    print(
        f"ranks: {place.world}, micro-steps per rank and step: {job.micro_steps(place.world)}, precision: {precision}"
    )
    print(f"parameters: {parameters:,} (vocabulary {job.text.vocab_size:,})")
    print(cost.estimate(encoder, job.recipe, ds_config, precision, place.world))


class StopRequest:
    """Set by a signal or the time limit; read at step boundaries."""

    def __init__(self, minutes: float | None):
        self.reason = ""
        self.deadline = time.monotonic() + 60 * minutes if minutes is not None else None
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name

    def __bool__(self) -> bool:
        if not self.reason and self.deadline is not None and time.monotonic() >= self.deadline:
            self.reason = "time limit"
        return bool(self.reason)


class Trainer:
    """The loop and what it keeps between steps."""

    def __init__(self, args: argparse.Namespace, job: Job, place: Place, control: Control, stop: StopRequest):
        self.args, self.job, self.place, self.control, self.stop = args, job, place, control, stop
        self.recipe = job.recipe
        self.folder = args.out / "checkpoints"
        self.pending: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []
        self.last_flush = time.monotonic()

    def run(self) -> int:
        args, recipe, place, control = self.args, self.recipe, self.place, self.control
        hardware = engine.Hardware.here()
        ds_config, precision, notes = engine.resolve_ds_config(
            engine.read_ds_config(args.ds_config),
            args.ds_config,
            recipe,
            self.job.micro_steps(place.world),
            place.world,
            hardware,
        )
        for note in [*notes, *(lexicon.summary() for lexicon in self.job.lexicons)]:
            LOG.info(note)
        checkpoint = find_checkpoint(args, self.job, place, control)
        first = checkpoint.step if checkpoint else 0
        if first >= recipe.train.steps:
            LOG.info(f"{args.out} is complete: {first} of {recipe.train.steps} steps")
            return 0
        self.saved = checkpoint.step if checkpoint else None
        self.write_config(ds_config)
        state = checkpoint.manifest["state"] if checkpoint else initial_state(self.job.specs)
        batches = self.job.batches(place, state, recipe.train.steps - first)
        rescale = checkpoint is not None and checkpoint.manifest["world_size"] != place.world
        if rescale:
            ds_config["checkpoint"] = ds_config.get("checkpoint", {}) | {"load_universal": True}
        self.engine = engine.build_engine(engine.StepModule(self.job.encoder(), recipe), ds_config)
        if checkpoint:
            checkpoints.load(self.engine, checkpoint, place, control)
            for name, companion_state in checkpoints.companions(checkpoint).items():
                self.engine.module.companions[name].load_state_dict(companion_state)
            LOG.info(
                f"resumed from {checkpoint.path}: step {first}; "
                + "; ".join(positions_report(checkpoint.manifest["state"], self.job.specs, self.job.sources))
            )
        parameters = sum(p.numel() for p in self.engine.module.parameters())
        LOG.info(
            f"training {parameters:,} parameters in {precision} on {place.world} rank(s) of {hardware.device}, "
            f"ZeRO stage {self.engine.zero_optimization_stage()}, steps {first} to {recipe.train.steps}"
        )
        self.reporter = Reporter(args.out, first, recipe.train.steps, list(recipe.streams)) if place.is_main else None
        trace = args.out / "trace" / f"rank{place.rank}.jsonl" if args.trace else None
        self.trace = JsonLines(trace, first)
        self.flops = cost.StepFlops(self.engine.module.encoder)
        if not checkpoint:
            self.prefill()
            self.save(0, state, must=True)  # a run that cannot save fails now, not after a day
        try:
            return self.loop(batches, first, state)
        finally:
            if self.reporter:
                self.reporter.close()

    def prefill(self) -> None:
        """Companions that start from samples read them in an order of their own, which uses up none of the stream."""
        for name, companion in self.engine.module.companions.items():
            if not isinstance(companion, Prefilled) or not companion.prefill_samples:
                continue
            spec = next(spec for spec in self.job.specs if spec.name == name)
            spec = replace(spec, name=f"{name}.prefill")
            wanted, have, said = companion.prefill_samples, 0, time.monotonic()
            LOG.info(f"{name}: reading {wanted:,} samples with the initial weights before step 1")
            for batch in self.job.batches(self.place, initial_state([spec]), 2 * -(-wanted // spec.samples), [spec]):
                for number, micro in enumerate(batch.micros):
                    place = (batch.step, number, self.place.rank)
                    torch.manual_seed(rng.torch_seed(self.recipe.train.seed, "prefill", name, *place))
                    companion.prefill(engine.to_device(micro.arrays, self.engine.device))
                have = companion.finish_prefill()
                if time.monotonic() - said > LINE_SECONDS:
                    said = time.monotonic()
                    LOG.info(f"{name}: {have:,} of {wanted:,} samples read")
                if have >= wanted:
                    break
            if have < wanted:
                LOG.warning(f"{name}: only {have:,} of {wanted:,}; more than half of what was read is over max_length")

    def loop(self, batches: Iterator[StepBatch], first: int, state: dict[str, Any]) -> int:
        recipe, place = self.recipe, self.place
        too_long = 0
        for step in range(first, recipe.train.steps):
            started = time.monotonic()
            batch = next(batches)
            waited = time.monotonic() - started
            assert batch.step == step, (batch.step, step)
            targets = batch.targets()
            flush = place.is_main and started - self.last_flush >= FLUSH_SECONDS
            totals = [batch.total(name) for name in ("tokens", "sequences", "too_long")]
            *counts, tokens, sequences, long, stopping, flushing = self.control.sum(
                [*targets.values(), *totals, int(bool(self.stop)), int(flush)]
            )
            if stopping:
                return self.stop_early(step, state)
            global_targets = dict(zip(targets, counts, strict=True))
            lr, skipped = self.engine.get_lr()[0], self.engine.skipped_steps
            sums = engine.optimizer_step(
                self.engine, recipe, batch.micros, global_targets, step=step, rank=place.rank, world=place.world
            )
            entry: dict[str, Any] = {"step": step + 1, "lr": lr, "skipped": self.engine.skipped_steps - skipped}
            entry |= {f"count/{stream}": count for (stream, _), count in reversed(global_targets.items())}
            entry |= {"tokens": tokens, "samples": sequences, "too_long": long, "data_wait_s": waited}
            if self.engine.fp16_enabled():
                entry["loss_scale"] = float(self.engine.optimizer.cur_scale)
            norm = self.engine.get_global_grad_norm()
            if norm is not None:
                entry["grad_norm"] = norm
            entry["step_s"] = time.monotonic() - started
            self.pending.append((entry, sums))
            self.trace_step(step + 1, batch)
            state, too_long = batch.state, too_long + long
            last = step + 1 == recipe.train.steps
            if flushing or last or (step + 1) % recipe.checkpoint.every == 0:
                self.flush()
            if last or (step + 1) % recipe.checkpoint.every == 0:
                self.save(step + 1, state, must=last)
        if too_long:
            LOG.info(f"{too_long:,} sentences or pairs were over data.max_length ({recipe.data.overlong})")
        LOG.info(f"done: {recipe.train.steps} steps, {self.args.out}")
        return 0

    def stop_early(self, step: int, state: dict[str, Any]) -> int:
        self.flush()
        self.save(step, state, must=True)
        LOG.info(f"stopped at step {step} ({self.stop.reason or 'another rank was told to'}); start again to go on")
        return EXIT_STOPPED

    def save(self, step: int, state: dict[str, Any], must: bool) -> None:
        if self.reporter:
            self.reporter.flush(to_disk=True)
        self.trace.flush(to_disk=True)
        if step == self.saved:
            return
        started = time.monotonic()
        path = checkpoints.save(
            self.engine, self.folder, step, self.job.identity(), state, self.write_more, self.place, self.control
        )
        if path is None:
            message = f"no disk space for a checkpoint in {self.folder}; free some"
            if must:
                raise UserError(message + " and start again from the newest one")
            LOG.error(message + "; training goes on, older checkpoints are untouched")
            return
        if self.place.is_main:
            checkpoints.clean(self.folder, self.recipe.checkpoint.keep)
        self.saved = step
        LOG.info(f"saved {path} in {time.monotonic() - started:.1f} s")

    def write_more(self, path: Path) -> None:
        """What belongs to a checkpoint beside DeepSpeed's files. Rank 0 only."""
        self.engine.module.encoder.lm.config.save_pretrained(path / checkpoints.HF)
        self.job.text.tokenizer.save_pretrained(path / checkpoints.HF)
        companions = self.engine.module.companions
        if companions:
            states = {name: companion.state_dict() for name, companion in companions.items()}
            torch.save(states, path / checkpoints.COMPANIONS)

    def flush(self) -> None:
        """Read pending sums from the device, add them up over ranks, and report. All ranks call it together."""
        self.last_flush = time.monotonic()
        if not self.pending:
            return
        names = sorted(self.pending[0][1])
        table = torch.stack([torch.stack([sums[name] for name in names]) for _, sums in self.pending])
        dist.all_reduce(table)
        for (entry, _), row in zip(self.pending, table.tolist(), strict=True):
            values = dict(zip(names, row, strict=True))
            loss = sum(stream.weight * values[f"loss/{name}"] for name, stream in self.recipe.streams.items())
            seconds = max(entry["step_s"], 1e-9)
            entry = {"step": entry.pop("step"), "loss": loss} | values | entry
            entry["grad_norm"] = float(entry["grad_norm"]) if "grad_norm" in entry else None
            entry |= {"tokens_per_s": entry["tokens"] / seconds, "samples_per_s": entry["samples"] / seconds}
            entry |= self.flops.metrics(entry, self.place.world)
            if self.reporter:
                self.reporter.report(entry)
        self.pending.clear()
        if self.reporter:
            self.reporter.flush()

    def trace_step(self, step: int, batch: StepBatch) -> None:
        if self.args.trace:
            for stream, keys in batch.keys().items():
                self.trace.write({"step": step, "stream": stream, "keys": keys})

    def write_config(self, ds_config: dict[str, Any]) -> None:
        if self.place.is_main:
            out = self.args.out
            (out / "config.yaml").write_text(
                yaml.safe_dump(self.recipe.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8"
            )
            (out / "ds_config.json").write_text(engine.dump(ds_config), encoding="utf-8")
            (out / "identity.json").write_text(engine.dump(self.job.identity()), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    place = distributed.find_place()
    try:
        return train(args, place)
    except UserError as error:
        # Most mistakes are seen by every rank; one message a node is enough, unless this rank alone is in trouble.
        if place.local_rank == 0 or dist.is_initialized():
            where = f"[rank {place.rank}] " if place.world > 1 else ""
            print(f"{where}error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 130


def train(args: argparse.Namespace, place: Place) -> int:
    if args.dry_run and not place.is_main:
        return 0
    given = args.data is not None
    if not given:
        args.data = [DEMO]
        if place.local_rank == 0 and not DEMO.exists():
            from data_tools import demo_corpus

            print(f"no --data given: generating the demo corpus in {DEMO}", flush=True)
            demo_corpus.build(DEMO)
    if args.dry_run:
        job = prepare(args)
        resolved, precision, notes = engine.resolve_ds_config(
            engine.read_ds_config(args.ds_config),
            args.ds_config,
            job.recipe,
            job.micro_steps(place.world),
            place.world,
            engine.Hardware.here(),
        )
        print(*notes, sep="\n")
        dry_run(job, resolved, precision, place)
        return 0
    distributed.start(place)
    control = Control()
    job = prepare(args)
    stop = StopRequest(job.recipe.train.time_limit)
    problem = None
    if place.is_main:
        try:
            claim_out(args.out, job.identity(), args.resume)
            args.out.mkdir(parents=True, exist_ok=True)
            lock = lock_out(args.out)  # noqa: F841  held until this process ends
            start_logging(args.out)
        except UserError as error:
            problem = str(error)
    problem = control.gather(problem)[0]
    if problem:
        raise UserError(problem)
    code = Trainer(args, job, place, control, stop).run()
    control.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code not in (0, EXIT_STOPPED) else sys.exit(code)
