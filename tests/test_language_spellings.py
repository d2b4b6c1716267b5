"""A language has one code inside, however its name is written."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from data_tools.index import build_index
from xscale.data.lexicon import languages_in_file_name
from xscale.data.scripts import choose_language_names, find_exact_name_or_spellings, may_name_same_language, short_code
from xscale.data.sequences import Example
from xscale.data.shards import find_sources
from xscale.data.stream import covers_every_language, unify_language_names
from xscale.errors import UserError
from xscale.models.build import _initialize_language_embeddings
from xscale.objectives.contextual import _anchor_side
from xscale.run.resolve import resolve_run

SPELLINGS = {
    "ar": "ara arb arb_Arab ar-EG ar_SA",
    "cs": "ces cze ces_Latn cs-CZ cs_CZ",
    "de": "deu ger deu_Latn de-DE de_DE de-AT DE deu-Latn",
    "el": "ell gre ell_Grek el_GR",
    "en": "eng eng_Latn en-US en_GB EN",
    "es": "spa spa_Latn es-419 es_ES",
    "et": "est ekk ekk_Latn et_EE",
    "eu": "eus baq eus_Latn",
    "fa": "fas per pes pes_Arab prs_Arab fa-IR",
    "fi": "fin fin_Latn fi_FI",
    "fr": "fra fre fra_Latn fr-CA",
    "he": "heb iw heb_Hebr",
    "hi": "hin hin_Deva hi_IN",
    "id": "ind in ind_Latn",
    "ja": "jpn jpn_Jpan ja_JP",
    "ko": "kor kor_Hang ko-KR",
    "lv": "lav lvs lvs_Latn",
    "ms": "msa may zsm zsm_Latn",
    "nl": "nld dut nld_Latn",
    "no": "nor nb nob nob_Latn nb_NO no_NO",
    "pt": "por por_Latn pt-BR pt_PT",
    "ro": "ron rum ron_Latn mo",
    "ru": "rus rus_Cyrl ru_RU",
    "sq": "sqi alb als als_Latn",
    "sr": "srp srp_Cyrl sr_Latn sr@latin",
    "sw": "swa swh swh_Latn",
    "th": "tha tha_Thai th_TH",
    "tr": "tur tur_Latn tr-TR",
    "ur": "urd urd_Arab ur-PK",
    "zh": "zho chi cmn zh-Hans zh-Hant zho_Hans zho_Hant cmn_Hans zh-CN zh_TW zho_simpl zh-Hans-CN",
}
"""Two-letter code -> the public spellings of a language: FLORES-200 and FLORES-101, NLLB, HPLT, GlotLID, OPUS, gettext,
BCP 47."""
EVERY = [(code, name) for code, names in SPELLINGS.items() for name in (code, *names.split())]


@pytest.mark.parametrize(("code", "name"), EVERY)
def test_every_spelling_has_the_two_letter_code(code: str, name: str) -> None:
    assert short_code(name) == code
    assert may_name_same_language(code, name)


@pytest.mark.parametrize("name", ["arz", "yue", "zh-yue", "zh_min_nan", "nn", "ckb", "azb", "xx", "l01", "ceb_Latn"])
def test_other_languages_have_their_own_code(name: str) -> None:
    assert short_code(name) not in SPELLINGS


def test_names_that_say_a_variant_are_other_languages_than_those_that_say_another() -> None:
    apart = [("zh-Hans", "zh-Hant"), ("zh_CN", "zh-TW"), ("pt-BR", "pt-PT"), ("pes", "prs"), ("sr_Latn", "sr_Cyrl")]
    assert not any(may_name_same_language(a, b) for a, b in apart)
    assert find_exact_name_or_spellings("zh", ["en", "zh-Hans", "zh-Hant"]) == ["zh-Hans", "zh-Hant"]
    assert find_exact_name_or_spellings("zho_Hant", ["en", "zh-Hans", "zh-TW"]) == ["zh-TW"]
    assert find_exact_name_or_spellings("de", ["de", "deu"]) == ["de"]


def test_a_language_gets_one_name() -> None:
    assert choose_language_names(["deu_Latn", "de", "eng"]) == {"de": "de", "deu_Latn": "de", "eng": "eng"}
    assert choose_language_names(["de"], preferred=["deu_Latn"]) == {"deu_Latn": "deu_Latn", "de": "deu_Latn"}
    apart = ["zh", "zh-Hans", "zh-Hant"]
    assert choose_language_names(apart) == {name: name for name in apart}


# Every place of xscale that compares languages


TINY = {"vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4,
        "max_position_embeddings": 8, "type_vocab_size": 3}  # fmt: skip


@pytest.mark.parametrize(("code", "name"), EVERY)
def test_recipes_dictionaries_and_anchors_know_every_spelling(code: str, name: str) -> None:
    for asked, written in ((code, name), (name, code)):
        assert covers_every_language([asked], (written,))
        assert covers_every_language([f"{asked}-xx"], ("xx", written)) and covers_every_language(
            ["xx", asked], (written, "xx")
        )
        assert not covers_every_language(["yy"], (written,)) and not covers_every_language(
            [f"{asked}-yy"], (written, "xx")
        )
        assert not covers_every_language([f"{asked}-xx"], (written,))
        assert languages_in_file_name(Path(f"{asked}-xx.txt"), ["xx", written, "yy"]) == (written, "xx")
        pair = Example(("xx", written), ([1], [2]), None, np.uint64(0))
        assert _anchor_side(pair, asked) == 1
        lm = BertForMaskedLM(BertConfig(**TINY))
        lm.config.xscale = {"language_embeddings": True, "languages": ["neutral", "xx", asked]}
        before = lm.bert.embeddings.token_type_embeddings.weight.detach().clone()
        assert _initialize_language_embeddings(lm, [written, "yy"], True) == [written, "yy", "xx"]
        now = lm.bert.embeddings.token_type_embeddings.weight
        assert torch.equal(now, before[[0, 2, 0, 1]])


def write_source(folder: Path, records: list[dict]) -> None:
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    with tarfile.open(folder / "x-000000.tar", "w") as tar:
        member = tarfile.TarInfo("00000000.jsonl")
        member.size = len(lines)
        tar.addfile(member, io.BytesIO(lines))
    build_index(folder, None, {"tool": "a test"})


def test_sources_in_several_spellings_are_one_language(demo: Path, tmp_path: Path) -> None:
    """Pairs in eng_Latn and de, sentences in en and deu_Latn, a dictionary eng-ger.txt: two languages, named en, de."""
    pairs = next(source for source in find_sources([demo]) if source.langs == ("en", "xx"))
    records = [pairs.read(0, number) for number in range(40)]
    as_pairs = [{"key": r.key, "langs": ["eng_Latn", "de"], "texts": r.texts, "links": r.links} for r in records]
    write_source(tmp_path / "data/pairs", as_pairs)
    for side, name in ((0, "en"), (1, "deu_Latn")):
        sentences = [{"key": r.key, "langs": [name], "texts": [r.texts[side]]} for r in records]
        write_source(tmp_path / "data" / name, sentences)
    (tmp_path / "data/lexicon").mkdir()
    (tmp_path / "data/lexicon/eng-ger.txt").write_text((demo / "lexicon/en-xx.txt").read_text())
    (tmp_path / "data/tokenizer").symlink_to(demo / "tokenizer")
    sets = ["data.workers=0", "data.languages=[eng, ger]", "streams.mlm.languages=[ger]"]
    _, corpus = resolve_run("xlm", sets, [tmp_path / "data"])
    assert corpus.languages == ["de", "en"]
    streams = {spec.name: {corpus.sources[s].langs_name for s in spec.sources} for spec in corpus.streams.last}
    assert streams == {"mlm": {"de"}, "tlm": {"en-de"}}
    assert [lexicon.name for lexicon in corpus.measured] == ["en-de"]
    assert {corpus.sources[s].read(0, 3).langs for s in range(3)} == {("de",), ("en",), ("en", "de")}


def test_a_pair_of_one_language_is_refused(tmp_path: Path) -> None:
    write_source(tmp_path / "pairs", [{"key": "1", "langs": ["de", "deu_Latn"], "texts": ["a", "b"]}])
    with pytest.raises(UserError, match=r"pairs: de and deu_Latn are two names of one language.*--langs"):
        unify_language_names(find_sources([tmp_path / "pairs"]))
