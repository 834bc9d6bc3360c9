"""scripts/setup.sh: which interpreter, which lock, and when .venv is made, kept or refused. Nothing is downloaded here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup.sh"


@pytest.fixture
def machine(tmp_path):
    """A checkout with empty locks and a machine whose only programs of note are the fakes in bin/."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "requirements").mkdir()
    for lock in ("common", "cpu", "cuda", "cuda-libs", "dev"):
        (tmp_path / "requirements" / f"{lock}.txt").write_text("# nothing\n")
    for tool in ("bash", "cat", "cut", "grep", "mkdir", "rm", "sha256sum"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def fake(machine, name, body):
    path = machine / "bin" / name
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)


def call(machine, function, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "LOCK", "VIRTUAL_ENV")}
    return subprocess.run(
        [shutil.which("bash"), "-c", f"set -euo pipefail; source {SCRIPT}; {function}"],
        cwd=machine,
        env=clean | {"PATH": str(machine / "bin")} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_one_line_error(result, *parts):
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for part in ("error: ", *parts):
        assert part in result.stderr


def test_first_python_that_really_runs(machine):
    fake(machine, "python3.11", "echo 'python3.11: command not found' >&2; exit 127")
    fake(machine, "python3.12", f'exec {sys.executable} "$@"')
    result = call(machine, "pick_python")
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "python3.12", "")


def test_python_is_taken_from_the_environment_or_refused(machine):
    fake(machine, "python3.11", f'exec {sys.executable} "$@"')
    assert call(machine, "pick_python", PYTHON=sys.executable).stdout.strip() == sys.executable
    fake(machine, "old", "exit 1")
    assert_one_line_error(call(machine, "set_up", PYTHON="old"), "PYTHON=old", "3.11 or 3.12")


def test_no_python_is_one_line(machine):
    assert_one_line_error(call(machine, "set_up"), "no Python 3.11 or 3.12", "PYTHON=")


@pytest.mark.parametrize(
    ("tool", "prints", "lock"),
    [
        ("nvidia-smi", "GPU 0: NVIDIA H200 (UUID: GPU-1)", "cuda"),
        ("nvidia-smi", "No devices were found", "cpu"),
        ("rocminfo", "  Name:                    gfx942", "rocm"),
        ("amd-smi", "GPU: 0\n    BDF: 0000:05:00.0", "rocm"),
        ("unrelated", "", "cpu"),
    ],
)
def test_lock_follows_the_gpus_that_the_machine_lists(machine, tool, prints, lock):
    fake(machine, tool, f"echo '{prints}'")
    assert call(machine, "pick_lock").stdout.strip() == lock
    assert call(machine, "pick_lock", LOCK="cpu").stdout.strip() == "cpu"


def test_unknown_lock_is_one_line(machine):
    fake(machine, "python3.11", f'exec {sys.executable} "$@"')
    assert_one_line_error(call(machine, "set_up", LOCK="tpu"), "LOCK=tpu", "cpu, cuda or rocm")


def test_venv_is_made_once_and_again_when_the_lock_changes(machine):
    environment = {"PYTHON": sys.executable, "LOCK": "cuda"}
    first = call(machine, "set_up dev", **environment)
    assert first.returncode == 0, first.stderr
    assert "installing requirements/cuda.txt" in first.stderr and "installing requirements/dev.txt" in first.stderr
    marker = machine / ".venv" / "marker"
    marker.touch()
    again = call(machine, "set_up dev", **environment)
    assert (again.returncode, again.stderr) == (0, "")
    (machine / "requirements" / "common.txt").write_text("# something else\n")
    assert call(machine, "set_up dev", **environment).returncode == 0
    assert not marker.exists()


def test_a_venv_of_somebody_else_is_never_deleted(machine):
    (machine / ".venv").mkdir()
    (machine / ".venv" / "precious").touch()
    assert_one_line_error(call(machine, "set_up", PYTHON=sys.executable, LOCK="cuda"), ".venv", "delete it")
    assert (machine / ".venv" / "precious").exists()


def test_failed_installation_leaves_no_stamp_to_trust(machine):
    (machine / "requirements" / "cuda.txt").write_text("./no_such_folder\n")
    result = call(machine, "set_up", PYTHON=sys.executable, LOCK="cuda")
    assert result.returncode == 2
    assert "requirements/cuda.txt" in result.stderr
    assert (machine / ".venv" / "lock.stamp").read_text().strip() == "unfinished"
