"""The inputs and outputs of one Step: the one definition that builder, kernels, executor and scheduler share.

Sizes: ``T`` = max_prefill_tokens (most tokens in a step, prefill chunks and decodes together),
``S`` = max_num_seqs, ``P`` = pages per sequence (max_model_len / page_size, rounded up),
``R`` = max_logit_rows (most rows that need logits in a step), ``K`` = MAX_TOP_LOGPROBS, ``V`` = vocabulary.
An *adjustment* is what one sequence asks of its logits before it draws: penalties, biases, allowed tokens. ``A`` = S
(most adjustments), ``B`` = S * MAX_LOGIT_BIAS (most biases of all), ``M`` = S (most token masks), ``W`` = words of a
mask, ``C`` = rows of token_counts: S, or 1 where the envelope promises no penalties.
A step fills the first num_tokens, num_seqs, num_logit_rows, num_adjustments, num_biases, num_masks entries; the rest
is never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
"""Most biases of one request."""
MASK_BITS = 32
"""Tokens of a word of a token mask."""
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
    IoTensor("adjustment", "int32", ("R",), "the adjustment under which the row draws, or -1"),
    IoTensor("adjust_seq", "int32", ("A",), "the adjustment's sequence"),
    IoTensor("adjust_row", "int32", ("A",), "its logit row that draws, or -1: the sequence draws nothing in this step"),
    IoTensor("count_slot", "int32", ("A",), "row of token_counts that counts the sequence's tokens, or -1: none does"),
    IoTensor("prompt_lens", "int32", ("A",), "positions of the prompt; those behind it hold drawn tokens"),
    IoTensor("repetition_penalty", "float32", ("A",), "1 is off"),
    IoTensor("presence_penalty", "float32", ("A",), "0 is off"),
    IoTensor("frequency_penalty", "float32", ("A",), "0 is off"),
    IoTensor("cu_biases", "int32", ("A+1",), "biases of adjustment i: [cu_biases[i], cu_biases[i+1])"),
    IoTensor("mask_row", "int32", ("A",), "its row of token_masks, or -1: every token is allowed"),
    IoTensor("page_table", "int32", ("S", "P"), "page of each run of page_size positions"),
    IoTensor("bias_ids", "int32", ("B",), "token ids, ascending within an adjustment"),
    IoTensor("bias_values", "float32", ("B",), "what is added to the logits of bias_ids"),
    IoTensor("token_masks", "int32", ("M", "W"), "bit t % 32 of word t / 32 says whether token t is allowed"),
)

OUTPUTS: tuple[IoTensor, ...] = (
    IoTensor("out_token", "int32", ("R",), "the drawn token, or logit_target"),
    IoTensor("out_logprob", "float32", ("R",), "its natural log-probability under the unscaled logits"),
    IoTensor("out_rank", "int32", ("R",), "its rank among all tokens, from 1"),
    IoTensor("out_top_ids", "int32", ("R", "K"), "likeliest tokens, best first, lower id first on ties"),
    IoTensor("out_top_logprobs", "float32", ("R", "K"), "their natural log-probabilities"),
)

STEP_SIZES = IoTensor("step_sizes", "int32", (8,), "the six of STEP_COUNTS, and zeros: where kernels read them")

IO: tuple[IoTensor, ...] = (STEP_SIZES, *INPUTS, *OUTPUTS)
"""Region io, in this order: what a step brings, then what it gives."""

STATE: tuple[IoTensor, ...] = (
    IoTensor("last_tokens", "int32", ("S",), "last drawn token per request slot: decode inputs never visit the host"),
    IoTensor(
        "token_counts", "int32", ("C", "V"), "times that a token was drawn, plus PROMPT_FLAG if the prompt has it"
    ),
)

PROMPT_FLAG = 1 << 30
"""In token_counts; no count comes near it."""

STEP_SCALARS: tuple[str, ...] = ("num_tokens", "num_seqs", "num_logit_rows")
"""The sizes of a step, in the order of ``enum StepScalar`` in kernels/native/abi.h."""
STEP_COUNTS: tuple[str, ...] = (*STEP_SCALARS, "num_adjustments", "num_biases", "num_masks")
"""What step_sizes begins with."""
COUNTED_BY: Mapping[str, tuple[int, int]] = {
    "T": (0, 0), "S": (1, 0), "S+1": (1, 1), "R": (2, 0), "A": (3, 0), "A+1": (3, 1), "B": (4, 0), "M": (5, 0)
}  # fmt: skip
"""By the size of a tensor's first dimension: index into STEP_COUNTS of what a step uses of it, and how many more."""


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


def mask_words(vocab_size: int) -> int:
    """Words of a token mask."""
    return -(-vocab_size // MASK_BITS)


def place(tensors: tuple[IoTensor, ...], sizes: Mapping[str, int]) -> tuple[tuple[PlacedTensor, ...], int]:
    """Lay ``tensors`` out one after another. ``sizes`` maps T, S, P, R, V and C to numbers.

    Returns the placed tensors and the region's size in bytes.
    """
    seqs = sizes["S"]
    known = {
        **sizes, "S+1": seqs + 1, "K": MAX_TOP_LOGPROBS, "A": seqs, "A+1": seqs + 1, "B": seqs * MAX_LOGIT_BIAS,
        "M": seqs, "W": mask_words(sizes["V"]),
    }  # fmt: skip
    placed, offset = [], 0
    for tensor in tensors:
        shape = tuple(d if isinstance(d, int) else known[d] for d in tensor.shape)
        placed.append(PlacedTensor(tensor.name, tensor.dtype, shape, offset))
        offset = align(offset + placed[-1].nbytes)
    return tuple(placed), offset
