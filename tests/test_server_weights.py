"""POST /update_weights over real HTTP: who may, from where, and what clients are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_harness import Running, running
from tiny_artifact import cli, write_checkpoint

import tokenspeed
from tokenspeed.artifact import Artifact
from tokenspeed.cli import main
from tokenspeed.compile.build import build
from tokenspeed.runtime.engine import Engine
from tokenspeed.runtime.loader import LoadOptions

OPTIONS = LoadOptions(threads=2, kv_gib=0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``weights/new.safetensors``, and beside the folder a file and a link that are out of bounds."""
    top = tmp_path_factory.mktemp("served")
    build(write_checkpoint(top / "checkpoint", seed=1), top / "artifact", dtype="float32", max_num_seqs=8)
    weights = top / "artifact" / Artifact.open(top / "artifact").manifest.targets[0].weights
    (top / "weights" / "deep").mkdir(parents=True)
    (top / "weights" / "new.safetensors").write_bytes(weights.read_bytes())
    (top / "weights" / "bad.safetensors").write_bytes(b"nonsense")
    (top / "weights" / "deep" / "link").symlink_to(top / "weights" / "new.safetensors")
    (top / "weights" / "out").symlink_to(weights)
    (top / "weights" / "loop").symlink_to(top / "weights" / "loop")
    (top / "weights2").mkdir()
    (top / "weights2" / "new.safetensors").write_bytes(weights.read_bytes())
    return top


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Iterator[Engine]:
    with tokenspeed.load(tiny_artifact, options=OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine, folder: Path) -> Iterator[Running]:
    with running(engine, weights_dir=str(folder / "weights")) as server:
        yield server


def update(server: Running, **body: Any) -> tuple[int, dict[str, Any]]:
    response = server.client.post("/update_weights", json=body)
    return response.status_code, response.json()


def complete(server: Running, **body: Any) -> Any:
    asked = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "return_token_ids": True, **body}
    return server.client.post("/v1/completions", json=asked)


def version(server: Running) -> str:
    return str(server.client.get("/get_server_info").json()["engine"]["weights_version"])


def test_new_weights_are_served(server: Running, engine: Engine, folder: Path) -> None:
    digest = engine.info.artifact_digest
    (before,) = complete(server).json()["choices"]
    assert before["weights_versions"] == [digest] and version(server) == digest
    status, result = update(server, path="new.safetensors", version="step-1")
    assert status == 200 and result["version"] == "step-1" and result["bytes"] > 0
    assert {"seconds", "wait_seconds"} <= result.keys() and version(server) == "step-1"
    (after,) = complete(server).json()["choices"]
    assert after["weights_versions"] == ["step-1"] and after["token_ids"] != before["token_ids"]
    text = server.client.get("/metrics").text
    assert 'tokenspeed:weights_version{model_name="tiny-llama",version="step-1"} 1.0' in text
    assert 'tokenspeed:weight_updates_total{model_name="tiny-llama"} 1.0' in text
    assert "tokenspeed:weight_update_seconds_total" in text
    for path in (str(folder / "weights" / "new.safetensors"), "deep/link", "deep/../new.safetensors"):
        status, result = update(server, path=path, when="abort")
        assert status == 200 and result["version"].startswith(f"{digest[:12]}+")


def test_many_at_once_take_turns(server: Running) -> None:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.server.url, timeout=20) as client:
            slow = client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2000, "temperature": 0})
            running = asyncio.create_task(slow)
            await asyncio.sleep(0.05)
            updates = [
                client.post("/update_weights", json={"path": "new.safetensors", "version": f"turn {i}"})
                for i in range(40)
            ]
            long_text = client.post("/v1/completions", json={"prompt": "a b " * 3000, "max_tokens": 1})
            return [*await asyncio.gather(*updates), await long_text, await running]

    answers = asyncio.run(ask())
    assert [a.status_code for a in answers] == [200] * 42
    assert sorted(a.json()["version"] for a in answers[:40]) == sorted(f"turn {i}" for i in range(40))


def test_chunks_and_chats_tell_versions_too(server: Running) -> None:
    assert update(server, path="new.safetensors", version="told")[0] == 200
    lines = complete(server, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    told = [c["choices"][0]["weights_versions"] for c in chunks if c["choices"][0]["token_ids"]]
    assert told and all(t == ["told"] for t in told)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    (choice,) = server.client.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["weights_versions"] == ["told"]
    lines = server.client.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["weights_versions"] in (["told"], [])


def test_only_files_below_the_folder(server: Running, folder: Path) -> None:
    before = version(server)
    outside = ["../weights2/new.safetensors", str(folder / "weights2" / "new.safetensors"), "out", "/etc/passwd", "..",
               "../none", "."]  # fmt: skip
    for path in outside:
        status, body = update(server, path=path)
        assert status == 403 and body["error"]["code"] == "forbidden", path
        assert body["error"]["type"] == "permission_error" and "is not below the folder" in body["error"]["message"]
    for path in ("none", "deep", "loop", "deep/none/x", "x" * 300, "x/" * 2000):
        status, body = update(server, path=path)
        assert status == 400 and body["error"]["code"] == "weights_error", path
        assert body["error"]["param"] == "path" and body["error"]["message"].startswith("cannot read the weights")
    assert version(server) == before


def test_bodies_that_make_no_sense(server: Running) -> None:
    before = version(server)
    for body, text in [
        ({}, "path must name a file of weights"),
        ({"path": ""}, "path must name a file of weights"),
        ({"path": "a\0b"}, "path must name a file of weights"),
        ({"path": 3}, "path must be a string"),
        ({"path": "x" * 5000}, "path must be a string of at most 4096 bytes"),
        ({"path": "\ud800"}, "half of a surrogate pair"),
        ({"path": "new.safetensors", "wait": True}, "'wait' is no field of an update"),
        ({"path": "new.safetensors", "version": ""}, "a version of weights is 1 to 200"),
        ({"path": "new.safetensors", "version": "unknown"}, "'unknown' is no version"),
        ({"path": "new.safetensors", "version": 1}, "version must be a string"),
        ({"path": "new.safetensors", "when": "now"}, "when is 'now'; it must be one of drain, preempt, abort"),
        ({"path": "bad.safetensors"}, "are damaged: it is no safetensors file"),
    ]:
        response = server.client.post("/update_weights", content=json.dumps(body))
        assert response.status_code == 400 and text in response.json()["error"]["message"], body
    assert server.client.post("/update_weights", content=b"[]").status_code == 400
    assert server.client.post("/update_weights", content=b" " * (65 << 10)).status_code == 413
    assert server.client.get("/update_weights").status_code == 405
    assert version(server) == before


def test_nobody_may_without_the_option(engine: Engine, folder: Path) -> None:
    before = engine.info.weights_version
    with running(engine) as server:
        for path in ("new.safetensors", str(folder / "weights" / "new.safetensors")):
            status, body = update(server, path=path)
            assert status == 403 and "start it with --allow-weight-updates DIR" in body["error"]["message"]
        assert "weights_versions" not in complete(server).json()["choices"][0]
    assert engine.info.weights_version == before


def test_keys_are_asked_for(engine: Engine, folder: Path) -> None:
    with running(engine, weights_dir=str(folder / "weights"), api_keys={"trainer": "secret"}) as server:
        body = {"path": "new.safetensors", "version": "keyed"}
        assert server.client.post("/update_weights", json=body).status_code == 401
        assert engine.info.weights_version != "keyed"
        headers = {"authorization": "Bearer secret"}
        assert server.client.post("/update_weights", json=body, headers=headers).status_code == 200
        assert engine.info.weights_version == "keyed"
        info = server.client.get("/get_server_info", headers=headers).json()
        assert info["settings"]["weights_dir"] == str(folder / "weights")


def test_the_option(tiny_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny_artifact), "--allow-weight-updates", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert "--allow-weight-updates DIR" in cli("serve", "--help").stdout
