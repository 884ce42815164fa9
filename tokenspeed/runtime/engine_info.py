"""What an engine says of itself: what it serves, and how it fares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenspeed.runtime.loader import Loaded
from tokenspeed.step import MAX_TOP_LOGPROBS


@dataclass(frozen=True)
class EngineInfo:
    """What the engine serves and within which limits. ``attestation`` is empty where nobody asked for one; otherwise it
    has the ``digest`` and ``date`` of the one that holds, or why there is none: ``unattested``, and ``missing``."""

    model: str
    target: str
    dtype: str
    numerics: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_prefill_tokens: int
    max_top_logprobs: int
    penalties: bool
    page_size: int
    num_pages: int
    device: str
    threads: int
    artifact_digest: str
    num_host_pages: int = 0
    weights_version: str = ""
    """Of the weights that run now: the artifact's digest, until they are updated."""
    attestation: Mapping[str, str] = field(default_factory=dict)


@dataclass
class EngineStats:
    """A snapshot. Counters run from the engine's start; ``device`` holds the device's own counters, ``after_ready``
    those of what a closed runtime never does, ``scheduler`` the scheduler's, and ``host`` the host's seconds by part of
    a step. Free pages are to be had at once; the cached ones among them hold a prefix, which no request uses now. There
    are no host pages any more once moving pages has failed too often. ``dropped`` is what a trace or events for routers
    lack. ``weight_update_seconds`` is for how long, in all, updates of weights kept steps from running."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    num_cached_pages: int = 0
    num_host_pages: int = 0
    num_host_pages_used: int = 0
    oldest_wait_seconds: float = 0.0
    waiting_by_priority: tuple[int, ...] = ()
    scheduler: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    after_ready: dict[str, int] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    weight_updates: int = 0
    weight_update_seconds: float = 0.0


def info_of(loaded: Loaded) -> EngineInfo:
    manifest = loaded.artifact.manifest
    envelope = manifest.envelope
    return EngineInfo(
        model=envelope.model,
        target=loaded.section.target,
        dtype=envelope.dtype,
        numerics=envelope.numerics,
        vocab_size=manifest.model.vocab_size,
        max_model_len=envelope.max_model_len,
        max_num_seqs=envelope.max_num_seqs,
        max_prefill_tokens=envelope.max_prefill_tokens,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        penalties=envelope.penalties,
        page_size=envelope.page_size,
        num_pages=loaded.num_pages,
        device=loaded.place,
        threads=loaded.threads,
        artifact_digest=loaded.artifact.digest,
        num_host_pages=loaded.num_host_pages,
        weights_version=loaded.artifact.digest,
        attestation={} if loaded.standing is None else {k: v for k, v in asdict(loaded.standing).items() if v},
    )
