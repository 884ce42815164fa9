"""The tree of numerics switches: what each promises about bits, what it changes, and what rl-bitwise makes of it.

Every switch is a field of the envelope and may be set alone. ``numerics = rl-bitwise`` turns the whole tree on and only
tightens: a value that it must have replaces a default, and contradicts anything else that was chosen on purpose, which
is refused (``tighten``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenspeed.errors import EnvelopeError

RL_BITWISE = "rl-bitwise"
NUMERICS = ("auto", RL_BITWISE)
RL_SOLUTION = "aok"
"""The solution that rl-bitwise pins at every selection point: kernels whose order of sums is fixed."""
KERNEL_FEATURES = ("batch_invariant", "fixed_reduction_order", "run_invariant")
"""What a kernel may guarantee of its bits, whatever its op."""
DEFAULT_SHARDS = 8
"""Ranks over which Megatron's vocabulary is taken to be split when nobody says: one node."""

_ACTIVATIONS, _LOGPROBS, _TOKENS = "activations", "logprobs only", "tokens at T>0"


@dataclass(frozen=True)
class Switch:
    """One switch.

    Attributes:
        name: field of the envelope; on the command line with dashes.
        path: its place in the tree, parts joined by dots.
        choices: its values; ``(False, True)`` reads off and on.
        default: in mode auto.
        needed: the values that rl-bitwise can live with, the first of them set where nobody chose; empty: any.
        changes: whose bits another value changes.
        doc: what it promises.
        features: what it requires of every kernel while on.
        op_features: what it requires of the kernels of some ops while on.
    """

    name: str
    path: str
    choices: tuple[Any, ...]
    default: Any
    needed: tuple[Any, ...]
    changes: str
    doc: str
    features: tuple[str, ...] = ()
    op_features: tuple[tuple[str, tuple[str, ...]], ...] = ()


_BOOL = (False, True)
SWITCHES: tuple[Switch, ...] = (
    Switch("kernels_deterministic", "kernels.deterministic", _BOOL, False, (True,), _ACTIVATIONS,
           "sums in one order fixed at build; no tf32, no tactics chosen by timing, no early start that reorders sums",
           features=("fixed_reduction_order", "run_invariant")),
    Switch("moe_backend", "kernels.deterministic.moe_backend", ("auto", "aok", "triton"), "auto", ("aok",),
           _ACTIVATIONS, "solution of the expert layers, where the model has them"),
    Switch("collectives_deterministic", "collectives.deterministic", _BOOL, False, (True,), _ACTIVATIONS,
           "reductions over devices fold in rank order in float32; everything else only moves data",
           op_features=(("all_reduce", ("rank_order_fold",)),)),
    Switch("allreduce_fusion", "collectives.deterministic.allreduce_fusion", _BOOL, False, (False,), _ACTIVATIONS,
           "reductions over devices are fused into the op that follows"),
    Switch("sampling_deterministic", "sampling.deterministic", _BOOL, False, (True,), _TOKENS,
           "a draw depends on its request's seed and its position alone; of equal logits the lowest id is greatest",
           op_features=(("sample", ("canonical_ties", "request_keyed_draws")),)),
    Switch("sampling_stream", "sampling.deterministic.sampling_stream", ("per-request",), "per-request",
           ("per-request",), _TOKENS, "whose random numbers a draw takes"),
    Switch("sampling_backend", "sampling.deterministic.sampling_backend",
           ("auto", "aok", "native", "triton", "flashinfer"), "auto", ("aok",), _TOKENS, "solution of op sample"),
    Switch("batch_invariance", "invariance.batch", _BOOL, False, (True,), _ACTIVATIONS,
           "a row's bits depend on that row alone: no split by occupancy, sums over positions in their order",
           features=("batch_invariant",)),
    Switch("trainer_alignment", "alignment.trainer", _BOOL, False, (True,), _LOGPROBS,
           "the orders below are promised: an artifact says them, and tokenspeed.trainer computes in them"),
    Switch("logprob_order", "alignment.trainer.logprob_order", ("torch", "megatron"), "torch", (), _LOGPROBS,
           "torch: one fold of the whole vocabulary; megatron: a fold of each shard, and of the shards in rank order"),
    Switch("logprob_shards", "alignment.trainer.logprob_order.logprob_shards", (), None, (), _LOGPROBS,
           "equal parts of the vocabulary that are folded apart: the trainer's tensor-parallel size"),
    Switch("layer_boundary_norm", "alignment.trainer.layer_boundary_norm", ("fused", "unfused"), "fused", (),
           _ACTIVATIONS, "fused: the residual stream is never rounded; unfused: rounded to the dtype at every sum"),
    Switch("rope_table_device", "alignment.trainer.rope_table_device", ("cpu", "target"), "cpu", (), _ACTIVATIONS,
           "cpu: cosines and sines from float64 at build; target: float32 on the device that runs them"),
    Switch("router_topk", "alignment.trainer.router_topk", ("native", "torch"), "native", ("torch", "native"),
           _ACTIVATIONS, "how experts of equal score are ordered, where the model has a router"),
    Switch("moe_combine_order", "alignment.trainer.moe_combine_order", ("rank", "slot"), "slot", (), _ACTIVATIONS,
           "the order in which experts' outputs are added, where the model has them"),
)  # fmt: skip
BY_NAME: Mapping[str, Switch] = MappingProxyType({switch.name: switch for switch in SWITCHES})
_OF_EXPERTS = ("moe_backend", "router_topk", "moe_combine_order")


def shown(value: Any) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return (",".join(map(str, value)) or "-") if isinstance(value, (tuple, list)) else str(value)


def tighten(switch: Switch, chosen: Any, source: str) -> None:
    """Refuse a value that was chosen on purpose and that rl-bitwise cannot live with."""
    if switch.needed and chosen not in switch.needed:
        needed = " or ".join(map(shown, switch.needed))
        raise EnvelopeError(
            f"numerics = rl-bitwise needs {switch.path} to be {needed}; {switch.name} (set by {source}) is"
            f" {shown(chosen)}, and the mode only tightens what nobody chose",
            hint=f"leave {_flag(switch.name)} out, set it to {needed}, or build with --numerics auto",
        )


def settled(name: str, value: Any) -> Any:
    """The values of switches that follow from others: shards of a fold of the whole row are one."""
    return 1 if name == "logprob_shards" and value == "torch" else DEFAULT_SHARDS


def check_against_model(
    values: Mapping[str, Any], chosen: Mapping[str, str], *, vocab_size: int, experts: bool
) -> None:
    """Refuse what the model cannot keep. ``values`` are those of all switches, ``chosen`` who set those that were set
    on purpose.

    Raises EnvelopeError.
    """
    order, shards = values["logprob_order"], values["logprob_shards"]
    if order == "torch" and shards != 1:
        raise EnvelopeError(
            f"logprob_shards is {shards}, but logprob_order = torch folds the whole vocabulary at once",
            hint="leave --logprob-shards out, or set --logprob-order megatron",
        )
    if vocab_size % shards:
        raise EnvelopeError(
            f"logprob_order = megatron cannot fold this vocabulary: need equal shards, have {vocab_size} tokens over"
            f" logprob_shards = {shards}, which leaves {vocab_size % shards}",
            hint="set --logprob-shards to the trainer's tensor-parallel size, or --logprob-order torch",
        )
    if values["allreduce_fusion"]:
        raise EnvelopeError(
            f"allreduce_fusion (set by {chosen['allreduce_fusion']}) is on, but there is nothing to reduce: an artifact"
            " is for one device",
            hint="leave --allreduce-fusion out",
        )
    if not experts and "moe_backend" in chosen:
        raise EnvelopeError(
            f"moe_backend (set by {chosen['moe_backend']}) is {values['moe_backend']}, but the checkpoint has no"
            " experts",
            hint="leave --moe-backend out",
        )


def describe(values: Mapping[str, Any], sources: Mapping[str, str], mode: str, *, experts: bool = False) -> str:
    """The tree, one switch a line: value, who set it, what another value changes, what it promises."""
    rows = [("numerics", mode, sources["numerics"], "", "auto: the fastest kernels; rl-bitwise: all of this")]
    for i, switch in enumerate(SWITCHES):
        doc = switch.doc if experts or switch.name not in _OF_EXPERTS else f"{switch.doc} (it has none)"
        rows.append((_branch(i), shown(values[switch.name]), sources[switch.name], switch.changes, doc))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4])) for row in rows
    )


def summary(values: Mapping[str, Any], sources: Mapping[str, str], mode: str) -> str:
    """The mode, and the switches that somebody has set, in one line."""
    words = [f"{s.name}={shown(values[s.name])}" for s in SWITCHES if sources[s.name] not in ("default", "tightened")]
    return f"numerics {mode} ({sources['numerics']}){': ' if words else ''}{', '.join(words)}"


def annotated(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """An envelope as JSON, its switches with their place in the tree and what another value changes."""
    more = {s.name: {"path": s.path, "changes": s.changes} for s in SWITCHES}
    return {name: {**field, **more.get(name, {})} for name, field in fields.items()}


def _branch(index: int) -> str:
    """Lines of the tree before a switch, and the last part of its path."""
    path = SWITCHES[index].path.split(".")
    depth = _depth(index)
    name = ".".join(path) if depth == 0 else path[-1]
    lines = ""
    for level in range(depth):
        lines += "   " if _is_last(index, level) else "│  "
    return f"{lines}{'└─' if _is_last(index, depth) else '├─'} {name}"


def _depth(index: int) -> int:
    """How many switches are above it."""
    path = SWITCHES[index].path
    return sum(path.startswith(f"{other.path}.") for other in SWITCHES)


def _is_last(index: int, level: int) -> bool:
    """Whether no later switch hangs where the one at ``level`` above ``index`` (or itself) hangs."""
    own = SWITCHES[index].path
    ancestors = [s.path for s in SWITCHES if own.startswith(f"{s.path}.") or s.path == own]
    parent = "" if level == 0 else f"{ancestors[level - 1]}."
    later = SWITCHES[index + 1 :]
    return not any(_depth(index + 1 + i) == level and s.path.startswith(parent) for i, s in enumerate(later))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
