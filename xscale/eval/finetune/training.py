"""Fine-tuning by transformers' Trainer: an exported encoder with one of transformers' own heads.

Shape letters: B sequences, L tokens of the longest one, S hidden states read per sequence, C outputs of the head.
"""

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

from xscale import files
from xscale.data import sequences
from xscale.data.sequences import join_segments
from xscale.errors import NotFinite, UserError
from xscale.eval.finetune.task import Feature, Task
from xscale.eval.model import Exported

PREDICTED_AT_ONCE = 64
"""Sequences per batch and rank when the model predicts."""


@dataclass(frozen=True)
class FineTuneSettings:
    epochs: int
    lr: float
    batch: int
    """Global batch size: the sequences of a step over all ranks."""
    max_length: int
    warmup: float
    """Steps of warm-up; below 1, the share of all steps."""
    weight_decay: float = 0.01


class Collator:
    """Makes batches of features: token ids, attention masks, token types as in the model's training, labels."""

    def __init__(self, model: Exported, languages: Sequence[str], head_labels: Callable[..., dict[str, Tensor]]):
        self.model, self.language_ids, self.head_labels = model, model.language_ids(languages), head_labels

    def __call__(self, groups: Sequence[list[Feature]], labelled: bool = True) -> dict[str, Tensor]:
        """A padded batch of all features of some groups. groups: each has features that must be in one batch."""
        features, tokenizer = [feature for group in groups for feature in group], self.model.tokenizer
        examples = [
            sequences.Example(f.langs, tuple(ids.tolist() for ids in f.ids), None, np.uint64(0)) for f in features
        ]
        sides = [[(example, side) for side in range(len(example.ids))] for example in examples]
        joined = join_segments(tokenizer, sides, self.language_ids)
        shape = len(features), int(joined.lengths.max())

        def padded(values: np.ndarray, filler: int) -> Tensor:
            batch_BL = np.full(shape, filler, dtype=np.int64)
            batch_BL[joined.numbers, joined.offsets] = values
            return torch.from_numpy(batch_BL)

        batch = {
            "input_ids": padded(joined.ids, tokenizer.pad_id),
            "attention_mask": padded(np.ones_like(joined.ids), 0),
        }
        if self.model.language_embeddings or self.model.segments:
            types = joined.languages if self.model.language_embeddings else joined.segments
            batch["token_type_ids"] = padded(types, 0)
        return batch | (self.head_labels(features, shape[1]) if labelled else {})


@dataclass(frozen=True)
class FineTuner:
    """Trains a head and the encoder for a task, and predicts with them. All ranks use it together."""

    task: Task
    settings: FineTuneSettings
    collator: Collator
    folder: Path
    """The Trainer's output_dir, to which nothing is written."""
    ds_config: dict[str, Any] | None = None
    world: int = 1

    def train(self, groups: list[list[Feature]], labels: list[str], seed: int) -> transformers.Trainer:
        """Train a model. Returns the Trainer with this model. groups: each has features that must be in one batch."""
        transformers.set_seed(seed)  # of the new head's weights
        trainer = transformers.Trainer(
            self.load_model(labels), self.arguments(groups, seed), data_collator=self.collator, train_dataset=groups
        )
        trainer.train()
        return trainer

    def load_model(self, labels: list[str]) -> Any:
        path, names = self.collator.model.path, dict[str, Any]()
        if self.task.classes:
            names = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
        try:
            return getattr(transformers, self.task.head).from_pretrained(path, trust_remote_code=False, **names)
        except ValueError:
            raise UserError(
                f"{path}: transformers has no {self.task.head} for this type of model; take one of another type"
            ) from None

    def arguments(self, groups: list[list[Feature]], seed: int) -> transformers.TrainingArguments:
        size = sum(map(len, groups)) / len(groups)
        on_gpu, more = torch.cuda.is_available(), dict[str, Any]()
        if self.ds_config:
            for name in ("bf16", "fp16"):
                enabled = self.ds_config.get(name, {}).get("enabled")
                more[name] = enabled is True or (enabled == "auto" and (name == "bf16" or on_gpu))
            # Some values "auto" of zero_optimization can be completed by xscale alone.
            zero = {k: v for k, v in self.ds_config.get("zero_optimization", {}).items() if v != "auto"}
            more["deepspeed"] = self.ds_config | {"zero_optimization": zero}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.TrainingArguments(
                output_dir=str(self.folder),
                num_train_epochs=self.settings.epochs,
                learning_rate=self.settings.lr,
                warmup_steps=self.settings.warmup,
                weight_decay=self.settings.weight_decay,
                per_device_train_batch_size=max(1, round(self.settings.batch / size / self.world)),
                per_device_eval_batch_size=PREDICTED_AT_ONCE,
                seed=seed,
                use_cpu=not on_gpu,
                ddp_backend=None if on_gpu or self.world == 1 else "gloo",
                ddp_find_unused_parameters=False,
                save_strategy="no",
                logging_strategy="epoch",
                logging_nan_inf_filter=False,
                disable_tqdm=True,
                report_to="none",
                remove_unused_columns=False,
                **more,
            )

    def predict_logits(self, trainer: transformers.Trainer, features: list[Feature]) -> list[np.ndarray]:
        """The logits of each feature [S, C]. Raises NotFinite."""
        order = sorted(range(len(features)), key=lambda i: -features[i].tokens)
        trainer.data_collator = partial(self.collator, labelled=False)
        data: Any = [[features[i]] for i in order]
        outputs = trainer.predict(data).predictions
        read = {i: self.task.read_logits(outputs, number, features[i]) for number, i in enumerate(order)}
        if not all(np.isfinite(logits).all() for logits in read.values()):
            raise NotFinite("the fine-tuned model's logits are not finite; take a smaller --lr")
        return [read[i] for i in range(len(features))]

    def save(self, trainer: transformers.Trainer, path: Path) -> None:
        """Write the model as transformers loads it, with the tokenizer."""
        trainer.save_model(str(path))
        if trainer.is_world_process_zero():
            self.collator.model.tokenizer.hf.save_pretrained(path)
            (path / "training_args.bin").unlink(missing_ok=True)  # a pickle
            files.apply_umask(path)
