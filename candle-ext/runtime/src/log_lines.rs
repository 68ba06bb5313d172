//! The format of events on stderr: `warning: the file is empty`.

use std::fmt;
use std::io;
use std::io::IsTerminal;

use candlewick_command_line::with_label_color;
use jiff::Timestamp;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::timestamp::utc_timestamp;

/// The format of events on stderr. In a file or a pipe, a line begins with the time.
///
/// Warnings and errors are for users. Other events are for developers, and name their module.
#[derive(Clone, Copy, Debug)]
pub struct LogLineFormat;

impl<S, N> FormatEvent<S, N> for LogLineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let (level, module) = (*event.metadata().level(), event.metadata().target());
        if !io::stderr().is_terminal() {
            write!(writer, "{} ", utc_timestamp(Timestamp::now()))?;
        }
        match level {
            Level::ERROR => write!(writer, "{} ", with_label_color("error:"))?,
            Level::WARN => write!(writer, "{} ", with_label_color("warning:"))?,
            Level::INFO => write!(writer, "info: {module}: ")?,
            Level::DEBUG => write!(writer, "debug: {module}: ")?,
            Level::TRACE => write!(writer, "trace: {module}: ")?,
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
