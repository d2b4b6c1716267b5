"""Measure an exported encoder.

python -m xscale.eval.run --model HF_DIR --task NAME ... --data DIR --out FILE.json
"""

import argparse
import sys
from pathlib import Path

from xscale.data.lexicon import find_lexicons
from xscale.data.shards import Source, find_sources
from xscale.errors import UserError
from xscale.eval import alignment_score, heldout, retrieval
from xscale.eval.model import Exported, write_json
from xscale.plugins import load_plugins


def main() -> int:
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
    parser.add_argument(
        "--lexicon_heldout",
        type=float,
        metavar="SHARE",
        help="of a dictionary's words, withheld in training: alignment is theirs, and apart that of all others "
        "(default: what the model was trained with, else 0.2; 1: no word was trained)",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    args = parser.parse_args()
    try:
        if args.lexicon_heldout is not None and not 0 <= args.lexicon_heldout <= 1:
            raise UserError(f"--lexicon_heldout {args.lexicon_heldout:g} must lie between 0 and 1")
        load_plugins(args.plugin)
        model = Exported(args.model)
        sources = find_sources(args.data)
        pairs = [source for source in sources if source.kind == "pair"]
        if not pairs:
            raise UserError(f"no sentence pairs in {', '.join(map(str, args.data))}; these tasks need some")
        results: dict[str, dict[str, dict[str, float]]] = {}
        for task in args.task:
            of_task = results.setdefault(task, {})
            for source in pairs:
                scores = measure(task, model, source, sources, args)
                name = source.name if source.name not in of_task else f"{source.name} ({source.directory})"
                of_task[name] = scores
                print(f"{task} {name}: " + ", ".join(f"{key} {value:,.4g}" for key, value in scores.items()))
        if args.out:
            write_json(args.out, {"model": str(args.model), "results": results})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(
    task: str, model: Exported, source: Source, sources: list[Source], args: argparse.Namespace
) -> dict[str, float]:
    if task == "alignment":
        share = model.lexicon_heldout if args.lexicon_heldout is None else args.lexicon_heldout
        lexicons = args.lexicons or find_lexicons(sources, source.directory)
        return alignment_score.evaluate(model, source, sources, lexicons, share)
    evaluate = {"heldout": heldout.evaluate, "retrieval": retrieval.evaluate}[task]
    return evaluate(model, source, args.limit)


if __name__ == "__main__":
    sys.exit(main())
