"""How a group's data travels: how much each interface carries, the line that says which carry it,
and the congestion control."""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import Host, Hosts, why_not
from pool import Pool, Rank, World

ELEMENTS = 2_000_000
CALLS = 4
LINE_BYTES = 12_500_000  # a second


def reduce_some(me: Rank) -> float:
    for _ in range(CALLS):
        t = torch.full((ELEMENTS,), float(me.rank + 1))
        dist.all_reduce(t)
    dist.barrier()
    return t[-1].item()


def sent(host: Host) -> dict[str, int]:
    """The bytes that each interface of a host has sent."""
    text = host.run("cat", "/proc/self/net/dev")
    found = re.findall(r"^\s*(\w+):\s*((?:\d+\s*)+)$", text, re.MULTILINE)
    return {name: int(numbers.split()[8]) for name, numbers in found}


@pytest.mark.parametrize("wanted", ["eth0,eth1", "eth1,eth0", "10.88.0.0/16,10.89.0.0/16", "eth1"])
def test_interfaces_share_the_data(pool: Pool, wanted: str) -> None:
    if why := why_not(veth=True):
        pytest.skip(why)
    with Hosts(2, veth=True, interfaces=2, rate_mbit=500) as hosts:
        env = (("RINGREDUCE_IF", wanted),)
        before = [sent(host) for host in hosts.all]
        world = World(2, "ringreduce", env, places=hosts.places())
        assert pool.start(reduce_some, world, fresh=True).results() == [3.0, 3.0]
        whole = CALLS * ELEMENTS * 4  # two ranks send each other half of it, twice
        for host, first in zip(hosts.all, before, strict=True):
            after = sent(host)
            carried = {name: (after[name] - first[name]) / whole for name in ("eth0", "eth1")}
            assert sum(carried.values()) > 0.95, carried
            if wanted == "eth1":
                assert carried["eth0"] < 0.05, carried
            else:
                assert min(carried.values()) > 0.25, carried


RANK = """
import sys
import torch.distributed as dist
dist.init_process_group("ringreduce")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        pytest.param({}, "by which the store's host 10.88.0.1 is reached", marks=pytest.mark.slow),
        ({"RINGREDUCE_IF": "eth1"}, "as RINGREDUCE_IF=eth1 has it"),
        ({"RINGREDUCE_BANDWIDTH_MBIT": "500"}, "by which the store's host 10.88.0.1 is reached"),
    ],
)
def test_a_line_says_which_interface_and_why(variables: dict[str, str], reason: str) -> None:
    if why := why_not(veth=True):
        pytest.skip(why)
    with Hosts(2, veth=True, interfaces=2, rate_mbit=500) as hosts:
        for level in ("info", ""):
            job = hosts.start(
                [sys.executable, "-c", RANK],
                environment={**variables, "RINGREDUCE_LOG": level},
                port=29400 + bool(level),
            )
            for outcome in job.wait(240):
                assert outcome.code == 0, outcome.output
                name = variables.get("RINGREDUCE_IF", "eth0")
                line = (
                    rf"rank {outcome.rank} \(.*\) of group '.*' is reached at {name} \([0-9.:]+\)"
                )
                assert bool(re.search(f"{line}.*, {reason}", outcome.output)) == bool(level)
                # Rank 0 says by what the group chooses algorithms.
                told = "RINGREDUCE_BANDWIDTH_MBIT" in variables
                assumed = r"for round trips of [0-9.]+ ms and {} Mbit/s of a host{}\n".format(
                    *(("500", "") if told else ("8000", ", until calls have measured it"))
                )
                logged = re.search(assumed, outcome.output)
                assert bool(logged) == (bool(level) and outcome.rank == 0)


def busy_sockets(least: int) -> Iterator[socket.socket]:
    """This process's connections whose peers have acknowledged so many bytes."""
    for path in Path("/proc/self/fd").iterdir():
        if not path.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(path.name))) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
            (acknowledged,) = struct.unpack_from("Q", info, 120)  # tcpi_bytes_acked
            if acknowledged > least:
                yield one


def congestion_controls(me: Rank) -> set[str]:
    """Those of this rank's connections that have sent data."""
    for _ in range(8):
        dist.all_reduce(torch.ones(1_000_000))
    controls = (
        one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        for one in busy_sockets(1_000_000)
    )
    return {control.rstrip(b"\0").decode() for control in controls}


@pytest.mark.parametrize(
    ("line", "wanted"), [({}, {"cubic"}), ({"loss": 0.02}, {"bbr"}), ({"queue_ms": 2}, {"bbr"})]
)
def test_short_paths_keep_bbr_where_packets_are_lost(
    pool: Pool, line: dict[str, Any], wanted: set[str]
) -> None:
    if why := why_not():
        pytest.skip(why)
    name = "net.ipv4.tcp_congestion_control"
    with Hosts(2, rate_mbit=500, delay_ms=0.1, **line) as hosts:
        if "bbr" not in hosts[0].sysctl("net.ipv4.tcp_available_congestion_control").split():
            pytest.skip("this kernel has no BBR")
        for host in hosts.all:
            host.sysctl(name, "bbr")
        call = pool.start(
            congestion_controls, World(2, "ringreduce", places=hosts.places()), fresh=True
        )
        assert call.results() == [wanted] * 2


def are_paced(me: Rank) -> list[set[bool]]:
    """Whether this rank's connections are, before it knows the line and afterwards."""
    so_max_pacing_rate = 47
    found = []
    for calls in (1, 12):
        for _ in range(calls):
            dist.all_reduce(torch.ones(1_000_000))
        rates = (
            struct.unpack("Q", one.getsockopt(socket.SOL_SOCKET, so_max_pacing_rate, 8))[0]
            for one in busy_sockets(100_000)
        )
        found.append({rate < 16 * LINE_BYTES for rate in rates})
    return found


@pytest.mark.parametrize("control", ["reno", "bbr"])
def test_long_paths_are_paced_once_they_are_full_but_for_bbr(pool: Pool, control: str) -> None:
    if why := why_not():
        pytest.skip(why)
    with Hosts(2, rate_mbit=8e-6 * LINE_BYTES, delay_ms=10) as hosts:
        if control not in hosts[0].sysctl("net.ipv4.tcp_available_congestion_control").split():
            pytest.skip(f"this kernel has no {control}")
        for host in hosts.all:
            host.sysctl("net.ipv4.tcp_congestion_control", control)
        call = pool.start(are_paced, World(2, "ringreduce", places=hosts.places()), fresh=True)
        assert call.results() == [[{False}, {control != "bbr"}]] * 2


def moves(me: Rank) -> list[int]:
    """The bits of calls of all kinds, each of some MB: one by one, asynchronous, coalesced."""
    P = me.world_size
    generator = torch.Generator().manual_seed(me.rank)
    mine = torch.rand(ELEMENTS, generator=generator) - 0.25
    found = []

    def keep(*tensors: torch.Tensor) -> None:
        found.extend(hash(t.view(torch.uint8).numpy().tobytes()) for t in tensors)

    for calls in range(2):
        asynchronous = calls > 0
        works = []
        summed, sent_to_all, reduced = mine.clone(), mine.clone(), mine.clone()
        gathered = torch.empty(P * ELEMENTS)
        part, turned = torch.empty(ELEMENTS // P), torch.empty(ELEMENTS)
        listed = [torch.empty(ELEMENTS) for _ in range(P)] if me.rank == 1 else None
        works.append(dist.all_reduce(summed, async_op=asynchronous))
        works.append(dist.broadcast(sent_to_all, 1, async_op=asynchronous))
        works.append(dist.reduce(reduced, P - 1, async_op=asynchronous))
        works.append(dist.all_gather_into_tensor(gathered, mine, async_op=asynchronous))
        works.append(dist.reduce_scatter_tensor(part, mine, async_op=asynchronous))
        works.append(dist.all_to_all_single(turned, mine, async_op=asynchronous))
        works.append(dist.gather(mine, listed, 1, async_op=asynchronous))
        for work in works:
            if asynchronous:
                work.wait()
        keep(summed, sent_to_all, gathered, part, turned, *(listed or []))
        if me.rank == P - 1:
            keep(reduced)
    several = [mine + i for i in range(3)]
    with dist._coalescing_manager():
        for t in several:
            dist.all_reduce(t)
    keep(*several)
    # Messages to a rank of this host, to one of the other, and to itself.
    for peer in (me.rank ^ 1, me.rank ^ 2, me.rank):
        for size in (ELEMENTS, 100):
            got = torch.empty(size)
            ends = [dist.P2POp(dist.isend, mine[:size], peer), dist.P2POp(dist.irecv, got, peer)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
            keep(got)
    dist.barrier()
    return found


def test_data_between_ranks_of_a_host_goes_through_memory_and_gives_the_same_bits(
    pool: Pool,
) -> None:
    """On several hosts, by whatever call; also where a group survives losses."""
    if why := why_not(veth=True):
        pytest.skip(why)
    bits = []
    with Hosts(2, veth=True, rate_mbit=2000) as hosts:
        for settings, goes_through_memory in (
            ({"ALGORITHM": "ring", "WIRE": "tcp"}, False),
            ({"ALGORITHM": "ring"}, True),
            ({"ON_LOSS": "continue"}, True),
        ):
            env = tuple((f"RINGREDUCE_{name}", value) for name, value in settings.items())
            before = [sent(host)["lo"] for host in hosts.all]
            world = World(4, "ringreduce", env, places=hosts.places(per_host=2))
            bits.append(pool.start(moves, world, fresh=True).results())
            for host, first in zip(hosts.all, before, strict=True):
                carried = sent(host)["lo"] - first
                # What remains is the store's, the group's making, and its heartbeats.
                assert (carried < ELEMENTS / 4) == goes_through_memory, (settings, carried)
    assert bits[0] == bits[1] == bits[2]
