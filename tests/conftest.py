"""What all tests share: few threads, fixed seeds, and no GPU test where there is no GPU."""

import os
import random

# One thread: the tensors are small, and two threads on two busy cores wait for each other thirty times longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, here and in the processes of tests

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: kernels run on the CPU, in triton's interpreter


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm GPU, and torch sees none"))


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
