"""Computes two views of a model: linked words in its embeddings (Yang et al. 2021, figure 2), and predicted tokens."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale import rng
from xscale.data import links
from xscale.data import words as words_of
from xscale.data.link_projection import parse
from xscale.data.ragged import evenly_spaced
from xscale.data.sequences import Example
from xscale.data.shards import Source, find_sources
from xscale.data.stream_batch import Context
from xscale.errors import UserError
from xscale.eval import heldout
from xscale.eval.model import ExportedModel
from xscale.objectives import OBJECTIVES, Parts, alignlm
from xscale.report.read import short_names

FEWEST_WORDS, MOST_WORDS = 3, 20
"""The fewest and the most pairs of words in a picture."""
MOST_RECORDS, CHUNK = 20_000, 1000
"""The most records of a source in which words are counted, and the records that are read together."""
STOP_WORDS = 50
"""The number of a language's most frequent words that are taken for stop words and not shown."""
PAIRS, SEARCHED, MOST_MASKED, GUESSES = 4, 400, 8, 3
"""The most sentence pairs shown, records searched for them, masked tokens of a pair, and guesses for a token."""
LENGTHS = range(12, 60)
"""Sentence pairs with these numbers of tokens are shown first."""
OBJECTIVE = OBJECTIVES["alignlm"]
Guesses = list[tuple[str, float]]
"""Tokens and their probabilities, the likeliest first."""


class MaskedToken(NamedTuple):
    token: str
    position: int
    """The index of the token in its sentence pair."""
    linked: list[str]
    """The tokens of words that are linked with the token's word."""
    mono: Guesses
    """The guesses from the token's own hidden state."""
    bi: Guesses
    """The guesses of AlignLM's bilingual head, from linked tokens; [] without links or without this head."""


def load_models_and_sources(paths: list[Path], pairs: list[Path]) -> tuple[dict[str, ExportedModel], list[Source]]:
    """Return {short name: model}, and the sources of sentence pairs. pairs: folders of shards. Raises UserError."""
    sources = [source for source in find_sources(pairs) if source.kind == "pair"]
    if not sources:
        raise UserError(f"--pairs: no sentence pairs in {', '.join(map(str, pairs))}; give shards with word links")
    paths = list(dict.fromkeys(paths))
    return dict(zip(short_names(paths), map(ExportedModel, paths), strict=True)), sources


def frequent_word_pairs(source: Source) -> list[tuple[str, str]]:
    """Return the most often linked pairs of words, each word in one pair. Raises UserError if no record has links."""
    linked: Counter[tuple[str, str]] = Counter()
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    has_links = False
    for numbers in np.array_split(np.arange(min(source.records, MOST_RECORDS)), -(-MOST_RECORDS // CHUNK)):
        records = [source.with_words(source.read(*place)) for place in source.places(numbers)]
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
    left_out = [{word for word, _ in counter.most_common(STOP_WORDS)} for counter in counts]
    pairs: list[tuple[str, str]] = []
    for (first_word, second_word), _ in linked.most_common():
        if len(pairs) < MOST_WORDS and first_word not in left_out[0] and second_word not in left_out[1]:
            pairs.append((first_word, second_word))
            left_out[0].add(first_word)
            left_out[1].add(second_word)
    return pairs


def project_words(model: ExportedModel, pairs: list[tuple[str, str]]) -> tuple[np.ndarray, float, int]:
    """Return the words' positions by t-SNE [pairs, 2 words, (x, y)], the mean cosine of a pair, and the number of first
    words whose nearest second word is their partner. A word's vector is the sum of its tokens' embeddings."""
    from sklearn.manifold import TSNE

    ids = model.tokenizer.encode_inside([word for side in zip(*pairs, strict=True) for word in side])
    table = model.encoder.embeddings.detach().float().cpu()
    vectors = torch.stack([table[torch.tensor(of_word, dtype=torch.int64)].sum(0) for of_word in ids])
    first, second = F.normalize(vectors, dim=-1).chunk(2)
    cosines = first @ second.T
    tsne = TSNE(perplexity=min(15.0, (len(ids) - 1) / 3), metric="cosine", init="pca", random_state=0)
    positions = tsne.fit_transform(vectors.numpy()).reshape(2, len(pairs), 2).transpose(1, 0, 2)
    nearest = int((cosines.argmax(1) == torch.arange(len(pairs))).sum())
    return positions, float(cosines.diagonal().mean()), nearest


def predict_examples(model: ExportedModel, source: Source) -> list[tuple[list[str], list[MaskedToken]]]:
    """Return (tokens, masked tokens with guesses) of some pairs, by the first AlignLM stream's heads if there are
    any."""
    kept = next((heads for heads in model.heads.values() if heads.objective == "alignlm"), None)
    options = replace(kept.options(alignlm.AlignLMOptions) if kept else alignlm.AlignLMOptions(), shuffle_sides=False)
    heads = alignlm.Heads(model.encoder, options)
    if kept:
        heads.load_state_dict(kept.weights)
    parts = Parts(model.encoder, heads.eval().to(model.device))
    context = heldout.make_context(model, source.langs)
    predicted = (masked_tokens(parts, pair, options, context, bool(kept)) for pair in sample_pairs(model, source))
    return list(islice((example for example in predicted if example[1]), PAIRS))


def sample_pairs(model: ExportedModel, source: Source) -> list[Example]:
    """Return tokenised sentence pairs from all over the source, first those whose length is in LENGTHS."""
    numbers = evenly_spaced(source.records, SEARCHED)
    records = [source.with_words(source.read(*place)) for place in source.places(numbers)]
    ids, words = model.tokenizer.encode_words([text for record in records for text in record.texts])
    identities = rng.hash64(rng.key("examples"), numbers)
    pairs = [
        Example(record.langs, (a, b), (of_a, of_b), identity, key=record.key, links=record.links or "")
        for record, a, b, of_a, of_b, identity in zip(
            records, ids[::2], ids[1::2], words[::2], words[1::2], identities, strict=True
        )
    ]
    return sorted(pairs, key=lambda pair: sum(map(len, pair.ids)) not in LENGTHS)


@torch.inference_mode()
def masked_tokens(
    parts: Parts, pair: Example, options: alignlm.AlignLMOptions, context: Context, has_heads: bool
) -> tuple[list[str], list[MaskedToken]]:
    """Return the unmasked tokens of a pair, special tokens included, and the masked tokens with their guesses."""
    batch = OBJECTIVE.collate([[pair]], options, context)
    if not batch.samples:
        return [], []
    masked = batch.reads["masked"].places
    ids = batch.sequences.ids.copy()
    ids[masked] = batch.labels["mono"]
    tokens = [token_text(token, context) for token in ids.tolist()]
    words = links.parse_links([pair])
    of_words = links.word_tokens([pair], [[0, 1]], batch.sequences, words.first, options.expand)
    of_tokens = links.token_links(words.links, of_words)
    linked, partners = links.linked_states(of_tokens, masked, len(ids))
    ends = np.cumsum(np.asarray(partners.counts))
    partners_of = dict(zip(linked.tolist(), np.split(partners.places, ends[:-1]), strict=False))
    predictions, _ = heldout.predict(parts, "alignlm", batch, options, context.tokenizer.sep_id)
    out = parts.encoder.lm.get_output_embeddings()
    mono, bi = (F.linear(of.features_MH, out.weight, out.bias).float().softmax(-1).cpu() for of in predictions)
    bi_of = {i: top_guesses(bi[row], context) for row, i in enumerate(linked.tolist()) if has_heads}
    return tokens, [
        MaskedToken(
            tokens[at], at, [tokens[n] for n in partners_of.get(i, ())], top_guesses(mono[i], context), bi_of.get(i, [])
        )
        for i, at in enumerate(masked.tolist()[:MOST_MASKED])
    ]


def top_guesses(probabilities_V: Tensor, context: Context) -> Guesses:
    best = probabilities_V.topk(GUESSES)
    return list(zip((token_text(t, context) for t in best.indices.tolist()), best.values.tolist(), strict=True))


def token_text(token: int, context: Context) -> str:
    return str(context.tokenizer.hf.decode([token])).strip()
