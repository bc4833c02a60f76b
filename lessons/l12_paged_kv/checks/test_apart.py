"""Proves that a step with prompts and single tokens in it is cut between them, and nothing is
lost.
"""

import pytest
import torch

from lessons.l02_naive_attention.naive import whole_sequence
from lessons.l03_kv_cache.batch import new_batch
from lessons.l12_paged_kv.kernels import latents
from lessons.l12_paged_kv.kernels.apart import apart
from lessons.l12_paged_kv.lab.testing import CONFIG, DEVICE, MODELS
from lessons.l12_paged_kv.runner import new_pool, paged_rung_of


@pytest.mark.parametrize(
    "counts, in_front",
    [((1, 1, 5), 2), ((1, 4, 1), 1), ((5, 1, 1), 0), ((1, 1, 1), 0), ((2, 3, 2), 0)],
)
def test_single_tokens_in_front_of_prompts_get_a_kernel_of_their_own(counts, in_front, seed):
    """What is handed to each kernel; and together they see what one kernel would have seen."""
    held = [3, 0, 7]
    chunks = [(list(range(count)), before) for count, before in zip(counts, held)]
    batch = new_batch(chunks, 4, "cpu", [[4, 1, 0], [2, 3, 5], [8, 7, 6]])
    assert (batch.num_decodes, batch.num_decode_tokens) == (in_front, in_front)
    q, seen = torch.randn(sum(counts), 2, 8), []

    def noting(name):
        def kernel(q, part):
            seen.append((name, q, part))
            return 2 * q

        return kernel

    out = apart(q, batch, noting("decode"), noting("prefill"))
    assert torch.equal(out, 2 * q)
    assert [name for name, _, _ in seen] == ["decode", "prefill"][not in_front :]
    lengths = torch.cat([part.context_lens for *_, part in seen]).tolist()
    assert lengths == [count + before for count, before in zip(counts, held)]
    first = 0
    for _, queries, part in seen:
        own = part.cu_seqlens_q.diff().tolist()
        assert part.cu_seqlens_q[0] == 0 and part.cu_seqlens_q[-1] == len(queries)
        assert own == list(counts[first : first + len(own)]) and max(own) <= part.max_seqlen_q
        assert torch.equal(part.block_table, batch.block_table[first : first + len(own)])
        first += len(own)


@pytest.mark.parametrize("prompts", [(4, 11), (0, 3)], ids=["two", "one"])
def test_single_latents_are_read_as_they_lie_beside_prompts(prompts, seed, monkeypatch):
    """Two single queries in front of two prompts, or of one that is shorter than what they see,
    over pages full of NaN. prompts: tokens of the third sequence that ran before, and in all.
    """
    model = MODELS["latents"]().float().to(DEVICE)
    texts = [torch.randint(0, CONFIG.vocab_size, (count,)).tolist() for count in (9, 6, 11, 3)]
    want = [
        model.logits(model(torch.tensor(text, device=DEVICE), whole_sequence(model, len(text))))
        for text in texts
    ]
    monkeypatch.setattr(latents, "kernel_fits", lambda q: True)
    seen, decode = [], latents.decode

    def noted(q, *arguments):
        seen.append(len(q))
        return decode(q, *arguments)

    prepared = paged_rung_of(model).prepare(model)
    pool = new_pool(prepared, 16, 4, 64)
    pool.ops = latents.LATENTS_12._replace(decode=noted)
    pool.k_slots.fill_(float("nan"))
    tables = [[9, 2, 11], [0, 7], [4, 13, 15], [8]]

    def run(held, end):
        chunks = [(text[a:b], a) for text, a, b in zip(texts, held, end) if b > a]
        owned = [table for table, a, b in zip(tables, held, end) if b > a]
        batch = new_batch(chunks, 4, DEVICE, owned)
        return prepared.logits(prepared(batch.tokens, pool.attending(batch)))

    before, end = prompts
    last = 3 if before else 0  # of the fourth sequence
    run((0, 0, 0, 0), (8, 5, before, 0))
    assert not seen
    got = run((8, 5, before, 0), (9, 6, end, last))
    assert seen == [2] * CONFIG.num_hidden_layers
    rows = torch.cat([want[0][8:], want[1][5:], want[2][before:end], want[3][:last]])
    torch.testing.assert_close(got, rows, atol=1e-4, rtol=1e-4)
