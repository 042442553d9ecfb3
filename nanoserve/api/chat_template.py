"""Chat messages to one prompt string, with the Jinja template that comes with a model.

A template is code from a stranger: it runs in jinja2's immutable sandbox, with the settings, filters and globals
that Hugging Face gives it (`transformers/utils/chat_template_utils.py`), because templates are written against
those. Does not know tokens: whoever encodes the string must add no special tokens, the template wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; for serving its body is just text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template. Raises ValueError if `source` is not a valid one."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: the model's named special tokens (`bos_token`, `eos_token`, ...)."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # a stranger's code: also RecursionError, OverflowError, ...
            raise ValueError(f"the model's chat template is not valid: {error}; correct chat_template.jinja.") from None
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for these messages. `add_generation_prompt`: end with the opening of an assistant's turn.

        Raises ValueError for bad messages, and when the template refuses them (e.g. two user turns in a row).
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # whatever the code of a stranger raises: ZeroDivisionError, RecursionError, ...
            raise ValueError(f"the model's chat template refused the messages: {error}") from None


def check_messages(messages: object) -> None:
    """ValueError unless `messages` is a non-empty list of {"role": str, "content": str}, and nothing else."""
    shape = '{"role": "user", "content": "..."}'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError(f"messages must be a non-empty list of {shape}, got {messages!r:.80}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must look like {shape}, got {message!r:.80}.")
        for key in ("role", "content"):
            value = message.get(key)
            if not isinstance(value, str) or (key == "role" and not value):
                raise ValueError(f"messages[{i}].{key} must be a string, got {value!r:.80}; send {shape}.")
        unknown = sorted(str(key) for key in message if key not in ("role", "content"))
        if unknown:
            raise ValueError(f"messages[{i}].{unknown[0]} is not supported; send only role and content.")
