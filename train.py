"""Train DLRMv4: flags -> settings -> run -> train -> close. `torchrun train.py ...` for many GPUs, `python train.py ...` for one process.

Exit codes: 0 the target was reached (or evaluation is off); 2 something the user can fix, said in one line; 3 the data ended below the
target; 130 interrupted; 1 a fault of ours. torchrun answers any code but 0 with its own report and code 1.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from data.cli import exit_on_user_error
from dlrm_hstu.environment import check_operators, check_packages

TARGET_REACHED, DATA_ENDED, INTERRUPTED = 0, 3, 130


def main(arguments: Sequence[str]) -> int:
    """One run; returns the exit code."""
    with ExitStack() as stack:
        with exit_on_user_error():
            check_packages()  # before anything that is not of the standard library is imported
            from dlrm_hstu.cli import parse

            settings = parse(arguments)
            check_operators()
            from dlrm_hstu.parallel.process_group import process_group
            from dlrm_hstu.training.build import Run

            ranks = stack.enter_context(process_group(settings.train.device))
            run = Run(settings, ranks)
            stack.callback(run.close)
            run.start_clock()
        reached = run.train()
    return TARGET_REACHED if reached else DATA_ENDED


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
