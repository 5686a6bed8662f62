"""Options of the benchmarks, and where their numbers come from."""

import pytest

import harness


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--peer", help="a checkout of danijar/dreamerv3 to compare with")
    parser.addoption("--peer-python", help="a python that has its requirements")


@pytest.fixture(autouse=True)
def recorded(benchmark: object) -> None:
    """Puts commit and versions beside every result."""
    benchmark.extra_info.update(harness.provenance())  # type: ignore[attr-defined]
