"""The six ways in which threads of GPUs communicate, under the memory model of PTX.

csrc/cuda/kernels communicates between threads in seven shapes, which stand below in the code's
instructions.  For each the solver (cuda/ptx_model.py) must find no execution with a wrong outcome,
and one for each mutant.  Litmus tests with known verdicts come first: they check the model.

The small case covers the large one:

  - Two ranks.  Every slot and every flag belongs to an ordered pair of ranks, and the argument for
    a slot uses flags of that pair alone (push.h, pipe.h).  Threads of other ranks add nothing that
    could take an order away.  The words of one GPU are shared by all blocks of a rank: there
    blocks are added until each of their roles is there.
  - Two threads a block: one that publishes or observes, and one that only meets it at barriers.
    Each thread writes a word of every slot and reads all words, so every pair of roles conflicts.
  - Some steps more than there are slots: steps are alike, so what holds for one reuse of a slot
    holds for the next.
  - A wait is its last look.  A receiver of a pipe that need not look, since it has seen enough
    before, is a case of its own.

The direct schedule waits in streams, not in kernels, and is no subject of PTX.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ptx_model import Thread, can_happen

# --- Litmus tests ---------------------------------------------------------------------------------


def threads(text: str, places: str) -> list[Thread]:
    """Threads in columns, split by "|"; places as "a.x b.y": GPU and block of each."""
    rows = [row.split("|") for row in text.strip().splitlines()]
    columns = [[c.strip() for c in column if c.strip()] for column in zip(*rows, strict=True)]
    where = [place.split(".") for place in places.split()]
    return [Thread(g, b, tuple(code)) for (g, b), code in zip(where, columns, strict=True)]


MP = """
    st [x], 1              | ld.acquire.sys r0, [y]
    st.release.sys [y], 1  | ld r1, [x]
"""
SB = """
    st.relaxed.sys [x], 1  | st.relaxed.sys [y], 1
    fence.sc.sys           | fence.sc.sys
    ld.relaxed.sys r0, [y] | ld.relaxed.sys r1, [x]
"""
LB = """
    ld.relaxed.sys r0, [x] | ld.acquire.sys r1, [y]
    st.release.sys [y], 1  | st.relaxed.sys [x], 1
"""
THIN_AIR = """
    ld.relaxed.sys r0, [x]      | ld.relaxed.sys r1, [y]
    @r0=1 st.relaxed.sys [y], 1 | @r1=1 st.relaxed.sys [x], 1
"""
IRIW = """
    st.relaxed.sys [x], 1 | ld.relaxed.sys r0, [x] | ld.relaxed.sys r2, [y] | st.relaxed.sys [y], 1
                          | fence.sc.sys           | fence.sc.sys           |
                          | ld.relaxed.sys r1, [y] | ld.relaxed.sys r3, [x] |
"""
CORR = """
    st.relaxed.sys [x], 1 | ld.relaxed.sys r0, [x]
                          | ld.relaxed.sys r1, [x]
"""
COWR = """
    st.relaxed.sys [x], 1  | st.relaxed.sys [x], 2
    ld.relaxed.sys r0, [x] | ld.relaxed.sys r2, [x]
    ld.relaxed.sys r1, [x] | ld.relaxed.sys r3, [x]
"""
WRC = """
    st.relaxed.sys [x], 1 | ld.relaxed.sys r0, [x] | ld.acquire.sys r1, [y]
                          | st.release.sys [y], 1  | ld.relaxed.sys r2, [x]
"""
ISA2 = """
    st [x], 1             | ld.acquire.gpu r0, [y] | ld.acquire.sys r1, [z]
    st.release.gpu [y], 1 | st.release.sys [z], 1  | ld r2, [x]
"""
# What the last of two writes is, is what a thread reads that comes after both.
TWO_WRITES = """
    st.relaxed.sys [x], 1 | st.relaxed.sys [y], 1 |
    fence.sc.sys          | fence.sc.sys          |
    st.relaxed.sys [y], 2 | st.relaxed.sys [x], 2 |
    task.end k            | task.end k            | task.begin k
                          |                       | ld r0, [x]
                          |                       | ld r1, [y]
"""
S = """
    st [x], 2             | ld.acquire.sys r0, [y] |
    st.release.sys [y], 1 | st [x], 1              |
    task.end k            | task.end k             | task.begin k
                          |                        | ld r1, [x]
"""
BARRIER = """
    st [x], 1  | bar.sync b
    bar.sync b | ld r0, [x]
"""
ADD = """
    atom.relaxed.sys.add r0, [x] | atom.relaxed.sys.add r1, [x]
"""
CAS = """
    atom.relaxed.sys.cas r0, [x], 1 | atom.relaxed.sys.cas r1, [x], 2
"""
# A release that other threads' read-modify-writes carry on.
CHAIN = """
    st [x], 1                    | atom.relaxed.sys.add r0, [y] | ld.acquire.sys r1, [y]
    atom.release.sys.add q, [y]  |                              | ld r2, [x]
"""
TWO, ONE_GPU, THREE, FOUR = "a.x b.y", "a.x a.y", "a.x b.y c.z", "a.x b.y c.z d.w"


def without(text: str, instruction: str) -> str:
    """Without an instruction, in each thread."""
    return text.replace(instruction, " " * len(instruction))


def relaxed(text: str) -> str:
    return text.replace("release", "relaxed").replace("acquire", "relaxed")


# Name, program, places, outcome, whether it can happen.  Those marked ISA are the text's own.
LITMUS = [
    ("MP", MP, TWO, "r0 = 1, r1 = 0", False),
    ("MP relaxed", relaxed(MP), TWO, "r0 = 1, r1 = 0", True),
    ("MP relaxed store", MP.replace("release", "relaxed"), TWO, "r0 = 1, r1 = 0", True),
    ("MP relaxed load", MP.replace("acquire", "relaxed"), TWO, "r0 = 1, r1 = 0", True),
    ("MP gpu, one GPU", MP.replace("sys", "gpu"), ONE_GPU, "r0 = 1, r1 = 0", False),
    ("MP gpu, two GPUs", MP.replace("sys", "gpu"), TWO, "r0 = 1, r1 = 0", True),
    ("MP cta, one GPU", MP.replace("sys", "cta"), ONE_GPU, "r0 = 1, r1 = 0", True),
    ("MP cta, one block", MP.replace("sys", "cta"), "a.x a.x", "r0 = 1, r1 = 0", False),
    ("MP one scope", MP.replace("acquire.sys", "acquire.gpu"), TWO, "r0 = 1, r1 = 0", True),
    ("MP weak flag", MP.replace(".release.sys", ""), TWO, "r0 = 1, r1 = 0", True),
    (
        "MP fences, ISA",
        """
        st [x], 1             | ld.relaxed.sys r0, [y]
        fence.acq_rel.sys     | fence.acq_rel.sys
        st.relaxed.sys [y], 1 | ld r1, [x]
        """,
        TWO,
        "r0 = 1, r1 = 0",
        False,
    ),
    (
        "MP, a later write of the pattern",
        """
        st [x], 1             | ld.relaxed.sys r0, [y]
        st.release.sys [y], 1 | ld.acquire.sys q, [y]
        st.relaxed.sys [y], 2 | ld r1, [x]
        """,
        TWO,
        "r0 = 2, r1 = 0",
        False,
    ),
    (
        "MP, a pattern of two loads",
        """
        st [x], 1             | ld.relaxed.sys r0, [y] | st.relaxed.sys [y], 3
        st.release.sys [y], 1 | ld.acquire.sys r2, [y] |
                              | ld r1, [x]             |
        """,
        THREE,
        "r0 = 1, r2 = 3, r1 = 0",
        False,
    ),
    (
        "MP, a store and a fence",
        """
        st [x], 1             | ld.relaxed.sys r0, [y]
        st.release.sys [y], 1 | fence.acq_rel.sys
                              | ld r1, [x]
        """,
        TWO,
        "r0 = 1, r1 = 0",
        False,
    ),
    (
        "MP, a fence and a load",
        """
        st [x], 1             | ld.acquire.sys r0, [y]
        fence.acq_rel.sys     | ld r1, [x]
        st.relaxed.sys [y], 1 |
        """,
        TWO,
        "r0 = 1, r1 = 0",
        False,
    ),
    ("SB, ISA", SB, TWO, "r0 = 0, r1 = 0", False),
    ("SB acq_rel", SB.replace("fence.sc", "fence.acq_rel"), TWO, "r0 = 0, r1 = 0", True),
    ("SB no fence", without(SB, "fence.sc.sys"), TWO, "r0 = 0, r1 = 0", True),
    ("SB gpu, two GPUs", SB.replace("sc.sys", "sc.gpu"), TWO, "r0 = 0, r1 = 0", True),
    ("SB gpu, one GPU", SB.replace("sc.sys", "sc.gpu"), ONE_GPU, "r0 = 0, r1 = 0", False),
    ("LB", LB, TWO, "r0 = 1, r1 = 1", False),
    ("LB relaxed", relaxed(LB), TWO, "r0 = 1, r1 = 1", True),
    ("LB dependent, ISA", THIN_AIR, TWO, "r0 = 1, r1 = 1", False),
    ("IRIW", IRIW, FOUR, "r0 = 1, r1 = 0, r2 = 1, r3 = 0", False),
    (
        "IRIW acquire",
        without(IRIW.replace("ld.relaxed", "ld.acquire"), "fence.sc.sys"),
        FOUR,
        "r0 = 1, r1 = 0, r2 = 1, r3 = 0",
        True,
    ),
    (
        "IRIW acq_rel",
        IRIW.replace("fence.sc", "fence.acq_rel"),
        FOUR,
        "r0 = 1, r1 = 0, r2 = 1, r3 = 0",
        True,
    ),
    (
        "IRIW, fences of one block",
        IRIW.replace("sc.sys", "sc.cta"),
        "a.x b.y b.y d.w",
        "r0 = 1, r1 = 0, r2 = 1, r3 = 0",
        False,
    ),
    ("CoRR, ISA", CORR, TWO, "r0 = 1, r1 = 0", False),
    ("CoRR weak", CORR.replace(".relaxed.sys", ""), TWO, "r0 = 1, r1 = 0", True),
    ("CoRR gpu, two GPUs", CORR.replace("sys", "gpu"), TWO, "r0 = 1, r1 = 0", True),
    ("CoRR gpu, one GPU", CORR.replace("sys", "gpu"), ONE_GPU, "r0 = 1, r1 = 0", False),
    ("CoWR", COWR, TWO, "r0 = 2, r1 = 1", False),
    ("CoWW seen by both", COWR, TWO, "r0 = 1, r1 = 2, r2 = 2, r3 = 1", False),
    ("CoWW seen by one", COWR, TWO, "r0 = 1, r1 = 2", True),
    ("WRC", WRC, THREE, "r0 = 1, r1 = 1, r2 = 0", False),
    ("WRC relaxed", relaxed(WRC), THREE, "r0 = 1, r1 = 1, r2 = 0", True),
    ("WRC weak", WRC.replace(".relaxed.sys", ""), THREE, "r0 = 1, r1 = 1, r2 = 0", True),
    ("WRC gpu, one GPU", WRC.replace("sys", "gpu"), "a.x a.y a.z", "r0 = 1, r1 = 1, r2 = 0", False),
    ("ISA2 gpu, then sys", ISA2, "a.x a.y b.z", "r0 = 1, r1 = 1, r2 = 0", False),
    ("ISA2 gpu, two GPUs", ISA2, THREE, "r0 = 1, r1 = 1, r2 = 0", True),
    ("2+2W", TWO_WRITES, THREE, "r0 = 1, r1 = 1", False),
    ("2+2W acq_rel", TWO_WRITES.replace("sc.", "acq_rel."), THREE, "r0 = 1, r1 = 1", True),
    ("2+2W no fence", without(TWO_WRITES, "fence.sc.sys"), THREE, "r0 = 1, r1 = 1", True),
    ("S", S, THREE, "r0 = 1, r1 = 2", False),
    ("S relaxed", relaxed(S), THREE, "r0 = 1, r1 = 2", True),
    ("barrier", BARRIER, "a.x a.x", "r0 = 0", False),
    ("barrier of another block", BARRIER, ONE_GPU, "r0 = 0", True),
    ("atom, ISA", ADD, TWO, "r0 = 0, r1 = 0", False),
    ("atom cta and gpu, ISA", ADD.replace("sys", "cta", 1), ONE_GPU, "r0 = 0, r1 = 0", True),
    ("cas", CAS, TWO, "r0 = 0, r1 = 0", False),
    ("cas of a cas", CAS, TWO, "r0 = 0, r1 = 1", True),
    ("cas gpu, two GPUs", CAS.replace("sys", "gpu"), TWO, "r0 = 0, r1 = 0", True),
    ("release by way of an atom", CHAIN, THREE, "r0 = 1, r1 = 2, r2 = 0", False),
    ("relaxed by way of an atom", relaxed(CHAIN), THREE, "r0 = 1, r1 = 2, r2 = 0", True),
]


@pytest.mark.parametrize(
    ("program", "places", "outcome", "allowed"),
    [case[1:] for case in LITMUS],
    ids=[case[0] for case in LITMUS],
)
def test_the_model_knows_the_litmus_tests(
    program: str, places: str, outcome: str, allowed: bool
) -> None:
    assert can_happen(threads(program, places), [outcome]) is allowed


# --- The shapes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    threads: Sequence[Thread]
    wrong: Sequence[str]  # outcomes
    given: Sequence[str] = ()

    def is_wrong(self) -> bool:
        return can_happen(self.threads, self.wrong, self.given)


def block(gpu: str, name: str, *codes: list[str]) -> list[Thread]:
    return [Thread(gpu, name, tuple(code)) for code in codes]


class Rank:
    """A block of two threads that is written down step by step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.codes: tuple[list[str], list[str]] = ([], [])
        self.given: list[str] = []
        self.wrong: list[str] = []
        self.reads = self.looks = 0

    def threads(self) -> list[Thread]:
        return block(self.name, "b", *self.codes)

    def barrier(self, label: str) -> None:
        for code in self.codes:
            code.append(f"bar.sync {label}")

    def write(self, slot: str, value: int) -> None:
        for i, code in enumerate(self.codes):
            code.append(f"st [{slot}_{i}], {value}")

    def read(self, slot: str, value: int) -> None:
        """All threads read all words; another value would be wrong."""
        for code in self.codes:
            for word in (0, 1):
                name = f"{self.name}{self.reads}"
                self.reads += 1
                code.append(f"ld {name}, [{slot}_{word}]")
                self.wrong += [f"{name} != {value}"]

    def publish(self, flag: str, value: int, by: int = 0) -> None:
        self.codes[by].append(f"st.release.sys [{flag}], {value}")

    def observe(self, flag: str, value: int, by: int = 0) -> None:
        name = f"{self.name}_look{self.looks}"
        self.looks += 1
        self.codes[by].append(f"ld.acquire.sys {name}, [{flag}]")
        self.given.append(f"{name} >= {value}")


def shape_of(*ranks: Rank) -> Shape:
    return Shape(
        [thread for rank in ranks for thread in rank.threads()],
        [wrong for rank in ranks for wrong in rank.wrong],
        [given for rank in ranks for given in rank.given],
    )


# Shape 1, a message (PushExchange::post and await; a pipe's post and hasNext).  Another block
# publishes a flag of its own in the meantime.
def message() -> Shape:
    a, b = Rank("a"), Rank("b")
    a.write("slot", 1)
    a.barrier("before_publish")
    a.publish("flag", 1)
    b.observe("flag", 1)
    b.barrier("after_observe")
    b.read("slot", 1)
    shape = shape_of(a, b)
    other = Thread("a", "other", ("st.release.sys [flag_of_other_channel], 1",))
    return replace(shape, threads=[*shape.threads, other])


# Shape 2, slots that are used again without a count of reads (push.h).  `kinds` are the slots and
# flags of a step: (kind, step) is pushed, awaited or read in this order.
Order = list[tuple[str, str, int]]


def _one_shot(steps: int) -> Order:
    return [(do, "part", s) for s in range(steps) for do in ("push", "await", "read")]


def _two_shot(steps: int) -> Order:
    order = [("push", "part", 0)]
    for s in range(steps):
        order += [("push", "part", s + 1)] if s + 1 < steps else []
        order += [("await", "part", s), ("read", "part", s), ("push", "result", s)]
        order += [("await", "result", s - 1), ("read", "result", s - 1)] if s > 0 else []
    return order


def _others(steps: int) -> Order:
    order = [("push", "part", 0)]
    for s in range(steps):
        order += [("push", "part", s + 1)] if s + 1 < steps else []
        order += [("await", "part", s), ("read", "part", s)]
    return order


ORDERS = {"one-shot": _one_shot, "two-shot": _two_shot, "others": _others}
ENOUGH = {"one-shot": 2, "two-shot": 3, "others": 4}  # sets, as push.h says
PUSH_SETS = 4  # kPushSets


def push(algorithm: str, sets: int) -> Shape:
    a, b = Rank("a"), Rank("b")
    for me, peer in ((a, b), (b, a)):
        for do, kind, s in ORDERS[algorithm](sets + 2):
            if do == "push":
                me.write(f"at_{peer.name}_{kind}{s % sets}", s + 1)
                me.barrier(f"post_{kind}{s}")
                me.publish(f"to_{peer.name}_{kind}", s + 1)
            elif do == "await":
                me.observe(f"to_{me.name}_{kind}", s + 1)
                me.barrier(f"await_{kind}{s}")
            else:
                me.read(f"at_{me.name}_{kind}{s % sets}", s + 1)
    return shape_of(a, b)


# Shape 3, the ring's pipe (pipe.h, ring_kernel.h): thread 0 posts and looks for messages, the last
# thread releases and looks for room.  `sees_more`: the sender has seen all releases at once, and
# looks no more.
def pipe(depth: int, early: int = 0, sees_more: bool = False) -> Shape:
    a, b = Rank("a"), Rank("b")
    messages = depth + 2
    for i in range(messages):
        if i >= depth + early and not (sees_more and i > depth):
            a.observe("emptied", (messages if sees_more else i + 1) - depth - early, by=1)
        a.barrier(f"room{i}")
        a.write(f"slot{i % depth}", i + 1)
        a.barrier(f"post{i}")
        a.publish("filled", i + 1)
        b.observe("filled", i + 1)
        b.barrier(f"next{i}")
        b.read(f"slot{i % depth}", i + 1)
        b.barrier(f"release{i}")
        b.publish("emptied", i + 1, by=1)
    return shape_of(a, b)


# Shape 4, words of one GPU.
# Guard::report: the first to give up tells the host why.
def claim() -> Shape:
    def claimant(i: int) -> list[str]:
        return [
            f"atom.acq_rel.gpu.cas claim{i}, [cause], {i}",
            f"@claim{i}=0 st [peer], {i}",
            f"@claim{i}=0 st [step], {i}",
            f"@claim{i}=0 st.release.sys [trouble], {i}",
        ]

    host = ["ld.acquire.sys told, [trouble]", "ld peer, [peer]", "ld step, [step]"]
    return Shape(
        [
            *block("a", "x", claimant(1), claimant(2)),
            *block("a", "y", claimant(3)),
            *block("host", "h", host),
        ],
        [
            *(f"claim{i} = 0, claim{j} = 0" for i, j in ((1, 2), (1, 3), (2, 3))),
            *(f"told = {i}, {what} != {i}" for i in (1, 2, 3) for what in ("peer", "step")),
        ],
    )


# leaveKernel: the last block that counts sees the outputs and the cause of all, and fills the
# output, which whoever comes next in the stream finds.  Block x has given up.
def leave() -> Shape:
    def of_block(name: str, place: int) -> list[list[str]]:
        codes = []
        for i in (0, 1):
            code = ["atom.acq_rel.gpu.cas given_up, [cause], 1"] if (name, i) == ("x", 1) else []
            code += [f"st [out_{name}{i}], 1", "bar.sync leave"]
            if i == 0:
                code.append(f"atom.acq_rel.gpu.add count_{name}, [done]")
            last = f"@count_{name}=1"
            code += [
                "bar.sync last",
                f"{last} ld.relaxed.gpu cause_{name}{i}, [cause]",
                "bar.sync poisoned",
                *(f"{last} @cause_{name}{i}=1 st [out_{of}{1 - i}], 9" for of in ("x", "y")),
                "task.end k",
            ]
            codes.append(code)
        return codes

    outputs = ["out_x0", "out_x1", "out_y0", "out_y1"]
    reader = ["task.begin k", *(f"ld r{i}, [{out}]" for i, out in enumerate(outputs))]
    return Shape(
        [
            *block("a", "x", *of_block("x", 0)),
            *block("a", "y", *of_block("y", 1)),
            *block("a", "reader", reader),
        ],
        [
            "count_x != 1, count_y != 1",
            "count_x = 1, count_y = 1",
            *(f"r{i} != 9" for i in range(len(outputs))),
        ],
    )


# The count of blocks begins at 0 in the next kernel of the stream.
def reset() -> Shape:
    def of_kernel(k: int, name: str) -> list[str]:
        count = f"count_{name}{k}"
        return [
            f"task.begin k{k}",
            f"atom.acq_rel.gpu.add {count}, [done]",
            f"@{count}=1 st [done], 0",
            f"task.end k{k + 1}",
        ]

    return Shape(
        [
            thread
            for k in (0, 1)
            for name in ("x", "y")
            for thread in block("a", f"{name}{k}", of_kernel(k, name))
        ],
        [
            wrong
            for k in (0, 1)
            for wrong in (
                f"count_x{k} != 1, count_y{k} != 1",
                f"count_x{k} = 1, count_y{k} = 1",
            )
        ],
    )


# The counters of a channel (PushExchange::first and save): all threads of a block read them, one
# saves them for the next kernel of the stream.
def counters() -> Shape:
    codes = [
        ["task.begin k0", f"ld r{i}, [counter]", "bar.sync work", *save, "task.end k1"]
        for i, save in enumerate((["st [counter], 5"], []))
    ]
    following = [["task.begin k1", f"ld s{i}, [counter]"] for i in (0, 1)]
    return Shape(
        [*block("a", "x", *codes), *block("a", "y", *following)],
        [*(f"r{i} != 0" for i in (0, 1)), *(f"s{i} != 5" for i in (0, 1))],
    )


# Shape 5, LL (ll.h): a word carries its call's number.  Calls are kernels.  One thread of each
# moves words, which stand for their data too, and one exchanges the flags that tell that earlier
# kernels have ended.  It goes wrong if a word is written over while it is still waited for.
def ll(sets: int, waits: bool = True) -> Shape:
    kernels = []
    wrong, given = [], []
    for me, peer in (("a", "b"), ("b", "a")):
        for n in range(1, sets + 2):
            found, come = f"{me}_found{n}", f"{me}_come{n}"
            words = [f"st.relaxed.sys [at_{peer}_word{n % sets}], {n}"]
            words += [f"ld.relaxed.sys {found}, [at_{me}_word{n % sets}]"]
            flags = [f"st.release.sys [to_{peer}], {n}"]
            flags += [f"ld.acquire.sys {come}, [to_{me}]"] if waits else []
            begin, end = [f"task.begin {me}{n - 1}"], [f"task.end {me}{n}"]
            kernels += block(me, f"k{n}", *(begin + work + end for work in (words, flags)))
            wrong.append(f"{found} > {n}")
            given += [f"{found} >= {n}", *([f"{come} >= {n}"] if waits else [])]
    return Shape(kernels, wrong, given)


LL_SETS = 2  # kLLSets


# Shape 6, tensors where they are (located.h): rank a says in the line of its flag where its tensor
# is.  Rank b looks that up in its table, tells its other thread, reads a's addends and writes sums
# there.  In the next turn a writes the line and the tensor again.  Before all this b's mapping
# thread has filled the table, and a's has learnt of it.  An all-reduce does both there, a
# reduce-scatter only reads and an all-gather only writes.
def located() -> Shape:
    a, b = Rank("a"), Rank("b")
    a.observe("mapped", 1)
    a.barrier("mapped")
    for turn in (1, 2):
        a.write("input", turn)
        a.barrier(f"post{turn}")
        a.codes[0].append(f"st [line], {turn}")
        a.publish("parts", turn)
        b.observe("parts", turn)
        for word, value in (("line", turn), ("table", 1)):
            b.codes[0].append(f"ld {word}{turn}, [{word}]")
            b.wrong.append(f"{word}{turn} != {value}")
        b.codes[0].append(f"st [shown], {turn}")
        b.barrier(f"await{turn}")
        for i, code in enumerate(b.codes):
            code.append(f"ld seen{turn}{i}, [shown]")
            b.wrong.append(f"seen{turn}{i} != {turn}")
        b.read("input", turn)
        b.write("output", turn)
        b.barrier(f"sums{turn}")
        b.publish("results", turn)
        a.observe("results", turn)
        a.barrier(f"collect{turn}")
        a.read("output", turn)
    shape = shape_of(a, b)
    mappers = [
        Thread("b", "mapper", ("st [table], 1", "st.release.sys [acknowledged], 1")),
        Thread("a", "mapper", ("ld.acquire.sys m, [acknowledged]", "st.release.sys [mapped], 1")),
    ]
    return replace(shape, threads=[*shape.threads, *mappers], given=[*shape.given, "m >= 1"])


# Shape 7, a tile in the NVSwitch (nvls.h): each rank copies two words to its window, one thread of
# it loads its part of all windows and stores to all of them, by multicast addresses, and all
# threads read the sums and copy the next words in.
def nvls() -> Shape:
    ranks = (Rank("a"), Rank("b"))
    for part, (rank, peer) in enumerate((ranks, ranks[::-1])):

        def meet(what: str, rank: Rank = rank, peer: Rank = peer) -> None:
            for code in rank.codes:
                code.append(f"fence.proxy.alias {what}")
            rank.barrier(f"post_{what}")
            rank.publish(f"{what}_at_{peer.name}", 1)
            rank.observe(f"{what}_at_{rank.name}", 1)
            rank.barrier(f"await_{what}")

        rank.write(f"window_{rank.name}", 1)
        meet("parts")
        for place in "ab":
            rank.codes[1].append(f"ld.alias {rank.name}_sum_{place}, [window_{place}_{part}]")
            rank.wrong.append(f"{rank.name}_sum_{place} != 1")
        for place in "ab":
            rank.codes[1].append(f"st.alias [window_{place}_{part}], 2")
        meet("results")
        rank.read(f"window_{rank.name}", 2)
        rank.barrier("next_tile")
        rank.write(f"window_{rank.name}", 3)
    return shape_of(*ranks)


def early(shape: Shape, first: str, second: str) -> Shape:
    """With each instruction that matches `second` moved up before the last that matches `first`."""
    changed = []
    for thread in shape.threads:
        code = list(thread.code)
        for i, line in enumerate(code):
            if not re.search(second, line):
                continue
            at = max((j for j in range(i) if re.search(first, code[j])), default=i)
            code.insert(at, code.pop(i))
        changed.append(replace(thread, code=tuple(code)))
    assert changed != list(shape.threads), f"nothing matches {first}, {second}"
    return replace(shape, threads=changed)


SHAPES = {
    "a message": message(),
    "located tensors": located(),
    "LL": ll(LL_SETS),
    "NVLS": nvls(),
    **{
        f"push, {algorithm}, {sets} sets": push(algorithm, sets)
        for algorithm, enough in ENOUGH.items()
        for sets in sorted({enough, PUSH_SETS})
    },
    "a pipe": pipe(2),
    "a pipe of one slot": pipe(1),
    "a pipe whose sender has seen enough": pipe(2, sees_more=True),
    "the claim of a cause": claim(),
    "the last block of a kernel": leave(),
    "the count of blocks": reset(),
    "the counters of a channel": counters(),
}


@pytest.mark.parametrize("name", SHAPES)
def test_no_execution_of_a_shape_goes_wrong(name: str) -> None:
    shape = SHAPES[name]
    assert not shape.is_wrong()
    assert can_happen(shape.threads, [""], shape.given), "its waits never end"


# --- Mutants --------------------------------------------------------------------------------------


def edit(shape: Shape, pattern: str, by: str) -> Shape:
    """With a text in all instructions replaced; "; " separates instructions."""
    changed = [
        replace(t, code=tuple("; ".join(re.sub(pattern, by, line) for line in t.code).split("; ")))
        for t in shape.threads
    ]
    assert changed != list(shape.threads), f"nothing matches {pattern}"
    return replace(shape, threads=changed)


def drop(shape: Shape, pattern: str) -> Shape:
    """Without the instructions that match."""
    kept = [
        replace(t, code=tuple(line for line in t.code if not re.search(pattern, line)))
        for t in shape.threads
    ]
    assert kept != list(shape.threads), f"nothing matches {pattern}"
    return replace(shape, threads=kept)


def overwritten(shape: Shape) -> Shape:
    """Where only a slot that was overwritten too early counts as wrong."""
    return replace(shape, wrong=[wrong.replace("!=", ">") for wrong in shape.wrong])


STORE, LOAD = r"st\.release\.sys", r"ld\.acquire\.sys"
FLAGS = {
    "a relaxed store of the flag": (STORE, "st.relaxed.sys"),
    "a weak store of the flag": (STORE, "st"),
    "a flag stored for one GPU": (STORE, "st.release.gpu"),
    "a relaxed load of the flag": (LOAD, "ld.relaxed.sys"),
    "a weak load of the flag": (LOAD, "ld"),
    "a flag loaded for one GPU": (LOAD, "ld.acquire.gpu"),
}
FIRST_PIPE, OTHER_FLAG = pipe(2), "flag_of_other_channel"
MUTANTS = {
    **{f"message, {what}": edit(message(), *change) for what, change in FLAGS.items()},
    "message, no barrier before": drop(message(), "before_publish"),
    "message, no barrier after": drop(message(), "after_observe"),
    "message, the flag of another channel": edit(
        message(), r"(ld.*)\[flag\]", rf"\1[{OTHER_FLAG}]"
    ),
    "message, another slot": edit(message(), r"st \[slot", "st [next_slot"),
    **{
        f"push, {algorithm}, {what}": overwritten(mutant)
        for algorithm, enough in ENOUGH.items()
        for what, mutant in {
            **{what: edit(push(algorithm, enough), *change) for what, change in FLAGS.items()},
            "no barrier in post": drop(push(algorithm, enough), "sync post"),
            "no barrier in await": drop(push(algorithm, enough), "sync await"),
            "one set too few": push(algorithm, enough - 1),
        }.items()
    },
    **{f"located, {what}": edit(located(), *change) for what, change in FLAGS.items()},
    **{
        f"located, no barrier at {where}": drop(located(), f"sync {where}")
        for where in ("post", "await", "sums", "collect")
    },
    "located, the place comes after the flag": early(located(), r"st \[line\]", r"\[parts\]"),
    "located, a look at the table before the flag": early(
        located(), r"ld.*\[parts\]", r"\[table\]"
    ),
    "located, acknowledged before it is mapped": early(
        located(), r"st \[table\]", r"\[acknowledged\]"
    ),
    # It finds its own flag instead.
    "located, used again before the results": edit(located(), r"(ld.*)\[results\]", r"\1[parts]"),
    **{f"LL, {what}": edit(ll(LL_SETS), *change) for what, change in FLAGS.items()},
    "LL, one set too few": ll(LL_SETS - 1),
    "LL, no wait for the flags of earlier calls": ll(LL_SETS, waits=False),
    "LL, kernels of a rank at once": drop(ll(LL_SETS), "task"),
    **{f"NVLS, {what}": edit(nvls(), *change) for what, change in FLAGS.items()},
    **{
        f"NVLS, no {what}": drop(nvls(), f"{step}$")
        for what, step in (
            ("fence after the copy in", "alias parts"),
            ("fence after the sums", "alias results"),
            ("barrier before the first flag", "sync post_parts"),
            ("barrier after the first flag", "sync await_parts"),
            ("barrier before the second flag", "sync post_results"),
            ("barrier after the second flag", "sync await_results"),
            ("barrier before the next tile", "sync next_tile"),
        )
    },
    **{f"pipe, {what}": edit(FIRST_PIPE, *change) for what, change in FLAGS.items()},
    **{
        f"pipe, no barrier at {where}": drop(FIRST_PIPE, f"sync {where}")
        for where in ("room", "post", "next", "release")
    },
    **{
        f"pipe, {flag}, {how}": edit(FIRST_PIPE, rf"{access}(.*\[{flag}\])", rf"{by}\1")
        for flag in ("filled", "emptied")
        for how, access, by in (
            ("published relaxed", STORE, "st.relaxed.sys"),
            ("observed relaxed", LOAD, "ld.relaxed.sys"),
        )
    },
    "pipe, a slot is filled a message too early": overwritten(pipe(2, early=1)),
    "claim, within a block": edit(claim(), "acq_rel.gpu", "acq_rel.cta"),
    "claim, by a load and a store": edit(
        claim(),
        r"atom\S* (\w+), \[cause\], (\d)",
        r"ld.relaxed.gpu \1, [cause]; @\1=0 st.relaxed.gpu [cause], \2",
    ),
    **{f"claim, {what}": edit(claim(), *change) for what, change in FLAGS.items()},
    **{
        f"leave, the count is {how}": edit(leave(), r"acq_rel\.gpu\.add", f"{how}.add")
        for how in ("relaxed.gpu", "acquire.gpu", "release.gpu", "acq_rel.cta")
    },
    "leave, no barrier before the count": drop(leave(), "sync leave"),
    "leave, no barrier after the count": drop(leave(), "sync last"),
    "leave, the reader is in another stream": drop(leave(), "task.begin"),
    "count, no reset": drop(reset(), r"st \[done\], 0"),
    "count, within a block": edit(reset(), r"acq_rel\.gpu", "acq_rel.cta"),
    "count, kernels in two streams": drop(reset(), "task.begin k1"),
    "counters, no barrier before they are saved": drop(counters(), "sync work"),
    "counters, kernels in two streams": drop(counters(), "task.begin k1"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_goes_wrong(name: str) -> None:
    assert MUTANTS[name].is_wrong()
