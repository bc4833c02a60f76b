"""What a server says of itself: its models, whether it lives and is ready, its metrics."""

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from reference.server.service import Service

VERSION = "0.1.0"  # of pyproject.toml, which is not installed with the folder


def new_router(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["server"])
    engine = service.engine

    @router.get("/", include_in_schema=False)
    async def about() -> dict[str, Any]:
        """For a person who opens the address in a browser."""
        return {
            "server": "The Inference Ladder",
            "version": VERSION,
            "models": [*service.models.names, *service.models.adapters],
            "paths": ["/v1/models", "/v1/chat/completions", "/v1/completions", "/metrics"],
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The base model and the adapters."""
        return {"object": "list", "data": service.models.cards()}

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        """One model."""
        name, _ = service.models.find(name)
        return next(card for card in service.models.cards() if card["id"] == name)

    @router.get("/health")
    async def health() -> Response:
        """Whether the engine lives. A server that drains does, so that it is not killed."""
        return Response(status_code=200 if engine.failure is None else 503)

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> Response:
        """The same, under the name that SageMaker asks."""
        return await health()

    @router.get("/ready")
    async def ready() -> Response:
        """Whether it takes requests. A server that drains does not."""
        return readiness(service)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Which server this is."""
        return {"version": VERSION}

    @router.get("/metrics")
    def metrics() -> Response:
        """For Prometheus, under vLLM's names."""
        text = generate_latest(service.metrics.registry)
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/info")
    async def info() -> JSONResponse:
        """As text-generation-inference describes itself, as far as it applies."""
        return JSONResponse(tgi_info(service))

    return router


def readiness(service: Service) -> Response:
    """The answer of /ready. With --kv-transfer-config it says where the engine takes K and V."""
    status, where = 200 if service.engine.is_ready else 503, service.engine.info.kv_transfer
    if where is None:
        return Response(status_code=status)
    return JSONResponse({"kv_transfer": where}, status)


def tgi_info(service: Service) -> dict[str, Any]:
    """What text-generation-inference's /info says, as far as it applies."""
    args, info = service.args, service.engine.info
    return {
        "model_id": service.models.names[0],
        "model_sha": None,
        "model_dtype": info.dtype,
        "model_device_type": info.device_type,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": args.limit_concurrency,
        "max_best_of": 128,
        "max_stop_sequences": 1024,
        "max_input_tokens": info.max_model_len - 1,
        "max_total_tokens": info.max_model_len,
        "max_client_batch_size": 1,
        "router": "inference-ladder",
        "version": VERSION,
    }
