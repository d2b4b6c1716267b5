"""Means over languages of results rows: over all, by script, and by whether the model was trained on the language."""

import re
from collections.abc import Collection, Mapping, Sequence

from xscale.data.scripts import scripts_of, short_code
from xscale.eval.bootstrap import Score, describe, mean
from xscale.eval.model import Scores
from xscale.eval.parallel import ENGLISH


def with_means(rows: Mapping[str, Scores], trained: Collection[str] = ()) -> dict[str, Scores]:
    """The results rows. After the rows of a variant come their means: over all languages, by script, and over trained
    and untrained languages. A mean has the numbers that all of its rows have. Means by script or by training need at
    least two groups of at least two languages. A row's name is `LANGUAGE` or `LANGUAGE VARIANT`; a path in brackets,
    which tells two texts of a language apart, is no variant."""
    variants: dict[str, list[str]] = {}
    for row in rows:
        variants.setdefault(re.sub(r" \([^)]*\)", "", row).partition(" ")[2], []).append(row)
    found: dict[str, Scores] = {}
    for variant, names in variants.items():
        found |= {name: rows[name] for name in names}
        shared = [name for name in rows[names[0]] if all(isinstance(rows[row].get(name), Score) for row in names)]
        for label, group in (groups_of(names, trained) if shared else {}).items():
            means: Scores = {name: mean([rows[row][name] for row in group]) for name in shared}
            count = count_languages(group)  # of one test set, this is the number of rows
            over = f"{count}" if count == len(group) else f"{len(group)} rows of {count}"
            found[f"mean over {over} {label} {variant}".strip()] = means
    return found


def groups_of(rows: Sequence[str], trained: Collection[str]) -> dict[str, list[str]]:
    """Name of a mean, such as `languages` -> the rows that it is over. English counts only in rows with it alone."""
    kinds: list[dict[str, list[str]]] = [{}, {}]
    for row in rows:
        languages = languages_of(row)
        scripts = {scripts_of(language) for language in languages}
        known = {short_code(language) in map(short_code, trained) for language in languages}
        if len(scripts) == 1 and len(script := min(scripts)) == 1:
            kinds[0].setdefault(f"languages in {script[0]}", []).append(row)
        if trained and len(known) == 1:
            kinds[1].setdefault("trained languages" if True in known else "languages not trained", []).append(row)
    found = {"languages": list(rows)} if len(rows) > 1 else {}
    for groups in kinds:
        large = {label: group for label, group in groups.items() if count_languages(group) > 1}
        found |= large if len(large) > 1 else {}
    return found


def languages_of(row: str) -> list[str]:
    """The languages in the name of a results row. English is one of them only if it is alone."""
    languages = re.split(r"-(?=[a-z]{2,3}(?![A-Za-z]))", row.partition(" ")[0])
    return [language for language in languages if not ENGLISH.match(language)] or languages


def count_languages(rows: Sequence[str]) -> int:
    """The number of different languages, or pairs of them, of results rows; `de-en` and `deu-eng` are one."""
    return len({tuple(map(short_code, languages_of(row))) for row in rows})


def print_means(task: str, rows: Mapping[str, Scores], trained: Collection[str] = ()) -> None:
    for row, scores in with_means(rows, trained).items():
        if row not in rows:
            print(f"{task} {row}: " + ", ".join(describe(name, value) for name, value in scores.items()))
