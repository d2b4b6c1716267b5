"""The uses of DeepSpeed by xscale/deepspeed_private.py that the steps of tests/test_zero.py do not reach."""

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import nn

from xscale import deepspeed_private as private

ROOT = Path(__file__).parent.parent
PUBLIC = {
    *("deepspeed", "deepspeed.accelerator.get_accelerator"),
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
}
"""What a file of xscale may import of DeepSpeed: what its documentation shows."""
PRIVATE = re.compile(
    r"ds_(id|shape|numel)|_hp_mapping|grad_accum|averaged_gradients|\w*fp(16|32)\w*_groups\w*|_copy_recovery_script|"
    r"checkpoint_engine|backward_(pro|epi)logue|_global_grad_norm|get_gradient_for_reduction|last_batch_iteration"
)
"""Attributes that no other file may name."""


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_no_other_file_uses_a_private_part() -> None:
    found = []
    for path in sorted((ROOT / "xscale").rglob("*.py")):
        if path.name == "deepspeed_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(path.name, name) for name in names if name.startswith("deepspeed") and name not in PUBLIC]
            if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
                found.append((path.name, node.attr))
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("deepspeed.ops"):
                found.append((path.name, ast.unparse(node)))
    assert found == []


def test_no_loss_scale_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = DynamicLossScaler(init_scale=1, scale_window=1, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)
    with pytest.raises(Exception, match="loss scale already at minimum"):
        scaler.update_scale(True)
    optimizer = type("Optimizer", (), {"loss_scaler": scaler})
    private.skip_steps_at_smallest_loss_scale(
        type("Engine", (), {"fp16_enabled": lambda: True, "optimizer": optimizer})
    )
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    scaler.update_scale(True)
    assert scaler.cur_scale == 1


def test_the_shared_memory_operator_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(deepspeed.ops), "__compatible_ops__", None)
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", lambda: pytest.fail("is probed"))
    private.disable_shared_memory_op()
    assert deepspeed.ops.__compatible_ops__ == {}


def test_muon_is_where_it_is_looked_for() -> None:
    assert importlib.util.find_spec("deepspeed.runtime.zero.muon.original_muon")
    assert callable(importlib.import_module("deepspeed.runtime.compiler").compile)


def test_config() -> None:
    assert issubclass(deepspeed.DeepSpeedConfigError, Exception)
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 1, "gradient_clipping": 0.5}).gradient_clipping == 0.5
    for builder in ("CPUAdamBuilder", "FusedAdamBuilder"):
        assert "verbose" in parameters(getattr(importlib.import_module("deepspeed.ops.op_builder"), builder).load)


def test_a_schedule_is_followed() -> None:
    """Its step takes the number of a step, and last_batch_iteration is where it stands."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = lr_schedules.WarmupDecayLR(optimizer, 20, 0.0, 1.0, 10, "linear")
    for _ in range(6):
        schedule.step()
    before = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 7.0
    private.set_learning_rate_by_scheduler(type("Engine", (), {"lr_scheduler": schedule}))
    assert optimizer.param_groups[0]["lr"] == before > 0 and schedule.last_batch_iteration == 5


def test_files_and_their_types(tmp_path: Path) -> None:
    names = "".join(inspect.getsource(getattr(DeepSpeedEngine, name)) for name in ("_get_ckpt_name", *_NAMES))
    assert '"mp_rank_" + mp_rank_str + "_model_states.pt"' in names and "zero_pp_rank_{dp_rank}" in names
    assert "_mp_rank_{mp_rank:02d}_optim_states.pt" in names
    for rank in (10, 9, 0):
        (tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    assert private.model_state_path(tmp_path).name == "mp_rank_00_model_states.pt"
    assert [int(path.name.split("_")[4]) for path in private.optimizer_partition_paths(tmp_path)] == [0, 9, 10]
    for name in private.KNOWN_TYPES:
        module, _, kind = name.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), kind), type), name
    private.register_plain_zero_stage_pickling()
    torch.save(ZeroStageEnum.gradients, tmp_path / "stage")
    held = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "stage")
    assert set(held) == {"deepspeed.runtime.zero.config.ZeroStageEnum"} <= private.KNOWN_TYPES


_NAMES = ("_get_zero_ckpt_name", "_get_rank_zero_ckpt_name", "_get_zero_ckpt_prefix")


@pytest.mark.parametrize(("most_parts", "lengths"), [(1, [10]), (2, [5, 5]), (9, [4, 4, 2])])
def test_a_gradient_has_no_more_parts_than_the_norm_reads(
    most_parts: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "CPU_CHUNK", 4)
    flat = torch.arange(10.0)
    parts = private.PartitionGradient(flat, most_parts)
    assert list(map(len, parts)) == lengths and torch.cat(list(parts)).equal(flat)
