"""AlignLM (Yang et al. 2021): a masked token is predicted from its own state, and from the states of its translation.

    X = [CLS] S [SEP] T [SEP],  H = encoder(X)                                              (1, 2)
    A[i,j] = 1 where (i,j) or (j,i) is a word-alignment link, else 0
    mono:  p(x_i)  = softmax( W . linear(GELU(W1 H_i + b1)) )                               (3, 4)
    bi:    H* = A^T H,  H~ = W2 H* + b2                                                     (5, 6)
           p~(x_i) = softmax( W . linear(GELU(W3 H~_i + b3)) )                              (7, 8)
    L = sum over masked i of L_mp(i) + lambda L_bp(i),  L_mp = -log p, L_bp = -log p~       (9-11)

Decided, where the paper is silent:
- Links connect words (data/words.py), or symbols; a link between a word and a symbol is left out. `expand: all` links
  every token of one word to every token of the other; `expand: first` links only their first tokens.
- (5) is a sum, as printed; `normalize: mean` divides it by the number of its summands.
- A masked token that is linked to no token, or only to tokens that were cut off, has no bilingual target. The metric
  `bilingual_coverage` is the share of masked tokens that have one. The metric `bilingual_links` is the mean number of
  tokens to which these are linked.
- Both losses are divided by |M|, the number of masked tokens, because (9-11) add both for each masked token. If L_bp
  were divided by the number of its own targets, its weight would be 1.1 to 5 times lambda, depending on the links of
  the text. The losses by language are divided by the number of their own targets, for L_bp, too.
- W1, b1 and GELU belong to the pre-trained head; W3, b3 start as a copy of W1, b1. The head's LayerNorm stays before W:
  W . LN(linear(GELU(.))). `linear` and W2 start as the identity, so the first monolingual prediction is that of the
  pre-trained model. W is tied to the embeddings and keeps its bias; both predictions share W, LN and `linear`.
- W2, W3 and `linear` are in checkpoints, but not in an export: its masked-LM head does without `linear`.

Shape letters: M masked tokens, R masked tokens with links, K links of words.
"""

import copy
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from xscale.data import links
from xscale.data.sequences import Example, join_segments
from xscale.data.stream_batch import CollateContext, StreamBatch, masked_lm
from xscale.models.encoder import Encoder
from xscale.objectives.base import Losses, Objective, Parts, Prediction
from xscale.objectives.tlm import draw_first_sides
from xscale.recipe import STRICT, Fraction, LossFactor


@dataclass(frozen=True, config=STRICT)
class AlignLMOptions:
    in_phases: ClassVar[frozenset[str]] = frozenset({"mask_prob", "bilingual_weight", "shuffle_sides"})
    mask_prob: Fraction = 0.30
    """The probability that the objective chooses a token for prediction, as in mlm."""
    bilingual_weight: LossFactor = 1.0
    """The factor of L_bp, the loss of the second prediction (lambda in the paper)."""
    expand: Literal["all", "first"] = "all"
    """Which tokens of two aligned words count as aligned. all: each token of one word with each token of the other
    word. first: only the first tokens of the two words."""
    normalize: Literal["sum", "mean"] = "sum"
    """How AlignLM makes one vector (H* in the paper) of the hidden states of the tokens that are aligned with a masked
    token. sum: the vector is the sum of these states. mean: the vector is their mean."""
    shuffle_sides: bool = False
    """true: the two sentences of a pair are swapped with probability 1/2."""


class Heads(nn.Module):
    """The objective's own layers, by their names in the equations above: W2, W3 (with b2, b3) and linear."""

    def __init__(self, encoder: Encoder, options: AlignLMOptions):
        super().__init__()
        self.W2 = _identity_linear(encoder.width)
        self.W3 = copy.deepcopy(encoder.head.dense)
        self.linear = _identity_linear(encoder.head.dense.out_features)


def _identity_linear(width: int) -> nn.Linear:
    layer = nn.Linear(width, width)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def collate(samples: list[list[Example]], options: AlignLMOptions, context: CollateContext) -> StreamBatch:
    """Return the batch of samples, each of which is a single pair.

    Its states are "masked" [M], the hidden states of the masked tokens, and "linked" [R]: for each masked token with
    links, the sum of the hidden states of the tokens that it is linked to (H* of the paper with `normalize: sum`).
    """
    pairs = context.fit_pairs(samples)
    text_numbers = []
    for p, side in enumerate(draw_first_sides(pairs, options.shuffle_sides)):
        text_numbers.append([2 * p + side, 2 * p + 1 - side])
    sequences = join_segments(context.tokenizer, links.segments_of_texts(pairs, text_numbers), context.language_ids)
    stream_batch = masked_lm(
        sequences, context, mask_prob=options.mask_prob, types=context.token_type_field(False), term="mono"
    )
    masked = stream_batch.states["masked"].columns
    links_K2, is_word_K2 = links.links_and_is_word_of_each_end(pairs)
    of_one_kind = is_word_K2[:, 0] == is_word_K2[:, 1]
    tokens_of_words = links.word_tokens(pairs, text_numbers, sequences, options.expand)
    A = links.token_links(links_K2[of_one_kind], tokens_of_words)
    # linked_R: indices in `masked` of the tokens with links. partners: the tokens to which these are linked.
    linked_R, partners = links.gather_of_tokens_linked_to_masked(A, masked, len(sequences.ids))
    group_of_target = dict(stream_batch.group_of_target)
    if context.language_groups:
        group_of_target["bi"] = group_of_target["mono"][linked_R]
    arrays = {}
    if options.normalize == "mean":
        arrays["links"] = np.diff(partners.offsets)
    return replace(
        stream_batch,
        states=stream_batch.states | {"linked": partners},
        labels=stream_batch.labels | {"bi": stream_batch.labels["mono"][linked_R]},
        group_of_target=group_of_target,
        target_counts=stream_batch.target_counts | {"bi": partners.state_count, "links": len(partners.columns)},
        arrays=arrays,
    )


def compute_losses(
    parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: AlignLMOptions
) -> Losses:
    W1 = parts.encoder.head.dense
    GELU = parts.encoder.head.activation
    LN = parts.encoder.head.norm
    W2 = parts.heads.W2
    W3 = parts.heads.W3
    linear = parts.heads.linear

    H = states["masked"]
    mono = LN(linear(GELU(W1(H))))

    H_star = states["linked"]
    if options.normalize == "mean":
        H_star = H_star / arrays["links"][:, None]
    H_tilde = W2(H_star)
    bi = LN(linear(GELU(W3(H_tilde))))
    return Losses([Prediction("mono", mono), Prediction("bi", bi, "bilingual_accuracy")])


OBJECTIVE = Objective(
    record_kind="pair",
    options=AlignLMOptions,
    collate=collate,
    loss=compute_losses,
    terms=lambda options: {"mono": 1.0, "bi": options.bilingual_weight},
    divisors={"bi": "mono"},  # both losses are divided by |M|, see (9)
    ratios={"bilingual_coverage": ("bi", "mono"), "bilingual_links": ("links", "bi")},
    words=lambda options: True,
    needs="links",
    heads=Heads,
)
