//! The limits of each setting, with the reasons.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::units::{format_duration, format_percent, format_size};
use super::{Buffer, Config, Cpus, Interval, Invalid, Jitter};

/// A day in seconds.
const DAY: u64 = 24 * 3600;

/// Limits on the interval. With a shorter one, the job would only be frozen; a longer one could overflow a clock.
const INTERVAL: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(365 * DAY);
/// Limits on the mean time between failures. Below a minute it is a crash loop; no hardware lasts longer than the
/// maximum.
const MTBF: RangeInclusive<Duration> = Duration::from_secs(60)..=Duration::from_secs(365 * DAY);
/// Limits on the overhead. Below the minimum there would be hardly any snapshot; above the maximum, hardly any
/// computing.
const MAX_OVERHEAD: RangeInclusive<f64> = 0.0001..=0.5;
/// Limits on jitter as a share. More than the interval itself would be a different interval.
const JITTER_SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// Limits on jitter as a time. An hour spreads a fleet of any size, and it is less than the backward clock step that
/// the cron schedule treats as a clock correction.
const JITTER_TIME: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);
/// Limits on the hang signs. Below the minimum every job appears hung; above the maximum the report is useless.
const HANG: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(7 * DAY);
/// Limit on a hook's length: the longest argument of a program (Linux: 128 KiB).
pub(super) const HOOK_BYTES_MAX: usize = (128 << 10) - 1;
/// Limit on a hook's words; a longer command belongs in a script.
pub(super) const HOOK_WORDS_MAX: usize = 1000;
/// Limits on a wait. A wait of more than a day is a typing error and hides a hanging job.
const WAIT: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(DAY);
/// Limits of `WAIT` for settings where no wait makes sense.
const WAIT_OR_NOT: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(DAY);
/// Limits on the lock timeout. The driver takes milliseconds in 32 bits, and locking all ranks is tried for a multiple
/// of this time.
const LOCK_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);
/// Limits on the buffer. The pipes alone would fill less than the minimum; no machine has more than the maximum.
const BUFFER: RangeInclusive<u64> = 16 << 20..=1 << 50;
/// Limits on the restore buffer. Below the minimum, reading ahead would stop; no machine has more than the maximum.
const RESTORE_BUFFER: RangeInclusive<u64> = 1 << 20..=1 << 50;
/// Levels of zstd, except those that need gigabytes of memory.
const LEVEL: RangeInclusive<i32> = -7..=19;
/// Limits on the thread count; no machine has more than the maximum.
const CPUS: RangeInclusive<usize> = 1..=1024;
/// Limits on `keep_last`: reading all manifests of a store stays a matter of seconds.
const KEEP_LAST: RangeInclusive<u32> = 1..=100_000;
/// Limits on `keep_within`: as many images as `keep_last` allows, one per hour. A longer time is a typing error.
const KEEP_WITHIN: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(100_000 * 3600);
/// Limits of `KEEP_LAST` for settings where zero makes sense.
const KEEP_PERIODS: RangeInclusive<u32> = 0..=100_000;
/// Limits on the free space; no disk is larger than the maximum.
const MIN_FREE: RangeInclusive<u64> = 0..=1 << 50;
/// Limits on restarts. -1 means no limit; a number above the maximum has the same effect.
pub(super) const RESTARTS: RangeInclusive<i64> = -1..=1_000_000;
/// Limits on the backoff factor. Below 1 the waits would get shorter; above 100 the second wait is already the longest.
const BACKOFF_FACTOR: RangeInclusive<f64> = 1.0..=100.0;
/// Limit on a list: there are 287 exit codes and signals, and no handwritten list of patterns is longer.
pub(super) const LIST_ITEMS_MAX: usize = 1000;
/// Limits on the size of a saved file.
const KEEP_CONTENT: RangeInclusive<u64> = 0..=1 << 40;
/// Limits on the time for which a job is frozen for the contents of its files.
const FILES_FREEZE: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(60);
/// Limits on the lease of a remote store. A shorter one would be lost at the first slow request; with a longer one nobody
/// would wait for a takeover.
const LEASE: RangeInclusive<Duration> = Duration::from_secs(10)..=Duration::from_secs(3600);
/// Limits on the speed of uploads. Below the minimum, a pack would take longer than a request may.
const BANDWIDTH: RangeInclusive<u64> = 64 << 10..=1 << 40;
/// CRIU's log levels, `-v0` to `-v4`.
const CRIU_LOG_LEVEL: RangeInclusive<u8> = 0..=4;

/// Checks that every setting is within its limits.
pub(super) fn check(config: &Config) -> Result<(), Invalid> {
    let Config {
        snapshot,
        retention,
        restart,
        hang,
        hooks,
        files,
        ..
    } = config;
    let time = |time: Duration, range| within(time, range, |limit| format_duration(*limit));
    let size = |bytes: u64, range| within(bytes, range, |limit| format_size(*limit));
    let share = |share: f64, range| within(share, range, |limit| format_percent(*limit));
    if let Interval::Every(interval) = snapshot.interval {
        time(interval, &INTERVAL)?;
    }
    match snapshot.jitter {
        Jitter::Share(part) => drop(share(part, &JITTER_SHARE)?),
        Jitter::Time(longest) => drop(time(longest, &JITTER_TIME)?),
    }
    if let Buffer::Bytes(bytes) = snapshot.buffer {
        size(bytes, &BUFFER)?;
    }
    if let Cpus::Count(count) = snapshot.cpus {
        within(count.get(), &CPUS, usize::to_string)?;
    }
    share(snapshot.max_overhead, &MAX_OVERHEAD)?;
    within(snapshot.level, &LEVEL, i32::to_string)?;
    within(retention.keep_last, &KEEP_LAST, u32::to_string)?;
    within(retention.keep_hourly, &KEEP_PERIODS, u32::to_string)?;
    within(retention.keep_daily, &KEEP_PERIODS, u32::to_string)?;
    within(restart.backoff_factor, &BACKOFF_FACTOR, f64::to_string)?;
    within(config.criu.log_level, &CRIU_LOG_LEVEL, u8::to_string)?;
    if let Some(bandwidth) = config.remote.bandwidth {
        size(bandwidth, &BANDWIDTH)?;
    }
    within(config.remote.keep, &KEEP_LAST, u32::to_string)?;
    for (bytes, range) in [
        (snapshot.min_free, &MIN_FREE),
        (config.restore.buffer, &RESTORE_BUFFER),
        (files.keep_content, &KEEP_CONTENT),
        (files.keep_total, &KEEP_CONTENT),
    ] {
        size(bytes, range)?;
    }
    for (given, range) in [
        (snapshot.mtbf, &MTBF),
        (snapshot.grace, &WAIT_OR_NOT),
        (snapshot.lock_timeout, &LOCK_TIMEOUT),
        (snapshot.timeout, &WAIT),
        (retention.keep_within, &KEEP_WITHIN),
        (restart.backoff, &WAIT_OR_NOT),
        (restart.backoff_max, &WAIT_OR_NOT),
        (hang.heartbeat_timeout, &HANG),
        (hooks.timeout, &WAIT),
        (files.freeze, &FILES_FREEZE),
        (config.remote.lease, &LEASE),
    ] {
        time(given, range)?;
    }
    for sign in [hang.output, hang.gpu, hang.cpu].into_iter().flatten() {
        time(sign, &HANG)?;
    }
    Ok(())
}

/// Returns the value if it is within the range.
pub(super) fn within<T: PartialOrd>(
    value: T,
    range: &RangeInclusive<T>,
    format: impl Fn(&T) -> String,
) -> Result<T, Invalid> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Invalid::Range {
        given: format(&value),
        low: format(range.start()),
        high: format(range.end()),
    })
}
