"""Checks of users' settings: errors say the value, the rule and the fix."""

import types
import typing
from dataclasses import fields


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_fields(config) -> None:
    """Raise ValueError unless every field of a dataclass instance has the type its annotation names.

    An integer is accepted where a float is asked for, a list where a tuple is; bool is no integer.
    """
    hints = typing.get_type_hints(type(config))
    for f in fields(config):
        value, hint = getattr(config, f.name), hints[f.name]
        if not _matches(value, hint):
            name = getattr(hint, "__name__", None) if not typing.get_args(hint) else str(hint)
            raise ValueError(f"{type(config).__name__}.{f.name}={value!r}: must be of type {name}")


def _matches(value, hint) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_matches(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(k, arguments[0]) and _matches(v, arguments[1]) for k, v in value.items())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
