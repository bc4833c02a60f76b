#!/bin/sh
# Make .venv from requirements.txt, or say in one line what to do. `make setup` calls it unless .venv/installed, a copy
# of requirements.txt that is written last, says that everything is there. `make peers`, `make clients` and `make book`
# make other folders from other lists, with flags for pip and what to import first.
#     sh lessons/toolbox/setup.sh python3 [FOLDER LIST OLDEST_PYTHON FLAGS MODULES]
cd "$(dirname "$0")/../.." || exit 1
venv=${2:-.venv} list=${3:-requirements.txt} oldest=${4:-3.10} flags=$5 modules=${6:-torch, transformers}
exec 3>&1 # what a command prints on the way; its errors go into $errors

fail() {
    echo "setup: $1" >&2
    exit 1
}

run() { # run "what it is for" command arguments…
    doing=$1
    shift
    errors=$("$@" 2>&1 >&3) && return
    case $errors in
    *"No space left"* | *"Errno 28"*) fail "the disk is full. Make room and run it again; it starts over." ;;
    *onnection* | *"Temporary failure"* | *"timed out"* | *"No matching dist"*)
        fail "a package could not be found or reached. Check the network and run it again." ;;
    esac
    fail "$doing failed: $(echo "$errors" | tail -n 1) (Run it again, or remove $venv first.)"
}

trap 'fail "interrupted. Run it again; it starts over."' INT TERM

# Half-unpacked packages claim to be installed, so what did not finish is started over.
if [ ! -e "$venv/installed" ] || [ ! -x "$venv/bin/python" ]; then
    "$1" -c 'import sys; sys.exit(sys.version_info < tuple(map(int, sys.argv[1].split("."))))' "$oldest" 2>/dev/null ||
        fail "$1 is no Python, or older than $oldest. Choose another one: make setup PYTHON=python3.12"
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$1 has no venv module. On Debian or Ubuntu: apt install python3-venv"
    free_mb=$(df -Pk . | awk 'NR == 2 {print int($4 / 1024)}')
    [ "$free_mb" -ge 3000 ] || fail "$free_mb MB are free here, about 3000 are needed. Make room and run it again."
    echo "setup: creating $venv (about 3 GB, some minutes, once)"
    rm -rf "$venv"
    run "creating $venv" "$1" -m venv "$venv"
fi
rm -f "$venv/installed"

# Without a GPU the CPU build of PyTorch does, which spares gigabytes of CUDA: if its index answers. TORCH_INDEX= forbids it.
if [ "${TORCH_INDEX-ask}" = ask ]; then
    TORCH_INDEX=https://download.pytorch.org/whl/cpu
    answers='import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)'
    [ "$(uname)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1 &&
        "$venv/bin/python" -c "$answers" "$TORCH_INDEX" 2>/dev/null || TORCH_INDEX=
    [ -z "$TORCH_INDEX" ] || echo "setup: no NVIDIA GPU here, so PyTorch's CPU build is taken (TORCH_INDEX= for the other one)"
fi
run "installing $list" "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
    $flags -r "$list" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
run "a first import" "$venv/bin/python" -c "import $modules"
run "finishing" cp "$list" "$venv/installed"
case $venv in
.venv) try="make demo" ;;
.venv-book) try="make book" ;;
.venv-peers) try="make test-all TESTS=tests/test_vllm_peer.py" ;;
*) try="make test-all TESTS=tests/server/test_conversations.py" ;;
esac
echo "setup: done. Try: $try"
