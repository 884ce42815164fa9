"""The tree of numerics switches: rl-bitwise tightens what nobody chose and refuses what it cannot live with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_artifact import write_checkpoint

from tokenspeed import switches
from tokenspeed.compile import models
from tokenspeed.compile.build import build, resolve_envelope
from tokenspeed.compile.promise import pinned_solutions
from tokenspeed.envelope import Envelope, resolve
from tokenspeed.errors import EnvelopeError, SelectionError
from tokenspeed.target import Target

V3 = (Target("cpu", "x86-64-v3"),)


def make(*, vocab_size: int = 4096, experts: bool = False, **flags: Any) -> Envelope:
    return resolve(
        model="m", max_position_embeddings=128, vocab_size=vocab_size, experts=experts, flags=flags, default_targets=V3
    )


def sources(envelope: Envelope) -> dict[str, str]:
    return {name: setting.source for name, setting in envelope.settings.items()}


def test_rl_bitwise_turns_the_tree_on_and_says_that_it_did() -> None:
    auto, strict = make(), make(numerics="rl-bitwise")
    on = ("kernels", "collectives", "sampling")
    for name in (*(f"{part}_deterministic" for part in on), "batch_invariance", "trainer_alignment"):
        assert auto.switch(name) is False and sources(auto)[name] == "default"
        assert strict.switch(name) is True and sources(strict)[name] == "tightened"
    assert strict.switch("sampling_backend") == strict.switch("moe_backend") == "aok"
    assert (auto.pinned_solution, strict.pinned_solution) == (None, "aok")
    assert strict.required_features == set(switches.KERNEL_FEATURES) and not auto.required_features
    assert strict.op_features == {
        "all_reduce": {"rank_order_fold"},
        "sample": {"canonical_ties", "request_keyed_draws"},
    }


def test_every_switch_stands_alone() -> None:
    assert make(kernels_deterministic="on").required_features == {"fixed_reduction_order", "run_invariant"}
    assert make(batch_invariance=True).required_features == {"batch_invariant"}
    both = make(batch_invariance="on", kernel_features=["run_invariant"])
    assert both.required_features == {"batch_invariant", "run_invariant"}
    assert sources(both)["kernel_features"] == "tightened"
    assert make(sampling_deterministic="on").op_features == {"sample": {"canonical_ties", "request_keyed_draws"}}
    for switch in switches.SWITCHES:
        others = [c for c in switch.choices if c != switch.default]
        for value in others if switch.name not in ("moe_backend", "allreduce_fusion") else ():
            found = make(**{switch.name: value})
            assert found.switch(switch.name) == value and sources(found)[switch.name] == "flag"
            assert found.pinned_solution is None and found.numerics == "auto"


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("moe_backend", "triton", "aok"),
        ("sampling_backend", "flashinfer", "aok"),
        ("sampling_backend", "native", "aok"),
        ("allreduce_fusion", "on", "off"),
        ("batch_invariance", "off", "on"),
        ("kernels_deterministic", False, "on"),
        ("trainer_alignment", "off", "on"),
    ],
)
@pytest.mark.parametrize("source", ["flag", "recipe"])
def test_a_choice_that_cannot_be_tightened_is_refused(name: str, value: Any, needed: str, source: str) -> None:
    given = {"flags": {"numerics": "rl-bitwise"}, "recipe": {}}
    given["flags" if source == "flag" else "recipe"][name] = value
    path, found = switches.BY_NAME[name].path, switches.shown(value)
    message = f"needs {path} to be {needed}; {name} (set by {source}) is {found}"
    with pytest.raises(EnvelopeError, match=re.escape(message)):
        resolve(model="m", max_position_embeddings=128, vocab_size=64, default_targets=V3, experts=True, **given)


def test_what_it_needs_may_be_said_and_orders_are_free() -> None:
    envelope = make(numerics="rl-bitwise", batch_invariance="on", sampling_backend="aok", logprob_order="megatron",
                    layer_boundary_norm="unfused", rope_table_device="target", router_topk="native")  # fmt: skip
    assert sources(envelope)["batch_invariance"] == "flag"
    assert envelope.switch("router_topk") == "native"  # rl-bitwise would have set torch
    assert envelope.switch("logprob_shards") == switches.DEFAULT_SHARDS
    assert make(numerics="rl-bitwise").switch("router_topk") == "torch"
    assert Envelope.from_json(envelope.to_json()) == envelope


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"logprob_order": "megatron", "vocab_size": 4097}, "megatron cannot fold this vocabulary: need equal shards"),
        (
            {"logprob_order": "megatron", "logprob_shards": 3},
            "have 4096 tokens over logprob_shards = 3, which",
        ),
        ({"logprob_shards": 2}, "logprob_shards is 2, but logprob_order = torch folds the whole vocabulary at once"),
        ({"moe_backend": "triton"}, "moe_backend (set by flag) is triton, but the checkpoint has no experts"),
        ({"allreduce_fusion": "on"}, "there is nothing to reduce"),
        ({"sampling_stream": "shared"}, "sampling_stream (set by flag) is 'shared'; it must be one of per-request"),
        ({"batch_invariance": "maybe"}, "batch_invariance (set by flag) is 'maybe'; it must be on or off"),
        ({"batch_invariance": 1.5}, "it must be on or off"),
        ({"logprob_shards": 0}, "logprob_shards (set by flag) is 0; it must lie between 1 and 1024"),
        ({"rope_table_device": ["cpu"]}, "it must be one of cpu, target"),
    ],
)
def test_what_no_mode_can_keep(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvelopeError, match=re.escape(message)):
        make(**flags)


def test_the_tree_is_printed_with_values_sources_and_what_they_change() -> None:
    text = make(numerics="rl-bitwise", layer_boundary_norm="unfused").describe()
    tree = text[text.index("\nnumerics ") :]
    assert re.search(r"├─ kernels\.deterministic +on +tightened +activations ", tree)
    assert re.search(r"│  └─ sampling_backend +aok +tightened +tokens at T>0 ", tree)
    assert re.search(r"   ├─ layer_boundary_norm +unfused +flag +activations ", tree)
    assert re.search(r"   │  └─ logprob_shards +1 +default +logprobs only ", tree)
    assert "(it has none)" in tree
    for switch in switches.SWITCHES:
        assert switch.path.rpartition(".")[2] in tree


def test_json_has_the_place_of_a_switch_and_what_it_changes() -> None:
    data = switches.annotated(make(batch_invariance="on").to_json())
    assert data["batch_invariance"] == {
        "value": True, "source": "flag", "path": "invariance.batch", "changes": "activations",
    }  # fmt: skip
    assert data["dtype"] == {"value": "bfloat16", "source": "default"}


def test_the_summary_names_what_somebody_chose() -> None:
    assert make().describe(tree=False).endswith("\nnumerics auto (default)")
    text = make(numerics="rl-bitwise", logprob_order="megatron").describe(tree=False)
    assert text.endswith("\nnumerics rl-bitwise (flag): logprob_order=megatron")


def test_pins_of_solutions() -> None:
    assert pinned_solutions(make(), {"linear": "native"}) == {"linear": "native"}
    assert pinned_solutions(make(sampling_backend="native"), {}) == {"sample": "native"}
    with pytest.raises(EnvelopeError, match="sampling_backend is native, but op 'sample' is pinned to triton"):
        pinned_solutions(make(sampling_backend="native"), {"sample": "triton"})
    with pytest.raises(EnvelopeError, match="needs solution aok for every op; op 'linear' is pinned to native"):
        pinned_solutions(make(numerics="rl-bitwise"), {"linear": "native"})


def test_models_must_declare_a_verified_envelope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    monkeypatch.setattr(models, "VERIFIED", {"llama": ("float32",)})
    monkeypatch.setattr("tokenspeed.compile.promise.VERIFIED", models.VERIFIED)
    flags = {"numerics": "rl-bitwise", "max_model_len": 128}
    assert resolve_envelope(checkpoint, flags={**flags, "dtype": "float32"}).numerics == "rl-bitwise"
    with pytest.raises(EnvelopeError, match="verified envelope in bfloat16; architecture 'llama' declares float32"):
        resolve_envelope(checkpoint, flags={**flags, "dtype": "bfloat16"})
    assert resolve_envelope(checkpoint, flags={"max_model_len": 128}).numerics == "auto"


def test_an_odd_vocabulary_fails_the_build_with_megatron(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")  # 283 tokens
    with pytest.raises(EnvelopeError, match="have 283 tokens over logprob_shards = 8, which leaves 3"):
        build(checkpoint, tmp_path / "a", max_model_len=128, logprob_order="megatron")
    assert not (tmp_path / "a").exists()


def test_a_sampling_backend_without_a_kernel_fails_by_name(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    with pytest.raises(SelectionError, match="no kernel of pinned solution flashinfer for op 'sample'"):
        build(checkpoint, tmp_path / "a", max_model_len=128, sampling_backend="flashinfer")
