"""Are the installed packages a set that works together? Asked before anything heavy is imported; needs the standard library only."""

import importlib
import importlib.metadata
import logging
import re

from data.checks import require

# torch minor -> (fbgemm minor, torchrec minor), from the two projects' compatibility tables. 2.13 is locked in requirements/.
GENERATIONS = {"2.11": ("1.6", "1.6"), "2.12": ("1.7", "1.7"), "2.13": ("1.8", "1.8")}
FBGEMM_BUILDS = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-rocm")  # all three install the one package fbgemm_gpu
REQUIRED = (
    "torch",
    "torchrec",
    "tensordict",
    "torchmetrics",
    "pyre-extensions",
    "tqdm",
    "numpy",
    "pyarrow",
    "gin-config",
    "mlperf-logging",
)
FIX = "install a lock from requirements/ with pip install --no-deps -r"


def check_packages() -> None:
    """Raise ValueError, one line, unless the packages that training needs are installed and of one generation.

    Reads their metadata and imports none. triton, matplotlib and tensorboard are not asked for: training on a CPU does without them.
    """
    check_versions({name: installed_version(name) for name in (*REQUIRED, *FBGEMM_BUILDS)})


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(versions: dict[str, str | None]) -> None:
    """Raise ValueError, one line, unless `versions` (by distribution, None for absent) has what training needs, of one generation."""
    missing = [name for name in REQUIRED if versions.get(name) is None]
    require(not missing, f"missing packages: {', '.join(missing)}; {FIX}")
    builds = [name for name in FBGEMM_BUILDS if versions.get(name) is not None]
    generations = "; ".join(f"torch {torch} with fbgemm {f} and torchrec {r}" for torch, (f, r) in GENERATIONS.items())
    found = ", ".join(f"{name} {versions[name]}" for name in ("torch", *builds, "torchrec"))
    require(bool(builds), f"found {found}, and no fbgemm: one of {', '.join(FBGEMM_BUILDS)} is needed ({generations}); {FIX}")
    require(len(builds) == 1, f"found {found}: {' and '.join(builds)} overwrite each other's files; make a new .venv and {FIX}")
    pair = GENERATIONS.get(_minor(versions["torch"]))
    fits = pair == (_minor(versions[builds[0]]), _minor(versions["torchrec"]))
    require(fits, f"found {found}, which do not fit together; needed: {generations}; {FIX}")


def check_operators() -> None:
    """Raise ValueError, one line, unless torch and fbgemm_gpu import and fbgemm's jagged operators are there."""
    torch = _import("torch", "a CUDA build also needs requirements/cuda-libs.txt")
    fbgemm_version = next(filter(None, map(installed_version, FBGEMM_BUILDS)), "of unknown version")
    needed = f"needed: the fbgemm {GENERATIONS.get(_minor(torch.__version__), ('?',))[0]} that was built for torch {torch.__version__}"
    _import("fbgemm_gpu", f"found fbgemm {fbgemm_version} with torch {torch.__version__}; {needed}")
    registered = hasattr(torch.ops.fbgemm, "jagged_2d_to_dense")
    require(registered, f"fbgemm {fbgemm_version} registers no jagged_2d_to_dense with torch {torch.__version__}; {needed}; {FIX}")


def _import(module: str, need: str):
    """The module, or ValueError on whatever its import raises: a broken shared library shows as OSError, ImportError or RuntimeError."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)  # fbgemm_gpu logs the loader's message over many lines before it raises
    try:
        return importlib.import_module(module)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{module} does not load ({type(error).__name__}: {reason}); {need}; {FIX}") from None
    finally:
        logging.disable(previous)


def _minor(version: str) -> str:
    """'2.13' of '2.13.0+cpu'."""
    match = re.match(r"\d+\.\d+", version)
    return match.group() if match else version
