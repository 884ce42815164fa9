"""Capture: addresses are found and nothing else is, and templates bind."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tokenspeed.compile.capture import (
    ARGUMENT_SPAN,
    CapturedCall,
    CapturedLaunch,
    CapturedParameter,
    CaptureJob,
    RawLaunch,
    Relocation,
    job_key,
    launches_from_bytes,
    launches_to_bytes,
    relocate,
    stand_ins,
)
from tokenspeed.errors import TargetError
from tokenspeed.graph import Access, Bytes, Int, Launch, LaunchGraph, Pointer, Region
from tokenspeed.graph_verify import verify_graph
from tokenspeed.kernels.library import LibraryKernel, parts, parts_bytes
from tokenspeed.target import Target

H200 = Target("cuda", "sm_90a")
Build = Callable[[tuple[int, ...]], Sequence[bytes]]


def raw(*parameters: bytes, symbol: str = "k", grid: tuple[int, int, int] = (4, 1, 2)) -> RawLaunch:
    return RawLaunch(symbol, grid, (128, 1, 1), (1, 1, 1), 4096, tuple(parameters))


def captured(build: Build, num_arguments: int) -> tuple[CapturedLaunch, ...]:
    """One launch whose parameters ``build`` makes from the addresses of the arguments, captured twice."""
    first, second = ([raw(*build(stand_ins(num_arguments, n)))] for n in (0, 1))
    return relocate(first, second, num_arguments, "here")


def parameters(build: Build, num_arguments: int) -> tuple[CapturedParameter, ...]:
    (launch,) = captured(build, num_arguments)
    return launch.parameters


# --- relocation -----------------------------------------------------------------------------------


def test_stand_ins_are_apart_and_no_two_move_alike() -> None:
    a, b = stand_ins(64, 0), stand_ins(64, 1)
    assert len({*a, *b}) == 128 and all(x % 256 == 0 and x + ARGUMENT_SPAN < 1 << 47 for x in (*a, *b))
    assert len({y - x for x, y in zip(a, b, strict=True)}) == 64
    ranges = sorted((*a, *b))
    assert all(y - x >= ARGUMENT_SPAN for x, y in itertools.pairwise(ranges))


def test_addresses_of_a_struct_become_arguments_and_offsets() -> None:
    def build(at: tuple[int, ...]) -> list[bytes]:
        return [
            struct.pack("<iiQfiQ", 7, -1, at[1] + 48, 0.5, 9, at[0]),
            struct.pack("<i", 3),
            struct.pack("<Q", at[1]),
        ]

    struct_, number, pointer = parameters(build, 2)
    assert struct_.data == struct.pack("<iiQfiQ", 7, -1, 0, 0.5, 9, 0)
    assert struct_.relocations == (Relocation(8, 1, 48), Relocation(24, 0, 0))
    assert number == CapturedParameter(struct.pack("<i", 3))
    assert pointer == CapturedParameter(bytes(8), (Relocation(0, 1, 0),))


def test_a_number_that_looks_like_an_address_stays_a_number() -> None:
    """It lies in the range of an argument in one capture, but does not move with it."""
    number = stand_ins(1, 0)[0] + 64

    def build(at: tuple[int, ...]) -> list[bytes]:
        return [struct.pack("<QQ", number, at[0])]

    (parameter,) = parameters(build, 1)
    assert parameter.data == struct.pack("<QQ", number, 0) and parameter.relocations == (Relocation(8, 0, 0),)


def test_a_byte_left_to_chance_is_refused() -> None:
    def padding(at: tuple[int, ...]) -> list[bytes]:
        return [struct.pack("<iBBBBQ", 1, 2, 0, 0, at[0] & 1 | (at[0] >> 40 & 0xFE), at[0])]

    with pytest.raises(
        TargetError, match=r"here: parameter 0 of k: need bytes that depend on nothing but addresses"
    ) as e:
        captured(padding, 1)
    assert "at 7, which are no address of an argument" in e.value.message
    assert e.value.hint == "zero the launcher's structs before they are filled: padding must not be left to chance"


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda at: [b"\0\0\0\0" + struct.pack("<Q", at[0]) + b"\0\0\0\0"], id="unaligned"),
        pytest.param(lambda at: [struct.pack("<I", at[0] >> 32), struct.pack("<Q", at[0])], id="half of one"),
        pytest.param(lambda at: [struct.pack("<Q", at[0] - 8)], id="before the argument"),
        pytest.param(lambda at: [struct.pack("<Q", at[0] >> 4)], id="encoded"),
        pytest.param(lambda at: [struct.pack("<Q", at[0] ^ at[1]), struct.pack("<QQ", *at)], id="of two by xor"),
        pytest.param(lambda at: [struct.pack("<Q", abs(at[0] - at[1])), struct.pack("<QQ", *at)], id="a distance"),
    ],
)
def test_what_holds_an_address_that_cannot_be_relocated_is_refused(build: Build) -> None:
    with pytest.raises(TargetError, match="which are no address of an argument"):
        captured(build, 2)


def test_launches_must_not_depend_on_addresses() -> None:
    a, b = raw(struct.pack("<Q", stand_ins(1, 0)[0])), raw(struct.pack("<Q", stand_ins(1, 1)[0]))
    for first, second in (([a, a], [b]), ([a], [replace(b, grid=(5, 1, 2))]), ([a], [replace(b, symbol="other")])):
        with pytest.raises(TargetError, match=r"here: need equal launches whatever the addresses, have k \(4, 1, 2\)"):
            relocate(first, second, 1, "here")
    with pytest.raises(TargetError, match="need parameters of equal sizes in both captures of k"):
        relocate([a], [replace(b, parameters=(bytes(16),))], 1, "here")


def test_an_argument_that_reaches_no_kernel_is_an_error() -> None:
    with pytest.raises(TargetError, match="here: need every pointer to be passed to a kernel, have none that"):
        captured(lambda at: [struct.pack("<Q", at[0])], 2)


# --- binding --------------------------------------------------------------------------------------

IN = Pointer(Region.IO, 64, 256, Access.READ)
OUT = Pointer(Region.ARENA, 128, 64, Access.WRITE)


def call() -> CapturedCall:
    def build(at: tuple[int, ...]) -> list[bytes]:
        return [struct.pack("<QiiQi", at[0] + 16, 5, 6, at[1], -2), struct.pack("<Q", at[1]), struct.pack("<i", -4)]

    first, second = (
        [raw(*build(stand_ins(2, n))), raw(struct.pack("<Q", stand_ins(2, n)[1]), bytes(8), symbol="m")] for n in (0, 1)
    )
    return CapturedCall("lib-01", relocate(first, second, 2, "here"))


def test_a_captured_call_becomes_nodes() -> None:
    first, second = call().nodes("layers.3.attention", (IN, OUT))
    inside = Pointer(Region.IO, 80, 240, Access.READ)
    assert first.name == "layers.3.attention" and second.name == "layers.3.attention.1" and second.symbol == "m"
    assert first.args == (Bytes(struct.pack("<QiiQi", 0, 5, 6, 0, -2), ((0, inside), (16, OUT))), OUT, Int(-4, 4))
    assert second.args == (OUT, Int(0, 8))
    assert first.launch == Launch("lib-01", (4, 1, 2), (128, 1, 1), 4096)
    graph = LaunchGraph((first, replace(second, predecessors=(0,))))
    assert LaunchGraph.decode(graph.encode()) == graph
    verify_graph(graph, {Region.IO: 320, Region.ARENA: 192}, 0)
    with pytest.raises(Exception, match="need 320 bytes of region io, have 319"):
        verify_graph(graph, {Region.IO: 319, Region.ARENA: 192}, 0)


def test_an_address_beyond_its_argument_is_refused() -> None:
    with pytest.raises(
        TargetError, match=r"k: need addresses inside the arguments, have byte 16 of io\[64:80\]r, argu"
    ):
        list(call().nodes("n", (replace(IN, extent=16), OUT)))


def test_a_captured_call_survives_the_cache() -> None:
    launches = call().launches
    assert launches_from_bytes(launches_to_bytes(launches)) == launches


def test_parts_of_a_workspace() -> None:
    placed = parts(request=4, valid=65, chunk=4)
    assert [(p.name, p.offset, p.nbytes) for p in placed] == [("request", 0, 4), ("valid", 64, 65), ("chunk", 192, 4)]
    assert parts_bytes(placed) == 196 and parts_bytes(()) == 0
    kernel = LibraryKernel("flashinfer", "flashinfer/decode.cu", "f", (("A", 1),), (("n", 2),), placed)
    assert kernel.part("valid") == placed[1] and str(kernel) == "f[A=1, n=2]"


def test_the_key_of_a_call_holds_all_that_its_launches_depend_on() -> None:
    kernel = LibraryKernel("flashinfer", "flashinfer/decode.cu", "f", (("A", 1),), (("n", 2),))
    jobs = [
        CaptureJob(kernel, 3, (0.5,)),
        CaptureJob(kernel, 3, (0.25,)),
        CaptureJob(kernel, 4, (0.5,)),
        CaptureJob(replace(kernel, integers=(("n", 3),)), 3, (0.5,)),
        CaptureJob(replace(kernel, function="g"), 3, (0.5,)),
    ]
    assert len({job_key(job, launcher) for job in jobs for launcher in ("a", "b")}) == 10
