"""What is seen over many steps: ranks that are slow, steps that fp16 skips, and vectors that do not differ."""

from collections import Counter, deque
from statistics import median_low
from typing import Any

SLOW = 1.5
"""Times the median of all ranks."""
SLOW_FLUSHES = 10
"""Times in a row that metrics are read, a second or more apart."""
SKIPS_OF, MOST_SKIPS = 200, 20
"""Of so many steps fp16 skips one or two as it tries larger scales."""
LOW_SCALE = 1.0
ALIKE, ALIKE_STEPS = 0.99, 20
"""Mean cosine of different sentences from which on, in so many steps, a contrast finds nothing to tell them by."""


class Pace:
    """How the ranks' own times compare: reading, and passes until gradients are reduced."""

    def __init__(self, names: list[str]):
        """names: of the ranks."""
        self.names, self.slowest, self.times, self.ratio = names, -1, 0, 1.0

    def metrics(self, own_R: list[float]) -> dict[str, float]:
        """own_R: seconds a step of each rank."""
        if len(own_R) == 1:
            return {}
        slowest, self.ratio = own_R.index(max(own_R)), max(own_R) / max(median_low(own_R), 1e-9)
        same = slowest == self.slowest and self.ratio >= SLOW
        self.slowest, self.times = slowest, self.times + 1 if same else int(self.ratio >= SLOW)
        return {"slowest_rank": slowest, "slowest_ratio": self.ratio}

    def warnings(self) -> list[str]:
        if self.times != SLOW_FLUSHES:
            return []
        return [
            f"{self.names[self.slowest]} is slow: its own part of the last steps took {self.ratio:.1f} times as long "
            f"as the median rank's, and all wait for it; look at its machine"
        ]


class Skips:
    """Steps that were not applied."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.last: deque[bool] = deque(maxlen=SKIPS_OF)
        self.warned = self.low = False

    def count(self, skipped: bool, scale: float | None) -> str | None:
        """One step. Returns a warning, once until it has passed."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.last.append(skipped)
        was_low, self.low = self.low, scale is not None and scale <= LOW_SCALE
        if self.low and not was_low:
            return f"fp16's loss scale is down to {scale:g}: gradients are very large; lower train.lr, or take bf16"
        if sum(self.last) <= MOST_SKIPS:
            self.warned = False
        elif not self.warned:
            self.warned = True
            return f"fp16 has skipped {sum(self.last)} of the last {len(self.last)} steps; lower train.lr, or take bf16"
        return None


class Alike:
    """Streams whose vectors hardly differ between sentences."""

    def __init__(self) -> None:
        self.steps = Counter[str]()

    def warnings(self, entry: dict[str, Any]) -> list[str]:
        """Of a step's metrics. Warns once of a stream."""
        cosines = {name.partition("/")[2]: of for name, of in entry.items() if name.startswith("sentence_cosine/")}
        self.steps.update(stream for stream, cosine in cosines.items() if cosine > ALIKE)
        return [
            f"streams.{stream}: vectors of different sentences hardly differ (mean cosine {cosine:.4f}, over {ALIKE} "
            f"in {ALIKE_STEPS} steps), so it learns next to nothing. Random weights make one vector of all sentences' "
            f"[CLS]: set streams.{stream}.pooling=mean, or model.attention_gain=1.0 and model.dropout=0.0"
            for stream, cosine in cosines.items()
            if cosine > ALIKE and self.steps[stream] == ALIKE_STEPS
        ]
