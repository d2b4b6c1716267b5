"""PPA (Pan et al. 2021): contrast of whole sentences and TLM on the same pairs.

    h = CLS hidden / ||CLS hidden||;   z = W2 ReLU(W1 h)                                            (2)
    L_MoCo = -log exp(z_q . z_k+ / tau) / sum over {k+} and the queue of exp(z_q . z_k / tau)       (3)
    L = L_MoCo + L_TLM                                                                              (4)

A pair's sides are swapped with probability 1/2. The first side alone, `[CLS] s [SEP]`, goes through the query encoder,
the second through the momentum encoder (1); TLM reads both in the same order, through the query encoder, without
reset positions and language embeddings.

Decided, where the paper is silent: W1 and W2 have no biases, as (2) is written. z is L2-normalised as in MoCo
(`normalize_z`). The queue is filled before the first step (`prefill`), is the same on every rank and holds keys of
the global batch in global order; during an optimizer step it does not change, so micro-batches do not matter. The
momentum update happens once per optimizer step, after it, and not after one that fp16 overflow skipped; keys of a
skipped step go into the queue all the same, since the forward pass that made them was sound (those that are not
finite as zeros). The key encoder runs with the query's dropout unless `momentum_eval`.

Shape letters: B pairs, L tokens of the longest side, H hidden width, D width of z, K keys in the queue.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xscale import rng
from xscale.data import collate as arrays
from xscale.data.collate import Context, MicroBatch
from xscale.data.encode import Example, fit_pairs, join_segments
from xscale.errors import UserError
from xscale.models.encoder import Encoder
from xscale.models.momentum import GlobalBatch, MomentumEncoder, Queue
from xscale.objectives import mlm, tlm
from xscale.objectives.base import LossSums, Objective, Parts


@dataclass(frozen=True)
class Options:
    temperature: float = 0.05
    """tau."""
    queue_size: int = 32000
    """K, at least the stream's samples."""
    momentum: float = 0.999
    """m of the key encoder."""
    projection: int = 300
    """Width of z."""
    normalize_z: bool = True
    """L2-normalise z, as MoCo does."""
    prefill: bool = True
    """Fill the queue from the momentum encoder before the first step; else it fills as training goes."""
    momentum_eval: bool = False
    """Run the key encoder without dropout."""
    moco_weight: float = 1.0
    """Factor of L_MoCo; 0: not computed, no momentum encoder (Table 5, -MoCo)."""
    tlm_weight: float = 1.0
    """Factor of L_TLM; 0: not computed (Table 5, -TLM)."""
    replace_tlm_with_mlm: bool = False
    """Mask and encode each side alone (Table 5, repl TLM w/ MLM); `tlm_weight` is its factor."""
    mask_prob: float = 0.15
    """Share of the maskable tokens that is predicted."""

    def __post_init__(self) -> None:
        checks = {
            f"temperature: {self.temperature} must be positive": self.temperature > 0,
            f"queue_size: {self.queue_size} must be positive": self.queue_size > 0,
            f"momentum: {self.momentum} must lie in [0, 1]": 0 <= self.momentum <= 1,
            f"projection: {self.projection} must be positive": self.projection > 0,
            f"moco_weight: {self.moco_weight} must not be negative": self.moco_weight >= 0,
            f"tlm_weight: {self.tlm_weight} must not be negative": self.tlm_weight >= 0,
            "moco_weight and tlm_weight are both 0; one must be positive": self.moco_weight or self.tlm_weight,
            f"mask_prob: {self.mask_prob} must lie between 0 and 1": 0 < self.mask_prob < 1,
        }
        problems = [message for message, ok in checks.items() if not ok]
        if problems:
            raise UserError("; ".join(problems))

    @property
    def word_term(self) -> str:
        return "mlm" if self.replace_tlm_with_mlm else "tlm"


def check(options: Options, samples: int) -> str | None:
    if options.moco_weight and options.queue_size < samples:
        return (
            f"queue_size: {options.queue_size} keys cannot hold the {samples} of one step; "
            f"raise queue_size to {samples} or more, or lower samples"
        )
    return None


# Data


def collate(samples: list[list[Example]], options: Options, context: Context) -> MicroBatch:
    """Samples are single pairs. `tokens` counts those that the query encoder reads.

    input_ids and attention_mask of the views, query_ and key_ before their names [B, L]; number [B], the pairs' places
    in the global batch; and those of TLM (data/collate.py).
    """
    pairs, too_long = fit_pairs([sample[0] for sample in samples], context.max_length, context.overlong)
    sides = list(zip(pairs, tlm.swapped(pairs).astype(int).tolist(), strict=True))
    merged: dict[str, np.ndarray] = {}
    targets: dict[str, int] = {}
    tokens = 0
    if options.tlm_weight:
        words = word_level(sides, options, context)
        merged |= words.arrays
        targets[options.word_term], tokens = words.targets["mlm"], words.tokens
    if options.moco_weight:
        merged |= view("query", sides, context)
        merged |= view("key", [(pair, 1 - side) for pair, side in sides], context)
        merged["number"] = np.array([pair.number for pair in pairs], dtype=np.int64)
        targets["moco"] = len(pairs)
        tokens += int(merged["query_attention_mask"].sum()) if pairs else 0
    return MicroBatch(merged, targets, tokens, len(pairs), too_long)


def word_level(sides: list[tuple[Example, int]], options: Options, context: Context) -> MicroBatch:
    if options.replace_tlm_with_mlm:
        both = [(pair, s) for pair, side in sides for s in (side, 1 - side)]
        # A sequence takes its pair's identity; the two of a pair must not be masked at the same places.
        sequences = [[(replace(pair, identity=pair.identity ^ _SIDE[s]), s)] for pair, s in both]
    else:
        sequences = [[(pair, side), (pair, 1 - side)] for pair, side in sides]
    return arrays.masked_lm(
        join_segments(context.encoder, sequences, context.language_ids),
        context,
        mask_prob=options.mask_prob,
        whole_word=False,
        position_ids=False,
        language_embeddings=False,
        too_long=0,
    )


_SIDE = rng.key("ppa", "side 0"), rng.key("ppa", "side 1")


def view(name: str, sides: list[tuple[Example, int]], context: Context) -> dict[str, np.ndarray]:
    """`[CLS] s [SEP]` for each (pair, number of its text); `[CLS] [SEP]` where there is none."""
    encoder = context.encoder
    ids = np.array([[encoder.cls_id, encoder.sep_id]])
    mask = np.ones_like(ids)
    if sides:
        alone = join_segments(encoder, [[side] for side in sides], context.language_ids)
        ids, mask = arrays.pad(alone, alone.ids, encoder.pad_id), arrays.pad(alone, np.ones_like(alone.ids), 0)
    return {f"{name}_input_ids": ids, f"{name}_attention_mask": mask}


# Model


class Projection(nn.Module):
    """z = W2 ReLU(W1 h) of h = CLS hidden / ||CLS hidden||."""

    def __init__(self, hidden: int, width: int, normalize: bool):
        super().__init__()
        self.w1 = nn.Linear(hidden, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.normalize = normalize

    def forward(self, cls_BH: Tensor) -> Tensor:
        """z [B, D], fp32 whatever the type of the hidden states and the weights."""
        h_BH = F.normalize(_wide(cls_BH), dim=-1)
        z_BD = _wide(self.w2(F.relu(self.w1(h_BH.to(cls_BH.dtype)))))
        return F.normalize(z_BD, dim=-1) if self.normalize else z_BD


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def project(encoder: Encoder, projection: nn.Module, batch: dict[str, Tensor], view: str) -> Tensor:
    """z of the view "query" or "key" of each pair [B, D]; B may be 0."""
    hidden_BLH = encoder.hidden(batch, f"{view}_")
    return projection(hidden_BLH[:, 0])[: len(batch["number"])]


class Moco:
    """The key encoder and the queue, between steps (base.Prefilled)."""

    def __init__(self, encoder: Encoder, projection: nn.Module, options: Options):
        self.options = options
        self.momentum = MomentumEncoder(encoder, projection, options.momentum)
        self.queue = Queue(options.queue_size, options.projection)
        self.prefill_samples = options.queue_size if options.prefill else 0
        self.step = 0
        """Optimizer steps done."""
        self._batch = GlobalBatch()

    @torch.no_grad()
    def keys(self, batch: dict[str, Tensor], train: bool, keep: bool) -> Tensor:
        """z_k [B, D]; `keep`: for the queue, where they go after the optimizer step."""
        self.queue.to(batch["number"].device)
        key_encoder, projection = self.momentum.forward_modules(train and not self.options.momentum_eval)
        z_BD = project(key_encoder, projection, batch, "key")
        if keep:
            self._batch.add(z_BD, batch["number"])
        return z_BD

    def update(self, applied: bool) -> None:
        self._enqueue(self.step + 1)
        if applied:
            self.momentum.update()
        self.step += 1

    def _enqueue(self, step: int) -> None:
        if self._batch:
            self.queue.push(self._batch.take(), step)

    def prefill(self, batch: dict[str, Tensor]) -> None:
        self.keys(batch, train=True, keep=True)

    def finish_prefill(self) -> int:
        self._enqueue(self.step)
        return self.queue.filled

    def state_dict(self) -> dict[str, Any]:
        assert not self._batch, "the state is that between two steps"
        return {"momentum": self.momentum.state_dict(), "queue": self.queue.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum.load_state_dict(state["momentum"])
        self.queue.load_state_dict(state["queue"])
        self.step = state["step"]


# Loss


def loss(parts: Parts, batch: dict[str, Tensor], options: Options) -> LossSums:
    terms: dict[str, Tensor] = {}
    metrics: dict[str, tuple[Tensor, str]] = {}
    if options.moco_weight:
        terms["moco"], right, age = contrast(parts, batch, options)
        metrics |= {"contrastive_accuracy": (right, "moco"), "queue_age": (age, "moco")}
    if options.tlm_weight:
        words = mlm.loss(parts, batch, mlm.MaskedOptions(options.mask_prob))
        terms[options.word_term] = words.terms["mlm"]
        metrics["accuracy"] = (words.metrics["accuracy"][0], options.word_term)
    return LossSums(terms, metrics)


def contrast(parts: Parts, batch: dict[str, Tensor], options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over pairs: L_MoCo, pairs whose translation is nearer than the whole queue, mean age of the queue."""
    moco: Moco = parts.companion
    training = parts.encoder.training
    zq_BD = project(parts.encoder, parts.heads, batch, "query")
    zk_BD = moco.keys(batch, train=training, keep=training)
    positive_B1 = (zq_BD * zk_BD).sum(-1, keepdim=True)
    negative_BK = zq_BD @ moco.queue.keys.to(zq_BD.dtype).T
    logits = torch.cat([positive_B1, negative_BK], dim=1) / options.temperature
    labels_B = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    total = F.cross_entropy(logits, labels_B, reduction="sum")
    with torch.no_grad():
        right = (logits.argmax(-1) == labels_B).sum()
        age = moco.queue.age(moco.step + 1) * len(logits)
    return total, right, age


def terms(options: Options) -> dict[str, float]:
    weights = {"moco": options.moco_weight, options.word_term: options.tlm_weight}
    return {term: weight for term, weight in weights.items() if weight}


def heads(encoder: Encoder, options: Options) -> nn.Module | None:
    return Projection(encoder.width, options.projection, options.normalize_z) if options.moco_weight else None


def companion(encoder: Encoder, projection: nn.Module, options: Options) -> Moco | None:
    return Moco(encoder, projection, options) if options.moco_weight else None


OBJECTIVE = Objective(
    reads="pair",
    options=Options,
    collate=collate,
    loss=loss,
    terms=terms,
    heads=heads,
    companion=companion,
    check=check,
)
