"""langchain-openai's conversation with a server: `python with_langchain.py URL` prints what it got
as JSON.
"""

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green"]
    dark: bool


@tool(args_schema=Colour)
def paint(name: str, dark: bool) -> str:
    """Paint it."""
    return f"{name} and {dark}"


def chat(**more) -> ChatOpenAI:
    asked = dict(model="tiny", temperature=0, max_tokens=8, max_retries=0) | more
    return ChatOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", **asked)


def conversation(model: ChatOpenAI) -> tuple[list[str], list[str]]:
    """Two turns, whole and as streams."""
    talk, turns, streamed = [], [], []
    for text in ("class Dog:", "def bark(self):"):
        talk.append(HumanMessage(text))
        streamed.append("".join(chunk.text for chunk in model.stream(talk)))
        talk.append(model.invoke(talk))
        turns.append(talk[-1].text)
    return turns, streamed


turns, streamed = conversation(chat())
responses = conversation(chat(use_responses_api=True))
long, talk = chat(max_tokens=60), [HumanMessage("Paint it.")]
talk.append(long.bind_tools([paint], tool_choice="paint").invoke(talk))
(call,) = talk[-1].tool_calls
talk.append(ToolMessage(paint.invoke(call["args"]), tool_call_id=call["id"]))
after = chat().bind_tools([paint], tool_choice="none").invoke(talk).text
shaped = [
    long.with_structured_output(Colour, method=method).invoke("Paint it.").model_dump()
    for method in ("json_schema", "function_calling")
]
got = dict(turns=turns, streamed=streamed, called=[call["args"]], after=after, shaped=shaped)
print(json.dumps(got | {"responses": responses}))
