"""`pipegrad export`: writes the uncut model of a checkpoint into one file."""

from __future__ import annotations

from pathlib import Path

import click

from pipegrad.commands.options import usage_errors
from pipegrad.errors import ConfigError
from pipegrad.printable import printable

_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt"}
_FORMATS = {
    "": "safetensors",
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
}


@click.command()
@click.argument("checkpoint", type=Path)
@click.option(
    "--output", type=Path, metavar="FILE", help="By default the checkpoint's path with a suffix."
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(list(_SUFFIXES)),
    help="By default as the output's suffix says, else safetensors.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of floating-point tensors; by default each its own.",
)
def export(
    checkpoint: Path, output: Path | None, file_format: str | None, dtype: str | None
) -> None:
    """Write the state dict of the uncut model of CHECKPOINT into one file, without a GPU.

    CHECKPOINT is the folder of a checkpoint, or of a run: then its newest checkpoint is taken.
    """
    import torch

    from pipegrad.train.checkpoint.uncut import converted, find_checkpoint, load, write_file

    with usage_errors():
        folder = find_checkpoint(checkpoint)
        kind = file_format or _format_of(output)
        path = output or folder.resolve().with_name(f"{folder.resolve().name}{_SUFFIXES[kind]}")
        state = load(folder)
        if dtype is not None:
            state = converted(state, getattr(torch, dtype))
        write_file(state, path, kind)
    numel = sum({id(tensor): tensor.numel() for tensor in state.values()}.values())
    wrote = f"wrote {path}: {len(state)} names, {numel:,} elements, from {folder}"
    click.echo(printable(wrote))


def _format_of(output: Path | None) -> str:
    suffix = "" if output is None else output.suffix
    if suffix not in _FORMATS:
        raise ConfigError(
            f"--output {output}: the suffix {suffix} names no format: choose one of "
            f"{', '.join(filter(None, _FORMATS))}, or give --format"
        )
    return _FORMATS[suffix]
