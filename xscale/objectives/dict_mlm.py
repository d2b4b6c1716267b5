"""DICT-MLM (Chaudhary et al. 2020; Tang et al. 2022, G.4): dictionary translations replace part of the masks.

    L = - sum_{i in M} log p(y_i | x with M replaced)

MLM selects the positions M; the share `dict_share` of them uses a translation. For a selected word x_i..x_j with a
translation t of the same number of tokens (chosen at random if there are several), `synonym` decides:

    input: the word is shown as t, y = x (Tang et al.)     label: the word is shown as [MASK], y = t (Chaudhary et al.)

Decided:
- Whole words are selected, so that words of several tokens can be translated, too.
- A word without a translation of the same number of tokens is treated as in MLM. If it were left visible, as Tang et
  al. write, the model could copy it. For the same reason, a translation is not used if it has the same token as the
  word at any position.
- Each selected word with a translation uses it with probability `dict_share`, independently of other words. So the
  share holds among words with a translation; with a small dictionary, a smaller share of all selected tokens is
  translated.
- A shown translation has the language embedding of its own language.
- The language conditioning layer is left out, as by Tang et al.

Shape letters: N tokens, M selected tokens, W selected words, B sequences.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from xscale import rng
from xscale.data.lexicon import translations_with_as_many_tokens
from xscale.data.sequences import Example, Sequences
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.errors import UserError
from xscale.objectives import mlm
from xscale.objectives.base import Objective
from xscale.recipe import STRICT


@dataclass(frozen=True, config=STRICT)
class DictMlmOptions(mlm.MaskedOptions):
    in_phases: ClassVar[frozenset[str]] = mlm.MaskedOptions.in_phases | {"dict_share"}
    whole_word: bool = True
    """true: the objective chooses whole words for prediction. false: the objective chooses single tokens, and
    translates only words of which it has chosen all tokens."""
    synonym: Literal["input", "label"] = "input"
    """Whether the translation of a chosen word is the input or the label. input: the model sees the translation and
    predicts the word. label: the model sees [MASK] and predicts the translation."""
    dict_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The probability that the objective uses a translation of a chosen word, if the dictionary has one with the same
    number of tokens as the word. The other chosen words are treated as in MLM."""


_USE = rng.key("dict_mlm", "use")
_DRAW = rng.key("dict_mlm", "draw")


class Translations(NamedTuple):
    """The translations of the selected tokens of a stream batch."""

    used: np.ndarray
    """True for each selected token that uses a translation [M]."""
    ids: np.ndarray
    """Token ids of the translations [M]; meaningless where `used` is False."""
    languages: np.ndarray
    """Number of the translation's language [M]; meaningless where `used` is False."""


def collate(samples: list[list[Example]], options: DictMlmOptions, context: CollateContext) -> StreamBatch:
    """Return MLM's batch with translations; its count "translated" is the number of targets that use a dictionary."""
    sequences = mlm.join_running_text(samples, context)
    stream_batch = mlm.make_masked_batch(sequences, len(samples), options, context)
    masked = stream_batch.states["masked"].columns
    labels = stream_batch.labels["mlm"]
    translations = draw_translations(sequences, masked, options, context)
    replaced = masked[translations.used]
    shown_ids = stream_batch.sequences.ids.copy()
    shown_languages = stream_batch.sequences.languages.copy()
    if options.synonym == "input":
        shown_ids[replaced] = translations.ids[translations.used]
        is_neutral = shown_languages[replaced] == 0
        shown_languages[replaced] = np.where(is_neutral, 0, translations.languages[translations.used])
    else:
        shown_ids[replaced] = context.tokenizer.mask_id
        labels = np.where(translations.used, translations.ids, labels)
    return replace(
        stream_batch,
        sequences=replace(stream_batch.sequences, ids=shown_ids, languages=shown_languages),
        labels={"mlm": labels},
        target_counts=stream_batch.target_counts | {"translated": int(translations.used.sum())},
    )


def draw_translations(
    sequences: Sequences, targets: np.ndarray, options: DictMlmOptions, context: CollateContext
) -> Translations:
    """Return the translations that the target tokens use. targets: their indices [M]."""
    tables = {
        number: translations_with_as_many_tokens(context.lexicons, language)
        for language, number in context.language_ids.items()
    }
    if not any(tables.values()):
        raise UserError(
            f"streams.{context.stream}: no dictionary entry can be used. The two words of an entry must have the same "
            "number of tokens, and the tokens must differ at each position. Use a larger dictionary, or a tokenizer "
            "with a larger vocabulary"
        )
    firsts, sizes = wholly_selected_word_starts_lengths(sequences, targets)
    keys_W = sequences.random_keys[sequences.sequence_of_token[firsts]]
    offsets_W = sequences.indices_in_sequence[firsts]
    uses_W = rng.uniform(keys_W ^ _USE, offsets_W) < options.dict_share
    chance_W = rng.uniform(keys_W ^ _DRAW, offsets_W)

    used_N = np.zeros(len(sequences.ids), dtype=bool)
    ids_N = np.zeros_like(sequences.ids)
    languages_N = np.zeros_like(sequences.languages)
    for i in np.flatnonzero(uses_W).tolist():
        word = slice(firsts[i], firsts[i] + sizes[i])
        translations = tables[int(sequences.languages[firsts[i]])].get(tuple(sequences.ids[word].tolist()))
        if translations is None:
            continue
        drawn = translations[int(chance_W[i] * len(translations))]
        used_N[word] = True
        ids_N[word] = drawn.tokens
        languages_N[word] = context.language_ids.get(drawn.language, 0)
    return Translations(used_N[targets], ids_N[targets], languages_N[targets])


def wholly_selected_word_starts_lengths(sequences: Sequences, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token and the number of tokens of each word whose tokens are all targets [W]."""
    if sequences.word_of_token is None:
        assert not len(targets)
        return targets, targets
    words = sequences.word_of_token
    sequence = sequences.sequence_of_token
    continues_word = (words[1:] == words[:-1]) & (sequence[1:] == sequence[:-1]) & (words[1:] >= 0)
    starts = np.concatenate([[True], ~continues_word])
    firsts = np.flatnonzero(starts)
    word_of = np.cumsum(starts) - 1
    sizes = np.bincount(word_of)
    chosen = np.bincount(word_of[targets], minlength=len(firsts))
    whole = (chosen == sizes) & (words[firsts] >= 0)
    return firsts[whole], sizes[whole]


OBJECTIVE = Objective(
    record_kind="mono",
    options=DictMlmOptions,
    collate=collate,
    loss=mlm.compute_losses,
    terms=lambda options: {"mlm": 1.0},
    ratios={"dictionary_share": ("translated", "mlm")},
    words=lambda options: True,
    needs="lexicon",
)
