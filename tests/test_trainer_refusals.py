"""What the trainer refuses: models that an artifact does not compute, and calls that its kernels have no answer to."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_artifact import cli_environment
from torch import nn
from trainer_cases import artifact_of, hf_model, random_ids, write

from tokenspeed import trainer
from tokenspeed.artifact import Artifact
from tokenspeed.errors import ArtifactError, UsageError
from tokenspeed.trainer import Aligned


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.open(artifact_of(checkpoint, tmp_path_factory.mktemp("artifact") / "tiny", "float32"))


@pytest.fixture(scope="module")
def pristine(checkpoint: Path) -> Any:
    return hf_model(checkpoint)


@pytest.fixture
def model(pristine: Any) -> Any:
    return copy.deepcopy(pristine)


@pytest.fixture
def aligned(model: Any, artifact: Artifact) -> Iterator[Aligned]:
    result = trainer.align(model, artifact, threads=1)
    yield result
    result.detach()


class OtherLinear(nn.Linear):
    pass


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base


def set_config(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.config, name, value)


def replace_projection(make: Callable[[nn.Linear], nn.Module]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers[1].mlp.up_proj = make(model.model.layers[1].mlp.up_proj)

    return change


def own_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def other_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def scaled_rotation(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.5


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output)


def other_forward(model: Any) -> None:
    model.model.norm.forward = lambda x: x


def with_bias(linear: nn.Linear) -> nn.Module:
    return nn.Linear(linear.in_features, linear.out_features, bias=True)


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (own_head, r"the model has lm_head.weight of its own; the artifact's head is model.embed_tokens.weight"),
    (other_rotation, r"the rotary frequencies of model.rotary_emb.inv_freq are not the artifact's: need 8 from 1 to"),
    (scaled_rotation, r"the rotary embedding scales by 1.5 in the model and by 1.0 in the artifact"),
    (hook, r"module model.layers.0 \(LlamaDecoderLayer\) has hooks: they would not run"),
    (other_forward, r"module model.norm \(LlamaRMSNorm\) has had its forward replaced"),
    (replace_projection(LoraLinear), r"module model.layers.1.mlp.up_proj \(LoraLinear\) is a LoRA adapter"),
    (replace_projection(lambda linear: OtherLinear(48, 72, bias=False)),
     r"module model.layers.1.mlp.up_proj \(OtherLinear\) is a linear layer of its own kind"),
    (replace_projection(nn.utils.parametrizations.weight_norm),
     r"module model.layers.1.mlp.up_proj \(ParametrizedLinear\) has parametrized weights"),
    (replace_projection(with_bias),
     r"the model has a parameter model.layers.1.mlp.up_proj.bias, which the artifact does not compute with"),
    (replace_projection(lambda linear: nn.Linear(48, 80, bias=False)),
     r"parameter model.layers.1.mlp.up_proj.weight is \[80, 48\] in the model and \[72, 48\] in the artifact"),
    (lambda model: model.model.norm.half(), r"parameter model.norm.weight is torch.float16; it must be float32 or"),
    (lambda model: model.model.layers.pop(1), r"the model has no parameter model.layers.1.input_layernorm.weight"),
    (set_config("rms_norm_eps", 1e-6), r"its config's rms_norm_eps is 1e-06, the other's 1e-05"),
    (set_config("num_attention_heads", 2), r"its config's num_attention_heads is 2, the other's 4"),
    (set_config("model_type", "granite"), r"the model's config has model_type 'granite', which artifacts do not"),
    (lambda model: model.to(torch.bfloat16), r"frequencies of model.rotary_emb.inv_freq are torch.bfloat16; they must"),
    (set_config("hidden_act", "gelu"), r"its config's hidden_act is 'gelu', the other's 'silu'"),
    (set_config("sliding_window", 128), r"its config's sliding_window is 128, the other's 'none up to max_model_len"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_a_model_that_the_artifact_does_not_compute(
    model: Any, artifact: Artifact, change: Callable[[Any], Any], message: str
) -> None:
    change(model)
    with pytest.raises(UsageError, match=message):
        trainer.align(model, artifact)


def test_a_float32_in_the_config_is_the_number_that_the_artifact_has(model: Any, artifact: Artifact) -> None:
    """As transformers reads it from a GGUF file."""
    model.config.rms_norm_eps = torch.tensor(model.config.rms_norm_eps, dtype=torch.float32).item()
    assert model.config.rms_norm_eps != 1e-5
    trainer.align(model, artifact).detach()


def test_a_model_that_is_aligned_already(aligned: Aligned) -> None:
    with pytest.raises(UsageError, match=r"module of the model \(LlamaForCausalLM\) has had its forward replaced"):
        trainer.align(aligned.model, aligned.artifact)


def test_a_model_without_a_config_and_one_elsewhere(model: Any, artifact: Artifact) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.model

    with pytest.raises(UsageError, match="need a model with a config"):
        trainer.align(Bare(), artifact)
    model.to("meta").tie_weights()
    with pytest.raises(UsageError, match="the model is on meta; it must be on the CPU or on a GPU"):
        trainer.align(model, artifact)


def test_a_target_that_the_artifact_does_not_have(model: Any, artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="the artifact holds no target cpu:x86-64-v3"):
        trainer.align(model, artifact, target="cpu:x86-64-v3")


def test_an_untied_artifact_and_a_tied_model(checkpoint: Path, model: Any, tmp_path: Path) -> None:
    untied = artifact_of(write(tmp_path / "untied", tie_word_embeddings=False), tmp_path / "artifact", "float32")
    with pytest.raises(UsageError, match=r"the model ties its head to model.embed_tokens.weight; the artifact has"):
        trainer.align(model, untied)


IDS = random_ids(8)[0][None]
ZEROS = torch.zeros(1, 8, dtype=torch.long)
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"use_cache": True}, "the aligned model keeps no cache"),
    ({"past_key_values": object()}, "the aligned model has no past_key_values"),
    ({"output_hidden_states": True}, "the aligned model has no output_hidden_states"),
    ({"return_dict": False}, "the aligned model has no return_dict"),
    ({"input_ids": None}, "needs input_ids"),
    ({"input_ids": IDS[0]}, r"input_ids are torch.int64\[8\]; they must be whole numbers \[B, L\]"),
    ({"input_ids": IDS[:0]}, r"input_ids are torch.int64\[0, 8\]; they must be whole numbers \[B, L\]"),
    ({"input_ids": IDS.bool()}, r"input_ids are torch.bool\[1, 8\]; they must be whole numbers"),
    ({"input_ids": IDS + 283}, r"input_ids go from \d+ to \d+; they must be tokens below 283"),
    ({"labels": IDS + 283}, r"labels go from \d+ to \d+; they must be tokens below 283"),
    ({"labels": IDS[:, 1:]}, r"labels are \[1, 7\]; they must be \[1, 8\]"),
    ({"attention_mask": IDS[:, 1:]}, r"attention_mask is \[1, 7\]; it must be \[1, 8\]"),
    ({"attention_mask": ZEROS}, "row 0 of attention_mask has 0 tokens in 0 runs"),
    ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])}, "row 0 of attention_mask has 7 tokens in 2 runs"),
    ({"position_ids": ZEROS}, "position_ids must count the tokens of each row from 0 on"),
    ({"input_ids": random_ids(161)[0][None]}, "a sequence has 161 tokens; the artifact's max_model_len is 160"),
]


@pytest.mark.parametrize(("arguments", "message"), CALLS, ids=[text[:40] for _, text in CALLS])
def test_a_call_that_the_kernels_have_no_answer_to(aligned: Aligned, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        aligned.model(**{"input_ids": IDS, **arguments})


def test_harmless_arguments_pass(aligned: Aligned) -> None:
    with torch.no_grad():
        positions = torch.arange(8)[None]
        have = aligned.model(IDS, use_cache=False, return_dict=True, output_attentions=False, position_ids=positions)
        assert torch.equal(have.logits, aligned.model(IDS).logits)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"cu_seqlens": [0, 8], "attention_mask": torch.ones(8)}, "give one of them"),
    ({"cu_seqlens": [0, 4, 4, 8]}, "cu_seqlens must rise from 0 to the 8 tokens"),
    ({"cu_seqlens": [0, 3.5, 8]}, "cu_seqlens must rise from 0 to the 8 tokens"),
    ({"cu_seqlens": [0, 7]}, "cu_seqlens must rise from 0 to the 8 tokens"),
    ({"cu_seqlens": [0, 8], "mask": torch.ones(7)}, r"mask is \[7\]; it must be \[8\]"),
    ({}, r"input_ids are torch.int64\[8\]; they must be whole numbers \[B, L\]"),
])  # fmt: skip
def test_packed_sequences_that_do_not_fit_together(aligned: Aligned, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        aligned.logprobs(IDS[0], **arguments)
    with pytest.raises(UsageError, match=r"with cu_seqlens they must be whole numbers \[N\]"):
        aligned.logprobs(IDS, cu_seqlens=[0, 8])


def test_dropout_in_training_mode(aligned: Aligned) -> None:
    model = aligned.model.train()
    model.config.attention_dropout = 0.1
    with pytest.raises(UsageError, match=r"attention_dropout = 0.1, and the model is in training mode"):
        aligned.logprobs(IDS)
    model.eval()
    expected = aligned.logprobs(IDS)
    model.train().config.attention_dropout = 0.0
    assert torch.equal(aligned.logprobs(IDS), expected)
    model.model.layers[0].mlp.drop = nn.Dropout(0.2)
    with pytest.raises(UsageError, match=r"module model.layers.0.mlp.drop drops out with p = 0.2"):
        model(IDS)


def test_a_model_that_changed_since_it_was_aligned(aligned: Aligned) -> None:
    model = aligned.model
    mlp = model.model.layers[0].mlp
    own = mlp.up_proj.weight
    mlp.up_proj.weight = nn.Parameter(own.detach().clone())
    replaced = r"parameter model.layers.0.mlp.up_proj.weight of the model was added, removed or replaced"
    with pytest.raises(UsageError, match=replaced):
        model(IDS)
    mlp.up_proj.weight = own
    mlp.adapter = nn.Linear(4, 4, bias=False)
    with pytest.raises(UsageError, match=r"parameter model.layers.0.mlp.adapter.weight of the model was added"):
        aligned.logprobs(IDS)
    del mlp.adapter
    handle = mlp.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(UsageError, match=r"module model.layers.0.mlp \(LlamaMLP\) has hooks"):
        model(IDS)
    handle.remove()
    assert torch.isfinite(aligned.logprobs(IDS)).all()
    model.half()
    with pytest.raises(UsageError, match=r"parameter model.embed_tokens.weight became torch.float16"):
        model(IDS)


def test_copies_of_an_aligned_model(aligned: Aligned) -> None:
    """They would compute with the weights of the model that they were made of."""
    model, message = aligned.model, "an aligned model can be neither copied nor pickled"
    with pytest.raises(UsageError, match=message):
        copy.deepcopy(model)
    with pytest.raises(UsageError, match=message):
        torch.save(model, io.BytesIO())
    with aligned.own_forward():
        reference = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
        other = trainer.align(reference, aligned.artifact, threads=1)
        assert not torch.equal(model(IDS).logits, reference(IDS).logits)
    other.detach()


def test_what_comes_after_a_detach(model: Any, artifact: Artifact, tmp_path: Path) -> None:
    aligned = trainer.align(model, artifact, threads=1)
    loss = aligned.logprobs(IDS).sum()
    with aligned.own_forward():
        aligned.detach()
    assert "forward" not in vars(model)
    aligned.detach()
    for late in (
        loss.backward,
        aligned.sync,
        lambda: aligned.save_weights(tmp_path / "w"),
        lambda: aligned.forward(IDS),
    ):
        with pytest.raises(UsageError, match="the model was detached from the artifact"):
            late()
    with aligned.own_forward() as own, aligned.own_forward():
        assert own is model


def test_a_backward_after_a_step_that_torch_counts_no_versions_of(aligned: Aligned) -> None:
    model = aligned.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    kept = aligned.logprobs(IDS).sum()
    aligned.logprobs(IDS).sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="an optimizer changed the weights between forward and backward"):
        kept.backward()


def test_an_artifact_that_promises_less_says_so(
    checkpoint: Path, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto = artifact_of(checkpoint, tmp_path / "auto", "float32", numerics="auto")
    aligned = trainer.align(model, auto)
    assert not aligned.promised and "was built with --numerics auto" in caplog.text
    aligned.detach()


@pytest.mark.parametrize(("module", "name"), [("torch", "PyTorch"), ("numpy", "numpy")])
def test_the_package_without_what_it_needs(module: str, name: str) -> None:
    """It resolves on first use, and says what it needs."""
    program = (
        f"import sys, tokenspeed; assert 'torch' not in sys.modules; sys.modules[{module!r}] = None; tokenspeed.trainer"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=cli_environment())
    assert done.stderr.endswith(
        f"ModuleNotFoundError: tokenspeed.trainer needs {name}: install it with `pip install 'tokenspeed[trainer]'`\n"
    )
