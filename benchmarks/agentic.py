"""Replay agentic sessions with the prefix index on and off: the same bits, and how much less is computed.

    python benchmarks/agentic.py ARTIFACT [--sessions 20] [--turns 12] [--rounds 1] [--json]

Every session begins with one shared system prompt; each turn's prompt is the whole conversation so far (prompts,
replies as they were drawn) and a new message. Sessions run side by side, the turns of one after another. Tokens are
random: only their number and what is shared matters to the scheduler. Exit code 1 when a bit differs.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # the checkout, where nothing is installed

from tokenspeed.runtime.engine import Engine, load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import EngineEvent, SamplingParams


@dataclass(frozen=True)
class Workload:
    """Tokens of each part of a conversation."""

    sessions: int = 20
    turns: int = 12
    system_tokens: int = 600
    message_tokens: int = 48
    reply_tokens: int = 24
    seed: int = 0


@dataclass
class Turn:
    """What one turn gave. ``reusable``: tokens of its prompt that an earlier turn had in its prompt or drew."""

    prompt_tokens: int
    reusable: int
    cached_tokens: int = 0
    first_token_seconds: float = 0.0
    reply: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)


def replay(engine: Engine, work: Workload) -> list[list[Turn]]:
    """Run all sessions at once; the turns of each in order."""
    vocab = engine.info.vocab_size
    system = random.Random(f"system {work.seed}").choices(range(vocab), k=work.system_tokens)
    sessions: list[list[Turn]] = [[] for _ in range(work.sessions)]
    threads = [
        threading.Thread(target=_session, args=(engine, work, system, number, sessions[number]))
        for number in range(work.sessions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sessions


def _session(engine: Engine, work: Workload, system: Sequence[int], number: int, turns: list[Turn]) -> None:
    rng = random.Random(f"session {work.seed} {number}")
    context = list(system)
    # Greedy in half of the sessions; the bits of drawn ones depend on seed and position alone.
    params = SamplingParams(
        temperature=float(number % 2), seed=number, max_tokens=work.reply_tokens, ignore_eos=True, logprobs=0
    )
    for number_of_turn in range(work.turns):
        # The last token of a reply was drawn but never read, so it is not in pages.
        reusable = len(context) - 1 if number_of_turn else (work.system_tokens if number else 0)
        context += rng.choices(range(engine.info.vocab_size), k=work.message_tokens)
        turn = Turn(len(context), reusable)
        turns.append(turn)
        done = threading.Event()
        began = time.perf_counter()

        def sink(event: EngineEvent, turn: Turn = turn, done: threading.Event = done, began: float = began) -> None:
            if event.token_ids and not turn.reply:
                turn.first_token_seconds = time.perf_counter() - began
            turn.reply.extend(event.token_ids)
            turn.logprobs.extend(one.logprob.hex() for one in event.logprobs)
            turn.cached_tokens += event.cached_tokens or 0
            if event.finish_reason is not None:
                done.set()

        engine.submit(context, params, sink)
        done.wait()
        context += turn.reply


def figures(on: list[list[Turn]], off: list[list[Turn]]) -> dict[str, Any]:
    """What the index saved, beside what the workload allows."""
    turns = [turn for session in on for turn in session]
    prompt = sum(turn.prompt_tokens for turn in turns)
    return {
        "prompt_tokens": prompt,
        "reusable_share": sum(turn.reusable for turn in turns) / prompt,
        "cached_share": sum(turn.cached_tokens for turn in turns) / prompt,
        "first_token_seconds": {
            name: [statistics.median(session[i].first_token_seconds for session in run) for i in range(len(run[0]))]
            for name, run in (("on", on), ("off", off))
        },
        "same_bits": [[(t.reply, t.logprobs) for t in s] for s in on]
        == [[(t.reply, t.logprobs) for t in s] for s in off],
    }


def measure(artifact: Path, work: Workload, rounds: int, kv_gib: float | None) -> dict[str, Any]:
    """The figures of each round, engines with and without the index taking turns."""
    results = []
    for _ in range(rounds):
        runs, seconds = {}, {}
        for name, prefix_index in (("off", False), ("on", True)):
            with load(artifact, options=LoadOptions(kv_gib=kv_gib), prefix_index=prefix_index) as engine:
                began = time.perf_counter()
                runs[name] = replay(engine, work)
                seconds[name] = time.perf_counter() - began
                about = {"target": engine.info.target, "dtype": engine.info.dtype, "device": engine.info.device}
        results.append({**figures(runs["on"], runs["off"]), "seconds": seconds})
    return {"workload": asdict(work), "machine": platform.platform(), **about, "rounds": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--sessions", type=int, default=Workload.sessions)
    parser.add_argument("--turns", type=int, default=Workload.turns)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kv-gib", type=float, default=None)
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    args = parser.parse_args()
    result = measure(args.artifact, Workload(args.sessions, args.turns), args.rounds, args.kv_gib)
    if args.json:
        print(json.dumps(result, indent=1))
    for one in result["rounds"]:
        on, off = one["first_token_seconds"]["on"], one["first_token_seconds"]["off"]
        print(
            f"of {one['prompt_tokens']} prompt tokens {one['reusable_share']:.1%} could be reused, "
            f"{one['cached_share']:.1%} were; {one['seconds']['off']:.1f} s without the index, "
            f"{one['seconds']['on']:.1f} s with it; bits {'equal' if one['same_bits'] else 'DIFFER'}\n"
            f"median seconds to the first token by turn, with the index:    {' '.join(f'{s:.2f}' for s in on)}\n"
            f"                                           without the index: {' '.join(f'{s:.2f}' for s in off)}",
            file=sys.stderr if args.json else sys.stdout,
        )
    return 0 if all(one["same_bits"] for one in result["rounds"]) else 1


if __name__ == "__main__":
    sys.exit(main())
