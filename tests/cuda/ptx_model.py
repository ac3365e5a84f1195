"""The memory model of PTX as rules for a solver, which decides whether an outcome can happen.

The rules are those of the PTX ISA 8.x, chapter 8 ("Memory consistency model"); each names its
section.  A program is some threads with a place and instructions, in a syntax like PTX's:

    st [x], 1                       ld r, [x]
    st.release.sys [x], 1           ld.acquire.sys r, [x]           also .relaxed; .cta, .gpu
    atom.acq_rel.gpu.add r, [x]     atom.acq_rel.gpu.cas r, [x], 1  add one; 0 becomes 1
    fence.sc.sys                    fence.acq_rel.gpu
    ld.alias r, [x]                 st.alias [x], 1     by another address of the same memory
    fence.proxy.alias name          between accesses by the two
    bar.sync name                   the threads of a block that meet there
    task.end name                   the end of a kernel, and the begin of the next in its stream
    task.begin name
    @r=0 st [x], 1                  happens only if r has this value

Every location is 0 at first, every register is written once, and a loop that waits is its last
look: earlier ones would only constrain more.

Not in the model: accesses that overlap in part (8.7.2), proxies other than aliases (8.6; the
addresses by which two ranks map one memory are taken for one, but for multicast addresses), and
asynchronous operations.  A vector access is one
for each element (8.2.4).  Atomicity and SC per location follow from the other axioms here, where
accesses overlap completely.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import clingo

# at(E,T,I): event E is instruction I of thread T.  place(T,B,G): T is of block B on GPU G.
RULES = """
% --- What happens.  Values come by chains that begin at constants, since answer sets are founded:
% that is 8.10.4, No Thin Air.
happens(E) :- at(E,_,_), value(R,V) : needs(E,R,V).
writer(init(L),L) :- location(L).                                 % 8.2.6, initialization
writer(E,L) :- happens(E), writes(E,L), not cas(E,_).
writer(E,L) :- happens(E), writes(E,L), cas(E,_), value(E,0).
stored(init(L),0) :- location(L).
stored(E,V) :- writer(E,_), puts(E,V).
stored(E,V+1) :- writer(E,_), adds(E), value(E,V), V < 9.
stored(E,V) :- writer(E,_), cas(E,V).
1 { rf(W,R) : writer(W,L), W != R } 1 :- happens(R), reads(R,L).
value(R,V) :- rf(W,R), stored(W,V).
:- happens(R), reads(R,_), not value(R,_).

po(X,Y) :- at(X,T,I), at(Y,T,J), I < J.                           % 8.9.1, program order
accesses(E,L) :- reads(E,L).
accesses(E,L) :- writes(E,L).
overlap(X,Y) :- accesses(X,L), accesses(Y,L), X != Y.             % 8.2.1
atomic(E) :- reads(E,L), writes(E,L).
crosses(X,Y) :- overlap(X,Y), alias(X), not alias(Y).             % 8.6, aliases
crosses(X,Y) :- crosses(Y,X).

% --- 8.5 and 8.7: scopes, morally strong operations
includes(E,T) :- scope(E,sys), place(T,_,_).
includes(E,T) :- scope(E,gpu), at(E,S,_), place(S,_,G), place(T,_,G).
includes(E,T) :- scope(E,cta), at(E,S,_), place(S,B,G), place(T,B,G).
comparable(X,Y) :- overlap(X,Y), not crosses(X,Y).
comparable(X,Y) :- fence(X), at(Y,_,_), X != Y.
comparable(X,Y) :- fence(Y), at(X,_,_), X != Y.
strong_pair(X,Y) :- comparable(X,Y), po(X,Y).
strong_pair(X,Y) :- comparable(X,Y), po(Y,X).
strong_pair(X,Y) :- comparable(X,Y), strong(X), strong(Y), at(X,T,_), at(Y,U,_), T != U,
                    includes(X,U), includes(Y,T).

% --- 8.8: release and acquire patterns, by their first and last operations
release_pattern(X,X) :- release(X), writes(X,_).
release_pattern(X,W) :- release(X), writes(X,L), po(X,W), strong(W), writes(W,L).
release_pattern(X,W) :- fence(X), po(X,W), strong(W), writes(W,_).
acquire_pattern(Y,Y) :- acquire(Y), reads(Y,_).
acquire_pattern(R,Y) :- strong(R), reads(R,L), po(R,Y), acquire(Y), reads(Y,L).
acquire_pattern(R,Y) :- strong(R), reads(R,_), po(R,Y), fence(Y).

observed(W,R) :- rf(W,R), strong_pair(W,R).                       % 8.9.2, observation order
observed(W,R) :- observed(W,Z), atomic(Z), observed(Z,R).

1 { sc(X,Y) ; sc(Y,X) } 1 :- sc_fence(X), sc_fence(Y), strong_pair(X,Y), X < Y.  % 8.9.3
#edge ((sc,X),(sc,Y)) : sc(X,Y).

% --- 8.9.4: what synchronizes
synchronizes(X,Y) :- sc(X,Y).
synchronizes(X,Y) :- barrier(X,B), barrier(Y,B), X != Y.
synchronizes(X,Y) :- release_pattern(X,W), happens(X), acquire_pattern(R,Y), happens(Y),
                     observed(W,R), strong_pair(X,Y).
synchronizes(X,Y) :- task_end(X,K), task_begin(Y,K).

% --- 8.9.5: causality order.  W0 comes before everything.
step(X,Y) :- at(X,T,I), at(Y,T,I+1).
step(X,Y) :- synchronizes(X,Y).
base(X,Y) :- step(X,Y).
base(X,Z) :- base(X,Y), step(Y,Z).
cause(X,Y) :- base(X,Y), overlap(X,Y), not crosses(X,Y).
cause(X,Y) :- base(X,F), alias_fence(F), base(F,Y), overlap(X,Y).
cause(X,Y) :- observed(X,Z), base(Z,Y), overlap(X,Y), not crosses(X,Y).
cause(init(L),E) :- accesses(E,L).

% --- 8.9.6 and 8.9.7: coherence order, communication order.  More pairs than must be may be in
% coherence order; that only forbids more.
{ co(X,Y) } :- writer(X,L), writer(Y,L), X != Y.
:- co(X,Y), co(Y,X).
:- co(X,Y), co(Y,Z), not co(X,Z).
:- writer(X,L), writer(Y,L), X < Y, strong_pair(X,Y), not co(X,Y), not co(Y,X).
fr(R,W) :- rf(V,R), co(V,W), R != W.

% --- 8.10: the axioms
:- cause(X,Y), writer(X,_), writer(Y,_), not co(X,Y).             % 8.10.1, Coherence
:- sc(X,Y), base(Y,X).                                            % 8.10.2, Fence-SC
:- atomic(A), rf(V,A), co(V,W), co(W,A), strong_pair(A,W).        % 8.10.3, Atomicity
located(X,Y) :- po(X,Y), overlap(X,Y), happens(X), happens(Y), not crosses(X,Y).
located(X,Y) :- rf(X,Y), strong_pair(X,Y).
located(X,Y) :- co(X,Y), strong_pair(X,Y).
located(X,Y) :- fr(X,Y), strong_pair(X,Y).
#edge (X,Y) : located(X,Y).                                       % 8.10.5, SC per location
:- cause(R,W), rf(W,R).                                           % 8.10.6, Causality
:- cause(W,R), fr(R,W).

register(N,V) :- names(R,N), value(R,V).
"""

_ACCESS = re.compile(r"(ld|st|atom)((?:\.\w+)*) (?:(\w+), )?\[(\w+)\](?:, (\d+))?")


@dataclass(frozen=True)
class Thread:
    gpu: str
    block: str
    code: tuple[str, ...]


def _facts(number: int, thread: Thread) -> list[str]:
    facts = [f"place({number},{thread.block},{thread.gpu})."]
    for i, line in enumerate(thread.code):
        e = f"e({number},{i})"
        facts.append(f"at({e},{number},{i}).")
        guards, instruction = re.fullmatch(r"((?:@\w+=\d+ )*)(.*)", line).groups()  # type: ignore[union-attr]
        for register, value in re.findall(r"@(\w+)=(\d+)", guards):
            facts.append(f"needs({e},R,{value}) :- names(R,{register}).")
        word, _, rest = instruction.partition(" ")
        if word == "bar.sync":
            facts.append(f"barrier({e},({thread.gpu},{thread.block},{rest})).")
        elif word in ("task.end", "task.begin"):
            facts.append(f"{word.replace('.', '_')}({e},{rest}).")
        elif word == "fence.proxy.alias":
            facts.append(f"alias_fence({e}).")
        elif fence := re.fullmatch(r"fence\.(sc|acq_rel)\.(\w+)", instruction):
            facts.append(f"fence({e}). strong({e}). scope({e},{fence[2]}).")
            if fence[1] == "sc":
                facts.append(f"sc_fence({e}).")
        elif access := _ACCESS.fullmatch(instruction):
            facts += _access(e, *access.groups())
        else:
            raise ValueError(f"no instruction: {line}")
    return facts


def _access(
    e: str, kind: str, suffixes: str, register: str | None, location: str, value: str | None
) -> list[str]:
    words = set(suffixes.split(".")[1:])
    facts = [f"location({location})."]
    if kind != "st":
        facts.append(f"reads({e},{location}). names({e},{register}).")
    if kind != "ld":
        facts.append(f"writes({e},{location}).")
    if "add" in words:
        facts.append(f"adds({e}).")
    elif kind != "ld":
        facts.append(f"{'cas' if 'cas' in words else 'puts'}({e},{value}).")
    facts += [f"scope({e},{scope}). strong({e})." for scope in words & {"cta", "gpu", "sys"}]
    if "alias" in words:
        facts.append(f"alias({e}).")
    if words & {"release", "acq_rel"}:
        facts.append(f"release({e}).")
    if words & {"acquire", "acq_rel"}:
        facts.append(f"acquire({e}).")
    if unknown := words - {
        *("cta", "gpu", "sys", "relaxed", "release", "acquire", "acq_rel", "add", "cas", "alias")
    }:
        raise ValueError(f"unknown: {unknown}")
    return facts


def _condition(text: str) -> str:
    """The body of a rule for "a = 1, b != 0", where the names are registers."""
    parts = ["#true"]
    for i, part in enumerate(text.split(",") if text else []):
        name, comparison, value = part.split()
        parts.append(f"register({name},V{i}), V{i} {comparison} {value}")
    return ", ".join(parts)


def can_happen(
    threads: Sequence[Thread], outcomes: Sequence[str], given: Sequence[str] = ()
) -> bool:
    """Whether an execution has one of the outcomes.

    Args:
        threads: the program.
        outcomes: each as "a = 1, b != 0": what registers hold.  "": any execution.
        given: what holds in all executions that count, such as the last look of a wait.
    """
    names = re.findall(r"(?:ld|atom)\S* (\w+),", "\n".join(i for t in threads for i in t.code))
    if len(names) != len(set(names)):
        raise ValueError("a register is written twice")
    if missing := set(re.findall(r"[a-z]\w*", " ".join([*outcomes, *given]))) - set(names):
        raise ValueError(f"no such registers: {missing}")
    lines = [fact for number, thread in enumerate(threads) for fact in _facts(number, thread)]
    lines += [f"outcome :- {_condition(outcome)}." for outcome in outcomes]
    lines += [":- not outcome."]
    lines += [f"given({i}) :- {_condition(g)}. :- not given({i})." for i, g in enumerate(given)]
    control = clingo.Control(["--warn=no-atom-undefined"])
    control.add("base", [], RULES + "\n".join(lines))
    control.ground([("base", [])])
    return bool(control.solve().satisfiable)
