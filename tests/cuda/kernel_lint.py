"""Reads the code that nvcc made of the GPU kernels, and fails if it breaks a rule.

    python3 tests/cuda/kernel_lint.py --tools .venv-cuda/cuda/bin build/cuda
    python3 tests/cuda/kernel_lint.py --tools .venv-cuda/cuda/bin build/cuda --table

The C++ source says in which order memory is accessed.  This shows that the compilers kept it: nvcc
in the PTX, ptxas in the machine code (SASS) of every GPU that the build is for.  The rules:

  - no local memory, and no loads that bypass coherence (.nc, .CONSTANT);
  - a flag is stored with release and loaded with acquire, both at system scope.  In machine code a
    full barrier of memory comes right before the store, and CCTL.IVALL right after the load;
  - in the PTX, between the stores of packs and their flag, and between a flag and the loads of
    packs, there is a barrier of the block on every path; likewise between stores and loads of
    shared memory.  In the machine code only the number of barriers is compared;
  - registers, loads of metadata, and the number of flags and barriers keep to kernel_limits.txt.

It also fails if it did not read all of it: each family of kernels in both forms, and in the machine
code each function that cuobjdump counts registers of.  Then each mistake of SEEDED is put into the
text of a kernel, which the rules must refuse.  --table prints counts of two-shot and one-shot for
people instead.  Standard library only; cuobjdump, and nvdisasm that it calls, come with CUDA's
toolkit, and from pip.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAMILIES = {
    "allReduceKernelILNS0_15DeviceAlgorithmE0": "oneshot",
    "allReduceKernelILNS0_15DeviceAlgorithmE1": "twoshot",
    "allReduceKernelILNS0_15DeviceAlgorithmE2": "ring",
    "fixedKernelILNS0_15DeviceAlgorithmE0": "fixed-oneshot",
    "fixedKernelILNS0_15DeviceAlgorithmE1": "fixed-twoshot",
    "locatedKernel": "located",
    "llKernel": "ll",
    "nvlsKernelOf": "nvls",
    "directKernel": "direct",
    "copyInKernel": "copy-in",
    "ringStepKernel": "ring-step",
    "lookKernel": "look",
    "deliverKernel": "deliver",
    "gatherKernel": "gather",
    "locatedGatherKernel": "located-gather",
    "carryKernel": "carry",
}
MEASURED = "sm_90"  # the GPU that kernel_limits.txt counts registers and metadata for
# In the order of DType (csrc/base/dtype.h).
DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "bool",
]


@dataclass(frozen=True)
class Step:
    """An instruction; `guard` is its predicate, as in "@!P2"."""

    opcode: str
    operands: str = ""
    guard: str = ""


@dataclass(frozen=True)
class Kernel:
    symbol: str
    form: str  # PTX or SASS
    architecture: str
    steps: tuple[Step, ...]
    labels: dict[str, int] = field(hash=False)  # the step that a name or an address stands for
    registers: int = 0  # of SASS

    @property
    def family(self) -> str:
        return next((f for part, f in FAMILIES.items() if part in self.symbol), "")

    @property
    def dtype(self) -> str:
        found = re.search(r"DTypeE(\d+)E", self.symbol)
        return DTYPES[int(found[1])] if found else ""

    @property
    def ranks(self) -> int:
        """That it is compiled for; 0: any."""
        found = re.search(r"DTypeE\d+ELi(\d+)E", self.symbol)
        return int(found[1]) if found else 0

    def text(self) -> str:
        of = f"of {self.ranks}" if self.ranks else ""
        which = " ".join(filter(None, (self.family or self.symbol, of, self.dtype)))
        return f"{which}, {self.form} for {self.architecture}"

    def after(self, i: int) -> list[int]:
        """The steps that may follow step i."""
        step = self.steps[i]
        word = step.opcode.split(".")[0]
        if word in ("ret", "exit", "EXIT", "RET") and not step.guard:
            return []
        following = [i + 1] if i + 1 < len(self.steps) else []
        if word in ("bra", "BRA"):
            to = self.labels[step.operands.split(",")[-1].strip()]
            return [to, *following] if step.guard or "," in step.operands else [to]
        return following


# --- Reading --------------------------------------------------------------------------------------


def read_ptx(text: str) -> Iterator[Kernel]:
    """The kernels of one or more PTX modules."""
    text = re.sub(r"//[^\n]*", "", text)
    for module in re.split(r"(?=^\s*\.target\b)", text, flags=re.M):
        target = re.match(r"\s*\.target\s+(\w+)", module)
        for body in re.split(r"^\s*(?:\.visible\s+)?\.entry\s+", module, flags=re.M)[1:]:
            steps: list[Step] = []
            labels: dict[str, int] = {}
            symbol = re.match(r"\w+", body)
            if target is None or symbol is None:
                raise ValueError("a kernel in the PTX without a target or a name")
            for line in map(str.strip, body.splitlines()):
                if label := re.match(r"(\$\w+):$", line):
                    labels[label[1]] = len(steps)
                elif found := re.match(r"(@!?%\w+\s+)?([a-z][\w.]*)\s*(.*);$", line):
                    steps.append(Step(found[2], found[3], (found[1] or "").strip()))
            if not steps:
                raise ValueError(f"no instruction of {symbol[0]} is read in the PTX")
            yield Kernel(symbol[0], "PTX", target[1], tuple(steps), labels)


def read_sass(text: str, usage: str) -> Iterator[Kernel]:
    """The kernels that `cuobjdump -sass` and `-res-usage` tell about."""
    registers: dict[tuple[str, str], int] = {}
    architecture = symbol = ""
    for line in usage.splitlines():
        if found := re.match(r"\s*(?:arch = |code for )(sm_\w+)", line):
            architecture = found[1]
        elif found := re.match(r"\s*Function (\S+):", line):
            symbol = found[1]
        elif found := re.match(r"\s*REG:(\d+)", line):
            registers[symbol, architecture] = int(found[1])
    architecture = ""
    unseen = set(registers)
    for part in re.split(r"^\s*(?=Function : |code for sm_)", text, flags=re.M):
        if found := re.match(r"code for (sm_\w+)", part):
            architecture = found[1]
        found = re.match(r"Function : (\S+)", part)
        if not found:
            continue
        steps: list[Step] = []
        labels: dict[str, int] = {}
        for address, guard, opcode, operands in re.findall(
            r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", part, flags=re.M
        ):
            labels[hex(int(address, 16))] = len(steps)
            steps.append(Step(opcode, " ".join(operands.split()), guard.strip()))
        if (found[1], architecture) not in registers:
            raise ValueError(f"nothing is said of the registers of {found[1]} for {architecture}")
        if not steps:
            raise ValueError(f"no instruction of {found[1]} is read in SASS for {architecture}")
        unseen.discard((found[1], architecture))
        yield Kernel(
            found[1], "SASS", architecture, tuple(steps), labels, registers[found[1], architecture]
        )
    if unseen:
        symbol, architecture = min(unseen)
        raise ValueError(
            f"{len(unseen)} functions have registers but no SASS that is read, the first of them"
            f" {symbol} for {architecture}; does cuobjdump print SASS in another form?"
        )


def read_limits(path: Path) -> dict[str, dict[str, int]]:
    rows = [line.split() for line in path.read_text().splitlines() if line]
    names = next(row for row in rows if row[:2] == ["#", "family"])[2:]
    return {
        row[0]: dict(zip(names, map(int, row[1:]), strict=True)) for row in rows if row[0] != "#"
    }


# --- The rules of both forms ----------------------------------------------------------------------

Problems = Iterator[str]


def unordered(
    kernel: Kernel,
    starts: Callable[[Step], bool],
    ends: Callable[[Step], bool],
    bad: Callable[[Step], bool],
) -> Step | None:
    """A step that is `bad` on a path from one that `starts` without one that `ends` in between."""
    seen = set()
    todo = [n for i, step in enumerate(kernel.steps) if starts(step) for n in kernel.after(i)]
    while todo:
        i = todo.pop()
        if i in seen:
            continue
        seen.add(i)
        step = kernel.steps[i]
        if bad(step):
            return step
        if not ends(step):
            todo += kernel.after(i)
    return None


def against_limits(kernel: Kernel, limits: dict[str, int]) -> Problems:
    for name, count in counts(kernel).items():
        if name in ("registers", "metadata"):
            if count > limits[name] and kernel.architecture == MEASURED:
                yield f"takes {count} {name}, more than {limits[name]}"
        elif count < limits[name]:
            yield f"has {count} {name.replace('_', ' ')} of {limits[name]} that the protocol takes"


# --- PTX ------------------------------------------------------------------------------------------

ORDERS = r"\.(relaxed|acquire|release|acq_rel|volatile|mmio|sys|gpu|cta|cluster)\b"
PTX_STRONG = {
    "ld.acquire.sys.u64",
    "st.release.sys.u64",
    "ld.relaxed.gpu.u32",  # a rank's own words: its cause of failure
    "atom.acq_rel.gpu.cas.b32",
    "atom.acq_rel.gpu.add.u32",
}
# LL's words, which carry their own flags.
PTX_WORDS = {"st": "st.relaxed.sys.v2.u64", "ld": "ld.relaxed.sys.v2.u64"}
# The packs that the NVSwitch adds, and stores to all ranks.
PTX_SWITCH = {"st": "multimem.st.relaxed.sys.", "ld": "multimem.ld_reduce.relaxed.sys.add."}


def is_pack(step: Step, word: str) -> bool:
    """A weak access of 16 bytes: only elements are so wide, not the words that describe a call."""
    if step.opcode.startswith(PTX_SWITCH[word]):
        return True
    return bool(re.match(rf"{word}(\.global)?\.(v4\.[bfus]32|v2\.[bfus]64)$", step.opcode))


def is_barrier(step: Step) -> bool:
    return step.opcode.startswith(("bar.", "barrier.", "BAR."))


def lint_ptx(kernel: Kernel, limits: dict[str, int]) -> Problems:
    def is_release(step: Step) -> bool:
        return step.opcode.startswith("st.release.sys")

    for step in kernel.steps:
        if ".local" in step.opcode:
            yield f"uses local memory: {step.opcode}"
        if ".nc" in step.opcode:
            yield f"loads without coherence: {step.opcode}"
        strong = re.search(ORDERS, step.opcode)
        others = {"ll": PTX_WORDS, "nvls": PTX_SWITCH}.get(kernel.family, {})
        is_other = step.opcode.startswith(tuple(others.values()))
        if strong and step.opcode not in PTX_STRONG and not is_other:
            yield f"orders memory in another way than the protocol: {step.opcode}"
    yield from against_limits(kernel, limits)
    # A thread that claims the cause of a failure reports what it has stored itself.
    if unordered(
        kernel,
        lambda s: is_pack(s, "st"),
        lambda s: is_barrier(s) or s.opcode.startswith("atom."),
        is_release,
    ):
        yield "may store a flag after data of other threads without a barrier in between"
    # By ordinary addresses and by multicast ones: one is the alias of the other.
    if kernel.family == "nvls" and unordered(
        kernel,
        lambda s: is_pack(s, "st"),
        lambda s: s.opcode == "fence.proxy.alias" or s.opcode.startswith("atom."),
        is_release,
    ):
        yield "may store a flag after data without a fence between aliases"
    if loads := unordered(
        kernel,
        lambda s: s.opcode.startswith("ld.acquire.sys"),
        is_barrier,
        lambda s: is_pack(s, "ld"),
    ):
        yield f"may load data after a flag without a barrier in between: {loads.opcode}"
    if unordered(
        kernel,
        lambda s: s.opcode.startswith("st.shared"),
        is_barrier,
        lambda s: s.opcode.startswith("ld.shared"),
    ):
        yield "may load shared memory after a store to it without a barrier in between"


# --- Machine code ---------------------------------------------------------------------------------


def is_load(step: Step) -> bool:
    return bool(re.match(r"LDG?\.E", step.opcode))


def is_store(step: Step) -> bool:
    return bool(re.match(r"STG?\.E", step.opcode))


def is_flag(step: Step) -> bool:
    """Of 64 bits.  Of a load, ptxas leaves out the half that is not used (`look`)."""
    return ".STRONG.SYS" in step.opcode and bits(step) in ((32, 64) if is_load(step) else (64,))


def is_words(step: Step) -> bool:
    """LL's: two of 64 bits."""
    return ".STRONG.SYS" in step.opcode and bits(step) == 128


def bits(step: Step) -> int:
    found = re.search(r"\.(?:[US]?)(8|16|64|128|256)\b", step.opcode)
    return int(found[1]) if found else 32


def is_metadata(step: Step) -> bool:
    return is_load(step) and ".STRONG" not in step.opcode and bits(step) in (32, 64)


def lint_sass(kernel: Kernel, limits: dict[str, int]) -> Problems:
    steps = kernel.steps
    for i, step in enumerate(steps):
        if re.match(r"(LDL|STL)\b", step.opcode):
            yield f"uses local memory: {step.opcode}"
        if re.match(r"LD.*\.CONSTANT", step.opcode):
            yield f"loads without coherence: {step.opcode}"
        if ".STRONG.SYS" in step.opcode and (is_load(step) or is_store(step)):
            if is_words(step) and kernel.family in ("ll", "nvls"):  # or packs for all ranks
                continue
            if not is_flag(step) or (bits(step) == 32 and kernel.family != "look"):
                yield f"accesses a flag that is not of 64 bits: {step.opcode}"
        if is_store(step) and ".STRONG" in step.opcode and not is_flag(step):
            yield f"stores a flag at a smaller scope than the system: {step.opcode}"
        if is_load(step) and re.search(r"\.64\.STRONG\.(?!SYS)", step.opcode):
            yield f"loads a flag at a smaller scope than the system: {step.opcode}"
        if is_store(step) and is_flag(step) and not fenced(kernel, i):
            yield "stores a flag without MEMBAR at system scope right before it"
        if is_load(step) and is_flag(step) and not invalidated(kernel, i):
            yield "loads a flag without CCTL.IVALL right after it"
    yield from against_limits(kernel, limits)


def ends_line(step: Step) -> bool:
    return bool(re.match(r"(BRA|BRX|EXIT|CALL|RET|BAR|BSYNC|BREAK|WARPSYNC)\b", step.opcode))


def fenced(kernel: Kernel, i: int) -> bool:
    guard = kernel.steps[i].guard
    for step in reversed(kernel.steps[:i]):
        if re.match(r"MEMBAR\.(ALL|SC)\.SYS", step.opcode):
            return step.guard in ("", guard)
        if ends_line(step) or is_store(step) or re.match(r"ATOM|RED", step.opcode):
            return False
    return False


def invalidated(kernel: Kernel, i: int) -> bool:
    guard = kernel.steps[i].guard
    for step in kernel.steps[i + 1 :]:
        if step.opcode.startswith("CCTL.IVALL"):
            return step.guard in ("", guard)
        if ends_line(step) or is_load(step):
            return False
    return False


def counts(kernel: Kernel) -> dict[str, int]:
    """What kernel_limits.txt limits."""
    steps = kernel.steps
    barriers = sum(map(is_barrier, steps))
    if kernel.form == "PTX":
        opcodes = [step.opcode for step in steps]
        return {
            "flag_stores": opcodes.count("st.release.sys.u64"),
            "flag_loads": opcodes.count("ld.acquire.sys.u64"),
            "barriers": barriers,
            "word_stores": opcodes.count(PTX_WORDS["st"]),
            "word_loads": opcodes.count(PTX_WORDS["ld"]),
        }
    return {
        "registers": kernel.registers,
        "metadata": sum(map(is_metadata, steps)),
        "flag_stores": sum(is_store(s) and is_flag(s) for s in steps),
        "flag_loads": sum(is_load(s) and is_flag(s) for s in steps),
        "barriers": barriers,
        "word_stores": sum(is_store(s) and is_words(s) for s in steps),
        "word_loads": sum(is_load(s) and is_words(s) for s in steps),
    }


def lint(kernel: Kernel, limits: dict[str, dict[str, int]]) -> list[str]:
    if kernel.family not in limits:
        return ["has no row in kernel_limits.txt"]
    rules = lint_ptx if kernel.form == "PTX" else lint_sass
    return list(dict.fromkeys(rules(kernel, limits[kernel.family])))


def unread(kernels: list[Kernel], limits: dict[str, dict[str, int]]) -> Problems:
    """Rules that hold because there is nothing that could break them."""
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for kernel in kernels:
        seen[kernel.form, kernel.architecture].add(kernel.family)
    for (form, architecture), families in seen.items():
        if missing := [one for one in limits if one not in families]:
            yield f"{form} for {architecture} has no kernel of {', '.join(missing)}"


# --- Mistakes put in ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seed:
    """A mistake: the first step whose opcode matches is replaced, or left out."""

    what: str
    form: str
    opcode: str
    by: str | None  # None: left out
    says: str
    nth: int = 0
    family: str = "twoshot"


SEEDED = [
    Seed("a load from local memory", "PTX", r"ld\.u64", "ld.local.u64", "uses local memory"),
    Seed("a store to local memory", "SASS", r"STG?\.E\.", "STL.64", "uses local memory"),
    Seed("a load from local memory", "SASS", r"LDG?\.E\.64", "LDL.64", "uses local memory"),
    Seed(
        "a load by the read-only cache",
        "PTX",
        r"ld(\.global)?\.v4\.",
        "ld.global.nc.v4.f32",
        "without coherence",
    ),
    Seed(
        "a load by the read-only cache",
        "SASS",
        r"LDG?\.E\.128",
        "LDG.E.128.CONSTANT",
        "without coherence",
    ),
    Seed(
        "a release at the GPU's scope",
        "PTX",
        r"st\.release",
        "st.release.gpu.u64",
        "in another way",
    ),
    Seed(
        "an acquire at the GPU's scope",
        "PTX",
        r"ld\.acquire",
        "ld.acquire.gpu.u64",
        "in another way",
    ),
    Seed(
        "a relaxed store of a flag", "PTX", r"st\.release", "st.relaxed.sys.u64", "in another way"
    ),
    Seed("a relaxed load of a flag", "PTX", r"ld\.acquire", "ld.relaxed.sys.u64", "in another way"),
    Seed("a volatile store of a flag", "PTX", r"st\.release", "st.volatile.u64", "in another way"),
    Seed("a plain store of a flag", "PTX", r"st\.release", "st.u64", "flag stores"),
    Seed("a plain load of a flag", "PTX", r"ld\.acquire", "ld.u64", "flag loads"),
    Seed(
        "a flag stored at the GPU's scope",
        "SASS",
        r"STG?\.E.*STRONG\.SYS",
        "ST.E.64.STRONG.GPU",
        "smaller scope",
    ),
    Seed(
        "a flag loaded at the GPU's scope",
        "SASS",
        r"LDG?\.E.*STRONG\.SYS",
        "LD.E.64.STRONG.GPU",
        "smaller scope",
    ),
    Seed("a plain store of a flag", "SASS", r"STG?\.E.*STRONG\.SYS", "ST.E.64", "flag stores"),
    Seed("no MEMBAR before a flag", "SASS", r"MEMBAR\.\w+\.SYS", None, "without MEMBAR"),
    Seed(
        "a MEMBAR at the GPU's scope",
        "SASS",
        r"MEMBAR\.\w+\.SYS",
        "MEMBAR.ALL.GPU",
        "without MEMBAR",
    ),
    Seed("no CCTL.IVALL after a flag", "SASS", r"CCTL\.IVALL", None, "without CCTL"),
    Seed("a dropped barrier", "SASS", r"BAR\.", None, "barriers"),
    Seed("a dropped barrier after a call's arguments", "PTX", r"bar\.sync", None, "shared memory"),
    Seed(
        "LL's words in halves",
        "PTX",
        r"st\.relaxed",
        "st.relaxed.sys.v4.u32",
        "another way",
        0,
        "ll",
    ),
    Seed(
        "LL's words at the GPU's scope",
        "PTX",
        r"ld\.relaxed\.sys",
        "ld.relaxed.gpu.v2.u64",
        "another way",
        0,
        "ll",
    ),
    Seed("a plain store of LL's words", "PTX", r"st\.relaxed", "st.v2.u64", "word stores", 0, "ll"),
    Seed(
        "a plain load of LL's words", "PTX", r"ld\.relaxed\.sys", "ld.v2.u64", "word loads", 0, "ll"
    ),
    Seed(
        "a plain store of LL's words",
        "SASS",
        r"STG?\.E\.128\.STRONG",
        "ST.E.128",
        "word stores",
        0,
        "ll",
    ),
    Seed(
        "a plain load of LL's words",
        "SASS",
        r"LDG?\.E\.128\.STRONG",
        "LD.E.128",
        "word loads",
        0,
        "ll",
    ),
    Seed("no fence before a farewell", "PTX", r"fence\.proxy", None, "between aliases", 2, "nvls"),
    Seed("no fence after the copy in", "PTX", r"fence\.proxy", None, "between aliases", 0, "nvls"),
    Seed("no fence after the sums", "PTX", r"fence\.proxy", None, "between aliases", 1, "nvls"),
    Seed(
        "packs for all ranks at the GPU's scope",
        "PTX",
        r"multimem\.st",
        "multimem.st.relaxed.gpu.v4.f32",
        "another way",
        0,
        "nvls",
    ),
    Seed(
        "LL's words one by one",
        "SASS",
        r"STG?\.E\.128\.STRONG",
        "ST.E.64.STRONG.SYS",
        "without MEMBAR",
        0,
        "ll",
    ),
]


def seeded(kernel: Kernel, seed: Seed) -> Kernel | None:
    """The kernel with this mistake; None if it has no such step."""
    places = [i for i, s in enumerate(kernel.steps) if re.match(seed.opcode, s.opcode)]
    if kernel.form != seed.form or len(places) <= seed.nth:
        return None
    steps = list(kernel.steps)
    at = places[seed.nth]
    # A step that does nothing instead: labels stay where they are.
    steps[at] = replace(steps[at], opcode=seed.by) if seed.by else Step("nop")
    return replace(kernel, steps=tuple(steps))


def every_barrier(kernel: Kernel) -> Iterator[Seed]:
    """Each barrier of a kernel's PTX left out, one at a time."""
    count = sum(s.opcode.startswith("bar.") for s in kernel.steps)
    for n in range(count):
        yield Seed(f"barrier {n} dropped", "PTX", r"bar\.", None, "barriers", n)


def try_seeds(kernels: list[Kernel], verbose: bool) -> list[str]:
    """Puts every mistake into some kernels of float32; returns what the rules did not notice.

    A compiler may make more flags or barriers than the limits ask for.  So the limits are here what
    the kernel has, and one less is a mistake.
    """
    missed = []
    tried = set()
    for kernel in kernels:
        if kernel.family not in ("twoshot", "ll", "nvls") or kernel.dtype != "float32":
            continue
        if kernel.family == "nvls" and not any("multimem" in s.opcode for s in kernel.steps):
            continue  # for GPUs that have no multicast addresses
        if kernel.family == "twoshot":
            tried.add((kernel.form, kernel.architecture))
        own = counts(kernel)
        barriers = every_barrier(kernel) if kernel.form == "PTX" else ()
        seeds = (s for s in SEEDED if (s.form, s.family) == (kernel.form, kernel.family))
        for seed in (*seeds, *barriers):
            mutant = seeded(kernel, seed)
            found = lint(mutant, {kernel.family: own}) if mutant else []
            if not any(seed.says in one for one in found):
                missed.append(f"{kernel.text()}: {seed.what} is not noticed")
            elif verbose:
                print(f"{seed.what}: {kernel.text()} {found[0]}")
        tight = {kernel.family: own | {"registers": kernel.registers - 1, "metadata": 0}}
        measured = (kernel.family, kernel.form, kernel.architecture) == (
            "twoshot",
            "SASS",
            MEASURED,
        )
        if measured and len(lint(kernel, tight)) != 2:
            missed.append(f"{kernel.text()}: smaller limits are not noticed")
    for form, architecture in sorted({(k.form, k.architecture) for k in kernels} - tried):
        missed.append(f"{form} for {architecture} has no two-shot kernel to put mistakes into")
    return missed


# --- The table ------------------------------------------------------------------------------------


def in_flight(kernel: Kernel) -> set[int]:
    """How many 128-bit loads are under way when one of them is first computed with."""
    loads: set[int] = set()
    waiting: set[str] = set()
    for step in kernel.steps:
        used = set(re.findall(r"\bR\d+", step.operands))
        if is_load(step):
            used -= set(re.findall(r"^R\d+", step.operands))
        if used & waiting:
            if not is_store(step):  # else it is a copy
                loads.add(len(waiting) // 4)
            waiting.clear()
        if is_load(step) and bits(step) == 128:
            first = re.match(r"R(\d+)", step.operands)
            if first:
                waiting |= {f"R{int(first[1]) + n}" for n in range(4)}
        elif re.match(r"(EXIT|RET)\b", step.opcode):
            waiting.clear()
    return loads


def table(kernels: list[Kernel]) -> Iterator[str]:
    """Loads in flight depend on the slots, which are smaller the more ranks there are.

    3 stands for the ranks that no kernel is compiled for.
    """
    tuning = (HERE.parent.parent / "csrc/cuda/kernels/gpu_tuning.h").read_text()
    budget = re.search(r"kPushBudget = size_t\{(\d+)\} << 20", tuning)
    threads = re.search(r"kThreads = (\d+)", tuning)
    if budget is None or threads is None:
        raise ValueError("gpu_tuning.h gives kPushBudget or kThreads in another form")
    yield "| kernel | P | packs a thread | loads in flight | registers | metadata loads |"
    yield "|---|--:|--:|--:|--:|--:|"
    for kernel in sorted(kernels, key=lambda k: (k.family, k.dtype != "float32", k.ranks)):
        if kernel.form != "SASS" or kernel.architecture != MEASURED:
            continue
        if not kernel.family.endswith(("oneshot", "twoshot", "located")):
            continue
        if kernel.dtype not in ("float32", "bfloat16"):
            continue
        # As tune() shares out the budget: 32 channels, two kinds of slots, four sets.
        ranks = kernel.ranks or 3
        part = min((int(budget[1]) << 20) // (32 * 2 * 4 * ranks), 64 << 10)
        packs = part // (int(threads[1]) * 16)
        loads = max(n for n in in_flight(kernel) | {1} if n <= max(packs, 1) * max(kernel.ranks, 1))
        metadata = sum(map(is_metadata, kernel.steps))
        yield (
            f"| {kernel.family}, {kernel.dtype} | {kernel.ranks or 'any'} | {packs} | {loads} "
            f"| {kernel.registers} | {metadata} |"
        )


# --- The program ----------------------------------------------------------------------------------


def read_build(build: Path, tools: Path) -> list[Kernel]:
    tool = shutil.which("cuobjdump", path=tools) or shutil.which("cuobjdump")
    if tool is None:
        raise ValueError(
            f"there is no cuobjdump in {tools} or PATH; pip's is nvidia-cuda-cuobjdump, and that of"
            " nvdisasm, which it calls, nvidia-cuda-nvdisasm"
        )
    objects = sorted(build.glob("CMakeFiles/ringreduce_cuda.dir/**/kernels*.cu.o"))
    if not objects:
        raise ValueError("no objects of kernels in it; has it been built?")
    kernels: list[Kernel] = []
    for one in objects:

        def run(option: str, of: Path = one) -> str:
            done = subprocess.run([tool, option, of], capture_output=True, text=True)
            if done.returncode:
                raise ValueError(
                    f"cuobjdump {option} {of.name} ended with {done.returncode}:"
                    f" {done.stderr.strip()} (it calls nvdisasm, which has to be beside it or in"
                    " PATH; pip's is nvidia-cuda-nvdisasm)"
                )
            return done.stdout

        of_one = [*read_ptx(run("-ptx")), *read_sass(run("-sass"), run("-res-usage"))]
        symbols: dict[tuple[str, str], set[str]] = defaultdict(set)
        for kernel in of_one:
            symbols[kernel.form, kernel.architecture].add(kernel.symbol)
        every = set().union(*symbols.values())
        for form in {"PTX", "SASS"} - {form for form, _ in symbols}:
            raise ValueError(f"no {form} is read in {one.name}")
        for (form, architecture), seen in symbols.items():
            if lacking := every - seen:
                raise ValueError(f"{one.name} has no {form} of {min(lacking)} for {architecture}")
        kernels += of_one
    return kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("build", type=Path, help="the build folder")
    parser.add_argument("--tools", type=Path, default=Path(), help="the folder of cuobjdump")
    parser.add_argument("--table", action="store_true", help="print counts of push kernels instead")
    parser.add_argument("--seeds", action="store_true", help="print what is said of each mistake")
    arguments = parser.parse_args()
    try:
        limits = read_limits(HERE / "kernel_limits.txt")
        kernels = read_build(arguments.build, arguments.tools)
    except (OSError, ValueError) as error:
        print(f"No kernels read of {arguments.build}: {error}", file=sys.stderr)
        return 2
    if arguments.table:
        print("\n".join(table(kernels)))
        return 0
    broken = 0
    for problem in unread(kernels, limits):
        print(f"Not all kernels are read: {problem}", file=sys.stderr)
        broken += 1
    for kernel in kernels:
        for problem in lint(kernel, limits):
            print(f"{kernel.text()}: {problem}", file=sys.stderr)
            broken += 1
    forms: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        forms[f"{kernel.form} for {kernel.architecture}"] += 1
    told = ", ".join(f"{count} in {form}" for form, count in forms.items())
    print(f"Kernels: {told}; {broken} rules broken")
    missed = [] if broken else try_seeds(kernels, arguments.seeds)
    print("\n".join(missed), file=sys.stderr, end="\n" if missed else "")
    return 1 if broken or missed else 0


if __name__ == "__main__":
    sys.exit(main())
