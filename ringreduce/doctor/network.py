"""The checks between hosts: pure functions of what rank 0 has gathered.

A job on one host needs no network, so none of them finds anything there.
"""

from collections.abc import Callable, Iterator, Sequence

from ringreduce._launchers import is_loopback
from ringreduce.doctor.checks import Ranks
from ringreduce.doctor.exchange import Gathered, host_of
from ringreduce.doctor.facts import Facts
from ringreduce.doctor.probe import Line
from ringreduce.doctor.report import Finding, Severity, ranks_text

_LONG_PATH = 2e-3  # seconds; ringreduce begins with several connections there (docs/hosts.md)
_CONNECTIONS = 4
_USUAL_MBIT = 1000
_CLOCKS_APART = 0.5  # seconds
_MOST_NAMED = 4


def hosts(ranks: Ranks) -> list[list[Facts]]:
    """The ranks of each host, as ringreduce tells hosts apart; by their lowest ranks."""
    found: dict[str, list[Facts]] = {}
    for one in ranks:
        found.setdefault(host_of(one), []).append(one)
    return list(found.values())


def absent(all_: Gathered) -> Iterator[Finding]:
    if all_.absent:
        yield Finding(
            "absent",
            "fault",
            f"{ranks_text(all_.absent)} did not come within {all_.seconds:g} s",
            "Look at the rank's own output: whether it was started, and whether it reached rank "
            "0's store; give slow starts longer by --timeout.",
            tuple(all_.absent),
        )
    if all_.silent:
        yield Finding(
            "absent",
            "fault",
            f"{ranks_text(all_.silent)} came, but never told of the lines of the host",
            "Look at the rank's output; its host may have stopped or lost its network meanwhile.",
            tuple(all_.silent),
        )


def host_ids(all_: Gathered) -> Iterator[Finding]:
    for ranks in hosts(all_.facts):
        if len({one.machine for one in ranks}) > 1:
            names = ", ".join(sorted({one.host for one in ranks}))
            yield Finding(
                "host-id",
                "fault",
                f"RINGREDUCE_HOSTID={host_of(ranks[0])} on several machines or network "
                f"namespaces ({names}), which cannot share memory",
                "Unset RINGREDUCE_HOSTID, or give each machine its own.",
                tuple(one.rank for one in ranks),
            )


def placement(all_: Gathered) -> Iterator[Finding]:
    for ranks in hosts(all_.facts):
        numbers = [one.rank for one in ranks]
        present = [one.rank for one in all_.facts if numbers[0] <= one.rank <= numbers[-1]]
        if len(present) != len(numbers):
            yield Finding(
                "placement",
                "slow",
                f"the ranks of a host do not follow each other: {_list(numbers)}; data that goes "
                "round the ranks leaves hosts more often",
                "Number the ranks host by host: mpirun --map-by slot, srun --distribution=block.",
                tuple(numbers),
                ranks[0].host,
            )
    counts = {len(ranks) for ranks in hosts(all_.facts)}
    if len(counts) > 1 and not all_.absent:
        yield Finding(
            "uneven",
            "note",
            f"hosts have different numbers of ranks: {_list(sorted(counts))}; there is no "
            "hierarchical all-reduce then",
            "Start equally many on each (srun --ntasks-per-node).",
        )


def listening(all_: Gathered) -> Iterator[Finding]:
    for one in all_.facts:
        if one.listen_error:
            yield _of(
                one,
                "listen",
                "fault",
                one.listen_error,
                "Look at RINGREDUCE_IF and RINGREDUCE_PORTS, and at ip address.",
            )
        elif one.listening and all(is_loopback(address) for _, address, _ in one.listening):
            yield _of(
                one,
                "listen",
                "fault",
                "the other hosts would be given a loopback address of this one: "
                f"{one.listening[0][1]}, {one.why_there}",
                "Bring up the interface towards the other hosts, or name it by RINGREDUCE_IF.",
            )


def same_address(all_: Gathered) -> Iterator[Finding]:
    whose: dict[str, list[Facts]] = {}
    for ranks in hosts(all_.facts):
        for name, address, _ in ranks[0].listening:
            if not is_loopback(address):
                whose.setdefault(f"{address} ({name})", []).append(ranks[0])
    for where, ones in whose.items():
        if len(ones) > 1 and not where.startswith("fe80:"):
            yield Finding(
                "same-address",
                "fault",
                f"{len(ones)} hosts would be reached at the same address, {where}: "
                + _list([one.host for one in ones]),
                "It may be a bridge of containers or machines: RINGREDUCE_IF=^NAME leaves it out, "
                "or RINGREDUCE_IF names the network that is shared (10.0.0.0/8).",
                tuple(one.rank for one in ones),
            )


def names(all_: Gathered) -> Iterator[Finding]:
    for ranks in hosts(all_.facts):
        one = ranks[0]
        if is_loopback(one.name_resolves_to):
            yield _of(
                one,
                "name-loopback",
                "note",
                f"the host's own name, {one.host}, resolves to {one.name_resolves_to} there; where "
                "it is given as rank 0's address, this host's ranks look for rank 0 on this host",
                "Give an address as the master's (torchrun --master-addr, --local-addr), or "
                "take the name's line with 127.0.1.1 out of /etc/hosts.",
            )


def _chosen(one: Facts) -> str:
    """The name of its first interface; "" if the other hosts reach it at none."""
    reached = [name for name, address, _ in one.listening if not is_loopback(address)]
    return reached[0] if reached else ""


def mtu(all_: Gathered) -> Iterator[Finding]:
    found = [
        (ranks[0], ranks[0].interfaces[_chosen(ranks[0])]["mtu"])
        for ranks in hosts(all_.facts)
        if _chosen(ranks[0]) in ranks[0].interfaces
    ]
    if len({size for _, size in found}) > 1:
        said = [f"{size} on {one.host} ({_chosen(one)}, rank {one.rank})" for one, size in found]
        yield Finding(
            "mtu",
            "slow",
            f"the MTU differs: {_list(said)}; large packets may be dropped on the way",
            f"Set the same on all hosts: ip link set dev NAME mtu {min(s for _, s in found)}.",
            tuple(one.rank for one, _ in found),
        )


def reach(all_: Gathered) -> Iterator[Finding]:
    """Lines that fail: one finding for each pair of hosts and stage."""
    by_rank = {one.rank: one for one in all_.facts}
    works = {(line.sender, line.receiver) for line in all_.lines if not line.error}
    failed: dict[tuple[str, str, bool], list[Line]] = {}
    for line in all_.lines:
        if line.error and (line.sender, line.receiver) in works:
            yield _partly(by_rank, line)
        elif line.error:
            ends = (host_of(by_rank[line.sender]), host_of(by_rank[line.receiver]))
            failed.setdefault((*ends, line.stage == "large"), []).append(line)
    for (*_, large), lines in failed.items():
        yield _unreachable(by_rank, lines, large)


def _partly(by_rank: dict[int, Facts], line: Line) -> Finding:
    return Finding(
        "address",
        "slow",
        f"rank {line.sender} on {by_rank[line.sender].host} reaches rank {line.receiver} on "
        f"{by_rank[line.receiver].host} not at {line.address} ({line.error}), but at another "
        "address of it",
        "Leave that interface out by RINGREDUCE_IF=^NAME, or repair its route.",
        (line.sender, line.receiver),
    )


def _unreachable(by_rank: dict[int, Facts], lines: list[Line], large: bool) -> Finding:
    first = lines[0]
    one, other = by_rank[first.sender], by_rank[first.receiver]
    tried = _list([f"rank {line.receiver} at {line.address}" for line in lines])
    if large:
        found = (
            f"from {one.host} (rank {one.rank}) to {other.host} small packets pass, and large "
            f"ones do not: {tried}: {first.error}"
        )
        size = one.interfaces.get(_chosen(one), {}).get("mtu", 0)
        todo = (
            f"A part of the path has a smaller MTU than {size} and does not say so: try ping -M "
            f"do -s {max(0, size - 28)} {first.address.rpartition(':')[0]}, then set a smaller "
            "MTU on all hosts (ip link set dev NAME mtu 1400)."
        )
        return Finding("path-mtu", "fault", found, todo, (one.rank, other.rank))
    ports = next(
        (row["value"] for row in other.variables if row["name"] == "RINGREDUCE_PORTS"), "any"
    )
    allowed = "all TCP ports" if ports in ("any", "") else f"TCP ports {ports}"
    return Finding(
        "reach",
        "fault",
        f"no connection from {one.host} (rank {one.rank}) to {other.host}: {tried}: {first.error}",
        f"Let the firewall allow {allowed} from each host to each other one (RINGREDUCE_PORTS "
        "bounds them), and look at the route: "
        f"ip route get {first.address.rpartition(':')[0].strip('[]')}.",
        (one.rank, *sorted({line.receiver for line in lines})),
    )


def buffers(all_: Gathered) -> Iterator[Finding]:
    """The largest window of the connections against what is on its way on the slowest path."""
    lines = [line for line in all_.lines if not line.error]
    if not lines:
        return
    longest = max(lines, key=lambda line: line.round_trip)
    if longest.round_trip < _LONG_PATH:
        return
    sender = next(one for one in all_.facts if one.rank == longest.sender)
    receiver = next(one for one in all_.facts if one.rank == longest.receiver)
    mbit = _USUAL_MBIT
    for row in sender.variables:
        if row["name"] == "RINGREDUCE_BANDWIDTH_MBIT" and row["source"] == "environment":
            mbit = int(row["value"]) if row["value"].isdecimal() else mbit
    on_its_way = int(mbit * 1e6 / 8 * longest.round_trip)
    window = min(sender.wmem, receiver.rmem // 2)  # the kernel keeps about half of rmem for itself
    if 0 < window * _CONNECTIONS < on_its_way:
        yield Finding(
            "buffers",
            "slow",
            f"{mbit} Mbit/s over a round trip of {longest.round_trip * 1e3:.1f} ms (rank "
            f"{sender.rank} to {receiver.rank}) are {on_its_way >> 10} KiB on their way; "
            f"{_CONNECTIONS} connections hold {window * _CONNECTIONS >> 10} KiB (tcp_wmem "
            f"{sender.wmem}, tcp_rmem {receiver.rmem})",
            f'sysctl -w net.ipv4.tcp_wmem="4096 65536 {on_its_way}" '
            f'net.ipv4.tcp_rmem="4096 131072 {2 * on_its_way}" on all hosts.',
            (sender.rank, receiver.rank),
        )
    if "bbr" not in sender.congestions:
        yield Finding(
            "congestion",
            "note",
            f"a round trip is {longest.round_trip * 1e3:.1f} ms, and BBR, which ringreduce takes "
            f"on long paths that lose packets, is not there: {_list(sender.congestions)}",
            "modprobe tcp_bbr on all hosts, if the path may lose packets.",
            (sender.rank,),
            sender.host,
        )


def clocks(all_: Gathered) -> Iterator[Finding]:
    by_rank = {one.rank: one for one in all_.facts}
    seen: set[tuple[str, str]] = set()
    for line in all_.lines:
        a, b = by_rank[line.sender], by_rank[line.receiver]
        pair = (min(host_of(a), host_of(b)), max(host_of(a), host_of(b)))
        apart = abs(line.ahead) - line.round_trip / 2
        if not line.error and apart > _CLOCKS_APART and pair not in seen:
            seen.add(pair)
            yield Finding(
                "clocks",
                "note",
                f"the clocks of {a.host} (rank {a.rank}) and {b.host} (rank {b.rank}) are "
                f"{abs(line.ahead):.1f} s apart; ringreduce does not mind, but logs of both are "
                "hard to compare",
                "Let chrony or systemd-timesyncd run on both.",
                (a.rank, b.rank),
            )


def _of(one: Facts, check: str, severity: Severity, found: str, todo: str) -> Finding:
    return Finding(check, severity, found, todo, (one.rank,), one.host)


def _list(values: Sequence[object]) -> str:
    """The first few, and how many more."""
    said = ", ".join(map(str, values[:_MOST_NAMED]))
    more = len(values) - _MOST_NAMED
    return f"{said} and {more} more" if more > 0 else said


OF_ANY_JOB: tuple[Callable[[Gathered], Iterator[Finding]], ...] = (absent, host_ids)
OF_SEVERAL_HOSTS: tuple[Callable[[Gathered], Iterator[Finding]], ...] = (
    placement,
    listening,
    same_address,
    names,
    mtu,
    reach,
    buffers,
    clocks,
)
