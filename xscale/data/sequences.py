"""Tokenised records, and the sequences with special tokens that are made of them.

Shape letters: B sequences, N tokens of all of them, laid end to end.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from xscale import rng
from xscale.data import words as words_of
from xscale.data.ragged import indices_within
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import TokenWords

_NO_WORD = np.full(8, -1)


@dataclass(frozen=True)
class Example:
    """A tokenised record."""

    langs: tuple[str, ...]
    ids: tuple[list[int], ...]
    """Token ids of each text, without special tokens."""
    words: tuple[TokenWords, ...] | None
    """The words of each text; None if the stream's objective does not need words."""
    identity: np.uint64
    """The key of all random choices about the record, for one stream and epoch."""
    number: int = 0
    """The sample's number in the global batch of its stream."""
    key: str = ""
    links: str | None = None
    """The record's word links, in Pharaoh form."""
    follows: bool = False
    """True if the example continues the document of the example before it in its sample."""
    borders: Sequence[int] = ()
    """Tokens before which a text that is longer than a sequence may be cut, in order."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of one stream, laid end to end without padding."""

    ids: np.ndarray
    """Token ids [N]."""
    lengths: np.ndarray
    """Tokens of each sequence [B]."""
    positions: np.ndarray
    """Position of each token in its sequence, or in its segment if positions are reset [N]."""
    languages: np.ndarray
    """Language number of each token, from 1 on; 0 for an unknown language [N]."""
    segments: np.ndarray
    """Number of each token's segment within its sequence, from 0 on [N]."""
    words: np.ndarray | None
    """Word number of each token within its sequence, -1 for a token that belongs to no word [N]."""
    identities: np.ndarray
    """uint64 key of all random choices about each sequence [B]."""
    segment_starts: np.ndarray
    """Index of each segment's first token that is not a special one."""

    @property
    def numbers(self) -> np.ndarray:
        """Index of each token's sequence [N]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """Index of each sequence's first token [B]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def offsets(self) -> np.ndarray:
        """Index of each token within its sequence [N]."""
        return indices_within(self.lengths)


def join_segments(
    tokenizer: Tokenizer,
    sequences: list[list[tuple[Example, int]]],
    language_ids: dict[str, int],
    reset_positions: bool = False,
) -> Sequences:
    """Lay out each sequence as [CLS] segment [SEP] segment [SEP] ...; a segment is (example, number of its text).

    Two texts of one record get the tokenizer's own template for a pair. [CLS] belongs to the first segment, and special
    tokens between two segments belong to the first of them. A sequence has the identity of its first example.
    """
    flat: list[int] = []
    words: list[np.ndarray] | None = [] if any(s and s[0][0].words is not None for s in sequences) else None
    segment_starts, segment_lengths, segment_languages, segments, first_words = [], [], [], [], []
    sep = [tokenizer.sep_id]
    for sequence in sequences:
        start, first_word = len(flat), 0
        pair = len(sequence) == 2 and sequence[0][0] is sequence[1][0]
        opening, between, closing = tokenizer.pair[:3] if pair else ([tokenizer.cls_id], sep, sep)
        before = opening
        for number, (example, side) in enumerate(sequence):
            flat += before
            segment_starts.append(len(flat))
            flat += example.ids[side]
            after = closing if number == len(sequence) - 1 else between
            flat += after
            if words is not None:
                assert example.words is not None
                words += [_NO_WORD[: len(before)], example.words[side].of_token, _NO_WORD[: len(after)]]
                first_words.append(first_word)
                first_word += len(example.words[side].is_word)
            segment_lengths.append(len(flat) - start)
            segment_languages.append(language_ids[example.langs[side]])
            start, before = len(flat), []
        segments.append(len(sequence))
    per_segment = np.array(segment_lengths, dtype=np.int64)
    of_sequence = np.array(segments, dtype=np.int64)
    starts = np.cumsum(of_sequence) - of_sequence
    lengths = np.add.reduceat(per_segment, starts) if segments else np.empty(0, dtype=np.int64)
    numbers = None
    if words is not None:
        within_segments = np.concatenate([_NO_WORD[:0], *words])
        numbers = np.where(within_segments < 0, -1, within_segments + np.repeat(first_words, per_segment))
    return Sequences(
        ids=np.array(flat, dtype=np.int64),
        lengths=lengths,
        positions=indices_within(per_segment if reset_positions else lengths),
        languages=np.repeat(np.array(segment_languages, dtype=np.int64), per_segment),
        segments=np.repeat(indices_within(of_sequence), per_segment),
        words=numbers,
        identities=np.array([sequence[0][0].identity for sequence in sequences], dtype=np.uint64),
        segment_starts=np.array(segment_starts, dtype=np.int64),
    )


def concatenated(first: Sequences, second: Sequences) -> Sequences:
    """Return the sequences of `first` followed by those of `second`, without word numbers."""
    joined = {
        name: np.concatenate([getattr(first, name), getattr(second, name)])
        for name in ("ids", "lengths", "positions", "languages", "segments", "identities")
    }
    segment_starts = np.concatenate([first.segment_starts, second.segment_starts + len(first.ids)])
    return Sequences(**joined, words=None, segment_starts=segment_starts)


def fit_pairs(examples: list[Example], max_length: int, overlong: str, special: int = 3) -> tuple[list[Example], int]:
    """Return the pairs of at most `max_length` tokens, including `special` special ones, and the number of longer
    pairs. overlong: "drop" drops longer pairs, "truncate" cuts both of their sides in proportion."""
    room, kept, long = max_length - special, [], 0
    for example in examples:
        first, second = example.ids
        excess = len(first) + len(second) - room
        if excess > 0:
            long += 1
            if overlong == "drop":
                continue
            cut_first = min(len(first) - 1, round(excess * len(first) / (len(first) + len(second))))
            cut_first = max(cut_first, excess - len(second) + 1)  # each side keeps at least one token
            keep = (len(first) - cut_first, len(second) - (excess - cut_first))
            ids = tuple(side[:n] for side, n in zip(example.ids, keep, strict=True))
            words = example.words and tuple(side.cut(n) for side, n in zip(example.words, keep, strict=True))
            example = replace(example, ids=ids, words=words)
        kept.append(example)
    return kept, long


def pack_sentences(sample: list[Example], max_length: int) -> list[Example]:
    """Join a sample's sentences to texts for `[CLS] text [SEP]`; a text is consecutive sentences of one document.

    A text has as many whole sentences as fit into max_length. A longer sentence is split into several texts, between
    words. Every token is in one text.
    """
    texts: list[list[Example]] = []
    size, room = 0, max_length - 2
    for example in sample:
        if not example.follows:
            size = room
        for part in split_to_fit(example, room):
            if size + len(part.ids[0]) > room:
                texts.append([])
                size = 0
            texts[-1].append(part)
            size += len(part.ids[0])
    return [join_texts(text) for text in texts]


def split_to_fit(example: Example, room: int) -> list[Example]:
    """Return the text in pieces of at most `room` tokens, cut between words unless a single word is longer."""
    ids, starts = example.ids[0], [0]
    while len(ids) - starts[-1] > room:
        most = starts[-1] + room
        at = bisect_right(example.borders, most)
        border = example.borders[at - 1] if at else 0
        starts.append(border if border > starts[-1] else most)
    if len(starts) == 1:
        return [example] if ids else []
    words = example.words
    return [
        replace(
            example,
            ids=(ids[start:end],),
            words=words and (words[0].cut(end, start),),
            identity=example.identity if start == 0 else np.uint64(rng.hash64(example.identity, np.uint64(start))),
        )
        for start, end in pairwise([*starts, len(ids)])
    ]


def join_texts(examples: list[Example]) -> Example:
    """Return several texts as one, with the identity of the first text."""
    ids = [token for example in examples for token in example.ids[0]]
    words = [example.words[0] for example in examples if example.words is not None]
    return replace(examples[0], ids=(ids,), words=(words_of.join_words(words),) if words else None)
