"""Every rung and every library on the same requests: measured in turn, their tokens compared."""

from functools import partial

import torch
from rich.console import Console

from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model.config import ModelConfig
from reference.ladder.contest import (
    ONE_BY_ONE,
    WITHOUT_CACHE,
    Contender,
    subset,
    take_turns,
    within_budget,
)
from reference.ladder.judging import floor_bytes, judge
from reference.ladder.peers import all_peers, load_peer_model
from reference.ladder.rungs import Step, call_rung, left_out, rungs_of


@torch.inference_mode()
def climb(
    model: Decoder, peers: list[Contender], prompts, limits, bandwidth: float, console: Console
) -> list[Contender]:
    """Measure all rungs and the peers (new_guests), judge their tokens, and return the rungs.
    bandwidth: bytes/s, the roofline.
    """
    steps = rungs_of(model.config)
    if line := left_out(model.config):
        console.print(line, markup=False)
    rungs = [new_contender(step, model, prompts, limits) for step in steps]
    contenders = rungs + peers
    take_turns(contenders, prompts, limits, model.device, console)
    # The lowest rung serves few requests. One that keeps a cache now serves all, untimed, so that
    # no rung is compared with itself.
    needed = {index for contender in contenders for index in contender.outputs}
    reference = complete(rungs, steps, prompts, limits, needed)
    for contender in contenders:
        judge(contender, [rungs[0], reference], model, prompts)
    for rung, step in zip(rungs, steps):
        floor_s = floor_bytes(model, prompts, rung.outputs) / bandwidth
        rung.roofline_share = floor_s * rung.tokens_per_s / max(rung.tokens, 1)
        rung.kv_bytes_per_token = kv_bytes_of(step, model.config, model.dtype.itemsize)
        rung.stand_in = step.stand_in if model.device.type == "cpu" else None
    return rungs


def new_contender(step: Step, model: Decoder, prompts, limits) -> Contender:
    """A rung with the requests that it will serve."""
    run = partial(call_rung, step, model)
    served = subset(prompts, limits, how_many(step, len(prompts)))
    served = within_budget(run, prompts, limits, served, step.in_batches)
    return Contender(step.name, run, served, lesson=step.lesson, in_batches=step.in_batches)


def how_many(step: Step, total: int) -> int:
    """Requests that a rung serves: all where they run side by side, fewer one by one."""
    if step.in_batches:
        return total
    return ONE_BY_ONE if step.has_cache else WITHOUT_CACHE


def new_guests(path: str, model: Decoder, prompts, limits) -> list[Contender]:
    """The libraries, all on one copy of the weights. It is loaded when the first of them runs."""
    loaded = []

    def run(peer, prompts, limits, on_token):
        if not loaded:
            loaded.append(load_peer_model(path, model.device, model.dtype))
        return peer.run(loaded[0], prompts, limits, on_token)

    guests = []
    for peer in all_peers():
        served = subset(prompts, limits, len(prompts) if peer.in_batches else ONE_BY_ONE)
        guest = Contender(
            peer.name, partial(run, peer), served, in_batches=peer.in_batches, is_guest=True
        )
        guests.append(guest)
    return guests


def complete(rungs: list[Contender], steps, prompts, limits, needed: set[int]) -> Contender:
    """The lowest rung with a cache (else the first), with the tokens of all `needed` requests, a
    library's too: on a slow machine no rung may have served them.
    """
    lowest = next((i for i, step in enumerate(steps) if step.has_cache), 0)
    rung = rungs[lowest]
    missing = sorted(needed - set(rung.outputs))
    outputs = dict(rung.outputs)
    if missing:
        found = rung.run([prompts[i] for i in missing], [limits[i] for i in missing], None)
        outputs |= dict(zip(missing, found))
    return Contender(rung.name, rung.run, [], outputs=outputs)


def kv_bytes_of(step: Step, config: ModelConfig, bytes_per_value: int) -> int:
    """What a token adds to the rung's cache, in bytes."""
    if not step.has_cache:
        return 0
    if config.mla is None or step.keeps_latents:
        return config.kv_bytes_per_token(bytes_per_value)
    # The other rungs hold DeepSeek's keys and values of all heads, made from the latents.
    values = config.num_attention_heads * (config.head_dim + config.v_head_dim)
    return config.num_hidden_layers * values * bytes_per_value
