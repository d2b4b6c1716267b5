"""Static embeddings of linked words (Yang et al. 2021, figure 2): t-SNE of the pairs that are most often linked."""

from collections import Counter

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.manifold import TSNE

from xscale.data import words as words_of
from xscale.data.link_projection import parse
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.eval.model import Exported
from xscale.report.contents import Placed

SHOWN, READ = 20, 20_000
"""Pairs of words; records of a source that they are counted in, at most."""
CHUNK = 1000
STOP = 50
"""A language's most frequent words, which stand for its stop words: none of them is shown."""


def frequent_pairs(source: Source) -> list[tuple[str, str]]:
    """The words most often linked with one another, each word once. Raises UserError where no record has links."""
    linked: Counter[tuple[str, str]] = Counter()
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    has_links = False
    for places in np.array_split(np.arange(min(source.records, READ)), -(-READ // CHUNK)):
        records = [source.with_words(source.read(*place)) for place in source.places(places)]
        split = words_of.split([text for record in records for text in record.texts])
        for record, first, second in zip(records, split[::2], split[1::2], strict=True):
            has_links |= record.links is not None
            for (words, is_word), counter in zip((first, second), counts, strict=True):
                counter.update(word for word, kept in zip(words, is_word.tolist(), strict=True) if kept)
            for a, b in parse(record.links or "", (len(first[0]), len(second[0]))):
                if first[1][a] and second[1][b]:
                    linked[first[0][a], second[0][b]] += 1
    if not has_links:
        raise UserError(
            f"{source.directory} has no word links; write it again by write_shards pairs --align or --links"
        )
    left_out = [{word for word, _ in counter.most_common(STOP)} for counter in counts]
    pairs: list[tuple[str, str]] = []
    for (first_word, second_word), _ in linked.most_common():
        if len(pairs) < SHOWN and first_word not in left_out[0] and second_word not in left_out[1]:
            pairs.append((first_word, second_word))
            left_out[0].add(first_word)
            left_out[1].add(second_word)
    return pairs


def place(model: Exported, pairs: list[tuple[str, str]]) -> Placed:
    """A word is the sum of its tokens' embeddings, of which direction alone counts."""
    ids = model.tokenizer.encode_inside([word for side in zip(*pairs, strict=True) for word in side])
    table = model.encoder.embeddings.detach().float().cpu()
    vectors = torch.stack([table[torch.tensor(of_word, dtype=torch.int64)].sum(0) for of_word in ids])
    first, second = F.normalize(vectors, dim=-1).chunk(2)
    cosines = first @ second.T
    flat = TSNE(perplexity=min(15.0, (len(ids) - 1) / 3), metric="cosine", init="pca", random_state=0)
    places = flat.fit_transform(vectors.numpy()).reshape(2, len(pairs), 2).transpose(1, 0, 2)
    nearest = int((cosines.argmax(1) == torch.arange(len(pairs))).sum())
    return Placed(places, float(cosines.diagonal().mean()), nearest)
