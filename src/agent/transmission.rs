//! Transmission of segments, each with its GPU and a descriptor of its memory.

use core::ffi::c_int;

use super::datagram::{self, Incoming, Outgoing};
use super::devices::{DEVICES_MAX, uuid};
use super::driver::{self, check};
use super::hand_over::Failure;
use super::memory::State;
use super::probe::enter;
use super::sys;
use super::table::Entry;
use super::wire::{BATCH_MAX, Segment};

const _: () = assert!(DEVICES_MAX <= BATCH_MAX);

/// Sends a batch of segments, each with a descriptor of its memory.
pub fn send_batch(
    socket: c_int,
    to: &Incoming,
    batch: &[Entry],
    answer: &mut Outgoing,
) -> Result<(), Failure> {
    let mut result = Ok(());
    for (entry, (segment, descriptor)) in batch
        .iter()
        .zip(answer.segments.iter_mut().zip(&mut answer.descriptors))
    {
        segment.address = entry.address;
        segment.len = entry.len;
        result = describe(entry, segment, descriptor);
        if result.is_err() {
            break;
        }
        answer.reply.count += 1;
    }
    if result.is_ok() && !datagram::send(socket, &to.from, answer) {
        result = Err(Failure::Refused);
    }
    for (entry, descriptor) in batch.iter().zip(answer.descriptors) {
        if entry.descriptor < 0 && descriptor >= 0 {
            // SAFETY: exported for this datagram.
            unsafe { sys::close(descriptor) };
        }
    }
    result
}

/// Sends the entries that several processes share, in as many batches as necessary.
pub fn send_origins(
    socket: c_int,
    to: &Incoming,
    entries: &[Entry],
    answer: &mut Outgoing,
) -> Result<(), Failure> {
    // SAFETY: has no arguments.
    let itself = unsafe { sys::getpid() };
    let mut shared = entries
        .iter()
        .filter(|entry| entry.lent || entry.owner != 0)
        .peekable();
    while shared.peek().is_some() {
        answer.reply.count = 0;
        for (segment, entry) in answer.segments.iter_mut().zip(&mut shared) {
            let owner = if entry.owner == 0 {
                itself
            } else {
                entry.owner
            };
            *segment = Segment::shared(entry.address, owner, entry.id);
            answer.reply.count += 1;
        }
        if !datagram::send(socket, &to.from, answer) {
            return Err(Failure::Refused);
        }
        answer.reply.first += answer.reply.count;
    }
    Ok(())
}

/// Sends the amount of the process's own memory on each GPU, without calls to the driver, which may block.
pub fn send_holdings(
    socket: c_int,
    to: &Incoming,
    state: &State,
    answer: &mut Outgoing,
) -> Result<(), Failure> {
    let mut held = [(0, 0); DEVICES_MAX];
    for entry in state.table.entries().iter().filter(|one| one.owner == 0) {
        let device = usize::try_from(entry.device).unwrap_or(DEVICES_MAX);
        if let Some((len, imported)) = held.get_mut(device) {
            *len += entry.len;
            *imported += if entry.descriptor < 0 { 0 } else { entry.len };
        }
    }
    let held = (0..).zip(held).filter(|(_, (len, _))| *len > 0);
    for (segment, (device, (len, imported))) in answer.segments.iter_mut().zip(held) {
        *segment = Segment::holding(state.devices.first_uuid(device), len, imported);
        answer.reply.count += 1;
    }
    let sent = answer.reply.count == 0 || datagram::send(socket, &to.from, answer);
    sent.then_some(()).ok_or(Failure::Refused)
}

fn describe(entry: &Entry, segment: &mut Segment, descriptor: &mut c_int) -> Result<(), Failure> {
    enter(entry).map_err(Failure::Driver)?;
    // Queried every time, because the process may have been restored onto another GPU.
    segment.device = uuid(entry.device).map_err(Failure::Driver)?;
    if entry.descriptor >= 0 {
        *descriptor = entry.descriptor;
        return Ok(());
    }
    // SAFETY: the handle is owned by the agent, and there is room for the result.
    let mut export = || unsafe { driver::export(descriptor, entry.handle, driver::DESCRIPTOR, 0) };
    check(export())
        .or_else(|_| {
            // The cause may be a lack of descriptors, for which the driver has no code.
            datagram::make_room();
            check(export())
        })
        .map_err(Failure::Driver)
}
