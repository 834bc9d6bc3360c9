"""What all tests share: few threads, fixed seeds, and no GPU test where there is no GPU."""

import os
import random
import sys

# One thread: the tensors are small, and two threads on two busy cores wait for each other thirty times longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, here and in the processes of tests

import numpy as np
import pytest


def pytest_collection_modifyitems(items):
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm GPU, and torch sees none"))


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
