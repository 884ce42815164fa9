"""Trainer alignment: a PyTorch model that computes with an artifact's kernels, so that its log-probabilities equal the
engine's bit for bit (docs/trainer.md)."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401

    from tokenspeed.trainer.aligned import Aligned, CausalOutput, align
    from tokenspeed.trainer.new_model import new_model
except ModuleNotFoundError as e:
    if e.name and e.name.startswith("tokenspeed"):
        raise
    raise ModuleNotFoundError(
        f"tokenspeed.trainer needs {'PyTorch' if e.name == 'torch' else e.name}: install it with"
        " `pip install 'tokenspeed[trainer]'`",
        name=e.name,
    ) from None

__all__ = ["Aligned", "CausalOutput", "align", "new_model"]
