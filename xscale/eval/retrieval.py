"""Measures sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour?

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
from xscale.eval.model import ExportedModel, Scores, read_texts
from xscale.eval.neighbours import nearest_both, ratio_margins
from xscale.ops.alignment_gather import alignment_gather
from xscale.step.step import to_device

BATCH = 64
NEIGHBOURS, XSIM_NEIGHBOURS = 10, 4
"""The number of nearest neighbours k in csls, and in xSIM."""
POOLINGS, MARGINS, XSIM = ("mean", "cls"), ("cosine", "csls"), "xsim"
Vectors = dict[tuple[str, int], Tensor]
"""{(pooling, layer): unit vectors [sentences, H]}. Layers are counted from the end, -1 for the last."""
WrongTranslations = dict[str, tuple[str, str]]
"""{wrong translation: (right translation from which it was made, type of the error)}, for xSIM++."""
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
    """Return every combination of pooling, layer and margin. The name of a variant has the values that are not the
    default, and those of options with several values. poolings: None stands for the model's own. layers: indices from
    either end, or ALL. Raises UserError for layers that the model lacks."""
    variants, poolings, indices = [], poolings or [model.pooling], layer_indices(layers, model.num_layers)
    for pooling, layer, margin in product(poolings, indices, margins):
        name = [*words_for_choice(pooling, poolings, model.pooling), *words_for_choice(margin, margins, MARGINS[0])]
        name += [f"layer {model.num_layers + 1 + layer}"] if len(indices) > 1 or layer != -1 else []
        variants.append(Variant(" ".join(name), pooling, layer, margin))
    return variants


def words_for_choice(choice: str, choices: Sequence[str], default: str) -> list[str]:
    """Return the words for a choice in a variant's name: none if it is the default and the only one of `choices`."""
    return [choice] if len(set(choices)) > 1 or choice != default else []


def layer_indices(layers: Sequence[str | int], last: int) -> list[int]:
    """Return the layers' indices from the end, -1 for the last. layers: indices from either end, or ALL. last: the
    number of layers. Raises UserError for layers that the model lacks."""
    if ALL in layers:
        return list(range(-last - 1, 0))
    absent = [layer for layer in layers if not -last - 1 <= int(layer) <= last]
    if absent:
        raise UserError(
            f"--layer {' '.join(map(str, absent))}: the model has layers 1 to {last}, and 0 for its embeddings' output"
        )
    return list(dict.fromkeys(int(layer) - last - 1 if int(layer) >= 0 else int(layer) for layer in layers))


def evaluate(
    model: ExportedModel,
    source: Source,
    limit: int,
    variants: Sequence[Variant] | None = None,
    wrong: WrongTranslations | None = None,
) -> dict[str, Scores]:
    """Return {variant's name: accuracies, or for xSIM error rates}. variants: None stands for the default one."""
    texts = [list(side) for side in zip(*read_texts(source, limit), strict=True)]
    variants = variants or make_variants(model)
    sides = embed_sides(model, texts, source.langs, variants)
    return evaluate_vectors(model, sides, texts, source.langs, variants, wrong or {})


def evaluate_vectors(
    model: ExportedModel,
    sides: Sequence[Vectors],
    texts: Sequence[list[str]],
    langs: tuple[str, ...],
    variants: Sequence[Variant],
    wrong: WrongTranslations,
) -> dict[str, Scores]:
    """Do the same as `evaluate`, given the texts of both languages and their vectors (sides)."""
    results, extra = {}, dict[int, tuple[WrongTranslations, Vectors]]()
    for side in (0, 1) if any(variant.margin == XSIM for variant in variants) else ():
        present = set(texts[side])
        wrong_here = {text: origin for text, origin in wrong.items() if origin[0] in present}
        if wrong_here:
            (wrong_vectors,) = embed_sides(model, [list(wrong_here)], [langs[side]], variants)
            extra[side] = wrong_here, wrong_vectors
    for variant in variants:
        vectors = [side[variant.vectors] for side in sides]
        if variant.margin != XSIM:
            results[variant.name] = accuracies(vectors[0], vectors[1], variant.margin, langs)
            continue
        results[variant.name] = xsim(vectors, texts, langs)
        for side, (wrong_here, wrong_vectors) in extra.items():
            candidates = torch.cat([vectors[side], wrong_vectors[variant.vectors]])
            direction = "->".join([langs[1 - side], langs[side]])
            results[variant.name] |= xsim_plus(vectors[1 - side], candidates, texts[side], wrong_here, direction)
    return results


def xsim(vectors: Sequence[Tensor], texts: Sequence[list[str]], langs: tuple[str, ...]) -> Scores:
    """Return xSIM's error rates: shares of sentences whose best candidate is no translation, by direction, and their
    mean."""
    errors = [
        [texts[1 - side][row] != texts[1 - side][n] for n, row in enumerate(best_rows(*neighbours))]
        for side, neighbours in enumerate(ratio_margins(vectors[0], vectors[1], XSIM_NEIGHBOURS))
    ]
    return shares_by_direction(np.array(errors).T, langs, " xsim", "xsim")


def shares_by_direction(true_N2: np.ndarray, langs: tuple[str, ...], suffix: str, mean: str) -> Scores:
    """Return the shares of true values in both columns, their mean, and the number of sentences N. true_N2: booleans,
    from the first language to the second, and back. suffix: ends the names of the shares. mean: the mean's name."""
    a, b = langs

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        there, back, n = np.moveaxis(sums, -1, 0)
        return {f"{a}->{b}{suffix}": there / n, f"{b}->{a}{suffix}": back / n, mean: (there + back) / n / 2}

    counts_N3 = np.column_stack([true_N2, np.ones(len(true_N2))])
    return bootstrap(counts_N3, scores_of) | {"sentences": len(true_N2)}


def xsim_plus(
    x_NH: Tensor, y_MH: Tensor, translations: list[str], wrong: WrongTranslations, direction: str
) -> dict[str, float]:
    """Return xSIM++'s error rate and the share of each type of error; `misaligned`: a candidate made from another
    sentence. x_NH: the sentences. y_MH: their N translations, then the wrong ones. direction: the beginning of the
    scores' names."""
    candidates = [*translations, *wrong]
    error_types = ["misaligned", *dict.fromkeys(error_type for _, error_type in wrong.values())]
    counts = np.zeros((len(x_NH), 1 + len(error_types)))
    counts[:, 0] = 1
    for n, row in enumerate(best_rows(*ratio_margins(x_NH, y_MH, XSIM_NEIGHBOURS)[0])):
        best, right = candidates[row], translations[n]
        origin, error_type = wrong.get(best, ("", ""))
        if best != right:
            counts[n, 1 + (error_types.index(error_type) if origin == right else 0)] = 1

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        shares = sums[..., 1:] / sums[..., :1]
        by_type = {f"{direction} xsim++ {name}": shares[..., i] for i, name in enumerate(error_types)}
        return {f"{direction} xsim++": shares.sum(-1)} | by_type

    return bootstrap(counts, scores_of)


def best_rows(scores_NK: Tensor, rows_NK: Tensor) -> list[int]:
    """Return the row with the highest score among each sentence's K neighbours."""
    return rows_NK.gather(1, scores_NK.argmax(1, keepdim=True))[:, 0].tolist()


def load_wrong_translations(path: Path | None) -> WrongTranslations:
    """Read LASER's file {wrong translation: {"src": right one, "errtype": type}}; no path returns {}. Raises
    UserError."""
    if path is None:
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).items()
        return {text.strip(): (entry["src"].strip(), str(entry["errtype"])) for text, entry in entries}
    except OSError as error:
        raise UserError(f"--xsim_plus {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f'--xsim_plus {path} is not LASER\'s JSON, {{candidate: {{"src": sentence, "errtype": type}}}}; give that'
        ) from None


def accuracies(first_NH: Tensor, second_NH: Tensor, margin: str, langs: tuple[str, ...]) -> Scores:
    """Return the retrieval accuracy by direction, and the mean of both: the share of rows whose nearest row of the
    other matrix has the same index. Rows are unit vectors."""
    penalties = hubness(first_NH, second_NH) if margin == "csls" else None
    (_, there_N1), (_, back_N1) = nearest_both(first_NH, second_NH, 1, penalties)
    same_N1 = torch.arange(len(first_NH), device=first_NH.device)[:, None]
    right_N2 = torch.cat([there_N1 == same_N1, back_N1 == same_N1], 1)
    return shares_by_direction(right_N2.cpu().numpy(), langs, "", "accuracy")


def hubness(
    x_NH: Tensor, y_MH: Tensor, k: int = NEIGHBOURS, ids: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return r(x) / 2 [N] and r(y) / 2 [M] of csls; a cosine minus both is csls / 2. ids: see nearest_both."""
    (there, _), (back, _) = nearest_both(x_NH, y_MH, k, ids=ids)
    return there.mean(1) / 2, back.mean(1) / 2


def embed(model: ExportedModel, texts: list[str], language_id: int, keys: Sequence[tuple[str, int]]) -> Vectors:
    """Return unit vectors [texts, H] for each (pooling, layer) in `keys`. Pooling "mean" takes the mean state of a
    text's tokens without special tokens, "cls" the state of [CLS]."""
    return embed_ids(model, model.tokenizer.encode(texts), language_id, keys)


def embed_sides(
    model: ExportedModel, texts: Sequence[list[str]], langs: Sequence[str], variants: Sequence[Variant]
) -> list[Vectors]:
    """Return for each language the vectors of its texts that the variants need."""
    language_ids, keys = model.language_ids(langs), [variant.vectors for variant in variants]
    return [embed(model, side, language_ids[lang], keys) for lang, side in zip(langs, texts, strict=True)]


def embed_ids(
    model: ExportedModel, sentences: list[list[int]], language_id: int, keys: Sequence[tuple[str, int]]
) -> Vectors:
    """Do the same as `embed`, given the sentences' token ids without special tokens."""
    poolings, layers = (list(dict.fromkeys(choices)) for choices in zip(*keys, strict=True))
    ids = [sentence[: model.max_length - 2] for sentence in sentences]
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
    """Return for each layer the hidden states [S, H] that the stream batch names in its `reads`."""
    inputs = to_device(pack_row({"": stream_batch}, model.tokenizer.sep_id).inputs, model.device)
    hidden = model.encoder.hidden_states(inputs.tokens)
    return [alignment_gather(hidden[layer], *inputs.gather) for layer in layers]


def make_stream_batch(
    model: ExportedModel, sentences: list[list[int]], language_id: int, poolings: Sequence[str]
) -> StreamBatch:
    """Return a stream batch of sequences `[CLS] sentence [SEP]`. For each pooling it names the states to read: for
    "mean" and "cls" one per sentence, for "tokens" one per token."""
    examples = [Example(("",), (sentence,), None, np.uint64(0)) for sentence in sentences]
    sequences = join_segments(model.tokenizer, [[(example, 0)] for example in examples], {"": language_id})
    is_last = sequences.offsets == sequences.lengths[sequences.numbers] - 1
    tokens = np.flatnonzero((sequences.offsets > 0) & ~is_last)
    reads = {
        "mean": StateIndices(tokens, sequences.lengths - 2),
        "cls": StateIndices(sequences.starts),
        "tokens": StateIndices(tokens),
    }
    types: Types | None = "languages" if model.language_embeddings else None
    return StreamBatch(sequences, {pooling: reads[pooling] for pooling in poolings}, {}, len(sentences), types=types)
