"""Schema: the tables and keys of a configuration.

Descriptions of the fields are the reference. Errors quote them, and ``docs/config.md`` is made from
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from pipegrad.plugins.handler import BUCKET_BYTES


class Table(BaseModel):
    """A table whose keys are all known."""

    # Strict and without unknown keys: a typing error must not become a default value. Infinite
    # numbers are refused, as they would only fail in a later step.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Named(Table):
    """A choice by name, with options of its own."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="what is chosen; all further keys are its own options")

    @property
    def options(self) -> dict[str, Any]:
        """All keys but the name."""
        return dict(self.model_extra or {})

    @property
    def spec(self) -> dict[str, Any]:
        """Name and options in one table, as a registry takes them."""
        return {"name": self.name, **self.options}


# Validators that run before pydantic's own. They let users write the short form of a value: a name
# instead of a table, or one item instead of a list.


def _as_table(value: object) -> object:
    if not isinstance(value, str | Mapping | Named):
        raise PydanticCustomError("choice", "should be a name, or a table of name and options")
    return {"name": value} if isinstance(value, str) else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | Mapping) else value


def _as_file_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_dimensions(value: object) -> object:
    if isinstance(value, Mapping) and any(n in ("pp", "dp") or not n.isidentifier() for n in value):
        raise PydanticCustomError(
            "dimensions", "should name dimensions by words, other than 'pp' and 'dp'"
        )
    return value


Choice = Annotated[Named, BeforeValidator(_as_table)]
Dimensions = Annotated[dict[str, Annotated[int, Field(ge=1)]], BeforeValidator(_check_dimensions)]


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
    """Which text is read. Each byte is a token."""

    files: Annotated[list[str], BeforeValidator(_as_file_list)] = Field(
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
        list[Annotated[LearningRate, BeforeValidator(_as_table)]], BeforeValidator(_as_list)
    ] = Field(
        default=[],
        description="learning-rate schedules, one after the other: a table, or a list of them",
    )


class Train(Table):
    """How long to train, and where to write."""

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
        """True if a checkpoint is written after a step."""
        every = self.save_every
        return every is not None and (number % every == 0 or number == self.steps)
