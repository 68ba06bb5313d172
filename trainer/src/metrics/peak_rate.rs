//! Peak rate of matmuls, and model FLOPs utilization (MFU) relative to it.

use candle_core::DType;

/// Highest known rate of matmuls of the training device in the training dtype.
#[derive(Clone, Copy)]
pub struct PeakRate {
    flops_per_second: f64,
    /// Measurement, and its dtype.
    measure: Option<(MeasureRate, DType)>,
}

/// Measurement of matmuls in a dtype: the best reading of the process, in FLOPs per second.
type MeasureRate = fn(DType) -> f64;

impl PeakRate {
    /// Returns the peak of a data sheet, in FLOPs per second.
    pub fn rated(flops_per_second: f64) -> Self {
        Self { flops_per_second, measure: None }
    }

    /// Measures the peak of matmuls in `dtype`.
    pub fn measured(measure: MeasureRate, dtype: DType) -> Self {
        Self { flops_per_second: measure(dtype), measure: Some((measure, dtype)) }
    }

    /// Returns the model FLOPs utilization: useful FLOPs over time and peak. `flops` must not include recomputation.
    ///
    /// If a step is faster than the peak, the peak is too low. It is then measured again, and is at least the step's rate.
    pub fn utilization(&mut self, flops: f64, seconds: f64) -> f64 {
        let rate = flops / seconds;
        if let (true, Some((measure, dtype))) = (rate > self.flops_per_second, self.measure) {
            self.flops_per_second = self.flops_per_second.max(measure(dtype));
        }
        self.flops_per_second = self.flops_per_second.max(rate);
        rate / self.flops_per_second
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn mfu_is_flops_over_time_over_the_peak() {
        let mut peak = PeakRate::rated(6e12);
        assert_eq!(peak.utilization(3e12, 2.0), 0.25);
    }

    #[test]
    fn a_step_that_is_faster_than_the_peak_raises_it_for_later_steps() {
        let mut peak = PeakRate::rated(6e12);
        assert_eq!(peak.utilization(12e12, 1.0), 1.0);
        assert_eq!(peak.utilization(6e12, 1.0), 0.5);
    }

    /// A busy machine gives a peak that is too low. The step shows it, and the new reading is 10 TFLOP/s.
    #[test]
    fn a_measured_peak_that_is_too_low_is_measured_again() {
        static READING: AtomicU64 = AtomicU64::new(5);
        let mut peak = PeakRate::measured(|_| READING.load(Ordering::Relaxed) as f64 * 1e12, DType::F32);
        assert_eq!(peak.utilization(4e12, 1.0), 0.8);
        READING.store(10, Ordering::Relaxed);
        assert_eq!(peak.utilization(5e12, 1.0), 1.0);
        assert_eq!(peak.utilization(8e12, 1.0), 0.8);
        READING.store(1, Ordering::Relaxed);
        assert_eq!(peak.utilization(20e12, 1.0), 1.0);
        assert_eq!(peak.utilization(5e12, 1.0), 0.25);
    }
}
