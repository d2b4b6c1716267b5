"""Export a checkpoint as a Hugging Face directory: `xscale export CHECKPOINT_OR_RUN_DIR HF_DIR`.

The directory has weights, config and tokenizer for `AutoModelForMaskedLM.from_pretrained`, the files of a
`SentenceTransformer` (eval/sentence_files.py), the objectives' own heads (models/heads.py), and a model card
(eval/card.py). Of a run, the newest checkpoint is exported, or with --best the best one.
"""

import argparse
import re
import sys
from pathlib import Path

from huggingface_hub import HfApi

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.restore import load_model_of_run
from xscale.errors import UserError, check_arguments, report_error
from xscale.eval.card import checkpoint_card
from xscale.eval.hf_directory import check_new_directory, write_directory
from xscale.eval.retrieval import POOLINGS
from xscale.eval.sentence_files import choose_vectors


def export(source: Path, out: Path, best: bool = False, pooling: str | None = None, layers: int | None = None) -> Path:
    """Export a checkpoint, or a run's newest checkpoint, and return its path. best: export the run's best checkpoint.
    pooling: how sentence vectors are pooled; None: see choose_vectors. layers: the number of first layers to export,
    without heads; None: export the whole model. Raises UserError."""
    path = find_best(source) if best else checkpoints.resolve_checkpoint(source)
    check_new_directory(out)
    lm, heads = load_model_of_run(path)
    checkpoint = checkpoints.read_checkpoint(path)
    vectors = choose_vectors(checkpoint.identity["recipe"], pooling, layers)
    card = checkpoint_card(checkpoint, lm.config, out.resolve().name, vectors, layers)
    write_directory(out, lm, heads, path / checkpoints.HF, vectors, str(path), card, layers)
    print(f"sentence vectors: {vectors.pooling} pooling, {vectors.reason}")
    return path


def push(folder: Path, repo: str) -> None:
    """Upload an export to the hub's repository `repo`, which is created as private if needed. Raises UserError."""
    api = HfApi(library_name="xscale")
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export of xscale")
    except Exception as error:  # the hub's HTTP library, and so its exceptions, differ between versions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--push {repo}: {reason}; {folder} is complete: log in by `hf auth login` if you are not, then run "
            f"`hf upload --private {repo} {folder}`"
        ) from None


def find_best(run: Path) -> Path:
    """Return the directory of the run's checkpoint with the best value of checkpoint.best. Raises UserError."""
    named = run / "checkpoints" / checkpoints.BEST
    if not named.is_file():
        raise UserError(
            f"--best: {named} does not exist; only a run whose recipe sets checkpoint.best has it. Leave --best out to "
            f"export the newest checkpoint"
        )
    return checkpoints.resolve_checkpoint(named.with_name(named.read_text(encoding="utf-8").strip()))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="xscale export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", type=Path, metavar="CHECKPOINT_OR_RUN_DIR")
    add("out", type=Path, metavar="HF_DIR")
    add("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    add("--pooling", choices=POOLINGS, help="pooling of sentence vectors (default: that of training, or of model.init)")
    add("--layers", type=int, metavar="K", help="only the first K layers, whose states are the output")
    add("--push", metavar="REPO", help="upload the export to this repository of the hub, USER/NAME")
    try:
        check_arguments(sys.argv[1:])
        args = parser.parse_args()
        if args.push and not re.fullmatch(r"[\w.-]+/[\w.-]+", args.push):
            raise UserError(f"--push {args.push} does not name a repository of the hub; give USER/NAME")
        path = export(args.source, args.out, args.best, args.pooling, args.layers)
        print(f"{path} -> {args.out}")
        if args.push:
            push(args.out, args.push)
            print(f"{args.out} -> {args.push}")
    except (UserError, OSError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
