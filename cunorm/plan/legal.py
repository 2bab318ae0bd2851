"""Which launches of a kernel there are: what its text is written for, and what a device can run."""

from __future__ import annotations

from ..kernel.device import Device
from ..operation import NORMS
from .shapes import MOST_SHORT, ceil_div
from .shared_memory import SHARED_LIMIT, ctas_that_fit, dynamic_shared, shared_memory
from .spec import WARP, NormSpec

KERNELS = {"forward": ("forward", "forward_pairs", "forward_spread"), "backward": ("backward",)}
BARRIERS = 16  # of a CTA; __syncthreads has one of them


def is_legal(spec: NormSpec, device: Device) -> bool:
    """Whether the device can run the launch, and the kernel is one that there is, whatever a table says."""
    shape = spec.shape
    return (
        device.runs_clusters(shape.cluster)
        and (shape.cluster == 1 or shape.threads % WARP == 0)
        and _is_a_kernel(spec)
        and spec.threads <= 1024
        and spec.threads * spec.ctas_per_sm <= 2048
        and shared_memory(spec) <= SHARED_LIMIT
        and spec.ctas_per_sm <= ctas_that_fit(shared_memory(spec) + dynamic_shared(spec), device)
    )


def _is_a_kernel(spec: NormSpec) -> bool:
    """Whether the texts of kernels_cu/norms are for such choices: what they assert, and what they take for granted."""
    shape = spec.shape
    stores_s = any(one.name == "s" for one in spec.results)
    if spec.kernel == "forward_spread":
        parts = ceil_div(shape.packs, spec.held)
        evenly = spec.held == ceil_div(shape.packs, parts) and (parts > 1 or shape.threads % WARP == 0)
        return evenly and spec.rows_per_cta == 1 and not spec.stages and not spec.finds_scales
    if spec.kernel == "forward_pairs":
        alone = len(spec.matrices) == 1 and not spec.grouped and not stores_s
        shared = shape.cluster == 1 and WARP < shape.threads <= 16 * WARP and not spec.stages
        return NORMS[spec.operation.norm].subtracts_mean and alone and shared and spec.rows_per_cta == 2
    # Several rows share a CTA only if it has whole rows, forward only if a warp has.
    if spec.rows_per_cta > 1 and (shape.cluster > 1 or (spec.kernel == "forward" and shape.threads > WARP)):
        return False
    if shape.threads > WARP and spec.rows_per_cta >= BARRIERS:
        return False
    if shape.threads < WARP and shape.threads * spec.rows_per_cta % WARP:
        return False
    if spec.stages == 1 and not (spec.rows_stay and spec.aligned):  # filled again in place
        return spec.kernel == "backward" and not spec.rows_stay and not spec.ask_early
    if spec.kernel == "backward":
        return spec.stages > 0
    late = spec.stages > 0 and not spec.ask_early and shape.threads * shape.cluster <= WARP
    # The next row of a CTA may be of another group; short rows are asked about that in launches.py.
    stale = spec.grouped and spec.columns_stay and ceil_div(spec.cols, shape.pack) > MOST_SHORT
    return not late and not stale and not (spec.unpacked and stores_s)
