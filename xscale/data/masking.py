"""The choice of masked tokens, and of what replaces them (Devlin et al. 2019).

Each token that is not a special one is chosen with probability `mask_prob`. A chosen token becomes [MASK] in 80 % of
the cases, a random ordinary token in 10 %, and stays in 10 %. Every choice is a function of the sequence's identity
and of the place of the token, or the number of the word, in the sequence.
"""

import numpy as np

from xscale import rng
from xscale.data.sequences import Sequences
from xscale.data.tokenizer import Tokenizer

KEEP, RANDOM = 0.9, 0.8
"""Bounds of a random number from [0, 1) for each chosen token: from KEEP on the token stays, from RANDOM to KEEP it
becomes a random token, and below RANDOM it becomes [MASK]."""
_CHOOSE, _ACTION, _RANDOM_ID = (rng.key("masking", purpose) for purpose in ("choose", "action", "random id"))


def mask_tokens(
    sequences: Sequences, tokenizer: Tokenizer, mask_prob: float, whole_word: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids after masking [N], and the sorted indices of the tokens to predict [M]."""
    per_token = sequences.identities[sequences.numbers]
    place = sequences.offsets.astype(np.uint64)
    maskable = ~tokenizer.is_special[sequences.ids]
    unit = place
    if whole_word:
        assert sequences.words is not None, "whole-word masking needs Tokenizer.encode_words"
        alone = place + np.uint64(1 << 32)  # a token that belongs to no word
        unit = np.where(sequences.words < 0, alone, sequences.words.astype(np.uint64))
    chosen = maskable & (rng.uniform(per_token ^ _CHOOSE, unit) < mask_prob)
    targets = np.flatnonzero(chosen)
    per_token, place = per_token[targets], place[targets]
    action = rng.uniform(per_token ^ _ACTION, place)
    pick = rng.uniform(per_token ^ _RANDOM_ID, place) * len(tokenizer.ordinary_ids)
    ids = sequences.ids.copy()
    replaced = np.where(action < RANDOM, tokenizer.mask_id, tokenizer.ordinary_ids[pick.astype(np.int64)])
    ids[targets] = np.where(action < KEEP, replaced, ids[targets])
    return ids, targets
