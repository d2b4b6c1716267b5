"""Contextual alignment (Cao, Kitaev & Klein 2020) pulls the states of linked words together.

    L(f) = sum over pairs (s, t), links (i, j) of  || f(i, s) - f(j, t) ||^2
    R(f) = sum over pairs (s, t), i in t       of  || f(i, t) - f0(i, t) ||^2      t in English, f0 the initial encoder
    L(f) + lambda R(f)

f(i, s) is the last hidden state of word i's last token in s. The two sentences are encoded separately, and nothing
is masked. R prevents all states from becoming equal.

Decided, where the paper is silent:
- R is a sum over every token of t, not only over the last tokens of words. Special tokens belong to neither sum.
- Both sums are divided by the number of tokens of both sentences, so that lambda does not depend on the number of
  links.
- Only one-to-one links count, as in the authors' code: the two words have no other link, also none to punctuation. A
  word that was cut is represented by its last remaining token.
- After that, links of punctuation are left out. They are frequent and similar, and would pull all sentences together.
"""

import copy
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from xscale.data import links
from xscale.data.packed_row import Row
from xscale.data.scripts import may_name_same_language
from xscale.data.sequences import Example, join_segments
from xscale.data.stream_batch import CollateContext, Gather, StreamBatch
from xscale.errors import UserError
from xscale.models.encoder import Encoder
from xscale.objectives.base import AuxiliaryState, Losses, Objective, Parts
from xscale.ops.alignment_gather import alignment_gather
from xscale.recipe import STRICT, LossFactor


@dataclass(frozen=True, config=STRICT)
class ContextualOptions:
    in_phases: ClassVar[frozenset[str]] = frozenset({"anchor_weight"})
    anchor: str | None = "en"
    """The anchor language, whose hidden states stay near those of the initial encoder. Each pair must have a sentence
    in this language. null: in each pair, the first language is the anchor language."""
    anchor_weight: LossFactor = 1.0
    """The factor of the loss R (lambda in the paper). R is the squared distance of the hidden states of text in the
    language `anchor` from those of the initial encoder."""


class FrozenInitialEncoder(AuxiliaryState):
    """The initial encoder f0: a frozen copy in fp32, without dropout."""

    def __init__(self, encoder: Encoder):
        self.initial = copy.deepcopy(encoder).float().eval().requires_grad_(False)
        self.running = self.initial
        """Copy of `initial` on the device and in the data type of the trained encoder."""

    @torch.no_grad()
    def encode(self, trained: Encoder, row: Row, arrays: list[dict[str, Tensor]]) -> Tensor:
        """Return the states of f0 at the tokens of the anchor language [T, H]."""
        ours = next(self.running.parameters())
        theirs = next(trained.parameters())
        if (ours.device, ours.dtype) != (theirs.device, theirs.dtype):
            self.running = copy.deepcopy(self.initial).to(theirs.device, theirs.dtype)
        return alignment_gather(self.running(row.tokens, row.places), *row.gather, *row.transposed)

    def state_dict(self) -> dict[str, Any]:
        return self.initial.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.initial.load_state_dict(state)
        self.running = self.initial


def collate(samples: list[list[Example]], options: ContextualOptions, context: CollateContext) -> StreamBatch:
    """Return the batch of samples, each of which is a single pair. Its sequences are all sentences in the anchor
    language, then all other sentences.

    Its states are "first" and "second" [K], the two words of each link, and "anchors" [T], the tokens of the anchor
    language. The frozen encoder computes "anchors", too.
    """
    pairs = context.fit_pairs(samples)
    anchors = []
    others = []
    for p, pair in enumerate(pairs):
        side = _anchor_side(pair, options.anchor)
        anchors.append([2 * p + side])
        others.append([2 * p + 1 - side])
    text_numbers = anchors + others
    sequences = join_segments(context.tokenizer, links.segments_of_texts(pairs, text_numbers), context.language_ids)
    links_K2, is_word_K2 = links.links_and_is_word_of_each_end(pairs)
    last = links.word_tokens(pairs, text_numbers, sequences, "last")
    usable = are_one_to_one(links_K2) & is_word_K2.all(axis=1)
    first, second = links.token_links(links_K2[usable], last).T
    alone = join_segments(context.tokenizer, links.segments_of_texts(pairs, anchors), context.language_ids)
    anchor_tokens = Gather.single(np.flatnonzero(~context.tokenizer.is_special[alone.ids]))
    is_special = context.tokenizer.is_special[sequences.ids]
    return StreamBatch(
        sequences=sequences,
        states={"first": Gather.single(first), "second": Gather.single(second), "anchors": anchor_tokens},
        target_counts={"align": len(first), "anchor": anchor_tokens.state_count, "tokens": int((~is_special).sum())},
        samples=len(pairs),
        auxiliary=StreamBatch(alone, {"anchors": anchor_tokens}, {}, len(pairs)),
    )


def are_one_to_one(links_K2: np.ndarray) -> np.ndarray:
    """Return True for each link whose two words have no other link [K]."""
    first_K, second_K = links_K2.T
    return (np.bincount(first_K)[first_K] == 1) & (np.bincount(second_K)[second_K] == 1)


def _anchor_side(pair: Example, anchor: str | None) -> int:
    """Return the side of the pair that is in the anchor language, or 0 without one. Raises UserError."""
    if anchor is None:
        return 0
    sides = [side for side, lang in enumerate(pair.langs) if may_name_same_language(lang, anchor)]
    if not sides:
        raise UserError(
            f"record {pair.key!r} has the languages {' and '.join(pair.langs)}, but a stream with the objective "
            f"contextual needs pairs with its anchor language {anchor!r}. Change the field `anchor` of the stream, or "
            f"set the field `languages` of the stream to pairs with {anchor!r}"
        )
    return sides[0]


def compute_losses(
    parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: ContextualOptions
) -> Losses:
    """Return the sums L and R of the paper."""
    L = total_squared_distance(states["first"], states["second"])
    R = total_squared_distance(states["anchors"], states["auxiliary"])
    return Losses(sums={"align": L, "anchor": R})


def total_squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return `(a - b).square().sum()`, in fp32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) - b.to(wide)).square().sum()


OBJECTIVE = Objective(
    record_kind="pair",
    options=ContextualOptions,
    collate=collate,
    loss=compute_losses,
    terms=lambda options: {"align": 1.0, "anchor": options.anchor_weight},
    # Both sums are divided by the number of tokens of both sentences, without special tokens.
    divisors={"align": "tokens", "anchor": "tokens"},
    words=lambda options: True,
    needs="links",
    auxiliary_state=lambda encoder, heads, options: FrozenInitialEncoder(encoder),
)
