"""The kernel registry: what each kernel says of itself, and how one is chosen for an op, with reasons.

A KernelSpec describes one kernel of one solution. Selection asks for an op on a target with a dtype and a
shape; every spec of that op answers with acceptance or with all its reasons for refusal, and accepted ones
are ranked. Two kinds of claims differ on purpose (docs/kernels.md):

- *traits* rank. The caller names values; a kernel that declares the trait must have the value in its set,
  one that does not declare it is not asked. A trait guarantees nothing.
- *features* guarantee. The caller names what it requires; a kernel that does not declare all of it is out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from math import prod
from typing import Any, Protocol, TypeAlias

from tokenspeed.errors import SelectionError
from tokenspeed.kernels.equivalence import ClassProof
from tokenspeed.kernels.library import LibraryKernel
from tokenspeed.target import Target

Constant: TypeAlias = int | float | bool | str
Numbers: TypeAlias = tuple[int, ...]
DTYPES_TRITON: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16"}
"""Program dtypes as Triton names them."""

SOLUTIONS = ("reference", "native", "onednn", "triton", "cutlass", "flashinfer", "tensorrt", "aok")


class Band(IntEnum):
    """Priority bands, lowest first: a kernel of a higher band is preferred whatever its traits."""

    REFERENCE = 0
    PORTABLE = 10
    """Runs on every machine of the backend."""
    VECTOR = 20
    """Uses the widest vectors of the target."""
    DOT_PRODUCT = 30
    """Uses instructions made for this product on vectors."""
    MATRIX = 40
    """Uses the matrix unit of the target."""


class Constraint(Protocol):
    """A named condition on the sizes of a call."""

    def problem(self, sizes: Mapping[str, int]) -> str | None:
        """None where the condition holds, else what is needed and what the call has."""


@dataclass(frozen=True)
class MultipleOf:
    """``size`` is a multiple of ``factor``, a number or the name of another size."""

    size: str
    factor: int | str

    def __str__(self) -> str:
        return f"{self.size} % {self.factor} == 0"

    def problem(self, sizes: Mapping[str, int]) -> str | None:
        value = sizes[self.size]
        factor = self.factor if isinstance(self.factor, int) else sizes[self.factor]
        return None if value % factor == 0 else f"need {self.size} to be a multiple of {factor}, have {value}"


@dataclass(frozen=True)
class AtMost:
    """``size`` is at most ``limit``."""

    size: str
    limit: int

    def __str__(self) -> str:
        return f"{self.size} <= {self.limit}"

    def problem(self, sizes: Mapping[str, int]) -> str | None:
        value = sizes[self.size]
        return None if value <= self.limit else f"need {self.size} to be at most {self.limit}, have {value}"


class Workspace(Protocol):
    """Bytes of arena that a kernel needs for itself during one call, from the sizes of the call."""

    def __call__(self, sizes: Mapping[str, int]) -> int: ...


class ArgumentKind(StrEnum):
    """Where an argument of a kernel comes from when an op is lowered to a call of it."""

    READ = "read"
    """Pointer to the operand of this name."""
    WRITE = "write"
    """Pointer to the result of this name."""
    UPDATE = "update"
    """Pointer to the result of this name, which overwrites an operand that the kernel reads."""
    WORKSPACE = "workspace"
    """Pointer to the kernel's workspace in the arena; of a library's kernel to its part of this name."""
    SHARED = "shared"
    """Pointer to the part of this name of the workspace that all ops of one kind share: written by a stage that runs
    once, read by the others."""
    ROWS = "rows"
    """Step scalar: the first dimension of the operand of this name."""
    STEP = "step"
    """Step scalar of this name."""
    INT = "int"
    """Size of the call of this name."""
    FLOAT = "float"
    """Attribute of the op of this name."""
    SIZES = "sizes"
    """Pointer to the io tensor of this name that holds the sizes of the step: a GPU graph has no step scalars."""


_LETTERS: Mapping[ArgumentKind, str] = {
    ArgumentKind.READ: "p", ArgumentKind.WRITE: "p", ArgumentKind.UPDATE: "p", ArgumentKind.WORKSPACE: "p",
    ArgumentKind.SHARED: "p", ArgumentKind.SIZES: "p",
    ArgumentKind.ROWS: "i", ArgumentKind.STEP: "i", ArgumentKind.INT: "i", ArgumentKind.FLOAT: "f",
}  # fmt: skip


@dataclass(frozen=True)
class ArgumentRule:
    """How one argument of a kernel is made from an op."""

    kind: ArgumentKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def argument_rules(text: str) -> tuple[ArgumentRule, ...]:
    """Rules from text such as ``read x, write out, rows x, int N``."""
    words = (item.split() for item in text.split(","))
    return tuple(ArgumentRule(ArgumentKind(kind), name) for kind, name in words)


@dataclass(frozen=True)
class DeviceKernel:
    """A GPU kernel to compile: what its binary depends on, but for the target.

    Attributes:
        module, function: where its source is; ``function`` is also its symbol in the binary.
        signature: (name, type) of every parameter that is passed at launch, in order; types are pointers to a scalar
            (``*bf16``, ``*fp32``, ``*i32``, ``*i64``, ``*u64``) or scalars (``i32``, ``fp32``). Pointers are
            declared divisible by 16, scalars are not specialized.
        constants: (name, value) of every other parameter, sorted by name.
        num_warps: warps of a block; of a Gluon kernel with roles, those of the first.
        num_stages: depth of the compiler's software pipelines.
        max_registers: registers of a thread at most, or 0 for the compiler's choice.
        scratch_bytes: scratch memory of each block, to which Triton adds a parameter: written before the kernel has
            waited for its predecessors, so nothing else may lie there during a step.
    """

    module: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant | Numbers], ...]
    num_warps: int
    num_stages: int
    max_registers: int = 0
    scratch_bytes: int = 0

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.function}[{constants}; {self.num_warps} warps, {self.num_stages} stages]"

    def to_json(self) -> dict[str, Any]:
        """What a selection report tells of it."""
        return {
            "function": self.function,
            "constants": dict(self.constants),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


@dataclass(frozen=True)
class Stage:
    """One launch of a kernel call. ``name`` tells the stages of one call apart; ``kernel`` is None for a function
    of the native library; ``grid`` counts blocks; a ``programmatic`` kernel may start before its predecessors have
    finished, and waits for them itself. A ``library`` makes its launches itself: ``kernel`` and ``grid`` say nothing of
    them. A stage that runs ``once`` is left out where an earlier call of the step had it with equal arguments."""

    symbol: str
    arguments: tuple[ArgumentRule, ...]
    name: str = ""
    kernel: DeviceKernel | None = None
    grid: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False
    library: LibraryKernel | None = None
    once: bool = False

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of the launch: that of all its blocks."""
        return 0 if self.kernel is None else self.kernel.scratch_bytes * prod(self.grid)


def device_stage(
    *,
    module: str,
    function: Callable[..., Any],
    arguments: str,
    types: str,
    constants: Mapping[str, Constant | Numbers],
    num_warps: int,
    num_stages: int,
    grid: tuple[int, int, int],
    target: Target,
    name: str = "",
    early: bool = False,
    max_registers: int = 0,
    scratch_bytes: int = 0,
) -> Stage:
    """The Stage that launches the Triton function ``function``.

    ``arguments`` (as for ``argument_rules``) and ``types`` are parallel, one entry per parameter that is not a
    constant, in the function's order; ``constants`` name the others but for PDL (programmatic dependent launch): 0
    where the target has none, else 1, or 2 with ``early`` (kernels/triton/common.py says what they mean).
    """
    source = getattr(function, "fn", function)
    parameters = tuple(inspect.signature(source).parameters)
    programmatic = target.backend == "cuda"
    values: dict[str, Constant | Numbers] = {**constants, "PDL": (2 if early else 1) if programmatic else 0}
    rules, kinds = argument_rules(arguments), tuple(word.strip() for word in types.split(","))
    passed = tuple(p for p in parameters if p not in values)
    assert len(passed) == len(rules) == len(kinds), (source.__name__, passed, rules, kinds)
    assert values.keys() <= set(parameters), (source.__name__, sorted(values.keys() - set(parameters)))
    kernel = DeviceKernel(
        module=module,
        function=source.__name__,
        signature=tuple(zip(passed, kinds, strict=True)),
        constants=tuple(sorted(values.items())),
        num_warps=num_warps,
        num_stages=num_stages,
        max_registers=max_registers,
        scratch_bytes=scratch_bytes,
    )
    return Stage(source.__name__, rules, name, kernel, grid, programmatic)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel.

    Attributes:
        op: kind of op that it computes.
        solution: one of SOLUTIONS: where it comes from.
        symbol: its name in the kernel library, by which nodes call it.
        targets: machines that it runs on, as ``backend:arch``.
        dtypes: program dtypes that it serves.
        arguments: how each of its arguments is made from the op (tokenspeed/compile/lower.py).
        band: priority band.
        rank: its place within the band; the greatest is preferred.
        alias: its name where that is not ``symbol``: a kernel of solution ``aok`` launches that of another solution
            (``fixed_order``).
        traits: trait -> values for which the kernel was made.
        features: guarantees that it gives.
        constraints: conditions on the sizes of the call.
        weight_layout: how it reads the weights among its operands (tokenspeed/compile/weights.py), or None.
        workspace: arena bytes for its own use, or None for none.
        shared_workspace: arena bytes that all ops of its kind share through a step, or None for none.
        bitwise_class: kernels of one class give equal bits for equal rows; each is alone in its own by default.
        launches: for a GPU, the launches that serve a request; None for one call of ``symbol`` with ``arguments``.
        unavailable: why this build cannot make it, whatever is asked; empty if it can.
        proof: what keeps the kernel to choices that were proven bitwise equal (kernels/equivalence.py); None if there
            is nothing to choose or to prove.
    """

    op: str
    solution: str
    symbol: str
    targets: tuple[str, ...]
    dtypes: tuple[str, ...]
    arguments: tuple[ArgumentRule, ...]
    band: Band
    traits: Mapping[str, frozenset[str]] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    constraints: tuple[Constraint, ...] = ()
    weight_layout: str | None = None
    workspace: Workspace | None = None
    bitwise_class: str = ""
    launches: Callable[[Request], tuple[Stage, ...]] | None = None
    shared_workspace: Workspace | None = None
    unavailable: str = ""
    rank: int = 0
    alias: str = ""
    proof: ClassProof | None = None

    def __post_init__(self) -> None:
        assert self.solution in SOLUTIONS, self.solution
        if not self.bitwise_class:
            object.__setattr__(self, "bitwise_class", self.symbol)

    @property
    def name(self) -> str:
        """Its identity, unique in a registry."""
        return self.alias or self.symbol

    @property
    def signature(self) -> str:
        """A letter per argument, as in the kernel library's table: p pointer, i integer, f float."""
        return "".join(_LETTERS[rule.kind] for rule in self.arguments)

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        return 0 if self.workspace is None else self.workspace(sizes)

    def shared_workspace_bytes(self, sizes: Mapping[str, int]) -> int:
        return 0 if self.shared_workspace is None else self.shared_workspace(sizes)

    def stages(self, request: Request) -> tuple[Stage, ...]:
        """What runs, in order, to serve ``request``, which this kernel accepts."""
        if self.proof is not None:
            return self.proof.choose(request).stages
        return (Stage(self.symbol, self.arguments),) if self.launches is None else self.launches(request)

    def unproven(self, request: Request) -> str | None:
        """Why no proof covers what would serve ``request``; None if one does, or none is needed."""
        try:
            if self.proof is not None:
                self.proof.choose(request)
        except LookupError as e:
            return str(e.args[0])
        return None


@dataclass(frozen=True)
class Request:
    """What a caller asks for one op.

    ``sizes`` are the sizes that constraints, workspaces and launches speak of (compile/select.py lists them),
    ``traits`` one wanted value per trait, ``features`` what must be guaranteed, ``solution`` the only solution
    allowed, or None for any.
    """

    op: str
    target: Target
    dtype: str
    sizes: Mapping[str, int]
    traits: Mapping[str, str] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    solution: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A spec and its answer to a request: ``reasons`` why it is not the one chosen; empty for the chosen one."""

    spec: KernelSpec
    accepted: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.spec.name}: {'; '.join(self.reasons) or 'chosen'}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.spec.name,
            "solution": self.spec.solution,
            "band": self.spec.band.name.lower(),
            "accepted": self.accepted,
            "reasons": list(self.reasons),
        }


FIXED_ORDER = frozenset({"batch_invariant", "fixed_reduction_order", "run_invariant"})
"""The features of a kernel that make a row's bits a function of that row and nothing else."""
SAMPLER_FEATURES = frozenset({"canonical_ties", "request_keyed_draws"})
"""What samplers may guarantee besides: of equal logits the lowest id is the greatest, and a draw depends on the
request's seed and its position alone."""


def fixed_order(specs: Iterable[KernelSpec], proofs: Mapping[str, ClassProof] | None = None) -> Iterator[KernelSpec]:
    """``specs``, and for each of them that declares FIXED_ORDER the same kernel as one of solution ``aok``.

    That is of band REFERENCE, so nobody gets it who does not ask for the solution. Within the band the kernels keep
    the order that they have among themselves: the best for a target still wins. ``proofs``: by kind of op, what keeps
    its kernels to a proven class.
    """
    for spec in specs:
        yield spec
        if spec.features >= FIXED_ORDER:
            yield replace(
                spec,
                solution="aok",
                alias=f"aok:{spec.name}",
                band=Band.REFERENCE,
                rank=int(spec.band) + spec.rank,
                proof=(proofs or {}).get(spec.op),
            )


class Registry:
    """All kernels that a build may choose from."""

    def __init__(self, specs: Iterable[KernelSpec]):
        self.specs = tuple(sorted(specs, key=lambda spec: spec.name))
        self.by_name = {spec.name: spec for spec in self.specs}
        assert len(self.by_name) == len(self.specs), "two kernels have one name"
        self._by_op: dict[str, list[KernelSpec]] = {}
        for spec in self.specs:
            self._by_op.setdefault(spec.op, []).append(spec)

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """Every kernel of the op with its answer: accepted ones first, best first; then the refused ones.

        Only the first has no reasons if it is accepted; the other accepted ones say what they lost to.
        """
        answers = [(spec, _refusals(spec, request)) for spec in self._by_op.get(request.op, ())]
        accepted = sorted((s for s, refused in answers if not refused), key=lambda s: _rank(s, request))
        ranked = [Candidate(s, True, () if i == 0 else (_lost(s, accepted[0]),)) for i, s in enumerate(accepted)]
        refused = [Candidate(s, False, reasons) for s, reasons in answers if reasons]
        return (*ranked, *sorted(refused, key=lambda c: _rank(c.spec, request)))

    def select(self, request: Request) -> tuple[KernelSpec, tuple[Candidate, ...]]:
        """The best kernel and all candidates. Raises SelectionError listing every candidate if none is accepted."""
        candidates = self.candidates(request)
        if candidates and candidates[0].accepted:
            return candidates[0].spec, candidates
        raise SelectionError(_no_kernel_text(request, candidates), hint=_hint(request, candidates))


def _refusals(spec: KernelSpec, request: Request) -> tuple[str, ...]:
    """All reasons why ``spec`` cannot serve ``request``, in the order in which they are worth knowing."""
    reasons = []
    if request.solution is not None and spec.solution != request.solution:
        reasons.append(f"solution: need {request.solution} (pinned), have {spec.solution}")
    if str(request.target) not in spec.targets:
        reasons.append(f"target: need {request.target}, runs on {', '.join(spec.targets)}")
    if request.dtype not in spec.dtypes:
        reasons.append(f"dtype: need {request.dtype}, serves {', '.join(spec.dtypes)}")
    if spec.unavailable:
        reasons.append(f"build: {spec.unavailable}")
    missing = sorted(request.features - spec.features)
    if missing:
        reasons.append(f"features: need {', '.join(missing)}, not declared")
    for trait, wanted in sorted(request.traits.items()):
        declared = spec.traits.get(trait)
        if declared is not None and wanted not in declared:
            reasons.append(f"trait {trait}: need {wanted}, made for {', '.join(sorted(declared))}")
    for constraint in spec.constraints:
        problem = constraint.problem(request.sizes)
        if problem is not None:
            reasons.append(f"sizes: {problem}")
    if not reasons and (problem := spec.unproven(request)) is not None:
        reasons.append(f"proof: {problem}")
    return tuple(reasons)


def _matching_traits(spec: KernelSpec, request: Request) -> int:
    return sum(trait in spec.traits for trait in request.traits)


def _rank(spec: KernelSpec, request: Request) -> tuple[int, int, int, str]:
    """Sort key, best first: band, rank in it, then how many wanted traits it was made for, then the name."""
    return -spec.band, -spec.rank, -_matching_traits(spec, request), spec.name


def _lost(spec: KernelSpec, winner: KernelSpec) -> str:
    if spec.band != winner.band:
        return f"outranked by {winner.name}: band {winner.band.name.lower()} over {spec.band.name.lower()}"
    if spec.rank != winner.rank:
        return f"outranked by {winner.name}: rank {winner.rank} over {spec.rank} within band {spec.band.name.lower()}"
    return f"outranked by {winner.name}: made for more of the wanted traits, or first by name"


def _no_kernel_text(request: Request, candidates: Sequence[Candidate]) -> str:
    pinned = f" of pinned solution {request.solution}" if request.solution is not None else ""
    need = f"dtype {request.dtype}"
    if request.features:
        need += f", features {', '.join(sorted(request.features))}"
    asked = f"op {request.op!r} on {request.target}: need {need}"
    lines = [f"no kernel{pinned} for {asked}; have {len(candidates)} to choose from"]
    missing = sorted(request.features - frozenset().union(*(c.spec.features for c in candidates)))
    if missing:
        lines.append(f"  no kernel of this op declares {', '.join(missing)}")
    return "\n".join([*lines, *(f"  {candidate}" for candidate in candidates)])


def _hint(request: Request, candidates: Sequence[Candidate]) -> str:
    if any(reason.startswith("proof: ") for c in candidates for reason in c.reasons):
        return (
            "prove the kernels on such a device (docs/equivalence.md), choose a target that has proofs, or build with"
            " --numerics auto"
        )
    if request.solution is not None:
        have = sorted({c.spec.solution for c in candidates})
        return f"pin op {request.op!r} to {' or '.join(have)}, or pin nothing" if have else "pin another solution"
    return "choose another target (CPUs have kernels for more sizes), dtype or page size, or require fewer features"
