"""Masked prediction on held-out pairs: TLM loss and accuracy, beside the text's unigram entropy.

The entropy is what a model that knows nothing but the held-out text's own token frequencies would score: below it,
the encoder has learnt from context.
"""

import numpy as np
import torch

from xscale import rng
from xscale.data.piece import Context
from xscale.data.row import make_row
from xscale.data.sequences import Example
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.eval.model import Exported, read_all
from xscale.models.build import positions
from xscale.objectives import tlm
from xscale.ops.alignment_gather import alignment_gather
from xscale.step.step import to_device

BATCH = 32


def evaluate(model: Exported, source: Source, limit: int) -> dict[str, float]:
    """tlm_loss (nats a masked token), masked_accuracy, unigram_entropy (nats a token), targets; dropped: pairs of more
    tokens than the model has positions. Masks are the same each time."""
    records = read_all(source, limit)
    ids = model.tokenizer.encode([text for _, _, texts in records for text in texts])
    identities = rng.hash64(rng.key("heldout"), np.arange(len(records)))
    samples = [
        [Example(langs, tuple(ids[2 * i : 2 * i + 2]), None, identities[i])] for i, (_, langs, _) in enumerate(records)
    ]
    samples.sort(key=lambda sample: -sum(map(len, sample[0].ids)))
    options = tlm.Options(language_embeddings=model.language_embeddings, reset_positions=model.reset_positions)
    longest = positions(model.encoder.lm.config)
    context = Context(model.tokenizer, longest, "drop", model.language_ids(source), segments=model.segments)
    loss = correct = targets = dropped = 0.0
    with torch.inference_mode():
        for start in range(0, len(samples), BATCH):
            piece = tlm.collate(samples[start : start + BATCH], options, context)
            inputs = to_device(make_row({"tlm": piece}, longest, model.tokenizer.sep_id).inputs, model.device)
            states = alignment_gather(model.encoder(inputs.tokens), *inputs.gather)
            _, losses_M, right_M = model.encoder.vocabulary_loss(model.encoder.features(states), inputs.labels)
            loss += float(losses_M.double().sum())
            correct += float(right_M.sum())
            targets += len(losses_M)
            dropped += piece.too_long
    if not targets:
        raise UserError(f"{source.directory}: no pair has a token to predict in the model's {longest} positions")
    counts = np.bincount(np.concatenate([np.array(side, dtype=np.int64) for side in ids]))
    p = counts[counts > 0] / counts.sum()
    return {
        "tlm_loss": loss / targets,
        "masked_accuracy": correct / targets,
        "unigram_entropy": float(-(p * np.log(p)).sum()),
        "targets": targets,
        "dropped": dropped,
    }
