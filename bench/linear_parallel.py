"""Time LayerNormLinear over the GPUs of a host, by parts: `python -m bench.linear_parallel [--ranks 2] [--out FILE]`.

    links      pulls of rows through symmetric memory, one way and both ways, NCCL's gather and scatter, and a signal
    products   the product of all rows, at once or in parts, and while a pull or a gather of NCCL's runs beside it
    layers     forward and backward passes with NCCL, with each ub_* flag, with torch's fused_all_gather_matmul, and
               TransformerEngine's layer over NCCL, where it is installed
    memory     bytes that a layer holds between its two passes besides x and y, on the rank with most

It starts a process for each GPU. Contenders are timed in turns, and each shape has a line of JSON with medians in
microseconds, on the slower rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

PARTS = ("links", "products", "layers", "memory")
WHOLE = ((8192, 4096, 12288), (8192, 8192, 10240))  # rows, in, out on all ranks together
FEWER = tuple((rows, 4096, 12288) for rows in (128, 512, 1024, 2048, 4096))
SIZES = (1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20)  # bytes that a rank receives
TURNS = 9
SECONDS = 0.012  # a contender's turn takes about this long

Call = Callable[[], Any]


def slower(times_of_ranks: list[dict[str, float]]) -> dict[str, float]:
    """Return each contender's time on the rank where it takes longest."""
    return {name: max(times[name] for times in times_of_ranks) for name in times_of_ranks[0]}


def of_ranks(own: dict[str, float]) -> list[dict[str, float]]:
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def limit(parts: Mapping[str, float], norm: str, product: str, exchange: str) -> float:
    """Return norm + 1.05 x max(product, exchange), the limit of a pass that hides one under the other."""
    return round(parts[norm] + 1.05 * max(parts[product], parts[exchange]), 1)


def measured(calls: Mapping[str, Call]) -> dict[str, Any]:
    """Return each call's microseconds on the slower rank, of several in a row, so that the host can run ahead."""
    import torch
    import torch.distributed as dist

    def seconds(call: Call, count: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e-3 / count

    counts, failed = {}, {}
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
        except (NotImplementedError, RuntimeError) as error:  # torch lacks an operator, on every rank alike
            failed[name] = str(error)[:200]
            continue
        slowest = torch.tensor([seconds(call, 3)], device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # so that every rank makes as many calls
        counts[name] = max(3, min(50, int(SECONDS / slowest.item())))
    times: dict[str, list[float]] = {name: [] for name in counts}
    for turn in range(TURNS):
        for name in list(counts)[:: 1 if turn % 2 else -1]:
            times[name].append(seconds(calls[name], counts[name]))
    own = {name: round(statistics.median(taken) * 1e6, 1) for name, taken in times.items()}
    return slower(of_ranks(own)) | failed


class Bench:
    """The measurements of a rank; each part is a method that yields lines to print."""

    def __init__(self, rank: int, ranks: int):
        import torch
        import torch.distributed as dist

        from cunorm.torch.linear import symmetric

        self.torch, self.dist, self.symmetric = torch, dist, symmetric
        self.rank, self.ranks = rank, ranks
        self.group, self.device = dist.group.WORLD, torch.device("cuda", rank)
        self.reason = symmetric.why_not(self.group, self.device)

    def _bytes(self, size: int) -> Any:
        return self.torch.empty(size, dtype=self.torch.uint8, device=self.device)

    def _random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16) * 0.5

    def links(self):
        torch, dist, symmetric = self.torch, self.dist, self.symmetric
        yield {"part": "links", "why not symmetric memory": self.reason, "GPU": torch.cuda.get_device_name()}
        exchange = symmetric.exchange(self.group, self.device)
        for size in SIZES:
            calls: dict[str, Call] = {}
            whole, own = self._bytes(self.ranks * size), self._bytes(size)
            calls["NCCL gather"] = lambda whole=whole, own=own: dist.all_gather_into_tensor(whole, own)
            wide, narrow = whole.view(torch.bfloat16), own.view(torch.bfloat16)
            calls["NCCL scatter of sums"] = lambda a=narrow, b=wide: dist.reduce_scatter_tensor(a, b)
            if exchange is not None:
                buffer = symmetric.Buffer(self.group, self.device)
                views = buffer.of_ranks((self.ranks * size // 1024, 1024), torch.uint8)
                source, target = views[(self.rank + 1) % self.ranks], whole.view(-1, 1024)
                rows = slice(0, size // 1024)
                calls["pull, both ways"] = lambda a=target, b=source, rows=rows: a[rows].copy_(b[rows])
                if self.rank == 0:
                    calls["pull, one way"] = calls["pull, both ways"]
                else:
                    calls["pull, one way"] = lambda: None
                calls["symmetric gather"] = lambda size=size: self._gather(exchange, size)
                if size == SIZES[0]:
                    calls["signal there and back"] = lambda memory=buffer.memory: self._signals(memory)
            times = measured(calls)
            rates = {
                f"{name}, GB/s": round(size / time * 1e-3, 1) for name, time in times.items() if "signal" not in name
            }
            yield {"part": "links", "bytes": size, **times, **rates}

    def _signals(self, memory: Any) -> None:
        other = (self.rank + 1) % self.ranks
        memory.put_signal(other, 0, 20000)
        memory.wait_signal((self.rank - 1) % self.ranks, 0, 20000)

    def _gather(self, exchange: Any, size: int) -> None:
        gathering = exchange.gathering(size // 1024, 1024, self._bytes(0), self.torch.uint8)
        gathering.start()
        gathering.whole()

    def products(self):
        torch, dist, symmetric = self.torch, self.dist, self.symmetric
        exchange = symmetric.exchange(self.group, self.device)
        for rows, cols, outs in WHOLE:
            z, weight, bias = (
                self._random(rows, cols),
                self._random(outs // self.ranks, cols),
                self._random(outs // self.ranks),
            )
            y, own = torch.empty(rows, len(weight), device=self.device, dtype=z.dtype), z[: rows // self.ranks].clone()
            parts = list(zip(z.chunk(self.ranks), y.chunk(self.ranks), strict=True))
            gathered, side = torch.empty_like(z), torch.cuda.Stream()

            def whole(z=z, weight=weight, bias=bias, y=y):
                torch.addmm(bias, z, weight.t(), out=y)

            def in_parts(parts=parts, weight=weight, bias=bias):
                for z, y in parts:
                    torch.addmm(bias, z, weight.t(), out=y)

            def beside(other: Call, product: Call = whole, side=side) -> None:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    other()
                product()
                torch.cuda.current_stream().wait_stream(side)

            def gather(gathered=gathered, own=own):
                dist.all_gather_into_tensor(gathered, own)

            calls: dict[str, Call] = {"product": whole, "product in parts": in_parts, "NCCL gather": gather}
            calls["product beside NCCL"] = lambda gather=gather, beside=beside: beside(gather)
            if exchange is not None:
                buffer = symmetric.Buffer(self.group, self.device)  # must outlive its views
                views = buffer.of_ranks((rows, cols), z.dtype)
                count = rows // self.ranks
                source, target = views[(self.rank + 1) % self.ranks][:count], gathered[:count]

                def pull(target=target, source=source):
                    target.copy_(source)

                calls["pull"] = pull
                calls["product beside a pull"] = lambda pull=pull, beside=beside: beside(pull)
                calls["product in parts beside a pull"] = lambda pull=pull, beside=beside, product=in_parts: beside(
                    pull, product
                )
            times = measured(calls)
            whole()
            expected = y.clone()
            in_parts()
            equal = bool(torch.equal(expected, y))
            dy, terms = self._random(rows, len(weight)), torch.empty_like(z)
            torch.mm(dy, weight, out=terms)
            expected = terms.clone()
            for part, out in zip(dy.chunk(self.ranks), terms.chunk(self.ranks), strict=True):
                torch.mm(part, weight, out=out)
            bits = {"rows' bits in parts": equal, "of dz too": bool(torch.equal(expected, terms))}
            yield {"part": "products", "rows": rows, "in": cols, "out": outs, **times, **bits}

    def layers(self):
        self.symmetric.worth = lambda *_, **__: True  # overlap everything: `worth` follows from these measurements
        for shape in (*WHOLE, *FEWER):
            yield {"part": "layers", **dict(zip(("rows", "in", "out"), shape, strict=True)), **self._layer(*shape)}

    def _layer(self, rows: int, cols: int, outs: int) -> dict[str, Any]:
        torch, dist = self.torch, self.dist
        from cunorm.torch import LayerNormLinear, layer_norm

        kinds = {
            "NCCL": {},
            "ub_overlap_ag": {"ub_overlap_ag": True},
            "bulk": {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True},
            "ub_overlap_rs_dgrad": {"ub_overlap_rs_dgrad": True},
        }
        modules = {name: LayerNormLinear(cols, outs, **self._options, **flags) for name, flags in kinds.items()}
        first = modules["NCCL"]
        for module in modules.values():
            module.load_state_dict(first.state_dict())
        x, dy = self._random(rows // self.ranks, cols).requires_grad_(), self._random(rows, outs // self.ranks)
        weight, bias = first.weight.detach(), first.bias.detach()
        norm = [t.detach() for t in (first.layer_norm_weight, first.layer_norm_bias)]
        z, part = self._random(rows, cols), self._random(rows // self.ranks, cols)
        y, terms, dweight = dy.clone(), z.clone(), torch.empty_like(weight)
        calls: dict[str, Call] = {
            "norm": lambda: layer_norm(x.detach(), (cols,), *norm),
            "product": lambda: torch.addmm(bias, z, weight.t(), out=y),
            "NCCL gather": lambda: dist.all_gather_into_tensor(z, part),
            "NCCL scatter of sums": lambda: dist.reduce_scatter_tensor(part, terms),
            "two products of backward": lambda: (torch.mm(dy, weight, out=terms), torch.mm(dy.t(), z, out=dweight)),
        }
        leaves = {}
        for name in ("NCCL", "ub_overlap_ag"):
            calls[f"forward, {name}"] = lambda module=modules[name]: self._forward(module, x)
        if self.reason is None:
            calls["forward, torch's fused_all_gather_matmul"] = lambda: self._fused(x, norm, weight, bias)
        for name in ("NCCL", "bulk", "ub_overlap_rs_dgrad"):
            module = modules[name]
            leaves[name] = (module(x), [x, *module.parameters()])
            calls[f"backward, {name}"] = lambda pair=leaves[name]: torch.autograd.grad(*pair, dy, retain_graph=True)
        overlapped = LayerNormLinear(cols, outs, **self._options, **kinds["ub_overlap_ag"], **kinds["bulk"])
        for name, module in {"NCCL": first, "all flags": overlapped, **self._of_transformer_engine(cols, outs)}.items():
            if name not in modules:
                calls[f"forward, {name}"] = lambda module=module: self._forward(module, x)
            calls[f"forward and backward, {name}"] = lambda module=module: torch.autograd.grad(
                module(x), [x, *module.parameters()], dy
            )
        plain, other = (self._forward(modules[name], x) for name in ("NCCL", "ub_overlap_ag"))
        off = (plain.float() - other.float()).norm() / plain.float().norm()
        gradients = {name: calls[f"backward, {name}"]() for name in leaves}
        equal = all(map(torch.equal, gradients["NCCL"], gradients["bulk"]))
        times = measured(calls)
        limits = {"bar of forward": limit(times, "norm", "product", "NCCL gather")}
        return {**times, **limits, "forward off by": float(off), "bulk equal": equal}

    def _of_transformer_engine(self, cols: int, outs: int) -> dict[str, Any]:
        try:
            import transformer_engine.pytorch as te
        except (ImportError, OSError):
            return {}
        return {"TransformerEngine": te.LayerNormLinear(cols, outs, tp_size=self.ranks, **self._options)}

    @property
    def _options(self) -> dict[str, Any]:
        """The options that all layers share."""
        options = {"tp_group": self.group, "sequence_parallel": True, "parallel_mode": "column", "device": self.device}
        return {**options, "params_dtype": self.torch.bfloat16}

    def memory(self):
        torch = self.torch
        from cunorm.torch import LayerNormLinear

        self.symmetric.worth = lambda *_, **__: True
        flags = dict.fromkeys(("ub_overlap_ag", "ub_bulk_dgrad", "ub_bulk_wgrad"), True)
        for rows, cols, outs in WHOLE:
            modules = {
                "cunorm": LayerNormLinear(cols, outs, **self._options),
                "cunorm, z kept": LayerNormLinear(cols, outs, **self._options, keep_normalized=True),
                "cunorm, flags": LayerNormLinear(cols, outs, **self._options, **flags),
                **self._of_transformer_engine(cols, outs),
            }
            x, dy = self._random(rows // self.ranks, cols).requires_grad_(), self._random(rows, outs // self.ranks)
            held = {}
            for name, module in modules.items():
                module(x).backward(dy)  # allocates what is held from call to call
                module.zero_grad()
                before = torch.cuda.memory_allocated()
                y = module(x)
                held[name] = torch.cuda.memory_allocated() - before - y.nbytes
                y.backward(dy)
                del y
                module.zero_grad()
            shape = {"rows": rows, "in": cols, "out": outs}
            yield {"part": "memory", **shape, **slower(of_ranks(held)), "x of a rank": x.nbytes}

    def _forward(self, module: Any, x: Any) -> Any:
        with self.torch.no_grad():
            return module(x)

    def _fused(self, x: Any, norm: list[Any], weight: Any, bias: Any) -> Any:
        from cunorm.torch import layer_norm

        with self.torch.no_grad():
            z = layer_norm(x, x.shape[-1:], *norm)
            fused = self.torch.ops.symm_mem.fused_all_gather_matmul
            _, (y,) = fused(z, [weight.t()], 0, self.group.group_name)
            return y.add_(bias)


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(arguments.rank)
    store = f"file://{arguments.store}"
    options = {"rank": arguments.rank, "world_size": arguments.ranks, "timeout": timedelta(seconds=60)}
    dist.init_process_group("nccl", init_method=store, device_id=torch.device("cuda", arguments.rank), **options)
    bench = Bench(arguments.rank, arguments.ranks)
    for part in arguments.parts:
        for line in getattr(bench, part)():
            if arguments.rank == 0:
                text = json.dumps(line)
                print(text, flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(text + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without waiting for NCCL's threads


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.linear_parallel", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=600, help="give up after this many")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # for the processes that this one starts
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments)
        return 0
    environment = os.environ | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # read when torch is imported
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.linear_parallel", *sys.argv[1:], "--store", f"{folder}/store", "--rank"]
        processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(arguments.ranks)]
        try:
            return max(process.wait(arguments.seconds) for process in processes)
        finally:
            for process in processes:
                process.kill()


if __name__ == "__main__":
    raise SystemExit(main())
