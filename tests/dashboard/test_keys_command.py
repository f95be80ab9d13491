"""`phasewise keys` and `phasewise config`, and the keys that the command line itself sends."""

from __future__ import annotations

import http.server
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from local_http import serving_aside

from phasewise.collector.access_keys import KeyFile, split_token
from phasewise.dashboard import cli
from phasewise.dashboard.commands.connection import Server, api_key, find_server, open_data
from phasewise.dashboard.commands.serve import keeps_content
from phasewise.rules.errors import InputError, MachineError
from phasewise.rules.secret_text import HidingFormatter, hidden, without_secrets

TOKEN = "phw_0123456789ab_" + "s" * 43


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_key_is_made_shown_once_listed_rotated_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    options = ("--scope", "ingest", "--expires", "90d", "--name", "gateway", "--tenant", "acme")
    code, token, _ = said(capsys, "keys", "create", "--data", data, *options)
    key_id, secret = split_token(token.strip()) or ("", "")
    assert code == 0 and key_id
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    code, listed, _ = said(capsys, "keys", "list", "--data", data, "--json")
    (told,) = json.loads(listed)["keys"]
    assert told["key_id"] == key_id and told["scopes"] == ["ingest"] and told["tenant"] == "acme"
    assert told["state"] == "in force" and told["last_used_unix_ns"] is None
    assert told["expires_unix_ns"] - told["created_unix_ns"] == 90 * 86_400 * 10**9
    code, new, _ = said(capsys, "keys", "rotate", key_id, "--data", data, "--overlap", "12h")
    assert code == 0 and new != token
    code, _, error = said(capsys, "keys", "revoke", token.strip(), "--data", data)
    assert code == 0 and f"{key_id} is revoked" in error
    _, listed, _ = said(capsys, "keys", "list", "--data", data)
    assert [line.split()[1] for line in listed.splitlines()] == ["revoked", "in"]
    everything = listed + error + (data / "keys.json").read_text() + (data / "audit.jsonl").read_text()
    assert secret not in everything and (split_token(new.strip()) or ("", "x"))[1] not in everything
    actions = [json.loads(line)["action"] for line in (data / "audit.jsonl").read_text().splitlines()]
    assert actions == ["key_created", "key_rotated", "key_revoked"]


@pytest.mark.parametrize(
    ("arguments", "said_error"),
    [
        (("create", "--scope", "root"), "is no scope"),
        (("create", "--scope", ""), "is no scope"),
        (("create", "--expires", "soon"), "write 30m, 12h or 90d"),
        (("create", "--name", "a\nb"), "without control characters"),
        (("revoke", "nobody"), "phasewise keys list shows all ids"),
        (("rotate", "nobody"), "phasewise keys list shows all ids"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said_error: str
) -> None:
    code, out, error = said(capsys, "keys", *arguments, "--data", tmp_path)
    assert (code, out) == (2, "") and said_error in error and len(error.splitlines()) == 1


def test_a_whole_key_is_not_repeated_in_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, error = said(capsys, "keys", "revoke", TOKEN, "--data", tmp_path)
    assert "0123456789ab" in error and "s" * 43 not in out + error


def test_a_server_does_not_start_with_keys_that_others_can_read_or_none_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "keys", "create", "--data", tmp_path)
    (tmp_path / "keys.json").chmod(0o644)
    code, _, error = said(capsys, "serve", "--data", tmp_path, "--host", "0.0.0.0")
    assert code == 4 and "chmod 600" in error
    (tmp_path / "keys.json").chmod(0o600)
    KeyFile(tmp_path).revoke(KeyFile(tmp_path).read()[0].key_id, 1)
    code, _, error = said(capsys, "serve", "--data", tmp_path)
    assert code == 4 and "none of its 1 keys is in force" in error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--tls-cert", "/nowhere.pem"), "--tls-key: is missing"),
        (("--tls-cert", "/nowhere.pem", "--tls-key", "/nowhere.pem"), "/nowhere.pem: no such file"),
    ],
)
def test_a_server_does_not_start_half_encrypted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    code, _, error = said(capsys, "serve", "--data", tmp_path, *options)
    assert code == 2 and text in error


@pytest.mark.parametrize(
    ("configured", "variable", "kept"),
    [
        (False, "", False),
        (False, "0", False),
        (True, "1", True),
        (True, "", None),
        (True, "0", None),
        (False, "1", None),
    ],
)
def test_content_is_kept_only_where_file_and_environment_say_so(
    configured: bool, variable: str, kept: bool | None
) -> None:
    environment = {"PHASEWISE_KEEP_CONTENT": variable} if variable else {}
    if kept is None:
        with pytest.raises(InputError, match="alone"):
            keeps_content(configured, environment)
    else:
        assert keeps_content(configured, environment) is kept
    with pytest.raises(InputError, match="neither 0 nor 1"):
        keeps_content(configured, {"PHASEWISE_KEEP_CONTENT": "yes"})


def test_config_show_hides_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phasewise.toml").write_text(
        '[serve]\nscrape = ["http://me:hunter2@engine:8000/metrics"]\n[slo]\nttft = "2s"\n[retention]\nraw_days = 7\n'
        '[[scrape]]\njob = "j"\ntargets = ["http://me:hunter3@e:1/metrics"]\n'
    )
    monkeypatch.setenv("PHASEWISE_API_KEY", TOKEN)
    for form in ((), ("--json",)):
        code, out, _ = said(capsys, "config", "show", *form)
        assert code == 0 and "***" in out
        assert "hunter2" not in out and "hunter3" not in out and "s" * 43 not in out
    told = json.loads(out)
    assert told["serve"]["scrape"] == ["http://me:***@engine:8000/metrics"]
    assert told["environment"]["PHASEWISE_API_KEY"] == "***" and told["slo"] == "ttft:2s"
    assert told["retention"] == {"raw_days": 7} and told["scrape"][0]["job"] == "j"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"key {TOKEN} is", "key phw_0123456789ab_*** is"),
        ("http://a:b@c/d and https://x:y@z", "http://a:***@c/d and https://x:***@z"),
        ("Authorization: Bearer abcdefghij", "Authorization: Bearer ***"),
        ("nothing: to@hide http://host:8000/a@b", "nothing: to@hide http://host:8000/a@b"),
    ],
)
def test_secrets_in_texts(text: str, shown: str) -> None:
    assert hidden(text) == shown


def test_no_log_line_holds_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(HidingFormatter("%(levelname)s %(message)s"))
    log = logging.getLogger("phasewise.test.secrets")
    log.addHandler(handler)
    try:
        log.warning("scraping %s fails", "http://me:hunter2@engine:8000/metrics")
        try:
            raise ValueError(f"key {TOKEN}")
        except ValueError:
            log.exception("refused")
    finally:
        log.removeHandler(handler)
    told = capsys.readouterr().err
    assert "me:***@engine" in told and "ValueError: key phw_0123456789ab_***" in told
    assert "hunter2" not in told and "s" * 43 not in told


def test_secrets_by_their_names() -> None:
    told = {"smtp": {"password": "x", "port": 25}, "api_key": "x", "hosts": ["http://a:b@c"], "token_count": 3}
    assert without_secrets(told) == {
        "smtp": {"password": "***", "port": 25}, "api_key": "***", "hosts": ["http://a:***@c"], "token_count": "***",
    }  # fmt: skip


class Recorder(http.server.BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str | None]]] = []
    redirect_to = ""

    def do_GET(self) -> None:
        Recorder.seen.append((self.path, self.headers.get("Authorization")))
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", Recorder.redirect_to)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Silence."""


@pytest.fixture
def recorder() -> Iterator[str]:
    Recorder.seen = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    url = f"http://127.0.0.1:{server.server_port}"
    Recorder.redirect_to = f"{url}/elsewhere"
    with serving_aside(server):
        yield url


@pytest.mark.live
def test_the_key_is_a_header_and_goes_no_further(recorder: str) -> None:
    Server(recorder, key=TOKEN).ask("/here", [("from", "now")])
    Server(recorder, key=TOKEN).ask("/away")
    Server(recorder).ask("/without")
    assert Recorder.seen == [
        ("/here?from=now", f"Bearer {TOKEN}"),
        ("/away", f"Bearer {TOKEN}"),
        ("/elsewhere", None),
        ("/without", None),
    ]
    assert TOKEN not in repr(Server(recorder, key=TOKEN))


def test_the_key_of_the_command_line_comes_from_the_environment_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o644)
    monkeypatch.delenv("PHASEWISE_API_KEY", raising=False)
    assert api_key() == ""
    monkeypatch.setenv("PHASEWISE_API_KEY_FILE", str(path))
    with pytest.raises(InputError, match="chmod 600"):
        api_key()
    path.chmod(0o600)
    assert api_key() == TOKEN
    monkeypatch.setenv("PHASEWISE_API_KEY", "phw_other")
    assert api_key() == "phw_other"
    monkeypatch.setenv("PHASEWISE_API_KEY", "")
    path.unlink()
    with pytest.raises(InputError, match="no such file"):
        api_key()


def test_a_server_file_tells_key_and_certificate(tmp_path: Path) -> None:
    told: dict[str, Any] = {"url": "http://127.0.0.1:1", "pid": 1, "local_key": TOKEN, "tls_cert": "/x.pem"}
    (tmp_path / "serve.json").write_text(json.dumps(told))
    try:
        assert find_server(tmp_path) is None
    except MachineError as error:  # where process 1 is one of ours
        assert TOKEN not in str(error)


def test_what_the_command_line_stores_itself_is_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with open_data(tmp_path / "made" / "data", create=True):
            pass
        assert os.umask(0o022) == 0o022, "the mask of the process is as it was"
    finally:
        os.umask(before)
    made = tmp_path / "made" / "data"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert [path for path in made.rglob("*") if path.stat().st_mode & 0o077] == []
