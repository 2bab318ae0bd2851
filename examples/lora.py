"""An accelerated model is trained and merged with LoRA by PEFT, and compared with the one that was not accelerated.

pip install peft && python examples/lora.py
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cunorm.torch import accelerate

try:
    from peft import LoraConfig, get_peft_model
except ImportError:
    get_peft_model = None

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tuned(model, tokens):
    """Return the losses of ten steps, and the model with LoRA merged into it."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-2)
    losses = []
    for _ in range(10):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.merge_and_unload()


def main():
    if get_peft_model is None:
        print("peft is not installed: pip install peft")
        return
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    plain = LlamaForCausalLM(config).to(DEVICE)
    ours = copy.deepcopy(plain)
    print(accelerate(ours))
    tokens = torch.randint(256, (4, 16), device=DEVICE)
    (losses, plain), (losses_of_ours, ours) = tuned(plain, tokens), tuned(ours, tokens)
    for step, pair in enumerate(zip(losses, losses_of_ours, strict=True)):
        print(f"step {step}: loss {pair[0]:.5f}, accelerated {pair[1]:.5f}")
    assert losses[-1] < losses[0]
    torch.testing.assert_close(ours(tokens).logits, plain(tokens).logits, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
