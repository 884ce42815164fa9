"""Every error a user can cause, each saying what is needed, what was found and what to do.

Assertions elsewhere are for our own bugs; these types are for the user's. The command line prints
them as ``error: ...`` followed by a ``hint: ...`` line and exits with ``exit_code``; the server maps
them to an HTTP status.
"""

from __future__ import annotations


class TokenSpeedError(Exception):
    """Base of all user-facing errors.

    Args:
        message: what is wrong: what is needed and what was found.
        hint: what to do about it, as one imperative sentence (optional).
    """

    exit_code = 1
    http_status = 500
    kind = "server_error"

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"


class UsageError(TokenSpeedError):
    """A command line or an API call whose arguments do not make sense together."""

    exit_code = 2


class CheckpointError(TokenSpeedError):
    """The checkpoint is missing, truncated, or of a kind that is not supported."""

    exit_code = 3


class EnvelopeError(TokenSpeedError):
    """The envelope asks for something that cannot be promised, or contradicts itself."""

    exit_code = 4


class SelectionError(TokenSpeedError):
    """No kernel fulfils what an op needs on a target."""

    exit_code = 5


class ProgramError(TokenSpeedError):
    """A Program or LaunchGraph breaks a rule of its schema."""

    exit_code = 6


class ArtifactError(TokenSpeedError):
    """The artifact is missing, damaged, or of another format version."""

    exit_code = 7


class TargetError(TokenSpeedError):
    """A target name is unknown, or this machine cannot run (or build for) the target."""

    exit_code = 8


class ResourceError(TokenSpeedError):
    """Memory, disk, or a port that is needed is not there."""

    exit_code = 9


class RequestError(TokenSpeedError):
    """One request is invalid; only that request ends.

    Args:
        param: the request field at fault, by its public name, or None.
    """

    http_status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None):
        super().__init__(message, hint=hint)
        self.param = param


class QueueFullError(RequestError):
    """The waiting queue is at its limit; the client should retry later.

    Args:
        retry_after: seconds after which that may help, by how fast the queue has drained of late.
        of_tenant: whether the limit is that of its API key or user, and others still get in.
    """

    http_status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, hint: str | None = None, retry_after: int = 1, of_tenant: bool = False):
        super().__init__(message, hint=hint)
        self.retry_after = retry_after
        self.of_tenant = of_tenant


class WeightsError(RequestError):
    """A file of weights does not fit the artifact that runs, or could not take the place of its weights."""

    code = "weights_error"


class EngineClosedError(TokenSpeedError):
    """The engine is draining or has stopped and takes no new requests."""

    http_status = 503


class EngineFailedError(TokenSpeedError):
    """The engine stopped working, as when its GPU is lost. Only a new process helps."""

    exit_code = 10


class AttestationError(TokenSpeedError):
    """An artifact promises equal bits, and there is no valid proof of it for this target."""

    exit_code = 11


class DivergenceError(TokenSpeedError):
    """Bits that had to be equal are not."""

    exit_code = 12


class DumpError(TokenSpeedError):
    """A dump of log-probabilities is missing, damaged, or of another model."""

    exit_code = 13
