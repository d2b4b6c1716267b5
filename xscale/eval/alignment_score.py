"""Alignment score (Tang et al. 2022): is a word's nearest neighbour in the input embeddings its translation?

The words are from dictionary entries with one token on each side. The neighbour is the nearest by cosine among all
tokens of the other language's text. A token is not its own neighbour: "Hand" does not translate "Hand" if the languages
share a vocabulary.

A word counts as withheld if its token is in no entry that objectives read (data/lexicon.py withholds words), and as
trained otherwise, even if some of its entries are withheld.

Shape letters: P entries of the dictionary, Q query tokens, C tokens of the other language, H width, V vocabulary.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.lexicon import Lexicon, load_lexicon
from xscale.data.sample import texts_of
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.model import Exported

FEWEST = 20
"""No score is computed for fewer words than this."""
_CHUNK = 1024


@dataclass(frozen=True)
class ProbeWords:
    """The query words of a dictionary, and the tokens among which their translations are searched."""

    pairs_P2: np.ndarray
    """Each row is a source token and its translation."""
    targets_C: np.ndarray
    """The target language's tokens."""

    @torch.no_grad()
    def score(self, table_VH: Tensor) -> float | None:
        """The share of source tokens whose nearest neighbour is a translation; None for fewer than FEWEST of them."""
        if len(self.queries) < FEWEST:
            return None
        queries_Q, targets_C = (torch.from_numpy(ids).to(table_VH.device) for ids in (self.queries, self.targets_C))
        rows_CH = F.normalize(table_VH[targets_C].float(), dim=-1)
        nearest = []
        for chunk in queries_Q.split(_CHUNK):
            cosine = F.normalize(table_VH[chunk].float(), dim=-1) @ rows_CH.T
            cosine.masked_fill_(chunk[:, None] == targets_C, -2.0)
            nearest += targets_C[cosine.argmax(1)].tolist()
        probe = set(map(tuple, self.pairs_P2.tolist()))
        return sum(pair in probe for pair in zip(self.queries.tolist(), nearest, strict=True)) / len(nearest)

    @property
    def queries(self) -> np.ndarray:
        return np.unique(self.pairs_P2[:, 0])


AlignmentProbe = dict[str, ProbeWords]
"""A dictionary's words in one direction: "withheld", which no objective reads, and "trained", which objectives read."""


def evaluate(
    model: Exported, source: Source, sources: list[Source], paths: list[Path], heldout: float
) -> dict[str, float]:
    """The scores of the dictionaries of the source's two languages, and the numbers of query words.

    sources: the sources in whose text translations are searched. paths: all dictionaries that the model was trained
    with. heldout: the share of the dictionaries' words that training withheld.
    """
    languages = {language for of_text in sources for language in of_text.langs}
    lexicons = [load_lexicon(path, model.tokenizer, languages) for path in paths]
    of_pair = [lexicon for lexicon in lexicons if set(lexicon.langs) == set(source.langs)]
    if not of_pair:
        raise UserError(
            f"task alignment needs a dictionary of {' and '.join(source.langs)}: --lexicons "
            f"PATH/{'-'.join(source.langs)}.txt, or put it into lexicon/ beside the shards"
        )
    tokens = {language: tokens_of(language, sources, model.tokenizer) for language in source.langs}
    scores: dict[str, float] = {}
    directions = {lexicon.name: "->".join(lexicon.langs) for lexicon in of_pair}
    for name, probe in find_probe(of_pair, lexicons, heldout, tokens).items():
        for kind, words in probe.items():
            count, score = len(words.queries), words.score(model.encoder.embeddings)
            suffix = "" if kind == "withheld" else f" {kind}"
            if score is not None:
                scores[directions[name] + suffix] = score
            elif count:
                few = f"{count} words of one token {kind}, {FEWEST} would do"
                print(f"alignment {name}: no score for {few}; a tokenizer with more whole words helps", file=sys.stderr)
            scores[f"words{suffix}"] = scores.get(f"words{suffix}", 0) + count
    return scores


def find_probe(
    lexicons: Sequence[Lexicon], read: Sequence[Lexicon], heldout: float, tokens: Mapping[str, np.ndarray]
) -> dict[str, AlignmentProbe]:
    """Name of a dictionary -> its probe. Dictionaries with the same name are joined.

    read: the dictionaries that objectives read. heldout: the withheld share of the words of every dictionary. tokens:
    the tokens of each language's text, among which translations are searched; the dictionary's tokens are added.
    """
    seen = {lexicon: trained_tokens(lexicon, heldout) for lexicon in {*read, *lexicons}}
    found = {}
    for name in dict.fromkeys(lexicon.name for lexicon in lexicons):
        same = [lexicon for lexicon in lexicons if lexicon.name == name]
        pairs = np.concatenate([lexicon.single() for lexicon in same])
        pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
        candidates = np.union1d(tokens[same[0].langs[1]], pairs[:, 1])
        trained = np.isin(pairs[:, 0], np.concatenate([seen[lexicon] for lexicon in (*read, *same)]))
        of_kind = {"withheld": pairs[~trained], "trained": pairs[trained]}
        found[name] = {kind: ProbeWords(words_P2, candidates) for kind, words_P2 in of_kind.items()}
    return found


def trained_tokens(lexicon: Lexicon, heldout: float) -> np.ndarray:
    """The tokens of one-token words in entries that are not withheld and whose sides differ."""
    entries = zip(*lexicon.without_withheld(heldout).ids, strict=True)
    found = {side[0] for a, b in entries if a != b for side in (a, b) if len(side) == 1}
    return np.array(sorted(found), dtype=np.int64)


def tokens_of(
    language: str,
    sources: list[Source],
    tokenizer: Tokenizer,
    part: int = 0,
    parts: int = 1,
    note: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """The distinct token ids in a sample (data/sample.py) of a language's text, over all sources that contain it. part:
    the part of the sample that is read, of `parts`. note: a function that is called as the work goes on."""
    counted = np.zeros(tokenizer.vocab_size, dtype=bool)
    for texts in texts_of(language, sources, part=part, parts=parts):
        note()
        for ids in tokenizer.encode(texts):
            counted[ids] = True
    return np.flatnonzero(counted & ~tokenizer.is_special)
