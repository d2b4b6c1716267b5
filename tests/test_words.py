"""What a word is, and which tokens it has. References: a regular expression (of another library), hand-cut sentences,
and loops over the offsets of Hugging Face's tokenizers."""

import lzma
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data_tools import tokenizer as tokenizers
from tests import word_table
from xscale.data import words
from xscale.data.link_projection import character_indices_of_words, project_links_and_count_dropped
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import segment_into_words_and_symbols, split_words_and_symbols

U = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
Z, J, T = "\u200b", "\u200d", "\U0001f3fb-\U0001f3ff"
Y = r"[^\s\p{Z}\p{Cc}\p{Cf}\p{L}\p{M}\p{N}]"
E = rf"[\p{{M}}\p{{Cf}}{T}&&[^{Z}]]*"
REFERENCE = (
    rf"[\p{{L}}\p{{M}}\p{{N}}&&[^{U}]][\p{{L}}\p{{M}}\p{{N}}\p{{Cf}}&&[^{U}{Z}]]*"
    rf"|[{U}][\p{{M}}\p{{Cf}}&&[^{Z}]]*|{Y}{E}(?:(?<={J}){Y}{E})*"
)


def spans(texts: list[str]) -> list[list[tuple[int, int]]]:
    """(first character, end) of each word of each text, by a loop."""
    found = segment_into_words_and_symbols(texts)
    made = []
    for number in range(len(texts)):
        of: dict[int, tuple[int, int]] = {}
        for place, word in enumerate(found.word_of[found.chars[number] : found.chars[number + 1]].tolist()):
            if word >= 0:
                of[word] = (of.get(word, (place, 0))[0], place + 1)
        assert list(of) == list(range(*found.words[number : number + 2].tolist()))
        made.append(list(of.values()))
    return made


def reference(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in regex.compile(REFERENCE, regex.V1).finditer(text)]


ALPHABET = (
    "aB7éß'-.,!? \t\n\u00a0\u200b\u200c\u200d\u0301\u0e31\u0e01\u0e40学ーあア々〇\u1781\u17d4\u17b6\u1000\u104a"
    "\u0915\u093f\u0651\u0640\u064e☺️👩🏽\U0001f3fd❤🔥$€%½³"
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text(st.one_of(st.sampled_from(ALPHABET), st.characters(exclude_categories=["Cs"]))), max_size=4))
def test_any_text_is_cut_as_the_pattern_cuts_it(texts: list[str]) -> None:
    assert spans(texts) == [reference(text) for text in texts]


def test_real_text_is_cut_as_the_pattern_cuts_it(plain_texts: list[Path]) -> None:
    from tokenizers import Regex, pre_tokenizers

    pattern = pre_tokenizers.Split(Regex(REFERENCE), "removed", invert=True)
    for path in [*plain_texts[:5], *plain_texts[5::6]]:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
            texts = [line.rstrip("\n") for line, _ in zip(file, range(500), strict=False)]
        assert spans(texts) == [[at for _, at in pattern.pre_tokenize_str(text)] for text in texts], path.name


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("l'homme, 3.14!", "l ' homme , 3 . 14 !"),
        ("he said: «no»", "he said : « no »"),
        ("AC/DC e-mail snake_case", "AC / DC e - mail snake _ case"),
        ("我爱北京。", "我 爱 北 京 。"),
        ("iPhone12很好", "iPhone12 很 好"),
        ("これはペンです。", "こ れ は ペ ン で す 。"),
        ("コーヒー", "コ ー ヒ ー"),
        ("ภาษาไทย", "ภ า ษ า ไ ท ย"),
        ("ที่นี่", "ที่ นี่"),  # vowel signs and tone marks stay with their consonant
        ("ພາສາລາວ", "ພ າ ສ າ ລ າ ວ"),
        ("ភាសាខ្មែរ។", "ភា សា ខ្ មែ រ ។"),
        ("မြန်မာ၊", "မြ န် မာ ၊"),
        ("हिन्दी भाषा", "हिन्दी भाषा"),
        ("العَرَبِيَّة ـــ", "العَرَبِيَّة ـــ"),  # with diacritics; tatweel
        ("می‌خواهم", "می‌خواهم"),  # a zero width non-joiner
        ("a\u200bb", "a b"),
        ("👩🏽‍🔬❤️!", "👩🏽‍🔬 ❤️ !"),
        ("\ufeffa\u0301 \u0301", "a\u0301 \u0301"),
    ],
)
def test_words_cut_by_hand(text: str, cut: str) -> None:
    assert split_words_and_symbols([text])[0][0] == cut.split(" ")


def test_punctuation_and_symbols_are_no_words() -> None:
    ((found, is_word),) = split_words_and_symbols(["我 a1 é . 。 ។ ၊ $ 👩🏽 ー が"])
    assert [w for w, whole in zip(found, is_word, strict=True) if whole] == ["我", "a1", "é", "ー", "が"]


def test_the_table_is_frozen() -> None:
    """Links in shards count words by it: another table needs another version of the shards."""
    assert words.VERSION == "2d1b9a2b174cfced"
    ours = {int(line.split()[0], 16) for line in words.TABLE.read_text().splitlines()}
    new = {first for first, _ in word_table.ranges(end=0x3000)}
    changed = {code for code in ours ^ new if code < 0x3000}
    assert len(changed) < 60  # a later `regex` may know more characters


@pytest.fixture(scope="module", params=["wordpiece", "unigram", "bpe"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    tokenizers.train([("", text) for text in TEXTS * 20], request.param, 500, lowercase=False).save_pretrained(out)
    return out


TEXTS = [
    "The dog's bone, he said, is gone.",
    "Der Hund (alt) sagt: «Wo ist mein Knochen?»",
    "后来，他说：“我们走吧。”",
    "he has ½ a 3.14 pie … isn't it",
    "一个a\u200bb test​s \u00a0 x",
    " two  spaces\tand 学生们 ",
    "",
    "。",
]


def test_tokens_of_words_by_a_loop(trained: Path) -> None:
    """By the offsets of the tokenizer as users call it."""
    tokenizer, reference_tokenizer = Tokenizer(trained), AutoTokenizer.from_pretrained(str(trained))
    ids, found = tokenizer.encode_words(TEXTS)
    for text, tokens, got in zip(TEXTS, ids, found, strict=True):
        encoded = reference_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert tokens == encoded["input_ids"]
        of_char = {c: w for w, (a, b) in enumerate(spans([text])[0]) for c in range(a, b)}
        is_word = split_words_and_symbols([text])[0][1]
        expected, first = [], []
        for token, (start, end) in enumerate(encoded["offset_mapping"]):
            space = reference_tokenizer.convert_ids_to_tokens(tokens[token]) == "▁"
            inside = [of_char[c] for c in range(start, end) if c in of_char and not space]
            of_token = list(range(min(inside), max(inside) + 1)) if inside else []
            of_token = [w for w in of_token if is_word[w]] or of_token
            expected += [(token, w) for w in of_token]
            first.append(of_token[0] if of_token else -1)
        assert list(zip(got.tokens.tolist(), got.words.tolist(), strict=True)) == expected
        assert got.word_of_token.tolist() == first and got.is_word.tolist() == is_word.tolist()
        assert sorted(got.words.tolist()) == got.words.tolist()  # never backwards
        cut = got.select_tokens(0, 2)
        assert list(zip(cut.tokens.tolist(), cut.words.tolist(), strict=True)) == [e for e in expected if e[0] < 2]
        assert cut.word_of_token.tolist() == first[:2] and len(cut.is_word) == len(is_word)


def test_text_that_spells_special_tokens_has_none(trained: Path) -> None:
    """As Hugging Face's tokenizer splits them where it is asked to; `<s>` is HTML's struck text."""
    tokenizer, reference_tokenizer = Tokenizer(trained), AutoTokenizer.from_pretrained(str(trained))
    special = [tokenizer.hf.mask_token, tokenizer.hf.pad_token, tokenizer.hf.cls_token, tokenizer.hf.sep_token]
    text = "The dog " + " is ".join(special) + special[0]
    (ids,), (inside,) = tokenizer.encode([text]), tokenizer.encode_inside_sentence([text])
    assert not {tokenizer.mask_id, tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id} & {*ids, *inside}
    assert ids == tokenizer.encode_words([text])[0][0]
    assert ids == reference_tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_words_of_dictionaries_have_the_tokens_of_running_text(trained: Path) -> None:
    """Those that Hugging Face's tokenizer gives them in the middle of a sentence."""
    tokenizer, reference_tokenizer = Tokenizer(trained), AutoTokenizer.from_pretrained(str(trained))
    for word, sentence in (
        ("dog", "The dog, he"),
        ("Hund", "Der Hund (alt)"),
        ("后来", "他，后来，他说"),
        ("pie", "a pie x"),
    ):
        start = sentence.index(word)
        encoded = reference_tokenizer(sentence, add_special_tokens=False, return_offsets_mapping=True)
        inside = [
            token
            for token, (a, b) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            if start < b <= start + len(word) or a == start
        ]
        assert tokenizer.encode_inside_sentence([word]) == [inside], word
    assert tokenizer.keeps_space == ("bpe" in trained.name)


def test_links_of_the_aligners_text_are_carried_over() -> None:
    texts = ("The man's dog.", "Le chien de l'homme.")
    moses = ("the man &apos;s dog .", "le chien de l&apos; homme .")
    links, dropped = project_links_and_count_dropped("0-0 1-4 2-2 3-1 4-5", texts, moses)
    # The man ' s dog .    Le chien de l ' homme .
    assert links == "0-0 1-5 3-2 4-1 5-6" and dropped == 0
    links, dropped = project_links_and_count_dropped("4-1 4-5", texts, moses)  # a full stop with a word
    assert links == "5-6" and dropped == 1
    assert project_links_and_count_dropped("", texts, moses) == ("", 0)
    assert character_indices_of_words("naive x", "nai@@ ve x") == [
        [0, 1, 2],
        [3, 4],
        [6],
    ]  # what is not in the text has no place
    with pytest.raises(ValueError, match=r"less than half of the characters of the tokenised text"):
        project_links_and_count_dropped("0-0", texts, ("something else entirely", "tout autre chose ici"))
    with pytest.raises(ValueError, match=r"link '9-0' is wrong. .* with i below 5 and j below 6"):
        project_links_and_count_dropped("9-0", texts, moses)
    with pytest.raises(ValueError, match=r"link '0:0'"):
        project_links_and_count_dropped("0:0", texts)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab.,' 学生", min_size=1), min_size=2, max_size=2), st.data())
def test_white_space_links_by_brute_force(texts: list[str], data: st.DataObject) -> None:
    """Linked are words, or symbols, that have characters in two linked white-space words."""
    if not all(text.split() for text in texts):
        return
    sizes = [len(text.split()) for text in texts]
    drawn = data.draw(st.lists(st.tuples(*(st.integers(0, n - 1) for n in sizes)), max_size=5))
    links, dropped = project_links_and_count_dropped(" ".join(f"{i}-{j}" for i, j in drawn), tuple(texts))
    inside = []
    for text in texts:
        ends = [match.span() for match in regex.finditer(r"\S+", text)]
        inside.append([[w for w, (a, b) in enumerate(spans([text])[0]) if s < b and a < e] for s, e in ends])
    is_word = [split_words_and_symbols([text])[0][1] for text in texts]
    expected, nothing = set(), 0
    for i, j in drawn:
        found = {(a, b) for a in inside[0][i] for b in inside[1][j] if is_word[0][a] == is_word[1][b]}
        expected |= found
        nothing += not found
    assert {tuple(map(int, link.split("-"))) for link in links.split()} == expected and dropped == nothing
