"""The hosts that other tests run on (tests/hosts.py, benchmarks/net/wan.cc): lines are as they were
asked for, what is cut is cut in silence, and nothing is left behind."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hosts import Host, Hosts, HostsError, program, why_not
from pool import Rank, World
from processes import alive, wait_until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
needs_veth = pytest.mark.skipif(bool(why_not(veth=True)), reason=why_not(veth=True))
BOTH = [False, pytest.param(True, marks=needs_veth)]

FAMILIES = {"ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}


def address(host: Host, family: str, interface: int = 0) -> str:
    return str(getattr(host.interfaces[interface], family))


def udp(host: Host, family: str, interface: int = 0) -> socket.socket:
    with host.inside():
        made = socket.socket(FAMILIES[family], socket.SOCK_DGRAM)
    made.bind((address(host, family, interface), 0))
    made.settimeout(2.0)
    return made


def round_trip(a: socket.socket, b: socket.socket) -> float:
    """Seconds from a to b and back."""
    start = time.perf_counter()
    a.sendto(b"there", b.getsockname())
    data, sender = b.recvfrom(64)
    b.sendto(data, sender)
    assert a.recv(64) == b"there"
    return time.perf_counter() - start


def reaches(a: socket.socket, b: socket.socket) -> bool:
    """Whether a packet from a comes to b. Older ones may still come: each has a number."""
    token = os.urandom(8)
    a.sendto(token, b.getsockname())
    b.settimeout(0.2)
    try:
        while b.recv(64) != token:
            pass
    except TimeoutError:
        return False
    return True


def connected(a: Host, b: Host, family: str, interface: int = 0) -> tuple[socket.socket, ...]:
    """A TCP connection from a to b: both ends."""
    with b.inside():
        listener = socket.socket(FAMILIES[family])
    with listener:
        listener.bind((address(b, family, interface), 0))
        listener.listen()
        with a.inside():
            sender = socket.socket(FAMILIES[family])
        sender.settimeout(10.0)
        sender.connect(listener.getsockname())
        receiver = listener.accept()[0]
        receiver.settimeout(10.0)
    return sender, receiver


def transfer(ends: tuple[socket.socket, ...], data: bytes) -> float:
    """Sends data and closes; checks what comes; seconds until all has come."""
    sender, receiver = ends
    with sender, receiver:
        start = time.perf_counter()
        thread = threading.Thread(target=lambda: (sender.sendall(data), sender.shutdown(1)))
        thread.start()
        digest, count = hashlib.sha256(), 0
        while part := receiver.recv(1 << 20):
            digest.update(part)
            count += len(part)
        seconds = time.perf_counter() - start
        thread.join()
    assert count == len(data)
    assert digest.digest() == hashlib.sha256(data).digest()
    return seconds


def some_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count)


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "ipv6" and not Path("/proc/sys/net/ipv6").exists():
        pytest.skip("this system has no IPv6")
    yield request.param


def test_delay_is_as_asked_for_and_changes_by_command(family):
    with Hosts(delay_ms=20) as hosts:
        a, b = udp(hosts[0], family), udp(hosts[1], family)
        # Never too short (but for what waking takes); how much longer depends on who else has the
        # processors.
        assert min(round_trip(a, b) for _ in range(5)) >= 0.0399
        hosts.link(0, 1, delay_ms=1)
        shorter = min(round_trip(a, b) for _ in range(5))
        assert 0.0209 <= shorter < 0.040
        hosts.link("*", "*", delay_ms=0)
        assert min(round_trip(a, b) for _ in range(20)) < 0.010


def test_rate_is_as_asked_for(family):
    """20 Mbit/s: so slow that a busy machine keeps up with it."""
    with Hosts(rate_mbit=20) as hosts:
        data = some_bytes(1_000_000)
        seconds = transfer(connected(hosts[0], hosts[1], family), data)
        carried = hosts.statistics()["links"][0]
        assert carried["to"] == 1
        # Of what was carried, the part before the first byte came in had the line to itself.
        assert 8 * carried["bytes"] / seconds / 1e6 < 22
        if seconds > 8 * carried["bytes"] / 20e6 * 1.1:
            pytest.skip(f"the machine is too busy to tell: {seconds:.2f} s")


@pytest.mark.parametrize("mtu", [1500, 9000])
def test_bytes_arrive_as_sent_though_packets_are_lost(family, mtu):
    """Runs of packets are cut up where one is lost; TCP puts all together again."""
    with Hosts(delay_ms=1, rate_mbit=1000, loss=0.01, mtu=mtu, seed=mtu) as hosts:
        transfer(connected(hosts[0], hosts[1], family), some_bytes(4_000_003))
        link = hosts.statistics()["links"][0]
        assert link["packets"] >= 4_000_003 / mtu
        share = link["lost"] / (link["packets"] + link["lost"])
        assert 0.002 < share < 0.03  # of at least 445 packets


def test_loss_is_as_asked_for():
    with Hosts(loss=0.1) as hosts:
        a, b = udp(hosts[0], "ipv4"), udp(hosts[1], "ipv4")
        for _ in range(2000):
            a.sendto(b"x", b.getsockname())
        wait_until(
            lambda: sum(hosts.statistics()["links"][0][k] for k in ("packets", "lost")) == 2000
        )
        link = hosts.statistics()["links"][0]
        assert link["packets"] + link["lost"] == 2000
        assert 140 < link["lost"] < 260  # four standard deviations and a half


def test_a_queue_that_is_full_drops():
    with Hosts(rate_mbit=1, queue_ms=20) as hosts:
        a, b = udp(hosts[0], "ipv4"), udp(hosts[1], "ipv4")
        for _ in range(50):
            a.sendto(bytes(1000), b.getsockname())  # 8 ms each
        wait_until(lambda: hosts.statistics()["links"][0]["overflowed"] > 40)
        assert 40 < hosts.statistics()["links"][0]["overflowed"] < 50


@pytest.mark.parametrize("veth", BOTH)
def test_cut_is_silent_and_heals(veth, family):
    with Hosts(3, veth=veth, delay_ms=0) as hosts:
        a, b, c = (udp(host, family) for host in hosts.all)
        sender, receiver = connected(hosts[0], hosts[1], family)
        assert reaches(a, b)
        hosts.cut(0, 1)
        assert not reaches(a, b)
        assert not reaches(b, a)
        assert reaches(a, c)
        assert reaches(c, b)
        sender.sendall(b"late")  # no error, and nothing comes
        receiver.settimeout(0.3)
        with pytest.raises(TimeoutError):
            receiver.recv(4)
        hosts.heal(0, 1)
        assert reaches(a, b)
        receiver.settimeout(10.0)
        assert receiver.recv(4) == b"late"
        hosts.cut(2)
        assert not reaches(a, c)
        assert not reaches(c, b)
        assert reaches(a, b)
        hosts.heal(2)
        assert reaches(a, c)


@needs_veth
def test_veth_hosts_have_several_interfaces_and_a_rate(family):
    with Hosts(3, veth=True, interfaces=2, rate_mbit=50, mtu=9000) as hosts:
        assert [i.name for i in hosts[2].interfaces] == ["eth0", "eth1"]
        assert hosts[2].interfaces[1].ipv4 == "10.89.0.3"
        for interface in (0, 1):
            ends = connected(hosts[0], hosts[2], family, interface)
            seconds = transfer(ends, some_bytes(1_000_000))
            assert 8 / seconds < 55 + 8 * 0.14 / seconds  # two buckets of 70 KB are free
        # What two hosts send comes in over the one line of a third.
        both = [connected(hosts[sender], hosts[2], family) for sender in (0, 1)]
        start = time.perf_counter()
        threads = [threading.Thread(target=transfer, args=(e, some_bytes(1_000_000))) for e in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        assert 16 / seconds < 55 + 8 * 0.28 / seconds


def test_ranks_run_on_their_hosts_and_are_told_who_they_are():
    code = (
        "import os, socket;"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], socket.if_nameindex())"
    )
    with Hosts(2) as hosts:
        outcomes = hosts.start([sys.executable, "-c", code], per_host=2).wait(20.0)
        assert [outcome.code for outcome in outcomes] == [0, 0, 0, 0]
        for rank, outcome in enumerate(outcomes):
            assert outcome.output.startswith(f"{rank} 4 ")
            assert "wan0" in outcome.output
        assert "wan0" not in dict(socket.if_nameindex()).values()  # and this process on none


def on_its_host(me: Rank, addresses: list[str]) -> tuple[str, float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "wan0"
    me.init("hosts", size=len(addresses))
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    with socket.socket() as probe:
        probe.bind((addresses[me.rank], 0))  # which only this host has
    return socket.if_nameindex()[-1][1], float(tensor.sum())


def test_the_pools_ranks_can_be_on_hosts(pool, family):
    with Hosts(2) as hosts:
        world = World(0, "gloo", places=hosts.places(per_host=2, family=family))
        addresses = [hosts[rank // 2].address for rank in range(4)]
        call = pool.start(on_its_host, world, addresses, ranks=4, fresh=True)
        assert call.results() == [("wan0", 4000.0)] * 4


def test_what_still_runs_is_told_and_killed():
    with Hosts(2) as hosts:
        job = hosts.start([sys.executable, "-uc", "print('here'); import time; time.sleep(60)"])
        with pytest.raises(HostsError, match=r"rank\(s\) \[0, 1\] still run"):
            job.wait(0.5)
        job.signal(1, signal.SIGSTOP)
        pids = [process.pid for process in job.processes]
    assert not any(alive(pid) for pid in pids)


def test_a_wrong_command_is_refused_and_changes_nothing():
    with Hosts(2) as hosts:
        for wrong in (
            "cut 2",
            "cut",
            "link 0 1 speed=3",
            "link 0 1 loss=2",
            "what",
            "link 0 1 loss=x",
        ):
            with pytest.raises(HostsError):
                hosts.command(wrong)
        assert reaches(udp(hosts[0], "ipv4"), udp(hosts[1], "ipv4"))


@pytest.mark.parametrize("ending", ["end of input", "SIGTERM", "SIGKILL", "death of the starter"])
@pytest.mark.parametrize("veth", BOTH)
def test_nothing_is_left_behind(ending, veth):
    options = ["--veth"] if veth else []
    name = f"rr-test-{os.getpid()}-"
    if ending != "SIGKILL":  # which leaves names, though nothing behind them
        options += ["--name", name]
    ours = [program(), *options]
    if ending == "death of the starter":
        # Its input stays open: this process holds the other end.
        code = (
            "import subprocess, sys, time;"
            "print(subprocess.Popen(sys.argv[1:]).pid, flush=True);"
            "time.sleep(60)"
        )
        ours = [sys.executable, "-c", code, *ours]
    started = subprocess.Popen(ours, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdin and started.stdout
    with started.stdin, started.stdout:
        pid = int(started.stdout.readline()) if ending == "death of the starter" else started.pid
        described = json.loads(started.stdout.readline())["hosts"]
        with Host(1, described[1]["netns"], ()).inside():
            stray = subprocess.Popen(["sleep", "60"])
        if ending != "SIGKILL":
            assert Path(f"/run/netns/{name}1").exists()
        if ending == "end of input":
            started.stdin.close()
        else:
            started.send_signal(signal.SIGTERM if ending == "SIGTERM" else signal.SIGKILL)
        started.wait(10.0)
        assert wait_until(lambda: not alive(pid))
    if ending == "SIGKILL":
        stray.kill()
    assert stray.wait(10.0) == -signal.SIGKILL
    assert not Path(f"/run/netns/{name}0").exists()
    assert not {"wan0", "sw0", "h0e0"} & set(dict(socket.if_nameindex()).values())


@needs_veth
def test_two_networks_do_not_meet():
    with Hosts(2) as one, Hosts(2, veth=True) as other:
        a, b = udp(one[0], "ipv4"), udp(other[1], "ipv4")
        assert a.getsockname()[0] == one[0].address
        assert not reaches(a, b)
        assert reaches(a, udp(one[1], "ipv4"))
        assert reaches(udp(other[0], "ipv4"), b)
