"""Word contrast (after Wu & Dredze 2020) pulls the states of linked words together, and those of other words apart.

    L = - 1/(2|L|) sum over links (i, j) of  log softmax_j( u_i . v_j / tau ) + log softmax_i( u_i . v_j / tau )

u_i is the mean last hidden state of the tokens of word i, normalised. v_j is the same for word j of the other
sentence. The two sentences are encoded separately, and nothing is masked. Each softmax runs over all links of the step,
on all ranks and in all packed rows. A frozen encoder is not needed, because the negatives keep the states apart.

Decided:
- The links are those of contextual alignment (objectives/contextual.py): one-to-one links, without punctuation. Links
  of a word that was cut off are left out.
- A link is not a negative of link (i, j) if they have a word in common, compared by its tokens: its other word is
  the same word, or another translation (objectives/step_contrast.py).
"""

from typing import ClassVar

import numpy as np
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from xscale.data import links
from xscale.data.sequences import Example, join_segments
from xscale.data.stream_batch import CollateContext, Gather, StreamBatch
from xscale.objectives.base import Losses, Objective, Parts
from xscale.objectives.contextual import are_one_to_one
from xscale.objectives.ppa import hash_each_text
from xscale.objectives.step_contrast import step_contrast_losses, vectors_and_text_hashes
from xscale.recipe import STRICT


@dataclass(frozen=True, config=STRICT)
class WordContrastOptions:
    in_phases: ClassVar[frozenset[str]] = frozenset({"temperature"})
    temperature: PositiveFloat = 0.1
    """The temperature tau of the softmax over the aligned words of the step."""


def collate(samples: list[list[Example]], options: WordContrastOptions, context: CollateContext) -> StreamBatch:
    """Return the batch of samples, each of which is a single pair. Its sequences are all first sides, then all second
    sides. Its states are "first" and "second" [S], sums over the tokens of the two words of each link."""
    pairs = context.fit_pairs(samples)
    text_numbers = [[2 * p] for p in range(len(pairs))]
    text_numbers += [[2 * p + 1] for p in range(len(pairs))]
    sequences = join_segments(context.tokenizer, links.segments_of_texts(pairs, text_numbers), context.language_ids)
    links_K2, is_word_K2 = links.links_and_is_word_of_each_end(pairs)
    word_tokens = links.word_tokens(pairs, text_numbers, sequences, "all")
    has_tokens_K2 = word_tokens.lengths[links_K2] > 0
    usable = are_one_to_one(links_K2) & (is_word_K2 & has_tokens_K2).all(axis=1)
    first_tokens, first_counts = word_tokens.select_lists(links_K2[usable, 0])
    second_tokens, second_counts = word_tokens.select_lists(links_K2[usable, 1])
    first_texts = hash_each_text(sequences.ids[first_tokens], first_counts)
    second_texts = hash_each_text(sequences.ids[second_tokens], second_counts)
    return StreamBatch(
        sequences=sequences,
        states={"first": Gather.sums(first_tokens, first_counts), "second": Gather.sums(second_tokens, second_counts)},
        target_counts={"words": len(first_counts)},
        samples=len(pairs),
        arrays={"texts": np.stack([first_texts, second_texts], 1)},
    )


def compute_losses(
    parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: WordContrastOptions
) -> Losses:
    """Return the sum over the row's links of half of their losses in both directions."""
    return step_contrast_losses(states, "words", options.temperature)


OBJECTIVE = Objective(
    record_kind="pair",
    options=WordContrastOptions,
    collate=collate,
    loss=compute_losses,
    vectors=vectors_and_text_hashes,
    terms=lambda options: {"words": 1.0},
    words=lambda options: True,
    needs="links",
)
