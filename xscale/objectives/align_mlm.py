"""ALIGN-MLM (Tang, Deshpande, Narasimhan 2022): MLM, and a loss that aligns a dictionary's words in the input table.

    L_ALIGN = - (1 / |B|) sum_i cos(E[b_i1], E[b_i2]);   L = L_MLM + alpha * L_ALIGN

E is the input word-embedding table and b_i the i-th entry of the dictionary B.

Decided, where the paper is silent:
- A word of several sub-words is represented by the mean of their embeddings. `subwords: single` keeps only the entries
  whose two words are one token each, as the authors do.
- At every step, B consists of all entries of the stream's dictionaries without the withheld words, or of a new sample
  of `pairs_per_step` entries. B is divided among ranks and rows, so that a step uses each entry once.
- Entries with the same tokens on both sides ("Berlin Berlin", half of MUSE's) are left out of B: their cosine is 1 and
  has no gradient.
- There are no language embeddings, as the paper argues (G.5).

Shape letters: N entries of a row, H hidden width.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from xscale import rng
from xscale.data.lexicon import ids_of_differing_entries
from xscale.data.sequences import Example
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.errors import UserError
from xscale.objectives import mlm
from xscale.objectives.base import Losses, Objective, Parts
from xscale.recipe import STRICT, Count, LossFactor


@dataclass(frozen=True, config=STRICT)
class AlignMlmOptions(mlm.MaskedOptions):
    in_phases: ClassVar[frozenset[str]] = mlm.MaskedOptions.in_phases | {"alpha", "pairs_per_step"}
    alpha: LossFactor = 10.0
    """The factor of L_ALIGN, the loss that makes the embeddings of the two words of a dictionary entry similar (alpha
    in the paper)."""
    subwords: Literal["mean", "single"] = "mean"
    """How the loss of dictionary entries (L_ALIGN) treats a word of several tokens. mean: the embedding of the word is
    the mean of the input embeddings of its tokens. single: the loss leaves out dictionary entries with such words."""
    pairs_per_step: Count | None = None
    """The number of dictionary entries that each step samples for the loss L_ALIGN, without replacement. null: each
    step uses all entries."""


def collate(samples: list[list[Example]], options: AlignMlmOptions, context: CollateContext) -> StreamBatch:
    """Return MLM's batch and the dictionary entries that this row's loss reads.

    `ids` holds the tokens of all source words, then of all target words; `starts` [2 N] says where each word starts.
    """
    stream_batch = mlm.collate(samples, options, context)
    source, target = ids_of_differing_entries(context.lexicons, options.subwords == "single")
    if not len(source.lengths):
        raise UserError(
            f"streams.{context.stream}: no dictionary entry can be used. The two words of an entry must differ. With "
            "`subwords: single`, both words must be single tokens. Use a larger dictionary, or `subwords: mean`"
        )
    picked = draw_entry_indices_of_row(len(source.lengths), options.pairs_per_step, context)
    source = source.select_lists(picked)
    target = target.select_lists(picked)
    ids = np.concatenate([source.values, target.values])
    starts = np.concatenate([source.starts, target.starts + len(source.values)])
    return replace(
        stream_batch,
        arrays={"ids": ids, "starts": starts},
        target_counts=stream_batch.target_counts | {"align": len(picked)},
    )


def draw_entry_indices_of_row(entry_count: int, entries_per_step: int | None, context: CollateContext) -> np.ndarray:
    """Return the indices of the dictionary entries that this row uses, its share of the step's entries."""
    if entries_per_step is None or entries_per_step >= entry_count:
        return np.arange(context.row, entry_count, context.rows)
    draw = rng.key(context.seed, context.stream, "dictionary", context.step)
    chosen = np.argpartition(rng.hash64(draw, np.arange(entry_count)), entries_per_step - 1)[:entries_per_step]
    return np.sort(chosen)[context.row :: context.rows]


def compute_losses(
    parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: AlignMlmOptions
) -> Losses:
    E = parts.encoder.lm.get_input_embeddings()
    # Both sides are looked up in one call, because each lookup makes a gradient as large as the table.
    b1_NH, b2_NH = mean_word_embeddings(E, arrays["ids"], arrays["starts"]).chunk(2)
    cosine = F.cosine_similarity(b1_NH, b2_NH, dim=-1).sum()
    L_ALIGN = -cosine
    L_MLM = mlm.compute_losses(parts, states, arrays, options)
    return replace(L_MLM, sums={"align": L_ALIGN}, metrics={"dictionary_cosine": (cosine.detach(), "align")})


def mean_word_embeddings(table: nn.Module, ids: Tensor, starts_N: Tensor) -> Tensor:
    """Return the mean embedding of each word's tokens [N, H], in fp32 or wider. ids: the tokens of all words, one word
    after the other."""
    rows = table(ids)
    wide_rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return F.embedding_bag(torch.arange(len(ids), device=ids.device), wide_rows, starts_N, mode="mean")


OBJECTIVE = Objective(
    record_kind="mono",
    options=AlignMlmOptions,
    collate=collate,
    loss=compute_losses,
    terms=lambda options: {"mlm": 1.0, "align": options.alpha},
    words=mlm.needs_words,
    needs="lexicon",
)
