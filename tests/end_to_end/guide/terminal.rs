//! Shell that executes a page block by block, as its reader would.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::pages::Block;
use crate::harness::{Place, descendants, program, wait_until, write_script};

/// Substitute for ssh: the other machine is a separate folder.
const SSH: &str = "#!/bin/sh\nshift\ncd \"$HOST_FOLDER\" && exec \"$@\"\n";

/// Time limit for a block, which may wait for a whole job.
const BLOCK_LIMIT: Duration = Duration::from_secs(180);
/// Time between two checks.
const POLL: Duration = Duration::from_millis(20);

/// Terminal with a shell, in a fresh folder.
pub struct Terminal {
    shell: Child,
    input: ChildStdin,
    place: Place,
    /// Folder in which the page's commands run.
    folder: PathBuf,
    blocks: usize,
}

impl Terminal {
    /// Creates a terminal; the store will be in `folder`, which is empty for the fresh folder itself.
    pub fn new(place: Place, folder: &str) -> Self {
        let (bin, host) = (place.file("bin"), place.file("host"));
        fs::create_dir(&bin).unwrap();
        fs::create_dir(&host).unwrap();
        symlink(program(), bin.join("ckpt-run")).unwrap();
        write_script(&bin.join("ssh"), SSH);
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let log = File::create(place.file("terminal")).unwrap();
        let mut shell = Command::new("bash")
            .current_dir(place.path())
            .env("PATH", path)
            .env("HOST_FOLDER", host)
            .env("XDG_CONFIG_HOME", place.path())
            .env_remove("CKPT_RUN_STORE")
            .stdin(Stdio::piped())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut input = shell.stdin.take().unwrap();
        writeln!(input, "set -mx").unwrap();
        let folder = place.file(folder);
        Self {
            shell,
            input,
            place,
            folder,
            blocks: 0,
        }
    }

    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Returns the text that the reader would have seen.
    pub fn screen(&self) -> String {
        self.place.text("terminal")
    }

    /// Runs a block, which must end with its exit code: 0 of every command, or that of `run=CODE` of the last.
    pub fn run(&mut self, block: &Block) {
        self.blocks += 1;
        let script = self.place.file(&format!("block-{}", self.blocks));
        let done = self.place.file(&format!("done-{}", self.blocks));
        fs::write(&script, &block.text).unwrap();
        let mut words = block.info.split_whitespace();
        let code = words.find_map(|word| word.strip_prefix("run="));
        let strict = if code.is_some() { "+e" } else { "-e" };
        let (script, shown) = (script.display(), done.display());
        let line = format!(
            "set {strict}; source {script} < /dev/null; echo $? > {shown}.new; mv {shown}.new {shown}"
        );
        writeln!(self.input, "{line}").unwrap();
        self.wait_for(&done);
        let ended = fs::read_to_string(&done).unwrap_or_default();
        assert_eq!(
            ended.trim(),
            code.unwrap_or("0"),
            "{}\n{}",
            block.text,
            self.screen()
        );
        let begins = block.text.lines().any(|line| line.ends_with(" &"));
        self.settle(begins);
    }

    /// Waits for the file, or the shell's end.
    fn wait_for(&mut self, done: &Path) {
        let begun = Instant::now();
        while !done.exists() && self.shell.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < BLOCK_LIMIT, "{}", self.screen());
            std::thread::sleep(POLL);
        }
    }

    /// Waits as a reader does by reading on: a run that starts or is restored has time for it.
    fn settle(&self, begins: bool) {
        wait_until(&format!("the run to compute; {}", self.screen()), || {
            let mut command = self.place.command(&["status", "--json"]);
            let output = command
                .current_dir(self.folder_or_place())
                .output()
                .unwrap();
            let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            match output.status.code() {
                Some(0) => {
                    let job = status["job_pid"].as_i64().unwrap_or_default();
                    let stat = fs::read_to_string(format!("/proc/{job}/stat")).unwrap_or_default();
                    let lives = !stat.is_empty() && !stat.contains(") Z ");
                    status["state"] == "running" && lives
                }
                Some(3) => !begins || status["state"] == "finished",
                _ => false,
            }
        });
    }

    fn folder_or_place(&self) -> PathBuf {
        if self.folder.exists() {
            self.folder.clone()
        } else {
            self.place.path().to_owned()
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        for pid in descendants(i32::try_from(self.shell.id()).unwrap()) {
            // A process that has exited is skipped.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
