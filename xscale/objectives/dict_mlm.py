"""DICT-MLM (Chaudhary et al. 2020; Tang et al. 2022, G.4): a dictionary stands in for part of the masking.

    L = - sum_{i in M} log p(y_i | x with M replaced)

Of the positions M that MLM selects, `dict_share` look into the dictionaries. One whose token x_i has a translation t
(one token; one of several is drawn) becomes, by `synonym`:

    input: x_i is shown as t, y_i = x_i (Tang et al.)     label: x_i is shown as [MASK], y_i = t (Chaudhary et al.)

All others are as in MLM: so is, by decision, a token without a translation, since leaving it visible, as Tang et al.
write, would let it copy itself; for the same reason a token is no translation of itself. The language conditioning
layer is left out, as by Tang et al. A token is looked up by its id alone, as by both.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from xscale import rng
from xscale.data import collate as arrays
from xscale.data.collate import Context, MicroBatch
from xscale.data.encode import Example, Sequences
from xscale.data.lexicon import synonyms
from xscale.errors import UserError
from xscale.objectives import mlm
from xscale.objectives.base import LossSums, Objective, Parts


@dataclass(frozen=True)
class Options(mlm.MaskedOptions):
    synonym: Literal["input", "label"] = "input"
    """What the translation replaces: the token that the model sees, or the one that it predicts."""
    dict_share: float = 0.5
    """Share of the selected tokens that use the dictionary where it has them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dict_share <= 1:
            raise UserError(f"dict_share: {self.dict_share} must lie between 0 and 1")


_USE, _DRAW = rng.key("dict_mlm", "use"), rng.key("dict_mlm", "draw")


def collate(samples: list[list[Example]], options: Options, context: Context) -> MicroBatch:
    """MLM's arrays with translations in them, and `translated` [M]: 1 where a target used a dictionary."""
    sequences, too_long = mlm.pack(samples, context)
    batch = mlm.mask(sequences, too_long, options, context)
    rows, labels = batch.arrays["rows"], batch.arrays["labels"]
    translations = translate(sequences, np.searchsorted(arrays.places(sequences), rows), options, context)
    used = translations >= 0
    inputs = batch.arrays["input_ids"].copy()
    if options.synonym == "input":
        inputs.flat[rows[used]] = translations[used]
    else:
        inputs.flat[rows[used]] = context.encoder.mask_id
        labels = np.where(used, translations, labels)
    changed = {"input_ids": inputs, "labels": labels, "translated": used.astype(np.int64)}
    return replace(batch, arrays=batch.arrays | changed)


def translate(sequences: Sequences, targets: np.ndarray, options: Options, context: Context) -> np.ndarray:
    """A translation of each target token [M]; -1 where it does not use a dictionary, or has none."""
    tables = {n: synonyms(context.lexicons, language) for language, n in context.language_ids.items()}
    if not any(len(table.tokens) for table in tables.values()):
        raise UserError(
            f"streams.{context.stream}: data.lexicons has no entry of a single token on either side, so there is no "
            f"synonym to show; use a larger dictionary or a tokenizer with a larger vocabulary"
        )
    identities, places = sequences.identities[sequences.rows[targets]], sequences.offsets[targets]
    chance = rng.uniform(identities ^ _DRAW, places)
    use = rng.uniform(identities ^ _USE, places) < options.dict_share
    found = np.full(len(targets), -1)
    for number, table in tables.items():
        here = use & (sequences.languages[targets] == number)
        found[here] = table.draw(sequences.ids[targets[here]], chance[here])
    return found


def loss(parts: Parts, batch: dict[str, Tensor], options: Options) -> LossSums:
    sums = mlm.loss(parts, batch, options)
    return LossSums(sums.terms, sums.metrics | {"dictionary_share": (batch["translated"].sum(), "mlm")})


OBJECTIVE = Objective(
    reads="mono",
    options=Options,
    collate=collate,
    loss=loss,
    terms=lambda options: {"mlm": 1.0},
    words=mlm.words,
    needs="lexicon",
)
