"""Proofs on the CPU: the kernels of solution ``aok`` compared bit for bit on this machine, while a build waits.

The cases are those of proof_cases.py in the shapes of the model, with fewer rows of W and fewer heads: an output is the
sum over one row of W, and a head is computed from its own K and V, so others change nothing. What a sum's order depends
on is kept: columns, head dimension, page size, splits, vocabulary.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tokenspeed import _native, kernels
from tokenspeed.compile import probes
from tokenspeed.compile.proof_cases import (
    BYTES,
    FEATURES,
    Case,
    Slice,
    Step,
    attention_case,
    linear_case,
    norm_case,
    sample_case,
)
from tokenspeed.compile.weights import pack_panel16
from tokenspeed.errors import ResourceError, SelectionError
from tokenspeed.graph import Access, Argument, Float, Int, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.kernels.equivalence import MemberJson, ProvenClass, class_key, known_classes
from tokenspeed.kernels.native_specs import native_registry
from tokenspeed.kernels.registry import ArgumentKind, ArgumentRule, Candidate, KernelSpec, Request
from tokenspeed.proof_pack import ERASED, Answer, RowsSeen, equal_answers
from tokenspeed.step import STEP_SCALARS, align
from tokenspeed.switches import RL_SOLUTION
from tokenspeed.target import Target, cpu_name, missing_flags

COMPILER = f"native library, kernel ABI {_native.KERNEL_ABI}"
_WORKERS = 2
_SLACK = 4096
"""Bytes behind each operand, for kernels that read whole blocks of rows."""


def prove(request: Request, candidates: Sequence[Candidate]) -> tuple[ProvenClass, str]:
    """(the class of the kernel that was chosen for ``request``, who proved it: ``build`` or ``table``).

    ``candidates`` is the registry's answer, the chosen kernel first. On a machine that runs the target all accepted
    ones of its solution are compared; elsewhere the class must be in the table of the architecture.

    Raises SelectionError: the chosen kernel's rows depend on what else is in a step, a kernel of its declared bitwise
    class gives other bits, or nothing was proven and this machine cannot.
    """
    chosen = candidates[0].spec
    if missing_flags(request.target):
        return _from_table(request, chosen), "table"
    specs = tuple(c.spec for c in candidates if c.accepted and c.spec.solution == chosen.solution)
    return _proven(case_of(request), chosen, specs), "build"


def case_of(request: Request) -> Case:
    """The case that stands for ``request``."""
    sizes, dtype = request.sizes, request.dtype
    match request.op:
        case "rms_norm":
            return _cached(norm_case, dtype, sizes["H"])
        case "sample":
            return _cached(sample_case, sizes["V"], sizes["logprob_shards"])
        case "paged_attention":
            kv_heads = min(2, sizes["num_kv_heads"])
            heads = kv_heads * (sizes["num_heads"] // sizes["num_kv_heads"])
            return _cached(attention_case, dtype, heads, kv_heads, sizes["head_dim"], sizes["page_size"],
                           sizes["split_positions"])  # fmt: skip
    return _cached(linear_case, request.op, dtype, sizes["K"], rounded=bool(sizes.get("rounded")))


@cache
def _cached(make: Any, *args: Any, **more: Any) -> Case:
    """A case in the layouts of CPU kernels. Made once in a process."""
    return _in_cpu_layouts(make(*args, **more))


def _in_cpu_layouts(case: Case) -> Case:
    """The case with its weights and pages as CPU kernels read them."""
    arrays, operands = dict(case.arrays), dict(case.operands)
    if case.op.startswith("linear"):
        arrays["weight"] = pack_panel16(arrays["weight"])
        operands["weight"] = (Slice("weight", 0, len(arrays["weight"])),)
    elif case.op == "paged_attention":
        arrays["kv"] = _cpu_pages(arrays["kv"], case)
    return replace(case, arrays=arrays, operands=operands)


def _cpu_pages(pages: probes.Array, case: Case) -> probes.Array:
    """K and V of pages [n, 2, H, S, D] in the layout that artifacts/README.md gives."""
    h, s, d = (case.sizes[name] for name in ("num_kv_heads", "page_size", "head_dim"))
    kv = pages.reshape(len(pages), 2, h, s, d)
    pair = 2 if case.dtype == "bfloat16" else 1
    keys = kv[:, 0].reshape(-1, h, s // 16, 16, d // pair, pair).transpose(0, 1, 2, 4, 3, 5)
    values = kv[:, 1].reshape(-1, h, s // pair, pair, d // 16, 16).transpose(0, 1, 4, 2, 5, 3)
    return np.stack([keys.reshape(len(pages), -1), values.reshape(len(pages), -1)], 1).reshape(len(pages), -1)


_done: dict[Any, ProvenClass] = {}


def _proven(case: Case, chosen: KernelSpec, specs: Sequence[KernelSpec]) -> ProvenClass:
    """The class of ``chosen`` among ``specs``; a process compares the same kernels on the same case once."""
    known = (id(case), chosen.symbol, tuple((spec.symbol, spec.bitwise_class) for spec in specs))
    if known not in _done:
        _done[known] = _compare(case, chosen, specs)
    return _done[known]


def _compare(case: Case, chosen: KernelSpec, specs: Sequence[KernelSpec]) -> ProvenClass:
    answers = [_Bench(case, spec).answer() for spec in specs]
    mine = answers[next(i for i, spec in enumerate(specs) if spec is chosen)]
    if mine.reason:
        raise SelectionError(
            f"op {case.op!r} ({case.dtype}, {case.shape}): need a kernel whose rows depend on nothing else in a step,"
            f" have {chosen.symbol}: {mine.reason}",
            hint="build with --numerics auto, and report this: the kernel declares batch_invariant",
        )
    group = next(group for group in equal_answers(answers) if mine.member in group.members)
    outside = []
    for spec, answer in zip(specs, answers, strict=True):
        if answer.member not in group.members:
            reason = answer.reason or "other bits than those of the class"
            if spec.bitwise_class == chosen.bitwise_class:
                raise SelectionError(
                    f"op {case.op!r} ({case.dtype}, {case.shape}): {chosen.symbol} and {spec.symbol} declare one"
                    f" bitwise class, but on the probes they differ ({reason})",
                    hint="build with --numerics auto, and report this",
                )
            outside.append((answer.member, reason))
    rows = sum(len(step.labels) for step in case.steps)
    functions = tuple(sorted(str(member["kernel"]) for member in group.members))
    return ProvenClass(
        op=case.op, dtype=case.dtype, key=cpu_key(case.op, case.sizes), members=group.members, outside=tuple(outside),
        shapes=(case.shape,), probes=probes.describe(), rows=rows, functions=functions,
        source=native_digest(functions), compiler=COMPILER, device=cpu_name(), driver="", date=str(date.today()),
    )  # fmt: skip


def cpu_key(op: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes by which a table finds the class of an op: those that shape a sum by more than its length."""
    if op == "paged_attention":
        return {"head_dim": sizes["head_dim"], "page_size": sizes["page_size"]}
    if op == "sample":
        return {"shards": sizes["logprob_shards"]}
    return {"rounded": 1} if sizes.get("rounded") else {}


def _from_table(request: Request, chosen: KernelSpec) -> ProvenClass:
    target, dtype = request.target, "float32" if request.op == "sample" else request.dtype
    key = cpu_key(request.op, request.sizes)
    proven = known_classes(target.arch, target.backend).get(class_key(request.op, dtype, key))
    have = "no such proof"
    if proven is not None and not proven.has({"kernel": chosen.symbol}):
        have = f"one of {proven.device} ({proven.date}) without it"
    elif proven is not None:
        problem = staleness(proven)
        if problem is None:
            return proven
        have = f"one that counts for nothing: {problem}"
    sizes = "".join(f", {name} {size}" for name, size in sorted(key.items()))
    raise SelectionError(
        f"op {request.op!r} on {target} ({dtype}{sizes}): need {chosen.symbol} proven batch-invariant, have {have};"
        f" this machine cannot prove it, as it lacks {', '.join(missing_flags(target))}",
        hint=f"build on a machine that runs {target}, or run `tokenspeed prove cpu` there and commit the table that it"
        " writes (docs/equivalence.md), or build with --numerics auto",
    )


def staleness(proven: ProvenClass) -> str | None:
    """Why a proof of CPU kernels counts for nothing in this build; None if it does count."""
    if proven.compiler != COMPILER:
        return f"it is of the {proven.compiler}, this is the {COMPILER}"
    if proven.source != native_digest(proven.functions):
        return f"the kernels have changed since they were proven on {proven.device}, {proven.date}"
    return None


# --- tables, for machines that cannot compare -----------------------------------------------------

_WIDTHS = (576, 1040, 1536, 4096)
_HEAD_DIMS = (16, 32, 64, 96, 128, 256)


def prove_target(target: Target) -> list[ProvenClass]:
    """The classes of a target that this machine runs, over shapes that stand for all: one for each op, dtype and key.

    Raises SelectionError where a proof fails.
    """
    found: dict[Any, list[ProvenClass]] = {}
    registry = native_registry()
    for request in _table_requests(target):
        proven, _ = prove(request, registry.candidates(request))
        found.setdefault(proven.identity, []).append(proven)
    return [_over_all_shapes(group) for group in found.values()]


def _table_requests(target: Target) -> Iterator[Request]:
    def request(op: str, dtype: str, **sizes: int) -> Request:
        return Request(op, target, dtype, {"num_tokens": 1, "num_seqs": 1, **sizes}, solution=RL_SOLUTION)

    for dtype in BYTES:
        for width in _WIDTHS:
            yield request("linear", dtype, N=FEATURES, K=width)
            yield request("linear_silu_mul", dtype, F=FEATURES // 2, K=width)
            yield from (request("linear_add", dtype, N=FEATURES, K=width, rounded=rounded) for rounded in (0, 1))
            yield request("rms_norm", dtype, H=width)
        for head_dim in _HEAD_DIMS:
            heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "page_stride": 1, "pages_per_seq": 16}
            for page_size in (32, 64, 128, 256):
                yield request("paged_attention", dtype, page_size=page_size, split_positions=256, **heads)
    for vocab_size in (1024, 49152):
        yield from (request("sample", "float32", V=vocab_size, logprob_shards=shards) for shards in (1, 2, 4, 8))


def _over_all_shapes(group: Sequence[ProvenClass]) -> ProvenClass:
    """One class of those that were found for several shapes: what is in all of them."""
    first = group[0]
    members = tuple(m for m in first.members if all(other.has(m) for other in group))
    outside = {tuple(m.items()): (m, f"{p.shapes[0]}: {reason}") for p in group for m, reason in p.outside}
    functions = tuple(sorted(str(member["kernel"]) for member in members))
    return replace(
        first, members=members, outside=tuple(outside.values()), rows=sum(proven.rows for proven in group),
        shapes=tuple(proven.shapes[0] for proven in group), functions=functions, source=native_digest(functions),
    )  # fmt: skip


# --- what kernels are made of ---------------------------------------------------------------------

_CPP_TOKENS = re.compile(
    r'//[^\n]*|/\*.*?\*/|(?P<token>"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|[A-Za-z_]\w*|\.?\d[\w.\']*|\S)',
    re.DOTALL,
)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_NATIVE = Path(kernels.__file__).resolve().parent / "native"


@cache
def native_digest(symbols: tuple[str, ...]) -> str:
    """SHA-256 of the sources that the kernels ``symbols`` are made of, without comments and formatting.

    Raises ResourceError if they are not there: nothing has a digest too, and would be equal everywhere.
    """
    files: dict[str, str] = {}
    for symbol in symbols:
        family = "attention" if symbol.startswith("paged_attention") else symbol.partition("_")[0]
        family = {"rms": "norm"}.get(family, family)
        name = f"{family}_{symbol.rpartition('_')[2]}.cpp"
        _collect(name, files)
        if name not in files:
            sources = _NATIVE / name
            raise ResourceError(f"need the sources of {symbol}, have no {sources}", hint="install TokenSpeed anew")
    text = "\n".join(f"{name} {body}" for name, body in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _collect(name: str, files: dict[str, str]) -> None:
    path = _NATIVE / name
    if name in files or not path.is_file():  # includes of the device are beside the kernels
        return
    text = path.read_text()
    files[name] = " ".join(match["token"] for match in _CPP_TOKENS.finditer(text) if match["token"])
    for included in _INCLUDE.findall(text):
        _collect(included, files)


# --- one kernel on one case -----------------------------------------------------------------------


class _Bench:
    """A CPU device whose region arena holds the operands of a case, then the results and what else a kernel writes."""

    def __init__(self, case: Case, spec: KernelSpec):
        self._case, self._spec = case, spec
        end, self._places = 0, dict[str, int]()
        for operand in case.operands:
            self._places[operand] = end
            end += align(case.nbytes(operand) + _SLACK)
        rows = max(len(step.labels) for step in case.steps)
        for name, row_bytes in case.results:
            self._places[name] = end
            end += align(rows * row_bytes + _SLACK)
        self._results = slice(self._places[case.results[0][0]], end)
        for rule in spec.arguments:
            if rule.kind in (ArgumentKind.WRITE, ArgumentKind.UPDATE) and rule.name not in self._places:
                self._places[rule.name] = end
                end += align(rows * 128 + _SLACK)
        self._places["workspace"] = end
        end += align(max(spec.workspace_bytes(self._sizes(step)) for step in case.steps) + _SLACK)
        self._nbytes = end

    def _sizes(self, step: Step) -> dict[str, int]:
        return {**self._case.sizes, **step.bucket}

    def answer(self) -> Answer:
        """What the kernel gives in all runs."""
        member: MemberJson = {"kernel": self._spec.symbol}
        device = _native.CpuDevice(_WORKERS)
        try:
            device.allocate("arena", self._nbytes)
            memory = np.frombuffer(device.view("arena"), np.uint8)
            for operand in self._case.operands:
                data = np.frombuffer(self._case.bytes_of(operand), np.uint8)
                memory[self._places[operand] :][: len(data)] = data
            graphs = [device.load_graph(self._graph(step).encode(), 0) for step in self._case.steps]
            device.seal()
            seen = RowsSeen()
            for step, graph in zip(self._case.steps, graphs, strict=True):
                memory[self._results] = ERASED
                device.wait(device.submit(graph, step.num_tokens, step.num_seqs, len(step.labels)))
                if problem := seen.add(step.name, step.labels, self._rows(memory, len(step.labels))):
                    return Answer(member, {}, problem)
            return Answer(member, seen.rows, seen.vacuous())
        finally:
            device.close()

    def _rows(self, memory: probes.Array, count: int) -> list[bytes | None]:
        """Digest of each row of the results; None for one that was not written."""
        parts = [
            memory[self._places[name] :][: count * nbytes].reshape(count, nbytes) for name, nbytes in self._case.results
        ]
        erased = np.any([(part == ERASED).all(axis=1) for part in parts], axis=0)
        rows = np.concatenate(parts, axis=1)
        return [
            None if gone else hashlib.blake2b(row.tobytes(), digest_size=16).digest()
            for row, gone in zip(rows, erased, strict=True)
        ]

    def _graph(self, step: Step) -> LaunchGraph:
        args = tuple(self._argument(rule, step) for rule in self._spec.arguments)
        return LaunchGraph((Node(self._case.op, self._spec.symbol, args, ()),))

    def _argument(self, rule: ArgumentRule, step: Step) -> Argument:
        case, sizes = self._case, self._sizes(step)
        match rule.kind:
            case ArgumentKind.READ:
                return self._read(*step.operands.get(rule.name, (rule.name, 0)))
            case ArgumentKind.WRITE | ArgumentKind.UPDATE:
                nbytes = dict(case.results).get(rule.name, 128) * len(step.labels)
                return Pointer(Region.ARENA, self._places[rule.name], nbytes, Access.WRITE)
            case ArgumentKind.WORKSPACE:
                nbytes = self._spec.workspace_bytes(sizes)
                return Pointer(Region.ARENA, self._places["workspace"], nbytes, Access.READ | Access.WRITE)
            case ArgumentKind.ROWS:
                return StepScalar(STEP_SCALARS.index("num_tokens"))
            case ArgumentKind.STEP:
                return StepScalar(STEP_SCALARS.index(rule.name))
            case ArgumentKind.INT:
                return Int(sizes.get(rule.name, 0), 8)
        assert rule.kind is ArgumentKind.FLOAT, rule
        return Float(case.floats[rule.name])

    def _read(self, name: str, skipped: int) -> Pointer:
        """The operand from row ``skipped`` on."""
        case = self._case
        row = case.sizes["V"] * 4 if name == "logits" else case.row_bytes(case.operands[name][0].array)
        return Pointer(Region.ARENA, self._places[name] + skipped * row, case.nbytes(name) - skipped * row, Access.READ)
