//! Whether a job hangs: a pure function of samples of it, in the time in which it could have computed.
//!
//! Each sign has a limit and stands alone: it is quiet for as long as samples show no life of it, and fires once when
//! that is as long as its limit, and again only after more life. What cannot be told counts neither as life nor as
//! quiet. Taking samples, and what is done about a job that hangs, are elsewhere.

use std::fmt;
use std::time::Duration;

use super::interval::rough;
use crate::config::Hang;

/// CPU time, as a part of the limit of its sign, that is no life: threads that wake to look around use less, and work
/// uses more.
const CPU_IDLE: f64 = 0.001;

/// Where life is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// stdout and stderr.
    Output,
    /// The GPUs that the job's processes use.
    Gpu,
    /// CPU time of all its processes.
    Cpu,
    /// A file that it touches.
    Heartbeat,
}

/// When a file was last touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touched {
    /// It is not there.
    Never,
    /// Seconds and nanoseconds since 1970.
    At(i64, i64),
}

/// What was seen of a job at one time; `None` is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Somebody has stopped it: a debugger, or SIGSTOP.
    pub stopped: bool,
    /// Bytes that it has written.
    pub output: Option<u64>,
    /// Whether its GPUs have worked since the last sample.
    pub gpu: Option<bool>,
    /// CPU time that it has used.
    pub cpu: Option<Duration>,
    /// Its heartbeat.
    pub heartbeat: Option<Touched>,
}

/// A job that hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finding {
    /// The sign.
    pub sign: Sign,
    /// How long it was quiet.
    pub quiet: Duration,
    /// How long at the most: its last life was some time before the sample that showed it, and it may have been
    /// silent before samples of a job that stood still, which do not count.
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

/// One sign: what it was at its last life, and how long ago that is.
#[derive(Debug, Clone, Copy)]
struct Watch<T> {
    limit: Duration,
    last: Option<T>,
    /// Since it was looked at.
    unseen: Duration,
    /// Since it was looked at before the look that showed its last life.
    silent: Duration,
    quiet: Duration,
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
            fired: false,
        })
    }

    /// Time goes by, whether it is looked at or not.
    fn later(mut self, counted: Duration) -> Self {
        self.unseen += counted;
        self.silent += counted;
        self
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
            self.silent = std::mem::take(&mut self.unseen);
            return false;
        }
        self.unseen = Duration::ZERO;
        self.quiet += counted;
        let fires = self.quiet >= self.limit && !self.fired;
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

/// The signs of one life of a job.
#[derive(Debug, Clone, Copy)]
pub struct Signs {
    output: Option<Watch<u64>>,
    gpu: Option<Watch<bool>>,
    cpu: Option<Watch<Duration>>,
    heartbeat: Option<Watch<Touched>>,
}

impl Signs {
    /// Those that are looked for.
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
        if let Some(watch) = &mut self.gpu
            && watch.take(sample.gpu, counted, |_, works| works)
        {
            found = found.or(Some(watch.finding(Sign::Gpu)));
        }
        if let Some(watch) = &mut self.cpu
            && watch.take(sample.cpu, counted, |watch, now| {
                let used = now.saturating_sub(watch.last.unwrap_or_default());
                used > watch.limit.mul_f64(CPU_IDLE)
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
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;

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

    /// In which of these samples, a second apart, something fires.
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
        assert_eq!(found.to_string(), "no output for 4s");
        // It may have been silent all the time.
        assert_eq!(found.quiet_max, 104 * SECOND);
    }

    #[test]
    fn what_is_not_known_is_neither_life_nor_quiet() {
        let signs = signs(|hang| hang.gpu = Some(3 * SECOND));
        let gpu = |works: [Option<bool>; 8]| {
            works.map(|gpu| Sample {
                gpu,
                ..Sample::default()
            })
        };
        let (on, off) = (Some(true), Some(false));
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
        fn it_fires_exactly_when_the_last_life_is_as_long_ago_as_the_limit(
            limit in 1..20_u64, lives in proptest::collection::vec(any::<bool>(), 1..200),
        ) {
            let signs = signs(|hang| hang.gpu = Some(Duration::from_secs(limit)));
            let samples: Vec<Sample> = lives.iter().map(|works| Sample {
                gpu: Some(*works),
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
    }
}
