"""CUDA's rules that the fake keeps, each as a program without torch: fake_rules.py RULE.

test_fake.py runs them, each in a process of its own, since some ruin it.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

runtime = ctypes.CDLL("libcudart.so.13")
GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of a capture, and of a thread

# cudaError_t
SUCCESS, INVALID_VALUE, INVALID_CONFIGURATION, NOT_READY = 0, 1, 9, 600
ILLEGAL_ADDRESS, ALREADY_REGISTERED, TOO_LARGE_TOGETHER = 700, 712, 720
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_IMPLICIT = 900, 901, 906
CAPTURED_EVENT, WRONG_THREAD = 907, 908

Pointer = ctypes.c_void_p


def check(error: int) -> None:
    assert error == SUCCESS, f"CUDA error {error}"


def make(function: str, *args: Any) -> Pointer:
    """What a call gives by its first argument."""
    made = Pointer()
    check(getattr(runtime, function)(ctypes.byref(made), *args))
    return made


class Dim3(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_ulonglong * 8)]


class Config(ctypes.Structure):
    _fields_ = [
        ("grid", Dim3),
        ("block", Dim3),
        ("shared", ctypes.c_size_t),
        ("stream", Pointer),
        ("attributes", Pointer),
        ("count", ctypes.c_uint),
    ]


Block = ctypes.CFUNCTYPE(None, Pointer, Pointer, ctypes.c_int, ctypes.c_int)


class Kernel:
    """A kernel that runs `block(number)` of Python's."""

    def __init__(self, block: Callable[[int], object]) -> None:
        self._block = Block(lambda kernel, argument, number, count: block(number))
        self._key = ctypes.cast(self._block, Pointer)
        runtime.fakeRegisterKernel(self._key, ctypes.c_size_t(1), self._block)

    def launch(
        self, blocks: int, threads: int = 32, stream: Pointer | None = None, together: bool = False
    ) -> int:
        cooperative = Attribute(2, 0)
        cooperative.value[0] = together
        config = Config(Dim3(blocks, 1, 1), Dim3(threads, 1, 1), 0, stream)
        config.attributes = ctypes.cast(ctypes.byref(cooperative), Pointer)
        config.count = 1
        arguments = (Pointer * 1)(ctypes.cast(ctypes.create_string_buffer(8), Pointer))
        return int(runtime.cudaLaunchKernelExC(ctypes.byref(config), self._key, arguments))


class Gate:
    """Holds a stream at its present end, until it is opened."""

    def __init__(self, stream: Pointer | None) -> None:
        self._opened, self._late = threading.Event(), False
        self._function = ctypes.CFUNCTYPE(None, Pointer)(lambda _: self._wait())
        check(runtime.cudaLaunchHostFunc(stream, self._function, None))

    def _wait(self) -> None:
        self._late = not self._opened.wait(100)

    def open(self) -> None:
        assert not self._late, "the gate was shut for 100 s, and opened by itself"
        self._opened.set()


RULES: dict[str, Callable[[], None]] = {}


def rule(program: Callable[[], None]) -> Callable[[], None]:
    RULES[program.__name__] = program
    return program


def elsewhere(call: Callable[[], Any]) -> Any:
    """What it returns in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join(20)
    return results[0]


# ---- errors that ruin a GPU


@rule
def a_ruined_gpu_answers_all_threads_with_the_same_error() -> None:
    kept, stream, event = make("cudaMalloc", 100), make("cudaStreamCreate"), make("cudaEventCreate")
    waiting = Gate(stream)
    check(runtime.cudaEventRecord(event, stream))
    waits = [
        threading.Thread(target=lambda: answers.append(runtime.cudaEventSynchronize(event))),
        threading.Thread(target=lambda: answers.append(runtime.cudaStreamSynchronize(stream))),
    ]
    answers: list[int] = []
    for thread in waits:
        thread.start()
    check(runtime.fakeFault(make("cudaStreamCreate"), ILLEGAL_ADDRESS))
    for thread in waits:
        thread.join(20)
    assert answers == [ILLEGAL_ADDRESS] * 2
    other = Pointer()
    calls: list[Callable[[], int]] = [
        lambda: runtime.cudaMalloc(ctypes.byref(other), 100),
        lambda: runtime.cudaFree(kept),
        lambda: runtime.cudaEventQuery(event),
        lambda: runtime.cudaEventRecord(event, stream),
        lambda: runtime.cudaEventDestroy(event),
        lambda: runtime.cudaStreamQuery(None),
        lambda: runtime.cudaDeviceSynchronize(),
        lambda: runtime.cudaMemsetAsync(kept, 0, 100, None),
        lambda: runtime.cudaGetLastError(),
        lambda: runtime.cudaGetLastError(),  # nobody clears it
    ]
    for k, call in enumerate(calls):
        assert elsewhere(call) == ILLEGAL_ADDRESS, k
    waiting.open()
    check(runtime.cudaGetDeviceCount(ctypes.byref(ctypes.c_int())))
    check(runtime.cudaSetDevice(1))  # the other GPU works
    check(runtime.cudaFree(make("cudaMalloc", 100)))


# ---- captures


def unsafe_calls() -> dict[str, Callable[[], int]]:
    event, nothing, graph = make("cudaEventCreate"), Pointer(8), Pointer()
    check(runtime.cudaStreamEndCapture(Capture(RELAXED).stream, ctypes.byref(graph)))
    calls: dict[str, tuple[Any, ...]] = {
        "cudaMalloc": (ctypes.byref(Pointer()), 100),
        "cudaHostAlloc": (ctypes.byref(Pointer()), 100, 0),
        "cudaFree": (nothing,),
        "cudaFreeHost": (nothing,),
        "cudaHostRegister": (nothing, 8, 0),
        "cudaHostUnregister": (nothing,),
        "cudaIpcCloseMemHandle": (nothing,),
        "cudaDeviceEnablePeerAccess": (1, 0),
        "cudaMemcpy": (nothing, nothing, 0, 4),
        "cudaStreamSynchronize": (None,),
        "cudaStreamQuery": (None,),
        "cudaEventQuery": (event,),
        "cudaEventSynchronize": (event,),
        "cudaGraphInstantiateWithFlags": (ctypes.byref(Pointer()), graph, ctypes.c_ulonglong(0)),
    }
    return {name: partial(getattr(runtime, name), *args) for name, args in calls.items()}


# At these the fake stops a program that gives back what it does not have.
STOPPED = "cudaHostUnregister", "cudaIpcCloseMemHandle", "cudaFreeHost"


class Capture:
    """Of a stream of its own."""

    def __init__(self, mode: int, flags: int = 1) -> None:
        self.stream = make("cudaStreamCreateWithFlags", flags)
        check(runtime.cudaStreamBeginCapture(self.stream, mode))

    def end(self) -> int:
        return int(runtime.cudaStreamEndCapture(self.stream, ctypes.byref(Pointer())))


def in_mode(mode: int, call: Callable[[], int]) -> int:
    held = ctypes.c_int(mode)
    check(runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(held)))
    answer = call()
    check(runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(held)))
    return answer


@rule
def unsafe_calls_end_captures_of_their_own_and_of_other_threads() -> None:
    for name, call in unsafe_calls().items():
        for mode in GLOBAL, THREAD_LOCAL, RELAXED:
            for own in True, False:
                refused = mode == GLOBAL or (own and mode == THREAD_LOCAL)
                if name in STOPPED and not refused:
                    continue
                capture = Capture(mode)
                answer = call() if own else elsewhere(call)
                assert (answer == CAPTURE_UNSUPPORTED) == refused, (name, mode, own)
                assert capture.end() == (CAPTURE_INVALIDATED if refused else SUCCESS), name


@rule
def threads_that_say_so_may_make_unsafe_calls() -> None:
    def allocate() -> int:
        return int(runtime.cudaMalloc(ctypes.byref(Pointer()), 100))

    capture = Capture(GLOBAL)
    assert elsewhere(lambda: in_mode(THREAD_LOCAL, allocate)) == SUCCESS
    assert elsewhere(lambda: in_mode(RELAXED, allocate)) == SUCCESS
    assert in_mode(RELAXED, allocate) == SUCCESS
    assert capture.end() == SUCCESS
    capture = Capture(GLOBAL)
    assert in_mode(THREAD_LOCAL, allocate) == CAPTURE_UNSUPPORTED
    assert capture.end() == CAPTURE_INVALIDATED


@rule
def nobody_asks_what_is_captured() -> None:
    def captured(call: Callable[[Capture], int], error: int, flags: int = 1) -> None:
        capture = Capture(RELAXED, flags)
        assert call(capture) == error
        event = make("cudaEventCreate")
        assert runtime.cudaEventRecord(event, capture.stream) == CAPTURE_INVALIDATED
        assert capture.end() == CAPTURE_INVALIDATED

    def ask_an_event(capture: Capture) -> int:
        event = make("cudaEventCreate")
        check(runtime.cudaEventRecord(event, capture.stream))
        return int(runtime.cudaEventQuery(event))

    captured(lambda c: runtime.cudaStreamQuery(c.stream), CAPTURE_UNSUPPORTED)
    captured(lambda c: runtime.cudaStreamSynchronize(c.stream), CAPTURE_UNSUPPORTED)
    captured(lambda c: runtime.cudaDeviceSynchronize(), CAPTURE_UNSUPPORTED)
    captured(ask_an_event, CAPTURED_EVENT)
    # The default stream would follow a stream that is not cudaStreamNonBlocking.
    memory = make("cudaMalloc", 8)
    captured(lambda c: runtime.cudaMemsetAsync(memory, 0, 8, None), CAPTURE_IMPLICIT, 0)


@rule
def a_capture_ends_in_its_thread() -> None:
    capture = Capture(GLOBAL)
    assert elsewhere(capture.end) == WRONG_THREAD
    assert capture.end() == SUCCESS


# ---- memory


@rule
def host_memory_is_registered_once() -> None:
    memory = mmap.mmap(-1, 4 << 12)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def register(offset: int, size: int) -> int:
        return int(runtime.cudaHostRegister(Pointer(base + offset), ctypes.c_size_t(size), 0))

    check(register(4096, 8192))
    for offset, size in (4096, 8192), (8192, 1), (0, 4097), (4 + 4096, 8):
        assert register(offset, size) == ALREADY_REGISTERED
    check(register(0, 100))
    assert register(200, 100) == ALREADY_REGISTERED  # in the same page
    check(register(12288, 4096))
    check(runtime.cudaHostUnregister(Pointer(base + 4096)))
    check(register(4096, 4096))
    assert register(0, 0) == INVALID_VALUE
    assert runtime.cudaHostRegister(Pointer(1 << 20), 100, 0) == INVALID_VALUE  # nothing is there


@rule
def the_host_cannot_touch_gpu_memory() -> None:
    """Expected to end by a signal, but only at the end."""
    memory, host = make("cudaMalloc", 100), ctypes.create_string_buffer(b"here", 100)
    check(runtime.cudaMemcpy(memory, host, ctypes.c_size_t(100), 4))
    host.value = b""
    check(runtime.cudaMemcpy(host, memory, ctypes.c_size_t(100), 4))
    assert host.value == b"here"
    read: list[bytes] = []
    check(Kernel(lambda _: read.append(ctypes.string_at(memory, 4))).launch(1))
    check(runtime.cudaDeviceSynchronize())
    assert read == [b"here"]
    time.sleep(0.05)
    check(runtime.cudaMemset(memory, 0, ctypes.c_size_t(100)))
    check(runtime.cudaDeviceSynchronize())
    time.sleep(0.01)
    print("so far", flush=True)
    ctypes.string_at(memory, 4)


class Exporter:
    """A process that has memory, which starts with b"here", and what this one has opened of it."""

    def __init__(self) -> None:
        run = [sys.executable, __file__, export.__name__]
        self.process = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        handle = IpcHandle.from_buffer_copy(self.process.stdout.read(ctypes.sizeof(IpcHandle)))
        self.memory = make("cudaIpcOpenMemHandle", handle, 1)

    def read(self) -> bytes:
        host = ctypes.create_string_buffer(4)
        check(runtime.cudaMemcpy(host, self.memory, ctypes.c_size_t(4), 4))
        return host.raw

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        time.sleep(0.2)


def unmappers() -> str:
    """The names of the threads that have unmapped or closed memory since the call before."""
    runtime.fakeUnmappers.restype = ctypes.c_char_p
    return str(runtime.fakeUnmappers(), "utf-8")


class IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def export() -> None:
    memory, handle = make("cudaMalloc", 100), IpcHandle()
    check(runtime.cudaMemcpy(memory, b"here", ctypes.c_size_t(4), 4))
    check(runtime.cudaIpcGetMemHandle(ctypes.byref(handle), memory))
    sys.stdout.buffer.write(bytes(handle))
    sys.stdout.buffer.flush()
    sys.stdin.read()


@rule
def a_mapping_by_ipc_ends_with_its_exporter() -> None:
    """Expected to end by a signal, but only at the end."""
    exporter, other = Exporter(), Exporter()
    assert exporter.read() == other.read() == b"here"
    other.end()
    assert exporter.read() == b"here"
    check(runtime.cudaIpcCloseMemHandle(other.memory))
    exporter.end()
    print("so far", flush=True)
    exporter.read()


def mapped() -> Pointer:
    """A granule of virtual memory."""
    bytes_in_granule = ctypes.c_size_t(2 << 20)
    here = struct.pack("iiii16x", 1, 1, 1, 0)  # CUmemAllocationProp, GPU 0
    access = struct.pack("iii", 1, 0, 3)  # CUmemAccessDesc
    handle, place = ctypes.c_ulonglong(), Pointer()
    zero = ctypes.c_ulonglong(0)
    check(driver("cuMemCreate")(ctypes.byref(handle), bytes_in_granule, here, zero))
    reserve = driver("cuMemAddressReserve")
    check(reserve(ctypes.byref(place), bytes_in_granule, ctypes.c_size_t(0), zero, zero))
    check(driver("cuMemMap")(place, bytes_in_granule, ctypes.c_size_t(0), handle, zero))
    check(driver("cuMemRelease")(handle))
    check(driver("cuMemSetAccess")(place, bytes_in_granule, access, ctypes.c_size_t(1)))
    return place


def driver(name: str) -> Callable[..., int]:
    found, answer = Pointer(), ctypes.c_int()
    zero = ctypes.c_ulonglong(0)
    find = runtime.cudaGetDriverEntryPointByVersion
    check(find(name.encode(), ctypes.byref(found), 12000, zero, ctypes.byref(answer)))
    assert found.value
    return ctypes.CFUNCTYPE(ctypes.c_int)(found.value)


@rule
def what_gives_memory_back_waits_for_the_gpu() -> None:
    size = ctypes.c_size_t(2 << 20)
    exporter, plain, granule = Exporter(), make("cudaMalloc", 100), mapped()
    assert unmappers() == ""
    calls: list[Callable[[], int]] = [
        lambda: runtime.cudaFree(plain),
        lambda: runtime.cudaIpcCloseMemHandle(exporter.memory),
        lambda: driver("cuMemUnmap")(granule, size),
    ]
    for call in calls:
        gate = Gate(make("cudaStreamCreateWithFlags", 1))
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(call()))  # noqa: B023
        thread.start()
        thread.join(0.1)
        assert not answers
        gate.open()
        thread.join(20)
        assert answers == [SUCCESS]
    exporter.end()
    assert unmappers().startswith("python") and unmappers() == ""


# ---- launches and streams


@rule
def blocks_wait_for_a_multiprocessor() -> None:
    running, gate = [0], threading.Event()
    lock = threading.Lock()

    def block(_: int) -> None:
        with lock:
            running[0] += 1
        gate.wait(30)

    other: list[int] = []
    kernel = Kernel(block)
    for _ in range(3):  # of 2 blocks each, on 4 multiprocessors
        check(kernel.launch(2, stream=make("cudaStreamCreateWithFlags", 1)))
    deadline = time.monotonic() + 20
    while running[0] < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    last = make("cudaStreamCreateWithFlags", 1)
    check(Kernel(other.append).launch(1, stream=last))
    time.sleep(0.2)
    assert running[0] == 4
    assert runtime.cudaStreamQuery(last) == NOT_READY and not other
    gate.set()
    check(runtime.cudaDeviceSynchronize())
    assert running[0] == 6 and other == [0]


@rule
def launches_have_limits() -> None:
    kernel = Kernel(lambda _: None)
    check(kernel.launch(100, 1024))
    assert kernel.launch(1, 1025) == kernel.launch(0, 1) == INVALID_CONFIGURATION
    check(kernel.launch(4, together=True))
    assert kernel.launch(5, together=True) == TOO_LARGE_TOGETHER
    check(runtime.cudaDeviceSynchronize())


@rule
def the_default_stream_and_blocking_ones_follow_each_other() -> None:
    memory = make("cudaMalloc", 8)
    blocking, other = make("cudaStreamCreate"), make("cudaStreamCreateWithFlags", 1)

    def runs(stream: Pointer | None, wait: float = 20) -> bool:
        check(runtime.cudaMemsetAsync(memory, 0, ctypes.c_size_t(8), stream))
        end = time.monotonic() + wait
        while (answer := runtime.cudaStreamQuery(stream)) == NOT_READY and time.monotonic() < end:
            time.sleep(0.01)
        return bool(answer == SUCCESS)

    for first, then in (blocking, None), (None, blocking):
        gate = Gate(first)
        assert runs(other) and not runs(then, 0.1)
        gate.open()
        assert runs(then)
    gate = Gate(other)
    assert runs(None) and runs(blocking)
    gate.open()
    check(runtime.cudaDeviceSynchronize())


if __name__ == "__main__":
    {**RULES, export.__name__: export}[sys.argv[1]]()
