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
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="shard directories of held-out pairs")
    parser.add_argument("--limit", type=int, default=1000, help="records of each source, at most")
    parser.add_argument("--lexicons", type=Path, nargs="+", help="dictionaries for alignment (default: lexicon/*.txt)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    args = parser.parse_args()
    try:
        load_plugins(args.plugin)
        model = Exported(args.model)
        sources = [source for source in find_sources(args.data) if source.kind == "pair"]
        if not sources:
            raise UserError(f"no sentence pairs in {', '.join(map(str, args.data))}; these tasks need some")
        results: dict[str, dict[str, dict[str, float]]] = {}
        for task in args.task:
            for source in sources:
                scores = measure(task, model, source, args)
                results.setdefault(task, {})[source.name] = scores
                print(f"{task} {source.name}: " + ", ".join(f"{name} {value:,.4g}" for name, value in scores.items()))
        if args.out:
            write_json(args.out, {"model": str(args.model), "results": results})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(task: str, model: Exported, source: Source, args: argparse.Namespace) -> dict[str, float]:
    if task == "alignment":
        return alignment_score.evaluate(model, source, args.lexicons or find_lexicons([source], source.directory))
    evaluate = {"heldout": heldout.evaluate, "retrieval": retrieval.evaluate}[task]
    return evaluate(model, source, args.limit)


if __name__ == "__main__":
    sys.exit(main())
