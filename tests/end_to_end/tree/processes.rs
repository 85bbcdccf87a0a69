//! Threads and processes in all relations.

use std::fs;

use super::survival::{Survival, survives, take_turns};
use crate::harness::{ON_REQUEST, Place, apply, as_root_and_user, wait_until};

#[apply(as_root_and_user)]
fn threads_survive() {
    survives(
        r"
import queue
work, done = [queue.Queue() for _ in range(6)], queue.Queue()
def worker(n):
    state = hashlib.sha256(bytes([n]))
    while (item := work[n].get()) is not None:
        state.update(bytes([item]))
        done.put((n, state.hexdigest()))
threads = [threading.Thread(target=worker, args=(n,)) for n in range(6)]
for thread in threads: thread.start()
for i in steps():
    for one in work: one.put(i)
    note(sorted(done.get() for _ in threads))
for one in work: one.put(None)
for thread in threads: thread.join()
",
    );
}

#[apply(as_root_and_user)]
fn forked_and_executed_children_survive() {
    survives(
        r#"
def child(there, back):
    state = hashlib.sha256()
    while data := os.read(there, 1):
        state.update(data)
        os.write(back, state.digest())
    os._exit(5)
there, back = os.pipe(), os.pipe()
forked = os.fork()
if forked == 0:
    os.close(there[1])
    child(there[0], back[1])
os.close(there[0])
cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
grandchild = subprocess.Popen(["sh", "-c", "while read line; do echo $(($line * 2)); done"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for i in steps():
    os.write(there[1], bytes([i]))
    note(os.read(back[0], 32))
    for process in cat, grandchild:
        process.stdin.write(b"%d\n" % i); process.stdin.flush()
        note(process.stdout.readline())
os.close(there[1])
note(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
for process in cat, grandchild:
    process.stdin.close()
    note(process.wait())
"#,
    );
}

#[apply(as_root_and_user)]
fn a_pool_of_workers_with_queues_and_semaphores_survives() {
    survives(
        r#"
import multiprocessing as mp
mp.set_start_method("fork")
def square(n): return n * n
def produce(queue, semaphore, value):
    n = 0
    while True:
        semaphore.acquire()
        with value.get_lock(): value.value += n
        queue.put((n, value.value)); n += 1
queue, semaphore, value = mp.Queue(), mp.Semaphore(0), mp.Value("q", 0)
producer = mp.Process(target=produce, args=(queue, semaphore, value), daemon=True)
producer.start()
with mp.Pool(3) as pool:
    for i in steps():
        pending = pool.map_async(square, range(i, i + 30))
        semaphore.release()
        note(queue.get(), value.value, pending.get())
producer.terminate(); producer.join()
note(producer.exitcode)
"#,
    );
}

#[apply(as_root_and_user)]
fn spawned_workers_with_their_resource_tracker_survive() {
    let _turn = take_turns();
    survives(
        r#"
import concurrent.futures as futures, math, multiprocessing as mp
if __name__ == "__main__":
    with futures.ProcessPoolExecutor(2, mp_context=mp.get_context("forkserver")) as pool:
        for i in steps():
            note(list(pool.map(math.factorial, range(i, i + 5))))
else:
    print = lambda *_, **__: None
"#,
    );
}

#[apply(as_root_and_user)]
fn a_daemonized_helper_survives() {
    survives(
        r#"
os.mkfifo("ask"); os.mkfifo("answer")
first = os.fork()
if first == 0:
    os.setsid()
    if os.fork() != 0: os._exit(0)
    here = os.getcwd()
    os.chdir("/")
    null = os.open("/dev/null", os.O_RDWR)
    for n in 0, 1, 2: os.dup2(null, n)
    os.chdir(here)
    ask, answer = open("ask", "rb", 0), open("answer", "wb", 0)
    state = hashlib.sha256()
    while data := ask.read(1):
        state.update(data)
        answer.write(state.digest())
    os._exit(0)
os.waitpid(first, 0)
ask, answer = open("ask", "wb", 0), open("answer", "rb", 0)
for i in steps():
    ask.write(bytes([i]))
    note(answer.read(32))
ask.close()
note(answer.read(1))
"#,
    );
}

/// The helper of an exited helper answers the job; it is in the session of the job, which is not its ancestor.
const ORPHAN: &str = r"
there, back = os.pipe(), os.pipe()
first = os.fork()
if first == 0:
    if os.fork() == 0:
        os.close(there[1]); os.close(back[0])
        state = hashlib.sha256()
        while data := os.read(there[0], 1):
            state.update(data)
            os.write(back[1], state.digest())
        os._exit(0)
    os._exit(0)
os.waitpid(first, 0)
os.close(there[0]); os.close(back[1])
for i in steps():
    os.write(there[1], bytes([i]))
    note(os.read(back[0], 32))
";

#[apply(as_root_and_user)]
fn an_orphan_survives_a_second_restore() {
    survives_twice(Survival::begin(ORPHAN));
}

/// Two crashes, with a snapshot of the restored job between them.
fn survives_twice(survival: Survival) {
    let place = &survival.place;
    survival.run.crash();
    let restored = |times| {
        wait_until("the restore", || {
            place.text("err").matches("restored image").count() == times
        });
    };
    restored(1);
    place.snapshot();
    survival.run.crash();
    restored(2);
    survival.ends_like_an_undisturbed_run();
}

#[apply(as_root_and_user)]
fn zombies_keep_their_exit_codes() {
    let survival = Survival::begin(
        r"
def ends(how):
    pid = os.fork()
    if pid == 0: how()
    return pid
ended = [ends(lambda: os._exit(code)) for code in (7, 127, 128, 200, 255)]
ended += [ends(lambda: os.kill(os.getpid(), number)) for number in (signal.SIGKILL, signal.SIGRTMIN + 6)]
for pid in ended: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
for i in steps(): note(i)
for pid in ended: note(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
",
    );
    // The second image is of processes that a restore has made.
    survives_twice(survival);
}

#[apply(as_root_and_user)]
fn pids_of_ended_processes_are_not_used_again() {
    survives(
        r"
used = set()
for i in steps():
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
    note(pid in used)
    used.add(pid)
",
    );
}

#[apply(as_root_and_user)]
fn sessions_groups_and_signal_handling_stay_as_they_were() {
    survives(
        r#"
def waits(prepare):
    ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        prepare()
        os.write(ready[1], b"x")
        while True: signal.pause()
    os.read(ready[0], 1)
    return pid
children = [waits(os.setsid), waits(os.setpgrp), waits(lambda: None)]
follower = waits(lambda: os.setpgid(0, children[1]))
children.append(follower)
def where(pid):
    names = {os.getsid(0): "ours", **{child: n for n, child in enumerate(children)}}
    return names.get(os.getsid(pid), "?"), names.get(os.getpgid(pid), "?")
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGRTMIN})
os.nice(3); os.umask(0o027)
os.setpgid(children[2], children[2])
for i in steps():
    note([where(pid) for pid in children], signal.getsignal(signal.SIGHUP))
    note(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))))
    old = os.umask(0); os.umask(old)
    note(old, os.nice(0))
os.killpg(children[1], signal.SIGKILL)
for pid in children[1], children[3]: note(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
for pid in children[0], children[2]: os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
"#,
    );
}

#[apply(as_root_and_user)]
fn a_shell_pipeline_survives() {
    const COUNT: &str = r#"
import os, time
for i in range(20):
    for gate, at in ("snapshotted", 8), ("crashed", 14):
        while i == at and not os.path.exists(gate): time.sleep(0.005)
    print(i, flush=True)
    open("log", "a").write(f"{i}\n")
"#;
    let place = Place::new();
    fs::write(place.file("count.py"), COUNT).unwrap();
    let pipeline = "python3 count.py | sed -u s/^/n/ | while read line; do echo \"got $line\"; done; echo over";
    let mut run = place.start(&ON_REQUEST, &["sh", "-c", pipeline]);
    place.wait_for("out", "got n4\n");
    place.snapshot();
    fs::write(place.file("snapshotted"), "").unwrap();
    place.wait_for("out", "got n12\n");
    run.crash();
    fs::write(place.file("crashed"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let mut expected: Vec<String> = (0..20).map(|i| format!("got n{i}")).collect();
    expected.push("over".to_owned());
    assert_eq!(place.text("out").lines().collect::<Vec<_>>(), expected);
}
