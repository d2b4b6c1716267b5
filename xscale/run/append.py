"""With `--data_change append`, a restarted run takes in new sources, or further shards of a source.

A source that the run already had continues with its next record. A new source begins with epoch 0. New shards of a
source become a separate source, which is listed after the source of the old shards.
"""

import argparse
from dataclasses import replace
from typing import Any

from xscale.checkpoint.store import Checkpoint
from xscale.data.calibration import Calibration
from xscale.errors import UserError
from xscale.run import folder, fork
from xscale.run.run_spec import RunSpec


def known_sources(args: argparse.Namespace) -> frozenset[str]:
    """Return the fingerprints of the sources that the run read before this start; for a new fork, those of the parent
    run's sources. The set is empty without --data_change. args: the arguments of train.py."""
    if not args.data_change:
        return frozenset()
    saved = folder.read_identity(args.out)
    if saved is None and args.fork:
        saved = fork.find_parent(args.fork).identity
    return frozenset(fingerprints(saved)) if saved else frozenset()


def fingerprints(identity: dict[str, Any]) -> list[str]:
    return [entry["fingerprint"] for entry in identity["data"]]


def with_new_sources(checkpoint: Checkpoint, run_spec: RunSpec) -> Checkpoint:
    """Return the checkpoint with a position in each source of the run. Sources that the checkpoint lacks begin at
    record 0. Raises UserError if `check` does."""
    before, now = fingerprints(checkpoint.identity), [source.fingerprint for source in run_spec.sources]
    if before == now:
        return checkpoint
    check(before, run_spec)
    state = checkpoint.state
    positions, sources_at_start = {}, {}
    for spec in run_spec.specs:
        own = sorted((now[source] for source in spec.sources if now[source] in before), key=before.index)
        old = dict(zip(own, state["positions"][spec.name], strict=True))
        positions[spec.name] = [old.get(now[source], [0, 0]) for source in spec.sources]
        sources_at_start[spec.name] = len(own)
    state = {"sources_at_start": sources_at_start} | state | {"positions": positions, "appended_at": state["step"]}
    return replace(checkpoint, manifest=checkpoint.manifest | {"state": state})


def check(before: list[str], run_spec: RunSpec) -> None:
    """Check that the recipe and the model allow sources to be added. Raises UserError."""
    if run_spec.recipe.data.first:
        raise UserError(
            "--data_change append: a run with data.first cannot take in more data, as data.first limits the number of "
            "records of a language in old and new data together; start a new run without data.first"
        )
    had = {language for source in run_spec.sources if source.fingerprint in before for language in source.langs}
    new = [language for language in run_spec.languages if language not in had]
    if new and run_spec.any_stream("language_embeddings"):
        raise UserError(
            f"--data_change append: the model has no language embedding for {', '.join(new)}, which only the "
            f"new data has; leave this data out, or start a new run with model.init, which adds language embeddings"
        )


def merged_calibration(checkpoint: Checkpoint, old: Calibration, fresh: Calibration, run_spec: RunSpec) -> Calibration:
    """Return a calibration of all sources. Streams and old sources keep the estimates of `old`, since the order of
    running text and the content of packed rows depend on them; new sources have those of `fresh`."""
    lines = dict(zip(fingerprints(checkpoint.identity), old.lines, strict=True))
    of_all = zip(run_spec.sources, fresh.lines, strict=True)
    return replace(old, lines=[lines.get(source.fingerprint, line) for source, line in of_all])
