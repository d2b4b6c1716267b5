"""Train one encoder on a recipe: `deepspeed xscale/train.py --ds_config ds_configs/zero2_fp16.json --recipe xlm`.

Exit codes: 0 done, 1 a bug of xscale, 2 user error, 3 a loss or gradient is not finite, 4 the machine or another rank
failed (such as a full disk), 5 no progress (a rank hangs), 75 stopped early by a signal or the time limit (start again
to continue), 130 ended by Ctrl-C during the start.
"""

import sys
from pathlib import Path

# A launcher puts xscale/ itself first on sys.path, where our module names would hide others'.
if Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from xscale.errors import block_sigusr2_and_trace_on_sigusr1, find_launchers

if __name__ == "__main__":
    # Before the imports, which take seconds, and in which a signal may come or a launcher may be killed.
    block_sigusr2_and_trace_on_sigusr1()
    find_launchers()

import argparse
import gc
import subprocess
from contextlib import suppress

import torch.distributed as dist

from xscale import ranks
from xscale.data.remote import parse_location
from xscale.dry_run import dry_run
from xscale.errors import (
    TOOLS,
    DirectoryTaken,
    ExitCode,
    NotFinite,
    UserError,
    check_arguments,
    redact_and_escape,
    run_and_exit,
    sys_exit_as_runtime_error,
)
from xscale.ranks import CpuGroup, Process
from xscale.run.run_status import FAULT, LOST_RANK, Status, exit_code_and_message
from xscale.run.start import train_run

DEMO = Path("data/demo")
"""The directory of the generated demo corpus."""
MOST_RANKS = 1 << 20
"""The largest number of ranks that --ranks takes."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ds_config",
        type=Path,
        required=True,
        help="DeepSpeed configuration: a JSON file, or the name of a configuration of xscale, such as zero2_fp16",
    )
    parser.add_argument("--recipe", default="mixed", help="name of a recipe of xscale, or a YAML file (default: mixed)")
    parser.add_argument(
        "--data",
        type=parse_location,
        nargs="+",
        action="extend",
        help="folders or URLs of shards (default: a demo corpus, which xscale generates)",
    )
    parser.add_argument("--out", help="folder of the run: checkpoints, metrics and logs (default: runs/<recipe>)")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="change fields of the recipe, such as train.lr=1e-4",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--resume",
        default="auto",
        help=(
            "auto: continue from the newest undamaged checkpoint in --out, if there is one; never: start a new run; "
            "DIR: continue from the checkpoint DIR, or from the newest checkpoint of the run DIR (default: auto)"
        ),
    )
    parser.add_argument(
        "--fork",
        metavar="RUN@STEP",
        help="begin the run at the checkpoint of step STEP of another run, whose folder is RUN",
    )
    parser.add_argument("--steps", dest="set", action="append", type="train.steps={}".format, metavar="N",
        help="short for --set train.steps=N")  # fmt: skip
    parser.add_argument("--seed", dest="set", action="append", type="train.seed={}".format, metavar="N",
        help="short for --set train.seed=N")  # fmt: skip
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="check the recipe, the data and the ds_config, print the plan of the run, and train nothing",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="with --dry_run, print the plan for N ranks; the machine needs no GPU"
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="write the keys of the records that each step reads to files in the folder trace/ of the run",
    )
    args = parser.parse_args(argv)
    if args.ranks is not None and not (args.dry_run and 1 <= args.ranks <= MOST_RANKS):
        parser.error(
            f"--ranks needs --dry_run and a number from 1 to {MOST_RANKS:,}. To train on several ranks, use a "
            "launcher, such as deepspeed --num_gpus N"
        )
    if args.fork and args.resume != "auto":
        parser.error(
            "--fork and --resume cannot be used together. Remove --resume. The first start of a command with --fork "
            "begins the new run, and each later start continues the new run"
        )
    if args.out and "://" in args.out:
        parser.error(f"--out {args.out} is a URL. Choose a folder")
    args.out = Path(args.out or Path("runs") / Path(args.recipe).stem)
    return args


def main(argv: list[str] | None = None) -> int:
    process = Process(0, 1, 0, 1)  # until the launcher's is found
    status: Status | None = None
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parse_arguments(argv)
        process = ranks.read_launcher_and_set_environment(allow_missing_launcher=args.dry_run)
        if args.dry_run and not process.is_main:
            return 0
        status = None if args.dry_run else Status(args.out, process)
        default_to_demo_data(args, process)
        with sys_exit_as_runtime_error("a part of the run"):
            if status:
                return join_group_and_train(args, process, status)
            dry_run(args, process)
            return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if status:
            status.record_failure(error)
        code, message = exit_code_and_message(error)
        if code == FAULT:
            raise
        # Every rank sees these errors, so one message for each node is enough.
        is_shared = type(error) in (UserError, NotFinite, DirectoryTaken) or LOST_RANK in message
        if process.local_rank == 0 or process.is_main or not is_shared:
            where = f"[rank {process.rank}] " if process.world > 1 else ""
            with suppress(OSError):  # for example, the disk is full; the exit code stays the same
                print(f"{where}error: {redact_and_escape(message)}", file=sys.stderr, flush=True)
        return code


def default_to_demo_data(args: argparse.Namespace, process: Process) -> None:
    """Without --data, use the demo corpus, which rank 0 generates if it does not exist."""
    if args.data is None:
        args.data = [DEMO]
        if process.is_main and not DEMO.exists():
            print(f"--data is not set, so xscale generates the demo corpus in {DEMO}", flush=True)
            if subprocess.run([sys.executable, "-m", f"{TOOLS}.demo_corpus", "--out", str(DEMO)]).returncode:
                raise UserError(
                    f"the demo corpus in {DEMO} could not be generated; the error above has the reason. Remove the "
                    "cause of the error, or pass folders of shards by --data"
                )


def join_group_and_train(args: argparse.Namespace, process: Process, status: Status) -> ExitCode:
    """Join the process group of all ranks, train the run, and leave the group. Returns the exit code."""
    ranks.join_process_group(process)
    gc.freeze()  # objects that the imports have made never become garbage
    cpu_group = CpuGroup()
    code = train_run(args, process, cpu_group, status)
    cpu_group.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    run_and_exit(main)
