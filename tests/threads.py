"""Threads of one rank, for what several do at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


def in_threads(
    jobs: Sequence[Callable[[], object]],
    timeout: float = 40.0,
    at_error: Callable[[], object] = lambda: None,
) -> None:
    """Runs all at the same time, a thread each; raises the first error.

    `at_error` is called after each error, for what the other threads may then wait for in vain.
    """
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)
            at_error()

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
