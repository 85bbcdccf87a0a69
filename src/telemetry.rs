//! Log output: `tracing` events on stderr, each one line that begins with `ckpt-run:`.
//!
//! The job's own lines may go to the same stderr. The code that delivers the job's lines also writes ckpt-run's, so a
//! log line never starts in the middle of a line of the job.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io;
use std::sync::OnceLock;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::printable::{Keep, escaped};

/// Function that writes a log line to stderr, on a line of its own between the job's lines.
type WriteLine = Box<dyn Fn(&str) + Send + Sync>;

static WRITE_LINE: OnceLock<WriteLine> = OnceLock::new();
/// File that receives the log lines instead of stderr.
static APART: OnceLock<File> = OnceLock::new();

/// Sends the logs of this crate at `level` (a level name of `tracing`) and above to stderr.
///
/// A second call has no effect.
pub fn to_stderr(level: &str) {
    let filter = EnvFilter::new(format!("off,ckpt_run={level}"));
    // A user of the library may have installed another subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Lines)
        .event_format(Line)
        .try_init();
}

/// Sends the logs to a file instead of stderr. Stderr then holds the job's output only, so a restore can truncate it.
/// Must be called before a run.
pub fn to_file(file: File) {
    let _ = APART.set(file);
}

/// Returns true if the logs go to a separate file.
pub(crate) fn is_apart() -> bool {
    APART.get().is_some()
}

/// Routes every log line, including its line end, through `write`. `write` also delivers the job's output to the same
/// place and shows ckpt-run's progress display. Can be called once per process.
pub fn share_lines_with(write: impl Fn(&str) + Send + Sync + 'static) {
    let _ = WRITE_LINE.set(Box::new(write));
}

/// Writer of the log lines, one at a time.
struct Lines;

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match (APART.get(), WRITE_LINE.get()) {
            (Some(mut file), _) => file.write_all(line)?,
            (None, Some(write)) => write(&String::from_utf8_lossy(line)),
            (None, None) => io::stderr().write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = Text::default();
        event.record(&mut text);
        let weight = match *event.metadata().level() {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            Level::INFO => "",
            Level::DEBUG => "debug: ",
            Level::TRACE => "trace: ",
        };
        writeln!(writer, "ckpt-run: {weight}{}{}", text.message, text.fields)
    }
}

/// Text of an event: the message, then the fields as ` name=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let shown = format!("{value:?}");
        let shown = escaped(&shown, Keep::Nothing);
        // Writing into a String does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{shown}"),
            name if shown.contains(' ') => write!(self.fields, " {name}=\"{shown}\""),
            name => write!(self.fields, " {name}={shown}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
