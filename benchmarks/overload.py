"""What becomes of `tokenspeed serve` when more is asked of it than it can do, and afterwards.

    python benchmarks/overload.py ARTIFACT [--factor 3] [--seconds 120] [--max-waiting 64] [--json] [--requests FILE]

Starts a server, measures its capacity (requests/s of a closed loop of a few more clients than `max_num_seqs`, so that
no slot is ever empty), then sends it Poisson arrivals at --factor times that for --seconds, each a stream on a
connection of its own. Four API keys share the arrivals unevenly; the greediest names a new `user` in each request.
Priorities are mixed, some prompts are long, some clients leave midway or while they wait. Arrivals and requests depend
on --seed alone. Meanwhile the server's memory, pages and queue are sampled.

Verdicts follow: everybody got an answer, refusals were quick and polite, waits were bounded, memory was flat, the keys
had their shares, and all pages are free again afterwards. Those that depend on how fast this machine is are marked
"timed": have nothing else run on it. Exit code 1 when a verdict fails. Uses the standard library alone, besides the
`tokenspeed` command beside this interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from overload_client import (
    PRIORITIES,
    TENANTS,
    Record,
    Request,
    Sample,
    Workload,
    exchange,
    get,
    key_of,
    requests,
    wire,
)
from overload_verdicts import judge, summary

TOKENSPEED = shlex.quote(str(Path(sys.executable).with_name("tokenspeed")))
PATIENCE_BELOW_CAPACITY = 600
"""Seconds."""


# ---- the server -----------------------------------------------------------------------------------------------


class Server:
    """`tokenspeed serve` as a process, ready to answer. What it writes on stderr is kept."""

    def __init__(self, command: Sequence[str], artifact: Path, options: Sequence[str]):
        keys = [word for name in TENANTS for word in ("--api-key", f"{name}={key_of(name)}")]
        self.process = subprocess.Popen(
            [*command, "serve", str(artifact), "--port", "0", *keys, *options],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        if not line.startswith("ready:"):
            raise SystemExit(f"the server did not start: {line}{self.process.stderr.read()}")
        self.port = int(line.split(" (")[0].rpartition(":")[2])
        self.log: list[str] = []
        self._reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def resident_bytes(self) -> int:
        return int(self._proc("statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_files(self) -> int:
        """Open files, sockets among them."""
        return len(list(self._proc("fd").iterdir()))

    def stop(self) -> int | None:
        """Its exit code after SIGTERM; None: it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None
        finally:
            self._reader.join(timeout=5)

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self.process.pid}/{name}")


async def server_info(port: int) -> Any:
    return json.loads(await get(port, "/get_server_info"))


async def sample(server: Server) -> Sample:
    began = time.monotonic()
    stats = (await server_info(server.port))["stats"]
    return Sample(
        began,
        server.resident_bytes(),
        server.num_files(),
        stats["num_running"],
        stats["num_waiting"],
        sum(stats["waiting_by_priority"]),
        stats["num_pages"] - stats["num_free_pages"],
        stats["num_cached_pages"],
        stats["scheduler"]["computed_tokens"] + stats["generation_tokens"],
        time.monotonic() - began,
    )


async def keep_sampling(server: Server, period: float, samples: list[Sample], scrapes: list[float]) -> None:
    """Until cancelled. ``scrapes``: seconds that each GET /metrics took, infinite when it failed."""
    while True:
        began = time.monotonic()
        with contextlib.suppress(OSError, EOFError, ValueError):
            samples.append(await sample(server))
        scraped = time.monotonic()
        scrapes.append(float("inf"))
        with contextlib.suppress(OSError, EOFError, ValueError):
            await get(server.port, "/metrics")
            scrapes[-1] = time.monotonic() - scraped
        await asyncio.sleep(max(0.0, began + period - time.monotonic()))


async def wait_until_idle(server: Server, seconds: float) -> tuple[float | None, Sample | None]:
    """Seconds until nothing runs, waits or holds a page (None: they were not enough), and the last sample."""
    began = time.monotonic()
    last = None
    while time.monotonic() - began < seconds:
        with contextlib.suppress(OSError, EOFError, ValueError):
            last = await sample(server)
            if last.num_running == last.num_waiting == last.num_pages_in_use == 0:
                return time.monotonic() - began, last
        await asyncio.sleep(0.05)
    return None, last


# ---- the phases -----------------------------------------------------------------------------------------------


async def use_every_page(server: Server, engine: Mapping[str, Any], seconds: float) -> bool:
    """Have prompts read until one pushed another out of the cache: memory that is used for the first time is no growth.
    Returns whether ``seconds`` were enough."""
    rng = random.Random(0)
    deadline = time.monotonic() + seconds
    length = min(16 * engine["page_size"], engine["max_model_len"] - 1)

    async def client(name: str) -> None:
        while time.monotonic() < deadline and not await evicted_pages(server):
            prompt = rng.choices(range(engine["vocab_size"]), k=length)
            body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True, "return_token_ids": True}
            content = wire("POST", "/v1/completions", name, body)
            require([await exchange(server.port, Request(name, 0, content, length, 1), PATIENCE_BELOW_CAPACITY)])

    await asyncio.gather(*map(client, TENANTS))
    return await evicted_pages(server) > 0


async def evicted_pages(server: Server) -> int:
    return int((await server_info(server.port))["stats"]["scheduler"]["evicted_pages"])


async def closed_loop(
    server: Server, source: Iterator[Request], clients: int, seconds: float
) -> tuple[float, list[Record]]:
    """Tokens/s that ``clients`` get served when each sends its next request as soon as the last is done, and what
    became of those that ended meanwhile. As all begin at once, nothing counts until as many have ended; as many more
    count at least."""
    records: list[Record] = []
    running = True

    async def client() -> None:
        while running:
            record = await exchange(server.port, next(source), PATIENCE_BELOW_CAPACITY)
            if record.outcome == "refused":  # a key's part of the queue was full, as all began
                await asyncio.sleep(0.1)
            else:
                records.append(record)

    async def until(num_records: int) -> None:
        while len(records) < num_records and not any(task.done() for task in tasks):
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    await until(clients)
    first, num_before = await sample(server), len(records)
    await asyncio.sleep(seconds)
    await until(num_before + clients)
    last, counted = await sample(server), records[num_before:]
    running = False
    await asyncio.gather(*tasks)
    require(records)
    return (last.num_tokens - first.num_tokens) / (last.at - first.at), counted


def require(records: Sequence[Record]) -> None:
    """Raises SystemExit unless all were served: a server that fails below its capacity need not be overloaded."""
    for record in records:
        if record.outcome != "served":
            raise SystemExit(f"below its capacity the server failed a request: {record.error or record.outcome}")


async def open_loop(
    server: Server, source: Iterator[Request], rate: float, seconds: float, seed: str, patience: float
) -> tuple[list[Record], list[float]]:
    """Poisson arrivals at ``rate`` a second, whatever becomes of them. Returns once each has its end: records in order
    of arrival, and how late each was sent (seconds), which is this program's fault and not the server's."""
    rng = random.Random(seed)
    gaps = iter(lambda: rng.expovariate(rate), None)
    times = itertools.takewhile(lambda at: at < seconds, itertools.accumulate(gaps))
    arrivals = [(at, next(source)) for at in times]  # made before the clock runs: sending must cost little
    began = time.monotonic()
    tasks, late = [], []
    for at, request in arrivals:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        late.append(time.monotonic() - began - at)
        tasks.append(asyncio.create_task(exchange(server.port, request, patience)))
    return list(await asyncio.gather(*tasks)), late


async def probe(server: Server) -> Record:
    """One request whose answer is known to depend on nothing else."""
    body = {"prompt": [1, 2, 3, 5, 8], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    content = wire("POST", "/v1/completions", next(iter(TENANTS)), {**body, "return_token_ids": True})
    return await exchange(server.port, Request("probe", 0, content, 5, 12), 60)


async def measure(server: Server, work: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """All phases; what was found, with nothing judged. ``args`` as ``main`` parses them."""
    info = await server_info(server.port)
    engine = info["engine"]
    before = await probe(server)
    all_used = await use_every_page(server, engine, args.warm_up)
    source = requests(work, f"capacity {args.seed}", engine, leavers=False)
    clients = engine["max_num_seqs"] + max(2, engine["max_num_seqs"] // 8)
    tokens_per_second, closed = await closed_loop(server, source, clients, args.capacity_seconds)
    capacity = tokens_per_second / work.mean_tokens
    idle_before = (await wait_until_idle(server, args.idle_seconds))[1]
    tell(f"capacity {capacity:.1f} requests/s with {clients} clients; {args.factor:g} times that comes now")
    ended_before = ended_requests((await get(server.port, "/metrics")).decode())

    samples: list[Sample] = []
    scrapes: list[float] = []
    sampling = asyncio.create_task(keep_sampling(server, args.period, samples, scrapes))
    began = time.monotonic()
    source = requests(work, f"overload {args.seed}", engine)
    records, late = await open_loop(
        server, source, capacity * args.factor, args.seconds, f"arrivals {args.seed}", args.patience
    )
    sampling.cancel()
    tell(f"{len(records)} requests have their end; is the server idle again?")
    idle_after, after = await wait_until_idle(server, args.idle_seconds)
    alive = await probe(server)
    found: dict[str, Any] = {"ended": None, "after_ready": None, "preemptions": None}
    with contextlib.suppress(OSError, EOFError, ValueError):
        found["ended"] = ended_requests((await get(server.port, "/metrics")).decode()) - ended_before
        stats = (await server_info(server.port))["stats"]
        found.update(after_ready=stats["after_ready"], preemptions=stats["preemptions"])
    return {
        **found,
        "engine": engine,
        "clients": clients,
        "capacity": capacity,
        "mean_tokens": work.mean_tokens,
        "closed": closed,
        "began": began,
        "records": records,
        "late": late,
        "every_page_used_before": all_used,
        "samples": samples,
        "scrapes": scrapes,
        "idle_before": idle_before,
        "idle_after_seconds": idle_after,
        "after": after,
        "same_answer": bool(before.tokens) and before.tokens == alive.tokens and alive.outcome == "served",
    }


def ended_requests(metrics: str) -> int:
    """Requests that have ended, however, by the server's own count."""
    lines = (line for line in metrics.splitlines() if line.startswith("tokenspeed:request_success_total{"))
    return round(sum(float(line.rpartition(" ")[2]) for line in lines))


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace, work: Workload) -> dict[str, Any]:
    """The whole benchmark: configuration, figures, verdicts."""
    options = ["--max-waiting", str(args.max_waiting), "--max-waiting-per-key", str(args.max_waiting_per_key)]
    options += ["--aging-seconds", str(args.aging_seconds), "--kv-gib", str(args.kv_gib)]
    server = Server(shlex.split(args.tokenspeed), args.artifact, [*options, *shlex.split(args.serve_options)])
    try:
        load = os.getloadavg()[0]
        found = asyncio.run(measure(server, work, args))
        figures = summary(found, args)
        verdicts = judge(found, figures, args)
    finally:
        code = server.stop()
    ends = {"name": "ends cleanly", "holds": code == 0 and not server.log, "timed": False}
    verdicts.append({**ends, "found": f"exit code {code} after SIGTERM; on stderr: {''.join(server.log)[-500:]!r}"})
    if args.requests:
        lines = ({**asdict(one), "sent": one.sent - found["began"]} for one in found["records"])
        args.requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = {name: value for name, value in vars(args).items() if isinstance(value, int | float)}
    return {
        "machine": platform.platform(),
        "load_average": load,
        "artifact": found["engine"],
        "arguments": chosen,
        "workload": asdict(work),
        "tenants": TENANTS,
        "priorities": PRIORITIES,
        "figures": figures,
        "samples": [{**asdict(one), "at": round(one.at - found["began"], 3)} for one in found["samples"]],
        "verdicts": verdicts,
        "holds": all(one["holds"] for one in verdicts),
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--factor", type=float, default=3.0, help="arrivals by capacity (default: 3)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals (default: 120)")
    parser.add_argument("--max-waiting", type=int, default=64, help="as `serve` has it (default: 64)")
    parser.add_argument("--max-waiting-per-key", type=int, help="as `serve` has it (default: an equal part of that)")
    parser.add_argument("--aging-seconds", type=float, default=10.0, help="as `serve` has it (default: 10)")
    parser.add_argument("--kv-gib", type=float, default=0.5, help="as `serve` has it (default: 0.5)")
    parser.add_argument("--serve-options", default="", metavar="WORDS", help="more options of `tokenspeed serve`")
    parser.add_argument("--capacity-seconds", type=float, default=20.0, help="of the closed loop (default: 20)")
    parser.add_argument(
        "--warm-up", type=float, default=120.0, help="seconds to use every page once, at most (default: 120)"
    )
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="to return to idle, at most (default: 10)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds a client waits (default: 300)")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between samples (default: 1)")
    parser.add_argument("--refusal-seconds", type=float, default=0.25, help="bound of the p99 (default: 0.25)")
    parser.add_argument("--growth-mb", type=float, default=16.0, help="bound, if above 5%% (default: 16)")
    parser.add_argument("--fairness", type=float, default=0.75, help="least part of what is due (default: 0.75)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenspeed", default=TOKENSPEED, metavar="COMMAND", help="default: %(default)s")
    parser.add_argument("--requests", type=Path, metavar="FILE", help="write each request's record as a line of JSON")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    args = parser.parse_args(words)
    if args.max_waiting_per_key is None:
        args.max_waiting_per_key = max(1, args.max_waiting // len(TENANTS))
    return args


def main() -> int:
    args = parse()
    result = run(args, Workload())
    if args.json:
        print(json.dumps(result, indent=1))
    show(result, sys.stderr if args.json else sys.stdout)
    return 0 if result["holds"] else 1


def show(result: Mapping[str, Any], out: Any) -> None:
    for name, value in result["figures"].items():
        print(f"{name:<24}{value}", file=out)
    for one in result["verdicts"]:
        timed = " (timed)" if one["timed"] else ""
        print(f"{'holds' if one['holds'] else 'FAILS':<6}{one['name']}{timed}: {one['found']}", file=out)


if __name__ == "__main__":
    sys.exit(main())
