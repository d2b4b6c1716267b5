"""Momentum contrast (MoCo, He et al. 2020): an encoder that slowly follows the trained one, and a queue of its vectors.

Shape letters: N vectors of a global batch, K vectors in the queue, D width of a vector.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from xscale.models.encoder import Encoder


class MomentumEncoder:
    """The key encoder and its projection: theta_k = m * theta_k + (1 - m) * theta_q, beginning with theta_k = theta_q.

    Its weights (`masters`) are fp32, because in fp16 theta_k plus 0.001 * (theta_q - theta_k) is usually theta_k.
    If the query encoder has another data type, the forward pass uses a copy of the masters in that type. At the first
    use, the masters are moved to the query encoder's device.
    """

    def __init__(self, encoder: Encoder, projection: nn.Module):
        self.query = nn.ModuleList([encoder.lm.base_model, projection])
        """The trained modules. DeepSpeed may change their type and device, but not the order of parameters."""
        self.encoder = encoder
        base: Any = copy.deepcopy(encoder.lm.base_model)
        self.masters = nn.ModuleList([Encoder(base), copy.deepcopy(projection)]).requires_grad_(False)
        self.masters.to(torch.promote_types(next(self.query.parameters()).dtype, torch.float32))
        self.masters.train()  # the modules of a loaded model are in evaluation mode
        self._cast: nn.ModuleList | None = None
        """A copy of the masters in the query encoder's data type; None until a copy is needed."""

    def _move_masters_to_device_of_query(self) -> None:
        """Move the masters to the query encoder's device if needed. The check is worthwhile, because `Module.to` always
        takes milliseconds."""
        device = next(self.query.parameters()).device
        if next(self.masters.parameters()).device != device:
            self.masters.to(device)

    def prepare_key_modules(self, with_dropout: bool) -> tuple[Encoder, nn.Module]:
        """Return the key encoder and its projection in the query encoder's data type and on its device, in training
        mode if `with_dropout`."""
        query = next(self.query.parameters())
        self._move_masters_to_device_of_query()
        modules = self.masters
        if next(self.masters.parameters()).dtype != query.dtype:
            modules = self._cast = self._cast or copy.deepcopy(self.masters).to(query.dtype)
        if modules.training != with_dropout:
            modules.train(with_dropout)
        encoder, projection = modules
        assert isinstance(encoder, Encoder)
        encoder.set_dropout_unless_none(self.encoder.dropout)  # a phase may change the dropout
        return encoder, projection

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """Update the masters as a moving average of the query encoder's weights: masters = momentum * masters + (1 -
        momentum) * query. Call it after each optimizer step that changed these weights. Only parameters are averaged:
        buffers are constants in all supported models."""
        self._move_masters_to_device_of_query()
        masters: list[Tensor] = list(self.masters.parameters())
        query: list[Tensor] = list(self.query.parameters())
        if query[0].dtype != masters[0].dtype:
            wide = [torch.empty_like(k) for k in masters]
            torch._foreach_copy_(wide, query)
            query = wide
        torch._foreach_lerp_(masters, query, 1 - momentum)
        self._update_cast_if_present()

    def _update_cast_if_present(self) -> None:
        if self._cast is not None:
            torch._foreach_copy_(list(self._cast.parameters()), list(self.masters.parameters()))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.masters.state_dict())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.masters.load_state_dict(state)
        self._update_cast_if_present()


class Queue:
    """A ring buffer of the newest K vectors, in fp32. All ranks push the same vectors, so their queues are equal."""

    def __init__(self, size: int, width: int):
        self.ring_KD = torch.zeros(size, width)
        self.born_K = torch.zeros(size, dtype=torch.int64)
        """The number of the optimizer step after which each vector was pushed; 0 if it was pushed before the first
        step."""
        self.texts_K2 = torch.zeros(size, 2, dtype=torch.int64)
        """The hashes of each vector's text and of the text's translation; 0 if unknown."""
        self.next = self.filled = 0

    @property
    def stored_keys(self) -> Tensor:
        """Return the queue's vectors [filled, D], in no particular order."""
        return self.ring_KD[: self.filled]

    @property
    def stored_text_hashes(self) -> Tensor:
        """Return the text hashes [filled, 2] of `stored_keys`."""
        return self.texts_K2[: self.filled]

    def move_to(self, device: torch.device) -> None:
        self.ring_KD = self.ring_KD.to(device)
        self.born_K = self.born_K.to(device)
        self.texts_K2 = self.texts_K2.to(device)

    def push_and_zero_nonfinite(self, keys_ND: Tensor, born_step: int, texts_N2: Tensor | None = None) -> None:
        """Add vectors [N, D], which overwrite the oldest ones. A vector that is not finite is replaced by 0, because it
        would make every later loss NaN. texts_N2: hashes of the vectors' texts and of their translations."""
        size = len(self.ring_KD)
        finite_N1 = keys_ND.isfinite().all(-1, keepdim=True)
        keys_ND = keys_ND.masked_fill(~finite_N1, 0)[-size:]
        places = (self.next + torch.arange(len(keys_ND), device=keys_ND.device)) % size
        self.ring_KD[places] = keys_ND.to(self.ring_KD)
        self.born_K.index_fill_(0, places, born_step)
        self.texts_K2[places] = 0 if texts_N2 is None else texts_N2[-size:]
        self.next = (self.next + len(keys_ND)) % size
        self.filled = min(self.filled + len(keys_ND), size)

    def mean_age_in_steps(self, current_step: int) -> Tensor:
        """Return the mean number of optimizer steps since the vectors were pushed. current_step: counted from 1."""
        return (current_step - self.born_K[: self.filled]).sum() / max(self.filled, 1)

    def state_dict(self) -> dict[str, Tensor | int]:
        return {
            "ring": self.ring_KD,
            "born": self.born_K,
            "texts": self.texts_K2,
            "next": self.next,
            "filled": self.filled,
        }

    def load_state_dict(self, state: dict) -> None:
        self.ring_KD.copy_(state["ring"])
        self.born_K.copy_(state["born"])
        self.texts_K2.copy_(state["texts"])
        self.next = state["next"]
        self.filled = state["filled"]
