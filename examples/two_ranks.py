"""LayerNormLinear over two ranks: each has half of the rows and half of the features.

    torchrun --nproc-per-node 2 examples/two_ranks.py

With two GPUs it uses them and NCCL, else the CPU and gloo.
"""

# torchrun --nproc-per-node 2 examples/two_ranks.py
import os

import torch
import torch.distributed as dist

from cunorm.torch import LayerNormLinear

ROWS, WIDTH, FEATURES = 8, 32, 48


def main():
    on_gpus = torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # so that every rank has the same numbers
    x = torch.randn(ranks * ROWS, WIDTH, device=device)
    weight, bias = torch.randn(FEATURES, WIDTH, device=device), torch.randn(FEATURES, device=device)
    linear = LayerNormLinear(
        WIDTH,
        FEATURES,
        parallel_mode="column",
        sequence_parallel=True,
        tp_group=dist.group.WORLD,
        ub_overlap_ag=True,
        device=device,
    )
    with torch.no_grad():
        linear.weight.copy_(weight.chunk(ranks)[rank])
        linear.bias.copy_(bias.chunk(ranks)[rank])

    mine = x.chunk(ranks)[rank].clone().requires_grad_()
    y = linear(mine)  # all rows, this rank's features
    y.square().sum().backward()

    alone = x.clone().requires_grad_()  # computes the same on one rank
    whole = torch.nn.functional.linear(torch.nn.functional.layer_norm(alone, (WIDTH,)), weight, bias)
    whole.square().sum().backward()
    torch.testing.assert_close(y, whole.chunk(ranks, dim=1)[rank], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.grad, alone.grad.chunk(ranks)[rank], rtol=1e-3, atol=1e-3)
    print(f"rank {rank} of {ranks} on {device}: y {tuple(y.shape)} and the gradient of x are those of one rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
