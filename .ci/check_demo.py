"""What a short demo must have left: `.venv/bin/python .ci/check_demo.py runs/demo`. The official checker reads the MLPerf log."""

import json
import logging
import re
import sys
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance

# The open division's rules still ask for the benchmark's own data and for learning rates near its reference.
NOT_THE_BENCHMARK = {"train_samples", "eval_samples", "opt_base_learning_rate", "opt_sparse_base_learning_rate"}


def complaints(log: Path) -> set[str]:
    """The keys of an MLPerf log that the official checker objects to."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    passed, *_ = mlp_compliance.main(str(log), "training_6.1.0/common.yaml", mlp_compliance.make_checker("training", "6.1.0", False, False))
    keys = set(re.findall(r"CHECK for '(\w+)' failed", "\n".join(messages)))
    assert passed or keys, messages
    return keys


def main(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [row for row in rows if row["kind"] == "eval"]
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in (run / "mlperf.log").read_text().splitlines()]
    logged = {event["key"]: event for event in events}
    assert logged["run_stop"]["metadata"]["status"] == "success"
    assert logged["eval_accuracy"]["value"] == evals[-1]["auc"]
    assert any(row["kind"] == "train" for row in rows)
    assert complaints(run / "mlperf.log") == NOT_THE_BENCHMARK
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert (run / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert "AUC_THRESHOLD" in (run / "config.gin").read_text()
    print(f"demo: AUC {evals[-1]['auc']:.4f} after {evals[-1]['samples']:,} samples; log, metrics, events, plot and config are sound")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
