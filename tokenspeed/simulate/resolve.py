"""What a simulation stands for: the limits and buckets of an artifact or of costs, and the size of the caches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike

from tokenspeed.artifact import Artifact, TargetSection
from tokenspeed.bucket import Bucket, BucketKind, StepLimits
from tokenspeed.errors import ProgramError, UsageError
from tokenspeed.simulate.cost import CostModel, Costs, buckets_of, model, with_attention
from tokenspeed.simulate.fleet import Deployment
from tokenspeed.target import Target

MAX_MODEL_LEN = 131072
PAGE_SIZE = 64
HOST_LINK = 50e9
"""Bytes a second between a GPU and pinned host memory, over a PCIe 5.0 link of 16 lanes."""
MOST_PAGES = 1 << 24
MOST = (1 << 31) - 1


@dataclass(frozen=True)
class Wanted:
    """What was asked for; None: the artifact's, or a default. Sizes of caches in GiB or in pages, of one replica."""

    costs: Costs
    artifact: str | PathLike[str] | None = None
    target: str | None = None
    max_num_seqs: int | None = None
    max_prefill_tokens: int | None = None
    max_model_len: int | None = None
    page_size: int | None = None
    kv_gib: float | None = None
    kv_pages: int | None = None
    host_kv_gib: float | None = None
    host_link: float = HOST_LINK
    max_waiting: int = 1024
    steps_in_flight: int | None = None
    prefix_index: bool = True
    aging_seconds: float = 10.0


@dataclass(frozen=True)
class Resolved:
    """``notes``: what a reader should know, one sentence each."""

    deployment: Deployment
    model: CostModel
    notes: tuple[str, ...] = field(default=())


def resolve(wanted: Wanted) -> Resolved:
    """The deployment and what its steps cost. Raises UsageError, and ArtifactError of the artifact."""
    notes: list[str] = []
    costs, buckets, page_size = wanted.costs, None, wanted.page_size or PAGE_SIZE
    bytes_per_token = _bytes_per_token(costs)
    target = costs.provenance.target
    max_model_len, seqs, tokens = MAX_MODEL_LEN, _largest(costs, BucketKind.DECODE), _largest(costs, BucketKind.MIXED)
    if wanted.artifact is not None:
        artifact = Artifact.open(wanted.artifact)
        section, envelope = _section(artifact, wanted), artifact.manifest.envelope
        if wanted.page_size not in (None, envelope.page_size):
            raise UsageError(f"--page-size is {wanted.page_size}, but the artifact has pages of {envelope.page_size}")
        target = section.target
        buckets, page_size = [entry.bucket for entry in section.buckets], envelope.page_size
        bytes_per_token = section.kv_page_bytes / page_size
        costs = with_attention(costs, bytes_per_token)
        max_model_len, seqs, tokens = envelope.max_model_len, envelope.max_num_seqs, envelope.max_prefill_tokens
        notes += _differences(artifact, section, costs)
    if costs.per_context_token is None:
        notes.append("nothing says what a decode waits for its context, so it costs nothing: add context=TIME to "
                     "--step-cost, or a bench")  # fmt: skip
    limits = _limits(wanted.max_num_seqs or seqs, wanted.max_prefill_tokens or tokens)
    num_host_pages = _pages(wanted.host_kv_gib, bytes_per_token, page_size, "--host-kv-gib")
    move_seconds = (bytes_per_token or 0.0) * page_size / wanted.host_link if num_host_pages else 0.0
    deployment = Deployment(
        limits=limits,
        max_model_len=wanted.max_model_len or max_model_len,
        page_size=page_size,
        num_pages=_kv_pages(wanted, bytes_per_token, page_size),
        num_host_pages=num_host_pages,
        page_move_seconds=move_seconds,
        max_waiting=wanted.max_waiting,
        steps_in_flight=wanted.steps_in_flight or (1 if target.startswith("cpu:") else 2),
        prefix_index=wanted.prefix_index,
        aging_seconds=wanted.aging_seconds,
    )
    return Resolved(deployment, model(costs, _used(buckets, costs, limits), limits), tuple(notes))


def _used(buckets: Iterable[Bucket] | None, costs: Costs, limits: StepLimits) -> tuple[Bucket, ...]:
    return tuple(buckets) if buckets is not None else buckets_of(costs, limits)


def _limits(max_num_seqs: int, max_prefill_tokens: int) -> StepLimits:
    try:
        return StepLimits(max_prefill_tokens, max_num_seqs, max_num_seqs)
    except ProgramError as e:
        raise UsageError(e.message, hint="give --max-num-seqs and --max-step-tokens") from None


def _largest(costs: Costs, kind: BucketKind) -> int:
    """Tokens of the largest step of a kind that the costs know."""
    sizes = [b.num_tokens for b in costs.buckets if b.kind is kind] or [
        p.num_tokens for p in costs.points if p.kind is kind
    ]
    if not sizes:
        raise UsageError(f"the costs have no {kind} step", hint=f"add one, as in --step-cost {kind}:64=5ms")
    return max(sizes)


def _bytes_per_token(costs: Costs) -> float | None:
    """KV bytes of a position, as the costs imply: what a decode waits for it, at the bandwidth that was measured."""
    if not costs.per_context_token or costs.read_bytes_per_second is None:
        return None
    return costs.per_context_token * costs.read_bytes_per_second


def _section(artifact: Artifact, wanted: Wanted) -> TargetSection:
    targets = [section.target for section in artifact.manifest.targets]
    target = wanted.target or wanted.costs.provenance.target
    if wanted.target is None and target not in targets:
        if len(targets) > 1:
            raise UsageError(
                f"the artifact was built for {', '.join(targets)}, and the costs do not say which of them it is",
                hint="give --target",
            )
        target = targets[0]
    return artifact.manifest.section(Target.parse(target))


def _differences(artifact: Artifact, section: TargetSection, costs: Costs) -> Iterable[str]:
    told = costs.provenance
    if told.artifact and told.artifact != artifact.digest:
        yield f"the costs were measured with artifact {told.artifact[:12]}, this one is {artifact.digest[:12]}"
    if told.target and told.target != section.target:
        yield f"the costs were measured on {told.target}, this is {section.target}"


def _kv_pages(wanted: Wanted, bytes_per_token: float | None, page_size: int) -> int:
    if (wanted.kv_pages is None) == (wanted.kv_gib is None):
        raise UsageError(
            "need the size of a replica's KV cache, once",
            hint="give --kv-gib or --kv-pages; `tokenspeed serve` prints how many pages it has",
        )
    if wanted.kv_pages is not None:
        return wanted.kv_pages
    return _pages(wanted.kv_gib, bytes_per_token, page_size, "--kv-gib")


def _pages(gib: float | None, bytes_per_token: float | None, page_size: int, option: str) -> int:
    """Pages in so many GiB; 0 for None."""
    if gib is None:
        return 0
    if bytes_per_token is None:
        raise UsageError(
            f"{option} needs the bytes of a KV page, and nothing tells them",
            hint="give --artifact, or --kv-pages in place of --kv-gib",
        )
    pages = int(gib * (1 << 30) / (bytes_per_token * page_size))
    if not 1 <= pages <= MOST_PAGES:
        raise UsageError(f"{option} is {gib:g}: {pages} pages; need 1 to {MOST_PAGES}")
    return pages
