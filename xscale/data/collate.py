"""Flat sequences to the arrays that a model reads.

Shape letters: B sequences, L tokens of the longest, M predicted tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xscale.data.encode import Sequences, TextEncoder
from xscale.data.masking import mask_tokens


@dataclass(frozen=True)
class Share:
    """Which of the equal parts of a stream's optimizer step a micro-batch is, over all ranks and micro-steps."""

    step: int = 0
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Context:
    """What a collate function knows besides its samples and options."""

    encoder: TextEncoder
    max_length: int
    overlong: str
    """"drop" or "truncate"."""
    language_ids: dict[str, int]
    seed: int = 0
    lexicons: tuple[Any, ...] = ()
    """The dictionaries of data.lexicons (data/lexicon.py), as id tables."""
    stream: str = ""
    share: Share = Share()


@dataclass(frozen=True)
class MicroBatch:
    """One micro-step of one stream on one rank."""

    arrays: dict[str, np.ndarray]
    targets: dict[str, int]
    """Number of targets of each term of the objective's loss."""
    tokens: int
    sequences: int
    too_long: int = 0
    stream: str = ""
    keys: list[str] = field(default_factory=list)


def masked_lm(
    sequences: Sequences,
    context: Context,
    *,
    mask_prob: float,
    whole_word: bool,
    position_ids: bool,
    language_embeddings: bool,
    too_long: int,
) -> MicroBatch:
    """The arrays of MLM and TLM.

    input_ids, attention_mask [B, L]; rows [M], indices into the flattened [B * L] tokens; labels [M]; and
    position_ids, token_type_ids (language numbers) [B, L] where asked for.
    """
    encoder = context.encoder
    if not len(sequences.lengths):
        return idle(context, too_long)
    ids, targets = mask_tokens(sequences, encoder, mask_prob, whole_word)
    arrays = {
        "input_ids": pad(sequences, ids, encoder.pad_id),
        "attention_mask": pad(sequences, np.ones_like(ids), 0),
        "rows": places(sequences)[targets],
        "labels": sequences.ids[targets],
    }
    if position_ids:
        arrays["position_ids"] = pad(sequences, sequences.positions, 0)
    if language_embeddings:
        arrays["token_type_ids"] = pad(sequences, sequences.languages, 0)
    return MicroBatch(arrays, {"mlm": len(targets)}, len(ids), len(sequences.lengths), too_long)


def places(sequences: Sequences) -> np.ndarray:
    """Index of each token in the flattened [B * L] rows [N]."""
    return sequences.rows * int(sequences.lengths.max(initial=0)) + sequences.offsets


def real_places(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """For each attention_mask [B, L], places [N]: where its tokens are in the flattened [B * L]."""
    masks = {name: mask for name, mask in arrays.items() if name.endswith("attention_mask")}
    return {name.replace("attention_mask", "places"): np.flatnonzero(mask) for name, mask in masks.items()}


def pad(sequences: Sequences, values: np.ndarray, fill: int) -> np.ndarray:
    """A value for each token [N], as rows of equal length [B, L]."""
    shape = (len(sequences.lengths), int(sequences.lengths.max(initial=0)))
    padded = np.full(shape[0] * shape[1], fill, dtype=np.int64)
    padded[places(sequences)] = values
    return padded.reshape(shape)


def idle(context: Context, too_long: int = 0) -> MicroBatch:
    """A micro-batch without targets: the rank has no sample left but takes part in the micro-step all the same."""
    encoder = context.encoder
    arrays = {
        "input_ids": np.array([[encoder.cls_id, encoder.sep_id]]),
        "attention_mask": np.ones((1, 2), dtype=np.int64),
        "rows": np.empty(0, dtype=np.int64),
        "labels": np.empty(0, dtype=np.int64),
    }
    return MicroBatch(arrays, {"mlm": 0}, 0, 0, too_long)
