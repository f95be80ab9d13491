"""The compose file and the image, as far as they can be checked without Docker.

`compose_spec.json` is the JSON Schema of the Compose Specification (Apache-2.0), unchanged as Docker Compose 2.40.3 embeds it.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from shared_data import ROOT

from phasewise.dashboard.cli import parser
from phasewise.rules.load import load_rulebook

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SCHEMA: dict[str, Any] = json.loads((Path(__file__).parent / "compose_spec.json").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_compose_file_is_valid() -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(COMPOSE)


def test_the_schema_would_catch_a_slip() -> None:
    broken = json.loads(json.dumps(COMPOSE))
    broken["services"]["app"]["healthchek"] = broken["services"]["app"].pop("healthcheck")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(broken)


@pytest.mark.parametrize("service", ["app", "engine", "instrumented-engine"])
def test_each_service_tells_its_health_and_keeps_its_data_in_a_named_volume(service: str) -> None:
    told = COMPOSE["services"][service]
    assert told["healthcheck"]["test"][0] == "CMD"
    assert {volume.partition(":")[0] for volume in told.get("volumes", [])} <= set(COMPOSE["volumes"])
    assert all(port.startswith("127.0.0.1:") for port in told["ports"])


def test_the_app_is_started_with_options_that_exist() -> None:
    options = parser().parse_args(COMPOSE["services"]["app"]["command"])
    assert (options.port, options.otlp_grpc_port, options.host) == (8080, 4317, "0.0.0.0")
    assert options.scrape == ["http://engine:8000/metrics"]


def test_the_engine_waits_for_the_app_and_sends_to_its_otlp_port() -> None:
    engine = COMPOSE["services"]["engine"]
    assert engine["depends_on"]["app"]["condition"] == "service_healthy"
    assert "--otlp-traces-endpoint=http://app:4317" in engine["command"]
    assert engine["image"].startswith("vllm/")


def test_the_instrumented_engine_takes_the_place_of_the_real_one_only_when_asked_for() -> None:
    told = COMPOSE["services"]["instrumented-engine"]
    assert told["profiles"] == ["instrumented"], "docker compose up alone must not start two engines on one port"
    assert not any("profiles" in COMPOSE["services"][name] for name in ("app", "engine"))
    assert told["networks"]["default"]["aliases"] == ["engine"], "the app scrapes http://engine:8000/metrics"
    assert told["ports"] == COMPOSE["services"]["engine"]["ports"]
    assert told["image"] == COMPOSE["services"]["app"]["image"]
    command = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", part) for part in told["command"]]
    options = parser().parse_args(command)
    assert (options.verb, options.action, options.executor, options.port) == ("engine", "serve", "simulated", 8000)
    assert options.otlp_endpoint == "http://app:4317"
    rulebook = load_rulebook()
    assert rulebook.find_gpu(options.gpu) and rulebook.find_model(options.model)


def test_the_stop_leaves_room_to_drain() -> None:
    assert int(COMPOSE["services"]["app"]["stop_grace_period"].removesuffix("s")) > 10


def test_the_image_runs_as_nobody_special_and_checks_itself() -> None:
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE, re.M)
    assert user not in ("0", "root")
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", DOCKERFILE, re.M)
    (command,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.M)
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.M)
    assert json.loads(entry) == ["phasewise"]
    assert parser().parse_args(json.loads(check)[1:]).quick
    assert parser().parse_args(json.loads(command)).verb == "serve"
    assert shlex.split(json.loads(check)[0]) == ["phasewise"]


def test_the_collector_configuration_defines_what_its_pipelines_use() -> None:
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "otel-collector" / "config.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])
    assert set(config["service"]["extensions"]) <= set(config["extensions"])
