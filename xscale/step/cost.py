"""The costs of a run: the memory of a rank by ZeRO stage, the size of a checkpoint, and the FLOPs of a step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from xscale.data.loader import GPU_TOKENS
from xscale.models.encoder import Encoder
from xscale.models.flat import bert_states, choose_forward_pass, modernbert_states
from xscale.ops.masked_ce import BLOCK, max_predictions_of_chunk
from xscale.recipe import Recipe
from xscale.step.module import StepModule
from xscale.step.zero import offloads_optimizer, zero_stage

WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Precision -> the bytes of one number."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "B200": 2250e12}
"""Part of a GPU's name -> its dense 16-bit matrix FLOP/s by its data sheet, for MFU (model FLOPs utilization)."""


READ_SHARE = 0.4
"""The share of a row's tokens whose states losses read, in estimates without a row: 0.15 in `tlm`, 0.37 in `mixed`."""
PROGRAM_BYTES = 0.55e9
"""The memory of Python and its libraries in a process. A GPU's memory does not hold them."""
TOKENIZER_BYTES = 3200
"""The memory of a tokenizer for each of its ids: XLM-R's tokenizer takes 0.8 GB."""
GPU_SHARE = 0.6
"""The share of a GPU's memory that a step may take with the default of train.max_tokens. The rest is for fragments and
for libraries."""
LEAST_TOKENS = 4096
"""The lowest default of train.max_tokens on a GPU, however small its memory is."""
UNCOUNTED_TOKENS = 16384
"""The highest default for models that read padded sequences, and for attention without a flash kernel."""
ROUNDED = 1024
"""The default is a multiple of this number, so that it is the same on GPUs of the same kind."""


def default_max_tokens(
    module: StepModule, recipe: Recipe, ds_config: dict[str, Any], precision: str, world: int, gpu_bytes: float
) -> int:
    """Return the default of train.max_tokens by the memory of a GPU, gpu_bytes."""
    per_token = activation_bytes(module.encoder, WIDTH[precision], "cuda", typical_row_cost_without_attention(1))
    only_head = typical_row_cost_without_attention(GPU_TOKENS) | {"tokens": 0, "places": 0}
    states = sum(peak_bytes_by_purpose(module, recipe, ds_config, precision, world, "cuda", only_head).values())
    # activation_bytes counts neither padding nor attention weights, which these models and GPUs keep.
    is_padded = choose_forward_pass(module.encoder.lm.config) not in (bert_states, modernbert_states)
    keeps_blocks = precision == "fp32" or (torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0))
    most = UNCOUNTED_TOKENS if is_padded or keeps_blocks else GPU_TOKENS
    fitting = int((GPU_SHARE * gpu_bytes - states) / per_token)
    return max(min(fitting, most) // ROUNDED * ROUNDED, LEAST_TOKENS)


def typical_row_cost_without_attention(tokens: int) -> dict[str, float]:
    """Return the Row.cost of a row of which losses read and predict the share READ_SHARE, without attention's part."""
    read = READ_SHARE * tokens
    return {"tokens": tokens, "places": read, "predictions": read, "squares": 0}


def peak_bytes_by_purpose(
    module: StepModule,
    recipe: Recipe,
    ds_config: dict[str, Any],
    precision: str,
    world: int,
    device: str,
    cost_of_largest_row: Mapping[str, float],
) -> dict[str, float]:
    """Return the bytes that one rank needs at the peak of a step: purpose -> bytes. cost_of_largest_row: a
    Row.cost.

    Weights, gradients and optimizer states follow Rajbhandari et al. 2020. But until the one reduction of a step, each
    rank holds all of its gradients at stages 2 and 3, too; stages 1 and 2 reduce them in place, and need buckets only
    with an optimizer in host memory, without reduce_scatter, or if gradients are summed in fp32 beside fp16 weights.
    The gradient of a stream is measured before the gradients of the step exist, so that only the larger ones of the two
    count.
    """
    n = parameter_count(module)
    width = WIDTH[precision]
    zero = ds_config.get("zero_optimization", {})
    stage = zero_stage(ds_config)
    sums_in_fp32 = stage == 1 and width == 2 and ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    states = {"weights": width * n / (world if stage >= 3 else 1)}
    if not offloads_optimizer(ds_config):
        master = 0 if precision == "fp32" and stage == 0 else 4
        states["optimizer"] = (master + 8) * n / (world if stage >= 1 else 1)
    if sums_in_fp32 and precision == "bf16":  # DeepSpeed's BF16_Optimizer
        states["fp32 gradients"] = 4 * n
    elif stage in (1, 2) and (offloads_optimizer(ds_config) or sums_in_fp32 or not zero.get("reduce_scatter", True)):
        bucket = zero.get("reduce_bucket_size", 5e8)
        if device == "cpu":  # pages that are never touched take no memory
            bucket = min(bucket, n)
        states["gradient buckets"] = width * bucket * (2 if zero.get("overlap_comm") else 1)
    if module.auxiliary_states:  # fp32, and a copy in the precision of the weights unless that is fp32
        states["objectives' encoder copies and vector queues"] = module.auxiliary_bytes() * (1 if width == 4 else 1.5)
    if device == "cpu":
        states["program and tokenizer"] = PROGRAM_BYTES + TOKENIZER_BYTES * module.encoder.lm.config.vocab_size
    states["activations"] = activation_bytes(module.encoder, width, device, cost_of_largest_row)
    c = module.encoder.lm.config
    if choose_forward_pass(c) is bert_states and stage < 3:  # _project_qkv in models/flat.py
        states["copies of attention weights"] = 3 * width * c.hidden_size**2 * c.num_hidden_layers
    predictions = cost_of_largest_row["predictions"]
    states["vocabulary head"] = vocabulary_head_bytes(module.encoder, width, device, predictions)
    if stage >= 3:
        return states | {"gradients": width * n / world, "unreduced gradients": width * n}
    if recipe.train.measure_every:
        return states | {"gradient of one stream (train.measure_every)": (4 + width) * n}
    return states | {"gradients": width * n}


def parameter_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def activation_bytes(encoder: Encoder, bytes_of_number: int, device: str, row_cost: Mapping[str, float]) -> float:
    """Return the bytes that a packed row's forward pass keeps for its backward pass.

    For each token, a layer keeps 9 H + 2 F numbers, where F is the width of the feed-forward layer (4 F if it has a
    gate), and two dropout masks of H elements (with a gate: H and F). That is about 34 H bytes at 16 bits (Korthikanti
    et al. 2022, without attention's probabilities). On a CPU, an element of a mask takes as much as a number, and
    attention keeps its probabilities twice. Behind its attention, the last layer keeps the tokens alone that losses
    read. The embeddings keep the input of their norm and a dropout mask.
    """
    c = encoder.lm.config
    masks = 2 * c.hidden_size
    feed_forward = 2 * c.intermediate_size
    if c.model_type == "modernbert":  # its feed-forward layer has a gate
        masks = c.hidden_size + c.intermediate_size
        feed_forward = 4 * c.intermediate_size
    layer = row_cost["tokens"] * bytes_of_number * (9 * c.hidden_size + feed_forward)
    if device == "cpu":
        layer += bytes_of_number * (row_cost["tokens"] * masks + 2 * c.num_attention_heads * row_cost["squares"])
    else:
        layer += row_cost["tokens"] * masks
    skipped = 0.0
    if linears_after_last_attention(encoder):
        behind_attention = bytes_of_number * (4 * c.hidden_size + feed_forward)
        skipped = behind_attention * (row_cost["tokens"] - row_cost["places"])
    embeddings = 2 * bytes_of_number * row_cost["tokens"] * c.hidden_size
    return embeddings + c.num_hidden_layers * layer - skipped


def vocabulary_head_bytes(encoder: Encoder, bytes_of_number: int, device: str, predictions: float) -> float:
    """Return the bytes of a chunk of logits, of a block of fp32 probabilities on a CPU, of the head weight's gradient
    in fp32 and, if it has 16 bits, in these, and of the five states of each prediction in the head: the head's input,
    the outputs of its three parts and a gradient. predictions: those of a row."""
    c = encoder.lm.config
    rows = min(max_predictions_of_chunk(device, c.vocab_size, bytes_of_number), predictions)
    logits = rows * bytes_of_number
    if device == "cpu":
        logits += 4 * min(BLOCK, rows)
    narrow = bytes_of_number if bytes_of_number < 4 else 0
    states = 5 * predictions * bytes_of_number * c.hidden_size
    return states + c.vocab_size * (logits + c.hidden_size * (4 + narrow))


def gpu_peak_flops_per_second() -> float | None:
    """Return the peak FLOP/s of this process's GPU; None for a CPU or an unknown GPU."""
    if torch.cuda.is_available():
        for device, flops in PEAK_FLOPS.items():
            if device in torch.cuda.get_device_name():
                return flops
    return None


def linears_after_last_attention(encoder: Encoder) -> list[nn.Linear]:
    """Return the linear layers behind the last layer's attention, if the encoder's forward pass skips tokens there."""
    base: Any = encoder.lm.base_model
    forward_pass = choose_forward_pass(encoder.lm.config)
    if forward_pass is bert_states:
        last = base.encoder.layer[-1]
        return [last.attention.output.dense, last.intermediate.dense, last.output.dense]
    if forward_pass is modernbert_states:
        last = base.layers[-1]
        return [last.attn.Wo, last.mlp.Wi, last.mlp.Wo]
    return []


class StepFlops:
    """The model FLOPs of a step, by purpose. Recomputation and padding are not counted.

    encoder: 6 n for each token, where n is the number of weights in linear layers. Linear layers after the last
    attention count only for the tokens whose states are read.
    attention: 12 H (H: hidden width) for each layer and each pair of tokens in a sequence. Local layers count only the
    pairs within their window.
    head: 6 E (V + H) for each predicted token, with V tokens in the vocabulary and embeddings of width E.
    auxiliary: a third of encoder and attention for the tokens that auxiliary encoders read, since these encoders have
    no backward pass.
    vectors: a third of encoder and attention, for the additional forward pass of objectives that compare the samples of
    a whole step. A step with only one row has no such pass.
    The objectives' own heads are small and left out.
    """

    def __init__(self, encoder: Encoder, has_vectors: bool = False):
        """has_vectors: whether each of several rows has one more forward pass (StepModule.streams_with_vectors)."""
        config = encoder.lm.config
        weights = 0
        for module in encoder.lm.base_model.modules():
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.per_place = 0
        for linear in linears_after_last_attention(encoder):
            self.per_place += 6 * linear.weight.numel()
        self.per_token = 6 * weights - self.per_place
        self.per_pair = 12 * config.hidden_size
        self.local = kinds.count("sliding_attention")
        self.whole = len(kinds) - self.local
        self.window = config.local_attention // 2 if self.local else 0
        self.per_prediction = 6 * (encoder.embeddings.numel() + encoder.head.dense.weight.numel())
        self.has_vectors = has_vectors
        self.peak = gpu_peak_flops_per_second()

    def flops_by_purpose(self, cost: Mapping[str, int], row_count: int) -> dict[str, float]:
        """Return the model FLOPs of a step by purpose. cost: the sum of Row.cost over all packed rows. row_count: the
        number of packed rows on all ranks."""
        auxiliary = self.encoder_training_flops(
            cost["auxiliary_tokens"], cost["auxiliary_places"], cost["auxiliary_squares"]
        )
        encoder = float(self.per_token * cost["tokens"] + self.per_place * cost["places"])
        attention = self.attention_flops(cost["tokens"], cost["squares"])
        return {
            "encoder": encoder,
            "attention": attention,
            "head": self.per_prediction * cost["predictions"],
            "auxiliary": auxiliary / 3,
            "vectors": (encoder + attention) / 3 if self.has_vectors and row_count > 1 else 0.0,
        }

    def encoder_training_flops(self, tokens: int, read_tokens: int, squared_lengths: int) -> float:
        """Return the FLOPs of the forward and backward pass. read_tokens: the tokens whose states losses read.
        squared_lengths: the sum of squared sequence lengths."""
        linear = float(self.per_token * tokens + self.per_place * read_tokens)
        return linear + self.attention_flops(tokens, squared_lengths)

    def attention_flops(self, tokens: int, squared_lengths: int) -> float:
        """Return the FLOPs of attention. For layers with a sliding window, every sequence is assumed to have the
        token-weighted mean length, squared_lengths / tokens. squared_lengths: the sum of squared sequence lengths."""
        length = squared_lengths / max(tokens, 1)
        window = self.window
        within = 2 * window + 1 - window * (window + 1) / max(length, 1)
        if length <= window + 1:
            within = length
        return self.per_pair * (self.whole * squared_lengths + self.local * tokens * within)

    def mfu_and_gpu_memory_metrics(
        self, cost: Mapping[str, int], row_count: int, seconds: float, world: int
    ) -> dict[str, float]:
        """Return the metrics mfu and mem_gb of a step, if there is a GPU. cost, row_count: see `flops_by_purpose`."""
        if not torch.cuda.is_available():
            return {}
        metrics = {"mem_gb": torch.cuda.max_memory_allocated() / 1e9}
        if self.peak:
            flops = sum(self.flops_by_purpose(cost, row_count).values())
            metrics["mfu"] = flops / (max(seconds, 1e-9) * self.peak * world)
        return metrics
