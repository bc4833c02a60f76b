"""Which tensor gets how many bits: the mixtures that file names speak of.

"Q4_K_M" is no format. It is a rule that gives each tensor of a model a format: most get Q4_K, and
the few where an error costs most get Q6_K. These are half of the value and down projections, and
the matrix that makes the logits. A value projection is small and shared by several heads; the down
projection adds to the residual stream that all later layers read.

Source: llama_tensor_get_type_impl and tensor_type_fallback in llama-quant.cpp of llama.cpp, for
models without experts. Its special case for models of 70B (attn_v in Q5_K) is left out.
"""

from typing import NamedTuple

from torch import Tensor

from lessons.l18_weight_quantization.gguf.gguf_blocks import FLOATS, FORMATS
from lessons.toolbox.model.arguments import refuse
from lessons.toolbox.model.config import ModelConfig

NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
NAMES_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Mixture(NamedTuple):
    """number: in general.file_type. most: the format of most tensors. better: of attn_v and
    ffn_down in the layers that `gets_more_bits` names, or in the first layers (_S).
    """

    number: int
    most: str
    better: str = ""


MIXTURES = {
    "F32": Mixture(0, "F32"),
    "F16": Mixture(1, "F16"),
    "BF16": Mixture(32, "BF16"),
    "Q8_0": Mixture(7, "Q8_0"),
    "Q4_0": Mixture(2, "Q4_0"),
    "Q4_1": Mixture(3, "Q4_1"),
    "Q5_0": Mixture(8, "Q5_0"),
    "Q5_1": Mixture(9, "Q5_1"),
    "Q2_K": Mixture(10, "Q2_K"),
    "Q3_K_S": Mixture(11, "Q3_K"),
    "Q3_K_M": Mixture(12, "Q3_K"),
    "Q4_K_S": Mixture(14, "Q4_K", "Q5_K"),
    "Q4_K_M": Mixture(15, "Q4_K", "Q6_K"),
    "Q5_K_S": Mixture(16, "Q5_K"),
    "Q5_K_M": Mixture(17, "Q5_K", "Q6_K"),
    "Q6_K": Mixture(18, "Q6_K"),
}
# where a row is no multiple of 256: a format with blocks of 32, of more bits rather than fewer
FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def gets_more_bits(layer: int, num_layers: int) -> bool:
    """Whether _M treats a layer better: the first eighth, the last eighth, and every third between.

    Example: of 32 layers these are 0–3, 6, 9, 12, 15, 18, 21, 24, 27 and 28–31.
    """
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def format_of(
    mixture: str, name: str, columns: int, num_layers: int, kv_group: int, is_tied: bool
) -> str:
    """The format of one matrix. name: llama.cpp's, without ".weight"; columns: K, its row.
    kv_group: query heads that share a key head. is_tied: whether the embedding makes the logits,
    too.

    Raises ValueError for a mixture that is not known.
    """
    if mixture not in MIXTURES:
        refuse("mixture", mixture, ", ".join(MIXTURES))
    most = MIXTURES[mixture].most
    if most in FLOATS:
        return most
    if name == "output" or (is_tied and name == "token_embd"):
        fits = columns % FORMATS[most].values == 0
        wanted = "Q6_K" if fits and most != "Q8_0" else "Q8_0"
    else:
        wanted = _wanted(mixture, name, num_layers, kv_group)
    if columns % FORMATS[wanted].values:
        wanted = FALLBACKS.get(wanted, wanted)
    return wanted if columns % FORMATS[wanted].values == 0 else "F16"


def _wanted(mixture: str, name: str, num_layers: int, kv_group: int) -> str:
    """The format of a matrix that does not make the logits, if its rows fit."""
    most, better = MIXTURES[mixture].most, MIXTURES[mixture].better
    part = name.rpartition(".")[2]
    if part not in ("attn_v", "ffn_down", "attn_output"):
        return most
    layer = int(name.split(".")[1])
    if mixture == "Q2_K":
        return "Q4_K" if part == "attn_v" and kv_group >= 4 else "Q3_K"
    if mixture == "Q3_K_M":
        few = layer < 2 if part == "attn_v" else layer < num_layers // 16
        return "Q5_K" if few and part != "attn_output" else "Q4_K"
    if part == "attn_output":
        return most
    if mixture == "Q4_K_S":
        return better if layer < (4 if part == "attn_v" else num_layers // 8) else most
    return better if better and gets_more_bits(layer, num_layers) else most


def stored_name(name: str) -> str:
    """What llama.cpp calls a tensor of the decoder: layers.3.mlp.up_proj.weight is
    blk.3.ffn_up.weight.
    """
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{NAMES[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"blk.{layer}.{NAMES_IN_LAYER[part]}.{kind}"


def format_for(mixture: str, stored: str, tensor: Tensor, config: ModelConfig) -> str:
    """Norms and biases stay in 32 bits: they are small, and their errors are not averaged away."""
    if tensor.dim() == 1:
        return "F32"
    return format_of(
        mixture,
        stored.removesuffix(".weight"),
        tensor.shape[1],
        config.num_hidden_layers,
        config.num_attention_heads // config.num_key_value_heads,
        config.tie_word_embeddings,
    )
