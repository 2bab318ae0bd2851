"""Small models of transformers, with random weights made from a config: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, **SPECIAL}


def _config(name: str) -> tuple[Any, Any]:
    t = transformers
    small = {**SMALL, "vocab_size": 96}
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
    vit = {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10}
    whisper = {"vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
    whisper |= {f"{half}_attention_heads": 4 for half in ("encoder", "decoder")} | SPECIAL
    whisper |= {f"{half}_ffn_dim": 128 for half in ("encoder", "decoder")} | {"max_source_positions": 12}
    t5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    t5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    mamba2 = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8}
    mamba2 |= {"num_hidden_layers": 2, "vocab_size": 96, **SPECIAL}
    return {
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(**gpt2)),
        "bert": (t.BertForMaskedLM, t.BertConfig(**small)),
        "vit": (t.ViTForImageClassification, t.ViTConfig(**vit)),
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**TEXT)),
        "mistral": (t.MistralForCausalLM, t.MistralConfig(**TEXT)),
        "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config(**TEXT)),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config(**TEXT)),
        "gemma": (t.GemmaForCausalLM, t.GemmaConfig(**TEXT)),
        "gemma2": (t.Gemma2ForCausalLM, t.Gemma2Config(**TEXT)),
        "gemma3": (t.Gemma3ForCausalLM, t.Gemma3TextConfig(**TEXT)),
        "olmo2": (t.Olmo2ForCausalLM, t.Olmo2Config(**TEXT)),
        "whisper": (t.WhisperForConditionalGeneration, t.WhisperConfig(**whisper)),
        "mamba2": (t.Mamba2ForCausalLM, t.Mamba2Config(**mamba2)),
        "t5": (t.T5ForConditionalGeneration, t.T5Config(**t5)),
    }[name]


def build(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, dict]:
    """Return a model without dropout, whose norms have weights that are not 1, and inputs for it."""
    torch.manual_seed(0)
    cls, config = _config(name)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    if name == "vit":
        inputs = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}
    else:
        ids = torch.randint(3, 96, (4, 24))
        inputs = {"input_ids": ids, "labels": ids.roll(1, 1)}
        if name == "whisper":
            inputs = {"input_features": torch.randn(4, 8, 24), "labels": inputs["labels"]}
        if name in ("t5", "whisper"):
            inputs["decoder_input_ids"] = ids.roll(2, 1)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    return model.to(device, dtype), inputs


def loss_of(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, logits)."""
    dtype = next(model.parameters()).dtype
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten()), logits


def loss_and_gradients(model: torch.nn.Module, inputs: dict) -> dict[str, Any]:
    model.zero_grad()
    loss, logits = loss_of(model, inputs)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}
