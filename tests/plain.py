"""A plain reference: stock Hugging Face models on padded batches, dense logits, dense matrices, loops.

It knows nothing of rows, gathers, flat encoders or a head with weights. Of a step's pieces it takes token ids, places
that are masked, labels and numbers; of its samples, word links.

Shape letters: B sequences, L tokens of the longest, V vocabulary, H hidden width, P pairs, K keys, N entries.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from xscale.data.sequences import Example, Sequences
from xscale.data.stream_batch import StreamBatch
from xscale.data.tokenizer import Tokenizer

Word = tuple[int, int]
"""(side of the pair, number of the word)"""


class Term(NamedTuple):
    factor: float
    total: Tensor
    """Over its targets."""
    targets: int
    right: int = 0
    """Targets predicted right."""
    divisor: int | None = None
    """What divides the total, where it is not the targets."""

    @property
    def mean(self) -> Tensor:
        return self.total / (self.divisor or self.targets)


# Pieces without their layout


def split(values: Any, lengths: Any) -> list[list[Any]]:
    ends = [int(lengths[:n].sum()) for n in range(len(lengths) + 1)]
    return [values[a:b].tolist() for a, b in pairwise(ends)]


def ids_of(sequences: Sequences) -> list[list[int]]:
    return split(sequences.ids, sequences.lengths)


def sequences_of(stream_batch: StreamBatch) -> tuple[list[list[int]], list[dict[int, int]]]:
    """Ids of each sequence as the model sees them, and its labels by place: those of the piece's first term."""
    inputs = ids_of(stream_batch.sequences)
    labels: list[dict[int, int]] = [{} for _ in inputs]
    if "masked" not in stream_batch.states:
        return inputs, labels
    where = [(s, place) for s, ids in enumerate(inputs) for place in range(len(ids))]
    first = next(iter(stream_batch.labels.values()))
    for place, label in zip(stream_batch.states["masked"].columns.tolist(), first.tolist(), strict=True):
        sequence, at = where[place]
        labels[sequence][at] = label
    return inputs, labels


def originals(stream_batch: StreamBatch) -> list[list[int]]:
    """Ids of each sequence before masking, where labels are what was masked."""
    return [
        [labels.get(place, token) for place, token in enumerate(ids)]
        for ids, labels in zip(*sequences_of(stream_batch), strict=True)
    ]


def part_of(sequences: Sequences, start: int, end: int) -> Sequences:
    """Some of the sequences; without word numbers."""
    a, b = (int(sequences.lengths[:n].sum()) for n in (start, end))
    tokens = {name: getattr(sequences, name)[a:b] for name in ("ids", "positions", "languages", "segments")}
    each = {name: getattr(sequences, name)[start:end] for name in ("lengths", "random_keys")}
    return replace(sequences, **tokens, **each, word_of_token=None)


# Models


def run(model: Any, sequences: Sequences, types: str | None = None) -> Any:
    """Output of a Hugging Face model for a padded batch."""

    def padded(values: Any, fill: int) -> Tensor:
        return pad_sequence([torch.tensor(v) for v in split(values, sequences.lengths)], True, fill)

    config, inputs = model.config, {}
    ids_BL = padded(sequences.ids, config.pad_token_id)
    if (sequences.positions != sequences.indices_in_sequence).any():  # else the model counts for itself
        first = config.pad_token_id + 1 if "roberta" in config.model_type else 0
        inputs["position_ids"] = padded(sequences.positions, 0) + first
    if types:
        inputs["token_type_ids"] = padded(getattr(sequences, types), 0)
    mask_BL = pad_sequence([torch.ones(int(n), dtype=torch.long) for n in sequences.lengths], True)
    return model(input_ids=ids_BL, attention_mask=mask_BL, output_hidden_states=True, **inputs)


def head_of(lm: Any) -> tuple[Any, Callable[[Tensor], Tensor], Any, Any]:
    """W1, GELU, LN and W of a masked-LM model: it says W(LN(GELU(W1 h)))."""
    kind = lm.config.model_type
    if kind == "bert":
        transform = lm.cls.predictions.transform
        return transform.dense, F.gelu, transform.LayerNorm, lm.cls.predictions.decoder
    if kind == "xlm-roberta":
        return lm.lm_head.dense, F.gelu, lm.lm_head.layer_norm, lm.lm_head.decoder
    if kind == "modernbert":
        return lm.head.dense, F.gelu, lm.head.norm, lm.decoder
    assert kind == "distilbert"
    return lm.vocab_transform, F.gelu, lm.vocab_layer_norm, lm.vocab_projector


@dataclass(frozen=True)
class CrossEntropy:
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, logits_BLV: Tensor, labels: list[dict[int, int]]) -> tuple[Tensor, int, int]:
        """Over all positions that have a label, -100 at the others: sum, how many, and how many are right."""
        labels_BL = torch.full(logits_BLV.shape[:2], -100)
        for sequence, of_sequence in enumerate(labels):
            for place, label in of_sequence.items():
                labels_BL[sequence, place] = label
        x, y = logits_BLV.flatten(0, 1), labels_BL.flatten()
        total = F.cross_entropy(x, y, reduction="sum", ignore_index=-100, label_smoothing=self.label_smoothing)
        total = total + self.z_loss * (torch.logsumexp(x, -1).square() * (y != -100)).sum()
        return total, int((y != -100).sum()), int((x.argmax(-1) == y).sum())


# Objectives


@dataclass(frozen=True)
class Model:
    """What is trained, and what a stream's companion holds, as stock modules and tensors."""

    lm: Any
    """Hugging Face's masked-LM model."""
    heads: dict[str, Any]
    """Stream -> the objective's own layers."""
    frozen: dict[str, Any]
    """Stream -> the second model, for PPA with its projection: (model, w1, w2)."""
    queue_KD: Tensor | None = None
    cross_entropy: CrossEntropy = CrossEntropy()


def terms(
    objective: str,
    model: Model,
    stream: str,
    stream_batch: StreamBatch,
    examples: list[Example],
    options: Any,
    tokenizer: Tokenizer,
) -> dict[str, Term]:
    """Of a stream's whole step. examples: its records."""
    if objective == "alignlm":
        return alignlm(model, stream, stream_batch, examples, options, tokenizer)
    if objective == "contextual":
        return contextual(model, stream, stream_batch, examples, options, tokenizer)
    if objective == "word_contrast":
        return {"words": word_contrast(model, stream_batch, examples, options)}
    if objective == "translation_ranking":
        return {"ranking": translation_ranking(model, stream_batch, options)}
    if objective == "ppa":
        return ppa(model, stream, stream_batch, examples, options, tokenizer)
    found = {"mlm": words(model, stream_batch)}
    if objective == "align_mlm":
        found["align"] = align(model, stream_batch, options.alpha)
    return found


def words(model: Model, stream_batch: StreamBatch, factor: float = 1.0) -> Term:
    """MLM and all that is one with it."""
    logits_BLV = run(model.lm, stream_batch.sequences, stream_batch.types).logits
    return Term(factor, *model.cross_entropy(logits_BLV, sequences_of(stream_batch)[1]))


def align(model: Model, stream_batch: StreamBatch, alpha: float) -> Term:
    table_VH = model.lm.get_input_embeddings().weight
    ids, starts = stream_batch.arrays["ids"].tolist(), stream_batch.arrays["starts"].tolist()
    mean_NV = np.zeros((len(starts), len(table_VH)))
    for n, (a, b) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
        for token in ids[a:b]:
            mean_NV[n, token] += 1 / (b - a)
    a_NH, b_NH = (torch.from_numpy(mean_NV) @ table_VH).chunk(2)
    cosine_N = (a_NH * b_NH).sum(-1) / (a_NH.square().sum(-1).sqrt() * b_NH.square().sum(-1).sqrt())
    return Term(alpha, -cosine_N.sum(), len(cosine_N))


def words_of(ids: list[int], sides: list[list[tuple[int, int]]], tokenizer: Tokenizer) -> list[Word | None]:
    """For each token of `[CLS] S [SEP] T [SEP]` its word; None: special.

    sides: each text's (token, word). The sequence may begin with either, and hold only the beginnings of both.
    """
    first = ids.index(tokenizer.sep_id) - 1
    second = len(ids) - first - 3
    for swap in (0, 1):
        a, b = sides[swap][:first], sides[1 - swap][:second]
        if ids == [
            tokenizer.cls_id,
            *(token for token, _ in a),
            tokenizer.sep_id,
            *(token for token, _ in b),
            tokenizer.sep_id,
        ]:
            return [None, *((swap, w) for _, w in a), None, *((1 - swap, w) for _, w in b), None]
    raise AssertionError("the sequence is not made of its pair")


def sides_of(example: Example) -> list[list[tuple[int, int]]]:
    assert example.words is not None
    return [
        list(zip(ids, text.word_of_token, strict=True)) for ids, text in zip(example.ids, example.words, strict=True)
    ]


def links_of(links: str | None) -> set[tuple[int, int]]:
    assert links is not None
    return {(int(a), int(b)) for a, b in (link.split("-") for link in links.split())}


def dense_A(words: list[Word | None], links: str | None, expand: str) -> Tensor:
    """A[i, j] = 1 where tokens i and j are of linked words [L, L]."""
    linked, m = links_of(links), len(words)
    A = np.zeros((m, m))
    for i in range(m):
        for j in range(m):
            a, b = words[i], words[j]
            if a is None or b is None or a[0] == b[0]:
                continue
            link = (a[1], b[1]) if a[0] == 0 else (b[1], a[1])
            first_pieces = words[i - 1] != a and words[j - 1] != b
            if link in linked and (expand == "all" or first_pieces):
                A[i, j] = 1
    return torch.from_numpy(A)


def alignlm(
    model: Model, stream: str, stream_batch: StreamBatch, examples: list[Example], options: Any, tokenizer: Tokenizer
) -> dict[str, Term]:
    """Equations 1 to 11, with a matrix A for each pair and both predictions at every position."""
    by_key = {int(example.random_key): example for example in examples}
    H_BLH = run(model.lm, stream_batch.sequences, stream_batch.types).hidden_states[-1]
    A_BLL = H_BLH.new_zeros(*H_BLH.shape[:2], H_BLH.shape[1])
    for b, (ids, key) in enumerate(zip(originals(stream_batch), stream_batch.sequences.random_keys, strict=True)):
        example = by_key[int(key)]
        A = dense_A(words_of(ids, sides_of(example), tokenizer), example.links, options.expand)
        A_BLL[b, : len(ids), : len(ids)] = A
    H_star = A_BLL.transpose(1, 2) @ H_BLH
    counts_BL = A_BLL.sum(1)
    if options.normalize == "mean":
        H_star = H_star / counts_BL.clamp(min=1)[..., None]
    heads, (W1, GELU, LN, W) = model.heads[stream], head_of(model.lm)
    mono_BLV = W(LN(heads.linear(GELU(W1(H_BLH)))))
    bi_BLV = W(LN(heads.linear(GELU(heads.W3(heads.W2(H_star))))))
    labels = sequences_of(stream_batch)[1]
    linked = [{i: label for i, label in of_sequence.items() if counts_BL[b, i]} for b, of_sequence in enumerate(labels)]
    masked = sum(map(len, labels))  # (9): both sums run over the same i
    return {
        "mono": Term(1.0, *model.cross_entropy(mono_BLV, labels), masked),
        "bi": Term(options.bilingual_weight, *model.cross_entropy(bi_BLV, linked), masked),
    }


def contextual(
    model: Model, stream: str, stream_batch: StreamBatch, examples: list[Example], options: Any, tokenizer: Tokenizer
) -> dict[str, Term]:
    """L and R, a link and a token at a time. The first half of the sequences is in the anchor language."""
    P = len(stream_batch.sequences.lengths) // 2
    by_key = {int(example.random_key): example for example in examples}
    ids = ids_of(stream_batch.sequences)
    now_BLH = run(model.lm, stream_batch.sequences).hidden_states[-1]
    with torch.no_grad():
        then_PLH = run(model.frozen[stream], part_of(stream_batch.sequences, 0, P)).hidden_states[-1]
    L = R = now_BLH.new_zeros(())
    links = tokens = 0
    for p, key in enumerate(stream_batch.sequences.random_keys[:P]):
        example = by_key[int(key)]
        anchor = example.langs.index(options.anchor) if options.anchor else 0
        last: dict[Word, Tensor] = {}
        for side, b in ((anchor, p), (1 - anchor, P + p)):
            kept = sides_of(example)[side][: len(ids[b]) - 2]
            assert ids[b] == [tokenizer.cls_id, *(token for token, _ in kept), tokenizer.sep_id]
            last |= {(side, w): now_BLH[b, 1 + i] for i, (_, w) in enumerate(kept)}
        whole_words = [text.is_word for text in example.words or ()]
        every = links_of(example.links)
        for i, j in every:
            if sum(i == link[0] or j == link[1] for link in every) > 1:
                continue  # not one-to-one
            if (0, i) in last and (1, j) in last and whole_words[0][i] and whole_words[1][j]:
                L = L + (last[0, i] - last[1, j]).square().sum()
                links += 1
        for i in range(1, len(ids[p]) - 1):
            R = R + (now_BLH[p, i] - then_PLH[p, i]).square().sum()
            tokens += 1
    whole = sum(len(sequence) - 2 for sequence in ids)
    return {"align": Term(1.0, L, links, 0, whole), "anchor": Term(options.anchor_weight, R, tokens, 0, whole)}


def ppa(
    model: Model, stream: str, stream_batch: StreamBatch, examples: list[Example], options: Any, tokenizer: Tokenizer
) -> dict[str, Term]:
    """Equations 2 to 4, a pair and a negative at a time."""
    found, n = {}, len(stream_batch.sequences.lengths)
    P = len(stream_batch.arrays["number"]) if options.moco_weight else 0
    if options.tlm_weight:
        masked = replace(stream_batch, sequences=part_of(stream_batch.sequences, 0, n - P))
        found["mlm" if options.replace_tlm_with_mlm else "tlm"] = words(model, masked, options.tlm_weight)
    if not options.moco_weight:
        return found
    zq_PD, zk_PD = views(model, stream, stream_batch, options)
    by_key = {int(example.random_key): example for example in examples}
    assert stream_batch.auxiliary is not None
    queries, keys = part_of(stream_batch.sequences, n - P, n), stream_batch.auxiliary.sequences
    for query, key, random_key in zip(ids_of(queries), ids_of(keys), queries.random_keys, strict=True):
        sides = [[tokenizer.cls_id, *ids, tokenizer.sep_id] for ids in by_key[int(random_key)].ids]
        assert [query, key] in (sides, sides[::-1])
    total, right = zq_PD.new_zeros(()), 0
    negatives_KD = torch.empty(0, zq_PD.shape[1]) if model.queue_KD is None else model.queue_KD
    for p in range(P):
        positive = torch.exp(zq_PD[p] @ zk_PD[p] / options.temperature)
        others = [torch.exp(zq_PD[p] @ k / options.temperature) for k in negatives_KD.to(zq_PD)]
        total = total - torch.log(positive / (positive + sum(others)))
        right += all(bool(positive > other) for other in others)
    return {"moco": Term(options.moco_weight, total, P, right), **found}


def views(model: Model, stream: str, stream_batch: StreamBatch, options: Any) -> tuple[Tensor, Tensor]:
    """z of each pair's query view and, without gradient, of its key view [P, D]."""
    n, P = len(stream_batch.sequences.lengths), len(stream_batch.arrays["number"])
    assert stream_batch.auxiliary is not None
    own = model.heads[stream]
    views = part_of(stream_batch.sequences, n - P, n)
    zq = [
        projected(x, own.w1.weight, own.w2.weight, options)
        for x in vectors(run(model.lm, views).hidden_states[-1], views, options)
    ]
    key, w1, w2 = model.frozen[stream]
    with torch.no_grad():
        views = stream_batch.auxiliary.sequences
        zk = [projected(x, w1, w2, options) for x in vectors(run(key, views).last_hidden_state, views, options)]
    return torch.stack(zq), torch.stack(zk)


def word_contrast(model: Model, stream_batch: StreamBatch, examples: list[Example], options: Any) -> Term:
    """A link and a negative at a time. The first half of the sequences are first sides, the second half second ones."""
    P = len(stream_batch.sequences.lengths) // 2
    by_key = {int(example.random_key): example for example in examples}
    ids = ids_of(stream_batch.sequences)
    H_BLH = run(model.lm, stream_batch.sequences).hidden_states[-1]
    samples: list[Sample] = []
    for p, key in enumerate(stream_batch.sequences.random_keys[:P]):
        example = by_key[int(key)]
        tokens: dict[Word, list[int]] = {}
        for side, b in ((0, p), (1, P + p)):
            for i, (_, w) in enumerate(sides_of(example)[side][: len(ids[b]) - 2]):
                tokens.setdefault((side, w), []).append(1 + i)
        every = links_of(example.links)
        for i, j in sorted(every):
            alone = sum(i == link[0] or j == link[1] for link in every) == 1
            are_words = [text.is_word[w] for text, w in zip(example.words or (), (i, j), strict=True)]
            if alone and all(are_words) and (0, i) in tokens and (1, j) in tokens:
                first, second = tokens[0, i], tokens[1, j]
                texts = tuple(ids[p][t] for t in first), tuple(ids[P + p][t] for t in second)
                samples.append(Sample(H_BLH[p, first].mean(0), H_BLH[P + p, second].mean(0), texts))
    return contrast(samples, options.temperature)


def translation_ranking(model: Model, stream_batch: StreamBatch, options: Any) -> Term:
    """A pair and a negative at a time. The first half of the sequences are first sides, the second half second ones."""
    P = len(stream_batch.sequences.lengths) // 2
    ids = ids_of(stream_batch.sequences)
    found = vectors(run(model.lm, stream_batch.sequences).hidden_states[-1], stream_batch.sequences, options)
    samples = [Sample(found[p], found[P + p], (tuple(ids[p]), tuple(ids[P + p]))) for p in range(P)]
    return contrast(samples, options.temperature, options.margin)


class Sample(NamedTuple):
    first: Tensor
    second: Tensor
    texts: tuple[tuple[int, ...], tuple[int, ...]]


def contrast(samples: list[Sample], temperature: float, margin: float = 0.0) -> Term:
    """Both directions of a softmax over the samples that have no text in common."""
    total, right = torch.zeros(()).double(), 0
    for i, sample in enumerate(samples):
        others = [other for k, other in enumerate(samples) if k != i and not {*sample.texts} & {*other.texts}]
        own = cosine(sample.first, sample.second)
        forth = [cosine(sample.first, other.second) for other in others]
        back = [cosine(other.first, sample.second) for other in others]
        for negatives in (forth, back):
            scores = torch.stack([own - margin, *negatives]) / temperature
            total = total + (scores.exp().sum().log() - scores[0]) / 2
        right += all(bool(own > negative) for negative in forth)
    return Term(1.0, total, len(samples), right)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()


def vectors(states_PLH: Tensor, views: Sequences, options: Any) -> list[Tensor]:
    if options.pooling == "cls":
        return list(states_PLH[:, 0])
    return [states_LH[1 : n - 1].mean(0) for states_LH, n in zip(states_PLH, views.lengths, strict=True)]


def projected(x_H: Tensor, w1: Tensor, w2: Tensor, options: Any) -> Tensor:
    z = w2 @ torch.relu(w1 @ (x_H / x_H.square().sum().sqrt()))
    return z / z.square().sum().sqrt() if options.normalize_z else z
