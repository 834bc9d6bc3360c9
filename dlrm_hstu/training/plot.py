"""`python -m dlrm_hstu.training.plot RUN_FOLDER`: convergence.png from a run's metrics.jsonl."""

import argparse
import json
from pathlib import Path

from data.cli import exit_on_user_error

_LOSS, _AUC, _INK, _MUTED = "#9aa5b1", "#1f6feb", "#24292f", "#6e7781"


def read_metrics(folder: Path) -> tuple[list[dict], list[dict]]:
    """(train rows, eval rows) of a run folder. Raises ValueError where there is no usable metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a folder that train.py has written")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    train, evals = ([row for row in rows if row["kind"] == kind] for kind in ("train", "eval"))
    if not any(row["auc"] is not None for row in evals):
        raise ValueError(f"{path}: holds no evaluation with a defined AUC; train until the first one, on a holdout of both classes")
    return train, evals


def plot_convergence(folder: Path) -> Path:
    """Draw AUC and training loss against samples, with the run's target; returns the picture's path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train, evals = read_metrics(folder)
    target = evals[-1]["target"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2), layout="constrained")
    samples, aucs = zip(*((row["samples"], row["auc"]) for row in evals if row["auc"] is not None), strict=True)
    top.axhline(target, color=_MUTED, linestyle="--", linewidth=1)
    top.annotate(
        f"target {target:g}", (0, target), xycoords=("axes fraction", "data"), xytext=(6, 4), textcoords="offset points", color=_MUTED
    )
    top.plot(samples, aucs, color=_AUC, marker="o", markersize=4)
    top.annotate(f"{aucs[-1]:.4f}", (samples[-1], aucs[-1]), xytext=(-6, 8), textcoords="offset points", ha="right", color=_AUC)
    top.set_ylabel("holdout AUC")
    top.margins(y=0.15)
    bottom.plot([row["samples"] for row in train], [row["loss"] for row in train], color=_LOSS, linewidth=1.2)
    bottom.set_ylabel("training loss")
    bottom.set_xlabel("training samples")
    bottom.set_xlim(left=0)
    bottom.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK)
        axes.grid(axis="y", color="#eaeef2")
        axes.set_axisbelow(True)
    path = folder / "convergence.png"
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with exit_on_user_error():
        print(plot_convergence(arguments.folder))


if __name__ == "__main__":
    main()
