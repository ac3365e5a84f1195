"""What CUDA's driver shows to a process of this user here: a JSON object, printed.

A program of its own, since a driver may hang or crash.  It asks libcuda by ctypes, so it sees what
the C++ programs will see (CUDA_VISIBLE_DEVICES, containers, a driver that does not start), and
needs no build.  "error" says why there is nothing to see.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
TIME_LIMIT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT


class Refused(Exception):
    pass


def look() -> dict[str, Any]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"error": "there is no libcuda.so.1, which comes with the driver"}

    def call(name: str, *arguments: Any) -> None:
        if result := getattr(cuda, name)(*arguments):
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(result, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown"
            raise Refused(f"{name} gives error {result}: {said}")

    def number(name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        call(name, ctypes.byref(value), *arguments)
        return value.value

    found: dict[str, Any] = {"driver": 0, "gpus": [], "peers": []}
    try:
        found["driver"] = number("cuDriverGetVersion")
        call("cuInit", 0)
        devices = [number("cuDeviceGet", i) for i in range(number("cuDeviceGetCount"))]
        for device in devices:
            name, uuid, memory = ctypes.create_string_buffer(128), (ctypes.c_ubyte * 16)(), 0
            call("cuDeviceGetName", name, 128, device)
            call("cuDeviceGetUuid", ctypes.byref(uuid), device)
            size = ctypes.c_size_t()
            call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
            memory = size.value >> 20
            hexes = bytes(uuid).hex()
            parts = (hexes[:8], hexes[8:12], hexes[12:16], hexes[16:20], hexes[20:])
            capability = [number("cuDeviceGetAttribute", which, device) for which in CAPABILITY]
            found["gpus"].append(
                {
                    "name": name.value.decode(errors="replace"),
                    "uuid": "GPU-" + "-".join(parts),
                    "memory_mib": memory,
                    "compute_cap": ".".join(map(str, capability)),
                    # A display hangs on it, or Windows does (WSL).
                    "ends_long_kernels": bool(number("cuDeviceGetAttribute", TIME_LIMIT, device)),
                }
            )
        found["peers"] = [
            [a == b or bool(number("cuDeviceCanAccessPeer", a, b)) for b in devices]
            for a in devices
        ]
    except Refused as error:
        found["error"] = str(error)
    return found


if __name__ == "__main__":
    json.dump(look(), sys.stdout)
