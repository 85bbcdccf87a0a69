//! Facts about the process's GPUs, by the driver's device numbers.

use core::ffi::c_int;

use super::driver::{self, Properties, check};

/// Maximum number of devices in a process, equal to the driver's.
pub const DEVICES_MAX: usize = 64;

/// UUID of a device that has not been queried.
const NO_UUID: [u8; 16] = [0; 16];

/// Facts about a device, queried once and again after a move.
#[derive(Clone, Copy)]
struct Device {
    asked: bool,
    /// Allocation granularity; 0 if the device has no memory that can be mapped and exported.
    granularity: usize,
    rdma: bool,
    /// Devices with access to this device's memory, one bit each.
    peers: u64,
    /// UUID at the first query.
    uuid: [u8; 16],
}

/// Facts about all devices.
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

    /// Returns granularity and RDMA support of a device that has the required features.
    pub fn known(&mut self, device: c_int) -> Option<(usize, bool)> {
        let known = self.0.get_mut(usize::try_from(device).ok()?)?;
        if !known.asked {
            let has = |attribute| {
                let mut value = 0;
                // SAFETY: there is room for the result.
                let code = unsafe { driver::device_attribute(&raw mut value, attribute, device) };
                code == driver::SUCCESS && value != 0
            };
            let rdma = has(driver::ATTRIBUTE_RDMA);
            if has(driver::ATTRIBUTE_MAPPING) && has(driver::ATTRIBUTE_DESCRIPTORS) {
                let properties = Properties::new(device, rdma);
                let mut len = 0;
                // SAFETY: there is room for the result, and the properties are complete.
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

    /// Discards the facts that may differ on another GPU.
    pub fn ask_anew(&mut self) {
        for known in &mut self.0 {
            known.asked = false;
            known.granularity = 0;
        }
    }

    /// Returns true if another GPU has replaced the device.
    pub fn has_moved(&self, device: c_int) -> Result<bool, c_int> {
        match self.first_uuid(device) {
            NO_UUID => Ok(false),
            before => Ok(uuid(device)? != before),
        }
    }

    /// Returns the UUID of the device at the first query.
    pub fn first_uuid(&self, device: c_int) -> [u8; 16] {
        let number = usize::try_from(device).unwrap_or(DEVICES_MAX);
        self.0.get(number).map_or(NO_UUID, |known| known.uuid)
    }

    /// Returns the devices with access to this device's memory, one bit each.
    fn peers(&self, device: c_int) -> u64 {
        let number = usize::try_from(device).unwrap_or(DEVICES_MAX);
        self.0.get(number).map_or(0, |known| known.peers)
    }

    /// Returns the devices with access to memory of `device`, as bits: itself and its peers.
    pub fn users(&self, device: c_int) -> u64 {
        let number = usize::try_from(device).unwrap_or(DEVICES_MAX);
        self.0
            .get(number)
            .map_or(0, |known| known.peers | 1 << number)
    }

    /// Gives `device` access to the present and future memory of `owner`. Returns true if it had none before.
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

    /// Removes the access to future allocations.
    pub fn remove_peer(&mut self, owner: c_int, device: c_int) {
        let number = usize::try_from(owner).unwrap_or(DEVICES_MAX);
        if let Some(known) = self.0.get_mut(number)
            && (0..64).contains(&device)
        {
            known.peers &= !(1 << device);
        }
    }
}

/// Queries the present UUID of the device.
pub fn uuid(device: c_int) -> Result<[u8; 16], c_int> {
    let mut uuid = NO_UUID;
    // SAFETY: there is room for the result.
    check(unsafe { driver::device_uuid(&raw mut uuid, device) })?;
    Ok(uuid)
}
