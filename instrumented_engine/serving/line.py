"""One sequence of a call as its handler sees it: text out of tokens, and when bytes of it were handed to the socket."""

from __future__ import annotations

from phasewise.instrumented_engine.llama.tokenizer import Detokenizer
from phasewise.instrumented_engine.request_telemetry import Boundary, ToolRun
from phasewise.instrumented_engine.sequence import Sequence
from phasewise.instrumented_engine.serving.stop_text import StopText


class Line:
    """request_id: the engine's, one of its own for each sequence; sequence: once the engine took it."""

    __slots__ = (
        "_detokenizer", "_stop", "ended", "finished_ns", "first_token_ns", "index", "last_token_ns", "longest_gap_ns",
        "request_id", "sequence", "span_id", "text", "tokens",
    )  # fmt: skip

    def __init__(
        self, index: int, request_id: str, span_id: bytes, detokenizer: Detokenizer, stop: tuple[str, ...]
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.span_id = span_id
        self.sequence: Sequence | None = None
        self.tokens = 0
        self.text = ""
        self.ended = False
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.finished_ns: int | None = None
        self.longest_gap_ns: int | None = None
        self._detokenizer = detokenizer
        self._stop = StopText(stop)

    @property
    def stopped(self) -> bool:
        """A stop string came; what the engine still yields is not part of the answer."""
        return self._stop.stopped

    def push(self, token: int) -> str:
        """Text that may be given out with this token."""
        if self.stopped:
            return ""
        self.tokens += 1
        return self._said(self._stop.push(self._detokenizer.push(token)))

    def finish(self) -> str:
        """Text that was held back, at the end."""
        if self.stopped:
            return ""
        text = self._stop.push(self._detokenizer.finish())
        return self._said(text + self._stop.finish())

    def handed_over(self, now_ns: int) -> int | None:
        """Bytes with new tokens were handed to the socket; nanoseconds since the last time, None for the first."""
        before, self.last_token_ns = self.last_token_ns, now_ns
        if before is None:
            self.first_token_ns = now_ns
            return None
        gap_ns = now_ns - before
        self.longest_gap_ns = max(self.longest_gap_ns or 0, gap_ns)
        return gap_ns

    def boundary(self, arrival_ns: int, now_ns: int, tools: tuple[ToolRun, ...], error: str | None) -> Boundary:
        """What the server saw of it. now_ns: the end, where no last byte was handed over."""
        return Boundary(
            arrival_ns=arrival_ns,
            finished_ns=self.finished_ns or now_ns,
            first_token_ns=self.first_token_ns,
            longest_gap_ns=self.longest_gap_ns,
            tools=tools,
            error=error,
        )

    def _said(self, text: str) -> str:
        self.text += text
        return text
