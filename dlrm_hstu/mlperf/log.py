"""The run's MLPerf log: its records in the order and form that the official checker accepts, or an error."""

import importlib.metadata
import importlib.util
import json
import logging
import math
import operator
import os
import re
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from data.checks import require
from dlrm_hstu.mlperf import rules
from dlrm_hstu.mlperf.facts import RESERVED_WORDS, RunFacts, check_words

OLDEST_PACKAGE = (4, 1, 68)  # of mlperf-logging: the first with this benchmark's rules
TOKEN = ":::MLLOG "
_REPOSITORY = Path(__file__).parents[2]

HEADER = tuple(f.name for f in fields(RunFacts))
_PROLOGUE = ("", "cache_clear", "init_start", "submission_benchmark", *HEADER, "init_stop", "run_start")
# What may follow each record. A resumed run opens a new block; the block or evaluation that the stop cut short stays open.
NEXT: dict[str, tuple[str, ...]] = {before: (after,) for before, after in zip(_PROLOGUE, _PROLOGUE[1:], strict=False)} | {
    "run_start": ("block_start", "run_resumed"),
    "block_start": ("block_stop", "run_resumed"),
    "block_stop": ("eval_start", "run_stop", "run_resumed"),
    "eval_start": ("eval_accuracy", "run_resumed"),
    "eval_accuracy": ("eval_stop", "run_resumed"),
    "eval_stop": ("block_start", "run_stop", "run_resumed"),
    "run_resumed": ("block_start", "run_resumed"),
    "run_stop": (),
}


class _Position:
    """Where a log stands. It follows from the log's records alone, so that a resumed run reads it back from the file."""

    def __init__(self):
        self.last = ""  # newest record that NEXT knows
        self.header: dict[str, Any] = {}
        self.samples = 0
        self.last_eval = 0
        self.reached = False  # whether the newest evaluation reached the target

    def advance(self, key: str, value: Any, metadata: dict) -> None:
        """Take one more record, or raise RuntimeError where it may not stand."""
        _ensure(
            key in NEXT[self.last], f"{key} after {self.last or 'nothing'}, where {' or '.join(NEXT[self.last]) or 'nothing'} must follow"
        )
        if key in HEADER:
            self.header[key] = value
        if "samples_count" in metadata:
            self._move(key, metadata["samples_count"])
        if key == "block_start":
            _ensure(not self.reached, f"a block at {self.samples} samples, after the evaluation that reached the target")
        elif key == "eval_accuracy":
            self.last_eval = max(self.last_eval, self.samples)
            self.reached = value >= self.header["auc_threshold"] and not metadata.get("undefined", False)
        elif key == "run_resumed":
            self.reached = False
        elif key == "run_stop":
            _ensure(metadata["status"] == ("success" if self.reached else "aborted"), f"{metadata} with target reached: {self.reached}")
        self.last = key

    def _move(self, key: str, samples: int) -> None:
        interval = self.header["eval_interval_samples"]
        due = self.last_eval + interval if self.last_eval else self.header["first_eval_samples"]
        if key == "run_resumed":
            _ensure(0 <= samples <= due, f"training resumes at {samples} samples, but the evaluation at {due} is not in the log")
        elif key == "block_stop":
            _ensure(samples >= self.samples, f"a block from {self.samples} to {samples} samples")
            _ensure(samples <= due, f"a block up to {samples} samples, past the evaluation due at {due}")
        else:
            _ensure(samples == self.samples, f"{key} at {samples} samples; the log stands at {self.samples}")
        if key == "eval_start":
            on_grid = samples % interval == 0 and samples >= self.header["first_eval_samples"]
            _ensure(on_grid, f"an evaluation at {samples} samples; the grid has {due} next")
        self.samples = samples


class MLPerfLog:
    """The log of one run. Every record goes through one state machine, which raises RuntimeError instead of writing a bad stream.

    path: the file; None makes a log that writes nothing. Ranks other than 0 write nothing either.
    resume: False empties the file, True continues it. A log that is continued holds the run from its start.
    Raises ValueError if a usable mlperf-logging is not installed (on every rank), the file cannot be opened, or cannot be continued.

    `samples` is, in every method, the training samples so far: global steps times global batch.
    """

    def __init__(self, path: str | os.PathLike | None, rank: int = 0, resume: bool = False):
        self._file = self._logger = None
        self._position = _Position()
        self._time_ms = self._init_start_ms = 0
        self.path = path
        if path is not None:
            _check_package()
        if path is None or rank != 0:
            return
        from mlperf_logging.mllog import mllog

        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if resume:
                self._read_back()
            self._file = open(path, "a" if resume else "w", encoding="ascii")
        except OSError as error:
            raise ValueError(f"MLPerf log {path}: {error.strerror or error}; set MLPerfConfig.log_path") from error
        logger = logging.Logger("dlrm_hstu.mlperf", logging.INFO)
        logger.addHandler(_LineWriter(self._file))
        self._logger = mllog.MLLogger(logger, root_dir=re.escape(str(_REPOSITORY)))

    @property
    def enabled(self) -> bool:
        """Whether this object writes."""
        return self._logger is not None

    def init_start(self, cache_cleared: bool = False) -> None:
        """Start of the untimed set-up. cache_cleared: whether the system's caches were in fact cleared; logged as it is."""
        self._write("cache_clear", bool(cache_cleared))
        self._write("init_start")
        self._init_start_ms = self._time_ms

    def header(self, facts: RunFacts) -> None:
        """All that is known of the run before it starts."""
        self._write("submission_benchmark", rules.BENCHMARK)
        for key, value in asdict(facts).items():
            self._write(key, value)

    def init_stop_run_start(self) -> None:
        """End of set-up; the clock starts. Raises ValueError if set-up took longer than the division allows."""
        if self.enabled and self._position.header:
            minutes = (_now_ms() - self._init_start_ms) / 60_000
            division = self._position.header["submission_division"]
            limit = rules.INIT_LIMIT_MINUTES[division]
            require(
                minutes < limit,
                f"set-up took {minutes:.1f} minutes: the {division} division allows less than {limit}; make it faster, or set "
                "MLPerfConfig.logging = False",
            )
        self._write("init_stop")
        self._write("run_start")

    def resume_run(self, facts: RunFacts, samples: int) -> None:
        """In place of the three above: training goes on at `samples`. Raises ValueError if `facts` are not the log's own."""
        if not self.enabled:
            return
        for key, value in asdict(facts).items():
            logged = self._position.header[key]
            require(
                value == logged,
                f"MLPerf log {self.path}: {key} is {logged!r} there and {value!r} in the resumed run; resume with the log's, or set "
                "MLPerfConfig.logging = False",
            )
        try:
            self._write_samples("run_resumed", samples)
        except RuntimeError as error:
            raise ValueError(f"MLPerf log {self.path} cannot be continued: {error}; set MLPerfConfig.logging = False") from error

    def block_start(self, samples: int) -> None:
        """Training starts or goes on."""
        self._write_samples("block_start", samples)

    def block_stop(self, samples: int) -> None:
        """Training pauses for an evaluation, or ends."""
        self._write_samples("block_stop", samples)

    def eval_start(self, samples: int) -> None:
        """An evaluation starts, right after the block before it."""
        self._write_samples("eval_start", samples)

    def eval_accuracy(self, auc: float | None, samples: int) -> None:
        """The evaluation's AUC. NaN or None, an undefined AUC, is written as 0.0 marked "undefined": the checker wants a number."""
        undefined = auc is None or math.isnan(auc)
        value = 0.0 if undefined else float(auc)
        _ensure(0 <= value <= 1, f"an AUC of {value}; it must be in [0, 1]")
        self._write_samples("eval_accuracy", samples, value, **({"undefined": True} if undefined else {}))

    def eval_stop(self, samples: int) -> None:
        """The evaluation ended."""
        self._write_samples("eval_stop", samples)

    def train_loss(self, value: float, samples: int, lr: float) -> None:
        """The mean loss of the step that ended at `samples`, inside a block; lr: its learning rate."""
        if self.enabled:
            _ensure(self._position.last == "block_start", f"train_loss after {self._position.last or 'nothing'}, outside a block")
        self._write_samples("train_loss", samples, float(value), lr=float(lr))

    def run_stop(self, status: str, samples: int) -> None:
        """The clock stops. status: "success" if and only if the newest evaluation reached the target, else "aborted"."""
        self._write_samples("run_stop", samples, status=status)

    def custom(self, key: str, value: Any, metadata: dict | None = None) -> None:
        """A record of our own, under a name that no official tool looks for; numbers that are not finite become null."""
        if self.enabled:
            from mlperf_logging.mllog import constants

            check_words("the key of an own MLPerf record", key)
            official = NEXT.keys() | {value for value in vars(constants).values() if isinstance(value, str)}
            require(key not in official, f"{key!r}: is a name of the MLPerf rules; an own record needs another")
        self._write(key, value, metadata)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write_samples(self, key: str, samples: int, value: Any = None, **metadata) -> None:
        if self.enabled:
            samples = operator.index(samples)
            _ensure(samples >= 0, f"{key} at {samples} samples")
            epoch = samples / self._position.header.get("train_samples", 1)
            self._write(key, value, {"samples_count": samples, "epoch_num": epoch, **metadata})

    def _write(self, key: str, value: Any = None, metadata: dict | None = None) -> None:
        if not self.enabled:
            return
        value, metadata = _finite(value), _finite(metadata or {})
        text = json.dumps([value, metadata])
        for word in RESERVED_WORDS:
            require(word not in text, f"MLPerf record {key}: must not contain {word!r}, which the official tools would misread; rename it")
        if key in NEXT:
            self._position.advance(key, value, metadata)
        self._time_ms = max(self._time_ms, _now_ms())  # a clock that is set back must not make time run backwards
        kind = "start" if key.endswith("_start") else "end" if key.endswith("_stop") else "event"
        # The one call of the logger: all seeds carry the same file and line, by which the official seed check finds repeats.
        getattr(self._logger, kind)(key, value, metadata=metadata, time_ms=self._time_ms)
        if kind != "event" or key in ("eval_accuracy", "run_resumed"):
            os.fsync(self._file.fileno())

    def _read_back(self) -> None:
        """Take up the position of the file, cutting off a last line that a stop left without its end."""
        fix = "restore the file, or set MLPerfConfig.logging = False"
        require(Path(self.path).exists(), f"MLPerf log {self.path}: the run to be resumed has left no log; {fix}")
        whole, newline, torn = Path(self.path).read_bytes().rpartition(b"\n")
        for number, line in enumerate((whole + newline).decode("latin-1").split("\n"), start=1):
            if TOKEN not in line:
                continue
            try:
                record = json.loads(line.rpartition(TOKEN)[2])
                self._time_ms = max(self._time_ms, record["time_ms"])
                if record["key"] in NEXT:
                    self._position.advance(record["key"], record["value"], record["metadata"])
            except (ValueError, KeyError, RuntimeError) as error:
                raise ValueError(f"MLPerf log {self.path}, line {number}: {error}; {fix}") from error
        require("run_resumed" in NEXT[self._position.last], f"MLPerf log {self.path}: holds no running run to resume; {fix}")
        if torn:
            os.truncate(self.path, len(whole) + len(newline))


class _LineWriter(logging.Handler):
    """Writes a record a line and hands it to the system at once. Raises where the standard handlers only print."""

    def __init__(self, file):
        super().__init__()
        self._out = file

    def emit(self, record: logging.LogRecord) -> None:
        """Write an MLPerf record; the logger's own complaints, which are no INFO, become errors."""
        if record.levelno != logging.INFO:
            raise RuntimeError(f"MLPerf log: {record.getMessage()}")
        self._out.write(record.getMessage() + "\n")
        self._out.flush()


def _check_package() -> None:
    wanted = f"mlperf-logging {'.'.join(map(str, OLDEST_PACKAGE))} or newer"
    fix = "install it, or set MLPerfConfig.logging = False"
    try:
        version = importlib.metadata.version("mlperf-logging")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"an MLPerf log needs {wanted}, which is not installed; {fix}") from None
    package = Path(importlib.util.find_spec("mlperf_logging").origin).parent
    folder = package / "compliance_checker" / f"{rules.USAGE}_{rules.RULESET}"
    has_rules = (folder / f"closed_{rules.BENCHMARK}.yaml").exists()
    new_enough = tuple(int(part) for part in re.findall(r"\d+", version)[:3]) >= OLDEST_PACKAGE
    require(
        has_rules and new_enough,
        f"mlperf-logging {version}{'' if has_rules else f' without the rules {rules.RULESET} of {rules.BENCHMARK}'}: need {wanted}; {fix}",
    )


def _ensure(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"MLPerf log: {message}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now_ms() -> int:
    return int(time.time() * 1000)
