"""The checkpoints of a run: when they are saved, and what is in them besides the engine's state."""

import copy
from pathlib import Path
from typing import Any

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.manager import CheckpointManager
from xscale.data.corpus import run_identity
from xscale.data.loader import Loader
from xscale.data.mixture import sources_read
from xscale.data.tokenizer import Tokenizer
from xscale.models.encoder import set_rope_theta
from xscale.recipe import Recipe
from xscale.run.finite import FiniteCheck
from xscale.run.reporting import RunMetrics
from xscale.run.state import RunContext, TrainState
from xscale.run.stopper import Stopper
from xscale.run.validation import Validation


class Checkpoints:
    """Saves a run's checkpoints. All ranks call its functions together."""

    def __init__(
        self,
        context: RunContext,
        loader: Loader,
        manager: CheckpointManager,
        finite: FiniteCheck,
        metrics: RunMetrics,
        evaluations: Validation,
        stopper: Stopper,
    ):
        self.config = context.config
        self.loader = loader
        self.recipe = loader.recipe
        self.manager = manager
        self.finite = finite
        self.metrics = metrics
        self.evaluations = evaluations
        self.stopper = stopper

    def after_step(self, state: TrainState) -> None:
        """Save a checkpoint if that is due: every checkpoint.every steps, after the best evaluation so far, and after
        the last step. A run that is about to stop saves when it stops."""
        last = state.step == self.recipe.train.steps
        due = state.step % self.recipe.checkpoint.every == 0 or self.evaluations.best_so_far == state.step
        if last or (due and not self.stopper.stops_next()):
            self.save(state, must_succeed=last)

    def save(self, state: TrainState, must_succeed: bool) -> None:
        """Save a checkpoint after the last finished step. must_succeed: raise OSError if it fails."""
        self.metrics.flush()
        self.metrics.sync()
        self.evaluations.sync()
        self.manager.save(
            state.step,
            self.manifest(state),
            good=not self.finite.skipped_in_a_row,
            must_succeed=must_succeed,
        )

    def manifest(self, state: TrainState) -> dict[str, Any]:
        """Return a checkpoint's manifest without its list of files; see Checkpoint in checkpoint/store.py."""
        return {
            "identity": run_identity(self.recipe, self.loader.corpus),
            "state": state.data,
            "sources": sources_read(state.data, self.loader.streams, self.loader.corpus.sources),
            "calibration": self.loader.calibration.to_dict(),
            "engine": self.config.saved(),
        }


def write_model(recipe: Recipe, tokenizer: Tokenizer, lm: Any, step: int, path: Path) -> None:
    """Write the tokenizer and the model's config, with the settings of the last finished step, to a checkpoint. Rank 0
    only."""
    config = copy.deepcopy(lm.config)
    theta = recipe.at(max(step - 1, 0)).model.rope_theta
    if theta:
        set_rope_theta(config, theta)  # before the first step, the model has not that of its phase
    config.save_pretrained(path / checkpoints.HF)
    tokenizer.hf.save_pretrained(path / checkpoints.HF)
