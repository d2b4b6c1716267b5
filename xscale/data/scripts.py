"""Names of languages: finds the code that all spellings of a language have in common."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

_SPELLINGS = (
    "aa aar, ab abk, ae ave, af afr, ak aka, am amh, an arg, ar ara, as asm, av ava, ay aym, az aze, ba bak, be bel, "
    "bg bul, bi bis, bm bam, bn ben, bo bod tib, br bre, bs bos, ca cat, ce che, ch cha, co cos, cr cre, cs ces cze, "
    "cu chu, cv chv, cy cym wel, da dan, de deu ger, dv div, dz dzo, ee ewe, el ell gre, en eng, eo epo, es spa, et "
    "est, eu eus baq, fa fas per, ff ful, fi fin, fj fij, fo fao, fr fra fre, fy fry, ga gle, gd gla, gl glg, gn grn, "
    "gu guj, gv glv, ha hau, he heb iw, hi hin, ho hmo, hr hrv scr, ht hat, hu hun, hy hye arm, hz her, ia ina, id "
    "ind in, ie ile, ig ibo, ii iii, ik ipk, io ido, is isl ice, it ita, iu iku, ja jpn, jv jav jw, ka kat geo, kg "
    "kon, ki kik, kj kua, kk kaz, kl kal, km khm, kn kan, ko kor, kr kau, ks kas, ku kur, kv kom, kw cor, ky kir, la "
    "lat, lb ltz, lg lug, li lim, ln lin, lo lao, lt lit, lu lub, lv lav, mg mlg, mh mah, mi mri mao, mk mkd mac, ml "
    "mal, mn mon, mr mar, ms msa may, mt mlt, my mya bur, na nau, nb nob, nd nde, ne nep, ng ndo, nl nld dut, nn nno, "
    "no nor, nr nbl, nv nav, ny nya, oc oci, oj oji, om orm, or ori, os oss, pa pan, pi pli, pl pol, ps pus, pt por, "
    "qu que, rm roh, rn run, ro ron rum mo mol, ru rus, rw kin, sa san, sc srd, sd snd, se sme, sg sag, sh hbs, si "
    "sin, sk slk slo, sl slv, sm smo, sn sna, so som, sq sqi alb, sr srp scc, ss ssw, st sot, su sun, sv swe, sw swa, "
    "ta tam, te tel, tg tgk, th tha, ti tir, tk tuk, tl tgl fil, tn tsn, to ton, tr tur, ts tso, tt tat, tw twi, ty "
    "tah, ug uig, uk ukr, ur urd, uz uzb, ve ven, vi vie, vo vol, wa wln, wo wol, xh xho, yi yid ji, yo yor, za zha, "
    "zh zho chi, zu zul"
)
"""Two-letter codes of ISO 639-1. Each is followed by the other codes of the language: those of ISO 639-2 and 639-3
(deu, ger), and old ones (iw)."""
_MEMBERS = (
    "ar arb, ay ayr, az azj, et ekk, fa pes prs, ff fuv, gn gug, iu ike, kg kng, kr knc, ku kmr, kv kpv, lv lvs, mg "
    "plt, mn khk, ms zsm, ne npi, no nb, om gaz, or ory, ps pbt pbu, qu quy quz, sc src, sq als, sw swh, uz uzn, "
    "yi ydd, zh cmn"
)
"""Two-letter codes of macrolanguages. Each is followed by the codes of the members that corpora mean by it: CLDR's
aliases (arb for Arabic, but not arz, Egyptian Arabic), those of FLORES-200, and Norwegian Bokmål. Nynorsk remains
nn."""
_COMPOUNDS = {"zh-yue": "yue", "zh-min-nan": "nan", "zh-nan": "nan", "zh-classical": "lzh", "zh-wuu": "wuu"}
"""Names of Wikipedia and BCP 47 whose first part is the code of another language -> the language's code."""
_SCRIPT_NAMES = {"simpl": "hans", "trad": "hant", "rom": "latn", "latin": "latn", "cyrillic": "cyrl"}
"""Other names of scripts, as in zho_simpl (FLORES-101), hi_rom (CC-100) and sr@latin -> their tags in ISO 15924."""
_CHINESE_SCRIPTS = {"cn": "hans", "sg": "hans", "tw": "hant", "hk": "hant", "mo": "hant"}
"""Region -> the script in which Chinese is written there."""


_NAME = re.compile(r"\w+(-\w+)*")


def check_language_name(name: str) -> None:
    """Raise ValueError for a name that files cannot have, and for a word such as german, which has no common code with
    de. Invented names of up to three letters, or with a digit, are allowed."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not the name of a language. Such a name has only letters, digits and _, with single hyphens "
            "between these characters, as in zh-Hant. Correct the name"
        )
    if len(name) > 3 and name.isalpha():
        raise ValueError(
            f"{name!r} is not a language code. Write a code of two or three letters, such as de, eng_Latn or zh-Hans. "
            f"If the language has no code, write a name with a digit, such as {name}1"
        )


def _map_others_to_first_code(groups_of_codes: str) -> dict[str, str]:
    """Return {other code: first code of its group}. groups_of_codes: separated by commas."""
    first_codes = {}
    for group in groups_of_codes.split(", "):
        first, *others = group.split()
        first_codes.update(dict.fromkeys(others, first))
    return first_codes


_CODE_OF_SPELLING = _map_others_to_first_code(_SPELLINGS)
_CODE_OF_MEMBER = _map_others_to_first_code(_MEMBERS)


@dataclass(frozen=True)
class LanguageTag:
    """The parts of a language's name, such as zh-Hant-TW or prs_Arab."""

    code: str
    """The two-letter code; if the language has none, the code in the name, in lower case."""
    member: str = ""
    """The code in the name if it is that of a member of a macrolanguage: prs, whose `code` is fa."""
    script: str = ""
    """ISO 15924 tag in lower case, such as "hant"."""
    region: str = ""
    """ISO 3166 code or UN number in lower case, such as "tw" or "419"."""


@lru_cache(maxsize=1 << 12)
def parse_language(lang: str) -> LanguageTag:
    """Return the parts of a language's name, as FLORES (deu_Latn), BCP 47 (de-AT) or gettext (sr@latin) write it."""
    parts = re.split("[-_@.]", lang.lower())
    code = _CODE_OF_SPELLING.get(parts[0], parts[0])
    for name, language in _COMPOUNDS.items():
        if "-".join([code, *parts[1:]]).startswith(name):
            return LanguageTag(language)
    subtags = [_SCRIPT_NAMES.get(part, part) for part in parts[1:]]
    script = next((tag for tag in subtags if len(tag) == 4 and tag.isalpha()), "")
    region = next((tag for tag in subtags if re.fullmatch(r"[a-z]{2}|\d{3}", tag)), "")
    member = code if code in _CODE_OF_MEMBER else ""
    code = _CODE_OF_MEMBER.get(code, code)
    if code == "zh":
        script = script or _CHINESE_SCRIPTS.get(region, "")
    return LanguageTag(code, member, script, region)


def short_code(lang: str) -> str:
    """Return the two-letter code of a language, if it has one, from any of its names: "de" for de, deu, ger, deu_Latn
    and de-AT, "zh" for zho, cmn and zh-Hans, "fa" for pes and prs, "no" for nb and nob.

    Properties of a language are looked up by this code. Files and reports have the name that the user gave.
    """
    return parse_language(lang).code


def may_name_same_language(first_name: str, second_name: str) -> bool:
    """Return True if two names mean one language, such as de and deu_Latn. They mean two languages if both have a
    script, a region or a member of a macrolanguage, and these differ: zh-Hans and zh-Hant, pt-BR and pt-PT, pes and
    prs."""
    first = parse_language(first_name)
    second = parse_language(second_name)
    if first.code != second.code:
        return False
    for part in ("member", "script", "region"):
        first_part = getattr(first, part)
        second_part = getattr(second, part)
        if first_part and second_part and first_part != second_part:
            return False
    return True


def normalised_code_and_tags(lang: str) -> str:
    """Return "de-latn" for deu_Latn: a key that is the same for names of a language that differ in case, in "-" and
    "_", or in the length of the code."""
    _, *tags = re.split("[-_]", lang.lower())
    return "-".join([short_code(lang), *tags])


def find_exact_name_or_spellings(language: str, names: Collection[str]) -> list[str]:
    """Return the spellings of a language among `names`: only `language` itself if it is among them, or else all
    others."""
    if language in names:
        return [language]
    return [name for name in names if may_name_same_language(language, name)]


def choose_language_names(names: Iterable[str], preferred: Iterable[str] = ()) -> dict[str, str]:
    """Return {name: the chosen name of its language}: the first of `preferred` that means the language, or else the
    shortest of `names`. A code together with several of its variants, such as zh with zh-Hans and zh-Hant, are several
    languages, and each keeps its name."""
    order = [*dict.fromkeys(preferred), *sorted(set(names), key=lambda name: (len(name), name))]
    by_code: dict[str, list[str]] = {}
    for name in dict.fromkeys(order):
        by_code.setdefault(short_code(name), []).append(name)
    chosen = {}
    for spellings in by_code.values():
        is_one = all(may_name_same_language(a, b) for a, b in combinations(spellings, 2))
        for name in spellings:
            chosen[name] = spellings[0] if is_one else name
    return chosen
