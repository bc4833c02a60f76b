"""openai-agents' conversation with a server: `python with_agents.py URL` prints what it got as
JSON. It speaks both APIs, chat completions and responses.
"""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

CALLED = []


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


@function_tool
def paint(name: Literal["red", "green"], dark: bool) -> str:
    """Paint it."""
    CALLED.append({"name": name, "dark": dark})
    return "painted"


async def stream(agent: Agent, talk: str | list) -> str:
    """The pieces of a streamed answer, put together."""
    text = ""
    async for event in Runner.run_streamed(agent, talk).stream_events():
        data = getattr(event, "data", None)
        if getattr(data, "type", "") == "response.output_text.delta":
            text += data.delta
    return text


def agent(model, max_tokens: int, tool_choice: str | None = None, **more) -> Agent:
    settings = ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=tool_choice)
    return Agent("painter", model=model, model_settings=settings, **more)


async def texts(model) -> tuple[list[str], list[str]]:
    """Two turns, whole and as streams."""
    talk, turns, streamed = [], [], []
    for text in ("class Dog:", "def bark(self):"):
        talk.append({"role": "user", "content": text})
        streamed.append(await stream(agent(model, 8), talk))
        result = await Runner.run(agent(model, 8), talk)
        turns.append(result.final_output)
        talk = result.to_input_list()
    return turns, streamed


async def colours(model) -> list[dict]:
    """Two turns of a form, and the second one as a stream. The first is a call, its result, and an
    answer: after a call the choice is the model's. The form is sent with both.
    """
    painter = agent(model, 60, "required", tools=[paint], output_type=Colour)
    result = await Runner.run(painter, "Paint it.")
    talk = [*result.to_input_list(), {"role": "user", "content": "Again."}]
    shaper = agent(model, 60, output_type=Colour)
    again = await Runner.run(shaper, talk)
    streamed = json.loads(await stream(shaper, talk))
    return [result.final_output.model_dump(), again.final_output.model_dump(), streamed]


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    chat, responses = (
        OpenAIChatCompletionsModel("tiny", client),
        OpenAIResponsesModel("tiny", client),
    )
    # no texts by the second, because this client takes no response that max_output_tokens has cut
    turns, streamed = await texts(chat)
    shaped = [*await colours(chat), *await colours(responses)]
    print(json.dumps(dict(turns=turns, streamed=streamed, called=CALLED, shaped=shaped)))


asyncio.run(main())
