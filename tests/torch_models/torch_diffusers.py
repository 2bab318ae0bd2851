"""Small models of diffusers, with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
PATCHES = {**HEADS, "sample_size": 8, "patch_size": 2}
TEXT = {"joint_attention_dim": 24, "pooled_projection_dim": 20}


def _sd3(**options: Any) -> torch.nn.Module:
    options |= {"caption_projection_dim": 32, "pos_embed_max_size": 8, "qk_norm": "rms_norm"}
    return diffusers.SD3Transformer2DModel(**PATCHES, **TEXT, **options)


def _pixart() -> torch.nn.Module:
    options = {"cross_attention_dim": 32, "caption_channels": 24, "norm_num_groups": 4}
    return diffusers.PixArtTransformer2DModel(**PATCHES, **options, use_additional_conditions=False)


def build(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, dict]:
    """Return a model and inputs for it."""
    torch.manual_seed(0)
    times = torch.tensor([3, 500])
    picture, text, pooled = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 24), torch.randn(2, 20)
    spoken = {"encoder_hidden_states": text, "timestep": times}
    if name == "dit":
        model = diffusers.DiTTransformer2DModel(**PATCHES, num_embeds_ada_norm=10, norm_num_groups=4)
        inputs = {"hidden_states": picture, "timestep": times, "class_labels": torch.tensor([1, 2])}
    elif name == "pixart":
        model, inputs = _pixart(), {"hidden_states": picture, **spoken}
    elif name in ("sd3", "sd3.5"):
        model = _sd3(dual_attention_layers=(0,) if name == "sd3.5" else ())
        inputs = {"hidden_states": picture, "pooled_projections": pooled, **spoken}
    else:
        model = diffusers.FluxTransformer2DModel(
            patch_size=1, num_single_layers=2, axes_dims_rope=(4, 4, 8), **HEADS, **TEXT
        )
        inputs = {"hidden_states": torch.randn(2, 16, 4), "pooled_projections": pooled, **spoken}
        inputs |= {"timestep": times / 1000, "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
    with torch.no_grad():
        for parameter in model.parameters():  # some begin as zeros, with which their layers would compute nothing
            parameter.normal_(std=0.15)
    return model.eval().to(device, dtype), {name: value.to(device) for name, value in inputs.items()}


def output_of(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    floating = {name: value.to(dtype) for name, value in inputs.items() if value.is_floating_point()}
    return model(**inputs | floating, return_dict=False)[0]
