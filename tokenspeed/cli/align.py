"""``tokenspeed align``: a trainer's log-probabilities against the engine's, bit for bit."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed.cli.options import (
    Subparsers,
    add_artifact,
    add_command,
    add_json,
    add_load_options,
    load_options,
    print_json,
)
from tokenspeed.errors import DivergenceError, UsageError

if TYPE_CHECKING:
    from tokenspeed.runtime.align.check import Verdict
    from tokenspeed.runtime.align.dump import Dump
    from tokenspeed.runtime.engine import Engine


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "align",
        help="hold a trainer's log-probabilities against the engine's",
        description="A training step on replayed rollouts needs the log-probabilities that the engine had, to the\n"
        "last bit. A trainer writes its own to a dump (docs/align.md), a safetensors file of token ids and\n"
        "log-probabilities; `check` computes them again and compares, `dump` writes what the engine says.",
        examples="  tokenspeed align dump artifacts/smollm2 --prompt 'The capital of France' -o rollout.safetensors\n"
        "  python trainer.py --score rollout.safetensors --write scored.safetensors       # your trainer's part\n"
        "  tokenspeed align check artifacts/smollm2 scored.safetensors",
    )
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    _add_dump(steps)
    _add_check(steps)


def _add_dump(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "dump",
        help="draw replies and write what the engine says of prompts and replies",
        description="Draw a reply of --max-tokens tokens to each prompt, and write the token ids with the\n"
        "log-probability of every token but the first. The replies can be drawn again from what the dump says.",
        examples="  tokenspeed align dump artifacts/smollm2 --prompt 'Once upon a time' -o one.safetensors\n"
        "  tokenspeed align dump artifacts/smollm2 --ids 1,2,3 --max-tokens 128 -o ids.safetensors --first-logits\n"
        "  tokenspeed align dump artifacts/smollm2 --prompt-file prompts.jsonl --temperature 1 --seed 7 -o all.st",
    )
    add_artifact(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="one prompt, as it is: no chat template")
    what.add_argument("--prompt-file", metavar="FILE", help="one a line: a text, or a JSON array of token ids")
    what.add_argument("--ids", metavar="ID,...", help="one prompt as token ids")
    parser.add_argument("-o", "--output", metavar="DUMP", required=True, help="where the dump goes")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N",
                        help="tokens of each reply (default: %(default)s)")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="of the first reply's draws; the others count on (default: %(default)s)")  # fmt: skip
    parser.add_argument("--first-logits", action="store_true", help="write the logits behind the first token too")
    parser.add_argument("--commit", metavar="TEXT", default="",
                        help="what made the dump (default: this program's version)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace the file at DUMP")
    _add_common(parser)
    parser.set_defaults(run=_dump)


def _add_check(steps: Subparsers) -> None:
    parser = add_command(
        steps,
        "check",
        help="compare dumps with what the engine computes, bit for bit",
        description="Teacher-force every sequence of each DUMP and compare, to the last bit:\n\n"
        "  trainer    the log-probability of every token with that of the dump\n"
        "  logits     the logits behind the first token, where the dump has them\n"
        "  packed     each sequence among others with the same alone\n"
        "  generated  a reply's log-probabilities while it was drawn with those teacher-forced, where the dump\n"
        "             says how long the prompts are\n"
        "  replies    the reply drawn again with that of the dump, where it says how it was drawn\n\n"
        "The first value that differs is named, with its bits and the distance in units of the last place.\n"
        "Exit code 12: something differs; 13: a dump is damaged or not for this artifact.",
        examples="  tokenspeed align check artifacts/smollm2 scored.safetensors\n"
        "  tokenspeed align check artifacts/smollm2 step-12/*.safetensors --weights step-12.weights.safetensors --json",
    )
    add_artifact(parser)
    parser.add_argument("dumps", metavar="DUMP", nargs="+", help="files in the format of docs/align.md")
    _add_common(parser)
    parser.set_defaults(run=_check)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", metavar="FILE", help="run with these weights (docs/weights.md)")
    add_load_options(parser)
    add_json(parser)


def _load(args: argparse.Namespace) -> Engine:
    from tokenspeed.runtime.engine import load

    engine = load(args.artifact, options=load_options(args))
    if args.weights is not None:
        try:
            engine.update_weights(args.weights)
        except BaseException:
            engine.close(drain=False)
            raise
    return engine


def _dump(args: argparse.Namespace) -> int:
    from tokenspeed.runtime.align.dump import write_dump
    from tokenspeed.runtime.align.make import dump_of

    if Path(args.output).exists() and not args.force:
        raise UsageError(f"{args.output} exists", hint="give --force to replace it")
    ids = None if args.ids is None else _ids(args.ids)
    with _load(args) as engine:
        dump = dump_of(
            engine,
            [ids] if ids is not None else _prompts(args, engine),
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
            commit=args.commit,
            with_logits=args.first_logits,
        )
        write_dump(args.output, dump)
    tokens = sum(len(s.ids) for s in dump.sequences)
    if args.json:
        print_json({"dump": args.output, "sequences": len(dump.sequences), "tokens": tokens, "weights": dump.weights})
    else:
        print(f"{args.output}: {_count(len(dump.sequences), 'sequence')}, {_count(tokens, 'token')}")
    return 0


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--ids is {text[:60]!r}; it must be token ids with commas between") from None


def _prompts(args: argparse.Namespace, engine: Engine) -> list[list[int]]:
    from tokenspeed.runtime.invariance.prompts import read_prompts

    if args.prompt_file is not None:
        return read_prompts(Path(args.prompt_file), engine.tokenizer.encode)
    return [engine.tokenizer.encode(args.prompt)]


def _check(args: argparse.Namespace) -> int:
    from tokenspeed.runtime.align.check import check_dump
    from tokenspeed.runtime.align.dump import read_dump

    dumps = [(path, read_dump(path)) for path in args.dumps]
    results = []
    with _load(args) as engine:
        for path, dump in dumps:
            results.append((path, dump, check_dump(engine, dump, partial(_report, path))))
        digest, weights = engine.info.artifact_digest, engine.info.weights_version
    passed = all(v.passed for _, _, verdicts in results for v in verdicts)
    if args.json:
        print_json({"artifact": digest, "weights": weights, "passed": passed, "dumps": [_json(*r) for r in results]})
    else:
        for path, dump, verdicts in results:
            _print(path, dump, verdicts, digest)
    return 0 if passed else DivergenceError.exit_code


def _report(path: str, name: str) -> None:
    print(f"{path}: {name} ...", file=sys.stderr, flush=True)


def _json(path: str, dump: Dump, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "dump": path,
        "commit": dump.commit,
        "artifact": dump.artifact,
        "sequences": len(dump.sequences),
        "tokens": sum(len(s.ids) for s in dump.sequences),
        "passed": all(v.passed for v in verdicts),
        "checks": [v.to_json() for v in verdicts],
    }


def _print(path: str, dump: Dump, verdicts: list[Verdict], digest: str) -> None:
    tokens = sum(len(s.ids) for s in dump.sequences)
    print(
        f"{path}: {_count(len(dump.sequences), 'sequence')}, {_count(tokens, 'token')}, made by {_plain(dump.commit)}"
    )
    if dump.artifact and dump.artifact != digest:
        print(f"  note: the dump names the artifact {_plain(dump.artifact[:12])}, this one is {digest[:12]}")
    for verdict in verdicts:
        equal = "equal" if verdict.passed else f"{verdict.different} differ"
        print(f"  {verdict.check:<10} {verdict.compared:>8} compared, {equal}{_largest(verdict)}")
        if (m := verdict.first) is not None:
            where = "logit of token" if verdict.check == "logits" else f"sequence {m.sequence}, position"
            what = "" if verdict.check == "logits" else f", token {m.token}"
            print(f"    first: {where} {m.position}{what}")
            print(f"      expected {_value(m.expected, m.expected_bits)}")
            print(f"      found    {_value(m.found, m.found_bits)}{'' if m.ulps is None else f', {m.ulps} ulp away'}")


def _plain(text: str) -> str:
    """A text of a file on one line, without what would steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _largest(verdict: Verdict) -> str:
    return "" if verdict.passed or verdict.largest is None else f", by {verdict.largest:.3g} at most"


def _value(value: float, bits: str) -> str:
    return f"token {value}" if not bits else f"{value:.9g} ({bits})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
