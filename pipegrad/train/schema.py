"""Schema: the tables and keys of a configuration.

Descriptions of the fields are the reference: ``docs/config.md`` is made from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pipegrad import GradientOptions
from pipegrad.plugins.registry import closest_first


class Table(BaseModel):
    """A table whose keys are all known."""

    # Strict and without unknown keys, because a typing error must not become a default value. No
    # infinite numbers, because they would only fail in a later step.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: object) -> object:
        names = values if isinstance(values, Mapping) else ()
        for name in names if cls.model_config["extra"] == "forbid" else ():
            if name not in cls.model_fields:
                known = closest_first(name, cls.model_fields)
                words = "unknown key {name}; known, closest first: {known}"
                raise PydanticCustomError("unknown", words, {"name": repr(name), "known": known})
        return values


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


def _check_dimensions(value: object) -> object:
    if isinstance(value, Mapping) and any(n in ("pp", "dp") or not n.isidentifier() for n in value):
        raise PydanticCustomError(
            "dimensions", "should name dimensions by words, other than 'pp' and 'dp'"
        )
    return value


def _check_function(value: Named) -> Named:
    if not re.fullmatch(FUNCTION, value.name):
        raise PydanticCustomError("function", "should look like 'module:function'")
    return value


FUNCTION = r"^[\w.]+:[\w.]+$"
Choice = Annotated[Named, BeforeValidator(_as_table)]
Function = Annotated[Choice, AfterValidator(_check_function)]
FileList = Annotated[list[str], BeforeValidator(_as_list)]
Dimensions = Annotated[dict[str, Annotated[int, Field(ge=1)]], BeforeValidator(_check_dimensions)]


class Gradients(Table):
    """The reduction of gradients: buckets, dtypes, clipping and checks."""

    bucket_bytes: int = Field(
        default=GradientOptions.bucket_bytes,
        ge=0,
        description="wire bytes at which a bucket closes",
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="dtype on the wire, 'float32', 'bfloat16' or 'float16'; else each its own",
    )
    sum_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="dtype in which the parts of ranks are added, before the sum is rounded to the "
        "dtype on the wire; else that of the wire",
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
    non_finite: Literal["raise", "skip"] = Field(
        default="raise",
        description="if gradients are not finite, on any rank: 'raise' ends the run, 'skip' leaves "
        "the update of this step out on all ranks; 100 in a row end the run",
    )
    check_every: int = Field(
        default=GradientOptions.check_every,
        ge=0,
        description="steps between comparisons of the copies of each parameter; the first ones are "
        "in steps 2, 4, 8 and so on; 0: never",
    )


class Model(Table):
    """The model: one of `factory`, `pretrained` and `config`."""

    model_config = ConfigDict(extra="allow")

    factory: str | None = Field(
        default=None,
        pattern=FUNCTION,
        description="'module:name' of a class or function that makes the uncut model, an nn.Module "
        "from tokens (batch, sequence) to logits (batch, sequence, number of tokens or more); the "
        "module may lie beside the configuration; all further keys are keyword arguments",
    )
    pretrained: str | None = Field(
        default=None,
        min_length=1,
        description="instead of factory: a directory that save_pretrained of transformers wrote, "
        "of a causal language model, seen from the folder of this file; beside it only dtype = "
        "'float32', 'bfloat16' or 'float16', of the parameters; docs/huggingface.md",
    )
    config: str | None = Field(
        default=None,
        min_length=1,
        description="instead of factory: a config.json of transformers, as pretrained; the values "
        "of the model start from train.seed",
    )

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = sorted(self.model_fields_set & set(type(self).model_fields))
        if len(given) != 1:
            raise PydanticCustomError(
                "model", "should have one of the keys factory, pretrained and config"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the factory, or of a model of transformers."""
        return dict(self.model_extra or {})

    @property
    def is_transformers(self) -> bool:
        """True if it is a model of transformers."""
        return self.factory is None


class Parallel(Table):
    """The work of each rank: mesh, stages, schedule and codecs."""

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
    prepare: Function | None = Field(
        default=None,
        description="'module:function' that is called on each rank with the list of its stages and "
        "the topology, before the gradient layer is made, to shard them by FSDP2 or tensor "
        "parallelism; or a table of this name and the function's keyword arguments",
    )
    shards: dict[str, int] = Field(
        default={},
        description="parameters of which each rank along one of parallel.dimensions has a piece, "
        "in the order of ranks: name pattern -> the dimension of the tensor that is cut, as in "
        "{ '*.down.weight' = 1 }; a checkpoint has the whole tensors, so runs of other sizes and "
        "`pipegrad export` read it",
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
    codecs: str | dict[str, Any] | None = Field(
        default=None,
        description="how values cross between pipeline ranks in fewer bytes: a name that `pipegrad "
        "codecs` lists, or a table of name and options; { activations = ..., gradients = ... } for "
        "one of them, { '0-1' = ... } for some hops; by default values cross as they are",
    )
    microbatches: int = Field(default=4, ge=1, description="microbatches a step, on every replica")
    boundaries: list[int | str] | None = Field(
        default=None,
        description="index or name of the first layer of every stage but the first; by default the "
        "stages hold as equal numbers of parameters as can be",
    )


class Data(Table):
    """The training data: text, or the batches of a function."""

    files: FileList = Field(
        default=[],
        description="files '*.jsonl' or '*.parquet', folders that save_to_disk of datasets wrote, "
        "and all others as UTF-8 text; or shell-style patterns of them, which are read in the "
        "order of their names; they need the extra hf; by default what CPython carries",
    )
    column: str | None = Field(
        default=None,
        min_length=1,
        description="what has the text in rows of files and folders that are no plain text; by "
        "default 'text'",
    )
    tokenizer: str | None = Field(
        default=None,
        description="a file of the library tokenizers, as 'tokenizer.json'; by default that of "
        "model.pretrained; else each byte is a token",
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        description="what follows each document, which is a file of plain text or a row of others; "
        "with a tokenizer one of its tokens, as '<|endoftext|>'",
    )
    batch_size: int = Field(default=16, ge=1, description="sequences a step, all ranks together")
    sequence_length: int = Field(default=128, ge=1, description="tokens a sequence")
    dataset: Function | None = Field(
        default=None,
        description="instead of all other keys here: 'module:function' that returns batches, or a "
        "table of this name and the function's keyword arguments; docs/trainer.md says what "
        "batches are",
    )


class Eval(Table):
    """Measurements and samples during the training."""

    every: int | None = Field(
        default=None,
        ge=1,
        description="steps between measurements on held-out data, and one at the end; else none",
    )
    files: FileList = Field(
        default=[], description="held-out text, read as data.files with the same tokenizer"
    )
    dataset: Function | None = Field(
        default=None, description="held-out batches instead of files, as data.dataset"
    )
    batches: int | None = Field(
        default=None,
        ge=1,
        description="largest number of batches that a measurement takes; else all",
    )
    sample_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between samples, and one at the end: the model continues a text; else "
        "none",
    )
    sample_tokens: int = Field(default=64, ge=1, description="most tokens that a sample adds")
    prompt: str = Field(default="The ", min_length=1, description="the text that samples continue")
    temperature: float = Field(
        default=0.0,
        ge=0,
        description="by which logits are divided before a token is drawn; 0 takes the likeliest",
    )


class LearningRate(Named):
    """One learning-rate schedule."""

    name: str = Field(description="a class of torch.optim.lr_scheduler; further keys are its own")
    steps: int | None = Field(
        default=None,
        ge=1,
        description="steps until the next one of the list takes over; not for the last",
    )


class Optimizer(Named):
    """The optimizer, and its options as torch.optim spells them."""

    name: str = Field(
        default="AdamW", description="a class of torch.optim; further keys are its own"
    )
    decay_norms_and_biases: bool = Field(
        default=True,
        description="false: weight decay only for parameters of two or more dimensions",
    )
    others: Choice | None = Field(
        default=None,
        description="another class of torch.optim, or a table of its name and options: it steps "
        "what is no matrix, and optimizer.name steps matrices alone; else one steps everything",
    )
    schedule: Annotated[
        list[Annotated[LearningRate, BeforeValidator(_as_table)]], BeforeValidator(_as_list)
    ] = Field(
        default=[],
        description="learning-rate schedules, one after the other: a table, or a list of them",
    )


class Train(Table):
    """The run: its steps, loss and precision, its folder and its checkpoints."""

    steps: int = Field(default=100, ge=1, description="number of optimizer steps")
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="of the model's start, of dropout and of the batches"
    )
    loss: Function | None = Field(
        default=None,
        description="'module:function' that takes the model's output and the targets of a "
        "microbatch and returns one element, or a table of this name and the function's keyword "
        "arguments; by default the mean cross-entropy, without targets of -100",
    )
    loss_reduction: Literal["mean", "token_mean"] = Field(
        default="mean",
        description="'mean': each row counts alike; 'token_mean': each target counts alike, "
        "and a function of train.loss returns a sum and how many targets it has",
    )
    deterministic: bool = Field(
        default=False,
        description="only algorithms that give the same bits in every run; an operator that has "
        "none is an error",
    )
    reporters: list[Choice] = Field(
        default=[Named(name="jsonl"), Named(name="terminal")],
        description="names that `pipegrad reporters` lists, or tables of name and options",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="'fp32'; or 'bf16' or 'fp16': forward under autocast, parameters stay fp32; "
        "with 'fp16' the loss is scaled, and a step whose gradients overflow is skipped",
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
    save: bool = Field(
        default=True,
        description="write a checkpoint into the run's folder at the end, also if a signal ends "
        "the run; false: write none at all",
    )
    save_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between further checkpoints, written while the training goes on; else "
        "none",
    )
    keep_last: int = Field(
        default=2, ge=1, description="number of the newest checkpoints that are kept"
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="steps between older checkpoints that are kept, too; else none",
    )
    resume: str | None = Field(
        default=None,
        min_length=1,
        description="what to go on from, on any cut of the same model: the folder of a checkpoint; "
        "or the folder of a run, whose newest checkpoint is taken and which goes on there; or "
        "'auto', the folder train.output, where a run begins if there is none, also for ranks that "
        "a launcher starts again",
    )
    trace: bool = Field(
        default=True,
        description="record the last steps; the end of the run says what makes a step long, and "
        "writes timeline.json into the run's folder, for pipegrad trace",
    )
    step_timeout_seconds: float = Field(
        default=GradientOptions.step_timeout_seconds,
        gt=0,
        description="how long a step, a batch of an evaluation, or the end of a process may take "
        "on any rank; then the job ends on all ranks with a report of who was late",
    )
    start_timeout_seconds: float = Field(
        default=1800.0, gt=0, description="the same for the set-up before the first step"
    )
    log_every: int = Field(
        default=10, ge=1, description="steps between lines where there is no terminal"
    )

    def saves_after(self, number: int) -> bool:
        """True if a checkpoint is written after a step."""
        is_due = self.save_every is not None and number % self.save_every == 0
        return self.save and (is_due or number == self.steps)
