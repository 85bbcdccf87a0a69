"""LAMMPS: a liquid with a trajectory and restart files. It reads its own restart file again in each stage."""

import os
import sys

from common import main, no_check

STAGES = 8
START = """\
units lj
atom_style atomic
lattice fcc 0.8442
region box block 0 6 0 6 0 6
create_box 1 box
create_atoms 1 box
mass 1 1.0
velocity all create 3.0 87287
"""
STAGE = """\
pair_style lj/cut 2.5
pair_coeff 1 1 1.0 1.0 2.5
neighbor 0.3 bin
fix 1 all nve
dump 1 all custom 40 part.{stage} id type x y z
dump_modify 1 sort id append yes flush yes
restart 20 state.a state.b
thermo 20
thermo_modify flush yes
fix pace all print 20 "step $(step) energy $(etotal:%.10f)" append energies screen no
run {steps} every 20 "shell sleep {pause:.3f}"
write_restart stage.{stage}
"""
AGAIN = """\
clear
read_restart stage.{stage}
"""
STEPS = 500


def script(seconds):
    text = START
    for stage in range(STAGES):
        if stage:
            text += AGAIN.format(stage=stage - 1)
        pause = seconds / STAGES / (STEPS / 20)
        text += STAGE.format(stage=stage, steps=STEPS, pause=pause)
    return text


def run(_):
    with open("in.liquid", "w", encoding="ascii") as file:
        file.write(script(float(sys.argv[1])))
    os.execvp("lmp", ["lmp", "-in", "in.liquid"])


main(run, no_check, 1)
