"""The packages of `scripts/build`: complete metadata, all files, and the README's example in an empty environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename

import thunderagent
from thunderagent.compilation import DIGEST_FILE, sources_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

ROOT = Path(__file__).parents[2]
MINORS = (11, 12, 13, 14)
NIGHTLY_MINORS = (12, sys.version_info.minor)
"""One lies between others; on ours README's commands and the compiled wheel are tried, too."""
BESIDE = ("thunderagent-nova", "thunderagent-workflows")
"""The packages of `packages/` that stand on thunderagent."""
TURN = """client.chat.completions.create(
        model="simulated", messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )"""
pytestmark = pytest.mark.timeout(600)


def interpreters(minor: int) -> Iterator[str]:
    """Yield candidates for a Python of this version: in PATH, or in pyenv's folder."""
    yield from filter(None, (shutil.which(f"python3.{minor}"),))
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    yield from (str(path) for path in sorted(folder.glob(f"3.{minor}.*/bin/python")))


def python_of(minor: int) -> str:
    """Return a working interpreter of this version. Skips the test if there is none."""
    says = f"import sys; sys.exit(sys.version_info[:2] != (3, {minor}))"
    for found in interpreters(minor):
        if subprocess.run([found, "-c", says], capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip(f"there is no Python 3.{minor} here")


@pytest.fixture(scope="module", autouse=True)
def _environments_are_empty_and_soon_made() -> Iterator[None]:
    """Packages in PYTHONPATH count as installed: an empty environment would lack what is to be tried.

    Imported modules are compiled then: compiling everything takes half of an installation's time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("PIP_NO_COMPILE", "1")
        yield


@pytest.fixture(scope="module")
def built(require_real: Callable[[str], NoReturn]) -> Path:
    """Build all packages."""
    done = subprocess.run([str(ROOT / "scripts/build")], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        require_real(f"scripts/build fails: {(done.stdout + done.stderr)[-1500:]}")
    return ROOT / "out/dist"


def wheel(built: Path, name: str) -> Path:
    (found,) = [path for path in built.glob("*-none-any.whl") if parse_wheel_filename(path.name)[0] == name]
    return found


def metadata(path: Path) -> Metadata:
    """Return a wheel's metadata. Raises an error if it is invalid."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return Metadata.from_email(archive.read(name), validate=True)


@pytest.fixture(scope="module")
def compiled(built: Path) -> Path:
    """The wheel for this machine and Python: the one of `scripts/test --compiled` from these sources, or a new one."""
    digest = sources_digest(ROOT / "thunderagent")
    for path in (ROOT / "out/compiled/wheel").glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            if archive.read(f"thunderagent/{DIGEST_FILE}").decode().strip() == digest:
                return path
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(built / "compiled"), str(ROOT)]
    done = subprocess.run(command, env=os.environ | {"THUNDERAGENT_COMPILE": "1"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    (path,) = (built / "compiled").glob("*.whl")
    return path


def names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.mark.parametrize("name", ["thunderagent", "thunderagent-client", *BESIDE])
def test_the_metadata_is_whole(built: Path, name: str) -> None:
    """It has what an index shows: one version, a page, a licence, supported Pythons; there is a source archive."""
    said = metadata(wheel(built, name))
    assert str(said.version) == thunderagent.__version__
    assert said.summary
    assert said.description
    assert said.description_content_type == "text/markdown"
    assert re.findall(r"\]\((?!https?:)", said.description) == [], "an index does not have what is linked"
    assert said.license_expression == "Apache-2.0"
    assert said.license_files == ["LICENSE"]
    assert said.author
    assert said.keywords
    assert "Typing :: Typed" in (said.classifiers or [])
    assert str(said.requires_python) == ">=3.11"
    assert [path.name for path in built.glob(f"{name.replace('-', '_')}-{said.version}.tar.gz")]


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Path) -> None:
    """Modules, and the files that they read: profiles, the dashboard, the judge's prompt."""
    here = ROOT / "thunderagent"
    unshipped = {".pyc", ".md"}
    own = {str(path.relative_to(ROOT)) for path in here.rglob("*") if path.is_file() and path.suffix not in unshipped}
    assert names(wheel(built, "thunderagent")) == own - {"thunderagent/client/pyproject.toml"}


def test_the_clients_wheel_is_the_client_alone(built: Path) -> None:
    """It has no dependencies, and installs no name of the proxy's."""
    path = wheel(built, "thunderagent-client")
    modules = {f"thunderagent/client/{each.name}" for each in (ROOT / "thunderagent/client").glob("*.py")}
    assert names(path) == {*modules, "thunderagent/client/py.typed"}
    assert not metadata(path).requires_dist


@pytest.mark.parametrize("name", BESIDE)
def test_a_wheel_beside_has_every_module_and_its_types(built: Path, name: str) -> None:
    """And nothing of thunderagent's."""
    here = ROOT / "packages" / name
    modules = {str(path.relative_to(here)) for path in (here / name.replace("-", "_")).rglob("*.py")}
    assert names(wheel(built, name)) == modules | {f"{name.replace('-', '_')}/py.typed"}


def environment(folder: Path, python: str, *packages: str) -> Path:
    """Make a new environment with only these packages, and return its folder of commands."""
    without = ["--without-pip"] if python == sys.executable else []
    subprocess.run([python, "-m", "venv", *without, str(folder)], check=True)
    install_in(folder, *packages)
    return folder / "bin"


def install_in(folder: Path, *packages: str) -> None:
    """Install packages in an environment: by its own pip, or else by ours, since to make one takes seconds."""
    python = str(folder / "bin/python")
    has_pip = (folder / "bin/pip").exists()
    pip = [python, "-m", "pip"] if has_pip else [sys.executable, "-m", "pip", "--python", python]
    command = [*pip, "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]


@contextmanager
def serving(commands: Path, folder: Path) -> Iterator[str]:
    """Run `thunderagent serve` from an environment, with two simulated engines, and yield its URL."""
    command = [str(commands / "thunderagent"), "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            (url,) = re.findall(r"http://[\w.:]+\d", process.stdout.readline())
            yield url
        finally:
            process.terminate()


def run_the_readmes_example(built: Path, proxy_wheel: Path, python: str, tmp_path: Path) -> str:
    """Install the proxy, and for the agent the client from its own wheel; return the proxy's version."""
    proxy = environment(tmp_path / "proxy", python, str(proxy_wheel))
    agent = environment(tmp_path / "agent", python, str(wheel(built, "thunderagent-client")), "openai>=1.66")
    (example,) = re.findall(
        r"^```python\n(from thunderagent\.client.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    script = tmp_path / "agent.py"
    script.write_text(example.replace("...", TURN, 1))
    with serving(proxy, tmp_path) as url:
        env = {"PATH": os.environ["PATH"], "THUNDERAGENT_PROXY": url}
        done = subprocess.run([agent / "python", script], cwd=tmp_path, env=env, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        with urllib.request.urlopen(f"{url}/programs", timeout=10) as answer:
            assert json.load(answer)["total"] == 0  # the program was released
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert b'thunderagent_turns_total{outcome="finished"} 1.0' in answer.read()
        looked = [str(proxy / "thunderagent"), "doctor", "--url", url, "--json"]
        assert json.loads(subprocess.run(looked, capture_output=True, check=True, cwd=tmp_path).stdout)
    asked = [str(proxy / "thunderagent"), "--version"]
    return subprocess.run(asked, capture_output=True, check=True, cwd=tmp_path, text=True).stdout


@pytest.mark.parametrize(
    "minor", [pytest.param(each, marks=pytest.mark.nightly) if each in NIGHTLY_MINORS else each for each in MINORS]
)
def test_the_readmes_example_runs_in_an_empty_environment(built: Path, tmp_path: Path, minor: int) -> None:
    """It runs on every available Python."""
    said = run_the_readmes_example(built, wheel(built, "thunderagent"), python_of(minor), tmp_path)
    assert said == f"thunderagent {thunderagent.__version__} (interpreted)\n"


def test_the_readmes_example_runs_on_the_compiled_wheel(built: Path, compiled: Path, tmp_path: Path) -> None:
    """It is for this Python and machine alone, also has every module as source, and reports that it is compiled."""
    (tag,) = parse_wheel_filename(compiled.name)[3]
    assert tag.interpreter == f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert names(wheel(built, "thunderagent")) <= names(compiled)
    said = run_the_readmes_example(built, compiled, sys.executable, tmp_path)
    assert said == f"thunderagent {thunderagent.__version__} (compiled)\n"


class Checkout:
    """A copy of what git has, in which README's commands run by a shell without variables."""

    def __init__(self, folder: Path) -> None:
        """Copy the files."""
        self.root = folder / "checkout"
        self.commands = self.root / ".venv/bin"
        self._env = {"PATH": f"{Path(sys.executable).resolve().parent}:{os.defpath}", "HOME": str(folder)}
        named = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
        for name in filter(None, named.stdout.split("\0")):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)

    def run(self, script: str, *, status: int = 0) -> str:
        """Run a script; return what it said."""
        done = subprocess.run(
            ["bash", "-euc", script], cwd=self.root, env=self._env, capture_output=True, check=False, text=True
        )
        assert done.returncode == status, (script, (done.stdout + done.stderr)[-1500:])
        return done.stdout + done.stderr


def blocks(path: Path, language: str) -> list[str]:
    """Return the blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Install the proxy by README's commands, as they stand there."""
    checkout = Checkout(tmp_path_factory.mktemp("readme"))
    install, serve = blocks(ROOT / "README.md", "sh")[0].strip().splitlines()
    assert serve.split()[:2] == ["thunderagent", "serve"]
    checkout.run(install)
    return checkout


def test_readme_alone_leads_from_a_checkout_to_an_agent(checkout: Checkout, tmp_path: Path) -> None:
    """Its commands as they stand there: install, serve, both agents."""
    readme = ROOT / "README.md"
    (package,) = re.findall(r"With `(pip install \S+)`:", readme.read_text())
    checkout.run(f". .venv/bin/activate\n{package}")
    with serving(checkout.commands, tmp_path) as url:
        for text in blocks(readme, "python"):
            here = text.replace("http://127.0.0.1:8300", url).replace("program() as p", f"program(proxy={url!r}) as p")
            (checkout.root / "agent.py").write_text(here.replace("...", TURN, 1))
            checkout.run(". .venv/bin/activate\npython agent.py")
        with urllib.request.urlopen(f"{url}/programs", timeout=10) as answer:
            assert json.load(answer)["total"] == 0
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert b'thunderagent_turns_total{outcome="finished"} 2.0' in answer.read()


def test_the_installation_of_the_tutorial_is_readmes(checkout: Checkout) -> None:
    """Its commands, which installed a version that says what it is."""
    install = blocks(ROOT / "docs/start/simulated.md", "sh")[0].strip().replace("source ", ". ").splitlines()
    assert blocks(ROOT / "README.md", "sh")[0].splitlines()[0].partition("  #")[0].strip() == " && ".join(install)
    assert re.search(r"^thunderagent \d", checkout.run(". .venv/bin/activate\nthunderagent --version"), re.MULTILINE)


def test_a_package_that_is_installed_adds_its_command(built: Path, checkout: Checkout) -> None:
    """Without it the command says what to install."""
    workflow = ".venv/bin/thunderagent workflow stubs --help"
    assert "install the package `thunderagent-workflows`" in checkout.run(workflow, status=2)
    install_in(checkout.root / ".venv", str(wheel(built, "thunderagent-workflows")))
    assert "the declaration" in checkout.run(workflow)


@pytest.mark.nightly  # a minute of installing; .ci/run makes the same environment by the same command, from nothing
def test_readme_alone_leads_from_a_checkout_to_the_tests(checkout: Checkout) -> None:
    """Its command for the tests installs what they need, and runs them."""
    assert " passed" in checkout.run(f"{blocks(ROOT / 'README.md', 'sh')[1].strip()} tests/unit/test_bodies.py")
