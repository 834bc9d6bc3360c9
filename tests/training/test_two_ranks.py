"""Two CPU ranks under torchrun train as one process does on the same global batches."""

import os
import subprocess
import sys

import pytest

from tests.training.conftest import REPOSITORY, SMOKE, read_log, read_rows

BINDINGS = (
    "AUC_THRESHOLD = 1.0",
    "NUM_TRAIN_BATCHES = 0",
    "NUM_EVAL_BATCHES = 0",
    "EVAL_EVERY_DATA_PCT = 0.4",
    "ModelConfig.attention_scale = 'max_seq_len'",  # so that a sample's score does not depend on its batch
)


def train_on(ranks: int, store_path, folder) -> tuple[list[dict], list[dict]]:
    bindings = [*BINDINGS, f"BATCH_SIZE = {16 // ranks}", f"TrainConfig.results_dir = '{folder}'", f"RUN_NAME = 'ranks{ranks}'"]
    command = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else [sys.executable]
    )
    command += [str(REPOSITORY / "train.py"), "--gin_file", str(SMOKE)]
    for binding in bindings:
        command += ["--gin", binding]
    environment = {**os.environ, "DLRM_DATA_PATH": str(store_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "before AUC 1 was reached" in done.stdout, done.stdout + done.stderr
    return read_rows(folder / f"ranks{ranks}"), read_log(folder / f"ranks{ranks}")


def test_two_ranks_equal_one(store_path, tmp_path):
    (one, one_log), (two, two_log) = (train_on(ranks, store_path, tmp_path) for ranks in (1, 2))
    assert [row["kind"] for row in one] == [row["kind"] for row in two]
    for mine, theirs in zip(one, two, strict=True):
        loss = "loss" if mine["kind"] == "train" else "log_loss"
        assert theirs[loss] == pytest.approx(mine[loss], rel=1e-4), mine
        if mine["kind"] == "eval":
            assert theirs["eval_samples"] == mine["eval_samples"]
            assert theirs["auc"] == pytest.approx(mine["auc"], abs=1e-3)
    assert [record["key"] for record in one_log] == [record["key"] for record in two_log]
    values = {record["key"]: record["value"] for record in two_log}
    assert (values["global_batch_size"], values["micro_batch_size"]) == (16, 8)
