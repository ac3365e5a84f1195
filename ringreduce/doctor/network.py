"""The checks of who came, and of the lines between hosts: pure functions of what rank 0 gathered.

A job on one host needs no network, so those of scope "hosts" find nothing there.
"""

import itertools
from collections.abc import Collection, Iterator

from ringreduce._launchers import is_loopback
from ringreduce.doctor.exchange import Gathered
from ringreduce.doctor.facts import Facts
from ringreduce.doctor.judge import Said, check, some_of
from ringreduce.doctor.probe import Line
from ringreduce.doctor.report import ranks_text

_LONG_PATH = 2e-3  # seconds; ringreduce begins with several connections there (docs/hosts.md)
_CONNECTIONS = 4
_USUAL_MBIT = 1000
_CLOCKS_APART = 0.5  # seconds

Pair = tuple[str, str]  # of hosts: from, to


@check("job", "fault", "absent")
def absent(gathered: Gathered) -> Said:
    if gathered.absent:
        yield (
            f"{ranks_text(gathered.absent)} did not come within {gathered.seconds:g} s",
            "Look at the rank's own output: whether it was started, and whether it reached rank "
            "0's store; give slow starts longer by --timeout.",
            gathered.absent,
        )
    if gathered.silent:
        yield (
            f"{ranks_text(gathered.silent)} came, but never told of the lines of the host",
            "Look at the rank's output; its host may have stopped or lost its network meanwhile.",
            gathered.silent,
        )


@check("job", "fault", "host-id")
def host_ids(gathered: Gathered) -> Said:
    for ranks in gathered.hosts():
        if len({one.machine for one in ranks}) > 1:
            yield (
                f"RINGREDUCE_HOSTID={ranks[0].host_id} on several machines or network namespaces "
                f"({some_of(sorted({one.host for one in ranks}))}), which cannot share memory",
                "Unset RINGREDUCE_HOSTID, or give each machine its own.",
                [one.rank for one in ranks],
            )


@check("hosts", "slow", "placement")
def placement(gathered: Gathered) -> Said:
    order = [one.host_id for one in gathered.facts]
    if len(list(itertools.groupby(order))) > len(set(order)):
        yield (
            "the ranks of a host do not follow each other: that of "
            + some_of([f"{ranks_text([one.rank])} is {one.host}" for one in gathered.facts])
            + "; data that goes round the ranks leaves hosts more often",
            "Number the ranks host by host: mpirun --map-by slot, srun --distribution=block.",
        )


@check("hosts", "note", "uneven")
def uneven(gathered: Gathered) -> Said:
    counts = sorted({len(ranks) for ranks in gathered.hosts()})
    if len(counts) > 1 and not gathered.absent:
        yield (
            f"hosts have different numbers of ranks: {some_of(counts)}; there is no "
            "hierarchical all-reduce then",
            "Start equally many on each (srun --ntasks-per-node).",
        )


@check("hosts", "fault", "listen")
def listen(gathered: Gathered) -> Said:
    for one in gathered.facts:
        if one.listen_error:
            todo = "Look at RINGREDUCE_IF and RINGREDUCE_PORTS, and at ip address."
            yield one.listen_error, todo, [one.rank]
        elif one.listening and all(is_loopback(address) for _, address, _ in one.listening):
            yield (
                "the other hosts would be given a loopback address of this one: "
                f"{one.listening[0][1]}, {one.why_there}",
                "Bring up the interface towards the other hosts, or name it by RINGREDUCE_IF.",
                [one.rank],
            )


@check("hosts", "fault", "same-address")
def same_address(gathered: Gathered) -> Said:
    whose: dict[str, list[Facts]] = {}
    for ranks in gathered.hosts():
        for name, address, _ in ranks[0].listening:
            if not is_loopback(address) and not address.startswith("fe80:"):
                whose.setdefault(f"{address} ({name})", []).append(ranks[0])
    for where, ones in whose.items():
        if len(ones) > 1:
            yield (
                f"{len(ones)} hosts would be reached at the same address, {where}: "
                + some_of([one.host for one in ones]),
                "It may be a bridge of containers or machines: RINGREDUCE_IF=^NAME leaves it out, "
                "or RINGREDUCE_IF names the network that is shared (10.0.0.0/8).",
                [one.rank for one in ones],
            )


@check("hosts", "note", "mtu")
def mtu(gathered: Gathered) -> Said:
    first = [ranks[0] for ranks in gathered.hosts() if ranks[0].mtu]
    if len({one.mtu for one in first}) > 1:
        smallest = min(first, key=lambda one: one.mtu)
        other = [f"{one.mtu} on {_name(one)}" for one in first if one.mtu != smallest.mtu]
        yield (
            f"the MTU differs: {smallest.mtu} on {_name(smallest)}, {some_of(other)}; packets have "
            "the smaller size of both ends",
            "Set the same on all hosts: ip link set dev NAME mtu SIZE.",
            [one.rank for one in first],
        )


# ---- lines


def _name(one: Facts) -> str:
    """A host, by a rank of it: several may have the same name."""
    return f"{one.host} (rank {one.rank})"


def _failed(
    gathered: Gathered, stages: tuple[str, ...]
) -> Iterator[tuple[str, list[Line], list[int]]]:
    """Lines that failed for one reason at one place, with the place, and the ranks to look at."""
    works = {(line.sender, line.receiver) for line in gathered.lines if not line.error}
    host_of = {one.rank: one.host_id for one in gathered.facts}
    reasons: dict[str, dict[Pair, list[Line]]] = {}
    for line in gathered.lines:
        if line.stage in stages and (line.sender, line.receiver) not in works:
            pair = (host_of[line.sender], host_of[line.receiver])
            reasons.setdefault(line.error, {}).setdefault(pair, []).append(line)
    names = {ranks[0].host_id: _name(ranks[0]) for ranks in gathered.hosts()}
    for by_pair in reasons.values():
        for where, pairs, whose in _places(set(by_pair), names):
            lines = [line for pair, some in by_pair.items() if pair in pairs for line in some]
            yield where, lines, [rank for rank in _ends(lines) if host_of[rank] in whose]


def _places(
    pairs: set[Pair], names: dict[str, str]
) -> Iterator[tuple[str, set[Pair], Collection[str]]]:
    """Pairs that fail by what they have in common, with hosts: all of them, or one, or nothing."""
    others = len(names) - 1
    if others > 1 and 2 * len(pairs) > others * len(names):
        yield f"for {len(pairs)} of the {others * len(names)} ordered pairs of hosts", pairs, names
        return
    while others > 1 and pairs:
        found: list[tuple[str, set[Pair], Collection[str]]] = []
        for host, name in names.items():
            ways = {
                "to": {p for p in pairs if p[1] == host},
                "from": {p for p in pairs if p[0] == host},
            }
            ways = {way: some for way, some in ways.items() if 2 * len(some) > others}
            most = max(map(len, ways.values()), default=0)
            where = f"{' and '.join(ways)} {name} for {most} of {others} other hosts"
            found.append((where, set().union(*ways.values()), [host]))
        worst = max(found, key=lambda one: len(one[1]))
        if not worst[1]:
            break
        yield worst
        pairs = pairs - worst[1]
    if pairs:
        yield some_of([f"from {names[a]} to {names[b]}" for a, b in sorted(pairs)]), pairs, names


def _tried(lines: list[Line]) -> str:
    whom = some_of([f"rank {one.sender} to {one.receiver} at {one.address}" for one in lines])
    return f"{whom}: {lines[0].error}"


def _ends(lines: list[Line]) -> list[int]:
    return sorted({rank for line in lines for rank in (line.sender, line.receiver)})


def _bare(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


@check("hosts", "fault", "reach")
def reach(gathered: Gathered) -> Said:
    by_rank = {one.rank: one for one in gathered.facts}
    for where, lines, ranks in _failed(gathered, ("connect", "small")):
        given = sorted({by_rank[one.receiver].given("RINGREDUCE_PORTS") for one in lines})
        ports = f"TCP ports {', '.join(given)}" if all(given) else "all TCP ports"
        yield (
            f"no connection {where}: {_tried(lines)}",
            f"Let the firewall allow {ports} from each host to each other one (RINGREDUCE_PORTS "
            f"bounds them), and look at the route: ip route get {_bare(lines[0].address)}.",
            ranks,
        )


@check("hosts", "fault", "path-mtu")
def path_mtu(gathered: Gathered) -> Said:
    sizes = {one.rank: one.mtu for one in gathered.facts}
    for where, lines, ranks in _failed(gathered, ("large",)):
        size = sizes[lines[0].sender]
        yield (
            f"small packets pass, and large ones do not, {where}: {_tried(lines)}",
            f"A part of the path has a smaller MTU than {size} and does not say so: try ping -M "
            f"do -s {max(0, size - 28)} {_bare(lines[0].address)}, then set a smaller MTU on all "
            "hosts (ip link set dev NAME mtu 1400).",
            ranks,
        )


@check("hosts", "slow", "address")
def address(gathered: Gathered) -> Said:
    """An address that nobody reaches of a rank that is reached at another."""
    works = {(line.sender, line.receiver) for line in gathered.lines if not line.error}
    failed: dict[tuple[str, str], list[Line]] = {}
    for line in gathered.lines:
        if line.error and (line.sender, line.receiver) in works:
            failed.setdefault((line.interface, line.error), []).append(line)
    for (interface, _), lines in failed.items():
        yield (
            f"not reached at {interface}, but at other addresses: {_tried(lines)}",
            f"Leave that interface out by RINGREDUCE_IF=^{interface}, or repair its route.",
            _ends(lines),
        )


def _longest(gathered: Gathered) -> tuple[Line, Facts, Facts] | None:
    """The line with the longest round trip, if that is a long one, and its ends."""
    lines = [line for line in gathered.lines if line.round_trip >= _LONG_PATH and not line.error]
    if not lines:
        return None
    by_rank = {one.rank: one for one in gathered.facts}
    line = max(lines, key=lambda line: line.round_trip)
    return line, by_rank[line.sender], by_rank[line.receiver]


@check("hosts", "slow", "buffers")
def buffers(gathered: Gathered) -> Said:
    """The largest window of the connections against what is on its way on the slowest path."""
    if not (longest := _longest(gathered)):
        return
    line, sender, receiver = longest
    given = sender.given("RINGREDUCE_BANDWIDTH_MBIT")
    mbit = float(given) if given.replace(".", "", 1).isdecimal() else _USUAL_MBIT
    on_its_way = int(mbit * 1e6 / 8 * line.round_trip)
    window = min(sender.wmem, receiver.rmem // 2)  # the kernel keeps about half of rmem for itself
    if 0 < window * _CONNECTIONS < on_its_way:
        yield (
            f"{mbit:g} Mbit/s over a round trip of {line.round_trip * 1e3:.1f} ms (rank "
            f"{sender.rank} to {receiver.rank}) are {on_its_way >> 10} KiB on their way; "
            f"{_CONNECTIONS} connections hold {window * _CONNECTIONS >> 10} KiB (tcp_wmem "
            f"{sender.wmem}, tcp_rmem {receiver.rmem})",
            f'sysctl -w net.ipv4.tcp_wmem="4096 65536 {on_its_way}" '
            f'net.ipv4.tcp_rmem="4096 131072 {2 * on_its_way}" on all hosts.',
            (sender.rank, receiver.rank),
        )


@check("hosts", "note", "congestion")
def congestion(gathered: Gathered) -> Said:
    longest = _longest(gathered)
    if longest and "bbr" not in longest[1].congestions:
        line, sender, _ = longest
        yield (
            f"a round trip is {line.round_trip * 1e3:.1f} ms, and BBR, which ringreduce takes "
            f"on long paths that lose packets, is not there: {some_of(sender.congestions)}",
            "modprobe tcp_bbr on all hosts, if the path may lose packets.",
            [sender.rank],
        )


@check("hosts", "note", "clocks")
def clocks(gathered: Gathered) -> Said:
    """Against the clock of rank 0's host."""
    by_rank = {one.rank: one for one in gathered.facts}
    apart: dict[str, tuple[int, float]] = {}
    for line in gathered.lines:
        far = abs(line.ahead) - line.round_trip / 2 > _CLOCKS_APART
        if line.sender == 0 and not line.error and far:
            apart.setdefault(by_rank[line.receiver].host_id, (line.receiver, line.ahead))
    if apart:
        said = [f"{_name(by_rank[rank])} by {ahead:+.1f} s" for rank, ahead in apart.values()]
        yield (
            f"clocks differ from that of {_name(by_rank[0])}: {some_of(said)}; ringreduce does "
            "not mind, but logs are hard to compare",
            "Let chrony or systemd-timesyncd run on all hosts.",
            [rank for rank, _ in apart.values()],
        )
