"""Bad input to the wrappers is refused in one line that names the argument."""

import pytest
import torch

from lessons.l27_states import stand_ins
from lessons.l27_states.convolution import conv_prompts, conv_step
from lessons.l27_states.lab.testing import conv_inputs, on_device, prompt_inputs, step_inputs
from lessons.l27_states.optimized import decayed_step, gated_delta_step
from lessons.l27_states.prompts import decayed_prompts, gated_delta_prompts
from lessons.toolbox.proof.refusals import assert_message, assert_refused

TENSORS = ("q", "k", "v", "log_decay", "beta", "states", "slots")
PACKED = (*TENSORS, "cu_seqlens", "has_state")


def calls():
    """{name: (function, its arguments)}."""
    step = dict(zip(TENSORS, step_inputs(3, 2, 16, 24)))
    packed = dict(zip(PACKED, prompt_inputs([5, 3, 4], 2, 16, 24)))
    names = ("x", "weight", "states", "slots", "cu_seqlens", "has_state")
    channels = dict(zip(names, conv_inputs([5, 3, 4], 6, 4)))
    one = {name: channels[name] for name in names[:4]} | dict(x=channels["x"][:3])

    def without_beta(arguments):
        return {name: x for name, x in arguments.items() if name != "beta"}

    given = {
        gated_delta_step: step,
        decayed_step: without_beta(step),
        gated_delta_prompts: packed,
        decayed_prompts: without_beta(packed),
        conv_step: one,
        conv_prompts: channels,
    }
    kernels = {function.__name__: (function, rest) for function, rest in given.items()}
    on_a_cpu = {
        f"{name}, stand-in": (getattr(stand_ins, name), rest) for name, (_, rest) in kernels.items()
    }
    return kernels | on_a_cpu


@pytest.mark.parametrize("name", calls())
def test_refuses_tensors_that_do_not_fit(name):
    """Numbers for each token may have any strides: the wrapper makes them dense."""
    function, arguments = calls()[name]
    for argument in arguments:
        kinds = ("dtype", "device", "shape")
        if argument not in ("log_decay", "beta"):
            kinds += ("stride",)
        assert_refused(function, arguments, argument, kinds)


@pytest.mark.parametrize("name", calls())
def test_refuses_slots_that_are_not_there(name):
    function, arguments = calls()[name]
    last = len(arguments["states"]) - 1
    least = 0 if "cu_seqlens" in arguments else -1
    for slots, message in (
        ([0, last + 1, 1], f"slots: got values from 0 to {last + 1}; accepted: {least} to {last}"),
        ([0, least - 1, 1], f"slots: got values from {least - 1} to 1"),
        ([1, 2, 1], r"slots: got \[1, 2, 1\]; accepted: each slot once"),
    ):
        assert_message(function, {**arguments, "slots": on_device(slots)}, message)


@pytest.mark.parametrize("name", [name for name in calls() if "prompts" in name])
def test_refuses_lengths_that_do_not_fit(name):
    function, arguments = calls()[name]
    for starts in ([0, 5, 8, 13], [1, 5, 8, 12], [0, 8, 5, 12]):
        given = {**arguments, "cu_seqlens": on_device(starts, torch.int32)}
        assert_message(function, given, "cu_seqlens: got .*; accepted: from 0 to 12, never falling")
    for longest, message in (
        (4, "max_seqlen: got 4; accepted: 5 or more"),
        (-1, "max_seqlen: got -1"),
    ):
        assert_message(function, {**arguments, "max_seqlen": longest}, message)


def test_refuses_states_that_overlap_or_have_gaps():
    """An expanded state would be written by several programs."""
    for name in ("gated_delta_step", "conv_step"):
        function, arguments = calls()[name]
        states = arguments["states"]
        shared = states[:1].expand_as(states)
        assert_message(function, {**arguments, "states": shared}, "states: got .*do not overlap")
        turned = states.transpose(1, 2).contiguous().transpose(1, 2)
        assert_message(function, {**arguments, "states": turned}, "states: got strides")


def test_refuses_a_chunk_that_no_kernel_has():
    function, arguments = calls()["gated_delta_prompts"]
    for chunk in (8, 48, 128, 16.5):
        assert_message(
            function, {**arguments, "chunk": chunk}, "chunk: got .*; accepted: 16, 32 or 64"
        )


def test_refuses_heads_that_are_too_wide():
    function, arguments = calls()["decayed_step"]
    wide = torch.zeros(3, 2, 257, device=arguments["q"].device)
    assert_message(function, {**arguments, "q": wide, "k": wide}, "with Dk from 1 to 256")
