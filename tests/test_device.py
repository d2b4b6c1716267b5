"""What a step asks of the device: the host does not wait for it, one copy moves all, activations are computed again."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import launch
from tests.rows import CPU, pass_row, rows_of_step, totals_of
from xscale.checkpoint import store
from xscale.data.loader import Loader
from xscale.data.packed_row import Row
from xscale.files import sha256_file
from xscale.ranks import HostGroup
from xscale.step.module import StepModule
from xscale.step.step import encode_auxiliary, run_row, step_weights

SMALL = ["mlm=4", "tlm=6", "alignlm=6", "ppa=5", "contextual=4", "align_mlm=3"]


@pytest.fixture(scope="module")
def loader(demo: Path) -> Loader:
    sets = [f"streams.{name.replace('=', '.samples=')}" for name in SMALL]
    sets += ["data.workers=0", "streams.ppa.tlm_weight=1.0", "streams.ppa.queue_size=8"]
    return launch.loader_of(["--ds_config", "", "--recipe", "mixed", "--data", str(demo), "--set", *sets])


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


def test_the_host_does_not_wait_for_the_device(loader: Loader, row: Row) -> None:
    """Forward, backward and the companions' update of a row of all objectives. But for the weights of the predictions,
    which come from the host, and on a CPU the head, which looks whether the incoming gradient is 1."""
    module = StepModule(launch.encoder(loader), loader.recipe)
    weights = step_weights(loader.recipe, totals_of([row]), 0)
    on_device = row.to(CPU)
    with Waits() as copies:
        for auxiliary in row.auxiliary.values():
            auxiliary.to(CPU)
    with Waits() as waits:
        (shared,) = encode_auxiliary(module, [on_device], [(0,)])
        loss, _ = run_row(module, on_device, shared, weights, (0,))
    assert waits.found == copies.found + Counter(lift_fresh=1)
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


def saved_bytes(module: nn.Module, call: Any) -> int:
    """Bytes that the forward pass keeps for the backward pass beside the weights."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return sum(kept.values())


def test_checkpointed_activations_give_the_same_step(demo: Path, row: Row) -> None:
    """Bit for bit, with dropout; half as much is kept. The momentum encoder, without backward pass, stays as it is."""
    found = []
    for on in ("false", "true"):
        sets = [f"streams.{name.replace('=', '.samples=')}" for name in SMALL]
        sets += [f"train.activation_checkpointing={on}", "streams.ppa.tlm_weight=1.0", "streams.ppa.queue_size=8"]
        loader = launch.loader_of(["--ds_config", "", "--recipe", "mixed", "--data", str(demo), "--set", *sets])
        module = StepModule(launch.encoder(loader), loader.recipe)
        loss, _ = pass_row(module, row, step_weights(loader.recipe, totals_of([row]), 0))
        loss.backward()
        tokens = row.to(CPU).tokens
        kept = saved_bytes(module, lambda m=module, t=tokens: m.encoder(t))
        found.append((loss.detach(), {name: p.grad for name, p in module.named_parameters()}, kept))
    (loss, gradients, kept), (other, others, less) = found
    assert torch.equal(loss, other) and gradients.keys() == others.keys()
    assert all(torch.equal(others[name], g) for name, g in gradients.items())
    assert less < kept / 2


@pytest.mark.parametrize(
    "change",
    [{"files": {}}, {"files": None}, {"files": {"a": None}}, {"step": "8"},
     {"step": 5}, {"world_size": "1"}, {"state": {}}, {"engine": None}],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_is_not_sound_is_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    """The newest checkpoint is then the one before it."""
    for step in (4, 8):
        path = tmp_path / f"step_{step:08d}"
        path.mkdir()
        (path / "weights").write_text("w")
        whole = {"bytes": 1, "sha256": sha256_file(path / "weights")}
        manifest = {
            "step": step,
            "world_size": 1,
            "identity": {"seed": 0},
            "state": {"step": step},
            "files": {"weights": whole},
            "calibration": {"lines": []},
            "engine": {"stage": 2},
        }
        (path / store.MANIFEST).write_text(store.manifest_text(manifest | (change if step == 8 else {})))
    said: list[str] = []
    found = store.newest_valid(tmp_path, HostGroup(), said.append)
    assert found is not None and found.step == 4
    assert len(said) == 1 and "step_00000008" in said[0] and "trying the one before" in said[0]
