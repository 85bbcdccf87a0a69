//! The agent's knowledge of the process's GPUs, by the driver's numbers.

use core::ffi::c_int;

use super::driver::{self, Properties, check};

/// Devices of a process: the driver shows 64 at most.
pub const DEVICES_MAX: usize = 64;

/// UUID of a device that was not queried.
const NO_UUID: [u8; 16] = [0; 16];

/// Facts about a device, queried once and after a move.
#[derive(Clone, Copy)]
struct Device {
    asked: bool,
    /// 0: memory that can be mapped and exported is not to be had.
    granularity: usize,
    rdma: bool,
    /// Devices that may use this one's memory, a bit each.
    peers: u64,
    /// UUID at the first query.
    uuid: [u8; 16],
}

/// Every value.
pub struct Devices([Device; DEVICES_MAX]);

impl Devices {
    pub const fn new() -> Self {
        Self(
            [Device {
                asked: false,
                granularity: 0,
                rdma: false,
                peers: 0,
                uuid: NO_UUID,
            }; DEVICES_MAX],
        )
    }

    /// Granularity and RDMA of a device that has what is needed.
    pub fn known(&mut self, device: c_int) -> Option<(usize, bool)> {
        let known = self.0.get_mut(usize::try_from(device).ok()?)?;
        if !known.asked {
            let has = |attribute| {
                let mut value = 0;
                // SAFETY: there is room for the answer.
                let code = unsafe { driver::device_attribute(&raw mut value, attribute, device) };
                code == driver::SUCCESS && value != 0
            };
            let rdma = has(driver::ATTRIBUTE_RDMA);
            if has(driver::ATTRIBUTE_MAPPING) && has(driver::ATTRIBUTE_DESCRIPTORS) {
                let properties = Properties::new(device, rdma);
                let mut len = 0;
                // SAFETY: there is room for the answer, and the properties are whole.
                check(unsafe {
                    driver::granularity(
                        &raw mut len,
                        &raw const properties,
                        driver::GRANULARITY_MINIMUM,
                    )
                })
                .ok()?;
                known.granularity = len;
            }
            if known.uuid == NO_UUID {
                known.uuid = uuid(device).ok()?;
            }
            known.rdma = rdma;
            known.asked = true;
        }
        (known.granularity != 0).then_some((known.granularity, known.rdma))
    }

    /// Forgets what may be otherwise with another GPU.
    pub fn ask_anew(&mut self) {
        for known in &mut self.0 {
            known.asked = false;
            known.granularity = 0;
        }
    }

    /// Returns true if another GPU has taken the place of the device.
    pub fn has_moved(&self, device: c_int) -> Result<bool, c_int> {
        match self.first_uuid(device) {
            NO_UUID => Ok(false),
            before => Ok(uuid(device)? != before),
        }
    }

    /// UUID of the device when it was asked for first.
    pub fn first_uuid(&self, device: c_int) -> [u8; 16] {
        let number = usize::try_from(device).unwrap_or(DEVICES_MAX);
        self.0.get(number).map_or(NO_UUID, |known| known.uuid)
    }

    /// Devices that may use the memory of this one, a bit each.
    pub fn peers(&self, device: c_int) -> u64 {
        let number = usize::try_from(device).unwrap_or(DEVICES_MAX);
        self.0.get(number).map_or(0, |known| known.peers)
    }

    /// `device` may use the memory of `owner` from now on, also what comes later. Whether it could not before.
    pub fn add_peer(&mut self, owner: c_int, device: c_int) -> bool {
        let before = self.peers(owner);
        let number = usize::try_from(owner).unwrap_or(DEVICES_MAX);
        if let Some(known) = self.0.get_mut(number)
            && (0..64).contains(&device)
        {
            known.peers |= 1 << device;
        }
        self.peers(owner) != before
    }

    /// Withdraws the access for later allocations.
    pub fn remove_peer(&mut self, owner: c_int, device: c_int) {
        let number = usize::try_from(owner).unwrap_or(DEVICES_MAX);
        if let Some(known) = self.0.get_mut(number)
            && (0..64).contains(&device)
        {
            known.peers &= !(1 << device);
        }
    }
}

/// UUID of the device, as it is now.
pub fn uuid(device: c_int) -> Result<[u8; 16], c_int> {
    let mut uuid = NO_UUID;
    // SAFETY: there is room for the answer.
    check(unsafe { driver::device_uuid(&raw mut uuid, device) })?;
    Ok(uuid)
}
