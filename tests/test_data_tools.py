"""The tools that make data: what ends up in shards, tokenizers and the demo corpus, checked against the input."""

import errno
import itertools
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from data_tools import demo_corpus, inspect, prepare, tokenizer, write_shards
from data_tools.demo_world import FIRST_YY, World
from data_tools.readers import input_files
from tests import launch
from xscale.data.shards import Source, find_sources
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.run.describe import notes_before_first_step
from xscale.run.resolve import resolve_run


def write_mono(out: Path, *options: object) -> None:
    write_shards.main(["mono", "--lang", "en", "--out", str(out), *map(str, options)])


def records_of(directory: Path, shard_records) -> list[dict]:
    return [record for shard in shard_records(directory) for record in shard]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def counts_of(directory: Path) -> dict[str, int]:
    return json.loads((directory / "index.json").read_text())["made_by"]["counts"]


# Pairs


def test_pairs_with_blank_lines(tmp_path: Path, corpus_files, write_pairs, shard_records) -> None:
    """A pair with an empty side is left out and counted; the others keep their line number in the key."""
    src, tgt = ["a", "", "c ", " d", "e", " "], ["A", "B", "C", " ", "E", ""]
    write_pairs(*corpus_files(src, tgt), tmp_path / "out")
    found = records_of(tmp_path / "out", shard_records)
    assert [record["texts"] for record in found] == [["a", "A"], ["c", "C"], ["e", "E"]]
    assert [int(record["key"].rpartition("-")[2]) for record in found] == [1, 3, 5]
    assert counts_of(tmp_path / "out") == {"lines": 6, "records": 3, "empty": 3}


def test_standard_input_and_pipes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "data_tools.write_shards", "mono", "--text", "-", "--lang", "en", "--out", "out"]
    done = subprocess.run(words, input=b"One here. Two there.\nThree.\n", cwd=tmp_path, capture_output=True,
                          env=launch.environment() | {"PYTHONPATH": str(launch.ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    (source,) = find_sources([tmp_path / "out"])
    assert [source.read(0, n).texts[0] for n in range(3)] == ["One here.", "Two there.", "Three."]


@pytest.mark.parametrize("options", [("--src", "--tgt"), ("--tgt", "--links"), ("--links_src", "--links_tgt")])
@pytest.mark.parametrize("name", ["-", "pipe"])
def test_a_pipe_that_two_options_name(tmp_path: Path, options: tuple[str, str], name: str) -> None:
    """It is refused before it is opened, which would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    words = ["pairs", "--langs", "en", "de", "--out", str(tmp_path / "x")]
    for option in ("--src", "--tgt", "--links", "--links_src", "--links_tgt"):
        words += [option, str(tmp_path / option)]
        if option in options:
            words[-1] = name if name == "-" else str(tmp_path / name)
    with pytest.raises(UserError, match=r"(/dev/stdin|pipe) is listed 2 times"):
        write_shards.main(words)


def test_hidden_files_are_no_text(tmp_path: Path) -> None:
    for name in ("wiki/AA/wiki_00", "wiki/.DS_Store", "wiki/.git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert input_files([tmp_path / "wiki"]) == [tmp_path / "wiki/AA/wiki_00"]
    assert input_files([tmp_path / "wiki/.DS_Store"]) == [tmp_path / "wiki/.DS_Store"]  # named


def test_no_file_of_a_folder_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders behind links are read, each once; links to nothing and folders without rights are errors."""
    for name in ("wiki/AA/00", "elsewhere/BB/01"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "wiki" / "BB").symlink_to(tmp_path / "elsewhere" / "BB")
    (tmp_path / "wiki" / "AA" / "all").symlink_to(tmp_path / "wiki")
    assert input_files([tmp_path / "wiki"]) == [tmp_path / "wiki/AA/00", tmp_path / "wiki/BB/01"]
    with pytest.raises(UserError, match=r"BB/01 is listed twice"):
        input_files([tmp_path / "wiki", tmp_path / "elsewhere"])
    (tmp_path / "wiki" / "CC").symlink_to("CC")
    with pytest.raises(UserError, match=r"wiki/CC is a symbolic link to CC, which does not exist"):
        input_files([tmp_path / "wiki"])
    (tmp_path / "wiki" / "CC").unlink()
    scandir = os.scandir

    def without_rights(path: str) -> Any:
        if path.endswith("AA"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", without_rights)
    with pytest.raises(PermissionError):
        input_files([tmp_path / "wiki"])


def test_links_of_the_aligners_text(tmp_path: Path, corpus_files, write_pairs, shard_records, capsys) -> None:
    """Carried over to words; what ties a word to punctuation is dropped and counted."""
    paths = corpus_files(["It's here.", "Yes, now!"] * 3, ["C'est ici.", "Oui !"] * 3)
    for name, lines in (
        ("links", ["0-0 1-1 3-2 4-3 2-3", "0-0 1-1"] * 3),
        ("src", ["it &apos; s here .", "yes , now !"] * 3),
        ("tgt", ["c&apos; est ici .", "oui !"] * 3),
    ):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    options = ("--links", tmp_path / "links", "--links_src", tmp_path / "src", "--links_tgt", tmp_path / "tgt")
    out = tmp_path / "out"
    write_pairs(*paths, out, *options, "--shard_lines", 1)
    # It ' s here .    C ' est ici .
    links = [record["links"] for record in records_of(out, shard_records)]
    assert links == ["0-0 3-3 4-4", "0-0 1-1"] * 3
    assert counts_of(out)["dropped_links"] == 6
    assert "links between a word and a punctuation mark: 6\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="Write all three"):
        write_pairs(*paths, tmp_path / "x", *options[:4])
    (tmp_path / "src").write_text("quite another text\n" * 6)
    with pytest.raises(UserError, match=r"links: line 1: .*less than half of the characters .*--links_src F"):
        write_pairs(*paths, tmp_path / "x", *options)


def test_token_limits(tmp_path: Path, demo: Path, corpus_files, write_pairs, shard_records) -> None:
    """Every side at least --min_tokens; a sequence at most --max_tokens, as Hugging Face and training count."""
    world, reference = World(0), AutoTokenizer.from_pretrained(str(demo / "tokenizer"))
    pairs = [world.pair(i)[:2] for i in range(200)]
    sizes = [[len(reference(side, add_special_tokens=False)["input_ids"]) for side in pair] for pair in pairs]
    options = ("--min_tokens", 9, "--max_tokens", 29, "--tokenizer", demo / "tokenizer")
    paths = corpus_files(*zip(*pairs, strict=True))
    write_pairs(*paths, tmp_path / "out", *options)
    expected = [list(p) for p, size in zip(pairs, sizes, strict=True) if min(size) >= 9 and sum(size) + 3 <= 29]
    assert 20 < len(expected) < 180
    assert [record["texts"] for record in records_of(tmp_path / "out", shard_records)] == expected
    counts = counts_of(tmp_path / "out")
    assert counts["too short"] == sum(min(size) < 9 for size in sizes)
    assert counts["lines"] == counts["records"] + counts["too short"] + counts["too long"] == 200
    write_mono(tmp_path / "mono", "--text", paths[0], "--whole_lines", *options)
    kept = [pair[0] for pair, size in zip(pairs, sizes, strict=True) if 9 <= size[0] <= 27]
    assert [record["texts"][0] for record in records_of(tmp_path / "mono", shard_records)] == kept


# Monolingual text


def test_keys_are_unique_whatever_files_are_called(tmp_path: Path, shard_records) -> None:
    names = ["a/x.txt", "b/x.txt", "b/x.en.txt", "y.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\ntwo\n")
    write_mono(tmp_path / "out", "--text", *(tmp_path / name for name in names))
    keys = [record["key"] for record in records_of(tmp_path / "out", shard_records)]
    assert len(set(keys)) == len(keys) == 8
    assert keys[-1] == "x.en-000000008.0"


def test_lines_are_numbered_from_one(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes("ä\r\n\nlast".encode())
    assert list(read_lines(tmp_path / "t")) == [(1, "ä"), (2, ""), (3, "last")]
    (tmp_path / "d").mkdir()
    with pytest.raises(UserError, match="no file"):
        input_files([tmp_path / "d"])


# inspect


def test_inspect_counts(tmp_path: Path, demo: Path, shard_records, capsys: pytest.CaptureFixture) -> None:
    inspect.main([str(demo / "pairs"), "--show", "5"])
    out = capsys.readouterr().out
    found = records_of(demo / "pairs", shard_records)
    shown = [json.loads(line) for line in out.splitlines() if line.strip().startswith("{")]
    assert len(shown) == 5 and all(record in found for record in shown)
    places = [found.index(record) for record in shown]
    assert places[0] < 100 and places[-1] > 500, "records are spread over the source"
    assert "600 pair records (en xx)" in out and "with word alignments: 100%" in out
    assert not re.search(r"word alignments: .*[0-9]\.[0-9]{5}", out), "the statistics are rounded"
    for side, lang in enumerate(("en", "xx")):
        words = [len(re.findall(r"\w+|\S", record["texts"][side])) for record in found]
        assert f"{lang}: words per sentence: mean {sum(words) / 600:.1f}" in out
        assert f"maximum {max(words)} " in out
    inspect.main([str(demo / "mono_en"), "--show", "9999"])
    assert sum(line.strip().startswith("{") for line in capsys.readouterr().out.splitlines()) == 600


def test_inspect_shows_each_folder_up_to_a_bad_one(tmp_path: Path, demo: Path, capsys) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/index.json").write_text("{")
    with pytest.raises(UserError, match=r"bad/index\.json is not an index"):
        inspect.main([str(demo / "mono_en"), str(demo / "mono_en"), str(tmp_path)])
    assert capsys.readouterr().out.count("600 mono records") == 2


# Tokenizers


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_tokenizer_of_shards_and_text(tmp_path: Path, demo: Path, kind: str, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "text.de").write_text("Schifffahrt\n" * 300)
    sources = ["--data", str(demo / "mono_en"), "--text", str(tmp_path / "text.de")]
    tokenizer.main([*sources, "--out", str(tmp_path / "t"), "--type", kind, "--vocab_size", "500"])
    made = AutoTokenizer.from_pretrained(str(tmp_path / "t"))
    assert len(made) <= 500 and f"{len(made):,} tokens" in capsys.readouterr().out
    assert made.unk_token_id not in made("Schifffahrt")["input_ids"], "the text was not read"
    ids = made("the dog sleeps", "a cat")["input_ids"]
    special = (made.cls_token_id, made.sep_token_id)
    assert ids[0] == special[0] and ids[-1] == special[1] and ids.count(special[1]) == (2 if kind == "wordpiece" else 3)
    assert made.decode(ids, skip_special_tokens=True).split() == ["the", "dog", "sleeps", "a", "cat"]
    assert made.mask_token_id is not None and made.pad_token_id is not None
    assert made.unk_token_id not in ids
    assert len(set(made.get_vocab().values())) == len(made) == max(made.get_vocab().values()) + 1


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_decomposed_text_has_the_ids_of_composed_text(tmp_path: Path, kind: str, lowercase: bool) -> None:
    composed = "une école d'Été"
    tokenizer.train([("fr", composed)] * 9, kind, 400, lowercase).save_pretrained(tmp_path)
    made = AutoTokenizer.from_pretrained(tmp_path)
    ids = made(composed)["input_ids"]
    assert made(unicodedata.normalize("NFD", composed))["input_ids"] == ids and made.unk_token_id not in ids


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_lower_case_keeps_accents_and_vowel_signs(kind: str) -> None:
    texts = ["une École d'Été", "हिन्दी में किताबें", "ที่นี่"]
    made = tokenizer.train([("", text) for text in texts * 9], kind, 600, lowercase=True)
    ids = [made(text, add_special_tokens=False)["input_ids"] for text in texts]
    found = [made.decode(text_ids).replace(" ' ", "'") for text_ids in ids]
    assert found == ["une école d'été", *texts[1:]] and made.unk_token_id not in ids[1]


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_training_a_tokenizer_is_repeatable(kind: str) -> None:
    """The library's trainers are not: they go through hash tables of another order each time."""
    world = World(0)
    texts = [("en", side) for i in range(300) for side in world.pair(i)[:2]]
    made = [tokenizer.train(iter(texts), kind, 400, False).backend_tokenizer.to_str() for _ in range(4)]
    assert len(set(made)) == 1


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_a_text_with_too_few_words_for_the_vocabulary_is_told(kind: str, capsys: pytest.CaptureFixture) -> None:
    for vocab_size in (300_000, 280):
        made = tokenizer.train([("en", "the dog sees a cat and the cat sees a dog")] * 9, kind, vocab_size, False)
        told = f"has only {len(made):,} of the {vocab_size:,} tokens" in capsys.readouterr().err
        assert told == (len(made) < vocab_size)


def test_max_records(tmp_path: Path, demo: Path) -> None:
    texts = list(tokenizer.read_shard_texts([Source(demo / "pairs")], 7))
    world = World(0)
    assert texts == [side for i in range(7) for side in zip(("en", "xx"), world.pair(i)[:2], strict=True)]


def characters(language: str, kinds: int, first: int) -> list[tuple[str, str]]:
    """Texts of so many kinds of characters from one on, the k-th about 1 / k as often as the first."""
    return [(language, " ".join([chr(first + k)] * (4000 // (k + 1)))) for k in range(kinds)]


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_vocabulary_holds_a_share_of_each_language_s_characters(kind: str, monkeypatch, capsys) -> None:
    """The most frequent of each that make up the share, however little of the text is in the language; what does not
    fit is said; Unigram writes the others in bytes."""
    monkeypatch.setattr(tokenizer, "_ALPHABET", 3)
    monkeypatch.setattr(tokenizer, "COVERAGE", 0.95)
    texts = characters("zh", 600, 0x4E00) + 3 * characters("en", 90, 0x250)
    expected = set()
    for language in ("zh", "en"):
        seen = Counter("".join(text for lang, text in texts if lang == language).replace(" ", ""))
        order = sorted(seen, key=lambda char: (-seen[char], char))
        least = next(n for n in range(len(order)) if sum(seen[c] for c in order[:n]) >= 0.95 * seen.total())
        expected |= set(order[:least])
    made = tokenizer.train(texts, kind, 1500, False)
    held = {piece for piece in made.get_vocab() if len(piece) == 1} - {"▁"}
    assert held == expected and "warning" not in capsys.readouterr().err
    rare = chr(0x4E00 + 599)
    assert rare not in held and (made.unk_token_id in made(rare)["input_ids"]) == (kind == "wordpiece")
    if kind == "unigram":
        assert made.decode(made(f"{rare}é")["input_ids"], skip_special_tokens=True) == f"{rare}é"
    else:
        assert not any(f"##{char}" in made.get_vocab() for char in held if char >= "\u4e00"), "never inside a word"
    small = tokenizer.train(texts, kind, 340, False)
    assert re.search(rf"should have {len(expected)} characters.*vocab_size", capsys.readouterr().err)
    assert {piece for piece in small.get_vocab() if len(piece) == 1} - {"▁"} < expected
    with pytest.raises(UserError, match="vocab_size"):
        tokenizer.train(texts, kind, 6 if kind == "wordpiece" else 200, False)


def test_unknown_tokens_are_told(tmp_path: Path, demo: Path, capsys: pytest.CaptureFixture) -> None:
    """`inspect` prints the share of unknown tokens of each language: one of the four words of this sentence."""
    (tmp_path / "c.en").write_text("the dog sees it\n" * 30)
    (tmp_path / "c.zh").write_text("学 生 走 了\n" * 30)
    for language in ("en", "zh"):
        argv = ["mono", "--text", str(tmp_path / f"c.{language}"), "--lang", language]
        write_shards.main([*argv, "--whole_lines", "--out", str(tmp_path / language)])
    data = ["--data", str(tmp_path / "en"), str(tmp_path / "zh")]
    tokenizer.main([*data, "--out", str(tmp_path / "t")])
    vocab = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    del vocab["model"]["vocab"]["学"]
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(vocab))
    inspect.main([str(tmp_path), "--tokenizer", str(tmp_path / "t")])
    out = capsys.readouterr().out
    assert (
        "en: 0.00% of the tokens are unknown" in out
        and "zh: 25.00% of the tokens are unknown" in out
        and re.search(r"warning: 25.0% of the tokens in zh.*/t", out)
    )


# The demo corpus


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m data_tools.demo_corpus` makes. Read only."""
    out = tmp_path_factory.mktemp("made") / "demo"
    demo_corpus.main(["--out", str(out), "--pairs", "300", "--mono", "300"])
    return out


def test_demo_corpus_is_whole(made: Path, shard_records) -> None:
    """All that the world says is there, once, in order: pairs for training or held out, and documents."""
    folders = [
        "heldout",
        "heldout_yy",
        "lexicon",
        "mono_en",
        "mono_xx",
        "mono_yy",
        "pairs",
        "pairs_yy",
        "raw",
        "tokenizer",
    ]
    assert sorted(path.name for path in made.iterdir() if path.is_dir()) == folders
    world = World(0)
    for other, first, name, held, sizes in (
        ("xx", 0, "pairs", "heldout", (300, 33)),
        ("yy", FIRST_YY, "pairs_yy", "heldout_yy", (60, 6)),
    ):
        found = [records_of(made / folder, shard_records) for folder in (name, f"{held}/pairs")]
        assert tuple(map(len, found)) == sizes
        numbered = sorted((record["key"], record["texts"]) for records in found for record in records)
        assert [texts for _, texts in numbered] == [list(world.pair(first + n, other)[:2]) for n in range(sum(sizes))]
    for lang, sentences in (("en", 300), ("xx", 300), ("yy", 60)):
        found = records_of(made / f"mono_{lang}", shard_records)
        documents = ([text] for number in count(1) for text in world.document(lang, number))
        assert [record["texts"] for record in found] == list(islice(documents, sentences))
        ids = [record.get("doc", record["key"]) for record in found]
        assert len(set(ids)) == len(list(itertools.groupby(ids))) < len(ids)


def test_demo_links(made: Path, shard_records) -> None:
    """The links between words are those of the world."""
    world = World(0)
    for record in records_of(made / "pairs", shard_records)[:100]:
        number = int(record["key"].rpartition("-")[2]) - 1
        *texts, links = world.pair(number)
        words = re.findall(r"\w+|[^\w\s]", texts[0])
        gold, found = (
            {link for link in of.split() if words[int(link.split("-")[0])].isalnum()} for of in (links, record["links"])
        )
        assert found == gold


def test_demo_corpus_is_the_same_again(made: Path, tmp_path: Path) -> None:
    """By the same command, and by `prepare` from the corpus.yaml beside the raw files."""
    demo_corpus.main(["--out", str(tmp_path / "demo"), "--pairs", "300", "--mono", "300"])
    prepare.main([str(made / "corpus.yaml"), "--out", str(tmp_path / "again")])
    first = contents(made)
    assert contents(tmp_path / "demo") | {"corpus.yaml": first.pop("corpus.yaml")} == contents(made)
    of_shards = {f"shards/{name}": data for name, data in first.items() if name.startswith(("pairs", "mono"))}
    again = contents(tmp_path / "again")
    assert len(of_shards) > 15 and of_shards == {name: again[name] for name in again if name.startswith("shards")}


@pytest.mark.slow
def test_the_whole_demo_corpus_is_made_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The smaller corpora of the other tests have too few words for the vocabulary."""
    demo_corpus.main(["--out", str(tmp_path / "demo")])
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith(("step ", "source "))] == []


def test_the_recipe_mixed_reads_the_demo_corpus(made: Path) -> None:
    """The TMX has no word links; objectives that need links read the other pairs, and the run says so."""
    recipe, corpus = resolve_run("mixed", [], [made])
    read = {s.name: [corpus.sources[n].directory.name for n in s.sources] for s in corpus.streams.last}
    assert read["alignlm"] == read["word_contrast"] == ["pairs"] and read["tlm"] == read["ppa"] == ["pairs", "pairs_yy"]
    (note,) = [line for line in notes_before_first_step(recipe, corpus) if "alignlm" in line]
    assert "pairs_yy" in note and "no word alignments" in note


def test_demo_dictionary(made: Path) -> None:
    """One `source target` an entry, both directions the same entries, spelled as the text spells them."""
    forth, back = (
        [tuple(line.split(" ")) for line in (made / "lexicon" / name).read_text().splitlines()]
        for name in ("en-xx.txt", "xx-en.txt")
    )
    given = World(0).dictionary()
    assert {(en.lower(), xx.lower()) for en, xx in forth} == {(en.lower(), xx.lower()) for en, xx in given}
    assert set(forth) == {(en, xx) for xx, en in back} and len(forth) == len(back) == len(set(forth))


def test_demo_tokenizer_knows_the_demo(made: Path) -> None:
    tokens, world = AutoTokenizer.from_pretrained(str(made / "tokenizer")), World(0)
    for i in range(100):
        for side in world.pair(i)[:2]:
            ids = tokens(side, add_special_tokens=False)["input_ids"]
            assert tokens.unk_token_id not in ids and tokens.decode(ids).replace(" ", "") == side.replace(" ", "")


@pytest.mark.slow
def test_real_chinese_is_known(real: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With a tokenizer of 16,000 of wiki_zh and Tatoeba en-zh; it was 12 to 15 % that was not."""
    for name, text, options in (
        ("wiki_zh", "mono/wiki_zh/wiki_0[0-3]*", ()),
        ("tatoeba_zh", "parallel/tatoeba/en-zh.zh.xz", ("--whole_lines",)),
        ("tatoeba_en", "parallel/tatoeba/en-zh.en.xz", ("--whole_lines",)),
    ):
        paths = [str(path) for path in sorted(real.glob(text))]
        argv = ["mono", "--text", *paths, "--lang", name[-2:], "--out", str(tmp_path / "shards" / name)]
        write_shards.main([*argv, *options])
    argv = ["--data", str(tmp_path / "shards"), "--out", str(tmp_path / "t"), "--vocab_size", "16000"]
    tokenizer.main(argv)
    assert "warning" not in capsys.readouterr().out
    inspect.main([str(tmp_path / "shards"), "--tokenizer", str(tmp_path / "t")])
    shares = re.findall(r"([\d.]+)% of the tokens are unknown", capsys.readouterr().out)
    assert len(shares) == 3 and max(map(float, shares)) <= 0.1
