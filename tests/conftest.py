"""What every test starts from: one thread, one seed, no hub, no window, a cache folder of its own."""

import os
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it
os.environ["MPLBACKEND"] = "Agg"

import hypothesis
import pytest
import torch

OURS, USERS = TemporaryDirectory(), os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
os.environ["XDG_CACHE_HOME"] = OURS.name
os.environ.setdefault("MPLCONFIGDIR", os.path.join(USERS, "matplotlib"))  # to look for fonts anew takes seconds

torch.set_num_threads(1)  # a sum's order, and so its bits, depends on the threads
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="without CUDA, fail gpu tests, not skip them")
    parser.addoption("--long", action="store_true", help="also the long tests: whole tables, fuzz and simulations")


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """The same ids in every process, as xdist needs: no address of a function, no order of a set."""
    if callable(val) and not isinstance(val, type):
        return getattr(val, "__name__", argname)
    if isinstance(val, set | frozenset):
        return f"{argname}-of-{len(val)}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        missing = pytest.fail if item.config.getoption("--require-gpu") else pytest.skip
        missing("no CUDA device")
    if item.get_closest_marker("long") and not item.config.getoption("--long"):
        pytest.skip("long: run with --long")


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether a test that has a short and a long form takes the long one."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
