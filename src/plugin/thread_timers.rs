//! Timers of the processor time of a thread (`CLOCK_THREAD_CPUTIME_ID`), as sampling profilers make them.
//!
//! CRIU (4.2) reads a process's timers from `/proc/PID/timers`, and makes all of them again in the first thread. The kernel shows
//! this clock without the thread that has made the timer, so that the timer would measure the first one. CRIU reads the clock of
//! the thread that the timer signals instead (`pthread_getcpuclockid`): a profiler's threads signal themselves. A timer of the C
//! library that calls a function (`SIGEV_THREAD`) signals a thread of the library, and stays one of the first thread. The thread
//! that has made a timer is not known: a timer with another one than these is not restored right.

use core::ffi::{CStr, c_int};

use super::filters::in_memory;
use super::kernel::{O_CLOEXEC, close, openat, read_some, write_at};
use super::text::{Buffer, number};

/// Name of the file that shows a process's timers.
const TIMERS: &CStr = c"timers";
/// Longest line of this file.
const LINE_BYTES_MAX: usize = 128;
const CHUNK_BYTES: usize = 4096;
const O_ACCMODE: c_int = 3;

/// Line of a timer with this clock, and its beginning.
const OF_THREAD: &[u8] = b"ClockID: -2\n";
const CLOCK: &[u8] = b"ClockID: ";
/// Beginning of a line about a timer's signal, and the signal of the C library's timers.
const SIGNAL: &[u8] = b"signal: ";
const LIBRARYS: &[u8] = b"32/";
/// Text before the thread that a timer signals.
const SIGNALS: &[u8] = b"/tid.";
/// Kind of a clock: the processor time of a thread (`CPUCLOCK_SCHED` and `CPUCLOCK_PERTHREAD_MASK`).
const THREAD_TIME: i64 = 6;

type Line = Buffer<LINE_BYTES_MAX>;

/// Answers an `openat` of a process's timers if there are any. Returns `None` if the kernel has to answer.
#[allow(unsafe_code, reason = "closes what it has opened")]
pub fn answer(folder: c_int, path: &CStr, flags: c_int) -> Option<c_int> {
    if path != TIMERS || flags & O_ACCMODE != 0 {
        return None;
    }
    let timers = openat(folder, path, O_CLOEXEC).ok()?;
    let shown = in_memory(b"");
    let is_whole = shown.and_then(|shown| show(timers, shown)).is_some();
    for file in [Some(timers), shown.filter(|_| !is_whole)] {
        // SAFETY: nobody else has it.
        file.map(|file| unsafe { close(file) });
    }
    shown.filter(|_| is_whole)
}

/// Copies the timers into an empty file, with the clocks of threads.
fn show(timers: c_int, shown: c_int) -> Option<()> {
    let (mut line, mut timer, mut place) = (Line::new(), Timer::default(), 0);
    let mut chunk = [0; CHUNK_BYTES];
    loop {
        let read = read_some(timers, &mut chunk).ok()?;
        if read == 0 {
            return Some(());
        }
        for byte in chunk.get(..read)? {
            line.push(&[*byte]);
            if *byte == b'\n' {
                let changed = with_clock(line.as_c().to_bytes(), &mut timer);
                let text = changed.as_ref().unwrap_or(&line).as_c().to_bytes();
                (write_at(shown, text, place) == Ok(text.len())).then_some(())?;
                place += text.len() as u64;
                line = Line::new();
            }
        }
    }
}

/// Facts about a timer, from the lines that were read so far.
#[derive(Default)]
pub struct Timer {
    is_librarys: bool,
    thread: Option<u32>,
}

/// Returns the line with the clock of the signalled thread if it has the clock of an unknown one.
pub fn with_clock(line: &[u8], timer: &mut Timer) -> Option<Line> {
    if let Some(signal) = line.strip_prefix(SIGNAL) {
        timer.is_librarys = signal.starts_with(LIBRARYS);
    }
    let mut places = line.windows(SIGNALS.len());
    if let Some(at) = places.position(|place| place == SIGNALS) {
        timer.thread = number(line.get(at + SIGNALS.len()..)?.strip_suffix(b"\n")?);
    }
    if !line.starts_with(CLOCK) {
        return None;
    }
    let Timer {
        is_librarys,
        thread,
    } = core::mem::take(timer);
    let of = thread.filter(|_| line == OF_THREAD && !is_librarys)?;
    let mut changed = Line::new();
    changed.push(CLOCK);
    // The number is `!of << 3 | THREAD_TIME`, which is negative.
    changed.push(b"-");
    changed.push_number(8 * (i64::from(of) + 1) - THREAD_TIME);
    changed.push(b"\n");
    Some(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_clock_is_that_of_the_signalled_thread() {
        let timer = |notify: &str, clock: &str| {
            format!("ID: 1\nsignal: 27/00000000000000aa\nnotify: {notify}\nClockID: {clock}\n")
        };
        let shown = |timers: String| {
            let mut state = Timer::default();
            let lines = timers.split_inclusive('\n').map(|line| {
                let changed = with_clock(line.as_bytes(), &mut state);
                changed.map_or(line.to_owned(), |it| it.as_c().to_str().unwrap().to_owned())
            });
            lines.collect::<String>()
        };
        let librarys = timer("signal/tid.12", "-2").replace("signal: 27/", "signal: 32/");
        let others = timer("signal/pid.12", "-2") + &timer("signal/tid.13", "-6") + &librarys;
        assert_eq!(shown(others.clone()), others);
        // As `pthread_getcpuclockid` numbers the clock of thread 1234.
        assert_eq!((!1234_i64) << 3 | THREAD_TIME, -9874);
        assert_eq!(
            shown(timer("signal/tid.1234", "-2") + &others),
            timer("signal/tid.1234", "-9874") + &others
        );
    }
}
