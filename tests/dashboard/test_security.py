"""Who may ask, who may change something, and what a page may load."""

from __future__ import annotations

import pytest
from stocked import Served

ROUTES = (
    "/triage",
    "/",
    "/api/v1/health",
    "/api/v1/verdict",
    "/livez",
    "/metrics",
    "/api/nothing",
    "/assets/phasewise.js",
    "/nothing",
)


@pytest.mark.parametrize("path", ROUTES)
def test_every_answer_carries_the_headers(morning: Served, path: str) -> None:
    headers = morning.client.get(path).headers
    policy = headers["content-security-policy"]
    assert "script-src 'self' 'sha256-" in policy and "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert "frame-ancestors 'none'" in policy and "object-src 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_is_refused(morning: Served, host: str) -> None:
    answer = morning.client.get("/api/v1/health", headers={"Host": host})
    assert answer.status_code == 400
    assert answer.json()["field"] == "Host"


@pytest.mark.parametrize("host", ["localhost:8080", "[::1]:8080", "127.0.0.1"])
def test_loopback_by_any_name_is_answered(morning: Served, host: str) -> None:
    assert morning.client.get("/api/v1/health", headers={"Host": host}).status_code == 200


CHANGES = (
    "/api/v1/annotations",
    "/api/v1/outcomes",
    "/api/v1/explain-summary",
    "/api/v1/ingest",
    "/_dash-update-component",
)


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example", "Content-Type": "application/json"}, 403),
        ({"Origin": "null", "Content-Type": "application/json"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Content-Type": "application/json"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ],
)
def test_what_another_site_can_send_changes_nothing(
    morning: Served, path: str, headers: dict[str, str], status: int
) -> None:
    assert morning.client.post(path, content=b"{}", headers=headers).status_code == status


def test_our_own_pages_may(served: Served) -> None:
    headers = {"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
    answer = served.client.post("/api/v1/annotations", content=b'{"text": "deploy"}', headers=headers)
    assert answer.status_code == 201


def test_no_documentation_page_loads_scripts_from_elsewhere(morning: Served) -> None:
    assert morning.client.get("/docs").status_code == 404
    assert morning.client.get("/openapi.json").status_code == 404
