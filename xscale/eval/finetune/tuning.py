"""Fine-tuning by transformers' Trainer: an exported encoder under one of transformers' own heads.

Shape letters: B sequences, L tokens of the longest one.
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from xscale.data import sequences
from xscale.data.sequences import join_segments
from xscale.errors import NotFinite, UserError
from xscale.eval.finetune.task import Feature, Task
from xscale.eval.model import Exported
from xscale.ranks import HostGroup

PREDICTED_AT_ONCE = 64
"""Sequences of a batch that is only predicted, on each rank."""


@dataclass(frozen=True)
class Settings:
    """How an encoder is fine-tuned; all of it decides the result."""

    epochs: int
    lr: float
    batch: int
    """Sequences of a step, over all ranks."""
    max_length: int
    warmup: float
    """Steps of warm-up; below 1, the share of all steps."""
    weight_decay: float = 0.01


class Padded:
    """Makes batches of features: token ids, attention masks, token types as the model was trained, and labels."""

    def __init__(self, model: Exported, language_ids: dict[str, int], answers: Callable[..., dict[str, Tensor]]):
        self.model, self.language_ids, self.answers = model, language_ids, answers

    def __call__(self, units: Sequence[list[Feature]], labelled: bool = True) -> dict[str, Tensor]:
        """units: features that belong into one batch."""
        features, tokenizer = [feature for unit in units for feature in unit], self.model.tokenizer
        examples = [
            sequences.Example(f.langs, tuple(ids.tolist() for ids in f.ids), None, np.uint64(0)) for f in features
        ]
        sides = [[(example, side) for side in range(len(example.ids))] for example in examples]
        joined = join_segments(tokenizer, sides, self.language_ids)
        rows, columns = joined.numbers, joined.offsets
        shape = len(features), int(joined.lengths.max())

        def padded(values: np.ndarray, filler: int) -> Tensor:
            batch_BL = np.full(shape, filler, dtype=np.int64)
            batch_BL[rows, columns] = values
            return torch.from_numpy(batch_BL)

        batch = {
            "input_ids": padded(joined.ids, tokenizer.pad_id),
            "attention_mask": padded(np.ones_like(joined.ids), 0),
        }
        if self.model.language_embeddings or self.model.segments:
            types = joined.languages if self.model.language_embeddings else joined.segments
            batch["token_type_ids"] = padded(types, 0)
        return batch | (self.answers(features, shape[1]) if labelled else {})


@dataclass(frozen=True)
class Tuner:
    """What all fine-tuning runs of a command share."""

    path: Path
    """The exported encoder's."""
    work: Path
    """A folder for what is done."""
    task: Task
    settings: Settings
    ds_config: dict[str, Any] | None
    batches: Padded
    control: HostGroup
    tell: Callable[[str], None]

    def fit(self, units: list[list[Feature]], labels: list[str], seed: int, name: str) -> transformers.Trainer:
        """A trainer whose model has been trained on the units, each of features that belong into one batch."""
        transformers.set_seed(seed)  # of the new head's weights
        model = self.load_model(labels)
        trainer = transformers.Trainer(
            model,
            self.arguments(units, seed),
            data_collator=self.batches,
            train_dataset=units,
            callbacks=[self.log(name)],
        )
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        loss = trainer.train().training_loss
        if not math.isfinite(loss):
            raise NotFinite(f"{name}: the mean loss is {loss}; take a smaller --lr")
        return trainer

    def load_model(self, labels: list[str]) -> Any:
        names: dict[str, Any] = {}
        if self.task.classes:
            names = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
        level = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # else it lists the head that is new and the one that is left
        try:
            return getattr(transformers, self.task.head).from_pretrained(self.path, **names)
        except ValueError:
            raise UserError(f"{self.path}: transformers has no {self.task.head} of this type of model") from None
        finally:
            transformers.logging.set_verbosity(level)

    def arguments(self, units: list[list[Feature]], seed: int) -> transformers.TrainingArguments:
        size, world = sum(map(len, units)) / len(units), self.control.size
        precisions: dict[str, Any] = {name: self.has(name) for name in ("bf16", "fp16")} if self.ds_config else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.TrainingArguments(
                output_dir=str(self.work),
                num_train_epochs=self.settings.epochs,
                learning_rate=self.settings.lr,
                warmup_steps=self.settings.warmup,
                weight_decay=self.settings.weight_decay,
                per_device_train_batch_size=max(1, round(self.settings.batch / size / world)),
                per_device_eval_batch_size=PREDICTED_AT_ONCE,
                seed=seed,
                deepspeed=without_unknown_auto(self.ds_config) if self.ds_config else None,
                use_cpu=not torch.cuda.is_available(),
                ddp_backend=None if torch.cuda.is_available() or world == 1 else "gloo",
                ddp_find_unused_parameters=False if world > 1 else None,
                save_strategy="no",
                logging_strategy="epoch",
                logging_nan_inf_filter=False,
                disable_tqdm=True,
                report_to="none",
                remove_unused_columns=False,
                **precisions,
            )

    def has(self, precision: str) -> bool:
        """Whether the ds_config asks for it, and the hardware has it."""
        enabled = (self.ds_config or {}).get(precision, {}).get("enabled")
        return enabled is True or (enabled == "auto" and (precision == "bf16" or torch.cuda.is_available()))

    def log(self, name: str) -> transformers.TrainerCallback:
        tuner = self

        class Log(transformers.TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
                if logs and "loss" in logs:
                    epoch = f"{name}: epoch {round(state.epoch)}/{tuner.settings.epochs}"
                    tuner.tell(f"{epoch}  loss {float(logs['loss']):.6f}")

        return Log()

    def predict(self, trainer: transformers.Trainer, features: list[Feature]) -> list[np.ndarray]:
        """What the head says of each feature [S, C]."""
        order = sorted(range(len(features)), key=lambda i: -features[i].tokens)
        trainer.data_collator = partial(self.batches, labelled=False)
        data: Any = [[features[i]] for i in order]
        outputs = trainer.predict(data).predictions
        read = {i: self.task.read_logits(outputs, number, features[i]) for number, i in enumerate(order)}
        if not all(np.isfinite(logits).all() for logits in read.values()):
            raise NotFinite("what the tuned model says is not finite; take a smaller --lr")
        return [read[i] for i in range(len(features))]


def without_unknown_auto(config: dict[str, Any]) -> dict[str, Any]:
    """A ds_config for transformers, which does not know "auto" for all the keys that xscale completes."""
    zero = {k: v for k, v in config.get("zero_optimization", {}).items() if v != "auto"}
    return config | {"zero_optimization": zero}


def quiet() -> None:
    """transformers and accelerate say at each run what this command says in a line."""
    for name in ("accelerate", "transformers.trainer"):
        logging.getLogger(name).setLevel(logging.ERROR)
