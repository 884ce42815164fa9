"""What a code object says of itself: the facts that a launch must respect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tokenspeed.errors import ArtifactError
from tokenspeed.target import Target

Dim3: TypeAlias = tuple[int, int, int]

MAX_FILE_BYTES = 64 << 20
"""Largest code object that is read: some hundred times what one holds in practice."""
MAX_KERNELS = 16384
"""Most kernels of one code object."""


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of a code object, by its own metadata.

    Attributes:
        params: (offset, size) in bytes of every parameter that a launch passes, in order.
        static_shared_bytes: shared memory of a block that the code fixes; a launch adds its dynamic part.
        max_threads: threads of a block at most.
        block: the only shape of a block that it may be launched with, or None for any.
        cluster: the only shape of a cluster that it may be launched with, or None for any.
        num_registers: registers of a thread (hip: vector registers, accumulators included).
        stack_bytes: memory of a thread outside its registers: spills, arrays, calls.
        warp_size: threads that run in step.
    """

    params: tuple[tuple[int, int], ...]
    static_shared_bytes: int
    max_threads: int
    block: Dim3 | None
    cluster: Dim3 | None
    num_registers: int
    stack_bytes: int
    warp_size: int


@dataclass(frozen=True)
class DeviceCode:
    """One code object: the architecture that it was built for, and its kernels by symbol."""

    arch: Target
    kernels: Mapping[str, KernelInfo]


def damaged(text: str) -> ArtifactError:
    """The error for bytes that are no code object that this version can read."""
    return ArtifactError(f"device code: {text}", hint="the file is damaged: copy or build the artifact again")


def check_params(symbol: str, params: tuple[tuple[int, int], ...], total: int) -> None:
    """Parameters must follow one another without overlap inside the ``total`` bytes of the parameter block."""
    end = 0
    for offset, size in params:
        if offset < end or size <= 0:
            raise damaged(f"kernel {symbol!r}: need parameters one after another, have {size} bytes at {offset}")
        end = offset + size
    if end > total:
        raise damaged(f"kernel {symbol!r}: need {end} bytes of parameters, have {total}")
