"""The trainer against the engine, to the bit, and against a plain model, by the clock.

    python benchmarks/trainer.py ARTIFACT [--device cuda] [--json FILE]

An engine serves the artifact and draws replies to random prompts; all their tokens, of prompts and replies, are then
scored by the aligned model and by a plain one with the same weights. The plain model is that of transformers, or, where
that is not installed, the same network in plain PyTorch. Steps of both, forward and backward, take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from plain_llama import PlainLlama

import tokenspeed
from tokenspeed.artifact import Artifact
from tokenspeed.compile.derive import rope_parameters
from tokenspeed.compile.program import Program
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import SamplingParams
from tokenspeed.target import Target
from tokenspeed.trainer import Aligned, align, new_model
from tokenspeed.trainer.new_model import load_weights, model_config


def main() -> int:
    args = parse()
    artifact = Artifact.open(args.artifact)
    model, peer = make_model(artifact, args)
    note(
        f"{peer} on {args.device}; {artifact.manifest.envelope.numerics} artifact in {artifact.manifest.envelope.dtype}"
    )
    aligned = align(model, artifact, threads=args.threads)
    weights = aligned.save_weights(args.weights) if args.weights else None
    sequences, expected = roll_out(args, weights, aligned.target)
    envelope = artifact.manifest.envelope
    report: dict[str, Any] = {
        "artifact": artifact.manifest.model.name,
        "target": aligned.target,
        "numerics": envelope.numerics,
        "dtype": envelope.dtype,
        "peer": peer,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} threads",
        **compare(aligned, sequences, expected),
        **clock(aligned, args),
    }
    if args.device == "cuda":
        report["peak_torch_gib"] = round(torch.cuda.max_memory_allocated() / (1 << 30), 2)
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["max_difference_of_engine"] == 0.0 else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peer", choices=("auto", "transformers", "plain"), default="auto")
    parser.add_argument("--tokens", type=int, default=10240, help="tokens to compare, at least")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence, half of them drawn")
    parser.add_argument("--step-sequences", type=int, default=2, help="sequences of a timed step")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-gib", type=float, default=None, help="of the engine")
    parser.add_argument("--weights", type=Path, help="bring the model's weights to the engine through this file")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_model(artifact: Artifact, args: argparse.Namespace) -> tuple[Any, str]:
    """A model with the artifact's weights in its dtype, and what it is."""
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, artifact.manifest.envelope.dtype)
    has_transformers = True
    try:
        import transformers
    except ModuleNotFoundError:
        has_transformers = False
    if args.peer == "transformers" or (args.peer == "auto" and has_transformers):
        return new_model(artifact, dtype=dtype, device=args.device), f"transformers {transformers.__version__}"
    program = Program.from_json(artifact.read("program.json").decode())
    with torch.device("meta"):
        model = PlainLlama(model_config(program), *rope_parameters(program))
    model = model.to_empty(device=args.device).to(dtype)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb.inv_freq = torch.tensor(rope_parameters(program)[0], dtype=torch.float32, device=args.device)
    load_weights(artifact, program, dict(model.named_parameters()))
    return model, "plain PyTorch"


def roll_out(
    args: argparse.Namespace, weights: Path | None, target: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sequences of which the engine drew the second half at temperature 1, and float32 log-probabilities of all their
    tokens but the first."""
    options = LoadOptions(threads=args.threads, kv_gib=args.kv_gib, target=Target.parse(target))
    with tokenspeed.load(args.artifact, options=options) as engine:
        if weights is not None:
            engine.update_weights(weights)
        generator = torch.Generator().manual_seed(0)
        count, half = -(-args.tokens // args.length), args.length // 2
        prompts = torch.randint(engine.info.vocab_size, (count, args.length - half), generator=generator).tolist()
        began = time.perf_counter()
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=half, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        outputs = engine.generate(prompts, params)
        note(f"the engine drew {count * half} tokens in {time.perf_counter() - began:.1f} s")
    sequences = [torch.tensor([*prompt, *out.token_ids]) for prompt, out in zip(prompts, outputs, strict=True)]
    entries = [[*(e for e in out.prompt_logprobs if e is not None), *out.logprobs] for out in outputs]
    return sequences, [torch.tensor([e.logprob for e in row], dtype=torch.float64).float() for row in entries]


def plain_logprobs(aligned: Aligned, ids: torch.Tensor) -> torch.Tensor:
    """[B, L - 1] of the plain model."""
    with aligned.own_forward() as model:
        logits = model(input_ids=ids).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)


def compare(aligned: Aligned, sequences: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Differences of the engine's log-probabilities."""
    device = next(aligned.model.parameters()).device
    ours, plain = [], []
    with torch.no_grad():
        for ids in sequences:
            plain.append(plain_logprobs(aligned, ids[None].to(device))[0].cpu())
        bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
        flat = aligned.logprobs(torch.cat(list(sequences)).to(device), cu_seqlens=bounds).cpu()
        ours = [flat[a + 1 : b] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    engine = torch.cat(list(expected))
    to_ours, to_plain = (torch.cat(x) - engine for x in (ours, plain))
    return {
        "tokens": len(engine),
        "max_difference_of_engine": to_ours.abs().max().item(),
        "different_from_engine": int((torch.cat(ours).view(torch.int32) != engine.view(torch.int32)).sum()),
        "plain_max_difference_of_engine": to_plain.abs().max().item(),
        "plain_mean_difference_of_engine": to_plain.abs().mean().item(),
        "plain_different_from_engine": int((to_plain != 0).sum()),
    }


def clock(aligned: Aligned, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step, forward and backward of a mean of log-probabilities, by turns; and of packing the weights,
    which the aligned model does once after each step of an optimizer."""
    device = next(aligned.model.parameters()).device
    ids = torch.randint(aligned.model.config.vocab_size, (args.step_sequences, args.length), device=device)
    forwards: dict[str, Callable[[], torch.Tensor]] = {
        "aligned": lambda: aligned.logprobs(ids)[:, 1:], "plain": lambda: plain_logprobs(aligned, ids),
    }  # fmt: skip
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forwards}
    for _ in range(args.repeats + 1):
        for name, forward in forwards.items():
            aligned.model.zero_grad()
            synchronize(device)
            began = time.perf_counter()
            loss = -forward().mean()
            synchronize(device)
            between = time.perf_counter()
            loss.backward()
            synchronize(device)
            seconds[name].append((between - began, time.perf_counter() - between))
    result: dict[str, Any] = {"step_tokens": ids.numel()}
    for name, times in seconds.items():
        forward_times, backward_times = zip(*times[1:], strict=True)
        result[f"{name}_step_seconds"] = statistics.median(map(sum, times[1:]))
        result[f"{name}_forward_seconds"] = statistics.median(forward_times)
        result[f"{name}_backward_seconds"] = statistics.median(backward_times)
    packing = []
    for _ in range(args.repeats):
        began = time.perf_counter()
        aligned.sync()
        packing.append(time.perf_counter() - began)
    result["packing_seconds"] = statistics.median(packing)
    result["aligned_to_plain"] = result["aligned_step_seconds"] / result["plain_step_seconds"]
    return result


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
