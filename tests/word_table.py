"""Write xscale/data/words.txt: the class of every code point, by which xscale/data/words.py splits text into words.

    python -m tests.word_table [--out F]

Classes come from the Unicode properties that the installed `regex` knows. The file is frozen: another Unicode version
would move word borders, which existing links refer to, so the file changes only with a new format of shards.
"""

import argparse
from itertools import groupby
from pathlib import Path

import regex

from xscale.data.words import TABLE, Class

UNSEGMENTED = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts that are written without spaces."""

PATTERNS = {
    Class.BREAK: r"[\s\p{Z}\p{Cc}\u200B]",
    Class.JOINER: r"\u200D",
    Class.FORMAT: r"\p{Cf}",
    Class.TONE: r"[\U0001F3FB-\U0001F3FF]",
    Class.OWN_MARK: rf"[{UNSEGMENTED}&&\p{{M}}]",
    Class.OWN_PUNCTUATION: rf"[{UNSEGMENTED}&&\p{{P}}]",
    Class.OWN: rf"[{UNSEGMENTED}]",
    Class.MARK: r"\p{M}",
    Class.LETTER: r"[\p{L}\p{N}]",
    Class.SYMBOL: r"[\s\S]",
}
"""Regular expressions of the classes; a code point has the first class that matches it."""


def ranges(end: int = 0x110000) -> list[tuple[int, Class]]:
    """(first code point, class) of all runs of code points of one class below `end`."""
    patterns = [(which, regex.compile(pattern, regex.V1)) for which, pattern in PATTERNS.items()]

    def class_of(code: int) -> Class:
        return next(which for which, pattern in patterns if pattern.fullmatch(chr(code)))

    return [(next(codes), which) for which, codes in groupby(range(end), key=class_of)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    lines = [f"{first:X} {which.name.lower()}\n" for first, which in ranges()]
    args.out.write_text("".join(lines), encoding="ascii")
    print(f"{args.out}: {len(lines):,} ranges, regex {regex.__version__}")


if __name__ == "__main__":
    main()
