import subprocess
import sys
from pathlib import Path

import pytest

from data import download, index, prepare, verify

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [prepare, verify, index, download])
def test_unknown_flags_are_answered_with_the_nearest(module, capsys):
    known = ["--raw", "a", "--out", "b"] if module is prepare else ["--out", "b"] if module is download else ["a"]
    flag = {prepare: "--memory_gb", verify: "--quik", index: "--min_hist", download: "--dataest"}[module]
    with pytest.raises(SystemExit) as stop:
        module.main([*known, f"{flag}=3"])
    error = capsys.readouterr().err
    nearest = {prepare: "--memory_gib", verify: "--quick", index: "--min_history", download: "--dataset"}[module]
    assert stop.value.code == 2 and error.count("\n") == 1 and f"unknown argument {flag}: did you mean {nearest}?" in error


@pytest.mark.parametrize("module", [prepare, download])
def test_unknown_data_sets_are_answered_with_the_known(module, capsys):
    with pytest.raises(SystemExit) as stop:
        module.main(["--raw", "a", "--out", "b", "--dataset", "nosuch"] if module is prepare else ["--out", "b", "--dataset", "nosuch"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "nosuch" in error and all(name in error for name in ("yambda-50m", "yambda-500m", "yambda-5b"))


def test_from_the_shell(tmp_path):
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)

    golden, out = str(ROOT / "tests/golden/yambda_tiny/raw"), str(tmp_path / "store")
    assert run("data.prepare", "--raw", golden, "--out", out, "--memory_gib", "1").returncode == 0
    assert run("data.verify", out).stdout == f"{out}: ok, 10 files\n"
    bad = run("data.prepare", "--raw", str(tmp_path / "none"), "--out", out)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "Traceback" not in bad.stderr
    helped = run("data.prepare", "--help")
    assert helped.returncode == 0 and "--memory_gib" in helped.stdout


def test_download_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert download.main(["--dataset", "yambda-50m", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "flat/50m/multi_event.parquet" in error and download.REVISION in error and error.count("\n") == 1
    for name in download.raw_files("yambda-50m"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert download.main(["--dataset", "yambda-50m", "--out", str(tmp_path)]) == 0


def test_download_fetches_what_is_missing_at_the_pinned_revision(tmp_path, monkeypatch):
    import types

    calls = []
    hub = types.SimpleNamespace(
        hf_hub_download=lambda *names, **settings: calls.append((*names, settings["revision"], settings["local_dir"]))
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    (tmp_path / "album_item_mapping.parquet").touch()
    download.download("yambda-5b", tmp_path)
    wanted = ["flat/5b/multi_event.parquet", "artist_item_mapping.parquet"]
    assert calls == [("yandex/yambda", name, download.REVISION, tmp_path) for name in wanted]
