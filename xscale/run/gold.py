"""The words that a run's alignment scores ask for, found before step 1."""

import zipfile
from pathlib import Path

import numpy as np

from xscale import files
from xscale.eval.alignment_score import FEWEST, Gold, find_gold, tokens_of
from xscale.run.job import Job
from xscale.run.metrics import LOG

TOKENS = "tokens.npz"
"""In a run's directory: the distinct tokens of each language's text."""


def gold_of(job: Job, out: Path) -> dict[str, Gold]:
    """By the names of the run's dictionaries. Rank 0 only."""
    heldout, lexicons = job.unseen, job.lexicons + job.measured
    if heldout < job.recipe.data.lexicon_heldout:
        LOG.warning(
            f"data.lexicon_heldout: {job.recipe.data.lexicon_heldout:g}, but model.init withheld {heldout:g} alone; "
            f"alignment/* asks for those"
        )
    tokens = language_tokens(job, out, sorted({lexicon.langs[1] for lexicon in lexicons}))
    found = find_gold(lexicons, job.lexicons, heldout, tokens)
    for lexicon in job.measured:
        LOG.info(f"{lexicon.summary()}; it is only measured with")
    for name, gold in found.items():
        words = len(gold.withheld.queries)
        if heldout and words < FEWEST:
            LOG.warning(
                f"alignment/{name} is left out: {words} words of one token are withheld, {FEWEST} would do; give a "
                f"larger dictionary or data.lexicon_heldout"
            )
    return found


def language_tokens(job: Job, out: Path, languages: list[str]) -> dict[str, np.ndarray]:
    """Of these languages. Kept in the run's directory: a resume, whose data and tokenizer are the same, reads them."""
    path, tokens = out / TOKENS, {}
    if path.exists():
        try:
            tokens = dict(np.load(path))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            LOG.info(f"{path} is damaged; the tokens of the text are counted again")
    new = [language for language in languages if language not in tokens]
    tokens |= {language: tokens_of(language, job.sources, job.tokenizer) for language in new}
    if new:
        with files.publish(path) as partial, partial.open("wb") as file:
            np.savez(file, **tokens)
    return tokens
