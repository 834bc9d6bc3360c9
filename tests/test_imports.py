"""Every module imports alone, on a machine without a GPU, without triton and without matplotlib (cases 62 and 64)."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NO_GPU = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Each module in a process of its own; the slow packages are imported once, before the forks.
EACH_ALONE = """
import importlib, os, sys, traceback
import torch, torchrec.distributed.model_parallel
for name in sys.argv[1:]:
    if os.fork() == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            print(f"FAILED {name}")
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        print(f"CRASHED {name}")
"""
BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def sources() -> list[Path]:
    return sorted(path for room in ("data", "dlrm_hstu") for path in (ROOT / room).rglob("*.py") if path.name != "__main__.py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def fbgemm_operators(source: str) -> set[str]:
    return set(re.findall(r"torch\.ops\.fbgemm\.(\w+)", source))


def registers_fbgemm(source: str) -> bool:
    """Whether the module imports fbgemm_gpu itself, at its top level."""
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import)]
    return any(alias.name.partition(".")[0] == "fbgemm_gpu" for node in imports for alias in node.names)


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=NO_GPU | environment, capture_output=True, text=True, timeout=300
    )


def test_every_module_imports_alone_without_a_gpu():
    modules = [module_name(path) for path in sources()]
    assert "dlrm_hstu.model" in modules and "data.store" in modules
    result = python(EACH_ALONE, *modules)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_a_module_that_uses_an_fbgemm_operator_registers_it():
    needy = "import torch\nx = torch.ops.fbgemm.asynchronous_complete_cumsum(y)\n"
    assert fbgemm_operators(needy) and not registers_fbgemm(needy) and registers_fbgemm("import fbgemm_gpu  # noqa: F401\n" + needy)
    for path in sources():
        source = path.read_text()
        assert not fbgemm_operators(source) or registers_fbgemm(source), f"{path}: import fbgemm_gpu in it; import order must not matter"


def is_kernel(path):
    """Whether a module holds kernels or calls them directly; nothing imports one before a kernel is to run."""
    kernels = r"^(?:import|from) triton\b|^from dlrm_hstu\.ops\.\w+\.(?:triton|kernels)\b|import hopper, triton"
    return re.search(kernels, path.read_text(), re.M)


def test_every_module_imports_without_triton_and_matplotlib():
    code = BLOCK + "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('triton' in sys.modules)"
    result = python(code, *(module_name(path) for path in sources() if not is_kernel(path)))
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr


def test_trains_on_a_cpu_without_triton_and_matplotlib(tmp_path):
    raw, store = str(tmp_path / "raw"), str(tmp_path / "store")
    code = BLOCK + "import runpy\nsys.argv = sys.argv[1:]\nrunpy.run_path('train.py', run_name='__main__')"
    synthetic = "import runpy; runpy.run_module('data.synthetic', run_name='__main__', alter_sys=True)"
    prepare = "import runpy; runpy.run_module('data.prepare', run_name='__main__', alter_sys=True)"
    assert python(synthetic, "--out", raw, "--users", "30", "--days", "6", "--items", "200").returncode == 0
    assert python(prepare, "--raw", raw, "--out", store, "--min_history", "10").returncode == 0
    arguments = [
        "--gin_file",
        "configs/smoke.gin",
        "--gin",
        "TrainConfig.device = 'cpu'",
        "--gin",
        f"TrainConfig.results_dir = '{tmp_path}'",
    ]
    result = python(code, "train.py", *arguments, "--gin", "AUC_THRESHOLD = 0.0", DLRM_DATA_PATH=store)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "holdout AUC" in result.stdout
    assert (tmp_path / "smoke" / "mlperf.log").stat().st_size > 0


def imported_modules(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it: `from a import b` counts as a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize(
    ("room", "forbidden", "allowed"),
    [
        ("data", ("dlrm_hstu",), ("dlrm_hstu.batch",)),
        ("dlrm_hstu/mlperf", ("torch", "torchrec", "fbgemm_gpu"), ()),
        ("dlrm_hstu/ops", ("dlrm_hstu.modules", "dlrm_hstu.model", "dlrm_hstu.training"), ()),
        ("dlrm_hstu/modules", ("dlrm_hstu.model", "dlrm_hstu.training"), ()),
    ],
)
def test_imports_point_one_way(room, forbidden, allowed):
    def within(name, roots):
        return any(name == root or name.startswith(root + ".") for root in roots)

    for path in (ROOT / room).rglob("*.py"):
        bad = {name for name in imported_modules(path) if within(name, forbidden) and not within(name, allowed)}
        assert not bad, f"{path} imports {', '.join(sorted(bad))}"


def test_mlperf_loads_no_torch():
    result = python("import dlrm_hstu.mlperf.log, dlrm_hstu.mlperf.rules, sys; sys.exit('torch' in sys.modules)")
    assert result.returncode == 0, result.stderr
