"""Gin statements in layers -> one value and one origin for every setting.

Statements come in order of precedence (gin files, environment, command line) and the last one on a setting wins. A knob's macro and the
field it names are one setting: `BATCH_SIZE = 8` and `TrainConfig.batch_size = 8` say the same, in any layer. gin's own parser reads the
syntax, but gin would accept a macro that nobody reads, so names are checked here; nothing is ever skipped.
"""

import itertools
import sys
import tokenize
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from gin import config_parser

from data.checks import require
from dlrm_hstu.knobs import FOREIGN_KNOBS, KNOBS, MODULES, nearest, settings_class

DEFAULT = "default"


@dataclass(frozen=True)
class Binding:
    """`key = value`, where key is "Class.field" or a macro's name, and origin tells a reader where it was written."""

    key: str
    value: object
    origin: str


@dataclass(frozen=True)
class Macro:
    """`%name` inside a value."""

    name: str


@dataclass(frozen=True)
class Reference:
    """`@name` inside a value: gin knows it, we do not."""

    name: str


class _Delegate(config_parser.ParserDelegate):
    def configurable_reference(self, scoped_configurable_name, evaluate):
        return Reference(scoped_configurable_name)

    def macro(self, macro_name):
        return Macro(macro_name)


def read_file(path: str, including: tuple[Path, ...] = ()) -> list[Binding]:
    """Bindings of a gin file; `include "other.gin"` is relative to the file that says it. Raises ValueError with file and line."""
    file = Path(path)
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else Path(__file__).parent.parent / "configs"
        there = ", ".join(sorted(str(config) for config in folder.glob("*.gin"))) or f"no .gin file in {folder}"
        raise ValueError(f"gin file {path!r}: no such file; there are: {there}")
    require(file.resolve() not in including, f"gin file {path!r}: includes itself")
    return _read(file.read_text(encoding="utf-8"), lambda line: f"{path} line {line}", file.parent, (*including, file.resolve()))


def read_text(text: str, origin: str) -> list[Binding]:
    """Bindings of a --gin text. Raises ValueError."""
    return _read(text, lambda line: origin, Path(), ())


def _read(text, where, folder: Path, including: tuple[Path, ...]) -> list[Binding]:
    bindings = []
    try:
        parser = config_parser.ConfigParser(text, _Delegate())
        while (statement := parser.parse_statement()) is not None:
            origin = where(statement.location.line_num)
            if isinstance(statement, config_parser.IncludeStatement):
                bindings += read_file(str(folder / statement.filename), including)
            elif isinstance(statement, config_parser.BindingStatement):
                bindings.append(_binding(statement, origin))
            else:
                is_block = isinstance(statement, config_parser.BlockDeclaration)
                require(is_block, f"{origin}: only bindings and includes are allowed here, not imports")
    except SyntaxError as error:
        raise ValueError(f"{where(error.lineno)}: cannot read {(error.text or '').strip()!r}: {_syntax_rule(error.msg)}") from None
    except tokenize.TokenError as error:
        raise ValueError(f"{where(error.args[1][0])}: {error.args[0]}; a bracket or a quote is not closed") from None
    return bindings


def _syntax_rule(message: str) -> str:
    if "parse" in message:
        return 'expected NAME = VALUE, where a text value stands in quotes: RUN_NAME = "demo"'
    return message.splitlines()[0]


def _binding(statement, origin: str) -> Binding:
    name = ".".join(filter(None, (statement.selector, statement.arg_name)))
    require(not statement.scope, f"{origin}: {statement.scope}/{name}: gin scopes are not used here; drop '{statement.scope}/'")
    for node in _leaves(statement.value):
        require(not isinstance(node, Reference), f"{origin}: {name} refers to @{getattr(node, 'name', '')}: write a value instead")
    if not statement.arg_name:
        return Binding(name, statement.value, origin)
    for owner, module in MODULES.items():
        if f".{module}.{owner}".endswith(f".{statement.selector}"):
            return Binding(_known_field(owner, statement.arg_name, origin), statement.value, origin)
    raise ValueError(f"{origin}: unknown setting {name!r}; did you mean {_nearest_field(name, statement.arg_name)}?")


def _known_field(owner: str, field_name: str, origin: str) -> str:
    key = f"{owner}.{field_name}"
    require(key in setting_defaults(), f"{origin}: unknown setting {key!r}; did you mean {_nearest_field(key, field_name)}?")
    return key


def _nearest_field(name: str, field_name: str) -> str:
    """The setting a wrong name most likely means: the right field under a wrong class counts before a like-looking name."""
    same_field = [key for key in setting_defaults() if key.split(".")[1] == field_name]
    return nearest(name, same_field or setting_defaults())


def setting_defaults() -> dict[str, object]:
    """Default of every setting, by "Class.field"."""
    return {
        f"{owner}.{f.name}": f.default if f.default is not MISSING else f.default_factory()
        for owner in MODULES
        for f in fields(settings_class(owner))
    }


def _leaves(value) -> Iterable:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, (list, tuple)):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _macros(value) -> list[str]:
    return [leaf.name for leaf in _leaves(value) if isinstance(leaf, Macro)]


def resolve(bindings: Iterable[Binding]) -> dict[str, Binding]:
    """The one binding in force for every setting, by "Class.field", macros replaced by values and defaults filled in.

    Raises ValueError on a macro that is read but never set, set but never read, or that depends on itself.
    """
    bindings = list(bindings)
    _check_macros(bindings)
    in_force = {key: Binding(key, value, DEFAULT) for key, value in setting_defaults().items()}
    for binding in bindings:
        key = _setting(binding.key)
        # `TrainConfig.batch_size = %BATCH_SIZE` ties the field to its own knob, which it always is.
        if not (isinstance(binding.value, Macro) and _setting(binding.value.name) == key):
            in_force[key] = binding
    return {key: _evaluate(key, in_force, ()) for key in setting_defaults()}


def _check_macros(bindings: Iterable[Binding]) -> None:
    is_setting = {binding.key: "." in binding.key or binding.key in KNOBS for binding in bindings}
    in_use = _macros_in_use(bindings, is_setting)
    known = {*KNOBS, *(key for key in is_setting if "." not in key)}
    for binding in bindings:
        for name in _macros(binding.value):
            require(name in known, f"{binding.origin}: macro %{name} is never set; did you mean %{nearest(name, known)}?")
        if binding.key in FOREIGN_KNOBS:
            raise ValueError(f"{binding.origin}: {binding.key} is not supported: {FOREIGN_KNOBS[binding.key].reason}")
        if not is_setting[binding.key]:
            like = nearest(binding.key, {*KNOBS, *(in_use - {binding.key})})
            rule = "is no knob and no setting uses it as a macro"
            require(binding.key in in_use, f"{binding.origin}: {binding.key} {rule}; did you mean {like}?")


def _macros_in_use(bindings: Iterable[Binding], is_setting: Mapping[str, bool]) -> set[str]:
    """Macros that a setting reads, directly or through other macros, whether that binding is in force or overridden."""
    in_use: set[str] = set()
    size = -1
    while size != len(in_use):
        size = len(in_use)
        for binding in bindings:
            if is_setting[binding.key] or binding.key in in_use:
                in_use.update(_macros(binding.value))
    return in_use


def _setting(name: str) -> str:
    return KNOBS[name].binding if name in KNOBS else name


def _evaluate(key: str, in_force: Mapping[str, Binding], path: tuple[str, ...]) -> Binding:
    """The binding of `key` with its macros replaced; a value that comes from a macro tells the macro's origin too."""
    binding = in_force[key]
    require(key not in path, f"{binding.origin}: {binding.key} depends on itself: {' -> '.join((*path, key))}")
    origins = [binding.origin]

    def replaced(value):
        if isinstance(value, Macro):
            source = _evaluate(_setting(value.name), in_force, (*path, key))
            origins.append(f"%{value.name} from {source.origin}")
            return source.value
        if isinstance(value, dict):
            return {replaced(k): replaced(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(replaced(item) for item in value)
        return value

    value = replaced(binding.value)
    return Binding(key, _coerced(key, value, binding.origin), ", ".join(dict.fromkeys(origins)))


def _coerced(key: str, value, origin: str):
    """`value` in the form its field keeps: float for integer, tuple for list. The class refuses wrong types later."""
    if "." not in key:
        return value
    owner, field_name = key.split(".")
    hint = typing.get_type_hints(settings_class(owner))[field_name]
    if hint is float and type(value) in (int, float):
        require(abs(value) <= sys.float_info.max, f"{key}={value}: must be a finite number (set by {origin})")
        return float(value)
    return tuple(value) if typing.get_origin(hint) is tuple and isinstance(value, list) else value


def as_gin(settings: Mapping[str, Binding]) -> str:
    """gin text of every setting, each with its origin in a comment; read back it gives the same settings."""
    groups = []
    for _, group in itertools.groupby(settings.values(), lambda binding: binding.key.split(".")[0]):
        groups.append("\n".join(_as_gin_lines(binding) for binding in group))
    return "\n\n".join(groups) + "\n"


def _as_gin_lines(binding: Binding) -> str:
    if not isinstance(binding.value, dict):
        return f"{binding.key} = {binding.value!r}  # {binding.origin}"
    items = "".join(f"    {key!r}: {value!r},\n" for key, value in binding.value.items())
    return f"{binding.key} = {{  # {binding.origin}\n{items}}}"
