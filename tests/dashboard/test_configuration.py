from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.analyzer.window import parse_slo
from phasewise.collector.retention import Keep
from phasewise.dashboard.cli import parser
from phasewise.dashboard.commands.configuration import (
    NAME,
    Configuration,
    places,
    read_configuration,
    require_known,
)
from phasewise.rules.errors import InputError
from phasewise.rules.load import load_rulebook


def configured(tmp_path: Path, text: str) -> Configuration:
    path = tmp_path / NAME
    path.write_text(text)
    return read_configuration([path])


def test_settings_are_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    told = configured(tmp_path, '[serve]\nport = 9000\ndata = "/var/lib/phasewise"\nscrape = ["http://a/metrics"]\n')
    options = parser(told).parse_args(["serve", "--scrape", "http://b/metrics"])
    assert (options.port, options.data) == (9000, Path("/var/lib/phasewise"))
    assert options.scrape == ["http://a/metrics", "http://b/metrics"]
    assert parser(told).parse_args(["serve", "--port", "1"]).port == 1
    assert parser(told).parse_args(["demo"]).port == 8080


def test_limits_have_the_form_of_the_option(tmp_path: Path) -> None:
    told = configured(tmp_path, '[slo]\nttft = "2s"\nclient.itl = "80ms"\n')
    assert [(one.metric, one.limit_s, one.boundary) for one in parse_slo(told.slo)] == [
        ("ttft", 2.0, "engine"),
        ("itl", 0.08, "client"),
    ]
    assert parser(told).parse_args(["analyze"]).slo == told.slo


def test_retention_is_told_to_the_server(tmp_path: Path) -> None:
    told = configured(tmp_path, "[retention]\nraw_days = 3\nmax_volume_ratio = 0.5\n")
    assert parser(told).parse_args(["serve"]).retention == {"raw_days": 3, "max_volume_ratio": 0.5}
    assert Keep(**told.retention) == Keep(raw_days=3, max_volume_ratio=0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nprot = 1\n", r"serve\.prot: is unknown \(did you mean port\?\)"),
        ("[server]\n", r"server: is no section \(did you mean serve\?\)"),
        ('[serve]\nport = "x"\n', r"serve\.port: 'x' is not right \(give a port"),
        ("[slo]\nttft = 2\n", r"slo\.ttft: 2 is not right"),
        ("[slo\n", "is not TOML"),
        ("[retention]\nraw_days = 0\n", r"retention\.raw_days: 0 is not right \(give days, above 0\)"),
        ("[retention]\nmax_volume_ratio = 80\n", r"retention\.max_volume_ratio: 80 is not right"),
    ],
)
def test_a_wrong_key_names_file_key_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        configured(tmp_path, text)
    assert NAME in str(caught.value)


def test_stated_hardware_must_be_in_the_rules(tmp_path: Path) -> None:
    rulebook = load_rulebook()
    told = configured(tmp_path, '[hardware]\naccelerator = "H100 SXM"\nmodel = "smollm2-135m"\ntensor_parallel = 2\n')
    require_known(told.hardware, rulebook)
    with pytest.raises(
        InputError, match=r"hardware\.accelerator: 'h100-smx' is not in the rules \(did you mean h100-sxm"
    ):
        require_known({"accelerator": "h100-smx"}, rulebook)


def test_no_file_is_no_configuration(tmp_path: Path) -> None:
    assert read_configuration([tmp_path / NAME]) == Configuration()


def test_the_working_directory_comes_before_the_user_and_the_system() -> None:
    found = list(places({"HOME": "/home/me", "XDG_CONFIG_DIRS": "/etc/a:/etc/b"}, Path("/srv")))
    assert [str(path) for path in found] == [
        "/srv/phasewise.toml",
        "/home/me/.config/phasewise/phasewise.toml",
        "/etc/a/phasewise/phasewise.toml",
        "/etc/b/phasewise/phasewise.toml",
    ]
