"""The run's encoder: fresh weights of a preset, or pre-trained ones."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BertConfig,
    ModernBertConfig,
    PreTrainedModel,
    XLMRobertaConfig,
)
from transformers.utils import logging as transformers_logging

from xscale import rng
from xscale.errors import UserError
from xscale.files import may_be_there
from xscale.models.encoder import Encoder
from xscale.models.flat import first_position

transformers_logging.disable_progress_bar()

LOG = logging.getLogger("xscale")

NEUTRAL = "neutral"
"""What token type 0 is for in a list of a model's languages: for text in one that it does not know, or that nobody has
named. Languages follow from 1 on."""

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "small": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "xlmr-base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "modern-small": {"num_hidden_layers": 22, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1152},
    "modern-base": {"num_hidden_layers": 22, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 1152},
}
"""Shapes of fresh models; V is the tokenizer's. tiny, mini, small and base are BERT's of Turc et al. (2019, small with
8 layers), xlmr-base is XLM-R's (Conneau et al. 2020), modern-* are mmBERT's (Marone et al. 2025)."""


def load_pretrained(init: str | Path, dropout: float) -> PreTrainedModel:
    """Of `model.init`: weights of a Hugging Face directory or hub name, fp32. Raises UserError."""
    lm, has_head = read_pretrained("model.init", init, dropout)
    if not has_head:
        LOG.warning(f"model.init {init} has no masked-LM head; it starts from random weights")
    return lm


def read_pretrained(named: str, init: str | Path, dropout: float | None = None) -> tuple[PreTrainedModel, bool]:
    """Weights, fp32, and whether a masked-LM head is among them. named: what gave `init`, for errors; dropout: another
    one than the config's. Raises UserError."""
    if not may_be_there(init):
        raise UserError(f"{named} {init} does not exist")
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what it says of weights that are missing is said here
    try:
        config = AutoConfig.from_pretrained(init, trust_remote_code=False)
        if dropout is not None:
            config.update(dropout_fields(config.model_type, dropout))
        lm, loaded = AutoModelForMaskedLM.from_pretrained(
            init, config=config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # of what the files hold
        nowhere = "" if Path(init).exists() else f"there is no such folder in {Path.cwd()}, and of the hub: "
        raise UserError(
            f"{named} {init} cannot be loaded ({nowhere}{' '.join(str(error).split())[:300]}). Give a Hugging Face "
            f"directory with weights, a run of xscale, or a hub name on a machine that reaches the hub"
        ) from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    body = f"{lm.base_model_prefix}."
    absent = sorted(name for name in loaded["missing_keys"] if name.startswith(body) and "position_ids" not in name)
    if absent:
        raise UserError(
            f"{named} {init} has no weights for {len(absent)} of its encoder's parameters, such as {absent[0]}: its "
            f"config.json describes another model than its weights are of"
        )
    run_fields(lm.config, f"{named} {init}")
    settle_neutral(lm)
    infinite = next((name for name, weight in lm.named_parameters() if not weight.isfinite().all()), None)
    if infinite:
        raise UserError(f"{named} {init}: not all weights of {infinite} are finite; take an earlier checkpoint of it")
    return lm, not loaded["missing_keys"]


def build_encoder(
    *,
    init: str | None,
    preset: str,
    dropout: float,
    max_length: int,
    vocab_size: int,
    pad_id: int,
    languages: list[str],
    language_embeddings: bool,
    reset_positions: bool,
    seed: int,
    segments: bool = False,
    neutral_trained: bool = True,
    attention_gain: float | None = None,
    load: Callable[[str | Path, float], PreTrainedModel] = load_pretrained,
) -> Encoder:
    """The run's encoder: pre-trained weights of `init`, or random weights of `preset`. Raises UserError.

    languages: names in the order of their numbers, which begin with 1. With `language_embeddings` the token-type table
    has row 0, which is neutral, a row for each, and then rows for those that `init` had besides. These,
    `reset_positions`, `segments` and `neutral_trained` (whether the run trains row 0) are kept in the model's config as
    `xscale`, for whoever feeds it later.
    """
    trained = {
        "languages": [NEUTRAL, *languages],
        "language_embeddings": language_embeddings,
        "neutral_trained": neutral_trained,
        "reset_positions": reset_positions,
        "segments": segments,
    }
    torch.manual_seed(rng.torch_seed(seed, "model"))
    if init is None:
        config = preset_config(preset, vocab_size, pad_id, max_length, dropout)
        if language_embeddings:
            config.type_vocab_size = max(_token_types(config), 1 + len(languages))
        config.xscale = trained
        fresh = AutoModelForMaskedLM.from_config(config)
        if attention_gain is not None:
            draw_attention(fresh.base_model, attention_gain)
        return Encoder(fresh)
    lm = load(init, dropout)
    rows = lm.config.vocab_size
    if vocab_size > rows:
        raise UserError(
            f"the tokenizer has {vocab_size:,} ids, model.init {init} has embeddings for {rows:,}; set "
            f"model.tokenizer to the tokenizer that the model was trained with"
        )
    limit = positions(lm.config)
    if max_length > limit:
        raise UserError(f"data.max_length {max_length} exceeds the {limit} positions of model.init {init}")
    lm.config.xscale = trained | {"languages": [NEUTRAL, *_take_languages(lm, languages, language_embeddings)]}
    return Encoder(lm)


def draw_attention(base: PreTrainedModel, gain: float) -> None:
    """Draws the weights of attention's values and outputs anew, with a deviation of gain / sqrt(width): a map of gain 1
    keeps the size of what it reads."""
    width = base.config.hidden_size
    for name, weight in base.named_parameters():
        for end, first in _VALUES_AND_OUTPUTS.items():
            if name.endswith(end):
                nn.init.normal_(weight.detach()[first * width :], std=gain * width**-0.5)


_VALUES_AND_OUTPUTS = {
    "attention.self.value.weight": 0,
    "attention.output.dense.weight": 0,
    "attn.Wqkv.weight": 2,
    "attn.Wo.weight": 0,
}
"""End of a weight's name, in layers of BERT and XLM-R and of ModernBERT -> at how many widths the rows meant begin."""


def positions(config: Any) -> int:
    """Tokens of the longest sequence that the model takes."""
    return config.max_position_embeddings - first_position(config)


def preset_config(preset: str, vocab_size: int, pad_id: int, max_length: int, dropout: float) -> Any:
    shape = PRESETS[preset] | {"vocab_size": vocab_size, "pad_token_id": pad_id}
    if preset.startswith("modern"):
        shape |= dropout_fields("modernbert", dropout)
        shape |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
        theta = {"rope_type": "default", "rope_theta": 160_000.0}
        shape["rope_parameters"] = {"full_attention": theta, "sliding_attention": dict(theta)}
        return ModernBertConfig(**shape, max_position_embeddings=max(8192, max_length), local_attention=128)
    shape |= dropout_fields("bert", dropout)
    if preset in ("small", "xlmr-base"):
        positions = max(512, max_length) + pad_id + 1
        return XLMRobertaConfig(**shape, max_position_embeddings=positions, type_vocab_size=1, layer_norm_eps=1e-5)
    return BertConfig(**shape, max_position_embeddings=max(512, max_length))


def dropout_fields(model_type: str, dropout: float) -> dict[str, float]:
    if model_type == "distilbert":
        return {"dropout": dropout, "attention_dropout": dropout}
    if model_type == "modernbert":
        return {"embedding_dropout": dropout, "attention_dropout": dropout, "mlp_dropout": dropout}
    return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


def has_segments(init: str | Path | None, preset: str) -> bool:
    """Whether the model has token types for the two sentences of a pair; False where `init` cannot be read."""
    if init is None:
        return preset_config(preset, 8, 0, 8, 0.0).model_type == "bert"
    return getattr(_config_of(init), "type_vocab_size", 0) > 1 and not trained_as(init).get(
        "language_embeddings", False
    )


def trained_as(init: str | Path | None) -> dict[str, Any]:
    """run_fields of `model.init`."""
    return run_fields(_config_of(init), f"model.init {init}") if init else {}


def run_fields(config: Any, named: str) -> dict[str, Any]:
    """What a run of xscale has written of itself into its model's config; named: where that is, for errors."""
    found = getattr(config, "xscale", None) or {}
    kinds: dict[str, Any] = {"languages": list, "lexicon_heldout": (int, float)}
    kinds |= dict.fromkeys(("language_embeddings", "neutral_trained", "segments", "reset_positions"), bool)
    if not isinstance(found, dict) or any(
        not isinstance(value, kinds.get(name, object)) for name, value in found.items()
    ):
        raise UserError(f"{named}: `xscale` in its config.json is not what a run writes; export the run again")
    if not all(isinstance(language, str) for language in found.get("languages", [])):
        raise UserError(f"{named}: `xscale` in its config.json has languages without a name; export the run again")
    return found


def _config_of(init: str | Path) -> Any:
    """None where the config cannot be read: whoever loads the weights says so."""
    try:
        return AutoConfig.from_pretrained(init, trust_remote_code=False)
    except Exception:
        return None


def _token_types(config: Any) -> int:
    rows = getattr(config, "type_vocab_size", 0)
    if not rows:
        raise UserError(
            f"a {config.model_type} model has no token types to hold language embeddings; set "
            f"streams.NAME.language_embeddings=false for each stream that has them"
        )
    return rows


def settle_neutral(lm: PreTrainedModel) -> None:
    """Makes token type 0 of a model with language embeddings the mean of its languages, where its run has not trained
    it. In a run from before there was a neutral row, languages are counted from 0: they move up by one."""
    fields = getattr(lm.config, "xscale", None) or {}
    names = fields.get("languages", [])
    older = names[:1] != [NEUTRAL]
    if not fields.get("language_embeddings") or (not older and fields.get("neutral_trained")):
        return
    names = [NEUTRAL, *names] if older else names
    own = _type_table(lm)[0 if older else 1 :][: len(names) - 1]
    lm.config.xscale = fields | {"languages": names}
    _set_type_table(lm, torch.cat([own.mean(0, keepdim=True), own]))


def _type_table(lm: PreTrainedModel) -> torch.Tensor:
    embeddings: Any = lm.base_model.embeddings
    return embeddings.token_type_embeddings.weight.detach()


def _set_type_table(lm: PreTrainedModel, table: torch.Tensor) -> None:
    embeddings: Any = lm.base_model.embeddings
    embeddings.token_type_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
    lm.config.type_vocab_size = len(table)


def _take_languages(lm: PreTrainedModel, languages: list[str], wanted: bool) -> list[str]:
    """Gives the languages of a run rows of the loaded model's token-type table, where they are `wanted`. Returns all
    languages that have one, in their order.

    Those of the run that the model comes from keep theirs, by name. New ones start as row 0: the neutral one, or what
    a model without language embeddings gives to single sentences. Where they are not wanted any more, it stands in
    every row.
    """
    before = getattr(lm.config, "xscale", None) or {}
    known: list[str] = before["languages"][1:] if before.get("language_embeddings") else []
    if not known and not wanted:
        return languages
    names = [*languages, *(name for name in known if name not in languages)]
    old = _type_table(lm)
    table = old[0].repeat(max(_token_types(lm.config), 1 + len(names)), 1)
    if not wanted:
        LOG.warning(
            f"model.init has embeddings of {', '.join(known)}, and no stream of this run has language_embeddings: "
            f"the neutral one takes the place of each"
        )
    elif known:
        for number, name in enumerate(known, start=1):
            table[1 + names.index(name)] = old[number]
        new = [name for name in languages if name not in known]
        LOG.info(
            f"language embeddings of model.init: {', '.join(known)}; new, as the neutral one: "
            f"{', '.join(new) or 'none'}"
        )
    _set_type_table(lm, table)
    return names if wanted else languages


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay: none on biases, norms and other vectors."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
