"""The KernelSpecs of solution ``flashinfer``: its attention over our pages, launched by kernels/flashinfer/*.cu.

Each call is two stages. The *plan* is a kernel of ours that cuts the step's sequences into pieces, one per thread
block of a grid that the bucket fixes; it depends on nothing that differs between layers, so it runs once a step, and
its arrays lie in a workspace that all layers share. The *attention* is FlashInfer's: in decode buckets with room for
it, positions are cut too, and a second kernel merges what the pieces give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenspeed.kernels.library import LibraryKernel, Part, parts, parts_bytes
from tokenspeed.kernels.registry import Band, Constraint, KernelSpec, MultipleOf, Request, Stage, argument_rules

TARGETS = ("cuda:sm_90a", "cuda:sm_100a", "cuda:sm_103a", "cuda:sm_120a")
SPLIT_BLOCKS = 512
"""Thread blocks of a decode grid (sequences times KV heads) from which on positions are not cut: the GPU is full."""
MIN_CHUNK = 128
"""Least positions of a piece."""
LARGE_TILE, SMALL_TILE = 128, 64
"""Rows (token and q head of a group) of a query tile in mixed buckets, for many and for few tokens."""
LARGE_TILE_ROWS = 2048
"""Rows in a bucket from which on the large tile is used."""
_SHARED_PER_MULTIPROCESSOR = {"cuda:sm_120a": 100 << 10}  # elsewhere 228 KiB: CUDA C++ Programming Guide
# What both phases get first, in the order that kernels/flashinfer/attention.cuh expects.
_ARRAYS = "shared request, shared kv_tile, shared valid, shared indptr, shared last_page, shared chunk_size"
_PLAN_ARGUMENTS = f"read cu_seqlens, read context_lens, sizes step_sizes, {_ARRAYS}"
_ARGUMENTS = f"read q, read kv, read page_table, write out, {_ARRAYS}"

HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""q heads of a KV head for which FlashInfer has a decode kernel."""


@dataclass(frozen=True)
class HeadShapes:
    """Heads of a shape for which FlashInfer has kernels."""

    def __str__(self) -> str:
        return f"head_dim in {HEAD_DIMS}, q heads of a KV head in {GROUPS}"

    def problem(self, sizes: Mapping[str, int]) -> str | None:
        if sizes["head_dim"] not in HEAD_DIMS:
            return f"need head_dim to be one of {HEAD_DIMS}, have {sizes['head_dim']}"
        if _group(sizes) not in GROUPS:
            return f"need q heads of a KV head to be one of {GROUPS}, have {_group(sizes)}"
        return None


def _group(sizes: Mapping[str, int]) -> int:
    return sizes["num_heads"] // sizes["num_kv_heads"]


_CONSTRAINTS: tuple[Constraint, ...] = (HeadShapes(), MultipleOf("page_stride", 16))


def flashinfer_specs(problem: str | None) -> Iterator[KernelSpec]:
    """Both kernels. ``problem``: why they cannot be captured here (``compile.capture_build.capture_problem``), which
    then is why they refuse every call."""
    for phase, launches, workspace, shared in (
        ("decode", _decode, _decode_workspace, _decode_shared),
        ("mixed", _prefill, None, _prefill_shared),
    ):
        yield KernelSpec(
            op="paged_attention",
            solution="flashinfer",
            symbol=f"flashinfer_{phase}",
            targets=TARGETS,
            dtypes=("bfloat16",),
            arguments=(),
            band=Band.MATRIX,
            traits={"phase": frozenset({phase})},
            features=frozenset({"run_invariant"}),
            constraints=_CONSTRAINTS,
            workspace=workspace,
            shared_workspace=shared,
            launches=launches,
            unavailable=problem or "",
        )


# --- decode: one token per sequence ---------------------------------------------------------------


def _split(sizes: Mapping[str, int]) -> bool:
    return sizes["num_seqs"] * sizes["num_kv_heads"] < SPLIT_BLOCKS


def _decode_tiles(sizes: Mapping[str, int]) -> int:
    """Thread blocks of a KV head: one per sequence and, where positions are cut, what fills the GPU besides."""
    spare = -(-SPLIT_BLOCKS // sizes["num_kv_heads"]) if _split(sizes) else 0
    return sizes["num_seqs"] + spare


def _decode_plan(sizes: Mapping[str, int]) -> tuple[Part, ...]:
    tiles, seqs = _decode_tiles(sizes), sizes["num_seqs"]
    return parts(
        request=4 * tiles, kv_tile=4 * tiles, valid=tiles, indptr=4 * (seqs + 1), last_page=4 * seqs,
        out_indptr=4 * (seqs + 1), chunk_size=4,
    )  # fmt: skip


def _decode_partial(sizes: Mapping[str, int]) -> tuple[Part, ...]:
    """Output in the artifact dtype and float32 log-sum-exp of every piece."""
    rows = _decode_tiles(sizes) * sizes["num_heads"]
    return parts(partial_out=2 * rows * sizes["head_dim"], partial_lse=4 * rows) if _split(sizes) else ()


def _decode_workspace(sizes: Mapping[str, int]) -> int:
    return parts_bytes(_decode_partial(sizes))


def _decode_shared(sizes: Mapping[str, int]) -> int:
    return parts_bytes(_decode_plan(sizes))


def _decode(request: Request) -> tuple[Stage, ...]:
    sizes = request.sizes
    constants = {"TOKENSPEED_HEAD_DIM": sizes["head_dim"], "TOKENSPEED_GROUP": _group(sizes)}
    plan, tiles, split = _decode_plan(sizes), _decode_tiles(sizes), _split(sizes)
    return (
        _stage(
            "decode", "decode_plan", constants, plan,
            f"{_PLAN_ARGUMENTS}, shared out_indptr",
            {"num_seqs": sizes["num_seqs"], "pages_per_seq": sizes["pages_per_seq"], "page_size": sizes["page_size"],
             "tiles": tiles, "min_chunk": MIN_CHUNK if split else 0},
        ),
        _stage(
            "decode", "decode", constants, (*plan, *_decode_partial(sizes)),
            f"{_ARGUMENTS}, shared out_indptr"
            + (", workspace partial_out, workspace partial_lse" if split else ""),
            {"num_seqs": sizes["num_seqs"], "page_size": sizes["page_size"], "page_stride": sizes["page_stride"],
             "num_kv_heads": sizes["num_kv_heads"], "tiles": tiles, "split": int(split)},
        ),
    )  # fmt: skip


# --- mixed: sequences of any number of tokens ------------------------------------------------------


def _tile(sizes: Mapping[str, int]) -> int:
    return LARGE_TILE if sizes["num_tokens"] * _group(sizes) >= LARGE_TILE_ROWS else SMALL_TILE


def _prefill_tiles(sizes: Mapping[str, int]) -> int:
    """Tiles of a KV head at most: each sequence rounds up to whole ones."""
    return sizes["num_tokens"] * _group(sizes) // _tile(sizes) + sizes["num_seqs"]


def _prefill_plan(sizes: Mapping[str, int]) -> tuple[Part, ...]:
    tiles, seqs = _prefill_tiles(sizes), sizes["num_seqs"]
    return parts(
        request=4 * tiles, query_tile=4 * tiles, kv_tile=4 * tiles, valid=tiles, indptr=4 * (seqs + 1),
        last_page=4 * seqs, chunk_size=4,
    )  # fmt: skip


def _prefill_shared(sizes: Mapping[str, int]) -> int:
    return parts_bytes(_prefill_plan(sizes))


def _prefill(request: Request) -> tuple[Stage, ...]:
    sizes = request.sizes
    constants = {
        "TOKENSPEED_HEAD_DIM": sizes["head_dim"],
        "TOKENSPEED_GROUP": _group(sizes),
        "TOKENSPEED_TILE": _tile(sizes),
        "TOKENSPEED_MMA_KV": _mma_kv(_tile(sizes), sizes["head_dim"], str(request.target)),
    }
    plan, tiles = _prefill_plan(sizes), _prefill_tiles(sizes)
    return (
        _stage(
            "prefill", "prefill_plan", constants, plan,
            f"{_PLAN_ARGUMENTS}, shared query_tile",
            {"num_seqs": sizes["num_seqs"], "pages_per_seq": sizes["pages_per_seq"], "page_size": sizes["page_size"],
             "tiles": tiles},
        ),
        _stage(
            "prefill", "prefill", constants, plan,
            f"{_ARGUMENTS}, read cu_seqlens, shared query_tile",
            {"num_seqs": sizes["num_seqs"], "page_size": sizes["page_size"], "page_stride": sizes["page_stride"],
             "num_kv_heads": sizes["num_kv_heads"], "tiles": tiles},
        ),
    )  # fmt: skip


def _mma_kv(tile: int, head_dim: int, target: str) -> int:
    """KV tile of a warp, in units of 16 positions, that FlashInfer picks: the largest power of two, at most 8 over the
    16-row units of a warp's queries, with which two thread blocks fit into the shared memory of a multiprocessor."""
    shared = _SHARED_PER_MULTIPROCESSOR.get(target, 228 << 10)
    queries, unit = 2 * tile * head_dim, 2 * 2 * 16 * head_dim  # bytes: of queries; of K and V of 16 positions
    blocks = 2 if shared >= 2 * (queries + unit) else 1
    most = min((shared // blocks - queries) // unit, 8 // (2 if tile == LARGE_TILE else 1))
    return 1 << max(0, most.bit_length() - 1)


def _stage(
    source: str,
    name: str,
    constants: Mapping[str, int],
    placed: tuple[Part, ...],
    arguments: str,
    integers: Mapping[str, int],
) -> Stage:
    plan = name.endswith("plan")
    kernel = LibraryKernel(
        library="flashinfer",
        source=f"flashinfer/{source}.cu",
        function=f"tokenspeed_flashinfer_{name}",
        constants=tuple(sorted(constants.items())),
        integers=tuple(integers.items()),
        parts=placed,
    )
    rules = argument_rules(arguments if plan else f"{arguments}, float scale")
    return Stage(kernel.function, rules, "plan" if plan else "", library=kernel, once=plan)
