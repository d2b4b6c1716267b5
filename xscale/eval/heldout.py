"""Measures masked prediction on held-out text: TLM loss of pairs, AlignLM's losses, and perplexity by language.

    L = - sum_{i in M} log p(x_i | x with M masked);    loss = L / |M|;    perplexity = exp(loss)
    bits per character = loss / ln 2 * tokens / characters

Each score comes with the text's unigram entropy, the loss of a model that knows only the frequencies of the held-out
tokens: an encoder with a lower loss has learnt from context. TLM and perplexity (Devlin et al. 2019) use the exported
masked-LM head, whatever the objectives were; AlignLM's losses use AlignLM's own heads, which are saved beside the
model. Masks are a function of the record's number, the token's position and the vocabulary: the same for every model
with the same tokenizer. Under different tokenizers only bits per character are comparable.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xscale import rng
from xscale.data.loader import StepDataset, StreamObjective
from xscale.data.mixture import SampledRecords, StepPlan
from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example
from xscale.data.shards import Source
from xscale.data.stream_batch import Context, StreamBatch
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.model import ExportedModel, read_texts
from xscale.objectives import OBJECTIVES, Parts, Prediction, alignlm, mlm, tlm
from xscale.step.module import encoder_states
from xscale.step.step import to_device

BATCH = 32


def evaluate(model: ExportedModel, source: Source, limit: int) -> dict[str, float]:
    """Return the loss (nats per masked token) and accuracy of TLM, the unigram entropy, the number of masked tokens and
    of pairs that were dropped because they exceed the model's positions, and the scores of evaluate_alignlm."""
    check_head(model, "heldout")
    ids = model.tokenizer.encode([text for texts in read_texts(source, limit) for text in texts])
    pairs = make_batches([(source.langs, sides) for sides in zip(ids[::2], ids[1::2], strict=True)], "heldout")
    context = make_context(model, source.langs)
    options = tlm.TlmOptions(
        language_embeddings=model.language_embeddings,
        language_dropout=float(not any(context.language_ids.values())),  # a pair of unknown languages has no language
        reset_positions=model.reset_positions,
    )
    batches = [tlm.collate(samples, options, context) for samples in pairs]
    sums = masked_sums(model, "tlm", batches, options)
    if "mlm" not in sums:
        raise UserError(
            f"{source.directory}: no pair of up to {model.max_length} tokens has a token to predict; give other pairs"
        )
    dropped = float(len(ids) // 2 - sum(batch.samples for batch in batches))
    return score_sums(sums["mlm"], "tlm_loss", ids) | {"dropped": dropped} | evaluate_alignlm(model, source, limit)


def evaluate_perplexity(model: ExportedModel, texts: list[str], language: str, path: Path) -> dict[str, float]:
    """Return perplexity, bits per character, loss and accuracy of texts, each as `[CLS] text [SEP]` with 15 % masked
    tokens. Texts longer than the model's positions are split. path: the texts' file or folder, for errors."""
    check_head(model, "perplexity")
    ids = model.tokenizer.encode(texts)
    options = mlm.MaskedOptions(language_embeddings=model.language_embeddings, language_dropout=0.0)
    context = make_context(model, [language])
    batches = make_batches([((language,), (text,)) for text in ids], "perplexity")
    sums = masked_sums(model, "mlm", (mlm.collate(samples, options, context) for samples in batches), options)
    if "mlm" not in sums:
        raise UserError(f"{path}: no text in {language} has a token to predict; give other text")
    return score_sums(sums["mlm"], "mlm_loss", ids, characters=sum(map(len, texts)))


def check_head(model: ExportedModel, task: str) -> None:
    """Raise UserError for a model without a masked-LM head, since transformers would add a random one."""
    if model.headless:
        raise UserError(
            f"the model has no masked-LM head, which task {task} measures; give a directory that was saved from "
            f"AutoModelForMaskedLM"
        )


def make_context(model: ExportedModel, langs: Sequence[str]) -> Context:
    return Context(model.tokenizer, model.max_length, "drop", model.language_ids(langs), segments=model.segments)


def make_batches(
    texts: list[tuple[tuple[str, ...], tuple[list[int], ...]]], seed: str
) -> Iterator[list[list[Example]]]:
    """Return batches of samples, longest first. texts: (languages, token ids of each side). seed: decides the masks."""
    identities = rng.hash64(rng.key(seed), np.arange(len(texts)))
    samples = [[Example(langs, ids, None, identities[i])] for i, (langs, ids) in enumerate(texts)]
    samples.sort(key=lambda sample: -sum(map(len, sample[0].ids)))
    return (samples[start : start + BATCH] for start in range(0, len(samples), BATCH))


@torch.inference_mode()
def masked_sums(
    model: ExportedModel, objective: str, stream_batches: Iterable[StreamBatch], options: Any, heads: Any = None
) -> dict[str, np.ndarray]:
    """Return {term of the objective's loss: sums_S3}, without terms that predict no token. The sums over the tokens
    that a sequence predicts are loss in nats, tokens predicted right, tokens."""
    parts, batches = Parts(model.encoder, heads), dict[str, list[np.ndarray]]()
    for stream_batch in stream_batches:
        predictions, labels_M = predict(parts, objective, stream_batch, options, model.tokenizer.sep_id)
        features = torch.cat([prediction.features_MH for prediction in predictions])
        _, losses_M, right_M = model.encoder.vocabulary_loss(features, labels_M)
        numbers_3M = torch.stack([losses_M.double(), right_M.double(), torch.ones_like(losses_M).double()]).cpu()
        sizes = [len(prediction.features_MH) for prediction in predictions]
        sequences = stream_batch.sequences
        for prediction, of_term_3M in zip(predictions, numbers_3M.split(sizes, dim=1), strict=True):
            read = stream_batch.reads["linked" if prediction.term == "bi" else "masked"]
            sequence_M = sequences.numbers[read.places[np.cumsum(read.place_counts) - read.place_counts]]
            sums = [np.bincount(sequence_M, row, len(sequences.lengths)) for row in of_term_3M.numpy()]
            batches.setdefault(prediction.term, []).append(np.stack(sums, 1))
    joined = {term: np.concatenate(of_batches) for term, of_batches in batches.items()}
    return {term: sums for term, sums in joined.items() if sums[:, 2].any()}


def predict(
    parts: Parts, objective: str, stream_batch: StreamBatch, options: Any, pad_id: int
) -> tuple[list[Prediction], Tensor]:
    """Return the objective's predictions, and their labels [M] one after the other. pad_id: the token id that pads."""
    row = pack_row({objective: stream_batch}, pad_id)
    inputs = to_device(row.inputs, parts.encoder.embeddings.device)
    arguments = encoder_states(parts.encoder, row, inputs)[objective], inputs.arrays[objective], options
    return OBJECTIVES[objective].loss(parts, *arguments).predictions, inputs.labels


def loss_and_accuracy(loss_name: str, accuracy_name: str, sums: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mean loss in nats and the accuracy [...] under these names. sums: [..., 3] as in masked_sums."""
    loss, right, targets = np.moveaxis(sums, -1, 0)
    return {loss_name: loss / targets, accuracy_name: right / targets}


def score_sums(sums_S3: np.ndarray, loss_name: str, ids: list[list[int]], characters: int = 0) -> dict[str, float]:
    """Return scores from the sums of masked_sums. ids: the texts' token ids, for the unigram entropy in nats.
    characters: the texts' number of characters; 0 leaves out perplexity and bits per character."""
    bits_per_nat = sum(map(len, ids)) / max(characters, 1) / math.log(2)

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        scores = loss_and_accuracy(loss_name, "masked_accuracy", sums)
        nats = scores[loss_name]
        return ({"perplexity": np.exp(nats), "bits_per_character": bits_per_nat * nats} if characters else {}) | scores

    counts = np.bincount(np.concatenate([np.array(text, dtype=np.int64) for text in ids]))
    p = counts[counts > 0] / counts.sum()
    entropy = float(-(p * np.log(p)).sum())
    return bootstrap(sums_S3, scores_of) | {"unigram_entropy": entropy, "targets": float(sums_S3[:, 2].sum())}


def evaluate_alignlm(model: ExportedModel, source: Source, limit: int) -> dict[str, float]:
    """Return loss in nats per token, accuracy and number of targets for each AlignLM stream that trained the model:
    STREAM_mono_loss of masked tokens and, if records have word links, STREAM_bi_loss of masked tokens with a link."""
    scores: dict[str, float] = {}
    for name, kept in model.heads.items():
        if kept.objective != "alignlm":
            continue
        options = kept.options(alignlm.AlignLMOptions)
        heads = alignlm.Heads(model.encoder, options)
        heads.load_state_dict(kept.weights)
        batches = alignlm_batches(model, source, limit, options)
        sums = masked_sums(model, "alignlm", batches, options, heads.eval().to(model.device))
        for term, sums_S3 in sums.items():
            scores |= bootstrap(sums_S3, partial(loss_and_accuracy, f"{name}_{term}_loss", f"{name}_{term}_accuracy"))
            scores[f"{name}_{term}_targets"] = float(sums_S3[:, 2].sum())
    return scores


def alignlm_batches(
    model: ExportedModel, source: Source, limit: int, options: alignlm.AlignLMOptions
) -> Iterator[StreamBatch]:
    """Yield stream batches of the first `limit` records, read as in training, with their word links."""
    objective = OBJECTIVES["alignlm"]

    def collate(samples: list[list[Example]], options: alignlm.AlignLMOptions, context: Context) -> StreamBatch:
        linked = [replace(pair, links="") if pair.links is None else pair for (pair,) in samples]
        return objective.collate([[pair] for pair in linked], options, context)

    shard, record = np.array(source.places(np.arange(min(limit, source.records)))).T
    zeros = np.zeros(len(shard), dtype=np.int64)
    draw = SampledRecords(np.arange(len(shard)), zeros, zeros, shard, record, zeros.astype(float))
    how = StreamObjective(replace(objective, collate=collate), options)
    dataset = StepDataset([source], {"alignlm": how}, make_context(model, source.langs), seed=0)
    for places in np.split(np.arange(len(shard)), range(BATCH, len(shard), BATCH)):
        plan = StepPlan(0, [{"alignlm": draw.select(places)}], {}, rank=0, world=1)
        (stream_batch,) = dataset.stream_batches("alignlm", plan)
        yield stream_batch
