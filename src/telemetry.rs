//! Logs: `tracing` events to stderr, each one line that begins with `ckpt-run:`.
//!
//! The job's own lines go to the same place. A line of ours never begins in the
//! middle of one of the job's: it is preceded by a line break then.

use std::fmt::{self, Write as _};
use std::sync::OnceLock;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Asks whether the terminal or file that we log to stands at the start of a line.
type AtLineStart = Box<dyn Fn() -> bool + Send + Sync>;

static AT_LINE_START: OnceLock<AtLineStart> = OnceLock::new();

/// Sends the logs of this crate, of `level` (a word of `tracing`'s) and above, to stderr.
///
/// A second call has no effect.
pub fn to_stderr(level: &str) {
    let filter = EnvFilter::new(format!("off,ckpt_run={level}"));
    // Somebody who uses the library may have a subscriber of their own.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .event_format(Line)
        .try_init();
}

/// Gives the logs a way to ask for the state of the line that the job writes. Once a process.
pub fn share_lines_with(job: impl Fn() -> bool + Send + Sync + 'static) {
    let _ = AT_LINE_START.set(Box::new(job));
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
        if AT_LINE_START
            .get()
            .is_some_and(|at_line_start| !at_line_start())
        {
            writer.write_char('\n')?;
        }
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
