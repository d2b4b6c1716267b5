"""Masked prediction on held-out pairs: TLM loss and accuracy, beside the text's unigram entropy.

The entropy is what a model that knows nothing but the held-out text's own token frequencies would score: below it,
the encoder has learnt from context.
"""

import numpy as np
import torch

from xscale import rng
from xscale.data.collate import Context
from xscale.data.encode import Example
from xscale.data.index import Source
from xscale.eval.model import Exported, read_all
from xscale.objectives import tlm
from xscale.objectives.base import Parts

BATCH = 32


def evaluate(model: Exported, source: Source, limit: int) -> dict[str, float]:
    """tlm_loss (nats a masked token), masked_accuracy, unigram_entropy (nats a token). Masks are the same each time."""
    records = read_all(source, limit)
    ids = model.text.encode([text for _, _, texts in records for text in texts])
    identities = rng.hash64(rng.key("heldout"), np.arange(len(records)))
    samples = [
        [Example(langs, tuple(ids[2 * i : 2 * i + 2]), None, identities[i])] for i, (_, langs, _) in enumerate(records)
    ]
    samples.sort(key=lambda sample: -sum(map(len, sample[0].ids)))
    options = tlm.Options(language_embeddings=model.language_embeddings, reset_positions=model.reset_positions)
    context = Context(model.text, 512, "drop", model.language_ids(source))
    loss = correct = targets = 0.0
    with torch.inference_mode():
        for start in range(0, len(samples), BATCH):
            micro = tlm.collate(samples[start : start + BATCH], options, context)
            sums = tlm.OBJECTIVE.loss(Parts(model.encoder), model.to_device(micro.arrays), options)
            loss += float(sums.terms["mlm"])
            correct += float(sums.metrics["accuracy"][0])
            targets += micro.targets["mlm"]
    counts = np.bincount(np.concatenate([np.array(side, dtype=np.int64) for side in ids]))
    p = counts[counts > 0] / counts.sum()
    return {
        "tlm_loss": loss / targets,
        "masked_accuracy": correct / targets,
        "unigram_entropy": float(-(p * np.log(p)).sum()),
        "targets": targets,
    }
