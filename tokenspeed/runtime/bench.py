"""Measure an artifact where it runs, against this machine's ceilings measured in the same run.

Decode: n sequences, each drawing tokens greedily; tokens per second from the first token of the last sequence
to the last token of the first. Prefill: one prompt, tokens per second until its first token. Rounds repeat every
case in turn, so that a slow minute of a shared machine falls on all of them; figures are medians over rounds.
"""

from __future__ import annotations

import random
import resource
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenspeed import _native
from tokenspeed.errors import UsageError
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.guard import StepParts
from tokenspeed.runtime.request import EngineEvent, SamplingParams
from tokenspeed.runtime.steps import MadeStep, Sampling, SequencePart
from tokenspeed.target import Target

DECODE_PROMPT_TOKENS = 64
DECODE_NEW_TOKENS = 64
BARE_STEPS = DECODE_NEW_TOKENS
CEILING_BYTES = 256 << 20
CEILING_RUNS = 5


@dataclass(frozen=True)
class Case:
    """``kind`` 'decode' with ``size`` sequences, or 'prefill' with ``size`` tokens."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"


CPU_CASES = (Case("decode", 1), Case("decode", 8), Case("decode", 32), Case("prefill", 512), Case("prefill", 2048))
GPU_CASES = (*CPU_CASES[:3], Case("decode", 64), Case("decode", 128), Case("decode", 256), *CPU_CASES[3:],
             Case("prefill", 8192))  # fmt: skip


@dataclass(frozen=True)
class Ceilings:
    """What the device can do at most: bytes/s read, and FLOP/s. On a CPU of its best matrix instruction, with the
    engine's threads; on a GPU of the artifact's own kernel for large products. None where nothing measures it: a GPU
    runs what its artifact brings, and small models bring no kernels for this."""

    read_bandwidth: float | None
    matmul: float | None


@dataclass(frozen=True)
class Figure:
    """One case: tokens/s (median, and all rounds), and the shares of the ceilings that it reaches (None without a
    ceiling): of the read bandwidth with weights, and in decodes the KV of all positions so far. Medians over all steps
    with every sequence of the case, of decodes alone:

    - ``step_seconds``: the time of a step;
    - ``bare_step_seconds``: that of a step when the host only starts prepared ones, so that the difference is what the
      device waits for the host;
    - ``host_seconds``: what the host spends to plan, submit and commit one, and ``host_parts``, each of these;
    - ``graph_seconds``, ``idle_seconds``: by a GPU's own clock, the step's graph, and the time from the end of the
      graph before it to its start: copies of outputs and inputs, and waiting.
    """

    case: Case
    tokens_per_second: float
    rounds: tuple[float, ...]
    share_of_read_bandwidth: float | None
    share_of_matmul: float | None
    step_seconds: float | None
    bare_step_seconds: float | None
    host_seconds: float | None
    host_parts: dict[str, float] | None
    graph_seconds: float | None
    idle_seconds: float | None


def default_cases(engine: Engine) -> tuple[Case, ...]:
    """What is measured unless asked otherwise; those beyond the envelope are left out later."""
    return GPU_CASES if Target.parse(engine.info.target).is_gpu else CPU_CASES


def measure_ceilings(engine: Engine) -> Ceilings:
    """Measured now; on a CPU with as many threads as the engine uses."""
    if Target.parse(engine.info.target).is_gpu:
        return Ceilings(_gpu_rate(engine, "read"), _gpu_rate(engine, "matmul"))
    threads = engine.info.threads
    return Ceilings(
        _native.measure_read_bandwidth(threads, CEILING_BYTES), _native.measure_matmul(engine.info.dtype, threads)
    )


def _gpu_rate(engine: Engine, kind: str) -> float | None:
    """Work per second of a ceiling's graph: the median of its launches but the first, which waits for the host."""
    ceiling = engine.loaded.ceilings.get(kind)
    if ceiling is None:
        return None
    executor = engine.loaded.executor
    times = [executor.time_graph(ceiling.graph, ceiling.num_tokens)[1:] for _ in range(CEILING_RUNS)]
    return ceiling.work / statistics.median(seconds for run in times for seconds in run)


def measure(
    engine: Engine,
    cases: Sequence[Case] | None = None,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Figure], Ceilings]:
    """Run ``cases`` for ``rounds`` rounds. Returns a figure per case and the median ceilings.

    On a GPU the engine must have been loaded to be measured (``LoadOptions.measure``).
    Ceilings are measured right before every case, and each run counts against its own: a shared machine's memory may
    be twice as fast a minute later. Cases beyond the envelope (more sequences or tokens than it promises) are left out.
    """
    fitting = [case for case in (default_cases(engine) if cases is None else cases) if _fits(engine, case)]
    runs: dict[Case, list[_Run]] = {case: [] for case in fitting}
    for number in range(rounds):
        for case in fitting:
            progress(f"round {number + 1} of {rounds}: {case}")
            ceilings = measure_ceilings(engine)
            engine.host_times.steps.clear()
            _device_times(engine, case)
            speed = run_case(engine, case, seed=number)
            if case.kind == "decode":
                host = [parts for seqs, parts in list(engine.host_times.steps) if seqs == case.size]
                device = _device_times(engine, case)
                bare = bare_step_seconds(engine, case.size)
                runs[case].append(_Run(speed, ceilings, host, device, bare))
            else:
                runs[case].append(_Run(speed, ceilings))
    every = [run.ceilings for case in fitting for run in runs[case]]
    typical = Ceilings(_median([c.read_bandwidth for c in every]), _median([c.matmul for c in every]))
    return [_figure(engine, case, runs[case]) for case in fitting], typical


def profile(engine: Engine, case: Case) -> list[tuple[str, float]]:
    """Seconds of every node of one step of ``case``, in order. The engine must be idle.

    A scheduler of its own plans the step; a decode case first prefills its sequences. The step runs once before it
    is timed, so that the operating system has handed out the KV pages it writes.
    """
    if not _fits(engine, case):
        raise UsageError(f"{case} is beyond what the artifact was built for")
    decode, executor = case.kind == "decode", engine.loaded.executor
    scheduler = engine.new_scheduler()
    for i in range(case.size if decode else 1):
        prompt = _prompt(engine, DECODE_PROMPT_TOKENS if decode else case.size, f"profile {case} {i}")
        greedy = _native.RequestParams(max_new_tokens=2, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
        scheduler.submit(i, prompt, greedy)
    while (step := scheduler.next_step()) is not None:
        outputs = executor.wait(executor.submit(step))
        if not decode or step.num_tokens == step.num_seqs == case.size:
            return executor.profile(step)
        scheduler.commit(step.id, outputs.tokens)
    raise AssertionError("the scheduler planned no such step")


def bare_step_seconds(engine: Engine, sequences: int) -> float:
    """Seconds of a decode step when the host does nothing but start steps prepared beforehand, as many in flight as the
    device takes. The engine must be idle."""
    executor, envelope = engine.loaded.executor, engine.loaded.artifact.manifest.envelope
    page_size = envelope.page_size
    position = DECODE_PROMPT_TOKENS + DECODE_NEW_TOKENS // 2
    each = min(position // page_size + 1, engine.loaded.num_pages // sequences)
    position = min(position, each * page_size - 1)
    parts = [
        SequencePart([None], position, range(i * each, (i + 1) * each), slot=i, sampling=Sampling())
        for i in range(sequences)
    ]
    shape = (page_size, envelope.pages_per_seq, engine.info.vocab_size)
    prepared = [MadeStep(i, parts, *shape) for i in range(executor.io_sets)]
    for made in prepared:
        executor.place(made)
    in_flight = deque(executor.submit(step) for step in prepared)
    began = time.perf_counter()
    for number in range(BARE_STEPS):
        executor.wait(in_flight.popleft())
        in_flight.append(executor.submit(prepared[number % executor.io_sets]))
    seconds = (time.perf_counter() - began) / BARE_STEPS
    for step in in_flight:
        executor.wait(step)
    return seconds


def _device_times(engine: Engine, case: Case) -> list[tuple[float, float | None]]:
    """(seconds of its graph, idle seconds before it) of each decode step of all sequences since the last call: by a
    GPU, which times its steps when it was loaded to be measured."""
    if not Target.parse(engine.info.target).is_gpu:
        return []
    times = engine.loaded.executor.device.step_times()
    return [(seconds, idle) for _, tokens, seqs, seconds, idle in times if tokens == seqs == case.size]


def peak_memory_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _fits(engine: Engine, case: Case) -> bool:
    info = engine.info
    if case.kind == "decode":
        return case.size <= info.max_num_seqs and info.max_model_len >= DECODE_PROMPT_TOKENS + DECODE_NEW_TOKENS
    return case.size < info.max_model_len


@dataclass(frozen=True)
class _Run:
    tokens_per_second: float
    ceilings: Ceilings
    host: Sequence[StepParts] = ()
    device: Sequence[tuple[float, float | None]] = ()
    bare_step_seconds: float | None = None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _figure(engine: Engine, case: Case, runs: list[_Run]) -> Figure:
    cost = engine.loaded.section.cost
    decode = case.kind == "decode"
    flops_per_token = cost.flops_per_token + cost.flops_per_logit_row / (1 if decode else case.size)
    bytes_per_token = cost.weight_bytes / case.size + (_kv_bytes(engine) if decode else 0)
    speed = statistics.median(run.tokens_per_second for run in runs)

    def share(work_per_token: float, ceilings: list[float | None]) -> float | None:
        return _median(
            [
                ceiling and run.tokens_per_second * work_per_token / ceiling
                for run, ceiling in zip(runs, ceilings, strict=True)
            ]
        )

    return Figure(
        case,
        speed,
        tuple(run.tokens_per_second for run in runs),
        share(bytes_per_token, [run.ceilings.read_bandwidth for run in runs]),
        share(flops_per_token, [run.ceilings.matmul for run in runs]),
        case.size / speed if decode else None,
        _median(run.bare_step_seconds for run in runs),
        _median(sum(parts) for run in runs for parts in run.host),
        _host_parts([parts for run in runs for parts in run.host]),
        _median(seconds for run in runs for seconds, _ in run.device),
        _median(idle for run in runs for _, idle in run.device),
    )


def _kv_bytes(engine: Engine) -> float:
    """Bytes of keys and values that a decode of a case reads, halfway through it."""
    page_size = engine.loaded.artifact.manifest.envelope.page_size
    return (DECODE_PROMPT_TOKENS + DECODE_NEW_TOKENS / 2) * engine.loaded.section.kv_page_bytes / page_size


def _host_parts(steps: Sequence[StepParts]) -> dict[str, float] | None:
    if not steps:
        return None
    columns = zip(*steps, strict=True)
    return {name: statistics.median(column) for name, column in zip(StepParts._fields, columns, strict=True)}


def run_case(engine: Engine, case: Case, seed: int) -> float:
    """Tokens per second of one run of ``case``; ``seed`` picks the prompts."""
    if case.kind == "decode":
        return _decode_speed(engine, case.size, seed)
    return _prefill_speed(engine, case.size, seed)


class _Watch:
    """Counts the tokens of one request and notes when they came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = threading.Event()

    def __call__(self, event: EngineEvent) -> None:
        if event.token_ids:
            self.times.append(time.perf_counter())
        if event.finish_reason is not None:
            self.done.set()


def _decode_speed(engine: Engine, sequences: int, seed: int) -> float:
    """Tokens per second while all sequences draw. Where one has ended before the last one began, a device is too fast
    for so few tokens, and more are drawn."""
    most = engine.info.max_model_len - DECODE_PROMPT_TOKENS
    new_tokens = min(DECODE_NEW_TOKENS, most)
    while True:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        watches = [_Watch() for _ in range(sequences)]
        for i, watch in enumerate(watches):
            engine.submit(_prompt(engine, DECODE_PROMPT_TOKENS, f"decode {sequences} {seed} {i}"), params, watch)
        for watch in watches:
            watch.done.wait()
        start = max(watch.times[0] for watch in watches)
        end = min(watch.times[-1] for watch in watches)
        tokens = sum(sum(start < t <= end for t in watch.times) for watch in watches)
        if tokens:
            return tokens / (end - start)
        if new_tokens == most:
            raise UsageError(f"{sequences} sequences of {most} tokens never draw at the same time: nothing to measure")
        new_tokens = min(2 * new_tokens, most)


def _prefill_speed(engine: Engine, tokens: int, seed: int) -> float:
    watch = _Watch()
    started = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.submit(_prompt(engine, tokens, f"prefill {tokens} {seed}"), params, watch)
    watch.done.wait()
    return tokens / (watch.times[0] - started)


def _prompt(engine: Engine, tokens: int, seed: str) -> list[int]:
    """Random tokens. Seeds differ by case, round and sequence, so that no prompt begins like another one."""
    return random.Random(seed).choices(range(engine.info.vocab_size), k=tokens)
