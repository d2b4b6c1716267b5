"""Enlarges the vocabulary of the model of `model.init`. Known tokens, recognised by their strings, keep their rows.

A row is a token's embedding, or its weights and bias in the output layer. The row of a new token is the mean of the
rows of the pieces into which the model's own tokenizer divides the token. Text that both tokenizers divide into the
same tokens keeps its hidden states, and the known tokens keep their logits. The softmax has more classes, so its loss
rises somewhat.
"""

import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from xscale.data.tokenizer import Tokenizer

ROLES = ("bos", "eos", "cls", "sep", "mask")
"""The special tokens whose ids in a config are updated. Padding keeps its id, as positions may count from it."""


def extension_problem(old: Tokenizer, new: Tokenizer) -> str | None:
    """Return why `new` does not extend the model's tokenizer `old`, or None if it extends it."""
    ours, theirs = new.hf.get_vocab(), old.hf.get_vocab()
    if lost := sorted(theirs.keys() - ours.keys(), key=theirs.__getitem__):
        return f"it lacks {len(lost):,} of the {len(theirs):,} tokens of the model's tokenizer, such as {lost[0]!r}"
    if len(ours) == len(theirs):
        return "it has the same tokens as the model's tokenizer, but cuts text differently"
    if new.pad_id != old.pad_id:
        return f"its padding token has id {new.pad_id}, and the model's {old.pad_id}"
    for role, number in old.special.items():
        ids = ((old, number), (new, new.special[role]))
        token, other = (None if n is None else of.hf.convert_ids_to_tokens(n) for of, n in ids)
        if token != other:
            return f"its {role} token is {other!r}, and the model's {token!r}"
    first, second = (json.loads(of.backend.to_str()) for of in (old, new))
    first["type"], second["type"] = first["model"]["type"], second["model"]["type"]
    part = next((part for part in ("type", "normalizer", "pre_tokenizer") if first[part] != second[part]), None)
    return part and f"its {part} is not that of the model's tokenizer"


def piece_ids(token: str, old: Tokenizer, is_added: bool) -> list[int]:
    """Return the ids of the pieces into which `old` divides a new token, or [] if there are none. is_added: the token
    comes from add_tokens and is plain text."""
    if is_added:
        return old.encode([token])[0]
    model: Any = old.backend.model
    inside = getattr(model, "continuing_subword_prefix", None) or ""
    if not inside or not token.startswith(inside):
        return [piece.id for piece in model.tokenize(token)]
    for letter in (known for known in old.hf.get_vocab() if len(known) == 1):
        first, *rest = model.tokenize(letter + token.removeprefix(inside))
        if first.value == letter or first.id == old.special["unk"]:
            return [piece.id for piece in rest]
    return []


def old_ids_of_new(old: Tokenizer, new: Tokenizer) -> dict[int, list[int]]:
    """Return for each id of `new` the ids of `old` from whose rows the new id's row is averaged."""
    known, added = old.hf.get_vocab(), new.hf.get_added_vocab()
    unknown = [old.special["unk"]] if old.special["unk"] is not None else [old.mask_id]
    return {
        number: [known[token]] if token in known else piece_ids(token, old, token in added) or unknown
        for token, number in new.hf.get_vocab().items()
    }


@torch.no_grad()
def grow_vocabulary(lm: PreTrainedModel, old: Tokenizer, new: Tokenizer) -> None:
    """Give the model a row for each id of `new`, for which extension_problem(old, new) must be None."""
    rows, sources_of = lm.config.vocab_size, old_ids_of_new(old, new)
    before = [weight.clone() for weight in _tables(lm)]
    lm.resize_token_embeddings(max(rows, new.vocab_size), mean_resizing=False)
    for table, weight in zip(before, _tables(lm), strict=True):
        weight.copy_(_with_rows(table, len(weight), sources_of))
    for field in (f"{role}_token_id" for role in ROLES):
        if (number := getattr(lm.config, field, None)) is not None:
            token = old.hf.convert_ids_to_tokens(number)
            setattr(lm.config, field, new.hf.convert_tokens_to_ids(token))


def _tables(lm: PreTrainedModel) -> list[Tensor]:
    """Return the weights that have a row for each token id. Tied weights are included once."""
    output: Any = lm.get_output_embeddings()
    tables: list[Any] = [lm.get_input_embeddings().weight, output.weight, output.bias]
    return list({id(table): table for table in tables}.values())


def _with_rows(table: Tensor, rows: int, sources_of: dict[int, list[int]]) -> Tensor:
    """Return the table enlarged to `rows` rows. sources_of: new id -> the old ids whose mean is its row. Existing rows
    that belong to no token stay as they are."""
    grown = table.new_zeros(rows, *table.shape[1:])
    grown[: len(table)] = table
    for number, pieces in sources_of.items():
        grown[number] = table[pieces[0]] if len(pieces) == 1 else table[pieces].mean(0)
    return grown
