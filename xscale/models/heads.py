"""Saves the objectives' trained heads beside an exported model, and loads them for a run that starts from it."""

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


def save_heads(heads_of_streams: dict[str, SavedHeads], folder: Path) -> None:
    """Write the heads of each stream into the file FILE of the folder, or no file if there are no heads."""
    weights = {}
    streams = {}
    for name, heads in heads_of_streams.items():
        streams[name] = heads.stream
        for part, weight in heads.weights.items():
            weights[f"{name}.{part}"] = weight.contiguous()
    if weights:
        save_file(weights, folder / FILE, {"format": "pt", "streams": json.dumps(streams)})


def load_heads(folder: Path) -> dict[str, SavedHeads]:
    """Return the saved heads of each stream, or {} if there is no file FILE. Raises UserError if it is damaged."""
    path = folder / FILE
    if not path.exists():
        return {}
    heads_of_streams = {}
    try:
        with safe_open(path, "pt") as file:
            for name, stream in json.loads(file.metadata()["streams"]).items():
                heads_of_streams[name] = SavedHeads(stream, {})
            for name in file.keys():  # noqa: SIM118  (not a dict)
                stream_name, _, part = name.partition(".")
                heads_of_streams[stream_name].weights[part] = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = pointer_problem(path) or f"cannot read {path} ({error}); export the run again, or delete the file"
        raise UserError(problem) from None
    return heads_of_streams


def copy_saved_heads(saved: dict[str, SavedHeads], stream: str, objective: str, heads: nn.Module) -> list[str]:
    """Copy saved weights of the same objective into a stream's new heads, if all names and shapes match. Return the
    lines for the log: none if no heads of the objective are saved.

    Heads of a stream with the same name are preferred.
    """
    candidates = [name for name, candidate in saved.items() if candidate.objective == objective]
    if not candidates:
        return []
    saved_stream = stream if stream in candidates else candidates[0]
    weights = saved[saved_stream].weights
    saved_shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    new_shapes = {name: tuple(weight.shape) for name, weight in heads.state_dict().items()}
    if saved_shapes != new_shapes:
        return [
            f"streams.{stream} starts with new heads, because those of model.init's stream {saved_stream} have the "
            f"shapes {saved_shapes}, but here they are {new_shapes}"
        ]
    heads.load_state_dict(weights)
    return [
        f"streams.{stream} starts from the heads of model.init's stream {saved_stream}: {', '.join(sorted(weights))}"
    ]
