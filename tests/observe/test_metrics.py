"""Counts for Prometheus and TensorBoard, and what shows them: top and the debug server's page."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import re
import resource
import shutil
import socket
import stat
import time
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from browser import CHROMIUM, evaluate
from conftest import MakeWorld
from pool import Pool, Rank, on_ranks, run_ranks
from processes import come_to_rest, free_port, wait_until
from ranks import pids_of_ranks

import ringreduce
from ringreduce.core.backend import extension, job_name
from ringreduce.observe import metrics, top
from ringreduce.observe.metrics import Status, statuses

# The debug server of torch 2.13 and newer.
HAS_SERVER = os.path.exists(
    os.path.join(os.path.dirname(torch.__file__), "distributed", "debug", "_frontend.py")
)


@on_ranks(3)
def test_the_counts_are_those_of_the_records(rank: Rank) -> None:
    group = dist.new_group([0, 2], backend="ringreduce")
    ones = torch.ones(1000)
    for _ in range(10):
        dist.all_reduce(ones)
    if rank.rank != 1:
        for _ in range(3):
            dist.broadcast(ones[:10], 2, group=group)
    pids = pids_of_ranks()
    dist.barrier()
    if rank.rank == 2:
        assert come_to_rest(pids[0], pids[1])
        time.sleep(0.2)
    dist.all_reduce(ones)
    (status,) = statuses(metrics.text())
    done = [*ringreduce.records(), *(ringreduce.records(group) if rank.rank != 1 else [])]
    assert status.rank == rank.rank
    assert (status.host, status.pid) == (socket.gethostname(), os.getpid())
    assert status.operations == len(done)
    assert status.bytes == sum(record.bytes for record in done)
    seconds = sum(record.done_ns - record.arrived_ns for record in done) / 1e9
    assert status.seconds == pytest.approx(seconds)
    assert status.failed == 0
    assert not status.running
    if rank.rank == 2:
        # Another rank may have passed on that it had waited for this one.
        assert status.waited.get(2, 0.0) < 0.1
    else:
        assert 0.1 < status.waited[2] <= seconds


@on_ranks(2, timeout=2.0, remade=True)
def test_an_operation_that_runs_or_fails_is_told(rank: Rank) -> None:
    dist.all_reduce(torch.ones(10))
    if rank.rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)

        def runs() -> bool:
            (status,) = statuses(metrics.text())
            return status.running == {"0": "all_reduce #1"} and status.running_seconds["0"] > 0.1

        assert wait_until(runs)
        with pytest.raises(ringreduce.Timeout):
            work.wait()
        (status,) = statuses(metrics.text())
        assert (status.operations, status.failed, status.running) == (1, 1, {})


@on_ranks(3, remade=True)
def test_ranks_in_metrics_are_global_ones(rank: Rank) -> None:
    group = dist.new_group([1, 2], backend="ringreduce")
    pids = pids_of_ranks()
    if rank.rank != 0:
        dist.all_reduce(torch.ones(1), group=group)
        if rank.rank == 2:
            assert come_to_rest(pids[1])
            time.sleep(0.1)
        dist.all_reduce(torch.ones(1), group=group)
    (status,) = statuses(metrics.text())
    if rank.rank == 1:
        assert status.waited[2] > 0.05
        assert status.done[group.group_name] == 2


def test_a_registry_of_the_program_has_them() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    ringreduce.prometheus(registry)
    assert client.generate_latest(registry) == b""  # no group yet
    with pytest.raises(ValueError, match="already"):
        ringreduce.prometheus(registry)


@on_ranks(2)
def test_scalars_of_each_step(rank: Rank) -> None:
    class Writer:
        def __init__(self) -> None:
            self.points: dict[str, list[tuple[int, float]]] = defaultdict(list)

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.points[tag].append((global_step, scalar_value))

    with pytest.raises(ValueError, match="every=0"):
        ringreduce.tensorboard(Writer(), every=0)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters())
    writer, seldom = Writer(), Writer()
    pids = pids_of_ranks()
    handles = [ringreduce.tensorboard(writer), ringreduce.tensorboard(seldom, every=2)]
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            if rank.rank == 1 and step == 2:
                assert come_to_rest(pids[0])
                time.sleep(0.1)
            dist.all_reduce(parameter.grad)
        optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    points = writer.points
    steps = [step for step, _ in points["ringreduce/megabytes"]]
    assert len(steps) == 4
    assert steps == list(range(steps[0], steps[0] + 4))
    assert [value for _, value in points["ringreduce/megabytes"]] == [pytest.approx(0.0404)] * 4
    assert [s for s, _ in seldom.points["ringreduce/megabytes"]] == steps[1::2]
    waiting = [value for _, value in points["ringreduce/waiting_ms"]]
    inside = [value for _, value in points["ringreduce/in_operations_ms"]]
    assert all(0 <= w <= i + 1e-6 for w, i in zip(waiting, inside, strict=True))
    if rank.rank == 0:
        assert waiting[2] > 100
        assert dict(points["ringreduce/waiting_for_rank_1_ms"])[steps[2]] > 100


@on_ranks(1, remade=True)
def test_an_error_of_a_writer_ends_no_step(rank: Rank) -> None:
    class Writer:
        def __init__(self) -> None:
            self.broken, self.tags = True, []  # type: tuple[bool, list[str]]

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            if self.broken:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.tags.append(tag)

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringreduce").addHandler(handler)
    parameter, writer = torch.nn.Parameter(torch.ones(10)), Writer()
    parameter.grad = torch.ones(10)
    optimizer = torch.optim.SGD([parameter])
    handle = ringreduce.tensorboard(writer)
    for step in range(4):
        writer.broken = step < 3
        dist.all_reduce(parameter.grad)
        optimizer.step()
    handle.remove()
    logging.getLogger("ringreduce").removeHandler(handler)
    assert len(logged) == 1 and "rank 0 cannot write scalars" in logged[0]
    assert "No space left on device" in logged[0]
    assert writer.tags[0] == "ringreduce/megabytes" and len(writer.tags) >= 3


def test_torchs_summary_writer_takes_them(pool: Pool, world: MakeWorld, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pool.run(_writes_events, world(1), str(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("ringreduce/megabytes")] == [
        pytest.approx(4e-5)
    ]


def _writes_events(rank: Rank, folder: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([parameter])
    with SummaryWriter(folder) as writer:
        handle = ringreduce.tensorboard(writer)
        dist.all_reduce(parameter.data)
        parameter.grad = torch.ones(10)
        optimizer.step()
        handle.remove()


SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("ringreduce")
stop = Path(sys.argv[0] + ".stop")
go = torch.ones(1)
while go:
    for _ in range(20):
        if dist.get_rank() == 1:
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1000))
    go.fill_(not stop.exists())
    dist.all_reduce(go, op=dist.ReduceOp.MIN)
"""


def test_the_variable_writes_files_that_top_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, stop = tmp_path / "metrics", tmp_path / "train.py.stop"
    folder.mkdir()
    (folder / "binary.prom").write_bytes(b"\x00\xff {")  # of another program
    (folder / "train-rank5.prom").write_text(LEFT_OVER % {"host": socket.gethostname()})
    told = put_odd_files(folder)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert top.main([str(tmp_path / "none"), "--once"]) == 1
    assert "is not a folder" in capsys.readouterr().err
    with ThreadPoolExecutor() as threads:
        job = threads.submit(run_ranks, script, 2, {"RINGREDUCE_METRICS": str(folder)})
        try:
            assert wait_until(lambda: len(list(folder.glob("train*"))) == 2)
            names = sorted(path.name for path in folder.glob("train*"))
            code = top.main([str(folder), "--once"])
        finally:
            stop.touch()
        ended = job.result()
    text, errors = capsys.readouterr()
    assert code == 0
    assert set(errors.splitlines()) == told
    meetings = {re.fullmatch(f"train-([0-9a-f]+)-rank{r}.prom", n)[1] for r, n in enumerate(names)}
    assert len(meetings) == 1
    assert "train: 2 ranks on 1 host, step 0. The others wait " in text
    assert "of the time for rank 1." in text
    assert [(done.returncode, done.stderr) for done in ended] == [(0, "")] * 2
    assert not list(folder.glob("train*"))  # nobody takes old figures for new ones
    assert top.main([str(folder), "--once"]) == 1
    assert "RINGREDUCE_METRICS=FOLDER" in capsys.readouterr().err


# Of a process that was killed: pids are smaller than that.
LEFT_OVER = """
ringreduce_rank{job="train",rank="5",host="%(host)s",pid="4194305"} 1
ringreduce_updated_seconds{job="train",rank="5"} 1000
"""


def put_odd_files(folder: Path) -> set[str]:
    """Makes what is no file of a rank, or cannot be read.

    Returns:
        What is said of it.
    """
    (folder / "directory.prom").mkdir()
    os.mkfifo(folder / "fifo.prom")
    os.mknod(folder / "socket.prom", stat.S_IFSOCK | 0o600)
    (folder / "gone.prom").symlink_to(folder / "nowhere")
    (folder / "itself.prom").symlink_to(folder / "itself.prom")
    (folder / "step.prom").write_text('ringreduce_step{rank="0"} 1\n')
    return {
        f"{folder}/directory.prom is a folder, not a file",
        f"{folder}/fifo.prom is a FIFO, not a file",
        f"{folder}/gone.prom cannot be read: No such file or directory",
        f"{folder}/itself.prom cannot be read: Too many levels of symbolic links",
        f"{folder}/socket.prom cannot be read: No such device or address",
        f"{folder}/step.prom is damaged in line 1, which is left out: "
        "'ringreduce_step{rank=\"0\"} 1'",
    }


def test_jobs_of_one_name_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a sweep: two jobs of a script, of which the second is newer."""
    folder, stop = tmp_path / "metrics", tmp_path / "train.py.stop"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    begun: list[set[str]] = []
    with ThreadPoolExecutor() as threads:
        jobs = []
        try:
            for ranks in (2, 1):
                variables = {"RINGREDUCE_METRICS": str(folder)}
                jobs.append(threads.submit(run_ranks, script, ranks, variables))
                count = 2 if ranks == 2 else 3
                assert wait_until(lambda n=count: len(list(folder.glob("*.prom"))) == n)
                paths = {path.name for path in folder.glob("*.prom")}
                begun.append(paths.difference(*begun))
            old, new = (min(names).split("-")[1] for names in begun)
            assert {name.split("-")[1] for name in begun[0]} == {old} != {new}
            said = []
            for arguments in ([], ["--job", old[:6]], ["--job", "train"], ["--job", "other"]):
                top.main([str(folder), "--once", *arguments])
                said.append(capsys.readouterr())
        finally:
            stop.touch()
        assert [done.returncode for job in jobs for done in job.result()] == [0] * 3
    assert [one.out.partition(" on ")[0] for one in said] == [
        "train: 1 rank", "train: 2 ranks", "train: 1 rank", ""
    ]  # fmt: skip
    assert said[0].err == (
        f"of the jobs that write there, train {new[:8]} is shown, and not train {old[:8]}: --job "
        "takes a name, or the first letters of what stands behind it\n"
    )
    assert said[1].err == "" and said[2].err == said[0].err
    assert "no rank of job other has written" in said[3].err and "of train:" in said[3].err
    assert not list(folder.iterdir())


def test_a_file_is_written_whole_or_not_at_all(
    pool: Pool, world: MakeWorld, tmp_path: Path
) -> None:
    pool.run(_writes_where_there_is_no_space, world(1), str(tmp_path))


def _writes_where_there_is_no_space(rank: Rank, folder: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = metrics._Writer(folder)
    try:
        assert wait_until(lambda: any(n.endswith(".prom") for n in os.listdir(folder)))
        (name,) = (n for n in os.listdir(folder) if n.endswith(".prom"))
        kept = Path(folder, name).read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        with pytest.raises(OSError):
            writer._write()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert wait_until(lambda: Path(folder, name).read_bytes() != kept)
        assert wait_until(lambda: os.listdir(folder) == [name])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.stop()
    assert os.listdir(folder) == []


def test_the_file_of_an_earlier_group_is_removed(
    pool: Pool, world: MakeWorld, tmp_path: Path
) -> None:
    call = pool.start(_makes_groups, world(0), pool.name(), str(tmp_path), ranks=2, fresh=True)
    first, second = call.results()
    assert first == second and len(set(first)) == len(first)


def _makes_groups(rank: Rank, prefix: str, folder: str) -> list[str]:
    """What the names of this rank's files have for the job, one after the other."""
    metrics._EVERY = 0.05
    writer, found = metrics._Writer(folder), []

    def own() -> str:
        """When only one file of this rank is left."""
        seen = [n for n in os.listdir(folder) if n.endswith(f"-rank{rank.rank}.prom")]
        return seen[0].split("-")[-2] if len(seen) == 1 else ""

    for made in range(2):
        rank.init(f"{prefix}/{made}", size=2)
        assert wait_until(lambda: own() not in ("", *found))
        found.append(own())
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=rank.store(f"{prefix}/gloo"), rank=rank.rank, world_size=2
    )
    group = dist.new_group([rank.rank], backend="ringreduce", use_local_synchronization=True)
    assert wait_until(lambda: own() == str(os.getpid()))  # no group has all ranks
    dist.barrier()
    assert len(statuses(metrics.text())) == 1
    dist.new_group(backend="ringreduce")
    assert wait_until(lambda: own() not in ("", str(os.getpid())))
    found.append(own())
    assert dist.get_world_size(group) == 1
    dist.destroy_process_group()
    writer.stop()
    assert own() == ""
    return found


def test_a_bad_variable_ends_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.setenv("RINGREDUCE_METRICS", "metrics")
    monkeypatch.chdir(gone)
    gone.rmdir()
    metrics.follow_variable()
    assert "RINGREDUCE_METRICS is ignored" in caplog.text


@on_ranks(3, remade=True)
def test_a_rank_outside_the_group_may_be_late(rank: Rank) -> None:
    """A chain of waits may begin with a rank that is in no group with the one that waits."""
    group = dist.new_group([1, 2], backend="ringreduce")
    if rank.rank == 0:
        return
    dist.all_reduce(torch.ones(1), group=group)

    class Extension:
        def __getattr__(self, name: str) -> Any:
            return getattr(extension(), name)

        def totals(self, backend: Any) -> Any:
            ((failed, kinds, _),) = extension().totals(backend)
            return [(failed, kinds, {7: 2.0, 1000: 0.5})]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "extension", Extension)
        (found,) = statuses(metrics.text())
    assert dict(found.waited) == {7: 4.0, 1000: 1.0}  # of both groups
    later = [status(r, 12.0, waited={7: 1.0, 1000: 2.0}) for r in (1, 7)]
    table = top.rows([status(1, 10.0), status(7, 10.0)], later)
    assert [row.waited_for for row in table] == [0.0, 0.5] and top.late_ranks(table) == {7}


# ---- damaged text


def test_no_damage_breaks_top(
    pool: Pool, world: MakeWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Flipped bits, lost and doubled lines, impossible numbers, missing labels, odd files."""
    texts = pool.run(_metrics_of_a_rank, world(2))
    folder, draw = tmp_path / "metrics", random.Random(7)
    names = [f"job-{'ab' * 16}-rank{r}.prom" for r in range(2)]
    for case in range(600):

        def write(at: int, damaged: float) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name, text in zip(names, texts, strict=True):
                text = re.sub(rb"(updated_seconds\{.*\}) \S+", rb"\1 %d" % at, text)
                if draw.random() < damaged:
                    text = damaged_text(text, draw)
                (folder / name).write_bytes(text)
                if draw.random() < damaged / 4:
                    odd_file(folder / name, draw)

        write(1000, 0.5)
        monkeypatch.setattr(top.time, "sleep", lambda _: write(1002, 0.5))
        code = top.main([str(folder), "--once", *draw.choice([[], ["--job", "a"]])])
        out, err = capsys.readouterr()
        assert (code == 0) == bool(out) and "Traceback" not in err, case
        assert all(len(line) < 999 for line in (out + err).splitlines()), case
        assert len(err.splitlines()) <= 8, case
        assert (out + err).replace("\n", "").isprintable(), case
    # Undamaged, nothing is said.
    monkeypatch.setattr(top.time, "sleep", lambda _: write(1002, 0.0))
    write(1000, 0.0)
    assert top.main([str(folder), "--once"]) == 0
    assert capsys.readouterr().err == ""


def _metrics_of_a_rank(rank: Rank) -> bytes:
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    labels = f'job="{job_name()}",rank="{rank.rank}",comm_name="0",nranks="2"'
    lines = [f'{labels},to_rank="{1 - rank.rank}"}} 3.5e+06', f'{labels},late_rank="1"}} 0.5']
    lines += [f'{labels},collective="all_reduce"}} 2.5', f"{labels}}} 17.0"]
    more = ["line_bytes_total", "wait_seconds_total", "running_seconds", "running_sequence"]
    text = "".join(f"ringreduce_{name}{{{line}\n" for name, line in zip(more, lines, strict=True))
    return metrics.text() + text.encode()


NUMBERS = ["NaN", "+Inf", "-Inf", "-1.0", "1e308", "9" * 5000, "1e400", "x", "", "0x10", "1e18"]


def damaged_text(text: bytes, draw: random.Random) -> bytes:
    """The text with up to three damages."""
    for _ in range(draw.randint(1, 3)):
        lines = text.split(b"\n")
        of_us = [at for at, line in enumerate(lines) if line.startswith(b"ringreduce_")]
        at = draw.choice(of_us or [0])
        kind = draw.randrange(7)
        if kind == 0:
            changed = bytearray(text or b"x")
            for _ in range(draw.choice([1, 10, 100])):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            text = bytes(changed)
        elif kind == 1:
            text = text[: draw.randrange(len(text) + 1)]
        elif kind == 2:
            del lines[at]
        elif kind == 3:
            lines.insert(at, lines[at])
        elif kind == 4:
            lines[at] = lines[at].rpartition(b" ")[0] + b" " + draw.choice(NUMBERS).encode()
        elif kind == 5:
            label = draw.choice(re.findall(rb'\w+="[^"]*",?', lines[at]) or [b"}"])
            value = draw.choice([*NUMBERS, "-3", r"\x1b[2J", "\x1b[2J", "\xfe"]).encode()
            other = label.partition(b"=")[0] + b'="' + value + b'",'
            lines[at] = lines[at].replace(label, draw.choice([b"", other]))
        else:
            lines[at] = draw.choice([b"\xff\xfe", b"{", b"ringreduce_", b'ringreduce_x{a="' * 999])
        if kind > 1:
            text = b"\n".join(lines)
    return text


def odd_file(path: Path, draw: random.Random) -> None:
    """Something else, or another file of the same rank, in place of a file."""
    text = path.read_bytes()
    path.unlink()
    kind = draw.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(draw.choice([path, path.parent, "/nowhere", "/dev/zero"]))
    elif kind == 3:
        path.with_suffix(".copy.prom").write_bytes(text)
        path.write_bytes(text)


# ---- what top makes of it


def status(rank: int, at: float, **fields: Any) -> Status:
    return Status(rank, "job", host=f"h{rank % 2}", pid=100 + rank, updated=at, **fields)


def test_rates_are_those_between_two_looks() -> None:
    before = [status(r, 10.0 + r, operations=100, seconds=1.0, waited={3: 0.5}) for r in range(4)]
    now = [
        status(
            r,
            12.0 + r,
            operations=140,
            bytes=4_000_000,
            seconds=2.0,
            waited={3: 1.3 if r != 3 else 0},
        )
        for r in range(4)
    ]
    table = top.rows(before, now)
    assert [row.operations for row in table] == [20.0] * 4
    assert [row.megabytes for row in table] == [2.0] * 4
    assert [row.inside for row in table] == [0.5] * 4
    assert [row.waits for row in table] == [pytest.approx(0.4)] * 3 + [0.0]
    assert [row.waited_for for row in table] == [0.0] * 3 + [pytest.approx(0.4)]
    assert top.late_ranks(table) == {3}
    # One rank alone may see it: its neighbour between hosts, or its partner in a small group.
    alone = [
        status(r, 12.0 + r, waited={3: 1.3 * (r == 2)}, operations=140, bytes=1, seconds=2)
        for r in range(4)
    ]
    assert top.late_ranks(top.rows(before, alone)) == {3}
    assert top.headline(table, "job") == (
        "job: 4 ranks on 2 hosts, step 0. The others wait 40% of the time for rank 3 on h1."
    )
    # A process in the place of another, or a group made anew, has no rates yet.
    now[2].pid, now[1].operations = 7, 20
    again = top.rows(before, now)
    assert [row.operations for row in again] == [20.0, 0.0, 0.0, 20.0]


def test_slow_lines_are_told_apart() -> None:
    """A ring of four ranks on two hosts each way, of which lines are slow."""

    def told(slow: set[tuple[int, int]]) -> str:
        def use(a: int, b: int, at: float) -> list[float]:
            return [100e6 * at, at * (0.9 if (a, b) in slow else 0.1), 0.0]

        ends = {r: [(r + 1) % 4, (r - 1) % 4] for r in range(4)}
        looks = [
            [status(r, at, lines={to: use(r, to, at) for to in ends[r]}) for r in range(4)]
            for at in (1.0, 3.0)
        ]
        between = top.lines(*looks)
        assert len(between) == 8
        assert {(line.sender, line.receiver) for line in between[: len(slow)]} == slow
        assert {round(line.megabytes) for line in between} == {100}
        return top.slow_lines(between)

    assert told(set()) == ""
    assert told({(1, 2)}) == (
        "The line from rank 1 (h1) to rank 2 (h0) is slow: 111.1 MB/s while busy, "
        "where the others have 1000.0."
    )
    assert told({(0, 1), (0, 3), (2, 1), (2, 3)}).startswith("All lines from host h0 are slow: ")
    # An operation took longer than the time between the looks; and a few bytes tell nothing.
    looks = [
        [status(r, at, lines={3: [3e8 * at, (9.0 if r == 1 else 1.0) * at, 0.0]}) for r in range(3)]
        + [status(3, at, lines={0: [1e4 * at, 0.3 * at, 0.0]})]
        for at in (1.0, 2.0)
    ]
    assert top.slow_lines(top.lines(*looks)).startswith("The line from rank 1 (h1) to rank 3 ")
    assert told({(1, 0), (1, 2), (3, 0)}).startswith("The line from rank 1 (h1) to rank ")


def test_it_says_what_each_rank_does() -> None:
    runs: dict[str, Any] = {"running": {"0": "all_reduce #7"}, "running_seconds": {"0": 3.0}}
    short: dict[str, Any] = {"running": {"0": "barrier #3"}, "running_seconds": {"0": 0.01}}
    now = [
        status(0, 1.0, done={"0": 7}, **runs),
        status(1, 1.0, done={"0": 7, "1": 2}),
        status(2, 1.0, done={"0": 7}, age=9.0),
        status(3, 1.0, done={"0": 7}, **short),
        status(4, 1.0, done={"1": 2}),  # it is not in the group of rank 0
        status(5, 1.0, done={"0": 8}),  # it has been there, as a rank that only sends
    ]
    assert top.headline(top.rows([], now), "job").endswith(
        "An operation of others waits for ranks 1 and 2."
    )
    assert [row.now for row in top.rows([], now)] == [
        "all_reduce #7 for 3.0 s",
        "not in the operation of rank 0, for 3.0 s",
        "no news for 9 s",
        "barrier #3",
        "no operation",
        "no operation",
    ]


def test_a_rank_that_writes_less_often_than_one_looks_keeps_its_rates() -> None:
    looks = top.Looks()
    now = time.time()
    first, second = status(0, now - 2), status(0, now - 1, operations=50)
    for seen in (first, first, second, second):
        view = looks.add([seen])
    assert looks.add([], all_write=False).rows[0].rank == 0  # on a page, a lost rank stays
    assert looks.add([]).rows == []
    assert view.rows[0].operations == pytest.approx(50, rel=0.1)


def test_keys_sort_the_table() -> None:
    pytest.importorskip("textual")
    from textual.widgets import DataTable, Static

    class Source(top.Source):
        def look(self) -> top.View:
            self.looks = getattr(self, "looks", 0) + 1
            waits = [0.0, 0.5, 0.1]
            table = [
                top.Row(r, "h", r, 5, 10 - r, 1.0, 0.5, 0.1, waits[r], "computes") for r in range(3)
            ]
            return top.View(top.headline(table, "job"), table, [])

    async def pressed() -> list[list[str]]:
        source = Source("")
        app = top.app(source, 0.05)
        orders = []
        async with app.run_test() as pilot:
            for key in ("", "l", "o", "r"):
                await pilot.press(*key)
                await pilot.pause()
                table = app.query_one(DataTable)
                orders.append([str(table.get_cell_at((row, 0))) for row in range(3)])
            line = app.query_one("#headline", Static)
            assert "for rank 1" in str(line.render())
            while source.looks < 3:
                await pilot.pause(0.05)
            await pilot.press("q")
        return orders

    assert asyncio.run(pressed()) == [
        ["0", "1", "2"],
        ["1", "2", "0"],
        ["0", "1", "2"],
        ["0", "1", "2"],
    ]


# ---- the page of torch's debug server


@pytest.mark.skipif(not HAS_SERVER, reason="this torch has no debug server")
def test_what_ranks_say_is_no_html() -> None:
    from torch.distributed.debug._frontend import FrontendServer

    from ringreduce.observe import debug_server

    handler = debug_server.RingreduceHandler()
    server = FrontendServer(0, [handler])
    row = top.Row(0, "<script>", 1, 0, 0.0, 0.0, 0.0, 0.0, 0.0, "<i>")
    page = server.render_template(
        "ringreduce.html",
        headline="<b>",
        problems=["<p>"],
        tables=top.tables(top.View("", [row], [])),
    ).decode()
    server._server.shutdown()
    for text in ("b", "p", "i", "script"):
        assert f"&lt;{text}&gt;" in page


@pytest.mark.skipif(not HAS_SERVER, reason="this torch has no debug server")
def test_an_error_of_a_rank_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's thread calls, and an exception there may end the process."""
    from ringreduce.observe import debug_server

    class Response:
        def set_content(self, content: bytes, kind: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            self.status = status

    def text() -> bytes:
        raise RuntimeError("a group was destroyed")

    response = Response()
    monkeypatch.setattr(metrics, "text", text)
    debug_server._answer(None, response)
    assert (response.status, response.content) == (500, b"RuntimeError: a group was destroyed")


@pytest.mark.skipif(not HAS_SERVER, reason="this torch has no debug server")
def test_the_debug_server_has_a_page_of_it(
    pool: Pool, world: MakeWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    address = f"http://localhost:{port}"
    stop = tmp_path / "stop"
    pages = pool.start(_shows_page, world(2), port, str(stop), fresh=True)
    pages.hear_all()
    with urllib.request.urlopen(f"{address}/ringreduce_metrics") as answer:
        assert [s.rank for s in statuses(answer.read())] == [0, 1]
    with urllib.request.urlopen(f"{address}/") as answer:
        assert 'href="/ringreduce"' in answer.read().decode()
    assert top.main([address, "--once"]) == 0
    assert "of the time for rank 1." in capsys.readouterr().out
    if CHROMIUM:
        picture = os.environ.get("RINGREDUCE_TEST_PICTURE")
        late, *cells = evaluate(f"{address}/ringreduce", PAGE, png=picture)
        assert "of the time for rank 1." in late
        assert [row[:2] for row in cells] == [
            ["0", socket.gethostname()],
            ["1", socket.gethostname()],
        ]
        assert float(cells[1][8].removesuffix("%")) > 50
    stop.touch()
    pages.results()


# The page renews itself: after three seconds it has rates.
PAGE = """
(async () => {
  const rows = () => [...document.querySelectorAll(".ringreduce tr")].slice(1);
  const text = () => rows().map(row => [...row.cells].map(cell => cell.innerText.trim()));
  while (!rows().length || !document.querySelector(".ringreduce tr.late"))
    await new Promise(again => setTimeout(again, 50));
  return [document.querySelector("#ringreduce p").innerText, ...text()];
})()
"""


def _shows_page(rank: Rank, port: int, stop: str) -> None:
    from torch.distributed.debug import start_debug_server, stop_debug_server

    from ringreduce.observe import debug_server

    os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": "2"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank.rank == 0 else None
    told = [store.port if store else None]
    dist.broadcast_object_list(told)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(told[0])}
    start_debug_server(port=port, handlers=debug_server.handlers(), start_method="spawn")
    if rank.rank == 0:
        assert wait_until(lambda: _answers(port))
    rank.tell(None)
    go_on = torch.ones(1)
    while go_on:
        if rank.rank == 1:
            time.sleep(0.02)
        dist.all_reduce(go_on.fill_(not os.path.exists(stop)), op=dist.ReduceOp.MIN)
    if rank.rank == 0:  # torch's only works there
        stop_debug_server()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("localhost", port), timeout=1):
            return True
    except OSError:
        return False
