"""A step gives its work to the device, and the host does not wait for it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import launch
from tests.rows import CPU, rows_of_step, shared_of, totals_of
from xscale.data.loader import Loader
from xscale.data.packed_row import Row
from xscale.models import flat
from xscale.step.module import StepModule
from xscale.step.step import compute_row_loss, weights_of_term_sums

SMALL = ["mlm=4", "tlm=6", "alignlm=6", "ppa=5", "word_contrast=4", "align_mlm=3"]


@pytest.fixture(scope="module")
def loader(demo: Path) -> Loader:
    sets = [f"streams.{name.replace('=', '.samples=')}" for name in SMALL]
    sets += ["data.workers=0", "streams.ppa.tlm_weight=1.0", "streams.ppa.queue_size=8"]
    return launch.loader_of(
        ["--ds_config", "", "--recipe", "mixed", "--data", str(demo), "--set", *sets], measured=False
    )


@pytest.fixture(scope="module")
def row(loader: Loader) -> Row:
    ((row,),) = next(rows_of_step(loader))
    return row


class Waits(TorchDispatchMode):
    """Operations whose result's size or value the host needs: it would wait for the device."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(self.NAMES):
            self.found[name] += 1
        if name.startswith(("index", "_unsafe_index")) and len(args) > 1 and isinstance(args[1], list | tuple):
            self.found += Counter(f"{name} by a mask" for i in args[1] if i is not None and i.dtype == torch.bool)
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_for_the_device(loader: Loader, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and the companions' update of a row of all objectives, with attention as a GPU's kernel has it.
    But for the weights of the predictions and the seeds of two forward passes, which come from the host, and on a
    CPU the head, which looks whether the incoming gradient is 1."""
    monkeypatch.setattr(flat, "attention", lambda qkv_NX, *_: qkv_NX[:, : qkv_NX.shape[1] // 3])
    module = StepModule(launch.encoder(loader), loader.recipe)
    weights = weights_of_term_sums(loader.recipe, totals_of([row]), 0)
    on_device = row.to(CPU)
    with Waits() as copies:
        for auxiliary in row.auxiliary.values():
            auxiliary.to(CPU)
    with Waits() as waits:
        (shared,) = shared_of(module, [on_device], [(0,)])
        loss, _ = compute_row_loss(module, on_device, shared, weights, (0,))
    assert waits.found == copies.found + Counter(lift_fresh=1, _local_scalar_dense=2)
    with Waits() as waits:
        loss.backward()
    assert waits.found == Counter(_local_scalar_dense=3), "features, weight and bias of the head"
    with Waits() as waits:
        for auxiliary_state in module.auxiliary_states.values():
            auxiliary_state.update(True)
    assert not waits.found
    for wait in (lambda x: x.item(), lambda x: x[x > 0], lambda x: bool(x.any()), lambda x: x + torch.tensor(1.0)):
        with Waits() as waits:
            wait(torch.ones(3)[1:2])
        assert waits.found, "the watch sees nothing"
