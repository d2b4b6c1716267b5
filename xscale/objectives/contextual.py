"""Contextual alignment (Cao, Kitaev & Klein 2020): states of linked words are pulled together.

    L(f) = sum over pairs (s, t), links (i, j) of  || f(i, s) - f(j, t) ||^2
    R(f) = sum over pairs (s, t), i in t       of  || f(i, t) - f0(i, t) ||^2      t in English, f0 the initial encoder
    L(f) + lambda R(f)

f(i, s) is the last hidden state of word i's last sub-word in s. The two sentences are encoded separately and nothing
is masked; without R all states could collapse into one.

Decided: R runs over every sub-word of t, not over words' last ones; special tokens take part in neither sum. L is
divided by the number of links, R by that of sub-words. All links count; the authors keep those that are one-to-one,
which is left to whoever makes the links. Of a word that was cut its last remaining sub-word stands.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xscale.data import alignment
from xscale.data import collate as arrays
from xscale.data.collate import Context, MicroBatch
from xscale.data.encode import Example, fit_pairs, join_segments
from xscale.errors import UserError
from xscale.models.encoder import Encoder
from xscale.objectives.base import LossSums, Objective, Parts


@dataclass(frozen=True)
class Options:
    anchor: str = "en"
    """The language whose states stay near those of the initial encoder; one side of every pair."""
    anchor_weight: float = 1.0
    """lambda: the factor of R."""

    def __post_init__(self) -> None:
        if not 0 <= self.anchor_weight < math.inf:
            raise UserError(f"anchor_weight: {self.anchor_weight} must not be negative")


class Frozen:
    """f0: a copy of the initial encoder, in fp32, without dropout."""

    def __init__(self, encoder: Encoder):
        self.initial = copy.deepcopy(encoder).float().eval().requires_grad_(False)
        self.running = self.initial
        """`initial` on the trained encoder's device, in its type."""

    @torch.no_grad()
    def hidden(self, encoder: Encoder, batch: dict[str, Tensor], prefix: str = "") -> Tensor:
        """Computed where, and in the type that, `encoder` computes in."""
        ours, theirs = next(self.running.parameters()), next(encoder.parameters())
        if (ours.device, ours.dtype) != (theirs.device, theirs.dtype):
            self.running = copy.deepcopy(self.initial).to(theirs.device, theirs.dtype)
        return self.running.hidden(batch, prefix)

    def update(self, applied: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return self.initial.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.initial.load_state_dict(state)
        self.running = self.initial


def collate(samples: list[list[Example]], options: Options, context: Context) -> MicroBatch:
    """Samples are single pairs.

    input_ids, attention_mask [2P, L]: the P sentences in the anchor language, then their translations; with anchor_
    before their names, the former alone; `first`, `second` [K], places of linked words; `anchors` [T], places of the
    anchor language's tokens.
    """
    pairs, too_long = fit_pairs([sample[0] for sample in samples], context.max_length, context.overlong)
    if not pairs:
        return _idle(context, too_long)
    sides = [_anchor_side(pair, options.anchor) for pair in pairs]
    layout = [[2 * p + side] for p, side in enumerate(sides)] + [[2 * p + 1 - side] for p, side in enumerate(sides)]
    sequences = join_segments(context.encoder, alignment.segments(pairs, layout), context.language_ids)
    words = alignment.read_links(pairs)
    last = alignment.word_tokens(pairs, layout, sequences, words.first, "last")
    first, second = alignment.token_links(words.links, last).T
    ordinary = ~context.encoder.is_special[sequences.ids]
    anchors = arrays.places(sequences)[ordinary & (sequences.rows < len(pairs))]
    batch = {
        "input_ids": arrays.pad(sequences, sequences.ids, context.encoder.pad_id),
        "attention_mask": arrays.pad(sequences, np.ones_like(sequences.ids), 0),
        "first": first,
        "second": second,
        "anchors": anchors,
    }
    return _micro_batch(batch, len(sequences.ids), len(pairs), too_long)


def _idle(context: Context, too_long: int) -> MicroBatch:
    ids = np.array([[context.encoder.cls_id, context.encoder.sep_id]] * 2)
    empty = {name: np.empty(0, dtype=np.int64) for name in ("first", "second", "anchors")}
    return _micro_batch({"input_ids": ids, "attention_mask": np.ones_like(ids)} | empty, 0, 0, too_long)


def _micro_batch(batch: dict[str, np.ndarray], tokens: int, pairs: int, too_long: int) -> MicroBatch:
    halves = {f"anchor_{name}": batch[name][: len(batch[name]) // 2] for name in ("input_ids", "attention_mask")}
    targets = {"align": len(batch["first"]), "anchor": len(batch["anchors"])}
    return MicroBatch(batch | halves, targets, tokens, pairs, too_long)


def _anchor_side(pair: Example, anchor: str) -> int:
    if anchor not in pair.langs:
        raise UserError(
            f"record {pair.key!r} is in {' and '.join(pair.langs)}, not in the anchor language {anchor!r}. Set the "
            f"stream's `anchor`, or its `languages` to pairs that have it"
        )
    return pair.langs.index(anchor)


def loss(parts: Parts, batch: dict[str, Tensor], options: Options) -> LossSums:
    f = parts.encoder.hidden(batch).flatten(0, 1)
    f0 = parts.companion.hidden(parts.encoder, batch, "anchor_").flatten(0, 1)
    L = squared_distances(f[batch["first"]], f[batch["second"]])
    R = squared_distances(f[batch["anchors"]], f0[batch["anchors"]])
    return LossSums({"align": L, "anchor": R}, {})


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """`(a - b).square().sum()`, in fp32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) - b.to(wide)).square().sum()


OBJECTIVE = Objective(
    reads="pair",
    options=Options,
    collate=collate,
    loss=loss,
    terms=lambda options: {"align": 1.0, "anchor": options.anchor_weight},
    words=lambda options: "whitespace",
    needs="links",
    companion=lambda encoder, heads, options: Frozen(encoder),
)
