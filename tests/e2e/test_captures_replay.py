"""Recorded telemetry of real engines, whose bottleneck is known by construction, through the real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import captures
import pytest
from serving import phasewise, serving
from shared_data import shared_path, shared_root

pytestmark = [pytest.mark.live, pytest.mark.slow]


def expected() -> dict[str, Any]:
    path = shared_root() / "captures" / "expected.json"
    return json.loads(path.read_text()) if path.exists() else {"shared data": {}}


@pytest.mark.parametrize("name", sorted(expected()))
def test_a_capture_gets_the_verdict_it_was_made_for(name: str, tmp_path: Path) -> None:
    folder, wanted = shared_path("captures", name), expected()[name]
    with serving(tmp_path / "data") as served:
        for _, body in captures.bodies(folder):
            served.send_traces(body)
        if (folder / "metrics-scrapes.jsonl.gz").exists():
            path = tmp_path / "scrapes.jsonl"
            lines = (json.dumps({"unix_ns": ns, "text": text}) for ns, text in captures.scrapes(folder))
            path.write_text("\n".join(lines) + "\n")
            done = phasewise("ingest", "--server", served.url, "--scrapes", path)
            assert done.returncode == 0, done.stderr
        verdict = served.verdict(wanted["requests"])
    assert verdict["requests"] == wanted["requests"]
    for field in ("status", "primary", "cause"):
        if field in wanted:
            assert verdict[field] in wanted[field], f"{field}: {verdict['headline']}"
    offered = [item["technique"] for item in verdict["recommend"]]
    assert not set(offered) & set(wanted.get("must_not_recommend", []))
    assert len(offered) <= 3
    if "recommend_one_of" in wanted:
        assert set(offered) & set(wanted["recommend_one_of"]), offered
    if wanted["requests"]:
        assert sum(verdict["shares"].values()) == pytest.approx(1, abs=1e-5)
        assert verdict["shares"].get("unexplained", 0) <= wanted.get("unexplained_max", 1)
