"""The rulebook: every rule file of the package, and those of the user's own folder, read strictly at the start."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from phasewise.rules.efficiency_file import GENERIC_FILE, read_efficiency
from phasewise.rules.engine_profile import EngineProfile, load_engine
from phasewise.rules.errors import RuleError
from phasewise.rules.hardware_file import read_gpu, read_model
from phasewise.rules.schema import Gpu, Model, Technique
from phasewise.rules.technique_file import check_references, read_technique
from phasewise.rules.toml_table import TomlTable

T = TypeVar("T")
PACKAGED = Path(str(files("phasewise.rules")))
OWN_VARIABLE, OWN_FOLDER = "PHASEWISE_RULES", "phasewise-rules"
KINDS = ("gpus", "models", "techniques", "engines")
_PUNCTUATION = re.compile(r"[^a-z0-9]+")


def normalized(name: str) -> str:
    """Lower case without punctuation: `NVIDIA H100-SXM` and `nvidia h100 sxm` are one name."""
    return _PUNCTUATION.sub("", name.lower())


@dataclass(frozen=True, slots=True)
class Rulebook:
    """All rules. version: short digest over all rule files; the maps are by id, which is the file's name."""

    version: str
    gpus: Mapping[str, Gpu]
    models: Mapping[str, Model]
    techniques: Mapping[str, Technique]
    engines: Mapping[str, EngineProfile]
    _gpu_names: Mapping[str, str]
    _model_names: Mapping[str, str]
    _technique_names: Mapping[str, str]

    def find_gpu(self, name: str | None) -> Gpu | None:
        """By id, name or alias, whatever the case and punctuation; None when unknown."""
        return self.gpus.get(self._gpu_names.get(normalized(name or ""), ""))

    def find_model(self, name: str | None) -> Model | None:
        """By id, name or alias; an owner in front (`meta-llama/`) or a path is ignored; None when unknown."""
        whole = self._model_names.get(normalized(name or ""))
        last = self._model_names.get(normalized((name or "").rstrip("/").rpartition("/")[2]))
        return self.models.get(whole or last or "")

    def find_technique(self, name: str | None) -> Technique | None:
        """By id or alias (`chunked prefill`); None when unknown."""
        return self.techniques.get(self._technique_names.get(normalized(name or ""), ""))


def own_folder() -> Path:
    """Where a user's own rule files are, in folders named like those of the package: PHASEWISE_RULES, else phasewise-rules here."""
    return Path(os.environ.get(OWN_VARIABLE) or OWN_FOLDER)


def load_rulebook(root: Path | None = None) -> Rulebook:
    """Read all rule files below `root`; by default those of the package and of the user's own folder, where a file that is named
    like one of the package stands in its place.

    Raises RuleError naming file and key: unknown key, missing source, unknown signal, cause or technique, double alias.
    """
    roots = [PACKAGED, *_own_roots()] if root is None else [root]
    digest = hashlib.sha256()
    found = {kind: _toml_files(roots, kind) for kind in KINDS}
    gpus = _read_all(found["gpus"], digest, read_gpu)
    models = _read_all(found["models"], digest, read_model)
    techniques = _read_all(found["techniques"], digest, read_technique)
    check_references(found["techniques"], techniques)
    engines: dict[str, EngineProfile] = {}
    for path in found["engines"].values():
        digest.update(path.name.encode() + path.read_bytes())
        engines[path.stem] = load_engine(path)
    if (generic := roots[0] / GENERIC_FILE).exists():
        digest.update(generic.read_bytes())
        read_efficiency(TomlTable.parse(generic, generic.read_text("utf-8")))
    return Rulebook(
        version=digest.hexdigest()[:12],
        gpus=MappingProxyType(gpus),
        models=MappingProxyType(models),
        techniques=MappingProxyType(techniques),
        engines=MappingProxyType(engines),
        _gpu_names=_names(found["gpus"], {g.id: (g.name, *g.aliases) for g in gpus.values()}),
        _model_names=_names(found["models"], {m.id: (m.name, *m.aliases) for m in models.values()}),
        _technique_names=_names(found["techniques"], {t.id: (t.title, *t.aliases) for t in techniques.values()}),
    )


def _own_roots() -> list[Path]:
    """The user's folder, where there is one. A folder that was named must be there, and a file beside its folders is misplaced."""
    folder = own_folder()
    if not folder.is_dir():
        if os.environ.get(OWN_VARIABLE):
            raise RuleError(folder, OWN_VARIABLE, "names no folder: make it, or take the variable away")
        return []
    for path in sorted(folder.glob("*.toml")):
        raise RuleError(
            path, "place", f"is read by nobody: move it into one of the folders {', '.join(KINDS)} beside it"
        )
    return [folder]


def _toml_files(roots: Sequence[Path], kind: str) -> dict[str, Path]:
    """By id, in order of their names; of two files with one name that of the later root."""
    found = {path.stem: path for root in roots for path in (root / kind).glob("*.toml")}
    return dict(sorted(found.items(), key=lambda item: item[1].name))


def _read_all(paths: Mapping[str, Path], digest: hashlib._Hash, read: Callable[[str, TomlTable], T]) -> dict[str, T]:
    found: dict[str, T] = {}
    for identity, path in paths.items():
        content = path.read_bytes()
        digest.update(path.name.encode() + content)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RuleError(path, "encoding", f"is not UTF-8 ({error})") from None
        found[identity] = read(identity, TomlTable.parse(path, text))
    return found


def _names(paths: Mapping[str, Path], names_of: Mapping[str, tuple[str, ...]]) -> Mapping[str, str]:
    """Normalized name -> id; two files that claim one name are an error."""
    found: dict[str, str] = {normalized(identity): identity for identity in names_of}
    for identity, names in names_of.items():
        for name in names:
            other = found.setdefault(normalized(name), identity)
            if other != identity:
                raise RuleError(paths[identity], "aliases", f"{name!r} already names {other!r}")
    return MappingProxyType(found)
