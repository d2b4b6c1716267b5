"""A run's directory: whose it is, who is at work in it, and where a start goes on from."""

import fcntl
import json
import os
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.store import Checkpoint
from xscale.data.lexicon import Lexicon
from xscale.errors import UserError
from xscale.ranks import HostGroup
from xscale.run.metrics import LOG

IDENTITY = "identity.json"
STARTS, STATUS = "starts.jsonl", "status.json"
FOREIGN = ("config.yaml", "metrics.jsonl", "checkpoints", "index.json", "*/index.json", "config.json", "tokenizer.json")
"""Of other trainers' runs, shards, models and tokenizers."""


def claim_out(out: Path, identity: dict[str, Any], resume: str) -> None:
    """May `out` be this run's directory? Raises UserError where it belongs to another run, or is something else."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; choose another")
    path = out / IDENTITY
    saved = read_identity(out)
    if saved is None and not path.exists() and any(next(out.glob(name), None) for name in FOREIGN):
        raise UserError(f"{out} holds something that is not an xscale run (no identity.json); choose another --out")
    if resume == "never" and (saved or path.exists()):
        raise UserError(f"{out} already holds a run; --resume auto goes on with it, or choose another --out")
    if saved:
        check_languages(out, saved)
    differences = changed(saved, identity) if saved else []
    if differences:
        raise UserError(
            f"{out} belongs to another run; go on with what it was started with (fields that were None may be newer "
            f"than it: {STARTS} names its version of xscale), or choose another --out, to start from its weights with "
            f"--set model.init={out}:\n" + "\n".join(f"  {line}" for line in differences)
        )


def check_languages(where: Path, saved: dict[str, Any]) -> None:
    """Raises UserError for a run from before token type 0 was neutral, with another table of language embeddings."""
    older = False
    with suppress(AttributeError, KeyError):  # of what is no run's, `compare` says so
        streams = saved["recipe"]["streams"].values()
        older = any(stream.get("language_embeddings") and "language_dropout" not in stream for stream in streams)
    if older:
        raise UserError(
            f"{where} has language embeddings from before there was a neutral one, and cannot be resumed; start a new "
            f"run from it, --set model.init={where} with another --out, or export it as it is"
        )


def read_identity(out: Path) -> dict[str, Any] | None:
    """Of the run in a directory, by its file or else its newest checkpoint that can be read; None: neither says."""
    with suppress(OSError, ValueError):
        saved = json.loads((out / IDENTITY).read_text(encoding="utf-8"))
        if isinstance(saved, dict) and saved:
            return saved
    for path in reversed(checkpoints.complete_steps(out / "checkpoints")):
        with suppress(UserError):
            return checkpoints.read(path).identity
    return None


def write_lexicons(out: Path, lexicons: tuple[Lexicon, ...]) -> None:
    """Those whose spelling was changed, for evaluations of other processes. Rank 0 only."""
    for lexicon in (lexicon for lexicon in lexicons if lexicon.changed):
        path = out / "lexicon" / f"{lexicon.name}.{lexicon.fingerprint}.txt"
        path.parent.mkdir(exist_ok=True)
        files.write_text(path, "".join(f"{a}\t{b}\n" for a, b in lexicon.words))


def is_idle(out: Path) -> bool:
    """Whether a start that failed before it had the directory may say so there: in a new one, or a run's at rest."""
    if not out.exists():
        return True
    if not out.is_dir() or not ((out / IDENTITY).exists() or (out / STATUS).exists() or not any(out.iterdir())):
        return False
    try:
        with (out / files.LOCK).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def note_start(out: Path, step: int, ranks: int) -> None:
    """A line of starts.jsonl: from which step, by which code, where. Rank 0 only."""
    entry: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "step": step, "ranks": ranks}
    entry |= {"host": os.uname().nodename, "job": os.environ.get("SLURM_JOB_ID"), "command": sys.argv}
    entry |= code_revision()
    entry["versions"] = {name: version(name) for name in ("torch", "deepspeed", "transformers")}
    with (out / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def code_revision() -> dict[str, Any]:
    """The checkout's commit and the files that differ from it; null of code that is not in git."""
    root = Path(__file__).resolve().parents[2]
    asked = [["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
    try:
        commit, changed = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "changed": None}
    return {"revision": commit.strip(), "changed": [line[3:] for line in changed.splitlines()]}


def changed(saved: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Lines for what of a run's identity is another one. Runs from before special tokens were noted may have any."""
    return compare(saved, {key: value for key, value in identity.items() if key in saved or key != "special_tokens"})


def compare(saved: Any, current: Any, where: str = "", form: str = "was {}, is now {}") -> list[str]:
    """Lines `field: was X, is now Y` for every difference of two trees."""
    if isinstance(saved, dict) and isinstance(current, dict):
        keys = [*saved, *(key for key in current if key not in saved)]
        return [
            line
            for k in keys
            for line in compare(saved.get(k), current.get(k), f"{where}.{k}" if where else str(k), form)
        ]
    return [] if saved == current else [f"{where}: {form.format(saved, current)}"]


def find_checkpoint(out: Path, resume: str, identity: dict[str, Any], host_group: HostGroup) -> Checkpoint | None:
    """The checkpoint to start from, or None. Raises UserError where the run it belongs to differs."""
    if resume == "never":
        return None
    if resume == "auto":
        found = checkpoints.newest_valid(out / "checkpoints", host_group, LOG.warning)
        if found is None and checkpoints.complete_steps(out / "checkpoints"):
            raise UserError(f"no checkpoint in {out / 'checkpoints'} is usable; remove them to start again")
        if found is None and has_steps(out / "metrics.jsonl"):
            raise UserError(
                f"{out / 'metrics.jsonl'} tells of steps, but no checkpoint in {out / 'checkpoints'} has its "
                f"{checkpoints.MANIFEST}: bring them back, or move {out} away to start again"
            )
    else:
        path = Path(resume)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        if (folder / checkpoints.MANIFEST).exists():
            problem = checkpoints.verify(folder, host_group)
            if problem:
                raise UserError(f"checkpoint {folder} is not usable: {problem}")
            found = checkpoints.read(folder)
        else:
            found = checkpoints.newest_valid(folder, host_group, LOG.warning)
        if found is None:
            raise UserError(f"--resume {resume}: no complete checkpoint there")
    if found:
        check_languages(found.path, found.identity)
    differences = changed(found.identity, identity) if found else []
    if found and differences:
        raise UserError(
            f"checkpoint {found.path} was made with other settings:\n" + "\n".join(f"  {line}" for line in differences)
        )
    return found


def has_steps(metrics: Path) -> bool:
    """Whether a run has trained, going by its metrics."""
    with suppress(OSError):
        return metrics.read_bytes().count(b"\n") > 0
    return False


def dump(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"
