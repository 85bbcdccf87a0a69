//! The choice of GPUs for a restore: a pure function of the GPUs that the job had, those of this machine, and the user's
//! wishes.
//!
//! ```text
//! the user gave a map           that one, checked
//! all its GPUs are here         the same ones
//! some or all are not           others of their model, the emptiest first, for those that are not
//! ```
//! Every chosen GPU is checked for model, mode and free memory. A restore that fails for lack of GPU memory is final for
//! the process (driver 580); a refusal here costs nothing.

use std::cmp::Reverse;

use crate::cuda::{ComputeMode, Gpu, Inventory};
use crate::run::format::size;
use crate::run::gpu_facts::{CudaFacts, GpuFacts, GpuPairs};

/// The GPUs that a restore uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuPlan {
    /// Empty where the job gets the GPUs that it had. Otherwise names every GPU of its machine: the driver refuses a
    /// map in which one is missing (580: error 1).
    pub map: GpuPairs,
    /// The driver then and now, where it is not the same.
    pub other_driver: Option<(String, String)>,
}

/// Why this machine's GPUs cannot take the job. Nothing was touched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No driver, or no GPU.
    #[error("this machine has no NVIDIA GPU; restore on one that has")]
    NoGpu,
    /// A driver of an older branch.
    #[error(
        "the image was made with NVIDIA driver {then} and this machine has the older {now}: a newer CUDA library does not \
         work on it; restore where the driver is {then}"
    )]
    OlderDriver {
        /// The driver of the snapshot.
        then: String,
        /// The one that is here.
        now: String,
    },
    /// Fewer GPUs than the job had.
    #[error(
        "the job had {then} GPUs and {now} can be used here (CUDA_VISIBLE_DEVICES counts); restore where there are as many"
    )]
    TooFew {
        /// Number of GPUs that the job had.
        then: usize,
        /// Number of GPUs on this machine.
        now: usize,
    },
    /// Another model than the job had.
    #[error(
        "the job had {then} and there is only {now} to take its place; restore on the same model"
    )]
    OtherModel {
        /// Model and UUID of the GPU that it had.
        then: String,
        /// The models that are here.
        now: String,
    },
    /// The GPU is split up.
    #[error(
        "{gpu} is split up (MIG), and a job cannot come back on a part of a GPU; switch it off (nvidia-smi -mig 0)"
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
    /// The GPU admits one process only, and one uses it.
    #[error(
        "{gpu} is open to one process only and one is there, an MPS server perhaps; end that one or open the GPU (nvidia-smi -c 0)"
    )]
    Taken {
        /// Model and UUID.
        gpu: String,
    },
    /// The GPU has too little free memory.
    #[error("{gpu} has {} free and the job needs {}; end what uses it, or give a map to other GPUs", size(*free), size(*needed))]
    Memory {
        /// Model and UUID.
        gpu: String,
        /// Bytes that the job had there.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The user's map lacks a GPU.
    #[error(
        "the map of GPUs names none for {gpu}, which the job had; the driver wants all of them"
    )]
    Unmapped {
        /// Model and UUID.
        gpu: String,
    },
    /// The user's map begins at a GPU that the job had not.
    #[error(
        "the map of GPUs begins at {uuid}, which the job did not have; `ckpt-run show` lists those"
    )]
    NotTheJobs {
        /// The UUID.
        uuid: String,
    },
    /// The user's map ends at a GPU that is not here.
    #[error(
        "the map of GPUs leads to {uuid}, which is not here; nvidia-smi -L lists those that are"
    )]
    NotHere {
        /// The UUID.
        uuid: String,
    },
    /// Memory that several processes have does not come back on other GPUs.
    #[error(
        "processes of the job share GPU memory (NCCL's peer-to-peer transport, CUDA IPC), which comes back on the same \
         GPUs only; restore where these are, and run a job that has to move with cuda.nccl = \"checkpointable\""
    )]
    Shared,
    /// The user's map names a GPU twice.
    #[error("the map of GPUs names {uuid} twice; each GPU takes the place of one")]
    Twice {
        /// The UUID.
        uuid: String,
    },
}

impl Refusal {
    /// Returns true if the refusal may pass when another program, or the rest of the job's own processes, has exited.
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

/// The GPUs that a restore may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Here<'a> {
    /// The machine.
    pub machine: &'a Inventory,
    /// Places in it of the GPUs that the choice may take.
    pub open: &'a [usize],
    /// The user's map, which may take any; empty leaves the choice to us.
    pub wanted: &'a [(String, String)],
}

/// For each GPU of the job's machine, the index of the GPU that takes its place.
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

/// A process keeps the CUDA library that it began with, and that is newer than an older driver. A newer driver, or
/// another release of the branch, is worth a try: where the library is missing, the image is refused for that.
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

/// 580 of `580.159.04`.
pub(crate) fn branch(release: &str) -> Option<u32> {
    release.split('.').next()?.parse().ok()
}

/// A GPU that no process of the job could see holds nothing of it.
fn is_hidden(old: &GpuFacts) -> bool {
    old.visible == Some(false)
}

/// The same GPUs where they are open to us, the emptiest ones of the model in the place of others; none for those
/// that the job did not see.
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
    // The one that needs most chooses first.
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

/// Why none of these, the emptiest first, can stand in for `old`: what the best one lacks.
fn shortcoming(old: &GpuFacts, spare: &[&Gpu]) -> Refusal {
    let of_the_model = spare.iter().find(|gpu| same_model(old, gpu));
    let lacks = of_the_model.and_then(|gpu| check(old, gpu).err());
    lacks.unwrap_or_else(|| Refusal::OtherModel {
        then: label(&old.name, &old.uuid),
        now: models(spare),
    })
}

/// The user's map, with every GPU that the job saw.
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

/// Gives those that the job did not see what is left: themselves, their model, anything. The driver wants them in a
/// map all the same (580, measured: error 1 without one that `CUDA_VISIBLE_DEVICES` hid).
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

/// Checks that a GPU can take over what the job had on another one.
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

/// An image that does not know the model is taken at its UUID, or at the user's word.
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
