//! The job's environment: the caller's environment without the variables meant for ckpt-run, and with the settings that
//! make NCCL suspendable and keep hwloc away from GPUs.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::agent_client;
use crate::config::Nccl;
use crate::sandbox::JobUser;
use crate::trust;

/// Variables for ckpt-run alone: systemd's messages to its own child, which a job would answer in place of ckpt-run, and
/// a rehearsal's.
pub(crate) const NOT_FOR_THE_JOB: [&str; 7] = [
    trust::CHECKED_VARIABLE,
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
];

/// Variables with the source of the store's key. A key command may contain a secret, and every image contains the job's
/// memory.
const OF_THE_KEY: [&str; 2] = [
    "CKPT_RUN_ENCRYPTION_KEY_FILE",
    "CKPT_RUN_ENCRYPTION_KEY_COMMAND",
];

/// Variable with the path of the run's store. It also shows to which run a process belongs.
pub(crate) const STORE_VARIABLE: &str = "CKPT_RUN_STORE";

/// Variable with the path of the control socket.
pub(crate) const SOCKET_VARIABLE: &str = "CKPT_RUN_SOCKET";

/// Name of the control socket in the store.
pub(crate) const SOCKET: &str = "control.sock";

/// A variable and its value.
pub(crate) type Setting = (&'static str, &'static str);

/// Settings with which NCCL shares no GPU memory: it uses host memory and sockets instead, and can be restored (NCCL
/// with driver 580, measured with all three settings).
pub(crate) const CHECKPOINTABLE_NCCL: [(&str, &str); 3] = [
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_CUMEM_ENABLE", "0"),
    ("NCCL_CUMEM_HOST_ENABLE", "0"),
];
/// Settings with which NCCL shares GPU memory by CUDA IPC only, which the agents support.
pub(crate) const PEER_NCCL: [(&str, &str); 2] =
    [("NCCL_CUMEM_ENABLE", "0"), ("NCCL_CUMEM_HOST_ENABLE", "0")];

/// Setting with which hwloc, used by MPI, does not open GPUs. Its plugins would open them through `OpenCL` and other
/// libraries in processes that do not compute there, such as Open MPI's `orted` beside a program that imports mpi4py;
/// the driver cannot suspend that (580.159.04).
pub(crate) const HWLOC_WITHOUT_GPUS: Setting =
    ("HWLOC_COMPONENTS", "-opencl,-nvml,-cuda,-rsmi,-levelzero");

/// Option with which the address sanitizer accepts libraries before its own. Later options of the list take precedence.
const SANITIZER: Setting = ("ASAN_OPTIONS", "verify_asan_link_order=0");

/// Returns the setting for hwloc where there are GPUs, unless the caller has set it.
pub(crate) fn for_hwloc(gpus: usize, ours: impl Fn(&str) -> Option<OsString>) -> Option<Setting> {
    let is_ours = ours(HWLOC_WITHOUT_GPUS.0).is_none();
    (gpus > 0 && is_ours).then_some(HWLOC_WITHOUT_GPUS)
}

/// Returns the settings for NCCL, without those that the caller has set. `gpus` is the number of GPUs; `ours` reads a
/// variable of the caller's environment.
pub(crate) fn for_nccl(
    choice: Nccl,
    gpus: usize,
    ours: impl Fn(&str) -> Option<OsString>,
) -> Vec<Setting> {
    let several = || visible(gpus, ours("CUDA_VISIBLE_DEVICES")) > 1;
    let settings: &[Setting] = match choice {
        Nccl::Auto if several() => &CHECKPOINTABLE_NCCL,
        Nccl::Auto | Nccl::Off => &[],
        Nccl::Checkpointable => &CHECKPOINTABLE_NCCL,
        Nccl::Peer => &PEER_NCCL,
    };
    let unset = settings.iter().filter(|(name, _)| ours(name).is_none());
    unset.copied().collect()
}

/// Returns the number of GPUs, out of `gpus`, that the list leaves visible. The number is not exact: only the driver
/// can determine which words name a GPU.
fn visible(gpus: usize, list: Option<OsString>) -> usize {
    list.map_or(gpus, |list| {
        let list = list.to_string_lossy().into_owned();
        let words = list.split(',').filter(|word| !word.trim().is_empty());
        words.count().min(gpus)
    })
}

/// Variables with the number of nodes or tasks of the parallel job that this process is a task of.
const TASKS: [&str; 4] = [
    "SLURM_JOB_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
];

/// Returns true if this process is one of several tasks of a parallel job, which connect to each other by the machines'
/// addresses.
pub(crate) fn has_other_tasks(ours: impl Fn(&str) -> Option<OsString>) -> bool {
    let number = |name| ours(name)?.into_string().ok()?.parse::<u32>().ok();
    TASKS
        .iter()
        .copied()
        .filter_map(number)
        .any(|number| number > 1)
}

/// Returns the path of a store's control socket.
#[must_use]
pub fn socket_path(store: &Path) -> PathBuf {
    store.join(SOCKET)
}

/// Returns the job's environment, made from ckpt-run's.
pub(crate) fn for_job(
    ours: impl Iterator<Item = (OsString, OsString)>,
    store: &Path,
    job: &str,
    settings: &[Setting],
) -> Vec<(OsString, OsString)> {
    let set = [
        ("CKPT_RUN_JOB", OsString::from(job)),
        (STORE_VARIABLE, store.into()),
        (SOCKET_VARIABLE, socket_path(store).into()),
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
        .chain(
            settings
                .iter()
                .map(|(name, value)| (name.into(), value.into())),
        )
        .collect()
}

/// Sets the variables of a user in an environment, and removes those that only the supervisor's user can use.
pub(crate) fn set_user(environment: &mut Vec<(OsString, OsString)>, user: &JobUser) {
    let variables = user.variables();
    let replaced =
        |name: &OsStr| name == SOCKET_VARIABLE || variables.iter().any(|(ours, _)| name == *ours);
    environment.retain(|(name, _)| !replaced(name));
    let set = variables.into_iter();
    environment.extend(set.map(|(name, value)| (name.into(), value)));
}

/// Makes the job's programs load a library. `set` returns the variables for it, given the libraries that they preload
/// already. Programs built with the address sanitizer refuse to start with a preloaded library unless an option is set.
pub(crate) fn preload(
    environment: &mut Vec<(OsString, OsString)>,
    set: impl FnOnce(Option<&OsStr>) -> Vec<(OsString, OsString)>,
) {
    let present = |wanted: &str| {
        let found = environment.iter().find(|(name, _)| name == wanted);
        found.map(|(_, value)| value.as_os_str())
    };
    let mut set = set(present(agent_client::PRELOAD_VARIABLE));
    let (name, mut options) = (SANITIZER.0, OsString::from(SANITIZER.1));
    if let Some(present) = present(name) {
        options.push(":");
        options.push(present);
    }
    set.push((name.into(), options));
    environment.retain(|(name, _)| set.iter().all(|(ours, _)| name != ours));
    environment.extend(set);
}

#[cfg(test)]
mod tests {
    use super::*;

    type Settings<'a> = &'a [(&'a str, &'a str)];

    #[test]
    fn tasks_of_a_parallel_job_are_recognized() {
        let found = |settings: Settings<'_>| {
            has_other_tasks(|name| {
                let found = settings.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| value.into())
            })
        };
        assert!(!found(&[("SLURM_JOB_NUM_NODES", "1"), ("PMI_SIZE", "x")]));
        assert!(found(&[
            ("SLURM_JOB_NUM_NODES", "1"),
            ("SLURM_STEP_NUM_TASKS", "4")
        ]));
        assert!(found(&[("SLURM_JOB_NUM_NODES", "2")]));
    }

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
            &[("NCCL_P2P_DISABLE", "1")],
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
        assert_eq!(value("NCCL_P2P_DISABLE"), ["1"]);
        assert_eq!(value("CKPT_RUN_STORE"), ["/s"]);
        assert_eq!(value("CKPT_RUN_SOCKET"), ["/s/control.sock"]);
    }

    #[test]
    fn a_preloaded_library_is_accepted_by_sanitized_programs() {
        let mut environment = vec![("ASAN_OPTIONS".into(), "detect_leaks=0".into())];
        for library in ["/a.so", "/b.so"] {
            preload(&mut environment, |present| {
                let list = agent_client::preload_before(Path::new(library), present);
                vec![("LD_PRELOAD".into(), list)]
            });
        }
        let order = "verify_asan_link_order=0";
        let options = format!("{order}:{order}:detect_leaks=0");
        let expected = [("LD_PRELOAD", "/b.so:/a.so"), ("ASAN_OPTIONS", &options)];
        let expected = expected.map(|(name, value)| (name.into(), value.into()));
        assert_eq!(environment, expected);
    }

    #[test]
    fn nccl_settings_need_several_gpus_and_respect_the_user() {
        let [all, two, none] = [&CHECKPOINTABLE_NCCL[..], &CHECKPOINTABLE_NCCL[1..], &[]];
        let cases: [(Nccl, usize, Settings, Settings); 10] = [
            (Nccl::Auto, 0, &[], none),
            (Nccl::Auto, 1, &[], none),
            (Nccl::Auto, 2, &[], all),
            (Nccl::Auto, 8, &[("CUDA_VISIBLE_DEVICES", "3")], none),
            (Nccl::Auto, 8, &[("CUDA_VISIBLE_DEVICES", "3,4")], all),
            (Nccl::Auto, 2, &[("NCCL_P2P_DISABLE", "0")], two),
            (Nccl::Checkpointable, 1, &[], all),
            (Nccl::Off, 8, &[], none),
            (Nccl::Peer, 1, &[], &PEER_NCCL),
            (
                Nccl::Peer,
                8,
                &[("NCCL_CUMEM_ENABLE", "0")],
                &PEER_NCCL[1..],
            ),
        ];
        for (choice, gpus, ours, expected) in cases {
            let of = |name: &str| {
                let found = ours.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            };
            let given = for_nccl(choice, gpus, of);
            assert_eq!(given, expected, "{choice:?} {gpus} {ours:?}");
        }
    }

    #[test]
    fn hwloc_leaves_gpus_alone_unless_the_caller_has_set_it() {
        let unset = |_: &str| None;
        assert_eq!(for_hwloc(1, unset), Some(HWLOC_WITHOUT_GPUS));
        assert_eq!(for_hwloc(0, unset), None);
        assert_eq!(for_hwloc(1, |_| Some(OsString::new())), None);
    }

    #[test]
    fn the_environment_is_the_users_and_has_no_socket() {
        let alice = JobUser::of_alice();
        let mut environment: Vec<(OsString, OsString)> = [
            ("HOME", "/root"),
            ("PATH", "/bin"),
            ("CKPT_RUN_SOCKET", "/s/control.sock"),
        ]
        .map(|(name, value)| (name.into(), value.into()))
        .to_vec();
        set_user(&mut environment, &alice);
        let value = |name: &str| {
            let found: Vec<_> = environment.iter().filter(|(key, _)| key == name).collect();
            assert!(found.len() <= 1, "{name} twice");
            found.first().map(|(_, value)| value.clone())
        };
        assert_eq!(value("HOME"), Some("/home/alice".into()));
        assert_eq!(value("USER"), Some("alice".into()));
        assert_eq!(value("LOGNAME"), Some("alice".into()));
        assert_eq!(value("PATH"), Some("/bin".into()));
        assert_eq!(value("CKPT_RUN_SOCKET"), None);
    }
}
