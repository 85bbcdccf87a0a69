#!/usr/bin/env python3
"""Upload of an image, and its restore on a machine with an empty store, against a plain client of the same server.

    benches/remote.py [--gib N] [--rounds N] [--bin PROGRAM] --server "COMMAND" [--record]

COMMAND starts an S3 server on 127.0.0.1:PORT with the credentials x and y, and stores its objects in FOLDER; {port} and
{folder} stand for them. The plain client (boto3) uploads the bytes that ckpt-run has uploaded, in objects of 32 MiB, four at
a time, and downloads them in the same way. First part: from the start of the command until a thread of the download has the
first part of the image and has checked it. Medians of all rounds. Needs root, boto3, and memory for twice the image.
"""

import argparse
import concurrent.futures
import os
import pathlib
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import boto3
import botocore.config

ROOT = pathlib.Path(__file__).resolve().parent.parent
PORT = 5075
PACK = 32 << 20
KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"}
# Half of the memory is random, the rest like weights: four bytes with a common exponent.
JOB = """
import os, sys, time
memory = [bytearray(os.urandom(1 << 20)) for _ in range(int(sys.argv[1]) << 10)]
for block in memory[::2]:
    block[3::4] = bytes([60]) * (1 << 18)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
    print("step", flush=True)
"""


def wait_until(what, check, limit=600):
    end = time.monotonic() + limit
    while not check():
        if time.monotonic() > end:
            sys.exit(f"no {what} within {limit} s")
        time.sleep(0.005)


class Place:
    """Working folder that is made empty for the second machine."""

    def __init__(self, options, number):
        self.options = options
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ckpt-run-bench-"))
        self.work = self.folder / "work"
        self.url = f"s3://bench/round{number}"
        self.environment = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}"}

    def empty(self):
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()

    def run(self, name, *more):
        log = self.folder / name
        command = [self.options.bin, *more, "--interval", "never", "--", sys.executable, "-c", JOB, str(self.options.gib)]
        process = subprocess.Popen(
            [str(word) for word in command], cwd=self.work, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=(self.folder / f"{name}.out").open("wb"), stderr=log.open("wb"))
        return process, lambda: log.read_text()

    def verb(self, *words):
        subprocess.run([self.options.bin, *words], cwd=self.work, env=self.environment, check=True,
                       stdout=subprocess.DEVNULL)


def peak_mib(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def client():
    config = botocore.config.Config(max_pool_connections=16)
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{PORT}", region_name="us-east-1", config=config,
                        aws_access_key_id="x", aws_secret_access_key="y")


def plain(size, data):
    """Returns the seconds for the upload and for the download of so many bytes by a plain client."""
    s3, count = client(), -(-size // PACK)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        begun = time.monotonic()
        list(pool.map(lambda n: s3.put_object(Bucket="bench", Key=f"plain/{n}", Body=data), range(count)))
        up = (time.monotonic() - begun) * size / (count * PACK)
        begun = time.monotonic()
        list(pool.map(lambda n: s3.get_object(Bucket="bench", Key=f"plain/{n}")["Body"].read(), range(count)))
        down = (time.monotonic() - begun) * size / (count * PACK)
        list(pool.map(lambda n: s3.delete_object(Bucket="bench", Key=f"plain/{n}"), range(count)))
    return up, down


def measure(options, number):
    place = Place(options, number)
    place.empty()
    process, said = place.run("first", "--remote", place.url)
    wait_until("job", lambda: b"ready" in (place.folder / "first.out").read_bytes())
    place.verb("snapshot")
    # From now on, the peak is that of the upload.
    pathlib.Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    wait_until("upload", lambda: "is in the remote store" in said())
    upload = float(re.search(r"remote store .*seconds=([\d.]+)", said())[1])
    peak_up = peak_mib(process.pid)
    s3 = client()
    objects = s3.get_paginator("list_objects_v2").paginate(Bucket="bench", Prefix=f"round{number}/")
    size = sum(item["Size"] for page in objects for item in page["Contents"])
    process.kill()
    process.wait()
    # The restore on the same machine.
    process, said = place.run("local")
    wait_until("restore", lambda: "restored" in said())
    local = float(re.search(r"restored .*took=([\d.]+)s", said())[1])
    process.kill()
    process.wait()
    # The restore on a machine with nothing.
    place.empty()
    begun = time.monotonic()
    process, said = place.run("second", "--verbose", "--remote", place.url, "--take-over")
    failed = lambda: "ckpt-run: error" in said()
    wait_until("part", lambda: "the first part of the image" in said() or failed())
    first = time.monotonic() - begun
    wait_until("restore", lambda: "ckpt-run: restored " in said() or failed())
    remote = time.monotonic() - begun
    if failed():
        sys.exit(said())
    wait_until("image", lambda: "downloaded completely" in said())
    peak_down = peak_mib(process.pid)
    process.kill()
    process.wait()
    shutil.rmtree(place.folder)
    up, down = plain(size, os.urandom(PACK))
    return {"size": size, "upload": upload, "plain_up": up, "local": local, "remote": remote, "first": first,
            "plain_down": down, "peak_up": peak_up, "peak_down": peak_down}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bin", default=ROOT / "target/release/ckpt-run", type=pathlib.Path)
    parser.add_argument("--server", required=True)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    options.bin = options.bin.resolve()
    with tempfile.TemporaryDirectory() as folder:
        command = shlex.split(options.server.format(port=PORT, folder=folder))
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until("server", answers)
            client().create_bucket(Bucket="bench")
            rounds = [measure(options, number) for number in range(options.rounds)]
        finally:
            server.kill()
            server.wait()
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    mib = median["size"] / (1 << 20)
    text = f"""# Images in object storage

`benches/remote.py --gib {options.gib} --rounds {options.rounds}` on {time.strftime('%Y-%m-%d')}, Linux {platform.release()},
{os.cpu_count()} cores, server {pathlib.Path(command[0]).name} on loopback, medians of the rounds; {mib:.0f} MiB in the bucket.

| | ckpt-run | plain client | ratio |
|---|---|---|---|
| upload | {median['upload']:.2f} s ({mib / median['upload']:.0f} MiB/s) | {median['plain_up']:.2f} s | {median['plain_up'] / median['upload']:.2f} of its speed |
| download and restore | {median['remote']:.2f} s | {median['plain_down']:.2f} s + local restore {median['local']:.2f} s | {median['remote'] / (median['plain_down'] + median['local']):.2f} of its time |

First part of the image after {median['first']:.2f} s. Peak memory of the supervisor: {median['peak_up']:.0f} MiB in the upload, {median['peak_down']:.0f} MiB in the download and restore.
"""
    print(text)
    if options.record:
        (ROOT / "benches/results/remote.md").write_text(text)
    return 0


def answers():
    try:
        client().list_buckets()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
