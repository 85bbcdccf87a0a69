"""Job at a real terminal: killed and restored there, with all its output in the right place."""

import itertools
import os
import pty
import re
import termios
import threading

from . import sessions, supervised
from .trials import Failure

ROWS, COLUMNS = 24, 100
READ_BYTES = 1 << 16
CLOSE_SECONDS_MAX = 10
# Recorded lines that are not about steps.
OTHERS_MAX = 4
# Small shell that owns the terminal: it runs the program, prints its exit code, and ends on input.
SHELL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
pid = os.fork()
if pid == 0:
    os.execv(sys.argv[1], sys.argv[1:])
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print("shell: exit code", code, flush=True)
os.read(0, 1)
sys.exit(code)
"""
PROMPT = "shell: "
# Earlier contents of a line that was drawn again.
REDRAWN = re.compile(r"[^\n]*\r\x1b\[K")
RAW_LOCAL = termios.ICANON | termios.ECHO
LOCAL_MODES = 3


class Terminal:
    """Collects everything that is shown, in `screen`."""

    def __init__(self, screen):
        self.screen = screen
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (ROWS, COLUMNS))
        screen.parent.mkdir(parents=True, exist_ok=True)
        screen.touch()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with self.screen.open("ab", buffering=0) as file:
            while True:
                try:
                    file.write(os.read(self.master, READ_BYTES))
                except OSError:
                    return  # no process has it open any more

    def modes(self):
        return termios.tcgetattr(self.master)

    def types(self, keys):
        os.write(self.master, keys)

    def is_raw(self):
        return not self.modes()[LOCAL_MODES] & RAW_LOCAL

    def close(self):
        os.close(self.slave)
        self.reader.join(CLOSE_SECONDS_MAX)

    def lines(self):
        """Returns all complete lines ever shown, without status lines, which are erased by later output."""
        text = self.screen.read_bytes().decode(errors="replace")
        text = text.replace("\r\r\n", "\n").replace("\r\n", "\n")
        return [REDRAWN.sub("", line) for line in text.split("\n")[:-1]]


class AtTerminal(supervised.Supervised):
    """ckpt-run with a terminal for all of its streams; `pid` is the shell's."""

    def __init__(self, terminal, tools, folder, words, environment, interval):
        self.terminal = terminal
        super().__init__(
            *(tools, folder, words, environment, interval, ("--tty",)),
            launcher=(tools.python, "-c", SHELL),
            terminal=terminal.slave,
        )
        # Place of its messages.
        self.stderr = terminal.screen

    def log(self):
        return supervised.Log("\n".join(self.terminal.lines()))

    def steps(self):
        """Returns the job's lines about its steps: its stderr is at the terminal, too."""
        return [line for line in self.terminal.lines() if sessions.STEP_LINE.match(line.encode())]

    def others(self):
        """Returns the job's other lines."""
        lines = itertools.takewhile(lambda line: not line.startswith(PROMPT), self.terminal.lines())
        steps = set(self.steps())
        return [line for line in lines if not line.startswith("ckpt-run:") and line not in steps]

    def lines(self):
        return len(self.steps())


def tty(trial):
    """All its processes are killed; it continues at the terminal, whose modes are restored at the end."""
    folder = trial.folder / "supervised"
    terminal = Terminal(folder / "screen")
    before = terminal.modes()
    trial.environment.setdefault("TERM", "xterm-256color")
    interval = f"{trial.job.interval}s"
    reference = trial.reference()
    run = trial.start(
        lambda words, folder, own: AtTerminal(terminal, trial.tools, folder, words, own, interval),
        "supervised",
        trial.job.ms_per_step,
    )
    trial.until(terminal.is_raw, "the terminal in raw mode", run)
    for _ in range(trial.job.crashes):
        trial.computes(run)
        trial.new_image(run)
        trial.crash(run)
        lines = run.lines()
        trial.computes(run, lines + 1)
    trial.until(lambda: shell_waits(terminal), "the end of the job", run)
    after = terminal.modes()
    terminal.types(b"\n")
    trial.finish(run, "the job")
    terminal.close()
    trial.finish(reference, "the uninterrupted run")
    run.stdout.write_text("".join(f"{line}\n" for line in run.steps()), encoding="utf-8")
    trial.outcome.notes += [f"at the terminal: {line}" for line in run.others()[:OTHERS_MAX]]
    trial.same(reference, run)
    if after != before:
        raise Failure(f"the terminal's modes are {after}, and were {before}")
    return "equal, modes as before"


def shell_waits(terminal):
    return any(line.startswith(PROMPT) for line in terminal.lines())
