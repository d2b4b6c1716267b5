"""Translation language modelling (Conneau & Lample 2019): MLM over `[CLS] S [SEP] T [SEP]`, both sides masked."""

from typing import ClassVar

import numpy as np
from pydantic.dataclasses import dataclass

from xscale import rng
from xscale.config import STRICT
from xscale.data.sequences import Example, join_segments
from xscale.data.stream_batch import Context, StreamBatch, masked_lm
from xscale.objectives import mlm
from xscale.objectives.base import Objective


@dataclass(frozen=True, config=STRICT)
class TlmOptions(mlm.MaskedOptions):
    in_phases: ClassVar[frozenset[str]] = mlm.MaskedOptions.in_phases | {"shuffle_sides"}
    reset_positions: bool = False
    """Restart the positions at 0 in the second sentence (XLM)."""
    shuffle_sides: bool = False
    """Swap the two sentences of a pair with probability 1/2 (PPA)."""


_SWAP = rng.key("tlm", "swap")


def collate(samples: list[list[Example]], options: TlmOptions, context: Context) -> StreamBatch:
    """Return the masked sequences of samples, each of which is a single pair."""
    pairs, too_long = context.fit_pairs(samples)
    first = swapped(pairs).astype(int).tolist() if options.shuffle_sides else [0] * len(pairs)
    sequences = [[(pair, side), (pair, 1 - side)] for pair, side in zip(pairs, first, strict=True)]
    return masked_lm(
        join_segments(context.tokenizer, sequences, context.language_ids, options.reset_positions),
        context,
        mask_prob=options.mask_prob,
        whole_word=options.whole_word,
        types=context.types(options.language_embeddings),
        neutral=options.language_dropout,
        too_long=too_long,
    )


def swapped(pairs: list[Example]) -> np.ndarray:
    """Return whether each pair starts with its second sentence, which has probability 1/2 [B]."""
    identities = np.array([pair.identity for pair in pairs], dtype=np.uint64)
    return rng.uniform(identities ^ _SWAP, np.zeros(len(pairs))) < 0.5


OBJECTIVE = Objective(
    reads="pair",
    options=TlmOptions,
    collate=collate,
    loss=mlm.loss,
    terms=lambda options: {"mlm": 1.0},
    words=mlm.words,
)
