"""A language has one code inside, however its name is written."""

import pytest

from xscale.data.scripts import names_of, one_name_each, same_language, scripts_of, short_code

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
    assert scripts_of(name) and set(scripts_of(name)) <= {*scripts_of(code), "LATIN"}
    assert same_language(code, name)


@pytest.mark.parametrize("name", ["arz", "yue", "zh-yue", "zh_min_nan", "nn", "ckb", "azb", "xx", "l01", "ceb_Latn"])
def test_other_languages_have_their_own_code(name: str) -> None:
    assert short_code(name) not in SPELLINGS


def test_names_that_say_a_variant_are_other_languages_than_those_that_say_another() -> None:
    apart = [("zh-Hans", "zh-Hant"), ("zh_CN", "zh-TW"), ("pt-BR", "pt-PT"), ("pes", "prs"), ("sr_Latn", "sr_Cyrl")]
    assert not any(same_language(a, b) for a, b in apart)
    assert names_of("zh", ["en", "zh-Hans", "zh-Hant"]) == ["zh-Hans", "zh-Hant"]
    assert names_of("zho_Hant", ["en", "zh-Hans", "zh-TW"]) == ["zh-TW"]
    assert names_of("de", ["de", "deu"]) == ["de"]


def test_a_language_gets_one_name() -> None:
    assert one_name_each(["deu_Latn", "de", "eng"]) == {"de": "de", "deu_Latn": "de", "eng": "eng"}
    assert one_name_each(["de"], preferred=["deu_Latn"]) == {"deu_Latn": "deu_Latn", "de": "deu_Latn"}
    apart = ["zh", "zh-Hans", "zh-Hant"]
    assert one_name_each(apart) == {name: name for name in apart}
