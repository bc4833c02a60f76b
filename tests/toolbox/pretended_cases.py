"""What holds on a pretended GPU. test_pretended.py runs these in a process of their own, which
pretends one.
"""

import copy
import gc
import importlib
from functools import partial
from pathlib import Path

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
from lessons.toolbox.proof.pretended.cuda import ABSENT
from lessons.toolbox.proof.pretended.hosts import Hosts
from lessons.toolbox.proof.pretended.launches import LAUNCHES
from lessons.toolbox.proof.pretended.refusals import CaptureError, NotRehearsed
from lessons.toolbox.proof.traps import poisoned_empty
from reference import LLM, SamplingParams

CUDA, CUDA0 = default_device(), torch.device("cuda", 0)
MODELS = Path(__file__).resolve().parents[2] / "models"


@triton.jit
def add_kernel(x_ptr, out_ptr, n, amount, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + at, x + amount, mask=at < n)


@triton.jit(do_not_specialize=["n"])
def add_any_kernel(x_ptr, out_ptr, n, amount, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.store(out_ptr + at, x + amount, mask=at < n)


def add(x, amount=2.0, out=None, grid=None, kernel=add_kernel, **options):
    out = torch.empty_like(x) if out is None else out
    kernel[grid or (triton.cdiv(x.numel(), 16),)](x, out, x.numel(), amount, BLOCK=16, **options)
    return out


@pytest.mark.parametrize("name", ABSENT)
def test_packages_that_a_borrowed_machine_lacks_are_not_installed(name):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


# ---------------------------------------------------------------- where tensors are


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


def test_modules_that_share_a_parameter_share_it_on_the_gpu():
    both = nn.ModuleList([nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)])
    both[1].weight = both[0].weight
    both.to(CUDA)
    assert both[1].weight is both[0].weight and both[0].weight.is_cuda


def test_new_tensors_under_a_device():
    with torch.device(CUDA):
        assert all(x.is_cuda for x in (torch.zeros(2), torch.tensor([1]), torch.arange(3)))
    assert not torch.tensor([1]).is_cuda
    assert torch.equal(torch.tensor([1], pin_memory=True), torch.tensor([1]))


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


def test_what_pytorch_makes_in_cpp_lies_on_the_gpu():
    q, sees = torch.ones(1, 2, 3, 4, device=CUDA), torch.ones(3, 3, device=CUDA) > 0
    attention = nn.functional.scaled_dot_product_attention
    assert attention(q, q, q, attn_mask=sees).is_cuda
    assert attention(q, q, q, is_causal=True).is_cuda
    with pytest.raises(RuntimeError, match="same device"):
        attention(q, q, q, attn_mask=sees.cpu())
    padded = nn.utils.rnn.pad_sequence([q[0, 0], q[0, 0, :1]], batch_first=True)
    assert padded.is_cuda and padded[1, 1:].sum() == 0
    assert nn.functional.one_hot(torch.tensor([2, 0], device=CUDA), 3).is_cuda


def test_numbers_that_are_not_kept(monkeypatch):
    """They are finite, and may be probabilities; what depends on them may be an index."""
    monkeypatch.setattr(Hosts, "keep_values", False)
    x = torch.randn(2, 3, device=CUDA)
    assert x.isfinite().all() and not x.isnan().any()
    assert x.softmax(-1).nonzero().shape == (6, 2)
    assert x.argmax(-1).tolist() == [0, 0] and x.sum().item() == 1.0
    assert x.cpu().tolist() == [[1.0] * 3] * 2 and x[x > 0].shape == (6,)


def test_operations_are_counted():
    x, before = on_gpu(), Hosts.operations
    (x.view(3, 1) + 1).mul_(2)
    assert Hosts.operations == before + 2, "a view is none"


def test_waits_are_counted():
    x, before = on_gpu(), Hosts.waits
    x.copy_(x + 1)
    x.copy_(torch.ones(3), non_blocking=True)
    assert Hosts.waits == before
    x.copy_(torch.ones(3))
    x.sum().item()
    x.tolist()
    assert x[x > 0].shape == (3,) and Hosts.waits >= before + 4


def test_a_step_of_the_engine_waits_for_its_tokens(monkeypatch):
    """For its tokens, which the copies of the next step's inputs follow: nothing runs then. The
    rows that are sampled are the one copy between. The cache is as large as its longest sequences.
    """
    monkeypatch.setattr(Hosts, "keep_values", False)
    llm = LLM(str(MODELS / "tiny"), max_num_seqs=4)
    assert llm.engine.runner.model.device == llm.engine.runner.pool.k_slots.device == CUDA0
    longest = llm.engine.max_model_len
    assert llm.engine.runner.pool.num_blocks == 4 * longest // 16, "four of the longest"
    for seed in range(3):
        params = SamplingParams(top_p=0.9, seed=seed, ignore_eos=True)
        llm.engine.add_request(str(seed), "def f(", params)
    waits = []
    for _ in range(6):
        before = Hosts.waits
        llm.engine.step()
        waits.append(Hosts.waits - before)
    inputs, rows, tokens = 3, 1, 1
    assert max(waits[2:]) <= inputs + rows + tokens, waits


def test_a_step_that_is_scheduled_ahead_waits_for_nothing(monkeypatch):
    """Its inputs and its sampler's are sent, its tokens arrive before they are read."""
    monkeypatch.setattr(Hosts, "keep_values", False)
    llm, waits = LLM(str(MODELS / "tiny"), max_num_seqs=4, async_scheduling=True), []
    for seed in range(5):
        params = SamplingParams(top_p=0.9, seed=seed, max_tokens=3 + seed, ignore_eos=True)
        llm.engine.add_request(str(seed), "def f(", params)
    while llm.engine.has_unfinished_requests:
        before = Hosts.waits
        llm.engine.step()
        waits.append(Hosts.waits - before)
    assert len(waits) > 7 and not any(waits), waits


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


def test_integers_that_a_kernel_would_have_written_are_zeros(monkeypatch):
    """Without numbers no kernel runs, and what lay in memory before is no count of tokens."""
    monkeypatch.setattr(Hosts, "keep_values", False)
    for _ in range(3):
        torch.full((1000,), 7, dtype=torch.int32)  # leaves memory that is not zero
        assert torch.empty(1000, dtype=torch.int32, device=CUDA).tolist() == [0] * 1000
        like = torch.empty_like(torch.ones(1000, dtype=torch.int32, device=CUDA))
        assert like.tolist() == [0] * 1000


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
    for length, new in ((64, 1), (17, 0), (1, 0)):
        call = partial(add, x[:length], kernel=add_any_kernel)
        assert variants(call) == new, "a length that is not specialised"
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
        lambda x: x[[0, 2]],
        lambda x: add(x, num_warps=2),  # compiles
    ],
)
def test_what_a_capture_refuses(step):
    with pytest.raises(CaptureError, match="capturing"):
        captured(lambda: step(torch.ones(3, device=CUDA)))


def test_a_time_can_be_taken():
    x = on_gpu()
    assert measure(lambda: x + 1).median_s > 0
