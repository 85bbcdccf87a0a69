//! The only module that reads the time or random bytes.

use std::io;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use nix::time::{ClockId, clock_gettime};

/// Returns the monotonic time, for intervals and durations.
#[must_use]
pub fn now() -> Instant {
    Instant::now()
}

/// Returns the value of the monotonic clock.
#[must_use]
pub fn monotonic() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC);
    // Every Linux has this clock.
    time.map_or(Duration::MAX, Duration::from)
}

/// Returns the time since the machine's boot, including the time for which it was suspended.
#[must_use]
pub fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME);
    // Linux has this clock since 2.6.39.
    time.map_or(Duration::MAX, Duration::from)
}

/// Returns the wall-clock time as milliseconds since 1970-01-01 UTC; 0 if the clock is set before that.
#[must_use]
pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
}

/// Returns the wall-clock time as nanoseconds since 1970-01-01 UTC; 0 if the clock is set before that.
#[must_use]
pub fn unix_ns() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
        })
}

/// Returns a file's time, given in seconds and nanoseconds, as nanoseconds since 1970. Times before 1677 and after 2262
/// become the first and the last one.
#[must_use]
pub fn file_time_ns(seconds: i64, ns: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(ns)
}

/// Returns the identity of this boot of the machine; empty if the kernel does not report it.
pub fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let read = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        read.map_or_else(|_| String::new(), |text| text.trim().to_owned())
    })
}

/// Returns the time of this boot of the machine, in nanoseconds since 1970; the present time if the kernel does not
/// report it.
pub fn boot_ns() -> i64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("btime "));
    let seconds = line.and_then(|text| text.trim().parse::<i64>().ok());
    seconds.map_or_else(unix_ns, |seconds| seconds.saturating_mul(1_000_000_000))
}

/// Returns the wall-clock time as a timestamp.
#[must_use]
pub fn timestamp() -> Timestamp {
    timestamp_of(unix_ms())
}

/// Converts milliseconds since 1970 to a timestamp, at most the calendar's last one.
#[must_use]
pub fn timestamp_of(unix_ms: u64) -> Timestamp {
    i64::try_from(unix_ms)
        .ok()
        .and_then(|ms| Timestamp::from_millisecond(ms).ok())
        .unwrap_or(Timestamp::MAX)
}

/// Returns [`timestamp`] in this machine's time zone.
#[must_use]
pub fn local() -> Zoned {
    timestamp().to_zoned(TimeZone::system())
}

/// Returns unpredictable bytes from the kernel.
///
/// # Errors
/// The kernel has no random bytes, which happens only early at boot or in a broken sandbox.
pub fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_beyond_the_calendar_is_its_last() {
        assert_eq!(timestamp_of(0), Timestamp::UNIX_EPOCH);
        assert_eq!(
            timestamp_of(1_795_600_800_000).to_string(),
            "2026-11-25T10:00:00Z"
        );
        assert_eq!(timestamp_of(u64::MAX), Timestamp::MAX);
        assert_eq!(timestamp_of(i64::MAX.unsigned_abs()), Timestamp::MAX);
    }
}
