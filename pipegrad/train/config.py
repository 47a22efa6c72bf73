"""The configuration: TOML and ``--set``, validated. An error names file, key, value, and a way out.

Descriptions of the fields are the reference: errors quote them, and ``docs/config.md`` is made of
them.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from pipegrad.errors import ConfigError
from pipegrad.plugins.handler import BUCKET_BYTES, DEFAULT_HANDLERS
from pipegrad.plugins.options import closest_first

_SHOWN_CHARACTERS = 80
_OPENING = ("[", "{")  # of a list or a table, not of a word
_NEARLY_TOML = {"true", "false", "yes", "no", "on", "off", "none", "null"}
_OPTIMIZER_OPTIONS = {"lr", "betas", "eps", "weight_decay", "momentum", "nesterov"}
_COMPLAINTS = {
    "model_type": "should be a table",
    "string_pattern_mismatch": "should look like 'module:function'",
}


class Table(BaseModel):
    """A table whose keys are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Named(Table):
    """Something chosen by name, and its own options."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="what is chosen; all further keys are its own options")

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are not ours."""
        return dict(self.model_extra or {})

    @property
    def spec(self) -> dict[str, Any]:
        """Name and options in one table, as a registry takes it."""
        return {"name": self.name, **self.options}


def _named(value: object) -> object:
    if not isinstance(value, str | Mapping | Named):
        raise PydanticCustomError("choice", "should be a name, or a table of name and options")
    return {"name": value} if isinstance(value, str) else value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | Mapping) else value


def _files(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _further(value: object) -> object:
    if isinstance(value, Mapping) and any(n in ("pp", "dp") or not n.isidentifier() for n in value):
        raise PydanticCustomError(
            "dimensions", "should name dimensions by words, other than 'pp' and 'dp'"
        )
    return value


Choice = Annotated[Named, BeforeValidator(_named)]
Dimensions = Annotated[dict[str, Annotated[int, Field(ge=1)]], BeforeValidator(_further)]


class Gradients(Table):
    """How gradients travel."""

    bucket_bytes: int = Field(
        default=BUCKET_BYTES, ge=0, description="wire bytes at which a bucket closes"
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="dtype on the wire, 'float32', 'bfloat16' or 'float16'; else each its own",
    )
    master_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="dtype of what the optimizer steps and of its state: 'float32' gives "
        "parameters of lower precision a master copy; else each parameter's own",
    )
    comm_streams: int = Field(
        default=2, ge=1, le=64, description="side streams, each with its own communicators"
    )
    allow_unsynced: list[str] = Field(
        default=[],
        description="shell-style patterns of tied parameters that may drift apart, and of what "
        "only looks like copies",
    )
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        description="largest global gradient norm, all ranks together; else no clipping",
    )


class Model(Table):
    """Which model."""

    model_config = ConfigDict(extra="allow")

    factory: str = Field(
        pattern=r"^[\w.]+:[\w.]+$",
        description="'module:function' that returns the uncut model as an ordered nn.Sequential, "
        "from bytes (batch, sequence) to logits (batch, sequence, 256 or more); the module may lie "
        "beside the configuration; all further keys are the function's keyword arguments",
    )

    @property
    def options(self) -> dict[str, Any]:
        """The factory's keyword arguments."""
        return dict(self.model_extra or {})


class Parallel(Table):
    """Which rank does what."""

    pipeline: int | None = Field(
        default=None,
        ge=1,
        description="pipeline ranks; by default all ranks / (parallel.data and dimensions)",
    )
    data: int | None = Field(
        default=None,
        ge=1,
        description="data-parallel replicas; by default all ranks / (parallel.pipeline and "
        "dimensions)",
    )
    dimensions: Dimensions = Field(
        default={},
        description="names and sizes of further mesh dimensions inside of 'pp' and 'dp', "
        "outermost first, as in { tp = 2 }",
    )
    data_dimensions: list[str] = Field(
        default=["dp"],
        min_length=1,
        description="mesh dimensions along which ranks see different data: 'dp', and such of "
        "parallel.dimensions as 'ep' for expert parallelism",
    )
    schedule: Choice = Field(
        default=Named(name="1f1b"),
        description="a name that `pipegrad schedules` lists, or a table of name and options",
    )
    microbatches: int = Field(default=4, ge=1, description="microbatches a step, on every replica")
    boundaries: list[int] | None = Field(
        default=None,
        description="index of the first layer of every stage but the first; by default the stages "
        "hold as equal numbers of parameters as can be",
    )


class Data(Table):
    """What is read: bytes of text, each byte a token."""

    files: Annotated[list[str], BeforeValidator(_files)] = Field(
        default=[],
        description="UTF-8 text files, or shell-style patterns of them, which are read in the "
        "order of their names; by default what CPython carries",
    )
    batch_size: int = Field(default=16, ge=1, description="sequences a step, all ranks together")
    sequence_length: int = Field(default=128, ge=1, description="tokens a sequence")


class LearningRate(Named):
    """One learning-rate schedule."""

    name: str = Field(description="a class of torch.optim.lr_scheduler; further keys are its own")
    steps: int | None = Field(
        default=None,
        ge=1,
        description="steps until the next one of the list takes over; not for the last",
    )


class Optimizer(Named):
    """Which optimizer, and its options as torch.optim spells them."""

    name: str = Field(
        default="AdamW", description="a class of torch.optim; further keys are its own"
    )
    decay_norms_and_biases: bool = Field(
        default=True,
        description="false: weight decay only for parameters of two or more dimensions",
    )
    schedule: Annotated[
        list[Annotated[LearningRate, BeforeValidator(_named)]], BeforeValidator(_listed)
    ] = Field(
        default=[],
        description="learning-rate schedules, one after the other: a table, or a list of them",
    )


class Train(Table):
    """How long, and where to."""

    steps: int = Field(default=100, ge=1, description="number of optimizer steps")
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="of the model's start, of dropout and of the batches"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="'fp32', or 'bf16': forward under autocast, parameters stay fp32",
    )
    recompute: bool = Field(
        default=False,
        description="keep only what stages are given, and run their forwards again before their "
        "backwards: less memory, one more forward a microbatch",
    )
    device: str = Field(
        default="auto",
        description="'cpu', 'cuda', 'cuda:0', ...; 'auto' takes CUDA if each rank has a card",
    )
    output: str = Field(
        default="runs/run",
        min_length=1,
        description="folder of the run; one that exists is kept, and -2, -3, ... added",
    )
    save_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between checkpoints in the run's folder, and one at the end; else none",
    )
    resume: str | None = Field(
        default=None,
        description="folder of a checkpoint to go on from, of any cut of the same model",
    )
    log_every: int = Field(
        default=10, ge=1, description="steps between lines where there is no terminal"
    )

    def saves_after(self, number: int) -> bool:
        """Whether a checkpoint is written after a step."""
        every = self.save_every
        return every is not None and (number % every == 0 or number == self.steps)


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
    optimizer: Optimizer = Optimizer()
    train: Train = Train()

    _path: Path = PrivateAttr(default=Path())
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file it was read from."""
        return self._path

    def flat(self) -> dict[str, Any]:
        """Returns every value by its dotted key, those of one table after the other."""
        tables = self.model_dump()
        handlers = tables.pop("gradient_handlers")
        values = {
            f"{t}.{key}": value for t, table in tables.items() for key, value in table.items()
        }
        return {"gradient_handlers": handlers, **values}

    def refuse(self, key: str, complaint: str, *, cause: BaseException | None = None) -> NoReturn:
        """Raises a ConfigError about the value of a key.

        Args:
            key: Dotted, as in ``--set``.
            complaint: What was expected, and what would do.
            cause: What the error comes from.
        """
        value: Any = self
        for part in re.findall(r"\w+", key):
            if isinstance(value, Mapping):
                value = value[part]
            else:
                value = value[int(part)] if isinstance(value, list) else getattr(value, part)
        if isinstance(value, Named):
            value = value.spec if value.options else value.name
        if isinstance(value, Model):
            value = {"factory": value.factory, **value.options}
        source = _source(key, self._path, self._sources)
        raise ConfigError(f"{source}: {key} = {_shown(value)}: {complaint}") from cause


def path_of(text: str) -> Path:
    """Returns a path of the configuration, with the home folder for a leading ``~``."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's own fails without a home folder


def load(
    path: Path,
    settings: Sequence[str] = (),
    *,
    handlers: Sequence[str] = (),
    schedule: str | None = None,
) -> Config:
    """Returns the configuration in the file at `path`, with what the command line changes.

    Args:
        path: A TOML file.
        settings: ``key=value`` in TOML; a value that is not TOML is a string.
        handlers: Replace ``gradient_handlers`` if there are any.
        schedule: Replaces ``parallel.schedule``.

    Raises:
        ConfigError: Lists everything that is wrong, one line each.
    """
    values = _read(path)
    sources: dict[str, str] = {}
    changes = [(f"--set {setting}", *_setting(setting)) for setting in settings]
    if handlers:
        changes.append(("--handler", ["gradient_handlers"], list(handlers)))
    if schedule is not None:
        changes.append((f"--schedule {schedule}", ["parallel", "schedule"], schedule))
    for source, locations, value in changes:
        _assign(values, locations, value)
        key = ".".join(locations)
        sources.pop(key, None)  # the last one counts, and is the last
        sources[key] = source
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        lines = [_line(detail, path, sources) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from error
    config._path = path
    config._sources = sources
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows writes a mark
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file: give the path of a TOML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error


def _setting(setting: str) -> tuple[list[str], Any]:
    """Returns the places that a dotted key leads through, and the value."""
    key, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"--set {setting}: expected key=value, as in --set train.steps=10")
    try:
        inside: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"--set {setting}: {key!r} is not a dotted key, as in --set train.steps=10"
        ) from error
    locations = []
    while isinstance(inside, dict):
        [(location, inside)] = inside.items()
        locations.append(location)
    try:
        return locations, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.strip().lower() in _NEARLY_TOML:
            raise ConfigError(
                f"--set {setting}: {text.strip()} is not TOML, and as a word it would count as "
                f"true: write true or false, or '\"{text.strip()}\"' for the word"
            ) from error
        if text.lstrip()[:1] in _OPENING:
            raise ConfigError(
                f"--set {setting}: the value is not TOML ({error}): write words in quotes, as in "
                f"--set \"data.files=['a.txt']\""
            ) from error
        return locations, text


def _assign(into: dict[str, Any], locations: Sequence[str], value: object) -> None:
    """Puts a value in its place, through tables; a name on the way becomes a table with it."""
    *path, last = locations
    for location in path:
        inner = into.get(location)
        if not isinstance(inner, dict):
            inner = into[location] = {"name": inner} if isinstance(inner, str) else {}
        into = inner
    into[last] = value


def _line(detail: ErrorDetails, path: Path, sources: Mapping[str, str]) -> str:
    """Returns one error as a line: source, key, value, what is wrong, what would do."""
    locations = list(detail["loc"])
    key = _dotted(locations)
    source = _source(key, path, sources)
    table, field = _field(locations)
    if detail["type"] == "extra_forbidden":
        known = closest_first(str(locations[-1]), table.model_fields)
        shown = _shown(detail["input"])
        elsewhere = _elsewhere(str(locations[-1]))
        return f"{source}: {key} = {shown}: unknown key{elsewhere}; known, closest first: {known}"
    about = table.model_fields[field].description if field in table.model_fields else None
    hint = f" ({about})" if about else ""
    if detail["type"] == "missing":
        return f"{source}: {key} is missing{hint}"
    complaint = _COMPLAINTS.get(detail["type"], detail["msg"].removeprefix("Input "))
    return f"{source}: {key} = {_shown(detail['input'])}: {complaint}{hint}"


def _elsewhere(name: str) -> str:
    """Returns in words which tables have a key of this name; "" if none has."""
    tables = {t: field.annotation for t, field in Config.model_fields.items()}
    found = [
        f"{table}.{name}"
        for table, kind in tables.items()
        if isinstance(kind, type) and issubclass(kind, Table) and name in kind.model_fields
    ]
    if name in _OPTIMIZER_OPTIONS:
        found.append(f"optimizer.{name}")
    return f", there is {' and '.join(found)}" if found else ""


def _field(locations: Sequence[int | str]) -> tuple[type[Table], str]:
    """Returns the innermost table that a place is in, and the field of it."""
    table: type[Table] = Config
    field = str(locations[0]) if locations else ""
    for location in locations[1:]:
        inner = table.model_fields[field].annotation if field in table.model_fields else None
        if isinstance(inner, type) and issubclass(inner, Table):
            table, field = inner, str(location)
    return table, field


def _dotted(locations: Sequence[int | str]) -> str:
    text = ""
    for location in locations:
        text += (
            f"[{location}]" if isinstance(location, int) else f".{location}" if text else location
        )
    return text


def _source(key: str, path: Path, sources: Mapping[str, str]) -> str:
    """Returns where a value comes from: the last setting of it, in it or around it, or the file."""
    key = key.partition("[")[0]
    found = [
        source
        for known, source in sources.items()
        if f"{key}.".startswith(f"{known}.") or known.startswith(f"{key}.")
    ]
    return found[-1] if found else str(path)


def _shown(value: object) -> str:
    if value is None:
        return "(default)"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
