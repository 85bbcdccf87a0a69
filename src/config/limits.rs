//! The limits of each setting, with the reasons.

use std::ops::RangeInclusive;
use std::time::Duration;

/// A day in seconds.
const DAY: u64 = 24 * 3600;

/// Limits on the interval. With a shorter one, the job would only be frozen; a longer one could overflow a clock.
pub(super) const INTERVAL: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(365 * DAY);
/// Limits on the mean time between failures. Below a minute it is a crash loop; no hardware lasts longer than the
/// maximum.
pub(super) const MTBF: RangeInclusive<Duration> =
    Duration::from_secs(60)..=Duration::from_secs(365 * DAY);
/// Limits on the overhead. Below the minimum there would be hardly any snapshot; above the maximum, hardly any
/// computing.
pub(super) const MAX_OVERHEAD: RangeInclusive<f64> = 0.0001..=0.5;
/// Limits on jitter as a share. More than the interval itself would be a different interval.
pub(super) const JITTER_SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// Limits on jitter as a time. An hour spreads a fleet of any size, and it is less than the backward clock step that
/// the cron schedule treats as a clock correction.
pub(super) const JITTER_TIME: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);
/// Limits on the hang signs. Below the minimum every job appears hung; above the maximum the report is useless.
pub(super) const HANG: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(7 * DAY);
/// Limit on a hook's length: the longest argument of a program (Linux: 128 KiB).
pub(super) const HOOK_BYTES_MAX: usize = (128 << 10) - 1;
/// Limit on a hook's words; a longer command belongs in a script.
pub(super) const HOOK_WORDS_MAX: usize = 1000;
/// Limits on a wait. A wait of more than a day is a typing error and hides a hanging job.
pub(super) const WAIT: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(DAY);
/// Limits of `WAIT` for settings where no wait makes sense.
pub(super) const WAIT_OR_NOT: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(DAY);
/// Limits on the lock timeout. The driver takes milliseconds in 32 bits, and locking all ranks is tried for a multiple
/// of this time.
pub(super) const LOCK_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);
/// Limits on the buffer. The pipes alone would fill less than the minimum; no machine has more than the maximum.
pub(super) const BUFFER: RangeInclusive<u64> = 16 << 20..=1 << 50;
/// Limits on the restore buffer. Below the minimum, reading ahead would stop; no machine has more than the maximum.
pub(super) const RESTORE_BUFFER: RangeInclusive<u64> = 1 << 20..=1 << 50;
/// Levels of zstd, except those that need gigabytes of memory.
pub(super) const LEVEL: RangeInclusive<i64> = -7..=19;
/// Limits on the thread count; no machine has more than the maximum.
pub(super) const CPUS: RangeInclusive<i64> = 1..=1024;
/// Limits on `keep_last`: reading all manifests of a store stays a matter of seconds.
pub(super) const KEEP_LAST: RangeInclusive<i64> = 1..=100_000;
/// Limits on `keep_within`: as many images as `keep_last` allows, one per hour. A longer time is a typing error.
pub(super) const KEEP_WITHIN: RangeInclusive<Duration> =
    Duration::ZERO..=Duration::from_secs(100_000 * 3600);
/// Limits of `KEEP_LAST` for settings where zero makes sense.
pub(super) const KEEP_PERIODS: RangeInclusive<i64> = 0..=100_000;
/// Limits on the free space; no disk is larger than the maximum.
pub(super) const MIN_FREE: RangeInclusive<u64> = 0..=1 << 50;
/// Limits on restarts. -1 means no limit; a number above the maximum has the same effect.
pub(super) const RESTARTS: RangeInclusive<i64> = -1..=1_000_000;
/// Limits on the backoff factor. Below 1 the waits would get shorter; above 100 the second wait is already the longest.
pub(super) const BACKOFF_FACTOR: RangeInclusive<f64> = 1.0..=100.0;
/// Limit on the listed exit statuses: there are 256 exit codes and 31 signals with names.
pub(super) const PREVENT_ITEMS_MAX: usize = 287;
/// Limits on the size of a saved file.
pub(super) const KEEP_CONTENT: RangeInclusive<u64> = 0..=1 << 40;
/// Limits on the time for which a job is frozen for the contents of its files.
pub(super) const FILES_FREEZE: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(60);
/// Limit on the number of patterns of files.
pub(super) const PATTERNS_MAX: usize = 1000;
/// CRIU's log levels, `-v0` to `-v4`.
pub(super) const CRIU_LOG_LEVEL: RangeInclusive<i64> = 0..=4;
