"""Times the norm, adjustment and sampling kernels (kernels/triton) on this GPU and checks them against the references.

    python benchmarks/gpu/bench_sample.py --json out.json
    python benchmarks/gpu/bench_sample.py --json out.json --sweep     # chunk sizes and warps of the sampler, too
    python benchmarks/gpu/bench_sample.py --json out.json --logprob-shards 8

Needs torch and Triton; imports no built part of TokenSpeed. A figure is the time of one call in a CUDA graph of many,
with programmatic dependent launch between its launches, as in a step. Logits are warm in L2 where they fit, as after
the projection that made them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import numpy as np
import torch

from tokenspeed.compile import sampler
from tokenspeed.kernels.registry import Request, Stage
from tokenspeed.kernels.triton import adjust, norm, sample
from tokenspeed.step import MAX_TOP_LOGPROBS, mask_words
from tokenspeed.target import Target

HOPPER = Target("cuda", "sm_90a")
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top_k 20, top_p 0.95": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "logprobs 5": {"num_logprobs": 5},
    "logprobs 20": {"num_logprobs": 20},
    "adjusted, top_p 0.9": {"temperature": 1.0, "top_p": 0.9, "adjustment": "own"},
}
DEFAULTS: Mapping[str, tuple[torch.dtype, Any]] = {
    "logit_target": (torch.int32, -1), "temperature": (torch.float32, 0.0), "top_p": (torch.float32, 1.0),
    "min_p": (torch.float32, 0.0), "top_k": (torch.int32, 0), "num_logprobs": (torch.int32, -1),
    "adjustment": (torch.int32, -1),
}  # fmt: skip
OUTPUTS = ("out_token", "out_logprob", "out_rank", "out_top_ids", "out_top_logprobs")


def launch(stage: Stage, memory: Mapping[str, Any]) -> None:
    """Launch ``stage`` with its arguments taken from ``memory`` by the names of its rules."""
    assert stage.kernel is not None
    function = getattr(importlib.import_module(stage.kernel.module), stage.kernel.function)
    arguments = {
        name: memory[rule.name] for rule, (name, _) in zip(stage.arguments, stage.kernel.signature, strict=True)
    }
    function[stage.grid](
        **arguments,
        **dict(stage.kernel.constants),
        num_warps=stage.kernel.num_warps,
        num_stages=stage.kernel.num_stages,
        enable_fp_fusion=False,
        launch_pdl=stage.programmatic,
    )


def microseconds(call: Callable[[], None], repeats: int) -> float:
    """Median time of ``call`` in a CUDA graph of ``repeats`` of them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / repeats)
    return float(np.median(times[1:]))


def bench_norm() -> list[dict[str, Any]]:
    """Times of RMS norm to bfloat16, checked against float64."""
    (spec,) = (s for s in norm.specs() if s.dtypes == ("bfloat16",))
    results = []
    for hidden in (4096, 576):
        for rows in (1, 64, 8192):
            sizes = {"H": hidden, "rows": 0, "M": rows}
            (stage,) = spec.stages(Request("rms_norm", HOPPER, "bfloat16", sizes))
            x = torch.randn(rows, hidden, device="cuda")
            memory = {
                "x": x, "weight": torch.randn(hidden, device="cuda"), "eps": 1e-5,
                "out": torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda"),
                "step_sizes": torch.tensor([rows, 0, 0, 0], dtype=torch.int32, device="cuda"),
            }  # fmt: skip
            time = microseconds(lambda stage=stage, memory=memory: launch(stage, memory), 200 if rows < 1000 else 20)
            exact = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * memory["weight"]
            error = ((memory["out"].double() - exact).abs() / (exact.abs() + 1e-6)).max().item()
            assert error < 2.0**-8, error
            rate = rows * hidden * 6 / time / 1e3
            results.append({"rows": rows, "H": hidden, "us": time, "GB/s": rate})
            print(f"norm H={hidden:<5} M={rows:<5} {time:8.2f} us {rate:7.0f} GB/s", flush=True)
    return results


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """``flat``: a nucleus of thousands. ``peaked``: a few dozen tokens hold nearly all, as in most of a text."""
    generator = torch.Generator("cuda").manual_seed(rows)
    logits = torch.randn(rows, vocab, device="cuda", generator=generator) * 2
    if kind == "peaked":
        places = torch.randint(vocab, (rows, 60), device="cuda", generator=generator)
        logits.scatter_(1, places, 12 + 3 * torch.randn(rows, 60, device="cuda", generator=generator))
    return logits


def sample_memory(kind: str, rows: int, vocab: int, asked: Mapping[str, Any], shards: int = 1) -> dict[str, Any]:
    """Operands and results of the op for rows that all ask for the same."""
    (spec,) = sample.specs()
    words = spec.workspace_bytes(a_request(vocab, rows, shards).sizes) // 4
    memory: dict[str, Any] = {
        name: torch.full((rows,), default if name == "adjustment" else asked.get(name, default), dtype=dtype,
                         device="cuda")
        for name, (dtype, default) in DEFAULTS.items()
    }  # fmt: skip
    memory |= {
        "logits": logits_of(kind, rows, vocab),
        "adjusted": logits_of(kind, rows, vocab).roll(1, 1),
        "seed": torch.arange(rows, dtype=torch.int64, device="cuda").mul_(0x9E3779B97F4A7C1).view(torch.uint64),
        "draw_position": torch.arange(rows, dtype=torch.int32, device="cuda"),
        "state_slot": torch.arange(rows, dtype=torch.int32, device="cuda"),
        "last_tokens": torch.zeros(rows, dtype=torch.int32, device="cuda"),
        "out_token": torch.zeros(rows, dtype=torch.int32, device="cuda"),
        "out_logprob": torch.zeros(rows, device="cuda"),
        "out_rank": torch.zeros(rows, dtype=torch.int32, device="cuda"),
        "out_top_ids": torch.zeros(rows, MAX_TOP_LOGPROBS, dtype=torch.int32, device="cuda"),
        "out_top_logprobs": torch.zeros(rows, MAX_TOP_LOGPROBS, device="cuda"),
        "partials": torch.zeros(words, dtype=torch.int32, device="cuda"),
        "step_sizes": torch.tensor([rows, rows, rows, 0, 0, 0, 0, 0], dtype=torch.int32, device="cuda"),
    }
    if asked.get("adjustment") == "own":
        memory["adjustment"] = torch.arange(rows, dtype=torch.int32, device="cuda")
    return memory


def a_request(vocab: int, rows: int, shards: int = 1) -> Request:
    """What selection asks of the sampler for a bucket of ``rows``."""
    return Request("sample", HOPPER, "bfloat16", {"V": vocab, "num_logit_rows": rows, "logprob_shards": shards})


def call_sample(memory: Mapping[str, Any], shards: int = 1) -> Callable[[], None]:
    (spec,) = sample.specs()
    rows, vocab = memory["logits"].shape
    stages = spec.stages(a_request(vocab, rows, shards))

    def call() -> None:
        for stage in stages:
            launch(stage, memory)

    return call


def check_sample(memory: Mapping[str, Any], rows: int, shards: int) -> tuple[int, float]:
    """(Rows of the first ``rows`` whose token differs from the reference's, largest error of a log-probability).

    Ranks must agree where the tokens do, and the likeliest tokens everywhere.
    """
    names = ("seed", "draw_position", "state_slot", *DEFAULTS)
    operands = {name: memory[name][:rows].cpu().numpy() for name in names}
    logits, adjusted = (memory[name][:rows].cpu().numpy() for name in ("logits", "adjusted"))
    made = sampler.sample_rows(logits, adjusted, operands, np.zeros(rows, np.int32), shards)
    expected = dict(zip(OUTPUTS, made, strict=False))
    got = {name: memory[name][:rows].cpu().numpy() for name in OUTPUTS}
    same = got["out_token"] == expected["out_token"]
    np.testing.assert_array_equal(got["out_rank"][same], expected["out_rank"][same])
    np.testing.assert_array_equal(got["out_top_ids"], expected["out_top_ids"])
    assert (memory["last_tokens"][:rows].cpu().numpy() == got["out_token"]).all()
    errors = np.abs(got["out_logprob"] - expected["out_logprob"])[same]
    return int((~same).sum()), float(errors.max(initial=0))


def bench_sample(sizes: tuple[int, ...], checked: int, shards: int) -> list[dict[str, Any]]:
    """Times of the whole op; ``checked`` rows of each variant are compared with the reference."""
    results = []
    for vocab in (128256, 49152):
        for kind in ("flat", "peaked"):
            for name, asked in VARIANTS.items():
                if kind == "peaked" and name in ("greedy", "temperature"):
                    continue  # the same work as in flat rows
                times, wrong, error = [], 0, 0.0
                for rows in sizes:
                    memory = sample_memory(kind, rows, vocab, asked, shards)
                    times.append(microseconds(call_sample(memory, shards), 50 if rows < 64 else 10))
                    if checked and rows == max(r for r in sizes if r <= 64):
                        wrong, error = check_sample(memory, min(checked, rows), shards)
                    results.append({"V": vocab, "logits": kind, "asked": name, "rows": rows, "us": times[-1],
                                    "wrong": wrong, "logprob_error": error, "logprob_shards": shards})  # fmt: skip
                columns = " ".join(f"{time:9.2f}" for time in times)
                print(f"sample V={vocab:<6} {kind:<6} {name:<20} {columns} us; wrong {wrong}, error {error:.1e}",
                      flush=True)  # fmt: skip
    return results


def adjust_memory(seqs: int, adjusted: int, biases: int, vocab: int) -> dict[str, Any]:
    """A step of ``seqs`` decodes, the first ``adjusted`` of which ask penalties, ``biases`` biases and a mask each."""

    def integers(values: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values, np.int32), device="cuda")

    rng, rows = np.random.default_rng(seqs), np.arange(adjusted)
    ids = np.sort(np.stack([rng.permutation(vocab)[:biases] for _ in range(adjusted)] or [[]]), axis=1)
    return {
        "logits": logits_of("flat", seqs, vocab), "token_ids": integers(rng.integers(0, vocab, seqs)),
        "last_tokens": integers(np.zeros(seqs)), "positions": integers(np.full(seqs, 700)),
        "cu_seqlens": integers(np.arange(seqs + 1)), "adjust_seq": integers(rows), "adjust_row": integers(rows),
        "count_slot": integers(rows), "prompt_lens": integers(np.full(adjusted, 600)),
        "repetition_penalty": torch.full((adjusted,), 1.2, device="cuda"),
        "presence_penalty": torch.full((adjusted,), 0.5, device="cuda"),
        "frequency_penalty": torch.full((adjusted,), 0.25, device="cuda"),
        "cu_biases": integers(biases * np.arange(adjusted + 1)), "mask_row": integers(rows),
        "bias_ids": integers(ids.ravel()), "bias_values": torch.randn(ids.size, device="cuda"),
        "token_masks": integers(rng.integers(-(2**31), 2**31, (adjusted, mask_words(vocab)))),
        "token_counts": integers(rng.choice([0, 0, 0, 1, 1 << 30], (seqs, vocab))),
        "adjusted": torch.zeros(seqs, vocab, device="cuda"),
        "step_sizes": integers([seqs, seqs, seqs, adjusted, ids.size, adjusted, 0, 0]),
    }  # fmt: skip


def bench_adjust(checked: int) -> list[dict[str, Any]]:
    """Times of the op with and without adjustments in the step; the first call is compared with the reference."""
    (spec,) = adjust.specs()
    results = []
    for seqs, adjusted, biases in (
        (1, 0, 0),
        (256, 0, 0),
        (1, 1, 0),
        (1, 1, 1024),
        (256, 1, 8),
        (64, 64, 8),
        (256, 256, 8),
    ):
        memory = adjust_memory(seqs, adjusted, biases, 128256)
        (stage,) = spec.stages(Request("adjust_logits", HOPPER, "bfloat16", {"V": 128256, "num_seqs": seqs}))
        before = {name: value.cpu().numpy() for name, value in memory.items()}
        launch(stage, memory)
        torch.cuda.synchronize()
        few = min(adjusted, checked)
        first = {name: before[name][:few] for name in ("adjust_seq", "adjust_row", "count_slot")}
        expected = sampler.adjust_rows(before["logits"], {**before, **first}, before["token_counts"])
        np.testing.assert_array_equal(memory["adjusted"][:few].cpu().numpy(), expected)
        np.testing.assert_array_equal(memory["token_counts"][:few].cpu().numpy(), before["token_counts"][:few])
        time = microseconds(lambda stage=stage, memory=memory: launch(stage, memory), 50 if adjusted < 64 else 10)
        results.append({"seqs": seqs, "adjusted": adjusted, "biases": biases, "us": time})
        print(f"adjust seqs={seqs:<4} adjusted={adjusted:<4} biases={biases:<5} {time:8.2f} us", flush=True)
    return results


def bench_stages(shards: int) -> list[dict[str, Any]]:
    """Times of the launches one by one, at one row and at 256."""
    (spec,) = sample.specs()
    results = []
    for name in ("greedy", "temperature", "top_p 0.9"):
        for rows in (1, 256):
            memory = sample_memory("flat", rows, 128256, VARIANTS[name], shards)
            call_sample(memory, shards)()
            stages = spec.stages(a_request(128256, rows, shards))
            times = {s.name: microseconds(lambda s=s, memory=memory: launch(s, memory), 50) for s in stages}
            results.append({"asked": name, "rows": rows, **times})
            columns = ", ".join(f"{stage} {time:.2f}" for stage, time in times.items())
            print(f"stages {name:<12} rows {rows:<4} {columns} us", flush=True)
    return results


def sweep() -> list[dict[str, Any]]:
    """Times at other chunk sizes and warps."""
    results = []
    for chunk, chunk_warps, finish_warps in (
        (2048, 4, 4), (2048, 4, 16), (2048, 2, 8), (2048, 8, 8), (1024, 4, 8), (4096, 4, 8), (4096, 8, 8),
        (8192, 8, 16),
    ):  # fmt: skip
        sample.CHUNK, sample.CHUNK_WARPS, sample.FINISH_WARPS = chunk, chunk_warps, finish_warps
        row: dict[str, Any] = {"chunk": chunk, "chunk_warps": chunk_warps, "finish_warps": finish_warps}
        for name in ("greedy", "temperature", "top_p 0.9", "top_k 20, top_p 0.95", "logprobs 20"):
            for rows in (1, 256):
                memory = sample_memory("peaked", rows, 128256, VARIANTS[name])
                row[f"{name} x{rows}"] = microseconds(call_sample(memory), 20 if rows < 64 else 5)
        results.append(row)
        print("sweep", " ".join(f"{key}={value:.1f}" if isinstance(value, float) else f"{key}={value}"
                                for key, value in row.items()), flush=True)  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--checked", type=int, default=16, help="rows of each variant compared with the reference")
    parser.add_argument("--sweep", action="store_true", help="also time other chunk sizes and warps")
    parser.add_argument("--logprob-shards", type=int, default=1, help="parts in which log-probabilities are folded")
    options = parser.parse_args()
    shards = options.logprob_shards
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "norm": bench_norm(),
        "stages": bench_stages(shards),
    }
    figures["adjust"] = bench_adjust(options.checked)
    sizes = (1, 64, 256)
    print("sample: columns are rows", *sizes)
    figures["sample"] = bench_sample(sizes, options.checked, shards)
    if options.sweep:
        figures["sweep"] = sweep()
    options.json.write_text(json.dumps(figures, indent=1))
    wrong = sum(row["wrong"] for row in figures["sample"] if row["rows"] == 64)
    assert wrong <= 1, f"{wrong} draws differ from the reference"


if __name__ == "__main__":
    main()
