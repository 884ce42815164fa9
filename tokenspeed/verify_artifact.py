"""Static verification of every LaunchGraph of an artifact; runs on any machine, with the base install."""

from __future__ import annotations

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.bucket import BucketTable
from tokenspeed.device_code import DeviceCode, read_device_code
from tokenspeed.errors import ArtifactError, ProgramError
from tokenspeed.gpu_verify import verify_gpu_graph
from tokenspeed.graph import LaunchGraph, Region
from tokenspeed.graph_verify import verify_graph
from tokenspeed.target import Target


def verify_graphs(artifact: Artifact) -> tuple[int, int]:
    """Decode and verify every graph of ``artifact``; returns how many graphs and nodes there were.

    Graphs of GPUs are also held against their binaries: symbols, parameters, limits of the target.
    Raises ArtifactError naming the file, the node and the argument at fault.
    """
    graphs = nodes = 0
    for section in artifact.manifest.targets:
        sizes, target = region_sizes(section), Target.parse(section.target)
        code = _device_code(artifact, section)
        BucketTable(entry.bucket for entry in section.buckets)
        for name in section.graphs:
            try:
                graph = LaunchGraph.decode(artifact.read(name))
                verify_graph(graph, sizes, section.kv_page_bytes)
                if target.is_gpu:
                    verify_gpu_graph(graph, target, code)
            except ProgramError as e:
                raise ArtifactError(f"{artifact.path}: {name}: {e.message}", hint="rebuild the artifact") from None
            graphs += 1
            nodes += len(graph.nodes)
    return graphs, nodes


def _device_code(artifact: Artifact, section: TargetSection) -> dict[str, DeviceCode]:
    """What the binaries of ``section`` say of themselves, by name."""
    code = {}
    for entry in section.binaries:
        try:
            code[entry.name] = read_device_code(artifact.read(entry.file))
        except ArtifactError as e:
            raise ArtifactError(f"{artifact.path}: {entry.file}: {e.message}", hint=e.hint) from None
    return code


def region_sizes(section: TargetSection) -> dict[Region, int]:
    """Bytes of each region as a graph may address it: of kv, one page."""
    return {
        Region.WEIGHTS: section.weights_bytes,
        Region.KV: section.kv_page_bytes,
        Region.ARENA: section.arena_bytes,
        Region.IO: section.io_bytes,
        Region.STATE: section.state_bytes,
    }
