"""Model families: which builder turns a checkpoint's config into a Program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from tokenspeed.compile.models.llama import build_llama
from tokenspeed.compile.orders import DEFAULT_ORDERS, Orders
from tokenspeed.errors import CheckpointError

if TYPE_CHECKING:
    from tokenspeed.compile.checkpoint import ModelConfig
    from tokenspeed.compile.program import Program


class FamilyBuilder(Protocol):
    """Builds the model-level Program of one family."""

    def __call__(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        max_model_len: int,
        page_size: int,
        penalties: bool = True,
        orders: Orders = DEFAULT_ORDERS,
    ) -> Program: ...


FAMILIES: Mapping[str, FamilyBuilder] = {"llama": build_llama}
"""By ``ModelConfig.architecture``."""

VERIFIED: Mapping[str, tuple[str, ...]] = {"llama": ("float32", "bfloat16")}
"""Dtypes in which a family's replies were shown to be equal bit for bit (tests/test_smollm2.py and the invariance
harness, on CPUs and on an H200): what it declares as its verified envelope. ``rl-bitwise`` builds nothing else."""


def build_program(
    config: ModelConfig,
    *,
    dtype: str,
    max_model_len: int,
    page_size: int,
    penalties: bool = True,
    orders: Orders = DEFAULT_ORDERS,
) -> Program:
    """The model-level Program of ``config``: dtype float32 or bfloat16, lengths in positions; without ``penalties``
    it counts no tokens; ``orders``: of its operations.

    Raises CheckpointError for a family that has no builder.
    """
    build = FAMILIES.get(config.architecture)
    if build is None:
        raise CheckpointError(
            f"no model family for architecture {config.architecture!r}: need one of {', '.join(sorted(FAMILIES))}",
            hint="convert the checkpoint to a supported family, or add a builder under tokenspeed/compile/models",
        )
    return build(config, dtype=dtype, max_model_len=max_model_len, page_size=page_size, penalties=penalties,
                 orders=orders)  # fmt: skip
