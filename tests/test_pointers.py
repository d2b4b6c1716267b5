"""What a clone without Git LFS, or a download that failed, leaves in the place of a file is named, with the remedy."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from xscale.data.shards import find_sources
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.files import describe_empty_or_placeholder
from xscale.models.build import read_model_and_has_trained_head

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 123456\n"
XML_ERROR = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LFS, "is a pointer of Git LFS instead of the file. Run `git lfs pull`"),
        (b"/annex/objects/SHA256E-s12--4d7a\n", "`git annex get`"),
        (b"\n<!DOCTYPE html><title>404</title>", "is a web page"),
        (b"\xef\xbb\xbf<HTML lang=en>", "is a web page"),
        (XML_ERROR, "has an error message of an object store"),
        (b"Entry not found", "has an error message of the server"),
        (b"", "is empty. Copy or download"),
        (b"version of a text\n", None),
        (b"<?xml version='1.0'?><tmx/>", None),
        (b"1 < 2\n", None),
    ],
)
def test_what_stands_in_the_place_of_a_file(tmp_path, content, said) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    problem = describe_empty_or_placeholder(path)
    assert problem is None if said is None else problem.startswith(f"{path} ") and said in problem


def test_a_pipe_is_not_read(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert describe_empty_or_placeholder(tmp_path / "pipe") is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory, demo) -> Path:
    """A folder with a model, its tokenizer, a text and a source of shards."""
    folder = tmp_path_factory.mktemp("whole")
    config = BertConfig(
        vocab_size=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=16,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder / "model")
    shutil.copytree(demo / "pairs", folder / "shards")
    shutil.copytree(demo / "tokenizer", folder / "tokenizer")
    shutil.copytree(folder / "model", folder / "bin")
    (folder / "bin/model.safetensors").unlink()
    torch.save({}, folder / "bin/pytorch_model.bin")
    (folder / "a.en").write_text("a sentence\n")
    return folder


def open_sources(folder: Path) -> None:
    for source in find_sources([folder]):
        for shard in source.shards:
            source.check_local_file(shard)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.en", lambda folder: list(read_lines(folder / "a.en"))),
        ("a.en.gz", lambda folder: list(read_lines(folder / "a.en.gz"))),
        ("a.en.zst", lambda folder: list(read_lines(folder / "a.en.zst"))),
        ("model/model.safetensors", lambda folder: read_model_and_has_trained_head(folder / "model")),
        ("model/config.json", lambda folder: read_model_and_has_trained_head(folder / "model")),
        ("bin/pytorch_model.bin", lambda folder: read_model_and_has_trained_head(folder / "bin")),
        ("tokenizer/tokenizer.json", lambda folder: Tokenizer(folder / "tokenizer")),
        ("shards/index.json", lambda folder: open_sources(folder / "shards")),
        ("shards/pairs-000000.tar", lambda folder: open_sources(folder / "shards")),
    ],
)
def test_every_reader_names_a_pointer(tmp_path, whole, name: str, read: Callable[[Path], None]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folder / name).write_bytes(LFS)
    with pytest.raises(UserError, match=r"is a pointer of Git LFS instead of the file. Run `git lfs pull`") as error:
        read(folder)
    assert str(folder / name) in str(error.value)


def test_a_vocabulary_is_not_a_pointer(tmp_path) -> None:
    """transformers would read the three lines of a pointer as three tokens."""
    (tmp_path / "vocab.txt").write_bytes(LFS)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="Git LFS"):
        Tokenizer(tmp_path)
