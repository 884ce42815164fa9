"""One capturing process: a request as JSON on stdin, the answer as JSON on stdout.

It is a process of its own because it runs a library's host code, which may fall over, and makes a CUDA context, which
must not outlive it in a build that goes on to start others.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tokenspeed.compile.capture import stand_ins
from tokenspeed.compile.cuda_driver import CudaDriver
from tokenspeed.errors import TargetError, TokenSpeedError


def main() -> None:
    """Answer the request on stdin."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print; only the answer goes to the real stdout
    request = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"launches": capture_all(CudaDriver(), request)} if request else _devices()
    except TokenSpeedError as e:
        answer = {"error": e.message, "hint": e.hint}
    json.dump(answer, answers)
    answers.flush()
    os._exit(0)  # the end of a library's static objects is none of ours


def _devices() -> dict[str, Any]:
    return {"devices": CudaDriver().devices()}


def capture_all(driver: CudaDriver, request: dict[str, Any]) -> list[list[list[dict[str, Any]]]]:
    """For each job of the request both captures, each a list of launches.

    ``request``: {"device": ordinal, "jobs": [{"launcher": path, "function", "num_pointers", "integers", "floats"}]}.
    """
    found = []
    with driver.stream(request["device"]) as stream:
        for job in request["jobs"]:
            call = _Call(job, stream)
            found.append([[raw.to_json() for raw in driver.capture(stream, call.with_stand_ins(n))] for n in (0, 1)])
    return found


class _Call:
    """A launcher with its arguments: ``const char* launcher(stream, pointers, integers, floats)``."""

    def __init__(self, job: dict[str, Any], stream: int):
        self._job, self._stream = job, stream
        library = ctypes.CDLL(job["launcher"], mode=os.RTLD_LOCAL | os.RTLD_NOW)
        prepare, self._function = library.tokenspeed_launcher_prepare, getattr(library, job["function"])
        prepare.restype = self._function.restype = ctypes.c_char_p
        _check("tokenspeed_launcher_prepare", prepare())

    def with_stand_ins(self, capture: int) -> Callable[[], None]:
        """The call with the addresses of capture 0 or 1."""
        return lambda: self._run(stand_ins(self._job["num_pointers"], capture))

    def _run(self, addresses: Sequence[int]) -> None:
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        integers = (ctypes.c_int64 * len(self._job["integers"]))(*self._job["integers"])
        floats = (ctypes.c_double * len(self._job["floats"]))(*self._job["floats"])
        problem = self._function(ctypes.c_void_p(self._stream), pointers, integers, floats)
        _check(self._job["function"], problem)


def _check(function: str, problem: bytes | None) -> None:
    if problem is not None:
        raise TargetError(
            f"{function}: {problem.decode(errors='replace')}",
            hint="choose another solution for this op with --solution",
        )


if __name__ == "__main__":
    main()
