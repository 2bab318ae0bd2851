"""The roofs of the bench are copies; which of them are tried, and that they copy."""

from __future__ import annotations

import pytest
from nvrtc import needs_nvrtc

from bench.roof import Variant, compiled, variants
from bench.roof import distinct as distinct_roofs
from bench.roofs import candidates, fastest, key_of


@pytest.mark.parametrize(
    ("size", "power"),
    [(1 << 10, 8), (1 << 14, 12), (3 << 18, 20), (1 << 20, 20), (1 << 27, 27), (100 << 20, 27), (1, 0)],
)
def test_sizes_share_a_roof(size, power):
    assert key_of(1, size) == (1, power)


def test_a_case_tries_the_winners_of_its_size_and_the_first_of_its_neighbours():
    a, b, c, d = (Variant(1, 128, ctas, 4) for ctas in (1, 2, 3, 4))
    known = {(1, 25): [a, b], (1, 26): [b, c], (1, 27): [d, a], (2, 26): [c]}
    assert candidates(known, (1, 26)) == [b, c, a, d]
    assert candidates(known, (1, 28)) == [d]
    assert fastest([(a, 3.0), (b, 1.0), (c, 2.0)], 2) == [b, c]


@pytest.mark.parametrize("reads", [1, 2])
def test_every_roof_fits_an_sm_and_is_tried_once(reads):
    every = variants(reads)
    assert len(every) == len(set(every)) > 100
    for variant in every:
        assert variant.under_way <= 128 << 10
        assert variant.threads * variant.ctas <= 2048
        # As many CTAs fit an SM as the variant says, and no more if shared memory bounds them.
        assert variant.ctas * (variant.dynamic_shared + 1024) <= 228 << 10
        if variant.dynamic_shared and not variant.stages:
            assert (variant.ctas + 1) * (variant.dynamic_shared + 1024) > 228 << 10
    assert not [variant for variant in variants(reads, 80) if variant.stages]
    few = distinct_roofs(every, 64, 132)
    assert len(few) < 40  # for 1 KB all CTAs run at once, so neither their number nor persistence matters
    assert {variant.grid(64, 132) for variant in few} <= {1}
    assert len(distinct_roofs(every, 1 << 23, 132)) == len(every)


@needs_nvrtc
@pytest.mark.slow
def test_every_roof_compiles():
    texts = [variant.text for reads in (1, 2) for variant in variants(reads)]
    assert "@" not in "".join(texts)
    assert all(compiled(texts, 90).values())


@pytest.mark.gpu
def test_every_roof_copies_every_element():
    cupy = pytest.importorskip("cupy")
    from bench.roof import Kernels
    from bench.roofs import wrong

    kernels = Kernels()
    for words in (2, 1000, 1 << 20, (1 << 22) + 6):
        numbers = cupy.arange(1, words + 1, dtype=cupy.uint64)
        a, b = (numbers * cupy.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F))  # no two alike
        for reads, second in ((1, None), (2, b)):
            for variant in kernels.variants[reads]:
                assert wrong(kernels, variant, a, second, cupy.empty_like(a)) == 0, (variant, words)
