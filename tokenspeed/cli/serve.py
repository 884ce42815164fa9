"""``tokenspeed serve``: answer OpenAI clients over HTTP."""

from __future__ import annotations

import argparse
import os
import threading

from tokenspeed.cli.options import Subparsers, add_artifact, add_command, add_load_options, load_options


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "serve",
        help="serve an artifact to OpenAI clients over HTTP",
        description="Load an artifact and answer /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics\n"
        "and /get_server_info. Nothing is compiled; SIGTERM lets running requests finish.",
        examples="  tokenspeed serve artifacts/smollm2\n"
        "  tokenspeed serve artifacts/smollm2 --host 0.0.0.0 --port 8080 --api-key $KEY --threads 8\n"
        "  curl -N localhost:8000/v1/chat/completions -H 'content-type: application/json' \\\n"
        '       -d \'{"messages": [{"role": "user", "content": "Hello"}], "stream": true}\'',
    )
    add_artifact(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("TOKENSPEED_API_KEY"),
                        help="require `Authorization: Bearer KEY` (default: $TOKENSPEED_API_KEY)")  # fmt: skip
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="answer to this model name instead of the artifact's"
    )
    parser.add_argument("--max-waiting", type=int, default=1024, metavar="N",
                        help="requests that may wait before clients get 429 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS",
                        help="how long SIGTERM lets running requests finish (default: %(default)s)")  # fmt: skip
    add_load_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load on a thread while this one imports the HTTP stack; then serve until a signal."""
    loading = _Loading(args)
    from tokenspeed.runtime.server import ServerSettings, serve

    settings = ServerSettings(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        served_model_name=args.served_model_name,
        drain_timeout=args.drain_timeout,
    )
    engine = loading.result()
    return serve(engine, engine.tokenizer, settings)


class _Loading(threading.Thread):
    """Loads the artifact beside the main thread: most of its time is spent outside the interpreter's lock."""

    def __init__(self, args: argparse.Namespace):
        super().__init__(name="tokenspeed-load", daemon=True)
        self._args = args
        self._outcome: object = None
        self.start()

    def run(self) -> None:
        try:
            from tokenspeed.runtime.engine import load

            self._outcome = load(
                self._args.artifact, options=load_options(self._args), max_waiting=self._args.max_waiting
            )
        except BaseException as e:  # raised again where the result is asked for
            self._outcome = e

    def result(self):  # type: ignore[no-untyped-def]
        self.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome
