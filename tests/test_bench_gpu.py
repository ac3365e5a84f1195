"""What of the benchmark is for GPUs only: placing, peers, clocks, reports; stand-ins for CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_bench_report import make_report

from ringreduce import _gpu
from ringreduce.bench import engines, placing
from ringreduce.bench.alternate import measure_row
from ringreduce.bench.cli import main
from ringreduce.bench.clocks import DeviceClock, HostClock
from ringreduce.bench.collective import Case
from ringreduce.bench.contenders import contenders_of
from ringreduce.bench.moving import Broadcast
from ringreduce.bench.placing import Placing, nccl_environment, place
from ringreduce.bench.processes import Place, _spec
from ringreduce.bench.reducing import AllReduce, Reduce
from ringreduce.bench.results import Measurement, Report
from ringreduce.bench.settings import OURS, BenchError, Settings, Unsupported
from ringreduce.bench.table import format_row, header, preamble

ON_GPU = {"device": "cuda", "world": 2, "sizes": [1024], "rounds": 3}


class TestPlacing:
    @pytest.mark.parametrize(
        ("world", "devices", "label"),
        [
            (2, 1, "ranks sharing one GPU"),
            (4, 3, "ranks sharing GPUs, up to 2 on one"),
            (4, 4, ""),
            (1, 8, ""),
        ],
    )
    def test_ranks_that_share_are_labelled(self, world, devices, label):
        where = Placing("cuda", world, devices)
        assert where.label == label
        assert [where.index_of(rank) for rank in range(3)] == [0, 1 % devices, 2 % devices]
        assert Placing("cpu", world).label == ""

    def test_without_cuda_a_sentence_says_so(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(BenchError, match="is built without CUDA"):
            place("cuda", 2)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(BenchError, match="finds no GPU"):
            place("cuda", 2)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        assert place("cuda", 8).sharing == 3

    def test_the_command_ends_with_that_sentence(self, monkeypatch, capsys):
        monkeypatch.setattr(torch.version, "cuda", None)
        assert main(["all_reduce", "--device", "cuda", "--compare", "nccl,symm_mem"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ringreduce.bench: --device cuda: this torch")

    def test_a_rank_is_told_its_device(self):
        (ours,) = contenders_of(Settings("barrier", 4, (0,)), Placing("cuda", 4, 3))
        where = Place("/nowhere", 1, 4, 1.0)
        devices = [_spec(ours, rank, where)["device"] for rank in range(4)]
        assert devices == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
        (on_cpu,) = contenders_of(Settings("barrier", 4, (0,)))
        assert _spec(on_cpu, 3, where)["device"] == "cpu"


class TestNccl:
    def environment(self, world, devices, version):
        return nccl_environment(Placing("cuda", world, devices), lambda: version)

    def test_alone_on_a_gpu_it_needs_nothing(self):
        assert self.environment(2, 2, (2, 18, 1)) == {}

    def test_to_share_a_gpu_it_must_be_new_and_told(self):
        assert self.environment(2, 1, (2, 30, 3)) == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        with pytest.raises(Unsupported, match=r"NCCL 2\.28\.9 refuses .* 2\.30\.3 and newer can"):
            self.environment(2, 1, (2, 28, 9))

    def test_beyond_two_ranks_a_gpu_each_takes_less_of_it(self):
        blocks = int(self.environment(4, 1, (2, 30, 3))["NCCL_MAX_CTAS"])
        assert 4 * blocks <= placing.CTAS

    def test_where_it_cannot_be_it_is_left_out_with_the_reason(self):
        with pytest.raises(Unsupported, match="there is no NCCL"):
            self.environment(2, 2, None)
        with pytest.raises(Unsupported, match="CUDA tensors only"):
            nccl_environment(Placing("cpu", 2), lambda: (2, 30, 3))

    def test_the_version_is_that_of_the_library_that_calls_reach(self, monkeypatch):
        numbers = {None: 23003, "libnccl.so.2": 22809}  # preloaded, and torch's

        def tell(name, pointer):
            pointer._obj.value = numbers[name]
            return 0

        def load(name, mode):
            if name not in numbers:
                return SimpleNamespace()  # the process' own symbols, NCCL's not among them
            return SimpleNamespace(ncclGetVersion=lambda pointer: tell(name, pointer))

        monkeypatch.setattr(_gpu.ctypes, "CDLL", load)
        assert _gpu.loaded_nccl() == (2, 30, 3)
        del numbers[None]
        assert _gpu.loaded_nccl() == (2, 28, 9)

    def test_a_process_without_it_says_so(self):
        if torch.version.cuda is None:
            assert _gpu.loaded_nccl() is None


class TestContenders:
    def of(self, *compare, world=2, devices=1, device="cuda", nccl=(2, 30, 3)):
        settings = Settings("all_reduce", world, (1024,), compare=compare, device=device)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nccl_environment, "__defaults__", (lambda: nccl,))
            where = Placing(device, world, devices if device == "cuda" else 1)
            return {c.key: c for c in contenders_of(settings, where)}

    def test_on_a_gpu(self):
        found = self.of("nccl", "gloo", "symm_mem", "oneshot", "mpi")
        assert list(found) == [
            "ours", "nccl", "gloo", "symm_one_shot", "symm_two_shot", "oneshot", "mpi", "roofline",
        ]  # fmt: skip
        assert {c.device for c in found.values()} == {"cuda"}
        assert found[OURS].environment == {"RINGREDUCE_CUDA_ALGORITHM": "auto"}
        assert found["oneshot"].environment == {"RINGREDUCE_CUDA_ALGORITHM": "oneshot"}
        assert found["nccl"].environment == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        allowed = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
        assert found["symm_two_shot"].environment == allowed
        assert not found["gloo"].environment
        optional = {key for key, c in found.items() if c.optional}
        assert optional == {"nccl", "gloo", "symm_one_shot", "symm_two_shot", "mpi"}
        assert {key for key, c in found.items() if c.missing} == {"mpi"}

    def test_with_a_gpu_each_nothing_is_set(self):
        found = self.of("nccl", "symm_mem", devices=2)
        assert not any(c.environment for key, c in found.items() if key != OURS)

    def test_what_needs_a_gpu_is_missing_without(self):
        found = self.of("nccl", "symm_mem", "oneshot", "ring", device="cpu")
        missing = {key for key, c in found.items() if c.missing}
        assert missing == {"nccl", "symm_one_shot", "symm_two_shot", "oneshot"}
        assert found["ring"].environment == {"RINGREDUCE_ALGORITHM": "ring"}

    def test_an_old_nccl_is_missing_where_ranks_share(self):
        assert "2.28.9 refuses" in self.of("nccl", nccl=(2, 28, 9))["nccl"].missing

    def test_algorithms_are_those_of_the_device(self, capsys):
        with pytest.raises(SystemExit):
            main(["all_reduce", "--algorithm", "oneshot"])
        assert "no algorithm for cpu tensors" in capsys.readouterr().err


class FakeCuda:
    """Notes what is asked of torch.cuda; an event's time is 1 ms for each call before it."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def synchronize(self) -> None:
        self.notes.append("synchronize")

    def call(self) -> None:
        self.notes.append("call")

    def Event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.at = self.cuda.notes.count("call")
        self.cuda.notes.append("record")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.cuda.notes[-1] == "synchronize"  # or the events would not have happened
        return float(end.at - self.at)


class TestClocks:
    def test_events_stand_around_the_calls(self):
        cuda = FakeCuda()
        times = DeviceClock(cuda).time(cuda.call, 3)
        assert cuda.notes == ["record", "call", "call", "call", "record", "synchronize"]
        assert times["seconds"] == pytest.approx(3e-3)
        assert 0 < times["issue"] <= times["wall"]

    def test_laps_are_the_calls_between_two_events(self):
        cuda = FakeCuda()
        assert DeviceClock(cuda).laps(cuda.call, 3) == [pytest.approx(1e-3)] * 3
        assert cuda.notes == ["record", *["call", "record"] * 3, "synchronize"]

    def test_the_hosts_clock_has_one_time(self):
        calls = []
        assert list(HostClock().time(lambda: calls.append(1), 5)) == ["seconds"]
        assert len(calls) == 5
        assert len(HostClock().laps(lambda: calls.append(1), 4)) == 4
        assert len(calls) == 9

    def test_a_round_is_its_slowest_rank(self):
        measurement = Measurement()
        ranks = [{"seconds": 1.0, "wall": 6.0, "issue": 0.5}, {"seconds": 2.0, "wall": 4.0,
                 "issue": 0.25}]  # fmt: skip
        measurement.add(ranks, calls=10)
        assert (measurement.seconds, measurement.wall, measurement.issue) == ([0.2], [0.6], [0.05])


class TestSymmetricMemory:
    """The engine on the CPU, with kernels that add what a second rank would."""

    def engine(self, key, monkeypatch):
        def add_other(tensor):
            return tensor + self.other.to(tensor.dtype)

        made = engines.SymmetricEngine.__new__(engines.SymmetricEngine)
        made.device, made.one_shot = "cpu", key == "symm_one_shot"
        self.met = []
        made.memory = SimpleNamespace(
            empty=torch.empty, rendezvous=lambda tensor, group: self.met.append(tensor)
        )
        made.kernels = SimpleNamespace(
            one_shot_all_reduce_out=lambda t, op, name, out: out.copy_(add_other(t)),
            two_shot_all_reduce_=lambda t, op, name: t.copy_(add_other(t)),
        )
        group = SimpleNamespace(WORLD=SimpleNamespace(group_name="0"))
        monkeypatch.setattr(engines, "dist", SimpleNamespace(group=group))
        return made

    @pytest.mark.parametrize("key", ["symm_one_shot", "symm_two_shot"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_right_results_pass_and_wrong_ones_do_not(self, key, dtype, monkeypatch):
        engine = self.engine(key, monkeypatch)
        collective = AllReduce(Case(1000, dtype, "sum", 0, 2))
        call = engine.call(collective)
        assert self.met and self.met[0] is collective.tensor
        self.other = collective._inputs(1000, 1).of(1)
        assert collective.check(call, salt=1)["wrong"] == 0
        assert collective.check(lambda: None, salt=1)["wrong"] > 900
        self.other = torch.zeros(1000)
        assert collective.check(call, salt=1)["wrong"] > 900

    @pytest.mark.parametrize(
        ("cls", "dtype", "op"),
        [(AllReduce, "float16", "sum"), (AllReduce, "float32", "max"), (Reduce, "float32", "sum"),
         (Broadcast, "float32", "sum")],
    )  # fmt: skip
    def test_what_it_has_no_kernel_for_is_refused(self, cls, dtype, op, monkeypatch):
        engine = self.engine("symm_two_shot", monkeypatch)
        with pytest.raises(Unsupported, match="symmetric memory has"):
            engine.call(cls(Case(64, dtype, op, 0, 2)))

    def test_torch_has_the_kernels_that_are_called(self):
        schemas = {
            name: str(getattr(torch.ops.symm_mem, name).default._schema)
            for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_")
        }
        start = "input, str reduce_op, str group_name"
        assert all(start in schema for schema in schemas.values())
        assert "Tensor(a!) out)" in schemas["one_shot_all_reduce_out"]


class TestFailingPeers:
    def measure(self, *, optional, at):
        settings = Settings("all_reduce", 2, (1024,), iterations=10, rounds=2)

        class Ranks:
            def __init__(self, key):
                self.contender = SimpleNamespace(key=key, kind="torch", title=key,
                                                 optional=optional and key == "nccl")  # fmt: skip
                self.asked = 0

            def ask(self, do, **arguments):
                self.asked += do == "check"
                if self.contender.key == "nccl" and (do, self.asked) == at:
                    raise BenchError("nccl: rank 1 failed:\nTraceback\nncclError: no way")
                if do == "check":
                    return [{"wrong": 0, "digest": ""}] * 2
                return [{"seconds": 1e-3, "idle": 1.0, "idle_cpu": 0.0}] * 2

        gone = {}
        sets = {key: Ranks(key) for key in (OURS, "nccl")}
        controller = SimpleNamespace(sets=sets, skip=gone.__setitem__)
        skipped: dict[str, str] = {}
        return measure_row(controller, settings, 1024, 4, skipped), skipped, gone

    @pytest.mark.parametrize("at", [("prepare", 0), ("check", 1), ("round", 1), ("check", 2)])
    def test_an_optional_one_is_left_out_wherever_it_fails(self, at):
        row, skipped, gone = self.measure(optional=True, at=at)
        assert list(row.measurements) == [OURS]
        assert len(row.measurements[OURS].seconds) == 2
        assert skipped == gone == {"nccl": "it failed: ncclError: no way"}

    def test_another_ends_the_run(self):
        with pytest.raises(BenchError, match="no way"):
            self.measure(optional=False, at=("round", 1))


def gpu_report() -> Report:
    report = make_report()
    report.settings.update(ON_GPU)
    report.machine.update(gpus=["NVIDIA X"] * 2, cuda="13.0", nccl="2.30.3",
                          sharing="ranks sharing one GPU")  # fmt: skip
    report.titles["symm_one_shot"] = "1-shot symm"
    for row in report.rows:
        ours = row.measurements[OURS]
        ours.wall, ours.issue = [8e-6] * 3, [6e-6, 7e-6, 9e-6]
    report.rows[0].measurements["symm_one_shot"] = Measurement([9e-6] * 3)
    return report


class TestReports:
    def test_what_was_timed_and_where_is_said(self):
        report = gpu_report()
        text = "\n".join(preamble(report) + header(report))
        for piece in ("NVIDIA X; CUDA 13.0, NCCL 2.30.3", "RANKS SHARING ONE GPU", "CUDA events",
                      "placing   ranks sharing one GPU", "until the last call returned",
                      "one_shot_all_reduce_out"):  # fmt: skip
            assert piece in text
        report.machine["sharing"] = ""
        assert "haring" not in "\n".join(preamble(report) + header(report))

    def test_columns(self):
        report = gpu_report()
        small, big = (format_row(report, row) for row in report.rows)
        names = header(report)[-2]
        assert len(small) == len(big) == len(names)
        by_name = dict(zip(names[2:].split("/ours")[0].split(), small.split(), strict=False))
        assert (by_name["wall"], by_name["issue"]) == ("8.00", "7.00")
        assert "1-shot symm/ours" in names and small.endswith(" 3.00x")

    def test_json_says_that_ranks_share(self, tmp_path):
        report = gpu_report()
        report.write(tmp_path / "gpu.json")
        again = Report.read(tmp_path / "gpu.json")
        assert again == report and again.on_gpu
        assert again.machine["sharing"] == "ranks sharing one GPU"

    def test_plot(self, tmp_path):
        pytest.importorskip("matplotlib")
        from ringreduce.bench.plot import write_plot

        write_plot(gpu_report(), tmp_path / "gpu.svg")
        assert "ranks sharing one GPU" in (tmp_path / "gpu.svg").read_text()

    def test_a_peer_that_fails_late_keeps_its_columns(self):
        report = gpu_report()
        report.skipped["symm_one_shot"] = "it failed"
        assert report.peers == ["gloo", "symm_one_shot"]
