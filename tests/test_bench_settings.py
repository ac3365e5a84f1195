"""What the benchmark is told: sizes, the command line and what it refuses, who is compared."""

import pytest

from ringreduce.bench.cli import main
from ringreduce.bench.contenders import contenders_of
from ringreduce.bench.settings import (
    Settings,
    format_size,
    parse_size,
    parse_sizes,
)


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [("0", 0), ("1000", 1000), ("1K", 1024), ("64k", 65536), ("25M", 25 << 20),
         ("25MiB", 25 << 20), ("1GB", 1 << 30), (" 8 ", 8), ("12B", 12)],
    )  # fmt: skip
    def test_size(self, text, size):
        assert parse_size(text) == size

    @pytest.mark.parametrize("text", ["", "K", "-1", "1.5K", "1T", "1 2", "64KK"])
    def test_no_size(self, text):
        with pytest.raises(ValueError, match="no size"):
            parse_size(text)

    def test_list_and_ranges(self):
        assert parse_sizes("1K,3,1M") == (1024, 3, 1 << 20)
        assert parse_sizes("1K:20K:4,5") == (1024, 4096, 16384, 5)
        assert parse_sizes("1K:4K") == (1024, 2048, 4096)

    @pytest.mark.parametrize("text", ["1K:4K:1", "4K:1K", "0:4K", "1:2:3:4"])
    def test_no_range(self, text):
        with pytest.raises(ValueError, match="no range"):
            parse_sizes(text)

    def test_written_for_people(self):
        sizes = (0, 1000, 1 << 10, 25 << 20, 1 << 30, (1 << 20) + 1)
        written = ["0 B", "1000 B", "1 KiB", "25 MiB", "1 GiB", "1.0 MiB"]
        assert [format_size(size) for size in sizes] == written


class TestCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["all_reduce", "--sizes", "3"], "too few"),
            (["all_gather", "--nproc", "4", "--sizes", "12"], "too few"),
            (["all_reduce", "--op", "band"], "integer type"),
            (["all_reduce", "--compare", "smoke"], "none of"),
            (["all_reduce", "--nproc", "0"], "no number above 0"),
            (["all_reduce", "--sizes", "1K,x"], "no size"),
            (["all_reduce,all_gathr"], "'all_gathr' is neither all nor one of"),
            (["all", "--nproc", "1"], "sendrecv needs 2 ranks, and not 1"),
            (["all", "--plot", "x.png"], "one collective"),
            (["barrier", "--plot", "x.png"], "no sizes to plot"),
            (["all_reduce", "--plot", "x.jpg"], "none of: .png"),
            (["all_reduce", "--json", "no/such/x.json"], "there is no folder no/such"),
            (["all_reduce", "--plot", "no/such/x.png"], "there is no folder no/such"),
            (["all_reduce", "--json", "/"], "is a folder"),
        ],
    )
    def test_refuses(self, capsys, arguments, complaint):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        assert complaint in capsys.readouterr().err

    def test_contenders(self):
        settings = Settings("all_reduce", 2, (1024,), algorithm="ring", compare=("gloo", "direct"))
        found = {c.key: c for c in contenders_of(settings)}
        assert list(found) == ["ours", "gloo", "direct", "roofline"]
        assert found["ours"].title == "ringreduce (ring)"
        assert found["ours"].environment == {"RINGREDUCE_ALGORITHM": "ring"}
        assert found["direct"].backend == "ringreduce"
        assert found["gloo"].environment == {}
        assert "roofline" not in [c.key for c in contenders_of(Settings("barrier", 2, (0,)))]
