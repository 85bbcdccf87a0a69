//! Logs: `tracing` events to stderr, each one line that begins with `ckpt-run:`.
//!
//! The job's own lines go to the same place. A line of ckpt-run never begins in the middle of a line of the job: the
//! code that delivers the job's lines writes ckpt-run's between them.

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

/// A function that writes a line of ckpt-run to stderr, separate from the job's lines that go to the same place.
type WriteLine = Box<dyn Fn(&str) + Send + Sync>;

static WRITE_LINE: OnceLock<WriteLine> = OnceLock::new();
/// The file that receives the lines instead of stderr.
static APART: OnceLock<File> = OnceLock::new();

/// Sends the logs of this crate at `level` (a word of `tracing`) and above to stderr.
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

/// Sends the logs to a file instead of stderr. Stderr then belongs to the job alone, and a restore can truncate its
/// content. Must be called before a run.
pub fn to_file(file: File) {
    let _ = APART.set(file);
}

/// Returns true if the logs go to a separate file.
pub(crate) fn is_apart() -> bool {
    APART.get().is_some()
}

/// Makes `write` write every line of the logs, including its line end. `write` knows the job's output to the same
/// place; ckpt-run's progress display belongs there too. Can be called once per process.
pub fn share_lines_with(write: impl Fn(&str) + Send + Sync + 'static) {
    let _ = WRITE_LINE.set(Box::new(write));
}

/// The writer of the log lines, one at a time.
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

/// The text of an event: the message, then the fields as ` name=value`.
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
