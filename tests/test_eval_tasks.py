"""Mining, induction, word alignment, perplexity: against loops by hand, scikit-learn and transformers alone."""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, precision_recall_curve, precision_score, recall_score
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig

from tests.conftest import tar_lines
from tests.rows import one_thread  # noqa: F401
from tests.test_readme import commands
from xscale import rng
from xscale.data.lexicon import is_withheld, load_lexicon
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval import aer, heldout, induction, mining, neighbours, run
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


def unit(rows: int, seed: int, width: int = 6) -> Tensor:
    return torch.nn.functional.normalize(
        torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, width))), dim=1
    )


# Neighbours


def test_nearest_is_a_search_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile at a time; less the penalties; never one of the same number; of x among y, and of y among x."""
    x, y = unit(23, 0), unit(17, 1)
    penalties = torch.linspace(0, 2, 23, dtype=torch.float64), torch.linspace(0, 1, 17, dtype=torch.float64)
    numbers = torch.arange(23) % 9, torch.arange(17) % 9
    for tile, some, k in product((1, 5, 10**6), (False, True), (1, 5, 99)):
        monkeypatch.setattr(neighbours, "TILE", tile)
        given = (k, penalties, numbers) if some else (k,)
        there, back = neighbours.nearest_both(x, y, *given)
        cells = {
            (i, j): float(x[i] @ y[j]) - some * float(penalties[0][i] + penalties[1][j])
            for i, j in product(range(23), range(17))
            if not some or i % 9 != j % 9
        }
        for i in range(23):
            same_neighbours(there, i, sorted(((score, b) for (a, b), score in cells.items() if a == i), reverse=True))
        for j in range(17):
            same_neighbours(back, j, sorted(((score, a) for (a, b), score in cells.items() if b == j), reverse=True))
    assert neighbours.nearest_both(x[:0], y, 3)[0][1].shape == (0, 3)
    assert neighbours.nearest_both(x, y[:0], 3)[0][1].shape == (23, 0)


def same_neighbours(found: tuple[Tensor, Tensor], row: int, expected: list[tuple[float, int]]) -> None:
    """expected: all neighbours that the row has, best first."""
    scores, rows = found
    expected = expected[: scores.shape[1]]
    assert rows[row].tolist()[: len(expected)] == [j for _, j in expected]
    assert scores[row].tolist()[: len(expected)] == pytest.approx([score for score, _ in expected])


def test_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole numbers, whose products are exact and many of them equal: the scores of a sort of the whole matrix, and
    as the one nearest the first of equal ones."""
    draw = np.random.default_rng(0)
    x, y = (torch.from_numpy(draw.integers(-3, 4, (rows, 6))).float() for rows in (301, 230))
    cells = x @ y.T
    for tile, k in product((7, 64, 4096), (1, 4, 40)):
        monkeypatch.setattr(neighbours, "TILE", tile)
        for (scores, rows), whole in zip(neighbours.nearest_both(x, y, k), (cells, cells.T), strict=True):
            assert torch.equal(scores, whole.sort(dim=1, descending=True).values[:, :k])
            assert torch.equal(whole.gather(1, rows), scores) and all(len(set(row)) == k for row in rows.tolist())
            if k == 1:
                assert torch.equal(rows[:, 0], whole.argmax(1))


# Mining


def mined_by_hand(x: Tensor, y: Tensor, k: int) -> list[tuple[float, int, int]]:
    """Artetxe & Schwenk's ratio margin and "max. score", by loops over all pairs; score, first, second; best first."""
    cosine = (x @ y.T).tolist()
    r_x = [np.mean(sorted(row)[-k:]) for row in cosine]
    r_y = [np.mean(sorted(row[j] for row in cosine)[-k:]) for j in range(len(y))]
    ratio = [[cosine[i][j] / ((r_x[i] + r_y[j]) / 2) for j in range(len(y))] for i in range(len(x))]
    best = set()
    for i in range(len(x)):
        near = sorted(range(len(y)), key=lambda j: -cosine[i][j])[:k]
        best.add((i, max(near, key=lambda j: ratio[i][j])))
    for j in range(len(y)):
        near = sorted(range(len(x)), key=lambda i: -cosine[i][j])[:k]
        best.add((max(near, key=lambda i: ratio[i][j]), j))
    kept: list[tuple[float, int, int]] = []
    for score, i, j in sorted(((ratio[i][j], i, j) for i, j in best), reverse=True):
        if all(i != a and j != b for _, a, b in kept):
            kept.append((score, i, j))
    return kept


def near_pairs(n: int, m: int, pairs: int, seed: int) -> tuple[Tensor, Tensor, set[tuple[int, int]]]:
    """Vectors of two lists, all on one side of the origin, as states are; the first of each are near one another."""
    x, y = unit(n, seed) + 0.8, unit(m, seed + 1) + 0.8
    y[:pairs] = x[:pairs] + 0.25 * unit(pairs, seed + 2)
    x, y = (torch.nn.functional.normalize(side, dim=1) for side in (x, y))
    order = np.random.default_rng(seed).permutation(m)
    return x, y[order.tolist()], {(int(i), j) for j, i in enumerate(order.tolist()) if i < pairs}


def test_mining_is_that_of_artetxe_and_schwenk() -> None:
    x, y, _ = near_pairs(60, 45, 30, seed=3)
    for k in (2, 4, 99):
        expected = mined_by_hand(x, y, k)
        found = mining.mine(x, y, k)
        assert [tuple(pair) for pair in found.pairs.tolist()] == [(i, j) for _, i, j in expected]
        np.testing.assert_allclose(found.scores, [score for score, *_ in expected], rtol=1e-9)


def test_threshold_and_rates_are_those_of_scikit_learn() -> None:
    """On all pairs of the lists: those that are no candidates score less than all that are."""
    x, y, gold = near_pairs(60, 45, 30, seed=3)
    found = mining.mine(x, y)
    found = mining.Candidates(found.pairs, np.round(found.scores, 2))  # many are equal
    score = {(i, j): s for (i, j), s in zip(map(tuple, found.pairs.tolist()), found.scores.tolist(), strict=True)}
    cells = list(product(range(60), range(45)))
    truth, scores = [cell in gold for cell in cells], [score.get(cell, -1.0) for cell in cells]
    precision, recall, _ = precision_recall_curve(truth, scores)
    best = max(2 * p * r / (p + r) for p, r in zip(precision, recall, strict=True) if p + r)
    threshold = mining.best_threshold(found, gold)
    rates = mining.mining_scores(found, gold, threshold)
    guess = [value >= threshold for value in scores]
    assert rates["F1"] == pytest.approx(best) == pytest.approx(f1_score(truth, guess)) and 0.3 < best < 1
    assert rates["precision"] == pytest.approx(precision_score(truth, guess))
    assert rates["recall"] == pytest.approx(recall_score(truth, guess))
    assert rates["mined"] == sum(guess) < len(found.pairs) and rates["gold"] == len(gold)
    elsewhere = mining.mining_scores(found, gold, float(found.scores[4]))
    guess = [value >= found.scores[4] for value in scores]
    assert elsewhere["F1"] == pytest.approx(f1_score(truth, guess)) and elsewhere["F1"] < best


def write_bitext(prefix: Path, first: list[str], second: list[str], gold: list[tuple[int, int]]) -> None:
    a, b = prefix.name.split(".")[0].split("-")
    for lang, texts in ((a, first), (b, second)):
        lines = (f"{lang}-{number:09d}\t{text}\n" for number, text in enumerate(texts))
        prefix.with_name(f"{prefix.name}.{lang}").write_text("".join(lines))
    prefix.with_name(f"{prefix.name}.gold").write_text("".join(f"{a}-{i:09d}\t{b}-{j:09d}\n" for i, j in gold))


def sentences(demo: Path, side: int) -> list[str]:
    tars = sorted((demo / "heldout").rglob("*.tar"))
    return list(dict.fromkeys(json.loads(line)["texts"][side] for tar in tars for line in tar_lines(tar)))


def test_mining_task(command: Command, demo: Path, tmp_path: Path) -> None:
    """Sentences that are the same in both lists are found, at the threshold of a development set; and what is measured
    at its own is named so."""
    en, xx = sentences(demo, 0), sentences(demo, 1)
    write_bitext(tmp_path / "xx-en.test", xx[:30] + en[:20], en[10:60], [(30 + i, i - 10) for i in range(10, 20)])
    write_bitext(tmp_path / "en-xx.dev", en[60:80], en[70:80] + xx[60:90], [(i, i - 10) for i in range(10, 20)])
    test = ("--task", "mining", "--mining", tmp_path / "xx-en.test")
    code, found = command(*test, "--mining_dev", tmp_path / "en-xx.dev", "--layer", 0, 2)
    rows = found["results"]["mining"]
    assert code == 0 and list(rows) == ["en-xx layer 0", "en-xx layer 2"]
    assert rows["en-xx layer 0"]["recall"] >= 0.9 and all(row["gold"] == 10 for row in rows.values())
    own = command(*test, "--layer", 0, 2)[1]["results"]["mining"]
    assert list(own) == [f"en-xx layer {layer} own threshold" for layer in (0, 2)]
    for layer in (0, 2):
        assert own[f"en-xx layer {layer} own threshold"]["F1"] >= rows[f"en-xx layer {layer}"]["F1"] > 0.6


@pytest.mark.parametrize(
    ("extension", "text", "said"),
    [
        ("de", "de-0\tja\nde-1 nein\n", r"test\.de: line 2: 'de-1 nein'.*ID<TAB>sentence"),
        ("en", "en-0\tyes\nen-0\tno\n", r"test\.en: line 2: 'en-0'.*twice"),
        ("gold", "de-0\ten-7\n", r"test\.gold: line 1: .*en-7.*test\.de"),
        ("gold", "", r"test\.gold .*no pair"),
    ],
)
def test_malformed_bitext(tmp_path: Path, extension: str, text: str, said: str) -> None:
    (tmp_path / "x").mkdir()
    prefix = tmp_path / "x" / "de-en.test"
    write_bitext(prefix, ["ja"], ["yes"], [(0, 0)])
    prefix.with_name(f"{prefix.name}.{extension}").write_text(text)
    with pytest.raises(UserError, match=said):
        mining.load_bitext(prefix)


# Induction


def induced_by_hand(
    vectors: dict[tuple[int, ...], Tensor], pairs: list[tuple[Any, Any]], asked: list[Any], margin: str
) -> tuple[float, float]:
    """P@1 and P@5, by loops. pairs: (source word, target word)."""
    ours, theirs = list(dict.fromkeys(a for a, _ in pairs)), list(dict.fromkeys(b for _, b in pairs))

    rows = {word: vector.detach().double().numpy() / float(vector.norm()) for word, vector in vectors.items()}
    cosine = {(a, b): float(rows[a] @ rows[b]) for a, b in product(ours, theirs)}
    r = {b: np.mean(sorted((cosine[a, b] for a in ours if a != b), reverse=True)[:10]) for b in theirs}
    hits, gold = [], set(pairs)
    for a in asked:
        score = {b: 2 * cosine[a, b] - r[b] if margin == "csls" else cosine[a, b] for b in theirs if a != b}
        hits.append([(a, b) in gold for b in sorted(score, key=lambda b: -score[b])[:5]])
    return tuple(np.mean([any(of_word[:k]) for of_word in hits]) for k in (1, 5))  # type: ignore[return-value]


def test_induction_is_a_search_by_hand(demo: Path, tmp_path: Path, tokenizer: Tokenizer, model: ExportedModel) -> None:
    """Words of several tokens, with several translations, the same in both languages; by embeddings and a layer; the
    same from files of either direction."""
    lines = (demo / "lexicon" / "en-xx.txt").read_text().splitlines()[::4][:200]
    lines += [f"{lines[i].split()[0]} {lines[i + 1].split()[1]}" for i in range(0, 200, 5)]
    lines += [f"{lines[i].split()[0]} {lines[i + 9].split()[0]}" for i in range(0, 180, 3)]  # words of both languages
    lines += ["same same", "both both"]
    path, other = tmp_path / "en-xx.txt", tmp_path / "xx-en.txt"
    path.write_text("\n".join(lines))
    other.write_text("\n".join(" ".join(reversed(line.split())) for line in lines))
    lexicon = load_lexicon(path, tokenizer)
    table = model.encoder.embeddings.data
    pairs = [(tuple(a), tuple(b)) for a, b in zip(*lexicon.ids, strict=True) if a != b]
    for a, b in pairs[::3]:
        if len(a) == len(b) == 1:
            table[list(a)] = table[list(b)] + 0.1 * table[list(a)]
    asked = (model, [lexicon], [], 0.4, 10**6, (1,), ("cosine", "csls"))
    found = induction.evaluate(*asked)
    assert len(found) == 8 and any(len(a) > 1 for a, _ in pairs) and lexicon.identical >= 2
    kept = [not any(is_withheld(word, 1 - 0.6**0.5) for word in entry) for entry in lexicon.words]
    entries = zip(*lexicon.ids, kept, strict=True)
    seen = {tuple(side) for a, b, trained in entries if trained and a != b for side in (a, b)}
    words = {word for pair in pairs for word in pair}
    bert, ids = model.encoder.lm.base_model, tokenizer.hf
    with torch.no_grad():
        layer = {
            word: bert(
                torch.tensor([[ids.cls_token_id, *word, ids.sep_token_id]]), output_hidden_states=True
            ).hidden_states[1][0, 1:-1].mean(0)
            for word in words
        }  # fmt: skip
    every = {"": {word: table[list(word)].mean(0) for word in words}, " layer 1": layer}
    for (name, vectors), margin, kind in product(every.items(), ("cosine", "csls"), ("withheld", "trained")):
        row, directions = found[f"{kind} {margin}{name}"], []
        for there, of_direction in (("en->xx", pairs), ("xx->en", [(b, a) for a, b in pairs])):
            queries = [a for a in dict.fromkeys(a for a, _ in of_direction) if (a in seen) == (kind == "trained")]
            expected = induced_by_hand(vectors, of_direction, queries, margin)
            assert (row[f"{there} P@1"], row[f"{there} P@5"]) == pytest.approx(expected, abs=1e-6)
            directions.append(len(queries))
        assert row["P@5"] == pytest.approx((row["en->xx P@5"] + row["xx->en P@5"]) / 2)
        assert row["words"] == sum(directions) and row["identical"] == lexicon.identical
    assert found["trained cosine"]["P@5"] > found["trained cosine"]["P@1"] > 0.15
    assert len({json.dumps(row) for row in found.values()}) >= 6
    again = load_lexicon(other, tokenizer)
    for lexicons in ([again], [lexicon, again]):
        assert induction.evaluate(model, lexicons, *asked[2:]) == found


def test_induction_task(command: Command, demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = command("--task", "induction", "--data", demo / "pairs", "--limit", 30)
    assert code == 0 and list(found["results"]["induction"]) == ["en-xx withheld", "en-xx trained"]
    assert all(row["words"] == 60 for row in found["results"]["induction"].values())
    assert "no score" not in capsys.readouterr().err
    everything = command("--task", "induction", "--data", demo / "pairs", "--lexicon_heldout", 1)[1]
    assert list(everything["results"]["induction"]) == ["en-xx withheld"]


# Word alignment


def test_error_rates_by_hand() -> None:
    """Two pairs: |A| = 5, |S| = 4, |A & S| = 3, |A & P| = 4."""
    sure = [{(0, 0), (1, 1)}, {(0, 1), (2, 2)}]
    possible = [{(0, 0), (1, 1), (1, 2)}, {(0, 1), (2, 2)}]
    gold = aer.HandLinks(("en", "fr"), [], sure, possible)
    found = aer.error_rates([{(0, 0), (1, 2), (5, 5)}, {(0, 1), (2, 2)}], gold)
    assert found == pytest.approx({"AER": 1 - 7 / 9, "precision": 4 / 5, "recall": 3 / 4, "F1": 1.2 / 1.55})
    assert aer.error_rates(sure, gold)["AER"] == 0 and aer.error_rates([set(), set()], gold)["AER"] == 1


def linked_by_hand(x: list[np.ndarray], y: list[np.ndarray], method: str) -> set[tuple[int, int]]:
    if method == "argmax":
        score = [[float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in y] for a in x]
        return {
            (i, j)
            for i, j in product(range(len(x)), range(len(y)))
            if score[i][j] == max(score[i]) and score[i][j] == max(row[j] for row in score)
        }
    dot = [[float(a @ b) for b in y] for a in x]
    there = [[math.exp(v - max(row)) / sum(math.exp(w - max(row)) for w in row) for v in row] for row in dot]
    columns = [[row[j] for row in dot] for j in range(len(y))]
    back = [[math.exp(v - max(c)) / sum(math.exp(w - max(c)) for w in c) for v in c] for c in columns]
    return {(i, j) for i, j in product(range(len(x)), range(len(y))) if there[i][j] > 0.001 and back[j][i] > 0.001}


def hidden_states(path: Path, words: list[str]) -> tuple[list[list[np.ndarray]], list[int], bool]:
    """By transformers alone: layer, token -> state; each token's word; whether words are cut off."""
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    inputs = tokenizer(words, is_split_into_words=True, return_tensors="pt", truncation=True, max_length=20)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    whole = len(tokenizer(words, is_split_into_words=True)["input_ids"])
    return [[*state[0, 1:-1].double().numpy()] for state in states], inputs.word_ids()[1:-1], whole > 20


def test_word_alignment_is_that_of_transformers_states(command: Command, hf: Path, demo: Path, tmp_path: Path) -> None:
    """Every layer and method, on sentences that are cut too, in both formats; WPT's count from 1, and have possible
    links."""
    pairs = list(zip(sentences(demo, 0)[:12], sentences(demo, 1)[:12], strict=True))
    words = [(first.split(), second.split()) for first, second in pairs]
    links = [[(i, i, "p" if i % 3 else "-") for i in range(min(map(len, pair)))] for pair in words]
    table, text, gold = tmp_path / "gold.tsv", tmp_path / "src-tgt", tmp_path / "gold"
    lines = [" ".join(f"{i}{kind}{j}" for i, j, kind in of) for of in links]
    table.write_text("".join(f"{a}\t{b}\t{line}\n" for (a, b), line in zip(pairs, lines, strict=True)))
    text.write_text("".join(f"{a} ||| {b}\n" for a, b in pairs))
    gold.write_text("".join(" ".join(f"{i + 1}{k}{j + 1}" for i, j, k in of) + "\n" for of in links))
    code, found = command("--task", "aer", "--aer", "xx-en", table, "--aer", "fr-en", text, gold)
    rows = found["results"]["aer"]
    assert code == 0 and len(rows) == 12
    sides = [[hidden_states(hf, pair[side]) for pair in words] for side in (0, 1)]
    for method, layer in product(("argmax", "softmax"), range(3)):
        a = s = right = right_sure = 0
        for (x, x_words, _), (y, y_words, _), of in zip(*sides, links, strict=True):
            found_links = {(x_words[i], y_words[j]) for i, j in linked_by_hand(x[layer], y[layer], method)}
            sure = {(i, j) for i, j, kind in of if kind == "-"}
            a, s = a + len(found_links), s + len(sure)
            right += len(found_links & {(i, j) for i, j, _ in of})
            right_sure += len(found_links & sure)
        row = rows[f"en-xx {method} layer {layer}"]
        assert row == rows[f"en-fr {method} layer {layer}"] and row["sentences"] == 12
        assert row["AER"] == pytest.approx(1 - (right + right_sure) / (a + s)) and row["recall"] == right_sure / s
        assert row["cut"] == sum(first[2] or second[2] for first, second in zip(*sides, strict=True)) > 0
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:5]))
    _, of_five = command("--task", "aer", "--aer", "xx-en", table)
    _, limited = command("--task", "aer", "--aer", "xx-en", text, gold, "--limit", 5)
    assert limited["results"] == of_five["results"] != found["results"]


@pytest.mark.parametrize(
    ("text", "gold", "said"),
    [
        ("a b\tc d\t0-0 1-2\n", None, "line 1.*1-2.*from 0"),
        ("a b\tc d\t0-0\na b\tc d\t0-0 1x1\n", None, "line 2.*'1x1'.*ipj"),
        ("a b\tc d\n", None, "line 1.*sentence<TAB>sentence<TAB>links"),
        ("a b ||| c d\n", "1-1\n2-2\n", "gold has 2 lines"),
        ("a b ||| c d\n", "1-1\n", "counted from 0 or from 1"),
        ("a b ||| c d\na ||| c\n", "1-1\n1-2\n", "line 2.*1-2"),
        ("a b | c d\n", "1-1\n", r"line 1.*sentence \|\|\| sentence"),
    ],
)
def test_malformed_gold(tmp_path: Path, text: str, gold: str | None, said: str) -> None:
    paths = [tmp_path / "text", tmp_path / "gold"][: 1 if gold is None else 2]
    for path, content in zip(paths, (text, gold), strict=False):
        path.write_text(content or "")
    with pytest.raises(UserError, match=f"{tmp_path}.*{said}"):
        aer.load_hand_links(("en", "fr"), *paths)


def test_a_word_may_be_a_wide_space(tmp_path: Path) -> None:
    """The Japanese gold of KFTT counts U+3000 between two spaces as a word."""
    (tmp_path / "text").write_text("山 \u3000 くらま ||| kurama mountain \n", encoding="utf-8")
    (tmp_path / "gold").write_text("1-2 3-1\n")
    found = aer.load_hand_links(("ja", "en"), tmp_path / "text", tmp_path / "gold")
    assert found.words == [(["山", "\u3000", "くらま"], ["kurama", "mountain"])] and found.sure == [{(0, 1), (2, 0)}]


def test_real_gold(real: Path) -> None:
    """XL-WA's and WPT's files: counts by plain splitting."""
    folder = real / "eval" / "wordalign"
    found = aer.load_hand_links(("en", "fr"), folder / "enfr.src-tgt.xz", folder / "enfr.gold.xz")
    assert len(found.words) == 447 and sum(map(len, found.possible)) == 17438 and sum(map(len, found.sure)) == 4038
    assert found.sure[2] == {(0, 0), (1, 1), (2, 2), (3, 3)}
    spanish = aer.load_hand_links(("en", "es"), folder / "xlwa-en-es.dev.tsv.xz")
    assert len(spanish.words) == 105 and (5, 3) in spanish.sure[0] and spanish.sure == spanish.possible


# Perplexity


def masked_by_hand(ids: list[int], number: int, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Of a record's tokens as the model sees them, and the places to predict, drawn one by one."""
    identity = rng.hash64(rng.key("perplexity"), np.uint64(number))

    def draw(name: str, place: int) -> float:
        return float(rng.uniform(identity ^ rng.key("masking", name), np.uint64(place)))

    shown = list(ids)
    targets = [
        place for place, token in enumerate(ids) if not tokenizer.is_special[token] and draw("choose", place) < 0.15
    ]
    for place in targets:
        action, pick = draw("action", place), int(draw("random id", place) * len(tokenizer.ordinary_ids))
        if action < 0.9:
            shown[place] = tokenizer.mask_id if action < 0.8 else int(tokenizer.ordinary_ids[pick])
    return shown, targets


def test_perplexity_is_that_of_transformers(tmp_path: Path, demo: Path, tokenizer: Tokenizer) -> None:
    source = Source(demo / "heldout" / "pairs")
    path = random_model(tmp_path / "long", tokenizer, positions=64)
    lm = AutoModelForMaskedLM.from_pretrained(path).eval()
    losses, right, tokens = [], 0, Counter[int]()
    for number in range(40):
        ids = tokenizer.hf(source.read(0, number).texts[1])["input_ids"]
        tokens.update(ids[1:-1])
        shown, targets = masked_by_hand(ids, number, tokenizer)
        with torch.no_grad():
            log_p = lm(torch.tensor([shown])).logits[0].double().log_softmax(-1)
        losses += [-float(log_p[place, ids[place]]) for place in targets]
        right += sum(int(log_p[place].argmax()) == ids[place] for place in targets)
    texts = [source.read(0, number).texts[1] for number in range(40)]
    found = heldout.evaluate_perplexity(ExportedModel(path), texts, "xx", source.directory)
    assert found["targets"] == len(losses) > 20
    assert found["mlm_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)
    assert found["masked_accuracy"] == pytest.approx(right / len(losses))
    characters = sum(len(source.read(0, number).texts[1]) for number in range(40))
    bits = np.mean(losses) / math.log(2) * sum(tokens.values())
    assert found["bits_per_character"] == pytest.approx(bits / characters, rel=1e-4)
    total = sum(tokens.values())
    assert found["unigram_entropy"] == pytest.approx(-sum(n / total * math.log(n / total) for n in tokens.values()))


def test_perplexity_task(command: Command, demo: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A row for each language of each source, named by its folder where several have it; other models have the same
    targets; longer texts than the model's positions lose no token."""
    folders = ("heldout/pairs", "mono_xx")
    task = ("--task", "perplexity", "--data", *(demo / folder for folder in folders), "--limit", 50)
    code, found = command(*task)
    rows = found["results"]["perplexity"]
    assert code == 0 and list(rows) == ["en", *(f"xx ({demo / folder})" for folder in folders)]
    longer = [random_model(tmp_path / f"{seed}", tokenizer, 64, seed) for seed in (1, 2)]
    first, second = (command(*task, "--model", path)[1]["results"]["perplexity"] for path in longer)
    assert [row["targets"] for row in first.values()] == [row["targets"] for row in second.values()]
    assert first["en"]["perplexity"] != second["en"]["perplexity"]
    for name, row in rows.items():
        assert row["targets"] == pytest.approx(first[name]["targets"], rel=0.25)
        assert row["unigram_entropy"] == first[name]["unigram_entropy"]


# The command


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("aer",), "--aer en-es FILE.tsv"),
        (("aer", "--aer", "en-es"), "--aer en-es: .*FILE.tsv"),
        (("mining",), "--mining PREFIX"),
        (("mining", "--mining", "x/bucc.test"), "--mining x/bucc.test: .*languages"),
        (
            ("mining", "--mining", "en-de.test", "--mining_dev", "fr-en.dev"),
            "--mining_dev fr-en.dev .*--mining",
        ),
        (("induction",), "--lexicons"),
        (("perplexity",), "--data"),
        (("retrieval",), "--data is missing"),
    ],
)
def test_a_task_without_what_it_measures_on_is_refused_before_the_work(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(run, "ExportedModel", lambda path: pytest.fail("the model was loaded"))
    assert command("--task", *flags)[0] == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and len(error.splitlines()) == 1


def test_a_pair_of_languages_has_one_name_whichever_way_round(
    command: Command, demo: Path, tmp_path: Path, write_pairs: Callable[..., None]
) -> None:
    """The same pairs, first as en-de and then as de-en: the same rows, with the same scores."""
    sides = [tmp_path / "en", tmp_path / "de"]
    for side, path in enumerate(sides):
        path.write_text("".join(f"{text}\n" for text in sentences(demo, side)[:40]))
    write_pairs(*sides, tmp_path / "there" / "a")
    write_pairs(*reversed(sides), tmp_path / "back" / "b", "--langs", "de", "en")
    tasks = ("--task", "retrieval", "perplexity", "--margin", "csls", "--data")
    there, back = (command(*tasks, tmp_path / folder)[1]["results"] for folder in ("there", "back"))
    assert list(there["retrieval"]) == ["de-en csls"] and sorted(there["perplexity"]) == ["de", "en"]
    assert there == back
    both = command(*tasks, tmp_path / "there", tmp_path / "back")[1]["results"]
    assert list(both["retrieval"]) == [f"de-en ({tmp_path / place}) csls" for place in ("there/a", "back/b")]


def test_commands_of_the_page(
    hf: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_pairs: Callable[..., None]
) -> None:
    """Those of docs/evaluation.md, on made files; mteb's is in test_mteb.py, the report's in test_readme.py."""
    monkeypatch.chdir(tmp_path)
    for folder in ("hf", "bucc", "wpt", "xlwa", "flores200/devtest", "NTREX/NTREX-128"):
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
    Path("texts").symlink_to("flores200")
    Path("en-de.txt").write_text((demo / "lexicon" / "en-xx.txt").read_text())
    for name in ("training", "test"):
        write_bitext(Path(f"bucc/de-en.{name}"), de, en, [(i, i) for i in range(20)])
    Path("wpt/enfr.src-tgt").write_text("".join(f"{a} ||| {b}\n" for a, b in zip(en, de, strict=True)))
    Path("wpt/enfr.gold").write_text("1-1 2p2\n" * 39 + f"{len(en[-1].split())}-1\n")
    Path("xlwa/en-es.tsv").write_text("".join(f"{a}\t{b}\t0-0\n" for a, b in zip(en, de, strict=True)))
    lines = [line for line in commands("docs/evaluation.md") if "xscale.eval.run --model hf/xlm" in line]
    listed = [shlex.split(line) for line in lines if "--task mteb" not in line]
    assert len(listed) == 7 and all(words[:3] == ["python", "-m", "xscale.eval.run"] for words in listed)
    for words in listed:
        assert run.main(words[3:]) == 0, words
    assert set(json.loads(Path("scores.json").read_text())["results"]) == {"heldout", "retrieval", "perplexity"}
