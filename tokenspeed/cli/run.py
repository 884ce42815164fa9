"""``tokenspeed run``: complete one prompt, or chat in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from tokenspeed.cli.options import (
    Subparsers,
    add_artifact,
    add_command,
    add_json,
    add_load_options,
    add_trace,
    load_options,
    print_json,
)
from tokenspeed.errors import RequestError, UsageError

if TYPE_CHECKING:
    from tokenspeed.runtime.engine import Engine
    from tokenspeed.runtime.request import SamplingParams

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a process that the signal killed."""
_CHAT_HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit or Ctrl-D leaves"


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "run",
        help="complete one prompt, or chat in the terminal",
        description="Load an artifact and stream a completion to stdout. With no PROMPT on a terminal, chat; with no\n"
        "PROMPT and a pipe, complete what stdin holds. Ctrl-C ends a reply, not the conversation.",
        examples='  tokenspeed run artifacts/smollm2 "What is the capital of France?" --temperature 0\n'
        "  tokenspeed run artifacts/smollm2                     # chat\n"
        '  tokenspeed run artifacts/smollm2 --raw "def fib(n):" --max-tokens 64 --temperature 0\n'
        '  echo "Summarize: ..." | tokenspeed run artifacts/smollm2 --json',
    )
    add_artifact(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="a message, or with --raw the text to complete")
    parser.add_argument("--raw", action="store_true", help="complete the text as it is, without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of a reply (default: what fits)")
    group.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default: off)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (default: off)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="least share of the best (default: off)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R",
                       help="divides logits of tokens in prompt and reply (default: off, 1)")  # fmt: skip
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="P",
                       help="subtracted from logits of tokens in the reply (default: off)")  # fmt: skip
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="F",
                       help="the same for each time that a token is in the reply (default: off)")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: a fresh one)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add_load_options(parser)
    add_trace(parser)
    add_json(parser)
    parser.set_defaults(run=run, optional_positional="prompt")


def run(args: argparse.Namespace) -> int:
    from tokenspeed.runtime import trace

    with trace.writing(args.trace):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from tokenspeed.runtime.engine import load
    from tokenspeed.runtime.request import SamplingParams

    prompt = args.prompt
    if prompt is None and sys.stdin is not None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None and sys.stdin is None:
        raise UsageError("there is no PROMPT, and stdin is closed", hint="give a prompt as an argument")
    if prompt is not None and not prompt.strip():
        raise UsageError(
            "the prompt is empty", hint="give some text as PROMPT or on stdin, or run in a terminal to chat"
        )
    if args.raw and prompt is None:
        raise UsageError("--raw needs a PROMPT to complete", hint="give one, or leave --raw out to chat")
    if args.json and prompt is None:
        raise UsageError("--json needs a PROMPT", hint="give one as an argument or on stdin")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
    )
    with load(args.artifact, options=load_options(args, settle=False)) as engine:
        if prompt is None:
            return _chat(engine, params, args.system)
        request = prompt if args.raw else [*_system(args.system), {"role": "user", "content": prompt}]
        reply = _Reply(engine, request, params, echo=not args.json)
        if args.json:
            print_json(reply.to_json())
    return INTERRUPTED if reply.finish_reason == "interrupted" else 0


def _system(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


class _Reply:
    """One completion, streamed to stdout if ``echo``. Ctrl-C ends it early and keeps what there is."""

    def __init__(self, engine: Engine, prompt: Any, params: SamplingParams, *, echo: bool):
        from tokenspeed.runtime.async_llm import stream_blocking

        self.text, self.tokens, self.finish_reason = "", 0, "interrupted"
        self.cached_tokens = 0
        self.first = self.last = started = time.perf_counter()
        outputs = stream_blocking(engine, prompt, params)
        try:
            for output in outputs:
                self.text += output.text
                self.tokens += len(output.token_ids)
                self.cached_tokens = output.cached_tokens or self.cached_tokens
                self.last = time.perf_counter()
                if self.tokens and self.first == started:
                    self.first = self.last
                if echo:
                    print(output.text, end="", flush=True)
                if output.finish_reason is not None:
                    self.finish_reason = str(output.finish_reason)
        except KeyboardInterrupt:
            outputs.close()  # type: ignore[attr-defined]
        self.seconds_to_first = self.first - started
        if echo:
            print(flush=True)

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed after the first token; None for fewer than two tokens."""
        return (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "completion_tokens": self.tokens,
            "cached_tokens": self.cached_tokens,
            "seconds_to_first_token": self.seconds_to_first,
            "tokens_per_second": self.tokens_per_second,
        }


def _chat(engine: Engine, params: SamplingParams, system: str | None) -> int:
    import readline  # noqa: F401  (line editing and history for input())

    print(f"{engine.info.model} on {engine.info.target}; {_CHAT_HELP}", file=sys.stderr)
    messages = _system(system)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        command, _, rest = line.partition(" ")
        if not line:
            continue
        if command == "/quit":
            return 0
        if command == "/reset":
            messages = [m for m in messages if m["role"] == "system"]
        elif command == "/system":
            messages = [*_system(rest), *(m for m in messages if m["role"] != "system")]
        elif command.startswith("/"):
            print(f"unknown command {command}; {_CHAT_HELP}", file=sys.stderr)
        else:
            _turn(engine, params, messages, line)


def _turn(engine: Engine, params: SamplingParams, messages: list[dict[str, Any]], line: str) -> None:
    """One exchange; a refused request leaves the conversation as it was."""
    messages.append({"role": "user", "content": line})
    try:
        reply = _Reply(engine, messages, params, echo=True)
    except RequestError as e:
        messages.pop()
        print(f"error: {e}", file=sys.stderr)
        return
    messages.append({"role": "assistant", "content": reply.text})
    if (speed := reply.tokens_per_second) is not None:
        cached = f", {reply.cached_tokens} prompt tokens cached" if reply.cached_tokens else ""
        print(f"[{reply.tokens} tokens, {speed:.0f} tokens/s{cached}]", file=sys.stderr)
