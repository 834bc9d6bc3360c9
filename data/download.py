"""Raw Yambda files from their public home: `python -m data.download --dataset yambda-5b --out DIR`."""

import sys
from pathlib import Path

from data.checks import require
from data.cli import Parser, run_command
from data.schema import DATASETS, EVENTS_FILE

REPOSITORY = "yandex/yambda"  # a Hugging Face data set
REVISION = "dd6f3a19eef5866e346c3270e098baa641a44948"


def raw_files(dataset: str) -> list[str]:
    """The files that preparing a data set needs, by their paths in the repository."""
    require(dataset in DATASETS, f"dataset={dataset!r}: must be one of {', '.join(DATASETS)}")
    return [f"flat/{DATASETS[dataset]}/{EVENTS_FILE}", "artist_item_mapping.parquet", "album_item_mapping.parquet"]


def download(dataset: str, out: Path) -> None:
    """Fetch the files that `out` lacks, at the pinned revision. Without huggingface_hub: ValueError with what to fetch by hand."""
    missing = [name for name in raw_files(dataset) if not (out / name).is_file()]
    if not missing:
        return
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        where = f"https://huggingface.co/datasets/{REPOSITORY}/tree/{REVISION}"
        raise ValueError(f"{out}: lacks {', '.join(missing)}; pip install huggingface_hub, or fetch them from {where}") from None
    for name in missing:
        hf_hub_download(REPOSITORY, name, repo_type="dataset", revision=REVISION, local_dir=out)


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status: 0, or 2 after one line about what to fix."""
    parser = Parser(prog="python -m data.download", description="Fetch the raw files that data.prepare needs.")
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="yambda-5b", help="which data set")
    parser.add_argument("--out", required=True, type=Path, help="folder for the files; give it to data.prepare as --raw")
    options = parser.parse_args(arguments)

    def command() -> None:
        download(options.dataset, options.out)
        print(f"{options.out}: complete; next: python -m data.prepare --raw {options.out} --out STORE --dataset {options.dataset}")

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
