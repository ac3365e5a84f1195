"""Fixtures of the Python tests.  RINGREDUCE_TEST_FULL=1 runs the long variants."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

# One thread a rank: the machine's cores belong to the ranks, and a process without further threads
# can be forked.  Set before torch or numpy is imported.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# A shell without job control starts its background jobs with Ctrl-C ignored, and so would every
# process be that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from pool import Pool, World  # noqa: E402

MakeWorld = Callable[..., World]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs whole programs; not part of `make test`")
    config.addinivalue_line(
        "markers", "nightly: is long and rarely fails; part of `make nightly` only"
    )
    config.addinivalue_line("markers", "root: needs to be root (other users, network namespaces)")


# Files that take longest, the longest first: several run at a time, and one of these alone at the
# end would be waited for.
LONG = (
    "test_elastic",
    "test_horovod_elastic",
    "test_default",
    "test_recorder",
    "test_launchers",
    "test_membership",
    "test_lifecycle",
    "test_tutorials",
    "test_examples",
    "test_diloco_losses",
    "test_gpu_check",
    "test_timeline",
    "test_metrics",
    "test_survive",
    "test_diloco",
    "test_init",
    "test_bits",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*LONG, item.path.stem).index(item.path.stem))
    for item in items:
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether to run the long variants."""
    return os.environ.get("RINGREDUCE_TEST_FULL", "0") not in ("", "0")


@pytest.fixture(scope="session")
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    preload = ["torch.multiprocessing", "torch.utils.data", "hypothesis", "pytest", "ringreduce"]
    # What a test module needs that is slow to import, once and not once a rank.
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    preload += sorted({name for m in modules for name in getattr(m, "PRELOAD", ())})
    ranks = Pool(Path(tmp_path_factory.mktemp("ranks")), preload)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def world() -> MakeWorld:
    """world(size, timeout=60.0, ALGORITHM="ring", ...): a group of ringreduce.

    Names in capitals are environment variables without their RINGREDUCE_.
    """

    def make(size: int, timeout: float = 60.0, **options: str) -> World:
        env = tuple(sorted((f"RINGREDUCE_{name}", value) for name, value in options.items()))
        return World(size, "ringreduce", env, timeout)

    return make
