//! Trial: an ordinary supervisor as a child process, with its own store in a temporary folder. On drop it is ended and
//! leaves nothing outside of that folder.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::RehearsalError;
use super::before_kill::Part;
use crate::clock;
use crate::config::{Loaded, Override};
use crate::history::{self, Event};
use crate::run::remove_work_folder;
use crate::trust::Variable;

/// Prefix of the folder's name; it begins with a dot because the job may list its folder.
pub(super) const FOLDER_PREFIX: &str = ".ckpt-run-rehearsal-";
/// Option that ends the supervisor if ckpt-run's rehearsal is killed.
const END_WITH_PARENT: &str = "--end-with-parent";
/// Option that keeps the supervisor's messages out of the job's stderr.
const MESSAGES: &str = "--messages";
/// Time between two checks of the trial: too short to be noticed, and a small load on one CPU.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Settings of every trial: snapshots are taken only on request, and nothing outside of the trial's folder is written
/// to. No hook may notify other programs, and the rehearsal itself watches for a time without output.
const TRIAL: [(&str, &str); 25] = [
    ("tty", "false"),
    ("snapshot.interval", "never"),
    ("snapshot.grace", "0s"),
    ("restart.max", "1"),
    // Time between the kill and the restore, in which the output before the kill is read.
    ("restart.backoff", "500ms"),
    ("restart.backoff_max", "500ms"),
    ("restart.prevent", ""),
    ("restart.without_image", "give-up"),
    ("hang.output", "off"),
    ("hang.gpu", "off"),
    ("hang.cpu", "off"),
    ("hang.heartbeat", ""),
    ("hooks.before_snapshot", ""),
    ("hooks.after_snapshot", ""),
    ("hooks.after_restore", ""),
    ("hooks.on_give_up", ""),
    ("hooks.on_hang", ""),
    ("log.level", "warn"),
    ("log.events", ""),
    ("remote.url", ""),
    ("store_shared", "no"),
    ("preemption.watch", "off"),
    ("metrics.textfile", ""),
    ("metrics.listen", ""),
    ("metrics.allow_remote", "false"),
];
/// Limit on the exit of a supervisor that has nothing to save. A driver call that it waits for may take longer.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Maximum output before the snapshot that is compared again after the restore.
const OLD_BYTES_MAX: u64 = 64 << 10;
/// Maximum output after the snapshot that is compared: as much as a supervisor compares.
const NEW_BYTES_MAX: u64 = 4 << 20;
/// Maximum output that is passed on at a time.
const SHOWN_BYTES_MAX: u64 = 64 << 10;
/// Length of the end of the messages in which a reason is looked for.
const TAIL_BYTES_MAX: u64 = 4 << 10;

/// The parts of a trial.
pub(super) struct Setup<'a> {
    /// ckpt-run's own program.
    pub program: &'a Path,
    /// The user's settings.
    pub settings: &'a Loaded,
    /// The job's command line.
    pub command: &'a [OsString],
    /// Folder of the store, the logs and the output. It is the caller's, and outlives the trial.
    pub folder: &'a Path,
    /// Working folder of the job; `None` for that of ckpt-run.
    pub directory: Option<&'a Path>,
    /// Variable for ckpt-run.
    pub variable: Option<Variable>,
    /// Reaction to the job's crash.
    pub after_crash: AfterCrash,
    /// Destination of a copy of the job's output and the supervisor's messages, besides their files.
    pub show: Option<Box<dyn Write + 'a>>,
    /// Number of the signal that requested the end of the rehearsal, if any.
    pub interrupted: &'a dyn Fn() -> Option<i32>,
}

/// Reaction of the trial's supervisor to a crash of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterCrash {
    /// The job is restored, once.
    Restore,
    /// The supervisor ends.
    End,
}

/// The author of lines in the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speaker {
    /// The job, on its stderr.
    Job,
    /// The trial's supervisor.
    Supervisor,
}

/// A supervisor under trial. When dropped, it is ended.
pub(super) struct Trial<'a> {
    folder: PathBuf,
    child: Child,
    ended: Option<ExitStatus>,
    /// Number of crashes that the rehearsal caused.
    pub crashes_known: usize,
    show: Option<Box<dyn Write + 'a>>,
    shown: [u64; 3],
    interrupted: &'a dyn Fn() -> Option<i32>,
}

impl<'a> Trial<'a> {
    /// Starts the supervisor and, through it, the job. Must be called from the main thread: the supervisor ends with
    /// the thread that started it.
    pub(super) fn start(setup: Setup<'a>) -> Result<Self, RehearsalError> {
        let folder = setup.folder.to_owned();
        let settings = folder.join("config.toml");
        let store = folder.join("store");
        private_file(&settings)
            .and_then(|mut file| {
                let settings = for_trial(setup.settings, &store, setup.after_crash);
                file.write_all(settings.to_toml().as_bytes())
            })
            .map_err(file_error(&settings))?;
        let [stdout, stderr, messages] = shown_paths(&folder);
        let open = |path: &Path| private_file(path).map_err(file_error(path));
        open(&messages)?;
        let mut command = Command::new(setup.program);
        command
            .arg("--config")
            .arg(&settings)
            .args(["run", END_WITH_PARENT, MESSAGES])
            .arg(&messages)
            .arg("--")
            .args(setup.command)
            .stdin(stdin())
            .stdout(open(&stdout)?)
            .stderr(open(&stderr)?)
            // Ctrl-C is meant for the rehearsal, which ends the supervisor.
            .process_group(0);
        if let Some(directory) = setup.directory {
            command.current_dir(directory).env("PWD", directory);
        }
        command.envs(setup.variable);
        for (name, _) in std::env::vars_os() {
            // All settings are in the file, and the rehearsal is not the service that systemd waits for.
            if name.as_encoded_bytes().starts_with(b"CKPT_RUN_") || name == "NOTIFY_SOCKET" {
                command.env_remove(name);
            }
        }
        let child = command.spawn().map_err(|source| RehearsalError::Start {
            program: setup.program.to_owned(),
            source,
        })?;
        Ok(Self {
            folder,
            child,
            ended: None,
            crashes_known: 0,
            show: setup.show,
            shown: [0; 3],
            interrupted: setup.interrupted,
        })
    }

    /// Returns the paths of the job's stdout and stderr.
    pub(super) fn outputs(&self) -> [PathBuf; 2] {
        output_paths(&self.folder)
    }

    pub(super) fn store(&self) -> PathBuf {
        self.folder.join("store")
    }

    /// Returns the events in the event log.
    pub(super) fn events(&self) -> Vec<Event> {
        let entries = history::entries(&history::path(&self.store()));
        entries.map(|entry| entry.event).collect()
    }

    /// Returns true if the supervisor has exited.
    pub(super) fn has_ended(&mut self) -> Result<bool, RehearsalError> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().map_err(RehearsalError::Wait)?;
        }
        Ok(self.ended.is_some())
    }

    /// Polls the trial until `look` returns an answer; `None` if there was none within the limit.
    pub(super) fn wait<T>(
        &mut self,
        limit: Duration,
        mut look: impl FnMut(&mut Self) -> Result<Option<T>, RehearsalError>,
    ) -> Result<Option<T>, RehearsalError> {
        let begun = clock::now();
        loop {
            if let Some(signal) = (self.interrupted)() {
                return Err(RehearsalError::Interrupted(signal));
            }
            self.show();
            if let Some(answer) = look(self)? {
                return Ok(Some(answer));
            }
            if begun.elapsed() >= limit {
                return Ok(None);
            }
            thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Returns the number of bytes that the job has written to stdout and to stderr.
    pub(super) fn output_bytes(&self) -> [u64; 2] {
        output_paths(&self.folder)
            .map(|path| fs::metadata(path).map_or(0, |metadata| metadata.len()))
    }

    /// Reads stdout and stderr around these places.
    pub(super) fn output_around(&self, places: [u64; 2]) -> Result<[Part; 2], RehearsalError> {
        let [stdout, stderr] = output_paths(&self.folder);
        let read = |path: &Path, place: u64| {
            let begin = place.saturating_sub(OLD_BYTES_MAX);
            let part = bytes(path, begin, place - begin)
                .and_then(|old| bytes(path, place, NEW_BYTES_MAX).map(|new| Part { old, new }));
            part.map_err(file_error(path))
        };
        Ok([read(&stdout, places[0])?, read(&stderr, places[1])?])
    }

    /// Returns the last lines of the job's stderr, or of the supervisor's messages, joined.
    pub(super) fn last_words(&self, speaker: Speaker) -> Option<String> {
        const LINES: usize = 3;
        let [_, stderr, messages] = shown_paths(&self.folder);
        // The supervisor writes its last message to stderr.
        let paths = [
            Some(messages).filter(|_| speaker == Speaker::Supervisor),
            Some(stderr),
        ];
        let tails = paths.iter().flatten().map(|path| tail(path));
        let tail: Vec<u8> = tails.collect::<io::Result<Vec<_>>>().ok()?.concat();
        let tail = String::from_utf8_lossy(&tail);
        let wanted = |line: &&str| {
            let is_ours = line.starts_with("ckpt-run: ");
            !line.trim().is_empty() && is_ours == (speaker == Speaker::Supervisor)
        };
        let mut lines: Vec<&str> = tail.lines().rev().filter(wanted).take(LINES).collect();
        lines.reverse();
        let lines = lines
            .iter()
            .map(|line| line.trim_start_matches("ckpt-run: "));
        let words = lines.collect::<Vec<_>>().join(" / ");
        (!words.is_empty()).then_some(words)
    }

    /// Passes new output on. Output that is repeated after a restore is passed on once.
    fn show(&mut self) {
        let Some(show) = &mut self.show else { return };
        for (path, shown) in shown_paths(&self.folder).iter().zip(&mut self.shown) {
            let new = bytes(path, *shown, SHOWN_BYTES_MAX).unwrap_or_default();
            *shown += new.len() as u64;
            // An error is ignored: a reader that has closed its end does not want the output.
            let _ = show.write_all(&new);
        }
    }

    /// Ends the supervisor and the job.
    pub(super) fn end(mut self) {
        self.stop();
        self.show();
    }

    fn stop(&mut self) {
        if self.ended.is_some() {
            return;
        }
        let pid = i32::try_from(self.child.id()).ok().map(Pid::from_raw);
        if let Some(pid) = pid {
            // The supervisor has no grace time for a snapshot, so it ends the job at once.
            let _ = kill(pid, Signal::SIGTERM);
        }
        let begun = clock::now();
        while begun.elapsed() < END_LIMIT {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(LOOK_INTERVAL),
                Ok(Some(status)) => {
                    self.ended = Some(status);
                    return;
                }
                Err(_) => break,
            }
        }
        // The job and its sandbox are killed with the supervisor.
        let _ = self.child.kill();
        self.ended = self.child.wait().ok();
        remove_work_folder(&self.store());
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the user's settings for a trial whose store is `store`.
fn for_trial(settings: &Loaded, store: &Path, after_crash: AfterCrash) -> Loaded {
    let policy = match after_crash {
        AfterCrash::Restore => "on-failure",
        AfterCrash::End => "no",
    };
    let (store, keep_last) = (
        store.to_string_lossy(),
        settings.config.retention.keep_last.max(2).to_string(),
    );
    let exclude = exclude(settings, Path::new(store.as_ref()));
    let own = [
        ("files.exclude", exclude.as_str()),
        ("store", store.as_ref()),
        ("retention.keep_last", &keep_last),
        ("restart.policy", policy),
    ];
    let own: Vec<Override> = TRIAL
        .into_iter()
        .chain(own)
        .map(|(key, value)| Override {
            key,
            flag: "rehearsal",
            value: value.to_owned(),
        })
        .collect();
    settings
        .with(&own)
        .expect("the settings of a trial are valid")
}

/// Returns the user's patterns of files that are never put back, and one for the trial's own files beside its store:
/// without fanotify, these could count as files of the job. The patterns are separated by commas.
fn exclude(settings: &Loaded, store: &Path) -> String {
    let mut patterns = settings.config.files.exclude.clone();
    let folder = store.parent().unwrap_or(store).to_string_lossy();
    patterns.push(globset::escape(&folder));
    if patterns.iter().any(|pattern| pattern.contains(',')) {
        patterns.pop();
    }
    patterns.join(",")
}

/// Creates the folder of a trial: in `parent`, or else beside the store, so that the images are on the same disk as real
/// ones.
pub(super) fn folder(store: &Path, parent: Option<&Path>) -> Result<TempDir, RehearsalError> {
    let store = std::path::absolute(store).map_err(file_error(store))?;
    let mut folders = parent.into_iter().chain(store.ancestors().skip(1));
    let parent = folders.find(|folder| folder.is_dir());
    let parent = parent.unwrap_or(Path::new("/"));
    tempfile::Builder::new()
        .prefix(FOLDER_PREFIX)
        .tempdir_in(parent)
        .map_err(|source| RehearsalError::Folder {
            parent: parent.to_owned(),
            source,
        })
}

fn output_paths(folder: &Path) -> [PathBuf; 2] {
    ["stdout", "stderr"].map(|name| folder.join(name))
}

/// Returns the paths of the job's output and of the supervisor's messages.
fn shown_paths(folder: &Path) -> [PathBuf; 3] {
    let [stdout, stderr] = output_paths(folder);
    [stdout, stderr, folder.join("messages")]
}

fn private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Opens a file on ckpt-run's stdin again, so that each run reads it from the same place. A pipe or a terminal can be
/// read once only, and the job gets neither.
fn stdin() -> Stdio {
    let reopened = || -> io::Result<File> {
        let own = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        if !own.metadata()?.is_file() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut file = File::open("/proc/self/fd/0")?;
        file.seek(SeekFrom::Start((&own).stream_position()?))?;
        Ok(file)
    };
    reopened().map_or_else(|_| Stdio::null(), Stdio::from)
}

fn bytes(path: &Path, begin: u64, most: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(begin))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn tail(path: &Path) -> io::Result<Vec<u8>> {
    let begin = fs::metadata(path)?.len().saturating_sub(TAIL_BYTES_MAX);
    bytes(path, begin, TAIL_BYTES_MAX)
}

pub(super) fn file_error(path: &Path) -> impl FnOnce(io::Error) -> RehearsalError {
    let path = path.to_owned();
    move |source| RehearsalError::File { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, Metrics, ProjectFile, Sources};

    #[test]
    fn trial_uses_the_users_settings_but_not_the_store() {
        let place = tempfile::tempdir().unwrap();
        let load = |text: &str| {
            let path = place.path().join("config.toml");
            fs::write(&path, text).unwrap();
            let sources = Sources {
                system: "/nonexistent".into(),
                user: None,
                project: ProjectFile::Named(path),
                environment: Vec::new(),
                overrides: Vec::new(),
            };
            config::load(&sources).unwrap()
        };
        let users = load(
            "[snapshot]\ncron = '@daily'\n[files]\nkeep_content = '4711B'\n[log]\nevents = '/events'\n\
             [metrics]\ntextfile = '/x.prom'\n[hooks]\non_hang = 'notify'\n[hang]\noutput = '1m'",
        );
        let trial = for_trial(&users, Path::new("/t/store"), AfterCrash::Restore);
        let settings = &trial.config;
        assert_eq!(settings.files.keep_content, 4711);
        assert_eq!(settings.store, Path::new("/t/store"));
        assert!(settings.files.exclude.contains(&"/t".to_owned()));
        assert_eq!(settings.snapshot.cron, None);
        assert_eq!(
            (&settings.log.events, &settings.metrics),
            (&None, &Metrics::default())
        );
        let own = Loaded::default().config;
        assert_eq!((&settings.hooks, &settings.hang), (&own.hooks, &own.hang));
        assert_eq!(load(&trial.to_toml()).config, trial.config);
    }

    #[test]
    fn folder_is_beside_the_store_even_before_it_exists() {
        let place = tempfile::tempdir().unwrap();
        let made = folder(&place.path().join("not/yet/there"), None).unwrap();
        assert_eq!(made.path().parent(), Some(place.path()));
    }
}
