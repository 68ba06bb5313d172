//! The profiler of a run: a table of times, and a trace of its first steps for Perfetto or chrome://tracing.
//!
//! The spans come from ops, layers and phases ([`candlewick_ops::span`]). They include collectives: the time of each on
//! its own thread, and the time spent waiting for it. On a GPU, a span measures the time to launch the kernels.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use candlewick_ops::PROFILE_TARGET;
use candlewick_text::files::write_atomically;
use clap::ValueEnum;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};
use tracing_chrome::{ChromeLayerBuilder, EventOrSpan, FlushGuard};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterFn, dynamic_filter_fn};
use tracing_subscriber::layer::Context as LayerContext;
use tracing_subscriber::registry::LookupSpan;

use crate::profiling::BoxedLayer;

/// The sort order of the profile table, named as in Python's profilers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ProfileSort {
    /// Time in a span, without its child spans
    Tottime,
    /// Time in a span, with its child spans
    Cumtime,
}

/// A profile that is being recorded.
pub(super) struct Profile {
    folder: PathBuf,
    sort: ProfileSort,
    table: Arc<SpanTable>,
    chrome: Option<BoxedLayer>,
    guard: FlushGuard,
    started: Instant,
}

/// The times of spans by name.
#[derive(Default)]
struct SpanTable {
    rows: Mutex<HashMap<String, Row>>,
    n_steps: AtomicUsize,
}

#[derive(Clone, Copy, Default)]
struct Row {
    n_calls: usize,
    tottime: Duration,
    cumtime: Duration,
    /// Bytes sent to other ranks.
    n_bytes: u64,
}

/// Bytes that a span sent to other ranks.
#[derive(Default)]
struct SentBytes(u64);

/// The name of a span, with its pass.
struct Name(String);

/// An open span of a thread.
struct Frame {
    entered: Instant,
    child_time: Duration,
}

thread_local! {
    static FRAMES: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
}

impl Profile {
    /// Starts a profile that writes a trace of `n_steps` steps into `folder`.
    pub(super) fn create(folder: PathBuf, sort: ProfileSort, n_steps: usize) -> Result<Self> {
        let path = folder.join("trace.json");
        let failed = || format!("failed to write the trace {}", path.display());
        fs::create_dir_all(&folder).with_context(failed)?;
        let writer = File::create(&path).with_context(failed)?;
        let name: fn(&EventOrSpan<'_, '_, tracing_subscriber::Registry>) -> String = |of| match of {
            EventOrSpan::Span(span) => {
                span.extensions().get::<Name>().map_or_else(|| span.name().to_owned(), |name| name.0.clone())
            }
            EventOrSpan::Event(event) => event.metadata().name().to_owned(),
        };
        let (chrome, guard) =
            ChromeLayerBuilder::new().writer(writer).include_locations(false).name_fn(Box::new(name)).build();
        let table = Arc::new(SpanTable::default());
        let counter = table.clone();
        let is_traced = move |metadata: &Metadata<'_>, _: &LayerContext<'_, _>| {
            is_profiled(metadata) && counter.n_steps.load(Ordering::Relaxed) < n_steps
        };
        let chrome: BoxedLayer = Box::new(chrome.with_filter(dynamic_filter_fn(is_traced)));
        Ok(Self { folder, sort, table, chrome: Some(chrome), guard, started: Instant::now() })
    }

    /// Returns the tracing layer that records the spans. Only the first call includes the trace writer.
    pub(super) fn layer(&mut self) -> BoxedLayer {
        let table =
            SpanRecorder(self.table.clone()).with_filter(FilterFn::new(is_profiled as fn(&Metadata<'_>) -> bool));
        // The trace reads the span names that the table's layer stores, so that layer comes first.
        Box::new(table.and_then(self.chrome.take()))
    }

    /// Writes the remaining events and returns the table.
    pub(super) fn finish(self) -> Result<String> {
        self.guard.flush();
        let table = self.table.show(self.sort, self.started.elapsed());
        let path = self.folder.join("profile.txt");
        let written = write_atomically(&path, |file| file.write_all(table.as_bytes()));
        written.with_context(|| format!("failed to write {}", path.display()))?;
        Ok(format!("{table}trace: {}", self.folder.join("trace.json").display()))
    }
}

fn is_profiled(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && metadata.target() == PROFILE_TARGET
}

impl SpanTable {
    fn add(&self, name: &str, cumtime: Duration, child_time: Duration, n_bytes: u64) {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let row = rows.entry(name.to_owned()).or_default();
        row.n_calls += 1;
        row.cumtime += cumtime;
        row.tottime += cumtime.saturating_sub(child_time);
        row.n_bytes += n_bytes;
    }

    fn show(&self, sort: ProfileSort, elapsed: Duration) -> String {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows: Vec<(&String, &Row)> = rows.iter().collect();
        rows.sort_by_key(|(name, row)| {
            (std::cmp::Reverse(if sort == ProfileSort::Tottime { row.tottime } else { row.cumtime }), *name)
        });
        let mut text = format!("{:>9} {:>10} {:>6} {:>10}  span\n", "calls", "tottime s", "%", "cumtime s");
        for (name, Row { n_calls, tottime, cumtime, n_bytes }) in rows {
            let (tottime, cumtime) = (tottime.as_secs_f64(), cumtime.as_secs_f64());
            let percent = 100.0 * tottime / elapsed.as_secs_f64();
            // Writing to a string cannot fail.
            let _ = write!(text, "{n_calls:>9} {tottime:>10.3} {percent:>6.1} {cumtime:>10.3}  {name}");
            if *n_bytes > 0 {
                let _ = write!(text, ", {:.3} MB sent", *n_bytes as f64 / 1e6);
            }
            text.push('\n');
        }
        let _ = writeln!(text, "{:.3} s in total", elapsed.as_secs_f64());
        text
    }
}

struct SpanRecorder(Arc<SpanTable>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanRecorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: LayerContext<'_, S>) {
        let mut name = Name(String::new());
        attributes.record(&mut name);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(name);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: LayerContext<'_, S>) {
        let mut sent = SentBytes::default();
        values.record(&mut sent);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(sent);
        }
    }

    fn on_enter(&self, _: &Id, _: LayerContext<'_, S>) {
        FRAMES.with_borrow_mut(|frames| frames.push(Frame { entered: Instant::now(), child_time: Duration::ZERO }));
    }

    fn on_exit(&self, id: &Id, context: LayerContext<'_, S>) {
        let closed = FRAMES.with_borrow_mut(|frames| {
            let frame = frames.pop()?;
            let cumtime = frame.entered.elapsed();
            if let Some(around) = frames.last_mut() {
                around.child_time += cumtime;
            }
            Some((cumtime, frame.child_time))
        });
        let Some(((cumtime, child_time), span)) = closed.zip(context.span(id)) else { return };
        if let Some(Name(name)) = span.extensions().get::<Name>() {
            let n_bytes = span.extensions().get::<SentBytes>().map_or(0, |sent| sent.0);
            self.0.add(name, cumtime, child_time, n_bytes);
            self.0.n_steps.fetch_add(usize::from(name == "step"), Ordering::Relaxed);
        }
    }
}

impl Visit for SentBytes {
    fn record_u64(&mut self, _: &Field, value: u64) {
        self.0 = value;
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

impl Visit for Name {
    fn record_str(&mut self, _: &Field, value: &str) {
        if !self.0.is_empty() && !value.is_empty() {
            self.0.push(' ');
        }
        self.0.push_str(value);
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}
