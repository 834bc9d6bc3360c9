"""Command lines: one line on a user's error, exit status 2."""

import argparse
import contextlib
import difflib
import sys
from collections.abc import Callable, Iterator


class Parser(argparse.ArgumentParser):
    """ArgumentParser that answers an error with one line, and an unknown flag with the nearest one. Takes no abbreviations."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **settings)

    def parse_args(self, arguments=None, namespace=None):
        namespace, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            flags = [option for action in self._actions for option in action.option_strings]
            name = unknown[0].split("=")[0]
            nearest = difflib.get_close_matches(name, flags, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"valid flags: {', '.join(flags)}"
            self.error(f"unknown argument {name}: {hint}")
        return namespace

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


@contextlib.contextmanager
def exit_on_user_error(status: int = 2) -> Iterator[None]:
    """Turn ValueError and OSError into one line on stderr and SystemExit(status)."""
    try:
        yield
    except (ValueError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(status) from None


def run_command(command: Callable[[], int | None], failure_status: int = 2) -> int:
    """The exit status of `command`, `failure_status` on a user's error."""
    try:
        with exit_on_user_error(failure_status):
            return command() or 0
    except SystemExit as exit:
        return exit.code
