"""Sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour by cosine?"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.piece import Piece, Reads
from xscale.data.row import make_row
from xscale.data.sequences import Example, join_segments
from xscale.data.shards import Source
from xscale.eval.model import Exported, read_all
from xscale.models.build import positions
from xscale.ops.alignment_gather import alignment_gather
from xscale.step.step import to_device

BATCH = 64


def evaluate(model: Exported, source: Source, limit: int) -> dict[str, float]:
    """Accuracy of nearest-neighbour search over mean-pooled last states, in both directions, and their mean."""
    records = read_all(source, limit)
    first, second = (
        embed(model, [texts[side] for _, _, texts in records], model.language_ids(source)[source.langs[side]])
        for side in (0, 1)
    )
    similarity = first @ second.T
    gold = torch.arange(len(records), device=similarity.device)
    a, b = source.langs
    scores = {
        f"{a}->{b}": (similarity.argmax(1) == gold).double().mean().item(),
        f"{b}->{a}": (similarity.argmax(0) == gold).double().mean().item(),
    }
    return scores | {"accuracy": sum(scores.values()) / 2, "sentences": len(records)}


def embed(model: Exported, texts: list[str], language: int) -> Tensor:
    """Unit vectors [n_texts, H]: the mean over a sentence's tokens, without special tokens, of the last states."""
    limit = positions(model.encoder.lm.config)
    ids = [sentence[: limit - 2] for sentence in model.tokenizer.encode(texts)]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    found = []
    for start in range(0, len(order), BATCH):
        chosen = [ids[i] for i in order[start : start + BATCH]]
        examples = [Example(("",), (sentence,), None, np.uint64(0)) for sentence in chosen]
        sequences = join_segments(model.tokenizer, [[(example, 0)] for example in examples], {"": language})
        special = np.concatenate([[True, *[False] * len(sentence), True] for sentence in chosen])
        counts = np.array([len(sentence) for sentence in chosen])
        piece = Piece(
            sequences,
            {"words": Reads(np.flatnonzero(~special), counts)},
            {},
            len(chosen),
            types="languages" if model.language_embeddings else None,
        )
        inputs = to_device(make_row({"": piece}, limit, model.tokenizer.sep_id).inputs, model.device)
        with torch.inference_mode():
            found.append(F.normalize(alignment_gather(model.encoder(inputs.tokens), *inputs.gather), dim=-1))
    vectors = torch.cat(found)
    return vectors[torch.tensor(order).argsort().to(vectors.device)]
