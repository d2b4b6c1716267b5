"""The stream batch: the sequences of one stream in one packed row, and which of their states its loss reads.

`masked_lm` makes the stream batch of a loss that predicts masked tokens.

Shape letters: N tokens of its sequences, B sequences, M predicted tokens, S states that a loss reads, K places.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from xscale import rng
from xscale.data.ragged import indices_within
from xscale.data.sequences import Example, Sequences, fit_pairs
from xscale.data.shards import pair_name
from xscale.data.tokenizer import Tokenizer

Types = Literal["languages", "segments"]
"""The field of Sequences from which token types are taken."""
_NEUTRAL = rng.key("language", "neutral")


@dataclass(frozen=True)
class Context:
    """The values that a collate function gets besides its samples and options."""

    tokenizer: Tokenizer
    max_length: int
    overlong: str
    """What happens to pairs over max_length: "drop" or "truncate"."""
    language_ids: dict[str, int]
    """Language -> its number, from 1 on; 0 (neutral) for a language that the model was not trained with."""
    seed: int = 0
    lexicons: tuple[Any, ...] = ()
    """The stream's dictionaries (data/lexicon.py), without the withheld words."""
    stream: str = ""
    step: int = 0
    row: int = 0
    """Number of the packed row among the `rows` rows that all ranks have in the step."""
    rows: int = 1
    segments: bool = False
    """True if the two sentences of a pair have token types 0 and 1."""
    names: tuple[str, ...] = ()
    """Languages ("en") and pairs ("de-en") whose losses are reported separately."""

    def fit_pairs(self, samples: list[list[Example]]) -> list[Example]:
        """Return the pairs; those over max_length are dropped or truncated. samples: one pair each."""
        special = self.tokenizer.pair.special
        return fit_pairs([sample[0] for sample in samples], self.max_length, self.overlong, special)[0]

    def name_numbers(self, sequences: Sequences) -> np.ndarray:
        """Return each sequence's index in `names` of its language or pair, found from its first and last token [B];
        len(names) if `names` lacks the language or pair."""
        ends = np.cumsum(sequences.lengths)
        first, last = sequences.languages[ends - sequences.lengths], sequences.languages[ends - 1]
        codes, which = np.unique(np.stack([first, last], 1), axis=0, return_inverse=True)
        language = {number: name for name, number in self.language_ids.items()}
        of_codes = [pair_name({language[n] for n in code}) for code in codes.tolist()]
        numbers = [self.names.index(name) if name in self.names else len(self.names) for name in of_codes]
        return np.array(numbers, dtype=np.int64)[which]

    def types(self, language_embeddings: bool) -> "Types | None":
        """Return the meaning of the token type ids of a pair; None: all are 0."""
        return "languages" if language_embeddings else "segments" if self.segments else None


class StateIndices(NamedTuple):
    """The states that a loss reads; each is the sum of the last hidden states of its tokens."""

    places: np.ndarray
    """Indices of tokens in the stream batch [K]."""
    counts: np.ndarray | None = None
    """Number of places that each state sums [S]; None: each has one place."""

    def __len__(self) -> int:  # type: ignore[override]
        return len(self.place_counts)

    @property
    def place_counts(self) -> np.ndarray:
        return np.ones_like(self.places) if self.counts is None else self.counts


@dataclass(frozen=True)
class StreamBatch:
    """One stream's part of a packed row. A part without samples has the same keys, with empty values."""

    sequences: Sequences
    """The sequences as the model sees them, with masked tokens."""
    reads: dict[str, StateIndices]
    """The states that the loss reads, by name."""
    targets: dict[str, int]
    """Number of targets by term of the loss, and other counts of the stream by name."""
    samples: int
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    """Term -> the token ids that it predicts [M]; terms are in the order of Losses.predictions."""
    names: dict[str, np.ndarray] = field(default_factory=dict)
    """Term -> the index in Context.names of each label's language or pair [M]."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Further arrays that the loss reads on the device."""
    types: Types | None = None
    """What the token types mean; None: they are 0 everywhere."""
    auxiliary: "AuxiliaryInputs | None" = None
    too_long: int = 0
    """Number of sampled pairs that are longer than max_length. The loader sets it, whatever collate has set."""
    pairs: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of sampled pairs ("drawn") and of overlong ones ("too_long"), by pair of languages in Context.names."""
    keys: list[str] = field(default_factory=list)
    """Keys of the records, in the order in which they were sampled."""


class AuxiliaryInputs(NamedTuple):
    """The inputs of a stream's auxiliary encoder, which has no gradient."""

    sequences: Sequences
    reads: StateIndices
    """The states that the auxiliary encoder computes."""


def check_stream_batch(stream_batch: StreamBatch, terms: Set[str]) -> None:
    """Raise ValueError if a stream batch cannot be packed into a row. terms: terms of the objective's loss."""
    if not isinstance(stream_batch, StreamBatch):
        raise ValueError(f"returned {type(stream_batch).__name__}, not a StreamBatch (xscale/data/stream_batch.py)")
    tokens = len(stream_batch.sequences.ids)
    if int(stream_batch.sequences.lengths.sum()) != tokens:
        raise ValueError(
            f"its sequences have lengths that add up to {stream_batch.sequences.lengths.sum()}, but {tokens} ids"
        )
    for name, (places, counts) in stream_batch.reads.items():
        if len(places) and not 0 <= places.min() <= places.max() < tokens:
            raise ValueError(f"reads[{name!r}] has places from {places.min()} to {places.max()}, of {tokens} tokens")
        if counts is not None and int(counts.sum()) != len(places):
            raise ValueError(f"reads[{name!r}] has counts that add up to {counts.sum()}, but {len(places)} places")
    if unknown := stream_batch.labels.keys() - terms:
        raise ValueError(
            f"labels has {', '.join(sorted(unknown))}; the terms of the loss are {', '.join(sorted(terms))}"
        )


KEEP, RANDOM = 0.9, 0.8
"""Bounds of a random number from [0, 1) for each chosen token: from KEEP on the token stays, from RANDOM to KEEP it
becomes a random token, and below RANDOM it becomes [MASK]."""
_CHOOSE, _ACTION, _RANDOM_ID = (rng.key("masking", purpose) for purpose in ("choose", "action", "random id"))


def mask_tokens(
    sequences: Sequences, tokenizer: Tokenizer, mask_prob: float, whole_word: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids after masking [N], and the sorted indices of the tokens to predict [M] (Devlin et al. 2019).

    Each token that is not a special one is chosen with probability `mask_prob`. A chosen token becomes [MASK] in 80 %
    of the cases, a random ordinary token in 10 %, and stays in 10 %. Every choice is a function of the sequence's
    identity and of the place of the token, or the number of the word, in the sequence.
    """
    per_token = sequences.identities[sequences.numbers]
    place = sequences.offsets.astype(np.uint64)
    maskable = ~tokenizer.is_special[sequences.ids]
    unit = place
    if whole_word:
        assert sequences.words is not None, "whole-word masking needs Tokenizer.encode_words"
        alone = place + np.uint64(1 << 32)  # a token that belongs to no word
        unit = np.where(sequences.words < 0, alone, sequences.words.astype(np.uint64))
    chosen = maskable & (rng.uniform(per_token ^ _CHOOSE, unit) < mask_prob)
    targets = np.flatnonzero(chosen)
    per_token, place = per_token[targets], place[targets]
    action = rng.uniform(per_token ^ _ACTION, place)
    pick = rng.uniform(per_token ^ _RANDOM_ID, place) * len(tokenizer.ordinary_ids)
    ids = sequences.ids.copy()
    replaced = np.where(action < RANDOM, tokenizer.mask_id, tokenizer.ordinary_ids[pick.astype(np.int64)])
    ids[targets] = np.where(action < KEEP, replaced, ids[targets])
    return ids, targets


def masked_lm(
    sequences: Sequences,
    context: Context,
    *,
    mask_prob: float,
    whole_word: bool = False,
    types: Types | None = None,
    neutral: float = 0.0,
    samples: int | None = None,
    term: str = "mlm",
) -> StreamBatch:
    """Return the stream batch of MLM and TLM, with one term and the states "masked" [M].

    neutral: share of sequences with language number 0, whose positions do not start again in a second sentence, as
    transformers reads a pair by default; samples: number of samples, by default that of sequences.
    """
    whole_word = whole_word and len(sequences.ids) > 0  # without sequences there are no word numbers
    ids, targets = mask_tokens(sequences, context.tokenizer, mask_prob, whole_word)
    names = {term: context.name_numbers(sequences)[sequences.numbers[targets]]} if context.names else {}
    languages, positions = sequences.languages, sequences.positions
    if types == "languages":
        hidden = rng.uniform(sequences.identities ^ _NEUTRAL, np.zeros(len(sequences.lengths))) < neutral
        languages = np.where(hidden[sequences.numbers], 0, languages)
        positions = np.where(hidden[sequences.numbers], indices_within(sequences.lengths), positions)
    return StreamBatch(
        sequences=replace(sequences, ids=ids, languages=languages, positions=positions),
        reads={"masked": StateIndices(targets)},
        targets={term: len(targets)},
        samples=len(sequences.lengths) if samples is None else samples,
        labels={term: sequences.ids[targets]},
        names=names,
        types=types,
    )
