"""Measures bilingual lexicon induction (Lample et al. 2018): are a word's nearest neighbours its translations?

P@k is the share of source words with a translation among their k nearest words of the dictionary's other language. The
nearest words are searched by `cosine` or by `csls` (eval/retrieval.py).

A word's vector is the mean of its tokens' input embeddings, as in ALIGN-MLM, or of their states at a layer in
`[CLS] word [SEP]`. An entry with the same tokens on both sides is left out. As in eval/alignment_score.py, no word is
its own neighbour, and a word is withheld if it is in no entry that objectives read; its tokens may have been trained in
other words. All dictionaries of two languages are joined, in either order of their columns.

Shape letters: N words of one language, M of the other, Q query words, K neighbours of each, H width, V vocabulary.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.lexicon import Lexicon
from xscale.eval.alignment_score import FEWEST
from xscale.eval.model import ExportedModel, Scores
from xscale.eval.neighbours import nearest_both
from xscale.eval.retrieval import MARGINS, embed_ids, hubness, layer_indices, words_for_choice

Word = tuple[int, ...]
RANKS = (1, 5)
"""The values of k in P@k."""


@dataclass(frozen=True)
class TestDictionary:
    """All dictionaries of two languages, joined."""

    langs: tuple[str, str]
    """The languages in alphabetical order."""
    entries: list[tuple[Word, Word]]
    words: list[list[Word]]
    """The N words of the first language, and the M words of the second, without duplicates."""
    word_ids: tuple[Tensor, Tensor]
    """The id of each word [N], [M]; a word of both languages has the same id in both."""
    identical: int
    """The number of entries that were left out, since they have the same tokens on both sides."""


def evaluate(
    model: ExportedModel,
    lexicons: Sequence[Lexicon],
    trained: Sequence[Lexicon],
    withheld_share: float,
    limit: int,
    layers: Sequence[str | int] = (),
    margins: Sequence[str] = MARGINS[:1],
) -> dict[str, Scores]:
    """Return {results row: P@1 and P@5 in both directions, their means, and counts}. There is a row for withheld and
    for trained words, each by the embeddings and by each of the layers.

    lexicons: the dictionaries of one pair of languages. trained: the dictionaries that the model was trained with.
    withheld_share: the share of words that training withheld. limit: the most withheld, and the most trained, query
    words of a language.
    """
    test = merge_lexicons(lexicons, model.device)
    seen = trained_words(dict.fromkeys([*trained, *lexicons]), withheld_share)
    queries = {"withheld": [[word for word in side if word not in seen][:limit] for side in test.words]}
    queries["trained"] = [[word for word in side if word in seen][:limit] for side in test.words]
    results: dict[str, Scores] = {}
    for layer, vectors in word_vectors(model, test, layer_indices(layers, model.num_layers)):
        for margin in margins:
            penalties = hubness(vectors[0], vectors[1], ids=test.word_ids) if margin == "csls" else None
            for subset, words in queries.items():
                name = [subset, *words_for_choice(margin, margins, MARGINS[0])]
                name += [f"layer {model.num_layers + 1 + layer}"] if layer is not None else []
                if min(map(len, words)) >= FEWEST:
                    results[" ".join(name)] = precisions(vectors, penalties, test, words)
    for subset, words in queries.items():
        if any(words) and min(map(len, words)) < FEWEST:
            pair, few = "-".join(test.langs), " and ".join(str(len(side)) for side in words)
            print(
                f"induction {pair}: no score for {few} {subset} words; it needs {FEWEST} of each language",
                file=sys.stderr,
            )
    return results


def merge_lexicons(lexicons: Sequence[Lexicon], device: torch.device) -> TestDictionary:
    """Return the test dictionary that joins lexicons of the same two languages."""
    first, second = sorted(lexicons[0].langs)
    pairs = dict.fromkeys(
        (tuple(lexicon.ids[flip][i]), tuple(lexicon.ids[1 - flip][i]))
        for lexicon in lexicons
        for flip in [lexicon.langs.index(first)]
        for i in range(len(lexicon.words))
    )
    entries = [(a, b) for a, b in pairs if a != b]
    words = [list(dict.fromkeys(entry[side] for entry in entries)) for side in (0, 1)]
    id_of = {word: i for i, word in enumerate(dict.fromkeys(words[0] + words[1]))}
    ids = [torch.tensor([id_of[word] for word in side], dtype=torch.int64, device=device) for side in words]
    return TestDictionary((first, second), entries, words, (ids[0], ids[1]), len(pairs) - len(entries))


def trained_words(lexicons: Iterable[Lexicon], withheld_share: float) -> set[Word]:
    """Return the words of all entries that are not withheld and whose two sides differ."""
    entries = (
        entry for lexicon in lexicons for entry in zip(*lexicon.without_withheld(withheld_share).ids, strict=True)
    )
    return {tuple(side) for a, b in entries if a != b for side in (a, b)}


def word_vectors(
    model: ExportedModel, test: TestDictionary, layers: Sequence[int]
) -> Iterator[tuple[int | None, list[Tensor]]]:
    """Yield (layer, unit vectors [N, H], [M, H]) of both languages' words: None for the input embeddings, then
    layers."""
    yield None, [mean_embeddings(model.encoder.embeddings, words) for words in test.words]
    languages = model.language_ids(test.langs)
    for layer in layers:
        sides = zip(test.langs, test.words, strict=True)
        states = [embed_ids(model, list(map(list, words)), languages[lang], [("mean", layer)]) for lang, words in sides]
        yield layer, [of_side["mean", layer] for of_side in states]


@torch.no_grad()
def mean_embeddings(table_VH: Tensor, words: list[Word]) -> Tensor:
    """Return unit vectors [N, H] of words, each in the direction of the mean of its tokens' embeddings."""
    ids = torch.tensor([token for word in words for token in word], device=table_VH.device)
    starts = torch.tensor([0, *map(len, words)][:-1], device=table_VH.device).cumsum(0)
    return F.normalize(F.embedding_bag(ids, table_VH.float(), starts, mode="mean"), dim=-1)


def precisions(
    vectors: list[Tensor], penalties: tuple[Tensor, Tensor] | None, test: TestDictionary, queries: list[list[Word]]
) -> Scores:
    """Return P@k by direction, the mean of both, and the numbers of queries. penalties: words' hubness, for csls."""
    scores: Scores = {}
    for a, b in ((0, 1), (1, 0)):
        row_of = {word: row for row, word in enumerate(test.words[a])}
        rows_Q = torch.tensor([row_of[word] for word in queries[a]], device=vectors[a].device)
        hubs = (penalties[a][rows_Q], penalties[b]) if penalties else None
        ids = test.word_ids[a][rows_Q], test.word_ids[b]
        (_, nearest_QK), _ = nearest_both(vectors[a][rows_Q], vectors[b], max(RANKS), hubs, ids)
        entries = {(entry[a], entry[b]) for entry in test.entries}
        hits = [
            [(word, test.words[b][row]) in entries for row in rows]
            for word, rows in zip(queries[a], nearest_QK.tolist(), strict=True)
        ]
        for k in RANKS:
            scores[f"{test.langs[a]}->{test.langs[b]} P@{k}"] = sum(any(of_word[:k]) for of_word in hits) / len(hits)
    means = {f"P@{k}": sum(share for name, share in scores.items() if name.endswith(f"P@{k}")) / 2 for k in RANKS}
    return scores | means | {"words": sum(map(len, queries)), "identical": test.identical}
