"""Which tile shape a projection uses: measured tables first, a rule by shape where nothing was measured.

Tables are kernels/tuning/<arch>.json, made by `tokenspeed tune` from measurements on the device; they travel with the
package. An entry serves its (op, N, K, dtype) up to its M, from the next smaller entry's M on. Any choice gives
correct results, and on sm_90a the same bits: tables change speed only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenspeed.target import Target

TUNING_FOLDER = Path(__file__).resolve().parent.parent / "tuning"
_BARRIER_BYTES = 1024
"""Left for the barriers of a pipeline."""
FORMAT_VERSION = 1
"""Of the tables. 1 (2026-11-29): op, N, K, M, dtype, config, us, runner_up, device, date."""

_UNITS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148, "sm_120a": 188, "gfx942": 304, "gfx950": 256}
"""Multiprocessors (compute units) of the data center part that each architecture is bought for."""


@dataclass(frozen=True, order=True)
class Config:
    """One tile shape of kernels/triton/linear.py (kind "tile") or, on Hopper, of linear_wide.py ("wide").

    Attributes:
        block_m, block_n, block_k: rows of x, rows of W and columns of both that one step of a program multiplies.
        num_warps, num_stages: threads of a program / 32 (64 on AMD), of a wide one those that multiply: 4 or 8; tiles
            in flight.
        swapped: W is the matrix unit's first operand.
        group_m: row tiles that take one feature tile in turn.
        prefetch: bytes of each of its W rows that a program asks L2 for while it waits for its predecessors; 0 if wide.
        kind: which kernel.
        per_unit: programs that share a multiprocessor; wide ones stay there and take tile after tile.
        early: a wide program lets the next kernel start at once, rather than when it has asked for its last operands.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool
    group_m: int = 8
    prefetch: int = 0
    kind: str = "tile"
    per_unit: int = 1
    early: bool = True

    def __str__(self) -> str:
        shape = f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages}"
        shape += f"{' swapped' if self.swapped else ''} g{self.group_m}"
        if self.kind == "tile":
            return f"{shape} p{self.prefetch}"
        return f"wide {shape} u{self.per_unit}{' early' if self.early else ''}"

    @property
    def max_registers(self) -> int:
        """Registers of a thread at most, or 0 for the compiler's choice: what lets ``per_unit`` programs of eight
        warps (of three roles, in warp groups) share a multiprocessor's. With two groups that multiply, the kernel
        hands registers from one role to another itself."""
        return {1: 168, 2: 128, 3: 80}[self.per_unit] if self.kind == "wide" and self.num_warps == 4 else 0

    def programs(self, m: int, n: int) -> int:
        """Programs of a launch over ``m`` rows and ``n`` features."""
        tiles = -(-m // self.block_m) * -(-n // self.block_n)
        return tiles if self.kind == "tile" else min(tiles, _UNITS["sm_90a"] * self.per_unit)

    def shared_bytes(self, target: Target, element: int) -> int:
        """Shared memory for operands at most, of a wide program also for its result on the way to its rows. AMD's
        compiler keeps one stage of the pipeline in registers."""
        if self.kind == "wide":
            turned = self.block_m * self.block_n // (self.num_warps // 4) * 4 if self.swapped else 4096
            return self.num_stages * (self.block_m + self.block_n) * self.block_k * element + turned + 3072
        stages = self.num_stages if target.backend == "cuda" else max(1, self.num_stages - 1)
        return stages * (self.block_m + self.block_n) * self.block_k * element

    def constants(self, target: Target) -> dict[str, int | bool]:
        """The constants of the kernels that follow from the tile shape."""
        if self.kind == "wide":
            return {
                "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP_M": self.group_m,
                "STAGES": self.num_stages, "SWAPPED": self.swapped, "CONSUMERS": self.num_warps // 4,
                "EARLY": self.early,
            }  # fmt: skip
        prefetch = self.prefetch if target.backend == "cuda" else 0
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP_M": self.group_m,
            "SWAPPED": self.swapped, "PREFETCH": prefetch, "LANES": 32 * self.num_warps,
        }  # fmt: skip


def choose(target: Target, op: str, m: int, n: int, k: int, dtype: str) -> Config:
    """The tile shape for ``m`` rows, ``n`` rows of W and ``k`` columns: of the table, or by rule."""
    rungs = _table(target.arch).get((op, n, k, dtype), ())
    for most, config in rungs:
        if m <= most:
            return config
    return rungs[-1][1] if rungs else rule(target, op, m, n, k, dtype)


def measured(target: Target) -> tuple[Config, ...]:
    """Every choice of the target's table."""
    return tuple(config for rungs in _table(target.arch).values() for _, config in rungs)


@cache
def _table(arch: str) -> dict[tuple[str, int, int, str], tuple[tuple[int, Config], ...]]:
    """Measured choices of ``arch`` by (op, N, K, dtype), each ordered by M; empty where nothing was measured."""
    path = TUNING_FOLDER / f"{arch}.json"
    return parse_table(json.loads(path.read_text())) if path.is_file() else {}


def parse_table(table: dict[str, Any]) -> dict[tuple[str, int, int, str], tuple[tuple[int, Config], ...]]:
    """A table's entries by (op, N, K, dtype), each ordered by M; of several devices', the one measured last."""
    assert table["format_version"] == FORMAT_VERSION, table["format_version"]
    rungs: dict[tuple[str, int, int, str], dict[int, Config]] = {}
    for entry in sorted(table["linear"], key=lambda entry: str(entry.get("date", ""))):
        key = (entry["op"], entry["N"], entry["K"], entry["dtype"])
        rungs.setdefault(key, {})[entry["M"]] = Config(**entry["config"])
    return {key: tuple(sorted(found.items())) for key, found in rungs.items()}


def rule(target: Target, op: str, m: int, n: int, k: int, dtype: str) -> Config:
    """A tile shape for a projection that nobody has measured.

    float32 runs on the ordinary multipliers (an exactness check, not a product): one modest tile. bfloat16: up to
    64 rows are one row tile with operands swapped, and more rows take the largest tile of a list; in both cases
    the largest that still gives most multiprocessors a program, since a projection that leaves them idle leaves
    their share of the memory bandwidth unused. On Hopper a projection of WIDE_ROWS or more that fills the device is
    wide.
    """
    if dtype == "float32":
        return Config(16 if m <= 16 and target.backend == "cuda" else 64, 32, 32, 4, 2, swapped=False)
    fills = m >= WIDE_ROWS and k >= WIDE_TILE.block_k and WIDE_TILE.programs(m, n) == _UNITS[target.arch]
    if fills and usable(WIDE_TILE, target, op):
        return WIDE_TILE
    shapes = _few_rows(target, m) if m <= 64 else _many_rows(target)
    options = [next((c for c in depths if usable(c, target, op)), None) for depths in shapes]
    usable_ones = [config for config in options if config is not None]
    enough = _UNITS[target.arch] * 3 // 4
    return next((c for c in usable_ones if c.programs(m, n) >= enough), usable_ones[-1])


WIDE_ROWS = 1024
WIDE_TILE = Config(128, 256, 64, 8, 4, swapped=False, kind="wide")
"""On an H200, faster than every tile at 2048 and 8192 rows of Llama 3.1 8B's shapes, by 7 to 18%."""


def _few_rows(target: Target, m: int) -> Iterator[tuple[Config, ...]]:
    """Tile shapes, largest first, each with its pipelines, deepest first."""
    block_m = max(_smallest_sides(target)[1], _power_of_two(m))
    prefetch = 2048 if target.backend == "cuda" else 0
    for block_n, warps in ((64, 4), (32, 4), (16, 2)):
        yield tuple(
            Config(block_m, block_n, block_k, warps, stages, swapped=True, prefetch=prefetch)
            for block_k, stages in ((128, 5), (128, 4), (128, 3), (128, 2), (64, 2))
        )


def _many_rows(target: Target) -> Iterator[tuple[Config, ...]]:
    """As ``_few_rows``."""
    deep = ((64, 4), (64, 3)) if target.backend == "cuda" else ()
    for block_m, block_n, warps in ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4)):
        yield tuple(
            Config(block_m, block_n, block_k, warps, stages, swapped=False)
            for block_k, stages in (*deep, (64, 2), (32, 2))
        )


def _smallest_sides(target: Target) -> tuple[int, int]:
    """Least sides of a tile (of the matrix unit's first operand, of its second) for one instruction in all tiles.

    Hopper's two instructions agree bit for bit, and sm_120 has one. On sm_100 and sm_103 less than 64 rows of the
    first operand fall back to another unit, and AMD's instruction for sides under 32 adds K in larger groups:
    whether their sums agree is not known, so tiles keep clear of them.
    """
    if target.backend == "hip":
        return 32, 32
    return (64, 16) if target.arch in ("sm_100a", "sm_103a") else (16, 8)


def usable(config: Config, target: Target, op: str) -> bool:
    """Whether ``config`` fits the target's shared memory and keeps its sums in one order."""
    if config.kind not in ("tile", "wide") or (config.kind == "wide" and not _usable_wide(config, target)):
        return False
    sides = (config.block_n, config.block_m) if config.swapped else (config.block_m, config.block_n)
    wide = all(side >= least for side, least in zip(sides, _smallest_sides(target), strict=True))
    whole_groups = op != "linear_silu_mul" or config.block_n >= 32
    shared = (config.shared_bytes(target, 2) + _BARRIER_BYTES) * config.per_unit
    return wide and whole_groups and shared <= target.gpu.max_shared_bytes


def _usable_wide(config: Config, target: Target) -> bool:
    """Whether warp groups can share the tile, each in whole instructions of 64 rows, and its sums their registers."""
    if target.arch != "sm_90a" or (config.num_warps, config.per_unit) not in ((4, 1), (4, 2), (4, 3), (8, 1)):
        return False
    mine, other = (config.block_n, config.block_m) if config.swapped else (config.block_m, config.block_n)
    share = mine // (config.num_warps // 4)
    powers = all(side & (side - 1) == 0 for side in (config.block_m, config.block_n, config.block_k))
    return (
        powers and share % 64 == 0 and share * other * config.per_unit <= 128 * 128 and 64 <= config.block_k <= 256
        and config.block_m <= 256 and config.block_n <= 256 and config.num_stages >= 2 and config.prefetch == 0
    )  # fmt: skip


def _power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()


def to_json(config: Config) -> dict[str, int | bool | str]:
    """As tables hold it: ``Config(**to_json(config)) == config``. Of a tile, without what wide kernels alone have."""
    values: dict[str, int | bool | str] = asdict(config)
    if config.kind == "tile":
        for name in ("kind", "per_unit", "early"):
            del values[name]
    return values
