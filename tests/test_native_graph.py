"""The CPU device agrees with the LaunchGraph interpreter, buffer by buffer, on every target that this machine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lowered import ByteDevice, DictSource, fused_program, lowered, step_sizes
from test_interpret_graph import adjusted_steps, mixed_steps
from tiny_llama import tiny_config, tiny_tokens, tiny_weights

from tokenspeed.bucket import BucketTable, StepLimits
from tokenspeed.compile.interpret import Chunk, step_inputs
from tokenspeed.compile.lower import LoweredTarget
from tokenspeed.compile.program import Program
from tokenspeed.compile.weights import write_weights
from tokenspeed.graph import Region
from tokenspeed.kernels.native_specs import native_specs
from tokenspeed.step import INPUTS, OUTPUTS
from tokenspeed.target import Target, runnable_targets

_native = pytest.importorskip("tokenspeed._native", reason="the C++ module is not built")

NUM_PAGES = 8
TARGETS = [str(target) for target in runnable_targets()]


class NativeDevice:
    """A CpuDevice that holds a lowered target, driven like a ByteDevice."""

    def __init__(self, program: Program, low: LoweredTarget, tensors: dict[str, Any], file: Path, workers: int):
        with file.open("wb") as out:
            write_weights(low.weights, program, DictSource(tensors), out)
        self.low = low
        self.device = _native.CpuDevice(workers)
        self.device.load_weights(str(file), low.weights.data_offset, low.weights.nbytes)
        sizes = low.layout.region_sizes
        self.device.allocate("kv", NUM_PAGES * low.kv_page_bytes)
        for region in (Region.ARENA, Region.IO, Region.STATE):
            self.device.allocate(str(region), sizes[region])
        for region in (Region.KV, Region.ARENA, Region.STATE):
            self.bytes(region)[:] = 0xFF  # NaN, in either dtype
        self.graphs = {
            bucket: self.device.load_graph(graph.encode(), low.kv_page_bytes) for bucket, graph in low.graphs.items()
        }
        if low.prelude is not None:
            self.prelude = self.device.load_graph(low.prelude.encode(), low.kv_page_bytes)
        self.device.seal()
        if low.prelude is not None:
            self.device.wait(self.device.submit(self.prelude, 0, 0, 0))

    def bytes(self, region: Region) -> Any:
        return np.frombuffer(self.device.view(str(region)), np.uint8)

    def run(self, inputs: dict[str, Any], table: Any) -> dict[str, Any]:
        sizes = (len(inputs["token_ids"]), len(inputs["context_lens"]), len(inputs["logit_rows"]))
        placed, io = {tensor.name: tensor for tensor in self.low.io}, self.bytes(Region.IO)
        for tensor in INPUTS:
            data = np.ascontiguousarray(inputs[tensor.name]).reshape(-1).view(np.uint8)
            io[placed[tensor.name].offset :][: data.nbytes] = data
        io[placed["step_sizes"].offset :][:32] = step_sizes(inputs).view(np.uint8)
        bucket = table.find(*sizes, decode_only=len(set(sizes)) == 1)
        self.device.wait(self.device.submit(self.graphs[bucket], *sizes))
        outputs = {}
        for tensor in OUTPUTS:
            at = placed[tensor.name]
            rows = io[at.offset :][: at.nbytes].view(at.dtype).reshape(at.shape)
            outputs[tensor.name] = rows[: sizes[2]].copy()
        return outputs


def floats(data: Any, dtype: str) -> Any:
    return np.nan_to_num(data.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_mixed_steps_agree_with_the_interpreter(target: str, dtype: str, tmp_path: Path) -> None:
    config = tiny_config()
    program = fused_program(config, dtype)
    low = lowered(program, target)
    native = NativeDevice(program, low, tiny_weights(config), tmp_path / "w.safetensors", workers=2)
    expected = ByteDevice(program, low, config, NUM_PAGES)
    tolerance = 2e-5 if dtype == "float32" else 3e-2
    for chunks in (*mixed_steps(), *adjusted_steps()):
        inputs = step_inputs(program, chunks)
        have, want = native.run(inputs, expected.table), expected.run(inputs)
        np.testing.assert_array_equal(have["out_token"], want["out_token"])
        rows = inputs["num_logprobs"] >= 0
        np.testing.assert_allclose(have["out_logprob"][rows], want["out_logprob"][rows], rtol=0, atol=tolerance)
        if dtype == "float32":
            np.testing.assert_array_equal(have["out_rank"][rows], want["out_rank"][rows])
        kv, kv_wanted = native.bytes(Region.KV), expected.memory.regions[Region.KV]
        one_ulp = 0 if dtype == "float32" else 2.0**-7  # of bfloat16: sums in another order may round the other way
        np.testing.assert_allclose(floats(kv, dtype), floats(kv_wanted, dtype), rtol=one_ulp, atol=tolerance)
        np.testing.assert_array_equal(np.isnan(kv.view(np.float32)), np.isnan(kv_wanted.view(np.float32)))
        np.testing.assert_array_equal(native.bytes(Region.STATE), expected.memory.regions[Region.STATE])
    native.device.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_prompt_has_the_same_bits_alone_in_chunks_and_in_company(target: str, dtype: str, tmp_path: Path) -> None:
    config = tiny_config()
    program = fused_program(config, dtype)
    low = lowered(program, target, limits=StepLimits(max_prefill_tokens=160, max_num_seqs=6, max_logit_rows=96))
    tokens, others = tiny_tokens(90, seed=5), tiny_tokens(60, seed=6)  # attention splits at position 64
    scored: dict[str, Any] = {"scored": True, "num_logprobs": 3}
    runs: dict[str, list[list[Chunk]]] = {
        "alone": [[Chunk(tokens, 0, [3, 1, 2], **scored)]],
        "in chunks": [[Chunk(tokens[i : i + 7], i, [3, 1, 2], **scored)] for i in range(0, 90, 7)],
        "in company": [
            [Chunk(others[:20], 0, [0, 2], draws=False)],
            [Chunk(others[20:21], 20, [0, 2]), Chunk(tokens[:65], 0, [6, 5, 1], **scored), Chunk(others[:9], 0, [4])],
            [Chunk(tokens[65:66], 65, [6, 5, 1], **scored), Chunk(others[21:22], 21, [0, 2])],
            [Chunk(tokens[66:], 66, [6, 5, 1], **scored), Chunk(others[:60], 0, [7, 3]), Chunk(others[9:30], 9, [4])],
        ],
    }
    bits = {}
    for (name, steps), workers in zip(runs.items(), (1, 2, 3), strict=True):
        native = NativeDevice(program, low, tiny_weights(config), tmp_path / "w.safetensors", workers)
        rows: dict[int, bytes] = {}
        for chunks in steps:
            inputs = step_inputs(program, chunks)
            out = native.run(inputs, BucketTable(low.graphs))
            firsts = inputs["cu_seqlens"]
            ours = [(firsts[i], firsts[i + 1]) for i, chunk in enumerate(chunks) if chunk.scored]
            for row, token in enumerate(inputs["logit_rows"]):
                # The last row of a chunk draws where others score the next token: compare what both report.
                if any(first <= token < last for first, last in ours):
                    rows[int(inputs["positions"][token])] = out["out_top_logprobs"][row].tobytes()
        native.device.close()
        bits[name] = rows
    assert bits["alone"] == bits["in chunks"] == bits["in company"] and len(bits["alone"]) == 90


def test_every_kernel_spec_is_in_the_built_table() -> None:
    table = {symbol: signature for symbol, signature, _ in _native.kernel_table()}
    assert {spec.symbol: spec.signature for spec in native_specs()} == table


def test_the_device_refuses_what_the_verifier_refuses() -> None:
    config = tiny_config(num_layers=1)
    low = lowered(fused_program(config), str(Target.parse(TARGETS[0])))
    device = _native.CpuDevice(1)
    for region in ("kv", "arena", "io", "state"):
        device.allocate(region, 64)
    with pytest.raises(_native.GraphError, match=r"embedding|attention_norm"):
        device.load_graph(next(iter(low.graphs.values())).encode(), low.kv_page_bytes)
    device.close()
