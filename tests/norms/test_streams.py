"""The streams and devices on which calls run, and arrays of other libraries."""

from __future__ import annotations

import pytest
from arrays import inputs, same_bits
from busy import spin
from functions import OPS, backward, forward
from reference import check_backward, check_forward

import cunorm

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu


@pytest.fixture(params=[0, 1], ids=["first GPU", "second GPU"])
def device(request):
    if cupy.cuda.runtime.getDeviceCount() <= request.param:
        pytest.skip("this machine has one GPU")
    with cupy.cuda.Device(request.param):
        yield request.param
        cupy.cuda.runtime.deviceSynchronize()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [129, 4096, 20000, 600001])
def test_a_call_waits_for_what_its_stream_does(device, op, cols):
    """x and dy are written on a side stream after a delay, and the call on the same stream must see them."""
    x, dy, weight, bias = inputs(cupy, 3, cols, "float16")
    y, mean, rstd = forward(op, x, weight, bias)  # also compiles and fills the pool
    gradients = backward(op, dy, x, mean, rstd, weight)
    late_x, late_dy = cupy.zeros_like(x), cupy.zeros_like(dy)
    stream = cupy.cuda.Stream(non_blocking=True)
    zeros = cupy.zeros_like(x)
    # The side stream may use memory that the calls above freed only when they are done.
    cupy.cuda.runtime.deviceSynchronize()
    with stream:  # the first calls here, without the delay, load everything and take memory
        late_x[...] = zeros
        late_dy[...] = zeros
        backward(op, late_dy, late_x, mean, rstd, weight)
        forward(op, late_x, weight, bias)
        spin(0)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        spin(300)
        late_x[...] = x
        late_dy[...] = dy
        late_y, late_mean, late_rstd = forward(op, late_x, weight, bias)
        late_gradients = backward(op, late_dy, late_x, late_mean, late_rstd, weight)
        assert not stream.done, "the calls waited for the GPU"
    stream.synchronize()
    assert same_bits(late_y, y)
    for late, expected in zip(late_gradients, gradients, strict=True):
        assert same_bits(late, expected)


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_a_captured_step_with_a_pool_of_its_own_replays_beside_other_work(way):
    """A capture works as README.md says. Sums over so many rows take two launches and a workspace between them."""
    x, dy, weight, bias = inputs(cupy, 16384, 1024, "float16")
    if way == "plain":
        _, mean, rstd = cunorm.layer_norm_forward(x, None, weight, bias)

        def step():
            return cunorm.layer_norm_backward(dy, x, mean, rstd, weight)
    else:
        op = cunorm.fuse("layer_norm", epilogue=lambda xhat, weight, bias: xhat * weight + bias)
        _, saved = op.forward(x, weight=weight, bias=bias)

        def step():
            return tuple(op.backward(saved, dy).values())

    expected = step()
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        step()  # so the default pool has memory for a step, which a wrong capture would take
        with cupy.cuda.using_allocator(pool.malloc):
            step()
            stream.begin_capture()
            captured = step()
            graph = stream.end_capture()
        assert pool.free_bytes() > 0, "the step had no workspace"
        neighbours = [cupy.full(size, 7, "uint8") for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22) for _ in range(16)]
        for array in captured:
            array.fill(0)
        graph.launch(stream)
        stream.synchronize()
        assert all(same_bits(array, of_step) for array, of_step in zip(captured, expected, strict=True))
        assert all(bool((array == 7).all()) for array in neighbours)


def test_a_side_stream_does_not_wait_for_the_default_stream(device):
    x, dy, weight, bias = inputs(cupy, 8, 1000, "float16")
    y, mean, rstd = cunorm.layer_norm_forward(x, None, weight, bias)
    stream = cupy.cuda.Stream(non_blocking=True)

    def both_passes():
        return cunorm.layer_norm(x, None, weight, bias), cunorm.layer_norm_backward(dy, x, mean, rstd, weight)

    with stream:
        both_passes()
    spin(0)
    cupy.cuda.runtime.deviceSynchronize()
    default = cupy.cuda.Stream.null
    spin(1000)
    with stream:
        side_y, _ = both_passes()
    stream.synchronize()
    assert not default.done, "the side stream ended only with the default stream"
    default.synchronize()
    assert same_bits(side_y, y)


@pytest.mark.parametrize("op", OPS)
def test_arrays_on_a_device_that_is_not_current(op):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this machine has one GPU")
    with cupy.cuda.Device(1):
        x, dy, weight, bias = inputs(cupy, 300, 1000, "bfloat16")
    with cupy.cuda.Device(0):
        y, mean, rstd = forward(op, x, weight, bias)
        gradients = backward(op, dy, x, mean, rstd, weight)
        assert cupy.cuda.runtime.getDevice() == 0
    for array in (y, mean, rstd, *gradients):
        assert array is None or array.device.id == 1
    with cupy.cuda.Device(1):
        check_forward(op, (y, mean, rstd), x, weight, bias if op == "layer_norm" else None)
        check_backward(op, gradients, dy, x, weight)
    with pytest.raises(ValueError, match="must be on the device of x"):
        cunorm.layer_norm(x, None, cupy.asarray(weight.get()))


class Lent:
    """An array of a library that cunorm does not know, which has only DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_through_dlpack():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, dy, weight, bias = inputs(cupy, 300, 1000, "float16")
    lent_x, lent_dy, lent_weight, lent_bias = (Lent(torch.from_dlpack(array)) for array in (x, dy, weight, bias))
    y, mean, rstd = cunorm.layer_norm_forward(lent_x, None, lent_weight, lent_bias)
    assert isinstance(y, cupy.ndarray)
    assert same_bits(y, cunorm.layer_norm(x, None, weight, bias))
    # The statistics are CuPy arrays, and the other arrays are lent.
    gradients = cunorm.layer_norm_backward(lent_dy, lent_x, mean, rstd, lent_weight)
    check_backward("layer_norm", gradients, dy, x, weight)
    # x may be strided, and `out` may be lent.
    out = torch.empty((300, 1000), dtype=torch.float16, device="cuda")
    strided = torch.from_dlpack(x).repeat(1, 2)[:, :1000]
    cunorm.rms_norm(Lent(strided), None, lent_weight, out=Lent(out))
    assert same_bits(cupy.from_dlpack(out), cunorm.rms_norm(x, None, weight))


def test_a_bfloat16_array_through_dlpack():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.randn(30, 129, device="cuda", dtype=torch.bfloat16)
    y = cunorm.layer_norm(Lent(x))
    assert (type(y), y.dtype.name) == (cupy.ndarray, "bfloat16")
    check_forward("layer_norm", (y, None, None), cupy.from_dlpack(x))


def test_an_array_that_its_library_does_not_export_is_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.zeros(3, 8, device="cuda", requires_grad=True)
    with pytest.raises(TypeError, match="layer_norm: x cannot be read through DLPack"):
        cunorm.layer_norm(Lent(x))


def test_an_array_on_the_host_is_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(TypeError, match=r"layer_norm: x must be on a CUDA device .* numpy.from_dlpack"):
        cunorm.layer_norm(Lent(torch.zeros(3, 8)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cols", [1024, 4096, 20000])
def test_backward_passes_that_begin_early_keep_their_partial_rows_apart(op, cols):
    """They follow each other in a busy stream. Each uses the workspace of the one before, which may not have ended."""
    rows = max(300, 6_000_000 // cols)  # fewer rows would take one launch
    x, dy, weight, bias = inputs(cupy, rows, cols, "float16")
    _, mean, rstd = forward(op, x, weight, bias)
    dys = [dy * dy.dtype.type(scale) for scale in (1, -2, 0.5, 3) * 2]
    expected = []
    for scaled in dys:
        expected.append(backward(op, scaled, x, mean, rstd, weight))
        cupy.cuda.runtime.deviceSynchronize()
    spin(300)
    results = [backward(op, scaled, x, mean, rstd, weight) for scaled in dys]
    for gradients, alone in zip(results, expected, strict=True):
        for gradient, wanted in zip(gradients, alone, strict=True):
            assert same_bits(gradient, wanted)
