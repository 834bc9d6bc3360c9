#!/usr/bin/env bash
# Lint, then every test that needs no GPU; sets the machine up first. Arguments go to pytest: bash scripts/test.sh -k attention
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

set_up dev
.venv/bin/python -m ruff check
.venv/bin/python -m ruff format --check
.venv/bin/python -m pytest -m "not gpu" "$@"
