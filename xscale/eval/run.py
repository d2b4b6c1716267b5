"""Measure an exported encoder.

python -m xscale.eval.run --model HF_DIR --task NAME ... --data DIR --out FILE.json
"""

import argparse
import sys
import traceback
from itertools import product
from pathlib import Path

from xscale import files
from xscale.data.lexicon import find_lexicons
from xscale.data.shards import Source, find_sources
from xscale.errors import UserError
from xscale.eval import alignment_score, heldout, retrieval
from xscale.eval.model import Exported, write_json
from xscale.plugins import load_plugins


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, e.g. from xscale.export")
    parser.add_argument("--task", nargs="+", choices=("alignment", "heldout", "retrieval"), required=True)
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        help="shard directories of held-out pairs; for alignment, of text of the languages",
    )
    parser.add_argument("--limit", type=int, default=1000, help="records of each source, at most")
    parser.add_argument("--lexicons", type=Path, nargs="+", help="dictionaries for alignment (default: lexicon/*.txt)")
    choices = parser.add_argument_group("retrieval", "Of several values every combination is measured.")
    choices.add_argument("--pooling", nargs="+", choices=retrieval.POOLINGS, default=["mean"], help="default: mean")
    choices.add_argument(
        "--layer", nargs="+", type=layer, default=[-1], metavar="N", help="0: embeddings, -1: last (default), or all"
    )
    choices.add_argument("--margin", nargs="+", choices=retrieval.MARGINS, default=["cosine"], help="default: cosine")
    parser.add_argument(
        "--lexicon_heldout",
        type=float,
        metavar="SHARE",
        help="of a dictionary's words, withheld in training: alignment is theirs, and apart that of all others "
        "(default: what the model was trained with, else 0.2; 1: no word was trained)",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    args = parser.parse_args(argv)
    try:
        if args.lexicon_heldout is not None and not 0 <= args.lexicon_heldout <= 1:
            raise UserError(f"--lexicon_heldout {args.lexicon_heldout:g} must lie between 0 and 1")
        load_plugins(args.plugin)
        if args.out:
            check_out(args.out)
        model = Exported(args.model)
        sources = find_sources(args.data)
        pairs = [source for source in sources if source.kind == "pair"]
        if not pairs:
            raise UserError(f"no sentence pairs in {', '.join(map(str, args.data))}; these tasks need some")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return measure_all(model, pairs, sources, args)


def check_out(path: Path) -> None:
    """Raises UserError, before the work, where no file could be written."""
    if path.is_dir():
        raise UserError(f"--out {path} is a directory; give a file, such as {path / 'scores.json'}")
    files.check_writable(path)


def names_of(sources: list[Source]) -> list[str]:
    """By languages, and by folder too where several have the same."""
    names = [source.name for source in sources]
    return [
        f"{name} ({source.directory})" if names.count(name) > 1 else name
        for name, source in zip(names, sources, strict=True)
    ]


def measure_all(model: Exported, pairs: list[Source], sources: list[Source], args: argparse.Namespace) -> int:
    """Every task on every source, printed and written as it is done; one that fails keeps no other from being measured.
    Returns the exit code: 2 after a user's error, 1 after one of ours."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    failed: dict[str, dict[str, str]] = {}
    code = 0
    for task, (name, source) in product(args.task, zip(names_of(pairs), pairs, strict=True)):
        try:
            for variant, scores in measure(task, model, source, sources, args).items():
                row = f"{name} {variant}".strip()
                results.setdefault(task, {})[row] = scores
                print(f"{task} {row}: " + ", ".join(f"{score} {value:,.4g}" for score, value in scores.items()))
        except Exception as error:
            ours = not isinstance(error, UserError)
            text = f"{type(error).__name__}: {error}" if ours else str(error)
            failed.setdefault(task, {})[name] = text
            print(f"error: task {task} on {name}: {text}", file=sys.stderr)
            if ours:
                traceback.print_exc()
            code = 1 if ours else code or 2
        if args.out:
            write_json(args.out, {"model": str(args.model), "results": results, "failed": failed})
    return code


def measure(
    task: str, model: Exported, source: Source, sources: list[Source], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Scores by variant of the task; "" where there is one alone. sources: all of --data."""
    if task == "alignment":
        share = model.lexicon_heldout if args.lexicon_heldout is None else args.lexicon_heldout
        lexicons = args.lexicons or find_lexicons(sources, source.directory)
        return {"": alignment_score.evaluate(model, source, sources, lexicons, share)}
    if task == "heldout":
        return {"": heldout.evaluate(model, source, args.limit)}
    poolings, margins = (list(dict.fromkeys(names)) for names in (args.pooling, args.margin))
    return retrieval.evaluate(model, source, args.limit, poolings, args.layer, margins)


def layer(text: str) -> str | int:
    return text if text == retrieval.ALL else int(text)


if __name__ == "__main__":
    sys.exit(main())
