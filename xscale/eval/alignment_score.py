"""Alignment score (Tang et al. 2022): is a word's nearest neighbour in the input embeddings its translation?

By cosine, among all tokens of the other language, as the words of a dictionary that are one token on either side.
A token is not its own neighbour: "Hand" is no translation of "Hand" where the languages share a vocabulary.

Shape letters: P entries of the dictionary, Q tokens asked for, C tokens of the other language, H width, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.lexicon import Lexicon, load_lexicon, pair_of
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.model import Exported

SAMPLE = 5000
"""Records of each source from whose text the tokens of a language are collected."""
_CHUNK = 1024


@dataclass(frozen=True)
class WordPairs:
    """What a score is measured with: (source token, its translation) [P, 2] and the target language's tokens [C]."""

    pairs_P2: np.ndarray
    targets_C: np.ndarray

    @torch.no_grad()
    def score(self, table_VH: Tensor) -> float:
        """Share of the source tokens whose nearest neighbour is a translation; 0 where there is no entry."""
        queries_Q, targets_C = (torch.from_numpy(ids).to(table_VH.device) for ids in (self.queries, self.targets_C))
        rows_CH = F.normalize(table_VH[targets_C].float(), dim=-1)
        nearest = []
        for chunk in queries_Q.split(_CHUNK):
            cosine = F.normalize(table_VH[chunk].float(), dim=-1) @ rows_CH.T
            cosine.masked_fill_(chunk[:, None] == targets_C, -2.0)
            nearest += targets_C[cosine.argmax(1)].tolist()
        gold = set(map(tuple, self.pairs_P2.tolist()))
        return sum(pair in gold for pair in zip(self.queries.tolist(), nearest, strict=True)) / max(len(nearest), 1)

    @property
    def queries(self) -> np.ndarray:
        return np.unique(self.pairs_P2[:, 0])


def evaluate(model: Exported, source: Source, lexicons: list[Path]) -> dict[str, float]:
    """Score of each dictionary of the source's two languages, and how many tokens were asked for."""
    scores = {}
    for path in lexicons:
        if set(pair_of(path)) == set(source.langs):
            gold = word_pairs(load_lexicon(path, model.tokenizer), [source], model.tokenizer)
            scores["->".join(pair_of(path))] = gold.score(model.encoder.embeddings)
            scores["words"] = scores.get("words", 0) + len(gold.queries)
    if not scores:
        raise UserError(
            f"task alignment needs a dictionary of {' and '.join(source.langs)}: --lexicons "
            f"PATH/{'-'.join(source.langs)}.txt, or put it into lexicon/ beside the shards"
        )
    return scores


def word_pairs(lexicon: Lexicon, sources: list[Source], tokenizer: Tokenizer) -> WordPairs:
    """Of the dictionary's direction. The other language's tokens are those of its text, and of the dictionary."""
    pairs = lexicon.single()
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    seen = tokens_of(lexicon.langs[1], sources, tokenizer)
    return WordPairs(pairs, np.union1d(seen, pairs[:, 1]))


def tokens_of(language: str, sources: list[Source], tokenizer: Tokenizer) -> np.ndarray:
    """Distinct ids in the first records of every source that has the language."""
    sentences = [
        source.read(0, record).texts[source.langs.index(language)]
        for source in sources
        if language in source.langs
        for record in range(min(SAMPLE, int(source.counts[0])))
    ]
    found = np.unique(np.array([token for ids in tokenizer.encode(sentences) for token in ids], dtype=np.int64))
    return found[~tokenizer.is_special[found]]
