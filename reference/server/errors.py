"""What a client is told when its request cannot be served: one line, in the form of its own API.

| API | body of an error |
|---|---|
| OpenAI | {"error": {"message", "type", "param", "code"}} |
| Anthropic | {"type": "error", "error": {"type", "message"}} |
| text-generation-inference | {"error", "error_type"} |
"""

import re

from fastapi.responses import JSONResponse

from lessons.toolbox.model.arguments import one_line, shown

OPENAI_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
TGI_KINDS = {429: "overloaded", 500: "generation", 503: "overloaded", 504: "generation"}
# What pydantic found wrong, in plain words.
ACCEPTED = {
    "string_type": "a string",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
BOUNDS = {
    "greater_than_equal": ("ge", "{} or more"),
    "greater_than": ("gt", "more than {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "less than {}"),
    "literal_error": ("expected", "{}"),
    "too_short": ("min_length", "at least {} of them"),
    "too_long": ("max_length", "at most {} of them"),
    "string_too_short": ("min_length", "at least {} characters"),
    "string_too_long": ("max_length", "at most {} characters"),
}
# In the place of an error pydantic also names the branch of a union: list[str], UserMessage.
BRANCH = re.compile(
    r"(str|int|float|bool|list\[.*|dict\[.*|literal\[.*|function-.*|tgi|vllm|[A-Z]\w*)$"
)


class ApiError(Exception):
    """A refusal. status: of HTTP. param: the field that is wrong. code: OpenAI's name of the error.
    retry_after_s: when to come again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = one_line(message, 600)
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400, for the message of a ValueError: "name: got value; accepted: ..."."""
    if param is None and (found := re.match(r"[a-z_]+(?=:| )", message)):
        param = found[0]
    return ApiError(400, message, param)


def refused(name: str, value, accepted: str) -> ApiError:
    """400 that names a field, its value and what is accepted."""
    return ApiError(400, f"{name}: got {shown(value)}; accepted: {accepted}", name)


def body_of(error: ApiError, path: str) -> dict:
    """The error as the API at this path writes it."""
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC_KINDS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    if path in ("/", "/generate", "/generate_stream", "/info"):
        kind = TGI_KINDS.get(error.status, "validation")
        return {"error": error.message, "error_type": kind}
    kind = OPENAI_KINDS.get(error.status, "invalid_request_error")
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}


def response_of(error: ApiError, path: str) -> JSONResponse:
    """The answer to a request that was refused."""
    return JSONResponse(body_of(error, path), error.status, error.headers)


def of_validation(errors: list[dict]) -> ApiError:
    """One line for what pydantic found wrong in a body. errors: as its ValidationError lists them.

    A value that fits no branch of a union has an error for each branch; what they accept is joined.
    """
    first = max(errors, key=lambda error: len(error["loc"]))  # the branch that came furthest
    name = place_of(first)
    if "error" in first.get("ctx", {}):  # one of our own validators
        message = str(first["ctx"]["error"])
        inner = name and f"{name}." * (not message.startswith(name))
        return ApiError(400, f"{inner}{message}", param_of(first) or message.partition(":")[0])
    if first["type"] == "missing":
        return ApiError(400, f"{name}: missing; accepted: a request that has it", param_of(first))
    same = [error for error in errors if place_of(error) == name]
    accepted = " or ".join(dict.fromkeys(accepted_by(error) for error in same[:4]))
    message = f"{name or 'body'}: got {shown(first.get('input'))}; accepted: {accepted}"
    return ApiError(400, message, param_of(first))


def place_of(error: dict) -> str:
    """Where the error is: messages[0].content."""
    place = ""
    for part in error["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part != "body" and not BRANCH.match(part):
            place += f".{part}" * bool(place) or part
    return place


def param_of(error: dict) -> str | None:
    """The field of the request that the error is in."""
    return re.match(r"\w*", place_of(error))[0] or None


def accepted_by(error: dict) -> str:
    """What would have been right there."""
    kind = error["type"]
    if kind in BOUNDS:
        key, text = BOUNDS[kind]
        return text.format(error["ctx"][key])
    return ACCEPTED.get(kind, error["msg"])
