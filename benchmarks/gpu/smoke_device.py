"""Does the GPU device work here, and what do its parts cost? Runs chains of small kernels through _native.GpuDevice,
checks every value, streams a file of weights, and prints a table; --json PATH writes the figures too.

    python benchmarks/gpu/smoke_device.py --json /tmp/smoke.json [--weights-gib 4] [--nodes 300]

Needs Triton (it compiles two kernels) and an NVIDIA GPU; neither torch nor numpy.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed import _native
from tokenspeed.graph import Access, Float, Int, Launch, LaunchGraph, Node, Pointer, Region

BLOCK = 256
MAX_ITEMS = 132 * BLOCK
SIZES, IN = 0, 64
OUT = IN + MAX_ITEMS * 4
IO_BYTES = OUT + MAX_ITEMS * 4


@triton.jit
def smoke(x, y, weights, step_sizes, add, scale, N: tl.constexpr, PDL: tl.constexpr):
    """y = x * scale + add + weights[0] for the step's first num_tokens items; all else is left as it is."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * N + tl.arange(0, N)
    mask = at < tl.load(step_sizes)
    value = tl.load(x + at, mask=mask, other=0)
    result = (value.to(tl.float32) * scale).to(tl.int32) + add + tl.load(weights)
    tl.store(y + at, result, mask=mask)


@triton.jit
def bring(source, target, COUNT: tl.constexpr, N: tl.constexpr):
    """target[:COUNT] = source[:COUNT]: the sizes and inputs of a step, from the host's memory."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(target + at, tl.load(source + at, mask=at < COUNT), mask=at < COUNT)


def compile_bring(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"source": "*i32", "target": "*i32", "COUNT": "constexpr", "N": "constexpr"}
    source = ASTSource(bring, types, {"COUNT": OUT // 4, "N": BLOCK}, {})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})


def bring_node() -> Node:
    source, target = Pointer(Region.HOST_IO, 0, OUT, Access.READ), Pointer(Region.IO, 0, OUT, Access.WRITE)
    launch = Launch("bring", (triton.cdiv(OUT // 4, BLOCK), 1, 1), (128, 1, 1))
    return Node("inputs", "bring", (source, target, Int(0), Int(0)), (), launch)


def compile_kernel(arch: int, pdl: bool) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"x": "*i32", "y": "*i32", "weights": "*i32", "step_sizes": "*i32", "add": "i32", "scale": "fp32"}
    source = ASTSource(smoke, types | {"N": "constexpr", "PDL": "constexpr"}, {"N": BLOCK, "PDL": pdl}, {})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})


def chain(binary: str, nodes: int, programmatic: bool, blocks: int) -> bytes:
    """in -> arena -> ... -> the host's out: node i adds i + weights[0], from one half of the arena to the other."""
    half = MAX_ITEMS * 4
    size = blocks * BLOCK * 4
    launch = Launch(binary, (blocks, 1, 1), (128, 1, 1), programmatic=programmatic)
    built = [bring_node()]
    for i in range(nodes):
        first, last = i == 0, i == nodes - 1
        x = Pointer(Region.IO, IN, size, Access.READ) if first else Pointer(
            Region.ARENA, (i % 2) * half, size, Access.READ)  # fmt: skip
        y = Pointer(Region.HOST_IO, OUT, size, Access.WRITE) if last else Pointer(
            Region.ARENA, ((i + 1) % 2) * half, size, Access.WRITE)  # fmt: skip
        args = (x, y, Pointer(Region.WEIGHTS, 0, 4, Access.READ), Pointer(Region.IO, SIZES, 16, Access.READ),
                Int(i, 4), Float(1.0, 4), Int(0), Int(0))  # fmt: skip
        early = replace(launch, programmatic=programmatic and not first)
        built.append(Node(f"node {i}", "smoke", args, (i,), early))
    return LaunchGraph(tuple(built)).encode()


def probe(binary: str, offsets: list[int]) -> bytes:
    """Nodes side by side: number k writes io in[0] + the int32 at weights offset k to out[k]."""
    x = Pointer(Region.IO, IN, 4, Access.READ)
    sizes = Pointer(Region.IO, SIZES, 16, Access.READ)
    nodes = [bring_node()]
    for k, offset in enumerate(offsets):
        y, w = Pointer(Region.HOST_IO, OUT + 4 * k, 4, Access.WRITE), Pointer(Region.WEIGHTS, offset, 4, Access.READ)
        args = (x, y, w, sizes, Int(0, 4), Float(1.0, 4), Int(0), Int(0))
        nodes.append(Node(f"probe {k}", "smoke", args, (0,), Launch(binary, (1, 1, 1), (128, 1, 1))))
    return LaunchGraph(tuple(nodes)).encode()


def check_weights(device: Any, graph: int, io: memoryview, offsets: list[int]) -> None:
    io[IN : IN + 4].cast("i")[0] = 5
    device.wait(device.submit(graph, 1, 1, 1, 0))
    outputs = io[OUT:IO_BYTES].cast("i")
    for k, offset in enumerate(offsets):
        assert outputs[k] == 5 + offset // 4 + 3, (offset, outputs[k])


def check_step(device: Any, graph: int, io: memoryview, io_set: int, tokens: int, nodes: int, weight: int) -> None:
    stride = -(-IO_BYTES // 4096) * 4096
    mine = io[io_set * stride : io_set * stride + IO_BYTES]
    inputs, outputs = mine[IN:OUT].cast("i"), mine[OUT:].cast("i")
    for i in range(tokens):
        inputs[i] = 1000 * io_set + i
    outputs[tokens - 1] = -1
    device.wait(device.submit(graph, tokens, 1, 1, io_set))
    total = nodes * (nodes - 1) // 2 + nodes * weight
    for i in range(tokens):
        assert outputs[i] == 1000 * io_set + i + total, (i, outputs[i], total)


def in_flight(device: Any, graph: int, steps: int) -> tuple[float, float]:
    """Seconds of a step when two are always in flight, and of a submit call, both medians of five rounds."""
    per_step, per_submit = [], []
    for _ in range(5):
        begin, submitting = time.perf_counter(), 0.0
        tickets: list[int] = []
        for i in range(steps):
            if len(tickets) == 2:
                device.wait(tickets.pop(0))
            t = time.perf_counter()
            tickets.append(device.submit(graph, 1, 1, 1, i % 2))
            submitting += time.perf_counter() - t
        for ticket in tickets:
            device.wait(ticket)
        per_step.append((time.perf_counter() - begin) / steps)
        per_submit.append(submitting / steps)
    return statistics.median(per_step), statistics.median(per_submit)


def make_weights(path: Path, gib: float) -> int:
    """A file whose int32 number i is i + 3, in the page cache."""
    size = int(gib * (1 << 30)) // (1 << 22) * (1 << 22)
    block = bytearray(1 << 22)
    with open(path, "wb") as file:
        for at in range(0, size, len(block)):
            struct.pack_into("<i", block, 0, at // 4 + 3)
            file.write(block)
    return size


def stream_weights(device: Any, path: Path, size: int, threads: int, piece_mib: int) -> float:
    begin = time.perf_counter()
    device.load_weights(str(path), 0, size, threads, piece_mib << 20)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights-gib", type=float, default=4)
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the weights file goes")
    options = parser.parse_args()
    figures: dict[str, float] = {}

    begin = time.perf_counter()
    found, reason = _native.gpu_devices("cuda")
    figures["list devices ms"] = (time.perf_counter() - begin) * 1e3
    assert found, reason
    print(found)
    arch = int(found[0][2].removeprefix("sm_"))
    kernels = {pdl: compile_kernel(arch, pdl) for pdl in (False, True)}

    descriptor, name = tempfile.mkstemp(dir=options.folder)
    os.close(descriptor)
    path = Path(name)
    try:
        size = make_weights(path, options.weights_gib)
        for threads, piece in ((16, 4), (16, 2), (16, 8), (8, 4), (32, 4)):
            other = _native.GpuDevice("cuda", 0)
            seconds = stream_weights(other, path, size, threads, piece)
            figures[f"weights {threads} threads x {piece} MiB GB/s"] = size / seconds * 1e-9
            other.close()
        run(options.nodes, kernels, compile_bring(arch), path, size, figures)
    finally:
        path.unlink()

    for what, value in figures.items():
        print(f"{what:45} {value:10.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def run(nodes: int, kernels: dict[bool, Any], bringing: Any, path: Path, size: int, figures: dict[str, float]) -> None:
    begin = time.perf_counter()
    device = _native.GpuDevice("cuda", 0, io_sets=2)
    figures["open ms"] = (time.perf_counter() - begin) * 1e3
    figures["weights, defaults GB/s"] = size / stream_weights(device, path, size, 0, 0) * 1e-9
    device.allocate("arena", 2 * MAX_ITEMS * 4)
    free, total = device.memory()
    device.allocate("kv", (free - (2 << 30)) // (1 << 21) * (1 << 21))
    device.allocate("state", 4096)
    device.allocate_io(IO_BYTES, SIZES)
    device.load_binary("bring", bringing.asm["cubin"])
    for pdl, kernel in kernels.items():
        device.load_binary(f"smoke_{int(pdl)}", kernel.asm["cubin"])
    graphs = {}
    for pdl in (False, True):
        for blocks in (1, 132):
            graphs[pdl, blocks] = device.load_graph(chain(f"smoke_{int(pdl)}", nodes, pdl, blocks), 0)
    offsets = list(range(0, size, 1 << 22))
    probing = device.load_graph(probe("smoke_0", offsets), 0)
    device.seal()
    io = device.view("io")
    check_weights(device, probing, io, offsets)
    for (_, blocks), graph in graphs.items():
        for io_set, tokens in ((0, 1), (1, blocks * BLOCK), (0, blocks * BLOCK - 3)):
            check_step(device, graph, io, io_set, tokens, nodes, 3)
    print(f"{len(graphs)} graphs of {nodes} nodes and {len(offsets)} places of the weights: all values right")
    figures["GPU memory GiB"] = total / (1 << 30)
    for (pdl, blocks), graph in graphs.items():
        step, submit = in_flight(device, graph, 40)
        label = f"{nodes} nodes x {blocks} blocks, {'programmatic' if pdl else 'plain'}"
        figures[f"{label}: us per node"] = step / nodes * 1e6
        figures[f"{label}: us to submit"] = submit * 1e6
        times = [seconds for _, seconds in device.profile(graph, 1, 1, 1, 0)[1:]]
        figures[f"{label}: us per node, profile"] = statistics.median(times) * 1e6
    summed: defaultdict[str, float] = defaultdict(float)
    for what, _, seconds, _ in device.spans():
        summed[what] += seconds
    for what, seconds in summed.items():
        figures[f"start: {what} ms"] = seconds * 1e3
    begin = time.perf_counter()
    device.close()
    figures["close ms"] = (time.perf_counter() - begin) * 1e3
    print({what: n for what, n in device.counters().items() if "after" in what or "graph" in what})


if __name__ == "__main__":
    main()
