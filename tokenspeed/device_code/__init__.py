"""Reads GPU code objects (cubin, hsaco) with the standard library alone, so that ``tokenspeed verify`` can check
launches against what the binaries say of themselves on any machine."""

from __future__ import annotations

from tokenspeed.device_code.cuda import read_cubin
from tokenspeed.device_code.elf import Elf
from tokenspeed.device_code.hip import read_hsaco
from tokenspeed.device_code.model import DeviceCode, Dim3, KernelInfo, damaged

__all__ = ["DeviceCode", "Dim3", "KernelInfo", "read_device_code"]


def read_device_code(data: bytes) -> DeviceCode:
    """What the code object ``data`` says of itself. Raises ArtifactError, and nothing else, for any other bytes."""
    elf = Elf(data)
    match elf.machine:
        case 190:
            return read_cubin(elf)
        case 224:
            return read_hsaco(elf)
        case machine:
            raise damaged(f"need an ELF file for CUDA (machine 190) or AMDGPU (224), have machine {machine}")
