"""``tokenspeed explain-step``: what the scheduler decided step by step, and why, from a trace of `tokenspeed serve`."""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from tokenspeed.cli.options import Subparsers, add_command, add_json, print_json
from tokenspeed.errors import UsageError
from tokenspeed.json_check import check, parse
from tokenspeed.runtime.scheduler_trace import END, FORMAT, FORMAT_VERSION, HEADER, STEP

MOST_LINE_BYTES = 64 << 20
"""Of a line; a step's has some tens of bytes for each request that came, ran or ended in it."""
HELD = {
    "nothing waits": "nothing more waited",
    "tokens": "the step was full: max_prefill_tokens {max_prefill_tokens}",
    "logit rows": "the step's logit rows were used up: max_logit_rows {max_logit_rows}",
    "pages": "the next in line needs more pages than are free or cached, with one in reserve for each running request",
    "slots": "as many requests ran as may: max_num_seqs {max_num_seqs}",
    "chunk first": "a prompt that was begun before is not computed whole yet, and goes first",
    "decodes": "pages ran out for requests that decode, and nobody is admitted in such a step",
}
"""Why a step admits no further request, by the word of the trace."""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "explain-step",
        help="say what each step ran, and why it admitted no more",
        description="Render the file that `tokenspeed serve --trace-scheduler FILE` writes: what ran, who was\n"
        "admitted and how much of each prompt was cached, why nobody else was, who was preempted and why. Without a\n"
        "choice it sums the trace up. A server may still be writing it.",
        examples="  tokenspeed serve artifacts/smollm2 --trace-scheduler steps.jsonl\n"
        "  tokenspeed explain-step steps.jsonl                    the trace in a few lines\n"
        "  tokenspeed explain-step steps.jsonl --step 1200        one step\n"
        "  tokenspeed explain-step steps.jsonl --request 7        the life of one request\n"
        "  tokenspeed explain-step steps.jsonl --slowest 5        the steps that took longest\n"
        "  tokenspeed explain-step steps.jsonl --held pages       the steps that lacked pages to admit more",
    )
    parser.add_argument("trace", metavar="FILE", help="a trace of `tokenspeed serve --trace-scheduler`")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--step", type=int, metavar="N", help="step number N")
    choice.add_argument("--request", type=int, metavar="ID", help="every step that decided about request ID")
    choice.add_argument("--slowest", type=int, metavar="K", help="the K steps that ran longest")
    choice.add_argument("--held", choices=HELD, metavar="REASON",
                        help=f"steps that admitted no more for this reason: {', '.join(HELD)}")  # fmt: skip
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.slowest is not None and args.slowest < 1:
        raise UsageError(f"--slowest is {args.slowest}; it must be at least 1")
    try:
        return _run(args)
    except OverflowError:
        raise UsageError(f"{args.trace} holds a number that is out of all bounds") from None


def _run(args: argparse.Namespace) -> int:
    with _open(args.trace) as file:
        trace = _Trace(args.trace, file)
        if args.request is not None:
            found = _life(trace, args.request)
        elif args.step is not None:
            found = [_step_of(trace, args.step)]
        elif args.slowest is not None:
            found = heapq.nlargest(args.slowest, trace.steps(), key=lambda step: step["run_seconds"])
        elif args.held is not None:
            found = [step for step in trace.steps() if step["held"] == args.held]
        else:
            return _print_summary(trace, args.json)
        if args.json:
            print_json({"header": trace.header, "steps": found})
        else:
            _print_steps(trace, found, args)
    if trace.complaint:
        print(f"note: {trace.complaint}", file=sys.stderr)
    return 0


def _open(name: str) -> IO[bytes]:
    try:
        return open(name, "rb")
    except OSError as e:
        raise UsageError(f"cannot read {name}: {e.strerror}") from None


class _Trace:
    """A trace that is read as it goes. ``complaint``: what is odd about its end, if anything."""

    def __init__(self, name: str, file: IO[bytes]):
        self._name = name
        self._file = file
        self._number = 0
        self._prompts: dict[int, int] = {}  # of requests that have not ended
        self.complaint: str | None = None
        self.end: dict[str, Any] | None = None
        header = self._parse(self._line(), "the header")
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise UsageError(
                f"{name} is no trace of the scheduler", hint="make one with `serve --trace-scheduler FILE`"
            )
        if header.get("version") != FORMAT_VERSION:
            version = _shown(str(header.get("version")))
            raise UsageError(
                f"{name} has format version {version}; this tokenspeed reads {FORMAT_VERSION}",
                hint="read it with the version that wrote it",
            )
        self._check(header, HEADER)
        self._check(header["limits"], {name: int for name in ("max_prefill_tokens", "max_logit_rows", "max_num_seqs")})
        self.header: dict[str, Any] = header

    def steps(self) -> Iterator[dict[str, Any]]:
        """Each step, with the length of the prompts that it admitted. Once."""
        while raw := self._line():
            if not raw.endswith(b"\n"):
                self.complaint = "the trace ends within a line: it is still being written, or its server was killed"
                return
            line = self._parse(raw, "a step")
            if isinstance(line, dict) and "end" in line:
                self._check(line, END)
                self.end = line
                return
            self._check(line, STEP)
            self._note(line)
            yield line
        self.complaint = "the trace has no end: it is still being written, or its server was killed"

    def _line(self) -> bytes:
        raw = self._file.readline(MOST_LINE_BYTES + 1)
        if len(raw) > MOST_LINE_BYTES:
            raise UsageError(
                f"{self._name}: line {self._number + 1} has more than {MOST_LINE_BYTES >> 20} MiB",
                hint="make a trace with `serve --trace-scheduler FILE`",
            )
        return raw

    def _note(self, step: dict[str, Any]) -> None:
        for request in step["submitted"]:
            self._prompts[request["request"]] = request["prompt_tokens"]
        for admission in step["admitted"]:
            if (prompt := self._prompts.get(admission["request"])) is not None:
                admission["prompt_tokens"] = prompt
        for ended in step["ended"]:
            self._prompts.pop(ended["request"], None)

    def _parse(self, raw: bytes, what: str) -> Any:
        self._number += 1
        try:
            return parse(raw)
        except (ValueError, RecursionError):
            hint = "make one with `serve --trace-scheduler FILE`"
            raise UsageError(f"{self._name}: line {self._number} is not {what} in JSON", hint=hint) from None

    def _check(self, value: Any, shape: Any) -> None:
        try:
            check(value, shape, f"line {self._number}")
        except ValueError as e:
            raise UsageError(f"{self._name}: {e}") from None


def _step_of(trace: _Trace, number: int) -> dict[str, Any]:
    for step in trace.steps():
        if step["step"] == number:
            return step
    raise UsageError(f"the trace has no step {number}", hint="leave --step out to see which steps there are")


# ---- one request ----------------------------------------------------------------------------------------------


def _life(trace: _Trace, request: int) -> list[dict[str, Any]]:
    """The steps that say something of a request."""

    def ids(step: dict[str, Any], *names: str) -> set[int]:
        return {item["request"] for name in names for item in step[name]}

    found = [
        step
        for step in trace.steps()
        if request in ids(step, "submitted", "admitted", "ended")
        or request in step["preempted"]
        or request in step["drew"]
    ]
    if trace.end is not None and any(
        item["request"] == request for item in (*trace.end["submitted"], *trace.end["ended"])
    ):
        trace.complaint = f"request {request} came or ended after the last step"
    elif not found:
        raise UsageError(f"the trace says nothing of request {request}", hint="`--slowest` and `--held` show ids")
    return found


def _print_life(steps: Iterable[dict[str, Any]], request: int) -> None:
    drawn: list[dict[str, Any]] = []

    def flush() -> None:
        if drawn:
            first, last = drawn[0]["step"], drawn[-1]["step"]
            where = f"step {first}" if first == last else f"steps {first} to {last}"
            ran = _time(sum(step["run_seconds"] for step in drawn))
            tokens = _plural(len(drawn), "token")
            print(f"  {drawn[0]['at']:>10.3f} s  drew {tokens} in {where}, which ran {ran}")
            drawn.clear()

    def say(step: dict[str, Any], text: str) -> None:
        flush()
        print(f"  {step['at']:>10.3f} s  {text}")

    print(f"request {request}")
    for step in steps:
        for item in step["submitted"]:
            if item["request"] == request:
                say(step, f"came before step {step['step']}: {_submission(item)}")
        if request in step["preempted"]:
            say(step, f"preempted by step {step['step']}: {_PREEMPTED}; {_pages(step)}")
        for item in step["admitted"]:
            if item["request"] == request:
                say(step, f"admitted to step {step['step']}: {_admission(item)}")
        if request in step["drew"]:
            drawn.append(step)
        for item in step["ended"]:
            if item["request"] == request:
                where = "in" if request in step["drew"] or "error" in step else "before"
                say(step, f"ended with {item['reason']!r} {where} step {step['step']}")
    flush()


# ---- steps ----------------------------------------------------------------------------------------------------

_PREEMPTED = "no page was free for a request before it in line, so it gave up its own; it goes on later"


def _print_steps(trace: _Trace, steps: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.request is not None:
        _print_life(steps, args.request)
        return
    limits = trace.header["limits"]
    for step in steps:
        if args.held is not None:
            print(_one_line(step))
        else:
            _print_step(step, limits)
    if args.held is not None:
        print(f"{_plural(len(steps), 'step')} admitted no more: {_why(args.held, limits)}")


def _one_line(step: dict[str, Any]) -> str:
    return (
        f"{step['at']:>10.3f} s  step {step['step']}: {_work(step)}, ran {_time(step['run_seconds'])};"
        f" {step['running']} running, {step['waiting']} waiting; {_pages(step)}"
    )


def _print_step(step: dict[str, Any], limits: dict[str, Any]) -> None:
    def say(name: str, text: str) -> None:
        print(f"  {name:<10} {text}")

    print(f"step {step['step']} at {step['at']:.3f} s: {step['running']} running, {step['waiting']} waiting")
    say("ran", f"{_work(step)} in {_time(step['run_seconds'])}")
    say("host", f"planned in {_time(step['plan_seconds'])}, submitted in {_time(step['submit_seconds'])},"
                f" committed in {_time(step['commit_seconds'])}")  # fmt: skip
    say("pages", _pages(step))
    for item in step["admitted"]:
        say("admitted", f"request {item['request']}: {_admission(item)}")
    say("no more", _why(step["held"], limits))
    for request in step["preempted"]:
        say("preempted", f"request {request}: {_PREEMPTED}")
    say("drew", _plural(len(step["drew"]), "token"))
    for item in step["submitted"]:
        say("came", f"request {item['request']}: {_submission(item)}")
    for item in step["ended"]:
        say("ended", f"request {item['request']} with {item['reason']!r}")
    if "error" in step:
        say("failed", _shown(step["error"]))
    if "dropped" in step:
        say("missing", f"{step['dropped']} lines before this one, which were not written in time")


def _why(held: str, limits: dict[str, Any]) -> str:
    return HELD[held].format(**limits) if held in HELD else _shown(held)


def _shown(text: str) -> str:
    """A text of the trace, which may be forged: nothing in it reaches the terminal but what can be printed."""
    return text if text.isprintable() else ascii(text)


def _work(step: dict[str, Any]) -> str:
    chunks = f"{_plural(step['chunks'], 'chunk')} of {_plural(step['prefill_tokens'], 'prompt token')}"
    decodes = _plural(step["decodes"], "decode")
    return f"{decodes} and {chunks}" if step["chunks"] and step["decodes"] else chunks if step["chunks"] else decodes


def _pages(step: dict[str, Any]) -> str:
    text = f"{step['free_pages']} pages free, {step['cached_pages']} cached"
    for name, what in (("evicted_pages", "evicted"), ("moved_out", "moved to the host"), ("moved_in", "brought back")):
        if step[name]:
            text += f", {step[name]} {what}"
    return text


def _admission(item: dict[str, Any]) -> str:
    text = "resumed after preemption" if item["resumed"] else f"waited {_time(item['waited_ns'] * 1e-9)}"
    cached, prompt = item["cached_tokens"], item.get("prompt_tokens")
    if prompt and not item["resumed"]:
        text += f"; {cached} of {_plural(prompt, 'prompt token')} cached ({100 * cached // prompt}%)"
    else:
        text += f"; {_plural(cached, 'token')} cached"
    return text + (f", {item['restored_tokens']} of them on the host" if item["restored_tokens"] else "")


def _submission(item: dict[str, Any]) -> str:
    tokens = f"{_plural(item['prompt_tokens'], 'prompt token')}, at most {item['max_tokens']} to draw"
    return f"{tokens}; priority {item['priority']}, tenant {item['tenant']}"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _time(seconds: float) -> str:
    for unit, size, digits in (("us", 1e-6, 0), ("ms", 1e-3, 2)):
        if seconds < 1000 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.3f} s"


# ---- the whole ------------------------------------------------------------------------------------------------


@dataclass
class _Summary:
    steps: int = 0
    first: int = 0
    last: int = 0
    seconds: float = 0.0
    run_seconds: float = 0.0
    host_seconds: float = 0.0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    drawn_tokens: int = 0
    submitted: int = 0
    admitted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    failed_steps: int = 0
    dropped: int = 0
    longest_wait_seconds: float = 0.0
    held: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)

    def add(self, step: dict[str, Any]) -> None:
        self.first, self.last, self.steps = self.first or step["step"], step["step"], self.steps + 1
        self.seconds = step["at"] + step["run_seconds"]
        self.run_seconds += step["run_seconds"]
        self.host_seconds += step["plan_seconds"] + step["submit_seconds"] + step["commit_seconds"]
        for name in ("decode_tokens", "prefill_tokens", "evicted_pages"):
            setattr(self, name, getattr(self, name) + step[name])
        self.drawn_tokens += len(step["drew"])
        self.preemptions += len(step["preempted"])
        self.failed_steps += "error" in step
        self.dropped += step.get("dropped", 0)
        self.held[step["held"]] += 1
        for item in step["admitted"]:
            self.longest_wait_seconds = max(self.longest_wait_seconds, item["waited_ns"] * 1e-9)
            if not item["resumed"]:
                self.admitted += 1
                self.prompt_tokens += item.get("prompt_tokens", 0)
                self.cached_tokens += item["cached_tokens"]
                self.restored_tokens += item["restored_tokens"]
        self.note(step)

    def note(self, line: dict[str, Any]) -> None:
        self.submitted += len(line["submitted"])
        self.ended.update(item["reason"] for item in line["ended"])


def _print_summary(trace: _Trace, as_json: bool) -> int:
    sums = _Summary()
    for step in trace.steps():
        sums.add(step)
    if trace.end is not None:
        sums.note(trace.end)
        sums.dropped = trace.end["dropped"]
    if as_json:
        counts = {"held": dict(sums.held), "ended": dict(sums.ended)}
        print_json({"header": trace.header, "summary": {**vars(sums), **counts}, "note": trace.complaint})
        return 0
    header, limits = trace.header, trace.header["limits"]
    model, target, artifact, version = (_shown(header[name]) for name in ("model", "target", "artifact", "tokenspeed"))
    print(f"{model} on {target}, artifact {artifact[:12]}, tokenspeed {version}")
    if not sums.steps:
        print("no step ran")
        return 0
    cached = f"{sums.cached_tokens} cached" + (
        f" ({100 * sums.cached_tokens / sums.prompt_tokens:.0f}% of the prompts)" if sums.prompt_tokens else ""
    )
    ended = ", ".join(f"{number} {_shown(reason)}" for reason, number in sums.ended.most_common()) or "none"
    rows = (
        ("steps", f"{sums.steps}, from {sums.first} to {sums.last}, within {sums.seconds:.1f} s"),
        ("ran", f"{_time(sums.run_seconds)}; the host spent {_time(sums.host_seconds / sums.steps)} on each step"),
        ("requests", f"{sums.submitted} came, {sums.admitted} were admitted; ended: {ended}"),
        ("waited", f"{_time(sums.longest_wait_seconds)} at most"),
        ("tokens", f"{sums.prefill_tokens} of prompts computed, {cached}, {sums.drawn_tokens} drawn"),
        ("pages", f"{sums.evicted_pages} evicted; {_plural(sums.preemptions, 'preemption')}"),
    )  # fmt: skip
    for name, text in rows:
        print(f"  {name:<10} {text}")
    print("  why a step admitted no more:")
    for held, number in sums.held.most_common():
        print(f"    {number:>8} {100 * number / sums.steps:>4.0f}%  {_shown(held)}: {_why(held, limits)}")
    for text in (
        f"{_plural(sums.failed_steps, 'step')} failed" if sums.failed_steps else "",
        f"{_plural(sums.dropped, 'line')} missing: not written in time" if sums.dropped else "",
        trace.complaint or "",
    ):
        if text:
            print(f"  {text}")
    return 0
