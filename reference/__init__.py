"""The engine, assembled from the lessons' optimized parts.

    from reference import LLM, SamplingParams

Names are imported when they are asked for, because PyTorch takes seconds and `--help` should not.
"""

import importlib

import lessons  # noqa: F401  (before transformers, which imports Triton)

HOME = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "BeamSearchParams": "beam_search",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "EngineArgs": "engine_args",
    "AsyncLLMEngine": "async_engine",
    "AsyncEngineArgs": "async_engine",
    "load_model": "model",
    "LoRARequest": "lora",
    "StructuredOutputsParams": "structured",
    "GuidedDecodingParams": "structured",
}
__all__ = list(HOME)


def __getattr__(name: str):
    if name not in HOME:
        raise AttributeError(f"reference has no {name!r}; it has {', '.join(HOME)}")
    return getattr(importlib.import_module(f"reference.{HOME[name]}"), name)
