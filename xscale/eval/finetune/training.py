"""Makes sequences of token ids, fine-tunes a head and an encoder on them by transformers' Trainer, and predicts."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from xscale.errors import NotFinite, UserError, env_number
from xscale.eval.finetune.examples import LabelledExample
from xscale.eval.model import ExportedModel

IGNORED = -100
"""The label of a token without a label."""
PREDICTION_BATCH = 64
"""The sequences per batch and rank when the model predicts."""


@dataclass(frozen=True)
class Feature:
    """A sequence of tokens: an example, or a part of a long one."""

    example: int
    """The index of the example in the list that was encoded."""
    inputs: dict[str, list[int]]
    """{argument of the model: a number for each token}."""
    targets: dict[str, Any]
    """{argument of the head: a label, or one for each token}; {} for prediction."""
    positions: list[int] = field(default_factory=list)
    """The tokens whose outputs are read."""
    units: list[Any] = field(default_factory=list)
    """What each position is: the index of a word, or the characters (first, end) of a token of the context."""


class SequenceMaker:
    """Joins texts to sequences as in the encoder's training: with its special tokens and its token types."""

    def __init__(self, model: ExportedModel, languages: Sequence[str], max_length: int):
        self.model = model
        self.tokenizer = model.tokenizer
        self.language_ids = model.language_ids(languages)
        self.max_length = min(max_length, model.max_length)

    def room(self, texts: int) -> int:
        """Return the tokens of a sequence of one or two texts that are not special ones."""
        return self.max_length - (2 if texts == 1 else self.tokenizer.pair.special)

    def join(self, texts: Sequence[list[int]], languages: Sequence[str]) -> dict[str, list[int]]:
        """Return the model's inputs for `[CLS] a [SEP]`, or for the tokenizer's form of `[CLS] a [SEP] b [SEP]`. Texts
        that are too long are cut off, of two the longer one first. texts: the token ids of one or two texts."""
        room = self.room(len(texts))
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
            language = self.language_ids[languages[number]]
            types += [language if self.model.language_embeddings else number] * len(side)
        inputs = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if self.model.language_embeddings or self.model.segments:
            inputs["token_type_ids"] = types
        return inputs

    def collate(self, groups: Sequence[list[Feature]]) -> dict[str, Tensor]:
        """Return the padded batch [B, L] of all features in the groups, with their targets."""
        fillers = {"input_ids": self.tokenizer.pad_id, "labels": IGNORED}
        columns: dict[str, list[Tensor]] = {}
        for group in groups:
            for feature in group:
                for name, value in (feature.inputs | feature.targets).items():
                    columns.setdefault(name, []).append(torch.tensor(value))
        batch = {}
        for name, tensors in columns.items():
            is_padded = tensors[0].ndim > 0
            batch[name] = pad_sequence(tensors, True, fillers.get(name, 0)) if is_padded else torch.stack(tensors)
        return batch


class Task(Protocol):
    """What a task does. `epochs`, `lr` and `max_length` are the papers' values."""

    @property
    def epochs(self) -> int: ...

    @property
    def lr(self) -> float: ...

    @property
    def max_length(self) -> int: ...

    def read(self, path: Path, language: str) -> list[LabelledExample]:
        """Return the examples of a file. Raises UserError."""

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        """Return the labels that a head predicts after training on these examples; [] for questions."""

    def encode(self, examples: list[LabelledExample], maker: SequenceMaker, labels: list[str] | None) -> list[Feature]:
        """Return the sequences of the examples. labels: those of the head; None for prediction."""

    def load_head(self, path: Path, maker: SequenceMaker, labels: list[str]) -> Any:
        """Return the encoder in the folder `path` with a new head. Raises ValueError for a type that has none."""

    def predict(
        self, examples: list[LabelledExample], features: list[Feature], outputs: Any, labels: list[str]
    ) -> list[Any]:
        """Return the label, the tags or the answer of each example. outputs: the head's, a row for each feature."""

    def score(self, examples: list[LabelledExample], predictions: list[Any], language: str) -> dict[str, float]:
        """Return the scores in a language, the main one first."""


@dataclass(frozen=True)
class FineTuneSettings:
    epochs: int
    lr: float
    batch: int
    """The sequences of a step over all ranks."""
    warmup: float
    """The steps of warm-up; below 1, their share of all steps."""
    frozen: bool
    """Train the head alone, on the states of the encoder as it came, without dropout (a linear probe)."""
    max_length: int
    """The tokens of a sequence."""
    weight_decay: float = 0.01


def fine_tune(
    task: Task, groups: list[list[Feature]], labels: list[str], maker: SequenceMaker, settings: FineTuneSettings,
    seed: int, folder: Path,
) -> transformers.Trainer:  # fmt: skip
    """Train an encoder with a new head and return the Trainer that has it. groups: lists of features that must be in
    one batch. folder: the Trainer's output_dir, where nothing is written."""
    transformers.set_seed(seed)  # for the new head's weights
    try:
        model = task.load_head(maker.model.path, maker, labels)
    except ValueError:
        raise UserError(f"{maker.model.path}: transformers has no head for this task and type of model") from None
    if settings.frozen:
        for module in model.base_model.modules():
            module.requires_grad_(False)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
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


def predict_outputs(trainer: transformers.Trainer, features: list[Feature]) -> Any:
    """Return the head's outputs: an array with a row for each feature, or a tuple of two. Raises NotFinite."""
    data: Any = [[feature] for feature in features]
    outputs = trainer.predict(data).predictions
    for array in outputs if isinstance(outputs, tuple) else [outputs]:
        if not np.isfinite(array).all():
            raise NotFinite("the fine-tuned model's logits are not finite; give a smaller --lr")
    return outputs
