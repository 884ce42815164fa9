"""The vocabulary of a Program: every kind of op, with its operands, attributes, and the rules of its types.

One table, ``SCHEMAS``, is what the builder infers output types from and what the verifier checks. The
interpreter implements every entry, the ONNX exporter those of the model level, a KernelSpec one each.

Dtypes: the *program dtype* (float32 or bfloat16) is what activations are rounded to where they feed a
projection or the KV pages. The residual stream, projection outputs and logits are float32 whatever it is.
Dimensions are numbers or one of ``SYMBOLS``; two dimensions agree when they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tokenspeed.errors import ProgramError
from tokenspeed.step import MAX_TOP_LOGPROBS, mask_words

Dim: TypeAlias = int | str
AttrValue: TypeAlias = int | float | str | tuple[float, ...]

DTYPES = ("float32", "bfloat16", "int32", "int64", "uint64")
PROGRAM_DTYPES = ("float32", "bfloat16")

SYMBOLS: Mapping[str, str] = {
    "num_tokens": "tokens of the step, prefill chunks and decodes together",
    "num_seqs": "sequences of the step",
    "num_seqs+1": "boundaries between the sequences of the step",
    "num_logit_rows": "token rows whose logits are needed",
    "num_adjustments": "sequences of the step that ask penalties, biases or allowed tokens",
    "num_adjustments+1": "boundaries between the biases of adjustments",
    "num_biases": "biases of all adjustments",
    "num_masks": "token masks of all adjustments",
    "num_pages": "KV pages of the deployment",
    "num_slots": "request slots of the deployment",
}
PANEL = 16
"""Output features per panel of a packed projection; ``interleave16`` alternates gate and up in such panels."""


class Attrs(Mapping[str, AttrValue]):
    """An immutable, hashable mapping that iterates in the order of its keys."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, AttrValue] | None = None):
        self._items: dict[str, AttrValue] = {key: value for key, value in sorted((items or {}).items())}

    def __getitem__(self, key: str) -> AttrValue:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return f"Attrs({self._items!r})"

    def integer(self, key: str) -> int:
        """The attribute ``key``, which its schema says is an int."""
        value = self._items[key]
        assert isinstance(value, int), (key, value)
        return value

    def number(self, key: str) -> float:
        """The attribute ``key``, which its schema says is a number."""
        value = self._items[key]
        assert isinstance(value, int | float), (key, value)
        return float(value)


@dataclass(frozen=True)
class TensorType:
    """What is known of a tensor before any step: dtype and symbolic shape."""

    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class TypeRuleError(ProgramError):
    """A type rule of a schema is broken; whoever knows the op adds its name."""


Infer: TypeAlias = Callable[[Sequence[TensorType], Attrs, str], tuple[TensorType, ...]]
"""(operand types, attributes, program dtype) -> result types; raises TypeRuleError."""


@dataclass(frozen=True)
class OpSchema:
    """One kind of op.

    ``operands`` and ``results`` name its inputs and outputs in order; ``attrs`` gives each attribute's type.
    ``aliases`` maps a result to the operand whose storage it overwrites: that operand is dead afterwards.
    """

    kind: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    infer: Infer
    doc: str
    attrs: Mapping[str, type] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


def _need(condition: bool, rule: str, have: object) -> None:
    if not condition:
        raise TypeRuleError(f"need {rule}, have {have}")


def _matrix(value: TensorType, what: str, *dtypes: str) -> tuple[Dim, Dim]:
    """The two dimensions of ``value``, which must be a matrix of one of ``dtypes``."""
    _need(len(value.shape) == 2 and value.dtype in dtypes, f"{what} to be a matrix of {' or '.join(dtypes)}", value)
    return value.shape[0], value.shape[1]


def _exactly(value: TensorType, what: str, dtype: str, *shape: Dim) -> None:
    expected = TensorType(dtype, shape)
    _need(value == expected, f"{what} to be {expected}", value)


def _width(dim: Dim, what: str) -> int:
    _need(isinstance(dim, int), f"{what} to be a number", dim)
    assert isinstance(dim, int)
    return dim


def _flag(attrs: Attrs, name: str) -> None:
    _need(attrs.integer(name) in (0, 1), f"attribute {name} to be 0 or 1", attrs[name])


def _kv(value: TensorType, num_kv_heads: int, head_dim: int, dtype: str) -> None:
    shape = value.shape
    fits = len(shape) == 5 and shape[1:3] == (2, num_kv_heads) and shape[4] == head_dim and value.dtype == dtype
    _need(fits, f"kv to be {dtype}[num_pages, 2, {num_kv_heads}, page_size, {head_dim}]", value)


def _projection(x: TensorType, weight: TensorType, dtype: str) -> tuple[Dim, int]:
    """(rows, output features) of ``x @ weight.T`` after checking both."""
    rows, width = _matrix(x, "x", dtype)
    features, weight_width = _matrix(weight, "weight", dtype)
    _need(width == weight_width, f"weight to have {width} columns, like x", weight)
    return rows, _width(features, "output features")


def _embedding(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    token_ids, last_tokens, table = types
    _exactly(token_ids, "token_ids", "int32", "num_tokens")
    _exactly(last_tokens, "last_tokens", "int32", "num_slots")
    _, hidden = _matrix(table, "table", dtype)
    return (TensorType("float32", ("num_tokens", hidden)),)


def _rms_norm(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    x, weight = types
    rows, width = _matrix(x, "x", "float32")
    _exactly(weight, "weight", "float32", width)
    return (TensorType(dtype, (rows, width)),)


def _linear(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    return (TensorType("float32", _projection(types[0], types[1], dtype)),)


def _linear_add(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    rows, features = _projection(types[0], types[1], dtype)
    _exactly(types[2], "residual", "float32", rows, features)
    _flag(attrs, "rounded")
    return (types[2],)


def _linear_silu_mul(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    rows, features = _projection(types[0], types[1], dtype)
    wanted = attrs.integer("features")
    padded = 2 * round_up(wanted, PANEL)
    _need(features == padded, f"{padded} interleaved rows of weight for {wanted} features", types[1])
    return (TensorType(dtype, (rows, wanted)),)


def _slice_columns(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    rows, width = _matrix(types[0], "x", "float32")
    start, stop = attrs.integer("start"), attrs.integer("stop")
    _need(0 <= start < stop <= _width(width, "columns of x"), f"columns {start}:{stop} inside x", types[0])
    return (TensorType("float32", (rows, stop - start)),)


def _rope(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    x, table, positions = types
    rows, width = _matrix(x, "x", "float32")
    head_dim = attrs.integer("head_dim")
    _need(_width(width, "columns of x") % head_dim == 0, f"columns of x to be heads of {head_dim}", x)
    _rope_table(table, head_dim)
    _exactly(positions, "positions", "int32", rows)
    return (TensorType(dtype, (rows, width)),)


def _rope_table(table: TensorType, head_dim: int) -> None:
    _, width = _matrix(table, "rope_table", "float32")
    _need(head_dim % 2 == 0 and width == head_dim, f"rope_table to have {head_dim} columns (an even number)", table)


def _make_rope_table(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    frequencies, table = types
    rows, width = _matrix(table, "table", "float32")
    _need(isinstance(rows, int), "a fixed number of positions", table)
    _rope_table(table, _width(width, "columns of table"))
    _exactly(frequencies, "inverse_frequencies", "float32", _width(width, "columns of table") // 2)
    return (table,)


def _kv_write(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    kv, k, v, slot_mapping = types
    heads, head_dim = attrs.integer("num_kv_heads"), attrs.integer("head_dim")
    _kv(kv, heads, head_dim, dtype)
    _exactly(k, "k", dtype, "num_tokens", heads * head_dim)
    _exactly(v, "v", "float32", "num_tokens", heads * head_dim)
    _exactly(slot_mapping, "slot_mapping", "int64", "num_tokens")
    return (kv,)


def _rope_kv_write(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    qkv, table, positions, slot_mapping, cu_seqlens, kv = types
    heads, kv_heads, head_dim = (attrs.integer(key) for key in ("num_heads", "num_kv_heads", "head_dim"))
    _exactly(qkv, "qkv", "float32", "num_tokens", (heads + 2 * kv_heads) * head_dim)
    _rope_table(table, head_dim)
    _exactly(positions, "positions", "int32", "num_tokens")
    _exactly(slot_mapping, "slot_mapping", "int64", "num_tokens")
    _exactly(cu_seqlens, "cu_seqlens", "int32", "num_seqs+1")
    _kv(kv, kv_heads, head_dim, dtype)
    return (TensorType(dtype, ("num_tokens", heads * head_dim)), kv)


def _paged_attention(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    q, kv, cu_seqlens, context_lens, page_table = types
    heads, kv_heads, head_dim = (attrs.integer(key) for key in ("num_heads", "num_kv_heads", "head_dim"))
    _need(heads % kv_heads == 0, "num_heads to be a multiple of num_kv_heads", f"{heads} and {kv_heads}")
    _exactly(q, "q", dtype, "num_tokens", heads * head_dim)
    _kv(kv, kv_heads, head_dim, dtype)
    _exactly(cu_seqlens, "cu_seqlens", "int32", "num_seqs+1")
    _exactly(context_lens, "context_lens", "int32", "num_seqs")
    rows, _ = _matrix(page_table, "page_table", "int32")
    _need(rows == "num_seqs", "one row of page_table per sequence", page_table)
    return (q,)


def _silu(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    _matrix(types[0], "x", "float32")
    return (types[0],)


def _same_matrices(types: Sequence[TensorType]) -> TensorType:
    first, second = types
    _matrix(first, "the first operand", "float32")
    _need(first == second, f"both operands to be {first}", second)
    return first


def _add(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    _flag(attrs, "rounded")
    return (_same_matrices(types),)


def _rounded_product(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    return (TensorType(dtype, _same_matrices(types).shape),)


def _gather_rows(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    rows, width = _matrix(types[0], "x", "float32")
    _need(rows == "num_tokens", "one row of x per token", types[0])
    _exactly(types[1], "logit_rows", "int32", "num_logit_rows")
    return (TensorType("float32", ("num_logit_rows", width)),)


SAMPLE_OPERANDS: Mapping[str, str] = {
    "logit_target": "int32", "temperature": "float32", "top_p": "float32", "min_p": "float32", "top_k": "int32",
    "seed": "uint64", "draw_position": "int32", "num_logprobs": "int32", "state_slot": "int32",
    "adjustment": "int32",
}  # fmt: skip
ADJUST_OPERANDS: Mapping[str, tuple[str, Dim]] = {
    "adjust_seq": ("int32", "num_adjustments"), "adjust_row": ("int32", "num_adjustments"),
    "count_slot": ("int32", "num_adjustments"), "prompt_lens": ("int32", "num_adjustments"),
    "repetition_penalty": ("float32", "num_adjustments"), "presence_penalty": ("float32", "num_adjustments"),
    "frequency_penalty": ("float32", "num_adjustments"), "cu_biases": ("int32", "num_adjustments+1"),
    "mask_row": ("int32", "num_adjustments"), "bias_ids": ("int32", "num_biases"),
    "bias_values": ("float32", "num_biases"),
}  # fmt: skip
"""Operands of ``adjust_logits`` that describe adjustments, but for the token masks."""


def _adjust_logits(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    logits, token_ids, last_tokens, positions, cu_seqlens, *asked, masks, counts = types
    count, vocab = _matrix(logits, "logits", "float32")
    _need(count == "num_logit_rows", "one row of logits per logit row", logits)
    _exactly(token_ids, "token_ids", "int32", "num_tokens")
    _exactly(last_tokens, "last_tokens", "int32", "num_slots")
    _exactly(positions, "positions", "int32", "num_tokens")
    _exactly(cu_seqlens, "cu_seqlens", "int32", "num_seqs+1")
    for (name, (kind, dim)), value in zip(ADJUST_OPERANDS.items(), asked, strict=True):
        _exactly(value, name, kind, dim)
    _exactly(masks, "token_masks", "int32", "num_masks", mask_words(_width(vocab, "vocabulary")))
    slots, counted = _matrix(counts, "token_counts", "int32")
    _need(slots in ("num_slots", 1) and counted == vocab, "a row of the vocabulary per slot", counts)
    return (TensorType("float32", ("num_adjustments", vocab)), counts)


def _sample(types: Sequence[TensorType], attrs: Attrs, dtype: str) -> tuple[TensorType, ...]:
    logits, adjusted, *rows, last_tokens = types
    count, vocab = _matrix(logits, "logits", "float32")
    _need(count == "num_logit_rows", "one row of logits per logit row", logits)
    shards = attrs.integer("logprob_shards")
    equal = shards >= 1 and _width(vocab, "vocabulary") % shards == 0
    _need(equal, f"a vocabulary of {shards} equal shards", logits)
    _exactly(adjusted, "adjusted", "float32", "num_adjustments", vocab)
    for (name, row_dtype), value in zip(SAMPLE_OPERANDS.items(), rows, strict=True):
        _exactly(value, name, row_dtype, "num_logit_rows")
    _exactly(last_tokens, "last_tokens", "int32", "num_slots")
    row, top = ("num_logit_rows",), ("num_logit_rows", MAX_TOP_LOGPROBS)
    return (
        TensorType("int32", row), TensorType("float32", row), TensorType("int32", row),
        TensorType("int32", top), TensorType("float32", top), last_tokens,
    )  # fmt: skip


def round_up(value: int, to: int) -> int:
    """``value`` rounded up to a multiple of ``to``."""
    return -(-value // to) * to


_HEADS = {"num_heads": int, "num_kv_heads": int, "head_dim": int}
_KV_HEADS = {"num_kv_heads": int, "head_dim": int}

_TABLE = (
    OpSchema("embedding", ("token_ids", "last_tokens", "table"), ("out",), _embedding,
             "row token_ids[t] of table; an id of -1 - slot stands for last_tokens[slot]"),
    OpSchema("rms_norm", ("x", "weight"), ("out",), _rms_norm,
             "x / sqrt(mean(x^2) + eps) * weight, in float32, then rounded to the program dtype", {"eps": float}),
    OpSchema("linear", ("x", "weight"), ("out",), _linear, "x @ weight.T, accumulated in float32"),
    OpSchema("linear_add", ("x", "weight", "residual"), ("out",), _linear_add,
             "residual + x @ weight.T; rounded (1): the product and the sum are rounded to the program dtype",
             {"rounded": int}),
    OpSchema("linear_silu_mul", ("x", "weight"), ("out",), _linear_silu_mul,
             "silu(x @ gate.T) * (x @ up.T), where weight interleaves gate and up in panels of 16 rows",
             {"features": int}),
    OpSchema("slice_columns", ("x",), ("out",), _slice_columns, "x[:, start:stop]", {"start": int, "stop": int}),
    OpSchema("rope_table", ("inverse_frequencies", "table"), ("table",), _make_rope_table,
             "row p: attention_factor * cos(p f) for each inverse frequency f, then attention_factor * sin(p f); each "
             "product, cosine and sine rounded to float32", {"attention_factor": float}, {"table": "table"}),
    OpSchema("rope", ("x", "rope_table", "positions"), ("out",), _rope,
             "rotates each head by its position: (a, b) -> (a cos - b sin, b cos + a sin) on the halves a, b",
             {"head_dim": int}),
    OpSchema("kv_write", ("kv", "k", "v", "slot_mapping"), ("kv",), _kv_write,
             "stores K and V of each token (V rounded to the program dtype) at slot_mapping",
             _KV_HEADS, {"kv": "kv"}),
    OpSchema("rope_kv_write", ("qkv", "rope_table", "positions", "slot_mapping", "cu_seqlens", "kv"), ("q", "kv"),
             _rope_kv_write, "rope of q and of k, then kv_write of k and v", _HEADS, {"kv": "kv"}),
    OpSchema("paged_attention", ("q", "kv", "cu_seqlens", "context_lens", "page_table"), ("out",), _paged_attention,
             "causal softmax(scale q k^T) v over the pages of each sequence", {**_HEADS, "scale": float}),
    OpSchema("silu", ("x",), ("out",), _silu, "x / (1 + exp(-x)), in float32"),
    OpSchema("mul", ("a", "b"), ("out",), _rounded_product, "a * b, rounded to the program dtype"),
    OpSchema("silu_mul", ("gate", "up"), ("out",), _rounded_product,
             "silu(gate) * up in float32, then rounded to the program dtype"),
    OpSchema("add", ("a", "b"), ("out",), _add,
             "a + b, in float32; rounded (1): b and the sum are rounded to the program dtype", {"rounded": int}),
    OpSchema("gather_rows", ("x", "logit_rows"), ("out",), _gather_rows, "x[logit_rows]"),
    OpSchema("adjust_logits", ("logits", "token_ids", "last_tokens", "positions", "cu_seqlens", *ADJUST_OPERANDS,
                               "token_masks", "token_counts"),
             ("adjusted", "token_counts"), _adjust_logits,
             "counts the step's tokens, then the logits of each adjustment's row with its biases, penalties and mask",
             aliases={"token_counts": "token_counts"}),
    OpSchema("sample", ("logits", "adjusted", *SAMPLE_OPERANDS, "last_tokens"),
             ("out_token", "out_logprob", "out_rank", "out_top_ids", "out_top_logprobs", "last_tokens"), _sample,
             "draws a token per row, from adjusted where it has an adjustment (or takes logit_target), scores it under "
             "logits (folded in logprob_shards parts), and records it in last_tokens[state_slot]",
             {"logprob_shards": int}, aliases={"last_tokens": "last_tokens"}),
)  # fmt: skip

SCHEMAS: Mapping[str, OpSchema] = {schema.kind: schema for schema in _TABLE}
