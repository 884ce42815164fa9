"""A GPU graph whose log-probabilities are folded in shards, through the Triton interpreter, against the Program."""

from __future__ import annotations

from test_gpu_graph import CONFIG, NUM_PAGES, GpuDevice, agree, lowered
from test_interpret_graph import mixed_steps
from tiny_llama import MAX_MODEL_LEN, PAGE_SIZE, tiny_config, tiny_weights

from tokenspeed.compile.interpret import Interpreter, step_inputs
from tokenspeed.compile.models import build_program
from tokenspeed.compile.orders import Orders
from tokenspeed.compile.passes import CPU_PASSES, run_passes


def test_a_folded_graph_agrees_with_the_program_interpreter() -> None:
    config = tiny_config(**CONFIG, num_layers=1, vocab_size=111)
    program = build_program(
        config, dtype="float32", max_model_len=MAX_MODEL_LEN, page_size=PAGE_SIZE, orders=Orders(logprob_shards=3)
    )
    program = run_passes(program, CPU_PASSES)
    low = lowered(program, "cuda:sm_90a")
    for graph in low.graphs.values():
        stages = [node.name for node in graph.nodes if node.name.startswith("sample/")]
        assert stages == ["sample/scan", "sample/rank", "sample/fold", "sample/finish"]
    interpreter = Interpreter(program, tiny_weights(config).__getitem__, num_pages=NUM_PAGES, num_slots=6)
    device = GpuDevice(program, low, config, NUM_PAGES)
    for seed, chunks in enumerate(mixed_steps()):
        inputs = step_inputs(program, chunks)
        agree(device.run(inputs, seed), interpreter.run(inputs), 2e-5, exact=True)
