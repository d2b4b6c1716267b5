"""A checkpoint as a Hugging Face directory: `python -m xscale.export CHECKPOINT_OR_RUN_DIR HF_DIR`.

The directory has weights, config and tokenizer for `AutoModelForMaskedLM.from_pretrained`, the files of a
`SentenceTransformer` (eval/sentence_files.py), and the objectives' own heads (models/heads.py). For a run it is the
newest checkpoint, or the best. Before the directory takes its place, it is loaded and compared with the trained model.
"""

import argparse
import sys
from pathlib import Path

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.restore import load_run
from xscale.errors import UserError, check_arguments, report_environment_error
from xscale.eval.hf_directory import check_new, write_directory
from xscale.eval.retrieval import POOLINGS
from xscale.eval.sentence_files import trained_pooling
from xscale.plugins import load_plugins


def export(source: Path, out: Path, best: bool = False, pooling: str | None = None) -> Path:
    """Returns the checkpoint that was exported. pooling: for sentences' vectors; None: as trained. Raises UserError."""
    path = find_best(source) if best else checkpoints.find(source)
    check_new(out)
    lm, heads = load_run(path)
    pooling = pooling or trained_pooling(checkpoints.read(path).identity["recipe"]["streams"])
    write_directory(out, lm, heads, path / checkpoints.HF, pooling, str(path))
    return path


def find_best(run: Path) -> Path:
    """The checkpoint that the recipe's checkpoint.best has chosen. Raises UserError."""
    named = run / "checkpoints" / checkpoints.BEST
    if not named.is_file():
        raise UserError(
            f"--best: there is no {named}; a run whose recipe sets checkpoint.best to a number of its evals writes it. "
            f"Without --best the newest checkpoint is exported"
        )
    return checkpoints.find(named.with_name(named.read_text(encoding="utf-8").strip()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    parser.add_argument("out", type=Path, metavar="HF_DIR")
    parser.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    parser.add_argument(
        "--pooling", choices=POOLINGS, help="for sentences' vectors (default: as PPA trained it, or mean)"
    )
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    args = parser.parse_args()
    try:
        check_arguments(sys.argv[1:])
        load_plugins(args.plugin)
        path = export(args.source, args.out, args.best, args.pooling)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        return report_environment_error(error)
    print(f"{path} -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
