"""Computes alignment scores (Tang et al. 2022): is a word's nearest neighbour in the input embeddings its translation?

Only dictionary entries with one token on each side are used. A word's neighbour is searched by cosine among all tokens
of the other language's text. A token is never its own neighbour, although the languages share a vocabulary.

Training withholds a share of the dictionary's words from the objectives (data/lexicon.py). A word counts as withheld if
its token is in no entry that objectives read. Otherwise it counts as trained, even if some of its entries are withheld.

Shape letters: P entries of the dictionary, Q query tokens, C tokens of the other language, H width, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.corpus import Corpus
from xscale.data.lexicon import (
    Lexicon,
    distinct_token_ids_in_sample,
    load_lexicon,
    warn_if_columns_are_swapped,
    without_withheld,
)
from xscale.data.scripts import find_exact_name_or_spellings
from xscale.data.shards import Source, languages_of
from xscale.errors import LOG, UserError
from xscale.eval.model import ExportedModel, Scores
from xscale.metric_keys import MetricKey
from xscale.ranks import CpuGroup
from xscale.step.zero import gathered_weight

FEWEST = 20
"""The fewest query words for which a score is computed."""
_CHUNK = 1024


@dataclass(frozen=True)
class ProbeWords:
    """The one-token entries of a dictionary, and the tokens among which translations are searched."""

    pairs_P2: np.ndarray
    """Each row is a source token and its translation."""
    targets_C: np.ndarray
    """The ids of the tokens of the target language's text and of the dictionary's target words."""

    @property
    def distinct_queries(self) -> np.ndarray:
        """Return the distinct source tokens [Q]."""
        return np.unique(self.pairs_P2[:, 0])

    @torch.no_grad()
    def translation_accuracy(self, table_VH: Tensor) -> float | None:
        """Return the share of queries whose nearest neighbour in the embedding table is a translation; None for fewer
        than FEWEST queries."""
        if len(self.distinct_queries) < FEWEST:
            return None
        queries_Q = torch.from_numpy(self.distinct_queries).to(table_VH.device)
        targets_C = torch.from_numpy(self.targets_C).to(table_VH.device)
        rows_CH = F.normalize(table_VH[targets_C].float(), dim=-1)
        nearest: list[int] = []
        for chunk in queries_Q.split(_CHUNK):
            cosine = F.normalize(table_VH[chunk].float(), dim=-1) @ rows_CH.T
            cosine.masked_fill_(chunk[:, None] == targets_C, -2.0)
            nearest += targets_C[cosine.argmax(1)].tolist()
        entries = set(map(tuple, self.pairs_P2.tolist()))
        right = entries.intersection(zip(self.distinct_queries.tolist(), nearest, strict=True))
        return len(right) / len(nearest)


ProbesByMetric = dict[MetricKey, ProbeWords]
"""{metric: the words to score}. Each dictionary has the metric `alignment/NAME` for the words that no objective reads,
and `alignment_trained/NAME` for the words that objectives read."""


def collect_probe_words(
    lexicons: Sequence[Lexicon],
    trained_lexicons: Sequence[Lexicon],
    withheld_share: float,
    tokens_of_language: Mapping[str, np.ndarray],
) -> ProbesByMetric:
    """Return the words to score of each dictionary. Dictionaries with the same name are joined.

    trained_lexicons: the dictionaries that objectives read. withheld_share: the share of entries that objectives do not
    read. tokens_of_language: {language: ids of the tokens of its text}. Translations are searched among these tokens
    and the dictionary's own.
    """
    groups: dict[str, list[Lexicon]] = {}
    for lexicon in lexicons:
        groups.setdefault(lexicon.name, []).append(lexicon)
    probes: ProbesByMetric = {}
    for name, group in groups.items():
        pairs_P2 = np.concatenate([lexicon.single_token_pairs() for lexicon in group])
        pairs_P2 = np.unique(pairs_P2[pairs_P2[:, 0] != pairs_P2[:, 1]], axis=0)
        tokens = tokens_of_language[group[0].langs[1]]
        warn_if_columns_are_swapped(group, pairs_P2, tokens)
        targets_C = np.union1d(tokens, pairs_P2[:, 1])
        read = np.concatenate(
            [one_token_word_ids_trained_on(lexicon, withheld_share) for lexicon in (*trained_lexicons, *group)]
        )
        is_trained = np.isin(pairs_P2[:, 0], read)
        withheld = ProbeWords(pairs_P2[~is_trained], targets_C)
        probes[MetricKey("alignment", name)] = withheld
        probes[MetricKey("alignment_trained", name)] = ProbeWords(pairs_P2[is_trained], targets_C)
        if withheld_share and len(withheld.distinct_queries) < FEWEST:
            LOG.warning(
                f"the metric alignment/{name} is not measured. The metric needs {FEWEST} words of the dictionary that "
                "are single tokens and that training does not read, but there are only "
                f"{len(withheld.distinct_queries)}. Use a larger dictionary, a larger data.lexicon_heldout, or a "
                "tokenizer with a larger vocabulary"
            )
    return probes


@cache
def one_token_word_ids_trained_on(lexicon: Lexicon, withheld_share: float) -> np.ndarray:
    """Return the ids of the one-token words of a dictionary that objectives read. They read the entries that are not
    withheld and whose two sides differ."""
    ids: set[int] = set()
    for entry in zip(*without_withheld(lexicon, withheld_share).ids, strict=True):
        if entry[0] != entry[1]:
            ids.update(side[0] for side in entry if len(side) == 1)
    return np.array(sorted(ids), dtype=np.int64)


# The scores of an export


def evaluate(
    model: ExportedModel, langs: Sequence[str], sources: list[Source], lexicon_paths: list[Path]
) -> dict[str, Scores]:
    """Return {"": scores}: the alignment scores of the dictionaries of two languages, and the number of query words of
    each score.

    sources: their texts have the tokens among which translations are searched. lexicon_paths: all dictionaries that the
    model was trained with.
    """
    lexicons = [load_lexicon(path, model.tokenizer, languages_of(sources)) for path in lexicon_paths]
    measured = []
    tokens: dict[str, np.ndarray] = {}
    for lexicon in lexicons:
        source, target = lexicon.langs
        if {*find_exact_name_or_spellings(source, langs), *find_exact_name_or_spellings(target, langs)} == set(langs):
            measured.append(lexicon)
            tokens[target] = distinct_token_ids_in_sample(target, sources, model.tokenizer)
    if not measured:
        raise UserError(
            f"task alignment needs a dictionary of {' and '.join(langs)}. Write --lexicons "
            f"PATH/{'-'.join(langs)}.txt, or put the dictionary into the folder lexicon/ beside the shards"
        )
    directions = {lexicon.name: "->".join(lexicon.langs) for lexicon in measured}
    scores: Scores = {}
    for metric, words in collect_probe_words(measured, lexicons, model.lexicon_heldout, tokens).items():
        suffix = " trained" if metric.name == "alignment_trained" else ""
        scores[f"words{suffix}"] = scores.get(f"words{suffix}", 0) + len(words.distinct_queries)
        score = words.translation_accuracy(model.encoder.embeddings)
        if score is not None:
            scores[directions[metric.stream] + suffix] = score
    return {"": scores}


# The metrics of a run


def gather_probe_words_on_rank_0(
    corpus: Corpus, cpu_group: CpuGroup, note_progress: Callable[[str], None]
) -> ProbesByMetric:
    """Return the words to score of a run's dictionaries on rank 0, and {} on other ranks. All ranks call it together,
    and divide the languages among themselves."""
    lexicons = corpus.lexicons + corpus.measured
    languages = sorted({lexicon.langs[1] for lexicon in lexicons})
    counts: list[Callable[[], np.ndarray]] = []
    for language in languages:
        show_progress = partial(note_progress, f"counting tokens of {language}")
        counts.append(partial(distinct_token_ids_in_sample, language, corpus.sources, corpus.tokenizer, show_progress))
    tokens = dict(zip(languages, cpu_group.divide_work_and_gather(counts), strict=True))
    if not cpu_group.is_main:
        return {}
    return collect_probe_words(lexicons, corpus.lexicons, corpus.unseen, tokens)


def measure_alignment_on_rank_0(engine: Any, probes: ProbesByMetric) -> dict[str, float]:
    """Return {metric: alignment score of the run's embeddings} on rank 0, and {} on other ranks. All ranks call it
    together. probes: {} on other ranks than 0."""
    metrics = dict[str, float]()
    with gathered_weight(engine, engine.module.encoder.embeddings) as table:
        for metric, words in probes.items():
            score = words.translation_accuracy(table)
            if score is not None:
                metrics[str(metric)] = score
    return metrics
