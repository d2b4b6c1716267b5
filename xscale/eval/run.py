"""Measure an exported encoder.

python -m xscale.eval.run --model HF_DIR --task NAME ... --data DIR --out FILE.json
"""

import argparse
import sys
from pathlib import Path

from xscale.data.index import find_sources
from xscale.errors import UserError
from xscale.eval import heldout, retrieval
from xscale.eval.model import Exported, write_json

TASKS = {"heldout": heldout.evaluate, "retrieval": retrieval.evaluate}
"""(model, source of pairs, most records) -> {measure: value}."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, e.g. from xscale.export")
    parser.add_argument("--task", nargs="+", choices=sorted(TASKS), required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="shard directories of held-out pairs")
    parser.add_argument("--limit", type=int, default=1000, help="records of each source, at most")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    try:
        model = Exported(args.model)
        sources = [source for source in find_sources(args.data) if source.kind == "pair"]
        if not sources:
            raise UserError(f"no sentence pairs in {', '.join(map(str, args.data))}; these tasks need some")
        results: dict[str, dict[str, dict[str, float]]] = {}
        for task in args.task:
            for source in sources:
                scores = TASKS[task](model, source, args.limit)
                results.setdefault(task, {})[source.name] = scores
                print(f"{task} {source.name}: " + ", ".join(f"{name} {value:,.4g}" for name, value in scores.items()))
        if args.out:
            write_json(args.out, {"model": str(args.model), "results": results})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
