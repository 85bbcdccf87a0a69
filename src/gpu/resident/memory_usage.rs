//! GPU memory of the job per GPU, as reported by the agents, because NVML does not count memory that agents provide.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use super::kept_memory::{HELLO_LIMIT, agent};
use super::policy::Cover;
use crate::agent_client::{AgentError, Channel, Holding, Token};
use crate::clock;
use crate::cuda::GpuUuid;

use crate::run::gpu_facts::GpuFacts;

/// Time limit for a process that is allocating memory, which takes milliseconds.
const BUSY_LIMIT: Duration = Duration::from_millis(200);
/// Time between two queries.
const PAUSE: Duration = Duration::from_millis(1);

/// Memory that agents hold on each GPU. Memory shared by several processes counts once.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryUsage(BTreeMap<GpuUuid, Held>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Held {
    bytes: u64,
    imported: u64,
}

impl MemoryUsage {
    /// Queries the agents of running processes; `None` if one of them does not reply.
    pub fn ask(channel: &mut Channel, token: &Token, covers: &[Cover]) -> Option<Self> {
        let mut sum = Self::default();
        for cover in covers.iter().filter(|cover| cover.bytes() > 0) {
            match ask(channel, token, cover) {
                Ok(holdings) => sum.add(&holdings),
                Err(error) => {
                    tracing::debug!(%error, "the memory on each GPU is unknown");
                    return None;
                }
            }
        }
        Some(sum)
    }

    fn add(&mut self, holdings: &[Holding]) {
        for one in holdings {
            let held = self.0.entry(GpuUuid::from_bytes(one.device)).or_default();
            held.bytes = held.bytes.saturating_add(one.bytes);
            held.imported = held.imported.saturating_add(one.imported);
        }
    }

    /// Returns the sum in bytes.
    pub fn bytes(&self) -> u64 {
        let held = self.0.values().map(|held| held.bytes);
        held.fold(0, u64::saturating_add)
    }

    /// Returns the bytes per GPU that NVML does not count.
    pub fn imported(&self) -> impl Iterator<Item = (GpuUuid, u64)> {
        let held = self.0.iter().map(|(gpu, held)| (*gpu, held.imported));
        held.filter(|(_, bytes)| *bytes > 0)
    }

    fn by_gpu(&self) -> Vec<(GpuUuid, u64)> {
        let held = self.0.iter().map(|(gpu, held)| (*gpu, held.bytes));
        held.filter(|(_, bytes)| *bytes > 0).collect()
    }
}

/// Queries an agent; repeats the query while its process is allocating.
fn ask(channel: &mut Channel, token: &Token, cover: &Cover) -> Result<Vec<Holding>, AgentError> {
    let mut agent = agent(channel, token, cover.host_pid, cover.pid);
    let deadline = clock::now() + BUSY_LIMIT;
    loop {
        match agent.holdings(HELLO_LIMIT) {
            Err(AgentError::Busy { .. }) if clock::now() < deadline => thread::sleep(PAUSE),
            told => return told,
        }
    }
}

/// Returns the largest possible shadow of the job's memory on each GPU: the memory there or, if unknown, all memory
/// that agents hold (`covered`) on each GPU in use. If agents hold none at present, the same: the copier cannot start
/// without a GPU, and a job whose memory only agents can save may allocate again before it is halted.
pub(super) fn shadows(
    held: Option<&MemoryUsage>,
    gpus: &[GpuFacts],
    covered: u64,
) -> Vec<(GpuUuid, u64)> {
    let known = held.map(MemoryUsage::by_gpu).unwrap_or_default();
    if !known.is_empty() {
        return known;
    }
    let is_used = |gpu: &&GpuFacts| gpu.used_bytes.is_some_and(|bytes| bytes > 0);
    // A GPU that the driver does not list yet is opened later, with its memory; if it lists none, each may be in use.
    let any = !gpus.iter().any(|gpu| is_used(&gpu));
    let gpus = gpus.iter().filter(|gpu| any || is_used(gpu));
    let gpus = gpus.filter_map(|gpu| gpu.uuid.parse().ok());
    gpus.map(|gpu| (gpu, covered)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUIDS: [&str; 3] = [
        "GPU-00000000-0000-0000-0000-000000000001",
        "GPU-00000000-0000-0000-0000-000000000002",
        "GPU-00000000-0000-0000-0000-000000000003",
    ];

    fn gpu(number: u8) -> GpuUuid {
        UUIDS[usize::from(number) - 1].parse().expect("a UUID")
    }

    fn holding(number: u8, bytes: u64, imported: u64) -> Holding {
        Holding {
            device: *gpu(number).as_bytes(),
            bytes,
            imported,
        }
    }

    fn used(bytes: [Option<u64>; 3]) -> Vec<GpuFacts> {
        let gpus = UUIDS.iter().zip(bytes).map(|(uuid, used_bytes)| GpuFacts {
            uuid: (*uuid).to_owned(),
            used_bytes,
            ..GpuFacts::default()
        });
        gpus.collect()
    }

    #[test]
    fn shadow_size_follows_agents_instead_of_nvml() {
        let mut held = MemoryUsage::default();
        held.add(&[holding(1, 70, 0), holding(2, 4, 4)]);
        held.add(&[holding(2, 6, 1), holding(3, 0, 0)]);
        assert_eq!(held.bytes(), 80);
        assert_eq!(held.imported().collect::<Vec<_>>(), [(gpu(2), 5)]);
        let gpus = used([Some(75), Some(2), Some(1)]);
        let expected = [(gpu(1), 70), (gpu(2), 10)];
        assert_eq!(shadows(Some(&held), &gpus, 90), expected);
    }

    #[test]
    fn unknown_memory_may_be_on_any_used_gpu() {
        let known = shadows(None, &used([Some(70), Some(0), None]), 75);
        assert_eq!(known, [(gpu(1), 75)]);
        let unknown = shadows(None, &used([None, None, Some(0)]), 75);
        assert_eq!(unknown, [(gpu(1), 75), (gpu(2), 75), (gpu(3), 75)]);
        let freed = MemoryUsage::default();
        assert_eq!(
            shadows(Some(&freed), &used([Some(7), None, None]), 0),
            [(gpu(1), 0)]
        );
    }

    #[test]
    fn sums_that_no_gpu_has_do_not_wrap() {
        let mut held = MemoryUsage::default();
        held.add(&[
            holding(1, u64::MAX, u64::MAX),
            holding(1, 1, 1),
            holding(2, 1, 0),
        ]);
        assert_eq!(held.bytes(), u64::MAX);
    }
}
