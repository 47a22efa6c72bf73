"""Config: reads and validates a configuration from TOML and ``--set``.

An error names key and value. `sizes_of` fits a number of ranks to a configuration. `with_options`
imports a function that a configuration names. No other code of the user runs here.
"""

from __future__ import annotations

import inspect
import math
import os
import pkgutil
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field, PrivateAttr, ValidationError

from pipegrad import run_files
from pipegrad.errors import ConfigError, in_words, reason
from pipegrad.limits import MOST_CONFIG_BYTES, MOST_CONFIG_DEPTH
from pipegrad.plugins.handler import DEFAULT_HANDLERS
from pipegrad.plugins.registry import complaints_of, redacted
from pipegrad.printable import printable, shortened
from pipegrad.train.schema import (
    Choice,
    Data,
    Eval,
    Gradients,
    Model,
    Named,
    Optimizer,
    Parallel,
    Table,
    Train,
)

_SHOWN_CHARACTERS = 80
_OPENING = ("[", "{")  # of a list or a table, not of a word
_NEARLY_TOML = {"true", "false", "yes", "no", "on", "off", "none", "null"}
_MISSPELT_FUNCTION = "string_pattern_mismatch"  # the only pattern that keys have


class Config(Table):
    """A whole configuration."""

    gradient_handlers: list[Choice] = Field(
        default=[Named(name=name) for name in DEFAULT_HANDLERS],
        description="names that `pipegrad handlers` lists, or tables of name and options",
    )
    gradients: Gradients = Gradients()
    model: Model
    parallel: Parallel = Parallel()
    data: Data = Data()
    eval: Eval = Eval()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()

    _path: Path = PrivateAttr(default=Path())

    @property
    def path(self) -> Path:
        """The file it was read from."""
        return self._path

    def flat(self) -> dict[str, Any]:
        """Returns every value by its dotted key, table by table."""
        tables = self.model_dump()
        handlers = tables.pop("gradient_handlers")
        values = {
            f"{t}.{key}": value for t, table in tables.items() for key, value in table.items()
        }
        return {"gradient_handlers": handlers, **values}

    def refuse(self, key: str, complaint: str, *, cause: BaseException | None = None) -> NoReturn:
        """Raises a ConfigError about the value of a key.

        Raises:
            ConfigError: Always.
        """
        # Follow the key through tables, lists and options, and show a short form as it was written,
        # because the message must have the value that the user wrote.
        value: Any = self
        for part in re.findall(r"\w+", key):
            if isinstance(value, Mapping):
                value = value[part]
            else:
                value = value[int(part)] if isinstance(value, list) else getattr(value, part)
        value = _as_written(value)
        if isinstance(value, Model):
            value = value.model_dump(exclude_none=True)
        value = redacted(value, re.findall(r"\w+", key)[-1])
        raise ConfigError(f"{key} = {_shown(value)}: {complaint}") from cause

    @contextmanager
    def refusing(
        self,
        key: str,
        words: str = "",
        *errors: type[BaseException],
        say: Callable[[BaseException], str] = in_words,
    ) -> Iterator[None]:
        """Turns errors of the code inside into a ConfigError about a key; a ConfigError stays.

        Args:
            key: The key.
            words: Come before the message of the error.
            errors: Their classes. By default all that code of the user may raise: a SystemExit
                would end this rank alone, and the others would wait.
            say: Returns the message of an error.
        """
        kinds = errors or (Exception, SystemExit)
        try:
            yield
        except ConfigError:
            raise
        except kinds as error:
            self.refuse(key, f"{words}{say(error)}", cause=error)


def _as_written(value: object) -> object:
    """Returns a value in the short form that a user may have written."""
    if isinstance(value, list):
        return [_as_written(part) for part in value]
    if isinstance(value, Named):
        return value.spec if value.options else value.name
    return value


def beside(config: Config, text: str) -> Path:
    """Returns a path relative to the folder of the configuration."""
    return config.path.parent / path_of(text)


def path_of(text: str) -> Path:
    """Returns a path of the configuration. A leading ``~`` is the home folder."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's own fails without a home folder


def load(
    path: Path,
    settings: Sequence[str] = (),
    *,
    handlers: Sequence[str] = (),
    schedule: str | None = None,
) -> Config:
    """Returns the configuration in the file at `path`, with the changes of the command line.

    Args:
        path: A TOML file.
        settings: ``key=value`` in TOML. A value that is not TOML is a string.
        handlers: Replace ``gradient_handlers`` if there are any.
        schedule: Replaces ``parallel.schedule``.

    Raises:
        ConfigError: If the configuration is not valid. The message has one line for each error.
    """
    values = _read(path)
    changes = [parsed_setting(setting) for setting in settings]
    if handlers:
        changes.append((["gradient_handlers"], list(handlers)))
    if schedule is not None:
        changes.append((["parallel", "schedule"], schedule))
    for locations, value in changes:
        _assign(values, locations, value)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_url=False):
            key = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in detail["loc"])
            complaint = detail["msg"].removeprefix("Input ")
            if detail["type"] == _MISSPELT_FUNCTION:
                complaint = "should look like 'module:function'"
            key = _one_line(key.removeprefix(".") or str(path))
            value = redacted(detail["input"], key.rpartition(".")[2])
            lines.append(f"{key} = {_shown(value)}: {complaint}")
        raise ConfigError("\n".join(lines)) from error
    config._path = path
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        # Editors on Windows may write a byte order mark.
        return _parsed(run_files.read(path, MOST_CONFIG_BYTES).decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file: give the path of a TOML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def _parsed(text: str) -> dict[str, Any]:
    """Returns the values of a TOML text.

    Raises:
        ValueError: Also if it is too deep, or has a number too long for Python.
    """
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    _check_depth(values)
    return values


def _check_depth(values: Mapping[str, Any]) -> None:
    # A dotted key makes a table for each dot, however many there are.
    layer: list[Any] = [values]
    for _ in range(MOST_CONFIG_DEPTH):
        inside = (v.values() if isinstance(v, dict) else v for v in layer)
        layer = [v for values in inside for v in values if isinstance(v, dict | list)]
    if layer:
        raise ValueError(f"tables and lists are more than {MOST_CONFIG_DEPTH} deep")


def parsed_setting(setting: str) -> tuple[list[str], Any]:
    """Returns the parts of the dotted key, and the value, of ``key=value`` on the command line.

    Raises:
        ConfigError: If there is no key, or a value that is neither TOML nor a word.
    """
    # Key and value are parsed apart, because a value that is not TOML is taken as a string. The key
    # is parsed as TOML too: its quoted parts may contain dots.
    key, equals, text = setting.partition("=")
    shown = _one_line(setting)
    if not equals or "\n" in key or "\r" in key:
        raise ConfigError(f"--set {shown}: expected key=value, as in --set train.steps=10")
    try:
        nested: Any = _parsed(f"{key} = 0")
    except ValueError as error:
        raise ConfigError(
            f"--set {shown}: {_one_line(key)!r} is not a dotted key, as in --set train.steps=10"
        ) from error
    locations = []
    while isinstance(nested, dict):
        [(location, nested)] = nested.items()
        locations.append(location)
    try:
        parsed = _parsed(f"value = {text}")
    except ValueError as error:
        if text.strip().lower() in _NEARLY_TOML:
            raise ConfigError(
                f"--set {shown}: {text.strip()} is not TOML, and as a word it would count as "
                f"true: write true or false, or '\"{text.strip()}\"' for the word"
            ) from error
        if text.lstrip()[:1] in _OPENING:
            raise ConfigError(
                f"--set {shown}: the value is not TOML ({error}): write words in quotes, as in "
                f"--set \"data.files=['a.txt']\""
            ) from error
        return locations, text
    # A line after the value would be lost.
    if len(parsed) > 1:
        raise ConfigError(f"--set {shown}: another key follows: repeat --set for several")
    return locations, parsed["value"]


def _one_line(text: str) -> str:
    return printable(shortened(text))


def _assign(table: dict[str, Any], locations: Sequence[str], value: object) -> None:
    """Sets a value in nested tables. A name on the way becomes a table with this name."""
    *path, last = locations
    for location in path:
        inner = table.get(location)
        if not isinstance(inner, dict):
            inner = table[location] = {"name": inner} if isinstance(inner, str) else {}
        table = inner
    table[last] = value


def _shown(value: object) -> str:
    if value is None:
        return "(default)"
    return shortened(repr(value), _SHOWN_CHARACTERS)


def sizes_of(config: Config, num_ranks: int | None = None) -> tuple[int, int, int, int]:
    """Returns the numbers of ranks, pipeline ranks, ranks along ``dp``, and parts of a batch.

    Args:
        config: The configuration.
        num_ranks: Number of all ranks. None means as many as the configuration needs.

    Raises:
        ConfigError: If keys contradict each other or the number of ranks.
    """
    _check_data(config)
    parallel = config.parallel
    inside = math.prod(parallel.dimensions.values())
    num_ranks = num_ranks or (parallel.pipeline or 1) * (parallel.data or 1) * inside
    pipeline, data = _pipeline_and_data(config, num_ranks)
    num_shares = _num_shares(config, data)
    share = num_shares * parallel.microbatches
    if config.data.dataset is None and config.data.batch_size % share:
        config.refuse(
            "data.batch_size",
            f"{num_shares} replicas x {parallel.microbatches} microbatches do not divide it: "
            f"choose a multiple of {share}",
        )
    return num_ranks, pipeline, data, num_shares


def _check_data(config: Config) -> None:
    """Refuses keys of ``[data]`` and ``[eval]`` that have no effect, or contradict each other.

    Raises:
        ConfigError: For the first of them.
    """
    data, held_out = config.data, config.eval
    if data.dataset is not None:
        for name in sorted(data.model_fields_set - {"dataset"}):
            example = f"dataset = {{name = {data.dataset.name!r}, {name} = ...}}"
            config.refuse(
                f"data.{name}",
                f"has no effect beside data.dataset: if its function has such an argument, write "
                f"{example}",
            )
        if "files" in held_out.model_fields_set:
            config.refuse("eval.files", "needs text, and data.dataset gives batches")
    measured = sorted(held_out.model_fields_set & {"files", "dataset"})
    if len(measured) == 2:
        config.refuse("eval.dataset", "eval.files are set too: choose one of them")
    if bool(measured) != (held_out.every is not None):
        config.refuse("eval.every", "set it, in steps, together with eval.files or eval.dataset")


def _pipeline_and_data(config: Config, num_ranks: int) -> tuple[int, int]:
    parallel = config.parallel
    known = {"pipeline": parallel.pipeline, "data": parallel.data, **parallel.dimensions}
    sizes = {name: size for name, size in known.items() if size is not None}
    product = math.prod(sizes.values())
    key = next((f"parallel.{name}" for name in ("pipeline", "data") if name in sizes), "")
    key = key or "parallel.dimensions"
    if num_ranks == 1 < product:
        config.refuse(
            key,
            f"this is one rank of {product}: start them by `torchrun --nproc-per-node {product} "
            f"-m pipegrad train {config.path}`",
        )
    whole = {"pipeline", "data"} <= sizes.keys()
    if num_ranks % product or (whole and product != num_ranks):
        config.refuse(
            key,
            f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} are {product} "
            f"ranks, but there are {num_ranks}: start "
            f"{'that many' if whole else 'a multiple'}, or leave one of pipeline and data out",
        )
    pipeline = sizes.get("pipeline", num_ranks // product)
    return pipeline, num_ranks // (pipeline * math.prod(parallel.dimensions.values()))


def _num_shares(config: Config, data: int) -> int:
    """Returns the size of the data dimensions."""
    parallel = config.parallel
    sizes = {"dp": data, **parallel.dimensions}
    names = parallel.data_dimensions
    if len(set(names)) < len(names) or not set(names) <= set(sizes):
        config.refuse("parallel.data_dimensions", f"expected of {[*sizes]}, once each")
    return math.prod(sizes[name] for name in names)


# Functions that a configuration names as ``module:function``.


def imported(config: Config, key: str, name: str) -> Callable[..., Any]:
    """Returns the function of a name.

    Raises:
        ConfigError: If it cannot be imported, or is no function.
    """
    with config.refusing(key, "cannot be imported: "):
        function: object = pkgutil.resolve_name(name)
    if not callable(function):
        config.refuse(key, f"is {type(function).__name__}, expected a function")
    return function


def with_options(
    config: Config, key: str, choice: Named, given: Callable[[list[str]], Collection[str]]
) -> Callable[..., Any]:
    """Returns the function of a choice, its keyword arguments bound.

    Args:
        config: The configuration.
        key: The key of the choice, for messages.
        choice: Name and keyword arguments.
        given: Takes the names of the function's parameters; returns those that the caller passes.

    Raises:
        ConfigError: If `imported` raises it, or the function does not take these arguments.
    """
    function = imported(config, key, choice.name)
    passed = given(parameters_of(function))
    if complaint := complaints_of(function, choice.options, given=passed):
        config.refuse(key, f"the function {complaint}")
    return partial(function, **choice.options)


def parameters_of(function: Callable[..., object]) -> list[str]:
    """Returns the names of a function's parameters; none if it has no signature."""
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # some functions written in C
        return []
