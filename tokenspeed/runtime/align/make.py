"""Makes dumps: of what an engine draws, as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed import __version__
from tokenspeed.runtime.align.dump import Dump
from tokenspeed.runtime.align.dump import Sequence as DumpSequence
from tokenspeed.runtime.align.runs import Run, first_logits, generate
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.request import SamplingParams

GENERATOR = f"tokenspeed {__version__}"


def dump_of(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    commit: str = "",
    with_logits: bool = False,
) -> Dump:
    """Draw a reply to each prompt, and tell the log-probabilities of prompts and replies.

    Args:
        max_tokens: tokens of each reply, whatever end tokens it draws.
        temperature: 0 is greedy.
        seed: of the first prompt's draws; the others count on from there.
        commit: what the dump says of who made it; by default this program's version.
        with_logits: tell the logits behind the very first token too.

    Raises:
        RequestError: a prompt and ``max_tokens`` do not fit, or a value is out of range.
    """
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, logprobs=0, prompt_logprobs=0, ignore_eos=True
    )
    seeds = [(seed + number) & (1 << 64) - 1 for number in range(len(prompts))]
    runs = [Run(prompt, params, own) for prompt, own in zip(prompts, seeds, strict=True)]
    outcomes = generate(engine, runs, together=True)
    sequences = tuple(
        DumpSequence(run.prompt + o.ids, o.prompt + o.logprob, len(run.prompt), run.seed)
        for run, o in zip(runs, outcomes, strict=True)
    )
    return Dump(
        sequences=sequences,
        commit=commit or GENERATOR,
        generator=GENERATOR,
        artifact=engine.info.artifact_digest,
        weights=engine.info.weights_version,
        temperature=temperature,
        first_logits=first_logits(engine, prompts[0][0]) if with_logits else None,
    )
