"""Folders of .npy arrays that describe themselves: written aside and renamed, opened memory-mapped, checked against a manifest."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from data.checks import require

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


def lengths_to_offsets(lengths: np.ndarray) -> np.ndarray:
    """Running sums with a leading 0: int64 [n + 1], whatever the integer type of `lengths` [n]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    return offsets


def ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """begin[0], ..., end[0] - 1, begin[1], ..., end[1] - 1 and so on: int64. No range may be of negative length."""
    offsets = lengths_to_offsets(end - begin)
    return np.arange(offsets[-1], dtype=np.int64) + np.repeat(begin - offsets[:-1], end - begin)


class ColumnWriter:
    """A .npy file of `length` values that is appended to; `close` fails unless all of them came."""

    def __init__(self, path: Path, dtype: np.dtype, length: int):
        self.dtype, self.missing, self._file = np.dtype(dtype), length, open(path, "wb")
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.missing -= len(values)

    def close(self) -> None:
        self._file.close()
        assert self.missing == 0, f"{self._file.name}: {self.missing} values missing"


@contextmanager
def staged_folder(target: Path, replace: bool) -> Iterator[Path]:
    """A new folder beside `target` that becomes `target` when the block ends well, and vanishes when it does not.

    Where `target` is there already: `replace` swaps it out, otherwise it stays as it is and the new one is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    stage.mkdir()
    try:
        yield stage
        if replace and target.exists():
            old = stage.with_suffix(".old")
            target.rename(old)
            stage.rename(target)
            shutil.rmtree(old)
        elif not target.exists():
            try:
                stage.rename(target)
            except OSError:
                if not target.exists():  # another process may have been first: its folder is as good
                    raise
        _sync(target.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_manifest(folder: Path, kind: str, facts: dict) -> None:
    """Describe every .npy file of `folder`, add `facts`, and force all of it to disk."""
    files = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode="r")
        described = {"dtype": array.dtype.str, "shape": list(array.shape), "bytes": path.stat().st_size}
        files[path.name] = described | {"sha256": file_hash(path)}
        _sync(path)
    text = json.dumps({"kind": kind, "version": FORMAT_VERSION, "files": files} | facts, indent=2) + "\n"
    (folder / MANIFEST).write_text(text)
    _sync(folder / MANIFEST)
    _sync(folder)


def read_manifest(folder: Path, kind: str) -> dict:
    """The manifest of a folder. Raises ValueError where there is none or it is of another kind or version."""
    path = folder / MANIFEST
    require(path.is_file(), f"{path}: no such file, so {folder} is no {kind}; make one with python -m data.prepare")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); prepare the data again") from None
    require(isinstance(manifest, dict) and manifest.get("kind") == kind, f"{path}: not the manifest of a {kind}")
    version = manifest.get("version")
    require(version == FORMAT_VERSION, f"{path}: format version {version}, expected {FORMAT_VERSION}; prepare the data again")
    return manifest


def open_arrays(folder: Path, manifest: dict) -> dict[str, np.ndarray]:
    """Every array of a folder by its file's stem, memory-mapped, read-only.

    Raises ValueError that names the first file whose presence, size, dtype or shape is not the manifest's.
    """
    arrays = {}
    for name, expected in manifest["files"].items():
        path = folder / name
        require(path.is_file(), f"{path}: missing, expected {expected['bytes']} bytes; restore it or prepare the data again")
        found = path.stat().st_size
        require(
            found == expected["bytes"],
            f"{path}: {found} bytes, expected {expected['bytes']}; the copy is incomplete or damaged: copy it again",
        )
        try:
            array = np.load(path, mmap_mode="r" if 0 not in expected["shape"] else None)
        except ValueError as error:
            raise ValueError(f"{path}: damaged header ({error}); copy it again") from None
        described, wanted = (array.dtype.str, list(array.shape)), (expected["dtype"], expected["shape"])
        require(described == wanted, f"{path}: dtype and shape {described}, expected {wanted}; copy it again")
        arrays[path.stem] = array
    return arrays


def check_hashes(folder: Path, manifest: dict) -> None:
    """Raise ValueError that names the first file whose SHA-256 is not the manifest's."""
    for name, expected in manifest["files"].items():
        found = file_hash(folder / name)
        wanted = expected["sha256"]
        require(found == wanted, f"{folder / name}: sha256 {found[:16]}..., expected {wanted[:16]}...; copy it again")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
