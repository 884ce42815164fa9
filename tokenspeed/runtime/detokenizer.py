"""Tokens to text, one at a time: no half characters, and nothing that may be the start of a stop string.

The text of a request is a pure function of its tokens and stop strings; how tokens arrive in events does
not matter. Work per token is bounded by its own bytes and the longest stop string, never by the text so far.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenspeed.runtime.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class StopMatcher:
    """Finds the stop string that is completed first (of several completed at once, the longest).

    ``push`` returns the text that can no longer be part of a stop string; after a match ``matched`` names it
    and everything from its first character on (or after its last one, with ``include``) is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include = include
        self._prefixes = frozenset(stop[:i] for stop in stops for i in range(1, len(stop)))
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        # Held text begins at the earliest point where a stop string may still begin: no match starts before it.
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        keep = self._start_of_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text still held back, now that no more will come."""
        text, self._held = self._held, ""
        return text

    def _start_of_stop(self, text: str) -> int:
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at:] in self._prefixes:
                return at
        return len(text)


class Detokenizer:
    """Text of one request's output, token by token. Bytes that never become a character turn into U+FFFD.

    Args:
        tokenizer: of the artifact.
        skip_special_tokens: leave tokens such as ``<|im_end|>`` out of the text.
        stop: strings that end the text.
        include_stop: whether the text keeps the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ):
        self._token_bytes = tokenizer.token_bytes
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _Utf8("replace")
        self._stops = StopMatcher(stop, include=include_stop) if stop else None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._stops is None else self._stops.matched

    def push(self, token_id: int) -> str:
        """The text that became certain with ``token_id``; often one token's text, sometimes none."""
        if token_id in self._skipped:
            return ""
        return self._release(self._utf8.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """The rest: text held back, and U+FFFD for the start of a character that never came."""
        text = self._release(self._utf8.decode(b"", True))
        return text if self._stops is None else text + self._stops.finish()

    def _release(self, text: str) -> str:
        if self._stops is None or not text:
            return text
        return self._stops.push(text)
