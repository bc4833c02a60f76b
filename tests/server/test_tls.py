"""--ssl-keyfile and --ssl-certfile, with a certificate that is made here."""

import shutil
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from reference.server.args import check_tls
from tests.server.live import events, second

COMPLETION = dict(prompt="def f(", max_tokens=4, temperature=0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{name: (keyfile, certfile)} of two certificates for 127.0.0.1."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("NOT RUN: openssl is not installed")
    folder, files = tmp_path_factory.mktemp("tls"), {}
    for name in ("ours", "other"):
        key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
        command = [tool, "req", "-x509", "-newkey", "ec", "-pkeyopt",
                   "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
                   "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key,
                   "-out", certificate]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        files[name] = str(key), str(certificate)
    return files


def trusting(certificate: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


@pytest.fixture
def url(live, made):
    key, certificate = made["ours"]
    server = second(live, ssl_keyfile=key, ssl_certfile=certificate)
    yield server.url.replace("http:", "https:")
    server.stop()


def test_answers_over_tls_are_the_same(live, url, made):
    with httpx.Client(base_url=url, verify=trusting(made["ours"][1]), timeout=60) as client:
        over_tls = client.post("/v1/completions", json=COMPLETION).json()
        plain = live.post("/v1/completions", COMPLETION).json()
        assert over_tls["choices"] == plain["choices"]
        streamed = client.post("/v1/completions", json=COMPLETION | dict(stream=True))
        text = "".join(event["choices"][0]["text"] for event in events(streamed.text))
        assert text == plain["choices"][0]["text"]
        session = client.get("/health").extensions["network_stream"].get_extra_info("ssl_object")
        assert session.version() in ("TLSv1.2", "TLSv1.3")


def test_who_does_not_trust_it_or_speaks_plain_http_gets_nothing(url, made):
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/health", verify=trusting(made["other"][1]))
    with pytest.raises(httpx.TransportError):
        httpx.post(url.replace("https:", "http:") + "/v1/completions", json=COMPLETION, timeout=30)
    assert httpx.get(f"{url}/health", verify=trusting(made["ours"][1])).status_code == 200


def test_files_that_do_not_fit_are_one_line_before_the_model_is_read(live, made, tmp_path):
    (key, certificate), (other_key, _) = made["ours"], made["other"]
    both, locked = tmp_path / "both.pem", tmp_path / "locked.key"
    both.write_text(Path(key).read_text() + Path(certificate).read_text())
    command = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    check_tls(None, None)
    check_tls(key, certificate)
    check_tls(None, str(both))
    wrong = [
        (key, None),
        (None, certificate),
        (other_key, certificate),
        (certificate, key),
        (key, str(tmp_path / "none.pem")),
        (str(tmp_path), certificate),
        (str(locked), certificate),
    ]
    for keyfile, certfile in wrong:
        with pytest.raises(ValueError, match=r"^ssl_certfile") as error:
            replace(live.service.args, ssl_keyfile=keyfile, ssl_certfile=certfile)
        assert "\n" not in str(error.value) and "accepted: " in str(error.value)
