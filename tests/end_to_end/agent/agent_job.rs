//! Program under the agent, on the fake GPU, and the test's conversation with it.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ckpt_run::agent_client::{
    Agent, Channel, Held, Hello, Library, Origin, Token, environment, install,
};

use crate::harness::fake_gpu::{self, FakeGpu};

/// Time limit of any wait.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Time limit of an idle driver's reply.
pub const A_MOMENT: Duration = Duration::from_millis(40);
/// Shortest wait that shows that there is no reply.
pub const SOON: Duration = Duration::from_millis(300);
pub const MIB: usize = 1 << 20;
/// Memory of a context on the fake GPU.
pub const CONTEXT_LEN: u64 = 1 << 20;

/// Way in which a program finds the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Looking,
    Asking,
    Linked,
}

pub const WAYS: [Way; 3] = [Way::Looking, Way::Asking, Way::Linked];

/// Returns the compiled `tests/end_to_end/agent/program.rs`, built once for each of the two variants.
pub fn program(way: Way) -> &'static Path {
    static PROGRAMS: OnceLock<[PathBuf; 2]> = OnceLock::new();
    let programs = PROGRAMS.get_or_init(|| {
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/end_to_end/agent/program.rs");
        let folder = fake_gpu::library();
        // The linker requires a name without a version.
        let linked = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(
            folder.join("libcuda.so.1"),
            linked.path().join("libcuda.so"),
        )
        .unwrap();
        let search = format!("-L{}", linked.path().display());
        let build = |name: &str, options: &[&str]| {
            let file = tempfile::NamedTempFile::new_in(fake_gpu::build_folder()).unwrap();
            let path = file.into_temp_path();
            let unexpected = ["--check-cfg=cfg(linked)"];
            fake_gpu::rustc(&source, &path, &[options, &unexpected].concat());
            let program = fake_gpu::build_folder().join(format!("agent-program-{name}"));
            path.persist(&program).unwrap();
            program
        };
        [
            build("plain", &[]),
            build("linked", &["--cfg", "linked", &search]),
        ]
    });
    &programs[usize::from(way == Way::Linked)]
}

/// Number of sockets of a program that uses the driver without the agent: the fake has one.
pub const SOCKETS: usize = 1;

pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = fake_gpu::build_folder().join("agent-library");
        std::fs::create_dir_all(&folder).unwrap();
        install(Library::Agent, &folder).unwrap()
    })
}

/// Program under the agent.
pub struct Job {
    child: Child,
    input: ChildStdin,
    pub lines: Receiver<String>,
    pub token: Token,
}

impl Job {
    pub fn new(gpu: &FakeGpu, way: Way) -> Self {
        let token = Token::random().unwrap();
        Self::with(gpu, way, token, &environment(library(), &token, None))
    }

    /// Starts a program of the same run as another.
    pub fn beside(gpu: &FakeGpu, other: &Self, way: Way) -> Self {
        let set = environment(library(), &other.token, None);
        let mut job = Self::with(gpu, way, other.token, &set);
        assert_eq!(job.ask("init"), "0 0 0");
        job
    }

    /// Starts a program without the agent.
    pub fn bare(gpu: &FakeGpu, way: Way) -> Self {
        Self::with(gpu, way, Token::random().unwrap(), &[])
    }

    pub fn with(
        gpu: &FakeGpu,
        way: Way,
        token: Token,
        set: &[(std::ffi::OsString, std::ffi::OsString)],
    ) -> Self {
        let mut command = Command::new(program(way));
        if way == Way::Asking {
            command.arg("asking");
        }
        command.envs(gpu.environment()).envs(set.iter().cloned());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let input = child.stdin.take().unwrap();
        Self {
            child,
            input,
            lines,
            token,
        }
    }

    /// Starts a program that uses CUDA.
    pub fn ready(gpu: &FakeGpu, way: Way) -> Self {
        let mut job = Self::new(gpu, way);
        assert_eq!(job.ask("init"), "0 0 0");
        job
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub fn hear(&self) -> String {
        self.lines
            .recv_timeout(LIMIT)
            .expect("an answer of the program")
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }

    pub fn alloc(&mut self, len: usize) -> u64 {
        let answer = self.ask(&format!("alloc {len}"));
        let (code, address) = answer.split_once(' ').unwrap();
        assert_eq!(code, "0");
        address.parse().unwrap()
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn agent<'a>(&self, channel: &'a mut Channel) -> Agent<'a> {
        channel.agent(&self.token, self.pid())
    }

    pub fn hello(&self) -> Option<Hello> {
        self.agent(&mut Channel::bind().unwrap())
            .hello(LIMIT)
            .unwrap()
    }

    pub fn segments(&self) -> u32 {
        self.hello().map_or(0, |hello| hello.segments)
    }

    pub fn release(&self) -> Vec<Held> {
        self.agent(&mut Channel::bind().unwrap())
            .release(LIMIT)
            .unwrap()
    }

    /// Returns the bytes per GPU, in the driver's order, and the part that was provided.
    pub fn holdings(&self) -> Vec<(u8, u64, u64)> {
        let mut channel = Channel::bind().unwrap();
        let told = self.agent(&mut channel).holdings(LIMIT).unwrap();
        let told = told.iter();
        told.map(|one| (one.device[15], one.bytes, one.imported))
            .collect()
    }

    pub fn origins(&self) -> Vec<Origin> {
        self.agent(&mut Channel::bind().unwrap())
            .origins(LIMIT)
            .unwrap()
    }

    pub fn map(&self, held: &[Held]) {
        self.agent(&mut Channel::bind().unwrap())
            .map(held, LIMIT)
            .unwrap();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the program's own list of descriptors if it holds this many.
pub fn own_descriptors(memory: usize, sockets: usize) -> String {
    format!("memory {memory} sockets {}", sockets + SOCKETS)
}
