"""Every verb, setting, signal and rule has its heading, and what is written by a script is up to date."""

from __future__ import annotations

import argparse
import importlib.util
import re
from types import ModuleType

import pytest
from shared_data import ROOT

from phasewise.dashboard.cli import VERBS, parser
from phasewise.rules.load import PACKAGED, load_rulebook
from phasewise.rules.vocabulary import CAUSES, SIGNALS

DOCS = ROOT / "docs"


def headings(name: str) -> set[str]:
    return set(re.findall(r"^#+ (.+)$", (DOCS / name).read_text(), re.M))


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_verb_has_a_heading() -> None:
    assert set(VERBS) <= headings("cli.md")


def test_every_cause_is_told_from_those_that_look_like_it() -> None:
    text = (DOCS / "diagnosis.md").read_text()
    sections = dict(re.findall(r"^### (\S+)\n(.*?)(?=^#|\Z)", text, re.M | re.S))
    assert list(sections) == list(CAUSES)
    for cause, told in sections.items():
        said = dict(re.findall(r"^- \*\*(.+?)\*\*: (.+)$", told, re.M))
        assert list(said) == ["What", "Proves", "Refutes", "Looks like"], cause
        alike = set(re.findall(r"`([a-z_.]+)`", said["Looks like"]))
        assert alike & set(CAUSES) - {cause}, cause


def verb_parser(verb: str) -> argparse.ArgumentParser:
    found = parser()._subparsers._group_actions[0].choices[verb]  # type: ignore[union-attr,index]
    assert isinstance(found, argparse.ArgumentParser)
    return found


def with_actions(verb: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The verb's own grammar and those of its actions, such as `rules list`."""
    choices = verb._subparsers._group_actions[0].choices if verb._subparsers else {}
    assert isinstance(choices, dict)
    return [verb, *choices.values()]


def test_every_action_of_the_engine_has_a_heading() -> None:
    _, *actions = with_actions(verb_parser("engine"))
    assert len(actions) == 3
    assert {action.prog.removeprefix("phasewise ") for action in actions} <= headings("cli.md")


def test_every_option_is_named_where_its_verb_is_described() -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (DOCS / "cli.md").read_text(), re.M | re.S))
    shared = (DOCS / "cli.md").read_text().split("\n## serve")[0]
    for verb in VERBS:
        help_text = "".join(one.format_help() for one in with_actions(verb_parser(verb)))
        for option in set(re.findall(r"--[a-z-]+", help_text)) - {"--help"}:
            described = sections[verb] + sections["serve"] * (verb in ("demo", "doctor")) + shared
            assert option in described, f"docs/cli.md does not mention {option} of {verb}"


def test_every_signal_has_a_heading() -> None:
    assert set(SIGNALS) <= headings("signals.md")


def test_every_rule_has_a_heading() -> None:
    rulebook = load_rulebook(PACKAGED)
    names = {*rulebook.techniques, *rulebook.gpus, *rulebook.models, *rulebook.engines, *CAUSES}
    assert names <= headings("rules.md")


@pytest.mark.parametrize("name", ["signals.md", "rules.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == generator().pages()[name], "run make docs"


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("deploy/**/*.md"))
)
def test_links_inside_the_repository_lead_somewhere(path: object) -> None:
    from pathlib import Path

    assert isinstance(path, Path)
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)[^)]*\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_exit_codes_in_the_docs_are_those_of_the_program() -> None:
    told = (DOCS / "cli.md").read_text().split("## Exit codes")[1]
    assert re.findall(r"^\| (\d+) \|", told, re.M) == ["0", "1", "2", "3", "4", "5", "70", "130", "141"]
