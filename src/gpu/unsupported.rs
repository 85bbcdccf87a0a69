//! Detection of GPU state that the driver cannot carry. It comes before the driver's checkpoint, which may succeed
//! while its restore fails, and then the process is lost.
//!
//! Memory that processes share across GPUs leaves no trace in `/proc`: not NCCL's peer-to-peer transport, and not
//! `cuIpcOpenMemHandle` (driver 580, measured: maps and descriptors of both sides are the same before and after).
//! So NCCL is known by its library, its settings and the number of GPUs in use, and a process whose agent has all that
//! NCCL shares by its agent; a program that shares memory by CUDA IPC of its own cannot be recognised here. Peer access
//! between the GPUs of one process comes back (580, measured) and is no obstacle.
//!
//! What was suspended once stands in the way of others, too: the driver no longer switches away from a kernel of a
//! process that it has resumed (580.159.04, measured with its calls alone: a kernel of 9 s beside another program's
//! ends well before a suspend, and with "launch failure" and Xid 109 after it). The kernels of two runs of NCCL that
//! each wait for their own peer on the same GPUs then wait for each other.
//!
//! A pure function of a description; it must not know how that was made.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::variable;
use crate::run::environment::{CHECKPOINTABLE_NCCL, PEER_NCCL};

/// Memory of GPUs of other machines, reached through `NVLink`.
pub(crate) const FABRIC_DEVICES: &str = "/dev/nvidia-caps-imex-channels";

/// Number of GPUs from which on NCCL's kernels wait for each other.
const SEVERAL: usize = 2;

/// A CUDA process of the job.
#[derive(Clone, Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "facts, each of its own")]
pub(crate) struct CudaUser {
    /// Its pid, as the host sees it.
    pub pid: i32,
    /// True if NCCL's library is in its memory. `PyTorch` always has it.
    pub nccl: bool,
    /// True if it has the agent.
    pub agent: bool,
    /// Its environment, as `/proc/PID/environ` has it; empty where it cannot be read.
    pub environment: Vec<u8>,
    /// UUIDs of the GPUs it computes on, or may; empty where that cannot be told.
    pub gpus: Vec<String>,
    /// True if the process computes through an MPS server.
    pub through_mps: bool,
    /// True if it has the device of other machines' GPUs open.
    pub fabric: bool,
}

/// A process of another run of ckpt-run that computes on this machine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Neighbour {
    /// The store of its run.
    pub store: String,
    /// True if NCCL's library is in its memory.
    pub nccl: bool,
    /// UUID of a GPU that it computes on; it is here once for each.
    pub gpu: String,
}

/// GPU state that the driver could not restore. Nothing was frozen; the job computes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// NCCL shares GPU memory.
    #[error(
        "process {pid} uses NCCL on several GPUs and {sign}: memory that GPUs share does not come back. Run with \
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
    /// Another run's NCCL on the same GPUs.
    #[error(
        "process {pid} computes on several GPUs with NCCL loaded, and so does the run in {store} on the same ones: once \
         snapshots were taken of both, the driver does not switch between their kernels, which fail as they wait for \
         each other. Give each its own GPUs (CUDA_VISIBLE_DEVICES); snapshots begin when the other run has ended"
    )]
    SameGpus {
        /// Pid as the host sees it.
        pid: i32,
        /// The store of the other run.
        store: String,
    },
    /// Memory of other machines' GPUs.
    #[error(
        "process {pid} shares GPU memory with other machines (it has {FABRIC_DEVICES} open), which does not come back; set NCCL_MNNVL_ENABLE=0 for the job"
    )]
    Fabric {
        /// Pid as the host sees it.
        pid: i32,
    },
    /// MPS.
    #[error(
        "process {pid} computes through an MPS server, which keeps a part of its state; run the job without MPS (CUDA_MPS_PIPE_DIRECTORY=/nonexistent)"
    )]
    Mps {
        /// Pid as the host sees it.
        pid: i32,
    },
    /// MIG.
    #[error(
        "process {pid} computes on {gpu}, which is split up (MIG): the driver suspends jobs on whole GPUs only"
    )]
    Mig {
        /// Pid as the host sees it.
        pid: i32,
        /// The GPU's UUID.
        gpu: String,
    },
}

/// Looks for what would not come back. `machine_gpus` is their number, `split` the UUIDs of those that are split up.
pub(crate) fn look(
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

/// Looks for another run whose NCCL has several of the job's GPUs. A job whose GPUs cannot be told may have all. Who is
/// there is asked only where it matters.
pub(crate) fn look_around(
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

/// The first setting that lets NCCL share memory in a way that nobody brings back.
fn shares_memory(user: &CudaUser) -> Option<String> {
    let environment = &user.environment;
    // Not to use peers at any distance is the same as not to use them.
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
    fn nccl_that_shares_memory_between_gpus_is_refused_with_sign_and_remedy() {
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
            let text = look(&users, 8, &[]).unwrap_err().to_string();
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
        assert_eq!(look(&unknown, 1, &[]), Ok(()), "a machine with one GPU");
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
            assert_eq!(look(&users, 8, &[]), Ok(()), "{case}");
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
            look_around(users, 8, || neighbours.to_vec())
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
        assert_eq!(look_around(&ours[..1], 8, unasked), Ok(()));
    }

    #[test]
    fn mps_mig_and_other_machines_memory_are_refused() {
        let mut one = user(7, false, "", &["a"]);
        assert_eq!(look(&[one.clone()], 1, &["b".to_owned()]), Ok(()));
        let gpu = "a".to_owned();
        assert_eq!(
            look(&[one.clone()], 1, std::slice::from_ref(&gpu)),
            Err(Unsupported::Mig { pid: 7, gpu })
        );
        one.through_mps = true;
        assert_eq!(
            look(&[one.clone()], 1, &[]),
            Err(Unsupported::Mps { pid: 7 })
        );
        one.fabric = true;
        assert_eq!(look(&[one], 1, &[]), Err(Unsupported::Fabric { pid: 7 }));
    }
}
