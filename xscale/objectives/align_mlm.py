"""ALIGN-MLM (Tang, Deshpande, Narasimhan 2022): MLM, and a dictionary's words drawn together in the input table.

    L_ALIGN = - (1 / |B|) sum_i cos(E[b_i1], E[b_i2]);   L = L_MLM + alpha * L_ALIGN

E is the input word-embedding table, b_i the i-th entry of the dictionary B. By decision, an entry of several
sub-words on a side stands for the mean of their rows (`subwords: single` keeps entries of one, as the authors), and
|B| is all of the stream's dictionaries at every step, without the withheld words, or a fresh sample of
`pairs_per_step`. A step's entries are dealt out to the ranks and rows: each is used once a step. Entries whose sides
are the same tokens ("Berlin Berlin", half of MUSE's) have cosine 1 and no gradient: they are no part of B. No language
embeddings, as the paper argues (G.5).

Shape letters: N entries of a row, H hidden width.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from xscale import rng
from xscale.config import STRICT, Count, NotNegative
from xscale.data.lexicon import entries
from xscale.data.sequences import Example
from xscale.data.stream_batch import Context, StreamBatch
from xscale.errors import UserError
from xscale.objectives import mlm
from xscale.objectives.base import Losses, Objective, Parts


@dataclass(frozen=True, config=STRICT)
class AlignMlmOptions(mlm.MaskedOptions):
    alpha: NotNegative = 10.0
    """The factor alpha of L_ALIGN."""
    subwords: Literal["mean", "single"] = "mean"
    """mean: a word of several tokens is the mean of their rows; single: entries with one are left out."""
    pairs_per_step: Count | None = None
    """Dictionary entries of a step, drawn anew without replacement; null: all."""


def collate(samples: list[list[Example]], options: AlignMlmOptions, context: Context) -> StreamBatch:
    """MLM's piece, and of this part's entries the token ids of all source and then all target words, end to end, and
    where each word starts [2 N]."""
    stream_batch = mlm.collate(samples, options, context)
    source, target = entries(context.lexicons, options.subwords == "single")
    if not len(source.lengths):
        raise UserError(
            f"streams.{context.stream}: data.lexicons has no entry of two different tokens; set subwords: mean"
        )
    picked = part_of_step(len(source.lengths), options.pairs_per_step, context)
    (source_ids, source_starts), (target_ids, target_starts) = source.take(picked), target.take(picked)
    starts = np.concatenate([source_starts, target_starts + len(source_ids)])
    words = {"ids": np.concatenate([source_ids, target_ids]), "starts": starts}
    return replace(stream_batch, arrays=words, targets=stream_batch.targets | {"align": len(picked)})


def part_of_step(total: int, wanted: int | None, context: Context) -> np.ndarray:
    """Which of `total` entries this row uses: its share of the step's."""
    share = context.share
    if wanted is None or wanted >= total:
        return np.arange(share.part, total, share.parts)
    draw = rng.key(context.seed, context.stream, "dictionary", share.step)
    chosen = np.argpartition(rng.hash64(draw, np.arange(total)), wanted - 1)[:wanted]
    return np.sort(chosen)[share.part :: share.parts]


def loss(parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: AlignMlmOptions) -> Losses:
    table = parts.encoder.lm.get_input_embeddings()
    # One lookup: each makes a gradient of the whole table.
    source_NH, target_NH = word_vectors(table, arrays["ids"], arrays["starts"]).chunk(2)
    cosine = F.cosine_similarity(source_NH, target_NH, dim=-1).sum()
    metrics = {"dictionary_cosine": (cosine.detach(), "align")}
    return replace(mlm.loss(parts, states, arrays, options), sums={"align": -cosine}, metrics=metrics)


def word_vectors(table: nn.Module, ids: Tensor, starts_N: Tensor) -> Tensor:
    """Mean of the table's rows of each word [N, H], in fp32. ids: the words' tokens, end to end."""
    rows = table(ids)
    if rows.dtype in (torch.float16, torch.bfloat16):
        rows = rows.float()
    return F.embedding_bag(torch.arange(len(ids), device=ids.device), rows, starts_N, mode="mean")


OBJECTIVE = Objective(
    reads="mono",
    options=AlignMlmOptions,
    collate=collate,
    loss=loss,
    terms=lambda options: {"mlm": 1.0, "align": options.alpha},
    words=mlm.words,
    needs="lexicon",
)
