"""What is said of the texts of a source, against counts by sets and loops, and against real text."""

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from data_tools import index, inspect, write_shards
from data_tools import survey as surveys
from data_tools.survey import Survey, script_of, warning_lines
from xscale.data.scripts import scripts_of, short_code
from xscale.data.text import read_lines


def of(pairs: list[tuple[str, ...]]) -> Survey:
    made = Survey(len(pairs[0]))
    for texts in pairs:
        made.add(texts)
    return made


def some_pairs(n: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    longs = [rng.randint(1, 40) for _ in range(n)]
    return [(f"{rng.randint(0, n // 2)} {'ab ' * k}", f"{i % (n // 4)} {'жда ' * k}") for i, k in enumerate(longs)]


def test_counts_by_loops() -> None:
    pairs = some_pairs(700) + [("same", "same")] * 100
    found = of(pairs).statistics()
    assert found["duplicates"] == [round(1 - len(set(side)) / 800, 4) for side in zip(*pairs, strict=True)]
    assert found["same_text"] == 100 / 800
    assert list(found["scripts"][0]) == ["LATIN"] and list(found["scripts"][1]) == ["CYRILLIC", "LATIN"]
    ratios = [len(b) / len(a) for a, b in pairs]
    for name, percent in (("p5", 5), ("median", 50), ("p95", 95)):
        assert found["length_ratio"][name] == pytest.approx(np.percentile(ratios, percent), rel=0.1)
    logs = np.log([[len(text) for text in pair] for pair in pairs])
    assert found["length_correlation"] == pytest.approx(np.corrcoef(logs.T)[0, 1], abs=0.02)
    assert set(of([(text,) for text, _ in pairs]).statistics()) == {"duplicates", "scripts"}


@pytest.mark.parametrize("hashes", [1 << 16, 400])
def test_joined_in_any_order(hashes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However records are dealt out, all surveys say the same, and none remembers more than it may."""
    monkeypatch.setattr(surveys, "HASHES", hashes)
    pairs = some_pairs(6000)
    parts = [pairs[start : start + 500] for start in range(0, len(pairs), 500)]
    results = []
    for order in (parts, parts[::-1]):
        first, *others = [of(part) for part in order]
        for other in others:
            first.join(other)
            assert max(map(len, first.seen)) <= hashes
        results.append(first.statistics())
    assert results[0] == results[1]
    whole = of(pairs).statistics()
    exact = [1 - len(set(side)) / len(side) for side in zip(*pairs, strict=True)]
    for result in (results[0], whole):
        assert result["duplicates"] == pytest.approx(exact, abs=1e-4 if hashes > 6000 else 0.04)
    assert whole["duplicates"] == results[0]["duplicates"] and whole["length_ratio"] == results[0]["length_ratio"]


def test_codes_of_three_letters() -> None:
    """FLORES-200's codes have the scripts that its names say; the codes themselves are those of ISO 639."""
    for name in FAIRSEQ_LANGUAGE_CODES:
        code, tag = name.split("_")
        assert short_code(name) == short_code(code)
        if tag != "Tfng" and name != "sat_Beng":  # no language has Tifinagh here; Santali is written in Ol Chiki
            assert scripts_of(name) and set(scripts_of(name)) <= set(scripts_of(code) or scripts_of(name)), name
    assert short_code("arb_Arab") == "ar" and short_code("zh-CN") == "zh" and short_code("ceb") == "ceb"


def test_scripts_of_languages() -> None:
    assert scripts_of("zh") == scripts_of("zh_Hant") == scripts_of("zh-Hans-CN") == ("CJK",)
    assert scripts_of("pt-BR") == scripts_of("sr_Latn") == ("LATIN",) and set(scripts_of("sr")) == {"LATIN", "CYRILLIC"}
    assert scripts_of("xx") == () and scripts_of("deu") == ("LATIN",)
    found = {
        "aÉ": "LATIN",
        "ж": "CYRILLIC",
        "中": "CJK",
        "あ": "HIRAGANA",
        "ｶー": "KATAKANA",
        "Ａ": "LATIN",
        "ह": "DEVANAGARI",
    }
    assert all(script_of(character) == script for text, script in found.items() for character in text)


def real_pairs(first: Path, second: Path, most: int) -> list[tuple[str, str]]:
    sides = [[line.strip() for _, line in islice(read_lines(path), most)] for path in (first, second)]
    return [(a, b) for a, b in zip(*sides, strict=True) if a and b]


PAIRS = {
    "multi30k/train": ("en", "de", "fr"),
    "tatoeba/en-de": ("en", "de"),
    "tatoeba/en-fr": ("en", "fr"),
    "tatoeba/en-zh": ("en", "zh"),
    "bible/bible": ("en", "de", "fr", "zh"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_real_text(name: str, real: Path) -> None:
    """None is warned of as it is; all are when the languages are swapped (of two scripts), the lines are in another
    order, or one side is the other."""
    first, *others = PAIRS[name]
    for second in others:
        paths = [real / "parallel" / f"{name}.{lang}.xz" for lang in (first, second)]
        pairs = real_pairs(*paths, 10_000)
        found, langs = of(pairs).statistics(), (first, second)
        assert not warning_lines(found, langs, len(pairs)), (found, langs)
        swapped = warning_lines(found, langs[::-1], len(pairs))
        assert bool(swapped) == (second == "zh")
        if second == "zh":
            assert f"swapped: {first} {second} would fit" in swapped[-1] and len(swapped) == 3
        order = random.Random(0).sample(range(len(pairs)), len(pairs))
        shuffled = [(a, pairs[i][1]) for (a, _), i in zip(pairs, order, strict=True)]
        (line,) = warning_lines(of(shuffled).statistics(), langs, len(shuffled))
        assert "line n of one file" in line
        mixed = [(a, a if i % 5 == 0 else b) for i, (a, b) in enumerate(pairs)]
        assert any(
            "same text on both sides" in line for line in warning_lines(of(mixed).statistics(), langs, len(mixed))
        )
        few = [pairs[i % 100] for i in range(len(pairs))]
        assert (
            sum("repeat an earlier one" in line for line in warning_lines(of(few).statistics(), langs, len(few))) == 2
        )


def test_swapped_languages_are_told(tmp_path: Path, corpus_files, capsys: pytest.CaptureFixture) -> None:
    """write_shards, index and inspect tell it alike."""
    src, tgt = corpus_files([f"This is sentence {i}" for i in range(90)], [f"这是第{i}句话" for i in range(90)])
    argv = ["pairs", "--src", str(src), "--tgt", str(tgt), "--langs", "zh", "en", "--shard_lines", "20", "--out"]
    out = tmp_path / "out"
    write_shards.main([*argv, str(out)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(lines) == 3 and "swapped: en zh" in lines[-1] and all(str(out) in line for line in lines)
    index.main([str(out)])
    assert capsys.readouterr().out.splitlines()[1:] == lines
    for indexed in (True, False):  # an index from before it had this
        fields = json.loads((out / "index.json").read_text())
        if not indexed:
            del fields["text"]
            (out / "index.json").write_text(json.dumps(fields))
        inspect.main([str(out), "--json", str(tmp_path / "j")])
        shown = capsys.readouterr().out
        assert all(line in shown for line in lines) and "most frequent words: this is sentence" in shown
        (source,) = json.loads((tmp_path / "j").read_text())["sources"]
        assert {"directory", "name", "kind", "records", "links", "text"} == set(source)
        assert source["text"]["duplicates"] == [0, 0] and len(source["text"]["warnings"]) == 3
        assert source["text"]["scripts"][0] == {"LATIN": 1.0} and source["text"]["same_text"] == 0
