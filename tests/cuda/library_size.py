"""Prints the size of the GPU library, and fails if its kernels are larger than they may be.

    python3 tests/cuda/library_size.py build/cuda

The kernels are nearly all of it: machine code of each GPU that the build is for, and PTX of the
lowest and the highest (cmake/cuda.cmake).  The limit is for kernels that nvcc 13 compressed; an
older one compresses less, and then the size is only printed.  Standard library only.
"""

import re
import sys
from pathlib import Path

# Bytes of one, and of the launches on the host.  What nvcc 13.0 makes for sm_90, and a tenth more;
# of machine code 15 % more, since sm_100 takes 12 % more.  A change that needs more raises the
# limit, and says what for.
MOST_MACHINE_CODE = 2_610_000
MOST_PTX = 1_270_000
MOST_ON_HOST = 300_000


def main(build: Path) -> int:
    objects = sorted(build.glob("CMakeFiles/ringreduce_cuda.dir/**/kernels*.cu.o"))
    log = build / "ptxas.log"
    gpus = set(re.findall(r"' for '(sm_\w+)'", log.read_text())) if log.exists() else set()
    if not objects or not gpus:
        print(f"No size of the library in {build}: it has not been built", file=sys.stderr)
        return 2
    size = sum(one.stat().st_size for one in objects)
    most = len(gpus) * MOST_MACHINE_CODE + min(len(gpus), 2) * MOST_PTX + MOST_ON_HOST
    limited = "--compress-mode=size" in (build / "build.ninja").read_text()
    library = (build / "libringreduce_cuda.a").stat().st_size
    machines = " ".join(sorted(gpus))
    print(
        f"The GPU library: {library:,} bytes, of which kernels for {machines} {size:,}"
        + f" (limit {most:,})" * limited
    )
    if limited and size > most:
        print("The kernels are larger than tests/cuda/library_size.py allows", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
