"""The executor: Step -> tokens. It copies a step's inputs into the io region, picks the bucket's LaunchGraph
and runs it on the device; it knows nothing of requests, and the scheduler knows nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenspeed import _native
from tokenspeed.artifact import TargetSection
from tokenspeed.bucket import BucketTable
from tokenspeed.step import INPUTS, PlacedTensor

_FORMATS: dict[str, Any] = {"int32": "i", "int64": "q", "uint64": "Q", "float32": "f"}


class Step(Protocol):
    """What the scheduler plans: sizes, and one buffer per tensor of ``tokenspeed.step.INPUTS``."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def num_logit_rows(self) -> int: ...


@dataclass(frozen=True)
class StepOutputs:
    """Views of the io region, valid until the next submit. ``tokens`` is int32[num_logit_rows]."""

    tokens: memoryview
    logprob: memoryview
    rank: memoryview
    top_ids: memoryview
    top_logprobs: memoryview


class Executor:
    """Runs steps on one device.

    Args:
        device: a device whose regions are allocated and whose graphs are loaded.
        section: the artifact's section for the device's target.
        graphs: device handles of the LaunchGraphs, parallel to ``section.buckets``.
    """

    def __init__(self, device: Any, section: TargetSection, graphs: Sequence[int]):
        self.device = device
        io = _tensor_views(device.view("io"), section.io)
        self._inputs = [(tensor.name, io[tensor.name]) for tensor in INPUTS]
        self._outputs = io
        self._buckets = BucketTable(entry.bucket for entry in section.buckets)
        self._graphs = {entry.bucket: graph for entry, graph in zip(section.buckets, graphs, strict=True)}

    def submit(self, step: Step) -> Any:
        """Start ``step``; returns a ticket for ``wait``."""
        self._stage(step)
        return self.device.submit(self.graph_for(step), step.num_tokens, step.num_seqs, step.num_logit_rows)

    def profile(self, step: Step) -> list[tuple[str, float]]:
        """Run ``step`` once, timing each node: (name, seconds) in order."""
        self._stage(step)
        rows = self.device.profile(self.graph_for(step), step.num_tokens, step.num_seqs, step.num_logit_rows)
        return [(str(name), float(seconds)) for name, seconds in rows]

    def _stage(self, step: Step) -> None:
        for name, destination in self._inputs:
            source = memoryview(getattr(step, name))
            destination[: len(source)] = source

    def wait(self, ticket: Any, num_logit_rows: int) -> StepOutputs:
        """Block until the step of ``ticket`` is done. Raises _native.DeviceError if the device failed."""
        self.device.wait(ticket)
        io, rows = self._outputs, num_logit_rows
        return StepOutputs(
            io["out_token"][:rows],
            io["out_logprob"][:rows],
            io["out_rank"][:rows],
            io["out_top_ids"],
            io["out_top_logprobs"],
        )

    def graph_for(self, step: Step) -> int:
        """The LaunchGraph of the smallest bucket that holds ``step``; the build proved that there is one."""
        decode_only = step.num_tokens == step.num_seqs == step.num_logit_rows
        bucket = self._buckets.find(step.num_tokens, step.num_seqs, step.num_logit_rows, decode_only=decode_only)
        assert bucket is not None, f"no bucket holds {step.num_tokens} tokens of {step.num_seqs} sequences"
        return self._graphs[bucket]


def _tensor_views(region: memoryview, tensors: Sequence[PlacedTensor]) -> dict[str, memoryview]:
    return {t.name: region[t.offset : t.offset + t.nbytes].cast(_FORMATS[t.dtype]) for t in tensors}


DeviceError = _native.DeviceError
