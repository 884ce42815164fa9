"""Runs Triton kernels, and whole LaunchGraphs made of them, on the CPU: the oracle of the GPU targets.

Pointers are plain addresses of NumPy memory, every load and store must lie inside memory that the caller named,
and arithmetic is a GPU's, with sums in float64 so that their order does not show (compile/triton_language.py).
Functions made by ``triton.jit`` run as they are: neither torch nor TRITON_INTERPRET is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from tokenspeed.compile.interpret_graph import Memory
from tokenspeed.compile.lower import SCRATCH_PARAMETERS
from tokenspeed.compile.triton_language import Window, argument, interpreting, rewritten
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Argument, Bytes, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.kernels.registry import DeviceKernel
from tokenspeed.step import PlacedTensor

Scalar: TypeAlias = int | float


# --- LaunchGraphs ---------------------------------------------------------------------------------


def run_gpu_graph(
    graph: LaunchGraph,
    kernels: Mapping[str, DeviceKernel],
    memory: Memory,
    step_sizes: PlacedTensor,
    sizes: Sequence[int],
    *,
    order: Sequence[int] | None = None,
    seed: int | None = None,
) -> None:
    """Run one step of a GPU graph, node by node.

    Args:
        kernels: binary name -> the kernel in it.
        memory: the device's regions; the step's inputs lie in region host_io, but for ``step_sizes``, which this fills.
        step_sizes: where the sizes of the step lie there.
        sizes: those of STEP_COUNTS, in order; 0 for those left out.
        order: any order of the nodes that respects the edges; None: as they stand.
        seed: run the programs of each launch in a random order.

    Raises:
        ProgramError: a node that does not fit its kernel, an order that breaks an edge, or an access outside what
            the node's pointers promise.
    """
    counts = memory.regions[Region.HOST_IO][step_sizes.offset : step_sizes.offset + step_sizes.nbytes].view(np.int32)
    counts[:] = (*sizes, *[0] * (len(counts) - len(sizes)))
    done: set[int] = set()
    with interpreting():
        for index in range(len(graph.nodes)) if order is None else order:
            node = graph.nodes[index]
            if not done.issuperset(node.predecessors):
                raise ProgramError(f"node {node.name!r} ({node.symbol}): need its predecessors to have run")
            launch = _node_launch(node, kernels, memory, sizes, None if seed is None else seed + index)
            try:
                run_launch(launch)
            except ProgramError as error:
                raise ProgramError(f"node {node.name!r}: {error.message}", hint=error.hint) from error
            done.add(index)


def _node_launch(
    node: Node, kernels: Mapping[str, DeviceKernel], memory: Memory, sizes: Sequence[int], seed: int | None
) -> KernelLaunch:
    kernel = None if node.launch is None else kernels.get(node.launch.binary)
    if node.launch is None or kernel is None or kernel.function != node.symbol:
        raise ProgramError(f"node {node.name!r} ({node.symbol}): need a binary of this kernel, have {node.launch}")
    args, need = node.args[: len(kernel.signature)], len(kernel.signature) + len(SCRATCH_PARAMETERS)
    if len(node.args) != need or not _is_scratch(node.args[len(args) :], kernel.scratch_bytes * prod(node.launch.grid)):
        last = "the last but one its scratch memory" if kernel.scratch_bytes else "the last ones null"
        raise ProgramError(f"node {node.name!r}: need {need} arguments for {kernel}, {last}, have {node}")
    grid = node.launch.grid
    module = importlib.import_module(kernel.module)
    if hasattr(module, "interpreted"):  # kernels that are not written in Triton's language name some that are
        kernel, grid = module.interpreted(kernel, sizes)
        module = importlib.import_module(kernel.module)
    arguments, windows = {}, []
    for (name, kind), arg in zip(kernel.signature, args, strict=True):
        if isinstance(arg, StepScalar | Bytes) or isinstance(arg, Pointer) != kind.startswith("*"):
            raise ProgramError(f"node {node.name!r} argument {name}: need {kind}, have {arg}")
        arguments[name] = (kind, _value(arg, memory))
        if isinstance(arg, Pointer):
            windows.append(_window(name, arg, memory))
    # The interpreter runs one kernel after another: there is nothing to wait for.
    constants = {**dict(kernel.constants), "PDL": False} if "PDL" in dict(kernel.constants) else dict(kernel.constants)
    return KernelLaunch(getattr(module, kernel.function), grid, arguments, constants, windows, seed)


def _is_scratch(args: Sequence[Argument], nbytes: int) -> bool:
    """Whether ``args`` are what ends the parameters of a kernel whose launch needs ``nbytes`` of scratch memory."""
    if nbytes == 0:
        return tuple(args) == SCRATCH_PARAMETERS
    first, *rest = args
    return isinstance(first, Pointer) and first.extent == nbytes and tuple(rest) == SCRATCH_PARAMETERS[1:]


def _value(arg: Argument, memory: Memory) -> Scalar:
    assert not isinstance(arg, StepScalar | Bytes), arg
    return _address(arg, memory) if isinstance(arg, Pointer) else arg.value


def _address(pointer: Pointer, memory: Memory) -> int:
    return int(memory.regions[pointer.region].ctypes.data) + pointer.offset


def _window(name: str, pointer: Pointer, memory: Memory) -> Window:
    """What ``pointer`` promises: its extent; of region kv, that much of every page."""
    paged = pointer.region is Region.KV
    return Window(
        name,
        _address(pointer, memory),
        pointer.extent,
        readable=bool(pointer.access & Access.READ),
        writable=bool(pointer.access & Access.WRITE),
        stride=memory.kv_page_bytes if paged else 0,
        count=len(memory.regions[Region.KV]) // memory.kv_page_bytes if paged else 1,
    )


# --- launches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel.

    Attributes:
        kernel: what ``triton.jit`` made.
        grid: number of programs in x, y and z.
        arguments: parameter -> (type as in a signature, such as ``*bf16`` or ``i32``; address or number).
        constants: constexpr parameter -> value.
        windows: the memory that it may touch.
        seed: run the programs of the grid in a random order; None: in order.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, tuple[str, Scalar]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    windows: Sequence[Window] = ()
    seed: int | None = None


def run_launch(launch: KernelLaunch) -> None:
    """Run every program of ``launch``, one after another.

    Raises ProgramError for an access outside its windows; what the kernel itself raises passes through.
    """
    function = rewritten(launch.kernel)
    arguments = {name: argument(kind, value) for name, (kind, value) in launch.arguments.items()}
    programs: Iterable[tuple[int, ...]] = product(*(range(size) for size in launch.grid))
    if launch.seed is not None:
        listed = list(programs)
        programs = [listed[i] for i in np.random.default_rng(launch.seed).permutation(len(listed))]
    with interpreting() as builder, np.errstate(all="ignore"):
        builder.enter(launch.kernel.__name__, launch.grid, launch.windows)
        for program in programs:
            builder.set_grid_idx(*program)
            function(**arguments, **launch.constants)
