"""Ranks that are forked from a notebook's kernel, as by Lightning's ddp_notebook and Accelerate's
notebook_launcher: the kernel has torch and ringreduce loaded, and goes on after them.

The notebooks are executed by nbclient, as `jupyter execute` does.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from launchers import environment
from processes import free_port

nbclient = pytest.importorskip("nbclient", reason="needs `pip install nbclient ipykernel`")
nbformat = pytest.importorskip("nbformat", reason="needs `pip install nbclient ipykernel`")
pytest.importorskip("ipykernel", reason="needs `pip install nbclient ipykernel`")

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent

# launch(function) forks two ranks, with torchrun's variables, and returns what each returned; an
# error of a rank is raised in the cell.
LAUNCH = """
    import os
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    import ringreduce
    from launched import train

    def rank_main(rank, function, results):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        results.put((rank, function(rank)))

    def launch(function):
        results = mp.get_context("fork").SimpleQueue()
        mp.start_processes(rank_main, (function, results), nprocs=2, start_method="fork")
        return [value for _, value in sorted(results.get() for _ in range(2))]
"""
TRAIN = """
    def by(backend):
        def main(rank):
            ringreduce.init(backend)
            weights = train(rank)
            dist.destroy_process_group()
            return weights
        return main
"""


def execute(*cells: str) -> dict[str, Any]:
    """Runs the cells in one kernel; what the last one assigned to `answer`."""
    notebook = nbformat.v4.new_notebook()
    sources = [*map(textwrap.dedent, cells), "import json; print(json.dumps(answer))"]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with environment(master):
        client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
        client.execute(cwd=str(HERE))
    outputs = notebook.cells[-1].outputs
    answer: dict[str, Any] = json.loads("".join(output.text for output in outputs))
    return answer


def test_training_in_forked_ranks() -> None:
    """As on gloo, and again: before, between and after groups of the kernel's own."""
    answer = execute(
        LAUNCH,
        TRAIN,
        "first = launch(by('ringreduce'))",
        """
        def alone():
            dist.init_process_group("ringreduce", rank=0, world_size=1, store=dist.HashStore())
            t = torch.ones(3)
            dist.all_reduce(t)
            dist.destroy_process_group()
            return t.tolist()
        sums = alone()
        """,
        "second = launch(by('ringreduce'))",
        """
        answer = {"first": first, "second": second, "gloo": launch(by("gloo"))}
        answer["sums"] = [sums, alone()]
        """,
    )
    assert answer["gloo"][0] == answer["gloo"][1]
    assert answer["first"] == answer["second"] == answer["gloo"]
    assert answer["sums"] == [[1.0] * 3] * 2


def test_the_kernel_is_in_a_group() -> None:
    """Ranks do not join, use or leave the kernel's group: that is an error, or a group of their own."""
    answer = execute(
        LAUNCH,
        TRAIN,
        """
        def told(function):
            try:
                return launch(function)
            except mp.ProcessRaisedException as error:
                return str(error)

        def use(rank):
            dist.all_reduce(torch.ones(3))

        def leave_and_train(rank):
            dist.destroy_process_group()
            return by("ringreduce")(rank)

        dist.init_process_group("ringreduce", rank=0, world_size=1, store=dist.HashStore())
        dist.all_reduce(torch.ones(3))
        """,
        """
        answer = {
            "join": told(by("ringreduce")),
            "use": told(use),
            "leave": told(leave_and_train),
        }
        t = torch.ones(3)
        dist.all_reduce(t)
        dist.destroy_process_group()
        answer |= {"kernel": t.tolist(), "after": launch(by("ringreduce"))}
        """,
    )
    assert "default process group twice" in answer["join"]
    assert "was forked from rank 0" in answer["use"]
    assert answer["leave"] == answer["after"]
    assert answer["kernel"] == [1.0] * 3
