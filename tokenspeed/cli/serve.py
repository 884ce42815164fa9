"""``tokenspeed serve``: answer OpenAI clients over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenspeed.cli.options import Subparsers, add_artifact, add_command, add_load_options, add_trace, load_options
from tokenspeed.errors import UsageError

if TYPE_CHECKING:
    from tokenspeed.runtime.engine import Engine


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "serve",
        help="serve an artifact to OpenAI clients over HTTP",
        description="Load an artifact and answer /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics\n"
        "and /get_server_info. Nothing is compiled; SIGTERM lets running requests finish.",
        examples="  tokenspeed serve artifacts/smollm2\n"
        "  tokenspeed serve artifacts/smollm2 --host 0.0.0.0 --port 8080 --api-key $KEY --threads 8\n"
        "  tokenspeed serve artifacts/smollm2 --api-key web=$WEB --api-key batch=$BATCH --max-waiting-per-key 64\n"
        "  curl -N localhost:8000/v1/chat/completions -H 'content-type: application/json' \\\n"
        '       -d \'{"messages": [{"role": "user", "content": "Hello"}], "stream": true}\'',
    )
    add_artifact(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--api-key", metavar="[NAME=]KEY", action="append", default=[],
                        help="require `Authorization: Bearer KEY`; repeatable, and then each name has a fair share"
                        " of the server (default: $TOKENSPEED_API_KEY)")  # fmt: skip
    parser.add_argument("--api-key-file", metavar="FILE", help="more of them, one [NAME=]KEY a line")
    parser.add_argument("--served-model-name", metavar="NAME", action="append", default=[],
                        help="a name to answer to instead of the artifact's; repeatable")  # fmt: skip
    parser.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS",
                        help="how long SIGTERM lets running requests finish (default: %(default)s)")  # fmt: skip
    parser.add_argument("--access-log", action="store_true", help="log every request on stderr")
    parser.add_argument("--unattested", metavar="REASON",
                        help="serve an artifact of --numerics rl-bitwise without the proof that `tokenspeed invariance`"
                        " gives; the reason is logged, and told in /get_server_info and /metrics")  # fmt: skip
    parser.add_argument(
        "--allow-weight-updates", metavar="DIR", help="take new weights from below DIR, at POST /update_weights"
    )
    _add_scheduling(parser)
    _add_kv_events(parser)
    parser.add_argument("--trace-scheduler", metavar="FILE",
                        help="write what each step decided and why, for `tokenspeed explain-step`")  # fmt: skip
    add_load_options(parser)
    add_trace(parser)
    parser.set_defaults(run=run)


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "scheduling",
        "Requests of a lower `priority` (0 to 9, 0 by default) run first; within one, API keys (without them: the\n"
        "`user` of a request) share the server evenly.",
    )
    group.add_argument("--max-waiting", type=int, default=1024, metavar="N",
                       help="requests that may wait before clients get 429 (default: %(default)s)")  # fmt: skip
    group.add_argument("--max-waiting-per-key", type=int, metavar="N",
                       help="of these, how many of one API key or user (default: all)")  # fmt: skip
    group.add_argument("--aging-seconds", type=float, default=10.0, metavar="SECONDS",
                       help="who waits this long counts as of the next more urgent priority, twice as long as of the"
                       " one after; 0: priorities hold for ever (default: %(default)s)")  # fmt: skip
    group.add_argument("--max-step-tokens", type=int, metavar="N",
                       help="tokens of a step; fewer stall running replies less (default: as built)")  # fmt: skip
    group.add_argument("--no-prefix-cache", action="store_true",
                       help="compute every prompt whole, even where an earlier one began alike")  # fmt: skip


def _add_kv_events(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "events for routers",
        "Which prefixes are cached here, in vLLM's format (msgpack over ZeroMQ); needs `pip install\n"
        "'tokenspeed[kv-events]'`.",
    )
    group.add_argument("--kv-events", metavar="ADDRESS",
                       help="publish at tcp://*:PORT, where routers connect, or through tcp://HOST:PORT,"
                       " which one of them binds")  # fmt: skip
    group.add_argument("--kv-events-replay", metavar="ADDRESS",
                       help="answer routers that missed some, at tcp://*:PORT (default: do not)")  # fmt: skip
    group.add_argument("--kv-events-topic", metavar="TEXT", default="kv-events",
                       help="first part of every message (default: %(default)s)")  # fmt: skip


SWITCH_INTERVAL = 2e-4
"""Seconds for which a thread may keep the interpreter's lock when another wants it. The engine's thread wants it
several times a step, and the loader's many times; Python's own 5 ms are longer than a step on a GPU."""


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the artifact loads on a thread while this one imports the web stack."""
    from tokenspeed.runtime import trace

    sys.setswitchinterval(SWITCH_INTERVAL)
    with trace.writing(args.trace), contextlib.ExitStack() as stack:
        return _serve(args, stack)


def _serve(args: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    from tokenspeed.runtime.server import ServerSettings, serve_loading

    _check(args)
    options = replace(load_options(args, settle=False), attested=True, unattested=args.unattested)
    settings = ServerSettings(
        host=args.host,
        port=args.port,
        api_keys=api_keys(args),
        served_names=tuple(args.served_model_name),
        drain_timeout=args.drain_timeout,
        weights_dir=args.allow_weight_updates,
        access_log=args.access_log,
    )

    scheduler_trace = None
    if args.trace_scheduler is not None:
        from tokenspeed.runtime.scheduler_trace import SchedulerTrace

        scheduler_trace = stack.enter_context(SchedulerTrace(args.trace_scheduler))

    kv_events = None
    if args.kv_events is not None:
        from tokenspeed.runtime.kv_events import KvEventPublisher

        publisher = KvEventPublisher(args.kv_events, replay=args.kv_events_replay, topic=args.kv_events_topic)
        kv_events = stack.enter_context(publisher)

    def load_engine() -> Engine:
        from tokenspeed.runtime import trace

        with trace.span("import engine"):
            from tokenspeed.runtime.engine import load

        return load(
            args.artifact,
            options=options,
            max_waiting=args.max_waiting,
            max_step_tokens=args.max_step_tokens,
            prefix_index=not args.no_prefix_cache,
            max_waiting_per_tenant=args.max_waiting_per_key,
            aging_seconds=args.aging_seconds,
            scheduler_trace=scheduler_trace,
            kv_events=kv_events,
        )

    return serve_loading(load_engine, settings, first=options.opened)


def api_keys(args: argparse.Namespace) -> dict[str, str]:
    """Keys by name: those of the command line, or else that of the environment."""
    from tokenspeed.runtime.server.keys import parse_keys

    environment = os.environ.get("TOKENSPEED_API_KEY")
    if environment and not args.api_key and args.api_key_file is None:
        return parse_keys([environment])
    return parse_keys(args.api_key, args.api_key_file)


def _check(args: argparse.Namespace) -> None:
    if args.kv_events is None and args.kv_events_replay is not None:
        raise UsageError("--kv-events-replay answers for --kv-events, which is not there", hint="give both")
    if args.kv_events is not None and args.no_prefix_cache:
        raise UsageError("--kv-events tells of cached prefixes, and --no-prefix-cache has none", hint="give one")
    if args.allow_weight_updates is not None and not os.path.isdir(args.allow_weight_updates):
        raise UsageError(
            f"--allow-weight-updates is {args.allow_weight_updates!r}, and there is no such folder",
            hint="make the folder first, and let nobody write to it who may not choose the weights",
        )
    for name in ("max_waiting", "max_waiting_per_key"):
        if (value := getattr(args, name)) is not None and not 1 <= value <= 1 << 20:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must lie between 1 and {1 << 20}")
    if not 0 <= args.aging_seconds <= 86400:
        raise UsageError(f"--aging-seconds is {args.aging_seconds:g}; it must lie between 0 (off) and 86400")
    if args.unattested is not None and not (args.unattested.strip() and args.unattested.isprintable()):
        raise UsageError(
            f"--unattested is {args.unattested!r}; it must say why in printable characters",
            hint="write a reason that those who read the log will understand",
        )
    if not 0 <= args.drain_timeout < math.inf:
        raise UsageError(f"--drain-timeout is {args.drain_timeout}; it must be a number of seconds, 0 or more")
    for name in args.served_model_name:
        if not name.strip() or not name.isprintable():
            raise UsageError(f"--served-model-name is {name!r}; it must be a name of printable characters")
