"""Makes sequences of token ids, fine-tunes an encoder with a new head by transformers' Trainer, and predicts.

    logits = W dropout(x) + b

x is the state of a token or, for a label of the whole sequence, the encoder's sentence vector.

Shape letters: B sequences, L tokens of the longest one, H hidden width, C outputs.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from xscale.data.tokenizer import PairTemplate
from xscale.errors import NotFinite, env_number
from xscale.eval.model import ExportedModel
from xscale.eval.sentence_files import read_pooling

IGNORED = -100
"""The label of a token without a label."""


@dataclass(frozen=True)
class Feature:
    """A sequence of tokens: an example, or a part of a long example."""

    inputs: dict[str, list[int]]
    """{argument of the model: its numbers}. For training, "labels" has a label of the sequence, a label for each token,
    or the first and the last token of an answer."""
    positions: list[int]
    """The tokens whose logits are read: the first token of each word, or the tokens of a question's context; [0] if the
    whole sequence has one label."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """The characters (first, end) of each of these tokens in a question's context."""
    is_cut: bool = False
    """True if tokens at the end of a text are left out, because the sequence would exceed the maximum length."""


class SequenceMaker:
    """Joins texts to sequences with the same special tokens and token types as in the training of the encoder."""

    def __init__(self, model: ExportedModel, languages: Sequence[str], max_length: int):
        self.model = model
        self.tokenizer = model.tokenizer
        self.max_length = min(max_length, model.max_length)
        self.language_types = model.language_ids_or_neutral(languages) if model.language_embeddings else {}
        """{language: the type of its tokens}; {} if the types are 0 for the first text and 1 for the second."""
        single = PairTemplate([self.tokenizer.cls_id], [self.tokenizer.sep_id], [], has_two_token_types=False)
        self.templates = {1: single, 2: self.tokenizer.pair}
        """{number of texts: the special tokens of a sequence}. A single text has no `last` token."""

    def max_ordinary_tokens(self, text_count: int) -> int:
        """Return the maximum number of ordinary tokens of a sequence. text_count: 1 or 2."""
        return self.max_length - self.templates[text_count].special_count

    def make_inputs(self, texts: Sequence[list[int]], languages: tuple[str, str]) -> dict[str, list[int]]:
        """Return the encoder's inputs for `[CLS] a [SEP]`, or for the tokenizer's form of `[CLS] a [SEP] b [SEP]`.
        Texts that are too long are cut off at their ends; of two texts, the longer one is cut first. texts: the token
        ids of one or two texts."""
        template = self.templates[len(texts)]
        room = self.max_ordinary_tokens(len(texts))
        a, b = [*texts, []][:2]
        b = b[: max(room // 2, room - len(a))]
        first = [*template.first, *a[: room - len(b)], *template.between]
        second = [*b, *template.last]
        inputs = {"input_ids": first + second, "attention_mask": [1] * len(first + second)}
        if self.model.language_embeddings or self.model.has_two_token_types:
            first_type = self.language_types.get(languages[0], 0)
            second_type = self.language_types.get(languages[1], 1)
            inputs["token_type_ids"] = [first_type] * len(first) + [second_type] * len(second)
        return inputs

    def collate(self, groups: Sequence[list[Feature]]) -> dict[str, Tensor]:
        """Return the padded batch of all features in the groups: {argument of the model: its numbers [B, L]}."""
        features = list(chain.from_iterable(groups))
        fillers = {"input_ids": self.tokenizer.pad_id, "labels": IGNORED}
        batch = {}
        for name in features[0].inputs:
            rows = [torch.tensor(feature.inputs[name]) for feature in features]
            batch[name] = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fillers.get(name, 0))
        return batch


Reads = Literal["sequence", "tokens", "span"]
"""What a head labels: the sequence, each token, or the first and the last token of a span."""


class FineTunedModel(nn.Module):
    """An encoder, and a linear layer on its states."""

    accepts_loss_kwargs = False  # for the Trainer, which would add an argument to `inputs`

    def __init__(self, maker: SequenceMaker, outputs: int, reads: Reads, frozen: bool = False):
        """frozen: train only the linear layer, on the states of the encoder without dropout (a linear probe)."""
        super().__init__()
        path = maker.model.path
        self.base_model = transformers.AutoModelForMaskedLM.from_pretrained(path, dtype=torch.float32).base_model
        self.base_model.requires_grad_(not frozen)
        self.config = self.base_model.config
        self.frozen = frozen
        self.reads = reads
        self.pools_mean = read_pooling(path) == "mean"
        """True: a sequence's vector is the mean state of its ordinary tokens; False: it is the state of [CLS]."""
        self.special_ids = torch.tensor([maker.tokenizer.cls_id, maker.tokenizer.sep_id])
        self.dropout = nn.Dropout(getattr(self.config, "hidden_dropout_prob", 0.0))
        self.classifier = nn.Linear(self.config.hidden_size, outputs)
        nn.init.normal_(self.classifier.weight, std=getattr(self.config, "initializer_range", 0.02))
        nn.init.zeros_(self.classifier.bias)

    def forward(self, labels: Tensor | None = None, **inputs: Tensor) -> dict[str, Tensor]:
        """Return {"logits": [B, C] of sequences or [B, L, C] of tokens} and, with labels, the mean cross-entropy as
        "loss"."""
        if self.frozen:  # the Trainer sets every module to training
            self.eval()
        x = self.base_model(**inputs).last_hidden_state
        if self.reads == "sequence" and self.pools_mean:
            special_BL = torch.isin(inputs["input_ids"], self.special_ids.to(x.device))
            ordinary_BL1 = (inputs["attention_mask"].bool() & ~special_BL).unsqueeze(-1)
            x = (x * ordinary_BL1).sum(1) / ordinary_BL1.sum(1).clamp(min=1)
        elif self.reads == "sequence":
            x = x[:, 0]
        logits = self.classifier(self.dropout(x))
        if labels is None:
            return {"logits": logits}
        scores = logits
        if self.reads == "span":  # tokens are the classes
            scores = logits.transpose(1, 2)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten()), "logits": logits}


def fine_tune(
    model: FineTunedModel, collate: Callable[[Any], dict[str, Tensor]], groups: list[list[Feature]],
    settings: Mapping[str, Any],
) -> transformers.Trainer:  # fmt: skip
    """Train a model, and return the Trainer that holds it. groups: lists of features that must be in one batch.
    settings: values of the command's flags."""
    ranks = env_number("WORLD_SIZE", 1)
    sequences = sum(map(len, groups))
    batch = max(1, round(settings["batch"] * len(groups) / (sequences * ranks)))
    steps = settings["epochs"] * math.ceil(len(groups) / (batch * ranks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            output_dir=str(Path(settings["out"]).parent),  # the Trainer makes this folder, but writes nothing
            num_train_epochs=settings["epochs"],
            learning_rate=settings["lr"],
            warmup_steps=settings["warmup"] if steps > 1 else 0,  # the first step of a warm-up has the learning rate 0
            weight_decay=0.01,
            seed=settings["seed"],
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=64,
            use_cpu=not torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
            save_strategy="no",
            logging_strategy="epoch",
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            report_to="none",
            remove_unused_columns=False,
        )
    trainer = transformers.Trainer(model, arguments, data_collator=collate, train_dataset=groups)
    trainer.train()
    return trainer


def predict_finite_logits(trainer: transformers.Trainer, features: list[Feature]) -> np.ndarray:
    """Return the logits of each feature. Long sequences are predicted first, so that a batch has little padding. Raises
    NotFinite."""
    order = sorted(range(len(features)), key=lambda index: -len(features[index].inputs["input_ids"]))
    groups: Any = [[features[index]] for index in order]
    logits: Any = trainer.predict(groups).predictions
    if not np.isfinite(logits).all():
        raise NotFinite("the predictions (logits) of the fine-tuned model are not finite. Choose a smaller --lr")
    return logits[np.argsort(order)]
