"""What a device can do at most, measured: a kernel that reads memory and does nothing else.

No step runs it. `tokenspeed bench` does, so that a step's use of the memory bandwidth is compared with what the same
device reached in the same minute.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed.kernels.registry import Stage, device_stage
from tokenspeed.kernels.triton.common import pdl_wait
from tokenspeed.target import Target

BLOCK = 4096
"""Items that a program has in flight: 16 KiB, eight loads of 16 bytes by each of its threads."""
CHUNK = 8 * BLOCK
"""Items that a program reads: 128 KiB that lie together."""


@triton.jit
def read_chunks(x, sums, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """sums[p] = sum of x[p * CHUNK : (p + 1) * CHUNK], of int32 modulo 2^32: program p reads every byte of its chunk
    once, and writes the sum so that no compiler leaves the reads out."""
    pdl_wait(PDL)
    first = x + tl.program_id(0).to(tl.int64) * CHUNK
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, CHUNK, BLOCK):
        total += tl.load(first + at + lanes)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def read_stage(target: Target, nbytes: int) -> tuple[Stage, int]:
    """The launch that reads at most ``nbytes``, and how many it reads: a multiple of a program's chunk."""
    programs = nbytes // (4 * CHUNK)
    stage = device_stage(
        module=__name__,
        function=read_chunks,
        arguments="read x, write sums",
        types="*i32, *i32",
        constants={"CHUNK": CHUNK, "BLOCK": BLOCK},
        num_warps=4 if target.gpu.warp_size == 32 else 2,
        num_stages=1,
        grid=(programs, 1, 1),
        target=target,
    )
    return stage, programs * 4 * CHUNK
