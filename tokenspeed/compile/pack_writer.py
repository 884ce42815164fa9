"""What the builders of packs (tuning.py, proving.py) share: kernels compiled, graphs verified, members written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.compile.build import Progress
from tokenspeed.compile.codegen import CompiledKernel, Job, compile_kernels
from tokenspeed.compile.lower import SCRATCH_PARAMETERS, connected
from tokenspeed.device_code import DeviceCode, read_device_code
from tokenspeed.errors import ArtifactError, TargetError
from tokenspeed.gpu_verify import verify_gpu_graph
from tokenspeed.graph import Access, Argument, Int, Launch, LaunchGraph, Node, Pointer, Region
from tokenspeed.graph_verify import verify_graph
from tokenspeed.kernels.registry import ArgumentRule, DeviceKernel, Stage
from tokenspeed.kernels.triton.stage import Extent, copy_stage
from tokenspeed.pack_file import STEP_SIZES_BYTES, AnyManifest, Part, region_sizes, write_pack
from tokenspeed.step import STEP_SCALARS
from tokenspeed.target import Target

HOST_SIZES = Pointer(Region.HOST_IO, 0, STEP_SIZES_BYTES, Access.READ)
SIZES_WRITTEN = Pointer(Region.IO, 0, STEP_SIZES_BYTES, Access.WRITE)
SIZES = Pointer(Region.IO, 0, STEP_SIZES_BYTES, Access.READ)
"""The sizes of the step: where the host leaves them, where they are brought, where kernels read them."""


@dataclass(frozen=True)
class PackResult:
    """What was packed: where, its identity, bytes, how many there are of what it holds by name, the binaries among
    them, the kernels that do not compile with their errors, and the seconds that each stage took."""

    path: Path
    digest: str
    nbytes: int
    counts: Mapping[str, int]
    failures: Mapping[str, str]
    seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "digest": self.digest, "nbytes": self.nbytes, **self.counts,
                "failures": dict(self.failures), "seconds": dict(self.seconds)}  # fmt: skip


def check_output(path: Path, force: bool) -> None:
    """Raise ArtifactError if there is something at ``path`` that may not be replaced."""
    if path.is_dir() or (path.exists() and not force):
        raise ArtifactError(f"{path} exists already", hint="choose another path with -o, or pass --force to replace it")


class PackWriter:
    """Collects the members of a pack: data and graphs by content, and the binaries that they use.

    Attributes:
        failures: the kernels that do not compile, with their errors.
    """

    def __init__(
        self,
        target: Target,
        kernels: Iterable[DeviceKernel],
        *,
        workers: int | None,
        cache: Path | None,
        progress: Progress,
    ):
        """Compile ``kernels``, each once. ``workers``, ``cache``: as for ``build``."""
        self._target, self._progress = target, progress
        self._members: dict[str, bytes] = {}
        self._used: dict[CompiledKernel, None] = {}
        self._code: dict[str, DeviceCode] = {}
        failures: dict[Job, TargetError] = {}
        with progress.stage("compile"):
            jobs = [(kernel, target) for kernel in dict.fromkeys(kernels)]
            compiled = compile_kernels(jobs, workers=workers, cache=cache, progress=progress.stream, failures=failures)
        self._compiled = {kernel: code for (kernel, _), code in compiled.items()}
        self.failures = {str(kernel): error.message for (kernel, _), error in failures.items()}

    def has(self, stages: Iterable[Stage]) -> bool:
        """Whether all kernels of ``stages`` compiled."""
        return all(stage.kernel in self._compiled for stage in stages)

    def node(self, name: str, stage: Stage, argument: Callable[[ArgumentRule], Argument], scratch: int = 0) -> Node:
        """A launch of ``stage``, with the arguments that ``argument`` makes and, if it needs any, scratch memory at
        ``scratch`` in region arena."""
        first, last = SCRATCH_PARAMETERS
        used = Pointer(Region.ARENA, scratch, stage.scratch_bytes, Access.READ | Access.WRITE)
        args = (*map(argument, stage.arguments), used if stage.scratch_bytes else first, last)
        return Node(f"{name} {stage.name}".rstrip(), stage.symbol, args, (), self._launch(stage))

    def copy_node(self, name: str, stage: Stage, source: Pointer, target: Pointer) -> Node:
        """A launch of ``stage``, a ``copy_stage``, in a step of the sizes in region host_io."""
        arguments: dict[str, Argument] = {"step_sizes": HOST_SIZES, "source": source, "target": target}
        arguments |= dict.fromkeys(STEP_SCALARS, Int(0, 4))  # of buckets: nothing is copied for as many as one has
        return self.node(name, stage, lambda rule: arguments[rule.name])

    def inputs_node(self) -> Node:
        """The launch that brings the sizes of the step to region io."""
        return self.copy_node("inputs", sizes_stage(self._target), HOST_SIZES, SIZES_WRITTEN)

    def _launch(self, stage: Stage) -> Launch:
        assert stage.kernel is not None, stage.symbol
        code = self._compiled[stage.kernel]
        if code.name not in self._code:
            self._code[code.name] = read_device_code(code.binary)
            self._used[code] = None
            self._members[f"kernels/{code.file_name}"] = code.binary
        return Launch(code.name, stage.grid, (code.threads, 1, 1), code.shared_bytes, programmatic=stage.programmatic)

    def add_data(self, data: bytes) -> str:
        """The member that holds ``data``."""
        return self._add("data/", data, "")

    def add_graph(self, graph: LaunchGraph, part: Part) -> str:
        """The member that holds ``graph``, of ``part``, which is verified first."""
        verify_gpu_graph(graph, self._target, self._code)
        verify_graph(graph, region_sizes(part), 0)
        return self._add("graphs/", graph.encode(), ".tslg")

    def _add(self, folder: str, data: bytes, suffix: str) -> str:
        name = f"{folder}{hashlib.sha256(data).hexdigest()[:24]}{suffix}"
        self._members[name] = data
        return name

    @property
    def binaries(self) -> dict[str, str]:
        """Name by which graphs launch -> member."""
        return {code.name: f"kernels/{code.file_name}" for code in self._used}

    def write(self, path: Path, manifest: AnyManifest, **counts: int) -> PackResult:
        """Write the pack of ``manifest``, in which ``counts`` says what there is."""
        digest = write_pack(path, manifest, self._members)
        counts = {**counts, "binaries": len(manifest.binaries)}
        return PackResult(path, digest, path.stat().st_size, counts, self.failures, self._progress.seconds)


def sizes_stage(target: Target) -> Stage:
    """The launch that brings the sizes of the step to region io."""
    return copy_stage(target, [Extent(0, STEP_SIZES_BYTES, -1, 1, 1, STEP_SIZES_BYTES, known=True)])


def kernels_of(stages: Iterable[Stage]) -> Iterator[DeviceKernel]:
    """The kernels that ``stages`` launch."""
    for stage in stages:
        assert stage.kernel is not None, stage
        yield stage.kernel


def sequence(nodes: Sequence[Node]) -> LaunchGraph:
    """Each node after the one before it."""
    return connected(nodes, [(i - 1,) if i else () for i in range(len(nodes))])
