"""A request whose prompt is computed on another replica than its answer.

The router sends it first to a prefill replica, with one token to generate and the address at which
the chosen decode replica takes K and V. That one sends its blocks there while the prompt runs, and
answers when they have come. Then the request goes to the decode replica as it is, which finds them.
So if anything fails on the first way, the second one gives the answer all the same: the decode
replica computes what it does not find. Nothing of the first way is ever shown to the client, so
nothing can come twice.

Source: what the two requests say: vLLM's toy_proxy_server.py. There the decode replica asks the
other one for its blocks; here they are pushed, so the first request names the place.
"""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx

from lessons.l26_kv_transfer.costs import Token, least_worth_sending
from reference.router.args import RouterArgs
from reference.router.metrics import Metrics
from reference.router.policies import Prompt
from reference.router.replicas import Replica, Replicas

if TYPE_CHECKING:
    from reference.router.forward import Sent

PATHS = (b"/v1/completions", b"/v1/chat/completions")
CHARS_PER_TOKEN = 4  # of a text that the router has not tokenized
MOST_BYTES = 2**20  # of a prefill's answer: one token, and the numbers of blocks
# Of no use for a request that generates one token, and not seen by the client.
WITHOUT = ("stream", "stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs")
# These read every token of the prompt, so blocks that come from elsewhere would not spare any.
WHOLE = ("prompt_logprobs", "echo", "kv_transfer_params")


class Prefill:
    """Which prompts are computed elsewhere, and by whom. replicas: those for prefill."""

    def __init__(self, args: RouterArgs, transport: httpx.AsyncBaseTransport, metrics: Metrics):
        self.replicas = Replicas(replace(args, replicas=args.prefill, prefill=[]), transport)
        self.transport, self.metrics = transport, metrics
        self.timeout = httpx.Timeout(args.prefill_timeout, connect=args.connect_timeout)
        self.least_tokens = args.send_from
        if args.send_costs is not None:
            self.least_tokens = least_of(args.send_costs)

    def is_worth(self, target: bytes, request: dict | None) -> bool:
        """Whether a request's prompt is long enough to be sent, and can be."""
        if request is None or target.partition(b"?")[0] not in PATHS:
            return False
        if any(request.get(name) for name in WHOLE) or request.get("max_tokens") == 1:
            return False
        return prompt_tokens(request) >= self.least_tokens

    async def sent(self, prompt: Prompt, request: dict, sent: Sent, to: Replica) -> bytes | None:
        """Let a prefill replica compute the prompt for this decode replica. Returns the body for
        the latter; None: nothing was handed over, so the request goes to it as it came.
        """
        first = next(self.replicas.candidates(prompt), None)
        if first is None or to.kv_transfer is None:
            return None
        outcome = "failed"
        first.in_flight += 1
        try:
            handed_over = await self.ask(first, replace(sent, body=body_for(request, to)))
            outcome = "sent" if handed_over else "computed"
            outcome = "refused" if handed_over is False else outcome
        except httpx.LocalProtocolError:
            pass  # the request is wrong, and the replica is not
        except httpx.ReadTimeout:
            outcome = "late"
        except httpx.TransportError:
            outcome = "lost"
            first.is_ready = False  # until it answers when it is asked
        finally:
            first.in_flight -= 1
            self.metrics.prefills.labels(first.url, outcome).inc()
        if outcome != "sent":
            return None
        return json.dumps(request | {"kv_transfer_params": handed_over}).encode()

    async def ask(self, first: Replica, sent: Sent) -> dict | bool | None:
        """What a prefill replica says that it has handed over; None: nothing; False: it did not
        answer. Raises httpx.TransportError.
        """
        response = await self.transport.handle_async_request(sent.to(first, self.timeout))
        body = bytearray()
        async with aclosing(response):
            async for part in response.aiter_raw():
                body += part
                if len(body) > MOST_BYTES:
                    return None
        if response.status_code != 200:
            return False  # the decode replica will say what is wrong with the request
        try:
            found = json.loads(body).get("kv_transfer_params")
        except (ValueError, AttributeError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def body_for(request: dict, to: Replica) -> bytes:
    """What a prefill replica is asked. to: who decodes."""
    asked = {name: value for name, value in request.items() if name not in WITHOUT}
    asked |= {"max_tokens": 1}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    place = {name: to.kv_transfer.get(name) for name in ("remote_host", "remote_port")}
    asked["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": to.kv_transfer.get("engine_id"),
        "remote_block_ids": None,
        **place,
    }
    return json.dumps(asked).encode()


def prompt_tokens(request: dict) -> float:
    """How many tokens a prompt has: exactly for token ids, else by its characters. Of several
    prompts 0, because each would have to be sent on its own.
    """
    prompt = request.get("prompt")
    if isinstance(prompt, list):
        is_ids = all(isinstance(one, int) for one in prompt)
        return len(prompt) if is_ids else 0
    if isinstance(prompt, str):
        return len(prompt) / CHARS_PER_TOKEN
    return characters(request.get("messages")) / CHARS_PER_TOKEN


def characters(value) -> int:
    """Of all texts in messages."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(characters, value))
    if isinstance(value, dict):
        return characters(value.get("content")) + characters(value.get("text"))
    return 0


def least_of(costs: dict[str, float]) -> float:
    """The tokens from which a prompt is worth sending, by lesson 26's costs."""
    token = Token(costs["kv_bytes"], costs["compute_s"])
    return least_worth_sending(token, costs["bytes_per_s"], costs["fixed_s"])
