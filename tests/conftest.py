"""Which tests can run here: those marked `gpu` need a GPU that CuPy can use and are skipped, in sight, without one."""

import functools

import numpy
import pytest

POOL_LIMIT = 4 * 2**30  # bytes that a worker may keep between tests: eight of them share a GPU


@functools.cache
def gpu() -> tuple[str, str]:
    """(name of the GPU, why there is none): one of them is empty."""
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


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU that CuPy can use")


def pytest_report_header(config):
    name, missing = gpu()
    return f"GPU: {name or f'none, tests marked gpu are skipped: {missing}'}"


def pytest_collection_modifyitems(config, items):
    _, missing = gpu()
    if missing:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {missing}"))


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
