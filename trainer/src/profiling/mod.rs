//! Measurements of a run by its profiling spans ([`candlewick_ops::span`]): times of phases, and memory over time.
//!
//! A recipe turns them on. `trainer train --profile` is another one (`cli::profile`).

mod memory;
mod span_name;
mod wall_clock;

use std::io;
use std::sync::{Arc, OnceLock};

use candle_core::Device;
use candlewick_ops::PROFILE_TARGET;
use tracing::Metadata;
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::{Layer, Registry};

use crate::metrics::WallClockTimes;
use crate::plan::ProfilingPlan;
use crate::recipe::MemProfiler;

use memory::MemoryProfiler;
use wall_clock::WallClock;

/// A tracing layer of any type.
pub type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// The measurements of this process. Clones share them.
#[derive(Clone, Default)]
pub struct Instruments {
    device: Arc<OnceLock<Device>>,
    wall_clock: Option<Arc<WallClock>>,
    memory: Option<Arc<MemoryProfiler>>,
}

impl Instruments {
    /// Creates the measurements that `plan` turns on, for one rank.
    pub fn new(plan: &ProfilingPlan, rank: usize) -> Self {
        let device = Arc::new(OnceLock::new());
        let wall_clock = plan.wall_clock_breakdown.then(|| Arc::new(WallClock::new(device.clone())));
        let memory = plan.memory.as_ref().map(|plan| Arc::new(MemoryProfiler::new(plan, rank, device.clone())));
        if let Some(memory) = memory.as_ref().filter(|memory| memory.mode() == MemProfiler::E2e) {
            memory.start();
        }
        Self { device, wall_clock, memory }
    }

    /// Returns the tracing layers that observe the spans.
    pub fn layers(&self) -> Vec<BoxedLayer> {
        let is_profiled = || FilterFn::new(is_profiled as fn(&Metadata<'_>) -> bool);
        let wall_clock = self.wall_clock.iter().map(|it| Box::new(it.layer().with_filter(is_profiled())) as BoxedLayer);
        let memory = self.memory.iter().map(|it| Box::new(it.layer().with_filter(is_profiled())) as BoxedLayer);
        wall_clock.chain(memory).collect()
    }

    /// Sets the device whose work is measured.
    pub fn set_device(&self, device: &Device) {
        // A second run in a process (tests) measures the first device.
        let _ = self.device.set(device.clone());
    }

    /// Marks the start of the training loop.
    pub fn begin_training(&self) {
        if let Some(memory) = self.memory.as_ref().filter(|memory| memory.mode() == MemProfiler::Step) {
            memory.start();
        }
    }

    /// Returns the times since the last call, if they are measured.
    pub fn take_wall_clock(&self) -> Option<WallClockTimes> {
        self.wall_clock.as_ref().map(|wall_clock| wall_clock.take())
    }

    /// Writes the files of the measurements. Returns a line for each.
    pub fn finish(&self) -> io::Result<Vec<String>> {
        self.memory.iter().map(|memory| memory.finish()).collect()
    }
}

fn is_profiled(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && metadata.target() == PROFILE_TARGET
}
