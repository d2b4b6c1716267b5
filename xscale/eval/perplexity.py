"""Masked-LM perplexity of held-out text, by language: exp of the mean loss of a masked token (Devlin et al. 2019).

    L_MLM = - sum_{i in M} log p(x_i | x with M masked);    perplexity = exp(L_MLM / |M|)

M is 15 % of a text's tokens, shown as MLM shows them. Each record is a text of its own, `[CLS] text [SEP]`. The masks
are a function of the record's number, the token's place and the vocabulary: the same for every model with the same
tokenizer. Tokens of other tokenizers are others, so perplexities of models that differ in it do not compare.
"""

import math

import numpy as np

from xscale import rng
from xscale.data.sequences import Example
from xscale.data.shards import Source
from xscale.data.stream_batch import Context
from xscale.errors import UserError
from xscale.eval.heldout import BATCH, masked_lm_sums, unigram_entropy
from xscale.eval.model import Exported, check_head, read_all
from xscale.models.build import positions
from xscale.objectives import mlm


def evaluate(model: Exported, source: Source, language: str, limit: int) -> dict[str, float]:
    """perplexity, mlm_loss (nats a masked token), masked_accuracy, unigram_entropy (nats a token), targets; of the
    source's texts in the language. Texts beyond the model's positions go through it in parts."""
    check_head(model, "perplexity")
    texts = [texts[source.langs.index(language)] for _, _, texts in read_all(source, limit)]
    ids = model.tokenizer.encode(texts)
    identities = rng.hash64(rng.key("perplexity"), np.arange(len(ids)))
    samples = [[Example((language,), (ids[i],), None, identities[i])] for i in range(len(ids))]
    samples.sort(key=lambda sample: -len(sample[0].ids[0]))
    options = mlm.MaskedOptions(language_embeddings=model.language_embeddings, language_dropout=0.0)
    longest = positions(model.encoder.lm.config)
    context = Context(model.tokenizer, longest, "drop", model.language_ids(source))
    loss = correct = targets = 0.0
    for start in range(0, len(samples), BATCH):
        of_piece = masked_lm_sums(model, mlm.collate(samples[start : start + BATCH], options, context))
        loss, correct, targets = loss + of_piece[0], correct + of_piece[1], targets + of_piece[2]
    if not targets:
        raise UserError(f"{source.directory}: no text in {language} has a token to predict")
    return {
        "perplexity": math.exp(loss / targets),
        "mlm_loss": loss / targets,
        "masked_accuracy": correct / targets,
        "unigram_entropy": unigram_entropy(ids),
        "targets": targets,
    }
