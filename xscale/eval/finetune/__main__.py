"""Fine-tune an exported encoder, and measure transfer between languages: zero-shot, supervised, translate-train.

xscale-finetune --model HF_DIR --task ner --train en=train-en.tsv de=train-de.tsv \\
    --test en=test-en.tsv de=test-de.tsv --seeds 0 1 2 --out ner.json

It also runs on several ranks: deepspeed --num_gpus N --module xscale.eval.finetune ..., or
torchrun --nproc_per_node N -m xscale.eval.finetune ...

Exit codes: 0 done, 2 user error, 3 logits not finite, 4 an error of the machine (disk, file system), any other: a bug
in xscale.
"""

import sys

from xscale import ranks
from xscale.errors import NotFinite, UserError, check_arguments, report_environment_error, run_command
from xscale.eval.finetune.measure import check_flags, measure_transfer, parse_arguments
from xscale.ranks import Process


def main(argv: list[str] | None = None) -> int:
    process = Process(0, 1, 0, 1)  # until read_launcher returns the real one
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parse_arguments(argv, __doc__)
        ranks.check_launch()
        process = ranks.read_launcher()
        check_flags(args)
        measure_transfer(args, process)
        return 0
    except (UserError, NotFinite) as error:
        if process.local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 3
    except OSError as error:
        return report_environment_error(error)


if __name__ == "__main__":
    run_command(main)
