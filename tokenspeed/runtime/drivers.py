"""GPU drivers: started early, because that takes a tenth of a second and waits for nothing else.

Light on purpose: commands import it before anything else of the runtime.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

GPU_BACKENDS: Mapping[str, str] = {"cuda": "/dev/nvidiactl", "hip": "/dev/kfd"}
"""By backend, the file that its kernel driver makes: where it is, there should be a GPU."""


def start_drivers(target: str | None = None) -> list[threading.Thread]:
    """Start the drivers of this machine's GPUs, each on a thread. Who needs one later finds it started, or waits.

    Args:
        target: the only target that will be asked for, or None.
    """
    threads = []
    for backend, device_file in GPU_BACKENDS.items():
        if (target is None or target.startswith(f"{backend}:")) and os.path.exists(device_file):
            # No daemon: the process must not end while the driver starts.
            thread = threading.Thread(target=_start, args=(backend,), name=f"tokenspeed-{backend}")
            thread.start()
            threads.append(thread)
    return threads


def _start(backend: str) -> None:
    from tokenspeed import _native
    from tokenspeed.runtime import trace

    with trace.span("start driver", backend=backend):
        _native.gpu_devices(backend)
