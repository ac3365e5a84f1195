"""The layers of csrc/: each may include itself and those before it, only the last one torch, and
only the one for GPUs what comes with CUDA.  Shared memory and sockets do not know each other, nor
do collectives and messages; collectives reach other hosts through transport/transport.h only, and
one file knows which transport that is.  A file name is unique, and files (a header with its source)
do not include each other in a circle.

In ringreduce/, no modules import each other in a circle, and the observers of a job (observe/) only
those before them in the order of observe/__init__.py.  What makes groups knows no observer.
Tensors are made with a device and a dtype, whatever the program's defaults are."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
PACKAGE = CSRC.parent / "ringreduce"
LAYERS = ["base", "algorithm", "kernels", "transport", "transport/shm", "transport/tcp", "control",
          "bootstrap", "health", "collectives", "p2p", "epoch", "survival", "group", "cuda",
          "torch"]  # fmt: skip
APART = {("transport/tcp", "transport/shm"), ("p2p", "collectives"),
         ("collectives", "transport/tcp")}  # fmt: skip
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH_HEADERS = ("torch/", "ATen/", "c10/", "pybind11/", "Python.h")
# Functions of torch that take the default device and, of values without a dtype, the default one.
FACTORIES = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
             "logspace", "normal", "ones", "rand", "randn", "scalar_tensor", "tensor",
             "zeros"}  # fmt: skip
INTEGERS = {"randint", "randperm", "tril_indices", "triu_indices"}  # the default device only
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


def circle(sources: dict[str, str]) -> list[str]:
    """Files without suffixes that include each other in a circle, if any do.

    X_state.h, with the members of class X, counts as a part of X.
    """

    def part(path: str) -> str:
        return path.rpartition(".")[0].removesuffix("_state")

    graph: dict[str, set[str]] = {}
    for path, text in sources.items():
        headers = {part(name) for quote, name in INCLUDE.findall(text) if quote == '"'}
        own = part(path)
        graph.setdefault(own, set()).update(headers - {own})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def sources() -> dict[str, str]:
    return {str(path.relative_to(CSRC)): path.read_text() for path in sorted(CSRC.rglob("*.*"))}


def test_sources_include_only_earlier_layers() -> None:
    wrong = {}
    for path, text in sources().items():
        assert layer_of(path), f"{path} is in a folder that is no layer"
        if found := violations(layer_of(path), text):
            wrong[path] = found
    assert wrong == {}


def test_file_names_are_unique_and_includes_make_no_circle() -> None:
    names = sorted(Path(path).name for path in sources())
    assert [name for name in names if names.count(name) > 1] == []
    assert circle(sources()) == []


def test_one_file_knows_which_transport_there_is() -> None:
    named = re.compile(r"\bTcp(Fabric|Options|Transport)\b")
    outside = [path for path, text in sources().items() if named.search(text)]
    assert [path for path in outside if layer_of(path) != "transport/tcp"] == ["epoch/network.cc"]


def test_who_throws_a_timeout_is_in_one_list() -> None:
    listed = (CSRC / "base/wait_clock.h").read_text()
    passes_on = {"host_memory.cc"}  # what others have thrown
    makes = re.compile(r"(?<!== )(?<!case )Failure::kTimeout")
    throwers = {path.name for path in CSRC.rglob("*.cc") if makes.search(path.read_text())}
    named = {f"{stem}.cc" for stem in re.findall(r"\b(\w+)\.(?:h|cc)\b", listed)}
    assert throwers - passes_on <= named
    assert passes_on <= throwers


def test_a_circle_is_seen() -> None:
    both = {"p2p/a.h": "", "p2p/a.cc": '#include "p2p/b.h"\n', "p2p/b.cc": '#include "p2p/a.h"\n'}
    assert sorted(set(circle(both))) == ["p2p/a", "p2p/b"]
    assert circle({"p2p/a.h": "", "p2p/a.cc": '#include "p2p/a.h"\n'}) == []


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


# ---- ringreduce/


def modules() -> dict[str, str]:
    """The sources of the package's modules; those of packages by the packages' names."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    texts = [path.read_text() for path in paths]
    return {name.removesuffix(".__init__"): t for name, t in zip(names, texts, strict=True)}


def imported(text: str, known: set[str]) -> set[str]:
    """The modules that a source imports, wherever in it, but for types alone."""
    found = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{name.name}" for name in node.names}
            found |= parts & known or {node.module}
            if not parts <= known:
                found.add(node.module)
    return found & known


def import_circle(texts: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle, if any do.  The package itself has no code."""
    graph = {name: imported(text, set(texts)) - {name, "ringreduce"}
             for name, text in texts.items() if name != "ringreduce"}  # fmt: skip
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_make_no_circle() -> None:
    assert import_circle(modules()) == []
    wrong = {"ringreduce.a": "from ringreduce import b\n", "ringreduce.b": "import ringreduce.a\n"}
    assert import_circle(wrong) != []


def test_observers_import_only_those_before_them() -> None:
    texts = modules()
    wing = "ringreduce.observe."
    order = re.findall(r"(\w+)\.py", ast.get_docstring(ast.parse(texts[wing[:-1]])) or "")
    order.remove("backend")
    assert sorted(order) == sorted(n.removeprefix(wing) for n in texts if n.startswith(wing))
    known = {name: imported(text, set(texts)) for name, text in texts.items()}
    for at, name in enumerate(order):
        before = {wing + earlier for earlier in order[:at]}
        assert {n for n in known[wing + name] if n.startswith(wing)} <= before, name


# The rooms of the package, and those that each may use beside itself.  "users" are the modules at
# the root that programs import, "fronts" those there that stand for one of another room.
ROOMS = {
    "core": {"errors"},
    "errors": set(),
    "users": {"core", "errors"},
    "observe": {"core", "errors"},
    "compat": {"core", "errors", "users"},
    "tools": {"core", "errors", "users", "observe"},
    "fronts": {"observe", "tools"},
    "package": {"core", "errors", "users", "observe", "fronts"},
}
COMPAT = {"horovod", "integrations", "torchft"}
FRONTS = {"bench", "debug_server", "doctor", "plan", "recorder", "timeline", "top"}


def room_of(module: str) -> str:
    first = (*module.split("."), "")[1]
    if first in COMPAT or not first or first in FRONTS:
        return "compat" if first in COMPAT else "fronts" if first else "package"
    return first if first in ROOMS else "users"


def test_rooms_import_only_those_that_they_may_use() -> None:
    texts = modules()
    known = set(texts) - {"ringreduce", "ringreduce._build_info"}
    used = {(name, other) for name, text in texts.items() for other in imported(text, known)}
    wrong = [(name, other) for name, other in used
             if room_of(other) not in ROOMS[room_of(name)] | {room_of(name)}]  # fmt: skip
    assert wrong == []
    # `import ringreduce` loads no program but that of the timeline.
    fronts = {other for name, other in used if name == "ringreduce" and room_of(other) == "fronts"}
    assert fronts == {"ringreduce.timeline"}


def made_by_default(text: str) -> list[str]:
    """The calls that make tensors on the default device or of the default dtype."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        needed = {"device", "dtype"} if name in FACTORIES else {"device"}
        if name in FACTORIES | INTEGERS and None not in given and not needed <= given:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_tensors_are_made_with_device_and_dtype() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = {str(path): calls for path in paths if (calls := made_by_default(path.read_text()))}
    assert paths and found == {}


def test_a_tensor_made_by_default_is_seen() -> None:
    assert len(made_by_default("torch.empty(3)\ntorch.tensor([n], dtype=torch.int64)\n")) == 2
    assert len(made_by_default("torch.randperm(3)\ntorch.full((), 1, device=d)\n")) == 2
    text = "torch.ones(3, dtype=t, device=d)\ntorch.randint(3, (4,), **draw)\na.new_zeros(3)\n"
    assert made_by_default(text + "torch.randperm(9, device='cpu')\nnumpy.zeros(3)\n") == []


def test_numbers_do_not_follow_the_locale() -> None:
    """base/text.h reads and writes them with a decimal point in every program."""
    follows = re.compile(
        r"\b(strto(d|f|ld)|sto(d|f|ld)|atof)\(|%[-+ #0-9.*]*[aefgAEFG]\b|"
        r"std::[io]?stringstream\b"
    )
    wrong = {
        path: [match[0] for match in follows.finditer(text)]
        for path, text in sources().items()
        if path != "base/text.h" and follows.search(text)
    }
    assert wrong == {}
