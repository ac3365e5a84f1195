"""Which interfaces and ports groups between hosts use, and what they say where these will not do.

Hosts have two interfaces, eth0 on 10.88.0.0/24 and eth1 on 10.89.0.0/24, each with IPv6 as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hosts import Hosts, why_not
from net_reset import connected_sockets
from pool import Call, Pool, Raised, Rank, World

pytestmark = pytest.mark.skipif(bool(why_not(veth=True)), reason=why_not(veth=True))


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with Hosts(2, veth=True, interfaces=2, rate_mbit=1000) as hosts:
        yield hosts


Settings = dict[int, dict[str, str]]  # of a rank's environment, or of everybody's (EVERY)
EVERY = -1


def networks(me: Rank, name: str, size: int, settings: Settings, timeout: float) -> set[str]:
    """Makes a group, moves data, and says over which networks its connections go."""
    os.environ.update(settings.get(me.rank, {}) | settings.get(EVERY, {}))
    me.world_size = size
    me.init(name, timeout=timeout)
    t = torch.full((300_000,), float(me.rank + 1))
    dist.all_reduce(t)
    assert t.eq(me.world_size * (me.world_size + 1) / 2).all()
    got, peer = torch.empty(50_000), me.rank ^ 1
    for work in [dist.isend(t[:50_000], peer), dist.irecv(got, peer)]:
        assert work is not None
        work.wait()
    assert got.equal(t[:50_000])
    sockets = connected_sockets(os.getpid())
    mine = [s.getsockname()[0] for s in sockets if s.getpeername()[1] != me.store_port]
    for one in sockets:
        one.close()
    dist.barrier()
    dist.destroy_process_group()
    return {address.rpartition(":" if ":" in address else ".")[0] for address in mine}


def on(
    pool: Pool,
    hosts: Hosts,
    settings: Settings,
    per_host: int = 1,
    family: str = "ipv4",
    timeout: float = 30.0,
) -> Call:
    size = per_host * len(hosts)
    world = World(0, "ringreduce", places=hosts.places(per_host=per_host, family=family))
    name = pool.name("interfaces")
    return pool.start(networks, world, name, size, settings, timeout, ranks=size, fresh=True)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("", {"10.88.0"}),
        ("eth1", {"10.89.0"}),
        ("10.89.0.0/24", {"10.89.0"}),
        ("^eth0", {"10.89.0"}),
        ("fd88:1::/64", {"fd88:1:"}),
        ("eth0,eth1", {"10.88.0", "10.89.0"}),
    ],
)
def test_the_wanted_interfaces_carry_it(
    pool: Pool, two: Hosts, wanted: str, expected: set[str]
) -> None:
    found = on(pool, two, {EVERY: {"RINGREDUCE_IF": wanted}}).results()
    assert found == [expected] * 2


@pytest.mark.parametrize(("family", "expected"), [("ipv4", {"10.88.0"}), ("ipv6", {"fd88:"})])
def test_of_both_families_it_is_the_stores(
    pool: Pool, two: Hosts, family: str, expected: set[str]
) -> None:
    assert on(pool, two, {}, family=family).results() == [expected] * 2


def test_hosts_without_ipv4(pool: Pool) -> None:
    with Hosts(2, veth=True) as hosts:
        for host in hosts.all:
            host.run("ip", "-4", "address", "flush", "dev", host.interfaces[0].name)
        assert on(pool, hosts, {}, family="ipv6").results() == [{"fd88:"}] * 2


def test_more_ranks_than_ports(pool: Pool, two: Hosts) -> None:
    call = on(pool, two, {EVERY: {"RINGREDUCE_PORTS": "47000"}}, per_host=2)
    for outcome in call.outcomes():
        assert isinstance(outcome, Raised), outcome
        assert "all ports from 47000 to 47000 are taken" in outcome.message, outcome.message
        assert "rank " in outcome.message and "widen the range" in outcome.message
    found = on(pool, two, {EVERY: {"RINGREDUCE_PORTS": "47000-47001"}}, per_host=2).results()
    assert found == [{"10.88.0"}] * 4


def test_an_address_that_nobody_reaches(pool: Pool, two: Hosts) -> None:
    two[1].run("ip", "link", "add", "far0", "type", "veth", "peer", "name", "far1")
    try:
        two[1].run("ip", "address", "add", "172.30.0.1/16", "dev", "far0")
        two[1].run("ip", "link", "set", "far0", "up")
        two[1].run("ip", "link", "set", "far1", "up")
        settings = {1: {"RINGREDUCE_IF": "far0"}}
        for outcome in on(pool, two, settings, timeout=5.0).outcomes():
            assert isinstance(outcome, Raised), outcome
            assert "cannot reach rank 1" in outcome.message, outcome.message
            assert "172.30.0.1" in outcome.message, outcome.message
            assert "RINGREDUCE_IF" in outcome.message, outcome.message
    finally:
        two[1].run("ip", "link", "delete", "far0")
