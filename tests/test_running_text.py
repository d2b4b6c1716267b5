"""Running text from files to sequences, on corpora whose every word is another: a token tells its place."""

import itertools
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_tools import index, inspect, readers, write_shards
from tests.plain import originals
from tests.streams import make_dataset, make_mixture
from xscale.data.calibrate import fit_tokens_to_bytes
from xscale.data.calibration import Calibration
from xscale.data.shards import PIECE_BYTES, Source
from xscale.data.stream import Stream
from xscale.data.stream_batch import CollateContext
from xscale.data.text import stripped_piece_of_text
from xscale.data.tokenizer import Tokenizer
from xscale.objectives import mlm

LENGTH, SPECIAL = 64, 4
Documents = list[list[list[int]]]
"""Numbers of the words of each sentence of each document: 0, 1, 2, ... over the corpus."""


def word(number: int) -> str:
    letters = "abcdefghij"
    return "w" + "".join(letters[int(digit)] for digit in str(number))


def corpus(seed: int = 0, count: int = 30, longest: int = 30) -> Documents:
    """Documents of 1 to 40 sentences of 1 to `longest` words; one of a single sentence of 2,600 words."""
    draw, number = np.random.default_rng(seed), itertools.count()
    made = [
        [[next(number) for _ in range(draw.integers(1, longest))] for _ in range(draw.integers(1, 41))]
        for _ in range(count)
    ]
    made.insert(count // 2, [[next(number) for _ in range(2600)]])
    renumber = dict(zip((w for d in made for s in d for w in s), itertools.count(), strict=False))
    return [[[renumber[w] for w in sentence] for sentence in document] for document in made]


def sentences(document: list[list[int]]) -> list[str]:
    return [" ".join(map(word, sentence)) for sentence in document]


def as_markup(corpus: Documents) -> Iterable[str]:
    for number, document in enumerate(corpus):
        yield from (
            f'<doc id="{number}" url="x" title="y">',
            *"\n\n".join(sentences(document)).split("\n"),
            "</doc>",
            "",
        )


def as_blocks(corpus: Documents) -> Iterable[str]:
    for document in corpus:
        yield from ("", *sentences(document), " ")


def write(folder: Path, lines: Iterable[str], *options: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "text").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    arguments = ["mono", "--text", folder / "text", "--lang", "en", "--out", folder / "out", "--whole_lines", *options]
    write_shards.main([str(argument) for argument in arguments])
    return folder / "out"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Word number n is token SPECIAL + n."""
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *map(word, range(40_000))]
    backend = Backend(models.WordLevel({text: number for number, text in enumerate(vocabulary)}, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    path = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(path)
    return Tokenizer(path)


def indexed(source: Source) -> Documents:
    """What the index says: the numbers of each record's words, by document."""
    found: Documents = []
    for shard, count in enumerate(source.counts):
        for record, follows in zip(
            range(count), source.byte_lengths_and_continuations(shard, slice(None))[1].tolist(), strict=True
        ):
            numbers = [
                int("".join(str("abcdefghij".index(c)) for c in w[1:]))
                for w in source.read(shard, record).texts[0].split()
            ]
            found[-1].append(numbers) if follows else found.append([numbers])
    return found


def flat(corpus: Documents) -> list[list[int]]:
    return [[number for sentence in document for number in sentence] for document in corpus]


class Run:
    """Steps of a stream of MLM, of one sample and row each."""

    def __init__(self, source: Source, tokenizer: Tokenizer):
        self.stream = Stream("mlm", mlm.OBJECTIVE, mlm.MaskedOptions(), (0,), 1)
        self.dataset = make_dataset([source], [self.stream], CollateContext(tokenizer, LENGTH, "drop", {"en": 0}))
        found = Calibration([fit_tokens_to_bytes(source, tokenizer)], {})
        places: Any = {"seed": 0, "max_length": LENGTH, "max_tokens": 1 << 30, "rank": 0, "world": 1}
        self.mixture = make_mixture([self.stream], [source], found, **places)

    def epoch(self) -> list[list[int]]:
        """The sequences of a source's first epoch, by steps of one sample: none spans two epochs."""
        found: list[list[int]] = []
        while self.mixture.state["positions"]["mlm"][0][0] == 0:
            plan = self.mixture.next_plan_of_rank()
            examples = self.dataset.read_and_tokenise(self.stream, plan)
            for stream_batch in self.dataset.collate_rows(self.stream, plan, examples):
                found += originals(stream_batch)
        return found


def word_ranges(run: Run) -> list[range]:
    """Return the words of each sequence of an epoch."""
    found = []
    for ids in run.epoch():
        assert len(ids) <= LENGTH and (ids[0], ids[-1]) == (1, 2)
        numbers = [token - SPECIAL for token in ids[1:-1]]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "not running text"
        found.append(range(numbers[0], numbers[-1] + 1))
    return found


# 1. Files


@pytest.mark.parametrize(("lines", "form"), [(as_markup, "doc"), (as_blocks, "blank")])
def test_documents_of_every_form(tmp_path: Path, lines, form: str) -> None:
    made = corpus()
    texts = list(lines(made))
    assert readers.guess_text_form([text.strip() for text in texts[: readers.HEAD_LINES]]) == form
    for options in ((), ("--documents", form), ("--shard_lines", 10)):
        source = Source(write(tmp_path / str(options), texts, *options))
        found = indexed(source)
        assert flat(found) == flat(made) and source.index["documents"] == len(made) == 31
        assert [s for document in made for s in document if len(s) < 50] == [
            s for document in found for s in document if sum(map(len, document)) != 2600
        ]
    assert len(source.shards) > 1


def test_lines_are_documents_of_their_own(tmp_path: Path) -> None:
    """Where nothing else is seen, or where it is said; a blank line now and then makes no documents."""
    made = corpus(longest=9)
    lines = [text for document in made for text in sentences(document)]
    for every in (None, 120):
        spaced = [t for n, text in enumerate(lines) for t in ([text, ""] if every and n % every == 0 else [text])]
        source = Source(write(tmp_path / str(every), spaced))
        assert flat(indexed(source)) == [sentence for document in made for sentence in document]
    blocks = Source(write(tmp_path / "said", as_blocks(made), "--documents", "lines"))
    assert len(indexed(blocks)) == len(lines)
    text = "".join(tar_text(tar) for tar in sorted(source.directory.glob("*.tar")))
    assert '"doc"' not in text, "a sentence alone needs no name of its document"


def tar_text(path: Path) -> str:
    with tarfile.open(path) as tar:
        return "".join(tar.extractfile(member).read().decode() for member in tar)


def test_sentences_of_a_line_are_a_document(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("One here. Two here.\nThree.\nFour is it. Five is it. Six!\n")
    write_shards.main(["mono", "--text", str(tmp_path / "t"), "--lang", "en", "--out", str(tmp_path / "out")])
    source = Source(tmp_path / "out")
    assert source.byte_lengths_and_continuations(0, slice(None))[1].tolist() == [False, True, False, False, True, True]
    assert [source.read(0, n).key for n in range(3)] == ["t.en-000000001.0", "t.en-000000001.1", "t.en-000000002.0"]


def test_a_file_s_end_is_a_document_s_end(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name} one\n{name} two\n\n{name} three\n")
    arguments = ["mono", "--text", str(tmp_path / "a"), str(tmp_path / "b"), "--lang", "en"]
    write_shards.main([*arguments, "--out", str(tmp_path / "out")])
    source = Source(tmp_path / "out")
    assert source.byte_lengths_and_continuations(0, slice(None))[1].tolist() == [False, True, False] * 2


def test_filters_leave_neighbours_neighbours(tmp_path: Path, words: Tokenizer) -> None:
    made, tokenizer = corpus(), words.hf.name_or_path
    source = Source(write(tmp_path / "x", as_blocks(made), "--min_tokens", 5, "--tokenizer", tokenizer))
    expected = [[s for s in document if len(s) >= 5] for document in made]
    assert flat(indexed(source)) == flat([document for document in expected if document])


def test_inspect_tells_documents(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made = corpus()[:15]
    out = write(tmp_path / "x", as_blocks(made))
    inspect.main([str(out), "--verify"])
    sizes = list(map(len, made))
    told = capsys.readouterr().out
    assert f"{sum(sizes)} mono records (en) of 15 documents, shards: 1" in told
    assert f"sentences per document: mean {np.mean(sizes):.1f}" in told


# 2. Tars


def test_a_foreign_tar_s_texts_are_documents(tmp_path: Path, words: Tokenizer) -> None:
    """KEY.txt of whole documents, and KEY.json whose doc says what belongs together."""
    made = corpus()
    (tmp_path / "txt").mkdir()
    with webdataset.TarWriter(str(tmp_path / "txt" / "x.tar")) as writer:
        for number, document in enumerate(made):
            writer.write({"__key__": f"{number:04d}", "txt": "\n".join(sentences(document))})
    index.main([str(tmp_path / "txt"), "--langs", "en"])
    (tmp_path / "json").mkdir()
    with webdataset.TarWriter(str(tmp_path / "json" / "x.tar")) as writer:
        for number, document in enumerate(made):
            for part, text in enumerate(sentences(document)):
                fields = {"langs": ["en"], "texts": [text], "doc": f"d{number}"}
                writer.write({"__key__": f"{number:04d}-{part}", "json": fields})
    index.main([str(tmp_path / "json")])
    for name in ("txt", "json"):
        source = Source(tmp_path / name)
        assert flat(indexed(source)) == flat(made)
        assert sorted(itertools.chain(*word_ranges(Run(source, words)))) == list(range(sum(map(len, flat(made)))))
        longest = max(len(source.read(0, n).texts[0]) for n in range(source.records))
        assert (
            longest <= 1.6 * PIECE_BYTES
            and len({source.read(0, n).key for n in range(source.records)}) == source.records
        )


@pytest.mark.parametrize(
    "text", ["a b " * 4000, "ab" * 3000, "日本語。" * 900, "e\u0301" * 3000, "x" + " " * 5000 + "y"]
)
def test_stretches_are_the_text(text: str) -> None:
    for of in (1, 2, 7, 30):
        found = [stripped_piece_of_text(text, number, of) for number in range(of)]
        assert "".join("".join(found).split()) == "".join(text.split())
        assert max(map(len, found)) <= 1.6 * len(text) / of + 1
        assert not any(part.startswith("\u0301") for part in found), "a mark without its letter"
        if "a b" in text:
            assert [w for part in found for w in part.split()] == text.split()


# 3. Sequences


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Documents]:
    made = corpus(seed=1, count=40)
    return Source(write(tmp_path_factory.mktemp("running"), as_markup(made), "--shard_lines", 60)), made


def test_an_epoch_is_every_token_once(shards, words: Tokenizer) -> None:
    """Each sequence is consecutive words of one document; and whole sentences but of those that fit no sequence."""
    source, made = shards
    total = sum(map(len, flat(made)))
    found = sorted(word_ranges(Run(source, words)), key=lambda sequence: sequence.start)
    assert [number for sequence in found for number in sequence] == list(range(total))
    borders = np.cumsum([0, *map(len, flat(made))])
    first, last = (
        np.array([number for number in numbers]) for numbers in ([s[0] for s in found], [s[-1] for s in found])
    )
    of_first, of_last = (np.searchsorted(borders, numbers, side="right") for numbers in (first, last))
    assert (of_first == of_last).all(), "two documents in a sequence"
    starts = {sentence[0] for document in made for sentence in document}
    long = {number for document in made for s in document if len(s) > LENGTH - 2 for number in s}
    assert all(number in starts or number in long for number in first.tolist())
    in_document = sum(len(document) - 1 for document in made)
    inside = sum(number in starts for s in found for number in s[1:])
    assert inside > 0.5 * in_document, "sentences stand alone"
    lengths = np.array(list(map(len, found)))
    assert lengths.mean() > 0.55 * LENGTH and len([s for s in found if s[0] in long]) >= 2600 // (LENGTH - 2)


def test_long_sentences_are_cut_between_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """By a real tokenizer, of whose words each has many tokens; no sequence begins within one."""
    draw = np.random.default_rng(0)
    text = " ".join("".join(draw.choice(list("abcdefgh"), 9)) for _ in range(2600))
    source = Source(write(tmp_path / "x", [text]))
    found = Run(source, tokenizer).epoch()
    stream_batches = [tokenizer.hf.convert_ids_to_tokens(ids[1:-1]) for ids in found]
    assert len(found) > 100 and not any(tokens[0].startswith("##") for tokens in stream_batches)
    assert Counter(t for tokens in stream_batches for t in tokens) == Counter(tokenizer.hf.tokenize(text))


# 4. Real text


@pytest.mark.parametrize("language", ["en", "de", "zh"])
def test_wikipedia(tmp_path: Path, real: Path, language: str) -> None:
    """Documents as `<doc>` says, by a regular expression; sentences of a document in order, none in two."""
    path = real / "mono" / f"wiki_{language}" / "wiki_00.txt.xz"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        text = file.read(300_000).rpartition("<doc ")[0]
    (tmp_path / "text").write_text(text, encoding="utf-8")
    expected = re.findall(r"<doc [^\n]*>\n(.*?)\n?</doc>", text, flags=re.DOTALL)
    words = f"mono --text {tmp_path}/text --lang {language} --out {tmp_path}/out --shard_lines {len(expected) // 2}"
    write_shards.main(words.split())
    source = Source(tmp_path / "out")
    found: list[list[str]] = []
    for shard, count in enumerate(source.counts):
        for record, follows in zip(
            range(count), source.byte_lengths_and_continuations(shard, slice(None))[1].tolist(), strict=True
        ):
            found.append([]) if not follows else None
            found[-1].append(source.read(shard, record).texts[0])
    assert len(source.shards) > 1 and len(expected) > 5
    assert ["".join("".join(d).split()) for d in found] == ["".join(d.split()) for d in expected if d.strip()]
