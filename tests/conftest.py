"""Says what the machine can run; tests/gpu/conftest.py decides about the GPU tests."""

import importlib.util
import pathlib

import pytest
from global_settings import settings_put_back
from products import few_cases

TESTS = pathlib.Path(__file__).parent


def _needs_hypothesis(path: pathlib.Path) -> bool:
    return "import hypothesis" in (text := path.read_text()) or "from hypothesis" in text


# A machine without an index may lack hypothesis; the tests that do not use it still count.
HAS_HYPOTHESIS = importlib.util.find_spec("hypothesis") is not None
LEFT_OUT = [] if HAS_HYPOTHESIS else [path.name for path in TESTS.glob("test_*.py") if _needs_hypothesis(path)]
collect_ignore = LEFT_OUT


def pytest_report_header(config):
    # The checkout's package, or an installed one.
    package = pathlib.Path(importlib.util.find_spec("dash_attn").origin).parent
    lines = [f"dash_attn: {package}, kernels {'built' if list(package.glob('_C*.so')) else 'not built'}"]
    if LEFT_OUT:
        lines.append(f"LEFT OUT, for hypothesis is not installed: {', '.join(LEFT_OUT)}")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks slow what `few_cases` leaves out."""
    names = [item.nodeid for item in items if not item.get_closest_marker("slow")]
    few = few_cases(names)
    for item in items:
        if item.nodeid not in few:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _settings_put_back():
    """A test that leaves a global setting behind fails, instead of the tests after it."""
    with settings_put_back():
        yield
