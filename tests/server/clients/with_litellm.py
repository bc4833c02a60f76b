"""litellm's conversation with a server: `python with_litellm.py URL` prints what it got as JSON."""

import json
import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it is fetched

import litellm
from pydantic import BaseModel


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


PAINT = {"name": "paint", "parameters": Colour.model_json_schema()}
TOOL = {"type": "function", "function": PAINT}


def ask(messages: list, **more):
    return litellm.completion(
        "openai/tiny",
        messages,
        api_base=sys.argv[1] + "/v1",
        api_key="none",
        num_retries=0,
        temperature=0,
        **{"max_tokens": 8} | more,
    )


talk, turns, streamed = [], [], []
for text in ("class Dog:", "def bark(self):"):
    talk.append({"role": "user", "content": text})
    chunks = ask(talk, stream=True, stream_options={"include_usage": True})
    streamed.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    message = ask(talk).choices[0].message
    turns.append(message.content)
    talk.append(message.model_dump())

talk = [{"role": "user", "content": "Paint it."}]
choice = {"type": "function", "function": {"name": "paint"}}
message = ask(talk, tools=[TOOL], tool_choice=choice, max_tokens=60).choices[0].message
call = message.tool_calls[0]
talk += [message, {"role": "tool", "tool_call_id": call.id, "content": "painted"}]
after = ask(talk, tools=[TOOL], tool_choice="none").choices[0].message.content
shaped = ask(talk[:1], response_format=Colour, max_tokens=60).choices[0].message.content
called = [json.loads(call.function.arguments)]
print(
    json.dumps(
        dict(
            turns=turns, streamed=streamed, called=called, after=after, shaped=[json.loads(shaped)]
        )
    )
)
