#!/usr/bin/env bash
# Makes the environment in .venv from requirements/*.lock, every download checked against its hash. Run by `make setup`.
# PYTHON=/path/to/python3.12 names the interpreter; otherwise the first 3.12 that runs.
# INSTALLER=uv|pip chooses; otherwise uv if it is installed, else pip.
set -euo pipefail
cd "$(dirname "$0")/.."

LOG=.venv/setup.log
NEEDED_GB=6

fail() {
    echo "error: $*" >&2
    exit 1
}

is_usable() {
    "$1" -c 'import sys, venv; raise SystemExit(sys.version_info[:2] != (3, 12))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_usable "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.12 that runs (megatron-bridge 0.6.2 takes no other)"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.12 that runs was found (megatron-bridge 0.6.2 takes no other); install it, or name it:" \
        "make setup PYTHON=/path/to/python3.12"
}

find_installer() {
    case "${INSTALLER:-}" in
    "") command -v uv >/dev/null && echo uv || echo pip ;;
    uv) command -v uv >/dev/null || fail "INSTALLER=uv: no uv on the PATH; install it, or use INSTALLER=pip"; echo uv ;;
    pip) echo pip ;;
    *) fail "INSTALLER=$INSTALLER is neither uv nor pip" ;;
    esac
}

# What an earlier set-up left in .venv counts as room.
refuse_a_full_disk() {
    local free_kb used_kb
    free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
    used_kb=$([ ! -d .venv ] || du -sk .venv | cut -f1)
    [ "$((free_kb + ${used_kb:-0}))" -ge "$((NEEDED_GB * 1000000))" ] ||
        fail "$((free_kb / 1000000)) GB are free in $PWD, and about $NEEDED_GB are needed (.venv; downloads take 3 more in" \
            "${TMPDIR:-/tmp} until they are installed); make room, and run make setup again"
}

# Takes the arguments of `pip install`. Never looks for dependencies: the locks have all of them. No build fetches a
# backend of its own, and no bytecode is made for tens of thousands of files of which few are ever imported.
install_with_uv() {
    VIRTUAL_ENV="$PWD/.venv" uv pip install --no-deps --no-build-isolation "$@"
}
install_with_pip() {
    .venv/bin/python -m pip --disable-pip-version-check install --no-deps --no-build-isolation --no-compile "$@"
}
install_all_with_uv() {
    install_with_uv --require-hashes -r requirements/run.lock
}
# pip unpacks on one core: torch with the libraries of GPUs, which is most of it, goes beside everything else.
install_all_with_pip() {
    local pid status=0
    awk '/^[^ #]/ {is_of_torch = /^(torch|triton|nvidia-|cuda-)/} {print > (".venv/" (is_of_torch ? "torch" : "others") ".lock")}' \
        requirements/run.lock
    install_with_pip --require-hashes -r .venv/torch.lock >.venv/torch.log 2>&1 &
    pid=$!
    install_with_pip --require-hashes -r .venv/others.lock || status=$?
    # The end of the log is what failed.
    wait "$pid" || { status=$?; cat .venv/torch.log; }
    return "$status"
}

# install WHAT COMMAND...: runs what installs, with its output in the log, and prints its progress.
install() {
    local what=$1 began=$SECONDS said=$SECONDS pause=15 pid
    shift
    [ ! -t 1 ] || pause=1
    # A process group of its own, all of which ends with the set-up: jobs of a script ignore Ctrl-C.
    set -m
    (set +m && "$@") </dev/null >>"$LOG" 2>&1 &
    pid=$!
    set +m
    trap 'kill -- "-$pid"; exit 130' INT
    trap 'kill -- "-$pid"; exit 143' TERM HUP
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - said)) -ge "$pause" ]; then
            said=$SECONDS
            say_progress "$what" "$began"
        fi
    done
    if ! wait "$pid"; then
        trap - INT TERM HUP
        [ ! -t 1 ] || echo
        tail -n 20 "$LOG" >&2
        fail "$what could not be installed; all that was tried is in $LOG. Run make setup again when it is solved"
    fi
    trap - INT TERM HUP
    say_progress "$what" "$began"
    [ ! -t 1 ] || echo
}

say_progress() {
    local packages line doing
    doing=$(tail -n 1 "$LOG" | cut -c 1-60)
    packages=$(find .venv/lib/python3.12/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
    line="setup: $1, $packages of about $total packages, $(du -sm .venv | cut -f1) MB, $((SECONDS - $2)) s: $doing"
    if [ -t 1 ]; then printf '\r\033[K%s' "$line"; else echo "$line"; fi
}

python=$(find_python)
installer=$(find_installer)
total=$(cat requirements/*.lock | grep -c '==')
echo "setup: $("$python" --version) at $python, $installer; about $NEEDED_GB GB into .venv"
refuse_a_full_disk
[ -x .venv/bin/python ] && is_usable .venv/bin/python || "$python" -m venv --clear .venv
: >"$LOG"
install "build backends" "install_with_$installer" --require-hashes -r requirements/build.lock
install "all packages" "install_all_with_$installer"
install "moerl" "install_with_$installer" --editable .
# Leaves the bytecode of what a run imports, even if the environment forbids it: without bytecode every
# process would compile thousands of files again.
WARM_UP='import hydra, matplotlib.pyplot, mpl_toolkits.mplot3d, numba, pandas, pytest, reasoning_gym, tensorboard
import moerl.orchestration.commands, moerl.offline.verify, moerl.ranks.start, moerl.rollout.factory
from moerl.trainer.bridge import import_bridge
import_bridge()'
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -W ignore -c "$WARM_UP" >>"$LOG" 2>&1 ||
    { tail -n 20 "$LOG" >&2; fail "megatron-bridge does not import; remove .venv and run make setup again"; }
touch .venv/.ready
echo "setup: done in $SECONDS s"
