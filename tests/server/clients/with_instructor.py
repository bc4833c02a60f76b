"""instructor's conversation with a server in every mode for servers of this API: `python
with_instructor.py URL` prints what it got as JSON.
"""

import json
import sys
import warnings
from collections.abc import Iterable
from typing import Literal

import instructor
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel

warnings.simplefilter("ignore")  # some modes have another name now
RESPONSES = (Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON_O1, Mode.JSON_SCHEMA, *RESPONSES)
COLOUR = r'\{"name": "(red|green)", "dark": (true|false)\}'
CALL = rf'<tool_call>\{{"name": "Colour", "arguments": {COLOUR}\}}</tool_call>'


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


class Anything(BaseModel, extra="allow"):
    """What a model writes that was never taught to follow a schema."""


def forced(regex: str) -> dict:
    """For modes that trust the model to keep to the form."""
    return {"extra_body": {"guided_regex": regex}}


def conversation(mode: Mode, model: type[BaseModel], **wishes) -> list[dict]:
    """Two turns, and the second one again as a stream."""
    client = instructor.from_openai(openai, mode=mode)
    most = "max_output_tokens" if mode in RESPONSES else "max_tokens"
    wishes = {"model": "tiny", "temperature": 0, "max_retries": 0, most: 200} | wishes
    talk = [{"role": "user", "content": "Paint it."}]
    if mode == Mode.PARALLEL_TOOLS:  # which has no streams
        return [one.model_dump() for one in client.create(Iterable[model], talk, **wishes)]
    first = client.create(model, talk, **wishes)
    talk.append({"role": "assistant", "content": first.model_dump_json()})
    talk.append({"role": "user", "content": "Again."})
    second = client.create(model, talk, **wishes)
    *_, streamed = client.create_partial(model, talk, **wishes)
    return [one.model_dump() for one in (first, second, streamed)]


with OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0) as openai:
    got = {mode.name: conversation(mode, Colour) for mode in MODES}
    got["MD_JSON"] = conversation(Mode.MD_JSON, Colour, **forced(f"```json\n{COLOUR}\n```"))
    got["PARALLEL_TOOLS"] = conversation(Mode.PARALLEL_TOOLS, Colour, **forced(CALL * 2))
    anything = conversation(Mode.JSON, Anything, logit_bias={"93": 100})  # }, or it would run on
shaped = [one for found in got.values() for one in found]
print(json.dumps({"shaped": shaped, "modes": list(got), "anything": anything}))
