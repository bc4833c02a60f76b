"""Everything together: the engine, the routes, and what stands in front of them."""

import difflib

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse

from reference.engine.async_engine import AsyncLLMEngine
from reference.engine.compatibility.reading import route_reason
from reference.engine.process.client import AsyncProcessEngine
from reference.features.lora import LoRARequest
from reference.server.args import ServerArgs
from reference.server.effects import Effects
from reference.server.errors import ApiError, of_validation, response_of
from reference.server.limits import Limits
from reference.server.metrics import Counted
from reference.server.models import Models
from reference.server.routes import (
    chat,
    completions,
    generate,
    info,
    kv_events,
    messages,
    responses,
    tokens,
)
from reference.server.service import Service

ROUTES = (completions, chat, responses, messages, tokens, generate, info, kv_events)


def new_service(args: ServerArgs) -> Service:
    """The engine with its adapters, running. Raises ValueError, in one line."""
    adapters = {
        name: LoRARequest(name, number, path)
        for number, (name, path) in enumerate(args.lora_modules.items(), 1)
    }
    if args.disable_frontend_multiprocessing or args.impl is not None:
        new_engine = AsyncLLMEngine.from_engine_args
    else:
        new_engine = AsyncProcessEngine
    # the adapters now, so that a wrong folder is not a client's surprise
    engine = new_engine(args.engine, adapters.values())
    max_model_len = engine.info.max_model_len
    models = Models(args.served_model_name, args.engine.model, max_model_len, adapters)
    return Service(engine, models, args)


def new_app(service: Service) -> FastAPI:
    """The ASGI application."""
    args = service.args
    has_docs = not args.disable_fastapi_docs
    app = FastAPI(
        title="The Inference Ladder",
        version=info.VERSION,
        root_path=args.root_path,
        openapi_url="/openapi.json" if has_docs else None,
        docs_url=None,  # their pages load scripts from the network
        redoc_url=None,
    )
    app.state.service = service
    routers = [routes.new_router(service) for routes in ROUTES]
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(HTTPException, refuse_path)
    app.add_exception_handler(Exception, apologise)
    # The last that is added is the first that a request meets.
    app.add_middleware(Effects)
    app.add_middleware(Limits, args=args)
    if args.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
        )
    paths = {route.path for router in routers for route in router.routes}
    app.state.paths = sorted(path for path in paths if "{" not in path)
    # as labels of metrics; others could be anything
    app.add_middleware(Counted, metrics=service.metrics, paths=paths)
    return app


async def refuse(request: Request, error: ApiError) -> JSONResponse:
    """A request that a route refused."""
    return response_of(error, request.url.path)


async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
    """A body that has not the form of its API."""
    return response_of(of_validation(error.errors()), request.url.path)


async def refuse_path(request: Request, error: HTTPException) -> JSONResponse:
    """An unknown path, or another method than the path has."""
    path = request.url.path
    hint = "accepted: a path of /openapi.json"
    reason = route_reason(path) if error.status_code == 404 else None
    if reason:
        hint = f"a path of vLLM that this server does not have, because {reason}"
    elif error.status_code == 405:
        hint = f"accepted: {(error.headers or {}).get('Allow', 'another method')}"
    elif near := difflib.get_close_matches(path[:100], request.app.state.paths, 1):
        hint = f"did you mean {near[0]}?"
    what = f"{request.method} {path[:100]}: {error.detail}"
    refusal = ApiError(error.status_code, f"{what}; {hint}")
    response = response_of(refusal, path)
    response.headers.update(error.headers or {})
    return response


async def apologise(request: Request, error: Exception) -> JSONResponse:
    """A mistake of ours. The log has it; the client learns nothing of our insides."""
    return response_of(
        ApiError(500, "the server made a mistake; its log says which"), request.url.path
    )
