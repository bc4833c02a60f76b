"""Proves that waves over blocks give the tokens of one request at a time, whatever the memory."""

from collections import deque

import pytest
import torch

from lessons.l02_naive_attention import naive as one_at_a_time
from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l02_naive_attention.request import read_requests
from lessons.l02_naive_attention.sampling import SamplingParams
from lessons.l03_kv_cache.batch import new_batch
from lessons.l12_paged_kv import naive, optimized, runner
from lessons.l12_paged_kv.blocks import BlockManager, OutOfBlocks
from lessons.l12_paged_kv.generate import Waves, blocks_of_lesson_11, generate
from lessons.l12_paged_kv.kernels import latents, stand_ins
from lessons.l12_paged_kv.kernels.stand_ins import LESSON_12_TORCH, paged_batch
from lessons.l12_paged_kv.lab.testing import CONFIG, DEVICE, MODELS, new_model, new_prompts
from lessons.l12_paged_kv.more.swap import HostSwap
from lessons.l12_paged_kv.naive import LESSON_12_GATHERED
from lessons.l12_paged_kv.optimized import LESSON_12
from lessons.l12_paged_kv.runner import PagedRunner, new_pool, paged_rung_of
from lessons.toolbox.proof.numerics import assert_same_bits

LENGTHS, LIMITS = (3, 1, 12, 7, 5), [6, 11, 1, 0, 14]
MEMORIES = [
    dict(),
    dict(block_size=1, num_blocks=18),  # the longest request alone fills it
    dict(block_size=2, num_blocks=9),
    dict(block_size=3, num_blocks=8),
    dict(block_size=5, num_blocks=40, max_num_seqs=2),
    dict(block_size=64),
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_paged_waves_give_the_tokens_of_one_at_a_time(kind, memory, seed):
    """In float64, where nothing ties; with a window in the model of heads."""
    model, prompts = MODELS[kind](), new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    seen = [[] for _ in prompts]
    got = generate(model, prompts, LIMITS, None, lambda r, t: seen[r].append(t), **memory)
    assert got == seen == expected


def test_in_float32_too(seed):
    model, prompts = new_model(torch.float32), new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    for memory in MEMORIES:
        assert generate(model, prompts, LIMITS, **memory) == expected


def test_reservations_give_the_same_tokens(seed):
    model, prompts = new_model(), new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    for memory_tokens in (18, 40, 1000):
        got = naive.generate(model, prompts, LIMITS, memory_tokens=memory_tokens)
        assert got == expected


def test_sampled_requests_draw_what_they_would_draw_alone(seed):
    model, prompts = new_model(), new_prompts(*LENGTHS)
    sampling = [SamplingParams(temperature=0.9, top_p=0.9, seed=n % 2) for n in range(5)]
    expected = one_at_a_time.generate(model, prompts, LIMITS, sampling)
    for memory in MEMORIES:
        assert generate(model, prompts, LIMITS, sampling, **memory) == expected


def test_many_random_loads(seed, request):
    """Random prompts, limits, block sizes and pools, just large enough or larger."""
    model = new_model()
    draw = torch.Generator().manual_seed(seed)

    def between(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    for _ in range(200 if request.config.getoption("all") else 12):
        count = between(1, 7)
        prompts = new_prompts(*(between(1, 12) for _ in range(count)))
        limits = [between(0, 9) for _ in prompts]
        size = between(1, 6)
        most = max(len(p) + n - 1 for p, n in zip(prompts, limits))
        blocks = max(1, -(-most // size)) + between(0, 8)
        got = generate(model, prompts, limits, num_blocks=blocks, block_size=size)
        assert got == one_at_a_time.generate(model, prompts, limits)


def waves_of(num_blocks, block_size, prompts, limits, model=None):
    """Waves that have served these requests."""
    model = model or new_model()
    paged = PagedRunner.for_model(model, num_blocks, block_size, 64)
    waves, requests = Waves(paged), read_requests(CONFIG, prompts, limits)
    with torch.inference_mode():
        waves.run(deque(requests))
    return waves, [request.output for request in requests]


def test_more_requests_fit_at_once_than_reservations_do(seed):
    """Four of at last 10 tokens in a memory of 24: two reservations; in blocks all four run."""
    prompts = new_prompts(2, 2, 2, 2)
    waves, _ = waves_of(12, 2, prompts, [9, 3, 3, 3])
    assert waves.most_running == 4 > 24 // 10
    assert waves.runner.blocks.num_free == 12


def test_who_has_no_block_waits_on_the_host(seed):
    model, prompts = new_model(), new_prompts(4, 4, 4)
    waves, outputs = waves_of(6, 2, prompts, [8, 8, 8], model)
    assert outputs == one_at_a_time.generate(model, prompts, 8)
    assert waves.swap.swapped_bytes > 0 and not waves.swap.away
    assert waves.runner.blocks.num_free == 6 and not waves.runner.held


def test_swapped_blocks_come_back_elsewhere_bit_by_bit(seed):
    paged = PagedRunner.for_model(new_model(), 8, 2, 64)
    first, second = new_prompts(5, 3)
    paged.step({0: first, 1: second})
    swap = HostSwap(paged)

    def rows():
        table = torch.tensor(paged.blocks.tables[0])
        return [paged.pool.blocks(x)[:, table].flatten(1, 2)[:, :5] for x in swap.slots]

    before, old = [x.clone() for x in rows()], paged.blocks.tables[0]
    swap.swap_out(0)
    assert paged.blocks.num_free == 6 and swap.blocks_of(0) == 3
    for slots in swap.slots:  # somebody else writes over all that is free
        paged.pool.blocks(slots)[:, list(paged.blocks.pool.free)] = float("nan")
    paged.step({2: first})
    swap.swap_in(0)
    assert paged.blocks.tables[0] != old and paged.held[0] == 5
    for x, y in zip(rows(), before):
        assert_same_bits(x, y)
    expected = 2 * sum(x.nbytes for x in before) * 6 // 5  # three whole blocks, both ways
    assert swap.swapped_bytes == expected


def test_without_room_a_sequence_stays_away(seed):
    paged = PagedRunner.for_model(new_model(), 4, 2, 64)
    first, second = new_prompts(4, 4)
    paged.step({0: first})
    swap = HostSwap(paged)
    swap.swap_out(0)
    paged.step({1: [*second, 1]})
    with pytest.raises(OutOfBlocks):
        swap.swap_in(0)
    paged.free(1)
    swap.swap_in(0)
    assert paged.held == {0: 4}


# ---------------------------------------------------------------- wrong versions


def loses_the_last(self, sequence):
    """swap_in that restores all blocks but the last."""
    held, kept = self.away.pop(sequence)
    self.runner.blocks.grow(sequence, 0, held)
    self.runner.held[sequence] = held
    table = torch.tensor(self.runner.blocks.tables[sequence][:-1], dtype=torch.int64)
    for slots, x in zip(self.slots, kept):
        self.runner.pool.blocks(slots)[:, table] = x[:, :-1]


def brings_back_keys_only(self, sequence):
    """swap_in that leaves in V what others have written there."""
    held, (k, _) = self.away.pop(sequence)
    self.runner.blocks.grow(sequence, 0, held)
    self.runner.held[sequence] = held
    table = torch.tensor(self.runner.blocks.tables[sequence])
    self.runner.pool.blocks(self.slots[0])[:, table] = k


@pytest.mark.parametrize("wrong", [loses_the_last, brings_back_keys_only])
def test_a_wrong_swap_is_found(wrong, seed, monkeypatch):
    model, prompts = new_model(), new_prompts(4, 4, 4, 4)
    expected = one_at_a_time.generate(model, prompts, 9)
    monkeypatch.setattr(HostSwap, "swap_in", wrong)
    assert generate(model, prompts, 9, num_blocks=7, block_size=2) != expected


def test_freed_blocks_that_are_read_are_found(seed, monkeypatch):
    """A manager that gives a block back too early: somebody else writes into it."""

    def gives_back_the_first(self, sequence, held, tokens, grow=BlockManager.grow):
        copies = grow(self, sequence, held, tokens)
        if held:
            first = self.tables[sequence][0]
            if self.pool.owners[first]:
                self.pool.release([first])
        return copies

    model, prompts = new_model(), new_prompts(4, 4, 4, 4)
    expected = one_at_a_time.generate(model, prompts, 9)
    monkeypatch.setattr(BlockManager, "grow", gives_back_the_first)
    try:
        got = generate(model, prompts, 9, num_blocks=14, block_size=4)
    except (ValueError, OutOfBlocks):
        return
    assert got != expected


# ---------------------------------------------------------------- operations, step by step

KERNELS = LESSON_12_TORCH._replace(prefill=optimized.prefill, decode=optimized.decode)


@pytest.mark.parametrize("ops", [LESSON_12_GATHERED, LESSON_12_TORCH, KERNELS, LESSON_12])
def test_steps_over_poisoned_pages(ops, seed):
    """A mixed step (decode, chunk, fresh prompt), then single tokens, over pages full of NaN."""
    device = DEVICE if ops in (KERNELS, LESSON_12) else "cpu"
    model = new_model(torch.float32).to(device)
    a, b, c = new_prompts(9, 11, 4)
    whole = [
        model.logits(model(torch.tensor(x, device=device), whole_sequence(model, len(x))))
        for x in (a, b, c)
    ]
    pool = runner.KVPool(CONFIG, 20, 3, ops, device=device, max_context_len=64)
    for slots in (pool.k_slots, pool.v_slots):
        slots.fill_(float("nan"))
    tables = [[7, 2, 19], [0, 11, 5, 6], [3, 18]]

    def run(chunks, tables):
        # The work list is made on the CPU, and only LESSON_12_TORCH reads it.
        batch = paged_batch(chunks, 3, tables, device)
        return model.logits(model(batch.tokens, pool.attending(batch)))

    run([(a[:8], 0), (b[:4], 0)], tables[:2])
    mixed = run([(a[8:], 8), (b[4:10], 4), (c[:3], 0)], tables)
    want = torch.cat([whole[0][8:], whole[1][4:10], whole[2][:3]])
    torch.testing.assert_close(mixed, want, atol=1e-4, rtol=1e-4)
    single = run([(b[10:], 10), (c[3:], 3)], tables[1:])
    want = torch.cat([whole[1][10:], whole[2][3:]])
    torch.testing.assert_close(single, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("by_kernel", [False, True], ids=["PyTorch", "the kernel"])
def test_latents_over_pages_in_any_order(by_kernel, seed, monkeypatch):
    """A pool of latents through a table beside the model that expands everything."""
    device = DEVICE if by_kernel else "cpu"
    model = MODELS["latents"]().float().to(device)
    tokens = torch.randint(0, CONFIG.vocab_size, (23,)).tolist()
    want = model.logits(model(torch.tensor(tokens, device=device), whole_sequence(model, 23)))
    if by_kernel:
        monkeypatch.setattr(latents, "kernel_fits", lambda q: True)
    prepared = paged_rung_of(model).prepare(model)
    pool = new_pool(prepared, 12, 4, 64)
    decode = latents.decode if by_kernel else naive.attend
    pool.ops = pool.ops._replace(decode=decode)
    pool.k_slots.fill_(float("nan"))
    table, held = [[9, 2, 11, 0, 7, 4]], 0
    for new in (20, 1, 1, 1):
        batch = new_batch([(tokens[held : held + new], held)], 4, device, table)
        got = prepared.logits(prepared(batch.tokens, pool.attending(batch)))
        rows = slice(held, held + new)
        torch.testing.assert_close(got, want[rows], atol=1e-4, rtol=1e-4)
        held += new


# ---------------------------------------------------------------- bad input


def test_prompts_run_on_the_device_of_their_tensors():
    """PyTorch's "meta" refuses a tensor of the CPU, as a GPU does."""
    q, seven = torch.empty(3, 4, 16, device="meta"), torch.empty(7, 2, 16, device="meta")
    assert stand_ins.chunk_attention(q, seven, seven, 0.25, None).is_meta


def test_a_request_longer_than_the_pool_is_refused(seed):
    model, prompts = new_model(), new_prompts(5, 2)
    with pytest.raises(ValueError, match=r"num_blocks: got 3 of 2 tokens; .* 9 tokens") as error:
        generate(model, prompts, 5, num_blocks=3, block_size=2)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="memory_tokens: got 8; accepted: 9 or more"):
        naive.generate(model, prompts, 5, memory_tokens=8)


def test_nobody_asks_for_a_token(seed):
    assert generate(new_model(), new_prompts(4, 9), 0) == [[], []]
    assert naive.generate(new_model(), new_prompts(4, 9), 0, memory_tokens=1) == [[], []]


def test_the_memory_of_lesson_11():
    requests = read_requests(CONFIG, new_prompts(3, 10), [5, 2])
    assert blocks_of_lesson_11(requests, 4) == 6  # two places of 11 tokens


@pytest.mark.gpu
def test_the_tokens_of_a_gpu(seed):
    model = new_model(torch.float32, head_dim=16, hidden_size=64).cuda()
    prompts = new_prompts(*LENGTHS)
    expected = one_at_a_time.generate(model, prompts, LIMITS)
    for memory in MEMORIES:
        assert generate(model, prompts, LIMITS, **memory) == expected
