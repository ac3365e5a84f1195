"""The layers of csrc/: each may include itself and those before it, only the last one torch, and
only the one for GPUs what comes with CUDA.  Shared memory and sockets do not know each other, nor
do collectives and messages; collectives reach other hosts through transport/transport.h only."""

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
LAYERS = ["base", "algorithm", "kernels", "transport", "transport/shm", "transport/tcp",
          "bootstrap", "health", "collectives", "p2p", "group", "cuda", "torch"]  # fmt: skip
APART = {("transport/tcp", "transport/shm"), ("p2p", "collectives"),
         ("collectives", "transport/tcp")}  # fmt: skip
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH_HEADERS = ("torch/", "ATen/", "c10/", "pybind11/", "Python.h")
CUDA_HEADERS = ("cuda", "cooperative_groups", "nccl", "cub/", "thrust/")


def layer_of(path: str) -> str:
    """The layer of a file: the folder or folders at the start of its path; "" if it is in none."""
    folders = [layer for layer in LAYERS if path.startswith(layer + "/")]
    return max(folders, key=len, default="")


def violations(layer: str, text: str) -> list[str]:
    """The includes in `text`, a source of `layer`, that the layer may not have."""
    found = []
    for quote, header in INCLUDE.findall(text):
        if quote == "<":
            if layer != "torch" and header.startswith(TORCH_HEADERS):
                found.append(f"<{header}>")
            if layer != "cuda" and header.startswith(CUDA_HEADERS):
                found.append(f"<{header}>")
            continue
        target = layer_of(header)
        upward = target == "" or LAYERS.index(target) > LAYERS.index(layer)
        if upward or (layer, target) in APART:
            found.append(f'"{header}"')
    return found


def test_sources_include_only_earlier_layers() -> None:
    wrong = {}
    for path in CSRC.rglob("*"):
        if path.suffix in (".h", ".cc", ".cuh", ".cu"):
            layer = layer_of(str(path.relative_to(CSRC)))
            assert layer, f"{path} is in a folder that is no layer"
            if found := violations(layer, path.read_text()):
                wrong[str(path)] = found
    assert wrong == {}


def test_a_wrong_include_is_seen() -> None:
    text = '#include <vector>\n#include "base/dtype.h"\n#include "group/group.h"\n'
    assert violations("transport/shm", text) == ['"group/group.h"']
    assert violations("transport/shm", "#include <torch/torch.h>\n") == ["<torch/torch.h>"]
    assert violations("transport/shm", '#include "segment.h"\n') == ['"segment.h"']
    text = '#include "transport/wait_guard.h"\n#include "transport/shm/page.h"\n'
    assert violations("transport/tcp", text) == ['"transport/shm/page.h"']
    text = '#include "collectives/reduction.h"\n'
    assert violations("p2p", text) == ['"collectives/reduction.h"']
    text = '#include "transport/transport.h"\n#include "transport/tcp/stream.h"\n'
    assert violations("collectives", text) == ['"transport/tcp/stream.h"']
    assert violations("torch", '#include <torch/torch.h>\n#include "group/group.h"\n') == []
    assert violations("torch", "#include <cuda_runtime_api.h>\n") == ["<cuda_runtime_api.h>"]
    assert violations("cuda", '#include <cuda.h>\n#include "group/group.h"\n') == []
    assert violations("group", '#include "cuda/ring.h"\n') == ['"cuda/ring.h"']
