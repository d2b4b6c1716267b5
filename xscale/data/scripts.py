"""The scripts in which a language is written, by the language's code, for the languages of common corpora."""

import re

_LANGUAGES = {
    "LATIN": "af an ast az br bs ca ceb co cs cy da de en eo es et eu fi fil fo fr fy ga gd gl gn gsw ha haw hr ht hu "
    "ia id ig is it jv ku la lb li ln lt lv mg mi ms mt nb nds nl nn no nso nv ny oc om pl pt qu rm rn ro rw sc se sk "
    "sl sm sn so sq sr st su sv sw tk tl tn to tr ts tum uz ve vec vi wa wo xh yo zu",
    "CYRILLIC": "ab av az ba be bg ce chv cv kk ky mk mn os ru sah sr tg tt udm uk uz",
    "ARABIC": "ar arz ckb fa ks ku pa pnb ps sd ug ur uz",
    "DEVANAGARI": "awa bho brx doi gom hi ks mai mr ne new sa sat sd",
    "GREEK": "el grc",
    "HEBREW": "he iw yi",
    "BENGALI": "as bn mni",
    "GURMUKHI": "pa",
    "GUJARATI": "gu",
    "ORIYA": "or",
    "TAMIL": "ta",
    "TELUGU": "te",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "SINHALA": "si",
    "THAI": "th",
    "LAO": "lo",
    "MYANMAR": "my shn",
    "KHMER": "km",
    "TIBETAN": "bo dz",
    "GEORGIAN": "ka xmf",
    "ARMENIAN": "hy",
    "ETHIOPIC": "am ti",
    "HANGUL": "ko",
    "CJK": "cmn gan hak ja ko lzh nan wuu yue zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "MONGOLIAN": "mn",
    "THAANA": "dv",
    "OL": "sat",
}
"""Script, by the first word of its characters' Unicode names -> the codes of the languages that use it."""
_TAGS = {
    **{tag: ("CJK",) for tag in ("hans", "hant", "hani")},
    **{"latn": ("LATIN",), "cyrl": ("CYRILLIC",), "grek": ("GREEK",), "arab": ("ARABIC",), "deva": ("DEVANAGARI",)},
    **{"hebr": ("HEBREW",), "beng": ("BENGALI",), "hang": ("HANGUL",), "kore": ("HANGUL", "CJK")},
    **{"jpan": ("CJK", "HIRAGANA", "KATAKANA"), "thai": ("THAI",), "geor": ("GEORGIAN",), "armn": ("ARMENIAN",)},
}
"""ISO 15924 tag, such as the one in zh_Hant -> its scripts."""


def scripts_of(lang: str) -> tuple[str, ...]:
    """The scripts in which a language's texts may be written; () if the code is unknown."""
    code, *tags = re.split("[-_]", lang.lower())
    for tag in tags:
        if len(tag) == 4 and tag.isalpha():
            return _TAGS.get(tag, ())
    return tuple(script for script, codes in _LANGUAGES.items() if code in codes.split())
