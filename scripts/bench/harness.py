"""What every GPU benchmark shares: a correctness gate, timing in percentiles, ceilings of the same run, and a results file."""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch


def time_ms(function: Callable[[], object], repetitions: int = 20, warmup: int = 3) -> dict[str, float]:
    """p10, p50 and p90 of the device time of one call, in ms."""
    for _ in range(warmup):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, stop in events:
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) for start, stop in events)
    return {f"p{percent}": round(times[(len(times) - 1) * percent // 100], 4) for percent in (10, 50, 90)}


def ceilings() -> dict[str, float]:
    """What this GPU gives a large bf16 matrix product (TFLOP/s) and a device copy (TB/s, bytes read and written), now."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_ms = time_ms(lambda: a @ b)["p50"]
    source = torch.empty(2**31, device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)
    copy_ms = time_ms(lambda: target.copy_(source))["p50"]
    return {"matmul_tflops": round(2 * 8192**3 / matmul_ms / 1e9, 1), "copy_tbps": round(2 * 2**31 / copy_ms / 1e9, 3)}


def check(name: str, errors: dict[str, float], limits: dict[str, float]) -> None:
    """Refuse to go on, with SystemExit, if an error is over its limit or no number."""
    bad = {key: (value, limits[key]) for key, value in errors.items() if not value <= limits[key]}
    print(f"check {name}: " + ", ".join(f"{key} {value:.1e} (limit {limits[key]:.1e})" for key, value in errors.items()), flush=True)
    if bad:
        raise SystemExit(f"check {name} is red: {bad}; no time is reported")


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|, of the whole tensors; NaN where either is not finite."""
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    return difference.item()


def write_results(rows: list[dict], path: Path | None, run_ceilings: dict[str, float]) -> None:
    """Print the rows and write them with what they were measured on."""
    properties = torch.cuda.get_device_properties(0)
    result = {
        "machine": properties.name,
        "commit": _output("git", "rev-parse", "--short", "HEAD") or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "triton": __import__("triton").__version__, "cuda": torch.version.cuda},
        "clocks_mhz": _output("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits"),
        "ceilings": run_ceilings,
        "rows": rows,
    }
    for row in rows:
        extra = "  ".join(f"{key} {value}" for key, value in row.items() if key not in ("name", "p10", "p50", "p90", "unit"))
        print(f"{row['name']:32} {row['p50']:10.3f} {row['unit']}  [{row['p10']}, {row['p90']}]  {extra}", flush=True)
    print(f"ceilings {run_ceilings}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def arguments(description: str, *options: tuple[str, dict]) -> argparse.Namespace:
    """--json PATH and the benchmark's own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the results here too")
    for flag, settings in options:
        parser.add_argument(flag, **settings)
    parsed = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU, and torch sees none")
    return parsed


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
