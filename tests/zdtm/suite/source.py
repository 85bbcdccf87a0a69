"""CRIU's tests: built from its source, with their descriptions."""

import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess

from harness import packages

# Libraries and programs that the tests need, by Debian's names.
PACKAGES = (
    *("gcc", "make", "libaio-dev", "libcap-dev", "libbpf-dev", "libnl-3-dev", "libnl-route-3-dev"),
    *("libselinux1-dev", "pkg-config", "iproute2", "iptables", "nftables"),
)
FOLDERS = ("static", "transition")
NO_TESTS = (".hook", ".checkskip", ".so", ".sh", ".pl")


@dataclasses.dataclass(frozen=True)
class Test:
    """A test: its program, its arguments and what zdtm is told about it."""

    name: str
    folder: pathlib.Path
    arguments: tuple
    description: dict

    @classmethod
    def of(cls, program, arguments):
        folder = program.parent
        return cls(f"{folder.name}/{program.name}", folder, tuple(arguments), description(program))

    @property
    def program(self):
        return self.folder / self.name.rpartition("/")[2]

    def words(self, key):
        return self.description.get(key, "").split()

    def has(self, flag):
        return flag in self.words("flags")

    @property
    def is_host(self):
        """Returns true if zdtm runs it without namespaces."""
        return "h" in self.description.get("flavor", "h ns uns").split()


def install():
    """Installs missing requirements of the build."""
    wanted = [name for name in PACKAGES if not is_installed(name)]
    if not wanted:
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in ("update",), ("install", "-y", "--no-install-recommends", *wanted):
        subprocess.run(packages.apt_words(*words), env=environment, check=False)


def is_installed(package):
    words = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout == "installed"


def build(source, revision, version, target):
    """Unpacks and builds the tests in a folder below `target`; returns (folder, revision)."""
    git = git_words(source) if shutil.which("git") else None
    if git:
        revision = revision or revision_of(git, version)
    name = revision or "tree"
    folder = target / name.replace("/", "-")
    built = folder / "built"
    if not built.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if git:
            with subprocess.Popen([*git, "archive", revision], stdout=subprocess.PIPE) as archive:
                subprocess.run(["tar", "-x", "-C", folder], stdin=archive.stdout, check=True)
        else:
            shutil.copytree(source, folder, dirs_exist_ok=True, symlinks=True)
        # A missing library must not affect other tests.
        for part in ("lib", *FOLDERS):
            words = ["make", "-k", f"-j{os.cpu_count()}", "-C", folder / "test/zdtm" / part]
            log = (folder / f"build-{part}.log").open("wb")
            with log:
                subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False)
        built.touch()
    if shutil.which("make"):
        for part in FOLDERS:
            lines = command_lines(folder / "test/zdtm" / part)
            (folder / f"lines-{part}.json").write_text(json.dumps(lines), encoding="utf-8")
    return folder / "test/zdtm", name


def git_words(source):
    """Returns git's options for the source, a work tree or a bare repository; nothing if it is neither."""
    for words in ["git", "-C", str(source)], ["git", f"--git-dir={source}"]:
        done = subprocess.run([*words, "rev-parse"], capture_output=True, check=False)
        if done.returncode == 0:
            return words
    return None


def revision_of(git, version):
    """Returns the tag of CRIU's version, or of the release that it corrects, or HEAD."""
    parts = version.split(".")
    for count in range(len(parts), 1, -1):
        tag = "v" + ".".join(parts[:count])
        words = [*git, "rev-parse", "--quiet", "--verify", tag]
        if subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return tag
    return "HEAD"


def tests(zdtm):
    """All tests that were built."""
    found = []
    for part in FOLDERS:
        lines = json.loads((zdtm.parents[1] / f"lines-{part}.json").read_text(encoding="utf-8"))
        programs = (path for path in programs_of(zdtm / part) if path.name in lines)
        found += [Test.of(path, lines[path.name]) for path in programs]
    return found


def programs_of(folder):
    return sorted(path for path in folder.iterdir() if is_program(path))


def is_program(path):
    return (
        path.is_file()
        and not path.is_symlink()
        and os.access(path, os.X_OK)
        and path.suffix not in NO_TESTS
    )


def command_lines(folder):
    """The arguments of each test, from the Makefile's own rules for starting it."""
    words = ["make", "-n", "-k", "--no-print-directory", "-C", str(folder)]
    words += [f"{path.name}.pid" for path in programs_of(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("./")]
    return {line[0].removeprefix("./"): line[1:] for line in lines}


def description(path):
    """Returns the file beside a test: an expression of Python, as zdtm reads it."""
    file = path.with_name(f"{path.name}.desc")
    text = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    return eval(text, {"os": os}) if text else {}


def reason_to_skip(test, criu):
    """Returns the reason why a test cannot run on this machine, or nothing."""
    if test.description.get("arch", platform.machine()) != platform.machine():
        return f"for {test.description['arch']}"
    if "--tcp-close" in [word for key in ("opts", "dopts", "ropts") for word in test.words(key)]:
        return "it wants connections to be closed, and ckpt-run restores them"
    for feature in test.words("feature"):
        if not criu.has_feature(feature):
            return f"CRIU or the kernel lacks {feature}"
    check = test.folder / f"{test.program.name}.checkskip"
    if os.access(check, os.X_OK):
        done = subprocess.run([check], cwd=test.folder, capture_output=True, check=False)
        if done.returncode:
            return "its own check says so"
    return None
