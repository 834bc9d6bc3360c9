"""The training step and the evaluation, piece by piece."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dlrm_hstu.config import OptimizerConfig
from dlrm_hstu.mlperf.log import MLPerfLog
from dlrm_hstu.model import Output
from dlrm_hstu.parallel.process_group import Ranks, process_group
from dlrm_hstu.parallel.sharding import build_sharded_model, unwrap
from dlrm_hstu.training import loop
from dlrm_hstu.training.evaluation import EvalResult, evaluate
from dlrm_hstu.training.loop import Cadence, Trainer
from dlrm_hstu.training.optimizers import Optimizers
from dlrm_hstu.training.schedule import learning_rate
from dlrm_hstu.training.telemetry import Telemetry
from tests.batches import random_batch, small_config

OPTIMIZER = OptimizerConfig(dense_lr=1e-2, sparse_lr=1e-2, warmup_steps=10)


@pytest.fixture
def trainer():
    """A trainer without data or logs."""
    with process_group("cpu") as ranks:
        model = build_sharded_model(small_config(), OPTIMIZER, seed=1, device=ranks.device)
        yield Trainer(
            model,
            Optimizers(model, OPTIMIZER),
            ranks,
            train_batches=(),
            eval_batches=tuple,
            cadence=Cadence(0, 0, 1, 1),
            target=1.0,
            global_batch=4,
            log=None,
            telemetry=None,
        )


def tables(trainer) -> dict[str, torch.Tensor]:
    state = unwrap(trainer.model).embeddings.collection.state_dict()
    return {name.split(".")[1]: weight.local_shards()[0].tensor.clone() for name, weight in state.items()}


def batch():
    return random_batch(small_config(), [5, 0, 9, 3], seed=2)


def test_the_first_step_moves_nothing_and_later_ones_all_that_was_touched(trainer):
    def dense() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in trainer.optimizers.dense_parameters.items()}

    before, rows_before = dense(), tables(trainer)
    trainer.train_step(batch())
    assert all(torch.equal(before[name], value) for name, value in dense().items())
    assert all(torch.equal(rows_before[name], value) for name, value in tables(trainer).items())
    trainer.train_step(batch())
    after, rows_after = dense(), tables(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    used = batch()
    touched = dict(zip(small_config().contextual_features, used.contextual_ids, strict=True))
    touched |= {"item_id": used.item_ids, "artist_id": used.artist_ids, "album_id": used.album_ids}
    for name, ids in touched.items():
        moved = (rows_before[name] != rows_after[name]).any(dim=1).nonzero().ravel()
        assert set(moved.tolist()) == set(ids.tolist()), name


def test_both_rates_follow_one_warm_up(trainer):
    for step in range(13):
        trainer.train_step(batch())
        expected = learning_rate(step, 1e-2, 10, 0.0)
        assert trainer.optimizers.learning_rate == expected
        name, rate = trainer.optimizers.sparse_name_and_rate()
        assert name == "RowWiseAdagrad"
        assert rate == pytest.approx(expected, rel=1e-6)
    assert expected == 1e-2


def test_a_loss_that_is_not_finite_stops_before_any_update(trainer):
    for _ in range(2):
        trainer.train_step(batch())
    poisoned = trainer.optimizers.dense_parameters["head.outer.weight"]
    with torch.no_grad():
        poisoned.fill_(math.nan)
    rows = tables(trainer)
    with pytest.raises(FloatingPointError, match="step 2"):
        trainer.train_step(batch())
    assert trainer.step == 2
    assert all(torch.equal(rows[name], value) for name, value in tables(trainer).items())


def test_a_gradient_that_is_not_finite_names_its_parameter(trainer):
    trainer.train_step(batch())
    name, parameter = "transducer.position_table", trainer.optimizers.dense_parameters["transducer.position_table"]
    for other in trainer.optimizers.dense_parameters.values():
        other.grad = torch.zeros_like(other)
    parameter.grad[0, 0] = math.inf
    before = parameter.detach().clone()
    with pytest.raises(FloatingPointError, match=f"step 1.*{name}"):
        trainer.optimizers.step(1)
    assert torch.equal(before, parameter)


def test_every_step_draws_its_own_dropout_mask(trainer):
    unwrap(trainer.model).transducer.input_dropout = 0.5
    trainer.optimizers.config = OptimizerConfig(dense_lr=0.0, sparse_lr=0.0)
    losses = [trainer.train_step(batch()).item() for _ in range(3)]
    assert len(set(losses)) == 3


def test_a_clip_norm_of_0_is_off(trainer):
    def step_size(clip: float) -> float:
        trainer.optimizers.config = replace(OPTIMIZER, grad_clip_norm=clip)
        for parameter in trainer.optimizers.dense_parameters.values():
            parameter.grad = torch.ones_like(parameter)
        norm = trainer.optimizers.step(0)
        return norm.item(), next(iter(trainer.optimizers.dense_parameters.values())).grad.max().item()

    norm, largest = step_size(0.0)
    assert largest == 1.0
    assert step_size(1.0) == (pytest.approx(norm), pytest.approx(1 / norm, rel=1e-4))


def test_an_evaluation_does_not_count_as_training_time(trainer, monkeypatch, tmp_path):
    def slow(*_) -> EvalResult:
        time.sleep(0.5)
        return EvalResult(0.5, 1.0, 0.7, 4)

    monkeypatch.setattr(loop, "evaluate", slow)
    trainer.log, trainer.telemetry = MLPerfLog(None), Telemetry(tmp_path, rank=1, tensorboard=False)
    before = trainer._interval.seconds
    assert not trainer.evaluate()
    assert trainer._interval.seconds - before < 0.25


class Oracle(nn.Module):
    """Predicts a constant; the labels are the batch's. Only to be evaluated."""

    def forward(self, batch):
        assert not self.training
        labels = (batch.candidate_action & 1).float()
        return Output(labels.mean(), labels, torch.full_like(labels, 0.5), labels, batch.weight)


def test_an_evaluation_of_one_class_never_reaches_a_target():
    one_class = random_batch(small_config(), [3, 3], seed=0)
    one_class.candidate_action.fill_(1)
    result = evaluate(Oracle(), [one_class], Ranks(0, 1, torch.device("cpu")))
    assert math.isnan(result.auc)
    assert not result.reaches(0.0)
    assert EvalResult(0.75, 1.0, 0.5, 4).reaches(0.75)


def test_padding_is_not_scored():
    padded = random_batch(small_config(), [3, 3, 3, 3], seed=0)
    padded.candidate_action.copy_(torch.tensor([1, 0, 1, 1]))
    padded.weight[2:] = 0
    oracle = Oracle()
    result = evaluate(oracle, [padded], Ranks(0, 1, torch.device("cpu")))
    assert oracle.training  # as before
    assert (result.samples, result.auc) == (2, 0.5)
    assert result.log_loss == pytest.approx(np.log(2), rel=1e-6)


def test_a_holdout_without_samples_is_an_error():
    with pytest.raises(ValueError, match="holdout"):
        evaluate(Oracle(), [], Ranks(0, 1, torch.device("cpu")))
