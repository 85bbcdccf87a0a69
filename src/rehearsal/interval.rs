//! Which interval a measured snapshot suggests: Young's first-order optimum, bounded by what makes sense.

use std::time::Duration;

/// Time between two failures that is assumed: nobody knows it before the first one, and a wrong guess by a factor of
/// four changes the interval by two.
pub(super) const MTBF_ASSUMED: Duration = Duration::from_secs(6 * 3600);
/// Below, a log consists of snapshots.
const SHORTEST: Duration = Duration::from_secs(10);
/// What a day's work may lose, however cheap a snapshot is not.
const LONGEST: Duration = Duration::from_secs(4 * 3600);
/// At most every fourth moment is spent writing.
const WRITING_FACTOR: u32 = 4;

/// `sqrt(2 * freeze * MTBF)`, not below four times the time to a durable image, rounded.
pub(super) fn suggest(freeze: Duration, durable: Duration) -> Duration {
    let optimum = (2.0 * freeze.as_secs_f64() * MTBF_ASSUMED.as_secs_f64()).sqrt();
    let optimum = Duration::from_secs_f64(optimum.clamp(0.0, LONGEST.as_secs_f64()));
    let least = durable.saturating_mul(WRITING_FACTOR).max(SHORTEST);
    round(optimum.max(least))
}

/// To 10 s below 5 minutes, to a minute below an hour, to 10 minutes above.
fn round(time: Duration) -> Duration {
    let seconds = time.as_secs();
    let step = match seconds {
        ..300 => 10,
        300..3600 => 60,
        3600.. => 600,
    };
    Duration::from_secs(seconds.saturating_add(step / 2) / step * step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suggested(freeze_ms: u64, durable_s: u64) -> u64 {
        let time = suggest(
            Duration::from_millis(freeze_ms),
            Duration::from_secs(durable_s),
        );
        time.as_secs()
    }

    #[test]
    fn a_longer_freeze_asks_for_a_longer_interval() {
        assert_eq!(suggested(50, 1), 50, "sqrt(2 * 0.05 * 21600) = 46");
        assert_eq!(suggested(1000, 5), 210, "sqrt(43200) = 208");
        assert_eq!(suggested(20_000, 60), 15 * 60, "929 s");
    }

    #[test]
    fn writing_and_good_sense_bound_it() {
        assert_eq!(suggested(0, 0), 10);
        assert_eq!(suggested(10, 300), 20 * 60, "four times the writing");
        assert_eq!(suggested(u64::MAX / 2, 1), 4 * 3600);
    }
}
