"""Builds the run's encoder, from a preset with random weights or from a pre-trained model."""

from collections.abc import Callable, Collection
from contextlib import suppress
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
from xscale.data.corpus import Corpus
from xscale.data.scripts import find_exact_name_or_spellings
from xscale.errors import LOG, UserError
from xscale.files import describe_empty_or_placeholder, exists_or_is_hub_name
from xscale.models.encoder import Encoder
from xscale.models.flat import first_position_id
from xscale.recipe import Recipe

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # missing weights are reported below


NEUTRAL = "neutral"
"""The name of token type 0, which text in an unknown language gets. The languages have the token types from 1 on."""
XSCALE_FIELD: dict[str, Any] = {
    "languages": list,
    "language_embeddings": bool,
    "neutral_trained": bool,
    "reset_positions": bool,
    "segments": bool,
    "lexicon_heldout": int | float,
}
"""The keys of the field `xscale` in a model's config, with the types of their values."""

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "small": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "xlmr-base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "modern-small": {"num_hidden_layers": 22, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1152},
    "modern-base": {"num_hidden_layers": 22, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 1152},
}
"""The shapes of models with random weights. The vocabulary has the tokenizer's size. tiny, mini, small and base are
BERT's shapes of Turc et al. (2019; small has 8 layers), xlmr-base is XLM-R's (Conneau et al. 2020), modern-* are
mmBERT's (Marone et al. 2025)."""


BERT_DROPOUT_FIELDS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
DROPOUT_FIELDS = {
    "distilbert": ("dropout", "attention_dropout"),
    "modernbert": ("embedding_dropout", "attention_dropout", "mlp_dropout"),
}
"""{type of a model: the fields of its config with dropout probabilities}. Other types have BERT's fields."""


def read_model_and_has_trained_head(
    init: str | Path, dropout: float | None = None, field: str = "model.init"
) -> tuple[PreTrainedModel, bool]:
    """Return the model of `init` in fp32, and whether it has a trained masked-LM head. Raises UserError.

    field: the recipe field or flag that named `init`, for errors. dropout: replaces the dropout of the model's config.
    """
    if not exists_or_is_hub_name(init):
        raise UserError(
            f"{field} {init} does not exist. Use a Hugging Face directory, a run of xscale or a model on the "
            "Hugging Face Hub"
        )
    try:
        config = AutoConfig.from_pretrained(init, trust_remote_code=False)
        if dropout is not None:
            config.update(dropout_fields(config.model_type, dropout))
        lm, loaded = AutoModelForMaskedLM.from_pretrained(
            init, config=config, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    except Exception as error:  # damaged files raise many types
        pointer = describe_empty_or_placeholder(Path(init), "config.json", "*.safetensors", "*.bin", "*.index.json")
        if pointer:
            raise UserError(f"{field} {init} cannot be loaded: {pointer}") from None
        raise UserError(
            f"{field} {init} cannot be loaded from {Path.cwd() / init} or from the Hugging Face Hub "
            f"({' '.join(str(error).split())[:300]}). Use a Hugging Face directory with weights or a run of "
            "xscale. A model on the hub can be used only if this machine can connect to the hub"
        ) from None
    body = f"{lm.base_model_prefix}."
    absent = sorted(name for name in loaded["missing_keys"] if name.startswith(body) and "position_ids" not in name)
    if absent:
        raise UserError(
            f"{field} {init} has no weights for parameters of the encoder ({len(absent)}), such as {absent[0]}: "
            "config.json and the weights belong to different models. Save or download the model again"
        )
    read_xscale_field(lm.config, f"{field} {init}")
    set_untrained_neutral_type_to_mean(lm)
    for name, weight in lm.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"{field} {init}: the parameter {name} has weights that are not finite. Use an earlier checkpoint"
            )
    return lm, not loaded["missing_keys"]


def load_pretrained(init: str | Path, dropout: float) -> PreTrainedModel:
    """Return the model of `model.init` in fp32, from a Hugging Face directory or hub name. Raises UserError."""
    return read_model_and_has_trained_head(init, dropout)[0]


def has_untrained_head(lm: PreTrainedModel) -> bool:
    """Return whether the masked-LM head has random weights. Transformers makes such a head for a model without one, and
    saves it with the model. Its vectors, such as biases and norms, still have their first values: equal numbers."""
    for name, weight in lm.named_parameters():
        in_body = name.startswith(f"{lm.base_model_prefix}.")
        if not in_body and weight.ndim == 1 and (weight != weight[0]).any():
            return False
    return True


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
    """Return the run's encoder: the pre-trained model `init`, or random weights of `preset`. Raises UserError.

    languages: in the order of their token types, which start at 1. With `language_embeddings` the token-type table has
    the neutral row 0, a row for each language, and rows for further languages of `init`. The config's field `xscale`
    keeps the languages, `language_embeddings`, `reset_positions`, `segments` and `neutral_trained` (whether the run
    trains row 0) for programs that load the model later.
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
            config.type_vocab_size = max(_require_token_type_count(config), 1 + len(languages))
        config.xscale = trained
        fresh = AutoModelForMaskedLM.from_config(config)
        if attention_gain is not None:
            redraw_value_and_output_weights(fresh.base_model, attention_gain)
        return Encoder(fresh, has_new_head=True)
    lm = load(init, dropout)
    has_new_head = has_untrained_head(lm)
    if has_new_head:
        LOG.warning(f"model.init {init} has no trained masked-LM head, so the head starts from random weights")
    rows = lm.config.vocab_size
    if vocab_size > rows:
        raise UserError(
            f"the tokenizer has {vocab_size:,} tokens, but model.init {init} has only {rows:,} embeddings. Set "
            "model.tokenizer to the tokenizer that the model was trained with"
        )
    limit = max_sequence_tokens(lm.config)
    if max_length > limit:
        raise UserError(
            f"data.max_length {max_length} is too large: model.init {init} can read sequences of at most {limit} "
            f"tokens. Set data.max_length to {limit} or less"
        )
    lm.config.xscale = trained | {
        "languages": [NEUTRAL, *_initialize_language_embeddings(lm, languages, language_embeddings)]
    }
    return Encoder(lm, has_new_head)


def build_initial_encoder(
    recipe: Recipe, corpus: Corpus, load: Callable[[str | Path, float], PreTrainedModel]
) -> Encoder:
    """Return a run's encoder with the weights of step 0. load: loads model.init, which may also be a run."""
    model = recipe.model
    first = recipe.at(0).model
    assert model.dropout is not None and first.dropout is not None  # run/resolve.py resolve_run
    encoder = build_encoder(
        init=model.init,
        preset=model.preset,
        dropout=model.dropout,
        attention_gain=model.attention_gain,
        max_length=max(phase.data.max_length for phase in recipe.schedule.values),
        vocab_size=corpus.tokenizer.vocab_size,
        pad_id=corpus.tokenizer.pad_id,
        languages=corpus.languages,
        language_embeddings=recipe.any_stream_sets("language_embeddings"),
        reset_positions=recipe.any_stream_sets("reset_positions"),
        segments=corpus.has_two_token_types,
        neutral_trained=recipe.has_sequences_without_language(),
        seed=recipe.train.seed,
        load=load,
    )
    # For eval/alignment_score.py. Without `corpus.lexicons`, no objective of this run reads a dictionary.
    encoder.lm.config.xscale["lexicon_heldout"] = corpus.unseen if corpus.lexicons else corpus.withheld_before
    encoder.set_dropout_unless_none(first.dropout)  # the prefill of a queue precedes the first step
    return encoder


def redraw_value_and_output_weights(base: PreTrainedModel, gain: float) -> None:
    """Replace the attention's value and output weights by random ones with standard deviation gain / sqrt(width).

    With a gain of 1, the outputs of these layers are about as large as their inputs.
    """
    width = base.config.hidden_size
    ends = ("self.value.weight", "attention.output.dense.weight", "attn.Wo.weight")
    for name, weight in base.named_parameters():
        if name.endswith(ends):
            nn.init.normal_(weight.detach(), std=gain * width**-0.5)
        elif name.endswith("attn.Wqkv.weight"):  # in ModernBERT, one weight has queries, keys and values, in this order
            nn.init.normal_(weight.detach()[2 * width :], std=gain * width**-0.5)


def max_sequence_tokens(config: Any) -> int:
    """Return the maximum number of tokens of a sequence that the model accepts."""
    return config.max_position_embeddings - first_position_id(config)


def preset_config(preset: str, vocab_size: int, pad_id: int, max_length: int, dropout: float) -> Any:
    """Return the Hugging Face config of a preset. max_length: the tokens of a sequence, for which it has positions."""
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
    """Return the config's fields, by name, that give all layers this dropout probability."""
    return dict.fromkeys(DROPOUT_FIELDS.get(model_type, BERT_DROPOUT_FIELDS), dropout)


def read_hidden_dropout_or_default(init: str | Path | None) -> float:
    """Return the dropout of the hidden states that the config of `model.init` has, or 0.1 if it has none."""
    config = _read_config_or_none(init) if init else None
    names = dropout_fields(getattr(config, "model_type", ""), 0.0)
    return float(getattr(config, next(iter(names)), 0.1))


def has_segment_embeddings(init: str | Path | None, preset: str) -> bool:
    """Return whether the model has token types for the two sentences of a pair; False if `init` cannot be read."""
    if init is None:
        return preset_config(preset, 8, 0, 8, 0.0).model_type == "bert"
    return getattr(_read_config_or_none(init), "type_vocab_size", 0) > 1 and not xscale_field_of_init(init).get(
        "language_embeddings"
    )


def xscale_field_of_init(init: str | Path | None) -> dict[str, Any]:
    """Return the field `xscale` of the config of `model.init`, or {} if `init` is None."""
    return read_xscale_field(_read_config_or_none(init), f"model.init {init}") if init else {}


def read_xscale_field(config: Any, model_name: str) -> dict[str, Any]:
    """Return the field `xscale` of a model's config, which build_encoder writes, or {} if there is none. model_name:
    the model's name for errors. Raises UserError if the field is damaged."""
    fields = getattr(config, "xscale", None) or {}
    is_sound = isinstance(fields, dict) and all(
        isinstance(value, XSCALE_FIELD.get(name, object)) for name, value in fields.items()
    )
    if not is_sound or not all(isinstance(language, str) for language in fields.get("languages", [])):
        raise UserError(f"{model_name}: the field `xscale` in config.json is damaged. Export the run again")
    if fields.get("language_embeddings") and fields.get("languages", [])[:1] != [NEUTRAL]:
        raise UserError(
            f"{model_name}: the model was exported by an old version of xscale, whose language embeddings this "
            "version cannot read. Train the model again"
        )
    return fields


def _read_config_or_none(init: str | Path) -> Any:
    """Return the config, or None if it cannot be read. An error is reported later, when the weights are loaded."""
    with suppress(Exception):
        return AutoConfig.from_pretrained(init, trust_remote_code=False)


def _require_token_type_count(config: Any) -> int:
    count = getattr(config, "type_vocab_size", 0)
    if not count:
        raise UserError(
            f"language embeddings need token types, and a {config.model_type} model has none. Set "
            "streams.NAME.language_embeddings=false for each stream"
        )
    return count


def set_untrained_neutral_type_to_mean(lm: PreTrainedModel) -> None:
    """Set the embedding of token type 0 to the mean of the languages' embeddings, unless the run has trained token type
    0."""
    fields = getattr(lm.config, "xscale", None) or {}
    if fields.get("language_embeddings") and not fields.get("neutral_trained"):
        language_rows = _token_type_table(lm)[1 : len(fields["languages"])]
        _set_token_type_table(lm, torch.cat([language_rows.mean(0, keepdim=True), language_rows]))


def _token_type_table(lm: PreTrainedModel) -> torch.Tensor:
    embeddings: Any = lm.base_model.embeddings
    return embeddings.token_type_embeddings.weight.detach()


def _set_token_type_table(lm: PreTrainedModel, table: torch.Tensor) -> None:
    embeddings: Any = lm.base_model.embeddings
    embeddings.token_type_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
    lm.config.type_vocab_size = len(table)


def _initialize_language_embeddings(lm: PreTrainedModel, languages: list[str], language_embeddings: bool) -> list[str]:
    """Give each language of the run a row of the model's token-type table if `language_embeddings`, else make all rows
    copies of row 0. Return the languages in the order of their rows.

    Languages that the model knows keep their rows, in any spelling. The row of a new language starts as a copy of row
    0, the neutral row. In a model without language embeddings, row 0 of the table is the token type of single
    sentences.
    """
    before = getattr(lm.config, "xscale", None) or {}
    known: list[str] = before["languages"][1:] if before.get("language_embeddings") else []
    if not known and not language_embeddings:
        return languages
    names = [*languages, *(name for name in known if not find_exact_name_or_spellings(name, languages))]
    old = _token_type_table(lm)
    table = old[0].repeat(max(_require_token_type_count(lm.config), 1 + len(names)), 1)
    if not language_embeddings:
        LOG.warning(
            f"model.init has language embeddings of {', '.join(known)}, but no stream of this run sets "
            "language_embeddings. So all text gets the neutral embedding, which belongs to no language. To use the "
            "language embeddings, set streams.NAME.language_embeddings=true"
        )
    elif known:
        for number, name in enumerate(known, start=1):
            for name_now in find_exact_name_or_spellings(name, names):
                table[1 + names.index(name_now)] = old[number]
        LOG.info(
            f"the language embeddings of {', '.join(known)} come from model.init. The embeddings of other "
            "languages start as copies of the neutral embedding of model.init, which belongs to no language"
        )
    _set_token_type_table(lm, table)
    return names if language_embeddings else languages


def parameter_groups_by_decay(
    model: nn.Module, weight_decay: float, new_heads: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: with weight decay, and without it (biases, norms and other vectors). The
    parameters named in `new_heads` have two groups of their own, which the key `new_heads` marks."""
    parameters: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_vector = parameter.ndim <= 1
            parameters.setdefault((name in new_heads, is_vector), []).append(parameter)
    groups = list[dict[str, Any]]()
    for (of_new_head, is_vector), members in sorted(parameters.items()):
        decay = 0.0 if is_vector else weight_decay
        groups.append({"params": members, "weight_decay": decay, "new_heads": of_new_head})
    return groups
