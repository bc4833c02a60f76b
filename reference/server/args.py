"""The server's own arguments, beside the engine's."""

import ssl
from dataclasses import dataclass, field

from lessons.toolbox.model.arguments import check_positive, check_whole, refuse
from reference.engine.async_engine import AsyncEngineArgs
from reference.server.templates import read_template

PARSERS = ("hermes", "llama3_json")


@dataclass
class ServerArgs:
    """Raises ValueError, in one line, for a value that cannot work.

    engine: of the engine. served_model_name: what clients call the base model; the first is in the
    answers. lora_modules: {name: folder} of the adapters. chat_template: a file, or a template in
    one line; it is read here. api_key: keys that are accepted, none: no key is needed.
    allowed_origins: of browsers' pages, none: no page of another origin may read an answer. Times
    are seconds: request_timeout of a whole answer, write_timeout of one write to a client that does
    not read, read_timeout of a request's headers and of its body, shutdown_timeout of what runs
    when the server is told to end. max_body_bytes: of a request. limit_concurrency: connections at
    a time. disable_frontend_multiprocessing: the engine is a thread of the server's process, and no
    process of its own. impl: whose solved exercises take the places of the engine's parts,
    "exercises" or a folder like it; the engine is a thread then. allowed_media_domains: hosts from
    which pictures are fetched, none: a picture comes in the request itself.
    """

    engine: AsyncEngineArgs
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] = field(default_factory=list)
    lora_modules: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_call_parser: str = "hermes"
    api_key: list[str] = field(default_factory=list)
    allowed_origins: list[str] = field(default_factory=list)
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    allow_credentials: bool = False
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    disable_fastapi_docs: bool = False
    disable_frontend_multiprocessing: bool = False
    impl: str | None = None
    max_logprobs: int = 20
    request_timeout: float = 600.0
    write_timeout: float = 30.0
    read_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 2**20
    limit_concurrency: int = 1024
    allowed_media_domains: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.chat_template = read_template(self.chat_template)
        self.served_model_name = self.served_model_name or [self.engine.model]
        if not 0 <= self.port < 2**16:
            refuse("port", self.port, "0 to 65535; 0 takes a free one")
        check_whole(0, max_logprobs=self.max_logprobs)
        check_whole(max_body_bytes=self.max_body_bytes, limit_concurrency=self.limit_concurrency)
        for name in ("request_timeout", "write_timeout", "read_timeout", "shutdown_timeout"):
            check_positive(**{name: getattr(self, name)})
        if self.tool_call_parser not in PARSERS:
            refuse("tool_call_parser", self.tool_call_parser, " or ".join(PARSERS))
        if self.lora_modules and not self.engine.enable_lora:
            refuse("lora_modules", self.lora_modules, "none without --enable-lora")
        if self.impl is not None and self.engine.has_workers:
            accepted = "none where the model is in other processes (…_parallel_size)"
            refuse("impl", self.impl, accepted)
        for name in self.lora_modules:
            if name in self.served_model_name:
                refuse("lora_modules", name, "names that the base model does not have")
        check_tls(self.ssl_keyfile, self.ssl_certfile)
        if not all(self.api_key):
            refuse("api_key", "", "a key that is not empty")
        for key in self.api_key:
            if not (key.isascii() and key.isprintable()):
                refuse("api_key", "a key", "printable ASCII, because it travels in a header")


def check_tls(keyfile: str | None, certfile: str | None) -> None:
    """Read both now, because uvicorn reads them when the model is loaded, minutes later. keyfile:
    None if the certificate's file has the key too. Raises ValueError.
    """
    if certfile is None:
        if keyfile is not None:
            refuse(
                "ssl_certfile", None, "the file of the certificate that --ssl-keyfile belongs to"
            )
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # a key with a password would ask for it at the terminal
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except OSError as error:  # no file, no certificate, or the key of another one
        accepted = "a certificate and its key, both in PEM, the key without a password"
        files = f"{certfile!r} and {keyfile!r}"
        raise ValueError(
            f"ssl_certfile, ssl_keyfile: got {files} ({error}); accepted: {accepted}"
        ) from None
