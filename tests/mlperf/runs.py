"""Steps of a run, written to an MLPerf log."""

from dataclasses import replace

from dlrm_hstu.mlperf.facts import RunFacts
from dlrm_hstu.mlperf.log import MLPerfLog

FIRST, INTERVAL = 57_344_000, 2_293_760  # the rules' grid at a global batch of 8192


def start(log: MLPerfLog, facts: RunFacts) -> None:
    log.init_start()
    log.header(facts)
    log.init_stop_run_start()
    log.block_start(0)


def evaluate(log: MLPerfLog, auc: float | None, samples: int) -> None:
    log.block_stop(samples)
    log.eval_start(samples)
    log.eval_accuracy(auc, samples)
    log.eval_stop(samples)


def whole_run(path, facts: RunFacts, aucs=(0.7, 0.7512), **changes) -> None:
    """A run that evaluates to `aucs`, the last of which ends it."""
    facts = replace(facts, **changes)
    log = MLPerfLog(path)
    start(log, facts)
    log.train_loss(0.1386, 50 * facts.global_batch_size, 2e-9)
    log.custom("tracked_stats", {"throughput": 11_000.0}, {"step": 50})
    for number, auc in enumerate(aucs):
        samples = facts.first_eval_samples + number * facts.eval_interval_samples
        evaluate(log, auc, samples)
        if number < len(aucs) - 1:
            log.block_start(samples)
    log.run_stop("success" if aucs[-1] >= facts.auc_threshold else "aborted", samples)
    log.close()
