#!/usr/bin/env bash
# All checks and measurements that need a GPU, in three calls of under 8 minutes each on one H100 or H200 host.
#
#   PARTS="check rows" benchmarks/gpu.sh         on a GPU host with torch, triton and transformers; no network needed
#   PARTS="modern train" benchmarks/gpu.sh
#   PARTS="head gather step" benchmarks/gpu.sh
#   benchmarks/gpu.sh --cpu    every part with small shapes on a CPU: does the script itself work? (tests/test_benchmarks.py)
#   benchmarks/gpu.sh --wheels download what such a host lacks into $WHEELS (for Python 3.12)
#
# Packages that the host lacks are installed from the wheels in $WHEELS (default .whl/) into a temporary folder. Each part
# has a time limit; one that fails does not stop the others. The end says which parts failed and which goals are met: 40 %
# MFU in rows of 16k tokens, `mixed` within 10 % of `tlm`, twice mmBERT-base's 108k tokens/s. Tables go to stdout and,
# where OUT is set, to $OUT/PART.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
WHEELS=${WHEELS:-.whl}
NEEDED="deepspeed==0.19.8 webdataset==1.0.2 braceexpand hjson pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection"
ALL="check rows modern train head gather step"
[ "${1:-}" = --cpu ] && PARTS=${PARTS:-$ALL}
LIMIT=470

if [ "${1:-}" = --wheels ]; then
    set -e
    python3 -m pip wheel -q --no-deps --no-build-isolation -w "$WHEELS" "${NEEDED%% *}"
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_17_x86_64 -d "$WHEELS" ${NEEDED#* }
    ls -l "$WHEELS"
    exit
fi

if [ -z "${PARTS:-}" ]; then
    echo "error: one call takes more than 8 minutes; set PARTS=\"check rows\", then \"modern train\", then \"head gather step\"" >&2
    exit 2
fi

SITE=$(mktemp -d)
OUT=${OUT:-$SITE}
trap 'rm -rf "$SITE"' EXIT
missing=()
for requirement in $NEEDED; do
    python3 -c "import importlib.metadata as m; m.version('${requirement%%=*}')" 2>/dev/null || missing+=("$requirement")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "installing ${missing[*]} from $WHEELS"
    python3 -m pip install -q --no-index --find-links "$WHEELS" --no-deps --target "$SITE" "${missing[@]}" || exit 1
fi
export PYTHONPATH="$PWD:$SITE" PATH="$SITE/bin:$PATH" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo

failed=()
part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 started=$SECONDS code
    shift 2
    case " $PARTS " in *" $name "*) ;; *) return ;; esac
    limit=$((limit < LIMIT - SECONDS ? limit : LIMIT - SECONDS))
    echo "=== $name: $*"
    if [ "$limit" -le 0 ]; then
        failed+=("$name (no time left)")
        return
    fi
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$OUT/$name.txt"
    code=${PIPESTATUS[0]}
    echo "=== $name: exit code $code after $((SECONDS - started)) s"
    [ "$code" -eq 0 ] || failed+=("$name (exit code $code)")
}

if [ "${1:-}" = --cpu ]; then
    LIMIT=1800
    part check 300 python3 -m pytest -q -p no:cacheprovider benchmarks/gpu_check.py -k "not training"
    small=(--vocab_size 0 --workers 0 --pairs 600 --rows_per_step 1)
    part rows 400 python3 benchmarks/rows.py --preset tiny "${small[@]}" --rows 1024 --mixed_rows 1024
    part modern 300 python3 benchmarks/rows.py --preset tiny "${small[@]}" --recipe mlm --rows 128 --mixed_rows 0 \
        --set streams.mlm.mask_prob=0.3 --goal 216000
    part train 300 python3 -m pytest -q -p no:cacheprovider benchmarks/gpu_check.py -k training
    part head 300 python3 benchmarks/head.py --device cpu --rounds 1 --tokens 32 --vocabulary 1500 --threads 1
    part gather 200 python3 benchmarks/gather.py --device cpu --rounds 1 --small --threads 1
    part step 300 python3 benchmarks/step.py --recipes tlm --preset tiny --words 20 --samples 16 --rounds 1 --warm 1
else
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    python3 -c "import torch, triton, transformers as t; print('torch', torch.__version__, 'triton', triton.__version__, 'transformers', t.__version__)"
    part check 150 python3 -m pytest -q -p no:cacheprovider benchmarks/gpu_check.py -k "not training"
    part rows 370 python3 benchmarks/rows.py --seconds 290
    # mmBERT-base's shape, length and share of masked tokens; its authors' 108k tokens/s on an H100, twice.
    part modern 260 python3 benchmarks/rows.py --preset modern-base --vocab_size 256000 --recipe mlm --max_length 1024 \
        --rows 16384 32768 8192 4096 --mixed_rows 0 --set streams.mlm.mask_prob=0.3 --goal 216000 --seconds 190
    part train 200 python3 -m pytest -q -p no:cacheprovider benchmarks/gpu_check.py -k training
    part head 100 python3 benchmarks/head.py
    part gather 80 python3 benchmarks/gather.py
    # Pairs of 127 tokens: the stock loop pads nothing.
    part step 280 python3 benchmarks/step.py --preset base --vocab_size 120000 --words 62 --samples 128 --workers 4 \
        --threads 8 --recipes alignlm tlm --stock_micro_batch 64 --max_tokens 16384 --rounds 5 --warm 2
fi

echo
grep -h "^GOAL " "$OUT"/*.txt 2>/dev/null
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all parts passed in $SECONDS s"
