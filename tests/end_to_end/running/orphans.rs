//! Processes left by the job's first process at its exit: pid 1 alone, without a supervisor that decides.

use std::fs::File;
use std::io::{PipeWriter, pipe};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ckpt_run::sandbox::{Ended, Event, Hidden, Isolation, Keyring, Network, Sandbox, ToolCommand};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    LIMIT, apply, as_root_and_user, is_dead, network_of_test, program, wait_for_descendant,
    wait_until,
};

/// Sandbox with a job that has a waiting child.
struct Started {
    sandbox: Arc<Sandbox>,
    events: Receiver<Option<Event>>,
    child: i32,
    /// Pipe whose drop lets the job end.
    stdin: PipeWriter,
}

fn start(isolation: Isolation, end: &str) -> Started {
    let (tell, events) = channel();
    let environment = [("PATH".into(), std::env::var_os("PATH").unwrap())];
    let program = Path::new(program());
    let sandbox = Sandbox::start(
        program,
        isolation,
        Keyring::Inherited,
        &environment,
        move |event| {
            let _ = tell.send(event);
        },
    )
    .unwrap();
    let (stdin, writer) = pipe().unwrap();
    let null = || {
        OwnedFd::from(
            File::options()
                .read(true)
                .write(true)
                .open("/dev/null")
                .unwrap(),
        )
    };
    let script = format!("sleep 1000 & read line; {end}");
    let command = ["sh", "-c", &script].map(Into::into);
    let stdio = [stdin.into(), null(), null()];
    sandbox
        .start_job(&command, Hidden::NOTHING, None, &stdio)
        .unwrap();
    Started {
        child: with_argument(&sandbox, "sleep\x001000"),
        sandbox,
        events,
        stdin: writer,
    }
}

/// Returns the sandbox's process with this command line.
fn with_argument(sandbox: &Sandbox, line: &str) -> i32 {
    wait_for_descendant(sandbox.pid(), line, |pid| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|is| is.starts_with(line.as_bytes()))
    })
}

fn end_of_job(events: &Receiver<Option<Event>>) -> Ended {
    loop {
        if let Some(Event::JobEnded(ended)) = events.recv_timeout(LIMIT).unwrap() {
            return ended;
        }
    }
}

fn isolations() -> [Isolation; 2] {
    let own = match network_of_test() {
        None => Isolation::Namespaces,
        Some(_) => Isolation::User(Network::Host),
    };
    [own, Isolation::None]
}

#[apply(as_root_and_user)]
fn orphans_of_a_job_that_a_signal_ended_are_killed_at_once() {
    for isolation in isolations() {
        let job = start(isolation, "kill -9 $$");
        drop(job.stdin);
        assert_eq!(end_of_job(&job.events), Ended::Signaled(9));
        wait_until("the orphan's end", || is_dead(job.child));
        drop(job.sandbox);
    }
}

#[apply(as_root_and_user)]
fn orphans_run_until_the_supervisor_has_decided() {
    for isolation in isolations() {
        let job = start(isolation, "exit 1");
        drop(job.stdin);
        assert_eq!(end_of_job(&job.events), Ended::Exited(1));
        assert!(!is_dead(job.child));
        job.sandbox.kill();
        wait_until("the orphan's end", || is_dead(job.child));
    }
}

#[apply(as_root_and_user)]
fn a_tool_outlives_the_orphans_that_are_killed_beside_it() {
    for isolation in isolations() {
        let job = start(isolation, "");
        let tool = ToolCommand {
            argv: ["/bin/sleep", "2000"].map(Into::into).to_vec(),
            environment: Vec::new(),
            first_descriptor: 0,
            restores: None,
            hidden: Hidden::NOTHING,
            own_ipc: false,
            clock_offsets: None,
        };
        let run = job.sandbox.run_tool(tool, &[]).unwrap();
        let tool = with_argument(&job.sandbox, "/bin/sleep\x002000");
        let first = with_argument(&job.sandbox, "sh\x00-c");
        kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
        assert_eq!(end_of_job(&job.events), Ended::Signaled(9));
        wait_until("the orphan's end", || is_dead(job.child));
        assert!(!is_dead(tool));
        run.kill().unwrap();
        assert_eq!(
            run.wait(Duration::from_secs(10)).unwrap(),
            Ended::Signaled(9)
        );
    }
}
