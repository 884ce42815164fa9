"""The wide projections of Hopper: how they compile, their scratch memory in a step, and what stands in for them in
the interpreter, which cannot run Gluon. That their bits are those of the tiles is measured on the device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import triton
from lowered import LIMITS, fused_program
from test_gpu_graph import CONFIG, NUM_PAGES, GpuDevice, uncompiled
from test_interpret_graph import mixed_steps
from tiny_llama import tiny_config
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.compile.interpret import step_inputs
from tokenspeed.compile.lower import LoweredTarget, lower_program
from tokenspeed.compile.program import Program
from tokenspeed.device_code import DeviceCode, read_device_code
from tokenspeed.errors import ProgramError, TargetError
from tokenspeed.gpu_verify import verify_gpu_graph
from tokenspeed.graph import Access, Int, LaunchGraph, Node, Pointer, Region
from tokenspeed.kernels.registry import DeviceKernel, Request
from tokenspeed.kernels.triton import linear, linear_wide
from tokenspeed.kernels.triton.linear_candidates import candidates
from tokenspeed.kernels.triton.linear_config import WIDE_TILE, Config, rule, to_json, usable
from tokenspeed.kernels.triton_specs import triton_registry
from tokenspeed.target import GPU_TARGETS, Target

HOPPER = Target.parse("cuda:sm_90a")
OPS = ("linear", "linear_add", "linear_add_rounded", "linear_silu_mul")
"""Of these ``linear_add_rounded`` is linear_add with its attribute ``rounded``."""
FEW = Config(8, 64, 128, 4, 8, swapped=True, kind="wide", early=False)
SMALL = Config(64, 64, 64, 4, 2, swapped=False, kind="wide")
TILE = Config(64, 64, 64, 4, 2, swapped=False)


def kernel_of(op: str, config: Config, n: int = 4096, k: int = 4096) -> DeviceKernel:
    kind = op.removesuffix("_rounded")
    sizes = {"N": n, "F": n // 2, "K": k, "rows": 0, "M": 4096, "rounded": int(kind != op)}
    (stage,) = linear.stages(Request(kind, HOPPER, "bfloat16", sizes), config)
    assert stage.kernel is not None
    assert stage.scratch_bytes == linear_wide.SCRATCH_BYTES * prod(stage.grid) > 0
    return stage.kernel


def ptx_of(kernel: DeviceKernel) -> str:
    function = getattr(linear_wide, kernel.function)
    names, kinds = function.arg_names, dict(kernel.signature)
    source = GluonASTSource(
        function,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in kernel.constants},
        {(names.index(name),): [["tt.divisibility", 16]] for name in kinds},
    )
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages, "enable_fp_fusion": False}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("config", [WIDE_TILE, FEW], ids=["many rows", "few rows"])
def test_sums_stay_in_registers_and_operands_come_through_maps(op: str, config: Config) -> None:
    ptx = ptx_of(kernel_of(op, config))
    side = config.block_m if config.swapped else config.block_n
    assert set(re.findall(r"wgmma\.mma_async\S*?(m64n\d+k16)", ptx)) == {f"m64n{side}k16"}
    assert ptx.count("cp.async.bulk.tensor") >= 2 and "st.local" not in ptx


@pytest.mark.parametrize("early", [True, False])
def test_every_warp_that_touches_what_others_write_waits_first(early: bool) -> None:
    ptx = ptx_of(kernel_of("linear_add", replace(FEW, early=early)))
    # Once those that multiply; twice the one that copies, which may have no tile. W comes before its wait, x after.
    start, multiply, copy, idle = ptx.split("griddepcontrol.wait")
    assert start.count("ld.global") == 1 and "st.global" not in start  # the step's sizes
    assert "ld.global" in multiply and "st.global" in multiply
    assert "ld.global" not in copy + idle and "st.global" not in copy + idle
    maps = [
        set(re.findall(r"complete_tx::bytes \[%r\d+\], \[(%rd\d+),", part)) for part in (start, multiply, copy, idle)
    ]
    assert [len(found) for found in maps] == [0, 1, 2, 0] and maps[1] < maps[2]
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    assert ("griddepcontrol.launch_dependents" in start) is early


@pytest.mark.parametrize("config", [WIDE_TILE, FEW, SMALL], ids=str)
def test_codegen_makes_binaries_whose_registers_and_shared_memory_fit(config: Config) -> None:
    kernels = [kernel_of(op, config) for op in OPS]
    for kernel, compiled in zip(
        kernels, compile_kernels([(kernel, HOPPER) for kernel in kernels], workers=2).values(), strict=True
    ):
        info = compiled.info
        assert compiled.threads == (256 if config.num_warps == 4 else 384) == info.max_threads
        assert info.num_registers * compiled.threads <= 65536 and info.stack_bytes == 0
        assert not kernel.max_registers or info.num_registers <= kernel.max_registers
        assert len(info.params) == len(kernel.signature) + 2
        assert compiled.shared_bytes <= config.shared_bytes(HOPPER, 2) + 1024


def test_scratch_memory_that_a_kernel_does_not_declare_is_refused() -> None:
    kernel = replace(kernel_of("linear", FEW), scratch_bytes=0)
    with pytest.raises(TargetError, match="need a kernel with 0 bytes of scratch memory, have 256"):
        compile_kernels([(kernel, HOPPER)], workers=1)


# --- where they are chosen --------------------------------------------------------------------------------


def test_only_hopper_gets_them() -> None:
    for name in GPU_TARGETS:
        target = Target.parse(name)
        for config in (WIDE_TILE, FEW, SMALL):
            assert usable(config, target, "linear") is (target == HOPPER)
        for m in (1, 64, 512, 8192):
            kinds = {c.kind for c in candidates(target, "linear_add", m, 4096, 4096)}
            assert kinds == ({"tile", "wide"} if target == HOPPER else {"tile"})
        many = rule(target, "linear", 8192, 640 * 16, 640, "bfloat16")
        assert (many == WIDE_TILE) is (target == HOPPER)
        assert rule(target, "linear", 8192, 640 * 16, 640, "float32").kind == "tile"


def test_what_does_not_fit_is_not_usable() -> None:
    for config in (WIDE_TILE, FEW, SMALL, *candidates(HOPPER, "linear", 64, 4096, 4096)):
        assert usable(config, HOPPER, "linear") and Config(**to_json(config)) == config  # type: ignore[arg-type]
    for wrong in (
        replace(WIDE_TILE, num_stages=5), replace(WIDE_TILE, num_warps=4), replace(WIDE_TILE, per_unit=2),
        replace(WIDE_TILE, block_m=64), replace(WIDE_TILE, block_n=96), replace(WIDE_TILE, block_k=32),
        replace(WIDE_TILE, prefetch=1024), replace(WIDE_TILE, kind="long"), replace(FEW, num_warps=2),
        replace(FEW, per_unit=2), replace(SMALL, num_stages=1),
    ):  # fmt: skip
        assert not usable(wrong, HOPPER, "linear"), wrong


# --- in a step --------------------------------------------------------------------------------------------


def lowered(program: Program, monkeypatch: pytest.MonkeyPatch, config: Config, **options: Any) -> LoweredTarget:
    monkeypatch.setattr(linear, "choose", lambda *_: config)
    return lower_program(
        program, HOPPER, LIMITS, triton_registry(), split_positions=64, **{"compile_kernels": uncompiled, **options}
    )


def wide_nodes(graph: LaunchGraph) -> list[Node]:
    return [node for node in graph.nodes if node.symbol.endswith("_wide")]


def test_no_launch_shares_its_scratch_memory_with_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    low = lowered(fused_program(tiny_config(**CONFIG), "bfloat16"), monkeypatch, SMALL)
    for graph in low.graphs.values():
        nodes = wide_nodes(graph)
        assert len(nodes) == 4 * 2 + 1  # of two layers, and the logits
        for node in nodes:
            scratch, profile = node.args[-2:]
            assert isinstance(scratch, Pointer) and profile == Int(0) and node.launch is not None
            assert scratch.region is Region.ARENA and scratch.access == Access.READ | Access.WRITE
            assert scratch.offset % 256 == 0 and scratch.extent == 256 * prod(node.launch.grid)
            others = [p for n in graph.nodes for _, p in n.pointers() if p is not scratch and p.region is Region.ARENA]
            assert not any(p.offset < scratch.end and scratch.offset < p.end for p in others)


def test_the_launches_of_a_step_fit_their_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    code: dict[str, DeviceCode] = {}

    def compiled(kernels: Sequence[DeviceKernel]) -> Any:
        found = compile_kernels([(kernel, HOPPER) for kernel in kernels], workers=2)
        code.update({c.name: read_device_code(c.binary) for c in found.values()})
        return {kernel: c for (kernel, _), c in found.items()}

    program = fused_program(tiny_config(**CONFIG, num_layers=1), "bfloat16")
    largest = [Bucket(BucketKind.DECODE, 6, 6, 6), Bucket(BucketKind.MIXED, 80, 6, 44)]
    low = lowered(program, monkeypatch, SMALL, buckets=largest, compile_kernels=compiled)
    for graph in low.graphs.values():
        verify_gpu_graph(graph, HOPPER, code)
        assert all(node.launch is not None and node.launch.programmatic for node in wide_nodes(graph))


def test_the_interpreter_runs_the_tiles_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**CONFIG, num_layers=1)
    program = fused_program(config, "bfloat16")
    tiles, wide = (
        GpuDevice(program, lowered(program, monkeypatch, choice), config, NUM_PAGES) for choice in (TILE, SMALL)
    )
    assert all(wide_nodes(graph) for graph in wide.low.graphs.values())
    for chunks in mixed_steps()[:3]:
        inputs = step_inputs(program, chunks)
        expected, have = tiles.run(inputs), wide.run(inputs)
        for name in expected:
            np.testing.assert_array_equal(have[name], expected[name])


def test_the_interpreter_wants_the_scratch_memory_that_the_device_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**CONFIG, num_layers=1)
    program = fused_program(config, "bfloat16")
    device = GpuDevice(program, lowered(program, monkeypatch, SMALL), config, NUM_PAGES)

    def short(node: Node) -> Node:
        if not node.symbol.endswith("_wide"):
            return node
        scratch = node.args[-2]
        assert isinstance(scratch, Pointer)
        return replace(node, args=(*node.args[:-2], replace(scratch, extent=128), node.args[-1]))

    broken = {b: LaunchGraph(tuple(map(short, g.nodes))) for b, g in device.low.graphs.items()}
    device.low = replace(device.low, graphs=broken)
    with pytest.raises(ProgramError, match="the last but one its scratch memory"):
        device.run(step_inputs(program, mixed_steps()[0]))
