#!/usr/bin/env python3
"""Throughput and latency of TCP for a job of an ordinary user, on the machine's network and in its own.

    benches/user_network.py --bin PATH --criu PREFIX [--seconds N] [--peer HOST:PORT] [--record]
    benches/user_network.py --serve PORT

Runs as an ordinary user with pasta. The peer is a process on the machine outside of the job, where pasta passes data
between two sockets. --peer is another machine, which runs the second command; pasta then passes packets of the job's
network device. Throughput is that of one connection; latency is the median of round trips of one byte. --record writes
benches/results/user-network.md.
"""

import argparse
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
RESULT = HERE / "results" / "user-network.md"
BLOCK = 1 << 17
ROUNDS = 3000
WAIT_SECONDS_MAX = 30


def serve(one):
    """Serves a connection: returns each byte, or takes all there is."""
    with one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if one.recv(1) == b"t":
            buffer = bytearray(BLOCK)
            taken = 0
            while got := one.recv_into(buffer):
                taken += got
            one.sendall(b"%020d" % taken)
        else:
            while byte := one.recv(1):
                one.sendall(byte)


def server(port=0):
    listening = socket.create_server(("", port))

    def accept():
        while True:
            threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listening.getsockname()[1]


def connect(host, port):
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            one = socket.create_connection((host, port))
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # pasta accepts before the job does.
            one.sendall(b"l1")
            if one.recv(1):
                return one
        except OSError:
            pass
        if time.monotonic() > deadline:
            sys.exit(f"cannot connect to {host}:{port}")
        time.sleep(0.1)


def measure(host, port, seconds):
    with connect(host, port) as one:
        times = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            one.sendall(b"x")
            one.recv(1)
            times.append(time.perf_counter() - begun)
    block = bytes(BLOCK)
    with socket.create_connection((host, port)) as one:
        begun = time.perf_counter()
        one.sendall(b"t")
        while time.perf_counter() - begun < seconds:
            one.sendall(block)
        one.shutdown(socket.SHUT_WR)
        taken = int(one.recv(20, socket.MSG_WAITALL))
        took = time.perf_counter() - begun
    return {"gbit": taken * 8 / took / 1e9, "us": statistics.median(times) * 1e6}


def job(options):
    """The job's part: measures to itself and to its peers, then serves until its input ends."""
    port = server()
    results = {"within the job": measure("127.0.0.1", port, options.seconds)}
    for name, peer in (pair.split("=") for pair in options.peers):
        host, port_of_peer = peer.split(":")
        results[name] = measure(host, int(port_of_peer), options.seconds)
    print(json.dumps({"port": port, "results": results}), flush=True)
    sys.stdin.read()


def run(options, namespace, folder, port):
    peers = [f"job to the machine=127.0.0.1:{port}"]
    peers += [f"job to another machine={options.peer}"] if options.peer else []
    line = [options.bin, "--store", folder / namespace, "--criu", options.criu]
    line += ["--interval", "never", "--isolation", "user", "--", sys.executable, __file__]
    line += ["--job", "--seconds", str(options.seconds), *peers]
    environment = dict(os.environ, CKPT_RUN_NETWORK_NAMESPACE=namespace)
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as started:
        answer = json.loads(started.stdout.readline())
        results = answer["results"]
        results["the machine to the job"] = measure("127.0.0.1", answer["port"], options.seconds)
        started.stdin.close()
    return results


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--bin", default="ckpt-run")
    options.add_argument("--criu", default="")
    options.add_argument("--seconds", type=float, default=5)
    options.add_argument("--record", action="store_true")
    options.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--peer")
    options.add_argument("--serve", type=int)
    options.add_argument("peers", nargs="*", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.job:
        job(options)
        return
    if options.serve:
        server(options.serve)
        threading.Event().wait()
    port = server()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            namespace: run(options, namespace, pathlib.Path(folder), port)
            for namespace in ("host", "own")
        }
    rows = [
        f"| {name} | {host['gbit']:.1f} | {own['gbit']:.1f} | {host['us']:.0f} | {own['us']:.0f} |"
        for (name, host), own in zip(found["host"].items(), found["own"].values())
    ]
    text = "\n".join(
        [
            "# user-network",
            "",
            f"`benches/user_network.py --seconds {options.seconds:g}`",
            "",
            f"- date: {time.strftime('%Y-%m-%d')}",
            f"- kernel: {platform.release()}",
            f"- CPUs: {os.cpu_count()}",
            "",
            "One TCP connection of a job of an ordinary user.",
            "",
            "| | Gbit/s, machine's network | Gbit/s, own network | µs, machine's network | µs, own network |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )
    print(text)
    if options.record:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
