"""pydantic-ai's conversation with a server: `python with_pydantic_ai.py URL` prints what it got as
JSON. It speaks both APIs, chat completions and responses.
"""

import asyncio
import json
import sys
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Colour(BaseModel):
    name: Literal["red", "green"]
    dark: bool


async def conversation(model) -> dict:
    def agent(max_tokens=8, **more) -> Agent:
        settings = dict(temperature=0, max_tokens=max_tokens, **more.pop("settings", {}))
        return Agent(model, model_settings=settings, retries=0, **more)

    history, turns, streamed = [], [], []
    for text in ("class Dog:", "def bark(self):"):
        async with agent().run_stream(text, message_history=history) as stream:
            parts = [part async for part in stream.stream_text(delta=True, debounce_by=None)]
        streamed.append("".join(parts))
        result = await agent().run(text, message_history=history)
        turns.append(result.output)
        history = result.all_messages()
    shaped = []
    for output in (ToolOutput(Colour), NativeOutput(Colour)):
        result = await agent(60, output_type=output).run("Paint it.")
        shaped.append(result.output.model_dump())
        again = await agent(60, output_type=output).run(
            "Again.", message_history=result.all_messages()
        )
        shaped.append(again.output.model_dump())
    return dict(turns=turns, streamed=streamed, shaped=shaped)


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    provider = OpenAIProvider(openai_client=client)
    got = await conversation(OpenAIChatModel("tiny", provider=provider))
    responses = await conversation(OpenAIResponsesModel("tiny", provider=provider))
    got["shaped"] += responses["shaped"]
    print(json.dumps(got | {"responses": [responses["turns"], responses["streamed"]]}))


asyncio.run(main())
