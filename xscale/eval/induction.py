"""Bilingual lexicon induction (Lample et al. 2018): are a word's nearest neighbours its translations?

P@k is the share of the source words of which a translation, any of those that the dictionary has, is among the k
nearest of all its words of the other language; by `cosine` or by `csls` (eval/retrieval.py).

A word is its tokens: the mean of their rows of the input embeddings, as ALIGN-MLM has it, or of their states at a layer
in `[CLS] word [SEP]`. An entry whose sides are the same tokens says nothing and is left out. As in
eval/alignment_score.py no word is its own neighbour, and a word is withheld if no objective saw it: it stands on no
side of an entry that objectives read. (Parts of it, its tokens, may have been seen in other words.)

All entries of a pair of languages are taken together, whichever way round their files are.

Shape letters: N words of one language, M of the other, Q words that are asked for, K found of each, H width,
V vocabulary.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.lexicon import Lexicon
from xscale.eval.alignment_score import FEWEST
from xscale.eval.model import Exported, Spoken
from xscale.eval.neighbours import nearest
from xscale.eval.retrieval import MARGINS, NEIGHBOURS, embed_ids, layer_numbers, variant

Word = tuple[int, ...]
RANKS = (1, 5)
"""k of P@k."""


def evaluate(
    model: Exported,
    lexicons: Sequence[Lexicon],
    read: Sequence[Lexicon],
    heldout: float,
    limit: int,
    layers: Sequence[str | int] = (),
    margins: Sequence[str] = MARGINS[:1],
) -> dict[str, dict[str, float]]:
    """P@1 and P@5 in both directions and their means, for withheld and for trained words, by the embeddings and by
    each of the layers; words: asked for, identical: entries left out.

    lexicons: of one pair of languages. read: what the model was trained with. heldout: share of the words that were
    withheld from it. limit: the first so many words of a language are asked for, of either kind.
    """
    entries, identical, langs = entries_of(lexicons)
    seen = seen_words([*read, *lexicons], heldout)
    sides = [list(dict.fromkeys(entry[side] for entry in entries)) for side in (0, 1)]
    asked = {"withheld": [[word for word in side if word not in seen][:limit] for side in sides]}
    asked["trained"] = [[word for word in side if word in seen][:limit] for side in sides]
    found: dict[str, dict[str, float]] = {}
    last = model.encoder.lm.config.num_hidden_layers
    numbers = layer_numbers(layers, last)
    for layer, vectors in word_vectors(model, sides, lexicons[0], langs, numbers):
        for margin, (kind, words) in product(margins, asked.items()):
            name = [kind, variant([(margin, margins, MARGINS[0])], -1, [-1], last)]
            name += [f"layer {last + 1 + layer}"] if layer is not None else []
            if min(map(len, words)) >= FEWEST:
                scores = precisions(vectors, sides, entries, words, margin, langs)
                found[" ".join(filter(None, name))] = scores | {"identical": identical}
    for kind, words in asked.items():
        if any(words) and min(map(len, words)) < FEWEST:
            few = " and ".join(str(len(side)) for side in words)
            print(f"induction {'-'.join(langs)}: no score of {few} {kind} words, {FEWEST} would do", file=sys.stderr)
    return found


def entries_of(lexicons: Sequence[Lexicon]) -> tuple[list[tuple[Word, Word]], int, tuple[str, str]]:
    """Distinct entries, without those of the same tokens on both sides; how many these are; the languages in order."""
    first, second = sorted(lexicons[0].langs)
    entries = dict.fromkeys(
        (tuple(lexicon.ids[flip][i]), tuple(lexicon.ids[1 - flip][i]))
        for lexicon in lexicons
        for flip in [lexicon.langs.index(first)]
        for i in range(len(lexicon.words))
    )
    kept = [(a, b) for a, b in entries if a != b]
    return kept, len(entries) - len(kept), (first, second)


def seen_words(lexicons: Sequence[Lexicon], heldout: float) -> set[Word]:
    """Words of an entry that is not withheld."""
    entries = (entry for lexicon in lexicons for entry in zip(*lexicon.kept(heldout).ids, strict=True))
    return {tuple(side) for a, b in entries if a != b for side in (a, b)}


def word_vectors(
    model: Exported, sides: list[list[Word]], spoken: Spoken, langs: tuple[str, str], layers: Sequence[int]
) -> Iterator[tuple[int | None, list[Tensor]]]:
    """Unit vectors of both languages' words [N, H], [M, H]: first of the embeddings, then of each layer."""
    yield None, [mean_rows(model.encoder.embeddings, words) for words in sides]
    for layer in layers:
        numbers = [model.language_ids(spoken)[lang] for lang in langs]
        states = (
            embed_ids(model, list(map(list, words)), n, ["mean"], [layer])
            for words, n in zip(sides, numbers, strict=True)
        )
        yield layer, [of_side["mean", layer] for of_side in states]


@torch.no_grad()
def mean_rows(table_VH: Tensor, words: list[Word]) -> Tensor:
    """Unit vectors [N, H]."""
    ids = torch.tensor([token for word in words for token in word], device=table_VH.device)
    starts = torch.tensor([0, *map(len, words)][:-1], device=table_VH.device).cumsum(0)
    return F.normalize(F.embedding_bag(ids, table_VH.float(), starts, mode="mean"), dim=-1)


def precisions(
    vectors: list[Tensor],
    sides: list[list[Word]],
    entries: list[tuple[Word, Word]],
    asked: list[list[Word]],
    margin: str,
    langs: tuple[str, str],
) -> dict[str, float]:
    """P@k there, back and their mean. vectors, sides, asked: of both languages."""
    number = {word: n for n, word in enumerate(dict.fromkeys(sides[0] + sides[1]))}
    numbers = [torch.tensor([number[word] for word in words], device=vectors[0].device) for words in sides]
    scores: dict[str, float] = {}
    for a, b in ((0, 1), (1, 0)):
        place = {word: row for row, word in enumerate(sides[a])}
        rows_Q = torch.tensor([place[word] for word in asked[a]], device=vectors[0].device)
        hubness_M = None
        if margin == "csls":
            hubness_M = nearest(vectors[b], vectors[a], NEIGHBOURS, numbers=(numbers[b], numbers[a]))[0].mean(1) / 2
        of_asked = (numbers[a][rows_Q], numbers[b])
        _, found_QK = nearest(vectors[a][rows_Q], vectors[b], max(RANKS), hubness_M, of_asked)
        gold = {(entry[a], entry[b]) for entry in entries}
        hits = [
            [(word, sides[b][row]) in gold for row in found]
            for word, found in zip(asked[a], found_QK.tolist(), strict=True)
        ]
        for k in RANKS:
            scores[f"{langs[a]}->{langs[b]} P@{k}"] = sum(any(of_word[:k]) for of_word in hits) / len(hits)
    means = {f"P@{k}": sum(value for name, value in scores.items() if name.endswith(f"P@{k}")) / 2 for k in RANKS}
    return scores | means | {"words": sum(map(len, asked))}
