"""The checks of who came, and of the lines between hosts: pure functions of what rank 0 gathered.

A job on one host needs no network, so those of scope "hosts" find nothing there.
"""

import itertools
from collections.abc import Collection, Iterator

from ringreduce.core.launchers import is_loopback
from ringreduce.core.words import ranks_text
from ringreduce.tools.doctor.exchange import Gathered
from ringreduce.tools.doctor.facts import Facts
from ringreduce.tools.doctor.judge import Found, check, some_of
from ringreduce.tools.doctor.probe import Line
from ringreduce.tools.doctor.report import fault, note, slow

_LONG_PATH = 2e-3  # seconds; ringreduce begins with several connections there (docs/hosts.md)
_CONNECTIONS = 4
_USUAL_MBIT = 1000
_CLOCKS_APART = 0.5  # seconds

_GROUP_TODO = (
    "A job ends like this, too. Look there at what the error names, at ulimit -a, and at what a "
    "sandbox refuses (seccomp, systemd)."
)
_CONSEQUENCES = ("PeerLost", "Timeout", "Aborted")  # errors

Pair = tuple[str, str]  # of hosts: from, to


def _name(one: Facts) -> str:
    """A host, by a rank of it: several may have the same name."""
    return f"{one.host} (rank {one.rank})"


@check("job")
def who_came(gathered: Gathered) -> Found:
    if gathered.problem is not None:
        yield gathered.problem
    namesakes, sizes = gathered.namesakes(), gathered.world_sizes()
    absent = ranks_text(gathered.absent) if gathered.absent else ""
    if len(sizes) > 1:
        usual = max(sizes.values(), key=len)
        said = "; ".join(f"{size} on {ranks_text({*ranks})}" for size, ranks in sizes.items())
        yield fault(
            "same-world-size",
            f"the world size must be the same on all ranks: {said}",
            "Correct WORLD_SIZE, or the launcher's number of processes, on all hosts.",
            sorted({rank for ranks in sizes.values() if ranks is not usual for rank in ranks}),
        )
    for rank, ones in namesakes.items():
        who = some_of([f"process {one.pid} on {one.host}" for one in ones])
        missing = f"; {absent} did not come" * bool(absent)
        yield fault(
            "same-rank",
            f"{len(ones)} processes are rank {rank}: {who}{missing}",
            "Give each process a RANK of its own; a launcher does, if it is started once for all "
            "hosts, or on each with its own --node-rank.",
            [rank],
        )
    if absent and not namesakes and len(sizes) < 2:
        yield fault(
            "absent",
            f"{absent} did not come within {gathered.seconds:g} s",
            "Look at their own output: were they started, did they reach rank 0's store? For slow "
            "starts there is --timeout.",
            gathered.absent,
        )
    if gathered.silent:
        yield fault(
            "absent",
            f"{ranks_text(gathered.silent)} came, but did not tell of their machine, the lines of "
            "the host, or the group",
            "Look at their output; their hosts may have stopped or lost their network meanwhile.",
            gathered.silent,
        )
    for ranks in gathered.hosts():
        if len({one.machine for one in ranks}) > 1:
            yield fault(
                "host-id",
                f"RINGREDUCE_HOSTID={ranks[0].host_id} on several machines or network namespaces "
                f"({some_of(sorted({one.host for one in ranks}))}), which cannot share memory",
                "Unset RINGREDUCE_HOSTID, or give each machine its own.",
                [one.rank for one in ranks],
            )


@check("rank")
def group_alone(one: Facts) -> Found:
    if one.alone_error and one.all_error != "":
        yield fault(
            "group",
            f"no group of this rank alone can be made: {one.alone_error}",
            _GROUP_TODO,
        )


@check("job")
def group_of_all(gathered: Gathered) -> Found:
    """The ranks' errors have one cause; those that wait for a rank, or lose it, follow from it."""
    failed = {one.rank: one.all_error for one in gathered.facts if one.all_error}
    if failed and not any(one.alone_error for one in gathered.facts):
        first = min(failed, key=lambda rank: (failed[rank].startswith(_CONSEQUENCES), rank))
        yield fault(
            "group",
            f"no group of all ranks can be made; rank {first} says: {failed[first]}",
            _GROUP_TODO,
            list(failed),
        )


@check("hosts")
def placement(gathered: Gathered) -> Found:
    order = [one.host_id for one in gathered.facts]
    if len(list(itertools.groupby(order))) > len(set(order)):
        yield slow(
            "placement",
            "the ranks of a host do not follow each other, so data leaves hosts more often: "
            + some_of([f"rank {one.rank} on {one.host}" for one in gathered.facts]),
            "Number the ranks host by host: mpirun --map-by slot, srun --distribution=block.",
        )
    counts = sorted({len(ranks) for ranks in gathered.hosts()})
    if len(counts) > 1 and not gathered.absent:
        yield note(
            "uneven",
            f"hosts have {some_of(counts)} ranks, so there is no hierarchical all-reduce",
            "Start equally many on each (srun --ntasks-per-node).",
        )


@check("hosts")
def addresses(gathered: Gathered) -> Found:
    for one in gathered.facts:
        if one.listen_error:
            todo = "Look at RINGREDUCE_IF and RINGREDUCE_PORTS, and at ip address."
            yield fault("listen", one.listen_error, todo, [one.rank])
        elif one.listening and all(is_loopback(address) for _, address, _ in one.listening):
            yield fault(
                "listen",
                f"the others would be given {one.listening[0][1]}: {one.why_there}",
                "Bring up the interface towards the other hosts, or name it by RINGREDUCE_IF.",
                [one.rank],
            )
    first = [ranks[0] for ranks in gathered.hosts()]
    whose: dict[str, list[Facts]] = {}
    for one in first:
        for name, address, _ in one.listening:
            if not is_loopback(address) and not address.startswith("fe80:"):
                whose.setdefault(f"{address} ({name})", []).append(one)
    for where, ones in whose.items():
        if len(ones) > 1:
            yield fault(
                "same-address",
                f"{len(ones)} hosts would be reached at {where}: {some_of([*map(_name, ones)])}",
                "If it is a bridge of containers, RINGREDUCE_IF=^NAME leaves it out; or "
                "RINGREDUCE_IF names the network that is shared (10.0.0.0/8).",
                [one.rank for one in ones],
            )
    sizes = {one.mtu: one for one in reversed(first) if one.mtu}
    if len(sizes) > 1:
        said = [f"{size} on {_name(one)}" for size, one in sorted(sizes.items())]
        todo = "Set the same on all hosts: ip link set dev NAME mtu SIZE."
        yield note("mtu", f"the MTU differs: {some_of(said)}", todo, [one.rank for one in first])


# ---- lines


@check("hosts")
def reach(gathered: Gathered) -> Found:
    by_rank = {one.rank: one for one in gathered.facts}
    for where, lines, ranks in _failed(gathered, ("connect", "small")):
        given = sorted({by_rank[one.receiver].given("RINGREDUCE_PORTS") for one in lines})
        ports = f"TCP ports {', '.join(given)}" if all(given) else "all TCP ports"
        yield fault(
            "reach",
            f"no connection {where}: {_tried(lines)}",
            f"Let the firewall allow {ports} from each host to each other one (RINGREDUCE_PORTS "
            f"bounds them), and look at the route: ip route get {_bare(lines[0].address)}.",
            ranks,
        )
    for where, lines, ranks in _failed(gathered, ("large",)):
        size = by_rank[lines[0].sender].mtu
        yield fault(
            "path-mtu",
            f"small packets pass, and large ones do not, {where}: {_tried(lines)}",
            f"A part of the path has a smaller MTU than {size} and does not say so: try ping -M "
            f"do -s {max(0, size - 28)} {_bare(lines[0].address)}, then set a smaller MTU on all "
            "hosts (ip link set dev NAME mtu 1400).",
            ranks,
        )


def _works(gathered: Gathered) -> set[tuple[int, int]]:
    """Ranks that reach each other, at one address at least."""
    return {(line.sender, line.receiver) for line in gathered.lines if not line.error}


def _failed(
    gathered: Gathered, stages: tuple[str, ...]
) -> Iterator[tuple[str, list[Line], list[int]]]:
    """Lines that failed for one reason at one place, with the place, and the ranks to look at."""
    works = _works(gathered)
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
            ways = {way: {p for p in pairs if p[end] == host} for way, end in _ENDS.items()}
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


_ENDS = {"to": 1, "from": 0}  # of a pair


def _tried(lines: list[Line]) -> str:
    whom = some_of([f"rank {one.sender} to {one.receiver} at {one.address}" for one in lines])
    return f"{whom}: {lines[0].error}"


def _ends(lines: list[Line]) -> list[int]:
    return sorted({rank for line in lines for rank in (line.sender, line.receiver)})


def _bare(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


@check("hosts")
def interfaces(gathered: Gathered) -> Found:
    """Addresses that are not reached, of ranks that are reached at others."""
    works = _works(gathered)
    failed: dict[tuple[str, str], list[Line]] = {}
    for line in gathered.lines:
        if line.error and (line.sender, line.receiver) in works:
            failed.setdefault((line.interface, line.error), []).append(line)
    for (interface, _), lines in failed.items():
        yield slow(
            "address",
            f"not reached at {interface}, but at other addresses: {_tried(lines)}",
            f"Leave that interface out by RINGREDUCE_IF=^{interface}, or repair its route.",
            _ends(lines),
        )


@check("hosts")
def long_path(gathered: Gathered) -> Found:
    """The largest window of the connections against what is on its way on the slowest path."""
    by_rank = {one.rank: one for one in gathered.facts}
    working = [line for line in gathered.lines if not line.error]
    line = max(working, key=lambda line: line.round_trip, default=None)
    if line is None or line.round_trip < _LONG_PATH:
        return
    sender, receiver = by_rank[line.sender], by_rank[line.receiver]
    trip = f"a round trip of {line.round_trip * 1e3:.1f} ms (rank {line.sender} to {line.receiver})"
    given = sender.given("RINGREDUCE_BANDWIDTH_MBIT")
    mbit = float(given) if given.replace(".", "", 1).isdecimal() else _USUAL_MBIT
    on_its_way = int(mbit * 1e6 / 8 * line.round_trip)
    window = min(sender.wmem, receiver.rmem // 2)  # the kernel keeps about half of rmem for itself
    if 0 < window * _CONNECTIONS < on_its_way:
        wmem, rmem = max(sender.wmem, on_its_way), max(receiver.rmem, 2 * on_its_way)
        yield slow(
            "buffers",
            f"{mbit:g} Mbit/s over {trip} are {on_its_way >> 10} KiB on their way; {_CONNECTIONS} "
            f"connections hold {window * _CONNECTIONS >> 10} KiB (tcp_wmem {sender.wmem}, "
            f"tcp_rmem {receiver.rmem})",
            f'sysctl -w net.ipv4.tcp_wmem="4096 65536 {wmem}" '
            f'net.ipv4.tcp_rmem="4096 131072 {rmem}" on all hosts.',
            (sender.rank, receiver.rank),
        )
    if "bbr" not in sender.congestions:
        yield note(
            "congestion",
            f"{trip}, and there is no BBR, but only {some_of(sender.congestions)}",
            "modprobe tcp_bbr on all hosts: ringreduce takes it on long paths that lose packets.",
            [sender.rank],
        )


@check("hosts")
def clocks(gathered: Gathered) -> Found:
    """Against the clock of rank 0's host."""
    by_rank = {one.rank: one for one in gathered.facts}
    apart: dict[str, Line] = {}
    for line in gathered.lines:
        if line.sender == 0 and abs(line.ahead) - line.round_trip / 2 > _CLOCKS_APART:
            apart.setdefault(by_rank[line.receiver].host_id, line)
    if apart:
        said = [f"{_name(by_rank[o.receiver])} by {o.ahead:+.1f} s" for o in apart.values()]
        yield note(
            "clocks",
            f"clocks differ from that of {_name(by_rank[0])}: {some_of(said)}",
            "Let chrony run on all hosts: ringreduce does not mind, but logs are hard to compare.",
            [one.receiver for one in apart.values()],
        )
