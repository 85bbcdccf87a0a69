//! Whether a job hangs: a pure function of samples of it, in the time in which it could have computed.
//!
//! Each sign has a limit and stands alone: it is quiet for as long as samples show no life of it, and fires once when
//! that is as long as its limit, and again only after more life. What cannot be told counts neither as life nor as
//! quiet. What is doubtful is quiet once samples around it are, and half of a limit must be quiet beyond doubt. Taking
//! samples, and what is done about a job that hangs, are elsewhere.

use std::fmt;
use std::time::Duration;

use crate::config::Hang;
use crate::supervisor::policy::interval::rough;

/// CPU time, as a part of the limit of its sign, that is no life: threads that wake to look around use less, and work
/// uses more.
const CPU_IDLE: f64 = 0.001;
/// The part of a limit that must be quiet beyond doubt: of a job that snapshots hide for longer too little is known to
/// kill it.
const TOLD: f64 = 0.5;

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

/// What GPUs were seen to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuWork {
    /// Nothing.
    Idle,
    /// The job's work.
    Works,
    /// Work that may be the job's, or that of a snapshot of it.
    Doubtful,
}

impl GpuWork {
    /// What is seen where our own work shows as well, or does not. Where nobody works, neither does the job.
    #[must_use]
    pub fn seen(works: bool, ours_shows: bool) -> Self {
        match (works, ours_shows) {
            (false, _) => Self::Idle,
            (true, false) => Self::Works,
            (true, true) => Self::Doubtful,
        }
    }
}

/// What was seen of a job at one time; `None` is not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Somebody has stopped it: a debugger, or SIGSTOP.
    pub stopped: bool,
    /// Bytes that it has written.
    pub output: Option<u64>,
    /// What its GPUs have done since the last sample.
    pub gpu: Option<GpuWork>,
    /// CPU time that it has used, without that of our work in it.
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

    /// What was seen may have been life, or not. Doubt alone is neither: it is quiet once samples before and after it
    /// are.
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

/// The signs of one life of a job.
#[derive(Debug, Clone, Copy)]
pub struct Signs {
    output: Option<Watch<u64>>,
    gpu: Option<Watch<GpuWork>>,
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
mod tests;
