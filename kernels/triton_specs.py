"""The KernelSpecs of solution ``triton``: what each file of kernels/triton says of itself, in one registry.

Importing this imports Triton, which only a build for a GPU target needs.
"""

from __future__ import annotations

from functools import cache

from tokenspeed.kernels.registry import Registry, fixed_order
from tokenspeed.kernels.triton import adjust, attention, embedding, gather, linear, norm, rope, rope_table, sample
from tokenspeed.kernels.triton.proofs import PROOFS

FAMILIES = (embedding, norm, linear, rope, attention, gather, adjust, sample, rope_table)
"""In the order in which a step runs them; last what runs before the first step."""


@cache
def triton_registry() -> Registry:
    """All Triton kernels, and the same as solution ``aok``. The registry is immutable, so every caller gets the same
    one."""
    return Registry(fixed_order((spec for family in FAMILIES for spec in family.specs()), PROOFS))
