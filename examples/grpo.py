"""Group-relative policy optimization (GRPO, arXiv:2402.03300) of a small model on a CPU, against a server.

    pip install torch==2.13.0 '.[trainer]'
    tokenspeed build CHECKPOINT --recipe artifacts/recipes/smollm2-135m-rl.toml -o artifacts/rl
    tokenspeed invariance artifacts/rl
    python examples/grpo.py artifacts/rl

`tokenspeed serve` draws groups of replies, with their log-probabilities. The trainer, an ordinary model of transformers
that `tokenspeed.trainer.align` has compute with the server's kernels, scores the same tokens, takes one step, and sends
its weights back. Every step compares the two: the greatest difference of a log-probability must be exactly 0, so that
the ratio of the two policies, which the method divides by, is exactly 1. What the same model gives with its own forward
is recorded beside it. The reward is the share of digits in a reply.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from tokenspeed.simulate.svg import Line, Panel, picture
from tokenspeed.trainer import Aligned, align, new_model

READY = re.compile(r"^ready: .* at (http://\S+) ")
QUESTIONS = (
    "Name a number.", "What is 12 times 12?", "How old are you?", "Count as far as you can.",
    "What year is it?", "How many days are in a year?", "Write down your favourite numbers.", "How far is the moon?",
)  # fmt: skip
CLIP = 0.2
"""How far the ratio of the policies may go from 1 before a token's gradient ends."""


@dataclass(frozen=True)
class Reply:
    """What the server drew: token ids of prompt and reply, the log-probabilities of the reply's, and its text."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str

    @property
    def reward(self) -> float:
        return sum(c.isdigit() for c in self.text) / max(1, len(self.text))


@dataclass
class Record:
    """One step. Differences are those of the server's log-probabilities, absolute; times in seconds."""

    step: int
    tokens: int
    reward: float
    max_difference: float
    different_tokens: int
    plain_max_difference: float
    plain_mean_difference: float
    rollout_seconds: float
    train_seconds: float
    sync_seconds: float


class Server:
    """A running server's HTTP API."""

    def __init__(self, url: str):
        self._url = url

    def chat(self, question: str, *, n: int, seed: int, max_tokens: int) -> list[Reply]:
        """``n`` replies at temperature 1, each with its own seed that follows from ``seed``."""
        answer = self._post("/v1/chat/completions", {
            "messages": [{"role": "user", "content": question}], "n": n, "seed": seed, "max_tokens": max_tokens,
            "temperature": 1.0, "logprobs": True, "return_token_ids": True,
        })  # fmt: skip
        prompt = answer["prompt_token_ids"]
        return [
            Reply(prompt, choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]],
                  choice["message"]["content"])
            for choice in answer["choices"]
        ]  # fmt: skip

    def update_weights(self, file: Path, version: str) -> None:
        self._post("/update_weights", {"path": file.name, "version": version})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            answer: dict[str, Any] = json.load(response)
            return answer


@contextmanager
def serving(args: argparse.Namespace, weights: Path) -> Iterator[Server]:
    """A server process that takes weights from the folder ``weights``."""
    command = [sys.executable, "-P", "-m", "tokenspeed", "serve", str(args.artifact), "--port", "0", "--kv-gib", "0.5",
               "--allow-weight-updates", str(weights)]  # fmt: skip
    command += [] if args.threads is None else ["--threads", str(args.threads)]
    command += [] if args.unattested is None else ["--unattested", args.unattested]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield Server(url_of(process.stderr))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def url_of(stderr: IO[str]) -> str:
    """Where the server listens, once it says so; its log goes on to ours."""
    for line in stderr:
        print(line, end="", file=sys.stderr, flush=True)
        if found := READY.search(line):
            threading.Thread(target=lambda: sys.stderr.writelines(stderr), daemon=True).start()
            return found[1]
    raise SystemExit("the server ended before it was ready: its log says why")


def roll_out(server: Server, step: int, args: argparse.Namespace) -> list[list[Reply]]:
    """A group of replies to each question."""
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(args.questions)]
    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(
            lambda i: server.chat(questions[i], n=args.group, seed=1000 * step + i, max_tokens=args.max_tokens),
            range(len(questions)),
        ))  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """All replies, one after another behind their prompts: ``ids`` int64[N], ``cu_seqlens``, ``mask`` bool[N] of the
    tokens that were drawn; for each of these the server's log-probability (float32) and the group's advantage."""

    ids: torch.Tensor
    cu_seqlens: torch.Tensor
    mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor


def batch_of(groups: Sequence[Sequence[Reply]]) -> Batch:
    ids, mask, bounds, logprobs, advantages = [], [], [0], [], []
    for group in groups:
        rewards = torch.tensor([reply.reward for reply in group])
        for reply, advantage in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
            ids += [*reply.prompt, *reply.tokens]
            mask += [False] * len(reply.prompt) + [True] * len(reply.tokens)
            bounds.append(len(ids))
            logprobs += reply.logprobs
            advantages += [float(advantage)] * len(reply.tokens)
    exact = torch.tensor(logprobs, dtype=torch.float64).float()  # JSON has float32 numbers without loss
    return Batch(torch.tensor(ids), torch.tensor(bounds), torch.tensor(mask), exact, torch.tensor(advantages))


def plain_logprobs(aligned: Aligned, batch: Batch) -> torch.Tensor:
    """What the model's own forward says of the tokens that were drawn, under autocast to the artifact's dtype."""
    low = aligned.artifact.manifest.envelope.dtype == "bfloat16"
    bounds = batch.cu_seqlens[1:-1]
    ids, mask, present = (
        torch.nn.utils.rnn.pad_sequence(x.tensor_split(bounds), batch_first=True)
        for x in (batch.ids, batch.mask, torch.ones_like(batch.mask))
    )
    with aligned.own_forward() as model, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        logits = model(input_ids=ids, attention_mask=present.long()).logits
    rows = logits[:, :-1][mask[:, 1:]].float()
    return torch.log_softmax(rows, 1).gather(1, ids[:, 1:][mask[:, 1:]][:, None]).squeeze(1)


def train(aligned: Aligned, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    """One step of the clipped objective; returns the log-probabilities before it."""
    logprobs = aligned.logprobs(batch.ids, cu_seqlens=batch.cu_seqlens, mask=batch.mask)[batch.mask]
    ratio = torch.exp(logprobs - batch.logprobs)
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
    optimizer.zero_grad()
    (-gain.mean()).backward()
    torch.nn.utils.clip_grad_norm_(aligned.model.parameters(), 1.0)
    optimizer.step()
    return logprobs.detach()


def run(args: argparse.Namespace) -> list[Record]:
    records = []
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder, serving(args, Path(folder)) as server:
        model = new_model(args.artifact)
        aligned = align(model, args.artifact, threads=args.threads)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
        for step in range(args.steps):
            began = time.perf_counter()
            groups = roll_out(server, step, args)
            rolled = time.perf_counter()
            batch = batch_of(groups)
            plain = plain_logprobs(aligned, batch) - batch.logprobs
            compared = time.perf_counter()
            logprobs = train(aligned, optimizer, batch)
            trained = time.perf_counter()
            file = aligned.save_weights(Path(folder, f"step-{step}.safetensors"))
            server.update_weights(file, f"step-{step}")
            file.unlink()
            rewards = [reply.reward for group in groups for reply in group]
            records.append(Record(
                step, len(logprobs), sum(rewards) / len(rewards), (logprobs - batch.logprobs).abs().max().item(),
                int((logprobs != batch.logprobs).sum()), plain.abs().max().item(), plain.abs().mean().item(),
                rolled - began, trained - compared, time.perf_counter() - trained,
            ))  # fmt: skip
            report(records[-1])
    return records


def report(record: Record) -> None:
    print(
        f"step {record.step}: reward {record.reward:.3f}, {record.tokens} tokens, greatest difference of a"
        f" log-probability {record.max_difference} (plain transformers: {record.plain_max_difference:.3g}),"
        f" {record.rollout_seconds:.1f} s of rollouts, {record.train_seconds:.1f} s of training,"
        f" {record.sync_seconds:.2f} s for new weights",
        flush=True,
    )


def about(args: argparse.Namespace, records: Sequence[Record]) -> dict[str, Any]:
    """What ran, and its steps."""
    names = ("questions", "group", "max_tokens", "learning_rate")
    return {
        "artifact": args.artifact.name,
        "torch": torch.__version__,
        **{name: getattr(args, name) for name in names},
        "steps": [asdict(record) for record in records],
    }


def draw(records: Sequence[Record], title: str) -> str:
    """An SVG file."""
    differences = Panel("Log-probabilities: trainer and server", "step", "greatest difference")
    rewards = Panel("Reward", "step", "share of digits")
    for name, value in (("aligned", "max_difference"), ("plain transformers", "plain_max_difference")):
        differences.lines.append(Line(name, [(r.step, getattr(r, value)) for r in records]))
    rewards.lines.append(Line("aligned", [(r.step, r.reward) for r in records]))
    return picture(title, (differences, rewards))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--questions", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="replies to a question")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a reply")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--threads", type=int, help="of the server, and of the trainer (default: every core)")
    parser.add_argument("--unattested", metavar="REASON", help="as `tokenspeed serve` has it")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--svg", type=Path, help="draw them here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    torch.manual_seed(0)
    records = run(args)
    if args.json:
        args.json.write_text(json.dumps(about(args, records), indent=1) + "\n")
    if args.svg:
        args.svg.write_text(draw(records, f"GRPO of {args.artifact.name}"))
    if any(record.max_difference != 0 or record.different_tokens for record in records):
        print("error: trainer and server differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
