"""The engine, assembled from the lessons' optimized parts.

    from reference import LLM, SamplingParams

Names are imported when they are asked for, because PyTorch takes seconds and `--help` should not.
"""

import importlib

import lessons  # noqa: F401  (before transformers, which imports Triton)

HOME = {
    "LLM": "engine.llm",
    "SamplingParams": "engine.sampling_params",
    "BeamSearchParams": "features.beam_search",
    "RequestOutput": "engine.outputs",
    "CompletionOutput": "engine.outputs",
    "EngineArgs": "engine.engine_args",
    "AsyncLLMEngine": "engine.async_engine",
    "AsyncEngineArgs": "engine.async_engine",
    "load_model": "engine.model",
    "LoRARequest": "features.lora",
    "StructuredOutputsParams": "features.structured",
    "GuidedDecodingParams": "features.structured",
}
__all__ = list(HOME)


def __getattr__(name: str):
    if name not in HOME:
        raise AttributeError(f"reference has no {name!r}; it has {', '.join(HOME)}")
    return getattr(importlib.import_module(f"reference.{HOME[name]}"), name)
