//! The environment that the job gets: the caller's, without what was meant for us.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use super::control;

/// Systemd's messages to its own child; a job that took them for its own would answer in our name.
const NOT_FOR_THE_JOB: [&str; 6] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
];

/// Where the store's key is: a command may hold a secret in its words, and what the job has
/// in memory is in every image.
const OF_THE_KEY: [&str; 2] = [
    "CKPT_RUN_ENCRYPTION_KEY_FILE",
    "CKPT_RUN_ENCRYPTION_KEY_COMMAND",
];

/// Makes the job's environment from ours.
pub(super) fn for_job(
    ours: impl Iterator<Item = (OsString, OsString)>,
    store: &Path,
    job: &str,
) -> Vec<(OsString, OsString)> {
    let set = [
        ("CKPT_RUN_JOB", OsString::from(job)),
        ("CKPT_RUN_STORE", store.into()),
        ("CKPT_RUN_SOCKET", control::socket_path(store).into()),
    ];
    let replaced = |name: &OsStr| {
        let mut not_passed = NOT_FOR_THE_JOB.iter().chain(&OF_THE_KEY);
        set.iter().any(|(ours, _)| name == *ours) || not_passed.any(|one| name == *one)
    };
    ours.filter(|(name, _)| !replaced(name))
        .chain(
            set.iter()
                .map(|(name, value)| (OsString::from(name), value.clone())),
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_s_variables_and_the_key_s_stay_here_and_ours_are_set() {
        let ours = [
            ("PATH", "/bin"),
            ("NOTIFY_SOCKET", "/run/x"),
            ("CKPT_RUN_ENCRYPTION_KEY_FILE", "/k"),
            ("CKPT_RUN_ENCRYPTION_KEY_COMMAND", "echo secret"),
            ("CKPT_RUN_STORE", "other"),
        ];
        let given = for_job(
            ours.iter().map(|(k, v)| (k.into(), v.into())),
            Path::new("/s"),
            "7",
        );
        let value = |name: &str| {
            given
                .iter()
                .filter(|(key, _)| key == name)
                .map(|(_, value)| value.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(value("PATH"), ["/bin"]);
        for name in NOT_FOR_THE_JOB.iter().chain(&OF_THE_KEY) {
            assert!(value(name).is_empty(), "{name}");
        }
        assert_eq!(value("CKPT_RUN_STORE"), ["/s"]);
        assert_eq!(value("CKPT_RUN_SOCKET"), ["/s/control.sock"]);
    }
}
