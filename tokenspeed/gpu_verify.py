"""The static verifier of GPU launches: a proof over the data that a driver can run every node as it stands.

graph_verify.py proves what holds on every device (regions, aliases, order). Here each node's launch is held against
what its binary says of itself and against the limits of the target, with the base install and with no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenspeed.device_code import DeviceCode, KernelInfo
from tokenspeed.errors import ProgramError
from tokenspeed.graph import Argument, Launch, LaunchGraph, Node, Pointer, StepScalar
from tokenspeed.target import GpuArch, Target

GPU_POINTER_ALIGNMENT = 16
"""Kernels are compiled for pointers that are multiples of this."""
MAX_CLUSTER = 8
"""Blocks of a cluster at most, on every GPU that has clusters (CUDA C++ Programming Guide, "Thread Block Clusters")."""
_MAX_BLOCK = (1024, 1024, 64)
_CUDA_REGISTERS = 65536  # of a block, on every architecture since Maxwell
_HIP_GRID_THREADS = 1 << 32  # a dispatch packet counts threads of a dimension in 32 bits


def verify_gpu_graph(graph: LaunchGraph, target: Target, code: Mapping[str, DeviceCode]) -> None:
    """Prove that ``target`` can launch every node of ``graph``; ``code`` has its binaries by name.

    Every node names a kernel that is in a binary of this target, passes exactly the parameters that the kernel
    takes, and asks for a grid, block, cluster and shared memory that kernel and target allow. Raises ProgramError
    naming node and argument.
    """
    for node in graph.nodes:
        where = f"node {node.name!r}"
        if node.launch is None:
            raise ProgramError(f"{where}: need a launch for {target}, have none")
        info = _kernel(where, node, node.launch, target, code)
        _check_arguments(where, node, info)
        _check_block(where, node.launch, info, target)
        _check_grid(where, node.launch, target)
        _check_cluster(where, node.launch, info, target)
        _check_shared(where, node.launch, info, target.gpu)


def runs_on(arch: Target, target: Target) -> bool:
    """Whether code for ``arch`` runs on ``target``: code for its very name, or for the chip without extras (sm_90)."""
    return arch.backend == target.backend and arch.arch in (target.arch, target.arch.removesuffix("a"))


def _kernel(where: str, node: Node, launch: Launch, target: Target, code: Mapping[str, DeviceCode]) -> KernelInfo:
    binary = code.get(launch.binary)
    if binary is None:
        raise ProgramError(f"{where}: need a binary of the artifact, have {launch.binary!r}, which is none")
    if not runs_on(binary.arch, target):
        raise ProgramError(f"{where}: need code for {target}, have {launch.binary!r} for {binary.arch}")
    info = binary.kernels.get(node.symbol)
    if info is None:
        have = ", ".join(sorted(binary.kernels)[:4]) or "none"
        raise ProgramError(f"{where}: need a kernel {node.symbol!r} in {launch.binary!r}, have {have}")
    if info.warp_size != target.gpu.warp_size:
        raise ProgramError(f"{where}: need code for warps of {target.gpu.warp_size}, have {info.warp_size}")
    return info


def _check_arguments(where: str, node: Node, info: KernelInfo) -> None:
    if len(node.args) != len(info.params):
        raise ProgramError(
            f"{where}: need {len(info.params)} arguments, as kernel {node.symbol!r} takes, have {len(node.args)}"
        )
    for position, (arg, (_, size)) in enumerate(zip(node.args, info.params, strict=True)):
        if isinstance(arg, StepScalar):
            raise ProgramError(f"{where} arg {position}: need a value fixed at build on a GPU, have {arg}")
        if _bytes(arg) != size:
            raise ProgramError(f"{where} arg {position}: need a parameter of {size} bytes, have {_bytes(arg)} ({arg})")
        if isinstance(arg, Pointer) and arg.offset % GPU_POINTER_ALIGNMENT:
            raise ProgramError(
                f"{where} arg {position}: need a pointer at a multiple of {GPU_POINTER_ALIGNMENT} bytes, have {arg}"
            )


def _bytes(arg: Argument) -> int:
    return 8 if isinstance(arg, Pointer | StepScalar) else arg.size


def _check_block(where: str, launch: Launch, info: KernelInfo, target: Target) -> None:
    x, y, z = launch.block
    threads = x * y * z
    limit = min(info.max_threads, target.gpu.max_threads)
    if any(not 0 < n <= most for n, most in zip(launch.block, _MAX_BLOCK, strict=True)) or threads > limit:
        raise ProgramError(f"{where}: need a block of at most {limit} threads, have {launch.block}")
    if info.block is not None and launch.block != info.block:
        raise ProgramError(
            f"{where}: need the block {info.block} that the kernel was compiled for, have {launch.block}"
        )
    warps = -(-threads // info.warp_size)
    registers = warps * info.warp_size * ((info.num_registers + 7) // 8 * 8)  # a warp gets multiples of 256
    if target.backend == "cuda" and registers > _CUDA_REGISTERS:
        raise ProgramError(f"{where}: need {registers} registers a block, have {_CUDA_REGISTERS}")


def _check_grid(where: str, launch: Launch, target: Target) -> None:
    if any(not 0 < n <= most for n, most in zip(launch.grid, target.gpu.max_grid, strict=True)):
        raise ProgramError(f"{where}: need a grid within {target.gpu.max_grid}, have {launch.grid}")
    if target.backend == "hip":
        for blocks, threads in zip(launch.grid, launch.block, strict=True):
            if blocks * threads >= _HIP_GRID_THREADS:
                raise ProgramError(
                    f"{where}: need fewer than {_HIP_GRID_THREADS} threads in a dimension of the grid, "
                    f"have {blocks} blocks of {threads}"
                )


def _check_cluster(where: str, launch: Launch, info: KernelInfo, target: Target) -> None:
    x, y, z = launch.cluster
    if launch.programmatic and target.backend != "cuda":
        raise ProgramError(f"{where}: need a launch after its predecessors on {target}, have a programmatic one")
    if target.backend != "cuda" and launch.cluster != (1, 1, 1):
        raise ProgramError(f"{where}: need no clusters on {target}, have {launch.cluster}")
    if min(launch.cluster) < 1 or x * y * z > MAX_CLUSTER:
        raise ProgramError(f"{where}: need a cluster of 1 to {MAX_CLUSTER} blocks, have {launch.cluster}")
    if any(blocks % size for blocks, size in zip(launch.grid, launch.cluster, strict=True)):
        raise ProgramError(f"{where}: need a grid of whole clusters of {launch.cluster} blocks, have {launch.grid}")
    if info.cluster is not None and launch.cluster != info.cluster:
        raise ProgramError(
            f"{where}: need the cluster {info.cluster} that the kernel was compiled for, have {launch.cluster}"
        )


def _check_shared(where: str, launch: Launch, info: KernelInfo, gpu: GpuArch) -> None:
    static, dynamic = info.static_shared_bytes, launch.shared_bytes
    if dynamic < 0 or static + dynamic > gpu.max_shared_bytes:
        raise ProgramError(
            f"{where}: need at most {gpu.max_shared_bytes} bytes of shared memory a block, "
            f"have {static} static and {dynamic} dynamic"
        )
