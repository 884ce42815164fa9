"""Reads the 64-bit little-endian ELF files that GPU code objects are. The bytes may be damaged or hostile.

Nothing is believed before it is checked. Contents of sections may not add up to more than the file, and names
are short, so no file makes a reader do more work than its size warrants.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tokenspeed.device_code.model import MAX_FILE_BYTES, damaged

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NOTE = struct.Struct("<III")
_MAX_NAME = 1024

SYMTAB, NOBITS, DYNSYM = 2, 8, 11
_PT_NOTE = 4
OBJECT, FUNCTION = 1, 2
GLOBAL, WEAK = 1, 2


@dataclass(frozen=True, slots=True)
class Section:
    """A section header; ``offset`` and ``size`` lie inside the file unless ``kind`` is NOBITS."""

    name: str
    kind: int
    address: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol table entry: ``kind`` and ``binding`` are the halves of st_info, ``other`` is st_other."""

    index: int
    name: str
    kind: int
    binding: int
    other: int
    section: int
    value: int
    size: int


class Elf:
    """One file. Raises ArtifactError, and nothing else, for bytes that are no such file."""

    def __init__(self, data: bytes):
        if len(data) > MAX_FILE_BYTES:
            raise damaged(f"need at most {MAX_FILE_BYTES} bytes, have {len(data)}")
        if len(data) < _HEADER.size or not data.startswith(b"\x7fELF\x02\x01\x01"):
            raise damaged("need a 64-bit little-endian ELF file, have another")
        self._data = memoryview(data)
        fields = _HEADER.unpack_from(data)
        ident, _, self.machine, _, _, segments, sections, self.flags, _, *sizes, name_section = fields
        segment_size, num_segments, section_size, num_sections = sizes
        self.abi_version: int = ident[8]
        if (num_segments and segment_size != _SEGMENT.size) or (num_sections and section_size != _SECTION.size):
            raise damaged(f"need headers of {_SEGMENT.size} and {_SECTION.size} bytes, have others")
        self._segments = tuple(_SEGMENT.iter_unpack(self.bytes_at(segments, num_segments * _SEGMENT.size)))
        self.sections = self._read_sections(sections, num_sections, name_section)

    def bytes_at(self, offset: int, size: int) -> memoryview:
        """``size`` bytes of the file."""
        if offset + size > len(self._data):
            raise damaged(f"need {size} bytes at {offset}, have a file of {len(self._data)}")
        return self._data[offset : offset + size]

    def contents(self, section: Section) -> memoryview:
        """The bytes of a section; none for NOBITS."""
        return self.bytes_at(section.offset, 0 if section.kind == NOBITS else section.size)

    def section(self, index: int) -> Section:
        if not 0 < index < len(self.sections):
            raise damaged(f"need a section below {len(self.sections)}, have {index}")
        return self.sections[index]

    def symbols(self, table: Section) -> Iterator[Symbol]:
        """The functions and objects of a symbol table."""
        data, strings = self.contents(table), self.contents(self.section(table.link))
        if len(data) % _SYMBOL.size:
            raise damaged(f"need symbols of {_SYMBOL.size} bytes, have a table of {len(data)}")
        for index, (name, info, other, section, value, size) in enumerate(_SYMBOL.iter_unpack(data)):
            if info & 15 in (OBJECT, FUNCTION):
                text = _string(strings, name)
                yield Symbol(index, text, info & 15, info >> 4, other, section, value, size)

    def notes(self) -> Iterator[tuple[bytes, int, memoryview]]:
        """(owner, type, contents) of every note that a loader sees, that is, in the segments."""
        spans = [(offset, size) for kind, _, offset, _, _, size, _, _ in self._segments if kind == _PT_NOTE]
        if sum(size for _, size in spans) > len(self._data):
            raise damaged("need notes that fit the file, have more")
        for offset, size in spans:
            rest = self.bytes_at(offset, size)
            while len(rest) >= _NOTE.size:
                name_size, note_size, kind = _NOTE.unpack_from(rest)
                start = _NOTE.size + _aligned(name_size)
                if start + note_size > len(rest):
                    raise damaged(f"need a note of {start + note_size} bytes, have {len(rest)}")
                yield bytes(rest[_NOTE.size : _NOTE.size + name_size][:64]), kind, rest[start : start + note_size]
                rest = rest[start + _aligned(note_size) :]

    def _read_sections(self, offset: int, count: int, name_section: int) -> tuple[Section, ...]:
        records = list(_SECTION.iter_unpack(self.bytes_at(offset, count * _SECTION.size)))
        if not name_section < count:
            raise damaged(f"need a section of names below {count}, have {name_section}")
        used = 0
        for _, kind, _, _, start, size, *_ in records:
            if kind not in (0, NOBITS):
                self.bytes_at(start, size)
                used += size
        if used > len(self._data):
            raise damaged("need sections apart from one another, have overlapping ones")
        _, kind, _, _, start, size, *_ = records[name_section]
        names = self.bytes_at(start, 0 if kind in (0, NOBITS) else size)
        return tuple(
            Section(_string(names, name), kind, address, start, size if kind else 0, link)
            for name, kind, _, address, start, size, link, *_ in records
        )


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def _string(strings: memoryview, offset: int) -> str:
    """The text at ``offset`` of a string table."""
    raw, end, _ = bytes(strings[offset : offset + _MAX_NAME]).partition(b"\0")
    if not end and strings:
        raise damaged(f"need a name of fewer than {_MAX_NAME} bytes at {offset}, have none")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise damaged(f"need a name in UTF-8 at byte {offset}, have none") from None
