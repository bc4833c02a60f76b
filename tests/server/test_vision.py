"""Pictures through the server: real clients' requests, and what strangers may send."""

import base64
import io
import socket
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from random import Random
from typing import ClassVar

import pytest
from PIL import Image

from models.vision_pictures import draw
from reference.engine.async_engine import AsyncEngineArgs
from reference.engine.sampling_params import SamplingParams
from reference.server.args import ServerArgs
from reference.server.flags import parse, read_args
from tests.engine_cases import assert_clean
from tests.server.live import Live, ask, new_service
from tests.server.paths import MODEL
from tests.server.test_clients import needs

SEES = f"{MODEL}-vision"
QUESTION = "What is it?"
PROMPT = f"# <image>\n# {QUESTION}\n"
COLOURS = ["red", "blue"]


def new_server(**more) -> Live:
    """A server over the model that sees, with room for two pictures in a prompt."""
    engine = AsyncEngineArgs(
        SEES, max_model_len=256, kv_cache_memory_bytes=20_000_000, dtype="float32",
        limit_mm_per_prompt={"image": 2},
    )  # fmt: skip
    quiet = dict(uvicorn_log_level="error", disable_uvicorn_access_log=True)
    return Live(new_service(ServerArgs(engine, served_model_name=["eyes"], **quiet, **more)))


@pytest.fixture(scope="module")
def seeing():
    """With the engine in this process, because the tests look into it."""
    server = new_server(disable_frontend_multiprocessing=True)
    yield server
    server.stop()
    server.service.engine.shutdown()


def file_of(picture: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


PICTURE = file_of(draw("red", [4, 7], Random(1)))
OTHER = file_of(draw("blue", [2], Random(1)))


def messages(*urls, text: str = QUESTION) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


def said_offline(server: Live, *data: bytes) -> str:
    """The engine's own answer to these pictures, without HTTP."""
    prompt = PROMPT.replace("<image>", "\n# ".join(["<image>"] * len(data)))
    params = SamplingParams(temperature=0, max_tokens=8)
    ids = server.tokens_of({"prompt": prompt, "multi_modal_data": {"image": [*data]}}, params)[0]
    return server.service.tokens.decode([id for id in ids if id])


@pytest.mark.sample(1, of="clients that ask about a picture")
@needs("openai")
def test_the_openai_client_asks_about_a_picture(seeing):
    from openai import OpenAI

    want = said_offline(seeing, PICTURE)
    assert want != said_offline(seeing, OTHER), "a model that sees says of two pictures two things"
    with OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        wishes = dict(model="eyes", temperature=0, max_tokens=8)
        url = data_url(PICTURE)
        whole = client.chat.completions.create(messages=messages(url), **wishes)
        assert whole.choices[0].message.content == want
        # 1 + "# " + 16 rows + the question; the second time all whole blocks of it are known
        again = client.chat.completions.create(messages=messages(url), **wishes)
        assert again.usage.prompt_tokens_details.cached_tokens == 16
        assert again.usage.prompt_tokens == whole.usage.prompt_tokens == 28
        assert again.choices[0].message.content == want
        both = messages(url, data_url(OTHER))
        two = client.chat.completions.create(messages=both, **wishes)
        assert two.choices[0].message.content == said_offline(seeing, PICTURE, OTHER)
        stream = client.chat.completions.create(messages=messages(url), stream=True, **wishes)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == want
        part = {"type": "input_image", "image_url": url, "detail": "auto"}
        content = [{"type": "input_text", "text": QUESTION}, part]
        answer = client.responses.create(
            model="eyes", input=[{"role": "user", "content": content}], temperature=0,
            max_output_tokens=16,
        )  # fmt: skip
        assert answer.output_text.startswith(want)
    assert_clean(seeing.engine)


@pytest.mark.sample(1, of="clients that ask about a picture")
@needs("anthropic")
def test_the_anthropic_client_asks_about_a_picture(seeing):
    from anthropic import Anthropic

    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = base64.b64encode(PICTURE).decode()
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    wishes = dict(model="eyes", messages=[{"role": "user", "content": content}])
    with Anthropic(base_url=seeing.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(**wishes, max_tokens=8, extra_body={"temperature": 0})
        assert answer.content[0].text == said_offline(seeing, PICTURE)
        assert client.messages.count_tokens(**wishes).input_tokens == 28


@pytest.mark.sample(1, of="files of pictures")
@pytest.mark.parametrize("kind", ["JPEG", "GIF", "WEBP", "BMP"])
def test_files_of_every_kind_are_read(kind, seeing):
    data = file_of(draw("red", [4, 7], Random(1)), kind)
    url = data_url(data, f"image/{kind.lower()}")
    body = dict(messages=messages(url), temperature=0, max_tokens=8)
    answer = seeing.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == said_offline(seeing, data)


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes that says it is this large."""
    head = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\0\0\0"
    rows = b"IDAT" + zlib.compress(b"\0" * 100_000)
    chunks = [
        (len(one) - 4).to_bytes(4, "big") + one + zlib.crc32(one).to_bytes(4, "big")
        for one in (head, rows, b"IEND")
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


TIFF = file_of(Image.new("RGB", (8, 8)), "TIFF")
HOSTILE = {
    # Their number is refused, and not the first of them: it was not decoded.
    "too many": (messages(*[data_url(b"hello")] * 3), "got 3 pictures; accepted: at most 2"),
    "not an image": (messages(data_url(b"hello")), "bytes that are no picture"),
    "nothing": (messages(data_url(b"")), "bytes that are no picture"),
    "half an image":
        (messages(data_url(PICTURE[: len(PICTURE) // 2])), "bytes that are no picture"),
    "bomb": (messages(data_url(bomb(60_000, 60_000))), "more than Pillow opens; accepted"),
    "larger bomb": (messages(data_url(bomb(2**31 - 1, 2**31 - 1))), "accepted"),
    "smaller bomb": (messages(data_url(bomb(5000, 5000))), "5000 x 5000 pixels; accepted"),
    "a line": (messages(data_url(bomb(100_000, 1))), "100000 x 1 pixels; accepted"),
    "no edge": (messages(data_url(bomb(0, 4))), "accepted"),
    "unsupported": (messages(data_url(TIFF)), "accepted: a whole file of PNG"),
    "a program": (messages(data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n")), "bytes that are no picture"),
    "wrong kind": (messages(data_url(PICTURE, "text/html")), "accepted: data:image/"),
    "no base64": (messages("data:image/png," + "A" * 40), "accepted: data:image/"),
    "truncated base64": (messages(data_url(PICTURE)[:-3]), "accepted: whole base64"),
    "wrong base64": (messages("data:image/png;base64,????"), "accepted: whole base64"),
    "http": (messages("http://example.com/a.png"), "--allowed-media-domains (none)"),
    "file": (messages("file:///etc/passwd"), "--allowed-media-domains (none)"),
    "no address": (messages("\\\\host\\share"), "--allowed-media-domains (none)"),
    "bad port": (messages("http://a:b/"), "--allowed-media-domains (none)"),
    "token in the text":
        (messages(data_url(PICTURE), text="<image>"), "image tokens for 1 pictures"),
    "token alone": ([{"role": "user", "content": "<image>"}], "1 image tokens for 0 pictures"),
}  # fmt: skip


@pytest.mark.sample(6, of="hostile pictures")
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pictures_are_refused_in_one_line(what, seeing):
    sent, line = HOSTILE[what]
    answer = seeing.post("/v1/chat/completions", dict(messages=sent, max_tokens=1))
    assert answer.status_code == 400 and answer.elapsed.total_seconds() < 5
    said = answer.json()["error"]
    assert line in said["message"] and "\n" not in said["message"] and len(said["message"]) <= 600
    assert_clean(seeing.engine)


OTHER_FIELDS = [
    ("detail", {"type": "image_url", "image_url": {"url": data_url(PICTURE), "detail": "high"}}),
    ("url", {"type": "image_url", "image_url": {}}),
    ("url and detail", {"type": "image_url", "image_url": {"uri": "data:"}}),
    ("'text'", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
]


@pytest.mark.sample(1, of="fields of pictures")
@pytest.mark.parametrize(("name", "part"), OTHER_FIELDS)
def test_fields_of_a_picture_are_honoured_or_refused(name, part, seeing):
    body = dict(messages=[{"role": "user", "content": [part]}], max_tokens=1)
    answer = seeing.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


def test_other_apis_refuse_what_they_have_not(seeing):
    file = {"type": "input_image", "file_id": "file-1"}
    body = dict(input=[{"role": "user", "content": [file]}])
    said = seeing.post("/v1/responses", body)
    assert said.status_code == 400 and "file_id" in said.json()["error"]["message"]
    content = [{"type": "image", "source": {"type": "file", "file_id": "a"}}]
    body = dict(messages=[{"role": "user", "content": content}], max_tokens=1)
    said = seeing.post("/v1/messages", body)
    assert said.status_code == 400 and "source" in said.json()["error"]["message"]


def test_a_model_without_eyes_says_so(live):
    body = dict(messages=messages(data_url(PICTURE)), max_tokens=1)
    said = live.post("/v1/chat/completions", body).json()["error"]["message"]
    assert said.endswith("got 'image_url'; accepted: 'text', because this model reads nothing else")


# ---------------------------------------------------------------- addresses


class Files(BaseHTTPRequestHandler):
    """A host of pictures, of this machine."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/a.png")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        data = PICTURE if self.path == "/a.png" else bytes(10 * 2**20)
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def host():
    server = HTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.sample(1, of="ends of the server")
def test_a_picture_reaches_an_engine_in_a_process_of_its_own(seeing):
    server = new_server()
    try:
        body = dict(messages=messages(data_url(PICTURE)), temperature=0, max_tokens=8)
        answer = ask(server.service, "POST", "/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == said_offline(seeing, PICTURE)
    finally:
        server.stop()
        server.service.engine.shutdown()


def ask_about(seeing, url: str, *domains: str):
    body = dict(messages=messages(url), temperature=0, max_tokens=8)
    own = {"allowed_media_domains": list(domains)}
    return ask(seeing.service, "POST", "/v1/chat/completions", own, json=body)


def test_a_host_that_was_allowed_is_asked(seeing, host):
    answer = ask_about(seeing, f"{host}/a.png", "127.0.0.1")
    assert answer.json()["choices"][0]["message"]["content"] == said_offline(seeing, PICTURE)


REFUSED = {
    "not allowed": ("/a.png", ["example.com"], "accepted: a data: URL"),
    "a redirect": ("/away", ["127.0.0.1"], "status 302"),
    "too large": ("/large", ["127.0.0.1"], "got more than 8388608 bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_address_that_is_refused(what, seeing, host):
    path, domains, line = REFUSED[what]
    Files.asked.clear()
    answer = ask_about(seeing, host + path, *domains)
    assert answer.status_code == 400 and line in answer.json()["error"]["message"]
    assert Files.asked == ([] if what == "not allowed" else [path])


@pytest.mark.sample(1, of="private addresses")
@pytest.mark.parametrize(
    "ip", ["127.0.0.1", "10.0.0.8", "169.254.169.254", "::1", "::ffff:10.0.0.1"]
)
def test_a_name_that_leads_to_a_private_address_is_not_asked(ip, seeing, monkeypatch):
    """The operator allowed the name; its owner points it at what only this server reaches."""

    def resolve(host, port, *args, **more):
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (ip, port))]

    from asyncio import BaseEventLoop

    async def resolved(self, *args, **more):
        return resolve(*args, **more)

    monkeypatch.setattr(BaseEventLoop, "getaddrinfo", resolved)
    answer = ask_about(seeing, "http://pictures.example/a.png", "pictures.example")
    assert answer.status_code == 400
    assert "accepted: hosts with public addresses" in answer.json()["error"]["message"]


def test_an_address_that_never_answers_is_given_up(seeing, monkeypatch):
    monkeypatch.setattr("reference.vision.fetch.MOST_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        answer = ask_about(seeing, url, "127.0.0.1")
    assert answer.status_code == 400 and "within 0.2 s" in answer.json()["error"]["message"]


def test_the_flags_of_pictures_are_vllms():
    flags = ["--allowed-media-domains", "a.example", "b.example"]
    flags += ["--limit-mm-per-prompt", '{"image": 3}', "--mm-processor-cache-gb", "0.5"]
    args = read_args(parse(flags, "test"))
    assert args.allowed_media_domains == ["a.example", "b.example"]
    assert args.engine.limit_mm_per_prompt == {"image": 3}
    assert args.engine.mm_processor_cache_gb == 0.5
    older = read_args(parse(["--limit-mm-per-prompt", "image=2"], "test"))
    assert older.engine.limit_mm_per_prompt == {"image": 2}
    for wrong in ("image", "video=1", '{"image": -1}', "[]", "image=1e9"):
        with pytest.raises(ValueError, match="limit_mm_per_prompt: got"):
            read_args(parse(["--limit-mm-per-prompt", wrong], "test"))
