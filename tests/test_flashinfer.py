"""Solution flashinfer: what is captured for a model, how it is lowered, and what a build without a GPU says."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from lowered import LIMITS, fused_program
from tiny_llama import tiny_config

pytest.importorskip("triton")

from tokenspeed.bucket import BucketKind
from tokenspeed.compile import build as build_module
from tokenspeed.compile.capture import CapturedCall, CaptureJob, Captures, RawLaunch, relocate, stand_ins
from tokenspeed.compile.capture_toolchain import source_folder
from tokenspeed.compile.lower import Binary, LoweredTarget, TargetPlan, lower_target, plan_target
from tokenspeed.errors import SelectionError
from tokenspeed.graph import Access, Node, Region
from tokenspeed.kernels.flashinfer_specs import _mma_kv, flashinfer_specs
from tokenspeed.kernels.registry import Registry, Request
from tokenspeed.kernels.triton_specs import triton_registry
from tokenspeed.target import Target

H200 = Target("cuda", "sm_90a")
PINNED = {"paged_attention": "flashinfer"}


def planned(problem: str | None = None, features: frozenset[str] = frozenset()) -> TargetPlan:
    program = fused_program(replace(tiny_config(), head_dim=64, intermediate_size=64), "bfloat16")
    registry = Registry([*triton_registry().specs, *flashinfer_specs(problem)])
    return plan_target(program, H200, LIMITS, registry, split_positions=64, pinned=PINNED, features=features)


def call(job: CaptureJob) -> CapturedCall:
    """One launch that takes all pointers in a struct, as if captured."""
    first, second = (
        [RawLaunch(job.kernel.function, (1, 1, 1), (32, 1, 1), (1, 1, 1), 0,
                   (struct.pack(f"<{job.num_pointers}Q", *stand_ins(job.num_pointers, n)),))]
        for n in (0, 1)
    )  # fmt: skip
    return CapturedCall("flashinfer-0", relocate(first, second, job.num_pointers, str(job.kernel)))


@pytest.fixture(scope="module")
def low() -> LoweredTarget:
    plan = planned()
    binaries = {kernel: Binary(f"triton-{i}", 128, 0) for i, kernel in enumerate(plan.kernels)}
    return lower_target(plan, binaries, Captures({job: call(job) for job in plan.captures}, {"flashinfer-0": b"code"}))


def attention(low: LoweredTarget, kind: BucketKind) -> list[list[Node]]:
    """Per bucket of a kind the nodes that were captured."""
    graphs = (graph for bucket, graph in low.graphs.items() if bucket.kind is kind)
    return [[node for node in g.nodes if node.launch and node.launch.binary == "flashinfer-0"] for g in graphs]


def test_what_is_captured_is_apart_from_what_is_compiled() -> None:
    plan = planned()
    assert not any("flashinfer" in kernel.module for kernel in plan.kernels)
    functions = {job.kernel.function for job in plan.captures}
    names = ("decode_plan", "decode", "prefill_plan", "prefill")
    assert functions == {f"tokenspeed_flashinfer_{name}" for name in names}
    buckets = len(plan.selection.plans)
    assert buckets < len(plan.captures) <= 2 * buckets  # a plan and an attention, whatever the number of layers
    scales = {job.floats for job in plan.captures if not job.kernel.function.endswith("_plan")}
    assert scales == {(64**-0.5,)}


def enumerators(source: str, *enums: str) -> list[str]:
    """What a launcher calls its arguments, in order: the common enum, then its own, in snake case."""
    text = "".join((source_folder() / "flashinfer" / name).read_text() for name in ("attention.cuh", source))
    bodies = ",".join("".join(re.findall(rf"enum {enum} {{([^}}]*)}}", text)) for enum in enums)
    names = [word.split("=")[0].strip().removeprefix("k") for word in bodies.split(",") if word.strip()]
    return [re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("Plan")).lower()
            for name in names if not name.startswith("Own")]  # fmt: skip


@pytest.mark.parametrize(("phase", "source"), [("decode", "decode"), ("mixed", "prefill")])
def test_arguments_come_in_the_order_that_the_launchers_expect(phase: str, source: str) -> None:
    spec = next(spec for spec in flashinfer_specs(None) if spec.symbol == f"flashinfer_{phase}")
    sizes = {"num_tokens": 8, "num_seqs": 8, "pages_per_seq": 4, "page_size": 64, "page_stride": 1 << 16,
             "num_kv_heads": 2, "num_heads": 8, "head_dim": 64}  # fmt: skip
    plan, attention = spec.stages(Request("paged_attention", H200, "bfloat16", sizes))
    spelled = {"q": "query", "num_seqs": "seqs", "pages_per_seq": "pages"}
    for stage, prefix, other in (
        (plan, "Plan", {}),
        (attention, "", {"cu_seqlens": "query_indptr", "seqs": "num_seqs"}),
    ):
        assert stage.library is not None
        pointers = [spelled.get(rule.name, rule.name) for rule in stage.arguments if rule.kind != "float"]
        assert [other.get(n, n) for n in pointers] == enumerators(
            f"{source}.cu", f"{prefix}Pointer", f"Own{prefix}Pointer"
        )
        integers = [spelled.get(name, name) for name, _ in stage.library.integers]
        assert [other.get(n, n) for n in integers] == enumerators(
            f"{source}.cu", f"{prefix}Integer", f"Own{prefix}Integer"
        )


def test_the_plan_of_a_step_runs_once(low: LoweredTarget) -> None:
    assert low.captured == {"flashinfer-0": b"code"} and "flashinfer-0" not in low.kernels
    for kind in BucketKind:
        for nodes in attention(low, kind):
            plans = [node for node in nodes if node.name.endswith("/plan")]
            calls = [node for node in nodes if not node.name.endswith("/plan")]
            assert [node.name for node in plans] == ["layers.0.attention/plan"]
            assert [node.name for node in calls] == ["layers.0.attention", "layers.1.attention"]
            written = {p.offset for _, p in plans[0].pointers() if p.writes}
            for node in calls:
                read = {p.offset for _, p in node.pointers() if p.region is Region.ARENA and p.access is Access.READ}
                assert written < read  # and the query
            kv = [p for _, p in calls[1].pointers() if p.region is Region.KV]
            assert [(p.offset, p.extent) for p in kv] == [(low.kv_page_bytes // 2, low.kv_page_bytes // 2)]


def test_layers_share_the_plan_and_wait_for_it(low: LoweredTarget) -> None:
    for graph in low.graphs.values():
        names = [node.name for node in graph.nodes]
        plan, first = names.index("layers.0.attention/plan"), names.index("layers.0.attention")
        assert plan in graph.nodes[first].predecessors
    shared = low.layout.shared_workspaces
    assert set(shared) == {"paged_attention"}


@pytest.mark.parametrize(
    ("tile", "head_dim", "target", "tiles"),
    [(128, 128, "cuda:sm_90a", 4), (64, 128, "cuda:sm_90a", 8), (128, 64, "cuda:sm_90a", 4),
     (128, 256, "cuda:sm_90a", 2), (64, 256, "cuda:sm_90a", 4), (128, 128, "cuda:sm_120a", 2)],
)  # fmt: skip
def test_kv_tiles_fit_twice_into_shared_memory(tile: int, head_dim: int, target: str, tiles: int) -> None:
    assert _mma_kv(tile, head_dim, target) == tiles


def test_parts_of_a_plan_do_not_overlap() -> None:
    for job in planned().captures:
        ends: dict[str, int] = {}
        group = "shared"
        for part in job.kernel.parts:
            group = "own" if part.name.startswith("partial") else group
            assert part.offset >= ends.get(group, 0) and part.offset % 64 == 0 and part.nbytes > 0
            ends[group] = part.offset + part.nbytes


def test_a_machine_that_cannot_capture_refuses_with_the_reason() -> None:
    problem = "capture: need a GPU of cuda:sm_90a on this machine, have none"
    with pytest.raises(SelectionError, match="no kernel of pinned solution flashinfer for op 'paged_attention'") as e:
        planned(problem)
    assert f"  flashinfer_decode: build: {problem}" in e.value.message


def test_reproducible_rollouts_refuse_it() -> None:
    with pytest.raises(SelectionError, match="flashinfer_decode: features: need batch_invariant, not declared"):
        planned(None, frozenset({"batch_invariant"}))


def test_only_a_build_that_pins_it_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenspeed.compile.capture_build as capture_build

    asked: list[Target] = []

    def problem(library: str, target: Target, cache: Path | None) -> str:
        asked.append(target)
        return "no GPU"

    monkeypatch.setattr(capture_build, "capture_problem", problem)
    ordinary = build_module._registry(H200, {"linear": "triton"}, None)
    assert not asked and {spec.solution for spec in ordinary.specs} == {"triton", "aok"}
    pinned = build_module._registry(H200, PINNED, None)
    assert asked == [H200]
    assert {s.symbol: s.unavailable for s in pinned.specs if s.solution == "flashinfer"} == {
        "flashinfer_decode": "no GPU", "flashinfer_mixed": "no GPU"
    }  # fmt: skip
