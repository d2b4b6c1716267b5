"""Measures sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour?

Neighbours are ranked by `cosine`, or by LASER's margin `ratio`, which lowers the scores of hubs:

    ratio(x, y) = cos(x, y) / ((r(x) + r(y)) / 2)

where r(x) is the mean cosine of x with its k = 4 nearest neighbours in the other language. Only these neighbours can
be the match of x.

Layers are counted like transformers' hidden_states: 0 is the output of the embeddings, 1 the first layer, -1 the last.

Shape letters: N sentences of the first language, M of the second, R rows of a chunk, k neighbours, S states, H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

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
from xscale.ops.rank_rows import gather_rank_rows

BATCH = 64
CHUNK = 1024
NEIGHBOURS = 4
"""The number of nearest neighbours k of the margin."""
POOLINGS = ("mean", "cls")
MARGINS = ("cosine", "ratio")
Vectors = dict[tuple[str, int], Tensor]
"""{(pooling, layer): unit vectors [sentences, H]}."""
ALL = "all"
"""--layer all: the embeddings' output and each layer."""


@dataclass(frozen=True)
class Variant:
    """One way to make sentence vectors and to rank neighbours."""

    name: str
    """The end of the names of the variant's results rows; "" for the defaults."""
    pooling: str
    layer: int
    margin: str


def make_variants(
    model: ExportedModel,
    poolings: Sequence[str] | None = None,
    layers: Sequence[str | int] = (-1,),
    margins: Sequence[str] = MARGINS[:1],
) -> list[Variant]:
    """Return every combination of pooling, layer and margin. A variant's name consists of the values that the caller
    gives, so that rows of models with other defaults and sizes have the same names. poolings: None stands for the
    model's own. layers: numbers from either end, or ALL. Raises UserError for layers that the model lacks."""
    variants = []
    for pooling, layer, margin in product(poolings or [model.pooling], layer_numbers(layers, model), margins):
        words = []
        if poolings:
            words.append(pooling)
        if list(margins) != ["cosine"]:
            words.append(margin)
        if list(layers) != [-1]:
            words.append(f"layer {layer}")
        variants.append(Variant(" ".join(words), pooling, layer, margin))
    return variants


def layer_numbers(layers: Sequence[str | int], model: ExportedModel) -> list[int]:
    """Return the layers as numbers, also for ALL. Raises UserError for layers that the model lacks."""
    last = model.num_layers
    if ALL in layers:
        return list(range(last + 1))
    numbers = list(map(int, layers))
    for layer in numbers:
        if not -last - 1 <= layer <= last:
            raise UserError(
                f"--layer {layer}: the model has the layers 0 (embeddings) to {last}, or -1 for the last; give one"
            )
    return numbers


def evaluate(
    model: ExportedModel,
    texts: Sequence[tuple[str, ...]],
    langs: Sequence[str],
    variants: Sequence[Variant] | None = None,
) -> dict[str, Scores]:
    """Return {variant's name: accuracies}.

    texts: the pairs of sentences. If several ranks evaluate together, a rank has the pairs with the numbers rank, rank
    + ranks, ... of all pairs. variants: None stands for the default variant.
    """
    variants = variants or make_variants(model)
    language_ids = model.language_ids(langs)
    sides = []
    for side, language in enumerate(langs):
        vectors = embed_sentences(model, [pair[side] for pair in texts], language_ids[language], variants)
        for key, rank_vectors_NH in vectors.items():
            vectors[key] = gather_vectors(rank_vectors_NH)
        sides.append(vectors)
    return compare_vectors(sides[0], sides[1], langs, variants)


def gather_vectors(rank_vectors_NH: Tensor) -> Tensor:
    """Return the vectors of all ranks in the order of the pairs. rank_vectors_NH: this rank's vectors of the pairs
    rank, rank + ranks, ..."""
    if not dist.is_initialized():
        return rank_vectors_NH
    vectors_NH, _ = gather_rank_rows(rank_vectors_NH.float())
    numbers = torch.arange(len(vectors_NH))
    by_rank = torch.argsort(numbers % dist.get_world_size(), stable=True)  # the pairs of one rank follow one another
    return vectors_NH[by_rank.argsort().to(vectors_NH.device)]


def compare_vectors(
    first: Vectors, second: Vectors, langs: Sequence[str], variants: Sequence[Variant]
) -> dict[str, Scores]:
    """Return {variant's name: accuracies}, given the vectors of both languages."""
    results = {}
    for variant in variants:
        key = (variant.pooling, variant.layer)
        results[variant.name] = accuracies(first[key], second[key], variant.margin, langs)
    return results


def accuracies(first_NH: Tensor, second_NH: Tensor, margin: str, langs: Sequence[str]) -> Scores:
    """Return the retrieval accuracy in each direction, their mean, and the number of sentences. An accuracy is the
    share of rows whose match in the other matrix has the same index. Rows are unit vectors."""
    if margin == "cosine":
        matches = [nearest_rows(first_NH, second_NH, 1)[1][:, 0], nearest_rows(second_NH, first_NH, 1)[1][:, 0]]
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
    """Return two results [N]: the match of each first row in the second matrix by the margin `ratio`, and the match of
    each second row in the first."""
    there, there_rows = nearest_rows(first_NH, second_NH, NEIGHBOURS)
    back, back_rows = nearest_rows(second_NH, first_NH, NEIGHBOURS)
    means_there = there.double().mean(1)
    means_back = back.double().mean(1)
    margins_there = there / ((means_there[:, None] + means_back[there_rows]) / 2)
    margins_back = back / ((means_back[:, None] + means_there[back_rows]) / 2)
    matches = []
    for margins, rows in ((margins_there, there_rows), (margins_back, back_rows)):
        matches.append(rows.gather(1, margins.argmax(1, keepdim=True))[:, 0])
    return matches


def nearest_rows(x_NH: Tensor, y_MH: Tensor, k: int) -> tuple[Tensor, Tensor]:
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


def embed_sentences(model: ExportedModel, texts: list[str], language_id: int, variants: Sequence[Variant]) -> Vectors:
    """Return unit vectors [texts, H] for the poolings and layers of the variants. Pooling "mean" takes the mean state
    of a text's tokens without special tokens, "cls" the state of [CLS]."""
    poolings = sorted({variant.pooling for variant in variants})
    layers = sorted({variant.layer for variant in variants})
    ids = [sentence[: model.max_length - 2] for sentence in model.tokenizer.encode(texts)]
    longest_first = sorted(range(len(ids)), key=lambda number: -len(ids[number]))
    vectors: Vectors = {}
    for key in product(poolings, layers):
        vectors[key] = model.encoder.embeddings.new_empty(len(ids), model.encoder.width)
    for start in range(0, len(ids), BATCH):
        numbers = longest_first[start : start + BATCH]
        stream_batch = make_stream_batch(model, [ids[number] for number in numbers], language_id, poolings)
        for layer, states in zip(layers, layer_states(model, stream_batch, layers), strict=True):
            for pooling, pooled_NH in zip(poolings, states.split(len(numbers)), strict=True):
                vectors[pooling, layer][numbers] = F.normalize(pooled_NH, dim=-1)
    return vectors


@torch.no_grad()  # not inference_mode, because masks of attention are kept for later passes, also of training
def layer_states(model: ExportedModel, stream_batch: StreamBatch, layers: Sequence[int]) -> list[Tensor]:
    """Return, for each layer, the S states [S, H] that the stream batch asks for."""
    row = pack_row({"": stream_batch}, model.tokenizer.sep_id).to(model.device)
    hidden = model.encoder.hidden_states(row.tokens)
    return [alignment_gather(hidden[layer][row.places], *row.gather, *row.transposed) for layer in layers]


def make_stream_batch(
    model: ExportedModel, sentences: list[list[int]], language_id: int, poolings: Sequence[str]
) -> StreamBatch:
    """Return a stream batch of the sequences `[CLS] sentence [SEP]`. For the poolings "mean" and "cls" it has one state
    per sentence, for "tokens" one per token. sentences: token ids."""
    segments = [[(Example(("",), (sentence,), None, np.uint64(0)), 0)] for sentence in sentences]
    sequences = join_segments(model.tokenizer, segments, {"": language_id})
    is_last = sequences.offsets == sequences.lengths[sequences.numbers] - 1
    tokens = np.flatnonzero((sequences.offsets > 0) & ~is_last)
    states = {
        "mean": Gather.sums(tokens, sequences.lengths - 2),
        "cls": Gather.single(sequences.starts),
        "tokens": Gather.single(tokens),
    }
    types: Types | None = "languages" if model.language_embeddings else None
    return StreamBatch(sequences, {pooling: states[pooling] for pooling in poolings}, {}, len(sentences), types=types)
