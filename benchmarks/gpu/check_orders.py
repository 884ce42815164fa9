"""Are the orders of a trainer (docs/orders.md) on this device what they say? Run from a checkout:

    python benchmarks/gpu/check_orders.py --json /tmp/orders.json [--target cuda:sm_90a]

Builds a small random model in every order, serves it, and compares

- the log-probabilities of a prompt with the interpreter's, which computes on the host what the artifact's Program says;
- the rope table that the device made with the cosines and sines that torch computes on the same device, bit by bit;
- rounded sums with round(residual + round(product)) of the same accumulators, bit by bit, for tiles and wide kernels.

Exits with 1 if anything is wrong. ``--target cpu:x86-64-v3`` does the first two on a CPU. Needs torch, and Triton for a
GPU. Equal bits of the table with torch's are reported, not demanded: another CUDA may have another cosine.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tokenspeed.artifact import Artifact, PreludeEntry
from tokenspeed.compile.build import build
from tokenspeed.compile.derive import rope_frequencies, rope_table_of
from tokenspeed.compile.dummy_weights import DummyCheckpoint
from tokenspeed.compile.interpret import run_prompt
from tokenspeed.compile.program import Program
from tokenspeed.runtime.engine import load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.loader import load as load_parts
from tokenspeed.runtime.request import SamplingParams
from tokenspeed.target import Target

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 256,
    "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 1024, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LIMITS: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 4, "max_prefill_tokens": 512, "max_logit_rows": 512}
ORDERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "unfused": {"layer_boundary_norm": "unfused"},
    "target": {"rope_table_device": "target"},
    "both": {"layer_boundary_norm": "unfused", "rope_table_device": "target"},
}
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.1}
SEED, PROMPT = 7, 900


def log_softmax(logits: Any) -> Any:
    logits = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def scores(artifact: Path, options: LoadOptions, tokens: list[int]) -> Any:
    """Log-probability of each token but the first, as served."""
    with load(artifact, options=options) as engine:
        (output,) = engine.generate(tokens, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    return np.array([entry.logprob for entry in output.prompt_logprobs or () if entry is not None])


def check_scores(folder: Path, target: Target, dtype: str, options: LoadOptions, problems: list[str]) -> dict[str, Any]:
    """Every order of one dtype: its distance from the interpreter, and from the other orders."""
    tokens = [int(t) for t in np.random.default_rng(SEED).integers(2, MODEL["vocab_size"], PROMPT)]
    report: dict[str, Any] = {}
    found = {}
    for name, flags in ORDERS.items():
        artifact = folder / f"{dtype}-{name}"
        build(folder / "model", artifact, dummy_weights=SEED, dtype=dtype, targets=str(target), **LIMITS, **flags)
        found[name] = scores(artifact, options, tokens)
        program = Program.from_json((artifact / "program.json").read_text())
        want = log_softmax(run_prompt(program, DummyCheckpoint(folder / "model", SEED).read, tokens))
        distance = np.abs(found[name] - want[np.arange(PROMPT - 1), tokens[1:]])
        report[name] = {"most": float(distance.max()), "mean": float(distance.mean())}
        if not distance.max() <= TOLERANCE[dtype]:
            problems.append(f"{dtype} {name}: {distance.max():.2e} from the interpreter")
    for name in ORDERS:
        same = name == "usual" or (dtype == "float32" and name == "unfused")
        equal = bool((found[name] == found["usual"]).all())
        report[name]["equal_to_usual"] = equal
        if equal is not same:
            problems.append(f"{dtype} {name}: {'equal to' if equal else 'other than'} the usual order")
    return report


def check_table(artifact: Path, options: LoadOptions, device: str, problems: list[str]) -> dict[str, Any]:
    """The table in the device's memory, against torch's and against that of exact functions."""
    import torch

    entry = Artifact.open(artifact).manifest.targets[0].prelude
    assert isinstance(entry, PreludeEntry)
    (table,) = entry.tables
    loaded = load_parts(artifact, options)
    try:
        data = loaded.executor.device.read("state", table.offset, table.nbytes)
        seconds = loaded.seconds["prelude"]
    finally:
        loaded.executor.device.close()
    have = np.frombuffer(data, np.float32).reshape(table.shape)
    source = Program.from_json((artifact / "program.json").read_text()).values["rope_frequencies"].source
    assert source is not None
    frequencies = rope_frequencies(source)
    angles = torch.arange(len(have), device=device)[:, None].float() * torch.from_numpy(frequencies).to(device)
    theirs = torch.cat([angles.cos(), angles.sin()], 1).cpu().numpy()
    exact = rope_table_of(frequencies, len(have), 1.0)
    report = {
        "seconds": seconds,
        "bits_of_torch": float((have.view(np.uint32) == theirs.view(np.uint32)).mean()),
        "bits_of_exact": float((have.view(np.uint32) == exact.view(np.uint32)).mean()),
        "most_from_exact": float(np.abs(have - exact).max()),
    }
    if not report["most_from_exact"] <= 2.0**-22:
        problems.append(f"the rope table is {report['most_from_exact']:.2e} from exact cosines and sines")
    return report


def check_sums(problems: list[str]) -> dict[str, Any]:
    """linear_add_rounded of tiles and wide kernels, against the sums of the same kernels without rounding."""
    import torch
    import triton

    from tokenspeed.kernels.triton import linear, linear_wide
    from tokenspeed.kernels.triton.linear_config import WIDE_TILE, Config

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    hopper, report = Target("cuda", "sm_90a"), {}
    cases = (
        (Config(16, 64, 128, 4, 4, swapped=True), 13), (Config(128, 128, 64, 8, 3, swapped=False), 300),
        (WIDE_TILE, 2048), (Config(8, 64, 128, 4, 8, swapped=True, kind="wide", early=False), 7),
    )  # fmt: skip
    torch.manual_seed(SEED)
    n = k = 2048
    weight = torch.randn(n, k, device="cuda").mul_(k**-0.5).bfloat16()
    for config, rows in cases:
        wide = config.kind == "wide"
        module, suffix = (linear_wide, "_wide") if wide else (linear, "")
        x = torch.randn(rows, k, device="cuda").bfloat16()
        residual = torch.randn(rows, n, device="cuda").bfloat16().float()
        sizes = torch.tensor([rows, 1, 1, 0], device="cuda", dtype=torch.int32)
        product, have = (torch.full((rows, n), float("nan"), device="cuda") for _ in range(2))
        options: dict[str, Any] = {"num_warps": 4 if wide else config.num_warps, "enable_fp_fusion": False}
        options |= {"num_stages": 1 if wide else config.num_stages}
        options |= {"maxnreg": config.max_registers} if config.max_registers else {}
        constants = {"N": n, "K": k, "ROWS": 0, **config.constants(hopper), "PDL": 0}
        grid = (config.programs(rows, n),)
        getattr(module, f"linear{suffix}")[grid](x, weight, product, sizes, **constants, **options)
        rounded = getattr(module, f"linear_add_rounded{suffix}")
        rounded[grid](x, weight, residual, have, sizes, **constants, **options)
        want = (residual + product.bfloat16().float()).bfloat16().float()
        report[str(config)] = equal = float((have == want).float().mean())
        if equal != 1.0:
            problems.append(f"{config}: {1 - equal:.2%} of the rounded sums have other bits")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    target, problems = Target.parse(arguments.target), list[str]()
    options = LoadOptions(target=target, kv_gib=0.5 if target.is_gpu else 0.1)
    report: dict[str, Any] = {"target": str(target)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        for dtype in TOLERANCE:
            report[dtype] = check_scores(folder, target, dtype, options, problems)
        device = "cuda" if target.is_gpu else "cpu"
        report["table"] = check_table(folder / "bfloat16-target", options, device, problems)
    if target.is_gpu:
        report["sums"] = check_sums(problems)
    report["problems"] = problems
    print(json.dumps(report, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
