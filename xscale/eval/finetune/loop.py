"""The one fine-tuning loop: an encoder with a linear head, trained on a task's features by a DeepSpeed engine.

What a step consumes is a function of seed, epoch and the training text alone, and a step's loss is the mean over its
targets on all ranks: a run that is killed goes on from its last whole epoch as if it had not been.

Shape letters: N tokens of a row, S states that are read, H hidden width, C outputs of the head.
"""

import copy
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xscale import files, rng
from xscale.config import CheckpointConfig, DataConfig, ModelConfig, Recipe, TrainConfig
from xscale.data import sequences
from xscale.data.piece import Piece, Reads
from xscale.data.row import Inputs, make_row
from xscale.data.sequences import join_segments
from xscale.errors import NotFinite, UserError
from xscale.eval.finetune.task import Feature, Task
from xscale.eval.model import Exported
from xscale.models.encoder import Encoder
from xscale.ops.alignment_gather import alignment_gather
from xscale.ranks import Control
from xscale.step.ds_config import Hardware, resolve_ds_config
from xscale.step.engine import build_engine
from xscale.step.host_copy import take
from xscale.step.step import to_device
from xscale.step.zero import one_reduction, take_step

TUNED = "tuned"
"""The one stream of a row."""
HASHES = "hashes.json"
"""Of a checkpoint's files."""
SEQUENCES = 64
"""Of a row that is only predicted."""


@dataclass(frozen=True)
class Settings:
    """How an encoder is fine-tuned; all of it decides the result."""

    epochs: int = 3
    lr: float = 5e-5
    batch: int = 32
    """Sequences of a step, over all ranks."""
    max_length: int = 128
    warmup: float = 0.1
    weight_decay: float = 0.01

    def recipe(self, steps: int) -> Recipe:
        """The fields that a ds_config is completed from."""
        train = TrainConfig(steps=steps, lr=self.lr, warmup=self.warmup, weight_decay=self.weight_decay)
        return Recipe(ModelConfig(), {}, DataConfig(), train, CheckpointConfig())


class Tuned(nn.Module):
    """What DeepSpeed wraps."""

    def __init__(self, encoder: Encoder, outputs: int, loss: Callable[..., Tensor], seed: int):
        """The masked-LM head is left as it is: fine-tuning does not reach it."""
        super().__init__()
        self.encoder, self.loss = encoder, loss
        reached = {id(weight) for weight in encoder.lm.base_model.parameters()}
        for weight in encoder.lm.parameters():
            weight.requires_grad_(id(weight) in reached)
        self.dropout = nn.Dropout(getattr(encoder.lm.config, "hidden_dropout_prob", 0.0))
        torch.manual_seed(rng.torch_seed(seed, "finetune", "head"))
        self.head = nn.Linear(encoder.width, outputs)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Inputs, counts: list[int]) -> tuple[Tensor, Tensor]:
        """The sum of the losses of all targets, and what the head says of each state, without gradient [S, C].

        counts: states of each feature.
        """
        states_SH = alignment_gather(self.encoder(inputs.tokens), *inputs.gather)
        logits_SC = self.head(self.dropout(states_SH)).float()
        return self.loss(logits_SC, inputs.arrays[TUNED]["labels"], counts), logits_SC.detach()


@dataclass(frozen=True)
class Rows:
    """Features as flat rows on a device, as the exported encoder reads text."""

    model: Exported
    language_ids: dict[str, int]
    longest: int

    def __call__(self, features: Sequence[Feature], device: torch.device) -> tuple[Inputs, list[int]]:
        tokenizer = self.model.tokenizer
        examples = [
            sequences.Example(f.langs, tuple(ids.tolist() for ids in f.ids), None, np.uint64(0)) for f in features
        ]
        joined = join_segments(
            tokenizer,
            [[(example, side) for side in range(len(example.ids))] for example in examples],
            self.language_ids,
        )
        starts, none = joined.starts, np.empty(0, dtype=np.int64)
        piece = Piece(
            joined,
            {"read": Reads(np.concatenate([none, *(f.places + at for f, at in zip(features, starts, strict=True))]))},
            targets={},
            samples=len(features),
            arrays={"labels": np.concatenate([none, *(f.labels for f in features)])},
            types="languages" if self.model.language_embeddings else "segments" if self.model.segments else None,
        )
        row = make_row({TUNED: piece}, self.longest, tokenizer.sep_id)
        return to_device(row.inputs, device), [len(f.places) for f in features]


@dataclass(frozen=True)
class Tuner:
    """What all fine-tuning runs of a command share."""

    model: Exported
    task: Task
    settings: Settings
    ds_config: dict[str, Any]
    ds_path: Path
    rows: Rows
    control: Control
    tell: Callable[[str], None]

    def fit(self, units: list[list[Feature]], outputs: int, seed: int, folder: Path, name: str) -> Any:
        """An engine that has been trained on the units, each of features that belong into one batch. It goes on from
        what `folder` has of the same run."""
        batch = max(1, round(self.settings.batch * len(units) / sum(map(len, units))))
        steps = math.ceil(len(units) / batch)
        engine = self.build(outputs, seed, steps * self.settings.epochs)
        first = self.load(engine, folder)
        for epoch in range(first, self.settings.epochs):
            started, loss, targets = time.perf_counter(), torch.zeros((), dtype=torch.float64), 0
            order = rng.permutation(rng.key(seed, "finetune", epoch), len(units)).tolist()
            for step in range(steps):
                chosen = [f for i in order[step * batch : (step + 1) * batch] for f in units[i]]
                loss += self.step(engine, chosen, (seed, epoch, step))
                targets += sum(f.targets for f in chosen)
            mean = sum(self.control.gather(float(loss))) / targets
            if not math.isfinite(mean):
                raise NotFinite(f"{name}: the loss of epoch {epoch + 1} is {mean}; take a smaller --lr")
            seconds = time.perf_counter() - started
            self.tell(f"{name}: epoch {epoch + 1}/{self.settings.epochs}  loss {mean:.6f}  {seconds:.1f} s")
            if epoch + 1 < self.settings.epochs:
                self.save(engine, folder, epoch + 1, name)
        return engine

    def build(self, outputs: int, seed: int, steps: int) -> Any:
        module = Tuned(copy.deepcopy(self.model.encoder), outputs, self.task.loss, seed)
        recipe = self.settings.recipe(steps)
        config = resolve_ds_config(self.ds_config, self.ds_path, recipe, self.control.size, Hardware.here())
        if config.stage > 2:
            raise UserError(f"--ds_config {self.ds_path} has ZeRO stage {config.stage}; fine-tuning takes 0, 1 or 2")
        for note in config.notes:
            self.tell(note)
        module.train()
        gc.collect()  # engines are cycles: the last one's memory
        return build_engine(module, config.resolved)

    def step(self, engine: Any, features: list[Feature], identity: tuple[int, ...]) -> float:
        """One update by a batch, of which this rank takes its share by length. Returns the share's loss."""
        rank, world = self.control.rank, self.control.size
        by_length = sorted(features, key=lambda f: -f.tokens)
        inputs, counts = self.rows(by_length[rank::world], engine.device)
        torch.manual_seed(rng.torch_seed("finetune", *identity, rank))
        with one_reduction(engine):
            loss, _ = engine(inputs, counts)
            engine.backward(loss * (world / sum(f.targets for f in features)))  # DeepSpeed takes the ranks' mean
        take_step(engine)
        return float(loss.detach())

    def predict(self, engine: Any, features: list[Feature]) -> list[np.ndarray]:
        """What the head says of each feature [S, C]. Rows are the same for any number of ranks."""
        module, found = engine.module.eval(), dict[int, np.ndarray]()
        order = sorted(range(len(features)), key=lambda i: -features[i].tokens)
        batches = [order[start : start + SEQUENCES] for start in range(0, len(order), SEQUENCES)]
        for batch in batches[self.control.rank :: self.control.size]:
            inputs, counts = self.rows([features[i] for i in batch], engine.device)
            with torch.no_grad():
                logits_SC = module(inputs, counts)[1].cpu().numpy()
            found |= dict(zip(batch, np.split(logits_SC, np.cumsum(counts)[:-1]), strict=True))
        everyone = {i: logits for of_rank in self.control.gather(found) for i, logits in of_rank.items()}
        if not all(np.isfinite(logits).all() for logits in everyone.values()):
            raise NotFinite("what the tuned model says is not finite; take a smaller --lr")
        return [everyone[i] for i in range(len(features))]

    def save(self, engine: Any, folder: Path, epoch: int, name: str) -> None:
        """All ranks together; in the place of the epoch before. Where a disk has no room, training goes on without."""
        path = folder / self.checkpoint(epoch)
        partial = files.beside(path)
        self.control.from_main(lambda: files.remove(partial))
        found = self.control.gather(write(take(engine, partial, copies=False).taken, partial))
        problem = next(filter(None, found), "") or self.control.from_main(lambda: settle(partial, path))
        if problem:
            self.control.from_main(lambda: files.remove(partial))
            self.tell(f"{name}: epoch {epoch} is not kept ({problem}); a run that is killed begins before it")
            return
        self.control.from_main(lambda: files.remove(folder / self.checkpoint(epoch - 1)))

    def load(self, engine: Any, folder: Path) -> int:
        """Epochs that the newest checkpoint has done; 0 where there is none of as many ranks."""
        there = [epoch for epoch in range(1, self.settings.epochs) if (folder / self.checkpoint(epoch)).is_dir()]
        epoch = max(self.control.gather(max(there, default=0)))
        path = folder / self.checkpoint(epoch)
        problem = self.control.from_main(lambda: damage(path)) if epoch else ""
        if problem:
            self.tell(f"{path} is not usable ({problem}); its run starts again")
            self.control.from_main(lambda: remove_checkpoints(folder))
            return 0
        if epoch:
            engine.load_checkpoint(str(folder), tag=self.checkpoint(epoch))
        return epoch

    def checkpoint(self, epoch: int) -> str:
        return f"epoch_{epoch}_of_{self.control.size}_ranks"


def settle(partial: Path, path: Path) -> str:
    """What all ranks have written, to its place, with the hashes of all files. Returns what the disk said, "" where it
    took them."""
    written = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    hashes = {str(path.relative_to(partial)): files.sha256_file(path) for path in written}
    try:
        files.write_text(partial / HASHES, json.dumps(hashes, indent=1) + "\n")
    except OSError as error:
        return f"{partial}: {error.strerror}"
    files.move_in(partial, path)
    return ""


def damage(path: Path) -> str:
    """What is wrong with a checkpoint that was settled; "": nothing."""
    try:
        hashes = json.loads((path / HASHES).read_text(encoding="utf-8"))
        changed = [name for name, digest in hashes.items() if files.sha256_file(path / name) != digest]
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return f"{', '.join(changed)}: not what was written" if changed else ""


def remove_checkpoints(folder: Path) -> None:
    for path in folder.glob("epoch_*"):
        files.remove(path)


def write(states: dict[str, Any], folder: Path) -> str:
    """This rank's files of a checkpoint, to disk. Returns what the disk said, "" where it took them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, state in states.items():
            with (folder / name).open("wb") as file:
                torch.save(state, file)
            files.sync(folder / name)
    except (OSError, RuntimeError) as error:  # torch raises its own over that of a failed write
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        return f"{folder}: {cause.strerror}"
    return ""
