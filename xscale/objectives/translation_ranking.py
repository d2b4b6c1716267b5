"""Translation ranking (LaBSE, Feng et al. 2022): a sentence is nearer to its translation than to all other sentences.

    L = - 1/(2B) sum over i of  log e^{(s_ii - m) / tau} / ( e^{(s_ii - m) / tau} + sum over k != i of e^{s_ik / tau} )
                              + the same with s_ki in the place of s_ik

s_ik is the cosine of sentence i of one side and sentence k of the other. Each sentence is a separate sequence. B is the
number of pairs of the step, on all ranks and in all packed rows. There is no momentum encoder and no queue. A pair that
has a text in common with pair i is not a negative of it (objectives/step_contrast.py).
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from xscale.data.sequences import Example, concat_sequences
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.objectives.base import Losses, Objective, Parts
from xscale.objectives.ppa import gather_cls_or_text_sum, hash_each_text, sentence_sequences
from xscale.objectives.step_contrast import step_contrast_losses, vectors_and_text_hashes
from xscale.recipe import STRICT, NotNegative


@dataclass(frozen=True, config=STRICT)
class TranslationRankingOptions:
    in_phases: ClassVar[frozenset[str]] = frozenset({"temperature", "margin"})
    temperature: PositiveFloat = 0.05
    """The temperature tau of the softmax over the sentences of the step."""
    margin: NotNegative = 0.3
    """The margin m: the cosine of a sentence and its translation should exceed, by at least m, the cosine of the
    sentence and the translation of any other sentence of the step."""
    pooling: Literal["cls", "mean"] = "mean"
    """Which vector stands for a sentence. mean: the mean of the hidden states of all tokens except special tokens. cls:
    the hidden state of [CLS]."""


def sample_count_problem(options: TranslationRankingOptions, samples: int) -> str | None:
    """Return an error message if the number of samples of a step is wrong, or None."""
    if samples == 1:
        return (
            "samples: 1 is too small, because each sentence is compared with the other sentences of its step. "
            "Write 2 or more"
        )
    return None


def collate(samples: list[list[Example]], options: TranslationRankingOptions, context: CollateContext) -> StreamBatch:
    """Return the batch of samples, each of which is a single pair. Its sequences are all first sides, then all second
    sides. Its states are "first" and "second" [S], one for each pair."""
    pairs = context.fit_pairs(samples)
    first = sentence_sequences(pairs, [0] * len(pairs), context)
    second = sentence_sequences(pairs, [1] * len(pairs), context)
    texts_S2 = np.stack([hash_each_text(first.ids, first.lengths), hash_each_text(second.ids, second.lengths)], 1)
    return StreamBatch(
        sequences=concat_sequences(first, second),
        states={
            "first": gather_cls_or_text_sum(first, options.pooling),
            "second": gather_cls_or_text_sum(second, options.pooling).shift(len(first.ids)),
        },
        target_counts={"ranking": len(pairs)},
        samples=len(pairs),
        arrays={"texts": texts_S2},
    )


def compute_losses(
    parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: TranslationRankingOptions
) -> Losses:
    """Return the sum over the row's pairs of half of their losses in both directions."""
    return step_contrast_losses(states, "ranking", options.temperature, options.margin)


OBJECTIVE = Objective(
    record_kind="pair",
    options=TranslationRankingOptions,
    collate=collate,
    loss=compute_losses,
    vectors=vectors_and_text_hashes,
    terms=lambda options: {"ranking": 1.0},
    check=sample_count_problem,
)
