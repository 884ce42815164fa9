"""Does the CUDA driver say of cubins what tokenspeed.device_code reads in them? Run on a machine with the GPU:

    python benchmarks/gpu/check_device_code.py --json OUT.json ARTIFACT_OR_FOLDER_OR_CUBIN...

For every kernel that this GPU loads: registers, local and static shared memory, the most threads of a block,
parameters (offset and size each), and whether exactly the rest of the target's shared memory can be had as dynamic.
Exits with 1 if any differs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from tokenspeed.device_code import KernelInfo, read_device_code
from tokenspeed.errors import TokenSpeedError
from tokenspeed.gpu_verify import runs_on
from tokenspeed.target import GPU_TARGETS, Target

MAX_THREADS, SHARED, LOCAL, REGISTERS, MAX_DYNAMIC_SHARED = 0, 1, 3, 4, 8  # CUfunction_attribute
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


class Driver:
    """The few entry points that are needed, each raising on failure, and a current context on device 0."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        numbers = [self.number("cuDeviceGetAttribute", a, device) for a in (CAPABILITY_MAJOR, CAPABILITY_MINOR)]
        self.arch = f"sm_{numbers[0]}{numbers[1]}a"

    def status(self, name: str, *args: Any) -> int:
        return int(getattr(self.library, name)(*args))

    def call(self, name: str, *args: Any) -> None:
        status = self.status(name, *args)
        if status:
            raise SystemExit(f"{name} failed with status {status}")

    def number(self, name: str, *args: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *args)
        return value.value

    def params(self, function: ctypes.c_void_p) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        read = (ctypes.byref(offset), ctypes.byref(size))
        while self.status("cuFuncGetParamInfo", function, ctypes.c_size_t(len(found)), *read) == 0:
            found.append((offset.value, size.value))
        return found


def said_by_driver(driver: Driver, function: ctypes.c_void_p, static: int, limit: int) -> dict[str, Any]:
    names = {
        "num_registers": REGISTERS,
        "stack_bytes": LOCAL,
        "static_shared_bytes": SHARED,
        "max_threads": MAX_THREADS,
    }
    facts: dict[str, Any] = {n: driver.number("cuFuncGetAttribute", a, function) for n, a in names.items()}
    facts["params"] = driver.params(function)
    rest = limit - static
    statuses = [driver.status("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, n) for n in (rest + 1, rest)]
    facts["dynamic_shared"] = rest if statuses[0] and not statuses[1] else f"statuses {statuses}"
    return facts


def said_by_binary(info: KernelInfo, limit: int) -> dict[str, Any]:
    names = ("num_registers", "stack_bytes", "static_shared_bytes", "max_threads")
    return {
        **{name: getattr(info, name) for name in names},
        "params": list(info.params),
        "dynamic_shared": limit - info.static_shared_bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    driver = Driver()
    if f"cuda:{driver.arch}" not in GPU_TARGETS:
        raise SystemExit(f"need one of {', '.join(GPU_TARGETS)}, have {driver.arch}")
    target = Target("cuda", driver.arch)
    limit = target.gpu.max_shared_bytes
    files = [f for path in args.paths for f in ([path] if path.is_file() else sorted(path.rglob("*.cubin")))]
    checked, differences = 0, []
    for path in files:
        data = path.read_bytes()
        try:
            code = read_device_code(data)
        except TokenSpeedError as e:
            raise SystemExit(f"{path}: {e}") from None
        if not runs_on(code.arch, target):
            continue
        module = ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(module), data)
        for symbol, info in code.kernels.items():
            function = ctypes.c_void_p()
            driver.call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
            have, need = said_by_driver(driver, function, info.static_shared_bytes, limit), said_by_binary(info, limit)
            different = {key: {"driver": have[key], "binary": need[key]} for key in need if have[key] != need[key]}
            checked += 1
            if different:
                differences.append({"file": path.name, "kernel": symbol, "different": different})
        driver.call("cuModuleUnload", module)
    args.json.write_text(json.dumps({"target": str(target), "kernels": checked, "differences": differences}, indent=1))
    print(f"{target}: {checked} kernels checked, {len(differences)} differ")
    for difference in differences[:20]:
        print(json.dumps(difference))
    return 1 if differences or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
