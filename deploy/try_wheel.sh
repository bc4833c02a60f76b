#!/bin/sh
# Try a wheel as a stranger would: an empty environment, a folder elsewhere, and no clone of the repository.
#     sh deploy/try_wheel.sh build/wheel/inference_ladder-0.1.0-py3-none-any.whl [PYTHON]
# The constraints of requirements.txt make it the versions that the course was tested with.
set -eu
wheel=$(realpath "$1")
constraints=$(realpath "$(dirname "$0")/../requirements.txt")
folder=$(mktemp -d)
server=
clean() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    rm -rf "$folder"
}
trap clean EXIT
trap 'exit 130' INT TERM
say() { echo "try_wheel: $1"; }
cd "$folder"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

say "installing into an empty environment"
"${2:-python3}" -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check -c "$constraints" "$wheel"
ladder=$folder/venv/bin/inference-ladder
"$ladder" --version

say "doctor"
"$ladder" doctor
say "generate"
"$ladder" generate "def quicksort(" --max-tokens 8
say "demo, with two requests"
"$ladder" demo --requests 2 --out demo >demo.txt 2>&1 || { cat demo.txt; exit 1; }
if grep -B 3 -A 20 Traceback demo.txt; then exit 1; fi # a peer that lacks something, which is no error of the course
test -s demo/ladder.json && test -s demo/ladder.svg

say "a folder of one's own: an exercise before and after it is solved"
if "$ladder" check 1.1 2>refused.txt; then exit 1; fi
grep -q "no folder of yours" refused.txt
"$ladder" start mine
cd mine
if "$ladder" check 1.1; then exit 1; fi # a stub is no pass
cp solutions/l01_roofline.py exercises/l01_roofline.py
"$ladder" check 1.1
(cd lessons && "$ladder" progress) >progress.txt
grep -q "1 of" progress.txt
cd ..

say "profile"
"$ladder" profile 01 --out profile >profile.txt || { cat profile.txt; exit 1; }

say "serve one request"
port=$(venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$ladder" serve models/tiny --port "$port" >server.txt 2>&1 &
server=$!
venv/bin/python - "$port" <<'ASK'
import sys, time

import httpx

url = f"http://127.0.0.1:{sys.argv[1]}"
for _ in range(240):
    try:
        if httpx.get(f"{url}/health").status_code == 200:
            break
    except httpx.TransportError:
        pass
    time.sleep(0.5)
asked = {"model": "models/tiny", "prompt": "import", "max_tokens": 4, "temperature": 0}
answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
print(answer.status_code, answer.json()["choices"][0]["text"])
ASK
kill "$server"
wait "$server" || { cat server.txt; exit 1; }
server=
say "it works"
