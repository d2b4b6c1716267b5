"""DICT-MLM (Chaudhary et al. 2020; Tang et al. 2022, G.4): dictionary translations replace part of the masks.

    L = - sum_{i in M} log p(y_i | x with M replaced)

MLM selects the positions M; the share `dict_share` of them uses a translation. For a selected word x_i..x_j with a
translation t of the same number of tokens (chosen at random if there are several), `synonym` decides:

    input: it is shown as t, y = x (Tang et al.)     label: it is shown as [MASK], y = t (Chaudhary et al.)

Decided:
- Words are selected as wholes, so that words of several tokens have translations too.
- A word without a translation of the same number of tokens is treated as in MLM. If it were left visible, as Tang et
  al. write, the model could copy it. For the same reason, a translation is not used if it has the same token as the
  word at any position.
- In each sequence, words with a translation use it at random, with such a probability that `dict_share` of all selected
  tokens use one. If there are too few such words, all of them use their translation.
- The language conditioning layer is left out, as by Tang et al.

Shape letters: N tokens, M selected tokens, W selected words, B sequences.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from xscale import rng
from xscale.config import STRICT
from xscale.data.lexicon import synonyms
from xscale.data.sequences import Example, Sequences
from xscale.data.stream_batch import Context, StreamBatch
from xscale.errors import UserError
from xscale.objectives import mlm
from xscale.objectives.base import Objective


@dataclass(frozen=True, config=STRICT)
class DictMlmOptions(mlm.MaskedOptions):
    in_phases: ClassVar[frozenset[str]] = mlm.MaskedOptions.in_phases | {"dict_share"}
    whole_word: bool = True
    """Choose whole words. false: choose tokens; a word uses the dictionary only if all its tokens are chosen."""
    synonym: Literal["input", "label"] = "input"
    """The translation replaces the tokens that the model sees (input), or those that it predicts (label)."""
    dict_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the selected tokens that use a translation, as `synonym` says, where the dictionary has one."""


MET = 0.9
"""A run warns if the share of selected tokens that use the dictionary is below this factor times `dict_share`."""
_USE, _DRAW = rng.key("dict_mlm", "use"), rng.key("dict_mlm", "draw")


def collate(samples: list[list[Example]], options: DictMlmOptions, context: Context) -> StreamBatch:
    """Return MLM's batch with translations; its count "translated" is the number of targets that use a dictionary."""
    sequences = mlm.pack(samples, context)
    stream_batch = mlm.mask(sequences, len(samples), options, context)
    masked, labels = stream_batch.reads["masked"].places, stream_batch.labels["mlm"]
    translations = translate(sequences, masked, options, context)
    used = translations >= 0
    shown = stream_batch.sequences.ids.copy()
    if options.synonym == "input":
        shown[masked[used]] = translations[used]
    else:
        shown[masked[used]] = context.tokenizer.mask_id
        labels = np.where(used, translations, labels)
    return replace(
        stream_batch,
        sequences=replace(stream_batch.sequences, ids=shown),
        labels={"mlm": labels},
        targets=stream_batch.targets | {"translated": int(used.sum())},
    )


def translate(sequences: Sequences, targets: np.ndarray, options: DictMlmOptions, context: Context) -> np.ndarray:
    """Return the translation of each target token [M]; -1 for tokens that do not use a dictionary."""
    tables = {n: synonyms(context.lexicons, language) for language, n in context.language_ids.items()}
    if not any(tables.values()):
        raise UserError(
            f"streams.{context.stream}: data.lexicons has no entry whose two words differ and have the same number of "
            f"tokens, so no word has a translation; use a larger dictionary or a tokenizer with a larger vocabulary"
        )
    ids, found = sequences.ids.tolist(), np.full(len(sequences.ids), -1)
    firsts, sizes = whole_words(sequences, targets)
    places = zip(firsts.tolist(), sizes.tolist(), sequences.languages[firsts].tolist(), strict=True)
    words = [(first, tuple(ids[first : first + size]), language) for first, size, language in places]
    known = np.array([word in tables[language] for _, word, language in words], dtype=bool)
    numbers, sequence_count = sequences.numbers, len(sequences.lengths)
    of_words = numbers[firsts]
    there = np.bincount(of_words[known], weights=sizes[known], minlength=sequence_count)
    wanted = options.dict_share * np.bincount(numbers[targets], minlength=sequence_count)
    share_B = wanted / np.maximum(there, 1)
    identities_W, offsets_W = sequences.identities[of_words], sequences.offsets[firsts]
    use = known & (rng.uniform(identities_W ^ _USE, offsets_W) < share_B[of_words])
    chance_W = rng.uniform(identities_W ^ _DRAW, offsets_W)
    for i in np.flatnonzero(use).tolist():
        first, word, language = words[i]
        drawn = tables[language][word]
        found[first : first + len(word)] = drawn[int(chance_W[i] * len(drawn))]
    return found[targets]


def whole_words(sequences: Sequences, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token and the number of tokens of each word whose tokens are all targets [W]."""
    if sequences.words is None:
        assert not len(targets)
        return targets, targets
    words, numbers = sequences.words, sequences.numbers
    continues_word = (words[1:] == words[:-1]) & (numbers[1:] == numbers[:-1]) & (words[1:] >= 0)
    starts = np.concatenate([[True], ~continues_word])
    word_of, firsts = np.cumsum(starts) - 1, np.flatnonzero(starts)
    sizes, chosen = np.bincount(word_of), np.bincount(word_of[targets], minlength=len(firsts))
    whole = (chosen == sizes) & (words[firsts] >= 0)
    return firsts[whole], sizes[whole]


def shortfall(options: DictMlmOptions, counts: dict[str, int]) -> list[str]:
    """Return a warning if too few of the selected tokens use a translation. counts: StreamBatch.targets."""
    shown = counts["translated"] / max(counts["mlm"], 1)
    if shown >= MET * options.dict_share:
        return []
    return [
        f"dict_share is {options.dict_share:g}, but only {shown:.2f} of the selected tokens use a translation, because "
        f"the other words have none with the same number of tokens; use larger dictionaries or a larger vocabulary"
    ]


OBJECTIVE = Objective(
    reads="mono",
    options=DictMlmOptions,
    collate=collate,
    loss=mlm.loss,
    terms=lambda options: {"mlm": 1.0},
    ratios={"dictionary_share": ("translated", "mlm")},
    words=lambda options: True,
    needs="lexicon",
    shortfall=shortfall,
)
