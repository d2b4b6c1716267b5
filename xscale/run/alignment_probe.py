"""The words that a run's alignment scores ask for, found before step 1."""

import zipfile
from pathlib import Path

import numpy as np

from xscale import files
from xscale.eval.alignment_score import FEWEST, AlignmentProbe, find_probe, tokens_of
from xscale.run.metrics import LOG
from xscale.run.run_spec import RunSpec

TOKENS = "tokens.npz"
"""In a run's directory: the distinct tokens of each language's text."""


def probe_of(run_spec: RunSpec, out: Path) -> dict[str, AlignmentProbe]:
    """By the names of the run's dictionaries. Rank 0 only."""
    heldout, lexicons = run_spec.unseen, run_spec.lexicons + run_spec.measured
    if heldout < run_spec.recipe.data.lexicon_heldout:
        LOG.warning(
            f"data.lexicon_heldout: {run_spec.recipe.data.lexicon_heldout:g}, but model.init withheld {heldout:g} "
            f"alone; alignment/* asks for those"
        )
    tokens = language_tokens(run_spec, out, sorted({lexicon.langs[1] for lexicon in lexicons}))
    found = find_probe(lexicons, run_spec.lexicons, heldout, tokens)
    for lexicon in run_spec.measured:
        LOG.info(f"{lexicon.summary()}; it is only measured with")
    for name, probe in found.items():
        words = len(probe.withheld.queries)
        if heldout and words < FEWEST:
            LOG.warning(
                f"alignment/{name} is left out: {words} words of one token are withheld, {FEWEST} would do; give a "
                f"larger dictionary or data.lexicon_heldout"
            )
    return found


def language_tokens(run_spec: RunSpec, out: Path, languages: list[str]) -> dict[str, np.ndarray]:
    """Of these languages. Kept in the run's directory: a resume, whose data and tokenizer are the same, reads them."""
    path, tokens = out / TOKENS, {}
    if path.exists():
        try:
            tokens = dict(np.load(path))
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            LOG.info(f"{path} is damaged; the tokens of the text are counted again")
    new = [language for language in languages if language not in tokens]
    tokens |= {language: tokens_of(language, run_spec.sources, run_spec.tokenizer) for language in new}
    if new:
        with files.publish(path) as partial, partial.open("wb") as file:
            np.savez(file, **tokens)
    return tokens
