"""A device of the trainer's own, in the training process, whose regions are torch tensors: nothing is copied."""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tokenspeed import _native
from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.errors import ArtifactError, ResourceError
from tokenspeed.graph import LaunchGraph
from tokenspeed.runtime.places import CpuPlace, GpuPlace, Place
from tokenspeed.step import PlacedTensor
from tokenspeed.trainer.weights_file import copy_weights

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64,
    "uint64": torch.uint64, "uint8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Bytes of the regions that are the trainer's to choose."""

    arena: int
    kv: int


class TrainerDevice(Protocol):
    """What replaying asks. ``weights``, ``arena``: uint8 tensors over the regions, on the torch device that the kernels
    run on; ``io``: the host's, where a step's inputs are written and its outputs are read."""

    weights: torch.Tensor
    arena: torch.Tensor
    io: torch.Tensor
    state: torch.Tensor

    def load_graph(self, graph: LaunchGraph) -> int: ...
    def run(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int) -> None: ...
    def settle_weights(self) -> None: ...  # after ``weights`` was written, before anything runs
    def close(self) -> None: ...


def open_device(artifact: Artifact, section: TargetSection, place: Place, sizes: Sizes) -> TrainerDevice:
    """Regions of the artifact's sizes but for ``sizes``, weights as the artifact has them, and no graph.

    Raises ResourceError.
    """
    try:
        if isinstance(place, GpuPlace):
            return GpuMemory(artifact, section, place, sizes)
        assert isinstance(place, CpuPlace), place
        return CpuMemory(artifact, section, place, sizes)
    except _native.DeviceError as e:
        raise ResourceError(
            f"the trainer's buffers do not fit: {e}",
            hint="rebuild the artifact with a smaller --max-prefill-tokens, or free memory",
        ) from None


class _Device(ABC):
    """What both kinds share."""

    def __init__(self, section: TargetSection, device: Any):
        self._section = section
        self._device = device

    def load_graph(self, graph: LaunchGraph) -> int:
        try:
            return int(self._device.load_graph(graph.encode(), self._section.kv_page_bytes))
        except _native.GraphError as e:
            raise ArtifactError(f"the trainer's part of a graph cannot be loaded: {e}") from None

    def _allocate(self, sizes: Sizes) -> None:
        self._device.allocate("kv", sizes.kv)
        self._device.allocate("arena", sizes.arena)
        self._device.allocate("state", self._section.state_bytes)

    @abstractmethod
    def run(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int) -> None: ...

    def _run_prelude(self, artifact: Artifact) -> None:
        """Fill what the artifact's steps read and none computes."""
        if self._section.prelude is not None:
            graph = LaunchGraph.decode(artifact.read(self._section.prelude.graph))
            self.run(self.load_graph(graph), 0, 0, 0)

    def close(self) -> None:
        self._device.close()


class CpuMemory(_Device):
    """Region weights is a file in memory that this process maps twice: the device reads it, torch writes it."""

    def __init__(self, artifact: Artifact, section: TargetSection, place: CpuPlace, sizes: Sizes):
        super().__init__(section, place.open())
        file = os.memfd_create("tokenspeed-weights", os.MFD_CLOEXEC)
        try:
            copy_weights(artifact, section, file)
            self._mapping = mmap.mmap(file, section.weights_bytes, mmap.MAP_SHARED)
            self._device.load_weights(f"/proc/self/fd/{file}", 0, section.weights_bytes)
        finally:
            os.close(file)
        self._allocate(sizes)
        self._device.allocate("io", section.io_bytes)
        self.weights = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.arena = torch.frombuffer(self._device.view("arena"), dtype=torch.uint8)
        self.io = torch.frombuffer(self._device.view("io"), dtype=torch.uint8)
        self.state = torch.frombuffer(self._device.view("state"), dtype=torch.uint8)
        self._run_prelude(artifact)

    def run(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int) -> None:
        self._device.wait(self._device.submit(graph, num_tokens, num_seqs, num_logit_rows))

    def settle_weights(self) -> None:
        pass  # the device reads the very memory that was written


class GpuMemory(_Device):
    """Regions of a GPU as tensors of torch, whose context the device shares."""

    def __init__(self, artifact: Artifact, section: TargetSection, place: GpuPlace, sizes: Sizes):
        self._torch_device = torch.device("cuda", place.gpu.ordinal)
        torch.cuda.init()
        super().__init__(section, place.open())
        at = artifact.locate(section.weights)
        self._device.load_weights(str(at.path), at.offset + section.weights_offset, section.weights_bytes)
        self._allocate(sizes)
        place.allocate_io(self._device, section)
        for binary in section.binaries:
            self._device.load_binary(binary.name, artifact.read(binary.file))
        self.weights = self._region("weights", section.weights_bytes)
        self.arena = self._region("arena", sizes.arena)
        self.io = torch.frombuffer(self._device.view("io"), dtype=torch.uint8)[: section.io_bytes]
        self.state = self._region("state", section.state_bytes)
        self._run_prelude(artifact)

    def _region(self, name: str, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_CudaBytes(int(self._device.address(name)), nbytes), device=self._torch_device)

    def run(self, graph: int, num_tokens: int, num_seqs: int, num_logit_rows: int) -> None:
        # Device and torch have streams of their own: each waits for the other's on the host.
        torch.cuda.current_stream(self._torch_device).synchronize()
        self._device.wait(self._device.submit(graph, num_tokens, num_seqs, num_logit_rows, 0))

    def settle_weights(self) -> None:
        torch.cuda.current_stream(self._torch_device).synchronize()


class _CudaBytes:
    """Bytes of a GPU, by the protocol https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None
        }  # fmt: skip


def tensors_of(region: torch.Tensor, placed: Sequence[PlacedTensor]) -> dict[str, torch.Tensor]:
    """Views of the tensors that a region holds, by name."""
    return {t.name: view(region, t.offset, t.dtype, t.shape) for t in placed}


def view(region: torch.Tensor, offset: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor at ``offset`` bytes of ``region``."""
    kind = TORCH_DTYPES[dtype]
    count = 1
    for n in shape:
        count *= n
    return region[offset : offset + count * kind.itemsize].view(kind).view(tuple(shape))
