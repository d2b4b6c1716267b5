"""What a user can get wrong with data_tools: an error that names file, line and value, and nothing left behind."""

import errno
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import zstandard
from transformers import PreTrainedTokenizerFast

from data_tools import demo_corpus, index, inspect, lexicon, steps, tokenizer, write_shards
from data_tools.command import run_tool_and_exit
from data_tools.readers import input_files, read_checked_lines
from data_tools.sentences import split_sentences
from xscale.data.shards import Source, find_sources
from xscale.data.stream import select_source_indices
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.files import atomic_write, check_writable_and_make_parent, map_in_threads, write_text

EN = [f"one two three number {i}" for i in range(400)]
DE = [f"eins zwei drei Nummer {i}" for i in range(400)]


@pytest.fixture
def refused() -> Callable[[Callable[[], Any]], str]:
    """refused(work): the UserError's text."""

    def run_refused(work: Callable[[], Any]) -> str:
        with pytest.raises(UserError) as error:
            work()
        return str(error.value)

    return run_refused


def mono(*options: object) -> Callable[[], None]:
    return lambda: write_shards.main(["mono", "--lang", "en", *map(str, options)])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Pairs


# Files

LATIN = "".join(f"{line}\n" for line in EN[:123]).encode() + "Größe\n".encode("latin-1")
XZ = lzma.compress(b"a b\n" * 9)
MORE = lzma.compress(b"c d\n" * 9)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("text", LATIN, "line 124 .*UTF-8"),
        ("text.gz", gzip.compress(LATIN), "line 124 .*UTF-8"),
        ("text.xz", lzma.compress(LATIN), "line 124 .*UTF-8"),
        ("text", b"", "has no text|is empty"),
        ("text", b"\n\n \n", "has no text|is empty"),
        ("text", b"<doc id=1>\n</doc>\n", "has no text|is empty"),
        ("text", b"\x28\xb5\x2f\xfd" + b"\0" * 9, ".zst"),
        ("text", gzip.compress(b"a\n", mtime=0), "compressed as .gz"),
        ("text", "one two\n".encode("utf-16"), "iconv -f"),
        ("text", "one two\n".encode("utf-16-le"), "iconv -f"),
        ("text.gz", b"plain text\n" * 99, "not compressed"),
        ("text.gz", gzip.compress(gzip.compress(LATIN)), "not UTF-8"),
        ("a.gz", bytes(4096), "cannot be decompressed .* copy it again"),
        ("a.xz", bytes(4096), "cannot be decompressed .* copy it again"),
        ("a.zst", bytes(4096), "cannot be decompressed .* copy it again"),
        ("a.zst", zstandard.compress(b"a\n") + bytes(4096), "cannot be decompressed .* copy it again"),
        ("a.xz", XZ + b"\0\1" + MORE[2:], "cannot be decompressed after line"),
        ("a.xz", XZ + MORE[:-9], "cannot be decompressed after line"),
        ("a.xz", XZ + b"garbage", "cannot be decompressed after line"),
    ],
)
def test_text_that_cannot_be_read(tmp_path: Path, refused, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    message = refused(mono("--text", tmp_path / name, "--out", tmp_path / "out", "--shard_lines", 50))
    assert str(tmp_path / name) in message and re.search(words, message)
    assert files(tmp_path) == {name}


# Other formats


def test_tables_of_datasets(tmp_path, write_pairs, refused) -> None:
    """Parquet files and folders of save_to_disk are refused, with the name of the tool that reads them."""
    table = datasets.Dataset.from_dict({"text": EN})
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "a")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "dict")
    (tmp_path / "plain").write_text("\n".join(EN))
    (arrow,) = (tmp_path / "a").glob("*.arrow")
    named = {tmp_path / "a.parquet": "`parquet:`", tmp_path / "a": "`datasets:`", tmp_path / "dict": "`datasets:`"}
    for path in named:
        for tool in (
            mono("--text", path, "--out", tmp_path / "out"),
            lambda path=path: write_pairs(path, tmp_path / "plain", tmp_path / "out"),
            lambda path=path: write_pairs(tmp_path / "plain", path, tmp_path / "out"),
        ):
            message = refused(tool)
            assert message.startswith(str(path)) and "xscale data prepare" in message and "\n" not in message
            assert named[path] in message
    assert refused(mono("--text", arrow, "--out", tmp_path / "out")).startswith(str(arrow))
    assert not list(tmp_path.glob("out*"))


def test_a_folder_with_a_file_of_information_is_no_data_set(tmp_path: Path) -> None:
    for name in ("dataset_info.json", "a.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in input_files([tmp_path])] == ["a.txt", "dataset_info.json"]


def test_real_text_looks_like_no_other_format(plain_texts: list[Path]) -> None:
    for path in plain_texts:
        assert next(read_checked_lines(path))
    assert len(plain_texts) >= 5


# Output


def test_the_output_directory_is_taken(tmp_path: Path, corpus_files, write_pairs, refused) -> None:
    paths, out = corpus_files(EN, DE), tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    before = files(tmp_path)
    tools: list[Callable[[], Any]] = [
        lambda: write_pairs(*paths, out),
        mono("--text", paths[0], "--out", out),
        lambda: demo_corpus.main(["--out", str(out), "--pairs", "5", "--mono", "5"]),
        lambda: tokenizer.main(["--text", str(paths[0]), "--out", str(out)]),
    ]
    for tool in tools:
        assert str(out) in refused(tool)
        assert files(tmp_path) == before and files(out) == {"precious"}


def test_an_empty_output_directory_is_used(tmp_path: Path, corpus_files, write_pairs) -> None:
    (tmp_path / "out").mkdir()
    write_pairs(*corpus_files(EN, DE), tmp_path / "out")
    assert Source(tmp_path / "out").records == 400


def test_what_an_interrupted_run_left_is_cleaned(tmp_path: Path, corpus_files, write_pairs) -> None:
    (tmp_path / "out.incomplete").mkdir()
    (tmp_path / "out.incomplete" / "pairs-000009.tar").write_text("half a tar")
    paths = corpus_files(EN, DE)
    write_pairs(*paths, tmp_path / "out")
    assert Source(tmp_path / "out").records == 400 and "out.incomplete" not in files(tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path: Path, corpus_files, write_pairs, monkeypatch) -> None:
    paths = corpus_files(EN, DE)
    before = files(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tarfile.TarFile.addfile", full)
    with pytest.raises(OSError, match="No space"):
        write_pairs(*paths, tmp_path / "out")
    assert files(tmp_path) == before


# Options


def test_a_filter_that_keeps_nothing(tmp_path: Path, demo: Path, corpus_files, write_pairs) -> None:
    paths = corpus_files(EN, DE)
    before = files(tmp_path)
    options = ("--min_tokens", 900, "--tokenizer", demo / "tokenizer")
    with pytest.raises(UserError, match=r"the rules remove all text in de-en"):
        write_pairs(*paths, tmp_path / "out", *options)
    assert files(tmp_path) == before


def test_index_and_inspect_without_shards(tmp_path: Path) -> None:
    for tool in (index, inspect):
        for path in (tmp_path, tmp_path / "absent"):
            with pytest.raises(UserError, match=str(path)):
                tool.main([str(path)])
    with pytest.raises(UserError, match="--show -1"):
        inspect.main([str(tmp_path), "--show", "-1"])
    assert files(tmp_path) == set()


def test_an_output_of_prepare_is_refused_with_the_folders_in_it(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    for read in (lambda: inspect.main([str(tmp_path)]), lambda: find_sources([tmp_path])):
        with pytest.raises(UserError, match=rf"use its folders of shards: {tmp_path}/shards/\*"):
            read()


# Tokenizers


def save_tokenizer(path: Path, **special: str) -> Path:
    vocabulary = {token: number for number, token in enumerate(["[UNK]", *special.values(), "a", "b"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special).save_pretrained(path)
    return path


ALL_SPECIAL = {"mask_token": "[MASK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


@pytest.mark.parametrize("missing", sorted(ALL_SPECIAL))
def test_a_tokenizer_without_a_special_token(tmp_path: Path, missing: str) -> None:
    Tokenizer(save_tokenizer(tmp_path / "whole", **ALL_SPECIAL))
    special = {name: token for name, token in ALL_SPECIAL.items() if name != missing}
    path = save_tokenizer(tmp_path / "tokenizer", **special)
    with pytest.raises(UserError, match=f"{path} has no {missing.removesuffix('_token')} token"):
        Tokenizer(path)


def test_a_tokenizer_with_gaps_in_its_ids(tmp_path: Path) -> None:
    """Every token is in the vocabulary, and a gap is no token that could be drawn; far ones are a mistake."""
    path = save_tokenizer(tmp_path / "tokenizer", **ALL_SPECIAL)
    text = (path / "tokenizer.json").read_text()
    assert text.count('"b": 6') == 1
    (path / "tokenizer.json").write_text(text.replace('"b": 6', '"b": 8'))
    found = Tokenizer(path)
    assert found.vocab_size == 9 and found.ordinary_ids.tolist() == [5, 8] and found.encode(["a b"]) == [[5, 8]]
    (path / "tokenizer.json").write_text(text.replace('"b": 6', '"b": 80000'))
    with pytest.raises(UserError, match=f"{path} has 7 tokens, but its ids go up to 80,000"):
        Tokenizer(path)


def test_a_tokenizer_whose_template_names_no_token(tmp_path: Path) -> None:
    """Where tokenizers panics, which is no Exception."""
    path = save_tokenizer(tmp_path / "tokenizer", **ALL_SPECIAL)
    whole = json.loads((path / "tokenizer.json").read_text())
    pieces = [{"SpecialToken": {"id": "[NONE]", "type_id": 0}}, *({"Sequence": {"id": s, "type_id": 0}} for s in "AB")]
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces[1:2],
        "pair": pieces,
        "special_tokens": {},
    }
    (path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match=f"{path} cannot .* a pair of sentences"):
        Tokenizer(path)


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    problems = {"absent": "does not exist", "broken": "cannot be loaded", ".": "cannot be loaded"}
    for name, problem in problems.items():
        with pytest.raises(UserError, match=f"tokenizer {tmp_path / name} {problem}"):
            Tokenizer(tmp_path / name)


def test_training_a_tokenizer_on_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="by --data, or files of text by --text"):
        tokenizer.main(["--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match="absent"):
        tokenizer.main(["--text", str(tmp_path / "absent"), "--out", str(tmp_path / "out")])
    assert files(tmp_path) == set()


# Data of a run


def test_languages_without_data(demo: Path) -> None:
    sources = [Source(demo / name) for name in ("mono_en", "mono_xx", "pairs")]
    assert select_source_indices("s", "mono", None, sources) == (0, 1)
    assert select_source_indices("s", "mono", ["xx"], sources) == (1,)
    assert (
        select_source_indices("s", "pair", ["en", "xx"], sources)
        == select_source_indices("s", "pair", ["en-xx"], sources)
        == (2,)
    )
    assert select_source_indices("s", "pair", ["xx-en"], sources) == (2,)
    with pytest.raises(UserError, match=r"streams\.s reads monolingual text in de, but --data has only en "):
        select_source_indices("s", "mono", ["en", "de"], sources)
    with pytest.raises(UserError, match=r"streams\.s reads sentence pairs in en-de"):
        select_source_indices("s", "pair", ["en-de"], sources)
    with pytest.raises(UserError, match=r"streams\.s reads sentence pairs.*en \(mono\)"):
        select_source_indices("s", "pair", None, sources[:2])


def test_a_stream_takes_a_pair_s_sources_of_both_directions(tmp_path: Path) -> None:
    for name, langs in (("forth", ["en", "hi"]), ("back", ["hi", "en"]), ("other", ["de", "en"])):
        lines = [tmp_path / f"{name}.{side}" for side in (0, 1)]
        for path in lines:
            path.write_text("".join(f"{name} {i}\n" for i in range(3)))
        argv = ["pairs", "--src", lines[0], "--tgt", lines[1], "--langs", *langs, "--out", tmp_path / name]
        write_shards.main([str(argument) for argument in argv])
    sources = [Source(tmp_path / name) for name in ("forth", "back", "other")]
    for languages in (["en-hi"], ["hi-en"], ["en", "hi"], ["en-hi", "hi-en"]):
        assert select_source_indices("s", "pair", languages, sources) == (0, 1)
    with pytest.raises(
        UserError, match=r"reads sentence pairs in hi-de, but .* only en-hi .*, en-hi .*, de-en \(pair\)"
    ):
        select_source_indices("s", "pair", ["hi-de", "hi-en"], sources)
    with pytest.raises(UserError, match=r"sentence pairs in hi, .*streams\.s\.languages \(the list \[en, de\] "):
        select_source_indices("s", "pair", ["hi"], sources)


def test_a_tool_s_exit_code(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 and one line on stderr for the user's mistakes; anything else is a fault with a traceback."""

    def fail() -> None:
        raise UserError("the file x is bad")

    with pytest.raises(SystemExit) as stopped:
        run_tool_and_exit(fail)
    assert stopped.value.code == 2 and capsys.readouterr().err == "error: the file x is bad\n"
    with pytest.raises(ZeroDivisionError):
        run_tool_and_exit(lambda: 1 / 0)

    def write_beyond_the_limit() -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), "out/a.jsonl")

    with pytest.raises(SystemExit) as stopped:
        run_tool_and_exit(write_beyond_the_limit)
    assert stopped.value.code == 4 and capsys.readouterr().err.startswith("error: out/a.jsonl: File too large. ")


def test_unreadable_file(tmp_path: Path, refused) -> None:
    unreadable = Path("/proc/self/mem")  # opens, but its first byte cannot be read, not even by root
    assert str(unreadable) in refused(mono("--text", unreadable, "--out", tmp_path / "out"))


def test_a_failed_index_keeps_the_old_one(tmp_path: Path, corpus_files, write_pairs) -> None:
    write_pairs(*corpus_files(EN, DE), tmp_path / "out", "--shard_lines", 200)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "zzz.tar").write_bytes(b"not a tar" * 999)
    with pytest.raises(UserError, match=r"zzz\.tar"):
        index.main([str(tmp_path / "out")])
    (tmp_path / "out" / "zzz.tar").unlink()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert json.loads(before["index.json"])["records"] == 400


# Tars that others wrote


def tar(path: Path, *members: tuple[str, bytes | None]) -> Path:
    """None: a symbolic link."""
    with tarfile.open(path, "w") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = (tarfile.SYMTYPE, 0) if content is None else (tarfile.REGTYPE, len(content))
            file.addfile(info, io.BytesIO(content or b""))
    return path


A, B = [("a.en.txt", b"one"), ("a.cs.txt", b"jeden")], [("b.en.txt", b"two"), ("b.cs.txt", b"dva")]


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([*A, *A, *B], "record 0: two tar members of one sample have the name a.en.txt"),
        ([A[0], *B], "record 1: sample 'b' has texts in en, cs, but earlier samples have texts in en. .* --langs"),
        ([A[0], ("a.cs.txt", None), *B], "record 0: the tar member a.cs.txt is a link or a device"),
        (
            [*A, ("a.links.txt", b"0-0 5-0"), *B],
            "record 0: the word link '5-0' is wrong. .* with i below 1 and j below 1",
        ),
        ([("a.json", b'{"langs": ["en"], "texts": ["x"]}')] * 2, "record 0: two tar members .* a.json"),
        ([("a.jsonl", b"[" * 100_000)], "record 0: the text is not JSON .*recursion"),
        (
            [("a.jsonl", b'{"key": "a", "langs": ["en", "en"], "texts": ["x", "y"]}')],
            "record 0: .* two different languages",
        ),
        (
            [("a.jsonl", b'{"key": null, "langs": ["en"], "texts": ["x"]}')],
            "record 0: record None: .* `key` must be a string",
        ),
        (
            [("a.jsonl", b'{"key": "a", "langs": [1], "texts": ["x"]}')],
            "record 0: .* in `langs` or `texts`. Each item of both lists must be a string",
        ),
        (
            [("a.jsonl", b'{"key": "a", "langs": ["e\\u001b[1m"], "texts": ["x"]}')],
            "record 0: .* must be names of languages",
        ),
        ([("0.jsonl", b'{"key": "a\\ud800", "langs": ["en"], "texts": ["x"]}\n')], ".*an unpaired surrogate"),
        ([("0.jsonl", b'{"key": "a", "langs": ["en"], "texts": ["x"], "texts": ["y"]}\n')], ".*occurs twice"),
        ([("0.json", b'{"langs": ["en"], "texts": ["x"], "texts": ["y"]}')], ".*occurs twice"),
        ([("0.de.txt", b"x"), ("0.EN.TXT", b"y")], r".*0\.EN\.TXT.*lower case"),
        ([("0.JSON", b"{}"), ("0.de.txt", b"x")], r".*0\.JSON.*lower case"),
        ([("0.e\x1b[31mn.txt", b"x")], ".*must be names of languages"),
        ([("0.json", b"[1]")], ".*record.*object"),
        ([("0.json", b"{")], ".*record.*JSON"),
        ([("0.json", b'{"langs": "en", "texts": "ab"}')], ".*record.*lists"),
        ([("0.json", b'{"langs": ["en"], "texts": ["a", "b"]}')], ".*record.*langs is 1, and that of texts 2"),
        ([("0.json", b'{"langs": ["en"], "texts": [" "]}')], ".*record.*not blank"),
        ([("0.json", b'{"langs": ["en", "de"], "texts": ["a", "b"], "links": [[0, 0]]}')], ".*record.*links"),
        ([("0.en.txt", b"\xff")], ".*record.*utf-8"),
        ([("0.jpg", b"x")], ".*record.*0'"),
        ([("0.jsonl", b'{"key": "a", "langs": ["en"], "texts": ["x"]}\n{"key')], ".*record.*not JSON"),
        ([("0.jsonl", b'{"key": "a", "langs": ["en"], "texts": ["x"]}\n\xff')], ".*record.*UTF-8"),
        ([("0.jsonl", b'{"text": "x"}')], ".*record.*key"),
        ([("0.jsonl", b'{"key": "a", "langs": ["en"], "texts": ["a \\ud800"]}\n')], "record 0: .*surrogate"),
    ],
)
def test_a_foreign_tar_that_would_lose_something(tmp_path: Path, members: list, problem: str) -> None:
    path = tar(tmp_path / "x.tar", *members)
    with pytest.raises(UserError, match=f"{path}: {problem}") as refusal:
        index.main([str(tmp_path)])
    assert str(refusal.value).isprintable() and files(tmp_path) == {"x.tar"}


def test_a_pipe_is_no_tar(tmp_path: Path) -> None:
    """A read of the pipe would never end."""
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(UserError, match=r"x\.tar is a named pipe instead of a file. Remove"):
        index.main([str(tmp_path)])
    assert files(tmp_path) == {"x.tar"}


def test_some_languages_of_many_are_the_user_s_choice(tmp_path: Path) -> None:
    tar(tmp_path / "x.tar", *A, ("a.de.txt", b"eins"), B[1], ("b.de.txt", b"zwei"), B[0])
    index.main([str(tmp_path), "--langs", "de", "cs"])
    source = Source(tmp_path)
    assert [source.read(0, n).texts for n in (0, 1)] == [("eins", "jeden"), ("zwei", "dva")]


@pytest.mark.parametrize("field", ["langs", "layout", "shards", "records", "bytes", "made_by"])
def test_an_index_with_a_field_of_another_type(tmp_path: Path, field: str) -> None:
    tar(tmp_path / "x.tar", *A)
    index.main([str(tmp_path)])
    whole = json.loads((tmp_path / "index.json").read_text())
    for value in (None, "x", [1], {"a": 1}, 10**30, True):
        (tmp_path / "index.json").write_text(json.dumps(whole | {field: value}))
        if field in ("bytes", "made_by") and type(value) is type(whole[field]):
            continue
        with pytest.raises(UserError, match=r"index\.json is not an index"):
            Source(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps(whole | {"version": "1"}))
    with pytest.raises(UserError, match="version '1', and this version of xscale reads only format version 2"):
        Source(tmp_path)


@pytest.mark.parametrize("content", [XZ + MORE, XZ + bytes(8) + MORE + bytes(4)])
def test_an_xz_file_is_read_to_its_end(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text.xz").write_bytes(content)
    mono("--text", tmp_path / "text.xz", "--documents", "lines", "--out", tmp_path / "out")()
    assert Source(tmp_path / "out").records == 18


def test_names_that_would_write_elsewhere(tmp_path: Path, refused) -> None:
    (tmp_path / "text").write_text("one\n")
    (tmp_path / "plain").write_text("")
    for words, named in (
        (["--out", tmp_path / "out", "--name", "../../evil"], "name: '../../evil'"),
        (["--out", tmp_path / "out", "--lang", "../x"], "'../x' is not the name of a language"),
        (["--out", tmp_path / "plain"], "plain exists and is not an empty folder"),
        (["--out", tmp_path / "out", "--text", tmp_path / "text", tmp_path / "text"], "text is listed twice"),
    ):
        assert named in refused(mono("--text", tmp_path / "text", *words))
    assert files(tmp_path) == {"text", "plain"}


def test_an_output_within_the_text_is_refused(tmp_path: Path, refused) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "one").write_text("one\n")
    message = refused(mono("--text", text, "--out", text / "sub" / "out"))
    assert f"out is inside {text}, a folder of text. Choose a folder outside {text}" in message
    assert files(tmp_path) == {"text"}
    assert files(text) == {"one"}


def test_a_refusal_of_the_machine_s_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "text").write_text("one\n")
    words = ["mono", "--text", str(tmp_path / "text"), "--lang", "en", "--out", str(tmp_path / "text" / "out")]
    with pytest.raises(SystemExit) as stopped:
        run_tool_and_exit(lambda: write_shards.main(words))
    assert stopped.value.code == 4
    line = f"error: {tmp_path / 'text' / 'out.incomplete'}: Not a directory. Remove the cause of the error, "
    assert capsys.readouterr().err == line + "then start the command again\n"


def test_a_mask_token_that_is_another_s(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "tokenizer", **ALL_SPECIAL | {"mask_token": "[PAD]"})
    with pytest.raises(UserError, match=f"{path} uses the same token '.PAD.' for mask and pad"):
        Tokenizer(path)


# What a second trial found


def test_byte_order_marks_and_line_ends_are_no_text(tmp_path: Path) -> None:
    tar(tmp_path / "x.tar", ("0.en.txt", b"\xef\xbb\xbfone\r\n"), ("0.de.txt", b"eins"))
    index.main([str(tmp_path)])
    assert Source(tmp_path).read(0, 0).texts == ("one", "eins")


def test_splitting_takes_time_in_proportion_to_the_line() -> None:
    began = time.process_time()
    for text in ("A. ", "Dr. ", "He came. ", "。", 'He said "A." '):
        line = text * 40_000
        sentences = split_sentences(line, "en")
        assert "".join("".join(sentences).split()) == "".join(line.split())
    assert time.process_time() - began < 10


def test_what_is_no_file_is_not_replaced(tmp_path: Path, corpus_files, write_pairs, refused) -> None:
    """A pipe, and a link to a folder or to nothing: refused before the work."""
    paths = corpus_files(EN, DE)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    (tmp_path / "en-de.txt").write_text("a b\n")
    before = files(tmp_path)
    for name, named in (("pipe", "pipe"), ("link", str(tmp_path / "real")), ("dangling", str(tmp_path / "absent"))):
        assert named in refused(lambda name=name: write_pairs(*paths, tmp_path / name))
        for write in (lambda path: write_text(path, "x"), check_writable_and_make_parent):
            with pytest.raises(UserError, match=named):
                write(tmp_path / name)
    assert files(tmp_path) == before and not files(tmp_path / "real")


def test_two_writers_of_one_place(tmp_path: Path, corpus_files, write_pairs) -> None:
    """The second is refused at once, and the first's shards are whole."""
    paths = corpus_files(EN, DE)
    refusals = []
    select = steps.STEPS["select"]

    def second(folder: Path, number: int) -> None:
        with pytest.raises(UserError, match="another process is writing to") as refusal:
            write_pairs(*paths, tmp_path / "out")
        refusals.append(refusal)
        select.function(folder, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(steps.STEPS, "select", select._replace(function=second))
        write_pairs(*paths, tmp_path / "out", "--shard_lines", 50)
    assert refusals and Source(tmp_path / "out").records == 400
    map_in_threads((whole := Source(tmp_path / "out")).check_local_file, whole.shards)


def test_names_that_say_compressed(tmp_path: Path, demo: Path, refused) -> None:
    (tmp_path / "en-de.txt").write_text("a b\n")
    out = tmp_path / "new" / "en-de.txt.gz"
    words = ["--dict", str(tmp_path / "en-de.txt"), "--out", str(out)]
    assert f"{out}: xscale writes this file without compression" in refused(lambda: lexicon.main(words))
    words = [str(demo / "pairs"), "--json", str(tmp_path / "a.json.xz")]
    assert "a.json.xz: xscale writes this file without compression" in refused(lambda: inspect.main(words))


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_a_tokenizer_of_nothing(tmp_path: Path, refused, kind: str) -> None:
    (tmp_path / "text").write_text("\n \n\u200b\n", encoding="utf-8")
    words = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "t"), "--type", kind, "--vocab_size", "300"]
    assert f"{tmp_path / 'text'}: the files have no text" in refused(lambda: tokenizer.main(words))
    assert files(tmp_path) == {"text"}


def test_a_vocabulary_that_is_too_small(tmp_path: Path, refused) -> None:
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in EN + DE))
    words = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "t"), "--type", "unigram", "--vocab_size", "9"]
    message = refused(lambda: tokenizer.main(words))
    assert "larger vocab_size" in message and "\n" not in message
    assert files(tmp_path) == {"text"}


def test_a_full_disk_of_a_library_in_rust(tmp_path: Path) -> None:
    """tokenizers and safetensors raise an Exception of their own."""
    with pytest.raises(OSError) as raised, atomic_write(tmp_path / "t"):
        raise Exception("No space left on device (os error 28)")
    assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(tmp_path / "t")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--text", "a", "--out", ""], "--out is empty"),
        (["--out="], "--out= is empty"),
        (["--text", "gr\udcf6\udcdfe"], r"gr\udcf6\udcdfe"),
    ],
)
def test_arguments_that_name_nothing(words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["tool", *words])
    with pytest.raises(SystemExit) as stopped:
        run_tool_and_exit(lambda: pytest.fail("it went on"))
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_a_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    path = tmp_path / "text" / "gr\udcf6\udcdfe"
    path.write_text("one\n")
    mono("--text", path.parent, "--out", tmp_path / "out")()
    assert Source(tmp_path / "out").read(0, 0).texts == ("one",)
