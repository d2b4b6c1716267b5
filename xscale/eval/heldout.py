"""Measures masked prediction on held-out pairs with an export: TLM loss, and the losses of AlignLM's heads.

    L = - sum_{i in M} log p(x_i | x with M masked);    loss = L / |M|

The losses are computed as a run computes those of its own held-out task (in_training.py): by step.measure_rows. Here
each row has one pair, so that pairs can be resampled for intervals.

TLM's score comes with the text's unigram entropy, the loss of a model that knows only the frequencies of the held-out
tokens: an encoder with a lower loss has learnt from context. TLM uses the exported masked-LM head, whatever the
objectives were; AlignLM's losses use AlignLM's own heads, which are saved beside the model. TLM's masks are a function
of the pair's number, the token's position and the vocabulary: the same for every model with the same tokenizer.

Shape letters: S pairs.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from xscale import rng
from xscale.data.loader import StepDataset, StreamObjective
from xscale.data.mixture import SampledRecords, StepPlan
from xscale.data.packed_row import Row, pack_row
from xscale.data.sequences import Example
from xscale.data.shards import Source
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.model import ExportedModel, Scores, read_texts
from xscale.objectives import OBJECTIVES, alignlm, tlm
from xscale.recipe import CheckpointConfig, DataConfig, ModelConfig, Recipe, StreamConfig, TrainConfig
from xscale.step.module import StepModule
from xscale.step.step import measure_rows

_MASKS = rng.key("heldout")


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
    sums = sums_of_pairs(model, source, limit, "tlm", StreamConfig("tlm", 1, options=options))
    if "mlm" not in sums:
        raise UserError(
            f"{source.directory}: no pair of up to {model.max_length} tokens has a token to predict; give other pairs"
        )
    texts = read_texts(source, limit)
    scores = loss_scores(sums["mlm"], "tlm_loss", "masked_accuracy")
    scores["unigram_entropy"] = unigram_entropy(model.tokenizer.encode([side for pair in texts for side in pair]))
    scores["targets"] = float(sums["mlm"][:, 2].sum())
    scores["dropped"] = float(len(texts) - len(sums["mlm"]))
    for name, saved in model.heads.items():
        if saved.objective != "alignlm":
            continue
        stream = StreamConfig("alignlm", 1, options=saved.options(alignlm.AlignLMOptions))
        for term, sums_S3 in sums_of_pairs(model, source, limit, name, stream).items():
            scores |= loss_scores(sums_S3, f"{name}_{term}_loss", f"{name}_{term}_accuracy")
            scores[f"{name}_{term}_targets"] = float(sums_S3[:, 2].sum())
    return scores


def sums_of_pairs(
    model: ExportedModel, source: Source, limit: int, name: str, stream: StreamConfig
) -> dict[str, np.ndarray]:
    """Return {term of the stream's loss: sums [S, 3]}, without terms that predict no token. The sums of a pair are loss
    in nats, tokens predicted right, tokens. Pairs that exceed the model's positions are left out. name: the stream's
    name, under which its heads are saved."""
    recipe = Recipe(ModelConfig(), {name: stream}, DataConfig(), TrainConfig(), CheckpointConfig())
    module = StepModule(model.encoder, recipe, model.heads).to(model.device)
    engine = SimpleNamespace(module=module, device=model.device)
    sums: dict[str, list[np.ndarray]] = {}
    try:
        for row in pair_rows(model, source, limit, name, stream):
            sums_3 = {key.term: np.array([0.0, 0.0, count]) for key, count in row.label_counts.items()}
            for key, value in measure_rows(engine, recipe, [row], rank=0).by_key().items():
                sums_3[key.term][0 if key.name == "loss" else 1] = value
            for term, sums_of_pair in sums_3.items():
                sums.setdefault(term, []).append(sums_of_pair)
    finally:
        model.encoder.eval()
    predicted = {}
    for term, sums_of_term in sums.items():
        sums_S3 = np.stack(sums_of_term)
        if sums_S3[:, 2].any():
            predicted[term] = sums_S3
    return predicted


def pair_rows(model: ExportedModel, source: Source, limit: int, name: str, stream: StreamConfig) -> Iterator[Row]:
    """Yield a row for each of the first `limit` pairs that fits the model's positions, read as in training."""
    objective = OBJECTIVES[stream.objective]

    def collate(samples: list[list[Example]], options: object, context: CollateContext) -> StreamBatch:
        ((pair,),) = samples
        pair = replace(pair, links=pair.links or "")  # a record may have no links
        if stream.objective == "tlm":
            pair = replace(pair, identity=rng.hash64(_MASKS, np.array([pair.number]))[0])
        return objective.collate([[pair]], options, context)

    ids = model.language_ids(source.langs)
    context = CollateContext(model.tokenizer, model.max_length, "drop", ids, segments=model.segments)
    how = StreamObjective(replace(objective, collate=collate), stream.options)
    dataset = StepDataset([source], {name: how}, context, seed=0)
    shard, record = np.array(source.places(np.arange(min(limit, source.records)))).T
    zeros = np.zeros(len(shard), dtype=np.int64)
    records = SampledRecords(np.arange(len(shard)), zeros, zeros, shard, record, zeros.astype(float))
    rows = [{name: records.select(np.array([number]))} for number in range(len(shard))]
    for stream_batch in dataset.stream_batches(name, StepPlan(0, rows, {}, rank=0, world=1)):
        if stream_batch.samples:
            yield pack_row({name: stream_batch}, model.tokenizer.sep_id)


def loss_scores(sums_S3: np.ndarray, loss_name: str, accuracy_name: str) -> Scores:
    """Return the mean loss in nats and the accuracy under these names. sums_S3: see `sums_of_pairs`."""

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        loss, right, targets = np.moveaxis(sums, -1, 0)
        return {loss_name: loss / targets, accuracy_name: right / targets}

    return bootstrap(sums_S3, scores_of)


def unigram_entropy(ids: list[list[int]]) -> float:
    """Return the entropy of the tokens' frequencies in nats. ids: the texts' token ids."""
    counts = np.bincount(np.concatenate([np.array(text, dtype=np.int64) for text in ids]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
