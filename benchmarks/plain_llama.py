"""The Llama network in plain PyTorch, with the names of transformers: the peer of a benchmark where that is missing."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """``inv_freq``: float32[d / 2], radians per position."""

    def __init__(self, frequencies: tuple[float, ...], factor: float):
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(frequencies, dtype=torch.float32), persistent=False)
        self.attention_scaling = factor

    def forward(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(length, device=self.inv_freq.device).float(), self.inv_freq)
        angles = torch.cat([angles, angles], dim=1)
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.heads, self.groups, self.dims = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dims, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.groups * self.dims, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.groups * self.dims, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dims, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.dims).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (y * cos + torch.cat([-y[..., self.dims // 2 :], y[..., : self.dims // 2]], -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(self.heads // self.groups, 1) for y in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Mlp(nn.Module):
    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c: SimpleNamespace, frequencies: tuple[float, ...], factor: float):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.rotary_emb = Rotary(frequencies, factor)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        cos, sin = self.rotary_emb(ids.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class PlainLlama(nn.Module):
    """Args: the config of tokenspeed.trainer.new_model.model_config, and what ``rope_parameters`` of
    tokenspeed.compile.derive says."""

    def __init__(self, config: Mapping[str, Any], frequencies: tuple[float, ...], factor: float):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.model = Trunk(self.config, frequencies, factor)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """``logits`` [B, L, V] of unpadded sequences."""
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids)))
