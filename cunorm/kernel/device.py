"""The facts about a GPU that plans depend on. They can be made up, for tests and for compiling without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from .. import private
from . import driver

# The advice of errors: the extras cuda13, cuda12 and linear-* of pyproject.toml, by the names of their packages.
INSTALL = (
    "pip install 'cupy-cuda13x>=14.2' 'nvidia-cuda-nvrtc>=13,<14' 'nvidia-cuda-runtime>=13,<14'; for a CUDA 12 driver "
    "pip install 'cupy-cuda12x>=14.2' nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
)
INSTALL_LINEAR = (
    "pip install -U 'nvmath-python>=1,<2' 'nvidia-cublas>=13,<14'; for a CUDA 12 driver "
    "pip install -U 'nvmath-python>=1,<2' nvidia-cublas-cu12"
)

NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_..., for clusters of 16

# PTX, which the driver reads itself, so that no question needs NVRTC where all kernels come from the cache.
EMPTY_KERNEL = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry cunorm_probe() { ret; }\n"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. `arch` is the compute capability without its point: 90 for 9.0."""

    name: str
    arch: int
    sms: int
    shared: int  # bytes of shared memory that a CTA may have
    # How many clusters of 2, 4, 8 and 16 CTAs run at once with one CTA per SM; () without clusters. They are fewer than
    # sms / size, because a cluster lies within a GPC, whose number of SMs is no multiple of 8. They can be 0, as for 16
    # on a part of a GPU.
    clusters: tuple[int, ...] = ()
    bandwidth: int = 0  # of its memory, by clock and width, in GB/s; 0 if unknown

    @property
    def overlaps_launches(self) -> bool:
        """Return whether a kernel may begin before the one before it has ended (programmatic dependent launch)."""
        return self.arch >= 90 and early_launches()

    def runs_clusters(self, size: int) -> bool:
        """Return whether a cluster of `size` CTAs can run; one of a single CTA always can."""
        sizes = (each for each, count in zip(CLUSTER_SIZES, self.clusters, strict=False) if count > 0)
        return size == 1 or size in sizes

    def resident_clusters(self, size: int, ctas_per_sm: int, sm_margin: int = 0) -> int:
        """Return how many clusters of `size` CTAs (1: CTAs) run at once."""
        whole = self.sms if size == 1 else self.clusters[CLUSTER_SIZES.index(size)]
        return max(1, (whole - -(-sm_margin // size)) * ctas_per_sm)


CLUSTER_SIZES = (2, 4, 8, 16)
EARLY_VARIABLE = "CUNORM_EARLY_LAUNCH"


def is_on(variable: str, without: str) -> bool:
    """Return whether a variable of the environment is not 0. `without` names what 0 turns off, for the error."""
    value = os.environ.get(variable, "1")
    if value not in ("0", "1"):
        raise ValueError(f"cunorm: {variable} must be 0 or 1; got {value!r}. Unset it, or set 0 for no {without}.")
    return value == "1"


@cache
def early_launches() -> bool:
    """Return whether launches may begin early. CUNORM_EARLY_LAUNCH=0, which is read once, forbids it."""
    return is_on(EARLY_VARIABLE, "early launches")


# A common GPU of each architecture that kernels are compiled for. The clusters of sm_90 are an H200's; those of sm_100
# and sm_120 are guesses, which only plans made without such a GPU depend on.
KNOWN = {
    75: Device("Tesla T4", 75, 40, 64 << 10, (), 320),
    80: Device("A100", 80, 108, 163 << 10, (), 2039),
    86: Device("A10", 86, 72, 99 << 10, (), 600),
    89: Device("L40S", 89, 142, 99 << 10, (), 864),
    90: Device("H200", 90, 132, 227 << 10, (66, 30, 15, 7), 4900),
    100: Device("B200", 100, 148, 227 << 10, (74, 36, 16, 8), 8000),
    120: Device("RTX PRO 6000", 120, 188, 99 << 10, (94, 46, 22, 10), 1792),
}
H100 = replace(KNOWN[90], name="H100", bandwidth=3350)


def known(arch: int) -> tuple[Device, ...]:
    """Return the devices of an architecture whose kernels differ."""
    return (KNOWN[90], H100) if arch == 90 else (KNOWN[arch],)


@contextmanager
def of_memory(pointer: int) -> Iterator[int]:
    """Yield the number of the GPU whose memory `pointer` points to, and make it current within."""
    import cupy

    device_id = cupy.cuda.runtime.pointerGetAttributes(pointer).device
    with cupy.cuda.Device(device_id):
        yield device_id


@cache
def current(device_id: int) -> Device:
    """Return the GPU of that number, by CuPy."""
    import cupy

    private.check_version("cupy")
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    arch = 10 * properties["major"] + properties["minor"]
    optin = cupy.cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin
    shared = cupy.cuda.runtime.deviceGetAttribute(optin, device_id)
    with cupy.cuda.Device(device_id):
        clusters = tuple(_resident_clusters(size, shared) for size in CLUSTER_SIZES) if arch >= 90 else ()
    return Device(
        properties["name"].decode(), arch, properties["multiProcessorCount"], shared, clusters, _bandwidth(device_id)
    )


def _bandwidth(device_id: int) -> int:
    """Return GB/s, with two transfers a clock."""
    import cupy

    runtime = cupy.cuda.runtime
    kilohertz = runtime.deviceGetAttribute(runtime.cudaDevAttrMemoryClockRate, device_id)
    bits = runtime.deviceGetAttribute(runtime.cudaDevAttrGlobalMemoryBusWidth, device_id)
    return 2 * kilohertz * (bits // 8) // 10**6


def _resident_clusters(size: int, shared: int) -> int:
    """Ask the driver how many clusters run at once of a kernel whose CTAs have `shared` bytes, so that an SM holds one.

    A grid with more clusters would need a second wave: on an H200, backward of 4096 x 65536 had 0.45 of the roof
    instead of 0.76.
    """
    import cupy

    attributes, module = cupy.cuda.driver, cupy.cuda.Module()
    module.load(EMPTY_KERNEL)
    kernel = module.get_function("cunorm_probe")
    attributes.funcSetAttribute(kernel.ptr, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    attributes.funcSetAttribute(kernel.ptr, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    return driver.resident_clusters(kernel.ptr, size, 32, shared)
