"""Kubernetes objects in YAML, as `kubectl get -o yaml`, `helm template` and manifests in a repository have them."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from phasewise.rules.errors import InputError

MOST_CHARACTERS = 4 << 20  # this parser reads about a megabyte a second
_OBJECT = re.compile(r"^(?:- )?\s*(?:apiVersion|kind):", re.MULTILINE)


class _Plain(yaml.SafeLoader):
    """YAML without aliases, of which a short text may unfold into any amount, and without dates: a time stays the text it is."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # the stub gives it no type
            raise yaml.MarkedYAMLError(problem="has an alias", problem_mark=mark)
        found: yaml.Node | None = super().compose_node(parent, index)
        return found

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        return {str(key): value for key, value in super().construct_mapping(node, deep=deep).items()}


_Plain.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def manifests_of(text: str, name: str) -> list[object] | None:
    """The documents of a YAML text that has Kubernetes objects; None where it is something else.

    Raises InputError for what looks like such a text and is broken, or is too long.
    """
    if not (_OBJECT.search(text) and "containers:" in text):
        return None
    if len(text) > MOST_CHARACTERS:
        remedy = "give JSON instead: kubectl get pods -o json"
        raise InputError(name, "", f"is YAML of more than {MOST_CHARACTERS >> 20} MiB", remedy)
    try:
        return [one for one in yaml.load_all(text, _Plain) if one is not None]
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        problem = f"{line}{error.problem or error.context or 'is broken'}"
        raise InputError(
            name, "", f"is no YAML that can be read: {problem}", "mend it, or give kubectl's -o json"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"is no YAML that can be read: {type(error).__name__}"
        raise InputError(name, "", problem, "mend it, or give kubectl's -o json") from None
