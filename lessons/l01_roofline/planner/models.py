"""The shapes of well-known models under config.json's names, and what follows from a shape alone:
parameters and KV bytes.

Sources: the config.json that each publisher ships beside the weights. `published` is the size that
the paper, the model card or the Hugging Face page states; a test holds the formula to it, and to
the models that transformers builds from the same values. Norms and biases are left out: they are
under 0.1 % of every model here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer, as far as its bytes and FLOPs depend on it. Sizes count elements,
    never bytes.
    """

    name: str
    published: str  # parameters, as `source` prints them
    source: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of q and k; not always hidden_size / num_attention_heads
    intermediate_size: int  # of a dense MLP
    vocab_size: int
    mlp_matrices: int = 3  # gate, up, down; 2 without a gate
    tie_word_embeddings: bool = False
    num_experts: int = 0  # mixture of experts; 0: every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0  # run for every token, beside the chosen ones
    num_dense_layers: int = 0  # layers before the first one with experts
    # multi-head latent attention (MLA): ranks of the compressed q and kv
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    # the part of head_dim that carries the position, shared by all heads of k
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0  # MLA only; elsewhere v is as wide as k
    attention_gate: bool = False  # q's projection has a gate for the output as well
    # layers that keep a state in the place of K and V (lesson 27)
    num_state_layers: int = 0
    state_layer_params: int = 0  # elements of the projections of one of them
    state_layer_bytes: int = 0  # what a sequence keeps in one of them, however long it is
    state_layer_flops: int = 0  # of a token's state in one of them, beside its projections
    # layers that are an MLP and nothing else (Nemotron-H); 0: each layer has one
    num_mlp_layers: int = 0
    # layers whose queries see the last `window` keys alone, of those with K and V (lesson 27)
    num_window_layers: int = 0
    window: int = 0

    @property
    def value_dim(self) -> int:
        """Width of one head of v, in elements."""
        return self.v_head_dim or self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token leaves in the cache, over all layers."""
        # MLA keeps the latent and one rotary key, and rebuilds k and v of every head from them.
        if self.kv_lora_rank:
            return self.num_kv_layers * (self.kv_lora_rank + self.qk_rope_head_dim)
        return self.num_kv_layers * 2 * self.num_key_value_heads * self.head_dim

    @property
    def num_kv_layers(self) -> int:
        """Layers that attend, and keep K and V of every token."""
        return self.num_hidden_layers - self.num_state_layers - self.num_mlp_layers

    @property
    def state_flops(self) -> int:
        """What a token's states cost in all layers that have one, token by token."""
        return self.num_state_layers * self.state_layer_flops

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many keys a query sees in each layer with K and V, full layers (None) first."""
        full = self.num_kv_layers - self.num_window_layers
        return (None,) * full + (self.window,) * self.num_window_layers

    def seen_tokens(self, context: float) -> float:
        """Tokens whose K and V a query reads after so many, in the mean over these layers."""
        share = self.num_window_layers / self.num_kv_layers
        return (1 - share) * context + share * min(context, self.window)

    def causal_pairs(self, tokens: float) -> float:
        """(query, key) pairs of a prompt, in the mean over these layers."""
        share, out_of_sight = self.num_window_layers / self.num_kv_layers, 0
        if tokens > self.window:  # token t does not see the first t - window
            out_of_sight = (tokens - self.window) * (tokens - self.window + 1) / 2
        return tokens * (tokens + 1) / 2 - share * out_of_sight

    @property
    def state_bytes(self) -> int:
        """What a sequence keeps in all layers with a state."""
        return self.num_state_layers * self.state_layer_bytes

    @property
    def embedding_params(self) -> int:
        """Elements of one [vocab_size, hidden_size] matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def attention_params(self) -> int:
        """Elements of one layer's projections: q, k, v, o, or MLA's down and up projections."""
        size, heads = self.hidden_size, self.num_attention_heads
        out = heads * self.value_dim * size
        if not self.kv_lora_rank:
            q = size * heads * self.head_dim * (2 if self.attention_gate else 1)
            kv = 2 * size * self.num_key_value_heads * self.head_dim
            return q + kv + out
        q = self.q_lora_rank * (size + heads * self.head_dim)
        nope_dim = self.head_dim - self.qk_rope_head_dim
        down = size * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * heads * (nope_dim + self.value_dim)
        return q + down + up + out

    @property
    def expert_params(self) -> int:
        """Elements of one expert of one layer."""
        return self.mlp_matrices * self.hidden_size * self.moe_intermediate_size

    def layer_params(self, experts_per_moe_layer: float) -> float:
        """Elements of all layers, counting so many routed experts in each layer that has any."""
        mlp_layers = self.num_mlp_layers or self.num_hidden_layers
        moe_layers = mlp_layers - self.num_dense_layers if self.num_experts else 0
        dense = self.mlp_matrices * self.hidden_size * self.intermediate_size
        router = self.hidden_size * self.num_experts
        moe = router + (experts_per_moe_layer + self.num_shared_experts) * self.expert_params
        mlps = (mlp_layers - moe_layers) * dense + moe_layers * moe
        mixers = self.num_kv_layers * self.attention_params
        return mixers + self.num_state_layers * self.state_layer_params + mlps

    @property
    def params(self) -> int:
        """All weights, in elements."""
        embeddings = 1 if self.tie_word_embeddings else 2
        layers = int(self.layer_params(self.num_experts))
        return layers + embeddings * self.embedding_params

    def experts_touched(self, batch: int) -> float:
        """How many experts of a layer a step of `batch` tokens is expected to read, if the router
        spreads them evenly.
        """
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** batch)

    def params_read(self, batch: int) -> float:
        """Weights that one decode step of `batch` tokens reads, in elements: the input embedding is
        a lookup, not a read.
        """
        return self.layer_params(self.experts_touched(batch)) + self.embedding_params

    @property
    def active_params(self) -> int:
        """Weights that one token multiplies, output head included, in elements."""
        return int(self.layer_params(self.num_experts_per_tok)) + self.embedding_params


_LLAMA2, _LLAMA3 = (
    "arXiv 2307.09288; Hugging Face page",
    "arXiv 2407.21783, table 3; Hugging Face page",
)
_MISTRAL, _QWEN3 = (
    "arXiv 2310.06825; Hugging Face page of v0.3",
    "arXiv 2505.09388, tables 1 and 2; model card",
)
# hidden_size, layers, heads, KV heads, head_dim, intermediate_size, vocab_size, then what is
# special
_SHAPES = (
    ModelShape("llama-2-7b", "6.74B", _LLAMA2, 4096, 32, 32, 32, 128, 11008, 32000),
    ModelShape("llama-2-13b", "13.02B", _LLAMA2, 5120, 40, 40, 40, 128, 13824, 32000),
    ModelShape("llama-2-70b", "68.98B", _LLAMA2, 8192, 80, 64, 8, 128, 28672, 32000),
    ModelShape("llama-3-8b", "8.03B", _LLAMA3, 4096, 32, 32, 8, 128, 14336, 128256),
    ModelShape("llama-3-70b", "70.6B", _LLAMA3, 8192, 80, 64, 8, 128, 28672, 128256),
    ModelShape("llama-3-405b", "405B", _LLAMA3, 16384, 126, 128, 8, 128, 53248, 128256),
    ModelShape("mistral-7b", "7.25B", _MISTRAL, 4096, 32, 32, 8, 128, 14336, 32768),
    ModelShape(
        "mixtral-8x7b",
        "46.7B",
        "arXiv 2401.04088; Hugging Face page",
        4096,
        32,
        32,
        8,
        128,
        14336,
        32000,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=14336,
    ),
    ModelShape(
        "qwen3-0.6b", "0.6B", _QWEN3, 1024, 28, 16, 8, 128, 3072, 151936, tie_word_embeddings=True
    ),
    ModelShape(
        "qwen3-1.7b", "1.7B", _QWEN3, 2048, 28, 16, 8, 128, 6144, 151936, tie_word_embeddings=True
    ),
    ModelShape(
        "qwen3-4b", "4.0B", _QWEN3, 2560, 36, 32, 8, 128, 9728, 151936, tie_word_embeddings=True
    ),
    ModelShape("qwen3-8b", "8.2B", _QWEN3, 4096, 36, 32, 8, 128, 12288, 151936),
    ModelShape("qwen3-14b", "14.8B", _QWEN3, 5120, 40, 40, 8, 128, 17408, 151936),
    ModelShape("qwen3-32b", "32.8B", _QWEN3, 5120, 64, 64, 8, 128, 25600, 151936),
    ModelShape(
        "qwen3-30b-a3b",
        "30.5B",
        _QWEN3,
        2048,
        48,
        32,
        4,
        128,
        6144,
        151936,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    ModelShape(
        "qwen3-235b-a22b",
        "235B",
        _QWEN3,
        4096,
        94,
        64,
        4,
        128,
        12288,
        151936,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
    ),
    ModelShape(
        "deepseek-v3",
        "671B",
        "arXiv 2412.19437, section 4.2",
        7168,
        61,
        128,
        128,
        192,
        18432,
        129280,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        num_shared_experts=1,
        num_dense_layers=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    ModelShape(
        "gpt-j-6b",
        "6.05B",
        "EleutherAI/gpt-j-6b, model card",
        4096,
        28,
        16,
        16,
        256,
        16384,
        50400,
        mlp_matrices=2,
    ),
    ModelShape(
        "falcon-40b",
        "41.3B",
        "arXiv 2311.16867; Hugging Face page",
        8192,
        60,
        128,
        8,
        64,
        32768,
        65024,
        mlp_matrices=2,
        tie_word_embeddings=True,
    ),
)
MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}


def find_model(name: str) -> ModelShape:
    """The shape of a model by name, letter case ignored. Raises ValueError that lists the known
    names.
    """
    from lessons.l01_roofline.planner.windows import WINDOWED  # here, because it builds on this

    known = MODELS | WINDOWED
    if name.lower() not in known:
        raise ValueError(f"model is {name!r}; known are {', '.join(known)}")
    return known[name.lower()]
