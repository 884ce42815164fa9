"""The LaunchGraph file survives hostile bytes, and the static verifier catches every unsafe graph."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import fused_program, lowered

from tokenspeed.errors import ProgramError
from tokenspeed.graph import Access, Argument, Bytes, Float, Int, Launch, LaunchGraph, Node, Pointer, Region, StepScalar
from tokenspeed.graph_verify import ancestor_sets, verify_graph

R, W, RW = Access.READ, Access.WRITE, Access.READ | Access.WRITE
SIZES = {Region.WEIGHTS: 4096, Region.KV: 8192, Region.ARENA: 1024, Region.IO: 256, Region.STATE: 64}
STRIDE = 2048


def arena(offset: int, extent: int, access: Access) -> Pointer:
    return Pointer(Region.ARENA, offset, extent, access)


def chain() -> LaunchGraph:
    """a writes x, b reads x and writes y over a kv page, c reads y and overwrites x."""
    return LaunchGraph(
        (
            Node("a", "fill_avx2", (arena(0, 64, W), Int(-5), Float(0.125))),
            Node("b", "copy_avx2", (arena(0, 64, R), arena(64, 64, W), Pointer(Region.KV, 1024, 1024, W)), (0,)),
            Node("c", "copy_avx2", (arena(64, 64, R), arena(0, 64, W), StepScalar(2)), (1,)),
        )
    )


def gpu_chain() -> LaunchGraph:
    """Two nodes that share a binary, and one of another; the last takes a struct with two addresses."""
    args = (arena(0, 64, RW), Int(-7, 4), Float(0.5, 4))
    struct_ = Bytes(b"\1\2\3\0" + bytes(12) + b"\4" + bytes(15), ((8, arena(64, 64, R)), (16 + 8, arena(0, 64, W))))
    return LaunchGraph(
        (
            Node("a", "scale", args, (), Launch("scale-01", (7, 2, 1), (128, 1, 1), 4096, programmatic=True)),
            Node("b", "shift", args, (0,), Launch("shift-02", (1, 1, 1), (32, 2, 1), 0, (2, 1, 1))),
            Node("c", "scale", (struct_, Int(3, 4)), (1,), Launch("scale-01", (9, 1, 3), (128, 1, 1))),
        )
    )


def resealed(data: bytes | bytearray) -> bytes:
    """``data`` with the checksum that its body has."""
    body = bytes(data[64:])
    return bytes(data[:36]) + struct.pack("<I", zlib.crc32(body)) + bytes(data[40:64]) + body


pointers = st.builds(
    Pointer,
    st.sampled_from(Region),
    st.integers(0, 2**40).map(lambda n: 4 * n),
    st.integers(1, 2**40),
    st.sampled_from([R, W, RW]),
)


@st.composite
def structs(draw: Any) -> Bytes:
    words = draw(st.lists(st.one_of(st.binary(min_size=8, max_size=8), pointers), min_size=1, max_size=5))
    data = b"".join(word if isinstance(word, bytes) else bytes(8) for word in words)
    places = tuple((8 * i, word) for i, word in enumerate(words) if isinstance(word, Pointer))
    return Bytes(data + draw(st.binary(max_size=7)), places)


arguments: st.SearchStrategy[Argument] = st.one_of(
    pointers,
    st.builds(Int, st.integers(-(2**63), 2**63 - 1)),
    st.builds(Float, st.floats(allow_nan=False, allow_infinity=False)),
    st.builds(Int, st.integers(-(2**31), 2**31 - 1), st.just(4)),
    st.builds(Float, st.floats(allow_nan=False, allow_infinity=False, width=32), st.just(4)),
    st.builds(StepScalar, st.integers(0, 2)),
    structs(),
)


dims = st.tuples(*[st.integers(1, 2**32 - 1)] * 3)
launches = st.builds(
    Launch, st.sampled_from(["x", "y", "z\u00e9"]), dims, dims, st.integers(0, 2**32 - 1), dims, st.booleans()
)


@st.composite
def graphs(draw: Any) -> LaunchGraph:
    nodes = []
    launched = draw(st.booleans())
    for index in range(draw(st.integers(0, 6))):
        edges = draw(st.sets(st.integers(0, index - 1))) if index else ()
        args = draw(st.lists(arguments, max_size=4))
        text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
        launch = draw(launches) if launched else None
        nodes.append(Node(f"{index}{draw(text)}", draw(text), tuple(args), tuple(sorted(edges)), launch))
    return LaunchGraph(tuple(nodes))


@given(graphs())
def test_a_graph_survives_its_file(graph: LaunchGraph) -> None:
    data = graph.encode()
    assert LaunchGraph.decode(data) == graph
    assert LaunchGraph.decode(data).encode() == data


def test_the_bytes_of_a_small_graph() -> None:
    graph = LaunchGraph((Node("n", "k", (Pointer(Region.IO, 8, 16, R), Int(-1), Float(1.0), StepScalar(1))),))
    data = graph.encode()
    body = struct.pack("<II", 0, 1) + struct.pack("<8I", 0, 0, 4, 0, 0, 1, 1, 0)
    body += struct.pack("<4B4xQQQ", 0, 3, 1, 8, 8, 16, 0) + struct.pack("<4B4xQQQ", 1, 0, 0, 8, 2**64 - 1, 0, 0)
    body += struct.pack("<4B4xQQQ", 2, 0, 0, 8, 0x3FF0000000000000, 0, 0) + struct.pack("<4B4xQQQ", 3, 0, 0, 8, 1, 0, 0)
    body += b"kn"
    header = struct.pack("<4sHHIIIIIIII24x", b"TSLG", 3, 64, 64 + len(body), 1, 0, 1, 4, 0, 2, zlib.crc32(body))
    assert data == header + body


def test_the_bytes_of_a_parameter_passed_by_value() -> None:
    struct_ = Bytes(b"\5\0\0\0" + bytes(4) + bytes(8) + b"\6", ((8, arena(64, 32, W)),))
    data = LaunchGraph((Node("n", "k", (struct_, Int(1)), (), Launch("b", (1, 1, 1), (32, 1, 1))),)).encode()
    body = struct.pack("<4I", 0, 1, 1, 1) + struct.pack("<8I", 0, 0, 3, 0, 0, 2, 1, 0)
    body += struct.pack("<12I", 0, 1, 1, 1, 32, 1, 1, 1, 1, 1, 0, 0)
    body += struct.pack("<4B4xQQQ", 4, 0, 0, 0, 0, 17, 0) + struct.pack("<4B4xQQQ", 5, 2, 2, 8, 64, 32, 8)
    body += struct.pack("<4B4xQQQ", 1, 0, 0, 8, 1, 0, 0) + struct_.data + b"kbn"
    header = struct.pack("<4sHHIIIIIIII", b"TSLG", 3, 64, 64 + len(body), 1, 1, 1, 3, 0, 3, zlib.crc32(body))
    assert data == header + struct.pack("<I20x", 17) + body


def damaged_struct(record: int, field: int, value: int) -> bytes:
    """gpu_chain() with one field (4 value, 5 extent, 6 last word) of a record of its struct changed."""
    data = bytearray(gpu_chain().encode())
    args = 64 + 8 * 2 + 8 * 2 + 3 * (32 + 48)
    at = args + 32 * (6 + record) + (field if field < 4 else 8 + 8 * (field - 4))
    if field < 4:
        data[at] = value
    else:
        struct.pack_into("<Q", data, at, value)
    return resealed(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (damaged_struct(0, 4, 4), "node 'c' arg 0: need bytes from 0 on, have 32 bytes at 4"),
        (damaged_struct(0, 5, 2**63), "node 'c' arg 0: need bytes from 0 on, have 9223372036854775808 bytes at 0"),
        (damaged_struct(0, 5, 0), "node 'c' arg 0: need a parameter of 1 byte to 4 GiB, have 0 bytes"),
        (
            damaged_struct(0, 5, 31),
            r"need ascending addresses at multiples of 8 within 31 bytes, have them at \[8, 24\]",
        ),
        (damaged_struct(0, 6, 1), "node 'c' arg 0: need zeros in unused bytes, have others"),
        (damaged_struct(0, 3, 8), "node 'c' arg 0: need zeros in unused bytes, have others"),
        (damaged_struct(0, 0, 0), "node 'c' arg 0: need a parameter of 8 bytes, or of 4 for a number, have 0"),
        (damaged_struct(1, 6, 4), "need ascending addresses at multiples of 8 within 32 bytes, have them at"),
        (damaged_struct(1, 6, 24), "need ascending addresses at multiples of 8 within 32 bytes, have them at"),
        (damaged_struct(1, 6, 16), "node 'c' arg 0: need zeros where an address goes, have others at 16"),
        (damaged_struct(1, 6, 2**64 - 8), "need ascending addresses at multiples of 8 within 32 bytes, have them at"),
        (damaged_struct(1, 5, 0), "node 'c' arg 0: need a region below 6, access 1 to 3 and an aligned range"),
        (damaged_struct(3, 0, 5), "node 'c' arg 0: need a parameter of 8 bytes, or of 4 for a number, have 4"),
    ],
)
def test_a_damaged_parameter_passed_by_value_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        LaunchGraph.decode(data)


def test_an_address_needs_bytes_before_it() -> None:
    data = bytearray(LaunchGraph((Node("n", "k", (arena(0, 64, R),)),)).encode())
    data[64 + 8 + 32] = 5
    with pytest.raises(ProgramError, match="node 'n' arg 0: need an address after the bytes that it lies in"):
        LaunchGraph.decode(resealed(data))


def test_every_truncation_and_every_flipped_bit_is_noticed() -> None:
    data = chain().encode()
    for length in range(len(data)):
        with pytest.raises(ProgramError, match="launch graph: need"):
            LaunchGraph.decode(data[:length])
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProgramError, match="launch graph: need"):
            LaunchGraph.decode(bytes(flipped))


def decodes_or_is_refused(data: bytes) -> None:
    """Hostile bytes give a graph that is exactly its file, or a ProgramError; nothing else."""
    try:
        graph = LaunchGraph.decode(data)
    except ProgramError:
        return
    assert graph.encode() == data
    try:
        verify_graph(graph, SIZES, STRIDE)
    except ProgramError:
        return


@pytest.mark.parametrize("graph", [chain(), gpu_chain()], ids=["cpu", "gpu"])
def test_every_flipped_bit_with_a_right_checksum_is_survived(graph: LaunchGraph) -> None:
    data = graph.encode()
    for bit in range(8 * 64, 8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        decodes_or_is_refused(resealed(flipped))


@settings(max_examples=300)
@given(st.booleans(), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 2**32 - 1)), min_size=1, max_size=4))
def test_overwritten_words_with_a_right_checksum_are_survived(gpu: bool, words: list[tuple[int, int]]) -> None:
    data = bytearray((gpu_chain() if gpu else chain()).encode())
    for at, word in words:
        struct.pack_into("<I", data, 4 * (at % (len(data) // 4)), word)
    decodes_or_is_refused(resealed(data))


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    decodes_or_is_refused(noise)
    decodes_or_is_refused(resealed(chain().encode()[:64] + noise))


def test_a_file_of_another_version_says_so() -> None:
    data = bytearray(chain().encode())
    data[4] = 9
    with pytest.raises(ProgramError, match="need format version 3, have 9") as caught:
        LaunchGraph.decode(bytes(data))
    assert caught.value.hint == "rebuild the artifact with this version of tokenspeed"


@pytest.mark.parametrize(
    ("arg", "text"),
    [
        (Float(float("nan")), "node 'n' arg 0: need a finite number of 4 or 8 bytes, have nan in 8"),
        (Int(2**63), "node 'n' arg 0: need a signed number of 4 or 8 bytes, have 9223372036854775808 in 8"),
        (StepScalar(3), "node 'n' arg 0: need a step scalar below 3, have 3"),
        (arena(2, 4, R), r"node 'n' arg 0: need an aligned range of 64 bits with an access, have arena\[2:6\]r"),
        (arena(0, 4, Access(0)), r"need an aligned range of 64 bits with an access, have arena\[0:4\]-"),
        (Bytes(b""), "node 'n' arg 0: need a parameter of 1 byte to 4 GiB, have 0 bytes"),
        (Bytes(bytes(16), ((4, arena(0, 4, R)),)), r"need ascending addresses at multiples of 8 within 16 bytes"),
        (Bytes(bytes(12), ((8, arena(0, 4, R)),)), r"multiples of 8 within 12 bytes, have them at \[8\]"),
        (Bytes(bytes(16), ((8, arena(0, 4, R)), (0, arena(0, 4, R)))), r"need ascending addresses at multiples of 8"),
        (Bytes(b"1" * 16, ((8, arena(0, 4, R)),)), "need zeros where an address goes, have others at 8"),
        (
            Bytes(bytes(8), ((0, arena(2, 4, R)),)),
            r"need an aligned range of 64 bits with an access, have arena\[2:6\]r",
        ),
    ],
)
def test_what_no_file_can_hold_is_not_written(arg: Argument, text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        LaunchGraph((Node("n", "k", (arg,)),)).encode()


def test_what_no_gpu_graph_can_hold_is_not_written() -> None:
    first, second, third = gpu_chain().nodes
    assert first.launch is not None
    for node, text in (
        (replace(second, launch=None), "node 'b': need a launch, as other nodes of the graph have one"),
        (replace(second, launch=replace(first.launch, grid=(0, 1, 1))), "node 'b': need positive sizes of 32 bits"),
        (replace(second, args=(Int(2**31, 4),)), "node 'b' arg 0: need a signed number of 4 or 8 bytes"),
        (replace(second, args=(Float(0.1, 4),)), "node 'b' arg 0: need a finite number of 4 or 8 bytes, have 0.1 in 4"),
        (replace(second, args=(Float(1e300, 4),)), "node 'b' arg 0: need a finite number of 4 or 8 bytes"),
    ):
        with pytest.raises(ProgramError, match=text):
            LaunchGraph((first, node, third)).encode()


def test_a_gpu_graph_prints_itself() -> None:
    lines = str(gpu_chain()).splitlines()
    assert lines[0] == "   0  a = scale<7x2 x 128, 4096 B shared, programmatic>(arena[0:64]rw, -7, 0.5)"
    assert lines[1] == "   1  b = shift<1 x 32x2, clusters 2>(arena[0:64]rw, -7, 0.5)  after 0"
    assert lines[2] == "   2  c = scale<9x1x3 x 128>(32 bytes {8: arena[64:128]r, 24: arena[0:64]w}, 3)  after 1"
    assert gpu_chain().to_json()["nodes"][2]["args"][0] == {
        "hex": "010203" + "00" * 13 + "04" + "00" * 15,
        "pointers": {
            "8": {"region": "arena", "offset": 64, "extent": 64, "access": "r"},
            "24": {"region": "arena", "offset": 0, "extent": 64, "access": "w"},
        },
    }
    assert gpu_chain().to_json()["nodes"][0]["launch"] == {
        "binary": "scale-01", "grid": (7, 2, 1), "block": (128, 1, 1), "shared_bytes": 4096, "cluster": (1, 1, 1),
        "programmatic": True,
    }  # fmt: skip


def test_a_graph_prints_itself() -> None:
    assert str(chain()).splitlines()[1] == (
        "   1  b = copy_avx2(arena[0:64]r, arena[64:128]w, kv[1024:2048]w)  after 0"
    )
    assert chain().to_json()["nodes"][2] == {
        "name": "c",
        "symbol": "copy_avx2",
        "args": [
            {"region": "arena", "offset": 64, "extent": 64, "access": "r"},
            {"region": "arena", "offset": 0, "extent": 64, "access": "w"},
            {"step": "num_logit_rows"},
        ],
        "predecessors": [1],
    }


# --- the verifier ---------------------------------------------------------------------------------


def test_a_safe_graph_is_accepted() -> None:
    verify_graph(chain(), SIZES, STRIDE)
    assert ancestor_sets([(), (0,), (1,), (0,)]) == [0b0, 0b1, 0b11, 0b1]


def changed(index: int, position: int, arg: Argument) -> LaunchGraph:
    nodes = list(chain().nodes)
    args = list(nodes[index].args)
    args[position] = arg
    nodes[index] = replace(nodes[index], args=tuple(args))
    return LaunchGraph(tuple(nodes))


def early(writer: Pointer, *, programmatic: bool) -> LaunchGraph:
    """A node that writes, one right after it that may be programmatic, and one behind that."""
    launch = Launch("binary", (1, 1, 1), (32, 1, 1))
    read = Pointer(Region.IO, 0, 64, R)
    return LaunchGraph(
        (
            Node("a", "copy", (writer,), (), launch),
            Node("b", "copy", (read, arena(0, 64, W)), (0,), replace(launch, programmatic=programmatic)),
            Node("c", "copy", (read, arena(0, 64, R)), (1,), replace(launch, programmatic=True)),
        )
    )


def test_who_comes_right_after_the_inputs_starts_when_all_are_there() -> None:
    verify_graph(early(Pointer(Region.IO, 0, 64, W), programmatic=False), SIZES, 4096)
    verify_graph(early(Pointer(Region.IO, 0, 64, R), programmatic=True), SIZES, 4096)
    inside = with_struct(early(Pointer(Region.IO, 0, 64, W), programmatic=True))
    for graph in (early(Pointer(Region.IO, 0, 64, W), programmatic=True), inside):
        with pytest.raises(
            ProgramError, match="node 'b': need a launch that is not programmatic after node 'a', which"
        ):
            verify_graph(graph, SIZES, 4096)


def test_the_memory_of_the_host_is_of_some_size() -> None:
    node = Node("a", "copy", (Pointer(Region.HOST_IO, 0, 64, R),))
    verify_graph(LaunchGraph((node,)), {**SIZES, Region.HOST_IO: 64}, 4096)
    assert LaunchGraph.decode(LaunchGraph((node,)).encode()) == LaunchGraph((node,))
    with pytest.raises(ProgramError, match="node 'a' arg 0: need 64 bytes of region host_io, have 0"):  # as on a CPU
        verify_graph(LaunchGraph((node,)), SIZES, 4096)


def with_struct(graph: LaunchGraph) -> LaunchGraph:
    """The first node's pointer inside a parameter."""
    first = graph.nodes[0]
    (pointer,) = (p for _, p in first.pointers())
    return LaunchGraph((replace(first, args=(in_struct(pointer),)), *graph.nodes[1:]))


def in_struct(*inside: Pointer) -> Bytes:
    return Bytes(bytes(8 * len(inside)), tuple((8 * i, pointer) for i, pointer in enumerate(inside)))


def with_node(index: int, **changes: Any) -> LaunchGraph:
    nodes = list(chain().nodes)
    nodes[index] = replace(nodes[index], **changes)
    return LaunchGraph(tuple(nodes))


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (changed(1, 0, arena(1000, 64, R)), r"node 'b' arg 0: need 1064 bytes of region arena, have 1024 \(arena"),
        (changed(1, 2, Pointer(Region.KV, 1024, 1028, W)), "node 'b' arg 2: need 2052 bytes of page of region kv, "),
        (changed(0, 0, Pointer(Region.WEIGHTS, 0, 64, RW)), "node 'a' arg 0: need read-only access to region weights"),
        (changed(0, 0, arena(0, 0, W)), "node 'a' arg 0: need a positive extent at a multiple of 4 bytes, have arena"),
        (changed(0, 0, arena(-64, 64, W)), "need a positive extent at a multiple of 4 bytes"),
        (changed(0, 0, arena(0, 64, Access(0))), "node 'a' arg 0: need read or write access, have neither"),
        (changed(2, 2, StepScalar(7)), "node 'c' arg 2: need a step scalar below 3, have 7"),
        (changed(1, 1, arena(32, 64, W)), "node 'b': need args 0 and 1 apart or at one offset, have arena"),
        (with_node(2, predecessors=()), r"node 'c' arg 1: need an edge path from node 'a' \(arg 0\), have none"),
        (with_node(1, predecessors=()), r"node 'b' arg 0: need an edge path from node 'a' \(arg 0\), have none"),
        (with_node(1, predecessors=(1,)), r"node 'b': need predecessors in ascending order, each before node 1, have"),
        (with_node(2, predecessors=(1, 0)), r"need predecessors in ascending order, each before node 2, have \[1, 0\]"),
        (with_node(2, name="a"), "node 2: need a unique name, have 'a'"),
        (with_node(2, symbol=""), "node 'c': need the symbol of a kernel, have an empty one"),
        (changed(1, 0, in_struct(arena(1000, 64, R))), "node 'b' arg 0: need 1064 bytes of region arena, have 1024"),
        (
            changed(1, 0, in_struct(arena(0, 64, R), arena(32, 64, W))),
            "node 'b': need args 0 and 0 apart or at one offset",
        ),
        (
            with_node(2, args=(Int(0), in_struct(arena(512, 4, R), arena(64, 64, R))), predecessors=()),
            r"node 'c' arg 1: need an edge path from node 'b' \(arg 1\), have none",
        ),
    ],
)
def test_the_verifier_names_what_is_unsafe(graph: LaunchGraph, text: str) -> None:
    with pytest.raises(ProgramError, match=text):
        verify_graph(graph, SIZES, STRIDE)


def test_readers_need_no_order_among_themselves() -> None:
    nodes = (
        Node("w", "k", (arena(0, 256, W),)),
        Node("r1", "k", (arena(0, 128, R), arena(256, 64, W)), (0,)),
        Node("r2", "k", (arena(64, 128, R), arena(320, 64, W)), (0,)),
        Node("in place", "k", (arena(0, 128, R), arena(0, 128, W)), (1, 2)),
    )
    verify_graph(LaunchGraph(nodes), SIZES, STRIDE)
    unordered = (*nodes[:3], replace(nodes[3], predecessors=(1,)))
    with pytest.raises(ProgramError, match=r"node 'in place' arg 1: need an edge path from node 'r2' \(arg 0\)"):
        verify_graph(LaunchGraph(unordered), SIZES, STRIDE)


def races(graph: LaunchGraph) -> bool:
    """By brute force: whether two unordered nodes touch one byte and one of them writes it."""
    before = ancestor_sets([node.predecessors for node in graph.nodes])
    for j, second in enumerate(graph.nodes):
        for i, first in enumerate(graph.nodes[:j]):
            if before[j] >> i & 1:
                continue
            for _, p in first.pointers():
                for _, q in second.pointers():
                    if p.region is q.region and (p.writes or q.writes) and p.offset < q.end and q.offset < p.end:
                        return True
    return False


small = st.builds(arena, st.integers(0, 6).map(lambda n: 4 * n), st.integers(1, 12), st.sampled_from([R, W]))


@settings(max_examples=300)
@given(st.lists(st.tuples(small, st.integers(0, 2**6 - 1)), max_size=7))
def test_the_verifier_finds_exactly_the_races(items: list[tuple[Pointer, int]]) -> None:
    nodes = tuple(
        Node(str(i), "k", (pointer,), tuple(e for e in range(i) if edges >> e & 1))
        for i, (pointer, edges) in enumerate(items)
    )
    graph = LaunchGraph(nodes)
    try:
        verify_graph(graph, SIZES, STRIDE)
    except ProgramError as error:
        assert "need an edge path" in str(error) and races(graph)
    else:
        assert not races(graph)


def test_every_edge_of_a_lowered_graph_is_needed_and_every_shift_is_caught() -> None:
    low = lowered(fused_program())
    layout = low.layout
    graph = low.graphs[max(low.graphs)]
    verify_graph(graph, layout.region_sizes, layout.kv_page_bytes)
    for index, node in enumerate(graph.nodes):
        for edge in node.predecessors:
            kept = tuple(e for e in node.predecessors if e != edge)
            nodes = list(graph.nodes)
            nodes[index] = replace(node, predecessors=kept)
            with pytest.raises(ProgramError, match="need an edge path"):
                verify_graph(LaunchGraph(tuple(nodes)), layout.region_sizes, layout.kv_page_bytes)
        for position, pointer in node.pointers():
            args = list(node.args)
            args[position] = replace(pointer, offset=layout.region_sizes[pointer.region] - pointer.extent + 4)
            nodes = list(graph.nodes)
            nodes[index] = replace(node, args=tuple(args))
            with pytest.raises(ProgramError, match=f"node '{node.name}' arg {position}: need"):
                verify_graph(LaunchGraph(tuple(nodes)), layout.region_sizes, layout.kv_page_bytes)
