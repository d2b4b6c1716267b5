"""Reads text files line by line: plain, .gz, .xz, .bz2 or .zst. Incomplete files are errors, which name file and line.

A line ends at "\\n", and "\\r" before it is removed. The byte-order mark, U+FEFF, is removed at any place. A file whose
only line ends are "\\r" is refused.
"""

import bz2
import lzma
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import zstandard

from xscale.errors import UserError
from xscale.files import describe_placeholder

_BLOCK = 1 << 16
"""The number of bytes that are read at once."""
_PACKED_BLOCK = 1 << 10
"""The number of compressed bytes that are decoded at once. They may become 32,768 times as many, so this limits
memory."""
_LONGEST_LINE = 1 << 26
"""The maximum number of bytes of a line, to limit memory. A file with a longer line is refused."""
_ZSTD_WINDOW = 1 << 31
"""The largest window of a zstd stream that is read: that of `zstd --long=31`. libzstd's default is 2^27."""
_CONTROLS = bytes([*range(9), *range(14, 32)])
"""The control bytes other than white space. They are more than a third of the bytes in the first line of binary data
such as a tar, and in UTF-16 text of many scripts. Without a byte-order mark, such UTF-16 text is valid UTF-8."""
_MARKS = re.compile("(?<=[^ \t])\ufeff|\ufeff(?=[^ \t])")
"""Matches byte-order marks, except those between spaces. An aligner counts the latter as words, so they are removed
when links are converted."""
_TABLES = "For tables, use `xscale data prepare` with `parquet:`, `datasets:` or `jsonl:` in corpus.yaml"
_REMEDY = (
    "Use a file with lines of UTF-8 text, plain or compressed as .gz, .xz, .bz2 or .zst. `iconv -f ENCODING -t "
    f"UTF-8` converts text to UTF-8. {_TABLES}"
)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1 on, and the text of each line of a UTF-8 file. Raises UserError."""
    number = 0
    line = ""
    try:
        for number, raw in enumerate(_split_lines(read_decompressed_blocks(path)), start=1):
            if len(raw) > _LONGEST_LINE:
                raise UserError(
                    f"{path}: line {number} has more than {_LONGEST_LINE:,} bytes. Split or remove this line"
                )
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
            yield number, _MARKS.sub("", line) if "\ufeff" in line else line
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: line {number} is not UTF-8 ({error.reason} at byte {error.start} of the line). {_REMEDY}"
        ) from None
    if number == 1 and "\r" in line:
        raise UserError(
            f"{path}: the lines end with carriage returns alone. Convert the file by `tr '\\r' '\\n' < OLD > NEW`"
        )


def read_decompressed_blocks(path: Path, accept_utf16: bool = False) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks. A file with a suffix of compression is decompressed. accept_utf16: accept
    UTF-16 as text, too. Raises UserError, also if the file is empty, a pointer of Git LFS, a web page, or not text."""
    lines = 0
    try:
        with path.open("rb") as file:
            packed = path.suffix in _DECODERS
            size = _PACKED_BLOCK if packed else _BLOCK
            head = file.read(size)
            problem = describe_placeholder(head) if head else "is empty. Use a file with text"
            if problem:
                raise UserError(f"{path} {problem}")
            blocks: Iterator[bytes] = chain([head], iter(partial(file.read, size), b""))
            if packed:
                blocks = _decompressed(blocks, path.suffix)
            for block in blocks:
                if lines == 0 and not accept_utf16 and _begins_with_binary_data(block):
                    raise UserError(f"{path} has binary data instead of lines of text. {_REMEDY}")
                lines += block.count(b"\n")
                yield block
    except EOFError as error:
        raise UserError(
            f"{path} cannot be decompressed after line {lines} ({error}). If the file is incomplete, copy it "
            f"again. If the file is not compressed, remove {path.suffix} from the file name"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}; lines read before this error: {lines}). Correct "
            f"the path or its permissions, or use another file with lines of text. {_TABLES}"
        ) from None


def _begins_with_binary_data(block: bytes) -> bool:
    """Return whether more than a third of the bytes at the beginning of a block, or in its first line, are control
    bytes."""
    beginning = block[: 1 << 16]
    for data in (beginning, beginning.partition(b"\n")[0]):
        controls = len(data) - len(data.translate(None, _CONTROLS))
        if 3 * controls > len(data) >= 8:
            return True
    return False


_DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".bz2": bz2.BZ2Decompressor,
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
}
"""Suffix of a compressed file -> a function that returns a new decoder for one compressed stream."""


def _decompressed(blocks: Iterator[bytes], suffix: str) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks. The file may have several compressed streams. Raises EOFError
    if a stream is incomplete, or if other bytes follow the last stream; the libraries' own readers accept both."""
    padding = b"" if suffix == ".zst" else b"\0"
    decoder: Any = None
    data = ignored = b""
    while data := data or next(blocks, b""):
        if not decoder:
            data = data.lstrip(ignored)
            if not data:
                continue
            decoder = _DECODERS[suffix]()
        try:
            text = decoder.decompress(data)
        except (lzma.LZMAError, zlib.error, zstandard.ZstdError, OSError) as error:
            raise EOFError(str(error)) from None
        yield text
        data = decoder.unused_data if decoder.eof else b""
        if decoder.eof:
            decoder = None
        ignored = padding
    if decoder:
        raise EOFError("the compressed data are cut off")


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text without their line ends. blocks: the text. A line of more than _LONGEST_LINE bytes may
    be incomplete."""
    rest = list[bytes]()
    size = 0
    for block in blocks:
        first, *others = block.split(b"\n")
        rest.append(first)
        size += len(first)
        if others or size > _LONGEST_LINE:
            yield b"".join(rest)
            yield from others[:-1]
            rest = others[-1:]
            size = len(others[-1]) if others else 0
    if size:
        yield b"".join(rest)


def stripped_piece_of_text(text: str, number: int, pieces: int) -> str:
    """Cut a text into `pieces` pieces of similar length, and return piece `number` without outer white space.

    A piece ends at the last white space in its second half. If there is none, it ends at the last place in that half
    that keeps combining marks with their letters.
    """
    return text[_end_of_first_pieces(text, number, pieces) : _end_of_first_pieces(text, number + 1, pieces)].strip()


def _end_of_first_pieces(text: str, number: int, pieces: int) -> int:
    """Return the index in `text` at which the first `number` of `pieces` pieces end."""
    end = len(text) * number // pieces
    if number in (0, pieces):
        return end
    second_half = range(end, end - len(text) // pieces // 2, -1)
    for place in second_half:
        if text[place - 1].isspace():
            return place
    for place in second_half:
        if unicodedata.category(text[place])[0] != "M":
            return place
    return end
