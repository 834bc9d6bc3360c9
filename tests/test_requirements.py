"""The locks are complete, consistent and say nothing of where packages come from."""

import ast
import importlib.metadata
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dlrm_hstu.environment import FBGEMM_BUILDS, REQUIRED, check_versions

ROOT = Path(__file__).parent.parent
LOCKS = ("cpu", "cuda", "rocm", "dev")
OURS = {"scripts", "data", "dlrm_hstu", "tests", "train"}
# (who asks, for what): why the lock lacks it.
NOT_LOCKED = {
    ("torchrec", "fbgemm-gpu"): "cpu.txt has fbgemm-gpu-cpu, which installs the same package under another name",
    ("torch", "cuda-toolkit"): "cuda-libs.txt: scripts/setup.sh adds it where torch turns out to be a CUDA build",
    ("torch", "cuda-bindings"): "cuda-libs.txt",
}
# (imported package): who may import it although no lock has it.
OPTIONAL_IMPORTS = {"huggingface_hub": "data/download.py"}


@cache
def pins(lock: str) -> dict[str, str]:
    """Version by canonical name, from a lock and the files that it includes. Anything but `name==version` fails."""
    found = {}
    for line in (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            found |= pins(line[3:].removesuffix(".txt"))
        elif line:
            name, version = re.fullmatch(r"([a-z0-9-]+)==([a-z0-9.]+)", line).groups()
            assert name not in found, f"{lock}.txt: {name} twice"
            found[name] = version
    return found


def unmet(lock: dict[str, str], distributions) -> list[str]:
    """What the distributions, as installed, ask for and `lock` does not have."""
    missing = []
    for name, requires in distributions:
        for text in requires or ():
            requirement = Requirement(text)
            wanted = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if (name, wanted) in NOT_LOCKED or (name == "torch" and wanted.startswith("nvidia-")):
                continue
            if wanted not in lock or not requirement.specifier.contains(lock[wanted], prereleases=True):
                missing.append(f"{name} asks for {text}; the lock has {lock.get(wanted)}")
    return missing


def test_unmet_sees_missing_and_wrong_versions():
    lock = {"a": "1.0", "b": "1.0"}
    assert len(unmet(lock, [("a", ["b>=2", "c", "d; extra == 'x'", "b<2", "e; python_version < '3'"])])) == 2


def test_cpu_lock_meets_every_requirement_of_every_package_in_it():
    lock = pins("cpu") | pins("dev")
    installed = {}
    for name, version in lock.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.version.partition("+")[0] == version:
            installed[name] = distribution.requires
    if "torchrec" not in installed:
        pytest.skip(f"the installed packages are of another generation than torchrec {lock['torchrec']}")
    assert unmet(lock, installed.items()) == []


def test_locks_hold_what_the_environment_check_asks_for():
    for lock in ("cpu", "cuda"):
        check_versions({name: pins(lock).get(name) for name in (*REQUIRED, *FBGEMM_BUILDS)})
    assert set(REQUIRED) - set(pins("rocm")) == {"torch"}  # the image brings it


def test_cuda_lock_is_the_cpu_lock_with_other_builds():
    cpu, cuda = pins("cpu"), pins("cuda")
    assert {name for name in cpu if cuda.get(name) != cpu[name]} == {"fbgemm-gpu-cpu"}
    assert set(cuda) - set(cpu) == {"fbgemm-gpu", *pins("cuda-libs")}


def test_every_import_of_the_code_is_locked():
    providers = importlib.metadata.packages_distributions()
    lock = pins("cpu") | pins("dev")
    stray = []
    for path in [ROOT / "train.py", *(p for room in ("data", "dlrm_hstu", "scripts", "tests") for p in (ROOT / room).rglob("*.py"))]:
        for name in _imported_packages(path) - set(sys.stdlib_module_names) - OURS:
            locked = any(canonicalize_name(distribution) in lock for distribution in providers.get(name, ()))
            optional = OPTIONAL_IMPORTS.get(name) == str(path.relative_to(ROOT))
            if not locked and not optional:
                stray.append(f"{path.relative_to(ROOT)} imports {name}")
    assert stray == []


def _imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    folder_mates = {mate.stem for mate in path.parent.glob("*.py")} if "tests" in path.parts else set()
    return names - folder_mates


def test_no_package_index_is_named():
    host = re.compile(r"--(extra-)?index-url|--find-links|https?://\S*(pypi|/whl|/simple)", re.IGNORECASE)
    files = [*(ROOT / "requirements").iterdir(), *(ROOT / "scripts").rglob("*.sh"), ROOT / ".ci/run", ROOT / "Dockerfile"]
    for path in [*files, ROOT / "README.md", ROOT / "pyproject.toml"]:
        assert not host.search(path.read_text()), f"{path}: closed networks cannot reach it; leave it to the user's PIP_EXTRA_INDEX_URL"


def test_locks_are_all_there_and_lack_what_the_product_does_not_use():
    for lock in LOCKS:
        assert pins(lock)
    assert "numba" not in pins("cpu") | pins("cuda") | pins("rocm") | pins("dev")
