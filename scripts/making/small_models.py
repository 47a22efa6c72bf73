"""Small models of all families of transformers: made, run in one process, and cut.

A configuration is shrunk by the names and defaults of its fields. What a family needs beside that
is in `OPTIONS`. A batch has what the forward takes, and labels that count unevenly: none of rows 2
and 3 counts. transformers is imported in functions: its import takes seconds.
"""
# ruff: noqa: ANN401 - models and configurations of transformers

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pipegrad
from pipegrad.errors import PipegradError
from scripts.making.chunked import step
from tests.support.partition.twins import difference
from tests.support.pipeline.schedulers import share, topology

ROWS = 8
MICROBATCH = 2  # rows
# Errors are relative to the largest value of a gradient, or to this of the largest of all. Rounding
# of float32 is relative to what is summed, so it is larger in gradients that nearly cancel.
FLOOR = 1e-3
MOST = 5e-5
PARAMETERS = 3_000_000  # at most
TOKENS = 16
VOCAB = 99
IGNORED = -100
CLASSES = 3

# The first of these heads that a family has is taken.
HEADS = (
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "SEMANTIC_SEGMENTATION",
    "IMAGE_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
)
# Their sample is made by the cut itself.
TEXTS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
)

# The value of a field whose default is an integer: of the first pattern that its name has.
NUMBERS: tuple[tuple[str, int], ...] = (
    (r"num_(nextn|mtp)|nextn_predict|mtp_num", 0),
    (r"^(encoder|decoder)_layers$|num_(encoder|decoder)_(hidden_)?layers", 2),
    (r"^(num_hidden_layers|n_layers?|num_layers|depth|layers|block_num|num_decoder_layers)$", 4),
    (r"vocab_size$|^codebook_size", VOCAB),
    (r"(kv|key_value)_heads?$|n_groups?$|^num_groups$", 2),
    (r"(num|n).*_heads?$|_heads$|^num_heads$|^heads$", 4),
    (r"head_dim$|^d_kv$|^dim_head$|attention_head_size|head_size$", 8),
    (r"lora_rank$|_rank$", 8),
    (r"shared_expert.*size|moe_intermediate|expert.*(size|dim)$|moe_.*size", 16),
    (r"experts?_per_tok|top_?k_experts|moe_top_?k|^top_k$|moe_topk|num_selected_experts", 2),
    (r"n_?group$|topk_group", 1),
    (r"n_shared_experts|num_shared_experts|num_shared$", 1),
    (r"rotary_dim$|mm_tokens_per_image$", 4),
    (r"^moe_k$", 2),
    (r"num_.*experts$|n_routed_experts|moe_num_experts|num_experts", 4),
    (r"(intermediate|ffn|inner|mlp|feed_?forward|ff).*(size|dim|hidden)|_ff$|ffn_dim|d_inner", 48),
    (
        r"(max_(source|target|2d|seq)?_?position|n_positions|n_ctx|max_seq|seq_len|context_length)",
        64,
    ),
    (
        r"hidden_(size|dim)|^d_model$|^n_embd$|embed(ding)?_(dim|size)|_dim$|^dim$|_width$|width$",
        32,
    ),
    (r"image_size|img_size", 32),
    (r"^patch_size$", 8),
    (r"num_mel_bins|feature_size", 16),
    (r"state_size|d_state|ssm_state", 8),
    (r"chunk_size|sliding_window|attention_window|block_size", 8),
    (r"num_labels", CLASSES),
)
TOKEN_IDS = {"pad": 0, "bos": 1, "eos": 2, "sep": 2, "cls": 1, "decoder_start": 1, "mask": 3}
# Fields without a default, or whose default is of large models.
MISSED = {
    "vocab_size": VOCAB,
    "head_dim": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
FIRST_TOKEN = 3  # that no field of TOKEN_IDS has
_LEFT = ("transformers_version", "architectures", "chunk_size_feed_forward")
_MEDIA = re.compile("(image|video|audio)_token")
FIRST_TEXT = 60  # tokens before it stand for images and the like


def types() -> dict[str, tuple[str, str]]:
    """Returns the head of every family: its class, and of which kind it is."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for head in HEADS:
        for kind, name in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            found.setdefault(kind, (name if isinstance(name, str) else name[0], head))
    return found


def small(config_class: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options that make a configuration small.

    Args:
        config_class: Of transformers.
        more: Options that it needs.
    """
    options: dict[str, Any] = {}
    for field in fields(config_class):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        name, token = field.name, FIRST_TOKEN + len(options)
        if field.init and name not in _LEFT and (value := _small(name, default, token)) != default:
            options[name] = value
    names = {field.name for field in fields(config_class)}
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        options["num_key_value_heads"] = 4
    if getattr(config_class, "is_encoder_decoder", False) and "decoder_start_token_id" not in names:
        options["decoder_start_token_id"] = 1
    for name, kind in config_class.sub_configs.items():
        if kind.__name__ != "AutoConfig":
            options[name] = small(kind, {})
        elif (config := _default(config_class, name)) is not None:
            options[name] = {"model_type": config.model_type, **small(type(config), {})}
    return _merged(options, more)


def _small(name: str, default: Any, token: int) -> Any:
    """Returns what a field gets in the place of its default.

    Args:
        name: Of the field.
        default: Of large models.
        token: Stands for images and the like, if the field is such a token.
    """
    kind: Any = type(default)
    if name.endswith(("_id", "_token_index")) and kind in (int, list, type(None)):
        stem = next((stem for stem in TOKEN_IDS if _is_token(name, stem)), None)
        is_token = default >= FIRST_TEXT if kind is int else kind is not list and _MEDIA.match(name)
        return token if is_token else TOKEN_IDS.get(stem or "", default)
    if kind is int:
        return min(
            default, next((x for pattern, x in NUMBERS if re.search(pattern, name)), default)
        )
    if name == "apply_spec_augment":  # hides random parts of sounds
        return False
    if kind is float and re.search("drop|jitter|noise|vae_std", name):
        return 0.0
    if kind in (list, tuple) and {*map(type, default)} == {int}:
        return kind(_several(name, default) or default)
    return MISSED.get(name) if default is None else default


def _is_token(name: str, stem: str) -> bool:
    return re.search(rf"(^|_){stem}_(token_)?(id|index)$", name) is not None


def _default(config_class: Any, name: str) -> Any:
    """Returns the default of a part of a configuration; None if there is none."""
    try:
        return getattr(config_class(), name, None)
    except Exception:  # noqa: BLE001 - some need arguments
        return None


def _merged(options: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(options.get(name), dict):
            options[name] = _merged(options[name], value)
        else:
            options[name] = value
    return options


def _several(name: str, default: Sequence[int]) -> list[int] | None:
    if re.search("depth|num_layers|layers$|blocks$", name):
        return [1] * len(default)
    if re.search("heads", name):
        return [2 if x > 1 else 1 for x in default]
    if re.search("hidden_sizes|dims|channels|embed|width|conv_dim|filters", name):
        return [16 * (1 + i) for i in range(len(default))] if len(default) > 1 else [16]
    if re.search("image_size|img_size", name):
        return [32] * len(default)
    if re.search("patch_size", name):
        return [8] * len(default)
    return None


_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}}
_MROPE_TEXT = {"text_config": _MROPE}
_WAV = {
    "feat_extract_stride": [5, 2, 2],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "conv_dim": [16, 16, 16],
} | {"mask_time_prob": 0.0, "vocab_size": VOCAB, "ctc_loss_reduction": "mean"}
_DOTS = {"num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
_DOTS |= {"swa_q_lora_rank": 8, "swa_kv_lora_rank": 8, "swa_v_head_dim": 8}
_DOTS |= {"swa_head_dim": 16, "swa_qk_nope_head_dim": 8}
_VIBE = {"downsampling_ratios": [2, 4], "depths": [1, 1, 1], "num_filters": 8}
_PIECES = {"image_grid_pinpoints": [[32, 32]]}
_SWIN = {"image_size": 64, "window_size": 4, "patch_size": 4, "depths": [1, 1, 2, 1]}
_FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "bailing_hybrid": {"layer_group_size": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "nemotron": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zamba zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1, "moe_intermediate_size": 16},
    # They take the images of all samples in one row, so no microbatch has an image.
    "minicpm_ocr minicpmv4_6 minicpmv4_7": dict.fromkeys(("image_token_id", "video_token_id")),
    "xlstm": {"hidden_size": 128, "chunk_size": 32},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 4}
    | {"max_position_embeddings": TOKENS},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 3]},
        "vision_config": {"sam_config": {"downsample_channels": [16, 32], "output_channels": 16}},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE}}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"output_channels": 8}},
    "granite4_vision": _PIECES
    | {"deepstack_layer_map": [[1, 0], [2, 1]], "spatial_target_layers": [0, 1, 2, 3]}
    | {"downsample_rate": "2/4", "vision_config": {"hidden_size": 64}},
    "idefics": {"freeze_text_layers": False, "freeze_vision_layers": False},
    "llama4": {
        "vision_config": {"intermediate_size": 128}
        | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "phi4_multimodal": {
        "audio_config": dict.fromkeys(
            ("nemo_conv_channels", "depthwise_separable_out_channel", "ext_pw_out_channel"), 32
        )
    },
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 8, "indexer_compress_ratio": 2},
    "voxtral": {
        "audio_config": {"intermediate_size": 128},
        "text_config": {"num_key_value_heads": 2},
    },
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "kimi_k25": {"vision_config": {"pos_emb_height": 4, "pos_emb_width": 4}},
    "gemma4_unified": {"vision_config": {"pooling_kernel_size": 1, "output_proj_dims": 32}},
    "chameleon": {
        "vocabulary_map": {"<image>": 9} | {f"IMGIMG{x}Z": 10 + i for i, x in enumerate("ABCD")},
        "vq_config": {"base_channels": 32, "latent_channels": 32, "num_embeddings": 4},
    },
    "emu3": {
        "vocabulary_map": {"<image>": 9, "<|extra_200|>": 10}
        | {f"<|visual token {i:06}|>": 11 + i for i in range(4)},
        "vq_config": {"base_channels": 32, "codebook_size": 4, "channel_multiplier": [1, 1]},
    },
    "janus": {
        "vq_config": {"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1]}
    },
    # Else they exchange layers in a short text.
    "big_bird bigbird_pegasus": {"attention_type": "original_full"},
    "led": {"attention_window": 6},  # texts of all lengths are padded
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "is_decoder": False},
    "neomme": {"head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "moshi": {"audio_encoder_config": {"codebook_size": 128}},
    "kyutai_speech_to_text": {
        "codec_config": {"codebook_size": 128, "upsample_groups": 16, "num_filters": 4}
    },
    "blt": {"use_cache": False, "encoder_hash_byte_group_vocab": 50},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "global_head_dim": 8},
    "gemma4": {"text_config": {"vocab_size_per_layer_input": VOCAB, "global_head_dim": 8}},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "dots3_note_text": _DOTS,
    "glm5_next": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note": {
        "text_config": _DOTS,
        "vision_config": {"mlp_layer_types": ["dense", *["sparse"] * 3]},
        "audio_config": {"adapter_input_size": 32},
    },
    "swin swinv2 donut-swin": _SWIN,
    "poolformer": {"image_size": 64, "patch_size": 7},
    "pvt": {"image_size": 64, "patch_sizes": [4, 2, 2, 2]},
    "levit": {"image_size": 64, "patch_size": 16},
    "mobilevitv2": {"image_size": 64},
    "timesformer": {"num_frames": 2},
    "kimi_linear": {"use_cache": False},
    "vivit": {"num_frames": 2, "tubelet_size": [2, 8, 8]},
    "videomae": {"num_frames": 2},
    "lilt": {"channel_shrink_ratio": 2, "hidden_size": 48},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "visual_embed": False},
    "bros": {"dim_bbox": 8},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 16},
    "llava_next llava_next_video llava_onevision": _PIECES,
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "florence2": {
        "vision_config": {
            "patch_size": [3, 3, 3, 3],
            "patch_stride": [2, 2, 2, 2],
            "patch_padding": [1, 1, 1, 1],
        }
    },
    "textnet": {"stem_num_channels": 3, "stem_out_channels": 16},
    "hgnet_v2": {"stem_channels": [3, 16, 16]},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 8}},
    "fun_asr_nano": {
        "adaptor_config": {"intermediate_size": 8},
        "audio_config": {"max_position_embeddings": 99},
    },
    "vibevoice": {"audio_config": _VIBE, "semantic_model_config": _VIBE},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 64}
    | dict.fromkeys(
        ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config"), _VIBE
    ),
    "speech-encoder-decoder": {"pad_token_id": 0},
    "kosmos-2": {"latent_query_num": 4},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32},
    "hubert wav2vec2 unispeech unispeech-sat wavlm sew sew-d data2vec-audio"
    " wav2vec2-conformer wav2vec2-bert": _WAV,
    "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe glm4v glm4v_moe glm46v glmga"
    " glm_ocr paddleocr_vl qwen2_5_omni_thinker qwen3_omni_moe_thinker ernie4_5_vl_moe cosmos3_edge"
    " cosmos3_omni hunyuan_vl": _MROPE_TEXT,
}
OPTIONS = {name: options for names, options in _FAMILIES.items() for name in names.split()}
ALL_ROWS = ("mbart", "plbart")  # fail if a row has no label


def make(kind: str) -> Any:
    """Returns a model of a family, with the same bits in every process.

    Raises:
        ValueError: If it is not small.
    """
    import transformers

    head = getattr(transformers, types()[kind][0])
    config_class: Any = transformers.CONFIG_MAPPING[kind]
    if head.config_class in config_class.sub_configs.values():  # a decoder of sounds
        config_class = head.config_class
    if "labels" not in inspect.signature(inspect.unwrap(head.forward)).parameters:
        raise ValueError("its forward takes no labels")

    def built() -> Any:  # a model may change its configuration
        return head(config_class(**small(config_class, OPTIONS.get(kind, {}))))

    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in built().named_parameters()}
    if (total := sum(sizes.values())) > PARAMETERS:
        raise ValueError(f"{total:,} parameters, most in {max(sizes, key=lambda n: sizes[n])}")
    torch.manual_seed(7)
    return built().float().train()


def batch_of(model: Any, seed: int) -> dict[str, Tensor]:
    """Returns eight rows for a model, with labels that count unevenly."""
    generator = torch.Generator().manual_seed(seed)
    config, main, head = model.config, model.main_input_name, type(model).__name__
    takes = inspect.signature(model.forward).parameters
    vocab = getattr(config.get_text_config(), "vocab_size", None) or VOCAB
    batch: dict[str, Tensor] = {}
    if main.startswith("pixel_values") or {"pixel_values", "input_ids"} <= takes.keys():
        images = _images(config, generator)
        frames: int = getattr(config, "frames_per_clip", 0) or getattr(config, "num_frames", 4)
        is_video = "VideoClassification" in head
        many = images[:, None].repeat(1, frames, 1, 1, 1) if is_video else images
        batch[main if main.startswith("pixel_values") else "pixel_values"] = many
    if main in ("input_values", "inputs") and "input_values" in takes:
        sizes = [x for n in ("max_length", "num_mel_bins") if (x := getattr(config, n, None))]
        sizes = sizes if len(sizes) > 1 else [2000]
        batch["input_values"] = torch.randn(ROWS, *sizes, generator=generator)
    if "input_ids" in takes:
        _write(model, batch, takes, generator)
    if "decoder_input_ids" not in batch and (config.is_encoder_decoder or "CTC" in head):
        batch["labels"] = _text(generator, vocab, 7)["labels"]
        if config.model_type in ALL_ROWS:
            batch["labels"][:, 0] = FIRST_TEXT
    batch |= _labels(config, head, batch, generator)
    if main == "input_features":
        batch |= _first(model, batch, _sounds(config, takes, generator))
    if "start_positions" in takes:
        start = torch.arange(ROWS) % CLASSES
        batch.pop("labels", None)
        batch |= {"start_positions": start, "end_positions": start + 2}
    return batch


def _write(
    model: Any, batch: dict[str, Tensor], takes: Mapping[str, Any], generator: torch.Generator
) -> None:
    """Puts texts into a batch, with what stands for images and sounds."""
    config = model.config
    vocab = getattr(config.get_text_config(), "vocab_size", None) or VOCAB
    text = _text(generator, vocab, TOKENS)
    batch |= {name: x for name, x in text.items() if name in {*takes, "labels"}}
    batch |= {n: x for name, x in text.items() if (n := f"qformer_{name}") in takes}
    if "bbox" in takes:
        corner = torch.randint(0, 20, (ROWS, TOKENS, 2), generator=generator)
        batch["bbox"] = torch.cat([corner, corner + 10], -1)
    if "pixel_values" in batch:
        _place(model, batch, "image", _pictures(model, batch["pixel_values"], takes))
    if "input_features" in takes:
        _place(model, batch, "audio", _sounds(config, takes, generator))
    elif "input_values" in takes:
        _place(model, batch, "audio", _waves(takes, generator))
    batch |= _codes(config, _text(generator, vocab, TOKENS))


def _codes(config: Any, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tokens and labels of models that take several at once; none for others."""
    decoder = config.get_text_config(decoder=True)
    number = getattr(decoder, "num_codebooks", getattr(decoder, "num_channels", 1))
    ids, labels = (text[n][..., None].repeat(1, 1, number) for n in ("input_ids", "labels"))
    music = {"input_ids": ids.mT, "labels": labels}
    return {
        "fsmt": {"decoder_input_ids": text["input_ids"], "labels": text["labels"]},
        "dia": {"decoder_input_ids": ids, "labels": labels.mT.contiguous()},
        "kyutai_speech_to_text": {"input_ids": torch.cat([ids, ids[..., :1]], -1)},
        "musicgen_decoder": music,
        "musicgen_melody_decoder": music,
    }.get(config.model_type, {})


def _labels(
    config: Any, head: str, batch: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Returns the labels of a classification, of whatever it is; none for other heads."""
    if "TokenClassification" in head:
        counts = batch["labels"] != IGNORED
        return {"labels": torch.where(counts, batch["labels"] % CLASSES, IGNORED)}
    if "Classification" in head:
        return {"labels": torch.arange(ROWS) % min(CLASSES, config.num_labels)}
    if "Segmentation" in head:
        shape = (ROWS, *batch["pixel_values"].shape[-2:])
        labels = torch.randint(0, config.num_labels, shape, generator=generator)
        labels[2:4] = _ignored(config)
        return {"labels": labels}
    return {}


def _ignored(config: Any) -> int:
    """Returns the label of what has no loss in a segmentation."""
    names = ("semantic_loss_ignore_index", "loss_ignore_index")
    return next((int(getattr(config, name)) for name in names if hasattr(config, name)), 255)


def _text(generator: torch.Generator, vocab: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(FIRST_TEXT, vocab, (ROWS, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -4:] = mask[3, -1:] = mask[5, -2:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[2:4] = labels[4, 3:] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _part(config: Any, *names: str) -> Any:
    """Returns the part of a configuration that has the first of these names, or all of it."""
    found = (getattr(config, name, None) for name in names)
    return next((part for part in found if hasattr(part, "model_type")), config)


def _images(config: Any, generator: torch.Generator) -> Tensor:
    vision = _part(config, "vision_config", "backbone_config", "encoder", "encoder_config")
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 32
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    return torch.randn(ROWS, channels, height, width, generator=generator)


def _sounds(
    config: Any, takes: Mapping[str, Any], generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """Yields inputs of sounds, in the shapes that models take."""
    audio = _part(config, "audio_config", "encoder_config", "encoder")
    names = ["num_mel_bins", "feature_size", "input_dim", "feature_projection_input_dim"]
    names += ["input_feat_per_channel", "audio_embed_dim"]
    bins = next((bins for name in names if (bins := getattr(audio, name, None))), 16)
    bins *= getattr(audio, "num_stacked_frames", 1)
    limit = getattr(audio, "max_source_positions", getattr(audio, "n_window", None))
    masks = [name for name in takes if re.search("features?_(attention_)?mask", name)]
    if not masks and "input_ids" not in takes:
        masks = ["attention_mask"]
    for frames in (2 * limit,) if limit else (64, 8 * TOKENS):
        sounds = torch.randn(ROWS, bins, frames, generator=generator)
        shapes = [sounds, sounds.mT.contiguous()]
        mask = torch.ones(ROWS, frames, dtype=torch.bool)
        lengths = torch.full((ROWS,), frames * getattr(audio, "hop_length", 1))
        more = {"chunk_sample_lengths": lengths} if "chunk_sample_lengths" in takes else {}
        for given in ([], masks) if "attention_mask" in masks else (masks, []):
            for shape in shapes if limit else shapes[::-1]:
                yield {"input_features": shape} | dict.fromkeys(given, mask) | more
        four = shapes[1].reshape(ROWS, frames // 4, -1)  # frames in one
        yield {"input_features": four, "attention_mask": mask[:, ::4]}


def _waves(takes: Mapping[str, Any], generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yields inputs of sounds that are not transformed."""
    masks = {"padding_mask": torch.ones(ROWS, 64, dtype=torch.bool)}
    for size in ((ROWS, 64), (ROWS, 1, 64)):
        values = {"input_values": torch.randn(size, generator=generator)}
        yield values | (masks if "padding_mask" in takes else {})


def _pictures(model: Any, images: Tensor, takes: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Yields inputs of images, in the shapes that models take."""
    config, (_, channels, size, _) = model.config, images.shape
    vision = getattr(config, "vision_config", config)
    patch, time_ = getattr(vision, "patch_size", 8), getattr(vision, "temporal_patch_size", 1)
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    side = size // patch
    first = torch.arange(TOKENS) < getattr(config, "latent_query_num", 0)
    grids = ("image_grid_thw", "grid_thws", "image_grid_hws")
    more = dict.fromkeys(grids, torch.tensor([[1, side, side]] * ROWS))
    more |= {"image_sizes": torch.full((ROWS, 2), size), "high_res_pixel_values": images}
    more |= {"image_attention_mask": torch.ones(ROWS, TOKENS, 1)}
    more |= {"image_embeds_position_mask": first.repeat(ROWS, 1)}
    more = {name: x for name, x in more.items() if name in takes}
    number = ROWS * side**2
    pixels = torch.linspace(-1, 1, number * channels * time_ * patch**2).sin()
    if more.keys() & {*grids}:
        for shape in ((-1,), (-1, patch, patch)):
            yield {"pixel_values": pixels.reshape(number, *shape)} | more
        merged = torch.linspace(-1, 1, 4 * number * channels * patch**2).sin()
        yield {"pixel_values": merged.reshape(-1, 2 * patch, 2 * patch, channels)} | more
    for copies in (0, 1, 2, 5):  # an image a sample, or one with its pieces
        many = images[:, None].repeat(1, copies, 1, 1, 1) if copies else images
        yield {"pixel_values": many} | more
        if "pixel_attention_mask" in takes and copies:
            mask = torch.ones(ROWS, copies, dtype=torch.bool)
            yield {"pixel_values": many, "pixel_attention_mask": mask} | more
    yield {"pixel_values": images}
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).repeat(ROWS, 1, 1)
    more |= {"image_position_ids": places, "spatial_shapes": torch.full((ROWS, 2), side)}
    more |= {"pixel_attention_mask": torch.ones(ROWS, side**2, dtype=torch.long)}
    more = {name: x for name, x in more.items() if name in takes}
    for rows in ((ROWS, side**2), (number,)):
        yield {"pixel_values": pixels.reshape(*rows, -1)} | more


def _first(
    model: Any, batch: Mapping[str, Tensor], choices: Iterable[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Returns the first of these inputs that a model takes beside a batch."""
    failed: Exception | None = None
    for choice in choices:
        try:
            with torch.no_grad():
                model(**{**batch, **choice})
            return choice
        except Exception as error:  # noqa: BLE001 - of transformers
            failed = failed or error
    raise failed or AssertionError


def _place(
    model: Any, batch: dict[str, Tensor], kind: str, choices: Iterable[dict[str, Tensor]]
) -> None:
    """Puts tokens of images or sounds into the texts, as many as the model makes of one."""
    config, base = model.config, model.base_model
    names = [f"{kind}_token_id", f"{kind}_token_index", *["video_token_id"] * (kind == "image")]
    places = [(config, name) for name in names]
    places += [(getattr(base, "vocabulary_mapping", None), names[0])]
    token = next((x for place in places if (x := getattr(*place, None)) is not None), None)
    if token is None:
        batch |= _first(model, batch, choices if kind == "image" else [{}, *choices])
        return
    names = [f"get_{kind}_features", "get_video_features"]
    find = next((x for n in names for at in (model, base) if (x := getattr(at, n, None))), None)

    def placed() -> Iterator[dict[str, Tensor]]:
        for choice in choices:
            try:
                numbers: Iterable[int] = [_tokens(find, config, {**batch, **choice}, choice)]
            except Exception:  # noqa: BLE001 - of transformers
                numbers = range(1, 65)
            for number in numbers:
                yield {**choice, **_with_tokens(model, batch, token, number)}

    batch |= _first(model, batch, placed())


def _tokens(find: Any, config: Any, batch: dict[str, Tensor], choice: dict[str, Tensor]) -> int:
    """Returns how many tokens an image or a sound is."""
    takes = inspect.signature(inspect.unwrap(find)).parameters
    with torch.no_grad():
        found = find(**{name: x for name, x in batch.items() if name in {*takes, *choice}})
    found = getattr(found, "pooler_output", found)
    values = found if isinstance(found, list | tuple) else [found]
    return int(sum(x.numel() for x in values) // config.get_text_config().hidden_size // ROWS)


def _with_tokens(
    model: Any, batch: dict[str, Tensor], token: int, number: int
) -> dict[str, Tensor]:
    """Returns texts that begin with so many tokens of an image or a sound."""
    images = torch.full((ROWS, number), token)
    takes = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    before = {"input_ids": images, "attention_mask": torch.ones_like(images)}
    before["labels"] = torch.full_like(images, IGNORED)
    types = [name for name in ("mm_token_type_ids", "token_type_ids") if name in takes][:1]
    before |= dict.fromkeys(types, torch.ones_like(images))
    after = dict.fromkeys(types, torch.zeros_like(batch["input_ids"])) | batch
    return {name: torch.cat([x, after[name]], 1) for name, x in before.items() if name in after}


@dataclass(frozen=True)
class Truth:
    """What one process has of a step.

    Attributes:
        batch: What a step is given.
        losses: Of the whole batch, and of its microbatches together.
        gradients: Of each, by name.
    """

    batch: dict[str, Tensor]
    losses: list[float]
    gradients: list[dict[str, Tensor | None]]


@functools.lru_cache(1)
def truth(kind: str, dtype: torch.dtype) -> Truth:
    """Runs one process."""
    model: Any = make(kind)
    model.eval()  # nothing is random in a look at images
    batch = batch_of(model, 1)
    batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
    model.to(dtype).train()
    losses, gradients = [], []
    rows = [part_of(batch, a) for a in range(0, ROWS, MICROBATCH)]
    weights = [counted(model, part) for part in rows]
    for parts, weighed in (([batch], [1.0]), (rows, [w / sum(weights) for w in weights])):
        total = 0.0
        model.zero_grad()
        for part, weight in zip(parts, weighed, strict=True):
            if not weight:
                continue
            loss = model(**part).loss
            if loss is None:
                raise ValueError(f"no loss of {[*batch]}")
            (loss * weight).sum().backward()
            total += loss.sum().item() * weight
        losses.append(total)
        gradients.append(
            {
                n: None if p.grad is None else p.grad.clone()
                for n, p in model.named_parameters(remove_duplicate=False)
            }
        )
    if not math.isfinite(losses[0]):
        raise ValueError(f"a loss of {losses[0]}")
    return Truth(batch, losses, gradients)


def part_of(batch: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
    """Returns the rows of a microbatch; a sample may have several rows of an image."""
    each = {name: len(x) // ROWS for name, x in batch.items()}
    last = first + MICROBATCH
    return {name: x[first * each[name] : last * each[name]] for name, x in batch.items()}


def counted(model: Any, part: dict[str, Tensor]) -> float:
    """Returns how many labels of a part have a loss."""
    labels = part.get("labels")
    head = type(model).__name__
    if labels is None or labels.dim() == 1 or "CTC" in head:
        return float(MICROBATCH)
    if "Segmentation" in head:
        return float((labels != _ignored(model.config)).sum())
    causal = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    shifts = not model.config.is_encoder_decoder and dict(types().values())[head] in causal
    shifts = shifts and labels.dim() == 2
    return float((labels[:, 1:] if shifts else labels).ne(IGNORED).sum())


def compare(
    kind: str, num_stages: int, schedule: str, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Cuts a family, takes a step, and compares it with one process; called on four ranks.

    Ranks that the pipeline does not need are replicas.

    Returns:
        The errors against one process with the batch and with its microbatches, with seconds and
        MiB of the cut. Or what went wrong: a sentence under ``made`` if transformers makes or runs
        no such model, ``refused`` if pipegrad refuses it, and otherwise ``died``.
    """
    try:
        true = truth(kind, dtype)
    except Exception as error:  # noqa: BLE001 - of transformers
        return {"made": sentence(error)}
    row: dict[str, Any] = {"where": "cut"}
    try:
        parts = _cut(kind, num_stages, true, row, dtype)
        row["where"] = "step"
        at = topology(num_stages)
        number = ROWS // MICROBATCH // at.size("dp")
        scheduler = pipegrad.Scheduler(parts, at, schedule=schedule, num_microbatches=number)
        given: Any = {name: share(x, at) for name, x in true.batch.items()}
        result = scheduler.step(**given)
        found = {
            name: parameter.grad
            for stage in scheduler.topology.local_stages
            for name, parameter in parts.modules[stage].named_parameters(remove_duplicate=False)
        }
        pairs = zip(true.losses, true.gradients, strict=True)
        row["errors"] = [worst(result.loss, found, *pair) for pair in pairs]
        scheduler.close()
    except PipegradError as error:
        row["refused"] = sentence(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a row
        row["died"] = sentence(error)
    return row


def check_chunks(kind: str, *, is_packed: bool = False) -> tuple[float, str]:
    """Returns the largest error of texts in chunks of time, in one process, and whose it is.

    Args:
        kind: A family with a head that predicts the next token.
        is_packed: Whether a row has two documents.

    Raises:
        PipegradError: If the cut or the step is refused.
    """
    model = make(kind)
    batch = batch_of(model, 1)
    rows, tokens = batch["input_ids"].shape
    if is_packed:
        del batch["attention_mask"]
        positions = torch.cat([torch.arange(7), torch.arange(tokens - 7)])
        batch["position_ids"] = positions.repeat(rows, 1)
    true = copy.deepcopy(model)
    wanted = true(**batch, use_cache=False).loss
    wanted.backward()
    loss = step(pipegrad.cut(model, 2, carry="cache"), batch, (5, 3, tokens - 8))
    found = {name: p.grad for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in true.named_parameters()}
    return worst(loss, found, wanted.item(), gradients)


def _cut(kind: str, num_stages: int, true: Truth, row: dict[str, Any], dtype: torch.dtype) -> Any:
    """Cuts a family; with an example, if it is not for texts or has to be."""
    plain = all(x.dim() < 3 and not x.is_floating_point() for x in true.batch.values())
    is_text = plain and types()[kind][1] in TEXTS and "example" not in row
    model = make(kind).to(dtype)
    example = None if is_text else part_of(true.batch, 0)
    row |= {} if is_text else {"example": 1}
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of memory
    before, began = _kib("VmRSS"), time.process_time()
    try:
        parts = pipegrad.cut(model, num_stages, example=example)
    except PipegradError as error:
        if is_text and "example={" in str(error):
            row["example"] = 1
            return _cut(kind, num_stages, true, row, dtype)
        raise
    row |= {"seconds": time.process_time() - began, "MiB": (_kib("VmHWM") - before) / 1024}
    return parts


def worst(
    loss: Tensor, found: Mapping[str, Any], true_loss: float, true: Mapping[str, Any]
) -> tuple[float, str]:
    """Returns the largest error, and whose it is: the loss's, or that of a gradient."""
    sizes = dict.fromkeys(true, 0.0)
    for name, gradient in true.items():
        if gradient is not None and gradient.numel():
            sizes[name] = gradient.abs().max().item()
    floor = FLOOR * max(sizes.values())
    errors = {"loss": abs(float(loss) - true_loss) / abs(true_loss)}
    for name, gradient in found.items():
        if gradient is None or gradient.numel():
            errors[name] = difference(gradient, true[name]) / max(sizes[name], floor)
    return max((math.inf if math.isnan(x) else x, name) for name, x in errors.items())


def _kib(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1])


def sentence(error: BaseException) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
