#!/bin/sh
# What to run on one node of 8 x MI300X: measure the routes, then train with RCCL and with SDMA engines, and compare.
#
#   pip install . 'amd-mori>=1.2.4'
#   sh examples/sdma_mi300/run.sh gpt-7b
#
# Everything lands in the folder sdma-results.
set -eu
MODEL="${1:-gpt-7b}"
RANKS="${RANKS:-8}"
HERE="$(dirname "$0")"
OUT="${OUT:-sdma-results}"
mkdir -p "$OUT"

torchrun --standalone --nproc-per-node "$RANKS" -m zpasses.tools.calibrate --out "$OUT/calibration.json" | tee "$OUT/calibration.log"
export ZPASSES_CALIBRATION="$OUT/calibration.json"

train() {
    torchrun --standalone --nproc-per-node "$RANKS" "$HERE/train.py" --model "$MODEL" --pipeline "$2" | tee "$OUT/$MODEL-$1.log"
    grep '^step' "$OUT/$MODEL-$1.log" > "$OUT/$MODEL-$1.losses"
}

# The same buckets without and with the swap, so that nothing else differs; then what stage 3 does by default.
train rccl "merge-reads{max_hold_mb=1},gather-params,reduce-grads,reshard-after-forward,bucket{cap_mb=512},overlap,defer-reduction"
train sdma zero3-sdma
train default zero3
diff "$OUT/$MODEL-rccl.losses" "$OUT/$MODEL-sdma.losses" && echo "losses are the same, digit by digit"

python "$HERE/dry_run.py" --model "$MODEL" | tee "$OUT/$MODEL-dry-run.log"
