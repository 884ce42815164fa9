"""Static verification of every LaunchGraph of an artifact; runs on any machine, with the base install."""

from __future__ import annotations

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.bucket import BucketTable
from tokenspeed.errors import ArtifactError, ProgramError
from tokenspeed.graph import LaunchGraph, Region
from tokenspeed.graph_verify import verify_graph


def verify_graphs(artifact: Artifact) -> tuple[int, int]:
    """Decode and verify every graph of ``artifact``; returns how many graphs and nodes there were.

    Raises ArtifactError naming the file, the node and the argument at fault.
    """
    graphs = nodes = 0
    for section in artifact.manifest.targets:
        sizes = region_sizes(section)
        BucketTable(entry.bucket for entry in section.buckets)
        for entry in section.buckets:
            try:
                graph = LaunchGraph.decode(artifact.read(entry.graph))
                verify_graph(graph, sizes, section.kv_page_bytes)
            except ProgramError as e:
                raise ArtifactError(
                    f"{artifact.path}: {entry.graph}: {e.message}", hint="rebuild the artifact"
                ) from None
            graphs += 1
            nodes += len(graph.nodes)
    return graphs, nodes


def region_sizes(section: TargetSection) -> dict[Region, int]:
    """Bytes of each region as a graph may address it: of kv, one page."""
    return {
        Region.WEIGHTS: section.weights_bytes,
        Region.KV: section.kv_page_bytes,
        Region.ARENA: section.arena_bytes,
        Region.IO: section.io_bytes,
        Region.STATE: section.state_bytes,
    }
