"""What a shard directory, or each shard directory one level below, holds.

python -m data_tools.inspect DIR [--show N] [--verify]
"""

import argparse
from pathlib import Path

import numpy as np

from data_tools.index import summary
from data_tools.ranks import Ranks, run
from xscale.data.scan import scan_shard
from xscale.data.shards import Source, directories_below, idx_path, read_index
from xscale.errors import UserError
from xscale.files import sha256_file

_LENGTH_SAMPLE = 10_000


def describe(source: Source, show: int) -> list[str]:
    lines = [summary(source.directory, source.index)]
    for shard in source.shards[:20]:
        lines.append(f"  {shard.name}  {shard.records:,} records  {shard.bytes:,} bytes  sha256 {shard.sha256[:16]}")
    if len(source.shards) > 20:
        lines.append(f"  ... and {len(source.shards) - 20} more")
    ordinals = np.linspace(0, source.records - 1, min(source.records, _LENGTH_SAMPLE)).astype(np.int64)
    ends = np.cumsum(source.counts)
    shards = np.searchsorted(ends, ordinals, side="right")
    places = list(zip(shards.tolist(), (ordinals - ends[shards] + source.counts[shards]).tolist(), strict=True))
    records = [source.read(shard, record) for shard, record in places]
    for side, lang in enumerate(source.langs):
        words = np.array([len(record.texts[side].split()) for record in records])
        low, middle, high = np.percentile(words, [5, 50, 95])
        lines.append(
            f"  {lang}: words a sentence {words.mean():.1f} on average, 5 % {low:.0f}, 50 % {middle:.0f}, "
            f"95 % {high:.0f}, longest {words.max()} (of {len(records):,} records)"
        )
    linked = sum(record.links is not None for record in records)
    lines.append(f"  with word links: {100 * linked / len(records):.0f} %")
    for at in np.linspace(0, len(places) - 1, min(show, len(places))).astype(np.int64):
        shard, number = places[at]
        lines.append("  " + source.read(shard, number).to_json())
    return lines


def damage(source: Source, ranks: Ranks) -> list[str]:
    """Every shard whose bytes differ from the index, with the first damaged record where it can be told."""

    def verify() -> list[str]:
        problems = []
        for number in range(ranks.rank, len(source.shards), ranks.size):
            shard = source.shards[number]
            path = source.directory / shard.name
            if not path.exists():
                problems.append(f"{path} is missing")
            elif sha256_file(path) != shard.sha256:
                problems.append(_first_damage(source, number))
            elif not _idx_fits(path, source.langs):
                problems.append(
                    f"{idx_path(path)} does not fit its shard; run `python -m data_tools.index {source.directory}`"
                )
        return problems

    return sorted(problem for part in ranks.together(verify) for problem in part)


def _idx_fits(path: Path, langs: tuple[str, ...]) -> bool:
    idx = idx_path(path)
    return idx.exists() and idx.read_bytes() == scan_shard(path, langs).idx.tobytes()


def _first_damage(source: Source, number: int) -> str:
    path = source.directory / source.shards[number].name
    for record in range(source.shards[number].records):
        try:
            source.read(number, record)
        except (UserError, ValueError, OSError) as error:
            return str(error)
    try:
        scan_shard(path)
    except UserError as error:
        return str(error)
    return f"{path}: bytes outside its records differ from the index"


def main(ranks: Ranks, argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N records, spread over the source")
    parser.add_argument("--verify", action="store_true", help="compare every byte with the index")
    args = parser.parse_args(argv)
    alone = (args.directory / "index.json").exists()
    for directory in (not alone and directories_below(args.directory)) or [args.directory]:
        inspect(directory, args.show, args.verify, ranks)


def inspect(directory: Path, show: int, verify: bool, ranks: Ranks) -> None:
    read_index(directory)
    source = Source(directory)
    if verify:
        problems = damage(source, ranks)
        if problems:
            raise UserError(f"{len(problems)} damaged shards:\n" + "\n".join(f"  {problem}" for problem in problems))
        if ranks.is_main:
            print(f"{directory}: {len(source.shards)} shards verified")
    if ranks.is_main:
        source.check_sizes()
        print("\n".join(describe(source, show)))


if __name__ == "__main__":
    run(main)
