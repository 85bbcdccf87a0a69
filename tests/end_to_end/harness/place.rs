//! Folder of a test, with a store and the runs in it.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::stat::{Mode, SFlag, mknod};
use tempfile::TempDir;

use super::{
    Ordinary, Run, TUN, UNTIL_GO, is_open_to_all, network_of_test, program, stderr, wait_until,
};

/// Folder with a store, and the runs in it.
pub struct Place {
    folder: TempDir,
    /// The user that everything here runs as, if it is not the tests' own.
    user: Option<Ordinary>,
    /// Copy of the device that pasta opens, for the user who may not open the machine's.
    tun: Option<Device>,
    /// Value of `network.namespace`, if the test's privilege has one.
    network: Option<&'static str>,
}

/// A device file that all users may open, in a folder of its own.
struct Device(TempDir);

impl Device {
    fn copy(of: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let all = Mode::from_bits_truncate(0o666);
        let device = fs::metadata(of).expect("the device").rdev();
        let path = folder.path().join("device");
        mknod(&path, SFlag::S_IFCHR, all, device).expect("a device");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("open to all");
        Self(folder)
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("device")
    }
}

impl Place {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let user = Ordinary::of_test();
        if let Some(user) = user {
            user.owns(folder.path());
        }
        let network = network_of_test();
        let lacks_tun = network == Some("own") && !is_open_to_all(TUN);
        let tun = lacks_tun.then(|| Device::copy(TUN));
        Self {
            folder,
            user,
            tun,
            network,
        }
    }

    /// Returns the device from which the user's pasta makes network devices.
    pub fn tun(&self) -> PathBuf {
        self.tun.as_ref().map_or(PathBuf::from(TUN), Device::path)
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap_or_default()
    }

    /// Returns the command `ckpt-run` with these arguments, in this folder, with a clean configuration.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let with_tun = self.user.zip(self.tun.as_ref());
        let mut command = match with_tun {
            Some((user, tun)) => user.command_with_tun(program(), &tun.path()),
            None => Command::new(program()),
        };
        self.in_folder(command.args(arguments));
        if with_tun.is_none() {
            self.own(&mut command);
        }
        command
    }

    /// Makes a command that starts `ckpt-run` run in this folder, with a clean configuration.
    pub fn in_folder(&self, command: &mut Command) {
        command
            .current_dir(self.path())
            .env("XDG_CONFIG_HOME", self.path())
            .env_remove("CKPT_RUN_STORE");
        self.set_environment(command);
    }

    /// Makes a command that starts `ckpt-run` run as everything here does.
    pub fn own(&self, command: &mut Command) {
        if let Some(user) = self.user {
            user.runs(command);
        }
        self.set_environment(command);
    }

    fn set_environment(&self, command: &mut Command) {
        if let Some(network) = self.network {
            command.env("CKPT_RUN_NETWORK_NAMESPACE", network);
            command.env("HOME", self.path());
            // The tests make these files, and the copier changes memory of a fake GPU; nobody tells ckpt-run who did.
            command.env(
                "CKPT_RUN_FILES_EXCLUDE",
                "go,snapshotted*,crashed*,enough,slow,accept,restored,/dev/shm/fake-cuda-*",
            );
        }
    }

    /// Returns a line of `/etc/passwd` for the user who has no account; empty if there is no such user.
    pub fn account(&self) -> String {
        self.user
            .map_or(String::new(), |user| user.account(self.path()))
    }

    /// Runs a verb to its end.
    pub fn verb(&self, arguments: &[&str]) -> Output {
        self.command(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("ckpt-run starts")
    }

    /// Starts a supervised job with stdout appended to `out` and the supervisor's messages appended to `err`. Without a
    /// job, `options` contain a verb that starts one.
    pub fn start(&self, options: &[&str], job: &[&str]) -> Run {
        self.start_with(options, job, |_| {})
    }

    pub fn start_with(
        &self,
        options: &[&str],
        job: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Run {
        let mut command = self.command(options);
        if !job.is_empty() {
            command.arg("--").args(job);
        }
        self.spawn(command, change)
    }

    /// Starts a command that is, or becomes, a supervisor; its streams are those of `start`.
    pub fn spawn(&self, mut command: Command, change: impl FnOnce(&mut Command)) -> Run {
        let append = |name| {
            File::options()
                .create(true)
                .append(true)
                .open(self.file(name))
                .expect("a log")
        };
        command
            .stdin(Stdio::null())
            .stdout(append("out"))
            .stderr(append("err"));
        change(&mut command);
        Run::spawn(command, self.file("err"))
    }

    /// Starts a Python job: `script` is written to a file and run with `python3 -u`.
    pub fn start_python(&self, options: &[&str], script: &str) -> Run {
        self.start_python_with(options, script, |_| {})
    }

    /// Does the same with another environment.
    pub fn start_python_with(
        &self,
        options: &[&str],
        script: &str,
        change: impl FnOnce(&mut Command),
    ) -> Run {
        fs::write(self.file("job.py"), script).expect("the script is written");
        self.start_with(options, &["python3", "-u", "job.py"], change)
    }

    /// Starts a job that computes until there is a file `go`.
    pub fn start_ready(&self, options: &[&str]) -> Run {
        let run = self.start_python(options, UNTIL_GO);
        self.wait_for("out", "ready");
        run
    }

    /// Returns the output of a verb with `--json`.
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let output = self.verb(&[arguments, &["--json"]].concat());
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{arguments:?}: {error}: {}", stderr(&output)))
    }

    /// Requests a snapshot; returns the image's id.
    pub fn snapshot(&self) -> String {
        let output = self.verb(&["snapshot"]);
        assert!(
            output.status.success(),
            "snapshot failed: {}\n{}",
            stderr(&output),
            self.text("err")
        );
        String::from_utf8(output.stdout)
            .expect("an id")
            .trim()
            .to_owned()
    }

    /// Requests a snapshot that the job prevents until it sees the file `gate`, which is made after the first attempt.
    /// Returns what was said about the attempts.
    pub fn snapshot_at_a_later_attempt(&self, gate: &str) -> String {
        const AGAIN: &str = "the snapshot is taken again";
        let begun = self.text("err").len();
        let said = || self.text("err").split_off(begun);
        std::thread::scope(|scope| {
            let taken = scope.spawn(|| self.snapshot());
            wait_until("an attempt", || {
                said().contains(AGAIN) || taken.is_finished()
            });
            fs::write(self.file(gate), "").expect("a gate");
            taken.join().expect("a snapshot");
        });
        assert!(said().contains(AGAIN), "{}", said());
        said()
    }

    /// Lets a job continue that waits for a file `go`.
    pub fn go(&self) {
        fs::write(self.file("go"), "").expect("written");
    }

    /// Returns the output of `ckpt-run list --json`.
    pub fn images(&self) -> Vec<serde_json::Value> {
        let output = self.verb(&["list", "--json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// Waits until a file of the folder contains `text`.
    pub fn wait_for(&self, name: &str, text: &str) {
        wait_until(
            &format!(
                "{name} to hold {text:?}; it holds {:?}; err: {}",
                self.text(name),
                self.text("err")
            ),
            || self.text(name).contains(text),
        );
    }
}

/// Prints the end of CRIU's logs if the test fails.
impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for entry in fs::read_dir(self.file(".ckpt-run/logs"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let log = fs::read_to_string(entry.path()).unwrap_or_default();
            let tail = log.len().saturating_sub(LOG_TAIL_BYTES);
            let shown = String::from_utf8_lossy(&log.as_bytes()[tail..]).into_owned();
            eprintln!("--- {}\n{shown}", entry.path().display());
        }
    }
}

/// Length of the end of a CRIU log, which contains the reason.
const LOG_TAIL_BYTES: usize = 3000;
