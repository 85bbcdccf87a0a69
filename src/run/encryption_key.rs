//! The store's key, read from the source that the settings name: a file, or a command's output.
//!
//! The key is read before anything is changed and before the job exists. By the time the job starts, the file is closed
//! and the command has exited, so the job inherits neither; the key itself stays in this process. This module does not
//! know what the key is used for.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use zeroize::Zeroizing;

use crate::config::Encryption;
use crate::secret;
use crate::store::fs::durable::{self, DurableError};
use crate::store::{InvalidKey, Key};

/// Limit on the bytes of a key's text. A key in digits has a quarter of this; a longer text is not a key.
const KEY_TEXT_BYTES_MAX: usize = 256;
/// Limit on the run time of a key command: enough for a user to type a passphrase.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// The reason why there is no key. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read.
    #[error("cannot read the key file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The path is a folder, a pipe or a device.
    #[error(
        "cannot use the key file {path}: it is not a regular file; for other sources, use encryption.key_command"
    )]
    NotFile {
        /// The file.
        path: PathBuf,
    },
    /// Another user could replace the key.
    #[error(
        "cannot use the key file {path}: it belongs to user {owner}, not to you; run `chown` on it"
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// User id that owns the file.
        owner: u32,
    },
    /// Other users may have seen the key.
    #[error(
        "cannot use the key file {path}: other users may access it (mode {mode:04o}); run `chmod 600` on it"
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// The content is not a key.
    #[error("cannot use the key of {origin}")]
    Invalid {
        /// Source of the content.
        origin: String,
        /// The error in the content.
        source: InvalidKey,
    },
    /// The shell is missing, or cannot be waited for.
    #[error("cannot run the key command `{command}`")]
    Start {
        /// The command.
        command: String,
        /// The cause.
        source: io::Error,
    },
    /// The command failed; its stderr may show the reason.
    #[error("cannot get the key: `{command}` failed ({status})")]
    Failed {
        /// The command.
        command: String,
        /// The command's exit status.
        status: ExitStatus,
    },
    /// The command did not exit. Its shell was killed; processes started by the shell may still run.
    #[error("cannot get the key: `{command}` did not exit within {} s", limit.as_secs())]
    Silent {
        /// The command.
        command: String,
        /// The time limit.
        limit: Duration,
    },
    /// A file of that name exists, and was not changed.
    #[error("{0} exists and may be the key of a store: choose another name, or move the file away")]
    Exists(PathBuf),
    /// The new key's file cannot be created; an existing file was not changed.
    #[error("cannot create the key file {path}")]
    Create {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The new key's file may not survive a power failure.
    #[error(transparent)]
    Durable(#[from] DurableError),
}

/// Reads the key that the settings name; `None` if they name none.
///
/// # Errors
/// See [`KeyError`].
pub fn read_key(encryption: &Encryption) -> Result<Option<Key>, KeyError> {
    if *encryption != Encryption::Off
        && let Err(error) = secret::close_process()
    {
        tracing::warn!("a core dump of ckpt-run would hold the key: {error}");
    }
    match encryption {
        Encryption::Off => Ok(None),
        Encryption::KeyFile(path) => read_file(path).map(Some),
        Encryption::KeyCommand(command) => run_command(command, COMMAND_LIMIT).map(Some),
    }
}

/// Writes a new key to a file that must not exist yet, mode 0600, durably. Missing folders are created with mode 0700.
///
/// # Errors
/// [`KeyError::Exists`], [`KeyError::Create`] or [`KeyError::Durable`].
pub fn generate_key(path: &Path) -> Result<(), KeyError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists => KeyError::Exists(path.to_owned()),
        _ => KeyError::Create {
            path: path.to_owned(),
            source,
        },
    };
    let key = Key::generate().map_err(failed)?;
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(failed)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed)?;
    file.write_all(key.to_text().as_bytes())
        .and_then(|()| file.sync_all())
        .map_err(failed)?;
    Ok(durable::sync_folder(folder)?)
}

fn read_file(path: &Path) -> Result<Key, KeyError> {
    let failed = |source| KeyError::Read {
        path: path.to_owned(),
        source,
    };
    // Opening a fifo of that name must not block.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits())
        .open(path)
        .map_err(failed)?;
    check_access(path, &file)?;
    let text = read_text(file).map_err(failed)?;
    parse(&text, || path.display().to_string())
}

/// Checks the open file, not the path: the file cannot be replaced in between.
fn check_access(path: &Path, file: &File) -> Result<(), KeyError> {
    let found = file.metadata().map_err(|source| KeyError::Read {
        path: path.to_owned(),
        source,
    })?;
    let path = || path.to_owned();
    if !found.is_file() {
        return Err(KeyError::NotFile { path: path() });
    }
    let owner = found.uid();
    if owner != 0 && owner != nix::unistd::geteuid().as_raw() {
        return Err(KeyError::Owner {
            path: path(),
            owner,
        });
    }
    // A file of root may be readable by its group, which is how root shares it. The group of a user's file may contain
    // every user.
    let closed = if owner == 0 { 0o037 } else { 0o077 };
    let mode = found.mode() & 0o7777;
    if mode & closed != 0 {
        return Err(KeyError::Exposed { path: path(), mode });
    }
    Ok(())
}

/// Runs the command in a separate shell, with ckpt-run's environment and stderr.
fn run_command(command: &str, limit: Duration) -> Result<Key, KeyError> {
    let failed = |source| KeyError::Start {
        command: command.to_owned(),
        source,
    };
    let mut child = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let text = answer(&mut child, limit);
    if !matches!(text, Ok(Some(_))) {
        let _ = child.kill(); // it may have exited by itself
    }
    let status = child.wait().map_err(failed)?;
    let text = text.map_err(failed)?.ok_or_else(|| KeyError::Silent {
        command: command.to_owned(),
        limit,
    })?;
    if !status.success() {
        return Err(KeyError::Failed {
            command: command.to_owned(),
            status,
        });
    }
    parse(&text, || format!("`{command}`"))
}

/// Returns the child's output until its exit; `None` if it does not exit within the limit. The child is not reaped, so
/// its pid is not reused.
fn answer(child: &mut Child, limit: Duration) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
    let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    let (sender, answer) = mpsc::channel();
    let listen = move || {
        // After the limit there is no receiver any more.
        let _ = sender.send(listen(stdout, Pid::from_raw(pid)));
    };
    thread::Builder::new()
        .name("key".to_owned())
        .spawn(listen)?;
    answer.recv_timeout(limit).ok().transpose()
}

/// Reads the output to its end, then waits for the child's exit.
fn listen(stdout: ChildStdout, pid: Pid) -> io::Result<Zeroizing<Vec<u8>>> {
    let text = read_text(stdout)?;
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)?;
    Ok(text)
}

/// Reads everything, up to the length that shows that the text is too long.
fn read_text(source: impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
    // With spare capacity: a vector that grows leaves a copy of the key in freed memory.
    let mut text = Zeroizing::new(Vec::with_capacity(2 * KEY_TEXT_BYTES_MAX));
    source
        .take(KEY_TEXT_BYTES_MAX as u64)
        .read_to_end(&mut text)?;
    Ok(text)
}

fn parse(text: &[u8], origin: impl Fn() -> String) -> Result<Key, KeyError> {
    Key::parse(text).map_err(|source| KeyError::Invalid {
        origin: origin(),
        source,
    })
}

#[cfg(test)]
mod tests {
    //! Tests of the sources of keys, and of the refused ones.

    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    /// Limit far above the run time of any of these commands.
    const LIMIT: Duration = Duration::from_secs(60);

    fn file(mode: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        generate_key(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        (folder, path)
    }

    #[test]
    fn folders_of_a_key_are_made_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("config/ckpt-run");
        generate_key(&made.join("key")).unwrap();
        for folder in [&*made, made.parent().unwrap()] {
            let mode = fs::metadata(folder).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700);
        }
    }

    fn text(key: &Key) -> String {
        key.to_text().to_string()
    }

    #[test]
    fn a_generated_key_is_private_and_is_read_again() {
        let (_folder, path) = file(0o600);
        // `read_key` would close this process, and other tests could no longer read its files in `/proc`.
        let key = read_file(&path).unwrap();
        assert_eq!(text(&key), fs::read_to_string(&path).unwrap());
        let error = generate_key(&path).unwrap_err();
        assert!(matches!(error, KeyError::Exists(_)), "{error}");
        assert_eq!(text(&key), fs::read_to_string(&path).unwrap());
        let (_folder, fresh) = file(0o400);
        assert_ne!(text(&read_file(&fresh).unwrap()), text(&key));
        assert!(read_key(&Encryption::Off).unwrap().is_none());
    }

    #[test]
    fn a_key_file_that_others_may_use_is_refused() {
        let us = nix::unistd::geteuid();
        // A file owned by root may be open to its group.
        let of_group = if us.is_root() { 0o660 } else { 0o640 };
        for mode in [0o604, 0o602, 0o620, 0o610, of_group, 0o777] {
            let (_folder, path) = file(mode);
            let error = read_file(&path).unwrap_err();
            assert!(
                matches!(error, KeyError::Exposed { .. }),
                "{mode:o}: {error}"
            );
        }
        if !us.is_root() {
            eprintln!("skipped: only root can give a file away");
            return;
        }
        let (_folder, path) = file(0o640);
        read_file(&path).unwrap();
        let (_folder, path) = file(0o600);
        chown(&path, Some(12345), None).unwrap();
        let error = read_file(&path).unwrap_err();
        assert!(
            matches!(error, KeyError::Owner { owner: 12345, .. }),
            "{error}"
        );
    }

    #[test]
    fn non_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
        for path in [fifo.as_path(), folder.path(), Path::new("/dev/zero")] {
            let error = read_file(path).unwrap_err();
            assert!(matches!(error, KeyError::NotFile { .. }), "{error}");
        }
        let error = read_file(Path::new("/no/such/key")).unwrap_err();
        assert!(matches!(error, KeyError::Read { .. }), "{error}");
    }

    #[test]
    fn invalid_key_file_is_reported_without_its_content() {
        let (_folder, path) = file(0o600);
        for content in ["", "hunter2", &"hunter2".repeat(1 << 20)] {
            fs::write(&path, content).unwrap();
            let error = read_file(&path).unwrap_err();
            assert!(matches!(error, KeyError::Invalid { .. }), "{error}");
            assert!(!format!("{error:?}").contains("hunter"), "{error:?}");
        }
    }

    #[test]
    fn a_command_prints_the_key() {
        let (_folder, path) = file(0o600);
        let key = read_file(&path).unwrap();
        let shown = run_command(&format!("cat '{}'", path.display()), LIMIT).unwrap();
        assert_eq!(text(&shown), text(&key));
        let piped = format!("cat && printf {} | cat", text(&key).trim());
        assert_eq!(text(&run_command(&piped, LIMIT).unwrap()), text(&key));
    }

    #[test]
    fn a_command_that_fails_prints_nothing_or_too_much_is_refused() {
        let key = Key::generate().unwrap().to_text().trim().to_owned();
        let run = |command: &str| run_command(command, LIMIT).unwrap_err();
        let error = run(&format!("echo {key}; exit 3"));
        assert!(matches!(&error, KeyError::Failed { status, .. } if status.code() == Some(3)));
        for command in ["true", "echo hunter2", &format!("echo {key}; echo {key}")] {
            let error = run(command);
            assert!(
                matches!(error, KeyError::Invalid { .. }),
                "{command}: {error}"
            );
        }
        assert!(matches!(run("exec yes"), KeyError::Failed { .. }));
    }

    #[test]
    fn a_command_that_does_not_end_is_killed() {
        let limit = Duration::from_millis(200);
        for command in ["exec sleep 1000", "exec >&-; exec sleep 1000"] {
            let error = run_command(command, limit).unwrap_err();
            assert!(
                matches!(error, KeyError::Silent { .. }),
                "{command}: {error}"
            );
        }
    }
}
