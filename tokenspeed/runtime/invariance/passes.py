"""Running the cases through engines that share one load."""

from __future__ import annotations

import copy
import queue
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tokenspeed.errors import EngineFailedError
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.invariance.outcomes import Case, Outcome
from tokenspeed.runtime.invariance.recording import Recording, RecordingDevice, StepLayout
from tokenspeed.runtime.loader import Loaded
from tokenspeed.runtime.request import EngineEvent, SamplingParams

STRANGERS = 16
"""Other requests that are packed with the cases."""
ARRIVAL_SHARE = 0.8
"""Of the tokens of a case: so many tokens at most are drawn, by all, between two arrivals."""
SILENCE_SECONDS = 600.0
"""An engine that says nothing for so long hangs."""
Done = Callable[[int], None]
"""Is called with how many more tokens were drawn."""


@dataclass
class Run:
    """What the cases gave in one engine, by number, and what that engine did."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    recording: Recording = field(default_factory=Recording)


@dataclass(frozen=True)
class Item:
    """A request as it is submitted. ``case`` is the number of its case, None for a stranger or a request that only
    prepares."""

    case: int | None
    ids: Sequence[int]
    params: SamplingParams


class Bench:
    """One load, and the engines that take turns on it. ``most_pages``: KV pages that an engine has unless it is said
    otherwise: enough for as many of ``cases`` as may run at once, and a stranger."""

    def __init__(self, loaded: Loaded, cases: Sequence[Case]):
        self.loaded = loaded
        self.envelope = loaded.artifact.manifest.envelope
        self.cases = cases
        self.vocab_size = loaded.artifact.manifest.model.vocab_size
        self._layout = StepLayout(loaded.section, self.envelope.page_size)
        longest = max(map(self.pages_of, cases))
        self._longest_stranger = min(
            self.envelope.max_prefill_tokens, self.envelope.max_model_len - max(case.tokens for case in cases)
        )
        self.most_pages = min(loaded.num_pages, self.envelope.max_num_seqs * longest + self.envelope.pages_per_seq)

    def pages_of(self, case: Case) -> int:
        """KV pages that a case needs."""
        return -(-(len(case.ids) + case.tokens) // self.envelope.page_size)

    @contextmanager
    def engine(
        self, run: Run, *, num_pages: int | None = None, max_step_tokens: int | None = None, prefix_index: bool = False
    ) -> Iterator[Engine]:
        """An engine whose steps and counters go to ``run``."""
        loaded = self.loaded
        executor = copy.copy(loaded.executor)
        buckets = {executor.graph_of(entry.bucket): i for i, entry in enumerate(loaded.section.buckets)}
        device = RecordingDevice(loaded.executor.device, loaded.executor, self._layout, buckets)
        executor.device = device
        own = replace(loaded, executor=executor, num_pages=num_pages or self.most_pages)
        with Engine(
            own, max_waiting=1 << 20, max_step_tokens=max_step_tokens, prefix_index=prefix_index
        ) as engine:  # fmt: skip
            yield engine
            stats = engine.stats()
        run.steps, run.preemptions = stats.steps, stats.preemptions
        run.cached_tokens = stats.scheduler["cached_tokens"]
        run.recording = device.recording

    def items(self, numbers: Sequence[int], rng: random.Random | None = None) -> list[Item]:
        """The cases with these numbers. With ``rng`` one of the two cases of a prompt, at random, asks for its
        log-probabilities, and the other one not: a step has few logit rows, so that only the other is computed in
        large chunks."""
        asks = [True] * len(self.cases)
        if rng is not None:
            first = [bool(rng.getrandbits(1)) for _ in self.cases[::2]]
            asks = [asked for one in first for asked in (one, not one)]
        return [Item(n, self.cases[n].ids, self.cases[n].params(prompt_logprobs=asks[n])) for n in numbers]

    def strangers(self, rng: random.Random) -> list[Item]:
        """Requests that nobody compares, of all kinds; the first of them fills the largest step."""
        longest = max(len(case.ids) for case in self.cases)
        lengths = [self._longest_stranger, *(rng.randint(1, longest) for _ in range(STRANGERS - 1))]
        tokens = max(case.tokens for case in self.cases)
        return [
            Item(
                None,
                rng.choices(range(self.vocab_size), k=length),
                SamplingParams(
                    max_tokens=rng.randint(1, tokens), temperature=rng.choice((0.0, 0.5, 1.0, 2.0)), seed=i,
                    top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 5)), ignore_eos=True,
                    logprobs=rng.choice((None, 0, 5)),
                ),
            )
            for i, length in enumerate(lengths)
        ]  # fmt: skip


def run_alone(engine: Engine, items: Sequence[Item], run: Run, done: Done) -> None:
    """One request after another: each has the engine to itself."""
    for item in items:
        run_together(engine, [item], run, done)


def run_together(
    engine: Engine, items: Sequence[Item], run: Run, done: Done, arrivals: random.Random | None = None
) -> None:
    """All requests: submitted at once, or with ``arrivals`` in random order, half of them at random times while others
    run.

    Raises EngineFailedError if one ends with an error.
    """
    waiting = list(items)
    most = 0
    if arrivals is not None:
        arrivals.shuffle(waiting)
        most = int(ARRIVAL_SHARE * max(item.params.max_tokens or 0 for item in items))
    waiting.reverse()
    events: queue.SimpleQueue[tuple[Item, EngineEvent]] = queue.SimpleQueue()
    outcomes: dict[int, Outcome] = {}
    live = gap = 0
    crowd = len(waiting) // 2

    def submit() -> None:
        nonlocal live
        item = waiting.pop()
        engine.submit(item.ids, item.params, lambda event: events.put((item, event)))
        live += 1

    while waiting or live:
        while waiting and (live == 0 or gap <= 0):
            submit()
            gap = arrivals.randint(0, most) if arrivals is not None and len(waiting) < crowd else 0
        item, event = _next_event(events)
        gap -= len(event.token_ids)
        if event.error is not None:
            raise EngineFailedError(f"a request of the harness failed: {event.error}")
        live -= event.finish_reason is not None
        if item.case is not None:
            if item.case not in outcomes:
                outcomes[item.case] = Outcome(prompt=None if item.params.prompt_logprobs is None else [])
            outcomes[item.case].feed(event)
            done(len(event.token_ids))
    run.outcomes |= outcomes


def _next_event(events: queue.SimpleQueue[tuple[Item, EngineEvent]]) -> tuple[Item, EngineEvent]:
    try:
        return events.get(timeout=SILENCE_SECONDS)
    except queue.Empty:
        raise EngineFailedError(f"the engine has said nothing for {SILENCE_SECONDS:.0f} s") from None
