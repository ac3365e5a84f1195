"""CONTRIBUTING.md's recipe for a new collective, followed in a copy of the sources."""

import os
import shutil
import subprocess
from pathlib import Path

import hosts
import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "build/extension/libringreduce_core.a"
# The layers whose headers or tables change; the others come from the core that is built.
LAYERS = ("base", "transport/tcp", "control", "health", "collectives", "epoch", "survival", "group")

# File, and what to put before which text of it.
SHIFT = {
    "base/op_signature.h": {
        "};\n\nstruct KindInfo": "  kShift,\n",
        "};\nconstexpr const KindInfo&": '    KindInfo{"shift"},\n',
    },
    "collectives/collectives.h": {
        "// ---- all of them": "struct Shift {\n  static constexpr Kind kKind = Kind::kShift;\n"
        "  const void* input;\n  void* output;\n  size_t count;\n  DType dtype;\n};\n"
        "void shift(OverMemory&, const Shift&);\n"
        "void shift(OverStreams&, const Shift&);\n",
        "AllReduce, Reduce, ReduceScatter,": "Shift, ",
        "    void operator()(const AllReduce&": "void operator()(const Shift& s) { shift(w, s); }",
    },
    "collectives/shift.cc": {
        "": """#include "base/bytes.h"
#include "collectives/collectives.h"
#include "collectives/shared_memory.h"
#include "collectives/over_streams.h"
namespace ringreduce {
void shift(OverMemory& c, const Shift& s) {
  const size_t bytes = s.count * sizeOf(s.dtype);
  const uint64_t step = c.exchange.begin(1);
  copyBytes(c.exchange.acquire(step), s.input, bytes);
  c.exchange.post(step);
  copyBytes(s.output, c.exchange.peek(c.previousRank(), step), bytes);
  c.exchange.release(step);
}
void shift(OverStreams& c, const Shift& s) {
  const int previous = (c.rank + c.size - 1) % c.size;
  c.transport.expect(previous, s.output, s.count * sizeOf(s.dtype));
  c.transport.send((c.rank + 1) % c.size, s.input, s.count * sizeOf(s.dtype));
  c.transport.peek(previous);
  c.transport.release(previous);
}
}
"""
    },
}
PROGRAM = """#include "check.h"
#include "ranks.h"
using namespace ringreduce;
TEST(each_rank_gets_the_input_of_the_one_before_it) {
  ranks::inGroup(3, [](Group& group) {
    int mine = group.rank(), theirs = -1;
    group.run({Shift{&mine, &theirs, 1, DType::kInt32}});
    CHECK_EQ(theirs, (mine + 2) % 3);
    const auto differs = [&] {
      group.run(mine ? Operation{Barrier{}} : Operation{Shift{&mine, &theirs, 1, DType::kInt32}});
      group.run({Barrier{}});
    };
    CHECK(ranks::failureOf(differs, "shift #1 (int32, 1 element)") == Failure::kMismatch);
  });
}
"""


@pytest.mark.nightly  # it compiles the core
def test_a_new_collective_is_three_files_of_the_core(tmp_path):
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for name, insertions in SHIFT.items():
        path = tmp_path / "csrc" / name
        text = path.read_text() if path.exists() else ""
        for before, new in insertions.items():
            assert not text or text.count(before) == 1, (name, before)
            text = text.replace(before, new + before)
        path.write_text(text)
    assert len(SHIFT) == 3
    units = {"program": PROGRAM}
    for layer in LAYERS:
        files = sorted((tmp_path / "csrc" / layer).glob("*.cc"))
        units[layer.replace("/", "_")] = "".join(f'#include "{file}"\n' for file in files)
    objects = []
    for name, text in units.items():
        source = tmp_path / f"{name}.cc"
        source.write_text(text)
        objects.append(source.with_suffix(".o"))
        command = [hosts.compiler(), "-std=c++20", "-O0", "-w", '-DRINGREDUCE_VERSION="0"', "-c"]
        includes = ["-I", tmp_path / "csrc", "-I", ROOT / "tests/cpp"]
        subprocess.run([*command, *includes, source, "-o", objects[-1]], check=True)
    program = tmp_path / "program"
    subprocess.run([hosts.compiler(), *objects, CORE, "-lpthread", "-o", program], check=True)
    for wire in ("auto", "tcp"):
        subprocess.run(program, check=True, env=os.environ | {"RINGREDUCE_WIRE": wire}, timeout=100)
