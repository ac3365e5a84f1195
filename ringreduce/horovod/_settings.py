"""What Horovod's environment variables set here.

Horovod's names are kept, so that job scripts stay as they are.  Variables that choose or tune its
own libraries (HOROVOD_GPU_OPERATIONS, HOROVOD_NUM_NCCL_STREAMS, ...) have no meaning here.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of the coordinators; rank 0's hold for all ranks.

    Attributes:
        fusion_bytes: HOROVOD_FUSION_THRESHOLD: the most bytes of a bucket; 25 MiB, as DDP's.
        cycle_time: HOROVOD_CYCLE_TIME, given in milliseconds: how long an operation waits for more
            that could go with it, unless a thread waits for it; in seconds; 1 ms.
        cache_capacity: HOROVOD_CACHE_CAPACITY: names whose requests are remembered; 1024.
        stall_seconds: HOROVOD_STALL_CHECK_TIME_SECONDS: an operation that waits for longer is
            logged, with the ranks that it waits for; 60 s.  0, so that none is, if
            HOROVOD_STALL_CHECK_DISABLE is set.
        stall_shutdown_seconds: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: and after this time all ranks
            raise; 0: never.
    """

    fusion_bytes: int = 25 << 20
    cycle_time: float = 1e-3
    cache_capacity: int = 1024
    stall_seconds: float = 60.0
    stall_shutdown_seconds: float = 0.0

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> "Settings":
        """Raises ValueError that names the variable."""

        def number(name: str, default: float, unit: float = 1.0) -> float:
            text = environment.get(name, "").strip()
            if not text:
                return default
            try:
                value = float(text)
            except ValueError:
                raise ValueError(f"{name}={text} is not a number") from None
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={text} must be 0 or more")
            return value * unit

        def whole(name: str, default: int) -> int:
            value = float(number(name, default))
            if not value.is_integer():
                raise ValueError(f"{name}={environment[name]} is not a whole number")
            return int(value)

        disabled = environment.get("HOROVOD_STALL_CHECK_DISABLE", "0").strip().lower()
        stall = number("HOROVOD_STALL_CHECK_TIME_SECONDS", Settings.stall_seconds)
        return Settings(
            fusion_bytes=whole("HOROVOD_FUSION_THRESHOLD", Settings.fusion_bytes),
            cycle_time=number("HOROVOD_CYCLE_TIME", Settings.cycle_time, 1e-3),
            cache_capacity=whole("HOROVOD_CACHE_CAPACITY", Settings.cache_capacity),
            stall_seconds=stall if disabled in ("", "0", "false") else 0.0,
            stall_shutdown_seconds=number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        )
