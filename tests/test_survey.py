"""What is said of the texts of a source, against real text."""

import json
import random
from itertools import islice
from pathlib import Path

import pytest
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from data_tools import inspect, write_shards
from data_tools.survey import FEWEST, script_of, warning_lines
from tests.conftest import SAMPLE
from xscale.data.scripts import scripts_of, short_code
from xscale.data.text import read_lines


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
    first, *others = PAIRS[name]
    for second in others:
        paths = [real / "parallel" / f"{name}.{lang}.xz" for lang in (first, second)]
        check_warnings((first, second), real_pairs(*paths, 10_000))


@pytest.mark.parametrize("second", ["de", "es", "fr", "zh"])
def test_sample(second: str) -> None:
    check_warnings(("en", second), real_pairs(SAMPLE / "udhr.en", SAMPLE / f"udhr.{second}", 24))


def check_warnings(langs: tuple[str, str], pairs: list[tuple[str, str]]) -> None:
    """None is warned of as it is; all are when the languages are swapped (of two scripts), the lines are in another
    order, or one side is the other."""
    first, second = langs
    assert not warning_lines(langs, pairs), langs
    swapped = warning_lines(langs[::-1], pairs)
    assert bool(swapped) == (second == "zh")
    if second == "zh":
        assert f"swapped: {first} {second} would fit" in swapped[-1] and len(swapped) == 3
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    shuffled = [(a, pairs[i][1]) for (a, _), i in zip(pairs, order, strict=True)]
    if len(pairs) >= FEWEST:
        (line,) = warning_lines(langs, shuffled)
        assert "line n of one file" in line
    mixed = [(a, a if i % 5 == 0 else b) for i, (a, b) in enumerate(pairs)]
    assert any("same text on both sides" in line for line in warning_lines(langs, mixed))
    few = [pairs[i % min(100, len(pairs) // 3)] for i in range(len(pairs))]
    assert sum("repeat an earlier one" in line for line in warning_lines(langs, few)) == 2


def test_swapped_languages_are_told(tmp_path: Path, corpus_files, capsys: pytest.CaptureFixture) -> None:
    """write_shards and inspect tell it alike."""
    src, tgt = corpus_files([f"This is sentence {i}" for i in range(90)], [f"这是第{i}句话" for i in range(90)])
    out = tmp_path / "out"
    write_shards.main(["pairs", "--src", str(src), "--tgt", str(tgt), "--langs", "zh", "en", "--out", str(out)])
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    lines = [line for line in warned if "py3langid" not in line]
    assert len(lines) == 3 and "swapped: en zh" in lines[-1] and all(str(out) in line for line in lines)
    inspect.main([str(out), "--json", str(tmp_path / "j")])
    shown = capsys.readouterr().out
    assert all(line in shown for line in lines)
    (source,) = json.loads((tmp_path / "j").read_text())["sources"]
    assert set(source) == {"directory", "name", "kind", "records", "links"}
