"""The real `prometheus` of the system, scraping pages of a test; skipped with a reason where it is not installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

READY_S = 20.0


def require_prometheus() -> str:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    return program


@contextmanager
def prometheus(folder: Path, targets: Sequence[str], job: str, interval: str, *options: str) -> Iterator[str]:
    """Its address; it begins to scrape /metrics of the targets (HOST:PORT) about five seconds after its start."""
    program = require_prometheus()
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "prometheus.yml"
    settings.write_text(
        f"global: {{scrape_interval: {interval}, scrape_timeout: {interval}}}\n"
        f"scrape_configs: [{{job_name: {job}, static_configs: [{{targets: {list(targets)!r}}}]}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}", *options],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            _wait(f"http://127.0.0.1:{port}", process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()  # its data go with the test; a polite end takes seconds
            process.wait(20)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"prometheus does not start: {log.read_text()[-2000:]}")
