"""Measures sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour?

Neighbours are ranked by `cosine`, or by LASER's margin `ratio`, which lowers the scores of hubs:

    ratio(x, y) = cos(x, y) / ((r(x) + r(y)) / 2)

where r(x) is the mean cosine of x with its k = 4 nearest neighbours in the other language. Among these x is matched.

Layers are counted like transformers' hidden_states: 0 is the output of the embeddings, 1 the first layer, -1 the last.

Shape letters: N sentences of the first language, M of the second, R rows of a chunk, k neighbours, H width.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example, join_segments
from xscale.data.stream_batch import Gather, StreamBatch, Types
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.model import ExportedModel, Scores
from xscale.ops.alignment_gather import alignment_gather
from xscale.step.step import gather_rows

BATCH, CHUNK = 64, 1024
NEIGHBOURS = 4
"""The number of nearest neighbours k of the margin."""
POOLINGS = ("mean", "cls")
MARGINS = ("cosine", "ratio")
Vectors = dict[tuple[str, int], Tensor]
"""{(pooling, layer): unit vectors [sentences, H]}. Layers are counted from the end, -1 for the last."""
ALL = "all"
"""--layer all: the embeddings' output and each layer."""


class Variant(NamedTuple):
    """One way to make sentence vectors and to rank neighbours."""

    name: str
    """The end of the names of its results rows; "" for the defaults."""
    pooling: str
    layer: int
    """The layer's index from the end, -1 for the last."""
    margin: str

    @property
    def vectors(self) -> tuple[str, int]:
        """Return the variant's key in Vectors."""
        return self.pooling, self.layer


def make_variants(
    model: ExportedModel,
    poolings: Sequence[str] | None = None,
    layers: Sequence[str | int] = (-1,),
    margins: Sequence[str] = MARGINS[:1],
) -> list[Variant]:
    """Return every combination of pooling, layer and margin. A variant is named by what the caller asks for, so that
    the rows of models with other defaults and sizes have the same names. poolings: None stands for the model's own.
    layers: indices from either end, or ALL. Raises UserError for layers that the model lacks."""
    variants = []
    labels = layer_labels(layers, model.num_layers)
    for pooling, layer, margin in product(poolings or [model.pooling], labels, margins):
        words = []
        if poolings:
            words.append(pooling)
        if len(set(margins)) > 1 or margin != MARGINS[0]:
            words.append(margin)
        if list(layers) != [-1]:
            words.append(f"layer {labels[layer]}")
        variants.append(Variant(" ".join(words), pooling, layer, margin))
    return variants


def layer_labels(layers: Sequence[str | int], last: int) -> dict[int, int]:
    """Return {layer's index from the end: the number by which the caller asks for it}. See layer_indices."""
    if ALL in layers:
        return {index: last + 1 + index for index in layer_indices(layers, last)}
    labels = dict.fromkeys(layer_indices(layers, last), 0)
    for layer in sorted(map(int, layers)):  # a number from the beginning comes after one from the end
        (index,) = layer_indices([layer], last)
        labels[index] = layer
    return labels


def layer_indices(layers: Sequence[str | int], last: int) -> list[int]:
    """Return the layers' indices from the end, -1 for the last. layers: indices from either end, or ALL. last: the
    number of layers. Raises UserError for layers that the model lacks."""
    if ALL in layers:
        return list(range(-last - 1, 0))
    indices: list[int] = []
    for layer in map(int, layers):
        if not -last - 1 <= layer <= last:
            raise UserError(
                f"--layer {layer}: the model has layers 1 to {last}, and 0 for its embeddings' output; choose of these"
            )
        indices.append(layer - last - 1 if layer >= 0 else layer)
    return list(dict.fromkeys(indices))


def evaluate(
    model: ExportedModel,
    texts: Sequence[tuple[str, ...]],
    langs: Sequence[str],
    variants: Sequence[Variant] | None = None,
) -> dict[str, Scores]:
    """Return {variant's name: accuracies}, in training and after it.

    texts: the pairs of sentences; in training, those with the numbers rank, rank + ranks, ... of all pairs. variants:
    None stands for the default one.
    """
    variants = variants or make_variants(model)
    language_ids = model.language_ids(langs)
    keys = [variant.vectors for variant in variants]
    sides = []
    for side, language in enumerate(langs):
        vectors = embed(model, [pair[side] for pair in texts], language_ids[language], keys)
        sides.append({key: gather_vectors(own) for key, own in vectors.items()})
    return compare(sides, langs, variants)


def gather_vectors(own_NH: Tensor) -> Tensor:
    """Return the vectors of all ranks in the order of the pairs. own_NH: those of this rank (see `evaluate`)."""
    if not dist.is_initialized():
        return own_NH
    vectors_NH, _ = gather_rows(own_NH.float())
    world, pairs = dist.get_world_size(), len(vectors_NH)
    numbers = torch.cat([torch.arange(rank, pairs, world) for rank in range(world)])
    return vectors_NH[numbers.argsort().to(vectors_NH.device)]


def compare(sides: Sequence[Vectors], langs: Sequence[str], variants: Sequence[Variant]) -> dict[str, Scores]:
    """Do the same as `evaluate`, given the vectors of both languages (sides)."""
    results = {}
    for variant in variants:
        first_NH, second_NH = (side[variant.vectors] for side in sides)
        results[variant.name] = accuracies(first_NH, second_NH, variant.margin, langs)
    return results


def accuracies(first_NH: Tensor, second_NH: Tensor, margin: str, langs: Sequence[str]) -> Scores:
    """Return the retrieval accuracy by direction, the mean of both, and the number of sentences: the share of rows
    whose match in the other matrix has the same index. Rows are unit vectors."""
    if margin == "cosine":
        _, there_N1 = nearest(first_NH, second_NH, 1)
        _, back_N1 = nearest(second_NH, first_NH, 1)
        matches = [there_N1[:, 0], back_N1[:, 0]]
    else:
        matches = ratio_matches(first_NH, second_NH)
    sentences = len(first_NH)
    right_N3 = np.ones((sentences, 3))
    for direction, match_N in enumerate(matches):
        right_N3[:, direction] = match_N.cpu().numpy() == np.arange(sentences)
    first, second = langs

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        there, back, n = np.moveaxis(sums, -1, 0)
        return {f"{first}->{second}": there / n, f"{second}->{first}": back / n, "accuracy": (there + back) / n / 2}

    return bootstrap(right_N3, scores_of) | {"sentences": sentences}


def ratio_matches(first_NH: Tensor, second_NH: Tensor) -> list[Tensor]:
    """Return the match of each row [N] by the margin `ratio`, in the second matrix and then in the first."""
    there, there_rows = nearest(first_NH, second_NH, NEIGHBOURS)
    back, back_rows = nearest(second_NH, first_NH, NEIGHBOURS)
    means_there = there.double().mean(1)
    means_back = back.double().mean(1)
    margins_there = there / ((means_there[:, None] + means_back[there_rows]) / 2)
    margins_back = back / ((means_back[:, None] + means_there[back_rows]) / 2)
    matches = []
    for margins, rows in ((margins_there, there_rows), (margins_back, back_rows)):
        matches.append(rows.gather(1, margins.argmax(1, keepdim=True))[:, 0])
    return matches


def nearest(x_NH: Tensor, y_MH: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `(x @ y.T).topk(k)`: scores and rows of y, best first [N, min(k, M)]. Only a chunk of the rows of the
    matrix N x M is in memory. Among equal scores, the only neighbour (k = 1) is the first."""
    if not len(x_NH) or not len(y_MH):
        return x_NH.new_empty(len(x_NH), 0), torch.empty(len(x_NH), 0, dtype=torch.int64, device=x_NH.device)
    scores = []
    rows = []
    for chunk_RH in x_NH.split(CHUNK):
        cells_RM = chunk_RH @ y_MH.T
        best = cells_RM.max(1, keepdim=True) if k == 1 else cells_RM.topk(min(k, len(y_MH)), 1)
        scores.append(best.values)
        rows.append(best.indices)
    return torch.cat(scores), torch.cat(rows)


def embed(model: ExportedModel, texts: list[str], language_id: int, keys: Sequence[tuple[str, int]]) -> Vectors:
    """Return unit vectors [texts, H] for each pooling and layer in `keys`. Pooling "mean" takes the mean state of a
    text's tokens without special tokens, "cls" the state of [CLS]."""
    poolings = list(dict.fromkeys(pooling for pooling, _ in keys))
    layers = list(dict.fromkeys(layer for _, layer in keys))
    ids = [sentence[: model.max_length - 2] for sentence in model.tokenizer.encode(texts)]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    batches: dict[tuple[str, int], list[Tensor]] = {key: [] for key in product(poolings, layers)}
    for start in range(0, len(order), BATCH):
        batch = [ids[i] for i in order[start : start + BATCH]]
        stream_batch = make_stream_batch(model, batch, language_id, poolings)
        for layer, states in zip(layers, layer_states(model, stream_batch, layers), strict=True):
            for pooling, vectors in zip(poolings, states.split(len(batch)), strict=True):
                batches[pooling, layer].append(F.normalize(vectors, dim=-1))
    if not ids:
        return {key: torch.empty(0, model.encoder.width, device=model.device) for key in batches}
    back = torch.tensor(order).argsort().to(model.device)
    return {key: torch.cat(vectors)[back] for key, vectors in batches.items()}


@torch.no_grad()  # not inference_mode: masks are kept for later passes, of training too
def layer_states(model: ExportedModel, stream_batch: StreamBatch, layers: Sequence[int]) -> list[Tensor]:
    """Return for each layer the hidden states [S, H] of the stream batch."""
    row = pack_row({"": stream_batch}, model.tokenizer.sep_id).to(model.device)
    hidden = model.encoder.hidden_states(row.tokens)
    return [alignment_gather(hidden[layer], *row.gather, *row.transposed) for layer in layers]


def make_stream_batch(
    model: ExportedModel, sentences: list[list[int]], language_id: int, poolings: Sequence[str]
) -> StreamBatch:
    """Return a stream batch of sequences `[CLS] sentence [SEP]`. For each pooling it has states: for
    "mean" and "cls" one per sentence, for "tokens" one per token."""
    examples = [Example(("",), (sentence,), None, np.uint64(0)) for sentence in sentences]
    sequences = join_segments(model.tokenizer, [[(example, 0)] for example in examples], {"": language_id})
    is_last = sequences.offsets == sequences.lengths[sequences.numbers] - 1
    tokens = np.flatnonzero((sequences.offsets > 0) & ~is_last)
    states = {
        "mean": Gather.sums(tokens, sequences.lengths - 2),
        "cls": Gather.single(sequences.starts),
        "tokens": Gather.single(tokens),
    }
    types: Types | None = "languages" if model.language_embeddings else None
    return StreamBatch(sequences, {pooling: states[pooling] for pooling in poolings}, {}, len(sentences), types=types)
