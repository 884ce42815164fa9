"""FlashInfer's attention, captured, beside the Triton kernels: does it agree, and what does it cost?

    python benchmarks/gpu/capture_flashinfer.py --json out.json [--shape artifacts/recipes/shapes/llama-3.1-8b]
        [--cases decode:1,decode:64,decode:256,prefill:2048,prefill:8192] [--context 1024] [--no-model]

Needs a CUDA GPU, nvcc 13, a host C++ compiler, Triton, FlashInfer's headers where Python finds its package (it is not
imported), and the repository root on PYTHONPATH; no torch.

1. Model: two layers of the shape with random weights are built twice, once with each attention, verified and served;
   log-probabilities of the same tokens must agree to what bfloat16 leaves.
2. Values: attention of ragged steps over random q and pages, element by element; positions beyond a sequence hold NaN.
3. Times: graphs of attention alone, walking the layers of the shape over pages that no cache holds. Two lengths of
   graph are timed and subtracted, so that what a step costs besides is not counted. The plan runs once a step: its time
   is given apart.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import triton
import triton.language as tl

from tokenspeed import _native
from tokenspeed.bucket import Bucket, BucketTable, StepLimits
from tokenspeed.compile.build import build, resolve_envelope
from tokenspeed.compile.capture_build import capture_calls, capture_problem
from tokenspeed.compile.codegen import CompiledKernel, compile_kernels
from tokenspeed.compile.dummy_weights import DummyCheckpoint
from tokenspeed.compile.lower import Binary, LoweredTarget, connected, lower_target, plan_target
from tokenspeed.compile.models import build_program
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.graph import Access, Argument, Int, Launch, Node, Pointer, Region
from tokenspeed.kernels.flashinfer_specs import flashinfer_specs
from tokenspeed.kernels.registry import DeviceKernel, Registry
from tokenspeed.kernels.triton_specs import triton_registry
from tokenspeed.runtime.executor import IO_SET_ALIGNMENT
from tokenspeed.step import align
from tokenspeed.target import Target

TARGET = Target.parse("cuda:sm_90a")
SOLUTIONS = ("triton", "flashinfer")
BLOCK = 4096
PICKED = 4096
"""Elements of the attention output that are compared."""
TOLERANCE = 0.02
"""Of a value against the other kernel's: two roundings to bfloat16, of probabilities and of results near 1."""
ROUNDS, STEPS, IO_SETS = 5, 10, 2


@triton.jit
def fill(to, stride, SEED: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr):
    """Normal numbers into ``to[row * stride + i]`` for i < COUNT. Grid (COUNT / N, rows)."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.program_id(1).to(tl.int64)
    value = tl.randn(SEED + tl.program_id(1), i)
    tl.store(to + row * stride + i, value.to(to.dtype.element_ty), mask=i < COUNT)


@triton.jit
def pick(values, step_sizes, to, WIDTH: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr):
    """``to[p]``: an element of the step's rows of ``values`` [rows][WIDTH], another for each p < COUNT."""
    p = tl.program_id(0) * N + tl.arange(0, N)
    row, column = (p * 7919) % tl.load(step_sizes), (p * 1031) % WIDTH
    value = tl.load(values + row.to(tl.int64) * WIDTH + column)
    tl.store(to + p, value.to(tl.float32), mask=p < COUNT)


@triton.jit
def poison(kv, page_table, context_lens, D: tl.constexpr, PAGE_SIZE: tl.constexpr, STRIDE: tl.constexpr,
           PAGES: tl.constexpr):  # fmt: skip
    """NaN into what lies behind a sequence's last position in its last page. Grid (sequences, heads of K and of V)."""
    last = tl.load(context_lens + tl.program_id(0)) - 1
    page = tl.load(page_table + tl.program_id(0) * PAGES + last // PAGE_SIZE).to(tl.int64)
    i = tl.arange(0, PAGE_SIZE * D)
    value = tl.full((PAGE_SIZE * D,), float("nan"), tl.float32).to(kv.dtype.element_ty)
    tl.store(kv + page * STRIDE + tl.program_id(1) * (PAGE_SIZE * D) + i, value, mask=i // D > last % PAGE_SIZE)


def helper(function: Any, signature: dict[str, str], **constants: int) -> DeviceKernel:
    return DeviceKernel("capture_flashinfer", function.fn.__name__, tuple(signature.items()),
                        tuple(sorted(constants.items())), 4, 1)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What the graphs and steps of one model shape need to know."""

    layers: int
    q_width: int
    head_dim: int
    kv_heads: int
    page_size: int
    pages_per_seq: int
    page_bytes: int
    layer_bytes: int


class Attention:
    """Attention of one solution on the device: its graphs are cut out of those of the whole model."""

    def __init__(self, device: Any, low: LoweredTarget, shape: Shape, helpers: Mapping[DeviceKernel, CompiledKernel]):
        self.device, self.low, self.shape, self.helpers = device, low, shape, helpers
        self.table = BucketTable(low.graphs)

    def bucket(self, lengths: Sequence[int]) -> Bucket:
        tokens, seqs = sum(lengths), len(lengths)
        found = self.table.find(tokens, seqs, seqs, decode_only=tokens == seqs)
        assert found is not None
        return found

    def layers(self, bucket: Bucket, count: int) -> list[Node]:
        """``count`` calls in a chain, walking the layers again and again."""
        calls: dict[str, list[Node]] = {}
        for node in self.low.graphs[bucket].nodes:
            op, _, _ = node.name.partition("/")
            if op.removesuffix(".1").endswith(".attention"):
                calls.setdefault(op.removesuffix(".1"), []).append(node)
        chain: list[Node] = []
        names = list(calls)
        for turn in range(count):
            for node in calls[names[turn % len(names)]]:
                if turn >= len(names) and node.name.endswith("/plan"):
                    continue
                before = (len(chain) - 1,) if chain else ()
                chain.append(replace(node, name=f"{node.name}#{turn}", predecessors=before))
        return chain

    def load(self, nodes: Sequence[Node]) -> int:
        """The handle of the graph that brings a step's inputs to the device, then runs ``nodes`` in turn."""
        head = next(iter(self.low.graphs.values())).nodes[0]
        graph = connected([head, *nodes], [(i - 1,) if i else () for i in range(1 + len(nodes))])
        return int(self.device.load_graph(graph.encode(), self.shape.page_bytes))

    def node(self, name: str, kernel: DeviceKernel, grid: tuple[int, int, int], *args: Argument) -> Node:
        code = self.helpers[kernel]
        launch = Launch(code.name, grid, (code.threads, 1, 1), code.shared_bytes)
        return Node(name, code.symbol, (*args, Int(0), Int(0)), (), launch)

    def operands(self, bucket: Bucket) -> tuple[Pointer, Pointer]:
        """(q, out) of the first layer."""
        program = self.low.layout.program
        op = next(op for op in program.ops if op.kind == "paged_attention")
        layout = self.low.layout
        return layout.pointer(op.operand("q"), bucket, Access.WRITE), layout.pointer(
            op.result("out"), bucket, Access.READ
        )


FILL = {"to": "*bf16", "stride": "i32"}
PICK = {"values": "*bf16", "step_sizes": "*i32", "to": "*fp32"}
POISON = {"kv": "*bf16", "page_table": "*i32", "context_lens": "*i32"}


def poison_kernel(shape: Shape) -> DeviceKernel:
    return helper(poison, POISON, D=shape.head_dim, PAGE_SIZE=shape.page_size, STRIDE=shape.page_bytes // 2,
                  PAGES=shape.pages_per_seq)  # fmt: skip


class Steps:
    """Writes the inputs of steps, and knows where their outputs are."""

    def __init__(self, device: Any, low: LoweredTarget, shape: Shape, num_pages: int):
        self.shape, self.io_bytes = shape, low.io_bytes
        self.placed = {tensor.name: tensor for tensor in low.io}
        self.io = device.view("io")
        order = list(range(num_pages))
        random.Random(1).shuffle(order)
        self.pages = order

    def write(self, lengths: Sequence[int], contexts: Sequence[int]) -> tuple[int, int, int]:
        """A step of sequences with so many tokens, which then have so many positions. Returns its sizes."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self._put("cu_seqlens", starts)
        self._put("context_lens", contexts)
        at = 0
        for seq, context in enumerate(contexts):
            need = -(-context // self.shape.page_size)
            self._put("page_table", self.pages[at : at + need], seq * self.shape.pages_per_seq)
            at += need
        return starts[-1], len(lengths), len(lengths)

    def _put(self, name: str, values: Sequence[int], first: int = 0) -> None:
        tensor = self.placed[name]
        for io_set in range(IO_SETS):
            start = io_set * align(self.io_bytes, IO_SET_ALIGNMENT) + tensor.offset
            view = self.io[start : start + tensor.nbytes].cast("i")
            for i, value in enumerate(values):
                view[first + i] = value

    def picked(self) -> list[float]:
        at = self.placed["out_top_logprobs"].offset
        return list(self.io[at : at + 4 * PICKED].cast("f"))


# --- 1. a model, built and served with each ------------------------------------------------------------


def check_model(shape_folder: Path, folder: Path, cache: Path) -> dict[str, Any]:
    config = json.loads((shape_folder / "config.json").read_text())
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config |= {
        "head_dim": head_dim, "num_hidden_layers": 2, "vocab_size": 4096, "hidden_size": 1024,
        "intermediate_size": 2048, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    served: dict[str, list[Scored]] = {}
    figures: dict[str, Any] = {}
    for solution in SOLUTIONS:
        begin = time.perf_counter()
        built = build(folder / "shape", folder / solution, solutions={"paged_attention": solution}, dummy_weights=3,
                      targets=str(TARGET), dtype="bfloat16", max_model_len=2048, max_num_seqs=32,
                      max_prefill_tokens=1024, cache=cache)  # fmt: skip
        figures[solution] = {"build_s": time.perf_counter() - begin, "stages_s": dict(built.seconds)}
        served[solution] = _serve(folder / solution)
    prompt, drawn = [], []
    for a, b in zip(*served.values(), strict=True):
        prompt += [abs(x - y) for x, y in zip(a[0], b[0], strict=True)]
        for x, y in zip(a[1], b[1], strict=True):
            if x[0] != y[0]:
                break  # from here on they go on from other tokens
            drawn.append(abs(x[1] - y[1]))
    for what, differences in (("prompt", prompt), ("drawn", drawn)):
        figures[what] = {"tokens": len(differences), "mean": statistics.fmean(differences), "max": max(differences)}
        print(f"model: {len(differences)} log-probabilities of {what} tokens, triton against flashinfer: "
              f"mean difference {figures[what]['mean']:.2e}, greatest {figures[what]['max']:.2e}")  # fmt: skip
        assert figures[what]["mean"] < 0.01 and figures[what]["max"] < 0.2, figures
    return figures


Scored: TypeAlias = tuple[list[float], list[tuple[int, float]]]
"""Of a request: the log-probabilities of its prompt, and the tokens drawn with theirs."""


def _serve(artifact: Path) -> list[Scored]:
    """Prompts of many lengths, in chunks of mixed steps, and decode steps after them."""
    import tokenspeed
    from tokenspeed import SamplingParams
    from tokenspeed.artifact import Artifact
    from tokenspeed.runtime.loader import LoadOptions
    from tokenspeed.verify_artifact import verify_graphs

    verify_graphs(Artifact.open(artifact))
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 4000) for _ in range(n)] for n in (1, 2, 17, 64, 65, 300, 700, 1500)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with tokenspeed.load(artifact, options=LoadOptions(kv_gib=1)) as engine:
        outputs = engine.generate(prompts, params)
    return [
        ([e.logprob for e in o.prompt_logprobs or () if e is not None], [(e.token_id, e.logprob) for e in o.logprobs])
        for o in outputs
    ]


# --- 2. values, 3. times ---------------------------------------------------------------------------------


def ragged(tokens: int, limit: int) -> tuple[list[int], list[int]]:
    """Lengths and contexts of a step of up to ``tokens`` tokens: decodes among chunks, with and without a past."""
    rng = random.Random(tokens)
    lengths, contexts = [], []
    while sum(lengths) < tokens and len(lengths) < 40:
        length = min(rng.choice([1, 1, 2, 31, 32, 33, 64, 129, 700]), tokens - sum(lengths))
        lengths.append(length)
        contexts.append(min(limit, length + rng.choice([0, 0, 1, 63, 64, 65, 500])))
    return lengths, contexts


def check_values(sides: Mapping[str, Attention], steps: Steps, pages: int) -> float:
    worst = 0.0
    cases = [([1] * n, [1 + (i * 389) % 1024 for i in range(n)]) for n in (1, 2, 33, 64, 256)]
    cases += [ragged(n, 2048) for n in (3, 16, 100, 600, 2048)]
    for lengths, contexts in cases:
        results = []
        for side in sides.values():
            bucket = side.bucket(lengths)
            q, out = side.operands(bucket)
            rows, width = q.extent // (2 * side.shape.q_width), side.shape.q_width
            sizes, to = side.low.layout.step_sizes(), steps.placed["out_top_logprobs"]
            target = Pointer(Region.HOST_IO, to.offset, 4 * PICKED, Access.WRITE)
            tables = [Pointer(Region.IO, steps.placed[n].offset, steps.placed[n].nbytes, Access.READ)
                      for n in ("page_table", "context_lens")]  # fmt: skip
            layer = Pointer(Region.KV, 0, side.shape.layer_bytes, Access.WRITE)
            nodes = [
                pages_node(side, pages),
                side.node("poison", poison_kernel(side.shape), (len(lengths), 2 * side.shape.kv_heads, 1),
                          layer, *tables),
                side.node("fill", helper(fill, FILL, SEED=7, COUNT=width, N=BLOCK), (1, rows, 1), q, Int(width, 4)),
                *side.layers(bucket, 1),
                side.node("pick", helper(pick, PICK, WIDTH=width, COUNT=PICKED, N=1024), (PICKED // 1024, 1, 1),
                          out, sizes, target),
            ]  # fmt: skip
            graph = side.load(nodes)
            step = steps.write(lengths, contexts)
            side.device.wait(side.device.submit(graph, *step, 0))
            results.append(steps.picked())
        difference = max(abs(a - b) for a, b in zip(*results, strict=True))
        scale = max(abs(a) for a in results[0])
        for name, result in zip(sides, results, strict=True):
            assert all(x == x for x in result), f"{name}: NaN of unused positions got into {lengths} of {contexts}"
        assert scale > 0.05, (lengths, contexts, scale)
        assert difference < TOLERANCE * max(1.0, scale), (lengths, contexts, difference)
        worst = max(worst, difference)
    print(f"values: {len(cases)} ragged steps, {PICKED} elements each: greatest difference {worst:.2e}")
    return worst


def time_case(side: Attention, steps: Steps, lengths: Sequence[int], contexts: Sequence[int]) -> dict[str, Any]:
    """Microseconds of a call, and of the plan."""
    step = steps.write(lengths, contexts)
    bucket, layers = side.bucket(lengths), side.shape.layers
    short, long = layers, (2 if sum(lengths) > 1024 else 5) * layers
    graphs = [side.load(side.layers(bucket, count)) for count in (short, long)]
    seconds = [_seconds(side.device, graph, step) for graph in graphs]
    nodes = [(name, t) for name, t in side.device.profile(graphs[0], *step, 0)]
    plan = [t for name, t in nodes if "/plan" in name]
    return {
        "us": (seconds[1] - seconds[0]) / (long - short) * 1e6,
        "plan_us": plan[0] * 1e6 if plan else 0.0,
        "nodes_us": {name: t * 1e6 for name, t in nodes if "layers.1." in name or "/plan" in name},
    }


def _seconds(device: Any, graph: int, step: tuple[int, int, int]) -> float:
    """Median seconds of a step among steps queued one behind the other."""
    found = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        waiting: list[int] = []
        for i in range(STEPS):
            if len(waiting) == IO_SETS:
                device.wait(waiting.pop(0))
            waiting.append(device.submit(graph, *step, i % IO_SETS))
        for ticket in waiting:
            device.wait(ticket)
        found.append((time.perf_counter() - begin) / STEPS)
    return statistics.median(found[1:])


def steps_of(case: str, context: int) -> tuple[list[int], list[int]]:
    kind, _, number = case.partition(":")
    n = int(number)
    return ([1] * n, [context] * n) if kind == "decode" else ([n], [n])


# --- all together ------------------------------------------------------------------------------------------


def lower(shape_folder: Path, cache: Path) -> tuple[dict[str, LoweredTarget], dict[str, bytes], Shape]:
    """Both solutions lowered for the whole shape, with real binaries for attention and inputs, and these by name."""
    envelope = resolve_envelope(shape_folder, dummy_weights=0, flags={
        "targets": str(TARGET), "dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 256,
        "max_prefill_tokens": 8192})  # fmt: skip
    config = DummyCheckpoint(shape_folder, 0).config
    program = run_passes(build_program(config, dtype="bfloat16", max_model_len=envelope.max_model_len,
                                       page_size=envelope.page_size), CPU_PASSES)  # fmt: skip
    limits = StepLimits(envelope.max_prefill_tokens, envelope.max_num_seqs, envelope.max_logit_rows)
    registry = Registry([*triton_registry().specs, *flashinfer_specs(None)])
    lowered, binaries = {}, {}
    for solution in SOLUTIONS:
        plan = plan_target(program, TARGET, limits, registry, split_positions=envelope.split_positions,
                           pinned={"paged_attention": solution})  # fmt: skip
        mine = [kernel for kernel in plan.kernels if kernel.module.endswith((".attention", ".stage"))]
        compiled = compile_kernels([(kernel, TARGET) for kernel in mine], cache=cache)
        real = {kernel: code for (kernel, _), code in compiled.items()}
        names = {k: Binary(real[k].name, real[k].threads, real[k].shared_bytes) if k in real else Binary("none", 32, 0)
                 for k in plan.kernels}  # fmt: skip
        captures = capture_calls(plan.captures, TARGET, cache=cache)
        lowered[solution] = lower_target(plan, names, captures)
        binaries |= {code.name: code.binary for code in real.values()} | dict(captures.binaries)
    layout = lowered["triton"].layout
    kv = [value for value in program.states if value.shape[0] == "num_pages"]
    shape = Shape(config.num_layers, config.num_heads * config.head_dim, config.head_dim, config.num_kv_heads,
                  envelope.page_size,
                  -(-envelope.max_model_len // envelope.page_size), layout.kv_page_bytes,
                  layout.kv_page_bytes // len(kv))  # fmt: skip
    return lowered, binaries, shape


def helpers_of(shape: Shape, cache: Path) -> dict[DeviceKernel, CompiledKernel]:
    elements = shape.page_bytes // 2
    kernels = [
        helper(fill, FILL, SEED=7, COUNT=shape.q_width, N=BLOCK),
        helper(fill, FILL, SEED=11, COUNT=elements, N=BLOCK),
        helper(pick, PICK, WIDTH=shape.q_width, COUNT=PICKED, N=1024),
        poison_kernel(shape),
    ]
    return {kernel: code for (kernel, _), code in compile_kernels([(k, TARGET) for k in kernels], cache=cache).items()}


def open_device(lowered: Mapping[str, LoweredTarget], binaries: Mapping[str, bytes], pages: int, shape: Shape) -> Any:
    device = _native.GpuDevice("cuda", 0, IO_SETS)
    layout = lowered["triton"].layout
    device.allocate("arena", max(low.arena_bytes for low in lowered.values()))
    device.allocate("kv", pages * shape.page_bytes)
    device.allocate_io(layout.io_bytes, 0)
    for name, data in binaries.items():
        device.load_binary(name, data)
    return device


def pages_node(side: Attention, pages: int) -> Node:
    """Random numbers into every page, whose K and V then have values near 1."""
    elements = side.shape.page_bytes // 2
    whole = Pointer(Region.KV, 0, side.shape.page_bytes, Access.WRITE)
    kernel = helper(fill, FILL, SEED=11, COUNT=elements, N=BLOCK)
    return side.node("pages", kernel, (-(-elements // BLOCK), pages, 1), whole, Int(elements, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", type=Path, default=Path("artifacts/recipes/shapes/llama-3.1-8b"))
    parser.add_argument("--cases", default="decode:1,decode:64,decode:256,prefill:2048,prefill:8192")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--no-model", action="store_true")
    args = parser.parse_args()
    problem = capture_problem("flashinfer", TARGET)
    assert problem is None, problem
    figures: dict[str, Any] = {"shape": args.shape.name, "context": args.context}
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name), Path(name) / "cache"
        begin = time.perf_counter()
        lowered, binaries, shape = lower(args.shape, cache)
        helpers = helpers_of(shape, cache)
        figures["compile_and_capture_s"] = time.perf_counter() - begin
        print(f"launchers compiled, {len(binaries)} binaries, calls captured: {figures['compile_and_capture_s']:.1f} s")
        cases = args.cases.split(",")
        most = max(sum(-(-c // shape.page_size) for c in steps_of(case, args.context)[1]) for case in cases)
        pages = max(most, 256 * (-(-1024 // shape.page_size)))
        binaries |= {code.name: code.binary for code in helpers.values()}
        device = open_device(lowered, binaries, pages, shape)
        sides = {s: Attention(device, low, shape, helpers) for s, low in lowered.items()}
        steps = Steps(device, lowered["triton"], shape, pages)
        figures["values_greatest_difference"] = check_values(sides, steps, pages)
        graph = sides["triton"].load([pages_node(sides["triton"], pages)])
        device.wait(device.submit(graph, 1, 1, 1, 0))
        print(f"{'us a call':<14}{'triton':>10}{'flashinfer':>12}{'ratio':>8}{'plan':>8}")
        figures["cases"] = {}
        for case in cases:
            row = {s: time_case(side, steps, *steps_of(case, args.context)) for s, side in sides.items()}
            figures["cases"][case] = row
            a, b = row["triton"]["us"], row["flashinfer"]["us"]
            print(f"{case:<14}{a:>10.2f}{b:>12.2f}{b / a:>8.2f}{row['flashinfer']['plan_us']:>8.2f}", flush=True)
        device.close()
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1))
        if not args.no_model:
            figures["model"] = check_model(args.shape, folder, cache)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
