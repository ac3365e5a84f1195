"""Puts ringreduce and the extension that a build folder holds where Python finds them.

    python3 tests/cuda/gpu_site.py BUILD_FOLDER SITE_FOLDER

The result is as pip would install it, without a second compilation: the package, the extension, and
the metadata by which torch finds the backend.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from pathlib import Path

from gpu_machine import ROOT


def main(build: Path, site: Path) -> int:
    # The folder may have those of other Pythons too.
    extension = build / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not extension.is_file():
        print(f"Error: there is no {extension}, which the build makes for this Python")
        return 1
    shutil.rmtree(site, ignore_errors=True)
    package = site / "ringreduce"
    shutil.copytree(ROOT / "ringreduce", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "_ringreduce_autoload.py", site)
    for file in (extension, build / "_build_info.py"):
        shutil.copy(file, package)
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"', project, re.MULTILINE)
    points = re.findall(r'^\[project\.entry-points\."(.*)"\]\n((?:.+\n)+)', project, re.MULTILINE)
    if version is None or not points:
        print("Error: pyproject.toml has not the version and the entry points that were expected")
        return 1
    metadata = site / f"ringreduce-{version[1]}.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: ringreduce\nVersion: {version[1]}\n"
    (metadata / "METADATA").write_text(text)
    entries = [f"[{group}]\n" + names.replace('"', "") for group, names in points]
    (metadata / "entry_points.txt").write_text("\n".join(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
