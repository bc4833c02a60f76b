"""What holds on a pretended GPU. test_pretended.py runs these in a process of their own, which
pretends one.
"""

import copy
import gc

import pytest
import torch
from torch import nn

from lessons.toolbox.kernels.triton_ import tl, triton
from lessons.toolbox.measure.device import (
    default_device,
    fingerprint,
    has_gpu,
    interpreting,
    rehearsing,
)
from lessons.toolbox.measure.timing import measure
from lessons.toolbox.proof import record
from lessons.toolbox.proof.numerics import clone_with_strides
from lessons.toolbox.proof.pretended.launches import LAUNCHES
from lessons.toolbox.proof.pretended.refusals import CaptureError, NotRehearsed
from lessons.toolbox.proof.traps import poisoned_empty

CUDA = default_device()


@triton.jit
def add_kernel(x_ptr, out_ptr, n, amount, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + at, x + amount, mask=at < n)


def add(x, amount=2.0, out=None, grid=None, **options):
    out = torch.empty_like(x) if out is None else out
    add_kernel[grid or (triton.cdiv(x.numel(), 16),)](
        x, out, x.numel(), amount, BLOCK=16, **options
    )
    return out


# ---------------------------------------------------------------- where tensors lie


def test_this_process_says_that_it_rehearses():
    assert has_gpu() and not interpreting() and rehearsing()
    assert fingerprint()["rehearsed"] and "pretended" in fingerprint()["device"]
    assert record.where("01/k") == "rehearsal"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device=CUDA),
        lambda: torch.arange(3, device=CUDA),
        lambda: torch.arange(0, 6, 2, device="cuda"),
        lambda: torch.linspace(0, 1, 3, device="cuda"),
        lambda: torch.randn(3, device="cuda"),
        lambda: torch.randperm(3, device="cuda"),
        lambda: torch.eye(3, device="cuda")[0],
        lambda: torch.tensor([1, 2, 3], device="cuda"),
        lambda: torch.as_tensor([1, 2, 3], device="cuda:0"),
        lambda: torch.zeros(3).to("cuda"),
        lambda: torch.zeros(3).cuda(),
        lambda: torch.zeros(3).to(CUDA, torch.float64, copy=True),
        lambda: torch.zeros(3).to(torch.zeros(1, device=CUDA)),
        lambda: torch.zeros(3).type_as(torch.zeros(1, device=CUDA)),
        lambda: torch.zeros(3, device=CUDA).type_as(torch.zeros(1, device=CUDA).half()),
        lambda: torch.zeros(1, device=CUDA).new_tensor([1, 2, 3]),
        lambda: torch.stack([torch.zeros(3, device=CUDA)] * 2)[0],
        lambda: nn.Linear(2, 3).to(CUDA).bias.data,
        lambda: copy.deepcopy(nn.Linear(2, 3).to(CUDA)).bias.data,
        lambda: clone_with_strides(torch.zeros(3, 4, device=CUDA)[:, 1]),
        lambda: torch.zeros(3, device=CUDA).to("cuda"),
    ],
)
def test_tensors_on_the_gpu(make):
    x = make()
    assert x.shape == (3,) and x.device == torch.device("cuda", 0) and x.is_cuda
    assert not x.cpu().is_cuda and x.cpu().tolist() == x.tolist()


def test_new_tensors_under_a_device():
    with torch.device(CUDA):
        assert all(x.is_cuda for x in (torch.zeros(2), torch.tensor([1]), torch.arange(3)))
    assert not torch.tensor([1]).is_cuda


def test_views_share_their_numbers_and_copies_do_not():
    x = torch.zeros(4, device=CUDA)
    x[1:3] = torch.tensor([5.0, 6.0])  # a copy from the CPU, as on a GPU
    x.view(2, 2)[1].add_(1)
    x[torch.tensor([0])] = 9.0
    assert x.tolist() == [9, 5, 7, 1]
    other = torch.zeros(4, device=CUDA)
    other.data = x
    kept = x.cpu()
    x.zero_()
    assert other.tolist() == [0, 0, 0, 0]
    assert kept.tolist() == [9, 5, 7, 1]
    with torch.inference_mode():
        assert x.view(2, 2).add_(1).sum().item() == 4
    with poisoned_empty():
        assert torch.empty(2, device=CUDA).isnan().all()


# ---------------------------------------------------------------- what a GPU refuses


def on_gpu():
    return torch.ones(3, device=CUDA)


@pytest.mark.parametrize(
    "mix, message",
    [
        (lambda: on_gpu() + torch.arange(3), "same device"),
        (lambda: torch.ones(3) * on_gpu(), "same device"),
        (lambda: torch.ones(3).add_(on_gpu()), "same device"),
        (lambda: torch.tensor(1.0).add_(on_gpu().sum()), "same device"),
        (lambda: torch.cat([on_gpu(), torch.ones(3)]), "same device"),
        (lambda: torch.where(torch.ones(3) > 0, on_gpu(), 0.0), "same device"),
        (lambda: on_gpu()[None] @ torch.ones(3, 3), "same device"),
        (lambda: nn.functional.embedding(torch.tensor([1]), on_gpu()[:, None]), "same device"),
        (lambda: nn.Linear(3, 3)(on_gpu()), "same device"),
        (lambda: torch.testing.assert_close(on_gpu(), torch.ones(3)), "device"),
        (lambda: torch.equal(on_gpu(), torch.ones(3)), "same device"),
        (lambda: torch.ones(3)[torch.zeros(2, dtype=torch.long, device=CUDA)], "indices"),
        (lambda: on_gpu().index_put_((torch.tensor([0, 1]),), torch.ones(2)), "same device"),
        (lambda: torch.randn(3, device=CUDA, generator=torch.Generator()), "generator"),
        (lambda: on_gpu().numpy(), "can't convert cuda"),
        (lambda: __import__("numpy").asarray(on_gpu()), "can't convert cuda"),
        (lambda: add(torch.ones(3)), "cpu tensor"),
        (lambda: add(on_gpu(), out=torch.ones(3)), "cpu tensor"),
        (lambda: add(on_gpu(), grid=(1, 65_536)), "invalid argument"),
    ],
)
def test_what_a_gpu_refuses(mix, message):
    with pytest.raises((RuntimeError, TypeError, ValueError, AssertionError), match=message):
        mix()


def test_what_a_gpu_accepts():
    x = on_gpu()
    x += torch.tensor(1.0)
    assert (2 * x + torch.tensor(3.0)).tolist() == [7, 7, 7]
    assert x[torch.tensor([0, 2])].tolist() == [2, 2]
    there = torch.zeros(3)
    there.copy_(x)
    assert there.tolist() == [2, 2, 2]
    assert torch.randn(3, generator=torch.Generator()).shape == (3,)
    assert f"{x.sum():.1f}" == "6.0" and "pretended" in repr(x)


def test_what_is_too_large_is_not_rehearsed():
    with pytest.raises(NotRehearsed, match=r"4\.0 GiB"):
        torch.empty(2**30, device=CUDA)
    with pytest.raises(NotRehearsed, match="too many to interpret"):
        add(on_gpu(), grid=(10**6,))
    with pytest.raises(NotRehearsed, match=r"torch\.compile"):
        torch.compile(len)


# ---------------------------------------------------------------- kernels and graphs


def variants(call):
    before = set(LAUNCHES.variants)
    call()
    return len(LAUNCHES.variants - before)


def test_a_kernel_runs_and_its_variants_are_counted():
    LAUNCHES.variants.clear()
    x = torch.arange(64, dtype=torch.float32, device=CUDA)
    assert variants(lambda: add(x)) == 1 and add(x)[5].item() == 7
    assert variants(lambda: add(x, amount=3.0)) == 0
    assert variants(lambda: add(x[:32])) == 0, "a length of another multiple of 16"
    assert variants(lambda: add(x[:17])) == 1, "a length that is none"
    assert variants(lambda: add(x[1:33], out=torch.empty_like(x))) == 1, "not aligned to 16 bytes"
    assert variants(lambda: add(x[:1])) == 1, "a length of 1"
    assert variants(lambda: add(x.double())) == 1
    assert variants(lambda: add(x, amount=3)) == 1
    assert variants(lambda: add(x, num_warps=8)) == 1


def captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()
    return graph, output


def test_a_graph_runs_when_it_is_replayed():
    x, total = torch.zeros(16, device=CUDA), torch.zeros(1, device=CUDA)

    def step():
        total.add_(1)
        return add((x * 2).half().float().view(4, 4).T.reshape(16))[:3] + total

    add(x)
    with torch.inference_mode():  # compound operations arrive whole there
        graph, output = captured(step)
    assert output.isnan().all() and total.item() == 0, "nothing runs at capture"
    gc.collect()
    for count in (1, 2):
        x.fill_(count)
        graph.replay()
        assert output.tolist() == [3 * count + 2] * 3


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: add(x, num_warps=2),  # compiles
    ],
)
def test_what_a_capture_refuses(step):
    with pytest.raises(CaptureError, match="capturing"):
        captured(lambda: step(torch.ones(3, device=CUDA)))


def test_a_time_can_be_taken():
    x = on_gpu()
    assert measure(lambda: x + 1).median_s > 0
