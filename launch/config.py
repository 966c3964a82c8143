"""Recipes: a TOML file and `--set a.b=c` in, one checked tree out.

Consumes    the path of a recipe, overrides as typed on the command line
Produces    `Recipe`, or `ConfigError` whose lines name field, value, bound and remedy
Waits for   nothing
Invariant   an unknown key is refused with the nearest name there is; a text is never taken for a number
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from launch.tree import Recipe

_Model = TypeVar("_Model", bound=BaseModel)


class ConfigError(ValueError):
    """A recipe or a command that can't be obeyed; the user changes it. Exit code 2."""


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at `path`, with overrides such as `staleness.max_staleness=2` put over it.

    Raises:
        ConfigError: no such file, not TOML, an unknown key, a wrong type, a value out of its bounds.
    """
    return parse(read_toml(path), overrides, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{_recipes_near(path)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def parse(tree: Mapping[str, Any], overrides: Sequence[str], source: str) -> Recipe:
    """A checked recipe from nested tables; `source` names them in messages. `@FILE` lays a TOML file over them."""
    merged = json.loads(json.dumps(tree, default=str))
    for override in overrides:
        if override.startswith("@"):
            _lay_over(merged, read_toml(Path(override[1:])))
        else:
            set_value(merged, override)
    return validate(Recipe, merged, source)


def validate(model: type[_Model], tree: Mapping[str, Any], source: str) -> _Model:
    """Checks types and bounds; every fault is reported at once, one a line."""
    try:
        return model.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        lines = [_explain(fault, model) for fault in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from error


def set_value(tree: dict[str, Any], override: str) -> None:
    """Applies one `a.b=c`; c is read as a TOML value, else it is a text."""
    key, equals, text = override.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise ConfigError(f"--set {override!r}: expected TABLE.KEY=VALUE, e.g. --set staleness.max_staleness=2")
    table = tree
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override!r}: {name} is a value, not a table")
    table[names[-1]] = _value(text.strip())


def _lay_over(tree: dict[str, Any], overlay: Mapping[str, Any]) -> None:
    """Puts the values of nested tables over those that are there."""
    for name, value in json.loads(json.dumps(overlay, default=str)).items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _lay_over(tree[name], value)
        else:
            tree[name] = value


def _value(text: str) -> Any:
    try:
        return json.loads(json.dumps(tomllib.loads(f"value = {text}")["value"], default=str))
    except tomllib.TOMLDecodeError:
        return text


def dials(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings of the tree."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from dials(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def live_dials(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted names of those that may be turned while a run goes on: so marked in the tree."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from live_dials(field.annotation, f"{prefix}{name}.")
        elif isinstance(extra, dict) and extra.get("live"):
            yield prefix + name


def _explain(fault: Mapping[str, Any], model: type[BaseModel]) -> str:
    """One line a person can act on, from one of pydantic's faults."""
    where = ".".join(str(part) for part in fault["loc"])
    kind, value = fault["type"], fault["input"]
    if kind == "extra_forbidden":
        return f"{where} is no setting{_nearest(where, model)}"
    if kind == "missing":
        return f"{where} is missing: the recipe must state it"
    if kind == "value_error":
        return _with_table(str(fault["ctx"]["error"]), where, model)
    stated = f"{where} = {json.dumps(value, default=str)}"
    wanted = fault["msg"].removeprefix("Input should be ")
    return f"{stated}: {wanted}" if wanted == fault["msg"] else f"{stated} must be {wanted}"


def _with_table(message: str, where: str, model: type[BaseModel]) -> str:
    """A package's own words name its field; here it gets the table it stands in."""
    if where:
        return message if message.startswith(where.split(".")[0]) else f"{where}: {message}"
    field, _, rest = message.partition(" ")
    full = [name for name in dials(model) if name.rpartition(".")[2] == field]
    return f"{full[0]} {rest}" if len(full) == 1 else message


def _nearest(where: str, model: type[BaseModel]) -> str:
    """ " (did you mean x.y?)", or what the table holds; the same key in another table counts as near."""
    table, _, key = where.rpartition(".")
    known = list(dials(model))
    tables = sorted({name.split(".")[0] for name in known})
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    if elsewhere:
        return f": did you mean {elsewhere[0]}?"
    if not table:
        near = difflib.get_close_matches(where, tables, n=1)
        return f": did you mean {near[0]}?" if near else f"; the tables are {', '.join(tables)}"
    near = difflib.get_close_matches(where, known, n=1)
    if near:
        return f": did you mean {near[0]}?"
    inside = [name.rpartition(".")[2] for name in known if name.startswith(f"{table}.")]
    return f"; [{table}] has {', '.join(inside)}" if inside else ""


def _recipes_near(path: Path) -> str:
    folder = path.parent
    names = sorted(str(file) for file in folder.glob("*.toml")) if folder.is_dir() else []
    return f"; recipes there are {', '.join(names)}" if names else ""


def to_toml(recipe: BaseModel) -> str:
    """The resolved tree as TOML, read back by `load` to an equal one. Values that are None are left out."""
    lines: list[str] = []
    for table, values in recipe.model_dump(mode="json", exclude_none=True).items():
        lines.append(f"[{table}]")
        lines.extend(f"{key} = {_toml(value)}" for key, value in values.items())
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return json.dumps(value)
