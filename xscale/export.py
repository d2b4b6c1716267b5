"""A checkpoint as a Hugging Face directory: `python -m xscale.export CHECKPOINT_OR_RUN_DIR HF_DIR`.

Writes weights, config and tokenizer that `AutoModelForMaskedLM.from_pretrained` loads; of a run, its newest checkpoint.
"""

import argparse
import sys
from pathlib import Path

from transformers import AutoTokenizer

from xscale import files
from xscale.errors import UserError
from xscale.models.build import positions
from xscale.plugins import load_plugins
from xscale.run import checkpoint as checkpoints
from xscale.run.weights import load_model


def export(source: Path, out: Path) -> Path:
    """Returns the checkpoint that was exported. Raises UserError."""
    path = checkpoints.find(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory; choose another or remove it")
    files.check_writable(out)
    lm = load_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path / checkpoints.HF)
    tokenizer.model_max_length = positions(lm.config)
    with files.publish(out) as partial:
        lm.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    parser.add_argument("out", type=Path, metavar="HF_DIR")
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    args = parser.parse_args()
    try:
        load_plugins(args.plugin)
        path = export(args.source, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path} -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
