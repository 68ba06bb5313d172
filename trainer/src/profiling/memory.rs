//! `mem_profiler`: the bytes in use at the start and the end of every span, as a Chrome trace and a table.
//!
//! Between two spans the memory is not sampled, so a peak within an op without spans is not seen.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use candle_core::Device;
use candlewick_ops::device_bytes_in_use;
use candlewick_runtime::allocator::{allocated_bytes, count_allocated_bytes};
use candlewick_text::files::write_atomically;
use serde_json::{Value, json};
use tracing::Subscriber;
use tracing::span::{Attributes, Id};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::span_name::SpanName;
use crate::plan::MemoryProfilePlan;
use crate::recipe::MemProfiler;

/// Records the memory of one process.
pub(super) struct MemoryProfiler {
    plan: MemoryProfilePlan,
    rank: usize,
    device: Arc<OnceLock<Device>>,
    is_recording: AtomicBool,
    record: Mutex<MemoryRecord>,
}

/// The entries that are kept, and the totals of all.
struct MemoryRecord {
    started: Instant,
    entries: VecDeque<MemoryEntry>,
    n_dropped: usize,
    totals: BTreeMap<String, SpanMemory>,
    peak: BytesInUse,
}

/// The start or the end of a span.
struct MemoryEntry {
    microseconds: u64,
    name: String,
    boundary: SpanBoundary,
    thread: u64,
    bytes: BytesInUse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpanBoundary {
    Begin,
    End,
}

/// The bytes in use at one moment: on the host since the start of the profile, and on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct BytesInUse {
    host: i64,
    device: i64,
}

/// The memory of all spans of a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SpanMemory {
    n_calls: usize,
    /// The largest rise above the start of a span, at any span within it.
    most: BytesInUse,
    /// The sum of the rises from start to end: memory that outlives the span.
    kept: BytesInUse,
}

/// A span that is open on this thread.
struct OpenSpan {
    start: BytesInUse,
    most: BytesInUse,
}

thread_local! {
    static OPEN: RefCell<Vec<OpenSpan>> = const { RefCell::new(Vec::new()) };
}

impl BytesInUse {
    fn minus(self, other: Self) -> Self {
        Self { host: self.host - other.host, device: self.device - other.device }
    }

    fn plus(self, other: Self) -> Self {
        Self { host: self.host + other.host, device: self.device + other.device }
    }

    fn max(self, other: Self) -> Self {
        Self { host: self.host.max(other.host), device: self.device.max(other.device) }
    }
}

impl MemoryProfiler {
    pub(super) fn new(plan: &MemoryProfilePlan, rank: usize, device: Arc<OnceLock<Device>>) -> Self {
        let record = MemoryRecord {
            started: Instant::now(),
            entries: VecDeque::new(),
            n_dropped: 0,
            totals: BTreeMap::new(),
            peak: BytesInUse::default(),
        };
        let (is_recording, record) = (AtomicBool::new(false), Mutex::new(record));
        Self { plan: plan.clone(), rank, device, is_recording, record }
    }

    pub(super) fn mode(&self) -> MemProfiler {
        self.plan.mode
    }

    /// Starts to record.
    pub(super) fn start(&self) {
        count_allocated_bytes();
        self.record.lock().unwrap_or_else(PoisonError::into_inner).started = Instant::now();
        self.is_recording.store(true, Ordering::Relaxed);
    }

    pub(super) fn layer(self: &Arc<Self>) -> MemorySampler {
        MemorySampler(self.clone())
    }

    /// Writes the trace and the table. Returns a line with their paths.
    pub(super) fn finish(&self) -> io::Result<String> {
        self.is_recording.store(false, Ordering::Relaxed);
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let path = |extension: &str| -> PathBuf { self.plan.dir.join(format!("{}.{extension}", self.rank)) };
        write_atomically(&path("json"), |file| file.write_all(record.trace(self.rank).to_string().as_bytes()))?;
        write_atomically(&path("txt"), |file| file.write_all(record.table().as_bytes()))?;
        Ok(format!("memory profile: {} (for Perfetto) and {}", path("json").display(), path("txt").display()))
    }

    fn in_use(&self) -> BytesInUse {
        let device = self.device.get().and_then(device_bytes_in_use).unwrap_or(0);
        BytesInUse { host: allocated_bytes(), device: device as i64 }
    }

    fn begin(&self, name: &str) {
        let bytes = self.in_use();
        open_span(bytes);
        self.add(name, SpanBoundary::Begin, bytes, None);
    }

    fn end(&self, name: &str) {
        let bytes = self.in_use();
        self.add(name, SpanBoundary::End, bytes, close_span(bytes));
    }

    fn add(&self, name: &str, boundary: SpanBoundary, bytes: BytesInUse, closed: Option<SpanMemory>) {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let microseconds = record.started.elapsed().as_micros() as u64;
        if record.entries.len() == self.plan.max_entries {
            record.entries.pop_front();
            record.n_dropped += 1;
        }
        let entry = MemoryEntry { microseconds, name: name.to_owned(), boundary, thread: thread_number(), bytes };
        record.entries.push_back(entry);
        record.peak = record.peak.max(bytes);
        if let Some(closed) = closed {
            let total = record.totals.entry(name.to_owned()).or_default();
            total.n_calls += 1;
            total.most = total.most.max(closed.most);
            total.kept = total.kept.plus(closed.kept);
        }
    }
}

/// Opens a span on this thread.
fn open_span(start: BytesInUse) {
    OPEN.with_borrow_mut(|open| open.push(OpenSpan { start, most: BytesInUse::default() }));
}

/// Closes the innermost span of this thread. The span around it rises at least as high.
fn close_span(bytes: BytesInUse) -> Option<SpanMemory> {
    OPEN.with_borrow_mut(|open| {
        let span = open.pop()?;
        let kept = bytes.minus(span.start);
        let most = span.most.max(kept);
        if let Some(around) = open.last_mut() {
            around.most = around.most.max(span.start.minus(around.start).plus(most));
        }
        Some(SpanMemory { n_calls: 1, most, kept })
    })
}

/// Returns the number of this thread, in the order of the first calls.
fn thread_number() -> u64 {
    use std::sync::atomic::AtomicU64;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

impl MemoryRecord {
    /// Returns the entries as a Chrome trace: spans, and a counter of the bytes in use.
    fn trace(&self, rank: usize) -> Value {
        let events = self.entries.iter().flat_map(|entry| {
            let MemoryEntry { microseconds, name, boundary, thread, bytes } = entry;
            let args = json!({ "host_bytes": bytes.host, "device_bytes": bytes.device });
            let phase = match boundary {
                SpanBoundary::Begin => "B",
                SpanBoundary::End => "E",
            };
            let span =
                json!({ "name": name, "ph": phase, "ts": microseconds, "pid": rank, "tid": thread, "args": args });
            let counter = json!({ "name": "bytes in use", "ph": "C", "ts": microseconds, "pid": rank, "args": args });
            [span, counter]
        });
        let others = json!({ "dropped_entries": self.n_dropped, "host_bytes": "since the start of the profile" });
        json!({ "traceEvents": events.collect::<Vec<_>>(), "otherData": others })
    }

    /// Returns a row for each span name: the largest rise first.
    fn table(&self) -> String {
        let mut rows: Vec<_> = self.totals.iter().collect();
        rows.sort_by_key(|(name, row)| (std::cmp::Reverse(row.most.host.max(row.most.device)), *name));
        let title = ["calls", "host rise", "host kept", "GPU rise", "GPU kept"];
        let mut text = format!(
            "{:>9} {:>12} {:>12} {:>12} {:>12}  span (MiB)\n",
            title[0], title[1], title[2], title[3], title[4]
        );
        let mib = |bytes: i64| bytes as f64 / f64::from(1 << 20);
        for (name, SpanMemory { n_calls, most, kept }) in rows {
            let numbers = [most.host, kept.host, most.device, kept.device].map(mib);
            let [host, host_kept, device, device_kept] = numbers;
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{n_calls:>9} {host:>12.3} {host_kept:>12.3} {device:>12.3} {device_kept:>12.3}  {name}"
            );
        }
        let (host, device) = (mib(self.peak.host), mib(self.peak.device));
        let _ = writeln!(
            text,
            "peak: {host:.3} MiB of host memory since the start of the profile, {device:.3} MiB of the GPU"
        );
        if self.n_dropped > 0 {
            let _ =
                writeln!(text, "the trace lacks the {} oldest entries; raise mem_profiler_max_entries", self.n_dropped);
        }
        text
    }
}

/// The tracing layer that samples the memory.
pub(super) struct MemorySampler(Arc<MemoryProfiler>);

/// The name of a span, and true if its start was recorded.
struct SampledSpan {
    name: SpanName,
    has_begun: bool,
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for MemorySampler {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut name = SpanName::default();
        attributes.record(&mut name);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(SampledSpan { name, has_begun: false });
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        if !self.0.is_recording.load(Ordering::Relaxed) {
            return;
        }
        let Some(span) = context.span(id) else { return };
        if let Some(sampled) = span.extensions_mut().get_mut::<SampledSpan>() {
            self.0.begin(&sampled.name.0);
            sampled.has_begun = true;
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(SampledSpan { name, has_begun: true }) = span.extensions().get::<SampledSpan>() {
            self.0.end(&name.0);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn at(host: i64) -> BytesInUse {
        BytesInUse { host, device: 0 }
    }

    #[test]
    fn a_span_rises_with_the_spans_within_it() {
        let dir = tempfile::tempdir().unwrap();
        let plan = MemoryProfilePlan { mode: MemProfiler::E2e, dir: dir.path().into(), max_entries: 3 };
        let profiler = MemoryProfiler::new(&plan, 2, Arc::default());
        open_span(at(100));
        open_span(at(150));
        let inner = close_span(at(950)).unwrap();
        assert_eq!(inner, SpanMemory { n_calls: 1, most: at(800), kept: at(800) });
        let outer = close_span(at(120)).unwrap();
        assert_eq!(outer, SpanMemory { n_calls: 1, most: at(850), kept: at(20) });
        for (boundary, bytes, closed) in [
            (SpanBoundary::Begin, 100, None),
            (SpanBoundary::Begin, 150, None),
            (SpanBoundary::End, 950, Some(inner)),
            (SpanBoundary::End, 120, Some(outer)),
        ] {
            profiler.add("step", boundary, at(bytes), closed);
        }
        profiler.finish().unwrap();
        let trace: Value = serde_json::from_slice(&std::fs::read(dir.path().join("2.json")).unwrap()).unwrap();
        assert_eq!(trace["traceEvents"].as_array().unwrap().len(), 2 * 3);
        assert_eq!(trace["otherData"]["dropped_entries"], 1);
        let table = std::fs::read_to_string(dir.path().join("2.txt")).unwrap();
        let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!((row[0], row[5]), ("2", "step"), "{table}");
    }
}
