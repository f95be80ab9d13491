"""What the API takes in besides telemetry: marks on the time axis, what people say about a verdict, and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise.analyzer.window import parse_time
from phasewise.collector.importers import import_bytes
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import Annotation
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.state import View
from phasewise.dashboard.tables import annotations_in, window_object
from phasewise.rules.errors import InputError
from phasewise.rules.vocabulary import CLASS_OF_CAUSE

ANNOTATION_KINDS = ("deploy", "config", "restart", "alert", "note", "ablation")
_SENT_AS = {"scrapes": "scrapes", "spans": "spans", "metrics": "spans", "client": "client"}
_MOST_TEXT = 2_000


def annotation_list(answers: Answers, view: View) -> dict[str, Any]:
    window = view.window(answers.now())
    return {"window": window_object(window), "annotations": annotations_in(answers, window)}


def annotate(answers: Answers, told: Mapping[str, object]) -> dict[str, Any]:
    """Stores a mark: `kind`, `text`, and `time` (now without one)."""
    kind = _text(told, "kind", "note")
    if kind not in ANNOTATION_KINDS:
        raise InputError("kind", kind, "is not a kind of annotation", f"one of {', '.join(ANNOTATION_KINDS)}")
    text = _text(told, "text")
    unix_ns = parse_time(_text(told, "time", "now"), answers.clock(), "time")
    return _store(answers, unix_ns, kind, text, _text(told, "source", "api"))


def judge(answers: Answers, told: Mapping[str, object]) -> dict[str, Any]:
    """Stores whether a verdict was right: `right` (true or false), `cause` as told, optional `note` and `time`."""
    right = told.get("right")
    if not isinstance(right, bool):
        raise InputError("right", repr(right), "is neither true nor false", "say whether the verdict was right")
    cause = _text(told, "cause", "inconclusive")
    if cause != "inconclusive" and cause not in CLASS_OF_CAUSE:
        raise InputError("cause", cause, "is not a cause", "send the cause of the verdict, or inconclusive")
    note = _text(told, "note", "")
    unix_ns = parse_time(_text(told, "time", "now"), answers.clock(), "time")
    text = f"{cause}: {'right' if right else 'wrong'}" + (f"; {note}" if note else "")
    return _store(answers, unix_ns, "outcome", text, "api")


def _text(told: Mapping[str, object], key: str, default: str | None = None) -> str:
    value = told.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise InputError("body", key, "is missing or not text", f"send {key} as text")
    if len(value) > _MOST_TEXT:
        raise InputError("body", key, "is too long", f"at most {_MOST_TEXT} characters")
    return value


def _store(answers: Answers, unix_ns: int, kind: str, text: str, source: str) -> dict[str, Any]:
    answers.writer.annotate([Annotation(unix_ns=unix_ns, kind=kind, text=text, source=source)])
    return {"unix_ns": unix_ns, "kind": kind, "text": text, "source": source}


def take_in(answers: Answers, body: bytes, kind: str, name: str) -> dict[str, Any]:
    """Stores what a file holds, told by its content; counts by kind, and what could not be used."""
    imported = import_bytes(body, name, Profiles(answers.rulebook.engines), modified_unix_ns=answers.clock())
    if kind not in ("auto", _SENT_AS[imported.kind]):
        raise InputError(
            "kind", kind, f"but {name} holds {_SENT_AS[imported.kind]}", "leave the kind out: content tells it"
        )
    counts = answers.writer.add_import(imported)
    return {"kind": imported.kind, "format": imported.format, "counts": counts, "problems": list(imported.problems)}
