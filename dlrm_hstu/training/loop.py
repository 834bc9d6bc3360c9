"""The training loop: one pass over the windows in time order, evaluations on the fixed future holdout, stop at the target."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_hstu.batch import Batch
from dlrm_hstu.mlperf.log import MLPerfLog
from dlrm_hstu.parallel.process_group import Ranks
from dlrm_hstu.training.evaluation import evaluate
from dlrm_hstu.training.optimizers import Optimizers
from dlrm_hstu.training.schedule import is_eval_step
from dlrm_hstu.training.telemetry import Telemetry


@dataclass(frozen=True)
class Cadence:
    """In steps. eval_interval: 0 means never. first_eval: step of the first evaluation. report, train_loss: between two of each."""

    eval_interval: int
    first_eval: int
    report: int
    train_loss: int


class Trainer:
    """Trains a sharded model and owns the position in the run.

    train_batches: sized, iterable once, with `.state` = (window, batches of it already given). eval_batches: makes a fresh pass over
    the holdout. target: AUC to stop at. global_batch: samples of one step on all ranks, padding included.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizers: Optimizers,
        ranks: Ranks,
        *,
        train_batches: Iterable[Batch],
        eval_batches: Callable[[], Iterable[Batch]],
        cadence: Cadence,
        target: float,
        global_batch: int,
        log: MLPerfLog,
        telemetry: Telemetry,
    ):
        self.model, self.optimizers, self.ranks = model, optimizers, ranks
        self.train_batches, self.eval_batches = train_batches, eval_batches
        self.cadence, self.target, self.global_batch = cadence, target, global_batch
        self.log, self.telemetry = log, telemetry
        self.step = 0
        self._interval = _Interval()

    @property
    def samples(self) -> int:
        """Training samples so far, as the MLPerf rules count them: steps times global batch."""
        return self.step * self.global_batch

    def train(self) -> bool:
        """Train to the target or to the end of the data; returns whether the target was reached."""
        in_block = False
        for batch in self._timed(self.train_batches):
            if not in_block:
                self.log.block_start(self.samples)
                in_block = True
            loss = self.train_step(batch)
            self._report(loss, batch)
            if is_eval_step(self.step, self.cadence.eval_interval, self.cadence.first_eval):
                self.log.block_stop(self.samples)
                in_block = False
                if self.evaluate():
                    self.log.run_stop("success", self.samples)
                    return True
        if in_block:
            self.log.block_stop(self.samples)
        self.log.run_stop("aborted", self.samples)
        return False

    def train_step(self, batch: Batch) -> Tensor:
        """One forward, backward and update; returns the loss, fp32 scalar on the device."""
        self.optimizers.set_learning_rate(self.step)
        self.optimizers.zero_grad()
        loss = self.model(batch.to(self.ranks.device, non_blocking=True), self.step).loss
        if not torch.isfinite(loss):  # before backward: the tables are updated inside it
            raise FloatingPointError(f"step {self.step}: the loss is {loss.item()}; the weights of the step before are intact")
        loss.backward()
        self.optimizers.step(self.step)
        self.step += 1
        return loss.detach()

    def evaluate(self) -> bool:
        """Score the holdout; returns whether the target was reached."""
        start = time.perf_counter()
        self.log.eval_start(self.samples)
        result = evaluate(self.model, self.eval_batches(), self.ranks)
        self.log.eval_accuracy(result.auc, self.samples)
        self.log.eval_stop(self.samples)
        self.telemetry.eval(
            step=self.step,
            samples=self.samples,
            auc=result.auc,
            normalized_entropy=result.normalized_entropy,
            log_loss=result.log_loss,
            target=self.target,
            eval_samples=result.samples,
            eval_s=time.perf_counter() - start,
        )
        self._interval.exclude(time.perf_counter() - start)
        return result.reaches(self.target)

    def _report(self, loss: Tensor, batch: Batch) -> None:
        interval, cadence = self._interval, self.cadence
        interval.add(loss, batch.global_real_samples)
        if self.log.path and self.step % cadence.train_loss == 0:
            self.log.train_loss(self._mean_over_ranks(loss), self.samples, self.optimizers.learning_rate)
        if self.step % cadence.report == 0:
            step_s = interval.seconds / interval.steps
            self.telemetry.train(
                step=self.step,
                samples=self.samples,
                window=self.train_batches.state[0],
                loss=self._mean_over_ranks(interval.loss / interval.steps),
                learning_rate=self.optimizers.learning_rate,
                step_ms=step_s * 1000,
                samples_per_s=interval.samples / interval.seconds,
                data_wait_ms=interval.wait_s / interval.steps * 1000,
                eta_s=(len(self.train_batches) - self.step) * step_s,
            )
            self._interval = _Interval()

    def _mean_over_ranks(self, value: Tensor) -> float:
        if self.ranks.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value.item() / self.ranks.world_size

    def _timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(iterator, None)
            if batch is None:
                return
            self._interval.wait_s += time.perf_counter() - start
            yield batch


class _Interval:
    """Sums since the last report. loss stays on the device; seconds leave evaluations out."""

    def __init__(self):
        self.steps, self.samples, self.wait_s = 0, 0, 0.0
        self.loss: Tensor | float = 0.0
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def add(self, loss: Tensor, samples: int) -> None:
        self.steps += 1
        self.samples += samples
        self.loss = self.loss + loss

    def exclude(self, seconds: float) -> None:
        self._start += seconds
