"""Which tests run, and fixtures that all folders share.

Tests marked `gpu` need a GPU that CuPy can use, and are reported as skipped without one. The mark `quick` is for the
first case of each test that is not marked `slow`.
"""

import functools
import logging
import os
import time
from pathlib import Path

import numpy
import pytest
from cases import HOST_COLUMNS

# Let torch collect garbage before it captures a graph. Otherwise garbage of an earlier test may be freed during the
# capture, which CUDA then refuses.
os.environ.setdefault("TORCH_CUDAGRAPH_GC", "1")
# Plans follow the tables that cunorm ships, whatever was tuned on this machine.
os.environ.setdefault("CUNORM_TUNE", "0")
# A test starts no compiler in the background unless it asks for one.
os.environ.setdefault("CUNORM_NODES", "0")
# A GPU's memory is shared with the other libraries and with the other processes of pytest-xdist.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

DAYS_KEPT = 7
POOL_LIMIT = 4 * 2**30  # bytes that a worker may keep between tests, because eight of them share a GPU


@functools.cache
def gpu() -> tuple[str, str]:
    """Return (name of the GPU, why there is none), of which one is empty."""
    try:
        import cupy
    except ImportError as error:
        return "", f"CuPy cannot be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return "", f"CuPy sees no GPU ({error})"
    if count == 0:
        return "", "CuPy sees no GPU"
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return (name if count == 1 else f"{count} x {name}"), ""


def compile_less_for_jax() -> None:
    """Keep XLA's programs for the CPU from run to run, as the stand-in's are kept, and do not optimise them.

    Compiling them is two thirds of the time of JAX's tests, and half of that is LLVM's optimisation. Each worker has a
    folder of its own, because JAX does not write files atomically.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cunorm" / "tests" / f"jax-{worker}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > DAYS_KEPT * 24 * 3600:
            path.unlink(missing_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


if gpu()[1]:  # before a test imports JAX
    compile_less_for_jax()


def pytest_report_header(config):
    name, missing = gpu()
    return f"GPU: {name or f'none, tests marked gpu are skipped: {missing}'}"


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(config, items):
    long = [item for item in items if is_long_on_the_host(item)]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if not is_long_on_the_host(item)]
    _, missing = gpu()
    if missing:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {missing}"))
    mark_quick(items)


def is_long_on_the_host(item) -> bool:
    """Return whether a case on the host has long rows. NumPy has one path for all lengths, so short ones do."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("xp") == "host" and parameters.get("cols", 0) > HOST_COLUMNS


def mark_quick(items) -> None:
    """Mark the first case of each test that can run here, so that a quick run visits every subject."""
    seen = set()
    for item in items:
        test = (item.path, item.originalname)
        if test not in seen and not item.get_closest_marker("slow") and not item.get_closest_marker("skip"):
            seen.add(test)
            item.add_marker(pytest.mark.quick)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let a worker whose test takes minutes give the tests that it has left to the others."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("needs a GPU" in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(f"{count} tests were skipped because they need a GPU: {gpu()[1]}")


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def xp(request):
    """The array module: numpy, or cupy for the tests marked gpu."""
    if request.param == "host":
        yield numpy
        return
    import cupy

    yield cupy
    pool = cupy.get_default_memory_pool()
    if pool.total_bytes() > POOL_LIMIT:
        pool.free_all_blocks()


@pytest.fixture
def one_thread():
    """Let torch compute on one thread: small products are slower on several, and other tests run beside this one."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def lines(caplog):
    """Return a function that returns the messages since its last call, and checks that none is above INFO."""
    caplog.set_level(logging.DEBUG, "cunorm")

    def said() -> list[str]:
        assert {record.levelno for record in caplog.records} <= {logging.INFO}
        assert {record.name for record in caplog.records} <= {"cunorm"}
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    return said


@pytest.fixture
def stand_in(monkeypatch):
    """Run fused operations of torch on the stand-in for a GPU, and keep what was launched."""
    import torch_stand_in

    return torch_stand_in.play(monkeypatch)
