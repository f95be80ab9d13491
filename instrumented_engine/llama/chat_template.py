"""Messages to one prompt, by the template that comes with a model: Jinja2 in its sandbox, since a template is foreign code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from phasewise.instrumented_engine.engine_extra import extra
from phasewise.rules.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Template

# For models that bring no template; the format of most small chat models.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(template: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str]) -> str:
    """special: bos_token and eos_token. Raises InputError where the template is broken or refuses the messages."""
    jinja2 = extra("jinja2", "a chat template")
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages], add_generation_prompt=True, **special
        )
    except jinja2.TemplateError as problem:
        raise InputError("messages", "", f"the model's chat template refuses them: {problem}") from problem
    except (TypeError, KeyError, ValueError) as problem:
        raise InputError(
            "messages", "", f"the model's chat template cannot take them: {problem}", "give role and content as text"
        ) from problem


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    jinja2 = extra("jinja2", "a chat template")
    sandbox = extra("jinja2.sandbox", "a chat template")

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    # Blocks are trimmed as the Transformers library does it, which is what templates are written for.
    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    compiled: Template = environment.from_string(template)
    return compiled
