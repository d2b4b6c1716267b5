"""Tokenised records, and the sequences with special tokens that are made from them.

Shape letters: B sequences, N tokens of all sequences.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from xscale import rng
from xscale.data.ragged import NO_NUMBERS, concatenated_ranges
from xscale.data.tokenizer import PairTemplate, Tokenizer
from xscale.data.words import TokenWords, join_words


@dataclass(frozen=True)
class Example:
    """A tokenised record."""

    langs: tuple[str, ...]
    ids: tuple[list[int], ...]
    """Token ids of each text, without special tokens."""
    words: tuple[TokenWords, ...] | None
    """The words of each text; None if the stream's objective does not need words."""
    random_key: np.uint64
    """The key of all random choices about the record, for one stream and epoch."""
    sample_number: int = 0
    """The sample's number in the global batch of its stream."""
    key: str = ""
    links: str | None = None
    """The record's word links, in Pharaoh form."""
    follows: bool = False
    """True if the record continues the document of the example before it in its sample."""
    borders: Sequence[int] = ()
    """If the text is longer than a sequence, the indices of the tokens before which it may be cut, in ascending
    order."""


Segment = tuple[Example, int]
"""An example, and the number of one of its texts, 0 or 1."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of one stream in one array, without padding."""

    ids: np.ndarray
    """Token ids [N]."""
    lengths: np.ndarray
    """Tokens of each sequence [B]."""
    positions: np.ndarray
    """Position of each token in its sequence, from 0 on. With the option reset_positions of TLM, it is the token's
    position in its segment [N]."""
    languages: np.ndarray
    """Language number of each token, from 1 on; 0 in a sequence that is encoded without its language [N]."""
    segments: np.ndarray
    """Number of each token's segment within its sequence, from 0 on [N]."""
    word_of_token: np.ndarray | None
    """Number of each token's word within its sequence, -1 for a token that belongs to no word [N]. None if the examples
    have no words, if there are no sequences, and after concat_sequences."""
    random_keys: np.ndarray
    """Key of all random choices about each sequence, uint64 [B]."""
    text_starts: np.ndarray
    """Index of the first token of each segment's text, behind the special tokens before the text [segments]."""

    @property
    def sequence_of_token(self) -> np.ndarray:
        """Index of each token's sequence [N]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """Index of each sequence's first token [B]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def indices_in_sequence(self) -> np.ndarray:
        """Index of each token within its sequence [N]."""
        return concatenated_ranges(self.lengths)


def join_segments(
    tokenizer: Tokenizer,
    segments_of_sequences: list[list[Segment]],
    language_ids: dict[str, int],
    reset_positions: bool = False,
) -> Sequences:
    """Join the segments of each sequence, and add the special tokens.

    One segment becomes [CLS] segment [SEP]; two become [CLS] segment [SEP] segment [SEP], and so on. But the two texts
    of one record get the special tokens of the tokenizer's template for pairs, such as [CLS] A [SEP] [SEP] B [SEP].
    [CLS] belongs to the first segment. Special tokens between two segments belong to the first of the two. A sequence
    has the random key of its first example.

    language_ids: the number of each language. reset_positions: number the tokens of each segment from 0.
    """
    ids = list[int]()
    text_starts = list[int]()
    segment_lengths = list[int]()
    segment_languages = list[int]()
    segment_counts = list[int]()
    sequence_lengths = list[int]()
    random_keys = list[np.uint64]()
    for sequence in segments_of_sequences:
        template = choose_template(tokenizer, sequence)
        sequence_start = len(ids)
        segment_start = sequence_start
        ids += template.first
        for number, (example, side) in enumerate(sequence, start=1):
            text_starts.append(len(ids))
            ids += example.ids[side]
            ids += template.last if number == len(sequence) else template.between
            segment_lengths.append(len(ids) - segment_start)
            segment_languages.append(language_ids[example.langs[side]])
            segment_start = len(ids)
        segment_counts.append(len(sequence))
        sequence_lengths.append(len(ids) - sequence_start)
        random_keys.append(sequence[0][0].random_key)

    starts_of_texts = np.array(text_starts, dtype=np.int64)
    tokens_of_segment = np.array(segment_lengths, dtype=np.int64)
    lengths = np.array(sequence_lengths, dtype=np.int64)
    segment_numbers = concatenated_ranges(np.array(segment_counts, dtype=np.int64))
    word_of_token = None
    if segments_of_sequences and segments_of_sequences[0][0][0].words is not None:
        word_of_token = number_words_within_sequences(segments_of_sequences, starts_of_texts, len(ids))
    return Sequences(
        ids=np.array(ids, dtype=np.int64),
        lengths=lengths,
        positions=concatenated_ranges(tokens_of_segment if reset_positions else lengths),
        languages=np.repeat(np.array(segment_languages, dtype=np.int64), tokens_of_segment),
        segments=np.repeat(segment_numbers, tokens_of_segment),
        word_of_token=word_of_token,
        random_keys=np.array(random_keys, dtype=np.uint64),
        text_starts=starts_of_texts,
    )


def choose_template(tokenizer: Tokenizer, sequence: list[Segment]) -> PairTemplate:
    """Return the special tokens of a sequence. They are those of the tokenizer's template for pairs if the sequence has
    the two texts of one record."""
    if len(sequence) == 2 and sequence[0][0] is sequence[1][0]:
        return tokenizer.pair
    return PairTemplate([tokenizer.cls_id], [tokenizer.sep_id], [tokenizer.sep_id], has_two_token_types=False)


def number_words_within_sequences(
    sequences: list[list[Segment]], text_starts: np.ndarray, token_count: int
) -> np.ndarray:
    """Return the word number of each token within its sequence, as in Sequences.word_of_token [N]. text_starts: see
    Sequences."""
    numbers = [NO_NUMBERS]
    lengths = list[int]()
    for sequence in sequences:
        first_word = 0
        for example, side in sequence:
            assert example.words is not None, "only some examples of the batch are from Tokenizer.encode_words"
            words = example.words[side]
            numbers.append(np.where(words.word_of_token < 0, -1, words.word_of_token + first_word))
            lengths.append(len(words.word_of_token))
            first_word += len(words.is_word)
    word_of_token = np.full(token_count, -1)
    place = np.repeat(text_starts, lengths) + concatenated_ranges(np.array(lengths, dtype=np.int64))
    word_of_token[place] = np.concatenate(numbers)
    return word_of_token


def concat_sequences(first: Sequences, second: Sequences) -> Sequences:
    """Return the sequences of `first` followed by those of `second`, without word numbers."""
    return Sequences(
        ids=np.concatenate([first.ids, second.ids]),
        lengths=np.concatenate([first.lengths, second.lengths]),
        positions=np.concatenate([first.positions, second.positions]),
        languages=np.concatenate([first.languages, second.languages]),
        segments=np.concatenate([first.segments, second.segments]),
        word_of_token=None,
        random_keys=np.concatenate([first.random_keys, second.random_keys]),
        text_starts=np.concatenate([first.text_starts, second.text_starts + len(first.ids)]),
    )


def truncate_texts_in_proportion(pair: Example, excess_tokens: int) -> Example:
    """Return the pair without the last tokens of its texts: `excess_tokens` tokens in all, in proportion to the lengths
    of the texts. Each text keeps at least one token."""
    first, second = pair.ids
    cut_first = round(excess_tokens * len(first) / (len(first) + len(second)))
    cut_first = min(cut_first, len(first) - 1)
    cut_first = max(cut_first, excess_tokens - (len(second) - 1))
    keep_first = len(first) - cut_first
    keep_second = len(second) - (excess_tokens - cut_first)
    words = pair.words
    if words is not None:
        words = (words[0].select_tokens(0, keep_first), words[1].select_tokens(0, keep_second))
    return replace(pair, ids=(first[:keep_first], second[:keep_second]), words=words)


def join_sentences(sample: list[Example], max_length: int) -> list[Example]:
    """Join the sentences of a sample into texts, each of which becomes a sequence [CLS] text [SEP].

    A text has consecutive sentences of one document, as many whole ones as fit into max_length. A sentence that is
    longer than a sequence is split into pieces, between words. Every token is in exactly one text.
    """
    max_text_tokens = max_length - 2
    texts: list[list[Example]] = [[]]
    length = 0  # of the last text
    for example in sample:
        if not example.follows:
            texts.append([])
            length = 0
        for piece in split_to_fit(example, max_text_tokens):
            piece_length = len(piece.ids[0])
            if length + piece_length > max_text_tokens:
                texts.append([])
                length = 0
            texts[-1].append(piece)
            length += piece_length
    return [join_texts(examples) for examples in texts if examples]


def split_to_fit(example: Example, max_text_tokens: int) -> list[Example]:
    """Return the text in pieces of at most `max_text_tokens` tokens; [] if it has no tokens. It is cut between words.
    Only a word of more than `max_text_tokens` tokens is divided."""
    length = len(example.ids[0])
    if length == 0:
        return []
    if length <= max_text_tokens:
        return [example]
    pieces = []
    start = 0
    while start < length:
        end = length
        if length - start > max_text_tokens:
            end = find_end_of_piece(example.borders, start, max_text_tokens)
        words = example.words
        if words is not None:
            words = (words[0].select_tokens(start, end),)
        random_key = example.random_key
        if start > 0:  # each piece has its own random choices
            random_key = np.uint64(rng.hash64(example.random_key, np.uint64(start)))
        pieces.append(replace(example, ids=(example.ids[0][start:end],), words=words, random_key=random_key))
        start = end
    return pieces


def find_end_of_piece(borders: Sequence[int], start: int, max_text_tokens: int) -> int:
    """Return the end of the piece of a text that begins at token `start`: the last border within `max_text_tokens`
    tokens, or if there is none, `start + max_text_tokens`. borders: see Example."""
    furthest = start + max_text_tokens
    borders_before = bisect_right(borders, furthest)
    if borders_before == 0 or borders[borders_before - 1] <= start:
        return furthest
    return borders[borders_before - 1]


def join_texts(examples: list[Example]) -> Example:
    """Join the texts of several examples into one, and return its example, which has the random key of the first."""
    if len(examples) == 1:
        return examples[0]
    ids = list[int]()
    words = list[TokenWords]()
    for example in examples:
        ids += example.ids[0]
        if example.words is not None:
            words.append(example.words[0])
    joined_words = (join_words(words),) if words else None
    return replace(examples[0], ids=(ids,), words=joined_words)
