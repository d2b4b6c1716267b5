"""Masked prediction on held-out pairs: TLM loss and accuracy, beside the text's unigram entropy; AlignLM's losses.

The entropy is what a model that knows nothing but the held-out text's own token frequencies would score: below it,
the encoder has learnt from context. TLM is measured through the exported masked-LM head, whatever was trained; a stream
of AlignLM by its own heads too, which are kept beside the model.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from xscale import rng
from xscale.data.loader import StepDataset, StreamCollate
from xscale.data.mixture import Draw, StepPlan
from xscale.data.packed_row import pack_row
from xscale.data.ragged import offsets
from xscale.data.sequences import Example
from xscale.data.shards import Source
from xscale.data.stream_batch import Context, StreamBatch
from xscale.errors import UserError
from xscale.eval.model import Exported, check_head, read_all
from xscale.models.build import positions
from xscale.objectives import OBJECTIVES, Parts, alignlm, tlm
from xscale.ops.alignment_gather import alignment_gather
from xscale.step.step import to_device

BATCH = 32


def evaluate(model: Exported, source: Source, limit: int) -> dict[str, float]:
    """tlm_loss (nats a masked token), masked_accuracy, unigram_entropy (nats a token), targets; dropped: pairs of more
    tokens than the model has positions; and `alignlm_losses`. Masks are the same each time."""
    check_head(model, "heldout")
    records = read_all(source, limit)
    ids = model.tokenizer.encode([text for _, _, texts in records for text in texts])
    identities = rng.hash64(rng.key("heldout"), np.arange(len(records)))
    samples = [
        [Example(langs, tuple(ids[2 * i : 2 * i + 2]), None, identities[i])] for i, (_, langs, _) in enumerate(records)
    ]
    samples.sort(key=lambda sample: -sum(map(len, sample[0].ids)))
    options = tlm.TlmOptions(
        language_embeddings=model.language_embeddings, language_dropout=0.0, reset_positions=model.reset_positions
    )
    longest = positions(model.encoder.lm.config)
    context = Context(model.tokenizer, longest, "drop", model.language_ids(source), segments=model.segments)
    loss = correct = targets = dropped = 0.0
    for start in range(0, len(samples), BATCH):
        stream_batch = tlm.collate(samples[start : start + BATCH], options, context)
        of_piece = masked_lm_sums(model, stream_batch)
        loss, correct, targets = loss + of_piece[0], correct + of_piece[1], targets + of_piece[2]
        dropped += stream_batch.too_long
    if not targets:
        raise UserError(f"{source.directory}: no pair has a token to predict in the model's {longest} positions")
    return {
        "tlm_loss": loss / targets,
        "masked_accuracy": correct / targets,
        "unigram_entropy": unigram_entropy(ids),
        "targets": targets,
        "dropped": dropped,
    } | alignlm_losses(model, source, limit)


@torch.inference_mode()
def masked_lm_sums(model: Exported, stream_batch: StreamBatch) -> tuple[float, float, int]:
    """Loss, number of tokens predicted right, and of targets, of a piece that data/stream_batch.py's masked_lm made."""
    row = pack_row({"": stream_batch}, positions(model.encoder.lm.config), model.tokenizer.sep_id)
    inputs = to_device(row.inputs, model.device)
    states = alignment_gather(model.encoder(inputs.tokens), *inputs.gather)
    _, losses_M, right_M = model.encoder.vocabulary_loss(model.encoder.features(states), inputs.labels)
    return float(losses_M.double().sum()), float(right_M.sum()), len(losses_M)


def unigram_entropy(texts: list[list[int]]) -> float:
    """Of the texts' own tokens, in nats."""
    counts = np.bincount(np.concatenate([np.array(ids, dtype=np.int64) for ids in texts]))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def alignlm_losses(model: Exported, source: Source, limit: int) -> dict[str, float]:
    """Of each stream of AlignLM: STREAM_mono_loss, of masked tokens, and STREAM_bi_loss, of those with a word link,
    where the records have links; nats a token, each with its accuracy and number of targets."""
    found: dict[str, float] = {}
    for name, kept in model.heads.items():
        if kept.objective != "alignlm":
            continue
        options = kept.options(alignlm.AlignLMOptions)
        heads = alignlm.Heads(model.encoder, options)
        heads.load_state_dict(kept.weights)
        parts = Parts(model.encoder, heads.eval().to(model.device))
        sums: dict[str, Tensor] = {}
        for stream_batch in alignlm_batches(model, source, limit, options):
            for term, of_piece in predicted(parts, stream_batch, model, options).items():
                sums[term] = sums.get(term, 0) + of_piece
        for term, total in sums.items():
            loss, right, targets = total.tolist()
            if targets:
                found |= {f"{name}_{term}_loss": loss / targets, f"{name}_{term}_accuracy": right / targets}
                found[f"{name}_{term}_targets"] = targets
    return found


def alignlm_batches(
    model: Exported, source: Source, limit: int, options: alignlm.AlignLMOptions
) -> Iterator[StreamBatch]:
    """Of the first `limit` records, `BATCH` each."""
    objective = OBJECTIVES["alignlm"]

    def collate(samples: list[list[Example]], options: alignlm.AlignLMOptions, context: Context) -> StreamBatch:
        linked = [replace(pair, links="") if pair.links is None else pair for (pair,) in samples]
        return objective.collate([[pair] for pair in linked], options, context)

    counts = np.minimum(source.counts, limit)
    shard, record = np.repeat(np.arange(len(counts)), counts)[:limit], offsets(counts)[:limit]
    zeros = np.zeros(len(shard), dtype=np.int64)
    draw = Draw(np.arange(len(shard)), zeros, zeros, shard, record, zeros.astype(float))
    rows = [{"alignlm": draw.at(places)} for places in np.split(np.arange(len(shard)), range(BATCH, len(shard), BATCH))]
    how = StreamCollate(collate, options, objective.words(options))
    longest = positions(model.encoder.lm.config)
    context = Context(model.tokenizer, longest, "drop", model.language_ids(source), segments=model.segments)
    dataset = StepDataset([source], {"alignlm": how}, context, seed=0)
    for row in rows:
        ((stream_batch, _),) = dataset.stream_batches("alignlm", StepPlan(0, [row], {}, rank=0, world=1))
        yield stream_batch


@torch.inference_mode()
def predicted(
    parts: Parts, stream_batch: StreamBatch, model: Exported, options: alignlm.AlignLMOptions
) -> dict[str, Tensor]:
    """Term -> loss, number of tokens predicted right, and of targets [3], fp64."""
    row = pack_row({"alignlm": stream_batch}, positions(model.encoder.lm.config), model.tokenizer.sep_id)
    inputs, reads = to_device(row.inputs, model.device), row.states["alignlm"]
    gathered = alignment_gather(model.encoder(inputs.tokens), *inputs.gather).split(list(reads.values()))
    states = dict(zip(reads, gathered, strict=True))
    predictions = OBJECTIVES["alignlm"].loss(parts, states, inputs.arrays["alignlm"], options).predictions
    features = torch.cat([prediction.features_MH for prediction in predictions])
    _, losses_M, right_M = model.encoder.vocabulary_loss(features, inputs.labels)
    numbers_M3 = torch.stack([losses_M.double(), right_M.double(), torch.ones_like(losses_M.double())], 1)
    sizes = [len(prediction.features_MH) for prediction in predictions]
    return {p.term: part.sum(0) for p, part in zip(predictions, numbers_M3.split(sizes), strict=True)}
