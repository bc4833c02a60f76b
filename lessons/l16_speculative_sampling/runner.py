"""A paged model that gives logits for several positions of a sequence, and can go back.

runner.run_rows({0: [5, 9, 2]}, {0: 3})    # three new tokens, and the logits after each
runner.rewind(0, 7)                        # sequence 0 holds its first 7 tokens now

Going back costs nothing on the device. What was stored after token 7 stays where it is, and the
next step writes over it. Only blocks that hold no kept token are given back.
"""

import torch
from torch import Tensor

from lessons.l12_paged_kv.runner import PagedRunner


class RewindingRunner(PagedRunner):
    """Lesson 12's runner, with logits for the last rows of each chunk, and `rewind`."""

    @torch.inference_mode()
    def run_rows(self, new: dict[int, list[int]], counts: dict[int, int]) -> Tensor:
        """Run the new tokens of some sequences. Returns the logits after the last counts[sequence]
        of each: [R, V], one sequence after the other. Raises OutOfBlocks, as `step`.
        """
        hidden, _ = self.run(new)
        rows, end = [], 0
        for sequence, tokens in new.items():
            end += len(tokens)
            rows += range(end - counts[sequence], end)
        return self.model.logits(hidden[torch.tensor(rows, device=hidden.device)])

    def rewind(self, sequence: int, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of a sequence, which holds at least as many."""
        # A shared block that is kept is copied before the next write into it.
        self.blocks.cut(sequence, tokens)
        self.held[sequence] = tokens
