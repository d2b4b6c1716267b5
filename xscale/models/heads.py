"""The objectives' trained heads are exported beside the Hugging Face model, and reused by runs that start from it."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from xscale.errors import UserError

FILE = "xscale_heads.safetensors"
"""The file of an export with the heads' weights, named STREAM.NAME, and the streams' recipe fields as metadata."""


class KeptHeads(NamedTuple):
    """A stream's saved heads, in fp32."""

    stream: dict[str, Any]
    """The stream's fields in the recipe that trained the heads."""
    weights: dict[str, Tensor]

    @property
    def objective(self) -> str:
        return self.stream["objective"]

    def options(self, options: type) -> Any:
        """Return the objective's own fields as an object of the class `options`."""
        own = {field.name for field in dataclasses.fields(options)}
        return options(**{name: value for name, value in self.stream.items() if name in own})


def save_heads(kept: dict[str, KeptHeads], folder: Path) -> None:
    """Write the heads of each stream into a file in the folder, or no file if there are no heads."""
    if kept:
        weights = {f"{name}.{part}": w.contiguous() for name, of in kept.items() for part, w in of.weights.items()}
        streams = json.dumps({name: heads.stream for name, heads in kept.items()})
        save_file(weights, folder / FILE, {"format": "pt", "streams": streams})


def load_heads(folder: Path) -> dict[str, KeptHeads]:
    """Return the heads of each stream, or {} if the folder has no heads file. Raises UserError if it is damaged."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        with safe_open(path, "pt") as file:
            kept = {name: KeptHeads(stream, {}) for name, stream in json.loads(file.metadata()["streams"]).items()}
            for name in file.keys():  # noqa: SIM118  (not a dict)
                stream, _, part = name.partition(".")
                kept[stream].weights[part] = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {path} ({error}); export the run again, or delete the file") from None
    return kept


def load_kept_heads(kept: dict[str, KeptHeads], stream: str, objective: str, heads: nn.Module) -> str | None:
    """Copy kept weights of the same objective into a stream's new heads, if all names and shapes match.

    Heads that were kept of a stream with the same name come first. Returns a line for the log, or None if no heads of
    the objective are kept.
    """
    found = [name for name, of in kept.items() if of.objective == objective]
    if not found:
        return None
    name = stream if stream in found else found[0]
    ours, theirs = heads.state_dict(), kept[name].weights
    if differing := [part for part in {**ours, **theirs} if _shape(ours, part) != _shape(theirs, part)]:
        part = differing[0]
        return (
            f"streams.{stream} starts with new heads, because {part} of model.init's stream {name} has shape "
            f"{_shape(theirs, part)}, and here {_shape(ours, part)}"
        )
    heads.load_state_dict(theirs)
    return f"streams.{stream} starts from the heads of model.init's stream {name}: {', '.join(sorted(theirs))}"


def _shape(weights: dict[str, Tensor], name: str) -> str:
    return "x".join(map(str, weights[name].shape)) if name in weights else "absent"
