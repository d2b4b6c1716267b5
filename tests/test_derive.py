"""Derived languages: Tang et al.'s examples, round trips, tags that stay with their words, ids + V."""

import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import tokenizer
from data_tools.demo_world import World
from tests import launch
from xscale.data.lexicon import load_lexicon
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import split_words_and_symbols
from xscale.errors import UserError

sys.path.append(str(launch.ROOT / "benchmarks" / "papers"))

import derive
from conllu import read_sentences
from derive import french_order, invert_text
from script import Script

BIBLE, EWT, NER = "parallel/bible/bible.en.xz", "eval/pos/en_ewt-ud-dev.conllu.xz", "eval/ner/dev-en.tsv.xz"
"""Of the real text."""


def run(kind: str, how: str, source: Path, out: Path, *more: object) -> str:
    derive.main([kind, "--how", how, "--in", str(source), "--out", str(out), *map(str, more)])
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tokenizer of English, and the text that it was trained on, with characters that it does not know at the end."""
    folder = tmp_path_factory.mktemp("english")
    lines = [World(0).pair(number)[0] for number in range(300)] + [
        f"Étude {n} of 1984, e.g. [MASK]." for n in range(30)
    ]
    (folder / "en.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["--text", str(folder / "en.txt"), "--vocab_size", "300", "--out", str(folder / "tokenizer")]
    tokenizer.main(words)
    with (folder / "en.txt").open("a", encoding="utf-8") as file:
        file.write("the ամուր horse 東京 x\u0301 sees \U0001f40e .\n\n")
    return folder / "tokenizer", folder / "en.txt"


@pytest.mark.parametrize(
    ("text", "derived"),
    [
        ("Welcome to ACL", "ACL to Welcome"),  # Tang et al., table 9
        ("I am Sam . I am", "Sam am I . am I"),
        ("We came. Who saw, Tom? Nobody", "came We. Tom saw, Who? Nobody"),
        ('He said, "Go!" and went ...', '"Go said, He!" went and ...'),
        ("", ""),
    ],
)
def test_inverted_lines(text: str, derived: str) -> None:
    assert invert_text(text) == derived and invert_text(derived) == text


def row(form: str, upos: str, head: int, deprel: str) -> list[str]:
    """The columns of a word, of which the number does not matter."""
    return ["_", form, "_", upos, "_", "_", str(head), deprel, "_", "_"]


def test_syntax_of_table_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table of counts leaves no chance: SVO becomes SOV, and adjectives change sides."""
    svo = [row("Sara", "PROPN", 2, "nsubj"), row("ate", "VERB", 0, "root"), row("apples", "NOUN", 2, "obj")]
    table = [row("Une", "DET", 2, "det"), row("table", "NOUN", 0, "root"), row("ronde", "ADJ", 2, "amod")]
    monkeypatch.setattr(derive, "FRENCH", {"VERB": {"obj": (1, 1)}, "NOUN": {"amod": (1, 1)}})
    assert french_order(svo, 0) == [0, 2, 1] and french_order(table, 0) == [0, 2, 1]


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))), st.integers(0, 3))
@settings(deadline=None)
def test_syntax_is_a_permutation_that_keeps_phrases(heads: tuple[int, ...], seed: int) -> None:
    words = [row(str(n), ("NOUN", "VERB")[n % 2], head + 1, ("amod", "obj")[n % 2]) for n, head in enumerate(heads)]
    order = french_order(words, seed)
    below = {n: {n} for n in range(len(heads))}
    for number in reversed(range(len(heads))):
        if heads[number] >= 0:
            below[heads[number]] |= below[number]
    crossing = any(max(of) - min(of) + 1 != len(of) for of in below.values())
    assert sorted(order) == [*range(len(heads))]
    if crossing:
        assert order == sorted(order)
    else:
        places = {old: new for new, old in enumerate(order)}
        for of in below.values():
            new = [places[number] for number in of]
            assert max(new) - min(new) + 1 == len(new)


def check_ids(english: Path, doubled: Path, texts: list[str], derived: list[str], dictionary: Path) -> set[int]:
    """Every text's ids are the derived one's, by the dictionary. Returns all of the text's ids."""
    first, second = (Tokenizer(path) for path in (english, doubled))
    entries = {int(a): int(b) for a, b in (line.split("\t") for line in dictionary.read_text().splitlines())}
    size = first.vocab_size
    assert second.vocab_size == 2 * size and all(b == a + size for a, b in entries.items())
    assert first.hf.all_special_ids == second.hf.all_special_ids
    assert not entries.keys() & set(first.hf.all_special_ids)
    ids = first.encode(texts)
    assert [[entries.get(number, number) for number in of_text] for of_text in ids] == second.encode(derived)
    return {number for of_text in ids for number in of_text}


@pytest.mark.parametrize("overlap", [0, 0.25, 0.5])
def test_ids_are_shifted_by_the_vocabulary(english: tuple[Path, Path], tmp_path: Path, overlap: float) -> None:
    folder, source = english
    more = ["--tokenizer", folder, "--tokenizer_out", tmp_path / "both", "--dictionary_out", tmp_path / "ids"]
    derived = run("text", "trans", source, tmp_path / "xx", *more, "--overlap", overlap).split("\n")
    texts = source.read_text(encoding="utf-8").split("\n")
    seen = check_ids(folder, tmp_path / "both", texts, derived, tmp_path / "ids")
    ordinary = Tokenizer(folder).vocab_size - 5
    assert len(seen) > 0.7 * ordinary
    assert len((tmp_path / "ids").read_text().splitlines()) == ordinary - round(overlap * ordinary)
    first, second = (split_words_and_symbols(lines) for lines in (texts[:-3], derived[:-3]))
    assert [len(words) for words, _ in first] == [len(words) for words, _ in second]
    lines = (tmp_path / "ids").read_text().splitlines()
    (tmp_path / "en-xx.txt").write_text("".join(f"id:{line.replace(chr(9), chr(9) + 'id:')}\n" for line in lines))
    entries = load_lexicon(tmp_path / "en-xx.txt", Tokenizer(tmp_path / "both")).ids
    assert [f"{a}\t{b}" for (a,), (b,) in zip(*entries, strict=True)] == lines


def test_larger_overlaps_hold_smaller_ones(english: tuple[Path, Path]) -> None:
    small, large, other = (
        Script(english[0], share, seed).unshifted for share, seed in ((0.25, 0), (0.5, 0), (0.25, 1))
    )
    assert small < large and small != other and len(small) == len(other)


def test_entities_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(
        "I\tO\nlive\tO\nSt\tB-LOC\n.\tI-LOC\nGallen\tI-LOC\nUSA\tB-LOC\n.\tO\n\nYahoo\tB-ORG\n!\tI-ORG\n"
    )
    found = run("ner", "inv", tmp_path / "a", tmp_path / "b")
    assert found == (
        "USA\tB-LOC\nGallen\tB-LOC\n.\tI-LOC\nSt\tI-LOC\nlive\tO\nI\tO\n.\tO\n\n!\tB-ORG\nYahoo\tI-ORG\n\n"
    )
    assert run("ner", "inv", tmp_path / "b", tmp_path / "c") == (tmp_path / "a").read_text() + "\n"


def test_both_sentences_of_a_pair(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A dog runs.\tIt is here\tneutral\n")
    assert run("pairs", "inv", tmp_path / "a", tmp_path / "b") == "runs dog A.\there is It\tneutral\n"
    (tmp_path / "c").write_text("gold_label\tsentence1\tsentence2\nneutral\tA dog.\tA cat.\n")
    assert run("pairs", "inv", tmp_path / "c", tmp_path / "d").endswith("sentence2\nneutral\tdog A.\tcat A.\n")


PARSED = """# sent_id = 1
# text = She doesn't see the big dog.
1\tShe\tshe\tPRON\t_\t_\t4\tnsubj\t4:nsubj\t_
2-3\tdoesn't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdoes\tdo\tAUX\t_\t_\t4\taux\t4:aux\t_
3\tn't\tnot\tPART\t_\t_\t4\tadvmod\t4:advmod\t_
4\tsee\tsee\tVERB\t_\t_\t0\troot\t0:root|6.1:dep\t_
5\tthe\tthe\tDET\t_\t_\t7\tdet\t7:det\t_
6\tbig\tbig\tADJ\t_\t_\t7\tamod\t7:amod\t_
6.1\told\told\tADJ\t_\t_\t_\t_\t7:amod\t_
7\tdog\tdog\tNOUN\t_\t_\t4\tobj\t4:obj\tSpaceAfter=No
8\t.\t.\tPUNCT\t_\t_\t4\tpunct\t4:punct\t_

"""


def links(path: Path) -> set[tuple[str, str, str, str]]:
    """Each word with its tag, its head's word and relation."""
    (found,) = read_sentences(path)
    rows = [row for _, row in found.words()]
    return {(row[1], row[3], rows[int(row[6]) - 1][1] if row[6] != "0" else "", row[7]) for row in rows}


@pytest.mark.parametrize("how", ["inv", "syn"])
def test_tags_and_heads_stay_with_their_words(how: str, tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_text(PARSED, encoding="utf-8")
    found = run("conllu", how, tmp_path / "a.conllu", tmp_path / "b.conllu", "--seed", 3)
    assert links(tmp_path / "a.conllu") == links(tmp_path / "b.conllu")
    assert [line.split("\t")[0] for line in found.splitlines() if line[:1].isdigit() and "-" not in line.split("\t")[0]
            and "." not in line.split("\t")[0]] == [str(n) for n in range(1, 9)]  # fmt: skip
    if how == "inv":
        assert "# text = dog big the see doesn't She .\n" in found and "\n5-6\tdoesn't\t" in found
        assert "\n2.1\told\t_" not in found and "\n2.1\told\told\tADJ\t_\t_\t_\t_\t1:amod" in found
        again = run("conllu", "inv", tmp_path / "b.conllu", tmp_path / "c.conllu")
        assert again == PARSED.replace("SpaceAfter=No", "_").replace("dog.", "dog .")


def test_text_tags_and_entities_of_a_sentence_have_one_french_order(tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_text(PARSED, encoding="utf-8")
    (tmp_path / "a.txt").write_text("She doesn't see the big dog.\n")
    (tmp_path / "a.tsv").write_text("She\tO\ndoesn't\tO\nsee\tO\nthe\tO\nbig\tB-X\ndog\tI-X\n.\tO\n")
    orders = set()
    for seed in range(8):
        parse = ("--seed", seed, "--conllu", tmp_path / "a.conllu")
        of_parse = run("conllu", "syn", tmp_path / "a.conllu", tmp_path / f"{seed}.conllu", "--seed", seed)
        text = run("text", "syn", tmp_path / "a.txt", tmp_path / f"{seed}.txt", *parse)
        tagged = run("ner", "syn", tmp_path / "a.tsv", tmp_path / f"{seed}.tsv", *parse)
        assert f"# text = {text}" in of_parse
        words = [line.split("\t") for line in tagged.splitlines() if line]
        assert text.split() == [word for word, _ in words]
        assert dict(words)["big"] == ("B-X" if text.split()[5] != "big" else "I-X")
        orders.add(text)
    assert len(orders) > 1
    (tmp_path / "b.txt").write_text("She sees.\n")
    with pytest.raises(UserError, match=r"b.txt: line 1.*--conllu"):
        run("text", "syn", tmp_path / "b.txt", tmp_path / "x", "--conllu", tmp_path / "a.conllu")
    (tmp_path / "b.tsv").write_text((tmp_path / "a.tsv").read_text().replace("doesn't", "does\tO\nn't"))
    with pytest.raises(UserError, match=r"b.tsv: line 1: --conllu divides"):
        run("ner", "syn", tmp_path / "b.tsv", tmp_path / "x", "--conllu", tmp_path / "a.conllu")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("2-3", "2-", "line 4: '2-' .*2-3"),
        ("2-3", "2-x", "line 4: '2-x' .*2-3"),
        ("6\tbig", "7\tbig", "line 9: '7' must be 6"),
        ("PRON\t_\t_\t4", "PRON\t_\t_\t²", "line 1: the head of 'She' is '²'"),
        ("PRON\t_\t_\t4", "PRON\t_\t4", "line 3 has 9 columns"),
    ],
)
def test_a_malformed_parse_is_an_error(old: str, new: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_text(PARSED.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UserError, match=rf"a\.conllu: {error}"):
        run("conllu", "syn", tmp_path / "a.conllu", tmp_path / "b.conllu")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["text", "--how", "trans"], "--tokenizer DIR"),
        (["text", "--how", "syn"], "--conllu F"),
        (["ner", "--how", "inv"], "line 1.*token<TAB>tag"),
        (["pairs", "--how", "inv"], "line 1.*1 column"),
        (["conllu", "--how", "inv"], "line 1.*1 columns"),
        (["text", "--how", "inv", "--out", "a", "b"], "1 files and --out 2"),
    ],
)
def test_errors_name_the_remedy(words: list[str], error: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a word\n")
    out = [] if "--out" in words else ["--out", str(tmp_path / "out.txt")]
    with pytest.raises(UserError, match=error):
        derive.main([*words, "--in", str(tmp_path / "in.txt"), *out])
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_only_wordpiece_has_a_second_script(english: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["--text", str(english[1]), "--type", "bpe", "--vocab_size", "400", "--out", str(tmp_path / "bpe")]
    tokenizer.main(words)
    with pytest.raises(UserError, match=r"BPE.*--type wordpiece"):
        run("text", "trans", english[1], tmp_path / "x", "--tokenizer", tmp_path / "bpe")


def beginning(path: Path, count: int, folder: Path) -> tuple[Path, list[str]]:
    """A file of the first lines of a text, up to an empty one if it has any, and these lines."""
    lines = [line for _, line in islice(read_lines(path), count)]
    while "" in lines and lines[-1]:
        lines.pop()
    (folder / path.stem).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder / path.stem, lines


def test_real_text_twice_inverted_is_the_same(real: Path, tmp_path: Path) -> None:
    bible, lines = beginning(real / BIBLE, 4000, tmp_path)
    run("text", "inv", bible, tmp_path / "a")
    assert run("text", "inv", tmp_path / "a", tmp_path / "b").split("\n")[:-1] == [
        " ".join(line.split()) for line in lines
    ]
    ner, lines = beginning(real / NER, 10_000, tmp_path)
    run("ner", "inv", ner, tmp_path / "n")
    assert run("ner", "inv", tmp_path / "n", tmp_path / "m").strip() == "\n".join(lines).strip()
    ewt, lines = beginning(real / EWT, 10_000, tmp_path)
    run("conllu", "inv", ewt, tmp_path / "c")
    again = run("conllu", "inv", tmp_path / "c", tmp_path / "d").split("\n")
    columns = [[line.split("\t")[:9] for line in of if line[:1].isdigit()] for of in (again, lines)]
    assert columns[0] == columns[1]


@pytest.mark.parametrize("cased", [False, True])
def test_real_text_has_shifted_ids(real: Path, cased: bool, tmp_path: Path) -> None:
    bible, _ = beginning(real / BIBLE, 2000, tmp_path)
    words = ["--text", str(bible), "--vocab_size", "4000", "--out", str(tmp_path / "en")]
    tokenizer.main([*words] if cased else [*words, "--lowercase"])
    more = ["--tokenizer", tmp_path / "en", "--tokenizer_out", tmp_path / "xx", "--dictionary_out", tmp_path / "ids"]
    derived = run("text", "trans.inv", bible, tmp_path / "a", *more).split("\n")
    texts = run("text", "inv", bible, tmp_path / "b").split("\n")
    check_ids(tmp_path / "en", tmp_path / "xx", texts, derived, tmp_path / "ids")


def test_french_parses_of_real_text(real: Path, tmp_path: Path) -> None:
    """Adjectives go before their nouns about as often as the French treebank's do, of English about all."""
    ewt, lines = beginning(real / EWT, 15_000, tmp_path)
    found = run("conllu", "syn", ewt, tmp_path / "a.conllu")
    sentences = [[row for _, row in sentence.words()] for sentence in read_sentences(tmp_path / "a.conllu")]
    assert len(sentences) == lines.count("") == found.count("\n\n") > 500
    before = [int(row[0]) < int(row[6]) for words in sentences for row in words
              if row[7] == "amod" and words[int(row[6]) - 1][3] == "NOUN"]  # fmt: skip
    assert sum(before) / len(before) == pytest.approx(0.31, abs=0.1)
