"""Bad input from end to end: every refusal is typed, says what is wrong, and leaves nothing behind.

Readers, servers and the envelope have their own tests of what they refuse (test_checkpoint_*.py,
test_server_errors.py, test_envelope.py); these are about what reaches a user of the whole.
"""

from __future__ import annotations

import json
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import write_hf
from tiny_artifact import cli, hf_config, is_empty, tiny, write_checkpoint
from tiny_llama import tiny_weights

from tokenspeed.compile.build import build
from tokenspeed.errors import (
    CheckpointError,
    EnvelopeError,
    RequestError,
    ResourceError,
    UsageError,
)
from tokenspeed.runtime import places
from tokenspeed.runtime.engine import Engine, load
from tokenspeed.runtime.loader import LoadOptions
from tokenspeed.runtime.request import EngineEvent, RequestOptions, SamplingParams

# ---- checkpoints ----------------------------------------------------------------------------------------------


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def config(name: str = "config.json", **changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**values, **changes}))

    return damage


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (shutil.rmtree, r"no checkpoint at .*: need a Hugging Face directory or a \.gguf file"),
        (remove("config.json"), r"is not a checkpoint: need config\.json or a \.gguf file in it, have neither"),
        (remove("model.safetensors"), r"has no weights: need model\.safetensors or model\.safetensors\.index\.json"),
        (remove("tokenizer.json"), r"has no tokenizer: need tokenizer\.json or a SentencePiece tokenizer\.model"),
        (cut("model.safetensors", 0), "is empty: need a safetensors file"),
        (cut("model.safetensors", 0.005), "is truncated or not a safetensors file: its header claims"),
        (cut("model.safetensors", 0.9), "is truncated: tensor .* needs bytes up to"),
        (cut("config.json", 0.5), "config.json is not valid JSON"),
        (cut("tokenizer.json", 0.5), "tokenizer.json"),
        (config(architectures=["GPT2LMHeadModel"]), "unknown architecture 'GPT2LMHeadModel': need one of LlamaFor"),
        (config(architectures=None), "unknown architecture None"),
        (config(hidden_size=-48), "need a positive hidden_size, have -48"),
        (config(hidden_size=64), "has the wrong shape: need .* by the config, have"),
        (config(num_hidden_layers=2), "9 of 20 tensors are missing, first model.layers.1.input_layernorm.weight"),
        (config(num_hidden_layers=10**9), "need at most 4096 layers"),
        (config(vocab_size="many"), "need an integer as vocab_size, have 'many'"),
        (config(eos_token_id=283), "need end tokens below the vocab_size 283, have 283"),
        (config(rope_theta=1.0), "need a rope_theta above 1, have 1.0"),
        (config("tokenizer_config.json", eos_token="\ud800"), "eos_token holds half of a surrogate pair: '.ud800'"),
        (config("tokenizer_config.json", chat_template="\ud800"), "chat_template holds half of a surrogate pair"),
        (config(rope_scaling={"rope_type": "dynamic", "factor": 2}), "rope scaling 'dynamic' is not supported"),
    ],
)  # fmt: skip
def test_damaged_checkpoints(damage: Callable[[Path], None], text: str, out: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "m")
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=text):
        build(checkpoint, out / "a")
    assert is_empty(out)


def test_a_tokenizer_larger_than_the_embedding_is_refused(out: Path, tmp_path: Path) -> None:
    """The tests' tokenizer has 267 tokens, of which the last was added to its vocabulary."""
    with pytest.raises(CheckpointError) as caught:
        build(write_checkpoint(tmp_path / "small", tiny(vocab_size=265)), out / "a")
    assert caught.value.message == (
        "the tokenizer does not fit the model: need token ids below 265, the rows of the embedding, have 2 others, "
        "the last of them 266 ('two words')"
    )
    assert caught.value.hint is not None and caught.value.hint.startswith("use the tokenizer that belongs to these")
    assert is_empty(out)
    build(write_checkpoint(tmp_path / "fits", tiny(vocab_size=267)), out / "a", max_model_len=128)


def test_a_longer_context_than_the_window_is_refused(out: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 256}
    checkpoint = write_checkpoint(tmp_path / "m", **changes)
    with pytest.raises(EnvelopeError, match="a sliding window of 256 positions"):
        build(checkpoint, out / "a")
    assert is_empty(out)


# ---- memory ---------------------------------------------------------------------------------------------------


def test_a_max_model_len_that_does_not_fit_in_memory(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError) as caught:
        load(tiny_artifact, options=LoadOptions(kv_gib=0.005))
    assert (
        "max_model_len = 65536 does not fit in memory: one sequence of that length needs 16.0 MiB of KV pages,"
        in str(caught.value)
    )
    assert "and 5.1 MiB may be used" in caught.value.message
    assert caught.value.hint is not None
    fits = int(
        caught.value.hint.removeprefix("raise --kv-gib, or rebuild with `tokenspeed build --max-model-len ")[:-1]
    )
    assert 0 < fits < 65536 and fits % 64 == 0
    with pytest.raises(ResourceError) as caught:
        load(tiny_artifact, options=LoadOptions(kv_gib=1e-6))
    assert caught.value.hint == "raise --kv-gib"
    monkeypatch.setattr(places, "available_memory", lambda: 40 << 20)
    with pytest.raises(ResourceError, match=r"does not fit in memory: .*\(40\.0 MiB are free") as caught:
        load(tiny_artifact)
    assert caught.value.hint is not None and caught.value.hint.startswith("free memory, or rebuild with `tokenspeed")
    with pytest.raises(ResourceError, match=r"1\.00 GiB of KV pages and .* need more than the 40\.0 MiB") as caught:
        load(tiny_artifact, options=LoadOptions(kv_gib=1.0))
    assert caught.value.hint == "lower --kv-gib"


def test_a_memory_limit_that_nobody_foresees(tiny_checkpoint: Path, tmp_path: Path) -> None:
    build(tiny_checkpoint, tmp_path / "a", max_num_seqs=1024, page_size=256)
    limit = 2 << 30
    ran = cli(
        "run", tmp_path / "a", "hello", "--kv-gib", "4",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    if "need more than the" in ran.stderr:
        pytest.skip("this machine has less than 4 GiB free")
    assert (ran.returncode, ran.stdout) == (9, "")
    assert ran.stderr.startswith("error: cannot allocate memory: region kv needs 4294967296 bytes of memory")
    assert ran.stderr.endswith("hint: lower --kv-gib\n")


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_absurd_kv_sizes(size: float, tiny_artifact: Path) -> None:
    with pytest.raises(UsageError, match=r"the KV size is .* GiB; it must be above 0 and at most"):
        load(tiny_artifact, options=LoadOptions(kv_gib=size))


def test_threads_and_queues(tiny_artifact: Path) -> None:
    for options, text in (
        ({"max_waiting": 0}, "max_waiting is 0; it must lie between 1 and 1048576"),
        ({"max_waiting": 1 << 40}, "max_waiting is 1099511627776; it must lie between 1 and 1048576"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0; it must lie between 1 and 2048"),
        ({"max_step_tokens": 4096}, "max_step_tokens is 4096; it must lie between 1 and 2048"),
    ):
        with pytest.raises(UsageError, match=text):
            load(tiny_artifact, options=LoadOptions(kv_gib=0.05), **options)


# ---- requests -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Iterator[Engine]:
    with load(tiny_artifact, options=LoadOptions(kv_gib=0.05, threads=2)) as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ("", {}, "the prompt is empty: at least one token is needed"),
        ([[]], {}, "the prompt is empty"),
        ([283], {}, "prompt token 0 is 283: token ids of this model go from 0 to 282"),
        ([1, -2], {}, "prompt token 1 is -2"),
        ([1, 1.5], {}, "the prompt must be whole numbers, have a float among them"),
        ([True], {}, "the prompt must be whole numbers, have a bool among them"),
        ([1] * 65536, {}, "the prompt has 65536 tokens; this artifact was built for max_model_len 65536"),
        ([1] * 65530, {"max_tokens": 7}, "max_tokens 7 does not fit: the prompt has 65530 tokens"),
        ("x", {"max_tokens": -1}, "max_tokens must be an integer of at least 1; got -1"),
        ("x", {"temperature": -0.1}, "temperature must be 0 (greedy) or a number from 1e-05 to 100; got -0.1"),
        ("x", {"temperature": 1e9}, "temperature must be 0 (greedy) or a number"),
        ("x", {"temperature": float("nan")}, "temperature must be a finite number; got nan"),
        ("x", {"top_p": -1}, "top_p must be a number above 0 and at most 1; got -1"),
        ("x", {"top_k": -7}, "top_k must be a positive integer, or 0 or -1; got -7"),
        ("x", {"min_p": 1.5}, "min_p must be a number from 0 to 1; got 1.5"),
        ("x", {"seed": -1}, "seed must be an integer from 0 to 18446744073709551615; got -1"),
        ("x", {"n": 0}, "n must be an integer from 1 to 128; got 0"),
        ("x", {"logprobs": 21}, "logprobs must be an integer from 0 to 20; got 21"),
        ("x", {"stop": ("",)}, "stop must be strings of 1 to 1024 characters"),
        ("x", {"stop_token_ids": (283,)}, "stop_token_ids must be token ids from 0 to 282; got 283"),
    ],
)
def test_illegal_requests(engine: Engine, prompt: Any, params: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate(prompt, SamplingParams(**{"max_tokens": 4, **params}))
    assert text in caught.value.message
    assert engine.alive and engine.stats().num_free_pages == engine.stats().num_pages


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"priority": 1.5}, "priority must be an integer from 0 to 9; got 1.5"),
        ({"timeout": 10**400}, "timeout must be a finite number; got one too large"),
        ({"tenant": "\ud800"}, r"tenant must be valid Unicode; got '\\ud800'"),
        ({"cache_key": "a\udfff"}, r"cache_key must be valid Unicode; got 'a\\udfff'"),
    ],
)
def test_absurd_options(options: dict[str, Any], text: str, engine: Engine) -> None:
    with pytest.raises(RequestError, match=text):
        engine.submit([1], SamplingParams(max_tokens=1), lambda _: None, options=RequestOptions(**options))


def test_callers_that_change_their_prompt_or_abort_nonsense_end_nobody_else(engine: Engine) -> None:
    prompt = [1, 2, 3]
    ended = threading.Event()

    def sink(event: EngineEvent) -> None:
        if event.finish_reason is not None:
            ended.set()

    with engine._inbox.wake:  # the engine's thread cannot read it yet
        engine.submit(prompt, SamplingParams(max_tokens=1), sink)
        prompt[:] = ["x"]  # type: ignore[list-item]
    assert ended.wait(10)
    for nonsense in ("x", None, 1.5):
        with pytest.raises(TypeError):
            engine.abort(nonsense)  # type: ignore[arg-type]
    assert len(engine.generate([[5, 3]], SamplingParams(max_tokens=2))[0].token_ids) == 2


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--max-tokens", "-1"), "error: max_tokens must be an integer of at least 1; got -1\n"),
        (("--temperature", "-1"), "error: temperature must be 0 (greedy) or a number from 1e-05 to 100; got -1.0\n"),
        (("--temperature", "inf"), "error: temperature must be a finite number; got inf\n"),
        (("--top-p", "0"), "hint: leave it at 1 to turn it off\n"),
        (("--top-k", "9" * 30), "error: top_k must be a positive integer, or 0 or -1; got 999"),
        (("--seed", "-5"), "error: seed must be an integer from 0 to 18446744073709551615; got -5\n"),
    ],
)
def test_absurd_sampling_on_the_command_line(
    tiny_artifact: Path, args: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenspeed.cli import main

    assert main(["run", str(tiny_artifact), "hello", "--kv-gib", "0.05", *args]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err


def test_a_sink_that_raises_ends_the_engine_and_everybody_is_told(tiny_artifact: Path) -> None:
    def raises(_: EngineEvent) -> None:
        raise RuntimeError("of a sink")

    reasons: list[str] = []
    ends: list[EngineEvent] = []
    engine = load(tiny_artifact, options=LoadOptions(kv_gib=0.05, threads=1))
    engine.watch(reasons.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        engine.submit([1] * 64, SamplingParams(max_tokens=5000, ignore_eos=True), ends.append)
        engine.submit([2], SamplingParams(max_tokens=2), raises)
        engine._thread.join(10)
        assert engine.close(timeout=5.0) and not engine.alive
    assert ends[-1].finish_reason == "error" and "of a sink" in reasons[0]


def test_many_threads_close_one_engine(tiny_artifact: Path) -> None:
    engine = load(tiny_artifact, options=LoadOptions(kv_gib=0.05, threads=1))
    ends: list[EngineEvent] = []
    engine.submit([1] * 64, SamplingParams(max_tokens=5000, ignore_eos=True), ends.append)
    threads = [threading.Thread(target=engine.close, kwargs={"drain": False}, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    engine.abort(0)
    assert engine.close(timeout=5.0)  # with nothing left that it could wait for
    assert [event.finish_reason for event in ends if event.finish_reason is not None] == ["abort"]


@pytest.mark.parametrize(
    ("tensor", "value", "dtype", "text"),
    [
        ("model.norm.weight", float("nan"), "bfloat16", "weight 'model.norm.weight' holds values that are not finite"),
        ("model.embed_tokens.weight", float("inf"), "float32", "'model.embed_tokens.weight' .* not finite in float32"),
        ("model.layers.0.mlp.up_proj.weight", 3.4e38, "bfloat16", "gate_up_proj.weight' .* not finite in bfloat16"),
    ],
)
def test_weights_that_are_not_finite(
    tensor: str, value: float, dtype: str, text: str, out: Path, tmp_path: Path
) -> None:
    weights = tiny_weights(tiny())
    weights[tensor].flat[5] = value
    write_checkpoint(tmp_path / "m")
    write_hf(tmp_path / "m", hf_config(tiny()), weights)
    with pytest.raises(CheckpointError, match=text) as caught:
        build(tmp_path / "m", out / "a", dtype=dtype)
    assert caught.value.hint == "fetch the checkpoint again; if it is whole, build it with --dtype float32"
    assert is_empty(out)
    if value == 3.4e38:  # what float32 holds is built, and served without harm
        build(tmp_path / "m", out / "a", dtype="float32", max_model_len=128)
        with load(out / "a", options=LoadOptions(kv_gib=0.05, threads=1)) as engine:
            assert len(engine.generate([[5, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4
