//! Questions of the CRIU plugin to the supervisor: their settings in the environment, and the question before restored
//! tasks run.
//!
//! While CRIU restores, the sandbox's mounts do not follow symbolic links. The plugin reverts that when all tasks are
//! ready, and then waits for an answer.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::poll::PollTimeout;

use super::message::wait_readable;
use super::plugin::{PluginVariable, name};
use crate::mount_table::Mount;
use crate::plugin::variables;
use crate::plugin::variables::GO_ON;

/// Name of the socket for the question before restored tasks run.
const SOCKET: &str = "question.sock";
/// Names of the sockets for the other questions, which `src/plugin/question.rs` describes.
pub(super) const BEGIN_SOCKET: &str = "begin.sock";
pub(super) const FROZEN_SOCKET: &str = "frozen.sock";
pub(super) const HOLD_SOCKET: &str = "hold.sock";
pub(super) const RESTORED_SOCKET: &str = "restored.sock";
/// Folders in which the sandbox mounts its own file systems. CRIU needs the links in them.
const SANDBOX_FOLDERS: [&str; 3] = ["/proc", "/dev", "/sys"];
/// Mount option that disables symbolic links.
const NO_LINKS: &str = "nosymfollow";

/// Socket for the plugin's question.
#[derive(Debug)]
pub struct Question {
    listener: UnixListener,
    path: PathBuf,
}

impl Question {
    /// Binds the socket in `directory`.
    ///
    /// # Errors
    /// The socket cannot be bound.
    pub fn bind(directory: &Path) -> io::Result<Self> {
        let path = directory.join(SOCKET);
        Ok(Self {
            listener: UnixListener::bind(&path)?,
            path,
        })
    }

    /// Returns the variable that enables the question.
    #[must_use]
    pub fn variable(&self) -> PluginVariable {
        (name(variables::QUESTION), self.path.clone().into())
    }

    /// Waits for the question and answers it if `answer` succeeds. Otherwise CRIU waits until it is killed. Returns `None` if
    /// `cancel` became readable or was closed before the plugin asked.
    pub fn wait<E>(
        &self,
        cancel: &impl AsFd,
        answer: impl FnOnce() -> Result<(), E>,
    ) -> Option<Result<(), E>> {
        let waited = wait_readable([&self.listener, cancel], PollTimeout::NONE);
        if !waited.is_ok_and(|[asked, _]| asked) {
            return None;
        }
        let (mut plugin, _) = self.listener.accept().ok()?;
        let answered = answer();
        if answered.is_ok() {
            // A plugin that has exited needs no answer.
            let _ = plugin.write_all(&[GO_ON]);
        }
        Some(answered)
    }
}

/// Returns the variables for the questions during a dump, with sockets in this folder.
#[must_use]
pub fn asks_at_dump(folder: &Path) -> [PluginVariable; 3] {
    [
        (name(variables::BEGIN), folder.join(BEGIN_SOCKET).into()),
        (name(variables::FROZEN), folder.join(FROZEN_SOCKET).into()),
        (name(variables::DUMPED), folder.join(HOLD_SOCKET).into()),
    ]
}

/// Returns the variable for the question after a restore, with its socket in this folder.
#[must_use]
pub fn asks_when_restored(folder: &Path) -> PluginVariable {
    let socket = folder.join(RESTORED_SOCKET);
    (name(variables::RESTORED), socket.into())
}

/// Returns the variable that disables symbolic links on the mounts of a sandbox while CRIU restores. `sandbox` is the
/// host pid of its pid 1. Returns `None` if the kernel does not support that (before 5.14).
///
/// # Errors
/// The list of mounts cannot be read.
pub fn plugin_follows_no_links(sandbox: i32) -> io::Result<Option<PluginVariable>> {
    if !kernel_can() {
        return Ok(None);
    }
    let mut list = OsString::new();
    for mount in Mount::all_of(sandbox)? {
        let is_own = SANDBOX_FOLDERS
            .iter()
            .any(|own| mount.point.starts_with(own));
        if !is_own && !mount.has(NO_LINKS) {
            list.push(mount.point);
            list.push("\n");
        }
    }
    Ok(Some((name(variables::NO_LINKS), list)))
}

/// Returns true if the kernel supports `MOUNT_ATTR_NOSYMFOLLOW`.
fn kernel_can() -> bool {
    let about = nix::sys::utsname::uname();
    about.is_ok_and(|about| is_new_enough(&about.release().to_string_lossy()))
}

fn is_new_enough(release: &str) -> bool {
    let mut numbers = release.split(|char: char| !char.is_ascii_digit());
    let mut next = || numbers.next().and_then(|number| number.parse::<u32>().ok());
    (next(), next()) >= (Some(5), Some(14))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_plugin_is_answered_and_a_cancelled_wait_has_no_answer() {
        let folder = tempfile::tempdir().unwrap();
        let question = Question::bind(folder.path()).unwrap();
        let (mut plugin, (stop, stopped)) = (
            UnixStream::connect(folder.path().join(SOCKET)).unwrap(),
            UnixStream::pair().unwrap(),
        );
        let answered = question.wait(&stopped, || Ok::<(), ()>(()));
        assert_eq!(answered, Some(Ok(())));
        let mut word = [0];
        plugin.read_exact(&mut word).unwrap();
        let mut refused = UnixStream::connect(folder.path().join(SOCKET)).unwrap();
        assert_eq!(question.wait(&stopped, || Err(())), Some(Err(())));
        assert_eq!(refused.read(&mut word).unwrap(), 0, "no answer");
        drop(stop);
        assert_eq!(question.wait(&stopped, || Err(())), None);
    }

    /// Name of a test that runs in a separate process, which exits like CRIU's child for the action script.
    const CHILD: &str = "criu::question::tests::acts_as_the_script";

    #[test]
    fn the_plugin_asks_in_place_of_the_action_script() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join(BEGIN_SOCKET)).unwrap();
        // Either side may be faster: the supervisor answers and closes the connection immediately.
        for (action, word, code) in [
            ("pre-dump", Some(GO_ON), 0),
            ("pre-dump", Some(b'x'), 1),
            ("post-dump", None, 1),
            ("pre-resume", None, 0),
        ] {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child
                .args(["--exact", CHILD, "--ignored"])
                .env("CRTOOLS_SCRIPT_ACTION", action)
                .envs(asks_at_dump(folder.path()));
            let mut child = child.stdout(std::process::Stdio::null()).spawn().unwrap();
            if let Some(word) = word {
                listener.accept().unwrap().0.write_all(&[word]).unwrap();
            }
            assert_eq!(child.wait().unwrap().code(), Some(code), "{action}");
        }
    }

    #[test]
    #[ignore = "run by another test, with an environment"]
    #[allow(
        unsafe_code,
        reason = "the plugin is loaded and called as CRIU does it"
    )]
    fn acts_as_the_script() {
        type Execute = unsafe extern "C" fn(*const i8, *const *const i8) -> i32;
        if std::env::var_os("CRTOOLS_SCRIPT_ACTION").is_none() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        super::super::plugin::install_plugin(folder.path()).unwrap();
        let file = folder.path().join(super::super::plugin::NAME);
        // SAFETY: the library has no constructors.
        let library = unsafe { libloading::Library::new(file) }.unwrap();
        // SAFETY: the function has this type.
        let execute = *unsafe { library.get::<Execute>(b"execvp") }.unwrap();
        let none = std::ptr::null();
        // SAFETY: the name ends with a zero; without a program, its arguments are not read.
        unsafe { execute(variables::SCRIPT.as_ptr(), none) };
    }

    #[test]
    fn mount_points_are_those_of_the_kernel() {
        let own = i32::try_from(std::process::id()).unwrap();
        if let Some((_, list)) = plugin_follows_no_links(own).unwrap() {
            let list = list.to_string_lossy().into_owned();
            assert!(list.lines().any(|line| line == "/"), "{list}");
            assert!(
                !list.lines().any(|line| line.starts_with("/proc")),
                "{list}"
            );
        }
    }

    #[test]
    fn old_kernels_are_recognized_by_their_release() {
        for (release, expected) in [
            ("6.1.0-18-amd64", true),
            ("5.14.0-503.el9.x86_64", true),
            ("5.13.19", false),
            ("4.18.0-553.el8", false),
            ("", false),
        ] {
            assert_eq!(is_new_enough(release), expected, "{release}");
        }
    }
}
