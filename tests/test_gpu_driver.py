"""A tiny model's artifact for a GPU, cross-compiled here, through the real device on a driver that is a double: the
binaries, launches and events are the real ones, only the kernels do nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from driver_double import DriverDouble, build_double
from tiny_artifact import tiny, write_checkpoint

from tokenspeed import SamplingParams, _native
from tokenspeed.artifact import Artifact
from tokenspeed.compile import ceilings
from tokenspeed.compile.build import build
from tokenspeed.errors import ArtifactError, EngineClosedError, ResourceError, TokenSpeedError, WeightsError
from tokenspeed.graph import LaunchGraph
from tokenspeed.runtime import bench
from tokenspeed.runtime.bench import Case
from tokenspeed.runtime.engine import load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.verify_artifact import verify_graphs

OPTIONS = LoadOptions(kv_gib=0.01)
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two sequences and 16 tokens a step, with both ceilings although the model is tiny."""
    folder = tmp_path_factory.mktemp("driver")
    checkpoint = write_checkpoint(folder / "tiny-llama", tiny(hidden_size=64, intermediate_size=80))
    path = folder / "artifact"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "LEAST_READ_BYTES", 0)
        patch.setattr(ceilings, "SIDES", (32,))
        patch.setattr(ceilings, "LEAST_ROWS", 16)
        patch.setattr(ceilings, "ROW_STEP", 16)
        patch.setattr(ceilings, "SCRATCH_BYTES", 0)
        patch.setattr("tokenspeed.kernels.triton.ceiling.CHUNK", 1024)
        patch.setattr("tokenspeed.kernels.triton.ceiling.BLOCK", 512)
        build(checkpoint, path, dtype="bfloat16", targets="cuda:sm_90a", max_num_seqs=2, max_prefill_tokens=16,
              max_model_len=256, workers=2)  # fmt: skip
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_double(tmp_path_factory.mktemp("double"))


@pytest.fixture
def driver(artifact: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> DriverDouble:
    double = DriverDouble(library, monkeypatch)
    opened = Artifact.open(artifact)
    double.know(opened, opened.manifest.targets[0])
    return double


def test_its_graphs_are_verified_with_its_ceilings(artifact: Path) -> None:
    section = Artifact.open(artifact).manifest.targets[0]
    assert [c.kind for c in section.ceilings] == ["read", "matmul"]
    assert [c.graph for c in section.ceilings] == [
        f"graphs/cuda-sm_90a/ceiling-{kind}.tslg" for kind in ("read", "matmul")
    ]
    graphs, nodes = verify_graphs(Artifact.open(artifact))
    assert graphs == len(section.buckets) + 2 and nodes > 2 * ceilings.REPEATS


def test_it_loads_and_runs(artifact: Path, driver: DriverDouble) -> None:
    with load(artifact, options=OPTIONS) as engine:
        assert (engine.info.target, engine.info.device) == ("cuda:sm_90a", "Double C1")
        section = engine.loaded.section
        assert len(driver.calls("module_load")) == len(section.binaries)
        execs = 2 * len(section.buckets)  # for either io set; ceilings are for measuring alone
        assert len(driver.calls("graph_instantiate")) == execs
        before = len(driver.calls())
        (output,) = engine.generate([[1, 2, 3, 4]], GREEDY)
        assert output.token_ids == (0,) * 5  # what the kernels would have written was cleared when it was allocated
        stats = engine.stats()
        done = {name: count for name, count in stats.after_ready.items() if name != "compilations"}  # Triton is here
        assert done == dict.fromkeys(done, 0) and len(done) == 4 and stats.device["steps"] == stats.steps
        asking = ("event_query", "event_synchronize", "context_current")
        steps = [call.split()[0] for call in driver.calls()[before:] if not call.startswith(asking)]
        assert steps == ["graph_launch", "event_record"] * stats.steps
    assert len(driver.calls("module_unload")) == len(section.binaries)
    assert len(driver.calls("graph_exec_destroy")) == execs
    assert len(driver.calls("release")) == len(driver.calls("create")) == 5  # regions


def test_what_a_launch_is_given(artifact: Path, driver: DriverDouble) -> None:
    """Kernels of a chain start early, with one edge, and get as many parameters as they take."""
    opened = Artifact.open(artifact)
    names = [entry.graph for entry in opened.manifest.targets[0].buckets]
    nodes = [node for name in names for node in LaunchGraph.decode(opened.read(name)).nodes]
    with load(artifact, options=OPTIONS):
        added = driver.calls("add_kernel")
    assert len(added) == 2 * len(nodes)  # once for either io set
    assert sum("kernel=stage_io" in line for line in added) == 2 * len(names)
    assert sum("programmatic=1" in line for line in added) > len(added) // 2
    by_symbol = {node.symbol: len(node.args) for node in nodes}
    for line in added:
        fields = dict(field.partition("=")[::2] for field in line.split()[1:])
        assert len(fields["params"].split(",")) == by_symbol[fields["kernel"]]


def test_it_is_measured(artifact: Path, driver: DriverDouble) -> None:
    """Every piece of work of the double takes a millisecond."""
    with load(artifact, options=replace(OPTIONS, measure=True)) as engine:
        works = {c.kind: c.work for c in engine.loaded.section.ceilings}
        (decode,), rates = bench.measure(engine, [Case("decode", 2)], rounds=1)
    assert rates.read_bandwidth == pytest.approx(works["read"] / 1e-3)
    assert rates.matmul == pytest.approx(works["matmul"] / 1e-3) and works["matmul"] == 2 * 16 * 32 * 32
    assert decode.graph_seconds == pytest.approx(1e-3)
    assert decode.idle_seconds == pytest.approx(0, abs=1e-9)
    assert decode.share_of_read_bandwidth is not None and decode.share_of_matmul is not None


def test_weights_are_updated_in_place(artifact: Path, driver: DriverDouble, tmp_path: Path) -> None:
    opened = Artifact.open(artifact)
    section = opened.manifest.targets[0]
    own = (artifact / section.weights).read_bytes()
    begin = len(own) - section.weights_bytes
    new = tmp_path / "new.safetensors"
    new.write_bytes(own[:begin] + own[begin:][::-1])
    with load(artifact, options=OPTIONS) as engine:
        device = engine._executor.device
        assert device.read("weights", 0, section.weights_bytes) == own[begin:]
        address = device.address("weights")
        engine.generate([[1, 2, 3, 4]], GREEDY)
        assert engine.update_weights(new, version="new")["bytes"] == section.weights_bytes
        assert device.read("weights", 0, section.weights_bytes) == own[begin:][::-1]
        assert device.address("weights") == address
        (output,) = engine.generate([[1, 2, 3, 4]], GREEDY)
        assert output.cached_tokens == 0 and output.weights_versions == ("new",)
        driver.fail("copy_to_device", 1, 1)
        with pytest.raises(WeightsError, match="what region weights holds is unknown"):
            engine.update_weights(new)
        assert engine.info.weights_version == "unknown" and engine.alive
        with pytest.raises(TokenSpeedError, match="what region weights holds is unknown"):
            engine.generate([[1, 2, 3, 4]], GREEDY)
        engine.update_weights(artifact / section.weights, version="back")
        assert device.read("weights", 0, section.weights_bytes) == own[begin:]
        done = {name: count for name, count in engine.stats().after_ready.items() if name != "compilations"}
        assert done == dict.fromkeys(done, 0)
        with pytest.raises(_native.DeviceError, match=r"region arena has \d+ bytes, but 1 at offset"):
            device.read("arena", section.arena_bytes, 1)
        device.write("arena", 16, memoryview(b"hello"))
        assert device.read("arena", 16, 5) == b"hello"


def test_a_device_that_is_lost_in_service(artifact: Path, driver: DriverDouble) -> None:
    engine = load(artifact, options=OPTIONS)
    told: list[str] = []
    engine.watch(told.append)
    driver.fail("graph_launch", 3, 719)
    text = "the device Double C1 is lost: it could not start a step: CUDA_ERROR_LAUNCH_FAILED (719): as the test wished"
    with pytest.raises(TokenSpeedError) as caught:
        engine.generate([[1, 2, 3]], GREEDY)
    assert text in caught.value.message and text in told[0] and "restart the process" in told[0]
    with pytest.raises(EngineClosedError):
        engine.generate([[1, 2, 3]], GREEDY)
    assert engine.close(timeout=5)


def test_a_step_that_cannot_start_ends_its_request_alone(artifact: Path, driver: DriverDouble) -> None:
    with load(artifact, options=OPTIONS) as engine:
        driver.fail("graph_launch", 2, 801)
        with pytest.raises(TokenSpeedError, match=r"cannot start a step: CUDA error \(801\)"):
            engine.generate([[1, 2, 3]], GREEDY)
        (output,) = engine.generate([[1, 2, 3]], GREEDY)
        assert len(output.token_ids) == 5


def test_memory_that_is_too_small(artifact: Path, driver: DriverDouble) -> None:
    driver.device(memory_bytes=520 << 20)
    with pytest.raises(ResourceError) as caught:
        load(artifact, options=OPTIONS)
    assert (
        "of memory of GPU 0 (Double C1) that are free" in caught.value.message and "are missing" in caught.value.message
    )
    assert caught.value.hint == "lower --kv-gib"


def test_memory_that_the_driver_does_not_give(artifact: Path, driver: DriverDouble) -> None:
    driver.fail("create", 2, 2)
    with pytest.raises(ResourceError) as caught:
        load(artifact, options=OPTIONS)
    assert "needs" in caught.value.message and "bytes of GPU memory" in caught.value.message
    assert len(driver.calls("release")) == 1  # the region before it


def damaged(artifact: Path, path: Path, name: str, at: int, value: bytes) -> Path:
    shutil.copytree(artifact, path)
    file = path / name
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    file.write_bytes(data)
    return path


def test_a_damaged_cubin(artifact: Path, driver: DriverDouble, tmp_path: Path) -> None:
    (name, *_) = (entry.file for entry in Artifact.open(artifact).manifest.targets[0].binaries)
    broken = damaged(artifact, tmp_path / "a", name, 0, b"\x00")
    with pytest.raises(ArtifactError, match=f"{name} is damaged: its SHA-256 is"):
        load(broken, options=OPTIONS)
    unseen = replace(OPTIONS, verify="structure")  # digests are not looked at: the device itself must refuse
    with pytest.raises(ArtifactError, match=rf"{name} cannot be loaded: .* is damaged: .* it is no ELF file") as caught:
        load(broken, options=unseen)
    assert caught.value.hint == "rebuild the artifact"
    other = damaged(artifact, tmp_path / "b", name, 18, (62).to_bytes(2, "little"))  # e_machine: x86-64
    with pytest.raises(ArtifactError, match="it holds code for another kind of processor"):
        load(other, options=unseen)


def test_a_driver_that_is_too_old_or_finds_no_gpu(artifact: Path, driver: DriverDouble) -> None:
    driver.device(driver_version=12020)
    with pytest.raises(ResourceError) as caught:
        load(artifact, options=OPTIONS)
    assert "needs a driver of CUDA 12.8 or later; GPU 0 (Double C1) has one of CUDA 12.2" in caught.value.message
    driver.fail("init", 1, 100)
    with pytest.raises(ArtifactError, match="the NVIDIA driver finds no GPU"):
        load(artifact, options=OPTIONS)
