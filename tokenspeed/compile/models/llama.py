"""The Llama family: Llama 2 and 3, Mistral, SmolLM2 and all that share their block.

h = embed(tokens); each layer: h += attention(norm(h)); h += swiglu(norm(h)); logits = norm(h) @ lm_head.T.
Attention is rotary and grouped-query; weights carry the names of the Hugging Face checkpoint.
The rows that need logits are gathered once the last attention has read the KV pages, so that the last MLP, the
final norm and the LM head run for no other token.
"""

from __future__ import annotations

from tokenspeed.compile.checkpoint import EMBEDDING, LM_HEAD, ModelConfig
from tokenspeed.compile.ops import ADJUST_OPERANDS, SAMPLE_OPERANDS, Attrs, round_up
from tokenspeed.compile.orders import DEFAULT_ORDERS, Orders
from tokenspeed.compile.program import Op, Program, ProgramBuilder, Source
from tokenspeed.compile.rope import MAX_ANGLE, attention_factor, inverse_frequencies
from tokenspeed.errors import EnvelopeError
from tokenspeed.step import OUTPUTS


def build_llama(
    config: ModelConfig,
    *,
    dtype: str,
    max_model_len: int,
    page_size: int,
    penalties: bool = True,
    orders: Orders = DEFAULT_ORDERS,
) -> Program:
    """The model-level Program of a Llama-family checkpoint.

    ``dtype`` is the program dtype; ``max_model_len`` counts the positions of the longest sequence: rows of the
    rope table, and of page tables in pages of ``page_size``. Without ``penalties`` no tokens are counted. A sum that
    ``orders`` has rounded to float32 is rounded already.
    """
    _refuse_sliding_window(config, max_model_len)
    b = ProgramBuilder(config.architecture, _metadata(config, dtype, max_model_len, page_size))
    b.step_inputs(pages_per_seq=round_up(max_model_len, page_size) // page_size, vocab_size=config.vocab_size)
    b.state("last_tokens", "int32", ("num_slots",))
    b.state("token_counts", "int32", ("num_slots" if penalties else 1, config.vocab_size))
    _rope_table(b, config, max_model_len, orders.rope_table_device)
    embed = b.weight(EMBEDDING, (config.vocab_size, config.hidden_size))
    rounded = int(orders.layer_boundary_norm == "unfused" and dtype != "float32")
    h = b.op("embedding", "embedding", "token_ids", "last_tokens", embed)
    for layer in range(config.num_layers):
        h = _attention(b, config, layer, page_size, h, rounded)
        if layer == config.num_layers - 1:
            h = b.op("gather_rows", "logit_rows_hidden", h, "logit_rows")
        h = _mlp(b, config, layer, h, rounded)
    h = _norm(b, config, "model.norm", "final_norm", h)
    lm_head = embed
    if not config.tie_word_embeddings:
        lm_head = b.weight(LM_HEAD, (config.vocab_size, config.hidden_size))
    logits = b.op("linear", "logits", h, lm_head)
    adjusted = b.op("adjust_logits", "adjust_logits", logits, "token_ids", "last_tokens", "positions", "cu_seqlens",
                    *ADJUST_OPERANDS, "token_masks", "token_counts",
                    results=["adjusted_logits", "token_counts.next"])  # fmt: skip
    outputs = [tensor.name for tensor in OUTPUTS]
    b.op("sample", "sample", logits, adjusted, *SAMPLE_OPERANDS, "last_tokens",
         results=[*outputs, "last_tokens.next"], logprob_shards=orders.logprob_shards)  # fmt: skip
    return b.finish(outputs)


def _attention(b: ProgramBuilder, config: ModelConfig, layer: int, page_size: int, h: str, rounded: int) -> str:
    """h + o_proj(attention(norm(h)))"""
    path, at = f"model.layers.{layer}", f"layers.{layer}"
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    x = _norm(b, config, f"{path}.input_layernorm", f"{at}.attention_norm", h)
    q = _linear(b, f"{path}.self_attn.q_proj", f"{at}.q", x, config.hidden_size, heads * head_dim)
    k = _linear(b, f"{path}.self_attn.k_proj", f"{at}.k", x, config.hidden_size, kv_heads * head_dim)
    v = _linear(b, f"{path}.self_attn.v_proj", f"{at}.v", x, config.hidden_size, kv_heads * head_dim)
    q = b.op("rope", f"{at}.q_rotated", q, "rope_table", "positions", head_dim=head_dim)
    k = b.op("rope", f"{at}.k_rotated", k, "rope_table", "positions", head_dim=head_dim)
    kv = b.state(f"kv.{layer}", b.dtype, ("num_pages", 2, kv_heads, page_size, head_dim))
    kv = b.op("kv_write", f"kv.{layer}.next", kv, k, v, "slot_mapping", num_kv_heads=kv_heads, head_dim=head_dim)
    a = b.op("paged_attention", f"{at}.attention", q, kv, "cu_seqlens", "context_lens", "page_table",
             num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)  # fmt: skip
    o = _linear(b, f"{path}.self_attn.o_proj", f"{at}.o", a, heads * head_dim, config.hidden_size)
    return b.op("add", f"{at}.attention_residual", h, o, rounded=rounded)


def _mlp(b: ProgramBuilder, config: ModelConfig, layer: int, h: str, rounded: int) -> str:
    """h + down_proj(silu(gate_proj(norm(h))) * up_proj(norm(h)))"""
    path, at = f"model.layers.{layer}", f"layers.{layer}"
    x = _norm(b, config, f"{path}.post_attention_layernorm", f"{at}.mlp_norm", h)
    gate = _linear(b, f"{path}.mlp.gate_proj", f"{at}.gate", x, config.hidden_size, config.intermediate_size)
    up = _linear(b, f"{path}.mlp.up_proj", f"{at}.up", x, config.hidden_size, config.intermediate_size)
    gated = b.op("mul", f"{at}.gated", b.op("silu", f"{at}.gate_silu", gate), up)
    down = _linear(b, f"{path}.mlp.down_proj", f"{at}.down", gated, config.intermediate_size, config.hidden_size)
    return b.op("add", f"{at}.mlp_residual", h, down, rounded=rounded)


def _norm(b: ProgramBuilder, config: ModelConfig, path: str, name: str, x: str) -> str:
    weight = b.weight(f"{path}.weight", (config.hidden_size,), "float32")
    return b.op("rms_norm", name, x, weight, eps=float(config.rms_norm_eps))


def _linear(b: ProgramBuilder, path: str, name: str, x: str, features_in: int, features_out: int) -> str:
    return b.op("linear", name, x, b.weight(f"{path}.weight", (features_out, features_in)))


def _rope_table(b: ProgramBuilder, config: ModelConfig, max_model_len: int, device: str) -> None:
    """The value ``rope_table``: a weight that is made at build, or what the target makes of the frequencies."""
    frequencies = tuple(map(float, inverse_frequencies(config)))
    factor = attention_factor(config)
    shape = max_model_len, config.head_dim
    if device == "cpu":
        attrs = Attrs({"inverse_frequencies": frequencies, "attention_factor": factor})
        b.weight("rope_table", shape, "float32", Source("rope_table", (), attrs))
        return
    if (largest := max(frequencies) * (max_model_len - 1)) >= MAX_ANGLE:
        raise EnvelopeError(
            f"rope_table_device = target needs angles below {MAX_ANGLE} radians, and position {max_model_len - 1} has"
            f" one of {largest:.0f}",
            hint="build with a smaller --max-model-len, or with --rope-table-device cpu",
        )
    source = Source("rope_frequencies", (), Attrs({"inverse_frequencies": frequencies}))
    weight = b.weight("rope_frequencies", (len(frequencies),), "float32", source)
    memory = b.state("rope_table.memory", "float32", shape)
    attrs = Attrs({"attention_factor": factor})
    b.append_prelude(Op("rope_table", "rope_table", (weight, memory), ("rope_table",), attrs))


def _metadata(config: ModelConfig, dtype: str, max_model_len: int, page_size: int) -> dict[str, int | str]:
    return {
        "architecture": config.architecture, "dtype": dtype, "max_model_len": max_model_len, "page_size": page_size,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_layers": config.num_layers,
        "num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim,
    }  # fmt: skip


def _refuse_sliding_window(config: ModelConfig, max_model_len: int) -> None:
    """A window that no sequence can outgrow is full attention; any other would be served wrongly."""
    if config.sliding_window and max_model_len > config.sliding_window:
        raise EnvelopeError(
            f"the checkpoint attends over a sliding window of {config.sliding_window} positions, "
            f"which is supported up to that length; max_model_len is {max_model_len}",
            hint=f"build with max_model_len {config.sliding_window} or less",
        )
