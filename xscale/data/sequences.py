"""Token ids to flat sequences with their special tokens.

Shape letters: B sequences, N tokens of all of them behind one another.
"""

from dataclasses import dataclass, replace

import numpy as np

from xscale.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Example:
    """A tokenised record. `ids` has one list a text, without special tokens."""

    langs: tuple[str, ...]
    ids: tuple[list[int], ...]
    words: tuple[list[int], ...] | None
    """For each token the number of its word (whole-word masking), where asked for."""
    identity: np.uint64
    """Key of all randomness that concerns this record in this epoch of this stream."""
    number: int = 0
    """The sample's number in the global batch of its stream."""
    key: str = ""
    links: str | None = None
    """The record's word links, in Pharaoh form."""
    record: np.uint64 | int = 0
    """Of the record itself, the same in every epoch and stream; 0: unknown."""
    word_counts: tuple[int, ...] | None = None
    """Whitespace words of each text before any cut, where `words` are whitespace words."""


@dataclass(frozen=True)
class Sequences:
    """Sequences of one stream behind one another, without padding."""

    ids: np.ndarray
    """Token ids [N]."""
    lengths: np.ndarray
    """Tokens of each sequence [B]."""
    positions: np.ndarray
    """Position of each token in its sequence, or in its segment where positions are reset [N]."""
    languages: np.ndarray
    """Language number of each token [N]."""
    words: np.ndarray | None
    """Word number of each token within its sequence, -1 for special tokens [N]."""
    identities: np.ndarray
    """uint64 key of each sequence [B]."""

    @property
    def numbers(self) -> np.ndarray:
        """Sequence number of each token [N]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """Index of each sequence's first token [B]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def offsets(self) -> np.ndarray:
        """Index of each token within its sequence [N]."""
        return offsets(self.lengths)


def offsets(lengths: np.ndarray) -> np.ndarray:
    """0..length-1 for each length, concatenated."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def join_segments(
    tokenizer: Tokenizer,
    sequences: list[list[tuple[Example, int]]],
    language_ids: dict[str, int],
    reset_positions: bool = False,
) -> Sequences:
    """[CLS] segment [SEP] segment [SEP] ... for each sequence; a segment is (example, number of its text).

    The first [SEP] belongs to the first segment, and so on; [CLS] belongs to the first. A sequence takes the
    identity of its first example.
    """
    flat: list[int] = []
    words: list[int] | None = [] if any(s and s[0][0].words is not None for s in sequences) else None
    segment_lengths, segment_languages, segments = [], [], []
    for sequence in sequences:
        flat.append(tokenizer.cls_id)
        start, first_word = len(flat) - 1, 0
        if words is not None:
            words.append(-1)
        for example, side in sequence:
            flat += example.ids[side]
            flat.append(tokenizer.sep_id)
            if words is not None:
                assert example.words is not None
                numbers = example.words[side]
                words += [first_word + w if w >= 0 else -1 for w in numbers]
                words.append(-1)
                first_word += max(numbers, default=-1) + 1
            segment_lengths.append(len(flat) - start)
            segment_languages.append(language_ids[example.langs[side]])
            start = len(flat)
        segments.append(len(sequence))
    per_segment = np.array(segment_lengths, dtype=np.int64)
    starts = np.cumsum([0, *segments[:-1]]) if segments else np.empty(0, dtype=np.int64)
    lengths = np.add.reduceat(per_segment, starts) if segments else np.empty(0, dtype=np.int64)
    return Sequences(
        ids=np.array(flat, dtype=np.int64),
        lengths=lengths,
        positions=offsets(per_segment if reset_positions else lengths),
        languages=np.repeat(np.array(segment_languages, dtype=np.int64), per_segment),
        words=None if words is None else np.array(words, dtype=np.int64),
        identities=np.array([sequence[0][0].identity for sequence in sequences], dtype=np.uint64),
    )


def behind(first: Sequences, second: Sequences) -> Sequences:
    """The second's sequences behind the first's; without word numbers."""
    joined = {
        name: np.concatenate([getattr(first, name), getattr(second, name)])
        for name in ("ids", "lengths", "positions", "languages", "identities")
    }
    return Sequences(**joined, words=None)


def fit_pairs(examples: list[Example], max_length: int, overlong: str) -> tuple[list[Example], int]:
    """Pairs that fit `[CLS] S [SEP] T [SEP]`; the others are dropped or cut, both sides in proportion.

    Returns the pairs and how many were too long.
    """
    room, kept, long = max_length - 3, [], 0
    for example in examples:
        first, second = example.ids
        excess = len(first) + len(second) - room
        if excess > 0:
            long += 1
            if overlong == "drop":
                continue
            cut_first = min(len(first) - 1, round(excess * len(first) / (len(first) + len(second))))
            cut_first = max(cut_first, excess - len(second) + 1)  # a token of either side stays
            keep = (len(first) - cut_first, len(second) - (excess - cut_first))
            example = truncated(example, keep)
        kept.append(example)
    return kept, long


def pack_sentences(
    sample: list[Example], max_length: int, overlong: str
) -> tuple[list[list[tuple[Example, int]]], int]:
    """Whole sentences of a sample into sequences of at most `max_length` tokens, in order.

    Returns the sequences (usually one) and how many sentences alone were too long.
    """
    sequences: list[list[tuple[Example, int]]] = []
    room, long = 0, 0
    for example in sample:
        if len(example.ids[0]) + 2 > max_length:
            long += 1
            if overlong == "drop":
                continue
            example = truncated(example, (max_length - 2,))
        if len(example.ids[0]) + 1 > room or not sequences:
            sequences.append([])
            room = max_length - 1
        sequences[-1].append((example, 0))
        room -= len(example.ids[0]) + 1
    return sequences, long


def truncated(example: Example, keep: tuple[int, ...]) -> Example:
    ids = tuple(side[:n] for side, n in zip(example.ids, keep, strict=True))
    words = example.words and tuple(side[:n] for side, n in zip(example.words, keep, strict=True))
    return replace(example, ids=ids, words=words)
