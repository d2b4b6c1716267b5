"""TLM and AlignLM as an ordinary user of Hugging Face and DeepSpeed writes them: sequences padded to the longest of a
random micro-batch, logits at all positions, AlignLM's word links as a dense matrix A.

Shape letters: B sequences, L tokens of the longest.
"""

import copy
from collections import defaultdict
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DataCollatorForLanguageModeling

from xscale.data.link_projection import parse_pharaoh
from xscale.data.loader import Loader
from xscale.data.words import split_words_and_symbols
from xscale.models.encoder import HEADS
from xscale.record import Record

Example = dict[str, Any]
Batch = dict[str, Tensor]


class Tlm(nn.Module):
    def __init__(self, lm: Any, loader: Loader, options: Any):
        super().__init__()
        self.options = options
        self.tokenizer = loader.corpus.tokenizer.hf
        self.max_length = loader.recipe.data.max_length
        self.collator = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=options.mask_prob)

    def example(self, pair: Record) -> Example:
        return {"input_ids": self.tokenizer(*pair.texts, truncation=True, max_length=self.max_length)["input_ids"]}

    def collate(self, examples: list[Example]) -> Batch:
        return dict(self.collator([{"input_ids": example["input_ids"]} for example in examples]))

    def loss(self, lm: Any, batch: Batch) -> Tensor:
        return lm(**batch).loss


class AlignLm(Tlm):
    """AlignLM: the paper's formulas (3)-(11) at all positions, H* = A^T H with A [B, L, L]."""

    def __init__(self, lm: Any, loader: Loader, options: Any):
        super().__init__(lm, loader, options)
        self.head = HEADS[lm.config.model_type]
        self.W2, self.linear = (nn.Linear(lm.config.hidden_size, lm.config.hidden_size) for _ in range(2))
        self.W3 = copy.deepcopy(self.head(lm).dense)
        for layer in (self.W2, self.linear):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def example(self, pair: Record) -> Example:
        words = [split_words_and_symbols([text])[0][0] for text in pair.texts]  # links count a sentence's marks too
        encoding = self.tokenizer(*words, is_split_into_words=True, truncation=True, max_length=self.max_length)
        tokens_of = defaultdict(list)
        for token, word in enumerate(zip(encoding.sequence_ids(0), encoding.word_ids(0), strict=True)):
            tokens_of[word].append(token)
        links: list[tuple[int, int]] = []
        for a, b in parse_pharaoh(pair.links or "", (len(words[0]), len(words[1]))):
            links += product(tokens_of[0, a], tokens_of[1, b])
        return {"input_ids": encoding["input_ids"], "links": links}

    def collate(self, examples: list[Example]) -> Batch:
        batch = super().collate(examples)
        B, L = batch["input_ids"].shape
        batch["A"] = torch.zeros(B, L, L)
        for b, example in enumerate(examples):
            for i, j in example["links"]:
                batch["A"][b, i, j] = batch["A"][b, j, i] = 1
        return batch

    def loss(self, lm: Any, batch: Batch) -> Tensor:
        A = batch["A"]
        labels = batch["labels"]
        W1, GELU, LN = self.head(lm)
        W = lm.get_output_embeddings()
        H = lm.base_model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        H_star = torch.bmm(A.to(H.dtype).transpose(1, 2), H)
        mono = W(LN(self.linear(GELU(W1(H)))))
        bi = W(LN(self.linear(GELU(self.W3(self.W2(H_star))))))
        linked = labels.where(A.any(1), -100)
        L_mp = F.cross_entropy(mono.flatten(0, 1), labels.flatten())
        L_bp = F.cross_entropy(bi.flatten(0, 1), linked.flatten(), reduction="sum") / (labels >= 0).sum()
        return L_mp + self.options.bilingual_weight * L_bp


STOCK: dict[str, type[Tlm]] = {"tlm": Tlm, "alignlm": AlignLm}


class StockModule(nn.Module):
    """The model and the stock objectives of all streams, in the module that DeepSpeed wraps."""

    def __init__(self, lm: Any, loader: Loader):
        super().__init__()
        self.lm = lm
        self.streams = nn.ModuleDict()
        for name, stream in loader.recipe.streams.items():
            self.streams[name] = STOCK[stream.objective](lm, loader, stream.options)
        self.train()

    def forward(self, stream: str, batch: Batch) -> Tensor:
        part: Any = self.streams[stream]
        return part.loss(self.lm, batch)
