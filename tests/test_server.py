"""The OpenAI endpoints over real HTTP, on an engine without a model."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, FakeInfo
from server_harness import Running, running
from tiny_tokenizers import byte_level

from tokenspeed.runtime.engine_info import EngineInfo, EngineStats
from tokenspeed.runtime.server import metrics
from tokenspeed.runtime.server.protocol import parse_chat, parse_completion

TOKENIZER = byte_level()
REPLY = "hello world, caf\u00e9 \U0001f600!"
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Replies with REPLY, then ends by itself."""
    engine = FakeEngine(TOKENIZER, script=TOKENIZER.encode(REPLY))
    with running(engine) as server:
        yield server
    engine.close(drain=False)


@pytest.fixture(scope="module")
def random_server() -> Iterator[Running]:
    """Draws tokens from (seed, position)."""
    engine = FakeEngine(TOKENIZER)
    with running(engine) as server:
        yield server
    engine.close(drain=False)


def chat(server: Running, **body: Any) -> dict[str, Any]:
    r = server.client.post("/v1/chat/completions", json={"messages": USER, **body})
    assert r.status_code == 200, r.text
    found: dict[str, Any] = r.json()
    return found


def complete(server: Running, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    r = server.client.post("/v1/completions", json={"prompt": prompt, **body})
    assert r.status_code == 200, r.text
    found: dict[str, Any] = r.json()
    return found


def stream(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json={"stream": True, **body}) as r:
        assert r.status_code == 200, r.read()
        assert r.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in r.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_chat_has_openais_shape(server: Running) -> None:
    body = chat(server, model="fake-1b", temperature=0)
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake-1b" and body["system_fingerprint"] == "fp_0123456789ab"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": REPLY}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    num_prompt = len(TOKENIZER.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"))
    num_output = len(TOKENIZER.encode(REPLY)) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_streamed_chat_is_the_same_text_in_whole_characters(server: Running) -> None:
    chunks = stream(server, "/v1/chat/completions", messages=USER, stream_options={"include_usage": True})
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]]
    assert "".join(texts) == REPLY and "\U0001f600" in texts and all("\ufffd" not in t for t in texts)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("stop") == 1
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == chat(server)["usage"]


def test_continuous_usage_grows_to_the_total(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, "/v1/completions", prompt="hello", max_tokens=9, stream_options=options)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 9


def test_stop_strings_streamed_and_not(server: Running) -> None:
    for stop, text in (("wor", "hello "), (["zzz", "caf"], "hello world, "), (["o wo", "lo"], "hel")):
        whole = complete(server, stop=stop, max_tokens=50)["choices"][0]
        chunks = stream(server, "/v1/completions", prompt="hello", stop=stop, max_tokens=50)
        assert whole["text"] == text == "".join(c["choices"][0]["text"] for c in chunks)
        assert whole["finish_reason"] == "stop" and whole["stop_reason"] in stop
    kept = complete(server, stop="wor", max_tokens=50, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "hello wor"


def test_max_tokens_and_its_defaults(server: Running) -> None:
    assert complete(server)["usage"]["completion_tokens"] == 16
    assert complete(server, max_tokens=3)["choices"][0]["finish_reason"] == "length"
    assert complete(server, max_tokens=None, ignore_eos=True)["usage"]["total_tokens"] == 256
    assert chat(server, max_tokens=4)["usage"]["completion_tokens"] == 4
    assert chat(server, max_tokens=4, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert chat(server, ignore_eos=True)["usage"]["total_tokens"] == 256


def test_prompts_of_every_form(server: Running) -> None:
    ids = TOKENIZER.encode("hello world")
    for prompt, count in (("a", 1), (["a", "b"], 2), (ids, 1), ([ids, ids[:1], ids], 3)):
        choices = complete(server, prompt, max_tokens=2)["choices"]
        assert [c["index"] for c in choices] == list(range(count))
    assert complete(server, ids, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)
    chunks = stream(server, "/v1/completions", prompt=["a", "b"], n=2, max_tokens=3)
    texts = {i: "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(4)}
    assert set(texts.values()) == {TOKENIZER.decode(TOKENIZER.encode(REPLY)[:3])}


def test_replicas_are_distinct_and_repeat(random_server: Running) -> None:
    def texts(**body: Any) -> list[str]:
        return [c["text"] for c in complete(random_server, max_tokens=12, **body)["choices"]]

    assert texts(n=3, seed=11) == texts(n=3, seed=11)
    assert len(set(texts(n=3, seed=11))) == 3
    assert texts(n=3, seed=11)[0] == texts(seed=11)[0] != texts(seed=12)[0]
    assert texts(seed=11) != texts() != texts()  # a fresh seed each time
    chunks = stream(random_server, "/v1/completions", prompt="hello", max_tokens=12, n=3, seed=11)
    streamed = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(3)]
    assert streamed == texts(n=3, seed=11)


def test_chat_logprobs(server: Running) -> None:
    choice = chat(server, logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in content).decode() == REPLY + "<|im_end|>"
    assert content[0]["token"] == "hello" and content[0]["logprob"] == -0.5
    assert len(content[0]["top_logprobs"]) == 2
    assert chat(server, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    chunks = stream(server, "/v1/chat/completions", messages=USER, logprobs=True, top_logprobs=2)
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content


def test_completion_logprobs_and_echo(server: Running) -> None:
    choice = complete(server, "hello wo", logprobs=1, max_tokens=2, echo=True)["choices"][0]
    assert choice["text"] == "hello wohello wo"
    form = choice["logprobs"]
    assert form["tokens"] == ["hello", " wo", "hello", " wo"] and form["text_offset"] == [0, 5, 8, 13]
    assert form["token_logprobs"][0] is None and form["token_logprobs"][2:] == [-0.5, -0.5]
    assert form["top_logprobs"][2] == {"hello": -0.5}
    named = complete(server, logprobs=0, max_tokens=1, return_tokens_as_token_ids=True)["choices"][0]
    assert named["logprobs"]["tokens"] == [f"token_id:{TOKENIZER.encode('hello')[0]}"]
    scored = complete(server, "hello wo", logprobs=1, max_tokens=0, echo=True)
    assert scored["choices"][0]["text"] == "hello wo" and scored["usage"]["completion_tokens"] == 0
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == 2
    chunks = stream(server, "/v1/completions", prompt="hello wo", logprobs=1, max_tokens=2, echo=True)
    streamed = [c["choices"][0] for c in chunks]
    assert "".join(c["text"] for c in streamed) == choice["text"]
    assert [o for c in streamed for o in c["logprobs"]["text_offset"]] == form["text_offset"]


def test_return_logprob_is_of_the_output_and_of_the_prompt_from_a_position_on(server: Running) -> None:
    prompt = [5, 1, 6, 7]
    alone = complete(server, prompt, return_logprob=True, max_tokens=2)["choices"][0]
    assert alone["logprobs"]["token_logprobs"] == [-0.5, -0.5] and "prompt_logprobs" not in alone
    assert alone == {**complete(server, prompt, logprobs=0, max_tokens=2)["choices"][0]}
    for start in (-1, 4):  # the prompt's end
        asked = complete(server, prompt, return_logprob=True, logprob_start_len=start, max_tokens=2)["choices"][0]
        assert asked["logprobs"] == alone["logprobs"]
        assert asked.get("prompt_logprobs") == (None if start < 0 else [None] * 4)
    everything = complete(server, prompt, prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    asked = complete(server, prompt, return_logprob=True, logprobs=1, logprob_start_len=2, max_tokens=1)["choices"][0]
    assert asked["prompt_logprobs"] == [None, None, *everything[2:]]
    own = complete(server, prompt, prompt_logprobs=1, logprob_start_len=3, max_tokens=1)["choices"][0]
    assert own["prompt_logprobs"] == [None, None, None, everything[3]] and own["logprobs"] is None
    echoed = complete(server, prompt, return_logprob=True, logprob_start_len=3, max_tokens=1, echo=True)["choices"][0]
    assert [value is None for value in echoed["logprobs"]["token_logprobs"]] == [True, True, True, False, False]
    streamed = stream(server, "/v1/completions", prompt=prompt, return_logprob=True, max_tokens=2)
    assert [p for c in streamed for p in c["choices"][0]["logprobs"]["token_logprobs"]] == [-0.5, -0.5]


def test_return_logprob_in_a_chat(server: Running) -> None:
    plain = chat(server, logprobs=True, prompt_logprobs=0, max_tokens=2)
    body = chat(server, return_logprob=True, logprob_start_len=3, max_tokens=2)
    assert body["choices"] == plain["choices"]
    assert body["prompt_logprobs"] == [None] * 3 + plain["prompt_logprobs"][3:] and len(body["prompt_logprobs"]) > 4
    with_top = chat(server, return_logprob=True, logprobs=True, top_logprobs=2, max_tokens=1)
    assert len(with_top["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert "prompt_logprobs" not in with_top
    error = server.client.post(
        "/v1/chat/completions", json={"messages": USER, "return_logprob": True, "logprobs": False}
    ).json()["error"]
    assert error["message"].startswith("return_logprob is true, but logprobs is false")
    assert error["param"] == "return_logprob"


def test_prompt_logprobs_and_token_ids(server: Running) -> None:
    choice = complete(server, [5, 1, 6], prompt_logprobs=2, return_token_ids=True, max_tokens=2)["choices"][0]
    assert choice["prompt_token_ids"] == [5, 1, 6] and choice["token_ids"] == TOKENIZER.encode(REPLY)[:2]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["1"] == {"logprob": -0.5, "rank": 2, "decoded_token": "<|im_start|>"}
    assert third["6"]["rank"] == 9 and len(third) == 3
    body = chat(server, prompt_logprobs=0, return_token_ids=True, max_tokens=1)
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert any(e and next(iter(e.values()))["logprob"] == -9999.0 for e in body["prompt_logprobs"])
    chunks = stream(server, "/v1/chat/completions", messages=USER, return_token_ids=True, max_tokens=3)
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    streamed = [t for c in chunks for t in c["choices"][0].get("token_ids", [])]
    assert streamed == TOKENIZER.encode(REPLY)[:3]


def test_special_tokens_and_template_options(server: Running) -> None:
    assert chat(server, skip_special_tokens=False, ignore_eos=True, max_tokens=50)["choices"][0]["message"][
        "content"
    ].startswith(REPLY + "<|im_end|>")
    with_prompt = chat(server, max_tokens=1)["usage"]["prompt_tokens"]
    without = chat(server, max_tokens=1, add_generation_prompt=False)["usage"]["prompt_tokens"]
    assert with_prompt - without == len(TOKENIZER.encode("<|im_start|>assistant\n"))
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert chat(server, messages=parts, max_tokens=1)["usage"]["prompt_tokens"] == with_prompt
    stop = TOKENIZER.encode(",")[0]
    assert complete(server, stop_token_ids=[stop])["choices"][0]["stop_reason"] == stop


def test_fields_that_ask_for_nothing_are_fine(server: Running) -> None:
    harmless: dict[str, Any] = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
        "allowed_token_ids": None, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "user": "me", "store": False, "unknown": [1],
        "top_k": -1, "min_p": 0, "best_of": None, "stop": None, "seed": None, "suffix": None,
    }  # fmt: skip
    assert chat(server, **harmless)["choices"][0]["message"]["content"] == REPLY


def test_adjustments_reach_the_engine() -> None:
    body: dict[str, Any] = {
        "prompt": "hello", "messages": USER, "presence_penalty": -1, "frequency_penalty": 0.5,
        "repetition_penalty": 1.2, "logit_bias": {"5": -100, "17": 2.5}, "allowed_token_ids": [5, 17],
    }  # fmt: skip
    for params in (parse_completion(body, FakeInfo()).params, parse_chat(body, FakeInfo()).params):
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1, 0.5, 1.2)
        assert params.logit_bias == {5: -100, 17: 2.5} and params.allowed_token_ids == (5, 17)
    nothing = parse_completion({"prompt": "hello", "logit_bias": {}}, FakeInfo()).params
    assert nothing.logit_bias is None and nothing.allowed_token_ids is None and not nothing.has_penalties


def test_the_official_client(server: Running) -> None:
    client = openai.OpenAI(base_url=server.server.url + "/v1", api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "fake-1b"
    answer = client.chat.completions.create(model="fake-1b", messages=USER, logprobs=True, top_logprobs=1, seed=1)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == REPLY and answer.usage.total_tokens > 0
    pieces = client.chat.completions.create(
        model="fake-1b",
        messages=USER,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    chunks = list(pieces)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REPLY
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 5
    text = client.completions.create(model="fake-1b", prompt=TOKENIZER.encode("hello"), max_tokens=5, logprobs=2)
    assert text.choices[0].finish_reason == "length"
    assert text.choices[0].logprobs is not None and len(text.choices[0].logprobs.tokens or ()) == 5
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="min_tokens is not supported"):
        client.chat.completions.create(model="fake-1b", messages=USER, extra_body={"min_tokens": 1})  # type: ignore[arg-type]


def test_the_official_client_asynchronously(server: Running) -> None:
    import asyncio

    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=server.server.url + "/v1", api_key="none") as client:
            pieces = await client.chat.completions.create(model="fake-1b", messages=USER, stream=True)  # type: ignore[arg-type]
            return "".join([c.choices[0].delta.content or "" async for c in pieces])

    assert asyncio.run(main()) == REPLY


def test_health_models_version_info_and_page(server: Running) -> None:
    get = server.client.get
    assert (get("/health").status_code, get("/health").json()) == (200, {"status": "ready"})
    assert server.client.head("/health").status_code == 200
    card = get("/v1/models").json()["data"][0]
    assert card["id"] == "fake-1b" and card["max_model_len"] == 256
    assert get("/v1/models/fake-1b").json() == card
    assert get("/version").json()["version"]
    info = get("/get_server_info").json()
    assert info["status"] == "ready" and info["engine"]["target"] == "cpu:fake"
    assert info["envelope"] == {"max_model_len": 256} and info["settings"]["api_keys"] == 0
    assert 0 < info["startup_seconds"]["web"] <= info["startup_seconds"]["ready"]
    page = get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8" and "<!doctype html>" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "://" not in page.text.replace("http://www.w3.org/2000/svg", "")  # no asset from elsewhere


def test_metrics_have_vllms_names(random_server: Running) -> None:
    def scrape() -> dict[str, float]:
        lines = random_server.client.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}

    before = scrape()
    assert all(name.startswith("tokenspeed:") for name in before)
    complete(random_server, [5, 6, 7], max_tokens=10, n=2, ignore_eos=True)
    after = scrape()

    def grown(name: str, labels: str = 'model_name="fake-1b"') -> float:
        key = f"tokenspeed:{name}{{{labels}}}"
        return after[key] - before[key]

    assert grown("prompt_tokens_total") == 3 and grown("generation_tokens_total") == 20
    assert grown("request_success_total", 'finished_reason="length",model_name="fake-1b"') == 2
    assert grown("time_to_first_token_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 18
    assert grown("time_per_output_token_seconds_count") == 2
    assert grown("e2e_request_latency_seconds_count") == 2
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert after[f'tokenspeed:{gauge}{{model_name="fake-1b"}}'] == 0
    assert after['tokenspeed:device_counter{counter="allocations_after_seal",model_name="fake-1b"}'] == 0
    assert grown("request_queue_time_seconds_count") == 2 and grown("request_queue_time_seconds_sum") == pytest.approx(
        0.06
    )


def test_a_failing_device_is_a_500_or_an_error_event() -> None:
    engine = FakeEngine(TOKENIZER, fail_after=2)
    with running(engine) as server:
        r = server.client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 9})
        assert r.status_code == 500
        error = r.json()["error"]
        assert error["message"] == "the request failed: the device failed: it is made of paper"
        assert error["type"] == "server_error"
        for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": USER})):
            chunks = stream(server, path, max_tokens=9, **prompt)
            assert chunks[-1]["error"]["message"] == error["message"]
    engine.close(drain=False)


def test_pipelined_and_kept_alive_connections(server: Running) -> None:
    with httpx.Client(base_url=server.server.url) as client:
        for _ in range(3):
            body = {"prompt": "hello", "max_tokens": 2, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")


def test_the_page_reads_what_there_is() -> None:
    page = (Path(metrics.__file__).parent / "page.html").read_text()
    made, used = (set(re.findall(pattern, page)) for pattern in (r'id="(\w+)"', r'\$\("(\w+)"\)'))
    assert made == used
    stats = {field.name for field in dataclasses.fields(EngineStats)}
    assert set(re.findall(r"\bs\.(\w+)", page)) <= stats
    info = {field.name for field in dataclasses.fields(EngineInfo)}
    assert {"max_num_seqs", "target", "dtype", "max_model_len"} <= set(re.findall(r"\be\.(\w+)", page)) & info


def test_every_metric_is_in_the_documentation(server: Running) -> None:
    text = (Path(__file__).parent.parent / "docs" / "server.md").read_text()
    section = text[text.index("\n## Metrics\n") : text.index("\n## From Python\n")]
    explained = set(re.findall(r"`(?:tokenspeed:)?(\w+?)(?:_total)?(?:\{\w+\})?`", section))
    families = re.findall(r"^# TYPE tokenspeed:(\w+?)(?:_total)? (\w+)$", server.client.get("/metrics").text, re.M)
    exposed = {name for name, kind in families if not name.endswith("_created")}
    assert len(exposed) >= 30 and exposed <= explained, exposed - explained
