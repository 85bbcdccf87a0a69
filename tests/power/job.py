"""Counts to N and writes as programs do: a line to stdout and to a log, a state file that it renames into place, new files
of which some are flushed to the disk, a file that it changes in place, folders, and files that it removes."""

import hashlib
import json
import os
import sys
import time

count = int(sys.argv[1])
chain = b""
log = open("log.txt", "a", buffering=1)
if log.tell():
    sys.exit("the log is not empty: the job was begun in a used folder")
os.mkdir("parts")
for number in range(count):
    if number:
        state = json.load(open("state.json"))
        assert state == {"number": number - 1, "chain": chain.hex()}, (number, state)
    chain = hashlib.sha256(chain + number.to_bytes(8, "little")).digest()
    line = f"{number} {chain.hex()}"
    print(line, flush=True)
    print(line, file=log)
    with open("state.json.new", "w") as file:
        json.dump({"number": number, "chain": chain.hex()}, file)
    os.rename("state.json.new", "state.json")
    with open("sums.txt", "a") as file:
        print(chain.hex()[:8], file=file)
    if number % 5 == 0:
        with open(f"parts/{number}", "x") as file:
            file.write(line * 100)
            if number % 3 == 0:
                file.flush()
                os.fsync(file.fileno())
    if number % 7 == 0:
        with open("counts.bin", "r+b" if number else "w+b") as file:
            file.seek(number * 100)
            file.write(chain)
    if number % 17 == 0:
        os.makedirs(f"folders/{number}/below")
        with open(f"folders/{number}/below/file", "x") as file:
            file.write(line)
        with open(f"lock-{number}", "x"):
            pass
        if number:
            os.unlink(f"lock-{number - 17}")
    time.sleep(0.02)
