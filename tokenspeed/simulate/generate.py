"""Made-up traffic of four kinds, the same for the same seed: agentic, chat, rl-rollout, batch.

A kind is a record of parameters, each with its meaning, and a stream of requests in order of arrival. Conversations
keep their blocks: what a turn adds, asked or answered, lies in blocks that the next turn begins with.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count, islice
from typing import Any, ClassVar

from tokenspeed.errors import UsageError
from tokenspeed.simulate.trace import BLOCK_TOKENS, MOST_TOKENS, TraceRequest


class Draw:
    """Random numbers from ``random.Random.random`` alone, whose sequence no version of Python changes."""

    def __init__(self, seed: int):
        self._uniform = random.Random(seed).random

    def below(self, number: int) -> int:
        return int(self._uniform() * number)

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._uniform())

    def lognormal(self, median: float, spread: float) -> float:
        """``spread`` is the standard deviation of the logarithm: 0 is no spread, 1 a heavy tail."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self._uniform()))
        return median * math.exp(spread * radius * math.cos(2.0 * math.pi * self._uniform()))

    def tokens(self, median: float, spread: float, most: int) -> int:
        return max(1, min(most, round(self.lognormal(median, spread))))

    def turns(self, mean: float) -> int:
        """1 or more, geometric: after every turn the conversation goes on with the same chance."""
        if mean <= 1.0:
            return 1
        return 1 + int(math.log(1.0 - self._uniform()) / math.log(1.0 - 1.0 / mean))

    def zipf(self, number: int) -> int:
        """0 to number - 1; k is 1 / (k + 1) times as likely as 0."""
        if number == 1:
            return 0
        left = self._uniform() * sum(1.0 / (k + 1) for k in range(number))
        for k in range(number - 1):
            left -= 1.0 / (k + 1)
            if left < 0:
                return k
        return number - 1


class Stream:
    """The tokens of one conversation as blocks: ``shared`` ones that others begin with as well, then its own."""

    def __init__(self, ids: Iterator[int], shared: tuple[int, ...], num_tokens: int, block_tokens: int):
        """``num_tokens`` so far; ``shared`` are the whole blocks among them."""
        self._ids, self._block_tokens = ids, block_tokens
        self.blocks, self.num_tokens = [*shared], 0
        self.extend(num_tokens)

    def extend(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        missing = -(-self.num_tokens // self._block_tokens) - len(self.blocks)
        self.blocks.extend(islice(self._ids, max(0, missing)))


def _parameter(default: float, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Traffic:
    """One kind of traffic; a field per parameter. ``rate`` is requests a second on average."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def requests(self, draw: Draw, rate: float, block_tokens: int) -> Iterator[TraceRequest]:
        """Requests in order of arrival, without end."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Talk(Traffic):
    """Conversations of many turns. They begin at random and go on by themselves; each turn waits for the one before."""

    turns: float = _parameter(1.0, "turns of a conversation, on average")
    system_tokens: int = _parameter(1, "tokens of a system prompt")
    system_prompts: int = _parameter(1, "how many different ones; some are used more than others")
    first_tokens: int = _parameter(1, "median tokens of the first message")
    message_tokens: int = _parameter(1, "median tokens of each later message (a tool's result, a question)")
    message_spread: float = _parameter(0.0, "their spread: standard deviation of the logarithm")
    output_tokens: int = _parameter(1, "median tokens of an answer")
    output_spread: float = _parameter(0.0, "their spread")
    gap_ms: float = _parameter(0.0, "median time from the end of an answer to the next message")
    gap_spread: float = _parameter(0.0, "its spread")
    max_tokens: int = _parameter(131072, "a conversation ends before it is longer than this")
    nominal_ms_per_token: float = _parameter(2.0, "what timestamps take an answer to last: a lower bound, as each turn "
                                                  "also waits for the end of the one before")  # fmt: skip
    tenants: int = _parameter(1, "how many tenants; some ask more than others")
    deadline_ms: float = _parameter(0.0, "deadline of each request; 0: none")

    def requests(self, draw: Draw, rate: float, block_tokens: int) -> Iterator[TraceRequest]:
        ids, numbers = count(), count()
        systems = [tuple(islice(ids, self.system_tokens // block_tokens)) for _ in range(self.system_prompts)]
        next_start = 0.0
        going: list[tuple[float, int, _Conversation]] = []  # by time of the next turn, then by age
        while True:
            if not going or next_start <= going[0][0]:
                number = next(numbers)
                shared = systems[draw.zipf(self.system_prompts)]
                first = self.system_tokens + draw.tokens(self.first_tokens, self.message_spread, self.max_tokens)
                talk = _Conversation(
                    Stream(ids, shared, min(first, self.max_tokens - 1), block_tokens),
                    f"s{number}",
                    f"t{draw.zipf(self.tenants)}" if self.tenants > 1 else "",
                    draw.turns(self.turns),
                )
                heapq.heappush(going, (next_start, number, talk))
                next_start += draw.exponential(1e3 * self.turns / rate)
            at, number, talk = heapq.heappop(going)
            request = self._turn(draw, talk, at)
            yield request
            if talk.turns_left:
                gap = draw.lognormal(self.gap_ms, self.gap_spread)
                talk.delay = round(gap, 3)
                served = request.output_length * self.nominal_ms_per_token
                heapq.heappush(going, (at + served + talk.delay, number, talk))

    def _turn(self, draw: Draw, talk: _Conversation, at: float) -> TraceRequest:
        stream = talk.stream
        num_input, asked = stream.num_tokens, tuple(stream.blocks)
        num_output = draw.tokens(self.output_tokens, self.output_spread, self.max_tokens - num_input)
        stream.extend(num_output)
        answered = tuple(stream.blocks[len(asked) :])
        message = draw.tokens(self.message_tokens, self.message_spread, self.max_tokens)
        talk.turns_left -= 1
        if stream.num_tokens + message >= self.max_tokens:
            talk.turns_left = 0
        else:
            stream.extend(message)
        return TraceRequest(
            round(at, 3), num_input, num_output, asked, answered if talk.turns_left else (),
            tenant=talk.tenant, deadline=self.deadline_ms or None, session=talk.session, delay=talk.delay,
        )  # fmt: skip


@dataclass
class _Conversation:
    stream: Stream
    session: str
    tenant: str
    turns_left: int
    delay: float | None = None


@dataclass(frozen=True)
class Agentic(_Talk):
    name = "agentic"
    summary = "agents: a long shared system prompt, many turns of tool calls, a context that grows, short answers"

    turns: float = _parameter(12.0, "turns of a session, on average (geometric)")
    system_tokens: int = _parameter(4096, "tokens of a system prompt, tools included")
    system_prompts: int = _parameter(4, "how many different agents; some are used more than others")
    first_tokens: int = _parameter(400, "median tokens of the task")
    message_tokens: int = _parameter(600, "median tokens of a tool's result")
    message_spread: float = _parameter(1.0, "spread of tasks and results: standard deviation of the logarithm")
    output_tokens: int = _parameter(120, "median tokens of an answer")
    output_spread: float = _parameter(0.8, "its spread")
    gap_ms: float = _parameter(1500.0, "median time of a tool call, between an answer and the next turn")
    gap_spread: float = _parameter(1.2, "its spread")


@dataclass(frozen=True)
class Chat(_Talk):
    name = "chat"
    summary = "people: short questions, longer answers, a few turns, half a minute to read and to type"

    turns: float = _parameter(3.5, "turns of a conversation, on average (geometric)")
    system_tokens: int = _parameter(512, "tokens of a system prompt")
    system_prompts: int = _parameter(8, "how many different ones; some are used more than others")
    first_tokens: int = _parameter(150, "median tokens of the first question")
    message_tokens: int = _parameter(60, "median tokens of each later one")
    message_spread: float = _parameter(1.2, "spread of questions: standard deviation of the logarithm")
    output_tokens: int = _parameter(250, "median tokens of an answer")
    output_spread: float = _parameter(0.9, "its spread")
    gap_ms: float = _parameter(25000.0, "median time from an answer to the next question")
    gap_spread: float = _parameter(0.8, "its spread")
    max_tokens: int = _parameter(32768, "a conversation ends before it is longer than this")


@dataclass(frozen=True)
class Rollout(Traffic):
    name = "rl-rollout"
    summary = "RL rollouts: bursts of prompts, each sampled many times, with long answers of a heavy tail"

    samples: int = _parameter(16, "answers drawn to each prompt, all at once")
    prompts: int = _parameter(32, "prompts of a burst; samples * prompts / rate seconds lie between two bursts")
    system_tokens: int = _parameter(512, "tokens that all prompts begin with")
    prompt_tokens: int = _parameter(300, "median tokens of a prompt behind those")
    prompt_spread: float = _parameter(0.6, "their spread: standard deviation of the logarithm")
    output_tokens: int = _parameter(1200, "median tokens of an answer")
    output_spread: float = _parameter(1.0, "their spread: the longest of a thousand is twenty times the median")
    max_output: int = _parameter(16384, "the longest answer")
    epochs: int = _parameter(1, "how many bursts in a row ask the same prompts")

    def requests(self, draw: Draw, rate: float, block_tokens: int) -> Iterator[TraceRequest]:
        ids = count()
        shared = tuple(islice(ids, self.system_tokens // block_tokens))
        asked: list[Stream] = []
        for burst in count():
            if burst % self.epochs == 0:
                asked = [
                    Stream(ids, shared, self.system_tokens + self._prompt(draw), block_tokens)
                    for _ in range(self.prompts)
                ]
            at = round(1e3 * burst * self.samples * self.prompts / rate, 3)
            for stream in asked:
                for _ in range(self.samples):
                    num_output = draw.tokens(self.output_tokens, self.output_spread, self.max_output)
                    yield TraceRequest(at, stream.num_tokens, num_output, tuple(stream.blocks))

    def _prompt(self, draw: Draw) -> int:
        return draw.tokens(self.prompt_tokens, self.prompt_spread, 64 * self.prompt_tokens)


@dataclass(frozen=True)
class Batch(Traffic):
    name = "batch"
    summary = "offline work: everything arrives at once, and shares the instructions"

    instruction_tokens: int = _parameter(1024, "tokens that all prompts begin with")
    document_tokens: int = _parameter(2500, "median tokens of a prompt behind those")
    document_spread: float = _parameter(0.9, "their spread: standard deviation of the logarithm")
    output_tokens: int = _parameter(180, "median tokens of an answer")
    output_spread: float = _parameter(0.7, "its spread")
    max_tokens: int = _parameter(32768, "the longest prompt")

    def requests(self, draw: Draw, rate: float, block_tokens: int) -> Iterator[TraceRequest]:
        ids = count()
        shared = tuple(islice(ids, self.instruction_tokens // block_tokens))
        while True:
            document = draw.tokens(self.document_tokens, self.document_spread, self.max_tokens)
            stream = Stream(ids, shared, min(self.instruction_tokens + document, self.max_tokens), block_tokens)
            num_output = draw.tokens(self.output_tokens, self.output_spread, self.max_tokens)
            yield TraceRequest(0, stream.num_tokens, num_output, tuple(stream.blocks))


KINDS: Mapping[str, Traffic] = {kind.name: kind for kind in (Agentic(), Chat(), Rollout(), Batch())}


def generate(
    traffic: Traffic, *, num_requests: int, seed: int = 0, rate: float = 1.0, block_tokens: int = BLOCK_TOKENS
) -> Iterator[TraceRequest]:
    """The first ``num_requests`` requests of ``traffic`` at ``rate`` requests a second on average, by ``seed``.

    The same arguments give the same requests. Raises UsageError for a number below 1 or a rate not above 0.
    """
    if num_requests < 1:
        raise UsageError(f"need 1 request or more, have {num_requests}")
    if not 0 < rate <= 1e9:
        raise UsageError(f"need a rate above 0 and at most 1e9 requests a second, have {rate}")
    if not 1 <= block_tokens <= MOST_TOKENS:
        raise UsageError(f"need blocks of 1 to {MOST_TOKENS} tokens, have {block_tokens}")
    return islice(traffic.requests(Draw(seed), rate, block_tokens), num_requests)


def with_parameters(traffic: Traffic, given: Mapping[str, str]) -> Traffic:
    """``traffic`` with parameters as a command line gives them. Raises UsageError for an unknown or bad one."""
    known = {f.name.replace("_", "-"): f for f in fields(traffic)}
    values: dict[str, float] = {}
    for name, text in given.items():
        if name not in known:
            raise UsageError(f"{traffic.name} has no parameter {name!r}", hint=f"it has {', '.join(sorted(known))}")
        whole = isinstance(getattr(traffic, known[name].name), int)
        values[known[name].name] = _value(name, text, whole)
    return replace(traffic, **values)


_ZERO = ("spread", "gap_ms", "deadline_ms", "nominal_ms_per_token", "system_tokens", "instruction_tokens")
"""What may be 0: parameters that end so. All others are 1 at least."""


def _value(name: str, text: str, whole: bool) -> float:
    least = 0 if name.replace("-", "_").endswith(_ZERO) else 1
    most = MOST_TOKENS if whole else 1e9
    if name.endswith("spread"):
        most = 8
    need = f"{name}: need {'a whole number' if whole else 'a number'} from {least} to {most:g}, have {text!r}"
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise UsageError(need) from None
    if not least <= value <= most:
        raise UsageError(need)
    return value
