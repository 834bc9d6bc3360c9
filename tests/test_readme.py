"""The README's commands work: what can run in short form runs, of the rest every program, flag and file is there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = {"--users": "30", "--days": "6"}
SHORT_RUN = [
    "NUM_TRAIN_TS = 1",
    "NUM_TRAIN_BATCHES = 1",
    "NUM_EVAL_BATCHES = 1",
    "BATCH_SIZE = 16",
    "NUM_WORKERS = 0",
    "AUC_THRESHOLD = 0.0",
]


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def assert_works(arguments: list[str], **environment: str) -> str:
    result = run(arguments, **environment)
    assert result.returncode == 0, f"{shlex.join(arguments)}\n{result.stdout}{result.stderr}"
    return result.stdout


def assert_flags_known(module: list[str], arguments: list[str]) -> None:
    help_text = assert_works([sys.executable, *module, "--help"])
    for flag in filter(lambda argument: argument.startswith("--"), arguments):
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", help_text), f"{' '.join(module)} has no {flag}"


def data_tool(module: str, arguments: list[str], folder: Path) -> None:
    """A data command, on folders under `folder` in place of those it names."""
    assert_flags_known(["-m", module], arguments)
    small = [SMALL.get(before, word) for before, word in zip(["", *arguments], arguments, strict=False)]
    moved = [word.replace("data/", f"{folder}/", 1) if word.startswith("data/") else word for word in small]
    source = next((Path(word) for before, word in zip(moved, moved[1:], strict=False) if before == "--raw"), Path(moved[0]))
    if module == "data.synthetic" or source.exists():
        assert_works([sys.executable, "-m", module, *moved])


def train(arguments: list[str], environment: dict[str, str], folder: Path) -> None:
    """Its configuration resolves; where its data is there, a step and an evaluation on top."""
    resolved = assert_works([sys.executable, "train.py", *arguments, "--print_config"], **environment)
    assert "ModelConfig.table_dim" in resolved
    store = folder / Path(environment.get("DLRM_DATA_PATH", "none")).name
    if store.exists():
        extra = [word for setting in (*SHORT_RUN, f"TrainConfig.results_dir = '{folder}'") for word in ("--gin", setting)]
        assert "holdout AUC" in assert_works([sys.executable, "train.py", *arguments, *extra], DLRM_DATA_PATH=str(store))


def walk(command: str, folder: Path) -> str:
    """Try one command; returns what kind it was. A command of no known kind is an error: teach this function."""
    words = shlex.split(command)
    environment = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    match words:
        case ["bash", script, *_] if script.startswith("scripts/"):
            assert_works(["bash", "-n", script])
        case ["python", "-m", "mlperf_logging.compliance_checker", *arguments]:
            assert_flags_known(["-m", "mlperf_logging.compliance_checker"], arguments)
        case ["python", "-m", module, *arguments] if module.startswith("data."):
            data_tool(module, arguments, folder)
        case ["python", "train.py", *arguments] | ["torchrun", "--nproc_per_node=8", "train.py", *arguments]:
            train(arguments, environment, folder)
        case ["docker", "build", *_]:
            assert (ROOT / "Dockerfile").is_file()
        case _:
            raise AssertionError(f"README.md: {command!r} is of no kind that this test knows")
    return words[0] if words[0] != "python" else next(word for word in words[1:] if word != "-m")


def test_every_command_works(tmp_path):
    kinds = {walk(command, tmp_path) for command in commands()}
    assert {"bash", "train.py", "torchrun", "data.synthetic", "data.prepare", "data.verify"} <= kinds
    assert (tmp_path / "store_synthetic" / "manifest.json").is_file()
    assert (tmp_path / "demo" / "metrics.jsonl").is_file()


@pytest.mark.parametrize(
    "command", ["python -m data.prepare --row x", "python train.py --gin_file configs/nope.gin", "bash scripts/nope.sh", "make everything"]
)
def test_walk_sees_a_command_that_does_not_work(command, tmp_path):
    with pytest.raises(AssertionError):
        walk(command, tmp_path)


def test_files_that_the_readme_names_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), f"README.md links {link}, which is not there"


def test_readme_and_demo_name_the_same_files():
    demo = (ROOT / "scripts" / "demo.sh").read_text()
    listed = re.findall(r'^    "([\w.]+) ', demo, flags=re.MULTILINE)
    table = README.partition("leaves in `runs/demo/`:")[2].partition("\n\nPyPI")[0]
    assert sorted(listed) == sorted(name.rstrip("/") for name in re.findall(r"`([\w.]+/?)`(?=[ ,])", table))


def test_dockerfile_names_files_that_exist():
    text = (ROOT / "Dockerfile").read_text()
    assert " --no-deps -r requirements/cuda.txt" in text
    for path in re.findall(r"(?:requirements|configs)/[\w.]+|train\.py", text):
        assert (ROOT / path).is_file(), path
    assert text.index("USER trainer") < text.index("ENTRYPOINT")
