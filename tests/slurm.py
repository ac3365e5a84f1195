"""Slurm for tests: munged, slurmctld and a slurmd on each of several nodes, on this machine.

    with Slurm(nodes=2) as slurm:
        done = slurm.run("srun", "-N2", "-n4", "hostname")

A node is an emulated host (tests/hosts.py) with a hostname, processes and an /etc/hosts of its own;
they share the file system, as nodes of clusters do.  Host 0 is the login node, with slurmctld.  It
needs root and Debian's packages: `why_not()` says what is missing.  All is in a temporary folder,
and all processes of a node end with its first one.  This module knows nothing of ringreduce.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hosts

LOGIN = "login"
CPUS = 16  # of a node; more than there are, so that its number of tasks is the test's choice
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "unshare": "util-linux",
}

UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

# The first process of a node's PID namespace waits for its daemon, and for orphans.
NODE = """
mount --bind "$1" /etc/hosts && hostname "$2" || exit 70
shift 2
"$@" &
wait $!
"""


class SlurmError(Exception):
    """A daemon ended or did not come up; has the end of its log."""


@functools.cache
def why_not() -> str:
    """Why there can be no Slurm here, or "" if there can."""
    if os.geteuid() != 0:
        return "needs root, for Slurm's daemons"
    missing = [package for name, package in PROGRAMS.items() if not find(name)]
    if missing:
        return f"needs Slurm and munge (Debian: apt-get install {' '.join(missing)})"
    return hosts.why_not(veth=True)


def find(program: str) -> str:
    """A program's path, also of those that only root's PATH has; "" without it."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or ""


class Slurm(contextlib.AbstractContextManager["Slurm"]):
    """A cluster of nodes n1, n2, ...  A context manager."""

    def __init__(self, nodes: int = 2) -> None:
        if reason := why_not():
            raise SlurmError(reason)
        self.names = [f"n{number + 1}" for number in range(nodes)]
        self._started: list[subprocess.Popen[bytes]] = []
        self._hosts = hosts.Hosts(nodes + 1, veth=True, rate_mbit=1000)
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)  # munge's socket must be in reach of its users
        try:
            self._configure()
            self._start_daemons()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemons, the jobs and the nodes."""
        for process in reversed(self._started):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # takes the node's processes along
            process.wait()
        self._hosts.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self, name: str) -> str:
        """What a daemon has written: "slurmctld", "munged", or a node's name."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 400.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the login node to its end; after the timeout, cancel all jobs."""
        # If this runs in a job of another Slurm, its variables are none of ours.
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        words = self._on(0, LOGIN, find(command[0]) or command[0], *command[1:])
        with self._hosts[0].inside():
            process = subprocess.Popen(
                words,
                env={**own, **(env or {}), "SLURM_CONF": str(self._conf)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
            )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if command[0] != "scancel":
                self.run("scancel", "--user=root", "--signal=KILL", timeout=20.0)
            raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def batch(
        self, *arguments: str, env: Mapping[str, str], cwd: Path, timeout: float = 400.0
    ) -> subprocess.CompletedProcess[str]:
        """Submit a batch script in `cwd` and wait for its end; stdout is the job's output.

        `sbatch --wait` would look only every 10 seconds.
        """
        output = str(cwd / "job.out")
        options = ["--parsable", f"--output={output}"]
        submitted = self.run("sbatch", *options, *arguments, env=env, cwd=cwd)
        job = submitted.stdout.strip()
        if submitted.returncode != 0:
            return submitted
        until = time.monotonic() + timeout
        written = Path(output)  # not there before the job begins
        while (shown := self._job(job)) and any(f"JobState={s}" in shown for s in UNFINISHED):
            if time.monotonic() > until:
                self.run("scancel", "--full", "--signal=KILL", job)
                self.run("scancel", job)
                said = written.read_text() if written.exists() else "it has not begun"
                raise SlurmError(f"job {job} has not ended:\n{shown}\n{said}")
            time.sleep(0.3)
        code = int(shown.partition(" ExitCode=")[2].partition(":")[0])
        completed = "JobState=COMPLETED" in shown
        return subprocess.CompletedProcess(
            submitted.args,
            code if completed else code or 1,
            written.read_text() if written.exists() else "",
            "" if completed else shown,
        )

    def _job(self, job: str) -> str:
        """What the controller knows of a job."""
        done = self.run("scontrol", "show", "job", job)
        if done.returncode != 0:
            raise SlurmError(f"scontrol show job {job}: {done.stderr}{self.log('slurmctld')}")
        return done.stdout

    def _on(self, number: int, name: str, *command: str) -> list[str]:
        """The command on a node: `inside()` its network, this adds the rest of a host."""
        own = ["--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        names = str(self.folder / f"{name}.hosts")
        return [find("unshare"), *own, "sh", "-c", NODE, "sh", names, name, *command]

    def _configure(self) -> None:
        places = dict(zip([LOGIN, *self.names], self._hosts.all, strict=True))
        for name in places:
            # As Debian's installer has it: a host's own name is a loopback address.
            lines = ["127.0.0.1 localhost"]
            lines += [
                f"{'127.0.1.1' if name == other else host.address} {other}"
                for other, host in places.items()
            ]
            (self.folder / f"{name}.hosts").write_text("\n".join(lines) + "\n")
        at = self.folder
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": LOGIN,
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={at}/munge.socket",
            "CredType": "cred/munge",
            "StateSaveLocation": f"{at}/state",
            "SlurmdSpoolDir": f"{at}/%n.spool",
            "SlurmctldPidFile": f"{at}/slurmctld.pid",
            "SlurmdPidFile": f"{at}/%n.pid",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": "2",
            "KillWait": "2",
            "SchedulerParameters": "batch_sched_delay=0",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines.append(f"NodeName={','.join(self.names)} CPUs={CPUS} State=UNKNOWN")
        lines.append("PartitionName=all Nodes=ALL Default=YES State=UP")
        self._conf = at / "slurm.conf"
        self._conf.write_text("\n".join(lines) + "\n")
        (at / "cgroup.conf").write_text("")
        (at / "state").mkdir()
        key = at / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))

    def _start_daemons(self) -> None:
        at = self.folder
        munged = [find("munged"), "--foreground", "--force", f"--key-file={at}/munge.key"]
        munged += [f"--socket={at}/munge.socket", f"--pid-file={at}/munged.pid"]
        munged += [f"--seed-file={at}/munge.seed", f"--log-file={at}/munged.daemon.log"]
        self._start("munged", munged)
        self._await("munged", lambda: (at / "munge.socket").exists())
        conf = ["-D", "-f", str(self._conf)]
        with self._hosts[0].inside():
            self._start("slurmctld", self._on(0, LOGIN, find("slurmctld"), *conf))
        for number, name in enumerate(self.names, 1):
            with self._hosts[number].inside():
                (at / f"{name}.spool").mkdir()
                self._start(name, self._on(number, name, find("slurmd"), *conf))
        self._await("slurmctld", self._all_idle)

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
        return states == ["idle"] * len(self.names)

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._started.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _await(self, name: str, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        until = time.monotonic() + timeout
        while not condition():
            ended = [p.args for p in self._started if p.poll() is not None]
            if ended or time.monotonic() > until:
                logs = "\n".join(
                    f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}"
                    for path in sorted(self.folder.glob("*.log"))
                )
                raise SlurmError(f"{name} is not ready after {timeout:g} s, or ended:\n{logs}")
            time.sleep(0.05)
