"""Sentence retrieval (Artetxe & Schwenk 2019): is a sentence's translation its nearest neighbour by cosine?"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.index import Source
from xscale.eval.model import Exported, read_all

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
    limit = model.encoder.lm.config.max_position_embeddings - 8
    ids = [sentence[:limit] for sentence in model.text.encode(texts)]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    vectors: list[Tensor | None] = [None] * len(ids)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        longest = max(len(ids[i]) for i in chosen) + 2
        input_ids = torch.full((len(chosen), longest), model.text.pad_id)
        words = torch.zeros(len(chosen), longest)
        for row, i in enumerate(chosen):
            n = len(ids[i])
            input_ids[row, : n + 2] = torch.tensor([model.text.cls_id, *ids[i], model.text.sep_id])
            words[row, 1 : n + 1] = 1
        attention_mask = (input_ids != model.text.pad_id).long()
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if model.language_embeddings:
            batch["token_type_ids"] = torch.full_like(input_ids, language)
        with torch.inference_mode():
            hidden = model.encoder.hidden({name: tensor.to(model.device) for name, tensor in batch.items()})
        weights = words.to(model.device)[..., None]
        pooled = F.normalize((hidden * weights).sum(1) / weights.sum(1).clamp(min=1), dim=-1)
        for row, i in enumerate(chosen):
            vectors[i] = pooled[row]
    return torch.stack([vector for vector in vectors if vector is not None])
