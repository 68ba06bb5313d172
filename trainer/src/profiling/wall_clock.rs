//! `deepspeed.wall_clock_breakdown`: the time of each phase of a step, with DeepSpeed's names.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Device;
use tracing::Subscriber;
use tracing::span::{Attributes, Id};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::span_name::SpanName;
use crate::metrics::WallClockTimes;

/// A phase of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimedPhase {
    Forward,
    Backward,
    GradientReduction,
    Optimizer,
}

/// The times since the last report.
pub(super) struct WallClock {
    device: Arc<OnceLock<Device>>,
    times: Mutex<WallClockTimes>,
}

impl TimedPhase {
    fn of(span: &str) -> Option<Self> {
        match span {
            "micro-batch forward" => Some(Self::Forward),
            "micro-batch backward" => Some(Self::Backward),
            "gradient reduction" => Some(Self::GradientReduction),
            "optimizer" => Some(Self::Optimizer),
            _ => None,
        }
    }
}

impl WallClock {
    pub(super) fn new(device: Arc<OnceLock<Device>>) -> Self {
        Self { device, times: Mutex::default() }
    }

    pub(super) fn take(&self) -> WallClockTimes {
        std::mem::take(&mut *self.times.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn layer(self: &Arc<Self>) -> PhaseTimer {
        PhaseTimer(self.clone())
    }

    /// Waits for the device, so that a phase's time contains its kernels.
    fn synchronize(&self) {
        // An error of the device is reported by the next operation on it.
        let _ = self.device.get().map(Device::synchronize);
    }

    fn add(&self, phase: TimedPhase, time: Duration) {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let total = match phase {
            TimedPhase::Forward => &mut times.fwd,
            TimedPhase::Backward => &mut times.bwd,
            TimedPhase::GradientReduction => &mut times.bwd_allreduce,
            TimedPhase::Optimizer => &mut times.step,
        };
        *total += time.as_secs_f64() * 1e3;
    }
}

/// The tracing layer that times the phases.
pub(super) struct PhaseTimer(Arc<WallClock>);

/// A phase that is running, and its start.
struct RunningPhase(TimedPhase, Option<Instant>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for PhaseTimer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut name = SpanName::default();
        attributes.record(&mut name);
        if let (Some(phase), Some(span)) = (TimedPhase::of(&name.0), context.span(id)) {
            span.extensions_mut().insert(RunningPhase(phase, None));
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(running) = span.extensions_mut().get_mut::<RunningPhase>() {
            self.0.synchronize();
            running.1 = Some(Instant::now());
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(RunningPhase(phase, Some(started))) = span.extensions().get::<RunningPhase>() {
            self.0.synchronize();
            self.0.add(*phase, started.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use candlewick_ops::span;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn phases_are_added_up_until_they_are_taken() {
        let wall_clock = Arc::new(WallClock::new(Arc::default()));
        let subscriber = tracing_subscriber::registry().with(wall_clock.layer());
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..2 {
                let _forward = span("micro-batch", "forward");
                let _inner = span("linear", "forward");
                std::thread::yield_now();
            }
            let _optimizer = span("optimizer", "");
        });
        let times = wall_clock.take();
        assert!(times.fwd > 0.0 && times.step > 0.0, "{times:?}");
        assert_eq!((times.bwd, times.bwd_allreduce), (0.0, 0.0));
        assert_eq!(wall_clock.take(), WallClockTimes::default());
    }
}
