"""What a run says of itself: a progress line, metrics.jsonl (the source of every plot), TensorBoard events."""

import json
import math
import sys
import time
from pathlib import Path


class Telemetry:
    """Reports of one run, on rank 0; other ranks are silent.

    Rows of metrics.jsonl have a "kind": "train" (every report: step, samples, window, loss, learning_rate, step_ms, samples_per_s,
    data_wait_ms, eta_s; loss is the training loss, a fifth of the cross-entropy) or "eval" (step, samples, auc, target,
    normalized_entropy, log_loss in nats, eval_samples, eval_s).
    """

    def __init__(self, folder: Path, rank: int, tensorboard: bool):
        self.active = rank == 0
        self.latest_auc = math.nan
        self._writer = None
        self._line_open = False
        if self.active:
            folder.mkdir(parents=True, exist_ok=True)
            self._rows = open(folder / "metrics.jsonl", "w", buffering=1)
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # costs a second to import

                self._writer = SummaryWriter(folder / "tensorboard")

    def train(self, **row) -> None:
        """One report of the training interval that just ended."""
        self._write("train", row)
        auc = "-" if math.isnan(self.latest_auc) else f"{self.latest_auc:.4f}"
        self._show(
            f"window {row['window']}  step {row['step']}  loss {row['loss']:.5f}  AUC {auc}  "
            f"{row['samples_per_s']:,.0f} samples/s  ETA {_clock(row['eta_s'])}",
            transient=True,
        )

    def eval(self, **row) -> None:
        """One evaluation."""
        self.latest_auc = row["auc"]
        self._write("eval", row)
        self._show(f"step {row['step']}  samples {row['samples']:,}  holdout AUC {row['auc']:.5f}  NE {row['normalized_entropy']:.5f}")

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""
        self._show(text)

    def close(self) -> None:
        if self.active:
            self._end_line()
            self._rows.close()
            if self._writer:
                self._writer.close()

    def _write(self, kind: str, row: dict) -> None:
        if not self.active:
            return
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        self._rows.write(json.dumps({"kind": kind, "time": time.time(), **finite}) + "\n")
        if self._writer:
            for name, value in finite.items():
                if value is not None and name != "step":
                    self._writer.add_scalar(f"{kind}/{name}", value, row["step"])

    def _show(self, text: str, transient: bool = False) -> None:
        if not self.active:
            return
        if transient and sys.stdout.isatty():
            print(f"\r\x1b[K{text}", end="", flush=True)
            self._line_open = True
        else:
            self._end_line()
            print(text, flush=True)

    def _end_line(self) -> None:
        if self._line_open:
            print("\r\x1b[K", end="")
            self._line_open = False


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
