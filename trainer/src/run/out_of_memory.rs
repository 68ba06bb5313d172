//! The report of a run for which the device had too little memory.

use std::fmt;

use anyhow::Error;
use candle_core::{Device, DeviceLocation};
use candlewick_ops::{DeviceChoice, DeviceMemory, device_memory, is_out_of_memory};
use candlewick_parallel::StoreBytes;

use crate::estimate::{Capacity, ComputeDevice, EstimateReport, Setup, bytes, estimate};
use crate::plan::Plan;

/// The memory of a run whose device had too little of it.
struct MemoryReport {
    device: DeviceChoice,
    measured: Option<DeviceMemory>,
    /// Bytes of the parameters; `None` if they were being allocated.
    parameters: Option<StoreBytes>,
    /// The estimate, and settings that need less; `None` if the plan cannot be estimated.
    estimate: Option<EstimateReport>,
}

/// Adds a report to `error` if it is a failed allocation on `device`: bytes in use by class, the estimate, and the settings that
/// would have fitted.
pub(super) fn explain(error: Error, plan: &Plan, device: &Device, parameters: Option<StoreBytes>) -> Error {
    if !error.chain().any(is_out_of_memory) {
        return error;
    }
    let measured = device_memory(device);
    let (compute_device, device) = match device.location() {
        DeviceLocation::Cuda { gpu_id } => (ComputeDevice::Gpu, DeviceChoice::Cuda(gpu_id)),
        _ => (ComputeDevice::Cpu, DeviceChoice::Cpu),
    };
    let estimate = estimated(plan, compute_device, device, measured);
    error.context(MemoryReport { device, measured, parameters, estimate }.to_string())
}

/// Estimates the plan and compares it with the device. Where the estimate fits and the run did not, it is compared with nine
/// tenths of itself, so that settings that need less are advised.
fn estimated(
    plan: &Plan,
    compute_device: ComputeDevice,
    device: DeviceChoice,
    measured: Option<DeviceMemory>,
) -> Option<EstimateReport> {
    let setup = Setup::of(plan, compute_device).ok()?;
    let estimated = estimate(&setup).peak_bytes();
    let (room, name) = match measured {
        Some(DeviceMemory { total_bytes, .. }) if total_bytes < estimated => (total_bytes, device.to_string()),
        _ => (estimated / 10 * 9, "90% of the estimate, which was too low".to_owned()),
    };
    Some(EstimateReport::new(
        plan.recipe.display().to_string(),
        &setup,
        &Capacity::of(compute_device, Some(room), name),
    ))
}

impl MemoryReport {
    /// Lists the bytes in use by class.
    fn checkpoint_in_use(&self) -> Vec<(&'static str, u64)> {
        let StoreBytes { weights, masters, gradients, moments } = self.parameters.unwrap_or_default();
        let known = [
            ("weights", weights),
            ("master weights", masters),
            ("gradients", gradients),
            ("optimizer moments", moments),
        ];
        let rest = self
            .measured
            .zip(self.parameters)
            .map_or(0, |(memory, parameters)| memory.peak_bytes.saturating_sub(parameters.total()));
        let all = known.into_iter().chain([("activations and scratch", rest)]);
        all.filter(|(_, n_bytes)| *n_bytes > 0).collect()
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory on {}", self.device)?;
        if let Some(DeviceMemory { peak_bytes, total_bytes }) = self.measured {
            write!(f, ": {} of {} were in use", bytes(peak_bytes), bytes(total_bytes))?;
        }
        for (class, n_bytes) in self.checkpoint_in_use() {
            write!(f, "\n  {class:<24}{:>11}", bytes(n_bytes))?;
        }
        match &self.estimate {
            Some(estimate) => write!(f, "\nestimate: {}", estimate.to_string().trim_end()),
            None => Ok(()),
        }
    }
}
