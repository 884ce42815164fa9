"""The executor: Step -> tokens. It picks the LaunchGraph of a step whose inputs lie in an io set and starts it on the
device; it knows nothing of requests, and the scheduler knows nothing of it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenspeed import _native
from tokenspeed.artifact import TargetSection
from tokenspeed.bucket import Bucket, BucketTable
from tokenspeed.step import INPUTS, OUTPUTS, STEP_SIZES, align

IO_SET_ALIGNMENT = 4096
"""Bytes to which each of a device's io sets is aligned: a memory page."""
WARM_SECONDS, WARM_TIMES = 1e-4, 200
"""While a step runs: how often caches are warmed, and for how many times: decode steps take no longer."""
_FORMATS: dict[str, Any] = {"int32": "i", "int64": "q", "uint64": "Q", "float32": "f"}

DeviceError = _native.DeviceError


def is_lost(error: Exception) -> bool:
    """Whether a device has stopped working for good."""
    return isinstance(error, _native.DeviceLostError)


class MoveError(DeviceError):
    """Pages could not be moved between the device and the host; the step for which they were to move did not start."""


class Step(Protocol):
    """What the scheduler plans. Its inputs (``tokenspeed.step``) lie in io set ``id`` modulo the number of sets."""

    @property
    def id(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def num_logit_rows(self) -> int: ...
    @property
    def num_moves(self) -> int: ...
    @property
    def moves_out(self) -> Sequence[tuple[int, int]]: ...  # (device page, host page), likewise moves_in
    @property
    def moves_in(self) -> Sequence[tuple[int, int]]: ...


class MovableStep(Step, Protocol):
    """A step whose inputs lie elsewhere."""

    def copy_to(self, io: memoryview, offsets: Sequence[int], /) -> None: ...


@dataclass(slots=True)
class InFlight:
    """A step that the device has been given."""

    ticket: Any
    io_set: int
    num_logit_rows: int


@dataclass(slots=True)
class StepOutputs:
    """Views of the step's io set, valid until that set is used again. ``tokens`` is int32[num_logit_rows], ``logprob``
    and ``rank`` have max_logit_rows entries, the others MAX_TOP_LOGPROBS times as many."""

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
        io_sets: sets of inputs and outputs that the device has, and so the steps that may be in flight. A step uses
            the set of its id modulo this number.

    Attributes:
        sets: the bytes of each io set, writable.
        input_offsets: where in a set STEP_SIZES and each of INPUTS lie.
    """

    def __init__(self, device: Any, section: TargetSection, graphs: Sequence[int], io_sets: int = 1):
        self.device = device
        self.io_sets = io_sets
        io = device.view("io")
        distance = align(section.io_bytes, IO_SET_ALIGNMENT)
        self.sets = tuple(io[i * distance : i * distance + section.io_bytes] for i in range(io_sets))
        placed = {tensor.name: tensor for tensor in section.io}
        self.input_offsets = tuple(placed[tensor.name].offset for tensor in (STEP_SIZES, *INPUTS))
        self._outputs = []
        for io_set in self.sets:
            views = {}
            for tensor in OUTPUTS:
                at = placed[tensor.name]
                views[tensor.name] = io_set[at.offset : at.offset + at.nbytes].cast(_FORMATS[at.dtype])
            self._outputs.append(views)
        self._buckets = BucketTable(entry.bucket for entry in section.buckets)
        self._graphs = {entry.bucket: graph for entry, graph in zip(section.buckets, graphs, strict=True)}
        self._graph_of_decodes: dict[int, int] = {}

    def place(self, step: MovableStep) -> None:
        """Copy the inputs of ``step`` to its io set. The step that used the set before must have been waited for."""
        step.copy_to(self.sets[step.id % self.io_sets], self.input_offsets)

    def submit(self, step: Step) -> InFlight:
        """Start ``step`` behind those in flight, once its pages have moved. Raises _native.DeviceError; MoveError when
        it is for the pages that the step cannot run."""
        if step.num_moves:
            self._move_pages(step)
        io_set = step.id % self.io_sets
        tokens, seqs, rows = step.num_tokens, step.num_seqs, step.num_logit_rows
        # The last argument: number of the io set on a GPU, its offset (always 0: there is one) on a CPU.
        return InFlight(self.device.submit(self.graph_for(step), tokens, seqs, rows, io_set), io_set, rows)

    def _move_pages(self, step: Step) -> None:
        try:
            self.device.move_pages(step.moves_out, step.moves_in)
        except _native.DeviceLostError:
            raise
        except DeviceError as e:
            raise MoveError(f"pages could not move between device and host: {e}") from None

    def profile(self, step: Step) -> list[tuple[str, float]]:
        """Run ``step`` once, timing each node: (name, seconds) in order. Nothing else may be in flight."""
        io_set = step.id % self.io_sets
        sizes = step.num_tokens, step.num_seqs, step.num_logit_rows
        rows = self.device.profile(self.graph_for(step), *sizes, io_set)
        return [(str(name), float(seconds)) for name, seconds in rows]

    def time_graph(self, graph: int, num_tokens: int) -> list[float]:
        """Seconds of each node of a graph that is no step's, run once, with the sizes of a step of ``num_tokens``
        tokens; not of the first node, which brings them to the others. Nothing else may be in flight."""
        sizes = struct.pack("8i", num_tokens, 1, 1, *[0] * 5)
        at = self.input_offsets[0]
        self.sets[0][at : at + len(sizes)] = sizes
        return [float(seconds) for _, seconds in self.device.profile(graph, num_tokens, 1, 1, 0)[1:]]

    def wait(self, step: InFlight, meanwhile: Callable[[], None] = lambda: None) -> StepOutputs:
        """Block until ``step`` is done. Raises _native.DeviceError if the device failed. With several io sets, which
        are there so that the host is never waited for, ``meanwhile`` is called at once, and every WARM_SECONDS for
        WARM_TIMES."""
        if self.io_sets > 1:
            for _ in range(WARM_TIMES):
                meanwhile()
                if self.device.wait(step.ticket, WARM_SECONDS):
                    break
        self.device.wait(step.ticket)
        io = self._outputs[step.io_set]
        return StepOutputs(
            io["out_token"][: step.num_logit_rows],
            io["out_logprob"],
            io["out_rank"],
            io["out_top_ids"],
            io["out_top_logprobs"],
        )

    def seconds_on_device(self) -> float:
        """What the step took that was waited for last, by the clock of a device that times steps."""
        *_, (_, _, _, seconds, _) = self.device.step_times()
        return float(seconds)

    def bucket_for(self, step: Step) -> Bucket:
        """The smallest bucket that holds ``step``; the build proved that there is one."""
        decode_only = step.num_tokens == step.num_seqs == step.num_logit_rows
        bucket = self._buckets.find(step.num_tokens, step.num_seqs, step.num_logit_rows, decode_only=decode_only)
        assert bucket is not None, f"no bucket holds {step.num_tokens} tokens of {step.num_seqs} sequences"
        return bucket

    def graph_of(self, bucket: Bucket) -> int:
        """The LaunchGraph of a bucket."""
        return self._graphs[bucket]

    def graph_for(self, step: Step) -> int:
        """The LaunchGraph of ``bucket_for(step)``."""
        tokens = step.num_tokens
        if tokens == step.num_seqs == step.num_logit_rows:  # nearly every step, so remembered
            graph = self._graph_of_decodes.get(tokens)
            if graph is None:
                graph = self._graph_of_decodes[tokens] = self._graphs[self.bucket_for(step)]
            return graph
        return self._graphs[self.bucket_for(step)]
