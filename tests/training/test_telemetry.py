"""What a run says of itself: the progress line, the rows, the plot."""

import json

import pytest

from dlrm_hstu.training import loop
from dlrm_hstu.training.plot import plot_convergence
from dlrm_hstu.training.telemetry import Telemetry

TRAIN = {
    "step": 20,
    "samples": 5120,
    "window": 3,
    "loss": 0.13,
    "learning_rate": 1e-3,
    "step_ms": 10.0,
    "samples_per_s": 1234.5,
    "data_wait_ms": 0.1,
    "eta_s": 3725.0,
}
EVAL = {"step": 20, "samples": 5120, "auc": 0.7654, "target": 0.75, "eval_samples": 9, "eval_s": 1.0}
EVAL |= {"normalized_entropy": 0.9, "log_loss": 0.6}


def write(folder, *evals):
    telemetry = Telemetry(folder, rank=0, tensorboard=False)
    telemetry.train(**TRAIN)
    for row in evals:
        telemetry.eval(**row)
    telemetry.train(**TRAIN)
    telemetry.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_line(tmp_path, capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    write(tmp_path, EVAL)
    printed = capsys.readouterr().out
    for part in ("window 3", "step 20", "loss 0.13000", "AUC -", "1,234 samples/s", "ETA 1:02:05", "AUC 0.7654"):
        assert part in printed
    assert printed.count("\n") == (1 if terminal else 3)  # on a terminal a line of progress is written over


def test_rows_are_json_whatever_the_values(tmp_path):
    write(tmp_path, EVAL | {"auc": float("nan")})
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["train", "eval", "train"]
    assert rows[1]["auc"] is None


def test_other_ranks_write_nothing(tmp_path, capsys):
    telemetry = Telemetry(tmp_path / "run", rank=1, tensorboard=True)
    telemetry.train(**TRAIN)
    telemetry.eval(**EVAL)
    telemetry.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_an_evaluation_is_not_training_time(monkeypatch):
    clock = iter([0.0, 100.0, 103.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(clock))
    interval = loop._Interval()
    assert interval.seconds == 100.0
    interval.exclude(100.0)
    assert interval.seconds == 3.0


def test_the_plot_has_the_runs_own_target(tmp_path, monkeypatch):
    import matplotlib.axes

    lines = []
    draw = matplotlib.axes.Axes.axhline
    monkeypatch.setattr(matplotlib.axes.Axes, "axhline", lambda axes, y, **style: lines.append(y) or draw(axes, y, **style))
    write(tmp_path, EVAL | {"target": 0.68})
    assert plot_convergence(tmp_path).read_bytes().startswith(b"\x89PNG")
    assert lines == [0.68]


def test_a_run_without_a_defined_auc_has_no_plot(tmp_path):
    write(tmp_path, EVAL | {"auc": float("nan")})
    with pytest.raises(ValueError, match="defined AUC"):
        plot_convergence(tmp_path)
