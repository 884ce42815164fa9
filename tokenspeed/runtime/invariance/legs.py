"""The legs: the circumstances in which the cases run (docs/invariance.md)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tokenspeed.envelope import Envelope
from tokenspeed.runtime.invariance.passes import Bench, Done, Item, Run, run_alone, run_together
from tokenspeed.runtime.invariance.plan import ALONE

CHUNK_SHARES = (1, 2, 3, 4)
"""Of ten cases, how many go to each engine of leg chunks, the one with the smallest steps first."""
_PREEMPTED_SHARES = (0.25, 0.4, 0.6, 0.8)
"""KV pages of leg preempted, of what the cases would like to have at once. Too many, and all find room; too few, and
one that has begun keeps the others waiting: neither pushes anybody back. The first share that does counts."""


@dataclass
class LegRuns:
    """The engines of one leg, and what it lacks to be the circumstance that it stands for."""

    runs: list[Run] = field(default_factory=list)
    problem: str | None = None

    @property
    def steps(self) -> int:
        return sum(run.steps for run in self.runs)

    @property
    def preemptions(self) -> int:
        return sum(run.preemptions for run in self.runs)

    @property
    def cached_tokens(self) -> int:
        return sum(run.cached_tokens for run in self.runs)


Leg: TypeAlias = Callable[[Bench, int, Done], LegRuns]
"""Runs every case once on a bench, with a seed for what is random."""


def alone(bench: Bench, seed: int, done: Done) -> LegRuns:
    run = Run()
    with bench.engine(run) as engine:
        run_alone(engine, bench.items(range(len(bench.cases))), run, done)
    return LegRuns([run])


def packed(bench: Bench, seed: int, done: Done) -> LegRuns:
    rng = random.Random(f"packed {seed}")
    run = Run()
    with bench.engine(run) as engine:
        items = [*bench.items(range(len(bench.cases)), rng), *bench.strangers(rng)]
        run_together(engine, items, run, done, rng)
    return LegRuns([run])


def chunks(bench: Bench, seed: int, done: Done) -> LegRuns:
    rng = random.Random(f"chunks {seed}")
    found = LegRuns()
    for size, numbers in zip(chunk_sizes(bench.envelope.max_prefill_tokens, rng), _dealt(bench, rng), strict=True):
        if not numbers:
            continue
        run = Run()
        found.runs.append(run)
        with bench.engine(run, max_step_tokens=size) as engine:
            run_together(engine, bench.items(numbers, rng), run, done)
    return found


def chunk_sizes(most: int, rng: random.Random) -> list[int]:
    """Tokens of a step: tiny, small, middling, and any."""
    ranges = ((1, 4), (5, 31), (32, 127), (128, most))
    return [min(most, rng.randint(low, max(low, high))) for low, high in ranges]


def _dealt(bench: Bench, rng: random.Random) -> Iterator[list[int]]:
    """The cases, dealt to the engines of leg chunks."""
    numbers = list(range(len(bench.cases)))
    rng.shuffle(numbers)
    total, begin, share = sum(CHUNK_SHARES), 0, 0
    for part in CHUNK_SHARES:
        share += part
        end = -(-len(numbers) * share // total)
        yield sorted(numbers[begin:end])
        begin = end


def preempted(bench: Bench, seed: int, done: Done) -> LegRuns:
    """Half of the cases without the prefix index, which then are computed again from their first token."""
    rng = random.Random(f"preempted {seed}")
    found = LegRuns()
    numbers = list(range(len(bench.cases)))
    rng.shuffle(numbers)
    for prefix_index in (False, True):
        own = numbers[int(prefix_index) :: 2]
        if not own:
            continue
        run = _preempted(bench, bench.items(own, rng), prefix_index, done)
        found.runs.append(run)
        if run.preemptions == 0 and may_preempt(bench.envelope):
            where = "with" if prefix_index else "without"
            found.problem = (
                f"nothing was preempted in the engine {where} a prefix index: the requests are too few, or too short"
                " for pages of this size (ask for more --tokens, or bring more prompts)"
            )
    return found


def may_preempt(envelope: Envelope) -> bool:
    """Whether requests can want one another's pages at all: not if each runs alone, or has one page for good."""
    return envelope.max_num_seqs > 1 and envelope.pages_per_seq > 1


def may_hit(envelope: Envelope) -> bool:
    """Whether a prompt can have a whole page of tokens before its last one, and a token behind it."""
    return envelope.max_model_len > envelope.page_size + 1


def _preempted(bench: Bench, items: Sequence[Item], prefix_index: bool, done: Done) -> Run:
    """In engines with more and more pages, until requests are pushed back."""
    needs = sorted((bench.pages_of(bench.cases[item.case]) for item in items if item.case is not None), reverse=True)
    wanted = sum(needs[: bench.envelope.max_num_seqs])
    sizes = (max(needs[0], min(bench.most_pages, int(share * wanted))) for share in _PREEMPTED_SHARES)
    run = Run()
    for num_pages in dict.fromkeys(sizes):
        run = Run()
        with bench.engine(run, num_pages=num_pages, prefix_index=prefix_index) as engine:
            run_together(engine, items, run, done)
        if run.preemptions:
            break
    return run


def cached(bench: Bench, seed: int, done: Done) -> LegRuns:
    """Each prompt has been computed by a request before."""
    rng = random.Random(f"cached {seed}")
    numbers = list(range(len(bench.cases)))
    rng.shuffle(numbers)
    run = Run()
    with bench.engine(run, prefix_index=True) as engine:
        run_together(engine, _preparing(bench, numbers), Run(), lambda _: None)
        run_together(engine, bench.items(numbers, rng), run, done, rng)
    if run.cached_tokens or not may_hit(bench.envelope):
        return LegRuns([run])
    return LegRuns([run], "nothing was found in the prefix index: the prompts are shorter than a page")


def _preparing(bench: Bench, numbers: Sequence[int]) -> list[Item]:
    cases = {bench.cases[n].prompt: bench.cases[n] for n in numbers}.values()
    return [Item(None, case.ids, replace(case.params(), max_tokens=1)) for case in cases]


RUNNERS: Mapping[str, Leg] = {
    ALONE: alone, "packed": packed, "repeated": packed, "chunks": chunks, "preempted": preempted, "cached": cached,
}  # fmt: skip
"""The legs that run in this process."""
