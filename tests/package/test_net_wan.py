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
from hosts import Host, Hosts, program, why_not
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


def reaches(a: socket.socket, b: socket.socket, seconds: float = 10.0) -> bool:
    """Whether a packet from a comes to b. Older ones may still come: each has a number."""
    token = os.urandom(8)
    a.sendto(token, b.getsockname())
    b.settimeout(seconds)
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
        shorter = min(round_trip(a, b) for _ in range(50))
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


@pytest.mark.parametrize("veth", BOTH)
def test_cut_is_silent_and_heals(veth, family):
    with Hosts(3, veth=veth, delay_ms=0) as hosts:
        a, b, c = (udp(host, family) for host in hosts.all)
        sender, receiver = connected(hosts[0], hosts[1], family)
        assert reaches(a, b)
        hosts.cut(0, 1)
        assert not reaches(a, b, 0.2)
        assert not reaches(b, a, 0.2)
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
        assert not reaches(a, c, 0.2)
        assert not reaches(c, b, 0.2)
        assert reaches(a, b)
        hosts.heal(2)
        assert reaches(a, c)


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
        pid = started.pid
        text = started.stdout.readline()
        if ending == "death of the starter":
            # Either of the two may have written first.
            number, text = sorted((text, started.stdout.readline()))
            pid = int(number)
        described = json.loads(text)["hosts"]
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
