"""Bitwise equivalence classes: probes that tell orders apart, proofs on this CPU, what an artifact records of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_artifact import tiny, write_checkpoint

import tokenspeed
from tokenspeed.artifact import DIGEST, MANIFEST, Artifact
from tokenspeed.cli import main
from tokenspeed.compile import class_tables, cpu_proofs, probes
from tokenspeed.compile.proof_cases import attention_case, linear_case, norm_case, sample_case
from tokenspeed.equivalence import SUMMING
from tokenspeed.errors import ArtifactError, ResourceError, SelectionError
from tokenspeed.kernels import equivalence
from tokenspeed.kernels.native_specs import native_registry
from tokenspeed.kernels.registry import Candidate, KernelSpec, Request
from tokenspeed.publish import seal
from tokenspeed.target import Target, runnable_targets
from tokenspeed.verify_artifact import verify_graphs

V3 = Target.parse("cpu:x86-64-v3")
BEST = runnable_targets()[-1]
SIZES = {"num_tokens": 1, "num_seqs": 1, "M": 1, "N": 288, "K": 64}


# --- probes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_probes_another_order_gives_other_bits(dtype: str) -> None:
    kinds = ("cancelling", "random", "wide")
    a, b = probes.left(6, 576, dtype, kinds), probes.right(12, 576, dtype, kinds)
    backwards = probes.order_sensitivity(a, b)
    assert backwards > 0.9
    for row, kind in enumerate(kinds):
        assert probes.order_sensitivity(a[row : row + 1], b[row :: len(kinds)]) > 0.5, kind
    two_halves = _halves(a, b)
    assert np.mean(two_halves.view(np.int32) != _forwards(a, b).view(np.int32)) > 0.8
    tame = np.ones((6, 576), a.dtype)
    assert probes.order_sensitivity(tame, tame) == 0  # the measure can say that data tell nothing apart


def _forwards(a: Any, b: Any) -> Any:
    products = a.astype(np.float32)[:, None, :] * b.astype(np.float32)[None, :, :]
    total = np.zeros(products.shape[:2], np.float32)
    for k in range(products.shape[2]):
        total += products[:, :, k]
    return total


def _halves(a: Any, b: Any) -> Any:
    middle = a.shape[1] // 2
    return _forwards(a[:, :middle], b[:, :middle]) + _forwards(a[:, middle:], b[:, middle:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probes_are_what_they_are_called(dtype: str) -> None:
    a, b = (make(8, 64, dtype).astype(np.float64) for make in (probes.left, probes.right))
    first, second = probes.pairs(64)
    assert len({*first, *second}) == 32
    np.testing.assert_array_equal(a[:, first], a[:, second])
    cancelling, random, denormal, wide = b[0], b[1], b[2], b[3]
    np.testing.assert_array_equal(cancelling[first], -cancelling[second])
    assert abs(cancelling[first]).min() >= 2**18 and abs(np.delete(cancelling, [*first, *second])).max() < 1
    assert abs(random).max() < 10
    assert 0 < abs(denormal).max() < 2.0**-126
    assert abs(wide).max() / abs(wide).min() > 2**30
    np.testing.assert_array_equal(probes.left(8, 64, dtype), probes.left(8, 64, dtype))
    assert np.isfinite(_forwards(a, b)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["linear", "paged_attention", "rms_norm", "sample"])
def test_every_run_of_a_case_gives_numbers(op: str, dtype: str) -> None:
    case = {
        "linear": lambda: linear_case("linear", dtype, 64, most=40),
        "paged_attention": lambda: attention_case(dtype, 3, 1, 16, 32, 64),
        "rms_norm": lambda: norm_case(dtype, 48),
        "sample": lambda: sample_case(1024, 2),
    }[op]()
    rows = {label for step in case.steps for label in step.labels}
    assert rows == set(range(len(rows))) and len(rows) > 10
    alone = [step for step in case.steps if len(step.labels) == 1]
    assert len(alone) >= 3 and len({step.labels for step in alone}) == len(alone)
    seen: list[Any] = []

    class Looking(cpu_proofs._Bench):
        def _rows(self, memory: Any, count: int) -> Any:
            for name, nbytes in self._case.results:
                data = memory[self._places[name] :][: count * nbytes]
                wide = op != "paged_attention" and op != "rms_norm"
                kind = np.float32 if wide or dtype == "float32" else probes._DTYPES["bfloat16"]
                seen.append(data.copy().view(kind).astype(np.float32))
            return super()._rows(memory, count)

    request = Request(op, BEST, dtype, {**SIZES, **case.sizes}, solution="aok")
    spec, _ = native_registry().select(request)
    assert Looking(cpu_proofs._in_cpu_layouts(case), spec).answer().reason == ""
    assert all(np.isfinite(values).all() for values in seen) and len({v.tobytes() for v in seen}) > 3


# --- proofs on this machine -----------------------------------------------------------------------


def ask(op: str = "linear", target: Target = BEST, dtype: str = "float32", **sizes: int) -> Request:
    return Request(op, target, dtype, {**SIZES, **sizes}, solution="aok")


def prove(request: Request) -> tuple[Any, str]:
    return cpu_proofs.prove(request, native_registry().candidates(request))


@pytest.mark.skipif("cpu:x86-64-v4" not in map(str, runnable_targets()), reason="this CPU lacks AVX-512")
@pytest.mark.parametrize("op", ["linear", "linear_add", "linear_silu_mul", "rms_norm"])
def test_two_instruction_sets_of_one_class_are_found_equal(op: str) -> None:
    proven, by = prove(ask(op, Target.parse("cpu:x86-64-v4"), F=144, H=48))
    assert by == "build" and proven.outside == () and proven.rows > 200 and proven.shapes
    assert [member["kernel"].rpartition("_")[2] for member in proven.members] == ["avx512", "avx2"]
    assert proven.probes == {"kinds": list(probes.KINDS), "seed": probes.SEED, "version": probes.VERSION}
    assert prove(ask(op, Target.parse("cpu:x86-64-v4"), F=144, H=48))[0] is proven  # compared once in a process


@pytest.mark.skipif("cpu:x86-64-v4+bf16" not in map(str, runnable_targets()), reason="this CPU lacks AVX512_BF16")
def test_kernels_that_multiply_by_other_instructions_are_found_different() -> None:
    request = ask(target=Target.parse("cpu:x86-64-v4+bf16"), dtype="bfloat16")
    proven, _ = prove(request)
    assert proven.members == ({"kernel": "linear_bf16_avx512bf16"},)
    assert {m["kernel"]: reason for m, reason in proven.outside} == dict.fromkeys(
        ("linear_bf16_avx512", "linear_bf16_avx2"), "other bits than those of the class"
    )
    # One that claims to be of the chosen kernel's class, and is not, fails the build.
    candidates = native_registry().candidates(request)
    liars = tuple(replace(c, spec=replace(c.spec, bitwise_class="one for all")) for c in candidates)
    with pytest.raises(
        SelectionError, match=r"linear_bf16_avx512bf16 and linear_bf16_avx512 declare one bitwise class"
    ):
        cpu_proofs.prove(request, liars)


def test_a_kernel_whose_rows_see_one_another_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = cpu_proofs._Bench._rows

    def crowded(self: Any, memory: Any, count: int) -> Any:
        rows = honest(self, memory, count)
        return [b"other bits" if count > 8 and i == 3 else row for i, row in enumerate(rows)]

    monkeypatch.setattr(cpu_proofs._Bench, "_rows", crowded)
    with pytest.raises(SelectionError) as caught:
        prove(ask(K=32))
    assert "op 'linear' (float32, N=288 K=32): need a kernel whose rows depend on nothing else in a step" in str(
        caught.value
    )
    assert "row 3 of run '16 from 0' differs from the same row in run '3 from 2'" in str(caught.value)


def test_a_result_that_is_not_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = cpu_proofs._Bench._graph
    monkeypatch.setattr(cpu_proofs._Bench, "_graph", lambda self, step: graph(self, self._case.steps[0]))
    monkeypatch.setattr(cpu_proofs._Bench, "_results", slice(0, 0), raising=False)
    case = cpu_proofs.case_of(ask(K=48))
    spec, _ = native_registry().select(ask(K=48))
    bench = cpu_proofs._Bench(case, spec)
    bench._argument = lambda rule, step: _elsewhere(bench, rule, step)  # type: ignore[method-assign]
    assert bench.answer().reason == "run '1 from 0': it leaves row 0 as it was"


def _elsewhere(bench: Any, rule: Any, step: Any) -> Any:
    """The result goes where the workspace is."""
    argument = type(bench)._argument(bench, rule, step)
    return replace(argument, offset=bench._places["workspace"]) if rule.kind == "write" else argument


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of classes, which builds use."""
    monkeypatch.setattr(equivalence, "TUNING_FOLDER", tmp_path)
    equivalence.known_classes.cache_clear()
    yield tmp_path
    equivalence.known_classes.cache_clear()


def test_elsewhere_only_the_table_counts(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proven, _ = prove(ask(target=V3))
    monkeypatch.setattr(cpu_proofs, "missing_flags", lambda target: ("avx2",))
    with pytest.raises(SelectionError) as caught:
        prove(ask(target=V3))
    assert caught.value.message == (
        "op 'linear' on cpu:x86-64-v3 (float32): need linear_f32_avx2 proven batch-invariant, have no such proof;"
        " this machine cannot prove it, as it lacks avx2"
    )
    assert caught.value.hint is not None and "tokenspeed prove cpu" in caught.value.hint
    class_tables.merge_classes(V3, [proven])
    assert prove(ask(target=V3)) == (proven, "table")
    for change, have in (
        ({"source": "0"}, "one that counts for nothing: the kernels have changed since they were proven on"),
        ({"compiler": "native library, kernel ABI 1"}, "it is of the native library, kernel ABI 1, this is the"),
        ({"members": ({"kernel": "linear_f32_avx512"},)}, "without it"),
    ):
        class_tables.merge_classes(V3, [replace(proven, **change)])
        with pytest.raises(SelectionError, match=have):
            prove(ask(target=V3))


def test_a_table_that_is_none_is_refused(tables: Path) -> None:
    for text in (
        "",
        "[]",
        '{"format_version": 2, "classes": []}',
        '{"format_version": 1, "classes": [{"op": "linear"}]}',
    ):
        (tables / "x86-64-v3.classes.json").write_text(text)
        with pytest.raises(ArtifactError, match="holds no classes"):
            equivalence.read_classes(V3)


def test_the_tables_of_this_checkout_can_be_read() -> None:
    for path in equivalence.TUNING_FOLDER.glob("*.classes.json"):
        arch = path.name.removesuffix(".classes.json")
        target = next(Target(b, arch) for b in ("cpu", "cuda", "hip") if f"{b}:{arch}" in map(str, _all_targets()))
        assert equivalence.read_classes(target)


def _all_targets() -> list[Target]:
    from tokenspeed.target import CPU_ARCHS, GPU_TARGETS

    return [*(Target("cpu", arch) for arch in CPU_ARCHS), *map(Target.parse, GPU_TARGETS)]


def test_the_digest_of_native_kernels_sees_code_and_not_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "native"
    shutil.copytree(cpu_proofs._NATIVE, copy)
    monkeypatch.setattr(cpu_proofs, "_NATIVE", copy)
    digest = cpu_proofs.native_digest.__wrapped__

    def change(name: str, old: str, new: str) -> str:
        path, text = copy / name, (copy / name).read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return digest(("linear_f32_avx2",))

    before = digest(("linear_f32_avx2",))
    assert change("linear.h", "#pragma once", "// A note.\n#pragma  once /* of\nno matter */") == before
    assert change("norm.h", "#pragma once", "#pragma once\nint other_family;") == before
    assert change("simd.h", "namespace tokenspeed", "inline int kernels_include_this;\nnamespace tokenspeed") != before
    (copy / "linear_avx2.cpp").unlink()
    with pytest.raises(ResourceError, match=r"need the sources of linear_f32_avx2, have no .*linear_avx2.cpp"):
        digest(("linear_f32_avx2",))


# --- the artifact ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", tiny())


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "rl"
    tokenspeed.build(checkpoint, path, dtype="float32", numerics="rl-bitwise", max_model_len=256)
    return path


def test_an_rl_bitwise_artifact_records_its_proofs(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = json.loads((built / "equivalence.json").read_text())["targets"]
    assert entry["target"] == str(BEST)
    assert {c["op"] for c in entry["classes"]} == set(SUMMING)
    for proven in entry["classes"]:
        assert proven["proven_by"] == "build" and proven["used"][0] in proven["members"] and proven["instead_of"] == []
    verify_graphs(Artifact.open(built))
    assert main(["explain", str(built), "--op", "rms_norm"]) == 0
    shown = capsys.readouterr().out
    assert "chosen    aok:rms_norm_f32_" in shown and "bitwise class of rms_norm float32 (H=" in shown
    assert "proven    by build on " in shown and "used      kernel rms_norm_f32_" in shown
    assert main(["explain", str(built), "--op", "rms_norm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"][0]["equivalence"][0]["op"] == "rms_norm"
    assert main(["inspect", str(built)]) == 0
    assert f"  proofs    {len(entry['classes'])} bitwise classes, proven by build on " in capsys.readouterr().out


def damaged(built: Path, folder: Path, change: Any) -> Path:
    """A copy whose equivalence.json ``change`` has altered, sealed anew."""
    shutil.copytree(built, folder)
    data = json.loads((folder / "equivalence.json").read_text())
    manifest = Artifact.open(built).manifest
    (folder / "equivalence.json").unlink()
    if change(data["targets"][0]) is not False:
        (folder / "equivalence.json").write_text(json.dumps(data))
    (folder / MANIFEST).unlink()
    (folder / DIGEST).unlink()
    seal(folder, manifest)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: False, "equivalence.json is missing, which numerics = rl-bitwise promises"),
        (lambda entry: entry.update(target="cpu:x86-64-v9"), "need the targets cpu:.*, have cpu:x86-64-v9"),
        (lambda entry: entry["classes"][0].update(proven_by="hearsay"), "proven_by is 'hearsay'"),
        (lambda entry: entry["classes"][0].update(used=[{"kernel": "another"}]), "what is used is not in the class"),
        (lambda entry: entry["classes"][0].update(rows=0), "nothing was compared"),
        (lambda entry: entry["classes"][0].pop("date"), "lacks 'date'"),
        (lambda entry: entry.update(classes=[]), "need a class for op linear, have none"),
        (
            lambda entry: entry.update(classes=[c for c in entry["classes"] if c["op"] != "sample"]),
            "for op sample, have",
        ),
        (lambda entry: entry["classes"][0].update(members="all"), "must be a list"),
    ],
)
def test_a_record_that_promises_nothing_is_refused(built: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        verify_graphs(Artifact.open(damaged(built, tmp_path / "a", change)))


def test_a_target_that_is_named_twice(built: Path, tmp_path: Path) -> None:
    folder = damaged(built, tmp_path / "a", lambda entry: None)
    data = json.loads((folder / "equivalence.json").read_text())
    manifest = Artifact.open(built).manifest
    (folder / "equivalence.json").write_text(json.dumps({"targets": data["targets"] * 2}))
    (folder / MANIFEST).unlink()
    (folder / DIGEST).unlink()
    seal(folder, manifest)
    with pytest.raises(ArtifactError, match=r"need the targets (cpu:[^,]*), have \1, \1"):
        verify_graphs(Artifact.open(folder))


def test_the_build_fails_where_a_proof_does(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request, candidates: tuple[Candidate, ...]) -> Any:
        raise SelectionError(f"no proof for {request.op}")

    monkeypatch.setattr(cpu_proofs, "prove", fail)
    with pytest.raises(SelectionError, match="no proof for"):
        tokenspeed.build(checkpoint, tmp_path / "a", dtype="float32", numerics="rl-bitwise", max_model_len=256)
    assert list(tmp_path.iterdir()) == []
    tokenspeed.build(checkpoint, tmp_path / "a", dtype="float32", max_model_len=256)  # auto needs none
    assert not (tmp_path / "a" / "equivalence.json").exists()


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        ("linear=foo", "no kernel of pinned solution foo for op 'linear' on"),
        ("convolution=native", "op 'convolution' is pinned to 'native', but the program has only"),
    ],
)
def test_a_solution_that_there_is_not_is_refused(
    checkpoint: Path, tmp_path: Path, solution: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["build", str(checkpoint), "-o", str(tmp_path / "a"), "--solution", solution, "--max-model-len", "256"]
    assert main(words) == SelectionError.exit_code
    error = capsys.readouterr().err
    assert message in error
    if "foo" in solution:
        assert "aok:linear_bf16_avx2: solution: need foo (pinned), have aok" in error and "to aok or native" in error


def test_aok_may_be_pinned_for_one_op_alone(checkpoint: Path, tmp_path: Path) -> None:
    pinned = {"linear": "aok"}
    tokenspeed.build(checkpoint, tmp_path / "a", dtype="float32", solutions=pinned, max_model_len=256)
    decisions = json.loads((tmp_path / "a" / "selection.json").read_text())["targets"][0]["decisions"]
    chosen = {decision["op"]: decision["chosen"] for decision in decisions}
    assert chosen["linear"].startswith("aok:linear_f32_") and not chosen["linear_add"].startswith("aok:")


def test_prove_cpu_writes_the_table(
    tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_proofs, "_WIDTHS", (48, 64))
    monkeypatch.setattr(cpu_proofs, "_HEAD_DIMS", (16,))
    assert main(["prove", "cpu", "--target", "cpu:x86-64-v3"]) == 0
    assert capsys.readouterr().out.startswith(f"{tables / 'x86-64-v3.classes.json'}: ")
    assert main(["prove", "show", "--target", "cpu:x86-64-v3"]) == 0
    shown = capsys.readouterr().out
    assert "linear float32: 1 members equal over 1122 rows of each" in shown and "): in force" in shown
    assert "paged_attention bfloat16 head_dim=16 page_size=32: 1 members equal" in shown
    assert main(["prove", "cpu", "--target", "cuda:sm_90a"]) == 2
    assert "need CPU targets that this machine runs, have cuda:sm_90a: it is a GPU" in capsys.readouterr().err


def test_specs_of_aok_launch_what_they_are_named_after() -> None:
    registry = native_registry()
    for spec in registry.specs:
        if spec.solution == "aok":
            other: KernelSpec = registry.by_name[spec.name.removeprefix("aok:")]
            assert (spec.symbol, spec.arguments, spec.features) == (other.symbol, other.arguments, other.features)
