"""make -j2 with gcc: a generated project of 150 files, built and run, and again after headers and sources have changed.
What is built again depends on the times of files."""

import pathlib
import subprocess
import sys

from common import digest, main, no_check

FILES = 150
HEADERS = 10
MAKEFILE = """\
objects := $(patsubst %.c,%.o,$(sort $(wildcard src/*.c)))
program: libparts.a
\tcc -o $@ -Wl,--whole-archive libparts.a -Wl,--no-whole-archive
libparts.a: $(objects)
\trm -f $@
\tar rcsD $@ $(objects)
%.o: %.c
\t@sleep PAUSE
\tcc -O1 -MMD -MP -c -o $@ $<
\t@echo $< >> built
-include $(wildcard src/*.d)
"""


def header(number, value):
    pathlib.Path(f"src/h{number}.h").write_text(
        f"#pragma once\nstatic inline unsigned h{number}(unsigned x) {{ return x * 31u + {value}u; }}\n",
        encoding="ascii",
    )


def source(number, value):
    one, other = number % HEADERS, number * 7 % HEADERS
    before = f"unsigned f{number - 1}(unsigned x);\n" if number else ""
    call = f"f{number - 1}(x)" if number else "x"
    end = f'int main(void) {{ printf("%u\\n", f{number}(1)); return 0; }}\n'
    pathlib.Path(f"src/f{number}.c").write_text(
        f'#include <stdio.h>\n#include "h{one}.h"\n#include "h{other}.h"\n{before}'
        f"unsigned f{number}(unsigned x) {{ return h{one}({call}) ^ h{other}(x + {value}u); }}\n"
        + (end if number == FILES - 1 else ""),
        encoding="ascii",
    )


def run(steps):
    pathlib.Path("src").mkdir()
    # Both of make's jobs pause; a later build makes about a third of the files again.
    pause = float(sys.argv[1]) / (FILES * (1 + (steps.count - 1) / 3)) * 2
    pathlib.Path("Makefile").write_text(MAKEFILE.replace("PAUSE", f"{pause:.3f}"), encoding="ascii")
    for number in range(HEADERS):
        header(number, number)
    for number in range(FILES):
        source(number, number)
    for number in range(steps.count):
        if number:
            header(number % HEADERS, 100 + number)
            source(steps.random.randrange(FILES), 1000 + number)
        pathlib.Path("built").write_text("", encoding="ascii")
        subprocess.run(["make", "-s", "-j2", "program"], check=True)
        printed = subprocess.run(["./program"], check=True, capture_output=True).stdout
        built = sorted(pathlib.Path("built").read_text(encoding="ascii").split())
        steps.tell(number, printed, len(built), digest(built))
    pathlib.Path("built").unlink()


main(run, no_check, 4, rests=0)
