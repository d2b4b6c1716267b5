"""Neighbours, plain lines and word alignment: against loops by hand, and transformers alone."""

import gzip
import json
import re
import shlex
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig

from tests.conftest import tar_lines
from tests.rows import one_thread  # noqa: F401
from tests.test_readme import commands
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval import aer, retrieval, run
from xscale.eval.model import ExportedModel

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
Command = Callable[..., tuple[int, dict[str, Any]]]


def random_model(path: Path, tokenizer: Tokenizer, positions: int = 20, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = BertConfig(
        **SHAPE, vocab_size=tokenizer.vocab_size, max_position_embeddings=positions, initializer_range=0.3
    )
    AutoModelForMaskedLM.from_config(config).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "hf", tokenizer)


@pytest.fixture(scope="module")
def model(hf: Path) -> ExportedModel:
    return ExportedModel(hf)


@pytest.fixture
def command(hf: Path, tmp_path: Path) -> Command:
    """command("--task", ...): exit code and the JSON file."""

    def command(*arguments: object) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "scores.json"
        code = run.main([str(word) for word in ("--model", hf, "--out", out, *arguments)])
        return code, json.loads(out.read_text()) if out.is_file() else {}

    return command


# Neighbours


def test_nearest_is_a_sort_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk at a time; of whole numbers, whose products are exact and many of them equal: the only neighbour is the
    first of equal ones."""
    draw = np.random.default_rng(0)
    x, y = (torch.from_numpy(draw.integers(-3, 4, (rows, 6))).float() for rows in (301, 230))
    cells = x @ y.T
    for chunk, k in product((7, 4096), (1, 4, 999)):
        monkeypatch.setattr(retrieval, "CHUNK", chunk)
        scores, rows = retrieval.topk_dot_products(x, y, k)
        assert torch.equal(scores, cells.sort(dim=1, descending=True).values[:, :k])
        assert torch.equal(cells.gather(1, rows), scores) and all(len(set(row)) == len(row) for row in rows.tolist())
        if k == 1:
            assert torch.equal(rows[:, 0], cells.argmax(1))


def test_plain_lines_are_read_as_shards_are(
    command: Command, demo: Path, tmp_path: Path, write_pairs: Callable[..., None], capsys: Any
) -> None:
    """Files of FLORES, NTREX and Tatoeba; pairs with English alone; a language is known under every spelling; files
    that differ in their lines are named."""
    lines = {"eng_Latn": sentences(demo, 0)[:40], "deu_Latn": sentences(demo, 1)[:40]}
    lines["fra_Latn"] = lines["deu_Latn"][::-1]
    (tmp_path / "flores").mkdir()
    for language, texts in lines.items():
        (tmp_path / "flores" / f"{language}.devtest").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "none").mkdir()
    task = ("--task", "retrieval", "--texts", tmp_path / "flores", tmp_path / "none")
    code, found = command(*task)
    assert code == 0 and list(found["results"]["retrieval"]) == ["deu_Latn-eng_Latn", "eng_Latn-fra_Latn"]
    files = [tmp_path / "flores" / f"{language}.devtest" for language in ("eng_Latn", "deu_Latn")]
    write_pairs(*files, tmp_path / "shards", "--langs", "en", "de")
    shards = command("--task", "retrieval", "--data", tmp_path / "shards")[1]["results"]["retrieval"]["de-en"]
    plain = found["results"]["retrieval"]["deu_Latn-eng_Latn"]
    assert (plain["accuracy"], plain["sentences"]) == (shards["accuracy"], 40)
    assert command(*task, "--limit", 7)[1]["results"]["retrieval"]["deu_Latn-eng_Latn"]["sentences"] == 7
    (tmp_path / "flores" / "deu_Latn.devtest").write_text("one line\n")
    assert command(*task)[0] == 2 and f"is 1 in {files[1]} and 40 in {files[0]}" in capsys.readouterr().err
    for path in (tmp_path / "flores").iterdir():
        path.with_suffix(".gz").write_bytes(gzip.compress(b""))
        path.unlink()
    assert command(*task)[0] == 2 and "eng_Latn.gz; line n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["eng_Latn.devtest", "deu_Latn.devtest"], {"*.devtest": ["deu_Latn", "eng_Latn"]}),
        (["newstest2019-src.eng.txt", "newstest2019-ref.deu.txt"], {"newstest2019.*.txt": ["deu", "eng"]}),
        (["tatoeba.deu-eng.deu.xz", "tatoeba.deu-eng.eng.xz"], {"tatoeba.deu-eng.*": ["deu", "eng"]}),
        (["en.txt", "shn.txt", "README.md", "tsv.txt"], {"*.txt": ["en", "shn"]}),
        (["en.txt", "notes.txt"], {}),
    ],
)
def test_names_of_parallel_files(tmp_path: Path, names: list[str], found: dict[str, list[str]]) -> None:
    for name in names:
        (tmp_path / name).touch()
    read = run.find_parallel_files(tmp_path)
    assert {Path(name).name: sorted(files) for name, files in read.items()} == found


def test_files_that_retrieval_does_not_read_are_listed(
    command: Command, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Repeated, empty and long sentences are read. The model has 20 positions."""
    texts = {"en.txt": ["a", "b", "a", "", "a b " * 20], "de.txt": list("vwxyz"), "fr.txt": list("vvxyz")}
    for name, lines in (texts | {"EN.txt": ["a"], "german.txt": ["a"]}).items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "folder").mkdir()
    assert command("--task", "retrieval", "--texts", tmp_path / "folder")[0] == 2
    assert "there is no parallel text" in capsys.readouterr().err
    assert command("--task", "retrieval", "--texts", tmp_path)[0] == 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert ": EN.txt, german.txt. A file is read if" in message


def sentences(demo: Path, side: int) -> list[str]:
    tars = sorted((demo / "heldout").rglob("*.tar"))
    return list(dict.fromkeys(json.loads(line)["texts"][side] for tar in tars for line in tar_lines(tar)))


# Word alignment


def test_error_rates_by_hand() -> None:
    """Two pairs: |A| = 5, |S| = 4, |A & S| = 3, |A & P| = 4."""
    sure = [{(0, 0), (1, 1)}, {(0, 1), (2, 2)}]
    possible = [{(0, 0), (1, 1), (1, 2)}, {(0, 1), (2, 2)}]
    gold = [aer.LinkedPair(([], []), *links) for links in zip(sure, possible, strict=True)]
    found = aer.aer_precision_recall_f1([{(0, 0), (1, 2), (5, 5)}, {(0, 1), (2, 2)}], gold)
    assert found == pytest.approx({"AER": 1 - 7 / 9, "precision": 4 / 5, "recall": 3 / 4, "F1": 1.2 / 1.55})
    assert aer.aer_precision_recall_f1(sure, gold)["AER"] == 0
    assert aer.aer_precision_recall_f1([set(), set()], gold)["AER"] == 1


def linked_by_hand(x: list[np.ndarray], y: list[np.ndarray]) -> set[tuple[int, int]]:
    score = [[float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in y] for a in x]
    return {
        (i, j)
        for i, j in product(range(len(x)), range(len(y)))
        if score[i][j] == max(score[i]) and score[i][j] == max(row[j] for row in score)
    }


def hidden_states(path: Path, words: list[str]) -> tuple[list[list[np.ndarray]], list[int], bool]:
    """By transformers alone: layer, token -> state; each token's word; whether words are cut off."""
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt", truncation=True, max_length=20)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    whole = len(tokenizer(words, is_split_into_words=True)["input_ids"])
    return [[*state[0, 1:-1].double().numpy()] for state in states], inputs.word_ids()[1:-1], whole > 20


def test_word_alignment_is_that_of_transformers_states(command: Command, hf: Path, demo: Path, tmp_path: Path) -> None:
    """Every layer, on sentences that are cut too, in both formats; WPT's count from 1, and have possible
    links."""
    both = list(zip(sentences(demo, 0)[:240], sentences(demo, 1)[:240], strict=True))
    pairs = sorted(both, key=lambda pair: len(pair[0]), reverse=True)[::20]
    words = [(first.split(), second.split()) for first, second in pairs]
    links = [[(i, i, "p" if i % 3 else "-") for i in range(min(map(len, pair)))] for pair in words]
    table, text, gold = tmp_path / "gold.tsv", tmp_path / "src-tgt", tmp_path / "gold"
    lines = [" ".join(f"{i}{kind}{j}" for i, j, kind in of) for of in links]
    table.write_text("".join(f"{a}\t{b}\t{line}\n" for (a, b), line in zip(pairs, lines, strict=True)))
    text.write_text("".join(f"{a} ||| {b}\n" for a, b in pairs))
    gold.write_text("".join(" ".join(f"{i + 1}{k}{j + 1}" for i, j, k in of) + "\n" for of in links))
    twice = ("--aer", "xx-en", table, "--aer", "xx-en", table)  # one row
    code, found = command("--task", "aer", *twice, "--aer", "fr-en", text, gold)
    rows = found["results"]["aer"]
    assert code == 0 and len(rows) == 6
    sides = [[hidden_states(hf, pair[side]) for pair in words] for side in (0, 1)]
    for layer in range(3):
        a = s = right = right_sure = 0
        for (x, x_words, _), (y, y_words, _), of in zip(*sides, links, strict=True):
            found_links = {(x_words[i], y_words[j]) for i, j in linked_by_hand(x[layer], y[layer])}
            sure = {(i, j) for i, j, kind in of if kind == "-"}
            a, s = a + len(found_links), s + len(sure)
            right += len(found_links & {(i, j) for i, j, _ in of})
            right_sure += len(found_links & sure)
        row = rows[f"en-xx argmax layer {layer}"]
        assert row == rows[f"en-fr argmax layer {layer}"] and row["sentences"] == 12
        assert row["AER"] == pytest.approx(1 - (right + right_sure) / (a + s)) and row["recall"] == right_sure / s
        assert row["cut"] == sum(first[2] or second[2] for first, second in zip(*sides, strict=True)) > 0
    _, last = command("--task", "aer", "--aer", "xx-en", table, "--layer", "-1", "-1")
    assert last["results"]["aer"]["en-xx argmax layer -1"] == rows["en-xx argmax layer 2"], "named as it is asked for"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:5]))
    _, of_five = command("--task", "aer", "--aer", "xx-en", table)
    _, limited = command("--task", "aer", "--aer", "xx-en", text, gold, "--limit", 5)
    assert limited["results"] == of_five["results"] != found["results"]


@pytest.mark.parametrize(
    ("text", "gold", "said"),
    [
        ("a b\tc d\t0-0 1-2\n", None, "line 1.*1-2.*counted from 0"),
        ("a b\tc d\t0-0\na b\tc d\t0-0 1x1\n", None, "line 2.*'1x1'.*ipj"),
        ("a b\tc d\n", None, "line 1.* the form `sentence<TAB>sentence<TAB>links` "),
        ("a b ||| c d\n", "1-1\n2-2\n", "gold and 1 in"),
        ("a b ||| c d\na ||| c\n", "1-1\n1-2\n", "line 2.*1-2"),
        ("a b\tc d\t\n", None, "has no sure link"),
        ("a b ||| c d\n", "1p1\n", "gold has no sure link"),
        ("a b | c d\n", "1-1\n", r"line 1: 'a b \| c d' .* the form `sentence \|\|\| sentence`. "),
    ],
)
def test_malformed_gold(tmp_path: Path, text: str, gold: str | None, said: str) -> None:
    paths = [tmp_path / "text", tmp_path / "gold"][: 1 if gold is None else 2]
    for path, content in zip(paths, (text, gold), strict=False):
        path.write_text(content or "")
    with pytest.raises(UserError, match=said) as error:
        aer.read_linked_pairs(*paths)
    assert str(tmp_path) in str(error.value)


def test_words_are_separated_by_spaces_and_tabs_alone(tmp_path: Path) -> None:
    """As aligners count them. The Japanese gold of KFTT counts U+3000 between two spaces as a word; French has U+00A0
    before a colon."""
    (tmp_path / "text").write_text(
        "\u3000 ||| kurama\tmountain \nprix\u00a0: 5\u202f000 ||| price : 5,000\n", encoding="utf-8"
    )
    (tmp_path / "gold").write_text("1-2\n1-1 2-3\n")
    first, second = aer.read_linked_pairs(tmp_path / "text", tmp_path / "gold")
    assert first.words == (["\u3000"], ["kurama", "mountain"]) and first.sure == {(0, 1)}
    assert second.words[0] == ["prix\u00a0:", "5\u202f000"] and second.sure == {(0, 0), (1, 2)}


def test_real_gold(real: Path) -> None:
    """XL-WA's and WPT's files: counts by plain splitting."""
    folder = real / "eval" / "wordalign"
    found = aer.read_linked_pairs(folder / "enfr.src-tgt.xz", folder / "enfr.gold.xz")
    assert len(found) == 447 and sum(len(pair.possible) for pair in found) == 17438
    assert sum(len(pair.sure) for pair in found) == 4038 and found[2].sure == {(0, 0), (1, 1), (2, 2), (3, 3)}
    spanish = aer.read_linked_pairs(folder / "xlwa-en-es.dev.tsv.xz")
    assert len(spanish) == 105 and (5, 3) in spanish[0].sure and all(pair.sure == pair.possible for pair in spanish)


# The command


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("aer",), "--aer en-es FILE.tsv"),
        (("aer", "--aer", "en-es"), "--aer en-es: .*FILE.tsv"),
        (("retrieval",), r"--data \(not given\) has none"),
        (("retrieval", "--texts", "nowhere", "nothing"), "--texts nowhere: this is not a folder"),
        (("retrieval", "--suite", "all"), "--suite is no longer part of xscale"),
    ],
)
def test_a_task_without_what_it_measures_on_is_refused_before_the_work(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(run, "ExportedModel", lambda path: pytest.fail("the model was loaded"))
    assert command("--task", *flags)[0] == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and len(error.splitlines()) == 1


def test_pairs_with_a_blank_line_are_no_sentences(tmp_path: Path) -> None:
    english = tmp_path / "en"
    german = tmp_path / "de"
    english.write_text("one\n\ntwo\nthree\n\n")
    german.write_text("eins\n\n \ndrei\n\n")
    assert run.read_parallel_lines(english, german, None) == [("one", "eins"), ("three", "drei")]
    assert run.read_parallel_lines(english, german, 3) == [("one", "eins")]
    with pytest.raises(UserError, match=r"the number of lines is 0 in .*en"):
        run.read_parallel_lines(english, german, 0)


def test_a_pair_of_languages_has_one_name_whichever_way_round(
    command: Command, demo: Path, tmp_path: Path, write_pairs: Callable[..., None]
) -> None:
    """The same pairs, first as en-de and then as de-en: the same rows, with the same scores."""
    sides = [tmp_path / "en", tmp_path / "de"]
    for side, path in enumerate(sides):
        path.write_text("".join(f"{text}\n" for text in sentences(demo, side)[:40]))
    write_pairs(*sides, tmp_path / "there" / "a")
    write_pairs(*reversed(sides), tmp_path / "back" / "b", "--langs", "de", "en")
    task = ("--task", "retrieval", "--margin", "ratio", "--data")
    there, back = (command(*task, tmp_path / folder)[1]["results"] for folder in ("there", "back"))
    assert list(there["retrieval"]) == ["de-en ratio"]
    assert there == back
    both = command(*task, tmp_path / "there", tmp_path / "back")[1]["results"]
    assert list(both["retrieval"]) == [f"de-en ({tmp_path / place}) ratio" for place in ("there/a", "back/b")]


def test_commands_of_the_page(
    hf: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_pairs: Callable[..., None]
) -> None:
    """Those of docs/how-to/evaluate.md, on made files; the report's are in test_readme.py."""
    monkeypatch.chdir(tmp_path)
    for folder in ("hf", "wpt", "xlwa", "flores200/devtest", "NTREX/NTREX-128"):
        Path(folder).mkdir(parents=True)
    Path("hf/xlm").symlink_to(hf)
    en, de = sentences(demo, 0)[:40], sentences(demo, 1)[:40]
    for side, texts in (("en", en), ("de", de)):
        Path(side).write_text("".join(f"{text}\n" for text in texts))
    write_pairs(Path("en"), Path("de"), Path("heldout/en-de"))
    for name in ("flores200/devtest/{}.devtest", "NTREX/NTREX-128/newstest2019-ref.{}.txt"):
        for side in ("en", "de"):
            Path(name.format(side)).write_text(Path(side).read_text())
    Path("shards").symlink_to("heldout")
    Path("en-de.txt").write_text((demo / "lexicon" / "en-xx.txt").read_text())
    Path("wpt/enfr.src-tgt").write_text("".join(f"{a} ||| {b}\n" for a, b in zip(en, de, strict=True)))
    Path("wpt/enfr.gold").write_text("1-1 2p2\n" * 40)
    Path("xlwa/en-es.tsv").write_text("".join(f"{a}\t{b}\t0-0\n" for a, b in zip(en, de, strict=True)))
    lines = [line for line in commands("docs/how-to/evaluate.md") if line.startswith("xscale eval --model hf/xlm")]
    listed = [shlex.split(line) for line in lines]
    assert len(listed) == 4
    for words in listed:
        assert run.main(words[2:]) == 0, words
    assert set(json.loads(Path("scores.json").read_text())["results"]) == {"heldout", "retrieval"}
