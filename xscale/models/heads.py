"""Saves the objectives' trained heads beside an exported model, and loads them for a run that starts from it."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from xscale.errors import UserError
from xscale.files import pointer_problem

FILE = "xscale_heads.safetensors"
"""The file of an export that has the weights of the heads, under the names STREAM.NAME. Its metadata has the streams'
recipe fields."""


class SavedHeads(NamedTuple):
    """A stream's saved heads, in fp32."""

    stream: dict[str, Any]
    """The stream's recipe fields when the heads were trained."""
    weights: dict[str, Tensor]

    @property
    def objective(self) -> str:
        return self.stream["objective"]

    def options(self, options_class: type) -> Any:
        """Return the objective's own fields as an instance of `options_class`."""
        own = {field.name for field in dataclasses.fields(options_class)}
        return options_class(**{name: value for name, value in self.stream.items() if name in own})


def save_heads(kept: dict[str, SavedHeads], folder: Path) -> None:
    """Write the heads of each stream into the file FILE of the folder, or no file if there are no heads."""
    if kept:
        weights = {f"{name}.{part}": w.contiguous() for name, of in kept.items() for part, w in of.weights.items()}
        streams = json.dumps({name: heads.stream for name, heads in kept.items()})
        save_file(weights, folder / FILE, {"format": "pt", "streams": streams})


def load_heads(folder: Path) -> dict[str, SavedHeads]:
    """Return the saved heads of each stream, or {} if there is no file FILE. Raises UserError if it is damaged."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        with safe_open(path, "pt") as file:
            kept = {name: SavedHeads(stream, {}) for name, stream in json.loads(file.metadata()["streams"]).items()}
            for name in file.keys():  # noqa: SIM118  (not a dict)
                stream, _, part = name.partition(".")
                kept[stream].weights[part] = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        if pointer := pointer_problem(path):
            raise UserError(pointer) from None
        raise UserError(f"cannot read {path} ({error}); export the run again, or delete the file") from None
    return kept


def copy_saved_heads(saved: dict[str, SavedHeads], stream: str, objective: str, heads: nn.Module) -> str | None:
    """Copy saved weights of the same objective into a stream's new heads, if all names and shapes match. Return a line
    for the log, or None if no heads of the objective are saved.

    Heads of a stream with the same name are preferred.
    """
    found = [name for name, of in saved.items() if of.objective == objective]
    if not found:
        return None
    name = stream if stream in found else found[0]
    ours, theirs = heads.state_dict(), saved[name].weights
    if differing := [part for part in {**ours, **theirs} if _shape(ours, part) != _shape(theirs, part)]:
        part = differing[0]
        return (
            f"streams.{stream} starts with new heads, because {part} of model.init's stream {name} has shape "
            f"{_shape(theirs, part)}, but here it is {_shape(ours, part)}"
        )
    heads.load_state_dict(theirs)
    return f"streams.{stream} starts from the heads of model.init's stream {name}: {', '.join(sorted(theirs))}"


def _shape(weights: dict[str, Tensor], name: str) -> str:
    return "x".join(map(str, weights[name].shape)) if name in weights else "absent"
