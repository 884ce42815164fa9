"""Static verification of every LaunchGraph of an artifact; runs on any machine, with the base install."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.artifact import MANIFEST, Artifact, TargetSection
from tokenspeed.bucket import StepLimits, prove_coverage
from tokenspeed.device_code import DeviceCode, read_device_code
from tokenspeed.equivalence import read_equivalence
from tokenspeed.errors import ArtifactError, ProgramError
from tokenspeed.gpu_verify import verify_gpu_graph
from tokenspeed.graph import LaunchGraph, Region
from tokenspeed.graph_verify import verify_graph
from tokenspeed.step import ALIGNMENT, IO, STATE, PlacedTensor, align, place
from tokenspeed.target import Target


def verify_graphs(artifact: Artifact) -> tuple[int, int]:
    """Decode and verify every graph of ``artifact``; returns how many graphs and nodes there were.

    Graphs of GPUs are also held against their binaries: symbols, parameters, limits of the target. Every step of the
    envelope must have a bucket, the weights must lie in their file, and what numerics = rl-bitwise promises must have
    its proofs.
    Raises ArtifactError naming the file, the node and the argument at fault.
    """
    graphs = nodes = 0
    built = [section.target for section in artifact.manifest.targets]
    if sorted(built) != sorted(artifact.manifest.envelope.settings["targets"].value):
        raise _malformed(artifact, f"the envelope names other targets than its sections: {', '.join(built) or 'none'}")
    read_equivalence(artifact)
    for section in artifact.manifest.targets:
        sizes, target = region_sizes(section), Target.parse(section.target)
        _check_weights(artifact, section)
        _check_buckets(artifact, section)
        _check_io(artifact, section)
        code = _device_code(artifact, section)
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


def _check_weights(artifact: Artifact, section: TargetSection) -> None:
    have, end = artifact.locate(section.weights).bytes, section.weights_offset + section.weights_bytes
    if section.weights_offset % ALIGNMENT:
        raise _malformed(artifact, f"weights_offset is {section.weights_offset}, no multiple of {ALIGNMENT}")
    if end > have:
        raise _malformed(
            artifact, f"{section.weights} has {have} bytes, and the weights of {section.target} end at {end}"
        )


def _check_buckets(artifact: Artifact, section: TargetSection) -> None:
    envelope = artifact.manifest.envelope
    try:
        limits = StepLimits(envelope.max_prefill_tokens, envelope.max_num_seqs, envelope.max_logit_rows)
        prove_coverage((entry.bucket for entry in section.buckets), limits)
    except ProgramError as e:
        raise _malformed(artifact, f"{section.target}: {e.message}") from None


def _check_io(artifact: Artifact, section: TargetSection) -> None:
    """What a step brings and gives lies where envelope and model say. How many rows count tokens, the section says."""
    manifest, envelope = artifact.manifest, artifact.manifest.envelope
    sizes = {"T": envelope.max_prefill_tokens, "S": envelope.max_num_seqs, "P": envelope.pages_per_seq,
             "R": envelope.max_logit_rows, "V": manifest.model.vocab_size, "C": section.state[-1].shape[0]}  # fmt: skip
    for region, tensors, have in (
        ("io", IO, (section.io, section.io_bytes)),
        ("state", STATE, (section.state, section.state_bytes)),
    ):
        need, nbytes = place(tensors, sizes)
        if region == "state" and section.prelude is not None:
            nbytes = _end_of_tables(artifact, section, section.prelude.tables, nbytes)
        if have != (need, nbytes):
            differing = next((t.name for t, other in zip(need, have[0], strict=True) if t != other), f"{region}_bytes")
            raise _malformed(artifact, f"{section.target} places {differing} of region {region} otherwise than a build")


def _end_of_tables(artifact: Artifact, section: TargetSection, tables: Sequence[PlacedTensor], begin: int) -> int:
    """Where what a prelude fills ends, if it lies where a build puts it: from ``begin`` on."""
    for table in tables:
        if table.offset != begin:
            raise _malformed(artifact, f"{section.target} places {table.name} of region state otherwise than a build")
        begin = align(begin + table.nbytes)
    return begin


def _malformed(artifact: Artifact, what: str) -> ArtifactError:
    return ArtifactError(f"{artifact.path}: {MANIFEST} is malformed: {what}", hint="rebuild the artifact")


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
        Region.HOST_IO: section.io_bytes if Target.parse(section.target).is_gpu else 0,
    }
