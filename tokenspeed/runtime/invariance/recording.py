"""What an engine gave its device, step by step: enough to run the same steps again, and to know which tokens each of
their rows stands for."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenspeed.artifact import TargetSection
from tokenspeed.runtime.executor import Executor
from tokenspeed.step import COUNTED_BY, DTYPE_BYTES, INPUTS, OUTPUTS, STEP_COUNTS, STEP_SIZES

_COUNTS = struct.Struct(f"<{len(STEP_COUNTS)}i")
_HEAD = struct.Struct("<iiii")
_LENGTH = struct.Struct("<I")
KEPT_OUTPUTS = ("out_token", "out_logprob")


@dataclass(slots=True)
class RecordedStep:
    """One step: ``bucket`` is its number in the section. ``inputs`` are the used bytes of each of INPUTS, of the page
    table ``num_pages`` columns; ``outputs`` those of KEPT_OUTPUTS, empty if nobody waited for the step."""

    bucket: int
    sizes: tuple[int, int, int]
    step_sizes: bytes
    inputs: tuple[bytes, ...]
    num_pages: int
    outputs: tuple[bytes, ...] = (b"", b"")

    def input(self, name: str) -> memoryview:
        """Elements of an input; rows of the page table have ``num_pages`` of them."""
        return memoryview(self.inputs[_NUMBER[name]]).cast(_FORMATS[name])

    def output(self, name: str) -> memoryview:
        return memoryview(self.outputs[KEPT_OUTPUTS.index(name)]).cast(_FORMATS[name])


_CODES = {"int32": "i", "int64": "q", "uint64": "Q", "float32": "f"}
_FORMATS: dict[str, Any] = {tensor.name: _CODES[tensor.dtype] for tensor in (*INPUTS, *OUTPUTS)}
_NUMBER = {tensor.name: i for i, tensor in enumerate(INPUTS)}
_PAGE_TABLE, _CONTEXT_LENS = _NUMBER["page_table"], _NUMBER["context_lens"]


@dataclass
class Recording:
    """The steps of one engine, from its first on."""

    steps: list[RecordedStep] = field(default_factory=list)

    def write(self, path: Path) -> None:
        with path.open("wb") as out:
            for step in self.steps:
                out.write(_HEAD.pack(step.bucket, *step.sizes) + _LENGTH.pack(step.num_pages))
                for part in (step.step_sizes, *step.inputs, *step.outputs):
                    out.write(_LENGTH.pack(len(part)) + part)

    @classmethod
    def read(cls, path: Path) -> Recording:
        data, at, steps = path.read_bytes(), 0, []
        while at < len(data):
            bucket, *sizes = _HEAD.unpack_from(data, at)
            (num_pages,) = _LENGTH.unpack_from(data, at + _HEAD.size)
            at += _HEAD.size + _LENGTH.size
            parts = []
            for _ in range(1 + len(INPUTS) + len(KEPT_OUTPUTS)):
                (length,) = _LENGTH.unpack_from(data, at)
                parts.append(data[at + _LENGTH.size : at + _LENGTH.size + length])
                at += _LENGTH.size + length
            first, inputs, outputs = parts[0], parts[1 : 1 + len(INPUTS)], parts[1 + len(INPUTS) :]
            steps.append(RecordedStep(bucket, tuple(sizes), first, tuple(inputs), num_pages, tuple(outputs)))
        return cls(steps)


class StepLayout:
    """Where the tensors of a step lie in an io set."""

    def __init__(self, section: TargetSection, page_size: int):
        self.page_size = page_size
        placed = {tensor.name: tensor for tensor in section.io}
        self.sizes_at = placed[STEP_SIZES.name].offset
        self._inputs = []
        for tensor in INPUTS:
            at = placed[tensor.name]
            row_bytes = math.prod(at.shape[1:]) * DTYPE_BYTES[at.dtype]
            self._inputs.append((at.offset, row_bytes, *COUNTED_BY[str(tensor.shape[0])]))
        self.pages_per_seq = placed["page_table"].shape[1]
        self._outputs = [(placed[name].offset, DTYPE_BYTES[placed[name].dtype]) for name in KEPT_OUTPUTS]

    def read(self, io: memoryview, bucket: int, sizes: tuple[int, int, int]) -> RecordedStep:
        """The step whose inputs lie in ``io``."""
        raw = bytes(io[self.sizes_at : self.sizes_at + 4 * STEP_SIZES.shape[0]])  # type: ignore[operator]
        counts = (*sizes, *_COUNTS.unpack_from(raw)[len(sizes) :])
        parts = []
        for offset, row_bytes, counter, more in self._inputs:
            parts.append(bytes(io[offset : offset + (counts[counter] + more) * row_bytes]))
        longest = max(memoryview(parts[_CONTEXT_LENS]).cast("i"), default=0)
        num_pages = min(-(-longest // self.page_size), self.pages_per_seq)
        if num_pages < self.pages_per_seq:
            table, row = parts[_PAGE_TABLE], 4 * self.pages_per_seq
            parts[_PAGE_TABLE] = b"".join(
                table[at : at + 4 * num_pages] for at in range(0, counts[1] * row, row)
            )  # fmt: skip
        return RecordedStep(bucket, sizes, raw, tuple(parts), num_pages)

    def read_outputs(self, io: memoryview, num_rows: int) -> tuple[bytes, ...]:
        return tuple(bytes(io[offset : offset + num_rows * nbytes]) for offset, nbytes in self._outputs)

    def write(self, step: RecordedStep, io: memoryview) -> None:
        """Put the step's inputs into ``io``."""
        io[self.sizes_at : self.sizes_at + len(step.step_sizes)] = step.step_sizes
        for number, ((offset, row_bytes, _, _), part) in enumerate(zip(self._inputs, step.inputs, strict=True)):
            if number == _PAGE_TABLE:
                width = 4 * step.num_pages
                for row in range(step.sizes[1]):
                    at = offset + row * row_bytes
                    io[at : at + width] = part[row * width : (row + 1) * width]
            else:
                io[offset : offset + len(part)] = part


class RecordingDevice:
    """A device whose steps are recorded. Closing it closes nothing: several engines use the device, one by one."""

    def __init__(self, device: Any, executor: Executor, layout: StepLayout, buckets: dict[int, int]):
        self.recording = Recording()
        self._device = device
        self._sets = executor.sets
        self._layout = layout
        self._buckets = buckets
        self._waiting: dict[int, tuple[RecordedStep, int]] = {}

    def submit(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_set: int = 0) -> int:
        sizes = (num_tokens, num_seqs, num_logit_rows)
        step = self._layout.read(self._sets[io_set], self._buckets[graph], sizes)
        ticket = int(self._device.submit(graph, *sizes, io_set))
        self.recording.steps.append(step)
        self._waiting[ticket] = (step, io_set)
        return ticket

    def wait(self, ticket: int, seconds: float = math.inf) -> Any:
        if seconds != math.inf:
            return self._device.wait(ticket, seconds)
        done = self._device.wait(ticket)
        if ticket in self._waiting:
            step, io_set = self._waiting.pop(ticket)
            step.outputs = self._layout.read_outputs(self._sets[io_set], step.sizes[2])
        return done

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def written_tokens(step: RecordedStep) -> Iterator[tuple[int, int]]:
    """(slot, token) of each row whose token went to the last-token table."""
    if step.outputs[0]:
        for slot, token in zip(step.input("state_slot"), step.output("out_token"), strict=True):
            if slot >= 0:
                yield slot, token


def highest_page(steps: Sequence[RecordedStep], page_size: int) -> int:
    """The highest KV page that a step writes to or has in its table; -1 without steps."""
    return max((max(*s.input("page_table"), *(slot // page_size for slot in s.input("slot_mapping")))
                for s in steps), default=-1)  # fmt: skip
