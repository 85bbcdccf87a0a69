//! Installation of the CRIU plugin that is embedded in the program, and its settings in CRIU's environment.
//!
//! CRIU loads every `*.so` in a given folder (`--libdir`). ckpt-run gives it a private folder with only this file, so
//! that no plugin of the system affects the job. The source of the plugin is in `src/plugin`.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use super::Version;
#[cfg(test)]
use crate::plugin::hooks;
use crate::plugin::variables;

/// The plugin, compiled by `build.rs`.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ckpt-run-plugin.so"));
/// File name of the plugin. CRIU loads files ending in `.so`.
pub(super) const NAME: &str = "ckpt-run.so";
/// First CRIU that calls `RESTORE_EXT_FILE` with a second argument: 4.2.1 does not, its development branch does.
const RETRY_SINCE: Version = Version {
    major: 4,
    minor: 3,
    patch: 0,
};

/// A variable of a tool's environment.
pub type PluginVariable = (OsString, OsString);

/// Writes the plugin into the folder, which must be inaccessible to other users because CRIU runs its content as root.
///
/// # Errors
/// The file already exists or cannot be written.
pub fn install_plugin(folder: &Path) -> io::Result<()> {
    File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(folder.join(NAME))?
        .write_all(LIBRARY)
}

/// Returns the variable for a dump. The plugin handles character devices with these major numbers, and no other files.
#[must_use]
pub fn plugin_takes(majors: &[u32]) -> PluginVariable {
    let list: Vec<String> = majors.iter().map(ToString::to_string).collect();
    (name(variables::MAJORS), list.join(" ").into())
}

/// Returns the variable for a dump of a job that has not been stopped for so long. Waits that are not longer have not been
/// repeated before.
#[must_use]
pub fn plugin_repeats(undisturbed: Duration) -> PluginVariable {
    let limit = u32::try_from(undisturbed.as_millis()).unwrap_or(u32::MAX);
    (name(variables::WAIT_MS), limit.to_string().into())
}

/// Returns the variable for a CRIU that may not suspend filters, in a sandbox that has installed so many for the job.
#[must_use]
pub fn plugin_leaves_filters(of_sandbox: u32) -> PluginVariable {
    (name(variables::FILTERS), of_sandbox.to_string().into())
}

/// Returns the variable for a dump of a job with a PID namespace of its own.
#[must_use]
pub fn plugin_numbers() -> PluginVariable {
    (name(variables::NUMBERS), "1".into())
}

/// Returns the variable that makes restored threads make system calls before they run, if there are any. A value that
/// is `None` is not set.
#[must_use]
pub fn plugin_calls(
    calls: impl Iterator<Item = (i32, Option<u32>, Option<(u32, u64)>)>,
) -> Option<PluginVariable> {
    let none = || u32::MAX.to_string();
    let entry = |(thread, personality, policy): (i32, Option<u32>, Option<(u32, u64)>)| {
        let personality = personality.map_or_else(none, |it| it.to_string());
        let (mode, nodes) =
            policy.map_or_else(|| (none(), 0), |(mode, set)| (mode.to_string(), set));
        let (low, high) = (nodes & u64::from(u32::MAX), nodes >> 32);
        format!("{thread} {personality} {mode} {low} {high}")
    };
    let list: Vec<String> = calls.map(entry).collect();
    (!list.is_empty()).then(|| (name(variables::CALLS), list.join(";").into()))
}

/// Returns the variable with exit codes of processes that had ended at the dump, or with the signals that had killed them
/// (true), by pids as seen by CRIU, if there are any.
#[must_use]
pub fn plugin_ends(codes: impl Iterator<Item = (i32, u8, bool)>) -> Option<PluginVariable> {
    let entry = |(pid, code, by_signal): (i32, u8, bool)| {
        let added = if by_signal { variables::BY_SIGNAL } else { 0 };
        format!("{pid} {}", u16::from(code) + added)
    };
    let list: Vec<String> = codes.map(entry).collect();
    (!list.is_empty()).then(|| (name(variables::EXIT_CODES), list.join(";").into()))
}

/// Returns the variable that makes functions of the plugin replace those of the C library. Creates a link to the plugin
/// in `folder`, whose path must have neither spaces nor colons.
///
/// # Errors
/// The link cannot be created.
pub fn plugin_interposes(libdir: &Path, folder: &Path) -> io::Result<PluginVariable> {
    let link = folder.join(NAME);
    symlink(libdir.join(NAME), &link)?;
    Ok(("LD_PRELOAD".into(), link.into()))
}

/// Returns the variables for a restore by this CRIU. `root` is the pid of the tree's first process as seen by CRIU.
#[must_use]
pub fn plugin_restores(criu: Version, root: i32) -> Vec<PluginVariable> {
    let mut variables = vec![(name(variables::ROOT), root.to_string().into())];
    variables.extend((criu >= RETRY_SINCE).then(|| (name(variables::RETRY), "1".into())));
    variables
}

pub(super) fn name(variable: &std::ffi::CStr) -> OsString {
    variable.to_string_lossy().into_owned().into()
}

#[cfg(test)]
mod tests {
    #![allow(
        unsafe_code,
        reason = "the plugin is loaded and called as CRIU does it"
    )]

    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
    use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
    use std::os::unix::process::CommandExt;
    use std::process::Command;
    use std::{env, fs, ptr};

    use libloading::Library;

    use crate::plugin::interrupted::{Call, can_be_made_again};

    use super::hooks::{Descriptor, is_listed};
    use super::*;

    const NOT_MINE: i32 = -95;

    /// Loads the embedded library as CRIU does.
    fn load(folder: &Path) -> (Library, &'static Descriptor) {
        install_plugin(folder).unwrap();
        // SAFETY: the library has no constructors.
        let library = unsafe { Library::new(folder.join(NAME)) }.unwrap();
        // SAFETY: the symbol is a `Descriptor`; callers keep the library as long as they use it.
        let descriptor = unsafe {
            *library
                .get::<&'static Descriptor>(b"CR_PLUGIN_DESC")
                .unwrap()
        };
        (library, descriptor)
    }

    #[test]
    fn criu_finds_six_hooks_of_an_old_enough_interface() {
        let folder = tempfile::tempdir().unwrap();
        let (_library, descriptor) = load(folder.path());
        assert_eq!(descriptor.name, b"ckpt-run\0");
        assert_eq!(
            (descriptor.version, descriptor.max_hooks),
            (0x0000_0200, 12),
            "CRIU 4.0 knows these"
        );
        assert!(descriptor.init.is_some() && descriptor.exit.is_some());
        let table = ptr::from_ref(&descriptor.hooks).cast::<[usize; 12]>();
        // SAFETY: twelve pointers, by the assertion beside the type.
        let present = unsafe { *table }.map(|hook| hook != 0);
        let mut expected = [false; 12];
        for hook in [2, 3, 7, 8, 9, 11] {
            expected[hook] = true;
        }
        assert_eq!(present, expected);
        let mode = fs::metadata(folder.path().join(NAME)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn nothing_is_linked_to_the_plugin() {
        // The name of a needed library would be in the string table.
        let names_library = LIBRARY.windows(4).any(|bytes| bytes == b"libc");
        assert!(!names_library, "it runs with any C library");
        assert!(LIBRARY.starts_with(b"\x7fELF") && LIBRARY.len() < 64 << 10);
    }

    #[test]
    fn only_whole_decimal_numbers_of_the_list_count() {
        assert!(is_listed(b"195 511", 195) && is_listed(b"195 511", 511));
        assert!(is_listed(b"0", 0) && is_listed(b" 7  8 ", 8));
        for (list, major) in [
            (&b""[..], 0),
            (b" ", 0),
            (b"195 511", 19),
            (b"195 511", 5),
            (b"195,511", 195),
            (b"+195", 195),
            (b"-195", 195),
            (b"0x7", 0),
            (b"4294967297", 1),
            (b"99999999999999999999", 0),
            (b"1\x00", 1),
        ] {
            assert!(!is_listed(list, major), "{list:?} {major}");
        }
    }

    #[test]
    fn a_wait_is_restarted_where_that_has_no_noticeable_effect() {
        let short = |address| {
            Some(if address == 1 {
                1_000_000_000
            } else {
                1_000_000_001
            })
        };
        let again = |result, number, arguments: [u64; 4]| {
            // Of calls with a fifth argument, it is the time limit.
            let [first, second, third, fourth] = arguments;
            let call = Call {
                number,
                arguments: [first, second, third, fourth, fourth, 0],
                result,
            };
            // A descriptor of 9 is a socket with a long time limit.
            let socket_limit = |descriptor| if descriptor == 9 { 1_000_000_001 } else { 0 };
            can_be_made_again(&call, 1_000_000_000, short, socket_limit)
        };
        let minus_one = u64::from(u32::MAX);
        for (number, arguments, expected) in [
            (7, [0, 1, minus_one, 0], true),
            (7, [0, 1, u64::MAX, 0], true),
            (7, [0, 1, 1000, 0], true),
            (7, [0, 1, 1001, 0], false),
            (35, [1, 0, 0, 0], true),
            (35, [2, 0, 0, 0], false),
            (35, [2, 2, 0, 0], true),
            (35, [1, 3, 0, 0], false),
            (230, [0, 0, 1, 0], true),
            (230, [0, 0, 2, 2], true),
            (230, [0, 0, 2, 0], false),
            (202, [0, 128 | 9, 0, 2], true),
            (202, [0, 128, 0, 1], true),
            (202, [0, 128, 0, 2], false),
            (202, [0, 11, 0, 1], false),
            (232, [0; 4], false),
        ] {
            assert_eq!(
                again(-516, number, arguments),
                expected,
                "{number} {arguments:?}"
            );
            assert!(!again(-514, number, arguments), "CRIU restarts it");
        }
        for (number, arguments, expected) in [
            (232, [0, 0, 0, minus_one], true),
            (281, [0, 0, 0, 1000], true),
            (232, [0, 0, 0, 1001], false),
            (0, [0; 4], true),
            (45, [9, 0, 0, 0], false),
            (65, [9, 0, 0, 0], true),
            (128, [0; 4], true),
            (128, [0, 0, 1, 0], true),
            (128, [0, 0, 2, 0], false),
            (220, [0; 4], true),
            (220, [0, 0, 0, 1], true),
            (220, [0, 0, 0, 2], false),
            (441, [0; 4], true),
            (7, [0; 4], false),
            (1, [0; 4], true),
            (42, [0; 4], true),
            (45, [0, 0, 0, 1], true),
            (208, [0; 4], true),
            (208, [0, 0, 0, 1], true),
            (208, [0, 0, 0, 2], false),
            (285, [0; 4], true),
            (299, [0; 4], true),
            (299, [0, 0, 0, 2], false),
            (307, [0, 0, 0, 1], true),
            (62, [0; 4], false),
        ] {
            assert_eq!(
                again(-4, number, arguments),
                expected,
                "{number} {arguments:?}"
            );
        }
    }

    #[test]
    fn the_environment_lists_the_accepted_devices() {
        let (variable, list) = plugin_takes(&[195, 511]);
        assert_eq!(
            (variable.to_str(), list.to_str()),
            (Some("CKPT_RUN_PLUGIN_MAJORS"), Some("195 511"))
        );
        let version = |minor, patch| Version {
            major: 4,
            minor,
            patch,
        };
        let calls = [(7, Some(0x4_0000), None), (8, None, Some((3, 1 << 32 | 5)))];
        let expected = "7 262144 4294967295 0 0;8 4294967295 3 5 1";
        let calls = plugin_calls(calls.into_iter()).unwrap();
        assert_eq!(calls, ("CKPT_RUN_PLUGIN_CALLS".into(), expected.into()));
        assert_eq!(plugin_calls([].into_iter()), None);
        let folder = tempfile::tempdir().unwrap();
        let (_, link) = plugin_interposes(Path::new("/plugins"), folder.path()).unwrap();
        assert_eq!(
            fs::read_link(link).unwrap(),
            Path::new("/plugins").join(NAME)
        );
        let root = ("CKPT_RUN_PLUGIN_ROOT".into(), "305".into());
        assert_eq!(plugin_restores(version(2, 1), 305), [root]);
        assert_eq!(plugin_restores(version(3, 0), 305).len(), 2);
    }

    /// Name of a test that runs in a separate process, because the plugin reads the environment.
    const ALONE: &str = "criu::plugin::tests::verdicts_in_a_separate_process";
    /// Variable that is set in that process.
    const ALONE_VARIABLE: &str = "CKPT_RUN_TEST_VERDICTS";

    #[test]
    fn only_character_devices_of_the_list_are_taken() {
        // /dev/null has number 1:3.
        for (majors, expected) in [
            (Some("195 1"), "0"),
            (Some("1"), "0"),
            (Some("195"), "-95"),
            (Some("11 10 "), "-95"),
            (Some(""), "-95"),
            (None, "-95"),
        ] {
            let mut command = Command::new(env::current_exe().unwrap());
            command
                .args(["--exact", ALONE, "--ignored", "--nocapture"])
                .env(ALONE_VARIABLE, expected)
                .env_remove("CKPT_RUN_PLUGIN_MAJORS");
            if let Some(majors) = majors {
                command.env("CKPT_RUN_PLUGIN_MAJORS", majors);
            }
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("1 passed"), "{majors:?}: {said}");
        }
    }

    #[test]
    #[ignore = "run by another test, with an environment"]
    fn verdicts_in_a_separate_process() {
        let Ok(expected) = env::var(ALONE_VARIABLE) else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let (_library, descriptor) = load(folder.path());
        let file = descriptor.hooks.dump_file.unwrap();
        let mapping = descriptor.hooks.handle_device_mapping.unwrap();
        let verdicts = |number| (file(number, 1), mapping(number, ptr::null()));
        let open = |path: &str, flags| -> OwnedFd {
            let mode = nix::sys::stat::Mode::empty();
            nix::fcntl::open(path, flags, mode).unwrap()
        };
        let (plain, no_access) = (nix::fcntl::OFlag::O_RDONLY, nix::fcntl::OFlag::O_PATH);

        let expected: i32 = expected.parse().unwrap();
        for flags in [plain, no_access] {
            let null = open("/dev/null", flags);
            assert_eq!(verdicts(null.as_raw_fd()), (expected, expected));
        }
        let (reader, _writer) = nix::unistd::pipe().unwrap();
        let regular = open(env::current_exe().unwrap().to_str().unwrap(), plain);
        for other in [reader, regular, open("/", plain)] {
            assert_eq!(verdicts(other.as_raw_fd()), (NOT_MINE, NOT_MINE));
        }
        let closed: RawFd = 1 << 20;
        assert_eq!(verdicts(closed), (NOT_MINE, NOT_MINE));
    }

    #[test]
    fn restored_files_are_null_and_zeros_for_any_image() {
        let folder = tempfile::tempdir().unwrap();
        let (_library, descriptor) = load(folder.path());
        // Without the variable, the second argument is not used. Up to CRIU 4.2.1 its value is undefined.
        let wild = ptr::without_provenance_mut(1);
        // SAFETY: the variable is not set.
        let number = unsafe { descriptor.hooks.restore_file.unwrap()(7, wild) };
        assert_eq!(device(number), (1, 3));

        let (mut offset, mut number) = (u64::MAX, -1);
        let update = descriptor.hooks.update_mapping.unwrap();
        let path = c"/etc/shadow".as_ptr();
        // SAFETY: both pointers are to variables of their types.
        let updated = unsafe { update(path, 0x1000, 0x2000, &raw mut offset, &raw mut number) };
        assert_eq!((updated, offset), (1, 0));
        assert_eq!(device(number), (1, 5));
    }

    #[test]
    fn limits_are_read_from_proc_if_the_kernel_refuses() {
        type Call = unsafe extern "C" fn(i64, i64, i64, i64, i64, i64, i64) -> i64;
        let folder = tempfile::tempdir().unwrap();
        let (library, _) = load(folder.path());
        if !nix::unistd::geteuid().is_root() {
            println!("SKIPPED: only root starts processes of others");
            return;
        }
        // SAFETY: the function has this type.
        let call = *unsafe { library.get::<Call>(b"syscall") }.unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "ulimit -n 123; ulimit -c 0; read word"])
            .stdin(std::process::Stdio::piped())
            .uid(65_534)
            .spawn()
            .unwrap();
        let limits = format!("/proc/{}/limits", child.id());
        while !fs::read_to_string(&limits).unwrap().contains(" 123 ") {
            std::thread::yield_now();
        }
        let limit = |resource| {
            let mut limit = [7_u64; 2];
            let into = ptr::from_mut(&mut limit).expose_provenance().cast_signed() as i64;
            let number = nix::libc::SYS_prlimit64;
            // SAFETY: the limit is as large as the kernel's.
            let result = unsafe { call(number, i64::from(child.id()), resource, 0, into, 0, 0) };
            assert_eq!(result, 0);
            limit
        };
        let names = ["Max core file size", "Max open files", "Max stack size"];
        let numbers = [4, 7, 3];
        let text = fs::read_to_string(&limits).unwrap();
        for (name, number) in names.into_iter().zip(numbers) {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            let words = line[name.len()..].split_whitespace().take(2);
            let told = words.map(|word| word.parse().unwrap_or(u64::MAX));
            assert_eq!(limit(number).to_vec(), told.collect::<Vec<_>>(), "{name}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // All other calls are unchanged: an error sets errno.
        // SAFETY: no such descriptor is open.
        let closed = unsafe { call(nix::libc::SYS_close, -1, 0, 0, 0, 0, 0) };
        let error = std::io::Error::last_os_error();
        assert_eq!((closed, error.raw_os_error()), (-1, Some(nix::libc::EBADF)));
    }

    #[test]
    fn names_are_created_and_removed_without_following_links() {
        type Link = unsafe extern "C" fn(i32, *const i8, i32, *const i8, i32) -> i32;
        type Unlink = unsafe extern "C" fn(i32, *const i8, i32) -> i32;
        let folder = tempfile::tempdir().unwrap();
        let (library, _) = load(folder.path());
        // SAFETY: the functions have these types.
        let link = *unsafe { library.get::<Link>(b"linkat") }.unwrap();
        // SAFETY: as above.
        let unlink = *unsafe { library.get::<Unlink>(b"unlinkat") }.unwrap();
        fs::create_dir(folder.path().join("real")).unwrap();
        symlink("real", folder.path().join("link")).unwrap();
        let path = |name: &str| {
            std::ffi::CString::new(folder.path().join(name).to_str().unwrap()).unwrap()
        };
        let (here, file) = (nix::libc::AT_FDCWD, path(NAME));
        let make = |name| {
            // SAFETY: both paths end with zeros.
            let made = unsafe { link(here, file.as_ptr(), here, path(name).as_ptr(), 0) };
            (made, std::io::Error::last_os_error().raw_os_error())
        };
        assert_eq!(make("link/name"), (-1, Some(nix::libc::ELOOP)));
        assert_eq!(make("real/name").0, 0);
        assert!(folder.path().join("real/name").exists());
        // SAFETY: the path ends with a zero.
        let remove = |name| unsafe { unlink(here, path(name).as_ptr(), 0) };
        assert_eq!(remove("link/name"), -1);
        assert_eq!(remove("real/name"), 0);
        assert!(!folder.path().join("real/name").exists());
    }

    /// Returns major and minor number of a character device, and closes it.
    fn device(number: RawFd) -> (u64, u64) {
        // SAFETY: the plugin has just opened it for its caller.
        let file = fs::File::from(unsafe { OwnedFd::from_raw_fd(number) });
        let metadata = file.metadata().unwrap();
        assert!(metadata.file_type().is_char_device());
        assert_eq!(metadata.permissions().mode() & 0o666, 0o666);
        let device = metadata.rdev();
        (nix::sys::stat::major(device), nix::sys::stat::minor(device))
    }
}
