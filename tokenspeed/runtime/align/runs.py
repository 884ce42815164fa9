"""Requests of a check, alone and together: what the engine says of given sequences, and of replies that it draws."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tokenspeed.errors import ArtifactError, TokenSpeedError
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.request import EngineEvent, FinishReason, RequestOptions, SamplingParams, TokenLogprobs
from tokenspeed.values import read_values

TOGETHER = 64
"""Requests that are sent before any is waited for."""
OPTIONS = RequestOptions(cache_key="tokenspeed align")
_FORCED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)


@dataclass(frozen=True)
class Run:
    """One request: ``params`` resolved but for the seed."""

    prompt: list[int]
    params: SamplingParams
    seed: int = 0


@dataclass
class Outcome:
    """What came of it; ``prompt`` has the log-probability of every token of the prompt but the first."""

    ids: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)


def generate(engine: Engine, runs: Sequence[Run], *, together: bool) -> list[Outcome]:
    """The outcomes of ``runs``, in order; each alone, or TOGETHER at a time. Raises TokenSpeedError."""
    size = TOGETHER if together else 1
    found: list[Outcome] = []
    for at in range(0, len(runs), size):
        pending = [_Pending(engine, run) for run in runs[at : at + size]]
        found += [p.wait() for p in pending]
    return found


def teacher_force(engine: Engine, sequences: Sequence[list[int]], *, together: bool) -> list[list[float]]:
    """Of each sequence, the log-probability of every token but the first. Raises TokenSpeedError."""
    asked = [(number, ids) for number, ids in enumerate(sequences) if len(ids) > 1]
    found: list[list[float]] = [[] for _ in sequences]
    runs = [_forced(ids, engine.info.max_model_len) for _, ids in asked]
    for (number, _), outcome in zip(asked, generate(engine, runs, together=together), strict=True):
        found[number] = outcome.prompt + outcome.logprob
    return found


def _forced(ids: list[int], max_model_len: int) -> Run:
    if len(ids) < max_model_len:
        return Run(ids, _FORCED)
    # A prompt leaves room for a token. The last one of so long a sequence is drawn, as no other is allowed.
    return Run(ids[:-1], replace(_FORCED, logprobs=0, allowed_token_ids=(ids[-1],)))


def first_logits(engine: Engine, token: int) -> list[float]:
    """The logits behind ``token`` alone, as the device has them: float32 [vocab_size]. No other request may run.

    Raises TokenSpeedError; ArtifactError where the artifact does not say where they lie.
    """
    generate(engine, [Run([token], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))], together=False)
    loaded = engine.loaded
    values = read_values(loaded.artifact, loaded.section)
    name = next((op.inputs[0] for op in values.ops if op.kind == "sample"), None)
    if name is None or values.values[name].dtype != "float32":
        raise ArtifactError(f"{loaded.artifact.path}: it does not say where logits are", hint="rebuild the artifact")
    place, logits = values.values[name], array("f")
    logits.frombytes(loaded.executor.device.read(place.region, place.offset, 4 * engine.info.vocab_size))
    return logits.tolist()


class _Pending:
    """A request on its way."""

    def __init__(self, engine: Engine, run: Run):
        self._asks_prompt = run.params.prompt_logprobs is not None
        self._outcome = Outcome()
        self._error: str | None = None
        self._ended = threading.Event()
        engine.submit(run.prompt, run.params, self._take, seed=run.seed, options=OPTIONS)

    def _take(self, event: EngineEvent) -> None:
        outcome = self._outcome
        outcome.ids += event.token_ids
        outcome.logprob += _values(event.logprobs)
        if event.prompt_logprobs is not None:
            outcome.prompt += _values(event.prompt_logprobs)
        if event.finish_reason is not None:
            if event.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                self._error = event.error or f"it ended early: {event.finish_reason}"
            self._ended.set()

    def wait(self) -> Outcome:
        self._ended.wait()
        if self._error is not None:
            raise TokenSpeedError(f"a request of the check failed: {self._error}")
        return self._outcome


def _values(entries: Iterable[TokenLogprobs | None]) -> list[float]:
    return [entry.logprob for entry in entries if entry is not None]
