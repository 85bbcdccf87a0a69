//! Choice between resident memory and the driver's own suspend: a pure function of the settings and the agents'
//! replies.

use super::error::ResidentError;
use crate::agent_client::Hello;
use crate::config::Memory;

/// CUDA process of the job, and the reply of its agent if it has one.
#[derive(Clone, Debug)]
pub(crate) struct Cover {
    /// Pid on the host.
    pub host_pid: i32,
    /// Pid in the job's namespace.
    pub pid: i32,
    pub hello: Option<Hello>,
}

/// Treatment of device memory in a snapshot.
#[derive(Debug)]
pub(crate) enum Way {
    /// The driver copies it into host memory; with the reason if the user may have expected otherwise.
    Driver(Option<&'static str>),
    /// Memory of these processes' agents stays on the GPUs; some of the processes may have no agent.
    Resident(Vec<Cover>),
}

impl Cover {
    /// Returns the bytes of device memory that the agent can release.
    pub(super) fn bytes(&self) -> u64 {
        let held = self.hello.as_ref().filter(|hello| !hello.moved);
        held.map_or(0, |hello| hello.bytes)
    }

    /// Marks the process if it is among those that were moved to another GPU, which its agent may not know.
    pub(super) fn know(&mut self, moved: &[i32]) {
        if let Some(hello) = &mut self.hello {
            hello.moved |= moved.contains(&self.pid);
        }
    }

    /// Returns true if only the agent can save the process's memory, because the driver would lose it.
    pub(super) fn is_bound(&self) -> bool {
        let bound = |hello: &Hello| hello.imported || hello.lends;
        self.hello.as_ref().is_some_and(bound)
    }

    /// Returns true if the memory cannot be restored at all: it is the driver's own and shared with other processes, it
    /// was moved to a GPU on which memory cannot be imported, or the agent does not know how it is mapped.
    fn is_hopeless(&self) -> bool {
        let hopeless = |hello: &Hello| hello.shares || hello.opaque || hello.lends && hello.moved;
        self.hello.as_ref().is_some_and(hopeless)
    }
}

/// Checks that all memory of locked processes that the driver would lose is planned for. Earlier replies of agents are
/// outdated, because a program shares memory within milliseconds after its start.
///
/// # Errors
/// [`ResidentError::Newcomer`].
pub(super) fn expect_no_newcomer(
    now: &[Cover],
    is_prepared: impl Fn(&Cover) -> bool,
) -> Result<(), ResidentError> {
    let is_new = |cover: &&Cover| cover.is_hopeless() || cover.is_bound() && !is_prepared(cover);
    match now.iter().find(is_new) {
        Some(cover) => Err(ResidentError::Newcomer { pid: cover.pid }),
        None => Ok(()),
    }
}

/// Returns the bytes of device memory that stays on the GPUs.
pub(crate) fn bytes(covers: &[Cover]) -> u64 {
    covers.iter().map(Cover::bytes).sum()
}

/// Number of descriptors for one piece of memory in transfer.
const PIECE_DESCRIPTORS: u64 = 2;
/// Number of descriptors for the rest of the program, with a margin.
const OTHER_DESCRIPTORS: u64 = 256;

/// The purpose of a suspend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The job continues on its GPUs.
    Snapshot,
    /// The memory must leave the GPUs, so that other programs can use them.
    Pause,
}

/// Chooses. `descriptors` is the limit on open descriptors.
///
/// # Errors
/// The memory cannot be restored either way.
pub(crate) fn choose(
    memory: Memory,
    purpose: Purpose,
    descriptors: u64,
    covers: Vec<Cover>,
) -> Result<Way, ResidentError> {
    if let Some(cover) = covers.iter().find(|cover| cover.is_hopeless()) {
        let pid = cover.pid;
        let opaque = cover.hello.as_ref().is_some_and(|hello| hello.opaque);
        return Err(if opaque {
            ResidentError::Opaque { pid }
        } else {
            ResidentError::Shares { pid }
        });
    }
    let hellos = covers.iter().filter_map(|cover| cover.hello.as_ref());
    let pieces: u64 = hellos.map(|hello| u64::from(hello.segments)).sum();
    let fits = pieces * PIECE_DESCRIPTORS + OTHER_DESCRIPTORS <= descriptors;
    let bound = covers.iter().any(Cover::is_bound);
    if bound && !fits {
        let limit = descriptors;
        return Err(ResidentError::Descriptors { pieces, limit });
    }
    if bound {
        return Ok(Way::Resident(covers));
    }
    let moved = |hello: &Hello| hello.moved && hello.bytes > 0;
    let moved = |cover: &Cover| cover.hello.as_ref().is_some_and(moved);
    Ok(match memory {
        Memory::Driver => Way::Driver(None),
        Memory::Auto | Memory::Resident if purpose == Purpose::Pause => Way::Driver(None),
        Memory::Auto | Memory::Resident if covers.iter().any(moved) => Way::Driver(Some(
            "the job was restored onto another GPU, where its driver cannot import memory",
        )),
        Memory::Auto | Memory::Resident if bytes(&covers) == 0 => {
            Way::Driver(Some("the job has no large allocations that an agent holds"))
        }
        Memory::Auto | Memory::Resident if !fits => Way::Driver(Some(
            "the job has more pieces of GPU memory than the limit on open descriptors allows (ulimit -Hn)",
        )),
        Memory::Auto | Memory::Resident => Way::Resident(covers),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cover(bytes: u64) -> Cover {
        Cover {
            host_pid: 1300,
            pid: 300,
            hello: Some(Hello {
                thread: 301,
                segments: 1,
                bytes,
                released: false,
                imported: false,
                shares: false,
                lends: false,
                moved: false,
                opaque: false,
            }),
        }
    }

    fn imported(mut cover: Cover) -> Cover {
        cover.hello.as_mut().unwrap().imported = true;
        cover
    }

    fn sharing(mut cover: Cover) -> Cover {
        cover.hello.as_mut().unwrap().shares = true;
        cover
    }

    fn resident(memory: Memory, purpose: Purpose, covers: &[Cover]) -> Option<usize> {
        match choose(memory, purpose, 1024, covers.to_vec()).unwrap() {
            Way::Driver(_) => None,
            Way::Resident(covers) => Some(covers.len()),
        }
    }

    #[test]
    fn large_memory_stays_unless_it_must_leave_the_gpu() {
        let none = Cover {
            hello: None,
            ..cover(0)
        };
        let covers = [cover(5), cover(0), none.clone()];
        for memory in [Memory::Auto, Memory::Resident] {
            assert_eq!(resident(memory, Purpose::Snapshot, &covers), Some(3));
            assert_eq!(resident(memory, Purpose::Pause, &covers), None);
            assert_eq!(resident(memory, Purpose::Snapshot, &covers[1..]), None);
            assert_eq!(resident(memory, Purpose::Snapshot, &[]), None);
        }
        assert_eq!(resident(Memory::Driver, Purpose::Snapshot, &covers), None);
    }

    #[test]
    fn more_pieces_than_descriptors_go_the_driver_s_way_or_no_way() {
        let mut covers = [cover(5), cover(5)];
        covers[0].hello.as_mut().unwrap().segments = 383;
        assert_eq!(resident(Memory::Auto, Purpose::Snapshot, &covers), Some(2));
        covers[0].hello.as_mut().unwrap().segments += 1;
        assert_eq!(resident(Memory::Auto, Purpose::Snapshot, &covers), None);
        covers[1].hello.as_mut().unwrap().imported = true;
        let error = choose(Memory::Auto, Purpose::Snapshot, 1024, covers.to_vec()).unwrap_err();
        assert!(error.to_string().contains("385 pieces"), "{error}");
    }

    #[test]
    fn driver_suspends_memory_moved_to_another_gpu() {
        let mut covers = [cover(5), cover(5)];
        covers[1].know(&[301]);
        assert_eq!(
            resident(Memory::Resident, Purpose::Snapshot, &covers),
            Some(2)
        );
        covers[1].know(&[300]);
        assert_eq!(resident(Memory::Resident, Purpose::Snapshot, &covers), None);
        // The memory is the driver's, although another process has memory that the driver would lose.
        covers[0] = imported(cover(5));
        assert_eq!(resident(Memory::Auto, Purpose::Snapshot, &covers), Some(2));
        assert_eq!(bytes(&covers), 5);
    }

    #[test]
    fn memory_that_the_driver_would_lose_stays_resident() {
        for memory in [Memory::Auto, Memory::Resident, Memory::Driver] {
            for purpose in [Purpose::Snapshot, Purpose::Pause] {
                let covers = [imported(cover(5))];
                assert_eq!(resident(memory, purpose, &covers), Some(1));
            }
        }
    }

    #[test]
    fn a_process_that_shares_since_it_was_asked_is_a_newcomer() {
        let lends = |pid, lends, shares| {
            let mut cover = cover(5);
            cover.pid = pid;
            let hello = cover.hello.as_mut().unwrap();
            (hello.lends, hello.shares) = (lends, shares);
            cover
        };
        let prepared = |cover: &Cover| cover.pid == 1;
        let among = |covers: &[Cover]| match expect_no_newcomer(covers, prepared) {
            Ok(()) => None,
            Err(ResidentError::Newcomer { pid }) => Some(pid),
            Err(error) => panic!("{error}"),
        };
        let harmless = [lends(1, true, false), lends(2, false, false)];
        assert_eq!(among(&harmless), None);
        assert_eq!(
            among(&[lends(1, true, false), lends(2, true, false)]),
            Some(2)
        );
        assert_eq!(among(&[lends(1, true, true)]), Some(1));
    }

    #[test]
    fn shared_agent_memory_stays_and_unrestorable_is_refused() {
        let lends = |moved| {
            let mut cover = cover(5);
            let hello = cover.hello.as_mut().unwrap();
            (hello.lends, hello.moved) = (true, moved);
            [cover]
        };
        assert_eq!(
            resident(Memory::Driver, Purpose::Pause, &lends(false)),
            Some(1)
        );
        let mut multicast = cover(5);
        multicast.hello.as_mut().unwrap().opaque = true;
        for (covers, reason) in [
            ([sharing(imported(cover(5)))], "shares GPU memory"),
            (lends(true), "shares GPU memory"),
            ([multicast], "NVLink multicast"),
        ] {
            let error =
                choose(Memory::Driver, Purpose::Snapshot, 1024, covers.to_vec()).unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains("process 300") && text.contains(reason),
                "{text}"
            );
        }
    }
}
