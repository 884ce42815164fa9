"""The builder's side of ``tokenspeed tune``: packs of candidates to time, on a machine without a GPU.

The shapes are those of a model's Program in the buckets of its envelope. A kernel family (kernels/tunable.py) names
the candidates of each; they are compiled for the target, and a graph of one call of each is written down. The device
side is tokenspeed/runtime/tuning.py, the tables are tuning_tables.py, docs/tuning.md explains the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenspeed import __version__
from tokenspeed.bucket import Bucket, StepLimits
from tokenspeed.compile.buckets import ladder
from tokenspeed.compile.build import Progress
from tokenspeed.compile.checkpoint import ModelConfig, open_checkpoint
from tokenspeed.compile.dummy_weights import DummyCheckpoint
from tokenspeed.compile.layout import SCRATCH_ALIGNMENT
from tokenspeed.compile.lower import float_argument
from tokenspeed.compile.models import build_program
from tokenspeed.compile.pack_writer import (
    SIZES,
    PackResult,
    PackWriter,
    check_output,
    kernels_of,
    sequence,
    sizes_stage,
)
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.compile.select import op_sizes
from tokenspeed.envelope import resolve
from tokenspeed.errors import UsageError
from tokenspeed.graph import Access, Argument, LaunchGraph, Pointer, Region
from tokenspeed.graph_verify import verify_graph
from tokenspeed.kernels.registry import ArgumentKind, ArgumentRule, DeviceKernel, Request, Stage
from tokenspeed.kernels.triton.linear_tuning import LinearFamily
from tokenspeed.kernels.triton.stage import Extent, copy_stage
from tokenspeed.kernels.triton_specs import triton_registry
from tokenspeed.kernels.tunable import Family, Predecessor, Variant
from tokenspeed.pack_file import region_sizes
from tokenspeed.step import STEP_COUNTS, align
from tokenspeed.target import Target
from tokenspeed.tuning_pack import (
    SCRATCH_SLOTS,
    Candidate,
    Case,
    PackManifest,
    Peak,
    Rotation,
    Shape,
    chain,
)

FAMILIES: tuple[Family, ...] = (LinearFamily(),)
"""In the order in which their shapes are timed."""
_ALIGNMENT = 4096
_BEFORE = "before"
_CACHE_SHARE = 3
"""Bytes of cold operands that a replay goes through before it meets a copy again, in caches: more than two, so that
no part of a copy is left whatever the cache replaces first."""
_MOST_COPIES = 512
"""A matrix so small that more would be needed takes no longer from memory than from the cache: a launch is longer."""
_REPLAY_SECONDS = 300e-6
"""What a replay takes at least: some thirty times what it costs to start one."""


@dataclass(frozen=True)
class _Part:
    """Facts of the part that an architecture is usually bought as, by its data sheet; ``cache`` is the last one."""

    peak: Peak
    cache_bytes: int


_PARTS: Mapping[str, _Part] = {
    "sm_90a": _Part(Peak("H200 SXM", 4.8e12, 989e12), 50 << 20),
    "sm_100a": _Part(Peak("B200", 8.0e12, 2250e12), 126 << 20),
    "sm_103a": _Part(Peak("B300", 8.0e12, 2250e12), 126 << 20),
    "sm_120a": _Part(Peak("RTX PRO 6000", 1.792e12, 504e12), 128 << 20),
    "gfx942": _Part(Peak("MI300X", 5.3e12, 1307e12), 256 << 20),
    "gfx950": _Part(Peak("MI355X", 8.0e12, 2517e12), 256 << 20),
}


def pack(
    checkpoints: Sequence[str | Path],
    output: str | Path,
    target: Target,
    *,
    rows: Sequence[int] | None = None,
    ops: Sequence[str] | None = None,
    force: bool = False,
    workers: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    **flags: Any,
) -> PackResult:
    """Write the pack of everything worth timing for ``checkpoints`` on ``target``.

    Args:
        checkpoints: Hugging Face directories, of which config.json is read alone, or GGUF files.
        rows: numbers of rows (M) to tune for instead of those of the buckets; rows of logits stay within the most
            that a step may have.
        ops: the kinds of op to tune instead of all that have candidates.
        force: replace the file at ``output``.
        workers, cache: as for ``build``.
        flags: envelope fields that size the buckets: max_num_seqs, max_prefill_tokens, max_logit_rows.

    Raises:
        TokenSpeedError: one of its kinds; nothing is left behind.
    """
    progress, path = progress or Progress(), Path(output)
    _check_request(path, target, ops, force)
    with progress.stage("shapes"):
        requests: dict[_Key, list[Request]] = {}
        models = []
        for checkpoint in checkpoints:
            config = _config(Path(checkpoint))
            models.append(config.name)
            for family, request in _requests(config, target, rows, ops, flags):
                group = requests.setdefault(_group(family, request), [])
                if request not in group:
                    group.append(request)
        plans = [_ShapePlan(key, sorted(group, key=_rows)) for key, group in requests.items()]
        if not plans:
            raise UsageError("nothing to tune: no op of the models has candidates", hint="leave --op and --rows out")
    kernels = (kernel for plan in plans for kernel in plan.kernels())
    writer = PackWriter(target, kernels, workers=workers, cache=cache, progress=progress)
    with progress.stage("pack"):
        shapes = tuple(shape for plan in plans if (shape := plan.write(writer)) is not None)
        peak = _PARTS[target.arch].peak
        manifest = PackManifest(str(target), __version__, tuple(models), peak, shapes, writer.binaries, {})
        cases = [case for shape in shapes for case in shape.cases]
        candidates = sum(len(case.candidates) for case in cases)
        return writer.write(path, manifest, shapes=len(shapes), cases=len(cases), candidates=candidates)


def _check_request(path: Path, target: Target, ops: Sequence[str] | None, force: bool) -> None:
    if not target.is_gpu:
        raise UsageError(f"--target is {target}: tables are for GPUs", hint="name one, e.g. cuda:sm_90a")
    known = [op for family in FAMILIES for op in family.ops]
    for op in ops or ():
        if op not in known:
            raise UsageError(f"op {op!r} has no candidates", hint=f"those that have are {', '.join(known)}")
    check_output(path, force)


# --- what is to be timed --------------------------------------------------------------------------


def _config(path: Path) -> ModelConfig:
    return DummyCheckpoint(path, 0).config if path.is_dir() else open_checkpoint(path).config


def _requests(
    config: ModelConfig, target: Target, rows: Sequence[int] | None, ops: Sequence[str] | None, flags: Mapping[str, Any]
) -> Iterator[tuple[Family, Request]]:
    """Every request that a build of the model would make, each once or more.

    All read their number of rows from the same step scalar: which one changes the binary and not its speed.
    """
    envelope = resolve(
        model=config.name,
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        flags={"targets": str(target), "dtype": "bfloat16", **flags},
    )
    program = run_passes(
        build_program(config, dtype="bfloat16", max_model_len=envelope.max_model_len, page_size=envelope.page_size),
        CPU_PASSES,
    )
    limits = StepLimits(envelope.max_prefill_tokens, envelope.max_num_seqs, envelope.max_logit_rows)
    buckets = ladder(limits)
    for op in program.ops:
        family = next((f for f in FAMILIES if op.kind in f.ops and program.dtype in f.dtypes), None)
        if family is None or (ops and op.kind not in ops):
            continue
        sizes = op_sizes(program, op, {})
        most = (limits.max_prefill_tokens, limits.max_num_seqs, limits.max_logit_rows)[sizes["rows"]]
        wanted = _rows_of(buckets, sizes["rows"]) if rows is None else sorted({m for m in rows if m <= most})
        for m in wanted:
            yield family, Request(op.kind, target, program.dtype, {**sizes, "rows": 0, "M": m})


def _rows_of(buckets: Iterable[Bucket], scalar: int) -> list[int]:
    """Sizes that step scalar ``scalar`` has in the buckets."""
    return sorted({(b.num_tokens, b.num_seqs, b.num_logit_rows)[scalar] for b in buckets})


@dataclass(frozen=True)
class _Key:
    """Requests of one key are cases of one shape."""

    family: Family
    op: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]


def _rows(request: Request) -> int:
    return request.sizes["M"]


def _group(family: Family, request: Request) -> _Key:
    return _Key(family, request.op, request.dtype, tuple(family.key(request).items()))


# --- where it lies, and its graphs ----------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """A case before its kernels are compiled."""

    request: Request
    variants: tuple[Variant, ...]
    before: Predecessor | None
    workspace_bytes: int


class _ShapePlan:
    """One shape: its cases with their variants, and where operands lie.

    Region weights holds what is only read: warm operands first, then the copies of the cold one. Region arena holds
    what a predecessor writes, then the kernels' workspace, the result, and the kernels' scratch memory. Region io holds
    the sizes of the step. Region host_io holds them too, and what is fetched of the result.
    """

    def __init__(self, key: _Key, requests: Sequence[Request]):
        self._key, self._family = key, key.family
        self._cases = [self._plan(request) for request in requests]
        self._places: dict[str, int] = {}
        end = 0
        for name, nbytes in self._warm().items():
            self._places[name], end = end, end + align(nbytes, _ALIGNMENT)
        self._rotation = self._rotate(end)
        written = [self._operands(c)[c.before.operand] for c in self._cases if c.before is not None]
        self._workspace = align(max(written, default=0), _ALIGNMENT)
        self._result, self._row_bytes = self._family.result(requests[0])
        self._most = max(case.request.sizes["M"] for case in self._cases)
        self._target = requests[0].target
        workspace = max(case.workspace_bytes for case in self._cases)
        self._result_at = self._workspace + align(workspace, _ALIGNMENT)

    def _plan(self, request: Request) -> _Planned:
        spec, _ = triton_registry().select(request)
        family = self._family
        return _Planned(
            request, tuple(family.variants(request)), family.predecessor(request), spec.workspace_bytes(request.sizes)
        )

    def _operands(self, case: _Planned) -> dict[str, int]:
        return {name: operand.nbytes for name, operand in self._family.operands(case.request).items()}

    def _warm(self) -> dict[str, int]:
        """The most bytes that each warm operand has in any case, those of predecessors under names of their own."""
        most: dict[str, int] = {}
        for case in self._cases:
            sizes = {n: o.nbytes for n, o in self._family.operands(case.request).items() if not o.cold}
            if case.before is not None:
                sizes |= {f"{_BEFORE} {name}": nbytes for name, nbytes in case.before.operands.items()}
            for name, nbytes in sizes.items():
                most[name] = max(most.get(name, 0), nbytes)
        return most

    def _rotate(self, start: int) -> Rotation:
        (nbytes,) = {o.nbytes for c in self._cases for o in self._family.operands(c.request).values() if o.cold}
        cold = _CACHE_SHARE * _PARTS[self._cases[0].request.target.arch].cache_bytes
        if nbytes >= cold:  # each call pushes out what it read itself: a second copy only makes results differ
            return Rotation(start, nbytes, _ALIGNMENT, 2)
        copies = min(_MOST_COPIES, max(2, math.ceil(cold / nbytes)))
        return Rotation(start, nbytes, align(nbytes, _ALIGNMENT), copies)

    def _fetch(self) -> Stage:
        """The launch that copies the result to the host, each from the beginning of its memory."""
        nbytes = self._most * self._row_bytes
        rows = Extent(0, self._row_bytes, STEP_COUNTS.index("num_logit_rows"), 0, self._most, nbytes)
        return copy_stage(self._target, [rows])

    def kernels(self) -> Iterator[DeviceKernel]:
        yield from kernels_of((sizes_stage(self._target), self._fetch()))
        for case in self._cases:
            yield from kernels_of((*_stages(case.before), *(stage for v in case.variants for stage in v.stages)))

    def write(self, writer: PackWriter) -> Shape | None:
        """The shape with its graphs in ``writer``; None if nothing of it compiled."""
        if not writer.has([sizes_stage(self._target), self._fetch()]):
            return None
        rotation, result_bytes = self._rotation, self._most * self._row_bytes
        scratch = self._result_at + align(result_bytes, _ALIGNMENT)
        used = (s.scratch_bytes for case in self._cases for v in case.variants for s in v.stages)
        slot = align(max(used, default=0), SCRATCH_ALIGNMENT)
        slots = SCRATCH_SLOTS if slot else 1
        shape = Shape(
            family=self._family.name, op=self._key.op, key=dict(self._key.sizes), dtype=self._key.dtype,
            weights_bytes=rotation.offset + (rotation.copies - 1) * rotation.stride + rotation.nbytes,
            arena_bytes=scratch + slots * slot, io_bytes=_ALIGNMENT + result_bytes, result_offset=_ALIGNMENT,
            result_row_bytes=self._row_bytes, inputs="", fetch="", rotation=rotation,
            scratch=Rotation(scratch, slot, slot, slots), cases=(),
        )  # fmt: skip
        shape = self._with_copies(shape, writer)
        written = (self._write_case(shape, case, writer) for case in self._cases)
        cases = tuple(case for case in written if case.candidates)
        return replace(shape, cases=cases) if cases else None

    def _with_copies(self, shape: Shape, writer: PackWriter) -> Shape:
        """``shape`` with the graphs that bring sizes in and results out."""
        nbytes = self._most * self._row_bytes
        source = Pointer(Region.ARENA, self._result_at, nbytes, Access.READ)
        target = Pointer(Region.HOST_IO, shape.result_offset, nbytes, Access.WRITE)
        nodes = {"inputs": writer.inputs_node(), "fetch": writer.copy_node("fetch", self._fetch(), source, target)}
        members: dict[str, Any] = {name: writer.add_graph(sequence([node]), shape) for name, node in nodes.items()}
        return replace(shape, **members)

    def _write_case(self, shape: Shape, case: _Planned, writer: PackWriter) -> Case:
        first = _stages(case.before)
        if not writer.has(first):
            case, first = replace(case, before=None), ()
        head = [writer.node(_BEFORE, stage, self._before_argument(case), shape.scratch.offset) for stage in first]
        candidates = []
        for variant in case.variants:
            if writer.has(variant.stages):
                nodes = [
                    writer.node(self._key.op, stage, self._argument(case), shape.scratch.offset)
                    for stage in variant.stages
                ]
                candidates.append(Candidate(variant.config, _add_call(writer, sequence([*head, *nodes]), shape)))
        work, copies = self._family.work(case.request), shape.rotation.copies
        bound, _ = _PARTS[self._target.arch].peak.bound(work.nbytes, work.flops)
        return Case(
            rows=case.request.sizes["M"],
            repeats=copies * max(1, round(_REPLAY_SECONDS / max(bound, 1e-6) / copies)),
            nbytes=work.nbytes,
            flops=work.flops,
            before=_add_call(writer, sequence(head), shape) if head and candidates else "",
            candidates=tuple(candidates),
        )

    def _argument(self, case: _Planned) -> Callable[[ArgumentRule], Argument]:
        """Makes the arguments of the candidates."""
        operands, before = self._operands(case), case.before

        def argument(rule: ArgumentRule) -> Argument:
            if rule.kind is ArgumentKind.WRITE and rule.name == self._result:
                return Pointer(Region.ARENA, self._result_at, case.request.sizes["M"] * self._row_bytes, Access.WRITE)
            if rule.kind is ArgumentKind.WORKSPACE:
                return Pointer(Region.ARENA, self._workspace, case.workspace_bytes, Access.READ | Access.WRITE)
            if rule.kind is ArgumentKind.READ and before is not None and rule.name == before.operand:
                return Pointer(Region.ARENA, 0, operands[rule.name], Access.READ)
            if rule.kind is ArgumentKind.READ:
                place = self._places.get(rule.name, self._rotation.offset)
                return Pointer(Region.WEIGHTS, place, operands[rule.name], Access.READ)
            return _step_sizes(rule)

        return argument

    def _before_argument(self, case: _Planned) -> Callable[[ArgumentRule], Argument]:
        """Makes the arguments of what comes before a call."""

        def argument(rule: ArgumentRule) -> Argument:
            assert case.before is not None
            if rule.kind is ArgumentKind.WRITE:
                return Pointer(Region.ARENA, 0, self._operands(case)[case.before.operand], Access.WRITE)
            if rule.kind is ArgumentKind.READ:
                place = self._places[f"{_BEFORE} {rule.name}"]
                return Pointer(Region.WEIGHTS, place, case.before.operands[rule.name], Access.READ)
            if rule.kind is ArgumentKind.FLOAT:
                return float_argument(case.before.attributes[rule.name], 4)
            return _step_sizes(rule)

        return argument


def _step_sizes(rule: ArgumentRule) -> Pointer:
    assert rule.kind is ArgumentKind.SIZES, f"no pack can hold the argument {rule}"
    return SIZES


def _add_call(writer: PackWriter, graph: LaunchGraph, shape: Shape) -> str:
    """The member that holds ``graph``, a call of ``shape``, of which a chain is verified too."""
    verify_graph(chain(LaunchGraph((writer.inputs_node(),)), graph, shape, 3), region_sizes(shape), 0)
    return writer.add_graph(graph, shape)


def _stages(before: Predecessor | None) -> tuple[Stage, ...]:
    if before is None:
        return ()
    spec, _ = triton_registry().select(before.request)
    return spec.stages(before.request)
