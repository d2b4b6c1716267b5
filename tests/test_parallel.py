"""Retrieval over plain parallel text, and LASER's xSIM and xSIM++: against loops by hand and LASER's own code."""

import json
import lzma
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rows import one_thread  # noqa: F401
from tests.test_eval_tasks import random_model
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval import retrieval, run
from xscale.eval.parallel import find_parallel_texts

LASER = {"index": (52, 53), "text": (46, 46), "++": {"": 91, " misaligned": 52, " entity": 21, " number": 18}}
"""Errors among the 300 sentences of `made`, as source/xsim.py of facebookresearch/LASER counts them at commit
74bc6ae7ffb7cba670fe0f428d0ede9f666fb821, with faiss-cpu."""


def made() -> tuple[np.ndarray, np.ndarray, list[str], dict[str, tuple[str, str]], np.ndarray]:
    """Vectors of 300 sentences and their translations, the texts, of which ten stand twice, and wrong translations
    with their vectors."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(300, 16)) + 0.5
    y = x + 0.8 * draw.normal(size=x.shape)
    x[290:], y[290:] = (side[:10] + 0.05 * draw.normal(size=(10, 16)) for side in (x, y))
    x, y = ((side / np.linalg.norm(side, axis=1, keepdims=True)).astype(np.float32) for side in (x, y))
    texts = [f"sentence {n % 290}" for n in range(300)]
    kinds = ("entity", "number")
    wrong = {f"{texts[n]} with error {kind}": (texts[n], kind) for n in range(0, 290, 2) for kind in kinds}
    more = np.stack([y[int(source.split()[1])] + 0.12 * draw.normal(size=16) for source, _ in wrong.values()])
    return x, y, texts, wrong, (more / np.linalg.norm(more, axis=1, keepdims=True)).astype(np.float32)


def best_by_hand(x: np.ndarray, y: np.ndarray, k: int = 4) -> list[int]:
    """The candidate with the largest ratio margin of each sentence's k nearest."""
    cosine = (x @ y.T).tolist()
    columns = [[row[j] for row in cosine] for j in range(len(y))]
    r_x, r_y = ([sum(sorted(row)[-k:]) / k for row in rows] for rows in (cosine, columns))
    found = []
    for i, row in enumerate(cosine):
        near = sorted(range(len(row)), key=lambda j: -row[j])[:k]
        found.append(max(near, key=lambda j: row[j] / ((r_x[i] + r_y[j]) / 2)))
    return found


def test_xsim_is_lasers() -> None:
    x, y, texts, _, _ = made()
    vectors = [torch.from_numpy(x), torch.from_numpy(y)]
    for name, named in (("index", [str(n) for n in range(300)]), ("text", texts)):
        found = retrieval.xsim(vectors, [named, named], ("de", "en"))
        there, back = (sum(named[j] != named[i] for i, j in enumerate(best_by_hand(a, b))) for a, b in ((x, y), (y, x)))
        assert (there, back) == LASER[name]
        assert found["de->en xsim"] == pytest.approx(there / 300) and found["en->de xsim"] == pytest.approx(back / 300)
        assert found["xsim"] == pytest.approx((there + back) / 600) and found["sentences"] == 300


LASER_ON_TATOEBA = (891, 886)
"""Errors among the 1,000 sentences of Tatoeba deu-eng by the vectors of `spelt`, from German and from English, as the
same source/xsim.py counts them, with numpy's search in place of faiss's."""


def spelt(texts: list[str]) -> np.ndarray:
    """Vectors of texts by their three-letter sequences, rare ones above all, which find names and loan words."""
    counts = np.zeros((len(texts), 4096))
    for row, text in zip(counts, texts, strict=True):
        for start in range(len(text) - 2):
            row[zlib.crc32(text[start : start + 3].lower().encode()) % 4096] += 1
    vectors = counts / (1 + counts.sum(0)) @ np.random.default_rng(0).normal(size=(4096, 256))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_xsim_on_real_text_is_lasers(real: Path) -> None:
    files = [real / "eval" / "tatoeba" / f"tatoeba.deu-eng.{language}.xz" for language in ("deu", "eng")]
    texts = [[line for _, line in read_lines(path)] for path in files]
    x, y = map(spelt, texts)
    found = retrieval.xsim([torch.from_numpy(x), torch.from_numpy(y)], texts, ("de", "en"))
    by_hand = tuple(sum(j != i for i, j in enumerate(best_by_hand(a, b))) for a, b in ((x, y), (y, x)))
    assert tuple(round(found[f"{way} xsim"] * 1000) for way in ("de->en", "en->de")) == by_hand == LASER_ON_TATOEBA


def test_xsim_plus_counts_the_types_of_errors_as_laser() -> None:
    x, y, texts, wrong, more = made()
    candidates, names = np.concatenate([y, more]), [*texts, *wrong]
    found = retrieval.xsim_plus(*map(torch.from_numpy, (x, candidates)), texts, wrong, "de->en")
    errors: dict[str, int] = dict.fromkeys(LASER["++"], 0)
    for i, j in enumerate(best_by_hand(x, candidates)):
        if names[j] != texts[i]:
            source, kind = wrong.get(names[j], ("", ""))
            errors[""] += 1
            errors[f" {kind}" if source == texts[i] else " misaligned"] += 1
    assert errors == LASER["++"]
    assert found == {f"de->en xsim++{name}": pytest.approx(count / 300) for name, count in errors.items()}


def write_flores(folder: Path, texts: dict[str, list[str]], names: str = "{}_Latn.devtest") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for language, lines in texts.items():
        (folder / names.format(language)).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def test_files_of_flores_ntrex_and_tatoeba_are_found(tmp_path: Path) -> None:
    write_flores(tmp_path / "flores", {language: ["a", "b"] for language in ("eng", "deu", "zho")})
    references = {language: ["a"] for language in ("deu", "zho-TW", "eng-US")}
    write_flores(tmp_path / "ntrex", references, "newstest2019-ref.{}.txt")
    write_flores(tmp_path / "ntrex", {"eng": ["a"]}, "newstest2019-src.{}.txt")
    (tmp_path / "ntrex" / "README.md").write_text("no text")
    (tmp_path / "tatoeba").mkdir()
    for pair in ("deu-eng", "fra-eng"):
        for language in pair.split("-"):
            with lzma.open(tmp_path / "tatoeba" / f"tatoeba.{pair}.{language}.xz", "wt") as file:
                file.write("x\ny\n")
    found = {Path(text.name).relative_to(tmp_path).as_posix(): text for text in find_parallel_texts(tmp_path)}
    assert {name: sorted(text.files) for name, text in found.items()} == {
        "flores/*.devtest": ["deu_Latn", "eng_Latn", "zho_Latn"],
        "ntrex/newstest2019.*.txt": ["deu", "eng", "eng-US", "zho-TW"],
        "tatoeba/tatoeba.deu-eng.*": ["deu", "eng"],
        "tatoeba/tatoeba.fra-eng.*": ["eng", "fra"],
    }
    flores = found["flores/*.devtest"]
    assert flores.pairs(False) == [("deu_Latn", "eng_Latn"), ("eng_Latn", "zho_Latn")] and len(flores.pairs(True)) == 3
    write_flores(tmp_path / "flores", {"zho": ["a"]})
    with pytest.raises(UserError, match=r"zho_Latn.devtest has 1 lines, .*_Latn.devtest has 2"):
        find_parallel_texts(tmp_path)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "hf", tokenizer)


@pytest.fixture
def flores(tmp_path: Path, tokenizer: Tokenizer) -> tuple[Path, dict[str, list[str]]]:
    words = [tokenizer.hf.convert_ids_to_tokens(int(n)) for n in tokenizer.ordinary_ids[50:350]]
    draw = np.random.default_rng(0)
    texts = {lang: [" ".join(draw.choice(words, 6)) for _ in range(40)] for lang in ("eng", "deu", "fra")}
    texts["deu"][:20] = texts["eng"][:20]
    write_flores(tmp_path / "flores", texts)
    return tmp_path / "flores", texts


def test_each_language_is_encoded_once(
    hf: Path,
    flores: tuple[Path, dict[str, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All pairs, by cosine and by xSIM, of all lines; pairs with English are the default."""
    encoded: list[int] = []
    embed = retrieval.embed_ids

    def counted(model: Any, sentences: list[list[int]], *others: Any) -> Any:
        encoded.append(len(sentences))
        return embed(model, sentences, *others)

    monkeypatch.setattr(retrieval, "embed_ids", counted)
    out = tmp_path / "scores.json"
    given = ["--model", hf, "--task", "retrieval", "--texts", flores[0], "--margin", "cosine", "xsim", "--out", out]
    assert run.main([*map(str, given), "--pairs", "all"]) == 0
    assert encoded == [40, 40, 40]
    rows = json.loads(out.read_text())["results"]["retrieval"]
    assert sorted(rows) == sorted(
        f"{a}_Latn-{b}_Latn {margin}"
        for a, b in (("deu", "eng"), ("deu", "fra"), ("eng", "fra"))
        for margin in ("cosine", "xsim")
    )
    same = rows["deu_Latn-eng_Latn cosine"]
    assert same["accuracy"] >= 0.5 and same["sentences"] == 40
    assert rows["deu_Latn-eng_Latn xsim"]["xsim"] <= 0.5 < rows["deu_Latn-fra_Latn xsim"]["xsim"]
    assert run.main([*map(str, given), "--limit", "10"]) == 0
    rows = json.loads(out.read_text())["results"]["retrieval"]
    assert {row["sentences"] for row in rows.values()} == {10} and len(rows) == 4


def test_wrong_translations_of_a_file(
    hf: Path,
    flores: tuple[Path, dict[str, list[str]]],
    tmp_path: Path,
    capsys: Any,
) -> None:
    """They are candidates of the side that has the sentences they were made of."""
    folder, texts = flores
    twins = {f"{text} !": {"src": text, "errtype": "number"} for text in texts["eng"][20:]}
    (tmp_path / "wrong.json").write_text(json.dumps(twins))
    given = ["--model", hf, "--task", "retrieval", "--texts", folder, "--margin", "xsim", "--xsim_plus"]
    out = tmp_path / "scores.json"
    assert run.main([*map(str, given), str(tmp_path / "wrong.json"), "--out", str(out)]) == 0
    row = json.loads(out.read_text())["results"]["retrieval"]["deu_Latn-eng_Latn xsim"]
    assert row["deu_Latn->eng_Latn xsim++"] >= row["deu_Latn->eng_Latn xsim"]
    assert not any(name.startswith("eng_Latn->deu_Latn xsim++") for name in row)
    parts = [row[f"deu_Latn->eng_Latn xsim++ {kind}"] for kind in ("misaligned", "number")]
    assert sum(parts) == pytest.approx(row["deu_Latn->eng_Latn xsim++"])
    (tmp_path / "wrong.json").write_text('{"a": "b"}')
    assert run.main([*map(str, given), str(tmp_path / "wrong.json")]) == 2
    assert "wrong.json is not LASER's JSON" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run.main(["--model", str(hf), "--task", "retrieval", "--texts", str(tmp_path / "empty")]) == 2
    assert "no parallel text" in capsys.readouterr().err
