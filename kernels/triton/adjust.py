"""Adjustments: logits with biases, penalties and allowed tokens, for the sequences of a step that ask them.

The semantics are those of tokenspeed/compile/sampler.py. A program takes one slice of the vocabulary of one adjustment:
it counts the step's tokens that fall into its slice, and writes the slice's adjusted logits from the counts, which it
holds in registers. So no program waits for another, and no memory is touched by two. Every operation is exact or rounds
once, in a fixed order: results are those of the reference, bit for bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from tokenspeed.kernels.registry import KernelSpec, Request, Stage, device_stage
from tokenspeed.kernels.triton.common import pdl_wait, vector_spec
from tokenspeed.step import MASK_BITS, MAX_LOGIT_BIAS, PROMPT_FLAG, STEP_COUNTS, mask_words

SLICE = 1024
"""Tokens of the vocabulary that one program takes."""
TOKENS = 512
"""Tokens of the sequence that are counted at once."""
SLOTS = 4
"""Adjustments that programs start on; each goes on with every SLOTS-th. A step without adjustments has as many idle
programs."""

_NUM_ADJUSTMENTS = tl.constexpr(STEP_COUNTS.index("num_adjustments"))
_PROMPT_FLAG = tl.constexpr(PROMPT_FLAG)
_MASK_BITS = tl.constexpr(MASK_BITS)
_MAX_BIASES = tl.constexpr(MAX_LOGIT_BIAS)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32."""


@triton.jit
def adjust_logits(logits, token_ids, last_tokens, positions, cu_seqlens, adjust_seq, adjust_row, count_slot,
                  prompt_lens, repetition_penalty, presence_penalty, frequency_penalty, cu_biases, mask_row, bias_ids,
                  bias_values, token_masks, token_counts, adjusted, step_sizes,
                  V: tl.constexpr, SLICE: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
                  WORDS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program (slice, s): tokens from slice * SLICE on, of the adjustments s, s + SLOTS, ..."""
    begin = tl.program_id(0) * SLICE
    num_adjustments = tl.load(step_sizes + _NUM_ADJUSTMENTS)  # no kernel writes inputs of the step
    pdl_wait(PDL)
    for a in range(tl.program_id(1), num_adjustments, SLOTS):
        tokens = begin + tl.arange(0, SLICE)
        slot, row, mask = tl.load(count_slot + a), tl.load(adjust_row + a), tl.load(mask_row + a)
        counts = tl.zeros((SLICE,), tl.int32)
        if slot >= 0:
            counts = _count(token_ids, last_tokens, positions, cu_seqlens, tl.load(adjust_seq + a),
                            tl.load(prompt_lens + a), token_counts + slot.to(tl.int64) * V, begin, V, SLICE,
                            TOKENS)  # fmt: skip
        if row >= 0:
            z = tl.load(logits + row.to(tl.int64) * V + tokens, mask=tokens < V, other=0.0)
            z = _biased(z, tokens, bias_ids, bias_values, tl.load(cu_biases + a), tl.load(cu_biases + a + 1), begin,
                        SLICE)  # fmt: skip
            if slot >= 0:
                z = _penalized(z, counts, tl.load(repetition_penalty + a), tl.load(presence_penalty + a),
                               tl.load(frequency_penalty + a))  # fmt: skip
            if mask >= 0:
                words = tl.load(token_masks + mask.to(tl.int64) * WORDS + tokens // _MASK_BITS, mask=tokens < V,
                                other=0)  # fmt: skip
                allowed = ((words >> (tokens % _MASK_BITS)) & 1) == 1
                z = tl.where(allowed, tl.where(z > _LOWEST, z, _LOWEST), float("-inf"))
            tl.store(adjusted + tl.cast(a, tl.int64) * V + tokens, z, mask=tokens < V)


@triton.jit
def _count(token_ids, last_tokens, positions, cu_seqlens, seq, prompt_len, counts, begin,
           V: tl.constexpr, SLICE: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """The slice's counts with the step's tokens of sequence ``seq`` in them; stored, too."""
    tokens = begin + tl.arange(0, SLICE)
    first, last = tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1)
    start = tl.load(positions + first)
    # A sequence that starts from position 0 starts from nothing, whatever the slot counted before.
    count = tl.load(counts + tokens, mask=(tokens < V) & (start > 0), other=0)
    if last - first == 1:
        token = tl.load(token_ids + first)
        if token < 0:
            token = tl.load(last_tokens + (-1 - token))
        entered = tl.where(start < prompt_len, count | _PROMPT_FLAG, count + 1)
        count = tl.where(tokens == token, entered, count)
    else:
        for at in range(first, last, TOKENS):
            places = at + tl.arange(0, TOKENS)
            inside = places < last
            ids = tl.load(token_ids + places, mask=inside, other=0)
            drawn = tl.load(last_tokens + (-1 - ids), mask=inside & (ids < 0), other=0)
            ids = tl.where(ids < 0, drawn, ids) - begin
            inside = inside & (ids >= 0) & (ids < SLICE)
            in_prompt = start + places - first < prompt_len
            ids = tl.where(inside, ids, 0)
            count += tl.histogram(ids, SLICE, mask=inside & (in_prompt == 0))
            prompt = tl.histogram(ids, SLICE, mask=inside & in_prompt)
            count = tl.where(prompt > 0, count | _PROMPT_FLAG, count)
    tl.store(counts + tokens, count, mask=tokens < V)
    return count


@triton.jit
def _biased(z, tokens, bias_ids, bias_values, first, last, begin, SLICE: tl.constexpr):
    """``z`` plus the biases [first, last) that fall into the slice: they are neighbours, as ids ascend."""
    if last > first:
        places = first + tl.arange(0, _MAX_BIASES)
        ids = tl.load(bias_ids + places, mask=places < last, other=2**31 - 1)
        start = first + tl.sum((ids < begin).to(tl.int32), axis=0)
        stop = first + tl.sum((ids < begin + SLICE).to(tl.int32), axis=0)
        for i in range(start, stop):
            z = tl.where(tokens == tl.load(bias_ids + i), z + tl.load(bias_values + i), z)
    return z


@triton.jit
def _penalized(z, counts, repetition, presence, frequency):
    drawn = counts & (_PROMPT_FLAG - 1)
    scaled = tl.where(z > 0.0, tl.div_rn(z, repetition), z * repetition)
    z = tl.where(counts != 0, scaled, z) - frequency * drawn.to(tl.float32)
    return tl.where(drawn > 0, z - presence, z)


def specs() -> Iterator[KernelSpec]:
    """One kernel: logits are float32 in every program."""
    yield vector_spec("adjust_logits", "adjust_logits_fp32", _launches)


def _launches(request: Request) -> tuple[Stage, ...]:
    vocab = request.sizes["V"]
    slots = min(request.sizes["num_seqs"], SLOTS)
    return (
        device_stage(
            module=__name__,
            function=adjust_logits,
            arguments="read logits, read token_ids, read last_tokens, read positions, read cu_seqlens, "
            "read adjust_seq, read adjust_row, read count_slot, read prompt_lens, read repetition_penalty, "
            "read presence_penalty, read frequency_penalty, read cu_biases, read mask_row, read bias_ids, "
            "read bias_values, read token_masks, update token_counts, write adjusted, sizes step_sizes",
            types="*fp32, *i32, *i32, *i32, *i32, *i32, *i32, *i32, *i32, *fp32, *fp32, *fp32, *i32, *i32, *i32, "
            "*fp32, *i32, *i32, *fp32, *i32",
            constants={"V": vocab, "SLICE": SLICE, "TOKENS": TOKENS, "SLOTS": SLOTS, "WORDS": mask_words(vocab)},
            num_warps=4,
            num_stages=1,
            grid=(triton.cdiv(vocab, SLICE), slots, 1),
            target=request.target,
        ),
    )
