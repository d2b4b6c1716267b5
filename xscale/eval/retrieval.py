"""Measures sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour?

Neighbours are ranked by `cosine`, or by LASER's margin `ratio`, which lowers the scores of hubs:

    ratio(x, y) = cos(x, y) / ((r(x) + r(y)) / 2)

where r(x) is the mean cosine of x with its k = 4 nearest neighbours in the other language. Only these neighbours can
be the match of x.

Cosines are computed in float64, because in layers whose vectors are nearly equal the cosines differ by less than
float32 can tell. Of equally near sentences, the first one is the match, as for numpy's argmax.

Layers are counted like transformers' hidden_states: 0 is the output of the embeddings, 1 the first layer, -1 the last.

Shape letters: N sentences of the first language, M of the second, R rows of a chunk, k neighbours, S states, H width.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example, join_segments
from xscale.data.stream_batch import Gather, StreamBatch, TokenTypeField
from xscale.errors import UserError
from xscale.eval.bootstrap import scores_with_intervals
from xscale.eval.model import ExportedModel, Scores
from xscale.ops.alignment_gather import alignment_gather

BATCH = 64
CHUNK = 512
NEIGHBOURS = 4
"""The number of nearest neighbours k of the margin."""
POOLINGS = ("mean", "cls")
MARGINS = ("cosine", "ratio")
Vectors = dict[tuple[str, int], Tensor]
"""{(pooling, layer): sentence vectors [sentences, H]}."""
ALL = "all"
"""--layer all: the embeddings' output and each layer."""


def check_layers_and_expand_all(layers: Sequence[str | int], model: ExportedModel) -> list[int]:
    """Return the number of each layer; ALL stands for all layers. Raises UserError for layers that the model lacks."""
    last = model.encoder.lm.config.num_hidden_layers
    if ALL in layers:
        return list(range(last + 1))
    known = list(map(str, range(-last - 1, last + 1)))
    for layer in layers:
        if str(layer) not in known:
            raise UserError(
                f"--layer {layer}: the model does not have this layer. Write a number from 0 (embeddings) to "
                f"{last}, or -1 for the last layer"
            )
    return list(dict.fromkeys(map(int, layers)))


def evaluate(
    model: ExportedModel,
    texts: Sequence[tuple[str, ...]],
    langs: Sequence[str],
    poolings: Sequence[str] | None = None,
    layers: Sequence[str | int] = (-1,),
    margins: Sequence[str] = MARGINS[:1],
) -> dict[str, Scores]:
    """Return {variant: accuracies} for every combination of pooling, layer and margin. A variant's name consists of the
    values that the caller gives, so that rows of models with other defaults and sizes have the same names.

    texts: the pairs of sentences. poolings: None stands for the model's own. layers: numbers from either end, or ALL.
    Raises UserError for layers that the model lacks.
    """
    numbers = check_layers_and_expand_all(layers, model)
    measured_poolings = list(dict.fromkeys(poolings or [model.pooling]))
    sides = []
    for side, language in enumerate(langs):
        texts_of_side = [pair[side] for pair in texts]
        sides.append(embed_sentences(model, texts_of_side, language, measured_poolings, numbers))
    results = {}
    for pooling, layer, margin in product(measured_poolings, numbers, margins):
        words = []
        if poolings:
            words.append(pooling)
        if list(margins) != ["cosine"]:
            words.append(margin)
        if numbers != [-1]:
            words.append(f"layer {layer}")
        key = (pooling, layer)
        first_NH = F.normalize(sides[0][key].double(), dim=-1)
        second_NH = F.normalize(sides[1][key].double(), dim=-1)
        results[" ".join(words)] = retrieval_accuracies(first_NH, second_NH, margin, langs)
    return results


def retrieval_accuracies(first_NH: Tensor, second_NH: Tensor, margin: str, langs: Sequence[str]) -> Scores:
    """Return the retrieval accuracy in each direction, their mean, and the number of sentences. An accuracy is the
    share of rows whose match in the other matrix has the same index. Rows are unit vectors. margin: one of MARGINS."""
    if margin == "cosine":
        matches = [
            topk_dot_products(first_NH, second_NH, 1)[1][:, 0],
            topk_dot_products(second_NH, first_NH, 1)[1][:, 0],
        ]
    else:  # "ratio"
        matches = ratio_matches(first_NH, second_NH)
    sentences = len(first_NH)
    right_N3 = np.ones((sentences, 3))
    for direction, match_N in enumerate(matches):
        right_N3[:, direction] = match_N.cpu().numpy() == np.arange(sentences)
    first, second = langs

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        there, back, n = np.moveaxis(sums, -1, 0)
        return {f"{first}->{second}": there / n, f"{second}->{first}": back / n, "accuracy": (there + back) / n / 2}

    return scores_with_intervals(right_N3, scores_of) | {"sentences": sentences}


def ratio_matches(first_NH: Tensor, second_NH: Tensor) -> list[Tensor]:
    """Return two results [N]: the match of each first row in the second matrix by the margin `ratio`, and the match of
    each second row in the first."""
    scores_there, rows_there = topk_dot_products(first_NH, second_NH, NEIGHBOURS)
    scores_back, rows_back = topk_dot_products(second_NH, first_NH, NEIGHBOURS)
    means_there = scores_there.mean(1)
    means_back = scores_back.mean(1)
    ratios_there = scores_there / ((means_there[:, None] + means_back[rows_there]) / 2)
    ratios_back = scores_back / ((means_back[:, None] + means_there[rows_back]) / 2)
    return [
        rows_there.gather(1, ratios_there.argmax(1, keepdim=True))[:, 0],
        rows_back.gather(1, ratios_back.argmax(1, keepdim=True))[:, 0],
    ]


def topk_dot_products(x_NH: Tensor, y_MH: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `(x @ y.T).topk(k)`: scores and rows of y, best first [N, min(k, M)]. Only CHUNK rows of the matrix N x M
    are in memory. For k = 1, the first of equally near neighbours is returned."""
    scores = []
    rows = []
    for chunk_RH in x_NH.split(CHUNK):
        cells_RM = chunk_RH @ y_MH.T
        best = cells_RM.max(1, keepdim=True) if k == 1 else cells_RM.topk(min(k, len(y_MH)), 1)
        scores.append(best.values)
        rows.append(best.indices)
    return torch.cat(scores), torch.cat(rows)


def embed_sentences(
    model: ExportedModel, texts: Sequence[str], language: str, poolings: Sequence[str], layers: Sequence[int] = (-1,)
) -> Vectors:
    """Return sentence vectors [N, H] for each pooling and layer. Pooling "mean" takes the mean state of a text's tokens
    without special tokens, "cls" the state of [CLS]."""
    ids = [sentence[: model.max_length - 2] for sentence in model.tokenizer.encode(list(texts))]
    vectors: Vectors = {}
    for key in product(poolings, layers):
        vectors[key] = torch.empty(len(ids), model.encoder.width, device=model.device)
    for start in range(0, len(ids), BATCH):
        batch = ids[start : start + BATCH]
        stream_batch = make_stream_batch(model, batch, language, poolings)
        for layer, states in zip(layers, encode_and_pool_at_layers(model, stream_batch, layers), strict=True):
            for pooling, pooled_NH in zip(poolings, states.split(len(batch)), strict=True):
                vectors[pooling, layer][start : start + BATCH] = pooled_NH
    return vectors


@torch.no_grad()  # not inference_mode, because masks of attention are kept for later passes, also of training
def encode_and_pool_at_layers(model: ExportedModel, stream_batch: StreamBatch, layers: Sequence[int]) -> list[Tensor]:
    """Return, for each layer, the S states [S, H] that the stream batch asks for."""
    row = pack_row({"": stream_batch}, model.tokenizer.sep_id).to(model.device)
    hidden = model.encoder.hidden_states(row.tokens)
    return [alignment_gather(hidden[layer][row.places], *row.gather, *row.transposed) for layer in layers]


def make_stream_batch(
    model: ExportedModel, sentences: list[list[int]], language: str, poolings: Sequence[str]
) -> StreamBatch:
    """Return a stream batch of the sequences `[CLS] sentence [SEP]`. For the poolings "mean" and "cls" it has one state
    per sentence, for "tokens" one per token. sentences: token ids."""
    segments = [[(Example((language,), (sentence,), None, np.uint64(0)), 0)] for sentence in sentences]
    sequences = join_segments(model.tokenizer, segments, model.language_ids_or_neutral([language]))
    is_last = sequences.indices_in_sequence == sequences.lengths[sequences.sequence_of_token] - 1
    tokens = np.flatnonzero((sequences.indices_in_sequence > 0) & ~is_last)
    states = {
        "mean": Gather.sums(tokens, sequences.lengths - 2),
        "cls": Gather.single(sequences.starts),
        "tokens": Gather.single(tokens),
    }
    types: TokenTypeField | None = "languages" if model.language_embeddings else None
    return StreamBatch(sequences, {pooling: states[pooling] for pooling in poolings}, {}, len(sentences), types=types)
