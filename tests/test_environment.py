"""A set of packages that cannot work together is one line that names what was found and what is needed (case 63)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_hstu.environment import GENERATIONS, REQUIRED, check_versions

ROOT = Path(__file__).parent.parent
GOOD = {name: "1.0" for name in REQUIRED} | {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"torch": "2.13.1", "fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0"},
        {"torch": "2.12.0", "fbgemm-gpu-cpu": "1.7.0", "torchrec": "1.7.0"},
        {"torch": "2.11.0a0+git70d99e9", "fbgemm-gpu-cpu": None, "fbgemm-gpu-rocm": "1.6.1", "torchrec": "1.6.1"},
    ],
)
def test_matching_versions_pass(versions):
    check_versions(GOOD | versions)


@pytest.mark.parametrize(
    ("versions", "names"),
    [
        ({"torch": "2.11.0"}, ["torch 2.11.0", "fbgemm-gpu-cpu 1.8.0", "torchrec 1.8.0", "torch 2.11 with fbgemm 1.6 and torchrec 1.6"]),
        ({"fbgemm-gpu-cpu": "1.7.0"}, ["fbgemm-gpu-cpu 1.7.0", "torch 2.13 with fbgemm 1.8"]),
        ({"torchrec": "1.6.1"}, ["torchrec 1.6.1", "torch 2.13 with fbgemm 1.8 and torchrec 1.8"]),
        ({"torch": "2.1.0"}, ["torch 2.1.0", "torch 2.13 with"]),
        ({"torch": "2.14.0", "fbgemm-gpu-cpu": "1.9.0", "torchrec": "1.9.0"}, ["torch 2.14.0", "torch 2.13 with"]),
        ({"fbgemm-gpu-cpu": None}, ["no fbgemm", "fbgemm-gpu-cpu", "torch 2.13 with"]),
        ({"fbgemm-gpu": "1.8.0"}, ["fbgemm-gpu and fbgemm-gpu-cpu overwrite"]),
        ({"torchrec": None, "pyarrow": None}, ["missing packages: torchrec, pyarrow"]),
    ],
)
def test_other_versions_are_one_line_with_found_and_needed(versions, names):
    with pytest.raises(ValueError) as error:
        check_versions(GOOD | versions)
    message = str(error.value)
    assert "\n" not in message
    assert "requirements/" in message
    for name in names:
        assert name in message


def test_one_fbgemm_minor_per_torch_minor():
    assert GENERATIONS["2.11"] == ("1.6", "1.6")
    assert GENERATIONS["2.13"] == ("1.8", "1.8")
    assert len(set(GENERATIONS.values())) == len(GENERATIONS)


def test_a_bare_interpreter_is_told_what_is_missing():
    result = subprocess.run([sys.executable, "-E", "-S", str(ROOT / "train.py")], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: missing packages: {', '.join(REQUIRED)}; ")
    assert len(result.stderr.splitlines()) == 1


def _train_beside(folder: Path) -> subprocess.CompletedProcess:
    """train.py with `folder` before the installed packages."""
    return subprocess.run(
        [sys.executable, "train.py", "--gin_file", "configs/smoke.gin"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("init", "says"),
    [
        ("import torch, pathlib\ntorch.ops.load_library(str(pathlib.Path(__file__).with_name('broken.so')))\n", "does not load (OSError"),
        (
            "import logging\nlogging.error('not\\n\\nloaded')\nraise RuntimeError('undefined symbol:\\n_ZN3c10')\n",
            "undefined symbol: _ZN3c10",
        ),
        ("", "registers no jagged_2d_to_dense"),
    ],
)
def test_broken_fbgemm_is_one_line_and_exit_2(tmp_path, init, says):
    package = tmp_path / "fbgemm_gpu"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "broken.so").write_bytes(b"\x7fELF broken")
    result = _train_beside(tmp_path)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for part in ("error: ", "fbgemm", says, "torch 2.", "needed: the fbgemm 1.", "requirements/"):
        assert part in result.stderr
