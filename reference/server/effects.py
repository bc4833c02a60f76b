"""The response header that names what a request had and what changed nothing.

    x-without-effect: store, verbosity

The models of protocol/ note these fields while they read a body. Why each has no effect is in the
table of README.md, which `python -m reference.server.effects` prints.
"""

from reference.server.protocol.base import WITHOUT_EFFECT, Wire
from reference.server.protocol.chat import ChatCompletionRequest, FunctionDefinition
from reference.server.protocol.completions import CompletionRequest
from reference.server.protocol.generate import LegacyRequest, TgiParameters
from reference.server.protocol.messages import MessagesRequest, MessagesTool, OutputConfig
from reference.server.protocol.responses import ResponsesRequest, TextConfig
from reference.server.protocol.sampling import StreamOptions, StructuredOutputs
from reference.server.protocol.tokens import EmbeddingRequest, TokenizeRequest

HEADER = b"x-without-effect"
REQUESTS: dict[str, type[Wire]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/chat/completions, in tools": FunctionDefinition,
    "/v1/completions": CompletionRequest,
    "stream_options": StreamOptions,
    "structured_outputs": StructuredOutputs,
    "/v1/responses": ResponsesRequest,
    "/v1/responses, in text": TextConfig,
    "/v1/messages": MessagesRequest,
    "/v1/messages, in tools": MessagesTool,
    "/v1/messages, in output_config": OutputConfig,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/generate with prompt": LegacyRequest,
    "/generate with inputs, in parameters": TgiParameters,
}


class Effects:
    """ASGI middleware that writes the header."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        """Pass a request on, with an empty list to note fields in."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        noted: dict[str, None] = {}

        async def told(message: dict) -> None:
            if message["type"] == "http.response.start" and noted:
                value = ", ".join(noted).encode()
                message = {**message, "headers": [*message.get("headers", []), (HEADER, value)]}
            await send(message)

        token = WITHOUT_EFFECT.set(noted)
        try:
            await self.app(scope, receive, told)
        finally:
            WITHOUT_EFFECT.reset(token)


def table() -> str:
    """Every field that is accepted without effect, or refused, and why, in Markdown."""
    lines = ["| request | accepted without effect | refused |", "|---|---|---|"]
    for name, model in REQUESTS.items():
        hints = [f"`{field}`: {why}" for field, why in sorted(model.hints.items())]
        refused = [f"`{field}`: {one.why}" for field, one in sorted(model.refused.items())]
        if hints or refused:
            lines.append(f"| {name} | {'<br>'.join(hints)} | {'<br>'.join(refused)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
