"""What a layer with a state costs beside one with a cache: bytes that it keeps, bytes that a step
moves, FLOPs of a prompt, and the context from which it wins.

    python -m lessons.l27_states.lab.costs          the table for Qwen3-Next

All are counts from shapes, nothing is measured. States are float32, K and V and a convolution's
inputs 16 bits. Shapes: config.json of Qwen3-Next-80B-A3B, as transformers' Qwen3NextConfig has it.
"""

import sys
from dataclasses import dataclass

from lessons.l27_states.prompts import CHUNK

STATE_ITEMSIZE, ITEMSIZE = 4, 2


@dataclass(frozen=True)
class StateLayer:
    """Heads of [key_dim, value_dim], and a convolution over q, k and v of all heads, which has
    key_heads heads of q and of k.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def state_bytes(self) -> int:
        """Of one sequence's matrices, in bytes."""
        return self.heads * self.key_dim * self.value_dim * STATE_ITEMSIZE

    @property
    def conv_bytes(self) -> int:
        """Of one sequence's last conv_width − 1 inputs, in bytes."""
        channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        return channels * (self.conv_width - 1) * ITEMSIZE

    @property
    def kept_bytes(self) -> int:
        """All that a sequence keeps, whatever its context, in bytes."""
        return self.state_bytes + self.conv_bytes

    @property
    def step_bytes(self) -> int:
        """What a decode step reads and writes for a sequence, in bytes."""
        return 2 * self.kept_bytes

    @property
    def step_flops(self) -> int:
        """Of a token by the recurrence: fade, read by k, write, read by q."""
        return 7 * self.heads * self.key_dim * self.value_dim

    def chunk_flops(self, chunk: int = CHUNK) -> float:
        """Of a token of a prompt in chunks, as chunk_kernels.py multiplies: k · k and q · k, the
        inverse by substitution and its two products, the two products with u, and W S₀, S₀ᵀ q and
        Kᵀ U with the state.
        """
        pairs = chunk * (2 * 2 * self.key_dim + 2 * self.key_dim + 2 * 2 * self.value_dim)
        inverse = 2 * chunk * chunk
        with_state = 3 * 2 * self.key_dim * self.value_dim
        return self.heads * (pairs + inverse + with_state)


@dataclass(frozen=True)
class CacheLayer:
    """Softmax attention: heads of head_dim, kv_heads of K and V."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """K and V of one token, in bytes."""
        return 2 * self.kv_heads * self.head_dim * ITEMSIZE

    def prompt_flops(self, context: float) -> float:
        """Of a token of a prompt of so many tokens, in the mean: it sees half of them."""
        return 4 * self.heads * self.head_dim * context / 2


@dataclass(frozen=True)
class Hybrid:
    """A model with layers of both kinds."""

    name: str
    state: StateLayer
    cache: CacheLayer
    state_layers: int
    cache_layers: int

    @property
    def layers(self) -> int:
        return self.state_layers + self.cache_layers

    def kept_bytes(self, context: int) -> int:
        """Of one sequence in all layers, in bytes."""
        return self.snapshot_bytes + context * self.token_bytes

    @property
    def snapshot_bytes(self) -> int:
        """A copy of one sequence's states in all layers, in bytes."""
        return self.state_layers * self.state.kept_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers that have them, in bytes."""
        return self.cache_layers * self.cache.token_bytes

    def cached_bytes(self, context: int) -> int:
        """The same if all its layers were like its cache layers."""
        return self.layers * context * self.cache.token_bytes


QWEN3_NEXT = Hybrid(
    "Qwen3-Next-80B-A3B",
    StateLayer(heads=32, key_heads=16, key_dim=128, value_dim=128, conv_width=4),
    CacheLayer(heads=16, kv_heads=2, head_dim=256),
    state_layers=36,
    cache_layers=12,
)


def even_memory(model: Hybrid = QWEN3_NEXT) -> float:
    """Tokens whose K and V in a cache layer take as much memory as a state layer."""
    return model.state.kept_bytes / model.cache.token_bytes


def even_step(model: Hybrid = QWEN3_NEXT) -> float:
    """The context at which a decode step moves as many bytes in both: a state is read and written,
    K and V are read.
    """
    return model.state.step_bytes / model.cache.token_bytes


def even_prompt(model: Hybrid = QWEN3_NEXT, chunk: int = CHUNK) -> float:
    """The length of a prompt at which both have as many FLOPs."""
    return model.state.chunk_flops(chunk) / model.cache.prompt_flops(1)


def even_snapshot(model: Hybrid = QWEN3_NEXT) -> float:
    """Tokens whose K and V in all layers that have them take as much memory as a snapshot."""
    return model.snapshot_bytes / model.token_bytes


def given_bytes(model: Hybrid = QWEN3_NEXT) -> int:
    """What the state layers are given for one token, in bytes: the channels before the convolution
    in 16 bits, log_decay and beta of each head in float32.
    """
    layer = model.state
    channels = 2 * layer.key_heads * layer.key_dim + layer.heads * layer.value_dim
    return model.state_layers * (channels * ITEMSIZE + 2 * layer.heads * STATE_ITEMSIZE)


@dataclass(frozen=True)
class DraftBytes:
    """Of one sequence that drafts: what it keeps, and what a step moves for its states, in bytes.
    after_rejection: of a step in which a token is rejected.
    """

    kept: int
    moved: int
    after_rejection: int


def state_at_each_token(drafted: int, model: Hybrid = QWEN3_NEXT) -> DraftBytes:
    """One state read, one written for each token."""
    state, tokens = model.snapshot_bytes, 1 + drafted
    return DraftBytes(tokens * state, (1 + tokens) * state, (1 + tokens) * state)


def copied_and_repeated(drafted: int, model: Hybrid = QWEN3_NEXT) -> DraftBytes:
    """A copy before the step, and what the layers were given: reference/features/states."""
    state, given = model.snapshot_bytes, (1 + drafted) * given_bytes(model)
    return DraftBytes(2 * state + given, 4 * state + given, 6 * state + 2 * given)


def main() -> int:
    """Print the table."""
    model = QWEN3_NEXT
    print(f"{model.name}: a state layer beside a cache layer")
    print(f"  keeps {model.state.kept_bytes:,} bytes, or {model.cache.token_bytes:,} a token")
    print(
        f"  even in memory at {even_memory():,.0f} tokens, in a step's bytes at {even_step():,.0f}"
    )
    print(f"  even in a prompt's FLOPs at {even_prompt():,.0f} tokens")
    print(f"  {'context':>9} {'hybrid, MB':>11} {'all cache layers, MB':>21}")
    for context in (100, 1000, 8192, 32768, 131072):
        sizes = model.kept_bytes(context) / 1e6, model.cached_bytes(context) / 1e6
        print(f"  {context:>9,} {sizes[0]:>11,.1f} {sizes[1]:>21,.1f}")
    block = 16 * model.token_bytes
    print(
        f"  a snapshot of all states has {model.snapshot_bytes:,} bytes, K and V of a block of 16"
    )
    print(f"  tokens {block:,}: even at {even_snapshot():,.0f} tokens")
    for way in (state_at_each_token, copied_and_repeated):
        found = way(3)
        print(f"  3 drafts, {way.__name__}: keeps {found.kept / 1e6:.1f} MB, a step moves")
        print(f"    {found.moved / 1e6:.1f} MB, with a rejection {found.after_rejection / 1e6:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
