"""Measures masked prediction on held-out pairs with an export: its TLM loss.

    L = - sum_{i in M} log p(x_i | x with M masked);    loss = L / |M|

Pairs are masked and predicted by the objective's own functions. Loss and right predictions are summed for each pair,
so that pairs can be resampled for intervals.

Beside the loss stands the text's unigram entropy: the loss of a model that knows only how frequent each token is. An
encoder with a lower loss has learnt from context. The export's masked-LM head is used, whatever the objectives were.
The masks are a function of the pair's number, the token's position and the vocabulary, so all models with the same
tokenizer have the same masks.

Shape letters: S pairs, M predicted tokens.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from xscale import rng
from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example
from xscale.data.shards import Source
from xscale.data.stream_batch import CollateContext
from xscale.errors import LOG, UserError
from xscale.eval.bootstrap import scores_with_intervals
from xscale.eval.model import ExportedModel, Scores, read_texts
from xscale.models.build import has_untrained_head
from xscale.objectives import Parts, tlm
from xscale.step.module import encoder_states_by_stream

ROW = 64
"""The number of pairs that are encoded at once."""
_MASKS = rng.key("heldout")


def evaluate(model: ExportedModel, source: Source, limit: int) -> dict[str, Scores]:
    """Return {"": scores}. The scores are the loss of TLM in nats per masked token, its accuracy, the unigram entropy,
    the number of masked tokens, and the number of dropped pairs, which exceed the model's positions. Raises
    UserError."""
    from scipy import stats  # here, as in bootstrap.py

    if model.headless:  # transformers has added a random head
        raise UserError(
            f"--model {model.path} has no masked-LM head, but task heldout measures the loss of this head. Use a "
            "directory that AutoModelForMaskedLM has saved"
        )
    if has_untrained_head(model.encoder.lm):
        warn_of_untrained_head(model.path)
    options = tlm.TlmOptions(
        language_embeddings=model.language_embeddings,
        language_dropout=float(not any(model.language_ids_or_neutral(source.langs).values())),
        reset_positions=model.reset_positions,
    )
    texts = read_texts(source, limit)
    ids = model.tokenizer.encode(list(chain.from_iterable(texts)))
    samples: list[list[Example]] = []
    for number in range(len(texts)):
        random_key = rng.hash64(_MASKS, np.array([number]))[0]
        samples.append([Example(source.langs, tuple(ids[2 * number : 2 * number + 2]), None, random_key, number)])
    sums_S3 = sum_losses_of_fitting_pairs(model, samples, source.langs, options)
    targets = sums_S3[:, 2].sum()
    if not targets:
        raise UserError(
            f"{source.directory}: no pair of sentences can be used. Each pair is longer than {model.max_length} "
            "tokens, which is the maximum of the model, or has no token to predict. Use other pairs"
        )

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        loss, right, targets = np.moveaxis(sums, -1, 0)
        return {"tlm_loss": loss / targets, "masked_accuracy": right / targets}

    numbers = {
        "unigram_entropy": float(stats.entropy(np.bincount(list(chain.from_iterable(ids))))),
        "targets": float(targets),
        "dropped": float(len(texts) - len(sums_S3)),
    }
    return {"": scores_with_intervals(sums_S3, scores_of) | numbers}


@cache
def warn_of_untrained_head(path: Path) -> None:
    """Warn once for a model that its predictions are random."""
    LOG.warning(
        f"--model {path}: the masked-LM head was never trained, so its TLM losses are those of random predictions"
    )


@torch.no_grad()  # not inference_mode: masks of attention are kept for later passes
def sum_losses_of_fitting_pairs(
    model: ExportedModel, samples: list[list[Example]], langs: Sequence[str], options: tlm.TlmOptions
) -> np.ndarray:
    """Return the sums over the masked tokens of each pair [S, 3]: loss in nats, right predictions, tokens. Pairs that
    exceed the model's positions are left out. samples: one pair each."""
    context = CollateContext(
        model.tokenizer,
        model.max_length,
        "drop",
        model.language_ids_or_neutral(langs),
        has_two_token_types=model.has_two_token_types,
    )
    samples = [[pair] for pair in context.fit_pairs(samples)]
    sums_S3 = np.zeros((len(samples), 3))
    for start in range(0, len(samples), ROW):
        stream_batch = tlm.collate(samples[start : start + ROW], options, context)
        row = pack_row({"tlm": stream_batch}, model.tokenizer.sep_id).to(model.device)
        states = encoder_states_by_stream(model.encoder, row)["tlm"]
        losses = tlm.OBJECTIVE.loss(Parts(model.encoder), states, row.arrays["tlm"], options)
        (prediction,) = losses.predictions
        _, losses_M, right_M = model.encoder.vocabulary_loss(prediction.features_ME, row.labels)
        sums_M3 = torch.stack([losses_M, right_M, torch.ones_like(losses_M)], 1).double().cpu().numpy()
        pair_of_target_M = stream_batch.sequences.sequence_of_token[stream_batch.states["masked"].columns]
        np.add.at(sums_S3, start + pair_of_target_M, sums_M3)
    return sums_S3
