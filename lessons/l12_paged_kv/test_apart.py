"""Proves that a step with prompts and single tokens in it is cut between them, and nothing is lost."""

import pytest
import torch

from lessons.l03_kv_cache.batch import new_batch
from lessons.l12_paged_kv.apart import apart


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
