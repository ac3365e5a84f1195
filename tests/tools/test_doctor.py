"""python -m ringreduce.doctor: each seeded fault is found by its name, and nothing else is.

Most faults are made-up facts.  The slow tests seed some for real, in a process's limits, in
launchers and between emulated hosts.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launchers
import pytest
from hosts import Hosts, why_not
from processes import free_port
from torch.distributed import TCPStore

from ringreduce.core.launchers import Identity
from ringreduce.tools.doctor import cli as command
from ringreduce.tools.doctor import facts as reading
from ringreduce.tools.doctor import trial
from ringreduce.tools.doctor.cli import judge, main
from ringreduce.tools.doctor.exchange import Came, Gathered
from ringreduce.tools.doctor.facts import Facts
from ringreduce.tools.doctor.probe import Line
from ringreduce.tools.doctor.report import status_of, to_json, to_text

DOCTOR = [sys.executable, "-m", "ringreduce.doctor"]
MIB = 1 << 20
NO_ANSWER = "no answer within 5 s"


def row(name: str, value: str = "", error: str = "", holds: str = "each rank's") -> dict[str, str]:
    """A variable as ringreduce.config has it."""
    return {
        "name": name,
        "default": "none",
        "values": "some",
        "holds": holds,
        "value": value or "none",
        "source": "environment" if value else "default",
        "error": error,
    }


def sound(rank: int, host: int, ranks: int, address: str) -> Facts:
    return Facts(
        rank=rank,
        world_size=ranks,
        launcher="torchrun",
        host=f"node{host}",
        machine=f"kernel{host}",
        python="3.11.2",
        torch="2.13.0+cpu",
        ringreduce="0.1.0",
        variables=[
            row("RINGREDUCE_TLS", holds="the same on all ranks"),
            row("RINGREDUCE_LANES"),
        ],
        open_files=1024,
        memory_free=8 << 30,
        shm_bytes=1 << 30,
        cores=8,
        affinity=list(range(8)),
        nodes=[list(range(8))],
        listening=[("eth0", address, 40000 + rank)],
        mtu=1500,
        rmem=6 * MIB,
        wmem=4 * MIB,
        congestions=["reno", "cubic", "bbr"],
    )


def job(hosts: int, per_host: int = 2) -> Gathered:
    """A sound job, with a line from the first rank of each host to all ranks of the others."""
    size = hosts * per_host
    facts = [sound(r, r // per_host, size, f"10.0.0.{r // per_host + 1}") for r in range(size)]
    lines = [
        Line(a * per_host, to.rank, f"{to.listening[0][1]}:{to.listening[0][2]}", round_trip=1e-4)
        for a in range(hosts)
        for to in facts
        if to.rank // per_host != a
    ]
    return Gathered(facts, lines=lines, seconds=60.0)


Seed = Callable[[Gathered], None]


def of(*ranks: int, **values: Any) -> Seed:
    """Sets these facts of these ranks; of all ranks if none is given."""

    def seed(gathered: Gathered) -> None:
        for one in gathered.facts:
            if not ranks or one.rank in ranks:
                for name, value in values.items():
                    assert hasattr(one, name)
                    setattr(one, name, value)

    return seed


def lines(choose: Callable[[Line], bool], **values: Any) -> Seed:
    """Sets these values of the lines that are chosen."""

    def seed(gathered: Gathered) -> None:
        chosen = [line for line in gathered.lines if choose(line)]
        assert chosen
        for line in chosen:
            for name, value in values.items():
                assert hasattr(line, name)
                setattr(line, name, value)

    return seed


def absent(gathered: Gathered) -> None:
    gathered.facts = [one for one in gathered.facts if one.rank != 3]
    gathered.lines = [one for one in gathered.lines if one.receiver != 3]
    gathered.absent = [3]


def silent(gathered: Gathered) -> None:
    gathered.lines = [one for one in gathered.lines if one.sender != 2]
    gathered.silent = [2]


def came(*who: tuple[int, int]) -> Seed:
    """Processes of these ranks and world sizes came, and of no others."""

    def seed(gathered: Gathered) -> None:
        gathered.came = [Came(*one, "node0", pid) for pid, one in enumerate(who)]
        gathered.absent = sorted({0, 1, 2, 3} - {rank for rank, _ in who})

    return seed


def one_fails(gathered: Gathered) -> None:
    """Rank 2 cannot make the group of all ranks, so the others wait for it in vain."""
    of(all_error="Timeout: rank 2 did not come")(gathered)
    of(2, all_error="Error: a fault")(gathered)


def two_addresses(gathered: Gathered) -> None:
    """Rank 3 has another address, which nobody reaches."""
    gathered.facts[3].listening.append(("eth1", "10.1.0.2", 40003))
    gathered.lines.append(Line(0, 3, "10.1.0.2:40003", NO_ANSWER, "connect", interface="eth1"))


def moved(gathered: Gathered) -> None:
    """Ranks 1 and 2 change hosts."""
    names = ("host", "machine", "listening")
    a, b = gathered.facts[1:3]
    for name in names:
        mine, other = getattr(a, name), getattr(b, name)
        setattr(a, name, other)
        setattr(b, name, mine)


# The name, its severity, hosts, what is seeded, and words of what is found or to be done.
FAULTS: list[tuple[str, str, int, Seed, str]] = [
    ("torch-version", "fault", 1, of(torch="2.10.1+cpu"), "torch>=2.11"),
    ("torch-version", "note", 1, of(torch="2.16.0"), "2.11 to 2.15"),
    (
        "build-cuda",
        "fault",
        1,
        of(gpus=2, torch_cuda="13.0", cuda_missing="there is no nvcc in PATH"),
        "no nvcc",
    ),
    ("same-ringreduce", "fault", 2, of(3, ringreduce="0.2.0"), "0.2.0 on rank 3"),
    ("same-torch", "fault", 2, of(2, 3, torch="2.14.1+cpu"), "2.14.1+cpu on ranks 2 and 3"),
    ("same-python", "note", 2, of(0, python="3.12.1"), "3.12.1 on rank 0"),
    (
        "variable",
        "fault",
        1,
        of(1, variables=[row("RINGREDUCE_LANES", "65", "RINGREDUCE_LANES=65 is not 1 to 64")]),
        "LANES=65",
    ),
    ("unknown-variable", "fault", 1, of(unknown_variables=["RINGREDUCE_LANE"]), "RINGREDUCE_LANES"),
    ("unknown-variable", "note", 1, of(unknown_variables=["RINGREDUCE_OF_A_USER"]), "no effect"),
    (
        "same-variables",
        "fault",
        2,
        of(2, 3, variables=[row("RINGREDUCE_TLS", "1", holds="the same on all ranks")]),
        "1 on ranks 2 and 3",
    ),
    (
        "shared-memory",
        "fault",
        1,
        of(memfd_error="Operation not permitted", alone_error="that"),
        "seccomp",
    ),
    ("shared-memory", "note", 1, of(memfd_error="no", alone_error="no", all_error=""), "=tcp"),
    ("unix-socket", "fault", 1, of(unix_error="Address family not supported"), "AF_UNIX"),
    ("file-size", "fault", 1, of(1, all_error="x: File too large", file_size=4096), "is 4 KiB"),
    ("loopback", "fault", 1, of(loopback_error="Network is unreachable"), "lo up"),
    ("proc", "note", 1, of(proc=False), "mount"),
    ("proc", "fault", 2, of(proc=False, all_error="Timeout: rank 1"), "RINGREDUCE_HOSTID"),
    (
        "folder",
        "fault",
        1,
        of(folders={"TMPDIR": "Read-only"}, environment={"TMPDIR": "/x"}),
        "TMPDIR says (/x)",
    ),
    ("folder", "fault", 1, of(folders={"TMPDIR": "No usable folder"}), "Set TMPDIR"),
    ("affinity", "slow", 1, of(1, affinity_error="Operation not permitted"), "sched_getaffinity"),
    ("world-size", "fault", 1, of(world_size=10**9), "1000000000"),
    ("group", "fault", 1, of(1, alone_error="Error: no kernel"), "rank alone can be made"),
    ("group", "fault", 2, one_fails, "rank 2 says: Error: a fault"),
    ("same-world-size", "fault", 2, came((0, 4), (1, 4), (2, 4), (3, 5)), "5 on rank 3"),
    ("same-rank", "fault", 2, came((0, 4), (1, 4), (2, 4), (1, 4)), "are rank 1: process 1 on"),
    ("open-files", "fault", 1, of(open_files=64), "ulimit -n 4096"),
    ("threads-limit", "fault", 1, of(threads_left=10), "10 more threads"),
    (
        "memory",
        "fault",
        1,
        of(memory_free=9 * MIB, memory_limit=512 * MIB),
        "9 MiB of the cgroup's",
    ),
    ("shm-size", "note", 1, of(shm_bytes=64 * MIB), "--shm-size"),
    ("user", "fault", 1, of(1, uid=1000), "0, 1000"),
    ("cores", "slow", 1, of(cores=1, affinity=[0], nodes=[[0]]), "2 ranks on 1 core"),
    ("affinity", "slow", 1, of(affinity=[3]), "bound to 1 of 8 cores"),
    ("quota", "slow", 1, of(quota=1.5), "1.5 cores for 2 ranks"),
    ("threads", "slow", 1, of(threads=8, environment={"OMP_NUM_THREADS": "8"}), "NUM_THREADS=4"),
    ("threads", "slow", 1, of(threads=8), "OMP_NUM_THREADS is not set"),
    ("numa", "note", 1, of(nodes=[[0, 1, 2, 3], [4, 5, 6, 7]]), "2 NUMA nodes"),
    ("steal", "note", 1, of(steal=0.25), "25%"),
    ("pressure", "note", 1, of(pressure=0.5), "50%"),
    ("gpu-driver", "fault", 1, of(gpu_driver=True, torch_cuda="13.0"), "nvidia-smi"),
    ("gpu-shared", "slow", 1, of(gpus=1, gpu="GPU-1", cuda_built="13.0"), "2 ranks"),
    ("gpu-peers", "note", 1, of(no_peer_access=[(0, 1), (1, 0)]), "0-1"),
    ("absent", "fault", 2, absent, "rank 3 did not come within 60 s"),
    ("absent", "fault", 2, silent, "rank 2 came"),
    (
        "host-id",
        "fault",
        2,
        of(variables=[row("RINGREDUCE_HOSTID", "a")]),
        "RINGREDUCE_HOSTID=a",
    ),
    ("placement", "slow", 2, moved, "rank 1 on node1"),
    (
        "uneven",
        "note",
        2,
        of(2, host="node0", machine="kernel0", listening=[("eth0", "10.0.0.1", 40002)]),
        "1, 3",
    ),
    ("listen", "fault", 2, of(1, listen_error="all ports are taken", listening=[]), "all ports"),
    ("listen", "fault", 2, of(2, 3, listening=[("lo", "127.0.0.1", 40002)]), "127.0.0.1"),
    ("same-address", "fault", 2, of(listening=[("docker0", "172.17.0.1", 40000)]), "=^NAME"),
    ("mtu", "note", 3, of(2, 3, mtu=9000), "9000 on node1 (rank 2)"),
    (
        "reach",
        "fault",
        3,
        lines(lambda one: one.sender == 2 and one.receiver > 3, error=NO_ANSWER, stage="connect"),
        "from node1 (rank 2) to node2 (rank 4): rank 2 to 4 at 10.0.0.3:40004, rank 2 to 5",
    ),
    (
        "path-mtu",
        "fault",
        2,
        lines(lambda one: one.sender == 0, error=NO_ANSWER, stage="large"),
        "ping -M do -s 1472 10.0.0.2",
    ),
    ("address", "slow", 2, two_addresses, "10.1.0.2:40003"),
    ("buffers", "slow", 2, lines(lambda one: True, round_trip=0.3), "1000 Mbit/s"),
    ("clocks", "note", 2, lines(lambda one: one.sender == 0, ahead=-90.0), "by -90.0 s"),
]


def named(check: str, severity: str, number: int) -> str:
    return f"{check}-{severity}-{number}"


@pytest.mark.parametrize(
    ("check", "severity", "hosts", "seed", "words"),
    FAULTS,
    ids=[named(fault[0], fault[1], number) for number, fault in enumerate(FAULTS)],
)
def test_a_seeded_fault_is_found_and_nothing_else(
    check: str, severity: str, hosts: int, seed: Seed, words: str
) -> None:
    gathered = job(hosts)
    seed(gathered)
    found = judge(gathered)
    assert {(one.check, one.severity) for one in found} == {(check, severity)}, found
    assert words in found[0].found + found[0].todo, found
    assert found[0].todo
    assert status_of(found) == (severity != "note")


@pytest.mark.parametrize(
    ("fails", "ranks", "where"),
    [
        (lambda a, b: b == 5, {10, 11}, "to node5 (rank 10) for 15 of 15"),
        (lambda a, b: a == 5, {10}, "from node5 (rank 10) for 15 of 15"),
        (lambda a, b: 5 in (a, b), {10, 11}, "to and from node5 (rank 10) for 15 of 15"),
        (lambda a, b: True, set(range(32)), "for 240 of the 240 ordered pairs"),
        (lambda a, b: (a, b) == (3, 4), {6, 8, 9}, "from node3 (rank 6) to node4 (rank 8)"),
    ],
    ids=["to one", "from one", "one", "all", "pair"],
)
def test_many_failing_lines_with_one_cause_are_one_finding(
    fails: Callable[[int, int], bool], ranks: set[int], where: str
) -> None:
    gathered = job(16)

    def of_hosts(line: Line) -> bool:
        return fails(line.sender // 2, line.receiver // 2)

    lines(of_hosts, error=NO_ANSWER, stage="connect")(gathered)
    (one,) = judge(gathered)
    assert (one.check, set(one.ranks)) == ("reach", ranks)
    assert where in one.found
    assert len(to_text([one], "").splitlines()) < 10


def test_two_hosts_that_fail_and_two_reasons_are_findings_of_their_own() -> None:
    gathered = job(16)
    lines(lambda line: line.receiver in (10, 11, 20, 21), error=NO_ANSWER, stage="connect")(
        gathered
    )
    lines(lambda line: line.receiver in (4, 5), error="Connection refused", stage="connect")(
        gathered
    )
    found = judge(gathered)
    assert {one.ranks for one in found} == {(10, 11), (20, 21), (4, 5)}
    assert {one.check for one in found} == {"reach"}


def test_an_interface_that_no_host_reaches_is_one_finding() -> None:
    gathered = job(4)
    for line in [one for one in gathered.lines if one.receiver != 0]:
        gathered.lines.append(
            Line(line.sender, line.receiver, "x:1", NO_ANSWER, "connect", interface="eth1")
        )
    (one,) = judge(gathered)
    assert one.check == "address" and "=^eth1" in one.todo


def test_a_long_path_without_bbr() -> None:
    gathered = job(2)
    of(congestions=["reno", "cubic"])(gathered)
    assert judge(gathered) == []
    lines(lambda one: True, round_trip=0.01)(gathered)
    assert [one.check for one in judge(gathered)] == ["congestion"]


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_sound_facts_give_nothing(hosts: int) -> None:
    assert judge(job(hosts)) == []
    assert "fit for ringreduce" in to_text([], "")


def test_findings_of_a_host_on_one_host_do_not_need_a_network() -> None:
    gathered = job(1)
    of(listening=[], listen_error="no interface is up")(gathered)
    assert judge(gathered) == []


def test_equal_findings_of_ranks_are_told_once_and_the_worst_first() -> None:
    gathered = job(1, per_host=3)
    of(shm_bytes=64 * MIB)(gathered)
    of(2, open_files=64)(gathered)
    found = judge(gathered)
    assert [(one.check, one.ranks) for one in found] == [
        ("open-files", (2,)),
        ("shm-size", (0, 1, 2)),
    ]
    text = to_text(found, "heading")
    assert "(rank 2 on node0)" in text and "(ranks 0-2 on node0)" in text
    assert text.endswith("1 fault, 1 note")
    rows = json.loads(to_json(found))
    assert [set(row) for row in rows] == [
        {"rank", "ranks", "host", "check", "severity", "found", "todo"}
    ] * 2
    assert (rows[0]["rank"], rows[0]["host"], rows[0]["check"]) == (2, "node0", "open-files")


def test_facts_travel_as_json() -> None:
    before = sound(0, 0, 1, "10.0.0.1")
    after = Facts(**json.loads(json.dumps(dataclasses.asdict(before))))
    assert judge(Gathered([after])) == judge(Gathered([before])) == []


def test_lists_of_cores() -> None:
    assert reading.parse_list("0-2,8,10-11") == [0, 1, 2, 8, 10, 11]
    assert reading.parse_list("") == []


@pytest.mark.parametrize("arguments", [["--timeout", "0"], ["--timeout", "soon"], ["--what"]])
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: " in capsys.readouterr().err


def test_variables_of_a_launcher_that_contradict_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with launchers.environment({"RANK": "2", "WORLD_SIZE": "2"}):
        assert main([]) == 2
    assert "RANK=2 and WORLD_SIZE=2" in capsys.readouterr().err


# ---- for real


def as_rank(rank: int, port: int) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": "2", **place}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_master_whose_name_is_not_known(
    rank: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch's stacks in C++, and without blame of the port."""
    monkeypatch.setattr(command, "_RANK_0_TELLS", 0.0)
    place = as_rank(rank, free_port()) | {"MASTER_ADDR": "no-such-host.invalid"}
    with launchers.environment(place):
        assert main(["--timeout", "0.5"]) == 1
    written = capfd.readouterr()
    said = " ".join((written.err if rank else written.out).split())
    assert f"fault store (rank {rank}" in said
    assert "no-such-host.invalid, is not known" in said and "MASTER_ADDR" in said
    assert "frame" not in written.err and "a port that is free" not in said


def test_a_master_that_is_not_on_rank_0s_host(capfd: pytest.CaptureFixture[str]) -> None:
    place = as_rank(0, free_port()) | {"MASTER_ADDR": "192.0.2.7"}  # of documentation
    with launchers.environment(place):
        assert main(["--timeout", "0.5", "--json"]) == 1
    written = capfd.readouterr()
    assert "192.0.2.7 is no address" in finding(written.out, "store")["found"]
    assert "frame" not in written.err


def test_a_world_size_that_no_job_has(capsys: pytest.CaptureFixture[str]) -> None:
    with launchers.environment(as_rank(0, free_port()) | {"WORLD_SIZE": "1000000000"}):
        assert main(["--json"]) == 1
    assert worse_than_notes(capsys.readouterr().out) == {"world-size"}


def test_a_system_without_what_facts_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(reading, "_read", lambda path: "")
    monkeypatch.setattr(reading, "_link", lambda path: "")
    facts = reading.gather(Identity(0, 1))
    assert facts.affinity and "sched_getaffinity" in facts.affinity_error


def test_a_trial_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_START_SECONDS", 0.0)
    trying = trial.Trial()
    found = trying.first(solo=True)
    trying.close()
    assert found == {trial.MEMORY: "", trial.SOCKET: "", trial.ALONE: "it did not end within 0 s"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_of_a_program_that_says_nothing(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 cannot have the port, and rank 1 waits there no longer than it is told to."""
    monkeypatch.setattr(command, "_RANK_0_TELLS", 0.0)
    with (
        socket.create_server(("", 0)) as mute,
        launchers.environment(as_rank(rank, mute.getsockname()[1])),
    ):
        assert main(["--timeout", "1"]) == 1
    written = capsys.readouterr()
    said = written.err if rank else written.out
    assert f"fault  store  (rank {rank}" in said
    assert ("no way to rank 0's store" if rank else "rank 0 cannot listen") in said


def test_a_rank_that_comes_and_falls_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """It has connected to rank 0's store, and tells nothing: rank 0 names it."""
    port = free_port()
    with (
        launchers.environment(as_rank(0, port)),
        concurrent.futures.ThreadPoolExecutor(1) as other,
    ):
        there = other.submit(TCPStore, "127.0.0.1", port, 2, False)
        assert main(["--timeout", "1", "--json"]) == 1
        there.result()
    assert finding(capsys.readouterr().out, "absent")["ranks"] == [1]


def rows_of(output: str) -> list[dict[str, Any]]:
    """The report of rank 0, behind what torch or a launcher may have written."""
    found = re.search(r"^\[\]$|^\[$.*?^\]$", output, re.MULTILINE | re.DOTALL)
    assert found, output
    rows: list[dict[str, Any]] = json.loads(found[0])
    return rows


def worse_than_notes(output: str) -> set[str]:
    return {row["check"] for row in rows_of(output) if row["severity"] != "note"}


def diagnose(*prefix: str, **env: str) -> subprocess.CompletedProcess[str]:
    return launchers.run([*prefix, *DOCTOR, "--json"], env, timeout=400.0)


def finding(output: str, check: str) -> dict[str, Any]:
    found = [r for r in rows_of(output) if r["check"] == check and r["severity"] != "note"]
    assert len(found) == 1, output
    return found[0]


CORE = str(min(os.sched_getaffinity(0)))
needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or not shutil.which("taskset"),
    reason="needs two cores and taskset",
)


@pytest.mark.slow
def test_this_machine_is_sound() -> None:
    done = diagnose()
    assert worse_than_notes(done.stdout) == set(), done.stdout
    assert done.returncode == 0


# A program that the kernel refuses a system call, by an error or with the end of the process.
REFUSE = """
import ctypes, os, struct, sys
number, verdict, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, verdict), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
os.execvp(command[0], command)
"""
NUMBERS = {  # x86-64, AArch64
    "ftruncate": (77, 46),
    "sched_getaffinity": (204, 123),
    "socketpair": (53, 199),
}
EPERM, KILL = 0x00050000 | errno.EPERM, 0x80000000


def without(call: str, verdict: int = EPERM) -> list[str]:
    number = NUMBERS[call][platform.machine() == "aarch64"]
    return [sys.executable, "-c", REFUSE, str(number), str(verdict)]


WITHOUT_PROC = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc; exec "$@"', "sh"]
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare"
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("check", "prefix", "env", "words"),
    [
        ("file-size", ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"], {}, "ulimit -f is 0"),
        ("shared-memory", without("ftruncate"), {}, "ftruncate: Operation not permitted"),
        ("shared-memory", without("ftruncate", KILL), {}, "signal SIGSYS"),
        ("unix-socket", without("socketpair"), {}, "socketpair: Operation not permitted"),
        ("affinity", without("sched_getaffinity"), {}, "Operation not permitted"),
        ("folder", [], {"TMPDIR": "/proc/none"}, "TMPDIR says (/proc/none)"),
        ("folder", [], {"RINGREDUCE_DUMP": "/proc/none/x"}, "RINGREDUCE_DUMP says"),
        ("folder", [], {"RINGREDUCE_TIMELINE": "/proc/none/x"}, "RINGREDUCE_TIMELINE says"),
        ("folder", [], {"RINGREDUCE_METRICS": f"{__file__}/x"}, "Not a directory"),
        pytest.param(
            "loopback", ["unshare", "-n"], {}, "loopback interface", marks=needs_namespaces
        ),
        ("open-files", ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"], {}, "ulimit -n is 64"),
        pytest.param(
            "threads",
            ["taskset", "-c", CORE],
            {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
            "OMP_NUM_THREADS is 2",
            marks=needs_two_cores,
        ),
        ("variable", [], {"RINGREDUCE_LANES": "65"}, "RINGREDUCE_LANES=65"),
        ("unknown-variable", [], {"RINGREDUCE_WIRES": "tcp"}, "RINGREDUCE_WIRES"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_real_fault_of_one_process(
    check: str, prefix: list[str], env: dict[str, str], words: str
) -> None:
    done = diagnose(*prefix, **env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert worse_than_notes(done.stdout) == {check}
    assert words in finding(done.stdout, check)["found"]


@pytest.mark.slow
@needs_namespaces
def test_a_machine_without_proc() -> None:
    done = diagnose(*WITHOUT_PROC)
    found = {row["check"] for row in rows_of(done.stdout)}
    assert found - {"pressure", "unknown-variable"} == {"proc"}  # of other jobs; of the build
    assert done.returncode == 0


@pytest.mark.slow
def test_folders_of_a_sound_job_are_not_made(tmp_path: Path) -> None:
    names = ("RINGREDUCE_DUMP", "RINGREDUCE_TIMELINE", "RINGREDUCE_METRICS")
    done = diagnose(TMPDIR=str(tmp_path), **{name: f"{tmp_path}/a/{name}" for name in names})
    assert worse_than_notes(done.stdout) == set(), done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("check", "whose", "who", "words"),
    [
        ("same-world-size", [1], [(0, 2), (1, 3)], "2 on rank 0; 3 on rank 1"),
        ("same-world-size", [2], [(0, 2), (1, 2), (2, 3)], "2 on ranks 0 and 1; 3 on rank 2"),
        ("same-world-size", [1], [(0, 1), (1, 2)], "1 on rank 0; 2 on rank 1"),
        ("same-rank", [1], [(0, 3), (1, 3), (1, 3)], "2 processes are rank 1"),
        ("same-rank", [0], [(0, 2), (0, 2)], "2 processes are rank 0"),
        ("same-rank", [0], [(0, 2), (0, 2), (1, 2)], "2 processes are rank 0"),
    ],
)
def test_processes_that_contradict_each_other(
    check: str, whose: list[int], who: list[tuple[int, int]], words: str
) -> None:
    port = free_port()

    def start(one: tuple[int, int]) -> subprocess.CompletedProcess[str]:
        place = as_rank(one[0], port) | {"WORLD_SIZE": str(one[1])}
        return launchers.run([*DOCTOR, "--json"], place, timeout=600.0)

    with concurrent.futures.ThreadPoolExecutor(len(who)) as pool:
        done = list(pool.map(start, who))
    # The first that is rank 0 tells of it, and the others are silent.
    (said,) = [one for one in done if one.stdout]
    assert "cores" not in worse_than_notes(said.stdout) or len(who) > len(os.sched_getaffinity(0))
    assert worse_than_notes(said.stdout) - {"cores"} == {check}, said.stdout + said.stderr
    row = finding(said.stdout, check)
    assert row["ranks"] == whose and words in row["found"]
    assert said.returncode == 1 and sum(one.returncode for one in done) == 1


def under_torchrun(size: int, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = launchers.torchrun(size, "--no-python", "sh", "-c", script, "sh")
    return launchers.run([*command, *DOCTOR, "--json"], env, timeout=600.0)


@pytest.mark.nightly
@needs_two_cores
def test_all_ranks_on_one_core_under_torchrun() -> None:
    done = under_torchrun(2, f'exec taskset -c {CORE} "$@"')
    assert worse_than_notes(done.stdout) == {"affinity"}, done.stdout + done.stderr
    assert finding(done.stdout, "affinity")["ranks"] == [0, 1]
    assert done.returncode != 0  # torchrun's, for a rank that ended with 1


@pytest.mark.nightly
def test_what_a_job_over_sockets_does_without_under_torchrun() -> None:
    script = f'exec {shlex.join(without("ftruncate"))} "$@"'
    done = under_torchrun(2, script, RINGREDUCE_WIRE="tcp")
    assert worse_than_notes(done.stdout) == set(), done.stdout + done.stderr
    assert "shared-memory" in {row["check"] for row in rows_of(done.stdout)}


@pytest.mark.slow
def test_a_rank_that_does_not_come_under_torchrun() -> None:
    done = under_torchrun(2, 'if [ $RANK = 1 ]; then exec sleep 600; fi; exec "$@" --timeout 6')
    assert worse_than_notes(done.stdout) == {"absent"}, done.stdout + done.stderr
    assert finding(done.stdout, "absent")["rank"] == 1


@pytest.mark.slow
@needs_two_cores
def test_ranks_of_mpirun() -> None:
    command = launchers.mpirun(2)
    done = launchers.run([*command, *DOCTOR[1:], "--json"], timeout=600.0)
    assert worse_than_notes(done.stdout) == set(), done.stdout + done.stderr
    assert done.returncode == 0


needs_hosts = pytest.mark.skipif(bool(why_not(veth=True)), reason=why_not(veth=True))


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with Hosts(3, veth=True, rate_mbit=1000) as hosts:
        yield hosts


def between(hosts: Hosts, *prefix: str, **env: str) -> tuple[int, str]:
    """The status of rank 0, and what it wrote; the others write nothing and end with 0."""
    outcomes = hosts.start([*prefix, *DOCTOR, "--json"], environment=env).wait(120.0)
    for outcome in outcomes[1:]:
        assert outcome.code == 0, outcome
        assert '"check"' not in outcome.output, outcome
    return outcomes[0].code, outcomes[0].output


@pytest.mark.slow
@needs_hosts
def test_three_sound_hosts(three: Hosts) -> None:
    status, output = between(three)
    assert worse_than_notes(output) == set(), output
    assert status == 0


def on_rank(rank: int, *prefix: str) -> list[str]:
    """Puts words before the command of one rank."""
    script = f'if [ $RANK = {rank} ]; then exec {shlex.join(prefix)} "$@"; fi; exec "$@"'
    return ["sh", "-c", script, "sh"]


@pytest.mark.nightly
@needs_hosts
@pytest.mark.parametrize(
    ("check", "whose", "prefix", "env"),
    [
        ("shared-memory", [1], on_rank(1, *without("ftruncate")), {}),
        ("unix-socket", [2], on_rank(2, *without("socketpair")), {}),
        ("file-size", [1], on_rank(1, "sh", "-c", 'ulimit -f 1; exec "$@"', "sh"), {}),
        ("folder", [2], on_rank(2, "env", "TMPDIR=/proc/none"), {}),
        ("same-world-size", [2], on_rank(2, "env", "WORLD_SIZE=4"), {}),
        ("same-rank", [1], on_rank(2, "env", "RANK=1"), {}),
        ("same-rank", [0], on_rank(2, "env", "RANK=0"), {}),
        ("proc", [0, 1, 2], WITHOUT_PROC, {}),
        ("group", [0, 1, 2], [], {"RINGREDUCE_RING": "0,2,5"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_real_fault_of_three_hosts(
    three: Hosts, check: str, whose: list[int], prefix: list[str], env: dict[str, str]
) -> None:
    status, output = between(three, *prefix, **env)
    # Hosts without /proc are one to ringreduce, on whose cores there are three ranks.
    assert worse_than_notes(output) - {"cores"} == {check}, output
    assert finding(output, check)["ranks"] == whose
    assert status == 1


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("host", [0, 1])
def test_a_loopback_interface_that_is_down(host: int) -> None:
    """Rank 0's store needs it.  A single rank of another host does not."""
    with Hosts(3, veth=True, rate_mbit=1000) as hosts:
        hosts[host].run("ip", "link", "set", "lo", "down")
        job = hosts.start([*DOCTOR, "--json", "--timeout", "15"])
        first = job.wait(120.0)[0]
    rows = [row for row in rows_of(first.output) if row["check"] == "loopback"]
    assert [row["ranks"] for row in rows] == [[host]]
    assert worse_than_notes(first.output) == {"loopback"} - ({"loopback"} if host else set())
    assert first.code == (host == 0)


@pytest.mark.slow
@needs_hosts
def test_a_line_that_is_cut() -> None:
    with Hosts(3, delay_ms=0.1, rate_mbit=1000) as hosts:
        hosts.cut(1, 2)
        status, output = between(hosts)
    assert worse_than_notes(output) == {"reach"}, output
    assert finding(output, "reach")["ranks"] == [1, 2]
    assert status == 1


@pytest.mark.slow
@needs_hosts
def test_ports_that_a_host_blocks() -> None:
    """What comes to host 2's ports of RINGREDUCE_PORTS is dropped there, by a rule of routing."""
    with Hosts(3, veth=True, rate_mbit=1000) as hosts:
        name = hosts[2].interfaces[0].name
        blocked = f"pref 10 iif {name} ipproto tcp dport 47000-47003 blackhole"
        # Before the table of local addresses, which otherwise comes first.
        for rule in (f"add {blocked}", "add pref 20 lookup local", "del pref 0"):
            for family in ("-4", "-6"):  # a host has addresses of both
                hosts[2].run("ip", family, "rule", *rule.split())
        status, output = between(hosts, RINGREDUCE_PORTS="47000-47003")
    assert worse_than_notes(output) == {"reach"}, output
    row = finding(output, "reach")
    assert row["ranks"] == [2] and "for 2 of 2 other hosts" in row["found"]
    assert "47000-47003" in row["todo"]
    assert status == 1


@pytest.mark.slow
@needs_hosts
def test_an_interface_with_another_mtu(three: Hosts) -> None:
    name = three[1].interfaces[0].name
    three[1].run("ip", "link", "set", "dev", name, "mtu", "1400")
    try:
        status, output = between(three)
    finally:
        three[1].run("ip", "link", "set", "dev", name, "mtu", "1500")
    assert worse_than_notes(output) == set(), output
    (row,) = [row for row in rows_of(output) if row["check"] == "mtu"]
    assert "1400 on" in row["found"]
    assert status == 0


@pytest.mark.slow
@needs_hosts
def test_one_host_id_for_all(three: Hosts) -> None:
    status, output = between(three, RINGREDUCE_HOSTID="a")
    assert worse_than_notes(output) >= {"host-id"}, output
    assert finding(output, "host-id")["ranks"] == [0, 1, 2]
    assert status == 1
