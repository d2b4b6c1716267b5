"""Writes the encoder of an export as onnx/model.onnx, where sentence-transformers and optimum look for it."""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from xscale import files
from xscale.errors import UserError
from xscale.models.build import read_pretrained

CLOSE = 1e-4
"""The allowed difference from PyTorch's hidden states, relative to the larger of 1 and their maximum."""


@torch.no_grad()
def write_onnx(folder: Path) -> None:
    """Write onnx/model.onnx into an export's folder, from the tokenizer's outputs to last_hidden_state. Raises
    UserError, without writing, if onnxruntime's states differ from PyTorch's."""
    import onnxruntime

    encoder = read_pretrained("--onnx", folder)[0].base_model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    texts = [" ".join(list(tokenizer.get_vocab())[-words:]) for words in (1, 20, 150)]
    pairs = [(text, text) for text in texts] if "token_type_ids" in tokenizer.model_input_names else texts
    options = {"padding": True, "truncation": True, "return_tensors": "pt"}
    batches = [dict(tokenizer(pairs[:size], **options)) for size in (3, 2, 1)]
    shapes = {name: {0: "batch", 1: "length"} for name in batches[0]}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with files.publish(folder / "onnx") as partial, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns of its own code
        partial.mkdir()
        file = partial / "model.onnx"
        output: dict[str, Any] = {"output_names": ["last_hidden_state"], "external_data": False, "verbose": False}
        torch.onnx.export(encoder, (), file, kwargs=batches[0], dynamic_shapes=shapes, **output)
        session = onnxruntime.InferenceSession(file)
        for batch in batches:
            kept, expected = batch["attention_mask"].bool(), encoder(**batch).last_hidden_state
            (states,) = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
            furthest, largest = (torch.from_numpy(states) - expected)[kept].abs().max(), expected[kept].abs().max()
            if not furthest <= CLOSE * max(1.0, float(largest)):
                raise UserError(
                    f"--onnx: onnxruntime's states are up to {float(furthest):.2g} away from PyTorch's (the largest is "
                    f"{float(largest):.2g}); {folder} is complete without ONNX. Try another version of onnxruntime"
                )
