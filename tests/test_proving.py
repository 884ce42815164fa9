"""`tokenspeed prove`: packs of kernels, runs on a GPU (here the interpreter), classes, how selection keeps to them."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from proving_gpu import HOPPER, InterpretedGpu, packed, plug_in

from tokenspeed.cli import main
from tokenspeed.compile import class_tables, proving
from tokenspeed.compile.equivalence import prove_selection
from tokenspeed.compile.proof_cases import linear_case, norm_case
from tokenspeed.compile.select import Selection
from tokenspeed.errors import ArtifactError, SelectionError, UsageError
from tokenspeed.kernels import equivalence
from tokenspeed.kernels.registry import Request
from tokenspeed.kernels.triton import linear, proofs, source
from tokenspeed.kernels.triton.linear_config import Config
from tokenspeed.kernels.triton_specs import triton_registry
from tokenspeed.proof_pack import Answer, ProofPack, RowsSeen, equal_answers
from tokenspeed.runtime.pack_device import find_gpu
from tokenspeed.runtime.places import Gpu
from tokenspeed.runtime.proving import ProofResults, compare

EQUAL = Config(16, 32, 32, 4, 2, swapped=False)
ALSO = replace(EQUAL, num_stages=3)
OTHER = replace(EQUAL, num_warps=8)
"""The interpreter knows neither warps nor stages: what OTHER gives is spoiled."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("code")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One H200, three members of the projections, and an empty folder of classes."""
    plug_in(monkeypatch)
    monkeypatch.setattr(equivalence, "TUNING_FOLDER", tmp_path)
    monkeypatch.setattr(
        proofs.LinearMembers, "members", lambda *_: tuple(map(proofs.linear_member, (EQUAL, ALSO, OTHER)))
    )
    equivalence.known_classes.cache_clear()
    yield
    equivalence.known_classes.cache_clear()


@pytest.fixture
def pack(tmp_path: Path, cache: Path) -> Path:
    result = packed(tmp_path / "p", [linear_case("linear", "float32", 16, most=20), norm_case("float32", 48)], cache)
    assert (result.counts["cases"], result.counts["members"], result.failures) == (2, 4, {})
    assert result.nbytes < 200_000
    return tmp_path / "p"


def run(path: Path) -> ProofResults:
    with ProofPack(path) as opened:
        results = ProofResults(opened, find_gpu(HOPPER, None, "a command"))
        compare(results)
        return results


def spoiling(kernel: str, warps: int, place: int, at_least: int) -> Any:
    """Flips a bit of row ``place`` (of 1152 bytes) of what a kernel gives for so many rows."""

    def spoil(used: Any, count: int, arena: Any) -> None:
        if used[-1].function == kernel and used[-1].num_warps == warps and count >= at_least:
            arena[place * 1152 + 5] ^= 1

    return staticmethod(spoil)


def test_members_of_other_bits_are_in_a_class_of_their_own(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpretedGpu, "spoil", spoiling("linear", 8, 0, 1))
    projection, norm = run(pack).cases
    # Row 0 of every run has the same bit flipped, whatever logical row that is: those of one run alone agree at first.
    assert [m["num_warps"] for m, _ in projection.excluded] == [8]
    assert projection.classes == ((proofs.linear_member(EQUAL), proofs.linear_member(ALSO)),)
    assert "differs from the same row in run" in projection.excluded[0][1]
    assert norm.classes == (({"kernel": "rms_norm", "warps": 4},),) and norm.excluded == () and norm.rows > 200


def test_a_row_that_sees_the_others_is_named(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpretedGpu, "spoil", spoiling("linear", 4, 2, 16))
    projection, _ = run(pack).cases
    assert projection.classes == ((proofs.linear_member(OTHER),),)
    assert [reason for _, reason in projection.excluded] == [
        "row 2 of run '16 from 0' differs from the same row in run '3 from 2'"
    ] * 2


def test_what_is_not_written_is_noticed(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def erase(used: Any, count: int, arena: Any) -> None:
        if used[-1].function == "rms_norm" and count == 3:
            arena[192:384] = 0xA5

    monkeypatch.setattr(InterpretedGpu, "spoil", staticmethod(erase))
    _, norm = run(pack).cases
    assert norm.classes == () and norm.excluded[0][1] == "run '3 from 2': it leaves row 1 as it was"


def test_answers_of_other_rows_share_a_class_where_they_meet() -> None:
    def answer(name: str, **rows: bytes) -> Answer:
        return Answer({"kernel": name}, {int(label[1:]): row for label, row in rows.items()})

    groups = equal_answers([
        answer("token", r3=b"c"), answer("chunk", r1=b"a", r2=b"b", r3=b"c"), answer("wrong", r3=b"x"),
        answer("apart", r9=b"z"), Answer({"kernel": "out"}, {}, "why"),
    ])  # fmt: skip
    assert [[m["kernel"] for m in group.members] for group in groups] == [["chunk", "token"], ["wrong"], ["apart"]]
    seen = RowsSeen()
    assert seen.add("one", (4, 5), (b"a", b"b")) == "" and seen.add("two", (5,), (b"b",)) == ""
    assert seen.vacuous() == ""
    assert seen.add("zeros", (6, 7, 8, 9, 10), (b"0",) * 5) == ""
    assert seen.vacuous() == "4 of its 7 rows have the bits of another: the probes did not reach it"
    assert seen.add("three", (4,), (b"b",)) == "row 0 of run 'three' differs from the same row in run 'one'"


# --- classes, and selection -----------------------------------------------------------------------


def merged(pack: Path, tmp_path: Path) -> list[Any]:
    found = tmp_path / "r.json"
    found.write_text(json.dumps(run(pack).to_json()))
    (part,) = class_tables.merge([found])
    assert (part.added, part.replaced, part.total) == (2, 0, 2)
    return [proven for _, proven in sorted(equivalence.read_classes(HOPPER).items())]


def ask(**sizes: int) -> Request:
    sizes = {"N": 288, "K": 16, "rows": 0, "M": 8, "num_tokens": 8, "num_seqs": 8, "num_logit_rows": 8, **sizes}
    return Request("linear", HOPPER, "float32", sizes, {"phase": "decode"}, solution="aok")


def test_aok_keeps_to_the_class(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SelectionError, match="aok:linear_fp32: proof: need kernels proven bitwise equal on cuda:sm_90a"
    ):
        triton_registry().select(ask())
    monkeypatch.setattr(InterpretedGpu, "spoil", spoiling("linear", 8, 0, 1))
    projection, norm = merged(pack, tmp_path)
    assert (projection.op, norm.op) == ("linear", "rms_norm") and projection.date and projection.device == "NVIDIA H200"
    assert projection.shapes == ("N=288 K=16",) and projection.functions == (f"{linear.__name__}.linear",)
    monkeypatch.setattr(proofs, "choose", lambda *_: replace(ALSO, group_m=4, prefetch=64))
    spec, _ = triton_registry().select(ask())
    (stage,) = spec.stages(ask())
    assert stage.kernel is not None and dict(stage.kernel.constants)["GROUP_M"] == 4  # what no sum depends on is kept
    assert spec.proof is not None and spec.proof.choose(ask()).instead_of == ()
    monkeypatch.setattr(proofs, "choose", lambda *_: OTHER)
    monkeypatch.setattr(proofs, "rule", lambda *_: EQUAL)
    choice = spec.proof.choose(ask())
    assert choice.members == (proofs.linear_member(EQUAL),) and choice.instead_of == (proofs.linear_member(OTHER),)
    monkeypatch.setattr(proofs, "rule", lambda *_: OTHER)
    with pytest.raises(SelectionError, match=r"num_warps 8, .*which is none, and nothing that may stand in for it"):
        triton_registry().select(ask())


def test_a_proof_is_of_the_source_and_of_the_compiler(pack: Path, tmp_path: Path) -> None:
    projection, norm = merged(pack, tmp_path)
    for change, problem in (
        ({"source": "0" * 64}, "the kernels have changed since they were proven on NVIDIA H200"),
        ({"functions": (f"{linear.__name__}.gone",)}, "the kernels have changed since they were proven on NVIDIA H200"),
        ({"compiler": "triton 3.5.0"}, "the kernels were proven as compiled by triton 3.5.0, this is triton 3"),
    ):
        class_tables.merge_classes(HOPPER, [replace(projection, **change)])
        with pytest.raises(SelectionError, match=problem) as caught:
            triton_registry().select(ask())
        assert caught.value.hint is not None and "docs/equivalence.md" in caught.value.hint
    states = {proven.op: state for proven, state in class_tables.shown(HOPPER)}
    assert states["rms_norm"] == "in force" and states["linear"].startswith("the kernels were proven as compiled by")
    assert norm.has({"kernel": "rms_norm", "warps": 4})


def test_the_record_says_what_was_replaced(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowered import LIMITS, fused_program
    from tiny_llama import tiny_config

    from tokenspeed.compile.lower import plan_target

    monkeypatch.setattr(InterpretedGpu, "spoil", spoiling("linear", 8, 0, 1))
    merged(pack, tmp_path)
    program = fused_program(tiny_config(hidden_size=64, intermediate_size=80))
    with pytest.raises(
        SelectionError, match=r"paged_attention in float32, head_dim \d+, kv_tile \d+, have no such proof"
    ):
        plan_target(program, HOPPER, LIMITS, triton_registry(), split_positions=64, solution="aok")
    monkeypatch.setattr(proofs, "choose", lambda *_: OTHER)
    monkeypatch.setattr(proofs, "rule", lambda *_: EQUAL)
    plan = plan_target(program, HOPPER, LIMITS, triton_registry(), split_positions=64, pinned={"linear": "aok"})
    record = prove_selection(plan.selection)
    assert isinstance(plan.selection, Selection) and record["target"] == "cuda:sm_90a"
    (entry,) = record["classes"]
    assert entry["op"] == "linear" and entry["proven_by"] == "table"
    assert entry["used"] == [proofs.linear_member(EQUAL)] and entry["instead_of"] == [proofs.linear_member(OTHER)]


def test_shapes_share_a_class_only_where_all_agree() -> None:
    def case(shape: str, classes: list[list[str]], excluded: tuple[str, ...] = ()) -> dict[str, Any]:
        return {
            "op": "linear", "dtype": "bfloat16", "key": {}, "shape": shape, "rows": 5, "functions": ["m.f"],
            "source": "s", "classes": [[{"kernel": m} for m in group] for group in classes],
            "excluded": [{"member": {"kernel": m}, "reason": "why"} for m in excluded],
        }  # fmt: skip

    about = {"probes": {}, "compiler": "c", "device": "d", "driver": "1", "date": "2026-11-30"}
    proven = class_tables.proven_class(
        [case("K=1", [["a", "b", "c"], ["d"]]), case("K=2", [["b", "c", "d"]], ("a",))], about
    )
    assert proven is not None and [m["kernel"] for m in proven.members] == ["b", "c"] and proven.rows == 10
    assert {m["kernel"]: reason for m, reason in proven.outside} == {
        "a": "K=1: other bits than those of the class", "d": "K=1: other bits than those of the class",
    }  # fmt: skip
    assert class_tables.proven_class([case("K=1", [], ("a",))], about) is None
    with pytest.raises(ValueError, match="different sources"):
        class_tables.proven_class([case("K=1", [["a"]]), {**case("K=2", [["a"]]), "source": "t"}], about)


def test_constants_that_no_digest_sees() -> None:
    """What a launch is given that is neither a size nor part of a member: who changes one proves the kernels anew."""
    sizes = {
        "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 64, "page_stride": 1 << 15,
        "pages_per_seq": 4, "split_positions": 256, "num_tokens": 64, "num_seqs": 8, "num_logit_rows": 8,
    }  # fmt: skip
    for target, width in (("cuda:sm_90a", 8), ("hip:gfx950", 16)):
        request = Request("paged_attention", equivalence.Target.parse(target), "bfloat16", sizes)
        attention = proofs.MEMBERS["paged_attention"]
        stages = [s for member in attention.members(request) for s in attention.stages(request, member)]
        found = [dict(stage.kernel.constants) for stage in stages if stage.kernel is not None]
        assert {constants["WIDTH"] for constants in found if "WIDTH" in constants} == {width}
        assert {name for constants in found for name in constants} == {
            "NQ", "NKV", "D", "BLOCK_D", "PAGE_SIZE", "PAGE_STRIDE", "PAGES_PER_SEQ", "SPLIT", "SPLITS", "SEQS",
            "KV_TILE", "BLOCK_M", "WIDTH", "AHEAD", "PDL",
        }  # fmt: skip
    of_sampling = {"V", "CHUNK", "CHUNKS", "LANES", "WORDS", "SHARDS", "BLOCKS", "BLOCK_LANES", "PDL"}
    for op, names in (("rms_norm", {"H", "BLOCK", "ROWS", "PDL"}), ("sample", of_sampling)):
        request = Request(op, HOPPER, "float32", {"H": 64, "M": 8, "rows": 0, "V": 4096, "logprob_shards": 2, **sizes})
        choice = proofs.MEMBERS[op]
        (member,) = choice.members(request)
        stages = list(choice.stages(request, member))
        assert {n for s in stages if s.kernel is not None for n in dict(s.kernel.constants)} == names
        assert {s.kernel.num_stages for s in stages if s.kernel is not None} == {1}


def test_where_everything_is_equal_aok_launches_what_auto_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the classes of this checkout, if they are in force; otherwise a build says that they are not."""
    from tokenspeed.bucket import StepLimits
    from tokenspeed.compile.dummy_weights import DummyCheckpoint
    from tokenspeed.compile.lower import plan_target
    from tokenspeed.compile.models import build_program
    from tokenspeed.compile.passes import CPU_PASSES, run_passes

    monkeypatch.setattr(equivalence, "TUNING_FOLDER", Path(equivalence.__file__).resolve().parent / "tuning")
    equivalence.known_classes.cache_clear()
    shape = Path(__file__).resolve().parent.parent / "artifacts/recipes/shapes/llama-3.1-8b"
    model = build_program(DummyCheckpoint(shape, 0).config, dtype="bfloat16", max_model_len=4096, page_size=64)
    program, limits = run_passes(model, CPU_PASSES), StepLimits(8192, 256, 256)
    auto = plan_target(program, HOPPER, limits, triton_registry(), split_positions=256)
    states = {state for _, state in class_tables.shown(HOPPER)}
    try:
        strict = plan_target(program, HOPPER, limits, triton_registry(), split_positions=256, solution="aok")
    except SelectionError as e:
        assert states != {"in force"} and "prove them again" in e.message
        return
    assert strict.kernels == auto.kernels
    classes = prove_selection(strict.selection)["classes"]
    assert all(entry["instead_of"] == [] for entry in classes) and len(classes) == 6


def test_kernels_of_libraries_are_never_aok() -> None:
    from tokenspeed.kernels.flashinfer_specs import flashinfer_specs
    from tokenspeed.kernels.registry import fixed_order

    assert {spec.solution for spec in fixed_order(flashinfer_specs(None))} == {"flashinfer"}
    fixed = {spec.op for spec in triton_registry().specs if spec.solution == "aok"}
    assert fixed == {spec.op for spec in triton_registry().specs}


# --- digests of source ----------------------------------------------------------------------------

_MODULE = """
import triton
import triton.language as tl

WIDTH = tl.constexpr({width})

@triton.jit
def inner(x):
    return x {sign} WIDTH{comment}

@triton.jit
def outer(p):
    {doc}tl.store(p,   inner(tl.load(p)))
"""


def digest_of(folder: Path, name: str, **changes: str) -> str:
    text = _MODULE.format(**{"width": "8", "sign": "+", "comment": "", "doc": "", **changes})
    path = folder / f"{name}.py"
    path.write_text(text)
    module = f"tokenspeed.kernels.triton._made_{name}"
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None and spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[module])
        parts: dict[str, str] = {}
        source._collect(sys.modules[module].outer, parts)
        return "\n".join(f"{key} {body}" for key, body in sorted(parts.items())).replace(module, "MODULE")
    finally:
        del sys.modules[module]


def test_a_digest_sees_what_a_kernel_reaches_and_no_comments(tmp_path: Path) -> None:
    before = digest_of(tmp_path, "a")
    assert digest_of(tmp_path, "b", comment="  # a note") == before
    assert digest_of(tmp_path, "c", doc='"""Says what it does."""\n    ') == before
    assert digest_of(tmp_path, "d", sign="-") != before
    assert digest_of(tmp_path, "e", width="16") != before
    assert "inner" in before and "WIDTH" in before


@pytest.mark.parametrize("name", ["", "x", ".x", "antigravity.fly", "tokenspeed.cli.main.main", "tokenspeed.kernels.x"])
def test_a_digest_imports_kernels_only(name: str) -> None:
    """Names of functions come from files of results and classes."""
    with pytest.raises(ImportError):
        source.source_digest((name,))
    assert "antigravity" not in sys.modules


def test_a_digest_does_not_depend_on_fields_that_new_pythons_add() -> None:
    (function,) = ast.parse("def f(x):\n    return x").body
    before = source._shape(function)
    function.new_field = []  # type: ignore[attr-defined]
    function._fields = (*function._fields, "new_field")  # type: ignore[misc]
    assert source._shape(function) == before


def test_every_member_of_every_op_is_found_again_by_selection() -> None:
    """What a build chooses for the shapes of the table is a member that a pack compares."""
    from tokenspeed.kernels.triton.linear_config import measured

    assert len(measured(HOPPER)) > 100
    for op in ("linear", "linear_add", "linear_silu_mul"):
        request = Request(op, HOPPER, "bfloat16", {"N": 288, "F": 144, "K": 576, "rows": 0, "M": 8})
        members = _all_members(op, request)
        for m in (1, 8, 64, 256, 2048, 8192):
            options = proofs.MEMBERS[op].wanted(replace(request, sizes={**request.sizes, "M": m}))
            assert options[0][0][0] in members, (op, m)


def _all_members(op: str, request: Request) -> Any:
    return _MEMBERS(proofs.MEMBERS[op], request)


_MEMBERS = proofs.LinearMembers.members


# --- hostile packs and results --------------------------------------------------------------------


def test_packs_and_results_that_are_none(pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArtifactError, match="no pack at"):
        ProofPack(tmp_path / "nowhere")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ArtifactError, match="is no pack made by `tokenspeed prove pack`"):
        ProofPack(tmp_path / "text")
    data = bytearray(pack.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 6] = 188  # the version of zip that the last member needs
    (tmp_path / "new").write_bytes(data)
    with pytest.raises(ArtifactError, match="is no pack made by `tokenspeed prove pack`, or a part of one: zip file v"):
        ProofPack(tmp_path / "new")
    with pytest.raises(UsageError, match="op 'embedding' has no sums to compare"):
        proving.pack(tmp_path / "x", HOPPER, ops=["embedding"])
    with pytest.raises(UsageError, match="packs are for GPUs"):
        proving.pack(tmp_path / "x", equivalence.Target.parse("cpu:x86-64-v4"))
    with pytest.raises(ArtifactError, match="exists already"):
        proving.pack(pack, HOPPER)
    with zipfile.ZipFile(pack) as archive:
        raw = json.loads(archive.read("manifest.json"))
    for change, problem in (
        (lambda m: m.update(format_version=9), "need a proof pack of format version 1, have one of version 9"),
        (lambda m: m.update(target="cpu:x86-64-v4"), "target cpu:x86-64-v4 is no GPU"),
        (lambda m: m["cases"][0].update(weights_bytes=7), "are not 7 bytes"),
        (lambda m: m["cases"][0]["data"][0].update(offset=1 << 40), "has no .* bytes at"),
        (lambda m: m["cases"][0]["results"][0].update(row_bytes=1 << 30), "does not lie in its region host_io"),
        (lambda m: m["cases"][0]["runs"][0].update(labels=[-1]), "has labels"),
        (lambda m: m["cases"][0]["compared"][0].update(graphs=[]), "has other graphs than runs"),
        (lambda m: m["cases"][0].update(fetch="graphs/none"), "the graph graphs/none is no member"),
        (lambda m: m["cases"][0].update(runs=[]), "compares nothing"),
        (lambda m: m["binaries"].update(none="kernels/none"), "the binary none is no member"),
    ):
        copy = json.loads(json.dumps(raw))
        change(copy)
        with pytest.raises(ArtifactError, match=problem):
            proving.ProofManifest.from_bytes(json.dumps(copy).encode())
    for text in ("{}", "[]", '{"kind": "tokenspeed proof results"}', "\xff"):
        (tmp_path / "r.json").write_text(text)
        assert main(["prove", "merge", str(tmp_path / "r.json")]) == ArtifactError.exit_code
        assert "holds no results of `tokenspeed prove run`" in capsys.readouterr().err
    assert not (tmp_path / "sm_90a.classes.json").exists()


def test_the_walk_on_the_command_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proving, "default_cases", lambda: iter([norm_case("bfloat16", 32)]))
    path, found = str(tmp_path / "p"), str(tmp_path / "r.json")
    assert main(["prove", "pack", "--target", "cuda:sm_90a", "-o", path, "--jobs", "1", "--no-cache"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "1 cases, 1 members, 4 binaries for cuda:sm_90a"
    assert main(["prove", "run", path, "-o", found]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "rms_norm bfloat16 H=32: 1 equal, 0 out, 257 rows of each" and "1 cases on NVIDIA H200" in out[1]
    assert main(["prove", "show", "--target", "cuda:sm_90a"]) == 0
    assert "nothing was proven for cuda:sm_90a" in capsys.readouterr().err
    for name, nothing, message in (
        ("rows", 0, "its case rms_norm H=32 compared nothing"), ("functions", [], "its case rms_norm H=32 compared"),
        ("classes", [[]], "the class of rms_norm bfloat16 has no members"), ("rows", 1 << 70, "rows is 11805"),
    ):  # fmt: skip
        results = json.loads(Path(found).read_text())
        results["cases"][0][name] = nothing
        (tmp_path / "nothing.json").write_text(json.dumps(results))
        assert main(["prove", "merge", str(tmp_path / "nothing.json")]) == ArtifactError.exit_code
        assert message in capsys.readouterr().err
    assert main(["prove", "merge", found]) == 0
    assert capsys.readouterr().out.endswith("1 added, 0 replaced, 1 classes for cuda:sm_90a\n")
    assert main(["prove", "show", "--target", "cuda:sm_90a"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rms_norm bfloat16 block=32: 1 members equal over 257 rows of each (NVIDIA H200, ")
    assert isinstance(find_gpu(HOPPER, 0, "a command"), Gpu)
