//! The facts about the job's GPUs in an image. They are sufficient to decide, later or on another machine, if the job
//! can be restored there. This module must not know how that is decided: see `gpu::mapping`.

use serde::{Deserialize, Serialize};

use super::resident_facts::ResidentFacts;
use crate::checked;
use crate::cuda::{GpuUse, GpuUuid, Inventory};
use crate::job::variable;

/// Variable that lists the GPUs visible to CUDA in a process.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Variable that sets the order in which CUDA numbers the GPUs.
const DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";

/// The CUDA part of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaFacts {
    /// The driver's release.
    pub driver: String,
    /// The GPUs, in the driver's order.
    pub gpus: Vec<GpuFacts>,
    /// Pids of the CUDA processes, as the job sees them.
    #[serde(deserialize_with = "checked::pids")]
    pub pids: Vec<i32>,
    /// Pids of those CUDA processes that were moved to other GPUs at a time when their agents had no memory there yet
    /// from which to detect the move.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "checked::pids"
    )]
    pub moved: Vec<i32>,
    /// The threads that restore the GPU state of the processes while all other threads are frozen; not recorded in the
    /// first images.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub standing: Vec<SparedThreads>,
    /// Device memory that the image stores separately from the processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<ResidentFacts>,
}

/// Pairs of GPU UUIDs: the GPU that the job had, and the GPU that replaces it.
pub type GpuPairs = Vec<(String, String)>;

/// Threads of a process that work while its other threads are frozen; pids as the job sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SparedThreads {
    /// The process.
    #[serde(deserialize_with = "checked::pid")]
    pub pid: i32,
    /// The spared threads: the driver's, and the agent's if it has one.
    #[serde(deserialize_with = "checked::pids")]
    pub threads: Vec<i32>,
}

/// A GPU at the time of the snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RecordedGpu")]
pub struct GpuFacts {
    /// The UUID, with the prefix `GPU-`.
    pub uuid: String,
    /// The model name; empty if unknown.
    pub name: String,
    /// Size of the device memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Device memory that the job used there, in bytes; a lower bound if it is known for only some of the processes.
    pub used_bytes: Option<u64>,
    /// True if the GPU was partitioned (MIG).
    pub mig: Option<bool>,
    /// True if the GPU was visible to a process of the job.
    pub visible: Option<bool>,
}

/// The accepted forms in a manifest; the first images recorded only the UUID.
#[derive(Deserialize)]
#[serde(untagged)]
enum RecordedGpu {
    Uuid(String),
    Facts {
        uuid: String,
        #[serde(default)]
        name: String,
        memory_bytes: Option<u64>,
        used_bytes: Option<u64>,
        mig: Option<bool>,
        visible: Option<bool>,
    },
}

impl From<RecordedGpu> for GpuFacts {
    fn from(told: RecordedGpu) -> Self {
        match told {
            RecordedGpu::Uuid(uuid) => Self {
                uuid,
                ..Self::default()
            },
            RecordedGpu::Facts {
                uuid,
                name,
                memory_bytes,
                used_bytes,
                mig,
                visible,
            } => Self {
                uuid,
                name,
                memory_bytes,
                used_bytes,
                mig,
                visible,
            },
        }
    }
}

impl CudaFacts {
    /// Describes the machine's GPUs and the job's use of them, without pids. `uses` are the job's own, `environments`
    /// those of its CUDA processes.
    pub(crate) fn of(machine: &Inventory, uses: &[GpuUse], environments: &[Vec<u8>]) -> Self {
        let seen: Vec<Option<Vec<usize>>> = environments
            .iter()
            .map(|environment| visible(machine, |name| variable(environment, name)))
            .collect();
        let gpus = machine.gpus.iter().enumerate().map(|(index, gpu)| {
            let used: Vec<&GpuUse> = uses.iter().filter(|one| one.uuid == gpu.uuid).collect();
            let told = used.iter().filter_map(|one| one.bytes);
            GpuFacts {
                uuid: gpu.uuid.clone(),
                name: gpu.name.clone(),
                memory_bytes: gpu.memory.map(|memory| memory.total_bytes),
                used_bytes: told.reduce(u64::saturating_add),
                mig: gpu.mig,
                visible: if used.is_empty() {
                    seen_by_any(&seen, index)
                } else {
                    Some(true)
                },
            }
        });
        Self {
            driver: machine.driver.clone().unwrap_or_default(),
            gpus: gpus.collect(),
            pids: Vec::new(),
            moved: Vec::new(),
            standing: Vec::new(),
            resident: None,
        }
    }

    /// Adds `bytes` to the job's use of a GPU.
    pub(crate) fn add(&mut self, uuid: GpuUuid, bytes: u64) {
        let gpus = self.gpus.iter_mut();
        for gpu in gpus.filter(|gpu| gpu.uuid.parse() == Ok(uuid)) {
            let used = gpu.used_bytes.unwrap_or_default();
            gpu.used_bytes = Some(used.saturating_add(bytes));
        }
    }

    /// Returns the facts that remain to be restored if the separately stored memory is on the GPUs already.
    pub(crate) fn beside_resident(mut self) -> Self {
        if let Some(resident) = &self.resident {
            for gpu in &mut self.gpus {
                let there = resident.bytes_on(&gpu.uuid);
                gpu.used_bytes = gpu.used_bytes.map(|used| used.saturating_sub(there));
            }
        }
        self
    }

    /// Returns [`CudaFacts::moved`] for the processes when they are restored with this map, which is empty if they stay
    /// on their GPUs.
    pub(crate) fn moved_by(&self, map: &[(String, String)]) -> Vec<i32> {
        let sees = |uuid: &str| {
            let mut gpus = self.gpus.iter();
            gpus.any(|gpu| gpu.uuid == uuid && gpu.visible != Some(false))
        };
        let moves = map.iter().any(|(old, new)| old != new && sees(old));
        let knows = |pid: i32| {
            let mut processes = self.resident.iter().flat_map(|facts| &facts.processes);
            processes.any(|process| process.pid == pid && !process.segments.is_empty())
        };
        let moved = |pid: &i32| self.moved.contains(pid) || moves && !knows(*pid);
        self.pids.iter().copied().filter(moved).collect()
    }
}

/// Returns true if one of the processes sees the GPU; `None` if that cannot be determined for all of them.
fn seen_by_any(seen: &[Option<Vec<usize>>], index: usize) -> Option<bool> {
    let sees = |known: &Option<Vec<usize>>| known.as_ref().map(|gpus| gpus.contains(&index));
    if seen.iter().any(|known| sees(known) == Some(true)) {
        return Some(true);
    }
    let all_told = !seen.is_empty() && seen.iter().all(Option::is_some);
    all_told.then_some(false)
}

/// Returns the GPUs, as indexes into the inventory, that are visible to a process with these variables. Returns `None`
/// if that cannot be determined: CUDA numbers GPUs of several models by their speed.
pub(crate) fn visible(
    machine: &Inventory,
    variable: impl Fn(&str) -> Option<String>,
) -> Option<Vec<usize>> {
    let all = || machine.gpus.iter().enumerate();
    let Some(list) = variable(VISIBLE_DEVICES) else {
        return Some(all().map(|(index, _)| index).collect());
    };
    let one_model = machine
        .gpus
        .windows(2)
        .all(|two| two[0].name == two[1].name);
    let in_order = one_model || variable(DEVICE_ORDER).as_deref() == Some("PCI_BUS_ID");
    let mut seen = Vec::new();
    for word in list.split(',').map(str::trim) {
        let found = if let Ok(number) = word.parse::<usize>() {
            if !in_order {
                return None;
            }
            Some(number).filter(|number| *number < machine.gpus.len())
        } else if word.starts_with("GPU-") {
            all().find_map(|(index, gpu)| gpu.uuid.starts_with(word).then_some(index))
        } else if word.starts_with("MIG-") {
            return None;
        } else {
            None
        };
        // CUDA ignores everything after the first word that names no GPU.
        let Some(index) = found else { break };
        seen.push(index);
    }
    Some(seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{Gpu, GpuMemory};
    use crate::run::resident_facts::{ResidentProcess, ResidentSegment};

    fn machine(names: &[&str]) -> Inventory {
        let gpus = names.iter().enumerate().map(|(index, name)| Gpu {
            index: u32::try_from(index).unwrap(),
            name: (*name).to_owned(),
            uuid: format!("GPU-{index}"),
            memory: Some(GpuMemory {
                total_bytes: 80,
                free_bytes: 70,
            }),
            persistent: None,
            mig: Some(false),
            mode: None,
            busy: None,
        });
        Inventory {
            driver: Some("580.1".to_owned()),
            gpus: gpus.collect(),
        }
    }

    #[test]
    fn visible_devices_are_read_as_cuda_reads_them() {
        let one_model = machine(&["A", "A", "A"]);
        let cases: [(Option<&str>, Option<&[usize]>); 8] = [
            (None, Some(&[0, 1, 2])),
            (Some("1"), Some(&[1])),
            (Some(" 2, 0"), Some(&[2, 0])),
            (Some(""), Some(&[])),
            (Some("-1"), Some(&[])),
            (Some("0,9,1"), Some(&[0])),
            (Some("GPU-1,0"), Some(&[1, 0])),
            (Some("MIG-GPU-1/0/0"), None),
        ];
        for (list, expected) in cases {
            let of = |name: &str| list.filter(|_| name == VISIBLE_DEVICES).map(str::to_owned);
            assert_eq!(visible(&one_model, of).as_deref(), expected, "{list:?}");
        }
    }

    #[test]
    fn gpu_numbers_of_mixed_models_need_bus_order() {
        let mixed = machine(&["A", "B"]);
        let of = |order: &'static str| {
            move |name: &str| match name {
                VISIBLE_DEVICES => Some("1".to_owned()),
                DEVICE_ORDER => Some(order.to_owned()),
                _ => None,
            }
        };
        assert_eq!(visible(&mixed, of("FASTEST_FIRST")), None);
        assert_eq!(visible(&mixed, of("PCI_BUS_ID")), Some(vec![1]));
    }

    #[test]
    fn gpu_in_use_is_visible_despite_the_environment() {
        let used = |pid, uuid: &str, bytes| GpuUse {
            pid,
            uuid: uuid.to_owned(),
            bytes,
            through_mps: false,
        };
        let uses = [
            used(1, "GPU-0", Some(5)),
            used(2, "GPU-0", Some(6)),
            used(2, "GPU-2", None),
        ];
        let environment = b"A=b\0CUDA_VISIBLE_DEVICES=0\0".to_vec();
        let facts = CudaFacts::of(&machine(&["A", "A", "A"]), &uses, &[environment]);
        let of = |index: usize| (facts.gpus[index].used_bytes, facts.gpus[index].visible);
        assert_eq!(of(0), (Some(11), Some(true)));
        assert_eq!(of(1), (None, Some(false)));
        assert_eq!(of(2), (None, Some(true)));
        assert_eq!(seen_by_any(&[Some(vec![0]), None], 1), None);
    }

    #[test]
    fn process_moved_before_its_first_memory_stays_known() {
        let holds = |pid, lens: &[u64]| ResidentProcess {
            pid,
            segments: lens.iter().map(|len| segment(*len)).collect(),
        };
        let facts = CudaFacts {
            pids: vec![300, 301, 302],
            moved: vec![302],
            resident: Some(ResidentFacts {
                processes: vec![holds(300, &[8]), holds(301, &[])],
                part_bytes: 1 << 20,
            }),
            ..CudaFacts::of(
                &machine(&["A", "A"]),
                &[],
                &[b"CUDA_VISIBLE_DEVICES=0\0".to_vec()],
            )
        };
        let map = |pairs: [(&str, &str); 2]| {
            let pairs = pairs.map(|(old, new)| (old.to_owned(), new.to_owned()));
            facts.moved_by(&pairs)
        };
        assert_eq!(facts.moved_by(&[]), [302]);
        assert_eq!(map([("GPU-0", "GPU-5"), ("GPU-1", "GPU-1")]), [301, 302]);
        assert_eq!(
            map([("GPU-0", "GPU-0"), ("GPU-1", "GPU-5")]),
            [302],
            "unseen"
        );
    }

    fn segment(len: u64) -> ResidentSegment {
        ResidentSegment {
            address: 1 << 40,
            len,
            gpu: "GPU-0".to_owned(),
            same_as: None,
        }
    }

    #[test]
    fn images_that_know_only_uuids_are_read() {
        let old = r#"{"driver":"580.1","gpus":["GPU-0"],"pids":[300]}"#;
        let facts: CudaFacts = serde_json::from_str(old).unwrap();
        assert_eq!(facts.gpus[0].uuid, "GPU-0");
        assert_eq!(facts.gpus[0].used_bytes, None);
        let text = serde_json::to_string(&facts).unwrap();
        assert_eq!(serde_json::from_str::<CudaFacts>(&text).unwrap(), facts);
    }
}
