"""Write WebDataset shards of sentence pairs or of monolingual sentences.

    python -m data_tools.write_shards pairs --src F --tgt F --langs en de --out DIR [--links F | --align]
    python -m data_tools.write_shards mono  --text F... --lang en --out DIR

Input is UTF-8 text, plain, .gz, .xz or .zst, read as a stream; - is standard input, which must be plain. A shard covers
a fixed range of input lines (monolingual text: the documents that start in this range). The directory appears only when
it is complete. `data_tools.prepare` reads more formats, cleans the text, and works with many processes.
"""

import argparse
import contextlib
import fcntl
import io
import os
import shutil
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from xscale import files
from xscale.data.link_projection import project_links
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.record import Record

from . import align
from . import index as indexing
from .command import run
from .corpus import LANGUAGE, NAME
from .documents import FORMS, read_passages
from .readers import input_files, parallel_lines
from .sentences import is_blank, split_sentences

SHARD_LINES = 8192
"""The default number of input lines of a shard."""
MEMBER_RECORDS = 256
"""The number of records in a .jsonl member of a tar."""
STANDARD_INPUT = Path("/dev/stdin")
_PROGRESS_LINES = 200_000


class InputLine(NamedTuple):
    number: int
    """The line's number over all input files. For monolingual text: that of its document's first line."""
    reason: str
    """The reason why the line gives no record, or ""."""
    records: list[Record] = []  # noqa: RUF012 (nobody appends)
    dropped_links: int = 0
    """The number of links that were dropped because they link a word and a symbol."""


class LinkFile(NamedTuple):
    """The file of the pairs' word links, and the texts whose words it numbers."""

    path: Path
    tokenised: tuple[Path, Path] | None = None
    """The texts whose white-space words are numbered; None: the texts of the pairs themselves."""
    by_words: bool = False
    """True if the links number words as data/words.py divides texts; False: white-space words."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.path, *(self.tokenised or ()))


def pair_lines(
    src: Path, tgt: Path, links: LinkFile | None, langs: tuple[str, str], keep: "TokenFilter | None"
) -> Iterator[InputLine]:
    """Yield each pair of lines with its record. keep: selects pairs by their numbers of tokens. Raises UserError if a
    file ends before the others."""
    name = f"{stem(src)}.{langs[0]}-{langs[1]}"
    for number, row in enumerate(parallel_lines([src, tgt, *(links.paths if links else ())]), start=1):
        texts = (row[0].strip(), row[1].strip())
        if any(map(is_blank, texts)):
            yield InputLine(number, "empty")
            continue
        reason = keep.problem(texts) if keep else ""
        if reason:
            yield InputLine(number, reason)
            continue
        pharaoh, dropped = None, 0
        if links:
            tokenised = (row[3], row[4]) if links.tokenised else None
            try:
                pharaoh, dropped = project_links(row[2], texts, tokenised, links.by_words)
            except ValueError as error:
                raise UserError(
                    f"{links.path}: line {number}: {error}; links are 0-based `source-target` numbers of the "
                    f"white-space words of the text as given, or of the aligner's text: --links_src F --links_tgt F"
                ) from None
        yield InputLine(number, "", [Record(f"{name}-{number:09d}", langs, texts, pharaoh)], dropped)


@contextlib.contextmanager
def align_files(src: Path, tgt: Path, out: Path, symmetrize: str) -> Iterator[LinkFile]:
    """Yield the file of the links that eflomal makes between the words of `src` and `tgt`. It is removed at the end."""
    folder = out.with_name(out.name + ".aligning")

    def texts() -> Iterator[tuple[str, str]]:
        for line in pair_lines(src, tgt, None, ("src", "tgt"), None):
            yield line.records[0].texts if line.records else ("", "")  # type: ignore[misc]

    check_free(out)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        print(align.align(texts(), folder / "links", symmetrize), file=sys.stderr)
        yield LinkFile(folder / "links", by_words=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raise UserError unless `out` is absent or an empty directory."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose another --out")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; choose another --out or remove it")


def mono_lines(
    paths: list[Path], args: argparse.Namespace, keep: "TokenFilter | None", forms: Counter
) -> Iterator[InputLine]:
    """Yield each line with its records: one per sentence, or with --whole_lines one per line. `forms` counts the files
    of each form (documents.FORMS).

    A line goes into the shard of the line at which its document starts, so that shards do not split documents; but a
    document of more than --shard_lines lines is split.
    """
    total = first = 0
    for path, name in zip(paths, key_prefixes(paths), strict=True):
        form, lines = read_passages(path, args.documents)
        forms[form] += 1
        for number, starts, paragraphs in lines:
            total += 1
            if starts or number == 1 or total - first >= args.shard_lines:
                first = total
            texts = paragraphs if args.whole_lines else [s for p in paragraphs for s in split_sentences(p, args.lang)]
            texts = [text for text in texts if not is_blank(text)]
            kept = [(i, text) for i, text in enumerate(texts) if not (keep and keep.problem((text,)))]
            doc = None if form in ("lines", "json") and len(kept) == 1 else first  # None: alone in its document
            records = [
                Record(f"{name}.{args.lang}-{number:09d}.{i}", (args.lang,), (text,), doc=doc) for i, text in kept
            ]
            yield InputLine(first, "" if records else "length" if texts else "empty", records)


class TokenFilter:
    """Selects records by their numbers of tokens. Every side needs at least `least` tokens (Pan et al. 2021, 3.1), and
    the whole sequence with its special tokens may have at most `most`."""

    def __init__(self, tokenizer: Path, least: int, most: int):
        self.encoder, self.least, self.most = Tokenizer(tokenizer), least, most

    def problem(self, texts: tuple[str, ...]) -> str:
        """Return "too short", "too long", or "" if the numbers of tokens are allowed."""
        sizes = [len(ids) for ids in self.encoder.encode(list(texts))]
        if min(sizes) < self.least:
            return "too short"
        special = self.encoder.pair.special if len(texts) == 2 else 2
        return "too long" if sum(sizes) + special > self.most else ""


def stem(path: Path) -> str:
    return path.name.partition(".")[0]


def key_prefixes(paths: list[Path]) -> list[str]:
    """Return the beginning of each file's record keys: the file's stem, or, if files share a stem (WikiExtractor's
    AA/wiki_00 and AB/wiki_00), its path below the files' common directory."""
    absolute = [Path(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath([path.parent for path in absolute])
    times = Counter(map(stem, paths))
    return [stem(path) if times[stem(path)] == 1 else path.relative_to(common).as_posix() for path in absolute]


def make_locked_folder(partial: Path) -> int:
    """Make an empty folder, lock it for this process, and return the lock's file descriptor. The lock lasts until the
    descriptor is closed. Raises UserError if another process has the lock."""
    if partial.is_dir():
        os.close(lock_folder(partial))
    files.remove(partial)
    partial.mkdir(parents=True, exist_ok=True)
    return lock_folder(partial)


def lock_folder(folder: Path) -> int:
    """Lock a folder until the returned file descriptor is closed. Raises UserError if another process has the lock."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"{folder} is being written by another process; wait for it, or stop it") from None
    except OSError:
        pass  # a file system without locks
    return fd


def write_shards(lines: Iterable[InputLine], out: Path, name: str, shard_lines: int, made_by: dict) -> dict:
    """Write the shards and their index to the directory `out`. Return the content of index.json. Raises UserError."""
    check_free(out)
    partial = files.partial_path(out)
    lock = make_locked_folder(partial)
    counts: Counter[str] = Counter()
    shards = 0
    try:
        for _, group in groupby(lines, key=lambda line: (line.number - 1) // shard_lines):
            path = partial / f"{name}-{shards:06d}.tar"
            if written := write_shard(path, count_lines(group, counts)):
                counts["members"] += -(-written // MEMBER_RECORDS)
                shards += 1
            else:
                path.unlink()
        counts = +counts  # without zeros
        if not shards:
            left_out = ", ".join(f"{n:,} {reason}" for reason, n in counts.items())
            inputs = ", ".join(made_by.get("input", [])) or "the input"
            raise UserError(f"nothing to write to {out}: no record in {inputs} ({left_out or 'no line'})")
        made_by |= {"counts": dict(sorted(counts.items()))}
        index = indexing.build_index(partial, None, made_by, links_count="unicode")
        files.rename_into_place(partial, out)
        return index
    except BaseException:
        files.remove(partial)
        raise
    finally:
        os.close(lock)


def write_shard(path: Path, records: Iterable[Record]) -> int:
    """Write the records to a tar in WebDataset's format. Return the number of records."""
    lines, written = (record.to_json() + "\n" for record in records), 0
    with tarfile.open(path, "w") as tar:
        while member := list(islice(lines, MEMBER_RECORDS)):
            data = "".join(member).encode()
            header = tarfile.TarInfo(f"{written // MEMBER_RECORDS:08d}.jsonl")
            header.size, header.mode = len(data), 0o444
            tar.addfile(header, io.BytesIO(data))
            written += len(member)
    return written


def count_lines(lines: Iterable[InputLine], counts: Counter[str]) -> Iterator[Record]:
    """Yield the records of the lines. Add to `counts`, and print the number of lines from time to time."""
    for line in lines:
        counts["lines"] += 1
        counts["records"] += len(line.records)
        counts["dropped_links"] += line.dropped_links
        if not line.records:
            counts[line.reason] += 1
        yield from line.records
        if counts["lines"] % _PROGRESS_LINES == 0:
            print(f"{counts['lines']:,} lines", file=sys.stderr, flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="kind", required=True)
    pairs = commands.add_parser("pairs", help="line n of --src and line n of --tgt are translations")
    pairs.add_argument("--src", type=text_path, required=True, help="a file; - is standard input")
    pairs.add_argument("--tgt", type=text_path, required=True)
    pairs.add_argument("--langs", nargs=2, required=True, metavar=("SRC", "TGT"))
    links = pairs.add_mutually_exclusive_group()
    links.add_argument("--links", type=text_path, help="word links in Pharaoh form, one line a pair")
    links.add_argument("--align", action="store_true", help="make word links with eflomal (data_tools/align.py)")
    for side in ("src", "tgt"):
        pairs.add_argument(f"--links_{side}", type=text_path, help=f"--{side} as the aligner saw it, if not as given")
    pairs.add_argument(
        "--symmetrize",
        choices=list(align.SYMMETRIZE),
        default="grow-diag-final-and",
        help="how --align joins the links of both directions",
    )
    mono = commands.add_parser("mono", help="plain text or WikiExtractor output; files or directories")
    mono.add_argument("--text", type=text_path, nargs="+", required=True, help="- is standard input")
    mono.add_argument("--lang", required=True)
    mono.add_argument(
        "--documents",
        choices=["auto", *FORMS],
        default="auto",
        help="what a document is: from <doc> to </doc>, lines without a blank one between them, a JSON object with its "
        "text, or each line; auto: by the first lines of each file",
    )
    mono.add_argument("--whole_lines", action="store_true", help="a record is a line, not a sentence")
    for command in (pairs, mono):
        command.add_argument("--out", type=Path, required=True, help="directory to make")
        command.add_argument("--name", help="shards are NAME-%%06d.tar")
        command.add_argument(
            "--shard_lines", type=int, default=SHARD_LINES, help="the number of input lines of a shard"
        )
        command.add_argument("--tokenizer", type=Path, help="needed by --min_tokens and --max_tokens")
        command.add_argument("--min_tokens", type=int, help="the fewest tokens of each side")
        command.add_argument(
            "--max_tokens", type=int, help="the most tokens of a sequence, as data.max_length counts them"
        )
    return parser.parse_args(argv)


def text_path(name: str) -> Path:
    return STANDARD_INPUT if name == "-" else Path(name)


def check_pipes(args: argparse.Namespace) -> None:
    """Raise UserError if a pipe would have to be read twice."""
    given = args.text if args.kind == "mono" else [args.src, args.tgt, args.links, args.links_src, args.links_tgt]
    for path in filter(None, given):
        is_pipe = path == STANDARD_INPUT or (path.exists() and not path.is_file() and not path.is_dir())
        if is_pipe and given.count(path) > 1:
            raise UserError(f"{path} is given {given.count(path)} times, but can be read only once; give files")
        if is_pipe and not path.is_file() and args.kind == "pairs" and args.align:
            raise UserError(f"{path} is a pipe, which can be read only once; write its text to a file for --align")


def given_links(args: argparse.Namespace) -> LinkFile | None:
    """Return the links that --links, --links_src and --links_tgt name, or None. Raises UserError."""
    tokenised = (args.links_src, args.links_tgt)
    if tokenised == (None, None):
        return LinkFile(args.links) if args.links else None
    if not args.links or None in tokenised:
        raise UserError(
            "--links_src and --links_tgt are the texts whose words --links numbers: give all three flags, or --links "
            "alone if it numbers the words of --src and --tgt"
        )
    return LinkFile(args.links, tokenised)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    check_pipes(args)
    keep = None
    if args.min_tokens is not None or args.max_tokens is not None:
        if not args.tokenizer:
            raise UserError("--min_tokens and --max_tokens count tokens: also give --tokenizer")
        most = args.max_tokens if args.max_tokens is not None else sys.maxsize
        keep = TokenFilter(args.tokenizer, args.min_tokens or 0, most)
    if args.kind == "pairs" and args.langs[0] == args.langs[1]:
        raise UserError(f"--langs {' '.join(args.langs)} are the same; give the sides two different languages")
    for language in args.langs if args.kind == "pairs" else [args.lang]:
        if not LANGUAGE.fullmatch(language):
            raise UserError(
                f"language {language!r}: its name must have only letters, digits and _, with - between, such as en "
                f"or zh-Hant"
            )
    if args.name is not None and not NAME.fullmatch(args.name):
        raise UserError(f"--name {args.name!r}: needs only letters, digits, _, - and ., and no - or . at its start")
    if args.shard_lines < 1:
        raise UserError(f"--shard_lines {args.shard_lines} must be positive")
    made_by = {
        "tool": f"data_tools.write_shards {args.kind}",
        "min_tokens": args.min_tokens,
        "max_tokens": args.max_tokens,
    }
    with contextlib.ExitStack() as stack:
        if args.kind == "pairs":
            links = given_links(args)
            if args.align:
                links = stack.enter_context(align_files(args.src, args.tgt, args.out, args.symmetrize))
                made_by["links"] = f"eflomal, {args.symmetrize}"
            lines = pair_lines(args.src, args.tgt, links, tuple(args.langs), keep)
            name, files = args.name or "pairs", [args.src, args.tgt]
        else:
            files = input_files(args.text)
            made_by["documents"] = Counter()
            lines = mono_lines(files, args, keep, made_by["documents"])
            name = args.name or "mono"
        made_by["input"] = [file.name for file in files]
        index = write_shards(lines, args.out, name, args.shard_lines, made_by)
    print(indexing.summary_line(args.out, index), *indexing.warning_lines(args.out, index), sep="\n")


if __name__ == "__main__":
    run(main)
