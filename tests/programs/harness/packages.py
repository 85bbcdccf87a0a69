"""Requirements of the programs: a virtual environment in target/programs, and packages of the system."""

import os
import pathlib
import shutil
import subprocess
import sys

# A file of abinit-data: the one package that has a pseudopotential that pw.x reads.
PSEUDOPOTENTIAL = ("abinit-data", "./usr/share/abinit/psp/14-Si.nlcc.UPF", "Si.UPF")
PIP_SECONDS_MAX = 600
APT = pathlib.Path(__file__).resolve().parents[3] / "scripts/apt.sh"


def apt_words(*words):
    """apt-get, which waits for another one that is at work."""
    return ["bash", "-c", 'source "$1"; shift; apt_get "$@"', "bash", APT, *words]


class Installer:
    def __init__(self, folder, installs):
        self.folder, self.installs = folder, installs
        self.venv = folder / "venv"
        # Package → why it could not be installed.
        self.failed = {}

    def prepare(self, programs):
        """Installs what the programs need; returns the interpreter."""
        wanted = sorted({name for program in programs for name in program.pip})
        if wanted:
            self._pip(wanted)
        system = {program.apt: program for program in programs if program.apt}
        self._apt([program for program in system.values() if self._no_command(program)])
        if any(program.name == "espresso" for program in programs):
            self._pseudopotential()
        python = self.venv / "bin/python"
        return str(python) if wanted and python.exists() else sys.executable

    def missing(self, program):
        """Returns a missing requirement of the program, or nothing."""
        for name in program.pip:
            if not self._has(name):
                return f"pip package {name}: {self.failed.get(name, 'not installed')}"
        for name in program.apt:
            if name in self.failed:
                return f"apt package {name}: {self.failed[name]}"
        if command := self._no_command(program):
            return f"no command {command}"
        if program.name == "espresso" and not (self.folder / PSEUDOPOTENTIAL[2]).exists():
            return "no pseudopotential: package abinit-data could not be fetched"
        return None

    def _no_command(self, program):
        return next((name for name in program.commands if not shutil.which(name)), None)

    def _has(self, name):
        pip = self.venv / "bin/pip"
        words = [pip, "show", "-q", name]
        return (
            pip.exists() and subprocess.run(words, capture_output=True, check=False).returncode == 0
        )

    def _pip(self, names):
        missing = [name for name in names if not self._has(name)]
        if not missing or not self.installs:
            return
        if not self.venv.exists():
            subprocess.run([sys.executable, "-m", "venv", self.venv], check=True)
        # One by one, so that a package that is unavailable does not affect others.
        for name in missing:
            words = [self.venv / "bin/pip", "install", "-q", name]
            self._try(name, words, PIP_SECONDS_MAX)

    def _apt(self, programs):
        if not programs or not self.installs:
            return
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(apt_words("update"), env=environment, check=False)
        for name in [name for program in programs for name in program.apt]:
            words = apt_words("install", "-y", "--no-install-recommends", name)
            self._try(name, words, PIP_SECONDS_MAX, environment)

    def _try(self, name, words, seconds_max, environment=None):
        try:
            done = subprocess.run(
                words,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds_max,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.failed[name] = str(error)
            return
        if done.returncode:
            self.failed[name] = (done.stderr.strip().splitlines() or ["failed"])[-1]

    def _pseudopotential(self):
        package, member, name = PSEUDOPOTENTIAL
        target = self.folder / name
        if target.exists() or not self.installs:
            return
        fetched = self.folder / "fetched"
        fetched.mkdir(exist_ok=True)
        # apt fetches as a separate user.
        fetched.chmod(0o777)
        self._fetch(package, fetched)
        for archive in fetched.glob(f"{package}_*.deb"):
            files = subprocess.run(
                ["dpkg-deb", "--fsys-tarfile", archive], capture_output=True, check=False
            ).stdout
            found = subprocess.run(
                ["tar", "-xO", member], input=files, capture_output=True, check=False
            )
            if found.returncode == 0:
                target.write_bytes(found.stdout)
        shutil.rmtree(fetched)

    def _fetch(self, package, folder):
        subprocess.run(
            ["apt-get", "download", "-qq", package], cwd=folder, capture_output=True, check=False
        )
