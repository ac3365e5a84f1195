"""The order of calls and streams: behind what, before what, and that the host waits for none of it.

A gate holds a stream, so what is shown does not depend on who is how fast.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import fake_rules
import pytest
import torch
import torch.distributed as dist
from conftest import Machine
from gpu_jobs import Gate, use_gpu
from pool import Rank
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

import ringreduce


def ready(me: Rank) -> torch.device:
    """The rank's GPU, with the first call, at which the ranks wait for each other, behind it."""
    device = use_gpu(me)
    for async_op in (False, True):
        work = dist.all_reduce(torch.ones(1, device=device), async_op=async_op)
        if work is not None:
            work.wait()
    torch.cuda.synchronize()
    return device


def all_of(me: Rank) -> float:
    return float(sum(range(1, me.world_size + 1)))


def wait_orders_streams(me: Rank) -> None:
    device = ready(me)
    x, mine = torch.zeros(5000, device=device), torch.full((5000,), me.rank + 1.0, device=device)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    for each in (stream, other):
        each.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gate = Gate()
        x.copy_(mine)
        work = dist.all_reduce(x, async_op=True)
        work.wait()  # for a call that cannot have begun
        seen = torch.empty_like(x)
        seen.copy_(x, non_blocking=True)
        assert not work.is_completed() and not stream.query()
    with torch.cuda.stream(other):  # a stream that did not wait goes its own way
        assert x.cpu().tolist() == [0] * 5000
        work.wait()
        also = torch.empty_like(x)
        also.copy_(x, non_blocking=True)
        assert not other.query()
    gate.open()
    stream.synchronize()
    other.synchronize()
    assert work.is_completed()
    assert seen.cpu().tolist() == also.cpu().tolist() == [all_of(me)] * 5000


def test_wait_orders_streams_and_not_the_host(machine: Machine) -> None:
    machine.run(wait_orders_streams, 2)


def blocking(me: Rank) -> None:
    device = ready(me)
    x, mine = torch.zeros(100, device=device), torch.full((100,), me.rank + 1.0, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        gate = Gate()
        x.copy_(mine)
        dist.all_reduce(x)
        dist.broadcast(x, 1)
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
        gate.open()
        assert x.cpu().tolist() == [all_of(me)] * 100


def test_blocking_calls_block_streams_only(machine: Machine) -> None:
    machine.run(blocking, 2)


def futures(me: Rank) -> None:
    device = ready(me)
    x = torch.full((3000,), me.rank + 1.0, device=device)
    torch.cuda.synchronize()
    gate = Gate()
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    assert future.done() and not work.is_completed()
    streams: list[torch.cuda.Stream] = []

    def double(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        """Runs at once, in a stream behind the operation."""
        streams.append(torch.cuda.current_stream())
        result = torch.empty_like(x)
        result.copy_(done.value()[0], non_blocking=True)
        return result

    chained = future.then(double)
    assert chained.done() and len(streams) == 1 and not streams[0].query()
    copied = chained.wait()
    gate.open()
    assert copied.cpu().tolist() == [all_of(me)] * 3000


def test_futures_are_done_when_their_operation_is_in_its_stream(machine: Machine) -> None:
    machine.run(futures, 2)


def late_future(me: Rank) -> None:
    device = ready(me)
    x, y = torch.full((8,), me.rank + 1.0, device=device), torch.ones(8, device=device)
    torch.cuda.synchronize()
    first = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        gate = Gate()
        second = dist.all_reduce(y, async_op=True)
    assert first.get_future().wait()[0].cpu().tolist() == [all_of(me)] * 8
    assert first.is_completed() and not second.is_completed()
    gate.open()
    second.wait()
    assert y.cpu().tolist() == [me.world_size] * 8


def test_a_future_does_not_wait_for_later_calls(machine: Machine) -> None:
    machine.run(late_future, 2)


def events(me: Rank) -> None:
    """A call makes none, once there are some to use again."""
    x = torch.ones(8, device=ready(me))
    seen = []
    for _ in range(20):
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        del work, works
        ringreduce.commit()
        seen.append(fake_rules.runtime.fakeEventsMade())
    assert seen[5:] == [seen[5]] * 15


def test_calls_use_their_events_again(machine: Machine) -> None:
    machine.run(events, 2)


def reuse(me: Rank) -> None:
    device = ready(me)
    n = 300_000
    x = torch.full((n,), me.rank + 1.0, device=device)
    wanted = torch.full((n,), all_of(me))
    kept = torch.empty(n, device=device)
    torch.cuda.synchronize()
    gate = Gate()
    work = dist.all_reduce(x, async_op=True)
    storage = x.untyped_storage().data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
        kept.copy_(x, non_blocking=True)
        x.record_stream(torch.cuda.current_stream())
    del work, x
    fresh = [torch.empty(n, device=device) for _ in range(4)]
    assert storage not in [t.untyped_storage().data_ptr() for t in fresh]
    gate.open()
    torch.cuda.synchronize()
    assert torch.equal(kept.cpu(), wanted)


def test_memory_in_use_by_an_operation_is_not_given_away(machine: Machine) -> None:
    machine.run(reuse, 2)


def freed(me: Rank) -> None:
    """Memory is free once a stream waits for its operation, or else once that is over."""
    device = ready(me)
    n = 300_000
    gate = Gate()
    for waited in (True, False):
        x = torch.empty(n, device=device)
        storage = x.untyped_storage().data_ptr()
        work = dist.all_reduce(x, async_op=True)
        if waited:
            work.wait()
        del work, x
        fresh = [torch.empty(n, device=device) for _ in range(4)]
        assert (storage in [t.untyped_storage().data_ptr() for t in fresh]) == waited
    gate.open()


def test_memory_is_free_once_a_stream_waits_for_its_operation(machine: Machine) -> None:
    machine.run(freed, 2)


def registered(me: Rank) -> None:
    """In torch's registry for wait_tensor, until it is waited for."""
    size: Any = torch._C._distributed_c10d._get_work_registry_size
    x, before = torch.ones(5, device=ready(me)), size()
    with allow_inflight_collective_as_graph_input_ctx():
        work = dist.all_reduce(x, async_op=True)
        assert size() == before + 1
        work.wait()
    assert size() == before


def test_works_leave_the_registry(machine: Machine) -> None:
    machine.run(registered, 2)


def drained(me: Rank, native: bool) -> None:
    if native:
        ready(me)
    else:  # only the other backends use the GPU
        dist.reduce(torch.ones(8, device=use_gpu(me)), 0)
        torch.cuda.synchronize()
    gate = Gate()
    threading.Timer(0.3, gate.open).start()
    dist.barrier()
    assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("native", [True, False])
def test_a_barrier_waits_for_the_gpu(machine: Machine, native: bool) -> None:
    machine.run(drained, 2, native)


def drained_calls(me: Rank) -> None:
    """Of a call that nobody has waited for, and that the current stream does not follow."""
    x = torch.ones(8, device=ready(me))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        gate = Gate()
        work = dist.all_reduce(x, async_op=True)
    threading.Timer(0.3, gate.open).start()
    dist.barrier()
    assert work.is_completed()


def test_a_barrier_waits_for_asynchronous_calls(machine: Machine) -> None:
    machine.run(drained_calls, 2)


def drained_beside_a_capture(me: Rank) -> None:
    ready(me)
    graph, begun, over = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
    x, y = torch.zeros(8, device=use_gpu(me)), torch.ones(8, device=use_gpu(me))
    torch.cuda.synchronize()

    def capture() -> None:
        use_gpu(me)
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            x.copy_(y)
            work = dist.all_reduce(x, async_op=True)
            begun.set()
            over.wait(30)
            work.wait()
            graph.capture_end()

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(10)
    gate = Gate()
    threading.Timer(0.1, gate.open).start()
    dist.barrier()
    over.set()
    thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert x.cpu().tolist() == [float(me.world_size)] * 8


def test_a_barrier_leaves_captures_of_other_threads_alone(machine: Machine) -> None:
    machine.run(drained_beside_a_capture, 2)


def beside_a_capture(me: Rank, what: str) -> None:
    """What a thread does while another captures, in the mode in which CUDA minds most."""
    device = use_gpu(me) if what == "set-up" else ready(me)
    x, y = torch.zeros(8, device=device), torch.ones(8, device=device)
    z = torch.ones(8, device=device)
    torch.cuda.synchronize()
    errors = []

    def work() -> None:
        try:
            use_gpu(me)
            if what in ("set-up", "call"):
                works = [dist.all_reduce(z, async_op=True), dist.broadcast(z, 0, async_op=True)]
                assert works[0] is not None and works[1] is not None
                while not (works[0].is_completed() and works[1].is_completed()):
                    time.sleep(0.001)
            elif what == "staged":
                reduced = dist.reduce(z, 0, async_op=True)
                assert reduced is not None
                reduced.wait()
                while not reduced.is_completed():
                    time.sleep(0.001)
            else:
                dist.destroy_process_group()
        except Exception as error:
            errors.append(error)

    graph, thread = torch.cuda.CUDAGraph(), threading.Thread(target=work)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        x.copy_(y)
        thread.start()
        thread.join(30)
        graph.capture_end()
    assert not errors and not thread.is_alive()
    graph.replay()
    torch.cuda.synchronize()
    assert x.cpu().tolist() == [1.0] * 8


@pytest.mark.parametrize("what", ["set-up", "call", "staged", "end"])
def test_a_group_leaves_captures_of_other_threads_alone(machine: Machine, what: str) -> None:
    machine.start(beside_a_capture, 2, what, fresh=True).results(60)


def ahead(me: Rank) -> None:
    """A root's broadcasts are over while its reader's stream stands still."""
    device = ready(me)
    works = [torch.full((5000,), me.rank + 1.0 + 10 * k, device=device) for k in range(2)]
    dist.broadcast(torch.zeros(8, device=device), 0)  # the set-up waits for the GPU
    torch.cuda.synchronize()
    gate = Gate() if me.rank == 1 else None
    for x in works:
        dist.broadcast(x, 0)
    if gate is None:
        torch.cuda.synchronize()
        me.tell("sent")
    else:
        assert not torch.cuda.current_stream().query()
        me.hear()
        gate.open()
    for k, x in enumerate(works):
        assert x.cpu().tolist() == [1.0 + 10 * k] * 5000


# Where the kernels of all ranks run at once, the root's kernel waits for those of its readers.
@pytest.mark.parametrize("machine", ["one GPU"], indirect=True)
def test_a_root_does_not_wait_for_its_readers(machine: Machine) -> None:
    call = machine.start(ahead, 2)
    assert call.heard(0) == "sent"
    call.tell(1)
    call.results()


def several_streams(me: Rank) -> None:
    device = ready(me)
    streams = [torch.cuda.Stream() for _ in range(4)]
    tensors = [torch.full((2000,), me.rank + 1.0 + k, device=device) for k in range(12)]
    torch.cuda.synchronize()
    gates, works = [], []
    for k, tensor in enumerate(tensors):
        with torch.cuda.stream(streams[(k + me.rank) % 4]):
            if k < 4:
                gates.append(Gate())
            works.append(dist.all_reduce(tensor, async_op=k % 3 > 0))
    for gate in reversed(gates):  # the last stream is free first
        gate.open()
    for work in works:
        if work is not None:
            work.wait()
    torch.cuda.synchronize()
    for k, tensor in enumerate(tensors):
        assert tensor.cpu().tolist() == [all_of(me) + k * me.world_size] * 2000


def test_calls_in_several_streams_follow_each_other(machine: Machine) -> None:
    machine.run(several_streams, 2)


def staged(me: Rank) -> None:
    """A call that goes through the host's memory."""
    device = ready(me)
    x, mine = torch.zeros(500, device=device), torch.full((500,), me.rank + 1.0, device=device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gate = Gate()
        x.copy_(mine)
        torch.cuda.current_stream().query()
        gate.open()  # the host waits here for the copy
        work = dist.reduce(x, 0, async_op=True)
        work.wait()
        if me.rank == 0:
            assert x.cpu().tolist() == [all_of(me)] * 500


def test_calls_by_way_of_the_host(machine: Machine) -> None:
    machine.run(staged, 2)


def replayed(me: Rank) -> None:
    device = ready(me)
    x, y = torch.zeros(700, device=device), torch.zeros(700, device=device)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work = dist.all_reduce(y, async_op=True)
            work.wait()
        torch.cuda.current_stream().wait_stream(side)
        dist.all_reduce(y)
    for value in (1.0, 2.0):
        x.fill_(value + me.rank)
        graph.replay()
        torch.cuda.synchronize()
        total = sum(value + r for r in range(me.world_size))
        assert y.cpu().tolist() == [total * me.world_size] * 700
    dist.all_reduce(x)  # and beside the graph


def test_graphs_replay_all_reduces(machine: Machine) -> None:
    machine.run(replayed, 2)


def two_streams_of_a_capture(me: Rank) -> None:
    """Nothing but the backend orders the calls."""
    device = ready(me)
    works = [torch.empty(5000, device=device), torch.empty(3000, device=device)]
    for own_stream in (True, False):
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work = dist.all_reduce(works[0], async_op=own_stream)
            dist.all_reduce(works[1])
            if work is not None:
                work.wait()
            torch.cuda.current_stream().wait_stream(side)
        for value in range(1, 6):
            for k, x in enumerate(works):
                x.fill_(value + 10 * k + me.rank)
            graph.replay()
            torch.cuda.synchronize()
            for k, x in enumerate(works):
                total = sum(value + 10 * k + r for r in range(me.world_size))
                assert x.cpu().tolist() == [total] * len(x)


def test_calls_in_several_streams_of_a_graph_follow_each_other(machine: Machine) -> None:
    machine.run(two_streams_of_a_capture, 2)


def beside_graphs(me: Rank, ways: list[str]) -> None:
    """The second call, in a stream of its own, waits for the first, which a gate holds."""
    device = ready(me)
    works = [torch.full((3000,), me.rank + 1.0, device=device) for _ in ways]
    streams = [torch.cuda.Stream() for _ in ways]
    graphs = [torch.cuda.CUDAGraph() for _ in ways]
    torch.cuda.synchronize()
    gate: Gate | None = None
    for way, x, stream, graph in zip(ways, works, streams, graphs, strict=True):
        with torch.cuda.stream(stream):
            if way == "replayed":
                graph.capture_begin()  # does not wait for the GPU, as torch.cuda.graph does
                dist.all_reduce(x)
                graph.capture_end()
            gate = gate or Gate()
            graph.replay() if way == "replayed" else dist.all_reduce(x)
    assert gate is not None
    time.sleep(0.2)  # enough for a call that is not held back
    assert not streams[1].query()
    gate.open()
    torch.cuda.synchronize()
    for x in works:
        assert x.cpu().tolist() == [all_of(me)] * 3000


@pytest.mark.parametrize(
    "first,second", [("eager", "replayed"), ("replayed", "eager"), ("replayed",) * 2]
)
def test_calls_beside_graphs_follow_each_other(machine: Machine, first: str, second: str) -> None:
    machine.start(beside_graphs, 2, [first, second], fresh=True).results()
