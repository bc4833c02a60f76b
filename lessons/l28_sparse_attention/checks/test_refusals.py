"""Wrong arguments are refused in one line that names them."""

import torch

from lessons.l28_sparse_attention.index_scores import index_scores
from lessons.l28_sparse_attention.lab.testing import DEVICE, index_inputs, paged, some_keys
from lessons.l28_sparse_attention.optimized import sparse_mla
from lessons.l28_sparse_attention.top_k import top_k
from lessons.toolbox.proof.refusals import assert_message


def test_wrong_arguments_are_refused():
    case = paged([9, 5])
    names = ("q", "weights", "keys", "scales", "block_table", "sequences", "positions")
    inputs = dict(zip(names, index_inputs(case, 9))) | {"max_context_len": 9}
    for change, message in (
        (dict(weights=case.weights[:, :1]), r"weights, keys: got .*accepted: \[T, Hi, Di\]"),
        (dict(weights=case.weights.double()), "float64"),
        (dict(keys=case.keys.half()), "float16"),
        (dict(scales=case.keys[..., 0]), "uint8, because of scales"),
        (dict(q=case.q_index[..., :12], keys=case.keys[..., :12]), "a power of two"),
        (dict(block_table=case.block_table.long()), "block_table: got torch.int64"),
        (dict(sequences=case.sequences + 1), "sequences: got values from 1 to 2"),
        (dict(positions=case.positions + 100), "positions: got values"),
        (dict(positions=case.positions[:1]), r"positions: .*\[2\]"),
        (dict(max_context_len=0), "max_context_len: got 0"),
    ):
        assert_message(index_scores, inputs | change, message)
    scores = torch.randn(2, 9, device=DEVICE)
    for change, message in (
        (dict(k=0), "k: got 0"),
        (dict(scores=scores.double()), "float64"),
        (dict(scores=scores[0]), "scores: got"),
        (dict(scores=scores.T), "dense rows"),
        (dict(lengths=torch.tensor([1, 10])), "lengths: got values from 1 to 10"),
        (dict(lengths=torch.tensor([1])), "lengths: got"),
    ):
        assert_message(top_k, dict(scores=scores, k=3) | change, message)
    names = ("q", "latents", "block_table", "indices", "sequences", "softmax_scale", "kv_lora_rank")
    given = case.q, case.latents, case.block_table, some_keys(case, 4), case.sequences, 0.2, 32
    arguments = dict(zip(names, given))
    for change, message in (
        (dict(q=case.q.half()), "q, latents: got torch.float16"),
        (dict(q=case.q[..., :40]), r"q, latents: got \("),
        (dict(kv_lora_rank=40), "kv_lora_rank: got 40"),
        (dict(indices=arguments["indices"].long()), "indices: got torch.int64"),
        (dict(indices=arguments["indices"] + 100), "indices: got values"),
        (dict(indices=arguments["indices"][:1]), r"accepted: \[2, K\]"),
        (dict(num_splits=0), "num_splits: got 0"),
    ):
        assert_message(sparse_mla, arguments | change, message)
