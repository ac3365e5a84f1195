"""The fake itself, as torch sees it: copies, streams, events, captures, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import fake_rules
import oracle
import pytest
import torch
from gpu_jobs import Gate


def test_torch_takes_it_for_gpus() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name(0) == "Fake"
    assert torch.cuda.get_device_capability(1) == (9, 0)


@pytest.mark.parametrize("dtype", [*oracle.REDUCIBLE, "complex64"])
def test_copies_keep_the_bits(dtype: str) -> None:
    for n in (0, 1, 1000, 300_000):
        host = torch.arange(n, dtype=torch.int64).remainder(251).to(getattr(torch, dtype))
        first = host.to("cuda:0")
        second = first.to("cuda:1")
        again = torch.empty_like(second).copy_(second)
        assert again.device == torch.device("cuda:1")
        assert torch.equal(again.cpu(), host)


def test_streams_run_beside_the_host_and_in_order() -> None:
    to, value = torch.zeros(5, device="cuda"), torch.full((5,), 7.0, device="cuda")
    torch.cuda.synchronize()
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        gate = Gate()
        to.copy_(value)
        event.record()
    assert not stream.query() and not event.query()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert to.cpu().tolist() == [0] * 5  # nothing orders them
    gate.open()
    with torch.cuda.stream(other):
        other.wait_event(event)
        assert to.cpu().tolist() == [7] * 5
    assert event.query()
    stream.synchronize()


def test_a_stream_that_waits_for_an_event_takes_its_last_record_then() -> None:
    stream, other, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    other.wait_event(event)  # never recorded: nothing to wait for
    assert other.query()
    event.record(stream)
    other.wait_event(event)
    gate = Gate(stream)
    event.record(stream)
    other.synchronize()  # does not wait for later records
    assert not event.query()
    gate.open()
    event.synchronize()


def test_memory_is_given_back() -> None:
    torch.cuda.empty_cache()
    left, _ = torch.cuda.mem_get_info()
    x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] == left - x.nbytes
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == left


def test_graphs_replay_what_was_captured() -> None:
    x, y = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")
    z = torch.zeros(3, device="cuda")
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        y.copy_(x)
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            z.copy_(y)
        torch.cuda.current_stream().wait_stream(beside)
    assert y.cpu().tolist() == [0] * 3
    for value in (4.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert z.cpu().tolist() == [value] * 3


def test_a_kernel_of_torchs_is_refused_by_its_name() -> None:
    code = "import torch; torch.zeros(3, device='cuda') + 1"
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # else host_ops.py has it
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "a kernel of PyTorch's cannot run on the fake: " in done.stderr
    assert "at::native::" in done.stderr


LAST_WORDS = {  # of those that end by a signal
    "the_host_cannot_touch_gpu_memory": "fake CUDA: the host touched GPU memory",
    "a_mapping_by_ipc_ends_with_its_exporter": "touched a mapping by IPC whose exporter has ended",
}


@pytest.mark.parametrize("rule", fake_rules.RULES)
def test_it_keeps_a_rule_of_cudas(rule: str) -> None:
    run = [sys.executable, fake_rules.__file__, rule]
    env = {**os.environ, "FAKE_HIDES_MEMORY": "1"}
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=600)
    if rule in LAST_WORDS:
        assert done.returncode == -signal.SIGSEGV and done.stdout == "so far\n", done
        assert LAST_WORDS[rule] in done.stderr
    else:
        assert done.returncode == 0, done.stderr
