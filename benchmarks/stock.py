"""The objectives as an ordinary user of Hugging Face and DeepSpeed writes them: sequences padded to the longest of a
random micro-batch, logits at all positions, AlignLM's word links as a dense matrix A.

Every class has `examples` (a sample's records -> tokenised), `collate` (examples -> tensors) and `loss`. `mask` is an
attribute, so that a check can replace it by xscale's choices.

Shape letters: B sequences, L tokens of the longest.
"""

import copy
from collections import defaultdict
from itertools import groupby, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling

from xscale.data.loader import Loader
from xscale.data.words import split
from xscale.errors import UserError
from xscale.models.encoder import HEADS
from xscale.record import Record

Example = dict[str, Any]
Batch = dict[str, Tensor]


class Mlm(nn.Module):
    """MLM: a sequence has whole sentences of one document, at most max_length tokens."""

    def __init__(self, lm: Any, loader: Loader, options: Any):
        super().__init__()
        self.loader, self.options = loader, options
        self.tokenizer = loader.corpus.tokenizer.hf
        self.languages = {language: number for number, language in enumerate(loader.corpus.languages, start=1)}
        self.max_length = loader.recipe.data.max_length
        self.mask = DataCollatorForLanguageModeling(
            self.tokenizer, mlm_probability=getattr(options, "mask_prob", 0.15)
        ).torch_mask_tokens

    def examples(self, records: list[Record]) -> list[Example]:
        room = self.max_length - 2
        sequences: list[list[int]] = []
        for _, document in groupby(records, key=lambda record: record.key if record.doc is None else record.doc):
            inside: list[list[int]] = []
            for record in document:
                ids = self.tokenizer(record.texts[0], add_special_tokens=False, truncation=True, max_length=room)
                if not inside or len(inside[-1]) + len(ids["input_ids"]) > room:
                    inside.append([])
                inside[-1] += ids["input_ids"]
            sequences += [[self.tokenizer.cls_token_id, *ids, self.tokenizer.sep_token_id] for ids in inside]
        language = self.languages[records[0].langs[0]]
        return [{"input_ids": ids, "token_type_ids": [language] * len(ids)} for ids in sequences]

    def collate(self, examples: list[Example]) -> Batch:
        inputs, special = self.inputs(examples)
        inputs["input_ids"], inputs["labels"] = self.mask(inputs["input_ids"], special)
        return inputs

    def inputs(self, examples: list[Example]) -> tuple[Batch, Tensor]:
        """The padded inputs [B, L] that the options need, and True for each special token [B, L]."""
        ids = pad([example["input_ids"] for example in examples], self.tokenizer.pad_token_id)
        batch = {"input_ids": ids, "attention_mask": pad([[1] * len(e["input_ids"]) for e in examples], 0)}
        names = {"token_type_ids": "language_embeddings", "position_ids": "reset_positions"}
        for name, option in names.items():
            if getattr(self.options, option, False):
                batch[name] = pad([example[name] for example in examples], 0)
        return batch, torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids))

    def loss(self, lm: Any, batch: Batch) -> Tensor:
        return lm(**batch).loss


class Tlm(Mlm):
    def examples(self, records: list[Record]) -> list[Example]:
        (record,) = records
        ids = self.tokenizer(*record.texts, truncation=True, max_length=self.max_length)["input_ids"]
        first = ids.index(self.tokenizer.sep_token_id) + 1
        sizes = (first, len(ids) - first)
        languages: list[int] = []
        positions: list[int] = []
        for language, size in zip(record.langs, sizes, strict=True):
            languages += [self.languages[language]] * size
            positions += range(size)
        return [{"input_ids": ids, "token_type_ids": languages, "position_ids": positions}]


class AlignLm(Mlm):
    """AlignLM: the paper's formulas (3)-(11) at all positions, H* = A^T H with A [B, L, L]."""

    def __init__(self, lm: Any, loader: Loader, options: Any):
        super().__init__(lm, loader, options)
        self.head = HEADS[lm.config.model_type]
        self.W2, self.linear = (nn.Linear(lm.config.hidden_size, lm.config.hidden_size) for _ in range(2))
        self.W3 = copy.deepcopy(self.head(lm).dense)
        for layer in (self.W2, self.linear):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def examples(self, records: list[Record]) -> list[Example]:
        (record,) = records
        words = [split([text])[0][0] for text in record.texts]  # links count a sentence's marks too
        encoding = self.tokenizer(*words, is_split_into_words=True, truncation=True, max_length=self.max_length)
        tokens_of = defaultdict(list)
        for token, word in enumerate(zip(encoding.sequence_ids(0), encoding.word_ids(0), strict=True)):
            tokens_of[word].append(token)
        pairs: list[tuple[int, int]] = []
        for a, b in links_of(record):
            pairs += product(tokens_of[0, a], tokens_of[1, b])
        return [{"input_ids": encoding["input_ids"], "links": pairs}]

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


STOCK: dict[str, type[Mlm]] = {"mlm": Mlm, "tlm": Tlm, "alignlm": AlignLm}
FIXED = {"normalize": "sum", "expand": "all", "shuffle_sides": False}
"""The options for which the stock objectives support only this value."""


class StockModule(nn.Module):
    """The model and the stock objectives of all streams, in the module that DeepSpeed wraps."""

    def __init__(self, lm: Any, loader: Loader):
        super().__init__()
        self.lm = lm
        self.streams = nn.ModuleDict()
        for name, stream in loader.recipe.streams.items():
            if stream.objective not in STOCK:
                raise UserError(f"the stock loop has no {stream.objective}; choose recipes of {', '.join(STOCK)}")
            for option, value in FIXED.items():
                if getattr(stream.options, option, value) != value:
                    raise UserError(f"streams.{name}.{option}: the stock loop supports only {value}")
            self.streams[name] = STOCK[stream.objective](lm, loader, stream.options)
        self.train()

    def forward(self, stream: str, batch: Batch) -> Tensor:
        part: Any = self.streams[stream]
        return part.loss(self.lm, batch)


def pad(rows: list[list[int]], fill: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def links_of(record: Record) -> list[tuple[int, int]]:
    """The record's word links as pairs of word numbers."""
    links = []
    for link in (record.links or "").split():
        i, j = map(int, link.split("-"))
        links.append((i, j))
    return links
