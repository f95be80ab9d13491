"""A file about engines themselves: a pod or workload as JSON or YAML, an answer of an engine's server, a start-up log, a command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from phasewise.collector.fact_texts import (
    answer_told,
    command_words,
    document_of,
    knowing,
    of_answer,
    of_command,
    of_log,
)
from phasewise.collector.facts import Statement, settings_from
from phasewise.collector.importers.manifests import manifests_of
from phasewise.collector.profiles import Profiles
from phasewise.rules.errors import InputError

MOST_BYTES = 64 << 20
REMEDY = (
    "give what kubectl get pod NAME -o json or -o yaml prints, an answer of the engine's server as JSON (/get_server_info, /info, /props), its "
    "start-up log, or the command line it was started with"
)


def read_facts_file(body: bytes, name: str, profiles: Profiles) -> list[Statement]:
    """What a file says of engine processes. Raises InputError where it says nothing that is known."""
    if len(body) > MOST_BYTES:
        raise InputError(
            name, "", f"is longer than {MOST_BYTES >> 20} MiB", "give its first lines: the start of the engine"
        )
    text = body.decode("utf-8", "replace")
    document = document_of(text)
    if document is None:
        document = manifests_of(text, name)
    if document is not None and not isinstance(document, Mapping | list):
        document = None
    found = _of_document(document, name, profiles) if document is not None else _of_text(text, profiles)
    if not found:
        raise InputError(name, "", "tells nothing of a known engine", REMEDY)
    return found


def _of_document(document: object, name: str, profiles: Profiles) -> list[Statement]:
    if isinstance(document, list) and all(isinstance(word, str) for word in document):
        own = of_command(profiles, document)
        return [own] if own else []
    objects = list(_kubernetes_objects(document))
    if objects:
        found = [one for pod in objects for one in _of_pod(pod, profiles)]
        if not found:
            raise InputError(
                name,
                "containers",
                "hold no known engine",
                "name a pod that runs vLLM, SGLang, TGI or another known one",
            )
        return found
    documents = document if isinstance(document, list) else [document]
    return _of_answers(documents, name, profiles)


def _of_answers(documents: Sequence[object], name: str, profiles: Profiles) -> list[Statement]:
    """The engine whose settings the answers tell most of; where two would do, nothing tells which."""
    told = answer_told(documents)
    counted = [(len(settings_from(facts, told)), profile, facts) for profile, facts in knowing(profiles)]
    most = max((count for count, _, _ in counted), default=0)
    best = [(profile, facts) for count, profile, facts in counted if count == most]
    if not most:
        return []
    if len(best) > 1:
        engines = ", ".join(profile.id for profile, _ in best)
        raise InputError(
            name, "", f"could be an answer of {engines}", "give the answer that tells the settings too, or the log"
        )
    return [of_answer(*best[0], documents, None)]


def _of_text(text: str, profiles: Profiles) -> list[Statement]:
    logs = [one for profile, facts in knowing(profiles) if (one := of_log(profile, facts, text)) is not None]
    if logs:
        return [max(logs, key=lambda one: len(one.settings))]
    own = of_command(profiles, command_words(text)) if len(text) < 1 << 16 else None
    return [own] if own else []


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def _kubernetes_objects(document: object) -> Iterator[Mapping[str, Any]]:
    """Pods, and workloads that hold the template of one, among lists of them."""
    if isinstance(document, list):
        for one in document:
            yield from _kubernetes_objects(one)
    elif isinstance(document, Mapping):
        if isinstance(document.get("items"), list):
            yield from _kubernetes_objects(document["items"])
        elif isinstance(_spec(document).get("containers"), list):
            yield document
        elif "containers" in document and isinstance(document["containers"], list):
            yield {"spec": document}
        else:
            template = _spec(document).get("template")
            if isinstance(template, Mapping) and isinstance(_spec(template).get("containers"), list):
                yield {"spec": template["spec"]}  # which of its pods runs this is not told


def _spec(document: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = document.get("spec")
    return spec if isinstance(spec, Mapping) else {}


def _of_pod(pod: Mapping[str, Any], profiles: Profiles) -> Iterator[Statement]:
    metadata = pod.get("metadata") if isinstance(pod.get("metadata"), Mapping) else {}
    status = pod.get("status") if isinstance(pod.get("status"), Mapping) else {}
    assert isinstance(metadata, Mapping) and isinstance(status, Mapping)
    names = []
    if metadata.get("name"):
        names.append(f"{metadata.get('namespace') or 'default'}/{metadata['name']}")
    if isinstance(status.get("podIP"), str):
        names.append(status["podIP"])
    for container in _spec(pod)["containers"]:
        if not isinstance(container, Mapping):
            continue
        words = [word for key in ("command", "args") for word in container.get(key) or () if isinstance(word, str)]
        ports = [one.get("containerPort") for one in container.get("ports") or () if isinstance(one, Mapping)]
        own = (*names, *(f"{status['podIP']}:{port}" for port in ports if port and status.get("podIP")))
        image = str(container.get("image") or "")
        started = _started_unix_ns(status, str(container.get("name")))
        if one := of_command(profiles, words, image=image, unix_ns=started, names=own):
            yield one


def _started_unix_ns(status: Mapping[str, Any], container: str) -> int | None:
    """When the container that runs now began, else the pod."""
    told: object = status.get("startTime")
    for one in status.get("containerStatuses") or ():
        if isinstance(one, Mapping) and one.get("name") == container:
            running = (one.get("state") or {}).get("running") or {}
            told = running.get("startedAt") or told
    try:
        return round(datetime.fromisoformat(str(told).replace("Z", "+00:00")).timestamp() * 1e9)
    except ValueError:
        return None
