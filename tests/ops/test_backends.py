"""Which implementation an op picks."""

from importlib import import_module
from types import SimpleNamespace

import pytest

from dlrm_hstu.ops.backends import pick_backend

TABLE = {"reference": "plain", "kernels": "fast", "other": "odd"}


@pytest.mark.parametrize("on_gpu, expected", [(False, "plain"), (True, "fast")])
def test_auto_goes_by_device(on_gpu, expected):
    assert pick_backend("op", TABLE, "auto", SimpleNamespace(is_cuda=on_gpu)) == expected


def test_a_name_is_taken_whatever_the_device():
    assert pick_backend("op", TABLE, "other", SimpleNamespace(is_cuda=True)) == "odd"


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="op: backend='nosuch'.*auto or one of reference, kernels, other"):
        pick_backend("op", TABLE, "nosuch", SimpleNamespace(is_cuda=False))


def test_the_ops_tables_have_the_reference_first_and_what_a_gpu_takes_second():
    tables = [list(import_module(f"dlrm_hstu.ops.{op}")._BACKENDS)[:2] for op in ("hstu_attention", "stu_layer")]
    assert tables == [["reference", "kernels"], ["reference", "triton"]]
