"""Compares the kernels of linear_wide.py with those of linear.py on this GPU, alone and in chains.

    python benchmarks/gpu/bench_variants.py --json out.json [--budget 200] [--models 8b,smollm2]

First every kernel is compiled, in parallel. Then, by shape and number of rows, each variant runs once with poisoned
output and must equal the present choice bit for bit, and is timed: launches of one CUDA graph with programmatic
dependent launch between them, every launch on another copy of the weights. Last come whole decode and prefill steps
(without attention), each shape with the variant that makes the step fastest. The device is used by a child process:
what hangs or breaks it is listed, the child is replaced, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from linear_models import MODELS, Shape
from linear_variants import Variant, all_constants, check, compile_variant, function, present, variants

from tokenspeed.kernels.triton.linear_config import Config, to_json

COLD_BYTES = 160 << 20
SILENCE_S = 25.0
"""How long the child may take for one variant before it counts as hanging."""
PASSES = (
    ("8b", (1, 64, 256, 2048)),
    ("8b", (8, 32, 128, 8192)),
    ("smollm2", (1, 64, 256, 2048)),
    ("smollm2", (8, 32, 128, 8192)),
)
STEP_ROWS = {"8b": (1, 8, 32, 64, 128, 256, 2048), "smollm2": (1, 64, 256)}
LARGEST_HEAD_ROWS = 256
TRIED_IN_STEPS = 4
"""Fastest variants of each kind that a whole step tries."""

Task = tuple[Shape, int, tuple[Variant, ...]]


# --- the child: owns the device ---------------------------------------------------------------------


class Device:
    """Operands and launches. Torch is imported here only."""

    def __init__(self) -> None:
        import torch
        import triton

        self.torch = torch
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.manual_seed(20)
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._scratch = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        self._next = 0
        triton.set_allocator(self._allocate)
        self._shape: Shape | None = None
        self._at: Any = None

    def _allocate(self, size: int, alignment: int, stream: Any) -> Any:
        """Scratch of a launch: never that of one of its neighbours, which may still run."""
        start = -(-self._next // 4096) * 4096
        if start + size > self._scratch.numel():
            start = 0
        self._next = start + size
        return self._scratch[start : start + size]

    def buffers(self, shape: Shape, rows: int, copies: int) -> dict[str, Any]:
        torch, dtype = self.torch, self.torch.bfloat16
        gated = shape.op == "linear_silu_mul"
        at = {
            "weights": torch.randn(copies, shape.n, shape.k, device="cuda", dtype=dtype).mul_(shape.k**-0.5),
            "x": torch.randn(rows, shape.k, device="cuda", dtype=dtype),
            "out": torch.empty(rows, shape.width, device="cuda", dtype=dtype if gated else torch.float32),
            "step_sizes": torch.zeros(4, device="cuda", dtype=torch.int32),
        }
        if shape.op == "linear_add":
            at["residual"] = torch.randn(rows, shape.width, device="cuda")
        return at

    def launch(self, shape: Shape, variant: Variant, at: dict[str, Any], copy: int) -> None:
        key = (shape.op, shape.n, shape.k, variant)
        config = variant.config
        if key not in self._kernels:
            compiled = compile_variant(shape, config)
            values = all_constants(shape, config)
            names = function(shape, config).arg_names
            self._kernels[key] = compiled[(variant.programs, 1, 1)], names, values
        kernel, names, values = self._kernels[key]
        operands = {**at, "weight": at["weights"][copy % len(at["weights"])]}
        kernel(*(operands[name] if name in operands else values[name] for name in names))

    def time(self, body: Callable[[], None], repeats: int = 5) -> float:
        """Microseconds of one replay of what ``body`` launches: the median, after one to warm up."""
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)
        return float(times[len(times) // 2])

    def result(self, shape: Shape, variant: Variant, at: dict[str, Any], m: int) -> Any:
        at["out"].fill_(float("nan"))
        at["step_sizes"].fill_(m)
        self.launch(shape, variant, at, 0)
        self.torch.cuda.synchronize()
        return at["out"][:m].clone()

    def measure(self, task: Task, say: Callable[..., None]) -> None:
        shape, m, choices = task
        torch = self.torch
        copies = min(160, max(2, -(-COLD_BYTES // (shape.n * shape.k * 2))))
        if self._shape != shape or len(self._at["x"]) < m:
            self._at = None
            torch.cuda.empty_cache()
            self._shape, self._at = shape, self.buffers(shape, max(m, 256), copies)
        at, first = self._at, None
        launches = max(copies, 4 if m >= 2048 else 24)
        for variant in choices:
            say("start", variant)
            result = self.result(shape, variant, at, m)
            first = result if first is None else first
            if not torch.equal(result, first):
                different = (result != first).float().mean().item()
                error = ((result.float() - first.float()).norm() / first.float().norm()).item()
                say("wrong", variant, f"{different:.2%} of the elements differ, relative error {error:.1e}")
                continue
            if m > 1:
                half = self.result(shape, variant, at, m // 2)
                rest = at["out"][m // 2 : m].float()
                if not torch.equal(half, first[: m // 2]) or not torch.isnan(rest).all():
                    say("wrong", variant, "a step smaller than its bucket is wrong")
                    continue
                at["step_sizes"].fill_(m)

            def body(variant: Variant = variant) -> None:
                for copy in range(launches):
                    self.launch(shape, variant, at, copy)

            say("time", variant, self.time(body) / launches)
        x, weights = at["x"][:m], at["weights"]

        def cublas() -> None:
            for copy in range(launches):
                torch.mm(x, weights[copy % len(weights)].T)

        cublas()
        say("cublas", None, self.time(cublas) / launches)

    def read_rate(self) -> float:
        """GB/s at which torch reads a matrix once (a product with a vector)."""
        torch = self.torch
        a = torch.randn(1 << 18, 8192, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(8192, device="cuda", dtype=torch.bfloat16)
        torch.mv(a, v)
        return float(a.numel() * 2 / self.time(lambda: torch.mv(a, v)) / 1e3)

    def steps(self, name: str, m: int, options: dict[Shape, list[Variant]], say: Callable[..., None]) -> None:
        """Whole steps of ``m`` rows: the present choices, then for each shape the variant that helps most."""
        self._shape = self._at = None
        self.torch.cuda.empty_cache()
        step = Step(self, name, m, say)
        best = {s: (options[s] or [present(s, m)])[0] for s in step.shapes}
        old = {s: present(s, m) for s in step.shapes}
        found = {"present": step.time(old, False), "present, early": step.time(old, True)}
        found["fastest alone"] = step.time(best, False)
        us = found["fastest alone, early"] = step.time(best, True)
        for shape in step.shapes:
            for variant in options[shape][1:]:
                tried = step.time({**best, shape: variant}, True)
                if tried < us:
                    us, best = tried, {**best, shape: variant}
        found["chosen in the step, early"] = us
        found["chosen in the step"] = step.time(best, False)
        say("step", m, found, list(best.items()))


class Step:
    """All layers of one model at ``m`` rows: projections, and norm-sized kernels where a step has others."""

    def __init__(self, device: Device, name: str, m: int, say: Callable[..., None]) -> None:
        self._device, self._model, self._m, self._say = device, MODELS[name], m, say
        self.shapes = [s for s in self._model.shapes if m <= LARGEST_HEAD_ROWS or "head" not in s.name]
        layers = self._model.num_layers
        self._at = {s: device.buffers(s, m, 1 if "head" in s.name else layers) for s in self.shapes}
        for at in self._at.values():
            at["step_sizes"].fill_(m)
        self._start = device.torch.randn_like(self._at[self.shapes[1]]["out"])
        self._end: Any = None

    def time(self, chosen: dict[Shape, Variant], early: bool) -> float:
        """Microseconds of a step; infinite where its result is not that of the first step timed.

        early: the kernels between projections let their successors start before they wait.
        """
        self._say("start", None)
        at = self._at
        residual = at[self.shapes[1]]["out"]
        residual.copy_(self._start)
        self._launch(chosen, early)
        end = at[self.shapes[-1]]["out"].clone()
        self._end = end if self._end is None else self._end
        if not self._device.torch.equal(end, self._end):
            self._say("wrong", None, f"other bits, early {early}: {'; '.join(map(str, chosen.values()))}")
            return float("inf")
        return self._device.time(lambda: self._launch(chosen, early))

    def _launch(self, chosen: dict[Shape, Variant], early: bool) -> None:
        from step_chain import small

        qkv, o, gate_up, down, *head = self.shapes
        norm = small(qkv.k, early)

        def between(target: Shape) -> None:
            norm[(self._m, 1, 1)](self._at[o]["out"], self._at[target]["x"], *norm.constants)

        def project(shape: Shape, layer: int) -> None:
            self._device.launch(shape, chosen[shape], self._at[shape], layer)

        for layer in range(self._model.num_layers):
            between(qkv)
            project(qkv, layer)
            between(o)
            between(o)
            project(o, layer)
            between(gate_up)
            project(gate_up, layer)
            project(down, layer)
        for shape in head:
            between(shape)
            project(shape, 0)


def child(connection: Connection) -> None:
    def say(*message: Any) -> None:
        connection.send(message)

    device = Device()
    say("ready", device.torch.cuda.get_device_name())
    while True:
        kind, *work = connection.recv()
        if kind == "end":
            return
        try:
            if kind == "measure":
                device.measure(work[0], say)
            elif kind == "steps":
                device.steps(work[0], work[1], work[2], say)
            else:
                say("rate", device.read_rate())
            say("done")
        except Exception as error:
            say("error", f"{type(error).__name__}: {str(error)[:300]}")
            return


# --- the parent: never touches it -------------------------------------------------------------------


class Runner:
    """A child and what it says; replaced when it hangs or fails."""

    def __init__(self) -> None:
        self.device = ""
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=child, args=(other,), daemon=True)
        self._process.start()
        other.close()
        if not self._connection.poll(120):
            raise RuntimeError("the device process does not start")
        _, self.device = self._connection.recv()

    def do(self, *work: Any, hear: Callable[..., None]) -> str:
        """Send ``work``, pass on what is said about it: "" or what went wrong (the child is then a new one)."""
        self._connection.send(work)
        problem = f"silent for {SILENCE_S:.0f} s: hangs"
        try:
            while self._connection.poll(SILENCE_S):
                kind, *rest = self._connection.recv()
                if kind == "done":
                    return ""
                if kind == "error":
                    problem = rest[0]
                    break
                hear(kind, *rest)
        except EOFError:
            problem = "the device process died"
        self._process.kill()
        self._process.join()
        self._start()
        return problem

    def close(self) -> None:
        self._connection.send(("end",))
        self._process.join(20)


def measure(runner: Runner, shape: Shape, m: int, choices: list[Variant]) -> dict[str, Any]:
    times: dict[Variant, float] = {}
    wrong: list[str] = []
    cublas = 0.0
    waiting, reference = list(choices), choices[0]
    current: list[Variant] = []

    def hear(kind: str, variant: Variant | None, *rest: Any) -> None:
        nonlocal cublas
        if kind == "start" and variant is not None:
            current[:] = [variant]
        elif kind == "time" and variant is not None:
            times[variant] = min(rest[0], times.get(variant, rest[0]))
        elif kind == "wrong":
            wrong.append(f"{variant}: {rest[0]}")
        elif kind == "cublas":
            cublas = rest[0]

    while True:
        current.clear()
        problem = runner.do("measure", (shape, m, tuple(waiting)), hear=hear)
        if not problem:
            break
        bad = current[0] if current else reference
        wrong.append(f"{bad}: {problem}")
        if bad == reference:
            break
        # Those before it are known; the reference leads again.
        waiting = [reference, *waiting[waiting.index(bad) + 1 :]]
    ranked = sorted(times.items(), key=lambda item: item[1])
    return {"shape": shape, "M": m, "present": times.get(reference), "ranked": ranked, "wrong": wrong, "cublas": cublas}


def print_entry(entry: dict[str, Any]) -> None:
    shape, m = entry["shape"], entry["M"]
    for problem in entry["wrong"]:
        print(f"{shape.name:>16} {m:>5}  WRONG {problem}")
    kinds: dict[str, list[tuple[float, Variant]]] = {}
    for variant, us in entry["ranked"]:
        kinds.setdefault(variant.config.kind, []).append((us, variant))
    best = "  ".join(
        f"{kind} {found[0][0]:.1f} ({found[0][1]!s:.44})" for kind, found in kinds.items() if kind != "tile"
    )
    us = entry["ranked"][0][1] if entry["ranked"] else float("nan")
    size = shape.n * shape.k * 2
    print(
        f"{shape.name:>16} {m:>5} {entry['present'] or 0:8.1f} {us:8.1f} {size / us / 1e3:6.0f} "
        f"{size * m / us / 1e6:6.1f} {entry['cublas']:8.1f}  {best}",
        flush=True,
    )


def fastest(entry: dict[str, Any]) -> list[Variant]:
    """The variants that a step tries, fastest first: some of each kind."""
    count: dict[str, int] = {}
    found = []
    for variant, _ in entry["ranked"]:
        kind = variant.config.kind
        count[kind] = count.get(kind, 0) + 1
        if count[kind] <= TRIED_IN_STEPS:
            found.append(variant)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=200, help="seconds for measuring, without compilation")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["8b", "smollm2"])
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    args = parser.parse_args()
    work = [(shape, m) for model, rows in PASSES if model in args.models for shape in MODELS[model].shapes for m in rows
            if m <= LARGEST_HEAD_ROWS or "head" not in shape.name]  # fmt: skip
    plan = {(shape, m): variants(shape, m) for shape, m in work}
    good = compile_all(plan, args.jobs)
    runner = Runner()
    end = time.perf_counter() + args.budget
    results: dict[str, Any] = {"device": runner.device, "entries": [], "steps": []}
    rate = [4600.0]
    runner.do("rate", hear=lambda kind, value: rate.append(value))
    print(f"{runner.device}; torch reads {rate[-1]:.0f} GB/s; floors below are for 4600 GB/s", flush=True)
    print(
        f"{'shape':>16} {'M':>5} {'present':>8} {'best':>8} {'GB/s':>6} {'TFLOP':>6} {'cuBLAS':>8}  best of each kind"
    )
    entries: dict[tuple[Shape, int], dict[str, Any]] = {}
    stepped: set[str] = set()
    for index, (shape, m) in enumerate(work):
        if time.perf_counter() > end - 25 * (len(args.models) - len(stepped)):
            print(f"{shape.name:>16} {m:>5} skipped: over budget")
        else:
            choices = [v for v in plan[shape, m] if (shape, v.config) in good]
            entries[shape, m] = entry = measure(runner, shape, m, choices)
            print_entry(entry)
            results["entries"].append(entry_json(entry))
            args.json.write_text(json.dumps(results))
        model = shape.name.split(".")[0]
        if all(s.name.split(".")[0] != model for s, _ in work[index + 1 :]):
            stepped.add(model)
            whole_steps(runner, model, entries, results, end)
            args.json.write_text(json.dumps(results))
    runner.close()


def whole_steps(runner: Runner, name: str, entries: dict[tuple[Shape, int], Any], results: Any, end: float) -> None:
    model = MODELS[name]
    floor = model.weight_bytes / 4.6e6
    for m in STEP_ROWS[name]:
        shapes = [s for s in model.shapes if m <= LARGEST_HEAD_ROWS or "head" not in s.name]
        if time.perf_counter() > end or not all((s, m) in entries and entries[s, m]["ranked"] for s in shapes):
            print(f"{name} step of {m}: skipped")
            continue
        options = {s: fastest(entries[s, m]) for s in shapes}

        def hear(kind: str, *rest: Any) -> None:
            if kind == "wrong":
                print(f"{name} step: {rest[1]}")
            if kind == "step":
                rows, found, best = rest
                print(
                    f"{name} step of {rows}, floor {floor:.0f} us: "
                    + ", ".join(f"{k} {us:.0f}" for k, us in found.items())
                )
                for shape, variant in best:
                    print(f"    {shape.name:>16} {variant}", flush=True)
                chosen = [[shape.name, str(variant), variant_json(variant)] for shape, variant in best]
                results["steps"].append({"model": name, "M": rows, "us": found, "chosen": chosen})

        problem = runner.do("steps", name, m, options, hear=hear)
        if problem:
            print(f"{name} step of {m}: {problem}")


def variant_json(variant: Variant) -> dict[str, Any]:
    return {"programs": variant.programs, "config": to_json(variant.config)}


def entry_json(entry: dict[str, Any]) -> dict[str, Any]:
    all_times = [{"us": round(us, 2), **variant_json(variant)} for variant, us in entry["ranked"]]
    return {**entry["shape"].key, "M": entry["M"], "present_us": entry["present"], "cublas_us": entry["cublas"],
            "wrong": entry["wrong"], "all": all_times}  # fmt: skip


def compile_all(plan: dict[tuple[Shape, int], list[Variant]], jobs: int) -> set[tuple[Shape, Config]]:
    """Fill Triton's cache; prints why what does not compile does not, and returns what does.

    Half a second a kernel in processes of its own: a compiler that aborts takes its process along, and what that
    process was to compile is compiled again, one process a kernel.
    """
    start = time.perf_counter()
    wanted = list(dict.fromkeys((shape, v.config) for (shape, _), choices in plan.items() for v in choices))
    good: set[tuple[Shape, Config]] = set()
    waiting = wanted
    for _attempt in range(2):
        broken = []
        with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
            pairs = [(job, pool.submit(check, job)) for job in waiting]
            for job, future in pairs:
                try:
                    problem = future.result()
                except BrokenProcessPool:
                    broken.append(job)
                    continue
                if problem:
                    print("cannot compile:", problem)
                else:
                    good.add(job)
        waiting = broken
        if not waiting:
            break
        print(f"{len(waiting)} kernels again: a compiler process died", flush=True)
    print(f"compiled {len(good)} of {len(wanted)} kernels in {time.perf_counter() - start:.0f} s", flush=True)
    return good


if __name__ == "__main__":
    main()
