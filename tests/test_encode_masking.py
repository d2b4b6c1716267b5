"""Text to arrays. References: the Hugging Face tokenizer called as users call it, loops, and binomial bounds."""

import itertools
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_tools import tokenizer as tokenizers
from data_tools.demo_world import World
from tests import launch
from tests.plain import originals, sequences_of
from xscale.data.ragged import concatenated_ranges
from xscale.data.sequences import Example, Sequences, join_segments, join_sentences
from xscale.data.stream_batch import CollateContext, StreamBatch, mask_tokens
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import TokenWords
from xscale.objectives import mlm, tlm

LANGUAGES = {"en": 1, "xx": 2, "yy": 3}
TLM = {"language_embeddings": True, "reset_positions": True}


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, ...]]:
    world = World(0)
    return [world.pair(i)[:2] for i in range(300)]


@pytest.fixture(scope="module")
def hugging_face(demo: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(str(demo / "tokenizer"))


def examples_of(tokenizer: Tokenizer, texts: list[tuple[str, ...]], words: bool = False) -> list[Example]:
    made = []
    for number, sides in enumerate(texts):
        ids, numbers = tokenizer.encode_words(list(sides))
        langs = ("en", "xx")[: len(sides)]
        made.append(Example(langs, tuple(ids), tuple(numbers) if words else None, np.uint64(1000 + number)))
    return made


def two_tokens_a_word(tokens: int) -> TokenWords:
    numbers = np.arange(tokens)
    return TokenWords(numbers // 2, numbers, numbers // 2, np.ones(-(-tokens // 2), dtype=bool))


def fake(*lengths: int, identity: int = 0) -> Example:
    """An example with sides of these lengths and ids that tell their place."""
    ids = tuple([100 * side + i for i in range(length)] for side, length in enumerate(lengths))
    words = tuple(two_tokens_a_word(length) for length in lengths)
    return Example(("en", "xx")[: len(lengths)], ids, words, np.uint64(identity))


def context(tokenizer: Tokenizer, max_length: int = 128, overlong: str = "drop") -> CollateContext:
    return CollateContext(tokenizer, max_length, overlong, LANGUAGES)


def found_in(stream_batch: StreamBatch) -> list[dict[str, Any]]:
    """Each sequence, with the original ids put back."""
    columns = zip(*sequences_of(stream_batch), originals(stream_batch), strict=True)
    return [{"ids": ids, "targets": targets, "original": original} for ids, targets, original in columns]


# 1. Token ids


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_a_trained_tokenizer_agrees_with_hugging_face(tmp_path: Path, pairs, kind: str) -> None:
    texts = [("", side) for pair in pairs for side in pair]
    tokenizers.train(texts, kind, 400, lowercase=True).save_pretrained(tmp_path)
    tokenizer, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    odd = [("Ünïcode TEXT", "日本語 🙂"), ("a  b\tc", "."), *pairs[:50]]
    examples = examples_of(tokenizer, odd, words=True)
    joined = join_segments(tokenizer, [[(e, 0), (e, 1)] for e in examples], LANGUAGES)
    expected = [reference(*pair) for pair in odd]
    assert joined.ids.tolist() == [token for one in expected for token in one["input_ids"]]
    assert tokenizer.mask_id == reference.mask_token_id and tokenizer.vocab_size == len(reference)
    assert set(tokenizer.ordinary_ids.tolist()) == set(range(len(reference))) - set(reference.all_special_ids)
    types = [t for pair in odd for t in reference(*pair, return_token_type_ids=True)["token_type_ids"]]
    assert tokenizer.pair.has_two_token_types == (kind == "wordpiece")
    assert tokenizer.pair.special_count == (3 if any(types) else 4)
    assert (joined.segments * tokenizer.pair.has_two_token_types).tolist() == types
    specials = reference.all_special_ids
    unknown = reference.unk_token_id  # is text
    special = [token in specials and token != unknown for token in joined.ids.tolist()]
    starts = [place + 1 for place, (a, b) in enumerate(itertools.pairwise(special)) if a and not b]
    assert joined.text_starts.tolist() == starts


@pytest.mark.parametrize("reset", [False, True])
def test_positions_languages_and_words_by_loops(tokenizer, pairs, reset: bool) -> None:
    examples = examples_of(tokenizer, pairs[:20], words=True)
    sequences = [[(e, 0), (e, 1)] for e in examples[:10]] + [
        [(a, 1), (b, 1), (c, 1)] for a, b, c in zip(*[iter(examples[10:19])] * 3, strict=True)
    ]
    joined = join_segments(tokenizer, sequences, LANGUAGES, reset)
    at = 0
    for number, sequence in enumerate(sequences):
        ids, positions, languages, words = (
            [tokenizer.cls_id],
            [0],
            [LANGUAGES[sequence[0][0].langs[sequence[0][1]]]],
            [-1],
        )
        before = 0
        for segment, (example, side) in enumerate(sequence):
            for i, token in enumerate([*example.ids[side], tokenizer.sep_id]):
                positions.append(i if reset and segment else len(ids))
                ids.append(token)
                languages.append(LANGUAGES[example.langs[side]])
                last = i == len(example.ids[side])
                words.append(-1 if last else before + example.words[side].word_of_token[i])
            before += len(example.words[side].is_word)
        here = slice(at, at + len(ids))
        assert joined.ids[here].tolist() == ids
        assert joined.positions[here].tolist() == positions
        assert joined.languages[here].tolist() == languages
        assert joined.word_of_token[here].tolist() == words
        assert joined.lengths[number] == len(ids)
        assert joined.indices_in_sequence[here].tolist() == list(range(len(ids)))
        assert set(joined.sequence_of_token[here].tolist()) == {number} and joined.starts[number] == at
        assert joined.random_keys[number] == sequence[0][0].random_key
        at += len(ids)
    assert at == len(joined.ids)


# 2. Lengths


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=8), st.integers(8, 50))
def test_pairs_that_do_not_fit(sizes: list[tuple[int, int]], max_length: int) -> None:
    examples = [fake(*size, identity=i) for i, size in enumerate(sizes)]
    fitting = [e for e in examples if sum(map(len, e.ids)) + 3 <= max_length]
    samples = [[example] for example in examples]

    def fit_pairs(overlong: str, special: int = 3) -> list[Example]:
        tokenizer: Any = SimpleNamespace(pair=SimpleNamespace(special_count=special))
        return CollateContext(tokenizer, max_length, overlong, LANGUAGES).fit_pairs(samples)

    assert list(map(id, fit_pairs("drop"))) == list(map(id, fitting))
    assert len(fit_pairs("drop", special=4)) == sum(sum(map(len, e.ids)) + 4 <= max_length for e in examples)
    cut = fit_pairs("truncate")
    assert len(cut) == len(examples)
    for original, kept in zip(examples, cut, strict=True):
        if any(original is one for one in fitting):
            assert kept is original
            continue
        assert sum(map(len, kept.ids)) + 3 == max_length, "cut more than needed, or less"
        assert kept.random_key == original.random_key
        for side, whole, words, all_words in zip(kept.ids, original.ids, kept.words, original.words, strict=True):
            assert side, "a side was cut away"
            assert (
                side == whole[: len(side)]
                and words.word_of_token.tolist() == all_words.word_of_token[: len(side)].tolist()
            )
        shares = [len(side) / len(whole) for side, whole in zip(kept.ids, original.ids, strict=True)]
        smallest = min(map(len, original.ids))
        assert abs(shares[0] - shares[1]) <= 2 / smallest, "not in proportion"


sentences_of_documents = st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=20)


def sentence(number: int, length: int, follows: bool) -> Example:
    """Ids say which sentence and token it is; words are of 1 to 13 tokens."""
    of_token = np.repeat(np.arange(length), np.random.default_rng(number).integers(1, 14, length))[:length]
    words = TokenWords(of_token, np.arange(length), of_token, np.ones(length, dtype=bool))
    ids, identity = [1000 * number + i for i in range(length)], np.uint64(number)
    return Example(("en",), (ids,), (words,), identity, follows=follows, borders=words.tokens_to_cut_before())


@settings(max_examples=300, deadline=None)
@given(sentences_of_documents, st.integers(8, 40))
def test_running_text(sizes: list[tuple[int, bool]], max_length: int) -> None:
    """By properties: each token once and in order, documents apart, what fits together, cuts between words."""
    sample = [sentence(n, length, follows and n > 0) for n, (length, follows) in enumerate(sizes)]
    document = list(itertools.accumulate((not e.follows for e in sample), initial=0))[1:]
    texts, room = join_sentences(sample, max_length), max_length - 2
    assert [token for text in texts for token in text.ids[0]] == [token for e in sample for token in e.ids[0]]
    assert all(1 <= len(text.ids[0]) <= room for text in texts)
    assert all(len({document[token // 1000] for token in text.ids[0]}) == 1 for text in texts), "documents share a text"
    assert len({int(text.random_key) for text in texts}) == len(texts), "two texts would be masked alike"
    words = {
        token: word for e in sample for token, word in zip(e.ids[0], e.words[0].word_of_token.tolist(), strict=True)
    }
    for one, other in itertools.pairwise(texts):
        last, first = one.ids[0][-1], other.ids[0][0]
        if document[last // 1000] != document[first // 1000]:
            continue
        entire = len(sample[first // 1000].ids[0])
        if last // 1000 != first // 1000:
            assert first % 1000 == 0 and (entire > room or len(one.ids[0]) + entire > room)
        else:
            assert entire > room, "a sentence is torn that fits"
            if words[last] == words[first]:
                of_word = [t for t, w in words.items() if w == words[first] and t // 1000 == first // 1000]
                assert len(one.ids[0]) == room and len(of_word) + (one.ids[0][0] not in of_word) > 0
                assert one.ids[0][0] in of_word, "a word is torn that fits"
    for text in texts:  # whole-word masking: the same number for the same word, and for no other
        keys = [(token // 1000, words[token]) for token in text.ids[0]]
        numbers = text.words[0].word_of_token.tolist()
        assert len(set(zip(keys, numbers, strict=True))) == len(set(keys)) == len(set(numbers))
        assert text.words[0].tokens.tolist() == [*range(len(numbers))] and text.words[0].words.tolist() == numbers
        assert len(text.words[0].is_word) == sum(
            len(e.ids[0]) for e in sample if e.ids[0] and set(e.ids[0]) & set(text.ids[0])
        )


def test_a_text_that_is_one_word_is_cut_anywhere() -> None:
    texts = join_sentences([Example(("en",), (list(range(100)),), None, np.uint64(7))], 42)
    assert [len(text.ids[0]) for text in texts] == [40, 40, 20] and texts[0].random_key == 7


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_what_is_too_long_is_dropped_or_cut(tokenizer, overlong: str) -> None:
    """Also where nothing of a piece is left."""
    for sizes, long in (([(5, 5), (90, 90), (3, 200)], 2), ([(90, 90), (100, 100)], 2)):
        stream_batch = tlm.collate(
            [[fake(*size)] for size in sizes], tlm.TlmOptions(), context(tokenizer, 64, overlong)
        )
        assert max(stream_batch.sequences.lengths, default=0) <= 64
        assert (
            stream_batch.samples
            == len(stream_batch.sequences.lengths)
            == (len(sizes) if overlong == "truncate" else len(sizes) - long)
        )
    stream_batch = mlm.collate([[fake(5), fake(200)]], mlm.MaskedOptions(), context(tokenizer, 64, overlong))
    assert stream_batch.sequences.lengths.tolist() == [7, 64, 64, 64, 16]  # [CLS] and [SEP] each


# 3. Masking


def flat(ids: np.ndarray, length: int, words: np.ndarray | None = None, seed: int = 0) -> Sequences:
    """Sequences of equal length with given ids."""
    count = len(ids) // length
    lengths = np.full(count, length)
    identities = np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)
    zeros = np.zeros(len(ids), dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    return Sequences(ids, lengths, concatenated_ranges(lengths), zeros, zeros, words, identities, starts)


def within(successes: int, trials: int, p: float, sigmas: float = 5) -> bool:
    return abs(successes - trials * p) < sigmas * (trials * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("mask_prob", [0.15, 0.3])
def test_masking_rates(tokenizer, mask_prob: float) -> None:
    """15 % of the ordinary tokens; of these 80 % [MASK], 10 % random, 10 % unchanged."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, tokenizer.vocab_size, 400_000)
    special = np.isin(ids, tokenizer.hf.all_special_ids)
    masked, targets = mask_tokens(flat(ids, 100), tokenizer, mask_prob)
    assert targets.tolist() == sorted(set(targets.tolist()))
    assert not special[targets].any(), "a special token is predicted"
    assert within(len(targets), int((~special).sum()), mask_prob)
    untouched = np.ones(len(ids), dtype=bool)
    untouched[targets] = False
    assert (masked[untouched] == ids[untouched]).all(), "a token changed that is not predicted"
    became, was = masked[targets], ids[targets]
    ordinary = tokenizer.vocab_size - len(tokenizer.hf.all_special_ids)
    same = 1 / ordinary  # a random token may be the old one
    assert within(int((became == tokenizer.mask_id).sum()), len(targets), 0.8)
    assert within(int((became == was).sum()), len(targets), 0.1 + 0.1 * same)
    random_ids = became[(became != was) & (became != tokenizer.mask_id)]
    assert within(len(random_ids), len(targets), 0.1 * (1 - same))
    assert not set(random_ids.tolist()) & set(tokenizer.hf.all_special_ids)
    seen = np.bincount(random_ids, minlength=tokenizer.vocab_size)[tokenizer.ordinary_ids]
    mean = len(random_ids) / ordinary
    assert (seen > 0).mean() > 1 - 2 * np.exp(-mean) - 0.01, "some ids are never drawn"
    assert ((seen - mean) ** 2 / mean).mean() < 1.4, "random ids are not uniform"
    assert within(int(seen[: ordinary // 2].sum()), len(random_ids), (ordinary // 2) / ordinary)


def test_whole_words(tokenizer) -> None:
    """All tokens of a word or none, each word with mask_prob, each token with its own 80-10-10."""
    generator = np.random.default_rng(1)
    words = np.concatenate([[-1, *np.sort(generator.integers(0, 12, 28)), -1] for _ in range(8000)])
    ids = generator.choice(tokenizer.ordinary_ids, len(words))
    ids[words < 0] = tokenizer.cls_id
    masked, targets = mask_tokens(flat(ids, 30, words), tokenizer, 0.15, whole_word=True)
    chosen = np.zeros(len(ids), dtype=bool)
    chosen[targets] = True
    groups: dict[tuple[int, int], set[bool]] = {}
    for place, (word, hit) in enumerate(zip(words.tolist(), chosen.tolist(), strict=True)):
        if word >= 0:
            groups.setdefault((place // 30, word), set()).add(hit)
    assert not chosen[words < 0].any()
    assert all(len(outcomes) == 1 for outcomes in groups.values()), "a word is masked in part"
    assert within(sum(True in outcomes for outcomes in groups.values()), len(groups), 0.15)
    assert within(int((masked[targets] == tokenizer.mask_id).sum()), len(targets), 0.8)


def test_whole_words_of_both_sides_are_independent(tokenizer) -> None:
    """Word 0 of the second sentence is not word 0 of the first."""
    pair = Example(("en", "xx"), ([50, 51], [60, 61]), (two_tokens_a_word(2),) * 2, np.uint64(0))
    many = [Example(pair.langs, pair.ids, pair.words, np.uint64(i)) for i in range(4000)]
    joined = join_segments(tokenizer, [[(e, 0), (e, 1)] for e in many], LANGUAGES)
    _, targets = mask_tokens(joined, tokenizer, 0.5, whole_word=True)
    hits = np.zeros(len(joined.ids), dtype=bool)
    hits[targets] = True
    hits = hits.reshape(-1, 7)
    assert (hits[:, 1] == hits[:, 2]).all() and (hits[:, 4] == hits[:, 5]).all()
    assert within(int((hits[:, 1] & hits[:, 4]).sum()), 4000, 0.25)


# 4. Masks depend on the record, not on its company


def test_masks_do_not_depend_on_the_batch(tokenizer, pairs) -> None:
    examples = examples_of(tokenizer, pairs, words=True)
    for objective, samples in (
        (tlm.collate, [[e] for e in examples]),
        (
            mlm.collate,
            [[a, *(replace(e, follows=True) for e in bc)] for a, *bc in zip(*[iter(examples)] * 3, strict=True)],
        ),
    ):
        for options in (tlm.TlmOptions(), tlm.TlmOptions(whole_word=True), tlm.TlmOptions(shuffle_sides=True)):
            whole = found_in(objective(samples, options, context(tokenizer)))
            shuffled = np.random.default_rng(0).permutation(len(samples))
            for size in (1, 7, len(samples)):
                alone = {}
                for start in range(0, len(samples), size):
                    batch = shuffled[start : start + size].tolist()
                    made = objective([samples[i] for i in batch], options, context(tokenizer))
                    alone |= dict(zip(batch, found_in(made), strict=True))
                assert [alone[i] for i in range(len(samples))] == whole


# 5. Pieces


@pytest.mark.parametrize("options", [{"whole_word": True}, {"shuffle_sides": True, **TLM}])
def test_pieces_of_tlm(tokenizer, hugging_face, pairs, options: dict[str, bool]) -> None:
    examples = examples_of(tokenizer, pairs, words=True)
    stream_batch = tlm.collate([[e] for e in examples], tlm.TlmOptions(**options), context(tokenizer))
    cuts = np.cumsum(stream_batch.sequences.lengths)[:-1]
    positions, languages = (
        np.split(getattr(stream_batch.sequences, name), cuts) for name in ("positions", "languages")
    )
    swaps = hidden = 0
    for number, (row, pair) in enumerate(zip(found_in(stream_batch), pairs, strict=True)):
        straight, swapped = hugging_face(*pair)["input_ids"], hugging_face(*pair[::-1])["input_ids"]
        swap = row["original"] == swapped
        assert row["original"] in (straight, swapped)
        swaps += swap
        length, sides = len(straight), pair[::-1] if swap else pair
        first = len(hugging_face(sides[0])["input_ids"])
        reset = [*range(first), *range(length - first)]
        plain = not languages[number].any() or "reset_positions" not in options
        assert positions[number].tolist() == (list(range(length)) if plain else reset)
        expected = [1] * first + [2] * (length - first)
        shown = [3 - x for x in expected] if swap else expected
        hidden += not languages[number].any()
        assert languages[number].tolist() in ([shown, [0] * length] if "language_embeddings" in options else [shown])
    assert within(hidden, len(pairs), 0.1) if "language_embeddings" in options else hidden == 0
    assert within(swaps, len(pairs), 0.5) if "shuffle_sides" in options else swaps == 0
    assert stream_batch.types == ("languages" if "language_embeddings" in options else None)
    labels = stream_batch.labels["mlm"]
    assert stream_batch.target_counts == {"mlm": len(labels)} and stream_batch.samples == len(pairs)
    assert stream_batch.states.keys() == {"masked"} and not stream_batch.arrays and stream_batch.auxiliary is None
    assert not np.isin(labels, hugging_face.all_special_ids).any()


def test_hidden_languages(tokenizer, pairs) -> None:
    """A share of the sequences, chosen by their identities and whole, has the neutral token type; losses are told apart
    by language all the same, and nothing else differs."""
    examples = examples_of(tokenizer, pairs)
    of = replace(context(tokenizer), language_groups=("en-xx",))

    def stream_batch(share: float, order: slice = slice(None)) -> StreamBatch:
        options = tlm.TlmOptions(language_embeddings=True, language_dropout=share)
        return tlm.collate([[e] for e in examples[order]], options, of)

    def hidden(stream_batch: StreamBatch) -> set[int]:
        sequences = stream_batch.sequences
        neutral = {int(sequences.random_keys[n]) for n in sequences.sequence_of_token[sequences.languages == 0]}
        assert not set(sequences.random_keys[sequences.sequence_of_token[sequences.languages != 0]].tolist()) & neutral
        return neutral

    some, none, every = stream_batch(0.3), stream_batch(0.0), stream_batch(1.0)
    assert within(len(hidden(some)), len(pairs), 0.3) and not hidden(none) and len(hidden(every)) == len(pairs)
    assert hidden(stream_batch(0.3, slice(None, None, -1))) == hidden(some) < hidden(stream_batch(0.5))
    assert (some.sequences.ids == none.sequences.ids).all() and (every.group_of_target["mlm"] == 0).all()


def encode_in_a_worker(tokenizer_dir: Path) -> None:
    os.environ.update(TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS="2")
    tokenizer = Tokenizer(tokenizer_dir)
    texts = ["one two three"] * 5000
    tokenizer.encode(texts)  # with threads, where they are wanted
    worker = multiprocessing.get_context("fork").Process(target=tokenizer.encode, args=(texts,))
    worker.start()
    worker.join(20)
    hangs = worker.is_alive()
    worker.kill()
    assert not hangs


def test_a_worker_tokenises_whatever_the_environment_says(demo: Path) -> None:
    """The library's threads do not come along into a fork, which waits for them for ever."""
    assert launch.fork_ranks(0, encode_in_a_worker, demo / "tokenizer") == [0]
