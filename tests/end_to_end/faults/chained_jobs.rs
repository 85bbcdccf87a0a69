//! Jobs whose output shows if any of it was lost, duplicated or mixed with that of another attempt.

use std::fs;
use std::io::{BufRead, BufReader, PipeWriter};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use super::counter_job::{COUNTER, counted};
use crate::harness::fake_gpu::{self, FakeGpu, untouched};
use crate::harness::{ON_REQUEST, Place, Run, lines, wait_until};

/// Job whose lines contain a random number and a hash of all preceding lines, so that two attempts never write the
/// same. The state is in memory, in a file that is renamed into place at each step, and in a child. Ends when the file
/// `stop` exists.
const CHAIN: &str = r#"
import hashlib, os, signal, threading, time
threading.Thread(target=time.sleep, args=(10000,), daemon=True).start()
ask, told = os.pipe(); answer, heard = os.pipe()
if os.fork() == 0:
    os.close(told); os.close(answer)
    chain = "0"
    while (nonce := os.read(ask, 64)):
        chain = hashlib.sha256(chain.encode() + nonce).hexdigest()[:16]
        os.write(heard, chain.encode())
    os._exit(0)
os.close(ask); os.close(heard)
# Without its child it dies as that did.
signal.signal(signal.SIGPIPE, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
log, step, chain = open("log", "a"), 0, "0"
while not os.path.exists("stop"):
    if step:
        assert open("state").read() == f"{step} {chain}"
    nonce = os.urandom(4).hex()
    line = f"{step} {nonce} {chain}"
    print(line, flush=True)
    log.write(line + "\n"); log.flush()
    os.write(told, nonce.encode())
    chain = hashlib.sha256((chain + nonce).encode()).hexdigest()[:16]
    answered = os.read(answer, 64).decode()
    if not answered: os.kill(os.getpid(), signal.SIGKILL)
    assert answered == chain
    step += 1
    with open("new", "w") as state:
        state.write(f"{step} {chain}")
    os.rename("new", "state")
    time.sleep(0.005)
os.close(told)
"#;

/// Checks the file `chain` and prints the number of its lines.
const CHECK: &str = r#"
import hashlib, sys
chain = "0"
text = open(sys.argv[1]).read()
assert text.endswith("\n"), "the last line is cut"
lines = text.splitlines()
for number, line in enumerate(lines):
    words = line.split(" ")
    assert words[::2] == [str(number), chain], f"line {number} is {line!r}, expected {chain}"
    chain = hashlib.sha256((chain + words[1]).encode()).hexdigest()[:16]
assert open("state").read() == f"{len(lines)} {chain}", "the state is not that of the last line"
"#;

const GPU_MIB: u64 = 1024;
const GPU_JOB: [&str; 4] = ["--segments", "300,64K,2M", "--threads", "2"];
const GPU_PAUSE: [&str; 2] = ["--pause-ms", "20"];
/// Steps of the GPU job in a round: 2 s.
const GPU_STEPS: usize = 100;

/// Kind of a job, and of the check of its output.
pub enum Job {
    /// [`CHAIN`], its output appended to a file.
    Chain(Files),
    /// [`COUNTER`], whose output goes into a separate pipe for each supervisor.
    Pipe(Vec<Delivered>),
    /// Sample job on fake GPUs, with memory that stays on them, and its number of steps. After the last step it waits to be
    /// stopped.
    Gpu(FakeGpu, usize),
}

/// Source of ckpt-run's knowledge about the job's closed files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Files {
    /// The watcher. After it was killed, restores are refused until the next snapshot.
    Watched,
    /// The settings.
    Included,
}

impl Job {
    pub fn named(name: &str, rounds: usize) -> Self {
        match name {
            "chain" => Self::Chain(Files::Watched),
            "included" => Self::Chain(Files::Included),
            "pipe" => Self::Pipe(Vec::new()),
            _ => Self::Gpu(FakeGpu::with(1, GPU_MIB), GPU_STEPS * rounds),
        }
    }

    /// Returns true if the job makes no more progress: the GPU job has a limited number of steps.
    pub fn is_done(&self, place: &Place) -> bool {
        match self {
            Self::Chain(_) | Self::Pipe(_) => false,
            Self::Gpu(_, steps) => place.text("out").contains(&format!("\n{} ", steps - 1)),
        }
    }

    /// Returns the file that shows the job's progress.
    pub fn progress_file(&self) -> &'static str {
        match self {
            Self::Chain(_) | Self::Pipe(_) => "log",
            Self::Gpu(..) => "out",
        }
    }

    /// Returns the file at which the job ends. It is in no image: whoever wrote it right at a kill would be unknown.
    fn stop_file(&self, place: &Place) -> PathBuf {
        match self {
            Self::Chain(_) | Self::Pipe(_) => place.file("stop"),
            // A folder whose files are excluded.
            Self::Gpu(gpu, _) => gpu.folder().join("stop"),
        }
    }

    /// Runs the same command line, for the first time or again.
    pub fn start(&mut self, place: &Place) -> Run {
        // The tests cause restarts without progress.
        let options = [&ON_REQUEST[..], &["--max-restarts", "-1"]].concat();
        let set = |command: &mut Command| {
            command.env("CKPT_RUN_RESTART_BACKOFF", "10ms");
        };
        let stop_is_the_tests = |command: &mut Command| {
            set(command);
            command.env("CKPT_RUN_FILES_EXCLUDE", "stop");
        };
        let python = ["python3", "-u", "job.py"];
        let stop = self.stop_file(place);
        match self {
            Self::Chain(files) => {
                write_once(place, CHAIN);
                place.start_with(&options, &python, |command| {
                    stop_is_the_tests(command);
                    if *files == Files::Included {
                        command.env("CKPT_RUN_FILES_INCLUDE", "state,new");
                    }
                })
            }
            Self::Pipe(segments) => {
                write_once(place, COUNTER);
                let (delivered, writer) = Delivered::begin();
                segments.push(delivered);
                place.start_with(&options, &python, |command| {
                    stop_is_the_tests(command);
                    command.stdout(writer);
                })
            }
            Self::Gpu(gpu, steps) => {
                let program = fake_gpu::job();
                let mut command = place.command(&options);
                command.arg("--").arg(program).args(GPU_JOB).args(GPU_PAUSE);
                command.args(["--steps", &steps.to_string()]);
                command.args(["--wait-at", &format!("{}:{}", *steps - 1, stop.display())]);
                set(&mut command);
                command.env("CKPT_RUN_CUDA_MEMORY", "resident");
                place.spawn(gpu.wrap(&command), |_| {})
            }
        }
    }

    /// Lets the job end, and checks that nothing of its output and files is lost or duplicated.
    pub fn finish(self, place: &Place, run: &mut Run) {
        if let Self::Pipe(segments) = &self {
            // If it ended before it has repeated everything, its output would differ.
            wait_until("the lines that were delivered", || {
                segments.iter().all(|one| one.last() < counted(place))
            });
        }
        fs::write(self.stop_file(place), "").expect("written");
        assert_eq!(run.wait(), 0, "{}", place.text("err"));
        match self {
            Self::Chain(_) => {
                assert_eq!(place.text("out"), place.text("log"));
                let check = Command::new("python3")
                    .args(["-c", CHECK, "log"])
                    .current_dir(place.path())
                    .output()
                    .expect("python3 starts");
                let said = String::from_utf8_lossy(&check.stderr);
                assert!(check.status.success(), "{said}\n{}", place.text("err"));
            }
            Self::Pipe(segments) => {
                let count = place.text("log").lines().count();
                assert_eq!(place.text("log"), lines(count), "{}", place.text("err"));
                assert_eq!(place.text("counter"), count.to_string());
                let segments: Vec<_> = segments.into_iter().map(Delivered::end).collect();
                let problem = misdelivered(&segments, count);
                assert_eq!(problem, None, "{}", place.text("err"));
            }
            Self::Gpu(gpu, steps) => {
                let steps = steps.to_string();
                let expected = untouched(&gpu, &[&GPU_JOB[..], &["--steps", &steps]].concat());
                assert!(
                    place.text("out") == expected,
                    "the output is not that of a run that nobody touched: {}",
                    place.text("err")
                );
                gpu.assert_free("at its end");
            }
        }
    }
}

/// Writes the job's script, which must not change between two starts.
fn write_once(place: &Place, script: &str) {
    let file = place.file("job.py");
    if !file.exists() {
        fs::write(file, script).expect("the script is written");
    }
}

/// Output of a supervisor in its pipe.
pub struct Delivered {
    text: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Delivered {
    fn begin() -> (Self, PipeWriter) {
        let (pipe, writer) = std::io::pipe().expect("a pipe");
        let text = Arc::new(Mutex::new(String::new()));
        let mine = Arc::clone(&text);
        let reader = thread::spawn(move || {
            let mut lines = BufReader::new(pipe);
            let mut line = String::new();
            while lines.read_line(&mut line).expect("a line") > 0 {
                mine.lock().expect("the text").push_str(&line);
                line.clear();
            }
        });
        (Self { text, reader }, writer)
    }

    /// Returns the last number received; 0 before the first.
    fn last(&self) -> usize {
        numbers(&self.text.lock().expect("the text"))
            .last()
            .copied()
            .unwrap_or(0)
    }

    /// Returns all output, after all ends of the pipe are closed.
    fn end(self) -> String {
        self.reader.join().expect("a reader");
        std::mem::take(&mut self.text.lock().expect("the text"))
    }
}

/// Returns the numbers of complete lines: a killed supervisor may have left an incomplete one.
fn numbers(text: &str) -> Vec<usize> {
    text.split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n')?.parse().ok())
        .collect()
}

/// Returns the error in the numbers delivered by consecutive supervisors. The next supervisor begins at the end of the
/// previous one, or earlier. Each counts without a gap and returns only to numbers that it has not delivered itself: to
/// an image older than its first one.
fn misdelivered(segments: &[String], count: usize) -> Option<String> {
    let mut reached = 0;
    for (place, segment) in segments.iter().enumerate() {
        let numbers = numbers(segment);
        let mut lowest = usize::MAX;
        let mut expected = reached;
        for number in numbers {
            if number > expected || (number < expected && number >= lowest) {
                return Some(format!(
                    "supervisor {place} delivered {number} instead of {expected}"
                ));
            }
            lowest = lowest.min(number);
            expected = number + 1;
            reached = reached.max(expected);
        }
    }
    (reached != count).then(|| format!("{reached} of {count} lines were delivered"))
}

#[test]
fn numbers_that_are_lost_or_doubled_in_a_pipe_are_found() {
    let problem = |segments: &[&str], count| {
        let segments: Vec<String> = segments.iter().map(|&text| text.to_owned()).collect();
        misdelivered(&segments, count)
    };
    assert_eq!(problem(&["0\n1\n2\n"], 3), None);
    assert_eq!(problem(&["0\n1\n2\n3", "", "1\n2\n3\n4\n"], 5), None);
    assert_eq!(problem(&["0\n1\n2\n", "2\n3\n1\n2\n3\n4\n"], 5), None);
    assert!(problem(&["0\n1\n2\n", "2\n3\n2\n3\n4\n"], 5).is_some());
    assert!(problem(&["0\n1\n1\n2\n"], 3).is_some());
    assert!(problem(&["0\n2\n"], 3).is_some());
    assert!(problem(&["0\n1\n", "3\n"], 4).is_some());
    assert!(problem(&["0\n1\n"], 3).is_some());
}
