"""The providers that are measured. Those whose library cannot be imported are listed with the reason."""

from __future__ import annotations

from bench.providers.apex import Apex, ApexFast
from bench.providers.base import Provider
from bench.providers.cudnn import Cudnn
from bench.providers.cunorm import Cunorm
from bench.providers.flax import Flax
from bench.providers.liger import Liger
from bench.providers.pytorch import Autotuned, Compiled, Eager
from bench.providers.quack import Quack, QuackTuned
from bench.providers.transformer_engine import TransformerEngine
from bench.providers.triton_tutorial import TritonTutorial
from bench.providers.xla import Xla


def all_providers(triton_tutorial: str | None = None) -> list[Provider]:
    """Return every provider, ours first."""
    return [
        Cunorm(),
        Eager(),
        Compiled(),
        Autotuned(),
        TritonTutorial(triton_tutorial),
        Liger(),
        Quack(),
        QuackTuned(),
        ApexFast(),
        Apex(),
        TransformerEngine(),
        Cudnn(),
        Xla(),
        Flax(),
    ]


def available(providers: list[Provider]) -> tuple[list[tuple[Provider, str]], dict[str, str]]:
    """Return ([(provider, version)], {name: why it cannot be measured here})."""
    loaded, missing = [], {}
    for provider in providers:
        try:
            loaded.append((provider, provider.load()))
        except Exception as error:  # a broken installation raises what it likes
            missing[provider.name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return loaded, missing
