"""The interpreter: chunks, pages, batches and modes agree; the sampler; the real model against its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import MAX_MODEL_LEN, PAGE_SIZE, tiny_config, tiny_program, tiny_tokens, tiny_weights

from tokenspeed.compile.checkpoint import ModelConfig, open_checkpoint
from tokenspeed.compile.interpret import EVALUATORS, Chunk, Interpreter, round_bfloat16, run_prompt, step_inputs
from tokenspeed.compile.models import build_program
from tokenspeed.compile.ops import SCHEMAS
from tokenspeed.compile.passes import CPU_PASSES, run_passes
from tokenspeed.compile.sampler import draw, kept_tokens, philox4x32_10, sample_rows, score, uniforms
from tokenspeed.errors import EnvelopeError, ProgramError


def plain_llama(config: ModelConfig, weights: dict[str, Any], tokens: list[int]) -> Any:
    """Logits of every position, written out directly in float64: no pages, no Program."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    n, d, kv = len(tokens), config.head_dim, config.num_kv_heads
    angles = np.outer(np.arange(n), config.rope_theta ** (-np.arange(0, d, 2) / d))
    turn = np.exp(1j * angles)[:, None]

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * w[name + ".weight"]

    def rotate(x: Any) -> Any:
        turned = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    h = w["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        x = norm(h, f"{at}.input_layernorm")
        q, k, v = ((x @ w[f"{at}.self_attn.{p}_proj.weight"].T).reshape(n, -1, d) for p in "qkv")
        k, v = (np.repeat(t, config.num_heads // kv, axis=1) for t in (rotate(k), v))
        scores = np.einsum("ihd,jhd->hij", rotate(q), k) / np.sqrt(d) + np.triu(np.full((n, n), -np.inf), 1)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
        h = h + attended @ w[f"{at}.self_attn.o_proj.weight"].T
        x = norm(h, f"{at}.post_attention_layernorm")
        gate, up = (x @ w[f"{at}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return norm(h, "model.norm") @ w[head].T


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"num_kv_heads": 4}, {"num_kv_heads": 1}])
def test_a_prompt_gives_the_logits_of_the_formulas(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    weights, tokens = tiny_weights(config), tiny_tokens(50)
    expected = plain_llama(config, weights, tokens)
    for mode, tolerance in (("float64", 2e-6), ("float32", 2e-5)):  # float64 still reads a float32 rope table
        logits = run_prompt(tiny_program(config), weights.__getitem__, tokens, mode=mode)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)


def test_bfloat16_mode_rounds_and_stays_near() -> None:
    config = tiny_config()
    weights, tokens = tiny_weights(config), tiny_tokens(40)
    program = tiny_program(config, "bfloat16")
    exact = run_prompt(program, weights.__getitem__, tokens, mode="float64")
    rounded = run_prompt(program, weights.__getitem__, tokens)
    error = np.abs(rounded - exact).max()
    assert 1e-3 < error < 0.2, error
    interpreter = Interpreter(program, weights.__getitem__, num_pages=2, num_slots=1)
    kept = interpreter.run(step_inputs(program, [Chunk(tokens, 0, [0, 1])]), keep=["layers.0.gated", "logits"])
    np.testing.assert_array_equal(kept["layers.0.gated"], round_bfloat16(kept["layers.0.gated"]))
    assert (kept["logits"] != round_bfloat16(kept["logits"])).any()


def test_a_bfloat16_mode_needs_a_bfloat16_program() -> None:
    config = tiny_config()
    with pytest.raises(ProgramError, match="need an interpreter mode that a float32 Program has, have 'bfloat16'"):
        run_prompt(tiny_program(config), tiny_weights(config).__getitem__, [1], mode="bfloat16")


@settings(max_examples=15, deadline=None)
@given(chunk_size=st.integers(1, 70), length=st.integers(2, 70), fused=st.booleans())
def test_chunks_do_not_matter(chunk_size: int, length: int, fused: bool) -> None:
    config = tiny_config(num_layers=1)
    weights, tokens = tiny_weights(config), tiny_tokens(length)
    program = tiny_program(config)
    whole = run_prompt(program, weights.__getitem__, tokens, mode="float64")
    other = run_passes(program, CPU_PASSES) if fused else program
    chunked = run_prompt(other, weights.__getitem__, tokens, mode="float64", chunk_size=chunk_size)
    np.testing.assert_allclose(chunked, whole, rtol=0, atol=1e-12)


def test_mixed_steps_on_scattered_pages_match_each_sequence_alone() -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    program = run_passes(tiny_program(config), CPU_PASSES)
    first, second = tiny_tokens(70, seed=2), tiny_tokens(40, seed=3)
    interpreter = Interpreter(program, weights.__getitem__, num_pages=8, num_slots=4, mode="float64")
    pages = ([6, 1, 3], [4, 2])
    interpreter.run(step_inputs(program, [Chunk(first[:60], 0, pages[0], draws=False)]))
    # A decode of the first sequence beside a whole prefill of the second, then two decodes.
    mixed = [Chunk(first[60:61], 60, pages[0]), Chunk(second[:39], 0, pages[1], scored=True)]
    together = interpreter.run(step_inputs(program, mixed), keep=["logits"])["logits"]
    decodes = [Chunk(first[61:62], 61, pages[0]), Chunk(second[39:], 39, pages[1])]
    after = interpreter.run(step_inputs(program, decodes), keep=["logits"])["logits"]
    alone = [run_prompt(program, weights.__getitem__, tokens, mode="float64") for tokens in (first, second)]
    np.testing.assert_allclose(together[0], alone[0][60], rtol=0, atol=1e-12)
    np.testing.assert_allclose(together[1:], alone[1][:39], rtol=0, atol=1e-12)
    np.testing.assert_allclose(after, [alone[0][61], alone[1][39]], rtol=0, atol=1e-12)


def test_decode_inputs_come_from_the_last_token_table() -> None:
    config = tiny_config()
    weights, tokens = tiny_weights(config), tiny_tokens(9)
    program = tiny_program(config)
    interpreter = Interpreter(program, weights.__getitem__, num_pages=3, num_slots=4)
    drawn = int(interpreter.run(step_inputs(program, [Chunk(tokens, 0, [0], slot=2)]))["out_token"][0])
    assert interpreter.state["last_tokens"].tolist() == [0, 0, drawn, 0]
    by_slot = interpreter.run(step_inputs(program, [Chunk([-1 - 2], 9, [0])]), keep=["logits"])["logits"]
    by_token = interpreter.run(step_inputs(program, [Chunk([drawn], 9, [0])]), keep=["logits"])["logits"]
    np.testing.assert_array_equal(by_slot, by_token)


def test_scored_rows_report_the_log_probability_of_the_next_token() -> None:
    config = tiny_config()
    weights, tokens = tiny_weights(config), tiny_tokens(12)
    program = tiny_program(config)
    interpreter = Interpreter(program, weights.__getitem__, num_pages=1, num_slots=1, mode="float64")
    out = interpreter.run(step_inputs(program, [Chunk(tokens, 0, [0], scored=True, num_logprobs=3)]), keep=["logits"])
    logits = out["logits"]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_array_equal(out["out_token"][:-1], tokens[1:])
    np.testing.assert_allclose(out["out_logprob"][:-1], logprobs[np.arange(11), tokens[1:]], rtol=1e-6)
    np.testing.assert_array_equal(out["out_top_ids"][:, :3], np.argsort(-logits)[:, :3])
    assert out["out_token"][-1] == logits[-1].argmax() and out["out_rank"][-1] == 1
    assert (out["out_top_ids"][:, 3:] == -1).all() and np.isneginf(out["out_top_logprobs"][:, 3:]).all()


def test_a_step_input_of_the_wrong_shape_is_refused() -> None:
    config = tiny_config(num_layers=1)
    program = tiny_program(config)
    interpreter = Interpreter(program, tiny_weights(config).__getitem__, num_pages=1, num_slots=1)
    inputs = step_inputs(program, [Chunk([1, 2, 3], 0, [0])])
    with pytest.raises(ProgramError, match=r"'positions': need 3 for num_tokens, have \(2,\)"):
        interpreter.run({**inputs, "positions": inputs["positions"][:2]})
    with pytest.raises(ProgramError, match=r"'seed': need uint64\[num_logit_rows\], have int64\(1,\)"):
        interpreter.run({**inputs, "seed": inputs["seed"].astype(np.int64)})
    with pytest.raises(ProgramError, match="'cu_seqlens': need num_seqs"):
        interpreter.run({**inputs, "cu_seqlens": inputs["cu_seqlens"][:1]})
    with pytest.raises(ProgramError, match=r"'top_k' is missing: need int32\[num_logit_rows\]"):
        interpreter.run({name: array for name, array in inputs.items() if name != "top_k"})


def test_a_weight_of_the_wrong_shape_is_refused() -> None:
    config = tiny_config(num_layers=1)
    weights = tiny_weights(config)
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    with pytest.raises(ProgramError, match=r"'model.norm.weight': need shape \(48,\), have \(47,\)"):
        run_prompt(tiny_program(config), weights.__getitem__, [1])


def test_every_kind_of_op_has_an_evaluator() -> None:
    assert set(EVALUATORS) == set(SCHEMAS)


def test_a_sliding_window_is_refused_beyond_its_length() -> None:
    config = tiny_config(sliding_window=64)
    with pytest.raises(EnvelopeError, match=r"sliding window of 64 positions.*max_model_len is 96.*64 or less"):
        tiny_program(config)
    build_program(config, dtype="float32", max_model_len=64, page_size=PAGE_SIZE)
    assert MAX_MODEL_LEN == 96


# The sampler.


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: tuple[int, int], words: list[int]) -> None:
    assert philox4x32_10(np.array([counter], np.uint32), key)[0].tolist() == words


def test_uniforms_are_open_and_keyed_by_seed_and_position() -> None:
    u = uniforms(seed=2**63 + 5, draw_position=17, count=10_001)
    assert u.min() > 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01
    np.testing.assert_array_equal(u[:50], uniforms(2**63 + 5, 17, 50))
    assert (u[:50] != uniforms(2**63 + 5, 18, 50)).all() and (u[:50] != uniforms(5, 17, 50)).all()


DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3, "draw_position": 0}


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4]))
    draws = [draw(logits, **{**DEFAULTS, "draw_position": position}) for position in range(4000)]
    shares = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=0.03)
    limited = {draw(logits, **{**DEFAULTS, "draw_position": position, "top_k": 2}) for position in range(200)}
    assert limited == {2, 3}


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert draw(np.array([1.0, 5.0, 5.0, 2.0]), **{**DEFAULTS, "temperature": 0.0}) == 1


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, [3, 2, 1, 0]),
        ({"top_k": 1}, [3]),
        ({"top_k": 9}, [3, 2, 1, 0]),
        ({"top_p": 0.7}, [3, 2]),
        ({"top_p": 0.71}, [3, 2, 1]),
        ({"top_p": 1e-9}, [3]),
        ({"top_k": 2, "top_p": 0.5}, [3]),
        ({"min_p": 0.7}, [3, 2]),
        ({"min_p": 1.0}, [3]),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.6}, [3, 2]),
    ],
)
def test_limits_keep_the_right_tokens(limits: dict[str, Any], kept: list[int]) -> None:
    scaled = np.log(np.array([0.1, 0.2, 0.3, 0.400001]))
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
    assert kept_tokens(scaled, scaled - scaled.max(), **options).tolist() == kept


def test_ties_rank_and_list_lower_ids_first() -> None:
    scores = score(np.array([0.0, 2.0, 1.0, 2.0]), token=3, num_top=3)
    assert scores.rank == 2 and scores.top_ids.tolist() == [1, 3, 2]


def test_rows_with_nan_or_without_a_finite_maximum_still_give_a_token() -> None:
    nan, inf = np.nan, np.inf
    assert draw(np.array([nan, 1.0, nan, 0.0]), **{**DEFAULTS, "top_k": 1}) == 1
    assert draw(np.array([nan, -inf, nan]), **DEFAULTS) == 0
    assert draw(np.array([0.0, inf, inf]), **DEFAULTS) == 1
    assert np.isnan(score(np.array([nan, nan]), token=0, num_top=1).logprob)


def test_a_row_is_drawn_the_same_in_any_company() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 300)).astype(np.float32)
    rows = {
        "logit_target": np.full(5, -1), "temperature": np.full(5, 0.9), "top_p": np.full(5, 0.95),
        "min_p": np.full(5, 0.01), "top_k": np.full(5, 50), "seed": np.arange(5, dtype=np.uint64),
        "draw_position": np.arange(5) + 7, "num_logprobs": np.full(5, -1), "state_slot": np.full(5, -1),
        "adjustment": np.array([-1, 1, -1, 0, -1]),
    }  # fmt: skip
    adjusted = rng.standard_normal((2, 300)).astype(np.float32)
    together = sample_rows(logits, adjusted, rows, np.zeros(1, np.int32))[0]
    alone = [
        sample_rows(logits[r : r + 1], adjusted, {k: v[r : r + 1] for k, v in rows.items()}, np.zeros(1, np.int32))[0][
            0
        ]
        for r in range(5)
    ]
    assert together.tolist() == alone


# The real model.


def test_smollm2_prompt_logprobs_match_the_reference(smollm2_gguf: Path, smollm2_reference: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    results = sorted(smollm2_reference["ref_fp32"]["results"], key=lambda result: len(result["prompt_token_ids"]))[:3]
    program = run_passes(
        build_program(checkpoint.config, dtype="float32", max_model_len=2048, page_size=64), CPU_PASSES
    )
    interpreter = Interpreter(program, checkpoint.read, num_pages=3, num_slots=1)
    for result in results:
        tokens = result["prompt_token_ids"]
        out = interpreter.run(step_inputs(program, [Chunk(tokens, 0, range(3), scored=True, num_logprobs=5)]))
        expected = [entry["logprob"] for entry in result["prompt_logprobs"][1:]]
        np.testing.assert_allclose(out["out_logprob"][:-1], expected, rtol=0, atol=2e-3)
        assert out["out_rank"][:-1].tolist() == [entry["rank"] for entry in result["prompt_logprobs"][1:]]
        assert out["out_token"][-1] == result["output_token_ids"][0]
        assert abs(out["out_logprob"][-1] - result["output_logprobs"][0]) < 2e-3
        assert out["out_top_ids"][-1, :5].tolist() == [token for token, _ in result["top5"][0]]
