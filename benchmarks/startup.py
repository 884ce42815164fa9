"""How long `tokenspeed serve` takes from exec to ready and to the first streamed token, and where the time goes.

    python benchmarks/startup.py ARTIFACT [ARTIFACT ...] [--rounds 5] [--json] [--runs FILE] [--trace FILE]

Uses the standard library and the `tokenspeed` command beside this interpreter, so run it with the Python of an
installed TokenSpeed. Rounds alternate between the artifacts. The first round is not counted: it brings the files
into the page cache and compiles bytecode where that is missing, as an installer would have (servers therefore run
without PYTHONDONTWRITEBYTECODE). A pause before each round lets a virtual machine return the memory of the last one
to its host, as it has before any start that does not follow on another; finding that memory again is part of a start.
Figures are of the machine as it is: look at the load average first.

--runs writes every start with its split as soon as it is over. --trace traces one more start of the first artifact,
which benchmarks/trace_picture.py draws.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOKENSPEED = shlex.quote(str(Path(sys.executable).with_name("tokenspeed")))
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "stream": True,
    "temperature": 0,
    "max_tokens": 32,
    "ignore_eos": True,
}
NOT_COUNTED = 1
"""Rounds before those that count."""
MEMORY_ALLOWANCE = 250e6
"""Bytes that serving on a CPU may hold beside weights and KV pages."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("artifacts", metavar="ARTIFACT", nargs="+")
    arguments.add_argument("--rounds", type=int, default=5, help="starts that count, of each artifact (default: 5)")
    arguments.add_argument("--pause", type=float, default=4.0, help="seconds before each start (default: 4)")
    arguments.add_argument("--tokenspeed", default=TOKENSPEED, metavar="COMMAND", help="default: %(default)s")
    arguments.add_argument("--json", action="store_true", help="print JSON on stdout")
    arguments.add_argument("--runs", type=Path, metavar="FILE", help="write every start as JSON")
    arguments.add_argument("--trace", type=Path, metavar="FILE", help="trace one more start of the first artifact")
    args = arguments.parse_args()
    command = shlex.split(args.tokenspeed)
    starts: dict[str, list[dict[str, Any]]] = {path: [] for path in args.artifacts}
    for number in range(NOT_COUNTED + args.rounds):
        for path in args.artifacts:
            time.sleep(args.pause)
            found = start(command, path)
            print(f"{path}: ready {found['ready']:.3f} s, first token {found['first_token']:.3f} s", file=sys.stderr)
            if number >= NOT_COUNTED:
                starts[path].append(found)
                if args.runs:
                    args.runs.write_text(json.dumps(starts, indent=2) + "\n")
    if args.trace:
        start([*command], args.artifacts[0], "--trace", str(args.trace))
    report = {path: summary(path, runs) for path, runs in starts.items()}
    if args.json:
        print(json.dumps({"load_average": os.getloadavg()[0], "artifacts": report, "starts": starts}, indent=2))
    else:
        for path, figures in report.items():
            show(path, figures)
    return 0


def start(command: Sequence[str], artifact: str, *options: str) -> dict[str, Any]:
    """Start one server, stream one chat from it, stop it. Seconds count from just before exec; ``settled`` is None on a
    GPU, whose weights lie where they stay once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.perf_counter()
    server = subprocess.Popen(
        [*command, "serve", artifact, "--port", str(port), *options],
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        if not line.startswith("ready:"):
            raise SystemExit(f"the server did not start: {line}{server.stderr.read()}")
        require_health(port)
        ready = time.perf_counter() - began
        cpu = cpu_seconds(server.pid)
        first_token = stream_first_token(port) - began
        info = get(port, "/get_server_info")
        on_cpu = info["engine"]["target"].startswith("cpu:")
        settled = wait_until_settled(port) - began if on_cpu else None
        found = {
            "target": info["engine"]["target"],
            "device": info["engine"]["device"],
            "ready": ready,
            "first_token": first_token,
            "cpu_until_ready": cpu,
            "settled": settled,
            "peak_bytes": peak_bytes(server.pid),
            "startup_seconds": info["startup_seconds"],
            "load_seconds": info["load_seconds"],
        }
        return {**found, "split": split(found)}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def require_health(port: int) -> None:
    if get(port, "/health") != {"status": "ready"}:
        raise SystemExit("the server says that it is ready, but /health does not")


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    return json.load(connection.getresponse())


def stream_first_token(port: int) -> float:
    """When the first text of a streamed chat arrived, by time.perf_counter."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), {"content-type": "application/json"})
    first = 0.0
    for line in connection.getresponse():
        if not first and line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            first = time.perf_counter()
    if not first:
        raise SystemExit("the chat brought no text")
    return first


def wait_until_settled(port: int) -> float:
    """When the weights lie in memory of their own (they move there beside the first requests)."""
    for _ in range(600):
        if get(port, "/get_server_info")["stats"]["device"]["bytes_settled"]:
            break
        time.sleep(0.05)
    return time.perf_counter()


def cpu_seconds(pid: int) -> float:
    """User and system time of the process so far; its resolution is the kernel's clock tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/PID/status has no VmHWM")


def split(run: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part of a start. The parts of different threads pass at the same time."""
    marks, load = run["startup_seconds"], run["load_seconds"]
    device = load["choose"] + load["open"] + max(load["modules"] + load["graphs"], load["weights"])
    return {
        "interpreter, command line, socket": marks["bound"],
        "main thread: web stack": marks["web"] - marks["bound"],
        "loader: imports, engine": marks["engine"] - marks["bound"] - max(device, load["tokenizer"]),
        "loader: verify": load["verify"],
        "loader: tokenizer": load["tokenizer"],
        "device: find and open": load["choose"] + load["open"],
        "device: modules": load["modules"],
        "device: graphs": load["graphs"],
        "weights": load["weights"],
        "until ready": marks["ready"] - max(marks["web"], marks["engine"]),
        "request to first token": run["first_token"] - run["ready"],
    }


def summary(path: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and extremes over ``runs``. Memory is the host's, where a CPU's weights lie and a GPU's do not."""
    on_cpu = runs[0]["target"].startswith("cpu:")
    weights = sum(file.stat().st_size for file in (Path(path) / "weights").glob("*")) if on_cpu else 0
    peak = max(run["peak_bytes"] for run in runs)
    names = ("ready", "first_token", "cpu_until_ready", *(("settled",) if on_cpu else ()))
    return {
        "target": runs[0]["target"],
        "device": runs[0]["device"],
        **{
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name in names
            for values in ([run[name] for run in runs],)
        },
        "split": {name: statistics.median(run["split"][name] for run in runs) for name in runs[0]["split"]},
        "peak_bytes": peak,
        "peak_bytes_beside_weights": peak - weights,
        "within_memory_allowance": peak - weights <= MEMORY_ALLOWANCE if on_cpu else None,
    }


def show(path: str, figures: dict[str, Any]) -> None:
    print(f"\n{path} on {figures['target']}, {figures['device']}")
    for name, what in (("ready", "exec to ready"), ("first_token", "exec to first token"),
                       ("cpu_until_ready", "CPU until ready"), ("settled", "exec to weights settled")):  # fmt: skip
        if name not in figures:
            continue
        f = figures[name]
        print(f"  {what:<36}{f['median']:7.3f} s   ({f['min']:.3f} to {f['max']:.3f})")
    for name, seconds in figures["split"].items():
        print(f"    {name:<34}{seconds:7.3f} s")
    print(f"  {'peak memory of the host':<36}{figures['peak_bytes'] / 1e6:7.0f} MB  "
          f"({figures['peak_bytes_beside_weights'] / 1e6:.0f} MB beside weights, KV pages included)")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
