"""A small network is trained twice on the same data, in FP8 and in bfloat16, and both losses are shown.

    python examples/fp8_training.py [FILE.svg]

The file gets a plot of both losses; it needs matplotlib. Without a GPU of compute capability 8.9 the products are
emulated with the same bytes.
"""

import copy
import sys

import torch
from torch import nn

from cunorm.torch import LayerNormLinear, RowwiseScaling, autocast, is_fp8_available

DEVICE = "cuda" if is_fp8_available() else "cpu"
STEPS, WIDTH, ROWS = 40, 64, 128


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"params_dtype": torch.bfloat16, "device": DEVICE}
        self.up = nn.ModuleList(LayerNormLinear(WIDTH, 2 * WIDTH, **options) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x


def losses(network, fp8):
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    values = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        wanted = torch.tanh(x @ mixing).to(DEVICE)
        with autocast(enabled=fp8, recipe=RowwiseScaling()):
            y = network(x.to(DEVICE, torch.bfloat16))
        loss = (y.float() - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def plot(curves, file):
    try:
        from matplotlib import pyplot
    except ImportError:
        print(f"{file} is not written: pip install matplotlib")
        return
    figure, axes = pyplot.subplots(layout="constrained")
    for name, values in curves.items():
        axes.plot(values, label=name)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(file)
    print(f"{file} is written")


def main():
    torch.manual_seed(0)
    network = Network()
    in_fp8, in_bf16 = losses(copy.deepcopy(network), True), losses(network, False)
    for step in range(0, STEPS, 5):
        print(f"step {step:3}: FP8 {in_fp8[step]:.4f}, bfloat16 {in_bf16[step]:.4f}")
    print(f"on {DEVICE}; the last losses differ by {abs(in_fp8[-1] / in_bf16[-1] - 1):.1%}")
    if len(sys.argv) > 1:
        plot({"FP8": in_fp8, "bfloat16": in_bf16}, sys.argv[1])
    assert in_fp8[-1] < 0.5 * in_fp8[0]
    assert in_fp8[-1] < 1.2 * in_bf16[-1]


if __name__ == "__main__":
    main()
