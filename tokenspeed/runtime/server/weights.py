"""POST /update_weights: new weights for the engine that serves, from files below one folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.errors import RequestError, UsageError, WeightsError
from tokenspeed.runtime.server.api import read_body
from tokenspeed.runtime.server.errors import ForbiddenError, json_response
from tokenspeed.runtime.server.fields import Fields, parse_body
from tokenspeed.runtime.server.state import ServerState
from tokenspeed.runtime.weight_update import When

MAX_BODY_BYTES = 64 << 10
MAX_PATH_BYTES = 4096
FIELDS = frozenset({"path", "version", "when"})


async def update_weights(request: Request) -> Response:
    """Answers when the new weights run, or with why they do not. The update goes on when the client has gone."""
    state: ServerState = request.app.state.server
    folder = state.settings.weights_dir
    if folder is None:
        raise ForbiddenError(
            "this server takes no new weights", hint="start it with --allow-weight-updates DIR, where the files will be"
        )
    body = parse_body(await read_body(request, MAX_BODY_BYTES))
    if unknown := sorted(body.keys() - FIELDS):
        raise RequestError(f"{unknown[0][:50]!r} is no field of an update", param=unknown[0][:50])
    fields = Fields(body)
    text = fields.text("path", MAX_PATH_BYTES)
    when = fields.string("when") or When.DRAIN.value
    version = fields.string("version")
    engine = state.require_llm().engine
    async with state.updating:
        path = await asyncio.to_thread(allowed_path, folder, text)
        try:
            result = await asyncio.to_thread(engine.update_weights, path, version=version, when=when)
        except UsageError as e:
            raise RequestError(e.message, hint=e.hint) from None
    return json_response(result)


def allowed_path(folder: str, text: str) -> Path:
    """The file that ``text`` names, absolute or from ``folder`` on, all links followed.

    Raises:
        ForbiddenError: it is not below ``folder``. Nothing is said of whether it is there.
        WeightsError: there is no such file.
    """
    if not text or "\0" in text:
        raise RequestError("path must name a file of weights", param="path")
    top = Path(folder).resolve()
    try:
        found = (top / text).resolve()
    except (OSError, RuntimeError):  # a loop of links
        raise WeightsError(f"cannot read the weights {text}: its links lead nowhere", param="path") from None
    if found == top or not found.is_relative_to(top):
        raise ForbiddenError(f"{text} is not below the folder from which this server takes weights", param="path")
    try:
        is_file = found.is_file()
    except OSError as e:  # a name that is too long
        raise WeightsError(f"cannot read the weights {text}: {e.strerror}", param="path") from None
    if not is_file:
        raise WeightsError(f"cannot read the weights {text}: there is no such file", param="path")
    return found
