"""Train DLRMv4: flags -> settings -> run -> train -> close. `torchrun train.py ...` for many GPUs, `python train.py ...` for one process.

Exit codes: 0 the target was reached; 2 something the user can fix, said in one line; 3 the data ended below the target.
"""

import sys
from collections.abc import Sequence

from dlrm_hstu.cli import exit_on_user_error, parse

TARGET_REACHED, DATA_ENDED = 0, 3


def main(arguments: Sequence[str]) -> int:
    """One run; returns the exit code."""
    with exit_on_user_error():
        settings = parse(arguments)
        from dlrm_hstu.environment import check_environment

        check_environment()
        from dlrm_hstu.parallel.process_group import process_group
        from dlrm_hstu.training.build import Run

        with process_group(settings.train.device) as ranks:
            run = Run(settings, ranks)
            try:
                reached = run.train()
            finally:
                run.close()
    return TARGET_REACHED if reached else DATA_ENDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
