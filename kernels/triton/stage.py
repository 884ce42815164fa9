"""Staging: what a step uses of its io set, copied from the host's memory to region io.

The host writes a step's inputs into memory of its own, which the device can read. The first node of a step's graph
brings them to region io, where the other kernels read them, so starting a step is one launch of its graph.

A read of the host's memory takes a GPU microseconds, and reads that wait for each other add up, as do programs that
read. So few programs read, each much at a time, and most of them once: what a step counts by tokens, sequences and
logit rows is copied for as many as the step's bucket has. That needs no look at the step's own sizes. What lies
beyond them is what an earlier step left there, in either region: memory of the tensor, which no kernel reads. Only
what few steps use, or use little of, waits for a read: adjustments for their numbers, the ends of long rows of the
page table for the lengths of the contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from tokenspeed.bucket import Bucket
from tokenspeed.kernels.registry import Stage, device_stage
from tokenspeed.kernels.triton.common import pdl_wait
from tokenspeed.step import COUNTED_BY, INPUTS, STEP_COUNTS, STEP_SCALARS, STEP_SIZES, IoTensor, PlacedTensor, align
from tokenspeed.target import Target

WORD = 4
"""Bytes that are copied as one: the items of all tensors are multiples of it."""
VECTOR = 4
"""Words that a thread copies with one access, where a tensor has room for whole ones."""
BLOCK = 1024
"""Words of a tensor that a program has in flight."""
WIDE_BLOCK = 4096
"""The same of a wide tensor: COUNTED_PROGRAMS of them are about what the bus moves in the time of a read."""
WIDE_WORDS = 8 * BLOCK
"""A tensor of more words is wide."""
TOGETHER = 6
"""Tensors that a program copies side by side, without waiting for one before it reads the next."""
MOST_PARTS = 16
"""Programs at most that copy a tensor side by side."""
COUNTED_PROGRAMS = 8
"""Programs that read how many adjustments, biases and masks there are; nearly always none."""
ROWS = 16
"""Rows of the page table that a program copies side by side."""
HEAD_PAGES = BLOCK // ROWS
"""Pages of each row that are copied without a look at the length of its context."""
_TABLE, _LENGTHS = "page_table", "context_lens"
_FIELDS = tl.constexpr(7)
"""Numbers that TENSORS has for each tensor."""
_NUM_SEQS = tl.constexpr(STEP_COUNTS.index("num_seqs"))


@triton.jit
def _used(counts, TENSORS: tl.constexpr, AT: tl.constexpr):
    """Words that are copied of the tensor whose fields begin at AT: whole vectors, none where no items are counted."""
    COUNTED: tl.constexpr = TENSORS[AT + 2]
    MORE: tl.constexpr = TENSORS[AT + 3]
    items = MORE
    if COUNTED >= 0:
        items = tl.where(counts[COUNTED] > 0, tl.minimum(counts[COUNTED], TENSORS[AT + 4] - MORE) + MORE, 0)
    return tl.cdiv(items * TENSORS[AT + 1], TENSORS[AT + 5]) * TENSORS[AT + 5]


@triton.jit
def _words(block, BLOCK: tl.constexpr):
    return block * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _copy_together(source, target, counts, part, parts, TENSORS: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr):
    """Part ``part`` of ``parts`` of the tensors whose fields are [BEGIN, END) of TENSORS, block by block: one of each
    tensor at a time, and all are read before any is written."""
    blocks = 0
    for i in tl.static_range(BEGIN, END, _FIELDS):
        blocks = tl.maximum(blocks, tl.cdiv(_used(counts, TENSORS, i), TENSORS[i + 6]))
    for block in range(part, blocks, parts):
        values = ()
        for i in tl.static_range(BEGIN, END, _FIELDS):
            word = _words(block, TENSORS[i + 6])
            read = tl.load(source + TENSORS[i] + word, mask=word < _used(counts, TENSORS, i))
            values += (read,)  # type: ignore[assignment]
        for i in tl.static_range(BEGIN, END, _FIELDS):
            word = _words(block, TENSORS[i + 6])
            used = _used(counts, TENSORS, i)
            tl.store(target + TENSORS[i] + word, values[(i - BEGIN) // _FIELDS], mask=word < used)


@triton.jit
def _copy_counted(source, target, step_sizes, part, parts, TENSORS: tl.constexpr, BEGIN: tl.constexpr,
                  END: tl.constexpr):  # fmt: skip
    """As ``_copy_together``, with the counts of the step: those that nothing needs are not read."""
    counts = (tl.load(step_sizes), tl.load(step_sizes + 1), tl.load(step_sizes + 2), tl.load(step_sizes + 3),
              tl.load(step_sizes + 4), tl.load(step_sizes + 5))  # fmt: skip
    _copy_together(source, target, counts, part, parts, TENSORS, BEGIN, END)


@triton.jit
def _copy_tile(source, target, rows, begin, used, PAGES: tl.constexpr, COLUMNS: tl.constexpr):
    """Of each of ``rows`` COLUMNS pages from ``begin`` on, before page ``used`` of the row."""
    column = begin + tl.arange(0, COLUMNS)
    word = rows[:, None] * PAGES + column[None, :]
    inside = column[None, :] < used[:, None]
    tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


@triton.jit
def _copy_row(source, target, used, BLOCK: tl.constexpr):
    for at in range(0, used, BLOCK):
        word = at + tl.arange(0, BLOCK)
        tl.store(target + word, tl.load(source + word, mask=word < used), mask=word < used)


@triton.jit
def _copy_rows(counts, lengths, source, target, row, num_seqs, SEQS: tl.constexpr, PAGES: tl.constexpr,
               PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
               VECTOR: tl.constexpr):  # fmt: skip
    """Of rows [row, row + ROWS) of the page table [SEQS][PAGES] the first HEAD pages, of num_seqs rows at most; then
    whatever else the contexts have, of all rows a few pages at a time or row by row: the way that takes fewer reads."""
    UP: tl.constexpr = VECTOR if PAGES % VECTOR == 0 else 1
    COLUMNS: tl.constexpr = BLOCK // ROWS
    rows = row + tl.arange(0, ROWS)
    there = rows < tl.minimum(num_seqs, SEQS)
    count = tl.load(counts + _NUM_SEQS)
    length = tl.load(lengths + rows, mask=there, other=0)
    _copy_tile(source, target, rows, 0, tl.where(there, min(HEAD, PAGES), 0), PAGES, HEAD)

    pages = tl.where(rows < count, (tl.minimum(length, PAGES * PAGE_SIZE) + (PAGE_SIZE - 1)) // PAGE_SIZE, 0)
    more = tl.maximum(pages - HEAD, 0)
    longest = tl.max(more, 0)
    if tl.sum(tl.cdiv(more, BLOCK), 0) < tl.cdiv(longest, COLUMNS):
        for i in range(ROWS):
            used = (tl.sum(tl.where(rows == row + i, more, 0), 0) + (UP - 1)) // UP * UP
            first = (row + i) * PAGES + HEAD
            _copy_row(source + first, target + first, used, BLOCK)
    else:
        used = (HEAD + more + (UP - 1)) // UP * UP
        for at in range(HEAD, HEAD + longest, COLUMNS):
            _copy_tile(source, target, rows, at, used, PAGES, COLUMNS)


@triton.jit
def stage_io(step_sizes, source, target, num_tokens, num_seqs, num_logit_rows, TENSORS: tl.constexpr,
             KNOWN: tl.constexpr, TOGETHER: tl.constexpr, COUNTED_PROGRAMS: tl.constexpr, TABLE: tl.constexpr,
             LENGTHS: tl.constexpr, SEQS: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr,
             ROWS: tl.constexpr, HEAD: tl.constexpr, WIDE_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
             PDL: tl.constexpr):  # fmt: skip
    """Copy what the step uses from source to target, both int32, laid out alike.

    TENSORS has in turn for each tensor: the word at which it begins, words of an item, index of what counts items (-1:
    nothing does), how many more there are, how many at most, of how many words a multiple is copied, and words of a
    block. Of the first KNOWN the launch's arguments say how much is copied; TOGETHER each have a row of programs in y.
    COUNTED_PROGRAMS before them copy the other tensors, of which step_sizes says how much there is. Each program
    behind copies ROWS rows of the page table at word TABLE, where context_lens at word LENGTHS say how much of a row is
    used. Sizes beyond what there is count as all of it.
    """
    program, part = tl.program_id(0), tl.program_id(1)
    pdl_wait(PDL)
    FIELDS: tl.constexpr = TOGETHER * _FIELDS
    KNOWN_PROGRAMS: tl.constexpr = (KNOWN + TOGETHER - 1) // TOGETHER
    if program >= COUNTED_PROGRAMS + KNOWN_PROGRAMS:
        if part == 0:
            row = (program - COUNTED_PROGRAMS - KNOWN_PROGRAMS) * ROWS
            _copy_rows(step_sizes, source + LENGTHS, source + TABLE, target + TABLE, row, num_seqs, SEQS, PAGES,
                       PAGE_SIZE, ROWS, HEAD, WIDE_BLOCK, VECTOR)  # fmt: skip
    elif program >= COUNTED_PROGRAMS:
        counts = (num_tokens, num_seqs, num_logit_rows)
        for i in tl.static_range(KNOWN_PROGRAMS):
            if program == COUNTED_PROGRAMS + i:
                _copy_together(source, target, counts, part, tl.num_programs(1), TENSORS, i * FIELDS,
                               min(KNOWN * _FIELDS, (i + 1) * FIELDS))  # fmt: skip
    elif part == 0:
        _copy_counted(source, target, step_sizes, program, COUNTED_PROGRAMS, TENSORS, KNOWN * _FIELDS, len(TENSORS))


@dataclass(frozen=True)
class Extent:
    """A tensor of which a step uses ``counts[counted] + more`` items (``more`` alone where ``counted`` is -1), of at
    most ``most``, and none where it counts none. ``counts`` are the step's sizes, which are read first, or for a
    ``known`` extent the sizes of the step's bucket. ``offset``, ``item_bytes`` and ``room``, what may be written from
    there on, in bytes."""

    offset: int
    item_bytes: int
    counted: int
    more: int
    most: int
    room: int
    known: bool = False

    @property
    def fields(self) -> tuple[int, ...]:
        words = self.item_bytes // WORD
        whole = self.offset % (VECTOR * WORD) == self.room % (VECTOR * WORD) == 0
        block = WIDE_BLOCK if self.most * words > WIDE_WORDS else BLOCK
        return self.offset // WORD, words, self.counted, self.more, self.most, VECTOR if whole else 1, block


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
    STEP_SIZES and INPUTS. Its arguments are the step's sizes, where inputs come from, where they go, and the sizes of
    ``bucket``, as STEP_SCALARS has them."""
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
    room = align(placed.nbytes)  # up to the next tensor
    return Extent(placed.offset, placed.nbytes // most, counted, more, most, room, counted < len(STEP_SCALARS))


def copy_stage(
    target: Target, extents: Sequence[Extent], parts: int = 1, table: PageTable | None = None, num_seqs: int = 0
) -> Stage:
    """The launch that copies what a step uses of ``extents``, the known ones in ``parts`` parts, and of ``table`` the
    rows of up to ``num_seqs`` sequences."""
    assert all(e.offset % WORD == e.item_bytes % WORD == 0 and e.most * e.item_bytes <= e.room for e in extents)
    known, counted = [e for e in extents if e.known], [e for e in extents if not e.known]
    assert all(e.counted < len(STEP_SCALARS) for e in known) and all(e.counted >= 0 for e in counted), extents
    rows = table or PageTable(0, 0, 0, 1, 1)
    counted_programs = COUNTED_PROGRAMS if counted else 0
    programs = counted_programs + triton.cdiv(len(known), TOGETHER) + triton.cdiv(num_seqs, ROWS)
    stage = device_stage(
        module=__name__,
        function=stage_io,
        arguments="sizes step_sizes, read source, write target, int num_tokens, int num_seqs, int num_logit_rows",
        types="*i32, *i32, *i32, i32, i32, i32",
        constants={
            "TENSORS": tuple(number for extent in (*known, *counted) for number in extent.fields),
            "KNOWN": len(known), "TOGETHER": TOGETHER, "COUNTED_PROGRAMS": counted_programs,
            "TABLE": rows.offset // WORD, "LENGTHS": rows.lengths // WORD,
            "SEQS": rows.rows, "PAGES": rows.pages, "PAGE_SIZE": rows.page_size,
            "ROWS": ROWS, "HEAD": HEAD_PAGES, "WIDE_BLOCK": WIDE_BLOCK, "VECTOR": VECTOR,
        },
        num_warps=8 if target.gpu.warp_size == 32 else 4,
        num_stages=1,
        grid=(programs, parts, 1),
        target=target,
    )  # fmt: skip
    return replace(stage, programmatic=False)  # nothing comes before it
