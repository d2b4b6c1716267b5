"""Measures masked prediction on held-out pairs with an export: TLM loss, and the losses of AlignLM's heads.

    L = - sum_{i in M} log p(x_i | x with M masked);    loss = L / |M|

The objectives' own functions read and predict the pairs. There are separate sums for each pair, so that pairs can be
resampled for intervals.

TLM's score comes with the text's unigram entropy, the loss of a model that knows only the frequencies of the held-out
tokens: an encoder with a lower loss has learnt from context. TLM uses the exported masked-LM head, whatever the
objectives were; AlignLM's losses use AlignLM's own heads, which are saved beside the model. TLM's masks are a function
of the pair's number, the token's position and the vocabulary: the same for every model with the same tokenizer.

Shape letters: S pairs, M predicted tokens.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from xscale import rng
from xscale.data.loader import StepDataset
from xscale.data.mixture import Plan, PlanTable
from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example, Sequences
from xscale.data.shards import Source
from xscale.data.stream import Stream
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.model import ExportedModel, Scores, read_texts
from xscale.objectives import OBJECTIVES, Parts, alignlm, tlm
from xscale.recipe import Schedule
from xscale.step.module import encoder_states

ROW = 64
"""The number of pairs of a row. They have about the same length, which saves time."""
_MASKS = rng.key("heldout")


def evaluate(model: ExportedModel, source: Source, limit: int) -> Scores:
    """Return the loss of TLM (nats per masked token), its accuracy, the unigram entropy, the number of masked tokens,
    and the number of pairs that were dropped because they exceed the model's positions. For each AlignLM stream that
    trained the model, STREAM_mono_loss of masked tokens and, if records have word links, STREAM_bi_loss of masked
    tokens with a link. Raises UserError."""
    if model.headless:  # transformers would add a random one
        raise UserError(
            "the model has no masked-LM head, which task heldout measures; give a directory that was saved from "
            "AutoModelForMaskedLM"
        )
    options = tlm.TlmOptions(
        language_embeddings=model.language_embeddings,
        language_dropout=float(not any(model.language_ids(source.langs).values())),
        reset_positions=model.reset_positions,
    )
    sums = sums_of_pairs(model, source, limit, MeasuredStream("tlm", "tlm", options))
    if "mlm" not in sums:
        raise UserError(
            f"{source.directory}: no pair of up to {model.max_length} tokens has a token to predict; give other pairs"
        )
    texts = read_texts(source, limit)
    scores = loss_scores(sums["mlm"], "tlm_loss", "masked_accuracy")
    scores["unigram_entropy"] = unigram_entropy(model.tokenizer.encode(list(chain.from_iterable(texts))))
    scores["targets"] = float(sums["mlm"][:, 2].sum())
    scores["dropped"] = float(len(texts) - len(sums["mlm"]))
    for name, saved in model.heads.items():
        if saved.objective != "alignlm":
            continue
        heads = alignlm.Heads(model.encoder, saved.options(alignlm.AlignLMOptions))
        heads.load_state_dict(saved.weights)
        stream = MeasuredStream(name, "alignlm", saved.options(alignlm.AlignLMOptions), heads.eval().to(model.device))
        for term, sums_S3 in sums_of_pairs(model, source, limit, stream).items():
            scores |= loss_scores(sums_S3, f"{name}_{term}_loss", f"{name}_{term}_accuracy")
            scores[f"{name}_{term}_targets"] = float(sums_S3[:, 2].sum())
    return scores


@dataclass(frozen=True)
class MeasuredStream:
    name: str
    """The stream's name. The masks of an objective other than tlm depend on it."""
    objective: str
    options: Any
    heads: nn.Module | None = None


class PairContext(CollateContext):
    """The context of a batch with separate sums for each pair instead of each language."""

    def group_numbers(self, sequences: Sequences) -> np.ndarray:
        """Return the number of each sequence, which has one pair [S]."""
        return np.arange(len(sequences.lengths))


@torch.no_grad()  # not inference_mode: masks of attention are kept for later passes
def sums_of_pairs(model: ExportedModel, source: Source, limit: int, stream: MeasuredStream) -> dict[str, np.ndarray]:
    """Return {term of the stream's loss: sums [S, 3]}, without terms that predict no token. The sums of a pair are loss
    in nats, tokens predicted right, tokens. Pairs that exceed the model's positions are left out."""
    objective = OBJECTIVES[stream.objective]
    pairs_of_rows: list[np.ndarray] = []

    def collate(samples: list[list[Example]], options: Any, context: CollateContext) -> StreamBatch:
        pairs: list[list[Example]] = []
        for (pair,) in samples:
            pair = replace(pair, links=pair.links or "")  # a record may have no links
            if stream.objective == "tlm":
                pair = replace(pair, identity=rng.hash64(_MASKS, np.array([pair.number]))[0])
            pairs.append([pair])
        fitting = context.fit_pairs(pairs)
        pairs_of_rows.append(np.array([pair.number for pair in fitting], dtype=np.int64))
        return objective.collate([[pair] for pair in fitting], options, context)

    ids = model.language_ids(source.langs)
    context = PairContext(model.tokenizer, model.max_length, "drop", ids, segments=model.segments)
    reader = Stream(
        stream.name,
        replace(objective, collate=collate),
        stream.options,
        sources=(0,),
        samples=limit,
        language_groups=(source.pair,),
        objective_name=stream.objective,
    )
    dataset = StepDataset([source], Schedule.constant([reader]), Schedule.constant(context), seed=0)
    stream_batches = dataset.stream_batches(reader, rows_by_length(source, limit, stream.name))
    parts = Parts(model.encoder, stream.heads)
    records = min(limit, source.records)
    sums = {term: np.zeros((records, 3)) for term in objective.terms(stream.options)}
    for stream_batch, pair_of_sequence in zip(stream_batches, pairs_of_rows, strict=True):
        row = pack_row({stream.name: stream_batch}, model.tokenizer.sep_id).to(model.device)
        states = encoder_states(model.encoder, row)[stream.name]
        losses = objective.loss(parts, states, row.arrays[stream.name], stream.options)
        features_MH = torch.cat([prediction.features_MH for prediction in losses.predictions])
        _, losses_M, right_M = model.encoder.vocabulary_loss(features_MH, row.labels)
        sums_M3 = torch.stack([losses_M, right_M, torch.ones_like(losses_M)], 1).double().cpu().numpy()
        start = 0
        for term, labels in stream_batch.labels.items():
            end = start + len(labels)
            np.add.at(sums[term], pair_of_sequence[stream_batch.group_of_target[term]], sums_M3[start:end])
            start = end
    fitting = np.sort(np.concatenate(pairs_of_rows))
    return {term: sums_S3[fitting] for term, sums_S3 in sums.items() if sums_S3[:, 2].any()}


def rows_by_length(source: Source, limit: int, name: str) -> Plan:
    """Return a plan of the first `limit` records in rows of ROW pairs of about the same length. A record's sample is
    its number. name: the stream's name."""
    places = np.array(source.places(np.arange(min(limit, source.records))))
    lengths = []
    for shard in np.unique(places[:, 0]):
        lengths.append(source.lengths(int(shard), places[places[:, 0] == shard, 1]))
    by_length = np.concatenate(lengths).argsort(kind="stable")
    row = np.empty(len(places), dtype=np.int64)
    row[by_length] = np.arange(len(places)) // ROW
    zeros = np.zeros(len(places), dtype=np.int64)
    numbers = np.arange(len(places))
    table = PlanTable(numbers, zeros, zeros, places[:, 0], places[:, 1], zeros.astype(float), row)
    by_row = table.select(np.argsort(row, kind="stable"))
    return Plan(0, {name: by_row}, rows=-(-len(places) // ROW), world=1, state={}, rank=0)


def loss_scores(sums_S3: np.ndarray, loss_name: str, accuracy_name: str) -> Scores:
    """Return the mean loss in nats and the accuracy under these names. sums_S3: see `sums_of_pairs`."""

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        loss, right, targets = np.moveaxis(sums, -1, 0)
        return {loss_name: loss / targets, accuracy_name: right / targets}

    return bootstrap(sums_S3, scores_of)


def unigram_entropy(ids: list[list[int]]) -> float:
    """Return the entropy of the tokens' frequencies in nats. ids: the texts' token ids."""
    counts = np.bincount(list(chain.from_iterable(ids)))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
