"""Sampling: the token of each row of logits, its log-probability and rank, and the likeliest tokens.

The semantics are those of tokenspeed/compile/sampler.py. Launches share a workspace of one record per row:

- scan: programs (chunk, row). The chunk's first token in the order and the sum of its exponentials; if the row draws,
  the chunk's winner of the Gumbel-max race over all tokens. A row with an adjustment draws from its adjusted logits,
  whose first token in the chunk is noted too.
- rank: programs (chunk, row). How many of the chunk's tokens come before the row's token, and, for top_p, their mass
  and that of the chunk. Nothing to do if the row's token is the first of all, as it is for a greedy row.
- fold: only where log-probabilities are folded in several parts of the vocabulary (logprob_shards): programs (block of
  CHUNK tokens of a part, row). The block's sum of exponentials of logits minus the row's greatest.
- finish: program (row). Adds the chunks up in their order; while the token is not among those that the row keeps,
  races again (sample_keep.py); visits the likeliest tokens; writes the results. What a row with an adjustment has drawn
  is ranked here: how many tokens come before it among the logits as they came from the model.

A row takes the branches of what it asks for. It is cut into the same chunks in every bucket, so its sums have one
order. Where the vocabulary is folded in parts, a part's blocks are added in one order and the parts in float32, the
first first, as ranks would be that hold one each (compile/sampler.py: log_sum). Scores of a draw are float32: a draw
differs from the reference's, which is float64, only where the two best scores are within about 1e-6 of each other, and
a keep set only where top_p or min_p falls that close to a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import triton
import triton.language as tl

from tokenspeed.kernels.registry import SAMPLER_FEATURES, Band, KernelSpec, Request, Stage, device_stage
from tokenspeed.kernels.triton.common import FEATURES, pdl_wait
from tokenspeed.kernels.triton.sample_keep import FEW, ahead, next_leaders, race_ahead, token_behind, top_k_mass
from tokenspeed.kernels.triton.sample_math import (
    NO_TOKEN,
    NOBODY,
    exponentials,
    inverse,
    is_ahead,
    load_logits,
    logit_of,
    order_of,
    race,
    token_of,
)
from tokenspeed.step import MAX_TOP_LOGPROBS
from tokenspeed.target import GPU_TARGETS

CHUNK = 2048
"""Logits that one program reads: 63 programs for a row of 128256."""
CHUNK_WARPS = 4
"""Warps of a program of one chunk."""
FINISH_WARPS = 8
"""Warps of a program of one row."""
RECORD_WORDS = 10
"""32-bit words of a row's record per chunk: order of the first token (two words), the same of what the row draws from,
sum of exponentials, score of the winner, the winner, tokens ahead, mass ahead, mass. Behind them, where the vocabulary
is folded in several parts, stand the sums of their blocks."""

_TOP = tl.constexpr(MAX_TOP_LOGPROBS)
_RIVALS = tl.constexpr(2)
_SUM = tl.constexpr(4)
_SCORE = tl.constexpr(5)
_WINNER = tl.constexpr(6)
_COUNT = tl.constexpr(7)
_MASS_AHEAD = tl.constexpr(8)
_MASS = tl.constexpr(9)
_BLOCKS = tl.constexpr(RECORD_WORDS)


@triton.jit
def _orders(record):
    """Pointer to the first token of each chunk of a row, as int64 order values."""
    return record.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def _rivals(record, LANES: tl.constexpr):
    """The same of the logits that the row draws from: where it has no adjustment, they are equal."""
    return (record + _RIVALS * LANES).to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def _drawn_from(logits, adjusted, row, adjustment, V: tl.constexpr):
    """The logits that the row draws from."""
    source = logits + row.to(tl.int64) * V
    if adjustment >= 0:
        source = adjusted + adjustment.to(tl.int64) * V
    return source


@triton.jit
def _floats(record, field: tl.constexpr, LANES: tl.constexpr):
    """Pointer to one 32-bit field of all chunks of a row's record."""
    return (record + field * LANES).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def _integers(record, field: tl.constexpr, LANES: tl.constexpr):
    return record + field * LANES


@triton.jit
def sample_scan(logits, adjusted, logit_target, temperature, seed, draw_position, adjustment, workspace, step_sizes,
                V: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Program (chunk, row): first token, sum of e^(logit - its logit), and the winner of the race in the chunk."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    rows = tl.load(step_sizes + 2)  # no kernel writes inputs of the step: they need not wait
    heat, target = tl.load(temperature + row), tl.load(logit_target + row)
    key, position = tl.load(seed + row), tl.load(draw_position + row)
    own = tl.load(adjustment + row)
    pdl_wait(PDL)
    if row >= rows:
        return
    record = workspace + row.to(tl.int64) * WORDS
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(logits + row.to(tl.int64) * V, tokens, V)
    top = tl.max(values, axis=0)
    first = tl.min(tl.where((values == top) & (tokens < V), tokens, NO_TOKEN), axis=0)
    origin = tl.where(top == float("-inf"), 0.0, top)  # a chunk of -infinity adds 0, not NaN
    tl.store(_orders(record) + chunk, order_of(top, first))
    tl.store(_floats(record, _SUM, LANES) + chunk, tl.sum(tl.exp(values - origin), axis=0))
    if own >= 0:
        values = load_logits(adjusted + own.to(tl.int64) * V, tokens, V)
        top = tl.max(values, axis=0)
        first = tl.min(tl.where((values == top) & (tokens < V), tokens, NO_TOKEN), axis=0)
        origin = tl.where(top == float("-inf"), 0.0, top)
    tl.store(_rivals(record, LANES) + chunk, order_of(top, first))
    if ((target < 0) | (target >= V)) & (heat > 0.0):
        z = (values - origin) * inverse(heat)
        noise = exponentials(key, position, chunk * CHUNK, CHUNK)
        score, winner = race(z, noise, tokens)
        tl.store(_floats(record, _SCORE, LANES) + chunk, score)
        tl.store(_integers(record, _WINNER, LANES) + chunk, winner)


@triton.jit
def _choice(leaders, record, target, heat,
            V: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """(token of the row before keep sets apply, whether it was drawn)."""
    first = tl.max(leaders, axis=0)
    best = logit_of(first)
    asked = (target >= 0) & (target < V)
    drawn = (asked == 0) & (heat > 0.0) & (best - best == 0.0)
    token = tl.where(asked, target, token_of(first))
    if drawn:
        lanes = tl.arange(0, LANES)
        inside = lanes < CHUNKS
        scores = tl.load(_floats(record, _SCORE, LANES) + lanes, mask=inside, other=float("-inf"))
        winners = tl.load(_integers(record, _WINNER, LANES) + lanes, mask=inside, other=NO_TOKEN)
        scores += tl.where(inside, (logit_of(leaders) - best) * inverse(heat), 0.0)
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), winners, NO_TOKEN), axis=0)
    return token, drawn


@triton.jit
def sample_rank(logits, adjusted, logit_target, temperature, top_p, adjustment, workspace, step_sizes,
                V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Program (chunk, row): tokens of the chunk ahead of the row's token, among the logits that it draws from; for
    top_p their mass and the chunk's."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    rows = tl.load(step_sizes + 2)
    heat, target, share = tl.load(temperature + row), tl.load(logit_target + row), tl.load(top_p + row)
    own = tl.load(adjustment + row)
    pdl_wait(PDL)
    if row >= rows:
        return
    record = workspace + row.to(tl.int64) * WORDS
    lanes = tl.arange(0, LANES)
    leaders = tl.load(_rivals(record, LANES) + lanes, mask=lanes < CHUNKS, other=NOBODY)
    token, drawn = _choice(leaders, record, target, heat, V, CHUNKS, LANES)
    first = tl.max(leaders, axis=0)
    if token == token_of(first):
        return
    source = _drawn_from(logits, adjusted, row, own, V)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(source, tokens, V)
    inside = is_ahead(values, tokens, load_logits(source, token, V), token)
    tl.store(_integers(record, _COUNT, LANES) + chunk, tl.sum(inside.to(tl.int32), axis=0))
    if drawn & (share < 1.0):
        weights = tl.exp(tl.div_rn(values - logit_of(first), heat))
        tl.store(_floats(record, _MASS_AHEAD, LANES) + chunk, tl.sum(tl.where(inside, weights, 0.0), axis=0))
        tl.store(_floats(record, _MASS, LANES) + chunk, tl.sum(weights, axis=0))


@triton.jit
def sample_fold(logits, workspace, step_sizes,
                V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
                SHARDS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program (block, row): sum of e^(logit - the row's greatest) over block % BLOCKS of part block / BLOCKS."""
    block, row = tl.program_id(0), tl.program_id(1)
    rows = tl.load(step_sizes + 2)
    pdl_wait(PDL)
    if row >= rows:
        return
    record = workspace + row.to(tl.int64) * WORDS
    lanes = tl.arange(0, LANES)
    best = logit_of(tl.max(tl.load(_orders(record) + lanes, mask=lanes < CHUNKS, other=NOBODY), axis=0))
    size: tl.constexpr = V // SHARDS
    inside = block % BLOCKS * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(logits + row.to(tl.int64) * V, block // BLOCKS * size + inside, V)
    weights = tl.where(inside < size, tl.exp(values - best), 0.0)
    tl.store(_floats(record, _BLOCKS, LANES) + block, tl.sum(weights, axis=0))


@triton.jit
def _log_sum(record, leaders, best, CHUNKS: tl.constexpr, LANES: tl.constexpr,
             SHARDS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_LANES: tl.constexpr):  # fmt: skip
    """log of the sum of e^(logit - best) over the row, in one part or in several, each added to those before it."""
    if SHARDS == 1:
        lanes = tl.arange(0, LANES)
        sums = tl.load(_floats(record, _SUM, LANES) + lanes, mask=lanes < CHUNKS, other=0.0)
        total = tl.sum(tl.where(lanes < CHUNKS, sums * tl.exp(logit_of(leaders) - best), 0.0), axis=0)
    else:
        blocks = tl.arange(0, BLOCK_LANES)
        total = tl.zeros((), tl.float32)
        for shard in range(SHARDS):
            at = _floats(record, _BLOCKS, LANES) + shard * BLOCKS + blocks
            total += tl.sum(tl.load(at, mask=blocks < BLOCKS, other=0.0), axis=0)
    return tl.log(total)


@triton.jit
def sample_finish(logits, adjusted, logit_target, temperature, top_p, min_p, top_k, seed, draw_position, num_logprobs,
                  state_slot, adjustment, last_tokens, out_token, out_logprob, out_rank, out_top_ids, out_top_logprobs,
                  workspace, step_sizes, V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
                  LANES: tl.constexpr, WORDS: tl.constexpr, SHARDS: tl.constexpr, BLOCKS: tl.constexpr,
                  BLOCK_LANES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program (row): the row's token under its keep set, and all results."""
    row = tl.program_id(0)
    rows = tl.load(step_sizes + 2)
    heat, target = tl.load(temperature + row), tl.load(logit_target + row)
    slot, asked = tl.load(state_slot + row), tl.load(num_logprobs + row)
    own = tl.load(adjustment + row)
    pdl_wait(PDL)
    if row >= rows:
        return
    record = workspace + row.to(tl.int64) * WORDS
    source = _drawn_from(logits, adjusted, row, own, V)
    logits += row.to(tl.int64) * V
    lanes = tl.arange(0, LANES)
    leaders = tl.load(_orders(record) + lanes, mask=lanes < CHUNKS, other=NOBODY)
    first = tl.max(leaders, axis=0)
    best, best_token = logit_of(first), token_of(first)
    norm = _log_sum(record, leaders, best, CHUNKS, LANES, SHARDS, BLOCKS, BLOCK_LANES)
    orders = _rivals(record, LANES)
    rivals = tl.load(orders + lanes, mask=lanes < CHUNKS, other=NOBODY)
    token, drawn = _choice(rivals, record, target, heat, V, CHUNKS, LANES)
    favourite = tl.max(rivals, axis=0)
    logit = best
    count = tl.zeros((), tl.int32)
    if token != token_of(favourite):
        counts = tl.load(_integers(record, _COUNT, LANES) + lanes, mask=lanes < CHUNKS, other=0)
        count = tl.sum(counts, axis=0)
        if drawn:
            token, count = _keep(source, orders, record, token, count, logit_of(favourite),
                                 token_of(favourite), heat, tl.load(top_p + row), tl.load(min_p + row),
                                 tl.load(top_k + row), tl.load(seed + row), tl.load(draw_position + row),
                                 V, CHUNK, CHUNKS, LANES)  # fmt: skip
        logit = load_logits(logits, token, V)
    if own >= 0:
        logit = load_logits(logits, token, V)
        count = 0
        if token != best_token:
            count, _ = ahead(logits, _orders(record), logit, token, best, 1.0, V, CHUNK, CHUNKS)
    tl.store(out_token + row, token)
    tl.store(out_logprob + row, (logit - best) - norm)
    tl.store(out_rank + row, count + 1)
    if ((target < 0) | (target >= V)) & (slot >= 0):
        tl.store(last_tokens + slot, token)
    _report_likeliest(logits, leaders, best, norm, asked, out_top_ids + row.to(tl.int64) * _TOP,
                      out_top_logprobs + row.to(tl.int64) * _TOP, V, CHUNK, LANES)  # fmt: skip


@triton.jit
def _keep(logits, orders, record, token, count, best, best_token, heat, top_p, min_p, top_k, seed, position,
          V: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """(token drawn from the keep set, number of tokens ahead of it), from the winner among all tokens, which is not
    the first one, and the number of those ahead of it."""
    limit = tl.where((top_k > 0) & (top_k < V), top_k, V)
    lowest_z = tl.where(min_p > 0.0, tl.log(min_p), float("-inf"))
    mass = tl.zeros((), tl.float32)
    total = tl.full((), float("inf"), tl.float32)
    if top_p < 1.0:
        lanes = tl.arange(0, LANES)
        inside = lanes < CHUNKS
        mass = tl.sum(tl.load(_floats(record, _MASS_AHEAD, LANES) + lanes, mask=inside, other=0.0), axis=0)
        total = tl.sum(tl.load(_floats(record, _MASS, LANES) + lanes, mask=inside, other=0.0), axis=0)
    searched = limit == V  # whether total is that of the first top_k tokens
    undecided = token != best_token
    if undecided & (count >= limit) & (limit <= FEW):
        logit, token = token_behind(orders, limit, logits, V, CHUNK, CHUNKS, LANES)
        token = race_ahead(logits, orders, logit, token, best_token, best, heat, lowest_z, seed, position,
                           V, CHUNK, CHUNKS)  # fmt: skip
        undecided = token != best_token
        count, mass = ahead(logits, orders, load_logits(logits, token, V), token, best, heat, V, CHUNK, CHUNKS)
    while undecided:
        logit = load_logits(logits, token, V)
        z = tl.div_rn(logit - best, heat)
        kept = (count < limit) & (z >= lowest_z)
        if top_p < 1.0:
            # The mass of the top_k is at least that of the tokens up to this one: often that decides.
            within = mass < top_p * (mass + tl.exp(z))
            if kept & (searched == 0) & (within == 0) & (mass < top_p * total):
                total = top_k_mass(logits, orders, limit, best, heat, V, CHUNK, CHUNKS, LANES)
                searched = limit >= 0
            kept = kept & (mass < top_p * total)
        undecided = kept == 0
        if undecided:
            token = race_ahead(logits, orders, logit, token, best_token, best, heat, lowest_z, seed, position,
                               V, CHUNK, CHUNKS)  # fmt: skip
            undecided = token != best_token
            count, mass = ahead(logits, orders, load_logits(logits, token, V), token, best, heat, V, CHUNK, CHUNKS)
    return token, count


@triton.jit
def _report_likeliest(logits, leaders, best, norm, asked, top_ids, top_logprobs,
                      V: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """The ``asked`` first tokens of the order; -1 and -infinity in the other places."""
    places = tl.arange(0, 32)
    ids = tl.full((32,), -1, tl.int32)
    logprobs = tl.full((32,), float("-inf"), tl.float32)
    for place in range(tl.minimum(tl.minimum(asked, _TOP), V)):
        order = tl.max(leaders, axis=0)
        ids = tl.where(places == place, token_of(order), ids)
        logprobs = tl.where(places == place, (logit_of(order) - best) - norm, logprobs)
        leaders = next_leaders(leaders, order, logits, V, CHUNK, LANES)
    tl.store(top_ids + places, ids, mask=places < _TOP)
    tl.store(top_logprobs + places, logprobs, mask=places < _TOP)


def specs() -> Iterator[KernelSpec]:
    """One kernel: logits are float32 in every program."""
    yield KernelSpec(
        op="sample",
        solution="triton",
        symbol="sample_fp32",
        targets=GPU_TARGETS,
        dtypes=("float32", "bfloat16"),
        arguments=(),
        band=Band.VECTOR,
        features=FEATURES | SAMPLER_FEATURES,
        workspace=workspace_bytes,
        launches=launches,
    )


def num_lanes(vocab_size: int) -> int:
    """Chunks of a row, rounded up to a power of two."""
    return int(triton.next_power_of_2(triton.cdiv(vocab_size, CHUNK)))


def num_blocks(sizes: Mapping[str, int]) -> int:
    """Blocks of CHUNK logits of one part of the vocabulary."""
    return int(triton.cdiv(sizes["V"] // sizes["logprob_shards"], CHUNK))


def block_lanes(sizes: Mapping[str, int]) -> int:
    """Blocks of one part, rounded up to a power of two."""
    return int(triton.next_power_of_2(num_blocks(sizes)))


def record_words(sizes: Mapping[str, int]) -> int:
    """32-bit words of a row's record, an even number: it begins with int64s."""
    shards = sizes["logprob_shards"]
    blocks = 0 if shards == 1 else shards * num_blocks(sizes)
    return num_lanes(sizes["V"]) * RECORD_WORDS + blocks + blocks % 2


def workspace_bytes(sizes: Mapping[str, int]) -> int:
    """Bytes of the records of a step's rows."""
    return sizes["num_logit_rows"] * record_words(sizes) * 4


def launches(request: Request) -> tuple[Stage, ...]:
    vocab, rows, shards = (request.sizes[name] for name in ("V", "num_logit_rows", "logprob_shards"))
    chunks, blocks = triton.cdiv(vocab, CHUNK), num_blocks(request.sizes)
    sizes = {"V": vocab, "CHUNK": CHUNK, "LANES": num_lanes(vocab), "WORDS": record_words(request.sizes)}
    folds = {**sizes, "CHUNKS": chunks, "SHARDS": shards, "BLOCKS": blocks}
    stage = partial(device_stage, module=__name__, num_stages=1, target=request.target)
    fold = stage(
        name="fold",
        function=sample_fold,
        arguments="read logits, workspace partials, sizes step_sizes",
        types="*fp32, *i32, *i32",
        constants=folds,
        num_warps=CHUNK_WARPS,
        grid=(shards * blocks, rows, 1),
    )
    return (
        stage(
            name="scan",
            function=sample_scan,
            arguments="read logits, read adjusted, read logit_target, read temperature, read seed, read draw_position, "
            "read adjustment, workspace partials, sizes step_sizes",
            types="*fp32, *fp32, *i32, *fp32, *u64, *i32, *i32, *i32, *i32",
            constants=sizes,
            num_warps=CHUNK_WARPS,
            grid=(chunks, rows, 1),
        ),
        stage(
            name="rank",
            function=sample_rank,
            arguments="read logits, read adjusted, read logit_target, read temperature, read top_p, read adjustment, "
            "workspace partials, sizes step_sizes",
            types="*fp32, *fp32, *i32, *fp32, *fp32, *i32, *i32, *i32",
            constants={**sizes, "CHUNKS": chunks},
            num_warps=CHUNK_WARPS,
            grid=(chunks, rows, 1),
        ),
        *((fold,) if shards > 1 else ()),
        stage(
            name="finish",
            function=sample_finish,
            arguments="read logits, read adjusted, read logit_target, read temperature, read top_p, read min_p, "
            "read top_k, read seed, read draw_position, read num_logprobs, read state_slot, read adjustment, "
            "write last_tokens, write out_token, write out_logprob, write out_rank, write out_top_ids, "
            "write out_top_logprobs, workspace partials, sizes step_sizes",
            types="*fp32, *fp32, *i32, *fp32, *fp32, *fp32, *i32, *u64, *i32, *i32, *i32, *i32, *i32, *i32, *fp32, "
            "*i32, *i32, *fp32, *i32, *i32",
            constants={**folds, "BLOCK_LANES": block_lanes(request.sizes)},
            num_warps=FINISH_WARPS,
            grid=(rows, 1, 1),
        ),
    )
