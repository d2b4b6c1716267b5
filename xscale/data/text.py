"""Reads text files line by line: plain, .gz, .xz or .zst. A cut-off file is an error. Errors name file and line."""

import lzma
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from xscale.errors import UserError
from xscale.files import HEAD_BYTES, pointer_in

_BLOCK = 1 << 10
"""The number of bytes that are decompressed at once; the text in them may be 32,768 times as large."""
_LONGEST_LINE = 1 << 26
"""The maximum number of bytes of a line; a file with a longer line is refused, so that memory is bounded."""
_TABLE = "is a table; let `python -m data_tools.prepare` read it (`{}:` in corpus.yaml)"
_FORMS = {
    b"\x1f\x8b": "is compressed by gzip; name it .gz",
    b"\xfd7zXZ": "is compressed by xz; name it .xz",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; name it .zst",
    b"PAR1": _TABLE.format("parquet"),
    **dict.fromkeys((b"ARROW1", b"\xff\xff\xff\xff"), "is an Arrow file; write it as parquet"),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "is UTF-16; convert it first: `iconv -f UTF-16 -t UTF-8`"),
}
"""First bytes of a file that is not plain text -> what its error message says."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) for a UTF-8 file. Raises UserError."""
    number = 0
    try:
        with path.open("rb") as file:
            problem = pointer_in(file.peek(HEAD_BYTES))
            if problem:
                raise UserError(f"{path} {problem}")
            for number, raw in enumerate(_OPENERS.get(path.suffix, _plain)(file), start=1):
                if len(raw) > _LONGEST_LINE:
                    raise UserError(f"{path}: line {number} has more than {_LONGEST_LINE:,} bytes; split or remove it")
                if number == 1:
                    _check_form(path, raw)
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except IsADirectoryError:
        check_not_datasets_folder(path)
        raise UserError(f"{path} is a folder; give a file of text") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: line {number} is not UTF-8 ({error.reason} at byte {error.start} of the line). Extract the "
            f"file, or convert it from its encoding, such as by `iconv -f LATIN1 -t UTF-8`"
        ) from None
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(
            f"{path}: cannot be decompressed after line {number} ({error}); the file is damaged, copy it again"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read after line {number} ({error.strerror})") from None


def _check_form(path: Path, line: bytes) -> None:
    form = next((form for start, form in _FORMS.items() if line.startswith(start)), None)
    if form is None and len(line) >= 8 and 3 * line.count(0) > len(line):
        form = _FORMS[b"\xff\xfe"]
    if form:
        raise UserError(f"{path} {form}")


def check_not_datasets_folder(path: Path) -> None:
    """Raise UserError for a folder that `save_to_disk` of the `datasets` library wrote."""
    if (path / "dataset_dict.json").exists() or all((path / f"{n}.json").exists() for n in ("dataset_info", "state")):
        raise UserError(f"{path} {_TABLE.format('datasets')}")


def _plain(file: BinaryIO) -> Iterator[bytes]:
    return iter(partial(file.readline, _LONGEST_LINE + 1), b"")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    import zstandard

    try:
        yield from _decompressed(file, lambda: zstandard.ZstdDecompressor().decompressobj(), padding=b"")
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from None


def _decompressed(file: BinaryIO, make_decoder: Callable[[], Any], padding: bytes = b"\0") -> Iterator[bytes]:
    """Yield the text of all compressed streams of a file in blocks. Unlike the libraries' own readers, refuse a cut-off
    stream and trailing bytes that are no stream. padding: the byte that may be repeated after a stream."""
    decoder, data, ignored = None, b"", b""
    while data := data or file.read(_BLOCK):
        if decoder or (data := data.lstrip(ignored)):
            decoder = decoder or make_decoder()
            yield decoder.decompress(data)
            data, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
            ignored = padding
    if decoder or not file.tell():
        raise EOFError("it ends inside a stream" if decoder else "it is empty")


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines, without line ends, of a text that comes in blocks. A line over _LONGEST_LINE may be cut off."""
    rest, size = list[bytes](), 0
    for block in blocks:
        first, *others = block.split(b"\n")
        rest.append(first)
        size += len(first)
        if others or size > _LONGEST_LINE:
            yield b"".join(rest)
            yield from others[:-1]
            rest, size = others[-1:], len(others[-1]) if others else 0
    if size:
        yield b"".join(rest)


_OPENERS: dict[str, Callable[[BinaryIO], Iterable[bytes]]] = {
    ".gz": lambda file: _split_lines(_decompressed(file, lambda: zlib.decompressobj(16 + zlib.MAX_WBITS))),
    ".xz": lambda file: _split_lines(_decompressed(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ))),
    ".zst": lambda file: _split_lines(_unzstd(file)),
}


def piece_of_text(text: str, number: int, pieces: int) -> str:
    """Return piece `number` of a text cut into `pieces` pieces of similar length, without outer white space.

    A piece ends at the last white space in its second half, or else before any character that is not a mark.
    """
    return text[_end_of(text, number, pieces) : _end_of(text, number + 1, pieces)].strip()


def _end_of(text: str, number: int, of: int) -> int:
    """Return the index in `text` at which the first `number` of `of` pieces end."""
    end = len(text) * number // of
    if number in (0, of):
        return end
    second_half = range(end, end - len(text) // of // 2, -1)
    spaces = (at for at in second_half if text[at - 1].isspace())
    return next(spaces, next((at for at in second_half if unicodedata.category(text[at])[0] != "M"), end))
