"""Vision-language models of transformers: tiny, with random weights, and batches of uneven images.

A batch has eight samples with nought to three images each. Samples 4 and 5 have none, so one of
four microbatches has none. A batch of an odd seed has as many images as samples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.support.partition.families import GROUPED, IGNORED, ROWS, WIDTH, Batch, Family

IMAGE, VIDEO, START, END = 60, 59, 58, 57
SPREAD = ((1, 0, 2, 1, 0, 0, 2, 1), (2, 1, 0, 1, 0, 0, 1, 3))  # images of each sample
Grid = tuple[int, int, int]
GRIDS: tuple[Grid, ...] = ((1, 4, 4), (1, 4, 8), (1, 8, 4))  # patches; four of them make a token
PATCHES = 4  # a token

TEXT = GROUPED | {"num_hidden_layers": 4, "max_position_embeddings": 128}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
CLIP = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
CLIP |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}


def spread(generator: torch.Generator) -> tuple[int, ...]:
    """Returns how many images each sample has."""
    return SPREAD[generator.initial_seed() % 2]


def mixed(generator: torch.Generator, images: Sequence[Sequence[int]]) -> Batch:
    """Returns texts with a run of tokens for each image, padded on either side.

    Args:
        generator: Of the words.
        images: For each sample, the tokens of each of its images.
    """

    def words(number: int) -> list[int]:
        return torch.randint(3, END, (number,), generator=generator).tolist()

    texts = []
    for sample, sizes in enumerate(images):
        ids = words(2 + sample % 3)
        for size in sizes:
            ids += [START, *[IMAGE] * size, END, *words(1)]
        texts.append(ids + words(3))
    length = max(map(len, texts))
    ids, mask = torch.zeros(2, ROWS, length, dtype=torch.long)
    for sample, text in enumerate(texts):
        at = slice(-len(text), None) if sample == 1 else slice(len(text))
        ids[sample, at], mask[sample, at] = torch.tensor(text), 1
    labels = torch.where((ids >= END) | (mask == 0), IGNORED, ids)
    labels[2:4] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def in_patches(generator: torch.Generator, *, dim: int) -> Batch:
    """Returns what Qwen2-VL takes: a row for each patch, and a grid for each image."""
    counts = spread(generator)
    grids = [[GRIDS[(i + n) % len(GRIDS)] for n in range(c)] for i, c in enumerate(counts)]
    sizes = [[t * h * w for t, h, w in of_sample] for of_sample in grids]
    batch = mixed(generator, [[size // PATCHES for size in one] for one in sizes])
    number = sum(map(sum, sizes))
    batch["pixel_values"] = torch.randn(number, dim, generator=generator, dtype=torch.float64)
    batch["image_grid_thw"] = torch.tensor([grid for one in grids for grid in one])
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return batch


def with_videos(generator: torch.Generator, *, dim: int) -> Batch:
    """Returns what Qwen2-VL takes, with videos in the place of images for some samples."""
    batch, counts = in_patches(generator, dim=dim), spread(generator)
    ids, grids, patches = (batch.pop(n) for n in ("input_ids", "image_grid_thw", "pixel_values"))
    filmed = torch.tensor([sample % 2 or not sample for sample in range(ROWS)]).bool()
    ids = torch.where((ids == IMAGE) & filmed[:, None], VIDEO, ids)
    of_videos = filmed.repeat_interleave(torch.tensor(counts))
    of_patches = of_videos.repeat_interleave(grids.prod(-1))
    return batch | {
        "input_ids": ids,
        "mm_token_type_ids": ((ids == IMAGE) + 2 * (ids == VIDEO)).int(),
        "pixel_values": patches[~of_patches],
        "image_grid_thw": grids[~of_videos],
        "pixel_values_videos": patches[of_patches],
        "video_grid_thw": grids[of_videos],
    }


def heard(generator: torch.Generator) -> Batch:
    """Returns what Qwen2-Audio takes: a row for each sound."""
    counts = spread(generator)
    batch = mixed(generator, [[6] * count for count in counts])
    sounds = torch.randn(sum(counts), 8, 24, generator=generator, dtype=torch.float64)
    mask = torch.ones(sum(counts), 24, dtype=torch.long)
    return batch | {"input_features": sounds, "feature_attention_mask": mask}


def whole_images(generator: torch.Generator, *, tokens: int) -> Batch:
    """Returns what LLaVA takes: a row for each image, all of one number of tokens."""
    counts = spread(generator)
    batch = mixed(generator, [[tokens] * count for count in counts])
    images = torch.randn(sum(counts), 3, 8, 8, generator=generator, dtype=torch.float64)
    return batch | {"pixel_values": images}


def tiled(generator: torch.Generator) -> Batch:
    """Returns what LLaVA-Next takes: images of three or five tiles, and their sizes."""
    shapes = {(8, 16): (3, 14), (16, 16): (5, 24)}  # height and width -> tiles and tokens
    counts = spread(generator)
    sizes = [[[*shapes][(i + n) % 2] for n in range(count)] for i, count in enumerate(counts)]
    batch = mixed(generator, [[shapes[size][1] for size in one] for one in sizes])
    images = torch.randn(sum(counts), 5, 3, 8, 8, generator=generator, dtype=torch.float64)
    batch["image_sizes"] = torch.tensor([size for one in sizes for size in one])
    for image, (height, width) in zip(images, batch["image_sizes"].tolist(), strict=True):
        image[shapes[height, width][0] :] = 0
    return batch | {"pixel_values": images}


def padded(generator: torch.Generator, *, tokens: int) -> Batch:
    """Returns what Idefics3 takes: as many images for each sample, those that lack being zeros."""
    counts = spread(generator)
    batch = mixed(generator, [[tokens] * count for count in counts])
    images = torch.randn(ROWS, max(counts), 3, 8, 8, generator=generator, dtype=torch.float64)
    for sample, count in enumerate(counts):
        images[sample, count:] = 0
    return batch | {"pixel_values": images}


def towers(vision: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {"vision_config": vision, "text_config": TEXT | text}


QWEN = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
LLAMA = {"model_type": "llama"}

QWEN25 = Family(
    "Qwen2_5_VLConfig",
    "Qwen2_5_VLForConditionalGeneration",
    towers(
        QWEN
        | {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": WIDTH}
        | {"fullatt_block_indexes": [1], "window_size": 16},
        rope_parameters=MROPE,
    )
    | TOKENS,
    partial(in_patches, dim=96),
)

VISION = {
    "Qwen2.5-VL": QWEN25,
    "Qwen3-VL": Family(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        towers(
            QWEN
            | {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": WIDTH}
            | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
            rope_parameters=MROPE,
        )
        | TOKENS,
        partial(in_patches, dim=96),
    ),
    "LLaVA": Family(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        towers(CLIP | {"model_type": "clip_vision_model"}, **LLAMA) | {"image_token_index": IMAGE},
        partial(whole_images, tokens=4),
    ),
    "LLaVA-Next": Family(
        "LlavaNextConfig",
        "LlavaNextForConditionalGeneration",
        towers(CLIP | {"model_type": "clip_vision_model"}, **LLAMA)
        | {"image_token_index": IMAGE, "image_grid_pinpoints": [[8, 16], [16, 16]]},
        tiled,
    ),
    "Idefics3": Family(
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        towers(dict(CLIP), **LLAMA) | {"image_token_id": IMAGE, "scale_factor": 2},
        partial(padded, tokens=1),
    ),
    "Qwen2.5-VL, videos": replace(QWEN25, make_batch=partial(with_videos, dim=96)),
    "Qwen2-Audio": Family(
        "Qwen2AudioConfig",
        "Qwen2AudioForConditionalGeneration",
        {
            "audio_config": {"d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": 2}
            | {"encoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 12},
            "text_config": TEXT | {"model_type": "qwen2"},
            "audio_token_index": IMAGE,
        },
        heard,
    ),
}


def seen(batch: Batch) -> list[str]:
    """Returns the names of the inputs that have images, videos or sounds."""
    return [name for name in batch if re.match("pixel|image|video|input_features|feature", name)]


def example(family: Family) -> dict[str, Any]:
    """Returns a batch for a cut, with all kinds of inputs."""
    return {name: x for name, x in family.batch(100).items() if name != "labels"}
