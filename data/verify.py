"""Checks a prepared folder: `python -m data.verify DIR [--quick]`. Names the first bad file, exit status 1."""

import sys
from pathlib import Path

from data import index, store
from data.arrays import check_hashes, open_arrays, read_manifest
from data.checks import require
from data.cli import Parser, run_command


def verify(path: str | Path, quick: bool = False) -> int:
    """Check a store and its indexes: every file's presence, size and type, and unless `quick` its SHA-256; the number of files.

    Raises ValueError that names the first bad file.
    """
    folder = Path(path)
    fingerprint = store.EventStore.open(folder).fingerprint
    parts = [(folder, store.KIND), *((part, index.KIND) for part in sorted((folder / "index").glob("[!.]*")))]
    files = 0
    for part, kind in parts:
        manifest = read_manifest(part, kind)
        owner = manifest.get("store", fingerprint)
        require(owner == fingerprint, f"{part}: made from another store; delete it, it is then built again")
        open_arrays(part, manifest)
        if not quick:
            check_hashes(part, manifest)
        files += len(manifest["files"])
    return files


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status: 0, 1 after one line that names a bad file, 2 on wrong usage."""
    parser = Parser(prog="python -m data.verify", description="Check a prepared folder against its manifests.")
    parser.add_argument("store", type=Path, help="folder of the store")
    parser.add_argument("--quick", action="store_true", help="presence, size and type only; do not read the files")
    options = parser.parse_args(arguments)

    def command() -> None:
        print(f"{options.store}: ok, {verify(options.store, options.quick)} files")

    return run_command(command, failure_status=1)


if __name__ == "__main__":
    sys.exit(main())
