"""Updating weights and aligning, on the device that an artifact runs on: bits, seconds, and that nothing is allocated.

    python benchmarks/gpu/check_weights.py ARTIFACT [--folder /dev/shm] [--rounds 5] [--json FILE]

New weights are the artifact's own with the last bit of every number cleared. Replies under them must be those, to the
last bit, of an engine that began with them; back under the old ones, those of before. With PyTorch, weights are also
read through their address. Prints seconds and GB/s of updates. Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import tokenspeed
from tokenspeed import SamplingParams
from tokenspeed.artifact import Artifact
from tokenspeed.runtime.align.check import check_dump
from tokenspeed.runtime.align.make import dump_of
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.target import Target

PROMPTS = [[1 + (7 * i + n) % 900 for i in range(40 + 61 * n)] for n in range(6)]
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, logprobs=1, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=32, temperature=1.0, seed=11, logprobs=1, ignore_eos=True)
CHUNK = 64 << 20


def answers(engine: Engine) -> list[Any]:
    return [(o.token_ids, o.logprobs) for params in (GREEDY, DRAWN) for o in engine.generate(PROMPTS, params)]


def write_new(own: Path, begin: int, dtype: str, to: Path) -> None:
    """A copy of the file with the last bit of each number cleared: of each second byte, or each fourth."""
    clear = bytes(byte & 0xFE for byte in range(256))
    width = 2 if dtype == "bfloat16" else 4
    with own.open("rb") as source, to.open("wb") as out:
        out.write(source.read(begin))
        while data := bytearray(source.read(CHUNK)):
            data[::width] = data[::width].translate(clear)
            out.write(data)


def twin_of(artifact: Path, weights: str, new: Path, folder: Path) -> Path:
    """An artifact that differs in its weights alone; loading does not hash them."""
    twin = folder / "twin"
    shutil.copytree(artifact, twin, ignore=lambda directory, names: [n for n in names if directory.endswith("weights")])
    (twin / weights).parent.mkdir(exist_ok=True)
    for name in (artifact / "weights").iterdir():
        (twin / "weights" / name.name).symlink_to(name.resolve())
    (twin / weights).unlink()
    (twin / weights).symlink_to(new.resolve())
    return twin


def through_torch(engine: Engine, nbytes: int) -> bool | None:
    """Whether PyTorch sees at the weights' address what ``read`` gives; None without PyTorch or a GPU."""
    if not Target.parse(engine.info.target).is_gpu:
        return None
    try:
        import torch
    except ModuleNotFoundError:
        return None
    device = engine.loaded.executor.device

    class View:
        __cuda_array_interface__ = {  # noqa: RUF012 (what torch asks for)
            "shape": (nbytes,), "typestr": "|u1", "data": (device.address("weights"), False), "version": 3,
        }  # fmt: skip

    seen = torch.as_tensor(View(), device="cuda")
    at = [0, nbytes // 2 // 64 * 64, max(0, nbytes - (1 << 20))]
    return all(
        seen[i : i + (1 << 20)].cpu().numpy().tobytes() == device.read("weights", i, min(1 << 20, nbytes - i))
        for i in at
    )


def examine(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    artifact = Path(args.artifact)
    options = LoadOptions(target=None if args.target is None else Target.parse(args.target))
    results: dict[str, Any] = {}
    problems: list[str] = []

    def require(name: str, holds: bool | None) -> None:
        results[name] = holds
        if holds is False:
            problems.append(name)

    with tokenspeed.load(artifact, options=options) as engine:
        section = engine.loaded.section
        own = artifact / section.weights
        begin = own.stat().st_size - section.weights_bytes
        new = folder / "new.safetensors"
        write_new(own, begin, engine.info.dtype, new)
        results |= {"target": section.target, "device": engine.info.device, "weights_bytes": section.weights_bytes}
        before = answers(engine)
        seconds = []
        for number in range(args.rounds):
            for path in (new, own):
                seconds.append(engine.update_weights(path, version=f"{number} {path.name}")["seconds"])
        require("old answers come back", answers(engine) == before)
        engine.update_weights(new, version="new")
        changed = answers(engine)
        require("new answers differ", changed != before)
        require("weights through torch", through_torch(engine, section.weights_bytes))
        if Target.parse(section.target).is_gpu:
            device = engine.loaded.executor.device
            device.write("arena", 4096, bytes(range(256)))
            require("what is written is read", device.read("arena", 4096, 256) == bytes(range(256)))
            require("host_io is read", device.read("host_io", 0, 64) == bytes(device.view("io")[:64]))
        dump = dump_of(engine, PROMPTS, max_tokens=32, temperature=1.0, seed=3, with_logits=True)
        verdicts = check_dump(engine, dump)
        results["align"] = [v.to_json() for v in verdicts]
        require("aligned with itself", all(v.passed for v in verdicts))
        after_ready = {k: v for k, v in engine.stats().after_ready.items() if k != "compilations"}
        require("nothing was allocated or loaded", not any(after_ready.values()))
        results["after_ready"] = after_ready
    middle = statistics.median(seconds)
    results |= {"seconds": seconds, "median_seconds": middle, "gb_per_second": section.weights_bytes / middle / 1e9}
    twin = twin_of(artifact, section.weights, new, folder)
    began = time.perf_counter()
    with tokenspeed.load(twin, options=options) as engine:
        results["seconds_to_load_instead"] = time.perf_counter() - began
        require("equal to an engine that began so", answers(engine) == changed)
    return {**results, "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", metavar="ARTIFACT", help="an artifact directory")
    parser.add_argument("--folder", default="/dev/shm", help="where new weights go (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="updates there and back (default: %(default)s)")
    parser.add_argument("--target", help="which of the artifact's targets (default: the best)")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    args = parser.parse_args()
    assert Artifact.open(args.artifact).path.is_dir(), "give a directory"
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        results = examine(args, Path(folder))
    text = json.dumps(results, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")
    return 1 if results["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
