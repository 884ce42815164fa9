"""Trainer alignment: a PyTorch model that computes with an artifact's kernels, so that its log-probabilities equal the
engine's bit for bit (docs/trainer.md). Needs the extra ``trainer``."""

from __future__ import annotations

from tokenspeed.trainer.aligned import Aligned, CausalOutput, align
from tokenspeed.trainer.new_model import new_model

__all__ = ["Aligned", "CausalOutput", "align", "new_model"]
