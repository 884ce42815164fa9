"""A model that is aligned: its bits against the engine's, its gradients against autograd's in float64."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_cases import (
    LIMITS,
    MISTRAL,
    artifact_of,
    bounds,
    hf_model,
    open_engine,
    padded,
    prompt_logprobs,
    random_ids,
    rollouts,
    write,
)

from tokenspeed import trainer
from tokenspeed.compile.derive import rope_parameters
from tokenspeed.compile.program import Program
from tokenspeed.errors import UsageError
from tokenspeed.trainer import Aligned
from tokenspeed.trainer.new_model import load_weights, model_config

LENGTHS = (37, 5, 64, 1, 23, 2, 48, 16, 16, 3)
"""Several steps, one of them full to the last token; a sequence of one token has nothing to score."""
CLOSE = 5e-6
"""Of a float32 gradient against float64's, by norm."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    untied = {"tie_word_embeddings": False, "intermediate_size": 80, "num_kv_heads": 1}
    tied = write(folder / "tied")
    return {"tied": tied, "mistral": write(folder / "mistral", MISTRAL, **untied), "other orders": tied}


@pytest.fixture(scope="module")
def artifacts(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    built = {
        pair: artifact_of(checkpoints[pair[0]], folder / "-".join(pair), pair[1])
        for pair in [("tied", "float32"), ("tied", "bfloat16"), ("mistral", "float32")]
    }
    orders = {"layer_boundary_norm": "unfused", "rope_table_device": "target", "logprob_order": "megatron",
              "logprob_shards": 283, "page_size": 32, "split_positions": 32}  # fmt: skip
    built["other orders", "bfloat16"] = artifact_of(checkpoints["tied"], folder / "orders", "bfloat16", **orders)
    return built


@pytest.fixture
def aligned(checkpoints: dict[str, Path], artifacts: dict[tuple[str, str], Path]) -> Iterator[Aligned]:
    result = trainer.align(hf_model(checkpoints["tied"]), artifacts["tied", "float32"], threads=2)
    yield result
    result.detach()


def pack(sequences: list[Tensor]) -> dict[str, Any]:
    return {"input_ids": torch.cat(sequences), "cu_seqlens": bounds(sequences)}


@pytest.mark.parametrize(("name", "dtype"), [
    ("tied", "float32"), ("tied", "bfloat16"), ("mistral", "float32"), ("other orders", "bfloat16"),
])  # fmt: skip
def test_logprobs_are_the_engines_to_the_bit(
    checkpoints: dict[str, Path], artifacts: dict[tuple[str, str], Path], name: str, dtype: str
) -> None:
    """Of prompts, and of tokens that the engine drew itself; whatever the packing, and with gradients or without."""
    sequences = random_ids(*LENGTHS)
    with open_engine(artifacts[name, dtype]) as engine:
        expected = torch.cat(prompt_logprobs(engine, sequences))
        rolled = rollouts(engine, sequences[:4], 50)
    aligned = trainer.align(hf_model(checkpoints[name]), artifacts[name, dtype], threads=1)
    assert aligned.promised
    have = aligned.logprobs(**pack(sequences))
    assert have.dtype == torch.float32 and have.requires_grad and have.unique().numel() > 100
    assert torch.equal(have, expected)
    with torch.no_grad():
        for side in ("left", "right"):
            ids, mask = padded(sequences, side)
            both = aligned.logprobs(ids, mask)
            assert torch.equal(both[mask.bool()], expected) and not both[~mask.bool()].any()
        for tokens, drawn in rolled:
            assert torch.equal(aligned.logprobs(tokens[None])[0, -len(drawn) :], drawn)
    aligned.detach()


def test_a_sequence_longer_than_a_step_has_the_engines_bits(aligned: Aligned) -> None:
    sequences = random_ids(7, 150, 160, 30, seed=3)
    with open_engine(Path(aligned.artifact.path)) as engine:
        expected = torch.cat([*prompt_logprobs(engine, sequences[:2]), *prompt_logprobs(engine, sequences[3:])])
    with torch.no_grad():
        have = aligned.logprobs(**pack(sequences))
    assert torch.equal(torch.cat([have[:157], have[317:]]), expected)
    message = r"sequence 1 has 150 tokens: gradients need whole sequences in a step, .* max_prefill_tokens = 64"
    with pytest.raises(UsageError, match=message):
        aligned.logprobs(**pack(sequences))


def test_a_mask_leaves_out_tokens_and_changes_no_other(aligned: Aligned) -> None:
    sequences = random_ids(*LENGTHS)
    mask = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(1)) < 0.3
    whole, some = aligned.logprobs(**pack(sequences)), aligned.logprobs(**pack(sequences), mask=mask)
    assert torch.equal(some, torch.where(mask, whole, 0.0))
    nothing = aligned.logprobs(**pack(sequences), mask=torch.zeros_like(mask))
    nothing.sum().backward()
    assert not nothing.any() and all(p.grad is None for p in aligned.model.parameters())


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.double().clone() for name, p in model.named_parameters()}


def reference(model: Any, sequences: list[Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Gradients of sum(weights * logprobs) by autograd, in float64, sequence by sequence."""
    twin, begin = copy.deepcopy(model).double(), 0
    for ids in sequences:
        logprobs = twin(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        if len(ids) > 1:
            (logprobs * weights[begin + 1 : begin + len(ids)]).sum().backward()
        begin += len(ids)
    return gradients(twin)


@pytest.mark.parametrize(("name", "dtype", "close"), [
    ("tied", "float32", CLOSE), ("mistral", "float32", CLOSE), ("tied", "bfloat16", 0.03),
    ("other orders", "bfloat16", 0.03),
])  # fmt: skip
def test_gradients_are_those_of_autograd_in_float64(
    checkpoints: dict[str, Path], artifacts: dict[tuple[str, str], Path], name: str, dtype: str, close: float
) -> None:
    """Over several steps and groups of rows; every parameter, of tied embeddings the sum of both."""
    model, sequences = hf_model(checkpoints[name]), random_ids(*LENGTHS)
    weights = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = reference(model, sequences, weights)
    aligned = trainer.align(model, artifacts[name, dtype], threads=2)
    (aligned.logprobs(**pack(sequences)) * weights).sum().backward()
    have = gradients(model)
    assert have.keys() == expected.keys()
    for parameter, grad in have.items():
        assert (grad - expected[parameter]).norm() <= close * expected[parameter].norm(), parameter
    aligned.detach()


def test_calling_the_model_gives_logits_and_loss_with_gradients(aligned: Aligned) -> None:
    """Against transformers in float64: outputs, and gradients of a sum of loss and logits."""
    model = aligned.model
    ids, mask = padded(random_ids(20, 33, 8), "right")
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :7] = -100
    with aligned.own_forward():
        twin = copy.deepcopy(model).double()
    expected, have = (m(input_ids=ids, attention_mask=mask, labels=labels) for m in (twin, model))
    assert type(have) is type(expected)
    present = mask.bool()
    assert (have.logits - expected.logits)[present].abs().max() < 1e-4 and not have.logits[~present].any()
    assert abs(have.loss.item() - expected.loss.item()) < 1e-5
    for out in (expected, have):
        (out.loss + 0.1 * out.logits[present].square().mean()).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= CLOSE * q.grad.norm(), name
    with torch.no_grad():
        last = model(input_ids=ids[:1, :20], logits_to_keep=1)
        whole = model(ids[:1, :20])
        some = model(ids[:1, :20], logits_to_keep=torch.tensor([3, 5]))
        assert last.loss is None and torch.equal(last.logits, whole.logits[:, -1:])
        assert torch.equal(some.logits, whole.logits[:, [3, 5]])
        logprobs = whole.logits.double().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:20, None]).squeeze(1)
        assert (logprobs - aligned.logprobs(ids[:1, :20])[0, 1:]).abs().max() < 1e-6
        halves = [model(ids, attention_mask=mask, labels=labels, num_items_in_batch=n).loss for n in (50, 100)]
        assert torch.allclose(halves[0], 2 * halves[1])


def test_weights_that_an_optimizer_changed_are_the_next_forwards(
    aligned: Aligned, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """And the file that they are saved to holds what a build from them would."""
    model, sequences = aligned.model, random_ids(30, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = aligned.logprobs(**pack(sequences))
    before.sum().backward()
    optimizer.step()
    changed = aligned.logprobs(**pack(sequences))
    assert not torch.equal(changed, before)
    model.save_pretrained(tmp_path / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "checkpoint" / name).write_bytes((checkpoints["tied"] / name).read_bytes())
    rebuilt = artifact_of(tmp_path / "checkpoint", tmp_path / "artifact", "float32")
    with open_engine(rebuilt) as engine:
        assert torch.equal(changed, torch.cat(prompt_logprobs(engine, sequences)))
    file = aligned.save_weights(tmp_path / "weights.safetensors")
    (built,) = (rebuilt / "weights").iterdir()
    assert file.read_bytes() == built.read_bytes() and [p.name for p in tmp_path.glob(".*")] == []
    aligned.load_weights()
    assert torch.equal(aligned.logprobs(**pack(sequences)), before)


def test_a_fused_optimizers_steps_are_the_next_forwards(aligned: Aligned) -> None:
    """They write to the parameters without counting their versions."""
    ids, before = random_ids(20)[0][None], copy.deepcopy(aligned.model.state_dict())
    versions = [p._version for p in aligned.model.parameters()]
    optimizer = torch.optim.AdamW(aligned.model.parameters(), lr=1e-2, fused=True)
    old = aligned.logprobs(ids)
    old.sum().backward()
    optimizer.step()
    assert [p._version for p in aligned.model.parameters()] == versions, "what this test is about"
    new = aligned.logprobs(ids)
    aligned.sync()
    assert torch.equal(new, aligned.logprobs(ids)) and not torch.equal(new, old)
    aligned.model.load_state_dict(before)
    assert torch.equal(aligned.logprobs(ids), old)


def test_weights_written_behind_torchs_back_need_sync(aligned: Aligned) -> None:
    sequences = random_ids(30)
    with torch.no_grad():
        before = aligned.logprobs(**pack(sequences))
        aligned.model.model.norm.weight.data.mul_(2.0)
        assert torch.equal(aligned.logprobs(**pack(sequences)), before)
        aligned.sync()
        assert not torch.equal(aligned.logprobs(**pack(sequences)), before)


def test_a_backward_after_the_weights_have_changed_is_refused(aligned: Aligned) -> None:
    logprobs = aligned.logprobs(**pack(random_ids(30)))
    with torch.no_grad():
        aligned.model.model.norm.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_two_forwards_before_their_backwards_do_not_disturb_one_another(aligned: Aligned) -> None:
    one, other = random_ids(30, 20), random_ids(25, 60, seed=9)
    losses = [aligned.logprobs(**pack(sequences)).sum() for sequences in (one, other)]
    for loss in losses:
        loss.backward()
    together = gradients(aligned.model)
    aligned.model.zero_grad()
    for sequences in (one, other):
        aligned.logprobs(**pack(sequences)).sum().backward()
    for name, grad in gradients(aligned.model).items():
        assert (grad - together[name]).norm() <= 1e-6 * grad.norm(), name


def test_autocast_changes_neither_bits_nor_gradients(aligned: Aligned) -> None:
    sequences = random_ids(30, 20)
    own = aligned.logprobs(**pack(sequences))
    own.sum().backward()
    expected = gradients(aligned.model)
    aligned.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        low = aligned.logprobs(**pack(sequences))
        low.sum().backward()
    assert torch.equal(low, own)
    for name, grad in gradients(aligned.model).items():
        assert (grad - expected[name]).norm() <= 1e-6 * grad.norm(), name


def test_frozen_parameters_get_no_gradient(aligned: Aligned) -> None:
    frozen = [p for name, p in aligned.model.named_parameters() if ".mlp." not in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    aligned.logprobs(**pack(random_ids(30))).sum().backward()
    assert all(p.grad is None for p in frozen)
    assert all(p.grad is not None for name, p in aligned.model.named_parameters() if ".mlp." in name)


def test_without_gradients_the_bits_are_the_same_and_memory_is_less(
    aligned: Aligned, checkpoints: dict[str, Path]
) -> None:
    lean = trainer.align(hf_model(checkpoints["tied"]), aligned.artifact, gradients=False)
    sequences = random_ids(*LENGTHS)
    with torch.no_grad():
        assert torch.equal(lean.logprobs(**pack(sequences)), aligned.logprobs(**pack(sequences)))
    sizes = [a._replayer.plan.parts.arena_bytes for a in (lean, aligned)]
    assert sizes[0] < sizes[1] // 2
    with pytest.raises(UsageError, match="aligned with gradients=False, and gradients are asked for"):
        lean.logprobs(**pack(sequences))
    lean.detach()


def test_detaching_gives_the_model_its_own_forward_back(
    checkpoints: dict[str, Path], artifacts: dict[tuple[str, str], Path]
) -> None:
    model, (ids,) = hf_model(checkpoints["tied"]), random_ids(20)
    with torch.no_grad():
        own = model(input_ids=ids[None]).logits
        aligned = trainer.align(model, artifacts["tied", "float32"])
        ours = model(input_ids=ids[None]).logits
        with aligned.own_forward():
            assert torch.equal(model(input_ids=ids[None]).logits, own)
        assert torch.equal(model(input_ids=ids[None]).logits, ours) and not torch.equal(ours, own)
        assert aligned.detach() is model and aligned.detach() is model
        with pytest.raises(UsageError, match="the model was detached from the artifact"):
            aligned.logprobs(ids[None])
        assert torch.equal(model(input_ids=ids[None]).logits, own)


def test_a_model_in_bfloat16_computes_in_the_artifacts_dtype(
    checkpoints: dict[str, Path], artifacts: dict[tuple[str, str], Path]
) -> None:
    """Its gradients come in its own dtype."""
    model = hf_model(checkpoints["tied"], torch.bfloat16)
    aligned = trainer.align(model, artifacts["tied", "bfloat16"], threads=2)
    sequences = random_ids(*LENGTHS)
    aligned.logprobs(**pack(sequences)).sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    aligned.detach()


def test_a_model_that_is_not_of_transformers(aligned: Aligned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network in plain PyTorch that a benchmark falls back to: the same outputs, and the same bits when aligned."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    plain_llama = importlib.import_module("plain_llama")
    program = Program.from_json(aligned.artifact.read("program.json").decode())
    model = plain_llama.PlainLlama(model_config(program), *rope_parameters(program))
    load_weights(aligned.artifact, program, dict(model.named_parameters()))
    ids = random_ids(40)[0][None]
    with torch.no_grad():
        with aligned.own_forward():
            assert (model(ids).logits - aligned.model(input_ids=ids).logits).abs().max() < 1e-4
        other = trainer.align(model, aligned.artifact)
        output = model(ids, labels=ids)
        assert isinstance(output, trainer.CausalOutput) and torch.equal(output.logits, aligned.model(ids).logits)
        assert torch.equal(other.logprobs(ids), aligned.logprobs(ids))
    other.detach()


def test_a_new_model_has_the_artifacts_shape_and_weights(
    checkpoints: dict[str, Path], artifacts: dict[tuple[str, str], Path]
) -> None:
    model, expected = trainer.new_model(artifacts["mistral", "float32"]), hf_model(checkpoints["mistral"])
    have = dict(model.named_parameters())
    assert have.keys() == dict(expected.named_parameters()).keys()
    assert all(torch.equal(have[name], p) for name, p in expected.named_parameters())
    ids = random_ids(30)[0][None]
    with torch.no_grad():
        assert (model(input_ids=ids).logits - expected(input_ids=ids).logits).abs().max() < 1e-5
    low = trainer.new_model(artifacts["other orders", "bfloat16"], dtype=torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {
        torch.bfloat16
    } and low.lm_head.weight is low.model.embed_tokens.weight


def test_steps_hold_what_the_limits_say(aligned: Aligned) -> None:
    """No more tokens or sequences than the artifact's largest step: otherwise the device would refuse."""
    sequences = random_ids(*[3] * 23, LIMITS["max_prefill_tokens"], 1)
    assert torch.isfinite(aligned.logprobs(**pack(sequences))).all()
