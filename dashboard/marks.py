"""What the API takes in besides telemetry: marks on the time axis, what people say about a verdict, and files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasewise.analyzer.window import parse_time
from phasewise.collector.import_marks import DONE, Mark
from phasewise.collector.importers import import_bytes, import_piece
from phasewise.collector.importers.facts_file import read_facts_file
from phasewise.collector.importers.key_tenant import import_with_tenant
from phasewise.collector.profiles import Profiles
from phasewise.collector.records import Annotation
from phasewise.dashboard.answers import Answers
from phasewise.dashboard.state import View
from phasewise.dashboard.tables import annotations_in, window_object
from phasewise.rules.errors import InputError
from phasewise.rules.vocabulary import CLASS_OF_CAUSE

ANNOTATION_KINDS = ("deploy", "config", "restart", "alert", "note", "ablation")
_SENT_AS = {"scrapes": "scrapes", "spans": "spans", "metrics": "spans", "client": "client", "rows": "auto"}
_MOST_TEXT = 2_000
_FILE = re.compile(r"[0-9a-f]{32}")  # pieces.identity_of
_POSITION = re.compile(rf"{DONE}|[0-9]{{1,18}}:[0-9]{{1,18}}")  # pieces.Place
MAX_BODY_BYTES = 256 * 2**20  # of an uploaded file, before and after decompression


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


@dataclass(frozen=True, slots=True)
class Sent:
    """What a body is: kind as asked for, name; where it is a piece of a file: the number of its first line, the file's identity
    and how far it is read with this piece, and when it was written (Unix nanoseconds); the engine that facts are about."""

    kind: str = "auto"
    name: str = "upload"
    number: int = 0
    file: str = ""
    position: str = ""
    modified_unix_ns: int = 0
    instance: str = ""


def take_in(answers: Answers, body: bytes, sent: Sent, tenant: str | None = None) -> dict[str, Any]:
    """Stores what a file holds, told by its content; counts by kind, and what could not be used.

    tenant: of the key that it came with, "" for a key without one, None without keys.
    """
    # An upload may come from another machine: what it grows to is bounded like what it is.
    profiles = Profiles(answers.rulebook.engines)
    if sent.kind == "facts":
        statements = read_facts_file(body, sent.name, profiles)
        return {"kind": "facts", "counts": answers.writer.add_facts(statements, sent.instance or None), "problems": []}
    if sent.instance:
        raise InputError("instance", sent.instance, "is only about facts", "leave it out, or send kind=facts")
    if (sent.file or sent.position) and not (_FILE.fullmatch(sent.file) and _POSITION.fullmatch(sent.position)):
        raise InputError(
            "file", sent.file, "is no mark of a file", "leave file and position to phasewise ingest --server"
        )
    now = answers.clock()
    modified = sent.modified_unix_ns or now
    if sent.number:
        imported = import_piece(
            body,
            sent.name,
            profiles,
            modified_unix_ns=modified,
            received_unix_ns=now,
            first_number=sent.number,
            limit_bytes=MAX_BODY_BYTES,
        )
    else:
        imported = import_bytes(
            body, sent.name, profiles, modified_unix_ns=modified, received_unix_ns=now, limit_bytes=MAX_BODY_BYTES
        )
    if sent.kind != "auto" and imported.kind != "nothing" and sent.kind != _SENT_AS[imported.kind]:
        held = f"but {sent.name} holds {_SENT_AS[imported.kind]}"
        raise InputError("kind", sent.kind, held, "leave the kind out: content tells it")
    counts = imported.counts
    if tenant is not None:
        imported = import_with_tenant(imported, tenant)
    if imported.kind != "nothing":
        mark = Mark(sent.file, sent.position) if sent.file and sent.position else None
        counts = answers.writer.add_import(imported, mark)
    return {"kind": imported.kind, "format": imported.format, "counts": counts, "problems": list(imported.problems)}


def import_position(answers: Answers, identity: str) -> dict[str, str]:
    """How far a file is read that was imported here before."""
    return {"file": identity, "position": answers.writer.import_position(identity)}
