"""Compare training with FP8 and without: `python -m bench.fp8_training`, on a GPU, or by emulation on the CPU.

A small GPT learns the bytes of Python's own library, once without FP8 and once by each recipe, from the same weights
and with the same batches. The head is without FP8, as is usual: rounded logits are noise in the gradient of the
softmax, and sums over tokens keep little else. Shown are the mean loss of the last sixth of the steps, and the lowest
cosine between a parameter's gradient in FP8 and without it, at the same weights on the same batch, at the first step
and half-way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from cunorm.torch import Float8CurrentScaling, LayerNormLinear, RowwiseScaling, autocast

RECIPES = {
    "RowwiseScaling": RowwiseScaling(),
    "RowwiseScaling, high_precision_wgrad": RowwiseScaling(high_precision_wgrad=True),
    "Float8CurrentScaling": Float8CurrentScaling(),
}
# The loss may be off by LOSS of that without FP8, and cosines must be at least COSINE. A mistake is beyond: a weight
# cached with the scale of another costs 2.9%.
LOSS = 0.005
COSINE = {"RowwiseScaling": 0.998, "RowwiseScaling, high_precision_wgrad": 0.998, "Float8CurrentScaling": 0.995}


class Size(NamedTuple):
    layers: int = 3
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 16


class Block(nn.Module):
    def __init__(self, size: Size, device: Any):
        super().__init__()
        self.heads = size.heads
        self.qkv = LayerNormLinear(size.width, 3 * size.width, device=device)
        self.out = nn.Linear(size.width, size.width, device=device)
        self.up = LayerNormLinear(size.width, 4 * size.width, device=device)
        self.down = nn.Linear(4 * size.width, size.width, device=device)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    """A GPT that returns the loss of bytes (batch, tokens + 1)."""

    def __init__(self, size: Size, device: Any):
        super().__init__()
        self.tokens = nn.Embedding(256, size.width, device=device)
        self.positions = nn.Embedding(size.context, size.width, device=device)
        self.blocks = nn.ModuleList(Block(size, device) for _ in range(size.layers))
        self.head = LayerNormLinear(size.width, 256, device=device)

    def forward(self, data: Tensor) -> Tensor:
        read, wanted = data[:, :-1], data[:, 1:]
        x = self.tokens(read) + self.positions.weight[: read.shape[1]]
        for block in self.blocks:
            x = block(x)
        with autocast(enabled=False):
            logits = self.head(x)
        return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())


class Run(NamedTuple):
    losses: list[float]
    cosines: dict[int, float]  # the lowest of all parameters, by the step


def corpus(most: int = 1 << 21) -> Tensor:
    """Return the bytes of the modules of Python's library, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:most]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def train(
    recipe: Any, steps: int, size: Size, device: str, half: bool, compared: Sequence[int] = (), seed: int = 0
) -> Run:
    """Train for some steps, with `half` under torch's autocast to bfloat16; compare gradients at steps `compared`."""
    torch.manual_seed(seed)
    model = Gpt(size, "cpu").to(device)
    text = corpus()
    chosen = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def gradients(data: Tensor, recipe: Any) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast(device, torch.bfloat16, enabled=half), autocast(recipe is not None, recipe=recipe):
            loss = model(data)
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    losses, cosines = [], {}
    for step in range(1, steps + 1):
        start = torch.randint(len(text) - size.context - 1, (size.batch,), generator=chosen)
        data = torch.stack([text[at : at + size.context + 1] for at in start.tolist()]).long().to(device)
        loss, computed = gradients(data, recipe)
        if step in compared:
            without = gradients(data, None)[1]
            cosines[step] = min(cosine(a, b) for a, b in zip(computed, without, strict=True))
        for parameter, gradient in zip(model.parameters(), computed, strict=True):
            parameter.grad = gradient
        optimiser.step()
        losses.append(loss)
    return Run([float(loss) for loss in losses], cosines)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def last(run: Run) -> float:
    """Return the mean loss of the last sixth of the steps."""
    return statistics.mean(run.losses[-max(1, len(run.losses) // 6) :])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fp8_training", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for a line of JSON by recipe")
    chosen = parser.parse_args(arguments)
    compared = (1, max(1, chosen.steps // 2))
    options = (chosen.steps, Size(), chosen.device, True)
    plain = train(None, *options, seed=chosen.seed)
    print(f"{'':<40}{'loss':>8}{'to bf16':>10}" + "".join(f"{f'step {step}':>10}" for step in compared))
    print(f"{'bfloat16':<40}{last(plain):>8.4f}")
    within, lines = True, [{"recipe": None, "steps": chosen.steps, "loss": last(plain)}]
    for name, recipe in RECIPES.items():
        run = train(recipe, *options, compared, chosen.seed)
        off = last(run) / last(plain) - 1
        print(f"{name:<40}{last(run):>8.4f}{off:>+10.2%}" + "".join(f"{run.cosines[step]:>10.4f}" for step in compared))
        lines.append({"recipe": name, "loss": last(run), "to bfloat16": off, "cosines": run.cosines})
        within &= abs(off) <= LOSS and min(run.cosines.values()) >= COSINE[name]
    if chosen.out:
        chosen.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(
        "within the bounds" if within else f"BEYOND the bounds: loss {LOSS:.1%}, cosines {sorted(set(COSINE.values()))}"
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
