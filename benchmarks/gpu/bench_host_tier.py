"""How fast do pages move between a GPU and the host tier, and what does a step notice of it? Checks that bytes survive
the way to the host and back, then prints a table; --json PATH writes the figures too.

    python benchmarks/gpu/bench_host_tier.py [--host-gib 8] [--json /tmp/host_tier.json]

GB/s are bytes of pages over the time from move_pages to the end of a step of one small kernel behind them. Needs Triton
and an NVIDIA GPU, as smoke_device.py does, whose kernels it runs.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoke_device import (
    BLOCK,
    IN,
    IO_BYTES,
    MAX_ITEMS,
    OUT,
    SIZES,
    bring_node,
    chain,
    compile_bring,
    compile_kernel,
    make_weights,
)

from tokenspeed import _native
from tokenspeed.graph import Access, Float, Int, Launch, LaunchGraph, Node, Pointer, Region

PAGE_KIB = (64, 512, 2048, 4096)
NUM_MOVED = (1, 8, 64)
CHAIN_NODES = 2000
ROUNDS = 15
Moves = list[tuple[int, int]]


def one_node(x: Pointer, y: Pointer) -> bytes:
    """y = x + 3 for the first num_tokens int32."""
    weights, sizes = Pointer(Region.WEIGHTS, 0, 4, Access.READ), Pointer(Region.IO, SIZES, 16, Access.READ)
    args = (x, y, weights, sizes, Int(0, 4), Float(1.0, 4), Int(0), Int(0))
    node = Node("one", "smoke", args, (0,), Launch("smoke", (1, 1, 1), (128, 1, 1)))
    return LaunchGraph((bring_node(), node)).encode()


class Bench:
    """A device with ``num_pages`` pages of ``page_bytes`` on either side."""

    def __init__(self, cubins: tuple[bytes, bytes], weights: tuple[Path, int], page_bytes: int, num_pages: int):
        self.page_bytes, self.num_pages = page_bytes, num_pages
        self.device: Any = _native.GpuDevice("cuda", 0, io_sets=2)
        self.device.load_weights(str(weights[0]), 0, weights[1])
        self.device.allocate("arena", 2 * MAX_ITEMS * 4)
        self.device.allocate("kv", num_pages * page_bytes)
        self.device.allocate_io(IO_BYTES, SIZES)
        begin = time.perf_counter()
        self.device.allocate_host_pages(num_pages, page_bytes)
        self.pin_seconds = time.perf_counter() - begin
        self.device.load_binary("bring", cubins[0])
        self.device.load_binary("smoke", cubins[1])
        size = BLOCK * 4
        page = Pointer(Region.KV, 0, size, Access.READ), Pointer(Region.KV, 0, size, Access.WRITE)
        inputs, outputs = Pointer(Region.IO, IN, size, Access.READ), Pointer(Region.HOST_IO, OUT, size, Access.WRITE)
        self.writing = self.device.load_graph(one_node(inputs, page[1]), page_bytes)  # to page 0
        self.reading = self.device.load_graph(one_node(page[0], outputs), page_bytes)
        self.long = self.device.load_graph(chain("smoke", CHAIN_NODES, False, 132), page_bytes)
        self.device.seal()
        self._io = self.device.view("io")

    def step(self, graph: int, io_set: int = 0) -> int:
        return int(self.device.submit(graph, BLOCK, 1, 1, io_set))

    def write(self, value: int) -> None:
        self._io[IN : IN + BLOCK * 4].cast("i")[:] = memoryview(bytes(4 * BLOCK)).cast("i")
        self._io[IN : IN + 4].cast("i")[0] = value
        self.device.wait(self.step(self.writing))

    def read(self) -> int:
        self.device.wait(self.step(self.reading))
        return self._io[OUT : OUT + 4].cast("i")[0] - 6  # 3 at each of two steps

    def check(self) -> None:
        """Values leave page 0 for every fourth host page and come back in another order."""
        hosts = list(range(0, self.num_pages, 4))
        for host in hosts:
            self.write(1000 + host)
            self.device.move_pages([(0, host)], [])
        random.Random(1).shuffle(hosts)
        for host in hosts:
            self.device.move_pages([], [(0, host)])
            assert self.read() == 1000 + host, host

    def seconds(self, out: Moves, back: Moves) -> float:
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            self.device.move_pages(out, back)
            self.device.wait(self.step(self.reading))
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def beside_a_step(self, out: Moves, back: Moves) -> tuple[float, float, float]:
        """Seconds of a long step alone, of the moves alone, and of both side by side."""

        def timed(moves: bool, long: bool) -> float:
            times = []
            for _ in range(ROUNDS):
                begin = time.perf_counter()
                if long:
                    self.step(self.long, 1)
                if moves:
                    self.device.move_pages(out, back)
                self.device.wait(self.step(self.reading, 0))
                times.append(time.perf_counter() - begin)
            return statistics.median(times)

        return timed(False, True), timed(True, False), timed(True, True)


def moves_of(count: int, num_pages: int, *, scattered: bool) -> Moves:
    device, host = list(range(num_pages)), list(range(num_pages))
    if scattered:
        random.Random(2).shuffle(device)
        random.Random(3).shuffle(host)
    return list(zip(device[:count], host[:count], strict=True))


def measure(bench: Bench, figures: dict[str, float]) -> None:
    size = f"{bench.page_bytes >> 10} KiB"
    idle = bench.seconds([], [])
    figures[f"{size}: us of a step alone"] = idle * 1e6
    for count in NUM_MOVED:
        for scattered in (False, True):
            moves = moves_of(count, bench.num_pages, scattered=scattered)
            nbytes = count * bench.page_bytes
            label = f"{size} x {count}{' scattered' if scattered else ''}"
            ways: Sequence[tuple[str, Moves, Moves, int]] = (
                ("out", moves, [], 1), ("in", [], moves, 1), ("both", moves, moves, 2)
            )  # fmt: skip
            for way, out, back, times in ways:
                figures[f"{label} {way} GB/s"] = times * nbytes / bench.seconds(out, back) * 1e-9
    moves = moves_of(NUM_MOVED[-1], bench.num_pages, scattered=True)
    begin = time.perf_counter()
    bench.device.move_pages(moves, moves)
    figures[f"{size} x {2 * len(moves)}: us of move_pages"] = (time.perf_counter() - begin) * 1e6
    bench.device.wait(bench.step(bench.reading))
    step, alone, both = bench.beside_a_step(moves, [])
    figures[f"{size}: us of a long step"], figures[f"{size}: us of moves"] = step * 1e6, alone * 1e6
    figures[f"{size}: us of both"] = both * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host-gib", type=float, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, reason = _native.gpu_devices("cuda")
    assert found, reason
    arch = int(found[0][2].removeprefix("sm_"))
    cubins = compile_bring(arch).asm["cubin"], compile_kernel(arch, False).asm["cubin"]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        weights = path, make_weights(path, 1 / 64)
        for kib in PAGE_KIB:
            last = kib == PAGE_KIB[-1]
            nbytes = int(options.host_gib * (1 << 30)) if last else 256 << 20
            bench = Bench(cubins, weights, kib << 10, nbytes // (kib << 10))
            if last:
                figures["pinning GB/s"] = nbytes / bench.pin_seconds * 1e-9
            else:
                bench.check()
            measure(bench, figures)
            bench.device.close()
    for what, value in figures.items():
        print(f"{what:45} {value:10.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
