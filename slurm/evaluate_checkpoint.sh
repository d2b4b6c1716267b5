#!/bin/sh
# Export a checkpoint and evaluate it.
#     slurm/evaluate_checkpoint.sh CHECKPOINT OUT.json [flags of xscale.eval.run]
#     slurm/evaluate_checkpoint.sh runs/xlm scores.json --task retrieval --data heldout
set -e
checkpoint=$1 out=$2
shift 2
model=${out%.json}.model
python -m xscale.export "$checkpoint" "$model"    # ends here if the folder exists, which another job may have made
trap 'rm -rf "$model"' EXIT
python -m xscale.eval.run --model "$model" --out "$out" "$@"
