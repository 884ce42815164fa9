"""The ASGI application: routes, the API key, and everything that does not generate."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed import __version__
from tokenspeed.errors import EngineClosedError, TokenSpeedError
from tokenspeed.runtime.server import api, weights
from tokenspeed.runtime.server.errors import (
    ApiKeyError,
    error_response,
    json_response,
    on_known_error,
    on_unexpected_error,
)
from tokenspeed.runtime.server.keys import names_tenants
from tokenspeed.runtime.server.metrics import CONTENT_TYPE
from tokenspeed.runtime.server.settings import ServerSettings
from tokenspeed.runtime.server.state import ServerState

OPEN_PATHS = frozenset({"/", "/health"})
"""Served without an API key: probes carry none, and the page asks for it itself."""

_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(state: ServerState) -> Starlette:
    """The application over ``state``; it answers /health with 503 until ``state.attach`` was called."""
    routes = [
        Route("/", page),
        Route("/health", health),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/get_server_info", server_info),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/update_weights", weights.update_weights, methods=["POST"]),
    ]
    keys = state.settings.api_keys
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_ApiKeys, keys=keys)] if keys else [],
        exception_handlers={
            TokenSpeedError: on_known_error,
            HTTPException: on_known_error,
            ClientDisconnect: _on_disconnect,
            Exception: on_unexpected_error,
        },
    )
    app.state.server = state
    return app


class _ApiKeys:
    """Asks for ``Authorization: Bearer <key>`` on every path that is not open, and notes the name of the key."""

    def __init__(self, app: ASGIApp, keys: Mapping[str, str]):
        self._app = app
        self._expected = {name: b"Bearer " + key.encode() for name, key in keys.items()}
        self._names_tenants = names_tenants(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            # Every key is compared, each in constant time: how long it takes says nothing about any.
            names = [name for name, key in self._expected.items() if hmac.compare_digest(given, key)]
            if not names:
                error = ApiKeyError(
                    "the API key is wrong" if given else "an API key is needed: have no Authorization header",
                    hint="send the header `Authorization: Bearer KEY` with a key that the server was started with",
                )
                scope["app"].state.server.note_refusal(error)
                await error_response(error)(scope, receive, send)
                return
            if self._names_tenants:
                scope[api.TENANT] = names[0]
        await self._app(scope, receive, send)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody is left to read it


async def health(request: Request) -> Response:
    state = _state(request)
    if state.healthy:
        return json_response({"status": "ready"})
    status = state.phase.value if state.phase.value != "ready" else "failed"
    return json_response({"status": status}, 503, {"retry-after": "1"})


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def metrics(request: Request) -> Response:
    found = _state(request).metrics
    if found is None:
        raise EngineClosedError("the server is starting: there are no metrics yet", hint="retry shortly")
    return Response(found.render(), headers={"content-type": CONTENT_TYPE})


async def models(request: Request) -> Response:
    state = _state(request)
    names = state.served_names if state.llm is not None else ()
    return json_response({"object": "list", "data": [_card(state, name) for name in names]})


async def model(request: Request) -> Response:
    state = _state(request)
    name = request.path_params["name"]
    state.check_model(name)
    return json_response(_card(state, name))


async def server_info(request: Request) -> Response:
    """What is served, within which limits, how the server is set, and how it fares."""
    state = _state(request)
    info: dict[str, Any] = {
        "version": __version__,
        "status": state.phase.value,
        "uptime_seconds": round(time.time() - state.started, 3),
        "startup_seconds": state.startup,
        "model": state.model_name,
        "settings": _public_settings(state.settings),
    }
    if state.llm is not None and state.metrics is not None:
        engine = state.llm.engine
        info["engine"] = _plain(engine.info)
        info["stats"] = _plain(engine.stats())
        info["totals"] = {
            "prompt_tokens": state.metrics.num_prompt_tokens,
            "generation_tokens": state.metrics.num_generation_tokens,
        }
        info.update(engine.about)
    return json_response(info)


async def page(request: Request) -> Response:
    return Response(
        _page(),
        headers={
            "content-security-policy": _PAGE_POLICY,
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        },
        media_type="text/html",
    )


@cache
def _page() -> bytes:
    return Path(__file__).with_name("page.html").read_bytes()


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """The model as /v1/models lists it."""
    info = (state.llm or state.require_llm()).engine.info
    return {
        "id": name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "tokenspeed",
        "root": info.model,
        "max_model_len": info.max_model_len,
    }


def _plain(value: Any) -> dict[str, Any]:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else dict(vars(value))


def _public_settings(settings: ServerSettings) -> dict[str, Any]:
    return {**asdict(settings), "api_keys": len(settings.api_keys)}
