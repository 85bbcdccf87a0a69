//! Logs: `tracing` events to stderr, each one line that begins with `ckpt-run:`.
//!
//! The job's own lines go to the same place. A line of ours never begins in the
//! middle of one of the job's: whoever delivers those writes ours between them.

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

/// Writes a line of ours to stderr, apart from the lines of the job that go to the same place.
type WriteLine = Box<dyn Fn(&str) + Send + Sync>;

static WRITE_LINE: OnceLock<WriteLine> = OnceLock::new();
/// Where the lines go instead of stderr.
static APART: OnceLock<File> = OnceLock::new();

/// Sends the logs of this crate, of `level` (a word of `tracing`'s) and above, to stderr.
///
/// A second call has no effect.
pub fn to_stderr(level: &str) {
    let filter = EnvFilter::new(format!("off,ckpt_run={level}"));
    // Somebody who uses the library may have a subscriber of their own.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Lines)
        .event_format(Line)
        .try_init();
}

/// Keeps the logs out of stderr: it is the job's alone, and what it holds can be cut back at a restore. Before a run.
pub fn to_file(file: File) {
    let _ = APART.set(file);
}

/// Whether the logs go to a file of their own.
pub(crate) fn is_apart() -> bool {
    APART.get().is_some()
}

/// Has every line of the logs, with its end, written by `write`, which knows what the job writes to the same place; a
/// progress display of ours belongs there too. Once a process.
pub fn share_lines_with(write: impl Fn(&str) + Send + Sync + 'static) {
    let _ = WRITE_LINE.set(Box::new(write));
}

/// Where lines go, one at a time.
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

/// The message, then the fields as ` name=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let shown = format!("{value:?}").replace('\n', "\\n");
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
