"""The norm of a DiT block is an expression of one's own: gate, residual, norm and modulation are one kernel.

python examples/dit_block.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import cunorm
import cunorm.torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# s = residual + gate * x is the stream; y = norm(s) * (1 + scale) + shift is what the next sublayer reads.
gate_add_norm_modulate = cunorm.fuse(
    "layer_norm",
    prologue=lambda x, residual, gate: residual + gate * x,
    epilogue=lambda xhat, scale, shift: xhat * (1 + scale) + shift,
    returns=("y", "s"),
)


class DiTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.condition = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, y):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x, condition):
        parts = self.condition(F.silu(condition)).unsqueeze(1).chunk(6, -1)  # views: nothing is copied
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = parts
        y = cunorm.torch.layer_norm_modulate(x, scale, shift)
        y, x = gate_add_norm_modulate(
            self.attention(y), residual=x, gate=gate, scale=scale_mlp, shift=shift_mlp, eps=1e-5
        )
        return x + gate_mlp * self.mlp(y)

    def forward_by_torch(self, x, condition):
        parts = self.condition(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = parts
        width = x.shape[-1:]
        x = x + gate * self.attention(F.layer_norm(x, width) * (1 + scale) + shift)
        return x + gate_mlp * self.mlp(F.layer_norm(x, width) * (1 + scale_mlp) + shift_mlp)


def main():
    torch.manual_seed(0)
    block = DiTBlock(64, 4).to(DEVICE)
    x, condition = torch.randn(2, 16, 64, device=DEVICE), torch.randn(2, 64, device=DEVICE)
    gradients = []
    for forward in (block.forward, block.forward_by_torch):
        block.zero_grad()
        forward(x, condition).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in block.parameters()])
    for ours, torchs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    print("the gradients of all parameters are those of separate operations")


if __name__ == "__main__":
    main()
