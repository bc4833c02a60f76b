"""The process: its flags, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from reference.server import run
from tests.server.live import events, server_args
from tests.server.paths import MODEL, REPOSITORY
from tests.server.soak import processes_of

LONG = dict(prompt="def f(", max_tokens=300, temperature=0, ignore_eos=True, stream=True)


@pytest.fixture
def process(request):
    """(process, url) of a server that was just started. A test's parameter: --shutdown-timeout."""
    command = [sys.executable, "-m", "reference.server", "--model", MODEL, "--port", "0",
               "--kv_cache_memory_bytes=20000000", "--max-model-len", "512", "--shutdown-timeout",
               getattr(request, "param", "60"),
               "--disable-log-requests"]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, cwd=REPOSITORY, env=env, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in started.stderr:
        lines.append(line)
        if found := re.search(r"http://\S+", line):
            break
    assert found, lines
    assert lines[0].startswith("--disable-log-requests: accepted without effect")
    threading.Thread(target=started.stderr.read, daemon=True).start()
    url = found[0]
    while True:
        try:
            httpx.get(f"{url}/health", timeout=60)
            break
        except httpx.TransportError:
            time.sleep(0.05)
    yield started, url
    started.kill()
    started.wait()


def ask_long(url: str, answers: list, **more) -> None:
    try:
        answers.append(httpx.post(f"{url}/v1/completions", json=LONG | more, timeout=180))
    except httpx.TransportError as error:
        answers.append(error)


def wait_for_running(url: str, count: int) -> None:
    """Return when so many requests run."""
    running, end = 0.0, time.monotonic() + 60
    while running < count:
        assert time.monotonic() < end, f"{running} requests run, not {count}"
        time.sleep(0.02)
        text = httpx.get(f"{url}/metrics", timeout=60).text
        running = float(re.search(r"num_requests_running\{.*\} (\S+)", text)[1])


def wait_for_the_drain(url: str) -> None:
    """Return when a load balancer is told to send no request any more."""
    end = time.monotonic() + 60
    while httpx.get(f"{url}/ready", timeout=60).status_code != 503:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.sample(1, of="ends of the server")
def test_a_signal_lets_answers_end(process):
    server, url = process
    answers, longest = [], dict(max_tokens=500)
    threads = [
        threading.Thread(target=ask_long, args=(url, answers), kwargs=longest) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_for_running(url, 4)
    server.send_signal(signal.SIGTERM)
    # a client that connects now is told, until the last answer has ended
    wait_for_the_drain(url)
    refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    assert not answers
    for thread in threads:
        thread.join()
    for answer in answers:
        chunks = events(answer.text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert server.wait(60) == 0


@pytest.mark.sample(1, of="ends of the server")
def test_a_second_signal_ends_at_once(process):
    server, url = process
    answers = []
    longest = dict(max_tokens=500)
    thread = threading.Thread(target=ask_long, args=(url, answers), kwargs=longest)
    thread.start()
    wait_for_running(url, 1)
    server.send_signal(signal.SIGTERM)
    wait_for_the_drain(url)
    assert server.poll() is None
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 130
    thread.join()
    (answer,) = answers  # it was not waited for
    assert isinstance(answer, httpx.TransportError) or '"length"' not in answer.text


@pytest.mark.sample(1, of="ends of the server")
@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: processes are found in /proc")
def test_a_dead_engine_is_told(process):
    server, url = process
    answers = []
    thread = threading.Thread(target=ask_long, args=(url, answers))
    thread.start()
    wait_for_running(url, 1)
    # The server has started a server of processes, and that the engine's.
    families = map(processes_of, processes_of(server.pid)[1:])
    (engine,) = (family[1] for family in families if len(family) == 2)
    os.kill(engine, signal.SIGKILL)
    thread.join()
    error = events(answers[0].text)[-1]["error"]["message"]
    assert "its process died (signal 9)" in error and "\n" not in error
    for path in ("/health", "/ready"):
        assert httpx.get(url + path, timeout=60).status_code == 503
    refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
    assert refused.status_code == 500 and "died" in refused.json()["error"]["message"]
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


@pytest.mark.sample(1, of="ends of the server")
@pytest.mark.parametrize("process", ["0.2"], indirect=True)
def test_who_takes_too_long_is_told(process):
    server, url = process
    answers = []
    threads = [threading.Thread(target=ask_long, args=(url, answers)) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_for_running(url, 8)
    server.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert server.wait(60) == 0
    begun = [one for one in answers if getattr(one, "status_code", None) == 200]
    told = [events(answer.text)[-1] for answer in begun]
    cut = [chunk["error"]["message"] for chunk in told if "error" in chunk]
    assert cut and all("shutting down" in message for message in cut)


class Broken:
    """A service whose server fails at once. ended: how often its engine was told to end."""

    def __init__(self, monkeypatch):
        self.ended = 0
        self.engine = SimpleNamespace(shutdown=self.end)
        self.models = SimpleNamespace(names=["tiny"], adapters={})
        monkeypatch.setattr(run, "new_service", lambda args: self)
        monkeypatch.setattr(run, "new_server", lambda service: service)
        monkeypatch.setattr(run.gc, "freeze", lambda: None)

    def end(self) -> None:
        self.ended += 1

    async def serve(self, sockets: list) -> None:
        raise RuntimeError("broken")


@pytest.mark.parametrize("certificate, scheme", [(None, "http"), ("some.pem", "https")])
def test_where_it_is_and_that_no_engine_stays(certificate, scheme, monkeypatch, capfd):
    """A server that fails ends its engine, whose processes would stay otherwise."""
    service, args = Broken(monkeypatch), server_args(port=0)
    args.ssl_certfile = certificate
    with pytest.raises(RuntimeError, match="broken"):
        run.serve_forever(args)
    assert service.ended == 1
    assert re.fullmatch(rf"serving tiny at {scheme}://127.0.0.1:\d+\n", capfd.readouterr().err)
