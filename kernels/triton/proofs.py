"""What the ops of a GPU that sum may choose from, and how ``aok`` keeps to a class that was proven bitwise equal.

For each op: which members there are, by all that fixes the order of its sums; the launches of a member; and which of
the class serves a request (kernels/equivalence.py, docs/equivalence.md). What a member leaves out (the order of
programs, prefetches, when the next kernel may start) moves data and adds nothing up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, TypeAlias

import triton

from tokenspeed.kernels.equivalence import Choice, ClassProof, MemberJson, ProvenClass, find_class
from tokenspeed.kernels.registry import Request, Stage
from tokenspeed.kernels.triton import attention, linear, norm, sample
from tokenspeed.kernels.triton.linear_candidates import candidates
from tokenspeed.kernels.triton.linear_config import Config, choose, measured, rule, usable
from tokenspeed.kernels.triton.source import source_digest
from tokenspeed.target import Target

COMPILER = f"triton {triton.__version__}"


Option: TypeAlias = tuple[MemberJson, Callable[[], tuple[Stage, ...]]]
"""A member, and what makes its launches."""


class MemberChoice(ABC):
    """The members of one kind of op. Implements ``ClassProof``."""

    @abstractmethod
    def key(self, request: Request) -> dict[str, int]: ...

    @abstractmethod
    def members(self, request: Request) -> tuple[MemberJson, ...]:
        """All members worth comparing for requests of this target, op, dtype and key."""

    @abstractmethod
    def stages(self, request: Request, member: MemberJson) -> tuple[Stage, ...]:
        """The launches of ``member``."""

    @abstractmethod
    def wanted(self, request: Request) -> tuple[Sequence[Option], ...]:
        """What serves the request: for each part of the work, members with their launches, the present choice first,
        then what may stand in for it, best first."""

    def dtype(self, request: Request) -> str:
        """The dtype by which the class is found."""
        return request.dtype

    def choose(self, request: Request) -> Choice:
        proven = valid_class(request.target, request.op, self.dtype(request), self.key(request))
        members: list[MemberJson] = []
        replaced: list[MemberJson] = []
        stages: list[Stage] = []
        for options in self.wanted(request):
            found = next(((member, launches) for member, launches in options if proven.has(member)), None)
            if found is None:
                raise LookupError(
                    f"need one of the members proven equal on {request.target} ({proven.device}, {proven.date}), have"
                    f" {member_text(options[0][0])}, which is none, and nothing that may stand in for it"
                )
            members.append(found[0])
            stages += found[1]()
            if found[0] != options[0][0]:
                replaced.append(options[0][0])
        return Choice(proven, tuple(members), tuple(replaced), tuple(stages))


def valid_class(target: Target, op: str, dtype: str, key: Mapping[str, int]) -> ProvenClass:
    """The class of an op, if it was proven of this source and compiler. Raises LookupError."""
    proven = find_class(target, op, dtype, key)
    if problem := staleness(proven):
        raise LookupError(f"{problem}: prove them again (docs/equivalence.md)")
    return proven


def staleness(proven: ProvenClass) -> str | None:
    """Why a proof counts for nothing in this build; None if it does count."""
    if proven.compiler != COMPILER:
        return f"the kernels were proven as compiled by {proven.compiler}, this is {COMPILER}"
    if _digest(proven.functions) != proven.source:
        return f"the kernels have changed since they were proven on {proven.device}, {proven.date}"
    return None


@cache
def _digest(functions: tuple[str, ...]) -> str:
    """As ``source_digest``; empty where a function is no more."""
    try:
        return source_digest(functions)
    except (ImportError, AttributeError):
        return ""


def member_text(member: MemberJson) -> str:
    return ", ".join(f"{name} {value}" for name, value in member.items())


# --- projections ----------------------------------------------------------------------------------

_FREE: Mapping[str, Any] = {"group_m": 8, "prefetch": 0, "early": True}
"""Fields of a Config on which no sum depends, and the values that they have in a proof."""
_ROWS = (1, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 8192)
_FEATURES = (576, 4096, 28672, 128256)


class LinearMembers(MemberChoice):
    """linear, linear_add and linear_silu_mul: tile shapes."""

    def key(self, request: Request) -> dict[str, int]:
        return {"rounded": 1} if request.sizes.get("rounded") else {}

    def members(self, request: Request) -> tuple[MemberJson, ...]:
        target, op, dtype = request.target, request.op, request.dtype
        found: list[Config] = []
        for m in _ROWS:
            found += [rule(target, op, m, n, k, dtype) for n in _FEATURES for k in (576, 4096)]
            if dtype == "bfloat16":
                found += candidates(target, op, m, 4096, 4096)
        if dtype == "bfloat16":
            found += measured(target)
        free = (linear_member(config) for config in found if dtype == "float32" or usable(config, target, op))
        return tuple({tuple(member.items()): member for member in free}.values())

    def stages(self, request: Request, member: MemberJson) -> tuple[Stage, ...]:
        return linear.stages(request, Config(**{**_FREE, **member}))

    def wanted(self, request: Request) -> tuple[Sequence[Option], ...]:
        op, dtype, target = request.op, request.dtype, request.target
        m, n, k = request.sizes["M"], linear.weight_rows(request), request.sizes["K"]
        options = [choose(target, op, m, n, k, dtype), rule(target, op, m, n, k, dtype)]
        if dtype == "bfloat16":
            options += candidates(target, op, m, n, k)
        return ([(linear_member(config), partial(linear.stages, request, config)) for config in options],)


def linear_member(config: Config) -> dict[str, int | bool | str]:
    return {name: value for name, value in asdict(config).items() if name not in _FREE}


# --- attention ------------------------------------------------------------------------------------


class AttentionMembers(MemberChoice):
    """paged_attention: query tiles, and for sequences of one token with splits side by side or not."""

    def key(self, request: Request) -> dict[str, int]:
        sizes = request.sizes
        return {"head_dim": sizes["head_dim"], "kv_tile": attention.kv_tile(request.dtype, sizes)}

    def members(self, request: Request) -> tuple[MemberJson, ...]:
        return tuple(_attention_member(kernel, tile) for kernel, tile in self._tiles(request))

    def _tiles(self, request: Request) -> Iterator[tuple[str, attention.Tile]]:
        """Kernels with the tiles that some request gets: of few and of many sequences, of few and of many q heads."""
        few, many = ({**request.sizes, "num_seqs": n} for n in (1, attention.PROGRAMS))
        chunk = attention.chunk_tile(request.target, request.dtype, request.sizes)
        yield from (("chunk", replace(chunk, rows=rows)) for rows in dict.fromkeys((chunk.rows, max(32, chunk.rows))))
        tiles = dict.fromkeys(attention.token_tile(request.target, request.dtype, sizes) for sizes in (few, many))
        for tile in (replace(tile, rows=rows) for rows in (16, 32) for tile in tiles):
            yield "token", tile
            yield "split", tile

    def stages(self, request: Request, member: MemberJson) -> tuple[Stage, ...]:
        tile = attention.Tile(*(int(member[name]) for name in ("rows", "warps", "stages")))
        if member["kernel"] == "chunk":
            return self._chunk(request, tile)
        return attention.token_stages(request, tile, 2 if member["kernel"] == "split" else 0)

    def wanted(self, request: Request) -> tuple[Sequence[Option], ...]:
        """In mixed buckets chunks and sequences of one token are parts of their own."""
        sizes, target, dtype = request.sizes, request.target, request.dtype
        tile, takers = attention.token_tile(target, dtype, sizes), attention.takers(sizes)
        kinds = [("split", takers), ("token", 0)] if takers else [("token", 0)]
        token = [
            (_attention_member(kind, tile), partial(attention.token_stages, request, tile, count))
            for kind, count in kinds
        ]
        if request.traits.get("phase") == "decode":
            return (token,)
        tile = attention.chunk_tile(target, dtype, sizes)
        chunk = [(_attention_member("chunk", tile), partial(self._chunk, request, tile))]
        return chunk, token

    def _chunk(self, request: Request, tile: attention.Tile) -> tuple[Stage, ...]:
        return (attention.chunk_stage(request, tile),)


def _attention_member(kernel: str, tile: attention.Tile) -> dict[str, int | bool | str]:
    return {"kernel": kernel, "rows": tile.rows, "warps": tile.warps, "stages": tile.stages}


# --- norms and sampling: one choice ---------------------------------------------------------------


class OneMember(MemberChoice):
    """An op whose kernel is the same for every number of rows: a proof is that rows do not see one another."""

    @abstractmethod
    def member(self, request: Request) -> MemberJson: ...

    @abstractmethod
    def launches(self, request: Request) -> tuple[Stage, ...]: ...

    def members(self, request: Request) -> tuple[MemberJson, ...]:
        return (self.member(request),)

    def stages(self, request: Request, member: MemberJson) -> tuple[Stage, ...]:
        assert member == self.member(request), member
        return self.launches(request)

    def wanted(self, request: Request) -> tuple[Sequence[Option], ...]:
        return ([(self.member(request), partial(self.launches, request))],)


class NormMembers(OneMember):
    def key(self, request: Request) -> dict[str, int]:
        return {"block": triton.next_power_of_2(request.sizes["H"])}

    def member(self, request: Request) -> MemberJson:
        (stage,) = norm.launches(request)
        assert stage.kernel is not None
        return {"kernel": stage.kernel.function, "warps": stage.kernel.num_warps}

    def launches(self, request: Request) -> tuple[Stage, ...]:
        return norm.launches(request)


class SampleMembers(OneMember):
    def dtype(self, request: Request) -> str:
        """Logits are float32 in every program."""
        return "float32"

    def key(self, request: Request) -> dict[str, int]:
        sizes = request.sizes
        key = {"lanes": sample.num_lanes(sizes["V"])}
        return key if sizes["logprob_shards"] == 1 else {**key, "shard_lanes": sample.block_lanes(sizes)}

    def member(self, request: Request) -> MemberJson:
        kernels = [stage.kernel for stage in self.launches(request) if stage.kernel is not None]
        warps = {kernel.function: kernel.num_warps for kernel in kernels}
        return {"chunk": sample.CHUNK, **warps}

    def launches(self, request: Request) -> tuple[Stage, ...]:
        return sample.launches(request)


MEMBERS: Mapping[str, MemberChoice] = {
    "linear": LinearMembers(),
    "linear_add": LinearMembers(),
    "linear_silu_mul": LinearMembers(),
    "paged_attention": AttentionMembers(),
    "rms_norm": NormMembers(),
    "sample": SampleMembers(),
}
"""By kind of op: those that sum. The others copy, or compute element by element."""
PROOFS: Mapping[str, ClassProof] = MEMBERS
