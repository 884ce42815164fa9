"""How the trainer drives a GPU: its regions, packing and steps, with a double that runs a CPU's graphs."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_double import GpuDouble, gpu_artifact, plug_in
from trainer_cases import artifact_of, bounds, hf_model, open_engine, prompt_logprobs, random_ids, write

from tokenspeed.artifact import Artifact
from tokenspeed.compile.program import Program
from tokenspeed.runtime.places import choose_place
from tokenspeed.target import Target
from tokenspeed.trainer import Aligned
from tokenspeed.trainer.compatible import check_model
from tokenspeed.trainer.memory import GpuMemory
from tokenspeed.trainer.packing import Parameters
from tokenspeed.trainer.replay import Replayer, plan_replay


class Stream:
    """torch's own, of which the double has none: it counts who waits for it."""

    waits = 0

    def synchronize(self) -> None:
        Stream.waits += 1


def region(memory: Any, name: str, nbytes: int) -> torch.Tensor:
    """What ``GpuMemory`` takes from an address on a GPU. The double's weights are a file, mapped to read."""
    device = memory._device
    if name != "weights":
        return torch.frombuffer(device._cpu.view(name), dtype=torch.uint8)
    path, offset = device.weights_file
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)[offset : offset + nbytes]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(GpuMemory, "_region", region)
    load = GpuDouble.load_weights

    def remember(self: Any, path: str, file_offset: int, nbytes: int) -> None:
        self.weights_file = (path, file_offset)
        load(self, path, file_offset, nbytes)

    monkeypatch.setattr(GpuDouble, "load_weights", remember)


@pytest.mark.usefixtures("gpu")
def test_a_gpus_steps_give_the_bits_of_the_graphs_that_it_runs(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoint")
    cpu = artifact_of(checkpoint, tmp_path / "cpu", "float32")
    artifact = Artifact.open(gpu_artifact(cpu, tmp_path / "gpu", keep_cpu=False))
    section, place = choose_place(artifact.manifest, Target.parse("cuda:sm_90a"), 0)
    replayer = Replayer(artifact, plan_replay(artifact, section, gradients=True), place)
    device = GpuDouble.made[-1]
    assert device.binaries.keys() == {"norm"}
    model = hf_model(checkpoint)
    program = Program.from_json(artifact.read("program.json").decode())
    aligned = Aligned(model, artifact, Parameters(program, check_model(model, program)), replayer, gradients=True)
    assert aligned.target == "cuda:sm_90a"
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)  # no longer what the artifact holds
    sequences = random_ids(37, 5, 64, 1, 23)
    have = aligned.logprobs(torch.cat(sequences), cu_seqlens=bounds(sequences))
    waits = Stream.waits
    have.sum().backward()
    assert Stream.waits > waits > 0, "a step that starts before torch has written its inputs"
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in model.parameters())
    file = aligned.save_weights(tmp_path / "weights.safetensors")
    with open_engine(cpu) as engine:
        before = torch.cat(prompt_logprobs(engine, sequences))
        engine.update_weights(file)
        after = torch.cat(prompt_logprobs(engine, sequences))
    assert torch.equal(have, after) and not torch.equal(have, before)
    aligned.detach()
    assert device.closed
