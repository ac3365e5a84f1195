"""Horovod's elastic runs, horovodrun and hvd.run: real processes that a launcher starts.

The training of the elastic tests is made so that the weight tells which steps were taken, by how
many ranks: a step lost, or taken twice, would show.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import launchers
import pytest
import torch
import torch.distributed as dist
from launchers import untouched
from pool import run_ranks

import ringreduce.horovod as hvd
from ringreduce.horovod import _rendezvous, _world, horovodrun
from ringreduce.horovod._rendezvous import Limits, Member, Rendezvous
from ringreduce.horovod.torch import elastic

TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import ringreduce.horovod as hvd

folder, victim, steps, final_size = Path(sys.argv[1]), *map(int, sys.argv[2:5])
slot = int(os.environ["RANK"])
is_first = not (folder / f"seen{slot}").exists()
(folder / f"seen{slot}").touch()
hvd.init()
weight = torch.nn.Parameter(torch.full((1,), 100.0 * hvd.rank()))
model = torch.nn.ParameterList([weight])
# The second optimizer step of a lost momentum would differ.
optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=[("w", weight)])
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
dataset = list(range(10_000))
sampler = hvd.elastic.ElasticSampler(dataset)
resets, entries = [], []

@hvd.elastic.run
def train(state, word):
    assert word == "word"
    entries.append([state.step, hvd.size()])
    assert sampler.processed_num == sum(size for _, size in state.history)
    while state.step < steps or hvd.size() < final_size:
        if state.step == 11 and slot == victim and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (weight.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        scheduler.step()
        state.sampler.record_batch(0, 1)
        state.history.append((state.step, hvd.size()))
        state.step += 1
        if state.step % 2 == 0:
            state.commit()
        if state.step > steps:  # until another process has started
            time.sleep(0.02)
    return state.step

state = hvd.elastic.TorchState(
    model, optimizer, scheduler=scheduler, sampler=sampler, step=0, history=[]
)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
result = train(state, word="word")
told = dict(
    slot=slot, rank=hvd.rank(), size=hvd.size(), result=result, history=state.history,
    weight=weight.item(), lr=scheduler.get_last_lr()[0], resets=resets, entries=entries,
    is_first=is_first,
)
(folder / f"told{slot}.json").write_text(json.dumps(told))
"""


def expected(history: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The weight and the learning rate after these steps, of so many ranks each."""
    weight, moment, rate = torch.zeros(1), torch.zeros(1), 1.0
    for step, size in history:
        gradient = torch.full((1,), (size + 1) / 2)
        moment = gradient if step == 0 else 0.5 * moment + gradient
        weight -= rate * moment
        if (step + 1) % 7 == 0:
            rate *= 0.5
    return weight.item(), rate


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return launchers.run([sys.executable, "-m", "ringreduce.horovod.horovodrun", *arguments])


def train(
    folder: Path, victim: int, steps: int, final: int, *options: str
) -> tuple[dict[int, dict[str, Any]], subprocess.CompletedProcess[str]]:
    """What the ranks of an elastic run tell, by their slots."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    program = [sys.executable, str(script), str(folder), str(victim), str(steps), str(final)]
    done = launch("-np", "3", *options, *program)
    told = {}
    for path in folder.glob("told*.json"):
        one = json.loads(path.read_text())
        told[one["slot"]] = one
        weight, rate = expected(one["history"])
        assert (one["weight"], one["lr"]) == (pytest.approx(weight), rate), one
        assert [step for step, _ in one["history"]] == list(range(one["result"]))
    return told, done


def test_others_go_on_from_the_last_commit_and_the_killed_rank_joins(tmp_path: Path) -> None:
    # Of rank 0, which has the state: another one has to send it.
    told, done = train(tmp_path, 0, 20, 3, "--min-np", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(told) == [0, 1, 2], done.stderr
    # Step 10 was taken, but not committed.
    assert [told[slot]["entries"][:2] for slot in (1, 2)] == [[[0, 3], [10, 2]]] * 2
    assert [told[slot]["resets"] for slot in (1, 2)] == [[2, 3]] * 2
    assert [told[slot]["rank"] for slot in (0, 1, 2)] == [2, 0, 1]
    assert not told[0]["is_first"] and told[0]["entries"] == [told[1]["entries"][2]]
    assert len({(one["weight"], one["result"]) for one in told.values()}) == 1
    assert "rank 0 ended with signal SIGKILL; it is started again" in done.stderr
    assert "goes back to the last commit: rank 0 (pid" in done.stderr


@pytest.mark.slow
def test_ranks_wait_for_the_one_that_is_started_again_if_they_are_too_few(tmp_path: Path) -> None:
    told, done = train(tmp_path, 1, 20, 3, "--reset-limit", "1")
    assert done.returncode == 0, done.stderr
    assert [told[slot]["entries"] for slot in (0, 1, 2)] == [
        [[0, 3], [10, 3]], [[10, 3]], [[0, 3], [10, 3]],
    ]  # fmt: skip
    assert {one["result"] for one in told.values()} == {20}


@pytest.mark.nightly
def test_a_reset_limit_ends_the_job(tmp_path: Path) -> None:
    told, done = train(tmp_path, 2, 20, 2, "--min-np", "2", "--reset-limit", "0")
    assert done.returncode == 1 and not told, done.stderr
    assert "SIGKILL; the job ends, since 0 were started again (--reset-limit)" in done.stderr


# Rank 0 ends after rank 1 has ended for the fourth time.
FAILS = """
import os, sys, time
from pathlib import Path
lives = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    (lives / str(os.getpid())).touch()
    sys.exit(3)
while len(list(lives.iterdir())) < 4:
    time.sleep(0.01)
time.sleep(1)
"""


@pytest.mark.nightly
def test_without_a_reset_limit_others_go_on_if_they_are_enough(tmp_path: Path) -> None:
    for least, status in ((1, 0), (2, 1)):
        (lives := tmp_path / str(least)).mkdir()
        program = (sys.executable, "-c", FAILS, str(lives))
        done = launch("-np", "2", "--min-np", str(least), *program)
        assert done.returncode == status, done.stderr
        assert done.stderr.count("rank 1 ended with exit status 3; it is started again") == 3
        assert "rank 1 ended with exit status 3; no restarts are left" in done.stderr
        assert ("1 ranks are left, and 2 are needed (--min-np)" in done.stderr) == bool(status)


LOST = """
import os, signal
import torch
import ringreduce.horovod as hvd

hvd.init()
hvd.allreduce(torch.ones(3))
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
state = hvd.elastic.ObjectState(hvd.broadcast_object, step=0)

@hvd.elastic.run
def train(state):
    hvd.allreduce(torch.ones(3), name="after")

try:
    train(state)
except hvd.HorovodInternalError as error:
    assert "rank 1" in str(error) and "is lost" in str(error), error
    hvd.shutdown()
    assert not hvd.is_initialized() and not torch.distributed.is_initialized()
    print("raised")
"""


def test_without_elastic_all_others_name_the_killed_rank(tmp_path: Path) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    done = run_ranks(script, 3, untouched(), timeout=600.0)
    assert done[1].returncode == -signal.SIGKILL
    for other in (done[0], done[2]):
        assert (other.returncode, other.stdout) == (0, "raised\n"), other.stderr


# ---- where ranks meet


class Meeting:
    """Processes of another host, as far as they can be told from this one, in threads."""

    def __init__(self, limits: Limits) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.limits = limits

    def member(self, rank: int, **more: Any) -> Rendezvous:
        client = dist.TCPStore("127.0.0.1", self.server.port, is_master=False)
        me = replace(Member(f"token {rank}", 0, rank, "far away", rank, "1"), **more)
        return Rendezvous(dist.PrefixStore("test", client), me, self.limits)


def together(*ranks: Rendezvous) -> list[tuple[int, int, int] | Exception]:
    """(generation, rank, size) of each, or what it raised.  They have the state then."""
    found: list[Any] = [None] * len(ranks)

    def meet(number: int) -> None:
        try:
            place = ranks[number].next_group()
            found[number] = (place.generation, place.rank, place.size)
            ranks[number].note_state()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=meet, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def entered(rank: Rendezvous, seen_by: Rendezvous) -> tuple[threading.Thread, list[Any]]:
    """Has a rank wait, and a place for it in the list once there is one."""
    places: list[Any] = []
    waiting = threading.Thread(target=lambda: places.append(rank.next_group()))
    waiting.start()
    while not seen_by.has_newcomers():
        time.sleep(0.01)
    return waiting, places


def test_ranks_meet_without_lost_ones_and_newcomers_come_last() -> None:
    meeting = Meeting(Limits(start=3, least=2))
    a, b, c = (meeting.member(rank) for rank in range(3))
    assert together(c, a, b) == [(1, 2, 3), (1, 0, 3), (1, 1, 3)]
    assert together(b, c) == [(2, 0, 2), (2, 1, 2)]  # a is waited for, and does not come
    assert not b.has_newcomers()
    new = meeting.member(0, token="new")
    waiting, places = entered(new, b)
    assert not places  # it waits for the group to let it in
    assert together(c, b) == [(3, 1, 3), (3, 0, 3)]
    waiting.join(60)
    assert (places[0].rank, places[0].size, places[0].is_unchanged) == (2, 3, False)
    new.note_state()
    # Too late for the third group, so after those who were in it.
    late, places = entered(a, b)
    assert together(new, b, c) == [(4, 2, 4), (4, 0, 4), (4, 1, 4)]
    late.join(60)
    assert (places[0].generation, places[0].rank) == (4, 3)
    a.note_state()
    assert together(new, b, c, a)[0] == (5, 2, 4)


def test_too_few_ranks_raise_and_the_error_says_who_is_missing() -> None:
    meeting = Meeting(Limits(start=3, least=3, timeout=60))
    here = Member.of_this_process(2)
    a, b = meeting.member(0), meeting.member(1)
    lives = meeting.member(2, host=here.host, pid=here.pid, started=here.started)
    assert together(a, b, lives) == [(1, rank, 3) for rank in range(3)]
    for one in (a, b):
        one._limits = replace(one._limits, timeout=0.5)
    for error in together(a, b):
        assert isinstance(error, TimeoutError)
        assert "waited 0.5 s (HOROVOD_ELASTIC_TIMEOUT)" in str(error)
        assert "2 came, and at least 3 are needed (--min-np)" in str(error)
        assert f"missing: rank 2 (process {os.getpid()}, which lives)" in str(error)


def test_a_newcomer_is_told_if_nobody_is_left_to_join() -> None:
    meeting = Meeting(Limits(start=1, least=1))
    child = subprocess.Popen(["sleep", "60"])
    me = Member.of_this_process(0)
    gone = replace(me, pid=child.pid, started=_rendezvous._started(child.pid))
    assert gone.lives() is True
    only = meeting.member(0, host=me.host, pid=gone.pid, started=gone.started)
    assert together(only) == [(1, 0, 1)]
    child.kill()
    while gone.lives():
        time.sleep(0.01)  # it need not be waited for to count as ended
    (error,) = together(meeting.member(0, token="new"))
    assert isinstance(error, RuntimeError) and "cannot join: rank 0" in str(error)
    child.wait()


def test_a_rank_without_the_state_does_not_go_on_without_those_that_have_it() -> None:
    meeting = Meeting(Limits(start=1, least=1))
    old, new = meeting.member(7), meeting.member(0)
    assert together(old) == [(1, 0, 1)]
    waiting, _ = entered(new, old)
    assert together(old) == [(2, 0, 2)]
    waiting.join(60)
    new._limits = replace(new._limits, timeout=0.5)
    (error,) = together(new)  # it waits for the other one
    assert isinstance(error, TimeoutError) and "missing: rank 0 (process 7, " in str(error)
    assert together(old) == [(3, 0, 2)]  # which comes first, though it came later


def test_limits_name_the_variable_that_makes_no_sense() -> None:
    given = {"WORLD_SIZE": "3", "HOROVOD_ELASTIC_MIN_NP": "2", "HOROVOD_ELASTIC_TIMEOUT": "5"}
    assert Limits.read(given) == Limits(3, 2, None, 5, 30)
    with pytest.raises(ValueError, match="HOROVOD_ELASTIC_TIMEOUT=0 must be at least 1"):
        Limits.read({**given, "HOROVOD_ELASTIC_TIMEOUT": "0"})
    with pytest.raises(ValueError, match="WORLD_SIZE=3 must be from HOROVOD_ELASTIC_MIN_NP=4"):
        Limits.read({**given, "HOROVOD_ELASTIC_MIN_NP": "4"})
    with pytest.raises(ValueError, match="needs WORLD_SIZE"):
        Limits.read({})


# ---- states


def alone(monkeypatch: pytest.MonkeyPatch, size: int = 1, rank: int = 0) -> None:
    monkeypatch.setattr(elastic, "size", lambda: size)
    monkeypatch.setattr(elastic, "rank", lambda: rank)


def test_a_sampler_divides_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(size: int, state: dict[str, int]) -> list[list[int]]:
        found = []
        for rank in range(size):
            alone(monkeypatch, size, rank)
            sampler = hvd.elastic.ElasticSampler(range(11), seed=3)
            sampler.load_state_dict(state)
            found.append(list(sampler))
            assert len(found[-1]) == len(sampler)
        return found

    alone(monkeypatch, 3)
    sampler = hvd.elastic.ElasticSampler(range(11), seed=3)
    sampler.set_epoch(1)
    first = shares(3, sampler.state_dict())
    assert {len(share) for share in first} == {4}
    assert sorted({i for share in first for i in share}) == list(range(11))
    sampler.record_batch(0, 2)  # six samples by three ranks
    rest = {i for share in shares(2, sampler.state_dict()) for i in share}
    assert rest == set(range(11)) - {i for share in first for i in share[:2]}
    sampler.processed_num = 10  # one sample for five ranks
    assert len({tuple(share) for share in shares(5, sampler.state_dict())}) == 1
    sampler.set_epoch(2)
    assert shares(3, sampler.state_dict()) != first
    alone(monkeypatch)
    assert list(hvd.elastic.ElasticSampler(range(4), shuffle=False)) == [0, 1, 2, 3]


def test_restore_takes_back_what_was_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, seen=[1], step=0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 2)).pow(2).sum().backward()
        optimizer.step()
        state.step += 1
        state.seen.append(state.step)

    def values() -> str:
        return str((model.state_dict(), optimizer.state_dict(), state.seen, state.step))

    first = values()
    step()
    state.restore()
    assert values() == first
    step()
    state.save()
    saved = values()
    for _ in range(2):  # what is restored is not what is kept
        step()
        state.restore()
        assert values() == saved
    other = torch.nn.Linear(1, 1)
    state.model = other
    kept = other.weight.item()
    with torch.no_grad():
        other.weight.add_(1)
    state.restore()
    assert state.model is other and other.weight.item() == kept


def test_a_group_that_could_not_be_made_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone(monkeypatch)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setattr(_rendezvous, "is_elastic", lambda: True)
    monkeypatch.setattr(_rendezvous, "here", Mock)
    monkeypatch.setattr(elastic, "tell_supervisor", Mock())
    monkeypatch.setattr(_world, "is_initialized", lambda: False)
    restart = Mock(side_effect=[hvd.HorovodInternalError("rank 1 is lost"), False])
    monkeypatch.setattr(_world, "restart", restart)
    state = elastic.ObjectState(lambda value: value, step=0)
    train = Mock(side_effect=[hvd.HorovodInternalError("rank 2 is lost"), "trained"])
    train.__name__ = "train"

    def no_rank() -> int:
        raise ValueError("hvd.init() comes first")

    monkeypatch.setattr(elastic, "rank", no_rank)
    assert elastic.run(train)(state) == "trained"
    assert restart.call_count == 2 and train.call_count == 2
    assert caplog.messages == [
        f"the process that was started as rank 5 goes back to the last commit: rank {lost} is lost"
        for lost in (2, 1)
    ]


# ---- hvd.run


def square(base: int, *, plus: int = 0) -> tuple[int, int, float]:
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
    return hvd.rank(), base**2 + plus, total.item()


def fail_on_one() -> None:
    hvd.init()
    if hvd.rank() == 1:
        raise LookupError("a reason of its own")
    hvd.barrier()


def kill_one() -> None:
    hvd.init()
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


@pytest.mark.nightly
def test_run_returns_results_by_rank_and_raises_the_first_error(tmp_path: Path) -> None:
    assert hvd.run(square, (3,), {"plus": 1}, num_proc=2) == [(0, 10, 1.0), (1, 10, 1.0)]
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed") as caught:
        hvd.run(fail_on_one, num_proc=2, output_filename=str(tmp_path / "out"))
    assert "LookupError: a reason of its own" in str(caught.value)
    assert "in fail_on_one" in str(caught.value)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["rank.0", "rank.1"]
    with pytest.raises(RuntimeError, match="rank 0 of 2 ended with signal SIGKILL"):
        hvd.run(kill_one, num_proc=2)


def test_run_refuses_what_it_cannot_do() -> None:
    for name, value in {"hosts": "a:2", "ssh_port": 22, "use_mpi": True, "min_np": 1}.items():
        with pytest.raises(ValueError, match=f"^{name}="):
            hvd.run(square, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_proc must be at least 1"):
        hvd.run(square, num_proc=0)
    with pytest.raises(ValueError, match="cannot be pickled"):
        hvd.run(square, (threading.Lock(),))


# ---- horovodrun


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What horovodrun says of options that it does not take, on one line."""
    with pytest.raises(SystemExit) as ended:
        horovodrun.launcher_command(horovodrun.parse(argv), {"PATH": ""})
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_options_become_variables() -> None:
    text = """-np 2 --fusion-threshold-mb 3 --cycle-time-ms 2.5 --cache-capacity 7
        --timeline-filename t.json --timeline-mark-cycles --no-stall-check
        --stall-check-warning-time-seconds 4 --stall-check-shutdown-time-seconds 5
        --start-timeout 6 --network-interfaces eth0,eth1 --gloo --verbose
        --min-np 1 --max-np 8 --elastic-timeout 9 --autotune --num-nccl-streams 2
        python -u train.py --np 3"""
    given = horovodrun.parse(text.split())
    assert horovodrun.variables(given) == {
        "HOROVOD_FUSION_THRESHOLD": str(3 << 20),
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_CACHE_CAPACITY": "7",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "4",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
        "HOROVOD_START_TIMEOUT": "6",
        "RINGREDUCE_IF": "eth0,eth1",
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_ELASTIC_MIN_NP": "1",
        "HOROVOD_ELASTIC_MAX_NP": "8",
        "HOROVOD_ELASTIC_TIMEOUT": "9",
    }
    assert given.command == ["python", "-u", "train.py", "--np", "3"]
    assert given.without_effect == ["--autotune", "--num-nccl-streams"]
    assert horovodrun.variables(horovodrun.parse(["-np", "2", "a.out"])) == {}


def test_ranks_of_one_host_are_torchruns() -> None:
    for hosts in ((), ("-H", "localhost:4,elsewhere:4"), ("--hosts", "127.0.0.1:3")):
        given = horovodrun.parse(["-np", "3", *hosts, "python", "train.py"])
        command = horovodrun.launcher_command(given, {"PATH": ""})
        assert command == [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "3", "--no-python", "python", "train.py"),
        ]


def test_ranks_of_several_hosts_are_mpiruns_or_sruns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two of them\na slots=2\n\nb slots=2  # the last\n")
    argv = ["-np", "3", "--hostfile", str(hostfile), "--cycle-time-ms", "2", "python", "train.py"]
    error = refused(capsys, *argv)
    assert "need mpirun on the PATH, or srun in a Slurm job" in error
    assert "torchrun --nnodes 2 --node-rank K" in error and "--master-addr a" in error

    def command(*more: str, **environment: str) -> str:
        given = horovodrun.parse([*more, *argv])
        found = horovodrun.launcher_command(given, {"PATH": str(tmp_path), **environment})
        return " ".join(found)

    mpirun = tmp_path / "mpirun"
    for version in ("mpirun (Open MPI) 4.1.4", "HYDRA build details:"):
        mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
        mpirun.chmod(0o755)
        found = command(HOROVOD_X="1", HOME="/root", SLURM_NTASKS="1")
        if "Open MPI" in version:
            assert found.startswith(f"{mpirun} -np 3 -H a:2,b:1 ")
            assert "-x HOROVOD_X -x PATH -x HOROVOD_CYCLE_TIME=2.0 -x MASTER_ADDR=a" in found
            assert "HOME" not in found and "SLURM" not in found
            assert "-mca plm_rsh_args -p 2222 " in command("-p", "2222", "--mpi")
        else:
            assert found.startswith(f"{mpirun} -n 3 -hosts a:2,b:1 -genv HOROVOD_CYCLE_TIME 2.0")
            assert "-genv MASTER_ADDR a" in found
        assert found.endswith(" python train.py")
    (tmp_path / "srun").write_text("")
    (tmp_path / "srun").chmod(0o755)
    found = command(SLURM_JOB_ID="1")
    assert found == "srun --ntasks=3 --distribution=arbitrary --nodelist=a,a,b python train.py"
    hostfile.write_text("a slots=2\nb slots=2\n")
    argv[1] = "4"
    found = command(SLURM_JOB_ID="1")
    assert found == "srun --ntasks=4 --ntasks-per-node=2 --nodelist=a,b python train.py"


def test_a_file_of_hosts_that_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile = tmp_path / "hosts"
    for content in (b"\xff\xfea\x00 \x00", b"\x7fELF\x02\x01\x00", b"a slots=two\n", b"a 2 3\n"):
        hostfile.write_bytes(content)
        error = refused(capsys, "-np", "2", "--hostfile", str(hostfile), "a")
        assert str(hostfile) in error and "host1 slots=2" in error
    for path in (tmp_path, tmp_path / "missing"):
        assert str(path) in refused(capsys, "-np", "2", "--hostfile", str(path), "a")


def test_options_that_cannot_be_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in {
        "python": "-np/--num-proc",
        "-np 2": "a command is needed",
        "-np 0 a": "--num-proc must be at least 1, not 0",
        "-np 3 -H localhost:2 a": "-np 3 is more than the 2 slots of the hosts",
        "-np 2 -H localhost:x a": "'localhost:x' in the list of hosts is not such as host1:2",
        "-np 2 --min-np 3 a": "-np 2 must be from --min-np 3 to --max-np 2",
        "-np 2 --config-file x.yaml a": "give its settings as options of horovodrun",
        "-np 2 --host-discovery-script x a": "elastic runs are on one host here",
        "-np 2 -p 22 a": "--ssh-port is for mpirun",
        "-np 2 --gloo --mpi a": "not allowed with",
        "-np 2 --fusion-threshold-mb -1 a": "--fusion-threshold-mb must be at least 0",
    }.items():
        assert text in refused(capsys, *argv.split()), argv
    with pytest.raises(SystemExit):
        horovodrun.main(["-np", "2", "--min-np", "1", "-H", "a:1,b:1", "a"])
    assert "are on one host, without mpirun" in capsys.readouterr().err
    for option, text in (("--check-build", "[X] PyTorch"), ("--version", "ringreduce ")):
        with pytest.raises(SystemExit) as ended:
            horovodrun.parse([option])
        assert ended.value.code == 0 and text in capsys.readouterr().out


def test_horovodrun_starts_ranks_and_keeps_their_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        import ringreduce.horovod.torch as hvd
        hvd.init()
        print(hvd.rank(), hvd.size(), hvd.local_rank(), os.environ["HOROVOD_CYCLE_TIME"])
        print("to stderr", file=sys.stderr)
        """)
    )
    folder = tmp_path / "out"
    done = launch(
        *("-np", "2", "--cycle-time-ms", "3", "--output-filename", str(folder), "--log-level"),
        *("INFO", sys.executable, str(script)),
    )
    assert done.returncode == 0, done.stderr
    assert "without effect in ringreduce: --log-level" in done.stderr
    for rank in (0, 1):
        assert (folder / f"rank.{rank}" / "stdout").read_text() == f"{rank} 2 {rank} 3.0\n"
        assert "to stderr" in (folder / f"rank.{rank}" / "stderr").read_text()
