"""Reads text files line by line: plain, .gz, .xz or .zst. A cut-off file is an error. Errors name file and line."""

import gzip
import lzma
import os
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from xscale.errors import UserError, can_be_encoded

_BLOCK = 1 << 15
_LONGEST_LINE = 1 << 26
"""The maximum number of bytes of a line; a file with a longer line is refused, so that memory is bounded."""
_ZSTD_BLOCK = 1 << 10
"""The number of bytes of a .zst file that are decompressed at once; the text in them may be 32,768 times as large."""
_FORMS = {
    b"\x1f\x8b": "is compressed by gzip; name it .gz",
    b"\xfd7zXZ": "is compressed by xz; name it .xz",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; name it .zst",
    b"BZh": "is compressed by bzip2; decompress it first: `bunzip2`",
    b"PK\x03\x04": "is a zip archive; extract it first",
    b"7z\xbc\xaf": "is a 7z archive; extract it first",
    b"\x04\x22\x4d\x18": "is compressed by lz4; decompress it first: `lz4 -d`",
    b"PAR1": 'is a Parquet table; make JSON lines of it: `python -c "import datasets; '
    "datasets.Dataset.from_parquet('{path}').to_json('{path}.jsonl')\"`",
    b"ARROW1": 'is an Arrow table; make JSON lines of it: `python -c "import datasets, pyarrow.ipc as i; '
    "datasets.Dataset(i.open_file('{path}').read_all()).to_json('{path}.jsonl')\"`",
    b"\xff\xff\xff\xff": 'is an Arrow table; make JSON lines of it: `python -c "import datasets; '
    "datasets.Dataset.from_file('{path}').to_json('{path}.jsonl')\"`",
    b"\xff\xfe": "is UTF-16; convert it first: `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "is UTF-16; convert it first: `iconv -f UTF-16 -t UTF-8`",
}
"""First bytes of a file that is not plain text -> what its error message says."""
_OLD_MAC = 8
"""A file is refused if its first line has at least this many carriage returns, the line ends of old Macs."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end) for a UTF-8 file. Raises UserError."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(_OPENERS.get(path.suffix, _plain)(file), start=1):
                if len(raw) > _LONGEST_LINE:
                    raise UserError(f"{path}: line {number} has more than {_LONGEST_LINE:,} bytes; split or remove it")
                if number == 1:
                    _check_form(path, raw)
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except IsADirectoryError:
        _check_folder(path)
        raise UserError(f"{path} is a folder; give a file of text") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: line {number} is not UTF-8 ({error.reason} at byte {error.start} of the line). Convert the "
            f"file, e.g. with `iconv -t UTF-8`"
        ) from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"{path}: cannot be decompressed after line {number} ({error}); the file is damaged, copy it again"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read after line {number} ({error.strerror})") from None


def _check_form(path: Path, line: bytes) -> None:
    form = next((form for start, form in _FORMS.items() if line.startswith(start)), None)
    if form is None and len(line) >= 8 and 3 * line.count(0) > len(line):
        form = _FORMS[b"\xff\xfe"]
    if form is None and line.rstrip(b"\r\n").count(b"\r") >= _OLD_MAC:
        form = "has the line ends of old Macs, \\r alone; convert it first: `tr '\\r' '\\n'`"
    if form:
        raise UserError(f"{path} {form.format(path=path)}")


def _check_folder(path: Path) -> None:
    """Raises UserError for a folder that the `datasets` library saved."""
    for name, part in (("dataset_dict.json", "['train']"), ("state.json", "")):
        if (path / name).exists() and ((path / "dataset_info.json").exists() or part):
            raise UserError(
                f'{path} is a folder that `save_to_disk` wrote; make JSON lines of it: `python -c "import datasets; '
                f"datasets.load_from_disk('{path}'){part}.to_json('{path.name}.jsonl')\"`"
            )


def _plain(file: BinaryIO) -> Iterator[bytes]:
    return iter(partial(file.readline, _LONGEST_LINE + 1), b"")


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as lines:
        yield from _plain(cast(BinaryIO, lines))
    if not file.tell():
        raise EOFError("it is empty")


def _unxz(file: BinaryIO) -> Iterator[bytes]:
    """Yield the text of all streams of an .xz file. Unlike lzma.open, refuse trailing bytes that are no stream."""
    decoder, form, data = None, lzma.FORMAT_AUTO, b""
    while data := data or file.read(_BLOCK):
        if decoder is None:
            data = data.lstrip(b"\0") if form == lzma.FORMAT_XZ else data  # padding between streams
            decoder, form = lzma.LZMADecompressor(form) if data else None, lzma.FORMAT_XZ
            continue
        yield decoder.decompress(data, _LONGEST_LINE)
        while not (decoder.eof or decoder.needs_input):
            yield decoder.decompress(b"", _LONGEST_LINE)
        data, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    if decoder or not file.tell():
        raise EOFError("it ends inside a stream" if decoder else "it is empty")


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    """Yield the text of all frames of a .zst file. Unlike zstandard's own reader, refuse a cut-off frame."""
    try:
        import zstandard
    except ImportError:
        raise UserError(".zst files need zstandard: `pip install 'xscale[prepare]'`, or `zstd -d` them") from None
    decoder, data = None, b""
    try:
        while data := data or file.read(_ZSTD_BLOCK):
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            yield decoder.decompress(data)
            data, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from None
    if decoder or not file.tell():
        raise EOFError("it ends inside a frame" if decoder else "it is empty")


def _lines_of(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a text that comes in blocks, without line ends. A line over _LONGEST_LINE may be cut off."""
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
    ".gz": _gunzip,
    ".xz": lambda file: _lines_of(_unxz(file)),
    ".zst": lambda file: _lines_of(_unzstd(file)),
}


def files_of(paths: list[Path]) -> list[Path]:
    """Each path itself, or for a folder all files below it except hidden ones, sorted. Raises UserError."""

    def below(folder: Path) -> list[Path]:
        _check_folder(folder)
        found = (path for path in folder.rglob("*") if not path.is_dir())
        return sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(folder).parts))

    files = [f for path in paths for f in (below(path) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"no file in {', '.join(map(str, paths))}")
    for path in files:
        if path.exists() and not path.is_file() and path not in paths:  # reading a pipe would wait forever
            raise UserError(f"{path} is neither a file nor a directory; remove it, or name the files")
        if not can_be_encoded(str(path)):
            raise UserError(f"{str(path)!a} is not UTF-8, but keys of records contain file names; rename it")
    twice = [path for path, times in Counter(os.path.abspath(path) for path in files).items() if times > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice, so its lines would be read twice")
    return files


def stretch(text: str, number: int, of: int) -> str:
    """Piece `number` of a text cut into `of` pieces of similar length, with outer white space removed.

    A piece ends at the last white space in its second half, or else before any character that is not a mark.
    """
    return text[_end_of(text, number, of) : _end_of(text, number + 1, of)].strip()


def _end_of(text: str, number: int, of: int) -> int:
    """The index at which the first `number` pieces end."""
    end = len(text) * number // of
    if number in (0, of):
        return end
    second_half = range(end, end - len(text) // of // 2, -1)
    spaces = (at for at in second_half if text[at - 1].isspace())
    return next(spaces, next((at for at in second_half if unicodedata.category(text[at])[0] != "M"), end))
