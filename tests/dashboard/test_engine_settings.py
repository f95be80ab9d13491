from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from shared_data import ROOT

from phasewise.dashboard.commands.engine_settings import SERVER, SWITCHES, chosen, words
from phasewise.instrumented_engine.config import AdmissionControl, EngineConfig, PoolShare, TenantShare
from phasewise.instrumented_engine.serving.server_settings import ServerSettings
from phasewise.instrumented_engine.serving.tools import Tool
from phasewise.rules.errors import InputError


def setting(pair: str) -> Any:
    """What one pair sets, accepted by the settings it is for."""
    found = chosen([pair])
    EngineConfig(**found.switches)
    ServerSettings(executor="simulated", **found.server)
    (value,) = [*found.switches.values(), *found.server.values()]
    return value


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("max_num_seqs=8", 8),
        ("chunked_prefill=true", True),
        ("batching=static", "static"),
        ("max_waiting=none", None),
        ("max_waiting=3", 3),
        ("batching_window_s=1", 1.0),
        ("batching_window_s=0.25", 0.25),
        ('tenants={"a": {"weight": 2}}', {"a": TenantShare(weight=2.0)}),
        (
            'pools=[{"name": "i", "classes": ["x"], "slot_ratio": 0.5, "kv_ratio": 1, "budget_ratio": 0.5}]',
            (PoolShare("i", ("x",), 0.5, 1.0, 0.5),),
        ),
        ('admission={"max_predicted_queue_s": 2}', AdmissionControl(2.0)),
        ("admission=none", None),
        ("name=mine", "mine"),
        ("kernel=naive", "naive"),
        ("output_tokens=none", None),
        ("time_scale=2", 2.0),
        ("context_folder=/var/lib/history", Path("/var/lib/history")),
        ('tools=[{"name": "now", "command": ["date", "-u"]}]', (Tool(name="now", command=("date", "-u")),)),
    ],
)
def test_a_setting_is_read_by_its_declared_type(pair: str, value: object) -> None:
    read = setting(pair)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("max_num_seq=8", "--set: max_num_seq: is no setting of the engine (did you mean max_num_seqs?)"),
        ("zzz=8", "known: batching, max_num_seqs,"),
        ("max_num_seqs", "has no value (write name=value"),
        ("chunked_prefill=1", "'1' does not fit (give true or false)"),
        ("max_num_seqs=1.5", "give a whole number"),
        ("max_num_seqs=true", "give a whole number"),
        ("max_num_seqs=0", "max_num_seqs: 0 is below 1"),
        ("kv_blocks=none", "give a whole number"),
        ("batching=sometimes", "give continuous or static"),
        ("tenants=[]", "give a JSON object of names"),
        ('tenants={"a": {"weigt": 2}}', "--set: tenants.a.weigt: is unknown (did you mean weight?)"),
        ('tenants={"a": 3}', "does not fit"),
        ('pools=[{"name": "i"}]', "name, classes, slot_ratio"),
        ("admission=soon", "max_predicted_queue_s, max_predicted_kv_ratio or none"),
        ("device_kind=cpu", "is no setting of the engine"),
        ("port=8000", "is no setting of the engine"),
        ('tools=[{"name": "x", "function": "os.system"}]', "tools[0].function: is unknown"),
        ('tools=[{"name": "x"}]', "has both or neither of command and function"),
        ("time_scale=0", "time_scale: 0.0 is not positive"),
        ("time_scale=NaN", "give a number"),
        ("batching_window_s=Infinity", "give a number"),
        ("drain_s=1e999", "give a number"),
        ('admission={"max_predicted_queue_s": NaN}', "does not fit"),
        ("weight_bits=0", "weight_bits: 0.0 is not within 1 to 32"),
        ("max_body_bytes=0", "max_body_bytes: 0 is below 1"),
        ("service_name=", "service_name: is empty"),
        ('tools=[{"name": "", "command": ["date"]}]', "one has no name"),
    ],
)
def test_a_wrong_setting_is_told_with_its_remedy(pair: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        setting(pair)
    assert said in str(refused.value)


def test_the_same_setting_twice_is_refused_also_where_it_has_an_option_of_its_own() -> None:
    with pytest.raises(InputError, match="is given twice"):
        chosen(["max_num_seqs=8", "max_num_seqs=9"])
    with pytest.raises(InputError, match="is given twice"):
        chosen(["max_num_seqs=8"], {"max_num_seqs": 9})


def documented() -> dict[str, tuple[str, str]]:
    """Setting to default and meaning, as docs/cli.md has them."""
    section = (ROOT / "docs" / "cli.md").read_text().split("### engine settings")[1].split("\n### ")[0]
    return {
        name: (default, text) for name, default, text in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", section, re.M)
    }


def test_every_setting_can_be_told_in_words_and_stands_in_the_docs() -> None:
    assert set(documented()) == {*SWITCHES, *SERVER}
    assert all(words(kind) for kind in [*SWITCHES.values(), *SERVER.values()])


@pytest.mark.parametrize("name", [*SWITCHES, *SERVER])
def test_the_documented_default_is_the_real_one(name: str) -> None:
    default, _ = documented()[name]
    settings = EngineConfig() if name in SWITCHES else ServerSettings(executor="simulated")
    real = getattr(settings, name)
    if default == "fits":  # what the server makes of model and memory
        assert name in ("kv_blocks", "max_model_tokens")
    elif default in ("{}", "[]"):
        assert not real
    else:
        assert setting(f"{name}={default}") == real


def test_the_examples_of_the_docs_are_read() -> None:
    found = {name: re.findall(r"`([\[{][^`]+)`", text) for name, (_, text) in documented().items()}
    assert {name for name, examples in found.items() if examples} == {"tenants", "pools", "admission", "tools"}
    for name, examples in found.items():
        for example in examples:
            assert setting(f"{name}={example}")
