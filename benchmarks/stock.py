"""The objectives as an ordinary user of Hugging Face and DeepSpeed writes them: sequences padded to the longest of a
random micro-batch, logits at all positions, AlignLM's word links as a dense matrix A.

Every class has `examples` (a sample's records -> tokenised), `collate` (examples -> tensors) and `loss`. Random numbers
come from torch and random; `mask` and `swap` are attributes, so that a check can replace them by xscale's choices.

Shape letters: B sequences, L tokens of the longest, H hidden width, V vocabulary, D width of z, N new keys, K keys of
the queue.
"""

import copy
import random
from collections import Counter, defaultdict
from itertools import chain, groupby, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling

from xscale.data.words import split
from xscale.errors import UserError
from xscale.models.encoder import HEADS
from xscale.record import Record
from xscale.run_spec import RunSpec

Example = dict[str, Any]
Batch = dict[str, Tensor]


class Mlm(nn.Module):
    """MLM: a sequence has whole sentences of one document, at most max_length tokens."""

    def __init__(self, lm: Any, run_spec: RunSpec, options: Any):
        super().__init__()
        self.run_spec, self.options = run_spec, options
        self.tokenizer = run_spec.tokenizer.hf
        self.languages = {language: number for number, language in enumerate(run_spec.languages, start=1)}
        self.max_length = run_spec.recipe.data.max_length
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

    def after_step(self, lm: Any) -> None:
        pass


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


class AlignMlm(Mlm):
    """ALIGN-MLM: a micro-batch uses all entries, or `pairs_per_step` of them, from two padded tables of token ids."""

    def __init__(self, lm: Any, run_spec: RunSpec, options: Any):
        super().__init__(lm, run_spec, options)
        words: list[list[int]] = []
        translations: list[list[int]] = []
        for lexicon in run_spec.dictionaries["align_mlm"]:
            for word, translation in zip(*lexicon.ids, strict=True):
                if list(word) != list(translation):
                    words.append(word)
                    translations.append(translation)
        self.sides = [pad(words, -1), pad(translations, -1)]

    def loss(self, lm: Any, batch: Batch) -> Tensor:
        wanted = self.options.pairs_per_step
        picked = torch.randperm(len(self.sides[0]))[:wanted] if wanted else slice(None)
        vectors = [self.vectors(lm, side[picked].to(batch["input_ids"].device)) for side in self.sides]
        return super().loss(lm, batch) - self.options.alpha * F.cosine_similarity(*vectors, dim=-1).mean()

    def vectors(self, lm: Any, ids: Tensor) -> Tensor:
        """The mean of the input embeddings of each word's tokens."""
        rows = lm.get_input_embeddings()(ids.clamp(min=0)).float()
        there = (ids >= 0).unsqueeze(-1)
        return (rows * there).sum(1) / there.sum(1)


class AlignLm(Mlm):
    """AlignLM: the paper's formulas (3)-(11) at all positions, H* = A^T H with A [B, L, L]."""

    def __init__(self, lm: Any, run_spec: RunSpec, options: Any):
        super().__init__(lm, run_spec, options)
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


class Ppa(Tlm):
    """PPA: query encoder, key encoder and TLM are separate passes; the momentum update goes parameter by parameter."""

    def __init__(self, lm: Any, run_spec: RunSpec, options: Any):
        super().__init__(lm, run_spec, options)
        width = lm.config.hidden_size
        self.projection = nn.Sequential(
            nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, options.projection, bias=False)
        )
        self.keys: list[nn.Module] = []  # a list: DeepSpeed must not train it
        self.new: list[Tensor] = []
        self.queue_KD = first_queue(options)
        self.next = 0
        self.swap = lambda: random.random() < 0.5

    def examples(self, records: list[Record]) -> list[Example]:
        (record,) = records
        room = (self.max_length - 3) // 2
        ids = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in record.texts]
        return [{"sides": [side[:room] for side in ids]}]

    def collate(self, examples: list[Example]) -> Batch:
        cls = [self.tokenizer.cls_token_id]
        sep = [self.tokenizer.sep_token_id]
        pairs = [example["sides"][:: -1 if self.swap() else 1] for example in examples]
        batch = {}
        if self.options.tlm_weight:
            batch = super().collate([{"input_ids": cls + s + sep + t + sep} for s, t in pairs])
        for name, side in (("query", 0), ("key", 1)) if self.options.moco_weight else ():
            view, _ = self.inputs([{"input_ids": cls + pair[side] + sep} for pair in pairs])
            batch |= {f"{name}_ids": view["input_ids"], f"{name}_mask": view["attention_mask"]}
        return batch

    def loss(self, lm: Any, batch: Batch) -> Tensor:
        if not self.options.moco_weight:
            return self.options.tlm_weight * super().loss(lm, batch)
        self.start(lm)
        views = [(batch.pop(f"{name}_ids"), batch.pop(f"{name}_mask")) for name in ("query", "key")]
        q_BD = project(lm.base_model, self.projection, self.options.pooling, *views[0])
        with torch.no_grad():
            k_BD = project(*self.keys, self.options.pooling, *views[1])
        self.new.append(k_BD)
        positive_B1 = (q_BD * k_BD).sum(-1, keepdim=True)
        logits = torch.cat([positive_B1, q_BD @ self.queue_KD.T], dim=1) / self.options.temperature
        moco = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))
        total = self.options.moco_weight * moco
        return total + self.options.tlm_weight * super().loss(lm, batch) if batch else total

    def start(self, lm: Any) -> None:
        if not self.keys:
            self.keys = [copy.deepcopy(module).requires_grad_(False) for module in (lm.base_model, self.projection)]
            self.queue_KD = self.queue_KD.to(next(lm.parameters()).device)

    @torch.no_grad()
    def after_step(self, lm: Any) -> None:
        if not self.new:
            return
        m = self.options.momentum
        for key, query in zip(self.keys, (lm.base_model, self.projection), strict=True):
            for k, q in zip(key.parameters(), query.parameters(), strict=True):
                k.data = k.data * m + q.data * (1 - m)
        new_ND = torch.cat(self.new)
        places = (self.next + torch.arange(len(new_ND))) % len(self.queue_KD)
        self.queue_KD[places] = new_ND
        self.next = (self.next + len(new_ND)) % len(self.queue_KD)
        self.new.clear()


def project(encoder: nn.Module, projection: nn.Module, pooling: str, ids: Tensor, mask: Tensor) -> Tensor:
    """z [B, D] in fp32, from the state of [CLS], or from the sum of the states of all tokens but [CLS] and [SEP]."""
    states_BTH = encoder(ids, mask).last_hidden_state
    inside_BT1 = (mask.cumsum(1).gt(1) & mask.flip(1).cumsum(1).flip(1).gt(1))[..., None]
    x_BH = states_BTH[:, 0] if pooling == "cls" else (states_BTH * inside_BT1).sum(1)
    h_BH = F.normalize(x_BH.float(), dim=-1).to(x_BH.dtype)
    return F.normalize(projection(h_BH).float(), dim=-1)


def first_queue(options: Any) -> Tensor:
    """The queue with which MoCo starts: random unit vectors [K, D]."""
    return F.normalize(torch.randn(options.queue_size, options.projection, generator=torch.Generator().manual_seed(0)))


class Contextual(Mlm):
    """Contextual alignment: a pass for the sentences of each language, and one through a frozen copy of the model."""

    def __init__(self, lm: Any, run_spec: RunSpec, options: Any):
        super().__init__(lm, run_spec, options)
        self.frozen: list[nn.Module] = []

    def examples(self, records: list[Record]) -> list[Example]:
        (record,) = records
        anchor = record.langs.index(self.options.anchor) if self.options.anchor else 0
        sides = []
        for text in record.texts:
            encoding = self.tokenizer(
                text.split(), is_split_into_words=True, truncation=True, max_length=(self.max_length - 3) // 2 + 2
            )
            last = {word: token for token, word in enumerate(encoding.word_ids(0)) if word is not None}
            sides.append((encoding["input_ids"], last))
        (_, source_ends), (_, target_ends) = sides
        links = links_of(record)
        uses = Counter(chain.from_iterable((("source", i), ("target", j)) for i, j in links))
        source, target = (text.split() for text in record.texts)
        places = []
        for i, j in links:
            single = uses["source", i] == uses["target", j] == 1
            if single and i in source_ends and j in target_ends and is_word(source[i]) and is_word(target[j]):
                place = (source_ends[i], target_ends[j])
                places.append(place[::-1] if anchor else place)
        return [{"input_ids": sides[anchor][0], "other": sides[1 - anchor][0], "links": places}]

    def collate(self, examples: list[Example]) -> Batch:
        inputs, special = self.inputs(examples)
        other, of_other = self.inputs([{"input_ids": example["other"]} for example in examples])
        links = [(b, i, j) for b, example in enumerate(examples) for i, j in example["links"]]
        return inputs | {
            "other_ids": other["input_ids"],
            "other_mask": other["attention_mask"],
            "ordinary": ~special,
            "tokens": (~special).sum() + (~of_other).sum(),
            "links": torch.tensor(links).reshape(-1, 3),
        }

    def loss(self, lm: Any, batch: Batch) -> Tensor:
        if not self.frozen:
            self.frozen.append(copy.deepcopy(lm.base_model).eval().requires_grad_(False))
        english = batch["input_ids"], batch["attention_mask"]
        f_english = lm.base_model(*english).last_hidden_state
        f_other = lm.base_model(batch["other_ids"], batch["other_mask"]).last_hidden_state
        with torch.no_grad():
            f0 = self.frozen[0](*english).last_hidden_state
        b, i, j = batch["links"].T
        tokens = batch["tokens"]
        align = (f_english[b, i] - f_other[b, j]).float().square().sum() / tokens
        anchor = (f_english - f0)[batch["ordinary"]].float().square().sum() / tokens
        return align + self.options.anchor_weight * anchor


STOCK: dict[str, type[Mlm]] = {
    "mlm": Mlm,
    "tlm": Tlm,
    "align_mlm": AlignMlm,
    "alignlm": AlignLm,
    "ppa": Ppa,
    "contextual": Contextual,
}


FIXED = {"normalize": "sum", "expand": "all", "shuffle_sides": False, "replace_tlm_with_mlm": False, "subwords": "mean"}
"""The options for which the stock objectives support only this value."""


class StockModule(nn.Module):
    """The model and the stock objectives of all streams, in the module that DeepSpeed wraps."""

    def __init__(self, lm: Any, run_spec: RunSpec):
        super().__init__()
        self.lm = lm
        self.streams = nn.ModuleDict()
        for name, stream in run_spec.recipe.streams.items():
            if stream.objective not in STOCK:
                raise UserError(f"the stock loop has no {stream.objective}; choose recipes of {', '.join(STOCK)}")
            for option, value in FIXED.items():
                if getattr(stream.options, option, value) != value:
                    raise UserError(f"streams.{name}.{option}: the stock loop supports only {value}")
            self.streams[name] = STOCK[stream.objective](lm, run_spec, stream.options)
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


def is_word(text: str) -> bool:
    return any(character.isalnum() for character in text)
