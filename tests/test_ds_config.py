"""ds_configs and recipes made one: every "auto" filled, contradictions named, precision as asked or fallen back."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from xscale.checkpoint.store import Checkpoint
from xscale.errors import UserError
from xscale.objectives import OBJECTIVES
from xscale.recipe import Recipe, load_recipe
from xscale.run.resume import check_engine_can_load
from xscale.step.ds_config import Hardware, config_problems, read_ds_config, resolve_ds_config

SHIPPED = sorted((Path(__file__).parent.parent / "ds_configs").glob("*.json"))
CPU, CPU_FP16, OLD_CPU = Hardware("cpu", False, True), Hardware("cpu", True, True), Hardware("cpu", False, False)
GPU = Hardware("cuda", True, True)


def recipe(name: str = "mlm", *sets: str) -> Recipe:
    return load_recipe(name, list(sets), OBJECTIVES)


def resolve(config: dict[str, Any], made: Recipe | None = None, world: int = 2, hardware=GPU):
    found = resolve_ds_config(config, Path("X.json"), made or recipe(), world, hardware)
    return found.resolved, found.precision, found.notes


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict | list):
        return [leaf for value in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(value)]
    return [tree]


def differing(before: Any, after: Any) -> set[Any]:
    """Values of a tree that are others in the second."""
    if isinstance(before, dict):
        return set().union(*(differing(value, after[key]) for key, value in before.items()))
    return set() if before == after else {before}


def test_shipped_files_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder, unless it has a file of this name; nothing else is found so."""
    monkeypatch.chdir(tmp_path)
    shipped = json.loads((SHIPPED[0].parent / "zero2_cpu.json").read_text())
    for name in ("zero2_cpu", "zero2_cpu.json", "ds_configs/zero2_cpu.json"):
        assert read_ds_config(Path(name)) == shipped
    for name in ("zero2_gpu", "mine/zero2_cpu.json", "."):
        with pytest.raises(UserError, match=rf"--ds_config {re.escape(name)} "):
            read_ds_config(Path(name))
    with pytest.raises(UserError, match=r"zero2_gpu cannot be read \(No such file.*zero1_bf16, .*zero2_cpu"):
        read_ds_config(Path("zero2_gpu"))
    Path("zero2_cpu.json").write_text('{"gradient_clipping": 7.0}')
    assert (
        read_ds_config(Path("zero2_cpu.json")) == {"gradient_clipping": 7.0}
        and read_ds_config(Path("zero2_cpu")) == shipped
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["mixed", "xlm"])
def test_shipped_files_resolve(path: Path, name: str) -> None:
    made = recipe(name, "train.steps=1000", "train.warmup=0.1", "train.lr=0.002")
    config = read_ds_config(path)
    for hardware in (GPU, CPU, CPU_FP16, OLD_CPU):
        resolved, precision, notes = resolve(config, made, 2, hardware)
        assert "auto" not in leaves(resolved)
        assert json.loads(json.dumps(resolved)) == resolved
        micro, steps = resolved["train_micro_batch_size_per_gpu"], resolved["gradient_accumulation_steps"]
        assert (micro, steps) == (1, 1), "rows are summed up between two steps of DeepSpeed's"
        assert resolved["train_batch_size"] == micro * steps * 2, "DeepSpeed's own rule"
        assert resolved["gradient_clipping"] == made.train.max_grad_norm
        assert resolved["optimizer"]["params"]["lr"] == 0.002
        assert resolved["optimizer"]["params"]["weight_decay"] == made.train.weight_decay
        assert "scheduler" not in resolved, "the recipe has the learning rate of each step"
        wanted = next((p for p in ("fp16", "bf16") if p in config), "fp32")
        supported = {"fp16": hardware.fp16, "bf16": hardware.bf16, "fp32": True}[wanted]
        assert precision == (wanted if supported else "fp32")
        assert len(notes) == (0 if supported else 1)
        for name_ in ("fp16", "bf16"):
            assert resolved.get(name_, {}).get("enabled", False) is (precision == name_)
        for key in set(config) - {"fp16", "bf16", "optimizer"}:
            assert differing(config[key], resolved[key]) <= {"auto"}, f"{key} was changed"
        assert config_problems(resolved) == []
        assert resolve(resolved, made, 2, hardware)[0] == resolved, "ds_config.json of a run is a ds_config"


def test_communication_overlaps_where_there_is_any() -> None:
    """Stage 3 gathers weights during a pass; stages 1 and 2 reduce after the last one, and nothing overlaps."""
    cases = [(3, "auto", 1, False), (3, "auto", 8, True), (2, "auto", 8, False), (1, "auto", 8, False)]
    for stage, given, world, expected in [*cases, (2, True, 8, True), (3, False, 8, False)]:
        resolved, *_ = resolve({"zero_optimization": {"stage": stage, "overlap_comm": given}}, world=world)
        assert resolved["zero_optimization"] == {"stage": stage, "overlap_comm": expected}
    assert "zero_optimization" not in resolve({})[0]


def test_torch_s_adam_is_fused_where_torch_can() -> None:
    """On CPU and CUDA, unless ds_config says otherwise; DeepSpeed's own optimizers know no such parameter."""
    for params, hardware, expected in (
        ({"torch_adam": True}, GPU, True),
        ({"torch_adam": True}, CPU, True),
        ({"torch_adam": True, "fused": False}, GPU, False),
        ({"torch_adam": True, "foreach": True}, GPU, None),
        ({"torch_adam": False}, GPU, None),
        ({}, GPU, None),
    ):
        resolved, *_ = resolve({"optimizer": {"type": "AdamW", "params": params}}, hardware=hardware)
        assert resolved["optimizer"]["params"].get("fused") is expected


def test_absence_is_auto_and_the_file_stays_as_it_is() -> None:
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto")
    spelled = sizes | {
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    }
    before = copy.deepcopy(spelled)
    assert resolve({}) == resolve(spelled) and spelled == before


@pytest.mark.parametrize(
    ("kind", "owned"),
    [
        ("WarmupDecayLR", {"total_num_steps": 1000, "warmup_num_steps": 100, "warmup_max_lr": 0.001}),
        ("WarmupLR", {"warmup_num_steps": 100, "warmup_max_lr": 0.001}),
        ("WarmupCosineLR", {"total_num_steps": 1000, "warmup_num_steps": 100}),
    ],
)
def test_schedulers_get_the_recipe_s_steps(kind: str, owned: dict[str, Any]) -> None:
    made = recipe("mlm", "train.steps=1000", "train.warmup=100", "train.lr=0.001")
    for given in ({}, dict.fromkeys(owned, "auto")):
        resolved, *_ = resolve({"scheduler": {"type": kind, "params": dict(given)}}, made)
        params = resolved["scheduler"]["params"]
        assert {key: params[key] for key in owned} == owned
        assert ("total_num_steps" in params) == (kind != "WarmupLR"), "DeepSpeed refuses parameters it does not know"
    minimum = {"scheduler": {"type": kind, "params": {"warmup_min_lr": "auto"}}}
    assert resolve(minimum, made)[0]["scheduler"]["params"]["warmup_min_lr"] == 0


def test_a_schedule_is_the_recipe_s_or_the_ds_config_s() -> None:
    for field in ("schedule=cosine", "decay=0.1"):
        name, value = field.split("=")
        with pytest.raises(UserError, match=f"scheduler = WarmupLR contradicts .*train.{name} = {value}"):
            resolve({"scheduler": {"type": "WarmupLR"}}, recipe("mlm", f"train.{field}"))


MADE = {"train.lr": "0.001", "train.weight_decay": "0.01", "train.max_grad_norm": "1.0", "train.steps": "1000"}


@pytest.mark.parametrize(
    ("section", "key", "field", "recipe_s"),
    [
        ("", "gradient_clipping", "train.max_grad_norm", "1.0"),
        ("optimizer", "lr", "train.lr", "0.001"),
        ("optimizer", "weight_decay", "train.weight_decay", "0.01"),
        ("scheduler", "total_num_steps", "train.steps", "1000"),
        ("scheduler", "warmup_num_steps", "train.warmup", "100"),
        ("scheduler", "warmup_max_lr", "train.lr", "0.001"),
    ],
)
def test_a_contradiction_names_both(section: str, key: str, field: str, recipe_s: str) -> None:
    kind = {"optimizer": "AdamW", "scheduler": "WarmupDecayLR"}.get(section, "")
    config: dict[str, Any] = {section: {"type": kind, "params": {key: 5}}} if section else {key: 5}
    with pytest.raises(UserError) as error:
        resolve(config, recipe("mlm", *(f"{k}={v}" for k, v in MADE.items()), "train.warmup=100"))
    first, line = str(error.value).splitlines()
    where = f"{section}.params." * bool(section)
    assert (
        "X.json" in first and f"{where}{key} = 5 " in line and field in line and f' = {recipe_s}. Write "auto"' in line
    )


def test_the_same_value_is_no_contradiction() -> None:
    made = recipe("mlm", *(f"{k}={v}" for k, v in MADE.items()), "train.warmup=100")
    config = {
        "gradient_clipping": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.98]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1e-3}},
        "fp16": {"enabled": False},
    }
    resolved, precision, _ = resolve(config, made)
    assert precision == "fp32" and resolved["optimizer"]["params"]["betas"] == [0.9, 0.98]
    with pytest.raises(UserError, match=r"gradient_clipping = True contradicts"):  # though True == 1
        resolve({"gradient_clipping": True}, made)


def test_all_contradictions_at_once() -> None:
    config = {"train_batch_size": 9999, "gradient_clipping": 0.5, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    with pytest.raises(UserError) as error:
        resolve(config | {"bf16": {"enabled": True}}, recipe("mlm", "train.precision=fp16"))
    assert len(str(error.value).splitlines()) == 1 + 4


# Precision: what ds_config says, what the recipe says, what the hardware has -> precision, or the error's words

ON, OFF, AUTO = {"enabled": True}, {"enabled": False}, {"enabled": "auto"}
MATRIX = [
    # auto falls back, with a line
    ({"fp16": AUTO}, "auto", GPU, "fp16"),
    ({"fp16": AUTO}, "auto", CPU_FP16, "fp16"),
    ({"fp16": AUTO}, "auto", CPU, "fp32 with a note"),
    ({"bf16": AUTO}, "auto", CPU, "bf16"),
    ({"bf16": AUTO}, "auto", OLD_CPU, "fp32 with a note"),
    ({}, "auto", GPU, "fp32"),
    ({"fp16": OFF}, "auto", GPU, "fp32"),
    # an explicit request is met or refused
    ({"fp16": ON}, "auto", GPU, "fp16"),
    ({"fp16": ON}, "auto", CPU, "error fp16 cpu"),
    ({"bf16": ON}, "auto", OLD_CPU, "error bf16 cpu"),
    ({"fp16": AUTO}, "fp16", GPU, "fp16"),
    ({"fp16": AUTO}, "fp16", CPU, "error fp16 cpu"),
    ({}, "fp16", CPU, "error fp16 cpu"),
    ({}, "fp16", GPU, "fp16"),
    ({}, "bf16", CPU, "bf16"),
    ({"fp16": AUTO}, "bf16", GPU, "bf16"),
    ({"fp16": AUTO}, "fp32", GPU, "fp32"),
    ({"fp16": ON}, "fp16", GPU, "fp16"),
    # contradictions
    ({"fp16": ON}, "fp32", GPU, "error fp16.enabled train.precision fp32"),
    ({"fp16": ON}, "bf16", GPU, "error fp16.enabled train.precision bf16"),
    ({"bf16": ON}, "fp16", GPU, "error bf16.enabled train.precision fp16"),
    ({"fp16": OFF}, "fp16", GPU, "error fp16.enabled train.precision fp16"),
    ({"fp16": {"initial_scale_power": 12}}, "fp16", GPU, "fp16"),
    ({"bf16": OFF}, "bf16", GPU, "error bf16.enabled train.precision bf16"),
    ({"fp16": ON, "bf16": ON}, "auto", GPU, "error fp16.enabled bf16.enabled"),
]


@pytest.mark.parametrize(("config", "wanted", "hardware", "expected"), MATRIX)
def test_precision(config: dict[str, Any], wanted: str, hardware: Hardware, expected: str) -> None:
    made = recipe("mlm", f"train.precision={wanted}")
    if expected.startswith("error"):
        with pytest.raises(UserError) as error:
            resolve({"zero_optimization": {"stage": 1}} | config, made, hardware=hardware)
        assert all(word in str(error.value) for word in expected.split()[1:])
        return
    resolved, precision, notes = resolve({"zero_optimization": {"stage": 1}} | config, made, hardware=hardware)
    assert precision == expected.split()[0]
    assert [("fp16" in note or "bf16" in note) and "fp32" in note for note in notes] == [True] * ("note" in expected)
    enabled = {name for name in ("fp16", "bf16") if resolved.get(name, {}).get("enabled")}
    assert enabled == {precision} - {"fp32"}


def test_unreadable_files(tmp_path: Path) -> None:
    twice = '{"zero_optimization": {"stage": 2, "stage": 1}}'
    path = tmp_path / "x.json"
    for content, words in (("{", ""), ("[]", ""), (twice, ": a field of the JSON object occurs twice: stage")):
        path.write_text(content)
        with pytest.raises(UserError, match=rf"x\.json{words}"):
            read_ds_config(path)
    path.unlink()
    with pytest.raises(UserError, match=r"x\.json"):
        read_ds_config(path)


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


WRONG_BETAS = (([0.9], r"\[0.9\]"), ([1.5, 0.999], r"\[1.5, 0.999\]"), ("x", '"x"'), (None, "null"))
WRONG = ((-1, "-1"), ("1e-8", '"1e-8"'), (True, "true"), (None, "null"))
REFUSED = [
    ({"fp61": {}}, "fp61 has no effect .*Remove the key, or use one of fp16, bf16"),
    ({"bfloat16": {"enabled": True}}, "bfloat16 has no effect .*bf16"),
    ({"gradient_cliping": 1.0}, "gradient_cliping has no effect .*gradient_clipping"),
    ({"amp": {"enabled": False}}, "amp has no effect .*Remove the key"),
    ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint .*Remove the key"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast .*Remove the key"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op .*Remove the key"),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation .*Remove the key"),
    ({"fp16": {"enabled": 1}}, "fp16.enabled: the value 1 must be true, false or"),
    ({"fp16": {"enabled": "true"}}, "fp16.enabled: the value 'true' must be true, false or"),
    ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage: the value '2' must be 0, 1, 2 or 3"),
    ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients: .*Remove the key"),
    ({"zero_optimization": 2}, "zero_optimization: the value 2 must be a JSON object"),
    ({"optimizer": {"params": {}}}, "optimizer: .* must have a string as `type`"),
    (
        {"optimizer": {"type": "Adam", "params": None}},
        "optimizer: .* a string as `type`, and a JSON object as `params`",
    ),
    ({"optimizer": {"type": "Adam", "parms": {}}}, "optimizer.parms has no effect .*use one of type, params"),
    (
        {"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 1}},
        "optimizer.type: Lamb .*Set optimizer.type to AdamW",
    ),
    (
        {"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 3}},
        "optimizer.type: Muon .*Set optimizer.type to AdamW",
    ),
    ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype has no effect"),
    (adam(eps=float("nan")), "optimizer.params.eps: NaN is not a finite number. Write a finite number"),
    (adam(betas=[0.9, float("inf")]), r"optimizer.params.betas\[1\]: Infinity is not a finite number"),
    ({"gradient_clipping": float("-inf")}, "gradient_clipping: -Infinity is not a finite number"),
    *((adam(betas=value), f"params.betas: the value {words} must be two numbers") for value, words in WRONG_BETAS),
    *((adam(eps=value), f"params.eps: the value {words} must be a number that is 0 or") for value, words in WRONG),
    (adam(lr=-1), 'params.lr: the value -1 must be a number that is 0 or more, or "auto"'),
    (adam(weight_decay="0.1"), "params.weight_decay: .* must be a number"),
    (adam(amsgrad="false"), 'params.amsgrad: the value "false" must be true, false or null'),
    (adam(torch_adam="false"), 'params.torch_adam: the value "false" must be true, false or null'),
    (adam(fused="no"), 'params.fused: the value "no" must be true, false or null'),
    (adam(maximize=True), "params.maximize: the value true must be false, because"),
    ({"optimizer": {"type": "SGD", "params": {"maximize": True}}}, "params.maximize: the value true must be false"),
    ({"steps_per_print": "x"}, 'steps_per_print: the value "x" must be a number that is 1 or more, or null'),
    ({"steps_per_print": 0}, "steps_per_print: the value 0 must be a number"),
    ({"steps_per_print": True}, "steps_per_print: the value true must be a number"),
    ({"dump_state": "x"}, 'dump_state: the value "x" must be true, false or null'),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "zzz"}}},
        'scheduler.params.warmup_type: the value "zzz" must be "log" or "linear"',
    ),
    *(
        ({"zero_optimization": {"stage": 2, key: value}}, f"zero_optimization.{key} has an effect only at ZeRO stage 3")
        for key, value in (
            ("offload_param", {"device": "cpu"}),
            ("zero_quantized_weights", True),
            ("stage3_max_reuse_distance", 100),
        )
    ),
    ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, 'zero_optimization.cpu_offload: .*"offload_optimizer"'),
]
"""DeepSpeed ignores or misreads these, or xscale does not support them."""


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_would_not_do_what_it_says(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"mine.json:\n  .*{words}"):
        read_ds_config(path)


@pytest.mark.parametrize(
    "config",
    [
        {key: {} for key in ("tensorboard", "aio", "flops_profiler", "comms_logger")},
        {"optimizer": {"type": "adam", "params": {"adam_w_mode": True, "bias_correction": True, "fused": True}}},
        {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100}}},
        {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, "zero_optimization": {"stage": 2}},
        {"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 0}},
        {"csv_monitor": {"enabled": False, "job_name": "a 7"}},
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}, "cpu_offload": None}},
        {"steps_per_print": 2000.0, "wall_clock_breakdown": None},
        adam(betas=[0, 0.98], eps=1, lr="auto", weight_decay=0, amsgrad=True, maximize=False, foreach=None),
        {"optimizer": {"type": "Adafactor", "params": {"eps": [1e-30, 1e-3]}}, "steps_per_print": None},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}, "steps_per_print": 10},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_max_reuse_distance": 100}},
    ],
)
def test_other_keys_are_left_to_deepspeed(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(config))
    assert read_ds_config(tmp_path / "mine.json") == config


CUT = r'.*train\.max_tokens.*Write "auto" here'
UNRESOLVED = [
    ({"train_micro_batch_size_per_gpu": 8}, f"train_micro_batch_size_per_gpu = 8: {CUT}"),
    ({"gradient_accumulation_steps": 4}, f"gradient_accumulation_steps = 4: {CUT}"),
    ({"train_batch_size": 65}, f"train_batch_size = 65: {CUT}"),
    (
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": 65},
        f"train_batch_size = 65: {CUT}",  # the ds_config.json of a run on 65 ranks
    ),
    # other integrations fill these; DeepSpeed itself would fail on the text much later
    (
        {"zero_optimization": {"reduce_bucket_size": "auto"}},
        r'zero_optimization is .*reduce_bucket_size.* no value for this "auto"',
    ),
    ({"fp16": {"loss_scale": "auto"}}, r'fp16 is .*loss_scale.* no value for this "auto"'),
    # what DeepSpeed says
    ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer .*dictionary.*='cpu'"),
    ({"zero_optimization": {"stage": 2, "reduce_scater": True}}, "reduce_scater"),
    ({"zero_optimization": {"stage": 7}}, "stage.*input_value=7"),
    ({"communication_data_type": "fp8"}, "communication_data_type.*fp8"),
    ({"elasticity": {}}, "'elasticity' configuration block is no longer supported"),
]


@pytest.mark.parametrize(("config", "words"), UNRESOLVED)
def test_what_cannot_be_resolved(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=rf"ds_config X\.json(.|\n)*{words}"):
        resolve(config)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "lion", "RMSprop"])
def test_an_optimizer_gets_no_parameter_that_it_does_not_take(kind: str) -> None:
    resolved, *_ = resolve({"optimizer": {"type": kind}})
    assert set(resolved["optimizer"]["params"]) == {"lr", "weight_decay"}


def test_a_resume_with_another_optimizer_is_refused() -> None:
    """DeepSpeed takes betas, eps and the loss scaler from the checkpoint, whatever its ds_config says."""

    def engine(params: dict[str, Any], **more: Any) -> Any:
        config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": params}} | more
        return resolve_ds_config(config, Path("X.json"), recipe(), 2, GPU)

    fp16 = {"enabled": True, "loss_scale_window": 500}

    def saved(config: Any) -> Checkpoint:
        return Checkpoint(Path("step_5"), 5, 2, {}, {}, {}, json.loads(json.dumps(config.settings_in_checkpoint())), {})

    checkpoint = saved(engine({"torch_adam": True}))
    check_engine_can_load(checkpoint, engine({"torch_adam": True, "fused": False, "lr": "auto"}))
    with pytest.raises(UserError, match=r"scheduler: was None, is now WarmupLR"):
        check_engine_can_load(checkpoint, engine({"torch_adam": True}, scheduler={"type": "WarmupLR"}))
    with pytest.raises(UserError, match=r"optimizer.params.betas: was \[0.9, 0.999\], is now \[0.9, 0.98\]"):
        check_engine_can_load(checkpoint, engine({"torch_adam": True, "betas": [0.9, 0.98]}))
    checkpoint = saved(engine({}, fp16=fp16))
    check_engine_can_load(checkpoint, engine({}, fp16=fp16))
    with pytest.raises(UserError, match=r"fp16.loss_scale_window: was 500, is now 100"):
        check_engine_can_load(checkpoint, engine({}, fp16=fp16 | {"loss_scale_window": 100}))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_takes_zero(precision: str) -> None:
    """At stage 0 DeepSpeed 0.19.8 forgets the loss scale in fp16, and stops in bf16."""
    with pytest.raises(UserError, match=f"{precision} .*stage 0.*stage to 1 or 2"):
        resolve({precision: {"enabled": True}})
    resolve({precision: {"enabled": True}, "zero_optimization": {"stage": 1}})
    resolve({precision: {"enabled": "auto"}}, hardware=OLD_CPU)


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    with pytest.raises(UserError, match=r"built for ROCm .* Install a PyTorch for CUDA or for CPUs"):
        Hardware.of_this_process()
