"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.errors import QueueFullError, RequestError, TokenSpeedError


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    http_status = 404
    code = "model_not_found"


class BodyTooLargeError(RequestError):
    """The request body is longer than the server reads."""

    http_status = 413
    code = "body_too_large"


class ApiKeyError(RequestError):
    """The API key is missing or wrong."""

    http_status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """What is asked is not allowed on this server."""

    http_status = 403
    kind = "permission_error"
    code = "forbidden"


class RequestTimeoutError(TokenSpeedError):
    """The time that a request allowed itself was up before its first token."""

    http_status = 504
    kind = "timeout_error"
    code = "timeout"


_CODES = {429: "queue_full", 503: "unavailable", 500: "internal_error", 404: "not_found", 405: "method_not_allowed"}


def error_body(error: BaseException) -> dict[str, Any]:
    """The JSON of ``error``. An unexpected exception tells the client nothing of our insides."""
    if isinstance(error, TokenSpeedError):
        code = getattr(error, "code", None) or _CODES.get(error.http_status)
        if isinstance(error, QueueFullError) and error.of_tenant:
            code = "key_queue_full"
        return _body(str(error), error.kind, getattr(error, "param", None), code)
    if isinstance(error, HTTPException):
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return _body(error.detail, kind, None, _CODES.get(error.status_code))
    return _body("the server failed on this request; its log says why", "server_error", None, "internal_error")


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BaseException) -> Response:
    """``error`` as an HTTP response; one that may go away by itself says when to retry."""
    status, headers = 500, {}
    if isinstance(error, TokenSpeedError):
        status = error.http_status
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, dict(error.headers or {})
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after)
    elif status == 503:
        headers["retry-after"] = "1"
    if isinstance(error, RequestTimeoutError):
        headers["x-should-retry"] = "false"  # OpenAI's clients retry a 5xx by themselves, and its time is up
    if isinstance(error, ApiKeyError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooLargeError):
        headers["connection"] = "close"  # the rest of the body is not read
    return json_response(error_body(error), status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(content), status, headers, "application/json")


def dumps(content: Any) -> bytes:
    """Compact JSON in UTF-8; NaN and infinity are a bug of ours, never output."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def on_known_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        detail = f"there is no {request.method} {request.url.path} here"
        error = HTTPException(error.status_code, detail, error.headers)
    request.app.state.server.note_refusal(error)
    return error_response(error)


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    """A bug of ours: the client learns that much; the traceback goes to the log (by the ASGI server)."""
    return error_response(error)
