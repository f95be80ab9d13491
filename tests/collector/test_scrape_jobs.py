"""`[[scrape]]` of phasewise.toml: what it may say, and what is wrong with what it does say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from phasewise.collector.scraping.jobs import Job, read_jobs
from phasewise.rules.errors import InputError

FULL = """
[[scrape]]
job = "vllm"
targets = ["10.0.0.5:8000", "https://user:secret@gpu-2.example:8443/prometheus?x=1"]
labels = { "host.name" = "gpu-1" }
interval_s = 5
timeout_s = 3.5
bearer_token_file = "/run/token"
ca_file = "/etc/ca.pem"

[[scrape]]
job = "files"
files = ["/etc/phasewise/*.json"]

[[scrape]]
job = "cluster"
scheme = "https"
path = "/stats"
[scrape.kubernetes]
role = "endpointslice"
namespaces = ["a", "b"]
selector = "app=vllm,tier in (x,y)"
port = 8000
annotated = true
"""


def jobs(text: str) -> tuple[Job, ...]:
    return read_jobs("phasewise.toml", tomllib.loads(text)["scrape"])


def test_a_job_says_where_and_how() -> None:
    static, files, cluster = jobs(FULL)
    assert [one.url for one in static.endpoints] == [
        "http://10.0.0.5:8000/metrics",
        "https://user:secret@gpu-2.example:8443/prometheus?x=1",
    ]
    assert [one.instance for one in static.endpoints] == ["10.0.0.5:8000", "gpu-2.example:8443"]
    assert "secret" not in static.endpoints[1].shown_url
    assert static.endpoints[0].labels == {"host.name": "gpu-1"}
    assert (static.interval_s, static.timeout_s) == (5.0, 3.5)
    assert (static.access.token_file, static.access.ca_file) == (Path("/run/token"), Path("/etc/ca.pem"))
    assert (files.files, files.kubernetes, files.interval_s) == (("/etc/phasewise/*.json",), None, 1.0)
    assert cluster.kubernetes is not None
    assert (cluster.kubernetes.role, cluster.kubernetes.port) == ("endpointslice", 8000)
    assert cluster.kubernetes.namespaces == ("a", "b")
    assert (cluster.scheme, cluster.path) == ("https", "/stats")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[scrape]]\ntargets = ["a:1"]', r"scrape\[0\]\.job: is missing"),
        ('[[scrape]]\njob = "a"', "has nothing to scrape"),
        ('[[scrape]]\njob = "a"\ntargets = ["ftp://h"]', "is no address to scrape"),
        ('[[scrape]]\njob = "a"\ntargets = ["h:port"]', "is no address to scrape"),
        ('[[scrape]]\njob = "a"\ntarget = ["h:1"]', r"target: is unknown \(did you mean targets\?\)"),
        ('[[scrape]]\njob = "a"\ntargets = ["h:1"]\ninterval_s = "5s"', "give seconds, 0.1 to 3600"),
        ('[[scrape]]\njob = "a"\ntargets = ["h:1"]\ntimeout_s = 0', "give seconds"),
        ('[[scrape]]\njob = "a"\ntargets = ["h:1"]\nlabels = { a = 1 }', "holds something that is no text"),
        ('[[scrape]]\njob = "a"\npath = "m"\ntargets = ["h:1"]', "is no path"),
        ('[[scrape]]\njob = "a"\nfiles = ["/a/*/b.json"]', "only its last part may hold a star"),
        ('[[scrape]]\njob = "a"\n[scrape.kubernetes]\nrole = "node"', "give one of pod, endpointslice"),
        ('[[scrape]]\njob = "a"\n[scrape.kubernetes]\nport = 70000', "give a port's name or number"),
        ('[[scrape]]\njob = "a"\n[scrape.kubernetes]\nselector = "a=b&c"', "is no label selector"),
        ('[[scrape]]\njob = "a"\n[scrape.kubernetes]\nnamespaces = ["../x"]', "is no namespace"),
        ('[[scrape]]\njob = "a"\n[scrape.kubernetes]\nnamespace = "x"', "did you mean namespaces"),
        ('[[scrape]]\njob = "a"\ntargets = ["h:1"]\n[[scrape]]\njob = "a"\ntargets = ["i:1"]', "is there twice"),
        ('[scrape]\njob = "a"', "is no list of jobs"),
    ],
)
def test_a_wrong_key_names_file_job_and_remedy(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        jobs(text)
    assert "phasewise.toml" in str(caught.value)
