"""The inputs and outputs of one Step: the one definition that builder, kernels, executor and scheduler share.

Sizes: ``T`` = max_prefill_tokens (most tokens in a step, prefill chunks and decodes together),
``S`` = max_num_seqs, ``P`` = pages per sequence (max_model_len / page_size, rounded up),
``R`` = max_logit_rows (most rows that need logits in a step), ``K`` = MAX_TOP_LOGPROBS.
A step fills the first num_tokens, num_seqs, num_logit_rows entries; the rest is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

MAX_TOP_LOGPROBS = 20
ALIGNMENT = 64
"""Bytes to which every tensor of a region is aligned: one cache line, one AVX-512 register."""

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4, "bfloat16": 2, "int32": 4, "int64": 8, "uint64": 8, "uint8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class IoTensor:
    """One tensor of the io (or state) region; ``shape`` holds sizes by letter or as numbers."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    doc: str


INPUTS: tuple[IoTensor, ...] = (
    IoTensor("token_ids", "int32", ("T",), "token id, or -1 - slot to read the last-token table at slot"),
    IoTensor("positions", "int32", ("T",), "position of the token in its sequence, from 0"),
    IoTensor("slot_mapping", "int64", ("T",), "where its K and V go: page * page_size + position % page_size"),
    IoTensor("cu_seqlens", "int32", ("S+1",), "tokens of sequence i in this step: [cu_seqlens[i], cu_seqlens[i+1])"),
    IoTensor("context_lens", "int32", ("S",), "positions of the sequence after this step (last position + 1)"),
    IoTensor("page_table", "int32", ("S", "P"), "page of each run of page_size positions"),
    IoTensor("logit_rows", "int32", ("R",), "token row whose logits are needed, ascending"),
    IoTensor("logit_target", "int32", ("R",), "token whose log-probability is asked (a prompt row), or -1: draw one"),
    IoTensor("temperature", "float32", ("R",), "0 is greedy"),
    IoTensor("top_p", "float32", ("R",), "1 is off"),
    IoTensor("min_p", "float32", ("R",), "0 is off"),
    IoTensor("top_k", "int32", ("R",), "0 is off"),
    IoTensor("seed", "uint64", ("R",), "request seed: a draw is keyed by (seed, draw_position) and nothing else"),
    IoTensor("draw_position", "int32", ("R",), "position that the drawn token will have"),
    IoTensor("num_logprobs", "int32", ("R",), "-1: none; k >= 0: of the token itself and of the k likeliest"),
    IoTensor("state_slot", "int32", ("R",), "last-token table slot that the drawn token is written to, or -1"),
)

OUTPUTS: tuple[IoTensor, ...] = (
    IoTensor("out_token", "int32", ("R",), "the drawn token, or logit_target"),
    IoTensor("out_logprob", "float32", ("R",), "its natural log-probability under the unscaled logits"),
    IoTensor("out_rank", "int32", ("R",), "its rank among all tokens, from 1"),
    IoTensor("out_top_ids", "int32", ("R", "K"), "likeliest tokens, best first, lower id first on ties"),
    IoTensor("out_top_logprobs", "float32", ("R", "K"), "their natural log-probabilities"),
)

STEP_SIZES = IoTensor("step_sizes", "int32", (4,), "the three of STEP_SCALARS, and 0: where GPU kernels read them")

IO: tuple[IoTensor, ...] = (STEP_SIZES, *INPUTS, *OUTPUTS)
"""Region io, in this order: what a step brings, then what it gives."""

STATE: tuple[IoTensor, ...] = (
    IoTensor("last_tokens", "int32", ("S",), "last drawn token per request slot: decode inputs never visit the host"),
)

STEP_SCALARS: tuple[str, ...] = ("num_tokens", "num_seqs", "num_logit_rows")
"""The sizes of a step, in the order of ``enum StepScalar`` in kernels/native/abi.h."""


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor at a fixed offset of its region. ``offset`` in bytes; ``shape`` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def place(tensors: tuple[IoTensor, ...], sizes: Mapping[str, int]) -> tuple[tuple[PlacedTensor, ...], int]:
    """Lay ``tensors`` out one after another. ``sizes`` maps T, S, P, R to numbers.

    Returns the placed tensors and the region's size in bytes.
    """
    known = {**sizes, "S+1": sizes["S"] + 1, "K": MAX_TOP_LOGPROBS}
    placed, offset = [], 0
    for tensor in tensors:
        shape = tuple(d if isinstance(d, int) else known[d] for d in tensor.shape)
        placed.append(PlacedTensor(tensor.name, tensor.dtype, shape, offset))
        offset = align(offset + placed[-1].nbytes)
    return tuple(placed), offset
