"""Writes text in a second script for a WordPiece tokenizer of V ids: token i has a copy with id i + V, and text is
written with the copies.

Text is normalised as the tokenizer does it, and then each character is mapped to one that no token contains, and that
the tokenizer and data/words.py treat in the same way. WordPiece, which always takes the longest piece that fits,
divides the mapped text as it divides the original.
"""

import json
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from xscale import files, rng
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import character_classes
from xscale.errors import UserError

_FIRST = (range(0x561, 0x587), range(0x966, 0x970), range(0x2C30, 0x2C60), range(0x2E00, 0x2E5E), range(0x1200, 0x1380))
"""Characters that are tried first: Armenian, Devanagari's digits, Glagolitic, supplemental punctuation, Ethiopic."""


class Script:
    """A WordPiece tokenizer and the second script that is derived from it."""

    def __init__(self, path: Path, overlap: float = 0.0, seed: int = 0):
        """path: a tokenizer's directory. overlap: the share of ids without a copy, chosen by a hash with the seed.
        Raises UserError."""
        if not 0 <= overlap < 1:
            raise UserError(f"--overlap {overlap:g}: the share of ids left as they are must be at least 0 and below 1")
        self.path = path
        self.tokenizer = Tokenizer(path.absolute())
        self.backend: Any = self.tokenizer.backend
        self.json: dict[str, Any] = json.loads(self.backend.to_str())
        model = self.json["model"]
        if model["type"] != "WordPiece":
            remedy = "train one with `xscale data tokenizer --type wordpiece`"
            raise UserError(f"{path}: --how trans needs a WordPiece tokenizer, and this is a {model['type']}; {remedy}")
        self.size = self.tokenizer.vocab_size
        self.tokens: dict[int, str] = {number: token for token, number in model["vocab"].items()}
        self._prefix: str = model["continuing_subword_prefix"]
        ordinary = [number for number in self.tokenizer.ordinary_ids.tolist() if number in self.tokens]
        by_hash = sorted(ordinary, key=lambda number: int(rng.key(seed, "overlap", self.tokens[number])))
        self.unshifted = frozenset(by_hash[: round(overlap * len(by_hash))])
        self.shifted = [number for number in ordinary if number not in self.unshifted]
        self._image = self._images(set(chain.from_iterable(map(self._bare, ordinary))))

    def _bare(self, number: int) -> str:
        """Return the token's text without the prefix of continuations."""
        token = self.tokens[number]
        return token if token == self._prefix else token.removeprefix(self._prefix)

    def _images(self, alphabet: set[str]) -> dict[int, str]:
        """Return {code point of a character: its image}, for the vocabulary's characters and their images. All images
        are themselves mapped to one further character that no token contains. Raises UserError."""
        used = set(alphabet)
        image: dict[int, str] = {}
        for char in sorted(alphabet):
            image[ord(char)] = self._free_character(char, used)
        absent = self._free_character("a", used)
        return dict.fromkeys(map(ord, image.values()), absent) | image

    def _free_character(self, char: str, used: set[str]) -> str:
        """Return a character of the class of `char` that is not in `used`, and add it there. Raises UserError."""
        wanted = self._class_of(char)
        for candidate in _candidates():
            if wanted and candidate not in used and self._class_of(candidate) == wanted:
                used.add(candidate)
                return candidate
        raise UserError(
            f"{self.path}: no unused character of the same kind is left for {char!r} (U+{ord(char):04X}), or the "
            f"tokenizer's normalizer changes it; train a tokenizer on this text, with a smaller --vocab_size"
        )

    @lru_cache(maxsize=1 << 17)  # noqa: B019 - a tool makes one
    def _class_of(self, char: str) -> tuple[Any, ...] | None:
        """Return how data/words.py, Unicode and the tokenizer classify a character; None if the tokenizer changes the
        character. A character and its image have the same class."""
        inside = f"a{char}a"
        normal = self._normalized(inside)
        if normal.replace(" ", "") != inside:
            return None
        pieces = self.backend.pre_tokenizer.pre_tokenize_str(normal)
        return int(character_classes()[ord(char)]), unicodedata.category(char)[0], len(normal), len(pieces)

    def _normalized(self, text: str) -> str:
        return self.backend.normalizer.normalize_str(text) if self.backend.normalizer else text

    def map_text(self, text: str) -> str:
        """Return the text in the second script. It keeps its words, and each id i that has a copy becomes i + V."""
        normal = self._normalized(text)
        if not self.unshifted:
            return normal.translate(self._image)
        encoding = self.backend.encode(normal, add_special_tokens=False)
        parts: list[str] = []
        end = 0
        for number, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            piece = normal[first:last]
            parts.append(normal[end:first])
            parts.append(piece if number in self.unshifted else piece.translate(self._image))
            end = last
        return "".join([*parts, normal[end:]])

    def map_word(self, word: str) -> str:
        """Return a word in the second script, without white space inside."""
        return "".join(self.map_text(word).split()) or word

    def dictionary(self) -> str:
        """Return a line `id<TAB>id + V` for each id that has a copy."""
        return "".join(f"{number}\t{number + self.size}\n" for number in self.shifted)

    def save_doubled(self, out: Path) -> None:
        """Write the tokenizer with twice as many ids. Id i + V is the copy of i; it is unused if i has no copy."""
        vocabulary = {self.tokens[number]: number for number in sorted(self.tokens)}
        shifted = frozenset(self.shifted)
        for number in range(self.size):
            copy = f"[unused{number}]"
            if number in shifted:
                bare = self._bare(number)
                copy = self.tokens[number].removesuffix(bare) + bare.translate(self._image)
            vocabulary[copy] = number + self.size
        doubled = self.json | {"model": self.json["model"] | {"vocab": vocabulary}}
        with files.atomic_write(out) as partial:
            self.tokenizer.hf.save_pretrained(partial)
            text = json.dumps(doubled, ensure_ascii=False)
            (partial / "tokenizer.json").write_text(text, encoding="utf-8")


def _candidates() -> Iterator[str]:
    """Yield the assigned characters to which others may be mapped: those that no normal form of Unicode changes."""
    for code in chain(*_FIRST, range(0xA0, 0xD800), range(0xF900, 0xFFFE)):
        char = chr(code)
        if unicodedata.category(char) not in ("Cn", "Co", "Cc") and unicodedata.normalize("NFKD", char) == char:
            yield char
