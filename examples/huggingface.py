"""A model of Hugging Face is accelerated, trained for a step, and given back as it was.

    python examples/huggingface.py

The model has random weights, so that nothing is downloaded.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cunorm.torch import accelerate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(DEVICE)
    tokens = torch.randint(256, (2, 16), device=DEVICE)
    before = model(tokens).logits
    keys = list(model.state_dict())

    accelerated = accelerate(model)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    print(accelerated)
    assert len(accelerated.norms.swapped) == 5
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-5)

    accelerated.undo()
    assert torch.equal(model(tokens).logits, before)
    print(f"loss {loss.item():.4f}; undone, the logits have the bits that they had")


if __name__ == "__main__":
    main()
