"""The proofs behind a selection: for every op that sums, the class of kernels that serves it, for equivalence.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenspeed.compile import cpu_proofs
from tokenspeed.compile.select import Decision, Selection
from tokenspeed.equivalence import SUMMING
from tokenspeed.kernels.equivalence import Choice, MemberJson, ProvenClass
from tokenspeed.kernels.registry import Request


def prove_selection(selection: Selection) -> dict[str, Any]:
    """What equivalence.json says of the selection's target, whose kernels are of solution ``aok``.

    On a CPU the kernels are compared here and now. On a GPU the registry has kept to proven classes already; this tells
    which, and what would have been used otherwise.

    Raises SelectionError where a proof fails, or there is none.
    """
    found = list(_gpu(selection) if selection.target.is_gpu else _cpu(selection))
    return {"target": str(selection.target), "classes": _merged(found)}


def _cpu(selection: Selection) -> Iterator[tuple[ProvenClass, str, Choice]]:
    for decision in selection.decisions:
        if decision.op in SUMMING:
            proven, by = cpu_proofs.prove(_request(selection, decision), decision.candidates)
            yield proven, by, Choice(proven, ({"kernel": decision.chosen.symbol},), (), ())


def _request(selection: Selection, decision: Decision) -> Request:
    return Request(decision.op, selection.target, decision.dtype, decision.sizes)


def _gpu(selection: Selection) -> Iterator[tuple[ProvenClass, str, Choice]]:
    seen = set()
    for plan in selection.plans:
        for call in plan.calls:
            group = (plan.bucket, call.op.kind, tuple(sorted(call.sizes.items())))
            if call.spec.proof is None or group in seen:
                continue
            seen.add(group)
            dtype = next(d.dtype for d in selection.decisions if call.op.name in d.op_names)
            traits = {"phase": plan.bucket.kind}
            choice = call.spec.proof.choose(Request(call.op.kind, selection.target, dtype, call.sizes, traits))
            yield choice.proven, "table", choice


def _merged(found: list[tuple[ProvenClass, str, Choice]]) -> list[dict[str, Any]]:
    """One entry a class and shape, in the order of their first use."""
    entries: dict[object, dict[str, Any]] = {}
    for proven, by, choice in found:
        entry = entries.setdefault(
            (proven.identity, proven.shapes),
            {**proven.to_json(), "key": dict(proven.key), "used": [], "instead_of": [], "proven_by": by},
        )
        if by == "build":
            entry["date"] = ""  # tomorrow's build is the same artifact
        for name, members in (("used", choice.members), ("instead_of", choice.instead_of)):
            _add(entry[name], members)
    return list(entries.values())


def _add(known: list[dict[str, Any]], members: tuple[MemberJson, ...]) -> None:
    known += [dict(member) for member in members if dict(member) not in known]
