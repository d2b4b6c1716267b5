"""Averages results rows over languages: over all, by script, and by whether the model was trained on the language."""

import re
from collections.abc import Collection, Mapping, Sequence

from xscale.data.scripts import scripts_of, short_code
from xscale.eval.bootstrap import Score, format_score, mean
from xscale.eval.model import Scores
from xscale.eval.parallel import ENGLISH


def with_means(rows: Mapping[str, Scores], trained: Collection[str] = ()) -> dict[str, Scores]:
    """Return the results rows, and after the rows of each variant their means: over all languages, by script, and over
    trained and untrained languages. A mean is given for scores that all its rows have. Means by script or by training
    need at least two groups of at least two languages.

    rows: {name: scores}; a name is `LANGUAGE` or `LANGUAGE VARIANT`, and may have a path in brackets, which tells two
    texts of a language apart. trained: the languages that the model was trained on.
    """
    variants: dict[str, list[str]] = {}
    for row in rows:
        variants.setdefault(re.sub(r" \([^)]*\)", "", row).partition(" ")[2], []).append(row)
    results: dict[str, Scores] = {}
    for variant, names in variants.items():
        results |= {name: rows[name] for name in names}
        shared = [name for name in rows[names[0]] if all(isinstance(rows[row].get(name), Score) for row in names)]
        for label, group in (group_rows(names, trained) if shared else {}).items():
            means: Scores = {name: mean([rows[row][name] for row in group]) for name in shared}
            count = count_languages(group)  # less than the number of rows if there are several test sets
            over = f"{count}" if count == len(group) else f"{len(group)} rows of {count}"
            results[f"mean over {over} {label} {variant}".strip()] = means
    return results


def group_rows(rows: Sequence[str], trained: Collection[str]) -> dict[str, list[str]]:
    """Return {what a mean is over, such as `languages in Latn`: names of its rows}."""
    by_script: dict[str, list[str]] = {}
    by_training: dict[str, list[str]] = {}
    for row in rows:
        languages = row_languages(row)
        scripts = {scripts_of(language) for language in languages}
        known = {short_code(language) in map(short_code, trained) for language in languages}
        if len(scripts) == 1 and len(script := min(scripts)) == 1:
            by_script.setdefault(f"languages in {script[0]}", []).append(row)
        if trained and len(known) == 1:
            by_training.setdefault("trained languages" if True in known else "languages not trained", []).append(row)
    groups = {"languages": list(rows)} if len(rows) > 1 else {}
    for candidates in (by_script, by_training):
        large = {label: group for label, group in candidates.items() if count_languages(group) > 1}
        groups |= large if len(large) > 1 else {}
    return groups


def row_languages(row: str) -> list[str]:
    """Return the languages in a results row's name, without English unless it is alone: [`de`] for row `de-en`."""
    languages = re.split(r"-(?=[a-z]{2,3}(?![A-Za-z]))", row.partition(" ")[0])
    return [language for language in languages if not ENGLISH.match(language)] or languages


def count_languages(rows: Sequence[str]) -> int:
    """Return the number of different languages or pairs in the names of results rows; `de-en` and `deu-eng` are one."""
    return len({tuple(map(short_code, row_languages(row))) for row in rows})


def print_means(task: str, rows: Mapping[str, Scores], trained: Collection[str] = ()) -> None:
    for row, scores in with_means(rows, trained).items():
        if row not in rows:
            print(f"{task} {row}: " + ", ".join(format_score(name, value) for name, value in scores.items()))
