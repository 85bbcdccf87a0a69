"""Writes requests, one a line, at a pace: what a client of a model does."""

import sys
import time


def main():
    count, pause_ms = map(int, sys.argv[1:3])
    for number in range(count):
        print(f"request {number * 2654435761 % 2**32}", flush=True)
        time.sleep(pause_ms / 1000)


if __name__ == "__main__":
    main()
