"""Leg process: the cases in a fresh process, which writes what they gave to files."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenspeed.errors import EngineFailedError
from tokenspeed.runtime.invariance.legs import LegRuns
from tokenspeed.runtime.invariance.outcomes import Case, Outcome
from tokenspeed.runtime.invariance.passes import Bench, Run, run_together
from tokenspeed.runtime.invariance.recording import Recording
from tokenspeed.runtime.loader import LoadOptions, load

_JOB, _RESULT, _STEPS = "job.json", "result.json", "steps.bin"
Command = Callable[[Path], Sequence[str]]
"""The command line of a process that calls ``work`` on a folder."""


def run_process(command: Command, folder: Path, cases: Sequence[Case], seed: int) -> LegRuns:
    """Have the cases run by a process of its own, together, in ``folder``.

    Raises EngineFailedError if it fails.
    """
    (folder / _JOB).write_text(json.dumps({"seed": seed, "cases": [asdict(case) for case in cases]}))
    done = subprocess.run(
        [*command(folder)], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=same_package()
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        raise EngineFailedError(f"the process of leg process failed: {' '.join(said[-2:])}")
    result: dict[str, Any] = json.loads((folder / _RESULT).read_text())
    outcomes = {int(number): Outcome.from_json(outcome) for number, outcome in result["outcomes"].items()}
    counts = {name: int(result[name]) for name in ("steps", "preemptions", "cached_tokens")}
    run = Run(outcomes, recording=Recording.read(folder / _STEPS), **counts)
    return LegRuns([run])


def same_package() -> dict[str, str]:
    """The environment in which ``python -P`` finds this very package, and not what lies in the current folder: the
    sources of a checkout from which it was installed have no native module."""
    paths = [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def work(path: str, options: LoadOptions, folder: Path) -> None:
    """What the process does with the artifact at ``path``."""
    job = json.loads((folder / _JOB).read_text())
    cases = [Case(**{**case, "ids": tuple(case["ids"])}) for case in job["cases"]]
    loaded = load(path, options)
    try:
        bench, run = Bench(loaded, cases), Run()
        with bench.engine(run, prefix_index=True) as engine:
            rng = random.Random(f"process {job['seed']}")
            run_together(engine, bench.items(range(len(cases)), rng), run, lambda _: None, rng)
    finally:
        loaded.executor.device.close()
    run.recording.write(folder / _STEPS)
    outcomes = {number: outcome.to_json() for number, outcome in run.outcomes.items()}
    result = {"outcomes": outcomes, "steps": run.steps, "preemptions": run.preemptions}
    (folder / _RESULT).write_text(json.dumps({**result, "cached_tokens": run.cached_tokens}))
