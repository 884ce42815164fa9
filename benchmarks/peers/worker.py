"""One engine behind a line protocol, so that several can take turns on one machine.

    python benchmarks/peers/worker.py PEER DTYPE MODEL THREADS

Reads one JSON request a line: {"kind": "decode", "size": 8} or {"kind": "prefill", "size": 512}; answers
{"tokens_per_second": ...}. The first answer, {"ready": true, ...}, comes after the first token was drawn, with the
seconds since the process started and its resident memory in bytes.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROMPT_TOKENS, NEW_TOKENS = 64, 64  # of the decode cases, as in tokenspeed/runtime/bench.py
VOCABULARY = 49152


def prompts_for(kind: str, size: int, seed: int, use: str = "") -> list[list[int]]:
    """Random prompts of a case. None begins like another one: an engine that caches prefixes must not gain by it."""
    sequences, length = (size, PROMPT_TOKENS) if kind == "decode" else (1, size)
    streams = (random.Random(f"{kind} {size} {seed} {i} {use}") for i in range(sequences))
    return [stream.choices(range(VOCABULARY), k=length) for stream in streams]


Prefill = Callable[[list[list[int]]], None]
Decode = Callable[[int], None]


class TokenSpeed:
    def __init__(self, dtype: str, model: str, threads: int):
        from tokenspeed.runtime.engine import load
        from tokenspeed.runtime.loader import LoadOptions

        self.engine = load(model, options=LoadOptions(threads=threads))

    def measure(self, kind: str, size: int, seed: int) -> float:
        from tokenspeed.runtime.bench import Case, run_case

        return run_case(self.engine, Case(kind, size), seed)

    def first_token(self) -> None:
        self.measure("prefill", PROMPT_TOKENS, 0)


class _Stepwise:
    """An engine driven step by step: a prefill of equal prompts, then decode steps of one token each."""

    prefill: Prefill
    decode: Decode

    def measure(self, kind: str, size: int, seed: int) -> float:
        prompts = prompts_for(kind, size, seed)
        started = time.perf_counter()
        self.prefill(prompts)
        prefilled = time.perf_counter()
        if kind == "prefill":
            return size / (prefilled - started)
        self.decode(NEW_TOKENS - 1)
        return size * (NEW_TOKENS - 1) / (time.perf_counter() - prefilled)

    def first_token(self) -> None:
        self.prefill([[1] * PROMPT_TOKENS])


class Transformers(_Stepwise):
    def __init__(self, dtype: str, model: str, threads: int):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def prefill(self, prompts: list[list[int]]) -> None:
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        self.past, self.tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)

    def decode(self, steps: int) -> None:
        with self.torch.inference_mode():
            for _ in range(steps):
                out = self.model(self.tokens, past_key_values=self.past, use_cache=True, logits_to_keep=1)
                self.past, self.tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)


class OpenVINO:
    """OpenVINO GenAI. A decode case is the time of all its tokens less that of the first ones alone."""

    def __init__(self, dtype: str, model: str, threads: int):
        import openvino as ov
        import openvino_genai as genai

        self.ov, self.genai = ov, genai
        precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        tokenizer = genai.Tokenizer(str(Path(model)))
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads,
            "KV_CACHE_PRECISION": precision,
        }
        self.pipe = genai.LLMPipeline(model, tokenizer, "CPU", **properties)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        import numpy as np

        ids = np.array(prompts, np.int64)
        inputs = self.genai.TokenizedInputs(self.ov.Tensor(ids), self.ov.Tensor(np.ones_like(ids)))
        config = self.genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        self.pipe.generate(inputs, config)

    def measure(self, kind: str, size: int, seed: int) -> float:
        prompts, others = prompts_for(kind, size, seed, "first"), prompts_for(kind, size, seed, "all")
        started = time.perf_counter()
        self.generate(prompts, 1)
        to_first = time.perf_counter() - started
        if kind == "prefill":
            return size / to_first
        started = time.perf_counter()
        self.generate(others, NEW_TOKENS)
        return size * (NEW_TOKENS - 1) / (time.perf_counter() - started - to_first)

    def first_token(self) -> None:
        self.generate([[1] * PROMPT_TOKENS], 1)


class LlamaCpp(_Stepwise):
    def __init__(self, dtype: str, model: str, threads: int):
        import llama_cpp

        self.lib = lib = llama_cpp
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(model.encode(), params)
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = 8192, 2048, 2048, 32
        context.n_threads = context.n_threads_batch = threads
        context.kv_unified = True
        self.context = lib.llama_init_from_model(self.model, context)
        self.batch = lib.llama_batch_init(2048, 0, 1)

    def prefill(self, prompts: list[list[int]]) -> None:
        lib = self.lib
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        tokens = [(t, i, s, i == len(p) - 1) for s, p in enumerate(prompts) for i, t in enumerate(p)]
        for start in range(0, len(tokens), 2048):
            self._run(tokens[start : start + 2048])
        self.sequences, self.position = len(prompts), len(prompts[0])
        self.tokens = [1] * self.sequences

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._run([(self.tokens[s], self.position, s, True) for s in range(self.sequences)])
            for s in range(self.sequences):  # greedy, over the whole vocabulary, as any user of the library would
                logits = self.lib.llama_get_logits_ith(self.context, s)
                self.tokens[s] = self._argmax(logits)
            self.position += 1

    def _argmax(self, logits: Any) -> int:
        import numpy as np

        return int(np.ctypeslib.as_array(logits, (VOCABULARY,)).argmax())

    def _run(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, logits
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")


PEERS = {"tokenspeed": TokenSpeed, "transformers": Transformers, "openvino": OpenVINO, "llama.cpp": LlamaCpp}


def main() -> None:
    peer, dtype, model, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # libraries print on stdout; answers go on a copy of it
    os.dup2(2, 1)
    engine = PEERS[peer](dtype, model, threads)
    engine.first_token()
    print(json.dumps({"ready": True, "seconds": seconds_since_exec(), "resident_bytes": resident()}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        speed = engine.measure(request["kind"], request["size"], request["seed"])
        print(json.dumps({"tokens_per_second": speed, "peak_bytes": resident("VmHWM")}), file=answers)


def seconds_since_exec() -> float:
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def resident(field: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
