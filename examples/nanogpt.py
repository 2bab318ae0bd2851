"""A small GPT learns a text, with a residual and a norm in one kernel, and prints the curve of its loss.

    python examples/nanogpt.py [FILE.txt]

If there is a GPU, it runs there, and for longer.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from cunorm.torch import AddLayerNorm, LayerNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, WIDTH, LAYERS, CONTEXT, BATCH = (2000, 384, 6, 256, 64) if DEVICE == "cuda" else (60, 64, 2, 32, 16)


class Block(nn.Module):
    """A block takes what is to be added to the residual stream, and the stream, and returns the same two."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = AddLayerNorm(WIDTH), AddLayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, stream):
        y, stream = self.before_attention(x, stream)  # stream + x, and its norm: one kernel
        q, k, v = (part.unflatten(-1, (-1, 32)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        x = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, stream = self.before_mlp(x, stream)
        return self.mlp(y), stream


class GPT(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, tokens):
        stream = self.letter(tokens)
        x = self.place.weight[: tokens.shape[1]].expand_as(stream)
        for block in self.blocks:
            x, stream = block(x, stream)
        return self.head(self.norm(stream + x))


def main():
    torch.manual_seed(0)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "LICENSE"
    text = path.read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text], device=DEVICE)
    model = GPT(len(letters)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(STEPS):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1), device=DEVICE)
        tokens = data[starts + torch.arange(CONTEXT + 1, device=DEVICE)]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % (STEPS // 20) == 0:
            print(f"{step:5} {losses[-1]:.3f} {'*' * round(12 * losses[-1])}")
    assert losses[-1] < 0.75 * losses[0]


if __name__ == "__main__":
    main()
