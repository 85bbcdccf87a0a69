//! Detection of a hung job: a pure function of samples, in the time in which the job could have computed.
//!
//! Each sign has a limit and is independent of the others. A sign is quiet while the samples show no activity. It fires
//! once when it has been quiet for its limit, and again only after new activity. Unknown samples count neither as activity
//! nor as quiet. Doubtful samples count as quiet if the samples around them do, and at least half of a limit must be quiet
//! beyond doubt. `sampler` takes the samples and `watchdog` acts on the result.

use std::fmt;
use std::time::Duration;

use crate::config::Hang;
use crate::supervisor::policy::interval::rough;

/// CPU time, as a part of the limit of its sign, that is no life: threads that wake to look around use less, and work
/// uses more.
const CPU_IDLE: f64 = 0.001;
/// Resolution of the kernel's CPU times: one more of it can be a few microseconds.
const CPU_TICK: Duration = Duration::from_millis(10);
/// The part of a limit that must be quiet beyond doubt: of a job that snapshots hide for longer too little is known to
/// kill it.
const TOLD: f64 = 0.5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// stdout and stderr.
    Output,
    Gpu,
    Cpu,
    Heartbeat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touched {
    Never,
    /// Seconds and nanoseconds since 1970.
    At(i64, i64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuWork {
    Idle,
    Works,
    /// Work that may be the job's, or that of a snapshot of it.
    Doubtful,
}

impl GpuWork {
    /// Returns the activity of the job, given the activity of all and whether own work may show. If no process works,
    /// neither does the job.
    #[must_use]
    pub fn seen(works: bool, ours_shows: bool) -> Self {
        match (works, ours_shows) {
            (false, _) => Self::Idle,
            (true, false) => Self::Works,
            (true, true) => Self::Doubtful,
        }
    }
}

/// Observations of a job at one time; `None` is unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Somebody has stopped it: a debugger, or SIGSTOP.
    pub stopped: bool,
    pub output: Option<u64>,
    /// Activity of its GPUs since the last sample.
    pub gpu: Option<GpuWork>,
    /// CPU time that it has used, without that of our work in it.
    pub cpu: Option<Duration>,
    pub heartbeat: Option<Touched>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finding {
    pub sign: Sign,
    /// Time for which the sign was quiet.
    pub quiet: Duration,
    /// Longest possible time of quiet: the last activity was some time before the sample that showed it, and the job
    /// may have been silent before samples of a stopped job, which do not count.
    pub quiet_max: Duration,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.sign {
            Sign::Output => "no output",
            Sign::Gpu => "no GPU work",
            Sign::Cpu => "no CPU time used",
            Sign::Heartbeat => "no heartbeat",
        };
        write!(f, "{what} for {}", rough(self.quiet))
    }
}

/// State of one sign: its value at the last activity, and the time since then.
#[derive(Debug, Clone, Copy)]
struct Watch<T> {
    limit: Duration,
    last: Option<T>,
    /// Since it was looked at.
    unseen: Duration,
    /// Since it was looked at before the look that showed its last life.
    silent: Duration,
    quiet: Duration,
    /// Doubtful time since the last sample that was not.
    doubtful: Duration,
    /// Part of `quiet` that was not doubtful.
    told: Duration,
    fired: bool,
}

impl<T: Copy> Watch<T> {
    fn new(limit: Option<Duration>) -> Option<Self> {
        limit.map(|limit| Self {
            limit,
            last: None,
            unseen: Duration::ZERO,
            silent: Duration::ZERO,
            quiet: Duration::ZERO,
            doubtful: Duration::ZERO,
            told: Duration::ZERO,
            fired: false,
        })
    }

    /// Time goes by, whether it is looked at or not.
    fn later(mut self, counted: Duration) -> Self {
        self.unseen += counted;
        self.silent += counted;
        self
    }

    /// Records a doubtful sample. Doubt alone counts neither way: it is quiet once the samples before and after it are.
    fn doubt(&mut self, counted: Duration) {
        if self.last.is_some() {
            self.doubtful += counted;
        }
    }

    /// `lives` compares with the last life; true when the sign fires.
    fn take(
        &mut self,
        value: Option<T>,
        counted: Duration,
        lives: impl FnOnce(&Self, T) -> bool,
    ) -> bool {
        let Some(value) = value else {
            return false;
        };
        if self.last.is_none() || lives(self, value) {
            (self.last, self.quiet, self.fired) = (Some(value), Duration::ZERO, false);
            (self.doubtful, self.told) = (Duration::ZERO, Duration::ZERO);
            self.silent = std::mem::take(&mut self.unseen);
            return false;
        }
        self.unseen = Duration::ZERO;
        self.quiet += counted + std::mem::take(&mut self.doubtful);
        self.told += counted;
        let enough = self.quiet >= self.limit && self.told >= self.limit.mul_f64(TOLD);
        let fires = enough && !self.fired;
        self.fired |= fires;
        fires
    }

    fn finding(&self, sign: Sign) -> Finding {
        Finding {
            sign,
            quiet: self.quiet,
            quiet_max: self.silent,
        }
    }
}

/// Signs of one attempt of a job.
#[derive(Debug, Clone, Copy)]
pub struct Signs {
    output: Option<Watch<u64>>,
    gpu: Option<Watch<GpuWork>>,
    cpu: Option<Watch<Duration>>,
    heartbeat: Option<Watch<Touched>>,
}

impl Signs {
    #[must_use]
    pub fn new(settings: &Hang) -> Self {
        Self {
            output: Watch::new(settings.output),
            gpu: Watch::new(settings.gpu),
            cpu: Watch::new(settings.cpu),
            heartbeat: Watch::new(settings.heartbeat_limit()),
        }
    }

    fn pass(&mut self, counted: Duration) {
        self.output = self.output.map(|watch| watch.later(counted));
        self.gpu = self.gpu.map(|watch| watch.later(counted));
        self.cpu = self.cpu.map(|watch| watch.later(counted));
        self.heartbeat = self.heartbeat.map(|watch| watch.later(counted));
    }

    /// Takes a sample; `counted` is how long the job could have computed since the last one.
    pub fn take(&mut self, sample: &Sample, counted: Duration) -> Option<Finding> {
        self.pass(counted);
        if sample.stopped {
            return None;
        }
        let mut found = None;
        if let Some(watch) = &mut self.output
            && watch.take(sample.output, counted, |watch, now| watch.last != Some(now))
        {
            found = found.or(Some(watch.finding(Sign::Output)));
        }
        if let Some(watch) = &mut self.gpu {
            if sample.gpu == Some(GpuWork::Doubtful) {
                watch.doubt(counted);
            } else if watch.take(sample.gpu, counted, |_, work| work == GpuWork::Works) {
                found = found.or(Some(watch.finding(Sign::Gpu)));
            }
        }
        if let Some(watch) = &mut self.cpu
            && watch.take(sample.cpu, counted, |watch, now| {
                let used = now.saturating_sub(watch.last.unwrap_or_default());
                used > watch.limit.mul_f64(CPU_IDLE).max(CPU_TICK)
            })
        {
            found = found.or(Some(watch.finding(Sign::Cpu)));
        }
        if let Some(watch) = &mut self.heartbeat
            && watch.take(sample.heartbeat, counted, |watch, now| {
                watch.last != Some(now)
            })
        {
            found = found.or(Some(watch.finding(Sign::Heartbeat)));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    //! Tests of the signs of a hang.

    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;
    use crate::run::own_activity::OwnActivity;

    const SECOND: Duration = Duration::from_secs(1);
    const NEVER: [usize; 0] = [];

    fn signs(change: impl FnOnce(&mut Hang)) -> Signs {
        let mut settings = Config::default().hang;
        change(&mut settings);
        Signs::new(&settings)
    }

    fn output(bytes: u64) -> Sample {
        Sample {
            output: Some(bytes),
            ..Sample::default()
        }
    }

    fn gpu(gpu: Option<GpuWork>) -> Sample {
        Sample {
            gpu,
            ..Sample::default()
        }
    }

    /// Returns the indices of the samples, a second apart, at which a sign fires.
    fn fires(mut signs: Signs, samples: impl IntoIterator<Item = Sample>) -> Vec<usize> {
        let samples = samples.into_iter().enumerate();
        let fired = samples.filter(|(_, sample)| signs.take(sample, SECOND).is_some());
        fired.map(|(number, _)| number).collect()
    }

    #[test]
    fn a_job_that_says_nothing_hangs_after_its_limit_and_once() {
        let signs = signs(|hang| hang.output = Some(3 * SECOND));
        assert_eq!(fires(signs, [7, 7, 7, 7, 7, 7].map(output)), [3]);
        // It said something and fell silent again.
        assert_eq!(
            fires(signs, [7, 7, 7, 8, 8, 8, 8, 9, 9, 9, 9].map(output)),
            [6, 10]
        );
    }

    #[test]
    fn time_in_which_it_could_not_compute_does_not_count() {
        let mut signs = signs(|hang| hang.output = Some(3 * SECOND));
        for _ in 0..100 {
            assert_eq!(signs.take(&output(7), Duration::ZERO), None);
        }
        let stopped = Sample {
            stopped: true,
            ..output(7)
        };
        for _ in 0..100 {
            assert_eq!(signs.take(&stopped, SECOND), None);
        }
        assert_eq!(signs.take(&output(7), 2 * SECOND), None);
        let found = signs.take(&output(7), 2 * SECOND).unwrap();
        assert_eq!(found.to_string(), "no output for 4.0 s");
        // It may have been silent all the time.
        assert_eq!(found.quiet_max, 104 * SECOND);
    }

    #[test]
    fn what_is_not_known_is_neither_life_nor_quiet() {
        let signs = signs(|hang| hang.gpu = Some(3 * SECOND));
        let gpu = |works: [Option<GpuWork>; 8]| works.map(gpu);
        let (on, off) = (Some(GpuWork::Works), Some(GpuWork::Idle));
        assert_eq!(fires(signs, gpu([None; 8])), NEVER);
        assert_eq!(
            fires(signs, gpu([on, off, off, None, None, off, off, on])),
            [5]
        );
        assert_eq!(
            fires(signs, gpu([off, off, on, off, off, on, off, off])),
            NEVER
        );
    }

    #[test]
    fn a_gpu_at_rest_tells_of_the_job_whoever_may_use_it() {
        use GpuWork::{Doubtful, Idle, Works};
        for (works, ours, seen) in [
            (false, false, Idle),
            (false, true, Idle),
            (true, false, Works),
            (true, true, Doubtful),
        ] {
            assert_eq!(GpuWork::seen(works, ours), seen);
        }
    }

    #[test]
    fn doubtful_work_neither_hides_a_hang_nor_is_one() {
        use GpuWork::{Doubtful, Idle, Works};
        let signs = signs(|hang| hang.gpu = Some(4 * SECOND));
        let fired = |works: &[GpuWork]| fires(signs, works.iter().map(|work| gpu(Some(*work))));
        // Snapshots one after another, and a job that hangs between them: as soon as without them.
        assert_eq!(fired(&[Works, Idle, Doubtful, Doubtful, Idle]), [4]);
        assert_eq!(fired(&[Works, Doubtful, Idle, Doubtful, Idle]), [4]);
        // Doubt alone kills nobody, however long.
        assert_eq!(fired(&[Doubtful; 100]), NEVER);
        let mut hidden = vec![Works];
        hidden.extend([Doubtful; 100]);
        assert_eq!(fired(&hidden), NEVER);
        // Nor does little more than doubt: half of the limit is to be seen.
        hidden.push(Idle);
        assert_eq!(fired(&hidden), NEVER);
        hidden.push(Idle);
        assert_eq!(fired(&hidden), [102]);
        // It lives between snapshots.
        let lives = [Works, Doubtful, Doubtful, Idle, Doubtful].repeat(20);
        assert_eq!(fired(&lives), NEVER);
        // Doubt ends no silence either: it is said once.
        assert_eq!(fired(&[Works, Idle, Idle, Idle, Idle, Doubtful, Idle]), [4]);
    }

    #[test]
    fn a_little_cpu_time_is_no_life() {
        let signs = signs(|hang| hang.cpu = Some(100 * SECOND));
        let using = |ms_a_second: u32| {
            (0..200).map(move |number| Sample {
                cpu: Some(Duration::from_millis((number * ms_a_second).into())),
                ..Sample::default()
            })
        };
        assert_eq!(fires(signs, using(0)), [100]);
        // 50 ms in 100 s are half a thousandth of a CPU.
        let idle = (0..200_u32).map(|number| Sample {
            cpu: Some(Duration::from_millis((number / 2).into())),
            ..Sample::default()
        });
        assert_eq!(fires(signs, idle), [100]);
        assert_eq!(fires(signs, using(10)), NEVER);
    }

    #[test]
    fn one_tick_is_no_life_however_short_the_limit() {
        let signs = signs(|hang| hang.cpu = Some(3 * SECOND));
        let at = |ticks: u64| Sample {
            cpu: Some(Duration::from_millis(ticks * 10)),
            ..Sample::default()
        };
        assert_eq!(fires(signs, [5, 5, 6, 6, 6, 6, 6, 6].map(at)), [3]);
        assert_eq!(fires(signs, [5, 5, 7, 7, 7, 7].map(at)), [5]);
    }

    #[test]
    fn a_heartbeat_that_is_never_there_counts_from_the_beginning() {
        let signs = signs(|hang| {
            hang.heartbeat = Some("beat".into());
            hang.heartbeat_timeout = 3 * SECOND;
        });
        let beats = |beats: &[Touched]| {
            let samples = beats.iter().map(|touched| Sample {
                heartbeat: Some(*touched),
                ..Sample::default()
            });
            fires(signs, samples.collect::<Vec<_>>())
        };
        assert_eq!(beats(&[Touched::Never; 5]), [3]);
        let at = |time| Touched::At(time, 0);
        // Also a clock that was set back is a touch.
        assert_eq!(
            beats(&[
                Touched::Never,
                at(9),
                at(9),
                at(9),
                at(5),
                at(5),
                at(5),
                at(5)
            ]),
            [7]
        );
    }

    #[test]
    fn a_sign_that_is_off_never_fires() {
        assert!(!Config::default().hang.is_on());
        assert_eq!(fires(signs(|_| {}), vec![Sample::default(); 1000]), NEVER);
    }

    proptest! {
        #[test]
        fn a_sign_fires_exactly_when_it_was_quiet_for_its_limit(
            limit in 1..20_u64, lives in proptest::collection::vec(any::<bool>(), 1..200),
        ) {
            let signs = signs(|hang| hang.gpu = Some(Duration::from_secs(limit)));
            let samples: Vec<Sample> = lives.iter().map(|works| Sample {
                gpu: Some(GpuWork::seen(*works, false)),
                ..Sample::default()
            }).collect();
            let fired = fires(signs, samples);
            let mut expected = Vec::new();
            let mut quiet = 0;
            for (number, works) in lives.iter().enumerate() {
                quiet = if *works || number == 0 { 0 } else { quiet + 1 };
                if quiet == limit {
                    expected.push(number);
                }
            }
            prop_assert_eq!(fired, expected);
        }

        #[test]
        fn it_fires_only_after_the_limit_half_of_it_beyond_doubt(
            limit in 1..20_u64, seen in proptest::collection::vec((any::<bool>(), any::<bool>()), 1..200),
        ) {
            let signs = signs(|hang| hang.gpu = Some(Duration::from_secs(limit)));
            let seen: Vec<GpuWork> = seen.iter().map(|(works, ours)| GpuWork::seen(*works, *ours)).collect();
            let fired = fires(signs, seen.iter().map(|work| gpu(Some(*work))));
            for number in fired {
                let after_life = seen[..=number].rsplit(|work| *work == GpuWork::Works).next();
                let idle = after_life.unwrap_or_default().iter().filter(|work| **work == GpuWork::Idle).count() as u64;
                prop_assert_eq!(seen[number], GpuWork::Idle);
                prop_assert!(after_life.unwrap_or_default().len() as u64 >= limit);
                prop_assert!(idle * 2 >= limit);
            }
        }
    }

    #[test]
    fn cpu_time_of_snapshots_does_not_hide_a_hang() {
        let mut settings = Config::default().hang;
        settings.cpu = Some(10 * SECOND);
        let find = |own: u64| {
            let (own_activity, mut signs) = (OwnActivity::default(), Signs::new(&settings));
            let mut used = Duration::ZERO;
            (0..100).find(|_| {
                own_activity.begins(used);
                used += Duration::from_millis(50);
                own_activity.ends(used);
                used += Duration::from_millis(own);
                let sample = Sample {
                    cpu: own_activity.own_cpu_time(|| used),
                    ..Sample::default()
                };
                signs.take(&sample, SECOND).is_some()
            })
        };
        assert_eq!(find(0), Some(10));
        assert_eq!(find(10), None);
    }
}
