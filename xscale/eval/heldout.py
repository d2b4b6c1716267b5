"""Measures masked prediction on held-out pairs: TLM loss, and the losses of AlignLM's heads.

    L = - sum_{i in M} log p(x_i | x with M masked);    loss = L / |M|

TLM's score comes with the text's unigram entropy, the loss of a model that knows only the frequencies of the held-out
tokens: an encoder with a lower loss has learnt from context. TLM uses the exported masked-LM head, whatever the
objectives were; AlignLM's losses use AlignLM's own heads, which are saved beside the model. Masks are a function of the
record's number, the token's position and the vocabulary: the same for every model with the same tokenizer.

Shape letters: S sequences, M predicted tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xscale.data.loader import StepDataset, StreamObjective
from xscale.data.mixture import SampledRecords, StepPlan
from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example
from xscale.data.shards import Source
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.model import ExportedModel, Scores, read_texts
from xscale.objectives import OBJECTIVES, Parts, Prediction, alignlm, tlm
from xscale.step.module import encoder_states

BATCH = 32


def evaluate(model: ExportedModel, source: Source, limit: int) -> Scores:
    """Return the loss (nats per masked token) and accuracy of TLM, the unigram entropy, the number of masked tokens and
    of pairs that were dropped because they exceed the model's positions. For each AlignLM stream that trained the
    model, STREAM_mono_loss of masked tokens and, if records have word links, STREAM_bi_loss of masked tokens with a
    link. Raises UserError."""
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
    batches = list(read_batches(model, source, limit, "tlm", options))
    sums = masked_sums(model, "tlm", batches, options)
    if "mlm" not in sums:
        raise UserError(
            f"{source.directory}: no pair of up to {model.max_length} tokens has a token to predict; give other pairs"
        )
    texts = read_texts(source, limit)
    scores = loss_scores(sums["mlm"], "tlm_loss", "masked_accuracy")
    scores["unigram_entropy"] = unigram_entropy(model.tokenizer.encode([side for pair in texts for side in pair]))
    scores["targets"] = float(sums["mlm"][:, 2].sum())
    scores["dropped"] = float(len(texts) - sum(batch.samples for batch in batches))
    for name, saved in model.heads.items():
        if saved.objective == "alignlm":
            scores |= evaluate_alignlm(model, source, limit, name)
    return scores


def evaluate_alignlm(model: ExportedModel, source: Source, limit: int, stream: str) -> Scores:
    """Return losses, accuracies and numbers of targets of a stream's saved heads."""
    saved = model.heads[stream]
    options = saved.options(alignlm.AlignLMOptions)
    heads = alignlm.Heads(model.encoder, options)
    heads.load_state_dict(saved.weights)
    batches = read_batches(model, source, limit, "alignlm", options)
    scores: Scores = {}
    for term, sums_S3 in masked_sums(model, "alignlm", batches, options, heads.eval().to(model.device)).items():
        scores |= loss_scores(sums_S3, f"{stream}_{term}_loss", f"{stream}_{term}_accuracy")
        scores[f"{stream}_{term}_targets"] = float(sums_S3[:, 2].sum())
    return scores


def read_batches(
    model: ExportedModel, source: Source, limit: int, objective: str, options: Any
) -> Iterator[StreamBatch]:
    """Yield stream batches of the first `limit` records, read as in training."""

    def collate(samples: list[list[Example]], options: Any, context: CollateContext) -> StreamBatch:
        linked = [[replace(pair, links=pair.links or "")] for (pair,) in samples]  # a record may have no links
        return OBJECTIVES[objective].collate(linked, options, context)

    context = make_context(model, source.langs)
    streams = {objective: StreamObjective(replace(OBJECTIVES[objective], collate=collate), options)}
    dataset = StepDataset([source], streams, context, seed=0)
    shard, record = np.array(source.places(np.arange(min(limit, source.records)))).T
    zeros = np.zeros(len(shard), dtype=np.int64)
    records = SampledRecords(np.arange(len(shard)), zeros, zeros, shard, record, zeros.astype(float))
    for start in range(0, len(shard), BATCH):
        drawn = records.select(np.arange(start, min(start + BATCH, len(shard))))
        (stream_batch,) = dataset.stream_batches(objective, StepPlan(0, [{objective: drawn}], {}, rank=0, world=1))
        yield stream_batch


def make_context(model: ExportedModel, langs: Sequence[str]) -> CollateContext:
    return CollateContext(model.tokenizer, model.max_length, "drop", model.language_ids(langs), segments=model.segments)


@torch.inference_mode()
def masked_sums(
    model: ExportedModel, objective: str, stream_batches: Iterable[StreamBatch], options: Any, heads: Any = None
) -> dict[str, np.ndarray]:
    """Return {term of the objective's loss: sums_S3}, without terms that predict no token. The sums over the tokens
    that a sequence predicts are loss in nats, tokens predicted right, tokens."""
    parts = Parts(model.encoder, heads)
    sums: dict[str, list[np.ndarray]] = {}
    for stream_batch in stream_batches:
        predictions, labels_M = predict(parts, objective, stream_batch, options, model.tokenizer.sep_id)
        features_MH = torch.cat([prediction.features_MH for prediction in predictions])
        _, losses_M, right_M = model.encoder.vocabulary_loss(features_MH, labels_M)
        numbers_M3 = torch.stack([losses_M.double(), right_M.double(), torch.ones_like(losses_M).double()], 1).cpu()
        sizes = [len(prediction.features_MH) for prediction in predictions]
        sequences = stream_batch.sequences
        for prediction, of_term_M3 in zip(predictions, numbers_M3.split(sizes), strict=True):
            states = stream_batch.states["linked" if prediction.term == "bi" else "masked"]
            first_tokens = states.columns[states.offsets[:-1]]
            sequence_M = torch.from_numpy(sequences.numbers[first_tokens])
            of_sequences_S3 = torch.zeros(len(sequences.lengths), 3, dtype=torch.float64)
            of_sequences_S3.index_add_(0, sequence_M, of_term_M3)
            sums.setdefault(prediction.term, []).append(of_sequences_S3.numpy())
    joined = {term: np.concatenate(of_batches) for term, of_batches in sums.items()}
    return {term: sums_S3 for term, sums_S3 in joined.items() if sums_S3[:, 2].any()}


def predict(
    parts: Parts, objective: str, stream_batch: StreamBatch, options: Any, pad_id: int
) -> tuple[list[Prediction], Tensor]:
    """Return the objective's predictions, and their labels [M] one after the other. pad_id: the token id that pads."""
    row = pack_row({objective: stream_batch}, pad_id).to(parts.encoder.embeddings.device)
    states = encoder_states(parts.encoder, row)[objective]
    return OBJECTIVES[objective].loss(parts, states, row.arrays[objective], options).predictions, row.labels


def loss_scores(sums_S3: np.ndarray, loss_name: str, accuracy_name: str) -> Scores:
    """Return the mean loss in nats and the accuracy under these names. sums_S3: see `masked_sums`."""

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        loss, right, targets = np.moveaxis(sums, -1, 0)
        return {loss_name: loss / targets, accuracy_name: right / targets}

    return bootstrap(sums_S3, scores_of)


def unigram_entropy(ids: list[list[int]]) -> float:
    """Return the entropy of the tokens' frequencies in nats. ids: the texts' token ids."""
    counts = np.bincount(np.concatenate([np.array(text, dtype=np.int64) for text in ids]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
