"""GPU drivers: started early, because that takes a quarter of a second and waits for nothing else.

Light on purpose: commands import it before anything else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

GPU_BACKENDS: Mapping[str, str] = {"cuda": "/dev/nvidiactl", "hip": "/dev/kfd"}
"""By backend, the file that its kernel driver makes: where it is, there should be a GPU."""

_lock = threading.Lock()
_contexts: list[Any] = []  # of GPUs that were opened early
_wanted = False  # whether a context that comes up now is kept


def start_drivers(target: str | None = None, device: int | None = None) -> list[threading.Thread]:
    """Start the drivers of this machine's GPUs, each on a thread, and open one GPU of each. Who opens that one later,
    before ``let_go``, finds it open, or waits.

    Args:
        target: the only target that will be asked for, or None.
        device: number of the GPU that will be asked for; None is the first.
    """
    global _wanted
    _wanted = True
    threads = []
    for backend, device_file in GPU_BACKENDS.items():
        if (target is None or target.startswith(f"{backend}:")) and os.path.exists(device_file):
            # No daemon: the process must not end while the driver starts.
            thread = threading.Thread(target=_start, args=(backend, device or 0), name=f"tokenspeed-{backend}")
            thread.start()
            threads.append(thread)
    return threads


def start_for(arguments: Sequence[str]) -> list[threading.Thread]:
    """``start_drivers`` for a command line that nobody has parsed yet: parsing takes longer than looking for the two
    options that matter here, which if it is wrong costs no more than the early start."""
    number = _option(arguments, "--device") or ""
    return start_drivers(_option(arguments, "--target"), int(number) if number.isdecimal() else None)


def _option(arguments: Sequence[str], name: str) -> str | None:
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == name:
            return following
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def let_go() -> None:
    """Close what was opened early, but for those that somebody has opened since: loading has ended."""
    global _wanted
    with _lock:
        _wanted = False
        contexts = _contexts[:]
        _contexts.clear()
    for context in contexts:
        context.close()


def _start(backend: str, device: int) -> None:
    began = time.perf_counter()
    from tokenspeed import _native

    try:
        context = _native.GpuContext(backend, device)
    except _native.DeviceError:
        return  # whoever needs the GPU meets the error again, and tells it
    with _lock:
        if keep := _wanted:
            _contexts.append(context)
    if not keep:
        context.close()
    from tokenspeed.runtime import trace

    if (running := trace.current()) is not None:
        running.add("start driver, open device", began, time.perf_counter(), backend=backend)
