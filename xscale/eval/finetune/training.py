"""Makes sequences of token ids, fine-tunes an encoder with a new head by transformers' Trainer, and predicts.

    logits = W dropout(x) + b

x is the state of a token or, for a label of the whole sequence, the encoder's sentence vector.

Shape letters: B sequences, L tokens of the longest one, H hidden width, C outputs.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from xscale.errors import NotFinite, env_number
from xscale.eval.model import ExportedModel
from xscale.eval.sentence_files import read_pooling

IGNORED = -100
"""The label of a token without a label."""
PREDICTION_BATCH = 64
"""The sequences per batch and rank when the model predicts."""


@dataclass(frozen=True)
class Feature:
    """A sequence of tokens: an example, or a part of a long example."""

    example: int
    """The index of the example in the list that was encoded."""
    inputs: dict[str, list[int]]
    """{argument of the encoder: a number for each token}."""
    labels: int | list[int] | None = None
    """A label, a label for each token, or the first and the last token of an answer; None for prediction."""
    positions: list[int] = field(default_factory=list)
    """The tokens whose outputs are read."""
    units: list[Any] = field(default_factory=list)
    """For each position, the index of its word, or the characters (first, end) of its token in the context."""


class SequenceMaker:
    """Joins texts to sequences with the same special tokens and token types as in the training of the encoder."""

    def __init__(self, model: ExportedModel, languages: Sequence[str], max_length: int):
        self.model = model
        self.tokenizer = model.tokenizer
        self.language_ids = model.language_ids(languages)
        self.max_length = min(max_length, model.max_length)

    def room_inside(self, texts: int) -> int:
        """Return the maximum number of ordinary tokens of a sequence. texts: 1 or 2."""
        return self.max_length - (2 if texts == 1 else self.tokenizer.pair.special)

    def join(self, texts: Sequence[list[int]], languages: Sequence[str]) -> dict[str, list[int]]:
        """Return the encoder's inputs for `[CLS] a [SEP]`, or for the tokenizer's form of `[CLS] a [SEP] b [SEP]`.
        Texts that are too long are cut off at their ends; of two texts, the longer one is cut first. texts: the token
        ids of one or two texts."""
        room = self.room_inside(len(texts))
        if len(texts) == 1:
            sides = [[self.tokenizer.cls_id, *texts[0][:room], self.tokenizer.sep_id]]
        else:
            pair = self.tokenizer.pair
            second = texts[1][: max(room // 2, room - len(texts[0]))]
            first = texts[0][: room - len(second)]
            sides = [[*pair.first, *first, *pair.between], [*second, *pair.last]]
        ids: list[int] = []
        types: list[int] = []
        for number, side in enumerate(sides):
            ids += side
            token_type = number
            if self.model.language_embeddings:
                token_type = self.language_ids[languages[number]]
            types += [token_type] * len(side)
        inputs = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if self.model.language_embeddings or self.model.segments:
            inputs["token_type_ids"] = types
        return inputs

    def collate(self, groups: Sequence[list[Feature]]) -> dict[str, Tensor]:
        """Return the padded batch [B, L] of all features in the groups, with their labels."""
        columns: dict[str, list[Tensor]] = {}
        for group in groups:
            for feature in group:
                for name, numbers in feature.inputs.items():
                    columns.setdefault(name, []).append(torch.tensor(numbers))
                if feature.labels is not None:
                    columns.setdefault("labels", []).append(torch.tensor(feature.labels))
        fillers = {"input_ids": self.tokenizer.pad_id, "labels": IGNORED}
        batch = {}
        for name, tensors in columns.items():
            if tensors[0].ndim:
                batch[name] = pad_sequence(tensors, batch_first=True, padding_value=fillers.get(name, 0))
            else:
                batch[name] = torch.stack(tensors)
        return batch


Reads = Literal["sequence", "tokens", "span"]
"""What a head labels: the sequence, each token, or the first and the last token of a span."""


class FineTunedModel(nn.Module):
    """An encoder, and a linear layer on its states."""

    special_ids: Tensor

    def __init__(self, maker: SequenceMaker, outputs: int, reads: Reads, frozen: bool = False):
        """frozen: only the linear layer is trained."""
        super().__init__()
        path = maker.model.path
        self.base_model = transformers.AutoModelForMaskedLM.from_pretrained(path, dtype=torch.float32).base_model
        self.base_model.requires_grad_(not frozen)
        self.config = self.base_model.config
        self.frozen = frozen
        self.reads = reads
        self.pools_mean = read_pooling(path) == "mean"
        """True: a sequence's vector is the mean state of its ordinary tokens; False: it is the state of [CLS]."""
        self.register_buffer("special_ids", torch.tensor([maker.tokenizer.cls_id, maker.tokenizer.sep_id]), False)
        self.dropout = nn.Dropout(getattr(self.config, "hidden_dropout_prob", 0.0))
        self.classifier = nn.Linear(self.config.hidden_size, outputs)
        nn.init.normal_(self.classifier.weight, std=getattr(self.config, "initializer_range", 0.02))
        nn.init.zeros_(self.classifier.bias)

    def train(self, mode: bool = True) -> "FineTunedModel":
        """Set the mode. A frozen encoder stays in evaluation, so that the head is a linear probe of its states."""
        super().train(mode)
        if self.frozen:
            self.base_model.eval()
            self.dropout.eval()
        return self

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return {"logits": [B, C] of sequences or [B, L, C] of tokens} and, with labels, the mean cross-entropy as
        "loss"."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        x = self.base_model(**inputs).last_hidden_state
        if self.reads == "sequence" and self.pools_mean:
            ordinary_BL1 = (attention_mask.bool() & ~torch.isin(input_ids, self.special_ids)).unsqueeze(-1)
            x = (x * ordinary_BL1).sum(1) / ordinary_BL1.sum(1).clamp(min=1)
        elif self.reads == "sequence":
            x = x[:, 0]
        logits = self.classifier(self.dropout(x))
        if labels is None:
            return {"logits": logits}
        scores = logits
        if self.reads == "span":  # tokens are the classes
            scores = logits.transpose(1, 2)
        return {"loss": F.cross_entropy(scores.flatten(0, -2), labels.flatten()), "logits": logits}


@dataclass(frozen=True)
class FineTuneSettings:
    epochs: int
    lr: float
    batch: int
    """The sequences of a step over all ranks."""
    warmup: float
    """The steps of warm-up; below 1, their share of all steps."""
    frozen: bool
    """Train only the head, on the states of the unchanged encoder, without dropout (a linear probe)."""
    max_length: int
    """The tokens of a sequence."""
    weight_decay: float = 0.01


def fine_tune(
    maker: SequenceMaker, groups: list[list[Feature]], outputs: int, reads: Reads, settings: FineTuneSettings,
    seed: int, folder: Path,
) -> transformers.Trainer:  # fmt: skip
    """Train an encoder with a new head, and return the Trainer that holds both. groups: lists of features that must be
    in one batch. outputs: the number of the head's logits. folder: the Trainer's output_dir, where nothing is
    written."""
    transformers.set_seed(seed)  # for the new head's weights
    model = FineTunedModel(maker, outputs, reads, settings.frozen)
    world = env_number("WORLD_SIZE", 1)
    on_gpu = torch.cuda.is_available()
    sequences = sum(len(group) for group in groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=settings.epochs,
            learning_rate=settings.lr,
            warmup_steps=settings.warmup,
            weight_decay=settings.weight_decay,
            seed=seed,
            per_device_train_batch_size=max(1, round(settings.batch * len(groups) / (sequences * world))),
            per_device_eval_batch_size=PREDICTION_BATCH,
            use_cpu=not on_gpu,
            ddp_backend="gloo" if world > 1 and not on_gpu else None,
            ddp_find_unused_parameters=False,
            save_strategy="no",
            logging_strategy="epoch",
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            report_to="none",
            remove_unused_columns=False,
        )
    trainer = transformers.Trainer(model, arguments, data_collator=maker.collate, train_dataset=groups)
    trainer.train()
    return trainer


def predict_outputs(trainer: transformers.Trainer, features: list[Feature]) -> np.ndarray:
    """Return the logits of each feature. Raises NotFinite."""
    groups: Any = [[feature] for feature in features]
    outputs: Any = trainer.predict(groups).predictions
    if not np.isfinite(outputs).all():
        raise NotFinite("the fine-tuned model's logits are not finite; give a smaller --lr")
    return outputs
