"""What engines are set to, brought in by hand: the command, the API, and where it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stocked import Served

from phasewise.dashboard.cli import main
from phasewise.dashboard.data_health import problems
from phasewise.dashboard.state import View

POD = {
    "kind": "Pod",
    "metadata": {"name": "llm-0", "namespace": "prod"},
    "spec": {"containers": [{"name": "engine", "args": ["vllm", "serve", "m", "--max-num-seqs", "64", "--api-key", "sk-0123456789"]}]},
}  # fmt: skip
LOG = "INFO [utils.py:233] non-default args: {'model': 'm', 'max_num_seqs': 32, 'hf_token': 'hf_0123456789abc'}"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_pod_and_a_log_are_stored_without_their_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod, log, data = tmp_path / "pod.json", tmp_path / "engine.log", str(tmp_path / "data")
    pod.write_text(json.dumps(POD))
    log.write_text(LOG)
    code, out, _ = told(capsys, "ingest", "--data", data, "--facts", str(pod), "--json")
    assert (code, json.loads(out)["counts"]) == (0, {"facts": 3, "processes": 1, "other_arguments": 1})
    code, _, error = told(capsys, "ingest", "--data", data, "--facts", str(log))
    assert code == 2
    assert "--instance" in error
    code, out, _ = told(capsys, "ingest", "--data", data, "--facts", str(log), "--instance", "prod/llm-0")
    assert (code, out) == (0, "stored 3 facts, 1 processes\n")
    found = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert b"sk-0123456789" not in found
    assert b"hf_0123456789abc" not in found


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [(["--instance", "a"], "give --facts FILE"), (["--facts", "{missing}"], "no such file"), (["--facts", "{empty}"], "kubectl get pod")],
)  # fmt: skip
def test_what_cannot_be_used_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], remedy: str
) -> None:
    (tmp_path / "empty").write_text("nothing\n")
    filled = [one.format(missing=tmp_path / "missing", empty=tmp_path / "empty") for one in arguments]
    code, _, error = told(capsys, "ingest", "--data", str(tmp_path / "data"), *filled)
    assert code == 2
    assert remedy in error


def test_facts_sent_to_the_server_reach_data_health_and_the_verdict(served: Served) -> None:
    def send(body: str, **parameters: str) -> Any:
        query = "&".join(f"{key}={value}" for key, value in {"kind": "facts", **parameters}.items())
        return served.client.post(
            f"/api/v1/ingest?{query}", content=body.encode(), headers={"Content-Type": "application/octet-stream"}
        )

    assert send(LOG).status_code == 400, "there are two engines"
    for name in ("gpu-0", "gpu-1"):
        assert send(LOG, instance=name).json()["counts"] == {"facts": 3, "processes": 1}
        assert send(json.dumps(POD["spec"]), instance=name).status_code == 200
    health = served.client.get("/api/v1/data-health?from=0").json()
    facts = {one["instance"]: one["settings"] for one in health["instances"] if one["kind"] == "facts"}
    assert facts["gpu-1"]["max_num_seqs"] == {
        "value": 32,
        "source": "startup_log",
        "others": [{"value": 64, "source": "pod_arguments"}],
    }
    verdict = served.client.get("/api/v1/verdict?from=0").json()
    assert verdict["signals"]["slots_limit_count"] == 32.0
    texts = [title for title, _ in problems(served.app.state.answers, View("api", None, (("from", "0"),)))]
    assert any(
        "Sources differ on the settings of gpu-1: effective_max_num_seqs, max_num_seqs" in text for text in texts
    )
