"""Trained heads of a run's objectives: kept beside the Hugging Face model, taken over by runs that go on from it."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from xscale.errors import UserError

FILE = "xscale_heads.safetensors"
"""Of an exported directory: weights STREAM.NAME, and the streams' fields as metadata."""


class KeptHeads(NamedTuple):
    """A stream's, fp32."""

    stream: dict[str, Any]
    """The stream's fields in the recipe that trained them."""
    weights: dict[str, Tensor]

    @property
    def objective(self) -> str:
        return self.stream["objective"]

    def options(self, options: type) -> Any:
        """The objective's own fields, as `options`."""
        own = {field.name for field in dataclasses.fields(options)}
        return options(**{name: value for name, value in self.stream.items() if name in own})


def save_heads(kept: dict[str, KeptHeads], folder: Path) -> None:
    """kept: by stream. Writes no file for none."""
    if kept:
        weights = {f"{name}.{part}": w.contiguous() for name, of in kept.items() for part, w in of.weights.items()}
        streams = json.dumps({name: heads.stream for name, heads in kept.items()})
        save_file(weights, folder / FILE, {"format": "pt", "streams": streams})


def load_heads(folder: Path) -> dict[str, KeptHeads]:
    """By stream; none where the folder has no such file. Raises UserError."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        with safe_open(path, "pt") as file:
            kept = {name: KeptHeads(stream, {}) for name, stream in json.loads(file.metadata()["streams"]).items()}
            for name in file.keys():  # noqa: SIM118  it is no dict
                stream, _, part = name.partition(".")
                kept[stream].weights[part] = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}); export the run again, or remove the file") from None
    return kept


def take_over(kept: dict[str, KeptHeads], stream: str, objective: str, heads: nn.Module) -> str | None:
    """Give a stream's fresh heads the weights of those kept of the same objective, of the stream of the same name
    before others, where all names and shapes are equal. Returns a line about it; None where none are kept.
    """
    found = [name for name, of in kept.items() if of.objective == objective]
    if not found:
        return None
    name = stream if stream in found else found[0]
    ours, theirs = heads.state_dict(), kept[name].weights
    if differing := [part for part in {**ours, **theirs} if _shape(ours, part) != _shape(theirs, part)]:
        part = differing[0]
        return (
            f"streams.{stream} starts with fresh heads: of those of model.init's stream {name}, {part} is "
            f"{_shape(theirs, part)}, here {_shape(ours, part)}"
        )
    heads.load_state_dict(theirs)
    return f"streams.{stream} takes over the heads of model.init's stream {name}: {', '.join(sorted(theirs))}"


def _shape(weights: dict[str, Tensor], name: str) -> str:
    return "x".join(map(str, weights[name].shape)) if name in weights else "absent"
