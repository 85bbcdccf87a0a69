//! Detection of GPU state that the driver cannot restore. It precedes the driver's checkpoint, which may succeed
//! although its restore fails, and then the process is lost.
//!
//! Memory that processes share across GPUs leaves no trace in `/proc`, neither with NCCL's peer-to-peer transport nor
//! with `cuIpcOpenMemHandle` (driver 580, measured: maps and descriptors of both sides are the same before and after).
//! So NCCL is recognized by its library, its settings and the number of GPUs in use, except in a process whose agent
//! holds all memory that NCCL shares and reports it. A program that uses CUDA IPC itself cannot be recognized here.
//! Peer access between the GPUs of one process is restored (580, measured) and needs no refusal.
//!
//! A process that was suspended before can also block others: the driver no longer switches away from a kernel of a
//! process that it has resumed (580.159.04, measured with its calls alone: a kernel of 9 s beside another program ends
//! normally before a suspend, and with "launch failure" and Xid 109 after it). The NCCL kernels of two runs on the same
//! GPUs, each waiting for its own peers, then wait for each other.
//!
//! The check is a pure function of a description of the job.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::variable;
use crate::run::environment::{CHECKPOINTABLE_NCCL, PEER_NCCL};

/// Device files for memory of other machines' GPUs, which `NVLink` connects.
pub(crate) const FABRIC_DEVICES: &str = "/dev/nvidia-caps-imex-channels";

/// Number of GPUs from which NCCL's kernels wait for each other.
const SEVERAL: usize = 2;

/// CUDA process of the job.
#[derive(Clone, Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "facts, each of its own")]
pub(crate) struct CudaUser {
    /// Pid on the host.
    pub pid: i32,
    /// True if NCCL's library is mapped, which is always the case with `PyTorch`.
    pub nccl: bool,
    /// True if the process has the agent.
    pub agent: bool,
    /// Environment as in `/proc/PID/environ`; empty if it cannot be read.
    pub environment: Vec<u8>,
    /// UUIDs of the GPUs on which the process computes or may compute; empty if unknown.
    pub gpus: Vec<String>,
    /// True if the process computes through an MPS server.
    pub through_mps: bool,
    /// True if the process has a device of other machines' GPUs open.
    pub fabric: bool,
}

/// Process of another run of ckpt-run on this machine's GPUs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Neighbour {
    /// Store of that run.
    pub store: String,
    /// True if NCCL's library is mapped.
    pub nccl: bool,
    /// UUID of a GPU on which the process computes; there is a value for each GPU.
    pub gpu: String,
}

/// GPU state that the driver could not restore. Nothing was frozen, and the job computes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// NCCL shares GPU memory.
    #[error(
        "process {pid} uses NCCL on several GPUs and {sign}: memory shared between GPUs cannot be restored. Run with \
         cuda.nccl = \"peer\" or \"checkpointable\", or set {remedy} for the job"
    )]
    PeerTransport {
        /// Pid as the host sees it.
        pid: i32,
        /// The sign by which it was recognized.
        sign: String,
        /// The environment that makes it suspendable.
        remedy: String,
    },
    /// Another run uses NCCL on the same GPUs.
    #[error(
        "process {pid} computes on several GPUs with NCCL loaded, and so does the run in {store} on the same GPUs: \
         after snapshots of both, the driver no longer switches between their kernels, which wait for each other and \
         fail. Give each run its own GPUs (CUDA_VISIBLE_DEVICES); snapshots begin when the other run has ended"
    )]
    SameGpus {
        /// Pid as the host sees it.
        pid: i32,
        /// The store of the other run.
        store: String,
    },
    /// A process uses memory of other machines' GPUs.
    #[error(
        "process {pid} shares GPU memory with other machines (it has {FABRIC_DEVICES} open), which cannot be \
         restored; set NCCL_MNNVL_ENABLE=0 for the job"
    )]
    Fabric {
        /// Pid as the host sees it.
        pid: i32,
    },
    /// A process uses an MPS server.
    #[error(
        "process {pid} computes through an MPS server, which keeps a part of its state; run the job without MPS \
         (CUDA_MPS_PIPE_DIRECTORY=/nonexistent)"
    )]
    Mps {
        /// Pid as the host sees it.
        pid: i32,
    },
    /// A process uses a GPU in MIG mode.
    #[error(
        "process {pid} computes on {gpu}, which is in MIG mode: the driver suspends jobs on whole GPUs only; switch MIG \
         off (nvidia-smi -mig 0)"
    )]
    Mig {
        /// Pid as the host sees it.
        pid: i32,
        /// The GPU's UUID.
        gpu: String,
    },
}

/// Checks for state that cannot be restored. `machine_gpus` is the number of GPUs, and `split` are the UUIDs of those
/// in MIG mode.
pub(crate) fn check(
    users: &[CudaUser],
    machine_gpus: usize,
    split: &[String],
) -> Result<(), Unsupported> {
    for user in users {
        let pid = user.pid;
        if user.fabric {
            return Err(Unsupported::Fabric { pid });
        }
        if user.through_mps {
            return Err(Unsupported::Mps { pid });
        }
        if let Some(gpu) = user.gpus.iter().find(|gpu| split.contains(gpu)) {
            let gpu = gpu.clone();
            return Err(Unsupported::Mig { pid, gpu });
        }
    }
    if gpus_in_use(users, machine_gpus) < SEVERAL {
        return Ok(());
    }
    for user in users.iter().filter(|user| user.nccl) {
        if let Some(sign) = shares_memory(user) {
            return Err(Unsupported::PeerTransport {
                pid: user.pid,
                sign,
                remedy: CHECKPOINTABLE_NCCL
                    .map(|(name, value)| format!("{name}={value}"))
                    .join(" "),
            });
        }
    }
    Ok(())
}

/// Checks for another run that uses NCCL on several of the job's GPUs. A job with unknown GPUs may use all of them. The
/// neighbours are determined only if necessary.
pub(crate) fn check_neighbours(
    users: &[CudaUser],
    machine_gpus: usize,
    neighbours: impl FnOnce() -> Vec<Neighbour>,
) -> Result<(), Unsupported> {
    let Some(user) = users.iter().find(|user| user.nccl) else {
        return Ok(());
    };
    if gpus_in_use(users, machine_gpus) < SEVERAL {
        return Ok(());
    }
    let ours: BTreeSet<&String> = users.iter().flat_map(|user| &user.gpus).collect();
    let met = |one: &Neighbour| one.nccl && (ours.is_empty() || ours.contains(&one.gpu));
    let mut shared: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for one in neighbours().into_iter().filter(met) {
        shared.entry(one.store).or_default().insert(one.gpu);
    }
    match shared.into_iter().find(|(_, gpus)| gpus.len() >= SEVERAL) {
        Some((store, _)) => Err(Unsupported::SameGpus {
            pid: user.pid,
            store,
        }),
        None => Ok(()),
    }
}

/// Returns the number of GPUs on which the job computes; if the driver does not report it, the number that it may use.
fn gpus_in_use(users: &[CudaUser], machine_gpus: usize) -> usize {
    if users.iter().any(|user| user.gpus.is_empty()) {
        return machine_gpus;
    }
    let mut all: Vec<&String> = users.iter().flat_map(|user| &user.gpus).collect();
    all.sort_unstable();
    all.dedup();
    all.len()
}

/// Returns the first setting that lets NCCL share memory in a way that cannot be restored.
fn shares_memory(user: &CudaUser) -> Option<String> {
    let environment = &user.environment;
    // This level disables peer-to-peer transfers.
    let level = variable(environment, "NCCL_P2P_LEVEL");
    let far_only = level.is_some_and(|level| level.eq_ignore_ascii_case("LOC") || level == "0");
    let needed: &[_] = if far_only || user.agent {
        &PEER_NCCL
    } else {
        &CHECKPOINTABLE_NCCL
    };
    needed
        .iter()
        .find_map(|(name, wanted)| match variable(environment, name) {
            Some(value) if value.trim() == *wanted => None,
            Some(value) => Some(format!("{name} is {value:?}")),
            None => Some(format!("{name} is not set")),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAFE: &str = "NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0";

    fn user(pid: i32, nccl: bool, environment: &str, gpus: &[&str]) -> CudaUser {
        CudaUser {
            pid,
            nccl,
            environment: environment.replace(' ', "\0").into_bytes(),
            gpus: gpus.iter().map(|gpu| (*gpu).to_owned()).collect(),
            ..CudaUser::default()
        }
    }

    #[test]
    fn nccl_sharing_memory_is_refused_with_a_remedy() {
        let rank = |pid, environment, gpu| user(pid, true, environment, &[gpu]);
        let alone = |environment| vec![user(1, true, environment, &["a", "b"])];
        let host = "NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0";
        let asked = "NCCL_P2P_DISABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0";
        let ranks = vec![rank(1, "", "a"), rank(2, "", "b")];
        let agent_and = |environment| CudaUser {
            agent: true,
            ..user(1, true, environment, &["a", "b"])
        };
        let half_safe = vec![rank(1, SAFE, "a"), rank(2, "", "b")];
        let cases = [
            (
                ranks,
                "process 1 uses NCCL on several GPUs and NCCL_P2P_DISABLE is not set",
            ),
            (half_safe, "process 2 uses NCCL"),
            (alone(""), "process 1 uses NCCL"),
            (alone(host), "NCCL_CUMEM_HOST_ENABLE is not set"),
            (alone(asked), "NCCL_P2P_DISABLE is \"0\""),
            (vec![user(1, true, "", &[])], "process 1 uses NCCL"),
            (
                vec![agent_and("NCCL_CUMEM_ENABLE=1")],
                "NCCL_CUMEM_ENABLE is \"1\"",
            ),
        ];
        for (users, expected) in cases {
            let text = check(&users, 8, &[]).unwrap_err().to_string();
            assert!(text.contains(expected) && text.contains(SAFE), "{text}");
        }
    }

    #[test]
    fn nccl_that_shares_nothing_is_no_obstacle() {
        let rank = |pid, environment, gpu| user(pid, true, environment, &[gpu]);
        let local = "NCCL_P2P_LEVEL=LOC NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0";
        let with_agent = |pid| CudaUser {
            agent: true,
            ..rank(pid, "NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0", "a")
        };
        let unknown = [user(1, true, "", &[]), user(2, true, "", &[])];
        assert_eq!(check(&unknown, 1, &[]), Ok(()), "a machine with one GPU");
        let cases = [
            ("PyTorch on one of many", vec![rank(1, "", "a")]),
            ("workers on one", vec![rank(1, "", "a"), rank(2, "", "a")]),
            ("ranks with agents", vec![with_agent(1), with_agent(2)]),
            ("safe ranks", vec![rank(1, SAFE, "a"), rank(2, SAFE, "b")]),
            (
                "no peer is near enough",
                vec![user(1, true, local, &["a", "b"])],
            ),
            ("no NCCL", vec![user(1, false, "", &["a", "b"])]),
        ];
        for (case, users) in cases {
            assert_eq!(check(&users, 8, &[]), Ok(()), "{case}");
        }
    }

    #[test]
    fn nccl_of_another_run_on_the_same_gpus_is_refused() {
        let rank = |pid, gpu| user(pid, true, SAFE, &[gpu]);
        let ours = [rank(1, "a"), rank(2, "b")];
        let other = |store: &str, nccl, gpu: &str| Neighbour {
            store: store.to_owned(),
            nccl,
            gpu: gpu.to_owned(),
        };
        let beside = |users: &[CudaUser], neighbours: &[Neighbour]| {
            check_neighbours(users, 8, || neighbours.to_vec())
        };
        let ranks = ["a", "b"].map(|gpu| other("/x", true, gpu));
        let (pid, store) = (1, "/x".to_owned());
        let refused = Err(Unsupported::SameGpus { pid, store });
        assert_eq!(beside(&ours, &ranks), refused);
        let unknown = [user(1, true, SAFE, &[]), user(2, true, SAFE, &[])];
        assert_eq!(beside(&unknown, &ranks), refused);
        let cases: [(&str, &[CudaUser], [Neighbour; 2]); 5] = [
            (
                "a run on each",
                &ours,
                [other("/x", true, "a"), other("/y", true, "b")],
            ),
            (
                "both on one",
                &ours,
                [other("/x", true, "a"), other("/x", true, "a")],
            ),
            (
                "one shared",
                &ours,
                [other("/x", true, "b"), other("/x", true, "c")],
            ),
            (
                "no NCCL",
                &ours,
                ["a", "b"].map(|gpu| other("/x", false, gpu)),
            ),
            ("a job on one", &ours[..1], ranks),
        ];
        for (case, users, neighbours) in cases {
            assert_eq!(beside(users, &neighbours), Ok(()), "{case}");
        }
        let unasked = || unreachable!("a job on one GPU need not know");
        assert_eq!(check_neighbours(&ours[..1], 8, unasked), Ok(()));
    }

    #[test]
    fn mps_mig_and_other_machines_memory_are_refused() {
        let mut one = user(7, false, "", &["a"]);
        assert_eq!(check(&[one.clone()], 1, &["b".to_owned()]), Ok(()));
        let gpu = "a".to_owned();
        assert_eq!(
            check(&[one.clone()], 1, std::slice::from_ref(&gpu)),
            Err(Unsupported::Mig { pid: 7, gpu })
        );
        one.through_mps = true;
        assert_eq!(
            check(&[one.clone()], 1, &[]),
            Err(Unsupported::Mps { pid: 7 })
        );
        one.fabric = true;
        assert_eq!(check(&[one], 1, &[]), Err(Unsupported::Fabric { pid: 7 }));
    }
}
