"""A run ends when its loss or its gradient is not finite. Under fp16, a few skipped steps are normal."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from xscale.checkpoint.manager import CheckpointManager
from xscale.data.loader import StepBatch
from xscale.errors import NotFinite
from xscale.recipe import Recipe
from xscale.run.state import RunContext

NOT_FINITE = "not_finite.jsonl"
"""The file that names the records of a step whose loss or gradient is not finite, with one line for each rank."""
MOST_SKIPPED = 100
"""A run fails if fp16 skips this many steps in a row. Fewer are normal while fp16 looks for a loss scale: 32 halvings
lead from 2^32 to 1."""


class FiniteCheck:
    """Checks the losses and the gradient of every step before a checkpoint has the step."""

    def __init__(self, context: RunContext, recipe: Recipe, manager: CheckpointManager):
        self.context = context
        self.recipe = recipe
        self.manager = manager
        self.fp16: bool = manager.engine.fp16_enabled()
        self.skipped_in_a_row = 0
        """The number of steps, up to the newest one that was checked, that fp16 has skipped without a break."""

    def check(self, entry: dict[str, Any], batch: StepBatch, finite: bool) -> None:
        """Raise NotFinite on all ranks if a step's losses or its gradient are not finite. fp16 may skip fewer than
        MOST_SKIPPED consecutive steps. entry: the step's line of metrics.jsonl. finite: whether this rank's own losses
        are finite."""
        number = entry["step"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if entry["skipped"] else 0
        in_a_row = self.skipped_in_a_row
        if self.fp16 and 0 < in_a_row < MOST_SKIPPED:
            return
        streams = [name for name in self.recipe.streams if not math.isfinite(entry.get(f"loss/{name}", 0))]
        norm = entry["grad_norm"] or 0.0
        what = ""
        if streams:
            what = f"the loss of {', '.join(streams)}"
        elif not math.isfinite(norm):
            what = f"the gradient's norm ({norm:g})"
        elif in_a_row:
            what = f"fp16's gradient for {in_a_row} steps in a row (loss scale {entry.get('loss_scale'):g})"
        if what:
            self.end_run(number, what, batch, finite)

    def end_without_scale(self, number: int, error: NotFinite, batch: StepBatch) -> NoReturn:
        """Raise NotFinite for a step in which fp16 had no smaller loss scale left. All ranks call it."""
        self.skipped_in_a_row += 1
        self.end_run(number, f"the gradient ({error})", batch, finite=True)

    def end_run(self, number: int, what: str, batch: StepBatch, finite: bool) -> NoReturn:
        """Write the step's records to not_finite.jsonl, and raise. finite: whether this rank's losses are finite."""
        path = self.write_records(number, what, batch, finite)
        newest = self.manager.good
        good = "none was saved" if newest is None else f"the newest good checkpoint is of step {newest}"
        # Steps that fp16 skipped have changed nothing, so the update before them has done the damage.
        bad = number - self.skipped_in_a_row if self.fp16 else number
        raise NotFinite(
            f"step {number}: {what} is not finite; {good}, in {self.manager.folder}. {path} names the records. "
            f"Continue from that checkpoint without the step (--resume DIR --set train.skip_steps=[{bad}]), or in "
            f"another --out (--fork RUN@STEP) with a lower train.lr or stream weight"
        ) from None

    def write_records(self, number: int, what: str, batch: StepBatch, finite: bool) -> Path:
        """Append the keys of a step's records to not_finite.jsonl, a line per rank. Returns its path."""
        path = self.context.out / NOT_FINITE
        records_of_rank = {"rank": self.context.process.rank, "finite": finite, "keys": batch.keys()}
        lines = list[str]()
        for records in self.context.host_group.gather(records_of_rank):
            lines.append(json.dumps({"step": number, "what": what} | records, ensure_ascii=False) + "\n")
        if self.context.process.is_main:
            with suppress(OSError), path.open("a", encoding="utf-8") as file:  # a full disk must not hide NotFinite
                file.writelines(lines)
        return path
