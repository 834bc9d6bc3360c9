"""Flags -> gin -> settings: `parse` turns a command line into the settings of a run.

Command line beats environment beats gin files beats defaults; a later gin file or --gin beats an earlier one.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import gin

from data.checks import require
from dlrm_hstu.bindings import Binding, as_gin, read_file, read_text, resolve
from dlrm_hstu.config import EvalConfig, MLPerfConfig, ModelConfig, OptimizerConfig, TrainConfig
from dlrm_hstu.knobs import KNOBS, MODULES, check_foreign_knobs, knobs_from_environment, nearest, settings_class

if TYPE_CHECKING:
    from data.history import HistoryConfig
    from data.index import IndexConfig
    from data.loader import StreamConfig

FLAGS = ("--gin_file", "--gin", "--print_config", "--help")


@dataclass(frozen=True)
class Settings:
    """Everything a run is told. gin_files: as named on the command line. config_text: every setting as gin text, with its origin."""

    model: ModelConfig
    optimizer: OptimizerConfig
    eval: EvalConfig
    train: TrainConfig
    mlperf: MLPerfConfig
    history: "HistoryConfig"
    index: "IndexConfig"
    stream: "StreamConfig"
    gin_files: tuple[str, ...] = field(compare=False)
    config_text: str = field(compare=False)

    def __post_init__(self):
        contextual = len(self.model.contextual_features)
        events = sum(count for _, count in self.history.pools)
        require(
            events <= self.model.history_budget,
            f"HistoryConfig.length={self.history.length}: {events} history + {contextual} contextual + 1 candidate tokens exceed "
            f"ModelConfig.max_seq_len={self.model.max_seq_len}; lower HISTORY_LENGTH to {self.model.history_budget} or raise MAX_SEQ_LEN",
        )
        require(
            self.model.position_buckets >= self.model.max_seq_len,
            f"ModelConfig.position_buckets={self.model.position_buckets}: the oldest of ModelConfig.max_seq_len={self.model.max_seq_len} "
            "tokens would share a position; raise it to at least max_seq_len",
        )


def parse(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags, `environment` (os.environ unless given), gin files and defaults.

    --print_config prints config_text, --help the flags, and both raise SystemExit(0). Rank 0 warns on stderr of knobs without effect.
    Raises ValueError, with a one-line message, on anything misspelt, malformed or contradictory.
    """
    environment = os.environ if environment is None else environment
    flags = _parse_flags(argv)
    warnings = check_foreign_knobs(environment)
    if environment.get("RANK", "0") == "0":
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
    bindings = [binding for path in flags.gin_file for binding in read_file(path)]
    for name, value in knobs_from_environment(environment).items():
        bindings.append(Binding(name, value, f"environment variable {name}"))
    bindings += [binding for text in flags.gin for binding in read_text(text, f"--gin {' '.join(text.split())!r}")]
    settings = _build(resolve(bindings), tuple(flags.gin_file))
    if flags.print_config:
        print(settings.config_text, end="")
        raise SystemExit(0)
    return settings


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def _parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(allow_abbrev=False, epilog="Knobs, also as environment variables: " + ", ".join(KNOBS) + ". See docs/knobs.md.")
    parser.add_argument("--gin_file", action="append", default=[], metavar="PATH", help="gin file; repeatable, a later one wins")
    parser.add_argument(
        "--gin", action="append", default=[], metavar="'NAME = VALUE'", help="a setting or knob; repeatable, a later one wins"
    )
    parser.add_argument("--print_config", action="store_true", help="print every setting and its origin, and exit")
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        knob = name.lstrip("-").upper().replace("-", "_")
        fix = f'did you mean --gin "{knob} = ..."?' if knob in KNOBS else f"did you mean {nearest(name, FLAGS)}?"
        raise ValueError(f"unknown flag {name!r}: the flags are {', '.join(FLAGS)}; {fix}")
    return flags


def _build(bindings: Mapping[str, Binding], gin_files: tuple[str, ...]) -> Settings:
    """Build every settings class through gin; gin is left empty, so that nothing built later picks up these bindings."""
    config_text = as_gin(bindings)
    gin.clear_config()
    try:
        classes = [settings_class(name) for name in MODULES]
        gin.parse_config(config_text)
        return Settings(*(configurable() for configurable in classes), gin_files=gin_files, config_text=config_text)
    except ValueError as error:
        message = str(error).partition("\n  In call to configurable")[0]
        raise ValueError(message + _origin_of(message, bindings)) from None
    finally:
        gin.clear_config()


def _origin_of(message: str, bindings: Mapping[str, Binding]) -> str:
    """Where the setting that an error message starts with was set; nothing for a default."""
    name = re.match(r"\w+\.\w+", message)
    binding = bindings.get(name.group()) if name else None
    return "" if binding is None or binding.origin == "default" else f" (set by {binding.origin})"
