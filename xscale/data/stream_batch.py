"""What a stream's samples become: sequences, and what its loss reads of their states.

Shape letters: N tokens of the piece's sequences, M predicted tokens, S states that a loss reads, K places.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from xscale import rng
from xscale.data.masking import mask_tokens
from xscale.data.sequences import Example, Sequences, fit_pairs
from xscale.data.shards import pair_name
from xscale.data.tokenizer import Tokenizer

Types = Literal["languages", "segments"]
"""What a token's type is the number of; by name of a field of Sequences."""
_NEUTRAL = rng.key("language", "neutral")


@dataclass(frozen=True)
class StreamShare:
    """Which of the equal parts of an optimizer step a row is, over all ranks and rows."""

    step: int = 0
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Context:
    """What a collate function knows besides its samples and options."""

    tokenizer: Tokenizer
    max_length: int
    overlong: str
    """"drop" or "truncate"."""
    language_ids: dict[str, int]
    """From 1 on; 0, which is neutral, for a language that the model does not have."""
    seed: int = 0
    lexicons: tuple[Any, ...] = ()
    """The stream's dictionaries (data/lexicon.py), as id tables, without the words that are withheld."""
    stream: str = ""
    share: StreamShare = StreamShare()
    segments: bool = False
    """Whether the two sentences of a pair have token types of their own."""
    names: tuple[str, ...] = ()
    """Languages ("en") and pairs ("de-en") by which the stream's losses are told apart; none: they are not."""

    def fit_pairs(self, samples: list[list[Example]]) -> tuple[list[Example], int]:
        """The pairs of samples of one each that fit max_length, and how many were too long."""
        special = self.tokenizer.pair.special
        return fit_pairs([sample[0] for sample in samples], self.max_length, self.overlong, special)

    def name_numbers(self, sequences: Sequences) -> np.ndarray:
        """Which of `names` each sequence is in, by its first and its last token; their number: none [B]."""
        ends = np.cumsum(sequences.lengths)
        first, last = sequences.languages[ends - sequences.lengths], sequences.languages[ends - 1]
        codes, which = np.unique(np.stack([first, last], 1), axis=0, return_inverse=True)
        language = {number: name for name, number in self.language_ids.items()}
        of_codes = [pair_name({language[n] for n in code}) for code in codes.tolist()]
        numbers = [self.names.index(name) if name in self.names else len(self.names) for name in of_codes]
        return np.array(numbers, dtype=np.int64)[which]

    def types(self, language_embeddings: bool) -> "Types | None":
        """What the token types of a sequence of pairs say."""
        return "languages" if language_embeddings else "segments" if self.segments else None


class Reads(NamedTuple):
    """States that a loss reads, each the sum of the last hidden states at some places."""

    places: np.ndarray
    """Indices of tokens in the piece [K]."""
    counts: np.ndarray | None = None
    """How many of the places each state sums [S]; None: one."""

    def __len__(self) -> int:  # type: ignore[override]
        return len(self.places if self.counts is None else self.counts)


@dataclass(frozen=True)
class StreamBatch:
    """One stream's part of a row. Made of no sample at all it has the same fields, empty."""

    sequences: Sequences
    """As the model sees them: masked."""
    reads: dict[str, Reads]
    """Name -> what the objective's loss gets as the state of this name."""
    targets: dict[str, int]
    """Number of targets of each term of the loss; and other counts of the stream, by name."""
    samples: int
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    """Term -> ids that it predicts from the vocabulary [M], in the order of the loss's predictions."""
    names: dict[str, np.ndarray] = field(default_factory=dict)
    """Term -> which of Context.names each of its labels is of [M]."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """What else the loss gets, on the device."""
    types: Types | None = None
    """What the token types say; None: 0 everywhere."""
    auxiliary: "AuxiliaryInputs | None" = None
    too_long: int = 0
    pairs: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many of each pair of Context.names were "drawn", and how many of these are "too_long"."""


class AuxiliaryInputs(NamedTuple):
    """What a companion's encoder reads, without gradient."""

    sequences: Sequences
    reads: Reads
    """The states that it gives."""


def check_stream_batch(piece: StreamBatch, terms: Set[str]) -> None:
    """Raises ValueError for what a row could not be made of. terms: of the objective's loss."""
    if not isinstance(piece, StreamBatch):
        raise ValueError(f"returned {type(piece).__name__}, not a StreamBatch (xscale/data/stream_batch.py)")
    tokens = len(piece.sequences.ids)
    if int(piece.sequences.lengths.sum()) != tokens:
        raise ValueError(f"its sequences' lengths add up to {piece.sequences.lengths.sum()}, and have {tokens} ids")
    for name, (places, counts) in piece.reads.items():
        if len(places) and not 0 <= places.min() <= places.max() < tokens:
            raise ValueError(f"reads[{name!r}] has places from {places.min()} to {places.max()}, of {tokens} tokens")
        if counts is not None and int(counts.sum()) != len(places):
            raise ValueError(f"reads[{name!r}] has counts of {counts.sum()} places, and {len(places)} places")
    if unknown := piece.labels.keys() - terms:
        raise ValueError(
            f"labels has {', '.join(sorted(unknown))}, none of the loss's terms {', '.join(sorted(terms))}"
        )


def masked_lm(
    sequences: Sequences,
    context: Context,
    *,
    mask_prob: float,
    whole_word: bool = False,
    types: Types | None = None,
    neutral: float = 0.0,
    samples: int | None = None,
    too_long: int = 0,
) -> StreamBatch:
    """The piece of MLM and TLM: term and counted targets "mlm", state "masked" [M]. neutral: share of the sequences
    whose language is not shown. samples: default, the sequences."""
    whole_word = whole_word and len(sequences.ids) > 0  # no sequence has no word numbers
    ids, targets = mask_tokens(sequences, context.tokenizer, mask_prob, whole_word)
    names = {"mlm": context.name_numbers(sequences)[sequences.numbers[targets]]} if context.names else {}
    languages = sequences.languages
    if types == "languages":
        hidden = rng.uniform(sequences.identities ^ _NEUTRAL, np.zeros(len(sequences.lengths))) < neutral
        languages = np.where(hidden[sequences.numbers], 0, languages)
    return StreamBatch(
        sequences=replace(sequences, ids=ids, languages=languages),
        reads={"masked": Reads(targets)},
        targets={"mlm": len(targets)},
        samples=len(sequences.lengths) if samples is None else samples,
        labels={"mlm": sequences.ids[targets]},
        names=names,
        types=types,
        too_long=too_long,
    )
