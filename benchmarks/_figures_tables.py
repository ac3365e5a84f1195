"""The rows of the tables that `make figures` writes, from what the benchmarks found in all visits.

A function for each table of _figures_plan.py.  It is given the JSON of each visit, by measurement,
and returns the cells, the titles first.  A figure is the median of the rounds of all visits, with
the lowest and the highest behind it; a ratio is that of the same round, likewise.  So both say what
another run may find.  A round of several training steps counts as one value, their median.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import frameworks
import membership
import survive

from ringreduce.tools.bench.results import Report, Row
from ringreduce.tools.bench.settings import OURS, ROOFLINE, format_size
from ringreduce.tools.bench.summary import UNITS
from ringreduce.tools.bench.table import ROOFLINE_FROM

Visits = list[Any]  # the JSON of each
Found = dict[str, Visits]
Cells = list[list[str]]
GLOO = "gloo"


# ---- figures


def told(values: Sequence[float], unit: str = "", scale: float = 1.0) -> str:
    """The median of values over `scale`, and the lowest and highest, rounded to the outside."""
    if not values:
        return "-"
    low, middle, high = (
        one / scale for one in (min(values), statistics.median(values), max(values))
    )
    digits = 0 if not middle else max(0, 2 - math.floor(math.log10(abs(middle) * 1.0005)))
    step = 10.0**digits
    low, high = math.floor(low * step + 1e-9) / step, math.ceil(high * step - 1e-9) / step
    number = f"{middle:,.{digits}f}"
    return f"{number}{unit and ' ' + unit} ({low:,.{digits}f}-{high:,.{digits}f})"


def timed(seconds: Sequence[float]) -> str:
    """The same in the largest unit that leaves a digit before the point."""
    if not seconds:
        return "-"
    middle = statistics.median(seconds)
    unit, name = next(((u, n) for u, n in reversed(UNITS) if middle >= 0.9995 * u), UNITS[0])
    return told(seconds, name, unit)


def times(values: Sequence[float]) -> str:
    """How many times as long or as fast."""
    return told(values, "x")


def over(one: Iterable[float], other: Iterable[float]) -> list[float]:
    """The ratio in each round."""
    return [a / b for a, b in zip(one, other, strict=True)]


def beside(one: Sequence[float], other: Sequence[float]) -> str:
    """The ratio in a cell; "1" where something stands beside itself."""
    return "1" if one == other else times(over(one, other))


def less(one: Iterable[float], other: Iterable[float]) -> list[float]:
    """The difference in each round."""
    return [a - b for a, b in zip(one, other, strict=True)]


# ---- python -m ringreduce.bench, benchmarks/net/compare.py


def rows_of(reports: Sequence[Report]) -> list[list[Row]]:
    """The rows of each size, one of each visit."""
    return [list(rows) for rows in zip(*(report.rows for report in reports), strict=True)]


def rounds_of(rows: Sequence[Row], key: str) -> list[float]:
    """Seconds in each round of all visits; nothing if any of them left the contender out."""
    if not all(key in row.measurements for row in rows):
        return []
    return [value for row in rows for value in row.measurements[key].seconds]


def ratio_of(rows: Sequence[Row], key: str, other: str = OURS) -> list[float]:
    ones, others = rounds_of(rows, key), rounds_of(rows, other)
    return over(ones, others) if ones and others else []


def rates_of(rows: Sequence[Row], key: str) -> list[float]:
    """GB/s."""
    return [rows[0].bytes / value / 1e9 for value in rounds_of(rows, key)]


def reports_of(visits: Visits) -> list[Report]:
    return [Report.from_json(one) for one in visits]


def all_reduce(found: Found) -> Cells:
    titles = ["size", "ringreduce, us", "Gloo, us", "Gloo / ringreduce", "GB/s", "roofline, GB/s"]
    cells = [titles]
    for rows in rows_of(reports_of(found["all_reduce"])):
        size = rows[0].bytes
        roofline = told(rates_of(rows, ROOFLINE)) if size >= ROOFLINE_FROM else "-"
        ours, gloo = (told(rounds_of(rows, key), scale=1e-6) for key in (OURS, GLOO))
        ratio = times(ratio_of(rows, GLOO))
        cells.append([format_size(size), ours, gloo, ratio, told(rates_of(rows, OURS)), roofline])
    return cells


def all_reduce_4(found: Found) -> Cells:
    cells = [["size", "ringreduce, us", "shared tensors, us", "Gloo, us", "Gloo / ringreduce"]]
    for rows in rows_of(reports_of(found["all_reduce_4"])):
        each = [told(rounds_of(rows, key), scale=1e-6) for key in (OURS, "shared", GLOO)]
        cells.append([format_size(rows[0].bytes), *each, times(ratio_of(rows, GLOO))])
    return cells


def suites_of(visits: Visits) -> list[list[Report]]:
    """The reports of each collective, one of each visit."""
    return [
        list(map(Report.from_json, those))
        for those in zip(*(v["reports"] for v in visits), strict=True)
    ]


def by_collective(visits: Visits, cell: Callable[[list[Row]], str], title: str) -> Cells:
    """A row for each collective, a column for each size."""
    suites = suites_of(visits)
    sizes = max((reports[0].settings["sizes"] for reports in suites), key=len)
    cells = [[title, *(format_size(size) for size in sizes)]]
    for reports in suites:
        by_size = dict(zip(reports[0].settings["sizes"], rows_of(reports), strict=True))
        if list(by_size) == [0]:
            line = [cell(by_size[0])] + ["-"] * (len(sizes) - 1)
            cells.append([f"{reports[0].collective} (no size)", *line])
        else:
            cells.append([reports[0].collective, *(cell(by_size[size]) for size in sizes)])
    return cells


def calls(found: Found) -> Cells:
    def cell(rows: list[Row]) -> str:
        return f"{timed(rounds_of(rows, OURS))}, {times(ratio_of(rows, GLOO))}"

    return by_collective(found["calls"], cell, "collective")


def shared(found: Found) -> Cells:
    columns = {
        "all_reduce, us": OURS, "shared, us": "shared", "operator, us": "operator",
        "Open MPI, us": "mpi",
    }  # fmt: skip
    cells = [["size", *columns, "roofline / shared"]]
    for rows in rows_of(reports_of(found["shared"])):
        each = [told(rounds_of(rows, key), scale=1e-6) for key in columns.values()]
        roofline = "-"
        if rows[0].bytes >= ROOFLINE_FROM:
            roofline = times(ratio_of(rows, ROOFLINE, "shared"))
        cells.append([format_size(rows[0].bytes), *each, roofline])
    return cells


def shared_calls(found: Found) -> Cells:
    def cell(rows: list[Row]) -> str:
        return ", ".join(told(rounds_of(rows, key), scale=1e-6) for key in (OURS, "shared"))

    return by_collective(found["shared_calls"], cell, "collective, us")


def small_call(found: Found) -> Cells:
    titles = {
        "nothing": "`dist.all_reduce` on a backend that does nothing",
        "one rank": "in a ringreduce group of one rank: the call into C++, its checks, the end of "
        "the Work",
        "all ranks": "of two ranks: the exchange as well",
        "operator": "`torch.ops.ringreduce.all_reduce_` of two ranks",
        "dispatch": "the operator on a meta tensor, where it does nothing: torch's dispatch",
    }
    visits = found["small_call"]
    cells = [["1 KiB", "us"]]
    for key, title in titles.items():
        cells.append([title, told([value for visit in visits for value in visit["us"][key]])])
    return cells


def paths_of(visits: Visits) -> dict[str, list[dict[str, Any]]]:
    """The documents of benchmarks/net/compare.py for each path, one of each visit."""
    return {name: [visit[name] for visit in visits] for name in visits[0]}


def net(found: Found) -> Cells:
    cells = [["path", "size", "ringreduce", "Mbit/s", "Gloo", "Gloo / ringreduce"]]
    for visits in (found["net"], found["net_losses"], found["net_codecs"]):
        for documents in paths_of(visits).values():
            path = documents[0]["title"]
            for rows in rows_of(reports_of(documents)):
                keys = [OURS] + ["ring"] * ("ring" in rows[0].measurements)
                for key in keys:
                    factor = 8e3 * rows[0].busbw_factor
                    rates = [factor * rate for rate in rates_of(rows, key)]
                    name = path if key == OURS else "the same, `RINGREDUCE_ALGORITHM=ring`"
                    cells.append(
                        [name, format_size(rows[0].bytes), timed(rounds_of(rows, key)),
                         told(rates) if rows[0].bytes >= 1 << 20 else "-",
                         timed(rounds_of(rows, GLOO)), times(ratio_of(rows, GLOO, key))]
                    )  # fmt: skip
    return cells


def net_codecs(found: Found) -> Cells:
    documents = [visit["net_slow_2"] for visit in found["net_codecs"]]
    [rows] = rows_of(reports_of(documents))
    cells = [["", "time", "busbw, Mbit/s", "x exact", "x Gloo", "bytes at the link", "rms error"]]
    for key, name in {
        OURS: "exact",
        "bfloat16": "bfloat16",
        "int8": "int8",
        "int4": "int4",
        GLOO: "Gloo",
    }.items():
        rates = [8e3 * rows[0].busbw_factor * rate for rate in rates_of(rows, key)]
        at_link = [
            one["measurements"][key]["link_bytes"] / one["measurements"][OURS]["link_bytes"]
            for document in documents
            for one in document["rows"]
        ]
        error = max(row.measurements[key].error.get("rms", 0.0) for row in rows)
        cells.append(
            [name, timed(rounds_of(rows, key)), told(rates),
             times(ratio_of(rows, OURS, key)) if key != OURS else "1",
             times(ratio_of(rows, GLOO, key)) if key != GLOO else "1",
             f"{statistics.median(at_link):.4f}",
             f"{100 * error:.2g} %" if key not in (OURS, GLOO) else "-"]
        )  # fmt: skip
    return cells


# ---- training steps


def ways_of(visits: Visits) -> dict[str, dict[str, list[float]]]:
    """Of benchmarks/ddp.py and net/train.py, by way: rounds of `step`, `no_sync`, in seconds."""
    found: dict[str, dict[str, list[float]]] = {}
    for visit in visits:
        steps = visit["settings"]["steps"]
        for way, measured in visit["models"][0]["ways"].items():
            rounds = found.setdefault(way, {"step": [], "no_sync": []})
            for name, values in rounds.items():
                laps = measured[name]
                for first in range(0, len(laps), steps):
                    values.append(statistics.median(laps[first : first + steps]))
    return found


def ms(seconds: Sequence[float]) -> str:
    return told(seconds, scale=1e-3)


def step(found: Found) -> Cells:
    ways = ways_of(found["step"])
    titles = {
        "stock": "DDP, gloo", "ours": "DDP, ringreduce",
        "private": "the same, `DDP_DISABLE_COMM_MEM=1`", "hook": "DDP, ringreduce hook beside gloo",
        "alone": "DDP that sends nothing",
    }  # fmt: skip
    cells = [["", "ms a step", "of it sync", "gloo / this"]]
    for key, title in titles.items():
        if key not in ways:  # in older results
            continue
        way = ways[key]
        sync = ms(less(way["step"], way["no_sync"]))
        cells.append([title, ms(way["step"]), sync, beside(ways["stock"]["step"], way["step"])])
    return [*cells, ["no sync", ms(ways["bare"]["step"]), "-", "-"]]


def net_step(found: Found) -> Cells:
    visits = found["net_step"]
    ways = ways_of(visits)
    titles = {
        "stock": "Gloo", "ours": "exact hook", "bfloat16": "bfloat16", "int8": "int8",
        "int4": "int4", "auto": f"auto (took {chosen(visits)})",
    }  # fmt: skip
    cells = [["", "step, ms", "of it sync, ms", "x Gloo", "bytes at the link"]]
    for key, title in titles.items():
        way = ways[key]
        at_link = statistics.median(
            those[key]["link_bytes"] / those["ours"]["link_bytes"]
            for those in (visit["models"][0]["ways"] for visit in visits)
        )
        cells.append(
            [title, ms(way["step"]), ms(less(way["step"], way["no_sync"])),
             beside(ways["stock"]["step"], way["step"]), f"{at_link:.4f}"]
        )  # fmt: skip
    return cells


def chosen(visits: Visits) -> str:
    """What codec="auto" took in each visit."""
    choices = [visit["models"][0]["ways"]["auto"]["choice"].split(":")[0] for visit in visits]
    return " and ".join(dict.fromkeys(choices))


def auto(found: Found) -> Cells:
    cells = [["", "exact, ms a step", "auto, ms", "auto / exact", "chosen"]]
    for key, title in {
        "shm_step": "two ranks of a host",
        "net_step": "two hosts, 1 Gbit/s",
    }.items():
        ways = ways_of(found[key])
        exact, way = ways["ours"]["step"], ways["auto"]["step"]
        cells.append([title, ms(exact), ms(way), times(over(way, exact)), chosen(found[key])])
    return cells


def horovod(found: Found) -> Cells:
    names = {
        "mlp": "wide MLP, 17.1 million parameters in 6 tensors",
        "gpt2": "small GPT, 0.8 million in 51 tensors",
    }
    cells = [["model", "ranks", "DDP, ms", "hvd, ms", "hvd / DDP", "no sync, ms"]]
    for model, name in names.items():
        for key in ("horovod", "horovod_4"):
            visits = found[key]
            ways = {
                way: [value for visit in visits for value in visit["seconds"][model][way]]
                for way in ("DDP", "hvd", "no sync")
            }
            cells.append(
                [name if key == "horovod" else "", str(visits[0]["ranks"]), ms(ways["DDP"]),
                 ms(ways["hvd"]), times(over(ways["hvd"], ways["DDP"])), ms(ways["no sync"])]
            )  # fmt: skip
    return cells


# ---- losses


def deaths(found: Found) -> Cells:
    cells = [["size", "the killed rank", "shared memory, ms", "sockets, ms"]]
    first = [one for visit in found["deaths"] for one in visit["times"]]
    for size in dict.fromkeys(one["size"] for one in first):
        for away, what in ((True, "is awaited"), (False, "takes part")):
            line = [size, what]
            for key in ("deaths", "deaths_tcp"):
                those = [one for visit in found[key] for one in visit["times"]]
                line.append(
                    ms([o["death_s"] for o in those if (o["size"], o["away"]) == (size, away)])
                )
            cells.append(line)
    return cells


def cost(found: Found) -> Cells:
    cells = [["continue / error", "shared memory", "sockets"]]
    for what in found["cost"][0]["times"]:
        line = [what]
        for key in ("cost", "cost_tcp"):
            ratios = [
                ratio
                for visit in found[key]
                for ratio in over(visit["times"][what]["continue"], visit["times"][what]["error"])
            ]
            line.append(times(ratios))
        cells.append(line)
    return cells


def commit(found: Found) -> Cells:
    visits = found["commit"]
    us = {
        key: [v for visit in visits for v in visit["us"][key]] for key in ("commit", "all_reduce")
    }
    join = timed([visit["join_s"] for visit in visits])
    return [
        ["", "time"],
        ["a commit without a change", told(us["commit"], "us")],
        ["the all_reduce in it", told(us["all_reduce"], "us")],
        [f"the commit in which a rank joins, with a state of {visits[0]['state_mib']} MiB", join],
    ]  # fmt: skip


def deaths_of_ways(found: Found) -> Cells:
    titles = {
        "gloo": "Gloo, restarted", "restarted": "ringreduce, restarted",
        "ringreduce": "ringreduce.elastic",
    }  # fmt: skip
    return by_ways(found["deaths_of_ways"], "after a rank's death", titles, survive.FIGURES)


def of_membership(found: Found) -> Cells:
    titles = {"gloo": "gloo", "ringreduce": "ringreduce"}
    return by_ways(found["membership"], "after", titles, membership.FIGURES)


def by_ways(visits: Visits, title: str, ways: dict[str, str], figures: dict[str, str]) -> Cells:
    """A row for each of the figures of benchmarks/_ways.py's runs, a column for each way."""
    cells = [[title, *ways.values()]]
    for key, name in figures.items():
        runs = {way: [run[key] for visit in visits for run in visit["runs"][way]] for way in ways}
        cells.append([name, *(told(v) if min(v) < max(v) else f"{v[0]:g}" for v in runs.values())])
    return cells


# ---- the rest


def watching(found: Found) -> Cells:
    visits = found["watching"]
    titles = {
        "nothing": "none", "metrics": "`RINGREDUCE_METRICS`", "tensorboard": "`tensorboard`",
        "straggler_detection": "`straggler_detection`", "timeline": "timeline", "all": "all",
    }  # fmt: skip
    cells = [
        [
            "tool",
            "all-reduce of 1 KiB, back to back, us",
            "ratio",
            "step of the wide MLP, ms",
            "ratio",
        ]
    ]
    for key, title in titles.items():
        line = [title]
        for what in ("call_us", "step_ms"):
            mine, none = (
                [value for visit in visits for value in visit[what][name]]
                for name in (key, "nothing")
            )
            line += [told(mine), beside(mine, none)]
        cells.append(line)
    return cells


def tensor_parallel(found: Found) -> Cells:
    cells = [["ranks", "", "gloo, tokens/s", "in sync", "ringreduce, tokens/s", "in sync", "ratio"]]
    for key, ranks in {"tensor_parallel": "2", "tensor_parallel_4": "4"}.items():
        visits = found[key]
        for what in ("decode", "prefill"):
            by_name = {
                name: [value for visit in visits for value in visit["ms"][name][what]]
                for name in visits[0]["ms"]
            }
            tokens = visits[0]["prompt"] if what == "prefill" else 1
            line = [ranks if what == "decode" else "", what]
            for name in ("gloo", "ringreduce"):
                rates = [1e3 * tokens / value for value in by_name[name]]
                shares = [100 - 100 * share for share in over(by_name["fake"], by_name[name])]
                line += [told(rates), told(shares, "%")]
            cells.append([*line, times(over(by_name["gloo"], by_name["ringreduce"]))])
    return cells


def of_frameworks(found: Found) -> Cells:
    visits = found["frameworks"]
    cells = [["setup", "ranks", "gloo", "variable", "by name"]]
    for name in visits[0]:
        runs = {
            way: [run for visit in visits for run in visit[name].get(way, [])]
            for way in frameworks.WAYS
        }
        bits = {run["weights"] for run in runs["gloo"]}
        line = [f"`{name}`", str(frameworks.FRAMEWORKS[name].ranks)]
        for way, those in runs.items():
            cell = told([run["ms"] for run in those], "ms")
            if those and way != "gloo":
                cell += (
                    ", same bits" if {run["weights"] for run in those} == bits else ", OTHER BITS"
                )
            line.append(cell)
        cells.append(line)
    return cells


ROWS: dict[str, Callable[[Found], Cells]] = {
    "all_reduce": all_reduce, "all_reduce_4": all_reduce_4, "calls": calls, "shared": shared,
    "shared_calls": shared_calls, "small_call": small_call, "step": step, "net": net,
    "net_codecs": net_codecs, "net_step": net_step, "auto": auto, "deaths": deaths, "cost": cost,
    "commit": commit, "deaths_of_ways": deaths_of_ways, "watching": watching, "horovod": horovod,
    "tensor_parallel": tensor_parallel, "frameworks": of_frameworks, "membership": of_membership,
}  # fmt: skip
