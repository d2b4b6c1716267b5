"""PPA (Pan et al. 2021): contrast of whole sentences and TLM on the same pairs.

    h = x / ||x||;   z = W2 ReLU(W1 h)        x: the state of [CLS], or the mean of the sentence's  (2)
    L_MoCo = -log exp(z_q . z_k+ / tau) / sum over {k+} and the queue of exp(z_q . z_k / tau)       (3)
    L = L_MoCo + L_TLM                                                                              (4)

A pair's sides are swapped with probability 1/2. The first side alone, `[CLS] s [SEP]`, goes through the query encoder,
the second through the momentum encoder (1); TLM reads both in the same order, through the query encoder, without
reset positions and language embeddings.

Decided, where the paper is silent: W1 and W2 have no biases, as (2) is written. z is L2-normalised as in MoCo
(`normalize_z`). The queue is filled before the first step (`prefill`), is the same on every rank and holds keys of
the global batch in global order; during an optimizer step it does not change, so rows do not matter. A key is no
negative where its pair has a text in common with the anchor's: the same pair in an earlier epoch or the prefill, the
same sentence elsewhere, another translation of it. It is left out of the sum (`own_keys`). The momentum update happens
once per optimizer step, after it, and not after one that fp16 overflow skipped; keys of a skipped step go into the
queue all the same, since the forward pass that made them was sound (those that are not finite as zeros). The key
encoder runs with the query's dropout unless `momentum_eval`.

While the weights move fast, a pair's key is told from the queue's by being younger, and `contrastive_accuracy` is
higher than among keys of one age, those of the step alone: `contrastive_accuracy_step`. Random weights learn nothing
else where z hardly depends on the sentence, and `sentence_cosine`, the mean of two different sentences' keys of the
step, is near 1. So it is with [CLS]: from these, start with `pooling: mean`, or `model.attention_gain: 1.0` without
dropout.

Shape letters: B pairs of a row, N of the step, M masked tokens, S states, H hidden width, D width of z, K keys in the
queue.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from xscale import rng
from xscale.config import STRICT, Count, Fraction, NotNegative
from xscale.data.packed_row import Index, Tokens
from xscale.data.sequences import Example, Sequences, behind, join_segments
from xscale.data.stream_batch import AuxiliaryInputs, Context, Reads, StreamBatch, masked_lm
from xscale.models.encoder import Encoder
from xscale.models.momentum import GlobalBatch, MomentumEncoder, Queue
from xscale.objectives import tlm
from xscale.objectives.base import Losses, Objective, Parts, Prediction
from xscale.ops.alignment_gather import alignment_gather


@dataclass(frozen=True, config=STRICT)
class PpaOptions:
    temperature: PositiveFloat = 0.05
    """The temperature tau of the contrast."""
    pooling: Literal["cls", "mean"] = "cls"
    """The sentence's vector: the state of [CLS] (the paper), or the mean over its tokens without special ones (footnote
    1)."""
    queue_size: Count = 32000
    """Size K of the queue, at least the stream's samples."""
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.999
    """Momentum m of the key encoder."""
    momentum_ramp: Annotated[float, Field(ge=0, le=1)] | None = None
    """m rises over the run's steps, skipped ones too, from `momentum` to this, along half a cosine (as in BYOL, Grill
    et al. 2020): a key encoder that must start fast ends slow; null: it stays."""
    projection: Count = 300
    """Width of z."""
    normalize_z: bool = True
    """L2-normalise z, as MoCo does."""
    prefill: bool = True
    """Fill the queue from the momentum encoder before the first step; else it fills as training goes."""
    momentum_eval: bool = False
    """Run the key encoder without dropout."""
    moco_weight: NotNegative = 1.0
    """Factor of L_MoCo; 0: not computed, no momentum encoder (Table 5, -MoCo)."""
    tlm_weight: NotNegative = 1.0
    """Factor of L_TLM; 0: not computed (Table 5, -TLM)."""
    replace_tlm_with_mlm: bool = False
    """Mask and encode each side alone (Table 5, repl TLM w/ MLM); `tlm_weight` is its factor."""
    mask_prob: Fraction = 0.15
    """Fraction of the maskable tokens that is predicted."""

    @model_validator(mode="after")
    def trains_something(self) -> Self:
        if not self.moco_weight and not self.tlm_weight:
            raise ValueError("moco_weight and tlm_weight are both 0; one must be positive")
        return self

    @model_validator(mode="after")
    def momentum_rises(self) -> Self:
        if self.momentum_ramp is not None and self.momentum_ramp < self.momentum:
            raise ValueError(
                f"momentum_ramp: {self.momentum_ramp:g} is below momentum: {self.momentum:g}; it must rise"
            )
        return self

    def momentum_at(self, step: int, steps: int) -> float:
        """m after step 0, 1, ... of so many: after the first it is `momentum`, after the last `momentum_ramp`."""
        if self.momentum_ramp is None:
            return self.momentum
        falling = (1 + math.cos(math.pi * min(step / max(steps - 1, 1), 1.0))) / 2
        return self.momentum_ramp - (self.momentum_ramp - self.momentum) * falling

    @property
    def word_term(self) -> str:
        return "mlm" if self.replace_tlm_with_mlm else "tlm"


def check(options: PpaOptions, samples: int) -> str | None:
    if options.moco_weight and options.queue_size < samples:
        return (
            f"queue_size: {options.queue_size} keys cannot hold the {samples} of one step; "
            f"raise queue_size to {samples} or more, or lower samples"
        )
    return None


def advise(options: PpaOptions, records: int, steps: int) -> list[str]:
    if not options.moco_weight:
        return []
    lines, follows = [], 1 / max(1 - options.momentum, 1e-9)
    if steps < 3 * follows:
        lines.append(
            f"momentum {options.momentum}: the key encoder follows the trained one in about {follows:,.0f} steps, and "
            f"stays near its random start in a run of {steps:,}; 0.9 to 0.99 suit short runs"
        )
    if options.queue_size > records:
        lines.append(
            f"queue_size {options.queue_size:,} exceeds the {records:,} records that it draws from: most keys are of "
            f"pairs that are contrasted with them more than once; a smaller queue_size does as well"
        )
    return lines


# Data


def collate(samples: list[list[Example]], options: PpaOptions, context: Context) -> StreamBatch:
    """Samples are single pairs. The sequences of TLM, then those of the query view; the key view is read beside.

    States: "masked" [M]; "query" [B], a vector of each view. `number` [B]: the pairs' places in the global batch.
    """
    pairs, too_long = context.fit_pairs(samples)
    sides = list(zip(pairs, tlm.swapped(pairs).astype(int).tolist(), strict=True))
    words = word_level(sides, options, context) if options.tlm_weight else StreamBatch(view([], context), {}, {}, 0)
    stream_batch = replace(words, samples=len(pairs), too_long=too_long)
    if not options.moco_weight:
        return stream_batch
    query, key = view(sides, context), view([(pair, 1 - side) for pair, side in sides], context)
    return replace(
        stream_batch,
        sequences=behind(words.sequences, query),
        reads=words.reads | {"query": pooled(query, options, len(words.sequences.ids))},
        targets=words.targets | {"moco": len(pairs)},
        arrays={
            "number": np.array([pair.number for pair in pairs], dtype=np.int64),
            "texts": np.stack([text_numbers(query), text_numbers(key)], 1),
        },
        auxiliary=AuxiliaryInputs(key, pooled(key, options)),
    )


def word_level(sides: list[tuple[Example, int]], options: PpaOptions, context: Context) -> StreamBatch:
    """TLM, or MLM on each side alone, under the name of `word_term`."""
    if options.replace_tlm_with_mlm:
        both = [(pair, s) for pair, side in sides for s in (side, 1 - side)]
        # A sequence takes its pair's identity; the two of a pair must not be masked at the same places.
        sequences = [[(replace(pair, identity=pair.identity ^ _SIDE[s]), s)] for pair, s in both]
    else:
        sequences = [[(pair, side), (pair, 1 - side)] for pair, side in sides]
    joined = join_segments(context.tokenizer, sequences, context.language_ids)
    types = None if options.replace_tlm_with_mlm else context.types(False)
    stream_batch = masked_lm(joined, context, mask_prob=options.mask_prob, types=types)

    def renamed(of_term: dict[str, Any]) -> dict[str, Any]:
        return dict(zip([options.word_term], of_term.values(), strict=False))

    return replace(
        stream_batch,
        labels=renamed(stream_batch.labels),
        targets=renamed(stream_batch.targets),
        names=renamed(stream_batch.names),
    )


_SIDE = rng.key("ppa", "side 0"), rng.key("ppa", "side 1")


def view(sides: list[tuple[Example, int]], context: Context) -> Sequences:
    """`[CLS] s [SEP]` for each (pair, number of its text)."""
    return join_segments(context.tokenizer, [[side] for side in sides], context.language_ids)


def pooled(views: Sequences, options: PpaOptions, before: int = 0) -> Reads:
    """A vector of each, of which only the direction counts: a sum does as well as a mean. before: tokens of the piece
    that stand before the views."""
    if options.pooling == "cls":
        return Reads(views.starts + before)
    special = (views.offsets == 0) | (views.offsets == np.repeat(views.lengths, views.lengths) - 1)
    return Reads(np.flatnonzero(~special) + before, views.lengths - 2)


def text_numbers(views: Sequences) -> np.ndarray:
    """A number of each, the same for the same tokens, int64 [B]."""
    of_tokens = rng.hash64(rng.hash64(rng.key("text"), views.offsets), views.ids)
    return np.add.reduceat(of_tokens, views.starts).view(np.int64) if len(views.starts) else views.starts


# Model


class Projection(nn.Module):
    """z = W2 ReLU(W1 h) of h = x / ||x||."""

    def __init__(self, hidden: int, width: int, normalize: bool):
        super().__init__()
        self.w1 = nn.Linear(hidden, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.normalize = normalize

    def forward(self, x_BH: Tensor) -> Tensor:
        """z [B, D], fp32 whatever the type of the hidden states and the weights."""
        h_BH = F.normalize(_wide(x_BH), dim=-1)
        z_BD = _wide(self.w2(F.relu(self.w1(h_BH.to(x_BH.dtype)))))
        return F.normalize(z_BD, dim=-1) if self.normalize else z_BD


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Moco:
    """The key encoder and the queue, between steps (base.HasQueue)."""

    def __init__(self, encoder: Encoder, projection: nn.Module, options: PpaOptions):
        self.options = options
        self.momentum = MomentumEncoder(encoder, projection, options.momentum)
        self.queue = Queue(options.queue_size, options.projection)
        self.prefill_samples = options.queue_size if options.prefill else 0
        self.step = self.steps = 0
        """Optimizer steps done, and those of the run, which the step's module says."""
        self.counts: list[int] | None = None
        """Keys of each rank in the step under way."""
        self.of_step: Callable[[], tuple[Tensor, Tensor]] | None = None
        """Gives the keys of the step under way [N, D], and their texts [N, 2]."""
        self._batch = GlobalBatch()

    @torch.no_grad()
    def read(self, trained: Encoder, tokens: Tokens, index: Index, arrays: dict[str, Tensor]) -> Tensor:
        """z_k of the key view of each pair [B, D], which go into the queue after the optimizer step."""
        self.queue.to(tokens.input_ids.device)
        key_encoder, projection = self.momentum.forward_modules(trained.training and not self.options.momentum_eval)
        z_BD = projection(alignment_gather(key_encoder(tokens), *index))
        if trained.training:
            self._batch.add(z_BD, arrays["number"], arrays["texts"])
        return z_BD

    def gather(self) -> None:
        if self._batch:
            self.of_step = functools.cache(self._batch.send(self.counts))

    def update(self, applied: bool) -> None:
        self._enqueue(self.step + 1)
        if applied:
            self.momentum.momentum = self.options.momentum_at(self.step, self.steps)
            self.momentum.update()
        self.step += 1

    def _enqueue(self, step: int) -> None:
        self.gather()
        if self.of_step:
            keys_ND, texts_N2 = self.of_step()
            self.queue.push(keys_ND, step, texts_N2)
        self.of_step = None

    def finish_warmup(self) -> int:
        self._enqueue(self.step)
        return self.queue.filled

    def state_dict(self) -> dict[str, Any]:
        assert not self._batch and not self.of_step, "the state is that between two steps"
        return {"momentum": self.momentum.state_dict(), "queue": self.queue.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch.clear()  # of a step that came to no end
        self.of_step = None
        self.momentum.load_state_dict(state["momentum"])
        self.queue.load_state_dict(state["queue"])
        self.step = state["step"]


# Loss


def loss(parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: PpaOptions) -> Losses:
    words = parts.encoder.features(states["masked"]) if options.tlm_weight else None
    predictions = [] if words is None else [Prediction(options.word_term, words)]
    if not options.moco_weight:
        return Losses(predictions)
    loss, metrics = contrast(parts, states, arrays["texts"], options)
    return Losses(predictions, {"moco": loss}, {name: (value, "moco") for name, value in metrics.items()})


def contrast(
    parts: Parts, states: dict[str, Tensor], texts_B2: Tensor, options: PpaOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums over pairs: L_MoCo; pairs whose translation is nearer than all negatives, mean age of the queue, and keys in
    it that are the pair's own; and of the step's keys, where these are gathered."""
    moco: Moco = parts.auxiliary_state
    zq_BD, zk_BD = parts.heads(states["query"]), states["auxiliary"]
    positive_B1 = (zq_BD * zk_BD).sum(-1, keepdim=True)
    own_BK = share_text(texts_B2, moco.queue.texts)
    negative_BK = (zq_BD @ moco.queue.keys.to(zq_BD.dtype).T).masked_fill(own_BK, -torch.inf)
    logits = torch.cat([positive_B1, negative_BK], dim=1) / options.temperature
    labels_B = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    total = F.cross_entropy(logits, labels_B, reduction="sum")
    with torch.no_grad():
        right = nearer(positive_B1, negative_BK).sum()
        age = moco.queue.age(moco.step + 1) * len(logits)
        metrics = {"contrastive_accuracy": right, "queue_age": age, "own_keys": own_BK.sum()}
        return total, metrics | (among_step(zq_BD, zk_BD, texts_B2, *moco.of_step()) if moco.of_step else {})


TIE = 1e-6
"""Of a product, what rounding may make of it: where all vectors are one, no translation is nearer than the others."""


def nearer(positive_B1: Tensor, negative_BK: Tensor) -> Tensor:
    """Which positives are above all negatives [B]."""
    return (positive_B1 - TIE * positive_B1.abs() > negative_BK).all(-1)


def share_text(texts_B2: Tensor, texts_K2: Tensor) -> Tensor:
    """Which pairs have a text in common [B, K]."""
    both = [a_B[:, None] == b_K for a_B in texts_B2.T for b_K in texts_K2.T]
    return both[0] | both[1] | both[2] | both[3]


def among_step(zq_BD: Tensor, zk_BD: Tensor, texts_B2: Tensor, keys_ND: Tensor, texts_N2: Tensor) -> dict[str, Tensor]:
    """Sums over pairs: those whose translation is nearer than every other sentence of the step; the mean cosine of the
    key with those of the N - 1 other pairs, which takes only the sum of all."""
    others_BN = (zq_BD @ keys_ND.to(zq_BD.dtype).T).masked_fill(share_text(texts_B2, texts_N2), -torch.inf)
    right = nearer((zq_BD * zk_BD).sum(-1, keepdim=True), others_BN).sum()
    of_all_D = F.normalize(keys_ND, dim=-1).sum(0)
    cosines_B = (F.normalize(zk_BD, dim=-1) @ of_all_D - 1) / max(len(keys_ND) - 1, 1)
    return {"contrastive_accuracy_step": right, "sentence_cosine": cosines_B.sum()}


def terms(options: PpaOptions) -> dict[str, float]:
    weights = {"moco": options.moco_weight, options.word_term: options.tlm_weight}
    return {term: weight for term, weight in weights.items() if weight}


def heads(encoder: Encoder, options: PpaOptions) -> nn.Module | None:
    return Projection(encoder.width, options.projection, options.normalize_z) if options.moco_weight else None


def auxiliary_state(encoder: Encoder, projection: nn.Module, options: PpaOptions) -> Moco | None:
    return Moco(encoder, projection, options) if options.moco_weight else None


OBJECTIVE = Objective(
    reads="pair",
    options=PpaOptions,
    collate=collate,
    loss=loss,
    terms=terms,
    heads=heads,
    auxiliary_state=auxiliary_state,
    check=check,
    advise=advise,
)
