"""PPA (Pan et al. 2021): a contrastive loss over whole sentences, and TLM, on the same pairs.

    h = x / ||x||;   z = W2 ReLU(W1 h)        x: state of [CLS], or mean state of the sentence   (2)
    L_MoCo = -log exp(z_q . z_k+ / tau) / sum over {k+} and the queue of exp(z_q . z_k / tau)       (3)
    L = L_MoCo + L_TLM                                                                              (4)

A pair's sides are swapped with probability 1/2. The query encoder reads the first side alone, `[CLS] s [SEP]`, and the
momentum encoder the second (1). TLM reads both sides in this order, with the query encoder. Positions do not restart at
the second side, and there are no language embeddings.

Decided, where the paper is silent:
- W1 and W2 have no biases, as (2) is written. z is L2-normalised, as in MoCo (`normalize_z`).
- The queue is filled before the first step (`prefill`). It is the same on every rank, holds the keys of the global
  batch in global order, and does not change during an optimizer step, so the partition into rows does not matter.
- A key in the queue is left out of the sum if its pair shares a text with the query's pair; the metric `own_keys`
  counts such keys. Such a key comes from the same pair in an earlier epoch or in the prefill, from the same sentence in
  another pair, or from another translation of it.
- The momentum encoder is updated once after each optimizer step, but not after a skipped one (fp16 overflow). The keys
  of a skipped step still enter the queue, because its forward pass was sound; a key that is not finite becomes 0.
- The key encoder has the query encoder's dropout, unless `momentum_eval` is set.

While the weights change fast, the model can recognise a pair's key by its age, since the queue's keys are older.
`contrastive_accuracy` is then higher than `contrastive_accuracy_step`, which compares the keys of one step. With random
initial weights, z may hardly depend on the sentence, and then the model learns nothing but the age. `sentence_cosine`,
the mean cosine of the keys of two sentences of a step, is then near 1. This happens with [CLS]: start with `pooling:
mean`, or with `model.attention_gain: 1.0` and no dropout.

Shape letters: B pairs of a row, N of the step, M masked tokens, S states, H hidden width, D width of z, K keys in the
queue.
"""

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from xscale import rng
from xscale.data.packed_row import Row
from xscale.data.ragged import concatenated_ranges
from xscale.data.sequences import Example, Sequences, concat_sequences, join_segments
from xscale.data.stream_batch import CollateContext, Gather, StreamBatch, masked_lm
from xscale.models.encoder import Encoder
from xscale.models.momentum import MomentumEncoder, Queue
from xscale.objectives import tlm
from xscale.objectives.base import Losses, Objective, Parts, Prediction
from xscale.ops.alignment_gather import alignment_gather
from xscale.ops.rank_rows import all_gather_rows
from xscale.recipe import STRICT, Count, Fraction, LossFactor


@dataclass(frozen=True, config=STRICT)
class PpaOptions:
    in_phases: ClassVar[frozenset[str]] = frozenset({"mask_prob", "temperature"})
    temperature: PositiveFloat = 0.05
    """The temperature tau of the softmax in the contrastive loss L_MoCo."""
    pooling: Literal["cls", "mean"] = "cls"
    """Which vector stands for a sentence. cls: the hidden state of [CLS], as in the paper. mean: the mean of the hidden
    states of all tokens except special tokens, as in the paper's footnote 1."""
    queue_size: Count = 32000
    """The number of sentence vectors in the queue (K in the paper). The queue has the newest vectors of the key encoder
    (a moving average of the trained encoder). The contrastive loss uses these vectors as negatives. `queue_size` must
    be at least the number of samples that the stream reads per step (its field `samples`)."""
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.999
    """The momentum m of the key encoder, a moving average of the trained encoder. After each update of the
    trained encoder, each weight k of the key encoder becomes m * k + (1 - m) * w, where w is the same weight of the
    trained encoder."""
    momentum_ramp: Annotated[float, Field(ge=0, le=1)] | None = None
    """The key encoder's momentum at the end of the run. It must not be below `momentum`. During the run, the momentum
    rises from `momentum` to this value along half a cosine, as in BYOL (Grill et al. 2020). null: the momentum stays
    constant."""
    projection: Count = 300
    """The number of dimensions of z, the projected sentence vector that the contrastive loss compares."""
    normalize_z: bool = True
    """true: z (the projected sentence vector) is L2-normalised, as in MoCo."""
    prefill: bool = True
    """true: before the first step, the run fills the queue with sentence vectors of the initial encoder. false: the
    queue is empty at first, and fills during training."""
    momentum_eval: bool = False
    """true: the key encoder (a moving average of the trained encoder) runs without dropout."""
    moco_weight: LossFactor = 1.0
    """The factor of the contrastive loss L_MoCo. With the factor 0, the run trains without this loss and without a key
    encoder (the row "-MoCo" in Table 5 of the paper)."""
    tlm_weight: LossFactor = 1.0
    """The factor of the TLM loss L_TLM. With the factor 0, the run trains without this loss (the row "-TLM" in Table 5
    of the paper)."""
    replace_tlm_with_mlm: bool = False
    """true: the objective masks and encodes the two sentences of a pair separately, so that L_TLM becomes an MLM loss
    (the row "repl TLM w/ MLM" in Table 5 of the paper)."""
    mask_prob: Fraction = 0.15
    """The probability that the objective chooses a token for prediction, as in mlm."""

    @model_validator(mode="after")
    def check_combination(self) -> Self:
        if not self.moco_weight and not self.tlm_weight:
            raise ValueError(
                "moco_weight and tlm_weight are both 0. Set moco_weight or tlm_weight to a positive number"
            )
        if self.momentum_ramp is not None and self.momentum_ramp < self.momentum:
            raise ValueError(
                f"momentum_ramp: {self.momentum_ramp:g} is below momentum: {self.momentum:g}. Set momentum_ramp to "
                "a larger number"
            )
        return self

    def momentum_at(self, step: int, steps: int) -> float:
        """Return m for the update after `step` (0, 1, ...) of `steps`. Without a ramp it is `momentum`; with one, it
        rises from there."""
        if self.momentum_ramp is None:
            return self.momentum
        falling = (1 + math.cos(math.pi * min(step / max(steps - 1, 1), 1.0))) / 2
        return self.momentum_ramp - (self.momentum_ramp - self.momentum) * falling

    @property
    def masked_lm_term(self) -> str:
        return "mlm" if self.replace_tlm_with_mlm else "tlm"


def queue_size_problem(options: PpaOptions, samples: int) -> str | None:
    """Return what is wrong with queue_size and the remedy, or None. samples: the stream's samples of a step."""
    if not options.moco_weight or options.queue_size >= samples:
        return None
    return (
        f"queue_size: {options.queue_size} is smaller than the number of samples per step ({samples}). Raise "
        f"queue_size to {samples} or more, or lower samples"
    )


def momentum_too_large_warnings(options: PpaOptions, records: int, steps: int) -> list[str]:
    follows = 1 / max(1 - options.momentum, 1e-9)
    if not options.moco_weight or options.momentum <= 0.95 or steps >= 3 * follows:
        return []
    return [
        f"momentum: {options.momentum} is too large for a run of {steps:,} steps. The weights of the momentum encoder "
        f"are a mean of the trained weights over about {follows:,.0f} steps, so they stay near the initial weights. "
        f"Train for {3 * follows:,.0f} steps or more, or set a smaller momentum, but at least 0.95. With less, the "
        "momentum encoder changes fast, and the encoder may learn to tell old vectors in PPA's queue from new vectors "
        "instead of learning the meaning of sentences"
    ]


def collate(samples: list[list[Example]], options: PpaOptions, context: CollateContext) -> StreamBatch:
    """Return the batch of samples, each of which is a single pair. Its sequences are TLM's, then the query views.

    A query view is the first side of a pair alone, a key view is the second side alone. The auxiliary sequences are the
    key views. The states are "masked" [M] and "query" [B], one for each query view. The array "number" [B] has each
    pair's index in the global batch, the array "texts" [B, 2] the hashes of its two texts. If the weight of L_TLM or
    L_MoCo is 0, what only this loss reads is left out.
    """
    pairs = context.fit_pairs(samples)
    first_sides = tlm.draw_first_sides(pairs)
    masked = StreamBatch(sentence_sequences([], [], context), {}, {}, 0)
    if options.tlm_weight:
        masked = masked_lm_batch(pairs, first_sides, options, context)
    stream_batch = replace(masked, samples=len(pairs))
    if not options.moco_weight:
        return stream_batch
    query = sentence_sequences(pairs, first_sides, context)
    key = sentence_sequences(pairs, [1 - side for side in first_sides], context)
    query_states = gather_cls_or_text_sum(query, options.pooling).shift(len(masked.sequences.ids))
    return replace(
        stream_batch,
        sequences=concat_sequences(masked.sequences, query),
        states=masked.states | {"query": query_states},
        target_counts=masked.target_counts | {"moco": len(pairs)},
        arrays={
            "number": np.array([pair.sample_number for pair in pairs], dtype=np.int64),
            "texts": np.stack([hash_each_text(query.ids, query.lengths), hash_each_text(key.ids, key.lengths)], 1),
        },
        auxiliary=StreamBatch(
            key, {"key": gather_cls_or_text_sum(key, options.pooling)}, {}, len(pairs), types=masked.types
        ),
    )


def masked_lm_batch(
    pairs: list[Example], first_sides: list[int], options: PpaOptions, context: CollateContext
) -> StreamBatch:
    """Return the batch of the term `masked_lm_term`: TLM, or MLM with `replace_tlm_with_mlm`."""
    segments = []
    for pair, first in zip(pairs, first_sides, strict=True):
        second = 1 - first
        if options.replace_tlm_with_mlm:
            # The masked tokens depend on a sequence's random key, so the two sequences of a pair need different ones.
            segments.append([(replace(pair, random_key=pair.random_key ^ _SIDE[first]), first)])
            segments.append([(replace(pair, random_key=pair.random_key ^ _SIDE[second]), second)])
        else:
            segments.append([(pair, first), (pair, second)])
    sequences = join_segments(context.tokenizer, segments, context.language_ids)
    types = None if options.replace_tlm_with_mlm else context.token_type_field(False)
    return masked_lm(sequences, context, mask_prob=options.mask_prob, types=types, term=options.masked_lm_term)


_SIDE = (rng.key("ppa", "side 0"), rng.key("ppa", "side 1"))


def sentence_sequences(pairs: list[Example], sides: list[int], context: CollateContext) -> Sequences:
    """Return the sequence `[CLS] s [SEP]` of each pair, where s is the pair's text on its side."""
    segments = [[segment] for segment in zip(pairs, sides, strict=True)]
    return join_segments(context.tokenizer, segments, context.language_ids)


def gather_cls_or_text_sum(sentences: Sequences, pooling: str) -> Gather:
    """Return the tokens whose states are summed for the vector of each sentence. A sum may replace the mean, because
    only the direction of the vector matters. pooling: "cls" or "mean"."""
    if pooling == "cls":
        return Gather.single(sentences.starts)
    last_offsets = np.repeat(sentences.lengths, sentences.lengths) - 1
    is_special = (sentences.indices_in_sequence == 0) | (sentences.indices_in_sequence == last_offsets)
    return Gather.sums(np.flatnonzero(~is_special), sentences.lengths - 2)


def hash_each_text(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a hash of each text's tokens, int64 [B]. ids: the tokens of all texts, concatenated; lengths: the number
    of tokens of each text, at least 1 [B]."""
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    token_hashes = rng.hash64(rng.hash64(rng.key("text"), concatenated_ranges(lengths)), ids)
    return np.add.reduceat(token_hashes, np.cumsum(lengths) - lengths).view(np.int64)


class Projection(nn.Module):
    """The projection z = W2 ReLU(W1 h) with h = x / ||x||."""

    def __init__(self, hidden: int, width: int, normalize: bool):
        super().__init__()
        self.w1 = nn.Linear(hidden, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.normalize = normalize

    def forward(self, x_BH: Tensor) -> Tensor:
        """Return z [B, D], in fp32 or wider."""
        h_BH = F.normalize(_in_fp32_or_wider(x_BH), dim=-1)
        z_BD = _in_fp32_or_wider(self.w2(F.relu(self.w1(h_BH.to(x_BH.dtype)))))
        return F.normalize(z_BD, dim=-1) if self.normalize else z_BD


def _in_fp32_or_wider(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Moco:
    """The auxiliary state of PPA: the key encoder and the queue."""

    def __init__(self, encoder: Encoder, projection: nn.Module, options: PpaOptions):
        self.options = options
        self.momentum = MomentumEncoder(encoder, projection)
        self.queue = Queue(options.queue_size, options.projection)
        self.prefill_samples = options.queue_size if options.prefill else 0
        self.step = self.steps = 0
        """The number of finished optimizer steps, and the number of steps of the whole run. StepModule sets the
        latter."""
        self.step_keys: tuple[Tensor, Tensor] | None = None
        """The keys [N, D] of the current step on all ranks, and their text hashes [N, 2], in the order of the samples;
        None before `gather_new_vectors`."""
        self._rows: list[Tensor] = []
        """For each call of `encode` since the ranks last exchanged their keys: its keys [B, D], and as bits the indices
        of their pairs in the global batch and the hashes of their texts."""

    @torch.no_grad()
    def encode(self, trained: Encoder, row: Row, arrays: list[dict[str, Tensor]]) -> Tensor:
        """Return z_k of each pair's key view [B, D]. If `trained` is in training mode, these vectors are kept for the
        queue, which they enter after the optimizer step."""
        self.queue.move_to(row.tokens.input_ids.device)
        key_encoder, projection = self.momentum.prepare_key_modules(trained.training and not self.options.momentum_eval)
        z_BD = projection(alignment_gather(key_encoder(row.tokens, row.places), *row.gather, *row.transposed))
        if trained.training:
            position_B1 = torch.cat([row_arrays["number"] for row_arrays in arrays])[:, None]
            texts_B2 = torch.cat([row_arrays["texts"] for row_arrays in arrays])
            # Integers as raw bits, so that one message has both.
            self._rows.append(torch.cat([z_BD, torch.cat([position_B1, texts_B2], 1).view(z_BD.dtype)], 1))
        return z_BD

    def gather_new_vectors(self, vector_counts_of_ranks: list[int] | None) -> None:
        if not self._rows:
            return
        rows, _ = all_gather_rows(torch.cat(self._rows), vector_counts_of_ranks)
        self._rows.clear()
        width = self.queue.ring_KD.shape[1]
        position_and_texts_N3 = rows[:, width:].contiguous().view(torch.int64)
        order = position_and_texts_N3[:, 0].argsort()
        self.step_keys = rows[order, :width], position_and_texts_N3[order, 1:]

    def update(self, weights_changed: bool) -> None:
        self._gather_and_enqueue(self.step + 1)
        if weights_changed:
            self.momentum.update(self.options.momentum_at(self.step, self.steps))
        self.step += 1

    def _gather_and_enqueue(self, born_step: int) -> None:
        """Add the new keys of all ranks to the queue. The ranks exchange the keys first, if they have not yet done so.
        born_step: the step from which the metric queue_age counts the age of these keys."""
        self.gather_new_vectors(None)
        if self.step_keys:
            keys_ND, texts_N2 = self.step_keys
            self.queue.push_and_zero_nonfinite(keys_ND, born_step, texts_N2)
        self.step_keys = None

    def enqueue_new_vectors(self) -> int:
        self._gather_and_enqueue(self.step)
        return self.queue.filled

    def state_dict(self) -> dict[str, Any]:
        assert not self._rows and not self.step_keys, "call state_dict between two steps, not within a step"
        return {"momentum": self.momentum.state_dict(), "queue": self.queue.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows.clear()  # keys of an unfinished step
        self.step_keys = None
        self.momentum.load_state_dict(state["momentum"])
        self.queue.load_state_dict(state["queue"])
        self.step = state["step"]


def compute_losses(parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: PpaOptions) -> Losses:
    """Return the predictions of `masked_lm_term` and, unless its weight is 0, the sums of L_MoCo and its metrics over
    pairs. The metrics among the keys of the step are left out if `Moco.step_keys` is None, as in an evaluation."""
    predictions = []
    if options.tlm_weight:
        predictions.append(Prediction(options.masked_lm_term, parts.encoder.features(states["masked"])))
    if not options.moco_weight:
        return Losses(predictions)
    moco: Moco = parts.auxiliary_state
    texts_B2 = arrays["texts"]
    zq_BD = parts.heads(states["query"])
    zk_BD = states["auxiliary"]
    positive_B1 = (zq_BD * zk_BD).sum(-1, keepdim=True)
    own_BK = have_common_text(texts_B2, moco.queue.stored_text_hashes)
    negative_BK = (zq_BD @ moco.queue.stored_keys.to(zq_BD.dtype).T).masked_fill(own_BK, -torch.inf)
    logits = torch.cat([positive_B1, negative_BK], dim=1) / options.temperature
    labels_B = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    L_MoCo = F.cross_entropy(logits, labels_B, reduction="sum")
    with torch.no_grad():
        right = is_nearest(positive_B1, negative_BK).sum()
        age = moco.queue.mean_age_in_steps(moco.step + 1) * len(logits)
        metrics = {"contrastive_accuracy": right, "queue_age": age, "own_keys": own_BK.sum()}
        if moco.step_keys:
            metrics |= metric_sums_among_step_keys(zq_BD, zk_BD, texts_B2, *moco.step_keys)
    return Losses(predictions, {"moco": L_MoCo}, {name: (value, "moco") for name, value in metrics.items()})


TIE = 1e-6
"""Relative rounding error of a dot product. The pair's key must be nearer than a negative by more than this to count as
nearer. So if all vectors are equal, no key is nearer."""


def is_nearest(positive_B1: Tensor, negative_BK: Tensor) -> Tensor:
    """Return for each pair whether the similarity of the positive is higher than that of all negatives [B]."""
    return (positive_B1 - TIE * positive_B1.abs() > negative_BK).all(-1)


def have_common_text(hashes_B2: Tensor, hashes_K2: Tensor) -> Tensor:
    """Return for each pair and each key whether they have a text in common [B, K]."""
    a1_B1, a2_B1 = hashes_B2[:, :, None].unbind(1)
    b1_K, b2_K = hashes_K2.unbind(1)
    return (a1_B1 == b1_K) | (a1_B1 == b2_K) | (a2_B1 == b1_K) | (a2_B1 == b2_K)


def metric_sums_among_step_keys(
    zq_BD: Tensor, zk_BD: Tensor, texts_B2: Tensor, keys_ND: Tensor, texts_N2: Tensor
) -> dict[str, Tensor]:
    """Return two sums over pairs: the number of pairs whose translation is nearer than every other sentence of the
    step, and the mean cosine of each key with the N - 1 other keys, which needs only the sum of all keys."""
    others_BN = (zq_BD @ keys_ND.to(zq_BD.dtype).T).masked_fill(have_common_text(texts_B2, texts_N2), -torch.inf)
    right = is_nearest((zq_BD * zk_BD).sum(-1, keepdim=True), others_BN).sum()
    of_all_D = F.normalize(keys_ND, dim=-1).sum(0)
    cosines_B = (F.normalize(zk_BD, dim=-1) @ of_all_D - 1) / max(len(keys_ND) - 1, 1)
    return {"contrastive_accuracy_step": right, "sentence_cosine": cosines_B.sum()}


def term_weights(options: PpaOptions) -> dict[str, float]:
    weights = {}
    if options.moco_weight:
        weights["moco"] = options.moco_weight
    if options.tlm_weight:
        weights[options.masked_lm_term] = options.tlm_weight
    return weights


def build_heads(encoder: Encoder, options: PpaOptions) -> Projection | None:
    """Return the projection of MoCo, or None without MoCo."""
    if not options.moco_weight:
        return None
    return Projection(encoder.width, options.projection, options.normalize_z)


def build_auxiliary_state(encoder: Encoder, projection: Any, options: PpaOptions) -> Moco | None:
    if not options.moco_weight:
        return None
    return Moco(encoder, projection, options)


OBJECTIVE = Objective(
    record_kind="pair",
    options=PpaOptions,
    collate=collate,
    loss=compute_losses,
    terms=term_weights,
    heads=build_heads,
    auxiliary_state=build_auxiliary_state,
    check=queue_size_problem,
    advise=momentum_too_large_warnings,
)
