"""What a short demo must have left: `python -m tests.check_demo runs/demo`. The official checker reads the MLPerf log."""

import json
import sys
from pathlib import Path

from dlrm_hstu.mlperf.rules import TARGET_AUC
from tests.official_checker import objected_keys

# The open division's rules still ask for the benchmark's own data and for learning rates near its reference.
NOT_THE_BENCHMARK = {"train_samples", "eval_samples", "opt_base_learning_rate", "opt_sparse_base_learning_rate"}


def main(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [row for row in rows if row["kind"] == "eval"]
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in (run / "mlperf.log").read_text().splitlines()]
    logged = {event["key"]: event for event in events}
    assert logged["run_stop"]["metadata"]["status"] == "success"
    assert logged["eval_accuracy"]["value"] == evals[-1]["auc"]
    assert any(row["kind"] == "train" for row in rows)
    short_of_target = {"eval_accuracy"} if evals[-1]["auc"] < TARGET_AUC else set()  # a short demo stops earlier
    assert objected_keys(run / "mlperf.log") == NOT_THE_BENCHMARK | short_of_target
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert (run / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert "AUC_THRESHOLD" in (run / "config.gin").read_text()
    print(f"demo: AUC {evals[-1]['auc']:.4f} after {evals[-1]['samples']:,} samples; log, metrics, events, plot and config are sound")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
