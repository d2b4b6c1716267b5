"""Checkpoints that are complete or absent.

DeepSpeed writes into checkpoints/step_X.incomplete; every rank hashes its share of the files; rank 0 writes
manifest.json (files, sizes, hashes, the run's identity, the stream's state), then renames the directory and replaces
`latest`. A kill at any moment leaves the older checkpoints and at most a directory that the next start removes.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xscale.data.shards import sha256_file
from xscale.errors import UserError
from xscale.ranks import Control, Process

MANIFEST = "manifest.json"
HF = "hf"
"""Folder of a checkpoint that holds the model's Hugging Face config and the tokenizer."""
INCOMPLETE = ".incomplete"
COMPANIONS = "companions.pt"
"""Momentum encoders, queues and the like, by stream; the same on every rank, so one file."""
SPARE_BYTES = 1 << 28
"""Free disk space that must be left after a save."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]


def save(
    engine: Any,
    folder: Path,
    step: int,
    kept: dict[str, Any],
    write_more: Callable[[Path], None],
    process: Process,
    control: Control,
) -> Path | None:
    """Save step `step` on all ranks. kept: what else the manifest says, such as the stream's state.

    Returns its directory, or None (older ones untouched) without disk space.
    """
    final = folder / f"step_{step:08d}"
    partial = final.with_name(final.name + INCOMPLETE)
    parameters = sum(p.numel() for p in engine.module.parameters())
    needed = 16 * parameters + engine.module.companion_bytes() + SPARE_BYTES
    if process.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
    if not control.agree(not process.is_main or shutil.disk_usage(folder).free > needed):
        return None
    client_state = {"xscale": {"step": step}, "universal_checkpoint_info": {}}
    engine.save_checkpoint(str(folder), tag=partial.name, client_state=client_state, save_latest=False)
    if process.is_main:
        write_more(partial)
    control.barrier()
    names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
    mine = {name: _seal(partial / name) for name in names[process.rank :: process.world]}
    files = {name: entry for part in control.gather(mine) for name, entry in part.items()}
    if process.is_main:
        manifest = {
            "step": step,
            "world_size": process.world,
            **kept,
            "files": {name: files[name] for name in names},
        }
        _write(partial / MANIFEST, json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        publish(folder, final.name)
    control.barrier()
    return final


def publish(folder: Path, name: str) -> None:
    """Point `latest` at a complete checkpoint, atomically."""
    _sync_directory(folder)
    temporary = folder / "latest.new"
    _write(temporary, name)
    os.replace(temporary, folder / "latest")
    _sync_directory(folder)


def newest_valid(folder: Path, process: Process, control: Control, say: Any) -> Checkpoint | None:
    """The newest checkpoint whose files are all there with the right hashes, agreed by all ranks."""
    for path in reversed(complete_steps(folder)):
        problem = verify(path, process, control)
        if problem is None:
            return read(path)
        say(f"checkpoint {path} is not usable ({problem}); trying the one before")
    return None


def complete_steps(folder: Path) -> list[Path]:
    """Directories step_X with a manifest, oldest first."""
    found = folder.glob("step_*") if folder.is_dir() else []
    return sorted(path for path in found if path.suffix != INCOMPLETE and (path / MANIFEST).exists())


def verify(path: Path, process: Process, control: Control) -> str | None:
    """Hash the checkpoint's files, split over the ranks. Returns what is wrong, or None."""
    files = read(path).manifest["files"]
    problems = []
    for name in sorted(files)[process.rank :: process.world]:
        if not (path / name).exists():
            problems.append(f"{name} is missing")
        elif (path / name).stat().st_size != files[name]["bytes"]:
            problems.append(f"{name} has {(path / name).stat().st_size:,} bytes, not {files[name]['bytes']:,}")
        elif sha256_file(path / name) != files[name]["sha256"]:
            problems.append(f"{name} differs from its hash")
    found = [problem for part in control.gather(problems) for problem in part]
    return "; ".join(found) or None


def read(path: Path) -> Checkpoint:
    try:
        return Checkpoint(path, json.loads((path / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a checkpoint: {MANIFEST} cannot be read ({error})") from None


def load(engine: Any, checkpoint: Checkpoint, process: Process, control: Control) -> None:
    """Weights, optimizer, loss scale and schedule. The step and the stream's state are in the manifest.

    A checkpoint of another number of ranks is converted to DeepSpeed's universal form first; the engine must have
    been built with `load_universal` then. At ZeRO stage 0 every rank has all of it, and no form is needed.
    """
    path = checkpoint.path
    universal = None
    if checkpoint.manifest["world_size"] != process.world and engine.zero_optimization():
        universal = path.with_name(path.name + ".universal" + INCOMPLETE)
        if process.is_main:
            _to_universal(path, universal)
        control.barrier()
    loaded, _ = engine.load_checkpoint(str(path.parent), tag=(universal or path).name)
    if loaded is None:
        raise UserError(f"{path}: DeepSpeed found nothing to load there")
    if universal:
        move_counters(engine.basic_optimizer)
    assert engine.global_steps == checkpoint.step, (engine.global_steps, checkpoint.step)
    control.barrier()
    if universal and process.is_main:
        shutil.rmtree(universal)


def move_counters(optimizer: torch.optim.Optimizer) -> None:
    """Counters of steps come from a universal checkpoint on the CPU; torch's fused optimizers want them beside the
    weights."""
    for group in optimizer.param_groups:
        for state in (optimizer.state[p] for p in group["params"] if group.get("fused")):
            state["step"] = state["step"].to(state["exp_avg"].device)


def companions(checkpoint: Checkpoint) -> dict[str, Any]:
    """Saved companion states by stream."""
    path = checkpoint.path / COMPANIONS
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}


def _to_universal(path: Path, universal: Path) -> None:
    """One file for each parameter's weight and optimizer state, independent of the number of ranks."""
    shutil.rmtree(universal, ignore_errors=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_merge_workers", "1"]
    done = subprocess.run(
        [*command, "--input_folder", str(path), "--output_folder", str(universal), "--num_extract_workers", "1"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # its forked workers hang in torch's threads otherwise
    )
    if done.returncode:
        raise RuntimeError(f"ds_to_universal failed on {path}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def clean(folder: Path, keep: int) -> None:
    """Remove what a kill left behind and all but the newest `keep` checkpoints."""
    for path in folder.glob(f"step_*{INCOMPLETE}"):
        shutil.rmtree(path, ignore_errors=True)
    for path in complete_steps(folder)[:-keep]:
        # Unmake it first: a kill in the middle of rmtree must not leave half a checkpoint that looks whole.
        gone = path.with_name(path.name + INCOMPLETE)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _seal(path: Path) -> dict[str, Any]:
    """Force a file to disk and describe it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
