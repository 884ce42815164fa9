"""The builder's side of ``tokenspeed prove``: packs of kernels to compare bit for bit on a GPU, made on any machine.

The cases are those of proof_cases.py; kernels/triton/proofs.py has the members of each op. The device's side is
tokenspeed/runtime/proving.py, class_tables.py puts what was found where builds read it; docs/equivalence.md explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenspeed import __version__
from tokenspeed.compile import probes
from tokenspeed.compile.build import Progress
from tokenspeed.compile.layout import SCRATCH_ALIGNMENT
from tokenspeed.compile.lower import float_argument
from tokenspeed.compile.pack_writer import (
    SIZES,
    PackResult,
    PackWriter,
    check_output,
    kernels_of,
    sequence,
    sizes_stage,
)
from tokenspeed.compile.proof_cases import MIXED, Case, Step, attention_case, linear_case, norm_case, sample_case
from tokenspeed.errors import UsageError
from tokenspeed.graph import Access, Argument, LaunchGraph, Pointer, Region
from tokenspeed.kernels.equivalence import MemberJson
from tokenspeed.kernels.registry import ArgumentKind, ArgumentRule, DeviceKernel, KernelSpec, Request, Stage
from tokenspeed.kernels.triton.proofs import COMPILER, MEMBERS
from tokenspeed.kernels.triton.source import functions_of, source_digest
from tokenspeed.kernels.triton.stage import Extent, copy_stage
from tokenspeed.kernels.triton_specs import triton_registry
from tokenspeed.proof_pack import Compared, Piece, ProofCase, ProofManifest, Result, Run
from tokenspeed.step import STEP_COUNTS, align
from tokenspeed.target import Target

_ALIGNMENT = 256
_PAGE = 4096
DTYPES = ("bfloat16", "float32")


def default_cases() -> Iterator[Case]:
    """The projections of SmolLM2 and Llama 3.1 8B and an odd one, their attention and others', norms of every width up
    to 16384, vocabularies up to 262144."""
    for op, widths in (
        ("linear", (576, 4096)),
        ("linear_add", (1040, 1536, 14336)),
        ("linear_silu_mul", (576, 4096)),
    ):
        yield from (linear_case(op, "bfloat16", k) for k in widths)
        yield linear_case(op, "float32", 576)
    for dtype in DTYPES:
        yield linear_case("linear_add", dtype, 1040, rounded=True)
    for head_dim in (16, 32, 64, 80, 96, 128, 256):
        kv_heads = 1 if head_dim == 256 else 2
        heads = kv_heads * (3 if head_dim == 64 else 4)
        yield attention_case("bfloat16", heads, kv_heads, head_dim, 64, 256)
    for head_dim in (16, 64, 128):
        yield attention_case("bfloat16", 4, 2, head_dim, 32, 64)
    for head_dim in (16, 32, 64, 96, 128, 256):
        yield attention_case("float32", 2, 1, head_dim, 64, 256)
    for dtype in DTYPES:
        yield from (norm_case(dtype, width) for width in (16, 32, 64, 96, 192, 384, 576, 2048, 4096, 5120, 12288))
    for chunks in (1, 2, 3, 6, 12, 24, 63, 128):
        shards = (1, 2, 4, 8) if chunks in (24, 63) else (1, 8)
        yield from (sample_case(chunks * 2048 - 1024, count) for count in shards)


def pack(
    output: str | Path,
    target: Target,
    *,
    cases: Sequence[Case] | None = None,
    ops: Sequence[str] | None = None,
    force: bool = False,
    workers: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> PackResult:
    """Write the pack of all members of all ops that sum, on ``target``.

    Args:
        cases: what is computed (default: ``default_cases``).
        ops: the kinds of op to compare instead of all.
        force: replace the file at ``output``.
        workers, cache: as for ``build``.

    Raises:
        TokenSpeedError: one of its kinds; nothing is left behind.
    """
    progress, path = progress or Progress(), Path(output)
    _check_request(path, target, ops, force)
    with progress.stage("cases"):
        chosen = [case for case in (cases or default_cases()) if not ops or case.op in ops]
        plans = [_CasePlan(case, target) for case in chosen]
    kernels = (kernel for plan in plans for kernel in plan.kernels())
    writer = PackWriter(target, kernels, workers=workers, cache=cache, progress=progress)
    with progress.stage("pack"):
        written = tuple(case for plan in plans if (case := plan.write(writer)) is not None)
        manifest = ProofManifest(str(target), __version__, COMPILER, probes.describe(), written, writer.binaries, {})
        members = sum(len(case.compared) for case in written)
        return writer.write(path, manifest, cases=len(written), members=members)


def _check_request(path: Path, target: Target, ops: Sequence[str] | None, force: bool) -> None:
    if not target.is_gpu:
        raise UsageError(
            f"--target is {target}: packs are for GPUs; CPUs prove at build", hint="name one, e.g. cuda:sm_90a"
        )
    for op in ops or ():
        if op not in MEMBERS:
            raise UsageError(f"op {op!r} has no sums to compare", hint=f"those that have are {', '.join(MEMBERS)}")
    check_output(path, force)


# --- where it lies, and its graphs ----------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """A member of a case: its launches for every run, none for runs that it does not serve."""

    member: MemberJson
    stages: tuple[tuple[Stage, ...], ...]


class _CasePlan:
    """One case: the members with their launches, and where operands lie.

    Region weights holds the operands. Region arena holds the results, then what else kernels write, their workspace and
    their scratch memory. Region io holds the sizes of the step; region host_io holds them too, and the results.
    """

    def __init__(self, case: Case, target: Target):
        case = replace(case, steps=tuple(step for step in case.steps if step.kinds != MIXED))
        self._case, self._target = case, target
        self._requests = [self._request(step) for step in case.steps]
        self._spec = _spec(self._requests[0])
        choice = MEMBERS[case.op]
        self._key = choice.key(self._requests[0])
        self._planned = [
            _Planned(member, tuple(
                choice.stages(request, member) if not step.kinds or member["kernel"] in step.kinds else ()
                for step, request in zip(case.steps, self._requests, strict=True)
            ))
            for member in choice.members(self._requests[0])
        ]  # fmt: skip
        self._rows = max(len(step.labels) for step in case.steps)
        self._place()

    def _request(self, step: Step) -> Request:
        case = self._case
        sizes = {"num_tokens": 1, "num_seqs": 1, "num_logit_rows": 1, **case.sizes, **step.bucket}
        return Request(case.op, self._target, case.dtype, sizes)

    def _stages(self) -> Iterator[Stage]:
        yield from (stage for planned in self._planned for stages in planned.stages for stage in stages)

    def _place(self) -> None:
        end, self._places = 0, dict[str, int]()
        for operand in self._case.operands:
            self._places[operand] = end
            end += align(self._case.nbytes(operand), _ALIGNMENT)
        self._weights_bytes = max(end, _ALIGNMENT)
        results, end = [], _PAGE
        for name, row_bytes in self._case.results:
            results.append(Result(name, end, row_bytes))
            end += align(self._rows * row_bytes, _PAGE)
        self._results, self._io_bytes = tuple(results), end
        end = align(end - _PAGE, _PAGE)
        self._others: dict[str, int] = {}
        for stage in self._stages():
            for rule in stage.arguments:
                known = {result.name for result in results} | self._others.keys()
                if rule.kind in (ArgumentKind.WRITE, ArgumentKind.UPDATE) and rule.name not in known:
                    self._others[rule.name], end = end, end + _PAGE
        self._workspace = end
        end += align(max(self._workspace_bytes(request) for request in self._requests), _ALIGNMENT)
        self._scratch = end
        scratch = max((stage.scratch_bytes for stage in self._stages()), default=0)
        self._arena_bytes = end + align(scratch, SCRATCH_ALIGNMENT)

    def _workspace_bytes(self, request: Request) -> int:
        """What the kernel needs, and what splits side by side need, which only some requests have."""
        needed = self._spec.workspace_bytes(request.sizes)
        if self._case.op == "paged_attention":
            needed = max(
                needed, self._spec.workspace_bytes({**request.sizes, "num_seqs": 1}) * request.sizes["num_seqs"]
            )
        return needed

    def _copy_results(self) -> Stage:
        """The launch that copies the rows of all results, from the beginning of the first."""
        counted = STEP_COUNTS.index("num_logit_rows")
        return copy_stage(self._target, [
            Extent(r.offset - _PAGE, r.row_bytes, counted, 0, self._rows, align(self._rows * r.row_bytes, _PAGE))
            for r in self._results
        ])  # fmt: skip

    def kernels(self) -> Iterator[DeviceKernel]:
        return kernels_of((sizes_stage(self._target), self._copy_results(), *self._stages()))

    def write(self, writer: PackWriter) -> ProofCase | None:
        """The case with its graphs in ``writer``; None if no member compiled."""
        if not writer.has([sizes_stage(self._target), self._copy_results()]):
            return None
        case, used = self._case, [p for p in self._planned if writer.has([s for run in p.stages for s in run])]
        functions = functions_of(s.kernel for p in used for run in p.stages for s in run)
        if not used:
            return None
        runs = tuple(Run(step.name, step.num_tokens, step.num_seqs, step.labels) for step in case.steps)
        empty = ProofCase(
            op=case.op, dtype=case.dtype, key=self._key, shape=case.shape, weights_bytes=self._weights_bytes,
            arena_bytes=self._arena_bytes, io_bytes=self._io_bytes, data=self._data(writer), results=self._results,
            fetch="", erase="", functions=functions, source=source_digest(functions), runs=runs, compared=(),
        )  # fmt: skip
        nbytes = self._io_bytes - _PAGE
        arena, host = (Region.ARENA, 0, nbytes), (Region.HOST_IO, _PAGE, nbytes)
        fetch = self._copy(writer, Pointer(*arena, Access.READ), Pointer(*host, Access.WRITE))
        erase = self._copy(writer, Pointer(*host, Access.READ), Pointer(*arena, Access.WRITE))
        compared = []
        for planned in used:
            graphs = (
                writer.add_graph(self._graph(writer, step, request, stages), empty) if stages else ""
                for step, request, stages in zip(case.steps, self._requests, planned.stages, strict=True)
            )
            compared.append(Compared(planned.member, tuple(graphs)))
        return replace(
            empty, fetch=writer.add_graph(fetch, empty), erase=writer.add_graph(erase, empty), compared=tuple(compared)
        )

    def _data(self, writer: PackWriter) -> tuple[Piece, ...]:
        """What region weights is made of."""
        pieces, end = [], 0
        names = {name: writer.add_data(array.tobytes()) for name, array in self._case.arrays.items()}
        zeros = writer.add_data(bytes(_ALIGNMENT))
        for operand, slices in self._case.operands.items():
            assert end == self._places[operand], operand
            for part in slices:
                row = self._case.row_bytes(part.array)
                pieces.append(Piece(names[part.array], part.first * row, part.count * row, part.repeat))
                end += part.count * row * part.repeat
            padding = -end % _ALIGNMENT
            if padding:
                pieces.append(Piece(zeros, 0, padding, 1))
            end += padding
        return tuple(pieces)

    def _copy(self, writer: PackWriter, source: Pointer, target: Pointer) -> LaunchGraph:
        """The graph that copies all results."""
        return sequence([writer.copy_node("copy", self._copy_results(), source, target)])

    def _graph(self, writer: PackWriter, step: Step, request: Request, stages: Sequence[Stage]) -> LaunchGraph:
        argument, name = self._argument(step, request), self._case.op
        nodes = [writer.node(name, stage, argument, self._scratch) for stage in stages]
        return sequence([writer.inputs_node(), *nodes])

    def _argument(self, step: Step, request: Request) -> Callable[[ArgumentRule], Argument]:
        """Makes the arguments of the kernels in a run."""
        results = {result.name: result for result in self._results}

        def argument(rule: ArgumentRule) -> Argument:
            match rule.kind:
                case ArgumentKind.READ:
                    return self._operand(*step.operands.get(rule.name, (rule.name, 0)))
                case ArgumentKind.WRITE | ArgumentKind.UPDATE if rule.name in results:
                    result = results[rule.name]
                    nbytes = self._rows * result.row_bytes
                    return Pointer(Region.ARENA, result.offset - _PAGE, nbytes, Access.WRITE)
                case ArgumentKind.WRITE | ArgumentKind.UPDATE:
                    return Pointer(Region.ARENA, self._others[rule.name], _PAGE, Access.WRITE)
                case ArgumentKind.WORKSPACE:
                    nbytes = self._workspace_bytes(request)
                    return Pointer(Region.ARENA, self._workspace, nbytes, Access.READ | Access.WRITE)
                case ArgumentKind.FLOAT:
                    return float_argument(self._case.floats[rule.name], 4)
            assert rule.kind is ArgumentKind.SIZES, f"no proof pack can hold the argument {rule}"
            return SIZES

        return argument

    def _operand(self, name: str, skipped: int) -> Pointer:
        """The operand from row ``skipped`` on."""
        nbytes = self._case.nbytes(name)
        offset = skipped * self._case.row_bytes(self._case.operands[name][0].array)
        if name == "logits":  # whose rows are stretches of one array
            offset = skipped * self._case.sizes["V"] * 4
        return Pointer(Region.WEIGHTS, self._places[name] + offset, nbytes - offset, Access.READ)


def _spec(request: Request) -> KernelSpec:
    """The kernel whose workspace the members need: the same for all of them."""
    specs = triton_registry().specs
    return next(s for s in specs if s.op == request.op and s.solution == "triton" and request.dtype in s.dtypes)
