"""Staging: what a step uses of its io set, copied from the host's memory to region io.

The host writes a step's inputs into memory of its own, which the device can read. The first node of a step's graph
brings them to region io, where the other kernels read them, so starting a step is one launch of its graph. A read of
the host's memory takes a GPU 1.5 to 2 us, so each program makes two of them, one after the other: the sizes of the
step, and all that it copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from tokenspeed.bucket import Bucket
from tokenspeed.kernels.registry import Stage, device_stage
from tokenspeed.kernels.triton.common import pdl_wait
from tokenspeed.step import COUNTED_BY, INPUTS, STEP_COUNTS, STEP_SIZES, IoTensor, PlacedTensor
from tokenspeed.target import Target

WORD = 4
"""Bytes that are copied as one: the items of all tensors are multiples of it."""
BLOCK = 1024
"""Words that a program has in flight."""
ROWS = 4
"""Rows of the page table that a program copies side by side."""
WIDE_WORDS = 1 << 16
"""A tensor of more words is wide: few steps use it, but those use much of it."""
WIDE_PROGRAMS = 16
"""Programs of a wide tensor: they keep 64 KiB in flight, about what the bus moves in the time of a read."""
MOST_PARTS = 8
"""Parts at most in which programs copy a tensor or rows of the page table side by side."""
_TABLE, _LENGTHS = "page_table", "context_lens"
_FIELDS = tl.constexpr(5)
"""Numbers that TENSORS has for each tensor."""
_NUM_SEQS = tl.constexpr(STEP_COUNTS.index("num_seqs"))


@triton.jit
def _copy(source, target, first, used, part, parts, BLOCK: tl.constexpr):
    """Words [first, first + used) from source to target: part ``part`` of ``parts``, block by block."""
    for at in range(part * BLOCK, used, parts * BLOCK):
        word = at + tl.arange(0, BLOCK)
        values = tl.load(source + first + word, mask=word < used)
        tl.store(target + first + word, values, mask=word < used)


@triton.jit
def _copy_rows(counts, lengths, source, target, row, part, parts, SEQS: tl.constexpr, PAGES: tl.constexpr,
               PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of rows [row, row + ROWS) of the page table [SEQS][PAGES] the pages of each sequence's context."""
    rows = row + tl.arange(0, ROWS)
    length = tl.load(lengths + rows, mask=rows < SEQS, other=0)
    there = rows < tl.minimum(tl.load(counts + _NUM_SEQS), SEQS)
    pages = tl.where(there, tl.minimum((length + (PAGE_SIZE - 1)) // PAGE_SIZE, PAGES), 0)
    COLUMNS: tl.constexpr = BLOCK // ROWS
    for at in range(part * COLUMNS, tl.max(pages, 0), parts * COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        word = rows[:, None] * PAGES + column[None, :]
        used = column[None, :] < pages[:, None]
        tl.store(target + word, tl.load(source + word, mask=used), mask=used)


@triton.jit
def stage_io(step_sizes, source, target, TENSORS: tl.constexpr, NARROW: tl.constexpr, TABLE: tl.constexpr,
             LENGTHS: tl.constexpr, SEQS: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr,
             WIDE_PROGRAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Copy what the step uses from source to target, both int32, laid out alike.

    TENSORS has in turn for each tensor: the word at which it begins, words of an item, index into step_sizes of what
    counts items (-1: nothing does), how many more there are, and how many at most. The first NARROW tensors have a
    program in x each, the others WIDE_PROGRAMS; each of those behind copies ROWS rows of the page table at word TABLE,
    where context_lens at word LENGTHS say how much of a row is used. Programs in y copy parts. Sizes beyond what there
    is count as all of it.
    """
    program, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    pdl_wait(PDL)
    COUNT: tl.constexpr = len(TENSORS) // _FIELDS
    ROW_PROGRAMS: tl.constexpr = NARROW + (COUNT - NARROW) * WIDE_PROGRAMS
    if program >= ROW_PROGRAMS:
        _copy_rows(step_sizes, source + LENGTHS, source + TABLE, target + TABLE, (program - ROW_PROGRAMS) * ROWS, part,
                   parts, SEQS, PAGES, PAGE_SIZE, ROWS, BLOCK)  # fmt: skip
    else:
        tensor = program
        if program >= NARROW:
            tensor = NARROW + (program - NARROW) // WIDE_PROGRAMS
            part = part * WIDE_PROGRAMS + (program - NARROW) % WIDE_PROGRAMS
            parts = parts * WIDE_PROGRAMS
        first, words, counted, more, most = 0, 1, -1, 0, 0
        for i in tl.static_range(COUNT):
            if tensor == i:
                first, words, counted = TENSORS[_FIELDS * i], TENSORS[_FIELDS * i + 1], TENSORS[_FIELDS * i + 2]
                more, most = TENSORS[_FIELDS * i + 3], TENSORS[_FIELDS * i + 4]
        count = tl.load(step_sizes + counted, mask=counted >= 0, other=0)
        _copy(source, target, first, (tl.minimum(count, most - more) + more) * words, part, parts, BLOCK)


@dataclass(frozen=True)
class Extent:
    """A tensor of which a step uses ``step_sizes[counted] + more`` items (``more`` alone where ``counted`` is -1), of
    at most ``most``. ``offset`` and ``item_bytes`` in bytes."""

    offset: int
    item_bytes: int
    counted: int
    more: int
    most: int

    @property
    def words(self) -> int:
        return self.most * self.item_bytes // WORD

    @property
    def fields(self) -> tuple[int, ...]:
        return self.offset // WORD, self.item_bytes // WORD, self.counted, self.more, self.most


@dataclass(frozen=True)
class PageTable:
    """The page table, of ``rows`` rows of ``pages`` pages, and the context lengths: byte offsets."""

    offset: int
    lengths: int
    rows: int
    pages: int
    page_size: int


def inputs_stage(target: Target, io: Sequence[PlacedTensor], page_size: int, bucket: Bucket) -> Stage:
    """The launch that brings what a step of ``bucket`` uses of ``io`` (the tensors of IO) to region io: all of
    STEP_SIZES and INPUTS. Its arguments are the step's sizes, where inputs come from, and where they go."""
    placed = {tensor.name: tensor for tensor in io}
    extents = [_extent(tensor, placed[tensor.name]) for tensor in (STEP_SIZES, *INPUTS) if tensor.name != _TABLE]
    table = placed[_TABLE]
    rows, pages = table.shape
    pages_of = PageTable(table.offset, placed[_LENGTHS].offset, rows, pages, page_size)
    parts = min(MOST_PARTS, triton.cdiv(2 * bucket.num_tokens, BLOCK))  # the widest items have two words
    return copy_stage(target, extents, parts, pages_of, bucket.num_seqs)


def _extent(tensor: IoTensor, placed: PlacedTensor) -> Extent:
    first, most = tensor.shape[0], placed.shape[0]
    counted, more = COUNTED_BY[first] if isinstance(first, str) else (-1, first)
    return Extent(placed.offset, placed.nbytes // most, counted, more, most)


def copy_stage(
    target: Target, extents: Sequence[Extent], parts: int = 1, table: PageTable | None = None, num_seqs: int = 0
) -> Stage:
    """The launch that copies what a step uses of ``extents``, and of ``table`` the rows of up to ``num_seqs``
    sequences, each in ``parts`` parts."""
    assert all(e.offset % WORD == e.item_bytes % WORD == 0 for e in extents), extents
    narrow = [extent for extent in extents if extent.words <= WIDE_WORDS]
    wide = [extent for extent in extents if extent.words > WIDE_WORDS]
    rows = table or PageTable(0, 0, 0, 1, 1)
    programs = len(narrow) + WIDE_PROGRAMS * len(wide) + triton.cdiv(num_seqs, ROWS)
    stage = device_stage(
        module=__name__,
        function=stage_io,
        arguments="sizes step_sizes, read source, write target",
        types="*i32, *i32, *i32",
        constants={
            "TENSORS": tuple(number for extent in (*narrow, *wide) for number in extent.fields),
            "NARROW": len(narrow), "WIDE_PROGRAMS": WIDE_PROGRAMS, "ROWS": ROWS, "BLOCK": BLOCK,
            "TABLE": rows.offset // WORD, "LENGTHS": rows.lengths // WORD,
            "SEQS": rows.rows, "PAGES": rows.pages, "PAGE_SIZE": rows.page_size,
        },
        num_warps=4 if target.gpu.warp_size == 32 else 2,
        num_stages=1,
        grid=(programs, parts, 1),
        target=target,
    )  # fmt: skip
    return replace(stage, programmatic=False)  # nothing comes before it
