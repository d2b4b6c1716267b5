"""Text files, read as streams: plain, .gz or .xz, one line at a time, errors with file and line."""

import gzip
import lzma
import re
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xscale.errors import UserError

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_END = re.compile(r"(?<=[.!?…])[\"'”’»)\]]*\s+(?=[\"'“„«(\[]*[A-ZÀ-ÞĀ-ŽΑ-ΩА-Я0-9])|(?<=[。！？])")
_INITIAL = re.compile(r"(?:^|[\s(])(?:[A-Z]|[A-Z][a-z]{1,2}|\d{1,3}|etc|bzw|ca|vgl|usw)\.$")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end) of a UTF-8 file. Raises UserError."""
    opener = _OPENERS.get(path.suffix, open)
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: line {number} is not UTF-8 ({error.reason} at byte {error.start} of the line). Convert the "
            f"file, e.g. with `iconv -t UTF-8`"
        ) from None
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: cannot be decompressed after line {number} ({error}); the file is damaged") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read after line {number} ({error.strerror})") from None


def files_of(paths: list[Path]) -> list[Path]:
    """Each path itself, or all files below it, sorted."""
    found = [f for path in paths for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [path for path in found if not path.is_dir()]
    if not files:
        raise UserError(f"no file in {', '.join(map(str, paths))}")
    return files


def stretch(text: str, number: int, of: int) -> str:
    """One of `of` stretches of about the same length that the text consists of, without white space at its ends.

    They end at white space where there is some in their second half, else before any character that is no mark.
    """
    return text[_end_of(text, number, of) : _end_of(text, number + 1, of)].strip()


def _end_of(text: str, number: int, of: int) -> int:
    """Where the first `number` stretches end."""
    end = len(text) * number // of
    if number in (0, of):
        return end
    second_half = range(end, end - len(text) // of // 2, -1)
    spaces = (at for at in second_half if text[at - 1].isspace())
    return next(spaces, next((at for at in second_half if unicodedata.category(text[at])[0] != "M"), end))


def split_sentences(line: str) -> list[str]:
    """A paragraph's sentences, by punctuation and the next word's capital. Errs towards leaving together."""
    pieces, start = [], 0
    for match in _END.finditer(line):
        piece = line[start : match.end()].strip()
        if piece and not _INITIAL.search(piece):
            pieces.append(piece)
            start = match.end()
    rest = line[start:].strip()
    return [*pieces, rest] if rest else pieces
