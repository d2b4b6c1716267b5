"""Masked language modelling (Devlin et al. 2019) on running text.

    L_MLM = - sum_{i in M} log p(x_i | x with M masked)

A sequence is [CLS] text [SEP]. Its text has as many consecutive sentences of one document as fit into max_length. There
is no separator between sentences, as in Devlin et al., RoBERTa's DOC-SENTENCES (Liu et al. 2019) and Tang et al. (G.1),
but unlike in XLM. Special tokens are never masked.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from xscale.data.sequences import Example, Sequences, join_segments, join_sentences
from xscale.data.stream_batch import CollateContext, StreamBatch, masked_lm
from xscale.objectives.base import Losses, Objective, Parts, Prediction
from xscale.recipe import STRICT, Fraction


@dataclass(frozen=True, config=STRICT)
class MaskedOptions:
    """The fields shared by the masked objectives."""

    in_phases: ClassVar[frozenset[str]] = frozenset({"mask_prob"})
    mask_prob: Fraction = 0.15
    """The probability that the objective chooses a token for prediction. Special tokens such as [CLS] are never chosen.
    Of the chosen tokens, 80 % become [MASK], 10 % become random tokens, and 10 % stay."""
    whole_word: bool = False
    """true: the objective chooses whole words for prediction. false: the objective chooses single tokens."""
    language_embeddings: bool = False
    """true: the model adds an embedding of the text's language to the embedding of each token, as in XLM. The language
    embeddings are rows of the model's token-type table. If the model `model.init` has language embeddings, the run
    starts from these embeddings."""
    language_dropout: Annotated[float, Field(ge=0, le=1)] = 0.1
    """With `language_embeddings: true`: the share of the sequences that get a neutral embedding (token type 0) in place
    of the embedding of their language. From these sequences, the model learns to read text of unknown language."""


def collate(samples: list[list[Example]], options: MaskedOptions, context: CollateContext) -> StreamBatch:
    """Return the masked sequences of samples, each of which is a list of sentences that fill about one sequence."""
    return make_masked_batch(join_running_text(samples, context), len(samples), options, context)


def join_running_text(samples: list[list[Example]], context: CollateContext) -> Sequences:
    """Join the samples into sequences of running text. No token is lost."""
    segments = []
    for sample in samples:
        for text in join_sentences(sample, context.max_length):
            segments.append([(text, 0)])
    return join_segments(context.tokenizer, segments, context.language_ids)


def make_masked_batch(
    sequences: Sequences, sample_count: int, options: MaskedOptions, context: CollateContext
) -> StreamBatch:
    """Return the stream batch of masked sequences. sample_count: the number of samples that form the sequences."""
    return masked_lm(
        sequences,
        context,
        mask_prob=options.mask_prob,
        whole_word=options.whole_word,
        types="languages" if options.language_embeddings else None,
        neutral_share=options.language_dropout,
        samples=sample_count,
    )


def needs_words(options: MaskedOptions) -> bool:
    return options.whole_word


def compute_losses(parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: Any) -> Losses:
    return Losses([Prediction("mlm", parts.encoder.features(states["masked"]))])


OBJECTIVE = Objective(
    record_kind="mono",
    options=MaskedOptions,
    collate=collate,
    loss=compute_losses,
    terms=lambda options: {"mlm": 1.0},
    words=needs_words,
)
