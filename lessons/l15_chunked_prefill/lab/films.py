"""A schedule as text: which request owns which block after each step, and how many tokens ran."""

from lessons.l12_paged_kv.blocks import BlockManager
from lessons.l15_chunked_prefill.lab.virtual import VirtualModel, new_request, run
from lessons.l15_chunked_prefill.preemption import PreemptiveScheduler

FREE = "·"


def block_film(
    kind: type[PreemptiveScheduler],
    asked: list[tuple[int, int]],
    num_blocks: int,
    block_size: int,
    max_num_batched_tokens: int,
) -> str:
    """One line a step: the blocks by the letter of their owner, then what each request ran.

    asked: (prompt tokens, answer tokens) of each request, all there at the beginning.
    """
    blocks = BlockManager(num_blocks, block_size)
    scheduler = kind(blocks, len(asked), max_num_batched_tokens)
    for row, (prompt, limit) in enumerate(asked):
        scheduler.add(new_request(row, list(range(prompt)), limit))
    lines = []
    model = VirtualModel(blocks)
    while not scheduler.is_idle:
        run(scheduler, model, lambda step: lines.append(film_line(blocks, step)))
    return "\n".join(f"step {number:2}  {line}" for number, line in enumerate(lines))


def film_line(blocks: BlockManager, step) -> str:
    """The pool during a step, and its chunks."""
    owners = [FREE] * blocks.num_blocks
    for row, table in blocks.tables.items():
        for block in table:
            owners[block] = chr(ord("A") + row)
    ran = [f"{chr(ord('A') + sequence.row)} {count}" for sequence, count in step.chunks]
    return "".join(owners) + "   " + ", ".join(ran)
