"""What is computed to compare kernels: for each op that sums, operands made of probes, and steps that hold them.

A *logical row* is a row of an op's result that has one true value: of a projection a row of x, of attention a token
at a position, of the sampler a row of logits. A case puts logical rows into runs: alone, among others, at other
places, in buckets of other sizes. Every member must give each logical row the same bits in every run, and the same as
every other member (docs/equivalence.md). Cases know no device: proving.py makes packs of them for GPUs, cpu_proofs.py
runs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenspeed.compile.probes import SEED, Array, left, pairs, right
from tokenspeed.step import MAX_TOP_LOGPROBS

ROWS = 37
"""Logical rows of a projection: of no simple ratio to any tile, so that copies of a row meet every place of one."""
FEATURES = 288
"""Rows of W that stand for any number: an output is the sum over one of them. A multiple of 32 and of no more, so that
the last tile of most shapes is not full."""
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Slice:
    """Rows ``[first, first + count)`` of an array, ``repeat`` times."""

    array: str
    first: int
    count: int
    repeat: int = 1


@dataclass(frozen=True)
class Step:
    """One run: sizes of the bucket and of the step, where operands begin, and the logical row of each result.

    ``operands``: name -> (operand of the case, rows to skip). ``kinds``: which members serve it; empty for all.
    """

    name: str
    bucket: Mapping[str, int]
    num_tokens: int
    num_seqs: int
    labels: tuple[int, ...]
    operands: Mapping[str, tuple[str, int]]
    kinds: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    Attributes:
        sizes: of the request, but for those of the bucket.
        arrays: probes by name; equal arrays of several cases are stored once.
        operands: name -> the slices of arrays that follow one another.
        results: (name, bytes of a row) of what is compared.
        floats: attributes of the op.
    """

    op: str
    dtype: str
    shape: str
    sizes: Mapping[str, int]
    arrays: Mapping[str, Array]
    operands: Mapping[str, tuple[Slice, ...]]
    results: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    floats: Mapping[str, float] = field(default_factory=dict)

    def nbytes(self, operand: str) -> int:
        """Bytes of an operand."""
        return sum(self.row_bytes(s.array) * s.count * s.repeat for s in self.operands[operand])

    def row_bytes(self, array: str) -> int:
        return int(self.arrays[array][0].nbytes)

    def bytes_of(self, operand: str) -> bytes:
        """The bytes of an operand."""
        parts = (self.arrays[s.array][s.first : s.first + s.count].tobytes() * s.repeat for s in self.operands[operand])
        return b"".join(parts)


def row_steps(most: int, operands: Sequence[str], counted: Sequence[str], rows: int = ROWS) -> tuple[Step, ...]:
    """Runs of an op of independent rows: single rows, few and many, from different rows on, in several buckets.

    ``operands`` have a row per row, ``counted`` are the sizes of the bucket that count rows.
    """
    shapes = [(0, 1), (5, 1), (rows - 1, 1), (2, 3), (0, 16), (7, 8), (11, 33), (0, 64), (3, 130), (0, most)]
    steps = []
    for first, count in shapes:
        if first + count > most:
            continue
        bucket = next(size for size in (1, 8, 16, 64, 160, most) if count <= size)
        steps.append(
            Step(
                f"{count} from {first}",
                dict.fromkeys((*counted, "M"), bucket),
                count,
                count,
                tuple((first + i) % rows for i in range(count)),
                {name: (name, first) for name in operands},
            )
        )
    return tuple(steps)


def linear_case(op: str, dtype: str, k: int, *, rounded: bool = False, most: int = 304) -> Case:
    """A projection of ``k`` columns: up to ``most`` rows, of which ROWS are different."""
    copies = -(-most // ROWS)
    arrays = {"x": left(ROWS, k, dtype), "weight": right(FEATURES, k, dtype)}
    operands = {"x": (Slice("x", 0, ROWS, copies),), "weight": (Slice("weight", 0, FEATURES),)}
    sizes = {"K": k, "rows": 0, **({"rounded": 1} if rounded else {})}
    gated = op == "linear_silu_mul"
    sizes |= {"F": FEATURES // 2} if gated else {"N": FEATURES}
    by_row = ["x"]
    if op == "linear_add":
        arrays["residual"] = left(ROWS, FEATURES, "float32")
        operands["residual"] = (Slice("residual", 0, ROWS, copies),)
        by_row.append("residual")
    row_bytes = FEATURES // 2 * BYTES[dtype] if gated else FEATURES * 4
    shape = f"N={FEATURES} K={k}{' rounded' if rounded else ''}"
    steps = row_steps(most, by_row, ("num_tokens", "num_seqs", "num_logit_rows"))
    return Case(op, dtype, shape, sizes, arrays, operands, (("out", row_bytes),), steps)


def norm_case(dtype: str, width: int) -> Case:
    """An RMS norm of ``width`` columns."""
    most, copies = 130, -(-130 // ROWS)
    arrays = {"x": left(ROWS, width, "float32"), "weight": left(1, width, "float32")}
    operands = {"x": (Slice("x", 0, ROWS, copies),), "weight": (Slice("weight", 0, 1),)}
    steps = row_steps(most, ["x"], ("num_tokens", "num_seqs", "num_logit_rows"))
    sizes = {"H": width, "rows": 0}
    return Case("rms_norm", dtype, f"H={width}", sizes, arrays, operands, (("out", width * BYTES[dtype]),), steps,
                {"eps": 1e-5})  # fmt: skip


_SAMPLE_ROWS = 11
_SAMPLE_INPUTS: Mapping[str, tuple[str, float]] = {
    "logit_target": ("int32", -1), "temperature": ("float32", 0), "top_p": ("float32", 1), "min_p": ("float32", 0),
    "top_k": ("int32", 0), "seed": ("uint64", SEED), "draw_position": ("int32", 7),
    "num_logprobs": ("int32", MAX_TOP_LOGPROBS), "state_slot": ("int32", -1), "adjustment": ("int32", -1),
}  # fmt: skip
"""Inputs of sample by name: type, and the value that every row has."""


def sample_case(vocab_size: int, shards: int = 1) -> Case:
    """Log-probabilities of a vocabulary, folded in ``shards`` parts. Rows of logits are stretches of one array: they
    need only be different.
    """
    most = 24
    generator = np.random.default_rng((SEED, 3, vocab_size))
    stride = math.gcd(vocab_size, 16)
    logits = generator.standard_normal((1, vocab_size + stride * _SAMPLE_ROWS)).astype(np.float32) * 4
    logits[:, :: 7 * stride] -= 90  # exponentials that are subnormal, or vanish, beside those of their row
    one = logits.reshape(-1, stride)
    arrays: dict[str, Array] = {"logits": one}
    rows = [Slice("logits", row, vocab_size // stride) for row in range(_SAMPLE_ROWS)]
    operands = {"logits": tuple((rows * 3)[:most]), "adjusted": (Slice("logits", 0, vocab_size // stride),)}
    for name, (dtype, value) in _SAMPLE_INPUTS.items():
        arrays[name] = np.full((64, 1), value, dtype)  # as many as the largest bucket has
        operands[name] = (Slice(name, 0, 64),)
    results = (("out_logprob", 4), ("out_top_logprobs", 4 * MAX_TOP_LOGPROBS))
    steps = row_steps(most, ["logits"], ("num_tokens", "num_seqs", "num_logit_rows"), _SAMPLE_ROWS)
    assert vocab_size % stride == 0
    sizes, shape = {"V": vocab_size, "logprob_shards": shards}, f"V={vocab_size} shards={shards}"
    return Case("sample", "float32", shape, sizes, arrays, operands, results, steps)


# --- attention ------------------------------------------------------------------------------------

MIXED = frozenset({"mixed"})
"""Steps of chunks and decodes together: one launch on a CPU. On a GPU each has a kernel of its own."""
_MOST_SPLIT = 4096
_QUERIES = 24
"""Last positions of each sequence that have queries."""


def _contexts(split: int) -> tuple[int, ...]:
    """Positions of the logical sequences: one, across a page, across splits unless these are very long."""
    return 1, 65, 130, 300, max(700, min(split, _MOST_SPLIT) + 76)


def attention_case(dtype: str, heads: int, kv_heads: int, head_dim: int, page_size: int, split: int) -> Case:
    """Causal attention over pages: logical row (sequence, position), whatever chunk or decode computes it.

    Scores are those of a model: large terms cancel in them, but none is so large that a softmax has one position alone.
    Probabilities cancel, too: in sequence 3 positions of a pair have one key, and values +B and -B.
    """
    element, kv_row, contexts = BYTES[dtype], kv_heads * head_dim, _contexts(split)
    pages_of = [-(-length // page_size) for length in contexts]
    first_page = np.concatenate([[0], np.cumsum(pages_of)])
    num_pages = int(first_page[-1])
    kv = np.concatenate([_sequence_pages(i, n, pages_of[i], kv_heads, head_dim, page_size, dtype)
                         for i, n in enumerate(contexts)])  # fmt: skip
    rows = [(i, p) for i, n in enumerate(contexts) for p in range(max(0, n - _QUERIES), n)]
    label_of = {row: number for number, row in enumerate(rows)}
    q = left(len(rows) * heads, head_dim, dtype, ("cancelling", "random", "denormal")).reshape(len(rows), -1)
    arrays: dict[str, Array] = {"q": q, "kv": kv.reshape(num_pages, -1)}
    order = np.random.default_rng((SEED, 5)).permutation(num_pages)
    operands: dict[str, tuple[Slice, ...]] = {"kv": tuple(
        Slice("kv", int(page), 1) for page in (*range(num_pages), *order))}  # fmt: skip
    place = {True: np.arange(num_pages), False: num_pages + np.argsort(order)}
    pages_per_seq = max(pages_of)
    steps = []
    for name, tokens, straight, padded in _compositions(contexts):
        lengths = [len(positions) for _, positions in tokens]
        table = np.zeros((len(tokens), pages_per_seq), np.int32)
        for row, (seq, _) in enumerate(tokens):
            table[row, : pages_of[seq]] = place[straight][first_page[seq] : first_page[seq + 1]]
        labels = [label_of[seq, p] for seq, positions in tokens for p in positions]
        inputs = {
            "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            "context_lens": np.array([positions[-1] + 1 for _, positions in tokens], np.int32),
            "page_table": table.reshape(-1),
        }
        for operand, values in inputs.items():
            arrays[f"{operand} {name}"] = values.reshape(-1, 1)
            operands[f"{operand} {name}"] = (Slice(f"{operand} {name}", 0, values.size),)
        operands[f"q {name}"] = tuple(Slice("q", label, 1) for label in labels)
        steps.append(Step(
            name, {"num_tokens": len(labels) + padded, "num_seqs": len(tokens) + padded, "num_logit_rows": 1,
                   "M": len(labels) + padded},
            len(labels), len(tokens), tuple(labels),
            {**{o: (f"{o} {name}", 0) for o in (*inputs, "q")}, "kv": ("kv", 0)},
            _kinds(lengths),
        ))  # fmt: skip
    sizes = {
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
        "page_stride": 2 * kv_row * page_size * element, "pages_per_seq": pages_per_seq, "split_positions": split,
        "rows": 0,
    }  # fmt: skip
    shape = f"heads={heads}/{kv_heads} head_dim={head_dim} page_size={page_size} split={split}"
    return Case("paged_attention", dtype, shape, sizes, arrays, operands, (("out", heads * head_dim * element),),
                tuple(steps), {"scale": head_dim**-0.5})  # fmt: skip


def _compositions(contexts: Sequence[int]) -> Iterator[tuple[str, list[tuple[int, range]], bool, int]]:
    """(name, [(sequence, its positions in the step)], pages in order or scattered, how much larger the bucket is)."""
    whole, end = [(i, range(max(0, n - _QUERIES), n)) for i, n in enumerate(contexts)], contexts[4]
    chunks = [(i, positions) for i, positions in whole if len(positions) > 1]
    yield "chunks", chunks, True, 0
    yield "chunks, scattered", [(i, positions[-5:]) for i, positions in reversed(chunks)], False, 40
    yield "one chunk", [(3, range(280, 300))], True, 0
    yield "an earlier chunk", [(4, range(end - 24, end - 10))], False, 7
    yield "two short chunks", [(4, range(end - 10, end - 8)), (3, range(277, 279))], True, 300
    last = [(i, positions[-1:]) for i, positions in whole]
    yield "decodes", last, True, 0
    yield "decodes, scattered", last[::-1], False, 60
    yield "decodes, crowded", [(i, positions[-2:-1] or positions) for i, positions in whole], True, 300
    for seq, position in ((4, end - 1), (4, end - 20), (3, 285), (2, 128), (0, 0)):
        yield f"decode {position} of {seq}", [(seq, range(position, position + 1))], True, 0
    yield "mixed", [last[4], chunks[2], last[0], chunks[0]], False, 5


def _kinds(lengths: Sequence[int]) -> frozenset[str]:
    """The kernels of a GPU that compute sequences of so many tokens."""
    if max(lengths) > 1:
        return frozenset({"chunk"}) if min(lengths) > 1 else MIXED
    return frozenset({"token", "split"})


def _sequence_pages(seq: int, length: int, pages: int, kv_heads: int, head_dim: int, page_size: int,
                    dtype: str) -> Array:  # fmt: skip
    """[pages, 2, kv_heads, page_size, head_dim]: K and V of a sequence. Positions beyond it are 0."""
    keys = right(length * kv_heads, head_dim, dtype, ("cancelling", "random")).reshape(length, kv_heads, head_dim)
    values = left(length * kv_heads, head_dim, dtype)[::-1].reshape(length, kv_heads, head_dim)
    if seq == 3:
        values = right(kv_heads * head_dim, length, dtype).reshape(kv_heads, head_dim, length).transpose(2, 0, 1)
        first, second = pairs(length)
        keys[second] = keys[first]
    kv = np.zeros((2, pages * page_size, kv_heads, head_dim), keys.dtype)
    kv[0, :length], kv[1, :length] = keys, values
    return kv.reshape(2, pages, page_size, kv_heads, head_dim).transpose(1, 0, 3, 2, 4).copy()
