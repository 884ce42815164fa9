"""Replays an artifact's own LaunchGraph in the training process, over regions that torch sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.bucket import Bucket, BucketKind, StepLimits
from tokenspeed.errors import ArtifactError
from tokenspeed.graph import LaunchGraph, Region
from tokenspeed.graph_verify import verify_graph
from tokenspeed.runtime.places import Place
from tokenspeed.step import STEP_SIZES
from tokenspeed.target import Target
from tokenspeed.trainer.graphs import StepParts, split_step
from tokenspeed.trainer.memory import Sizes, TrainerDevice, open_device, tensors_of, view
from tokenspeed.trainer.reverse import operand, saved_values
from tokenspeed.trainer.steps import Batch, Chunk, num_pages
from tokenspeed.values import StepOp, StepValues, read_values

_ROW_DEFAULTS = {
    "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 0, "draw_position": 0, "num_logprobs": -1,
    "state_slot": -1, "adjustment": -1,
}  # fmt: skip
"""Of every logit row: it asks the log-probability of a given token and changes no state."""


@dataclass(frozen=True)
class Plan:
    """What is replayed of an artifact, decided from its data alone."""

    section: TargetSection
    values: StepValues
    bucket: Bucket
    parts: StepParts
    logits: str
    rope_table: str | None


def plan_replay(artifact: Artifact, section: TargetSection, *, gradients: bool) -> Plan:
    """Cut the graph of the largest bucket in two; with ``gradients`` what these read stays.

    Raises ArtifactError, or ProgramError for an op that has no gradient.
    """
    values = read_values(artifact, section)
    mixed = [entry for entry in section.buckets if entry.bucket.kind is BucketKind.MIXED]
    if not mixed:
        raise ArtifactError(f"{artifact.path}: the artifact has no mixed bucket", hint="rebuild it")
    entry = max(mixed, key=lambda e: e.bucket.num_tokens)
    ops = {op.kind: op for op in values.ops}
    for kind in ("gather_rows", "sample"):
        if kind not in ops:
            raise ArtifactError(f"{artifact.path}: {section.values} names no op {kind}", hint="rebuild the artifact")
    logits = operand(ops["sample"], "logits")
    keep = saved_values(values.ops) if gradients else {operand(ops["gather_rows"], "x"), logits}
    graph = LaunchGraph.decode(artifact.read(entry.graph))
    parts = split_step(graph, values, entry.bucket, section.arena_bytes, keep)
    table = operand(ops["rope_kv_write"], "rope_table") if "rope_kv_write" in ops else None
    _verify(section, parts)
    return Plan(section, values, entry.bucket, parts, logits, table)


def _verify(section: TargetSection, parts: StepParts) -> None:
    """Prove of both parts what the build proves of a whole graph."""
    is_gpu = Target.parse(section.target).is_gpu
    sizes = {
        Region.WEIGHTS: section.weights_bytes, Region.KV: section.kv_page_bytes, Region.ARENA: parts.arena_bytes,
        Region.IO: section.io_bytes, Region.STATE: section.state_bytes,
        Region.HOST_IO: section.io_bytes if is_gpu else 0,
    }  # fmt: skip
    for graph in (parts.head, parts.tail):
        verify_graph(graph, sizes, section.kv_page_bytes)


class Replayer:
    """Runs steps of whole sequences, and says what they computed.

    Attributes:
        limits: of a step.
        device: its regions.
        rows_per_group: logit rows that the tail takes at a time.
    """

    def __init__(self, artifact: Artifact, plan: Plan, place: Place):
        envelope = artifact.manifest.envelope
        self.plan = plan
        self.limits = StepLimits(envelope.max_prefill_tokens, envelope.max_num_seqs, envelope.max_logit_rows)
        self.page_size, self._pages_per_seq = envelope.page_size, envelope.pages_per_seq
        pages = num_pages(self.limits, self.page_size, self._pages_per_seq)
        section = plan.section
        self.device: TrainerDevice = open_device(
            artifact, section, place, Sizes(plan.parts.arena_bytes, pages * section.kv_page_bytes)
        )
        self._head = self.device.load_graph(plan.parts.head)
        self._tail = self.device.load_graph(plan.parts.tail)
        self._io = tensors_of(self.device.io, section.io)
        for name, value in _ROW_DEFAULTS.items():
            self._io[name].fill_(value)
        self.rows_per_group = plan.bucket.num_logit_rows

    @property
    def ops(self) -> tuple[tuple[StepOp, ...], tuple[StepOp, ...]]:
        """Those of the head and of the tail."""
        return self.plan.parts.head_ops, self.plan.parts.tail_ops

    def rope_table(self) -> Tensor:
        """float32 [positions, d]."""
        assert self.plan.rope_table is not None, "attention without positions"
        placed = self.plan.values.values[self.plan.rope_table]
        if placed.region == str(Region.STATE):  # the target made it itself
            return view(self.device.state, placed.offset, placed.dtype, [int(n) for n in placed.shape])
        (tensor,) = (w.tensor for w in self.plan.values.weights if w.value == self.plan.rope_table)
        return view(self.device.weights, tensor.offset, tensor.dtype, tensor.shape)

    def run_head(self, batch: Batch, chunk: Chunk) -> None:
        """Compute the tokens of ``chunk``; what is kept of them lies in the arena until the next call."""
        inputs = chunk.inputs(batch, self.page_size, self._pages_per_seq)
        for name in ("token_ids", "positions", "slot_mapping", "cu_seqlens", "context_lens"):
            source = getattr(inputs, name)
            self._io[name][: len(source)] = source
        self._io["page_table"][: len(chunk.pieces)] = inputs.page_table
        self._run(self._head, chunk, 0)

    def run_tail(self, batch: Batch, chunk: Chunk, rows: slice) -> Tensor:
        """Compute ``batch.rows[rows]``, at most ``rows_per_group`` of those of the chunk that ran last.

        Returns float32 log-probabilities of their targets, a view until the next call.
        """
        count = rows.stop - rows.start
        self._io["logit_rows"][:count] = batch.rows[rows] - chunk.begin
        self._io["logit_target"][:count] = batch.targets[rows]
        self._run(self._tail, chunk, count)
        return self._io["out_logprob"][:count]

    def _run(self, graph: int, chunk: Chunk, num_rows: int) -> None:
        sizes = (chunk.num_tokens, len(chunk.pieces), num_rows)
        self._io[STEP_SIZES.name][:] = torch.tensor([*sizes, 0, 0, 0, 0, 0])
        self.device.run(graph, *sizes)

    def groups(self, rows: slice) -> list[slice]:
        """``rows`` cut into groups for the tail."""
        size = self.rows_per_group
        return [slice(i, min(i + size, rows.stop)) for i in range(rows.start, rows.stop, size)]

    def read(self, name: str, rows: int) -> Tensor:
        """The first ``rows`` rows of a kept value where they lie: a view, until what computes it runs again."""
        value = self.plan.parts.kept[name]
        return view(self.device.arena, value.offset, value.dtype, (rows, value.columns))

    def reader(self, rows: int) -> Callable[[str], Tensor]:
        """``read`` for so many rows."""
        return lambda name: self.read(name, rows)

    def close(self) -> None:
        self.device.close()
