"""Drive randomized steps over all that an artifact promises, and see that nothing is compiled, loaded, captured,
instantiated or allocated meanwhile: every bucket, every kind of sampling, one row and all rows, long contexts.

Steps are made here, not by the scheduler, and run by the engine's own executor one at a time, from KV pages that hold
nothing yet. Sequences read their earlier positions from a few pages that all share, over and over in a long context;
what a step writes goes to pages of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count

from tokenspeed.bucket import Bucket, BucketKind
from tokenspeed.errors import ResourceError, UsageError
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.guard import percentiles
from tokenspeed.runtime.steps import MadeStep, Sampling, SequencePart
from tokenspeed.step import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS

STEPS_PER_BUCKET = 24
P99_STEPS = 100
"""Steps from which on the 99th percentile is another than the maximum."""
SHARED_PAGES = 8
USUAL_CONTEXT = 2048
"""Most positions before a step's own, of all sequences but those of steps with a long context."""
TRIES = 40

VARIANTS: dict[str, Sampling] = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "top-k": Sampling(temperature=1.0, top_k=40),
    "top-p": Sampling(temperature=1.0, top_p=0.9),
    "min-p": Sampling(temperature=1.0, min_p=0.05),
    "all filters": Sampling(temperature=1.2, top_k=50, top_p=0.95, min_p=0.02),
    "logprobs": Sampling(temperature=0.7, num_logprobs=0),
    "top logprobs": Sampling(temperature=0.0, num_logprobs=MAX_TOP_LOGPROBS),
    "biases": Sampling(temperature=0.8, num_biases=8),
    "allowed tokens": Sampling(temperature=0.8, mask=0x55555555),
    "penalties": Sampling(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2),
    "all adjustments": Sampling(
        temperature=0.8, top_p=0.95, num_logprobs=2, repetition_penalty=1.1, num_biases=MAX_LOGIT_BIAS, mask=0x55555555
    ),
}
MIXED_ROWS = "rows mixed"
"""One more variant: every row draws in its own way."""
SHAPES = ("full", "least", "any", "any", "one row", "all rows", "long")
"""How a step fills its bucket: as far as it goes, as little as makes it that bucket's, at random; in mixed buckets with
one logit row or with all; and with one sequence of max_model_len."""


@dataclass(frozen=True)
class StepFigures:
    """One step: what it was, and its seconds, from giving it to the device until its outputs are on the host."""

    shape: str
    variant: str
    num_tokens: int
    num_seqs: int
    num_logit_rows: int
    seconds: float
    host_seconds: float


@dataclass(frozen=True)
class BucketFigures:
    """Seconds of a bucket's steps: on the device's clock, where it has one, so that what the host was kept from is not
    the step's; ``longest_wait`` is the most that the host saw one take. Steps of shape 'long' count in
    ``longest_context`` and ``by_shape`` alone: what they cost is attention. ``p99`` is None below P99_STEPS;
    ``slowest`` took ``max``; ``by_shape`` and ``by_variant`` are medians."""

    bucket: Bucket
    steps: int
    p50: float
    p99: float | None
    max: float
    longest_wait: float
    longest_context: float
    slowest: StepFigures
    by_shape: dict[str, float]
    by_variant: dict[str, float]

    @property
    def max_over_median(self) -> float:
        return self.max / self.p50 if self.p50 else 0.0


@dataclass(frozen=True)
class SweepReport:
    """``after_ready`` counts what happened during the sweep and must not: see ``guard.AFTER_READY``. ``clock`` is whose
    seconds the buckets have: 'device' or 'host'."""

    buckets: tuple[BucketFigures, ...]
    variants: dict[str, int]
    shapes: dict[str, int]
    steps: int
    seconds: float
    after_ready: dict[str, int]
    bad_tokens: int
    clock: str

    @property
    def closed(self) -> bool:
        """Whether the runtime kept its promise."""
        return not any(self.after_ready.values())


def sweep(
    engine: Engine,
    *,
    steps_per_bucket: int = STEPS_PER_BUCKET,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> SweepReport:
    """Run ``steps_per_bucket`` steps of each bucket, in rounds of one each, or rounds for ``seconds`` seconds. The
    engine must be idle and stays so.

    Raises UsageError for fewer steps than 1; DeviceError when a step fails.
    """
    if steps_per_bucket < 1 or (seconds is not None and not seconds > 0):
        raise UsageError("a sweep needs at least one step per bucket, and a time above 0")
    maker = _Maker(engine, random.Random(seed))
    runs: dict[Bucket, list[StepFigures]] = {bucket: [] for bucket in maker.buckets}
    bad = 0
    before = engine.stats().after_ready
    began = time.perf_counter()
    clock = "host" if _run(engine, maker.fill_shared_pages())[0] is None else "device"
    for number in count():
        if number >= steps_per_bucket if seconds is None else time.perf_counter() - began > seconds:
            break
        progress(f"round {number + 1}: {len(runs)} buckets")
        for place, bucket in enumerate(maker.buckets):
            # Counted on from bucket to bucket, so that even one round meets every shape and variant somewhere.
            shape, variant = SHAPES[(number + place) % len(SHAPES)], maker.variant(number + place)
            shape, step = maker.step(bucket, shape, variant)
            on_device, taken, tokens = _run(engine, step)
            sizes = step.num_tokens, step.num_seqs, step.num_logit_rows
            runs[bucket].append(StepFigures(shape, variant, *sizes, taken if on_device is None else on_device, taken))
            bad += sum(not 0 <= token < engine.info.vocab_size for token in tokens)
    after = engine.stats().after_ready
    every = [step for steps in runs.values() for step in steps]
    return SweepReport(
        buckets=tuple(_figures(bucket, taken) for bucket, taken in runs.items()),
        variants=dict(Counter(step.variant for step in every)),
        shapes=dict(Counter(step.shape for step in every)),
        steps=len(every),
        seconds=time.perf_counter() - began,
        after_ready={name: after[name] - before[name] for name in after},
        bad_tokens=bad,
        clock=clock,
    )


def _run(engine: Engine, step: MadeStep) -> tuple[float | None, float, list[int]]:
    """Seconds of the step by the device (None: it has no clock), and by the host; and the tokens that it gave."""
    executor = engine.loaded.executor
    executor.place(step)
    began = time.perf_counter()
    outputs = executor.wait(executor.submit(step))
    taken = time.perf_counter() - began
    on_device = executor.seconds_on_device() if engine.loaded.times_steps else None
    return on_device, taken, outputs.tokens.tolist()


def _figures(bucket: Bucket, steps: list[StepFigures]) -> BucketFigures:
    usual = [step for step in steps if step.shape != "long"] or steps
    times = percentiles([step.seconds for step in usual])
    return BucketFigures(
        bucket,
        len(steps),
        times["p50"],
        times["p99"] if len(usual) >= P99_STEPS else None,
        times["max"],
        max(step.host_seconds for step in usual),
        max((step.seconds for step in steps if step.shape == "long"), default=0.0),
        max(usual, key=lambda step: step.seconds),
        _medians((step.shape, step.seconds) for step in steps),
        _medians((step.variant, step.seconds) for step in usual),
    )


def _medians(samples: Iterable[tuple[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for name, seconds in samples:
        by_name.setdefault(name, []).append(seconds)
    return {name: statistics.median(times) for name, times in sorted(by_name.items())}


class _Maker:
    """Makes steps of one engine's artifact at random."""

    def __init__(self, engine: Engine, rng: random.Random):
        envelope = engine.loaded.artifact.manifest.envelope
        self._executor = engine.loaded.executor
        self._rng = rng
        self._ids = count(1)
        self._page_size, self._pages_per_seq = envelope.page_size, envelope.pages_per_seq
        self._max_model_len, self._max_num_seqs = envelope.max_model_len, envelope.max_num_seqs
        self._vocab_size = engine.info.vocab_size
        self._variants = {n: v for n, v in VARIANTS.items() if engine.info.penalties or not v.penalized}
        self.buckets = sorted(entry.bucket for entry in engine.loaded.section.buckets)
        pages = list(range(engine.loaded.num_pages))
        rng.shuffle(pages)
        num_shared = max(1, min(SHARED_PAGES, len(pages) // 4, envelope.max_prefill_tokens // envelope.page_size))
        self._shared, self._own = pages[:num_shared], pages[num_shared:]

    def variant(self, number: int) -> str:
        return (*self._variants, MIXED_ROWS)[number % (len(self._variants) + 1)]

    def fill_shared_pages(self) -> MadeStep:
        """One prompt that writes what later steps read."""
        tokens = min(len(self._shared) * self._page_size, self._max_model_len - 1, self.buckets[-1].num_tokens)
        self._shared = self._shared[: max(1, tokens // self._page_size)]
        part = SequencePart(self._tokens(tokens), 0, self._shared, slot=0, sampling=Sampling())
        return self._made([part])

    def step(self, bucket: Bucket, shape: str, variant: str) -> tuple[str, MadeStep]:
        """A step that the executor runs in ``bucket``, and its shape: 'full' where chance finds none of ``shape``.

        Raises ResourceError when there are too few KV pages for one.
        """
        for tried in (shape, "full"):
            for _ in range(TRIES):
                step = self._attempt(bucket, tried, variant)
                if step is not None and self._executor.bucket_for(step) == bucket:
                    return tried, step
        raise ResourceError(
            f"the {len(self._shared) + len(self._own)} KV pages are too few for a step of bucket {bucket}",
            hint="raise --kv-gib",
        )

    def _attempt(self, bucket: Bucket, shape: str, variant: str) -> MadeStep | None:
        tokens, seqs, rows = self._sizes(bucket, shape)
        lengths = [1] * seqs if bucket.kind is BucketKind.DECODE else self._lengths(tokens, seqs, shape)
        if sum(-(-n // self._page_size) for n in lengths) > len(self._own):
            return None
        slots = self._rng.sample(range(self._max_num_seqs), seqs)
        own = iter(self._own)
        parts = []
        for i, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            most = self._max_model_len - length
            before = most if shape == "long" and i == 0 else self._rng.randint(0, min(most, USUAL_CONTEXT))
            before -= before % self._page_size  # so that no shared page is written
            pages = [self._shared[p % len(self._shared)] for p in range(before // self._page_size)]
            pages += [next(own) for _ in range(-(-length // self._page_size))]
            decodes = bucket.kind is BucketKind.DECODE or (length == 1 and before > 0 and self._rng.random() < 0.5)
            ids: list[int | None] = [None] if decodes else [*self._tokens(length)]
            parts.append(SequencePart(ids, before, pages, slot, seed=self._rng.getrandbits(64)))
        self._ask(parts, rows, variant)
        return self._made(parts)

    def _sizes(self, bucket: Bucket, shape: str) -> tuple[int, int, int]:
        """Tokens, sequences and logit rows of a step of ``shape``."""
        smaller = [b.num_tokens for b in self.buckets if b.kind is bucket.kind and b.num_tokens < bucket.num_tokens]
        least = 1 + max(smaller, default=0)
        tokens = {"full": bucket.num_tokens, "all rows": bucket.num_tokens, "least": least}.get(
            shape, self._rng.randint(least, bucket.num_tokens)
        )
        if bucket.kind is BucketKind.DECODE:
            return tokens, tokens, tokens
        # Were every token a sequence that draws, it would be a step of decodes.
        least_seqs = -(-tokens // (self._max_model_len - 1))
        most_seqs = max(least_seqs, min(bucket.num_seqs, tokens - 1, self._max_num_seqs))
        seqs = {"full": most_seqs, "one row": least_seqs}.get(shape, self._rng.randint(least_seqs, most_seqs))
        least_rows = seqs - 1  # all draw but one, whose prompt goes on
        most_rows = max(least_rows, min(bucket.num_logit_rows, tokens - (tokens == seqs)))
        rows = {"one row": max(1, least_rows), "full": most_rows, "all rows": most_rows}.get(
            shape, self._rng.randint(least_rows, most_rows)
        )
        return tokens, seqs, min(rows, most_rows)

    def _lengths(self, tokens: int, seqs: int, shape: str) -> list[int]:
        """Tokens of each sequence, at least one, ``tokens`` in all: some decodes beside chunks, or even chunks."""
        most = self._max_model_len - 1
        if self._rng.random() < 0.5 and seqs > 1 and tokens - (seqs - 1) <= most:
            lengths = [1] * (seqs - 1) + [tokens - (seqs - 1)]  # decodes, and one prompt
        else:
            cuts = sorted(self._rng.sample(range(1, tokens), seqs - 1))
            lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
        while max(lengths) > most:  # a prompt is shorter than max_model_len; there is room for the rest elsewhere
            over = max(lengths) - most
            longest, shortest = lengths.index(max(lengths)), lengths.index(min(lengths))
            moved = min(over, most - lengths[shortest])
            lengths[longest] -= moved
            lengths[shortest] += moved
        return lengths

    def _ask(self, parts: list[SequencePart], rows: int, variant: str) -> None:
        """Give out ``rows`` logit rows: to draws first, then to tokens of prompts."""
        for part in parts[:rows]:
            part.sampling = self._sampling(variant)
        left = rows - min(rows, len(parts))
        for part in parts:
            asked = min(left, len(part.tokens) - 1)
            part.prompt_rows = range(asked)
            left -= asked

    def _sampling(self, variant: str) -> Sampling:
        if variant != MIXED_ROWS:
            return self._variants[variant]
        drawn = self._rng.choice(list(self._variants.values()))
        return replace(drawn, num_logprobs=self._rng.randint(-1, MAX_TOP_LOGPROBS))

    def _tokens(self, number: int) -> list[int]:
        return self._rng.choices(range(self._vocab_size), k=number)

    def _made(self, parts: list[SequencePart]) -> MadeStep:
        return MadeStep(next(self._ids), parts, self._page_size, self._pages_per_seq, self._vocab_size)
