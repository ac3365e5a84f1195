"""Ranks that are forked from a notebook's kernel, as by Lightning's ddp_notebook and Accelerate's
notebook_launcher: the kernel has torch and ringreduce loaded, and goes on after them.

The notebooks are executed by nbclient, as `jupyter execute` does.  The tutorial that is a notebook
is a page of the docs too, with what it prints there.
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

HERE = Path(__file__).resolve().parents[1]
TUTORIAL = HERE.parent / "examples" / "tutorials" / "two_ranks.ipynb"

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


def execute(folder: Path, *cells: str) -> dict[str, Any]:
    """Runs the cells in one kernel; what the last one assigned to `answer`."""
    notebook = nbformat.v4.new_notebook()
    sources = [*map(textwrap.dedent, cells), "import json; print(json.dumps(answer))"]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    # Jupyter's files, such as its history, go to the folder and not to the user's.
    names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")
    variables = {name: str(folder) for name in names} | {"JUPYTER_PREFER_ENV_PATH": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with environment(variables):
        client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
        client.execute(cwd=str(HERE))
    outputs = notebook.cells[-1].outputs
    answer: dict[str, Any] = json.loads("".join(output.text for output in outputs))
    return answer


@pytest.mark.nightly
def test_ranks_forked_from_a_kernel(tmp_path: Path) -> None:
    """They train as on gloo: before, beside and after a group of the kernel's own.

    That group they cannot join or use, which is an error; they may leave it and make another.
    """
    answer = execute(
        tmp_path,
        LAUNCH,
        TRAIN,
        """
        answer = {"gloo": launch(by("gloo")), "before": launch(by("ringreduce"))}

        def told(function):
            try:
                return launch(function)
            except mp.ProcessRaisedException as error:
                return str(error)

        def use(rank):
            dist.all_reduce(torch.ones(3))

        def leave(rank):
            dist.destroy_process_group()
            return by("ringreduce")(rank)

        dist.init_process_group("ringreduce", rank=0, world_size=1, store=dist.HashStore())
        dist.all_reduce(torch.ones(3))
        """,
        """
        answer |= {"join": told(by("ringreduce")), "use": told(use), "leave": told(leave)}
        t = torch.ones(3)
        dist.all_reduce(t)
        dist.destroy_process_group()
        answer |= {"kernel": t.tolist(), "after": launch(by("ringreduce"))}
        """,
    )
    assert answer["gloo"][0] == answer["gloo"][1]
    for when in ("before", "leave", "after"):
        assert answer[when] == answer["gloo"]
    assert "default process group twice" in answer["join"]
    assert "was forked from rank 0" in answer["use"]
    assert answer["kernel"] == [1.0] * 3


def test_the_tutorial(tmp_path: Path) -> None:
    notebook = nbformat.read(TUTORIAL, as_version=4)
    answer = execute(
        tmp_path,
        *(cell.source for cell in notebook.cells if cell.cell_type == "code"),
        """
        answer = {"sums": sums, "records": records, "error": error}
        answer |= {str(codec): ranks for codec, ranks in trained.items()}
        """,
    )
    assert answer["sums"] == [[10.0, 12.0, 14.0, 16.0]] * 2
    for codec in ("None", "int8"):
        for first, last, are_same in answer[codec]:
            assert last < first / 2
            assert are_same
    assert answer["None"] != answer["int8"]
    _, last_rank, late_ms = answer["records"][2]
    assert last_rank == 1
    assert late_ms > 25
    assert "PeerLost, rank 1" in answer["error"]


def test_the_tutorial_is_stored_without_outputs() -> None:
    """They are made when it is run: by a reader, or for the docs."""
    notebook = nbformat.read(TUTORIAL, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
