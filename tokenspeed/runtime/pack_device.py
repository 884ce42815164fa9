"""What the device's sides of packs (tuning.py, proving.py) have in common: which GPU, its regions, the binaries."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tokenspeed import _native
from tokenspeed.errors import ArtifactError, ResourceError, UsageError
from tokenspeed.graph import LaunchGraph
from tokenspeed.pack_file import PackFile, Part
from tokenspeed.runtime.places import Gpu, GpuPlace, driver_text, look_for_gpus
from tokenspeed.target import Target


def find_gpu(target: Target, ordinal: int | None, made_by: str) -> Gpu:
    """The GPU that a pack for ``target`` runs on: number ``ordinal``, or the first that can. ``made_by`` is the command
    that makes such packs.

    Raises:
        ResourceError: there is no GPU, or its driver is too old. UsageError: there is no GPU of this number.
        ArtifactError: the pack is for another architecture.
    """
    found = look_for_gpus([target.backend])
    have = ", ".join(f"GPU {gpu.ordinal} is {gpu.name}, {gpu.arch}" for gpu in found.gpus)
    if not found.gpus:
        raise ResourceError(
            f"the pack is for {target}, and no GPU was found: {found.reasons[target.backend]}",
            hint="run it on a machine with that GPU; see `tokenspeed doctor`",
        )
    if ordinal is not None and all(gpu.ordinal != ordinal for gpu in found.gpus):
        raise UsageError(f"there is no GPU {ordinal}: {have}", hint="see `tokenspeed doctor`")
    fitting = [gpu for gpu in found.gpus if gpu.target == target and ordinal in (None, gpu.ordinal)]
    if not fitting:
        kinds = {gpu.target for gpu in found.gpus if gpu.target is not None and ordinal in (None, gpu.ordinal)}
        hint = "".join(f"make one with `{made_by} --target {kind}`" for kind in list(kinds)[:1])
        raise ArtifactError(f"the pack is for {target}; {have}", hint=hint or None)
    gpu, least = fitting[0], target.gpu.min_driver
    if gpu.driver_version < least:
        raise ResourceError(
            f"{target} needs a driver of {driver_text(gpu.backend, least)} or later; GPU {gpu.ordinal} ({gpu.name})"
            f" has one of {gpu.driver}",
            hint="update the GPU driver",
        )
    return gpu


@contextmanager
def held_open(gpu: Gpu) -> Iterator[None]:
    """Every part of a pack has a device of its own; this keeps what is slow to make from one to the next."""
    try:
        context = _native.GpuContext(gpu.backend, gpu.ordinal)
    except _native.DeviceError as e:
        raise ResourceError(f"cannot open GPU {gpu.ordinal} ({gpu.name}): {e}") from None
    try:
        yield
    finally:
        context.close()


@contextmanager
def weights_file(command: str, what: str, nbytes: int, pieces: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """A file of ``pieces``, ``nbytes`` of ``what`` in all, as long as it is needed: the device fills its region weights
    from one. Raises ResourceError if it finds no room."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=f"tokenspeed-{command}-"))
            for piece in pieces:
                file.write(piece)
            file.flush()
        except OSError as e:
            raise ResourceError(
                f"cannot write {nbytes / 1e6:.0f} MB of {what} to {tempfile.gettempdir()}: {e.strerror or e}",
                hint="set TMPDIR to a folder with room",
            ) from None
        yield Path(file.name)


@contextmanager
def opened(gpu: Gpu, part: Part, weights: Path, *, kept: str, timed_steps: int = 0) -> Iterator[Any]:
    """A device with the regions of ``part``, which keeps the times of as many steps as ``timed_steps``.

    DeviceErrors of what is done with it become ResourceErrors, whose hint says that ``kept`` is kept.
    """
    device = GpuPlace(gpu).open()
    try:
        if timed_steps:
            device.time_steps(timed_steps)
        device.load_weights(str(weights), 0, part.weights_bytes)
        device.allocate("arena", part.arena_bytes)
        device.allocate_io(part.io_bytes, 0)
        yield device
    except _native.DeviceError as e:
        raise ResourceError(f"GPU {gpu.ordinal} ({gpu.name}) failed at {part}: {e}", hint=f"{kept} is kept") from None
    finally:
        device.close()


class GraphLoader:
    """Loads graphs of a pack to a device, each with the binaries that it needs."""

    def __init__(self, pack: PackFile[Any], device: Any):
        self._pack, self._device = pack, device
        self._binaries: set[str] = set()

    def load(self, name: str, graph: LaunchGraph) -> int:
        """The handle of ``graph``, made of the member ``name``. Raises ArtifactError, _native.GraphError."""
        for node in graph.nodes:
            binary = "" if node.launch is None else node.launch.binary
            if binary not in self._binaries:
                self._device.load_binary(binary, self._pack.read_binary(binary, name))
                self._binaries.add(binary)
        return int(self._device.load_graph(graph.encode(), 0))
