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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.lexicon import Lexicon
from xscale.eval.alignment_score import FEWEST
from xscale.eval.model import Exported
from xscale.eval.neighbours import nearest
from xscale.eval.retrieval import MARGINS, embed_ids, hubness, layer_numbers, variant

Word = tuple[int, ...]
RANKS = (1, 5)
"""k of P@k."""


@dataclass(frozen=True)
class TestDictionary:
    """A dictionary of two languages."""

    langs: tuple[str, str]
    """In the order of the alphabet."""
    entries: list[tuple[Word, Word]]
    words: list[list[Word]]
    """Of either language, each once [N], [M]."""
    numbers: list[Tensor]
    """The words' numbers among those of both languages [N], [M]."""
    identical: int
    """Entries of the same tokens on both sides, left out."""


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
    gold, seen = probe_of(lexicons), seen_words(dict.fromkeys([*read, *lexicons]), heldout)
    asked = {"withheld": [[word for word in side if word not in seen][:limit] for side in gold.words]}
    asked["trained"] = [[word for word in side if word in seen][:limit] for side in gold.words]
    found: dict[str, dict[str, float]] = {}
    last = model.encoder.lm.config.num_hidden_layers
    numbers = layer_numbers(layers, last)
    for layer, vectors in word_vectors(model, gold, numbers):
        for margin in margins:
            penalties = hubness_of(vectors, gold) if margin == "csls" else None
            for kind, words in asked.items():
                name = [kind, variant([(margin, margins, MARGINS[0])], -1, [-1], last)]
                name += [f"layer {last + 1 + layer}"] if layer is not None else []
                if min(map(len, words)) >= FEWEST:
                    found[" ".join(filter(None, name))] = precisions(vectors, penalties, gold, words)
    for kind, words in asked.items():
        if any(words) and min(map(len, words)) < FEWEST:
            few = " and ".join(str(len(side)) for side in words)
            print(
                f"induction {'-'.join(gold.langs)}: no score of {few} {kind} words, {FEWEST} would do", file=sys.stderr
            )
    return found


def probe_of(lexicons: Sequence[Lexicon]) -> TestDictionary:
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
    numbers = [torch.tensor([number[word] for word in side], dtype=torch.int64) for side in words]
    return TestDictionary((first, second), entries, words, numbers, len(pairs) - len(entries))


def seen_words(lexicons: Iterable[Lexicon], heldout: float) -> set[Word]:
    """Words of an entry that is not withheld."""
    entries = (entry for lexicon in lexicons for entry in zip(*lexicon.kept(heldout).ids, strict=True))
    return {tuple(side) for a, b in entries if a != b for side in (a, b)}


def word_vectors(
    model: Exported, gold: TestDictionary, layers: Sequence[int]
) -> Iterator[tuple[int | None, list[Tensor]]]:
    """Unit vectors of both languages' words [N, H], [M, H]: first of the embeddings, then of each layer."""
    yield None, [mean_rows(model.encoder.embeddings, words) for words in gold.words]
    languages = model.language_ids(gold)
    for layer in layers:
        sides = zip(gold.langs, gold.words, strict=True)
        states = [embed_ids(model, list(map(list, words)), languages[lang], ["mean"], [layer]) for lang, words in sides]
        yield layer, [of_side["mean", layer] for of_side in states]


@torch.no_grad()
def mean_rows(table_VH: Tensor, words: list[Word]) -> Tensor:
    """Unit vectors [N, H]."""
    ids = torch.tensor([token for word in words for token in word], device=table_VH.device)
    starts = torch.tensor([0, *map(len, words)][:-1], device=table_VH.device).cumsum(0)
    return F.normalize(F.embedding_bag(ids, table_VH.float(), starts, mode="mean"), dim=-1)


def hubness_of(vectors: list[Tensor], gold: TestDictionary) -> tuple[Tensor, Tensor]:
    """Of both languages' words [N], [M]."""
    first, second = (of_side.to(vectors[0].device) for of_side in gold.numbers)
    return hubness(vectors[0], vectors[1], numbers=(first, second))


def precisions(
    vectors: list[Tensor], penalties: tuple[Tensor, Tensor] | None, gold: TestDictionary, asked: list[list[Word]]
) -> dict[str, float]:
    """P@k there, back and their mean, of the words that are asked for of either language."""
    numbers = [of_side.to(vectors[0].device) for of_side in gold.numbers]
    scores: dict[str, float] = {}
    for a, b in ((0, 1), (1, 0)):
        place = {word: row for row, word in enumerate(gold.words[a])}
        rows_Q = torch.tensor([place[word] for word in asked[a]], device=vectors[0].device)
        of_both = (numbers[a][rows_Q], numbers[b])
        of_hubs = (penalties[a][rows_Q], penalties[b]) if penalties else None
        _, found_QK = nearest(vectors[a][rows_Q], vectors[b], max(RANKS), of_hubs, of_both)
        entries = {(entry[a], entry[b]) for entry in gold.entries}
        hits = [
            [(word, gold.words[b][row]) in entries for row in found]
            for word, found in zip(asked[a], found_QK.tolist(), strict=True)
        ]
        for k in RANKS:
            share = sum(any(of_word[:k]) for of_word in hits) / len(hits)
            scores[f"{gold.langs[a]}->{gold.langs[b]} P@{k}"] = share
    means = {f"P@{k}": sum(share for name, share in scores.items() if name.endswith(f"P@{k}")) / 2 for k in RANKS}
    return scores | means | {"words": sum(map(len, asked)), "identical": gold.identical}
