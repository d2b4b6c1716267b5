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
    "CJK": "gan hak ja ko lzh nan wuu yue zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "MONGOLIAN": "mn",
    "THAANA": "dv",
    "OL": "sat",
}
"""Script (the first word of its characters' names in Unicode) -> the codes of the languages that use the script."""
_TAGS = {
    **{tag: ("CJK",) for tag in ("hans", "hant", "hani")},
    **{"latn": ("LATIN",), "cyrl": ("CYRILLIC",), "grek": ("GREEK",), "arab": ("ARABIC",), "deva": ("DEVANAGARI",)},
    **{"hebr": ("HEBREW",), "beng": ("BENGALI",), "hang": ("HANGUL",), "kore": ("HANGUL", "CJK")},
    **{"jpan": ("CJK", "HIRAGANA", "KATAKANA"), "thai": ("THAI",), "geor": ("GEORGIAN",), "armn": ("ARMENIAN",)},
}
"""ISO 15924 tag in lower case, such as "hant" for zh_Hant -> the scripts that it stands for."""
_LONG_CODES = (
    "ab abk af afr am amh an arg ar ara arb as asm av ava az aze azj ba bak be bel bg bul bn ben bo bod br bre bs bos "
    "ca cat ce che co cos cs ces cv chv cy cym da dan de deu dv div dz dzo el ell en eng eo epo es spa et est ekk eu "
    "eus fa fas pes fi fin fo fao fr fra fy fry ga gle gd gla gl glg gn grn gu guj ha hau he heb hi hin hr hrv ht hat "
    "hu hun hy hye ia ina id ind ig ibo is isl it ita ja jpn jv jav ka kat kk kaz km khm kn kan ko kor ks kas ku kur "
    "kmr ky kir la lat lb ltz li lim ln lin lo lao lt lit lv lav lvs mg mlg plt mi mri mk mkd ml mal mn mon khk mr "
    "mar ms msa zsm mt mlt my mya nb nob ne nep npi nl nld nn nno no nor nv nav ny nya oc oci om orm gaz or ori ory "
    "os oss pa pan pl pol ps pus pbt pt por qu que rm roh rn run ro ron ru rus rw kin sa san sc srd sd snd se sme si "
    "sin sk slk sl slv sm smo sn sna so som sq sqi als sr srp st sot su sun sv swe sw swa swh ta tam te tel tg tgk th "
    "tha ti tir tk tuk tl tgl tn tsn to ton tr tur ts tso tt tat ug uig uk ukr ur urd uz uzb uzn ve ven vi vie wa wln "
    "wo wol xh xho yi yid ydd yo yor zh zho cmn zu zul"
)
"""Codes of two letters (ISO 639-1), each followed by the codes of three letters (ISO 639-3) of the same language."""
_SHORT_CODES: dict[str, str] = {
    long: short for short, of_short in re.findall(r"\b(\w\w)((?: \w{3})+)", _LONG_CODES) for long in of_short.split()
}


def short_code(lang: str) -> str:
    """Return a language's two-letter code, if it has one, from any code: "de" for de, deu, deu_Latn and de-AT."""
    code = re.split("[-_]", lang.lower())[0]
    return _SHORT_CODES.get(code, code)


def spelling_key(lang: str) -> str:
    """Return a key that is equal for a language's names that differ in case, in "-" and "_", or in code length."""
    code, *tags = re.split("[-_]", lang.lower())
    return "-".join([short_code(code), *tags])


def scripts_of(lang: str) -> tuple[str, ...]:
    """Return the scripts in which a language may be written, by the code's tag if it has one; () if it is unknown."""
    for tag in re.split("[-_]", lang.lower())[1:]:
        if tag in _TAGS:
            return _TAGS[tag]
    return tuple(script for script, codes in _LANGUAGES.items() if short_code(lang) in codes.split())
