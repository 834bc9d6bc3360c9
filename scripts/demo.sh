#!/usr/bin/env bash
# From nothing to a trained model, on a CPU: sets the machine up, makes synthetic listening data, prepares it and trains to the target.
# Arguments go to train.py: bash scripts/demo.sh --gin "SEED = 2"
# Exits 0 if the target was reached, 3 if the data ended below it.
#   SHORT=1   fewer users, and a target that they can reach: does everything work?
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

run=runs/demo
raw=$run/raw store=$run/store
size=(--users 1000 --days 30)
overrides=()
if [ "${SHORT:-0}" != 0 ]; then
    size=(--users 600 --items 600 --days 12)
    overrides=(--gin "AUC_THRESHOLD = 0.68")
fi

set_up
rm -rf "$run"
.venv/bin/python -m data.synthetic --out "$raw" --seed 1 "${size[@]}"
.venv/bin/python -m data.prepare --raw "$raw" --out "$store" --min_history 10
# Small tensors: a second thread gains nothing (0.26 s a step either way) and on busy cores costs ten times that.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
status=0
DLRM_DATA_PATH=$store .venv/bin/python train.py --gin_file configs/demo.gin "${overrides[@]}" "$@" --gin "RUN_NAME = 'demo'" || status=$?
[ $status = 0 ] || [ $status = 3 ] || exit $status # 3: the data ended below the target, which is worth a plot
.venv/bin/python -m dlrm_hstu.training.plot "$run" >/dev/null

echo
echo "left in $run:"
for left in \
    "mlperf.log       the MLPerf log" \
    "metrics.jsonl    every report and evaluation, one JSON object a line" \
    "tensorboard      the same for TensorBoard: .venv/bin/tensorboard --logdir $run" \
    "config.gin       the resolved configuration" \
    "convergence.png  AUC and loss against samples, with the target"; do
    [ -s "$run/${left%% *}" ] || fail "$run/${left%% *}: missing or empty after training"
    echo "  $left"
done
exit $status
