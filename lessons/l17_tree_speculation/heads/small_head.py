"""A last matrix for drafts: of the target's rows only those of the tokens that are used most.

The target's last matrix is a large part of a small draft, and a draft reads all of it for every
guess. But most tokens of a text are among a few. What the matrix leaves out is never guessed, and
comes from the target itself.

Sources: Zhao et al. 2025, FR-Spec (arXiv 2502.14856); the published EAGLE-3 drafts,
`draft_vocab_size` and `d2t`.
"""

import torch
from torch import Tensor, nn

from lessons.l02_naive_attention.decoder import Decoder
from lessons.toolbox.model.arguments import check_whole, refuse

# The logit of every other token. Its probability is 0, as that of -inf would be. But if a request
# allows only such tokens, they are equally likely and not nan.
NEVER = -1e4


class SmallHead(nn.Module):
    """Logits for `count` tokens of a vocabulary; those of all others are NEVER.

    ids: [count] int64, which tokens. linear: their rows of the target's last matrix.
    """

    ids: Tensor

    def __init__(self, vocab_size: int, hidden_size: int, count: int):
        super().__init__()
        check_whole(draft_vocab_size=count)
        if count > vocab_size:
            refuse("draft_vocab_size", count, f"at most {vocab_size}, the target's vocabulary")
        self.vocab_size = vocab_size
        self.register_buffer("ids", torch.arange(count))
        self.linear = nn.Linear(hidden_size, count, bias=False)

    @torch.no_grad()
    def read(self, target: Decoder, ids: Tensor) -> None:
        """Take these tokens, [count], and the target's rows for them."""
        self.ids.copy_(ids)
        self.linear.weight.copy_(target.lm_head.weight[ids])

    @property
    def is_part_of_a_vocabulary(self) -> bool:
        """Whether `ids` are tokens, and each of them is there once."""
        return sorted(set(self.ids.tolist()) & set(range(self.vocab_size))) == sorted(
            self.ids.tolist()
        )

    def forward(self, hidden: Tensor) -> Tensor:  # [T, hidden_size] -> [T, vocab_size]
        logits = hidden.new_full((len(hidden), self.vocab_size), NEVER)
        return logits.index_copy_(1, self.ids, self.linear(hidden))
