"""Sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour?

Neighbours are ranked by `cosine`, or by `csls` (Lample et al. 2018), which lowers the scores of hubs:

    csls(x, y) = 2 cos(x, y) - r(x) - r(y)

where r(x) is the mean cosine of x with its k nearest neighbours in the other language. LASER calls cosine `absolute`,
and half of csls `distance`. LASER's xSIM is the error rate by its default margin `ratio`, which divides instead of
subtracting; a neighbour with the same text as the translation is right in xSIM. xSIM++ (Chen et al. 2023) adds
wrong translations with known types of errors to the candidates.

Layers are counted like transformers' hidden_states: 0 is the output of the embeddings, 1 the first layer, -1 the last.
"""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

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
from xscale.eval.model import Exported, Scores, read_texts
from xscale.eval.neighbours import nearest_both, ratio_margins
from xscale.ops.alignment_gather import alignment_gather
from xscale.step.step import to_device

BATCH = 64
NEIGHBOURS, XSIM_NEIGHBOURS = 10, 4
"""The number k of nearest neighbours in csls, and in xSIM."""
POOLINGS, MARGINS, XSIM = ("mean", "cls"), ("cosine", "csls"), "xsim"
Vectors = dict[tuple[str, int], Tensor]
"""Unit vectors by pooling and layer. Layers are counted from the end, -1 for the last."""
WrongTranslations = dict[str, tuple[str, str]]
"""A wrong translation of xSIM++ -> (the sentence that it was made of, the type of its error)."""
ALL = "all"
"""The value of --layer that means all layers."""


class Variant(NamedTuple):
    """One way to make sentence vectors and to rank neighbours."""

    name: str
    pooling: str
    layer: int
    """The layer's number from the end, -1 for the last."""
    margin: str

    @property
    def vectors(self) -> tuple[str, int]:
        """The key of the variant's vectors in Vectors."""
        return self.pooling, self.layer


def variants(
    model: Exported,
    poolings: Sequence[str] | None = None,
    layers: Sequence[str | int] = (-1,),
    margins: Sequence[str] = MARGINS[:1],
) -> list[Variant]:
    """Every combination of pooling, layer and margin. Its name mentions a choice if several were asked for, or if it is
    not the default (the model's own pooling, last layer, cosine). poolings: None is the model's own. layers: as in
    layer_numbers."""
    found, poolings, numbers = [], poolings or [model.pooling], layer_numbers(layers, model.num_layers)
    for pooling, layer, margin in product(poolings, numbers, margins):
        name = [*name_choice(pooling, poolings, model.pooling), *name_choice(margin, margins, MARGINS[0])]
        name += [f"layer {model.num_layers + 1 + layer}"] if len(numbers) > 1 or layer != -1 else []
        found.append(Variant(" ".join(name), pooling, layer, margin))
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
            f"--layer {' '.join(map(str, absent))}: the model has layers 1 to {last}, and 0 for its embeddings' output"
        )
    return list(dict.fromkeys(int(number) - last - 1 if int(number) >= 0 else int(number) for number in asked))


def evaluate(
    model: Exported,
    source: Source,
    limit: int,
    chosen: Sequence[Variant] | None = None,
    wrong: WrongTranslations | None = None,
) -> dict[str, Scores]:
    """Name of each variant -> its accuracies, or for xSIM its error rates. chosen: None is the default variant. wrong:
    the wrong translations of xSIM++."""
    texts, chosen = [list(side) for side in zip(*read_texts(source, limit), strict=True)], chosen or variants(model)
    sides = embed_sides(model, texts, source.langs, chosen)
    return evaluate_vectors(model, sides, texts, source.langs, chosen, wrong or {})


def evaluate_vectors(
    model: Exported,
    sides: Sequence[Vectors],
    texts: Sequence[list[str]],
    langs: tuple[str, ...],
    chosen: Sequence[Variant],
    wrong: WrongTranslations,
) -> dict[str, Scores]:
    """Do the same as `evaluate` for the vectors of two languages' texts."""
    found, extra = {}, dict[int, tuple[WrongTranslations, Vectors]]()
    for side in (0, 1) if any(variant.margin == XSIM for variant in chosen) else ():
        present = set(texts[side])
        of_side = {text: made for text, made in wrong.items() if made[0] in present}
        if of_side:
            (more,) = embed_sides(model, [list(of_side)], [langs[side]], chosen)
            extra[side] = of_side, more
    for variant in chosen:
        vectors = [side[variant.vectors] for side in sides]
        if variant.margin != XSIM:
            found[variant.name] = accuracies(vectors[0], vectors[1], variant.margin, langs)
            continue
        found[variant.name] = xsim(vectors, texts, langs)
        for side, (of_side, more) in extra.items():
            candidates = torch.cat([vectors[side], more[variant.vectors]])
            direction = "->".join([langs[1 - side], langs[side]])
            found[variant.name] |= xsim_plus(vectors[1 - side], candidates, texts[side], of_side, direction)
    return found


def xsim(vectors: Sequence[Tensor], texts: Sequence[list[str]], langs: tuple[str, ...]) -> Scores:
    """The share of sentences whose best candidate has another text than the translation, in both directions, and the
    mean of both."""
    both = ratio_margins(vectors[0], vectors[1], XSIM_NEIGHBOURS)
    errors = [
        [texts[1 - side][row] != texts[1 - side][n] for n, row in enumerate(best_rows(*found))]
        for side, found in enumerate(both)
    ]
    return both_directions(np.array(errors).T, langs, " xsim", "xsim")


def both_directions(counted_N2: np.ndarray, langs: tuple[str, ...], suffix: str, mean: str) -> Scores:
    """The share of sentences that are counted from the first language to the second, and back; the mean of both; and
    the number of sentences. suffix: ends the names of the first two."""
    a, b = langs

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        there, back, n = np.moveaxis(sums, -1, 0)
        return {f"{a}->{b}{suffix}": there / n, f"{b}->{a}{suffix}": back / n, mean: (there + back) / n / 2}

    counts_N3 = np.column_stack([counted_N2, np.ones(len(counted_N2))])
    return bootstrap(counts_N3, scores_of) | {"sentences": len(counted_N2)}


def xsim_plus(
    x_NH: Tensor, y_MH: Tensor, translations: list[str], wrong: WrongTranslations, direction: str
) -> dict[str, float]:
    """The error rate with the translations [N] and then the wrong ones as candidates (the rows of y), and the share of
    each type of error. `misaligned` means another sentence, or a wrong translation of another sentence."""
    candidates = [*translations, *wrong]
    kinds = ["misaligned", *dict.fromkeys(kind for _, kind in wrong.values())]
    counts = np.zeros((len(x_NH), 1 + len(kinds)))
    counts[:, 0] = 1
    for n, row in enumerate(best_rows(*ratio_margins(x_NH, y_MH, XSIM_NEIGHBOURS)[0])):
        said, meant = candidates[row], translations[n]
        source, kind = wrong.get(said, ("", ""))
        if said != meant:
            counts[n, 1 + (kinds.index(kind) if source == meant else 0)] = 1

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        shares = sums[..., 1:] / sums[..., :1]
        by_kind = {f"{direction} xsim++ {kind}": shares[..., i] for i, kind in enumerate(kinds)}
        return {f"{direction} xsim++": shares.sum(-1)} | by_kind

    return bootstrap(counts, scores_of)


def best_rows(scores_NK: Tensor, rows_NK: Tensor) -> list[int]:
    return rows_NK.gather(1, scores_NK.argmax(1, keepdim=True))[:, 0].tolist()


def load_wrong_translations(path: Path | None) -> WrongTranslations:
    """Read LASER's file for xSIM++, {candidate: {"src": sentence, "errtype": type}}, if there is one. Raises
    UserError."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {text.strip(): (made["src"].strip(), str(made["errtype"])) for text, made in found.items()}
    except OSError as error:
        raise UserError(f"--xsim_plus {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f'--xsim_plus {path} is not LASER\'s JSON, {{candidate: {{"src": sentence, "errtype": type}}}}'
        ) from None


def accuracies(first_NH: Tensor, second_NH: Tensor, margin: str, langs: tuple[str, ...]) -> Scores:
    """The share of unit vectors in `first_NH` whose nearest one in `second_NH` has the same row number, the share in
    the other direction, and the mean of both."""
    penalties = hubness(first_NH, second_NH) if margin == "csls" else None
    (_, there_N1), (_, back_N1) = nearest_both(first_NH, second_NH, 1, penalties)
    same_N1 = torch.arange(len(first_NH), device=first_NH.device)[:, None]
    right_N2 = torch.cat([there_N1 == same_N1, back_N1 == same_N1], 1)
    return both_directions(right_N2.cpu().numpy(), langs, "", "accuracy")


def hubness(
    x_NH: Tensor, y_MH: Tensor, k: int = NEIGHBOURS, numbers: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Half of r(x) [N] and of r(y) [M]: a cosine minus both is half of csls. numbers: see neighbours.nearest_both."""
    (there, _), (back, _) = nearest_both(x_NH, y_MH, k, numbers=numbers)
    return there.mean(1) / 2, back.mean(1) / 2


def embed(model: Exported, texts: list[str], language: int, of: Sequence[tuple[str, int]]) -> Vectors:
    """Unit vectors [n_texts, H] for each pooling and layer in `of`. A vector is the mean state of a sentence's tokens
    without special tokens, or the state of [CLS]."""
    return embed_ids(model, model.tokenizer.encode(texts), language, of)


def embed_sides(
    model: Exported, texts: Sequence[list[str]], langs: Sequence[str], chosen: Sequence[Variant]
) -> list[Vectors]:
    """The vectors of the texts in each language, for all variants."""
    numbers, keys = model.language_ids(langs), [variant.vectors for variant in chosen]
    return [embed(model, side, numbers[lang], keys) for lang, side in zip(langs, texts, strict=True)]


def embed_ids(model: Exported, sentences: list[list[int]], language: int, of: Sequence[tuple[str, int]]) -> Vectors:
    """Do the same as `embed` for the sentences' token ids without special tokens."""
    poolings, layers = (list(dict.fromkeys(choices)) for choices in zip(*of, strict=True))
    ids = [sentence[: model.longest - 2] for sentence in sentences]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    found: dict[tuple[str, int], list[Tensor]] = {key: [] for key in product(poolings, layers)}
    for start in range(0, len(order), BATCH):
        chosen = [ids[i] for i in order[start : start + BATCH]]
        stream_batch = stream_batch_of(model, chosen, language, poolings)
        for layer, states in zip(layers, layer_states(model, stream_batch, layers), strict=True):
            for pooling, vectors in zip(poolings, states.split(len(chosen)), strict=True):
                found[pooling, layer].append(F.normalize(vectors, dim=-1))
    if not ids:
        return {key: torch.empty(0, model.encoder.width, device=model.device) for key in found}
    back = torch.tensor(order).argsort().to(model.device)
    return {key: torch.cat(vectors)[back] for key, vectors in found.items()}


@torch.no_grad()  # not inference_mode: masks are kept for later passes, of training too
def layer_states(model: Exported, stream_batch: StreamBatch, layers: Sequence[int]) -> list[Tensor]:
    """The states [S, H] that a stream batch reads, at each of the layers."""
    inputs = to_device(pack_row({"": stream_batch}, model.longest, model.tokenizer.sep_id).inputs, model.device)
    hidden = model.encoder.hidden_states(inputs.tokens)
    return [alignment_gather(hidden[layer], *inputs.gather) for layer in layers]


def stream_batch_of(model: Exported, sentences: list[list[int]], language: int, poolings: Sequence[str]) -> StreamBatch:
    """A stream batch of `[CLS] sentence [SEP]`, with the states that each pooling reads ("tokens": of all)."""
    examples = [Example(("",), (sentence,), None, np.uint64(0)) for sentence in sentences]
    sequences = join_segments(model.tokenizer, [[(example, 0)] for example in examples], {"": language})
    is_last = sequences.offsets == sequences.lengths[sequences.numbers] - 1
    tokens = np.flatnonzero((sequences.offsets > 0) & ~is_last)
    reads = {
        "mean": StateIndices(tokens, sequences.lengths - 2),
        "cls": StateIndices(sequences.starts),
        "tokens": StateIndices(tokens),
    }
    types: Types | None = "languages" if model.language_embeddings else None
    return StreamBatch(sequences, {pooling: reads[pooling] for pooling in poolings}, {}, len(sentences), types=types)
