"""Packs: what `tokenspeed tune pack` puts into one, and damaged ones."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tuning_gpu import FAST, HOPPER, SLOW, WRONG, FakeGpu, outcomes

from tokenspeed.compile import codegen, pack_writer, tuning
from tokenspeed.compile.tuning import pack
from tokenspeed.errors import ArtifactError, TargetError, UsageError
from tokenspeed.graph import LaunchGraph, Pointer, Region
from tokenspeed.kernels.triton import linear_tuning
from tokenspeed.kernels.triton.linear_config import Config, to_json
from tokenspeed.target import Target
from tokenspeed.tuning_pack import SCRATCH_SLOTS, Rotation, TuningPack, chain

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
        done = codegen.compile_kernels(jobs, failures=failures, **options)
        for kernel, target in list(done):
            wrong = kernel.function != "stage_io" and kernel.num_warps == WRONG.num_warps
            if kernel.function == "rms_norm" or wrong:
                failures[kernel, target] = TargetError("ptxas fell over")
                del done[kernel, target]
        return done

    monkeypatch.setattr(pack_writer, "compile_kernels", failing)
    path = tmp_path / "p"
    result = pack([checkpoint], path, HOPPER, rows=[1], ops=["linear_add"], cache=cache)
    assert result.counts["candidates"] == 4
    assert set(result.failures.values()) == {"ptxas fell over"} and len(result.failures) == 4
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
