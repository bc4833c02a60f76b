# Yours to edit: put your code in place of each `raise NotImplementedError`, then run  make check LESSON=21
# Generated from solutions/l21_multi_lora.py, checksum 9570914b9643. Generating again never overwrites your edits.
# ruff: noqa
"""Exercises of lesson 21: what an adapter costs, a matrix that changes its adapter, the kernel of
mixed batches, and slots that are shared.
"""

from dataclasses import dataclass

from torch import Tensor

from lessons.toolbox.exercises.exercise import exercise
from lessons.toolbox.kernels.triton_ import tl, triton


@exercise("21.1", "Predict: what an adapter costs", minutes=15, difficulty=1)
def adapter_plan(
    shapes: list[tuple[int, int]],
    num_layers: int,
    rank: int,
    num_adapters: int,
    base_bytes: int,
    memory_bytes: int,
) -> tuple[int, int, int, float]:
    """The bytes of adapters beside a base model. All numbers are stored in 16 bits.

    shapes: (N, K) of each linear layer of a block that has an adapter; the model has num_layers
    equal blocks. base_bytes: of all weights of the base model. A decode step reads the base once,
    and each of the num_adapters adapters of its batch once.

    Returns, in this order:
        the bytes of one adapter
        how many adapters fit into memory_bytes beside one base model
        how many models fit into memory_bytes, if each adapter is merged into a base of its own
        how many times as many bytes a step reads as with the base alone
    Errors: none to raise.

    Example: shapes [(6, 4), (2, 4)], 3 blocks, rank 2, 4 adapters, a base of 1000 bytes in 3500
        a block has 2 · (6 + 4) + 2 · (2 + 4) = 32 numbers, an adapter 96 numbers: 192 bytes
        2500 bytes are left: 13 adapters; but merged only 3 models
        a step reads 1000 + 4 · 192 bytes                              -> (192, 13, 3, 1.768)
    Write down your guess first: Llama-3-70B (141.1 GB) with adapters of rank 64 on all seven
    matrices of its 80 blocks, in two GPUs of 80 GB.
    """
    raise NotImplementedError("Exercise 21.1: Predict: what an adapter costs")


@dataclass
class LayerAdapter:
    """What PEFT stores for one linear layer, and the keys of its config that count for it.

    lora_a: [r, K], lora_b: [N, r].
    """

    lora_a: Tensor
    lora_b: Tensor
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False


@exercise("21.2", "One matrix changes its adapter", minutes=25, difficulty=2)
def switch_adapter(weight: Tensor, old: LayerAdapter | None, new: LayerAdapter | None) -> Tensor:
    """The matrix of a linear layer with `new` merged into it, [N, K] of weight's dtype.

    weight: [N, K], the base's matrix with `old` merged into it. None: no adapter. A linear layer
    with an adapter computes
        y = x Wᵀ + scaling · (x Aᵀ) Bᵀ
    where scaling is alpha / r, and with rsLoRA alpha / √r. So one matrix does the same as W, A and
    B together. The adapter's matrices are float32. Add in float32 or wider, and round to weight's
    dtype once, at the end. The arguments stay.

    Errors: ValueError that names use_dora, if one of the adapters has it, because DoRA also scales
    each output of the merged matrix.

    Example: weight [[1, 2]], no old adapter; new: A [[1, 0], [0, 1]], B [[3, 4]], alpha 4
        r is 2, so scaling is 2; B A = [[3, 4]]                       -> [[7, 10]]
        back to no adapter                                            -> [[1, 2]]
    """
    raise NotImplementedError("Exercise 21.2: One matrix changes its adapter")


@triton.jit
def lora_row_kernel(
    x_ptr,
    a_ptr,
    b_ptr,
    row_slots_ptr,
    ranks_ptr,
    scaling_ptr,
    out_ptr,
    size,
    num_outputs,
    max_rank,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one row. Adds the correction of the row's adapter to its row of out.

    Shapes and meaning as in `lora_rows` below; all tensors are contiguous. BLOCK_R: a power of two,
    max_rank or more. BLOCK_K, BLOCK_N: powers of two, how many columns of x and of out to take at a
    time; size and num_outputs need not be multiples of them.
    """
    raise NotImplementedError("Exercise 21.3: The kernel: each row its own adapter")


@exercise(
    "21.3",
    "The kernel: each row its own adapter",
    minutes=45,
    difficulty=3,
    replaces="lessons.l21_multi_lora.layers:add_lora_for",
    through="reference.ladder.yours.adapters:add_lora_for",
)
def lora_rows(
    base: Tensor, x: Tensor, a: Tensor, b: Tensor, row_slots: Tensor, ranks: Tensor, scaling: Tensor
) -> Tensor:
    """base + scaling · (x Aᵀ) B, where each row has the A, B and scaling of its slot: [T, N].

    base: [T, N], what the base's matrix gave; x: [T, K]. a: [S, max_rank, K]; b: [S, max_rank, N],
    so B is stored with its ranks in front. row_slots: [T] int32, the slot of each row, and -1 for a
    row without an adapter, which stays as it is. ranks: [S] int32. Slot s uses the first ranks[s]
    rows of a[s] and of b[s]; what comes after them is of an earlier adapter, and may be NaN.
    scaling: [S] float32. Everything else is float32 as well.

    The wrapper is done. It launches `lora_row_kernel` above, which is yours to write. This is BGMV:
    a program for each row, because the rows of a decode step belong to different requests. Aim: no
    copy of A or B for each row. Errors: none to raise.

    Example: T = 3, K = N = 1, max_rank 1, a = [[[2]], [[3]]], b = [[[10]], [[10]]], ranks [1, 1],
        scaling [1, 0.5], base zeros, x = [[1], [1], [1]], row_slots [1, -1, 0]
        row 0: 0.5 · 3 · 10 = 15; row 1: nothing; row 2: 2 · 10 = 20    -> [[15], [0], [20]]
    """
    out = base.clone()
    max_rank = a.shape[1]
    lora_row_kernel[(len(x),)](
        x,
        a,
        b,
        row_slots,
        ranks,
        scaling,
        out,
        x.shape[1],
        out.shape[1],
        max_rank,
        BLOCK_R=triton.next_power_of_2(max_rank),
        BLOCK_K=16,
        BLOCK_N=16,
    )
    return out


@exercise("21.4", "Find the bugs: slots and prefixes", minutes=40, difficulty=3)
def run_slots(
    events: list[tuple[str, str, list[int]]], num_slots: int, block_size: int
) -> tuple[list[tuple[int, int] | None], int]:
    """Which slot each request's adapter gets, how much of its prompt is in the prefix cache, and
    how often an adapter was loaded.

    events, in their order: ("start", adapter, prompt), a request wants to run; ("end", adapter,
    []), one request with this adapter ends. Several may run with one adapter.

    A start gives (slot, tokens). If the adapter is in a slot, it is that one. If not, it is
    loaded into the free slot with the lowest number. If none is free, it takes the slot of the
    adapter that was started least recently, among those that no running request uses. If all are in
    use, the request cannot start: the result is None, and nothing changes.
    tokens: of the prompt's beginning that an earlier start with the same adapter has computed, in
    whole blocks of block_size tokens. K and V that were computed stay in the cache, wherever the
    adapter goes. Errors: none to raise.

    Returns the result of each start, and the number of loads.

    Example: 1 slot, blocks of 2
        start sql [5, 6, 7]     -> (0, 0), loaded
        start doc [5, 6, 7]     -> None, because sql is in use
        end sql
        start doc [5, 6, 7]     -> (0, 0), loaded: K and V of sql are not those of doc
        end doc
        start sql [5, 6, 9]     -> (0, 2), loaded
        -> ([(0, 0), None, (0, 0), (0, 2)], 3)

    The code below is right for one adapter and one slot. It has four bugs. Delete the first line
    and find them.
    """
    raise NotImplementedError("Exercise 21.4: Find the bugs: slots and prefixes")
    slots: dict[str, int] = {}  # least recently started first
    users: dict[str, int] = {}
    computed: set[tuple[int, tuple[int, ...]]] = set()
    results, loads = [], 0
    for kind, adapter, prompt in events:
        if kind == "end":
            users[adapter] = 0
            continue
        if adapter not in slots:
            free = [slot for slot in range(num_slots) if slot not in slots.values()]
            if free:
                slots[adapter] = free[0]
            else:
                idle = [other for other in slots if not users.get(other)]
                if not idle:
                    results.append(None)
                    continue
                slots[adapter] = slots[idle[0]]
            loads += 1
        slot = slots[adapter]
        users[adapter] = users.get(adapter, 0) + 1
        ends = range(block_size, len(prompt) + 1, block_size)
        prefixes = [(slot, tuple(prompt[:end])) for end in ends]
        found = sum(prefix in computed for prefix in prefixes)
        computed.update(prefixes)
        results.append((slot, found * block_size))
    return results, loads
