"""What a build promises: the envelope of a checkpoint, the solutions that it pins, and the orders of its Program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenspeed.compile.checkpoint import Checkpoint
from tokenspeed.compile.models import VERIFIED
from tokenspeed.compile.orders import Orders
from tokenspeed.envelope import Envelope, read_recipe, resolve
from tokenspeed.errors import EnvelopeError, UsageError


def parse_solutions(pairs: Sequence[str]) -> dict[str, str]:
    """``["linear=native"]`` -> ``{"linear": "native"}``. Raises UsageError for anything else."""
    solutions: dict[str, str] = {}
    for pair in pairs:
        op, equals, solution = pair.partition("=")
        if not (op and equals and solution):
            raise UsageError(f"--solution is {pair!r}; it must look like OP=SOLUTION, e.g. linear=native")
        if solutions.setdefault(op, solution) != solution:
            raise UsageError(f"--solution pins op {op!r} twice, to {solutions[op]} and to {solution}")
    return solutions


def pinned_solutions(envelope: Envelope, solutions: Mapping[str, str]) -> dict[str, str]:
    """Kind of op -> the only solution allowed for it: what the caller pins, and what switches of the envelope do.

    Raises EnvelopeError where they contradict one another, or numerics = rl-bitwise.
    """
    pinned = dict(solutions)
    backend = envelope.switch("sampling_backend")
    if backend != "auto" and pinned.setdefault("sample", backend) != backend:
        raise EnvelopeError(
            f"sampling_backend is {backend}, but op 'sample' is pinned to {pinned['sample']}", hint="set one of the two"
        )
    needed = envelope.pinned_solution
    for op, solution in sorted(pinned.items()):
        if needed is not None and solution != needed:
            raise EnvelopeError(
                f"numerics = rl-bitwise needs solution {needed} for every op; op {op!r} is pinned to {solution}, and"
                " the mode only tightens what nobody chose",
                hint=f"leave --solution {op}={solution} out, or build with --numerics auto",
            )
    return pinned


def envelope_of(source: Checkpoint, flags: Mapping[str, Any], recipe: str | Path | None) -> Envelope:
    """The envelope of a checkpoint under ``flags`` and the file ``recipe``.

    Raises EnvelopeError, also for a model family that has not declared what the envelope asks of it.
    """
    envelope = _resolve(source, flags, recipe)
    architecture = source.config.architecture
    verified = VERIFIED.get(architecture, ())
    if envelope.numerics == "rl-bitwise" and envelope.dtype not in verified:
        raise EnvelopeError(
            f"numerics = rl-bitwise needs a model that declares a verified envelope in {envelope.dtype}; architecture"
            f" {architecture!r} declares {', '.join(verified) or 'none'}",
            hint="build with --numerics auto, or have `tokenspeed invariance` verify the family and declare it in"
            " tokenspeed/compile/models",
        )
    return envelope


def _resolve(source: Checkpoint, flags: Mapping[str, Any], recipe: str | Path | None) -> Envelope:
    return resolve(
        model=source.config.name,
        max_position_embeddings=source.config.max_position_embeddings,
        vocab_size=source.config.vocab_size,
        flags=flags,
        recipe=None if recipe is None else read_recipe(Path(recipe)),
    )


def orders_of(envelope: Envelope) -> Orders:
    """The orders of operations that the envelope asks of a Program."""
    return Orders(
        logprob_shards=envelope.switch("logprob_shards"),
        layer_boundary_norm=envelope.switch("layer_boundary_norm"),
        rope_table_device=envelope.switch("rope_table_device"),
    )
