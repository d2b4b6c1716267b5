"""The stream batch: the sequences of one stream in one packed row, and the states that the stream's loss reads.

`masked_lm` makes the stream batch of a loss that predicts masked tokens.

Shape letters: N tokens, B sequences, M predicted tokens, T targets of a term, S states that a loss reads, K tokens of
which these states are sums.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from xscale import rng
from xscale.data.ragged import NO_NUMBERS, concatenated_ranges, offsets_and_end_from_counts
from xscale.data.sequences import Example, Sequences, truncate_texts_in_proportion
from xscale.data.shards import sorted_pair_name
from xscale.data.tokenizer import Tokenizer
from xscale.metric_keys import Counts

TokenTypeField = Literal["languages", "segments"]
"""The field of Sequences from which token types are taken."""
_NEUTRAL = rng.key("language", "neutral")


@dataclass(frozen=True)
class CollateContext:
    """The arguments of a collate function other than its samples and options."""

    tokenizer: Tokenizer
    max_length: int
    overlong: str
    """For pairs of more than max_length tokens: "drop" leaves them out, "truncate" cuts them."""
    language_ids: dict[str, int]
    """Language -> its number, from 1 on. The number 0 (neutral) means a language that the model does not know."""
    seed: int = 0
    lexicons: tuple[Any, ...] = ()
    """The stream's dictionaries (data/lexicon.py), without the words that data.lexicon_heldout withholds."""
    stream: str = ""
    step: int = 0
    row: int = 0
    """Number of the packed row among the rows of all ranks in the step."""
    rows: int = 1
    """Number of packed rows of all ranks in the step."""
    has_two_token_types: bool = False
    """True if the first sentence of a pair has token type 0, and the second one 1."""
    language_groups: tuple[str, ...] = ()
    """Languages ("en") and pairs ("de-en") whose losses are reported separately."""

    def fit_pairs(self, samples: list[list[Example]]) -> list[Example]:
        """Return the pairs of at most max_length tokens. If `overlong` is "truncate", both texts of a longer pair are
        cut in proportion; otherwise it is left out. samples: one pair each."""
        fitting = list[Example]()
        for (pair,) in samples:
            excess = sum(map(len, pair.ids)) - (self.max_length - self.tokenizer.pair.special_count)
            if excess <= 0:
                fitting.append(pair)
            elif self.overlong == "truncate":
                fitting.append(truncate_texts_in_proportion(pair, excess))
        return fitting

    def group_numbers(self, sequences: Sequences) -> np.ndarray:
        """Return the index in `language_groups` of each sequence's language or pair; len(language_groups) if it is none
        of them [B]. The languages of a sequence are those of its first and last token."""
        ends = np.cumsum(sequences.lengths)
        first = sequences.languages[ends - sequences.lengths]
        last = sequences.languages[ends - 1]
        distinct, which = np.unique(np.stack([first, last], 1), axis=0, return_inverse=True)
        language_of = {number: language for language, number in self.language_ids.items()}
        groups = np.full(len(distinct), len(self.language_groups))
        for i, (first_number, last_number) in enumerate(distinct.tolist()):
            languages = {language_of[first_number], language_of[last_number]}  # one language, or two
            name = sorted_pair_name(languages)
            if name in self.language_groups:
                groups[i] = self.language_groups.index(name)
        return groups[which]

    def token_type_field(self, language_embeddings: bool) -> TokenTypeField | None:
        """Return the field of Sequences that has the token types of pairs; None: all types are 0."""
        if language_embeddings:
            return "languages"
        return "segments" if self.has_two_token_types else None


class Gather(NamedTuple):
    """States that losses read. State i is the sum of the hidden states of the tokens columns[offsets[i]:offsets[i +
    1]].

    A Gather is a matrix of zeros and ones in compressed sparse row form, with a row for each state and a column for
    each token. Its arrays are numpy arrays in a worker, and tensors in a step.
    """

    offsets: Any
    """The index in `columns` at which each state begins, and K at the end [S + 1], int32."""
    columns: Any
    """The tokens of all states, one state after the other [K], int32: indices of tokens, or in Row.gather indices of
    Row.places."""

    @property
    def state_count(self) -> int:
        """Number of states S."""
        return len(self.offsets) - 1

    @staticmethod
    def single(tokens: np.ndarray) -> "Gather":
        """Return the gather whose states are the hidden states of single tokens. tokens: their indices [S]."""
        return Gather.sums(tokens, np.ones_like(tokens))

    @staticmethod
    def sums(tokens: np.ndarray, counts: np.ndarray) -> "Gather":
        """Return the gather whose states are sums. tokens: the tokens of each sum, one sum after the other [K]; counts:
        the number of tokens of each sum [S]."""
        return Gather(offsets_and_end_from_counts(counts), tokens.astype(np.int32))

    def shift(self, token_count: int) -> "Gather":
        """Return the gather for a row in which the tokens follow `token_count` other tokens."""
        return self._replace(columns=self.columns + token_count)

    @staticmethod
    def concat(gathers: Iterable["Gather"]) -> "Gather":
        """Return the states of several gathers, which read the tokens of one row."""
        counts = [NO_NUMBERS]
        columns = [NO_NUMBERS]
        for gather in gathers:
            counts.append(np.diff(gather.offsets))
            columns.append(gather.columns)
        return Gather.sums(np.concatenate(columns), np.concatenate(counts))

    def transpose(self, token_count: int) -> "Gather":
        """Return the transposed matrix: for each token, the states whose sums have the token. It turns the gradient
        of the states into the gradient of the hidden states. token_count: the number of tokens."""
        by_column = np.argsort(self.columns, kind="stable")  # the K entries in the order of their tokens
        states = np.repeat(np.arange(self.state_count), np.diff(self.offsets))
        return Gather.sums(states[by_column], np.bincount(self.columns, minlength=token_count))


@dataclass(frozen=True)
class StreamBatch:
    """One stream's part of a packed row.

    A row may have no sample of the stream. `collate` makes the stream's part of such a row, too, with the same keys in
    the dictionaries, because the loss reads them in every row. Counts of its samples are 0, and arrays of its samples
    are empty. But data that do not come from samples, such as the dictionary entries of ALIGN-MLM, are in every row."""

    sequences: Sequences
    """The sequences as the model sees them, with masked tokens."""
    states: dict[str, Gather]
    """The states that the loss reads, by name; columns are indices of tokens in `sequences`."""
    target_counts: dict[str, int]
    """Number of targets of each term of the loss, by term, and other counts of the stream, by name."""
    samples: int
    """Number of samples."""
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    """Term -> the token ids that it predicts [M]; terms are in the order in which the loss predicts them
    (Losses.predictions in objectives/base.py)."""
    group_of_target: dict[str, np.ndarray] = field(default_factory=dict)
    """Term -> the index of each target's language or pair in CollateContext.language_groups [T]. For these terms, the
    loss of predictions, and metrics that have a number for each target, are also reported by language."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Other arrays that the loss reads on the device, by name."""
    types: TokenTypeField | None = None
    """The field of `sequences` that has the token types; None: all types are 0."""
    auxiliary: "StreamBatch | None" = None
    """The sequences and states of the stream's auxiliary encoder, which has no gradient."""
    pair_counts: Counts = field(default_factory=dict)
    """Number of sampled pairs ("drawn") by pair of languages, and number of pairs of more than max_length tokens
    ("too_long") of all pairs and by pair of languages. The loader sets it, not collate."""
    language_groups: tuple[str, ...] = ()
    """CollateContext.language_groups. The loader sets it."""


def check_stream_batch(stream_batch: StreamBatch, terms: Set[str]) -> None:
    """Raise ValueError if a stream batch cannot be packed into a row. terms: the terms of the objective's loss."""
    if not isinstance(stream_batch, StreamBatch):
        raise ValueError(
            f"`collate` returned {type(stream_batch).__name__}, not a StreamBatch (xscale/data/stream_batch.py)"
        )
    tokens = len(stream_batch.sequences.ids)
    total = int(stream_batch.sequences.lengths.sum())
    if total != tokens:
        raise ValueError(
            f"`collate` returned sequences with {tokens} ids, but the lengths of the sequences add up to {total}"
        )
    for name, (offsets, columns) in stream_batch.states.items():
        if len(columns) and not 0 <= columns.min() <= columns.max() < tokens:
            raise ValueError(
                f"`collate` returned states[{name!r}], a Gather with token indices from {columns.min()} to "
                f"{columns.max()} in `columns`. Each index must be at least 0 and less than {tokens}, the number of "
                "tokens in the sequences"
            )
        if offsets[-1] != len(columns):
            raise ValueError(
                f"`collate` returned states[{name!r}], a Gather with {len(columns)} token indices in `columns`, but "
                f"its last offset is {offsets[-1]}. The last offset must be the number of token indices"
            )
    unknown = stream_batch.labels.keys() - terms
    if unknown:
        raise ValueError(
            f"`collate` returned labels of the terms {', '.join(sorted(unknown))}, but the terms of the loss are "
            f"{', '.join(sorted(terms))}"
        )


KEEP_FROM = 0.9
RANDOM_FROM = 0.8
"""Each chosen token gets a random number from [0, 1). Below RANDOM_FROM the token becomes [MASK]; from RANDOM_FROM to
KEEP_FROM it becomes a random token; from KEEP_FROM on it stays."""
_CHOOSE = rng.key("masking", "choose")
_ACTION = rng.key("masking", "action")
_RANDOM_ID = rng.key("masking", "random id")


def mask_tokens(
    sequences: Sequences, tokenizer: Tokenizer, mask_prob: float, whole_word: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids after masking [N], and the sorted indices of the tokens to predict [M] (Devlin et al. 2019).

    Each token that is not a special one is chosen with probability `mask_prob`. A chosen token becomes [MASK] in 80 %
    of the cases, a random ordinary token in 10 %, and stays in 10 %. Every choice depends only on the random key of the
    sequence and on the index of the token (or the number of the word) in it.
    """
    keys_N = sequences.random_keys[sequences.sequence_of_token]
    offsets_N = sequences.indices_in_sequence.astype(np.uint64)
    units_N = offsets_N  # tokens of a sequence with the same number are chosen together
    if whole_word:
        assert sequences.word_of_token is not None, "whole_word needs words: set `words` in Objective(...)"
        alone = offsets_N + np.uint64(1 << 32)  # for tokens that belong to no word: numbers that no word has
        units_N = np.where(sequences.word_of_token < 0, alone, sequences.word_of_token.astype(np.uint64))
    is_special = tokenizer.is_special[sequences.ids]
    chosen = ~is_special & (rng.uniform(keys_N ^ _CHOOSE, units_N) < mask_prob)

    targets = np.flatnonzero(chosen)
    keys_M = keys_N[targets]
    offsets_M = offsets_N[targets]
    action = rng.uniform(keys_M ^ _ACTION, offsets_M)
    pick = rng.uniform(keys_M ^ _RANDOM_ID, offsets_M) * len(tokenizer.ordinary_ids)
    random_ids = tokenizer.ordinary_ids[pick.astype(np.int64)]
    replaced = np.where(action < RANDOM_FROM, tokenizer.mask_id, random_ids)
    ids = sequences.ids.copy()
    ids[targets] = np.where(action < KEEP_FROM, replaced, ids[targets])
    return ids, targets


def masked_lm(
    sequences: Sequences,
    context: CollateContext,
    *,
    mask_prob: float,
    whole_word: bool = False,
    types: TokenTypeField | None = None,
    neutral_share: float = 0.0,
    samples: int | None = None,
    term: str = "mlm",
) -> StreamBatch:
    """Return a stream batch of masked sequences, with one term and the states "masked" [M].

    types: see StreamBatch. neutral_share: with `types` "languages", the share of the sequences that are encoded as
    transformers does by default: the language number is 0, and positions do not start again in a second sentence.
    samples: the number of samples; None: the number of sequences.
    """
    whole_word = whole_word and len(sequences.ids) > 0  # without sequences there are no word numbers
    ids, targets = mask_tokens(sequences, context.tokenizer, mask_prob, whole_word)
    group_of_target = {}
    if context.language_groups:
        group_of_target[term] = context.group_numbers(sequences)[sequences.sequence_of_token[targets]]
    languages = sequences.languages
    positions = sequences.positions
    if types == "languages":
        is_neutral = rng.uniform(sequences.random_keys ^ _NEUTRAL, np.zeros(len(sequences.lengths))) < neutral_share
        is_neutral_N = is_neutral[sequences.sequence_of_token]
        languages = np.where(is_neutral_N, 0, languages)
        positions = np.where(is_neutral_N, concatenated_ranges(sequences.lengths), positions)
    return StreamBatch(
        sequences=replace(sequences, ids=ids, languages=languages, positions=positions),
        states={"masked": Gather.single(targets)},
        target_counts={term: len(targets)},
        samples=len(sequences.lengths) if samples is None else samples,
        labels={term: sequences.ids[targets]},
        group_of_target=group_of_target,
        types=types,
    )
