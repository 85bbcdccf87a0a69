"""Quantum ESPRESSO: molecular dynamics of two silicon atoms. pw.x reads its state from files and writes it back in each
step, and closes them between. The output goes to pw.out, and the state to the folder out."""

import os
import pathlib
import re
import sys

from common import main, text

INPUT = """\
&control
 calculation='md', pseudo_dir='.', outdir='./out', prefix='si', nstep={steps}, dt=20
/
&system
 ibrav=2, celldm(1)=10.2, nat=2, ntyp=1, ecutwfc=8
/
&electrons
 conv_thr=1e-7
/
&ions
/
ATOMIC_SPECIES
Si 28.086 Si.UPF
ATOMIC_POSITIONS alat
Si 0 0 0
Si 0.26 0.25 0.24
K_POINTS automatic
2 2 2 0 0 0
"""
STEPS_PER_SECOND = 45
TIMED = re.compile(r"starts on|terminated on|cpu time|CPU .*WALL|<created |<closed |<cpu>|<wall>")


def run(_):
    potential = pathlib.Path(os.environ["TARGET_PROGRAMS"]) / "Si.UPF"
    pathlib.Path("Si.UPF").write_bytes(potential.read_bytes())
    steps = round(float(sys.argv[1]) * STEPS_PER_SECOND)
    pathlib.Path("in").write_text(INPUT.format(steps=steps), encoding="ascii")
    output = os.open("pw.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.close(output)
    os.execvp("pw.x", ["pw.x", "-in", "in"])


def check():
    for name in ("pw.out", "out/si.xml", "out/si.save/data-file-schema.xml"):
        lines = text(name).splitlines()
        yield from (line for line in lines if not TIMED.search(line))


main(run, check, 1)
