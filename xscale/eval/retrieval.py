"""Sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour?

By `cosine`, or by `csls` (Lample et al. 2018), which takes from hubs what makes them near to all:

    csls(x, y) = 2 cos(x, y) - r(x) - r(y)

where r(x) is the mean cosine of x with its k nearest neighbours in the other language.
Margins have other names in LASER: `absolute` is cosine; `distance`, cos - (r(x) + r(y)) / 2, is half of csls and ranks
alike; `ratio`, its default, divides instead.

A layer is counted as transformers' hidden_states are: 0 is what the embeddings give, 1 the first layer, -1 the last.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example, join_segments
from xscale.data.shards import Source
from xscale.data.stream_batch import Reads, StreamBatch, Types
from xscale.errors import UserError
from xscale.eval.model import Exported, read_all
from xscale.eval.neighbours import nearest_both
from xscale.models.build import positions
from xscale.ops.alignment_gather import alignment_gather
from xscale.step.step import to_device

BATCH = 64
NEIGHBOURS = 10
"""k of csls."""
POOLINGS, MARGINS = ("mean", "cls"), ("cosine", "csls")
ALL = "all"
"""Of layers."""


def evaluate(
    model: Exported,
    source: Source,
    limit: int,
    poolings: Sequence[str] = POOLINGS[:1],
    layers: Sequence[str | int] = (-1,),
    margins: Sequence[str] = MARGINS[:1],
) -> dict[str, dict[str, float]]:
    """Accuracy in both directions and their mean, for each combination: under the names of what differs from
    mean-pooled last states and cosine, "" for these alone."""
    last = model.encoder.lm.config.num_hidden_layers
    numbers = layer_numbers(layers, last)
    records = read_all(source, limit)
    sides = [
        embed(
            model,
            [texts[side] for _, _, texts in records],
            model.language_ids(source)[source.langs[side]],
            poolings,
            numbers,
        )
        for side in (0, 1)
    ]
    found = {}
    for pooling, layer, margin in product(poolings, numbers, margins):
        first, second = (of_side[pooling, layer] for of_side in sides)
        chosen = [(pooling, poolings, POOLINGS[0]), (margin, margins, MARGINS[0])]
        found[variant(chosen, layer, numbers, last)] = accuracies(first, second, margin, source.langs)
    return found


def variant(chosen: Sequence[tuple[str, Sequence[str], str]], layer: int, layers: Sequence[int], last: int) -> str:
    """A combination's name: what of it differs from the default, or was asked for beside others. chosen: value, all
    that were asked for, default."""
    named = [name for name, asked, default in chosen if len(set(asked)) > 1 or name != default]
    return " ".join([*named, f"layer {last + 1 + layer}"] if len(layers) > 1 or layer != -1 else named)


def layer_numbers(asked: Sequence[str | int], last: int) -> list[int]:
    """Counted from the end: -1 is the last. Raises UserError. asked: numbers from either end, or `all`."""
    if ALL in asked:
        return list(range(-last - 1, 0))
    absent = [number for number in asked if not -last - 1 <= int(number) <= last]
    if absent:
        raise UserError(
            f"--layer {' '.join(map(str, absent))}: the model has layers 1 to {last}, 0 is what its embeddings give"
        )
    return list(dict.fromkeys(int(number) - last - 1 if int(number) >= 0 else int(number) for number in asked))


def accuracies(first_NH: Tensor, second_NH: Tensor, margin: str, langs: tuple[str, ...]) -> dict[str, float]:
    """Share of the first's rows whose nearest of the second's has their number, the other way round, and the mean of
    both. Rows are unit vectors."""
    penalties = hubness(first_NH, second_NH) if margin == "csls" else None
    (_, there_N1), (_, back_N1) = nearest_both(first_NH, second_NH, 1, penalties)
    gold_N1 = torch.arange(len(first_NH), device=first_NH.device)[:, None]
    a, b = langs
    found = {
        f"{a}->{b}": (there_N1 == gold_N1).double().mean().item(),
        f"{b}->{a}": (back_N1 == gold_N1).double().mean().item(),
    }
    return found | {"accuracy": sum(found.values()) / 2, "sentences": len(first_NH)}


def hubness(
    x_NH: Tensor, y_MH: Tensor, k: int = NEIGHBOURS, numbers: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Half of r(x) [N] and of r(y) [M]: what rows rank by as by csls if it is taken from their cosines. numbers: so
    neighbours.nearest."""
    (there, _), (back, _) = nearest_both(x_NH, y_MH, k, numbers=numbers)
    return there.mean(1) / 2, back.mean(1) / 2


def embed(
    model: Exported, texts: list[str], language: int, poolings: Sequence[str], layers: Sequence[int]
) -> dict[tuple[str, int], Tensor]:
    """Unit vectors [n_texts, H] of each pooling and layer: the mean over a sentence's tokens without special tokens, or
    the state of [CLS]."""
    return embed_ids(model, model.tokenizer.encode(texts), language, poolings, layers)


def embed_ids(
    model: Exported, sentences: list[list[int]], language: int, poolings: Sequence[str], layers: Sequence[int]
) -> dict[tuple[str, int], Tensor]:
    """Likewise of sentences' token ids without special tokens."""
    limit = positions(model.encoder.lm.config)
    ids = [sentence[: limit - 2] for sentence in sentences]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    found: dict[tuple[str, int], list[Tensor]] = {key: [] for key in product(poolings, layers)}
    for start in range(0, len(order), BATCH):
        chosen = [ids[i] for i in order[start : start + BATCH]]
        stream_batch = stream_batch_of(model, chosen, language, poolings)
        inputs = to_device(pack_row({"": stream_batch}, limit, model.tokenizer.sep_id).inputs, model.device)
        with torch.no_grad():  # masks are kept for later passes, of training too
            hidden = model.encoder.hidden_states(inputs.tokens)
            for layer in layers:
                pooled = alignment_gather(hidden[layer], *inputs.gather).split(len(chosen))
                for pooling, vectors in zip(poolings, pooled, strict=True):
                    found[pooling, layer].append(F.normalize(vectors, dim=-1))
    if not ids:
        return {key: torch.empty(0, model.encoder.width, device=model.device) for key in found}
    back = torch.tensor(order).argsort().to(model.device)
    return {key: torch.cat(vectors)[back] for key, vectors in found.items()}


def stream_batch_of(model: Exported, sentences: list[list[int]], language: int, poolings: Sequence[str]) -> StreamBatch:
    """`[CLS] s [SEP]` of each; a state of each for each pooling, in their order, or of each of its tokens."""
    examples = [Example(("",), (sentence,), None, np.uint64(0)) for sentence in sentences]
    sequences = join_segments(model.tokenizer, [[(example, 0)] for example in examples], {"": language})
    special = np.concatenate([[True, *[False] * len(sentence), True] for sentence in sentences])
    counts = np.array([len(sentence) for sentence in sentences])
    tokens = np.flatnonzero(~special)
    reads = {"mean": Reads(tokens, counts), "cls": Reads(sequences.starts), "tokens": Reads(tokens)}
    types: Types | None = "languages" if model.language_embeddings else None
    return StreamBatch(sequences, {pooling: reads[pooling] for pooling in poolings}, {}, len(sentences), types=types)
