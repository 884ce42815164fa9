"""The kernel that makes a rope table on a GPU: its formula, what every target makes of it, and its place in graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import run
from test_gpu_graph import CONFIG, NUM_PAGES, GpuDevice, agree, lowered
from test_interpret_graph import mixed_steps
from tiny_artifact import tiny, write_checkpoint
from tiny_llama import MAX_MODEL_LEN, PAGE_SIZE, tiny_config, tiny_weights

from tokenspeed.artifact import Artifact
from tokenspeed.compile.build import build
from tokenspeed.compile.codegen import compile_kernels
from tokenspeed.compile.derive import rope_table_of
from tokenspeed.compile.interpret import Interpreter, step_inputs
from tokenspeed.compile.models import build_program
from tokenspeed.compile.orders import Orders
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.graph import Region
from tokenspeed.kernels.registry import Request, Stage
from tokenspeed.kernels.triton.rope_table import rope_table, specs
from tokenspeed.target import GPU_TARGETS, Target
from tokenspeed.verify_artifact import verify_graphs

ULP = 2.0**-23
"""Of cosines and sines near 1: NumPy's float32 functions, which stand in for a GPU's, are right to two of it."""


def stage_of(target: str, positions: int, head_dim: int) -> Stage:
    (spec,) = specs()
    request = Request(
        "rope_table", Target.parse(target), "bfloat16", {"num_positions": positions, "head_dim": head_dim}
    )
    (stage,) = spec.stages(request)
    return stage


@pytest.mark.parametrize(("positions", "head_dim"), [(1, 16), (300, 48), (77, 256)])
def test_computes_the_formula_and_no_row_more(positions: int, head_dim: int) -> None:
    stage = stage_of("hip:gfx942", positions, head_dim)
    assert stage.kernel is not None and not stage.programmatic
    frequencies = (10000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)
    table = np.full((positions, head_dim), 77.0, np.float32)
    given = {"inverse_frequencies": frequencies, "table": table, "attention_factor": 1.25}
    run(rope_table, stage.grid, given, dict(stage.kernel.constants), outputs={"table"}, seed=3)
    np.testing.assert_allclose(table, rope_table_of(frequencies, positions, 1.25), rtol=0, atol=3 * ULP)


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_every_target_compiles_it(name: str) -> None:
    stage = stage_of(name, 8192, 128)
    assert stage.kernel is not None
    ((_, compiled),) = compile_kernels([(stage.kernel, Target.parse(name))], workers=1).items()
    assert compiled.threads <= 256 and compiled.shared_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_read_what_the_prelude_made(dtype: str) -> None:
    config = tiny_config(**CONFIG, num_layers=1)
    made = build_program(config, dtype=dtype, max_model_len=MAX_MODEL_LEN, page_size=PAGE_SIZE,
                         orders=Orders(rope_table_device="target", layer_boundary_norm="unfused"))  # fmt: skip
    program = run_passes(made, CPU_PASSES)
    low = lowered(program, "cuda:sm_90a")
    assert low.prelude is not None and [node.symbol for node in low.prelude.nodes] == ["rope_table"]
    rounded = {node.symbol for graph in low.graphs.values() for node in graph.nodes if "linear_add" in node.symbol}
    assert rounded == {"linear_add" if dtype == "float32" else "linear_add_rounded"}
    interpreter = Interpreter(program, tiny_weights(config).__getitem__, num_pages=NUM_PAGES, num_slots=6)
    device = GpuDevice(program, low, config, NUM_PAGES)
    (table,) = low.layout.tables
    have = device.memory.read(Region.STATE, table, MAX_MODEL_LEN)
    np.testing.assert_allclose(have, interpreter.state["rope_table.memory"], rtol=0, atol=3 * ULP)
    for chunks in mixed_steps()[:4]:
        inputs = step_inputs(program, chunks)
        agree(device.run(inputs), interpreter.run(inputs), 2e-5 if dtype == "float32" else 3e-2, exact=False)
    np.testing.assert_array_equal(device.memory.read(Region.STATE, table, MAX_MODEL_LEN), have)


def test_artifacts_for_gpus_hold_the_orders(tmp_path: Path) -> None:
    """Built with no GPU: other graphs, the kernels that the orders add, and nothing else."""
    checkpoint = write_checkpoint(tmp_path / "m", tiny(num_layers=1, **CONFIG))
    limits = {"max_model_len": 64, "page_size": 32, "max_num_seqs": 1, "max_prefill_tokens": 8, "max_logit_rows": 8}
    kernels, graphs = {}, {}
    for name, orders in {
        "usual": {},
        "unfused": {"layer_boundary_norm": "unfused"},
        "target": {"rope_table_device": "target"},
    }.items():
        build(checkpoint, tmp_path / name, targets="cuda:sm_90a", dtype="bfloat16", workers=2, **limits, **orders)
        artifact = Artifact.open(tmp_path / name)
        verify_graphs(artifact)
        (section,) = artifact.manifest.targets
        kernels[name] = {binary.name for binary in section.binaries}
        graphs[name] = {entry.graph: artifact.manifest.files[entry.graph].sha256 for entry in section.buckets}
    functions = {name: {kernel.rpartition("-")[0] for kernel in of - kernels["usual"]} for name, of in kernels.items()}
    assert functions == {"usual": set(), "unfused": {"linear_add_rounded"}, "target": {"rope_table"}}
    assert not any(name.startswith("linear_add-") for name in kernels["unfused"])
    for name in ("unfused", "target"):
        assert all(digest != graphs["usual"][graph] for graph, digest in graphs[name].items())
