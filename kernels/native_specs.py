"""KernelSpecs of the native CPU kernels (kernels/native). Symbols and signatures are those of its table.

Each kernel exists per instruction set; one set runs on its own target and on every target above it, so a
machine with more has the narrower kernels as lower candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tokenspeed.kernels.registry import (
    FIXED_ORDER,
    SAMPLER_FEATURES,
    ArgumentRule,
    AtMost,
    Band,
    Constraint,
    KernelSpec,
    MultipleOf,
    Registry,
    Workspace,
    argument_rules,
    fixed_order,
)
from tokenspeed.target import CPU_ARCHS

FEATURES = FIXED_ORDER
"""What every native kernel guarantees: a row's bits depend on that row alone (batch_invariant), sums are taken
in one order fixed at build (fixed_reduction_order), and no bit depends on timing or on the number of workers
(run_invariant)."""
_OF_OPS: Mapping[str, frozenset[str]] = {"sample": SAMPLER_FEATURES}
"""What the kernels of some ops guarantee besides."""

_BANDS = {"avx2": Band.PORTABLE, "avx512": Band.VECTOR, "avx512bf16": Band.DOT_PRODUCT, "amx": Band.MATRIX}
_LOWEST_ARCH = {"avx2": "x86-64-v3", "avx512": "x86-64-v4", "avx512bf16": "x86-64-v4+bf16", "amx": "x86-64-v4+amx"}
_SHORT = {"float32": "f32", "bfloat16": "bf16"}
_EVERY_ISA: Mapping[str, tuple[str, ...]] = {
    "float32": ("avx2", "avx512"), "bfloat16": ("avx2", "avx512", "avx512bf16", "amx"),
}  # fmt: skip
_VECTOR_ISA: Mapping[str, tuple[str, ...]] = {"float32": ("avx2", "avx512"), "bfloat16": ("avx2", "avx512")}

MAX_HEAD_DIM = 256
"""kRopeMaxHeadDim and kAttentionMaxHeadDim."""
MAX_PAGE_SIZE = 256
"""kAttentionMaxPageSize."""
SPLIT_SEQS = 64
"""kAttentionSplitSeqs: most sequences in a step whose splits are computed in parallel."""

_ARGUMENTS: Mapping[str, tuple[ArgumentRule, ...]] = {
    op: argument_rules(text)
    for op, text in {
        "embedding": "read token_ids, read last_tokens, read table, write out, step num_tokens, int H",
        "rms_norm": "read x, read weight, write out, rows x, int H, float eps",
        "linear": "read x, read weight, write out, rows x, int N, int K",
        "linear_add": "read x, read weight, read residual, write out, rows x, int N, int K, int rounded",
        "linear_silu_mul": "read x, read weight, write out, rows x, int F, int K",
        "rope_table": "read inverse_frequencies, write table, int num_positions, int head_dim, float attention_factor",
        "rope_kv_write": "read qkv, read rope_table, read positions, read slot_mapping, read cu_seqlens, write kv, "
        "write q, step num_tokens, step num_seqs, int num_heads, int num_kv_heads, int head_dim, int page_size, "
        "int page_stride",
        "paged_attention": "read q, read kv, read cu_seqlens, read context_lens, read page_table, write out, "
        "workspace attention, step num_tokens, step num_seqs, int num_heads, int num_kv_heads, int head_dim, "
        "int page_size, int page_stride, int pages_per_seq, int split_positions, float scale",
        "gather_rows": "read x, read logit_rows, write out, step num_logit_rows, int H",
        "adjust_logits": "read logits, read token_ids, read last_tokens, read positions, read cu_seqlens, "
        "read adjust_seq, read adjust_row, read count_slot, read prompt_lens, read repetition_penalty, "
        "read presence_penalty, read frequency_penalty, read cu_biases, read mask_row, read bias_ids, "
        "read bias_values, read token_masks, update token_counts, write adjusted, sizes step_sizes, int V",
        "sample": "read logits, read adjusted, read logit_target, read temperature, read top_p, read min_p, "
        "read top_k, read seed, read draw_position, read num_logprobs, read state_slot, read adjustment, "
        "write last_tokens, write out_token, write out_logprob, write out_rank, write out_top_ids, "
        "write out_top_logprobs, step num_logit_rows, int V, int logprob_shards",
    }.items()
}


def targets_of(isa: str) -> tuple[str, ...]:
    """Targets whose machines run instruction set ``isa``: its own and all above."""
    return tuple(f"cpu:{arch}" for arch in CPU_ARCHS[CPU_ARCHS.index(_LOWEST_ARCH[isa]) :])


def native_registry() -> Registry:
    """The registry of all native CPU kernels, and of the same as solution ``aok``."""
    return Registry(fixed_order(native_specs()))


def native_specs() -> Iterator[KernelSpec]:
    """Every native kernel."""
    heads: tuple[Constraint, ...] = (
        MultipleOf("head_dim", 16),
        AtMost("head_dim", MAX_HEAD_DIM),
        MultipleOf("page_size", 32),
    )
    split = (*heads, AtMost("page_size", MAX_PAGE_SIZE), MultipleOf("split_positions", "page_size"))
    for dtype in ("float32", "bfloat16"):
        # bfloat16 panels hold pairs of columns, which kernels read together.
        even_rows: tuple[Constraint, ...] = (MultipleOf("H", 2),) if dtype == "bfloat16" else ()
        columns: tuple[Constraint, ...] = (MultipleOf("K", 2),) if dtype == "bfloat16" else ()
        for isa in _VECTOR_ISA[dtype]:
            yield _spec("embedding", dtype, isa, even_rows, layout="panel16")
            yield _spec("rms_norm", dtype, isa, layout="rows")
            yield _spec("rope_kv_write", dtype, isa, heads, layout="rows")
        for isa in _EVERY_ISA[dtype]:
            # The fused multiply-adds of AVX2 and AVX-512 are the same arithmetic in the same order.
            fma = "fma" if isa in ("avx2", "avx512") else isa
            for op in ("linear", "linear_add", "linear_silu_mul"):
                yield _spec(op, dtype, isa, columns, layout="panel16", bitwise=fma)
            yield _spec("paged_attention", dtype, isa, split, workspace=attention_workspace)
    yield _spec("rope_table", None, "avx2", layout="rows")
    for isa in ("avx2", "avx512"):
        yield _spec("gather_rows", None, isa)
        yield _spec("adjust_logits", None, isa)
        yield _spec("sample", None, isa)


def _spec(
    op: str,
    dtype: str | None,
    isa: str,
    constraints: tuple[Constraint, ...] = (),
    *,
    layout: str | None = None,
    workspace: Workspace | None = None,
    bitwise: str | None = None,
) -> KernelSpec:
    kernel = "gather_rows_f32" if op == "gather_rows" else op if dtype is None else f"{op}_{_SHORT[dtype]}"
    return KernelSpec(
        op=op,
        solution="native",
        symbol=f"{kernel}_{isa}",
        targets=targets_of(isa),
        dtypes=tuple(_SHORT) if dtype is None else (dtype,),
        arguments=_ARGUMENTS[op],
        band=_BANDS[isa],
        traits={},
        features=FEATURES | _OF_OPS.get(op, frozenset()),
        constraints=constraints,
        weight_layout=layout,
        workspace=workspace,
        bitwise_class="" if bitwise is None else f"{kernel}/{bitwise}",
    )


def attention_workspace(sizes: Mapping[str, int]) -> int:
    """``attention_workspace_bytes`` of kernels/native/attention.h: a record of head_dim + 16 floats per sequence,
    q head and split."""
    splits = -(-sizes["pages_per_seq"] * sizes["page_size"] // sizes["split_positions"])
    seqs = min(sizes["num_seqs"], SPLIT_SEQS)
    return seqs * sizes["num_heads"] * splits * (sizes["head_dim"] + 16) * 4
