"""The verifier of GPU launches accepts what compiled, and refuses every way in which a launch can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tiny_kernels import TARGETS, compiled, product_kernel, scale_kernel

from tokenspeed.device_code import DeviceCode, KernelInfo, read_device_code
from tokenspeed.errors import ProgramError
from tokenspeed.gpu_verify import verify_gpu_graph
from tokenspeed.graph import Access, Argument, Bytes, Float, Int, Launch, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.target import Target

HOPPER, GFX950 = Target("cuda", "sm_90a"), Target("hip", "gfx950")
X, OUT = Pointer(Region.ARENA, 0, 4096, Access.READ), Pointer(Region.ARENA, 4096, 4096, Access.WRITE)
SCRATCH = (Int(0), Int(0))


def built(target: Target) -> tuple[LaunchGraph, dict[str, DeviceCode]]:
    """A graph of both tiny kernels, launched as they were compiled, and its code by name."""
    scale, product = compiled()[scale_kernel(), target], compiled()[product_kernel(), target]
    args: dict[str, tuple[Argument, ...]] = {
        "scale": (X, OUT, Int(1000, size=4), Float(0.5, size=4), *SCRATCH),
        "product": (OUT, Pointer(Region.WEIGHTS, 512, 4096, Access.READ), X, *SCRATCH),
    }
    nodes = tuple(
        Node(code.symbol, code.symbol, args[code.symbol], (i - 1,) if i else (),
             Launch(code.name, (4, 1, 1), (code.threads, 1, 1), code.shared_bytes, (1, 1, 1), target.backend == "cuda"))
        for i, code in enumerate((scale, product))
    )  # fmt: skip
    return LaunchGraph(nodes), {code.name: read_device_code(code.binary) for code in (scale, product)}


def refuse(target: Target, graph: LaunchGraph, code: dict[str, DeviceCode], text: str) -> None:
    with pytest.raises(ProgramError) as e:
        verify_gpu_graph(graph, target, code)
    assert e.value.message == text


def with_node(graph: LaunchGraph, **changes: Any) -> LaunchGraph:
    """The graph with its first node changed."""
    return LaunchGraph((replace(graph.nodes[0], **changes), *graph.nodes[1:]))


def with_launch(graph: LaunchGraph, **changes: Any) -> LaunchGraph:
    """The graph with the launch of its first node changed."""
    launch = graph.nodes[0].launch
    assert launch is not None
    return with_node(graph, launch=replace(launch, **changes))


def with_info(code: dict[str, DeviceCode], **changes: Any) -> dict[str, DeviceCode]:
    """The code with every kernel saying something else of itself."""
    change: Callable[[KernelInfo], KernelInfo] = lambda info: replace(info, **changes)  # noqa: E731
    return {n: DeviceCode(c.arch, {s: change(info) for s, info in c.kernels.items()}) for n, c in code.items()}


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_what_compiled_may_run(target: Target) -> None:
    graph, code = built(target)
    verify_gpu_graph(graph, target, code)
    verify_gpu_graph(LaunchGraph(()), target, {})


def test_every_node_is_looked_at() -> None:
    graph, code = built(HOPPER)
    last = graph.nodes[1]
    changed = LaunchGraph((graph.nodes[0], replace(last, symbol="other")))
    assert last.launch is not None
    refuse(HOPPER, changed, code, f"node 'product': need a kernel 'other' in {last.launch.binary!r}, have product")


def test_a_node_needs_a_kernel_of_the_target() -> None:
    graph, code = built(HOPPER)
    refuse(HOPPER, with_node(graph, launch=None), code, "node 'scale': need a launch for cuda:sm_90a, have none")
    unknown = with_launch(graph, binary="lost")
    refuse(HOPPER, unknown, code, "node 'scale': need a binary of the artifact, have 'lost', which is none")
    name = next(iter(code))
    empty = {**code, name: DeviceCode(HOPPER, {})}
    refuse(HOPPER, graph, empty, f"node 'scale': need a kernel 'scale' in {name!r}, have none")
    for arch in (Target("cuda", "sm_100a"), Target("cuda", "sm_9"), Target("hip", "sm_90a"), Target("cuda", "sm_80")):
        other = {**code, name: DeviceCode(arch, code[name].kernels)}
        refuse(HOPPER, graph, other, f"node 'scale': need code for cuda:sm_90a, have {name!r} for {arch}")
    plain = {**code, name: DeviceCode(Target("cuda", "sm_90"), code[name].kernels)}
    verify_gpu_graph(graph, HOPPER, plain)
    text = "node 'scale': need code for warps of 32, have 64"
    refuse(HOPPER, graph, with_info(code, warp_size=64), text)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((X, OUT, Int(1, 4), Float(0.5, 4)), ": need 6 arguments, as kernel 'scale' takes, have 4"),
        ((X, OUT, Int(1, 4), Float(0.5, 4), *SCRATCH, Int(0)), ": need 6 arguments, as kernel 'scale' takes, have 7"),
        ((X, OUT, Int(1), Float(0.5, 4), *SCRATCH), " arg 2: need a parameter of 4 bytes, have 8 (1)"),
        ((X, OUT, Int(1, 4), Float(0.5), *SCRATCH), " arg 3: need a parameter of 4 bytes, have 8 (0.5)"),
        ((X, Int(1, 4), Int(1, 4), Float(0.5, 4), *SCRATCH), " arg 1: need a parameter of 8 bytes, have 4 (1)"),
        ((X, OUT, X, Float(0.5, 4), *SCRATCH), " arg 2: need a parameter of 4 bytes, have 8 (arena[0:4096]r)"),
        ((X, OUT, Int(1, 4), Float(0.5, 4), StepScalar(0), Int(0)),
         " arg 4: need a value fixed at build on a GPU, have num_tokens"),
        ((X, replace(OUT, offset=4104), Int(1, 4), Float(0.5, 4), *SCRATCH),
         " arg 1: need a pointer at a multiple of 16 bytes, have arena[4104:8200]w"),
    ],
)  # fmt: skip
def test_arguments_are_the_parameters_of_the_kernel(args: tuple[Argument, ...], text: str) -> None:
    graph, code = built(HOPPER)
    refuse(HOPPER, with_node(graph, args=args), code, f"node 'scale'{text}")


def test_parameters_passed_by_value_have_the_size_of_the_struct() -> None:
    graph, code = built(HOPPER)
    struct = Bytes(bytes(24), ((8, replace(X, offset=8)),))  # what is in it is the library's business
    whole = with_node(LaunchGraph(graph.nodes[:1]), args=(struct,))
    verify_gpu_graph(whole, HOPPER, with_info(code, params=((0, 24),)))
    text = f"node 'scale' arg 0: need a parameter of 32 bytes, have 24 ({struct})"
    refuse(HOPPER, whole, with_info(code, params=((0, 32),)), text)


@pytest.mark.parametrize(
    ("target", "launch", "info", "text"),
    [
        (HOPPER, {"block": (160, 1, 1)}, {}, "need a block of at most 128 threads, have (160, 1, 1)"),
        (HOPPER, {"block": (0, 1, 1)}, {}, "need a block of at most 128 threads, have (0, 1, 1)"),
        (HOPPER, {"block": (1, 1, 128)}, {}, "need a block of at most 128 threads, have (1, 1, 128)"),
        (HOPPER, {"block": (2048, 1, 1)}, {"max_threads": 4096, "block": None},
         "need a block of at most 1024 threads, have (2048, 1, 1)"),
        (HOPPER, {"block": (64, 2, 1)}, {},
         "need the block (128, 1, 1) that the kernel was compiled for, have (64, 2, 1)"),
        (HOPPER, {"block": (1024, 1, 1)}, {"max_threads": 1024, "block": None, "num_registers": 65},
         "need 73728 registers a block, have 65536"),
        (HOPPER, {"grid": (2**31, 1, 1)}, {},
         "need a grid within (2147483647, 65535, 65535), have (2147483648, 1, 1)"),
        (HOPPER, {"grid": (1, 65536, 1)}, {}, "need a grid within (2147483647, 65535, 65535), have (1, 65536, 1)"),
        (HOPPER, {"grid": (1, 1, 65536)}, {}, "need a grid within (2147483647, 65535, 65535), have (1, 1, 65536)"),
        (HOPPER, {"grid": (1, 0, 1)}, {}, "need a grid within (2147483647, 65535, 65535), have (1, 0, 1)"),
        (GFX950, {"grid": (2**24, 1, 1)}, {},
         "need fewer than 4294967296 threads in a dimension of the grid, have 16777216 blocks of 256"),
        (HOPPER, {"cluster": (0, 1, 1)}, {}, "need a cluster of 1 to 8 blocks, have (0, 1, 1)"),
        (HOPPER, {"cluster": (4, 4, 1), "grid": (4, 4, 1)}, {}, "need a cluster of 1 to 8 blocks, have (4, 4, 1)"),
        (HOPPER, {"cluster": (8, 1, 1)}, {}, "need a grid of whole clusters of (8, 1, 1) blocks, have (4, 1, 1)"),
        (HOPPER, {}, {"cluster": (2, 1, 1)},
         "need the cluster (2, 1, 1) that the kernel was compiled for, have (1, 1, 1)"),
        (GFX950, {"cluster": (2, 1, 1)}, {}, "need no clusters on hip:gfx950, have (2, 1, 1)"),
        (GFX950, {"programmatic": True}, {},
         "need a launch after its predecessors on hip:gfx950, have a programmatic one"),
        (HOPPER, {"shared_bytes": 232449}, {},
         "need at most 232448 bytes of shared memory a block, have 0 static and 232449 dynamic"),
        (GFX950, {"shared_bytes": 163840}, {"static_shared_bytes": 16},
         "need at most 163840 bytes of shared memory a block, have 16 static and 163840 dynamic"),
        (HOPPER, {"shared_bytes": -1}, {},
         "need at most 232448 bytes of shared memory a block, have 0 static and -1 dynamic"),
    ],
)  # fmt: skip
def test_launches_stay_within_kernel_and_target(
    target: Target, launch: dict[str, Any], info: dict[str, Any], text: str
) -> None:
    graph, code = built(target)
    refuse(target, with_launch(graph, **launch), with_info(code, **info), f"node 'scale': {text}")


@pytest.mark.parametrize(
    ("target", "launch", "info"),
    [
        (HOPPER, {"shared_bytes": 232448}, {}),
        (HOPPER, {"grid": (2**31 - 1, 65535, 65535)}, {}),
        (HOPPER, {"cluster": (4, 2, 1), "grid": (4, 2, 1)}, {}),
        (HOPPER, {"block": (1024, 1, 1)}, {"max_threads": 1024, "block": None, "num_registers": 64}),
        (GFX950, {"grid": (2**24 - 1, 65535, 1)}, {}),
        (GFX950, {"block": (64, 1, 1)}, {}),
    ],
)
def test_the_limits_themselves_are_allowed(target: Target, launch: dict[str, Any], info: dict[str, Any]) -> None:
    graph, code = built(target)
    first = LaunchGraph(with_launch(graph, **launch).nodes[:1])
    verify_gpu_graph(first, target, with_info(code, **info))
