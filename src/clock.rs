//! The only place that asks for the time, or for chance.

use std::io;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};

/// Monotonic time, for intervals and durations.
#[must_use]
pub fn now() -> Instant {
    Instant::now()
}

/// Wall-clock time as milliseconds since 1970-01-01 UTC; 0 for a clock set before it.
#[must_use]
pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
}

/// Wall-clock time; the epoch for a clock set to what no calendar has.
#[must_use]
pub fn timestamp() -> Timestamp {
    let ms = i64::try_from(unix_ms()).unwrap_or(0);
    Timestamp::from_millisecond(ms).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// As [`timestamp`], in the zone of this machine.
#[must_use]
pub fn local() -> Zoned {
    timestamp().to_zoned(TimeZone::system())
}

/// Bytes that nobody can guess, from the kernel.
///
/// # Errors
/// The kernel has none to give, which happens only early at boot or in a broken sandbox.
pub fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}
