#!/bin/sh
# Run this on one node of 8 x MI300X. It measures the routes, trains with RCCL and with SDMA
# engines, and compares the losses.
#
#   pip install . 'amd-mori>=1.2.4'
#   sh examples/sdma_mi300/run.sh gpt-7b
#
# All results are written to the folder sdma-results.
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

# Stage 3 as it is planned without copy engines, and as it is planned for this machine.
train rccl "merge-reads{max_hold_mb=1},gather-params,reduce-grads,reshard-after-forward,schedule{copy_engines=off},average-replicas,defer-reduction"
train sdma zero3
diff "$OUT/$MODEL-rccl.losses" "$OUT/$MODEL-sdma.losses" && echo "losses are equal, digit by digit"

python "$HERE/dry_run.py" --model "$MODEL" | tee "$OUT/$MODEL-dry-run.log"
