"""What engines tell of themselves: each profile's own examples, precedence of sources, and nothing that gives access."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from span_tables import at, span_table
from writing import Bench, bench, engine_span, rulebook

from phasewise.analyzer.matching import Situation
from phasewise.analyzer.replicas import read_replicas
from phasewise.analyzer.window import Window
from phasewise.collector.exposition import read_exposition
from phasewise.collector.fact_texts import command_words, of_answer, of_command, of_log
from phasewise.collector.facts import Statement, as_settings, clean_text, merged, noted, valid_facts
from phasewise.collector.importers.facts_file import read_facts_file
from phasewise.collector.profiles import Profiles
from phasewise.rules.engine_facts import FactExample, Facts
from phasewise.rules.engine_profile import EngineProfile
from phasewise.rules.errors import InputError

PROFILES = Profiles(rulebook().engines)
CASES = [
    pytest.param(profile, profile.facts, example, id=f"{profile.id}: {example.name}")
    for profile in PROFILES.ordered
    if profile.facts
    for example in profile.facts.examples
]


def stated(profile: EngineProfile, facts: Facts, example: FactExample) -> Statement | None:
    if example.kind == "startup_log":
        return of_log(profile, facts, example.text)
    if example.kind == "pod_arguments":
        return of_command(PROFILES, command_words(example.text))
    return of_answer(profile, facts, [json.loads(example.text)], None)


@pytest.mark.parametrize(("profile", "facts", "example"), CASES)
def test_examples_of_every_engine(profile: EngineProfile, facts: Facts, example: FactExample) -> None:
    found = stated(profile, facts, example)
    assert found is not None
    assert (found.engine, found.source) == (profile.id, example.kind)
    assert dict(found.settings) == dict(example.settings)
    if example.secret:
        assert example.secret in example.text
        assert example.secret not in repr(found)
    assert not example.path or example.path in facts.endpoints


@pytest.mark.parametrize(("profile", "facts", "example"), [case for case in CASES if case.values[2].secret])  # type: ignore[union-attr]
def test_a_source_cut_anywhere_gives_no_secret_away(profile: EngineProfile, facts: Facts, example: FactExample) -> None:
    for length in range(0, len(example.text), 23):
        if example.kind != "server_info":
            cut = FactExample(example.name, example.kind, example.text[:length], {})
            assert example.secret[:8] not in repr(stated(profile, facts, cut))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("https://me:pass@host/models/m?token=abc#x", "https://host/models/m"),
        ("s3://bucket/m", "s3://bucket/m"),
        ("hf_abcdefghijklmnop", None),
        ("Bearer abc", None),
        ("sk-proj-0123456789abc", None),
        ("http://[broken", None),
        ("x" * 201, None),
        ("two\nlines", None),
    ],
)
def test_text_that_may_give_access_is_not_kept(text: str, kept: str | None) -> None:
    assert clean_text(text) == kept


def test_sources_stand_side_by_side_and_the_believed_one_first() -> None:
    told = merged(
        noted({"max_num_seqs": 256, "kv_dtype": "auto"}, "pod_arguments", 10),
        noted({"max_num_seqs": 128}, "server_info", 20),
        noted({"kv_dtype": "fp8"}, "startup_log", 5),
    )
    settings = as_settings(told)
    assert (settings["max_num_seqs"].value, settings["max_num_seqs"].source) == (128, "server_info")
    assert settings["max_num_seqs"].others == ((256, "pod_arguments"),)
    assert settings["kv_dtype"].others == (("auto", "pod_arguments"),)
    again = merged(told, noted({"max_num_seqs": 64}, "server_info", 30))
    assert again["max_num_seqs"] == {
        "value": 64,
        "source": "server_info",
        "unix_ns": 30,
        "others": [{"value": 256, "source": "pod_arguments", "unix_ns": 10}],
    }
    assert merged(again, noted({"max_num_seqs": 1}, "server_info", 20)) == again, "an older answer changes nothing"
    assert as_settings(merged(again, noted({"max_num_seqs": 9}, "user")))["max_num_seqs"].value == 9


def test_two_sources_that_agree_are_no_conflict() -> None:
    told = merged(noted({"tensor_parallel": 2}, "pod_arguments"), noted({"tensor_parallel": 2}, "server_info"))
    assert as_settings(told)["tensor_parallel"].others == ()


def test_facts_hold_from_the_start_of_their_process() -> None:
    rows = [{"instance": "a", "first_seen_unix_ns": time} for time in (100, 200)]
    assert [row["first_seen_unix_ns"] for row in valid_facts(rows, 150)] == [100]
    assert [row["first_seen_unix_ns"] for row in valid_facts(rows, 250)] == [100, 200]
    assert [row["first_seen_unix_ns"] for row in valid_facts(rows, 50)] == [100], "nothing tells that it was otherwise"


POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "llm-0", "namespace": "prod"},
    "spec": {
        "containers": [
            {"name": "sidecar", "image": "envoy:1.30", "args": ["--max-num-seqs", "1"]},
            {
                "name": "engine",
                "image": "registry/vllm/vllm-openai:v0.11.0",
                "args": ["--model", "Qwen/Qwen3-8B", "--max-num-seqs=64", "--api-key", "sk-0123456789abcdef"],
                "ports": [{"containerPort": 8000}],
                "env": [{"name": "HF_TOKEN", "value": "hf_abcdefghijklmnop"}],
            },
        ]
    },
    "status": {
        "podIP": "10.0.0.7",
        "startTime": "2026-11-29T17:00:00Z",
        "containerStatuses": [{"name": "engine", "state": {"running": {"startedAt": "2026-11-29T17:06:40Z"}}}],
    },
}


def facts_of(document: object, name: str = "pod.json") -> list[Statement]:
    return read_facts_file(json.dumps(document).encode(), name, PROFILES)


def test_a_pod_tells_arguments_version_names_and_its_start() -> None:
    (said,) = facts_of(POD)
    assert said.settings == {
        "model": "Qwen/Qwen3-8B",
        "max_num_seqs": 64,
        "effective_max_num_seqs": 64,
        "engine_version": "0.11.0",
    }
    assert said.names == ("prod/llm-0", "10.0.0.7", "10.0.0.7:8000")
    assert said.unix_ns == 1_795_972_000 * 10**9
    assert said.ignored == 1, "the key is counted, and named nowhere"
    assert "hf_" not in repr(said) and "sk-" not in repr(said)


def test_a_pod_in_yaml_tells_the_same() -> None:
    """With documents of other kinds around it, and times that YAML would read as dates."""
    text = yaml.safe_dump_all([{"apiVersion": "v1", "kind": "Service", "spec": {"ports": []}}, POD])
    assert read_facts_file(text.encode(), "pod.yaml", PROFILES) == facts_of(POD)
    unquoted = text.replace("'2026-11-29T17:06:40Z'", "2026-11-29T17:06:40Z")
    assert unquoted != text
    assert read_facts_file(unquoted.encode(), "pod.yaml", PROFILES) == facts_of(POD)
    items = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [POD, json.loads(json.dumps(POD))]})
    assert len(read_facts_file(items.encode(), "pods.yaml", PROFILES)) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: Pod\nspec:\n  containers: [\n", "no YAML that can be read: line 4"),
        ("kind: Pod\na: &a [x, x]\nb: &b [*a, *a]\nspec:\n  containers: [*b]\n", "line 3: has an alias"),
        ("kind: Pod\nspec:\n  containers: !!python/object/apply:os.system [x]\n", "line 3: could not determine"),
        ("kind: Pod\nspec:\n  containers: " + "[" * 5000, "no YAML that can be read"),
        ("kind: Pod\nspec:\n  containers: []\n" + "#" * (4 << 20), "more than 4 MiB"),
    ],
)
def test_yaml_that_is_broken_or_hostile_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_facts_file(text.encode(), "pod.yaml", PROFILES)


def test_lists_and_templates_of_pods_are_read() -> None:
    deployment = {"kind": "Deployment", "metadata": {"name": "llm"}, "spec": {"template": {"spec": POD["spec"]}}}
    assert facts_of(deployment)[0].names == (), "which of its pods is not told"
    assert len(facts_of({"kind": "List", "items": [POD, deployment]})) == 2
    with pytest.raises(InputError, match="no known engine"):
        facts_of({"kind": "Pod", "spec": {"containers": [{"image": "nginx"}]}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tells nothing of a known engine"),
        ("hello world", "tells nothing of a known engine"),
        ('{"a": 1}', "tells nothing of a known engine"),
        ('{"version": "1"}', "could be an answer of"),
        ("[1, 2]", "tells nothing of a known engine"),
        ("\x00\xff" * 50, "tells nothing of a known engine"),
    ],
)
def test_what_tells_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_facts_file(text.encode("utf-8", "replace"), "facts.txt", PROFILES)


def test_a_command_in_a_shell_of_a_pod() -> None:
    words = ["/bin/sh", "-c", "export A=1 && exec vllm serve m --max-num-seqs 8 -tp 2 && sleep 1 --max-num-seqs 9"]
    said = of_command(PROFILES, words)
    assert said is not None
    assert said.settings == {"model": "m", "max_num_seqs": 8, "effective_max_num_seqs": 8, "tensor_parallel": 2}
    assert of_command(PROFILES, ["/bin/sh", "-c", "sleep 1"]) is None


# --- in the store ----------------------------------------------------------------------------------------------------


def named(instance: str, start_s: float = 1.0, number: int = 1) -> dict[str, Any]:
    resource = {"service.instance.id": instance, "service.name": "engine"}
    return engine_span(start_s=start_s, trace=f"{number:032x}", resource=resource)


def feed(b: Bench, second: float, started_s: float | None, instance: str = "host:8000") -> None:
    started = "" if started_s is None else f"\nprocess_start_time_seconds {started_s!r}"
    read = read_exposition(f"vllm:num_requests_running 1{started}", at(second), PROFILES, instance=instance)
    assert read is not None
    b.writer.add_samples([read])


def settings_in(b: Bench, from_s: float = -10, to_s: float = 100) -> dict[str, Any]:
    window = Window(at(from_s), at(to_s))
    rows = b.store.query("SELECT * FROM requests")
    replicas, *_ = read_replicas(b.store, window, [], rows)
    return dict(replicas[0].settings)


def test_facts_of_a_scraped_address_reach_the_replica_it_is_joined_to(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        feed(b, 0, None)
        b.writer.add_spans(span_table([named("a")]))
        b.writer.add_answers("host:8000", at(1), {"max_num_seqs": 32, "engine_version": "0.11.0"})
        b.writer.add_facts(facts_of(["vllm", "serve", "m", "--max-num-seqs", "64"]), "host:8000")
        found = settings_in(b)
        assert (found["max_num_seqs"].value, found["max_num_seqs"].source) == (32, "server_info")
        assert found["max_num_seqs"].others == ((64, "pod_arguments"),)
        assert b.writer._memory.registry.settings("a") == found, "attribution sees what the verdict sees"
        b.reopen()
        assert settings_in(b) == found
        assert b.writer._memory.registry.settings("a") == found
        (row,) = b.rows("SELECT engine_version FROM instances WHERE kind = 'scrape'")
        assert row["engine_version"] == "0.11.0"


def test_answers_belong_to_the_process_that_gave_them(tmp_path: Path) -> None:
    base = at(0) / 1e9
    with bench(tmp_path) as b:
        feed(b, 0, base - 50)
        feed(b, 20, base - 50)
        b.writer.add_spans(span_table([named("a", 1.0, 1), named("a", 190.0, 2)]))
        b.writer.add_answers("host:8000", at(1), {"max_num_seqs": 32})
        feed(b, 180, base + 170)
        feed(b, 200, base + 170)
        b.writer.add_answers("host:8000", at(181), {"max_num_seqs": 64})
        assert settings_in(b, 0, 30)["max_num_seqs"].value == 32
        assert settings_in(b, 180, 210)["max_num_seqs"].value == 64


def test_facts_wait_for_the_process_they_are_about(tmp_path: Path) -> None:
    with bench(tmp_path) as b:
        b.writer.add_facts(facts_of(POD))
        assert b.rows("SELECT * FROM instances WHERE kind != 'facts'") == []
        resource = {"k8s.pod.name": "llm-0", "k8s.namespace.name": "prod"}
        b.writer.add_spans(span_table([engine_span(resource=resource)]))
        assert settings_in(b)["max_num_seqs"].value == 64
        b.writer.add_facts(facts_of(POD))
        assert len(b.rows("SELECT * FROM instances WHERE kind = 'facts' AND instance = 'prod/llm-0'")) == 1


def test_facts_without_a_name_go_to_the_only_engine_or_are_refused(tmp_path: Path) -> None:
    said = facts_of(["vllm", "serve", "m", "--max-num-seqs", "64"])
    with bench(tmp_path) as b:
        with pytest.raises(InputError, match="none has been seen yet"):
            b.writer.add_facts(said)
        feed(b, 0, None)
        b.writer.add_spans(span_table([named("a")]))
        assert b.writer.add_facts(said) == {"facts": 3, "processes": 1}
        assert settings_in(b)["max_num_seqs"].value == 64
        b.writer.add_spans(span_table([named("b", 2.0, 2)]))
        with pytest.raises(InputError, match="known are a, b"):
            b.writer.add_facts(said)


def test_the_verdicts_current_value_names_who_says_otherwise() -> None:
    from phasewise.analyzer.matching import _current
    from phasewise.dashboard.cards import _current as text_of

    told = as_settings(merged(noted({"max_num_seqs": 64}, "pod_arguments"), noted({"max_num_seqs": 32}, "server_info")))
    technique = next(
        t for t in rulebook().techniques.values() if any(f.setting == "max_num_seqs" for f in t.flags.values())
    )
    situation = Situation("queueing", "queue.slots", {}, {}, "vllm_v1", None, told)
    current = _current(technique.flags, technique, situation)
    assert current is not None and current["value"] == 32
    assert text_of(current) == "now 32 (server info; pod arguments says 64)"
