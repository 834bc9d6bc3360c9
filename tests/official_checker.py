"""What the official MLPerf checker has against a log, warnings included."""

import logging
import re
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance

from dlrm_hstu.mlperf import rules


def complaints(log: Path) -> str:
    """The checker's messages; "" if the log passes."""
    mlp_compliance.enqueued_configs.clear()  # a module-level queue, left over after a crash
    checker = mlp_compliance.make_checker(rules.USAGE, rules.RULESET, quiet=False, werror=True)
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        passed, *_ = mlp_compliance.main(str(log), f"{rules.USAGE}_{rules.RULESET}/common.yaml", checker)
    finally:
        logging.getLogger().removeHandler(handler)
    assert checker.warnings == {}
    text = "\n".join(messages)
    assert passed == (text == "")
    return text


def objected_keys(log: Path) -> set[str]:
    """The keys that the messages name."""
    return set(re.findall(r"(?:CHECK for '|Failed checks for )(\w+)", complaints(log)))
