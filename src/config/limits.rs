//! Between which values a setting makes sense, and why.

use std::ops::RangeInclusive;
use std::time::Duration;

/// In seconds.
const DAY: u64 = 24 * 3600;

/// Shorter intervals are all freeze; longer ones overflow no clock.
pub(super) const INTERVAL: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(365 * DAY);
/// Below a minute it is no failure but a loop; above, hardware does not last.
pub(super) const MTBF: RangeInclusive<Duration> =
    Duration::from_secs(60)..=Duration::from_secs(365 * DAY);
/// Below, there would hardly be a snapshot; above, hardly a job.
pub(super) const MAX_OVERHEAD: RangeInclusive<f64> = 0.0001..=0.5;
/// More than the interval itself would be another interval.
pub(super) const JITTER_SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// Fleets of any size spread over an hour; and less than the clock set back that cron takes for a correction.
pub(super) const JITTER_TIME: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);
/// Below, every job hangs; above, nobody waits for the news.
pub(super) const HANG: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(7 * DAY);
/// As long as one argument of a program can be (Linux: 128 KiB).
pub(super) const HOOK_BYTES_MAX: usize = (128 << 10) - 1;
/// A longer command belongs into a script.
pub(super) const HOOK_WORDS_MAX: usize = 1000;
/// A wait of more than a day is a typing error, and hides a hanging job.
pub(super) const WAIT: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(DAY);
/// As `WAIT`, where not waiting makes sense.
pub(super) const WAIT_OR_NOT: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(DAY);
/// The driver takes milliseconds in 32 bits, and all ranks are tried for many times.
pub(super) const LOCK_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);
/// Below, the pipes alone would fill it; above, there is no such machine.
pub(super) const BUFFER: RangeInclusive<u64> = 16 << 20..=1 << 50;
/// Below, reading ahead would stop; above, there is no such machine.
pub(super) const RESTORE_BUFFER: RangeInclusive<u64> = 1 << 20..=1 << 50;
/// What zstd knows, less the levels that need gigabytes of memory.
pub(super) const LEVEL: RangeInclusive<i64> = -7..=19;
/// More threads than any one machine has.
pub(super) const CPUS: RangeInclusive<i64> = 1..=1024;
/// Reading all manifests of a store stays a matter of seconds.
pub(super) const KEEP_LAST: RangeInclusive<i64> = 1..=100_000;
/// As many images as `keep_last` can keep, one every hour; a longer time is a typing error.
pub(super) const KEEP_WITHIN: RangeInclusive<Duration> =
    Duration::ZERO..=Duration::from_secs(100_000 * 3600);
/// As `KEEP_LAST`, where none makes sense.
pub(super) const KEEP_PERIODS: RangeInclusive<i64> = 0..=100_000;
/// Above, there is no such disk.
pub(super) const MIN_FREE: RangeInclusive<u64> = 0..=1 << 50;
/// -1 is no limit; above, it might as well be.
pub(super) const RESTARTS: RangeInclusive<i64> = -1..=1_000_000;
/// Below 1 the waits would get shorter; above 100 the second is the longest.
pub(super) const BACKOFF_FACTOR: RangeInclusive<f64> = 1.0..=100.0;
/// There are 256 exit codes and 31 signals with names.
pub(super) const PREVENT_ITEMS_MAX: usize = 287;
/// Copied while the job is frozen.
pub(super) const KEEP_CONTENT: RangeInclusive<u64> = 0..=1 << 30;
/// `-v0` to `-v4` of CRIU.
pub(super) const CRIU_LOG_LEVEL: RangeInclusive<i64> = 0..=4;
