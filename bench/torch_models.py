"""Compare the PyTorch adapter with torch's own norms: host time, memory, replayed graphs, and models of transformers.

    python -m bench.torch_models [--without-models] [--out FILE]

torch and cunorm take turns within one run on one machine. Models have random weights; nothing is downloaded. Models
under torch.compile are those of bench/accelerated.py.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

import cunorm.torch
from bench.results import lines_to
from cunorm.torch import replace_norms

STEPS = 50
LAYERS = 4
BATCH, SEQUENCE = 8, 512
NAMES = ("gpt2", "bert", "vit", "llama")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-models", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/torch/models.jsonl"))
    arguments = parser.parse_args()
    with lines_to(arguments.out) as write:
        write("run", gpu=torch.cuda.get_device_name(), torch=torch.__version__, command=" ".join(sys.argv))
        host_times(write)
        peak_memory(write)
        replayed_graphs(write)
        for name in () if arguments.without_models else NAMES:
            for dtype in DTYPES:
                parity(write, name, dtype)
                training(write, name, dtype)


# Host time of a call: the microseconds that the caller waits when the GPU has nothing to do.


def host_times(write: Callable[..., None]) -> None:
    for op in ("layer_norm", "rms_norm"):
        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        weight, bias = torch.ones(2, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_().unbind()
        leaves = [t.detach().requires_grad_() for t in ((x, weight, bias) if op == "layer_norm" else (x, weight))]
        dy = torch.randn_like(x)
        functions = {"torch": getattr(F, op), "cunorm": getattr(cunorm.torch, op)}

        def plain(function, tensors=leaves):
            def call():
                with torch.no_grad():
                    for _ in range(10):
                        function(tensors[0], (1024,), *tensors[1:])

            return call, 10

        def both(function, tensors=leaves, dy=dy):
            def call():
                for tensor in tensors:
                    tensor.grad = None
                function(tensors[0], (1024,), *tensors[1:]).backward(dy)

            return call, 1

        def chain(function, tensors=leaves, dy=dy):
            """Run ten norms in a row, which cost what norms cost in a model, without the start of a backward pass."""

            def call():
                for tensor in tensors:
                    tensor.grad = None
                y = tensors[0]
                for _ in range(10):
                    y = function(y, (1024,), *tensors[1:])
                y.backward(dy)

            return call, 10

        for what, make in (("forward", plain), ("forward and backward", both), ("ten in a row, each", chain)):
            calls = {name: make(function) for name, function in functions.items()}
            write("host", op=op, what=what, unit="us", **alternate(calls, rounds=40, inner=20))


def alternate(calls: dict[str, tuple[Callable[[], None], int]], rounds: int, inner: int) -> dict[str, float]:
    """Return medians over rounds in which all take turns, divided by the `count` of units that a call does."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, count) in calls.items():
            torch.cuda.synchronize()
            call()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            times[name].append((time.perf_counter() - start) / inner / count * 1e6)
    return {name: round(statistics.median(values[rounds // 8 :]), 2) for name, values in times.items()}


# Memory: what a training step of one norm needs beyond its inputs.


def peak_memory(write: Callable[..., None]) -> None:
    rows, cols = 16384, 4096
    for name in ("LayerNorm", "RMSNorm"):
        figures = {}
        for kind, module in (("torch", getattr(torch.nn, name)), ("cunorm", getattr(cunorm.torch, name))):
            norm = module(cols, device="cuda", dtype=torch.bfloat16)
            x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2):
                x.grad = norm.weight.grad = None
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                y = norm(x)
                held = torch.cuda.memory_allocated() - before
                y.backward(y.detach())
                peak = torch.cuda.max_memory_allocated() - before
                del y
            figures |= {f"{kind}_held": held, f"{kind}_peak": peak}
        write("memory", op=name, rows=rows, cols=cols, dtype="bfloat16", unit="bytes", **figures)


# Kernel time in a replayed graph: the adapter's call and the core's, the same kernels.


def replayed_graphs(write: Callable[..., None]) -> None:
    import cupy

    for rows, cols in ((16384, 4096), (16384, 1024), (512, 4096)):
        copies = max(2, int(300e6 / (4 * rows * cols)))
        xs = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        weight, bias = torch.ones(cols, device="cuda").bfloat16(), torch.zeros(cols, device="cuda").bfloat16()
        with torch.no_grad():
            cunorm.torch.layer_norm(xs[0], (cols,), weight, bias)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for x in xs:
                    cunorm.torch.layer_norm(x, (cols,), weight, bias)
        arrays = [cupy.from_dlpack(x) for x in xs]
        parameters = cupy.from_dlpack(weight), cupy.from_dlpack(bias)
        outs = [cupy.empty_like(a) for a in arrays]
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            cunorm.layer_norm(arrays[0], cols, *parameters, out=outs[0])
            stream.begin_capture()
            for array, out in zip(arrays, outs, strict=True):
                cunorm.layer_norm(array, cols, *parameters, out=out)
            core = stream.end_capture()
        stream.synchronize()
        raw = torch.cuda.ExternalStream(stream.ptr)
        times: dict[str, list[float]] = {"adapter": [], "core": []}
        for _ in range(30):
            for name, replay in (("adapter", graph.replay), ("core", lambda core=core, s=stream: core.launch(s))):
                with torch.cuda.stream(raw):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    replay()
                    end.record()
                    end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / copies)
        medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
        write("graph", op="layer_norm", rows=rows, cols=cols, dtype="bfloat16", unit="us", **medians)


# Models.


def build(
    name: str, dtype: torch.dtype, layers: int = LAYERS, batch: int = BATCH, sequence: int = SEQUENCE
) -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    """Return a model in training mode without dropout, inputs and labels.

    Models of pictures have a fixed batch and number of tokens.
    """
    import transformers as t

    torch.manual_seed(0)
    wide = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": layers, "num_attention_heads": 12}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": layers, "vocab_size": 8192}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    whisper = {"d_model": 768, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "encoder_layers": layers}
    whisper |= {"max_source_positions": sequence, "dropout": 0.0, "decoder_layers": 1}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": max(1024, sequence)}
    cls, config = {
        "gpt2": (
            t.GPT2LMHeadModel,
            t.GPT2Config(n_layer=layers, vocab_size=8192, bos_token_id=0, eos_token_id=0, **silent),
        ),
        "bert": (t.BertForMaskedLM, t.BertConfig(**wide, **quiet, vocab_size=8192)),
        "vit": (t.ViTForImageClassification, t.ViTConfig(**wide, **quiet, num_labels=100)),
        "llama": (
            t.LlamaForCausalLM,
            t.LlamaConfig(hidden_size=2048, intermediate_size=5632, **heads),
        ),
        "qwen3": (
            t.Qwen3ForCausalLM,
            t.Qwen3Config(hidden_size=1024, intermediate_size=3072, head_dim=64, **heads),
        ),
        "gemma3": (
            t.Gemma3ForCausalLM,
            t.Gemma3TextConfig(hidden_size=1024, intermediate_size=4096, head_dim=64, **heads),
        ),
        "whisper": (whisper_encoder, t.WhisperConfig(**whisper)),
        "dit": (partial(dit, layers), None),
    }[name]
    model = (cls(config) if config is not None else cls()).to("cuda", dtype).train()
    if name == "whisper":
        features = torch.randn(batch, 80, 2 * sequence, device="cuda", dtype=dtype)
        return model, {"input_features": features}, torch.randint(0, 768, (batch, sequence), device="cuda")
    if name == "dit":
        for block in model.transformer_blocks:
            block.norm1.emb.class_embedder.dropout_prob = 0.0
        picture = torch.randn(16, 4, 32, 32, device="cuda", dtype=dtype)
        numbers = {name: torch.randint(0, 1000, (16,), device="cuda") for name in ("timestep", "class_labels")}
        return model, {"hidden_states": picture} | numbers, torch.randint(0, 32, (16, 8, 32), device="cuda")
    if name == "vit":
        inputs = {"pixel_values": torch.randn(16, 3, 224, 224, device="cuda", dtype=dtype)}
        return model, inputs, torch.randint(0, 100, (16,), device="cuda")
    ids = torch.randint(0, 8192, (batch, sequence), device="cuda")
    return model, {"input_ids": ids}, ids.roll(-1, 1)


def whisper_encoder(config):
    from transformers import WhisperModel

    return WhisperModel(config).get_encoder()


def dit(layers: int):
    """Return a DiT of DiT-XL's width, for 256 tokens."""
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(num_attention_heads=16, attention_head_dim=72, num_layers=layers, out_channels=8)


def loss_of(model, inputs, labels) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(**inputs)[0]  # whatever the first result is, its last axis is read as logits
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten()), logits


def parity(write: Callable[..., None], name: str, dtype: str) -> None:
    """Write how far logits and gradients are from the same model in float64, or in float32 for bfloat16."""
    model, inputs, labels = build(name, DTYPES[dtype])
    exact = copy.deepcopy(model).to(torch.float64 if dtype == "float32" else torch.float32)
    wide = {k: v.to(exact.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    results = []
    for which, given in ((exact, wide), (model, inputs), (model, inputs)):
        if len(results) == 2:
            report = replace_norms(model)
        which.zero_grad()
        loss, logits = loss_of(which, given, labels)
        loss.backward()
        gradients = torch.cat([p.grad.double().flatten() for p in which.parameters() if p.grad is not None])
        results.append((logits.detach().double(), gradients))
    figures = {}
    for who, result in zip(("torch", "cunorm"), results[1:], strict=True):
        for what, value, reference in zip(("logits", "gradients"), result, results[0], strict=True):
            figures[f"{what}_{who}"] = float((value - reference).norm() / reference.norm())
    write("parity", model=name, dtype=dtype, swapped=len(report.swapped), left=len(report.left), **figures)


def make_step(model, inputs, labels) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        optimizer.zero_grad()
        loss, _ = loss_of(model, inputs, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def training(write: Callable[..., None], name: str, dtype: str) -> None:
    """Write the losses of STEPS steps, and the milliseconds of a step, with torch's norms and with cunorm's."""
    losses, steps = {}, {}
    for who in ("torch", "cunorm"):
        model, inputs, labels = build(name, DTYPES[dtype])
        if who == "cunorm":
            replace_norms(model)
        steps[who] = make_step(model, inputs, labels)
        losses[who] = [float(steps[who]()) for _ in range(STEPS)]
    apart = max(abs(a - b) / a for a, b in zip(losses["torch"], losses["cunorm"], strict=True))
    write(
        "training",
        model=name,
        dtype=dtype,
        steps=STEPS,
        first=losses["torch"][0],
        last_torch=losses["torch"][-1],
        last_cunorm=losses["cunorm"][-1],
        most_apart=apart,
    )
    write("step", model=name, dtype=dtype, mode="eager", unit="ms", **step_times(steps))


def step_times(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {who: [] for who in steps}
    for _ in range(8):
        for who, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            times[who].append((time.perf_counter() - start) / 3 * 1e3)
    return {who: round(statistics.median(values[1:]), 3) for who, values in times.items()}


if __name__ == "__main__":
    main()
