# Sourced by demo.sh and test.sh, in the repository's root: `set_up` makes .venv and installs the lock that fits the machine into it,
# `set_up dev` adds requirements/dev.txt. A stamp in .venv says which lock it holds, so that a second call costs nothing.
#   PYTHON   the interpreter, 3.11 or 3.12; otherwise the first that works of python3.11, python3.12, python3
#   LOCK     cpu, cuda or rocm; otherwise by the GPUs that the machine lists

fail() {
    echo "error: $*" >&2
    exit 2
}

usable() { # python: runs, is of a supported version and can make a virtual environment
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
}

pick_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3.11 python3.12 python3; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON=$PYTHON: must be a Python 3.11 or 3.12 with venv and ensurepip"
    done
    fail "no Python 3.11 or 3.12 with venv and ensurepip among python3.11, python3.12, python3; install one or name it: PYTHON=/path/to/python"
}

pick_lock() {
    if [ -n "${LOCK:-}" ]; then
        [[ $LOCK =~ ^(cpu|cuda|rocm)$ ]] || fail "LOCK=$LOCK: must be cpu, cuda or rocm"
        echo "$LOCK"
    elif [[ $(nvidia-smi -L 2>/dev/null) == *"GPU 0"* ]]; then
        echo cuda
    elif [[ $(rocminfo 2>/dev/null) == *gfx* || $(amd-smi list 2>/dev/null) == *"GPU: 0"* ]]; then
        echo rocm
    else
        echo cpu
    fi
}

fingerprint() { # python file...: one word for the interpreter's version and the files' contents
    local python=$1
    shift
    { "$python" -c 'import sys; print(sys.version_info[:2])' && cat "$@"; } | sha256sum | cut -d' ' -f1
}

install_lock() { # file
    echo "installing $1 into .venv" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r "$1" || fail "pip could not install $1; its message is above"
}

make_venv() { # python
    if [ -e .venv ] && [ ! -e .venv/lock.stamp ]; then # somebody else's: add to it, never delete it
        usable .venv/bin/python || fail ".venv: holds no working Python 3.11 or 3.12 with ensurepip, and was not made by this script; delete it"
        return
    fi
    # A new one whenever the lock changes: fbgemm-gpu and fbgemm-gpu-cpu would overwrite each other's files.
    local python
    python=$("$1" -c 'import os, sys; print(os.path.realpath(sys.executable))')
    echo "making .venv with $python" >&2
    rm -rf .venv
    mkdir .venv
    echo unfinished >.venv/lock.stamp
    "$python" -m venv .venv || fail "$python -m venv .venv failed; its message is above"
}

image_packages() { # python: the folder in which a ROCm image keeps its torch
    "$1" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null ||
        fail "LOCK=rocm: $1 has no torch; run inside a ROCm PyTorch image and set PYTHON to its interpreter (requirements/rocm.txt)"
}

site_packages() {
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

torch_is_cuda_build() {
    .venv/bin/python -c 'import importlib.metadata as m, sys; sys.exit(not any("nvidia" in r for r in m.requires("torch")))'
}

set_up() {
    local python lock stamp image=""
    python=$(pick_python)
    lock=$(pick_lock)
    stamp="$lock $(fingerprint "$python" requirements/common.txt requirements/cuda-libs.txt "requirements/$lock.txt")"
    if [ "$(cat .venv/lock.stamp 2>/dev/null)" != "$stamp" ]; then
        [ "$lock" != rocm ] || image=$(image_packages "$python")
        make_venv "$python"
        [ -z "$image" ] || echo "$image" >"$(site_packages)/rocm_image.pth" # found after .venv's own packages
        install_lock "requirements/$lock.txt"
        if [ "$lock" = cpu ] && torch_is_cuda_build; then
            echo "this torch is a CUDA build and needs its libraries even here; README.md tells how to get PyTorch's small CPU wheel" >&2
            install_lock requirements/cuda-libs.txt
        fi
        echo "$stamp" >.venv/lock.stamp
    fi
    if [ "${1:-}" = dev ]; then
        stamp=$(fingerprint .venv/bin/python requirements/dev.txt)
        if [ "$(cat .venv/dev.stamp 2>/dev/null)" != "$stamp" ]; then
            install_lock requirements/dev.txt
            echo "$stamp" >.venv/dev.stamp
        fi
    fi
}
