"""Settings -> a run that is ready to train."""

import math
import os
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from data.dataset import YambdaDataset
from data.index import AnchorIndex
from data.loader import BatchLoader, StreamPlan, eval_batches, train_batches
from data.store import EventStore
from dlrm_hstu.cli import Settings
from dlrm_hstu.mlperf.facts import RunFacts, check_words
from dlrm_hstu.mlperf.log import MLPerfLog
from dlrm_hstu.mlperf.rules import closed_deviations
from dlrm_hstu.parallel.process_group import Ranks
from dlrm_hstu.parallel.sharding import build_sharded_model
from dlrm_hstu.training import schedule
from dlrm_hstu.training.loop import Cadence, Trainer
from dlrm_hstu.training.optimizers import Optimizers, resolve_learning_rates
from dlrm_hstu.training.telemetry import Telemetry


class Run:
    """A trainer with its logs, in the order the MLPerf clock asks for: set-up, clock, data.

    Set-up reads the data's manifests and counts, not one event, where the anchor index is prepared. Raises ValueError for settings that
    do not fit the data or each other, before it writes a file.
    """

    def __init__(self, settings: Settings, ranks: Ranks):
        folder = Path(settings.train.results_dir) / settings.train.run_name
        if ranks.rank == 0:
            check_folder(folder)
        train, evals, plan = open_data(settings, ranks)
        global_batch = settings.train.batch_size * ranks.world_size
        cadence = plan_cadence(settings, len(train), train.samples, global_batch)
        check_words("MLPerfConfig.config_filename", config_name(settings))

        log_path = (settings.mlperf.log_path or folder / "mlperf.log") if settings.mlperf.logging else None
        self.log = MLPerfLog(log_path, ranks.rank)
        self.log.init_start()
        self.telemetry = Telemetry(folder, ranks.rank, settings.train.tensorboard)
        if ranks.rank == 0:
            (folder / "config.gin").write_text(settings.config_text)
        seed = draw_seed(settings.train.seed)
        optimizer = resolve_learning_rates(settings.optimizer, global_batch)
        model = build_sharded_model(settings.model, optimizer, seed=seed, device=ranks.device)
        optimizers = Optimizers(model, optimizer)
        self.telemetry.say(
            f"{ranks.world_size} x {ranks.device.type}, seed {seed}: {train.samples:,} training samples in {len(train):,} steps of "
            f"{global_batch}, {evals.samples:,} in {eval_set(plan)}, {describe(cadence, global_batch)}"
        )
        if settings.mlperf.logging:
            facts = run_facts(settings, optimizers, ranks, seed, cadence, plan, train.samples, evals.samples)
            self.log.header(facts)
            if settings.mlperf.division == "closed":
                for deviation in closed_deviations(closed_values(settings, facts)):
                    self.telemetry.say(f"not a closed-division run: {deviation}")
        self.trainer = Trainer(
            model,
            optimizers,
            ranks,
            train_batches=train,
            eval_batches=lambda: evals,
            cadence=cadence,
            target=settings.eval.auc_threshold,
            global_batch=global_batch,
            log=self.log,
            telemetry=self.telemetry,
        )

    def start_clock(self) -> None:
        """End of set-up. Raises ValueError if it took longer than the MLPerf rules allow."""
        dist.barrier()  # the slowest rank is ready
        self.log.init_stop_run_start()

    def train(self) -> bool:
        """Train; returns whether the target was reached, or there was none because evaluation is off."""
        trainer, target = self.trainer, self.trainer.target
        reached = trainer.train()
        if trainer.cadence.eval_interval == 0:
            self.telemetry.say("trained to the end of the data; evaluation was off")
            return True
        self.telemetry.say(f"target AUC {target:g} reached" if reached else f"the data ended before AUC {target:g} was reached")
        return reached

    def close(self) -> None:
        """Close the logs."""
        self.log.close()
        self.telemetry.close()


def check_folder(folder: Path) -> None:
    """Raise ValueError if a run has been in this folder: its logs are not ours to overwrite."""
    if (folder / "metrics.jsonl").exists():
        raise ValueError(f"{folder}: holds another run; set RUN_NAME to a new name, or delete that folder")


def open_data(settings: Settings, ranks: Ranks) -> tuple[BatchLoader, BatchLoader, StreamPlan]:
    """(training batches, holdout batches) of this rank, and the windows. Raises ValueError where settings and data do not fit."""
    if not settings.stream.path:
        raise ValueError("StreamConfig.path='': no data; set DLRM_DATA_PATH to a folder made by `python -m data.prepare`")
    store = EventStore.open(settings.stream.path)
    dataset = YambdaDataset(
        store,
        settings.history,
        settings.index.min_history,
        settings.model.table_rows,
        settings.model.contextual_features,
        settings.model.history_budget,
    )
    if ranks.rank == 0:  # the others find it there
        if not AnchorIndex.folder(store, settings.index).exists():
            print(f"making the anchor index for {settings.index}, once for this data", flush=True)
        AnchorIndex.open(store, settings.index)
    dist.barrier()
    index = AnchorIndex.open(store, settings.index)
    plan = settings.stream.resolve(index)
    shared = (dataset, index, settings.stream, settings.train.batch_size, ranks.rank, ranks.world_size)
    train = train_batches(*shared, max_batches_per_window=settings.train.num_train_batches, plan=plan)
    return train, eval_batches(*shared, max_batches=settings.eval.num_batches, plan=plan), plan


def eval_set(plan: StreamPlan) -> str:
    """The holdout's name, for people."""
    first, last = plan.holdout.start, plan.holdout.stop - 1
    return f"holdout window {first}" if first == last else f"holdout windows {first} to {last}"


def describe(cadence: Cadence, global_batch: int) -> str:
    """When the run evaluates, for people."""
    if cadence.eval_interval == 0:
        return "no evaluation"
    first, interval = cadence.first_eval * global_batch, cadence.eval_interval * global_batch
    return f"first evaluation after {first:,} samples, then every {interval:,}"


def config_name(settings: Settings) -> str:
    """What names the configuration in the MLPerf log."""
    return settings.mlperf.config_filename or (Path(settings.gin_files[-1]).name if settings.gin_files else "defaults")


def closed_values(settings: Settings, facts: RunFacts) -> dict:
    """What `closed_deviations` looks at."""
    parts = (settings.model, settings.history, settings.index, settings.stream, facts)
    return {name: value for part in parts for name, value in asdict(part).items()} | {"seed_was_drawn": settings.train.seed < 0}


def plan_cadence(settings: Settings, total_steps: int, train_samples: int, global_batch: int) -> Cadence:
    """The run's cadence in steps. Raises ValueError if an MLPerf log is asked for and the run would not evaluate once."""
    pct = settings.eval.every_data_pct
    interval = schedule.eval_interval_steps(train_samples, global_batch, pct)
    first = schedule.first_eval_samples(global_batch, train_samples, pct, settings.eval.skip_epoch_pct) // global_batch
    if settings.mlperf.logging:
        schedule.check_schedule(total_steps, interval, first)
    report = settings.train.metric_log_frequency
    return Cadence(interval, first, report, settings.mlperf.train_loss_log_frequency or report)


def draw_seed(seed: int) -> int:
    """`seed`, or one from system entropy if it is negative; the same on every rank."""
    if seed >= 0:
        return seed
    drawn = torch.tensor(int.from_bytes(os.urandom(4), "big") >> 1)
    dist.broadcast(drawn, src=0)
    return drawn.item()


def run_facts(
    settings: Settings,
    optimizers: Optimizers,
    ranks: Ranks,
    seed: int,
    cadence: Cadence,
    plan: StreamPlan,
    train_samples: int,
    eval_samples: int,
) -> RunFacts:
    """What the MLPerf log says of the run, from the objects that will run."""
    dense, (sparse_name, kernel_rate) = optimizers.dense.param_groups[0], optimizers.sparse_name_and_rate()
    sparse_lr = optimizers.config.sparse_lr  # the kernels hold it in fp32, and the rules compare it with Adam's, digit by digit
    assert math.isclose(kernel_rate, sparse_lr, rel_tol=1e-6), (kernel_rate, sparse_lr)
    precision = {"float32": "fp32", "bfloat16": "bfloat16"}[settings.model.dtype]
    global_batch = settings.train.batch_size * ranks.world_size
    accelerator = torch.cuda.get_device_name() if ranks.device.type == "cuda" else platform.machine() + " CPU"
    return RunFacts(
        submission_org=settings.mlperf.organization,
        submission_division=settings.mlperf.division,
        submission_status=settings.mlperf.status,
        submission_platform=settings.mlperf.platform or f"{ranks.world_size}x{accelerator}",
        seed=seed,
        global_batch_size=global_batch,
        gradient_accumulation_steps=1,
        train_samples=train_samples,
        eval_samples=eval_samples,
        max_sequence_length=settings.model.max_seq_len,
        opt_name=type(optimizers.dense).__name__,
        opt_base_learning_rate=dense["lr"],
        opt_adam_beta_1=dense["betas"][0],
        opt_adam_beta_2=dense["betas"][1],
        opt_adam_epsilon=dense["eps"],
        opt_weight_decay=dense["weight_decay"],
        opt_gradient_clip_norm=optimizers.config.grad_clip_norm,
        opt_sparse_name=sparse_name,
        opt_sparse_base_learning_rate=sparse_lr,
        opt_learning_rate_warmup_steps=optimizers.config.warmup_steps,
        opt_learning_rate_warmup_start_lr=optimizers.config.warmup_start_lr,
        eval_every_data_pct=settings.eval.every_data_pct,
        lowest_numerical_precision_in_linear=precision,
        lowest_numerical_precision_in_attn=precision,
        lowest_numerical_precision_in_comm="fp32",
        micro_batch_size=settings.train.batch_size,
        config_filename=config_name(settings),
        auc_threshold=settings.eval.auc_threshold,
        eval_set=eval_set(plan),
        eval_interval_samples=cadence.eval_interval * global_batch,
        first_eval_samples=cadence.first_eval * global_batch,
    )
