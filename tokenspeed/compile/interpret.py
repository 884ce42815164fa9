"""The interpreter: runs a Program step by step in NumPy. It is the oracle of passes, kernels and exports.

Plain NumPy rather than a tensor framework, so that building and testing need no more than NumPy and ml_dtypes.
It follows the schemas literally: one function per kind of op, no blocking, no fast paths.

Modes: ``float64`` and ``float32`` compute in that precision and round nothing; ``bfloat16`` computes in float32
and rounds to bfloat16 wherever a bfloat16 artifact stores bfloat16: weights, norm outputs, rotated q and k, v,
attention probabilities and outputs, gated activations. bfloat16 values live in float32 arrays here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tokenspeed.compile.derive import deinterleave, derive, rope_table_of
from tokenspeed.compile.ops import ADJUST_OPERANDS, SAMPLE_OPERANDS, Dim
from tokenspeed.compile.program import Op, Program, Role
from tokenspeed.compile.sampler import adjust_rows, sample_rows
from tokenspeed.compile.verify import verify
from tokenspeed.errors import ProgramError
from tokenspeed.step import MASK_BITS, mask_words

Array: TypeAlias = npt.NDArray[Any]
Fetch: TypeAlias = Callable[[str], Array]
"""Checkpoint tensors by name: ``checkpoint.read``, or ``weights.__getitem__`` of a dict."""

MODES = ("float64", "float32", "bfloat16")


def round_bfloat16(x: Array) -> Array:
    """``x`` rounded to the nearest bfloat16 (ties to even), as float32."""
    rounded: Array = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return rounded


class Interpreter:
    """One Program with its weights and state; ``run`` executes one step and advances the state.

    Args:
        weights: gives checkpoint tensors by name.
        mode: one of MODES; by default the program dtype.
        num_pages, num_slots: sizes of the state.

    State is public: ``state["kv.N"]`` is [num_pages, 2, num_kv_heads, page_size, head_dim].
    """

    def __init__(self, program: Program, weights: Fetch, *, num_pages: int, num_slots: int, mode: str | None = None):
        verify(program)
        self.program = program
        self.mode = mode or program.dtype
        if self.mode not in MODES or (self.mode == "bfloat16" and program.dtype != "bfloat16"):
            raise ProgramError(
                f"need an interpreter mode that a {program.dtype} Program has, have {self.mode!r}",
                hint=f"use one of {', '.join(MODES)}; bfloat16 needs a bfloat16 Program",
            )
        self.compute = np.dtype(np.float64 if self.mode == "float64" else np.float32)
        self._sizes: dict[str, int] = {"num_pages": num_pages, "num_slots": num_slots}
        self._weights = {value.name: self._load(value.name, weights) for value in program.op_weights}
        self.state = {
            value.name: np.zeros([self._size(dim, self._sizes) for dim in value.shape], self._storage(value.dtype))
            for value in program.states
        }
        self._prepared: dict[str, Array] = {}
        for op in program.prelude:
            self._prepared.update(self._evaluate(op, {**self._weights, **self.state, **self._prepared}))

    def run(self, inputs: Mapping[str, Array], keep: Sequence[str] = ()) -> dict[str, Array]:
        """Run one step. ``inputs`` by the names of ``tokenspeed.step.INPUTS``, exactly as long as the step.

        Returns the Program's outputs, and of the other values those named in ``keep``, for example ``logits``.
        Raises ProgramError when an input is missing or its shape or dtype does not fit.
        """
        environment = {**self._weights, **self.state, **self._prepared, **self._bind(inputs)}
        for op in self.program.ops:
            environment.update(self._evaluate(op, environment))
        return {name: environment[name] for name in (*self.program.outputs, *keep)}

    def _evaluate(self, op: Op, environment: Mapping[str, Array]) -> dict[str, Array]:
        """The results of ``op`` by name."""
        results = EVALUATORS[op.kind](self, op, [environment[name] for name in op.inputs])
        return dict(zip(op.outputs, results, strict=True))

    def round(self, x: Array) -> Array:
        """``x`` as the program dtype stores it in this mode."""
        return round_bfloat16(x) if self.mode == "bfloat16" else x.astype(self.compute, copy=False)

    def _storage(self, dtype: str) -> np.dtype[Any]:
        return self.compute if dtype in ("float32", "bfloat16") else np.dtype(dtype)

    def _load(self, name: str, weights: Fetch) -> Array:
        made = derive(self.program, name, weights)
        if self.program.values[name].dtype == "bfloat16":
            return self.round(made)
        return made.astype(self.compute)

    @staticmethod
    def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
        return dim if isinstance(dim, int) else sizes[dim]

    def _bind(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Check ``inputs`` against their declared types and one another."""
        sizes = dict(self._sizes)
        bound = {}
        for value in self.program.with_role(Role.INPUT):
            if value.name not in inputs:
                raise ProgramError(f"step input {value.name!r} is missing: need {value.type}")
            array = inputs[value.name]
            if len(array.shape) != len(value.shape) or array.dtype != np.dtype(value.dtype):
                raise ProgramError(f"step input {value.name!r}: need {value.type}, have {array.dtype}{array.shape}")
            for dim, size in zip(value.shape, array.shape, strict=True):
                known = dim if isinstance(dim, int) else sizes.setdefault(dim, size)
                if known != size:
                    raise ProgramError(f"step input {value.name!r}: need {known} for {dim}, have {array.shape}")
            bound[value.name] = array
        for name, symbol in (("cu_seqlens", "num_seqs"), ("cu_biases", "num_adjustments")):
            if sizes.get(f"{symbol}+1", 1) != sizes.get(symbol, 0) + 1:
                raise ProgramError(f"step input {name!r}: need {symbol} + 1 entries, have {sizes[f'{symbol}+1']}")
        return bound


Evaluator: TypeAlias = Callable[[Interpreter, Op, list[Array]], tuple[Array, ...]]


def _embedding(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    token_ids, last_tokens, table = operands
    slots = np.where(token_ids < 0, -1 - token_ids, 0)
    return (table[np.where(token_ids < 0, last_tokens[slots], token_ids)],)


def _rms_norm(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    x, weight = operands
    scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + at.compute.type(op.attrs.number("eps")))
    return (at.round(x / scale * weight),)


def _linear(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    return (operands[0] @ operands[1].T,)


def _linear_add(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    return (_sum(at, op, operands[2], operands[0] @ operands[1].T),)


def _sum(at: Interpreter, op: Op, a: Array, b: Array) -> Array:
    """a + b; if the op rounds, as tensors of the program dtype would have it."""
    return at.round(a + at.round(b)) if op.attrs.integer("rounded") else a + b


def _linear_silu_mul(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    gate, up = deinterleave(operands[0] @ operands[1].T, op.attrs.integer("features"))
    return (at.round(_silu_of(gate) * up),)


def _slice_columns(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    return (operands[0][:, op.attrs.integer("start") : op.attrs.integer("stop")],)


def _rotate(x: Array, table: Array, positions: Array, head_dim: int) -> Array:
    """Rotate the halves (a, b) of each head of x [T, heads * D] by its row's position."""
    cos, sin = np.split(table[positions][:, None, :], 2, axis=-1)
    a, b = np.split(x.reshape(len(x), -1, head_dim), 2, axis=-1)
    rotated: Array = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    return rotated


def _rope_table(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    frequencies, table = operands
    table[:] = rope_table_of(frequencies, len(table), op.attrs.number("attention_factor"))
    return (table,)


def _rope(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    x, table, positions = operands
    return (at.round(_rotate(x, table, positions, op.attrs.integer("head_dim"))),)


def _write(at: Interpreter, kv: Array, k: Array, v: Array, slot_mapping: Array) -> Array:
    """Store k and v [T, heads * D] at their slots of kv, in place."""
    _, _, heads, page_size, head_dim = kv.shape
    page, offset = np.divmod(slot_mapping, page_size)
    kv[page, 0, :, offset] = at.round(k).reshape(-1, heads, head_dim)
    kv[page, 1, :, offset] = at.round(v).reshape(-1, heads, head_dim)
    return kv


def _kv_write(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    kv, k, v, slot_mapping = operands
    return (_write(at, kv, k, v, slot_mapping),)


def _rope_kv_write(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    qkv, table, positions, slot_mapping, _, kv = operands
    heads, kv_heads, head_dim = (op.attrs.integer(key) for key in ("num_heads", "num_kv_heads", "head_dim"))
    q, k, v = np.split(qkv, [heads * head_dim, (heads + kv_heads) * head_dim], axis=1)
    rotated = (at.round(_rotate(x, table, positions, head_dim)) for x in (q, k))
    return (next(rotated), _write(at, kv, next(rotated), v, slot_mapping))


def _paged_attention(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    q, kv, cu_seqlens, context_lens, page_table = operands
    kv_heads, head_dim = op.attrs.integer("num_kv_heads"), op.attrs.integer("head_dim")
    page_size = kv.shape[3]
    out = np.zeros_like(q)
    for sequence, context in enumerate(context_lens):
        first, last = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        pages = page_table[sequence, : -(-context // page_size)]
        k, v = (kv[pages, part].swapaxes(0, 1).reshape(kv_heads, -1, head_dim)[:, :context] for part in (0, 1))
        rows = q[first:last].reshape(last - first, kv_heads, -1, head_dim)
        attended = _attend(at, rows, k, v, at.compute.type(op.attrs.number("scale")))
        out[first:last] = attended.reshape(last - first, -1)
    return (at.round(out),)


def _attend(at: Interpreter, q: Array, k: Array, v: Array, scale: Any) -> Array:
    """Causal attention of the last n of L positions: q [n, KV, G, D], k and v [KV, L, D] -> [n, KV, G, D]."""
    num_rows, context = len(q), k.shape[1]
    scores = np.matmul(q.transpose(1, 2, 0, 3), k.swapaxes(1, 2)[:, None]) * scale
    visible = np.arange(context) <= np.arange(context - num_rows, context)[:, None]
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: Array = np.matmul(at.round(weights), v[:, None]) / weights.sum(axis=-1, keepdims=True)
    return attended.transpose(2, 0, 1, 3)


def _silu_of(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) overflows to inf below -88, and x / inf is the right limit, -0
        result: Array = x / (1 + np.exp(-x))
    return result


def _silu(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    return (_silu_of(operands[0]),)


def _mul(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    return (at.round(operands[0] * operands[1]),)


def _silu_mul(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    return (at.round(_silu_of(operands[0]) * operands[1]),)


def _add(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    return (_sum(at, op, *operands),)


def _gather_rows(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    return (operands[0][operands[1]],)


def _adjust_logits(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    logits, *_, counts = operands
    return adjust_rows(logits, dict(zip(op.schema.operands, operands, strict=True)), counts), counts


def _sample(at: Interpreter, op: Op, operands: list[Array]) -> tuple[Array, ...]:
    logits, adjusted, *rows, last_tokens = operands
    named, shards = dict(zip(SAMPLE_OPERANDS, rows, strict=True)), op.attrs.integer("logprob_shards")
    return sample_rows(logits, adjusted, named, last_tokens, shards)


EVALUATORS: Mapping[str, Evaluator] = {
    "embedding": _embedding, "rms_norm": _rms_norm, "linear": _linear, "linear_add": _linear_add,
    "linear_silu_mul": _linear_silu_mul, "slice_columns": _slice_columns, "rope_table": _rope_table, "rope": _rope,
    "kv_write": _kv_write,
    "rope_kv_write": _rope_kv_write, "paged_attention": _paged_attention, "silu": _silu, "mul": _mul,
    "silu_mul": _silu_mul, "add": _add, "gather_rows": _gather_rows, "adjust_logits": _adjust_logits,
    "sample": _sample,
}  # fmt: skip
"""One evaluator for every kind of op that has a schema."""


@dataclass(frozen=True)
class Chunk:
    """One sequence's part of a step: ``token_ids`` at positions ``start``, ``start + 1``, ... on ``pages``.

    ``scored`` prompt tokens: logit rows for every token but the last, with the following token as target.
    ``draws``: a logit row for the last token, sampled with the remaining fields and recorded in ``slot``.
    Penalties count the tokens in ``slot``; the first ``prompt_len`` are the prompt's (None: all of the chunk).
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    draws: bool = True
    scored: bool = False
    slot: int = -1
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    num_logprobs: int = -1
    prompt_len: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def adjusted(self) -> bool:
        """Whether this step has an adjustment for it."""
        return self.penalized or (self.draws and bool(self.logit_bias or self.allowed_token_ids is not None))


def step_inputs(program: Program, chunks: Sequence[Chunk]) -> dict[str, Array]:
    """The inputs of the step that runs ``chunks`` together, in that order."""
    page_size, max_pages = program.page_size, -(-program.max_model_len // program.page_size)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    rows: dict[str, list[float]] = {name: [] for name in SAMPLE_OPERANDS}
    page_table = np.zeros((len(chunks), max_pages), np.int32)
    asked = _Adjustments(program.metadata.integer("vocab_size"))
    for index, chunk in enumerate(chunks):
        page_table[index, : len(chunk.pages)] = chunk.pages
        for offset, token in enumerate(chunk.token_ids):
            position, is_last = chunk.start + offset, offset == len(chunk.token_ids) - 1
            if chunk.draws if is_last else chunk.scored:
                target = -1 if is_last else chunk.token_ids[offset + 1]
                adjustment = asked.count if is_last and chunk.adjusted else -1
                logit_rows.append(len(tokens))
                _append_row(rows, chunk, position, target, adjustment)
            tokens.append(token)
            positions.append(position)
            slots.append(chunk.pages[position // page_size] * page_size + position % page_size)
        if chunk.adjusted:
            asked.add(chunk, index, len(logit_rows) - 1 if chunk.draws else -1)
    ends = np.cumsum([0] + [len(chunk.token_ids) for chunk in chunks])
    context_lens = np.array([chunk.start + len(chunk.token_ids) for chunk in chunks], np.int32)
    return {
        "token_ids": np.array(tokens, np.int32), "positions": np.array(positions, np.int32),
        "slot_mapping": np.array(slots, np.int64), "cu_seqlens": ends.astype(np.int32),
        "context_lens": context_lens, "page_table": page_table, "logit_rows": np.array(logit_rows, np.int32),
        **{name: np.array(rows[name], dtype) for name, dtype in SAMPLE_OPERANDS.items()}, **asked.inputs(),
    }  # fmt: skip


class _Adjustments:
    """Collects the inputs that describe adjustments."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._values: dict[str, list[float]] = {name: [] for name in ADJUST_OPERANDS}
        self._values["cu_biases"].append(0)
        self._masks: list[Array] = []

    @property
    def count(self) -> int:
        return len(self._values["adjust_seq"])

    def add(self, chunk: Chunk, sequence: int, row: int) -> None:
        biases = sorted(chunk.logit_bias.items()) if row >= 0 else []
        mask_row = -1
        if row >= 0 and chunk.allowed_token_ids is not None:
            mask_row = len(self._masks)
            self._masks.append(token_mask(chunk.allowed_token_ids, self._vocab_size))
        fields = {
            "adjust_seq": sequence, "adjust_row": row, "count_slot": chunk.slot if chunk.penalized else -1,
            "prompt_lens": chunk.start + len(chunk.token_ids) if chunk.prompt_len is None else chunk.prompt_len,
            "repetition_penalty": chunk.repetition_penalty, "presence_penalty": chunk.presence_penalty,
            "frequency_penalty": chunk.frequency_penalty,
            "cu_biases": self._values["cu_biases"][-1] + len(biases), "mask_row": mask_row,
        }  # fmt: skip
        for name, value in fields.items():
            self._values[name].append(value)
        self._values["bias_ids"] += [token for token, _ in biases]
        self._values["bias_values"] += [value for _, value in biases]

    def inputs(self) -> dict[str, Array]:
        made = {name: np.array(self._values[name], dtype) for name, (dtype, _) in ADJUST_OPERANDS.items()}
        masks = np.array(self._masks, np.int32).reshape(len(self._masks), mask_words(self._vocab_size))
        return {**made, "token_masks": masks}


def token_mask(token_ids: Sequence[int], vocab_size: int) -> Array:
    """int32[W]: a row of token_masks that allows ``token_ids``."""
    bits = np.zeros(mask_words(vocab_size) * MASK_BITS, np.uint8)
    bits[list(token_ids)] = 1
    words: Array = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    return words


def step_counts(inputs: Mapping[str, Array]) -> tuple[int, ...]:
    """The six sizes of the step that has ``inputs``, as step_sizes holds them: STEP_COUNTS."""
    counted = ("token_ids", "context_lens", "logit_rows", "adjust_seq", "bias_ids", "token_masks")
    return tuple(len(inputs[name]) for name in counted)


def _append_row(rows: dict[str, list[float]], chunk: Chunk, position: int, target: int, adjustment: int) -> None:
    fields = {
        "logit_target": target, "temperature": chunk.temperature, "top_p": chunk.top_p, "min_p": chunk.min_p,
        "top_k": chunk.top_k, "seed": chunk.seed, "draw_position": position + 1, "num_logprobs": chunk.num_logprobs,
        "state_slot": chunk.slot if target < 0 else -1, "adjustment": adjustment,
    }  # fmt: skip
    for name, value in fields.items():
        rows[name].append(value)


def run_prompt(
    program: Program, weights: Fetch, token_ids: Sequence[int], *, mode: str | None = None, chunk_size: int = 0
) -> Array:
    """Logits [len(token_ids), vocab_size] of every position of one sequence, in chunks of ``chunk_size`` (0: one)."""
    num_pages = -(-len(token_ids) // program.page_size)
    interpreter = Interpreter(program, weights, num_pages=num_pages, num_slots=1, mode=mode)
    logits = next(op.operand("logits") for op in program.ops if op.kind == "sample")
    size = chunk_size or len(token_ids)
    parts = []
    for start in range(0, len(token_ids), size):
        chunk = Chunk(token_ids[start : start + size], start, range(num_pages), scored=True)
        parts.append(interpreter.run(step_inputs(program, [chunk]), keep=[logits])[logits])
    return np.concatenate(parts)
