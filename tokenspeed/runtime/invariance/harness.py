"""The harness: legs, comparison, and where something differs the op that did it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.errors import UsageError
from tokenspeed.runtime.invariance.bisect import Culprit, Replayer, find_culprit
from tokenspeed.runtime.invariance.legs import RUNNERS, LegRuns
from tokenspeed.runtime.invariance.outcomes import Case, Divergence, Outcome, differences, make_cases
from tokenspeed.runtime.invariance.passes import Bench, Run
from tokenspeed.runtime.invariance.plan import ALONE, LEGS, PROCESS, Plan
from tokenspeed.runtime.invariance.prompts import MOST_TOKENS, digest_of, make_prompts, read_prompts
from tokenspeed.runtime.invariance.worker import Command, run_process
from tokenspeed.runtime.loader import Loaded, LoadOptions, load

Report = Callable[[str, int, int], None]
"""Is told of progress: name of the leg, tokens drawn, tokens in all."""


@dataclass
class LegResult:
    """One line of the report. ``problem``: why the leg proves nothing, though all that it gave is equal."""

    name: str
    requests: int = 0
    compared: int = 0
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    problem: str | None = None
    num_divergent: int = 0

    @property
    def verdict(self) -> str:
        if self.num_divergent:
            return "differs"
        return "reference" if self.name == ALONE else "equal" if self.problem is None else "not exercised"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "verdict": self.verdict}


@dataclass
class Result:
    """What a run of the harness found. ``buckets``: numbers of those that ran. ``culprit`` None with a divergence: run
    again, both legs gave the same bits."""

    plan: Plan
    artifact: Artifact
    section: TargetSection
    device: str
    threads: int
    num_prompts: int
    prompts_sha256: str
    legs: list[LegResult] = field(default_factory=list)
    buckets: set[int] = field(default_factory=set)
    divergence: Divergence | None = None
    culprit: Culprit | None = None

    @property
    def passed(self) -> bool:
        """Every leg that ran is equal."""
        return self.divergence is None

    @property
    def buckets_not_run(self) -> list[str]:
        entries = enumerate(self.section.buckets)
        return [entry.bucket.name for i, entry in entries if i not in self.buckets]

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "artifact": self.artifact.digest,
            "model": self.artifact.manifest.envelope.model,
            "numerics": self.artifact.manifest.envelope.numerics,
            "target": self.section.target,
            "device": self.device,
            "threads": self.threads,
            "prompts": self.num_prompts,
            "tokens": self.plan.tokens,
            "seed": self.plan.seed,
            "prompts_sha256": self.prompts_sha256,
            "legs": [leg.to_json() for leg in self.legs],
            "buckets_not_run": self.buckets_not_run,
            "divergence": None if self.divergence is None else self.divergence.to_json(),
            "culprit": None if self.culprit is None else self.culprit.to_json(),
        }


def examine(path: str, options: LoadOptions, plan: Plan, command: Command, report: Report) -> Result:
    """Run the legs of ``plan`` on the artifact at ``path``.

    Args:
        command: makes the command line of leg process.

    Raises:
        UsageError: a prompt that the artifact cannot run.
        EngineFailedError: a request failed.
    """
    loaded = load(path, options)
    try:
        result, cases = _begin(loaded, plan)
        bench = Bench(loaded, cases)
        examiner = _Examiner(result, cases, report)
        for leg in (ALONE, *(name for name in LEGS if name in plan.legs and name not in (ALONE, PROCESS))):
            examiner.run(leg, lambda done, leg=leg: RUNNERS[leg](bench, plan.seed, done))  # type: ignore[misc]
    finally:
        loaded.executor.device.close()  # before another process wants its memory
    if PROCESS in plan.legs:
        with tempfile.TemporaryDirectory(prefix="tokenspeed-invariance-") as folder:
            examiner.run(PROCESS, lambda _: run_process(command, Path(folder), cases, plan.seed))
    if result.divergence is not None:
        result.culprit = examiner.bisect(path, options)
    return result


def _begin(loaded: Loaded, plan: Plan) -> tuple[Result, list[Case]]:
    envelope, model = loaded.artifact.manifest.envelope, loaded.artifact.manifest.model
    room = envelope.max_model_len - plan.tokens
    if room < 1:
        raise UsageError(
            f"--tokens is {plan.tokens}, and the artifact was built for max_model_len {envelope.max_model_len}, prompt"
            " and output together",
            hint=f"ask for at most {envelope.max_model_len - 1} tokens",
        )
    encode = loaded.tokenizer.encode
    if plan.prompt_file is not None:
        prompts = read_prompts(plan.prompt_file, encode)
        _check_prompts(prompts, model.vocab_size, room)
    else:
        most = min(max(MOST_TOKENS, envelope.split_positions + envelope.page_size), room)  # sums of attention restart
        prompts = make_prompts(
            plan.seed, plan.prompts, vocab_size=model.vocab_size, most_tokens=most, encode=encode
        )  # fmt: skip
    result = Result(
        plan, loaded.artifact, loaded.section, loaded.place, loaded.threads, len(prompts), digest_of(prompts)
    )  # fmt: skip
    return result, make_cases(prompts, plan.tokens, plan.seed)


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, room: int) -> None:
    for number, ids in enumerate(prompts, 1):
        if len(ids) > room:
            raise UsageError(f"prompt {number} has {len(ids)} tokens; with --tokens at most {room} fit the artifact")
        if not all(0 <= token < vocab_size for token in ids):
            raise UsageError(f"prompt {number} has a token id outside the vocabulary of {vocab_size} tokens")


class _Examiner:
    """Runs legs one by one and keeps what bisection needs: the reference's recording, and that of the first run with a
    divergence."""

    def __init__(self, result: Result, cases: Sequence[Case], report: Report):
        self._result = result
        self._cases = cases
        self._report = report
        self._reference: list[Outcome] = []
        self._recordings: list[Run] = []

    def run(self, leg: str, work: Callable[[Callable[[int], None]], LegRuns]) -> None:
        total = sum(case.tokens for case in self._cases)
        counted = 0

        def done(more: int) -> None:
            nonlocal counted
            counted += more
            self._report(leg, counted, total)

        self._report(leg, 0, total)
        began = time.perf_counter()
        runs = work(done)
        outcomes: dict[int, Outcome] = {n: o for run in runs.runs for n, o in run.outcomes.items()}
        assert len(outcomes) == len(self._cases), f"leg {leg} left out a case"
        found = LegResult(
            leg, len(outcomes), sum(o.num_compared for o in outcomes.values()), runs.steps, runs.preemptions,
            runs.cached_tokens, time.perf_counter() - began, runs.problem,
        )  # fmt: skip
        self._result.legs.append(found)
        self._result.buckets |= {step.bucket for run in runs.runs for step in run.recording.steps}
        if leg == ALONE:
            self._reference = [outcomes[n] for n in range(len(self._cases))]
            self._recordings = [runs.runs[0]]
            return
        self._compare(found, runs.runs, outcomes)

    def _compare(self, leg: LegResult, runs: Sequence[Run], outcomes: Mapping[int, Outcome]) -> None:
        different = list(differences(leg.name, self._cases, self._reference, outcomes))
        leg.num_divergent = len(different)
        if different and self._result.divergence is None:
            first = min(different, key=lambda d: (d.position, d.case))
            self._result.divergence = first
            self._recordings.append(next(run for run in runs if first.case in run.outcomes))

    def bisect(self, path: str, options: LoadOptions) -> Culprit | None:
        """The op behind the divergence, found on a device of its own."""
        divergence = self._result.divergence
        assert divergence is not None
        case, outcome = self._cases[divergence.case], self._reference[divergence.case]
        drawn = [position[0] for position in outcome.output]
        tokens = [*case.ids, *drawn][: divergence.position]
        loaded = load(path, replace(options, seal=False))
        try:
            reference, leg = (run.recording for run in self._recordings)
            return find_culprit(
                Replayer(loaded), reference, leg, tokens, lambda at, of: self._report("bisect", at, of)
            )  # fmt: skip
        finally:
            loaded.executor.device.close()
