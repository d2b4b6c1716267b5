"""data_tools.prepare: every reader gives the same pairs, rules remove what they name, and the bytes are the same
however the work is done and interrupted. Expectations are written down, or come from plain loops over the input."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

import datasets
import numpy as np
import pytest
import yaml
import zstandard
from transformers import PreTrainedTokenizerFast

from data_tools import cleaning, command, engine, prepare, readers, steps
from data_tools.corpus import Rules, SourceSpec, load_corpus
from data_tools.demo_world import World
from data_tools.sentences import split_sentences
from tests import launch
from tests.slurm_cluster import cluster, wait_for
from xscale import files
from xscale.data.lexicon import find_lexicon_paths, read_entries
from xscale.data.shards import find_sources
from xscale.errors import UserError
from xscale.record import Record

PAIRS = [(f"{n} one", f"{n} zwei") for n in range(6)]


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by its path there."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def written(folder: Path, tree: dict) -> Path:
    path = folder / "corpus.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    return path


def run(folder: Path, tree: dict, *words: str, out: str = "out") -> Path:
    """The command in this process. Returns --out."""
    argv = [str(written(folder, tree)), "--out", str(folder / out), "--workers", "1", *words]
    prepare.main(argv)
    return folder / out


def moses(folder: Path, pairs: list, suffix: str = "", pack: Callable[[bytes], bytes] = bytes) -> list[str]:
    names = [folder / f"m.en{suffix}", folder / f"m.de{suffix}"]
    for side, name in enumerate(names):
        name.write_bytes(pack("".join(pair[side] + "\n" for pair in pairs).encode()))
    return [str(name) for name in names]


def tmx(folder: Path, pairs: list, other: str = "de") -> str:
    units = "".join(
        f'<tu><tuv xml:lang="EN-gb"><seg>{escape(a)}</seg></tuv>'
        f'<tuv lang="{other}"><seg><b>{escape(b)}</b></seg></tuv></tu>'
        for a, b in pairs
    )
    (folder / "m.tmx").write_text(
        f'<?xml version="1.0"?><!DOCTYPE tmx SYSTEM "tmx14.dtd"><tmx version="1.4"><header/><body>{units}</body></tmx>',
        encoding="utf-8",
    )
    return str(folder / "m.tmx")


def packed(name: str, suffix: str, pack: Callable[[bytes], bytes]) -> str:
    Path(name + suffix).write_bytes(pack(Path(name).read_bytes()))
    return name + suffix


def tsv(folder: Path, pairs: list) -> str:
    (folder / "m.tsv").write_text("".join(f"x\t{b}\t{a}\n" for a, b in pairs), encoding="utf-8", newline="\n")
    return str(folder / "m.tsv")


def parquet(folder: Path, pairs: list) -> str:
    import pyarrow
    import pyarrow.parquet

    columns = {"en": [a for a, _ in pairs], "de": [b for _, b in pairs]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "m.parquet")
    return str(folder / "m.parquet")


def data_set(folder: Path, pairs: list) -> str:
    rows = [{"translation": {"en": a, "de": b}} for a, b in pairs]
    datasets.Dataset.from_list(rows).save_to_disk(folder / "m.set")
    return str(folder / "m.set")


FORMATS: dict[str, Callable[[Path, list], dict]] = {
    "plain": lambda folder, pairs: {"text": moses(folder, pairs)},
    "gz": lambda folder, pairs: {"text": moses(folder, pairs, ".gz", gzip.compress)},
    "xz": lambda folder, pairs: {"text": moses(folder, pairs, ".xz", lzma.compress)},
    "zst": lambda folder, pairs: {"text": moses(folder, pairs, ".zst", zstandard.compress)},
    "bz2": lambda folder, pairs: {"text": moses(folder, pairs, ".bz2", bz2.compress)},
    "tsv": lambda folder, pairs: {"tsv": tsv(folder, pairs), "columns": [3, 2]},
    "tmx": lambda folder, pairs: {"tmx": tmx(folder, pairs)},
    "tmx.gz": lambda folder, pairs: {"tmx": packed(tmx(folder, pairs), ".gz", gzip.compress)},
    "tmx.xz": lambda folder, pairs: {"tmx": packed(tmx(folder, pairs), ".xz", lzma.compress)},
    "tmx.zst": lambda folder, pairs: {"tmx": packed(tmx(folder, pairs), ".zst", zstandard.compress)},
    "parquet": lambda folder, pairs: {"parquet": parquet(folder, pairs)},
    "datasets": lambda folder, pairs: {"datasets": data_set(folder, pairs)},
}


def test_documents_stay_documents(tmp_path: Path) -> None:
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "wiki_00").write_text(
        '<doc id="1" title="A">\nA\n\nOne here. Two there.\nThree.\n</doc>\n<doc id="2">\nB\n</doc>\n', encoding="utf-8"
    )
    (tmp_path / "d.jsonl").write_text('{"body": "A\\nB\\u2028C"}\n{"body": "D"}\n', encoding="utf-8")
    kinds = {
        "text": (str(tmp_path / "wiki"), {}, [["A", "One here. Two there.", "Three."], ["B"]]),
        "jsonl": (str(tmp_path / "d.jsonl"), {"field": "body"}, [["A", "B\u2028C"], ["D"]]),
    }
    for name, (path, more, expected) in kinds.items():
        units = readers.read_units(SourceSpec(mono="en", **{name: path}, **more))
        assert [unit.texts for unit in units] == expected, name
    tree = {"sources": [{"mono": "en", "text": str(tmp_path / "wiki")}], "rules": {}}
    (source,) = find_sources([run(tmp_path, tree) / "shards"])
    records = [source.read(0, n) for n in range(source.records)]
    assert [record.texts[0] for record in records] == ["A", "One here.", "Two there.", "Three.", "B"]
    assert [source.continues_document(0, n) for n in range(5)] == [False, True, True, True, False]


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n"
EVERY_READER: list[dict] = [
    {"mono": "en", "text": "f"},
    {"pairs": ["en", "de"], "text": ["f", "g"]},
    {"pairs": ["en", "de"], "tsv": "f", "columns": [1, 2]},
    {"pairs": ["en", "de"], "tmx": "f"},
    {"mono": "en", "jsonl": "f"},
    {"mono": "en", "parquet": "f"},
]


@pytest.mark.parametrize(
    ("fields", "content", "named"),
    [
        ({"pairs": ["en", "de"], "text": ["f", "f"]}, b"a\n", "f is listed 2 times"),
        (
            {"pairs": ["en", "de"], "text": ["f", "g"]},
            b"a\tb\n" * 30,
            "f is not a file with lines of text: 30 of its first 30",
        ),
        ({"pairs": ["en", "de"], "text": ["f", "g"]}, b"a\nb\n", "g ends after line 1"),
        ({"pairs": ["en", "de"], "text": ["f", "g"]}, b"", "f is empty"),
        ({"mono": "en", "text": "f"}, b'{"en": "a"}\n' * 9, "f is not a file with lines of text: 9 of its first 9"),
        (
            {"mono": "en", "text": "f"},
            b"<?xml version='1.0'?>\n<tmx>\n<tuv>\na\n</tuv>\n",
            "f is not a file with lines of text",
        ),
        ({"pairs": ["en", "de"], "text": ["f", "g"]}, b"PK\3\4" + bytes(26), "f has binary data"),
        ({"mono": "en", "text": "f"}, tarfile.TarInfo("a").tobuf() + b"a\n" * 9999, "f has binary data"),
        ({"mono": "ru", "text": "f"}, "Да\nПривет, как дела\n".encode("utf-16-le"), "f has binary data"),
        ({"mono": "en", "text": "f"}, "Yes\nHow are you?\n".encode("utf-16-be"), "f has binary data"),
        (
            {"pairs": ["en", "de"], "tsv": "f", "columns": [1, 2]},
            b"a\tb\nc\n",
            "f: line 2 must have at least 2 columns",
        ),
        ({"pairs": ["en", "de"], "tmx": "f"}, b"<html></html>", "f is a web page"),
        ({"pairs": ["en", "de"], "tmx": "f"}, b"<xliff></xliff>", "f is not a TMX, because its first element is xliff"),
        ({"pairs": ["en", "de"], "tmx": "f"}, b"<tmx><body><tu>", "f: the XML after translation unit 0"),
        (
            {"pairs": ["en", "de"], "tmx": "f"},
            b"<?xml version='1.0' encoding='none-such'?><tmx/>",
            "after translation unit",
        ),
        (
            {"pairs": ["en", "de"], "tmx": "f"},
            b"<?xml version='1.0' encoding='shift_jis'?><tmx/>",
            "after translation unit",
        ),
        ({"pairs": ["en", "de"], "tmx": "f"}, b'<!DOCTYPE tmx [<!ENTITY a "b">]><tmx>&a;</tmx>', "Entit"),
        ({"pairs": ["en", "de"], "tmx": "f"}, b'<!DOCTYPE tmx [<!ENTITY c SYSTEM "f">]><tmx>&c;</tmx>', "Entit"),
        ({"pairs": ["en", "de"], "parquet": "f"}, b"PAR1 is none", "f: row 1 cannot be read as `parquet`"),
        ({"pairs": ["en", "de"], "datasets": "f"}, b"", "cannot be read as `datasets`"),
        ({"mono": "en", "jsonl": "f"}, b'{"text": 3}\n', "f: line 1: the field `text` is 3, and must be text"),
        (
            {"mono": "en", "jsonl": "f"},
            b'{"a": "b"}\n',
            "The fields are a. Set the key `field` (now ",
        ),
        (
            {"pairs": ["en", "de"], "jsonl": "f"},
            b'{"en": "b"}\n',
            "find the fields with the text in en and de. The fields are en. Set the key `columns` (now not set)",
        ),
        ({"mono": "en", "jsonl": "f"}, b'{"text": "b"}\n{"tex', "f: line 2 is not a JSON object"),
        ({"mono": "en", "jsonl": "f"}, b"[" * 100_000, "f: line 1 is not a JSON object"),
        ({"mono": "en", "jsonl": "f"}, b'{"text": "\\ud800"}\n', "f: pair or document 1 has an unpaired surrogate"),
        ({"mono": "en", "parquet": "f"}, b"", "f is empty"),
        ({"mono": "en", "text": "f"}, b"one\rtwo\rthree", "f: the lines end with carriage returns alone"),
        ({"mono": "en", "text": "f"}, b'[\n{"a": 1}\n', "f is not a file with lines of text"),
        ({"mono": "en", "text": "f"}, b"a\xff\n", "f: line 1 is not UTF-8"),
        ({"mono": "en", "text": "f"}, b"\n \n", "f: the source has no text"),
        (
            {"pairs": ["en", "de"], "tmx": "f"},
            b'<tmx><body><tu><tuv lang="English"><seg>a</seg></tuv></tu></body></tmx>',
            "f: the source has no text in en and de. ",
        ),
        ({"mono": "en", "text": "f"}, b"a,b\n" + b'"one","two"\n' * 9, "f is not a file with lines of text: 9 of its"),
        ({"mono": "en", "text": "f"}, b'<doc id="1">Text\n</doc>\n', "f: line 1 begins with a tag"),
        ({"mono": "en", "text": "f"}, b'<doc id="1">\nText\n</doc>more\n', "f: line 3 begins with a tag"),
        ({"mono": "en", "text": "f"}, b'<doc id="1">Text</doc>\n', "f: line 1 begins with a tag"),
        *((fields, LFS, "f is a pointer of Git LFS") for fields in EVERY_READER),
        *((fields, b"<!DOCTYPE html><p>404", "f is a web page") for fields in EVERY_READER),
    ],
)
def test_what_is_another_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict, content: bytes, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f").write_bytes(content)
    Path("g").write_bytes(b"a\n" if content == b"a\nb\n" else content)
    with pytest.raises(UserError, match=re.escape(named)):
        list(readers.read_units(SourceSpec.model_validate(fields)))


PAIR = {"pairs": ["en", "de"], "text": ["a", "b"]}
MONO = {"mono": "de", "text": "a"}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (
            {"sources": [PAIR | {"pairs": ["en", "en"]}]},
            ["sources.0.pairs: ['en', 'en'] names the same language twice"],
        ),
        ({"sources": [PAIR | {"pairs": ["en", "eng_Latn"]}]}, ["['en', 'eng_Latn'] names the same language twice"]),
        ({"sources": [PAIR], "align": {"link": "c"}}, ["align is {'link': 'c'}, and must be true or false"]),
        (
            {"sources": [PAIR], "align": {"links": None}},
            ["align is {'links': None}, and must be true or false"],
        ),
        (
            {"sources": [PAIR, PAIR], "align": {"links": "c"}},
            ["align is {'links': 'c'}, and must be true or false"],
        ),
        ({"sources": [MONO | {"tmx": "b"}]}, ["must have exactly one of the keys text, tsv", "but it has text, tmx"]),
        (
            {"sources": [{"pairs": ["en", "de"], "tsv": "a", "columns": [0, 1]}]},
            ["in a source with `tsv`, columns are numbers"],
        ),
        ({"sources": [{"pairs": ["en", "de"], "tsv": "a", "columns": [1, 1]}]}, ["list the same column twice"]),
        (
            {"sources": [{"pairs": ["en", "de"], "tmx": "a", "columns": ["a", "b"]}]},
            ["columns: a source with `tmx` cannot"],
        ),
        ({"sources": [MONO | {"wieght": 3}, PAIR | {"first": -1}]}, ["sources.0.wieght: unknown key", "first: -1: "]),
        ({"sources": [{"mono": False, "text": "a"}]}, ["sources.0.mono: False: ", "Put text that looks like a number"]),
        ({"sources": True, "x": 1}, ["sources: True: Input should be a valid list\n"]),
        ({"sources": [MONO], "rules": {"dedup": "fuzzy", "ratio": True}}, ["dedup: 'fuzzy'", "ratio: True"]),
        ({"sources": [MONO], "tokenizer": {"vocab_size": "many"}, "aligned": True}, ["'many'", "aligned: unknown key"]),
        ({"sources": [MONO], "tokenizer": {"vocab_size": 99_999_999_999}}, ["tokenizer.TokenizerSpec.vocab_size"]),
        ({"sources": [MONO | {"mono": "german"}]}, ["'german' is not a language code", "such as german1"]),
        ({"sources": [MONO | {"licence": "\ud800"}]}, ["unpaired surrogate"]),
        ({"sources": [MONO | {"rules": []}], "x": 1}, ["0.rules: []: Input should be a valid dictionary\n"]),
        ({"sources": [MONO | {"rules": {"lenght": 3}}]}, ["sources.0.rules.lenght: unknown key"]),
        ({"sources": [MONO | {"rules": {"lenght": 3}, "lang": "en"}]}, ["0.rules.lenght: unk", "sources.0.lang: unk"]),
        ({"sources": [MONO], "rules": {"length": {"tokens": [1, 9]}}}, ["length.tokens: this rule needs a tokenizer"]),
        ({"sources": [MONO], "rules": {"length": {"characters": [9, 1]}}}, ["[9, 1] must be [minimum, maximum]"]),
        ({"sources": [PAIR | {"opus": "a.zip"}], "rules": {"score": 1.0}}, ["opus is no longer", "score is no longer"]),
        ({"sources": [MONO | {"text": "x/a"}, MONO | {"text": "y/a"}]}, ["2 sources have the name a.de"]),
        ({"sources": [MONO, {"mono": "deu", "text": "b"}]}, ["de and deu are names of the same language"]),
        ({"sources": [PAIR, {"mono": "eng_Latn", "text": "c"}]}, ["en and eng_Latn are names of the same language"]),
        (
            {"sources": [{"mono": name, "text": "a"} for name in ("zh-Hans", "zh-Hant", "zho_Hans")]},
            ["zh-Hans and zho_Hans are names of the same language"],
        ),
    ],
)
def test_all_problems_of_a_corpus_are_told_at_once(tmp_path: Path, tree: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as told:
        load_corpus(written(tmp_path, tree))
    for word in (str(tmp_path / "corpus.yaml"), *words):
        assert word in str(told.value)


EN_DE = SourceSpec(pairs=("en", "de"), text=["f", "g"])


def test_rules_change_and_remove_what_they_name() -> None:
    rules = Rules.model_validate({"length": {"characters": [3, 40]}, "ratio": 3})
    cleaner = cleaning.Cleaner(EN_DE, rules)
    kept = {("cafe\u0301\u00a0 au\x00lait", "Kaffee mit\u2028Milch"): ["caf\u00e9 au lait", "Kaffee mit Milch"]}
    gone = {
        ("ab", "abc"): "length",
        ("x" * 41, "x" * 30): "length",
        ("abc", "abcdefghij"): "ratio",
        ("these four words are", "these four words are"): "identical sides",
        ("\u200b", "abc"): "empty",
    }
    kept[("abc", "abcdefghi")] = ["abc", "abcdefghi"]
    for texts, expected in kept.items():
        clean = cleaner.clean_and_split(readers.Unit(1, [*texts]))
        assert clean and clean.texts == expected
    for texts in gone:
        assert cleaner.clean_and_split(readers.Unit(1, [*texts])) is None
    assert cleaner.removed.counts == Counter(gone.values())
    assert cleaner.removed.examples["ratio"] == [["abc", "abcdefghij"]]


def test_evaluation_text_is_left_out(tmp_path: Path) -> None:
    """Pairs with a line of test sets, in any case and with any symbols. A document loses such sentences only."""
    world = World(0)
    english, other = zip(*(world.pair(n)[:2] for n in range(40)), strict=True)
    (tmp_path / "test.en").write_text(f"\nKeep this OUT, please!\n{other[7]}\n", encoding="utf-8")
    pairs = [*zip(english, other, strict=True), ("keep this out - please", "lass das")]
    (tmp_path / "doc.jsonl").write_text(json.dumps({"text": "Stays here.\nKeep this out please.\nStays too."}) + "\n")
    tree = {
        "sources": [
            {"pairs": ["en", "xx"], "text": moses(tmp_path, pairs), "name": "pairs"},
            {"mono": "en", "jsonl": str(tmp_path / "doc.jsonl"), "name": "mono"},
        ],
        "rules": {"exclude": [str(tmp_path / "test.en")]},
    }
    out = run(tmp_path, tree)
    texts = [record for _, record in stored(out / "shards")]
    assert [pair for pair in texts if len(pair) == 2] == [pair for pair in pairs[:40] if pair[1] != other[7]]
    assert [text for text in texts if len(text) == 1] == [("Stays here.",), ("Stays too.",)]
    removed = [source["removed"] for source in json.loads((out / "report.json").read_text())["sources"]]
    assert removed == [{"exclude": 2}, {"exclude (sentences)": 1}]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("I \u2764\ufe0f you", "I \u2764 YOU"),
        (
            "\u03a0\u03a1\u039f\u03aa\u0301\u039f\u039d",
            "\u03c0\u03c1\u03bf\u0390\u03bf\u03bd",
        ),  # capital and small letters
        ("\u200f\ufb01ne", "fine"),
    ],
)
def test_evaluation_text_in_another_encoding_is_left_out(tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "test").write_text(line, encoding="utf-8")
    cleaner = cleaning.Cleaner(EN_DE, Rules(exclude=[str(tmp_path / "test")]))
    assert cleaner.clean_and_split(readers.Unit(1, [text, "b"])) is None
    assert cleaner.clean_and_split(readers.Unit(1, [text + "s", "b"])) is not None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("\n", "has no text. Use a file of evaluation text"),
        ("", "is empty. Use a file with text"),
        ("a\tb\n" * 9, "is not a file with lines of text: 9 of its first 9 lines"),
        ('{"en": "a"}\n', "is not a file with lines of text: 1 of its first 1 lines"),
    ],
)
def test_a_wrong_file_of_evaluation_text_is_refused_at_the_start(tmp_path: Path, content: str, named: str) -> None:
    """The error names the rule. --dry_run finds it, too."""
    path = tmp_path / "test.en"
    path.write_text(content)
    tree = {"sources": [{"mono": "en", "text": str(tmp_path / "none"), "rules": {"exclude": [str(path)]}}]}
    (tmp_path / "none").write_text("One.\n")
    for words in ([], ["--dry_run"]):
        with pytest.raises(UserError, match=re.escape(f"rules.exclude: {path} {named}")):
            run(tmp_path, tree, *words)
    assert not list(tmp_path.glob("out*"))


def test_units_without_a_language_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """In a TMX of several languages, `first` counts the pairs that are found."""
    path = Path(tmx(tmp_path, [(f"one {n}", f"zwei {n}") for n in range(9)]))
    text = path.read_text().replace('lang="de"', 'lang="fr"', 4)
    path.write_text(text)
    source = {"pairs": ["en", "de"], "tmx": str(path), "first": 3}
    out = run(tmp_path, {"sources": [source]})
    assert [texts[0] for _, texts in stored(out / "shards")] == ["one 4", "one 5", "one 6"]
    assert "3 records of 7 pairs (en-de); removed by rule: language missing 4" in capsys.readouterr().out


def fasttext_file(path: Path, words: dict[str, str]) -> None:
    """Write a model of fastText that is sure of the label of each word, and knows no other word."""
    labels = list(dict.fromkeys(words.values()))
    entries = [*((word, 0) for word in words), *((f"__label__{label}", 1) for label in labels)]
    arguments = (len(labels), 1, 1, 1, 1, 1, 3, 3, 0, 0, 0, 1, 0.0)  # 3, 3: softmax, supervised
    data = struct.pack("<14id", 793712314, 12, *arguments)
    data += struct.pack("<3i2q", len(entries), len(words), len(labels), len(words), -1)
    data += b"".join(word.encode() + struct.pack("<xqb", 1, kind) for word, kind in entries)
    for matrix in (np.eye(len(labels))[[labels.index(label) for label in words.values()]], np.eye(len(labels))):
        data += struct.pack("<?2q", False, *matrix.shape) + (9 * matrix).astype("<f4").tobytes()
    path.write_bytes(data)


def test_language_identification_removes_sure_mistakes(tmp_path: Path) -> None:
    cleaner = cleaning.Cleaner(EN_DE, Rules(lid=True))
    german = "Das Wetter ist heute sehr schoen, und wir gehen in den Park."
    english = "The weather is very nice today, and we are going to the park."
    assert cleaner.clean_and_split(readers.Unit(1, [english, german]))
    assert not cleaner.clean_and_split(readers.Unit(2, [german, english]))
    assert cleaner.clean_and_split(readers.Unit(3, ["OK", "OK"])), "too few letters to tell"
    spelled = SourceSpec(pairs=("eng_Latn", "deu"), text=["f", "g"])
    assert not cleaning.Cleaner(spelled, Rules(lid=True)).clean_and_split(readers.Unit(2, [german, english]))
    tree = {"sources": [{"mono": "en", "text": str(tmp_path / "a")}], "rules": {"lid": str(tmp_path / "model.bin")}}
    for name in ("a", "model.bin"):
        (tmp_path / name).write_text(f"{english}\n{german}\n")
    with pytest.raises(UserError, match=r"model\.bin.*Set lid to the path of a fastText model"):
        run(tmp_path, tree)
    fasttext_file(tmp_path / "model.bin", {"Wetter": "deu_Latn", "the": "eng_Latn"})
    (tmp_path / "a").write_text(f"{english}\n{german}\nNo word that this model has ever seen\n")
    out = run(tmp_path, tree)
    assert [text for _, (text,) in stored(out / "shards")] == [english, "No word that this model has ever seen"]
    for lid, model in ((True, "py3langid"), (str(tmp_path / "model.bin"), "model.bin")):
        bad = {"sources": [{"mono": "tok", "text": str(tmp_path / "a")}], "rules": {"lid": lid}}
        with pytest.raises(UserError, match=rf"{model} cannot identify the language tok of the source a\.tok"):
            run(tmp_path, bad, out="bad")


def test_what_follows_the_first_records_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n{"text": ')
    source = SourceSpec(mono="en", jsonl=str(tmp_path / "m.jsonl"), field="text", first=2)
    assert [unit.texts for unit in readers.read_units(source)] == [["One."], ["Two."]]


def test_sentences_of_many_scripts() -> None:
    """Initials and ordinals do not end a sentence; Chinese before a number, and long Thai at a space, do."""
    expected = {
        "fr": ["En av. J.-C., la cité existait.", "M. A. Dupont y vit."],
        "tok": ["Mi moku.", "Sina lape."],
        "zh-Hant": ["價值很高。", "1075年夏季，他走了。"],
        "cs": ["Narodil se 3. května.", "Je to tak?"],
    }
    for lang, sentences in expected.items():
        assert split_sentences(("" if lang == "zh-Hant" else " ").join(sentences), lang) == sentences, lang
    thai = " ".join(["วันนี้อากาศดีมากและผมจะไปตลาดกับเพื่อนของผมตอนเช้า"] * 4)
    found = split_sentences(thai, "th")
    assert len(found) == 2 and " ".join(found) == thai


def test_repeats_go_whatever_their_chunk_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a plain loop; the second source has the pairs the other way round. Training has no side of a pair that is
    held out, though most texts are in several pairs."""
    monkeypatch.setattr(steps, "CHUNK_UNITS", 7)
    choose = random.Random(0)
    pairs = [(f"text {choose.randrange(40)} here", f"Text {choose.randrange(2)} dort") for _ in range(80)]
    pairs += [(f"single {n} here", f"Einzeln {n} dort") for n in range(20)]
    choose.shuffle(pairs)
    (tmp_path / "second").mkdir()
    first, second = moses(tmp_path, pairs[:50]), moses(tmp_path / "second", pairs[50:])
    tree = {
        "sources": [
            {"pairs": ["en", "de"], "text": first},
            {"pairs": ["de", "en"], "text": second[::-1], "name": "second"},
        ],
        "rules": {"dedup": "exact"},
        "heldout": {"pairs": 5},
    }
    out = run(tmp_path, tree)
    seen, expected = set[tuple[str, str]](), list[tuple[str, str]]()
    for pair in pairs:
        if pair not in seen:
            expected.append(pair)
        seen.add(pair)
    everything = [*stored(out / "heldout"), *stored(out / "shards")]
    held_sides = {text for _, texts in stored(out / "heldout") for text in texts}
    assert len(held_sides) == 10 and not held_sides & {t for _, texts in stored(out / "shards") for t in texts}
    assert sorted(t if langs == ("en", "de") else t[::-1] for langs, t in everything) == sorted(expected)
    report = json.loads((out / "report.json").read_text())
    assert sum(source["removed"]["dedup"] for source in report["sources"]) == 100 - len(expected)
    assert (out / "report.html").read_text().count("<tr>") > 3
    repeats = run(tmp_path, tree | {"rules": {}}, out="repeats")
    held, kept = (
        [texts if langs == ("en", "de") else texts[::-1] for langs, texts in stored(repeats / name)]
        for name in ("heldout", "shards")
    )
    assert len(held) == 5 and sorted(kept) == sorted(pair for pair in pairs if pair not in held)


def records_below(out: Path) -> list[Record]:
    """All records of an output."""
    sources = find_sources([path for path in (out / "shards", out / "heldout") if path.exists()])
    return [source.read(*place) for source in sources for place in source.locate_records(np.arange(source.records))]


def stored(folder: Path) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Languages and texts of all records below a folder."""
    return [
        (s.langs, s.read(*place).texts)
        for s in find_sources([folder])
        for place in s.locate_records(np.arange(s.records))
    ]


def test_near_duplicates_are_those_of_exact_jaccard(tmp_path: Path) -> None:
    """The search finds all pairs of a similarity of 0.95 and few below 0.6, by sets of runs of 5 characters."""
    world = World(0)
    base = [" ".join(world.document("en", n)[:6])[:300] for n in range(1, 200)]
    choose, texts = random.Random(1), list[str]()
    for text in base:
        cut = choose.randrange(0, len(text))
        texts += [text, text[:cut] + choose.choice(["", "x", "yy"]) + text[cut + choose.randrange(60) :]]
    found = cleaning.minhash_bands_of_each_text(texts)

    def runs(text: str) -> set[str]:
        return {text[i : i + 5] for i in range(len(text) - 4)}

    by_share = dict[bool, list[bool]]()
    for a, b in zip(range(0, len(texts), 2), range(1, len(texts), 2), strict=True):
        first, second = runs(texts[a].casefold()), runs(texts[b].casefold())
        share = len(first & second) / len(first | second)
        if not 0.6 < share < 0.9:
            by_share.setdefault(share >= 0.9, []).append(bool((found[a] == found[b]).any()))
    assert len(by_share[True]) > 20 and np.mean(by_share[True]) > 0.97
    assert not by_share.get(False) or np.mean(by_share[False]) < 0.1


def test_samples_for_the_tokenizer_follow_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter({"en": 100_000, "de": 10_000, "sw": 1_000})
    texts = [(lang, str(n)) for lang, count in counts.items() for n in range(count)]
    monkeypatch.setattr(steps, "read_kept_languages_and_texts", lambda folder: texts)
    for alpha in (0.0, 0.5, 1.0):
        found = Counter(lang for lang, _ in steps.sample_kept_texts(Path(), counts, 2_000, alpha))
        total = sum(count**alpha for count in counts.values())
        for lang, count in counts.items():
            assert abs(found[lang] - 2000 * count**alpha / total) <= 1


LINKS = {
    "a,\u00a0  b\x01c d\tx  y z\t0-0 1-1 2-2": "0-0 2-1 3-1 4-2",
    "ten thousand euros\t10\u00a0000 euros\t0-0 1-0 2-1": "0-0 0-1 1-0 1-1 2-2",
    "a b\tx\u3000y z\t0-0 1-1": "0-0 0-1 1-2",
    "c d\te f\t1-1": "1-1",
}
"""Row of a TSV -> the stored links. Aligners divide words at spaces and tabs only: "10\u00a0000" is one word."""


def test_links_are_of_the_words_that_are_stored(tmp_path: Path) -> None:
    """OpusTrainer's TSV: the links count words of the given text, of which the rules change one into two."""
    (tmp_path / "l.tsv").write_text("".join(f"{row}\n" for row in LINKS), encoding="utf-8")
    tree = {"sources": [{"pairs": ["en", "fr"], "tsv": str(tmp_path / "l.tsv"), "columns": [1, 2], "links": 3}]}
    records = records_below(run(tmp_path, tree))
    assert [record.links for record in records] == list(LINKS.values())
    assert records[0].texts == ("a, b c d", "x y z")


def test_pairs_without_links_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The aligner gets each pair once a direction, in whatever chunks they are, without those that are repeated; links
    that a source has remain. An aligner that links words at equal places stands in for eflomal."""
    asked = list[list[tuple[str, str]]]()

    def diagonal(pairs: Iterable[tuple[str, str]], out: Path) -> str:
        asked.append(list(pairs))
        sizes = [min(len(text.replace("(", "( ").split()) for text in pair) for pair in asked[-1]]
        out.write_text("".join(" ".join(f"{i}-{i}" for i in range(size)) + "\n" for size in sizes))
        return ""

    monkeypatch.setattr(steps, "write_word_alignments", diagonal)
    monkeypatch.setattr(prepare.word_aligner, "find_aligner", lambda: "eflomal-align")
    monkeypatch.setattr(steps, "CHUNK_UNITS", 3)
    pairs = [("(" + "a " * n + "end", "(" + "b " * (n + 2) + "Ende") for n in range(8)]
    given = {"text": moses(tmp_path, [*pairs, pairs[2], pairs[7]])}
    (tmp_path / "l.tsv").write_text("c d\te f\t1-0\n", encoding="utf-8")
    tree = {
        "sources": [
            {"pairs": ["en", "de"], **given, "name": "plain"},
            {"pairs": ["en", "de"], "tsv": str(tmp_path / "l.tsv"), "columns": [1, 2], "links": 3},
            {"pairs": ["de", "en"], "text": given["text"][::-1], "first": 1, "name": "back", "rules": {"dedup": None}},
        ],
        "align": True,
        "rules": {"dedup": "exact"},
        "heldout": {"pairs": 1},
    }
    out = run(tmp_path, tree)
    assert sorted(asked) == sorted([[pair[::-1] for pair in pairs[:1]], pairs])
    records = records_below(out)
    for record in records:
        size = min(len(text.replace("(", "( ").split()) for text in record.texts)
        expected = "1-0" if record.texts[0] == "c d" else " ".join(f"{i}-{i}" for i in range(size))
        assert record.links == expected, record
    assert len(records) == 10


def test_shards_are_a_source_again(tmp_path: Path) -> None:
    """Their links and documents too. A rule that changes a text takes its links along."""
    (tmp_path / "l.tsv").write_text("a,\u00a0 b\x01c d\tx  y\t0-0 1-1\n", encoding="utf-8")
    (tmp_path / "docs").write_text("One here. Two there.\n\nThree.\n", encoding="utf-8")
    linked = {"pairs": ["en", "de"], "tsv": str(tmp_path / "l.tsv"), "columns": [1, 2], "links": 3, "name": "pairs"}
    mono = {"mono": "en", "text": str(tmp_path / "docs"), "name": "mono"}
    first = run(tmp_path, {"sources": [linked, mono], "rules": {"normalise": []}}, out="first") / "shards"
    again = [{"shards": str(first / name), "name": name} for name in ("pairs", "mono")]
    second = run(tmp_path, {"sources": again}, out="second") / "shards"
    (pair,), sentences = ([source.read(0, n) for n in range(source.records)] for source in find_sources([second])[::-1])
    assert pair.texts == ("a, b c d", "x y") and pair.links == "0-0 2-1 3-1"
    assert [text for record in sentences for text in record.texts] == ["One here.", "Two there.", "Three."]
    assert sentences[0].doc == sentences[1].doc != sentences[2].doc
    for bad, named in (
        ({"mono": "en", **again[0]}, "Remove the key `pairs` or `mono`"),
        ({"shards": "none"}, "none/index.json"),
    ):
        with pytest.raises(UserError, match=named):
            run(tmp_path, {"sources": [bad]})


def test_inline_codes_and_namespaces_of_a_tmx(tmp_path: Path) -> None:
    """The codes are markup; what they enclose, `hi` and `sub` are text. A file in UTF-16 and another spelling of the
    language are read."""
    english = "See <bpt>&lt;b&gt;</bpt>the<ept>&lt;/b&gt;</ept> <hi>blue</hi> <ph>[<sub>big</sub>]</ph> <x>door</x>."
    sides = [("eng", english), ("de-DE", "Tür<it>i</it><ut>x</ut>")]
    unit = "".join(f'<tuv xml:lang="{lang}"><seg>{segment}</seg></tuv>' for lang, segment in sides)
    text = f'<?xml version="1.0" encoding="UTF-16"?><tmx xmlns="http://www.lisa.org/tmx14"><body><tu>{unit}</tu></body></tmx>'
    (tmp_path / "m.tmx").write_text(text, encoding="utf-16")
    source = SourceSpec(pairs=("en", "deu_Latn"), tmx=str(tmp_path / "m.tmx"))
    assert [unit.texts for unit in readers.read_units(source)] == [["See the blue  big  door.", "Tür"]]


@pytest.mark.parametrize(
    ("asked", "marked", "chosen"),
    [
        ("zh-TW", ["zh", "ZH-TW"], "ZH-TW"),
        ("pt-BR", ["PT", "PT-BR"], "PT-BR"),
        ("pt", ["PT-BR", "PT"], "PT"),
        ("zh-TW", ["zh"], "zh"),
        ("de", ["de-AT", "de-DE"], "de-AT"),
    ],
)
def test_of_two_marks_of_a_language_that_of_the_same_region_is_read(
    tmp_path: Path, asked: str, marked: list[str], chosen: str
) -> None:
    unit = "".join(f'<tuv xml:lang="{lang}"><seg>{lang}</seg></tuv>' for lang in ["en", *marked])
    (tmp_path / "m.tmx").write_text(f"<tmx><body><tu>{unit}</tu></body></tmx>")
    source = SourceSpec(pairs=("en", asked), tmx=str(tmp_path / "m.tmx"))
    assert [unit.texts for unit in readers.read_units(source)] == [["en", chosen]]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (("zh-Hans", "zh-Hant"), ("zh", "zh-TW")),
        (("pt", "pt-BR"), ("pt-PT", "pt-BR")),
        (("zh", "zh-Hans"), ("zh-TW", "zh-Hans")),
        (("zh-Hant", "zh-Hans"), ("zh-TW", "zh-CN")),
    ],
)
def test_the_languages_of_a_pair_share_the_names_in_any_order(tmp_path: Path, asked: tuple, names: tuple) -> None:
    """Each language of `asked` gets the name at the same place in `names`, although one name may be that of either."""
    rows = [{name: name for name in order} for order in (names, names[::-1], ("zxx", *names))]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for sides in (asked, asked[::-1]):
        source = SourceSpec(pairs=sides, jsonl=str(tmp_path / "m.jsonl"))
        texts = [dict(zip(sides, unit.texts, strict=True)) for unit in readers.read_units(source)]
        assert texts == [dict(zip(asked, names, strict=True))] * 3


def test_a_text_marked_zh_is_not_both_sides_of_a_pair(tmp_path: Path) -> None:
    marked = [{"zh-CN": "软件", "zh-TW": "軟體"}, {"zh": "软件", "en": "software"}]
    body = ""
    for texts in marked:
        variants = "".join(f'<tuv xml:lang="{lang}"><seg>{text}</seg></tuv>' for lang, text in texts.items())
        body += f"<tu>{variants}</tu>"
    (tmp_path / "m.tmx").write_text(f"<tmx><body>{body}</body></tmx>")
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(texts) + "\n" for texts in marked))
    source = SourceSpec(pairs=("zh-Hans", "zh-Hant"), tmx=str(tmp_path / "m.tmx"))
    assert [unit.texts for unit in readers.read_units(source)] == [["软件", "軟體"], []]
    with pytest.raises(UserError, match="line 2: xscale did not find the fields with the text in zh-Hans and zh-Hant"):
        list(readers.read_units(SourceSpec(pairs=("zh-Hans", "zh-Hant"), jsonl=str(tmp_path / "m.jsonl"))))


@pytest.mark.parametrize("other", ["ind", "x"])
def test_the_field_id_is_indonesian_only_without_another(tmp_path: Path, other: str) -> None:
    (tmp_path / "f").write_text(json.dumps({"id": "1", "en": "a", other: "b"}))
    source = SourceSpec(pairs=("en", "id"), jsonl=str(tmp_path / "f"))
    assert [unit.texts for unit in readers.read_units(source)] == [["a", "b" if other == "ind" else "1"]]


def test_a_null_side_is_empty(tmp_path: Path) -> None:
    rows = [{"translation": {"en": "a", "de": "b"}}, {"translation": {"en": None, "de": "c"}}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run(tmp_path, {"sources": [{"pairs": ["en", "de"], "jsonl": str(tmp_path / "m.jsonl")}]})
    assert [texts for _, texts in stored(out / "shards")] == [("a", "b")]
    (source,) = json.loads((out / "report.json").read_text())["sources"]
    assert source["removed"] == {"empty": 1}


def test_marks_are_letters_and_byte_order_marks_are_not(tmp_path: Path) -> None:
    """Hindi and Arabic words that differ in their vowels are other words. U+FEFF and a carriage return are no text."""
    hindi = [("a", "\u0915\u093f"), ("b", "\u0915\u0940"), ("c", "\ufeff\u0915\r\ufeff\u0941")]
    (tmp_path / "test.hi").write_text("\u0915\u093f\n", encoding="utf-8")
    tree = {"sources": [{"pairs": ["en", "hi"], "text": moses(tmp_path, hindi)}],
            "rules": {"normalise": [], "exclude": [str(tmp_path / "test.hi")], "dedup": "exact"}}  # fmt: skip
    found = stored(run(tmp_path, tree) / "shards")
    assert [texts for _, texts in found] == [("b", "\u0915\u0940"), ("c", "\u0915 \u0941")]


def test_no_file_of_the_work_folder_runs_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's pickle in its place is refused, as any text that is not JSON."""
    (tmp_path / "a").write_text("One.\nTwo.\n")
    tree = {"sources": [{"mono": "en", "text": str(tmp_path / "a")}]}
    proof = tmp_path / "proof"

    class Attack:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(proof),)

    def replace_all(folder: Path, number: int) -> None:
        for path in folder.glob("clean/*"):
            path.write_bytes(pickle.dumps(Attack()))
        steps.write_selection_states(folder, number)

    monkeypatch.setitem(steps.STEPS, "select", steps.STEPS["select"]._replace(function=replace_all))
    with pytest.raises(ValueError):
        run(tmp_path, tree)
    assert not proof.exists()


def foreign_tar(path: Path, members: dict[str, str]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.parametrize("place", ["{folder}/x-{{0..1}}.tar", "pipe:cat {folder}/x-{{0..1}}.tar"])
def test_tars_of_others_are_read_by_webdataset(tmp_path: Path, place: str) -> None:
    """Braces and pipes; with links, and without macOS's hidden members. The first sample tells the languages."""
    for n in range(2):
        sample = {f"k{n}.de.txt": f"Haus {n}", f"k{n}.en.txt": f"house {n}", f"k{n}.links.txt": "0-0 1-1"}
        foreign_tar(
            tmp_path / f"x-{n}.tar", {"._k.txt": "x", ".DS_Store": "x", "README": "x", "__meta__": "x"} | sample
        )
    address = place.format(folder=tmp_path)
    plain = {"shards": address, "name": "plain"}
    turned = {"pairs": ["eng", "deu"], "shards": address, "name": "turned"}
    found = records_below(run(tmp_path, {"sources": [plain]}))
    assert [(record.langs, *record.texts, record.links) for record in found] == [
        (("de", "en"), f"Haus {n}", f"house {n}", "0-0 1-1") for n in range(2)
    ]
    found = records_below(run(tmp_path, {"sources": [turned]}, out="turned"))
    assert [(record.langs, *record.texts) for record in found] == [
        (("eng", "deu"), f"house {n}", f"Haus {n}") for n in range(2)
    ]
    (tmp_path / "x-1.tar").write_bytes((tmp_path / "x-1.tar").read_bytes()[:4610])  # inside of a text
    with pytest.raises(UserError, match=r"x-.*Correct the tar"):
        run(tmp_path, {"sources": [turned]}, out="cut")


@pytest.mark.parametrize("as_lines", [False, True])
def test_a_wrong_link_in_a_tar_is_told_with_its_record(tmp_path: Path, as_lines: bool) -> None:
    """The tar is one of several, and a record of a tar has no line."""
    for n, links in enumerate(("0-0", "0-7")):
        members = {f"k{n}.de.txt": "Haus", f"k{n}.en.txt": "house", f"k{n}.links.txt": links}
        if as_lines:
            record = {"key": f"k{n}", "langs": ["de", "en"], "texts": ["Haus", "house"], "links": links}
            members = {"0.jsonl": json.dumps(record)}
        foreign_tar(tmp_path / f"x-{n}.tar", members)
    source = {"pairs": ["de", "en"], "shards": f"{tmp_path}/x-{{0..1}}.tar", "name": "tars"}
    with pytest.raises(UserError, match=r"^record 'k1' of \S*/x-1\.tar: .*0-7.*Correct the links of the record$"):
        run(tmp_path, {"sources": [source]})


def test_documents_of_others_tars(tmp_path: Path) -> None:
    lines = [{"key": str(n), "langs": ["en"], "texts": [f"Text {n}."], "doc": n // 2} for n in range(4)]
    foreign_tar(tmp_path / "x.tar", {"0.jsonl": "".join(json.dumps(line) + "\n" for line in lines)})
    foreign_tar(tmp_path / "y.tar", {"0.txt": "One. Two.", "1.txt": "Three."})
    sources = [{"shards": str(tmp_path / "x.tar")}, {"mono": "en", "shards": str(tmp_path / "y.tar")}]
    documents = [
        list(readers.read_units(source)) for source in load_corpus(written(tmp_path, {"sources": sources})).sources
    ]
    assert [unit.texts for unit in documents[0]] == [["Text 0.", "Text 1."], ["Text 2.", "Text 3."]]
    assert [unit.texts for unit in documents[1]] == [["One. Two."], ["Three."]]
    with pytest.raises(UserError, match=r"`mono: LANG` in corpus\.yaml"):
        load_corpus(written(tmp_path, {"sources": [{"shards": str(tmp_path / "y.tar")}]}))
    foreign_tar(tmp_path / "z.tar", {"0.en.txt": "One.", "0.txt": "Eins."})
    with pytest.raises(UserError, match=r"sample '0' of \S*/z\.tar \(the record has texts in en, but .* en and de\)"):
        list(readers.read_units(SourceSpec(pairs=("en", "de"), shards=str(tmp_path / "z.tar"))))


def test_data_sets_of_a_folder_and_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of files without a script is read by its configuration and split, and a hub's name is streamed."""
    rows = [{"src": f"a {n}", "tgt": f"b {n}"} for n in range(3)]
    (tmp_path / "set" / "small").mkdir(parents=True)
    (tmp_path / "set" / "small" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "set" / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: test\n    path: small/test.jsonl\n---\n"
    )
    spec = {"pairs": ["en", "de"], "config": "small", "split": "test", "columns": ["src", "tgt"]}
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = run(tmp_path, {"sources": [spec | {"datasets": str(tmp_path / "set")}]})
    assert [texts for _, texts in stored(out / "shards")] == [(row["src"], row["tgt"]) for row in rows]
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: asked.append((given, named)) or rows)
    out = run(tmp_path, {"sources": [spec | {"datasets": "owner/name", "first": 2}]}, out="hub")
    assert [texts for _, texts in stored(out / "shards")] == [(row["src"], row["tgt"]) for row in rows[:2]]
    assert asked == [(("owner/name", "small"), {"split": "test", "streaming": True})]


@pytest.mark.parametrize("is_saved", [True, False])
def test_the_splits_that_exist_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = datasets.Dataset.from_dict({"en": ["a"], "de": ["b"]})
    if is_saved:
        datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "set")
    else:
        for split in ("train", "test"):
            table.to_json(tmp_path / "set" / f"{split}.jsonl")
    source = SourceSpec(pairs=("en", "de"), datasets=str(tmp_path / "set"), split="dev")
    with pytest.raises(UserError, match=r"/set.*train.*test"):
        list(readers.read_units(source))


def test_links_of_a_file_are_stored(tmp_path: Path) -> None:
    """Mozilla's form, in both spellings of corpus.yaml. A link that does not fit its pair is told with its line."""
    names = moses(tmp_path, [("a, b", "x y"), ("c d", "z")], ".zst", zstandard.compress)
    links = tmp_path / "m.aln.zst"
    links.write_bytes(zstandard.compress(b"0-0 1-1\n1-0\n"))
    pair = {"pairs": ["en", "de"], "text": names}
    tree = {"sources": [pair | {"links": str(links)}]}
    for spelling, out in ((tree, "out"), ({"sources": [pair], "align": {"links": str(links)}}, "aligned")):
        (source,) = find_sources([run(tmp_path, spelling, out=out) / "shards"])
        assert [source.read(0, n).links for n in range(2)] == ["0-0 2-1", "1-0"]
    links.write_bytes(zstandard.compress(b"0-0\n1-1\n"))
    with pytest.raises(UserError, match=r"m\.aln\.zst: line 2: .*1-1.*spaces and tabs divide words"):
        run(tmp_path, tree, out="again")


@pytest.mark.parametrize(
    ("first_line", "pairs", "is_refused"), [("1-1", 1000, True), ("1-1", 999, False), ("1-0", 1000, False)]
)
def test_links_counted_from_1_are_refused(tmp_path: Path, first_line: str, pairs: int, is_refused: bool) -> None:
    """An aligner that counts from 1 and never links the last words gives no link outside of the texts."""
    names = moses(tmp_path, [(f"{n} one .", f"{n} zwei .") for n in range(pairs)])
    links = tmp_path / "m.links"
    links.write_text("\n".join([first_line, *["1-1 2-2"] * (pairs - 1)]) + "\n")
    tree = {"sources": [{"pairs": ["en", "de"], "text": names, "links": str(links)}]}
    if not is_refused:
        run(tmp_path, tree)
        return
    with pytest.raises(UserError, match=rf"^{links}: the links of 1,000 pairs never have the number 0, .*from 0: "):
        run(tmp_path, tree)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("en-de.txt", "dog Hund\ncat Katze\n", ""),
        ("words.txt", "dog Hund\n", r"words\.txt.*en-de\.txt"),
        ("en-fr.txt", "dog chien\n", r"en-fr\.txt.* fr\..*remove"),
        ("en-de.dict", "dog Hund\n", r"rename the file .*en-de\.dict"),
        ("en-de.txt", "dog\n", r"en-de\.txt: line 1"),
    ],
)
def test_dictionaries_are_checked_and_copied(tmp_path: Path, name: str, content: str, named: str) -> None:
    (tmp_path / name).write_text(content)
    tree = {"sources": [{"pairs": ["en", "de"], "text": moses(tmp_path, PAIRS)}], "lexicons": [str(tmp_path / name)]}
    if named:
        with pytest.raises(UserError, match=named):
            run(tmp_path, tree)
        return
    shards = run(tmp_path, tree) / "shards"
    (found,) = find_lexicon_paths(find_sources([shards]), shards)
    assert found.name == name and found.read_text() == content


def test_dictionaries_are_spelled_as_the_text(tmp_path: Path) -> None:
    """As `data_tools.lexicon --truecase` of the kept text does; a word that the text lacks stays as it is."""
    (tmp_path / "en-de.txt").write_text("dog hund\ncat katze\nparis paris\n")
    pairs = [("The dog is in Paris.", "Der Hund ist in Paris."), ("A dog barks.", "Ein Hund bellt, kein hund.")]
    tree = {"sources": [{"pairs": ["en", "de"], "text": moses(tmp_path, pairs)}]}
    out = run(tmp_path, tree | {"lexicons": [str(tmp_path / "en-de.txt")]})
    assert (out / "lexicon" / "en-de.txt").read_text() == "dog Hund\ncat katze\nParis Paris\n"


def test_swapped_columns_of_a_dictionary_are_noticed(
    tmp_path: Path, demo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The message is that of a run, and names the file that corpus.yaml lists."""
    pairs = [World(0).pair(n)[:2] for n in range(20)]
    tree = {"sources": [{"pairs": ["en", "xx"], "text": moses(tmp_path, pairs)}], "tokenizer": str(demo / "tokenizer")}
    path = tmp_path / "en-xx.txt"
    for source, content in (("en-xx", "right"), ("xx-en", "swapped")):
        path.write_text((demo / f"lexicon/{source}.txt").read_text())
        run(tmp_path, tree | {"lexicons": [str(path)]}, out=content)
        message = f"dictionary {path}: the first column is probably in xx, although the file name says en"
        assert (message in caplog.text) == (content == "swapped")


def test_a_dictionary_without_a_usable_entry_is_left_out(
    tmp_path: Path, demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run would refuse it. A tokenizer that is given is the output's."""
    entries = read_entries(demo / "lexicon/en-xx.txt")[:300]
    for name, lines in (("en-xx.txt", [*entries, ("\u2603", "\u2602")]), ("xx-en.txt", [("\u2603", "\u2602")])):
        (tmp_path / name).write_text("".join(f"{first} {second}\n" for first, second in lines))
    pairs = [World(0).pair(n)[:2] for n in range(20)]
    tree = {"sources": [{"pairs": ["en", "xx"], "text": moses(tmp_path, pairs)}], "tokenizer": str(demo / "tokenizer")}
    out = run(tmp_path, tree | {"lexicons": [str(tmp_path / "en-xx.txt"), str(tmp_path / "xx-en.txt")]})
    assert [path.name for path in (out / "lexicon").iterdir()] == ["en-xx.txt"]
    assert "xx-en.txt is left out" in capsys.readouterr().out
    given, copy = (PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer") for folder in (demo, out))
    assert [copy(first)["input_ids"] for first, _ in pairs] == [given(first)["input_ids"] for first, _ in pairs]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A corpus of the demo world in several formats."""
    folder = tmp_path_factory.mktemp("raw")
    world = World(0)
    pairs = [world.pair(n)[:2] for n in range(900)]
    wiki = [f'<doc id="{n}">\n' + "\n".join(world.document("xx", n)) + "\n</doc>\n" for n in range(1, 60)]
    (folder / "wiki").mkdir()
    (folder / "wiki" / "wiki_00").write_text("".join(wiki), encoding="utf-8")
    return folder, {
        "sources": [
            {"pairs": ["en", "xx"], "tmx": tmx(folder, pairs[:300], "xx"), "name": "memory"},
            {"pairs": ["en", "xx"], "tsv": tsv(folder, pairs[200:]), "columns": [3, 2], "licence": "CC0"},
            {"mono": "xx", "text": str(folder / "wiki")},
        ],
        "rules": {"dedup": "exact", "length": {"characters": [2, 400], "tokens": [1, 128]}},
        "tokenizer": {"type": "wordpiece", "vocab_size": 400, "alpha": 0.5},
        "heldout": {"pairs": 20, "mono": 10},
    }


def test_the_whole_of_it(tmp_path: Path, raw: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a plain loop over the input; no sentence is both held out and trained on."""
    _, tree = raw
    monkeypatch.setattr(steps, "CHUNK_UNITS", 100)
    out = run(tmp_path, tree)
    world = World(0)
    expected = list(dict.fromkeys(world.pair(n)[:2] for n in [*range(300), *range(200, 900)]))
    found = [texts for langs, texts in stored(out / "shards") if len(langs) == 2]
    held = [texts for _, texts in stored(out / "heldout")]
    of_pairs = [texts for texts in held if len(texts) == 2]
    assert len(of_pairs) == 20 and 20 < len(held) <= 30 and not set(of_pairs) & set(found)
    assert sorted([*found, *of_pairs]) == sorted(expected)
    report = json.loads((out / "report.json").read_text())
    assert report["sources"][1]["licence"] == "CC0" and len(list((out / "tokenizer").iterdir())) >= 2
    assert {path.name for path in out.iterdir()} == {"shards", "heldout", "tokenizer", "report.json", "report.html"}
    with pytest.raises(UserError, match="out exists and is not an empty folder"):
        run(tmp_path, tree)


def test_a_run_that_failed_goes_on(tmp_path: Path, raw: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of each step a task fails once. Every other task is done once, and the bytes are the same."""
    _, tree = raw
    monkeypatch.setattr(steps, "CHUNK_UNITS", 100)
    expected = hashes(run(tmp_path, tree, out="whole"))
    original = {name: step for name, step in steps.STEPS.items() if name not in ("align", "lexicons")}  # without tasks
    done = Counter[tuple[str, int]]()

    def counting(name: str, folder: Path, number: int) -> None:
        done[name, number] += 1
        if number == original[name].count(folder) // 2 and done[name, number] == 1:
            raise UserError(f"{name} fails")
        original[name].function(folder, number)

    for name, step in original.items():
        monkeypatch.setitem(steps.STEPS, name, step._replace(function=partial(counting, name)))
    for name in original:
        with pytest.raises(UserError, match=f"{name} fails"):
            run(tmp_path, tree, out="failed")
    assert hashes(run(tmp_path, tree, out="failed")) == expected
    assert Counter(done.values())[2] == len(original) and max(done.values()) == 2


def test_dry_run_writes_nothing(tmp_path: Path, raw: tuple[Path, dict], capsys: pytest.CaptureFixture) -> None:
    run(tmp_path, raw[1], "--dry_run")
    assert "memory: tmx, en-xx, pairs\n" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.yaml"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["none.yaml", "--out", "out"], "none.yaml"),
        (["corpus.yaml", "--out", "out"], "gone.tmx .*not found.*relative to"),
        (["corpus.yaml", "--out", "out", "--workers", "0"], "--workers 0"),
        (["corpus.yaml"], "--out or --dry_run"),
        (["corpus.yaml", "--out", "out", "--executor", "dask"], "dask.*local.*slurm.*ray"),
    ],
)
def test_bad_input_ends_with_code_2(tmp_path: Path, words: list[str], named: str, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture) -> None:  # fmt: skip
    written(tmp_path, {"sources": [{"pairs": ["en", "de"], "tmx": "gone.tmx"}]})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare", *words])
    with pytest.raises(SystemExit) as end:
        command.run_tool_and_exit(prepare.main)
    assert end.value.code == 2 and re.search(named, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_another_corpus_or_run_is_refused(
    tmp_path: Path, raw: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder goes on for the same corpus.yaml, input and xscale only, and for one process at a time."""
    _, tree = raw
    folder = tmp_path / "out.incomplete"
    tree = {"sources": [tree["sources"][0] | {"first": 5}]}
    folder.mkdir()
    with (
        engine.lock_folder_or_raise(folder),
        pytest.raises(UserError, match=r"another process is writing to .*out\.incomplete"),
    ):
        run(tmp_path, tree)
    prepare.check_and_write_input_stamp(steps.CorpusPlan(load_corpus(written(tmp_path, tree))), folder)
    (folder / "done" / "cut").mkdir(parents=True)
    (folder / "done" / "cut" / "000000").touch()
    for other in ({"sources": [tree["sources"][0] | {"first": 6}]}, tree | {"heldout": {"pairs": 1}}):
        with pytest.raises(UserError, match=r"out\.incomplete .* corpus\.yaml.* changed\. Remove \S*out\.incomplete"):
            run(tmp_path, other)
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"version of xscale has changed\. Remove \S*out"),
    ):
        patch.setattr(prepare, "__version__", "9.9.9")  # which may write other files
        run(tmp_path, tree)
    (tmp_path / "tokenizer").mkdir()
    with_tokenizer = load_corpus(written(tmp_path, tree | {"tokenizer": str(tmp_path / "tokenizer")}))
    (folder / "stamp.json").unlink()
    files.remove(folder / "done")
    prepare.check_and_write_input_stamp(steps.CorpusPlan(with_tokenizer), folder)
    (folder / "done" / "cut").mkdir(parents=True)
    (folder / "done" / "cut" / "000000").touch()
    (tmp_path / "tokenizer" / "tokenizer.json").touch()
    with pytest.raises(UserError, match=r"a file that corpus\.yaml lists, .* changed"):
        prepare.check_and_write_input_stamp(steps.CorpusPlan(with_tokenizer), folder)
    files.remove(folder / "done")  # no task is finished, so nothing is lost
    assert json.loads((run(tmp_path, tree) / "report.json").read_text())["sources"][0]["counts"]["records"] == 5


def test_a_worker_ends_if_its_parent_died_before_it_began() -> None:
    worker = multiprocessing.get_context("fork").Process(
        target=lambda: (engine.ignore_ctrl_c_and_exit_with_parent(0), time.sleep(60))
    )
    worker.start()
    worker.join(30)
    assert worker.exitcode == 1


SMALL = """
import sys
from data_tools import command, prepare, steps
steps.CHUNK_UNITS = 40
if __name__ == "__main__":
    command.run_tool_and_exit(prepare.main)
"""
"""The command with small chunks, in workers too, which import it."""


def started(folder: Path, tree: dict, out: str, workers: int) -> subprocess.Popen:
    """The command as a user runs it."""
    (folder / "small.py").write_text(SMALL)
    words = [folder / "small.py", written(folder, tree), "--out", folder / out, "--workers", workers]
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=launch.environment() | {"PYTHONPATH": str(launch.ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("a"),
        start_new_session=True,
    )


@pytest.mark.slow
def test_the_same_bytes_for_any_workers_and_kills(tmp_path: Path, raw: tuple[Path, dict]) -> None:
    """1 and 2 workers write the same bytes, and so does a command of 1 or 2 that is killed at 4 random moments, which
    does no finished task again."""
    _, tree = raw
    for out, workers in (("one", 1), ("two", 2)):
        assert started(tmp_path, tree, out, workers).wait(300) == 0, (tmp_path / "log").read_text()
    expected, choose, kills = hashes(tmp_path / "one"), random.Random(0), 0
    assert hashes(tmp_path / "two") == expected and len(expected) > 20
    marks = tmp_path / "killed.incomplete" / "done"
    before: dict[str, int] = {}
    while not (tmp_path / "killed").exists():
        running = started(tmp_path, tree, "killed", 1 + kills % 2)
        tasks = len(list(marks.rglob("*"))) + choose.randrange(1, 5)  # it has done some more when it is killed
        while running.poll() is None and (kills >= 4 or len(list(marks.rglob("*"))) < tasks):
            time.sleep(0.01)
        time.sleep(choose.random() / 20)
        kills += running.poll() is None
        running.kill()
        running.wait()
        now = {str(path): path.stat().st_mtime_ns for path in marks.rglob("*[0-9]") if path.is_file()}
        again = before.items() - now.items()  # marks go at the end, when the result is there
        assert not again or (tmp_path / "killed").exists(), f"done again: {sorted(again)}"
        before = now
    assert 3 <= kills <= 4 and hashes(tmp_path / "killed") == expected


@pytest.mark.slow
def test_slurm_writes_the_same_bytes(tmp_path: Path) -> None:
    """The jobs are on two nodes. The command is killed while it waits, and started again. A job's error is its own."""
    for number, name in enumerate(("a", "b")):
        lines = (f"word {n % 15000} here\tWort {n % 15000} da\n" for n in range(number * 9000, 9000 + number * 9000))
        (tmp_path / name).write_text("".join(lines))
    tree: dict = {"sources": [], "rules": {"dedup": "exact"}, "heldout": {"pairs": 50}}
    tree["sources"] = [{"pairs": ["en", "de"], "tsv": str(tmp_path / name), "columns": [1, 2]} for name in ("a", "b")]
    expected = hashes(run(tmp_path, tree, out="local"))
    words = [sys.executable, "-m", "data_tools.prepare", str(tmp_path / "corpus.yaml"), "--executor", "slurm"]
    words += ["--workers", "2", "--out", str(tmp_path / "slurm")]
    with cluster() as slurm:
        environment = slurm.environment | {"PYTHONPATH": str(launch.ROOT), "SBATCH_EXCLUSIVE": "exclusive"}
        first = subprocess.Popen(words, env=environment, cwd=tmp_path)
        marks = tmp_path / "slurm.incomplete" / "done"
        wait_for(lambda: len(list(marks.rglob("0*"))) >= 3, 300, slurm.logs)
        first.kill()
        first.wait()
        done = {path: path.stat().st_mtime_ns for path in marks.rglob("0*")}
        again = subprocess.Popen(words, env=environment, cwd=tmp_path)
        while again.poll() is None:
            with suppress(FileNotFoundError):  # the marks go when the result is there
                assert all(path.stat().st_mtime_ns == time for path, time in done.items())
            time.sleep(0.2)
        assert again.returncode == 0 and hashes(tmp_path / "slurm") == expected
        jobs = slurm.run("scontrol", "show", "job", "-o").splitlines()
        assert {dict(re.findall(r"(\S+?)=(\S*)", line))["NodeList"] for line in jobs} == {"n1", "n2"}
        (tmp_path / "b").write_text("a\tb\nc\n")
        bad = subprocess.run([*words[:-1], str(tmp_path / "bad")], env=environment, capture_output=True, text=True)
        assert (
            bad.returncode == 2
            and f"cut: 1 of 2 tasks failed: {tmp_path}/b: line 2 must have at least 2 columns" in bad.stderr
        )


TWICE = """
import sys
from pathlib import Path
from data_tools import command, prepare
words = ["corpus.yaml", "--executor", "ray", "--workers", "2", "--out"]
prepare.main([*words, "ray"])
Path("b").write_text("a\\tb\\nc\\n")
sys.argv = ["prepare", *words, "bad"]
command.run_tool_and_exit(prepare.main)
"""
"""The command, and the command with a file that is wrong, on one Ray cluster, whose start takes longer than both."""


@pytest.mark.slow
def test_ray_writes_the_same_bytes(tmp_path: Path) -> None:
    """A task's error is the command's."""
    for number, name in enumerate(("a", "b")):
        lines = (f"word {n % 5000} here\tWort {n % 5000} da\n" for n in range(number * 3000, 3000 + number * 3000))
        (tmp_path / name).write_text("".join(lines))
    tree: dict = {"sources": [], "rules": {"dedup": "exact"}, "heldout": {"pairs": 50}}
    tree["sources"] = [{"pairs": ["en", "de"], "tsv": str(tmp_path / name), "columns": [1, 2]} for name in ("a", "b")]
    expected = hashes(run(tmp_path, tree, out="local"))
    environment = launch.environment() | {"PYTHONPATH": str(launch.ROOT)}
    done = subprocess.run([sys.executable, "-c", TWICE], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and f"error: {tmp_path}/b: line 2 must have at least 2 columns" in done.stderr, (
        done.stderr[-3000:]
    )
    assert hashes(tmp_path / "ray") == expected


def test_a_worker_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    """The command ends with exit code 4 and a line, and does not wait for ever."""
    (tmp_path / "small.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom data_tools import engine\n"
        "def step(folder, number):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n    tasks = engine.TaskList(Path('work'), 'step', step, [0, 1, 2, 3])\n"
        "    engine.run_tasks('local', 2, tasks)\n"
    )
    done = subprocess.run([sys.executable, "small.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100,
                          env=launch.environment() | {"PYTHONPATH": str(launch.ROOT)})  # fmt: skip
    assert "MachineError" in done.stderr and "fewer --workers" in done.stderr
