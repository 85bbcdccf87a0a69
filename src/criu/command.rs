//! CRIU's command lines for a dump and a restore.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::plugin::variables::SCRIPT;

/// Options of a dump.
#[derive(Clone, Copy, Debug)]
pub struct DumpOptions<'a> {
    /// First process of the tree, as the sandbox sees it.
    pub root_pid: i32,
    /// Folder of the stream's sockets.
    pub directory: &'a Path,
    /// Path of CRIU's log.
    pub log: &'a Path,
    /// Folder of ckpt-run's plugin. CRIU loads no plugins of the system.
    pub libdir: &'a Path,
    /// Verbosity, 0 to 4.
    pub log_level: u8,
    /// Terminals of ckpt-run that the job has open.
    pub external: &'a [Inherited],
    /// Treatment of connections that a listening socket has not accepted yet.
    pub unaccepted: Unaccepted,
    /// Treatment of sockets that are one end of a TCP connection.
    pub tcp: Tcp,
    /// CRIU has no privileges on the machine.
    pub unprivileged: bool,
}

/// Treatment of connections that a listening socket has not accepted yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unaccepted {
    /// CRIU refuses to dump.
    Refused,
    /// CRIU leaves the connections out. A restored listening socket has none.
    LeftOut,
}

/// A pipe or terminal of ckpt-run that the job had open at the dump. A restore replaces it by another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inherited {
    /// A pipe, by inode.
    Pipe(u64),
    /// A terminal.
    Terminal {
        /// Number of the device.
        device: u64,
        /// Number of the file system with the device file.
        filesystem: u64,
    },
}

impl fmt::Display for Inherited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pipe(inode) => write!(f, "pipe:[{inode}]"),
            Self::Terminal { device, filesystem } => write!(f, "tty[{device:x}:{filesystem:x}]"),
        }
    }
}

/// Treatment of established TCP connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tcp {
    /// They are connected again. Needs their local addresses, and at the dump and the restore `CAP_NET_ADMIN` over the
    /// network.
    Established,
    /// They are not connected. An image without them has to be restored without them.
    Closed,
}

/// Source of the image for a restore.
#[derive(Clone, Copy, Debug)]
pub enum ImageSource<'a> {
    /// The stream with its socket in this folder.
    Stream(&'a Path),
    /// Files in this folder. CRIU frees their pages as it reads them.
    Files(&'a Path),
}

/// Options of a restore.
#[derive(Clone, Copy, Debug)]
pub struct RestoreOptions<'a> {
    /// Source of the image.
    pub source: ImageSource<'a>,
    /// Path of CRIU's log.
    pub log: &'a Path,
    /// Folder of ckpt-run's plugin. CRIU loads no plugins of the system.
    pub libdir: &'a Path,
    /// Verbosity, 0 to 4.
    pub log_level: u8,
    /// Treatment of all established TCP connections.
    pub tcp: Tcp,
    /// True if the plugin asks for permission when everything is restored.
    pub asks: bool,
    /// CRIU has no privileges on the machine.
    pub unprivileged: bool,
    /// Descriptors that the job had open at the dump, and CRIU's descriptor that takes the place of each.
    pub inherited: &'a [(Inherited, i32)],
}

/// Time limit for CRIU in seconds: for freezing the tasks, and for each step of a dump.
const CRIU_TIMEOUT_SECONDS: &str = "60";
/// Size limit for unlinked files whose content CRIU saves (CRIU's default is 1 MiB).
const GHOST_BYTES_MAX: &str = "4294967295";

/// Returns the arguments of `criu dump`. The tasks continue afterwards.
#[must_use]
pub fn dump_arguments(options: &DumpOptions<'_>) -> Vec<OsString> {
    let mut arguments = common(
        "dump",
        ImageSource::Stream(options.directory),
        options.log,
        options.libdir,
        options.log_level,
    );
    push(
        &mut arguments,
        &[
            OsStr::new("--tree"),
            OsStr::new(&options.root_pid.to_string()),
            OsStr::new("--leave-running"),
            // The supervisor holds packets back itself if any are in transit.
            OsStr::new("--network-lock"),
            OsStr::new("skip"),
            OsStr::new("--timeout"),
            OsStr::new(CRIU_TIMEOUT_SECONDS),
            OsStr::new("--link-remap"),
            // The supervisor compares a sample of the content. For a build ID, CRIU opens and maps every file, 5 to 10 µs
            // for each.
            OsStr::new("--file-validation"),
            OsStr::new("filesize"),
            OsStr::new("--ghost-limit"),
            OsStr::new(GHOST_BYTES_MAX),
            OsStr::new("--action-script"),
            script(),
        ],
    );
    match options.unaccepted {
        Unaccepted::Refused => {}
        Unaccepted::LeftOut => push(&mut arguments, &[OsStr::new("--skip-in-flight")]),
    }
    push_tcp(&mut arguments, options.tcp);
    push_unprivileged(&mut arguments, options.unprivileged);
    for terminal in options.external {
        push(
            &mut arguments,
            &[OsStr::new("--external"), OsStr::new(&terminal.to_string())],
        );
    }
    arguments
}

/// Returns the arguments of `criu restore`. CRIU exits when the tasks run as children of CRIU's own parent.
#[must_use]
pub fn restore_arguments(options: &RestoreOptions<'_>) -> Vec<OsString> {
    let mut arguments = common(
        "restore",
        options.source,
        options.log,
        options.libdir,
        options.log_level,
    );
    push(
        &mut arguments,
        &[
            OsStr::new("--restore-detached"),
            OsStr::new("--restore-sibling"),
        ],
    );
    push_tcp(&mut arguments, options.tcp);
    push_unprivileged(&mut arguments, options.unprivileged);
    if options.asks {
        push(&mut arguments, &[OsStr::new("--action-script"), script()]);
    }
    for (inherited, descriptor) in options.inherited {
        push(
            &mut arguments,
            &[
                OsStr::new("--inherit-fd"),
                OsStr::new(&format!("fd[{descriptor}]:{inherited}")),
            ],
        );
    }
    arguments
}

fn common(
    verb: &str,
    source: ImageSource<'_>,
    log: &Path,
    libdir: &Path,
    log_level: u8,
) -> Vec<OsString> {
    let mut arguments = vec![OsString::from(verb)];
    let (way, directory) = match source {
        ImageSource::Stream(directory) => ("--stream", directory),
        ImageSource::Files(directory) => ("--auto-dedup", directory),
    };
    push(
        &mut arguments,
        &[
            OsStr::new(way),
            OsStr::new("--images-dir"),
            directory.as_os_str(),
            OsStr::new("--log-file"),
            log.as_os_str(),
            OsStr::new(&format!("-v{log_level}")),
            OsStr::new("--libdir"),
            libdir.as_os_str(),
            // The job stays in the supervisor's cgroup, also after a restore.
            OsStr::new("--manage-cgroups=ignore"),
            OsStr::new("--tcp-established"),
            OsStr::new("--file-locks"),
        ],
    );
    arguments
}

/// Returns the name of the action script. The plugin asks its question instead of starting a script.
fn script() -> &'static OsStr {
    OsStr::from_bytes(SCRIPT.to_bytes())
}

fn push_tcp(arguments: &mut Vec<OsString>, tcp: Tcp) {
    match tcp {
        Tcp::Established => {}
        // CRIU (4.2.1) looks at this option before the other.
        Tcp::Closed => push(arguments, &[OsStr::new("--tcp-close")]),
    }
}

fn push_unprivileged(arguments: &mut Vec<OsString>, unprivileged: bool) {
    if unprivileged {
        push(arguments, &[OsStr::new("--unprivileged")]);
    }
}

fn push(arguments: &mut Vec<OsString>, more: &[&OsStr]) {
    arguments.extend(more.iter().map(|one| (*one).to_owned()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restored_pipe_or_terminal_has_its_name_from_the_dump() {
        let path = Path::new("/x");
        let terminal = Inherited::Terminal {
            device: 0x8805,
            filesystem: 0x19,
        };
        let options = RestoreOptions {
            source: ImageSource::Stream(path),
            log: path,
            libdir: path,
            log_level: 2,
            tcp: Tcp::Established,
            asks: false,
            unprivileged: false,
            inherited: &[(Inherited::Pipe(4711), 200), (terminal, 201)],
        };
        let arguments = restore_arguments(&options);
        let named: Vec<_> = arguments
            .windows(2)
            .filter(|pair| pair[0] == "--inherit-fd")
            .map(|pair| pair[1].clone())
            .collect();
        assert_eq!(named, ["fd[200]:pipe:[4711]", "fd[201]:tty[8805:19]"]);
    }
}
