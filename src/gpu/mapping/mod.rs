//! Choice of GPUs for a restore: a pure function of the job's GPUs at the snapshot, this machine's GPUs, and the user's
//! map.
//!
//! ```text
//! the user gave a map           the map, checked
//! all its GPUs are present      the same GPUs
//! some or all are missing      GPUs of the same model in their place, the emptiest first
//! ```
//! Every chosen GPU is checked for model, mode and free memory. A restore that fails for lack of GPU memory is final
//! for the process (driver 580); a refusal here costs nothing.

use std::cmp::Reverse;

use crate::cuda::{ComputeMode, Gpu, Inventory};
use crate::run::format::size;
use crate::run::gpu_facts::{CudaFacts, GpuFacts, GpuPairs};

/// GPUs that a restore uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuPlan {
    /// Map from old to new GPUs; empty if the GPUs are the same. Otherwise it names every GPU of the job's machine,
    /// because the driver refuses an incomplete map (580: error 1).
    pub map: GpuPairs,
    /// Driver versions at the snapshot and at present, if they differ.
    pub other_driver: Option<(String, String)>,
}

/// Reason why the job cannot be restored on this machine's GPUs. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no driver or no GPU.
    #[error("this machine has no NVIDIA GPU; restore on a machine with one")]
    NoGpu,
    /// The driver belongs to an older branch.
    #[error(
        "the image was made with NVIDIA driver {then} and this machine has the older {now}, on which a newer CUDA \
         library does not work; restore on a machine with driver {then}"
    )]
    OlderDriver {
        /// Driver at the snapshot.
        then: String,
        /// Present driver.
        now: String,
    },
    /// There are fewer GPUs than at the snapshot.
    #[error(
        "the job had {then} GPUs and {now} can be used here (CUDA_VISIBLE_DEVICES counts); restore on a machine with \
         as many GPUs"
    )]
    TooFew {
        /// Number of GPUs that the job had.
        then: usize,
        /// Number of GPUs on this machine.
        now: usize,
    },
    /// There is no free GPU of the same model.
    #[error("the job had {then} and there is only {now} to replace it; restore on the same model")]
    OtherModel {
        /// Model and UUID of the job's GPU.
        then: String,
        /// Models of the present GPUs.
        now: String,
    },
    /// The GPU is in MIG mode.
    #[error(
        "{gpu} is in MIG mode, and a job cannot be restored on a part of a GPU; switch MIG off (nvidia-smi -mig 0)"
    )]
    Mig {
        /// Model and UUID.
        gpu: String,
    },
    /// The GPU admits no process.
    #[error(
        "{gpu} is closed to all processes (compute mode PROHIBITED); open it (nvidia-smi -c 0)"
    )]
    Prohibited {
        /// Model and UUID.
        gpu: String,
    },
    /// The GPU admits only one process, and one uses it.
    #[error(
        "{gpu} admits only one process and is used by one, perhaps an MPS server; end that process or admit all \
         (nvidia-smi -c 0)"
    )]
    Taken {
        /// Model and UUID.
        gpu: String,
    },
    /// The GPU has too little free memory.
    #[error("{gpu} has {} free and the job needs {}; end the programs that use it, or choose other GPUs with --gpu-map", size(*free), size(*needed))]
    Memory {
        /// Model and UUID.
        gpu: String,
        /// Bytes that the job used there.
        needed: u64,
        /// Free bytes.
        free: u64,
    },
    /// The user's map lacks a GPU of the job.
    #[error(
        "the map of GPUs lacks {gpu}, which the job had; the driver requires all of the job's GPUs"
    )]
    Unmapped {
        /// Model and UUID.
        gpu: String,
    },
    /// The user's map names a source GPU that the job did not have.
    #[error(
        "the map of GPUs replaces {uuid}, which the job did not have; `ckpt-run show` lists the job's GPUs"
    )]
    NotTheJobs {
        /// The UUID.
        uuid: String,
    },
    /// The user's map names a target GPU that does not exist on this machine.
    #[error(
        "the map of GPUs names {uuid}, which this machine does not have; nvidia-smi -L lists its GPUs"
    )]
    NotHere {
        /// The UUID.
        uuid: String,
    },
    /// Processes share GPU memory, which cannot be restored on other GPUs.
    #[error(
        "processes of the job share GPU memory (NCCL's peer-to-peer transport, CUDA IPC), which can be restored on \
         the same GPUs only; restore on their machine, and run a job that has to move with cuda.nccl = \
         \"checkpointable\""
    )]
    Shared,
    /// The user's map names a GPU twice.
    #[error("the map of GPUs names {uuid} twice; each GPU can replace only one")]
    Twice {
        /// The UUID.
        uuid: String,
    },
}

impl Refusal {
    /// Returns true if the refusal may be temporary, until another program, or the rest of the job's own processes, has
    /// exited.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Memory { .. } | Self::Taken { .. } => true,
            Self::NoGpu
            | Self::OlderDriver { .. }
            | Self::TooFew { .. }
            | Self::OtherModel { .. }
            | Self::Mig { .. }
            | Self::Prohibited { .. }
            | Self::Unmapped { .. }
            | Self::NotTheJobs { .. }
            | Self::NotHere { .. }
            | Self::Shared
            | Self::Twice { .. } => false,
        }
    }
}

/// GPUs that a restore may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Here<'a> {
    /// The machine.
    pub machine: &'a Inventory,
    /// Indexes of the GPUs that may be chosen.
    pub open: &'a [usize],
    /// The user's map, which may name any GPU; empty if there is none.
    pub wanted: &'a [(String, String)],
}

/// Index of the replacement for each GPU of the job's machine.
type Places = Vec<Option<usize>>;

/// Plans a restore.
pub(crate) fn plan(then: &CudaFacts, here: Here<'_>) -> Result<GpuPlan, Refusal> {
    let now = here.machine;
    if now.gpus.is_empty() {
        return Err(Refusal::NoGpu);
    }
    let other_driver = compare_drivers(then, now)?;
    let mut places = if here.wanted.is_empty() {
        choose(then, here)?
    } else {
        follow(then, here)?
    };
    let stays = |(old, place): (&GpuFacts, &Option<usize>)| {
        place.is_none_or(|place| now.gpus[place].uuid == old.uuid)
    };
    let mut map = GpuPairs::new();
    if !then.gpus.iter().zip(&places).all(stays) {
        place_hidden(then, now, &mut places)?;
        let pairs = then.gpus.iter().zip(places.into_iter().flatten());
        map.extend(pairs.map(|(old, new)| (old.uuid.clone(), now.gpus[new].uuid.clone())));
    }
    let resident = then.resident.as_ref();
    if resident.is_some_and(|facts| facts.is_shared() && facts.moves(&map)) {
        return Err(Refusal::Shared);
    }
    Ok(GpuPlan { map, other_driver })
}

/// Compares the driver versions. A process keeps its original CUDA library, which requires a driver of its branch or a
/// newer one. A newer driver, or another release of the branch, is accepted; if the library is missing, another check
/// refuses the image.
fn compare_drivers(then: &CudaFacts, now: &Inventory) -> Result<Option<(String, String)>, Refusal> {
    let here = now.driver.clone().unwrap_or_default();
    if then.driver.is_empty() || here.is_empty() || then.driver == here {
        return Ok(None);
    }
    let both = (then.driver.clone(), here);
    match (branch(&both.0), branch(&both.1)) {
        (Some(old), Some(new)) if new < old => Err(Refusal::OlderDriver {
            then: both.0,
            now: both.1,
        }),
        _ => Ok(Some(both)),
    }
}

/// Returns the branch of a version, such as 580 of `580.159.04`.
pub(crate) fn branch(release: &str) -> Option<u32> {
    release.split('.').next()?.parse().ok()
}

/// Returns true for a GPU that no process of the job could see, and that therefore holds none of its memory.
fn is_hidden(old: &GpuFacts) -> bool {
    old.visible == Some(false)
}

/// Chooses the same GPUs if they may be used, and replaces others by the emptiest of their model. GPUs that the job did
/// not see get none.
fn choose(then: &CudaFacts, here: Here<'_>) -> Result<Places, Refusal> {
    let gpu = |place: &usize| &here.machine.gpus[*place];
    let seen = || (0..then.gpus.len()).filter(|index| !is_hidden(&then.gpus[*index]));
    if here.open.len() < seen().count() {
        return Err(Refusal::TooFew {
            then: seen().count(),
            now: here.open.len(),
        });
    }
    let mut spare = here.open.to_vec();
    let mut places: Places = vec![None; then.gpus.len()];
    for index in seen() {
        let old = &then.gpus[index];
        if let Some(at) = spare.iter().position(|place| gpu(place).uuid == old.uuid) {
            check(old, gpu(&spare[at]))?;
            places[index] = Some(spare.remove(at));
        }
    }
    spare.sort_by_key(|place| Reverse(gpu(place).memory.map_or(0, |memory| memory.free_bytes)));
    let mut lost: Vec<usize> = seen().filter(|index| places[*index].is_none()).collect();
    // The GPU with the most memory in use is replaced first.
    lost.sort_by_key(|index| Reverse(then.gpus[*index].used_bytes));
    for index in lost {
        let old = &then.gpus[index];
        let fits = spare
            .iter()
            .position(|place| check(old, gpu(place)).is_ok());
        let fits =
            fits.ok_or_else(|| shortcoming(old, &spare.iter().map(gpu).collect::<Vec<_>>()))?;
        places[index] = Some(spare.remove(fits));
    }
    Ok(places)
}

/// Returns the reason why no GPU of `spare`, emptiest first, can replace `old`: the shortcoming of the best one.
fn shortcoming(old: &GpuFacts, spare: &[&Gpu]) -> Refusal {
    let of_the_model = spare.iter().find(|gpu| same_model(old, gpu));
    let lacks = of_the_model.and_then(|gpu| check(old, gpu).err());
    lacks.unwrap_or_else(|| Refusal::OtherModel {
        then: label(&old.name, &old.uuid),
        now: models(spare),
    })
}

/// Applies the user's map, which must name every GPU that the job saw.
fn follow(then: &CudaFacts, here: Here<'_>) -> Result<Places, Refusal> {
    for (index, (old, new)) in here.wanted.iter().enumerate() {
        for (earlier_old, earlier_new) in &here.wanted[..index] {
            if earlier_old == old || earlier_new == new {
                let uuid = if earlier_old == old { old } else { new };
                return Err(Refusal::Twice { uuid: uuid.clone() });
            }
        }
        if !then.gpus.iter().any(|gpu| gpu.uuid == *old) {
            return Err(Refusal::NotTheJobs { uuid: old.clone() });
        }
    }
    let gpus = &here.machine.gpus;
    let place = |old: &GpuFacts| {
        let Some((_, new)) = here.wanted.iter().find(|(from, _)| *from == old.uuid) else {
            let gpu = label(&old.name, &old.uuid);
            return if is_hidden(old) {
                Ok(None)
            } else {
                Err(Refusal::Unmapped { gpu })
            };
        };
        let found = gpus.iter().position(|gpu| gpu.uuid == *new);
        let found = found.ok_or_else(|| Refusal::NotHere { uuid: new.clone() })?;
        if !is_hidden(old) {
            check(old, &gpus[found])?;
        }
        Ok(Some(found))
    };
    then.gpus.iter().map(place).collect()
}

/// Gives the remaining GPUs to those that the job did not see: the same GPU, the same model, or any. The driver
/// requires them in the map (580, measured: error 1 without a GPU that `CUDA_VISIBLE_DEVICES` hid).
fn place_hidden(then: &CudaFacts, now: &Inventory, places: &mut Places) -> Result<(), Refusal> {
    let ranks: [fn(&GpuFacts, &Gpu) -> bool; 3] =
        [|old, gpu| old.uuid == gpu.uuid, same_model, |_, _| true];
    for rank in ranks {
        for (index, old) in then.gpus.iter().enumerate() {
            let is_free = |place: &usize| !places.contains(&Some(*place));
            if places[index].is_none() {
                let mut free = (0..now.gpus.len()).filter(is_free);
                places[index] = free.find(|place| rank(old, &now.gpus[*place]));
            }
        }
    }
    if places.iter().all(Option::is_some) {
        return Ok(());
    }
    Err(Refusal::TooFew {
        then: then.gpus.len(),
        now: now.gpus.len(),
    })
}

/// Checks that a GPU can hold the memory that the job had on another one.
fn check(old: &GpuFacts, new: &Gpu) -> Result<(), Refusal> {
    let gpu = label(&new.name, &new.uuid);
    if !same_model(old, new) {
        return Err(Refusal::OtherModel {
            then: label(&old.name, &old.uuid),
            now: gpu,
        });
    }
    if new.mig == Some(true) {
        return Err(Refusal::Mig { gpu });
    }
    match (new.mode, new.busy) {
        (Some(ComputeMode::Prohibited), _) => return Err(Refusal::Prohibited { gpu }),
        (Some(ComputeMode::Exclusive), Some(true)) => return Err(Refusal::Taken { gpu }),
        (Some(ComputeMode::Exclusive | ComputeMode::Shared) | None, _) => {}
    }
    match (old.used_bytes, new.memory) {
        (Some(needed), Some(memory)) if needed > memory.free_bytes => Err(Refusal::Memory {
            gpu,
            needed,
            free: memory.free_bytes,
        }),
        _ => Ok(()),
    }
}

/// Returns true if the models are equal. If the image lacks the model, the UUID or the user's map decides.
fn same_model(old: &GpuFacts, new: &Gpu) -> bool {
    old.name.is_empty() || old.name == new.name
}

fn label(name: &str, uuid: &str) -> String {
    if name.is_empty() {
        uuid.to_owned()
    } else {
        format!("{name} ({uuid})")
    }
}

fn models(gpus: &[&Gpu]) -> String {
    let mut names: Vec<&str> = gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}

#[cfg(test)]
mod tests;
