"""Selection: Program x target x bucket -> Plan, one kernel call per op, with the reasons of every choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.compile.ops import Dim
from tokenspeed.compile.program import Op, Program
from tokenspeed.errors import SelectionError
from tokenspeed.kernels.library import LibraryKernel
from tokenspeed.kernels.registry import Candidate, DeviceKernel, KernelSpec, Registry, Request, Stage
from tokenspeed.step import STEP_SCALARS
from tokenspeed.target import Target

PRELUDE = "prelude"
"""Where decisions name buckets: the ops that run once, before the first step."""
NO_STEP = Bucket(BucketKind.DECODE, 1, 1, 1)
"""Stands where a bucket is asked for and nothing depends on it."""


@dataclass(frozen=True)
class KernelCall:
    """One op, the kernel that computes it, the sizes that it is called with in this bucket, and its launches."""

    op: Op
    spec: KernelSpec
    sizes: Mapping[str, int]
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Plan:
    """The kernel calls of one bucket, in the order of the Program's ops."""

    target: Target
    bucket: Bucket
    calls: tuple[KernelCall, ...]


GpuKernels: TypeAlias = tuple[DeviceKernel | LibraryKernel, ...]
"""What a call launches on a GPU, in order; nothing for a call of the native library."""


@dataclass(frozen=True)
class Decision:
    """One choice, and the ops and buckets that it was made for: equal requests get one answer. ``launches``: what the
    chosen kernel launches, with its tile, and in which of the buckets."""

    op: str
    dtype: str
    sizes: Mapping[str, int]
    candidates: tuple[Candidate, ...]
    op_names: tuple[str, ...]
    buckets: tuple[str, ...]
    launches: Mapping[GpuKernels, tuple[str, ...]]

    @property
    def chosen(self) -> KernelSpec:
        return self.candidates[0].spec

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "dtype": self.dtype,
            "sizes": dict(self.sizes),
            "ops": list(self.op_names),
            "buckets": list(self.buckets),
            "chosen": self.chosen.name,
            "launches": [
                {"buckets": list(buckets), "kernels": [kernel.to_json() for kernel in kernels]}
                for kernels, buckets in self.launches.items()
            ],
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


@dataclass(frozen=True)
class Selection:
    """The Plans of one target, parallel to its buckets, and the decisions that led to them. ``prelude`` is the Plan of
    what runs once, before the first step."""

    target: Target
    plans: tuple[Plan, ...]
    decisions: tuple[Decision, ...]
    features: frozenset[str]
    pinned: Mapping[str, str]
    solution: str | None = None
    op_features: Mapping[str, frozenset[str]] = field(default_factory=dict)
    prelude: Plan | None = None

    @property
    def all_plans(self) -> tuple[Plan, ...]:
        """Those of the buckets, then that of the prelude."""
        return self.plans if self.prelude is None else (*self.plans, self.prelude)

    def to_json(self) -> dict[str, Any]:
        """The selection report of the artifact: what was chosen for what, and why not the others."""
        return {
            "target": str(self.target),
            "required_features": sorted(self.features),
            "op_features": {op: sorted(features) for op, features in sorted(self.op_features.items())},
            "pinned": dict(sorted(self.pinned.items())),
            "pinned_solution": self.solution or "",
            "decisions": [decision.to_json() for decision in self.decisions],
        }


def select(
    program: Program,
    target: Target,
    buckets: Sequence[Bucket],
    registry: Registry,
    deployment: Mapping[str, int],
    *,
    features: frozenset[str] = frozenset(),
    op_features: Mapping[str, frozenset[str]] | None = None,
    pinned: Mapping[str, str] | None = None,
    solution: str | None = None,
) -> Selection:
    """Choose a kernel for every op of ``program`` in every bucket.

    Args:
        deployment: sizes that ops share: page_size, page_stride, pages_per_seq, split_positions.
        features: what every kernel must guarantee. With ``batch_invariant`` an op must also have kernels of one
            bitwise class in all buckets.
        op_features: kind of op -> what its kernels must guarantee besides.
        pinned: kind of op -> the only solution allowed for it.
        solution: the only solution allowed for ops that are not pinned by kind; None for any.

    Raises:
        SelectionError: an op has no kernel, or a pinned op is not in the program.
    """
    pinned, op_features = dict(pinned or {}), op_features or {}
    unknown = sorted(set(pinned) - {op.kind for op in program.all_ops})
    if unknown:
        kinds = ", ".join(sorted({op.kind for op in program.all_ops}))
        raise SelectionError(f"op {unknown[0]!r} is pinned to {pinned[unknown[0]]!r}, but the program has only {kinds}")
    answers: list[_Answer] = []

    def plan(groups: Sequence[_Group], bucket: Bucket, where: str) -> Plan:
        calls: dict[str, KernelCall] = {}
        for group in groups:
            request = Request(
                op=group.kind,
                target=target,
                dtype=program.dtype,
                sizes=_sizes_in(bucket, group.sizes),
                traits={"phase": bucket.kind},
                features=features | op_features.get(group.kind, frozenset()),
                solution=pinned.get(group.kind, solution),
            )
            spec, candidates = registry.select(request)
            stages = spec.stages(request)
            answers.append(_Answer(group, where, candidates, _gpu_kernels(stages)))
            calls |= {op.name: KernelCall(op, spec, request.sizes, stages) for op in group.ops}
        return Plan(target, bucket, tuple(calls[op.name] for op in program.all_ops if op.name in calls))

    first = _groups(program, program.prelude, deployment)
    prelude = plan(first, NO_STEP, PRELUDE) if first else None
    groups = _groups(program, program.ops, deployment)
    plans = [plan(groups, bucket, bucket.name) for bucket in buckets]
    if "batch_invariant" in features:
        _check_bitwise_classes(plans)
    decisions = _decisions(program.dtype, answers)
    return Selection(target, tuple(plans), decisions, features, pinned, solution, op_features, prelude)


@dataclass(frozen=True)
class _Group:
    """Ops of one kind and equal sizes: one choice serves them all."""

    kind: str
    sizes: Mapping[str, int]
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class _Answer:
    """The registry's answer for a group in a bucket or in the prelude, and what its first kernel launches there."""

    group: _Group
    where: str
    candidates: tuple[Candidate, ...]
    kernels: GpuKernels


def _gpu_kernels(stages: Sequence[Stage]) -> GpuKernels:
    return tuple(kernel for stage in stages if (kernel := stage.kernel or stage.library) is not None)


def _groups(program: Program, ops: Sequence[Op], deployment: Mapping[str, int]) -> list[_Group]:
    members: dict[tuple[str, tuple[tuple[str, int], ...]], list[Op]] = {}
    for op in ops:
        sizes = tuple(sorted(op_sizes(program, op, deployment).items()))
        members.setdefault((op.kind, sizes), []).append(op)
    return [_Group(kind, dict(sizes), tuple(ops)) for (kind, sizes), ops in members.items()]


def _decisions(dtype: str, answers: Sequence[_Answer]) -> tuple[Decision, ...]:
    """Answers that are equal in several buckets become one decision."""
    merged: dict[object, list[_Answer]] = {}
    for answer in answers:
        key = (id(answer.group), tuple((c.spec.name, c.reasons) for c in answer.candidates))
        merged.setdefault(key, []).append(answer)
    decisions = []
    for equal in merged.values():
        group, launches = equal[0].group, dict[GpuKernels, tuple[str, ...]]()
        for answer in equal:
            if answer.kernels:
                launches[answer.kernels] = (*launches.get(answer.kernels, ()), answer.where)
        names, buckets = tuple(op.name for op in group.ops), tuple(answer.where for answer in equal)
        decisions.append(Decision(group.kind, dtype, group.sizes, equal[0].candidates, names, buckets, launches))
    return tuple(decisions)


def _check_bitwise_classes(plans: Sequence[Plan]) -> None:
    """A row may meet any bucket, so the kernels that an op has in different buckets must give equal bits."""
    for plan in plans[1:]:
        for first, other in zip(plans[0].calls, plan.calls, strict=True):
            if first.spec.bitwise_class != other.spec.bitwise_class:
                raise SelectionError(
                    f"op {first.op.name!r} ({first.op.kind}): need kernels of one bitwise class in every bucket "
                    f"(feature batch_invariant), have {first.spec.name} in bucket {plans[0].bucket.name} and "
                    f"{other.spec.name} in {plan.bucket.name}",
                    hint=f"pin op {first.op.kind!r} to one solution",
                )


def _sizes_in(bucket: Bucket, sizes: Mapping[str, int]) -> dict[str, int]:
    """``sizes`` of an op, those of the bucket, and M, the rows that the op has there."""
    steps = {
        "num_tokens": bucket.num_tokens,
        "num_seqs": bucket.num_seqs,
        "num_logit_rows": bucket.num_logit_rows,
    }
    rows = {"M": steps[STEP_SCALARS[sizes["rows"]]]} if "rows" in sizes else {}
    return {**sizes, **steps, **rows}


def op_sizes(program: Program, op: Op, deployment: Mapping[str, int]) -> dict[str, int]:
    """The fixed sizes of ``op``, by the names that KernelSpecs use: its whole-number attributes and

    H columns of a row (embedding, rms_norm, gather_rows), V vocabulary (adjust_logits, sample), N and K output and
    input features and F gated features (projections), num_positions and head_dim (rope_table), for attention the sizes
    of the deployment, and ``rows``: which of STEP_SCALARS counts the rows of its first result.
    """

    def width(value: str) -> int:
        dim: Dim = program.values[value].shape[-1]
        assert isinstance(dim, int), (op.name, value, dim)
        return dim

    sizes = {key: value for key, value in op.attrs.items() if isinstance(value, int)}
    if (dim := program.values[op.outputs[0]].shape[0]) in STEP_SCALARS:
        sizes["rows"] = STEP_SCALARS.index(str(dim))
    match op.kind:
        case "embedding" | "rms_norm" | "gather_rows":
            sizes["H"] = width(op.outputs[0])
        case "linear" | "linear_add":
            sizes |= {"N": width(op.outputs[0]), "K": width(op.operand("x"))}
        case "rope_table":
            rows = program.values[op.outputs[0]].shape[0]
            assert isinstance(rows, int), op.name
            sizes |= {"num_positions": rows, "head_dim": width(op.outputs[0])}
        case "linear_silu_mul":
            sizes |= {"F": sizes.pop("features"), "K": width(op.operand("x"))}
        case "rope_kv_write" | "paged_attention":
            sizes |= deployment
        case "adjust_logits" | "sample":
            sizes["V"] = width(op.operand("logits"))
    return sizes
