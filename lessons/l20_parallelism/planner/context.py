"""What decode context parallelism saves, and from which context on it is faster.

    saved = read_saved_s(model, machine, tp=8, dcp=8, cached=100_000)
    paid = talk_s(model, machine, tp=8, dcp=8, batch=1)

Ranks that share the tokens of a KV head keep and read 1/dcp of the cache each. For that they send
three more messages in every layer: the queries, the log-sum-exps, and the results. All of it is
prediction, as in links.py: a message takes the latency of a kernel that reads its peers' memory.
"""

from lessons.l01_roofline import calculators as calc
from lessons.l01_roofline.planner.models import ModelShape
from lessons.l20_parallelism.planner.links import Machine, all_to_all_s
from lessons.l20_parallelism.planner.shares import Layout, check_layout, part_of
from lessons.l20_parallelism.shards.decode_context import numbers_sent
from lessons.toolbox.model.arguments import refuse

VALUE_BYTES = {"q": 2, "lse": 4, "out": 2}  # as vLLM sends them


def check_dcp(model: ModelShape, tp: int, dcp: int) -> None:
    """Raise ValueError unless `dcp` ranks of `tp` hold copies of the same KV head."""
    check_layout(model, Layout(tp=tp))
    copies = max(1, tp // kv_heads_of(model))
    if dcp < 1 or copies % dcp:
        refuse("dcp", dcp, f"a divisor of {copies}, the ranks that hold the same KV head")


def kv_heads_of(model: ModelShape) -> int:
    """Heads whose keys and values a layer stores: with MLA one, the latent."""
    return 1 if model.kv_lora_rank else model.num_key_value_heads


def cache_bytes_per_token(model: ModelShape, tp: int, dcp: int, bits_per_kv: float = 16) -> float:
    """Bytes that a token keeps on each rank, in the mean."""
    check_dcp(model, tp, dcp)
    part = part_of(model, Layout(tp=tp), range(model.num_hidden_layers))
    return calc.kv_bytes_per_token(part, bits_per_kv) / dcp


def query_widths(model: ModelShape) -> tuple[int, int]:
    """Values of a query and of its result, for one head: with MLA as wide as the latent."""
    if model.kv_lora_rank:
        return model.kv_lora_rank + model.qk_rope_head_dim, model.kv_lora_rank
    return model.head_dim, model.value_dim


def talk_s(model: ModelShape, machine: Machine, tp: int, dcp: int, batch: int) -> float:
    """Seconds of the three more messages of all layers of a decode step. batch: new tokens."""
    check_dcp(model, tp, dcp)
    if dcp == 1:
        return 0.0
    heads = model.num_attention_heads // tp
    seconds = 0.0
    for kind, numbers in numbers_sent(batch, heads, *query_widths(model), dcp).items():
        # all_to_all_s takes bytes of which a share stays on the rank itself
        whole = numbers * VALUE_BYTES[kind] * dcp / (dcp - 1)
        seconds += all_to_all_s(whole, dcp, machine)
    return model.num_hidden_layers * seconds


def read_saved_s(
    model: ModelShape, machine: Machine, tp: int, dcp: int, cached: int, bits_per_kv: float = 16
) -> float:
    """Seconds that a decode step reads less. cached: tokens of all sequences together."""
    copied = cache_bytes_per_token(model, tp, 1, bits_per_kv)
    shared = cache_bytes_per_token(model, tp, dcp, bits_per_kv)
    return cached * (copied - shared) / machine.chip.memory_bytes_per_s


def break_even_context(
    model: ModelShape, machine: Machine, tp: int, dcp: int, batch: int, bits_per_kv: float = 16
) -> float:
    """Tokens of each of `batch` sequences from which on a step is faster with dcp than without."""
    each = read_saved_s(model, machine, tp, dcp, batch, bits_per_kv)
    return talk_s(model, machine, tp, dcp, batch) / each
