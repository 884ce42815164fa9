"""The first op that computes other bits: two recordings are run again, op by op, and the rows compared that stand for
the same tokens.

A row's bits follow from its tokens alone. So the earliest position at which anything differs, and there the first op
whose results differ, had equal inputs: everything before it was equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenspeed.errors import ResourceError
from tokenspeed.runtime.invariance.history import Follower, Histories, StepRows
from tokenspeed.runtime.invariance.recording import RecordedStep, Recording, StepLayout, highest_page
from tokenspeed.runtime.invariance.rows import Reader, RowReader, numbers_of
from tokenspeed.runtime.invariance.slices import SlicedGraphs
from tokenspeed.runtime.loader import Loaded
from tokenspeed.values import PlacedValue, StepOp, StepValues, read_values

_DRAWS = frozenset({"logit_target", "temperature", "seed"})
_TOP = "out_top_"
"""Values that have num_logprobs entries a row; what lies behind them is older."""
Progress = Callable[[int, int], None]
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Side:
    """Where one recording computed the row: the bucket that ran it, its kernels, and the number of the step."""

    bucket: str
    kernels: tuple[str, ...]
    step: int


@dataclass(frozen=True)
class Culprit:
    """The first op whose output differs.

    Attributes:
        position: of the token whose row differs, in its sequence.
        num_different, num_elements: elements of that row that differ, and all.
        largest_difference: between two elements, as numbers; None where one is not a finite number.
    """

    op: str
    kind: str
    value: str
    dtype: str
    position: int
    num_different: int
    num_elements: int
    largest_difference: float | None
    reference: Side
    leg: Side

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Replayer:
    """Runs recorded steps on a device that is not sealed."""

    def __init__(self, loaded: Loaded):
        envelope = loaded.artifact.manifest.envelope
        self.section = loaded.section
        self.page_size = envelope.page_size
        self.values: StepValues = read_values(loaded.artifact, loaded.section)
        self._layout = StepLayout(loaded.section, envelope.page_size)
        self._executor = loaded.executor
        self._device = loaded.executor.device
        self.slices = SlicedGraphs(self._device, loaded.artifact, loaded.section, self.values)
        self.reader = RowReader(Reader(self._device), loaded.section, envelope.page_size)
        self._num_pages = loaded.num_pages

    def check(self, recording: Recording) -> None:
        """Raises ResourceError if this device has too few KV pages for the recording."""
        highest = highest_page(recording.steps, self.page_size)
        if highest >= self._num_pages:
            raise ResourceError(
                f"the recorded steps use KV page {highest}, and only {self._num_pages} pages fit now",
                hint="free memory, or give both runs the same --kv-gib",
            )

    def run(self, step: RecordedStep) -> None:
        """The whole step at once."""
        self._layout.write(step, self._executor.sets[0])
        self._submit(self._executor.graph_of(self.section.buckets[step.bucket].bucket), step)

    def run_ops(self, step: RecordedStep) -> Iterator[int]:
        """The step op by op: yields the number of each op once its results are there, until the next is asked for."""
        self._layout.write(step, self._executor.sets[0])
        for part in self.slices.of(step.bucket):
            self._submit(part.handle, step)
            if part.op is not None:
                yield part.op

    def _submit(self, graph: int, step: RecordedStep) -> None:
        self._device.wait(self._device.submit(graph, *step.sizes, 0))


@dataclass(frozen=True)
class _Row:
    """One row of one value, computed by op number ``op``. ``key`` is equal for rows that must be equal."""

    op: int
    value: str
    key: Key
    position: int
    row: int
    data: bytes


class _Watch:
    """Reads the rows of a step that stand for the tokens of one sequence."""

    def __init__(self, replayer: Replayer, chain: Mapping[int, int]):
        self._replayer = replayer
        self._chain = chain
        self._outputs = [_outputs(op, replayer.values) for op in replayer.values.ops]

    def wanted(self, rows: StepRows) -> bool:
        return not self._chain.keys().isdisjoint(rows.tokens)

    def read(self, op: int, step: RecordedStep, rows: StepRows) -> Iterator[_Row]:
        """The rows of ``op``, which has just run."""
        reader = self._replayer.reader
        for value, draws in self._outputs[op]:
            if value.shape[0] == "num_logit_rows":
                numbers = [i for i, history in enumerate(rows.logits) if history in self._chain]
                histories, found = rows.logits, reader.rows(value, numbers)
            else:
                numbers = [i for i, history in enumerate(rows.tokens) if history in self._chain]
                histories = rows.tokens
                in_pages = value.shape[0] == "num_pages"
                found = reader.positions(value, step, numbers) if in_pages else reader.rows(value, numbers)
            for number, data in zip(numbers, found, strict=True):
                history = histories[number]
                key: Key = (history, rows.draws[number]) if draws else (history,)
                if value.name.startswith(_TOP):
                    data = data[: 4 * max(0, step.input("num_logprobs")[number])]
                yield _Row(op, value.name, key, self._chain[history], number, data)


def _outputs(op: StepOp, values: StepValues) -> list[tuple[PlacedValue, bool]]:
    """Results of an op that have rows of tokens, of logits or of KV pages, and whether they depend on what is drawn."""
    placed = (values.values[name] for name in op.outputs)
    kinds = ("num_tokens", "num_logit_rows", "num_pages")
    draws = not _DRAWS.isdisjoint(op.inputs)
    return [(value, draws and value.shape[0] == "num_logit_rows") for value in placed if value.shape[0] in kinds]


def find_culprit(
    replayer: Replayer, reference: Recording, leg: Recording, tokens: Sequence[int], progress: Progress | None = None
) -> Culprit | None:
    """The first op of a sequence of ``tokens`` that computes other bits in ``leg`` than in ``reference``; None if run
    again both give the same.

    Steps of the reference that have none of the tokens are left out, as each of its requests ran alone.
    """
    for recording in (reference, leg):
        replayer.check(recording)
    histories = Histories()
    watch = _Watch(replayer, histories.chain(tokens))
    expected = _digests(replayer, watch, reference, Follower(histories, replayer.page_size))
    follower = Follower(histories, replayer.page_size)
    for number, step in enumerate(leg.steps):
        if progress is not None:
            progress(number, len(leg.steps))
        rows = follower.rows(step)
        if not watch.wanted(rows):
            replayer.run(step)
            continue
        first: _Row | None = None
        for op in replayer.run_ops(step):
            for row in watch.read(op, step, rows):
                known = expected.get((op, row.value, row.key))
                differs = known is not None and known[0] != _digest(row.data)
                if differs and (first is None or (row.position, row.op) < (first.position, first.op)):
                    first = row
        if first is not None:
            _, at = expected[first.op, first.value, first.key]
            ours = _read_again(replayer, watch, reference, at, first, Follower(histories, replayer.page_size))
            return _culprit(replayer, first, ours, (reference.steps[at], at), (step, number))
    return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


_Expected = dict[tuple[int, str, Key], tuple[bytes, int]]


def _digests(replayer: Replayer, watch: _Watch, reference: Recording, follower: Follower) -> _Expected:
    """Of every row of the sequence: its digest and the number of the step that first computed it."""
    expected: _Expected = {}
    seen: set[Key] = set()
    for number, step in enumerate(reference.steps):
        rows = follower.rows(step)
        if not watch.wanted(rows):
            continue
        keys = {*((history,) for history in rows.tokens), *zip(rows.logits, rows.draws, strict=True)}
        if keys <= seen:
            replayer.run(step)  # for its keys and values
            continue
        seen |= keys
        for op in replayer.run_ops(step):
            for row in watch.read(op, step, rows):
                expected.setdefault((op, row.value, row.key), (_digest(row.data), number))
    return expected


def _read_again(
    replayer: Replayer, watch: _Watch, reference: Recording, at: int, wanted: _Row, follower: Follower
) -> bytes:
    """The reference's bytes of ``wanted``, which step number ``at`` computes."""
    for step in reference.steps[:at]:
        if watch.wanted(follower.rows(step)):
            replayer.run(step)
    rows = follower.rows(reference.steps[at])
    for op in replayer.run_ops(reference.steps[at]):
        if op == wanted.op:
            return next(
                row.data
                for row in watch.read(op, reference.steps[at], rows)
                if (row.value, row.key) == (wanted.value, wanted.key)
            )
    raise AssertionError("a step ran without one of its ops")


def _culprit(
    replayer: Replayer, found: _Row, ours: bytes, reference: tuple[RecordedStep, int], leg: tuple[RecordedStep, int]
) -> Culprit:
    op, value = replayer.values.ops[found.op], replayer.values.values[found.value]
    pairs = list(zip(numbers_of(ours, value.dtype), numbers_of(found.data, value.dtype), strict=True))
    size = max(1, len(ours) // max(1, len(pairs)))
    different = [
        i for i in range(len(pairs)) if ours[i * size : (i + 1) * size] != found.data[i * size : (i + 1) * size]
    ]
    distances = [abs(float(a) - float(b)) for a, b in (pairs[i] for i in different)]
    finite = all(distance < float("inf") for distance in distances)
    sides = []
    for step, number in (reference, leg):
        name = replayer.section.buckets[step.bucket].bucket.name
        sides.append(Side(name, tuple(replayer.slices.symbols(step.bucket, op)), number))
    return Culprit(
        op.name, op.kind, value.name, value.dtype, found.position, len(different), len(pairs),
        max(distances, default=0.0) if finite else None, *sides,
    )  # fmt: skip
