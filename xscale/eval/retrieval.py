"""Sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour?

Neighbours are ranked by `cosine`, or by `csls` (Lample et al. 2018), which ranks hubs, near to every sentence, lower:

    csls(x, y) = 2 cos(x, y) - r(x) - r(y)

where r(x) is the mean cosine of x with its k nearest neighbours in the other language. LASER calls cosine `absolute`,
and half of csls `distance`; its default, `ratio`, divides instead.

Layers are counted like transformers' hidden_states: 0 is the output of the embeddings, 1 the first layer, -1 the last.
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
from xscale.data.stream_batch import StateIndices, StreamBatch, Types
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.model import Exported, Scores, read_all
from xscale.eval.neighbours import nearest_both
from xscale.ops.alignment_gather import alignment_gather
from xscale.step.step import to_device

BATCH = 64
NEIGHBOURS = 10
"""The k of csls."""
POOLINGS, MARGINS = ("mean", "cls"), ("cosine", "csls")
ALL = "all"
"""This stands for all layers."""


def evaluate(
    model: Exported,
    source: Source,
    limit: int,
    poolings: Sequence[str] = POOLINGS[:1],
    layers: Sequence[str | int] = (-1,),
    margins: Sequence[str] = MARGINS[:1],
) -> dict[str, Scores]:
    """Accuracies of each combination of pooling, layer and margin, by its name."""
    numbers = layer_numbers(layers, model.num_layers)
    records, languages = read_all(source, limit), model.language_ids(source)
    sides = [
        embed(model, [texts[side] for _, _, texts in records], languages[language], poolings, numbers)
        for side, language in enumerate(source.langs)
    ]
    return {
        name: accuracies(sides[0][pooling, layer], sides[1][pooling, layer], margin, source.langs)
        for name, pooling, layer, margin in variants(model, poolings, numbers, margins)
    }


def variants(
    model: Exported, poolings: Sequence[str], layers: Sequence[int], margins: Sequence[str] = MARGINS[:1]
) -> list[tuple[str, str, int, str]]:
    """(name, pooling, layer, margin) of every combination. The name has the choices that were asked for beside others,
    or that are not the defaults: mean-pooled last states and cosine. layers: counted from the end."""
    found = []
    for pooling, layer, margin in product(poolings, layers, margins):
        name = [*name_choice(pooling, poolings, POOLINGS[0]), *name_choice(margin, margins, MARGINS[0])]
        name += [f"layer {model.num_layers + 1 + layer}"] if len(layers) > 1 or layer != -1 else []
        found.append((" ".join(name), pooling, layer, margin))
    return found


def name_choice(choice: str, asked: Sequence[str], default: str) -> list[str]:
    """The choice, if several were asked for or it is not the default; else nothing."""
    return [choice] if len(set(asked)) > 1 or choice != default else []


def layer_numbers(asked: Sequence[str | int], last: int) -> list[int]:
    """The layers' numbers from the end, -1 for the last. asked: numbers from either end, or `all`. Raises UserError."""
    if ALL in asked:
        return list(range(-last - 1, 0))
    absent = [number for number in asked if not -last - 1 <= int(number) <= last]
    if absent:
        raise UserError(
            f"--layer {' '.join(map(str, absent))}: the model has layers 1 to {last}, 0 is what its embeddings give"
        )
    return list(dict.fromkeys(int(number) - last - 1 if int(number) >= 0 else int(number) for number in asked))


def accuracies(first_NH: Tensor, second_NH: Tensor, margin: str, langs: tuple[str, ...]) -> Scores:
    """Share of the first's rows, unit vectors, whose nearest row of the second has the same number; the other way
    round; and the mean of both."""
    penalties = hubness(first_NH, second_NH) if margin == "csls" else None
    (_, there_N1), (_, back_N1) = nearest_both(first_NH, second_NH, 1, penalties)
    same_N1 = torch.arange(len(first_NH), device=first_NH.device)[:, None]
    a, b = langs
    hits_N3 = torch.cat([there_N1 == same_N1, back_N1 == same_N1, same_N1 >= 0], 1).cpu().numpy()

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        there, back, sentences = np.moveaxis(sums, -1, 0)
        return {
            f"{a}->{b}": there / sentences,
            f"{b}->{a}": back / sentences,
            "accuracy": (there + back) / sentences / 2,
        }

    return bootstrap(hits_N3, scores_of) | {"sentences": len(first_NH)}


def hubness(
    x_NH: Tensor, y_MH: Tensor, k: int = NEIGHBOURS, numbers: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Half of r(x) [N] and of r(y) [M]: a cosine minus both is half of csls. numbers: see neighbours.nearest."""
    (there, _), (back, _) = nearest_both(x_NH, y_MH, k, numbers=numbers)
    return there.mean(1) / 2, back.mean(1) / 2


def embed(
    model: Exported, texts: list[str], language: int, poolings: Sequence[str], layers: Sequence[int]
) -> dict[tuple[str, int], Tensor]:
    """Unit vectors [n_texts, H] for each pooling and layer. A vector is the mean state of a sentence's tokens without
    special tokens, or the state of [CLS]."""
    return embed_ids(model, model.tokenizer.encode(texts), language, poolings, layers)


def embed_ids(
    model: Exported, sentences: list[list[int]], language: int, poolings: Sequence[str], layers: Sequence[int]
) -> dict[tuple[str, int], Tensor]:
    """Does the same for sentences' token ids without special tokens."""
    ids = [sentence[: model.longest - 2] for sentence in sentences]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    found: dict[tuple[str, int], list[Tensor]] = {key: [] for key in product(poolings, layers)}
    for start in range(0, len(order), BATCH):
        chosen = [ids[i] for i in order[start : start + BATCH]]
        stream_batch = stream_batch_of(model, chosen, language, poolings)
        inputs = to_device(pack_row({"": stream_batch}, model.longest, model.tokenizer.sep_id).inputs, model.device)
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
    """`[CLS] s [SEP]` of each sentence, with a state to read for each pooling; "tokens" reads every token's."""
    examples = [Example(("",), (sentence,), None, np.uint64(0)) for sentence in sentences]
    sequences = join_segments(model.tokenizer, [[(example, 0)] for example in examples], {"": language})
    special = np.concatenate([[True, *[False] * len(sentence), True] for sentence in sentences])
    counts = np.array([len(sentence) for sentence in sentences])
    tokens = np.flatnonzero(~special)
    reads = {
        "mean": StateIndices(tokens, counts),
        "cls": StateIndices(sequences.starts),
        "tokens": StateIndices(tokens),
    }
    types: Types | None = "languages" if model.language_embeddings else None
    return StreamBatch(sequences, {pooling: reads[pooling] for pooling in poolings}, {}, len(sentences), types=types)
