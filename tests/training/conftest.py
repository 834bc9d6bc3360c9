"""A small prepared store, and runs of train.py on it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from data.index import IndexConfig
from data.prepare import prepare
from data.synthetic import SyntheticConfig, generate

REPOSITORY = Path(__file__).parents[2]
SMOKE = REPOSITORY / "configs" / "smoke.gin"


@pytest.fixture(scope="session")
def store_path(tmp_path_factory) -> Path:
    """60 users, 8 days, prepared for min_history 10."""
    folder = tmp_path_factory.mktemp("synthetic")
    generate(SyntheticConfig(users=60, days=8, events_per_user=80, items=300), folder / "raw")
    prepare(folder / "raw", folder / "store", index=IndexConfig(min_history=10), log=lambda line: None)
    return folder / "store"


@pytest.fixture
def run_train(store_path, tmp_path, monkeypatch, capsys):
    """run_train("NAME = VALUE", ...) -> exit code, folder, MLPerf records, metrics rows, stdout and stderr of a smoke run."""
    monkeypatch.setenv("DLRM_DATA_PATH", str(store_path))
    runs = []

    def run(*bindings: str) -> SimpleNamespace:
        folder = tmp_path / f"run{len(runs)}"
        runs.append(folder)
        flags = ["--gin_file", str(SMOKE), "--gin", f"TrainConfig.results_dir = '{tmp_path}'", "--gin", f"RUN_NAME = '{folder.name}'"]
        for binding in bindings:
            flags += ["--gin", binding]
        capsys.readouterr()
        try:
            code = train.main(flags)
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, folder=folder, records=read_log(folder), rows=read_rows(folder), out=printed.out, err=printed.err)

    return run


def read_log(folder: Path) -> list[dict]:
    """Records of a run's MLPerf log, in order."""
    path = folder / "mlperf.log"
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()] if path.exists() else []


def read_rows(folder: Path) -> list[dict]:
    """Rows of a run's metrics.jsonl, in order."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
