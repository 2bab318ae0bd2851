"""The table of docs/models.md: small models with random weights, made of the installed transformers and accelerated."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers

from cunorm.torch import accelerate

# What makes a model small, by whatever names its config has for it.
WIDTH = ("hidden_size", "d_model", "n_embd", "embedding_size")
SMALL = {
    **dict.fromkeys(WIDTH, 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "d_kv": 16,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "image_size": 32,
    "patch_size": 8,
}
OWN: dict[str, dict[str, int]] = {
    "deepseek_v3": {"qk_rope_head_dim": 16, "num_key_value_heads": 4},
    "gptj": {"rotary_dim": 16},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 8, "state_size": 16},
}
# By the class that makes the model: model types of transformers.
TRIED = {
    "AutoModelForCausalLM": "bloom cohere2 deepseek_v3 ernie4_5 exaone4 falcon falcon_mamba gemma gemma2 gemma3_text "
    "glm4 gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite helium hunyuan_v1_dense jetmoe llama llama4_text "
    "mamba mamba2 minimax ministral mistral mixtral mpt nemotron olmo olmo2 olmo3 opt persimmon phi "
    "phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2 xglm",
    "AutoModelForMaskedLM": "albert bert deberta-v2 distilbert electra modernbert mpnet roberta xlm-roberta",
    "AutoModelForSeq2SeqLM": "bart m2m_100 marian mbart pegasus t5",
    "AutoModelForImageClassification": "beit deit dinov2 vit",
}


class Trial(NamedTuple):
    name: str
    replaced: int
    left: dict[str, str]  # why, by the name of the module
    difference: float  # the largest of a result, after from before


def made(factory: str, name: str) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(name)
    for option, value in {**SMALL, **OWN.get(name, {})}.items():
        if hasattr(config, option) and not isinstance(getattr(type(config), option, None), property):
            setattr(config, option, value)
    torch.manual_seed(0)
    config.architectures = []  # it is asked for by types with several classes
    return getattr(transformers, factory).from_config(config).eval()


def inputs_of(factory: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    if factory == "AutoModelForImageClassification":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    ids = torch.randint(3, 96, (2, 12), generator=generator)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if factory == "AutoModelForSeq2SeqLM" else {})


@torch.no_grad()
def trials() -> Iterator[Trial]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # small products are slower on several
    for factory, names in TRIED.items():
        for name in names.split():
            model, inputs = made(factory, name), inputs_of(factory)
            before = model(**inputs).logits
            norms = accelerate(model).norms
            difference = (model(**inputs).logits - before).abs().max().item()
            yield Trial(name, len(norms.swapped), norms.left, difference)


def models() -> str:
    found = list(trials())
    wrong = [trial.name for trial in found if not trial.difference < 1e-5]
    assert not wrong, wrong
    whole = sorted(trial.name for trial in found if trial.replaced and not trial.left)
    rows = [
        f"| `{trial.name}` | {trial.replaced} | {len(trial.left)} | {'; '.join(sorted(set(trial.left.values())))} |"
        for trial in sorted(found)
        if trial.left or not trial.replaced
    ]
    return (
        f"Of transformers {transformers.__version__}, a small model of each type with random weights was made and\n"
        "accelerated; its results stayed the same to 1e-5. Every norm is replaced in these types:\n\n"
        + textwrap.fill(", ".join(f"`{name}`" for name in whole), 120)
        + ".\n\n| type | replaced | left | why |\n|---|---|---|---|\n"
        + "\n".join(rows)
    )


if __name__ == "__main__":
    print(models())
