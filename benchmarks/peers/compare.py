"""Measure TokenSpeed beside peers on this machine: rounds interleaved, medians, one table and one picture.

    python benchmarks/peers/prepare.py CHECKPOINT.gguf build/peers
    tokenspeed build CHECKPOINT.gguf -o build/peers/tokenspeed-bfloat16 --dtype bfloat16
    tokenspeed build CHECKPOINT.gguf -o build/peers/tokenspeed-float32 --dtype float32
    python benchmarks/peers/compare.py build/peers --out benchmarks/results/cpu-peers

Every engine of a dtype is loaded once and waits in its own process while another one is measured; --python gives
a peer an interpreter of its own. A peer that cannot be started is reported and left out, never counted as zero.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenspeed import _native

CASES = (("decode", 1), ("decode", 8), ("decode", 32), ("prefill", 512), ("prefill", 2048))
MODELS = {
    "tokenspeed": "tokenspeed-{dtype}",
    "openvino": "openvino",
    "llama.cpp": "{dtype}.gguf",
    "transformers": "huggingface",
}
WORKER = Path(__file__).with_name("worker.py")


class Peer:
    """A worker process that measures when asked."""

    def __init__(self, name: str, dtype: str, folder: Path, threads: int, python: str):
        self.name = name
        model = folder / MODELS[name].format(dtype=dtype)
        self._process = subprocess.Popen(
            [python, str(WORKER), name, dtype, str(model), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.start = self._answer()
        self.peak_bytes = 0

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")
        return json.loads(line)

    def measure(self, kind: str, size: int, seed: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps({"kind": kind, "size": size, "seed": seed}), file=self._process.stdin)
        answer = self._answer()
        self.peak_bytes = answer["peak_bytes"]
        return answer["tokens_per_second"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what prepare.py wrote, with the artifacts beside it")
    parser.add_argument("--peers", default=",".join(MODELS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="comma-separated (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="interpreter of a peer")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix: .json, .md and .png are written")
    args = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in args.python)
    results = {
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "device": device(),
        "threads": args.threads,
        "rounds": args.rounds,
        "dtypes": {
            dtype: compare(dtype, args.peers.split(","), args.folder, args.threads, args.rounds, pythons)
            for dtype in args.dtypes.split(",")
        },
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(results))
    plot(results, args.out.with_suffix(".png"))
    print(table(results))


def compare(
    dtype: str, names: list[str], folder: Path, threads: int, rounds: int, pythons: dict[str, str]
) -> dict[str, Any]:
    peers = []
    for name in names:
        print(f"{dtype}: starting {name}", file=sys.stderr)
        try:
            peers.append(Peer(name, dtype, folder, threads, pythons.get(name, sys.executable)))
        except RuntimeError as e:
            print(f"left out: {e}", file=sys.stderr)
    speeds: dict[str, dict[str, list[float]]] = {p.name: {} for p in peers}
    ceilings = []
    for number in range(rounds):
        for kind, size in CASES:
            read = _native.measure_read_bandwidth(threads, 256 << 20)
            ceilings.append((read, _native.measure_matmul(dtype, threads)))
            for peer in peers if number % 2 == 0 else reversed(peers):
                speed = peer.measure(kind, size, number)
                speeds[peer.name].setdefault(f"{kind} {size}", []).append(speed)
                print(f"{dtype} round {number + 1}: {kind} {size} {peer.name} {speed:.0f}", file=sys.stderr)
    for peer in peers:
        peer.close()
    return {
        "read_bytes_per_second": statistics.median(c[0] for c in ceilings),
        "matmul_flops": statistics.median(c[1] for c in ceilings),
        "peers": {
            p.name: {
                "tokens_per_second": {case: statistics.median(values) for case, values in speeds[p.name].items()},
                "rounds": speeds[p.name],
                "seconds_to_first_token": p.start["seconds"],
                "resident_bytes": p.start["resident_bytes"],
                "peak_bytes": p.peak_bytes,
            }
            for p in peers
        },
    }


def device() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {platform.machine()}"
    return platform.machine()


def table(results: dict[str, Any]) -> str:
    """Markdown: a row per engine and dtype."""
    cases = [f"{kind} {size}" for kind, size in CASES]
    lines = [
        f"{results['device']}, {results['threads']} threads, {results['date']}, commit {results['commit'][:10]};"
        f" tokens/s, medians of {results['rounds']} interleaved rounds.",
        "",
        "| | " + " | ".join(cases) + " | exec to first token | peak memory |",
        "|---|" + "---|" * (len(cases) + 2),
    ]
    for dtype, data in results["dtypes"].items():
        for name, peer in data["peers"].items():
            speeds = " | ".join(f"{peer['tokens_per_second'][case]:.0f}" for case in cases)
            lines.append(
                f"| {name} {dtype} | {speeds} | {peer['seconds_to_first_token']:.2f} s |"
                f" {peer['peak_bytes'] / 1e6:.0f} MB |"
            )
        lines.append(
            f"| *ceiling {dtype}* |" + " |" * len(cases) + f" read {data['read_bytes_per_second'] / 1e9:.1f} GB/s |"
            f" {data['matmul_flops'] / 1e9:.0f} GFLOP/s |"
        )
    return "\n".join(lines) + "\n"


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars per case, one panel a dtype, each case relative to TokenSpeed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [f"{kind} {size}" for kind, size in CASES]
    figure, axes = plt.subplots(1, len(results["dtypes"]), figsize=(6.5 * len(results["dtypes"]), 3.8), squeeze=False)
    for axis, (dtype, data) in zip(axes[0], results["dtypes"].items(), strict=True):
        width = 0.8 / len(data["peers"])
        base = data["peers"]["tokenspeed"]["tokens_per_second"]
        for i, (name, peer) in enumerate(data["peers"].items()):
            heights = [peer["tokens_per_second"][case] / base[case] for case in cases]
            bars = axis.bar([x + i * width for x in range(len(cases))], heights, width, label=name)
            labels = [f"{peer['tokens_per_second'][case]:.0f}" for case in cases]
            axis.bar_label(bars, labels, fontsize=6, rotation=90, padding=2)
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(cases))], cases, fontsize=8)
        axis.set_title(f"{dtype}: speed relative to TokenSpeed (labels: tokens/s)", fontsize=9)
        axis.set_ylim(0, 1.35)
        axis.legend(fontsize=7, loc="upper center", ncols=len(data["peers"]))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
