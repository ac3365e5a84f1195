"""A machine with GPUs for gpu_check.py, made of programs that stand in for the real ones.

    python stand_in_machine.py [options of gpu_check.py]     # in the environment of a StandIn

A folder has libcuda.so.1 and every tool that gpu_check.py looks for.  What cmake "builds" is a
program that takes ringreduce_cuda_perf's arguments and appends the lines of JSON that the real one
would.
Nothing is computed: what is tested with it is what gpu_check.py makes of a machine and of what
programs do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

LIBCUDA = r"""
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
static int setting(const char* name) {
  const char* text = getenv(name);
  return text ? atoi(text) : 0;
}
int cuDriverGetVersion(int* version) { *version = setting("STAND_IN_DRIVER"); return 0; }
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuGetErrorString(int error, const char** text) { (void)error; *text = "no error"; return 0; }
int cuDeviceGetCount(int* n) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  *n = visible && !*visible ? 0 : setting("STAND_IN_GPUS");
  return 0;
}
int cuDeviceGet(int* device, int i) { *device = i; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  (void)device; snprintf(name, size, "NVIDIA Stand-in"); return 0;
}
int cuDeviceGetUuid(unsigned char* uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  (void)device; *bytes = (size_t)80 << 30; return 0;
}
int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? 9 : which == 17 ? device < setting("STAND_IN_DISPLAYS") : 0; return 0;
}
int cuDeviceCanAccessPeer(int* can, int a, int b) {
  (void)a; (void)b; *can = setting("STAND_IN_PEERS"); return 0;
}
"""

NVIDIA_SMI = """
import os, sys
gpus, peers = int(os.environ["STAND_IN_GPUS"]), os.environ["STAND_IN_PEERS"] == "1"
asked = " ".join(sys.argv[1:])
if "driver_version" in asked:
    print("\\n".join(["580.65"] * gpus))
elif "index,uuid" in asked:
    for i in range(gpus):
        h = f"{i:02x}" * 16
        print(f"{i}, GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}")
elif "topo" in asked:
    print("\\t" + "\\t".join(f"GPU{i}" for i in range(gpus)) + "\\tCPU Affinity")
    for i in range(gpus):
        link = "NV18" if peers else "SYS"
        print("\\t".join([f"GPU{i}"] + ["X" if i == j else link for j in range(gpus)] + ["0-7"]))
elif "compute-apps" in asked:
    # Of another user: there all the time, and none of ours.
    print(4242)
    if os.path.exists(stays := os.environ["STAND_IN_BUILD"] + "/stays"):
        print(open(stays).read())
"""

# What a mode does: STAND_IN_FAILS gives wrong sums, _REFUSES is not possible, _CRASHES, _HANGS with
# a child in a session of its own, _LEAVES such a child, _STAYS on the GPU.
PERF = """
import json, os, subprocess, sys, time
mode = sys.argv[1]
def does(what):
    return mode == os.environ.get("STAND_IN_" + what)
if does("HANGS") or does("LEAVES"):
    subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True)
    time.sleep(1000 * does("HANGS"))
if does("CRASHES"):
    sys.exit("Error: it crashes")
# Some options have no value; what then follows is never asked for.
options = {key: value for key, value in zip(sys.argv[2:], sys.argv[3:]) if key.startswith("--")}
gpus = int(os.environ["STAND_IN_GPUS"])
if does("REFUSES"):
    print("skipped: no GPU (it refuses)")
    sys.exit(77)
lines = []
for ranks in map(int, options.get("--ranks", "2").split(",")):
    line = {"mode": mode, "ranks": ranks, "gpus": 1, "sharing": True, "dtype": "float32",
            "op": "SUM", "bytes": 1024, "time_us": [2.0, 1.0, 3.0], "busbw": 1.0, "wrong": 0}
    if mode == "check":
        lines.append({**line, "algorithm": "ring", "cases": 10})
    elif mode == "kill":
        for what, mapped in (("kill", False), ("kill", True), ("stop", False)):
            lines.append({**line, "mode": what, "mapped": mapped, "algorithm": "ring",
                          "raised_s": [0.5], "pids": [os.getpid()]})
        if does("STAYS"):
            with open(os.environ["STAND_IN_BUILD"] + "/stays", "w") as file:
                file.write(str(os.getpid()))
    elif mode == "bytes":
        print("==ERROR== ERR_NVGPUCTRPERM")
    else:
        own = {"gpus": min(gpus, ranks), "sharing": gpus < ranks}
        kernels = ("ring", "twoshot", "oneshot")
        if int(os.environ["STAND_IN_DISPLAYS"]):
            kernels = ("direct-staged",)
        kernels = [name for name in kernels if name != os.environ.get("STAND_IN_WITHOUT")]
        for name in ("copy", "direct", *kernels, "nccl"):
            for size in (1024, 256 << 20):
                lines.append({**line, **own, "algorithm": name, "bytes": size})
if does("FAILS"):
    lines[-1]["wrong"] = 3
with open(options["--json"], "a") as file:
    for line in lines:
        file.write(json.dumps(line) + "\\n")
"""

# As the real ones: they start the program behind their options.
UNDER_A_TOOL = """#!/bin/sh
while [ ! -x "$1" ] || [ -d "$1" ]; do shift; done
exec "$@"
"""

# A daemon that is there from -d to quit.
MPS_CONTROL = """#!/bin/sh
there=$CUDA_MPS_PIPE_DIRECTORY/there
if [ "$1" = -d ]; then : > "$there"; exit; fi
read -r question
case $question in quit*) /bin/rm "$there" ;; esac
[ -e "$there" ]
"""

CMAKE = """
import os, stat, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("-B" if "-B" in sys.argv else "--build") + 1])
for name in ("_C{suffix}", "_build_info.py"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("")
(folder / "gpu_tests").mkdir(parents=True, exist_ok=True)
perf = {perf!r}
if "--target" in sys.argv:
    for target in sys.argv[sys.argv.index("--target") + 1 :]:
        is_perf = target == "ringreduce_cuda_perf"
        program = folder / target if is_perf else folder / "gpu_tests" / target
        program.write_text(perf if is_perf else "#!/bin/sh\\nexit 0\\n")
        program.chmod(0o755)
"""


# Python with torch: what ringreduce.bench, benchmarks/ddp.py and pytest would write.
PYTHON = """
import json, sys
def after(option):
    return sys.argv[sys.argv.index(option) + 1]
def write(path, content):
    with open(path, "w") as file:
        file.write(content if isinstance(content, str) else json.dumps(content))
world = int(after("--nproc")) if "--nproc" in sys.argv else 0
if "ringreduce.bench" in sys.argv:
    found = {"seconds": [2e-6, 3e-6], "median_us": 2.5, "algbw": 1, "busbw": 1, "wrong": 0,
             "same_bits": True}
    row = {"dtype": "float32", "op": "SUM", "bytes": 1024,
           "measurements": {"ours": found, "nccl": {**found, "wrong": 1}, "roofline": {}}}
    write(after("--json"), {"collective": "all_reduce", "settings": {"world": world},
                            "machine": {"sharing": True}, "rows": [row]})
elif "--out" in sys.argv:
    way = {"step": [1e-3, 2e-3], "median_s": 1e-3, "samples_per_s": 9, "exposed_s": None,
           "wrong": 0, "same_bits": True}
    model = {"name": "gpt2", "parameters": 10, "ways": {"stock": way, "ours": way}}
    write(after("--out") + ".json", {
        "settings": {"world": world, "sharing": True, "dtype": "bfloat16"}, "models": [model],
        "titles": {"stock": "DDP, nccl", "ours": "DDP, ringreduce"}})
elif "--junitxml" in sys.argv:
    write(after("--junitxml"), '<testsuites><testsuite tests="3" failures="0" errors="0" '
          'skipped="1"/></testsuites>')
"""


@dataclass(frozen=True)
class StandIn:
    """What the machine has; `env` makes it so for gpu_check.py and all that it starts."""

    gpus: int
    peers: bool = True
    displays: int = 0  # on so many of the GPUs, which then end long kernels
    driver: int = 13000
    more: tuple[tuple[str, str], ...] = ()

    def env(self, programs: Path) -> dict[str, str]:
        """`programs` is what `make` returned."""
        return {
            "PATH": str(programs),  # none of this machine's tools
            "LD_LIBRARY_PATH": str(programs),
            "STAND_IN_GPUS": str(self.gpus),
            "STAND_IN_PEERS": str(int(self.peers)),
            "STAND_IN_DISPLAYS": str(self.displays),
            "STAND_IN_DRIVER": str(self.driver),
            **dict(self.more),
        }


def make(folder: Path) -> Path:
    """Writes the programs into `folder`; needs a C compiler."""
    folder.mkdir(parents=True)
    shebang = f"#!{sys.executable} -S\n"
    programs = {
        "nvidia-smi": shebang + NVIDIA_SMI,
        "cmake": shebang
        + CMAKE.format(perf=shebang + PERF, suffix=sysconfig.get_config_var("EXT_SUFFIX")),
        "python-with-torch": shebang + PYTHON,
        "ninja": "#!/bin/sh\n",
        "nvcc": "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n",
        "ncu": UNDER_A_TOOL,
        "compute-sanitizer": UNDER_A_TOOL,
        "nvidia-cuda-mps-control": MPS_CONTROL,
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    source = folder / "cuda.c"
    source.write_text(LIBCUDA)
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++ -x c"
    command = [
        *compiler.split(),
        "-shared",
        "-fPIC",
        "-o",
        str(folder / "libcuda.so.1"),
        str(source),
    ]
    subprocess.run(command, check=True)
    return folder


def main() -> int:
    """gpu_check.py where the stand-ins are all there is: none of this machine's tools is found."""
    import gpu_check
    import gpu_machine
    import gpu_run

    env, find = os.environ, gpu_machine.find_tool
    torch = "2.11.0" if env.get("STAND_IN_TORCH") else ""
    gpu_machine.TOOL_FOLDERS = ()
    gpu_machine.package_places = list
    gpu_machine.find_tool = lambda name: find(name) if name != env.get("STAND_IN_LACKS") else None
    gpu_machine.find_torch = lambda toolkit: (torch, "" if torch else "this Python has no torch")
    gpu_machine.find_nccl = lambda given, scratch: (None, "no NCCL")
    gpu_run.Run.build = Path(env["STAND_IN_BUILD"])
    gpu_run.Run.site = gpu_run.Run.build / "site"
    gpu_run.Run.interpreter = shutil.which("python-with-torch")
    if limit := env.get("STAND_IN_LIMIT"):  # of the stage that hangs
        known, hangs = gpu_check.limit_of, f"test_{env['STAND_IN_HANGS']}"
        gpu_check.limit_of = lambda item: float(limit) if item.name == hangs else known(item)
    return gpu_check.main()


if __name__ == "__main__":
    sys.exit(main())
