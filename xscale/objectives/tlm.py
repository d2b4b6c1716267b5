"""Translation language modelling (Conneau & Lample 2019): MLM over `[CLS] S [SEP] T [SEP]`, both sides masked.

Shape letter: B pairs.
"""

from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from xscale import rng
from xscale.data.sequences import Example, join_segments
from xscale.data.stream_batch import CollateContext, StreamBatch, masked_lm
from xscale.objectives import mlm
from xscale.objectives.base import Objective
from xscale.recipe import STRICT


@dataclass(frozen=True, config=STRICT)
class TlmOptions(mlm.MaskedOptions):
    in_phases: ClassVar[frozenset[str]] = mlm.MaskedOptions.in_phases | {"shuffle_sides"}
    reset_positions: bool = False
    """true: the position numbers of the tokens start again at 0 in the second sentence of a pair, as in XLM."""
    shuffle_sides: bool = False
    """true: the two sentences of a pair are swapped with probability 1/2, as in PPA."""


_SWAP = rng.key("tlm", "swap")


def collate(samples: list[list[Example]], options: TlmOptions, context: CollateContext) -> StreamBatch:
    """Return the batch of masked sequences. Each sample is a single pair."""
    pairs = context.fit_pairs(samples)
    segments = []
    for pair, side in zip(pairs, draw_first_sides(pairs, options.shuffle_sides), strict=True):
        segments.append([(pair, side), (pair, 1 - side)])
    return masked_lm(
        join_segments(context.tokenizer, segments, context.language_ids, options.reset_positions),
        context,
        mask_prob=options.mask_prob,
        whole_word=options.whole_word,
        types=context.token_type_field(options.language_embeddings),
        neutral_share=options.language_dropout,
    )


def draw_first_sides(pairs: list[Example], shuffled: bool = True) -> list[int]:
    """Return for each pair which sentence comes first: 0, or, if shuffled, 1 with probability 1/2."""
    if not shuffled:
        return [0] * len(pairs)
    random_keys = np.array([pair.random_key for pair in pairs], dtype=np.uint64)
    swapped_B = rng.uniform(random_keys ^ _SWAP, np.zeros(len(pairs))) < 0.5
    return swapped_B.astype(int).tolist()


OBJECTIVE = Objective(
    record_kind="pair",
    options=TlmOptions,
    collate=collate,
    loss=mlm.compute_losses,
    terms=lambda options: {"mlm": 1.0},
    words=mlm.needs_words,
)
