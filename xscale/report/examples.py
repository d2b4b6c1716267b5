"""What a model puts in the place of masked words: AlignLM's two heads side by side, beside the links."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale import rng
from xscale.data import links
from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example
from xscale.data.shards import Source
from xscale.data.stream_batch import Context, StreamBatch
from xscale.eval.model import Exported
from xscale.models.build import positions
from xscale.objectives import OBJECTIVES, Parts, alignlm
from xscale.ops.alignment_gather import alignment_gather
from xscale.report.contents import Guesses, Masked, Shown
from xscale.step.step import to_device

SHOWN, SEARCHED, MOST_MASKED = 4, 400, 8
"""Pairs; records among which they are looked for, evenly; masked tokens of a pair."""
LENGTHS = range(12, 60)
"""Tokens of a pair that is shown, if there are such."""
GUESSES = 3
OBJECTIVE = OBJECTIVES["alignlm"]


def examples(model: Exported, source: Source) -> list[Shown]:
    """The heads are those of the model's first stream of AlignLM; without one, the masked-LM head alone guesses."""
    kept = next((heads for heads in model.heads.values() if heads.objective == "alignlm"), None)
    options = replace(kept.options(alignlm.AlignLMOptions) if kept else alignlm.AlignLMOptions(), shuffle_sides=False)
    heads = alignlm.Heads(model.encoder, options)
    if kept:
        heads.load_state_dict(kept.weights)
    parts = Parts(model.encoder, heads.eval().to(model.device))
    longest = positions(model.encoder.lm.config)
    context = Context(model.tokenizer, longest, "drop", model.language_ids(source), segments=model.segments)
    all_pairs = (show(parts, pair, options, context, bool(kept)) for pair in pairs_of(model, source))
    return list(islice((shown for shown in all_pairs if shown.masked), SHOWN))


def pairs_of(model: Exported, source: Source) -> Iterator[Example]:
    """Those of a length that is easily read come first."""
    numbers = np.unique(np.linspace(0, source.records - 1, min(source.records, SEARCHED)).astype(np.int64))
    records = [source.with_words(source.read(*place)) for place in source.places(numbers)]
    ids, words = model.tokenizer.encode_words([text for record in records for text in record.texts])
    identities = rng.hash64(rng.key("examples"), numbers)
    pairs = [
        Example(
            record.langs,
            (ids[2 * i], ids[2 * i + 1]),
            (words[2 * i], words[2 * i + 1]),
            identities[i],
            key=record.key,
            links=record.links or "",
        )
        for i, record in enumerate(records)
    ]
    pairs.sort(key=lambda pair: sum(map(len, pair.ids)) not in LENGTHS)
    yield from pairs


@torch.inference_mode()
def show(parts: Parts, pair: Example, options: alignlm.AlignLMOptions, context: Context, heads: bool) -> Shown:
    piece = OBJECTIVE.collate([[pair]], options, context)
    if not piece.samples:
        return Shown([], [])
    masked = piece.reads["masked"].places
    ids = piece.sequences.ids.copy()
    ids[masked] = piece.labels["mono"]
    tokens = [text_of(token, context) for token in ids.tolist()]
    words = links.read_links([pair])
    of_words = links.word_tokens([pair], [[0, 1]], piece.sequences, words.first, options.expand)
    of_tokens = links.token_links(words.links, of_words)
    linked, partners = links.linked_states(of_tokens, masked, len(ids))
    ends = np.cumsum(np.asarray(partners.counts))
    mono, bi = guesses(parts, piece, options, context)
    rows = dict(zip(linked.tolist(), range(len(linked)), strict=True))
    return Shown(
        tokens,
        [
            Masked(
                tokens[at],
                at,
                [tokens[p] for p in np.split(partners.places, ends[:-1])[rows[i]].tolist()] if i in rows else [],
                named(mono[i], context),
                named(bi[rows[i]], context) if heads and i in rows else [],
            )
            for i, at in enumerate(masked.tolist()[:MOST_MASKED])
        ],
    )


def guesses(parts: Parts, piece: StreamBatch, options: alignlm.AlignLMOptions, context: Context) -> list[Tensor]:
    """Of the monolingual and of the bilingual head, the probabilities of all tokens [M, V]."""
    row = pack_row({"alignlm": piece}, context.max_length, context.tokenizer.sep_id)
    device = parts.encoder.embeddings.device
    inputs, reads = to_device(row.inputs, device), row.states["alignlm"]
    gathered = alignment_gather(parts.encoder(inputs.tokens), *inputs.gather).split(list(reads.values()))
    states = dict(zip(reads, gathered, strict=True))
    predictions = OBJECTIVE.loss(parts, states, inputs.arrays["alignlm"], options).predictions
    out = parts.encoder.lm.get_output_embeddings()
    return [F.linear(p.features_MH, out.weight, out.bias).float().softmax(-1).cpu() for p in predictions]


def named(probabilities_V: Tensor, context: Context) -> Guesses:
    best = probabilities_V.topk(GUESSES)
    tokens = [text_of(token, context) for token in best.indices.tolist()]
    return list(zip(tokens, best.values.tolist(), strict=True))


def text_of(token: int, context: Context) -> str:
    return str(context.tokenizer.hf.decode([token])).strip()
