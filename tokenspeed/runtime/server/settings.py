"""What an operator decides about one server. Light on purpose: the command line imports it to parse flags."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenspeed.errors import ResourceError, UsageError


@dataclass(frozen=True)
class ServerSettings:
    """Settings of ``tokenspeed serve``.

    Attributes:
        host: name or address to listen on.
        port: 0 picks a free one.
        api_keys: by name (see ``keys.py``), one of which every path but /health and / asks for as a bearer token;
            none asks for nothing.
        served_names: names the model answers to instead of the artifact's own; the first is the one reported.
        drain_timeout: seconds that running requests get after SIGTERM.
        max_body_bytes: longest request body; more is answered with 413.
        weights_dir: folder below which files of new weights are taken from; None: no weights are taken.
        access_log: one line on stderr for every request.
        announce: print the ready line on stderr.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Mapping[str, str] = field(default_factory=dict)
    served_names: tuple[str, ...] = ()
    drain_timeout: float = 30.0
    max_body_bytes: int = 32 << 20
    weights_dir: str | None = None
    access_log: bool = False
    announce: bool = True


def bind(settings: ServerSettings) -> socket.socket:
    """Bind and listen, before anything slow starts: clients that come early wait instead of being refused.

    Raises:
        ResourceError: the port is taken, or binding it is not allowed.
        UsageError: there is no such host or port.
    """
    if not 0 <= settings.port <= 65535:
        raise UsageError(f"--port must be from 0 to 65535; got {settings.port}")
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as e:
        raise UsageError(
            f"--host {settings.host}: no such host ({e})", hint="use 127.0.0.1 (this machine only) or 0.0.0.0 (all)"
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise _bind_error(settings, e) from None
    return listener


def _bind_error(settings: ServerSettings, error: OSError) -> ResourceError:
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return ResourceError(
            f"cannot listen on {where}: another process listens there already",
            hint="stop that process, or choose another port with --port (0 picks a free one)",
        )
    if error.errno == errno.EACCES:
        return ResourceError(
            f"cannot listen on {where}: this user may not bind that port", hint="choose a --port of 1024 or above"
        )
    return ResourceError(f"cannot listen on {where}: {error.strerror}", hint="choose another --host or --port")


def url(listener: socket.socket) -> str:
    """Where a client on this machine reaches ``listener``."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
