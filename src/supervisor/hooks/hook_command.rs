//! Run of a hook, a command of the user: started beside the job with the facts of the event, its output logged, killed
//! when it exceeds its time.
//!
//! Blocks. The caller decides what follows.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::timerfd::TimerFd;

use super::process_group::HookGroup;
use crate::clock;
use crate::config::{HookCommand, Occasion};
use crate::run::environment::{NOT_FOR_THE_JOB, STORE_VARIABLE};
use crate::run::run_context::RunContext;
use crate::sandbox;

/// Exit code that calls a snapshot off.
const VETO: i32 = 75;
/// Lines of a hook that are shown: a notification says little, and a loop must not fill the log.
const LINES_MAX: usize = 200;
/// Bytes of a line that are shown at once; the rest are further lines.
const LINE_BYTES_MAX: usize = 1000;
const READ_BYTES: usize = 4096;

#[derive(Debug)]
pub(crate) struct Call {
    pub occasion: Occasion,
    pub command: HookCommand,
    pub hook_group: Arc<HookGroup>,
    pub lines_max: usize,
    pub directory: PathBuf,
    pub facts: Vec<(&'static str, OsString)>,
}

impl Call {
    /// Makes the call of an occasion of this run; `None` if it has no hook.
    pub fn new(
        context: &RunContext,
        run: u64,
        occasion: Occasion,
        facts: Vec<(&'static str, OsString)>,
    ) -> Option<Self> {
        let settings = &context.config.hooks;
        let command = occasion.command(settings)?.clone();
        let mut all = vec![
            ("CKPT_RUN_HOOK", occasion.as_str().into()),
            (STORE_VARIABLE, context.store.path().into()),
            ("CKPT_RUN_JOB", run.to_string().into()),
        ];
        all.extend(facts);
        Some(Self {
            occasion,
            command,
            hook_group: Arc::new(HookGroup::new(settings.timeout)),
            lines_max: LINES_MAX,
            directory: context.directory.clone(),
            facts: all,
        })
    }

    /// Runs the hook to its end, and logs the lines that it prints.
    pub fn run(&self) -> Ended {
        let name = self.occasion.as_str();
        run(self, |line| tracing::info!("hook {name}: {line}"))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// The hook exited with the code that calls a snapshot off.
    Veto,
    /// The hook failed, for this reason.
    Failed(String),
    /// The hook exceeded its time and was killed.
    TimedOut,
}

impl Outcome {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Veto => "veto",
            Self::Failed(_) => "failed",
            Self::TimedOut => "timed-out",
        }
    }
}

#[derive(Debug)]
pub(crate) struct Ended {
    pub occasion: Occasion,
    pub outcome: Outcome,
    pub took: Duration,
}

/// Runs a hook to its end; `say` gets each line that it prints.
pub(crate) fn run(call: &Call, mut say: impl FnMut(&str)) -> Ended {
    let begun = clock::now();
    let mut lines = Lines::new(call.lines_max);
    let outcome = match start(call) {
        Ok((mut child, timer, output)) => {
            let ended = follow(&child, &timer, output, &mut lines, &mut say);
            if let Ok(true) = ended {
                call.hook_group.let_go();
            } else {
                call.hook_group.kill();
            }
            match ended.and_then(|ended| Ok((ended, child.wait()?))) {
                Ok((true, status)) => outcome(status),
                Ok((false, _)) => Outcome::TimedOut,
                Err(error) => Outcome::Failed(format!("cannot wait for it: {error}")),
            }
        }
        Err(error) => {
            call.hook_group.let_go();
            Outcome::Failed(format!("cannot start it: {error}"))
        }
    };
    lines.end(&mut say);
    Ended {
        occasion: call.occasion,
        outcome,
        took: clock::now() - begun,
    }
}

fn start(call: &Call) -> io::Result<(Child, Arc<TimerFd>, File)> {
    let mut command = match &call.command {
        HookCommand::Shell(line) => {
            let mut command = Command::new("/bin/sh");
            command.arg("-c").arg(line);
            command
        }
        HookCommand::Words(words) => {
            let mut command = Command::new(words.first().map_or("", String::as_str));
            command.args(words.iter().skip(1));
            command
        }
    };
    let (output, input) = io::pipe()?;
    fcntl(&output, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    for name in NOT_FOR_THE_JOB {
        command.env_remove(name);
    }
    sandbox::with_job_descriptor_limit(&mut command)
        .envs(call.facts.iter().map(|(name, value)| (name, value)))
        .current_dir(&call.directory)
        .stdin(Stdio::null())
        .stdout(input.try_clone()?)
        .stderr(input);
    let (child, timer) = call.hook_group.start(&mut command)?;
    Ok((child, timer, File::from(OwnedFd::from(output))))
}

/// Hears the hook until it has ended, whoever else still holds its output, or its time is over; false then.
fn follow(
    child: &Child,
    timer: &TimerFd,
    output: File,
    lines: &mut Lines,
    say: &mut impl FnMut(&str),
) -> io::Result<bool> {
    let gone = rustix::process::pidfd_open(
        rustix::process::Pid::from_child(child),
        rustix::process::PidfdFlags::empty(),
    )?;
    let mut output = Some(output);
    loop {
        let ends = [gone.as_fd(), timer.as_fd()].into_iter();
        let mut watched: Vec<PollFd> = ends
            .chain(output.as_ref().map(AsFd::as_fd))
            .map(|one| PollFd::new(one, PollFlags::POLLIN))
            .collect();
        match poll(&mut watched, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let [ended, late] = [0, 1].map(|at| watched[at].any().unwrap_or(false));
        if let Some(open) = &mut output
            && !hear(open, lines, say)
        {
            output = None;
        }
        if ended || late {
            return Ok(ended);
        }
    }
}

/// Takes what there is; false at the end of the output.
fn hear(output: &mut File, lines: &mut Lines, say: &mut impl FnMut(&str)) -> bool {
    /// Reads in one go: a hook that prints without end must not keep its deadline from us.
    const READS_MAX: usize = 64;
    let mut buffer = [0; READ_BYTES];
    for _ in 0..READS_MAX {
        match output.read(&mut buffer) {
            Ok(0) => return false,
            Ok(got) => lines.take(&buffer[..got], say),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        }
    }
    true
}

fn outcome(status: ExitStatus) -> Outcome {
    match status.code() {
        Some(0) => Outcome::Done,
        Some(VETO) => Outcome::Veto,
        Some(_) | None => Outcome::Failed(status.to_string()),
    }
}

/// Bytes as lines, so many of them.
#[derive(Debug)]
struct Lines {
    line: Vec<u8>,
    said: usize,
    max: usize,
}

impl Lines {
    fn new(max: usize) -> Self {
        Self {
            line: Vec::new(),
            said: 0,
            max,
        }
    }

    fn take(&mut self, bytes: &[u8], say: &mut impl FnMut(&str)) {
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
            }
            if byte == b'\n' || self.line.len() >= LINE_BYTES_MAX {
                self.end_line(say);
            }
        }
    }

    fn end_line(&mut self, say: &mut impl FnMut(&str)) {
        let line = std::mem::take(&mut self.line);
        self.said += 1;
        if self.said == self.max {
            say("(further lines are not shown)");
        }
        if self.said < self.max {
            // Escape sequences are for a terminal of its own.
            let text = String::from_utf8_lossy(&line);
            say(&text.replace(char::is_control, " "));
        }
    }

    fn end(&mut self, say: &mut impl FnMut(&str)) {
        if !self.line.is_empty() {
            self.end_line(say);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Tests of one hook, with real commands.

    use nix::sys::signal::Signal;
    use nix::unistd::Pid;

    use super::*;

    fn heard(line: &str, timeout: Duration) -> (Outcome, Vec<String>) {
        let call = Call {
            occasion: Occasion::AfterSnapshot,
            command: HookCommand::Shell(line.to_owned()),
            hook_group: Arc::new(HookGroup::new(timeout)),
            lines_max: LINES_MAX,
            directory: "/".into(),
            facts: vec![("CKPT_RUN_IMAGE", "000007".into())],
        };
        let mut said = Vec::new();
        let ended = run(&call, |line| said.push(line.to_owned()));
        (ended.outcome, said)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_a_hook_prints_is_heard_line_by_line() {
        let (outcome, said) = heard(
            "echo $CKPT_RUN_IMAGE; echo >&2 two; printf 'th\\033ree'",
            LONG,
        );
        assert_eq!(outcome, Outcome::Done);
        assert_eq!(said, ["000007", "two", "th ree"]);
    }

    #[test]
    fn exit_codes_are_told_apart() {
        assert_eq!(heard("exit 75", LONG).0, Outcome::Veto);
        assert_eq!(
            heard("exit 3", LONG).0,
            Outcome::Failed("exit status: 3".to_owned())
        );
        assert!(matches!(heard("kill -9 $$", LONG).0, Outcome::Failed(_)));
    }

    #[test]
    fn a_program_that_is_not_there_is_a_failure() {
        let call = Call {
            occasion: Occasion::OnHang,
            command: HookCommand::Words(vec!["/no/such".to_owned()]),
            hook_group: Arc::new(HookGroup::new(LONG)),
            lines_max: LINES_MAX,
            directory: "/".into(),
            facts: Vec::new(),
        };
        let ended = run(&call, |_| {});
        assert!(matches!(ended.outcome, Outcome::Failed(why) if why.contains("No such file")));
    }

    #[test]
    fn a_hook_that_takes_too_long_is_killed_with_its_group() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let line = format!("sleep 1000 & echo $! > {}; wait", file.display());
        // Long enough for the shell to come so far.
        let mut timeouts = (0..8).map(|turn| Duration::from_millis(500 << turn));
        let child: i32 = timeouts
            .find_map(|timeout| {
                assert_eq!(heard(&line, timeout).0, Outcome::TimedOut);
                std::fs::read_to_string(&file).ok()?.trim().parse().ok()
            })
            .unwrap();
        let begun = clock::now();
        while crate::job::is_alive(child) {
            assert!(begun.elapsed() < LONG, "the hook's child lives on");
            std::thread::yield_now();
        }
    }

    /// A hook that would take long, whose time `change` shortens or ends once it runs.
    fn with_its_leash(change: impl Fn(&HookGroup)) -> Outcome {
        let hook_group = Arc::new(HookGroup::new(LONG * 60));
        let call = Call {
            occasion: Occasion::BeforeSnapshot,
            command: HookCommand::Shell("echo runs; sleep 1000".to_owned()),
            hook_group: Arc::clone(&hook_group),
            lines_max: LINES_MAX,
            directory: "/".into(),
            facts: Vec::new(),
        };
        run(&call, |_| change(&hook_group)).outcome
    }

    #[test]
    fn time_of_a_running_hook_can_only_be_shortened() {
        let outcome = with_its_leash(|hook_group| {
            hook_group.shorten(Duration::from_millis(10));
            hook_group.shorten(LONG * 60);
        });
        assert_eq!(outcome, Outcome::TimedOut);
    }

    #[test]
    fn killed_hook_is_killed_once_and_does_not_start() {
        let outcome = with_its_leash(|hook_group| assert!(hook_group.kill() && !hook_group.kill()));
        assert!(matches!(outcome, Outcome::Failed(why) if why.contains("SIGKILL")));
        let hook_group = HookGroup::new(LONG);
        assert!(hook_group.kill());
        assert!(hook_group.start(&mut Command::new("true")).is_err());
    }

    #[test]
    fn a_hook_has_ended_though_somebody_else_holds_its_output() {
        let (outcome, said) = heard("sleep 1000 & echo $!", LONG);
        assert_eq!((outcome, said.len()), (Outcome::Done, 1));
        let other = Pid::from_raw(said[0].parse().unwrap());
        nix::sys::signal::kill(other, Signal::SIGKILL).expect("it still has it");
    }

    #[test]
    fn endless_output_of_a_hook_is_bounded_in_time_and_lines() {
        // Long enough for it to print more than that.
        let mut timeouts = (0..8).map(|turn| Duration::from_millis(300 << turn));
        let said = timeouts.find_map(|timeout| {
            let (outcome, said) = heard("yes; true", timeout);
            assert_eq!(outcome, Outcome::TimedOut);
            (said.len() >= LINES_MAX).then_some(said)
        });
        assert_eq!(said.map(|said| said.len()), Some(LINES_MAX));
        let (_, said) = heard("head -c 5000 /dev/zero | tr '\\0' x", LONG);
        assert_eq!(
            said.iter().map(String::len).collect::<Vec<_>>(),
            [LINE_BYTES_MAX; 5]
        );
    }
}
