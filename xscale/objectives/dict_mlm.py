"""DICT-MLM (Chaudhary et al. 2020; Tang et al. 2022, G.4): a dictionary stands in for part of the masking.

    L = - sum_{i in M} log p(y_i | x with M replaced)

Of the positions M that MLM selects, `dict_share` look into the dictionaries. One whose token x_i has a translation t
(one token; one of several is drawn) becomes, by `synonym`:

    input: x_i is shown as t, y_i = x_i (Tang et al.)     label: x_i is shown as [MASK], y_i = t (Chaudhary et al.)

All others are as in MLM: so is, by decision, a token without a translation, since leaving it visible, as Tang et al.
write, would let it copy itself; for the same reason a token is no translation of itself. The language conditioning
layer is left out, as by Tang et al. A token is looked up by its id alone, as by both.
"""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from xscale import rng
from xscale.config import STRICT
from xscale.data.lexicon import synonyms
from xscale.data.piece import Context, Piece
from xscale.data.sequences import Example, Sequences
from xscale.errors import UserError
from xscale.objectives import mlm
from xscale.objectives.base import Objective


@dataclass(frozen=True, config=STRICT)
class Options(mlm.MaskedOptions):
    synonym: Literal["input", "label"] = "input"
    """What the translation replaces: the token that the model sees, or the one that it predicts."""
    dict_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the selected tokens that use the dictionary where it has them."""


_USE, _DRAW = rng.key("dict_mlm", "use"), rng.key("dict_mlm", "draw")


def collate(samples: list[list[Example]], options: Options, context: Context) -> Piece:
    """MLM's piece with translations in it; the count "translated" is that of the targets that used a dictionary."""
    sequences = mlm.pack(samples, context)
    piece = mlm.mask(sequences, len(samples), options, context)
    masked, labels = piece.reads["masked"].places, piece.labels["mlm"]
    translations = translate(sequences, masked, options, context)
    used = translations >= 0
    shown = piece.sequences.ids.copy()
    if options.synonym == "input":
        shown[masked[used]] = translations[used]
    else:
        shown[masked[used]] = context.tokenizer.mask_id
        labels = np.where(used, translations, labels)
    return replace(
        piece,
        sequences=replace(piece.sequences, ids=shown),
        labels={"mlm": labels},
        targets=piece.targets | {"translated": int(used.sum())},
    )


def translate(sequences: Sequences, targets: np.ndarray, options: Options, context: Context) -> np.ndarray:
    """A translation of each target token [M]; -1 where it does not use a dictionary, or has none."""
    tables = {n: synonyms(context.lexicons, language) for language, n in context.language_ids.items()}
    if not any(len(table.tokens) for table in tables.values()):
        raise UserError(
            f"streams.{context.stream}: data.lexicons has no entry of a single token on either side, so there is no "
            f"synonym to show; use a larger dictionary or a tokenizer with a larger vocabulary"
        )
    identities, places = sequences.identities[sequences.numbers[targets]], sequences.offsets[targets]
    chance = rng.uniform(identities ^ _DRAW, places)
    use = rng.uniform(identities ^ _USE, places) < options.dict_share
    found = np.full(len(targets), -1)
    for number, table in tables.items():
        here = use & (sequences.languages[targets] == number)
        found[here] = table.draw(sequences.ids[targets[here]], chance[here])
    return found


OBJECTIVE = Objective(
    reads="mono",
    options=Options,
    collate=collate,
    loss=mlm.loss,
    terms=lambda options: {"mlm": 1.0},
    ratios={"dictionary_share": ("translated", "mlm")},
    words=mlm.words,
    needs="lexicon",
)
