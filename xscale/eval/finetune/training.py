"""Fine-tunes an exported encoder with one of transformers' own heads, by transformers' Trainer.

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
from xscale.eval.model import ExportedModel

PREDICTION_BATCH = 64
"""The sequences per batch and rank when the model predicts."""


@dataclass(frozen=True)
class FineTuneSettings:
    epochs: int
    lr: float
    batch: int
    """Global batch size: the sequences of a step over all ranks."""
    max_length: int
    warmup: float
    """The steps of warm-up; below 1, their share of all steps."""
    weight_decay: float = 0.01


class Collator:
    """Makes batches from features: token ids, attention masks, token types as in the encoder's training, and labels."""

    def __init__(self, model: ExportedModel, languages: Sequence[str], head_labels: Callable[..., dict[str, Tensor]]):
        self.model, self.language_ids, self.head_labels = model, model.language_ids(languages), head_labels

    def __call__(self, groups: Sequence[list[Feature]], with_labels: bool = True) -> dict[str, Tensor]:
        """Return the padded batch [B, L] of all features in the groups, by the names of the model's arguments."""
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
        return batch | (self.head_labels(features, shape[1]) if with_labels else {})


@dataclass(frozen=True)
class FineTuner:
    """Trains the encoder and a new head for a task, and predicts with them. All ranks call its methods together."""

    task: Task
    settings: FineTuneSettings
    collator: Collator
    folder: Path
    """The Trainer's output_dir. Nothing is written there."""
    ds_config: dict[str, Any] | None = None
    world: int = 1

    def train(self, groups: list[list[Feature]], labels: list[str], seed: int) -> transformers.Trainer:
        """Train a model and return the Trainer that has it. groups: lists of features that must be in one batch."""
        transformers.set_seed(seed)  # for the new head's weights
        trainer = transformers.Trainer(
            self.load_model(labels),
            self.training_arguments(groups, seed),
            data_collator=self.collator,
            train_dataset=groups,
        )
        trainer.train()
        return trainer

    def load_model(self, labels: list[str]) -> Any:
        path, names = self.collator.model.path, dict[str, Any]()
        if self.task.predicts_labels:
            names = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
        try:
            return getattr(transformers, self.task.head_class).from_pretrained(path, trust_remote_code=False, **names)
        except ValueError:
            raise UserError(
                f"{path}: transformers has no {self.task.head_class} for this type of model; give one of another type"
            ) from None

    def training_arguments(self, groups: list[list[Feature]], seed: int) -> transformers.TrainingArguments:
        size = sum(map(len, groups)) / len(groups)
        on_gpu, more = torch.cuda.is_available(), dict[str, Any]()
        if self.ds_config:
            for name in ("bf16", "fp16"):
                enabled = self.ds_config.get(name, {}).get("enabled")
                more[name] = enabled is True or (enabled == "auto" and (name == "bf16" or on_gpu))
            # The Trainer cannot fill in every "auto" of zero_optimization, so DeepSpeed's defaults replace them.
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
                per_device_eval_batch_size=PREDICTION_BATCH,
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
        """Return the logits [S, C] of each feature. Raises NotFinite."""
        order = sorted(range(len(features)), key=lambda i: -features[i].num_tokens)
        trainer.data_collator = partial(self.collator, with_labels=False)
        data: Any = [[features[i]] for i in order]
        outputs = trainer.predict(data).predictions
        logits = {i: self.task.select_logits(outputs, row, features[i]) for row, i in enumerate(order)}
        if not all(np.isfinite(logits_SC).all() for logits_SC in logits.values()):
            raise NotFinite("the fine-tuned model's logits are not finite; give a smaller --lr")
        return [logits[i] for i in range(len(features))]

    def save(self, trainer: transformers.Trainer, path: Path) -> None:
        """Write the model and the tokenizer into the folder `path`, as transformers loads them."""
        trainer.save_model(str(path))
        if trainer.is_world_process_zero():
            self.collator.model.tokenizer.hf.save_pretrained(path)
            (path / "training_args.bin").unlink(missing_ok=True)  # a pickle
            files.apply_umask(path)
