"""The program of each rank in test_torch_linear_parallel: python parallel_linear.py RANK SIZE FILE DEVICE."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from unittest import mock

import colwise
import parallel_overlaps
import parallel_rules
import torch
import torch.distributed as dist
from parallel_cases import GROUPS, against_one_process
from parallel_mistakes import MISTAKES
from rank_pool import serve

CHECKS = parallel_overlaps.CHECKS | parallel_rules.CHECKS | colwise.CHECKS  # for two ranks, on any device
OTHERS = parallel_overlaps.ON_GPUS | colwise.ON_FOUR | {"dead": parallel_rules.beside_a_dead_rank}


def answer(ranks: int, kind: str, name: str) -> None:
    """Run a case or a check, or put in a mistake and run the case or check that must fail under it."""
    if kind == "mistake":
        owner, attribute, wrong, name = MISTAKES[name]
        with mock.patch.object(owner, attribute, wrong):
            return answer(ranks, "check" if name in CHECKS else "case", name)
    run = (CHECKS | OTHERS)[name] if kind == "check" else lambda *where: against_one_process(name, *where)
    return run(GROUPS[ranks], sys.argv[4])


def main(rank: int, size: int, file: str, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=60)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size, timeout=timeout)
    GROUPS[size] = dist.group.WORLD
    GROUPS[1] = dist.new_group([0], timeout=timeout)
    if size != 2:
        GROUPS[2] = dist.new_group([0, 1], timeout=timeout)
    parallel_overlaps.SPARE.extend(dist.new_group([0, 1], timeout=timeout) for _ in range(3))
    serve(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    os._exit(0)  # at once: a thread of gloo may outlive torch and abort the process
