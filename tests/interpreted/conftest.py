"""Tests in this folder execute Triton kernels on the CPU: ``python -m pytest tests/interpreted``."""

from __future__ import annotations

import sys
from pathlib import Path

# Helpers of the other tests (tiny models, lowering) are plain modules of the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
