"""The first op that differs: faults put into the graphs of one bucket are named, whichever op has them."""

from __future__ import annotations

import random
import shutil
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_double import GpuDouble, gpu_artifact, plug_in
from tiny_artifact import tiny, write_checkpoint

from tokenspeed.artifact import Artifact
from tokenspeed.bucket import BucketKind
from tokenspeed.compile.build import build
from tokenspeed.graph import LaunchGraph, Node, Pointer, Region
from tokenspeed.publish import seal
from tokenspeed.runtime.invariance import rows
from tokenspeed.runtime.invariance.harness import Result, examine
from tokenspeed.runtime.invariance.history import ROOT, Follower, Histories
from tokenspeed.runtime.invariance.plan import Plan
from tokenspeed.runtime.invariance.recording import (
    RecordedStep,
    Recording,
    StepLayout,
    highest_page,
    written_tokens,
)
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.steps import MadeStep, Sampling, SequencePart
from tokenspeed.step import INPUTS
from tokenspeed.values import PlacedValue, StepValues, read_values

FEW = 4
Change = Callable[[Node, LaunchGraph, StepValues], Node]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bisect")
    checkpoint = write_checkpoint(folder / "tiny", tiny(num_layers=2))
    return build(
        checkpoint, folder / "honest", dtype="float32", max_num_seqs=16, max_model_len=512, max_prefill_tokens=256,
        page_size=32, split_positions=64,
    ).path  # fmt: skip


def other_weight(node: Node, graph: LaunchGraph, values: StepValues) -> Node:
    """The projection reads the weights of the layer before."""
    [other] = (n for n in graph.nodes if n.name == node.name.replace("layers.1.", "layers.0."))
    [weight] = (arg for arg in other.args if isinstance(arg, Pointer) and arg.region is Region.WEIGHTS)
    return with_pointer(node, weight, lambda arg: arg.region is Region.WEIGHTS)


def next_positions(node: Node, graph: LaunchGraph, values: StepValues) -> Node:
    """K and q are rotated as if they stood where the slot mapping says."""
    slots = values.values["slot_mapping"].offset
    positions = values.values["positions"].offset
    return with_pointer(
        node, lambda arg: replace(arg, offset=slots), lambda arg: arg.region is Region.IO and arg.offset == positions
    )


def always_drawn(node: Node, graph: LaunchGraph, values: StepValues) -> Node:
    """The sampler takes top_p, which is 1, for the temperature."""
    top_p, temperature = values.values["top_p"].offset, values.values["temperature"].offset
    return with_pointer(
        node, lambda arg: replace(arg, offset=top_p), lambda arg: arg.region is Region.IO and arg.offset == temperature
    )


def with_pointer(node: Node, new: Pointer | Callable[[Pointer], Pointer], where: Callable[[Pointer], bool]) -> Node:
    args = [
        (new(arg) if callable(new) else new) if isinstance(arg, Pointer) and where(arg) else arg for arg in node.args
    ]
    assert tuple(args) != node.args
    return replace(node, args=tuple(args))


def faulty(honest: Path, place: Path, op: str, change: Change) -> Path:
    """A copy whose decode buckets of more than FEW sequences have ``change`` in ``op``."""
    shutil.copytree(honest, place)
    artifact = Artifact.open(place)
    [section] = artifact.manifest.targets
    values = read_values(artifact, section)
    for entry in section.buckets:
        if entry.bucket.kind is BucketKind.DECODE and entry.bucket.num_seqs > FEW:
            graph = LaunchGraph.decode(artifact.read(entry.graph))
            nodes = [change(node, graph, values) if node.name == op else node for node in graph.nodes]
            (place / entry.graph).write_bytes(LaunchGraph(tuple(nodes)).encode())
    (place / "DIGEST").unlink()
    (place / "manifest.json").unlink()
    seal(place, artifact.manifest)
    return place


def packed(artifact: Path) -> Result:
    plan = Plan(prompts=8, tokens=64, legs=("packed",))
    return examine(str(artifact), LoadOptions(kv_gib=0.05), plan, lambda folder: [], lambda *_: None)


@pytest.mark.parametrize(
    ("op", "kind", "change"),
    [
        ("layers.1.qkv", "linear", other_weight),
        ("kv.1.next", "rope_kv_write", next_positions),
        ("sample", "sample", always_drawn),
    ],
)
def test_the_op_is_named(honest: Path, tmp_path: Path, op: str, kind: str, change: Change) -> None:
    result = packed(faulty(honest, tmp_path / "faulty", op, change))
    assert not result.passed and result.divergence is not None and result.culprit is not None
    found = result.culprit
    assert (found.op, found.kind) == (op, kind)
    assert found.reference.bucket == "decode-1" and int(found.leg.bucket.removeprefix("decode-")) > FEW
    assert found.position <= result.divergence.position and found.num_different > 0
    assert found.reference.kernels == found.leg.kernels and found.leg.kernels[0].startswith(kind)


def test_nothing_is_found_where_nothing_differs(honest: Path) -> None:
    result = packed(honest)
    assert result.passed and result.culprit is None and [leg.verdict for leg in result.legs] == ["reference", "equal"]


def test_with_two_steps_in_flight(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, here one that runs a CPU's graphs, so that its pages are those of a CPU."""
    plug_in(monkeypatch)
    monkeypatch.setattr(rows, "DEVICE_LIBRARY", "none")
    path = faulty(honest, tmp_path / "faulty", "layers.1.qkv", other_weight)
    assert packed(gpu_artifact(honest, tmp_path / "gpu", keep_cpu=False)).passed
    result = packed(gpu_artifact(path, tmp_path / "faulty-gpu", keep_cpu=False))
    assert result.section.target == "cuda:sm_90a" and result.culprit is not None
    assert (result.culprit.op, result.culprit.leg.bucket) in {("layers.1.qkv", f"decode-{n}") for n in (8, 16)}
    first, second, third = GpuDouble.made
    assert (first.most_in_flight, second.most_in_flight) == (2, 2) and third.most_in_flight == 1
    assert all(device.closed for device in GpuDouble.made)


# ---- K and V in their pages, by the formulas of artifacts/README.md ------------------------------------------------

H, S, D = 2, 32, 16
FORMULAS: dict[str, tuple[Callable[[int, int, int], int], Callable[[int, int, int], int]]] = {
    "float32": (
        lambda h, p, d: h * S * D + p // 16 * D * 16 + d * 16 + p % 16,
        lambda h, p, d: H * S * D + h * S * D + d // 16 * S * 16 + p * 16 + d % 16,
    ),
    "bfloat16": (
        lambda h, p, d: h * S * D + p // 16 * D * 16 + d // 2 * 32 + p % 16 * 2 + d % 2,
        lambda h, p, d: H * S * D + h * S * D + d // 16 * S * 16 + p // 2 * 32 + d % 16 * 2 + p % 2,
    ),
    "plain": (lambda h, p, d: (h * S + p) * D + d, lambda h, p, d: ((H + h) * S + p) * D + d),
}


@pytest.mark.parametrize("layout", FORMULAS)
def test_a_position_of_a_page(layout: str) -> None:
    nbytes = 4 if layout == "float32" else 2
    page = random.Random(layout).randbytes(2 * H * S * D * nbytes)
    value = PlacedValue(
        "kv.0.next", "temp", "float32" if nbytes == 4 else "bfloat16", ("num_pages", 2, H, S, D), "kv", 0
    )
    reader = rows.RowReader.__new__(rows.RowReader)
    reader._plain_pages = layout == "plain"
    for p in (0, 1, 17, 31):
        indexes = [formula(h, p, d) for formula in FORMULAS[layout] for h in range(H) for d in range(D)]
        expected = b"".join(page[i * nbytes : (i + 1) * nbytes] for i in indexes)
        assert reader._position(memoryview(page), value, p) == expected


# ---- recordings and histories ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(honest: Path) -> Callable[..., RecordedStep]:
    """Records a step of sequences as an engine would, with the tokens that it drew."""
    [section] = Artifact.open(honest).manifest.targets
    layout = StepLayout(section, page_size=32)
    offsets = [tensor.offset for tensor in section.io[: 1 + len(INPUTS)]]

    def record(*sequences: SequencePart, drew: Sequence[int]) -> RecordedStep:
        step = MadeStep(0, sequences, page_size=32, pages_per_seq=16, vocab_size=283)
        io = memoryview(bytearray(section.io_bytes))
        step.copy_to(io, offsets)
        found = layout.read(io, 0, (step.num_tokens, step.num_seqs, step.num_logit_rows))
        again = memoryview(bytearray(section.io_bytes))
        layout.write(found, again)
        assert again == io
        found.outputs = (array("i", drew).tobytes(), array("f", [0.0] * len(drew)).tobytes())
        return found

    return record


def prefill(tokens: Sequence[int], pages: Sequence[int], slot: int, at: int = 0) -> SequencePart:
    return SequencePart(tokens, at, pages, slot, sampling=Sampling())


def decode(at: int, pages: Sequence[int], slot: int) -> SequencePart:
    return SequencePart([None], at, pages, slot, sampling=Sampling())


def test_histories_follow_tokens_through_pages(record: Callable[..., RecordedStep]) -> None:
    histories = Histories()
    chain = list(histories.chain([5, 6, 7, 9, 4]))
    follower = Follower(histories, page_size=32)
    # Two requests with one beginning, in different pages and slots; the second is cut into chunks.
    first = follower.rows(record(prefill([5, 6, 7], [3], 1), prefill([5, 6], [8], 2), drew=[9, 1]))
    assert first.tokens == (*chain[:3], *chain[:2]) and first.logits == (chain[2], chain[1])
    second = follower.rows(record(decode(3, [3], 1), prefill([7], [8], 2, at=2), drew=[4, 9]))
    assert second.tokens == (chain[3], chain[2])
    # What was drawn in slot 2 is read there, and page 3 belongs to somebody else by now.
    third = follower.rows(record(prefill([6, 6, 7], [3], 1), decode(3, [8], 2), drew=[2, 4]))
    assert third.tokens[3] == chain[3] and not set(third.tokens[:3]) & set(chain)
    assert third.tokens[0] == histories.after(ROOT, 6)
    assert first.draws[0][:2] == (-1, 0.0) and first.draws[0] != first.draws[1]  # they draw at other positions


def test_a_recording_is_read_as_it_was_written(record: Callable[..., RecordedStep], tmp_path: Path) -> None:
    steps = [record(prefill(range(40), [3, 7], 1), drew=[9]), record(decode(40, [3, 7], 1), drew=[4])]
    assert [step.num_pages for step in steps] == [2, 2]
    Recording(steps).write(tmp_path / "steps")
    assert Recording.read(tmp_path / "steps").steps == steps
    assert highest_page(steps, 32) == 7 and list(written_tokens(steps[1])) == [(1, 4)]
