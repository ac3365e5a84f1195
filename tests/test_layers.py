"""The layers of csrc/: each may include itself and those before it, only the last one torch, and
only the one for GPUs what comes with CUDA."""

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
LAYERS = ["base", "plan", "reduce", "codec", "wire", "net", "p2p", "collective", "group", "cuda",
          "torch"]  # fmt: skip
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH_HEADERS = ("torch/", "ATen/", "c10/", "pybind11/", "Python.h")
CUDA_HEADERS = ("cuda", "cooperative_groups", "nccl", "cub/", "thrust/")


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
        target = header.split("/")[0]
        if target not in LAYERS or LAYERS.index(target) > LAYERS.index(layer):
            found.append(f'"{header}"')
    return found


def test_sources_include_only_earlier_layers() -> None:
    wrong = {}
    for path in CSRC.rglob("*"):
        if path.suffix in (".h", ".cc", ".cuh", ".cu"):
            layer = path.relative_to(CSRC).parts[0]
            assert layer in LAYERS, f"{path} is in a folder that is no layer"
            if found := violations(layer, path.read_text()):
                wrong[str(path)] = found
    assert wrong == {}


def test_a_wrong_include_is_seen() -> None:
    text = '#include <vector>\n#include "base/dtype.h"\n#include "group/group.h"\n'
    assert violations("wire", text) == ['"group/group.h"']
    assert violations("wire", "#include <torch/torch.h>\n") == ["<torch/torch.h>"]
    assert violations("wire", '#include "segment.h"\n') == ['"segment.h"']
    assert violations("torch", '#include <torch/torch.h>\n#include "group/group.h"\n') == []
    assert violations("torch", "#include <cuda_runtime_api.h>\n") == ["<cuda_runtime_api.h>"]
    assert violations("cuda", '#include <cuda.h>\n#include "group/group.h"\n') == []
    assert violations("group", '#include "cuda/ring.h"\n') == ['"cuda/ring.h"']
