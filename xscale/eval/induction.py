"""Bilingual lexicon induction (Lample et al. 2018): are a word's nearest neighbours its translations?

P@k is the share of source words for which one of the k nearest words of the other language in the dictionary is a
translation by the dictionary. The nearest words are found by `cosine` or by `csls` (eval/retrieval.py).

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
from xscale.eval.model import Exported, Scores
from xscale.eval.neighbours import nearest_both
from xscale.eval.retrieval import MARGINS, embed_ids, hubness, layer_numbers, name_choice

Word = tuple[int, ...]
RANKS = (1, 5)


@dataclass(frozen=True)
class TestDictionary:
    """The dictionary of two languages with which induction is measured."""

    langs: tuple[str, str]
    """The languages in alphabetical order."""
    entries: list[tuple[Word, Word]]
    words: list[list[Word]]
    """The words of either language, each once [N], [M]."""
    numbers: tuple[Tensor, Tensor]
    """The number of each word; a word of both languages has the same number in both [N], [M]."""
    identical: int
    """The number of entries with the same tokens on both sides, which are left out."""


def evaluate(
    model: Exported,
    lexicons: Sequence[Lexicon],
    read: Sequence[Lexicon],
    heldout: float,
    limit: int,
    layers: Sequence[str | int] = (),
    margins: Sequence[str] = MARGINS[:1],
) -> dict[str, Scores]:
    """P@1 and P@5 in both directions and their means, for withheld and for trained words, by the embeddings and by
    each of the layers; the numbers of query words, and of entries that were left out as identical.

    lexicons: the dictionaries of one pair of languages. read: the dictionaries that the model was trained with.
    heldout: the share of words that training withheld. limit: the most withheld, and the most trained, query words of
    a language.
    """
    test, seen = merge_lexicons(lexicons, model.device), seen_words(dict.fromkeys([*read, *lexicons]), heldout)
    asked = {"withheld": [[word for word in side if word not in seen][:limit] for side in test.words]}
    asked["trained"] = [[word for word in side if word in seen][:limit] for side in test.words]
    found: dict[str, Scores] = {}
    for layer, vectors in word_vectors(model, test, layer_numbers(layers, model.num_layers)):
        for margin in margins:
            penalties = hubness(vectors[0], vectors[1], numbers=test.numbers) if margin == "csls" else None
            for kind, words in asked.items():
                name = [kind, *name_choice(margin, margins, MARGINS[0])]
                name += [f"layer {model.num_layers + 1 + layer}"] if layer is not None else []
                if min(map(len, words)) >= FEWEST:
                    found[" ".join(name)] = precisions(vectors, penalties, test, words)
    for kind, words in asked.items():
        if any(words) and min(map(len, words)) < FEWEST:
            few = " and ".join(str(len(side)) for side in words)
            print(f"induction {'-'.join(test.langs)}: no score for {few} {kind} words; needs {FEWEST}", file=sys.stderr)
    return found


def merge_lexicons(lexicons: Sequence[Lexicon], device: torch.device) -> TestDictionary:
    """The test dictionary that joins all lexicons of the same two languages."""
    first, second = sorted(lexicons[0].langs)
    pairs = dict.fromkeys(
        (tuple(lexicon.ids[flip][i]), tuple(lexicon.ids[1 - flip][i]))
        for lexicon in lexicons
        for flip in [lexicon.langs.index(first)]
        for i in range(len(lexicon.words))
    )
    entries = [(a, b) for a, b in pairs if a != b]
    words = [list(dict.fromkeys(entry[side] for entry in entries)) for side in (0, 1)]
    number = {word: n for n, word in enumerate(dict.fromkeys(words[0] + words[1]))}
    numbers = [torch.tensor([number[word] for word in side], dtype=torch.int64, device=device) for side in words]
    return TestDictionary((first, second), entries, words, (numbers[0], numbers[1]), len(pairs) - len(entries))


def seen_words(lexicons: Iterable[Lexicon], heldout: float) -> set[Word]:
    """The words of all entries that are not withheld, without entries whose two sides are the same."""
    entries = (entry for lexicon in lexicons for entry in zip(*lexicon.without_withheld(heldout).ids, strict=True))
    return {tuple(side) for a, b in entries if a != b for side in (a, b)}


def word_vectors(
    model: Exported, test: TestDictionary, layers: Sequence[int]
) -> Iterator[tuple[int | None, list[Tensor]]]:
    """Unit vectors of both languages' words [N, H], [M, H]: first by the input embeddings, then by each layer."""
    yield None, [mean_rows(model.encoder.embeddings, words) for words in test.words]
    languages = model.language_ids(test.langs)
    for layer in layers:
        sides = zip(test.langs, test.words, strict=True)
        states = [embed_ids(model, list(map(list, words)), languages[lang], [("mean", layer)]) for lang, words in sides]
        yield layer, [of_side["mean", layer] for of_side in states]


@torch.no_grad()
def mean_rows(table_VH: Tensor, words: list[Word]) -> Tensor:
    """Unit vectors [N, H] of words, each in the direction of the mean of its tokens' embeddings."""
    ids = torch.tensor([token for word in words for token in word], device=table_VH.device)
    starts = torch.tensor([0, *map(len, words)][:-1], device=table_VH.device).cumsum(0)
    return F.normalize(F.embedding_bag(ids, table_VH.float(), starts, mode="mean"), dim=-1)


def precisions(
    vectors: list[Tensor], penalties: tuple[Tensor, Tensor] | None, test: TestDictionary, asked: list[list[Word]]
) -> Scores:
    """P@k of the query words `asked`, in both directions, and the means of both. penalties: hubness, if by csls."""
    found: Scores = {}
    for a, b in ((0, 1), (1, 0)):
        place = {word: row for row, word in enumerate(test.words[a])}
        rows_Q = torch.tensor([place[word] for word in asked[a]], device=vectors[a].device)
        hubs = (penalties[a][rows_Q], penalties[b]) if penalties else None
        numbers = test.numbers[a][rows_Q], test.numbers[b]
        (_, nearest_QK), _ = nearest_both(vectors[a][rows_Q], vectors[b], max(RANKS), hubs, numbers)
        entries = {(entry[a], entry[b]) for entry in test.entries}
        hits = [
            [(word, test.words[b][row]) in entries for row in rows]
            for word, rows in zip(asked[a], nearest_QK.tolist(), strict=True)
        ]
        for k in RANKS:
            found[f"{test.langs[a]}->{test.langs[b]} P@{k}"] = sum(any(of_word[:k]) for of_word in hits) / len(hits)
    means = {f"P@{k}": sum(share for name, share in found.items() if name.endswith(f"P@{k}")) / 2 for k in RANKS}
    return found | means | {"words": sum(map(len, asked)), "identical": test.identical}
