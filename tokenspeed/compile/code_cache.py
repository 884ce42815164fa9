"""The cache of compiled kernels: files named by the digest of all that their content depends on.

An entry is written whole or not at all, and its own digest is checked whenever it is read: a damaged entry is as
good as none. A cache that cannot be written (a read-only home, a full disk) makes builds slower, not wrong.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_MAGIC = b"tokenspeed code 1\n"
_DIGEST_BYTES = 32
MAX_BYTES = 4 << 30
"""Size to which ``prune`` cuts a cache by default: some tens of whole builds."""


def default_cache() -> Path:
    """``tokenspeed/kernels`` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = configured if configured.is_absolute() else Path.home() / ".cache"
    return root / "tokenspeed" / "kernels"


class CodeCache:
    """Contents by key (a hexadecimal digest), in files below ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, key: str) -> Path:
        """Where the content of ``key`` is, if the cache has it."""
        return self.folder / key[:2] / key[2:]

    def read(self, key: str) -> bytes | None:
        """The content that was written for ``key``; None if there is none, or it is damaged."""
        try:
            data = self.path(key).read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + _DIGEST_BYTES
        content = data[start:]
        whole = len(data) >= start and data.startswith(_MAGIC) and data[len(_MAGIC) : start] == _digest(key, content)
        return content if whole else None

    def write(self, key: str, content: bytes) -> None:
        """Keep ``content`` for ``key``, if the disk allows it."""
        path = self.path(key)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(_MAGIC + _digest(key, content) + content)
                os.replace(temporary, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary)
                raise

    def prune(self, max_bytes: int = MAX_BYTES) -> None:
        """Delete what was written longest ago until ``max_bytes`` remain."""
        found = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                facts = path.stat()
                found.append((facts.st_mtime_ns, facts.st_size, path))
        excess = sum(size for _, size, _ in found) - max_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            with suppress(OSError):
                path.unlink()
            excess -= size


def _digest(key: str, content: bytes) -> bytes:
    """The key is part of it: a file under another name is as wrong as one with other bytes."""
    return hashlib.sha256(key.encode() + b"\0" + content).digest()
