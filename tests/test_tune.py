"""``tokenspeed tune``: packs made here, timed on a stand-in for the GPU, merged into tables that builds read."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gpu_double import H200, ContextDouble
from tiny_artifact import cli_environment, tiny, write_checkpoint

from tokenspeed import _native
from tokenspeed.cli import main
from tokenspeed.compile import tuning
from tokenspeed.compile.tuning import pack
from tokenspeed.compile.tuning_tables import merge, read_table
from tokenspeed.errors import ArtifactError, ResourceError, TargetError, UsageError
from tokenspeed.graph import LaunchGraph, Pointer, Region
from tokenspeed.kernels.triton import linear_config, linear_tuning
from tokenspeed.kernels.triton.linear_config import Config, choose, to_json
from tokenspeed.runtime.tuning import ROUNDS, Outcome, Results, filling, find_gpu, measure
from tokenspeed.target import Target
from tokenspeed.tuning_pack import SCRATCH_SLOTS, Rotation, TuningPack, chain

HOPPER = Target.parse("cuda:sm_90a")
SLOW, FAST, WRONG = (Config(16, 32, 64, warps, 2, swapped=True) for warps in (1, 2, 4))
"""The candidates of these tests; what they do differently is up to FakeGpu."""
BEFORE_US = 1.0
MOST_ROWS = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
    return write_checkpoint(tmp_path_factory.mktemp("tune") / "tiny-llama", config)


@pytest.fixture(scope="module", autouse=True)
def three_candidates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_tuning, "candidates", lambda *_: (SLOW, FAST, WRONG))
        patch.setattr(linear_tuning, "choose", lambda *_: SLOW)
        patch.setattr(linear_tuning, "PREFETCH", ())
        patch.setattr(tuning, "_MOST_COPIES", 16)
        patch.setattr(tuning, "_REPLAY_SECONDS", 20e-6)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("code")


@pytest.fixture(scope="module")
def packed(checkpoint: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "tiny.tunepack"
    result = pack([checkpoint], path, HOPPER, rows=[MOST_ROWS, 1], ops=["linear_add"], workers=2, cache=cache)
    assert (result.shapes, result.cases, result.candidates, result.failures) == (2, 4, 12, {})
    assert result.nbytes == path.stat().st_size < 100_000
    return path


# ---- a stand-in for the GPU -----------------------------------------------------------------------------------


class FakeGpu:
    """As ``_native.GpuDevice`` as far as tuning goes. A graph takes what its nodes take; its result is made of the
    place of the weights that its last node reads. Class attributes are what a test sets.

    Attributes:
        us: binary -> microseconds of a call; others take 10, a norm BEFORE_US.
        wrong, lazy, broken: binaries whose results differ by a bit, that write nothing, that no driver loads graphs of.
        lose: number of the step that never ends well.
        clock: seconds that have passed on the device.
    """

    us: dict[str, float]
    wrong: set[str]
    lazy: set[str]
    broken: set[str]
    lose: int | None
    clock: float
    made: list[FakeGpu]

    def __init__(self, backend: str, ordinal: int, io_sets: int, *, spin_seconds: float = 0):
        assert (backend, ordinal, io_sets) == ("cuda", 0, 2)
        self.regions: dict[str, int] = {}
        self.binaries: set[str] = set()
        self.graphs: list[LaunchGraph] = []
        self.steps: list[tuple[int, int, int, float, float | None]] = []
        self.tickets, self.waited, self.closed = 0, 0, False
        FakeGpu.made.append(self)

    def time_steps(self, num_steps: int) -> None:
        self.ring = num_steps

    def step_times(self) -> list[tuple[int, int, int, float, float | None]]:
        assert self.waited == self.tickets, "a step is still in flight"
        found, self.steps = self.steps[-self.ring :], []
        return found

    def load_weights(self, path: str, file_offset: int, nbytes: int) -> None:
        assert Path(path).stat().st_size >= file_offset + nbytes
        self.regions["weights"] = nbytes

    def allocate(self, region: str, nbytes: int) -> None:
        self.regions[region] = nbytes

    def allocate_io(self, nbytes: int, step_sizes_offset: int) -> None:
        assert nbytes > 32 and step_sizes_offset == 0
        self.regions["io"] = self.regions["host_io"] = nbytes
        self.stride = -(-nbytes // 4096) * 4096
        self.host, self.arena = bytearray(2 * self.stride), bytearray(self.regions["arena"])

    def view(self, region: str) -> memoryview:
        assert region == "io"
        return memoryview(self.host)

    def load_binary(self, name: str, data: bytes) -> None:
        assert data.startswith(b"\x7fELF") and name not in self.binaries
        self.binaries.add(name)

    def load_graph(self, data: bytes, kv_page_stride: int) -> int:
        graph = LaunchGraph.decode(data)
        for i, node in enumerate(graph.nodes):
            assert node.launch is not None and node.launch.binary in self.binaries
            assert node.launch.programmatic is (i >= 2)  # not what brings the sizes in, nor who comes right after
            if node.launch.binary in self.broken:
                raise _native.GraphError("node 0: too much shared memory")
            for _, pointer in node.pointers():
                assert pointer.end <= self.regions[str(pointer.region)]
        self.graphs.append(graph)
        return len(self.graphs) - 1

    def submit(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int, io_set: int) -> int:
        assert self.tickets - self.waited < 2, "both io sets are in use"
        self.tickets += 1
        nodes = self.graphs[graph].nodes
        seconds = sum(self._us(node) for node in nodes) * 1e-6 * (1 + 0.001 * (self.tickets % 3))
        FakeGpu.clock += seconds
        self.steps.append((self.tickets, num_tokens, num_seqs, seconds, None))
        assert nodes[0].symbol == "stage_io"
        if len(nodes) == 1:
            self._fetch(nodes[0], num_logit_rows, io_set * self.stride)
        else:
            self._run(nodes[-1])
        return self.tickets

    def _fetch(self, node: Any, rows: int, io: int) -> None:
        (source,) = (p for _, p in node.pointers() if p.region is Region.ARENA)
        (target,) = (p for _, p in node.pointers() if p.writes)
        assert target.region is Region.HOST_IO and source.extent == target.extent
        nbytes, at = rows * source.extent // MOST_ROWS, io + target.offset
        self.host[at : at + nbytes] = self.arena[source.offset : source.offset + nbytes]

    def _us(self, node: Any) -> float:
        known = {"stage_io": 0.0, "rms_norm": BEFORE_US}
        return known[node.symbol] if node.symbol in known else self.us.get(node.launch.binary, 10.0)

    def _run(self, node: Any) -> None:
        binary = node.launch.binary
        if node.symbol == "rms_norm" or binary in self.lazy:
            return
        (out,) = (p for _, p in node.pointers() if p.writes)
        assert out.region is Region.ARENA
        weights = next(p for i, p in node.pointers() if i == 1)
        content = bytearray(hashlib.sha256(str(weights).encode()).digest() * (out.extent // 32))
        content[-1] ^= binary in self.wrong
        self.arena[out.offset : out.end] = content

    def wait(self, ticket: int) -> None:
        assert ticket <= self.tickets
        self.waited = ticket
        if self.lose is not None and ticket >= self.lose:
            raise _native.DeviceLostError("the device NVIDIA H200 is lost: an illegal address")

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch)


def plug_in(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[int, str, str, int, int], reason: str = "") -> None:
    FakeGpu.us, FakeGpu.wrong, FakeGpu.lazy, FakeGpu.broken = {}, set(), set(), set()
    FakeGpu.lose, FakeGpu.clock, FakeGpu.made, ContextDouble.opened = None, 0.0, [], []
    found = list(gpus) if gpus or reason else [H200]
    monkeypatch.setattr(_native, "GpuDevice", FakeGpu)
    monkeypatch.setattr(_native, "GpuContext", ContextDouble)
    monkeypatch.setattr(_native, "gpu_devices", lambda backend: (found, reason))


def binaries(packed: Path, config: Config) -> set[str]:
    """The binaries of a candidate, in all shapes."""
    with TuningPack(packed) as opened:
        graphs = [
            LaunchGraph.decode(opened.read(candidate.graph))
            for shape in opened.manifest.shapes
            for case in shape.cases
            for candidate in case.candidates
            if candidate.config == to_json(config)
        ]
    return {graph.nodes[-1].launch.binary for graph in graphs if graph.nodes[-1].launch is not None}


def speed(packed: Path, config: Config, us: float) -> None:
    FakeGpu.us |= dict.fromkeys(binaries(packed, config), us)


def outcomes(packed: Path, **options: Any) -> tuple[list[Outcome], Results]:
    with TuningPack(packed) as opened:
        results = Results(opened, find_gpu(HOPPER, None))
        measure(results, clock=lambda: FakeGpu.clock, **options)
    assert all(device.closed for device in FakeGpu.made) and not ContextDouble.opened
    return results.outcomes, results


# ---- the pack -------------------------------------------------------------------------------------------------


def test_a_pack_holds_every_case_of_every_shape(packed: Path) -> None:
    with TuningPack(packed) as opened:
        manifest = opened.manifest
        opened.verify()
        assert (manifest.target, manifest.models) == ("cuda:sm_90a", ("tiny-llama",))
        assert [dict(shape.key) for shape in manifest.shapes] == [{"N": 64, "K": 64}, {"N": 64, "K": 96}]
        used: set[str] = set()
        for shape in manifest.shapes:
            assert [case.rows for case in shape.cases] == [1, 512]
            r = shape.rotation
            assert r.copies * r.stride > 2 * (50 << 20) or r.copies == 16
            for name in (shape.inputs, shape.fetch):
                (node,) = LaunchGraph.decode(opened.read(name)).nodes
                assert node.symbol == "stage_io" and node.launch is not None and not node.launch.programmatic
                used.add(node.launch.binary)
            for case in shape.cases:
                assert [c.config for c in case.candidates] == [to_json(c) for c in (SLOW, FAST, WRONG)]
                assert bool(case.before) is (case.rows == 1)
                for candidate in case.candidates:
                    graph = LaunchGraph.decode(opened.read(candidate.graph))
                    symbols = [node.symbol for node in graph.nodes]
                    assert symbols == (["rms_norm"] if case.before else []) + ["linear_add"]
                    used |= {node.launch.binary for node in graph.nodes if node.launch is not None}
                k, n = shape.key["K"], shape.key["N"]
                assert case.flops == 2 * case.rows * n * k
                assert case.nbytes == 2 * k * (n + case.rows) + 8 * case.rows * n
        assert used == set(manifest.binaries) and len(used) == 2 * (3 + 1) + 2  # rows do not matter to a binary


def test_large_matrices_push_out_themselves() -> None:
    family = linear_tuning.LinearFamily()
    for features, copies, overlap in ((28672, 2, True), (4096, 5, False), (64, 16, False)):
        sizes = {"N": features, "K": 4096 if features > 64 else 64, "M": 1, "rows": 0}
        request = tuning.Request("linear", HOPPER, "bfloat16", sizes)
        rotation = tuning._ShapePlan(tuning._group(family, request), [request])._rotation
        assert (rotation.copies, rotation.stride < rotation.nbytes) == (copies, overlap)


def test_equal_packs_have_equal_bytes(packed: Path, checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    arguments = {"rows": [1, 512], "ops": ["linear_add"], "cache": cache}
    pack([checkpoint, checkpoint], tmp_path / "a", HOPPER, **arguments)  # type: ignore[arg-type]
    pack([checkpoint, checkpoint], tmp_path / "b", HOPPER, **arguments)  # type: ignore[arg-type]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with TuningPack(tmp_path / "a") as twice, TuningPack(packed) as once:
        assert twice.manifest.shapes == once.manifest.shapes and twice.manifest.files == once.manifest.files


def test_the_rows_are_those_of_the_buckets(checkpoint: Path) -> None:
    flags = {"max_num_seqs": 6, "max_prefill_tokens": 40, "max_logit_rows": 10}
    config = tuning._config(checkpoint)
    rows: dict[str, set[int]] = {}
    for _, request in tuning._requests(config, HOPPER, None, None, flags):
        assert request.sizes["rows"] == 0
        name = "head" if request.sizes.get("N") == config.vocab_size else request.op
        rows.setdefault(name, set()).add(request.sizes["M"])
    tokens, drawn = {1, 2, 4, 6, 16, 32, 40}, {1, 2, 4, 6, 10}
    both = tokens | drawn  # the last layer goes on with the rows that are drawn from
    assert rows == {"linear": tokens, "linear_add": both, "linear_silu_mul": both, "head": drawn}


def test_what_is_no_request(checkpoint: Path, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--target is cpu:x86-64-v3: tables are for GPUs"):
        pack([checkpoint], tmp_path / "p", Target.parse("cpu:x86-64-v3"))
    with pytest.raises(UsageError, match="op 'rms_norm' has no candidates") as caught:
        pack([checkpoint], tmp_path / "p", HOPPER, ops=["rms_norm"])
    assert caught.value.hint == "those that have are linear, linear_add, linear_silu_mul"
    with pytest.raises(ArtifactError, match="exists already"):
        pack([checkpoint], packed, HOPPER)
    with pytest.raises(UsageError, match="nothing to tune"):
        pack([checkpoint], tmp_path / "p", HOPPER, rows=[9000])
    assert list(tmp_path.iterdir()) == []


def test_kernels_that_do_not_compile_are_left_out(
    checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(jobs: Any, *, failures: dict[Any, TargetError], **options: Any) -> Any:
        done = tuning.codegen_compile(jobs, failures=failures, **options)  # type: ignore[attr-defined]
        for kernel, target in list(done):
            wrong = kernel.function != "stage_io" and kernel.num_warps == WRONG.num_warps
            if kernel.function == "rms_norm" or wrong:
                failures[kernel, target] = TargetError("ptxas fell over")
                del done[kernel, target]
        return done

    monkeypatch.setattr(tuning, "codegen_compile", tuning.compile_kernels, raising=False)
    monkeypatch.setattr(tuning, "compile_kernels", failing)
    path = tmp_path / "p"
    result = pack([checkpoint], path, HOPPER, rows=[1], ops=["linear_add"], cache=cache)
    assert result.candidates == 4 and set(result.failures.values()) == {"ptxas fell over"} and len(result.failures) == 4
    with TuningPack(path) as opened:
        cases = [case for shape in opened.manifest.shapes for case in shape.cases]
        assert all([c.config for c in case.candidates] == [to_json(SLOW), to_json(FAST)] for case in cases)
        assert not any(case.before for case in cases)


def test_calls_rotate_over_the_copies(packed: Path) -> None:
    with TuningPack(packed) as opened:
        case = opened.manifest.shapes[0].cases[0]
        call = LaunchGraph.decode(opened.read(case.candidates[0].graph))
        inside = next(p for i, p in call.nodes[-1].pointers() if i == 1)
        shape = replace(
            opened.manifest.shapes[0], rotation=Rotation(inside.offset, inside.extent, 100 * 4096, 3)
        )  # fmt: skip
        inputs = LaunchGraph.decode(opened.read(shape.inputs))
    whole = chain(inputs, call, shape, 7)
    assert [node.predecessors for node in whole.nodes] == [(), *((i,) for i in range(14))]
    assert len({node.name for node in whole.nodes}) == 15 and whole.nodes[:1] == inputs.nodes
    graph = LaunchGraph(whole.nodes[1:])
    offsets = [node.args[1].offset for node in graph.nodes[1::2] if isinstance(node.args[1], Pointer)]
    assert offsets == [inside.offset + i % 3 * 100 * 4096 for i in range(7)]
    for i, node in enumerate(graph.nodes):  # nothing else moves
        first = call.nodes[i % 2].args
        assert [a for j, a in enumerate(node.args) if (i % 2, j) != (1, 1)] == [
            a for j, a in enumerate(first) if (i % 2, j) != (1, 1)
        ]


def test_calls_in_flight_have_scratch_memory_of_their_own(
    checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Config(64, 64, 64, 4, 2, swapped=False, kind="wide")
    monkeypatch.setattr(linear_tuning, "candidates", lambda *_: (wide,))
    pack([checkpoint], tmp_path / "p", HOPPER, rows=[512], ops=["linear_add"], cache=cache)
    with TuningPack(tmp_path / "p") as opened:
        shape = opened.manifest.shapes[0]
        tile, call = (LaunchGraph.decode(opened.read(c.graph)) for c in shape.cases[0].candidates)
        inputs = LaunchGraph.decode(opened.read(shape.inputs))
    result = [p for _, p in tile.nodes[-1].pointers() if p.region is Region.ARENA]  # a tile has no scratch memory
    assert len(result) == 1
    graph = chain(inputs, call, shape, 2 * SCRATCH_SLOTS)
    arena = [p for node in graph.nodes for _, p in node.pointers() if p.region is Region.ARENA]
    places = [p.offset for p in arena if p not in result]
    assert places[0] == shape.scratch.offset and len(set(places)) == SCRATCH_SLOTS > 128
    assert places[SCRATCH_SLOTS:] == places[:SCRATCH_SLOTS]
    assert all(b - a >= 8 * 256 for a, b in pairwise(sorted(set(places))))  # eight programs of 64 rows
    assert max(places) + 8 * 256 <= shape.arena_bytes


# ---- damaged packs --------------------------------------------------------------------------------------------


def test_damage_anywhere_is_noticed(packed: Path, tmp_path: Path) -> None:
    whole, path = packed.read_bytes(), tmp_path / "damaged"
    with TuningPack(packed) as opened:
        manifest = opened.manifest
    step = len(whole) // 150
    for at in range(7, len(whole), step):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        try:
            with TuningPack(path) as opened:
                opened.verify()
                assert opened.manifest == manifest  # bytes that say nothing, such as a time
        except ArtifactError as e:
            assert str(path) in e.message and e.hint
    for size in (0, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ArtifactError, match="is no pack made by"):
            TuningPack(path)
    with pytest.raises(ArtifactError, match=r"no pack at .*: No such file"):
        TuningPack(tmp_path / "nowhere")


def rewritten(packed: Path, path: Path, change: Any, *, drop: str | None = None) -> Path:
    """A copy of a pack with another manifest, whose digest is right, and maybe without a member."""
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(path, "w") as new:
        raw = json.loads(old.read("manifest.json"))
        change(raw)
        data = json.dumps(raw).encode()
        new.writestr("manifest.json", data)
        new.writestr("DIGEST", hashlib.sha256(data).hexdigest() + "\n")
        for name in old.namelist():
            if name not in ("manifest.json", "DIGEST", drop):
                new.writestr(name, old.read(name))
    return path


CHANGES: dict[str, Any] = {
    "format version 4": lambda raw: raw.update(format_version=4),
    "target cpu:x86-64-v3 is no GPU": lambda raw: raw.update(target="cpu:x86-64-v3"),
    "unknown target": lambda raw: raw.update(target="cuda:sm_1"),
    "peak is not positive": lambda raw: raw["peak"].update(flops_per_s=0),
    "copies of .* do not lie": lambda raw: raw["shapes"][0]["rotation"].update(copies=100000),
    "weights_bytes is -1": lambda raw: raw["shapes"][0].update(weights_bytes=-1),
    "scratch memory of .* does not lie": lambda raw: raw["shapes"][0]["scratch"].update(copies=100000, stride=4096),
    "result of .* does not lie": lambda raw: raw["shapes"][0].update(result_row_bytes=1 << 40),
    "repeats 17 times over 16 copies": lambda raw: raw["shapes"][0]["cases"][0].update(repeats=17),
    "graph .* is no member": lambda raw: raw["shapes"][0]["cases"][0].update(before="graphs/x.tslg"),
    "binary x is no member": lambda raw: raw["binaries"].update(x="kernels/x"),
    "malformed": lambda raw: raw.pop("shapes"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_manifest_that_makes_no_sense_is_refused(packed: Path, tmp_path: Path, message: str) -> None:
    path = rewritten(packed, tmp_path / "p", CHANGES[message])
    with pytest.raises(ArtifactError, match=message):
        TuningPack(path)


def test_a_pack_without_a_member(packed: Path, tmp_path: Path) -> None:
    with TuningPack(packed) as opened:
        name = opened.manifest.shapes[1].cases[0].candidates[0].graph
    path = rewritten(packed, tmp_path / "p", lambda raw: None, drop=name)
    with TuningPack(path) as opened, pytest.raises(ArtifactError, match=f"{name} is missing: this is no whole pack"):
        opened.verify()


def test_a_graph_whose_binary_is_not_packed(packed: Path, tmp_path: Path) -> None:
    path = rewritten(packed, tmp_path / "p", lambda raw: raw.update(binaries={}))
    with pytest.raises(ArtifactError, match=r"needs the binary '.*', which is none of the pack"):
        outcomes(path)
    assert FakeGpu.made[0].closed


# ---- measuring ------------------------------------------------------------------------------------------------


def test_the_fastest_comes_first_without_what_came_before(packed: Path) -> None:
    speed(packed, FAST, 4.0)
    speed(packed, WRONG, 5.0)
    found, results = outcomes(packed)
    assert len(FakeGpu.made) == 2 and results.skipped == []
    assert [(o.shape.key["K"], o.case.rows) for o in found] == [(64, 1), (64, 512), (96, 1), (96, 512)]
    for outcome in found:
        assert [t.config for t in outcome.timed] == [to_json(c) for c in (FAST, WRONG, SLOW)] and not outcome.excluded
        assert [t.us for t in outcome.timed] == pytest.approx([4, 5, 10], rel=3e-3)
        assert outcome.before_us == pytest.approx(BEFORE_US if outcome.case.rows == 1 else 0, rel=3e-3)
        assert 0 < outcome.timed[0].spread < 0.003
        assert outcome.replays == 4 * ROUNDS


def test_slow_candidates_leave_the_race(packed: Path) -> None:
    speed(packed, FAST, 4.0)
    speed(packed, WRONG, 4.1)
    outcomes(packed)
    few = sum(device.tickets for device in FakeGpu.made)
    FakeGpu.made.clear()
    speed(packed, SLOW, 4.05)
    outcomes(packed)
    assert sum(device.tickets for device in FakeGpu.made) == few + 4 * (ROUNDS - 1) * 5  # 4 cases, turns of 5 replays


def test_other_bits_are_out(packed: Path) -> None:
    FakeGpu.wrong = binaries(packed, WRONG)
    speed(packed, WRONG, 0.5)
    for outcome in outcomes(packed)[0]:
        assert [t.config for t in outcome.timed] == [to_json(SLOW), to_json(FAST)]
        assert outcome.excluded == ((to_json(WRONG), "its result has other bits than that of 2 others"),)


def test_the_first_may_be_the_wrong_one(packed: Path) -> None:
    FakeGpu.wrong = binaries(packed, SLOW)
    for outcome in outcomes(packed)[0]:
        assert {str(t.config) for t in outcome.timed} == {str(to_json(FAST)), str(to_json(WRONG))}
        assert [config for config, _ in outcome.excluded] == [to_json(SLOW)]


@pytest.mark.parametrize("idle", [[SLOW], [FAST], [SLOW, FAST, WRONG]], ids=["first", "second", "all"])
def test_kernels_that_write_nothing_are_out(packed: Path, idle: list[Config]) -> None:
    for config in idle:
        FakeGpu.lazy |= binaries(packed, config)
        speed(packed, config, 0.1)
    for outcome in outcomes(packed)[0]:
        assert [config for config, _ in outcome.excluded] == [to_json(config) for config in idle]
        assert {reason for _, reason in outcome.excluded} == {"it leaves the result of the call before it"}
        assert len(outcome.timed) == 3 - len(idle)


def test_what_the_driver_refuses_is_out(packed: Path) -> None:
    FakeGpu.broken = binaries(packed, FAST)
    for outcome in outcomes(packed)[0]:
        assert outcome.excluded == ((to_json(FAST), "it cannot be loaded: node 0: too much shared memory"),)
        assert len(outcome.timed) == 2


def test_time_is_shared_and_what_it_does_not_reach_is_skipped(packed: Path) -> None:
    found, _ = outcomes(packed)
    whole = FakeGpu.clock
    FakeGpu.clock = 0.0
    found, results = outcomes(packed, seconds=whole / 2)
    assert len(found) == 4 and not results.skipped
    assert all(4 <= outcome.replays < 4 * ROUNDS for outcome in found) and FakeGpu.clock < 0.8 * whole
    FakeGpu.clock = 0.0
    found, results = outcomes(packed, seconds=whole / 100)
    assert len(found) == 1
    assert results.skipped == [
        f"linear_add N=64 {case}" for case in ("K=64 bfloat16 M=512", "K=96 bfloat16 M=1", "K=96 bfloat16 M=512")
    ]  # fmt: skip


def test_matrices_hold_sane_numbers_that_do_not_repeat() -> None:
    block = filling()
    assert len(block) % 2 == 0 and math.gcd(len(block), 4096) == 2
    for (half,) in struct.iter_unpack("<H", block[:100000]):
        (value,) = struct.unpack("<f", struct.pack("<I", half << 16))
        assert 2**-7 <= abs(value) < 0.5
    assert {block[i : i + 4096] for i in range(0, 1 << 20, 4096)}.__len__() == 256
    assert filling() == block


# ---- which GPU ------------------------------------------------------------------------------------------------


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError) as caught:
        find_gpu(Target.parse("cuda:sm_100a"), None)
    assert caught.value.message == "the pack is for cuda:sm_100a; GPU 0 is NVIDIA H200, sm_90"
    assert caught.value.hint == "make one with `tokenspeed tune pack --target cuda:sm_90a`"
    b200 = (1, "NVIDIA B200", "sm_100", 180 << 30, 13000)
    plug_in(monkeypatch, H200, b200)
    assert find_gpu(Target.parse("cuda:sm_100a"), None).ordinal == 1
    assert find_gpu(HOPPER, 0).name == "NVIDIA H200"
    with pytest.raises(ArtifactError, match="the pack is for cuda:sm_90a; "):
        find_gpu(HOPPER, 1)
    with pytest.raises(UsageError, match=r"there is no GPU 2: GPU 0 is NVIDIA H200, sm_90, GPU 1"):
        find_gpu(HOPPER, 2)


def test_no_gpu_and_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, (*H200[:4], 12020))
    with pytest.raises(ResourceError, match=r"needs a driver of CUDA 12\.8 or later; GPU 0 .* has one of CUDA 12\.2"):
        find_gpu(HOPPER, None)
    plug_in(monkeypatch, reason="no NVIDIA driver is installed")
    with pytest.raises(ResourceError, match="no GPU was found: no NVIDIA driver is installed"):
        find_gpu(HOPPER, None)


# ---- tables ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of tables, which builds use."""
    folder = tmp_path / "tables"
    monkeypatch.setattr(linear_config, "TUNING_FOLDER", folder)
    linear_config._table.cache_clear()
    yield folder
    linear_config._table.cache_clear()


def write_results(packed: Path, path: Path, *, date: str = "2026-11-29", **changes: Any) -> Path:
    _, results = outcomes(packed)
    path.write_text(json.dumps({**results.to_json(), "date": date, **changes}))
    return path


def test_builds_use_what_was_measured(packed: Path, tmp_path: Path, tables: Path) -> None:
    """From the pack to the choice of a build."""
    speed(packed, FAST, 4.0)
    (merged,) = merge([write_results(packed, tmp_path / "r.json")])
    assert (merged.target, merged.path) == ("cuda:sm_90a", tables / "sm_90a.json")
    assert (merged.added, merged.replaced, merged.kept, merged.total) == (4, 0, 0, 4)
    for m in (1, 7, 512, 9000):
        assert choose(HOPPER, "linear_add", m, 64, 96, "bfloat16") == FAST
    entries = read_table(HOPPER)["linear"]
    first = entries[0]
    bound = (2 * 64 * 65 + 8 * 64) / 4.8e12
    assert first == {
        "op": "linear_add", "N": 64, "K": 64, "M": 1, "dtype": "bfloat16", "us": 4.0, "config": to_json(FAST),
        "runner_up": {"us": pytest.approx(10, rel=0.01), "config": to_json(SLOW)},
        "bound": "read", "share": round(bound * 1e6 / 4, 3), "share_of": "H200 SXM",
        "device": "NVIDIA H200", "date": "2026-11-29",
    }  # fmt: skip
    assert [(e["K"], e["M"]) for e in entries] == [(64, 1), (64, 512), (96, 1), (96, 512)]


def test_later_measurements_replace_earlier_ones_of_their_device(packed: Path, tmp_path: Path, tables: Path) -> None:
    old = write_results(packed, tmp_path / "old.json", date="2026-11-01")
    speed(packed, FAST, 4.0)
    new = write_results(packed, tmp_path / "new.json", date="2026-11-20")
    other = write_results(packed, tmp_path / "other.json", date="2026-11-10", device="NVIDIA H100")
    merge([new])
    text = (tables / "sm_90a.json").read_text()
    (merged,) = merge([old])
    assert (merged.added, merged.replaced, merged.kept) == (0, 0, 4)
    assert (tables / "sm_90a.json").read_text() == text
    (merged,) = merge([other, new])
    assert (merged.added, merged.replaced, merged.total) == (4, 4, 8)
    assert [e["device"] for e in read_table(HOPPER)["linear"]] == ["NVIDIA H100", "NVIDIA H200"] * 4
    first = tmp_path / "first"
    for order in ([old, other, new], [new, other, old]):
        merge(order, tmp_path / str(len(first.name)))
        assert (tmp_path / str(len(first.name)) / "sm_90a.json").read_text() == (tables / "sm_90a.json").read_text()
    assert choose(HOPPER, "linear_add", 1, 64, 64, "bfloat16") == FAST  # of the two devices', what was measured last


BAD: dict[str, Any] = {
    "it does not say that it is one": lambda raw: raw.update(kind="a diary"),
    "it has format version 7": lambda raw: raw.update(format_version=7),
    "it has no 'target'": lambda raw: raw.pop("target"),
    "its target is cpu": lambda raw: raw.update(target="cpu:x86-64-v3"),
    "date is 'soon'": lambda raw: raw.update(date="soon"),
    "no table has a list 'norms'": lambda raw: raw["entries"][0].update(family="norms"),
    "M is 0": lambda raw: raw["entries"][0].update(M=0),
    "a call took 0 us": lambda raw: raw["entries"][0]["timed"][0].update(us=0),
    "num_warps is 'many'": lambda raw: raw["entries"][0]["timed"][1]["config"].update(num_warps="many"),
    "unexpected keyword": lambda raw: raw["entries"][0]["timed"][1]["config"].update(colour=1),
    "does not fit cuda:sm_90a": lambda raw: raw["entries"][0]["timed"][0]["config"].update(block_k=8192),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_result_is_refused_and_changes_nothing(
    packed: Path, tmp_path: Path, tables: Path, message: str
) -> None:
    good = write_results(packed, tmp_path / "good.json")
    raw = json.loads(good.read_text())
    BAD[message](raw)
    (tmp_path / "bad.json").write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match=message):
        merge([good, tmp_path / "bad.json"])
    assert not tables.exists()


def test_a_table_that_cannot_be_read(packed: Path, tmp_path: Path, tables: Path) -> None:
    good = write_results(packed, tmp_path / "good.json")
    tables.mkdir()
    for text in ("{", '{"format_version": 9}', '{"format_version": 1, "linear": [{"op": "linear"}]}'):
        (tables / "sm_90a.json").write_text(text)
        with pytest.raises(ArtifactError, match=r"sm_90a\.json is no tuning table"):
            merge([good])
        assert (tables / "sm_90a.json").read_text() == text


def test_the_tables_of_this_version_can_be_read() -> None:
    for path in linear_config.TUNING_FOLDER.glob("*.json"):
        assert read_table(Target("cuda", path.stem))["linear"]


# ---- the command line -----------------------------------------------------------------------------------------


def test_the_walk_on_the_command_line(
    checkpoint: Path, tmp_path: Path, tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = str(tmp_path / "p"), tmp_path / "r.json"
    words = [
        "tune",
        "pack",
        str(checkpoint),
        "-o",
        path,
        "--target",
        "cuda:sm_90a",
        "--rows",
        "2",
        "--op",
        "linear_add",
    ]
    assert main([*words, "--no-cache", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "2 shapes, 2 cases, 6 candidates, 10 binaries for cuda:sm_90a"
    FakeGpu.wrong = binaries(Path(path), WRONG)
    speed(Path(path), FAST, 4.0)
    assert main(["tune", "run", path, "-o", str(found)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:8] == ["linear_add", "N=64", "K=64", "2", "4.00", "10.01", "2", "1"]
    assert out.splitlines()[-1] == f"{found}: 2 cases on NVIDIA H200"
    assert "out: linear_add N=64 K=64 bfloat16 M=2: 16x32x64 warps 4, stages 2, swapped, group 8, prefetch 0:" in err
    assert "other bits" in err and "tune: case 1 of 2" in err
    assert main(["tune", "merge", str(found)]) == 0
    assert capsys.readouterr().out == (
        f"{tables / 'sm_90a.json'}: 2 added, 0 replaced, 0 kept as measured later, 2 entries for cuda:sm_90a\n"
    )
    assert main(["tune", "show", "--target", "cuda:sm_90a", "--op", "linear_add"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["op", "sizes", "M", "us", "share", "config", "runner-up", "device", "date"]
    assert len(shown) == 3 and "16x32x64 warps 2, stages 2, swapped" in shown[1] and "NVIDIA H200" in shown[1]
    assert main(["tune", "show", "--target", "cuda:sm_90a", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 2
    assert main(["tune", "show", "--target", "hip:gfx950"]) == 0
    assert "nothing was measured for hip:gfx950: builds choose by rule" in capsys.readouterr().err


def test_a_lost_device_keeps_what_was_measured(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(packed)
    FakeGpu.lose = FakeGpu.made[0].tickets - 5  # in the second case
    FakeGpu.made.clear()
    found = tmp_path / "r.json"
    assert main(["tune", "run", str(packed), "-o", str(found)]) == ResourceError.exit_code
    err = capsys.readouterr().err
    assert "error: GPU 0 (NVIDIA H200) failed at linear_add N=64 K=64 bfloat16: the device NVIDIA H200 is lost" in err
    assert len(json.loads(found.read_text())["entries"]) == 1
    assert all(device.closed for device in FakeGpu.made) and not ContextDouble.opened


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "{pack}", "-o", "nowhere/r.json"], "there is no folder nowhere"),
        (["run", "{pack}", "-o", "r.json", "--seconds", "0"], "--seconds is 0.0"),
        (["pack", "x", "-o", "p", "--target", "cuda:sm_90a", "--rows", "1,a"], "--rows is '1,a'"),
        (["pack", "x", "-o", "p", "--target", "cuda:sm_90a", "--jobs", "0"], "--jobs is 0"),
        (["merge", "{pack}"], "holds no results of `tokenspeed tune run`"),
        (["show", "--target", "cuda:sm_9"], "unknown target 'cuda:sm_9'"),
    ],
)
def test_what_makes_no_sense(packed: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["tune", *(word.format(pack=packed) for word in words)]) > 0
    assert message in capsys.readouterr().err


RUNNING = "import tokenspeed.cli.tune, tokenspeed.runtime.tuning"
SHOWING = """
import tokenspeed.compile.tuning_tables
from tokenspeed.cli import main
main(["tune", "show", "--target", "cuda:sm_90a"])
"""


@pytest.mark.parametrize(
    ("code", "never"),
    [(RUNNING, ("tokenspeed.compile", "tokenspeed.kernels")), (SHOWING, ())],
    ids=["run", "show and merge"],
)
def test_only_packing_needs_more_than_the_base_install(code: str, never: tuple[str, ...]) -> None:
    heavy = ("numpy", "triton", "torch", "tqdm", "ml_dtypes", *never)
    code = f"import sys\n{code}\nprint([name for name in sys.modules if name.startswith({heavy!r})])"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, env=cli_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
