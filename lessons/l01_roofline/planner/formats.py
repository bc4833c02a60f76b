"""How many bits a weight takes in the formats of lesson 18, its share of the scales included.

Two kinds: those in which checkpoints keep the embedding and the output head in 16 bits, and GGUF's,
which quantize them, too. lessons/l18_weight_quantization/test_checkpoints.py holds the first kind
to what its matrices take.
"""

from lessons.l01_roofline.planner.models import ModelShape

# bits of the linear layers; the embedding and the head stay in 16
LAYERS_ONLY = {
    "int8": 8.0,  # and a scale a row, which is too little to count
    "fp8": 8.0,
    "mxfp4": 4 + 8 / 32,  # an exponent for 32 numbers
    "nvfp4": 4 + 8 / 16,  # an E4M3 scale for 16 numbers
    "int4": 4 + (16 + 8) / 128,  # a scale and a zero point for 128 numbers
    "awq": 4 + (16 + 8) / 128,
    "gptq": 4 + (16 + 8) / 128,
    "nf4": 4 + 8 / 64 + 32 / (64 * 256),  # with double quantization
}
# GGUF's, bits of everything
EVERYTHING = {"q8_0": 8.5, "q6_k": 6.5625, "q5_k": 5.5, "q4_k": 4.5, "q4_0": 4.5, "q2_k": 2.625}
NAMES = (*LAYERS_ONLY, *EVERYTHING)


def bits_of(model: ModelShape, quantization: str) -> float:
    """Bits of a weight, on the average over all of the model's. Raises ValueError for another
    name.
    """
    name = quantization.lower()
    if name in EVERYTHING:
        return EVERYTHING[name]
    if name not in LAYERS_ONLY:
        raise ValueError(f"quantization is {quantization!r}; accepted: {', '.join(NAMES)}")
    kept = model.embedding_params * (1 if model.tie_word_embeddings else 2)
    return LAYERS_ONLY[name] + (16 - LAYERS_ONLY[name]) * kept / model.params
