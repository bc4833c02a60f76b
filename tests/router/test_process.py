"""python -m reference.router: it starts, says where it is, and ends when it is told to."""

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.server.paths import REPOSITORY


@pytest.mark.sample(1, of="processes of the router")
def test_it_starts_and_ends():
    dead = "http://127.0.0.1:9"
    command = [sys.executable, "-m", "reference.router", "--replicas", dead, "--port", "0"]
    started = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        line = started.stderr.readline()
        url = re.fullmatch(r"routing to 1 replica at (http://127.0.0.1:\d+)\n", line)[1]
        end = time.monotonic() + 60
        while True:
            try:
                assert httpx.get(f"{url}/health").status_code == 200
                break
            except httpx.TransportError:  # the socket is there, and no process listens yet
                assert time.monotonic() < end
                time.sleep(0.02)
        assert httpx.get(f"{url}/ready").status_code == 503
        assert "router_replica_ready" in httpx.get(f"{url}/metrics").text
        os.kill(started.pid, signal.SIGTERM)
        assert started.wait(60) == 0 and started.stderr.read() == ""
    finally:
        started.kill()
        started.wait()
        started.stderr.close()


@pytest.mark.sample(1, of="processes of the router")
def test_a_port_that_is_taken_is_one_line():
    from reference.server.process import new_socket

    with new_socket("127.0.0.1", 0, 1.0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "reference.router", "--replicas", "http://a"]
        done = subprocess.run(
            [*command, "--port", port], cwd=REPOSITORY, capture_output=True, text=True
        )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"reference.router: --host 127.0.0.1 --port {port}: ")
    assert not done.stdout
