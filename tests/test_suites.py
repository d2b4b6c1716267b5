"""Suites and comparisons of models: which files are found, and that differences are paired and named."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.rows import one_thread  # noqa: F401
from tests.test_eval_tasks import random_model
from tests.test_parallel import write_flores
from xscale.data.tokenizer import Tokenizer
from xscale.eval import aer, bootstrap, compare, retrieval, run, suites
from xscale.eval.means import with_means

PUBLISHED = """
sib/data/annotated/eng_Latn/train.tsv sib/data/annotated/eng_Latn/test.tsv sib/data/annotated/deu_Latn/test.tsv
sib/data/annotated/deu_Latn/train.tsv xtreme/panx/train-en.tsv.xz xtreme/panx/test-de.tsv.xz xtreme/panx/dev-de.tsv.xz
ud/en_ewt-ud-train.conllu ud/en_ewt-ud-test.conllu ud/en_pud-ud-test.conllu ud/de_pud-ud-test.conllu.gz
pawsx/test-de.tsv other/train-en.tsv massive/1.1/data/en-US.jsonl massive/1.1/data/de-DE.jsonl
atis/train_dev_test/train_EN.tsv atis/train_dev_test/test_EN.tsv atis/train_dev_test/test_DE.tsv
taxi/eng_data/eng_train.tsv taxi/eng_data/eng_test.tsv taxi/deu_Latn/deu_Latn_test.tsv
"""


def test_files_of_the_public_test_sets_are_found(tmp_path: Path) -> None:
    """Only English is trained on; of UD's test sets PUD's come first; a folder without training text is passed over."""
    for name in PUBLISHED.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = suites.find_transfer_files([tmp_path])
    names = {
        task: {part: {lang: path.name for lang, path in files.items()} for part, files in parts.items()}
        for task, parts in found.items()
    }
    assert names == {
        "sib200": {
            "train": {"eng_Latn": "train.tsv"},
            "dev": {},
            "test": {"deu_Latn": "test.tsv", "eng_Latn": "test.tsv"},
        },
        "massive": {
            "train": {"en-US": "en-US.jsonl"},
            "dev": {},
            "test": {"de-DE": "de-DE.jsonl", "en-US": "en-US.jsonl"},
        },
        "multiatis": {"train": {"en": "train_EN.tsv"}, "dev": {}, "test": {"de": "test_DE.tsv", "en": "test_EN.tsv"}},
        "taxi1500": {
            "train": {"eng": "eng_train.tsv"},
            "dev": {},
            "test": {"deu_Latn": "deu_Latn_test.tsv", "eng": "eng_test.tsv"},
        },
        "ner": {"train": {"en": "train-en.tsv.xz"}, "dev": {"de": "dev-de.tsv.xz"}, "test": {"de": "test-de.tsv.xz"}},
        "pos": {
            "train": {"en": "en_ewt-ud-train.conllu"},
            "dev": {},
            "test": {"de": "de_pud-ud-test.conllu.gz", "en": "en_pud-ud-test.conllu"},
        },
    }


def test_word_links_of_xlwa_and_of_awesome_align_are_found(tmp_path: Path) -> None:
    """Only XL-WA's tests are found, and no text whose links are missing."""
    found = "XL-WA-main/data/es/test.tsv w/xlwa-en-it.test.tsv.xz w/examples/jaen.src-tgt w/examples/jaen.gold"
    others = "XL-WA-main/data/es/dev.tsv w/xlwa-en-it.dev.tsv.xz w/other/data/de/test.tsv w/examples/deen.src-tgt"
    for name in f"{found} {others}".split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    spanish, italian, *japanese = (str(tmp_path / name) for name in found.split())
    links = suites.find_aer_values([tmp_path / "XL-WA-main", tmp_path / "w"])
    assert sorted(links) == [["en-es", spanish], ["en-it", italian], ["ja-en", *japanese]]


def test_real_files_are_found(real: Path) -> None:
    found = suites.find_transfer_files([real / "eval"])
    assert set(found) == {"pos", "ner"} and set(found["pos"]["test"]) == {"en", "de", "fr", "es", "zh"}
    links = suites.find_aer_values([real / "eval"])
    assert [(pair, len(files)) for pair, *files in links] == [("en-fr", 2), ("en-es", 1), ("en-it", 1)]


@pytest.fixture
def texts(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """Parallel text of three languages, and SIB-200 of two."""
    words = [tokenizer.hf.convert_ids_to_tokens(int(n)) for n in tokenizer.ordinary_ids[50:350]]
    draw = np.random.default_rng(0)
    lines = {lang: [" ".join(draw.choice(words, 6)) for _ in range(60)] for lang in ("eng", "deu", "fra")}
    lines["deu"][:30], lines["fra"][:15] = lines["eng"][:30], lines["eng"][:15]
    write_flores(tmp_path / "texts" / "flores", lines)
    for language in ("eng", "deu"):
        for part in ("train", "test"):
            path = tmp_path / "texts" / "sib" / "annotated" / f"{language}_Latn" / f"{part}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [f"{n}\t{'ab'[n % 3 > 0]}\t{line}\n" for n, line in enumerate(lines[language][:12])]
            path.write_text("index_id\tcategory\ttext\n" + "".join(rows))
    return tmp_path / "texts"


@pytest.fixture
def links(texts: Path) -> Path:
    """Word links of four "languages", whose texts are the English one: word by word, or in reverse order. A model links
    equal words, so that the alignment error rates are 0 or 1."""
    lines = (texts / "flores" / "eng_Latn.devtest").read_text().splitlines()
    forward, backward = range(6), range(5, -1, -1)
    for language, numbers in {"es": forward, "pt": forward, "ru": backward, "uk": backward}.items():
        pairs = " ".join(f"{i}-{j}" for i, j in enumerate(numbers))
        (texts / "XL-WA" / "data" / language).mkdir(parents=True)
        rows = "".join(f"{line}\t{line}\t{pairs}\n" for line in lines)
        (texts / "XL-WA" / "data" / language / "test.tsv").write_text(rows)
    return texts


def cells_of(text: str) -> dict[tuple[str, ...], list[str]]:
    """The cells of a table by the row's first three."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {tuple(line[:3]): line[3:] for line in lines}


def test_a_suite_prints_one_table_with_means(texts: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: Any) -> None:
    model, out = random_model(tmp_path / "one", tokenizer), tmp_path / "scores.json"
    flags = ["--finetune", "--seeds 0 --epochs 1"]
    assert run.main(["--model", str(model), "--suite", "all", "--texts", str(texts), "--out", str(out), *flags]) == 0
    results = json.loads(out.read_text())["results"]
    assert list(results) == ["retrieval", "perplexity", "sib200"]
    assert set(results["sib200"]) == {
        "eng_Latn supervised", "deu_Latn zero-shot", "eng_Latn majority", "deu_Latn majority"
    }  # fmt: skip
    cells = cells_of(capsys.readouterr().out)
    of_pairs = [results["retrieval"][f"{p} cosine"]["accuracy"] for p in ("deu_Latn-eng_Latn", "eng_Latn-fra_Latn")]
    (shown,) = cells["retrieval", "mean over 2 languages cosine", "accuracy"]
    of_texts = [results["perplexity"][f"{language}_Latn"]["bits_per_character"] for language in ("deu", "eng", "fra")]
    (bits,) = cells["perplexity", "mean over 3 languages", "bits_per_character"]
    assert bits.startswith(f"{np.mean(of_texts):.4g} [")
    assert shown.startswith(f"{np.mean(of_pairs):.4g} [") and ("retrieval", "eng_Latn-fra_Latn xsim", "xsim") in cells
    assert run.main(["--model", str(model), "--task", "retrieval", "--texts", str(texts)]) == 0
    assert f"retrieval mean over 2 languages: accuracy {shown}" in capsys.readouterr().out, "a task has them too"
    assert run.main(["--model", str(model), "--suite", "retrieval", "--texts", str(model)]) == 2
    assert "has no test set of the suite" in capsys.readouterr().err


def test_the_table_has_alignment_error_rates(links: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: Any) -> None:
    """Means by training are over the same languages in all columns, or there are none."""
    models = [random_model(tmp_path / name, tokenizer) for name in "abc"]
    for model, languages in zip(models, (["es", "pt"], ["pt", "uk"]), strict=False):
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"xscale": {"languages": ["neutral", *languages]}}))
    words = ["--suite", "retrieval", "--texts", str(links / "XL-WA")]
    assert run.main(["--model", str(models[0]), *words]) == 0
    cells = {row: found[0] for (_, row, name), found in cells_of(capsys.readouterr().out).items() if name == "AER"}
    assert {row.removesuffix(" argmax layer 2"): cell for row, cell in cells.items() if "argmax" in row} == {
        **dict.fromkeys(["en-es", "en-pt"], "0 [0, 0]"),
        **dict.fromkeys(["en-ru", "en-uk"], "1 [1, 1]"),
        "mean over 4 languages": "0.5 [0.5, 0.5]",
        **{"mean over 2 languages in LATIN": "0 [0, 0]", "mean over 2 languages in CYRILLIC": "1 [1, 1]"},
        **{"mean over 2 trained languages": "0 [0, 0]", "mean over 2 languages not trained": "1 [1, 1]"},
    }
    for others, means in ((models[2:], 4), (models[1:], 0)):
        assert compare.main([*map(str, [models[0], *others]), *words, "--out", str(tmp_path / "out")]) == 0
        assert (tmp_path / "out" / "table.md").read_text().count("trained") == means


def test_processes_that_share_a_suite_make_its_one_table(
    links: Path, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The joined scores, intervals and table are those of one process, and nothing is evaluated again."""
    model = random_model(tmp_path / "one", tokenizer)
    words = ["--model", str(model), "--suite", "all", "--texts", str(links), "--finetune", "--seeds 0 --epochs 1"]
    parts, whole, joined = ["--parts", str(tmp_path / "parts")], tmp_path / "whole.json", tmp_path / "joined.json"
    assert run.main([*words, "--out", str(whole)]) == 0
    expected = cells_of(capsys.readouterr().out)
    for part in ("2/3", "0/3", "1/3"):
        assert run.main([*words, *parts, "--part", part, "--out", str(joined)]) == 0
        assert "mean over" not in capsys.readouterr().out and not joined.exists()
    for module, name in ((aer, "evaluate"), (retrieval, "evaluate_vectors"), (suites, "measure_transfer")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("evaluated again"))
    assert run.main([*words, *parts, "--out", str(joined)]) == 0
    assert cells_of(capsys.readouterr().out) == expected and joined.read_text() == whole.read_text()
    assert ("aer", "mean over 4 languages argmax layer 2", "AER") in expected and '"intervals"' in whole.read_text()
    assert run.main([*words, *parts, "--limit", "5"]) == 2
    assert "has scores of an evaluation with --limit 1000" in capsys.readouterr().err
    assert run.main([*words, "--part", "0/3"]) == run.main([*words, *parts, "--part", "3/3"]) == 2
    assert "--part 0/3: give --parts" in (said := capsys.readouterr().err) and "--part 3/3: " in said


def test_means_by_script_and_by_training() -> None:
    """Languages are known by their codes of two and of three letters; a group has two languages or more."""
    values = {"deu_Latn-eng_Latn": 0.1, "eng_Latn-fra_Latn": 0.2, "en-ru": 0.4, "eng-ukr": 0.8, "en-zh-CN": 0.5}
    rows: dict[str, Any] = {
        f"{row} {variant}": {"accuracy": bootstrap.Score(value, lambda value=value: np.full(3, value + 1))}
        for variant in ("cosine", "xsim")
        for row, value in values.items()
        if variant == "cosine" or row != "eng-ukr"
    }
    found = {row: of for row, of in with_means(rows, ["de", "uk"]).items() if row not in rows}
    assert {row: of["accuracy"] for row, of in found.items()} == pytest.approx(
        {
            "mean over 5 languages cosine": 0.4,
            "mean over 2 languages in LATIN cosine": 0.15,
            "mean over 2 languages in CYRILLIC cosine": 0.6,
            "mean over 2 trained languages cosine": 0.45,
            "mean over 3 languages not trained cosine": 1.1 / 3,
            "mean over 4 languages xsim": 0.3,
        }
    )
    assert list(found["mean over 2 languages in CYRILLIC cosine"]["accuracy"].resampled()) == pytest.approx([1.6] * 3)  # type: ignore[attr-defined]
    assert [row for row in with_means(rows) if "trained" in row] == []
    twice = {row: of_one for row, of_one in rows.items() if row.endswith("cosine")} | {
        "de-en cosine": rows["en-ru cosine"]
    }
    assert "mean over 6 rows of 5 languages cosine" in with_means(twice)
    places = {"de (a/de)": 1.0, "de (a/en-de)": 3.0, "fr": 5.0}
    told = {row: {"loss": bootstrap.Score(value, lambda: np.ones(3))} for row, value in places.items()}
    assert with_means(told)["mean over 3 rows of 2 languages"]["loss"] == 3.0, "a text's path is no variant"
    of_texts = {row: {"loss": bootstrap.Score(1, lambda: np.ones(3))} for row in ("en", "de", "ru", "uk", "ja", "sr")}
    added = [row for row in with_means(of_texts, ["en", "de"]) if row not in of_texts]
    assert added == [
        "mean over 6 languages",
        "mean over 2 languages in LATIN",
        "mean over 2 languages in CYRILLIC",
        "mean over 2 trained languages",
        "mean over 4 languages not trained",
    ]


def test_models_are_compared_on_the_same_sentences(texts: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A model does not differ from one with the same weights; what it differs by from another one has an interval."""
    models = [random_model(tmp_path / name, tokenizer, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    out = tmp_path / "out"
    words = [*models, "--suite", "retrieval", "--texts", texts, "--out", out]
    assert compare.main([str(word) for word in words]) == 0
    cells = cells_of((out / "table.md").read_text())
    assert cells["task", "row", "number"] == ["a", "b", "c", "b - a", "c - a"]
    a, b, c, same, other = cells["retrieval", "eng_Latn-fra_Latn cosine", "accuracy"]
    assert a == b and same == "0 [0, 0], p 1"
    found = {name: json.loads((out / f"{name}.json").read_text())["results"]["retrieval"] for name in "abc"}
    accuracy = {name: rows["eng_Latn-fra_Latn cosine"]["accuracy"] for name, rows in found.items()}
    alone = ["--model", models[2], "--suite", "retrieval", "--texts", texts, "--out", tmp_path / "alone.json"]
    assert run.main([str(word) for word in alone]) == 0
    assert json.loads((tmp_path / "alone.json").read_text())["results"]["retrieval"] == found["c"] != found["a"]
    assert c.startswith(f"{accuracy['c']:.4g} [") and other.startswith(f"{accuracy['c'] - accuracy['a']:,.4g} [")


def test_a_test_without_labels_gives_way_to_dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for part, text in (("train", "a\tO\n"), ("dev", "b\tO\n"), ("test", "c\n")):
        (tmp_path / f"{part}-de.tsv").write_text(text)
    (tmp_path / "test-en.tsv").write_text("d\tO\n")
    asked = []
    monkeypatch.setattr(suites, "measure_transfer", lambda args: asked.append(args) or SimpleNamespace(rows={}))
    parts = {part: {"de": tmp_path / f"{part}-de.tsv"} for part in ("train", "dev", "test")}
    parts["test"]["en"] = tmp_path / "test-en.tsv"
    suites.fine_tune("ner", parts, "", SimpleNamespace(path=tmp_path))  # type: ignore[arg-type]
    assert asked[0].test == [f"de={tmp_path}/dev-de.tsv", f"en={tmp_path}/test-en.tsv"]
    assert "test-de.tsv has no labels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"), [(["--limit", "0"], "--limit 0"), (["--suite", "transfer"], "has no test set of the suite")]
)
def test_what_cannot_be_compared_is_said_before_the_work(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], said: str
) -> None:
    monkeypatch.setattr(compare, "ExportedModel", lambda path: pytest.fail("a model was loaded"))
    model = random_model(tmp_path / "one", tokenizer)
    words = ["--suite", "retrieval", "--texts", str(tmp_path), "--out", str(tmp_path / "out")]
    assert compare.main([str(model), *words, *flags]) == 2
    assert said in capsys.readouterr().err
    assert compare.main([str(model), str(tmp_path / "two"), *words]) == 2
    assert f"{tmp_path / 'two'} has no config.json" in capsys.readouterr().err
    assert compare.main([str(model), str(model), *words]) == 2
    assert "is given twice" in capsys.readouterr().err
    for language in ("de", "en"):
        (tmp_path / f"empty.{language}").touch()
    assert compare.main([str(model), *words]) == 2
    assert "empty.en have no lines" in capsys.readouterr().err


def test_p_values_are_those_of_chance() -> None:
    """Two models that are as good: p is below 0.05 in one comparison of twenty."""
    draw = np.random.default_rng(0)
    p = []
    for _ in range(400):
        right = (draw.random((2, 200)) < 0.6).astype(float)
        scores = [bootstrap.bootstrap(side[:, None], lambda sums: {"accuracy": sums[..., 0] / 200}) for side in right]
        p.append(bootstrap.p_value(bootstrap.weighted_sum([side["accuracy"] for side in scores], [1, -1])))
    assert 0.02 <= np.mean(np.array(p) < 0.05) <= 0.08 and 0.4 <= np.mean(np.array(p) < 0.5) <= 0.6
